//! A response that is still coming: who else asks for it reads along, whatever becomes of the client that asked first.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::Write;
use std::sync::Arc;

use tidegate_e2e::{Client, Gate, Origin, Reply, Tidegate, content, eventually};

/// Sends `body` as a response that may be stored, its second half once the gate is open.
fn in_two_parts(fields: &'static str, body: &Arc<Vec<u8>>, gate: &Gate) -> Origin {
    let (body, gate) = (Arc::clone(body), gate.clone());
    Origin::start(move |_| {
        let (body, gate) = (Arc::clone(&body), gate.clone());
        Reply::script(move |stream| {
            let head = format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\n{fields}\r\n");
            stream.write_all(head.as_bytes())?;
            let (first, second) = body.split_at(body.len() / 2);
            stream.write_all(first)?;
            gate.pass();
            stream.write_all(second)
        })
    })
}

#[test]
fn response_is_still_coming_those_who_wait_for_it_read_along() {
    let (body, gate) = (Arc::new(content(1, 400_000)), Gate::default());
    let origin = in_two_parts("Content-Length: 400000\r\n", &body, &gate);
    let tidegate = Tidegate::before(&origin);
    let mut clients: Vec<_> = (0..3).map(|_| tidegate.connect()).collect();
    for client in &mut clients {
        client.send("GET /big HTTP/1.1\r\nHost: example.org\r\n\r\n");
        assert_eq!(client.head().0, 200);
        assert!(client.read_bytes(200_000) == body[..200_000]);
    }
    gate.open();
    for client in &mut clients {
        assert!(client.read_bytes(200_000) == body[200_000..]);
    }
    assert_eq!(origin.count(), 1);
    assert!(tidegate.get("/big").is_hit());
}

#[test]
fn response_that_varies_is_still_coming_who_waits_for_another_variant_does_not_read_along() {
    let (head, rest) = (Gate::default(), Gate::default());
    let (held, may_end) = (head.clone(), rest.clone());
    let origin = Origin::start(move |request| {
        let language = request.field("Accept-Language");
        if language == "fr" {
            return Reply::cacheable("in fr").with("Vary", "Accept-Language");
        }
        held.pass();
        let door = may_end.clone();
        Reply::script(move |stream| {
            stream.write_all(
                b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nVary: Accept-Language\r\nContent-Length: 5\r\n\r\nin ",
            )?;
            door.pass();
            stream.write_all(language.as_bytes())
        })
    });
    let tidegate = Tidegate::before(&origin);
    let mut german = tidegate.connect();
    german.send("GET / HTTP/1.1\r\nHost: example.org\r\nAccept-Language: de\r\n\r\n");
    eventually("the origin is asked", || (origin.count() == 1).then_some(()));
    let mut french = tidegate.connect();
    french.send("GET / HTTP/1.1\r\nHost: example.org\r\nAccept-Language: fr\r\n\r\n");
    // Nobody knows yet that the language matters.
    eventually("it waits", || (tidegate.metric("tidegate_cache_collapsed_total") >= 1.0).then_some(()));
    head.open();
    assert_eq!(german.head().0, 200);
    assert_eq!(french.response().text(), "in fr");
    rest.open();
    assert_eq!(german.read_bytes(5), b"in de");
}

#[test]
fn first_client_takes_nothing_the_next_one_gets_the_whole_response() {
    let body = Arc::new(content(2, 15 << 20));
    let gate = Gate::default();
    gate.open();
    let origin = in_two_parts("Content-Length: 15728640\r\n", &body, &gate);
    let tidegate =
        Tidegate::builder().origin(&origin).cache("memory = \"64MiB\"\nmax_object = \"16MiB\"").start();
    let mut stalled = tidegate.connect();
    stalled.send("GET /big HTTP/1.1\r\nHost: example.org\r\n\r\n");
    eventually("the origin is asked", || (origin.count() > 0).then_some(()));
    assert!(tidegate.get("/big").body == *body);
    assert_eq!(origin.count(), 1);
    // What was left waiting for it is whole too.
    stalled.head();
    assert!(stalled.read_bytes(body.len()) == *body);
}

#[test]
fn first_client_leaves_half_way_the_object_is_stored_all_the_same() {
    let (body, gate) = (Arc::new(content(3, 400_000)), Gate::default());
    let origin = in_two_parts("Content-Length: 400000\r\n", &body, &gate);
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET /big HTTP/1.1\r\nHost: example.org\r\n\r\n");
    client.read_bytes(1000);
    drop(client);
    gate.open();
    eventually("the object is stored", || tidegate.get("/big").is_hit().then_some(()));
    assert_eq!(origin.count(), 1);
}

#[test]
fn client_has_what_is_still_coming_it_is_told_304_at_once() {
    let (body, gate) = (Arc::new(content(4, 400_000)), Gate::default());
    let origin = in_two_parts("ETag: \"v1\"\r\nContent-Type: text/plain\r\n", &body, &gate);
    let tidegate = Tidegate::before(&origin);
    let told = tidegate.get_with("/big", "If-None-Match: \"v1\"\r\n");
    assert_eq!((told.status, told.field("ETag").as_str(), told.body.len()), (304, "\"v1\"", 0));
    gate.open();
    eventually("the object is stored", || tidegate.get("/big").is_hit().then_some(()));
    assert_eq!(origin.count(), 1);
}

#[test]
fn response_larger_than_an_object_may_be_the_client_gets_all_of_it() {
    let (body, gate) = (Arc::new(content(5, 3 << 20)), Gate::default());
    gate.open();
    let origin = in_two_parts("", &body, &gate);
    let tidegate =
        Tidegate::builder().origin(&origin).cache("memory = \"32MiB\"\nmax_object = \"1MiB\"").start();
    for _ in 0..2 {
        assert!(tidegate.get("/big").body == *body);
    }
    assert_eq!(origin.count(), 2);
}

/// Sends a response that may be stored and does not end; tells when nobody takes it any more.
fn endless(ended: &Gate) -> Origin {
    let ended = ended.clone();
    Origin::start(move |_| {
        let ended = ended.clone();
        Reply::script(move |stream| {
            stream.write_all(b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\n\r\n")?;
            while stream.write_all(b"tick ").is_ok() {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            ended.open();
            Ok(())
        })
    })
}

#[test]
fn endless_response_its_last_client_leaves_the_upstream_is_left_too() {
    let ended = Gate::default();
    let origin = endless(&ended);
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    client.send("GET /ticks HTTP/1.1\r\nHost: example.org\r\n\r\n");
    client.read_bytes(100);
    drop(client);
    ended.pass();
}

#[test]
fn endless_response_others_get_one_of_their_own() {
    let origin = endless(&Gate::default());
    let tidegate = Tidegate::before(&origin);
    let mut clients = [tidegate.connect(), tidegate.connect()];
    for client in &mut clients {
        client.send("GET /ticks HTTP/1.1\r\nHost: example.org\r\n\r\n");
        assert_eq!(client.head().0, 200);
        client.read_bytes(30);
    }
    assert_eq!(origin.count(), 2);
}

/// Its time began anew each second, so that clients waited for as long as the server kept its connection.
#[test]
fn upstream_falls_silent_within_a_response_those_who_read_along_are_cut_off_in_time() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |_| {
        let held = held.clone();
        Reply::script(move |stream| {
            stream.write_all(
                b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 9\r\n\r\nhalf",
            )?;
            held.pass();
            Ok(())
        })
    });
    let tidegate = Tidegate::builder()
        .group("app", &[origin.address()], "response_timeout = \"2s\"")
        .route("/", "upstream = \"app\"")
        .start();
    let mut clients = [tidegate.connect(), tidegate.connect()];
    for client in &mut clients {
        client.send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
        assert_eq!(client.head().0, 200);
    }
    for client in &mut clients {
        assert_eq!(client.rest(), b"half");
    }
    assert_eq!(origin.count(), 1);
    gate.open();
}

/// What does not fit any more while it comes goes on to its reader from where the cache has it to.
#[test]
fn response_that_finds_no_room_midway_is_sent_once() {
    let pattern = |seed: usize| -> Vec<u8> {
        (0..3_300_000 + seed * 9_999).map(|at| ((at * 31 + at / 251) ^ seed) as u8).collect()
    };
    let origin = Origin::start(move |request| {
        let (kind, seed) = request.target[1..].split_once('/').unwrap();
        let content = pattern(seed.parse().unwrap());
        match kind {
            "whole" => Reply::cacheable(content),
            _ => {
                let head =
                    "HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nTransfer-Encoding: chunked\r\n\r\n";
                let mut bytes = head.as_bytes().to_vec();
                for piece in content.chunks(9_000) {
                    bytes.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
                    bytes.extend_from_slice(piece);
                    bytes.extend_from_slice(b"\r\n");
                }
                bytes.extend_from_slice(b"0\r\n\r\n");
                Reply::Raw(bytes)
            }
        }
    });
    let tidegate = Tidegate::builder()
        .top("workers = 1")
        .origin(&origin)
        .cache("memory = \"32MiB\"\nmax_object = \"8MiB\"")
        .tables("[defence]\nenabled = false")
        .start();
    // Clients that take nothing hold what is stored.
    let holding: Vec<Client> = (0..9)
        .map(|seed| {
            let mut client = tidegate.connect();
            client.send(format!("GET /whole/{seed} HTTP/1.1\r\nHost: a\r\n\r\n"));
            assert_eq!(client.head().0, 200);
            client
        })
        .collect();
    for seed in 10..16 {
        for kind in ["whole", "chunked"] {
            let mut client = tidegate.connect();
            for seed in [seed, seed + 20] {
                assert!(client.get(&format!("/{kind}/{seed}")).body == pattern(seed), "{kind}/{seed}");
            }
        }
    }
    assert!(tidegate.metric("tidegate_store_insert_failures_total") > 0.0);
    drop(holding);
}
