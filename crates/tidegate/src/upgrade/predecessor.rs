//! The process whose place this one takes.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::net::{SocketType, sockopt};
use tidegate_accelerator::{Engine, Handover, Listening, Outdated, Whose};
use tidegate_store::{Handed, Taken};

use super::program::PREDECESSOR;
use super::protocol::{Said, Secrets, Sockets, Told, VERSION, array_from_hex, from_hex};
use super::wire::{Link, LinkError};
use crate::gate;
use crate::trickles::HandedListener;

/// How long the process before is waited for where it has nothing to do but to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the farewell is waited for: the service manager may be slow.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(20);
/// Messages about listeners: more than a process has descriptors for.
const MOST_PARTS: usize = 1 << 16;

/// The process before, which waits until this one serves.
pub(crate) struct Predecessor {
    link: Link,
    offered: HashMap<(Sockets, SocketAddr), Vec<OwnedFd>>,
}

/// What it leaves to this process.
#[derive(Debug)]
pub(crate) struct Inheritance {
    pub engine: Handover,
    pub gate: gate::Handed,
    pub trickles: Vec<HandedListener>,
    /// What challenges are made with.
    pub challenge_key: Option<[u8; 32]>,
}

fn unexpected() -> io::Error {
    io::Error::other("the process before says what it should not")
}

fn failed(error: LinkError) -> io::Error {
    match error {
        LinkError::Io(error) => error,
        other => io::Error::other(other.to_string()),
    }
}

impl Predecessor {
    /// The process that has started this one to take its place; `None`: nobody has.
    pub(crate) fn find() -> io::Result<Option<Self>> {
        let named = std::env::var(PREDECESSOR).ok().and_then(|text| text.parse::<i32>().ok());
        let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
        if named.is_none() || named != parent {
            // A child of a child has the variable too, but not what they speak by.
            let is_link = named.is_some()
                && sockopt::socket_type(std::io::stdin()).is_ok_and(|kind| kind == SocketType::SEQPACKET);
            return if is_link { Err(io::Error::other("the process before has ended")) } else { Ok(None) };
        }
        // Not where a descriptor of its own would come to lie.
        let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3)?;
        rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
        let mut predecessor = Self { link: Link::of(socket)?, offered: HashMap::new() };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        predecessor.say(&Said::Here { protocol: VERSION, version })?;
        for _ in 0..MOST_PARTS {
            match predecessor.hear(ANSWER_TIMEOUT)? {
                (Told::Part { address, of }, sockets) => {
                    predecessor.offered.entry((of, address)).or_default().extend(sockets);
                }
                (Told::Offer, _) => return Ok(Some(predecessor)),
                _ => return Err(unexpected()),
            }
        }
        Err(unexpected())
    }

    fn say(&self, said: &Said) -> io::Result<()> {
        self.link.send(said, &[]).map_err(failed)
    }

    fn hear(&self, patience: Duration) -> io::Result<(Told, Vec<OwnedFd>)> {
        self.link.receive(Some(patience)).map_err(failed)
    }

    /// The socket of the admin server, if it is to listen where it did.
    pub(crate) fn admin(&mut self, address: SocketAddr) -> Option<TcpListener> {
        let sockets = self.offered.remove(&(Sockets::Admin, address))?;
        sockets.into_iter().next().map(TcpListener::from)
    }

    /// The configuration is good. From here on the process before stores nothing.
    pub(crate) fn inherit(&mut self) -> io::Result<Inheritance> {
        self.say(&Said::Prepared)?;
        let (has_cache, secrets, descriptors) = loop {
            match self.hear(ANSWER_TIMEOUT)? {
                (Told::Yours { has_cache, secrets }, descriptors) => break (has_cache, secrets, descriptors),
                // Nothing is stored here, and nothing on its way.
                (Told::Outdated { .. }, _) => {}
                _ => return Err(unexpected()),
            }
        };
        let mut files = descriptors.into_iter().map(File::from);
        let blocks = files.next().ok_or_else(unexpected)?;
        let store = match (has_cache, files.next(), files.next()) {
            (false, ..) => None,
            (true, Some(arena), Some(taken)) => {
                Some(Handed { arena, taken: Taken(taken), lock: files.next() })
            }
            (true, ..) => return Err(unexpected()),
        };
        Ok(self.sort(store, blocks, &secrets))
    }

    fn sort(&mut self, store: Option<Handed>, blocks: File, secrets: &Secrets) -> Inheritance {
        let mut engine = Handover {
            store,
            listening: Vec::new(),
            dhttp_token_secret: array_from_hex(&secrets.dhttp_tokens),
            quic_token_secret: array_from_hex(&secrets.quic_tokens),
        };
        let mut gate = gate::Handed { classes: Vec::new(), blocks };
        let mut trickles = Vec::new();
        for ((of, address), sockets) in self.offered.drain() {
            let mut listening = |whose, sockets| engine.listening.push(Listening { address, whose, sockets });
            match of {
                Sockets::Cores => listening(Whose::Cores, sockets),
                Sockets::Dhttp => listening(Whose::Dhttp, sockets),
                Sockets::Http3 => listening(Whose::Http3, sockets),
                Sockets::Classes => {
                    gate.classes.push((address, sockets.into_iter().map(TcpListener::from).collect()));
                }
                Sockets::Trickles => {
                    let made_of = secrets.trickles.iter().find(|(of, _)| *of == address);
                    trickles.push(HandedListener {
                        listen: address,
                        sockets: sockets.into_iter().map(UdpSocket::from).collect(),
                        made_of: made_of.and_then(|(_, text)| array_from_hex(text)),
                    });
                }
                Sockets::Admin => {}
            }
        }
        Inheritance { engine, gate, trickles, challenge_key: array_from_hex(&secrets.challenges) }
    }

    /// Clients are served, and nothing is stored. Returns when there is no way back for the process before, with what is
    /// blocked now.
    pub(crate) fn relieve(&self, engine: &Engine) -> io::Result<File> {
        self.say(&Said::Serving)?;
        loop {
            match self.hear(ANSWER_TIMEOUT)? {
                (Told::Go, descriptors) => {
                    return descriptors.into_iter().next().map(File::from).ok_or_else(unexpected);
                }
                (Told::Outdated { key, everything }, _) => forget(engine, key.as_deref(), everything),
                _ => return Err(unexpected()),
            }
        }
    }

    /// This process has everything. Returns when the service manager knows, and the process before has let go of what
    /// only one process can have.
    pub(crate) fn succeed(self, engine: Engine, has_predecessor: Arc<AtomicBool>) -> io::Result<()> {
        // Whether or not the process before hears it, and whatever keeps the farewell: this one serves.
        let _ = self.say(&Said::Succeeded);
        while let Ok((Told::Outdated { key, everything }, _)) = self.hear(FAREWELL_TIMEOUT) {
            forget(&engine, key.as_deref(), everything);
        }
        // It drains now, and reads from these sockets no more.
        engine.take_over();
        has_predecessor.store(true, Ordering::SeqCst);
        std::thread::Builder::new().name("predecessor".into()).spawn(move || {
            loop {
                match self.link.receive(None) {
                    Ok((Told::Outdated { key, everything }, _)) => {
                        forget(&engine, key.as_deref(), everything)
                    }
                    Ok(_) | Err(LinkError::Garbage) => {}
                    Err(_) => break,
                }
            }
            engine.is_alone();
            has_predecessor.store(false, Ordering::SeqCst);
            tracing::info!("the process before has ended");
        })?;
        Ok(())
    }

    /// This process gives up.
    pub(crate) fn fail(&self, why: &str) {
        // Who is not there to hear it has not waited.
        let _ = self.say(&Said::Failed { why: why.chars().take(4096).collect() });
    }
}

fn forget(engine: &Engine, key: Option<&str>, everything: bool) {
    let outdated = match key {
        _ if everything => Outdated::Everything,
        None => Outdated::OnItsWay,
        // A key that cannot be read may be any.
        Some(key) => from_hex(key).map_or(Outdated::Everything, Outdated::Url),
    };
    engine.forget(&outdated);
}
