//! What is done by HTTP/2 to clients that are too much for the server: their requests are counted against them as those
//! by HTTP/1 are, and their connections end.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Duration;

use h2::Reason;
use http::Request;
use tidegate_e2e::http2::{Client, WIDE, encrypted, field, get, run, until, url, whole};
use tidegate_e2e::{Certificate, Gate, Origin, Reply, Site, Tidegate, content, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::client::TlsStream;

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

#[test]
fn client_that_cancels_all_it_asks_for_is_told_to_calm_down() {
    let certificate = Certificate::of(&["a.example"]);
    let (gate, origin) = held_back();
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    let reason = run(async {
        let client = Client::connect(&site, &certificate).await;
        while let Ok(mut requests) = client.requests.clone().ready().await {
            let Ok((response, mut stream)) = requests.send_request(get("/a").body(()).unwrap(), true) else {
                break;
            };
            stream.send_reset(Reason::CANCEL);
            drop(response);
            tokio::task::yield_now().await;
        }
        client.connection.await.unwrap().expect_err("it is ended").reason()
    });
    gate.open();
    assert_eq!(reason, Some(Reason::ENHANCE_YOUR_CALM));
    assert_eq!(site.tidegate.metric("tidegate_http2_floods_total"), 1.0);
}

/// The upstream works for them all the same.
#[test]
fn requests_that_are_given_up_are_logged_and_counted_against_their_client() {
    let certificate = Certificate::of(&["a.example"]);
    let gate = Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |request| match request.target.as_str() {
        "/free" => Reply::ok("x"),
        _ => {
            door.pass();
            Reply::ok("x")
        }
    });
    let tables = "[log]\naccess = \"@DIR@/access.log\"\n[[classifier]]\nname = \"errors\"\nlimit = 10\naction = \"refuse\"\n";
    let site = Site::start(Tidegate::builder().origin(&origin).tables(tables), &[("a", &certificate)]);
    let given_up = run(async {
        // The host's own address is exempt.
        let mut client = Client::connect_from([127, 0, 9, 9], &site, &certificate, WIDE).await;
        let mut given_up = 0;
        while client.get("/free").await.0.status() == 200 {
            let (asked, mut requests) = (origin.count(), client.requests.clone().ready().await.unwrap());
            let (response, mut stream) = requests.send_request(get("/slow").body(()).unwrap(), true).unwrap();
            until(|| origin.count() > asked).await;
            stream.send_reset(Reason::CANCEL);
            drop(response);
            given_up += 1;
            until(|| site.tidegate.metric("tidegate_clients_gone_total") == f64::from(given_up)).await;
        }
        assert_eq!(client.get("/free").await.0.status(), 429);
        given_up
    });
    gate.open();
    // Each counts as four errors; two windows may share them.
    assert!((2..=6).contains(&given_up), "{given_up}");
    eventually("all are logged", || {
        let text = std::fs::read_to_string(site.tidegate.directory().join("access.log")).unwrap_or_default();
        (text.matches("\"GET /slow HTTP/2.0\" 499 0 ").count() == given_up as usize).then_some(())
    });
}

/// Whoever finds a head to be malformed: HTTP/2's own rules, the parser, or what the target is made of.
#[test]
fn requests_that_cannot_be_read_are_logged_and_counted_against_their_client() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let tables = "[log]\naccess = \"@DIR@/access.log\"\n[[classifier]]\nname = \"errors\"\nlimit = 10\naction = \"refuse\"\n";
    let site = Site::start(Tidegate::builder().origin(&origin).tables(tables), &[("a", &certificate)]);
    let wrong = [
        || get("/a").header("host", "b.example"),
        || (0..101).fold(get("/a"), |request, number| request.header(format!("x-{number}"), "1")),
        || get("/%00"),
    ];
    let mut refused = 0;
    for (number, wrong) in wrong.into_iter().enumerate() {
        refused += run(async {
            let address = [127, 0, 9, 1 + number as u8];
            let mut client = Client::connect_from(address, &site, &certificate, WIDE).await;
            let mut refused = 0;
            while client.get("/free").await.0.status() == 200 {
                match client.send(wrong()).await.await {
                    Ok(response) => assert!([400, 431].contains(&response.status().as_u16()), "{response:?}"),
                    Err(error) => assert_eq!(error.reason(), Some(Reason::PROTOCOL_ERROR)),
                }
                refused += 1;
            }
            assert!((10..=22).contains(&refused), "{number}: {refused}");
            refused
        });
    }
    eventually("all are logged", || {
        let text = std::fs::read_to_string(site.tidegate.directory().join("access.log")).unwrap_or_default();
        let of = |status| text.matches(&format!("\"- - HTTP/2.0\" {status} ")).count();
        (of(400) + of(431) == refused && of(431) > 0).then_some(())
    });
}

#[test]
fn client_that_does_not_take_its_response_is_ended() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok(content(1, 1 << 20)));
    // Ten seconds are let pass in any case.
    let builder = Tidegate::builder().origin(&origin).limits("response_min_rate = \"1GiB/s\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    run(async {
        let mut client = Client::with_window(&site, &certificate, 100).await;
        let response = client.send(get("/a")).await.await.unwrap();
        let _held = response;
        assert!(client.connection.await.unwrap().is_err());
    });
    assert_eq!(site.tidegate.metric("tidegate_slow_readers_total"), 1.0);
}

/// The list was asked about clients of HTTP/1 alone.
#[test]
fn body_that_trickles_below_the_least_rate_is_answered_as_by_http1() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("reached"));
    let builder = Tidegate::builder().origin(&origin).limits("body_min_rate = \"10KiB/s\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    let status = run(async {
        let client = Client::connect(&site, &certificate).await;
        let request = Request::post(url("/a")).body(()).unwrap();
        let mut requests = client.requests.clone().ready().await.unwrap();
        let (response, mut content) = requests.send_request(request, false).unwrap();
        content.send_data("start".into(), false).unwrap();
        response.await.unwrap().status().as_u16()
    });
    assert_eq!(status, 408);
    assert_eq!(site.tidegate.metric("tidegate_slow_bodies_total"), 1.0);
}

#[test]
fn listed_client_of_a_trusted_proxy_is_refused() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder = Tidegate::builder().origin(&origin).top("trusted_proxies = [\"127.0.0.1\"]");
    let site = Site::start(builder, &[("a", &certificate)]);
    assert!(site.tidegate.command(&["block", "add", "192.0.2.0/24"]).status.success());
    run(async {
        let mut client = Client::connect(&site, &certificate).await;
        // What the list says acts a moment later (a quarter of a second).
        loop {
            let listed = client.send(get("/a").header("x-forwarded-for", "192.0.2.1")).await;
            if listed.await.unwrap().status() == 403 {
                break;
            }
        }
        let other = client.send(get("/a").header("x-forwarded-for", "198.51.100.1")).await;
        assert_eq!(other.await.unwrap().status(), 200);
    });
}

/// Any client could write what it liked, as often as it liked, into the program's log.
#[test]
fn what_clients_send_does_not_fill_the_log() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    run(async {
        let mut tls = encrypted(TcpStream::connect(site.address).await.unwrap(), &certificate).await;
        let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
        // An answer to a PING that nobody sent (RFC 9113 §6.7), again and again; then frames that end it.
        sent.extend(b"\0\0\x08\x06\x01\0\0\0\0whatever".repeat(100));
        sent.extend(b"\0\0\x01\x06\0\0\0\0\0w");
        tls.write_all(&sent).await.unwrap();
        let mut answer = Vec::new();
        let _ = tls.read_to_end(&mut answer).await;
        // GOAWAY (§6.8): all of it was looked at.
        let goodbye = b"\0\0\x08\x07\0\0\0\0\0";
        assert!(answer.windows(goodbye.len()).any(|window| window == goodbye), "{answer:?}");
    });
    assert!(!site.tidegate.output().contains("PING"), "{}", site.tidegate.output());
}

/// Frames as a client sends them that makes them itself (RFC 9113 §4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend(payload);
    out
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PING: u8 = 6;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// A GET's head (RFC 7541 §6.2.2), with one more field.
fn head(stream: u32, name: &[u8], value: &[u8]) -> Vec<u8> {
    let mut block = b"\x82\x87\x84\x01\x09a.example\0".to_vec();
    for text in [name, value] {
        // RFC 7541 §5.1: a prefix of seven bits.
        match text.len() {
            length @ ..127 => block.push(length as u8),
            length => {
                let mut left = length - 127;
                block.push(127);
                while left >= 128 {
                    block.push(left as u8 | 128);
                    left >>= 7;
                }
                block.push(left as u8);
            }
        }
        block.extend(text);
    }
    frame(HEADERS, END_STREAM | END_HEADERS, stream, &block)
}

/// Sends bytes as they are on a connection of their own; whatever comes until its end.
async fn exchange(address: [u8; 4], site: &Site, certificate: &Certificate, bytes: &[u8]) -> Vec<u8> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((address, 0).into()).unwrap();
    let mut tls = encrypted(socket.connect(site.address).await.unwrap(), certificate).await;
    tls.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    // A connection that is cut off ends with an error.
    let _ = tls.read_to_end(&mut answer).await;
    answer
}

/// Sends a request and waits for the end of the connection. The response, if there is one, comes before; and whether the end
/// is a reset. A request goes before it, for nothing else may be under way then: what comes for a closed socket (the
/// acknowledgement of settings, sent when the client likes) is answered with a reset by the kernel.
async fn until_cut_off(mut client: Client, request: http::request::Builder) -> (Option<u16>, bool) {
    assert_eq!(client.get("/").await.0.status(), 200);
    let response = client.send(request).await.await;
    let ended = client.connection.await.unwrap();
    let is_reset = ended.is_err_and(|error| {
        error.get_io().is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
    });
    (response.ok().map(|response| response.status().as_u16()), is_reset)
}

/// They were answered with an error, and the connection went on.
#[test]
fn clients_that_are_kept_out_lose_their_connection() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let tables = "[[filter]]\nuser_agent = \"resetting\"\naction = \"reset\"\n\
        [[filter]]\nuser_agent = \"dropping\"\naction = \"drop\"\n\
        [[request]]\npath = \"/reset\"\naction = \"reset\"\n[[request]]\npath = \"/drop\"\naction = \"drop\"\n\
        [[request]]\npath = \"/refuse\"\naction = \"refuse\"\n";
    let builder = Tidegate::builder().origin(&origin).tables(tables).top("trusted_proxies = [\"127.0.9.7\"]");
    let site = Site::start(builder, &[("a", &certificate)]);
    run(async {
        for (address, request, is_reset) in [
            (1, get("/").header("user-agent", "resetting"), true),
            (2, get("/").header("user-agent", "dropping"), false),
            (3, get("/reset"), true),
            (4, get("/drop"), false),
        ] {
            let client = Client::connect_from([127, 0, 9, address], &site, &certificate, WIDE).await;
            assert_eq!(until_cut_off(client, request).await, (None, is_reset), "{address}");
        }
        assert_eq!(site.tidegate.metric("tidegate_requests_policed_total"), 4.0);
        // A trusted proxy's connection is others' as well; and an answer needs no end.
        let mut proxy = Client::connect_from([127, 0, 9, 7], &site, &certificate, WIDE).await;
        for target in ["/reset", "/drop", "/refuse"] {
            assert_eq!(proxy.get(target).await.0.status(), 503);
        }
        let robot = get("/").header("user-agent", "resetting").header("x-forwarded-for", "127.0.9.9");
        assert!(proxy.send(robot).await.await.unwrap().status().is_client_error());
        assert_eq!(proxy.get("/").await.0.status(), 200);
        let mut client = Client::connect_from([127, 0, 9, 9], &site, &certificate, WIDE).await;
        assert_eq!(client.get("/refuse").await.0.status(), 503);
        assert_eq!(client.get("/").await.0.status(), 200);
    });
    assert_eq!(
        origin.count(),
        6,
        "the first request of each, and one of the proxy's and of the last client's"
    );
}

#[test]
fn blocked_client_gets_its_last_response_and_no_more() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::status(404, "no"));
    let tables = "[[classifier]]\nname = \"errors\"\nlimit = 10\naction = \"block\"\n";
    let builder = Tidegate::builder().origin(&origin).top("workers = 1").tables(tables);
    let site = Site::start(builder, &[("a", &certificate)]);
    run(async {
        let client = Client::connect_from([127, 0, 9, 9], &site, &certificate, WIDE).await;
        let mut errors = 0;
        while let Ok(mut requests) = client.requests.clone().ready().await {
            let Ok((response, _)) = requests.send_request(get("/a").body(()).unwrap(), true) else { break };
            let Ok(response) = response.await else { break };
            assert_eq!(whole(response).await.unwrap().1, b"no");
            errors += 1;
        }
        assert!((10..=22).contains(&errors), "{errors}");
        assert_eq!(origin.count(), errors, "what is asked by a blocked client does not reach the origin");
        client.connection.await.unwrap().unwrap();
    });
}

#[test]
fn delayed_request_is_answered_late_and_one_in_the_tarpit_never() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let tables = "[[filter]]\nuser_agent = \"slowed\"\naction = \"delay\"\n[[filter]]\nuser_agent = \"held\"\naction = \"tarpit\"\n";
    let mut site = Site::start(Tidegate::builder().origin(&origin).tables(tables), &[("a", &certificate)]);
    run(async {
        let mut client = Client::connect_from([127, 0, 9, 9], &site, &certificate, WIDE).await;
        let held = client.send(get("/").header("user-agent", "held")).await;
        let began = std::time::Instant::now();
        let slowed = client.send(get("/").header("user-agent", "slowed")).await;
        assert_eq!(slowed.await.unwrap().status(), 200);
        assert!(began.elapsed() >= Duration::from_secs(1));
        assert_eq!(client.get("/").await.0.status(), 200, "the others go on");
        site.tidegate.signal(rustix::process::Signal::TERM);
        held.await.expect_err("it is not answered");
        let _ = client.connection.await.unwrap();
    });
    assert_eq!(origin.count(), 2);
    assert!(site.tidegate.wait().success());
}

/// The library ends their streams, and said nothing of it.
#[test]
fn heads_that_the_library_refuses_are_logged_and_counted_against_their_client() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let tables = "[log]\naccess = \"@DIR@/access.log\"\n[[classifier]]\nname = \"errors\"\nlimit = 10\naction = \"refuse\"\n";
    let builder = Tidegate::builder().origin(&origin).top("workers = 1").tables(tables);
    let site = Site::start(
        builder.limits("head_size = \"1KiB\"\nrequest_line_size = \"1KiB\""),
        &[("a", &certificate)],
    );
    let large = [b'x'; 2000];
    let mut refused = 0.0;
    for (number, name, value) in
        [(1, &b"te"[..], &b"gzip"[..]), (2, b"connection", b"close"), (3, b"x", &large)]
    {
        let heads: Vec<Vec<u8>> = (0..50).map(|count| head(2 * count + 1, name, value)).collect();
        run(exchange([127, 0, 9, number], &site, &certificate, &[PREFACE, &heads.concat()].concat()));
        let now = site.tidegate.metric("tidegate_requests_refused_total");
        // Nobody looks at more, once the client is kept out.
        assert!((10.0..=22.0).contains(&(now - refused)), "{number}: {refused} to {now}");
        refused = now;
    }
    for broken in [
        [PREFACE, &frame(DATA, 0, 0, b"of no stream")].concat(),
        [PREFACE, &head(1, b"Upper", b"1")].concat(),
        b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n".to_vec(),
    ] {
        run(exchange([127, 0, 9, 4], &site, &certificate, &broken));
    }
    assert_eq!(site.tidegate.metric("tidegate_requests_refused_total"), refused + 3.0);
    assert_eq!(origin.count(), 0);
    eventually("all are logged", || {
        let text = std::fs::read_to_string(site.tidegate.directory().join("access.log")).unwrap_or_default();
        // Of the last one of each client there is no line: it has no answer.
        (text.matches("\"- - HTTP/2.0\" 400 ").count() as f64 >= refused - 3.0).then_some(())
    });
}

/// Reads until so many times these bytes have come.
async fn receive(tls: &mut TlsStream<TcpStream>, bytes: &[u8], times: usize) {
    let mut received = Vec::new();
    while received.windows(bytes.len()).filter(|window| *window == bytes).count() < times {
        assert_ne!(tls.read_buf(&mut received).await.unwrap(), 0);
    }
}

/// Streams that the library hands on are none that it refuses, in whatever pieces they come; nor are those beyond the
/// number that there may be at once.
#[test]
fn many_streams_and_trailers_are_not_taken_for_refused_ones() {
    let certificate = Certificate::of(&["a.example"]);
    let (gate, origin) = held_back();
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    run(async {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 9, 9], 0).into()).unwrap();
        let mut tls = encrypted(socket.connect(site.address).await.unwrap(), &certificate).await;
        let mut sent = PREFACE.to_vec();
        for count in 0..150 {
            sent.extend(head(2 * count + 1, b"x", b"y"));
        }
        for piece in sent.chunks(1000) {
            tls.write_all(piece).await.unwrap();
        }
        // RST_STREAM with REFUSED_STREAM, fifty times.
        receive(&mut tls, &[0, 0, 0, 7], 50).await;
        gate.open();
        // The last byte of each of the others.
        receive(&mut tls, &[0, 0, 1, DATA, END_STREAM], 100).await;
        tls.write_all(&head(301, b"x", b"y")).await.unwrap();
        until(|| site.tidegate.metric("tidegate_requests_total") >= 101.0).await;
    });
    assert_eq!(site.tidegate.metric("tidegate_requests_refused_total"), 0.0);
}

#[test]
fn frames_that_ask_for_nothing_end_the_connection_when_there_are_too_many() {
    let certificate = Certificate::of(&["a.example"]);
    let (gate, origin) = held_back();
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    let ping = frame(PING, 0, 0, b"whatever");
    let mut sent = [PREFACE, &head(1, b"x", b"y")].concat();
    sent.extend(ping.repeat(2000));
    let answer = run(exchange([127, 0, 9, 9], &site, &certificate, &sent));
    gate.open();
    // GOAWAY (§6.8) with ENHANCE_YOUR_CALM.
    let calm = b"\0\0\x08\x07\0\0\0\0\0\0\0\0\x01\0\0\0\x0b";
    assert!(answer.windows(calm.len()).any(|window| window == calm), "{answer:?}");
    assert_eq!(site.tidegate.metric("tidegate_http2_floods_total"), 1.0);
    // Fewer than that are none of the server's business.
    let few = [PREFACE, &head(1, b"x", b"y"), &ping.repeat(900), &head(3, b"x", b"y")].concat();
    run(async {
        let socket = TcpSocket::new_v4().unwrap();
        let mut tls = encrypted(socket.connect(site.address).await.unwrap(), &certificate).await;
        tls.write_all(&few).await.unwrap();
        receive(&mut tls, &[0, 0, 1, DATA, END_STREAM], 2).await;
    });
    assert_eq!(site.tidegate.metric("tidegate_http2_floods_total"), 1.0);
}

/// What a client has said once it can say again in a byte, and each time it takes the server's memory.
#[test]
fn heads_of_requests_that_wait_are_bounded() {
    let certificate = Certificate::of(&["a.example"]);
    let (gate, origin) = held_back();
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    run(async {
        let socket = TcpSocket::new_v4().unwrap();
        let mut tls = encrypted(socket.connect(site.address).await.unwrap(), &certificate).await;
        let mut sent = PREFACE.to_vec();
        for count in 0..100 {
            sent.extend(head(2 * count + 1, b"x", &[b'y'; 15_000]));
        }
        tls.write_all(&sent).await.unwrap();
        // 69 of them are a MiB. RST_STREAM with ENHANCE_YOUR_CALM.
        receive(&mut tls, &[0, 0, 0, 11], 31).await;
        gate.open();
        receive(&mut tls, &[0, 0, 1, DATA, END_STREAM], 69).await;
        // There is room again.
        tls.write_all(&head(201, b"x", b"y")).await.unwrap();
        receive(&mut tls, &[0, 0, 1, DATA, END_STREAM], 1).await;
    });
    assert_eq!(site.tidegate.metric("tidegate_requests_refused_total"), 31.0);
}

/// GOAWAY (§6.8) with NO_ERROR, after the stream that there was.
#[test]
fn idle_connection_is_told_that_it_ends() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder = Tidegate::builder().origin(&origin).limits("keep_alive_timeout = \"1s\"");
    let site = Site::start(builder, &[("a", &certificate)]);
    let sent = [PREFACE, &head(1, b"x", b"y")].concat();
    let answer = run(exchange([127, 0, 9, 9], &site, &certificate, &sent));
    assert!(answer.ends_with(b"\0\0\x08\x07\0\0\0\0\0\0\0\0\x01\0\0\0\0"), "{answer:?}");
    assert_eq!(site.tidegate.metric("tidegate_idle_timeouts_total"), 1.0);
}

/// With TLS alone, and with HTTP/2's preface.
#[test]
fn client_that_asks_for_nothing_again_and_again_is_blocked() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    for (number, preface) in [(1, &b""[..]), (2, PREFACE)] {
        let builder =
            Tidegate::builder().origin(&origin).top("workers = 1").limits("header_timeout = \"500ms\"");
        let site = Site::start(builder, &[("a", &certificate)]);
        let address = [127, 0, 9, number];
        run(async {
            let silent = (0..20).map(|_| exchange(address, &site, &certificate, preface));
            let mut silent: Vec<_> = silent.map(Box::pin).collect();
            poll_fn(|context| {
                silent.retain_mut(|one| one.as_mut().poll(context).is_pending());
                if silent.is_empty() { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        });
        assert!(site.tidegate.metric("tidegate_defence_slow_total") >= 1.0, "{number}");
        assert_eq!(site.tidegate.metric("tidegate_header_timeouts_total"), 20.0, "{number}");
    }
}

#[test]
fn slow_streams_do_not_keep_others_from_the_origin() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|request| match request.target.as_str() {
        target if target.starts_with("/large") => Reply::ok(content(1, 8 << 20)),
        _ => Reply::ok("x"),
    });
    for uploads in [true, false] {
        let builder = Tidegate::builder()
            .top("workers = 1")
            .group("app", &[origin.address()], "max_connections = 8")
            .route("/", "upstream = \"app\"");
        let site = Site::start(builder, &[("a", &certificate)]);
        run(async {
            let (mut clients, mut slow) = (Vec::new(), Vec::new());
            for number in 1..=3 {
                let client = Client::connect_from([127, 0, 9, number], &site, &certificate, 100).await;
                for _ in 0..4 {
                    let mut requests = client.requests.clone().ready().await.unwrap();
                    let request = match uploads {
                        true => Request::put(url("/a")),
                        false => get(&format!("/large/{}", slow.len())),
                    };
                    slow.push(requests.send_request(request.body(()).unwrap(), !uploads).unwrap());
                }
                clients.push(client);
            }
            let mut other = Client::connect_from([127, 0, 9, 9], &site, &certificate, WIDE).await;
            until(|| site.tidegate.metric("tidegate_requests_total") >= 12.0).await;
            assert_eq!(other.get("/a").await.1, b"x");
        });
        assert!(site.tidegate.metric("tidegate_connections_shed_total") >= 1.0, "uploads: {uploads}");
    }
}

#[test]
fn with_https_only_what_a_trusted_proxy_got_in_the_clear_is_sent_to_https() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let builder = Tidegate::builder().origin(&origin).top("https_only = true");
    let site = Site::start(builder.top("trusted_proxies = [\"127.0.0.1\"]"), &[("a", &certificate)]);
    run(async {
        let mut proxy = Client::connect(&site, &certificate).await;
        let mut ask = async |proto| {
            let response = proxy.send(get("/a?b").header("x-forwarded-proto", proto)).await.await.unwrap();
            (response.status().as_u16(), field(&response, "location"))
        };
        let url = format!("https://a.example:{}/a?b", site.address.port());
        assert_eq!(ask("http").await, (301, url));
        assert_eq!(ask("https").await, (200, String::new()));
    });
}
