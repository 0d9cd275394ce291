//! Two network namespaces joined by a pair of interfaces: the server's host and the clients'.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::Error;

/// The server's address; clients are everywhere else in 10.77.0.0/16.
pub const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// The server's port.
pub const PORT: u16 = 80;
/// The server's interface.
const INTERFACE: &str = "gate0";
/// Networks of clients, 10.77.1.0/24 and so on, and hosts in each.
const NETWORKS: u8 = 9;
const HOSTS: u8 = 10;
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Both hosts. They vanish when this is dropped, and when the lab ends in any way.
pub struct Testbed {
    server: Namespace,
    client: Namespace,
}

/// A namespace without a name, kept by a process that sleeps and ends with the lab.
struct Namespace {
    holder: Child,
    file: File,
}

/// A program that runs until it is dropped.
pub struct Program(Child);

impl Testbed {
    /// Makes both hosts.
    ///
    /// # Errors
    /// [`Error::Testbed`] without root, or when `ip` or `unshare` are missing or refuse.
    pub fn new() -> Result<Self, Error> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::Testbed(
                "network namespaces and kernel programs need root: run the lab with sudo".into(),
            ));
        }
        let bed = Self { server: Namespace::new()?, client: Namespace::new()? };
        let there = bed.client.holder.id();
        let server = format!(
            "link set lo up\nlink add {INTERFACE} type veth peer name gate1 netns {there}\n\
             addr add {SERVER}/16 dev {INTERFACE}\nlink set {INTERFACE} up\n\
             route add default via 10.77.255.254 dev {INTERFACE}\n"
        );
        bed.server.ip(&server)?;
        let addresses = (1..=NETWORKS).flat_map(|network| (1..=HOSTS).map(move |host| (network, host)));
        let addresses: String = addresses
            .map(|(network, host)| format!("addr add 10.77.{network}.{host}/16 dev gate1\n"))
            .collect();
        bed.client.ip(&format!(
            "{addresses}addr add 10.77.255.254/16 dev gate1\nlink set lo up\nlink set gate1 up\n"
        ))?;
        Ok(bed)
    }

    /// The server's interface.
    pub fn interface(&self) -> &'static str {
        INTERFACE
    }

    /// Where the server listens.
    pub fn address(&self) -> SocketAddr {
        (SERVER, PORT).into()
    }

    /// Runs `body` on the server's host.
    pub fn on_server<T: Send>(&self, body: impl FnOnce() -> T + Send) -> Result<T, Error> {
        std::thread::scope(|scope| joined(self.server.spawn(scope, body)?))
    }

    /// Runs `body` on the clients' host, beside what goes on here.
    pub fn spawn_on_client<'s, T: Send + 's>(
        &self,
        scope: &'s Scope<'s, '_>,
        body: impl FnOnce() -> T + Send + 's,
    ) -> Result<ScopedJoinHandle<'s, Result<T, Error>>, Error> {
        self.client.spawn(scope, body)
    }

    /// Runs `body` on the clients' host.
    pub fn on_client<T: Send>(&self, body: impl FnOnce() -> T + Send) -> Result<T, Error> {
        std::thread::scope(|scope| joined(self.client.spawn(scope, body)?))
    }

    /// Starts a server program on the server's host and core, and waits until it listens.
    ///
    /// # Errors
    /// When it cannot be started, ends, or does not listen in time.
    pub fn start(&self, name: &'static str, command: &Command) -> Result<Program, Error> {
        self.start_at(name, command, self.address())
    }

    /// As [`Self::start`], for a program that listens elsewhere.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_at(&self, name: &'static str, command: &Command, to: SocketAddr) -> Result<Program, Error> {
        let mut inside = Command::new("nsenter");
        inside.arg(format!("--net={}", self.server.path().display()));
        let pinned = tidegate_bench::peers::pinned(tidegate_bench::SERVER_CORE, command);
        inside.arg(pinned.get_program()).args(pinned.get_args());
        inside.stdin(Stdio::null()).stdout(Stdio::null());
        let failed = |error: std::io::Error| Error::Server(format!("cannot start {name}: {error}"));
        // A file and not a pipe, which a server that says much would fill and wait for.
        let mut complaints = tempfile::tempfile().map_err(failed)?;
        inside.stderr(complaints.try_clone().map_err(failed)?);
        let child = inside.spawn().map_err(failed)?;
        let mut program = Program(child);
        let deadline = Instant::now() + START_TIMEOUT;
        while self.on_server(|| TcpStream::connect(to).is_err())? {
            let ended = program.0.try_wait().ok().flatten();
            if let Some(status) = ended {
                let mut said = String::new();
                let _ = complaints.rewind();
                let _ = (&mut complaints).take(1 << 16).read_to_string(&mut said);
                let last = said.lines().last().unwrap_or("it said nothing");
                return Err(Error::Server(format!("{name} ended at its start ({status}): {last}")));
            }
            if Instant::now() > deadline {
                return Err(Error::Server(format!("{name} does not listen on {to}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(program)
    }
}

impl Namespace {
    fn new() -> Result<Self, Error> {
        let failed =
            |error: std::io::Error| Error::Testbed(format!("cannot make a network namespace: {error}"));
        // Without the sleep's end nothing outlives the lab: the process dies with the thread that started it.
        let mut holder = Command::new("unshare");
        holder.args(["--net", "setpriv", "--pdeathsig", "KILL", "sleep", "86400"]);
        let mut holder = holder.stdin(Stdio::null()).spawn().map_err(failed)?;
        let path = format!("/proc/{}/ns/net", holder.id());
        let own = std::fs::read_link("/proc/self/ns/net").map_err(failed)?;
        let deadline = Instant::now() + START_TIMEOUT;
        // It is in its namespace a moment after it has begun.
        while std::fs::read_link(&path).map_err(failed)? == own {
            if Instant::now() > deadline || holder.try_wait().map_err(failed)?.is_some() {
                let _ = holder.kill();
                let _ = holder.wait();
                return Err(failed(ErrorKind::PermissionDenied.into()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        match File::open(&path) {
            Ok(file) => Ok(Self { holder, file }),
            Err(error) => {
                let _ = holder.kill();
                let _ = holder.wait();
                Err(failed(error))
            }
        }
    }

    fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.holder.id()).into()
    }

    fn spawn<'s, T: Send + 's>(
        &self,
        scope: &'s Scope<'s, '_>,
        body: impl FnOnce() -> T + Send + 's,
    ) -> Result<ScopedJoinHandle<'s, Result<T, Error>>, Error> {
        let failed =
            |error: std::io::Error| Error::Testbed(format!("cannot enter a network namespace: {error}"));
        let file = self.file.try_clone().map_err(failed)?;
        Ok(scope.spawn(move || {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(|error| failed(error.into()))?;
            Ok(body())
        }))
    }

    fn ip(&self, lines: &str) -> Result<(), Error> {
        let failed = |why: String| Error::Testbed(format!("cannot set up the interfaces by ip(8): {why}"));
        let mut ip = Command::new("nsenter");
        ip.arg(format!("--net={}", self.path().display())).args(["ip", "-batch", "-"]);
        ip.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut ip = ip.spawn().map_err(|error| failed(error.to_string()))?;
        let written = ip.stdin.take().map(|mut input| input.write_all(lines.as_bytes()));
        let output = ip.wait_with_output().map_err(|error| failed(error.to_string()))?;
        match (output.status.success(), written) {
            (true, Some(Ok(()))) => Ok(()),
            _ => Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
        }
    }
}

fn joined<T>(thread: ScopedJoinHandle<'_, Result<T, Error>>) -> Result<T, Error> {
    thread.join().unwrap_or_else(|_| Err(Error::Testbed("a thread panicked".into())))
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

impl Program {
    /// Its process.
    pub fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // A server with children ends them when it is asked to end.
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let deadline = Instant::now() + Duration::from_secs(3);
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
