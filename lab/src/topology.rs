//! Hosts and routers joined by pairs of Ethernet devices, each a network namespace that goes when this is dropped.

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Error;
use crate::link::{Namespace, ip, needs_root, remove_leftovers};

/// Topologies of one process have different names.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Hosts by their names.
#[derive(Debug)]
pub struct Topology {
    hosts: Vec<(&'static str, Namespace)>,
}

/// One end of a cable: host, device, address with the length of its prefix.
pub type End = (&'static str, &'static str, &'static str);

impl Topology {
    /// Hosts that nothing joins yet; all of them forward packets and none minds where they come from.
    ///
    /// # Errors
    /// Without root or `ip`.
    pub fn new(names: &[&'static str]) -> Result<Self, Error> {
        needs_root()?;
        remove_leftovers();
        let id = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let mut hosts = Vec::new();
        for name in names {
            hosts.push((*name, Namespace::new(format!("tdt-{id}{name}"))?));
        }
        let topology = Self { hosts };
        for name in names {
            topology.on(name, "sysctl -q net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0")?;
            topology
                .on(name, "sysctl -q net.ipv4.conf.default.rp_filter=0 net.ipv4.conf.all.send_redirects=0")?;
        }
        Ok(topology)
    }

    /// The name of a host's namespace.
    ///
    /// # Errors
    /// There is no such host.
    pub fn namespace(&self, host: &str) -> Result<&str, Error> {
        let found = self.hosts.iter().find(|(name, _)| *name == host);
        found
            .map(|(_, namespace)| namespace.0.as_str())
            .ok_or_else(|| Error::Link(format!("there is no host {host}")))
    }

    /// Runs a command line on a host; words are set apart by blanks.
    ///
    /// # Errors
    /// With what the command complained of.
    pub fn on(&self, host: &str, line: &str) -> Result<String, Error> {
        let output = Command::new("nsenter")
            .arg(format!("--net=/run/netns/{}", self.namespace(host)?))
            .args(line.split(' '))
            .output()
            .map_err(|error| {
                Error::Link(format!("cannot run nsenter: {error}; apt-get install util-linux"))
            })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(Error::Link(format!("{host}: {line}: {}", said.lines().next().unwrap_or("no reason given"))))
    }

    /// Has one core handle what a device of a host receives.
    ///
    /// # Errors
    /// When the kernel has no receive packet steering.
    pub fn steer(&self, host: &str, device: &str, core: usize) -> Result<(), Error> {
        let file = format!("/sys/class/net/{device}/queues/rx-0/rps_cpus");
        let script = format!("echo {:x} > {file}", 1u64 << core);
        // The devices of a namespace are seen in a file system of its own, which this command mounts.
        ip(&["netns", "exec", self.namespace(host)?, "sh", "-c", &script])
    }

    /// Joins two hosts by a cable.
    ///
    /// # Errors
    /// When the devices cannot be made.
    pub fn join(&self, one: End, other: End) -> Result<(), Error> {
        let (a, b) = (self.namespace(one.0)?, self.namespace(other.0)?);
        ip(&["-n", a, "link", "add", one.1, "type", "veth", "peer", "name", other.1, "netns", b])?;
        for (host, device, address) in [one, other] {
            self.on(host, &format!("ip address add {address} dev {device}"))?;
            self.on(host, &format!("ip link set {device} up"))?;
        }
        Ok(())
    }
}
