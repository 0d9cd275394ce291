//! The tidegate under test: the real binary, its own directory, its own ports.

use std::fmt::Display;
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid};
use tempfile::TempDir;

use crate::{Client, Origin, Response, eventually, free_port};

/// What a test's configuration consists of; all of it has a default but where requests go.
#[derive(Default)]
pub struct Builder {
    routes: String,
    cache: String,
    limits: String,
    top: String,
    tables: String,
    has_own_program: bool,
}

impl Builder {
    /// All requests go to `origin`.
    #[must_use]
    pub fn origin(self, origin: &Origin) -> Self {
        self.group("app", &[origin.address()], "").route("/", "upstream = \"app\"")
    }

    /// A group of upstream servers, with further lines of its table.
    #[must_use]
    pub fn group(mut self, name: &str, servers: &[impl Display], lines: &str) -> Self {
        let servers: Vec<String> = servers.iter().map(|server| format!("\"{server}\"")).collect();
        self.tables +=
            &format!("[[upstream]]\nname = \"{name}\"\nservers = [{}]\n{lines}\n", servers.join(", "));
        self
    }

    /// A route for all hosts: `target` is `upstream = "…"` or `root = "…"`.
    #[must_use]
    pub fn route(mut self, path: &str, target: &str) -> Self {
        self.routes += &format!("[[route]]\nhost = \"*\"\npath = \"{path}\"\n{target}\n");
        self
    }

    /// Lines of the `[cache]` table.
    #[must_use]
    pub fn cache(mut self, lines: &str) -> Self {
        self.cache += lines;
        self.cache.push('\n');
        self
    }

    /// Lines of the `[limits]` table.
    #[must_use]
    pub fn limits(mut self, lines: &str) -> Self {
        self.limits += lines;
        self.limits.push('\n');
        self
    }

    /// Lines before the first table.
    #[must_use]
    pub fn top(mut self, lines: &str) -> Self {
        self.top += lines;
        self.top.push('\n');
        self
    }

    /// Whole tables.
    #[must_use]
    pub fn tables(mut self, text: &str) -> Self {
        self.tables += text;
        self.tables.push('\n');
        self
    }

    /// Has the binary lie in the test's directory, where another one can take its place.
    #[must_use]
    pub fn own_program(mut self) -> Self {
        self.has_own_program = true;
        self
    }

    /// Starts tidegate and waits until it listens. `@DIR@` in the configuration is the test's directory.
    pub fn start(self) -> Tidegate {
        let directory = tempfile::tempdir().unwrap();
        let [address, admin] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())));
        let memory = if self.cache.contains("memory") { "" } else { "memory = \"32MiB\"\n" };
        let text = format!(
            "{}\n[[listen]]\naddress = \"{address}\"\n[admin]\naddress = \"{admin}\"\n[cache]\n{memory}{}[limits]\n{}\n{}\n{}",
            self.top, self.cache, self.limits, self.tables, self.routes
        );
        let mut program = Tidegate::binary();
        if self.has_own_program {
            program = directory.path().join("tidegate");
            // It is replaced, never changed.
            let linked = std::fs::hard_link(Tidegate::binary(), &program);
            linked.or_else(|_| std::fs::copy(Tidegate::binary(), &program).map(drop)).unwrap();
            // A process that takes its place is this one's child when it has ended.
            set_child_subreaper(Some(getpid())).unwrap();
        }
        let mut tidegate = Tidegate { directory, program, address, admin, process: None };
        tidegate.write_config(&text);
        tidegate.start();
        tidegate
    }
}

/// A running tidegate; it is killed with the value.
pub struct Tidegate {
    directory: TempDir,
    program: PathBuf,
    address: SocketAddr,
    admin: SocketAddr,
    process: Option<Pid>,
}

impl Tidegate {
    /// A configuration to complete.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// A tidegate with a cache in memory, before this origin.
    pub fn before(origin: &Origin) -> Self {
        Self::builder().origin(origin).start()
    }

    /// The binary: `TIDEGATE_BIN`, or the one beside the tests' own folder.
    ///
    /// # Panics
    /// When it has not been built.
    pub fn binary() -> PathBuf {
        let path = std::env::var_os("TIDEGATE_BIN").map_or_else(
            || {
                let test = std::env::current_exe().unwrap();
                test.parent().and_then(Path::parent).unwrap().join("tidegate")
            },
            PathBuf::from,
        );
        assert!(path.is_file(), "{} is not there: cargo build -p tidegate", path.display());
        path
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where the admin interface listens.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// The test's own directory.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The configuration file.
    pub fn config(&self) -> PathBuf {
        self.directory().join("tidegate.toml")
    }

    /// Replaces the configuration file; `@DIR@` is the test's directory.
    pub fn write_config(&self, text: &str) {
        let text = text.replace("@DIR@", self.directory().to_str().unwrap());
        std::fs::write(self.config(), text).unwrap();
    }

    /// What it has written so far, both outputs.
    pub fn output(&self) -> String {
        std::fs::read_to_string(self.directory().join("output.txt")).unwrap_or_default()
    }

    /// Starts the process (again) and waits until it listens.
    ///
    /// # Panics
    /// When it ends instead; its output is printed.
    #[expect(
        clippy::zombie_processes,
        reason = "it is waited for by its number, as those that take its place are"
    )]
    pub fn start(&mut self) {
        assert!(self.process.is_none(), "it runs already");
        let log =
            File::options().create(true).append(true).open(self.directory().join("output.txt")).unwrap();
        let child = Command::new(&self.program)
            .args(["run", "--allow-unreachable"])
            .arg("--config")
            .arg(self.config())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.process = Some(Pid::from_child(&child));
        eventually("tidegate listens", || {
            let ended = self.try_wait();
            assert!(ended.is_none(), "tidegate ended with {ended:?}:\n{}", self.output());
            // The admin listener comes last: once it answers, all is there.
            Client::try_connect(self.admin).and_then(|_| Client::try_connect(self.address)).ok()
        });
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.expect("it runs").as_raw_nonzero().get() as u32
    }

    /// Puts another program in the place of the one that it was started from; `None`: that one again.
    pub fn replace_program(&self, script: Option<&str>) {
        let beside = self.directory().join("tidegate.new");
        match script {
            Some(script) => {
                let mut file =
                    File::options().write(true).create_new(true).mode(0o755).open(&beside).unwrap();
                std::io::Write::write_all(&mut file, script.as_bytes()).unwrap();
            }
            None => {
                let linked = std::fs::hard_link(Self::binary(), &beside);
                linked.or_else(|_| std::fs::copy(Self::binary(), &beside).map(drop)).unwrap();
            }
        }
        std::fs::rename(&beside, &self.program).unwrap();
    }

    /// Another process has taken the place of this one, which ends: everything is about that one from now on.
    pub fn follow(&mut self, pid: u32) -> ExitStatus {
        let status = self.wait();
        self.process = Pid::from_raw(pid as i32);
        status
    }

    /// How it has ended, if it has.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        let (_, status) = waitpid(self.process, WaitOptions::NOHANG).unwrap()?;
        self.process = None;
        Some(ExitStatus::from_raw(status.as_raw()))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid() as i32).unwrap(), signal).unwrap();
    }

    /// Stops it until SIGCONT. On another processor a thread runs on for a moment after the signal; none does after
    /// this.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let threads = format!("/proc/{}/task", self.pid());
        eventually("every thread has stopped", || {
            let mut states = std::fs::read_dir(&threads).unwrap().map(|thread| {
                let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap_or_default();
                // proc_pid_stat(5): the state follows the name, which may hold anything.
                stat.rsplit(") ").next().and_then(|rest| rest.chars().next())
            });
            states.all(|state| state == Some('T')).then_some(())
        });
    }

    /// Ends it at once, as a crash would.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.wait();
    }

    /// Asks it to end and waits until it has.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.wait()
    }

    /// Waits until it has ended.
    pub fn wait(&mut self) -> ExitStatus {
        assert!(self.process.is_some(), "it runs");
        eventually("tidegate ends", || self.try_wait())
    }

    /// Connects a client.
    pub fn connect(&self) -> Client {
        Client::connect(self.address)
    }

    /// One GET on a connection of its own.
    pub fn get(&self, target: &str) -> Response {
        self.connect().get(target)
    }

    /// One GET with further field lines (each ended by CRLF) on a connection of its own.
    pub fn get_with(&self, target: &str, fields: &str) -> Response {
        self.connect().request("GET", target, fields)
    }

    /// Sends these bytes on a connection of their own and returns the status and whether the connection was closed.
    pub fn refusal(&self, bytes: &[u8]) -> (u16, bool) {
        let mut client = self.connect();
        // The refusal may come before the last byte is sent.
        let _ = client.try_send(bytes);
        let status = client.try_response("GET").map_or(0, |response| response.status);
        (status, client.is_closed())
    }

    /// One GET to the admin interface.
    pub fn ask_admin(&self, target: &str) -> Response {
        let mut client = Client::connect(self.admin);
        // It answers to its address only, not to names.
        client.send(format!("GET {target} HTTP/1.1\r\nHost: {}\r\n\r\n", self.admin));
        client.response()
    }

    /// The value of a metric (the sum over its labels), 0 when it is absent.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.ask_admin("/metrics").text();
        let lines = text.lines().filter(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{') || rest.starts_with(' '))
        });
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Runs a command of the binary against this server.
    pub fn command(&self, arguments: &[&str]) -> Output {
        Command::new(Self::binary())
            .args(arguments)
            .arg("--admin")
            .arg(self.admin.to_string())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Resident memory in bytes, file-backed pages included.
    pub fn resident_bytes(&self) -> u64 {
        self.status_number("VmRSS:") << 10
    }

    /// Resident memory of its own, without file-backed pages, in bytes.
    pub fn anonymous_bytes(&self) -> u64 {
        self.status_number("RssAnon:") << 10
    }

    /// Whether the kernel may back its memory with huge pages.
    pub fn may_have_huge_pages(&self) -> bool {
        self.status_number("THP_enabled:") != 0
    }

    /// What its descriptors lead to; the names of removed files end in ` (deleted)` (proc(5)).
    pub fn open_files(&self) -> Vec<PathBuf> {
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        // One may be closed meanwhile.
        descriptors.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok()).collect()
    }

    /// Bytes that it has read from files so far (`rchar` of proc(5)).
    pub fn bytes_read(&self) -> u64 {
        let counts = std::fs::read_to_string(format!("/proc/{}/io", self.pid())).unwrap();
        let read = counts.lines().find_map(|line| line.strip_prefix("rchar: "));
        read.unwrap().parse().unwrap()
    }

    fn status_number(&self, key: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Tidegate {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            let _ = kill_process(process, Signal::KILL);
            let _ = waitpid(Some(process), WaitOptions::empty());
        }
        if std::thread::panicking() {
            eprintln!("--- tidegate's output ---\n{}", self.output());
        }
    }
}
