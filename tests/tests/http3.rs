//! HTTP/3 to clients: streams are requests like those of HTTP/1 and HTTP/2, and QUIC carries them wherever clients go.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::Write;

use h3::error::StreamError;
use http::{HeaderMap, Request, Response};
use tidegate_e2e::http3::{
    Client, Raw, answer, cancel, code, field, fields, frame_type, frames, get, head, is_ok, piece, rest, run,
    stream_code, until, url, varint, whole,
};
use tidegate_e2e::{Builder, Certificate, Gate, Origin, Reply, Site, Tidegate, content, eventually, http2};

/// Larger than the windows and buffers on the way together.
const LARGE: usize = 6 << 20;

fn is_hit<T>(response: &Response<T>) -> bool {
    field(response, "cache-status").contains("; hit")
}

fn site(certificate: &Certificate, origin: &Origin) -> Site {
    Site::with_http3(Tidegate::builder().origin(origin), &[("a", certificate)])
}

/// An origin that sends one half of its content, `half`, and the other once the gate is open.
fn halting() -> (Gate, Origin) {
    let gate = Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |request| {
        if request.target != "/halting" {
            return Reply::ok("x");
        }
        let door = door.clone();
        Reply::script(move |stream| {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf")?;
            door.pass();
            stream.write_all(b"half")
        })
    });
    (gate, origin)
}

#[test]
fn miss_and_hit_and_head_and_many_at_once() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable(content(1, LARGE)));
    let builder = Tidegate::builder().origin(&origin).cache("memory = \"64MiB\"\nmax_object = \"8MiB\"");
    let site = Site::with_http3(builder, &[("a", &certificate)]);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        for expected in [false, true] {
            let answer = client.get("/a").await;
            assert_eq!((answer.status(), is_hit(&answer.head)), (200, expected), "{:?}", answer.head);
            assert_eq!(field(&answer.head, "content-length"), LARGE.to_string());
            assert!(answer.body == content(1, LARGE));
        }
        let head = client.ask(Request::head(url("/a"))).await.unwrap();
        assert_eq!((head.status(), field(&head.head, "content-length")), (200, LARGE.to_string()));
        assert!(head.body.is_empty());
        let range = client.ask(get("/a").header("range", "bytes=70000-2999999")).await.unwrap();
        assert_eq!(range.status(), 206);
        assert!(range.body == content(1, LARGE)[70_000..3_000_000]);
        let mut several = Vec::new();
        for _ in 0..4 {
            several.push(client.send(get("/a")).await);
        }
        for mut stream in several {
            assert!(whole(&mut stream).await.unwrap().body == content(1, LARGE));
        }
    });
    assert_eq!(origin.count(), 1);
}

#[test]
fn origin_learns_what_the_client_said_and_how_it_came() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let request = get("/a?b").header("cookie", "c=1").header("cookie", "d=2").header("te", "trailers");
        assert_eq!(client.ask(request).await.unwrap().status(), 200);
    });
    let request = origin.last();
    assert_eq!((request.method.as_str(), request.target.as_str()), ("GET", "/a?b"));
    assert_eq!(request.fields.all("Host"), ["a.example"]);
    assert_eq!(request.fields.all("Cookie"), ["c=1; d=2"]);
    assert_eq!(request.field("X-Forwarded-Proto"), "https");
    assert_eq!(request.field("X-Forwarded-For"), "127.0.0.1");
    // RFC 9110 §7.6.3: the version that was received.
    assert_eq!(request.field("Via"), "3 tidegate");
    assert_eq!(request.field("TE"), "");
    assert_eq!(request.fields.get("Transfer-Encoding"), None, "it has no content");
}

#[test]
fn access_log_names_the_protocol_and_has_nothing_of_how_connections_end() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable("x"));
    let builder = Tidegate::builder().origin(&origin).tables("[log]\naccess = \"@DIR@/access.log\"");
    let site = Site::with_http3(builder, &[("a", &certificate)]);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        client.get("/a").await;
        client.get("/a").await;
        // How clients end connections is nobody's fault: with a word of HTTP/3's, of QUIC's, or without any.
        client.quic.close(varint(code::NO_ERROR), b"");
        let other = Client::connect(&site, &certificate).await;
        other.get("/a").await;
        drop(other);
        until(|| site.tidegate.metric("tidegate_connections_open") == 0.0).await;
    });
    assert_eq!(site.tidegate.metric("tidegate_requests_refused_total"), 0.0);
    let lines = eventually("all are logged", || {
        let text = std::fs::read_to_string(site.tidegate.directory().join("access.log")).unwrap_or_default();
        (text.lines().count() >= 3).then_some(text)
    });
    assert_eq!(lines.matches("\"GET /a HTTP/3.0\" 200 1 ").count(), 3, "{lines}");
    assert_eq!(lines.lines().count(), 3, "{lines}");
}

#[test]
fn upload_of_stated_and_of_unknown_length_arrives_whole_and_comes_back() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| Reply::ok(request.body.clone()));
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        for length in [Some(LARGE.to_string()), None] {
            let request = Request::put(url("/a"));
            let request = match &length {
                Some(length) => request.header("content-length", length),
                None => request,
            };
            let answer = client.upload_with(request, content(1, LARGE)).await.unwrap();
            assert_eq!(answer.status(), 200);
            assert!(answer.body == content(1, LARGE), "{length:?}");
            let request = origin.last();
            assert_eq!(request.fields.get("Content-Length"), length);
            assert!(request.body == content(1, LARGE), "{length:?}");
        }
        // Nothing is content, too.
        let answer = client.upload("/a", Vec::new()).await.unwrap();
        assert_eq!((answer.status(), answer.body.len()), (200, 0));
    });
    assert_eq!(origin.count(), 3);
}

#[test]
fn get_with_content_brings_it_to_the_origin() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| Reply::ok(request.body.clone()));
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let answer = client.upload_with(get("/a"), b"abc".to_vec()).await.unwrap();
        assert_eq!((answer.status(), answer.body.as_slice()), (200, &b"abc"[..]));
    });
    assert_eq!(origin.last().method, "GET");
}

/// Whether there is content to it is not known before.
#[test]
fn get_is_answered_once_its_stream_has_ended() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    run(async {
        let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        let (mut send, receive) = client.begin(&head("GET", "/open", &[])).await;
        assert!(is_ok(&client.ask(&head("GET", "/other", &[])).await.unwrap()), "the others go on");
        assert_eq!(origin.last().target, "/other");
        assert_eq!(origin.count(), 1);
        send.finish().unwrap();
        assert!(is_ok(&answer(receive).await.unwrap()));
        assert_eq!(origin.last().target, "/open");
    });
}

#[test]
fn trailers_of_a_request_reach_the_origin() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let mut stream = client.begin(Request::put(url("/a"))).await.unwrap();
        stream.send_data("abc".into()).await.unwrap();
        let mut trailers = HeaderMap::new();
        for (name, value) in [("x-sum", "42"), ("content-length", "7"), ("x-sum", "43")] {
            trailers.append(name, value.parse().unwrap());
        }
        stream.send_trailers(trailers).await.unwrap();
        stream.finish().await.unwrap();
        assert_eq!(whole(&mut stream).await.unwrap().status(), 200);
    });
    let request = origin.last();
    assert_eq!(request.body, b"abc");
    assert_eq!(request.trailers.all("X-Sum"), ["42", "43"]);
    assert_eq!(request.trailers.get("Content-Length"), None, "framing is not for trailers (RFC 9110 §6.5.1)");
}

#[test]
fn trailers_of_a_response_come_back_without_what_is_forbidden_there() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| {
        Reply::Raw(
            b"HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\
              X-Sum: 7\r\nContent-Length: 9\r\nConnection: close\r\nKeep-Alive: 3\r\n\r\n"
                .to_vec(),
        )
    });
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let answer = client.get("/a").await;
        assert_eq!(answer.body, b"x");
        let trailers = answer.trailers.unwrap();
        assert_eq!(trailers.get("x-sum").unwrap(), "7");
        assert_eq!(trailers.len(), 1, "{trailers:?}");
    });
}

#[test]
fn early_hints_come_before_the_response() {
    let certificate = Certificate::of(&["a.example"]);
    let gate = Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |_| {
        let door = door.clone();
        Reply::script(move |stream| {
            stream
                .write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\nConnection: x\r\nX: y\r\n\r\n")?;
            door.pass();
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
        })
    });
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let mut stream = client.send(get("/a")).await;
        let hints = stream.recv_response().await.unwrap();
        assert_eq!((hints.status().as_u16(), field(&hints, "link").as_str()), (103, "</a.css>"));
        assert_eq!(hints.headers().len(), 1, "{hints:?}");
        gate.open();
        let answer = whole(&mut stream).await.unwrap();
        assert_eq!((answer.status(), answer.body.as_slice()), (200, &b"x"[..]));
    });
}

#[test]
fn client_that_expects_to_be_told_to_go_on_is_told_so() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| Reply::ok(request.body.clone()));
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let request = Request::put(url("/a")).header("expect", "100-continue").header("content-length", "3");
        let mut stream = client.begin(request).await.unwrap();
        assert_eq!(stream.recv_response().await.unwrap().status(), 100);
        stream.send_data("abc".into()).await.unwrap();
        stream.finish().await.unwrap();
        // The origin may have told the same.
        let answer = loop {
            let head = stream.recv_response().await.unwrap();
            if head.status() != 100 {
                break (head.status().as_u16(), rest(&mut stream).await.unwrap());
            }
        };
        assert_eq!(answer, (200, b"abc".to_vec()));
    });
}

/// What nobody reads of refused uploads must not use up the connection's window.
#[test]
fn uploads_that_are_too_large_leave_room_for_others() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| Reply::ok(request.body.len().to_string()));
    let builder = Tidegate::builder().origin(&origin).limits("body_size = \"1MiB\"");
    let site = Site::with_http3(builder, &[("a", &certificate)]);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        for turn in 0..12 {
            let request = Request::put(url("/a"));
            let request = match turn % 2 {
                0 => request.header("content-length", 3 << 20),
                _ => request,
            };
            let answer = client.upload_with(request, content(1, 3 << 20)).await.unwrap();
            assert_eq!(answer.status(), 413, "{turn}");
        }
        let answer = client.upload("/a", content(1, 1 << 20)).await.unwrap();
        assert_eq!(answer.body, (1 << 20).to_string().as_bytes());
    });
}

/// Refuses what is below `/a`.
fn refusing(origin: &Origin) -> Builder {
    Tidegate::builder().origin(origin).tables("[[request]]\npath = \"/a\"\naction = \"refuse\"")
}

#[test]
fn uploads_that_a_rule_refuses_leave_room_for_others() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| Reply::ok(request.body.len().to_string()));
    let site = Site::with_http3(refusing(&origin), &[("a", &certificate)]);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        for _ in 0..12 {
            assert_eq!(client.upload("/a", content(1, 1 << 20)).await.unwrap().status(), 503);
        }
        let answer = client.upload("/b", content(1, 2 << 20)).await.unwrap();
        assert_eq!(answer.body, (2 << 20).to_string().as_bytes());
    });
    assert_eq!(origin.count(), 1);
}

/// RFC 9114 §4.1: the response is whole, and the client is told to send no more.
#[test]
fn upload_that_is_answered_early_is_over() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = Site::with_http3(refusing(&origin), &[("a", &certificate)]);
    run(async {
        let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        let (send, receive) = client.begin(&head("PUT", "/a", &[])).await;
        let answer = frames(&answer(receive).await.unwrap());
        assert_eq!(answer[0].0, frame_type::HEADERS, "{answer:?}");
        let stopped = send.stopped().await.unwrap().map(|code| code.into_inner());
        assert_eq!(stopped, Some(code::NO_ERROR));
        assert_eq!(site.tidegate.metric("tidegate_slow_bodies_total"), 0.0);
        assert!(client.is_served().await, "the others go on");
    });
}

#[test]
fn stream_is_reset_when_the_origin_breaks_off() {
    let certificate = Certificate::of(&["a.example"]);
    let gates = [Gate::default(), Gate::default()];
    let doors = gates.clone();
    let origin = Origin::start(move |request| {
        let (start, door): (&[u8], _) = match request.target.as_str() {
            "/length" => (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nstart", &doors[0]),
            "/chunks" => (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nstart\r\n", &doors[1]),
            _ => return Reply::ok("x"),
        };
        let door = door.clone();
        Reply::script(move |stream| {
            stream.write_all(start)?;
            door.pass();
            stream.shutdown(std::net::Shutdown::Both)
        })
    });
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        for (target, gate) in ["/length", "/chunks"].into_iter().zip(&gates) {
            let mut stream = client.send(get(target)).await;
            assert_eq!(stream.recv_response().await.unwrap().status(), 200);
            assert_eq!(&piece(&mut stream).await.unwrap().unwrap()[..], b"start", "{target}");
            gate.open();
            let error = rest(&mut stream).await.expect_err(target);
            assert_eq!(stream_code(&error), Some(code::INTERNAL_ERROR), "{target}: {error:?}");
        }
        assert_eq!(client.get("/whole").await.body, b"x", "the others go on");
    });
    assert_eq!(site.tidegate.metric("tidegate_responses_broken_total"), 2.0);
    assert_eq!(site.tidegate.metric("tidegate_upstream_errors_total"), 2.0);
}

/// RFC 9114 §3.1.1: who may go over to it learns of it.
#[test]
fn clients_with_tls_are_offered_it_and_others_are_not() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    let offer = format!("h3=\":{}\"", site.address.port());
    let is_offer = |value: &str| value.split(';').next() == Some(offer.as_str());
    let by_http1 = site.connect(&certificate).get("/").field("Alt-Svc");
    assert!(is_offer(&by_http1), "{by_http1}");
    run(async {
        let mut client = http2::Client::connect(&site, &certificate).await;
        let by_http2 = field(&client.get("/").await.0, "alt-svc");
        assert!(is_offer(&by_http2), "{by_http2}");
        // And there it is.
        assert_eq!(Client::connect(&site, &certificate).await.get("/").await.status(), 200);
    });
    assert_eq!(site.tidegate.get("/").fields.get("Alt-Svc"), None);
    let without = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    assert_eq!(without.connect(&certificate).get("/").fields.get("Alt-Svc"), None);
}

#[test]
fn content_is_compressed_for_who_takes_it_so() {
    let certificate = Certificate::of(&["a.example"]);
    let text = "which can be said in fewer bytes ".repeat(1000);
    let sent = text.clone();
    let origin = Origin::start(move |_| Reply::cacheable(sent.clone()).with("Content-Type", "text/plain"));
    let builder = Tidegate::builder().origin(&origin).tables("[compression]\ncodings = [\"gzip\"]");
    let site = Site::with_http3(builder, &[("a", &certificate)]);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let plain = client.get("/a").await;
        assert_eq!((field(&plain.head, "content-encoding").as_str(), plain.body), ("", text.clone().into()));
        let coded = client.ask(get("/a").header("accept-encoding", "gzip")).await.unwrap();
        assert_eq!(field(&coded.head, "content-encoding"), "gzip");
        assert!(coded.body.len() < text.len() / 4, "{}", coded.body.len());
        let decoded = std::io::read_to_string(flate2::read::GzDecoder::new(&coded.body[..])).unwrap();
        assert!(decoded == text);
    });
}

/// What has come of it was handed on as if it were all.
#[test]
fn upload_that_is_broken_off_never_arrives_as_if_it_were_whole() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| Reply::ok(request.body.len().to_string()));
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        for turn in 1..=2 {
            let mut stream = client.begin(Request::put(url("/a"))).await.unwrap();
            stream.send_data(content(1, 100_000).into()).await.unwrap();
            until(|| origin.connections() == turn).await;
            stream.stop_stream(h3::error::Code::H3_REQUEST_CANCELLED);
            // What is answered is that it was none, if anything is.
            if let Ok(answer) = whole(&mut stream).await {
                assert_eq!(answer.status(), 400);
            }
        }
        // Nor does it when the connection is gone.
        let other = Client::connect(&site, &certificate).await;
        let mut stream = other.begin(Request::put(url("/a"))).await.unwrap();
        stream.send_data(content(1, 100_000).into()).await.unwrap();
        until(|| origin.connections() == 3).await;
        other.quic.close(varint(code::NO_ERROR), b"");
        assert_eq!(client.upload("/a", content(1, 1000)).await.unwrap().body, b"1000");
    });
    eventually("the last one is over", || {
        (site.tidegate.metric("tidegate_clients_gone_total") >= 1.0).then_some(())
    });
    assert_eq!(origin.count(), 1);
}

#[test]
fn response_that_ends_with_its_connection_ends_its_stream() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| {
        Reply::RawThenClose([b"HTTP/1.1 200 OK\r\n\r\n", &content(1, 300_000)[..]].concat())
    });
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let answer = client.get("/a").await;
        assert_eq!((answer.status(), field(&answer.head, "content-length").as_str()), (200, ""));
        assert!(answer.body == content(1, 300_000));
    });
}

#[test]
fn responses_without_content_are_whole() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| match request.target.as_str() {
        "/none" => Reply::status(204, ""),
        _ => Reply::cacheable("x").with("ETag", "\"1\""),
    });
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        assert_eq!(client.get("/none").await.status(), 204);
        assert_eq!(client.get("/a").await.body, b"x");
        let same = client.ask(get("/a").header("if-none-match", "\"1\"")).await.unwrap();
        assert_eq!((same.status(), field(&same.head, "etag"), same.body.len()), (304, "\"1\"".to_owned(), 0));
    });
}

/// RFC 9114 §4.4: a tunnel is not what it is for.
#[test]
fn connect_is_answered_and_opens_nothing() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    run(async {
        let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        let request = fields(&[(":method", "CONNECT"), (":authority", "a.example:443")]);
        let (_send, receive) = client.begin(&request).await;
        let answer = answer(receive).await.unwrap();
        let (kind, _) = &frames(&answer)[0];
        assert!(*kind == frame_type::HEADERS && !is_ok(&answer), "{answer:?}");
        assert!(client.is_served().await, "the others go on");
    });
    assert_eq!(origin.count(), 1);
}

#[test]
fn client_that_takes_nothing_of_a_large_file_holds_a_piece_of_each_response() {
    let certificate = Certificate::of(&["a.example"]);
    let directory = tempfile::tempdir().unwrap();
    let file = content(3, 2 << 20);
    std::fs::write(directory.path().join("large.bin"), &file).unwrap();
    let route = format!("root = \"{}\"", directory.path().display());
    let builder = Tidegate::builder().top("workers = 1").cache("max_object = \"64KiB\"").route("/", &route);
    let site = Site::with_http3(builder, &[("a", &certificate)]);
    run(async {
        // Of each of them no more than the head and some bytes.
        let client = Client::connect_from([127, 0, 0, 1], &site, &certificate, 1000).await;
        let begin = async || {
            let mut stream = client.send(get("/large.bin")).await;
            assert_eq!(stream.recv_response().await.unwrap().status(), 200);
            stream
        };
        let mut held = vec![begin().await];
        let before = site.tidegate.anonymous_bytes();
        for _ in 0..60 {
            held.push(begin().await);
        }
        let is_large = |path: &std::path::PathBuf| path.ends_with("large.bin");
        assert_eq!(site.tidegate.open_files().into_iter().filter(is_large).count(), 1);
        let more = site.tidegate.anonymous_bytes().saturating_sub(before);
        // And what of them is the library's to send.
        assert!(
            more < (60 * 64 + 1024) * 1024 * 5 / 4,
            "{more} bytes for 60 responses of which nothing is taken"
        );
        drop(held);
        let wide = Client::connect(&site, &certificate).await;
        assert!(wide.get("/large.bin").await.body == file);
    });
}

#[test]
fn request_that_is_given_up_leaves_the_others_alone() {
    let certificate = Certificate::of(&["a.example"]);
    let (gate, origin) = halting();
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let mut given_up = client.send(get("/halting")).await;
        assert_eq!(given_up.recv_response().await.unwrap().status(), 200);
        cancel(&mut given_up);
        let mut other = client.send(get("/halting")).await;
        assert_eq!(client.get("/b").await.body, b"x");
        gate.open();
        assert_eq!(whole(&mut other).await.unwrap().body, b"halfhalf");
        let error: StreamError = whole(&mut given_up).await.expect_err("nobody wants it");
        drop(error);
    });
}
