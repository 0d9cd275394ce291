//! What lies beyond the end of a request is the filters', in whichever way a server reads, and whatever the request
//! asks for.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Read;
use std::net::Shutdown;

use common::{Chain, Client, Site, compiled, free_port, strs};

/// With a filter that rewrites: what it wrote is what a server must read.
const CHAIN: &[&str] = &["package", "persist", "normalize", "prior"];

fn chunked(path: &str, length: usize) -> Vec<u8> {
    let mut request =
        format!("POST {path} HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n").into_bytes();
    for chunk in vec![b'x'; length].chunks(7001) {
        request.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        request.extend_from_slice(chunk);
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"0\r\n\r\n");
    request
}

fn upgrade(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n").into_bytes()
}

fn connect(authority: &str) -> Vec<u8> {
    format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n").into_bytes()
}

fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").into_bytes()
}

/// The request, and how the program `reads` answers it: it read these bytes, as the first of its connection.
fn with_answer(request: Vec<u8>, is_rewritten: bool) -> (Vec<u8>, Option<String>) {
    let line = String::from_utf8(request[..request.iter().position(|&byte| byte == b'\r').unwrap()].to_vec());
    let told = if request.starts_with(b"POST") { common::TOLD } else { 0 };
    let length = request.len() + told;
    (request, (!is_rewritten).then(|| format!("{}, {length}, 1", line.unwrap())))
}

/// All at once and piece by piece, or one after the other; each request is a connection of its own to the server.
fn reads_one_request_at_a_time(chain: &Chain, pipelines: bool) {
    let mut upload = b"POST /upload HTTP/1.1\r\nHost: test\r\nContent-Length: 100000\r\n\r\n".to_vec();
    upload.resize(upload.len() + 100_000, b'x');
    let requests = [
        with_answer(get("/a"), false),
        with_answer(get("//b"), true),
        with_answer(upgrade("/c"), false),
        with_answer(get("/d"), false),
        with_answer(upload, false),
        with_answer(chunked("/e", 100_000), false),
        with_answer(get("/f"), false),
        with_answer(chunked("//g", 50_000), true),
        with_answer(chunked("/h", 100), false),
        with_answer(upgrade("//i"), true),
        with_answer(get("/j"), false),
    ];
    let all = requests.iter().flat_map(|(bytes, _)| bytes.clone()).collect::<Vec<u8>>();
    for piece in if pipelines { &[usize::MAX, 4099][..] } else { &[0] } {
        let mut client = chain.client();
        let mut sender = client.stream.try_clone().unwrap();
        let all = &all;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for bytes in all.chunks(*piece.max(&1)).filter(|_| pipelines) {
                    std::io::Write::write_all(&mut sender, bytes).unwrap();
                }
            });
            for (bytes, answer) in &requests {
                if !pipelines {
                    client.send(bytes);
                }
                let body = String::from_utf8(client.response(false).body).unwrap();
                match answer {
                    Some(answer) => assert_eq!(body, *answer),
                    // The head that the filter wrote is another one.
                    None => {
                        let line = String::from_utf8_lossy(bytes).lines().next().unwrap().replace("//", "/");
                        assert!(body.starts_with(&format!("{line}, ")) && body.ends_with(", 1"), "{body}");
                    }
                }
            }
        });
    }
}

#[test]
fn a_server_reads_one_request_at_a_time_in_whichever_way() {
    for way in [
        "read", "recv", "recvfrom", "readv", "preadv2", "recvmsg", "recvmmsg", "peek", "peekmsg", "splice",
        "edge",
    ] {
        eprintln!("{way}");
        let (chain, _site) = compiled("reads.c", &[], way, CHAIN);
        reads_one_request_at_a_time(&chain, true);
        chain.stop();
    }
}

#[test]
fn a_server_that_makes_its_system_calls_itself_reads_one_request_at_a_time() {
    let (chain, _site) = compiled("reads.c", &["-static"], "read", CHAIN);
    reads_one_request_at_a_time(&chain, true);
    chain.stop();
}

/// The server would wait for it: it has one thread, and others wait for it.
fn nobody_waits_for_what_comes_behind(chain: &Chain, request: &[u8]) {
    let mut slow = chain.client();
    slow.send(request);
    assert_eq!(slow.response(false).status, 200);
    slow.send(b"GET /slow HTTP/1.1\r\nHo");
    assert_eq!(chain.get("/a").status, 200);
    slow.send(b"st: test\r\n\r\n");
    assert_eq!(slow.response(false).status, 200);
}

#[test]
fn an_incomplete_request_behind_one_that_asked_for_an_upgrade_keeps_no_server_waiting() {
    for flags in [&[][..], &["-static"]] {
        let (chain, _site) = compiled("reads.c", flags, "read", CHAIN);
        nobody_waits_for_what_comes_behind(&chain, &upgrade("/"));
        nobody_waits_for_what_comes_behind(&chain, &chunked("/", 100_000));
        chain.stop();
    }
}

/// Without `persist`, and not to be kept by `package` either: the connection ends with the response.
#[test]
fn where_no_connection_is_kept_it_ends_with_the_response_to_a_request_that_asked_for_an_upgrade() {
    let (chain, _site) = compiled("reads.c", &[], "read", &["package=keep=no"]);
    for request in [upgrade("/"), chunked("/", 100_000)] {
        let mut client = chain.client();
        client.send(&[request, get("/more")].concat());
        assert_eq!(client.response(false).status, 200);
        assert!(client.is_ended());
    }
    chain.stop();
}

/// Whose framing is not what it must be has no end: nothing behind it is read, by anybody.
#[test]
fn a_chunked_upload_that_is_malformed_ends_its_connection() {
    let (chain, _site) = compiled("reads.c", &[], "read", CHAIN);
    let mut request = chunked("/", 100_000);
    let end = request.len() - 5;
    request.splice(end.., *b"z\r\n0\r\n\r\nGET /behind HTTP/1.1\r\nHost: test\r\n\r\n");
    let mut client = chain.client();
    let _ = std::io::Write::write_all(&mut client.stream, &request);
    assert!(client.is_ended());
    assert_eq!(chain.get("/a").status, 200);
    chain.stop();
}

/// `auth` must see every request.
fn every_request_needs_a_secret(chain: &Chain) {
    let secret = "Authorization: Basic dTpw\r\n";
    let with_secret = |request: Vec<u8>| {
        let text = String::from_utf8(request).unwrap();
        text.replacen("Host: test\r\n", &format!("Host: test\r\n{secret}"), 1).into_bytes()
    };
    assert_eq!(chain.get("/small").status, 401);
    for first in [upgrade("/small"), chunked("/upload", 40_000)] {
        let first = with_secret(first);
        for pieces in [1, 2] {
            let mut client = chain.client();
            let behind = [with_secret(get("/small")), get("/small")].concat();
            if pieces == 1 {
                client.send(&[first.clone(), behind].concat());
                assert_eq!(client.response(false).status, 200);
            } else {
                client.send(&first);
                assert_eq!(client.response(false).status, 200);
                client.send(&behind);
            }
            assert_eq!(client.response(false).status, 200);
            assert_eq!(client.response(false).status, 401);
        }
    }
}

#[test]
fn nothing_passes_a_filter_behind_a_request_that_asked_nginx_for_an_upgrade_or_a_long_upload() {
    let (site, port) = (Site::new(), free_port());
    let secrets = site.configuration("secrets", port, "u:p\n");
    let auth = format!("auth=file={secrets}");
    let filters = ["package", "persist", "normalize", &auth];
    let chain = Chain::once_it_listens(Chain::command(port, &filters, &strs(&site.nginx(port))), port);
    every_request_needs_a_secret(&chain);
    chain.stop();
}

fn echoes(client: &mut Client, status: u16, early: &[u8]) {
    let response = client.response(true);
    assert_eq!(response.status, status, "{}", response.head);
    let mut echo = vec![0; early.len()];
    client.reader().read_exact(&mut echo).unwrap();
    assert_eq!(echo, early);
    for message in [&b"hello"[..], b"GET / HTTP/1.1\r\nHost: test\r\n\r\n", b"\0\xff"] {
        client.send(message);
        let mut echo = vec![0; message.len()];
        client.reader().read_exact(&mut echo).unwrap();
        assert_eq!(echo, message);
    }
    client.stream.shutdown(Shutdown::Write).unwrap();
    assert!(client.is_ended());
}

/// What the client has sent before the server agreed is there when it has.
#[test]
fn a_connection_that_changes_its_protocol_is_the_servers_from_then_on() {
    let ways = ["blocking", "edge", "level", "thread", "poll"].map(|way| (way, &["-pthread"][..]));
    for (way, flags) in ways.into_iter().chain([("edge", &["-pthread", "-static"][..])]) {
        eprintln!("{way} {flags:?}");
        let (chain, _site) = compiled("upgrades.c", flags, way, &["package", "persist"]);
        for early in [&b""[..], b"early", b"GET /early HTTP/1.1\r\nHost: test\r\n\r\n"] {
            // An empty line before it makes no other request of it (RFC 9112 §2.2).
            let behind_a_line = [b"\r\n", &connect("a:1")[..]].concat();
            for (request, status) in [(upgrade("/"), 101), (connect("a:1"), 200), (behind_a_line, 200)] {
                let mut client = chain.client();
                client.send(&[&request, early].concat());
                echoes(&mut client, status, early);
            }
        }
        // Other requests than the filters see are none of the server's, whether the client asked for nothing else or
        // for one of several; nor is anything where it asked for nothing.
        let both = String::from_utf8(upgrade("/h2c")).unwrap().replace("echo", "h2c, echo").into_bytes();
        let only = String::from_utf8(upgrade("/h2c")).unwrap().replace("echo", "h2c").into_bytes();
        for request in [both, only, get("/h2c"), get("/")] {
            let mut client = chain.client();
            client.send(&[&request[..], b"PRI * HTTP/2.0\r\n\r\n"].concat());
            assert_eq!(client.response(true).status, 101);
            assert!(client.is_ended());
        }
        // It may say no as well, and be asked again.
        let mut client = chain.client();
        client.send(&[upgrade("/no"), upgrade("/no"), upgrade("/")].concat());
        assert_eq!(client.response(false).body, b"no\n");
        assert_eq!(client.response(false).body, b"no\n");
        echoes(&mut client, 101, b"");
        // A server that is no proxy takes CONNECT for a request like any other, and so what comes behind it: the
        // filters see it.
        let mut client = chain.client();
        for request in [connect("ordinary:1"), get("/no"), connect("ordinary:1"), get("/no")] {
            client.send(&request);
            assert_eq!(client.response(false).body, b"no\n");
        }
        chain.stop();
    }
}

/// One thread serves clients that close nothing: it waits for each no longer than it wants to.
#[test]
fn a_read_beyond_the_request_ends_when_the_socket_says_so() {
    let (chain, _site) = compiled("beyond.c", &["-pthread"], "drains", CHAIN);
    let close = b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";
    let mut clients: Vec<Client> = (0..3).map(|_| chain.client()).collect();
    for (client, said) in clients.iter_mut().zip([&b"nothing"[..], b"EAGAIN", b"EAGAIN"]) {
        client.send(close);
        assert_eq!(client.response(false).body, said);
    }
    chain.stop();
    for way in ["timeout", "dontwait"] {
        let (chain, _site) = compiled("beyond.c", &["-pthread"], way, CHAIN);
        let mut client = chain.client();
        client.send(&get("/a").repeat(2));
        assert_eq!(client.response(false).body, b"EAGAIN", "{way}");
        assert_eq!(client.response(false).body, b"EAGAIN", "{way}");
        chain.stop();
    }
}

#[test]
fn a_read_of_the_rest_of_a_request_ends_when_the_socket_says_so() {
    let (chain, _site) = compiled("beyond.c", &["-pthread"], "rest", CHAIN);
    let long = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 100000\r\n\r\n".to_vec();
    for mut request in [[long, vec![b'x'; 100_000]].concat(), chunked("/", 100_000)] {
        request.truncate(50_000);
        let mut client = chain.client();
        client.send(&request);
        assert_eq!(client.response(false).body, b"EAGAIN");
    }
    chain.stop();
}

#[test]
fn a_server_that_has_shut_its_side_down_reads_the_clients_end() {
    let (chain, _site) = compiled("beyond.c", &["-pthread"], "ends", CHAIN);
    for said in [&b"nothing"[..], b"0", b"0"] {
        let mut client = chain.client();
        client.send(b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
        assert_eq!(client.response(false).body, said);
        assert!(client.is_ended());
        client.stream.shutdown(Shutdown::Write).unwrap();
    }
    chain.stop();
}

/// Requests that it has sent before are answered, unless it said that it wants no response to them.
#[test]
fn a_server_that_looks_for_the_clients_end_finds_it_behind_the_last_request_that_can_be_answered() {
    let close = b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".to_vec();
    for flags in [&["-pthread"][..], &["-pthread", "-static"]] {
        let (chain, _site) = compiled("beyond.c", flags, "left", CHAIN);
        for (first, said) in [(close.clone(), &[&b"0"[..]][..]), (get("/"), &[b"EAGAIN", b"0"])] {
            let mut client = chain.client();
            client.send(&[first, get("/")].concat());
            client.stream.shutdown(Shutdown::Write).unwrap();
            for said in said {
                assert_eq!(client.response(false).body, *said);
            }
            assert!(client.is_ended());
        }
        chain.stop();
    }
}

/// Of a statically linked one, nothing ended but what it answered: what it works on for nobody was its for ever.
#[test]
fn a_server_that_has_answered_nothing_reads_the_clients_end() {
    for flags in [&["-pthread"][..], &["-pthread", "-static"]] {
        let (chain, _site) = compiled("beyond.c", flags, "leaves", CHAIN);
        let upload = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\r\nhello".to_vec();
        for request in [get("/"), upload, chunked("/", 100), chunked("/", 100_000)] {
            // It has one thread: the second is served once it knows that the first has left.
            chain.client().send(&request);
            let mut client = chain.client();
            client.send(&request);
            client.stream.shutdown(Shutdown::Write).unwrap();
            assert_eq!(client.response(false).body, b"0");
            assert!(client.is_ended());
        }
        chain.stop();
    }
}

#[test]
fn a_thread_that_reads_beyond_the_request_can_be_cancelled() {
    let (chain, _site) = compiled("beyond.c", &["-pthread"], "cancel", CHAIN);
    for _ in 0..3 {
        assert_eq!(chain.get("/").body, b"cancelled");
    }
    chain.stop();
}

/// What has taken the place of each connection that is over is one file.
#[test]
fn flags_of_a_connection_that_is_over_are_its_own() {
    let (chain, _site) = compiled("beyond.c", &["-pthread"], "flags", CHAIN);
    for said in [&b"nothing"[..], b"nothing", b"non-blocking"] {
        assert_eq!(chain.get("/").body, said);
    }
    chain.stop();
}

#[test]
fn a_child_that_shuts_the_listening_socket_down_shuts_nobody_elses() {
    let (chain, _site) = compiled("beyond.c", &["-pthread"], "shuts", CHAIN);
    // The first may have come before.
    for _ in 0..3 {
        assert_eq!(chain.get("/").body, b"nothing");
    }
    chain.stop();
}

#[test]
fn a_program_that_closes_what_it_does_not_know_leaves_the_chain_to_the_program_that_it_becomes() {
    for way in ["range", "each", "cloexec", "ioctl"] {
        let (chain, _site) = compiled("beyond.c", &["-pthread"], way, CHAIN);
        assert_eq!(chain.get("/").body, b"nothing");
        chain.stop();
    }
}

/// What `says.c` answers to a request that reaches it as it was sent, and to one that a filter rewrote.
fn says(way: &str, as_sent: &str, rewritten: &str) {
    let (chain, _site) = compiled("says.c", &[], way, CHAIN);
    for (path, said) in [("/a", as_sent), ("//a", rewritten), ("/a", as_sent)] {
        assert_eq!(String::from_utf8(chain.get(path).body).unwrap(), said, "{way} {path}");
    }
    chain.stop();
}

/// Callers look at what they find there: control data that nobody wrote is whatever was there before.
#[test]
fn a_read_says_all_that_the_system_call_says() {
    for way in ["recvmsg", "recvmmsg"] {
        // MSG_CMSG_CLOEXEC alone comes back.
        says(way, "31, 0, 0, 40000000", "31, 0, 0, 40000000");
    }
    says("recvfrom", "31, 0", "31, 0");
}

/// The server aborted. Proxies take what is left off a socket so.
#[test]
fn what_is_thrown_away_is_counted_and_not_put_anywhere() {
    for way in ["trunc", "truncmsg"] {
        says(way, "31, 0", "31, 0");
    }
    says("null", "31, EFAULT", "31, EFAULT");
}

#[test]
fn a_call_that_fails_to_take_a_connections_place_leaves_it_as_it_is() {
    for (way, error) in [("dup2", "EBADF"), ("dup3", "EBADF"), ("flags", "EINVAL"), ("range", "EINVAL")] {
        says(way, error, error);
    }
}

#[test]
fn a_connection_that_close_range_has_close_on_exec_does_so_when_it_is_over() {
    let (chain, _site) = compiled("says.c", &[], "cloexec", CHAIN);
    for said in [&b"-1"[..], b"1", b"1"] {
        assert_eq!(chain.get("/").body, said);
    }
    chain.stop();
}

/// Servers write it into their logs when the response is complete.
#[test]
fn a_connection_that_is_over_is_still_known_by_its_addresses() {
    for flags in [&[][..], &["-static"]] {
        let (chain, _site) = compiled("says.c", flags, "over", CHAIN);
        let mut said = String::from("nothing yet");
        for _ in 0..3 {
            let mut client = chain.client();
            client.send(&get("/a"));
            assert_eq!(String::from_utf8(client.response(false).body).unwrap(), said);
            let port = client.stream.local_addr().unwrap().port();
            said = format!("2:{port} to 2:{}, 2 1 6: the same", chain.address.port());
        }
        chain.stop();
    }
}
