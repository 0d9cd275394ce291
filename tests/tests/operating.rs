//! What an operator relies on: the service manager, the log, the cache's keys.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::collections::HashSet;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::net::sockopt;
use rustix::process::{Pid, Signal, kill_process};
use tidegate_e2e::{Client, Origin, Process, Reply, Tidegate, eventually, free_port};

#[test]
fn a_service_manager_is_told_when_clients_are_served_of_a_reload_and_of_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("notify");
    let manager = UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let told = || {
        let mut buffer = [0; 4096];
        let length = manager.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    };
    let [address, admin] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())).to_string());
    let mut child = Command::new(Tidegate::binary());
    child.args(["run", "--listen", &address, "--admin", &admin, "--root"]).arg(folder.path());
    child.env("NOTIFY_SOCKET", &socket).stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = Process(child.spawn().unwrap());

    assert!(told().starts_with("READY=1\n"));
    TcpStream::connect(&address).unwrap();
    let reload = Command::new(Tidegate::binary()).args(["reload", "--admin", &admin]).output().unwrap();
    assert!(reload.status.success(), "{reload:?}");
    let reloading = told();
    let time = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap();
    assert!(time.parse::<u64>().unwrap() > 0, "{reloading}");
    assert!(told().starts_with("READY=1\n"));
    kill_process(Pid::from_child(&child.0), Signal::TERM).unwrap();
    assert!(told().starts_with("STOPPING=1\n"));
    assert!(child.0.wait().unwrap().success());
}

#[test]
fn a_start_says_whether_the_cache_stays_in_memory() {
    let origin = Origin::start(|_| Reply::ok("ok"));
    let tidegate = Tidegate::builder().origin(&origin).cache("path = \"@DIR@/cache\"\n").start();
    let output = eventually("it has said all", || {
        let output = tidegate.output();
        output.contains("data cores: ").then_some(output)
    });
    let is_locked = output.contains("locked=true");
    assert!(is_locked || output.contains("locked=false"), "{output}");
    assert_eq!(is_locked, !output.contains("LimitMEMLOCK"), "{output}");
}

/// It went on until clients were served.
#[test]
fn a_start_that_takes_long_is_ended_by_a_signal_with_the_exit_code_of_a_drain() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, file) = (folder.path().join("cache"), folder.path().join("tidegate.toml"));
    std::fs::create_dir(&cache).unwrap();
    // The cache's lock is a pipe that nobody reads: opening it waits for ever.
    rustix::fs::mknodat(rustix::fs::CWD, cache.join("lock"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    for signal in [Signal::TERM, Signal::INT] {
        let [address, admin] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())).to_string());
        let text = format!(
            "[[listen]]\naddress = {address:?}\n[admin]\naddress = {admin:?}\n\
             [cache]\npath = {cache:?}\n[[route]]\nroot = \"/\"\n"
        );
        std::fs::write(&file, text).unwrap();
        let mut child = Command::new(Tidegate::binary());
        child.args(["run", "--config"]).arg(&file).stdin(Stdio::null()).stderr(Stdio::null());
        let mut child = Process(child.spawn().unwrap());
        // It listens before it opens the cache.
        eventually("it listens", || TcpStream::connect(&address).ok());
        kill_process(Pid::from_child(&child.0), signal).unwrap();
        let status = eventually("it ends", || child.0.try_wait().unwrap());
        assert!(status.success(), "{signal:?}: {status}");
    }
}

#[test]
fn an_outage_of_the_upstream_is_a_few_lines_of_the_log_and_a_number() {
    let dead = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let mut tidegate = Tidegate::builder()
        .top("workers = 1")
        .group("app", &[dead], "require = false\nmax_failures = 0")
        .route("/", "upstream = \"app\"")
        .start();
    let mut client = tidegate.connect();
    for _ in 0..300 {
        assert_eq!(client.get("/").status, 502);
    }
    drop(client);
    tidegate.terminate();
    let output = tidegate.output();
    let lines = output.lines().filter(|line| line.contains("no answer from the upstream")).count();
    assert!((1..100).contains(&lines), "{lines} lines for 300 requests");
    assert!(output.contains("more requests without an answer from the upstream"), "{output}");
}

#[test]
fn hash_url_counts_the_query_of_one_path_both_servers_get_a_share() {
    let named =
        |name: &'static str| Origin::start(move |_| Reply::ok(name).with("Cache-Control", "no-store"));
    let (a, b) = (named("a"), named("b"));
    let tidegate = Tidegate::builder()
        .group("app", &[a.address(), b.address()], "balance = \"hash-url\"")
        .route("/", "upstream = \"app\"")
        .start();
    let server = |target: &str| tidegate.get(target).text();
    // Of 64 queries all go to one of two servers once in 2^63 times.
    let servers: HashSet<String> = (0..64).map(|x| server(&format!("/echo?x={x}"))).collect();
    assert_eq!(servers.len(), 2);
    assert_eq!(server("/echo?x=7"), server("/echo?x=7"));
}

#[test]
fn without_a_cache_a_get_is_passed_on_as_bypass() {
    let origin = Origin::start(|_| Reply::cacheable("x"));
    let tidegate = Tidegate::builder().origin(&origin).cache("memory = \"0B\"").start();
    assert!(tidegate.get("/").field("Cache-Status").contains("fwd=bypass"), "{:?}", tidegate.get("/"));
}

#[test]
fn with_client_directives_off_a_clients_no_cache_is_answered_from_the_cache() {
    for (lines, asks_again) in [("client_directives = false", false), ("", true)] {
        let origin = Origin::start(|_| Reply::ok("x").with("Cache-Control", "max-age=600"));
        let tidegate = Tidegate::builder().origin(&origin).cache(lines).start();
        eventually("stored", || tidegate.get("/").is_hit().then_some(()));
        for fields in ["Cache-Control: no-cache\r\n", "Pragma: no-cache\r\n"] {
            let before = origin.count();
            assert_eq!(tidegate.get_with("/", fields).status, 200);
            assert_eq!(origin.count() > before, asks_again, "{lines:?} {fields:?}");
        }
    }
}

#[test]
fn memory_grows_by_small_pages_whatever_the_host_prefers() {
    let origin = Origin::start(|_| Reply::ok("x"));
    let tidegate = Tidegate::before(&origin);
    assert!(!tidegate.may_have_huge_pages());
}

/// All places at once, by clients that ask without end and read nothing.
#[test]
fn clients_of_the_admin_server_that_read_nothing_do_not_keep_their_places() {
    let origin = Origin::start(|_| Reply::ok(""));
    let tidegate = Tidegate::before(&origin);
    let asked = format!("GET /metrics HTTP/1.1\r\nHost: {}\r\n\r\n", tidegate.admin()).repeat(1000);
    let held: Vec<Client> = (0..64)
        .map(|_| {
            let client = Client::connect(tidegate.admin());
            sockopt::set_socket_recv_buffer_size(client.stream(), 4096).unwrap();
            client
        })
        .collect();
    for mut client in held.iter().map(Client::stream) {
        // As much of it as there is room for.
        client.set_nonblocking(true).unwrap();
        let _ = client.write(asked.as_bytes());
    }
    assert_eq!(tidegate.ask_admin("/status").status, 200);
}
