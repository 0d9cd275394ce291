//! The server's memory against the number of connections (Trickles §6.1, Figure 11).

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

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
/// How long an answer may take before the request is sent again.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(200);

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig11",
    paper: &PAPER,
    figure: "Figure 11",
    claim: "A server's memory is the same within 1 MiB with 1 and with 100,000 connections in the middle of a transfer",
    published: "The server's memory against the number of connections: constant for Trickles, growing for TCP until memory \
                is used up at about 10,000.",
    method: "Each connection asks for a 20 kB file, takes its first packets, and is left open there; over TCP the rest waits in socket buffers. Memory is the server's \
             anonymous resident memory, and for TCP the kernel's pages for sockets as well (/proc/net/sockstat). The server \
             is warmed by 1,000 connections first. TCP connections end where a process may have no more descriptors.",
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
    let mut raw = Table::new(["connections", "carrier", "server_bytes", "kernel_bytes"]);
    let mut summary = Table::new(["connections", "carrier", "server, MiB", "kernel's sockets, MiB"]);
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
        for (count, server, kernel) in &measured {
            raw.row([count.to_string(), carrier.name().into(), server.to_string(), kernel.to_string()]);
            let mib = |bytes: &u64| format!("{:.2}", *bytes as f64 / MIB);
            summary.row([thousands((*count).into()), carrier.label().into(), mib(server), mib(kernel)]);
            points.push(Point::exact((*count).into(), (server + kernel) as f64 / MIB));
        }
        let bytes = || measured.iter().map(|(_, server, kernel)| (server + kernel) as f64 / MIB);
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

/// Connections, bytes of the server, bytes of the kernel.
type Memory = (u32, u64, u64);

fn measure(server: &Replica, carrier: Carrier, counts: &[u32]) -> Result<Vec<Memory>, Error> {
    let address = server.address();
    let mut load = Open::new(carrier, address)?;
    load.open(1_000)?;
    load = Open::new(carrier, address)?;
    let mut measured = Vec::new();
    for &count in counts {
        load.open(count)?;
        let kernel = if carrier == Carrier::Tcp { socket_bytes()? } else { 0 };
        measured.push((count, server.anonymous_bytes()?, kernel));
    }
    Ok(measured)
}

/// Open connections, kept.
enum Open {
    Trickles { socket: UdpSocket, server: SocketAddr, clients: Vec<Client> },
    Tcp { server: SocketAddr, streams: Vec<TcpStream> },
}

impl Open {
    fn new(carrier: Carrier, server: SocketAddr) -> Result<Self, Error> {
        Ok(match carrier {
            Carrier::Trickles => {
                let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(Error::Load)?;
                socket.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(Error::Load)?;
                Self::Trickles { socket, server, clients: Vec::new() }
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
                    let mut stream = TcpStream::connect(*server).map_err(Error::Load)?;
                    stream.write_all(text.as_bytes()).map_err(Error::Load)?;
                    stream.read_exact(&mut [0; 1000]).map_err(Error::Load)?;
                    streams.push(stream);
                }
            }
            Self::Trickles { socket, server, clients } => {
                while clients.len() < count as usize {
                    let mut seed = [1; 16];
                    seed[..8].copy_from_slice(&(clients.len() as u64).to_be_bytes());
                    let mut client = Client::new(Config::default(), &seed, Instant::now());
                    client
                        .request(text.as_bytes(), Instant::now())
                        .map_err(|error| Error::Server(error.to_string()))?;
                    begin(&mut client, socket, *server)?;
                    clients.push(client);
                }
            }
        }
        Ok(())
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

/// Pages that the kernel has given to TCP sockets.
fn socket_bytes() -> Result<u64, Error> {
    let path = std::path::Path::new("/proc/self/task").join(thread_id()).join("net/sockstat");
    let text = std::fs::read_to_string(&path).map_err(Error::file("read", &path))?;
    let line = text.lines().find(|line| line.starts_with("TCP:")).unwrap_or_default();
    let pages = line
        .split_whitespace()
        .skip_while(|word| *word != "mem")
        .nth(1)
        .and_then(|pages| pages.parse::<u64>().ok());
    Ok(pages.unwrap_or(0) * rustix::param::page_size() as u64)
}

fn thread_id() -> String {
    rustix::thread::gettid().as_raw_nonzero().to_string()
}
