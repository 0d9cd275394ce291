//! Replicas whose routes lead to an upstream: what they ask it for, and what they keep.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod replica;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use replica::{Replica, downloaded_without, noise, run, site, tidegate};

/// The targets of requests, in the order they came.
type Targets = std::sync::Mutex<Vec<String>>;

/// An origin server that remembers what it was asked for and whose responses follow from the target.
struct Origin {
    address: std::net::SocketAddr,
    targets: std::sync::Arc<Targets>,
}

impl Origin {
    fn start(content: Vec<u8>) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let targets = std::sync::Arc::new(Targets::default());
        let (content, asked) = (std::sync::Arc::new(content), std::sync::Arc::clone(&targets));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (content, asked) = (content.clone(), asked.clone());
                std::thread::spawn(move || Self::answer(stream.unwrap(), &content, &asked));
            }
        });
        Self { address, targets }
    }

    fn answer(stream: std::net::TcpStream, content: &[u8], asked: &Targets) {
        use std::io::Write;
        let mut reader = BufReader::new(stream);
        loop {
            let (mut head, mut line) = (String::new(), String::new());
            while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
                head.push_str(&std::mem::take(&mut line));
            }
            if head.is_empty() {
                return;
            }
            let length = head
                .lines()
                .find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
            let mut body = vec![0; length.unwrap_or(0)];
            reader.read_exact(&mut body).unwrap();
            let target = head.split_whitespace().nth(1).unwrap();
            let nth = {
                let mut asked = asked.lock().unwrap();
                asked.push(target.to_owned());
                asked.len()
            };
            let mut out = Vec::new();
            match target {
                // Range is not known here.
                path @ ("/large" | "/uncached") => {
                    let lives = if path == "/large" { "max-age=60" } else { "no-store" };
                    let fields = "ETag: \"v1\"\r\nContent-Type: application/x-test";
                    let length = content.len();
                    write!(
                        out,
                        "HTTP/1.1 200 OK\r\n{fields}\r\nCache-Control: {lives}\r\nContent-Length: {length}\r\n\r\n"
                    )
                    .unwrap();
                    out.extend_from_slice(content);
                }
                "/chunked" => {
                    out.extend_from_slice(
                        b"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nTransfer-Encoding: chunked\r\n\r\n",
                    );
                    for chunk in content[..300_000].chunks(7_777) {
                        write!(out, "{:x}\r\n", chunk.len()).unwrap();
                        out.extend_from_slice(chunk);
                        out.extend_from_slice(b"\r\n");
                    }
                    out.extend_from_slice(b"0\r\n\r\n");
                }
                "/session" => write!(
                    out,
                    "HTTP/1.1 200 OK\r\nETag: \"v1\"\r\nSet-Cookie: session={nth}\r\nContent-Length: 2\r\n\r\nhi"
                )
                .unwrap(),
                // Another content for each client, and for each coding that it knows, under one tag or several.
                path @ ("/mine" | "/coded") => {
                    let own = head.lines().find_map(|line| line.strip_prefix("X-Own: ").or(line.strip_prefix("Cookie: ")));
                    let own = own.unwrap_or("nobody's");
                    let fields = match path {
                        "/mine" => "ETag: \"v1\"".to_owned(),
                        _ => format!("ETag: \"{own}\"\r\nVary: X-Own"),
                    };
                    let length = content.len();
                    write!(out, "HTTP/1.1 200 OK\r\n{fields}\r\nCache-Control: no-cache\r\nContent-Length: {length}\r\n\r\n").unwrap();
                    let letter = own.as_bytes()[0];
                    out.extend(content.iter().map(|byte| byte ^ letter));
                }
                "/empty" if head.contains("Range: ") => out.extend_from_slice(
                    b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Range: bytes */0\r\nContent-Length: 0\r\n\r\n",
                ),
                "/empty" => {
                    let long = "x".repeat(6000);
                    write!(out, "HTTP/1.1 200 OK\r\nETag: \"v1\"\r\nX-Long: {long}\r\nContent-Length: 0\r\n\r\n").unwrap();
                }
                "/post" => {
                    let text = format!("{nth} {}", String::from_utf8_lossy(&body));
                    write!(
                        out,
                        "HTTP/1.1 201 Created\r\nX-Test: yes\r\nContent-Length: {}\r\n\r\n{text}",
                        text.len()
                    )
                    .unwrap();
                }
                _ => out.extend_from_slice(b"HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\nnothing"),
            }
            if reader.get_mut().write_all(&out).is_err() {
                return;
            }
        }
    }

    fn requests(&self) -> usize {
        self.targets.lock().unwrap().len()
    }

    fn requests_for(&self, wanted: &str) -> usize {
        self.targets.lock().unwrap().iter().filter(|target| *target == wanted).count()
    }
}

/// A replica whose routes lead to the origin, with a cache.
fn start_before(directory: &Path, name: &str, origin: &Origin) -> Replica {
    let config = directory.join(format!("{name}.toml"));
    let keys = directory.join("keys");
    let text = format!(
        "workers = 2\n[[listen]]\naddress = \"127.0.0.1:0\"\nprotocol = \"trickles\"\nkeys = {keys:?}\n\
         [admin]\naddress = \"127.0.0.1:0\"\n[[upstream]]\nname = \"app\"\nservers = [\"{}\"]\n\
         [[route]]\nupstream = \"app\"\n",
        origin.address
    );
    std::fs::write(&config, text).unwrap();
    run(tidegate(), &config)
}

#[test]
fn an_upstream_behind_the_cache_when_asked_by_trickles_then_it_is_not_asked_again_and_replicas_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = noise(20_000_000);
    site(directory.path(), b"");
    let origin = Origin::start(bytes.clone());
    let (first, second) =
        (start_before(directory.path(), "first", &origin), start_before(directory.path(), "second", &origin));
    let fetch = |url: &str| tidegate().args(["fetch", "-v", url]).output().unwrap();
    let url = format!("trickles://{}/large", first.address);
    let output = fetch(&url);
    let head = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && output.stdout == bytes, "{head}");
    assert!(head.contains("Content-Type: application/x-test") && head.contains("ETag: \"v1\""), "{head}");
    let asked = origin.requests();
    assert!(fetch(&url).stdout == bytes);
    assert_eq!(origin.requests(), asked, "the second time it comes from the cache");

    // The first replica is killed in mid-download; the other finds the object by its validator.
    let url = format!("trickles://{},{}/large", first.address, second.address);
    let mut fetching = tidegate();
    fetching.args(["fetch", &url]);
    let content = downloaded_without(first, fetching);
    assert!(content == bytes, "{} bytes", content.len());

    // Of no validator and of no length, not stored, and not there.
    let chunked = fetch(&format!("trickles://{}/chunked", second.address));
    assert!(chunked.stdout == bytes[..300_000], "{}", String::from_utf8_lossy(&chunked.stderr));
    let missing = fetch(&format!("trickles://{}/none", second.address));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("404"), "{missing:?}");
    assert_eq!(missing.stdout, b"nothing");
}

#[test]
fn a_response_that_is_not_stored_when_fetched_then_one_request_of_the_upstream_serves_it_until_a_replica_dies()
 {
    let directory = tempfile::tempdir().unwrap();
    let bytes = noise(20_000_000);
    site(directory.path(), b"");
    let origin = Origin::start(bytes.clone());
    let (first, second) =
        (start_before(directory.path(), "first", &origin), start_before(directory.path(), "second", &origin));
    let blocks = bytes.len() / (256 << 10);
    let output =
        tidegate().args(["fetch", &format!("trickles://{}/uncached", first.address)]).output().unwrap();
    assert!(output.status.success() && output.stdout == bytes, "{output:?}");
    // What nobody has read for seconds is asked for again: a machine may be so slow now and then.
    assert!(origin.requests() < blocks / 10, "{} requests for {blocks} blocks", origin.requests());

    let asked = origin.requests();
    let mut fetching = tidegate();
    fetching.args(["fetch", &format!("trickles://{},{}/uncached", first.address, second.address)]);
    let content = downloaded_without(first, fetching);
    assert!(content == bytes, "{} bytes", content.len());
    assert!(origin.requests() - asked < blocks / 10, "{} requests", origin.requests() - asked);
}

/// Two clients with the same words within a second: neither has a session of the other's.
#[test]
fn a_cookie_when_set_for_one_client_then_the_next_gets_one_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"");
    let origin = Origin::start(Vec::new());
    let replica = start_before(directory.path(), "only", &origin);
    let url = format!("trickles://{}/session", replica.address);
    let cookie = || {
        let output = tidegate().args(["fetch", "-v", &url]).output().unwrap();
        let head = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.stdout, b"hi", "{head}");
        head.lines().find(|line| line.starts_with("< Set-Cookie: session=")).unwrap().to_owned()
    };
    let first = cookie();
    assert_ne!(first, cookie());
}

/// Asks for a path with one more field on a connection of its own.
async fn opened(address: &str, path: &str, field: &str) -> tidegate_trickles::udp::RequestStream {
    use tokio::io::AsyncWriteExt;
    let options = tidegate_trickles::udp::Options::to(vec![address.parse().unwrap()]);
    let connection = tidegate_trickles::udp::Connection::new(&options).unwrap();
    let mut stream = connection.open().unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: h\r\n{field}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    stream
}

/// What follows the head.
async fn content_of(mut stream: tidegate_trickles::udp::RequestStream) -> Vec<u8> {
    use tokio::io::AsyncReadExt;
    let mut all = Vec::new();
    stream.read_to_end(&mut all).await.unwrap();
    let end = all.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    all.split_off(end + 4)
}

#[tokio::test]
async fn a_response_to_a_cookie_when_another_client_has_one_of_the_same_tag_then_neither_gets_a_byte_of_the_others()
 {
    use tokio::io::AsyncReadExt;
    let directory = tempfile::tempdir().unwrap();
    let bytes = noise(20_000_000);
    site(directory.path(), b"");
    let origin = Origin::start(bytes.clone());
    let replica = start_before(directory.path(), "only", &origin);
    let own = |letter: u8| bytes.iter().map(|byte| byte ^ letter).collect::<Vec<u8>>();
    let mut first = opened(&replica.address, "/mine", "Cookie: a").await;
    let mut beginning = [0; 1000];
    first.read_exact(&mut beginning).await.unwrap();
    let second = content_of(opened(&replica.address, "/mine", "Cookie: b").await).await;
    assert!(second == own(b'b'));
    let mut rest = Vec::new();
    first.read_to_end(&mut rest).await.unwrap();
    assert!(own(b'a').ends_with(&rest) && rest.len() > bytes.len() - 1000);
}

#[tokio::test]
async fn a_variant_when_it_is_asked_for_again_in_parts_then_with_the_fields_that_chose_it() {
    use tokio::io::AsyncReadExt;
    let directory = tempfile::tempdir().unwrap();
    let bytes = noise(20_000_000);
    site(directory.path(), b"");
    let origin = Origin::start(bytes.clone());
    let replica = start_before(directory.path(), "only", &origin);
    let mut first = opened(&replica.address, "/coded", "X-Own: a").await;
    let mut beginning = [0; 1000];
    first.read_exact(&mut beginning).await.unwrap();
    // More than are held for one address: the first is read on no more.
    let mut others = Vec::new();
    for _ in 0..20 {
        let mut other = opened(&replica.address, "/uncached", "X-Own: b").await;
        other.read_exact(&mut beginning).await.unwrap();
        others.push(other);
    }
    let mut rest = Vec::new();
    first.read_to_end(&mut rest).await.unwrap();
    let own: Vec<u8> = bytes.iter().map(|byte| byte ^ b'a').collect();
    assert!(own.ends_with(&rest) && rest.len() > bytes.len() - 1000);
    assert!(origin.requests_for("/coded") > 1, "nothing was asked for again");
}

/// Takes a client's first packet to one replica and the rest to another, which both see the same address.
fn spread(first: &str, then: &str) -> String {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let replicas: [std::net::SocketAddr; 2] = [first.parse().unwrap(), then.parse().unwrap()];
    std::thread::spawn(move || {
        let (mut packet, mut client, mut to) = ([0; 65_536], None, 0);
        while let Ok((length, from)) = socket.recv_from(&mut packet) {
            let to = if replicas.contains(&from) {
                client
            } else {
                client = Some(from);
                Some(replicas[std::mem::replace(&mut to, 1)])
            };
            // To a replica that has ended, nothing can be sent.
            let _ = to.map(|to| socket.send_to(&packet[..length], to));
        }
    });
    address
}

#[tokio::test]
async fn a_resource_without_a_byte_when_another_replica_goes_on_then_its_head_is_whole() {
    use tokio::io::AsyncReadExt;
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"");
    let origin = Origin::start(Vec::new());
    let (first, second) =
        (start_before(directory.path(), "first", &origin), start_before(directory.path(), "second", &origin));
    let mut stream = opened(&spread(&first.address, &second.address), "/empty", "X-Own: a").await;
    let mut head = String::new();
    stream.read_to_string(&mut head).await.unwrap();
    assert!(head.contains(&format!("X-Long: {}\r\n", "x".repeat(6000))), "{} bytes", head.len());
    assert_eq!(origin.requests(), 2, "one of each replica");
}

#[test]
fn a_post_when_it_fits_a_continuation_then_the_upstream_has_it_once() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"");
    let origin = Origin::start(Vec::new());
    let replica = start_before(directory.path(), "only", &origin);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let options = tidegate_trickles::udp::Options::to(vec![replica.address.parse().unwrap()]);
        let connection = tidegate_trickles::udp::Connection::new(&options).unwrap();
        let mut stream = connection.open().unwrap();
        let request = b"POST /post HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello\
                        HEAD /none HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
        stream.write_all(request).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 201 Created\r\n"), "{answer}");
        assert!(answer.contains("X-Test: yes\r\n") && answer.contains("\r\n\r\n1 hello"), "{answer}");
        assert!(answer.contains("HTTP/1.1 404 Not Found\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
    });
    assert_eq!(origin.requests(), 2);
}

/// Serves one endless response that is not to be stored; the bytes of it that were taken.
fn endless() -> (std::net::SocketAddr, std::thread::JoinHandle<usize>) {
    use std::io::Write;
    const BYTES: usize = 512 << 20;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let taken = std::thread::spawn(move || {
        // The first connection only looks whether somebody is there.
        drop(listener.accept().unwrap());
        let mut reader = BufReader::new(listener.accept().unwrap().0);
        let mut line = String::new();
        while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
            line.clear();
        }
        let head = format!(
            "HTTP/1.1 200 OK\r\nETag: \"v\"\r\nCache-Control: no-store\r\nContent-Length: {BYTES}\r\n\r\n"
        );
        reader.get_mut().write_all(head.as_bytes()).unwrap();
        let (piece, mut taken) = (vec![b'x'; 1 << 16], 0);
        while taken < BYTES && reader.get_mut().write_all(&piece).is_ok() {
            taken += piece.len();
        }
        taken
    });
    (address, taken)
}

#[test]
fn a_response_that_is_not_stored_when_it_is_asked_for_then_no_more_is_taken_than_the_client_may_want_next() {
    use tokio::io::AsyncReadExt;
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"");
    let (address, taken) = endless();
    let origin = Origin { address, targets: std::sync::Arc::default() };
    let replica = start_before(directory.path(), "only", &origin);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let options = tidegate_trickles::udp::Options::to(vec![replica.address.parse().unwrap()]);
        let connection = tidegate_trickles::udp::Connection::new(&options).unwrap();
        let mut stream = connection.request(b"GET /endless HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
        let mut start = [0; 12];
        stream.read_exact(&mut start).await.unwrap();
        assert_eq!(start, *b"HTTP/1.1 200");
    });
    let taken = taken.join().unwrap();
    // A megabyte that is kept, and what sockets hold on the way.
    assert!(taken < 64 << 20, "{taken} bytes of a response that nobody reads");
}
