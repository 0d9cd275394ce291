//! tidegate serving DHTTP on a host of the lab.

use std::collections::HashMap;
use std::fmt::Write;
use std::io::{Read, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::PoisonError;
use std::time::Duration;

use tempfile::TempDir;
use tidegate_bench::SERVER_CORE;
use tidegate_bench::peers::pinned;
use tokio::sync::oneshot;

use crate::link::enter;
use crate::origin::{self, Executed};
use crate::process::Process;
use crate::quota::Quota;
use crate::server::tidegate;
use crate::{Error, Lab};

/// Where tidegate's admin server listens; each host has a loopback interface of its own.
const ADMIN: &str = "127.0.0.1:9090";
/// Where the site behind it listens.
const ORIGIN: &str = "127.0.0.1:9000";
/// The ports of both protocols.
pub(super) const HTTP_PORT: u16 = 8080;
pub(super) const DHTTP_PORT: u16 = 80;

/// What tidegate serves.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content<'c> {
    /// Answers of [`origin`], which nothing keeps.
    Made,
    /// The files of a directory.
    Files(&'c Path),
}

/// tidegate, and what is behind it, on one host.
#[derive(Debug)]
pub(super) struct Site {
    namespace: String,
    pub(super) executed: Executed,
    _tidegate: Process,
    /// Ends the site behind it.
    _origin: Option<oneshot::Sender<()>>,
    _directory: TempDir,
}

/// A command on a host; it ends with the thread that starts it.
pub(super) fn on_host(namespace: &str, program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--net=/run/netns/{namespace}"))
        .args(["setpriv", "--pdeathsig", "KILL"])
        .arg(program);
    command
}

impl Site {
    /// Starts tidegate at these addresses of a host.
    pub(super) fn start(
        lab: &Lab,
        namespace: &str,
        addresses: &[IpAddr],
        content: Content<'_>,
    ) -> Result<Self, Error> {
        Self::start_within(lab, namespace, addresses, content, None)
    }

    /// The same, on the server's core and with a share of it.
    pub(super) fn start_within(
        lab: &Lab,
        namespace: &str,
        addresses: &[IpAddr],
        content: Content<'_>,
        quota: Option<&Quota>,
    ) -> Result<Self, Error> {
        let binary: PathBuf = tidegate(lab)?;
        let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
        let executed = Executed::default();
        let mut config =
            format!("workers = 1\n[admin]\naddress = \"{ADMIN}\"\n[limits]\nconnections = 100000\n");
        // The load of thousands of clients comes from a few addresses here.
        config += "[defence]\nenabled = false\n";
        for address in addresses {
            for (port, protocol) in [(HTTP_PORT, "http"), (DHTTP_PORT, "dhttp")] {
                let address = SocketAddr::new(*address, port);
                let _ = writeln!(config, "[[listen]]\naddress = \"{address}\"\nprotocol = \"{protocol}\"");
            }
        }
        let mut origin = None;
        match content {
            Content::Made => {
                // Patience with an origin that shares its processors, and room for what is asked for again meanwhile:
                // what is refused for overload is no fault of a link.
                let _ = writeln!(
                    config,
                    "[[upstream]]\nname = \"site\"\nservers = [\"{ORIGIN}\"]\nconnect_timeout = \"60s\"\n\
                     max_connections = 4096\n[[route]]\nupstream = \"site\""
                );
                origin = Some(start_origin(namespace, &executed)?);
            }
            Content::Files(root) => {
                let _ = writeln!(config, "[[route]]\nroot = \"{}\"", root.display());
            }
        }
        let path = directory.path().join("tidegate.toml");
        std::fs::write(&path, config).map_err(Error::file("write", &path))?;
        let mut command = Command::new(&binary);
        command.args(["run", "--config"]).arg(path);
        if let Some(quota) = quota {
            command = quota.limit(&pinned(SERVER_CORE, &command));
        }
        let mut on_host = on_host(namespace, command.get_program());
        let command = on_host.args(command.get_args());
        let tidegate = Process::start(command, "listening on dhttp://")?;
        Ok(Self {
            namespace: namespace.to_owned(),
            executed,
            _tidegate: tidegate,
            _origin: origin,
            _directory: directory,
        })
    }

    /// How often each number was executed.
    pub(super) fn executed(&self) -> HashMap<u64, u32> {
        self.executed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// tidegate's counters, by name; those with labels summed up.
    pub(super) fn metrics(&self) -> Result<HashMap<String, f64>, Error> {
        let failed = |error: std::io::Error| Error::Server(format!("no metrics of tidegate: {error}"));
        let text = inside(&self.namespace, || {
            let mut stream = TcpStream::connect(ADMIN).map_err(failed)?;
            stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(failed)?;
            let request = format!("GET /metrics HTTP/1.1\r\nHost: {ADMIN}\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).map_err(failed)?;
            let mut text = String::new();
            stream.read_to_string(&mut text).map_err(failed)?;
            Ok(text)
        })?;
        let mut metrics = HashMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            if let Some((name, value)) = line.rsplit_once(' ')
                && let Ok(value) = value.parse::<f64>()
            {
                *metrics.entry(name.split('{').next().unwrap_or(name).to_owned()).or_insert(0.0) += value;
            }
        }
        Ok(metrics)
    }
}

/// Runs `work` on a thread of its own on a host.
pub(super) fn inside<T: Send>(
    namespace: &str,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || enter(namespace).and_then(|()| work()));
        thread.join().unwrap_or_else(|_| Err(Error::Link("a thread on a host has panicked".into())))
    })
}

/// A thread that serves on a host until what is returned is dropped.
fn start_origin(namespace: &str, executed: &Executed) -> Result<oneshot::Sender<()>, Error> {
    let executed = Executed::clone(executed);
    let namespace = namespace.to_owned();
    let (running, stopped) = oneshot::channel();
    let (ready, started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let failed =
            |error: std::io::Error| Error::Server(format!("the site behind tidegate failed: {error}"));
        let begun = enter(&namespace).and_then(|()| runtime().map_err(failed)).map(|runtime| {
            let address = ORIGIN.parse().map_err(std::io::Error::other);
            runtime.block_on(async {
                let serving = tokio::spawn(async move { origin::serve(address?, executed).await });
                // Binding is the first thing that the task does.
                tokio::task::yield_now().await;
                let _ = ready.send(Ok(()));
                tokio::select! {
                    _ = serving => {}
                    _ = stopped => {}
                }
            });
        });
        if let Err(error) = begun {
            let _ = ready.send(Err(error));
        }
    });
    started.recv().unwrap_or_else(|_| Err(Error::Server("the site behind tidegate did not start".into())))?;
    Ok(running)
}

/// A runtime for one thread.
pub(super) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}
