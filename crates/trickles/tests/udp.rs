//! Client and servers over real sockets on the loopback interface.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use support::{Generated, byte_at, objects};
use tidegate_trickles::client::{ClientError, Config};
use tidegate_trickles::files::{FileService, NOT_FOUND, PATH_TOO_LONG};
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::{self, Application, Counters, Event, Minisocket, Server, Wait};
use tidegate_trickles::udp::{self, Connection, Options, RequestStream, StreamError, UdpServer};
use tidegate_trickles::wire::{self, Answer, Ask, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;
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
    serve(socket, FileService::new(objects(lengths)))
}

fn serve(socket: std::net::UdpSocket, application: impl Application + Send + 'static) -> Running {
    let server = Server::new(server::Config::default(), KeyRing::new(1, &[7; 16]), now_ms());
    let mut server = UdpServer::new(socket, server, application).unwrap();
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

/// Thinks before it answers what opens a connection.
struct Slow(FileService<Generated>, Duration);

impl Application for Slow {
    fn handle(&mut self, event: &Event<'_>, socket: &mut Minisocket) {
        self.0.handle(event, socket);
    }

    fn prepare(&mut self, _: &Event<'_>) -> Option<Wait> {
        let takes = self.1;
        (takes > Duration::ZERO).then(|| Box::pin(async move { tokio::time::sleep(takes).await }) as Wait)
    }
}

/// A client that took the wait for a part of the round trip would wait as long for each lost packet.
#[tokio::test]
async fn an_answer_that_waited_for_the_application_then_its_echo_says_for_how_long() {
    for takes in [Duration::ZERO, Duration::from_millis(30)] {
        let socket = udp::bind("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let server = serve(socket, Slow(FileService::new(objects(&[1000])), takes));
        let mut open = Vec::new();
        let sent_us = u32::MAX - 5;
        Request::encode_head(7, sent_us, &Ask::Open { datagram_bytes: 1200 }, &mut open);
        wire::pad(1200, &mut open);
        let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        client.send_to(&open, server.address).await.unwrap();
        let mut buffer = [0; 2000];
        let length = client.recv(&mut buffer).await.unwrap();
        let Ok(Answer::Response { timestamp_us, .. }) = Answer::decode(&buffer[..length]) else {
            panic!("no response: {:?}", &buffer[..length])
        };
        let held = Duration::from_micros(timestamp_us.wrapping_sub(sent_us).into());
        assert!(held >= takes && (takes > Duration::ZERO || held == takes), "{held:?} of {takes:?}");
        server.kill().await;
    }
}

/// Answers requests for one object only once the gate is open.
struct Gated(FileService<Generated>, watch::Receiver<bool>);

impl Application for Gated {
    fn handle(&mut self, event: &Event<'_>, socket: &mut Minisocket) {
        self.0.handle(event, socket);
    }

    fn prepare(&mut self, event: &Event<'_>) -> Option<Wait> {
        let mut gate = self.1.clone();
        let waits = event.inputs.iter().any(|input| input.data == b"/object/1");
        waits.then(|| {
            Box::pin(async move {
                let _ = gate.wait_for(|open| *open).await;
            }) as Wait
        })
    }
}

/// The packets that waited looked lost, and all else that the client had asked for waited with them.
#[tokio::test]
async fn a_request_that_waits_for_the_application_when_another_is_under_way_then_that_does_not_wait() {
    let (gate, opened) = watch::channel(false);
    let socket = udp::bind("127.0.0.1:0".parse().unwrap(), false).unwrap();
    let server = serve(socket, Gated(FileService::new(objects(&[8_000_000, 50_000])), opened));
    let connection = connect(&[server.address]);
    let mut first = connection.request(b"/object/0").unwrap();
    let mut bytes = vec![0; 500_000];
    first.read_exact(&mut bytes).await.unwrap();
    let mut second = connection.request(b"/object/1").unwrap();
    first.read_to_end(&mut bytes).await.unwrap();
    assert_object(b"/object/0", &bytes, 8_000_000);
    gate.send_replace(true);
    bytes.clear();
    second.read_to_end(&mut bytes).await.unwrap();
    assert_object(b"/object/1", &bytes, 50_000);
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

/// Carries datagrams between its client and `server`, but none for a while after so many to the client.
async fn relay_with_a_gap(relay: UdpSocket, server: SocketAddr, before: u32, gap: Duration) {
    let upstream = UdpSocket::bind("[::1]:0").await.unwrap();
    upstream.connect(server).await.unwrap();
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    let (mut client, mut carried, mut dark_until) = (None, 0, tokio::time::Instant::now());
    loop {
        let is_dark = tokio::time::Instant::now() < dark_until;
        tokio::select! {
            received = relay.recv_from(&mut up) => {
                // An error is that of a client that has gone to another address.
                let Ok((bytes, from)) = received else { continue };
                client = Some(from);
                if !is_dark {
                    upstream.send(&up[..bytes]).await.unwrap();
                }
            }
            received = upstream.recv(&mut down) => {
                let bytes = received.unwrap();
                if let Some(client) = client.filter(|_| !is_dark) {
                    let _ = relay.send_to(&down[..bytes], client).await;
                    carried += 1;
                    if carried == before {
                        dark_until = tokio::time::Instant::now() + gap;
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn a_dead_replica_when_the_one_that_serves_is_silent_for_a_while_then_the_download_goes_on() {
    let (dead, alive) = (start("127.0.0.1:0", &[1]), start("[::1]:0", &[5_000_000]));
    let dead_address = dead.address;
    dead.kill().await;
    let relay = UdpSocket::bind("[::1]:0").await.unwrap();
    // The one of the other address family has the client begin again, from another address.
    let servers = [dead_address, relay.local_addr().unwrap()];
    let relay = tokio::spawn(relay_with_a_gap(relay, alive.address, 500, Duration::from_millis(700)));
    let connection = connect(&servers);
    let mut bytes = Vec::new();
    connection.request(b"/object/0").unwrap().read_to_end(&mut bytes).await.unwrap();
    assert_object(b"/object/0", &bytes, 5_000_000);
    relay.abort();
    alive.kill().await;
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

/// What a stream's reader gets to the end, read by a task of its own.
fn read_apart(mut stream: RequestStream) -> JoinHandle<std::io::Result<Vec<u8>>> {
    tokio::spawn(async move {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await.map(|_| bytes)
    })
}

/// Longer than anything that ends here takes, of which most takes no second.
const FOR_GOOD: Duration = Duration::from_secs(60);

/// A wait that nobody ends fails instead of lasting for ever.
async fn ended<T>(limit: Duration, task: impl Future<Output = T>) -> T {
    tokio::time::timeout(limit, task).await.expect("somebody waits for good")
}

/// Has all tasks wait: nothing that they wait for happens meanwhile.
async fn wait_for_all_to_wait() {
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
}

fn reason(error: &std::io::Error) -> Option<StreamError> {
    error.get_ref()?.downcast_ref::<StreamError>().copied()
}

#[tokio::test]
async fn readers_that_wait_on_one_connection_when_their_answers_come_then_each_gets_its_own_to_the_end() {
    let lengths: Vec<u64> = [0, 1, 1_000, 100_000, 3_000_000].repeat(3);
    // Nobody reads from it before all readers wait.
    let socket = udp::bind("127.0.0.1:0".parse().unwrap(), false).unwrap();
    let connection = connect(&[socket.local_addr().unwrap()]);
    let path = |n| format!("/object/{n}").into_bytes();
    let whole = (0..lengths.len()).map(|n| read_apart(connection.request(&path(n)).unwrap()));
    let whole: Vec<_> = whole.collect();
    let missing = read_apart(connection.request(b"/none").unwrap());
    wait_for_all_to_wait().await;
    assert!(whole.iter().chain([&missing]).all(|task| !task.is_finished()));
    let server = serve(socket, FileService::new(objects(&lengths)));
    ended(FOR_GOOD, async {
        for (n, (task, length)) in whole.into_iter().zip(&lengths).enumerate() {
            assert_object(&path(n), &task.await.unwrap().unwrap(), *length);
        }
        assert_eq!(reason(&missing.await.unwrap().unwrap_err()), Some(StreamError::Reset(NOT_FOUND)));
        server.kill().await;
    })
    .await;
}

/// A stream with room for few bytes of input, and what becomes of writing many.
fn write_apart(connection: &Connection) -> JoinHandle<std::io::Error> {
    let mut stream = connection.open().unwrap();
    tokio::spawn(async move { stream.write_all(&[b'x'; 100_000]).await.unwrap_err() })
}

fn connect_with_little_room(server: SocketAddr) -> Connection {
    let config = Config { max_input_bytes: 4_000, ..Config::default() };
    Connection::new(&Options { config, ..Options::to(vec![server]) }).unwrap()
}

#[tokio::test(start_paused = true)]
async fn readers_and_writers_that_wait_when_nobody_ever_answers_then_each_gets_the_error() {
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let connection = connect_with_little_room(silent.local_addr().unwrap());
    let readers: Vec<_> = (0..3).map(|_| read_apart(connection.request(b"/object/0").unwrap())).collect();
    let writers: Vec<_> = (0..3).map(|_| write_apart(&connection)).collect();
    let attempts = Config::default().max_attempts;
    let unreachable = Some(StreamError::Connection(ClientError::Unreachable { attempts }));
    // Virtual time, in which all attempts are made.
    ended(60 * FOR_GOOD, async {
        for reader in readers {
            assert_eq!(reason(&reader.await.unwrap().unwrap_err()), unreachable);
        }
        for writer in writers {
            assert_eq!(reason(&writer.await.unwrap()), unreachable);
        }
    })
    .await;
}

#[tokio::test]
async fn readers_and_writers_that_wait_when_their_server_refuses_then_each_gets_the_error() {
    let closed = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let connection = connect_with_little_room(closed);
    let reader = read_apart(connection.request(b"/object/0").unwrap());
    let writer = write_apart(&connection);
    ended(FOR_GOOD, async {
        assert_eq!(reason(&reader.await.unwrap().unwrap_err()), Some(StreamError::Refused));
        assert_eq!(reason(&writer.await.unwrap()), Some(StreamError::Refused));
    })
    .await;
}

#[tokio::test]
async fn a_writer_without_room_when_its_request_is_reset_then_it_gets_the_error() {
    let server = start("127.0.0.1:0", &[]);
    let writer = write_apart(&connect_with_little_room(server.address));
    let error = ended(FOR_GOOD, writer).await.unwrap();
    assert_eq!(reason(&error), Some(StreamError::Reset(PATH_TOO_LONG)));
    server.kill().await;
}

/// Ends every output at once, whatever the input.
struct Terse;

impl Application for Terse {
    fn handle(&mut self, event: &Event<'_>, socket: &mut Minisocket) {
        for input in &event.inputs {
            socket.end(0, input.request, 0).unwrap();
        }
    }
}

#[tokio::test]
async fn a_writer_without_room_when_the_output_has_ended_then_it_gets_the_error() {
    let server = serve(udp::bind("127.0.0.1:0".parse().unwrap(), false).unwrap(), Terse);
    let writer = write_apart(&connect_with_little_room(server.address));
    assert_eq!(ended(FOR_GOOD, writer).await.unwrap().kind(), std::io::ErrorKind::BrokenPipe);
    server.kill().await;
}
