//! Datagrams and peers that are up to no good, over real sockets.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use tidegate_dhttp::driver::{DhttpClient, FetchBody, ServerHandle, ServerOptions, Via};
use tidegate_dhttp::wire::{Answer, Once, Pieces, Request, RequestId, Response};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpSocket, TcpStream, UdpSocket};

use crate::site::{Site, client_listener, client_socket, get, pattern};
use crate::{client, request};

/// A sound request for `path` from a client with this TCP port.
fn datagram(id: u64, other_port: u16, token: Option<&[u8]>, path: &str) -> Vec<u8> {
    let mut datagram = Vec::new();
    let http = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    let id = RequestId(id.to_be_bytes());
    Request {
        id,
        other_port,
        resend: false,
        token,
        pieces: Pieces::Unknown,
        once: Once::No,
        http: http.as_bytes(),
    }
    .write(&mut datagram);
    datagram
}

/// The answer to a request that comes after whatever else was sent from this socket.
async fn last_answer(socket: &UdpSocket, server: SocketAddr) -> usize {
    let marker = u64::MAX;
    socket.send_to(&datagram(marker, 40_000, None, "/bytes/1"), server).await.unwrap();
    let (mut bytes, mut buffer) = (0, vec![0; 65_536]);
    loop {
        let (length, _) = socket.recv_from(&mut buffer).await.unwrap();
        if Response::parse(&buffer[..length]).unwrap().id.0 == marker.to_be_bytes() {
            return bytes;
        }
        bytes += length;
    }
}

#[tokio::test]
async fn malformed_empty_and_oversize_datagrams_get_at_most_three_times_their_bytes() {
    let site = Site::start();
    let socket = client_socket().await;
    let sound = datagram(1, 40_000, None, "/bytes/1");
    let mut oversize = datagram(2, 40_000, None, "/bytes/1");
    oversize.resize(65_507, b'x');
    let unknown_flags = [&sound[..10], &[0xff], &sound[11..]].concat();
    let cut = &sound[..sound.len() - 1];
    let answer = b"\x01\x02\x03\x04\x05\x06\x07\x08HTTP/1.1 200 OK\r\n\r\n";
    for bad in [&[][..], b"short", &oversize, &unknown_flags, cut, answer, &[0; 1472], &[0xff; 1472]] {
        socket.send_to(bad, site.address).await.unwrap();
        let answered = last_answer(&socket, site.address).await;
        assert!(answered <= 3 * bad.len(), "{answered} bytes for {}", bad.len());
    }
    let metrics = site.handle.metrics();
    assert_eq!(metrics.dhttp_requests_short_total.get(), 2);
    assert!(metrics.dhttp_requests_bad_header_total.get() >= 1);
    assert!(metrics.dhttp_requests_bad_http_total.get() >= 2);
    assert_eq!(metrics.dhttp_connections_opened_total.get(), 0);
}

#[tokio::test]
async fn ports_that_no_client_has_are_neither_answered_nor_connected_to() {
    let site = Site::start();
    let socket = client_socket().await;
    for port in [0, 22, 80, 1023, 8080, 32_767] {
        socket.send_to(&datagram(1, port, Some(&[]), "/bytes/100000"), site.address).await.unwrap();
    }
    assert_eq!(last_answer(&socket, site.address).await, 0);
    let metrics = site.handle.metrics();
    // What names a port below 1024 may be an answer.
    assert_eq!(metrics.dhttp_requests_looped_total.get(), 4);
    assert_eq!(metrics.dhttp_requests_bad_port_total.get(), 2);
    // From a port below the clients' range, as another server's would be.
    let other =
        (10_000..30_000).find_map(|port| std::net::UdpSocket::bind(("127.0.0.1", port)).ok()).unwrap();
    other.send_to(&datagram(1, 40_000, None, "/bytes/1"), site.address).unwrap();
    assert_eq!(last_answer(&socket, site.address).await, 0);
    assert_eq!(metrics.dhttp_requests_bad_port_total.get(), 3);
    assert_eq!(metrics.dhttp_connections_opened_total.get(), 0);
}

#[tokio::test]
async fn an_attacker_who_guesses_ids_and_floods_a_clients_ports_is_ignored() {
    let site = Site::start();
    let client = client();
    // Whoever sees the server's side learns the client's ports; ids it must guess.
    let relay = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let relay_address = relay.local_addr().unwrap();
    let fetching = {
        let (client, url) = (client.clone(), format!("dhttp://{relay_address}/bytes/77"));
        tokio::spawn(async move { client.get(&url).await })
    };
    let mut buffer = vec![0; 2000];
    let (length, victim) = relay.recv_from(&mut buffer).await.unwrap();
    for guess in 0..500_u64 {
        for tail in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"[..],
            b"\x01",
            b"\x02\x01x",
            b"",
            b"\x00\x00",
        ] {
            relay.send_to(&[&guess.to_be_bytes()[..], tail].concat(), victim).await.unwrap();
        }
    }
    // Now the real server's answers, through the same relay.
    let (back, upstream) = (client_socket().await, site.address);
    back.send_to(&buffer[..length], upstream).await.unwrap();
    let passing = tokio::spawn(async move {
        let (mut forth, mut answer) = (vec![0; 2000], vec![0; 2000]);
        loop {
            tokio::select! {
                Ok((length, _)) = relay.recv_from(&mut forth) => {
                    back.send_to(&forth[..length], upstream).await.unwrap();
                }
                Ok((length, _)) = back.recv_from(&mut answer) => {
                    relay.send_to(&answer[..length], victim).await.unwrap();
                }
            }
        }
    });
    let response = tokio::time::timeout(Duration::from_secs(30), fetching).await.unwrap().unwrap().unwrap();
    assert_eq!((response.status, response.via), (200, Via::Datagram));
    assert_eq!(response.body.collect(100).await.unwrap(), pattern(77));
    let metrics = client.metrics();
    assert!(metrics.dhttp_client_unmatched_total.get() > 0);
    assert!(metrics.dhttp_client_malformed_total.get() > 0);
    passing.abort();
}

#[tokio::test]
async fn clients_that_ask_for_long_answers_to_closed_ports_cost_one_syn_each_and_few_in_all() {
    let site = Site::start();
    let mut buffer = vec![0; 2000];
    // Bound, so that nobody else listens there, and not listening; all of them to the end, so that no port comes twice.
    let mut bound = Vec::new();
    for _ in 0..20 {
        let closed = TcpSocket::new_v4().unwrap();
        closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let port = closed.local_addr().unwrap().port();
        bound.push(closed);
        let socket = client_socket().await;
        socket.send_to(&datagram(1, port, Some(&[]), "/bytes/100000"), site.address).await.unwrap();
        let (length, _) = socket.recv_from(&mut buffer).await.unwrap();
        let Answer::ProveAddress { token } = Response::parse(&buffer[..length]).unwrap().answer else {
            panic!("no token")
        };
        let token = token.to_vec();
        for id in 2..5 {
            socket.send_to(&datagram(id, port, Some(&token), "/bytes/100000"), site.address).await.unwrap();
            let (length, _) = socket.recv_from(&mut buffer).await.unwrap();
            let answer = Response::parse(&buffer[..length]).unwrap();
            assert_eq!((answer.id.0, answer.answer), (id.to_be_bytes(), Answer::UseTcp));
        }
    }
    let metrics = site.handle.metrics();
    // All of them have one address.
    assert_eq!(metrics.dhttp_connections_opened_total.get(), 8);
    assert_eq!(metrics.dhttp_connections_spared_total.get(), 52);
    assert_eq!(metrics.dhttp_connections_open.get(), 0);
}

#[tokio::test]
async fn clients_that_close_the_servers_connection_early_are_told_to_open_their_own() {
    let site = Site::start();
    let listener = client_listener().await;
    let port = listener.local_addr().unwrap().port();
    let socket = client_socket().await;
    // A token first.
    socket.send_to(&datagram(1, port, Some(&[]), "/bytes/100000"), site.address).await.unwrap();
    let mut buffer = vec![0; 2000];
    let (length, _) = socket.recv_from(&mut buffer).await.unwrap();
    let Answer::ProveAddress { token } = Response::parse(&buffer[..length]).unwrap().answer else {
        panic!("no token")
    };
    let token = token.to_vec();
    for id in 2..12 {
        socket.send_to(&datagram(id, port, Some(&token), "/bytes/3000000"), site.address).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut some = [0; 100];
        stream.read_exact(&mut some).await.unwrap();
        assert_eq!(some[..8], id.to_be_bytes());
        stream.set_zero_linger().unwrap();
        drop(stream);
        let (length, _) = socket.recv_from(&mut buffer).await.unwrap();
        let answer = Response::parse(&buffer[..length]).unwrap();
        assert_eq!((answer.id.0, answer.answer), (id.to_be_bytes(), Answer::UseTcp));
    }
    // Nothing of it stays behind, and others are served.
    let response = client().get(&site.url("/bytes/100000")).await.unwrap();
    assert_eq!(response.via, Via::ServerConnection);
    assert!(response.body.collect(200_000).await.unwrap() == pattern(100_000));
    assert_eq!(site.handle.metrics().dhttp_requests_in_flight.get(), 0);
}

#[tokio::test]
async fn many_clients_who_leave_amid_their_answers_do_not_hold_up_one_who_stays() {
    let site = Site::start();
    let leaving: Vec<DhttpClient> = (0..20).map(|_| client()).collect();
    let mut begun = Vec::new();
    for client in &leaving {
        client.fetch(get(&site, "/bytes/10")).await.unwrap();
        // It has begun, and goes on when the gate opens.
        let response = client.fetch(get(&site, "/gated/3000000")).await.unwrap();
        assert_eq!(response.status, 200);
        begun.push(response);
        for path in ["/bytes/9000", "/bytes/10"] {
            // As soon as it is asked for, or a moment later.
            let _ = tokio::time::timeout(Duration::ZERO, client.fetch(get(&site, path))).await;
        }
    }
    // Some of the server's, and the rest of the clients' own, as all of them have one address.
    let open = |handle: &ServerHandle| {
        handle.metrics().dhttp_connections_open.get() + handle.driver_metrics().dhttp_accepted_open.get()
    };
    assert!(open(&site.handle) >= 20);
    drop((begun, leaving));
    site.gate.notify_waiters();
    let staying = client();
    for size in [10, 9_000, 1_000_000] {
        let path = format!("/bytes/{size}");
        let response = staying.fetch(get(&site, &path)).await.unwrap();
        assert!(response.body.collect(2_000_000).await.unwrap() == pattern(size));
    }
    let post = request(
        &site,
        "POST /bytes/5 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        FetchBody::Full(Bytes::new()),
    );
    assert_eq!(staying.fetch(post).await.unwrap().status, 200);
    site.until("nothing is left", |handle| handle.metrics().dhttp_requests_in_flight.get() == 0).await;
}

#[tokio::test]
async fn one_client_has_a_share_of_the_connections_that_clients_open() {
    let options = ServerOptions { accepted_per_client: 3, ..ServerOptions::new().unwrap() };
    let site = Site::start_with(options);
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(TcpStream::connect(site.address).await.unwrap());
    }
    site.until("they are accepted", |handle| handle.driver_metrics().dhttp_accepted_open.get() == 3).await;
    let mut refused = TcpStream::connect(site.address).await.unwrap();
    assert!(matches!(refused.read(&mut [0; 10]).await, Ok(0) | Err(_)));
    assert_eq!(site.handle.driver_metrics().dhttp_accepted_refused_total.get(), 1);
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.9:0".parse().unwrap()).unwrap();
    held.push(socket.connect(site.address).await.unwrap());
    site.until("another is served", |handle| handle.driver_metrics().dhttp_accepted_open.get() == 4).await;
    drop(held);
    site.until("all have gone", |handle| handle.driver_metrics().dhttp_accepted_open.get() == 0).await;
    assert_eq!(client().get(&site.url("/bytes/10")).await.unwrap().status, 200);
}

#[tokio::test]
async fn a_client_that_takes_none_of_its_answers_has_the_site_work_at_a_few_of_them() {
    let mut options = ServerOptions::new().unwrap();
    options.protocol.per_client = 3;
    let site = Site::start_with(options);
    let socket = client_socket().await;
    let listener = client_listener().await;
    let port = listener.local_addr().unwrap().port();
    let mut buffer = vec![0; 2000];
    socket.send_to(&datagram(1, port, Some(&[]), "/bytes/1"), site.address).await.unwrap();
    let (length, _) = socket.recv_from(&mut buffer).await.unwrap();
    let Answer::ProveAddress { token } = Response::parse(&buffer[..length]).unwrap().answer else {
        panic!("no token")
    };
    let token = token.to_vec();
    // Those whose head is there are waiting for the gate, and count as much as one that has not begun.
    for (id, path) in [(2, "/gated/100000"), (3, "/gated/100000"), (4, "/held/10")] {
        socket.send_to(&datagram(id, port, Some(&token), path), site.address).await.unwrap();
    }
    for id in 5..10 {
        socket.send_to(&datagram(id, port, Some(&token), "/bytes/1"), site.address).await.unwrap();
        let (length, _) = socket.recv_from(&mut buffer).await.unwrap();
        let answer = Response::parse(&buffer[..length]).unwrap();
        assert_eq!((answer.id.0, answer.answer), (id.to_be_bytes(), Answer::UseTcp));
    }
    assert_eq!((site.executed(), site.handle.metrics().dhttp_requests_crowded_total.get()), (3, 5));
    // Whoever opens a connection is served.
    let by_tcp = site.url("/bytes/10").replace("dhttp:", "dhttpt:");
    assert_eq!(client().get(&by_tcp).await.unwrap().status, 200);
    // All of them are made: the client has its places again.
    site.gate.notify_waiters();
    let mut id = 10;
    loop {
        socket.send_to(&datagram(id, port, Some(&token), "/bytes/1"), site.address).await.unwrap();
        let (length, _) = socket.recv_from(&mut buffer).await.unwrap();
        let answer = Response::parse(&buffer[..length]).unwrap();
        if answer.id.0 == id.to_be_bytes() {
            match answer.answer {
                Answer::Http { .. } => break,
                Answer::UseTcp => id += 1,
                other => panic!("{other:?}"),
            }
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
