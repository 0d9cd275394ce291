//! Good clients at their own pace, and attackers beside them, on threads of the load's core.
//!
//! Every client has an address of its own within 127.0.0.0/8. What a client gets is counted second by second, so that it
//! can be compared with what it got before the attack.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

use crate::Error;
use crate::server::pin_to_load_core;

/// Good clients begin here.
const FIRST_GOOD: Ipv4Addr = Ipv4Addr::new(127, 80, 0, 1);
/// Attackers begin here.
const FIRST_BAD: Ipv4Addr = Ipv4Addr::new(127, 112, 0, 1);
/// The path of what takes an origin long.
pub const COSTLY: &str = "/costly";
/// Pages that good clients choose from.
const PAGES: usize = 20;
/// Connections of passers at once.
const PASSERS: u32 = 500;
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
    /// Each holds connections on which a request head comes byte by byte and never ends.
    SlowHeads {
        /// Connections of each attacker.
        connections: u32,
    },
    /// Each holds connections on which a request's body comes byte by byte and never ends.
    SlowBodies {
        /// Connections of each attacker.
        connections: u32,
    },
    /// Each holds connections on which it asks for much, again and again, and reads nothing.
    SlowReaders {
        /// Connections of each attacker.
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
    let mut good = Vec::new();
    let groups = [(0, scene.good, false), (scene.good, scene.crowd, true)];
    for (first, count, is_crowd) in groups {
        for thread in 0..GOOD_THREADS.min(count) {
            let shared = Arc::clone(&shared);
            let clients: Vec<Ipv4Addr> = (thread..count)
                .step_by(GOOD_THREADS as usize)
                .map(|index| spread(FIRST_GOOD, first + index))
                .collect();
            good.push((is_crowd, spawn(move || be_good(&shared, &clients, is_crowd))?));
        }
    }
    let bad = match scene.attack {
        Attack::Nobody => None,
        attack => {
            let (shared, stopped) = (Arc::clone(&shared), Arc::clone(&stopped));
            Some(spawn(move || {
                let count = match attack {
                    Attack::SlowHeads { connections }
                    | Attack::SlowBodies { connections }
                    | Attack::SlowReaders { connections } => be_slow(&shared, connections),
                    Attack::Passers => pass_by(&shared),
                    _ => flood(&shared),
                };
                stopped.store(count.into(), Ordering::Relaxed);
            })?)
        }
    };
    std::thread::sleep(scene.before + scene.during);
    shared.ended.store(true, Ordering::Relaxed);
    let mut seen = Seen {
        answered_per_s: Vec::new(),
        refused_per_s: Vec::new(),
        crowd: (0, 0),
        latencies_ms: Vec::new(),
        stopped: 0,
    };
    let failed = || Error::Load(io::Error::other("a thread of the load has ended by a panic"));
    for (is_crowd, thread) in good {
        let counts = thread.join().map_err(|_| failed())?;
        if is_crowd {
            seen.crowd.0 += counts.answered.iter().sum::<u64>();
            seen.crowd.1 += counts.asked;
        } else {
            add(&mut seen.answered_per_s, &counts.answered);
            add(&mut seen.refused_per_s, &counts.refused);
        }
        seen.latencies_ms.extend(counts.latencies_ms);
    }
    if let Some(bad) = bad {
        bad.join().map_err(|_| failed())?;
    }
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

/// Each client asks at its rate, on a connection that it keeps while it can.
fn be_good(shared: &Shared, clients: &[Ipv4Addr], is_crowd: bool) -> Counts {
    let scene = shared.scene;
    let mut counts = Counts::default();
    let mut connections: Vec<Option<TcpStream>> = clients.iter().map(|_| None).collect();
    let pause = Duration::from_secs(1) / (scene.rate_per_s * clients.len() as u32).max(1);
    let mut turn = 0usize;
    let start = if is_crowd { scene.before } else { Duration::ZERO };
    while !shared.is_over() {
        let due = start + pause * turn as u32;
        let elapsed = shared.began.elapsed();
        if elapsed < due {
            std::thread::sleep((due - elapsed).min(Duration::from_millis(50)));
            continue;
        }
        let index = turn % clients.len();
        turn += 1;
        counts.asked += 1;
        let asked = Instant::now();
        let second = shared.began.elapsed().as_secs() as usize;
        // A page of the site, another one each time.
        let request = request(scene.server, &format!("/object?p={}", (turn * 7 + index) % PAGES), "");
        match ask(&mut connections[index], clients[index], scene.server, request.as_bytes()) {
            Ok(true) => {
                count(&mut counts.answered, second);
                if shared.attack_began() {
                    counts.latencies_ms.push(asked.elapsed().as_secs_f64() * 1e3);
                }
            }
            Ok(false) | Err(_) => {
                connections[index] = None;
                count(&mut counts.refused, second);
            }
        }
    }
    counts
}

fn request(server: SocketAddr, target: &str, fields: &str) -> String {
    format!(
        "GET {target} HTTP/1.1\r\nHost: {server}\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\n{fields}\r\n"
    )
}

/// One request on the client's connection, which is made if there is none; whether the answer is 200.
fn ask(
    connection: &mut Option<TcpStream>,
    source: Ipv4Addr,
    server: SocketAddr,
    request: &[u8],
) -> io::Result<bool> {
    let stream = match connection {
        Some(stream) => stream,
        None => {
            let stream = open(source, server, SocketFlags::CLOEXEC)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            connection.insert(stream)
        }
    };
    stream.write_all(request)?;
    let mut answer = Vec::with_capacity(4096);
    let mut buffer = [0; 4096];
    loop {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        answer.extend_from_slice(&buffer[..length]);
        if let Some(is_ok) = whole(&answer) {
            return Ok(is_ok);
        }
    }
}

/// Whether the answer is 200, once it is whole.
fn whole(answer: &[u8]) -> Option<bool> {
    let head = memchr::memmem::find(answer, b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&answer[..head]).ok()?.to_ascii_lowercase();
    let length =
        text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
    (answer.len() >= head + length.unwrap_or(0)).then(|| text.starts_with("http/1.1 200"))
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

/// One attacker's connection.
struct Bot {
    source: Ipv4Addr,
    stream: Option<TcpStream>,
    /// A request is under way.
    waits: bool,
    again: Instant,
    answered_late: bool,
    /// It has asked on this connection.
    asked: bool,
}

/// Every attacker asks again as soon as it is answered; how many had no answer in the last third.
fn flood(shared: &Shared) -> u32 {
    let Scene { attack, server, good, .. } = shared.scene;
    let mut random = 0x9e37_79b9_u64;
    let mut bots: Vec<Bot> = (0..shared.scene.attackers)
        .map(|index| Bot {
            source: attack.source(index),
            stream: None,
            waits: false,
            again: Instant::now(),
            answered_late: false,
            asked: false,
        })
        .collect();
    wait_for_attack(shared);
    let mut buffer = vec![0; 16 * 1024];
    while !shared.is_over() {
        let late = shared.last_third();
        let mut did_something = false;
        if let Attack::Pulses { on_s } = attack
            && (shared.began.elapsed() - shared.scene.before).as_secs() % 10 >= on_s
        {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        }
        for bot in &mut bots {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let fields = match attack {
                Attack::Forged => {
                    let victim = spread(FIRST_GOOD, (random >> 40) as u32 % good.max(1));
                    format!("X-Forwarded-For: {victim}\r\nForwarded: for={victim}\r\nX-Real-IP: {victim}\r\n")
                }
                _ => String::new(),
            };
            let ask = || request(server, &attack.target(random >> 16), &fields);
            did_something |= step(bot, server, ask, (&mut buffer, attack.pause()), late);
        }
        if !did_something {
            std::thread::sleep(Duration::from_millis(1));
        } else {
            std::thread::yield_now();
        }
    }
    bots.iter().filter(|bot| !bot.answered_late).count() as u32
}

fn wait_for_attack(shared: &Shared) {
    while !shared.attack_began() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn step(
    bot: &mut Bot,
    server: SocketAddr,
    request: impl FnOnce() -> String,
    (buffer, pause): (&mut [u8], Duration),
    late: bool,
) -> bool {
    if bot.stream.is_none() {
        if Instant::now() < bot.again {
            return false;
        }
        bot.stream = open(bot.source, server, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok();
        (bot.waits, bot.asked) = (false, false);
        bot.again = Instant::now() + RETRY;
        return true;
    }
    let Some(stream) = &mut bot.stream else { return false };
    if !bot.waits {
        // After a connection was made it asks at once, and otherwise when its pause is over.
        if bot.asked && Instant::now() < bot.again {
            return false;
        }
        match stream.write(request().as_bytes()) {
            Ok(_) => (bot.waits, bot.asked) = (true, true),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => {
                return false;
            }
            Err(_) => bot.stream = None,
        }
        return true;
    }
    match stream.read(buffer) {
        Ok(0) => bot.stream = None,
        Ok(length) => {
            bot.waits = false;
            bot.again = Instant::now() + pause;
            bot.answered_late |= late && buffer[..length].starts_with(b"HTTP/1.1 200");
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
        Err(_) => bot.stream = None,
    }
    true
}

/// Every attacker asks once on a connection of its own, one after the other; how many had no answer in the last third.
fn pass_by(shared: &Shared) -> u32 {
    let scene = shared.scene;
    let text = request(scene.server, "/object", "Connection: close\r\n");
    let mut places: Vec<(u32, Option<TcpStream>, bool, Instant)> =
        (0..PASSERS.min(scene.attackers)).map(|_| (0, None, false, Instant::now())).collect();
    let mut answered_late = vec![false; scene.attackers as usize];
    let mut next = 0;
    wait_for_attack(shared);
    let mut buffer = [0; 4096];
    while !shared.is_over() {
        let late = shared.last_third();
        for (index, stream, asked, since) in &mut places {
            let Some(open_stream) = stream else {
                *index = next;
                next = (next + 1) % scene.attackers;
                let source = scene.attack.source(*index);
                *stream = open(source, scene.server, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok();
                (*asked, *since) = (false, Instant::now());
                continue;
            };
            let done = if *asked {
                match open_stream.read(&mut buffer) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => false,
                    Ok(length) if buffer[..length].starts_with(b"HTTP/1.1 200") => {
                        answered_late[*index as usize] |= late;
                        true
                    }
                    _ => true,
                }
            } else {
                match open_stream.write_all(text.as_bytes()) {
                    Ok(()) => {
                        *asked = true;
                        false
                    }
                    Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected),
                }
            };
            if done || since.elapsed() > PATIENCE {
                *stream = None;
            }
        }
        std::thread::yield_now();
    }
    answered_late.iter().filter(|answered| !**answered).count() as u32
}

/// Every attacker holds connections open by a byte now and then; how many hold none at the end.
fn be_slow(shared: &Shared, each: u32) -> u32 {
    let scene = shared.scene;
    let mut connections: Vec<Bot> = (0..scene.attackers * each)
        .map(|index| Bot {
            source: Ipv4Addr::from(u32::from(FIRST_BAD) + index / each),
            stream: None,
            waits: false,
            again: Instant::now(),
            answered_late: false,
            asked: false,
        })
        .collect();
    wait_for_attack(shared);
    let mut buffer = [0; 1024];
    while !shared.is_over() {
        for bot in &mut connections {
            if bot.stream.is_none() && Instant::now() >= bot.again {
                bot.stream =
                    open(bot.source, scene.server, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok();
                bot.again = Instant::now() + RETRY;
            }
            let Some(stream) = &mut bot.stream else { continue };
            let bytes: &[u8] = match (scene.attack, bot.waits) {
                // What comes is never read; asking goes on until nothing fits.
                (Attack::SlowReaders { .. }, _) => b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n",
                (_, true) => b"a",
                (Attack::SlowBodies { .. }, false) => {
                    b"POST /object HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
                }
                _ => b"GET / HTTP/1.1\r\nX: ",
            };
            let reads = !matches!(scene.attack, Attack::SlowReaders { .. });
            let ended = match stream.write(bytes) {
                Ok(_) => {
                    bot.waits = true;
                    reads && matches!(stream.read(&mut buffer), Ok(0))
                }
                Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected),
            };
            if ended {
                bot.stream = None;
                bot.waits = false;
            }
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let holders: std::collections::HashSet<Ipv4Addr> =
        connections.iter().filter(|bot| bot.stream.is_some() && bot.waits).map(|bot| bot.source).collect();
    scene.attackers - holders.len() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_whole_with_its_last_byte() {
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc";
        assert!((0..answer.len()).all(|length| whole(&answer[..length]).is_none()));
        assert_eq!(whole(answer), Some(true));
        assert_eq!(whole(b"HTTP/1.1 429 No\r\nContent-Length: 0\r\n\r\n"), Some(false));
    }

    #[test]
    fn good_clients_are_spread_and_rates_are_means() {
        assert_eq!(spread(FIRST_GOOD, 5), Ipv4Addr::new(127, 80, 1, 2));
        let seen = Seen {
            answered_per_s: vec![1, 2, 3],
            refused_per_s: Vec::new(),
            crowd: (0, 0),
            latencies_ms: Vec::new(),
            stopped: 0,
        };
        assert_eq!((seen.rate(1, 3), seen.rate(2, 9), seen.rate(3, 4)), (2.5, 3.0, 0.0));
    }
}
