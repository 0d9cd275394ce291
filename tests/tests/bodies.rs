//! Bodies in both directions: streamed, with bounded memory, many on one connection.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_e2e::{Gate, Origin, Reply, Tidegate, content, eventually};

/// Larger than every buffer on the way together.
const LARGE: usize = 64 << 20;
/// What one exchange may make the process grow by, allocator included: far below [`LARGE`].
const MEMORY_BOUND: u64 = 16 << 20;

#[test]
fn large_response_arrives_whole_whatever_its_framing() {
    let body = content(1, 3 << 20);
    let sent = body.clone();
    let origin = Origin::start(move |request| match request.target.as_str() {
        "/length" => Reply::ok(sent.clone()),
        "/chunked" => {
            let mut bytes = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
            for chunk in sent.chunks(70_001) {
                bytes.extend_from_slice(format!("{:X};ext=\"a\"\r\n", chunk.len()).as_bytes());
                bytes.extend_from_slice(chunk);
                bytes.extend_from_slice(b"\r\n");
            }
            bytes.extend_from_slice(b"0\r\n\r\n");
            Reply::Raw(bytes)
        }
        _ => Reply::RawThenClose([b"HTTP/1.1 200 OK\r\n\r\n", sent.as_slice()].concat()),
    });
    let tidegate = Tidegate::before(&origin);
    for target in ["/length", "/chunked", "/until-close"] {
        let response = tidegate.get(target);
        assert!(response.status == 200 && response.body == body, "{target}: {response:?}");
    }
}

#[test]
fn response_cut_off_by_the_origin_is_not_passed_for_whole_and_not_stored() {
    let origin = Origin::start(|request| {
        let framing =
            if request.target == "/chunked" { "Transfer-Encoding: chunked" } else { "Content-Length: 100" };
        let start = if request.target == "/chunked" { "5\r\nstart" } else { "start" };
        Reply::RawThenClose(
            format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\n{framing}\r\n\r\n{start}").into_bytes(),
        )
    });
    let tidegate = Tidegate::before(&origin);
    for target in ["/length", "/chunked"] {
        for _ in 0..2 {
            let mut client = tidegate.connect();
            client.send(format!("GET {target} HTTP/1.1\r\nHost: example.org\r\n\r\n"));
            match client.try_response("GET") {
                Err(_) => {}
                Ok(response) => assert_eq!(response.status, 502, "{target}: {response:?}"),
            }
        }
        assert!(
            origin.requests().iter().filter(|request| request.target == target).count() >= 2,
            "{target}: stored"
        );
    }
}

/// A head, and at once with it what cannot be the start of its body.
fn broken_at_once(fields: &str) -> Reply {
    let head = format!("HTTP/1.1 200 OK\r\n{fields}Transfer-Encoding: chunked\r\n\r\nno chunk\r\n");
    Reply::RawThenClose(head.into_bytes())
}

#[test]
fn an_origin_that_breaks_off_before_anything_was_sent_is_a_bad_gateway() {
    let origin = Origin::start(|request| match request.target.as_str() {
        "/stored" => broken_at_once("Cache-Control: max-age=60\r\n"),
        _ => broken_at_once("Cache-Control: no-store\r\n"),
    });
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    for (method, target) in [("GET", "/stored"), ("GET", "/passed"), ("POST", "/passed"), ("GET", "/passed")]
    {
        let response = client.request(method, target, "Content-Length: 0\r\n");
        assert_eq!(response.status, 502, "{method} {target}");
    }
    assert_eq!(tidegate.metric("tidegate_upstream_errors_total"), 4.0);
}

/// To a client of HTTP/1.0 the end of the connection is the end of the response.
#[test]
fn what_has_no_end_but_the_connections_is_reset_where_it_is_not_whole() {
    let origin = Origin::start(|request| {
        let whole = request.target == "/whole";
        Reply::script(move |stream| {
            stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n")?;
            if whole { stream.write_all(b"0\r\n\r\n") } else { Ok(()) }
        })
    });
    let tidegate = Tidegate::before(&origin);
    for (target, is_whole) in [("/whole", true), ("/broken", false)] {
        let mut client = tidegate.connect();
        client.send(format!("GET {target} HTTP/1.0\r\nHost: example.org\r\n\r\n"));
        let mut bytes = Vec::new();
        let end = client.stream().read_to_end(&mut bytes);
        assert_eq!(end.is_ok(), is_whole, "{target}: {end:?}");
    }
}

#[test]
fn an_origin_that_breaks_off_is_stood_in_for_by_what_is_stored() {
    let first = std::sync::atomic::AtomicBool::new(true);
    let origin = Origin::start(move |_| match first.swap(false, std::sync::atomic::Ordering::SeqCst) {
        true => {
            Reply::ok("stored").with("Cache-Control", "max-age=60").with("Age", "60").with("ETag", "\"1\"")
        }
        false => broken_at_once("Cache-Control: max-age=60\r\n"),
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").text(), "stored");
    let response = tidegate.get("/");
    assert_eq!((response.status, response.text()), (200, "stored".to_owned()), "{response:?}");
    assert_eq!(origin.count(), 2);
}

#[test]
fn request_bodies_of_either_framing_reach_the_origin_unchanged() {
    let origin = Origin::start(|request| Reply::ok(request.body.clone()));
    let tidegate = Tidegate::before(&origin);
    let body = content(2, 1 << 20);
    let mut client = tidegate.connect();
    client.send(format!("PUT /a HTTP/1.1\r\nHost: example.org\r\nContent-Length: {}\r\n\r\n", body.len()));
    client.send(&body);
    assert!(client.response().body == body);
    client.send("PUT /b HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding: chunked\r\n\r\n");
    for chunk in body.chunks(9_999) {
        client.send(format!("{:x}\r\n", chunk.len()));
        client.send([chunk, b"\r\n"].concat());
    }
    client.send("0\r\n\r\n");
    assert!(client.response().body == body);
}

/// An origin that answers with what it gets, piece by piece, before the request has ended.
fn echo() -> (std::net::SocketAddr, std::thread::JoinHandle<()>) {
    let listener = std::net::TcpListener::bind(("127.0.0.1", tidegate_e2e::free_port())).unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut output = stream.try_clone().unwrap();
        let mut input = std::io::BufReader::new(stream);
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            std::io::BufRead::read_line(&mut input, &mut line).unwrap();
        }
        write!(output, "HTTP/1.1 200 OK\r\nContent-Length: {ECHOED}\r\n\r\n").unwrap();
        let mut bytes = vec![0; 1 << 16];
        let mut count = 0;
        while count < ECHOED {
            let read = input.read(&mut bytes).unwrap();
            assert!(read > 0, "the upload ended after {count} bytes");
            output.write_all(&bytes[..read]).unwrap();
            count += read;
        }
    });
    (address, thread)
}

/// More than all socket buffers on the way hold.
const ECHOED: usize = 24 << 20;

#[test]
fn origin_that_answers_while_it_reads_upload_and_response_go_on_side_by_side() {
    for expect in ["", "Expect: 100-continue\r\n"] {
        let (address, origin) = echo();
        let tidegate =
            Tidegate::builder().group("app", &[address], "").route("/", "upstream = \"app\"").start();
        let mut client = tidegate.connect();
        client
            .send(format!("PUT / HTTP/1.1\r\nHost: example.org\r\n{expect}Content-Length: {ECHOED}\r\n\r\n"));
        let mut stream = client.stream().try_clone().unwrap();
        let sender = std::thread::spawn(move || {
            let piece = content(4, 1 << 16);
            for _ in 0..ECHOED >> 16 {
                stream.write_all(&piece).unwrap();
            }
        });
        let response = client.response();
        assert_eq!((response.status, response.body.len()), (200, ECHOED), "{expect:?}");
        assert!(response.body.chunks(1 << 16).all(|piece| piece == content(4, 1 << 16)), "{expect:?}");
        sender.join().unwrap();
        origin.join().unwrap();
    }
}

#[test]
fn origin_that_refuses_an_upload_without_reading_it_the_client_gets_the_refusal() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", tidegate_e2e::free_port())).unwrap();
    let address = listener.local_addr().unwrap();
    let origin = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\n\r\nbig").unwrap();
        stream
    });
    let tidegate = Tidegate::builder().group("app", &[address], "").route("/", "upstream = \"app\"").start();
    let mut client = tidegate.connect();
    client.send("PUT / HTTP/1.1\r\nHost: example.org\r\nContent-Length: 50000000\r\n\r\nstart");
    let response = client.response();
    assert_eq!((response.status, response.text().as_str()), (413, "big"));
    assert_eq!(response.field("Connection"), "close");
    drop(origin.join().unwrap());
}

#[test]
fn origin_that_answers_before_it_has_read_the_upload_gets_no_other_request_on_that_connection() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", tidegate_e2e::free_port())).unwrap();
    let address = listener.local_addr().unwrap();
    let (heads, seen) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for (connection, stream) in listener.incoming().enumerate() {
            let (mut stream, heads) = (stream.unwrap(), heads.clone());
            std::thread::spawn(move || {
                let mut input = std::io::BufReader::new(stream.try_clone().unwrap());
                let mut line = String::new();
                // Each head is answered, and what is its body is not known from the next head.
                while std::io::BufRead::read_line(&mut input, &mut line).is_ok_and(|length| length > 0) {
                    if line.contains("HTTP/1.1\r\n") {
                        heads.send((connection, line.split(' ').nth(1).unwrap().to_owned())).unwrap();
                    }
                    if line == "\r\n" {
                        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
                    }
                    line.clear();
                }
            });
        }
    });
    let tidegate = Tidegate::builder().group("app", &[address], "").route("/", "upstream = \"app\"").start();
    let mut uploading = tidegate.connect();
    uploading.send("POST /upload HTTP/1.1\r\nHost: example.org\r\nContent-Length: 100000\r\n\r\nstart");
    assert_eq!(uploading.response().text(), "ok");
    // What it has yet to send would be read as part of this request, or this request as part of it.
    assert_eq!(tidegate.get("/other").text(), "ok");
    let all: Vec<(usize, String)> = seen.try_iter().collect();
    let on = |target: &str| all.iter().find(|(_, seen)| seen == target).map(|(connection, _)| *connection);
    assert!(on("/upload").is_some() && on("/other").is_some(), "{all:?}");
    assert_ne!(on("/upload"), on("/other"), "{all:?}");
}

#[test]
fn response_with_an_extension_in_each_of_many_chunks_arrives_whole() {
    let origin = Origin::start(|request| {
        let coding = "8;signature=0123456789abcdef\r\n12345678\r\n".repeat(2_000) + "0\r\n\r\n";
        let cache = if request.target == "/stored" { "max-age=60" } else { "no-store" };
        let head = format!("HTTP/1.1 200 OK\r\nCache-Control: {cache}\r\nTransfer-Encoding: chunked\r\n\r\n");
        Reply::Raw((head + &coding).into_bytes())
    });
    let tidegate = Tidegate::before(&origin);
    for target in ["/passed", "/stored", "/stored"] {
        let response = tidegate.get(target);
        assert!(response.body == b"12345678".repeat(2_000), "{target}: {}", response.body.len());
    }
}

#[test]
fn trailers_of_a_request_reach_the_origin() {
    let origin = Origin::start(|_| Reply::ok("ok"));
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client
        .send("PUT / HTTP/1.1\r\nHost: example.org\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\nConnection: X-Hop\r\n\r\n");
    client.send("3\r\nabc\r\n0\r\nX-Sum: 42\r\nX-Hop: 1\r\nContent-Length: 7\r\n\r\n");
    assert_eq!(client.response().status, 200);
    let request = origin.last();
    assert_eq!(request.body, b"abc");
    assert_eq!(request.trailers.get("X-Sum").as_deref(), Some("42"));
    assert_eq!(request.trailers.get("X-Hop"), None, "Connection names it (RFC 9110 §7.6.1)");
    assert_eq!(request.trailers.get("Content-Length"), None, "framing is not for trailers (RFC 9110 §6.5.1)");
    assert_eq!(client.get("/next").status, 200, "the connection goes on");
}

#[test]
fn slow_reader_of_a_large_response_the_origin_is_held_back_and_memory_bounded() {
    let sent = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&sent);
    let origin = Origin::start(move |_| {
        let counter = Arc::clone(&counter);
        Reply::script(move |stream| {
            write!(stream, "HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nContent-Length: {LARGE}\r\n\r\n")?;
            let piece = content(3, 1 << 16);
            for _ in 0..LARGE >> 16 {
                stream.write_all(&piece)?;
                counter.fetch_add(1 << 16, Ordering::SeqCst);
            }
            Ok(())
        })
    });
    let tidegate = Tidegate::before(&origin);
    let before = tidegate.anonymous_bytes();
    let mut client = tidegate.connect();
    client.send("GET /large HTTP/1.1\r\nHost: example.org\r\n\r\n");
    client.head();
    // The client takes nothing: the origin's progress comes to a halt once all buffers are full.
    let mut last = u64::MAX;
    let mut unchanged = 0;
    let held_at = eventually("the origin is held back", || {
        let now = sent.load(Ordering::SeqCst);
        unchanged = if now == last { unchanged + 1 } else { 0 };
        last = now;
        (unchanged >= 30).then_some(now)
    });
    assert!(held_at < LARGE as u64, "all was taken from the origin");
    assert!(tidegate.anonymous_bytes() < before + MEMORY_BOUND, "{before} → {}", tidegate.anonymous_bytes());

    let expected = content(3, 1 << 16);
    for _ in 0..LARGE >> 16 {
        assert!(client.read_bytes(1 << 16) == expected);
    }
    assert!(tidegate.anonymous_bytes() < before + MEMORY_BOUND, "{before} → {}", tidegate.anonymous_bytes());
}

#[test]
fn origin_that_does_not_read_a_large_upload_the_client_is_held_back_and_memory_bounded() {
    let gate = Gate::default();
    let held = gate.clone();
    let listener = std::net::TcpListener::bind(("127.0.0.1", tidegate_e2e::free_port())).unwrap();
    let address = listener.local_addr().unwrap();
    let origin = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        held.pass();
        let mut bytes = vec![0; 1 << 16];
        let mut count = 0;
        while count < LARGE {
            count += stream.read(&mut bytes).unwrap();
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nread").unwrap();
    });
    let tidegate = Tidegate::builder().group("app", &[address], "").route("/", "upstream = \"app\"").start();
    let before = tidegate.anonymous_bytes();
    let mut client = tidegate.connect();
    client.send(format!("PUT / HTTP/1.1\r\nHost: example.org\r\nContent-Length: {LARGE}\r\n\r\n"));
    let mut stream = client.stream().try_clone().unwrap();
    let sent = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&sent);
    let sender = std::thread::spawn(move || {
        let piece = content(4, 1 << 16);
        for _ in 0..LARGE >> 16 {
            stream.write_all(&piece).unwrap();
            counter.fetch_add(1 << 16, Ordering::SeqCst);
        }
    });
    let mut last = u64::MAX;
    let mut unchanged = 0;
    eventually("the client is held back", || {
        let now = sent.load(Ordering::SeqCst);
        unchanged = if now == last { unchanged + 1 } else { 0 };
        last = now;
        (unchanged >= 30).then_some(())
    });
    assert!(last < LARGE as u64, "all was taken from the client");
    assert!(tidegate.anonymous_bytes() < before + MEMORY_BOUND, "{before} → {}", tidegate.anonymous_bytes());
    gate.open();
    sender.join().unwrap();
    assert_eq!(client.response().text(), "read");
    origin.join().unwrap();
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let origin = Origin::start(|request| Reply::cacheable(request.target.clone()));
    let tidegate = Tidegate::before(&origin);
    // Hits and misses in turn.
    for number in (0..40).step_by(2) {
        tidegate.get(&format!("/{number}"));
    }
    let mut client = tidegate.connect();
    let all: String =
        (0..40).map(|number| format!("GET /{number} HTTP/1.1\r\nHost: example.org\r\n\r\n")).collect();
    client.send(all);
    for number in 0..40 {
        assert_eq!(client.response().text(), format!("/{number}"));
    }
}

#[test]
fn many_clients_at_once_each_get_their_own_answer_however_their_requests_arrive() {
    let origin = Origin::start(|request| Reply::cacheable(request.target.clone()));
    // One core, so that all of them are handled side by side.
    let tidegate = Tidegate::builder().origin(&origin).top("workers = 1").start();
    let paths: Vec<String> = (0..50).map(|number| format!("/{number}")).collect();
    paths.iter().step_by(3).for_each(|path| drop(tidegate.get(path)));
    let mut clients: Vec<_> = paths.iter().map(|_| tidegate.connect()).collect();
    let head = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: example.org\r\n\r\n");
    for round in 0..4 {
        for (number, (client, path)) in clients.iter_mut().zip(&paths).enumerate() {
            let head = head(path);
            match (number + round) % 4 {
                // Several at once, of which the last one is only begun.
                1 => client.send(format!("{head}{head}{}", &head[..head.len() / 2])),
                2 => client.send(&head[..5]),
                // More than is read at once.
                3 => client.send(head.repeat(200)),
                _ => client.send(head),
            }
        }
        for (number, (client, path)) in clients.iter_mut().zip(&paths).enumerate() {
            let head = head(path);
            let answers = match (number + round) % 4 {
                1 => {
                    client.send(&head[head.len() / 2..]);
                    3
                }
                2 => {
                    client.send(&head[5..]);
                    1
                }
                3 => 200,
                _ => 1,
            };
            for _ in 0..answers {
                assert_eq!(client.response().text(), *path);
            }
        }
    }
}

#[test]
fn request_after_a_body_nobody_read_is_still_understood() {
    let origin = Origin::start(|request| Reply::cacheable(request.target.clone()));
    let tidegate = Tidegate::before(&origin);
    tidegate.get("/");
    let mut client = tidegate.connect();
    // A GET with content is answered from the cache or not: either way its content is no request.
    let content = "GET /smuggled HTTP/1.1\r\nHost: a.b.c\r\n\r\n";
    let length = content.len();
    client.send(format!("GET / HTTP/1.1\r\nHost: example.org\r\nContent-Length: {length}\r\n\r\n{content}"));
    assert_eq!(client.response().text(), "/");
    // The next response is the next request's: by then whatever came before it has been asked for.
    assert_eq!(client.get("/next").text(), "/next");
    client.send("GET /last HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\r\n");
    assert_eq!(client.response().text(), "/last");
    assert!(client.rest().is_empty(), "more responses than requests");
    assert!(origin.requests().iter().all(|request| request.target != "/smuggled"), "{:?}", origin.requests());
}

#[test]
fn body_that_nobody_wanted_is_not_read_as_the_next_request() {
    let origin = Origin::start(|_| Reply::ok("ok").with("Cache-Control", "no-store"));
    // No route leads anywhere: the answer comes before the body is looked at.
    let tidegate = Tidegate::builder()
        .group("app", &[origin.address()], "")
        .route("/app/", "upstream = \"app\"")
        .start();
    let mut client = tidegate.connect();
    let smuggled = "GET /app/smuggled HTTP/1.1\r\nHost: example.org\r\n\r\n";
    client.send(format!(
        "POST /nowhere HTTP/1.1\r\nHost: example.org\r\nContent-Length: {}\r\n\r\n{smuggled}\
         GET /app/real HTTP/1.1\r\nHost: example.org\r\n\r\n",
        smuggled.len()
    ));
    assert_eq!(client.response_to("POST").status, 404);
    assert_eq!(client.response().text(), "ok");
    let targets: Vec<String> = origin.requests().iter().map(|request| request.target.clone()).collect();
    assert_eq!(targets, ["/app/real"]);
}

#[test]
fn trailers_that_would_change_the_head_are_dropped() {
    let origin = Origin::start(|_| {
        Reply::script(|stream| {
            use std::io::Write;
            stream.write_all(
                b"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\
                  Set-Cookie: a=b\r\nAuthorization: x\r\nX_Forwarded_For: 1\r\nX-Sum: 7\r\n\r\n",
            )
        })
    });
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET / HTTP/1.1\r\nHost: example.org\r\nTE: trailers\r\nConnection: close\r\n\r\n");
    let text = String::from_utf8(client.rest()).unwrap();
    assert!(text.ends_with("0\r\nX-Sum: 7\r\n\r\n"), "{text}");
}

#[test]
fn a_body_in_chunks_of_one_byte_reaches_the_origin_in_large_ones() {
    const BYTES: usize = 20_000;
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let origin = std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, mut received, mut buffer) = (stream.unwrap(), Vec::new(), [0; 65_536]);
            while !received.ends_with(b"\r\n0\r\n\r\n") {
                match stream.read(&mut buffer).unwrap() {
                    0 => break,
                    length => received.extend_from_slice(&buffer[..length]),
                }
            }
            // tidegate looks at its start whether anybody listens.
            if !received.is_empty() {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
                return received;
            }
        }
        Vec::new()
    });
    let tidegate = Tidegate::builder().group("app", &[address], "").route("/", "upstream = \"app\"").start();
    let mut client = tidegate.connect();
    let chunks = "1\r\nx\r\n".repeat(BYTES);
    client.send(format!("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n"));
    assert_eq!(client.response_to("POST").status, 200);
    let received = String::from_utf8(origin.join().unwrap()).unwrap();
    let (_, body) = received.split_once("\r\n\r\n").unwrap();
    let chunks: Vec<&str> = body.split("\r\n").filter(|line| line.starts_with('x')).collect();
    assert_eq!(chunks.iter().map(|chunk| chunk.len()).sum::<usize>(), BYTES);
    assert!(chunks.len() < BYTES / 100, "{}", chunks.len());
}
