//! What clients of Trickles meet: replicas out of reach, URLs that are too long, servers that only speak TCP, and new keys.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod replica;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Output, Stdio};
use std::time::Duration;

use replica::{Namespace, Replica, downloaded_without, noise, run, site, start, start_with, tidegate};
use rustix::process::{Pid, Signal, kill_process};

/// Without an interface nothing leads there, on any host (RFC 4291 §2.5.6).
const NOWHERE: &str = "[fe80::1]:4000";
/// Far beyond what anything here takes.
const LONG: Duration = Duration::from_secs(60);

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn fetch(arguments: &[&str]) -> Output {
    tidegate().arg("fetch").args(arguments).output().unwrap()
}

fn gateway(arguments: &[&str]) -> Replica {
    let mut command = tidegate();
    command.args(["gateway", "--listen", "127.0.0.1:0"]).args(arguments).stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(process.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim_end().rsplit("http://").next().unwrap().to_owned();
    Replica { process, address, said: vec![line], later: std::sync::mpsc::channel().1 }
}

/// One response of a gateway, to its end.
fn get(gateway: &Replica, target: &str) -> String {
    let mut client =
        TcpStream::connect(&gateway.address).unwrap_or_else(|error| panic!("{error}: {:?}", gateway.said));
    write!(client, "GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    answer
}

fn signal(replica: &Replica, signal: Signal) {
    let process = Pid::from_raw(i32::try_from(replica.process.id()).unwrap()).unwrap();
    kill_process(process, signal).unwrap();
}

/// A server of HTTP over plain TCP, for any number of requests; gives the head of each.
fn plain() -> (std::net::SocketAddr, std::sync::mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, heads) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut head = String::new();
            while reader.read_line(&mut head).is_ok_and(|read| read > 2) {}
            if head.is_empty() {
                continue;
            }
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\ntcp";
            reader.get_mut().write_all(answer).unwrap();
            drop(sender.send(head));
        }
    });
    (address, heads)
}

#[test]
fn a_replica_without_a_route_when_it_comes_first_then_the_next_is_asked() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"content");
    let replica = start(directory.path(), "only");
    let hosts = format!("trickles://{NOWHERE},{}", replica.address);
    let found = fetch(&["-v", &format!("{hosts}/large.bin")]);
    let said = text(&found.stderr);
    assert_eq!((found.status.code(), text(&found.stdout)), (Some(0), "content".to_owned()), "{said}");
    let way = format!("* by Trickles in UDP, from {}, encrypted\n", replica.address);
    assert!(said.starts_with(&way), "{said}");
    let answer = get(&gateway(&["--to", &hosts]), "/large.bin");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("content"), "{answer}");
    let nowhere = fetch(&[&format!("trickles://{NOWHERE}/large.bin")]);
    assert_eq!(nowhere.status.code(), Some(1), "{}", text(&nowhere.stderr));
}

#[test]
fn replicas_of_both_address_families_when_one_is_gone_or_out_of_reach_then_the_other_is_asked() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"content");
    let namespace = Namespace::new();
    let replica = start_with(directory.path(), "only", namespace.tidegate(), "");
    // Nobody listens there by IPv6, and nothing leads to 10.255.255.1.
    for hosts in ["[::1]:4999", "10.255.255.1:4999", "10.255.255.1:4999,[::1]:4999"] {
        let url = format!("trickles://{hosts},{}/large.bin", replica.address);
        let found = namespace.tidegate().args(["fetch", &url]).output().unwrap();
        assert_eq!(text(&found.stdout), "content", "{hosts}: {}", text(&found.stderr));
    }
    let none = ["fetch", "trickles://10.255.255.1:4999,10.255.255.2:4999/x"];
    let none = namespace.tidegate().args(none).output().unwrap();
    assert!(text(&none.stderr).contains("Network is unreachable"), "{none:?}");
}

#[test]
fn a_replica_when_killed_in_mid_download_then_one_of_the_other_address_family_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = noise(30_000_000);
    site(directory.path(), &bytes);
    let namespace = Namespace::new();
    let second = start_with(directory.path(), "second", namespace.tidegate(), "");
    let config = std::fs::read_to_string(directory.path().join("second.toml")).unwrap();
    let config = config.replacen("127.0.0.1", "[::1]", 1);
    std::fs::write(directory.path().join("first.toml"), config).unwrap();
    let first = run(namespace.tidegate(), &directory.path().join("first.toml"));
    assert!(first.address.starts_with("[::1]:"), "{}", first.address);
    let url = format!("trickles://{},{}/large.bin", first.address, second.address);
    let mut fetch = namespace.tidegate();
    fetch.args(["fetch", &url]);
    let content = downloaded_without(first, fetch);
    assert!(content == bytes, "{} bytes", content.len());
}

#[test]
fn a_server_of_tcp_when_datagrams_to_its_port_vanish_then_it_is_asked_by_http_after_a_while() {
    let (address, _heads) = plain();
    let _silent = std::net::UdpSocket::bind(address).unwrap();
    let found = fetch(&[&format!("trickles://{address}/x")]);
    assert_eq!(text(&found.stdout), "tcp", "{}", text(&found.stderr));
}

#[test]
fn a_url_when_longer_than_a_request_holds_then_every_client_is_told_and_the_longest_is_served() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"");
    let deep = directory.path().join("root").join("d".repeat(200)).join("e".repeat(200));
    std::fs::create_dir_all(&deep).unwrap();
    std::fs::write(deep.join("f".repeat(200)), "deep").unwrap();
    let replica = start(directory.path(), "only");
    let path = format!("/{}/{}/{}", "d".repeat(200), "e".repeat(200), "f".repeat(200));
    let query = "q".repeat(729 - replica.address.len() - path.len() - 1);
    let served = fetch(&[&format!("trickles://{}{path}?{query}", replica.address)]);
    assert_eq!(text(&served.stdout), "deep", "{}", text(&served.stderr));
    for more in [1, 500, 5000] {
        let url = format!("trickles://{}{path}?{query}{}", replica.address, "q".repeat(more));
        let refused = fetch(&[&url]);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(
            said.contains("the URL is too long for a Trickles request") && said.contains("at most 729 bytes"),
            "{said}"
        );
        assert!(said.contains("code 414"), "{said}");
    }
    let gateway = gateway(&["--to", &format!("trickles://{}", replica.address)]);
    for length in [1000, 5000] {
        let answer = get(&gateway, &format!("/{}", "x".repeat(length)));
        assert!(answer.starts_with("HTTP/1.1 414 URI Too Long\r\n"), "{answer}");
        assert!(
            answer.contains("\r\nConnection: close\r\n") && answer.contains("at most 729 bytes"),
            "{answer}"
        );
    }
    assert!(get(&gateway, &format!("{path}?q")).ends_with("deep"));
}

#[test]
fn a_url_when_the_interface_is_narrow_then_the_bound_is_lower_and_the_longest_is_served() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), &[b'x'; 100_000]);
    let namespace = Namespace::new();
    assert!(namespace.program("ip").args(["link", "set", "lo", "mtu", "820"]).status().unwrap().success());
    let replica = start_with(directory.path(), "narrow", namespace.tidegate(), "");
    let fetch = |bytes: usize| {
        let query = "q".repeat(bytes - replica.address.len() - "/large.bin?".len());
        let url = format!("trickles://{}/large.bin?{query}", replica.address);
        namespace.tidegate().args(["fetch", &url]).output().unwrap()
    };
    let served = fetch(473);
    assert_eq!(served.stdout.len(), 100_000, "{}", text(&served.stderr));
    assert!(text(&fetch(474).stderr).contains("414"));
}

#[test]
fn a_request_when_it_is_answered_before_its_end_then_the_gateways_client_gets_the_whole_answer() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"content");
    let replica = start(directory.path(), "only");
    let gateway = gateway(&["--to", &format!("trickles://{}", replica.address)]);
    for _ in 0..20 {
        let mut client = TcpStream::connect(&gateway.address).unwrap();
        let mut sender = client.try_clone().unwrap();
        let head = b"POST /large.bin HTTP/1.1\r\nHost: h\r\nContent-Length: 20000000\r\n\r\n";
        // More than what waits at the gateway for a server that does not read it.
        let upload = std::thread::spawn(move || {
            let _ = sender.write_all(head);
            let _ = sender.write_all(&vec![b'x'; 20_000_000]);
        });
        std::thread::sleep(Duration::from_millis(20));
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        let (status, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(status.starts_with("HTTP/1.1 4") && body.ends_with('\n'), "{answer}");
        upload.join().unwrap();
    }
}

#[test]
fn a_gateway_when_no_replica_listens_then_its_client_has_502() {
    let free = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let answer = get(&gateway(&["--to", &format!("trickles://{free}")]), "/");
    assert!(
        answer.starts_with("HTTP/1.1 502 Bad Gateway\r\n") && answer.contains("connection refused"),
        "{answer}"
    );
}

#[test]
fn a_server_that_speaks_tcp_alone_when_fetched_from_then_it_is_asked_by_http_unless_a_key_is_pinned() {
    let (address, heads) = plain();
    let url = format!("trickles://{address}/a?b");
    for more in [&[][..], &["--tcp-format"]] {
        let found = fetch(&[more, &[&url]].concat());
        let said = text(&found.stderr);
        assert_eq!((found.status.code(), text(&found.stdout)), (Some(0), "tcp".to_owned()), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains(&format!("asking {address} by HTTP over TCP")), "{said}");
        let head = heads.recv_timeout(LONG).unwrap();
        assert!(
            head.starts_with("GET /a?b HTTP/1.1\r\n")
                && head.to_lowercase().contains(&format!("host: {address}\r\n")),
            "{head}"
        );
    }
    let pinned = fetch(&["--server-key", &"11".repeat(32), &url]);
    assert_eq!((pinned.status.code(), pinned.stdout.len()), (Some(1), 0), "{pinned:?}");
    assert!(heads.try_recv().is_err());
}

#[test]
fn a_reload_when_another_epoch_signs_then_its_public_key_is_told_and_fetches() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"content");
    let replica = start(directory.path(), "only");
    let keys = "8 0f0e0d0c0b0a09080706050403020100\n7 000102030405060708090a0b0c0d0e0f\n";
    std::fs::write(directory.path().join("keys"), keys).unwrap();
    signal(&replica, Signal::HUP);
    let line = loop {
        let line = replica.later.recv_timeout(LONG).unwrap();
        if line.contains(" for encryption is ") {
            break line;
        }
    };
    let key = line.rsplit(' ').next().unwrap();
    assert!(line.contains(&format!("the key of trickles://{}", replica.address)), "{line}");
    assert!(!replica.said.iter().any(|line| line.contains(key)), "{line}");
    let url = format!("trickles://{}/large.bin", replica.address);
    let found = fetch(&["--server-key", key, "-v", &url]);
    assert_eq!(text(&found.stdout), "content", "{}", text(&found.stderr));
    assert!(text(&found.stderr).contains("encrypted for the given key"), "{found:?}");
}

#[test]
fn a_listener_in_the_format_of_tcp_when_it_is_told_to_end_then_no_firewall_rule_stays() {
    let directory = tempfile::tempdir().unwrap();
    site(directory.path(), b"x");
    let namespace = Namespace::new();
    let tables = || text(&namespace.program("nft").args(["list", "tables"]).output().unwrap().stdout);
    let mut replica = start_with(directory.path(), "tcp", namespace.tidegate(), "format = \"tcp\"\n");
    assert!(tables().contains("tidegate_trickles_server_"), "{}", tables());
    signal(&replica, Signal::TERM);
    assert!(replica.process.wait().unwrap().success());
    assert_eq!(tables(), "");
}

#[test]
fn options_of_a_gateway_when_they_would_be_ignored_then_they_are_errors() {
    let key = "11".repeat(32);
    for (arguments, said) in [
        (&["--cubic"][..], "--cubic is for a service over Trickles: name one with --to"),
        (&["--no-encryption"], "--no-encryption is for a service over Trickles"),
        (&["--server-key", &key], "--server-key is for a service over Trickles"),
        (&["--to", "trickles://127.0.0.1/path"], "--to: expected trickles://HOST[:PORT] without /path"),
    ] {
        let ended = tidegate().arg("gateway").args(arguments).output().unwrap();
        assert_eq!(ended.status.code(), Some(2), "{arguments:?}");
        assert!(text(&ended.stderr).contains(said), "{}", text(&ended.stderr));
    }
}
