//! An unmodified nginx behind a chain.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Chain, Client, Site, free_port, strs, wait_until};

const CHAIN: &[&str] = &["package", "persist", "normalize", "prior"];

fn start(site: &Site, filters: &[&str]) -> Chain {
    let port = free_port();
    Chain::start(port, filters, &strs(&site.nginx(port)))
}

#[test]
fn a_persistent_connection_is_served_request_by_request_and_the_client_notices_nothing() {
    let site = Site::new();
    let chain = start(&site, CHAIN);
    let mut client = chain.client();
    for _ in 0..50 {
        let response = client.get("/small");
        assert_eq!((response.status, &response.body[..]), (200, &b"small\n"[..]));
        assert_eq!(response.field("connection").as_deref(), Some("keep-alive"));
        assert_eq!(response.field("x-peer").as_deref(), Some("127.0.0.1"));
    }
    chain.stop();
    // nginx itself saw a connection for each request; the last one may have been cut short by its end.
    let log = std::fs::read_to_string(site.path().join("error.log")).unwrap();
    assert!(log.matches("closed keepalive connection").count() >= 45, "{log}");
    let complaints: Vec<_> =
        log.lines().filter(|line| line.contains("[alert]") || line.contains("[crit]")).collect();
    assert_eq!(complaints, [""; 0]);
}

#[test]
fn idle_connections_cost_the_server_nothing() {
    let site = Site::new();
    let chain = start(&site, CHAIN);
    // More than nginx has connections for: 2 workers with 64 each.
    let mut clients: Vec<Client> = (0..300).map(|_| chain.client()).collect();
    for client in &mut clients {
        assert_eq!(client.get("/small").status, 200);
    }
    for client in &mut clients {
        assert_eq!(client.get("/small").body, b"small\n");
    }
}

#[test]
fn files_of_any_size_arrive_whole_and_head_has_no_content() {
    let site = Site::new();
    let chain = start(&site, CHAIN);
    let mut client = chain.client();
    for _ in 0..3 {
        assert!(client.get("/big").body == site.big);
        client.send(b"HEAD /big HTTP/1.1\r\nHost: test\r\n\r\n");
        assert_eq!(client.response(true).field("content-length").unwrap(), "3000000");
        assert_eq!(client.get("/missing").status, 404);
    }
}

/// It answers as soon as it has the head: the connection goes on where all of the upload is there, and ends where it is
/// not, which the client is told, and may send the rest of it or not.
#[test]
fn an_upload_is_read_to_its_end() {
    let site = Site::new();
    let chain = start(&site, CHAIN);
    let mut client = chain.client();
    for _ in 0..3 {
        let head = "POST /upload HTTP/1.1\r\nHost: test\r\nContent-Length: 16000\r\n\r\n";
        client.send(&[head.as_bytes(), &site.big[..16_000]].concat());
        let response = client.response(false);
        assert_eq!((response.status, &response.body[..]), (200, &b"16000"[..]));
        assert_eq!(response.field("connection"), None);
        client.send(
            b"POST /upload HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        );
        assert_eq!(client.response(false).status, 200);
        let mut other = chain.client();
        let head = "POST /upload HTTP/1.1\r\nHost: test\r\nContent-Length: 3000000\r\n\r\n";
        other.send(&[head.as_bytes(), &site.big[..20_000]].concat());
        let response = other.response(false);
        assert_eq!((response.status, &response.body[..]), (200, &b"3000000"[..]));
        assert_eq!(response.field("connection").as_deref(), Some("close"));
        other.send(&site.big[20_000..]);
        assert!(other.is_ended());
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let site = Site::new();
    let chain = start(&site, CHAIN);
    let mut client = chain.client();
    let one = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
    let paths = ["/small", "/big", "/missing", "/index.html", "/small"];
    client.send(paths.map(one).concat().as_bytes());
    let responses = paths.map(|_| client.response(false));
    assert_eq!(responses.each_ref().map(|r| r.status), [200, 200, 404, 200, 200]);
    assert!(responses[1].body == site.big && responses[3].body == b"index\n");
}

#[test]
fn a_response_that_ends_the_connection_arrives_whole_although_more_requests_were_sent() {
    let site = Site::new();
    let chain = start(&site, CHAIN);
    for _ in 0..20 {
        let mut client = chain.client();
        let last = "GET /big HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";
        client.send(format!("{last}{}", "GET /small HTTP/1.1\r\nHost: test\r\n\r\n".repeat(5)).as_bytes());
        assert!(client.response(false).body == site.big);
        assert!(client.is_ended());
    }
}

#[test]
fn a_request_that_drips_in_is_served_when_it_is_whole() {
    let site = Site::new();
    let chain = start(&site, CHAIN);
    let mut client = chain.client();
    for byte in b"GET /small HTTP/1.1\r\nHost: test\r\n\r\n" {
        client.send(&[*byte]);
    }
    assert_eq!(client.response(false).body, b"small\n");
}

#[test]
fn an_incomplete_request_of_which_no_more_comes_is_not_looked_at_again() {
    for filters in [&["package=timeout=120s", "persist"][..], &["package=timeout=120s"]] {
        let site = Site::new();
        let chain = start(&site, filters);
        let mut client = chain.client();
        for byte in b"GET /small HTTP/1.1\r\nHost: te" {
            client.send(&[*byte]);
        }
        let package = chain.process("cc-package");
        let switches = || {
            let status = std::fs::read_to_string(format!("/proc/{package}/status")).unwrap();
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap();
            line.to_owned()
        };
        // Its clock ticks once a second; between two ticks, nothing wakes it.
        wait_until("package sleeps", || {
            let before = switches();
            std::thread::sleep(Duration::from_millis(400));
            switches() == before
        });
        client.send(b"st\r\n\r\n");
        assert_eq!(client.response(false).body, b"small\n");
        assert_eq!(client.get("/small").body, b"small\n");
    }
}

#[test]
fn a_client_that_ends_its_side_within_a_request_is_not_waited_for() {
    let site = Site::new();
    let chain = start(&site, &["package=timeout=120s", "persist=timeout=120s"]);
    for served_before in [false, true] {
        let mut client = chain.client();
        if served_before {
            assert_eq!(client.get("/small").body, b"small\n");
        }
        client.send(b"GET /small HTTP/1.1\r\nHost:");
        client.stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(client.is_ended());
    }
    let mut client = chain.client();
    client.send(b"GET /small HTTP/1.1\r\nHost: test\r\n\r\n");
    client.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(client.response(false).body, b"small\n");
}

#[test]
fn a_rewritten_request_is_what_the_server_reads() {
    let site = Site::new();
    let chain = start(&site, CHAIN);
    let mut client = chain.client();
    for _ in 0..3 {
        let slashes = "/".repeat(5000);
        assert_eq!(client.get(&format!("{slashes}a/../small")).body, b"small\n");
        assert_eq!(client.get("/%73mall").body, b"small\n");
    }
    let log = std::fs::read_to_string(site.path().join("access.log")).unwrap();
    assert!(!log.contains("//") && log.contains("GET /small "), "{log}");
}

#[test]
fn connection_close_and_http_1_0_end_with_the_response() {
    let site = Site::new();
    let chain = start(&site, CHAIN);
    for request in
        ["GET /small HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n", "GET /small HTTP/1.0\r\n\r\n"]
    {
        let mut client = chain.client();
        client.send(request.as_bytes());
        assert_eq!(client.response(false).body, b"small\n");
        assert!(client.is_ended());
    }
    let mut client = chain.client();
    client.send(b"GET / HTTP/1.1\r\nBad Field: x\r\n\r\n");
    assert_eq!(client.response(false).status, 400);
    assert!(client.is_ended());
}

#[test]
fn a_chain_without_persist_keeps_connections_all_the_same_unless_told_not_to() {
    let site = Site::new();
    let chain = start(&site, &["package", "normalize"]);
    let mut client = chain.client();
    for _ in 0..10 {
        assert_eq!(client.get("//small").body, b"small\n");
    }
    let site = Site::new();
    let chain = start(&site, &["package=keep=no"]);
    let mut client = chain.client();
    assert_eq!(client.get("/small").body, b"small\n");
    assert!(client.is_ended());
}

#[test]
fn incomplete_requests_end_after_their_time_and_never_reach_the_server() {
    let site = Site::new();
    let chain = start(&site, &["package=timeout=300ms", "persist", "prior"]);
    let mut incomplete: Vec<Client> = (0..200).map(|_| chain.client()).collect();
    for client in &mut incomplete {
        client.send(b"GET /small HTTP/1.1\r\nHost:");
    }
    assert_eq!(chain.get("/small").status, 200);
    for client in &mut incomplete {
        assert!(client.is_ended());
    }
    let log = std::fs::read_to_string(site.path().join("access.log")).unwrap();
    assert!(!log.contains(" 400 ") && !log.contains(" 408 "), "{log}");
}

#[test]
fn out_of_room_incomplete_connections_of_the_heaviest_range_end_first() {
    let site = Site::new();
    let chain = start(&site, &["package=connections=50", "prior"]);
    let connect_from = |source: [u8; 4]| {
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)
                .unwrap();
        rustix::net::bind(&socket, &std::net::SocketAddr::from((source, 0))).unwrap();
        rustix::net::connect(&socket, &chain.address).unwrap();
        std::net::TcpStream::from(socket)
    };
    let good = connect_from([127, 200, 0, 1]);
    let attack: Vec<_> = (0..120u8).map(|i| connect_from([127, 9, 0, i])).collect();
    // The one that came first is still there: it belongs to a range with one connection.
    let mut good = Client::over(good);
    assert_eq!(good.get("/small").body, b"small\n");
    drop(attack);
}

#[test]
fn clients_that_abort_leave_nothing_behind() {
    let site = Site::new();
    let chain = start(&site, CHAIN);
    for _ in 0..100 {
        let mut client = chain.client();
        client.send(b"GET /big HTTP/1.1\r\nHost: test\r\n\r\n");
    }
    assert_eq!(chain.get("/small").status, 200);
    for filter in ["cc-package", "cc-persist", "cc-prior"] {
        let pid = chain.process(filter);
        wait_until("no socket is left in a filter", || tcp_sockets(pid) <= 1);
    }
}

/// Sockets that are not Unix-domain ones: open descriptors, less what every filter has.
fn tcp_sockets(pid: i32) -> usize {
    let unix = std::fs::read_to_string(format!("/proc/{pid}/net/unix")).unwrap();
    let unix: std::collections::HashSet<&str> =
        unix.lines().filter_map(|line| line.split_whitespace().nth(6)).collect();
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten()
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .filter(|target| {
            let target = target.to_string_lossy();
            target.strip_prefix("socket:[").is_some_and(|inode| !unix.contains(inode.trim_end_matches(']')))
        })
        .count()
}

#[test]
fn a_worker_that_dies_takes_its_clients_connections_with_it() {
    let site = Site::new();
    let chain = start(&site, CHAIN);
    let mut client = chain.client();
    client.send(b"POST /upload HTTP/1.1\r\nHost: test\r\nContent-Length: 3000000\r\n\r\n");
    client.send(&site.big[..20_000]);
    // The worker answers before it has read everything, and waits for the rest.
    assert_eq!(client.response(false).status, 200);
    wait_until("nginx has its workers", || chain.processes("nginx: worker").len() == 2);
    for pid in chain.processes("nginx: worker") {
        // SAFETY: a signal to a process that this test started.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    assert!(client.is_ended());
    assert_eq!(chain.get("/small").status, 200, "nginx has new workers");
}
