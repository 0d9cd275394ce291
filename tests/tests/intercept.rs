//! An interception cache for DHTTP, or a NAT, on a router between a client and a server. Needs root: each test has
//! network namespaces of its own, which end with it.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

use std::io::Write;
use std::process::{Child, Command, Output, Stdio};

use tidegate_e2e::{Tidegate, content, eventually};

const CLIENT: &str = "10.77.1.2";
const CACHE: &str = "10.77.1.1";
const SERVER: &str = "10.77.2.2";
const CACHE_V6: &str = "fd77:1::1";
const SERVER_V6: &str = "fd77:2::2";

/// client — router — server; the router's cache takes UDP to port 80.
struct Network {
    prefix: String,
    children: Vec<Child>,
    directory: tempfile::TempDir,
}

impl Drop for Network {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        for host in ["c", "r", "s"] {
            let _ = Command::new("ip").args(["netns", "delete", &self.name(host)]).status();
        }
    }
}

impl Network {
    fn start() -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let prefix = format!("dhttp-{}-{number}", std::process::id());
        let network = Self { prefix, children: Vec::new(), directory: tempfile::tempdir().unwrap() };
        for host in ["c", "r", "s"] {
            succeeded(Command::new("ip").args(["netns", "add", &network.name(host)]));
            network.on(host, "ip link set lo up");
        }
        for (host, there, here, at_router) in
            [("c", CLIENT, "eth-c", CACHE), ("s", SERVER, "eth-s", "10.77.2.1")]
        {
            let router = network.name("r");
            network.on(host, &format!("ip link add eth0 type veth peer name {here} netns {router}"));
            network.on(host, &format!("ip addr add {there}/24 dev eth0"));
            network.on(host, "ip link set eth0 up");
            network.on("r", &format!("ip addr add {at_router}/24 dev {here}"));
            network.on("r", &format!("ip link set {here} up"));
            network.on(host, &format!("ip route add default via {at_router}"));
        }
        network.on("r", "sysctl -q net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0");
        network.on("r", "nft add table ip dhttp");
        network.on("r", "nft add chain ip dhttp way { type filter hook prerouting priority mangle; }");
        network.on("r", "nft add rule ip dhttp way udp dport 80 tproxy to :8053 meta mark set 1 accept");
        network.on("r", "ip rule add fwmark 1 lookup 100");
        network.on("r", "ip route add local default dev lo table 100");
        network
    }

    fn name(&self, host: &str) -> String {
        format!("{}{host}", self.prefix)
    }

    fn command(&self, host: &str, words: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name(host)]).args(words);
        command
    }

    fn on(&self, host: &str, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        succeeded(&mut self.command(host, &words));
    }

    /// Clients leave under the router's address, and the server knows no way to theirs.
    fn translate_addresses(&self) {
        self.on("r", "nft add chain ip dhttp leaving { type nat hook postrouting priority srcnat; }");
        self.on("r", "nft add rule ip dhttp leaving oifname eth-s masquerade");
        self.on("s", "ip route delete default");
    }

    /// No cache after all: requests go on to the server.
    fn let_pass(&self) {
        self.on("r", "nft flush chain ip dhttp way");
    }

    /// Neither the cache nor the server gets UDP: the router's firewall does with it what `verdict` says.
    fn forbid_udp(&self, verdict: &str) {
        self.let_pass();
        self.on("r", "nft add chain ip dhttp on { type filter hook forward priority filter; }");
        self.on("r", &format!("nft add rule ip dhttp on udp dport 80 {verdict}"));
    }

    /// The same addresses and rules for IPv6.
    fn add_ipv6(&self) {
        for (host, there, here, at_router) in
            [("c", "fd77:1::2", "eth-c", CACHE_V6), ("s", SERVER_V6, "eth-s", "fd77:2::1")]
        {
            self.on(host, &format!("ip addr add {there}/64 dev eth0 nodad"));
            self.on("r", &format!("ip addr add {at_router}/64 dev {here} nodad"));
            self.on(host, &format!("ip -6 route add default via {at_router}"));
        }
        self.on("r", "sysctl -q net.ipv6.conf.all.forwarding=1");
        self.on("r", "nft add table ip6 dhttp");
        self.on("r", "nft add chain ip6 dhttp way { type filter hook prerouting priority mangle; }");
        self.on("r", "nft add rule ip6 dhttp way udp dport 80 tproxy to :8053 meta mark set 1 accept");
        self.on("r", "ip -6 rule add fwmark 1 lookup 100");
        self.on("r", "ip -6 route add local default dev lo table 100");
    }

    /// A site of files that a cache may keep, and the cache.
    fn serve(&mut self) {
        self.serve_at(SERVER, &["--listen", "0.0.0.0:8053", "--from", "10.77.1.1:8054"]);
    }

    fn serve_at(&mut self, server: &str, cache: &[&str]) {
        let site = self.directory.path().join("site");
        std::fs::create_dir(&site).unwrap();
        for (name, bytes) in [("short", b"short".to_vec()), ("long", content(3, 200_000))] {
            let path = site.join(name);
            std::fs::File::create(&path).unwrap().write_all(&bytes).unwrap();
            // Old files are fresh for long (RFC 9111 §4.2.2).
            succeeded(Command::new("touch").args(["-d", "2020-01-01"]).arg(&path));
        }
        let config = self.directory.path().join("tidegate.toml");
        let text = format!(
            "workers = 1\n[[listen]]\naddress = \"{server}:80\"\nprotocol = \"dhttp\"\n[admin]\naddress = \"127.0.0.1:9090\"\n\
             [cache]\nmemory = \"8MiB\"\n[[route]]\nroot = \"{}\"\n[log]\naccess = \"{}\"\n",
            site.display(),
            self.log().display()
        );
        std::fs::write(&config, text).unwrap();
        self.spawn("s", &["run", "--config", config.to_str().unwrap()], "listening on dhttp://");
        self.spawn("r", &[&["intercept"], cache].concat(), "intercepting at");
    }

    fn log(&self) -> std::path::PathBuf {
        self.directory.path().join("access.log")
    }

    /// Starts tidegate on a host and waits until it has said `ready`.
    fn spawn(&mut self, host: &str, arguments: &[&str], ready: &str) {
        let output = self.directory.path().join(format!("{host}.txt"));
        let file = std::fs::File::create(&output).unwrap();
        let binary = Tidegate::binary();
        let words: Vec<&str> = [&[binary.to_str().unwrap()], arguments].concat();
        let mut command = self.command(host, &words);
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        self.children.push(command.spawn().unwrap());
        eventually(ready, || {
            let said = std::fs::read_to_string(&output).unwrap();
            assert!(!said.contains("error:"), "{said}");
            said.contains(ready).then_some(())
        });
    }

    /// What the client's `tidegate fetch -v` gave.
    fn fetch(&self, arguments: &[&str]) -> (Vec<u8>, String) {
        let binary = Tidegate::binary();
        let words: Vec<&str> = [&[binary.to_str().unwrap(), "fetch", "-v"], arguments].concat();
        let Output { stdout, stderr, .. } = self.command("c", &words).output().unwrap();
        (stdout, String::from_utf8(stderr).unwrap())
    }
}

fn succeeded(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn cache_on_the_way_answers_from_its_own_address_and_asks_the_server_once() {
    let mut network = Network::start();
    network.serve();
    for (path, body, way) in [
        ("short", b"short".to_vec(), "in a datagram"),
        ("long", content(3, 200_000), "on a connection that the cache opened"),
    ] {
        let url = format!("dhttp://{SERVER}/{path}");
        for _ in 0..2 {
            let (got, said) = network.fetch(&[&url]);
            assert!(got == body, "{said}");
            assert!(said.contains(&format!("* from {CACHE}:")) && said.contains(way), "{said}");
        }
        let (_, said) = network.fetch(&[&url]);
        assert!(said.contains("< Age: ") && said.contains("< Via: DHTTP tidegate-cache"), "{said}");
    }
    let log = || std::fs::read_to_string(network.log()).unwrap();
    eventually("the server has logged both", || (log().lines().count() >= 2).then_some(()));
    assert_eq!(log().matches("\"GET /short").count(), 1, "{}", log());
    assert_eq!(log().matches("\"GET /long").count(), 1, "{}", log());
}

#[test]
fn cache_on_the_way_of_ipv6_answers_from_its_own_address_and_asks_the_server_once() {
    let mut network = Network::start();
    network.add_ipv6();
    let from = format!("[{CACHE_V6}]:8054");
    network.serve_at(&format!("[{SERVER_V6}]"), &["--listen", "[::]:8053", "--from", &from]);
    for (path, body) in [("short", b"short".to_vec()), ("long", content(3, 200_000))] {
        let url = format!("dhttp://[{SERVER_V6}]/{path}");
        for _ in 0..2 {
            let (got, said) = network.fetch(&[&url]);
            assert!(got == body && said.contains(&format!("* from [{CACHE_V6}]:")), "{said}");
        }
    }
    let log = || std::fs::read_to_string(network.log()).unwrap();
    eventually("the server has logged both", || (log().lines().count() >= 2).then_some(()));
    assert_eq!(log().matches("\"GET /short").count(), 1, "{}", log());
}

#[test]
fn client_that_refuses_caches_is_answered_by_the_server() {
    let mut network = Network::start();
    network.serve();
    let url = format!("dhttp://{SERVER}/short");
    network.fetch(&[&url]);
    let (body, said) = network.fetch(&["--no-caches", &url]);
    assert_eq!(body, b"short");
    assert!(said.contains(&format!("* from {SERVER}:80 on a connection of our own")), "{said}");
    let (body, said) = network.fetch(&[&format!("dhttpt://{SERVER}/short")]);
    assert_eq!(body, b"short");
    assert!(said.contains(&format!("* from {SERVER}:80 on a connection of our own")), "{said}");
}

#[test]
fn client_behind_a_nat_long_answer_comes_on_its_own_connection_without_waiting_for_a_timer() {
    let mut network = Network::start();
    network.translate_addresses();
    network.let_pass();
    network.serve();
    let (body, said) = network.fetch(&[&format!("dhttp://{SERVER}/long")]);
    assert!(body == content(3, 200_000), "{said}");
    assert!(said.contains(&format!("* from {SERVER}:80 on a connection of our own")), "{said}");
    assert!(!said.contains("asked again"), "{said}");
    let (body, said) = network.fetch(&[&format!("dhttp://{SERVER}/short")]);
    assert_eq!(body, b"short");
    assert!(said.contains("in a datagram"), "{said}");
}

#[test]
fn client_behind_a_nat_with_the_cache_on_it_long_answer_comes_as_ever() {
    let mut network = Network::start();
    network.translate_addresses();
    network.serve();
    let (body, said) = network.fetch(&[&format!("dhttp://{SERVER}/long")]);
    assert!(body == content(3, 200_000), "{said}");
    assert!(said.contains(&format!("* from {CACHE}:")), "{said}");
    assert!(said.contains("on a connection that the cache opened"), "{said}");
}

#[test]
fn firewall_that_refuses_udp_the_answer_comes_by_tcp_at_once() {
    let mut network = Network::start();
    network.serve();
    for reason in ["admin-prohibited", "host-prohibited"] {
        network.forbid_udp(&format!("reject with icmp type {reason}"));
        let (body, said) = network.fetch(&[&format!("dhttp://{SERVER}/short")]);
        assert!(body == b"short" && said.contains("on a connection of our own"), "{said}");
        assert!(said.contains("ICMP says so") && !said.contains("no sign of life"), "{said}");
        network.on("r", "nft delete chain ip dhttp on");
    }
}

#[test]
fn firewall_that_drops_udp_the_answer_comes_by_tcp_when_there_is_no_sign_of_life() {
    let mut network = Network::start();
    network.serve();
    network.forbid_udp("drop");
    let (body, said) = network.fetch(&[&format!("dhttp://{SERVER}/short")]);
    assert!(body == b"short" && said.contains("on a connection of our own"), "{said}");
    assert!(said.contains("no sign of life"), "{said}");
}
