//! Servers that are spoken to by HTTP/2: many requests share a connection, and none waits for another.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::future::poll_fn;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, SendStream};
use http::{HeaderMap, Request, Response};
use rustix::net::sockopt;
use tidegate_e2e::http2;
use tidegate_e2e::http2_origin::{Exchange, Http2Origin, Manners};
use tidegate_e2e::{
    Builder, Certificate, Client, Origin, Reply, Tidegate, TlsDoor, content, eventually, free_port,
};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

/// Larger than every window.
const LARGE: usize = 24 << 20;

/// With HTTP/2 to this server, on one core.
fn before(server: impl std::fmt::Display, lines: &str) -> Builder {
    Tidegate::builder()
        .group("app", &[server.to_string()], &format!("http2 = true\n{lines}"))
        .route("/", "upstream = \"app\"")
        .top("workers = 1")
}

/// Answers with what was asked, unless it is to wait.
async fn echo_target(exchange: Exchange, waiting: Arc<Semaphore>) {
    let target = exchange.target();
    if target.starts_with("/wait") {
        waiting.acquire().await.unwrap().forget();
    }
    exchange.ok(target);
}

#[test]
fn requests_at_once_share_a_connection_and_none_waits_for_another() {
    let waiting = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&waiting);
    let origin = Http2Origin::start(move |exchange| echo_target(exchange, Arc::clone(&held)));
    let tidegate = before(origin.address(), "").start();
    let mut slow: Vec<Client> = (0..20).map(|_| tidegate.connect()).collect();
    for (number, client) in slow.iter_mut().enumerate() {
        client.send(format!("GET /wait/{number} HTTP/1.1\r\nHost: a\r\n\r\n"));
    }
    eventually("all of them are there", || (origin.count() == 20).then_some(()));
    assert_eq!(tidegate.get("/quick?a=b").text(), "/quick?a=b");
    waiting.add_permits(20);
    for (number, client) in slow.iter_mut().enumerate() {
        assert_eq!(client.response().text(), format!("/wait/{number}"));
    }
    assert_eq!(origin.connections(), 1);
    let head = origin.last();
    assert_eq!(head.uri().scheme_str(), Some("http"));
    assert_eq!(head.uri().authority().unwrap(), "example.org");
    let fields = head.headers();
    assert!(fields.contains_key("x-forwarded-for") && fields.contains_key("via"), "{fields:?}");
    assert_eq!(fields["te"], "trailers");
    for about_the_connection in ["connection", "host", "transfer-encoding", "keep-alive"] {
        assert!(!fields.contains_key(about_the_connection), "{fields:?}");
    }
}

#[test]
fn content_of_all_sizes_goes_both_ways_and_what_may_be_stored_is() {
    let origin = Http2Origin::start(|mut exchange: Exchange| async move {
        let (content, _) = exchange.content().await.unwrap();
        let is_get = exchange.request.method() == "GET";
        let content = if is_get { Bytes::from(content_of_page()) } else { content.into() };
        let length = content.len();
        let response =
            Response::builder().header("cache-control", "max-age=60").header("content-length", length);
        let mut stream = exchange.respond.send_response(response.body(()).unwrap(), false).unwrap();
        stream.send_data(content, true).unwrap();
    });
    let tidegate = before(origin.address(), "").start();
    let mut client = tidegate.connect();
    for is_hit in [false, true] {
        let response = client.get("/page");
        assert!(response.body == content_of_page() && response.is_hit() == is_hit, "{response:?}");
    }
    assert_eq!(client.request("HEAD", "/page", "").field("Content-Length"), "300000");
    let upload = content(2, LARGE);
    client.send(format!("PUT /b HTTP/1.1\r\nHost: a\r\nContent-Length: {LARGE}\r\n\r\n"));
    client.send(&upload);
    assert!(client.response().body == upload, "what was uploaded comes back");
    client.send(
        "PUT /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    );
    assert_eq!(client.response().text(), "abcde");
    client.send("PUT /d HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(client.response().text(), "");
    assert_eq!(origin.connections(), 1);
}

fn content_of_page() -> Vec<u8> {
    content(1, 300_000)
}

/// As gRPC does it: messages go both ways while both directions are open, and trailers say how it ended.
#[test]
fn a_conversation_goes_on_in_both_directions_and_ends_with_trailers() {
    let origin = Http2Origin::start(|mut exchange: Exchange| async move {
        let response = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
        let mut answers = exchange.respond.send_response(response, false).unwrap();
        let questions = exchange.request.body_mut();
        while let Some(question) = questions.data().await {
            let question = question.unwrap();
            questions.flow_control().release_capacity(question.len()).unwrap();
            let answer: Vec<u8> = question.iter().rev().copied().collect();
            answers.send_data(answer.into(), false).unwrap();
        }
        let said = questions.trailers().await.unwrap().unwrap()["x-checksum"].clone();
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().unwrap());
        trailers.insert("x-said", said);
        answers.send_trailers(trailers).unwrap();
    });
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let table = format!("[[listen]]\naddress = \"{address}\"\nhttp2 = true\n");
    let _tidegate = before(origin.address(), "").tables(&table).start();
    http2::run(async {
        let socket = TcpStream::connect(address).await.unwrap();
        let (mut requests, connection) = h2::client::handshake(socket).await.unwrap();
        tokio::spawn(connection);
        let request = Request::post("http://a.example/talk.Talk/Reverse").header("te", "trailers");
        let request = request.header("content-type", "application/grpc").body(()).unwrap();
        let (response, mut questions) = requests.send_request(request, false).unwrap();
        questions.send_data("first".into(), false).unwrap();
        let mut response = response.await.unwrap();
        assert_eq!(response.headers()["content-type"], "application/grpc");
        let answers = response.body_mut();
        assert_eq!(answers.data().await.unwrap().unwrap(), "tsrif");
        questions.send_data("second".into(), false).unwrap();
        assert_eq!(answers.data().await.unwrap().unwrap(), "dnoces");
        let mut trailers = HeaderMap::new();
        trailers.insert("x-checksum", "7".parse().unwrap());
        questions.send_trailers(trailers).unwrap();
        assert!(answers.data().await.is_none());
        let trailers = answers.trailers().await.unwrap().unwrap();
        assert_eq!(
            (&trailers["grpc-status"], &trailers["x-said"]),
            (&"0".parse().unwrap(), &"7".parse().unwrap())
        );
    });
}

#[test]
fn a_server_with_tls_chooses_the_protocol() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Certificate::authority();
    authority.write(directory.path(), "ca");
    let certificate = authority.sign(&["localhost"]);
    let tls = format!("tls = {{ authority = \"{}\" }}", directory.path().join("ca.crt").display());
    let http2 = Http2Origin::with(Manners::encrypted(&certificate), |exchange| async { exchange.ok("by 2") });
    let tidegate = before(format!("https://localhost:{}", http2.address().port()), &tls).start();
    for _ in 0..3 {
        assert_eq!(tidegate.get("/").text(), "by 2");
    }
    assert_eq!(http2.last().uri().scheme_str(), Some("https"));
    assert_eq!(http2.connections(), 1);
    let http1 = Origin::start(|_| Reply::ok("by 1"));
    let door = TlsDoor::before(&http1, &certificate);
    let tidegate = before(door.url("localhost"), &tls).start();
    for _ in 0..3 {
        assert_eq!(tidegate.get("/").text(), "by 1");
    }
    assert_eq!(http1.connections(), 1, "it is kept, as where HTTP/2 was not asked for");
}

#[test]
fn a_server_gets_no_more_requests_on_a_connection_than_it_wants() {
    let waiting = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&waiting);
    let mut manners = Manners::default();
    manners.builder.max_concurrent_streams(2);
    let origin = Http2Origin::with(manners, move |exchange| echo_target(exchange, Arc::clone(&held)));
    let tidegate = before(origin.address(), "").start();
    let mut clients: Vec<Client> = (0..6).map(|_| tidegate.connect()).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client.send(format!("GET /wait/{number} HTTP/1.1\r\nHost: a\r\n\r\n"));
    }
    eventually("all of them are there", || (origin.count() == 6).then_some(()));
    waiting.add_permits(6);
    for (number, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.response().text(), format!("/wait/{number}"));
    }
    let connections = origin.connections();
    assert!((3..=6).contains(&connections), "{connections}");
    assert_eq!(tidegate.get("/").text(), "/");
    assert_eq!(
        (origin.connections(), origin.count()),
        (connections, 7),
        "one of them, and none was asked for twice"
    );
}

/// Of what it has not begun, nothing can come twice (RFC 9113 §8.7), whatever was asked for.
#[test]
fn what_a_server_turns_away_or_has_no_time_for_goes_on_another_connection() {
    let origin = Http2Origin::start(|mut exchange: Exchange| async move {
        match (exchange.connection, exchange.target().as_str()) {
            // It says so behind this response, before which the next request may be there.
            (0, "/last") => {
                exchange.goodbye.notify_one();
                exchange.ok("last");
            }
            (1, "/refused") => {
                // It has begun to come.
                exchange.request.body_mut().data().await.unwrap().unwrap();
                exchange.respond.send_reset(Reason::REFUSED_STREAM);
            }
            (connection, _) => {
                let (content, _) = exchange.content().await.unwrap();
                exchange.ok(format!("{connection}{}", String::from_utf8(content).unwrap()));
            }
        }
    });
    let tidegate = before(origin.address(), "").start();
    let mut client = tidegate.connect();
    let mut post = |target: &str| client.request("POST", target, "Content-Length: 0\r\n").text();
    assert_eq!(post("/"), "0");
    assert_eq!(post("/last"), "last");
    assert_eq!(post("/"), "1", "the first is not used any more");
    client.send("POST /refused HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\n\r\n, whole");
    assert_eq!(client.response().text(), "2, whole");
    assert_eq!(client.get("/").text(), "2", "what refuses a request is given up");
    let status = tidegate.ask_admin("/status").text();
    assert!(status.contains("\"failures\":0"), "{status}");
}

/// Servers end the whole connection for a head that is too long for them.
#[test]
fn a_long_head_has_a_connection_of_its_own_and_is_its_clients_fault() {
    let origin = Http2Origin::start(|exchange: Exchange| async move {
        let number = exchange_number(&exchange);
        exchange.ok(number);
    });
    let tidegate = before(origin.address(), "").start();
    let long = format!("X-Long: {}\r\n", "x".repeat(8000));
    assert_eq!(tidegate.get("/").text(), "0");
    assert_eq!(tidegate.get_with("/", &long).text(), "1");
    assert_eq!(tidegate.get("/").text(), "0");
    assert_eq!(tidegate.get_with("/", &long).text(), "2");
    // One that reads so far, and ends.
    let listener = TcpListener::bind(("127.0.0.1", free_port())).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        while let Ok((mut socket, _)) = listener.accept() {
            let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
            let _ = socket.write_all(&settings).and_then(|()| socket.read_exact(&mut [0; 6000]));
        }
    });
    let tidegate = before(address, "").start();
    for _ in 0..4 {
        assert_eq!(tidegate.get_with("/", &long).status, 431);
    }
    let status = tidegate.ask_admin("/status").text();
    assert!(status.contains("\"failures\":0") && status.contains("\"healthy\":true"), "{status}");
}

fn exchange_number(exchange: &Exchange) -> String {
    exchange.connection.to_string()
}

/// Servers take many requests that are given up for an attack (CVE-2023-44487), and end the connection.
#[test]
fn a_connection_on_which_many_requests_were_given_up_gets_no_more() {
    let given_up = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&given_up);
    let origin = Http2Origin::start(move |mut exchange: Exchange| {
        let counter = Arc::clone(&counter);
        async move {
            if exchange.target() == "/" {
                let number = exchange_number(&exchange);
                return exchange.ok(number);
            }
            let response = Response::builder().header("cache-control", "no-store").body(()).unwrap();
            let mut stream = exchange.respond.send_response(response, false).unwrap();
            send_for_ever(&mut stream).await;
            counter.fetch_add(1, Ordering::SeqCst);
        }
    });
    let tidegate = before(origin.address(), "").start();
    for number in 1..=50 {
        assert_eq!(tidegate.get("/").text(), "0");
        let mut client = tidegate.connect();
        client.send("GET /endless HTTP/1.1\r\nHost: a\r\n\r\n");
        assert_eq!(client.head().0, 200);
        sockopt::set_socket_linger(client.stream(), Some(Duration::ZERO)).unwrap();
        drop(client);
        eventually("it is given up", || (given_up.load(Ordering::SeqCst) == number).then_some(()));
    }
    assert_eq!(tidegate.get("/").text(), "1");
}

/// All content of a connection shares one window (RFC 9113 §5.2.1).
#[test]
fn an_upload_that_the_server_does_not_take_holds_up_no_other() {
    let origin = Http2Origin::start(|mut exchange: Exchange| async move {
        if exchange.target() == "/held" {
            // Nothing of its content is taken.
            let _ = poll_fn(|context| exchange.respond.poll_reset(context)).await;
            return;
        }
        let (content, _) = exchange.content().await.unwrap();
        exchange.ok(content);
    });
    let tidegate = before(origin.address(), "response_timeout = \"600s\"").start();
    let mut held = tidegate.connect();
    held.send("PUT /held HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n");
    held.send(content(3, 100_000));
    eventually("another connection", || {
        let mut client = tidegate.connect();
        client.send("PUT /other HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nother");
        assert_eq!(client.response().text(), "other");
        (origin.connections() == 2).then_some(())
    });
}

#[test]
fn heads_without_content_and_interim_responses_are_told_from_others() {
    let origin = Http2Origin::start(|mut exchange: Exchange| async move {
        let response = |status: u16| Response::builder().status(status);
        match exchange.target().as_str() {
            "/hints" => {
                let hints = response(103).header("link", "</a.css>; rel=preload").body(()).unwrap();
                exchange.respond.send_informational(hints).unwrap();
                exchange.ok("after hints");
            }
            "/switch" => drop(exchange.respond.send_response(response(101).body(()).unwrap(), true)),
            "/head" => {
                let head = response(200).header("content-length", "5").body(()).unwrap();
                exchange.respond.send_response(head, true).unwrap();
            }
            target => {
                let status = target[1..].parse().unwrap();
                exchange.respond.send_response(response(status).body(()).unwrap(), true).unwrap();
            }
        }
    });
    let tidegate = before(origin.address(), "").start();
    let mut client = tidegate.connect();
    client.send("GET /hints HTTP/1.1\r\nHost: a\r\n\r\n");
    let (status, fields) = client.head();
    assert_eq!((status, fields.get("link").as_deref()), (103, Some("</a.css>; rel=preload")));
    assert_eq!(client.response().text(), "after hints");
    for (method, status, length) in
        [("GET", 200, "0"), ("GET", 204, ""), ("HEAD", 304, ""), ("GET", 404, "0")]
    {
        let response = client.request(method, &format!("/{status}"), "If-None-Match: \"a\"\r\n");
        let seen = (response.status, response.field("Content-Length"));
        assert_eq!(seen, (status, length.to_owned()), "{response:?}");
    }
    assert_eq!(client.request("HEAD", "/head", "").field("Content-Length"), "5");
    assert_eq!(client.request("GET", "/switch", "Connection: upgrade\r\nUpgrade: x\r\n").status, 502);
    assert_eq!(tidegate.get("/200").status, 200);
}

#[test]
fn a_silent_server_is_asked_anew_on_another_connection() {
    let origin = Http2Origin::start(|exchange: Exchange| async move {
        match exchange.connection {
            0 => std::future::pending().await,
            _ => exchange.ok("here"),
        }
    });
    let tidegate = before(origin.address(), "response_timeout = \"300ms\"").start();
    assert_eq!(tidegate.get("/").status, 504);
    assert_eq!(tidegate.get("/").text(), "here");
    assert_eq!(origin.connections(), 2);
}

/// Sends content until nobody wants it.
async fn send_for_ever(stream: &mut SendStream<Bytes>) {
    loop {
        stream.reserve_capacity(1000);
        match poll_fn(|context| stream.poll_capacity(context)).await {
            Some(Ok(room)) if stream.send_data(vec![0; room].into(), false).is_ok() => {}
            _ => return,
        }
    }
}

#[test]
fn a_server_learns_that_nobody_wants_its_response_and_only_then() {
    let cancelled = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&cancelled);
    let origin = Http2Origin::start(move |mut exchange: Exchange| {
        let counter = Arc::clone(&counter);
        async move {
            let target = exchange.target();
            let response = Response::builder().header("cache-control", "no-store");
            let response =
                if target == "/length" { response.header("content-length", "3") } else { response };
            let mut stream = exchange.respond.send_response(response.body(()).unwrap(), false).unwrap();
            if target == "/endless" {
                send_for_ever(&mut stream).await;
                counter.fetch_add(1, Ordering::SeqCst);
                return;
            }
            // Its end comes later than all of what was announced.
            stream.send_data("abc".into(), false).unwrap();
            tokio::task::yield_now().await;
            stream.send_data(Bytes::new(), true).unwrap();
            if poll_fn(|context| stream.poll_reset(context)).await.is_ok() {
                counter.fetch_add(100, Ordering::SeqCst);
            }
        }
    });
    let tidegate = before(origin.address(), "").start();
    for target in ["/length", "/chunked", "/length"] {
        assert_eq!(tidegate.get(target).text(), "abc");
    }
    let mut client = tidegate.connect();
    client.send("GET /endless HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.head().0, 200);
    client.read_bytes(100_000);
    // The others are not held up by one that takes nothing.
    assert_eq!(tidegate.get("/length").text(), "abc");
    drop(client);
    eventually("the server stops", || (cancelled.load(Ordering::SeqCst) > 0).then_some(()));
    assert_eq!(tidegate.get("/length").text(), "abc");
    assert_eq!(cancelled.load(Ordering::SeqCst), 1);
    assert_eq!(origin.connections(), 1);
}

#[test]
fn an_answer_before_the_end_of_an_upload_reaches_its_client() {
    let origin = Http2Origin::start(|mut exchange: Exchange| async move {
        let response = Response::builder().status(413).body(()).unwrap();
        let mut stream = exchange.respond.send_response(response, false).unwrap();
        stream.send_data("too much".into(), true).unwrap();
        // The rest of the upload is turned away with the end of the request.
    });
    let tidegate = before(origin.address(), "").start();
    let mut client = tidegate.connect();
    client.send(format!("PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: {LARGE}\r\n\r\nfirst"));
    let response = client.response();
    assert_eq!((response.status, response.text().as_str()), (413, "too much"));
}

#[test]
fn what_is_no_http2_is_said_to_be_none_and_what_is_wrong_in_it_is_502() {
    let http1 = Origin::start(|_| Reply::ok("by 1"));
    let tidegate = before(http1.address(), "").start();
    assert_eq!(tidegate.get("/").status, 502);
    let status = tidegate.ask_admin("/status").text();
    assert!(status.contains("does not speak HTTP/2"), "{status}");
    let mut manners = Manners::default();
    manners.builder.max_concurrent_streams(0);
    let closed = Http2Origin::with(manners, |exchange: Exchange| async move { exchange.ok("never") });
    let tidegate = before(closed.address(), "").start();
    assert_eq!(tidegate.get("/").status, 502);
    assert!(tidegate.ask_admin("/status").text().contains("takes no requests"));
    let origin = Http2Origin::start(|mut exchange: Exchange| async move {
        match exchange.target().as_str() {
            "/short" => {
                let response = Response::builder().header("content-length", "10").body(()).unwrap();
                let mut stream = exchange.respond.send_response(response, false).unwrap();
                stream.send_data("short".into(), true).unwrap();
            }
            "/gone" => exchange.respond.send_reset(Reason::INTERNAL_ERROR),
            target => exchange.ok(target.to_owned()),
        }
    });
    let tidegate = before(origin.address(), "").start();
    let mut client = tidegate.connect();
    client.send("GET /short HTTP/1.1\r\nHost: a\r\n\r\n");
    assert!(client.try_response("GET").map_or(true, |response| response.status == 502));
    assert_eq!(tidegate.get("/gone").status, 502);
    // What no URI has is encoded, as HTTP/2 wants it.
    assert_eq!(tidegate.get("/a|b\"{c}^`").text(), "/a%7Cb%22%7Bc%7D%5E%60");
}

#[test]
fn idle_connections_are_closed_after_their_time_and_health_checks_speak_http2() {
    let origin = Http2Origin::start(|exchange: Exchange| async move { exchange.ok("up") });
    let check = "health_check = { path = \"/health\", interval = \"100ms\", timeout = \"5s\" }";
    let tidegate = before(origin.address(), check).start();
    eventually("a check", || (origin.count() > 1).then_some(()));
    assert_eq!(origin.last().uri().path(), "/health");
    assert_eq!(tidegate.get("/").text(), "up");
    let quiet = Http2Origin::start(|exchange: Exchange| async move { exchange.ok("up") });
    let tidegate = before(quiet.address(), "idle_timeout = \"1s\"").start();
    assert_eq!(tidegate.get("/").text(), "up");
    eventually("it is closed", || (quiet.open() == 0).then_some(()));
    assert_eq!(tidegate.get("/").text(), "up");
    assert_eq!(quiet.connections(), 2);
}
