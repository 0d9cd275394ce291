//! One data core: a thread that accepts, serves and watches its own connections and shares nothing it writes often.

pub(crate) mod admission;
pub(crate) mod client;
pub(crate) mod clients;
pub(crate) mod clock;
pub(crate) mod inside;
pub(crate) mod load;
pub(crate) mod pacing;
pub(crate) mod plan_adoption;
mod proxied;

use std::cell::{Cell, Ref, RefCell};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener as StdListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tidegate_core::hooks::Chain;
use tidegate_dhttp::driver::ServerHandle;
use tidegate_http::{FieldId, RequestHead, RequestParser, Version};
use tidegate_store::{InsertError, Store};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Runtime;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::LocalSet;
use tokio::time::MissedTickBehavior;

use crate::cache::flights::{Flights, Leader, Outcome};
use crate::compression::Compressing;
use crate::data_core::admission::Accepted;
use crate::data_core::client::Client;
use crate::data_core::clients::Clients;
use crate::data_core::clock::Clock;
use crate::data_core::inside::{Inner, Refused};
use crate::data_core::load::Meter;
use crate::data_core::plan_adoption::PlanAdoption;
use crate::defence::Defence;
use crate::dhttp::{self, DhttpStart};
use crate::http3::{self, TokenSecret};
use crate::icap;
use crate::message;
use crate::service::block_list::BlockListCache;
use crate::service::client_info::ClientInfo;
use crate::service::plan::Plan;
use crate::session::batch::Batch;
use crate::session::task_pool::TaskPool;
use crate::session::{self, Times};
use crate::telemetry::access_log::{LogBuffer, LogSender, Record};
use crate::telemetry::latency::Latencies;
use crate::telemetry::log_limiter::LogLimiter;
use crate::telemetry::metrics::CoreMetrics;
use crate::tls;
use crate::upstream::{Pools, UpstreamError};

/// Bytes read from a socket at once; the buffer is the core's, so idle connections own none.
const READ_BYTES: usize = 64 * 1024;
/// How often expired deadlines are looked for.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);
/// How long what ends a connection may take to be sent when nothing is waited for any more.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// How long the cache counts as without room after a response that found none.
const LACK_MS: u64 = 10_000;

/// Where the engine is in its life.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Phase {
    /// The same as serving, but another process reads from the sockets of HTTP/3.
    Waiting,
    Serving,
    Draining,
    /// The same, and another process has the listening sockets too.
    Replaced,
}

impl Phase {
    /// Whether it ends.
    pub(crate) fn is_over(self) -> bool {
        matches!(self, Self::Draining | Self::Replaced)
    }
}

/// What a core is started with.
pub(crate) struct Start {
    pub index: usize,
    pub listeners: Vec<Bound>,
    /// Watches the core's clients.
    pub epoll: OwnedFd,
    /// Where the core puts the handles of its DHTTP servers.
    pub dhttp: Arc<Mutex<Vec<ServerHandle>>>,
    pub dhttp_token_secret: [u8; 16],
    pub quic_token_secret: TokenSecret,
    pub dhttp_window: tidegate_dhttp::driver::Window,
    pub dhttp_unreachable: tidegate_dhttp::server::Unreachable,
    pub workers: usize,
    pub plan: watch::Receiver<Arc<Plan>>,
    pub adoption: Arc<PlanAdoption>,
    pub phase: watch::Receiver<Phase>,
    pub metrics: Arc<CoreMetrics>,
    pub latencies: Arc<Latencies>,
    pub store: Option<Arc<Store>>,
    pub flights: Arc<Flights>,
    pub open: Arc<AtomicUsize>,
    pub log: Option<LogSender>,
    pub inside: mpsc::Receiver<Inner>,
    pub refused: Arc<Refused>,
    /// Made on the starting thread, and used on the core's own from then on.
    pub defence: Option<Chain>,
}

/// Where a core gets its settings from, and tells which it follows.
struct Plans {
    index: usize,
    plan: watch::Receiver<Arc<Plan>>,
    adoption: Arc<PlanAdoption>,
}

/// How long a drain waits for the first request of connections on which something else has come before it, such as a
/// handshake.
const FRESH_MS: u64 = 2000;

/// What HTTP clients of a listening address come by.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Transport {
    pub has_tls: bool,
    /// Connections are those of proxies, and begin with a PROXY header.
    pub is_proxied: bool,
    /// Clients may speak HTTP/2 without TLS.
    pub has_http2_in_clear: bool,
}

/// The sockets of one core for one listening address.
pub(crate) enum Bound {
    /// One, or one per priority class.
    Http(Vec<StdListener>, Transport),
    Dhttp(tidegate_dhttp::driver::Listener),
    /// One of HTTP/3, with its number and that of all of its address.
    Http3(UdpSocket, (usize, usize)),
}

/// What every connection of a core shares. Only this core's thread touches it.
pub(crate) struct DataCore {
    pub clock: Clock,
    pub metrics: Arc<CoreMetrics>,
    latencies: Arc<Latencies>,
    pub log_limits: LogLimits,
    pub store: Option<Arc<Store>>,
    pub flights: Arc<Flights>,
    pub clients: Clients,
    pub http3: http3::Connections,
    pub tasks: TaskPool,
    pub log: Option<LogBuffer>,
    pub defence: Option<Defence>,
    /// Filled by a read and consumed before the next await.
    pub read_buffer: RefCell<Box<[u8]>>,
    /// Parses heads that arrive whole; a head in pieces gets a parser of its own.
    pub parser: RefCell<RequestParser>,
    /// Where the requests of several clients are handled side by side.
    pub batch: Batch,
    /// Cache keys and response heads are put together here.
    pub scratch: RefCell<Scratch>,
    /// Which clients of trusted proxies are on the block list.
    pub block_list: BlockListCache,
    /// Responses that are being compressed.
    pub compressing: Rc<Compressing>,
    plan: RefCell<Arc<Plan>>,
    pools: RefCell<Rc<Pools>>,
    icap: RefCell<Rc<icap::Services>>,
    workers: usize,
    times: Cell<Times>,
    drain: Cell<Drain>,
    /// Told of each change of it.
    drain_goes_on: Notify,
    /// When it will have been long since the cache had no room for a response.
    lacks_room_until_ms: Cell<u64>,
    /// Connections of all cores.
    pub open: Arc<AtomicUsize>,
}

/// What may happen to many requests at once, and is logged for a few of them.
#[derive(Default)]
pub(crate) struct LogLimits {
    /// No upstream gave a valid response.
    pub upstream: LogLimiter,
    /// A file is there, but could not be read.
    pub files: LogLimiter,
    /// There were too many connections.
    refused: LogLimiter,
    /// There was no PROXY header of a trusted proxy.
    proxies: LogLimiter,
    /// The cache had no room.
    room: LogLimiter,
}

/// Bytes of a response that were sent.
#[derive(Clone, Copy, Default)]
pub(crate) struct Bytes {
    /// Status lines and field lines.
    pub head: u64,
    /// Content, with its transfer coding.
    pub body: u64,
}

/// Buffers that keep their memory from request to request.
#[derive(Default)]
pub(crate) struct Scratch {
    pub target: Vec<u8>,
    pub key: Vec<u8>,
    pub out: Vec<u8>,
    pub whole: Vec<u8>,
}

impl DataCore {
    /// Runs until a drain has ended.
    pub(crate) fn run(runtime: &Runtime, start: Start) {
        let local = LocalSet::new();
        runtime.block_on(local.run_until(async move {
            let plan = Arc::clone(&start.plan.borrow());
            let core = Rc::new(Self {
                clock: Clock::new(),
                metrics: start.metrics,
                latencies: start.latencies,
                log_limits: LogLimits::default(),
                store: start.store,
                flights: start.flights,
                clients: Clients::new(start.epoll),
                http3: http3::Connections::default(),
                tasks: TaskPool::default(),
                log: start.log.map(LogBuffer::new),
                defence: start.defence.map(Defence::new),
                read_buffer: RefCell::new(vec![0; READ_BYTES].into_boxed_slice()),
                parser: RefCell::new(RequestParser::new(plan.limits.head)),
                batch: Batch::new(plan.limits.head),
                scratch: RefCell::default(),
                compressing: Rc::default(),
                block_list: BlockListCache::default(),
                pools: RefCell::new(Rc::new(Pools::new(Arc::clone(plan.groups()), None))),
                icap: RefCell::new(Rc::new(icap::Services::new(&plan.icap, plan.folds_case, start.workers))),
                workers: start.workers,
                times: Cell::new(Times::new(&plan.limits)),
                plan: RefCell::new(plan),
                drain: Cell::new(Drain::NotBegun),
                drain_goes_on: Notify::new(),
                lacks_room_until_ms: Cell::new(0),
                open: start.open,
            });
            let dhttp = DhttpStart {
                handles: start.dhttp,
                token_secret: start.dhttp_token_secret,
                window: start.dhttp_window,
                unreachable: start.dhttp_unreachable,
                workers: start.workers,
            };
            let inside = tokio::task::spawn_local(message::answer_inside(
                Rc::clone(&core),
                start.inside,
                start.refused,
            ));
            let plans = Plans { index: start.index, plan: start.plan, adoption: start.adoption };
            core.serve(start.listeners, dhttp, &start.quic_token_secret, plans, start.phase).await;
            inside.abort();
        }));
    }

    async fn serve(
        self: &Rc<Self>,
        listeners: Vec<Bound>,
        start: DhttpStart,
        quic_token_secret: &TokenSecret,
        plans: Plans,
        mut phase: watch::Receiver<Phase>,
    ) {
        let mut accepting = Vec::new();
        let mut tasks = Vec::new();
        let mut dhttp = Vec::new();
        let mut quic = Vec::new();
        for bound in listeners {
            let failed = match bound {
                Bound::Http(sockets, transport) => {
                    sockets.into_iter().map(watch).collect::<io::Result<Vec<_>>>().map(|sockets| {
                        let accept = Rc::clone(self).accept(sockets, transport, phase.clone());
                        accepting.push(tokio::task::spawn_local(accept));
                    })
                }
                Bound::Dhttp(listener) => {
                    dhttp::serve(self, listener, &start).map(|server| dhttp.push(server))
                }
                Bound::Http3(socket, number) => {
                    quic.push((socket, number));
                    Ok(())
                }
            };
            if let Err(error) = failed {
                tracing::error!(%error, "a listening socket could not be watched");
            }
        }
        // Not among those that a drain ends: requests in progress are still waited for.
        tokio::task::spawn_local(Rc::clone(self).watch_clients());
        tasks.push(tokio::task::spawn_local(Rc::clone(self).sweep()));
        tasks.push(tokio::task::spawn_local(Rc::clone(self).follow_plan(plans)));
        // The sender lives as long as the engine; its end means the same as a drain.
        let _ = phase.wait_for(|phase| *phase != Phase::Waiting).await;
        let mut http3 = Vec::new();
        for (socket, number) in quic {
            match http3::serve(self, socket, number, quic_token_secret) {
                Ok(server) => http3.push(server),
                Err(error) => tracing::error!(%error, "a socket of HTTP/3 could not be watched"),
            }
        }
        let has_successor =
            phase.wait_for(|phase| phase.is_over()).await.is_ok_and(|phase| *phase == Phase::Replaced);
        if has_successor {
            self.http3.part(&http3);
        }
        self.set_drain(Drain::Begun);
        for task in &tasks {
            task.abort();
        }
        for task in accepting {
            // Ends with the drain; a panic in it has been reported.
            let _ = task.await;
        }
        dhttp.iter().for_each(|server| server.handle.drain());
        self.finish_requests(&dhttp).await;
        for server in http3 {
            let _ = tokio::time::timeout(LAST_WORDS, server.end()).await;
        }
        self.log_kept_back(u64::MAX);
        if let Some(log) = &self.log {
            log.flush(&self.metrics);
        }
    }

    /// Waits for requests in progress, at most for the drain timeout.
    async fn finish_requests(&self, dhttp: &[dhttp::Server]) {
        self.clients.end_tunnels();
        let end_ms = self.clock.elapsed_ms() + millis(self.plan().limits.drain_timeout);
        let fresh_ms = self.clock.elapsed_ms() + FRESH_MS;
        let open = || self.clients.len() + self.http3.len();
        let busy = || open() > 0 || dhttp.iter().any(|server| !server.task.is_finished());
        while busy() && self.clock.elapsed_ms() < end_ms {
            self.clients.count_silent_as_idle(self.clock.elapsed_ms() < fresh_ms);
            self.clients.end_idle();
            self.clients.sweep(self.clock.elapsed_ms());
            self.http3.sweep(self.clock.elapsed_ms());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if open() > 0 {
            tracing::warn!(connections = open(), "connections were still open when the drain timed out");
            // Those that can say so have a moment for it.
            self.set_drain(Drain::Over);
            tokio::time::sleep(LAST_WORDS).await;
        }
        if self.clients.len() > 0 {
            // What they wait for or were sent is logged when their tasks hear that it is over.
            self.clients.for_each(|client| client.wake());
            tokio::time::sleep(LAST_WORDS).await;
        }
    }

    fn set_drain(&self, drain: Drain) {
        self.drain.set(drain);
        self.drain_goes_on.notify_waiters();
    }

    fn admit(self: &Rc<Self>, accepted: Accepted, transport: Transport) {
        let Accepted { stream, peer, introduced } = accepted;
        self.metrics.connections_accepted_total.add(1);
        if !self.has_room(peer) {
            return;
        }
        let Ok(place) = self.meet(&stream, peer) else {
            self.open.fetch_sub(1, Ordering::Relaxed);
            return;
        };
        let tls = match transport.has_tls {
            false => Ok(None),
            true => self.plan().tls.clone().map(tls::Session::new).transpose(),
        };
        let Ok(tls) = tls else {
            self.part(place, peer);
            self.open.fetch_sub(1, Ordering::Relaxed);
            return;
        };
        self.metrics.connections_open.add(1);
        session::begin(
            self,
            &Rc::new(Client::new(stream, peer, introduced, place, (tls, transport.has_http2_in_clear))),
        );
    }

    /// Whether there may be one more connection, which is counted then.
    pub(crate) fn has_room(&self, peer: SocketAddr) -> bool {
        if self.open.fetch_add(1, Ordering::Relaxed) < self.plan().limits.connections {
            return true;
        }
        self.open.fetch_sub(1, Ordering::Relaxed);
        self.metrics.connections_refused_total.add(1);
        if self.log_limits.refused.may_log(self.clock.elapsed_ms()) {
            let open = self.plan().limits.connections;
            tracing::warn!(client = %peer, open, "a connection is refused: limits.connections are open");
        }
        false
    }

    /// Counts the end of a connection that was admitted.
    pub(crate) fn connection_ended(&self, client: &Client) {
        client.close_tls();
        if client.is_tls_flood() {
            self.metrics.tls_floods_total.add(1);
            let _ = self.answers_malformed(client.place, client.peer());
        }
        self.part(client.place, client.peer());
        self.metrics.connections_open.sub(1);
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    async fn sweep(self: Rc<Self>) {
        let mut interval = tokio::time::interval(SWEEP_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut meter = self.defence.as_ref().map(|_| Meter::new(SWEEP_INTERVAL));
        loop {
            interval.tick().await;
            let now_ms = self.clock.elapsed_ms();
            self.clients.sweep(now_ms);
            self.http3.sweep(now_ms);
            self.pools().sweep();
            self.icap_services().sweep();
            self.log_kept_back(now_ms);
            if let (Some(defence), Some(meter)) = (&self.defence, &mut meter) {
                let load = meter.read(self.open.load(Ordering::Relaxed), self.plan().limits.connections);
                defence.tick(&load, self.clock.elapsed_ms());
                self.make_room(defence, &load);
            }
            if let Some(log) = &self.log {
                log.flush(&self.metrics);
            }
        }
    }

    /// Says how often there was no line for what happened before `now_ms`.
    fn log_kept_back(&self, now_ms: u64) {
        for (log_limits, what) in [
            (&self.log_limits.upstream, "requests without an answer from the upstream"),
            (&self.log_limits.files, "requests for files that could not be read"),
            (&self.log_limits.refused, "refused connections"),
            (&self.log_limits.proxies, "connections without a PROXY header of a trusted proxy"),
        ] {
            if let Some(more) = log_limits.kept_back(now_ms) {
                tracing::warn!("{more} more {what} are not logged one by one");
            }
        }
    }

    /// Takes over new settings; core 0 also runs the health checks of the settings in force.
    async fn follow_plan(self: Rc<Self>, plans: Plans) {
        let Plans { index, mut plan, adoption } = plans;
        loop {
            let current = Arc::clone(&plan.borrow_and_update());
            let checks = (index == 0).then(|| {
                tokio::task::spawn_local(crate::upstream::run_health_checks(Arc::clone(current.groups())))
            });
            if !Arc::ptr_eq(&current, &self.plan()) {
                *self.parser.borrow_mut() = RequestParser::new(current.limits.head);
                self.batch.follow(current.limits.head);
                let pools = Pools::new(Arc::clone(current.groups()), Some(&self.pools.borrow()));
                *self.pools.borrow_mut() = Rc::new(pools);
                *self.icap.borrow_mut() =
                    Rc::new(icap::Services::new(&current.icap, current.folds_case, self.workers));
                self.times.set(Times::new(&current.limits));
                *self.plan.borrow_mut() = Arc::clone(&current);
            }
            adoption.adopted(index, current);
            let ended = plan.changed().await.is_err();
            if let Some(checks) = checks {
                checks.abort();
            }
            if ended {
                return;
            }
        }
    }

    /// Counts and logs an answered request whose head was there when it `began`.
    pub(crate) fn account(
        &self,
        peer: IpAddr,
        head: &RequestHead<'_>,
        status: u16,
        bytes: Bytes,
        cache: &'static str,
        began: Instant,
    ) {
        self.count(status, bytes, cache, began);
        self.log(peer, head, status, bytes, cache, began);
    }

    /// The same without a line.
    pub(crate) fn count(&self, status: u16, bytes: Bytes, cache: &'static str, began: Instant) {
        self.metrics.count_response(status, bytes.head + bytes.body);
        self.latencies.count(cache, self.clock.now().saturating_duration_since(began));
    }

    /// A line for the access log: of a response that was sent, or of what was sent of one.
    pub(crate) fn log(
        &self,
        peer: IpAddr,
        head: &RequestHead<'_>,
        status: u16,
        bytes: Bytes,
        cache: &'static str,
        began: Instant,
    ) {
        if let Some(log) = &self.log {
            let record = Record {
                client: self.with_plan(|plan| ClientInfo::of(plan, head, peer.to_canonical(), false).client),
                unix_s: self.clock.unix_s(),
                duration: self.clock.now().saturating_duration_since(began),
                host: head.fields.get(FieldId::Host).unwrap_or(b""),
                method: head.method_bytes,
                target: head.target,
                version: head.version,
                status,
                bytes: bytes.body,
                referer: head.fields.get(FieldId::Referer).unwrap_or(b""),
                user_agent: head.fields.get(FieldId::UserAgent).unwrap_or(b""),
                cache,
            };
            log.record(&record, &self.metrics);
        }
    }

    /// A line for the access log: of the answer to a head that could not be read.
    pub(crate) fn log_unreadable(&self, peer: SocketAddr, version: Version, status: u16, sent: Bytes) {
        if let Some(log) = &self.log {
            let record = Record {
                client: peer.ip().to_canonical(),
                unix_s: self.clock.unix_s(),
                duration: Duration::ZERO,
                host: b"",
                method: b"-",
                target: b"-",
                version,
                status,
                bytes: sent.body,
                referer: b"",
                user_agent: b"",
                cache: "none",
            };
            log.record(&record, &self.metrics);
        }
    }

    /// The settings in force.
    pub(crate) fn plan(&self) -> Arc<Plan> {
        Arc::clone(&self.plan.borrow())
    }

    /// Calls `f` with the settings in force, without touching their count.
    #[inline]
    pub(crate) fn with_plan<T>(&self, f: impl FnOnce(&Plan) -> T) -> T {
        f(&self.plan.borrow())
    }

    /// The settings in force and the connections to their upstreams: an upstream's index means something in both.
    pub(crate) fn plan_and_pools(&self) -> (Arc<Plan>, Rc<Pools>) {
        (self.plan(), self.pools())
    }

    /// The settings in force, for code that does not wait.
    #[inline]
    pub(crate) fn plan_ref(&self) -> Ref<'_, Arc<Plan>> {
        self.plan.borrow()
    }

    /// The times that every request needs.
    #[inline]
    pub(crate) fn times(&self) -> Times {
        self.times.get()
    }

    /// The time `after_ms` from now, as deadlines count it.
    #[inline]
    pub(crate) fn deadline(&self, after_ms: u64) -> u64 {
        self.clock.elapsed_ms().saturating_add(after_ms)
    }

    /// This core's upstream connections.
    pub(crate) fn pools(&self) -> Rc<Pools> {
        Rc::clone(&self.pools.borrow())
    }

    /// This core's ICAP services.
    pub(crate) fn icap_services(&self) -> Rc<icap::Services> {
        Rc::clone(&self.icap.borrow())
    }

    /// A response that has begun is not all that it was to be.
    pub(crate) fn upstream_broke_off(&self, error: &UpstreamError, target: &[u8]) {
        self.metrics.upstream_errors_total.add(1);
        if self.log_limits.upstream.may_log(self.clock.elapsed_ms()) {
            let target = String::from_utf8_lossy(target);
            tracing::warn!(%error, %target, "an upstream broke off its response");
        }
    }

    /// A response was not stored: it is too large, or what others read and write takes all of the cache.
    pub(crate) fn not_stored(&self, error: &InsertError) {
        tracing::debug!(%error, "response not stored");
        self.metrics.cache_store_failures_total.add(1);
        if !matches!(error, InsertError::NoSpace) {
            return;
        }
        let now_ms = self.clock.elapsed_ms();
        self.lacks_room_until_ms.set(now_ms + LACK_MS);
        if self.log_limits.room.may_log(now_ms) {
            tracing::warn!(
                "no room in the cache: clients still read what is to make room; who reads slowly is ended sooner"
            );
        }
    }

    /// Whether responses are not stored for want of room.
    pub(crate) fn lacks_room(&self) -> bool {
        self.clock.elapsed_ms() < self.lacks_room_until_ms.get()
    }

    /// Tells those who wait for an object that it is stored. One that has to be validated for each of them is of no use
    /// to them: they, and those who come soon, ask the upstream side by side.
    pub(crate) fn landed(&self, leader: Option<Leader>, is_fresh: bool) {
        let Some(leader) = leader else { return };
        if is_fresh {
            leader.finish(Outcome::Stored);
        } else {
            leader.remember_not_shared(self.clock.unix_s());
            leader.finish(Outcome::NotShared);
        }
    }

    /// Whether connections are to end after the response in progress.
    #[inline]
    pub(crate) fn is_draining(&self) -> bool {
        self.drain.get() >= Drain::Begun
    }

    /// Ends when connections are to end.
    pub(crate) async fn drained(&self) {
        self.drain_is(Drain::Begun).await;
    }

    /// Whether nothing is waited for any more.
    pub(crate) fn is_cut_off(&self) -> bool {
        self.drain.get() == Drain::Over
    }

    /// Ends when nothing is waited for any more.
    pub(crate) async fn drain_is_over(&self) {
        self.drain_is(Drain::Over).await;
    }

    async fn drain_is(&self, wanted: Drain) {
        while self.drain.get() < wanted {
            // Nothing happens on other threads between the look and the wait.
            self.drain_goes_on.notified().await;
        }
    }
}

/// How far the server has come with ending its connections.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Drain {
    NotBegun,
    /// Requests in progress are waited for.
    Begun,
    /// They are not.
    Over,
}

/// Lets the reactor watch a socket for what arrives.
fn watch<T: Into<OwnedFd> + AsRawFd>(socket: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: the socket is open, and `AsyncFd` owns it until it lets go of it; nothing takes the descriptor out of it.
    unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }.map_err(io::Error::from)
}

/// A duration as the deadlines count it.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 2)
}

pub(crate) fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}
