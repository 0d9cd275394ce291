//! tidegate as the server of transfers: the same files over Trickles and over the kernel's TCP.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidegate_bench::peers::threads_cpu_s;

use super::byte_at;
use crate::{Error, Lab};

/// Where every replica listens, by both carriers.
const PORT: u16 = 4000;
/// How long a server may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Files whose names are their lengths, and the keys that replicas share.
#[derive(Debug)]
pub struct Site {
    directory: TempDir,
    cache_entries: usize,
}

impl Site {
    /// Makes files of these lengths.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn new(lengths: &[u64]) -> Result<Self, Error> {
        let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
        let root = directory.path().join("root");
        std::fs::create_dir(&root).map_err(Error::file("write", &root))?;
        for &length in lengths {
            let path = root.join(length.to_string());
            let content: Vec<u8> = (0..length).map(byte_at).collect();
            std::fs::write(&path, content).map_err(Error::file("write", &path))?;
        }
        let keys = directory.path().join("keys");
        // They protect nothing but this run.
        std::fs::write(&keys, "1 000102030405060708090a0b0c0d0e0f\n").map_err(Error::file("write", &keys))?;
        Ok(Self { directory, cache_entries: 0 })
    }

    /// Has replicas that are started from here on keep a soft-state cache of so many entries (Trickles §5.1).
    #[must_use]
    pub fn with_cache(self, cache_entries: usize) -> Self {
        Self { cache_entries, ..self }
    }

    /// The directory with the files.
    pub fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    fn config(&self, address: SocketAddr) -> Result<PathBuf, Error> {
        let path = self.directory.path().join(format!("{}.toml", address.port()));
        let (keys, root, cache) = (self.directory.path().join("keys"), self.root(), self.cache_entries);
        let text = format!(
            "workers = 1\n[[listen]]\naddress = \"{address}\"\nprotocol = \"trickles\"\nkeys = {keys:?}\n\
             cache_entries = {cache}\n[[listen]]\naddress = \"{address}\"\n[admin]\naddress = \"127.0.0.1:0\"\n[[route]]\nroot = {root:?}\n\
             [limits]\nconnections = 1000000\n[[exempt]]\nsource = \"10.98.0.0/16\"\n[[exempt]]\nsource = \"127.0.0.0/8\"\n"
        );
        std::fs::write(&path, text).map_err(Error::file("write", &path))?;
        Ok(path)
    }
}

/// A tidegate that serves a [`Site`] until it is dropped or killed.
#[derive(Debug)]
pub struct Replica {
    process: Child,
    address: SocketAddr,
}

impl Replica {
    /// Starts the `n`-th replica at `ip` by `command`, which runs the given program somewhere, and waits until it listens.
    ///
    /// # Errors
    /// tidegate is not there or does not start.
    pub fn start(
        lab: &Lab,
        site: &Site,
        ip: IpAddr,
        n: u16,
        command: impl FnOnce(&Path) -> Command,
    ) -> Result<Self, Error> {
        if !lab.tidegate.is_file() {
            return Err(Error::NoTidegate(lab.tidegate.clone()));
        }
        let address = SocketAddr::new(ip, PORT + n);
        let config = site.config(address)?;
        let mut process = command(&lab.tidegate)
            .arg("run")
            .arg("--config")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Error::Server(format!("cannot start tidegate: {error}")))?;
        let stderr = process.stderr.take();
        let replica = Self { process, address };
        replica.wait_until_it_listens(stderr)?;
        Ok(replica)
    }

    fn wait_until_it_listens(&self, stderr: Option<std::process::ChildStderr>) -> Result<(), Error> {
        let (sender, lines) = std::sync::mpsc::channel();
        // Goes on reading to the end: a server that says much must not wait for a reader.
        std::thread::spawn(move || {
            for line in BufReader::new(stderr.into_iter().next()?).lines() {
                let _ = sender.send(line.ok()?);
            }
            Some(())
        });
        let deadline = Instant::now() + START_TIMEOUT;
        let (mut heard, mut last) = (0, String::new());
        while heard < 2 {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line)
                    if line.contains("listening on trickles://") || line.contains("listening on http://") =>
                {
                    heard += 1;
                }
                Ok(line) => last = line,
                Err(_) => {
                    return Err(Error::Server(format!(
                        "tidegate does not listen on {}: {last}",
                        self.address
                    )));
                }
            }
        }
        Ok(())
    }

    /// Where it listens, by either carrier.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends it at once, as a crash does (SIGKILL).
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    fn proc(&self, name: &str) -> Result<String, Error> {
        let path = PathBuf::from(format!("/proc/{}/{name}", self.process.id()));
        std::fs::read_to_string(&path).map_err(Error::file("read", &path))
    }

    /// Seconds of user and system time that those of its threads have used whose names begin with `threads`.
    ///
    /// # Errors
    /// It has ended, or has no such thread.
    pub fn cpu_s(&self, threads: &str) -> Result<f64, Error> {
        threads_cpu_s(self.process.id(), threads).map_err(Error::Server)
    }

    /// Bytes of memory that it has resident and no file holds: anonymous, and shared as an arena is.
    ///
    /// # Errors
    /// It has ended.
    pub fn memory_bytes(&self) -> Result<u64, Error> {
        let status = self.proc("status")?;
        let kib = |name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
            kib.and_then(|kib| kib.trim().parse::<u64>().ok())
        };
        let both = kib("RssAnon:").zip(kib("RssShmem:"));
        both.map(|(own, shared)| (own + shared) * 1024).ok_or(Error::Nothing("the kernel's count of memory"))
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.kill();
    }
}
