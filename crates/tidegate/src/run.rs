//! `tidegate run`: from settings to a running engine, and what signals do to it.

use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tidegate_accelerator::Engine;
use tidegate_accelerator::settings::{Listener, Route, Settings, Target, Upstream};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::{Failure, LogForm, RunArgs};
use crate::{admin, config, units};

const DEFAULT_ADMIN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9090);
/// How long each server is given to accept the connection that shows it is there.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves until a signal or the admin server ends it.
pub(crate) fn run(args: &RunArgs, log: LogForm) -> Result<(), Failure> {
    start_log(log);
    raise_descriptor_limit();
    let no_signals = |error| Failure::runtime(format!("error: cannot watch for signals: {error}"));
    let signals = Signals::register().map_err(no_signals)?;
    let (settings, admin_address) = settings(args)?;
    if !args.allow_unreachable {
        probe_upstreams(&settings)?;
    }
    let admin_listener = std::net::TcpListener::bind(admin_address).map_err(|error| {
        Failure::runtime(format!(
            "error: cannot listen on {admin_address} for the admin server: {error}; choose another address with --admin"
        ))
    })?;
    let engine =
        Engine::start(settings.clone()).map_err(|error| Failure::runtime(format!("error: {error}")))?;
    announce(&engine, &settings, &admin_listener);
    let reloader = Arc::new(Reloader { args: args.clone(), engine: engine.clone() });
    admin::spawn(admin_listener, engine.clone(), Arc::clone(&reloader))
        .map_err(|error| Failure::runtime(format!("error: cannot start the admin server: {error}")))?;
    signals.obey(engine.clone(), reloader).map_err(no_signals)?;
    engine.wait();
    tracing::info!("stopped");
    Ok(())
}

/// Puts the configuration file in force again.
pub(crate) struct Reloader {
    args: RunArgs,
    engine: Engine,
}

impl Reloader {
    pub(crate) fn reload(&self) -> Result<(), String> {
        let (settings, _) = settings(&self.args).map_err(|failure| failure.message)?;
        self.engine.reload(settings).map_err(|error| error.to_string())
    }
}

fn start_log(form: LogForm) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("TIDEGATE_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        // When nobody reads standard error any more, lines are lost; complaining about that there would panic.
        .log_internal_errors(false);
    match form {
        LogForm::Text => builder.init(),
        LogForm::Json => builder.json().init(),
    }
}

/// The soft limit on descriptors is often 1024, each client takes one; failing to raise it is survivable.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, limit = ?limit.current, "the limit on file descriptors stays as it is");
    }
}

/// The file's settings, with what the command line says on top.
fn settings(args: &RunArgs) -> Result<(Settings, SocketAddr), Failure> {
    let usage = |message: String| Failure::usage(format!("error: {message}"));
    let (mut settings, mut admin) = match &args.config {
        Some(path) => {
            let loaded = config::load(path).map_err(|errors| Failure::runtime(config::report(&errors)))?;
            for warning in &loaded.warnings {
                tracing::warn!("{}: {warning}", path.display());
            }
            (loaded.settings, loaded.admin)
        }
        None => (config::defaults(), None),
    };
    if let Some(address) = &args.listen {
        let address = units::listen_address(address).map_err(|error| usage(format!("--listen: {error}")))?;
        settings.listeners = vec![Listener { address }];
    }
    if let Some(url) = &args.upstream {
        let addresses = units::server(url).map_err(|error| usage(format!("--upstream: {error}")))?;
        settings.upstreams = vec![Upstream::new("upstream", addresses.into_iter().take(1).collect())];
        settings.routes = vec![everything(Target::Upstream("upstream".into()))];
    }
    if let Some(root) = &args.root {
        let path =
            root.canonicalize().and_then(|path| std::fs::read_dir(&path).map(|_| path)).map_err(|error| {
                Failure::runtime(format!(
                    "error: cannot read root {}: {error}; name a readable directory",
                    root.display()
                ))
            })?;
        settings.routes = vec![everything(Target::Root(path))];
    }
    if let Some(workers) = args.workers {
        settings.workers = workers.max(1);
    }
    if let Some(address) = &args.admin {
        admin = Some(units::listen_address(address).map_err(|error| usage(format!("--admin: {error}")))?);
    }
    if settings.listeners.is_empty() {
        return Err(usage("nowhere to listen; give --listen ADDR or a configuration with [[listen]]".into()));
    }
    if settings.routes.is_empty() {
        return Err(usage(
            "nothing to serve; give --upstream URL, --root DIR or a configuration with [[route]]".into(),
        ));
    }
    Ok((settings, admin.unwrap_or(DEFAULT_ADMIN)))
}

fn everything(target: Target) -> Route {
    Route { host: "*".into(), path: "/".into(), target }
}

/// A site whose every server is down at the start is more likely a wrong address than bad luck.
fn probe_upstreams(settings: &Settings) -> Result<(), Failure> {
    for upstream in &settings.upstreams {
        let mut last = None;
        let reached =
            upstream.servers.iter().any(|server| match TcpStream::connect_timeout(server, PROBE_TIMEOUT) {
                Ok(_) => true,
                Err(error) => {
                    last = Some((server, error));
                    false
                }
            });
        if let (false, Some((server, error))) = (reached, last) {
            return Err(Failure::runtime(format!(
                "error: upstream {} is unreachable: {server}: {error}; start it first, or use --allow-unreachable",
                upstream.name
            )));
        }
    }
    Ok(())
}

fn announce(engine: &Engine, settings: &Settings, admin: &std::net::TcpListener) {
    for address in engine.listen_addresses() {
        tracing::info!("listening on http://{address}");
    }
    for upstream in &settings.upstreams {
        tracing::info!(servers = ?upstream.servers, "upstream {}", upstream.name);
    }
    let place = settings.cache.path.clone().unwrap_or_else(|| PathBuf::from("memory only"));
    tracing::info!(
        memory_mib = settings.cache.memory_bytes >> 20,
        objects = engine.open_report().map_or(0, |report| report.objects),
        "cache: {}",
        place.display()
    );
    if let Some(set_aside) = engine.open_report().and_then(|report| report.set_aside.as_ref()) {
        tracing::warn!(
            ?set_aside,
            "the cache file could not be used and was set aside; the cache starts empty"
        );
    }
    if let Ok(address) = admin.local_addr() {
        tracing::info!("admin on http://{address}");
    }
    tracing::info!(
        "rules and limits are enforced in user space: this version has no kernel programs; data cores: {}",
        settings.workers
    );
}

/// The signals that mean something. Registered before anything listens, so that whoever sees the port open can send one.
struct Signals {
    runtime: tokio::runtime::Runtime,
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn register() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let guard = runtime.enter();
        let (terminate, interrupt, hangup) = (
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
            signal(SignalKind::hangup())?,
        );
        drop(guard);
        Ok(Self { runtime, terminate, interrupt, hangup })
    }

    /// SIGTERM and SIGINT drain, a second one ends at once; SIGHUP reads the configuration again.
    fn obey(self, engine: Engine, reloader: Arc<Reloader>) -> std::io::Result<()> {
        let Self { runtime, mut terminate, mut interrupt, mut hangup } = self;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            runtime.block_on(async move {
                let mut draining = false;
                loop {
                    tokio::select! {
                        _ = terminate.recv() => {}
                        _ = interrupt.recv() => {}
                        _ = hangup.recv() => {
                            match reloader.reload() {
                                Ok(()) => tracing::info!("the configuration was read again and is in force"),
                                Err(error) => tracing::error!("the old configuration stays in force: {error}"),
                            }
                            continue;
                        }
                    }
                    if draining {
                        tracing::warn!("stopped at once; requests in progress were cut off");
                        std::process::exit(1);
                    }
                    draining = true;
                    engine.drain();
                    tracing::info!("draining: requests in progress finish; a second signal ends at once");
                }
            });
        })?;
        Ok(())
    }
}
