//! Two replicas that share a key file: one is killed in mid-download, the other goes on with it.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod replica;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use replica::{Namespace, Replica, downloaded_without, noise, run, site, start, start_with, tidegate};

#[test]
fn a_replica_when_killed_in_mid_download_then_the_other_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = noise(30_000_000);
    site(directory.path(), &bytes);
    let (first, second) = (start(directory.path(), "first"), start(directory.path(), "second"));
    let url = format!("trickles://{},{}/large.bin", first.address, second.address);
    let mut fetch = tidegate();
    let said = directory.path().join("said");
    fetch.args(["fetch", "-v", &url]).stderr(std::fs::File::create(&said).unwrap());
    let content = downloaded_without(first, fetch);
    assert_eq!(content.len(), bytes.len());
    assert!(content == bytes, "a byte differs");
    let said = std::fs::read_to_string(said).unwrap();
    assert!(said.contains(&format!("* {} goes on\n", second.address)), "{said}");
}

#[test]
fn a_reload_when_routes_have_changed_then_they_are_in_force_for_connections_that_are_there() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"before");
    let other = directory.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("large.bin"), "after").unwrap();
    let replica = start(directory.path(), "only");
    let url = format!("trickles://{}/large.bin", replica.address);
    let fetched = || tidegate().args(["fetch", &url]).output().unwrap().stdout;
    assert_eq!(fetched(), b"before");
    let config = directory.path().join("only.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    let reload = |root: &Path, wanted: &str| {
        let root_before = format!("{:?}", directory.path().join("root"));
        std::fs::write(&config, text.replace(&root_before, &format!("{root:?}"))).unwrap();
        let process = rustix::process::Pid::from_child(&replica.process);
        rustix::process::kill_process(process, rustix::process::Signal::HUP).unwrap();
        while !replica.later.recv_timeout(Duration::from_secs(60)).unwrap().contains(wanted) {}
    };
    reload(&directory.path().join("none"), "the old configuration stays in force: ");
    assert_eq!(fetched(), b"before");
    reload(&other, "only.toml was read again and is in force");
    assert_eq!(fetched(), b"after");
}

#[test]
fn a_file_when_fetched_in_the_format_of_tcp_then_it_has_every_byte() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = noise(3_000_000);
    site(directory.path(), &bytes);
    let namespace = Namespace::new();
    let replica = start_with(
        directory.path(),
        "tcp",
        namespace.tidegate(),
        "format = \"tcp\"\ninterface = \"none0\"\n",
    );
    let fallen = replica.said.iter().any(|line| line.contains("AF_PACKET takes Trickles segments instead"));
    assert!(fallen, "{:?}", replica.said);
    let url = format!("trickles://{}/large.bin", replica.address);
    let fetched = namespace.tidegate().args(["fetch", "--tcp-format", &url]).output().unwrap();
    assert!(fetched.status.success(), "{}", String::from_utf8_lossy(&fetched.stderr));
    assert!(fetched.stdout == bytes, "{} bytes", fetched.stdout.len());
    let by_udp = namespace.tidegate().args(["fetch", &url]).output().unwrap();
    assert_eq!(by_udp.status.code(), Some(1), "UDP is refused there");
    assert!(String::from_utf8_lossy(&by_udp.stderr).contains("connection refused"));
}

#[test]
fn a_service_that_requires_encryption_when_fetched_from_then_only_its_key_and_only_sealed_packets_do() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"sealed");
    // The public key of this identity is that of the first vector of RFC 7748 §6.1.
    let identity = "77076d0a7318a57d3c16c17251b26645df4cda518a8e35b1f5f4e8d0a0b5a3b9";
    let keys = format!("7 000102030405060708090a0b0c0d0e0f\nidentity {identity}\n");
    std::fs::write(directory.path().join("keys"), keys).unwrap();
    let replica = start_with(directory.path(), "sealed", tidegate(), "encryption = \"required\"\n");
    let key = replica.said.iter().find_map(|line| line.split_once(" for encryption is "));
    let key = key.expect("the start says the key").1.to_owned();
    let mut later = std::iter::from_fn(|| replica.later.recv_timeout(Duration::from_secs(60)).ok());
    let admin = later.find_map(|line| Some(line.split_once("admin on http://")?.1.to_owned())).unwrap();
    let status = tidegate().args(["status", "--admin", &admin]).output().unwrap().stdout;
    let line = format!("listening on trickles://{}, key for encryption {key}\n", replica.address);
    assert!(String::from_utf8(status).unwrap().contains(&line));
    let url = format!("trickles://{}/large.bin", replica.address);
    let fetch = |more: &[&str]| tidegate().arg("fetch").args(more).arg(&url).output().unwrap();
    for arguments in [&[][..], &["--server-key", &key]] {
        let found = fetch(arguments);
        assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
        assert_eq!(found.stdout, b"sealed");
    }
    let wrong = fetch(&["--server-key", &"11".repeat(32)]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("not the pinned one"));
    assert_eq!(fetch(&["--server-key", "11"]).status.code(), Some(2));
    assert_eq!(fetch(&["--server-key", &key, "--no-encryption"]).status.code(), Some(2));
}

#[test]
fn an_error_status_and_a_wrong_url_when_fetched_then_they_are_failures() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"x");
    let replica = start(directory.path(), "only");
    let fetch = |url: &str| tidegate().args(["fetch", "-v", url]).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let found = fetch(&format!("trickles://{}/large.bin", replica.address));
    assert_eq!((found.status.code(), found.stdout.as_slice()), (Some(0), &b"x"[..]));
    assert!(text(&found.stderr).contains("< HTTP/1.1 200 OK"));
    let missing = fetch(&format!("trickles://{}/none", replica.address));
    assert_eq!((missing.status.code(), text(&missing.stdout)), (Some(1), "404 Not Found\n".into()));
    assert!(text(&missing.stderr).lines().last().unwrap().ends_with("404 Not Found"));
    // A page that says so does not take the place of what was there.
    let before = directory.path().join("before");
    std::fs::write(&before, "precious").unwrap();
    let url = format!("trickles://{}/none", replica.address);
    let missing = tidegate().args(["fetch", "-o"]).arg(&before).arg(&url).output().unwrap();
    assert_eq!((missing.status.code(), missing.stdout.as_slice()), (Some(1), &b""[..]));
    assert_eq!(std::fs::read(&before).unwrap(), b"precious");
    std::fs::create_dir(directory.path().join("root/folder")).unwrap();
    let moved = fetch(&format!("trickles://{}/folder", replica.address));
    assert_eq!(moved.status.code(), Some(1));
    assert!(text(&moved.stderr).contains("301 Moved Permanently: it is at /folder/;"), "{moved:?}");
    // A name that nothing is known of leaves the other replicas.
    let beside = fetch(&format!("trickles://{},no..name/large.bin", replica.address));
    assert_eq!((beside.status.code(), beside.stdout.as_slice()), (Some(0), &b"x"[..]), "{beside:?}");
    assert!(text(&beside.stderr).contains("no..name:80"), "{beside:?}");
    let nobody = fetch("trickles://no..name/");
    assert_eq!((nobody.status.code(), text(&nobody.stderr).lines().count()), (Some(1), 1), "{nobody:?}");
    assert_eq!(fetch("trickles://").status.code(), Some(2));
    assert_eq!(fetch("trickles://127.0.0.1:0/").status.code(), Some(2));
    assert_eq!(fetch("gopher://x/").status.code(), Some(2));
}

/// A listener that does not start: the configuration with `text` as its [[listen]], and the one line of errors.
fn refused(directory: &Path, listen: &str, program: &mut Command) -> (String, String) {
    let config = directory.join("t.toml");
    let text = format!(
        "[[listen]]\n{listen}\nprotocol = \"trickles\"\n[admin]\naddress = \"127.0.0.1:0\"\n[[route]]\nroot = {:?}\n",
        directory.join("root"),
    );
    std::fs::write(&config, text).unwrap();
    let ended = program.args(["run", "--config"]).arg(&config).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    let errors: Vec<&str> =
        said.lines().filter(|line| !line.contains(" WARN ") && !line.contains(" INFO ")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    (config.display().to_string(), errors[0].to_owned())
}

#[test]
fn a_listener_when_its_keys_cannot_be_read_then_one_line_says_where_and_why() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"x");
    let keys = directory.path().join("keys");
    std::fs::write(&keys, "7 0001\n").unwrap();
    let none = directory.path().join("none");
    for (path, why) in [
        (&keys, "line 1: expected an epoch from 0 to 255"),
        (&none, "No such file or directory"),
        (&directory.path().to_owned(), "no regular file"),
    ] {
        let listen = format!("address = \"127.0.0.1:0\"\nkeys = {path:?}");
        let (file, line) = refused(directory.path(), &listen, &mut tidegate());
        assert!(
            line.starts_with(&format!("{file}:3:8: listen.keys: cannot serve Trickles on 127.0.0.1:0: ")),
            "{line}"
        );
        assert!(line.contains(why) && line.contains(&path.display().to_string()), "{line}");
    }
}

#[test]
fn a_listener_when_its_address_is_taken_then_one_line_says_where() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"x");
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let (file, line) = refused(directory.path(), &format!("address = \"{address}\""), &mut tidegate());
    let start =
        format!("{file}:2:11: listen.address: cannot serve Trickles on {address}: Address already in use");
    assert!(line.starts_with(&start), "{line}");
}

#[test]
fn a_listener_in_the_format_of_tcp_when_privileges_are_missing_then_one_line_offers_udp() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"x");
    let mut program = Command::new("setpriv");
    program.args(["--bounding-set", "-all", env!("CARGO_BIN_EXE_tidegate")]);
    let listen = "address = \"127.0.0.1:4000\"\nformat = \"tcp\"";
    let (file, line) = refused(directory.path(), listen, &mut program);
    let start = format!("{file}:3:10: listen.format: cannot serve Trickles on 127.0.0.1:4000: ");
    assert!(line.starts_with(&start) && line.contains("UDP"), "{line}");
    assert!(line.ends_with("format = \"udp\" needs no privilege"), "{line}");
    // So does a client.
    let fetched = Command::new("setpriv")
        .args(["--bounding-set", "-all", env!("CARGO_BIN_EXE_tidegate")])
        .args(["fetch", "--tcp-format", "trickles://127.0.0.1:4000/x"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&fetched.stderr).into_owned();
    assert_eq!((fetched.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(
        said.starts_with("error: trickles://127.0.0.1:4000/x: ") && said.contains("UDP needs none"),
        "{said}"
    );
}

/// Runs in a network of its own whose loopback interface carries packets of `mtu` bytes.
fn narrow(mtu: u32) -> Command {
    assert!(rustix::process::geteuid().is_root(), "this test makes a network namespace and needs root");
    let mut program = Command::new("unshare");
    // What /sys says is said of the network that it was mounted in.
    let script = format!("mount -t sysfs sysfs /sys && ip link set lo mtu {mtu} up && exec \"$0\" \"$@\"");
    program.args(["--net", "--mount", "sh", "-c", &script, env!("CARGO_BIN_EXE_tidegate")]);
    program
}

#[test]
fn an_interface_that_is_too_narrow_when_served_on_or_fetched_over_then_one_line_says_what_it_needs() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"x");
    for (listen, place, least) in [
        ("address = \"127.0.0.1:4000\"", "2:11: listen.address", 733),
        ("address = \"0.0.0.0:4000\"\nformat = \"tcp\"\ninterface = \"lo\"", "4:13: listen.interface", 749),
    ] {
        let (file, line) = refused(directory.path(), listen, &mut narrow(600));
        let wanted = format!("packets on lo have at most 600 bytes, and Trickles needs {least}");
        assert!(line.starts_with(&format!("{file}:{place}: ")) && line.contains(&wanted), "{line}");
    }
    for (arguments, least) in [
        (&["fetch", "--no-encryption", "trickles://127.0.0.1:4000/x"][..], 733),
        (&["fetch", "trickles://127.0.0.1:4000/x"], 813),
        (&["gateway", "--listen", "127.0.0.1:0", "--to", "trickles://127.0.0.1:4000"], 813),
    ] {
        let ended = narrow(600).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!((ended.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        assert!(
            said.starts_with("error: ") && said.contains(&format!("600 bytes, and Trickles needs {least}")),
            "{said}"
        );
    }
}

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

#[test]
fn a_client_when_it_asks_for_what_it_is_blocked_for_then_trickles_refuses_it_and_nobody_else() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"hello");
    let config = directory.path().join("defended.toml");
    let text = format!(
        "workers = 2\n[[listen]]\naddress = \"127.0.0.1:0\"\nprotocol = \"trickles\"\nkeys = {:?}\n\
         [admin]\naddress = \"127.0.0.1:0\"\n[[route]]\nroot = {:?}\n\
         [[filter]]\nuser_agent = \"worm\"\naction = \"block\"\n",
        directory.path().join("keys"),
        directory.path().join("root"),
    );
    std::fs::write(&config, text).unwrap();
    let replica = run(tidegate(), &config);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = |number: u8| {
            let mut options = tidegate_trickles::udp::Options::to(vec![replica.address.parse().unwrap()]);
            options.local = Some([127, 0, 0, number].into());
            tidegate_trickles::udp::Connection::new(&options).unwrap()
        };
        let (bad, good) = (client(2), client(3));
        // The first request of a connection proves no address, and what is decided acts on the next.
        until_status(&bad, "worm", 429).await;
        until_status(&bad, "browser", 429).await;
        for _ in 0..5 {
            assert_eq!(status(&good, "browser").await, 200);
        }
    });
}

/// Asks once; the status of the answer.
async fn status(connection: &tidegate_trickles::udp::Connection, agent: &str) -> u16 {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = connection.open().unwrap();
    let request =
        format!("GET /large.bin HTTP/1.1\r\nHost: h\r\nUser-Agent: {agent}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer[9..12].parse().unwrap()
}

/// Asks until the answer has this status.
async fn until_status(connection: &tidegate_trickles::udp::Connection, agent: &str, wanted: u16) {
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while status(connection, agent).await != wanted {
        assert!(std::time::Instant::now() < end, "never {wanted}");
    }
}

#[test]
fn an_http_client_when_led_by_a_gateway_then_it_has_the_service_on_one_connection() {
    use std::io::Write;
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"content");
    let replica = start(directory.path(), "only");
    let url = format!("trickles://{}", replica.address);
    let mut command = tidegate();
    command.args(["gateway", "--listen", "127.0.0.1:0", "--to", &url]).stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(process.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim_end().rsplit("http://").next().unwrap().to_owned();
    let gateway = Replica { process, address, said: Vec::new(), later: std::sync::mpsc::channel().1 };
    let mut client = std::net::TcpStream::connect(&gateway.address).unwrap();
    let request = "GET /large.bin HTTP/1.1\r\nHost: h\r\n";
    write!(client, "{request}\r\n{request}Range: bytes=3-5\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("\r\n\r\ncontentHTTP/1.1 206 "),
        "{answer}"
    );
    assert!(answer.ends_with("\r\n\r\nten"), "{answer}");

    let wrong = tidegate().args(["gateway", "--to", "http://x/"]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).starts_with("error: --to: expected trickles://"));
}
