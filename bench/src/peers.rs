//! The servers that are compared, and the load.

use std::io::{Read, Seek, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{LOAD_CORE, SERVER_CORE};

const START_TIMEOUT: Duration = Duration::from_secs(10);

/// One measurement.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// Requests answered in a second.
    pub requests_per_s: f64,
    /// User and system time of the server, divided by the requests that it answered.
    pub cpu_us_per_request: f64,
}

/// A directory with one file, `object`.
pub struct Site {
    directory: PathBuf,
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
}

/// A server that runs on its core until it is dropped.
pub struct Peer {
    /// How it is called in figures.
    pub name: &'static str,
    address: SocketAddr,
    process: Child,
}

impl Peer {
    /// The limit: the bare responder. The running program must have a subcommand `bare ADDRESS SIZE_BYTES` that calls
    /// [`crate::bare::serve`].
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn bare(size_bytes: usize) -> Result<Self, String> {
        let address = free_address()?;
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command.args(["bare", &address.to_string(), &size_bytes.to_string()]);
        Self::start("bare", address, command)
    }

    /// nginx at its best: one worker, open files cached, sendfile, no log.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn nginx(site: &Site) -> Result<Self, String> {
        let address = free_address()?;
        let root = site.directory.display();
        let config = format!(
            "daemon off; master_process off; worker_processes 1; worker_rlimit_nofile 20000;\n\
             pid {root}/nginx.pid; error_log {root}/nginx.err crit;\n\
             events {{ worker_connections 16000; }}\n\
             http {{ access_log off; sendfile on; tcp_nopush off; tcp_nodelay on; keepalive_requests 1000000000;\n\
             open_file_cache max=100 inactive=1h; open_file_cache_valid 1h; default_type text/plain;\n\
             server {{ listen {address} backlog=4096; root {root}; }} }}\n"
        );
        let path = site.directory.join("nginx.conf");
        std::fs::write(&path, config).map_err(|error| error.to_string())?;
        let mut command = Command::new("nginx");
        command.arg("-c").arg(path);
        Self::start("nginx", address, command)
    }

    /// tidegate with one data core and its default protections, except what `config` (TOML) says.
    ///
    /// # Errors
    /// A sentence that says why it does not run.
    pub fn tidegate(binary: &Path, site: &Site, config: &str) -> Result<Self, String> {
        let (address, admin) = (free_address()?, free_address()?);
        let path = site.directory.join("tidegate.toml");
        std::fs::write(&path, config).map_err(|error| error.to_string())?;
        let mut command = Command::new(binary);
        command.args([
            "run",
            "--config",
            &path.display().to_string(),
            "--workers",
            "1",
            "--listen",
            &address.to_string(),
            "--admin",
            &admin.to_string(),
            "--root",
        ]);
        command.arg(&site.directory);
        Self::start("tidegate", address, command)
    }

    fn start(name: &'static str, address: SocketAddr, command: Command) -> Result<Self, String> {
        let mut pinned = pinned(SERVER_CORE, &command);
        // A file and not a pipe, which a server that says much would fill and wait for.
        let complaints = tempfile::tempfile().map_err(|error| error.to_string())?;
        let stderr = complaints.try_clone().map_err(|error| error.to_string())?;
        pinned.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        let process = pinned.spawn().map_err(|error| format!("cannot start {name} by taskset: {error}"))?;
        let mut peer = Self { name, address, process };
        let deadline = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(address).is_err() {
            if let Ok(Some(status)) = peer.process.try_wait() {
                return Err(format!("{name} ended at its start ({status}): {}", last_line(complaints)));
            }
            if Instant::now() > deadline {
                return Err(format!("{name} does not listen on {address}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(peer)
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
        let mut stream = TcpStream::connect(self.address).map_err(|error| error.to_string())?;
        let request = format!("GET /object HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address);
        stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).map_err(|error| error.to_string())?;
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

    /// Load by wrk from the load's core for some seconds; `close` asks for a connection a request.
    ///
    /// # Errors
    /// A sentence that says what went wrong, wrong answers included.
    pub fn measure(&self, connections: usize, close: bool, seconds: u32) -> Result<Figure, String> {
        let mut wrk = Command::new("wrk");
        wrk.args(["-t1", &format!("-c{connections}"), &format!("-d{seconds}")]);
        if close {
            wrk.args(["-H", "Connection: close"]);
        }
        wrk.arg(format!("http://{}/object", self.address));
        let before = self.cpu_s()?;
        let output =
            pinned(LOAD_CORE, &wrk).output().map_err(|error| format!("cannot start wrk: {error}"))?;
        let cpu_s = self.cpu_s()? - before;
        let text = String::from_utf8_lossy(&output.stdout);
        if text.contains("Non-2xx") {
            return Err(format!("{}: not all answers were right:\n{text}", self.name));
        }
        let number = |line: &str, word: usize| {
            let line = text.lines().find(|candidate| candidate.contains(line))?;
            line.split_whitespace().nth(word)?.parse::<f64>().ok()
        };
        let requests = number("requests in", 0).filter(|requests| *requests > 0.0);
        match (requests, number("Requests/sec:", 1)) {
            (Some(requests), Some(requests_per_s)) => {
                Ok(Figure { requests_per_s, cpu_us_per_request: cpu_s * 1e6 / requests })
            }
            _ => Err(format!("{}: wrk measured nothing:\n{text}", self.name)),
        }
    }

    /// Seconds of user and system time that the server has used. taskset replaces itself by the server, so the child's
    /// id is the server's.
    ///
    /// # Errors
    /// When the server has ended.
    pub fn cpu_s(&self) -> Result<f64, String> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id()))
            .map_err(|error| format!("{} has ended: {error}", self.name))?;
        // proc_pid_stat(5): utime and stime are fields 14 and 15; the name, field 2, may hold blanks.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        let ticks =
            |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
        Ok((ticks(11) + ticks(12)) / rustix::param::clock_ticks_per_second() as f64)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
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
    let installed = Command::new("apt-get").args(["install", "-y", "-q", package]).status();
    if installed.is_ok_and(|status| status.success()) {
        Ok(())
    } else {
        Err(format!("cannot install {package}; install it by hand"))
    }
}

fn last_line(mut file: std::fs::File) -> String {
    let mut text = String::new();
    let _ = file.rewind();
    // What a server prints is bounded by its start's few lines; this bound is for the one that goes mad.
    let _ = file.take(64 << 10).read_to_string(&mut text);
    text.lines().last().unwrap_or("it said nothing").to_owned()
}

fn free_address() -> Result<SocketAddr, String> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(|error| error.to_string())
}
