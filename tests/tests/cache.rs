//! What the cache answers itself, what it asks the origin for, and how it says so (RFC 9111, RFC 9211, RFC 5861).
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use tidegate_e2e::{Client, Gate, Origin, Reply, Tidegate, content, eventually};

#[test]
fn fresh_object_second_request_is_answered_without_the_origin() {
    let origin = Origin::counting(&[("Cache-Control", "max-age=60"), ("Content-Type", "text/plain")]);
    let tidegate = Tidegate::before(&origin);

    let first = tidegate.get("/page");
    assert_eq!((first.status, first.text().as_str()), (200, "answer 1"));
    assert!(!first.is_hit(), "{first:?}");
    assert!(first.field("Cache-Status").contains("fwd=uri-miss"), "{first:?}");

    let second = tidegate.get("/page");
    assert_eq!((second.status, second.text().as_str()), (200, "answer 1"));
    assert!(second.is_hit(), "{second:?}");
    assert_eq!(second.field("Content-Type"), "text/plain");
    assert!(second.field("Age").parse::<u64>().unwrap() < 60, "{second:?}");
    assert_eq!(origin.count(), 1);
}

#[test]
fn object_of_some_age_age_counts_on_from_it() {
    let origin = Origin::counting(&[("Cache-Control", "max-age=600"), ("Age", "100")]);
    let tidegate = Tidegate::before(&origin);
    tidegate.get("/old");
    let age: u64 = tidegate.get("/old").field("Age").parse().unwrap();
    assert!((100..600).contains(&age), "{age}");
}

#[test]
fn response_that_must_not_be_stored_origin_is_asked_each_time() {
    for fields in [
        &[("Cache-Control", "no-store")][..],
        &[("Cache-Control", "private, max-age=60")],
        &[("Cache-Control", "max-age=60"), ("CDN-Cache-Control", "no-store")],
        &[("Cache-Control", "max-age=60"), ("Vary", "*")],
    ] {
        let origin = Origin::counting(fields);
        let tidegate = Tidegate::before(&origin);
        assert_eq!(tidegate.get("/").text(), "answer 1", "{fields:?}");
        assert_eq!(tidegate.get("/").text(), "answer 2", "{fields:?}");
    }
}

#[test]
fn request_with_authorization_response_is_not_shared() {
    let origin = Origin::counting(&[("Cache-Control", "max-age=60")]);
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get_with("/", "Authorization: Basic YTpi\r\n").text(), "answer 1");
    assert_eq!(tidegate.get("/").text(), "answer 2");
}

#[test]
fn cdn_cache_control_overrides_cache_control() {
    let origin = Origin::counting(&[("Cache-Control", "no-store"), ("CDN-Cache-Control", "max-age=60")]);
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").text(), "answer 1");
    assert_eq!(tidegate.get("/").text(), "answer 1");
}

#[test]
fn stale_object_origin_says_304_stored_content_is_served() {
    let origin = Origin::start(|request| {
        if request.field("If-None-Match") == "\"v1\"" {
            return Reply::status(304, "").with("ETag", "\"v1\"").with("Cache-Control", "max-age=60");
        }
        // Its age is its lifetime: stale on arrival.
        let reply = Reply::ok("content").with("ETag", "\"v1\"");
        reply.with("Cache-Control", "max-age=60").with("Age", "60")
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").text(), "content");
    let validated = tidegate.get("/");
    assert_eq!((validated.status, validated.text().as_str()), (200, "content"));
    assert!(validated.field("Cache-Status").contains("; fwd=stale; fwd-status=304; stored"), "{validated:?}");
    assert!(!validated.is_hit(), "the origin was asked: {validated:?}");
    assert_eq!(origin.count(), 2);

    // The 304 has made it fresh again.
    assert!(tidegate.get("/").is_hit());
    assert_eq!(origin.count(), 2);

    let asked = tidegate.get_with("/", "Cache-Control: no-cache\r\n");
    assert!(asked.field("Cache-Status").contains("; fwd=request; fwd-status=304"), "{asked:?}");
    assert_eq!(origin.count(), 3);
}

#[test]
fn stored_object_client_has_it_already_is_told_304() {
    let origin = Origin::start(|_| {
        let reply = Reply::cacheable("content").with("ETag", "\"v1\"");
        reply.with("Last-Modified", "Sat, 01 Jan 2022 00:00:00 GMT")
    });
    let tidegate = Tidegate::before(&origin);
    tidegate.get("/");
    let by_tag = tidegate.get_with("/", "If-None-Match: \"v0\", W/\"v1\"\r\n");
    assert_eq!((by_tag.status, by_tag.field("ETag").as_str()), (304, "\"v1\""));
    let by_date = tidegate.get_with("/", "If-Modified-Since: Sat, 01 Jan 2022 00:00:00 GMT\r\n");
    assert_eq!(by_date.status, 304);
    assert_eq!(tidegate.get_with("/", "If-None-Match: \"v2\"\r\n").status, 200);
    assert_eq!(origin.count(), 1);
}

#[test]
fn response_that_varies_each_variant_is_stored_apart() {
    let origin = Origin::start(|request| {
        Reply::cacheable(format!("in {}", request.field("Accept-Language"))).with("Vary", "Accept-Language")
    });
    let tidegate = Tidegate::before(&origin);
    for _ in 0..2 {
        assert_eq!(tidegate.get_with("/", "Accept-Language: de\r\n").text(), "in de");
        assert_eq!(tidegate.get_with("/", "Accept-Language: fr\r\n").text(), "in fr");
    }
    assert_eq!(origin.count(), 2);
}

#[test]
fn stored_object_range_request_is_cut_from_it() {
    let body = content(7, 10_000);
    let sent = body.clone();
    let origin = Origin::start(move |_| Reply::cacheable(sent.clone()).with("ETag", "\"r\""));
    let tidegate = Tidegate::before(&origin);
    tidegate.get("/");

    for (range, first, last) in
        [("0-99", 0, 99), ("9990-", 9990, 9999), ("-5", 9995, 9999), ("5-20000", 5, 9999)]
    {
        let part = tidegate.get_with("/", &format!("Range: bytes={range}\r\n"));
        assert_eq!(part.status, 206, "{range}: {part:?}");
        assert_eq!(part.field("Content-Range"), format!("bytes {first}-{last}/10000"));
        assert_eq!(part.body, body[first..=last], "{range}");
    }
    let beyond = tidegate.get_with("/", "Range: bytes=10000-\r\n");
    assert_eq!((beyond.status, beyond.field("Content-Range").as_str()), (416, "bytes */10000"));
    for (tag, status, length) in [("\"r\"", 206, 10), ("\"other\"", 200, 10_000), ("W/\"r\"", 200, 10_000)] {
        let part = tidegate.get_with("/", &format!("Range: bytes=0-9\r\nIf-Range: {tag}\r\n"));
        assert_eq!((part.status, part.body.len()), (status, length), "{tag}");
        assert_eq!(part.body, body[..length], "{tag}");
    }
    assert_eq!(origin.count(), 1);
}

#[test]
fn stored_object_that_says_which_part_it_is_and_is_none_a_part_of_it_says_so_once() {
    let origin = Origin::start(|_| {
        Reply::cacheable("0123456789").with("Content-Range", "bytes 0-9/10").with("ETag", "\"e\"")
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").status, 200);
    let part = tidegate.get_with("/", "Range: bytes=2-4\r\n");
    assert_eq!((part.status, part.text().as_str()), (206, "234"));
    assert_eq!(part.fields.all("Content-Range"), ["bytes 2-4/10"]);
}

/// It had clients that read slowly ended sooner, as if they held the cache.
#[test]
fn response_that_turns_out_too_large_is_no_want_of_room() {
    let body = content(10, 300_000);
    let sent = body.clone();
    let origin = Origin::start(move |_| {
        let sent = sent.clone();
        Reply::script(move |stream| {
            let head = "HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(format!("{head}{:x}\r\n", sent.len()).as_bytes())?;
            stream.write_all(&sent)?;
            stream.write_all(b"\r\n0\r\n\r\n")
        })
    });
    let tidegate = Tidegate::builder().origin(&origin).cache("max_object = \"100KiB\"").start();
    assert!(tidegate.get("/").body == body);
    assert_eq!(tidegate.metric("tidegate_cache_store_failures_total"), 1.0);
    assert!(!tidegate.output().contains("no room"), "{}", tidegate.output());
}

#[test]
fn stored_object_head_request_gets_its_head_alone() {
    let origin = Origin::counting(&[("Cache-Control", "max-age=60")]);
    let tidegate = Tidegate::before(&origin);
    tidegate.get("/");
    let mut client = tidegate.connect();
    let head = client.request("HEAD", "/", "");
    assert_eq!((head.status, head.field("Content-Length").as_str()), (200, "8"));
    assert!(head.is_hit(), "{head:?}");
    // Nothing follows the head: the next response on the connection is whole.
    assert_eq!(client.get("/").text(), "answer 1");
    assert_eq!(origin.count(), 1);
}

#[test]
fn stale_object_origin_down_is_served_when_it_may() {
    let origin = Origin::start(|request| {
        let may = if request.target == "/may" { ", stale-if-error=600" } else { ", must-revalidate" };
        Reply::ok("kept")
            .with("Cache-Control", &format!("max-age=60{may}"))
            .with("Age", "60")
            .with("ETag", "\"k\"")
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/may").text(), "kept");
    assert_eq!(tidegate.get("/must-not").text(), "kept");
    origin.stop();

    // A browser's reload is no reason to answer with an error instead (RFC 9111 §5.2.1: preferences).
    for asked in ["", "Cache-Control: no-cache\r\n", "Cache-Control: max-age=0\r\n", "Pragma: no-cache\r\n"] {
        let stale = tidegate.connect().request("GET", "/may", asked);
        assert_eq!((stale.status, stale.text().as_str()), (200, "kept"), "{asked}");
    }
    // RFC 9111 §5.2.2.2: disconnected, and not by leave of the origin.
    assert_eq!(tidegate.get("/must-not").status, 504);
    assert_eq!(tidegate.get("/never-seen").status, 502);
}

#[test]
fn stale_while_revalidate_stale_object_is_served_and_fetched_anew() {
    let count = AtomicUsize::new(0);
    let origin = Origin::start(move |_| match count.fetch_add(1, Ordering::SeqCst) {
        0 => {
            Reply::ok("old").with("Cache-Control", "max-age=60, stale-while-revalidate=600").with("Age", "60")
        }
        _ => Reply::cacheable("new"),
    });
    let tidegate = Tidegate::before(&origin);
    tidegate.get("/");
    assert_eq!(tidegate.get("/").text(), "old");
    eventually("the new content is served", || (tidegate.get("/").text() == "new").then_some(()));
    assert_eq!(origin.count(), 2);
}

#[test]
fn waiting_clients_response_may_not_be_shared_each_gets_its_own() {
    let (count, gate) = (AtomicUsize::new(0), Gate::default());
    let may_go = gate.clone();
    let origin = Origin::start(move |_| {
        let number = count.fetch_add(1, Ordering::SeqCst);
        may_go.pass();
        Reply::ok(format!("secret {number}")).with("Cache-Control", "private")
    });
    let tidegate = Tidegate::before(&origin);
    let mut clients: Vec<_> = (0..20).map(|_| tidegate.connect()).collect();
    for client in &mut clients {
        client.send("GET /mine HTTP/1.1\r\nHost: example.org\r\n\r\n");
    }
    // The first one's request is with the origin, and all others wait for its response.
    eventually("the first is asked for", || (origin.count() > 0).then_some(()));
    eventually("all requests are read", || clients.iter().all(Client::is_read).then_some(()));
    assert_eq!(origin.count(), 1, "who waits asks too, or nobody waits");
    gate.open();
    let mut answers: Vec<_> = clients.iter_mut().map(|client| client.response().text()).collect();
    answers.sort();
    answers.dedup();
    assert_eq!(answers.len(), 20, "two clients were given the same private response");
}

#[test]
fn response_that_is_not_200_neither_condition_nor_range_applies_to_it() {
    let gate = Gate::default();
    let may_go = gate.clone();
    // RFC 9110 §13.2.1, §14.2: a server ignores them then, and so does a cache.
    let origin = Origin::start(move |request| {
        let fields =
            "Cache-Control: max-age=60\r\nETag: \"v1\"\r\nLast-Modified: Sat, 01 Jan 2022 00:00:00 GMT\r\n";
        let (target, gate) = (request.target.clone(), may_go.clone());
        let status = target[1..4].to_owned();
        Reply::script(move |stream| {
            write!(stream, "HTTP/1.1 {status} Text\r\n{fields}Content-Length: 10\r\n\r\n01234")?;
            if target.ends_with("slow") {
                gate.pass();
            }
            stream.write_all(b"56789")
        })
    });
    let tidegate = Tidegate::before(&origin);
    let asked = [
        "If-None-Match: \"v1\"\r\n",
        "If-None-Match: *\r\n",
        "If-Modified-Since: Sat, 01 Jan 2022 00:00:00 GMT\r\n",
        "Range: bytes=2-3\r\n",
        "Range: bytes=20-\r\n",
        "Range: bytes=2-3\r\nIf-Range: \"v1\"\r\n",
    ];
    for status in [404, 410] {
        let target = format!("/{status}");
        assert_eq!(tidegate.get(&target).status, status);
        for fields in asked {
            let response = tidegate.get_with(&target, fields);
            assert!(response.is_hit(), "{fields}{response:?}");
            assert_eq!((response.status, response.text().as_str()), (status, "0123456789"), "{fields}");
            assert_eq!(response.fields.get("Content-Range"), None, "{fields}");
        }
        // Nor while it is still coming.
        let mut client = tidegate.connect();
        client.send(format!("GET /{status}/slow HTTP/1.1\r\nHost: example.org\r\n{}\r\n", asked[0]));
        assert_eq!(client.head().0, status);
    }
    gate.open();
}

#[test]
fn only_if_cached_nothing_stored_is_answered_504_without_the_origin() {
    let origin = Origin::counting(&[("Cache-Control", "max-age=60")]);
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get_with("/", "Cache-Control: only-if-cached\r\n").status, 504);
    assert_eq!(origin.count(), 0);
}

#[test]
fn urls_that_are_the_same_once_normalized_share_an_object() {
    let origin = Origin::counting(&[("Cache-Control", "max-age=60")]);
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/a/%7Euser/x").text(), "answer 1");
    assert_eq!(tidegate.get("/a/./b/../~user/x").text(), "answer 1");
    let mut client = tidegate.connect();
    client.send("GET /a/~user/x HTTP/1.1\r\nHost: EXAMPLE.org\r\n\r\n");
    assert_eq!(client.response().text(), "answer 1");
    assert_eq!(tidegate.get("/a/~user/x?").text(), "answer 2");
}

#[test]
fn response_that_must_be_validated_waiting_clients_ask_side_by_side() {
    let barrier = Arc::new(Barrier::new(4));
    let all_here = Arc::clone(&barrier);
    let primed = std::sync::atomic::AtomicBool::new(false);
    let origin = Origin::start(move |_| {
        if primed.swap(true, Ordering::SeqCst) {
            // Passes only if four requests are here at once.
            all_here.wait();
        }
        Reply::ok("page").with("ETag", "\"v1\"").with("Cache-Control", "no-cache")
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").text(), "page");
    let address = tidegate.address();
    let clients: Vec<_> =
        (0..4).map(|_| std::thread::spawn(move || Client::connect(address).get("/").text())).collect();
    for client in clients {
        assert_eq!(client.join().unwrap(), "page");
    }
    assert_eq!(origin.count(), 5);
}

#[test]
fn not_modified_that_brings_vary_other_variants_are_asked_for() {
    let origin = Origin::start(|request| {
        let language = request.field("Accept-Language");
        if request.field("If-None-Match") == "\"v1\"" {
            let reply = Reply::status(304, "").with("ETag", "\"v1\"").with("Vary", "Accept-Language");
            return reply.with("Cache-Control", "max-age=60");
        }
        let reply = Reply::ok(format!("in {language}")).with("ETag", "\"v1\"");
        reply.with("Cache-Control", "max-age=60").with("Age", "60")
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get_with("/", "Accept-Language: de\r\n").text(), "in de");
    // The 304 says that the language matters.
    assert_eq!(tidegate.get_with("/", "Accept-Language: de\r\n").text(), "in de");
    assert_eq!(tidegate.get_with("/", "Accept-Language: fr\r\n").text(), "in fr");
}

#[test]
fn response_varies_by_what_we_write_ourselves_it_is_not_stored() {
    let origin = Origin::start(|request| {
        Reply::cacheable(request.field("X-Forwarded-For")).with("Vary", "X-Forwarded-For")
    });
    let tidegate = Tidegate::before(&origin);
    tidegate.get("/");
    assert!(!tidegate.get("/").is_hit());
}

#[test]
fn unasked_304_is_a_bad_gateway() {
    let origin = Origin::start(|_| Reply::status(304, "").with("ETag", "\"v1\""));
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").status, 502);
}

#[test]
fn get_with_an_empty_body_is_answered_from_the_cache() {
    let origin = Origin::counting(&[("Cache-Control", "max-age=60")]);
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get_with("/", "Content-Length: 0\r\n").text(), "answer 1");
    assert_eq!(tidegate.get_with("/", "Content-Length: 0\r\n").text(), "answer 1");
}

#[test]
fn scheme_and_host_that_a_trusted_proxy_names_are_part_of_the_key() {
    let origin = Origin::start(|request| {
        Reply::cacheable(format!(
            "{} {}",
            request.field("X-Forwarded-Proto"),
            request.field("X-Forwarded-Host")
        ))
    });
    let tidegate = Tidegate::builder().origin(&origin).top("trusted_proxies = [\"127.0.0.0/8\"]").start();
    for _ in 0..2 {
        assert_eq!(tidegate.get("/").text(), "http example.org");
        assert_eq!(tidegate.get_with("/", "X-Forwarded-Proto: https\r\n").text(), "https example.org");
        assert_eq!(tidegate.get_with("/", "X-Forwarded-Host: b.example\r\n").text(), "http b.example");
    }
    assert_eq!(origin.count(), 3);
    let purged = tidegate.command(&["cache", "purge", "https://example.org/"]);
    assert!(String::from_utf8_lossy(&purged.stdout).contains('1'), "{purged:?}");
    tidegate.get_with("/", "X-Forwarded-Proto: https\r\n");
    assert_eq!(origin.count(), 4);
}

#[test]
fn head_or_condition_while_stale_may_be_served_the_object_stays_what_it_is() {
    let origin = Origin::start(|request| {
        if !request.field("If-Match").is_empty() {
            return Reply::status(412, "").with("Cache-Control", "max-age=60");
        }
        // Stale on arrival, for a minute.
        let reply = Reply::ok("page").with("Cache-Control", "max-age=60, stale-while-revalidate=60");
        reply.with("Age", "60")
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").text(), "page");
    assert_eq!(tidegate.connect().request("HEAD", "/", "").status, 200);
    tidegate.get_with("/", "If-Match: \"old\"\r\n");
    for _ in 0..10 {
        assert_eq!(tidegate.get("/").text(), "page");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn part_or_head_that_is_served_stale_has_the_whole_validated() {
    for (method, fields) in [("GET", "Range: bytes=0-2\r\n"), ("HEAD", "")] {
        let origin = Origin::start(|request| match request.field("If-None-Match").as_str() {
            // Stale on arrival, for long.
            "" => Reply::ok("old")
                .with("ETag", "\"v1\"")
                .with("Cache-Control", "max-age=60, stale-while-revalidate=600")
                .with("Age", "60"),
            _ => Reply::cacheable("new"),
        });
        let tidegate = Tidegate::before(&origin);
        assert_eq!(tidegate.get("/").text(), "old");
        let stale = tidegate.connect().request(method, "/", fields);
        assert!(stale.is_hit() && [200, 206].contains(&stale.status), "{stale:?}");
        eventually("the origin is asked", || (origin.count() == 2).then_some(()));
        let asked = origin.last();
        assert_eq!((asked.method.as_str(), asked.field("Range").as_str()), ("GET", ""));
        eventually("it is stored", || (tidegate.get("/").text() == "new").then_some(()));
        assert_eq!(origin.count(), 2);
    }
}

#[test]
fn not_modified_that_names_another_tag_the_whole_is_asked_for() {
    let origin = Origin::start(|request| {
        if request.field("If-None-Match").is_empty() {
            let reply = Reply::ok(format!("asked {}", request.field("User-Agent"))).with("ETag", "\"v1\"");
            return reply.with("Cache-Control", "max-age=60").with("Age", "60");
        }
        Reply::status(304, "").with("ETag", "\"v2\"")
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get_with("/", "User-Agent: one\r\n").text(), "asked one");
    assert_eq!(tidegate.get_with("/", "User-Agent: two\r\n").text(), "asked two");
}

#[test]
fn request_for_a_part_does_not_fill_the_cache() {
    let origin = Origin::start(|request| {
        if request.field("Range").is_empty() && request.field("If-Unmodified-Since").is_empty() {
            return Reply::cacheable("the whole");
        }
        Reply::status(200, "a part").with("Cache-Control", "max-age=60")
    });
    let tidegate = Tidegate::before(&origin);
    tidegate.get_with("/", "Range: bytes=0-3\r\n");
    tidegate.get_with("/", "If-Unmodified-Since: Sat, 01 Jan 2022 00:00:00 GMT\r\n");
    assert_eq!(tidegate.get("/").text(), "the whole");
}

#[test]
fn field_that_connection_removes_selects_no_variant() {
    let origin = Origin::start(|request| {
        Reply::cacheable(format!("rsc {}", request.fields.get("RSC").is_some())).with("Vary", "RSC")
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get_with("/", "RSC: 1\r\nConnection: RSC\r\n").text(), "rsc false");
    assert_eq!(tidegate.get_with("/", "RSC: 1\r\n").text(), "rsc true");
    assert_eq!(tidegate.get_with("/", "RSC: 1,\r\n").text(), "rsc true");
    assert_eq!(tidegate.get("/").text(), "rsc false");
    assert_eq!(origin.count(), 3, "{:?}", origin.requests());
}

/// As CGI and its heirs do, the origin takes an underscore for a hyphen.
#[test]
fn field_that_servers_take_for_one_that_selects_poisons_no_variant() {
    let origin = Origin::start(|request| {
        let tenant = request.field("X-Tenant") + &request.field("X_Tenant");
        Reply::cacheable(format!("for {tenant}")).with("Vary", "X-Tenant")
    });
    let tidegate = Tidegate::before(&origin);
    for _ in 0..2 {
        assert_eq!(tidegate.get_with("/", "X_Tenant: evil\r\n").text(), "for evil");
    }
    assert_eq!(tidegate.get("/").text(), "for ");
    assert!(tidegate.get("/").is_hit(), "others are answered from the cache all the same");
    assert_eq!(tidegate.get_with("/", "X_Tenant: evil\r\n").text(), "for ");
    // Nor is one taken away: that the answer to a HEAD has another length says nothing of it.
    tidegate.connect().request("HEAD", "/", "X_Tenant: evil\r\nCache-Control: no-cache\r\n");
    assert!(tidegate.get("/").is_hit());
    assert_eq!(tidegate.get_with("/", "X-Tenant: a\r\n").text(), "for a");
    assert_eq!(origin.count(), 5, "{:?}", origin.requests());
}

#[test]
fn what_a_trusted_proxy_says_of_the_url_is_part_of_the_key() {
    let origin = Origin::start(|request| {
        Reply::cacheable(format!("{} {}", request.field("X-Forwarded-Host"), request.field("X-Original-URL")))
    });
    let tidegate = Tidegate::builder().origin(&origin).top("trusted_proxies = [\"127.0.0.0/8\"]").start();
    let get = |fields: &str| tidegate.get_with("/", fields).text().trim().to_owned();
    for _ in 0..2 {
        assert_eq!(get("X-Forwarded-Host: evil\r\nX-Forwarded-Host: h\r\n"), "h");
        assert_eq!(get("X-Forwarded-Host: h\r\n"), "h");
        assert_eq!(get("X-Forwarded-Host: h\r\nX-Original-URL: /evil\r\n"), "h /evil");
        assert_eq!(get("X-Forwarded-Host: evil\r\n"), "evil");
        assert_eq!(get("X_Original_URL: /evil\r\nX-Forwarded-Host: h\r\n"), "h");
    }
    // The field with underscores is one of its own, and keyed like the others.
    assert_eq!(origin.count(), 4, "{:?}", origin.requests());
}

#[test]
fn if_range_by_a_date_holds_only_if_the_response_came_later_than_that() {
    let date = "Sun, 06 Nov 1994 08:49:37 GMT";
    let origin = Origin::start(move |request| {
        let modified = if request.target == "/weak" { date } else { "Sun, 06 Nov 1994 08:49:36 GMT" };
        Reply::ok("0123456789")
            .with("Date", date)
            .with("Last-Modified", modified)
            .with("Cache-Control", "max-age=3600000000")
    });
    let tidegate = Tidegate::before(&origin);
    for (target, modified, status) in
        [("/weak", date, 200), ("/strong", "Sun, 06 Nov 1994 08:49:36 GMT", 206), ("/strong", date, 200)]
    {
        assert_eq!(tidegate.get(target).status, 200);
        let part = tidegate.get_with(target, &format!("Range: bytes=2-3\r\nIf-Range: {modified}\r\n"));
        assert_eq!(part.status, status, "{target} {modified}");
        assert_eq!(part.text(), if status == 206 { "23" } else { "0123456789" });
    }
}

#[test]
fn a_204_has_no_length_when_it_comes_and_when_it_is_stored() {
    let origin = Origin::start(|_| {
        Reply::Raw(
            b"HTTP/1.1 204 No Content\r\nCache-Control: max-age=60\r\nContent-Length: 6\r\n\r\n".to_vec(),
        )
    });
    let tidegate = Tidegate::before(&origin);
    for (method, target) in [("GET", "/"), ("GET", "/"), ("HEAD", "/"), ("HEAD", "/other")] {
        let response = tidegate.connect().request(method, target, "");
        assert_eq!(
            (response.status, response.field("Content-Length")),
            (204, String::new()),
            "{method} {target}"
        );
    }
    assert_eq!(origin.count(), 2);
}

#[test]
fn what_only_the_origin_knows_is_asked_of_it() {
    let origin = Origin::start(|request| match request.field("If-Match").as_str() {
        "\"new\"" => Reply::status(200, "new").with("ETag", "\"new\""),
        "" => Reply::cacheable("old").with("ETag", "\"old\""),
        _ => Reply::status(412, ""),
    });
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/").text(), "old");
    assert_eq!(tidegate.get_with("/", "If-Match: \"new\"\r\n").text(), "new");
    assert_eq!(tidegate.get_with("/", "If-Match: \"old\"\r\n").status, 412);
    let asked = tidegate.get_with("/", "If-Unmodified-Since: Sun, 06 Nov 1994 08:49:37 GMT\r\n");
    assert!(asked.field("Cache-Status").contains("fwd=request"), "{asked:?}");
    assert_eq!(origin.count(), 4);
    assert!(tidegate.get("/").field("Cache-Status").contains("hit"));
}

#[test]
fn clients_that_are_not_heeded_get_what_is_stored_whatever_only_the_origin_knows() {
    let origin = Origin::start(|_| Reply::cacheable("old").with("ETag", "\"old\""));
    let tidegate = Tidegate::builder().origin(&origin).cache("client_directives = false").start();
    assert_eq!(tidegate.get("/").text(), "old");
    for condition in ["If-Match: \"new\"", "If-Unmodified-Since: Sun, 06 Nov 1994 08:49:37 GMT"] {
        assert!(tidegate.get_with("/", &format!("{condition}\r\n")).is_hit(), "{condition}");
    }
    assert_eq!(origin.count(), 1);
}

#[test]
fn of_errors_a_stored_response_stands_in_for_those_of_a_server_that_cannot_answer_now() {
    let primed = Gate::default();
    let is_primed = primed.clone();
    let origin = Origin::start(move |request| match is_primed.is_open() {
        false => Reply::ok("old").with("Cache-Control", "max-age=1, stale-if-error=600"),
        true => Reply::status(request.target[1..].parse().unwrap(), "error"),
    });
    let tidegate = Tidegate::before(&origin);
    let stands_in = [500, 502, 503, 504];
    let statuses = stands_in.into_iter().chain([404, 501, 505, 599]);
    for status in statuses.clone() {
        assert_eq!(tidegate.get(&format!("/{status}")).text(), "old");
    }
    primed.open();
    for status in statuses {
        let target = format!("/{status}");
        eventually("it is stale", || {
            let stored = tidegate.get_with(&target, "Cache-Control: only-if-cached\r\n");
            (stored.status == 504).then_some(())
        });
        let expected = if stands_in.contains(&status) { (200, "old") } else { (status, "error") };
        let answer = tidegate.get(&target);
        assert_eq!((answer.status, answer.text().as_str()), expected);
    }
}

#[test]
fn a_get_for_another_protocol_passes_by_and_not_for_its_methods_sake() {
    let origin = Origin::start(|_| Reply::cacheable("plain"));
    let tidegate = Tidegate::before(&origin);
    let response = tidegate.get_with("/", "Connection: upgrade\r\nUpgrade: chat\r\n");
    assert!(response.field("Cache-Status").contains("fwd=bypass"), "{response:?}");
    let response = tidegate.connect().request("DELETE", "/", "");
    assert!(response.field("Cache-Status").contains("fwd=method"), "{response:?}");
}
