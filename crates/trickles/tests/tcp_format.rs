//! The paper's format between two hosts: network namespaces that a veth pair joins. Needs root; leaves nothing behind.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

#[path = "support/hosts.rs"]
mod hosts;
mod support;

use hosts::{Hosts, ip};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use support::{byte_at, objects};
use tidegate_trickles::files::FileService;
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::sealed::Encryption;
use tidegate_trickles::server::{self, Counters, Server};
use tidegate_trickles::udp::{self, Connection, Format, Options, StreamError, UdpServer};
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

fn serve(hosts: &Hosts, address: &'static str, length: u64) -> Running {
    let (stop, stopped) = oneshot::channel::<()>();
    let (say, heard) = std::sync::mpsc::channel();
    let thread = Hosts::on(&hosts.server, move || {
        runtime().block_on(async {
            let keys = KeyRing::new(1, &[7; 16]);
            let now_ms =
                std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
            let server = Server::new(server::Config::default(), keys.clone(), now_ms as u64);
            let service = FileService::new(objects(&[length]));
            let mut server = UdpServer::with_tcp_format(address.parse().unwrap(), server, service).unwrap();
            say.send(server.counters()).unwrap();
            let (_keys, rings) = watch::channel(keys);
            let stopped = async {
                let _ = stopped.await;
            };
            server.run(rings, stopped).await.unwrap();
        });
    });
    Running { counters: heard.recv().unwrap(), stop, thread }
}

async fn fetch(server: &str) -> Result<Vec<u8>, std::io::Error> {
    let options = Options { format: Format::Tcp, ..Options::to(vec![server.parse().unwrap()]) };
    let mut stream = Connection::new(&options)?.request(b"/object/0").unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await?;
    Ok(bytes)
}

#[test]
fn marked_segments_when_a_tcp_server_has_the_port_then_each_client_gets_what_it_asked_for() {
    let hosts = Hosts::new("a");
    // The kernel's TCP listens at the same port.
    let plain = Hosts::on(&hosts.server, || TcpListener::bind("[::]:4000").unwrap()).join().unwrap();
    let accepting = std::thread::spawn(move || {
        let (mut stream, _) = plain.accept().unwrap();
        stream.write_all(b"plain").unwrap();
        plain
    });
    let running = serve(&hosts, "[::]:4000", 3_000_000);
    for server in ["10.99.0.1:4000", "[fd00:99::1]:4000"] {
        let bytes =
            Hosts::on(&hosts.client, move || runtime().block_on(fetch(server)).unwrap()).join().unwrap();
        assert_eq!(bytes.len(), 3_000_000, "{server}");
        assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == byte_at(b"/object/0", at as u64)));
    }
    assert_eq!(running.counters.trickles_malformed_total.get(), 0);
    let text = Hosts::on(&hosts.client, || {
        let mut text = String::new();
        TcpStream::connect("10.99.0.1:4000").unwrap().read_to_string(&mut text).unwrap();
        text
    });
    assert_eq!(text.join().unwrap(), "plain");
    drop(accepting.join().unwrap());
    running.stop.send(()).unwrap();
    running.thread.join().unwrap();
    let rules =
        Command::new("ip").args(["netns", "exec", &hosts.server, "nft", "list", "ruleset"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&rules.stdout), "", "the rule is gone");
}

#[test]
fn a_plain_tcp_server_when_asked_in_the_format_then_the_client_learns_to_use_tcp() {
    let hosts = Hosts::new("b");
    let plain = Hosts::on(&hosts.server, || TcpListener::bind("10.99.0.1:4001").unwrap()).join().unwrap();
    // 4001 has a server of plain TCP, at 4002 there is nothing.
    for server in ["10.99.0.1:4001", "10.99.0.1:4002"] {
        let error =
            Hosts::on(&hosts.client, move || runtime().block_on(fetch(server)).unwrap_err()).join().unwrap();
        let reason = error.get_ref().and_then(|source| source.downcast_ref::<StreamError>());
        assert_eq!(reason, Some(&StreamError::Refused), "{server}");
    }
    let address: SocketAddr = plain.local_addr().unwrap();
    let connected = Hosts::on(&hosts.client, move || TcpStream::connect(address).is_ok());
    assert!(connected.join().unwrap());
}

#[test]
fn a_link_that_carries_less_than_ethernet_when_its_host_knows_then_no_datagram_is_too_long() {
    let hosts = Hosts::new("m");
    ip(&format!("-n {} link set trickle0 mtu 1300", hosts.server));
    ip(&format!("-n {} link set trickle1 mtu 1300", hosts.client));
    let (say, heard) = std::sync::mpsc::channel();
    let (stop, stopped) = oneshot::channel::<()>();
    let server = Hosts::on(&hosts.server, move || {
        runtime().block_on(async {
            let keys = KeyRing::new(1, &[7; 16]);
            let now_ms =
                std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
            let server = Server::new(server::Config::default(), keys.clone(), now_ms as u64);
            let socket = udp::bind("[::]:4000".parse().unwrap(), false).unwrap();
            let service = FileService::new(objects(&[1_000_000]));
            let mut server = UdpServer::new(socket, server, service).unwrap();
            say.send(server.counters()).unwrap();
            let (_keys, rings) = watch::channel(keys);
            let stopped = async {
                let _ = stopped.await;
            };
            server.run(rings, stopped).await.unwrap();
        });
    });
    let counters = heard.recv().unwrap();
    for address in ["10.99.0.1:4000", "[fd00:99::1]:4000"] {
        for encryption in [Encryption::Off, Encryption::On] {
            let options = Options { encryption, ..Options::to(vec![address.parse().unwrap()]) };
            let fetched = Hosts::on(&hosts.client, move || {
                runtime().block_on(async {
                    let mut stream = Connection::new(&options)?.request(b"/object/0").unwrap();
                    let mut bytes = Vec::new();
                    stream.read_to_end(&mut bytes).await.map(|_| bytes)
                })
            });
            let bytes = fetched.join().unwrap().unwrap();
            assert_eq!(bytes.len(), 1_000_000, "{address}");
            assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == byte_at(b"/object/0", at as u64)));
        }
    }
    assert_eq!(counters.trickles_socket_errors_total.get(), 0, "the server sent nothing that was too long");
    stop.send(()).unwrap();
    server.join().unwrap();
}
