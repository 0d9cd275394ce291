//! The filter of another language by itself, between two neighbours that this test is (docs/protocol/filter.md).
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use common::{needs, wait_until};
use tidegate_conditioning::ledger::{Ledger, State};
use tidegate_conditioning::neighbours::environment;
use tidegate_conditioning::server::{self, AcceptOptions};
use tidegate_conditioning::wire::{Bundle, Id, Notice};
use tidegate_conditioning::{link, wire};

struct Filter {
    child: Child,
    upstream: OwnedFd,
    _downstream: OwnedFd,
    _control: OwnedFd,
    ledger: Ledger,
}

/// A client and its socket, which travels along the chain.
struct Client {
    client: TcpStream,
    socket: TcpStream,
}

impl Client {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(common::PATIENCE)).unwrap();
        Self { client, socket: listener.accept().unwrap().0 }
    }

    /// A request of its own that is held under `slot`.
    fn present(&mut self, ledger: &Ledger, slot: u32, target: &str) -> Bundle {
        let request = format!("GET {target} HTTP/1.1\r\nHost: test\r\n\r\n").into_bytes();
        self.client.write_all(&request).unwrap();
        let length = request.len() as u32;
        assert!(ledger.take(slot));
        Bundle {
            id: ledger.present(slot).unwrap(),
            flags: wire::flags::PERSISTENT,
            peer: self.client.local_addr().unwrap(),
            socket_bytes: length.into(),
            arrived_ns: 0,
            replaces: 0,
            head_bytes: length,
            request,
        }
    }

    /// Whether nothing was sent to it, nor is its connection over.
    fn waits(&self) -> bool {
        self.client.set_nonblocking(true).unwrap();
        self.client.peek(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    }

    /// What it receives until its connection is over.
    fn received(mut self) -> String {
        drop(self.socket);
        let mut text = String::new();
        self.client.read_to_string(&mut text).unwrap();
        text
    }
}

impl Filter {
    /// `examples/filters/tag.py`, ready.
    fn start(arguments: &str) -> Self {
        needs("python3", "python3");
        let (upstream, its_upstream) = link::pair().unwrap();
        let (downstream, its_downstream) = link::pair().unwrap();
        let (control, its_control) = link::pair().unwrap();
        let (ledger, file) = Ledger::create().unwrap();
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/filters/tag.py"));
        command.arg(arguments).stdin(Stdio::null());
        let inherited = [
            (environment::UPSTREAM, its_upstream.as_raw_fd()),
            (environment::DOWNSTREAM, its_downstream.as_raw_fd()),
            (environment::CONTROL, its_control.as_raw_fd()),
            (environment::LEDGER, file.as_raw_fd()),
        ];
        command.envs(inherited.map(|(name, fd)| (name, fd.to_string())));
        // SAFETY: fcntl is async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                for (_, fd) in inherited {
                    libc::fcntl(fd, libc::F_SETFD, 0);
                }
                Ok(())
            })
        };
        let child = command.spawn().unwrap();
        let filter = Self { child, upstream, _downstream: downstream, _control: control, ledger };
        let mut ready = [0; 1];
        assert_eq!(rustix::io::read(&filter._control, &mut ready[..]), Ok(1));
        assert_eq!(&ready, b"R");
        filter
    }

    fn hand(&self, client: &Client, bundle: &Bundle) {
        link::send_bundle(self.upstream.as_fd(), bundle, client.socket.as_fd(), &mut Vec::new()).unwrap();
    }

    /// The next notice that it sends upstream.
    fn told(&self) -> Notice {
        let mut told = None;
        wait_until("it gives notice", || {
            told = link::receive_notice(self.upstream.as_fd());
            told.is_some()
        });
        told.unwrap().unwrap()
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_request_that_is_refused_is_taken_and_over_once_it_is_answered() {
    let filter = Filter::start("forbid=/private");
    let mut client = Client::new();
    let bundle = client.present(&filter.ledger, 1, "/private/a");
    assert!(filter.ledger.ask(bundle.id));
    filter.hand(&client, &bundle);
    assert_eq!(filter.told(), Notice::ClosedForAll(bundle.id));
    assert_eq!(filter.ledger.state(1), (bundle.id.generation, State::EndedForAll));
    assert!(client.received().starts_with("HTTP/1.1 403 "));
}

/// It is handed again what an earlier process of it had handed on: both would have answered.
#[test]
fn a_request_that_the_server_has_taken_is_not_refused_as_well() {
    let filter = Filter::start("forbid=/private");
    let mut taken = Client::new();
    let bundle = taken.present(&filter.ledger, 1, "/private/a");
    assert!(filter.ledger.claim(bundle.id));
    filter.hand(&taken, &bundle);
    // Nor one of which there is a newer presentation.
    let mut newer = Client::new();
    let older = newer.present(&filter.ledger, 2, "/private/b");
    assert_ne!(filter.ledger.present(2).unwrap(), older.id);
    filter.hand(&newer, &older);
    let mut other = Client::new();
    let last = other.present(&filter.ledger, 3, "/private/c");
    filter.hand(&other, &last);
    assert_eq!(filter.told(), Notice::ClosedForAll(last.id));
    assert!(other.received().starts_with("HTTP/1.1 403 "));
    assert_eq!(filter.ledger.state(1), (bundle.id.generation, State::Accepted));
    let Id { slot, generation } = older.id;
    assert_eq!(filter.ledger.state(slot), (generation + 1, State::Held));
    assert!(taken.waits() && newer.waits());
}

/// What a filter sends that is no bundle is not the client's fault, nor a reason to stop serving.
#[test]
fn a_server_goes_on_behind_a_datagram_that_is_refused() {
    let (link, upstream) = link::pair().unwrap();
    let (ledger, file) = Ledger::create().unwrap();
    let mut client = Client::new();
    let bundle = client.present(&ledger, 1, "/");
    rustix::net::send(&upstream, b"no bundle", rustix::net::SendFlags::empty()).unwrap();
    link::send_bundle(upstream.as_fd(), &bundle, client.socket.as_fd(), &mut Vec::new()).unwrap();
    let chain = server::chain(link.try_clone().unwrap(), &file).unwrap();
    let number = link.as_raw_fd();
    server::listen(number, chain, std::net::SocketAddr::from(([127, 0, 0, 1], 80))).unwrap();
    let (_, peer) = server::accept(number, AcceptOptions::default()).unwrap().unwrap();
    assert_eq!(peer, bundle.peer);
}
