//! What an origin is sent and what a client gets back: fields of one connection stay on it (RFC 9110 §7.6).
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::Write;

use tidegate_e2e::{Origin, Reply, Tidegate, eventually};

/// RFC 9110 §2.5: who does not know a minor version takes the message for one of the highest that it knows.
#[test]
fn later_minor_version_on_either_side_is_taken_for_1_1() {
    let origin = Origin::start(|_| {
        Reply::Raw(b"HTTP/1.2 200 OK\r\nCache-Control: max-age=60\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n".to_vec())
    });
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    // Both on one connection, each answered with the version that we speak.
    for is_hit in [false, true] {
        client.send("GET / HTTP/1.2\r\nHost: example.org\r\n\r\n");
        let response = client.response();
        assert_eq!((response.status, response.text().as_str(), response.is_hit()), (200, "ok", is_hit));
    }
    assert_eq!(tidegate.refusal(b"GET / HTTP/1.2\r\n\r\n"), (400, true), "1.1 wants a host");
    assert_eq!(origin.count(), 1);
    assert!(origin.last().field("Via").starts_with("1."), "{:?}", origin.last());
}

#[test]
fn hop_by_hop_fields_are_removed_in_both_directions() {
    let origin = Origin::start(|_| {
        let reply = Reply::ok("ok").with("Connection", "X-Mine, close").with("X-Mine", "1");
        reply.with("Keep-Alive", "timeout=5").with("Proxy-Authenticate", "Basic").with("X-Kept", "2")
    });
    let tidegate = Tidegate::before(&origin);
    let response = tidegate.get_with(
        "/",
        "Connection: X-Secret, keep-alive\r\nX-Secret: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\nProxy-Connection: x\r\n\
         Proxy-Authorization: Basic eDp5\r\nUpgrade: h2c\r\nX-Kept: 2\r\n",
    );
    let request = origin.last();
    for name in ["X-Secret", "Keep-Alive", "Proxy-Connection", "Proxy-Authorization", "Upgrade"] {
        assert_eq!(request.fields.get(name), None, "{name} reached the origin: {request:?}");
    }
    assert!(!request.field("Connection").contains("X-Secret"), "{request:?}");
    assert_eq!(request.field("X-Kept"), "2");

    for name in ["X-Mine", "Keep-Alive", "Proxy-Authenticate"] {
        assert_eq!(response.fields.get(name), None, "{name} reached the client: {response:?}");
    }
    assert!(!response.field("Connection").contains("X-Mine"), "{response:?}");
    assert_eq!(response.field("X-Kept"), "2");
}

#[test]
fn via_is_added_in_both_directions() {
    let origin = Origin::start(|_| Reply::ok("ok").with("Via", "1.0 inner"));
    let tidegate = Tidegate::before(&origin);
    let response = tidegate.get_with("/", "Via: 1.0 outer\r\n");
    let request = origin.last().field("Via");
    assert!(request.starts_with("1.0 outer, 1.1 "), "{request}");
    let response = response.field("Via");
    assert!(response.starts_with("1.0 inner, 1.1 "), "{response}");
}

#[test]
fn request_that_has_come_by_five_times_is_a_loop() {
    let origin = Origin::start(|_| Reply::ok("ok"));
    let tidegate = Tidegate::before(&origin);
    tidegate.get("/");
    let own = origin.last().field("Via");
    assert_eq!(tidegate.get_with("/", &format!("Via: {}\r\n", [&*own; 4].join(", "))).status, 200);
    assert_eq!(tidegate.get_with("/", &format!("Via: {}\r\n", [&*own; 5].join(", "))).status, 508);
    assert_eq!(origin.count(), 2);
}

#[test]
fn what_follows_a_body_that_was_never_asked_for_is_no_request() {
    let directory = tempfile::tempdir().unwrap();
    let root = format!("root = \"{}\"", directory.path().display());
    let tidegate = Tidegate::builder().route("/files", &root).start();
    let mut client = tidegate.connect();
    // Whether what comes next is the body cannot be told.
    client.send("POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 50\r\n\r\n");
    client.send("GET /files/ HTTP/1.1\r\nHost: a\r\n\r\n");
    let responses = String::from_utf8(client.rest()).unwrap();
    assert!(responses.starts_with("HTTP/1.1 404 "), "{responses}");
    assert_eq!(responses.matches("HTTP/1.1 ").count(), 1, "{responses}");
}

#[test]
fn file_whose_request_has_a_body_that_is_not_read_is_said_to_end_the_connection() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("page"), "text").unwrap();
    let root = format!("root = \"{}\"", directory.path().display());
    let tidegate = Tidegate::builder().route("/", &root).start();
    for fields in ["Expect: 100-continue\r\nContent-Length: 50\r\n", "Content-Length: 1000000\r\n"] {
        let mut client = tidegate.connect();
        let response = client.request("GET", "/page", fields);
        assert_eq!((response.text().as_str(), response.field("Connection").as_str()), ("text", "close"));
        assert!(client.is_closed());
    }
}

#[test]
fn client_that_is_no_trusted_proxy_its_x_forwarded_for_is_dropped() {
    let origin = Origin::start(|_| Reply::ok("ok"));
    let tidegate = Tidegate::before(&origin);
    tidegate.get_with(
        "/",
        "X-Forwarded-For: 203.0.113.9\r\nForwarded: for=203.0.113.9\r\nX-Forwarded-Proto: https\r\n",
    );
    let request = origin.last();
    assert_eq!(request.field("X-Forwarded-For"), "127.0.0.1");
    assert_eq!(request.field("X-Forwarded-Proto"), "http");
    assert!(!request.field("Forwarded").contains("203.0.113.9"), "{request:?}");
    assert_eq!(request.field("X-Forwarded-Host"), "example.org");
}

#[test]
fn trusted_proxy_its_x_forwarded_for_is_kept_and_continued() {
    let origin = Origin::start(|_| Reply::ok("ok"));
    let tidegate = Tidegate::builder().origin(&origin).top("trusted_proxies = [\"127.0.0.0/8\"]").start();
    tidegate.get_with("/", "X-Forwarded-For: 203.0.113.9\r\n");
    assert_eq!(origin.last().field("X-Forwarded-For"), "203.0.113.9, 127.0.0.1");
}

#[test]
fn target_and_host_are_forwarded_in_their_normal_form() {
    let origin = Origin::start(|_| Reply::ok("ok"));
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET http://EXAMPLE.org:80/a/../b/%7ec?q=%41 HTTP/1.1\r\nHost: other.example\r\n\r\n");
    assert_eq!(client.response().status, 200);
    let request = origin.last();
    assert_eq!(request.target, "/b/~c?q=A");
    assert_eq!(request.field("Host"), "example.org");
}

#[test]
fn websocket_like_upgrade_becomes_a_tunnel_of_bytes() {
    let origin = Origin::start(|request| {
        assert_eq!(request.field("Upgrade"), "websocket");
        Reply::script(|stream| {
            use std::io::Read;
            stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 6\r\n\r\nhello ")?;
            let mut bytes = [0; 4096];
            loop {
                let count = stream.read(&mut bytes)?;
                if count == 0 {
                    return Ok(());
                }
                stream.write_all(&bytes[..count])?;
            }
        })
    });
    let tidegate = Tidegate::builder().origin(&origin).tables("[log]\naccess = \"@DIR@/access.txt\"").start();
    let mut client = tidegate.connect();
    let fields =
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let switched = client.request("GET", "/socket", fields);
    assert_eq!((switched.status, switched.field("Upgrade").as_str()), (101, "websocket"));
    assert_eq!(switched.fields.get("Content-Length"), None);
    assert_eq!(client.read_bytes(6), b"hello ");
    for message in [&b"\x81\x05first"[..], b"\0\xff\r\n\r\nGET / HTTP/1.1\r\n\r\n", &[7; 100_000]] {
        client.send(message);
        assert_eq!(client.read_bytes(message.len()), message);
    }
    client.finish();
    assert!(client.is_closed());
    // In the log at its end, with what it has carried: "hello " and the messages.
    let log = eventually("it is logged", || {
        std::fs::read_to_string(tidegate.directory().join("access.txt")).ok().filter(|log| !log.is_empty())
    });
    assert!(log.contains("\"GET /socket HTTP/1.1\" 101 100037 "), "{log}");
    assert_eq!(log.lines().count(), 1, "{log}");
}

#[test]
fn interim_responses_are_passed_on_before_the_final_one() {
    let origin = Origin::start(|_| {
        Reply::Raw(
            b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n\
              HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfinal"
                .to_vec(),
        )
    });
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET /hints HTTP/1.1\r\nHost: example.org\r\n\r\n");
    let (status, fields) = client.head();
    assert_eq!((status, fields.get("Link").as_deref()), (103, Some("</style.css>; rel=preload")));
    assert_eq!(client.response().text(), "final");
}

#[test]
fn client_that_waits_for_100_continue_is_told_to_go_on() {
    let origin = Origin::start(|request| Reply::ok(request.body.clone()));
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("POST / HTTP/1.1\r\nHost: example.org\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n");
    let (status, _) = client.head();
    assert_eq!(status, 100);
    client.send("hello");
    assert_eq!(client.response().text(), "hello");
}

#[test]
fn interim_responses_wait_for_room_behind_the_response_before_them() {
    let origin = Origin::start(|request| match request.target.strip_prefix("/blob/") {
        Some(length) => Reply::ok(vec![b'x'; length.parse().unwrap()]),
        None if request.target == "/hints" => {
            let hints = "HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n".repeat(3);
            Reply::Raw([hints.as_bytes(), b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfinal"].concat())
        }
        None => Reply::ok(request.body.clone()),
    });
    let tidegate = Tidegate::before(&origin);
    // As much as the kernel takes of the first response without a client that reads, and a little more or less.
    for length in (200_000..6_000_000).step_by(97_003) {
        let first = format!("GET /blob/{length} HTTP/1.1\r\nHost: example.org\r\n\r\n");
        let begin = |second: &str| {
            let asked = origin.count();
            let mut client = tidegate.connect();
            client.send(format!("{first}{second}"));
            eventually("the origin is asked", || (origin.count() > asked).then_some(()));
            // The interim response comes when nothing has been read of what is before it.
            std::thread::sleep(std::time::Duration::from_millis(10));
            assert_eq!(client.response().body.len(), length);
            client
        };
        let mut client = begin("GET /hints HTTP/1.1\r\nHost: example.org\r\n\r\n");
        for _ in 0..3 {
            assert_eq!(client.head().0, 103, "behind {length} bytes");
        }
        assert_eq!(client.response().text(), "final", "behind {length} bytes");
        let mut client = begin(
            "PUT /up HTTP/1.1\r\nHost: example.org\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
        );
        assert_eq!(client.head().0, 100, "behind {length} bytes");
        client.send("hello");
        assert_eq!(client.response().text(), "hello", "behind {length} bytes");
    }
}

#[test]
fn trailers_of_a_response_are_passed_on() {
    let origin = Origin::start(|_| {
        Reply::Raw(
            b"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n\
              3\r\nabc\r\n0\r\nX-Sum: 42\r\n\r\n"
                .to_vec(),
        )
    });
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET / HTTP/1.1\r\nHost: example.org\r\nConnection: TE\r\nTE: trailers\r\n\r\n");
    let response = client.response();
    assert_eq!((response.text().as_str(), response.trailers.get("X-Sum").as_deref()), ("abc", Some("42")));
}

#[test]
fn http_1_0_client_gets_the_connection_closed_after_the_response() {
    let origin = Origin::start(|_| {
        Reply::Raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n".to_vec())
    });
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET / HTTP/1.0\r\nHost: example.org\r\n\r\n");
    let response = client.response();
    assert_eq!(response.fields.get("Transfer-Encoding"), None, "{response:?}");
    assert_eq!(response.text(), "abc");
    assert!(client.is_closed());
}

#[test]
fn options_with_no_hops_left_is_answered_here() {
    let origin = Origin::start(|_| Reply::ok("origin"));
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    let response = client.request("OPTIONS", "/", "Max-Forwards: 0\r\n");
    assert_eq!(response.status, 200);
    assert!(response.field("Allow").contains("GET"), "{response:?}");
    assert_eq!(client.request("TRACE", "/", "Max-Forwards: 0\r\n").status, 405);
    assert_eq!(origin.count(), 0);
    assert_eq!(client.request("OPTIONS", "/", "Max-Forwards: 3\r\n").text(), "origin");
    assert_eq!(origin.last().field("Max-Forwards"), "2");
}

#[test]
fn early_hints_arrive_before_the_origin_has_finished() {
    let gate = tidegate_e2e::Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |_| {
        let door = door.clone();
        Reply::script(move |stream| {
            use std::io::Write;
            stream.write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n")?;
            door.pass();
            stream.write_all(b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 4\r\n\r\npage")
        })
    });
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
    assert_eq!(client.head().0, 103);
    gate.open();
    assert_eq!(client.response().text(), "page");
}

#[test]
fn options_of_the_whole_server_reaches_the_origin() {
    let origin = Origin::start(|request| Reply::ok(format!("{} {}", request.method, request.target)));
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.connect().request("OPTIONS", "*", "").text(), "OPTIONS *");
}

#[test]
fn trace_is_refused() {
    let origin = Origin::start(|_| Reply::ok("reflected"));
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.connect().request("TRACE", "/", "").status, 405);
    assert_eq!(origin.count(), 0);
}

#[test]
fn client_resets_the_connection_its_request_is_dropped() {
    let gate = tidegate_e2e::Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |_| {
        door.pass();
        Reply::ok("late").with("Cache-Control", "no-store")
    });
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
    tidegate_e2e::eventually("the origin is asked", || (origin.count() == 1).then_some(()));
    rustix::net::sockopt::set_socket_linger(client.stream(), Some(std::time::Duration::ZERO)).unwrap();
    drop(client);
    tidegate_e2e::eventually("it is noticed", || {
        (tidegate.metric("tidegate_clients_gone_total") >= 1.0).then_some(())
    });
    gate.open();
}

#[test]
fn client_of_http_1_0_gets_no_interim_response() {
    let origin = Origin::start(|_| {
        Reply::script(|stream| {
            stream.write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")?;
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        })
    });
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET / HTTP/1.0\r\n\r\n");
    assert!(client.rest().starts_with(b"HTTP/1.1 200 "));
    assert_eq!(
        origin.last().field("Host"),
        origin.address().to_string(),
        "servers want to know whom it is for"
    );
}
