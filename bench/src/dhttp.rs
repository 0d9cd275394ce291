//! Small cached answers by UDP against nginx's over connections that are kept, in server CPU per request.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::peers::{Peer, Site, install};
use crate::stats::Spread;
use crate::wrk::{Figure, Load as WrkLoad};
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg, sendmmsg};
use rustix::event::{PollFd, PollFlags, poll};

/// Bytes of the object.
const SIZE_BYTES: usize = 612;
/// Clients, each with a socket of its own.
const CLIENTS: usize = 8;
/// Requests that each has on their way at one time.
const WINDOW: usize = 32;
/// Answers are taken for lost after this time without any.
const PATIENCE: Duration = Duration::from_millis(100);

/// What one round measured.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// nginx, over connections that are kept.
    pub nginx: Figure,
    /// tidegate, by UDP.
    pub dhttp: Figure,
}

/// Measures both once in each of `rounds`; `each` is told of every one.
///
/// # Errors
/// A sentence that says which server does not run, or answers nothing.
pub fn measure_rounds(
    tidegate: &Path,
    rounds: u16,
    seconds: u32,
    mut each: impl FnMut(u16, &Round),
) -> Result<Vec<Round>, String> {
    for (program, package) in [("nginx", "nginx-light"), ("wrk", "wrk")] {
        install(program, package)?;
    }
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let site = Site::create(directory.path(), SIZE_BYTES)?;
    let nginx = Peer::nginx(&site)?;
    let (peer, address) = Peer::tidegate_dhttp(tidegate, &site)?;
    let load = WrkLoad { connections: 32, close: false, unique: None, seconds };
    let mut measured = Vec::new();
    for round in 0..rounds {
        let figures = Round { nginx: load.run(&nginx)?, dhttp: measure(&peer, address, seconds)? };
        each(round, &figures);
        measured.push(figures);
    }
    Ok(measured)
}

/// Prints requests per CPU-second of both, and their ratio.
///
/// # Errors
/// See [`measure_rounds`].
pub fn compare(tidegate: &Path, rounds: u16, seconds: u32) -> Result<(), String> {
    let measured = measure_rounds(tidegate, rounds, seconds, |round, figures| {
        for (name, figure) in [("nginx", figures.nginx), ("dhttp", figures.dhttp)] {
            eprintln!(
                "[{}/{rounds}] {name:6} {:9.0} requests/s {:6.2} us CPU",
                round + 1,
                figure.requests_per_s,
                figure.cpu_us_per_request
            );
        }
    })?;
    let spread = |figure: fn(&Round) -> Figure| {
        Spread::of(measured.iter().map(|round| figure(round).cpu_us_per_request))
    };
    let ratio = Spread::of(measured.iter().map(Round::ratio));
    if let (Some(nginx), Some(dhttp), Some(ratio)) =
        (spread(|round| round.nginx), spread(|round| round.dhttp), ratio)
    {
        println!("server CPU a request, us: nginx {}, DHTTP {}", nginx.text(2), dhttp.text(2));
        println!("requests per CPU-second, DHTTP / nginx: {} (goal 3)", ratio.text(2));
    }
    Ok(())
}

impl Round {
    /// DHTTP's requests per CPU-second as a multiple of nginx's.
    pub fn ratio(&self) -> f64 {
        self.nginx.cpu_us_per_request / self.dhttp.cpu_us_per_request
    }
}

struct Client {
    socket: UdpSocket,
    request: Vec<u8>,
    outstanding: usize,
}

fn measure(peer: &Peer, server: SocketAddr, seconds: u32) -> Result<Figure, String> {
    let failed = |error: std::io::Error| format!("the load failed: {error}");
    let mut clients =
        (0..CLIENTS).map(|_| Client::open(server)).collect::<Result<Vec<_>, _>>().map_err(failed)?;
    let mut load = Load::new();
    // A first exchange, so that every client has its token.
    load.run(&mut clients, Duration::from_millis(200)).map_err(failed)?;
    let before = peer.cpu_s()?;
    let duration = Duration::from_secs(seconds.into());
    let answered = load.run(&mut clients, duration).map_err(failed)?;
    let cpu_s = peer.cpu_s()? - before;
    if answered == 0 {
        return Err("DHTTP answered nothing".into());
    }
    Ok(Figure {
        requests_per_s: answered as f64 / duration.as_secs_f64(),
        cpu_us_per_request: cpu_s * 1e6 / answered as f64,
        late: 0,
    })
}

impl Client {
    fn open(server: SocketAddr) -> std::io::Result<Self> {
        // The system's own choice may lie below the ports that clients use.
        let socket = loop {
            let socket = UdpSocket::bind("127.0.0.1:0")?;
            if socket.local_addr()?.port() >= 32_768 {
                break socket;
            }
        };
        socket.connect(server)?;
        socket.set_nonblocking(true)?;
        let mut client = Self { socket, request: Vec::new(), outstanding: 0 };
        client.set_token(server, b"");
        Ok(client)
    }

    fn set_token(&mut self, server: SocketAddr, token: &[u8]) {
        self.request = [0; 8].to_vec();
        self.request.extend_from_slice(&40_000_u16.to_be_bytes());
        self.request.extend_from_slice(&[2, token.len() as u8]);
        self.request.extend_from_slice(token);
        // As long as what a browser sends: without that, what an unproved address may get would be too short.
        let head = format!(
            "GET /object HTTP/1.1\r\nHost: {server}\r\nUser-Agent: tidegate-bench{}\r\n\r\n",
            " (long)".repeat(40 * usize::from(token.is_empty()))
        );
        self.request.extend_from_slice(head.as_bytes());
    }
}

/// The buffers of the load.
struct Load {
    headers: MultiHeaders<SockaddrStorage>,
    buffers: Vec<Vec<u8>>,
    requests: Vec<Vec<u8>>,
    next_id: u64,
}

impl Load {
    fn new() -> Self {
        Self {
            headers: MultiHeaders::preallocate(WINDOW, None),
            buffers: vec![vec![0; 2048]; WINDOW],
            requests: vec![Vec::new(); WINDOW],
            next_id: 1 << 63,
        }
    }

    /// Keeps the windows full for `duration`; how many right answers came.
    fn run(&mut self, clients: &mut [Client], duration: Duration) -> std::io::Result<u64> {
        let end = Instant::now() + duration;
        let mut answered = 0;
        clients.iter_mut().for_each(|client| client.outstanding = 0);
        while Instant::now() < end {
            let mut moved = 0;
            for client in &mut *clients {
                moved += self.receive(client)?;
                self.send(client)?;
            }
            answered += moved;
            if moved == 0 && !wait(clients)? {
                clients.iter_mut().for_each(|client| client.outstanding = 0);
            }
        }
        Ok(answered)
    }

    fn receive(&mut self, client: &mut Client) -> std::io::Result<u64> {
        let server = client.socket.peer_addr()?;
        let mut slices: Vec<_> = self.buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
        let flags = MsgFlags::MSG_DONTWAIT;
        let fd = client.socket.as_raw_fd();
        let lengths: Vec<usize> = match recvmmsg(fd, &mut self.headers, slices.iter_mut(), flags, None) {
            Ok(messages) => messages.map(|message| message.bytes).collect(),
            Err(nix::errno::Errno::EAGAIN) => return Ok(0),
            Err(error) => return Err(error.into()),
        };
        let mut answered = 0;
        for (buffer, length) in self.buffers.iter().zip(lengths) {
            client.outstanding = client.outstanding.saturating_sub(1);
            let message = &buffer[8.min(length)..length];
            let (token, http) = match message {
                [2, _, token @ ..] => (Some(token), &[][..]),
                [3, length, rest @ ..] => {
                    let (token, http) = rest.split_at(usize::from(*length).min(rest.len()));
                    (Some(token), http)
                }
                http => (None, http),
            };
            if let Some(token) = token {
                client.set_token(server, token);
            }
            if http.starts_with(b"HTTP/1.1 200") && http.len() > SIZE_BYTES {
                answered += 1;
            }
        }
        Ok(answered)
    }

    fn send(&mut self, client: &mut Client) -> std::io::Result<()> {
        let count = WINDOW - client.outstanding.min(WINDOW);
        if count == 0 {
            return Ok(());
        }
        for request in &mut self.requests[..count] {
            request.clone_from(&client.request);
            self.next_id += 1;
            request[..8].copy_from_slice(&self.next_id.to_be_bytes());
        }
        let slices: Vec<_> = self.requests[..count].iter().map(|request| [IoSlice::new(request)]).collect();
        let addresses: Vec<Option<SockaddrStorage>> = vec![None; count];
        let fd = client.socket.as_raw_fd();
        match sendmmsg(fd, &mut self.headers, slices.iter(), &addresses, [], MsgFlags::MSG_DONTWAIT) {
            Ok(sent) => client.outstanding += sent.count(),
            Err(nix::errno::Errno::EAGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

/// Waits for an answer; `false` if none came in time.
fn wait(clients: &[Client]) -> std::io::Result<bool> {
    let mut sockets: Vec<_> =
        clients.iter().map(|client| PollFd::new(&client.socket, PollFlags::IN)).collect();
    let patience = PATIENCE.try_into().map_err(|_| ErrorKind::InvalidInput)?;
    Ok(poll(&mut sockets, Some(&patience))? > 0)
}
