//! What breaks the rules of HTTP/3 (RFC 9114, RFC 9204) ends the stream or the connection that it is on, with the code that
//! says why, and nothing else.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use tidegate_e2e::http3::{
    CONTROL, Client, Raw, WIDE, answer, code, end, fields, frame, frame_type, frames, get, head, integer,
    is_ok, one_way, quic, run, take_integer, until, varint,
};
use tidegate_e2e::{Builder, Certificate, Gate, Origin, Reply, Site, Tidegate, eventually};

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
        // Trailers, after content.
        [&head("PUT", "/", &[])[..], &data, &fields(&[(":path", "/")])].concat(),
        [&head("PUT", "/", &[])[..], &data, &fields(&[("Upper", "1")])].concat(),
    ];
    run(async {
        // From the host's own address, which is exempt from being judged.
        let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        let (mut send, receive) = client.begin(&head("GET", "/held", &[])).await;
        send.finish().unwrap();
        until(|| origin.count() == 1).await;
        for bytes in &malformed {
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
        for request in [get("/").header("x", "y".repeat(2040)), many] {
            assert_eq!(client.ask(request).await.unwrap().status(), 431);
        }
        assert_eq!(client.ask(get(&format!("/{}", "a".repeat(1020)))).await.unwrap().status(), 414);
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

/// Lines of the program's log, once it has said all that it says at its start.
fn logged(site: &Site) -> usize {
    eventually("it serves", || site.tidegate.output().contains("data cores").then_some(()));
    site.tidegate.output().lines().count()
}

/// Any client could write what it liked, as often as it liked, into the program's log.
#[test]
fn what_clients_send_does_not_fill_the_log() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    let before = logged(&site);
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
