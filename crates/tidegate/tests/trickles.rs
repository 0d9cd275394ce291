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
