//! Two hosts, network namespaces that a veth pair joins. Needs root; leaves nothing behind.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

use std::fs::File;
use std::process::Command;
use std::thread::JoinHandle;

pub fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output();
    let output = output.expect("ip is missing; apt-get install iproute2");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Two hosts and a link.
pub struct Hosts {
    pub server: String,
    pub client: String,
}

impl Hosts {
    pub fn new(name: &str) -> Self {
        assert!(rustix::process::geteuid().is_root(), "this test makes network namespaces and needs root");
        let id = std::process::id();
        let hosts = Self { server: format!("trickles-s{name}{id}"), client: format!("trickles-c{name}{id}") };
        ip(&format!("netns add {}", hosts.server));
        ip(&format!("netns add {}", hosts.client));
        ip(&format!(
            "-n {} link add trickle1 type veth peer name trickle0 netns {}",
            hosts.client, hosts.server
        ));
        for (host, link, last) in [(&hosts.server, "trickle0", 1), (&hosts.client, "trickle1", 2)] {
            ip(&format!("-n {host} address add 10.99.0.{last}/24 dev {link}"));
            ip(&format!("-n {host} address add fd00:99::{last}/64 dev {link} nodad"));
            ip(&format!("-n {host} link set {link} up"));
            ip(&format!("-n {host} link set lo up"));
        }
        hosts
    }

    /// Runs `inside` on a thread of its own that has moved into the namespace.
    pub fn on<T: Send + 'static>(
        namespace: &str,
        inside: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let path = format!("/run/netns/{namespace}");
        std::thread::spawn(move || {
            let file = File::open(path).unwrap();
            rustix::thread::move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&file),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )
            .unwrap();
            inside()
        })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in [&self.server, &self.client] {
            let _ = Command::new("ip").args(["netns", "delete", name]).status();
        }
    }
}
