//! curl and wget, as they are, over Trickles.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tidegate_trickles::http::{HttpService, StaticRoot};
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::Config;
use tidegate_trickles::udp::UdpService;

fn library() -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let name = "libtidegate_trickles_preload.so";
    let found = [deps.join(name), deps.parent().unwrap().join(name)].into_iter().find(|path| path.exists());
    found.unwrap_or_else(|| panic!("{name} beside {}", deps.display()))
}

fn serve(root: &Path) -> UdpService {
    serve_with(root, &Config::default())
}

fn serve_with(root: &Path, config: &Config) -> UdpService {
    let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
    UdpService::start(address, 1, config, KeyRing::new(1, &[7; 16]), || {
        let root = StaticRoot::open(root, |_| "text/plain").map_err(std::io::Error::other)?;
        Ok(HttpService::new(root, || 1_700_000_000))
    })
    .unwrap()
}

fn root(bytes: &[u8]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("file"), bytes).unwrap();
    root
}

/// A program whose connections to the destination, where nothing listens, are led to `servers`.
fn preloaded(program: &str, servers: &[SocketAddr]) -> (Command, SocketAddr) {
    let destination: SocketAddr = ([127, 0, 0, 1], 1).into();
    let servers: Vec<String> = servers.iter().map(SocketAddr::to_string).collect();
    let installed = Command::new(program).arg("--version").stdout(Stdio::null()).status();
    assert!(installed.is_ok(), "{program} is missing; apt-get install {program}");
    let mut command = Command::new(program);
    command
        .env("LD_PRELOAD", library())
        .env("TIDEGATE_TRICKLES", format!("{destination}={}", servers.join("+")))
        .env_remove("http_proxy")
        .stdout(Stdio::piped());
    (command, destination)
}

fn bytes(count: u32) -> Vec<u8> {
    (0..count).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

#[test]
fn curl_when_its_server_is_killed_in_mid_download_then_another_goes_on() {
    let content = bytes(30_000_000);
    let root = root(&content);
    let (first, second) = (serve(root.path()), serve(root.path()));
    let (mut curl, destination) = preloaded("curl", &[first.local_addr(), second.local_addr()]);
    let mut curl = curl.args(["-sS", &format!("http://{destination}/file")]).spawn().unwrap();
    let mut output = curl.stdout.take().unwrap();
    let mut received = vec![0; 1_000_000];
    output.read_exact(&mut received).unwrap();
    drop(first);
    output.read_to_end(&mut received).unwrap();
    assert!(curl.wait().unwrap().success());
    assert!(received == content, "{} bytes", received.len());
    assert!(second.counters()[0].trickles_packets_sent_total.get() > 1000);
}

#[test]
fn curl_when_it_asks_twice_then_it_keeps_the_connection() {
    let root = root(b"content\n");
    let server = serve(root.path());
    let (mut curl, destination) = preloaded("curl", &[server.local_addr()]);
    let url = format!("http://{destination}/file");
    let output = curl.args(["-sS", "-w", "%{num_connects} %{remote_ip}\n", &url, &url]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(
        text,
        "content\n1 127.0.0.1\ncontent\n0 127.0.0.1\n",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn wget_when_it_fetches_then_it_has_every_byte() {
    let content = bytes(3_000_000);
    let root = root(&content);
    let server = serve(root.path());
    let (mut wget, destination) = preloaded("wget", &[server.local_addr()]);
    let output = wget.args(["-q", "-O", "-", &format!("http://{destination}/file")]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout == content, "{} bytes", output.stdout.len());
}

#[test]
fn a_plain_tcp_server_when_nobody_speaks_trickles_then_it_is_asked_by_tcp() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 1000];
        let count = stream.read(&mut request).unwrap();
        assert!(request[..count].starts_with(b"GET /x HTTP/1.1\r\n"));
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\ntcp").unwrap();
    });
    let mut curl = Command::new("curl");
    curl.env("LD_PRELOAD", library()).env("TIDEGATE_TRICKLES", address.to_string()).env_remove("http_proxy");
    let output = curl.args(["-sS", &format!("http://{address}/x")]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "tcp", "{}", String::from_utf8_lossy(&output.stderr));
    server.join().unwrap();
}

/// One response of a server of plain HTTP, and where it is.
fn plain() -> (SocketAddr, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        assert!(stream.read(&mut [0; 1000]).unwrap() > 0);
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\ntcp").unwrap();
    });
    (address, server)
}

/// Without an interface nothing leads there, on any host (RFC 4291 §2.5.6).
const NOWHERE: &str = "[fe80::1]:4000";

#[test]
fn a_replica_without_a_route_when_listed_first_then_the_next_answers_or_tcp_does() {
    let root = root(b"content\n");
    let server = serve(root.path());
    let (mut curl, destination) = preloaded("curl", &[NOWHERE.parse().unwrap(), server.local_addr()]);
    let output = curl.args(["-sS", &format!("http://{destination}/file")]).output().unwrap();
    assert_eq!(output.stdout, b"content\n", "{}", String::from_utf8_lossy(&output.stderr));
    let (address, thread) = plain();
    let mut curl = Command::new("curl");
    curl.env("LD_PRELOAD", library())
        .env("TIDEGATE_TRICKLES", format!("{address}={NOWHERE}"))
        .env_remove("http_proxy");
    let output = curl.args(["-sS", &format!("http://{address}/x")]).output().unwrap();
    assert_eq!(output.stdout, b"tcp", "{}", String::from_utf8_lossy(&output.stderr));
    thread.join().unwrap();
}

#[test]
fn a_port_where_nobody_listens_when_asked_then_a_line_says_why_the_connection_ends() {
    let nowhere = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (mut curl, destination) = preloaded("curl", &[nowhere]);
    let output = curl.args(["-sS", &format!("http://{destination}/x")]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{output:?}");
    let line =
        format!("tidegate: {destination} over Trickles: connection refused; over TCP: Connection refused");
    assert!(said.contains(&line), "{said}");
}

#[test]
fn a_server_that_requires_encryption_when_asked_then_it_answers_whoever_owns_its_key() {
    let root = root(b"content\n");
    let server = serve_with(root.path(), &Config { require_encryption: true, ..Config::default() });
    let key: String = server.public_key().iter().map(|byte| format!("{byte:02x}")).collect();
    let curl = |key: &str| {
        let (mut curl, destination) = preloaded("curl", &[server.local_addr()]);
        curl.env("TIDEGATE_TRICKLES_KEY", key).args(["-sS", &format!("http://{destination}/file")]);
        curl.output().unwrap()
    };
    for key in ["", &key] {
        let output = curl(key);
        assert_eq!(output.stdout, b"content\n", "{}", String::from_utf8_lossy(&output.stderr));
    }
    for wrong in [&"11".repeat(32)[..], "11"] {
        let output = curl(wrong);
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    }
    let said = curl(&"11".repeat(32));
    assert!(String::from_utf8_lossy(&said.stderr).contains("not the pinned one"), "{said:?}");
    let said = curl("11");
    assert!(String::from_utf8_lossy(&said.stderr).contains("TIDEGATE_TRICKLES_KEY: expected 64"), "{said:?}");
}

#[test]
fn a_pinned_key_when_only_tcp_answers_then_it_is_not_asked() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut curl = Command::new("curl");
    curl.env("LD_PRELOAD", library())
        .env("TIDEGATE_TRICKLES", address.to_string())
        .env("TIDEGATE_TRICKLES_KEY", "11".repeat(32))
        .env_remove("http_proxy");
    let output = curl.args(["-sS", &format!("http://{address}/x")]).output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn a_url_that_is_too_long_when_asked_for_then_the_program_is_told() {
    let root = root(b"content\n");
    let server = serve(root.path());
    let (mut curl, destination) = preloaded("curl", &[server.local_addr()]);
    let url = format!("http://{destination}/{}", "x".repeat(2000));
    let output = curl.args(["-sS", "-w", "%{http_code}", &url]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("at most 729 bytes") && said.ends_with("414"), "{output:?}");
}

/// A client as programs in Python are: connections that are kept, ranges, and a timeout that makes its socket non-blocking.
const CLIENT: &str = r#"
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], timeout=60)
for method, fields, status in [("GET", {}, 200), ("HEAD", {}, 200), ("GET", {"Range": "bytes=1000-1999"}, 206),
                               ("GET", {}, 200)]:
    connection.request(method, "/file", headers=fields)
    response = connection.getresponse()
    body = response.read()
    assert response.status == status, (method, response.status)
    if method == "GET":
        sys.stdout.buffer.write(body)
"#;

#[test]
fn a_client_in_python_when_it_keeps_its_connection_then_each_response_is_right() {
    let content = bytes(300_000);
    let root = root(&content);
    let server = serve(root.path());
    let (mut python, destination) = preloaded("python3", &[server.local_addr()]);
    let output = python.args(["-c", CLIENT, &destination.to_string()]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let expected = [&content[..], &content[1000..2000], &content[..]].concat();
    assert!(output.stdout == expected, "{} bytes", output.stdout.len());
}

/// A client that looks at the answer once it has written all of its request.
const WRITER: &str = r#"
import select, socket, sys, time
host, port = sys.argv[1].rsplit(":", 1)
program = socket.create_connection((host, int(port)), timeout=60)
program.sendall(b"PUT /file HTTP/1.1\r\nHost: example.com\r\nContent-Length: 200000\r\n\r\n" + bytes(1000))
select.select([program], [], [], 60)
time.sleep(0.2)  # The answer has ended by now.
program.sendall(bytes(199000))
answer = b""
while piece := program.recv(65536):
    answer += piece
sys.stdout.buffer.write(answer)
"#;

#[test]
fn a_program_that_is_answered_early_when_it_has_written_its_request_then_it_reads_the_answer() {
    let root = root(b"content\n");
    let server = serve(root.path());
    let (mut python, destination) = preloaded("python3", &[server.local_addr()]);
    let output = python.args(["-c", WRITER, &destination.to_string()]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout.starts_with(b"HTTP/1.1 405 "), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn an_upload_of_any_length_when_a_replica_is_there_then_it_answers() {
    let root = root(b"content\n");
    let server = serve(root.path());
    for length in [100_000, 300_000, 3_000_000] {
        std::fs::write(root.path().join("upload"), bytes(length)).unwrap();
        let (mut curl, destination) = preloaded("curl", &[server.local_addr()]);
        let file = root.path().join("upload");
        let url = format!("http://{destination}/file");
        let output = curl
            .args(["-sS", "-o", "/dev/null", "-w", "%{http_code}", "-H", "Expect:", "-T"])
            .arg(file)
            .arg(&url)
            .output()
            .unwrap();
        assert!(output.stdout.ends_with(b"405"), "{length}: {output:?}");
    }
}

#[test]
fn an_upload_when_it_is_longer_than_what_is_kept_then_tcp_has_every_byte() {
    // Nobody refuses datagrams at the same port, and nobody answers them.
    let (listener, _silent) = (0..100)
        .find_map(|_| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let silent = UdpSocket::bind(listener.local_addr().unwrap()).ok()?;
            Some((listener, silent))
        })
        .expect("a port that is free for TCP and UDP");
    let address = listener.local_addr().unwrap();
    let content = bytes(1_000_000);
    let length = content.len();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut received = Vec::new();
        let mut piece = [0; 65536];
        let begins = loop {
            if let Some(at) = received.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            let count = stream.read(&mut piece).unwrap();
            assert!(count > 0, "the head is incomplete");
            received.extend_from_slice(&piece[..count]);
        };
        while received.len() < begins + length {
            let count = stream.read(&mut piece).unwrap();
            assert!(count > 0, "{} of {length} bytes", received.len() - begins);
            received.extend_from_slice(&piece[..count]);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
        received.split_off(begins)
    });
    let directory = root(&content);
    let mut curl = Command::new("curl");
    curl.env("LD_PRELOAD", library()).env("TIDEGATE_TRICKLES", address.to_string()).env_remove("http_proxy");
    let file = format!("@{}", directory.path().join("file").display());
    let url = format!("http://{address}/x");
    let output = curl
        .args(["-sS", "--max-time", "60", "-H", "Expect:", "--data-binary", &file, &url])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(server.join().unwrap() == content);
}
