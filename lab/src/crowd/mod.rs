//! Good clients at their own pace, and attackers beside them, on threads of the load's core.
//!
//! Every client has an address of its own within 127.0.0.0/8. What a client gets is counted second by second, so that it
//! can be compared with what it got before the attack.

mod flood;
mod good;
mod passers;
mod programs;
mod slow;
mod surge;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

pub use surge::{Group, Served, surge};

use crate::Error;
use crate::server::pin_to_load_core;

/// Good clients begin here.
const FIRST_GOOD: Ipv4Addr = Ipv4Addr::new(127, 80, 0, 1);
/// Attackers begin here.
const FIRST_BAD: Ipv4Addr = Ipv4Addr::new(127, 112, 0, 1);
/// The path of what takes an origin long.
pub const COSTLY: &str = "/costly";
/// What pages that good clients ask for begin with.
pub const GOOD: &str = "/object?p=";
/// Pages that good clients choose from.
const PAGES: usize = 20;
/// A good client that has no answer after that gives up, and tries again with its next request.
const PATIENCE: Duration = Duration::from_secs(1);
const GOOD_THREADS: u32 = 4;
/// An attacker whose connection was refused comes again after that.
const RETRY: Duration = Duration::from_millis(500);

/// What attackers do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Attack {
    /// Each asks as fast as it is answered.
    Flood,
    /// Each holds so many connections on which it keeps the server waiting.
    Slow {
        /// By what.
        kind: Slow,
        /// Connections of each attacker.
        connections: u32,
    },
    /// slowhttptest in each of its three ways, from the server's own address.
    Programs {
        /// Connections of each of the three.
        connections: u32,
    },
    /// As `Flood`, for so many seconds of every ten.
    Pulses {
        /// Seconds of attack.
        on_s: u64,
    },
    /// Each asks once and leaves, and comes again when all others have had their turn.
    Passers,
    /// As `Flood`, but each request is for a URL that nobody has asked for.
    RandomUrls,
    /// Each asks for what costs most, once in so many milliseconds.
    Costly {
        /// Between two requests of one attacker.
        every_ms: u64,
    },
    /// Each asks for one page once in so many milliseconds; their addresses are those next to good clients'.
    Neighbours {
        /// Between two requests of one attacker.
        every_ms: u64,
    },
    /// As `Flood`, and each says that it passes on the requests of good clients.
    Forged,
    /// Nobody attacks: there are only more good clients.
    Nobody,
}

/// How a connection keeps a server waiting.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Slow {
    /// A request head that comes byte by byte and never ends.
    Heads,
    /// A request's body that comes byte by byte and never ends.
    Bodies,
    /// It asks for much, again and again, and reads nothing.
    Readers,
}

impl Attack {
    /// How long an attacker waits after an answer.
    fn pause(self) -> Duration {
        match self {
            Self::Costly { every_ms } | Self::Neighbours { every_ms } => Duration::from_millis(every_ms),
            _ => Duration::ZERO,
        }
    }

    /// What it asks for.
    fn target(self, random: u64) -> String {
        match self {
            Self::RandomUrls => format!("/object?{random:x}"),
            Self::Costly { .. } => format!("{COSTLY}?{}", random % 1000),
            _ => "/object".to_owned(),
        }
    }

    /// The address of an attacker.
    fn source(self, index: u32) -> Ipv4Addr {
        match self {
            // Good clients are at most four in each network of 24 bits, at its start.
            Self::Neighbours { .. } => {
                Ipv4Addr::from((u32::from(FIRST_GOOD) & !0xff) + index / 60 * 256 + 10 + index % 60 * 4)
            }
            _ => Ipv4Addr::from(u32::from(FIRST_BAD) + index),
        }
    }
}

/// Who comes to a server, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    /// The server.
    pub server: SocketAddr,
    /// Good clients.
    pub good: u32,
    /// Requests of each, in a second.
    pub rate_per_s: u32,
    /// Good clients that come when the attack begins.
    pub crowd: u32,
    /// Attackers.
    pub attackers: u32,
    /// What they do.
    pub attack: Attack,
    /// Time before the attack.
    pub before: Duration,
    /// The attack's length.
    pub during: Duration,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Good clients' requests that were answered in time, for each second from the start.
    pub answered_per_s: Vec<u64>,
    /// Good clients' requests that were answered with a refusal, or whose connection was refused or ended, each second.
    pub refused_per_s: Vec<u64>,
    /// Requests of the crowd that were answered, and all that it made.
    pub crowd: (u64, u64),
    /// For how long each answer to a good client took, in milliseconds, during the attack.
    pub latencies_ms: Vec<f64>,
    /// The same of the crowd.
    pub crowd_latencies_ms: Vec<f64>,
    /// Attackers that had no answer, or for slow ones no open connection, in the last third of the attack.
    pub stopped: u32,
}

impl Seen {
    /// The mean of answered requests per second from `from` to `to`, in whole seconds from the start.
    pub fn rate(&self, from: usize, to: usize) -> f64 {
        let seconds = self.answered_per_s.get(from..to.min(self.answered_per_s.len())).unwrap_or(&[]);
        seconds.iter().sum::<u64>() as f64 / seconds.len().max(1) as f64
    }
}

struct Shared {
    scene: Scene,
    began: Instant,
    ended: AtomicBool,
}

impl Shared {
    fn attack_began(&self) -> bool {
        self.began.elapsed() >= self.scene.before
    }

    fn last_third(&self) -> bool {
        self.began.elapsed() >= self.scene.before + self.scene.during * 2 / 3
    }

    fn is_over(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }
}

/// What one thread of good clients has seen.
#[derive(Default)]
struct Counts {
    answered: Vec<u64>,
    refused: Vec<u64>,
    latencies_ms: Vec<f64>,
    asked: u64,
}

/// Plays a scene.
///
/// # Errors
/// When a thread cannot be started or the load's core is missing.
pub fn play(scene: Scene) -> Result<Seen, Error> {
    let shared = Arc::new(Shared { scene, began: Instant::now(), ended: AtomicBool::new(false) });
    let stopped = Arc::new(AtomicU64::new(0));
    let mut clients = Vec::new();
    let groups = [(0, scene.good, false), (scene.good, scene.crowd, true)];
    for (first, count, is_crowd) in groups {
        for thread in 0..GOOD_THREADS.min(count) {
            let shared = Arc::clone(&shared);
            let addresses: Vec<Ipv4Addr> = (thread..count)
                .step_by(GOOD_THREADS as usize)
                .map(|index| spread(FIRST_GOOD, first + index))
                .collect();
            clients.push((is_crowd, spawn(move || good::ask_all(&shared, &addresses, is_crowd))?));
        }
    }
    let bad = {
        let (shared, stopped) = (Arc::clone(&shared), Arc::clone(&stopped));
        spawn(move || {
            wait_for_attack(&shared);
            let count = match scene.attack {
                Attack::Nobody => Ok(0),
                Attack::Slow { kind, connections } => Ok(slow::hold(&shared, kind, connections)),
                Attack::Programs { connections } => programs::run(&shared, connections).map(|()| 0),
                Attack::Passers => Ok(passers::pass_by(&shared)),
                _ => Ok(flood::flood(&shared)),
            }?;
            stopped.store(count.into(), Ordering::Relaxed);
            Ok::<(), Error>(())
        })?
    };
    std::thread::sleep(scene.before + scene.during);
    shared.ended.store(true, Ordering::Relaxed);
    let mut seen = Seen {
        answered_per_s: Vec::new(),
        refused_per_s: Vec::new(),
        crowd: (0, 0),
        latencies_ms: Vec::new(),
        crowd_latencies_ms: Vec::new(),
        stopped: 0,
    };
    let failed = || Error::Load(io::Error::other("a thread of the load has ended by a panic"));
    for (is_crowd, thread) in clients {
        let counts = thread.join().map_err(|_| failed())?;
        if is_crowd {
            seen.crowd.0 += counts.answered.iter().sum::<u64>();
            seen.crowd.1 += counts.asked;
            seen.crowd_latencies_ms.extend(counts.latencies_ms);
        } else {
            add(&mut seen.answered_per_s, &counts.answered);
            add(&mut seen.refused_per_s, &counts.refused);
            seen.latencies_ms.extend(counts.latencies_ms);
        }
    }
    bad.join().map_err(|_| failed())??;
    // The second in which the scene ended is not whole.
    seen.answered_per_s.truncate((scene.before + scene.during).as_secs() as usize);
    seen.stopped = stopped.load(Ordering::Relaxed) as u32;
    Ok(seen)
}

fn spawn<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<std::thread::JoinHandle<T>, Error> {
    let pinned = move || {
        // The core was looked for when the servers were started.
        let _ = pin_to_load_core();
        work()
    };
    std::thread::Builder::new().spawn(pinned).map_err(Error::Load)
}

/// The address of a client: four in each network of 24 bits, as people are not neighbours.
fn spread(first: Ipv4Addr, index: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(first) + index / 4 * 256 + index % 4)
}

fn add(sum: &mut Vec<u64>, counts: &[u64]) {
    if sum.len() < counts.len() {
        sum.resize(counts.len(), 0);
    }
    sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
}

fn count(counts: &mut Vec<u64>, second: usize) {
    if counts.len() <= second {
        counts.resize(second + 1, 0);
    }
    counts[second] += 1;
}

fn request(server: SocketAddr, target: &str, fields: &str) -> String {
    format!(
        "GET {target} HTTP/1.1\r\nHost: {server}\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\n{fields}\r\n"
    )
}

fn open(source: Ipv4Addr, server: SocketAddr, flags: SocketFlags) -> io::Result<TcpStream> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    // The port is chosen with the server's address in mind, so that it is not used up by others.
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddr::new(IpAddr::V4(source), 0))?;
    match connect(&socket, &server) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(TcpStream::from(socket)),
        Err(error) => Err(error.into()),
    }
}

fn wait_for_attack(shared: &Shared) {
    while !shared.attack_began() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_clients_are_spread_and_rates_are_means() {
        assert_eq!(spread(FIRST_GOOD, 5), Ipv4Addr::new(127, 80, 1, 2));
        let seen = Seen {
            answered_per_s: vec![1, 2, 3],
            refused_per_s: Vec::new(),
            crowd: (0, 0),
            latencies_ms: Vec::new(),
            crowd_latencies_ms: Vec::new(),
            stopped: 0,
        };
        assert_eq!((seen.rate(1, 3), seen.rate(2, 9), seen.rate(3, 4)), (2.5, 3.0, 0.0));
    }
}
