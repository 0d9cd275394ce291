//! What arrives in shapes that an edge-triggered event loop could lose: more than one read takes, exactly as much as
//! one read takes, an end together with the last request, and from many clients at once.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use rustix::process::Signal;
use tidegate_e2e::{Client, Gate, Origin, Reply, Tidegate, eventually};

/// Bytes that tidegate reads at once.
const READ_BYTES: usize = 64 * 1024;

/// A server whose cache answers `/a` with one byte.
fn site() -> (Origin, Tidegate) {
    site_with("")
}

/// As [`site`], with these lines before the first table.
fn site_with(lines: &str) -> (Origin, Tidegate) {
    let origin = Origin::start(|request| match request.target.as_str() {
        "/a" | "/a?other" => Reply::cacheable("a"),
        _ => Reply::ok("b"),
    });
    let server = Tidegate::builder().origin(&origin).top(lines).start();
    assert_eq!(Client::connect(server.address()).get("/a").status, 200);
    (origin, server)
}

/// Sends `bytes` and the end of input while it reads; counts the 200s that come back.
fn answers_to(server: &Tidegate, bytes: &[u8]) -> usize {
    let stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut answers = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (&stream).write_all(bytes).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        (&stream).read_to_end(&mut answers).unwrap();
    });
    answers.windows(12).filter(|window| *window == b"HTTP/1.1 200").count()
}

/// A request for `target` of exactly `length` bytes.
fn request_of(target: &str, length: usize) -> Vec<u8> {
    let start = format!("GET {target} HTTP/1.1\r\nHost: a\r\nX: ");
    let padding = "x".repeat(length - start.len() - 4);
    format!("{start}{padding}\r\n\r\n").into_bytes()
}

#[test]
fn requests_of_many_reads_in_one_burst_all_are_answered() {
    let (_origin, server) = site();
    let burst = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n".repeat(40_000);
    assert!(burst.len() > 16 * READ_BYTES);
    assert_eq!(answers_to(&server, &burst), 40_000);
}

#[test]
fn requests_that_fill_a_read_exactly_are_answered_and_so_is_what_follows() {
    let (_origin, server) = site();
    let eighth = request_of("/a", READ_BYTES / 8);
    for reads in [1, 2, 4, 5] {
        assert_eq!(answers_to(&server, &eighth.repeat(8 * reads)), 8 * reads, "{reads} reads");
    }
    let mut client = Client::connect(server.address());
    client.send(eighth.repeat(8));
    for _ in 0..8 {
        assert_eq!(client.response().status, 200);
    }
    assert_eq!(client.get("/a").status, 200);
}

#[test]
fn misses_and_hits_in_one_burst_come_in_order() {
    let (_origin, server) = site();
    let mut client = Client::connect(server.address());
    let targets: Vec<_> = (0..200).map(|index| if index % 3 == 0 { "/b" } else { "/a" }).collect();
    let burst: String =
        targets.iter().map(|target| format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n")).collect();
    client.send(burst);
    for target in targets {
        assert_eq!(client.response().text(), &target[1..]);
    }
}

#[test]
fn request_that_arrives_while_another_is_answered_is_answered_next() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |request| match request.target.as_str() {
        "/slow" => {
            held.pass();
            Reply::ok("slow")
        }
        _ => Reply::ok("fast"),
    });
    let server = Tidegate::before(&origin);
    let mut client = Client::connect(server.address());
    client.send("GET /slow HTTP/1.1\r\nHost: a\r\n\r\n");
    // The origin has it, so that what follows arrives while the answer is awaited.
    eventually("the origin is asked", || (origin.count() == 1).then_some(()));
    client.send("GET /fast HTTP/1.1\r\nHost: a\r\n\r\n");
    gate.open();
    assert_eq!(client.response().text(), "slow");
    assert_eq!(client.response().text(), "fast");
}

/// Answers that a client with `flood` in the kernel's buffers gets before another one's only request is answered, which
/// came after all of that; and the bytes that the kernel took.
fn answered_before_another(flood: &[u8]) -> (usize, usize) {
    let log = "workers = 1\n[log]\naccess = \"@DIR@/access.log\"";
    let (_origin, server) = site_with(log);
    let mut other = Client::connect(server.address());
    assert_eq!(other.get("/a?other").status, 200);
    let mut eager = Client::connect(server.address());
    // So much goes to and fro first that the windows grow.
    for _ in 0..4 {
        eager.send(request_of("/a", READ_BYTES / 2).repeat(8));
        (0..8).for_each(|_| assert_eq!(eager.response().status, 200));
    }
    server.stop();
    eager.stream().set_nonblocking(true).unwrap();
    let mut sent = 0;
    while let Ok(length @ 1..) = eager.stream().write(&flood[sent..]) {
        sent += length;
    }
    other.send("GET /a?other HTTP/1.1\r\nHost: example.org\r\n\r\n");
    server.signal(Signal::CONT);
    assert_eq!(other.response().status, 200);
    let log = || std::fs::read_to_string(server.directory().join("access.log")).unwrap_or_default();
    let others = |log: &str| {
        log.lines().enumerate().filter(|(_, line)| line.contains("/a?other")).map(|(at, _)| at).collect()
    };
    let others: Vec<usize> = eventually("both requests are logged", || {
        Some(others(&log())).filter(|others: &Vec<_>| others.len() == 2)
    });
    (others[1] - others[0] - 1 - 4 * 8, sent)
}

#[test]
fn client_that_pipelines_without_end_does_not_starve_others() {
    let (before, sent) = answered_before_another(&b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n".repeat(20_000));
    assert!(sent > READ_BYTES / 2, "only {sent} bytes of a flood");
    assert!(before <= 2 * 64, "{before} requests of one client before another's first");
}

#[test]
fn client_that_sends_without_end_does_not_starve_others() {
    let (before, sent) = answered_before_another(&request_of("/a", READ_BYTES / 8).repeat(200));
    assert!(sent > 8 * READ_BYTES, "only {sent} bytes of a flood");
    assert!(before <= 2 * 4 * 8, "{before} requests of one client before another's first");
}

#[test]
fn client_that_reads_late_gets_all_it_asked_for() {
    let origin = Origin::start(|_| Reply::cacheable(vec![b'x'; 3_000_000]));
    let server = Tidegate::before(&origin);
    assert_eq!(Client::connect(server.address()).get("/").body.len(), 3_000_000);
    let mut client = Client::connect(server.address());
    client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".repeat(5));
    // Every buffer on the way is full once nothing more arrives.
    let (mut last, mut unchanged) = (0, 0);
    eventually("the server is held back", || {
        let now = client.unread();
        unchanged = if now == last && now > 0 { unchanged + 1 } else { 0 };
        last = now;
        (unchanged >= 10).then_some(())
    });
    for _ in 0..5 {
        assert_eq!(client.response().body.len(), 3_000_000);
    }
}

/// Pipelines requests behind a head that has made the receive window grow, and never stops.
fn pipeline_without_end(server: &Tidegate) -> (TcpStream, std::thread::JoinHandle<()>) {
    let stream = TcpStream::connect(server.address()).unwrap();
    let mut reader = stream.try_clone().unwrap();
    let mut writer = stream.try_clone().unwrap();
    let handle = std::thread::spawn(move || {
        let reading = std::thread::spawn(move || {
            let mut buffer = vec![0; READ_BYTES];
            while reader.read(&mut buffer).is_ok_and(|length| length > 0) {}
        });
        let large = request_of("/a", 60_000).repeat(20);
        let burst = b"HEAD /a HTTP/1.1\r\nHost: a\r\n\r\n".repeat(20_000);
        let _ = writer.write_all(&large);
        while writer.write_all(&burst).is_ok() {}
        reading.join().unwrap();
    });
    (stream, handle)
}

#[test]
fn clients_that_pipelined_without_end_and_left_hold_no_descriptor() {
    // One core keeps one connection to the origin, before and after.
    let (_origin, server) = site_with("workers = 1");
    let sockets = || {
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
        let links = descriptors.filter_map(|descriptor| std::fs::read_link(descriptor.ok()?.path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
    };
    eventually("the first client is gone", || {
        (server.metric("tidegate_connections_open") == 0.0).then_some(())
    });
    let before = sockets();
    for _ in 0..8 {
        let (stream, handle) = pipeline_without_end(&server);
        for _ in 0..20 {
            assert_eq!(Client::connect(server.address()).get("/a").status, 200);
        }
        stream.shutdown(Shutdown::Both).unwrap();
        handle.join().unwrap();
    }
    eventually("the sockets are closed", || (sockets() <= before).then_some(()));
}

#[test]
fn last_response_reaches_a_client_that_goes_on_sending() {
    let (_origin, server) = site();
    for _ in 0..20 {
        let mut client = Client::connect(server.address());
        let mut burst = b"GET /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".to_vec();
        burst.extend_from_slice(&b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n".repeat(20_000));
        client.send(burst);
        let rest = client.rest();
        assert_eq!(rest.windows(12).filter(|window| *window == b"HTTP/1.1 200").count(), 1);
    }
}

#[test]
fn tunnel_whose_server_ignores_its_end_is_gone_after_the_timeout() {
    let origin = Origin::start(|_| {
        Reply::script(|stream| {
            stream.write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
            )?;
            // Reads the end of the tunnel and stays for as long as the test lasts.
            let mut buffer = [0; 1024];
            while stream.read(&mut buffer)? > 0 {}
            loop {
                std::thread::park();
            }
        })
    });
    let server = Tidegate::builder().origin(&origin).limits("tunnel_timeout = \"1s\"\n").start();
    let mut client = Client::connect(server.address());
    client.send("GET /chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n");
    assert_eq!(client.head().0, 101);
    assert!(client.is_closed());
    eventually("the connection is gone", || {
        (server.metric("tidegate_connections_open") == 0.0).then_some(())
    });
}

#[test]
fn client_that_reads_its_response_slowly_may_ask_again() {
    let origin = Origin::start(|_| Reply::cacheable(vec![b'x'; 8_000_000]));
    let server = Tidegate::builder().origin(&origin).limits("header_timeout = \"1s\"\n").start();
    assert_eq!(Client::connect(server.address()).get("/").body.len(), 8_000_000);
    let mut client = Client::connect(server.address());
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    // Longer than a head may take: the time of one that began later is over.
    let mut later = Client::connect(server.address());
    later.send("GET / HTTP/1.1\r\nHost: ");
    later.rest();
    assert!(server.metric("tidegate_header_timeouts_total") >= 1.0);
    assert_eq!(client.response().body.len(), 8_000_000);
    assert_eq!(client.get("/").status, 200);
}
