//! What is done by HTTP/3 to clients that break its rules or are too much for the server: the stream or the connection ends
//! with the code that says why, and what is asked for is counted against its client as by HTTP/1 and HTTP/2.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::time::Duration;

use http::Request;
use quinn::{ConnectionError, TransportConfig};
use tidegate_e2e::http3::{
    CONTROL, Client, Raw, WIDE, answer, cancel, code, end, fields, frame, frame_type, frames, get, head,
    integer, is_ok, one_way, piece, quic, quic_with, run, stream_code, take_integer, until, url, varint,
};
use tidegate_e2e::{Builder, Certificate, Gate, Origin, Reply, Site, Tidegate, content, eventually};

const CLIENT: [u8; 4] = [127, 0, 9, 9];
/// A type of frames, and of streams, that means nothing (RFC 9114 §7.2.8).
const UNKNOWN: u64 = 0x21 + 31 * 0x1f;

/// An origin that answers once the gate is open.
fn held_back() -> (Gate, Origin) {
    let gate = Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |_| {
        door.pass();
        Reply::ok("x")
    });
    (gate, origin)
}

fn serving(builder: Builder, certificate: &Certificate) -> Site {
    Site::with_http3(builder, &[("a", certificate)])
}

fn get_head() -> Vec<u8> {
    head("GET", "/", &[])
}

/// What the server ends a connection with on which a request's stream has these bytes and then ends.
async fn end_after_request(site: &Site, certificate: &Certificate, bytes: &[u8]) -> u64 {
    let client = Raw::connect_from(CLIENT, site, certificate).await;
    let (mut send, _receive) = client.begin(bytes).await;
    let _ = send.finish();
    end(&client.quic).await
}

/// What the server ends a connection with on which there is a stream in one direction with these bytes, and a control
/// stream if these are not one.
async fn end_after_one_way(site: &Site, certificate: &Certificate, streams: &[&[u8]], ends: bool) -> u64 {
    let (_endpoint, quic) = quic(CLIENT, site, certificate, WIDE).await.unwrap();
    let mut open = Vec::new();
    for bytes in streams {
        let mut stream = one_way(&quic, bytes).await;
        if ends {
            let _ = stream.finish();
        }
        open.push(stream);
    }
    end(&quic).await
}

#[test]
fn frames_that_must_not_come_on_a_stream_of_a_request_end_the_connection() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    let trailers = fields(&[("x-sum", "1")]);
    let put = head("PUT", "/", &[]);
    let mut wrong = vec![
        ("content before the head", frame(frame_type::DATA, b"x")),
        ("content after trailers", [&put[..], &trailers, &frame(frame_type::DATA, b"x")].concat()),
        ("trailers twice", [&put[..], &trailers, &trailers].concat()),
    ];
    // Of the control stream, of servers, and those of HTTP/2 that are reserved (RFC 9114 §7.2.8).
    for kind in [0x2, 0x3, 0x4, 0x5, 0x6, 0x7, 0x8, 0x9, 0xd] {
        wrong.push(("of another stream, first", frame(kind, &[0])));
        wrong.push(("of another stream, after the head", [&put[..], &frame(kind, &[0])].concat()));
    }
    run(async {
        for (what, bytes) in &wrong {
            let ended = end_after_request(&site, &certificate, bytes).await;
            assert_eq!(ended, code::FRAME_UNEXPECTED, "{what}: {bytes:?}");
        }
        assert!(Raw::connect_from(CLIENT, &site, &certificate).await.is_served().await, "others are served");
    });
    assert_eq!(site.tidegate.metric("tidegate_requests_refused_total"), wrong.len() as f64);
}

#[test]
fn frames_that_are_cut_short_end_the_connection() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    let put = head("PUT", "/", &[]);
    let data = frame(frame_type::DATA, b"content");
    run(async {
        for bytes in [
            // In the midst of a head, of content, of what means nothing, and of a frame's header.
            put[..put.len() - 1].to_vec(),
            put[..1].to_vec(),
            [&put[..], &data[..data.len() - 1]].concat(),
            [&put[..], &data[..1]].concat(),
            [&put[..], &frame(UNKNOWN, b"abc")[..4]].concat(),
        ] {
            let ended = end_after_request(&site, &certificate, &bytes).await;
            assert_eq!(ended, code::FRAME_ERROR, "{bytes:?}");
        }
    });
}

#[test]
fn field_sections_that_cannot_be_decoded_end_the_connection() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    let sections: [&[u8]; 5] = [
        // It needs an insertion (RFC 9204 §4.5.1.1).
        &[2, 0, 0x80],
        // Fields of the dynamic table, before and after the base (§4.5.2, §4.5.3).
        &[0, 0, 0x80],
        &[0, 0, 0x10],
        // No field of the static table, which has 99 (appendix A).
        &[0, 0, 0xff, 36],
        // Shorter than what it begins with.
        &[0],
    ];
    run(async {
        for section in sections {
            let ended = end_after_request(&site, &certificate, &frame(frame_type::HEADERS, section)).await;
            assert_eq!(ended, code::QPACK_DECOMPRESSION_FAILED, "{section:?}");
            let trailers = [head("PUT", "/", &[]), frame(frame_type::HEADERS, section)].concat();
            let ended = end_after_request(&site, &certificate, &trailers).await;
            assert_eq!(ended, code::QPACK_DECOMPRESSION_FAILED, "trailers: {section:?}");
        }
    });
}

#[test]
fn streams_in_one_direction_that_break_the_rules_end_the_connection() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        for (what, streams, ends, expected) in [
            ("a second control stream", &[CONTROL, CONTROL][..], false, code::STREAM_CREATION_ERROR),
            ("a second encoder", &[&[2], &[2]], false, code::STREAM_CREATION_ERROR),
            ("a second decoder", &[&[3], &[3]], false, code::STREAM_CREATION_ERROR),
            ("a push", &[&[1, 0]], false, code::STREAM_CREATION_ERROR),
            ("a control stream that ends", &[CONTROL], true, code::CLOSED_CRITICAL_STREAM),
            ("an encoder that ends", &[&[2]], true, code::CLOSED_CRITICAL_STREAM),
            ("a decoder that ends", &[&[3]], true, code::CLOSED_CRITICAL_STREAM),
            ("no settings", &[&[0, 7, 1, 0]], false, code::MISSING_SETTINGS),
            ("settings twice", &[&[0, 4, 0, 4, 0]], false, code::FRAME_UNEXPECTED),
            ("content on the control stream", &[&[0, 4, 0, 0, 1, b'x']], false, code::FRAME_UNEXPECTED),
            ("a head on the control stream", &[&[0, 4, 0, 1, 0]], false, code::FRAME_UNEXPECTED),
            ("what HTTP/2 has on the control stream", &[&[0, 4, 0, 8, 1, 0]], false, code::FRAME_UNEXPECTED),
            ("a setting of HTTP/2", &[&[0, 4, 2, 2, 0]], false, code::SETTINGS_ERROR),
            ("a setting said twice", &[&[0, 4, 4, 6, 9, 6, 9]], false, code::SETTINGS_ERROR),
            ("half a setting", &[&[0, 4, 1, 6]], false, code::FRAME_ERROR),
            ("a cancelled push that was none", &[&[0, 4, 0, 3, 1, 0]], false, code::ID_ERROR),
            ("fewer pushes than before", &[&[0, 4, 0, 13, 1, 2, 13, 1, 1]], false, code::ID_ERROR),
            // RFC 9204 §4.3.1: a table larger than was allowed, which is none; §4.3.2: an insertion into it.
            ("a table", &[CONTROL, &[2, 0x3f, 1]], false, code::QPACK_ENCODER_STREAM_ERROR),
            ("an insertion", &[CONTROL, &[2, 0xc0, 1, b'x']], false, code::QPACK_ENCODER_STREAM_ERROR),
            // §4.4.1 and §4.4.3: there was nothing to be told of.
            ("a section's receipt", &[CONTROL, &[3, 0x80]], false, code::QPACK_DECODER_STREAM_ERROR),
            ("an increment", &[CONTROL, &[3, 1]], false, code::QPACK_DECODER_STREAM_ERROR),
        ] {
            let ended = end_after_one_way(&site, &certificate, streams, ends).await;
            assert_eq!(ended, expected, "{what}");
        }
        assert!(Raw::connect_from(CLIENT, &site, &certificate).await.is_served().await, "others are served");
    });
}

#[test]
fn control_stream_that_is_reset_ends_the_connection() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        let mut client = Raw::connect_from(CLIENT, &site, &certificate).await;
        assert!(client.is_served().await);
        client.control.reset(varint(code::NO_ERROR)).unwrap();
        assert_eq!(end(&client.quic).await, code::CLOSED_CRITICAL_STREAM);
    });
}

/// RFC 9114 §9.
#[test]
fn frames_and_streams_that_mean_nothing_are_ignored() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| Reply::ok(request.body.clone()));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        let mut client = Raw::connect_from(CLIENT, &site, &certificate).await;
        let nothing = frame(UNKNOWN, b"means nothing");
        client.control.write_all(&[&nothing[..], &frame(0xf00, b"")].concat()).await.unwrap();
        let mut ended = one_way(&client.quic, &[&integer(UNKNOWN)[..], b"anything"].concat()).await;
        let _ = ended.finish();
        let stays = one_way(&client.quic, &integer(0x54)).await;
        let stopped = stays.stopped().await.unwrap().map(|code| code.into_inner());
        assert_eq!(stopped, Some(code::STREAM_CREATION_ERROR), "nobody reads it");
        let trailers = fields(&[("x-sum", "1")]);
        let data = frame(frame_type::DATA, b"abc");
        let request =
            [&nothing[..], &head("PUT", "/", &[]), &nothing, &data, &nothing, &data, &trailers, &nothing]
                .concat();
        let answer = client.ask(&request).await.unwrap();
        assert!(is_ok(&answer));
        assert!(frames(&answer).contains(&(frame_type::DATA, b"abcabc".to_vec())), "{answer:?}");
        assert_eq!(origin.last().trailers.all("X-Sum"), ["1"]);
        assert!(client.is_served().await);
    });
}

/// Requests in whatever pieces they come.
#[test]
fn request_that_comes_byte_by_byte_is_answered() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| Reply::ok(request.body.clone()));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        let request =
            [&head("PUT", "/", &[])[..], &frame(frame_type::DATA, b"abc"), &fields(&[("x", "1")])].concat();
        let (mut send, receive) = client.begin(&[]).await;
        for byte in request {
            let before = client.quic.stats().udp_tx.datagrams;
            send.write_all(&[byte]).await.unwrap();
            until(|| client.quic.stats().udp_tx.datagrams > before).await;
        }
        send.finish().unwrap();
        let answer = answer(receive).await.unwrap();
        assert!(
            is_ok(&answer) && frames(&answer).contains(&(frame_type::DATA, b"abc".to_vec())),
            "{answer:?}"
        );
    });
}

#[test]
fn malformed_requests_end_their_streams_and_no_others() {
    let certificate = Certificate::of(&["a.example"]);
    let (gate, origin) = held_back();
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    let pseudo = [(":method", "GET"), (":scheme", "https"), (":authority", "a.example"), (":path", "/")];
    let without = |name: &str| -> Vec<u8> {
        let left: Vec<_> = pseudo.iter().copied().filter(|field| field.0 != name).collect();
        fields(&left)
    };
    let with = |more: &[(&str, &str)]| head("GET", "/", more);
    let data = frame(frame_type::DATA, b"abc");
    let malformed = [
        with(&[("Upper", "1")]),
        with(&[("connection", "close")]),
        with(&[("keep-alive", "3")]),
        with(&[("proxy-connection", "close")]),
        with(&[("transfer-encoding", "chunked")]),
        with(&[("upgrade", "h2c")]),
        with(&[("te", "gzip")]),
        with(&[("host", "b.example")]),
        with(&[(":path", "/again")]),
        with(&[(":status", "200")]),
        with(&[(":unknown", "1")]),
        with(&[("x", "a\nb")]),
        with(&[("x", "a\0b")]),
        with(&[("x", " a")]),
        with(&[("", "a")]),
        with(&[("content-length", "3"), ("content-length", "4")]),
        with(&[("content-length", "+3")]),
        without(":method"),
        without(":scheme"),
        without(":path"),
        without(":authority"),
        fields(&[&[("x", "1")], &pseudo[..]].concat()),
        fields(&[&pseudo[..3], &[("x", "1")], &pseudo[3..]].concat()),
        head("GET", "", &[]),
        head("GET", "elsewhere", &[]),
        head("G T", "/", &[]),
        fields(&[(":method", "CONNECT"), (":scheme", "https"), (":authority", "a.example"), (":path", "/")]),
    ];
    // Of these the heads are good: their requests have begun.
    let malformed_later = [
        [&head("PUT", "/", &[])[..], &data, &fields(&[(":path", "/")])].concat(),
        [&head("PUT", "/", &[])[..], &data, &fields(&[("Upper", "1")])].concat(),
    ];
    run(async {
        // From the host's own address, which is exempt from being judged.
        let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        let (mut send, receive) = client.begin(&head("GET", "/held", &[])).await;
        send.finish().unwrap();
        until(|| origin.count() == 1).await;
        for bytes in malformed.iter().chain(&malformed_later) {
            let error = client.ask(bytes).await.expect_err(&String::from_utf8_lossy(bytes));
            assert_eq!(error, code::MESSAGE_ERROR, "{}", String::from_utf8_lossy(bytes));
        }
        gate.open();
        assert!(is_ok(&answer(receive).await.unwrap()), "the others go on");
        assert!(client.is_served().await);
    });
    assert_eq!(site.tidegate.metric("tidegate_requests_refused_total"), malformed.len() as f64);
}

/// RFC 9114 §4.1.2. Which of them the origin began to see is of no account: none of them was whole.
#[test]
fn content_of_another_length_than_was_stated_ends_its_stream() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    let put = |length: &str| head("PUT", "/", &[("content-length", length)]);
    let data = frame(frame_type::DATA, b"abc");
    run(async {
        let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        for bytes in [
            [&put("4")[..], &data].concat(),
            [&put("5")[..], &data, &data].concat(),
            [&put("2")[..], &data].concat(),
            put("1"),
            [&put("0")[..], &data].concat(),
            [&head("GET", "/", &[("content-length", "0")])[..], &data].concat(),
            [&put("4")[..], &data, &fields(&[("x", "1")])].concat(),
        ] {
            let error = client.ask(&bytes).await.expect_err(&String::from_utf8_lossy(&bytes));
            assert_eq!(error, code::MESSAGE_ERROR, "{}", String::from_utf8_lossy(&bytes));
        }
        assert!(is_ok(&client.ask(&[&put("6")[..], &data, &data].concat()).await.unwrap()));
    });
    assert_eq!(origin.last().body, b"abcabc");
    assert_eq!(origin.requests().iter().filter(|request| request.method == "PUT").count(), 1);
}

#[test]
fn stream_with_nothing_on_it_is_no_request() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        let client = Raw::connect_from(CLIENT, &site, &certificate).await;
        assert_eq!(client.ask(&[]).await, Err(code::REQUEST_INCOMPLETE));
        assert_eq!(client.ask(&frame(UNKNOWN, b"x")).await, Err(code::REQUEST_INCOMPLETE));
        assert!(client.is_served().await);
    });
    assert_eq!(origin.count(), 1);
}

#[test]
fn head_over_the_limits_is_answered_so() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder = Tidegate::builder()
        .origin(&origin)
        .limits("head_size = \"2KiB\"\nrequest_line_size = \"1KiB\"\nfields = 20");
    let site = serving(builder, &certificate);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        // The library keeps to what the server says of the greatest section.
        let many = (0..21).fold(get("/"), |request, number| request.header(format!("x-{number}"), "1"));
        for request in [get("/").header("x", "y".repeat(2040)), many, get(&format!("/{}", "a".repeat(1020)))]
        {
            assert_eq!(client.ask(request).await.unwrap().status(), 431);
        }
        let within = (0..18).fold(get("/"), |request, number| request.header(format!("x-{number}"), "1"));
        assert_eq!(client.ask(within).await.unwrap().status(), 200);
        // It is refused before it comes.
        let raw = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        let begun = [integer(frame_type::HEADERS), integer(1 << 20), vec![0, 0]].concat();
        let (mut send, receive) = raw.begin(&begun).await;
        let answer = answer(receive).await.unwrap();
        assert_eq!(frames(&answer)[0].0, frame_type::HEADERS);
        assert!(!is_ok(&answer));
        let _ = send.finish();
        assert!(raw.is_served().await, "the others go on");
    });
    assert_eq!(origin.count(), 2);
    assert_eq!(site.tidegate.metric("tidegate_http3_connections_total"), 2.0);
}

#[test]
fn client_that_cancels_all_it_asks_for_is_ended() {
    let certificate = Certificate::of(&["a.example"]);
    let (gate, origin) = held_back();
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    let ended = run(async {
        let client = Client::connect(&site, &certificate).await;
        while let Ok(mut stream) = client.begin(get("/a")).await {
            cancel(&mut stream);
            tokio::task::yield_now().await;
        }
        end(&client.quic).await
    });
    gate.open();
    assert_eq!(ended, code::EXCESSIVE_LOAD);
    assert_eq!(site.tidegate.metric("tidegate_http3_floods_total"), 1.0);
}

/// The upstream works for them all the same.
#[test]
fn requests_that_are_given_up_are_logged_and_counted_against_their_client() {
    let certificate = Certificate::of(&["a.example"]);
    let gate = Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |request| {
        if request.target != "/free" {
            door.pass();
        }
        Reply::ok("x")
    });
    let tables = "[log]\naccess = \"@DIR@/access.log\"\n[[classifier]]\nname = \"errors\"\nlimit = 10\naction = \"refuse\"\n";
    let site = serving(Tidegate::builder().origin(&origin).tables(tables), &certificate);
    let given_up = run(async {
        // The host's own address is exempt.
        let client = Client::connect_from(CLIENT, &site, &certificate, WIDE).await;
        let mut given_up = 0;
        while client.get("/free").await.status() == 200 {
            let asked = origin.count();
            let mut stream = client.send(get("/slow")).await;
            until(|| origin.count() > asked).await;
            cancel(&mut stream);
            given_up += 1;
            until(|| site.tidegate.metric("tidegate_clients_gone_total") == f64::from(given_up)).await;
        }
        assert_eq!(client.get("/free").await.status(), 429);
        given_up
    });
    gate.open();
    // Each counts as four errors; two windows may share them.
    assert!((2..=6).contains(&given_up), "{given_up}");
    eventually("all are logged", || {
        let text = std::fs::read_to_string(site.tidegate.directory().join("access.log")).unwrap_or_default();
        (text.matches("\"GET /slow HTTP/3.0\" 499 0 ").count() == given_up as usize).then_some(())
    });
}

/// Begins a stream with some bytes and goes on with others, again and again until the connection ends.
async fn flood(client: &Raw, begun: &[u8], bytes: &[u8]) -> u64 {
    let (mut send, _receive) = client.begin(begun).await;
    while send.write_all(bytes).await.is_ok() {
        tokio::task::yield_now().await;
    }
    end(&client.quic).await
}

#[test]
fn frames_that_ask_for_nothing_end_the_connection_when_there_are_too_many() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        let mut floods = 0.0;
        for bytes in [frame(frame_type::DATA, b""), frame(UNKNOWN, b""), frame(UNKNOWN, b"x")] {
            let client = Raw::connect_from(CLIENT, &site, &certificate).await;
            assert_eq!(
                flood(&client, &head("PUT", "/", &[]), &bytes.repeat(100)).await,
                code::EXCESSIVE_LOAD,
                "{bytes:?}"
            );
            floods += 1.0;
            assert_eq!(site.tidegate.metric("tidegate_http3_floods_total"), floods, "{bytes:?}");
        }
        // On the control stream: as many pushes as before.
        let mut client = Raw::connect_from(CLIENT, &site, &certificate).await;
        assert!(client.is_served().await);
        while client.control.write_all(&[13, 1, 0].repeat(100)).await.is_ok() {
            tokio::task::yield_now().await;
        }
        assert_eq!(end(&client.quic).await, code::EXCESSIVE_LOAD);
        assert_eq!(site.tidegate.metric("tidegate_http3_floods_total"), floods + 1.0);
        // Fewer than that are none of the server's business.
        let client = Raw::connect_from(CLIENT, &site, &certificate).await;
        let few = [&get_head()[..], &frame(UNKNOWN, b"").repeat(800)].concat();
        assert!(is_ok(&client.ask(&few).await.unwrap()));
        assert!(client.is_served().await);
    });
}

/// Signs of life that are asked for without end: each is a datagram to be read and one to be sent.
#[test]
fn client_that_pings_without_end_is_ended() {
    let certificate = Certificate::of(&["a.example"]);
    let (gate, origin) = held_back();
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        let mut transport = TransportConfig::default();
        transport.keep_alive_interval(Some(Duration::from_millis(1)));
        let (endpoint, quic) = quic_with(transport, CLIENT, &site, &certificate).await.unwrap();
        let client = Raw::over(endpoint, quic).await;
        let (mut send, _receive) = client.begin(&get_head()).await;
        send.finish().unwrap();
        assert_eq!(end(&client.quic).await, code::EXCESSIVE_LOAD);
        assert!(client.quic.stats().frame_tx.ping > 1000, "{:?}", client.quic.stats().frame_tx);
    });
    gate.open();
    assert_eq!(site.tidegate.metric("tidegate_http3_floods_total"), 1.0);
}

/// Each byte is a datagram of its own.
#[test]
fn client_that_sends_content_in_bytes_is_ended() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        let client = Raw::connect_from(CLIENT, &site, &certificate).await;
        let begun = [head("PUT", "/", &[]), integer(frame_type::DATA), integer(1 << 30)].concat();
        assert_eq!(flood(&client, &begun, b"x").await, code::EXCESSIVE_LOAD);
    });
    assert_eq!(site.tidegate.metric("tidegate_http3_floods_total"), 1.0);
}

#[test]
fn client_that_does_not_take_its_response_is_ended() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable(content(1, 4 << 20)));
    // Ten seconds are let pass in any case.
    let builder = Tidegate::builder()
        .origin(&origin)
        .limits("response_min_rate = \"1GiB/s\"")
        .cache("max_object = \"8MiB\"");
    let site = serving(builder, &certificate);
    run(async {
        let client = Client::connect_from([127, 0, 0, 1], &site, &certificate, 100).await;
        let mut stream = client.send(get("/a")).await;
        assert_eq!(stream.recv_response().await.unwrap().status(), 200);
        assert_eq!(end(&client.quic).await, code::EXCESSIVE_LOAD);
        let error = piece(&mut stream).await;
        drop(error);
    });
    assert_eq!(site.tidegate.metric("tidegate_slow_readers_total"), 1.0);
}

/// All of it is in the server's hands, and none in the client's.
#[test]
fn client_that_does_not_take_a_small_response_is_ended() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok(content(1, 20_000)));
    let builder = Tidegate::builder().origin(&origin).limits("response_min_rate = \"1GiB/s\"");
    let site = serving(builder, &certificate);
    run(async {
        let client = Raw::with_window([127, 0, 0, 1], &site, &certificate, 100).await;
        let (mut send, _receive) = client.begin(&get_head()).await;
        send.finish().unwrap();
        assert_eq!(end(&client.quic).await, code::EXCESSIVE_LOAD);
    });
    assert_eq!(site.tidegate.metric("tidegate_slow_readers_total"), 1.0);
}

#[test]
fn body_that_trickles_below_the_least_rate_is_answered_as_by_http1() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("reached"));
    let builder = Tidegate::builder().origin(&origin).limits("body_min_rate = \"10KiB/s\"");
    let site = serving(builder, &certificate);
    let status = run(async {
        let client = Client::connect(&site, &certificate).await;
        let mut stream = client.begin(Request::post(url("/a"))).await.unwrap();
        stream.send_data("start".into()).await.unwrap();
        stream.recv_response().await.unwrap().status().as_u16()
    });
    assert_eq!(status, 408);
    assert_eq!(site.tidegate.metric("tidegate_slow_bodies_total"), 1.0);
}

#[test]
fn head_that_never_comes_whole_ends_its_stream_and_no_other() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder = Tidegate::builder().origin(&origin).limits("header_timeout = \"1s\"");
    let site = serving(builder, &certificate);
    run(async {
        let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        let half = &get_head()[..20];
        let (_send, receive) = client.begin(half).await;
        assert_eq!(answer(receive).await, Err(code::REQUEST_INCOMPLETE));
        assert!(client.is_served().await);
        // Nor does the end of a GET that has begun.
        let (_send, receive) = client.begin(&get_head()).await;
        assert_eq!(answer(receive).await, Err(code::REQUEST_INCOMPLETE));
        assert!(client.is_served().await);
    });
    assert_eq!(site.tidegate.metric("tidegate_header_timeouts_total"), 2.0);
    assert_eq!(origin.count(), 2);
}

#[test]
fn client_that_begins_heads_and_does_not_go_on_is_blocked() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder = Tidegate::builder().origin(&origin).top("workers = 1").limits("header_timeout = \"500ms\"");
    let site = serving(builder, &certificate);
    run(async {
        let mut silent = Vec::new();
        for _ in 0..20 {
            let client = Raw::connect_from(CLIENT, &site, &certificate).await;
            silent.push((client.begin(&get_head()[..9]).await, client));
        }
        until(|| site.tidegate.metric("tidegate_defence_slow_total") >= 1.0).await;
    });
}

#[test]
fn listed_client_gets_no_connection() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    assert!(site.tidegate.command(&["block", "add", "127.0.9.9"]).status.success());
    run(async {
        // What the list says acts a moment later (a quarter of a second). Nothing at all comes back then.
        let mut waiting = Vec::new();
        loop {
            let (site, certificate) = (&site, &certificate);
            let mut attempt = Box::pin(quic(CLIENT, site, certificate, WIDE));
            tokio::select! {
                connected = &mut attempt => drop(connected),
                () = until(|| site.tidegate.metric("tidegate_connections_policed_total") >= 1.0) => {
                    waiting.push(attempt);
                    break;
                }
            }
        }
        let other = Client::connect_from([127, 0, 9, 8], &site, &certificate, WIDE).await;
        assert_eq!(other.get("/").await.status(), 200);
        let before = site.tidegate.metric("tidegate_http3_connections_total");
        // A first datagram that is sent again is policed again; it never becomes a connection.
        let mut attempt = waiting.pop().unwrap();
        tokio::select! {
            connected = &mut attempt => panic!("{:?}", connected.map(|_| ())),
            () = until(|| site.tidegate.metric("tidegate_connections_policed_total") >= 3.0) => {}
        }
        assert_eq!(site.tidegate.metric("tidegate_http3_connections_total"), before);
        assert!(site.tidegate.command(&["block", "remove", "127.0.9.9"]).status.success());
        let (endpoint, quic) = attempt.await.unwrap();
        assert_eq!(
            Client::over(endpoint, quic).await.get("/").await.status(),
            200,
            "until it is taken off the list"
        );
    });
}

#[test]
fn listed_client_of_a_trusted_proxy_is_refused() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder = Tidegate::builder().origin(&origin).top("trusted_proxies = [\"127.0.0.1\"]");
    let site = serving(builder, &certificate);
    assert!(site.tidegate.command(&["block", "add", "192.0.2.0/24"]).status.success());
    run(async {
        let client = Client::connect(&site, &certificate).await;
        // What the list says acts a moment later (a quarter of a second).
        let listed = || get("/a").header("x-forwarded-for", "192.0.2.1");
        while client.ask(listed()).await.unwrap().status() != 403 {}
        let other = client.ask(get("/a").header("x-forwarded-for", "198.51.100.1")).await;
        assert_eq!(other.unwrap().status(), 200);
    });
}

#[test]
fn clients_beyond_the_number_of_connections_are_refused_until_there_is_room() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let unwatched = "[defence]\nenabled = false";
    let builder = Tidegate::builder().origin(&origin).limits("connections = 4").tables(unwatched);
    let site = serving(builder, &certificate);
    // Those that looked whether it listens are gone.
    eventually("nobody is there", || {
        (site.tidegate.metric("tidegate_connections_open") == 0.0).then_some(())
    });
    run(async {
        let mut clients = Vec::new();
        for _ in 0..4 {
            let client = Client::connect(&site, &certificate).await;
            assert_eq!(client.get("/").await.status(), 200);
            clients.push(client);
        }
        match quic([127, 0, 0, 1], &site, &certificate, WIDE).await {
            // CONNECTION_REFUSED (RFC 9000 §20.1).
            Err(ConnectionError::ConnectionClosed(close)) => {
                assert_eq!(u64::from(close.error_code), 2, "{close:?}");
            }
            other => panic!("{:?}", other.map(|_| ())),
        }
        assert_eq!(site.tidegate.metric("tidegate_connections_refused_total"), 1.0);
        assert_eq!(clients[0].get("/").await.status(), 200, "those that are there go on");
        let leaving = clients.pop().unwrap();
        leaving.quic.close(varint(code::NO_ERROR), b"");
        until(|| site.tidegate.metric("tidegate_connections_open") == 3.0).await;
        assert_eq!(Client::connect(&site, &certificate).await.get("/").await.status(), 200);
    });
}

#[test]
fn with_rules_for_connections_clients_prove_their_address_and_are_served() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder =
        Tidegate::builder().origin(&origin).tables("[[connection]]\nsource = \"127.0.9.7\"\nrate = 0.001\n");
    let site = serving(builder, &certificate);
    run(async {
        for _ in 0..3 {
            let client = Client::connect_from(CLIENT, &site, &certificate, WIDE).await;
            assert_eq!(client.get("/").await.status(), 200);
        }
        assert_eq!(site.tidegate.metric("tidegate_quic_retries_total"), 3.0);
        // The rule acts on who it is for.
        let first = Client::connect_from([127, 0, 9, 7], &site, &certificate, WIDE).await;
        assert_eq!(first.get("/").await.status(), 200);
        let second = quic([127, 0, 9, 7], &site, &certificate, WIDE).await;
        assert!(second.is_err(), "{:?}", second.map(|_| ()));
        assert_eq!(site.tidegate.metric("tidegate_connections_policed_total"), 1.0);
        assert_eq!(first.get("/").await.status(), 200);
    });
    let without = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        let client = Client::connect_from(CLIENT, &without, &certificate, WIDE).await;
        assert_eq!(client.get("/").await.status(), 200);
    });
    assert_eq!(without.tidegate.metric("tidegate_quic_retries_total"), 0.0);
}

#[test]
fn clients_that_are_kept_out_lose_their_connection() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let tables = "[[filter]]\nuser_agent = \"resetting\"\naction = \"reset\"\n\
        [[filter]]\nuser_agent = \"dropping\"\naction = \"drop\"\n\
        [[request]]\npath = \"/reset\"\naction = \"reset\"\n[[request]]\npath = \"/drop\"\naction = \"drop\"\n\
        [[request]]\npath = \"/refuse\"\naction = \"refuse\"\n";
    let site = serving(Tidegate::builder().origin(&origin).tables(tables), &certificate);
    run(async {
        for (address, request) in [
            (1, get("/").header("user-agent", "resetting")),
            (2, get("/").header("user-agent", "dropping")),
            (3, get("/reset")),
            (4, get("/drop")),
        ] {
            let client = Client::connect_from([127, 0, 9, address], &site, &certificate, WIDE).await;
            assert_eq!(client.get("/").await.status(), 200);
            let response = client.ask(request).await;
            assert!(response.is_err(), "{address}: {response:?}");
            end(&client.quic).await;
        }
        assert_eq!(site.tidegate.metric("tidegate_requests_policed_total"), 4.0);
        let client = Client::connect_from(CLIENT, &site, &certificate, WIDE).await;
        assert_eq!(client.get("/refuse").await.status(), 503);
        assert_eq!(client.get("/").await.status(), 200, "an answer needs no end");
    });
    assert_eq!(origin.count(), 5);
}

#[test]
fn malformed_requests_are_logged_and_counted_against_their_client() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let tables = "[log]\naccess = \"@DIR@/access.log\"\n[[classifier]]\nname = \"errors\"\nlimit = 10\naction = \"refuse\"\n";
    let builder = Tidegate::builder().origin(&origin).top("workers = 1").tables(tables);
    let site = serving(builder, &certificate);
    let refused = run(async {
        let client = Raw::connect_from(CLIENT, &site, &certificate).await;
        let mut refused = 0;
        while client.quic.close_reason().is_none() && client.is_served().await {
            let Ok((mut send, receive)) = client.quic.open_bi().await else { break };
            let _ = send.write_all(&head("GET", "/", &[("Upper", "1")])).await;
            let _ = send.finish();
            drop(receive);
            refused += 1;
            until(|| site.tidegate.metric("tidegate_requests_refused_total") >= f64::from(refused)).await;
        }
        refused
    });
    assert!((10..=22).contains(&refused), "{refused}");
    eventually("all are logged", || {
        let text = std::fs::read_to_string(site.tidegate.directory().join("access.log")).unwrap_or_default();
        (text.matches("\"- - HTTP/3.0\" 400 ").count() == refused as usize).then_some(())
    });
}

#[test]
fn delayed_request_is_answered_late_and_the_others_go_on() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let tables = "[[filter]]\nuser_agent = \"slowed\"\naction = \"delay\"\n";
    let site = serving(Tidegate::builder().origin(&origin).tables(tables), &certificate);
    run(async {
        let client = Client::connect_from(CLIENT, &site, &certificate, WIDE).await;
        let began = std::time::Instant::now();
        let mut slowed = client.send(get("/").header("user-agent", "slowed")).await;
        assert_eq!(client.get("/").await.status(), 200, "the others go on");
        assert_eq!(slowed.recv_response().await.unwrap().status(), 200);
        assert!(began.elapsed() >= Duration::from_secs(1));
    });
}

/// Each of them takes the server's memory.
#[test]
fn heads_of_requests_that_wait_are_bounded() {
    let certificate = Certificate::of(&["a.example"]);
    let (gate, origin) = held_back();
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let mut streams = Vec::new();
        for _ in 0..100 {
            streams.push(client.send(get("/").header("x", "y".repeat(15_000))).await);
        }
        until(|| site.tidegate.metric("tidegate_requests_refused_total") >= 31.0).await;
        gate.open();
        let mut refused = 0;
        for stream in &mut streams {
            match stream.recv_response().await {
                Ok(response) => assert_eq!(response.status(), 200),
                Err(error) => {
                    assert_eq!(stream_code(&error), Some(code::EXCESSIVE_LOAD), "{error:?}");
                    refused += 1;
                }
            }
        }
        // 69 of them are a MiB.
        assert_eq!(refused, 31);
        assert_eq!(client.get("/").await.status(), 200, "there is room again");
    });
}

/// Any client could write what it liked, as often as it liked, into the program's log.
#[test]
fn what_clients_send_does_not_fill_the_log() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    let before = site.tidegate.output().lines().count();
    run(async {
        for bytes in [frame(frame_type::DATA, b"x"), head("GET", "/", &[])[..5].to_vec()] {
            for _ in 0..5 {
                end_after_request(&site, &certificate, &bytes).await;
            }
        }
        let client = Raw::connect_from(CLIENT, &site, &certificate).await;
        assert_eq!(client.ask(&head("GET", "/", &[("Upper", "1")])).await, Err(code::MESSAGE_ERROR));
    });
    assert_eq!(site.tidegate.output().lines().count(), before, "{}", site.tidegate.output());
}

#[test]
fn settings_say_how_large_a_field_section_may_be() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder = Tidegate::builder()
        .origin(&origin)
        .limits("head_size = \"4KiB\"\nrequest_line_size = \"1KiB\"\nfields = 10");
    let site = serving(builder, &certificate);
    run(async {
        let client = Raw::connect_from(CLIENT, &site, &certificate).await;
        let mut control = tidegate_e2e::http3::Frames::of_control(&client.quic).await;
        let (kind, settings) = control.next().await.unwrap().unwrap();
        assert_eq!(kind, frame_type::SETTINGS);
        let mut settings = settings.as_slice();
        // RFC 9114 §4.2.2: 32 bytes more for each field.
        assert_eq!(take_integer(&mut settings), Some(6));
        assert_eq!(take_integer(&mut settings), Some(4096 + 10 * 32));
        assert!(settings.is_empty());
    });
}
