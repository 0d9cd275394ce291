//! Client and servers over real sockets on the loopback interface.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use support::{byte_at, objects};
use tidegate_trickles::client::ClientError;
use tidegate_trickles::files::{FileService, NOT_FOUND};
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::{self, Counters, Server};
use tidegate_trickles::udp::{self, Connection, Options, StreamError, UdpServer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

struct Running {
    address: SocketAddr,
    counters: Arc<Counters>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Running {
    /// Its socket is closed when this returns: what is sent there is refused.
    async fn kill(mut self) {
        drop(self.stop.take());
        self.task.await.unwrap();
    }
}

fn now_ms() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64
}

fn start(address: &str, lengths: &[u64]) -> Running {
    let socket = udp::bind(address.parse().unwrap(), false).unwrap();
    let server = Server::new(server::Config::default(), KeyRing::new(1, &[7; 16]), now_ms());
    let mut server = UdpServer::new(socket, server, FileService::new(objects(lengths))).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let (address, counters) = (server.local_addr().unwrap(), server.counters());
    let task = tokio::spawn(async move {
        let (_keys, rings) = watch::channel(KeyRing::new(1, &[7; 16]));
        let stopped = async {
            let _ = stopped.await;
        };
        server.run(rings, stopped).await.unwrap();
    });
    Running { address, counters, stop: Some(stop), task }
}

fn connect(servers: &[SocketAddr]) -> Connection {
    Connection::new(&Options::to(servers.to_vec())).unwrap()
}

fn assert_object(path: &[u8], bytes: &[u8], length: u64) {
    assert_eq!(bytes.len() as u64, length);
    let wrong = bytes.iter().enumerate().find(|&(at, &byte)| byte != byte_at(path, at as u64));
    assert_eq!(wrong, None, "at this place");
}

#[tokio::test]
async fn an_object_when_requested_then_its_bytes_are_read() {
    let server = start("127.0.0.1:0", &[5_000_000, 0]);
    let connection = connect(&[server.address]);
    let mut bytes = Vec::new();
    connection.request(b"/object/0").unwrap().read_to_end(&mut bytes).await.unwrap();
    assert_object(b"/object/0", &bytes, 5_000_000);
    bytes.clear();
    connection.request(b"/object/1").unwrap().read_to_end(&mut bytes).await.unwrap();
    assert!(bytes.is_empty());
    server.kill().await;
}

#[tokio::test]
async fn a_request_when_written_in_pieces_then_it_is_one_request() {
    let server = start("[::1]:0", &[300_000]);
    let mut stream = connect(&[server.address]).open().unwrap();
    stream.write_all(b"/object").await.unwrap();
    tokio::task::yield_now().await;
    stream.write_all(b"/0").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    assert_object(b"/object/0", &bytes, 300_000);
    server.kill().await;
}

#[tokio::test]
async fn many_requests_when_side_by_side_then_each_has_its_own_bytes() {
    let lengths: Vec<u64> = (0..40).map(|n| n * 7919).collect();
    let server = start("127.0.0.1:0", &lengths);
    let connection = connect(&[server.address]);
    let streams: Vec<_> = lengths
        .iter()
        .enumerate()
        .map(|(n, &length)| {
            let path = format!("/object/{n}").into_bytes();
            (connection.request(&path).unwrap(), path, length)
        })
        .collect();
    for (mut stream, path, length) in streams {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await.unwrap();
        assert_object(&path, &bytes, length);
    }
    server.kill().await;
}

#[tokio::test]
async fn a_missing_object_when_requested_then_the_stream_is_reset() {
    let server = start("127.0.0.1:0", &[1]);
    let error = connect(&[server.address]).request(b"/none").unwrap().read_u8().await.unwrap_err();
    let reason = error.get_ref().and_then(|source| source.downcast_ref::<StreamError>());
    assert_eq!(reason, Some(&StreamError::Reset(NOT_FOUND)));
    server.kill().await;
}

#[tokio::test]
async fn a_server_when_killed_in_mid_download_then_another_goes_on() {
    let lengths = [8_000_000];
    let (first, second) = (start("127.0.0.1:0", &lengths), start("127.0.0.1:0", &lengths));
    let connection = connect(&[first.address, second.address]);
    let mut stream = connection.request(b"/object/0").unwrap();
    let mut bytes = vec![0; 1_000_000];
    stream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(connection.server(), first.address);
    assert_eq!(second.counters.trickles_packets_sent_total.get(), 0);
    first.kill().await;
    stream.read_to_end(&mut bytes).await.unwrap();
    assert_object(b"/object/0", &bytes, lengths[0]);
    assert_eq!(connection.server(), second.address);
    let counters = &second.counters;
    assert!(counters.trickles_packets_sent_total.get() > 1000);
    assert_eq!(counters.trickles_opens_total.get(), 0, "the connection goes on where it was");
    second.kill().await;
}

#[tokio::test]
async fn a_server_when_killed_and_restarted_then_the_download_goes_on() {
    let lengths = [8_000_000];
    let first = start("127.0.0.1:0", &lengths);
    let address = first.address;
    let mut stream = connect(&[address]).request(b"/object/0").unwrap();
    let mut bytes = vec![0; 1_000_000];
    stream.read_exact(&mut bytes).await.unwrap();
    first.kill().await;
    let second = start(&address.to_string(), &lengths);
    stream.read_to_end(&mut bytes).await.unwrap();
    assert_object(b"/object/0", &bytes, lengths[0]);
    assert_eq!(second.counters.trickles_opens_total.get(), 0);
    second.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_when_nobody_answers_then_it_fails() {
    // Bound but never read: nothing refuses what is sent there.
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut stream = connect(&[silent.local_addr().unwrap()]).request(b"/object/0").unwrap();
    let error = stream.read_u8().await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    let reason = error.get_ref().and_then(|source| source.downcast_ref::<StreamError>());
    let attempts = tidegate_trickles::client::Config::default().max_attempts;
    assert_eq!(reason, Some(&StreamError::Connection(ClientError::Unreachable { attempts })));
}
