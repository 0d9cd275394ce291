//! What is stored no longer once it is purged or an unsafe request has changed it (RFC 9111 §4.4), responses on their
//! way included.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::Write;

use tidegate_e2e::{Client, Gate, Origin, Reply, Tidegate, eventually};

#[test]
fn successful_unsafe_request_what_is_stored_for_its_url_is_dropped() {
    let origin = Origin::counting(&[("Cache-Control", "max-age=60")]);
    let tidegate = Tidegate::before(&origin);
    assert_eq!(tidegate.get("/doc").text(), "answer 1");
    assert_eq!(tidegate.connect().request("POST", "/doc", "Content-Length: 0\r\n").text(), "answer 2");
    assert_eq!(tidegate.get("/doc").text(), "answer 3");
}

#[test]
fn what_an_unsafe_request_says_it_has_changed_is_dropped_for_both_schemes() {
    let origin = Origin::start(|request| match request.method.as_str() {
        "POST" => Reply::status(201, "")
            .with("Location", "http://example.org/by-location")
            .with("Content-Location", "/by-content-location"),
        _ => Reply::cacheable("content"),
    });
    let tidegate = Tidegate::builder().origin(&origin).top("trusted_proxies = [\"127.0.0.0/8\"]").start();
    let targets = ["/by-location", "/by-content-location", "/other"];
    for (poster, other) in [("http", "https"), ("https", "http")] {
        let get =
            |scheme: &str, target| tidegate.get_with(target, &format!("X-Forwarded-Proto: {scheme}\r\n"));
        let is_hit = |scheme, target| get(scheme, target).is_hit();
        for (scheme, target) in targets.iter().flat_map(|target| [("http", target), ("https", target)]) {
            get(scheme, target);
            assert!(is_hit(scheme, target), "{scheme} {target}");
        }
        let fields = format!("X-Forwarded-Proto: {poster}\r\nContent-Length: 0\r\n");
        assert_eq!(tidegate.connect().request("POST", "/form", &fields).status, 201);
        for scheme in [poster, other] {
            let hits = targets.map(|target| is_hit(scheme, target));
            assert_eq!(hits, [false, false, true], "{scheme} after POST by {poster}");
        }
    }
}

#[test]
fn purge_by_url_prefix_and_tag_drops_just_that() {
    let origin = Origin::start(|request| {
        let tag = if request.target.ends_with("/b") { "odd" } else { "even" };
        Reply::cacheable(request.target.clone()).with("Cache-Tag", tag)
    });
    let tidegate = Tidegate::before(&origin);
    let targets = ["/x/a", "/x/b", "/y/a", "/y/b"];
    let fill = || targets.iter().for_each(|target| drop(tidegate.get(target)));
    let gone =
        || -> Vec<&str> { targets.iter().copied().filter(|target| !tidegate.get(target).is_hit()).collect() };
    for (pattern, expected) in [
        ("http://example.org/x/a", &["/x/a"][..]),
        ("http://example.org/x/*", &["/x/a", "/x/b"]),
        ("tag:odd", &["/x/b", "/y/b"]),
        ("*", &targets),
    ] {
        fill();
        let output = tidegate.command(&["cache", "purge", pattern]);
        assert!(output.status.success(), "{pattern}: {output:?}");
        assert_eq!(gone(), expected, "{pattern}");
    }
}

#[test]
fn purge_while_a_response_is_on_its_way_the_response_is_not_stored() {
    let (entered, gate) = (Gate::default(), Gate::default());
    let (is_here, may_go) = (entered.clone(), gate.clone());
    let origin = Origin::start(move |request| {
        if request.target == "/slow" {
            is_here.open();
            may_go.pass();
        }
        Reply::cacheable("old").with("Content-Type", "text/plain")
    });
    let tidegate = Tidegate::before(&origin);
    let address = tidegate.address();
    let client = std::thread::spawn(move || Client::connect(address).get("/slow").text());
    entered.pass();
    assert!(tidegate.command(&["cache", "purge", "/slow"]).status.success());
    gate.open();
    assert_eq!(client.join().unwrap(), "old");
    assert!(!tidegate.get("/slow").is_hit(), "what was asked for before the purge may be older than it");
}

/// What was looked up before the upstream was asked stood in for it after it had been removed.
#[test]
fn what_is_removed_while_the_upstream_is_asked_does_not_stand_in_for_it() {
    let (primed, gate) = (Gate::default(), Gate::default());
    let (is_primed, may_go) = (primed.clone(), gate.clone());
    let origin = Origin::start(move |request| {
        if request.method == "POST" {
            return Reply::ok("posted");
        }
        if !is_primed.is_open() {
            return Reply::ok("old").with("Cache-Control", "max-age=1, stale-if-error=600");
        }
        may_go.pass();
        Reply::status(503, "failed")
    });
    let tidegate = Tidegate::before(&origin);
    let targets = ["/purged", "/posted", "/kept"];
    for target in targets {
        assert_eq!(tidegate.get(target).text(), "old");
    }
    eventually("all are stale", || {
        let is_stale = |target| tidegate.get_with(target, "Cache-Control: only-if-cached\r\n").status == 504;
        targets.into_iter().all(is_stale).then_some(())
    });
    primed.open();
    let asked = origin.count();
    let clients = targets.map(|target| {
        let mut client = tidegate.connect();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: example.org\r\n\r\n"));
        client
    });
    eventually("all are asked for", || (origin.count() == asked + targets.len()).then_some(()));
    assert!(tidegate.command(&["cache", "purge", "/purged"]).status.success());
    assert_eq!(tidegate.connect().request("POST", "/posted", "Content-Length: 0\r\n").status, 200);
    gate.open();
    let answers = clients.map(|mut client| client.response().text());
    assert_eq!(answers, ["failed", "failed", "old"]);
}

#[test]
fn unsafe_request_while_a_response_is_on_its_way_the_response_is_not_stored() {
    let (entered, gate) = (Gate::default(), Gate::default());
    let (is_here, may_go) = (entered.clone(), gate.clone());
    let origin = Origin::start(move |request| {
        if request.method == "GET" {
            is_here.open();
            may_go.pass();
        }
        Reply::cacheable("old")
    });
    let tidegate = Tidegate::before(&origin);
    let address = tidegate.address();
    let client = std::thread::spawn(move || Client::connect(address).get("/doc").text());
    entered.pass();
    assert_eq!(tidegate.connect().request("POST", "/doc", "Content-Length: 0\r\n").status, 200);
    gate.open();
    client.join().unwrap();
    assert!(!tidegate.get("/doc").is_hit());
}

#[test]
fn what_is_removed_while_its_body_comes_is_not_stored() {
    let gate = Gate::default();
    let may_go = gate.clone();
    let origin = Origin::start(move |request| {
        if request.method != "GET" || may_go.is_open() {
            return Reply::cacheable("new");
        }
        let door = may_go.clone();
        Reply::script(move |stream| {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 3\r\n\r\no")?;
            door.pass();
            stream.write_all(b"ld")
        })
    });
    let tidegate = Tidegate::before(&origin);
    let mut clients: Vec<_> = ["/posted", "/kept"]
        .map(|target| {
            let mut client = tidegate.connect();
            client.send(format!("GET {target} HTTP/1.1\r\nHost: example.org\r\n\r\n"));
            assert_eq!(client.head().0, 200);
            client
        })
        .into();
    assert_eq!(tidegate.connect().request("POST", "/posted", "Content-Length: 0\r\n").status, 200);
    gate.open();
    for client in &mut clients {
        assert_eq!(client.read_bytes(3), b"old");
    }
    for (target, hit) in [("/posted", false), ("/kept", true)] {
        assert_eq!(tidegate.get(target).is_hit(), hit, "{target}");
    }
}
