//! AF_XDP between two hosts: network namespaces that a veth pair joins. Needs root; leaves nothing behind.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

#[path = "../../trickles/tests/support/hosts.rs"]
mod hosts;
#[path = "../../trickles/tests/support/mod.rs"]
mod support;

use hosts::Hosts;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use support::{byte_at, objects};
use tidegate_trickles::files::FileService;
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::sealed::Encryption;
use tidegate_trickles::server::{self, Counters, Server};
use tidegate_trickles::tcp::PacketSource;
use tidegate_trickles::udp::{Connection, Format, Options, UdpServer};
use tidegate_trickles_xdp::XdpSource;
use tokio::io::AsyncReadExt;
use tokio::sync::{oneshot, watch};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

struct Running {
    counters: Arc<Counters>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// A source that says how much it took.
#[derive(Debug)]
struct Counted(XdpSource, Arc<AtomicU64>);

impl PacketSource for Counted {
    fn poll_fd(&self) -> BorrowedFd<'_> {
        self.0.poll_fd()
    }

    fn next(&self, packet: &mut [u8]) -> Option<usize> {
        let taken = self.0.next(packet);
        self.1.fetch_add(taken.is_some().into(), Ordering::Relaxed);
        taken
    }
}

fn serve(hosts: &Hosts, address: &'static str, length: u64) -> (Running, Arc<AtomicU64>) {
    let (stop, stopped) = oneshot::channel::<()>();
    let (say, heard) = std::sync::mpsc::channel();
    let taken = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&taken);
    let thread = Hosts::on(&hosts.server, move || {
        runtime().block_on(async {
            let keys = KeyRing::new(1, &[7; 16]);
            let now_ms =
                std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
            let server = Server::new(server::Config::default(), keys.clone(), now_ms as u64);
            let service = FileService::new(objects(&[length]));
            let source = XdpSource::open("trickle0", 4000).unwrap();
            let again = XdpSource::open("trickle0", 4000).unwrap_err().to_string();
            let source = Box::new(Counted(source, count));
            let mut server =
                UdpServer::with_source(address.parse().unwrap(), source, server, service).unwrap();
            say.send((server.counters(), again)).unwrap();
            let (_keys, rings) = watch::channel(keys);
            let stopped = async {
                let _ = stopped.await;
            };
            server.run(rings, stopped).await.unwrap();
        });
    });
    let (counters, again) = heard.recv().unwrap();
    assert!(again.to_lowercase().contains("busy"), "an interface has one program: {again}");
    (Running { counters, stop, thread }, taken)
}

async fn fetch(server: &str, encryption: Encryption) -> Result<Vec<u8>, std::io::Error> {
    let options = Options { format: Format::Tcp, encryption, ..Options::to(vec![server.parse().unwrap()]) };
    let mut stream = Connection::new(&options)?.request(b"/object/0").unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await?;
    Ok(bytes)
}

#[test]
fn marked_segments_when_af_xdp_takes_them_then_the_kernel_keeps_all_other_tcp() {
    let hosts = Hosts::new("xa");
    // Plain TCP at the same port, which is to work before, beside and after.
    let plain = Hosts::on(&hosts.server, || TcpListener::bind("[::]:4000").unwrap()).join().unwrap();
    std::thread::spawn(move || {
        for stream in plain.incoming() {
            let _ = stream.unwrap().write_all(&[b'p'; 2_000_000]);
        }
    });
    let ask_plain = || {
        Hosts::on(&hosts.client, || {
            let mut bytes = Vec::new();
            TcpStream::connect("10.99.0.1:4000").unwrap().read_to_end(&mut bytes).unwrap();
            bytes.len()
        })
    };
    let (running, taken) = serve(&hosts, "[::]:4000", 3_000_000);
    for server in ["10.99.0.1:4000", "[fd00:99::1]:4000"] {
        for encryption in [Encryption::Off, Encryption::On] {
            let counted = || running.counters.trickles_requests_total.get();
            let (before, requests_before) = (taken.load(Ordering::Relaxed), counted());
            let beside = ask_plain();
            let fetched =
                Hosts::on(&hosts.client, move || runtime().block_on(fetch(server, encryption)).unwrap());
            let bytes = fetched.join().unwrap();
            assert_eq!(bytes.len(), 3_000_000, "{server}");
            assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == byte_at(b"/object/0", at as u64)));
            assert_eq!(beside.join().unwrap(), 2_000_000);
            // Each request is a segment, and asks for some of 2,100 packets.
            let (taken, requests) = (taken.load(Ordering::Relaxed) - before, counted() - requests_before);
            assert!(requests > 60, "{requests} requests of {server}");
            assert!(taken * 10 > requests * 9, "AF_XDP took {taken} of {requests} requests of {server}");
        }
    }
    assert_eq!(running.counters.trickles_malformed_total.get(), 0);
    running.stop.send(()).unwrap();
    running.thread.join().unwrap();
    assert_eq!(ask_plain().join().unwrap(), 2_000_000);
    let links = Command::new("ip").args(["-n", &hosts.server, "link", "show", "trickle0"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&links.stdout).contains("xdp"), "the program has left the interface");
}

#[test]
fn an_interface_that_is_not_there_when_opened_then_the_error_says_so() {
    let error = XdpSource::open("tidegate-none", 4000).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(19), "{error}");
}
