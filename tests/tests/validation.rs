//! What a 304 says of a stored response (RFC 9111 §4.3.4), to whom, and how old the origin's answers are.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use tidegate_e2e::{Client, Gate, Origin, Reply, Request, Tidegate, eventually};

/// Whether the request asks whether the representation with this tag is still good.
fn validates(request: &Request) -> bool {
    request.field("If-None-Match") == "\"v1\""
}

/// A representation that is stale when it comes.
fn stale(body: &str) -> Reply {
    Reply::cacheable(body).with("ETag", "\"v1\"").with("Age", "60")
}

fn not_modified() -> Reply {
    Reply::status(304, "").with("ETag", "\"v1\"")
}

#[test]
fn cookie_that_a_304_sets_is_set_for_the_client_that_was_validated_alone() {
    let origin = Origin::start(|request| {
        if !validates(request) {
            return stale("page");
        }
        let reply = not_modified().with("Set-Cookie", &format!("session=of-{}", request.field("User-Agent")));
        match request.target.as_str() {
            // As RFC 9110 §15.4.5 wants it of a 304.
            "/explicit" => reply.with("Cache-Control", "max-age=60"),
            _ => reply,
        }
    });
    let tidegate = Tidegate::before(&origin);
    for (number, target) in ["/explicit", "/silent", "/has-it"].into_iter().enumerate() {
        assert_eq!(tidegate.get(target).field("Set-Cookie"), "", "{target}");
        let condition = if target == "/has-it" { "If-None-Match: \"v1\"\r\n" } else { "" };
        let alice = tidegate.get_with(target, &format!("User-Agent: alice\r\n{condition}"));
        assert_eq!(alice.status, if target == "/has-it" { 304 } else { 200 }, "{target}: {alice:?}");
        assert_eq!(alice.field("Set-Cookie"), "session=of-alice", "{target}: {alice:?}");
        let bob = tidegate.get_with(target, "User-Agent: bob\r\n");
        assert!(bob.is_hit() && bob.text() == "page", "{target}: {bob:?}");
        assert_eq!(bob.fields.get("Set-Cookie"), None, "{target}: {bob:?}");
        assert_eq!(origin.count(), 2 * (number + 1));
    }
}

#[test]
fn cookie_that_a_304_in_the_background_sets_is_set_for_nobody() {
    let origin = Origin::start(|request| match validates(request) {
        true => not_modified().with("Set-Cookie", "session=of-alice").with("Cache-Control", "max-age=60"),
        false => Reply::ok("page")
            .with("ETag", "\"v1\"")
            .with("Cache-Control", "max-age=60, stale-while-revalidate=600")
            .with("Age", "60"),
    });
    let tidegate = Tidegate::before(&origin);
    tidegate.get("/");
    let fresh = eventually("it is fresh", || {
        let response = tidegate.get("/");
        assert_eq!(response.fields.get("Set-Cookie"), None, "{response:?}");
        let ttl_s = response.field("Cache-Status").split_once("ttl=").map(|(_, ttl)| ttl.parse::<i64>());
        matches!(ttl_s, Some(Ok(1..))).then_some(response)
    });
    assert_eq!(fresh.text(), "page");
}

/// RFC 9111 §4.3.5.
#[test]
fn what_a_head_tells_of_the_stored_response_makes_it_fresh_or_takes_it_away() {
    let origin = Origin::start(|request| {
        let told = match request.target.as_str() {
            _ if request.method == "GET" => return stale("page"),
            "/same" => "ETag: \"v1\"\r\nContent-Length: 4\r\n",
            "/bare" => "",
            "/other" => "ETag: \"v2\"\r\nContent-Length: 4\r\n",
            _ => "ETag: \"v1\"\r\nContent-Length: 5\r\n",
        };
        Reply::Raw(
            format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nX-New: 1\r\n{told}\r\n").into_bytes(),
        )
    });
    let tidegate = Tidegate::before(&origin);
    for target in ["/same", "/bare", "/other", "/longer"] {
        assert_eq!(tidegate.get(target).text(), "page");
        assert_eq!(tidegate.connect().request("HEAD", target, "").field("X-New"), "1");
        let asked = origin.count();
        let response = tidegate.get(target);
        let is_same = target == "/same";
        assert_eq!(
            (response.text().as_str(), response.is_hit(), origin.count() - asked),
            ("page", is_same, usize::from(!is_same))
        );
        assert_eq!(response.field("X-New").is_empty(), !is_same, "{target}: {response:?}");
        if !is_same {
            // What could be said of anything changes nothing.
            let known = if target == "/bare" { "\"v1\"" } else { "" };
            assert_eq!(origin.last().field("If-None-Match"), known, "{target}");
        }
    }
}

#[test]
fn not_modified_without_a_date_makes_the_stored_response_fresh() {
    let long_ago = "Sun, 06 Nov 1994 08:49:37 GMT";
    let origin = Origin::start(move |request| match validates(request) {
        true => not_modified(),
        false => Reply::cacheable("page").with("ETag", "\"v1\"").with("Date", long_ago),
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").field("Date"), long_ago);
    assert_eq!(tidegate.get("/").text(), "page");
    let hit = tidegate.get("/");
    assert!(hit.is_hit() && hit.field("Date") != long_ago, "{hit:?}");
    assert_eq!(origin.count(), 2);
}

#[test]
fn not_modified_that_brings_a_longer_vary_nobody_gets_what_was_selected_by_the_shorter_one() {
    let origin = Origin::start(|request| {
        let (kind, language) = (request.field("X-Kind"), request.field("Accept-Language"));
        match validates(request) {
            true => {
                not_modified().with("Cache-Control", "max-age=60").with("Vary", "X-Kind, Accept-Language")
            }
            false => stale(&format!("{kind} in {language}")).with("Vary", "X-Kind"),
        }
    });
    let tidegate = Tidegate::before(&origin);
    let get = |language: &str| {
        tidegate.get_with("/", &format!("X-Kind: a\r\nAccept-Language: {language}\r\n")).text()
    };
    assert_eq!(get("de"), "a in de");
    // The stored one is the one that its kind selects, and is validated.
    assert_eq!(get("en"), "a in en");
    assert_eq!(get("de"), "a in de");
}

#[test]
fn what_the_origin_makes_for_a_request_has_no_age_however_its_bytes_come() {
    let gate = Gate::default();
    let door = gate.clone();
    let origin = Origin::start(move |request| {
        let age = if request.target.ends_with("/aged") { "Age: 7\r\n" } else { "" };
        let head = format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\n{age}Content-Length: 4\r\n\r\n");
        if request.target.starts_with("/whole") {
            return Reply::Raw([head.as_bytes(), b"page"].concat());
        }
        let door = door.clone();
        Reply::script(move |stream| {
            stream.write_all(head.as_bytes())?;
            door.pass();
            stream.write_all(b"page")
        })
    });
    let tidegate = Tidegate::before(&origin);
    for target in ["/whole", "/apart", "/whole/aged", "/apart/aged"] {
        let mut client = tidegate.connect();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: example.org\r\n\r\n"));
        let age = client.head().1.get("Age");
        match age.as_ref().map(|age| age.parse::<u64>().unwrap()) {
            // A cache before us says how old it was, and it gets older on the way.
            Some(age) => assert!(target.ends_with("/aged") && (7..60).contains(&age), "{target}: {age}"),
            None => assert!(!target.ends_with("/aged"), "{target}"),
        }
    }
    gate.open();
    // RFC 9111 §4: what is not made for the request has one.
    assert!(tidegate.get("/whole").fields.get("Age").is_some());
}

#[test]
fn what_the_origin_has_just_validated_has_the_age_that_the_304_has() {
    let origin = Origin::start(|request| match (validates(request), request.target.as_str()) {
        (false, _) => stale("page"),
        (true, "/aged") => not_modified().with("Age", "7"),
        (true, _) => not_modified(),
    });
    let tidegate = Tidegate::before(&origin);
    for target in ["/", "/aged"] {
        tidegate.get(target);
        let validated = tidegate.get(target);
        assert!(validated.field("Cache-Status").contains("fwd-status=304"), "{validated:?}");
        assert_eq!(validated.fields.get("Age").is_some(), target == "/aged", "{validated:?}");
        assert!(tidegate.get(target).fields.get("Age").is_some());
    }
}

/// It says nothing of who may have it: each client has its own page.
fn own_page_of_each(request: &Request) -> Reply {
    let page = format!("page of {}", request.field("Cookie"));
    let tag = format!("\"{}\"", request.field("Cookie"));
    match request.field("If-None-Match") == tag {
        true => Reply::status(304, "").with("ETag", &tag),
        false => Reply::ok(page).with("ETag", &tag),
    }
}

#[test]
fn a_page_that_says_nothing_of_who_may_have_it_is_given_to_no_other_client() {
    let origin = Origin::start(own_page_of_each);
    let tidegate = Tidegate::before(&origin);
    let alices = "Cookie: alice\r\n";
    assert_eq!(tidegate.get_with("/", alices).text(), "page of alice");
    for asked in ["max-stale", "max-stale=1000", "stale-if-error=1000", "max-age=1000, max-stale"] {
        for cookie in ["", "Cookie: mallory\r\n"] {
            let fields = format!("Cache-Control: {asked}\r\n{cookie}");
            assert!(!tidegate.get_with("/", &fields).text().contains("alice"), "{fields}");
            let fields = format!("Cache-Control: {asked}, only-if-cached\r\n{cookie}");
            assert!(!tidegate.get_with("/", &fields).text().contains("alice"), "{fields}");
        }
    }
    // Who has it is told so.
    let fields = "Cookie: alice\r\nIf-None-Match: \"alice\"\r\n";
    assert_eq!(tidegate.get_with("/", fields).status, 304);
    origin.stop();
    for cookie in ["", "Cookie: mallory\r\n"] {
        assert_eq!(tidegate.get_with("/", cookie).status, 502);
    }
}

/// All were asked for twice, the second time without conditions.
#[test]
fn validations_at_once_ask_the_origin_once_each() {
    let barrier = Arc::new(Barrier::new(4));
    let all_here = Arc::clone(&barrier);
    let origin = Origin::start(move |request| {
        if request.field("If-None-Match") == "\"v\"" {
            // Passes only if four requests are here at once.
            all_here.wait();
            return Reply::status(304, "").with("ETag", "\"v\"");
        }
        Reply::ok("page").with("ETag", "\"v\"").with("Cache-Control", "no-cache")
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").text(), "page");
    let address = tidegate.address();
    for _ in 0..5 {
        let clients: Vec<_> =
            (0..4).map(|_| std::thread::spawn(move || Client::connect(address).get("/").text())).collect();
        for client in clients {
            assert_eq!(client.join().unwrap(), "page");
        }
    }
    assert_eq!(origin.count(), 21);
}

/// Somebody's credentials, or that nothing is to be stored for it, are no reason to take from others what they had.
#[test]
fn a_validation_for_one_client_alone_leaves_what_is_stored_to_the_others() {
    let asks = "Cache-Control: no-cache";
    for own in [
        &format!("Authorization: Basic YTpi\r\n{asks}"),
        "Cache-Control: no-store, no-cache",
        &format!("Cookie: a=b\r\n{asks}"),
    ] {
        let origin = Origin::start(|request| match request.field("If-None-Match") == "\"v\"" {
            true => Reply::status(304, "").with("ETag", "\"v\""),
            false => {
                Reply::ok("page").with("ETag", "\"v\"").with("Last-Modified", "Sun, 06 Nov 1994 08:49:37 GMT")
            }
        });
        let tidegate = Tidegate::before(&origin);
        assert_eq!(tidegate.get("/").text(), "page");
        assert_eq!(tidegate.get_with("/", &format!("{own}\r\n")).text(), "page", "{own}");
        assert_eq!(origin.last().field("If-None-Match"), "\"v\"", "{own}");
        assert_eq!(origin.count(), 2, "{own}");
        assert!(tidegate.get("/").is_hit(), "{own}");
    }
}

/// A deleted page came back when the origin was down.
#[test]
fn what_is_no_more_what_it_was_is_not_served_again() {
    let gone: [fn() -> Reply; 3] = [
        || Reply::status(404, "gone"),
        || Reply::ok("new").with("Cache-Control", "no-store"),
        || Reply::status(302, "").with("Location", "/other"),
    ];
    for gone in gone {
        let first = AtomicBool::new(true);
        let origin = Origin::start(move |_| match first.swap(false, Ordering::SeqCst) {
            true => {
                Reply::ok("old").with("Cache-Control", "max-age=60").with("Age", "60").with("ETag", "\"v\"")
            }
            false => gone(),
        });
        let tidegate = Tidegate::before(&origin);
        assert_eq!(tidegate.get("/").text(), "old");
        // For one client alone it may be another one; that says nothing of the others'.
        assert_ne!(tidegate.get_with("/", "Cookie: a=b\r\n").text(), "old");
        assert_eq!(tidegate.get_with("/", "Cache-Control: max-stale=1000\r\n").text(), "old");
        assert_ne!(tidegate.get("/").text(), "old");
        assert_ne!(tidegate.get_with("/", "Cache-Control: max-stale=1000\r\n").text(), "old");
        origin.stop();
        assert_eq!(tidegate.get("/").status, 502);
    }
}

/// Its conditions were taken off, and it was sent all of it each time.
#[test]
fn who_has_what_is_not_stored_is_told_so() {
    let origin = Origin::start(|request| {
        let reply = match request.field("If-None-Match") == "\"v\"" {
            true => Reply::status(304, ""),
            false => Reply::ok("private page"),
        };
        reply.with("ETag", "\"v\"").with("Cache-Control", "private")
    });
    let tidegate = Tidegate::before(&origin);
    let mut client = tidegate.connect();
    // The first time nobody knows that it is private; from then on the origin is asked as the client asks.
    for _ in 0..3 {
        let response = client.request("GET", "/", "If-None-Match: \"v\"\r\n");
        assert_eq!((response.status, response.text().as_str()), (304, ""));
        assert_eq!(response.field("ETag"), "\"v\"");
    }
    assert_eq!(origin.last().field("If-None-Match"), "\"v\"");
    assert_eq!(client.request("GET", "/", "If-None-Match: \"w\"\r\n").text(), "private page");
    assert_eq!(client.get("/").text(), "private page");
}

/// A part of it, or its head.
#[test]
fn what_stands_in_for_an_upstream_does_so_for_a_part_of_it_and_for_its_head() {
    let failing = Arc::new(AtomicBool::new(false));
    let fails = Arc::clone(&failing);
    let origin = Origin::start(move |_| match fails.load(Ordering::SeqCst) {
        true => Reply::status(503, ""),
        false => Reply::ok("0123456789")
            .with("Cache-Control", "max-age=60, stale-if-error=60")
            .with("Age", "60")
            .with("ETag", "\"v\""),
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").status, 200);
    let stands_in = || {
        let response = tidegate.get_with("/", "Range: bytes=2-4\r\n");
        assert_eq!((response.status, response.text().as_str()), (206, "234"));
        let mut client = tidegate.connect();
        client.send("HEAD / HTTP/1.1\r\nHost: example.org\r\n\r\n");
        assert_eq!(client.response_to("HEAD").field("Content-Length"), "10");
        // Only the origin knows what is current.
        tidegate.get_with("/", "If-Match: \"v\"\r\n").status
    };
    failing.store(true, Ordering::SeqCst);
    assert_eq!(stands_in(), 503);
    origin.stop();
    assert_eq!(stands_in(), 502);
}
