//! `tidegate run`: from settings to a running engine, and what signals do to it.

mod probe;
mod reload;
mod signals;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use tidegate_accelerator::settings::{Listener, Protocol, Route, Settings, Target, Upstream};
use tidegate_accelerator::{Engine, Handover, PlanError, StartError};
use tidegate_gate::GateError;
use tidegate_store::StoreError;
use tokio::sync::watch;

use self::probe::probe_upstreams;
pub(crate) use self::reload::{Reloader, classes};
use self::signals::Signals;
pub(crate) use self::signals::end_signal;
use crate::acme::{self, Acme};
use crate::cli::{Failure, LogForm, RunArgs};
use crate::config::{Loaded, Subject};
use crate::defence::Guard;
use crate::gate::{Gatekeeper, Ports};
use crate::trickles::TricklesServices;
use crate::units::ServerError;
use crate::upgrade::{Inheritance, Predecessor, Program, Upgrader};
use crate::{admin, config, external, notify, units};

/// Connections to the admin server that the kernel completes and keeps.
const ADMIN_BACKLOG: i32 = 128;

/// Serves until a signal or the admin server ends it, or another process serves in the place of this one.
pub(crate) fn run(args: &RunArgs, log: LogForm) -> Result<(), Failure> {
    start_log(log);
    raise_descriptor_limit();
    use_small_pages();
    let program = Program::of_this_process();
    let mut predecessor = Predecessor::find().map_err(no_predecessor)?;
    let served = serve(args, program, &mut predecessor);
    if let (Err(failure), Some(predecessor)) = (&served, &predecessor) {
        predecessor.fail(&failure.message);
    }
    served
}

fn no_predecessor(error: std::io::Error) -> Failure {
    Failure::runtime(format!("error: cannot take the place of the process before: {error}"))
}

/// `predecessor`: the process before, until it has given its place up for good.
fn serve(args: &RunArgs, program: Program, predecessor: &mut Option<Predecessor>) -> Result<(), Failure> {
    let no_signals = |error| Failure::runtime(format!("error: cannot watch for signals: {error}"));
    let starting = Signals::register().and_then(Signals::end_the_start).map_err(no_signals)?;
    let loaded = in_force(args)?;
    if let Some(error) = config::oversized_cache(&loaded) {
        return Err(Failure::runtime(error));
    }
    if !args.allow_unreachable {
        probe_upstreams(&loaded)?;
    }
    let no_admin = |error| Failure::runtime(format!("error: cannot start the admin server: {error}"));
    let handed = predecessor.as_mut().and_then(|predecessor| predecessor.admin(loaded.admin.address));
    let listener = handed.map_or_else(|| listen_for_admin(&loaded), Ok)?;
    let admin_socket = (loaded.admin.address, listener.try_clone().map_err(no_admin)?);
    let admin = admin::Prepared::new(listener).map_err(no_admin)?;
    let inheritance = predecessor.as_mut().map(Predecessor::inherit).transpose().map_err(no_predecessor)?;
    let Started { engine, gatekeeper, guard, door, acme, trickles } = start(&loaded, inheritance)?;
    let signals = starting.into_signals().map_err(no_signals)?;
    let gate_failed = |error: GateError| Failure::runtime(format!("error: {error}"));
    if let Some(predecessor) = predecessor {
        let blocks = predecessor.relieve(&engine).map_err(no_predecessor)?;
        engine.store_again();
        let classes = classes(&engine).map_err(no_predecessor)?;
        gatekeeper.attach(&classes, Some(&blocks)).map_err(gate_failed)?;
        door.map_or(Ok(()), |door| door.open()).map_err(no_predecessor)?;
    }
    let upkeep = gatekeeper
        .look_after(&engine)
        .map_err(|error| Failure::runtime(format!("error: cannot look after the gate: {error}")))?;
    announce(&engine, &loaded.settings, &admin, &gatekeeper);
    let no_acme = |error| Failure::runtime(format!("error: cannot start to order certificates: {error}"));
    acme.start().map_err(no_acme)?;
    let reloader = Arc::new(Reloader {
        args: args.clone(),
        started: loaded,
        engine: engine.clone(),
        gatekeeper: Arc::clone(&gatekeeper),
        trickles,
        guard,
        acme,
        one_at_a_time: Mutex::default(),
        is_over: AtomicBool::new(false),
    });
    let (close_admin, closed) = watch::channel(false);
    let has_predecessor = Arc::new(AtomicBool::new(false));
    let upgrader = Upgrader::new(
        program,
        Arc::clone(&reloader),
        admin_socket,
        close_admin,
        Arc::clone(&has_predecessor),
    );
    let admin =
        admin::spawn(admin, engine.clone(), Arc::clone(&reloader), gatekeeper, Arc::clone(&upgrader), closed)
            .map_err(no_admin)?;
    signals.obey(engine.clone(), Arc::clone(&reloader), &upgrader).map_err(no_signals)?;
    if let Some(predecessor) = predecessor.take() {
        predecessor.succeed(engine.clone(), has_predecessor).map_err(no_predecessor)?;
        reloader.trickles.start_rest(&reloader.started);
    }
    notify::ready("serving");
    engine.wait();
    reloader.trickles.stop();
    drop(upkeep);
    upgrader.end();
    if upgrader.has_handed_over() {
        // Whoever asked for the upgrade gets the answer; a panic there has been printed.
        let _ = admin.join();
    }
    tracing::info!("stopped");
    Ok(())
}

/// What serves clients.
struct Started {
    engine: Engine,
    gatekeeper: Arc<Gatekeeper>,
    guard: Option<Arc<Guard>>,
    /// Of classifiers of their own, which is to take the place of another process's.
    door: Option<external::Door>,
    acme: Arc<Acme>,
    trickles: TricklesServices,
}

/// Starts everything that serves clients, on what the process before has left to this one.
fn start(loaded: &Loaded, inheritance: Option<Inheritance>) -> Result<Started, Failure> {
    let (handover, handed_gate, handed_trickles, challenge_key) = match inheritance {
        Some(left) => (left.engine, Some(left.gate), Some(left.trickles), left.challenge_key),
        None => (Handover::default(), None, None, None),
    };
    let is_heir = handed_gate.is_some();
    let http = loaded.settings.listeners.iter().filter(|listener| listener.protocol.is_http());
    let listen: Vec<Listener> = http.cloned().collect();
    let gate_failed = |error: GateError| Failure::runtime(format!("error: {error}"));
    let (gatekeeper, sockets) = Gatekeeper::start(&loaded.gate, &listen, handed_gate).map_err(gate_failed)?;
    let mut settings = loaded.settings.clone();
    gatekeeper.guard(&mut settings, &loaded.gate.rules);
    let no_guard = |error| Failure::runtime(format!("error: cannot start the defence: {error}"));
    let guard = Guard::new(&loaded.defence, settings.workers.max(1), challenge_key).map_err(no_guard)?;
    let acme = Acme::new(loaded.acme.as_ref(), &settings).map_err(|error| {
        Failure::runtime(loaded.places.say(&Subject::ACME_PATH, &error.to_string(), acme::PATH_HINT))
    })?;
    settings.issued = Arc::clone(acme.issued());
    settings.defence = guard.as_ref().map(|guard| Arc::clone(guard.defence()) as _);
    let mut door = None;
    if let Some(guard) = &guard {
        guard.start(loaded.defence.audit.clone(), Arc::clone(&gatekeeper)).map_err(no_guard)?;
        if let Some((path, one_of)) = &loaded.defence.external {
            if is_heir {
                door = Some(external::start_beside(path, *one_of, guard.defence()).map_err(no_guard)?);
            } else {
                external::start(path, *one_of, guard.defence()).map_err(no_guard)?;
            }
        }
    }
    if let Some(path) = settings.cache.path.as_ref().filter(|path| !path.exists()) {
        tracing::info!("cache: {} is not there yet and is made", path.display());
    }
    let engine = Engine::start_on(settings, sockets, handover)
        .map_err(|error| Failure::runtime(start_error(&error, loaded)))?;
    let trickles = TricklesServices::start(loaded, engine.inside(), handed_trickles)?;
    let ports = Ports::of(&loaded.settings.listeners, engine.listen_addresses());
    gatekeeper.set_ports(ports).map_err(gate_failed)?;
    gatekeeper.start_watching().map_err(gate_failed)?;
    Ok(Started { engine, gatekeeper, guard, door, acme, trickles })
}

/// Listens on the address; one that stands for every address of the host takes IPv4 too.
fn listen_for_admin(loaded: &Loaded) -> Result<TcpListener, Failure> {
    let admin = &loaded.admin;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
    let listener = || {
        let address = admin.address;
        let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if address.is_ipv6() {
            sockopt::set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
        }
        bind(&socket, &address)?;
        listen(&socket, ADMIN_BACKLOG)?;
        Ok(TcpListener::from(socket))
    };
    listener().map_err(|error: rustix::io::Errno| {
        let error = std::io::Error::from(error);
        let message = format!("cannot listen on {} for the admin server: {error}", admin.written);
        Failure::runtime(loaded.places.say(&Subject::ADMIN, &message, "choose another address with --admin"))
    })
}

/// Why settings cannot be put in force, with the place in the file if there is one to blame.
fn setting_error(error: &StartError, loaded: &Loaded) -> String {
    let finding = match error {
        StartError::Plan(PlanError::Certificate(_)) => {
            loaded.unusable_certificates().find_map(|(_, finding)| finding)
        }
        StartError::Plan(PlanError::Upstream(error)) => loaded.unusable_trust_of(&error.name, &error.source),
        _ => None,
    };
    finding.map_or_else(|| error.to_string(), |finding| finding.to_string())
}

/// Names a listener as its writer put it, and says what can be done.
fn start_error(error: &StartError, loaded: &Loaded) -> String {
    let (address, source) = match error {
        StartError::Listen { address, source } => (address, source),
        StartError::Cache(StoreError::DiskFull { .. }) => {
            return loaded.places.say(
                &Subject::CACHE_MEMORY,
                &error.to_string(),
                "make room, or `cache.memory` smaller",
            );
        }
        StartError::Cache(StoreError::NotTaken { .. }) => {
            let hint = "restart instead of an upgrade";
            return loaded.places.say(&Subject::CACHE, &error.to_string(), hint);
        }
        StartError::Cache(_) => {
            let hint = "cache.path has to be a directory that this user may make and write to";
            return loaded.places.say(&Subject::CACHE, &error.to_string(), hint);
        }
        StartError::Plan(PlanError::Certificate(_) | PlanError::Upstream(_)) => {
            return setting_error(error, loaded);
        }
        StartError::AccessLog { .. } => {
            let hint = "it has to be a file that this user may make and write to";
            return loaded.places.say(&Subject::ACCESS_LOG, &error.to_string(), hint);
        }
        _ => return format!("error: {error}"),
    };
    let written = loaded
        .listen
        .iter()
        .find(|listen| listen.address == *address)
        .map_or_else(|| address.to_string(), |listen| listen.written.clone());
    let message = format!("cannot listen on {written}: {source}");
    loaded.places.say(&Subject::Listener(*address), &message, address_hint(source.kind()))
}

/// What can be done where an address is not to be had.
pub(crate) fn address_hint(why: std::io::ErrorKind) -> &'static str {
    match why {
        std::io::ErrorKind::AddrInUse => "end the program that has it, or choose another address",
        std::io::ErrorKind::PermissionDenied => "ports below 1024 need CAP_NET_BIND_SERVICE",
        std::io::ErrorKind::AddrNotAvailable => "it is no address of this host",
        _ => "",
    }
}

pub(crate) fn start_log(form: LogForm) {
    // What h2 says is of what clients send: any of them could fill the log.
    let quiet = |wanted: &str| tracing_subscriber::EnvFilter::try_new(format!("h2=off,{wanted}"));
    let filter = std::env::var("TIDEGATE_LOG")
        .ok()
        .and_then(|wanted| quiet(&wanted).ok())
        .unwrap_or_else(|| tracing_subscriber::EnvFilter::new("h2=off,info"));
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
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, limit = ?limit.current, "the limit on file descriptors stays as it is");
    }
}

/// The allocator takes huge pages where the kernel gives them, 2 MiB at a time and most of it never used: memory would
/// grow in such steps, and no request is answered sooner (decision 0020).
fn use_small_pages() {
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        tracing::debug!(%error, "memory stays in huge pages");
    }
}

/// The file's settings, with what the command line says on top.
fn in_force(args: &RunArgs) -> Result<Loaded, Failure> {
    let usage = |message: String| Failure::usage(format!("error: {message}"));
    let mut loaded = match &args.config {
        Some(path) => config::load(path).map_err(|findings| Failure::runtime(config::lines(&findings)))?,
        None => config::defaults(),
    };
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    let settings = &mut loaded.settings;
    if let Some(address) = &args.listen {
        let listen = units::listen_address(address).map_err(|error| usage(format!("--listen: {error}")))?;
        settings.listeners = vec![Listener {
            address: listen.address,
            protocol: Protocol::Http,
            proxy_protocol: false,
            http2: false,
            http3: false,
        }];
        loaded.listen = vec![listen];
        loaded.places.forget(|subject| matches!(subject, Subject::Listener(_)));
        loaded.trickles.clear();
    }
    // What is asked for here takes the place of all routes, and of the groups that only they used.
    if let Some(url) = &args.upstream {
        let addresses = match units::upstream(url) {
            Ok(addresses) => addresses,
            Err(ServerError::Syntax(message)) => return Err(usage(format!("--upstream: {message}"))),
            Err(ServerError::Resolve(message)) if args.allow_unreachable => {
                tracing::warn!("--upstream: {message}; there is nobody to ask before a restart");
                Vec::new()
            }
            Err(ServerError::Resolve(message)) => {
                return Err(Failure::runtime(format!("error: --upstream: {message}")));
            }
        };
        settings.upstreams = vec![Upstream::new("upstream", addresses)];
        settings.routes = vec![everything(Target::Upstream("upstream".into()))];
        loaded.required = vec!["upstream".into()];
        loaded.places.forget(|subject| matches!(subject, Subject::Upstream(_)));
    }
    if let Some(root) = &args.root {
        settings.upstreams.clear();
        settings.routes = vec![everything(Target::Root(readable(root)?))];
        loaded.required.clear();
    }
    if let Some(workers) = args.workers {
        settings.workers = usize::from(workers);
    }
    if let Some(address) = &args.admin {
        loaded.admin = units::listen_address(address).map_err(|error| usage(format!("--admin: {error}")))?;
        loaded.places.forget(|subject| *subject == Subject::ADMIN);
    }
    let nowhere = loaded.settings.listeners.is_empty() && loaded.trickles.is_empty();
    if nowhere || loaded.settings.routes.is_empty() {
        return Err(incomplete(args, &loaded));
    }
    Ok(loaded)
}

/// Neither the file nor the command line says where to listen, or what to serve.
fn incomplete(args: &RunArgs, loaded: &Loaded) -> Failure {
    let still = config::still_missing(loaded, args.config.as_deref());
    match args.config {
        Some(_) => Failure::runtime(config::lines(&still)),
        None => {
            let what: Vec<String> = still.iter().map(|finding| finding.message.clone()).collect();
            Failure::usage(format!(
                "error: {}; give --listen ADDR and --upstream URL or --root DIR, or --config FILE",
                what.join(" and ")
            ))
        }
    }
}

fn readable(root: &std::path::Path) -> Result<PathBuf, Failure> {
    root.canonicalize().and_then(|path| std::fs::read_dir(&path).map(|_| path)).map_err(|error| {
        Failure::runtime(format!(
            "error: cannot read root {}: {error}; name a readable directory",
            root.display()
        ))
    })
}

fn everything(target: Target) -> Route {
    Route::new("*", "/", target)
}

/// Where the engine listens, as URLs.
fn listening(engine: &Engine, settings: &Settings) -> impl Iterator<Item = String> {
    let addresses = engine.listen_addresses().into_iter().zip(&settings.listeners);
    addresses.map(|(address, listener)| format!("{}://{address}", listener.protocol.scheme()))
}

fn announce(engine: &Engine, settings: &Settings, admin: &admin::Prepared, gatekeeper: &Gatekeeper) {
    for (url, listener) in listening(engine, settings).zip(&settings.listeners) {
        let more = if listener.http3 { ", by HTTP/3 too" } else { "" };
        tracing::info!("listening on {url}{more}");
    }
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    if settings.limits.connections as u64 >= most {
        tracing::warn!(
            "limits.connections is {}, but the process may only have {most} file descriptors; raise LimitNOFILE or `ulimit -n`",
            settings.limits.connections
        );
    }
    for upstream in &settings.upstreams {
        let name = if upstream.name == "upstream" { "" } else { &upstream.name };
        let servers: Vec<String> = upstream.servers.iter().map(ToString::to_string).collect();
        tracing::info!(servers = %format!("[{}]", servers.join(", ")), "{}", format!("upstream {name}").trim_end());
    }
    match &settings.cache.path {
        _ if settings.cache.memory_bytes == 0 => tracing::info!("cache: off"),
        path => tracing::info!(
            memory_mib = settings.cache.memory_bytes >> 20,
            objects = engine.open_report().map_or(0, |report| report.objects),
            locked = engine.open_report().is_some_and(|report| report.locked_in_memory),
            "cache: {}",
            path.as_deref().map_or("memory only".into(), Path::to_string_lossy)
        ),
    }
    if engine.open_report().is_some_and(|report| !report.locked_in_memory) && settings.cache.path.is_some() {
        tracing::warn!(
            "the cache is not locked in memory, so that a hit may wait for the disk when memory is short; raise \
             LimitMEMLOCK or `ulimit -l`"
        );
    }
    let damaged = engine.store().map_or(0, |store| store.stats().torn_dropped);
    if damaged > 0 {
        tracing::warn!(damaged, "objects of the cache file were damaged and are dropped");
    }
    if let Some(set_aside) = engine.open_report().and_then(|report| report.set_aside.as_ref()) {
        tracing::warn!(
            kept = %set_aside.path.display(),
            "the cache file could not be used ({}) and was set aside; the cache starts empty",
            set_aside.reason
        );
    }
    if let Ok(address) = admin.address() {
        tracing::info!("admin on http://{address}");
    }
    if let Ok(report) = gatekeeper.gate().show() {
        let shown = crate::gate::view::report("tidegate run", &report);
        let text = |key: &str| shown[key].as_str().unwrap_or_default().to_owned();
        tracing::info!(
            rules = report.rules.len(),
            "rules are enforced in {}: {}",
            text("mechanism"),
            text("reason")
        );
        for item in report.unavailable.iter().filter(|_| !report.interfaces.is_empty()) {
            tracing::warn!("not available: {}: {}", item.what, item.why);
        }
    }
    tracing::info!("data cores: {}", settings.workers);
}
