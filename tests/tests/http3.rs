//! HTTP/3 to clients: streams are requests like those of HTTP/1 and HTTP/2, and QUIC carries them wherever clients go.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::Write;

use h3::error::StreamError;
use http::{HeaderMap, Request, Response};
use rustix::process::Signal;
use tidegate_e2e::http3::{
    Client, Frames, Raw, Stream, WIDE, answer, code, end, field, frame_type, frames, get, head, is_ok,
    move_away, piece, quic, rest, run, stream_code, take_integer, until, url, whole,
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
fn access_log_names_the_protocol() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable("x"));
    let builder = Tidegate::builder().origin(&origin).tables("[log]\naccess = \"@DIR@/access.log\"");
    let site = Site::with_http3(builder, &[("a", &certificate)]);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        client.get("/a").await;
        client.get("/a").await;
    });
    let lines = eventually("both are logged", || {
        let text = std::fs::read_to_string(site.tidegate.directory().join("access.log")).unwrap_or_default();
        (text.lines().count() == 2).then_some(text)
    });
    assert_eq!(lines.matches("\"GET /a HTTP/3.0\" 200 1 ").count(), 2, "{lines}");
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

/// Waits for the next frame of a control stream, which must be GOAWAY: from which request on there is no answer.
async fn goaway(control: &mut Frames, which: &str) -> u64 {
    let (kind, payload) = control.next().await.expect(which).expect(which);
    assert_eq!(kind, frame_type::GOAWAY);
    let mut payload = payload.as_slice();
    let id = take_integer(&mut payload).unwrap();
    assert!(payload.is_empty());
    // RFC 9114 §7.2.6: one of a client's requests.
    assert_eq!(id % 4, 0);
    id
}

#[test]
fn drain_answers_what_is_asked_and_ends_the_connection() {
    let certificate = Certificate::of(&["a.example"]);
    let (gate, origin) = halting();
    let mut site = site(&certificate, &origin);
    run(async {
        let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        let mut control = Frames::of_control(&client.quic).await;
        assert_eq!(control.next().await.unwrap().unwrap().0, frame_type::SETTINGS);
        let (mut send, receive) = client.begin(&head("GET", "/halting", &[])).await;
        send.finish().unwrap();
        until(|| origin.count() == 1).await;
        site.tidegate.signal(Signal::TERM);
        // It learns of the end while what it has asked for goes on.
        assert!(goaway(&mut control, "the announcement").await > 1000);
        // What was on its way is answered, too.
        assert!(is_ok(&client.ask(&head("GET", "/late", &[])).await.unwrap()));
        quic([127, 0, 0, 1], &site, &certificate, WIDE).await.expect_err("there are no new ones");
        gate.open();
        let answer = answer(receive).await.unwrap();
        let content: Vec<u8> = frames(&answer)
            .into_iter()
            .filter(|(kind, _)| *kind == frame_type::DATA)
            .flat_map(|(_, payload)| payload)
            .collect();
        assert!(is_ok(&answer) && content == b"halfhalf", "{answer:?}");
        // The last word is which were answered: streams 0 and 4.
        assert_eq!(goaway(&mut control, "the last word").await, 8);
        assert_eq!(end(&client.quic).await, code::NO_ERROR);
    });
    assert!(site.tidegate.wait().success());
}

#[test]
fn renewed_certificate_is_shown_to_new_connections_and_old_ones_go_on() {
    let [old, new] = [(); 2].map(|()| Certificate::of(&["a.example"]));
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&old, &origin);
    run(async {
        let before = Client::connect(&site, &old).await;
        assert_eq!(before.get("/").await.status(), 200);
        new.write(site.files.path(), "a");
        assert!(site.tidegate.command(&["reload"]).status.success());
        let after = Client::connect(&site, &new).await;
        assert_eq!(after.get("/").await.status(), 200);
        assert_eq!(before.get("/").await.status(), 200, "connections stay as they are");
        quic([127, 0, 0, 1], &site, &old, WIDE).await.expect_err("it is not shown any more");
    });
}

#[test]
fn connections_that_are_idle_or_silent_end() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    // As long as silence may last, too, from which QUIC itself concludes that nobody is there any more.
    for (limits, is_idle) in [
        ("keep_alive_timeout = \"1s\"\nheader_timeout = \"20s\"", true),
        ("keep_alive_timeout = \"20s\"\nheader_timeout = \"1s\"", false),
        // When nothing is set, the idle time is the longer one, too.
        ("keep_alive_timeout = \"2s\"\nheader_timeout = \"1s\"", true),
    ] {
        let site =
            Site::with_http3(Tidegate::builder().origin(&origin).limits(limits), &[("a", &certificate)]);
        run(async {
            let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
            let metric = match is_idle {
                true => {
                    assert!(client.is_served().await);
                    "tidegate_idle_timeouts_total"
                }
                false => "tidegate_header_timeouts_total",
            };
            assert_eq!(end(&client.quic).await, code::NO_ERROR, "{limits}");
            assert_eq!(site.tidegate.metric(metric), 1.0, "{limits}");
        });
    }
}

/// Begins to read a response whose every piece the client has to ask for.
async fn begin_download(client: &Client) -> (Stream, Vec<u8>) {
    let mut stream = client.send(get("/large")).await;
    assert_eq!(stream.recv_response().await.unwrap().status(), 200);
    let start = piece(&mut stream).await.unwrap().unwrap();
    (stream, start.to_vec())
}

/// Each of its datagrams came to whichever core its address fell to.
#[test]
fn client_that_moves_to_another_port_in_the_midst_of_a_download_goes_on() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable(content(1, LARGE)));
    let builder = Tidegate::builder().origin(&origin).top("workers = 2").cache("max_object = \"8MiB\"");
    let site = Site::with_http3(builder, &[("a", &certificate)]);
    run(async {
        for _ in 0..4 {
            let client = Client::connect_from([127, 0, 0, 1], &site, &certificate, 64 * 1024).await;
            let (mut stream, mut body) = begin_download(&client).await;
            for turn in 1..4 {
                while body.len() < turn * LARGE / 4 {
                    body.extend(piece(&mut stream).await.unwrap().unwrap());
                }
                let before = client.endpoint.local_addr().unwrap();
                move_away(&client.endpoint, [127, 0, 0, 1]);
                assert_ne!(client.endpoint.local_addr().unwrap(), before);
            }
            body.extend(rest(&mut stream).await.unwrap());
            assert!(body == content(1, LARGE));
            assert_eq!(client.get("/small").await.status(), 200);
        }
    });
    assert_eq!(site.tidegate.metric("tidegate_http3_connections_total"), 4.0, "nobody came twice");
}

/// Time on a processor of each thread with such a name, in nanoseconds (proc(5), schedstat).
fn worked_ns(tidegate: &Tidegate, is_one: impl Fn(&str) -> bool) -> Vec<u64> {
    let threads = std::fs::read_dir(format!("/proc/{}/task", tidegate.pid())).unwrap();
    let threads = threads.map(|thread| thread.unwrap().path());
    let of_cores =
        threads.filter(|thread| is_one(std::fs::read_to_string(thread.join("comm")).unwrap().trim()));
    let worked = of_cores.map(|thread| {
        let stat = std::fs::read_to_string(thread.join("schedstat")).unwrap();
        stat.split(' ').next().unwrap().parse().unwrap()
    });
    worked.collect()
}

#[test]
fn connections_are_spread_over_the_cores() {
    const CLIENTS: usize = 24;
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable(content(1, 300_000)));
    let builder = Tidegate::builder().origin(&origin).top("workers = 2");
    let site = Site::with_http3(builder, &[("a", &certificate)]);
    run(async {
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            clients.push(Client::connect(&site, &certificate).await);
        }
        for _ in 0..2 {
            for client in &clients {
                assert!(client.get("/a").await.body == content(1, 300_000));
            }
        }
    });
    assert_eq!(site.tidegate.metric("tidegate_http3_connections_total"), CLIENTS as f64);
    let worked = worked_ns(&site.tidegate, |name| name.starts_with("core"));
    assert_eq!(worked.len(), 2);
    let (least, most) = (worked.iter().min().unwrap(), worked.iter().max().unwrap());
    assert!(least * 20 > *most, "{worked:?}");
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
        tidegate_e2e::http3::cancel(&mut given_up);
        let mut other = client.send(get("/halting")).await;
        assert_eq!(client.get("/b").await.body, b"x");
        gate.open();
        assert_eq!(whole(&mut other).await.unwrap().body, b"halfhalf");
        let error: StreamError = whole(&mut given_up).await.expect_err("nobody wants it");
        drop(error);
    });
}
