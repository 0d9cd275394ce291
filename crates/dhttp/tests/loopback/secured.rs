//! Encryption: what an eavesdropper sees, what a forger can do, and which way answers come.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tidegate_dhttp::client::ClientConfig;
use tidegate_dhttp::driver::{
    ClientOptions, DhttpClient, FetchBody, FetchError, FetchRequest, Fingerprint, Security, ServerOptions,
    Via,
};
use tidegate_dhttp::sealed::SEALED_FLAG;
use tidegate_dhttp::wire::{Answer, Once, Pieces, Request, RequestId, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::site::{Site, client_socket, get, pattern};
use super::{client, request};

fn secured_site() -> (Site, Fingerprint) {
    secured_site_with(ServerOptions::new().unwrap())
}

fn secured_site_with(options: ServerOptions) -> (Site, Fingerprint) {
    let security = Security::new().unwrap();
    let fingerprint = security.fingerprint();
    let options = ServerOptions { security: Some(security), ..options };
    (Site::start_with(options), fingerprint)
}

#[tokio::test]
async fn short_answers_come_in_datagrams_and_long_ones_over_tls() {
    let (site, fingerprint) = secured_site();
    let client = client();
    for (bytes, via) in
        [(100, Via::Datagram), (1300, Via::Datagram), (9000, Via::Datagram), (100_000, Via::ClientConnection)]
    {
        let wanted = get(&site, &format!("/bytes/{bytes}"));
        let response = client.fetch_secured(wanted, fingerprint).await.unwrap();
        assert_eq!((response.status, response.via), (200, via), "{bytes} bytes");
        assert_eq!(response.body.collect(200_000).await.unwrap(), pattern(bytes));
    }
    let metrics = site.handle.metrics();
    assert!(metrics.dhttp_sealed_opened_total.get() >= 4);
    assert_eq!(metrics.dhttp_connections_opened_total.get(), 0);
    // The long answer comes over the connection by which the key came.
    assert_eq!(site.handle.driver_metrics().dhttp_tls_total.get(), 1);
}

#[tokio::test]
async fn what_must_not_be_repeated_is_sealed_and_executed_once() {
    let (site, fingerprint) = secured_site();
    let client = client();
    for n in 1..=2 {
        let head = "POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n";
        let hello = FetchBody::Full(Bytes::from_static(b"hello"));
        let response = client.fetch_secured(request(&site, head, hello), fingerprint).await.unwrap();
        assert_eq!(response.via, Via::Datagram);
        assert_eq!(response.body.collect(100).await.unwrap(), format!("{n} 5"));
    }
    assert_eq!(site.executed(), 2);
}

#[tokio::test]
async fn a_server_with_another_certificate_gets_nothing() {
    let (site, _) = secured_site();
    let other = Security::new().unwrap().fingerprint();
    let outcome = client().fetch_secured(get(&site, "/bytes/10"), other).await;
    assert!(matches!(outcome, Err(FetchError::NoAnswer { sent: false, .. })), "{outcome:?}");
    assert_eq!(site.executed(), 0);
}

#[tokio::test]
async fn a_server_answers_in_the_clear_too() {
    let (site, _) = secured_site();
    let client = client();
    for (bytes, via) in [(100, Via::Datagram), (100_000, Via::ServerConnection)] {
        let response = client.get(&site.url(&format!("/bytes/{bytes}"))).await.unwrap();
        assert_eq!(response.via, via);
        assert_eq!(response.body.collect(200_000).await.unwrap(), pattern(bytes));
    }
    let by_tcp = site.url("/bytes/10").replace("dhttp:", "dhttpt:");
    assert_eq!(client.get(&by_tcp).await.unwrap().via, Via::ClientConnection);
}

/// What was seen on a wire.
#[derive(Default)]
struct Tap {
    /// All of it.
    bytes: Mutex<Vec<u8>>,
    /// The client's datagrams.
    requests: Mutex<Vec<Vec<u8>>>,
}

/// A wire between a client and a server, on which all is seen.
async fn tapped(server: SocketAddr) -> (SocketAddr, Arc<Tap>) {
    let seen = Arc::new(Tap::default());
    let (udp, tcp) = loop {
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()).await {
            break (udp, tcp);
        }
    };
    let address = udp.local_addr().unwrap();
    let backward = client_socket().await;
    let tap = Arc::clone(&seen);
    tokio::spawn(async move {
        let (mut ahead, mut back, mut client) = (vec![0; 2000], vec![0; 2000], None);
        loop {
            tokio::select! {
                Ok((length, from)) = udp.recv_from(&mut ahead) => {
                    client = Some(from);
                    tap.bytes.lock().unwrap().extend_from_slice(&ahead[..length]);
                    tap.requests.lock().unwrap().push(ahead[..length].to_vec());
                    backward.send_to(&ahead[..length], server).await.unwrap();
                }
                Ok(length) = backward.recv(&mut back) => {
                    tap.bytes.lock().unwrap().extend_from_slice(&back[..length]);
                    udp.send_to(&back[..length], client.unwrap()).await.unwrap();
                }
            }
        }
    });
    let tap = Arc::clone(&seen);
    tokio::spawn(async move {
        loop {
            let (near, _) = tcp.accept().await.unwrap();
            let far = TcpStream::connect(server).await.unwrap();
            let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
            for (mut from, mut to) in [(near_read, far_write), (far_read, near_write)] {
                let tap = Arc::clone(&tap);
                tokio::spawn(async move {
                    let mut buffer = vec![0; 16_384];
                    while let Ok(length @ 1..) = from.read(&mut buffer).await {
                        tap.bytes.lock().unwrap().extend_from_slice(&buffer[..length]);
                        if to.write_all(&buffer[..length]).await.is_err() {
                            break;
                        }
                    }
                });
            }
        }
    });
    (address, seen)
}

#[tokio::test]
async fn on_the_wire_neither_requests_nor_answers_can_be_read() {
    let (site, fingerprint) = secured_site();
    let (wire, seen) = tapped(site.address).await;
    let client = client();
    let through = |path: &str| FetchRequest { server: wire, ..get(&site, path) };
    for path in ["/bytes/100", "/bytes/5000", "/bytes/60000"] {
        let response = client.fetch_secured(through(path), fingerprint).await.unwrap();
        assert_eq!(response.status, 200);
        response.body.collect(100_000).await.unwrap();
    }
    let has = |needle: &[u8]| seen.bytes.lock().unwrap().windows(needle.len()).any(|part| part == needle);
    let shown = pattern(60);
    for needle in [&b"/bytes"[..], b"HTTP/1.1", b"GET ", &shown[20..]] {
        assert!(!has(needle), "{}", needle.escape_ascii());
    }
    // That the wire would have shown it.
    client.fetch(through("/bytes/100")).await.unwrap();
    assert!(has(b"/bytes") && has(b"HTTP/1.1 200") && has(&shown[20..]));
}

const HELLO: &str = "POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n";

/// A datagram of the protocol.
fn plain(once: Once, token: Option<&[u8]>, http: &[u8]) -> Vec<u8> {
    let mut datagram = Vec::new();
    let (id, other_port, pieces) = (RequestId(*b"stranger"), 40_000, Pieces::Unknown);
    Request { id, other_port, resend: false, token, pieces, once, http }.write(&mut datagram);
    datagram
}

#[tokio::test]
async fn whoever_has_seen_the_ticket_and_number_of_a_sealed_request_is_not_told_its_answer() {
    let (site, fingerprint) = secured_site();
    let (wire, seen) = tapped(site.address).await;
    let client = client();
    let post = || {
        let request = request(&site, HELLO, FetchBody::Full(Bytes::from_static(b"hello")));
        FetchRequest { server: wire, ..request }
    };
    let response = client.fetch_secured(post(), fingerprint).await.unwrap();
    assert_eq!((response.status, response.via, site.executed()), (200, Via::Datagram, 1));
    let once = seen.requests.lock().unwrap().iter().rev().find_map(|datagram| {
        let mut datagram = datagram.clone();
        datagram[10] &= !SEALED_FLAG;
        Some(Request::parse(&datagram).ok()?.once).filter(|once| matches!(once, Once::Numbered(_)))
    });
    let once = once.expect("a numbered request was seen");
    // From the same address, in the clear: another request under that number, and the very one, as if it had been
    // guessed.
    let socket = client_socket().await;
    for http in
        ["POST /anything HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".into(), format!("{HELLO}hello")]
    {
        let mut token = Vec::new();
        for _ in 0..2 {
            let datagram = plain(once, Some(&token), http.as_bytes());
            socket.send_to(&datagram, site.address).await.unwrap();
            let mut buffer = vec![0; 2000];
            let length = socket.recv(&mut buffer).await.unwrap();
            match Response::parse(&buffer[..length]).unwrap().answer {
                Answer::ProveAddress { token: given } if token.is_empty() => token = given.to_vec(),
                Answer::OutcomeUnknown if !token.is_empty() => {}
                other => panic!("{other:?}"),
            }
        }
        let mut stream = TcpStream::connect(site.address).await.unwrap();
        stream.write_all(&plain(once, None, http.as_bytes())).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        assert!(answer.is_empty(), "{}", answer.escape_ascii());
    }
    assert_eq!(site.executed(), 1);
    // Its owner goes on as if nothing had been.
    let response = client.fetch_secured(post(), fingerprint).await.unwrap();
    assert_eq!((response.status, response.via, site.executed()), (200, Via::Datagram, 2));
}

/// A client that soon loses patience with datagrams, so often.
fn impatient(resends: u32) -> DhttpClient {
    let first_timeout = Duration::from_millis(50);
    let protocol = ClientConfig { first_timeout, resends, ..ClientConfig::default() };
    DhttpClient::new(ClientOptions { protocol, ..ClientOptions::default() }).unwrap()
}

#[tokio::test]
async fn a_sealed_request_that_takes_longer_than_the_client_waits_is_executed_once() {
    let mut options = ServerOptions::new().unwrap();
    // What is sent again a moment too late is no loss here.
    options.protocol.loss_threshold = 1.0;
    let (site, fingerprint) = secured_site_with(options);
    // What fits datagrams comes by them, the rest over TLS, both as soon as it is there.
    for (n, (bytes, via)) in [(100, Via::Datagram), (9000, Via::Datagram), (100_000, Via::ClientConnection)]
        .into_iter()
        .enumerate()
    {
        let client = impatient(1000);
        let response = client.fetch_secured(get(&site, "/bytes/1"), fingerprint).await.unwrap();
        assert_eq!(response.status, 200);
        let (executed, before) =
            (site.executed(), site.handle.metrics().dhttp_requests_duplicate_total.get());
        let wanted = get(&site, &format!("/held/{bytes}"));
        let secured = client.clone();
        let fetch = tokio::spawn(async move { secured.fetch_secured(wanted, fingerprint).await.unwrap() });
        site.until("it is sent again while it is being executed", |handle| {
            handle.metrics().dhttp_requests_duplicate_total.get() > before
        })
        .await;
        site.gate.notify_one();
        let response = fetch.await.unwrap();
        assert_eq!((response.status, response.via), (200, via), "{n}");
        assert_eq!(response.body.collect(200_000).await.unwrap(), pattern(bytes));
        assert_eq!(site.executed(), executed + 1);
    }
    assert_eq!(site.handle.driver_metrics().dhttp_joined_total.get(), 1);
}

#[tokio::test]
async fn a_client_that_asks_over_tls_while_its_sealed_request_is_executed_joins_it() {
    let (site, fingerprint) = secured_site();
    let client = impatient(0);
    let by_datagram = client.fetch_secured(get(&site, "/bytes/1"), fingerprint).await.unwrap();
    assert_eq!(by_datagram.status, 200);
    let executed = site.executed();
    let wanted = get(&site, "/held/10");
    let fetch = tokio::spawn(async move { client.fetch_secured(wanted, fingerprint).await.unwrap() });
    site.until("it has joined", |handle| handle.driver_metrics().dhttp_joined_total.get() == 1).await;
    site.gate.notify_one();
    let response = fetch.await.unwrap();
    assert_eq!((response.status, response.via), (200, Via::ClientConnection));
    assert_eq!(response.body.collect(100).await.unwrap(), pattern(10));
    assert_eq!(site.executed(), executed + 1);
}

#[tokio::test]
async fn a_sealed_request_that_is_refused_is_told_so_sealed() {
    let (site, fingerprint) = secured_site();
    let client = client();
    let response = client.fetch_secured(get(&site, "/../%00"), fingerprint).await.unwrap();
    assert_eq!((response.status, response.via), (400, Via::Datagram));
    assert_eq!(client.metrics().dhttp_client_resends_total.get(), 0);
    assert_eq!(site.executed(), 0);
}
