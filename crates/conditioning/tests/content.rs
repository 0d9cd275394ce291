//! Content of a request that the server does not read: it is nobody's next request, and its client gets the response.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Write;

use common::{Chain, Client, Site, compiled, free_port, needs, strs};

const CHAIN: &[&str] = &["package", "persist", "normalize"];
/// Of no filter's seeing.
const INNER: &str = "GET /inner HTTP/1.1\r\nHost: test\r\n\r\n";

/// Content that is requests to whoever takes it for that, in each framing; of the greater lengths, not all is waited
/// for.
fn requests_with_content() -> Vec<Vec<u8>> {
    let mut requests = vec![];
    for content in [INNER.to_owned(), INNER.repeat(20) + &"z".repeat(20_000), INNER.repeat(10_000)] {
        let length = content.len();
        for method in ["GET", "POST", "HEAD"] {
            requests.push(format!(
                "{method} /outer HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n{content}"
            ));
        }
        let chunk = format!("{length:x}\r\n{content}\r\n0\r\n\r\n");
        let chunked = "Host: test\r\nTransfer-Encoding: chunked";
        requests.push(format!("POST /outer HTTP/1.1\r\n{chunked}\r\n\r\n{chunk}"));
        // Which servers take for what they like.
        for connection in [
            "keep-alive, upgrade\r\nUpgrade: other",
            "close",
            "close, x",
            "keep-alive, close",
            "x\r\nConnection: close",
            ",close",
        ] {
            requests
                .push(format!("GET /outer HTTP/1.1\r\nConnection: {connection}\r\n{chunked}\r\n\r\n{chunk}"));
        }
    }
    requests.into_iter().map(String::into_bytes).collect()
}

/// A client has one response for each request of its own, and the server has seen those only.
fn takes_no_content_for_requests(chain: &Chain) {
    answers_requests_only(chain);
    let seen = chain.errors();
    assert!(!seen.contains("/inner") && seen.contains("/outer"), "{seen}");
}

/// A client has one response for each request of its own.
fn answers_requests_only(chain: &Chain) {
    for request in requests_with_content() {
        let line = String::from_utf8_lossy(&request[..request.len().min(60)]).into_owned();
        let mut client = chain.client();
        let mut sender = client.stream.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // It fails where the connection ends with the response.
                let _ = sender.write_all(&request);
            });
            let is_head = request.starts_with(b"HEAD");
            let response = client.response(is_head);
            assert_eq!(response.status, 200, "{line}");
            assert!(!String::from_utf8_lossy(&response.body).contains("inner"), "{line}");
        });
        let _ = client.stream.write_all(b"GET /next HTTP/1.1\r\nHost: test\r\n\r\n");
        let next = client.try_response(false);
        // What was waited for is there to be thrown away.
        let ends = String::from_utf8_lossy(&request).contains("close");
        assert!(next.is_ok() != ends || request.len() > 16_384, "{line}");
        if let Ok(response) = next {
            assert_eq!(response.status, 200, "{line}: {}", response.head);
            assert!(!String::from_utf8_lossy(&response.body).contains("inner"), "{line}");
        }
    }
}

#[test]
fn content_that_a_server_does_not_read_is_not_its_next_request() {
    for flags in [&[][..], &["-static"]] {
        let (chain, _site) = compiled("ignores.c", flags, "polite", CHAIN);
        takes_no_content_for_requests(&chain);
        assert_eq!(chain.get("/alive").body, b"GET /alive HTTP/1.1");
        chain.stop();
    }
}

/// Where the server was told of the end in vain (RFC 9112 §9.6), nobody can take back what it has read together with
/// the head. But its answers to that reach nobody, and what it has not read is thrown away.
#[test]
fn content_that_a_server_takes_for_its_next_request_has_no_response_even_if_it_goes_on() {
    let (chain, _site) = compiled("ignores.c", &[], "deaf", CHAIN);
    answers_requests_only(&chain);
    assert_eq!(chain.get("/alive").body, b"GET /alive HTTP/1.1");
    chain.stop();
    let (chain, _site) = compiled("ignores.c", &[], "deaf", CHAIN);
    // As much as is waited for, and the rest once it has answered.
    let (first, rest) = ("z".repeat(20_000), INNER.repeat(1_000));
    let length = first.len() + rest.len();
    let mut client = chain.client();
    for (framing, end) in [
        (format!("Content-Length: {length}\r\n\r\n"), ""),
        (format!("Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n"), "\r\n0\r\n\r\n"),
    ] {
        client.send(format!("POST /outer HTTP/1.1\r\nHost: test\r\n{framing}{first}").as_bytes());
        assert_eq!(client.response(false).body, b"POST /outer HTTP/1.1");
        client.send(format!("{rest}{end}GET /next HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes());
        assert_eq!(client.response(false).body, b"GET /next HTTP/1.1");
    }
    let seen = chain.errors();
    assert!(!seen.contains("/inner") && seen.contains("/outer"), "{seen}");
    chain.stop();
}

/// What it wrote was no whole response then, and it was given the content as long as its client sent any.
#[test]
fn content_is_no_request_to_a_server_that_writes_more_than_a_response() {
    for flags in [&[][..], &["-static"]] {
        let (chain, _site) = compiled("ignores.c", flags, "lines", CHAIN);
        let (first, rest) = ("z".repeat(20_000), INNER.repeat(1_000));
        let mut client = chain.client();
        let length = first.len() + rest.len();
        let head = format!("POST /outer HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n");
        client.send(format!("{head}{first}").as_bytes());
        assert_eq!(client.response(false).body, b"POST /outer HTTP/1.1");
        // It has one thread, and serves the next client once it has read the end of this one.
        let _ = client.stream.write_all(rest.as_bytes());
        assert_eq!(chain.get("/alive").body, b"GET /alive HTTP/1.1");
        assert!(!chain.errors().contains("/inner"), "{}", chain.errors());
        chain.stop();
    }
}

/// It got the head alone, although everything was there: a copy, which says that it is the last.
#[test]
fn a_server_that_takes_one_read_for_all_of_a_request_gets_its_content() {
    let ways = ["read", "recv", "recvfrom", "readv", "recvmsg", "recvmmsg"].map(|way| (way, &[][..]));
    for (way, flags) in ways.into_iter().chain([("read", &["-static"][..])]) {
        let (chain, _site) = compiled("once.c", flags, way, CHAIN);
        let mut client = chain.client();
        for path in ["/a", "//a"] {
            for length in [1, 100, 10_000] {
                let content: Vec<u8> = (0..length).map(|at| b'a' + (at % 23) as u8).collect();
                let head = format!("POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n");
                // What comes behind it is another one.
                client.send(&[head.as_bytes(), &content, INNER.as_bytes()].concat());
                let response = client.response(false);
                assert!(response.body == content, "{way} {flags:?}, {length}: {response:?}");
                assert_eq!(client.response(false).body, b"");
                let chunks = [format!("{length:x}\r\n").as_bytes(), &content, b"\r\n0\r\n\r\n"].concat();
                let head =
                    format!("POST {path} HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n");
                client.send(&[head.as_bytes(), &chunks, INNER.as_bytes()].concat());
                let response = client.response(false);
                assert!(response.body == chunks, "{way} {flags:?}, {length}: {response:?}");
                assert_eq!(client.response(false).body, b"");
            }
        }
        // It is not kept waiting for what is not there.
        let mut client = chain.client();
        let head = b"POST /a HTTP/1.1\r\nHost: test\r\nContent-Length: 100000\r\n\r\n";
        client.send(&[&head[..], &[b'x'; 20_000]].concat());
        let body = client.response(false).body;
        assert!(
            body.len() > 10_000 && body.iter().all(|&byte| byte == b'x'),
            "{way} {flags:?}, {}",
            body.len()
        );
        chain.stop();
    }
}

/// A server of one thread waits for the rest of it, but not for ever more.
#[test]
fn a_client_that_sends_on_and_on_has_a_server_throw_away_no_more_than_so_much() {
    let (chain, _site) = compiled("ignores.c", &[], "deaf", CHAIN);
    let mut client = chain.client();
    client.send(b"POST /outer HTTP/1.1\r\nHost: test\r\nContent-Length: 100000000\r\n\r\n");
    let mut sender = client.stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Without an end of the connection, and without the rest.
            let _ = sender.write_all(&[b'z'; 8_000_000]);
        });
        assert_eq!(client.response(false).body, b"POST /outer HTTP/1.1");
        assert_eq!(chain.get("/alive").body, b"GET /alive HTTP/1.1");
        client.stream.shutdown(std::net::Shutdown::Both).unwrap();
    });
    chain.stop();
}

/// Nobody can take back what it has read, but its answers to that reach nobody.
#[test]
fn what_a_server_answers_to_content_that_it_took_for_requests_is_sent_to_nobody() {
    let (chain, _site) = compiled("ignores.c", &[], "ahead", CHAIN);
    let content = INNER.repeat(10_000);
    let head = format!("POST /outer HTTP/1.1\r\nHost: test\r\nContent-Length: {}\r\n\r\n", content.len());
    let mut client = chain.client();
    let mut sender = client.stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = sender.write_all(head.as_bytes());
            let _ = sender.write_all(content.as_bytes());
        });
        assert_eq!(client.response(false).body, b"POST /outer HTTP/1.1");
    });
    let _ = client.stream.write_all(b"GET /next HTTP/1.1\r\nHost: test\r\n\r\n");
    if let Ok(next) = client.try_response(false) {
        assert_eq!(next.body, b"GET /next HTTP/1.1");
    }
    assert!(chain.errors().contains("seen: GET /inner"), "{}", chain.errors());
    chain.stop();
}

/// It ignores the content of GET.
#[test]
fn pythons_server_takes_no_content_for_requests() {
    needs("python3", "python3");
    const SERVER: &str = "\
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        body = self.path.encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)
    do_POST = do_HEAD = do_GET
http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
";
    let (site, port) = (Site::new(), free_port());
    let script = site.configuration("server.py", port, SERVER);
    let command = ["python3".to_owned(), script, port.to_string()];
    for via in ["preload", "seccomp"] {
        let address = [format!("127.0.0.1:{port}")];
        let launcher = Chain::with_options(&["--via", via], &address, CHAIN, &strs(&command));
        let chain = Chain::once_it_serves(launcher, port);
        takes_no_content_for_requests(&chain);
        chain.stop();
    }
}

/// A client that reads nothing before it has sent everything lost the response to a reset.
#[test]
fn a_client_whose_upload_is_refused_at_its_beginning_gets_the_response_however_much_it_sends() {
    let upload = |framing: &str| {
        let head = format!("POST /outer HTTP/1.1\r\nHost: test\r\n{framing}\r\n\r\n");
        [head.as_bytes(), &vec![b'z'; 8_000_000]].concat()
    };
    let refused = |chain: &Chain, request: &[u8], status: u16| {
        let mut client: Client = chain.client();
        client.send(request);
        let response = client.response(false);
        assert_eq!((response.status, response.field("connection").as_deref()), (status, Some("close")));
        assert!(client.is_ended());
    };
    for flags in [&[][..], &["-static"]] {
        let (chain, _site) = compiled("ignores.c", flags, "refuses", CHAIN);
        for request in [upload("Content-Length: 8000000"), upload("Transfer-Encoding: chunked\r\n\r\n7a1202")]
        {
            refused(&chain, &request, 413);
        }
        // Who waits for leave to send the content sends none, and no further request.
        let head =
            "POST /outer HTTP/1.1\r\nHost: test\r\nExpect: 100-continue\r\nContent-Length: 20000\r\n\r\n";
        refused(&chain, head.as_bytes(), 413);
        // So it is where a filter refuses the request: it has no end, or is malformed.
        refused(&chain, &upload("Content-Length: 1, 2"), 400);
        refused(&chain, &upload(&format!("A: {}", "a".repeat(70_000))), 431);
        chain.stop();
    }
}

/// It says so, and the client may send the rest.
#[test]
fn a_server_that_closes_in_its_own_time_reads_the_rest_of_the_content_and_nothing_else() {
    for flags in [&[][..], &["-static"]] {
        let (chain, _site) = compiled("ignores.c", flags, "drains", CHAIN);
        let head = "POST /outer HTTP/1.1\r\nHost: test\r\nContent-Length: 300000\r\n\r\n";
        for _ in 0..3 {
            let mut client = chain.client();
            client.send(&[head.as_bytes(), &[b'z'; 100_000]].concat());
            assert_eq!(client.response(false).field("connection").as_deref(), Some("close"));
            client.send(&[b'z'; 200_000]);
            client.send(INNER.as_bytes());
            assert!(client.is_ended());
            client.stream.shutdown(std::net::Shutdown::Write).unwrap();
        }
        // Where all of it is there, the connection goes on.
        let mut client = chain.client();
        for _ in 0..3 {
            let short = head.replace("300000", "10000");
            client.send(&[short.as_bytes(), &[b'z'; 10_000]].concat());
            assert_eq!(client.response(false).field("connection"), None);
        }
        drop(client);
        assert_eq!(chain.get("/alive").status, 200);
        let said = chain.errors();
        assert_eq!(said.matches("drained: 300000\n").count(), 3, "{said}");
        assert_eq!(said.matches("drained: 10000\n").count(), 3, "{said}");
        chain.stop();
    }
}
