//! Connections of HTTP/3: who has one, where its client may go with it, and how it ends.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::Write;
use std::net::UdpSocket;
use std::sync::Arc;

use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, ConnectionError, Endpoint};
use rustix::process::Signal;
use tidegate_e2e::http3::{
    Client, Frames, Raw, Stream, WIDE, answer, code, end, frame_type, frames, get, head, is_ok, move_away,
    piece, quic, rest, run, take_integer, until,
};
use tidegate_e2e::{Certificate, Gate, Origin, Reply, Site, Tidegate, content, eventually};

/// Larger than the windows and buffers on the way together.
const LARGE: usize = 6 << 20;

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
        // What is on its way then is answered, too, unless it comes late.
        let late = client.ask(&head("GET", "/late", &[])).await;
        let first_refused = match &late {
            Ok(answer) if is_ok(answer) => 8,
            Err(code::REQUEST_REJECTED) => 4,
            other => panic!("{other:?}"),
        };
        quic([127, 0, 0, 1], &site, &certificate, WIDE).await.expect_err("there are no new ones");
        gate.open();
        let answer = answer(receive).await.unwrap();
        let content: Vec<u8> = frames(&answer)
            .into_iter()
            .filter(|(kind, _)| *kind == frame_type::DATA)
            .flat_map(|(_, payload)| payload)
            .collect();
        assert!(is_ok(&answer) && content == b"halfhalf", "{answer:?}");
        // The last word is which requests are: streams 0 and 4, or that with the number 0 alone.
        assert_eq!(goaway(&mut control, "the last word").await, first_refused);
        assert_eq!(end(&client.quic).await, code::NO_ERROR);
    });
    assert!(site.tidegate.wait().success());
}

/// Each request began anew the time in which those that were on their way might come.
#[test]
fn client_that_goes_on_asking_does_not_put_off_the_end_of_a_drain() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::cacheable("x"));
    let mut site = site(&certificate, &origin);
    run(async {
        let client = Raw::connect_from([127, 0, 0, 1], &site, &certificate).await;
        assert!(client.is_served().await);
        site.tidegate.signal(Signal::TERM);
        let (mut control, request) = (Frames::of_control(&client.quic).await, head("GET", "/", &[]));
        assert_eq!(control.next().await.unwrap().unwrap().0, frame_type::SETTINGS);
        let asking = async {
            // It takes no notice of what it is told: requests are answered, then rejected, then there is no connection.
            while let Ok((mut send, mut receive)) = client.quic.open_bi().await {
                let _ = send.write_all(&request).await;
                let _ = send.finish();
                let _ = receive.read_to_end(1000).await;
            }
        };
        let told = async {
            assert!(goaway(&mut control, "the announcement").await > 1000);
            goaway(&mut control, "the last word").await
        };
        let ((), last) = tokio::join!(asking, told);
        assert!(last > 0);
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

/// Begins a handshake for this name, by this protocol.
async fn shake_hands(
    site: &Site,
    (name, protocol): (&str, &[u8]),
    trusted: &Certificate,
) -> Result<Client, ConnectionError> {
    let tls = QuicClientConfig::try_from(Certificate::client_config(&[trusted], protocol)).unwrap();
    let endpoint = Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
    let config = ClientConfig::new(Arc::new(tls));
    let quic = endpoint.connect_with(config, site.address, name).unwrap().await?;
    Ok(Client::over(endpoint, quic).await)
}

#[test]
fn client_is_shown_the_certificate_of_the_name_it_asks_for() {
    let [a, b] = ["a.example", "b.example"].map(|name| Certificate::of(&[name]));
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = Site::with_http3(Tidegate::builder().origin(&origin), &[("a", &a), ("b", &b)]);
    run(async {
        for (name, certificate) in [("a.example", &a), ("b.example", &b)] {
            let client = shake_hands(&site, (name, b"h3"), certificate).await.unwrap();
            let request = http::Request::get(format!("https://{name}/"));
            assert_eq!(client.ask(request).await.unwrap().status(), 200, "{name}");
            assert_eq!(origin.last().field("Host"), name);
        }
        assert!(shake_hands(&site, ("a.example", b"h3"), &b).await.is_err());
    });
}

#[test]
fn client_that_speaks_another_protocol_gets_no_connection() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    run(async {
        let refused = shake_hands(&site, ("a.example", b"h2"), &certificate).await.map(|_| ());
        // TLS's alert no_application_protocol, 120 (RFC 9001 §4.8).
        let Err(ConnectionError::ConnectionClosed(close)) = refused else { panic!("{refused:?}") };
        assert_eq!(u64::from(close.error_code), 0x100 + 120, "{close:?}");
        until(|| site.tidegate.metric("tidegate_tls_handshakes_failed_total") == 1.0).await;
        assert_eq!(Client::connect(&site, &certificate).await.get("/").await.status(), 200);
    });
    assert_eq!(site.tidegate.metric("tidegate_http3_connections_total"), 1.0);
}

/// It can be repeated by whoever has seen it (RFC 8446 §8).
#[test]
fn what_comes_before_the_handshake_is_done_is_not_taken() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    run(async {
        let mut tls = (*Certificate::client_config(&[&certificate], b"h3")).clone();
        tls.enable_early_data = true;
        let config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
        let endpoint = Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
        for turn in 0..3 {
            let connecting = endpoint.connect_with(config.clone(), site.address, "a.example").unwrap();
            let Err(connecting) = connecting.into_0rtt() else {
                panic!("{turn}: there is a ticket for early data")
            };
            let client = Client::over(endpoint.clone(), connecting.await.unwrap()).await;
            assert_eq!(client.get("/").await.status(), 200, "{turn}");
        }
    });
}

/// Lines of the program's log, once it has said all that it says at its start.
fn logged(site: &Site) -> usize {
    eventually("it serves", || site.tidegate.output().contains("data cores").then_some(()));
    site.tidegate.output().lines().count()
}

#[test]
fn datagrams_that_are_none_of_quics_do_no_harm() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    let before = logged(&site);
    run(async {
        let client = Client::connect(&site, &certificate).await;
        let socket = UdpSocket::bind("127.0.9.9:0").unwrap();
        for length in [0, 1, 2, 7, 8, 20, 21, 100, 1200, 1500, 9000] {
            for first in [0x00, 0x40, 0x80, 0xc0, 0xff] {
                let mut datagram = content(length as u64, length);
                if let Some(byte) = datagram.first_mut() {
                    *byte = first;
                }
                socket.send_to(&datagram, site.address).unwrap();
            }
        }
        for _ in 0..10 {
            assert_eq!(client.get("/").await.status(), 200);
        }
        assert_eq!(Client::connect(&site, &certificate).await.get("/").await.status(), 200);
    });
    assert_eq!(site.tidegate.output().lines().count(), before, "{}", site.tidegate.output());
    assert_eq!(site.tidegate.metric("tidegate_http3_connections_total"), 2.0);
}

/// RFC 9000 §6: who speaks another version is told which there are.
#[test]
fn client_of_another_version_is_told_of_the_one_there_is() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    let socket = UdpSocket::bind("127.0.9.9:0").unwrap();
    socket.set_read_timeout(Some(tidegate_e2e::PATIENCE)).unwrap();
    // A long header: version, and the ids of both ends.
    let mut datagram = b"\xc0\x1a\x2a\x3a\x4a\x08serverid\x08clientid".to_vec();
    datagram.resize(1200, 0);
    socket.send_to(&datagram, site.address).unwrap();
    let mut answer = [0; 2000];
    let length = socket.recv(&mut answer).unwrap();
    let (head, versions) = answer[..length].split_at(5 + 1 + 8 + 1 + 8);
    assert_eq!(head[1..], *b"\0\0\0\0\x08clientid\x08serverid");
    assert!(versions.chunks(4).any(|version| version == [0, 0, 0, 1]), "{versions:?}");
}

/// Its requests are those of the address that it came from.
#[test]
fn client_that_moves_to_another_address_stays_who_it_was() {
    let certificate = Certificate::of(&["a.example"]);
    let origin = Origin::start(|_| Reply::ok("x"));
    let site = site(&certificate, &origin);
    run(async {
        let client = Client::connect_from([127, 0, 9, 9], &site, &certificate, WIDE).await;
        assert_eq!(client.get("/").await.status(), 200);
        move_away(&client.endpoint, [127, 0, 9, 8]);
        assert_eq!(client.get("/").await.status(), 200);
    });
    let clients =
        origin.requests().iter().map(|request| request.field("X-Forwarded-For")).collect::<Vec<_>>();
    assert_eq!(clients, ["127.0.9.9", "127.0.9.9"]);
    assert_eq!(site.tidegate.metric("tidegate_http3_connections_total"), 1.0);
}
