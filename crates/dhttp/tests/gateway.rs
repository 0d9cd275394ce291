//! An HTTP client behind the gateway: which way its requests go, and what it gets.
#![allow(clippy::unwrap_used, reason = "a test may end with a panic")]
#![allow(dead_code, reason = "the site has more than this needs")]

#[path = "loopback/site.rs"]
mod site;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use site::{Site, pattern};
use tidegate_dhttp::driver::{
    Body, ClientOptions, DhttpClient, FetchBody, FetchError, FetchRequest, Security, ServerOptions,
};
use tidegate_dhttp::gateway::{GatewayMetrics, GatewayOptions, serve};
use tidegate_http::Method;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

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
    http_server_on(TcpListener::bind("127.0.0.1:0").await.unwrap(), response)
}

/// On a port that a DHTTP server could have, but none has.
async fn http_server_on_servers_port(response: String) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    for n in 0..1000 {
        let address =
            SocketAddr::from(([127, 0, 0, 1], 10_000 + ((std::process::id() * 37 + n) % 22_000) as u16));
        let is_free = std::net::UdpSocket::bind(address).is_ok();
        if let Ok(listener) = TcpListener::bind(address).await
            && is_free
        {
            return http_server_on(listener, response);
        }
    }
    panic!("no free port");
}

fn http_server_on(listener: TcpListener, response: String) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
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
        &format!(
            "POST http://{server}/count HTTP/1.1\r\nHost: {server}\r\nContent-Length: 3\r\n\
             Connection: close\r\n\r\nabc"
        ),
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
    let (server, _) =
        http_server_on_servers_port("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi".into()).await;
    let answer = ask(&gateway, &get(server, "/_dhttp_/x")).await;
    assert!(answer.contains("Via: 1.1 ") && answer.ends_with("hi"), "{answer}");
    let metrics = gateway.client.metrics();
    assert_eq!(metrics.dhttp_client_use_http_total.get(), 1);
    assert_eq!(metrics.dhttp_client_resends_total.get(), 0, "no timer was needed");
    // No server listens at a client's port: nothing is sent there by UDP.
    let (server, _) = http_server("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi".into()).await;
    let answer = ask(&gateway, &get(server, "/_dhttp_/x")).await;
    assert!(answer.contains("Via: 1.1 ") && answer.ends_with("hi"), "{answer}");
    assert_eq!(metrics.dhttp_client_requests_total.get(), 2);
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

/// An HTTP server that reads one request up to `end`, answers 204 and returns what it has read.
async fn reading_server(end: Vec<u8>) -> (SocketAddr, JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let reading = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut received = Vec::new();
        while !received.ends_with(&end) {
            assert!(stream.read_buf(&mut received).await.unwrap() > 0, "{}", received.escape_ascii());
        }
        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
        received
    });
    (address, reading)
}

#[tokio::test]
async fn a_body_that_is_too_long_to_be_held_is_passed_on_as_it_comes() {
    let gateway = gateway(GatewayOptions::default()).await;
    let (server, reading) = reading_server(pattern(100_000).to_vec()).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let head = format!(
        "PUT http://{server}/ HTTP/1.1\r\nHost: {server}\r\nContent-Length: 100000\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&pattern(100_000)).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 204 "), "{answer}");
    reading.await.unwrap();
}

/// A gateway, and a server that announces a certificate to it.
async fn secured(gateway: &Gateway) -> (Site, SocketAddr, Arc<Mutex<Vec<String>>>) {
    let security = Security::new().unwrap();
    let fingerprint = security.fingerprint();
    let options = ServerOptions { security: Some(security), ..ServerOptions::new().unwrap() };
    let site = Site::start_with(options);
    let offer = format!(
        "HTTP/1.1 200 OK\r\nAlt-Svc: dhttp=\":{}\"; tls=\"{fingerprint}\"\r\nContent-Length: 2\r\n\r\nhi",
        site.address.port()
    );
    let (server, seen) = http_server(offer).await;
    ask(gateway, &get(server, "/")).await;
    (site, server, seen)
}

#[tokio::test]
async fn bodies_that_are_long_or_chunked_go_encrypted_where_the_server_announced_a_certificate() {
    let gateway = gateway(GatewayOptions::default()).await;
    let (site, server, seen) = secured(&gateway).await;
    let head = format!("POST http://{server}/count HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n");
    let body = "x".repeat(3011);
    let long = ask(&gateway, &format!("{head}Content-Length: 3011\r\n\r\n{body}")).await;
    assert!(
        long.contains("Via: DHTTP tidegate-gateway (client's connection)") && long.ends_with("1 3011"),
        "{long}"
    );
    let chunks = "5\r\nabc=1\r\n3;x=y\r\n&d=\r\n0\r\nTrailer-Field: z\r\n\r\n";
    let chunked = ask(&gateway, &format!("{head}Transfer-Encoding: chunked\r\n\r\n{chunks}")).await;
    assert!(chunked.contains("(client's connection)") && chunked.ends_with("2 8"), "{chunked}");
    assert!(site.handle.driver_metrics().dhttp_tls_total.get() >= 1);
    assert_eq!(
        (site.executed(), seen.lock().unwrap().len()),
        (2, 1),
        "nothing but the first GET went by HTTP"
    );
}

#[tokio::test]
async fn a_long_body_for_a_server_without_its_certificate_does_not_go_in_the_clear() {
    let gateway = gateway(GatewayOptions::default()).await;
    let site = Site::start();
    let offer = format!(
        "HTTP/1.1 200 OK\r\nAlt-Svc: dhttp=\":{}\"; tls=\"{}\"\r\nContent-Length: 2\r\n\r\nhi",
        site.address.port(),
        Security::new().unwrap().fingerprint()
    );
    let (server, seen) = http_server(offer).await;
    ask(&gateway, &get(server, "/")).await;
    let post = format!(
        "POST http://{server}/count HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\nContent-Length: 3011\r\n\r\n{}",
        "x".repeat(3011)
    );
    let refused = ask(&gateway, &post).await;
    assert!(refused.starts_with("HTTP/1.1 502 ") && refused.contains("; error="), "{refused}");
    assert_eq!((site.executed(), seen.lock().unwrap().len()), (0, 1));
}

#[tokio::test]
async fn a_chunked_body_keeps_its_framing_by_http() {
    let gateway = gateway(GatewayOptions::default()).await;
    let (server, reading) = reading_server(b"0\r\n\r\n".to_vec()).await;
    let answer = ask(
        &gateway,
        &format!(
            "POST http://{server}/q HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\
             Transfer-Encoding: chunked\r\n\r\n5\r\nabc=1\r\n0\r\n\r\n"
        ),
    )
    .await;
    assert!(answer.starts_with("HTTP/1.1 204 "), "{answer}");
    let received = reading.await.unwrap();
    assert_eq!(
        String::from_utf8(received).unwrap(),
        format!(
            "POST /q HTTP/1.1\r\nHost: {server}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc=1\r\n0\r\n\r\n"
        )
    );
}

#[tokio::test]
async fn a_client_that_waits_for_100_continue_is_told_to_go_on() {
    let gateway = gateway(GatewayOptions::default()).await;
    let (site, server, _) = secured(&gateway).await;
    for (n, length) in [(1, 10), (2, 5000)] {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        let head = format!(
            "POST http://{server}/count HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\nContent-Length: {length}\r\n\
             Expect: 100-continue\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut interim = [0; 25];
        stream.read_exact(&mut interim).await.unwrap();
        assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
        assert_eq!(site.executed(), n - 1);
        stream.write_all(&pattern(length)).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 200 ") && answer.ends_with(&format!("{n} {length}")),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn what_waits_for_100_continue_and_leads_nowhere_is_refused_at_once() {
    let gateway = gateway(GatewayOptions::default()).await;
    let answer = ask(
        &gateway,
        "POST http://224.0.0.1/ HTTP/1.1\r\nHost: 224.0.0.1\r\nContent-Length: 5000\r\nExpect: 100-continue\r\n\r\n",
    )
    .await;
    assert!(
        answer.starts_with("HTTP/1.1 403 ") && answer.contains("error=destination_ip_prohibited;"),
        "{answer}"
    );
}

#[tokio::test]
async fn a_body_finds_the_address_that_answers_after_one_that_does_not() {
    let client = DhttpClient::new(ClientOptions::default()).unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let (server, seen) = http_server("HTTP/1.1 204 No Content\r\n\r\n".into()).await;
    let (mut sender, body) = Body::channel();
    let request = FetchRequest {
        server: closed,
        site: "a".into(),
        method: Method::Put,
        head: "PUT /x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n".into(),
        body: FetchBody::Streamed(body.into()),
        by_tcp: false,
        http: Some(closed),
    };
    sender.send("abc".into()).await.unwrap();
    sender.end();
    let outcome = client.fetch_http(request.clone()).await;
    assert!(matches!(outcome, Err(FetchError::NoAnswer { sent: false, .. })), "{outcome:?}");
    let response = client.fetch_http(FetchRequest { http: Some(server), ..request }).await.unwrap();
    assert_eq!(response.status, 204);
    assert!(seen.lock().unwrap()[0].starts_with("PUT /x "));
}

#[tokio::test]
async fn who_may_not_use_it_or_comes_when_it_is_full_is_told_why() {
    let refusing = gateway(GatewayOptions { allow: Vec::new(), ..GatewayOptions::default() }).await;
    let answer = ask(&refusing, "GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 403 ") && answer.contains("--allow 127.0.0.1"), "{answer}");
    let full = gateway(GatewayOptions { connections: 1, ..GatewayOptions::default() }).await;
    let (server, _) = http_server("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi".into()).await;
    let mut first = TcpStream::connect(full.address).await.unwrap();
    first
        .write_all(format!("GET http://{server}/ HTTP/1.1\r\nHost: {server}\r\n\r\n").as_bytes())
        .await
        .unwrap();
    // It has its place when it has an answer.
    assert!(first.read(&mut [0; 1000]).await.unwrap() > 0);
    let answer = ask(&full, &get(server, "/")).await;
    assert!(
        answer.starts_with("HTTP/1.1 503 ") && answer.contains("error=connection_limit_reached;"),
        "{answer}"
    );
    assert_eq!(full.metrics.lock().unwrap().gateway_connections_refused_total.get(), 1);
}

#[tokio::test]
async fn what_fails_is_answered_with_a_reason() {
    let gateway = gateway(GatewayOptions::default()).await;
    let site = Site::start();
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    for (request, status, said) in [
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), "400", "curl --proxy http://127.0.0.1:"),
        (
            "GET http://a/ HTTP/1.1\r\nHost: a\r\nVia: 1.1 tidegate-gateway\r\n\r\n".to_owned(),
            "508",
            "error=proxy_loop_detected",
        ),
        ("GET http://a/ HTTP/1.1\r\n\r\n".to_owned(), "400", "error=http_request_error"),
        (get(closed, "/"), "502", "error=connection_refused"),
        ("GET http://no.such.name.invalid/ HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), "502", "error=dns_error"),
        (get(site.address, "/"), "502", "Proxy-Status: tidegate-gateway; error="),
        (format!("CONNECT {closed} HTTP/1.1\r\nHost: {closed}\r\n\r\n"), "502", "error=connection_refused"),
    ] {
        let answer = ask(&gateway, &request).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(said),
            "{request}{answer}"
        );
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let details = head.split("details=\"").nth(1).unwrap();
        assert!(body.contains(details.split(['"', '\\']).next().unwrap()), "{answer}");
    }
}
