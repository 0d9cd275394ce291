//! A site over DHTTP beside HTTP: one cache, one set of limits, one log; fetched by `tidegate fetch`.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::net::{SocketAddr, UdpSocket};
use std::process::Output;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_e2e::{Client, Gate, Origin, Reply, Tidegate, content, eventually, free_port};

/// A tidegate that serves `origin` by HTTP and by DHTTP.
fn start(origin: &Origin, limits: &str) -> (Tidegate, SocketAddr) {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let tidegate = Tidegate::builder()
        .origin(origin)
        .limits(limits)
        .tables(&format!(
            "[[listen]]\naddress = \"{address}\"\nprotocol = \"dhttp\"\n[log]\naccess = \"@DIR@/access.log\""
        ))
        .start();
    (tidegate, address)
}

/// What `tidegate fetch -v` wrote to both outputs.
fn fetch(url: &str) -> (Vec<u8>, String) {
    let Output { stdout, stderr, .. } =
        std::process::Command::new(Tidegate::binary()).args(["fetch", "-v", url]).output().unwrap();
    (stdout, String::from_utf8(stderr).unwrap())
}

#[test]
fn object_in_the_cache_one_copy_answers_http_and_dhttp() {
    let origin = Origin::start(|request| match request.target.as_str() {
        "/short" => Reply::cacheable("short"),
        _ => Reply::cacheable(content(1, 300_000)),
    });
    let (tidegate, dhttp) = start(&origin, "");
    let first = tidegate.get("/short");
    assert_eq!(first.text(), "short");
    let offer = first.field("Alt-Svc");
    assert!(offer.starts_with(&format!("dhttp=\":{}\"; tls=\"", dhttp.port())), "{offer}");
    let status = tidegate.ask_admin("/status").text();
    assert!(status.contains(&format!("\"dhttp://{dhttp}\"")), "{status}");
    let (body, said) = fetch(&format!("dhttp://{dhttp}/short"));
    // Another authority is another URL, and another object.
    assert_eq!((body.as_slice(), origin.count()), (&b"short"[..], 2), "{said}");

    let (body, said) = fetch(&format!("dhttp://{dhttp}/short"));
    assert_eq!((body.as_slice(), origin.count()), (&b"short"[..], 2), "{said}");
    assert!(said.contains("in a datagram") && said.contains("; hit; ttl="), "{said}");

    for _ in 0..2 {
        let (body, said) = fetch(&format!("dhttp://{dhttp}/long"));
        assert!(body == content(1, 300_000), "{said}");
        assert!(said.contains("on a connection that the server opened"), "{said}");
    }
    assert_eq!(origin.count(), 3);
    assert_eq!(tidegate.metric("tidegate_dhttp_connections_opened_total"), 2.0);
    assert!(tidegate.metric("tidegate_dhttp_responses_udp_total") >= 2.0);
    let log = || std::fs::read_to_string(tidegate.directory().join("access.log")).unwrap();
    // Each core writes its own lines, when it comes to it.
    eventually("the log has the requests", || {
        let short = log().matches("\"GET /short HTTP/1.1\" 200 5").count();
        (short == 3 && log().contains("\"GET /long HTTP/1.1\" 200 300000")).then_some(())
    });
}

#[test]
fn long_file_in_the_cache_no_way_reads_it_again() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("long"), content(1, 300_000)).unwrap();
    let dhttp = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let tidegate = Tidegate::builder()
        .route("/", &format!("root = \"{}\"", directory.path().display()))
        .tables(&format!("[[listen]]\naddress = \"{dhttp}\"\nprotocol = \"dhttp\""))
        .start();
    eventually("the file is loaded", || (tidegate.metric("tidegate_store_objects") == 1.0).then_some(()));
    for (scheme, way) in [("dhttp", "that the server opened"), ("dhttpt", "of our own")] {
        let (body, said) = fetch(&format!("{scheme}://{dhttp}/long"));
        assert!(body == content(1, 300_000) && said.contains(way), "{said}");
    }
    assert_eq!(tidegate.metric("tidegate_cache_misses_total"), 0.0);
    assert_eq!(tidegate.metric("tidegate_cache_hits_total"), 2.0);
}

#[test]
fn fetch_with_the_announced_fingerprint_is_encrypted() {
    let origin = Origin::start(|request| match request.target.as_str() {
        "/short" => Reply::cacheable("short"),
        _ => Reply::cacheable(content(1, 300_000)),
    });
    let (tidegate, dhttp) = start(&origin, "");
    let offer = tidegate.get("/short").field("Alt-Svc");
    let fingerprint = offer.split("tls=\"").nth(1).unwrap().trim_end_matches('"').to_owned();
    let secured = |path: &str, fingerprint: &str| {
        let url = format!("dhttp://{dhttp}{path}");
        let args = ["fetch", "-v", "--tls", fingerprint, &url];
        std::process::Command::new(Tidegate::binary()).args(args).output().unwrap()
    };
    let short = secured("/short", &fingerprint);
    let said = String::from_utf8(short.stderr).unwrap();
    assert!(short.stdout == b"short" && said.contains("in a datagram"), "{said}");
    let long = secured("/long", &fingerprint);
    let said = String::from_utf8(long.stderr).unwrap();
    assert!(long.stdout == content(1, 300_000) && said.contains("on a connection of our own"), "{said}");
    assert!(tidegate.metric("tidegate_dhttp_sealed_opened_total") >= 2.0);
    assert_eq!(secured("/short", &"0".repeat(64)).status.code(), Some(1));
    assert_eq!(secured("/short", "abc").status.code(), Some(2));
}

#[test]
fn host_of_both_listeners_one_object() {
    let origin = Origin::start(|_| Reply::cacheable("shared"));
    let (tidegate, dhttp) = start(&origin, "");
    let (body, _) = fetch(&format!("dhttp://{dhttp}/page"));
    assert_eq!(body, b"shared");
    let mut client = tidegate.connect();
    client.send(format!("GET /page HTTP/1.1\r\nHost: {dhttp}\r\n\r\n"));
    assert!(client.response().is_hit());
    assert_eq!(origin.count(), 1);
}

/// What `tidegate fetch` with these options left.
fn fetch_with(options: &[&str]) -> Output {
    std::process::Command::new(Tidegate::binary()).arg("fetch").args(options).output().unwrap()
}

#[test]
fn content_for_the_server_is_posted_once_by_each_scheme() {
    let origin = Origin::start(|request| Reply::ok(format!("{} {}", request.method, request.body.len())));
    let (tidegate, dhttp) = start(&origin, "");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("long");
    std::fs::write(&file, content(1, 5000)).unwrap();
    let long = format!("@{}", file.display());
    let urls = [
        format!("dhttp://{dhttp}/form"),
        format!("dhttpt://{dhttp}/form"),
        format!("http://{}/form", tidegate.address()),
    ];
    for url in &urls {
        let before = origin.count();
        let posted = fetch_with(&["-d", "a=1", "-d", "b=2", "-H", "X-Given: yes", url]);
        assert_eq!(String::from_utf8_lossy(&posted.stdout), "POST 7", "{url}: {posted:?}");
        let last = origin.last();
        assert_eq!((last.body.as_slice(), last.field("X-Given").as_str()), (&b"a=1&b=2"[..], "yes"));
        assert_eq!(last.field("Content-Type"), "application/x-www-form-urlencoded");
        let put = fetch_with(&["-X", "PUT", "-H", "Content-Type: text/plain", "-d", &long, url]);
        assert_eq!(String::from_utf8_lossy(&put.stdout), "PUT 5000", "{url}: {put:?}");
        let last = origin.last();
        assert!(last.body == content(1, 5000) && last.field("Content-Type") == "text/plain");
        assert_eq!(origin.count(), before + 2, "{url}");
    }
}

#[test]
fn option_that_the_scheme_would_ignore_is_an_error_with_a_remedy() {
    let none = "0".repeat(64);
    for (options, said) in [
        (
            vec!["--tls", &none, "http://127.0.0.1:1/"],
            "--tls is for dhttp:// URLs, not for http://: use dhttp://",
        ),
        (vec!["--no-caches", "http://127.0.0.1:1/"], "--no-caches is for dhttp:// URLs"),
        (vec!["--cubic", "dhttp://127.0.0.1:1/"], "--cubic is for trickles:// URLs"),
        (vec!["-d", "x", "trickles://127.0.0.1:1/"], "--data is for http:// and dhttp:// URLs"),
        (vec!["-H", "no colon", "dhttp://127.0.0.1:1/"], "expected 'Name: value'"),
        (vec!["-H", "Content-Length: 3", "dhttp://127.0.0.1:1/"], "fetch says this itself"),
        (vec!["-X", "a b", "dhttp://127.0.0.1:1/"], "no method"),
    ] {
        let ended = fetch_with(&options);
        let line = String::from_utf8(ended.stderr).unwrap();
        assert!(ended.status.code() == Some(2) && line.contains(said), "{options:?}: {line}");
        assert_eq!(line.lines().count(), 1);
    }
}

#[test]
fn server_that_cannot_answer_as_asked_is_an_error_with_a_remedy() {
    let origin = Origin::start(|_| Reply::ok("here"));
    let (tidegate, dhttp) = start(&origin, "");
    let closed = free_port();
    let none = "0".repeat(64);
    let by_dhttp = format!("dhttp://{dhttp}/");
    for (options, said) in [
        (
            vec!["--tls", &none, &by_dhttp],
            "another certificate than the one announced: it has a new one whenever",
        ),
        (vec![&format!("dhttp://{}/", origin.address())], "speaks HTTP at this port, not DHTTP: use http://"),
        (vec![&format!("http://{dhttp}/")], "use dhttp://"),
        (vec![&format!("dhttp://127.0.0.1:{closed}/")], "is the server running, and is this its DHTTP port?"),
        (vec![&format!("http://127.0.0.1:{closed}/")], "is the server running, and is it this port?"),
    ] {
        let ended = fetch_with(&options);
        let line = String::from_utf8(ended.stderr).unwrap();
        assert!(ended.status.code() == Some(1) && line.contains(said), "{options:?}: {line}");
        assert_eq!(line.lines().count(), 1);
    }
    assert_eq!(tidegate.get("/").text(), "here");
}

#[test]
fn client_that_waits_for_100_continue_sends_its_content_at_once() {
    let origin = Origin::start(|request| Reply::ok(format!("{} bytes", request.body.len())));
    let (tidegate, _) = start(&origin, "");
    let mut client = tidegate.connect();
    client.send("PUT /x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
    let interim = b"HTTP/1.1 100 Continue\r\n\r\n";
    assert_eq!(client.read_bytes(interim.len()), interim);
    client.send("abc");
    assert_eq!(client.response().text(), "3 bytes");
}

#[test]
fn post_by_udp_is_answered_use_tcp_and_never_forwarded() {
    let origin = Origin::start(|_| Reply::ok("done"));
    let (tidegate, dhttp) = start(&origin, "");
    let socket = client_socket();
    let request = [
        &b"\x01\x02\x03\x04\x05\x06\x07\x08\xa0\x00\x02\x00"[..],
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab",
    ]
    .concat();
    for _ in 0..3 {
        socket.send_to(&request, dhttp).unwrap();
        let mut answer = [0; 100];
        let length = socket.recv(&mut answer).unwrap();
        assert_eq!(&answer[..length], b"\x01\x02\x03\x04\x05\x06\x07\x08\x01");
    }
    assert_eq!(origin.count(), 0);
    assert_eq!(tidegate.metric("tidegate_dhttp_requests_unsafe_total"), 3.0);
}

#[test]
fn upload_over_the_clients_connection_reaches_the_origin_within_the_limit() {
    let origin = Origin::start(|request| Reply::ok(format!("{} bytes", request.body.len())));
    let (tidegate, dhttp) = start(&origin, "body_size = \"1000B\"");
    for (size, wanted) in [(1000, "HTTP/1.1 200 "), (1001, "HTTP/1.1 413 ")] {
        let mut client = Client::connect(dhttp);
        client.send(b"\x01\x02\x03\x04\x05\x06\x07\x08\xa0\x00\x00");
        client.send(format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n"));
        client.send(vec![b'x'; size]);
        let answer = client.read_bytes(8 + wanted.len());
        assert_eq!(&answer[..8], b"\x01\x02\x03\x04\x05\x06\x07\x08");
        assert_eq!(String::from_utf8_lossy(&answer[8..]), wanted);
    }
    assert_eq!(origin.count(), 1);
    assert_eq!(origin.last().field("X-Forwarded-For"), "127.0.0.1");
    assert!(tidegate.metric("tidegate_dhttp_stream_requests_total") >= 2.0);
}

#[test]
fn drain_during_a_miss_the_answer_still_comes() {
    let gate = Gate::default();
    let passing = gate.clone();
    let origin = Origin::start(move |_| {
        passing.pass();
        Reply::ok("late")
    });
    let (mut tidegate, dhttp) = start(&origin, "");
    let waiting = std::thread::spawn(move || fetch(&format!("dhttp://{dhttp}/slow")));
    eventually("the origin is asked", || (origin.count() > 0).then_some(()));
    let drained = tidegate.command(&["drain"]);
    assert!(drained.status.success());
    gate.open();
    assert_eq!(waiting.join().unwrap().0, b"late");
    assert!(tidegate.wait().success());
}

#[test]
fn origin_that_breaks_off_a_short_answer_is_a_502_at_once() {
    let origin = Origin::start(|_| {
        Reply::RawThenClose(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf".to_vec())
    });
    let (_tidegate, dhttp) = start(&origin, "");
    let (_, said) = fetch(&format!("dhttp://{dhttp}/half"));
    assert!(said.contains("in a datagram") && said.contains("< HTTP/1.1 502 "), "{said}");
}

/// A GET from this socket by datagram, with an id of its own.
fn ask(socket: &UdpSocket, server: SocketAddr, token: &[u8], target: &str) -> [u8; 8] {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let mut request = [&id[..], b"\xa0\x00\x02"].concat();
    request.push(token.len() as u8);
    request.extend_from_slice(token);
    // Long enough for a short answer to be less than three times as long.
    let agent = "x".repeat(200);
    let head = format!("GET {target} HTTP/1.1\r\nHost: a\r\nUser-Agent: {agent}\r\n\r\n");
    request.extend_from_slice(head.as_bytes());
    socket.send_to(&request, server).unwrap();
    id
}

/// The answer to a GET by datagram, from its form on. On a machine that is busy enough the answer of an origin comes so
/// slowly that it is taken for a long one, and "use TCP" is all that comes of it, or nothing: then it is asked again.
fn told(socket: &UdpSocket, server: SocketAddr, token: &[u8], target: &str) -> Vec<u8> {
    eventually("there is an answer", || {
        let id = ask(socket, server, token, target);
        socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let mut answer = [0; 2000];
        loop {
            let length = socket.recv(&mut answer).ok()?;
            if answer[..8] == id {
                return Some(answer[8..length].to_vec()).filter(|told| told != b"\x01");
            }
        }
    })
}

/// The token of an answer that has one.
fn token_of(answer: &[u8]) -> Vec<u8> {
    assert!(matches!(answer[0], 2 | 3), "{}", answer.escape_ascii());
    answer[2..2 + usize::from(answer[1])].to_vec()
}

#[test]
fn blocked_source_is_answered_neither_by_datagrams_nor_on_connections() {
    let origin = Origin::start(|_| Reply::cacheable("here"));
    let (tidegate, dhttp) = start(&origin, "");
    let (blocked, other) = (client_socket_at("127.6.6.6"), client_socket());
    let token = token_of(&told(&blocked, dhttp, &[], "/a"));
    assert!(told(&blocked, dhttp, &token, "/a").ends_with(b"here"));
    assert!(tidegate.command(&["block", "add", "127.6.6.0/24"]).status.success());
    let is_refused = || {
        let mut client = Client::try_connect_from("127.6.6.7".parse().unwrap(), dhttp).unwrap();
        let _ = client
            .try_send(b"\x01\x02\x03\x04\x05\x06\x07\x08\xa0\x00\x00GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
        client.is_closed()
    };
    eventually("connections are refused", || is_refused().then_some(()));
    let asked = origin.count();
    // Hits and misses, proved and not.
    for target in ["/a", "/b"] {
        ask(&blocked, dhttp, &token, target);
        ask(&blocked, dhttp, &[], target);
    }
    eventually("all of them are ignored", || {
        (tidegate.metric("tidegate_dhttp_datagrams_blocked_total") == 4.0).then_some(())
    });
    assert_eq!(origin.count(), asked);
    blocked.set_nonblocking(true).unwrap();
    let mut answer = [0; 100];
    assert!(blocked.recv(&mut answer).is_err(), "an answer for a blocked source");
    // Somebody else is served.
    let token = token_of(&told(&other, dhttp, &[], "/c"));
    assert!(told(&other, dhttp, &token, "/a").ends_with(b"here"));
    assert!(tidegate.command(&["block", "remove", "127.6.6.0/24"]).status.success());
    eventually("connections are served again", || (!is_refused()).then_some(()));
}

#[test]
fn answers_from_the_cache_are_nobodys_until_the_address_is_proved() {
    let origin = Origin::start(|_| Reply::cacheable("here"));
    let (tidegate, dhttp) = start(&origin, "");
    let socket = client_socket_at("127.6.6.6");
    let token = token_of(&told(&socket, dhttp, &[], "/a"));
    assert_eq!(origin.count(), 0, "whoever is named need not have asked");
    let in_log = |client: &str| {
        let log = std::fs::read_to_string(tidegate.directory().join("access.log")).unwrap();
        log.lines().filter(|line| line.starts_with(client)).count()
    };
    assert!(told(&socket, dhttp, &token, "/a").ends_with(b"here"));
    eventually("it is in the log", || (in_log("127.6.6.6 ") > 0).then_some(()));
    assert_eq!(in_log("0.0.0.0 "), 0);
    // From the cache, whoever it was.
    assert!(told(&socket, dhttp, &[], "/a").ends_with(b"here"));
    eventually("it is in the log, as nobody's", || (in_log("0.0.0.0 ") > 0).then_some(()));
}

#[test]
fn client_that_guesses_passwords_by_datagrams_is_blocked() {
    let origin = Origin::start(|request| match request.target.as_str() {
        "/login" => Reply::status(401, "no"),
        _ => Reply::cacheable("here"),
    });
    let (tidegate, dhttp) = start(&origin, "");
    let (guessing, other) = (client_socket_at("127.6.6.6"), client_socket());
    let token = token_of(&told(&guessing, dhttp, &[], "/login"));
    eventually("the block is on the list", || {
        for _ in 0..20 {
            ask(&guessing, dhttp, &token, "/login");
        }
        let list = tidegate.command(&["block", "list"]);
        String::from_utf8_lossy(&list.stdout).contains("127.6.6.6").then_some(())
    });
    let token = token_of(&told(&other, dhttp, &[], "/a"));
    assert!(told(&other, dhttp, &token, "/a").ends_with(b"here"));
}

/// A socket on one of the ports that clients use.
fn client_socket() -> UdpSocket {
    client_socket_at("127.0.0.1")
}

fn client_socket_at(address: &str) -> UdpSocket {
    let socket = (0..100)
        .map(|_| UdpSocket::bind((address, 0)).unwrap())
        .find(|socket| socket.local_addr().unwrap().port() >= 32_768)
        .unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    socket
}
