//! Requests that are refused, and how: what two servers could read differently gets no further than here
//! (RFC 9112 §11.2).
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use tidegate_e2e::{Origin, Reply, Tidegate, eventually};

/// Raw bytes → the status of the refusal. The connection is closed after every one.
const REFUSED: &[(&str, &[u8], u16)] = &[
    (
        "both framings",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    (
        "both framings, other order",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        400,
    ),
    ("two lengths", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd", 400),
    ("a list of lengths", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4, 5\r\n\r\nabcd", 400),
    ("length with a sign", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +4\r\n\r\nabcd", 400),
    ("negative length", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
    ("hexadecimal length", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x4\r\n\r\nabcd", 400),
    ("empty length", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: \r\n\r\n", 400),
    (
        "length beyond 64 bits",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        400,
    ),
    ("coding that is not chunked", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
    (
        "chunked is not last",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        400,
    ),
    (
        "chunked twice",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    (
        "coding with a control byte",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    ("coding in HTTP/1.0", b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ("space before the colon", b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length : 4\r\n\r\nabcd", 400),
    ("tab before the colon", b"GET / HTTP/1.1\r\nHost\t: a\r\n\r\n", 400),
    ("folded line", b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", 400),
    ("space before the first field", b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    ("bare LF after the request line", b"GET / HTTP/1.1\nHost: a\r\n\r\n", 400),
    ("bare LF after a field", b"GET / HTTP/1.1\r\nHost: a\n\r\n", 400),
    ("bare CR in a value", b"GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
    ("zero byte in a value", b"GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n", 400),
    ("control byte in a value", b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x01b\r\n\r\n", 400),
    ("control byte in the target", b"GET /a\x01b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("space in the target", b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("empty field name", b"GET / HTTP/1.1\r\nHost: a\r\n: x\r\n\r\n", 400),
    ("field line without a colon", b"GET / HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n", 400),
    ("bracket in a field name", b"GET / HTTP/1.1\r\nHost: a\r\nX[]: y\r\n\r\n", 400),
    ("no Host", b"GET / HTTP/1.1\r\n\r\n", 400),
    ("two Hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    ("Host with a path", b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    ("Host with user information", b"GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", 400),
    ("bad method", b"GE(T / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("bad version", b"GET / HTTP/1.x\r\nHost: a\r\n\r\n", 400),
    ("version 2 in a request line", b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    ("lower-case version", b"GET / http/1.1\r\nHost: a\r\n\r\n", 400),
    ("HTTP/0.9", b"GET /\r\n\r\n", 400),
    ("the start of TLS", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\r\n\r\n", 400),
    ("escaped zero byte in the path", b"GET /a%00b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("target that is no path", b"GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
];

/// Bodies whose chunks are wrong: nothing that follows may be taken for a request.
const BAD_CHUNKS: &[(&str, &[u8])] = &[
    ("size that is no number", b"x\r\nabcd\r\n0\r\n\r\n"),
    ("size with a prefix", b"0x4\r\nabcd\r\n0\r\n\r\n"),
    ("negative size", b"-4\r\nabcd\r\n0\r\n\r\n"),
    ("size with a sign", b"+4\r\nabcd\r\n0\r\n\r\n"),
    ("space before the size", b" 4\r\nabcd\r\n0\r\n\r\n"),
    ("size beyond 64 bits", b"fffffffffffffffff\r\nabcd\r\n0\r\n\r\n"),
    ("no size", b"\r\nabcd\r\n0\r\n\r\n"),
    ("chunk longer than its size", b"3\r\nabcd\r\n0\r\n\r\n"),
    ("bare LF after the size", b"4\nabcd\r\n0\r\n\r\n"),
    ("bare LF after the chunk", b"4\r\nabcd\n0\r\n\r\n"),
    ("bare CR in an extension", b"4;a\rb\r\nabcd\r\n0\r\n\r\n"),
    ("bad trailer", b"4\r\nabcd\r\n0\r\nbad trailer\r\n\r\n"),
];

/// Follows each of the requests above; it must never reach the origin.
const SMUGGLED: &[u8] = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";

#[test]
fn request_of_a_refused_shape_is_answered_and_the_connection_closed() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let tidegate = Tidegate::before(&origin);
    let mut wrong = Vec::new();
    for (name, bytes, expected) in REFUSED {
        let (status, closed) = tidegate.refusal(&[*bytes, SMUGGLED].concat());
        if (status, closed) != (*expected, true) {
            wrong.push(format!("{name}: {status} (expected {expected}), closed: {closed}"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert_eq!(origin.count(), 0, "{:?}", origin.requests());
    assert_eq!(tidegate.get("/").text(), "reached");
}

#[test]
fn body_with_bad_chunks_ends_the_connection_and_smuggles_nothing() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let tidegate = Tidegate::before(&origin);
    for (name, chunks) in BAD_CHUNKS {
        let head = b"POST /upload HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
        let mut client = tidegate.connect();
        // The refusal may come before the last byte is sent.
        let _ = client.try_send([head, *chunks, SMUGGLED].concat());
        if let Ok(refusal) = client.try_response("POST") {
            assert_eq!(refusal.status, 400, "{name}");
            // What the client sends next would be lost.
            assert_eq!(refusal.field("Connection"), "close", "{name}");
        }
        assert!(client.is_closed(), "{name}: not closed");
    }
    assert!(origin.requests().iter().all(|request| request.target == "/upload"), "{:?}", origin.requests());
}

#[test]
fn head_larger_than_the_limits_is_refused_with_the_right_status() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let tidegate = Tidegate::before(&origin);
    let get = |target: &str, fields: &str| {
        tidegate.refusal(format!("GET {target} HTTP/1.1\r\nHost: a\r\n{fields}\r\n").as_bytes())
    };
    assert_eq!(get(&format!("/{}", "a".repeat(17 << 10)), ""), (414, true));
    assert_eq!(get("/", &format!("X: {}\r\n", "a".repeat(65 << 10))), (431, true));
    assert_eq!(get("/", &"X: y\r\n".repeat(120)), (431, true));
    assert_eq!(origin.count(), 0);
    assert_eq!(tidegate.get_with("/", &"X: y\r\n".repeat(90)).status, 200);
}

#[test]
fn body_larger_than_the_limit_is_refused_with_413() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let tidegate = Tidegate::builder().origin(&origin).limits("body_size = \"64KiB\"").start();
    let (status, closed) = tidegate.refusal(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 65537\r\n\r\n");
    assert_eq!((status, closed), (413, true));
    assert_eq!(origin.count(), 0);
}

#[test]
fn request_split_at_every_byte_is_read_the_same() {
    let origin = Origin::start(|request| Reply::ok(request.body.clone()));
    let tidegate = Tidegate::before(&origin);
    let bytes = b"POST /split HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    let mut client = tidegate.connect();
    for split in 1..bytes.len() {
        client.send(&bytes[..split]);
        eventually("the first part is read by itself", || client.is_read().then_some(()));
        client.send(&bytes[split..]);
        assert_eq!(client.response().text(), "abc", "split at {split}");
    }
}
