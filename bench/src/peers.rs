//! Servers that run on one core until they are dropped, and what they use of the machine.

use std::io::{Read, Seek, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Varnish compiles its configuration with a C compiler first.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// A server with several processes gets so long to end them.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(50);
/// How long the servers may take to clear up after a load.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(20);
const SETTLE_STEP: Duration = Duration::from_millis(60);
/// How long a server may be silent before an answer is wrong.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A directory with one file, `object`, in which servers also keep their own files.
pub struct Site {
    pub(crate) directory: PathBuf,
}

/// A certificate with its key, in PEM.
pub(crate) struct Certificate {
    /// The certificate alone.
    pub chain: PathBuf,
    pub key: PathBuf,
    /// Both in one file.
    pub both: PathBuf,
}

impl Site {
    /// Makes a directory for this size below `parent`.
    ///
    /// # Errors
    /// A sentence that says what could not be written.
    pub fn create(parent: &Path, size_bytes: usize) -> Result<Self, String> {
        let directory = parent.join(format!("site-{size_bytes}"));
        let failed = |error| format!("cannot write a site to {}: {error}", directory.display());
        std::fs::create_dir_all(&directory).map_err(failed)?;
        std::fs::write(directory.join("object"), vec![b'a'; size_bytes]).map_err(failed)?;
        Ok(Self { directory })
    }

    /// Makes a certificate of the kind that most sites have by now: ECDSA over P-256.
    pub(crate) fn certificate(&self) -> Result<Certificate, String> {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()])
            .map_err(|error| format!("cannot make a certificate: {error}"))?;
        let (chain, key) = (made.cert.pem(), made.signing_key.serialize_pem());
        Ok(Certificate {
            chain: self.write("chain.pem", &chain)?,
            key: self.write("key.pem", &key)?,
            both: self.write("both.pem", &(chain + &key))?,
        })
    }

    /// Writes a file of a server's own; its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let path = self.directory.join(name);
        std::fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(path)
    }
}

/// A server that runs on its core until it is dropped.
pub struct Peer {
    /// How it is called in figures.
    pub name: &'static str,
    address: SocketAddr,
    process: Child,
    /// Whether the process that was started has others do the work.
    forks: bool,
    /// What it shows to clients, if it speaks TLS.
    certificate: Option<PathBuf>,
}

impl Peer {
    /// Starts `command` on `core` and waits until something listens on `address`.
    pub(crate) fn start(
        name: &'static str,
        core: usize,
        address: SocketAddr,
        command: &Command,
    ) -> Result<Self, String> {
        let mut pinned = pinned(core, command);
        // A file and not a pipe, which a server that says much would fill and wait for.
        let complaints = tempfile::tempfile().map_err(|error| error.to_string())?;
        let stderr = complaints.try_clone().map_err(|error| error.to_string())?;
        pinned.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        let process = pinned.spawn().map_err(|error| format!("cannot start {name} by taskset: {error}"))?;
        let mut peer = Self { name, address, process, forks: false, certificate: None };
        let deadline = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(address).is_err() {
            if let Ok(Some(status)) = peer.process.try_wait() {
                return Err(format!("{name} ended at its start ({status}): {}", last_line(complaints)));
            }
            if Instant::now() > deadline {
                return Err(format!("{name} does not listen on {address}"));
            }
            std::thread::sleep(STEP);
        }
        Ok(peer)
    }

    /// The same server, whose work is done by child processes of the one that was started.
    #[must_use]
    pub(crate) fn forking(mut self) -> Self {
        self.forks = true;
        self
    }

    /// The same server, which speaks TLS.
    #[must_use]
    pub(crate) fn encrypted(mut self, certificate: &Certificate) -> Self {
        self.certificate = Some(certificate.chain.clone());
        self
    }

    /// The file with its certificate, if it speaks TLS.
    pub(crate) fn certificate(&self) -> Option<&Path> {
        self.certificate.as_deref()
    }

    /// The object's URL.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.certificate.is_some() { "https" } else { "http" };
        format!("{scheme}://{}/object", self.address)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Asks once for the object: a server that answers quickly and wrongly must not win.
    ///
    /// # Errors
    /// A sentence that says what came instead.
    pub fn verify(&self, size_bytes: usize) -> Result<(), String> {
        let answer = if self.certificate.is_some() { self.ask_by_curl()? } else { self.ask()? };
        let head = answer.windows(4).position(|window| window == b"\r\n\r\n").map_or(0, |at| at + 4);
        let body = &answer[head..];
        let right = answer.starts_with(b"HTTP/1.1 200")
            && body.len() == size_bytes
            && body.iter().all(|byte| *byte == b'a');
        if right {
            Ok(())
        } else {
            Err(format!("{} gave a wrong answer of {} bytes", self.name, answer.len()))
        }
    }

    fn ask_by_curl(&self) -> Result<Vec<u8>, String> {
        install("curl", "curl")?;
        let mut curl = Command::new("curl");
        curl.args(["--insecure", "--silent", "--show-error", "--http1.1", "--include", &self.url()]);
        let output = curl.output().map_err(|error| format!("cannot start curl: {error}"))?;
        match output.status.success() {
            true => Ok(output.stdout),
            false => Err(format!("{}: {}", self.name, String::from_utf8_lossy(&output.stderr).trim())),
        }
    }

    fn ask(&self) -> Result<Vec<u8>, String> {
        let mut stream = TcpStream::connect(self.address).map_err(|error| error.to_string())?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(|error| error.to_string())?;
        let request = format!("GET /object HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address);
        stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).map_err(|error| format!("{}: no answer: {error}", self.name))?;
        Ok(answer)
    }

    /// Seconds of user and system time that the server has used, all of its processes. taskset replaces itself by the
    /// server, so the child's id is the server's.
    ///
    /// # Errors
    /// When the server has ended.
    pub fn cpu_s(&self) -> Result<f64, String> {
        let mut ticks = 0.0;
        for process in self.processes() {
            // proc_pid_stat(5): utime and stime are fields 14 and 15.
            ticks += fields(&self.proc(process, "stat")?)
                .get(11..13)
                .map_or(0.0, |times| times.iter().filter_map(|time| time.parse::<f64>().ok()).sum::<f64>());
        }
        Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
    }

    /// As [`Self::cpu_s`], to the nanosecond instead of ticks of 10 ms, but without threads that have ended: for
    /// servers whose threads stay.
    ///
    /// # Errors
    /// When the server has ended, or the kernel does not say (CONFIG_SCHED_INFO).
    pub fn threads_cpu_s(&self) -> Result<f64, String> {
        self.processes().into_iter().map(|process| threads_cpu_s(process, "")).sum()
    }

    /// Bytes of anonymous memory that the server's processes have resident: what they allocated, without files,
    /// programs and memory that is shared with others.
    ///
    /// # Errors
    /// When the server has ended, or the kernel does not say (before Linux 4.5).
    pub fn anonymous_bytes(&self) -> Result<u64, String> {
        self.processes()
            .into_iter()
            .map(|process| {
                let status = self.proc(process, "status")?;
                anonymous_bytes(&status).ok_or_else(|| "the kernel gives no RssAnon".to_owned())
            })
            .sum()
    }

    fn proc(&self, process: u32, file: &str) -> Result<String, String> {
        std::fs::read_to_string(format!("/proc/{process}/{file}"))
            .map_err(|error| format!("{} has ended: {error}", self.name))
    }

    /// The server's processes.
    pub fn processes(&self) -> Vec<u32> {
        let mut family = vec![self.process.id()];
        if self.forks {
            let parents = parents();
            // Its length grows while children of children are found.
            let mut next = 0;
            while let Some(&parent) = family.get(next) {
                family.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(process, _)| process));
                next += 1;
            }
        }
        family
    }

    /// Asks a server with several processes to end them, which a manager that is killed cannot.
    fn ask_to_stop(&mut self) {
        let id = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw);
        if let Some(id) = id
            && kill_process(id, Signal::TERM).is_ok()
        {
            let deadline = Instant::now() + STOP_TIMEOUT;
            while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(STEP);
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if self.forks {
            self.ask_to_stop();
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Waits until none of these servers works any more, so that what one clears up is not charged to the next.
///
/// # Errors
/// When a server has ended.
pub fn settle<'a>(peers: impl Iterator<Item = &'a Peer> + Clone) -> Result<(), String> {
    let used = || peers.clone().map(Peer::cpu_s).sum::<Result<f64, String>>();
    let deadline = Instant::now() + SETTLE_TIMEOUT;
    let mut before = used()?;
    loop {
        std::thread::sleep(SETTLE_STEP);
        let now = used()?;
        // The kernel counts in ticks of 10 ms.
        if now - before < 0.009 || Instant::now() > deadline {
            return Ok(());
        }
        before = now;
    }
}

/// Seconds, to the nanosecond, that those threads of a process have run whose names start with `name`.
///
/// # Errors
/// When the process has ended or has no such thread, or the kernel does not say (CONFIG_SCHED_INFO).
pub fn threads_cpu_s(process: u32, name: &str) -> Result<f64, String> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task"))
        .map_err(|error| format!("process {process} has ended: {error}"))?;
    let mut ns = None;
    for task in tasks.flatten() {
        let read = |file| std::fs::read_to_string(task.path().join(file));
        // A thread may end meanwhile.
        let (Ok(named), Ok(stat)) = (read("comm"), read("schedstat")) else { continue };
        if named.starts_with(name) {
            let ran = stat.split(' ').next().and_then(|ran| ran.parse::<f64>().ok());
            *ns.get_or_insert(0.0) += ran.ok_or("the kernel gives no schedstat")?;
        }
    }
    let ns = ns.ok_or_else(|| format!("process {process} has no thread {name}"))?;
    Ok(ns / 1e9)
}

/// Every process of the machine with its parent.
fn parents() -> Vec<(u32, u32)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let parent_of = |entry: std::fs::DirEntry| {
        let process = entry.file_name().to_str()?.parse().ok()?;
        // proc_pid_stat(5): field 4 is the parent.
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        Some((process, fields(&stat).get(1)?.parse().ok()?))
    };
    entries.flatten().filter_map(parent_of).collect()
}

/// proc_pid_stat(5): the fields from the third on; the name, the second, may hold blanks.
pub(crate) fn fields(stat: &str) -> Vec<&str> {
    stat.rsplit(')').next().unwrap_or("").split_whitespace().collect()
}

/// proc_pid_status(5): "RssAnon:      1234 kB".
fn anonymous_bytes(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kibibytes| kibibytes * 1024)
}

/// The same command on one core, which ends when the thread that starts it does.
pub fn pinned(core: usize, command: &Command) -> Command {
    let mut pinned = Command::new("taskset");
    pinned.args(["-c", &core.to_string(), "setpriv", "--pdeathsig", "KILL"]);
    pinned.arg(command.get_program()).args(command.get_args());
    pinned
}

/// Installs a Debian package, if its program is not there.
///
/// # Errors
/// A sentence that names the package to install by hand.
pub fn install(program: &str, package: &str) -> Result<(), String> {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return Ok(());
    }
    eprintln!("installing {package} from Debian");
    // Standard output is for the caller's figures.
    let mut installer = Command::new("apt-get");
    installer.env("DEBIAN_FRONTEND", "noninteractive").args(["install", "-y", "-qq", package]);
    match installer.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().last().unwrap_or("apt-get said nothing");
            Err(format!("cannot install {package} ({last}); install it by hand"))
        }
        Err(error) => Err(format!("cannot run apt-get ({error}); install {package} by hand")),
    }
}

fn last_line(mut file: std::fs::File) -> String {
    let mut text = String::new();
    let _ = file.rewind();
    // What a server prints is bounded by its start's few lines; this bound is for the one that goes mad.
    let _ = file.take(64 << 10).read_to_string(&mut text);
    text.lines().last().unwrap_or("it said nothing").to_owned()
}

pub(crate) fn free_address() -> Result<SocketAddr, String> {
    tidegate_ports::free_address().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_blanks_and_brackets_does_not_shift_the_fields() {
        assert_eq!(fields("7 (a) b) S 3 1 1")[..3], ["S", "3", "1"]);
    }

    #[test]
    fn anonymous_memory_is_read_in_bytes() {
        let status = "Name:\ta\nVmRSS:\t    2048 kB\nRssAnon:\t    1024 kB\n";
        assert_eq!(anonymous_bytes(status), Some(1 << 20));
        assert_eq!(anonymous_bytes("VmRSS: 1 kB"), None);
    }

    #[test]
    fn a_child_is_found_by_its_parent() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let found = parents().contains(&(child.id(), std::process::id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found);
    }

    #[test]
    fn a_server_that_ends_at_its_start_is_an_error_with_its_last_words() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such thing >&2; exit 3"]);
        let failed = Peer::start("broken", 0, free_address().unwrap(), &command);
        let message = failed.err().unwrap();
        assert!(
            message.contains("broken ended at its start") && message.ends_with("no such thing"),
            "{message}"
        );
    }
}
