//! HTTP/2 without TLS, by clients that know that it is spoken (RFC 9113 §3.3).
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::net::SocketAddr;

use rustix::process::Signal;
use tidegate_e2e::http2::{Client, WIDE, field, run, whole};
use tidegate_e2e::{Builder, Client as Http1, Gate, Origin, Reply, Tidegate, eventually, free_port};
use tokio::net::TcpStream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A listener with HTTP/2 in the clear, beside the one that every site of the tests has.
fn start(builder: Builder, lines: &str) -> (Tidegate, SocketAddr) {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let table = format!("[[listen]]\naddress = \"{address}\"\nhttp2 = true\n{lines}\n");
    (builder.top("workers = 1").tables(&table).start(), address)
}

async fn connect(address: SocketAddr) -> Client {
    let socket = TcpStream::connect(address).await.unwrap();
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(WIDE).initial_connection_window_size(WIDE);
    let (requests, connection) = builder.handshake(socket).await.unwrap();
    Client { requests, connection: tokio::spawn(connection) }
}

#[test]
fn both_versions_are_spoken_at_one_port_and_share_a_cache() {
    let origin = Origin::start(|request| match request.method.as_str() {
        "PUT" => Reply::ok(request.body.clone()),
        _ => Reply::cacheable(request.field("X-Forwarded-Proto")),
    });
    let (tidegate, address) = start(Tidegate::builder().origin(&origin), "");
    run(async {
        let mut client = connect(address).await;
        for (asked, cache) in [(1, "miss"), (1, "hit"), (1, "hit")] {
            let (response, content, _) = client.get("/").await;
            assert_eq!((response.status().as_u16(), &content[..]), (200, &b"http"[..]), "{response:?}");
            assert_eq!(field(&response, "cache-status").contains("hit"), cache == "hit", "{response:?}");
            assert_eq!(origin.count(), asked);
        }
        let upload = vec![7; 300_000];
        let response = client.upload("/", upload.clone()).await.unwrap();
        assert_eq!(whole(response).await.unwrap().1, upload);
    });
    let mut http1 = Http1::connect(address);
    http1.send("GET / HTTP/1.1\r\nHost: a.example\r\n\r\n");
    assert_eq!(http1.response().text(), "http");
    // Begins as HTTP/2 does, and as a request does.
    http1.send("P");
    http1.send("OST /p HTTP/1.1\r\nHost: a.example\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(http1.response().status, 200);
    assert!(tidegate.metric("tidegate_requests_total") > 5.0);
}

/// So that it knows which of its requests it may repeat (RFC 9113 §6.8).
#[test]
fn who_is_cut_off_at_the_end_of_a_drain_is_told_what_was_begun() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |_| {
        held.pass();
        Reply::ok("late")
    });
    let (tidegate, address) = start(Tidegate::builder().origin(&origin).limits("drain_timeout = \"1s\""), "");
    let mut client = Http1::connect(address);
    // SETTINGS, then a GET in fields of the static table and the host in letters (RFC 7541 §6).
    let request = [&[0, 0, 6, 1, 5, 0, 0, 0, 1], &b"\x82\x86\x84\x41\x01a"[..]].concat();
    client.send([PREFACE, &[0, 0, 0, 4, 0, 0, 0, 0, 0], &request].concat());
    eventually("the origin is asked", || (origin.count() == 1).then_some(()));
    tidegate.signal(Signal::TERM);
    let mut last_streams = Vec::new();
    let said = client.rest();
    let mut frames = &said[..];
    while let [_, high, low, kind, _, _, _, _, _, rest @ ..] = frames {
        let (payload, behind) = rest.split_at(usize::from(*high) << 8 | usize::from(*low));
        if *kind == 7 {
            last_streams.push(u32::from_be_bytes(payload[..4].try_into().unwrap()));
        }
        frames = behind;
    }
    assert_eq!(
        last_streams,
        [0x7FFF_FFFF, 1],
        "first that it is to go elsewhere, then that its request was begun"
    );
    gate.open();
}

#[test]
fn a_beginning_that_comes_in_pieces_is_waited_for_and_one_that_turns_out_other_is_no_http2() {
    let origin = Origin::start(|_| Reply::ok("here"));
    let (tidegate, address) = start(Tidegate::builder().origin(&origin), "");
    let mut slow = Http1::connect(address);
    // An empty SETTINGS frame follows (RFC 9113 §3.4), and a PING.
    let frames = [PREFACE, &[0, 0, 0, 4, 0, 0, 0, 0, 0], &[0, 0, 8, 6, 0, 0, 0, 0, 0], b"8 bytes."].concat();
    for byte in frames {
        slow.send([byte]);
    }
    // The server's own SETTINGS come first, then what is asked: an acknowledgement of each.
    let mut kinds = Vec::new();
    while !kinds.contains(&(6, 1)) {
        let header = slow.read_bytes(9);
        let length = usize::from(header[1]) << 8 | usize::from(header[2]);
        kinds.push((header[3], header[4]));
        slow.read_bytes(length);
    }
    assert!(kinds[0] == (4, 0) && kinds.contains(&(4, 1)), "{kinds:?}");
    let post = b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 0\r\n\r\n";
    let mut client = Http1::connect(address);
    for byte in post {
        client.send([*byte]);
    }
    assert_eq!(client.response().text(), "here");
    for at in [4, 14, PREFACE.len() - 1] {
        // What is not whole is waited for, until the client says that there is no more of it.
        let mut waited_for = Http1::connect(address);
        waited_for.send(&PREFACE[..at]);
        // The one data core has seen it by the time that it answers this.
        assert_eq!(tidegate.get("/").status, 200);
        waited_for.send(&PREFACE[at..]);
        waited_for.send([0, 0, 0, 4, 0, 0, 0, 0, 0]);
        assert_eq!(waited_for.read_bytes(9)[3], 4);
        let mut other = Http1::connect(address);
        other.send(&PREFACE[..at]);
        other.send("x\r\n\r\n");
        let refused = other.try_response("GET").map_or(0, |response| response.status);
        assert!(refused == 400 || refused == 505, "{at}: {refused}");
        assert!(other.is_closed());
        let mut ended = Http1::connect(address);
        ended.send(&PREFACE[..at]);
        ended.finish();
        ended.rest();
    }
    // Where it is not asked for, it is not spoken.
    let (status, is_closed) = tidegate.refusal(PREFACE);
    assert!((status == 400 || status == 505) && is_closed, "{status}");
}

#[test]
fn rules_limits_and_redirects_hold_as_for_other_requests() {
    let origin = Origin::start(|_| Reply::ok("here"));
    let rules = "[[request]]\npath = \"/closed/*\"\naction = \"refuse\"\n";
    let builder = Tidegate::builder().limits("header_timeout = \"300ms\"").origin(&origin);
    let (_tidegate, address) = start(builder, rules);
    run(async {
        let mut client = connect(address).await;
        for (target, status) in [("/", 200), ("/closed/x", 503), ("/closed/y", 503), ("/open", 200)] {
            assert_eq!(client.get(target).await.0.status().as_u16(), status, "{target}");
        }
    });
    let mut silent = Http1::connect(address);
    silent.send(&PREFACE[..10]);
    silent.rest();
    let (_secure, address) = start(
        Tidegate::builder().top("https_only = true\ntrusted_proxies = [\"192.0.2.1\"]").origin(&origin),
        "",
    );
    run(async {
        let (response, ..) = connect(address).await.get("/a?b").await;
        assert_eq!(response.status().as_u16(), 301);
        assert_eq!(field(&response, "location"), "https://a.example/a?b");
    });
}
