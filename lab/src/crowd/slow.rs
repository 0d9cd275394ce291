//! Attackers that hold connections on which they keep the server waiting.

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::SocketFlags;

use super::{FIRST_BAD, RETRY, Shared, Slow, open};

/// A byte is sent on each connection once in so many steps.
const STEPS: usize = 10;
const STEP: Duration = Duration::from_millis(100);

struct Held {
    source: Ipv4Addr,
    stream: Option<TcpStream>,
    /// The start of a request has been sent.
    began: bool,
    again: Instant,
}

impl Slow {
    /// What begins a request.
    fn start(self) -> &'static [u8] {
        match self {
            Self::Heads => b"GET / HTTP/1.1\r\nX: ",
            Self::Bodies => b"POST /object HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n",
            Self::Readers => b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n",
        }
    }

    /// What is sent from time to time after that: who reads nothing goes on asking until nothing fits.
    fn next(self) -> &'static [u8] {
        match self {
            Self::Heads | Self::Bodies => b"a",
            Self::Readers => self.start(),
        }
    }
}

/// Every attacker holds so many connections, and opens a new one for each that is ended; how many hold none at the end.
pub(super) fn hold(shared: &Shared, kind: Slow, each: u32) -> u32 {
    let scene = shared.scene;
    let place = |index| Held {
        source: Ipv4Addr::from(u32::from(FIRST_BAD) + index / each),
        stream: None,
        began: false,
        again: Instant::now(),
    };
    let mut connections: Vec<Held> = (0..scene.attackers * each).map(place).collect();
    for step in 0.. {
        if shared.is_over() {
            break;
        }
        for held in connections.iter_mut().skip(step % STEPS).step_by(STEPS) {
            if held.stream.is_none() && Instant::now() >= held.again {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                held.stream = open(held.source, scene.server, flags).ok();
                held.again = Instant::now() + RETRY;
            }
            if held.stream.is_some() && !go_on(held, kind) {
                (held.stream, held.began) = (None, false);
            }
        }
        std::thread::sleep(STEP);
    }
    let holders: HashSet<Ipv4Addr> = connections
        .iter()
        .filter(|held| held.stream.is_some() && held.began)
        .map(|held| held.source)
        .collect();
    scene.attackers - holders.len() as u32
}

/// Whether the connection is still there.
fn go_on(held: &mut Held, kind: Slow) -> bool {
    let Some(stream) = &mut held.stream else { return false };
    match stream.write(if held.began { kind.next() } else { kind.start() }) {
        // So few bytes are taken whole or not at all; of a flood of requests it does not matter.
        Ok(written) => {
            held.began |= written > 0;
            kind == Slow::Readers || !matches!(stream.read(&mut [0; 1024]), Ok(0))
        }
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected),
    }
}
