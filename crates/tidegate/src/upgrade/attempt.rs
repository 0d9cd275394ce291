//! One upgrade, as the old process sees it.

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tidegate_accelerator::{Outdated, Tidings, Whose};

use super::protocol::{Said, Secrets, Sockets, Stage, Told, to_hex};
use super::wire::{Link, LinkError, MAX_DESCRIPTORS, borrowed};
use super::{REAP_INTERVAL, Upgraded, Upgrader, lock};
use crate::notify;
use crate::run::classes;

/// Until the program has said that it is a tidegate.
const HERE_TIMEOUT: Duration = Duration::from_secs(10);
/// Until it has read its configuration and looked for its servers.
const PREPARED_TIMEOUT: Duration = Duration::from_secs(60);
/// Until it serves, besides the time that its cache takes.
const SERVING_TIMEOUT: Duration = Duration::from_secs(60);
/// A cache is read at this rate at least.
const CACHE_BYTES_PER_S: u64 = 100 << 20;
/// The most of all waits together, whatever the size of the cache.
const MOST: Duration = Duration::from_secs(12 * 60);
/// How long a process that has closed its end is given to end by itself.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// What the new process was given, and is to be taken back should it fail.
#[derive(Default)]
struct Given {
    cache: bool,
    programs: bool,
}

/// The conversation with the new process.
struct Talk {
    link: Arc<Link>,
    stage: Stage,
    version: String,
    until: Instant,
}

/// Why the new process does not serve.
enum Fault {
    /// It, or this process, says why.
    Because(String),
    /// It has gone without a word.
    Gone,
}

impl<E: std::fmt::Display> From<E> for Fault {
    fn from(error: E) -> Self {
        Self::Because(error.to_string())
    }
}

impl Talk {
    /// Waits until the new process has come so far.
    fn expect(&mut self, stage: Stage, patience: Duration) -> Result<(), Fault> {
        let patience = patience.min(self.until.saturating_duration_since(Instant::now()));
        // What the new process may send is nothing but words.
        let (said, _): (Said, Vec<OwnedFd>) = match self.link.receive(Some(patience)) {
            Err(LinkError::Ended) => return Err(Fault::Gone),
            other => other?,
        };
        if let Said::Here { version, .. } = &said {
            self.version = version.chars().filter(|c| c.is_ascii_graphic()).take(40).collect();
        }
        self.stage = self.stage.next(&said)?;
        if self.stage != stage {
            return Err(super::protocol::Broken::OutOfOrder.into());
        }
        Ok(())
    }

    fn tell(&self, told: &Told, descriptors: &[BorrowedFd<'_>]) -> Result<(), Fault> {
        match self.link.send(told, descriptors) {
            // It may have said why before it went.
            Err(LinkError::Ended) => match self.link.receive::<Said>(Some(Duration::ZERO)) {
                Ok((said, _)) => Err(self.stage.next(&said).err().map_or(Fault::Gone, Fault::from)),
                Err(_) => Err(Fault::Gone),
            },
            other => Ok(other?),
        }
    }
}

impl Upgrader {
    pub(super) fn attempt(&self) -> Result<Upgraded, String> {
        let (link, there) = Link::pair().map_err(|error| format!("cannot make a socket pair: {error}"))?;
        let child = self
            .program
            .start(there)
            .map_err(|error| format!("cannot start {}: {error}", self.program.path.display()))?;
        let pid = child.id();
        *lock(&self.child) = Some(child);
        let until = Instant::now() + MOST;
        let mut talk = Talk { link: Arc::new(link), stage: Stage::Started, version: String::new(), until };
        let mut given = Given::default();
        match self.hand_over(&mut talk, &mut given) {
            Ok(()) => {
                // From here on it lives as long as it likes.
                let child = lock(&self.child).take();
                if self.is_still_wanted().is_err() {
                    // Whoever has asked this process to end means the one in its place.
                    pass_on_end(child.as_ref());
                }
                // What comes by datagrams is the new one's: the data cores here soon answer nothing new. In the format
                // of TCP it waits for this.
                self.reloader.trickles.stop();
                notify::handed_over(pid);
                // One that has ended since is missed by whoever looks after this service.
                let _ = talk.link.send(&Told::Farewell, &[]);
                Ok(Upgraded { pid, version: talk.version })
            }
            Err(fault) => {
                let why = match fault {
                    Fault::Because(why) => why,
                    Fault::Gone => self.exit_of_child(),
                };
                self.take_back(&given);
                Err(why)
            }
        }
    }

    fn hand_over(&self, talk: &mut Talk, given: &mut Given) -> Result<(), Fault> {
        talk.expect(Stage::Here, HERE_TIMEOUT)?;
        self.offer(talk)?;
        talk.expect(Stage::Prepared, PREPARED_TIMEOUT)?;
        self.is_still_wanted()?;
        self.give_cache(talk, given)?;
        let patience = SERVING_TIMEOUT + self.time_for_cache();
        talk.expect(Stage::Serving, patience)?;
        self.is_still_wanted()?;
        given.programs = true;
        let gatekeeper = self.reloader.gatekeeper();
        gatekeeper.let_go()?;
        talk.tell(&Told::Go, &[gatekeeper.blocks()?.as_fd()])?;
        talk.expect(Stage::Succeeded, patience)
    }

    /// A signal may have begun a drain.
    fn is_still_wanted(&self) -> Result<(), Fault> {
        match self.reloader.engine().is_draining() {
            true => Err(Fault::Because("tidegate is draining".into())),
            false => Ok(()),
        }
    }

    fn time_for_cache(&self) -> Duration {
        let bytes = self.reloader.engine().store().map_or(0, |store| store.stats().capacity_bytes);
        Duration::from_secs(bytes / CACHE_BYTES_PER_S)
    }

    /// Sends every listening socket.
    fn offer(&self, talk: &Talk) -> Result<(), Fault> {
        let part = |address: SocketAddr, of: Sockets, sockets: &[BorrowedFd<'_>]| {
            sockets
                .chunks(MAX_DESCRIPTORS)
                .try_for_each(|sockets| talk.tell(&Told::Part { address, of }, sockets))
        };
        for listening in self.reloader.engine().listening()? {
            let of = match listening.whose {
                Whose::Cores => Sockets::Cores,
                Whose::Classes => Sockets::Classes,
                Whose::Dhttp => Sockets::Dhttp,
                Whose::Http3 => Sockets::Http3,
            };
            part(listening.address, of, &borrowed(&listening.sockets))?;
        }
        for listener in self.reloader.trickles.hand_over()? {
            part(listener.listen, Sockets::Trickles, &borrowed(&listener.sockets))?;
        }
        let (address, admin) = &self.admin;
        part(*address, Sockets::Admin, &[admin.as_fd()])?;
        talk.tell(&Told::Offer, &[])
    }

    /// From here on nothing is stored, and nothing ordered.
    fn give_cache(&self, talk: &Talk, given: &mut Given) -> Result<(), Fault> {
        let engine = self.reloader.engine();
        given.cache = true;
        self.reloader.acme.pause(true);
        let tidings = engine.tidings();
        let link = Arc::clone(&talk.link);
        let teller = std::thread::Builder::new().name("tidings".into());
        *lock(&self.teller) = Some(teller.spawn(move || tell(&link, tidings))?);
        let cache = engine.freeze()?;
        let blocks: File = self.reloader.gatekeeper().blocks()?;
        let mut descriptors = vec![blocks.as_fd()];
        if let Some(cache) = &cache {
            descriptors.extend([cache.arena.as_fd(), cache.taken.0.as_fd()]);
            descriptors.extend(cache.lock.as_ref().map(File::as_fd));
        }
        let made_of =
            |listener: crate::trickles::HandedListener| Some((listener.listen, to_hex(&listener.made_of?)));
        let secrets = Secrets {
            dhttp_tokens: to_hex(&engine.dhttp_token_secret()),
            quic_tokens: to_hex(&engine.quic_token_secret()),
            challenges: self.reloader.guard.as_ref().map_or(String::new(), |guard| to_hex(&guard.key())),
            trickles: self.reloader.trickles.hand_over()?.into_iter().filter_map(made_of).collect(),
        };
        talk.tell(&Told::Yours { has_cache: cache.is_some(), secrets }, &descriptors)
    }

    /// The new process has failed: everything is this one's again.
    fn take_back(&self, given: &Given) {
        let has_ended = self.end_child();
        let engine = self.reloader.engine();
        engine.tell_nobody();
        if let Some(teller) = lock(&self.teller).take() {
            // A panic there has been printed; there is nothing to add.
            let _ = teller.join();
        }
        if given.cache {
            self.reloader.acme.pause(false);
            if has_ended {
                engine.store_again();
            } else {
                tracing::error!(
                    "the new process cannot be ended: nothing is stored any more, lest both store in one place"
                );
            }
        }
        if given.programs {
            let classes = classes(engine).unwrap_or_default();
            if let Err(error) = self.reloader.gatekeeper().attach(&classes, None) {
                tracing::error!("the rules go on in user space: {error}");
            }
        }
    }

    /// How the process has ended that has gone without a word.
    fn exit_of_child(&self) -> String {
        let until = Instant::now() + EXIT_TIMEOUT;
        while Instant::now() < until {
            let status = lock(&self.child).as_mut().and_then(|child| child.try_wait().ok().flatten());
            if let Some(status) = status {
                return format!("the new process ended before it served ({})", describe(status));
            }
            std::thread::sleep(REAP_INTERVAL);
        }
        "the new process left the conversation before it served".into()
    }
}

/// Has the new process end as this one does.
fn pass_on_end(child: Option<&Child>) {
    let pid = child.and_then(|child| Pid::from_raw(i32::try_from(child.id()).ok()?));
    if let Some(pid) = pid {
        // One that has ended already is what is wanted.
        let _ = kill_process(pid, Signal::TERM);
    }
}

fn describe(status: ExitStatus) -> String {
    // "exit status: 1", "signal: 9 (SIGKILL)"
    status.to_string()
}

/// Tells the new process what is outdated, until there is nobody to tell.
fn tell(link: &Link, tidings: Tidings) {
    for outdated in tidings {
        let told = match outdated {
            Outdated::Url(key) => Told::Outdated { key: Some(to_hex(&key)), everything: false },
            Outdated::OnItsWay => Told::Outdated { key: None, everything: false },
            Outdated::Everything => Told::Outdated { key: None, everything: true },
        };
        if let Err(error) = link.send(&told, &[]) {
            tracing::debug!(%error, "the new process is not told any more what is outdated");
            return;
        }
    }
}
