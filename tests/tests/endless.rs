//! Responses that begin and then say nothing for long, as streams of events do: whoever leaves one lets go of its upstream.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::net::sockopt;
use tidegate_e2e::http3::{cancel, get, run, until, url};
use tidegate_e2e::{Certificate, Client, Origin, Reply, Site, Tidegate, eventually, http2, http3};

/// The end of each connection on which it answered is counted. Its responses have a length, or chunks, or neither, or do not
/// begin.
fn silent() -> (Origin, Arc<AtomicUsize>) {
    let left = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&left);
    let origin = Origin::start(move |request| {
        let head: &[u8] = match request.target.as_str() {
            "/length" => b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nstart",
            "/chunks" => b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nstart\r\n",
            "/waiting" => b"",
            _ => b"HTTP/1.0 200 OK\r\n\r\nstart",
        };
        let count = Arc::clone(&count);
        Reply::script(move |stream| {
            stream.write_all(head)?;
            // Nothing comes; an end or a reset does.
            let _ = stream.read(&mut [0]);
            count.fetch_add(1, Ordering::SeqCst);
            Ok(())
        })
    });
    (origin, left)
}

const TARGETS: [&str; 3] = ["/length", "/chunks", "/end"];

/// Its end is a reset, as when a process is killed that has not read all.
fn abandon(client: &Client) {
    sockopt::set_socket_linger(client.stream(), Some(std::time::Duration::ZERO)).unwrap();
}

#[test]
fn http1_client_that_is_gone_lets_go_of_a_silent_upstream() {
    let certificate = Certificate::of(&["a.example"]);
    let (origin, left) = silent();
    let site = Site::start(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    let ask = |client: &mut Client, target| {
        client.send(format!("GET {target} HTTP/1.1\r\nHost: a.example\r\n\r\n"));
        assert_eq!(client.head().0, 200);
    };
    let mut stays = site.connect(&certificate);
    ask(&mut stays, "/chunks");
    for (number, target) in TARGETS.into_iter().flat_map(|target| [target; 2]).enumerate() {
        let mut client = match number % 2 {
            0 => Client::connect(site.tidegate.address()),
            _ => site.connect(&certificate),
        };
        ask(&mut client, target);
        abandon(&client);
        drop(client);
        run(until(|| left.load(Ordering::SeqCst) == number + 1));
    }
    assert_eq!(site.tidegate.metric("tidegate_responses_broken_total"), 6.0, "one that stays is not left");
}

#[test]
fn stream_that_is_cancelled_lets_go_of_a_silent_upstream() {
    let certificate = Certificate::of(&["a.example"]);
    let (origin, left) = silent();
    let site = Site::with_http3(Tidegate::builder().origin(&origin), &[("a", &certificate)]);
    run(async {
        let mut second = http2::Client::connect(&site, &certificate).await;
        let third = http3::Client::connect(&site, &certificate).await;
        // Both stay until their connections end.
        let response = second.send(get("/chunks")).await.await.unwrap();
        let mut stream = third.send(get("/chunks")).await;
        assert_eq!(stream.recv_response().await.unwrap().status(), 200);
        let mut gone = 0;
        for target in TARGETS {
            let mut response = second.send(get(target)).await.await.unwrap();
            assert_eq!(response.body_mut().data().await.unwrap().unwrap(), "start");
            drop(response);
            gone += 1;
            until(|| left.load(Ordering::SeqCst) == gone).await;
            let mut stream = third.send(get(target)).await;
            assert_eq!(stream.recv_response().await.unwrap().status(), 200);
            cancel(&mut stream);
            gone += 1;
            until(|| left.load(Ordering::SeqCst) == gone).await;
        }
        second.connection.abort();
        third.quic.close(http3::varint(http3::code::NO_ERROR), b"");
        until(|| left.load(Ordering::SeqCst) == gone + 2).await;
        drop((response, stream));
    });
    assert_eq!(site.tidegate.metric("tidegate_responses_broken_total"), 8.0);
}

/// Waiting, and begun: as with HTTP/1.
#[test]
fn access_log_has_the_streams_that_the_drain_timeout_cut_off() {
    let certificate = Certificate::of(&["a.example"]);
    let (origin, _left) = silent();
    let builder = Tidegate::builder()
        .origin(&origin)
        .limits("drain_timeout = \"1s\"")
        .tables("[log]\naccess = \"@DIR@/access.txt\"\nformat = \"combined\"");
    let mut site = Site::with_http3(builder, &[("a", &certificate)]);
    run(async {
        let mut second = http2::Client::connect(&site, &certificate).await;
        let third = http3::Client::connect(&site, &certificate).await;
        let response = second.send(get("/length")).await.await.unwrap();
        let mut stream = third.send(get("/length")).await;
        assert_eq!(stream.recv_response().await.unwrap().status(), 200);
        let waiting = (second.send(get("/waiting")).await, third.send(get("/waiting")).await);
        until(|| origin.count() == 4).await;
        site.tidegate.signal(rustix::process::Signal::TERM);
        assert!(second.connection.await.is_ok());
        third.quic.closed().await;
        drop((response, stream, waiting));
    });
    assert!(site.tidegate.wait().success());
    let log = std::fs::read_to_string(site.tidegate.directory().join("access.txt")).unwrap_or_default();
    for version in ["2.0", "3.0"] {
        let of = |what: String| log.matches(&what).count();
        assert_eq!(of(format!("\"GET /length HTTP/{version}\" 200 5 ")), 1, "{log}");
        assert_eq!(of(format!("\"GET /waiting HTTP/{version}\" 503 0 ")), 1, "{log}");
    }
    assert_eq!(log.lines().count(), 4, "{log}");
}

/// The server would wait for the rest for as long as it is let, and the client for what it says to that.
#[test]
fn upload_that_stalls_once_its_response_has_begun_ends_its_stream() {
    let certificate = Certificate::of(&["a.example"]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let origin = listener.local_addr().unwrap();
    let left = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&left);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, count) = (stream.unwrap(), Arc::clone(&count));
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                if stream.read(&mut bytes).is_ok_and(|length| length > 0) {
                    let start = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nstart\r\n";
                    stream.write_all(start).unwrap();
                    while stream.read(&mut bytes).is_ok_and(|length| length > 0) {}
                    count.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    let builder = Tidegate::builder()
        .group("app", &[origin], "")
        .route("/", "upstream = \"app\"")
        .limits("body_min_rate = \"10KiB/s\"")
        .tables("[log]\naccess = \"@DIR@/access.txt\"\nformat = \"combined\"");
    let site = Site::with_http3(builder, &[("a", &certificate)]);
    run(async {
        let mut second = http2::Client::connect(&site, &certificate).await.requests.ready().await.unwrap();
        let put = || http::Request::put(url("/put")).body(()).unwrap();
        let (response, mut content) = second.send_request(put(), false).unwrap();
        content.send_data("begin".into(), false).unwrap();
        let mut response = response.await.unwrap();
        assert_eq!(response.body_mut().data().await.unwrap().unwrap(), "start");
        assert!(response.body_mut().data().await.unwrap().is_err_and(|error| error.is_reset()));
        let third = http3::Client::connect(&site, &certificate).await;
        let mut stream = third.begin(http::Request::put(url("/put"))).await.unwrap();
        stream.send_data("begin".into()).await.unwrap();
        assert_eq!(stream.recv_response().await.unwrap().status(), 200);
        assert_eq!(http3::piece(&mut stream).await.unwrap().unwrap(), "start");
        assert!(http3::piece(&mut stream).await.is_err());
        until(|| left.load(Ordering::SeqCst) == 2).await;
    });
    assert_eq!(site.tidegate.metric("tidegate_slow_bodies_total"), 2.0);
    // Of what was sent the chunks of HTTP/1 are no part.
    let log = eventually("both are logged", || {
        let text = std::fs::read_to_string(site.tidegate.directory().join("access.txt")).unwrap_or_default();
        (text.lines().count() == 2).then_some(text)
    });
    for version in ["2.0", "3.0"] {
        assert!(log.contains(&format!("\"PUT /put HTTP/{version}\" 200 5 ")), "{log}");
    }
}
