//! What is done by HTTP/3 to clients that are too much for the server: their requests are counted against them as those by
//! HTTP/1 and HTTP/2 are, and their connections end.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, ConnectionError, Endpoint, TransportConfig};
use tidegate_e2e::http3::{
    Client, Raw, WIDE, answer, cancel, code, end, frame, frame_type, get, head, integer, is_ok, piece, quic,
    quic_with, run, stream_code, until, url, varint,
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

/// Each byte is a frame of its own, and each datagram has one of every stream.
#[test]
fn client_that_sends_content_in_bytes_is_ended() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        let client = Raw::connect_from(CLIENT, &site, &certificate).await;
        let begun = [head("PUT", "/", &[]), integer(frame_type::DATA), integer(1 << 30)].concat();
        let mut streams = Vec::new();
        for _ in 0..90 {
            streams.push(client.begin(&begun).await);
        }
        while client.quic.close_reason().is_none() {
            for (send, _) in &mut streams {
                let _ = send.write_all(b"x").await;
            }
            tokio::task::yield_now().await;
        }
        assert_eq!(end(&client.quic).await, code::EXCESSIVE_LOAD);
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
        // What it had of the response by then may still come, and the end does not.
        while piece(&mut stream)
            .await
            .is_ok_and(|piece| !piece.expect("the response is not whole").is_empty())
        {}
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
        // It shows that it is there, and takes no more than a beginning.
        let mut transport = TransportConfig::default();
        transport.stream_receive_window(100_u32.into()).keep_alive_interval(Some(Duration::from_millis(500)));
        let (endpoint, quic) = quic_with(transport, [127, 0, 0, 1], &site, &certificate).await.unwrap();
        let client = Raw::over(endpoint, quic).await;
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
        let mut attempt = loop {
            let mut attempt = Box::pin(quic(CLIENT, &site, &certificate, WIDE));
            tokio::select! {
                connected = &mut attempt => drop(connected),
                () = until(|| site.tidegate.metric("tidegate_connections_policed_total") >= 1.0) => break attempt,
            }
        };
        let other = Client::connect_from([127, 0, 9, 8], &site, &certificate, WIDE).await;
        assert_eq!(other.get("/").await.status(), 200);
        // Who is not on the list proves that it is not.
        assert!(site.tidegate.metric("tidegate_quic_retries_total") >= 1.0);
        let before = site.tidegate.metric("tidegate_http3_connections_total");
        // A first datagram that is sent again is policed again; it never becomes a connection.
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
        tokio::select! {
            second = quic([127, 0, 9, 7], &site, &certificate, WIDE) => {
                assert!(second.is_err(), "{:?}", second.map(|_| ()));
            }
            // Nothing at all may come back.
            () = until(|| site.tidegate.metric("tidegate_connections_policed_total") >= 1.0) => {}
        }
        assert_eq!(site.tidegate.metric("tidegate_http3_connections_total"), 4.0);
        eventually("it is counted", || {
            (site.tidegate.metric("tidegate_connections_policed_total") >= 1.0).then_some(())
        });
        assert_eq!(first.get("/").await.status(), 200);
    });
    // Rules for requests are about what comes later.
    let tables = "[[request]]\npath = \"/a\"\naction = \"refuse\"\n";
    let without = serving(Tidegate::builder().origin(&origin).tables(tables), &certificate);
    run(async {
        let client = Client::connect_from(CLIENT, &without, &certificate, WIDE).await;
        assert_eq!(client.get("/").await.status(), 200);
    });
    assert_eq!(without.tidegate.metric("tidegate_quic_retries_total"), 0.0);
}

/// Each handshake is work that whoever forges an address can have done.
#[test]
fn with_many_handshakes_that_have_begun_clients_prove_their_address_and_are_served() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin).top("workers = 1"), &certificate);
    let retries = || site.tidegate.metric("tidegate_quic_retries_total");
    run(async {
        // Hellos are passed on, and what is answered is not: these clients are none.
        let endpoint = Endpoint::client(([127, 0, 9, 1], 0).into()).unwrap();
        let [middle, onward] = [(); 2].map(|()| UdpSocket::bind("127.0.9.2:0").unwrap());
        middle.set_nonblocking(true).unwrap();
        let tls = QuicClientConfig::try_from(Certificate::client_config(&[&certificate], b"h3")).unwrap();
        let config = ClientConfig::new(Arc::new(tls));
        let mut begun = Vec::new();
        while retries() == 0.0 {
            assert!(begun.len() < 300, "nobody was asked for a proof");
            let address = middle.local_addr().unwrap();
            begun.push(endpoint.connect_with(config.clone(), address, "a.example").unwrap());
            let mut hello = [0; 2000];
            until(|| match middle.recv(&mut hello) {
                Ok(length) => onward.send_to(&hello[..length], site.address).is_ok(),
                Err(_) => false,
            })
            .await;
        }
        assert!(begun.len() > 64);
        let before = retries();
        let client = Client::connect_from(CLIENT, &site, &certificate, WIDE).await;
        assert_eq!(client.get("/").await.status(), 200);
        assert_eq!(retries(), before + 1.0);
    });
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

/// Each of them takes the server's memory, too.
#[test]
fn heads_that_are_not_whole_yet_are_bounded() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = serving(Tidegate::builder().origin(&origin), &certificate);
    run(async {
        let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        let whole = head("GET", "/", &[("x", &"y".repeat(30_000))]);
        let mut streams = Vec::new();
        for _ in 0..60 {
            streams.push(client.begin(&whole[..whole.len() - 10]).await);
        }
        // 34 of them are a MiB; they come side by side, so that one more may give way.
        until(|| site.tidegate.metric("tidegate_requests_refused_total") >= 26.0).await;
        let mut refused = 0;
        for (mut send, receive) in streams {
            let ended = send.write_all(&whole[whole.len() - 10..]).await.is_err();
            let _ = send.finish();
            match answer(receive).await {
                Ok(answer) => assert!(is_ok(&answer) && !ended),
                Err(error) => {
                    assert_eq!(error, code::EXCESSIVE_LOAD);
                    refused += 1;
                }
            }
        }
        assert!((26..=28).contains(&refused), "{refused}");
        assert!(client.is_served().await, "there is room again");
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
