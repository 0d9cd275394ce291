//! A classifier acts at every hook of a connection's life: a whole engine, with real connections.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate_accelerator::Engine;
use tidegate_accelerator::settings::{Cache, Limits, Listener, Protocol, Route, Settings, Target, Upstream};
use tidegate_core::hooks::{
    Arbiter, Chain, ChainSource, Classifier, Decision, Peer, Reply, RequestLine, RequestView, ResponseView,
    Scene,
};
use tidegate_core::{PrefixTree, Reason, TreeConfig, Verdict, Visit};
use tidegate_http::normalize::Personality;

/// What the hooks were told, in their order.
type Heard = Arc<Mutex<Vec<String>>>;

/// Refuses what is named after a hook, there.
#[derive(Debug)]
struct Everywhere(Heard);

impl Everywhere {
    fn hear(&self, what: String, refuse: bool) -> Decision {
        self.0.lock().unwrap().push(what);
        match refuse {
            true => Decision::new(Verdict::Refuse, Reason::Form),
            false => Decision::CONTINUE,
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

impl Classifier for Everywhere {
    fn name(&self) -> &'static str {
        "everywhere"
    }

    fn on_connect(&self, scene: &mut Scene<'_>, _: u32) -> Decision {
        self.hear("connect".into(), scene.peer.address == IpAddr::from([127, 0, 0, 66]))
    }

    fn looks_at_lines(&self) -> bool {
        true
    }

    fn on_request_line(&self, _: &mut Scene<'_>, line: &RequestLine<'_>) -> Decision {
        self.hear(format!("line {}", text(line.target)), line.target == b"/line")
    }

    fn on_request(&self, _: &mut Scene<'_>, request: &RequestView<'_>, _: &Visit) -> Decision {
        self.hear(format!("head {}", text(request.path)), request.path == b"/head")
    }

    fn on_body(&self, _: &mut Scene<'_>, piece: &[u8], _: u64) -> Decision {
        self.hear(format!("body {}", text(piece)), piece == b"bad")
    }

    fn looks_at_starts(&self) -> bool {
        true
    }

    fn on_response_start(&self, _: &mut Scene<'_>, response: &ResponseView<'_>) -> Decision {
        let path = text(response.path);
        self.hear(format!("start {path} {}", response.status), path == "/start")
    }

    fn looks_at_responses(&self) -> bool {
        true
    }

    fn on_response(&self, _: &mut Scene<'_>, response: &ResponseView<'_>) -> Decision {
        self.hear(format!("end {} {}", text(response.path), response.status), false);
        match response.path {
            b"/end" => Decision::new(Verdict::Reset, Reason::Errors),
            _ => Decision::CONTINUE,
        }
    }

    fn on_close(&self, _: &mut Scene<'_>) {
        self.hear("close".into(), false);
    }
}

#[derive(Debug)]
struct Strict;

impl Arbiter for Strict {
    fn decide(&self, _: &mut Scene<'_>, _: &'static str, decision: Decision) -> Decision {
        decision
    }

    fn marked(&self, _: &mut Scene<'_>) -> Decision {
        Decision::CONTINUE
    }

    fn reply(&self, _: Peer, _: &RequestView<'_>, _: Decision, _: u64) -> Reply {
        Reply { status: 403, ..Reply::default() }
    }
}

#[derive(Debug)]
struct Hooked(Heard);

impl ChainSource for Hooked {
    fn chain(&self, _: usize, _: usize) -> Chain {
        let tree = PrefixTree::new(TreeConfig { memory_bytes: 1 << 20, window_ms: 10_000, seed: 1 });
        Chain::new(tree, vec![Box::new(Everywhere(Arc::clone(&self.0)))], Box::new(Strict), 1)
    }
}

/// Answers each request on a connection of its own, whatever it is, with 200 and a body that may be cached.
fn origin() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let mut seen = Vec::new();
                let mut buffer = [0; 4096];
                while !seen.windows(4).any(|end| end == b"\r\n\r\n") {
                    match stream.read(&mut buffer) {
                        Ok(0) | Err(_) => return,
                        Ok(length) => seen.extend_from_slice(&buffer[..length]),
                    }
                }
                let _ = stream.write_all(
                    b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 4\r\nConnection: close\r\n\r\nhere",
                );
            });
        }
    });
    address
}

struct Site {
    engine: Engine,
    address: SocketAddr,
    heard: Heard,
}

impl Site {
    fn start() -> Self {
        let heard = Heard::default();
        let settings = Settings {
            client_directives: true,
            workers: 1,
            listeners: vec![Listener {
                address: (Ipv4Addr::LOCALHOST, 0).into(),
                protocol: Protocol::Http,
                proxy_protocol: false,
                http2: false,
                http3: false,
            }],
            certificates: Vec::new(),
            issued: Arc::default(),
            https_only: false,
            compression: tidegate_accelerator::settings::Compression::default(),
            upstreams: vec![Upstream::new("app", vec![origin()])],
            routes: vec![Route::new("*", "/", Target::Upstream("app".into()))],
            cache: Cache { memory_bytes: 8 << 20, ..Cache::default() },
            limits: Limits::default(),
            trusted_proxies: Vec::new(),
            personality: Personality::Strict,
            pseudonym: "test".into(),
            access_log: None,
            icap: Vec::new(),
            connections: None,
            requests: None,
            defence: Some(Arc::new(Hooked(Arc::clone(&heard)))),
        };
        let engine = Engine::start(settings).unwrap();
        let address = engine.listen_addresses()[0];
        Self { engine, address, heard }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    /// What comes back for these bytes, to the end of the connection.
    fn answer(&self, bytes: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(bytes.as_bytes()).unwrap();
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        text(&all)
    }

    fn get(&self, target: &str) -> String {
        self.answer(&format!("GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"))
    }

    /// What was heard so far, once it ends with a connection's end.
    fn heard(&self) -> Vec<String> {
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        loop {
            let heard = self.heard.lock().unwrap();
            if heard.last().is_some_and(|last| last == "close") {
                return heard.clone();
            }
            drop(heard);
            assert!(std::time::Instant::now() < deadline, "the connection's end was not heard");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.engine.drain();
    }
}

#[test]
fn hooks_are_asked_in_the_order_of_a_connections_life() {
    let site = Site::start();
    let request = "POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nConnection: close\r\n\r\ngood";
    assert!(site.answer(request).starts_with("HTTP/1.1 200"));
    let expected = ["connect", "line /x", "head /x", "body good", "start /x 200", "end /x 200", "close"];
    assert_eq!(site.heard(), expected);
}

#[test]
fn a_line_is_judged_before_the_head_is_whole_and_once() {
    let site = Site::start();
    let refused = site.answer("GET /line HTTP/1.1\r\nHo");
    assert!(refused.starts_with("HTTP/1.1 403"), "{refused}");
    assert_eq!(site.heard(), ["connect", "line /line", "close"]);
    let mut slow = site.connect();
    for piece in ["GET /sl", "ow HTTP/1.1\r\n", "Host: h\r\nConn", "ection: close\r\n\r\n"] {
        slow.write_all(piece.as_bytes()).unwrap();
        // Pieces that arrive together are judged as one: the outcome is the same.
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut all = Vec::new();
    slow.read_to_end(&mut all).unwrap();
    assert!(all.starts_with(b"HTTP/1.1 200"));
    assert_eq!(site.heard().iter().filter(|heard| *heard == "line /slow").count(), 1);
}

#[test]
fn each_hook_can_refuse() {
    let site = Site::start();
    for target in ["/line", "/head", "/start"] {
        let refused = site.get(target);
        assert!(refused.starts_with("HTTP/1.1 403"), "{target}: {refused}");
        assert!(!refused.contains("here"), "{target}: {refused}");
    }
    let body = "POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbad";
    assert!(site.answer(body).starts_with("HTTP/1.1 403"));
    // What follows on the connection is not answered.
    let twice = site.answer(
        "GET /end HTTP/1.1\r\nHost: h\r\n\r\nGET /two HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
    );
    assert_eq!(twice.matches("HTTP/1.1 200").count(), 1, "{twice}");
}

#[test]
fn a_response_out_of_the_cache_is_judged_before_it_is_sent_too() {
    let site = Site::start();
    assert!(site.get("/x").ends_with("here"));
    assert!(site.get("/x").ends_with("here"));
    // Stored before anybody looked at it: refused all the same.
    for _ in 0..2 {
        assert!(site.get("/start").starts_with("HTTP/1.1 403"));
    }
    let heard = site.heard();
    let starts = heard.iter().filter(|heard| heard.starts_with("start /start")).count();
    assert_eq!(starts, 2, "{heard:?}");
}
