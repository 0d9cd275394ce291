//! Two replicas that share a key file: one is killed in mid-download, the other goes on with it.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};

struct Replica {
    process: Child,
    address: String,
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn tidegate() -> Command {
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
}

/// Starts a replica and waits until it says where it listens.
fn start(directory: &Path, name: &str) -> Replica {
    start_with(directory, name, tidegate(), "")
}

fn start_with(directory: &Path, name: &str, mut program: Command, more: &str) -> Replica {
    let config = directory.join(format!("{name}.toml"));
    let text = format!(
        "workers = 1\n[[listen]]\naddress = \"127.0.0.1:0\"\nprotocol = \"trickles\"\n{more}keys = {:?}\n\
         [admin]\naddress = \"127.0.0.1:0\"\n[[route]]\nroot = {:?}\n[cache]\nmemory = \"0B\"\n",
        directory.join("keys"),
        directory.join("root"),
    );
    std::fs::write(&config, text).unwrap();
    let mut process = program.arg("run").arg("--config").arg(&config).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
    let mut said = Vec::new();
    let address = loop {
        let line = lines.next().unwrap_or_else(|| panic!("ended after {said:?}")).unwrap();
        if let Some((_, address)) = line.split_once("listening on trickles://") {
            break address.to_owned();
        }
        said.push(line);
    };
    // Nobody reads on; the process must not be stopped by that.
    std::thread::spawn(move || lines.for_each(drop));
    Replica { process, address }
}

fn site(directory: &Path, bytes: &[u8]) {
    std::fs::create_dir(directory.join("root")).unwrap();
    std::fs::write(directory.join("root/large.bin"), bytes).unwrap();
    std::fs::write(directory.join("keys"), "7 000102030405060708090a0b0c0d0e0f\n").unwrap();
}

#[test]
fn a_replica_when_killed_in_mid_download_then_the_other_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..30_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    site(directory.path(), &bytes);
    let (first, second) = (start(directory.path(), "first"), start(directory.path(), "second"));
    let url = format!("trickles://{},{}/large.bin", first.address, second.address);
    let mut fetch = tidegate().args(["fetch", &url]).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = fetch.stdout.take().unwrap();
    // The pipe and the client's window hold less than the rest: the download stands still until it is read.
    let mut content = vec![0; 1_000_000];
    output.read_exact(&mut content).unwrap();
    drop(first);
    output.read_to_end(&mut content).unwrap();
    assert!(fetch.wait().unwrap().success());
    assert_eq!(content.len(), bytes.len());
    assert!(content == bytes, "a byte differs");
}

/// A network namespace for one test, which needs root.
struct Namespace(String);

impl Namespace {
    fn new() -> Self {
        let name = format!("trickles-t{}", std::process::id());
        let ip = |arguments: &[&str]| {
            let output = Command::new("ip").args(arguments).output();
            let output = output.expect("ip is missing; apt-get install iproute2");
            assert!(output.status.success(), "needs root: {}", String::from_utf8_lossy(&output.stderr));
        };
        ip(&["netns", "add", &name]);
        ip(&["-n", &name, "link", "set", "lo", "up"]);
        Self(name)
    }

    fn tidegate(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.0)).arg(env!("CARGO_BIN_EXE_tidegate"));
        command
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.0]).status();
    }
}

#[test]
fn a_file_when_fetched_in_the_format_of_tcp_then_it_has_every_byte() {
    let directory = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    site(directory.path(), &bytes);
    let namespace = Namespace::new();
    let replica = start_with(directory.path(), "tcp", namespace.tidegate(), "format = \"tcp\"\n");
    let url = format!("trickles://{}/large.bin", replica.address);
    let fetched = namespace.tidegate().args(["fetch", "--tcp-format", &url]).output().unwrap();
    assert!(fetched.status.success(), "{}", String::from_utf8_lossy(&fetched.stderr));
    assert!(fetched.stdout == bytes, "{} bytes", fetched.stdout.len());
    let by_udp = namespace.tidegate().args(["fetch", &url]).output().unwrap();
    assert_eq!(by_udp.status.code(), Some(1), "UDP is refused there");
    assert!(String::from_utf8_lossy(&by_udp.stderr).contains("connection refused"));
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
    assert_eq!(fetch("trickles://").status.code(), Some(2));
    assert_eq!(fetch("gopher://x/").status.code(), Some(2));
}

#[test]
fn a_listener_when_its_keys_cannot_be_read_then_one_line_says_why() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"x");
    std::fs::write(directory.path().join("keys"), "7 0001\n").unwrap();
    let config = directory.path().join("t.toml");
    let text = format!(
        "[[listen]]\naddress = \"127.0.0.1:0\"\nprotocol = \"trickles\"\nkeys = {:?}\n\
         [admin]\naddress = \"127.0.0.1:0\"\n[[route]]\nroot = {:?}\n",
        directory.path().join("keys"),
        directory.path().join("root"),
    );
    std::fs::write(&config, text).unwrap();
    let ended = tidegate().args(["run", "--config"]).arg(&config).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.lines().last().unwrap().contains("line 1: expected an epoch from 0 to 255"), "{said}");
}
