//! An HTTP client behind the gateway: which way its requests go, and what it gets.
#![allow(clippy::unwrap_used, reason = "a test may end with a panic")]
#![allow(dead_code, reason = "the site has more than this needs")]

#[path = "loopback/site.rs"]
mod site;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use site::{Site, pattern};
use tidegate_dhttp::driver::{ClientOptions, DhttpClient, Security, ServerOptions};
use tidegate_dhttp::gateway::{GatewayMetrics, GatewayOptions, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

struct Gateway {
    address: SocketAddr,
    metrics: Arc<Mutex<GatewayMetrics>>,
    client: DhttpClient,
}

async fn gateway(options: GatewayOptions) -> Gateway {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let metrics = Arc::new(Mutex::new(GatewayMetrics::default()));
    let client = DhttpClient::new(ClientOptions::default()).unwrap();
    tokio::spawn(serve(listener, client.clone(), options, Arc::clone(&metrics)));
    Gateway { address, metrics, client }
}

/// An HTTP server on a port of its own; it answers each connection's one request with `response`.
async fn http_server(response: String) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let requests = Arc::clone(&seen);
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = vec![0; 4000];
            let length = stream.read(&mut buffer).await.unwrap();
            requests.lock().unwrap().push(String::from_utf8_lossy(&buffer[..length]).into_owned());
            stream.write_all(response.as_bytes()).await.unwrap();
        }
    });
    (address, seen)
}

/// Sends `request` and reads until the gateway closes.
async fn ask(gateway: &Gateway, request: &str) -> String {
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

fn get(server: SocketAddr, path: &str) -> String {
    format!("GET http://{server}{path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n")
}

#[tokio::test]
async fn a_server_that_offers_nothing_is_asked_by_http() {
    let gateway = gateway(GatewayOptions::default()).await;
    let (server, seen) = http_server("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi".into()).await;
    let answer = ask(&gateway, &get(server, "/x?y")).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"), "{answer}");
    assert!(
        answer.contains("\r\nVia: 1.1 tidegate-gateway\r\n") && answer.ends_with("\r\n\r\nhi"),
        "{answer}"
    );
    assert_eq!(*seen.lock().unwrap(), [format!("GET /x?y HTTP/1.1\r\nHost: {server}\r\n\r\n")]);
}

#[tokio::test]
async fn an_offer_with_a_certificate_is_taken_up_encrypted_as_long_as_it_holds() {
    let gateway = gateway(GatewayOptions::default()).await;
    let security = Security::new().unwrap();
    let (right, wrong) = (security.fingerprint(), Security::new().unwrap().fingerprint());
    let options = ServerOptions { security: Some(security), ..ServerOptions::new().unwrap() };
    let site = Site::start_with(options);
    for (fingerprint, via) in [(right, "Via: DHTTP tidegate-gateway (datagram)"), (wrong, "Via: 1.1 ")] {
        let offer = format!(
            "HTTP/1.1 200 OK\r\nAlt-Svc: dhttp=\":{}\"; tls=\"{fingerprint}\"\r\nContent-Length: 2\r\n\r\nhi",
            site.address.port()
        );
        let (server, _) = http_server(offer).await;
        let first = ask(&gateway, &get(server, "/bytes/10")).await;
        assert!(first.contains("Via: 1.1 "), "{first}");
        let second = ask(&gateway, &get(server, "/bytes/10")).await;
        assert!(second.starts_with("HTTP/1.1 200 ") && second.contains(via), "{second}");
    }
    assert_eq!(site.handle.metrics().dhttp_sealed_opened_total.get(), 2, "one with a token, after the first");
}

#[tokio::test]
async fn an_offer_in_alt_svc_makes_the_next_requests_go_by_dhttp() {
    let gateway = gateway(GatewayOptions::default()).await;
    let site = Site::start();
    let offer = format!(
        "HTTP/1.1 200 OK\r\nAlt-Svc: dhttp=\":{}\"\r\nContent-Length: 2\r\n\r\nhi",
        site.address.port()
    );
    let (server, seen) = http_server(offer).await;
    let first = ask(&gateway, &get(server, "/bytes/10")).await;
    assert!(first.contains("Via: 1.1 ") && !first.contains("Alt-Svc"), "{first}");
    let second = ask(&gateway, &get(server, "/bytes/10")).await;
    assert!(second.contains("\r\nVia: DHTTP tidegate-gateway (datagram)\r\n"), "{second}");
    let long = ask(&gateway, &get(server, "/chunked/50000")).await;
    assert!(long.contains("(server's connection)\r\nTransfer-Encoding: chunked\r\n"), "{}", &long[..200]);
    // The server sees to it that what must not be repeated is executed once.
    let posted = ask(
        &gateway,
        &format!("POST http://{server}/count HTTP/1.1\r\nHost: {server}\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc"),
    )
    .await;
    assert!(posted.contains("Via: DHTTP tidegate-gateway (datagram)"), "{posted}");
    assert_eq!(seen.lock().unwrap().len(), 1);
    let metrics = gateway.metrics.lock().unwrap();
    assert_eq!((metrics.gateway_datagram_total.get(), metrics.gateway_stream_total.get()), (2, 1));
}

#[tokio::test]
async fn a_url_by_the_convention_goes_by_dhttp_and_by_http_at_once_where_nobody_speaks_it() {
    let gateway = gateway(GatewayOptions::default()).await;
    let site = Site::start();
    let answer = ask(&gateway, &get(site.address, "/_dhttp_/x")).await;
    assert!(answer.starts_with("HTTP/1.1 404 ") && answer.contains("Via: DHTTP "), "{answer}");
    let (server, _) = http_server("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi".into()).await;
    let answer = ask(&gateway, &get(server, "/_dhttp_/x")).await;
    assert!(answer.contains("Via: 1.1 ") && answer.ends_with("hi"), "{answer}");
    assert_eq!(gateway.client.metrics().dhttp_client_resends_total.get(), 0, "no timer was needed");
}

#[tokio::test]
async fn several_requests_on_one_connection_are_answered_in_turn() {
    let gateway = gateway(GatewayOptions::default()).await;
    let (server, _) = http_server("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi".into()).await;
    let keep = format!("GET http://{server}/ HTTP/1.1\r\nHost: {server}\r\n\r\n");
    let answer = ask(&gateway, &format!("{keep}{keep}{}", get(server, "/"))).await;
    assert_eq!(answer.matches("HTTP/1.1 200 OK").count(), 3, "{answer}");
}

#[tokio::test]
async fn connect_opens_a_tunnel() {
    let gateway = gateway(GatewayOptions::default()).await;
    let (server, seen) = http_server("pong".into()).await;
    let answer = ask(&gateway, &format!("CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n\r\nping")).await;
    assert_eq!(answer, "HTTP/1.1 200 Connected\r\n\r\npong");
    assert_eq!(*seen.lock().unwrap(), ["ping"]);
}

#[tokio::test]
async fn a_body_that_is_too_long_to_be_held_is_passed_on_as_it_comes() {
    let gateway = gateway(GatewayOptions::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut received = Vec::new();
        while !received.ends_with(&pattern(100_000)) {
            stream.read_buf(&mut received).await.unwrap();
        }
        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
    });
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let head = format!(
        "PUT http://{server}/ HTTP/1.1\r\nHost: {server}\r\nContent-Length: 100000\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&pattern(100_000)).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 204 "), "{answer}");
    serving.await.unwrap();
}

#[tokio::test]
async fn strangers_and_what_is_not_for_a_proxy_are_refused() {
    let refusing = gateway(GatewayOptions { allow: Vec::new(), ..GatewayOptions::default() }).await;
    let mut stream = TcpStream::connect(refusing.address).await.unwrap();
    let read = stream.read(&mut [0; 10]).await;
    assert!(!matches!(read, Ok(1..)), "{read:?}");
    let gateway = gateway(GatewayOptions::default()).await;
    for (request, status) in [
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", "400"),
        ("GET http://a/ HTTP/1.1\r\nHost: a\r\nVia: 1.1 tidegate-gateway\r\n\r\n", "508"),
        ("GET http://a/ HTTP/1.1\r\n\r\n", "400"),
        ("GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: a\r\n\r\n", "502"),
    ] {
        let answer = ask(&gateway, request).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
}
