//! The servers that are compared, and the load.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Figure, Scenario};

const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A directory with one file of the scenario's size.
pub(crate) struct Site {
    directory: PathBuf,
}

impl Site {
    pub(crate) fn create(parent: &Path, size_bytes: usize) -> Result<Self, String> {
        let directory = parent.join(format!("site-{size_bytes}"));
        std::fs::create_dir_all(&directory).map_err(|error| error.to_string())?;
        std::fs::write(directory.join("object"), vec![b'a'; size_bytes])
            .map_err(|error| error.to_string())?;
        Ok(Self { directory })
    }
}

/// A server that runs on core 0 until it is dropped.
pub(crate) struct Peer {
    pub name: &'static str,
    address: SocketAddr,
    process: Child,
}

impl Peer {
    /// The limit: this program's own responder.
    pub(crate) fn bare(scenario: &Scenario) -> Result<Self, String> {
        let address = free_address()?;
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command.args(["bare", &address.to_string(), &scenario.size_bytes.to_string()]);
        Self::start("bare", address, command)
    }

    /// nginx at its best: one worker, open files cached, sendfile, no log.
    pub(crate) fn nginx(site: &Site) -> Result<Self, String> {
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

    /// tidegate with its default protections, one data core.
    pub(crate) fn tidegate(binary: &Path, site: &Site) -> Result<Self, String> {
        let (address, admin) = (free_address()?, free_address()?);
        let mut command = Command::new(binary);
        command.args([
            "run",
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
        let mut pinned = Command::new("taskset");
        pinned.args(["-c", "0"]).arg(command.get_program()).args(command.get_args());
        pinned.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = pinned.spawn().map_err(|error| format!("cannot start {name}: {error}"))?;
        let peer = Self { name, address, process };
        let deadline = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(address).is_err() {
            if Instant::now() > deadline {
                return Err(format!("{name} does not listen on {address}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(peer)
    }

    /// A server that answers quickly and wrongly must not win.
    pub(crate) fn verify(&self, scenario: &Scenario) -> Result<(), String> {
        let mut stream = TcpStream::connect(self.address).map_err(|error| error.to_string())?;
        let request = format!("GET /object HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address);
        stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).map_err(|error| error.to_string())?;
        let head = answer.windows(4).position(|window| window == b"\r\n\r\n").map_or(0, |at| at + 4);
        let body = &answer[head..];
        let right = answer.starts_with(b"HTTP/1.1 200")
            && body.len() == scenario.size_bytes
            && body.iter().all(|byte| *byte == b'a');
        if right {
            Ok(())
        } else {
            Err(format!("{} gave a wrong answer of {} bytes", self.name, answer.len()))
        }
    }

    /// Load from core 1 for some seconds.
    pub(crate) fn measure(&self, scenario: &Scenario, seconds: u32) -> Result<Figure, String> {
        let mut wrk = Command::new("taskset");
        wrk.args(["-c", "1", "wrk", "-t1", &format!("-c{}", scenario.connections), &format!("-d{seconds}")]);
        if scenario.close {
            wrk.args(["-H", "Connection: close"]);
        }
        wrk.arg(format!("http://{}/object", self.address));
        let before = self.cpu_s()?;
        let output = wrk.output().map_err(|error| format!("cannot start wrk: {error}"))?;
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

    /// User and system time of the server. taskset replaces itself by the server, so the child's id is the server's.
    fn cpu_s(&self) -> Result<f64, String> {
        let path = format!("/proc/{}/stat", self.process.id());
        let stat =
            std::fs::read_to_string(&path).map_err(|error| format!("{} has ended: {error}", self.name))?;
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

fn free_address() -> Result<SocketAddr, String> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(|error| error.to_string())
}
