//! Servers as they are and behind a chain, all processes of each on the server's core.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tempfile::TempDir;
use tidegate_bench::SERVER_CORE;
use tidegate_bench::peers::{install, pinned};

use super::cc_load::ask;
use crate::{Error, Lab};

const START_TIMEOUT: Duration = Duration::from_secs(20);
const STOP_TIMEOUT: Duration = Duration::from_secs(8);
const STEP: Duration = Duration::from_millis(20);
/// Processor time that a server without clients uses at most in ten steps.
const REST_CPU_S: f64 = 2e-3;
/// Processes of Apache by default (paper §4.4).
pub(super) const APACHE_WORKERS: u32 = 150;

/// Which server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Program {
    /// The paper's one-request-at-a-time server; there is none without a chain.
    CcServer,
    /// One worker, sendfile, open files cached, no log.
    Nginx,
    /// As [`Program::Nginx`], with a log of what is asked for.
    LoggingNginx,
    /// prefork, with so many processes, no log.
    Apache(u32),
}

/// A running server.
pub(super) struct Server {
    process: Child,
    address: SocketAddr,
    /// Of the server's own files.
    directory: TempDir,
}

/// The directory that every server serves: removed with this value.
pub(super) fn site() -> Result<TempDir, Error> {
    // In memory where there is such a place: the disk is not what is measured.
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let site = tempfile::Builder::new().prefix("tidegate-lab-").tempdir_in(&parent);
    let site = site.map_err(Error::file("write", &parent))?;
    // Servers change to users of their own.
    let open = std::fs::set_permissions(site.path(), std::fs::Permissions::from_mode(0o755));
    open.map_err(Error::file("write", site.path()))?;
    Ok(site)
}

/// Writes a file of so many bytes that servers serve.
pub(super) fn object(site: &Path, name: &str, size_bytes: usize) -> Result<(), Error> {
    let path = site.join(name);
    std::fs::write(&path, vec![b'a'; size_bytes]).map_err(Error::file("write", &path))
}

impl Server {
    /// Starts `program` for the files in `site`; `chain` is the filters in front of it, nearest to the clients first,
    /// and options of `condition`.
    ///
    /// # Errors
    /// When a program is missing or does not serve.
    pub(super) fn start(
        lab: &Lab,
        program: Program,
        chain: Option<&[&str]>,
        site: &Path,
    ) -> Result<Self, Error> {
        let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
        let open = std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777));
        open.map_err(Error::file("write", directory.path()))?;
        let address = tidegate_ports::free_address().map_err(|error| Error::Server(error.to_string()))?;
        let own = command(lab, program, chain, site, directory.path(), address.port())?;
        let command = match chain {
            Some(filters) if program != Program::CcServer => conditioned(lab, filters, address, &own)?,
            _ => own,
        };
        let mut pinned = pinned(SERVER_CORE, &command);
        pinned.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let errors = std::fs::File::create(directory.path().join("stderr"));
        let errors = errors.map_err(Error::file("write", directory.path()))?;
        pinned.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        // Cargo's would be asked before the path that is compiled in.
        pinned.env_remove("LD_LIBRARY_PATH");
        // Apache signals its whole process group.
        pinned.process_group(0);
        let process = pinned.spawn().map_err(|error| Error::Server(format!("taskset: {error}")))?;
        let mut server = Self { process, address, directory };
        server.await_service(program)?;
        Ok(server)
    }

    fn await_service(&mut self, program: Program) -> Result<(), Error> {
        let deadline = Instant::now() + START_TIMEOUT;
        let errors = self.file("stderr");
        while ask(self.address, None, "/", Duration::from_secs(1)).is_err() {
            let said = || {
                let text = std::fs::read_to_string(&errors).unwrap_or_default();
                text.lines().last().unwrap_or("it said nothing").to_owned()
            };
            if let Ok(Some(status)) = self.process.try_wait() {
                return Err(Error::Server(format!("{program:?} ended at its start ({status}): {}", said())));
            }
            if Instant::now() > deadline {
                return Err(Error::Server(format!("{program:?} does not serve: {}", said())));
            }
            std::thread::sleep(STEP);
        }
        Ok(())
    }

    /// Where it serves.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// A file of its own.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Its processes with their names.
    pub(super) fn processes(&self) -> Vec<(u32, String)> {
        let mut of = BTreeMap::new();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let Some((before, after)) = stat.rsplit_once(')') else { continue };
            let name = before.split_once('(').map_or("", |(_, name)| name).to_owned();
            // proc_pid_stat(5): the state is field 3, the parent 4, the session 6.
            let mut fields = after.split_whitespace().skip(1).map(|field| field.parse().unwrap_or(0));
            let (parent, session) = (fields.next().unwrap_or(0), fields.nth(1).unwrap_or(0));
            of.insert(process, (name, parent, session));
        }
        let mut family = vec![self.process.id()];
        // The chain of a server that was written for one is a session of its own, below the server's parent.
        let chains = of.iter().filter(|(process, (name, _, session))| {
            name.starts_with("tidegate-cc") && *session == **process && self.began(**process)
        });
        family.extend(chains.map(|(process, _)| *process));
        let mut next = 0;
        while let Some(&parent) = family.get(next) {
            let children =
                of.iter().filter(|(process, (_, of, _))| *of == parent && !family.contains(process));
            let children: Vec<u32> = children.map(|(process, _)| *process).collect();
            family.extend(children);
            next += 1;
        }
        let named = |process: u32| Some((process, of.get(&process)?.0.clone()));
        family.into_iter().filter_map(named).collect()
    }

    /// Whether a process has this server's link: it inherited the server's standard error.
    fn began(&self, process: u32) -> bool {
        std::fs::read_link(format!("/proc/{process}/fd/2")).is_ok_and(|file| file == self.file("stderr"))
    }

    /// Seconds of processor time that its processes have used, by name.
    pub(super) fn cpu_s_by_name(&self) -> BTreeMap<String, f64> {
        let mut by_name = BTreeMap::new();
        for (process, name) in self.processes() {
            // In nanoseconds; `stat` has ticks of 10 ms, but of children that were waited for, too.
            let own = std::fs::read_to_string(format!("/proc/{process}/schedstat")).unwrap_or_default();
            let own_s = own.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0) / 1e9;
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
            // Fields 16 and 17: times of children that have ended.
            let ended: f64 = fields.skip(13).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
            let ended_s = ended / rustix::param::clock_ticks_per_second() as f64;
            *by_name.entry(name).or_insert(0.0) += own_s + ended_s;
        }
        by_name
    }

    /// Seconds of processor time that all its processes have used.
    pub(super) fn cpu_s(&self) -> f64 {
        self.cpu_s_by_name().values().sum()
    }

    /// Waits until its processes have nothing left to do for clients that are gone.
    pub(super) fn rest(&self) {
        let deadline = Instant::now() + START_TIMEOUT;
        let mut before_s = self.cpu_s();
        while Instant::now() < deadline {
            std::thread::sleep(10 * STEP);
            let now_s = self.cpu_s();
            if now_s - before_s < REST_CPU_S {
                return;
            }
            before_s = now_s;
        }
    }

    /// The process of one filter.
    pub(super) fn filter(&self, name: &str) -> Option<u32> {
        let wanted = format!("cc-{name}");
        self.processes().into_iter().find(|(_, name)| *name == wanted).map(|(process, _)| process)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let processes = self.processes();
        let pid = |process: u32| i32::try_from(process).ok().and_then(Pid::from_raw);
        let signal = |process: u32, signal| {
            if let Some(process) = pid(process) {
                let _ = kill_process(process, signal);
            }
        };
        signal(self.process.id(), Signal::TERM);
        let deadline = Instant::now() + STOP_TIMEOUT;
        while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(STEP);
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
        // Processes with this server's standard error are its own and nobody else's.
        let left = || processes.iter().filter(|(process, _)| self.began(*process));
        while left().next().is_some() && Instant::now() < deadline {
            std::thread::sleep(STEP);
        }
        left().for_each(|(process, _)| signal(*process, Signal::KILL));
        // A chain of the C library outlives its server; its processor time is this run's once it was waited for.
        for process in processes.iter().filter_map(|(process, _)| pid(*process)) {
            while matches!(waitpid(Some(process), WaitOptions::NOHANG), Ok(None)) && Instant::now() < deadline
            {
                std::thread::sleep(STEP);
            }
        }
    }
}

/// `own`, behind filters.
fn conditioned(lab: &Lab, filters: &[&str], address: SocketAddr, own: &Command) -> Result<Command, Error> {
    if !lab.tidegate.is_file() {
        return Err(Error::NoTidegate(lab.tidegate.clone()));
    }
    let mut command = Command::new(&lab.tidegate);
    command.args(["condition", "--listen", &address.to_string(), "--preload"]);
    command.arg(beside(lab, "libtidegate_preload.so")?);
    for filter in filters {
        match filter.strip_prefix("--") {
            Some(_) => command.arg(filter),
            None => command.args(["--filter", filter]),
        };
    }
    command.arg("--").arg(own.get_program()).args(own.get_args());
    Ok(command)
}

/// A file that was built with tidegate.
fn beside(lab: &Lab, name: &str) -> Result<PathBuf, Error> {
    let directory = lab.tidegate.parent().unwrap_or(Path::new(".")).to_owned();
    let places = [directory.join(name), directory.join("deps").join(name)];
    // The newer one: a build leaves an older copy in the other place.
    let built = |file: &PathBuf| std::fs::metadata(file).and_then(|metadata| metadata.modified()).ok();
    let found = places.into_iter().filter(|file| file.is_file()).max_by_key(built);
    found.ok_or_else(|| {
        let packages = "tidegate-conditioning, tidegate-cc and tidegate-preload";
        Error::Server(format!("{name} is not beside {}: build {packages} too", lab.tidegate.display()))
    })
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(path, text).map_err(Error::file("write", path))
}

fn command(
    lab: &Lab,
    program: Program,
    chain: Option<&[&str]>,
    site: &Path,
    directory: &Path,
    port: u16,
) -> Result<Command, Error> {
    let (site_name, own) = (site.display(), directory.display());
    match program {
        Program::CcServer => ccserver(lab, chain.unwrap_or(&["package"]), site, directory, port),
        Program::Nginx | Program::LoggingNginx => {
            install("nginx", "nginx-light").map_err(Error::Server)?;
            let log = if program == Program::Nginx { "off".to_owned() } else { format!("{own}/access.log") };
            let text = format!(
                "worker_processes 1; daemon off; pid {own}/pid; error_log {own}/error.log;\n\
                 worker_rlimit_nofile 20000; events {{ worker_connections 19000; }}\n\
                 http {{ access_log {log}; tcp_nodelay on; sendfile on; keepalive_requests 1000000000;\n\
                 open_file_cache max=10000 inactive=1h; open_file_cache_valid 1h; merge_slashes off;\n\
                 client_body_temp_path {own}/body; proxy_temp_path {own}/proxy; fastcgi_temp_path {own}/fastcgi;\n\
                 uwsgi_temp_path {own}/uwsgi; scgi_temp_path {own}/scgi; large_client_header_buffers 4 64k;\n\
                 server {{ listen 127.0.0.1:{port} backlog=4096; root {site_name}; }} }}\n"
            );
            write(&directory.join("nginx.conf"), &text)?;
            let mut command = Command::new("nginx");
            command.args(["-e", "stderr", "-c"]).arg(directory.join("nginx.conf"));
            Ok(command)
        }
        Program::Apache(workers) => {
            install("apache2", "apache2").map_err(Error::Server)?;
            let modules = "/usr/lib/apache2/modules";
            let text = format!(
                "ServerRoot {own}\nServerName localhost\nPidFile {own}/pid\nDefaultRuntimeDir {own}\n\
                 Listen 127.0.0.1:{port}\nListenBacklog 4096\nErrorLog {own}/error.log\n\
                 LoadModule mpm_prefork_module {modules}/mod_mpm_prefork.so\n\
                 LoadModule authz_core_module {modules}/mod_authz_core.so\n\
                 User www-data\nGroup www-data\nDocumentRoot {site_name}\n\
                 <Directory {site_name}>\nRequire all granted\nAllowOverride None\nOptions FollowSymLinks\n\
                 </Directory>\n\
                 ServerLimit {workers}\nMaxRequestWorkers {workers}\nStartServers {workers}\n\
                 MinSpareServers 1\nMaxSpareServers {workers}\nMaxConnectionsPerChild 0\n\
                 KeepAlive On\nKeepAliveTimeout 15\nMaxKeepAliveRequests 0\nTimeout 300\nEnableSendfile On\n"
            );
            write(&directory.join("apache.conf"), &text)?;
            let mut command = Command::new("apache2");
            command.args(["-DFOREGROUND", "-f"]).arg(directory.join("apache.conf"));
            Ok(command)
        }
    }
}

/// Compiles the example as a user would.
fn ccserver(lab: &Lab, filters: &[&str], site: &Path, directory: &Path, port: u16) -> Result<Command, Error> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let library = beside(lab, "libtidegate_cc.so")?;
    let place = library.parent().unwrap_or(Path::new(".")).to_owned();
    let output = directory.join("ccserver");
    let compiled = Command::new("cc")
        .args(["-O2", "-o"])
        .arg(&output)
        .arg(sources.join("examples/ccserver.c"))
        .arg("-I")
        .arg(sources.join("crates/conditioning/cc/include"))
        .arg(format!("-L{}", place.display()))
        .arg(format!("-Wl,-rpath,{}", place.display()))
        .arg("-ltidegate_cc")
        .output()
        .map_err(|error| Error::Server(format!("cannot start cc: {error}; install gcc")))?;
    if !compiled.status.success() {
        let said = String::from_utf8_lossy(&compiled.stderr).into_owned();
        return Err(Error::Server(format!("cannot compile ccserver.c: {said}")));
    }
    let mut command = Command::new(output);
    // It names its filters from the server to the client.
    command.arg(port.to_string()).arg(site).args(filters.iter().rev());
    command.env("TIDEGATE_CC", beside(lab, "tidegate-cc")?);
    Ok(command)
}
