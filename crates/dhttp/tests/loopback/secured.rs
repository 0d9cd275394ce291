//! Encryption: what an eavesdropper sees, what a forger can do, and which way answers come.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tidegate_dhttp::driver::{
    FetchBody, FetchError, FetchRequest, Fingerprint, Security, ServerOptions, Via,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::site::{Site, client_socket, get, pattern};
use super::{client, request};

fn secured_site() -> (Site, Fingerprint) {
    let security = Security::new().unwrap();
    let fingerprint = security.fingerprint();
    let options = ServerOptions { security: Some(security), ..ServerOptions::new().unwrap() };
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

/// A wire between a client and a server, on which all is seen.
async fn tapped(server: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
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
                    tap.lock().unwrap().extend_from_slice(&ahead[..length]);
                    backward.send_to(&ahead[..length], server).await.unwrap();
                }
                Ok(length) = backward.recv(&mut back) => {
                    tap.lock().unwrap().extend_from_slice(&back[..length]);
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
                        tap.lock().unwrap().extend_from_slice(&buffer[..length]);
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
    let has = |needle: &[u8]| seen.lock().unwrap().windows(needle.len()).any(|part| part == needle);
    let shown = pattern(60);
    for needle in [&b"/bytes"[..], b"HTTP/1.1", b"GET ", &shown[20..]] {
        assert!(!has(needle), "{}", needle.escape_ascii());
    }
    // That the wire would have shown it.
    client.fetch(through("/bytes/100")).await.unwrap();
    assert!(has(b"/bytes") && has(b"HTTP/1.1 200") && has(&shown[20..]));
}
