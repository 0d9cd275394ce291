//! Two hosts and an emulated link: network namespaces, each with a device whose other end is this program.

mod emulator;

pub use emulator::{Profile, Random, Traffic};

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tun_rs::{DeviceBuilder, SyncDevice};

use crate::Error;
use emulator::Emulator;

/// The server's address; the clients have the following ones.
pub const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 98, 0, 1));
/// The address of a second server, beside [`SERVER`]'s host as far as clients can tell.
pub const OTHER_SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 98, 255, 253));
/// Packets that the kernel keeps for a device until the emulator takes them.
const DEVICE_QUEUE: u32 = 10_000;
/// Of the link's thread, SCHED_FIFO: above everything that is not.
const LINK_PRIORITY: &str = "10";
/// Of the hosts' programs, where they keep time too.
const HOST_PRIORITY: &str = "5";
/// How the names of namespaces begin, those of a topology among them; the number of the lab's process follows, and a dash.
const NAMES: [&str; 3] = ["tdl-c", "tdl-s", "tdt-"];
/// Namespaces of one process have different names.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Which of the two hosts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Side {
    /// Where clients run.
    Client,
    /// Where servers run.
    Server,
}

/// A network namespace that goes when this is dropped.
#[derive(Debug)]
pub(crate) struct Namespace(pub(crate) String);

impl Namespace {
    pub(crate) fn new(name: String) -> Result<Self, Error> {
        ip(&["netns", "add", &name])?;
        let namespace = Self(name);
        ip(&["-n", &namespace.0, "link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// Moves the calling thread into it; there is no way back.
    fn enter(&self) -> Result<(), Error> {
        enter(&self.0)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = ip(&["netns", "delete", &self.0]) {
            eprintln!("warning: the network namespace {} stays behind: {error}", self.0);
        }
    }
}

pub(crate) fn enter(name: &str) -> Result<(), Error> {
    let path = std::path::PathBuf::from(format!("/run/netns/{name}"));
    let file = File::open(&path).map_err(Error::file("read", &path))?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(|error| Error::Link(format!("cannot move into the namespace {name}: {error}")))
}

/// The two hosts and the link between them.
#[derive(Debug)]
pub struct Hosts {
    client: Namespace,
    server: Namespace,
    stop: Arc<AtomicBool>,
    emulator: Option<JoinHandle<()>>,
    traffic: Arc<Traffic>,
    real_time: bool,
}

impl Hosts {
    /// Hosts whose `n`-th client address has a link of the `n`-th profile; the kernel's TCP is Reno (RFC 5681).
    ///
    /// # Errors
    /// Without root, `ip` or TUN devices.
    pub fn new(profiles: Vec<Profile>, seed: u64) -> Result<Self, Error> {
        needs_root()?;
        remove_leftovers();
        let id = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let (client, server) = (Namespace::new(format!("tdl-c{id}"))?, Namespace::new(format!("tdl-s{id}"))?);
        let addresses: Vec<IpAddr> = (0..profiles.len().max(1)).map(client_address).collect();
        let devices = [device(&client, &addresses)?, device(&server, &[SERVER, OTHER_SERVER])?];
        let (stop, traffic) = (Arc::new(AtomicBool::new(false)), Arc::new(Traffic::default()));
        let emulator = Emulator::new(devices, profiles, seed, Arc::clone(&traffic));
        let stopped = Arc::clone(&stop);
        let emulator = std::thread::Builder::new()
            .name("link".into())
            .spawn(move || {
                keep_time(LINK_PRIORITY);
                emulator.run(&stopped);
            })
            .map_err(|error| Error::Link(error.to_string()))?;
        Ok(Self { client, server, stop, emulator: Some(emulator), traffic, real_time: false })
    }

    /// Gives the hosts' programs real-time priority too, below the link's. The kernel's TCP answers in the link's thread, at its
    /// priority; what is compared with it must wait for other programs' slices no more than it does.
    #[must_use]
    pub fn in_real_time(mut self) -> Self {
        let granted = Command::new("chrt").args(["--fifo", HOST_PRIORITY, "true"]).output();
        self.real_time = granted.is_ok_and(|output| output.status.success());
        if !self.real_time {
            eprintln!(
                "warning: chrt gives programs no real-time priority; on a busy machine they wait, and kernels do not"
            );
        }
        self
    }

    fn side(&self, side: Side) -> &Namespace {
        match side {
            Side::Client => &self.client,
            Side::Server => &self.server,
        }
    }

    /// The name of a host's network namespace.
    pub fn name(&self, side: Side) -> &str {
        &self.side(side).0
    }

    /// A command that runs `program` on a host.
    pub fn command(&self, side: Side, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(if self.real_time { "chrt" } else { "nsenter" });
        if self.real_time {
            command.args(["--fifo", HOST_PRIORITY, "nsenter"]);
        }
        command.arg(format!("--net=/run/netns/{}", self.side(side).0)).arg(program);
        command
    }

    /// Runs `inside` on a thread of its own on a host.
    ///
    /// # Errors
    /// What `inside` gives, or when it panicked.
    pub fn run<T: Send>(
        &self,
        side: Side,
        inside: impl FnOnce() -> Result<T, Error> + Send,
    ) -> Result<T, Error> {
        let (name, real_time) = (&self.side(side).0, self.real_time);
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                enter(name)?;
                if real_time {
                    keep_time(HOST_PRIORITY);
                }
                inside()
            });
            thread.join().unwrap_or_else(|_| Err(Error::Link("a thread of the load has panicked".into())))
        })
    }

    /// Has the host at `server` vanish: packets that have left it still arrive, but no other comes or goes, not even an ICMP
    /// message that says so. One host at a time.
    pub fn lose(&self, server: Ipv4Addr) {
        self.traffic.gone.store(server.to_bits(), Ordering::Relaxed);
    }

    /// What the link did.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(emulator) = self.emulator.take()
            && emulator.join().is_err()
        {
            eprintln!("warning: the link's emulator has panicked");
        }
    }
}

/// The `n`-th client's address.
pub fn client_address(n: usize) -> IpAddr {
    let [high, low] = u16::try_from(n + 2).unwrap_or(u16::MAX - 1).to_be_bytes();
    Ipv4Addr::new(10, 98, high, low).into()
}

/// Says once and clearly what scenarios with links need.
///
/// # Errors
/// The process does not belong to root.
pub fn needs_root() -> Result<(), Error> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Error::Link("an emulated link needs root: it makes network namespaces and TUN devices".into()))
}

/// Has the calling thread run as soon as it has something to do. Else it waits for other threads' slices, some milliseconds
/// each, and delivers in bursts what came meanwhile: hosts that wait for nobody, as kernels do, then lose by it what others
/// that wait themselves get.
fn keep_time(priority: &str) {
    let thread = rustix::thread::gettid().to_string();
    let set = Command::new("chrt").args(["--fifo", "--pid", priority, &thread]).output();
    if !set.is_ok_and(|output| output.status.success()) {
        eprintln!("warning: chrt gives a thread no real-time priority; its packets come in bursts");
    }
}

/// Removes the namespaces of labs that were killed.
pub(crate) fn remove_leftovers() {
    remove_namespaces(|process| !std::path::Path::new(&format!("/proc/{process}")).exists());
}

/// Removes the namespaces of all labs that `of` picks by their process.
pub(crate) fn remove_namespaces(of: impl Fn(u32) -> bool) {
    let Ok(namespaces) = std::fs::read_dir("/run/netns") else { return };
    for name in namespaces.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let rest = NAMES.iter().find_map(|prefix| name.strip_prefix(prefix));
        let process = rest.and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if process.is_some_and(&of) {
            // Another lab may be faster.
            let _ = ip(&["netns", "delete", &name]);
        }
    }
}

/// A TUN device with addresses in a namespace.
fn device(namespace: &Namespace, addresses: &[IpAddr]) -> Result<SyncDevice, Error> {
    let device = std::thread::scope(|scope| {
        let made = scope.spawn(|| {
            namespace.enter()?;
            let failed = |error| Error::Link(format!("cannot make a TUN device: {error}"));
            // The kernel's TCP under measurement is the paper's, and learns nothing from flow to flow.
            for (name, value) in [("tcp_congestion_control", "reno"), ("tcp_no_metrics_save", "1")] {
                let path = std::path::PathBuf::from(format!("/proc/sys/net/ipv4/{name}"));
                std::fs::write(&path, value).map_err(Error::file("write", &path))?;
            }
            let device = DeviceBuilder::new().name("link0").build_sync().map_err(failed)?;
            device.set_nonblocking(true).map_err(failed)?;
            Ok(device)
        });
        made.join().unwrap_or_else(|_| Err(Error::Link("a thread that makes devices has panicked".into())))
    })?;
    let on = |arguments: &[&str]| ip(&[&["-n", &namespace.0], arguments].concat());
    for address in addresses {
        on(&["address", "add", &format!("{address}/16"), "dev", "link0"])?;
    }
    let queue = DEVICE_QUEUE.to_string();
    // Segments leave one by one, as in the paper's time: those that leave together meet a full queue together.
    on(&["link", "set", "link0", "mtu", "1500", "txqueuelen", &queue, "gso_max_segs", "1", "up"])?;
    Ok(device)
}

pub(crate) fn ip(arguments: &[&str]) -> Result<(), Error> {
    let output = Command::new("ip")
        .args(arguments)
        .output()
        .map_err(|error| Error::Link(format!("cannot run ip: {error}; apt-get install iproute2")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().next().unwrap_or("no reason given");
    Err(Error::Link(format!("ip {}: {line}", arguments.join(" "))))
}
