//! Starts and stops the data cores: a thread, a single-threaded runtime and listening sockets for each.

mod listeners;
mod successor;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tidegate_core::hooks::ChainSource;
use tidegate_core::metrics::Sample;
use tidegate_dhttp::driver::ServerHandle;
use tidegate_dhttp::ports::PortRangeError;
use tidegate_store::{Handed, OpenReport, Store, StoreError};
use tokio::sync::{mpsc, watch};

use crate::cache::entries::{PurgePattern, PurgePatternError};
use crate::cache::flights::Flights;
use crate::cache::listing::CacheEntry;
use crate::data_core::clients::Clients;
use crate::data_core::inside::{Inner, Inside};
use crate::data_core::plan_adoption::PlanAdoption;
use crate::data_core::{Bound, DataCore, Phase};
use crate::engine::listeners::{Sockets, bind_all};
use crate::icap::ServiceTags;
use crate::service::plan::{Plan, PlanError};
use crate::settings::{self, Cache, Settings};
use crate::telemetry::access_log::{AccessLogWriter, LogSender};
use crate::telemetry::latency::{Histogram, Latencies};
use crate::telemetry::metrics::CoreMetrics;
use crate::tls::CertificateStatus;
use crate::upstream::UpstreamStatus;

/// A core that works takes new settings over within a turn of its event loop.
const TAKE_OVER_LIMIT: Duration = Duration::from_secs(2);
/// Threads per data core that read files, which a disk may make wait; further reads wait for one of them.
const BLOCKING_THREADS: usize = 16;

pub(crate) use self::listeners::connected;
pub use self::listeners::{Listening, Whose};
pub use self::successor::Handover;

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
    /// Duplicates of the listening sockets, as long as it listens.
    listening: Mutex<Vec<Listening>>,
    dhttp_token_secret: [u8; 16],
    quic_token_secret: [u8; 16],
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
        Self::start_on(settings, Vec::new(), Handover::default())
    }

    /// As [`Self::start`], but on sockets that listen already: one entry for each of the first HTTP listeners of
    /// the settings, with a socket per priority class, the highest first. All data cores accept from them. What another
    /// process hands over is used where the settings ask for it; until [`Self::store_again`] nothing is stored in a cache
    /// that was taken over, and until [`Self::take_over`] nothing is read from sockets of HTTP/3.
    pub fn start_on(
        settings: Settings,
        held: Vec<Vec<TcpListener>>,
        handover: Handover,
    ) -> Result<Self, StartError> {
        let workers = settings.workers.max(1);
        let is_heir = handover.listening.iter().any(|listening| listening.whose == Whose::Http3);
        let Sockets { sets, addresses, duplicates } =
            bind_all(&settings, workers, &held, handover.listening)?;
        let secret = |handed: Option<[u8; 16]>| match handed {
            Some(secret) => Ok(secret),
            None => tidegate_dhttp::driver::random_secret().map_err(StartError::Thread),
        };
        let dhttp_token_secret = secret(handover.dhttp_token_secret)?;
        let quic_token_secret = secret(handover.quic_token_secret)?;
        let (store, report) = open_store(&settings.cache, handover.store)?;
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
        let (phase, _) = watch::channel(if is_heir { Phase::Waiting } else { Phase::Serving });
        let metrics: Vec<_> = (0..workers).map(|_| Arc::new(CoreMetrics::default())).collect();
        let latencies = (0..workers).map(|_| Arc::default()).collect();
        let (inside, receivers) = Inside::new(workers, settings.defence.is_some());
        let shared = Arc::new(Shared {
            started: Instant::now(),
            cache_settings: settings.cache.clone(),
            addresses,
            configured: settings.listeners.clone(),
            listening: Mutex::new(duplicates),
            dhttp_token_secret,
            quic_token_secret,
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
        engine.spawn_cores(sets, receivers, settings.defence.as_ref())?;
        Ok(engine)
    }

    fn spawn_cores(
        &self,
        sets: Vec<Vec<Bound>>,
        receivers: Vec<mpsc::Receiver<Inner>>,
        defence: Option<&Arc<dyn ChainSource>>,
    ) -> Result<(), StartError> {
        let shared = &self.shared;
        let open = Arc::new(AtomicUsize::new(0));
        let log: Option<LogSender> = lock(&shared.background).as_ref().map(AccessLogWriter::sender);
        let dhttp_unreachable = tidegate_dhttp::server::Unreachable::default();
        let dhttp_window = tidegate_dhttp::driver::Window::new().map_err(StartError::Thread)?;
        for (index, (listeners, inside)) in sets.into_iter().zip(receivers).enumerate() {
            let start = crate::data_core::Start {
                index,
                listeners,
                epoll: Clients::epoll().map_err(StartError::Thread)?,
                dhttp: Arc::clone(&shared.dhttp),
                dhttp_token_secret: shared.dhttp_token_secret,
                quic_token_secret: shared.quic_token_secret,
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
        let plan = Arc::new(Plan::new(&settings, store, tags, Some(&before))?);
        self.shared.plan.send_replace(Arc::clone(&plan));
        let draining = self.is_draining();
        if !draining && !self.shared.adoption.wait(&plan, TAKE_OVER_LIMIT) {
            tracing::warn!("a data core is so busy that it has not taken the new configuration over yet");
        }
        Ok(())
    }

    /// Stops accepting, ends idle connections and lets requests in progress finish within the drain timeout.
    pub fn drain(&self) {
        self.end(Phase::Draining);
    }

    /// The same, after another process has taken the listening sockets over.
    pub fn drain_for_successor(&self) {
        self.end(Phase::Replaced);
    }

    fn end(&self, phase: Phase) {
        tracing::info!("draining: no new connections; requests in progress finish");
        // Clients are to find nobody there, unless another process has the sockets too.
        lock(&self.shared.listening).clear();
        self.shared.phase.send_if_modified(|now| {
            let is_first = !now.is_over();
            if is_first {
                *now = phase;
            }
            is_first
        });
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
        if let Some(store) = self.shared.store.as_ref().filter(|store| !store.is_frozen())
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

fn open_store(
    cache: &Cache,
    handed: Option<Handed>,
) -> Result<(Option<Arc<Store>>, Option<OpenReport>), StartError> {
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
    let (store, report) = match handed {
        Some(handed) => Store::take_over(config, handed)?,
        None => Store::open(config)?,
    };
    Ok((Some(Arc::new(store)), Some(report)))
}
