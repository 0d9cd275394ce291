//! Clients that take too long: each costs a bounded time.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate_e2e::{Client, Origin, Reply, Tidegate, content, eventually, within};

/// Two servers that differ in these limits alone: one soon gives up, the other has all the time in the world. A client
/// of the second that waits since before the first one's do is still served when the first has given up on two, one
/// after the other: so it is the configured limit that acts, and not one that both have.
fn impatient_and_patient(origin: &Origin, keys: &[&str]) -> [Tidegate; 2] {
    ["1s", "1h"].map(|limit| {
        let limits: String = keys.iter().map(|key| format!("{key} = \"{limit}\"\n")).collect();
        Tidegate::builder().origin(origin).limits(&limits).start()
    })
}

#[test]
fn half_a_head_and_then_silence_is_answered_408_or_closed() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let [impatient, patient] = impatient_and_patient(&origin, &["header_timeout"]);
    let half = "GET / HTTP/1.1\r\nHost: exam";
    let mut other = patient.connect();
    other.send(half);
    for _ in 0..2 {
        let mut client = impatient.connect();
        client.send(half);
        if let Ok(response) = client.try_response("GET") {
            assert_eq!(response.status, 408);
        }
        assert!(client.is_closed());
    }
    assert_eq!(origin.count(), 0);
    other.send("ple.org\r\n\r\n");
    assert_eq!(other.response().text(), "reached");
}

#[test]
fn head_that_comes_byte_by_byte_does_not_buy_time() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let [impatient, patient] = impatient_and_patient(&origin, &["header_timeout"]);
    let start = "GET / HTTP/1.1\r\nX: ";
    let mut other = patient.connect();
    other.send(start);
    for _ in 0..2 {
        let mut client = impatient.connect();
        client.send(start);
        eventually("the connection ends although bytes keep coming", || {
            other.send("a");
            client.try_send("a").err()
        });
    }
    assert_eq!(origin.count(), 0);
    other.send("\r\nHost: example.org\r\n\r\n");
    assert_eq!(other.response().text(), "reached");
}

#[test]
fn idle_persistent_connection_is_closed_after_its_time() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let [impatient, patient] = impatient_and_patient(&origin, &["keep_alive_timeout"]);
    let [mut other, mut client] = [&patient, &impatient].map(Tidegate::connect);
    for client in [&mut other, &mut client] {
        assert_eq!(client.get("/").status, 200);
        assert_eq!(client.get("/").status, 200);
    }
    assert!(client.is_closed());
    assert_eq!(other.get("/").status, 200);
}

#[test]
fn connection_that_never_says_a_word_is_closed() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    let [impatient, patient] = impatient_and_patient(&origin, &["header_timeout", "keep_alive_timeout"]);
    let mut other = patient.connect();
    for _ in 0..2 {
        let mut client = impatient.connect();
        let last_words = String::from_utf8_lossy(&client.rest()).into_owned();
        assert!(last_words.is_empty() || last_words.starts_with("HTTP/1.1 408 "), "{last_words}");
    }
    assert_eq!(other.get("/").status, 200);
}

#[test]
fn body_that_trickles_below_the_least_rate_ends_the_connection() {
    let origin = Origin::start(|_| Reply::ok("reached"));
    // The second has no least rate.
    let [impatient, patient] = ["10KiB/s", "0B/s"].map(|rate| {
        Tidegate::builder().origin(&origin).limits(&format!("body_min_rate = \"{rate}\"")).start()
    });
    let [mut other, mut client] = [&patient, &impatient].map(Tidegate::connect);
    for client in [&mut other, &mut client] {
        client.send("POST / HTTP/1.1\r\nHost: example.org\r\nContent-Length: 10\r\n\r\nstart");
    }
    if let Ok(response) = client.try_response("POST") {
        assert!(matches!(response.status, 408 | 400), "{response:?}");
    }
    assert!(client.is_closed());
    other.send("-ends");
    assert_eq!(other.response_to("POST").text(), "reached");
}

/// Three clients held all of the cache for a day, at more than the minimum rate.
#[test]
fn slow_clients_keep_nobody_elses_response_out_of_the_cache() {
    let large = content(8, 20 << 20);
    let medium = content(9, 5 << 20);
    let origin = Origin::start(move |request| {
        Reply::cacheable(if request.target.starts_with("/large") { large.clone() } else { medium.clone() })
    });
    let tidegate =
        Tidegate::builder().origin(&origin).cache("memory = \"64MiB\"\nmax_object = \"32MiB\"").start();
    let mut readers: Vec<Client> = (0..3)
        .map(|number| {
            let target = format!("/large{number}");
            assert_eq!(tidegate.get(&target).status, 200);
            let mut client = tidegate.connect();
            rustix::net::sockopt::set_socket_recv_buffer_size(client.stream(), 4096).unwrap();
            client.send(format!("GET {target} HTTP/1.1\r\nHost: example.org\r\n\r\n"));
            assert_eq!(client.head().0, 200);
            client
        })
        .collect();
    let stop = AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        let reads = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // Those that were ended have nothing more.
                readers.iter_mut().for_each(|client| drop(client.stream().read(&mut [0; 1000])));
                std::thread::sleep(Duration::from_millis(250));
            }
        });
        let mut number = 0;
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            eventually("there is room", || {
                number += 1;
                let target = format!("/medium{number}");
                assert_eq!(tidegate.get(&target).status, 200);
                tidegate.get(&target).is_hit().then_some(())
            });
        }));
        stop.store(true, Ordering::Relaxed);
        reads.join().unwrap();
        ended
    });
    assert!(ended.is_ok());
    assert!(tidegate.metric("tidegate_slow_readers_total") >= 1.0);
    assert!(tidegate.output().contains("no room in the cache"), "{}", tidegate.output());
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
