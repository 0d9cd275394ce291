//! Clients that take too long: each costs a bounded time.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::time::Duration;

use tidegate_e2e::{Origin, Reply, Tidegate, content, within};

#[test]
fn half_a_head_and_then_silence_is_answered_408_or_closed() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let tidegate = Tidegate::builder().origin(&origin).limits("header_timeout = \"1s\"").start();
    let mut client = tidegate.connect();
    client.send("GET / HTTP/1.1\r\nHost: exam");
    if let Ok(response) = client.try_response("GET") {
        assert_eq!(response.status, 408);
    }
    assert!(client.is_closed());
    assert_eq!(origin.count(), 0);
}

#[test]
fn head_that_comes_byte_by_byte_does_not_buy_time() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let tidegate = Tidegate::builder().origin(&origin).limits("header_timeout = \"1s\"").start();
    let mut client = tidegate.connect();
    client.send("GET / HTTP/1.1\r\nX: ");
    // Far more bytes than fit into the time at this pace: the connection has to end before they do.
    let refused = (0..1200).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        client.try_send("a").is_err()
    });
    assert!(refused || client.is_closed());
    assert_eq!(origin.count(), 0);
}

#[test]
fn idle_persistent_connection_is_closed_after_its_time() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let tidegate = Tidegate::builder().origin(&origin).limits("keep_alive_timeout = \"1s\"").start();
    let mut client = tidegate.connect();
    assert_eq!(client.get("/").status, 200);
    assert_eq!(client.get("/").status, 200);
    assert!(client.is_closed());
}

#[test]
fn connection_that_never_says_a_word_is_closed() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let limits = "header_timeout = \"1s\"\nkeep_alive_timeout = \"1s\"";
    let tidegate = Tidegate::builder().origin(&origin).limits(limits).start();
    let mut client = tidegate.connect();
    let last_words = String::from_utf8_lossy(&client.rest()).into_owned();
    assert!(last_words.is_empty() || last_words.starts_with("HTTP/1.1 408 "), "{last_words}");
}

#[test]
fn body_that_trickles_below_the_least_rate_ends_the_connection() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let tidegate = Tidegate::builder().origin(&origin).limits("body_min_rate = \"10KiB/s\"").start();
    let mut client = tidegate.connect();
    client.send("POST / HTTP/1.1\r\nHost: example.org\r\nContent-Length: 1000000\r\n\r\nstart");
    if let Ok(response) = client.try_response("POST") {
        assert!(matches!(response.status, 408 | 400), "{response:?}");
    }
    assert!(client.is_closed());
}

#[test]
fn client_takes_nothing_of_a_large_response_it_is_ended() {
    let body = content(7, 32 << 20);
    let sent = body.clone();
    let origin = Origin::start(move |_| Reply::ok(sent.clone()).with("Cache-Control", "no-store"));
    let tidegate = Tidegate::builder().origin(&origin).limits("response_min_rate = \"100MiB/s\"").start();
    let mut stalled = tidegate.connect();
    stalled.send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
    // One that does read gets everything although it is measured by the same rate.
    assert!(tidegate.get("/").body == body);
    within(Duration::from_secs(40), "the stalled client is ended", || {
        (tidegate.metric("tidegate_slow_readers_total") >= 1.0).then_some(())
    });
    assert_eq!(tidegate.metric("tidegate_slow_readers_total"), 1.0);
    assert!(stalled.rest().len() < body.len());
}
