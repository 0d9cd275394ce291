//! Servers that keep connections for their clients' next requests (`--linger`).
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Chain, Client, Site, exercise, free_port, needs, strs, wait_until};

const CHAIN: &[&str] = &["package", "persist"];
/// Longer than any test: only what a test does ends a stay.
const LONG: &str = "600000";

fn start(filters: &[&str], linger_ms: &str, port: u16, command: &[String]) -> Chain {
    let addresses = [format!("127.0.0.1:{port}")];
    let command = Chain::with_options(&["--linger", linger_ms], &addresses, filters, &strs(command));
    Chain::once_it_serves(command, port)
}

fn nginx(site: &Site, filters: &[&str], linger_ms: &str) -> Chain {
    let port = free_port();
    start(filters, linger_ms, port, &site.nginx(port))
}

/// Ends of connections that nginx has seen: a client that is served without a chain's help ends once.
fn ends(site: &Site) -> usize {
    let log = std::fs::read_to_string(site.path().join("error.log")).unwrap();
    log.matches("closed keepalive connection").count()
}

#[test]
fn a_server_reads_the_next_requests_of_a_connection_itself() {
    for filters in [CHAIN, &["package"]] {
        let site = Site::new();
        let chain = nginx(&site, filters, LONG);
        let mut client = chain.client();
        let mut requests = 0;
        // Where the filters are woken before the server has written down that its response is complete, the request is
        // theirs.
        wait_until("nginx has read 100 requests on connections that it had", || {
            assert_eq!(client.get("/small").body, b"small\n");
            assert!(client.get("/big").body == site.big);
            client.send(b"HEAD /big HTTP/1.1\r\nHost: test\r\n\r\n");
            assert_eq!(client.response(true).field("content-length").unwrap(), "3000000");
            requests += 3;
            requests >= ends(&site) + 100
        });
        chain.stop();
    }
}

#[test]
fn what_is_no_whole_small_request_goes_by_the_filters() {
    let site = Site::new();
    let chain = nginx(&site, &["package=timeout=300ms", "persist=timeout=300ms"], LONG);
    let one = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
    let mut client = chain.client();
    for _ in 0..5 {
        assert_eq!(client.get("/small").body, b"small\n");
        // Pipelined.
        client.send(["/small", "/big", "/missing", "/index.html"].map(one).concat().as_bytes());
        assert_eq!(client.response(false).body, b"small\n");
        assert!(client.response(false).body == site.big);
        assert_eq!(client.response(false).status, 404);
        assert_eq!(client.response(false).body, b"index\n");
        // Dripping.
        for byte in one("/small").as_bytes() {
            client.send(&[*byte]);
        }
        assert_eq!(client.response(false).body, b"small\n");
        // Long.
        let field = "x".repeat(6000);
        client.send(format!("GET /small HTTP/1.1\r\nHost: test\r\nX-Long: {field}\r\n\r\n").as_bytes());
        assert_eq!(client.response(false).body, b"small\n");
        client.send(b"POST /upload HTTP/1.1\r\nHost: test\r\nContent-Length: 3000000\r\n\r\n");
        client.send(&site.big);
        assert_eq!(client.response(false).body, b"3000000");
    }
    // Incomplete: it ends after the filters' time, and the server does not see it.
    assert_eq!(client.get("/small").body, b"small\n");
    client.send(b"GET /never HTTP/1.1\r\nHost:");
    assert!(client.is_ended());
    // Malformed.
    let mut client = chain.client();
    assert_eq!(client.get("/small").body, b"small\n");
    client.send(b"GET / HTTP/1.1\r\nBad Field: x\r\n\r\n");
    assert_eq!(client.response(false).status, 400);
    let log = std::fs::read_to_string(site.path().join("access.log")).unwrap();
    assert!(!log.contains("never") && !log.contains(" 400 "), "{log}");
    chain.stop();
}

#[test]
fn connections_end_as_client_or_server_say() {
    let site = Site::new();
    let chain = nginx(&site, CHAIN, LONG);
    for _ in 0..20 {
        let mut client = chain.client();
        assert_eq!(client.get("/small").body, b"small\n");
        client.send(b"GET /small HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
        assert_eq!(client.response(false).body, b"small\n");
        assert!(client.is_ended());
        let mut client = chain.client();
        assert_eq!(client.get("/small").body, b"small\n");
        client.send(b"GET /small HTTP/1.0\r\n\r\n");
        assert_eq!(client.response(false).body, b"small\n");
        assert!(client.is_ended());
    }
    chain.stop();
}

/// Two workers with 64 connections each: connections that linger must make room.
#[test]
fn idle_clients_do_not_keep_others_out() {
    let site = Site::new();
    let chain = nginx(&site, CHAIN, "100");
    let mut clients: Vec<Client> = (0..300).map(|_| chain.client()).collect();
    for _ in 0..3 {
        for client in &mut clients {
            assert_eq!(client.get("/small").body, b"small\n");
        }
    }
    chain.stop();
}

/// What a server does not end by itself, the filters do: it sleeps, and its clients come back later.
#[test]
fn a_stay_ends_with_its_time() {
    let site = Site::new();
    let chain = nginx(&site, CHAIN, "50");
    let mut client = chain.client();
    for _ in 0..4 {
        assert_eq!(client.get("/small").body, b"small\n");
        // Longer than the stay, and than the filters wait for the server.
        std::thread::sleep(std::time::Duration::from_millis(1200));
    }
    assert_eq!(client.get("/small").body, b"small\n");
    chain.stop();
}

#[test]
fn a_server_that_forks_for_a_program_while_others_linger() {
    needs("lighttpd", "lighttpd");
    let (site, port) = (Site::with_cgi(), free_port());
    let file = site.configuration("lighttpd.conf", port, common::LIGHTTPD);
    let chain = start(CHAIN, LONG, port, &["lighttpd", "-D", "-f", &file].map(str::to_owned));
    exercise(&chain, &site);
    chain.stop();
}

#[test]
fn no_client_notices_a_filter_that_dies() {
    let site = Site::new();
    let chain = nginx(&site, CHAIN, LONG);
    let (stop, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let mut client = chain.client();
            assert_eq!(client.get("/small").body, b"small\n");
            let (stop, answers) = (&stop, &answers);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(client.get("/small").body, b"small\n");
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let more = |count: u64| {
            let from = answers.load(Ordering::Relaxed);
            wait_until("clients are answered", || answers.load(Ordering::Relaxed) >= from + count);
        };
        // `package` last: what it had handed on lives in `persist` alone afterwards.
        for filter in ["cc-persist", "cc-persist", "cc-persist", "cc-package"] {
            more(200);
            let process = chain.process(filter);
            // SAFETY: a signal to a process that this test started.
            unsafe { libc::kill(process, libc::SIGKILL) };
            wait_until("the filter is back", || {
                chain.processes(filter).first().is_some_and(|now| *now != process)
            });
        }
        more(200);
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(chain.get("/small").body, b"small\n");
    chain.stop();
}

#[test]
fn a_chain_whose_filters_want_to_see_each_request_is_refused() {
    let site = Site::new();
    let port = free_port();
    let words = site.nginx(port);
    let addresses = [format!("127.0.0.1:{port}")];
    let filters = ["package", "persist", "normalize"];
    let output =
        Chain::with_options(&["--linger", "1000"], &addresses, &filters, &strs(&words)).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("normalize would not see every request"), "{said}");
}
