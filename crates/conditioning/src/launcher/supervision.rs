//! Stays with a chain and the server behind it, until that ends or is told to.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::chain::{Chain, ends};
use super::children::{Child, FilterProcess};
use super::{LaunchError, PATIENCE, Via};
use crate::ledger::Tended;
use crate::neighbours::say;

/// How long a command may serve already by a process in the background before it ends itself.
const GOING_TO_BACKGROUND: Duration = Duration::from_secs(1);
/// How often it is looked whether there is anything to be done, where nothing happens.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is looked whether the server listens by now.
const LOOK_FOR_LISTENER: Duration = Duration::from_millis(50);

/// A server that this process has started.
pub(super) struct Served<'c> {
    pub child: Child,
    pub port: u16,
    pub via: Via,
    /// How long it may take until it listens, and to accept its first client.
    pub limit: Duration,
    pub command: &'c [OsString],
    pub addresses: &'c [SocketAddr],
}

/// How far a server has come that this process has started.
pub(super) struct Supervision<'c> {
    chain: Chain,
    served: Served<'c>,
    started: Instant,
    is_announced: bool,
    /// The command has ended and left its work to processes in the background.
    is_in_background: bool,
    /// Since when it is to end.
    ending: Option<Instant>,
    /// Since when a request waits for a server that has never accepted one.
    in_vain_since: Option<Instant>,
    /// Signals that the command got of late.
    passed_on: Vec<(Signal, Instant)>,
    tended: Option<Tended>,
}

impl<'c> Supervision<'c> {
    pub(super) fn new(chain: Chain, served: Served<'c>) -> Self {
        Self {
            chain,
            served,
            started: Instant::now(),
            is_announced: false,
            is_in_background: false,
            ending: None,
            in_vain_since: None,
            passed_on: Vec::new(),
            tended: None,
        }
    }

    /// Returns the command's exit code when the server has ended.
    pub(super) fn run(mut self) -> Result<u8, LaunchError> {
        loop {
            let listens = self.chain.ledger.is_listening();
            if listens && !self.is_announced {
                self.announce();
                self.is_announced = true;
            }
            let command = (!self.is_in_background).then_some(&self.served.child);
            let hung_up = self.chain.wait(command, if listens { LOOK } else { LOOK_FOR_LISTENER });
            if let Some(code) = self.ended(hung_up)? {
                return Ok(code);
            }
            self.check_it_listens()?;
            self.check_it_accepts()?;
            self.pass_on_signals();
            if self.ending.is_some_and(|since| since.elapsed() > PATIENCE) {
                self.chain.tell_server(Signal::KILL);
            }
            let command = (!self.is_in_background).then(|| self.served.child.pid());
            self.chain.keep_whole(hung_up, command, &mut self.tended)?;
        }
    }

    /// Says who serves where. Not before the server does: what keeps it from that is the one line that is to be seen
    /// then.
    fn announce(&self) {
        let addresses: Vec<_> = self.served.addresses.iter().map(SocketAddr::to_string).collect();
        let filters: Vec<_> = self.chain.filters.iter().map(FilterProcess::name).collect();
        let command: Vec<_> = self.served.command.iter().map(|word| shown(&word.to_string_lossy())).collect();
        let (addresses, filters, command) = (addresses.join(", "), filters.join(", "), command.join(" "));
        say(&format!("tidegate: listening on {addresses}, through {filters}, for {command}"));
    }

    /// The exit code, if the server has ended. `hung_up` says whether all of its processes have.
    fn ended(&mut self, hung_up: bool) -> Result<Option<u8>, LaunchError> {
        let exit_code = match self.is_in_background {
            true if hung_up => 0,
            true => return Ok(None),
            false => match self.served.child.exit_code() {
                Some(code) => code,
                None => return Ok(None),
            },
        };
        let may_end = self.ending.is_some();
        // It left its work to processes of its own that have the server's end of the chain.
        if exit_code == 0 && !may_end && !self.is_in_background && !self.chain.wait(None, Duration::ZERO) {
            self.is_in_background = true;
            // Whom they were meant for was not this process's child then, and who got them was about to end.
            let late = self.passed_on.drain(..).filter(|(_, when)| when.elapsed() < GOING_TO_BACKGROUND);
            late.for_each(|(signal, _)| self.chain.tell_server(signal));
            return Ok(None);
        }
        if may_end || self.chain.ledger.is_listening() {
            return Ok(Some(exit_code));
        }
        let (command, port) = (self.served.name(), self.served.port);
        Err(LaunchError::CommandEnded { command, code: exit_code, port })
    }

    /// A server that does not listen where it should, in time, is ended.
    fn check_it_listens(&self) -> Result<(), LaunchError> {
        let Served { port, via, limit, .. } = self.served;
        if self.started.elapsed() < limit || self.chain.ledger.is_listening() {
            return Ok(());
        }
        self.chain.tell_server(Signal::KILL);
        let command = self.served.name();
        Err(match self.chain.ledger.other_port() {
            Some(other) => LaunchError::ListensElsewhere { command, port, other },
            None => LaunchError::NeverListened { command, port, seconds: limit.as_secs(), via },
        })
    }

    /// So is one that never accepts a client.
    fn check_it_accepts(&mut self) -> Result<(), LaunchError> {
        let Served { port, via, limit, .. } = self.served;
        if self.ending.is_some() || self.chain.ledger.accepts() {
            return Ok(());
        }
        if !self.chain.has_unread() {
            self.in_vain_since = None;
            return Ok(());
        }
        if self.in_vain_since.get_or_insert_with(Instant::now).elapsed() < limit {
            return Ok(());
        }
        self.chain.tell_server(Signal::KILL);
        Err(LaunchError::NeverAccepted { command: self.served.name(), port, seconds: limit.as_secs(), via })
    }

    fn pass_on_signals(&mut self) {
        while let Some(signal) = self.chain.signals.next() {
            if signal == Signal::USR1 {
                self.chain.tell_counters();
                continue;
            }
            // A second signal does not wait for the command.
            let again = self.ending.is_some() && ends(signal);
            self.chain.tell_server(if again { Signal::KILL } else { signal });
            if ends(signal) {
                self.ending.get_or_insert_with(Instant::now);
            } else if !self.is_in_background {
                self.passed_on.retain(|(_, when)| when.elapsed() < GOING_TO_BACKGROUND);
                self.passed_on.push((signal, Instant::now()));
            }
        }
    }
}

/// Stays with the chain of a server that somebody else has started, until that has ended or this process is told to.
pub(super) fn until_hung_up(mut chain: Chain) -> Result<(), LaunchError> {
    let mut tended = None;
    while !chain.wait(None, LOOK) {
        while let Some(signal) = chain.signals.next() {
            if signal == Signal::USR1 {
                chain.tell_counters();
            } else if ends(signal) {
                return Ok(());
            }
        }
        chain.keep_whole(false, None, &mut tended)?;
    }
    Ok(())
}

impl Served<'_> {
    fn name(&self) -> String {
        self.command.first().map_or_else(String::new, |command| command.to_string_lossy().into_owned())
    }
}

/// A word of a command as one would type it.
pub(super) fn shown(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) { word.to_owned() } else { format!("{word:?}") }
}
