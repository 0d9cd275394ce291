//! Starts and stops the data cores: a thread, a single-threaded runtime and listening sockets for each.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};
use tidegate_core::hooks::ChainSource;
use tidegate_core::metrics::Sample;
use tidegate_dhttp::driver::{BindError, Listener as DhttpListener, ServerHandle};
use tidegate_dhttp::ports::{ClientPorts, PortRangeError};
use tidegate_store::{OpenReport, Store, StoreError};
use tokio::sync::{mpsc, watch};

use crate::cache::entries::{PurgePattern, PurgePatternError};
use crate::cache::flights::Flights;
use crate::cache::listing::CacheEntry;
use crate::data_core::clients::Clients;
use crate::data_core::inside::{Inner, Inside};
use crate::data_core::pacing;
use crate::data_core::plan_adoption::PlanAdoption;
use crate::data_core::{Bound, DataCore, Phase, Transport};
use crate::icap::ServiceTags;
use crate::service::plan::{Plan, PlanError};
use crate::settings::{self, Cache, Settings};
use crate::telemetry::access_log::{AccessLogWriter, LogSender};
use crate::telemetry::latency::{Histogram, Latencies};
use crate::telemetry::metrics::CoreMetrics;
use crate::tls::CertificateStatus;
use crate::upstream::UpstreamStatus;

/// How long the kernel keeps a new connection to itself while nothing has arrived on it. It is accepted after that as
/// well, so that it gets its answer to a head that never came.
const DEFER_ACCEPT_S: libc::c_int = 1;
/// Connections that the kernel completes and keeps for a core that is busy.
const LISTEN_BACKLOG: i32 = 4096;
/// A core that works takes new settings over within a turn of its event loop.
const TAKE_OVER_LIMIT: Duration = Duration::from_secs(2);
/// Threads per data core that read files, which a disk may make wait; further reads wait for one of them.
const BLOCKING_THREADS: usize = 16;

/// Why the engine could not start, or not take new settings.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The address is in use or not this host's.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The listener's address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// DHTTP cannot be served on this port.
    #[error("cannot serve DHTTP on {address}: {source}")]
    DhttpPort {
        /// The listener's address.
        address: SocketAddr,
        /// Why.
        source: PortRangeError,
    },
    /// Routes, roots or upstreams do not fit together.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The cache could not be opened.
    #[error("cannot open the cache: {0}")]
    Cache(#[from] StoreError),
    /// The access log could not be opened.
    #[error("cannot open the access log {}: {source}", path.display())]
    AccessLog {
        /// The log file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A thread or runtime could not be made.
    #[error("cannot start a data core: {0}")]
    Thread(io::Error),
    /// This setting takes effect at a restart only.
    #[error("{0} cannot change while running; restart to apply it")]
    NeedsRestart(&'static str),
}

/// A handle of a running engine.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

struct Shared {
    started: Instant,
    cache_settings: Cache,
    addresses: Vec<SocketAddr>,
    configured: Vec<settings::Listener>,
    workers: usize,
    metrics: Vec<Arc<CoreMetrics>>,
    latencies: Vec<Arc<Latencies>>,
    store: Option<Arc<Store>>,
    flights: Arc<Flights>,
    report: Option<OpenReport>,
    icap_tags: ServiceTags,
    /// Of every core's DHTTP servers.
    dhttp: Arc<Mutex<Vec<ServerHandle>>>,
    plan: watch::Sender<Arc<Plan>>,
    adoption: Arc<PlanAdoption>,
    phase: watch::Sender<Phase>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    background: Mutex<Option<AccessLogWriter>>,
    inside: Inside,
}

impl Engine {
    /// Binds every listener, opens the cache and starts a thread per data core; returns when all of them listen.
    pub fn start(settings: Settings) -> Result<Self, StartError> {
        Self::start_on(settings, Vec::new())
    }

    /// As [`Self::start`], but on sockets that listen already: one entry for each of the first HTTP listeners of
    /// the settings, with a socket per priority class, the highest first. All data cores accept from them.
    pub fn start_on(settings: Settings, held: Vec<Vec<TcpListener>>) -> Result<Self, StartError> {
        let workers = settings.workers.max(1);
        let sockets = bind_all(&settings, workers, &held)?;
        let addresses = sockets[0].iter().map(|(_, address)| *address).collect();
        let (store, report) = open_store(&settings.cache)?;
        let log = match &settings.access_log {
            None => None,
            Some(log) => Some(AccessLogWriter::open(log).map_err(|source| StartError::AccessLog {
                path: log.path.clone().unwrap_or_else(|| PathBuf::from("standard output")),
                source,
            })?),
        };
        let icap_tags = ServiceTags::default();
        let plan = Arc::new(Plan::new(&settings, store.clone(), &icap_tags, None)?);
        let (plan_sender, _) = watch::channel(plan);
        let (phase, _) = watch::channel(Phase::Serving);
        let metrics: Vec<_> = (0..workers).map(|_| Arc::new(CoreMetrics::default())).collect();
        let latencies = (0..workers).map(|_| Arc::default()).collect();
        let (inside, receivers) = Inside::new(workers, settings.defence.is_some());
        let shared = Arc::new(Shared {
            started: Instant::now(),
            cache_settings: settings.cache.clone(),
            addresses,
            configured: settings.listeners.clone(),
            workers,
            metrics,
            latencies,
            store,
            flights: Arc::default(),
            report,
            icap_tags,
            dhttp: Arc::default(),
            plan: plan_sender,
            adoption: Arc::new(PlanAdoption::new(workers)),
            phase,
            threads: Mutex::new(Vec::new()),
            background: Mutex::new(log),
            inside,
        });
        let engine = Self { shared };
        engine.spawn_cores(sockets, receivers, settings.defence.as_ref())?;
        Ok(engine)
    }

    fn spawn_cores(
        &self,
        sockets: Vec<Vec<(Bound, SocketAddr)>>,
        receivers: Vec<mpsc::Receiver<Inner>>,
        defence: Option<&Arc<dyn ChainSource>>,
    ) -> Result<(), StartError> {
        let shared = &self.shared;
        let open = Arc::new(AtomicUsize::new(0));
        let log: Option<LogSender> = lock(&shared.background).as_ref().map(AccessLogWriter::sender);
        let dhttp_unreachable = tidegate_dhttp::server::Unreachable::default();
        let dhttp_token_secret = tidegate_dhttp::driver::random_secret().map_err(StartError::Thread)?;
        let dhttp_window = tidegate_dhttp::driver::Window::new().map_err(StartError::Thread)?;
        for (index, (listeners, inside)) in sockets.into_iter().zip(receivers).enumerate() {
            let start = crate::data_core::Start {
                index,
                listeners: listeners.into_iter().map(|(bound, _)| bound).collect(),
                epoll: Clients::epoll().map_err(StartError::Thread)?,
                dhttp: Arc::clone(&shared.dhttp),
                dhttp_token_secret,
                dhttp_window: dhttp_window.clone(),
                dhttp_unreachable: dhttp_unreachable.clone(),
                workers: shared.workers,
                plan: shared.plan.subscribe(),
                adoption: Arc::clone(&shared.adoption),
                phase: shared.phase.subscribe(),
                metrics: Arc::clone(&shared.metrics[index]),
                latencies: Arc::clone(&shared.latencies[index]),
                store: shared.store.clone(),
                flights: Arc::clone(&shared.flights),
                open: Arc::clone(&open),
                log: log.clone(),
                inside,
                refused: Arc::clone(shared.inside.refused()),
                defence: defence.as_ref().map(|source| source.chain(index, shared.workers)),
            };
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .max_blocking_threads(BLOCKING_THREADS)
                .build()
                .map_err(StartError::Thread)?;
            let thread = std::thread::Builder::new()
                .name(format!("core-{index}"))
                .spawn(move || DataCore::run(&runtime, start))
                .map_err(StartError::Thread)?;
            lock(&shared.threads).push(thread);
        }
        Ok(())
    }

    /// What the process's own transports ask the cores with.
    pub fn inside(&self) -> &Inside {
        &self.shared.inside
    }

    /// Where the engine listens, with the real port where 0 was asked for.
    pub fn listen_addresses(&self) -> Vec<SocketAddr> {
        self.shared.addresses.clone()
    }

    /// Every metric, summed over the data cores.
    pub fn samples(&self) -> Vec<Sample> {
        let mut sum: Vec<Sample> = Vec::new();
        for metrics in &self.shared.metrics {
            let samples = metrics.samples();
            add_samples(&mut sum, samples);
        }
        let lost = lock(&self.shared.background).as_ref().map_or(0, AccessLogWriter::lost);
        if let Some(dropped) = sum.iter_mut().find(|sample| sample.name.ends_with("access_log_dropped_total"))
        {
            dropped.value = dropped.value.wrapping_add(lost);
        }
        let mut dhttp: Vec<Sample> = Vec::new();
        for server in lock(&self.shared.dhttp).iter() {
            let protocol = server.metrics().samples();
            add_samples(&mut dhttp, protocol.into_iter().chain(server.driver_metrics().samples()).collect());
        }
        sum.extend(dhttp);
        sum
    }

    /// How long requests took, over all data cores.
    pub fn latencies(&self) -> Vec<Histogram> {
        Latencies::sum(self.shared.latencies.iter().map(AsRef::as_ref))
    }

    /// Client connections accepted since the start.
    pub fn accepted(&self) -> u64 {
        self.shared.metrics.iter().map(|metrics| metrics.connections_accepted_total.get()).sum()
    }

    /// Says whether the host is overloaded: then DHTTP servers open no connections.
    pub fn set_stressed(&self, stressed: bool) {
        lock(&self.shared.dhttp).iter().for_each(|server| server.set_stressed(stressed));
    }

    /// Opens the access log anew, as after its file was renamed.
    pub fn reopen_log(&self) {
        if let Some(log) = &*lock(&self.shared.background) {
            log.reopen();
        }
    }

    /// The cache's store; `None` when the cache is off.
    pub fn store(&self) -> Option<&Arc<Store>> {
        self.shared.store.as_ref()
    }

    /// What was found when the cache was opened.
    pub fn open_report(&self) -> Option<&OpenReport> {
        self.shared.report.as_ref()
    }

    /// At most `limit` stored responses.
    pub fn cache_entries(&self, limit: usize) -> Vec<CacheEntry> {
        self.store().map(|store| CacheEntry::list(store, limit)).unwrap_or_default()
    }

    /// Removes what the pattern matches; says how many objects went. What is on its way is not stored either.
    ///
    /// # Errors
    /// The pattern's URL is none that a request can have.
    pub fn purge(&self, pattern: &PurgePattern) -> Result<u64, PurgePatternError> {
        let plan = Arc::clone(&self.shared.plan.borrow());
        let patterns = plan.with_files(pattern.normalized(plan.personality)?);
        self.shared.flights.new_epoch(None);
        Ok(self.store().map_or(0, |store| PurgePattern::purge(&patterns, store)))
    }

    /// The state of every upstream server.
    pub fn upstream_status(&self) -> Vec<UpstreamStatus> {
        self.shared.plan.borrow().groups().status()
    }

    /// What is known of the certificates that clients are shown.
    pub fn certificates(&self) -> Vec<CertificateStatus> {
        self.shared.plan.borrow().certificates()
    }

    /// Time since the start.
    pub fn uptime(&self) -> Duration {
        self.shared.started.elapsed()
    }

    /// Puts new routes, upstreams and limits in force, on every data core. On an error the old ones stay.
    pub fn reload(&self, settings: Settings) -> Result<(), StartError> {
        if settings.listeners != self.shared.configured {
            return Err(StartError::NeedsRestart("[[listen]]"));
        }
        if settings.cache != self.shared.cache_settings {
            return Err(StartError::NeedsRestart("[cache]"));
        }
        if settings.workers.max(1) != self.shared.workers {
            return Err(StartError::NeedsRestart("workers"));
        }
        let before = Arc::clone(&self.shared.plan.borrow());
        let (store, tags) = (self.shared.store.clone(), &self.shared.icap_tags);
        let plan = Arc::new(Plan::new(&settings, store, tags, Some(before.groups()))?);
        self.shared.plan.send_replace(Arc::clone(&plan));
        let draining = *self.shared.phase.borrow() == Phase::Draining;
        if !draining && !self.shared.adoption.wait(&plan, TAKE_OVER_LIMIT) {
            tracing::warn!("a data core is so busy that it has not taken the new configuration over yet");
        }
        Ok(())
    }

    /// Stops accepting, ends idle connections and lets requests in progress finish within the drain timeout.
    pub fn drain(&self) {
        tracing::info!("draining: no new connections; requests in progress finish");
        self.shared.phase.send_replace(Phase::Draining);
    }

    /// Blocks until every data core has ended, then writes out what is left of log and cache.
    pub fn wait(&self) {
        let threads = std::mem::take(&mut *lock(&self.shared.threads));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a data core ended with a panic");
            }
        }
        drop(lock(&self.shared.background).take());
        if let Some(store) = &self.shared.store
            && let Err(error) = store.sync()
        {
            tracing::warn!(%error, "the cache could not be written to disk");
        }
    }
}

/// Adds each sample of one writer to the sums over all of them.
fn add_samples(sum: &mut Vec<Sample>, samples: Vec<Sample>) {
    if sum.is_empty() {
        *sum = samples;
        return;
    }
    for (total, sample) in sum.iter_mut().zip(samples) {
        total.value = total.value.wrapping_add(sample.value);
    }
}

/// A poisoned lock means that a thread panicked while it held one of these plain lists, which stay valid.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open_store(cache: &Cache) -> Result<(Option<Arc<Store>>, Option<OpenReport>), StartError> {
    if cache.memory_bytes == 0 {
        return Ok((None, None));
    }
    let max_object_bytes =
        if cache.max_object_bytes == 0 { cache.memory_bytes / 8 } else { cache.max_object_bytes };
    let config = tidegate_store::Config {
        budget_bytes: cache.memory_bytes,
        path: cache.path.clone(),
        max_object_bytes,
    };
    let (store, report) = Store::open(config)?;
    Ok((Some(Arc::new(store)), Some(report)))
}

/// One set of listening sockets per core; the kernel spreads connections over the sets (SO_REUSEPORT).
/// Sockets of other hands are every core's.
fn bind_all(
    settings: &Settings,
    workers: usize,
    held: &[Vec<TcpListener>],
) -> Result<Vec<Vec<(Bound, SocketAddr)>>, StartError> {
    let mut sets: Vec<Vec<(Bound, SocketAddr)>> = (0..workers).map(|_| Vec::new()).collect();
    let mut held = held.iter();
    for listener in &settings.listeners {
        let failed = |source| StartError::Listen { address: listener.address, source };
        let transport = Transport {
            has_tls: listener.protocol == settings::Protocol::Https,
            is_proxied: listener.proxy_protocol,
            has_http2_in_clear: listener.http2 && listener.protocol == settings::Protocol::Http,
        };
        let sockets =
            if listener.protocol.is_http() { held.next().map_or(&[][..], Vec::as_slice) } else { &[] };
        if let Some(first) = sockets.first() {
            let address = first.local_addr().map_err(failed)?;
            for set in &mut sets {
                let sockets: io::Result<_> = sockets.iter().map(TcpListener::try_clone).collect();
                set.push((Bound::Http(sockets.map_err(failed)?, transport), address));
            }
            continue;
        }
        // Another server's SO_REUSEPORT socket would let ours bind beside it, and each would get a share of the
        // clients: an exclusive bind first finds that out.
        drop(bind(listener.address, Type::STREAM, false).map_err(failed)?);
        let mut address = listener.address;
        if listener.protocol == settings::Protocol::Dhttp {
            drop(bind(listener.address, Type::DGRAM, false).map_err(failed)?);
        }
        for set in &mut sets {
            let bound = match listener.protocol {
                settings::Protocol::Http | settings::Protocol::Https => {
                    let socket = bind(address, Type::STREAM, true).map_err(failed)?;
                    socket.listen(LISTEN_BACKLOG).map_err(failed)?;
                    let local = socket.local_addr().ok().and_then(|address| address.as_socket());
                    address = local.unwrap_or(address);
                    Bound::Http(vec![socket.into()], transport)
                }
                settings::Protocol::Dhttp => match DhttpListener::bind(address, &ClientPorts::default()) {
                    Ok(listener) => Bound::Dhttp(listener),
                    Err(BindError::Io(source)) => return Err(failed(source)),
                    Err(BindError::Port(source)) => {
                        return Err(StartError::DhttpPort { address: listener.address, source });
                    }
                },
            };
            set.push((bound, address));
        }
    }
    Ok(sets)
}

fn bind(address: SocketAddr, kind: Type, shared: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), kind.nonblocking(), None)?;
    if kind == Type::STREAM {
        socket.set_reuse_address(true)?;
    }
    if shared {
        socket.set_reuse_port(true)?;
    }
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    if kind == Type::STREAM {
        // Accepted sockets inherit this, which saves a system call for each.
        socket.set_tcp_nodelay(true)?;
        defer_accept(&socket)?;
        limit_unsent(&socket)?;
        // Accepted sockets inherit this too.
        pacing::leave_out_within_host(&socket, address.ip());
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Bytes that the kernel takes for a client beyond those on their way. Without a bound it takes megabytes, which
/// clients that read nothing make it hold until no connection has memory any more.
static UNSENT_BYTES: libc::c_int = 64 * 1024;

/// Bounds what the kernel holds unsent for each client (`TCP_NOTSENT_LOWAT`, tcp(7)); what is on its way is not bounded
/// by it, so that a fast client is served as fast as before. Accepted sockets inherit it.
fn limit_unsent(socket: &Socket) -> io::Result<()> {
    // SAFETY: the option's value is an int, which is what the pointer and the length say.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const UNSENT_BYTES).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets the kernel keep new connections until something has arrived on them (`TCP_DEFER_ACCEPT`, tcp(7)): a first
/// request is then answered as its connection is accepted, and a client that says nothing wakes nobody.
fn defer_accept(socket: &Socket) -> io::Result<()> {
    let seconds: libc::c_int = DEFER_ACCEPT_S;
    // SAFETY: the option's value is an int, which is what the pointer and the length say.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_DEFER_ACCEPT,
            (&raw const seconds).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    /// The congestion control of a connection to a listener at this address.
    fn congestion_control(address: &str) -> Vec<u8> {
        let socket = bind(address.parse().unwrap(), Type::STREAM, true).unwrap();
        socket.set_nonblocking(false).unwrap();
        socket.listen(1).unwrap();
        let port = socket.local_addr().unwrap().as_socket().unwrap().port();
        let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        io::Write::write_all(&mut client, b"x").unwrap();
        socket.accept().unwrap().0.tcp_congestion().unwrap()
    }

    #[test]
    fn connections_within_the_host_are_not_paced_and_others_are_as_the_system_has_them() {
        let of_system = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap().tcp_congestion().unwrap();
        assert!(congestion_control("127.0.0.1:0").starts_with(b"reno\0"));
        assert_eq!(congestion_control("0.0.0.0:0"), of_system);
    }
}
