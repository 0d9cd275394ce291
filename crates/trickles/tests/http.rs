//! HTTP conversations over Trickles over real sockets, before a directory of files.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tidegate_trickles::client::{self, Client, Read};
use tidegate_trickles::http::{Asked, HttpService, Lost, Missing, Part, Resource, Site, StaticRoot};
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::{self, Application, Server, Wait};
use tidegate_trickles::udp::{self, Connection, Options, RequestStream, UdpServer};
use tidegate_trickles::wire::{self, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;

fn now_ms() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64
}

/// Serves `root` until the test's runtime ends.
fn serve(root: &Path) -> SocketAddr {
    let socket = udp::bind("127.0.0.1:0".parse().unwrap(), false).unwrap();
    let keys = KeyRing::new(1, &[7; 16]);
    let server = Server::new(server::Config::default(), keys.clone(), now_ms());
    let root = StaticRoot::open(root, |_| "text/plain").unwrap();
    let mut server = UdpServer::new(socket, server, HttpService::new(root, || now_ms() / 1000)).unwrap();
    let address = server.local_addr().unwrap();
    tokio::spawn(async move {
        let (_keys, rings) = watch::channel(keys);
        server.run(rings, std::future::pending()).await.unwrap();
    });
    address
}

fn root() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("small.txt"), "hello\n").unwrap();
    std::fs::write(root.path().join("index.html"), "<p>index").unwrap();
    std::fs::write(root.path().join("large"), (0..3_000_000_u32).map(|n| (n / 7) as u8).collect::<Vec<_>>())
        .unwrap();
    std::fs::create_dir(root.path().join("sub")).unwrap();
    std::fs::write(root.path().join(".secret"), "no").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", root.path().join("passwd")).unwrap();
    root
}

fn converse(server: SocketAddr) -> RequestStream {
    Connection::new(&Options::to(vec![server])).unwrap().open().unwrap()
}

/// Head and body of the next response.
async fn response(stream: &mut RequestStream, has_body: bool) -> (String, Vec<u8>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    let length =
        head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).map_or(0, |n| n.parse().unwrap());
    let mut body = vec![0; if has_body { length } else { 0 }];
    stream.read_exact(&mut body).await.unwrap();
    (head, body)
}

async fn ask(stream: &mut RequestStream, request: &str) -> (String, Vec<u8>) {
    stream.write_all(request.as_bytes()).await.unwrap();
    response(stream, !request.starts_with("HEAD")).await
}

#[tokio::test]
async fn requests_when_one_after_the_other_then_one_conversation_answers_them() {
    let root = root();
    let mut stream = converse(serve(root.path()));
    let large = std::fs::read(root.path().join("large")).unwrap();
    let (head, body) = ask(&mut stream, "GET /small.txt HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("Content-Type: text/plain"), "{head}");
    assert_eq!(body, b"hello\n");
    let (head, body) = ask(&mut stream, "GET /large HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.contains("Content-Length: 3000000"), "{head}");
    assert!(body == large);
    let (head, _) = ask(&mut stream, "HEAD /large HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.contains("Content-Length: 3000000"), "{head}");
    let (head, body) = ask(&mut stream, "GET / HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert_eq!(body, b"<p>index", "{head}");
    let (head, body) =
        ask(&mut stream, "GET /large HTTP/1.1\r\nHost: h\r\nRange: bytes=1000000-1999999\r\n\r\n").await;
    assert!(
        head.starts_with("HTTP/1.1 206") && head.contains("Content-Range: bytes 1000000-1999999/3000000"),
        "{head}"
    );
    assert!(body == large[1_000_000..2_000_000]);
    let (head, _) = ask(&mut stream, "GET /large HTTP/1.1\r\nHost: h\r\nRange: bytes=3000000-\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 416") && head.contains("Content-Range: bytes */3000000"), "{head}");
    let etag = head.lines().find_map(|line| line.strip_prefix("ETag: ")).unwrap().to_owned();
    let (head, _) =
        ask(&mut stream, &format!("GET /large HTTP/1.1\r\nHost: h\r\nIf-None-Match: {etag}\r\n\r\n")).await;
    assert!(head.starts_with("HTTP/1.1 304"), "{head}");
    let (head, _) = ask(&mut stream, "GET /large HTTP/1.1\r\nHost: h\r\nIf-Match: \"x\"\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 412"), "{head}");
    let (head, _) = ask(&mut stream, "GET /sub HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 301") && head.contains("Location: /sub/"), "{head}");
}

#[tokio::test]
async fn a_root_when_its_link_leads_elsewhere_then_it_is_followed() {
    let directory = tempfile::tempdir().unwrap();
    let (site, next) = (directory.path().join("site"), directory.path().join("next"));
    for release in ["first", "second"] {
        std::fs::create_dir(directory.path().join(release)).unwrap();
        std::fs::write(directory.path().join(release).join("page.txt"), release).unwrap();
    }
    std::os::unix::fs::symlink("first", &site).unwrap();
    let mut stream = converse(serve(&site));
    let request = "GET /page.txt HTTP/1.1\r\nHost: h\r\n\r\n";
    assert_eq!(ask(&mut stream, request).await.1, b"first");
    std::os::unix::fs::symlink("second", &next).unwrap();
    std::fs::rename(&next, &site).unwrap();
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        if ask(&mut stream, request).await.1 == b"second" {
            break;
        }
    }
    assert_eq!(ask(&mut stream, request).await.1, b"second");
    // Where it leads nowhere, what was there is served.
    std::fs::remove_file(&site).unwrap();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(ask(&mut stream, request).await.1, b"second");
}

#[tokio::test]
async fn paths_when_not_for_the_public_then_404() {
    let root = root();
    std::fs::write(root.path().join("sub/page.txt"), "page").unwrap();
    let mut stream = converse(serve(root.path()));
    let (head, body) = ask(&mut stream, "GET /sub/page.txt HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200") && body == b"page", "{head}");
    for path in [
        "/none",
        "/.secret",
        "/%2esecret",
        "/passwd",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/sub/",
        "/sub%2Fpage.txt",
        "/sub%2fpage.txt",
        "/sub%5Cpage.txt",
    ] {
        let (head, body) = ask(&mut stream, &format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n")).await;
        assert!(head.starts_with("HTTP/1.1 404"), "{path}: {head}");
        assert_eq!(body, b"404 Not Found\n");
    }
}

#[tokio::test]
async fn requests_when_sent_ahead_then_they_are_answered_in_order() {
    let root = root();
    for n in 0..100 {
        std::fs::write(root.path().join(format!("{n}")), format!("{n};").repeat(n * 3)).unwrap();
    }
    let mut stream = converse(serve(root.path()));
    let ahead: String = (0..100).map(|n| format!("GET /{n} HTTP/1.1\r\nHost: h\r\n\r\n")).collect();
    stream.write_all(ahead.as_bytes()).await.unwrap();
    for n in 0..100 {
        let (_, body) = response(&mut stream, true).await;
        assert_eq!(body, format!("{n};").repeat(n * 3).into_bytes());
    }
    stream.shutdown().await.unwrap();
    assert_eq!(stream.read(&mut [0; 10]).await.unwrap(), 0, "the output ends with the input");
}

#[tokio::test]
async fn a_conversation_when_closed_by_either_side_then_the_output_ends() {
    let root = root();
    let server = serve(root.path());
    for (request, status) in [
        ("GET /small.txt HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", "200"),
        ("GET /small.txt HTTP/1.0\r\n\r\n", "200"),
        ("POST /small.txt HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello", "405"),
        ("GET /small.txt HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n", "400"),
    ] {
        let mut stream = converse(server);
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut all = String::new();
        stream.read_to_string(&mut all).await.unwrap();
        assert!(all.starts_with(&format!("HTTP/1.1 {status}")) && all.contains("Connection: close"), "{all}");
    }
}

#[tokio::test]
async fn a_file_when_changed_in_mid_transfer_then_the_stream_is_reset() {
    let root = root();
    let mut stream = converse(serve(root.path()));
    stream.write_all(b"GET /large HTTP/1.1\r\nHost: h\r\n\r\n").await.unwrap();
    stream.read_u8().await.unwrap();
    std::fs::write(root.path().join("large"), vec![0; 3_000_000]).unwrap();
    // What the client had asked for before is there; the rest of another file never is.
    let mut rest = vec![0; 1 << 16];
    let error = loop {
        match stream.read(&mut rest).await {
            Ok(0) => panic!("a file of two versions"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

/// What a site was asked for.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// How long each of the reads of its files was.
    reads: Vec<usize>,
    /// How long each of the parts was that were to be made ready.
    prepared: Vec<usize>,
    /// For each request that was looked up or to be made ready: its content, and whether its client is where it says.
    found: Vec<(Vec<u8>, bool)>,
}

/// A directory that takes content, which it answers with the file.
struct Watched {
    root: StaticRoot,
    seen: Arc<Mutex<Seen>>,
}

impl Watched {
    fn note(&self, asked: &Asked<'_>) {
        self.seen.lock().unwrap().found.push((asked.body.to_vec(), asked.proved));
    }
}

impl Site for Watched {
    fn find(&mut self, asked: &Asked<'_>) -> Result<Resource, Missing> {
        self.note(asked);
        self.root.find(asked)
    }

    fn takes_content(&mut self, _: &[u8], _: &[u8]) -> bool {
        true
    }

    fn prepare_find(&mut self, asked: &Asked<'_>) -> Option<Wait> {
        self.note(asked);
        None
    }

    fn prepare_read(&mut self, _: SocketAddr, _: &[u8], _: &[u8], part: Part) -> Option<Wait> {
        self.seen.lock().unwrap().prepared.push(part.length);
        None
    }

    fn known(&mut self, host: &[u8], target: &[u8], version: u64) -> Result<Resource, Lost> {
        self.root.known(host, target, version)
    }

    fn read(
        &mut self,
        host: &[u8],
        target: &[u8],
        version: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<usize, Lost> {
        self.seen.lock().unwrap().reads.push(buffer.len());
        self.root.read(host, target, version, offset, buffer)
    }
}

/// A request without a network, of which `alter` may change what the client sends; returns what the site was asked for,
/// and what the client got.
fn exchange(root: &Path, request: &[u8], mut alter: impl FnMut(Vec<u8>) -> Vec<u8>) -> (Seen, Vec<u8>) {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let site = Watched { root: StaticRoot::open(root, |_| "text/plain").unwrap(), seen: Arc::clone(&seen) };
    let mut service = HttpService::new(site, || 1_700_000_000);
    let mut server = Server::new(server::Config::default(), KeyRing::new(1, &[7; 16]), 0);
    let (start, mut elapsed) = (Instant::now(), Duration::ZERO);
    let mut client = Client::new(client::Config::default(), &[5; 16], start);
    let request = client.request(request, start).unwrap();
    let (mut content, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    for _ in 0..200 {
        let mut answers = Vec::new();
        while let Some(datagram) = client.poll_transmit(start + elapsed) {
            let peer = "192.0.2.7:5000".parse().unwrap();
            let datagram = alter(datagram);
            let mut take = |packet: &[u8]| answers.push(packet.to_vec());
            let received = server.receive(&datagram, peer, elapsed.as_millis() as u64).unwrap();
            let Some((event, socket)) = received else { continue };
            assert!(service.prepare(&event).is_none());
            server.answer(&event, socket, &mut service, &mut take);
        }
        elapsed += Duration::from_millis(50);
        for answer in answers {
            client.handle_datagram(&answer, start + elapsed).unwrap();
        }
        client.handle_timeout(start + elapsed);
        while let Read::Data(count) = client.read(request, &mut buffer).unwrap() {
            content.extend_from_slice(&buffer[..count]);
        }
    }
    let seen = seen.lock().unwrap().clone();
    (seen, content)
}

fn download(root: &Path, target: &str, alter: impl FnMut(Vec<u8>) -> Vec<u8>) -> (Seen, Vec<u8>) {
    exchange(root, format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n").as_bytes(), alter)
}

#[test]
fn ranges_when_one_after_the_other_then_they_are_read_at_once() {
    let root = root();
    let bytes = std::fs::read(root.path().join("large")).unwrap();
    let (Seen { reads, .. }, content) = download(root.path(), "/large", |datagram| datagram);
    assert!(content.ends_with(&bytes), "{} bytes", content.len());
    let packets = bytes.len() / 1472;
    assert!(reads.len() < packets * 3 / 4, "{} reads for {packets} packets", reads.len());
}

#[test]
fn a_range_when_longer_than_its_packet_then_no_more_is_read_than_is_sent() {
    let root = root();
    std::fs::File::create(root.path().join("sparse")).unwrap().set_len(4 << 30).unwrap();
    let mut lies = 0;
    let (seen, _) = download(root.path(), "/sparse", |datagram| {
        let Ok(request) = Request::decode(&datagram) else { return datagram };
        let [first, _, ..] = request.wants[..] else { return datagram };
        lies += 1;
        let mut out = Vec::new();
        Request::encode_head(request.connection, request.timestamp_us, &request.ask, &mut out);
        let ranges = [(first.sequence, 1 << 30), (first.sequence + (1 << 30), 1000)];
        wire::write_wants(&ranges, first.continuation, &mut out);
        out
    });
    assert!(lies > 0);
    for lengths in [seen.reads, seen.prepared] {
        assert!(!lengths.is_empty());
        assert!(lengths.iter().all(|&length| length <= 1472), "{:?}", lengths.iter().max());
    }
}

#[test]
fn a_request_that_changes_something_when_it_comes_in_an_open_then_it_waits_for_proof_of_the_address() {
    let root = root();
    let request = b"POST /small.txt HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc";
    let mut datagrams = Vec::new();
    let (seen, content) = exchange(root.path(), request, |datagram| {
        datagrams.push(datagram.clone());
        datagram
    });
    assert!(content.starts_with(b"HTTP/1.1 200 OK") && content.ends_with(b"hello\n"), "{content:?}");
    assert!(datagrams[0].windows(3).any(|bytes| bytes == b"abc"), "the open has all of it");
    // Made ready once and looked up once.
    assert_eq!(seen.found, [(b"abc".to_vec(), true), (b"abc".to_vec(), true)]);
}

#[test]
fn an_open_when_it_comes_again_and_again_then_it_changes_nothing() {
    let root = root();
    for (request, is_heard) in [
        ("POST /small.txt HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc", false),
        ("GET /small.txt HTTP/1.1\r\nHost: h\r\n\r\n", true),
    ] {
        let (mut first, mut opens) = (None, 0);
        let (seen, _) = exchange(root.path(), request.as_bytes(), |datagram| {
            opens += 1;
            first.get_or_insert(datagram).clone()
        });
        assert_eq!(!seen.found.is_empty(), is_heard, "{request}: {:?}", seen.found);
        assert!(seen.found.iter().all(|(_, proved)| !proved), "{request}");
        assert!(is_heard || opens > 1, "the client goes on as long as it has no response");
    }
}
