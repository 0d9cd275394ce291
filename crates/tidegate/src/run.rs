//! `tidegate run`: from settings to a running engine, and what signals do to it.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate_accelerator::settings::{Listener, Protocol, Route, ServerAddress, Settings, Target, Upstream};
use tidegate_accelerator::{Engine, PlanError, StartError};
use tidegate_gate::GateError;
use tidegate_store::StoreError;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::acme::{self, Acme};
use crate::cli::{Failure, LogForm, RunArgs};
use crate::config::{Finding, Loaded, Subject};
use crate::defence::Guard;
use crate::gate::Gatekeeper;
use crate::trickles::TricklesServices;
use crate::units::ServerError;
use crate::{admin, config, external, notify, units};

/// Connections to the admin server that the kernel completes and keeps.
const ADMIN_BACKLOG: i32 = 128;
/// A second signal to end that comes sooner than this is taken for the first one: a terminal and a script send both.
const SECOND_SIGNAL_AFTER: Duration = Duration::from_secs(1);
/// How long each server is given to accept the connection that shows it is there.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Upstream servers that are probed at the same time, each by a thread.
const PROBES_AT_ONCE: usize = 32;

/// Serves until a signal or the admin server ends it.
pub(crate) fn run(args: &RunArgs, log: LogForm) -> Result<(), Failure> {
    start_log(log);
    raise_descriptor_limit();
    use_small_pages();
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
    let admin = admin::Prepared::new(listen_for_admin(&loaded)?).map_err(no_admin)?;
    let http = loaded.settings.listeners.iter().filter(|listener| listener.protocol.is_http());
    let listen: Vec<SocketAddr> = http.map(|listener| listener.address).collect();
    let gate_failed = |error: GateError| Failure::runtime(format!("error: {error}"));
    let (gatekeeper, sockets) = Gatekeeper::start(&loaded.gate, &listen).map_err(gate_failed)?;
    let mut settings = loaded.settings.clone();
    gatekeeper.guard(&mut settings, &loaded.gate.rules);
    let no_guard = |error| Failure::runtime(format!("error: cannot start the defence: {error}"));
    let guard = Guard::new(&loaded.defence, settings.workers.max(1)).map_err(no_guard)?;
    let acme = Acme::new(loaded.acme.as_ref(), &settings).map_err(|error| {
        let hint = "acme.path has to be a directory that this user may make and write to";
        Failure::runtime(loaded.places.say(&Subject::ACME_PATH, &error.to_string(), hint))
    })?;
    settings.issued = Arc::clone(acme.issued());
    settings.defence = guard.as_ref().map(|guard| Arc::clone(guard.defence()) as _);
    if let Some(guard) = &guard {
        guard.start(loaded.defence.audit.clone(), Arc::clone(&gatekeeper)).map_err(no_guard)?;
        if let Some((path, one_of)) = &loaded.defence.external {
            external::start(path, *one_of, guard.defence()).map_err(no_guard)?;
        }
    }
    if let Some(path) = settings.cache.path.as_ref().filter(|path| !path.exists()) {
        tracing::info!("cache: {} is not there yet and is made", path.display());
    }
    let engine = Engine::start_on(settings, sockets)
        .map_err(|error| Failure::runtime(start_error(&error, &loaded)))?;
    let signals = starting.into_signals().map_err(no_signals)?;
    let trickles = TricklesServices::start(&loaded, engine.inside())?;
    let ports = engine.listen_addresses().iter().map(SocketAddr::port).collect();
    gatekeeper.set_ports(ports).map_err(gate_failed)?;
    gatekeeper.start_watching().map_err(gate_failed)?;
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
    });
    admin::spawn(admin, engine.clone(), Arc::clone(&reloader), gatekeeper).map_err(no_admin)?;
    signals.obey(engine.clone(), Arc::clone(&reloader)).map_err(no_signals)?;
    notify::ready("serving");
    engine.wait();
    reloader.trickles.stop();
    drop(upkeep);
    tracing::info!("stopped");
    Ok(())
}

/// Puts the configuration file in force again, if there is one.
pub(crate) struct Reloader {
    args: RunArgs,
    /// What the process was started with.
    started: Loaded,
    engine: Engine,
    gatekeeper: Arc<Gatekeeper>,
    pub trickles: TricklesServices,
    /// What watches clients, unless that is off.
    pub guard: Option<Arc<Guard>>,
    /// What has certificates issued.
    pub acme: Arc<Acme>,
    /// Reloads come by a signal and from the admin server; of two at once one would put in force what the other
    /// replaces.
    one_at_a_time: Mutex<()>,
}

impl Reloader {
    /// Whether the cache has a file.
    pub(crate) fn keeps_the_cache(&self) -> bool {
        self.started.settings.cache.path.is_some()
    }

    /// Where the engine listens, as URLs. Listeners stay what they were at the start.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = String> {
        listening(&self.engine, &self.started.settings)
    }

    /// Opens the access log and the audit file anew, as after they were renamed.
    fn reopen_logs(&self) {
        self.engine.reopen_log();
        if let Some(guard) = &self.guard {
            guard.reopen_audit();
        }
    }

    /// Begins a thread that reloads whenever it is told to, since a reload may wait for servers. Of several that are
    /// asked for during one, the last reads the file for all of them.
    fn spawn(self: &Arc<Self>) -> std::io::Result<SyncSender<()>> {
        let (sender, asked) = sync_channel(1);
        let reloader = Arc::clone(self);
        std::thread::Builder::new().name("reload".into()).spawn(move || {
            // What comes of them is logged.
            asked.iter().for_each(|()| drop(reloader.reload()));
        })?;
        Ok(sender)
    }

    /// What a reload that succeeds has done.
    pub(crate) fn done(&self) -> String {
        match &self.args.config {
            Some(path) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                format!("{} was read again and is in force", path.display())
            }
            None => "there is no configuration file to read again: tidegate was started without --config, and only looked \
                     up anew what its command line names; to change more, start it with --config FILE"
                .into(),
        }
    }

    /// All of the file comes into force or, with the reason as the error, nothing. Returns its warnings.
    pub(crate) fn reload(&self) -> Result<Vec<Finding>, String> {
        let _turn = self.one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner);
        notify::reloading();
        let result = self.read_and_apply();
        match &result {
            Ok(_) => {
                tracing::info!("{}", self.done());
                notify::ready("serving");
            }
            Err(error) => {
                tracing::error!("the old configuration stays in force: {error}");
                notify::ready(&format!("serving; the old configuration stays in force: {error}"));
            }
        }
        result
    }

    fn read_and_apply(&self) -> Result<Vec<Finding>, String> {
        let loaded = in_force(&self.args).map_err(|failure| failure.message)?;
        let (old, new) = (&self.started, &loaded);
        let needs_restart = [
            ("[[listen]]", old.settings.listeners != new.settings.listeners || old.trickles != new.trickles),
            ("[admin]", old.admin.address != new.admin.address),
            ("cache.memory", old.settings.cache.memory_bytes != new.settings.cache.memory_bytes),
            ("cache.path", old.settings.cache.path != new.settings.cache.path),
            ("cache.max_object", old.settings.cache.max_object_bytes != new.settings.cache.max_object_bytes),
            ("[log]", old.settings.access_log != new.settings.access_log),
            ("workers", old.settings.workers != new.settings.workers),
            ("[gate]", old.gate.options != new.gate.options || old.gate.kernel != new.gate.kernel),
            ("gate.interfaces", old.gate.interfaces != new.gate.interfaces),
            ("gate.http_ports", old.gate.http_ports != new.gate.http_ports),
            ("defence.enabled", old.defence.enabled != new.defence.enabled),
            ("defence.external", old.defence.external != new.defence.external),
            ("defence.audit", old.defence.audit != new.defence.audit),
            ("defence.memory", old.defence.settings.memory_bytes != new.defence.settings.memory_bytes),
            ("[adapt]", old.gate.wanted.goals != new.gate.wanted.goals),
            ("block.shut_windows", old.gate.shut_windows != new.gate.shut_windows),
            ("block.path", old.gate.blocks.directory != new.gate.blocks.directory),
        ];
        let changed: Vec<&str> =
            needs_restart.iter().filter(|(_, changed)| *changed).map(|(name, _)| *name).collect();
        if !changed.is_empty() {
            let refused = changed.iter().map(|name| {
                let place = self.place_of_change(name, &loaded).map_or(String::new(), |place| place + ": ");
                format!("{place}{name} cannot change while running; restart to apply it")
            });
            return Err(refused.collect::<Vec<_>>().join("\n"));
        }
        let certificates = loaded.acme.as_ref().map(acme::prepare).transpose();
        let certificates = certificates.map_err(|error| error.to_string())?;
        let trickles = self.trickles.renew(&loaded.settings.routes)?;
        let before = self.gatekeeper.settings();
        self.gatekeeper.reload(&loaded.gate).map_err(|error| error.to_string())?;
        let mut settings = loaded.settings.clone();
        self.gatekeeper.guard(&mut settings, &loaded.gate.rules);
        settings.issued = Arc::clone(self.acme.issued());
        if let Err(error) = self.engine.reload(settings) {
            // All or nothing.
            self.gatekeeper.reload(&before).map_err(|error| error.to_string())?;
            return Err(setting_error(&error, &loaded));
        }
        trickles.apply();
        self.acme.apply(certificates);
        if let Some(guard) = &self.guard {
            guard.defence().set_settings(loaded.defence.settings.clone());
        }
        let mut warnings = loaded.warnings.clone();
        let file = self.args.config.as_ref().map_or(String::new(), |path| path.display().to_string());
        warnings.extend(unreachable_upstreams(&loaded).into_iter().map(|(group, message)| {
            tracing::warn!("{message}");
            let elsewhere =
                || Finding { file: file.clone(), place: None, message: message.clone(), hint: None };
            loaded.places.finding(&group, &message, "").unwrap_or_else(elsewhere)
        }));
        Ok(warnings)
    }

    /// Where the file says what has changed: of listeners the first that was not there before, and of what the file no
    /// longer says the file.
    fn place_of_change(&self, name: &str, new: &Loaded) -> Option<String> {
        let old = &self.started.settings.listeners;
        let listener = new.settings.listeners.iter().find(|listener| !old.contains(listener));
        let listener = listener.filter(|_| name == "[[listen]]");
        let by_address = listener.and_then(|other| new.places.place(&Subject::Listener(other.address)));
        let key = Subject::Key(name.trim_matches(['[', ']']).to_owned().into());
        let file = || self.args.config.as_ref().map(|path| path.display().to_string());
        by_address.or_else(|| new.places.place(&key)).or_else(file)
    }
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
        StartError::Cache(_) => {
            let hint = "cache.path has to be a directory that this user may make and write to";
            return loaded.places.say(&Subject::CACHE, &error.to_string(), hint);
        }
        StartError::Plan(PlanError::Certificate(_)) => return setting_error(error, loaded),
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
        settings.listeners = vec![Listener { address: listen.address, protocol: Protocol::Http }];
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
    Route { host: "*".into(), path: "/".into(), target }
}

/// A group whose every server is down at the start is more likely a wrong address than bad luck.
fn probe_upstreams(loaded: &Loaded) -> Result<(), Failure> {
    match unreachable_upstreams(loaded).first() {
        None => Ok(()),
        Some((group, why)) => {
            let hint = "start it first, or use --allow-unreachable";
            Err(Failure::runtime(loaded.places.say(group, why, hint)))
        }
    }
}

/// The required groups none of whose servers takes a connection, and why.
fn unreachable_upstreams(loaded: &Loaded) -> Vec<(Subject, String)> {
    let required = |upstream: &&Upstream| loaded.required.contains(&upstream.name);
    let groups = || loaded.settings.upstreams.iter().filter(required);
    let servers: Vec<&ServerAddress> = groups().flat_map(|upstream| &upstream.servers).collect();
    let errors = probe(&servers);
    let mut of_servers = errors.iter().zip(&servers);
    let unreachable = groups().filter_map(|upstream| {
        let of_group: Vec<_> = of_servers.by_ref().take(upstream.servers.len()).collect();
        let failures: Vec<String> = of_group
            .iter()
            .filter_map(|(error, server)| Some(format!("{server}: {}", error.as_ref()?)))
            .collect();
        let group = match upstream.name.as_str() {
            "upstream" => "the upstream".to_owned(),
            name => format!("upstream {name}"),
        };
        let all = !failures.is_empty() && failures.len() == of_group.len();
        let message = || format!("{group} is unreachable ({})", failures.join(", "));
        all.then(|| (Subject::Upstream(upstream.name.clone()), message()))
    });
    unreachable.collect()
}

/// Connects to every server, to many at once; gives the error of each that takes no connection.
fn probe(servers: &[&ServerAddress]) -> Vec<Option<std::io::Error>> {
    let connect = |server: &ServerAddress| match server {
        ServerAddress::Ip(address) => TcpStream::connect_timeout(address, PROBE_TIMEOUT).err(),
        ServerAddress::Unix(path) => probe_unix(path).err(),
    };
    let mut errors = Vec::with_capacity(servers.len());
    for together in servers.chunks(PROBES_AT_ONCE) {
        std::thread::scope(|scope| {
            let probes: Vec<_> = together
                .iter()
                .map(|server| std::thread::Builder::new().spawn_scoped(scope, move || connect(server)))
                .collect();
            // A server whose probe could not be made is not said to be unreachable.
            errors.extend(
                probes.into_iter().map(|probe| probe.ok().and_then(|probe| probe.join().ok().flatten())),
            );
        });
    }
    errors
}

fn probe_unix(path: &Path) -> std::io::Result<()> {
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(socket, &SocketAddrUnix::new(path)?) {
        // Somebody listens, and others wait already.
        Err(Errno::AGAIN) => Ok(()),
        connected => Ok(connected?),
    }
}

/// Where the engine listens, as URLs.
fn listening(engine: &Engine, settings: &Settings) -> impl Iterator<Item = String> {
    let addresses = engine.listen_addresses().into_iter().zip(&settings.listeners);
    addresses.map(|(address, listener)| format!("{}://{address}", listener.protocol.scheme()))
}

fn announce(engine: &Engine, settings: &Settings, admin: &admin::Prepared, gatekeeper: &Gatekeeper) {
    for listener in listening(engine, settings) {
        tracing::info!("listening on {listener}");
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

/// Registers for the signals that end a program; the future is ready when one has come.
pub(crate) fn end_signal() -> std::io::Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// The signals that mean something. Registered before anything listens, so that whoever sees the port open can send
/// one.
struct Signals {
    runtime: tokio::runtime::Runtime,
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    reopen: Signal,
}

impl Signals {
    fn register() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let guard = runtime.enter();
        let terminate = signal(SignalKind::terminate())?;
        let interrupt = signal(SignalKind::interrupt())?;
        let hangup = signal(SignalKind::hangup())?;
        let reopen = signal(SignalKind::user_defined1())?;
        drop(guard);
        Ok(Self { runtime, terminate, interrupt, hangup, reopen })
    }

    /// Until clients are served, SIGTERM and SIGINT end the program at once: a start may wait for servers, and a large
    /// cache takes long to prepare. The other signals wait.
    fn end_the_start(self) -> std::io::Result<Starting> {
        let Self { runtime, mut terminate, mut interrupt, hangup, reopen } = self;
        let (serving, is_serving) = tokio::sync::oneshot::channel();
        let thread = std::thread::Builder::new().name("signals".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    biased;
                    _ = is_serving => return,
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                notify::stopping();
                tracing::info!("stopped before any client was served");
                std::process::exit(0);
            });
            Self { runtime, terminate, interrupt, hangup, reopen }
        })?;
        Ok(Starting { serving, thread })
    }

    /// SIGTERM and SIGINT drain, a second one ends at once; SIGHUP reads the configuration again and opens the logs
    /// anew; SIGUSR1 does only the latter.
    fn obey(self, engine: Engine, reloader: Arc<Reloader>) -> std::io::Result<()> {
        let Self { runtime, mut terminate, mut interrupt, mut hangup, mut reopen } = self;
        let reload = reloader.spawn()?;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            runtime.block_on(async move {
                let mut draining: Option<Instant> = None;
                loop {
                    tokio::select! {
                        _ = terminate.recv() => {}
                        _ = interrupt.recv() => {}
                        _ = reopen.recv() => {
                            reloader.reopen_logs();
                            tracing::info!("the access log and the audit file are opened anew");
                            continue;
                        }
                        _ = hangup.recv() => {
                            reloader.reopen_logs();
                            // Full: one that has not begun yet reads the file as it is now.
                            let _ = reload.try_send(());
                            continue;
                        }
                    }
                    match draining {
                        // A terminal and a script that both pass on Ctrl-C mean one.
                        Some(since) if since.elapsed() < SECOND_SIGNAL_AFTER => continue,
                        Some(_) => {
                            tracing::warn!("stopped at once; requests in progress were cut off");
                            std::process::exit(1);
                        }
                        None => draining = Some(Instant::now()),
                    }
                    notify::stopping();
                    engine.drain();
                    tracing::info!("a second signal ends at once");
                }
            });
        })?;
        Ok(())
    }
}

/// A start that signals end.
struct Starting {
    serving: tokio::sync::oneshot::Sender<()>,
    thread: std::thread::JoinHandle<Signals>,
}

impl Starting {
    /// Clients are served: what signals do from now on is [`Signals::obey`]'s.
    fn into_signals(self) -> std::io::Result<Signals> {
        let _ = self.serving.send(());
        self.thread.join().map_err(|_| std::io::Error::other("the thread that waits for them has ended"))
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, connect, listen, socket};

    use super::*;

    #[test]
    fn server_whose_queue_is_full_is_reachable_and_one_that_is_not_there_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name| ServerAddress::Unix(directory.path().join(name));
        let (full, absent) = (at("full.sock"), at("absent.sock"));
        let address = SocketAddrUnix::new(directory.path().join("full.sock")).unwrap();
        let [listener, first] =
            [(); 2].map(|()| socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap());
        bind(&listener, &address).unwrap();
        listen(&listener, 0).unwrap();
        connect(&first, &address).unwrap();
        let errors = probe(&[&full, &absent]);
        assert!(errors[0].is_none(), "{errors:?}");
        assert_eq!(errors[1].as_ref().unwrap().kind(), std::io::ErrorKind::NotFound);
    }
}
