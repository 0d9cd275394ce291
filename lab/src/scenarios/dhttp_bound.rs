//! Servers that are full, used by more and more users: what Figures 10 to 12 and 14 have in common.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use tidegate_bench::peers::{install, pinned};
use tidegate_bench::{LOAD_CORE, SERVER_CORE};

use super::dhttp_site::{Content, DHTTP_PORT, Site, inside, on_host};
use super::dhttp_users::{Catalog, Habits, Protocol, Usage, use_site};
use crate::plot::{Plot, Point, Series};
use crate::process::Process;
use crate::quota::Quota;
use crate::server::{check_cores, tidegate, version};
use crate::table::Table;
use crate::topology::Topology;
use crate::verdict::Check;
use crate::{Error, Lab};

/// What a server may use of its core, so that it is full before the load is.
const SHARE: f64 = 0.2;
const PERIOD: Duration = Duration::from_millis(20);
/// Users are so many times as fast as SURGE's, so that they fill it.
const PACE: f64 = 8.0;
const FILES: usize = 1000;
const MOST_BYTES: f64 = 300e3;
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
const HTTP_PORT: u16 = 8088;
/// The first user's address; the others have the following ones.
const ADDRESSES: Ipv4Addr = Ipv4Addr::new(10, 96, 128, 1);

pub(super) const METHOD: &str = "Server and users share one machine and are joined by a pair of Ethernet devices. \
    The server has a fifth of one core (by a control group), the users the other core, and each core handles the \
    packets of its own side. So the server is the bottleneck. The users are SURGE's eight times as fast; each has an \
    address of its own and asks for all objects of a page at once. 1,000 files of SURGE's sizes up to 300 kB, asked \
    for after Zipf's law.";

/// Which server, and how it treats idle connections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Server {
    Tidegate,
    /// Keep-alive in seconds; whether it takes data in SYNs.
    Nginx {
        keep_alive_s: u32,
        fast_open: bool,
    },
    Apache {
        keep_alive_s: u32,
    },
}

/// A server and the way it is used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contender {
    pub name: &'static str,
    pub server: Server,
    pub protocol: Protocol,
}

/// One measurement.
pub(super) struct Run {
    pub contender: Contender,
    pub users: usize,
    pub requests_per_s: f64,
    /// Of the server, for each request.
    pub cpu_us: f64,
    /// Of its share.
    pub cpu_used: f64,
    pub usage: Usage,
}

/// How many users, and for how many seconds: before anything is counted, when each shall have had a page, and then.
pub(super) type Crowd = (usize, f64, f64);

/// Measures each contender with each number of users.
pub(super) fn measure(
    lab: &Lab,
    contenders: &[Contender],
    crowds: &[Crowd],
) -> Result<(Vec<Run>, Vec<String>), Error> {
    check_cores()?;
    let catalog = Arc::new(Catalog::new(FILES, MOST_BYTES, 10));
    let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
    catalog.write(directory.path())?;
    readable(directory.path())?;
    let (mut runs, of) = (Vec::new(), contenders.len() * crowds.len());
    for contender in contenders {
        for &crowd in crowds {
            let run = measure_one(lab, *contender, crowd, &catalog, directory.path())?;
            let what = format!(
                "{} users, {}: {:.0} requests/s, {:.0} ms, {} failed, {:.0} us CPU a request, {:.0} % of its share",
                run.users,
                contender.name,
                run.requests_per_s,
                run.usage.mean_latency_s() * 1e3,
                run.usage.failed,
                run.cpu_us,
                run.cpu_used * 100.0
            );
            runs.push(run);
            lab.progress(runs.len(), of, &what);
        }
    }
    let mut versions: Vec<String> = version(tidegate(lab)?, "--version").into_iter().collect();
    if contenders.iter().any(|contender| matches!(contender.server, Server::Nginx { .. })) {
        versions.extend(version("nginx", "-v"));
    }
    if contenders.iter().any(|contender| matches!(contender.server, Server::Apache { .. })) {
        versions.extend(version("apache2", "-v"));
    }
    Ok((runs, versions))
}

fn measure_one(
    lab: &Lab,
    contender: Contender,
    (users, warm_up_s, time_s): Crowd,
    catalog: &Arc<Catalog>,
    directory: &Path,
) -> Result<Run, Error> {
    let hosts = network()?;
    let running = Running::start(lab, contender.server, hosts.namespace("s")?, directory)?;
    let habits = Habits {
        server: running.address,
        protocol: contender.protocol,
        users,
        pace: PACE,
        addresses: ADDRESSES,
        warm_up: Duration::from_secs_f64(warm_up_s),
        time: Duration::from_secs_f64(time_s),
    };
    let mut used = Vec::new();
    let usage = inside(hosts.namespace("c")?, || {
        pin(LOAD_CORE)?;
        use_site(catalog, habits, || {
            used.push(running.quota.used()?);
            Ok(())
        })
    })?;
    let used_s = match used.as_slice() {
        [first, .., last] => last.saturating_sub(*first).as_secs_f64(),
        _ => f64::NAN,
    };
    Ok(Run {
        contender,
        users,
        requests_per_s: usage.requests as f64 / time_s,
        cpu_us: used_s * 1e6 / usage.requests as f64,
        cpu_used: used_s / (time_s * SHARE),
        usage,
    })
}

/// Users and server, each of whose packets are handled on its own core: otherwise whoever sends does the work of who
/// receives.
fn network() -> Result<Topology, Error> {
    let network = Topology::new(&["c", "s"])?;
    network.join(("c", "eth0", "10.96.0.2/24"), ("s", "eth0", "10.96.0.1/24"))?;
    // Every address of this range is the users' host's own.
    network.on("c", "ip route add local 10.96.128.0/17 dev lo")?;
    network.on("s", "ip route add 10.96.128.0/17 via 10.96.0.2")?;
    for (host, core) in [("c", LOAD_CORE), ("s", SERVER_CORE)] {
        network.on(host, "sysctl -q net.ipv4.tcp_fastopen=3 net.core.somaxconn=4096")?;
        network.steer(host, "eth0", core)?;
    }
    Ok(network)
}

/// Keeps the calling thread on a core.
fn pin(core: usize) -> Result<(), Error> {
    let mut one = rustix::thread::CpuSet::new();
    one.set(core);
    rustix::thread::sched_setaffinity(None, &one).map_err(|error| Error::Core { core, source: error.into() })
}

/// Apache's workers are not root.
fn readable(directory: &Path) -> Result<(), Error> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o755))
        .map_err(Error::file("write", directory))
}

/// A server with its share of a core.
struct Running {
    address: SocketAddr,
    // In the order in which they end: the group last, which ends what a server has left.
    _site: Option<Site>,
    _process: Option<Process>,
    quota: Quota,
    _directory: tempfile::TempDir,
}

impl Running {
    fn start(lab: &Lab, server: Server, namespace: &str, root: &Path) -> Result<Self, Error> {
        let quota = Quota::new()?;
        let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
        let own = directory.path();
        readable(own)?;
        let http = SocketAddr::new(SERVER.into(), HTTP_PORT);
        let start = |command: &Command| -> Result<Process, Error> {
            let limited = quota.limit(&pinned(SERVER_CORE, command));
            let mut on_core = on_host(namespace, limited.get_program());
            on_core.args(limited.get_args());
            // From this thread, because the server ends with the one that starts it.
            Process::start_until(&mut on_core, "a listener", |_| {
                inside(namespace, || Ok(TcpStream::connect(http).is_ok())).unwrap_or(false)
            })
        };
        let (address, site, process) = match server {
            Server::Tidegate => {
                let site =
                    Site::start_within(lab, namespace, &[SERVER.into()], Content::Files(root), Some(&quota))?;
                (SocketAddr::new(SERVER.into(), DHTTP_PORT), Some(site), None)
            }
            Server::Nginx { keep_alive_s, fast_open } => {
                install("nginx", "nginx-light").map_err(Error::Server)?;
                let command = nginx(own, root, http, keep_alive_s, fast_open)?;
                (http, None, Some(start(&command)?))
            }
            Server::Apache { keep_alive_s } => {
                install("apache2", "apache2").map_err(Error::Server)?;
                (http, None, Some(start(&apache(own, root, http, keep_alive_s)?)?))
            }
        };
        // It starts at full speed: the experiment is about a server that is full, not about one that is not there yet.
        quota.settle()?;
        quota.enforce(SHARE, PERIOD)?;
        Ok(Self { address, _site: site, _process: process, quota, _directory: directory })
    }
}

fn nginx(
    own: &Path,
    root: &Path,
    address: SocketAddr,
    keep_alive_s: u32,
    fast_open: bool,
) -> Result<Command, Error> {
    let fast_open = if fast_open { " fastopen=1024" } else { "" };
    let (here, root) = (own.display(), root.display());
    let config = format!(
        "daemon off; master_process off; user root; worker_processes 1; pid {here}/nginx.pid; \
         error_log {here}/err crit;\n\
         events {{ worker_connections 8000; }}\n\
         http {{ access_log off; sendfile on; tcp_nodelay on; open_file_cache max=2000 inactive=1h; \
         open_file_cache_valid 1h;\n\
         default_type text/plain; keepalive_timeout {keep_alive_s}s; keepalive_requests 1000000000;\n\
         server {{ listen {address} backlog=4096{fast_open}; root {root}; }} }}\n"
    );
    let path = own.join("nginx.conf");
    std::fs::write(&path, config).map_err(Error::file("write", &path))?;
    let mut command = Command::new("nginx");
    command.arg("-c").arg(path);
    Ok(command)
}

fn apache(own: &Path, root: &Path, address: SocketAddr, keep_alive_s: u32) -> Result<Command, Error> {
    let (here, root) = (own.display(), root.display());
    let keep_alive = if keep_alive_s == 0 { "Off" } else { "On" };
    let config = format!(
        "ServerRoot {here}\nPidFile {here}/pid\nErrorLog {here}/err\nLogLevel crit\nListen {address}\n\
         ListenBacklog 4096\n\
         ServerName localhost\nDefaultRuntimeDir {here}\nUser www-data\nGroup www-data\n\
         LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so\n\
         LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so\n\
         KeepAlive {keep_alive}\nKeepAliveTimeout {keep_alive_s}\nMaxKeepAliveRequests 0\n\
         StartServers 4\nServerLimit 8\nThreadsPerChild 64\nMaxRequestWorkers 512\nMinSpareThreads 64\n\
         MaxSpareThreads 512\n\
         DocumentRoot {root}\n<Directory />\nRequire all granted\n</Directory>\nEnableSendfile On\n"
    );
    let path = own.join("apache.conf");
    std::fs::write(&path, config).map_err(Error::file("write", &path))?;
    let mut command = Command::new("apache2");
    command.arg("-f").arg(path).arg("-DFOREGROUND");
    Ok(command)
}

/// Against the best of the others, with the most users.
pub(super) struct Goals {
    pub throughput: f64,
    pub latency: Option<f64>,
}

/// DHTTP's throughput to the best of the others, and the best of their latencies to DHTTP's, with the most users.
pub(super) fn checks(runs: &[Run], goals: &Goals) -> Vec<Check> {
    let Some(most) = runs.iter().map(|run| run.users).max() else { return Vec::new() };
    let (own, others): (Vec<&Run>, Vec<&Run>) = runs
        .iter()
        .filter(|run| run.users == most)
        .partition(|run| run.contender.protocol == Protocol::Dhttp);
    let Some(own) = own.first() else { return Vec::new() };
    let mut checks = Vec::new();
    if let Some(best) = others.iter().max_by(|a, b| a.requests_per_s.total_cmp(&b.requests_per_s)) {
        checks.push(Check {
            what: format!("DHTTP's requests per second to those of {}, {most} users", best.contender.name),
            ratio: own.requests_per_s / best.requests_per_s,
            at_least: goals.throughput,
        });
    }
    if let Some(goal) = goals.latency
        && let Some(best) =
            others.iter().min_by(|a, b| a.usage.mean_latency_s().total_cmp(&b.usage.mean_latency_s()))
    {
        checks.push(Check {
            what: format!("latency of {} to DHTTP's, {most} users", best.contender.name),
            ratio: best.usage.mean_latency_s() / own.usage.mean_latency_s(),
            at_least: goal,
        });
    }
    checks
}

pub(super) fn plots(runs: &[Run], contenders: &[Contender]) -> Vec<(Option<&'static str>, Plot)> {
    let plot = |title: &str, y: &str, value: fn(&Run) -> f64| Plot {
        title: title.to_owned(),
        x: "users".to_owned(),
        x_log: false,
        y: y.to_owned(),
        series: contenders
            .iter()
            .map(|contender| Series {
                name: contender.name.to_owned(),
                points: runs
                    .iter()
                    .filter(|run| run.contender.name == contender.name)
                    .map(|run| Point::exact(run.users as f64, value(run)))
                    .collect(),
            })
            .collect(),
    };
    vec![
        (None, plot("Throughput of a full server", "requests/s", |run| run.requests_per_s)),
        (
            Some("latency"),
            plot("Latency of a full server", "mean latency, ms", |run| run.usage.mean_latency_s() * 1e3),
        ),
    ]
}

pub(super) fn table(runs: &[Run]) -> Table {
    let mut table = Table::new([
        "users",
        "server",
        "requests/s",
        "mean latency, ms",
        "failed",
        "CPU, µs/request",
        "of its share, %",
    ]);
    for run in runs {
        table.row([
            run.users.to_string(),
            run.contender.name.to_owned(),
            format!("{:.0}", run.requests_per_s),
            format!("{:.1}", run.usage.mean_latency_s() * 1e3),
            run.usage.failed.to_string(),
            format!("{:.1}", run.cpu_us),
            format!("{:.0}", run.cpu_used * 100.0),
        ]);
    }
    table
}
