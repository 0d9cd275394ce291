//! The server's memory against the number of connections (Trickles §6.1, Figure 11).

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};
use tidegate_trickles::client::{Client, Config};

use super::trickles::{Bench, PAPER, RATE, ROUND_TRIP, plot};
use crate::link::{Profile, Side};
use crate::plot::Point;
use crate::server::{bound_on, connections};
use crate::table::{Table, thousands};
use crate::transfer::{Carrier, Replica, request};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// Each connection is left in the middle of this file.
const OBJECT_BYTES: u64 = 20_000;
/// By how much memory may differ.
const MIB: f64 = 1_048_576.0;
/// Clients that each have an address, a port and a socket of their own; connections beyond that share them in turn.
const CLIENTS: u32 = 1_000;
/// What a TCP client has room for.
const CLIENT_BYTES: usize = 2_048;
/// How long nothing may arrive before all that was sent counts as arrived.
const QUIET: Duration = Duration::from_millis(200);
/// How long an answer may take before the request is sent again.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(200);

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig11",
    paper: &PAPER,
    figure: "Figure 11",
    claim: "A server's memory is the same within 1 MiB with 1 and with 100,000 connections in the middle of a transfer",
    published: "The server's memory against the number of connections: constant for Trickles, growing for TCP until \
                memory is used up at about 10,000.",
    method: "Each connection asks for a 20 kB file, takes its first packets, and is left open there; over TCP the rest \
             waits at the server, for the client has little room. Trickles' connections come from 1,000 addresses, \
             each with a port and a socket. Memory is the server's anonymous and shared resident memory, and what the \
             kernel holds for the server's sockets to receive, to send and in reserve (ss -m). Beside it stand the \
             kernel's pages for all sockets of the kind, the clients' and other programs' among them \
             (/proc/net/sockstat, UDP or TCP); of those each processor may keep up to 1 MiB uncounted. UDP clients \
             take all that was sent to them before anything is counted. The server is warmed by 1,000 connections \
             first. TCP connections end where a process may have no more descriptors.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let ours = lab.choose(vec![1, 10, 100, 1_000, 10_000, 100_000], vec![1, 100, 1_000]);
    let most = connections(15_000);
    let tcp: Vec<u32> = ours
        .iter()
        .copied()
        .filter(|count| *count < most)
        .chain([most.min(lab.choose(most, 1_000))])
        .collect();
    let mut raw =
        Table::new(["connections", "carrier", "server_bytes", "its_sockets_bytes", "all_sockets_bytes"]);
    let mut summary =
        Table::new(["connections", "carrier", "server, MiB", "its sockets, MiB", "all sockets' pages, MiB"]);
    let mut series = Vec::new();
    let mut ranges = Vec::new();
    for (step, (carrier, counts)) in [(Carrier::Trickles, ours), (Carrier::Tcp, tcp)].into_iter().enumerate()
    {
        let what = format!(
            "{} connections by {}",
            thousands((*counts.last().unwrap_or(&0)).into()),
            carrier.label()
        );
        lab.progress(step + 1, 2, &what);
        // A server of its own for each carrier: what one leaves behind is not charged to the other.
        let profiles = vec![Profile::clean(RATE, ROUND_TRIP)];
        let bench = Bench::new(lab, &[OBJECT_BYTES], profiles)?;
        let measured = bench.hosts.run(Side::Server, || measure(&bench.server, carrier, &counts))?;
        let mut points = Vec::new();
        for Memory { count, server, own, all } in &measured {
            raw.row([
                count.to_string(),
                carrier.name().into(),
                server.to_string(),
                own.to_string(),
                all.to_string(),
            ]);
            let mib = |bytes: &u64| format!("{:.2}", *bytes as f64 / MIB);
            summary.row([
                thousands((*count).into()),
                carrier.label().into(),
                mib(server),
                mib(own),
                mib(all),
            ]);
            points.push(Point::exact((*count).into(), (server + own) as f64 / MIB));
        }
        let bytes = || measured.iter().map(|memory| (memory.server + memory.own) as f64 / MIB);
        ranges.push(bytes().fold(0.0, f64::max) - bytes().fold(f64::INFINITY, f64::min));
        series.push((carrier.label().to_owned(), points));
    }
    let check = Check {
        what: "the allowed difference of 1 MiB to the difference between fewest and most connections".into(),
        ratio: 1.0 / ranges.first().copied().unwrap_or(f64::NAN).max(1e-3),
        at_least: 1.0,
    };
    let note = format!("TCP's memory differs by {:.1} MiB", ranges.get(1).copied().unwrap_or(f64::NAN));
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot("Memory of the server", ("connections", true), "MiB", series))],
        verdict: Verdict::of(&[check]).noting(&note).noting(&bound_on(most, 15_000)),
        servers: Vec::new(),
    })
}

/// Bytes with so many connections.
struct Memory {
    count: u32,
    /// Of the server's process.
    server: u64,
    /// Of the server's sockets.
    own: u64,
    /// Of all sockets of the kind, in pages.
    all: u64,
}

fn measure(server: &Replica, carrier: Carrier, counts: &[u32]) -> Result<Vec<Memory>, Error> {
    let address = server.address();
    let mut load = Open::new(carrier, address)?;
    load.open(1_000)?;
    load.forget();
    let mut measured = Vec::new();
    for &count in counts {
        load.open(count)?;
        load.drain()?;
        let (own, all) = (own_bytes(carrier, address)?, socket_bytes(carrier)?);
        measured.push(Memory { count, server: server.memory_bytes()?, own, all });
    }
    Ok(measured)
}

/// Open connections, kept.
enum Open {
    Trickles { sockets: Vec<UdpSocket>, server: SocketAddr, clients: Vec<Client>, opened: u64 },
    Tcp { server: SocketAddr, streams: Vec<TcpStream> },
}

impl Open {
    fn new(carrier: Carrier, server: SocketAddr) -> Result<Self, Error> {
        Ok(match carrier {
            Carrier::Trickles => {
                let sockets = (0..CLIENTS).map(|n| {
                    // The loopback network has an address for each.
                    let socket = UdpSocket::bind((Ipv4Addr::from_bits(0x7f62_0001 + n), 0))?;
                    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
                    Ok(socket)
                });
                let sockets = sockets.collect::<std::io::Result<_>>().map_err(Error::Load)?;
                Self::Trickles { sockets, server, clients: Vec::new(), opened: 0 }
            }
            Carrier::Tcp => Self::Tcp { server, streams: Vec::new() },
        })
    }

    /// Opens connections until there are `count`.
    fn open(&mut self, count: u32) -> Result<(), Error> {
        let text = request(OBJECT_BYTES, true);
        match self {
            Self::Tcp { server, streams } => {
                while streams.len() < count as usize {
                    let mut stream = connect(*server).map_err(Error::Load)?;
                    stream.write_all(text.as_bytes()).map_err(Error::Load)?;
                    stream.read_exact(&mut [0; 1000]).map_err(Error::Load)?;
                    streams.push(stream);
                }
            }
            Self::Trickles { sockets, server, clients, opened } => {
                while clients.len() < count as usize {
                    let mut seed = [1; 16];
                    seed[..8].copy_from_slice(&opened.to_be_bytes());
                    *opened += 1;
                    let mut client = Client::new(Config::default(), &seed, Instant::now());
                    client
                        .request(text.as_bytes(), Instant::now())
                        .map_err(|error| Error::Server(error.to_string()))?;
                    begin(&mut client, &sockets[clients.len() % sockets.len()], *server)?;
                    clients.push(client);
                }
            }
        }
        Ok(())
    }

    /// Leaves all connections as they are; the next ones are new.
    fn forget(&mut self) {
        match self {
            Self::Trickles { clients, .. } => clients.clear(),
            Self::Tcp { streams, .. } => streams.clear(),
        }
    }

    /// Takes from UDP sockets what has come since: what waits there is the clients' memory.
    fn drain(&self) -> Result<(), Error> {
        let Self::Trickles { sockets, .. } = self else { return Ok(()) };
        let mut buffer = [0; 2048];
        let mut quiet_since = Instant::now();
        sockets.iter().try_for_each(|socket| socket.set_nonblocking(true)).map_err(Error::Load)?;
        while quiet_since.elapsed() < QUIET {
            for socket in sockets {
                while taken(socket.recv(&mut buffer))? {
                    quiet_since = Instant::now();
                }
            }
            std::thread::sleep(QUIET / 10);
        }
        sockets.iter().try_for_each(|socket| socket.set_nonblocking(false)).map_err(Error::Load)
    }
}

/// A TCP connection whose client has room for little.
fn connect(server: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(server), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_recv_buffer_size(CLIENT_BYTES)?;
    socket.connect(&server.into())?;
    Ok(socket.into())
}

/// Whether there was something to take.
fn taken(received: std::io::Result<usize>) -> Result<bool, Error> {
    match received {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(Error::Load(error)),
    }
}

/// Opens a connection and lets it acknowledge its first packets once.
fn begin(client: &mut Client, socket: &UdpSocket, server: SocketAddr) -> Result<(), Error> {
    let mut buffer = [0; 2048];
    let mut rounds = 0;
    while rounds < 2 {
        while let Some(datagram) = client.poll_transmit(Instant::now()) {
            socket.send_to(&datagram, server).map_err(Error::Load)?;
        }
        match socket.recv(&mut buffer) {
            // What belongs to an earlier connection is that one's loss.
            Ok(length) => {
                rounds += usize::from(client.handle_datagram(&buffer[..length], Instant::now()).is_ok())
            }
            Err(_) => client.handle_timeout(Instant::now()),
        }
        if let Some(failure) = client.failure() {
            return Err(Error::Server(format!("a Trickles server does not answer: {failure}")));
        }
    }
    Ok(())
}

/// Pages that the kernel has given to sockets of a kind.
fn socket_bytes(carrier: Carrier) -> Result<u64, Error> {
    let path = std::path::Path::new("/proc/self/task").join(thread_id()).join("net/sockstat");
    let text = std::fs::read_to_string(&path).map_err(Error::file("read", &path))?;
    let kind = if carrier == Carrier::Tcp { "TCP:" } else { "UDP:" };
    let pages = text
        .lines()
        .find(|line| line.starts_with(kind))
        .and_then(|line| line.split_whitespace().skip_while(|word| *word != "mem").nth(1))
        .and_then(|pages| pages.parse::<u64>().ok());
    let pages = pages.ok_or(Error::Nothing("the kernel's count of sockets' pages"))?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// Bytes that the server's sockets hold to receive and to send, and as their reserve.
fn own_bytes(carrier: Carrier, server: SocketAddr) -> Result<u64, Error> {
    let kind = if carrier == Carrier::Tcp { "-t" } else { "-u" };
    let (address, port) = (server.ip().to_string(), server.port().to_string());
    let output = Command::new("ss")
        .args(["-H", "-a", "-n", "-m", "-O", kind, "src", &address, "and", "sport", "=", &format!(":{port}")])
        .output()
        .map_err(|error| Error::Link(format!("cannot run ss: {error}; apt-get install iproute2")))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let sockets: Vec<u64> = said.lines().filter_map(held_bytes).collect();
    if sockets.is_empty() {
        Err(Error::Nothing("the kernel's list of sockets"))
    } else {
        Ok(sockets.iter().sum())
    }
}

/// What a line of `ss -m` says: `skmem:(r0,rb212992,t0,tb212992,f0,w0,o0,bl0,d0)`; r is received, w to be sent, f
/// reserved, o options, bl backlog.
fn held_bytes(line: &str) -> Option<u64> {
    let (_, fields) = line.split_once("skmem:(")?;
    let fields = fields.split(')').next()?.split(',');
    let values = fields.filter_map(|field| {
        let digits = field.find(|byte: char| byte.is_ascii_digit())?;
        let (name, value) = field.split_at(digits);
        ["r", "w", "f", "o", "bl"].contains(&name).then(|| value.parse::<u64>().ok()).flatten()
    });
    Some(values.sum())
}

fn thread_id() -> String {
    rustix::thread::gettid().as_raw_nonzero().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_socket_are_those_that_it_holds() {
        let line =
            "UNCONN 0 0 10.98.0.1:4000 0.0.0.0:* skmem:(r768,rb212992,t0,tb212992,f3328,w512,o0,bl16,d7)";
        assert_eq!(held_bytes(line), Some(768 + 3328 + 512 + 16));
        assert_eq!(held_bytes("UNCONN 0 0"), None);
    }
}
