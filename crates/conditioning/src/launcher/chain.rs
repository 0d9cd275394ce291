//! A chain while it runs: its processes, its links, and what mends them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal};

use super::children::{self, Child, FilterProcess, Signals, reap_descendants};
use super::{FilterSpec, LaunchError, PATIENCE, plan};
use crate::ledger::{Ledger, Tended};
use crate::link;
use crate::neighbours::{say, word};

/// How many times in a row a filter may die before it is ready.
const FRUITLESS_STARTS: u32 = 5;

/// Whether a signal asks the server to end; the others are passed on for what they mean to the server.
pub(super) fn ends(signal: Signal) -> bool {
    matches!(signal, Signal::TERM | Signal::INT | Signal::QUIT)
}

/// The chain while it runs.
pub(super) struct Chain {
    pub filters: Vec<FilterProcess>,
    pub signals: Signals,
    pub ledger: Ledger,
    pub ledger_file: OwnedFd,
    server_end: Option<OwnedFd>,
    /// What the server's processes ask, if they are reached so.
    pub questions: Option<OwnedFd>,
}

impl Chain {
    pub(super) fn start(
        filters: &[FilterSpec],
        program: &std::path::Path,
        listeners: Vec<OwnedFd>,
    ) -> Result<Self, LaunchError> {
        let system = |error| LaunchError::System("socketpair", error);
        let (filter_end, server_end) = link::pair().map_err(system)?;
        let ledger = Ledger::create().map_err(|error| LaunchError::System("ledger", error))?;
        Self::start_with(filters, program, listeners, filter_end, Some(server_end), ledger)
    }

    pub(super) fn start_with(
        filters: &[FilterSpec],
        program: &std::path::Path,
        mut listeners: Vec<OwnedFd>,
        filter_end: OwnedFd,
        server_end: Option<OwnedFd>,
        (ledger, ledger_file): (Ledger, OwnedFd),
    ) -> Result<Self, LaunchError> {
        let signals = Signals::take().map_err(|error| LaunchError::System("signalfd", error))?;
        let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
        let mut chain =
            Self { filters: Vec::new(), signals, ledger, ledger_file, server_end, questions: None };
        let mut upstream: Option<OwnedFd> = None;
        let mut last = Some(filter_end);
        let processes: Vec<_> = plan::processes(filters).collect();
        for (at, specs) in processes.iter().enumerate() {
            let (downstream, next) = if at + 1 == processes.len() {
                (last.take(), None)
            } else {
                let (up, down) = link::pair().map_err(|error| LaunchError::System("socketpair", error))?;
                (Some(up), Some(down))
            };
            let Some(downstream) = downstream else { break };
            let upstream = std::mem::replace(&mut upstream, next);
            let filter = FilterProcess::new(
                specs.to_vec(),
                program,
                upstream,
                downstream,
                std::mem::take(&mut listeners),
            );
            chain.filters.push(filter);
        }
        let keeper = |filter: &FilterProcess| matches!(filter.name().as_str(), "package" | "persist");
        if let Some(last) = chain.filters.iter_mut().rfind(|filter| keeper(filter)) {
            last.keeps = true;
        }
        if let Some(last) = chain.filters.last_mut() {
            last.is_last = true;
        }
        for at in 0..chain.filters.len() {
            chain.filters[at].start(&chain.ledger_file)?;
        }
        chain.await_ready()?;
        Ok(chain)
    }

    fn await_ready(&mut self) -> Result<(), LaunchError> {
        let deadline = Instant::now() + PATIENCE;
        while let Some(waiting) = self.filters.iter().find(|filter| !filter.is_ready) {
            if Instant::now() >= deadline {
                return Err(LaunchError::FilterSilent { name: waiting.name() });
            }
            self.wait(None, Duration::from_millis(100));
            for filter in &mut self.filters {
                filter.hear();
                if !filter.is_ready
                    && let Some(status) = filter.has_ended()
                {
                    return Err(LaunchError::FilterExited { name: filter.name(), status });
                }
            }
            if self.signals.next().is_some_and(ends) {
                return Err(LaunchError::System("start", io::ErrorKind::Interrupted.into()));
            }
        }
        Ok(())
    }

    pub(super) fn take_server_end(&mut self) -> Option<OwnedFd> {
        self.server_end.take()
    }

    /// Waits for a signal, a filter's word or end, or the command's end; whether all of the server's processes have
    /// ended.
    pub(super) fn wait(&self, command: Option<&Child>, timeout: Duration) -> bool {
        let mut watched = vec![PollFd::new(&self.signals, PollFlags::IN)];
        for filter in &self.filters {
            watched.extend(filter.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        }
        if let Some(command) = command {
            watched.push(PollFd::from_borrowed_fd(command.pidfd(), PollFlags::IN));
        }
        // Only its hang-up is of interest: the server's processes are gone. Where they ask, this process has the other
        // end of the link, and the last of them takes its questions with it once it has been collected.
        let last_link = self.filters.last().map(FilterProcess::downstream);
        let last_link = self.questions.as_ref().map(AsFd::as_fd).or(last_link);
        if let Some(link) = last_link {
            watched.push(PollFd::from_borrowed_fd(link, PollFlags::empty()));
        }
        let timeout = rustix::time::Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let _ = poll(&mut watched, Some(&timeout));
        last_link.is_some() && watched.last().is_some_and(|link| link.revents().contains(PollFlags::HUP))
    }

    /// Has the filters say what they have counted.
    pub(super) fn tell_counters(&self) {
        self.filters.iter().for_each(|filter| filter.say(word::COUNTERS));
    }

    /// What there is to do now and then: starts anew what died, and looks after the server's processes. `hung_up` says
    /// that those have ended; the `command` is somebody else's to collect. `last` is what was found the last time.
    pub(super) fn keep_whole(
        &mut self,
        hung_up: bool,
        command: Option<Pid>,
        last: &mut Option<Tended>,
    ) -> Result<(), LaunchError> {
        self.mend(hung_up)?;
        self.tend_turns(last, Instant::now());
        self.collect_orphans(command);
        Ok(())
    }

    /// Collects processes of the server's whose parents have ended.
    fn collect_orphans(&self, command: Option<Pid>) {
        let own = |pid| Some(pid) == command || self.filters.iter().any(|filter| filter.pid() == Some(pid));
        for pid in children::children().into_iter().filter(|&pid| !own(pid)) {
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
        }
    }

    /// Whether a request waits for the server.
    pub(super) fn has_unread(&self) -> bool {
        self.filters.last().is_some_and(|last| link::unread_bytes(last.downstream()) > 0)
    }

    /// Looks after the turns of the server's processes, if it is time to: signals, and what ends, come in between.
    /// `last` is what was found the last time.
    fn tend_turns(&self, last: &mut Option<Tended>, now: Instant) {
        if last.is_some_and(|last| !last.is_due(now)) {
            return;
        }
        let tended = self.ledger.turns().tend(self.has_unread(), crate::alive::is_alive, *last, now);
        if tended.has_died {
            self.hand_again(self.filters.len());
        }
        *last = Some(tended);
    }

    /// Has the filters before the one at `at` hand again what nobody has claimed. One of another origin may not keep
    /// what it handed on: those before it do it, too.
    fn hand_again(&self, at: usize) {
        for before in self.filters[..at].iter().rev() {
            before.say(word::HAND_AGAIN);
            if !before.is_program() {
                break;
            }
        }
    }

    /// Sends a signal to the command, or to what it left in the background.
    pub(super) fn tell_server(&self, signal: Signal) {
        let filters: Vec<_> = self.filters.iter().filter_map(FilterProcess::pid).collect();
        for pid in children::children().into_iter().filter(|pid| !filters.contains(pid)) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Starts anew what died, and has the neighbours hand again what it held.
    fn mend(&mut self, hung_up: bool) -> Result<(), LaunchError> {
        for at in 0..self.filters.len() {
            self.filters[at].hear();
            // The last filter ends when the server has: so will the chain, in a moment.
            if hung_up && at + 1 == self.filters.len() {
                continue;
            }
            self.filters[at].end_if_late(Instant::now());
            if let Some(status) = self.filters[at].has_ended() {
                let filter = &mut self.filters[at];
                filter.fruitless = if filter.is_ready { 0 } else { filter.fruitless + 1 };
                if filter.fruitless >= FRUITLESS_STARTS {
                    return Err(LaunchError::FilterExited { name: filter.name(), status });
                }
                say(&format!("tidegate: filter {} ended ({status}), starting it again", filter.name()));
                filter.start(&self.ledger_file)?;
                self.hand_again(at);
            }
        }
        Ok(())
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        for filter in &mut self.filters {
            filter.end();
        }
        reap_descendants();
    }
}
