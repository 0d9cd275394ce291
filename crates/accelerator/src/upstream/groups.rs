use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use xxhash_rust::xxh3::xxh3_64;

use crate::data_core::clock::monotonic_ms;
use crate::settings::{Balance, ServerAddress, Upstream};
use crate::tls::{CertificateError, Trust};
use crate::upstream::{OutgoingRequest, UpstreamError};

/// The state of one upstream server.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct UpstreamStatus {
    /// The group's name.
    pub group: String,
    /// The server's address.
    pub server: ServerAddress,
    /// Whether it gets requests.
    pub healthy: bool,
    /// Requests in progress.
    pub in_progress: u64,
    /// Requests since the start.
    pub requests: u64,
    /// Failures since the start.
    pub failures: u64,
    /// Requests that were sent with others, in one write on one connection.
    pub pipelined: u64,
    /// Writes with several requests of which some had to be sent again.
    pub pipeline_faults: u64,
    /// Requests that had to be sent again because a connection for several did not answer them.
    pub repeated: u64,
    /// What went wrong last.
    pub last_error: Option<String>,
}

/// A group whose servers could not be told from others.
#[derive(Debug, thiserror::Error)]
#[error("upstream {name}: {source}")]
pub struct GroupError {
    /// The group's name.
    pub name: String,
    /// What is wrong with its certificates.
    pub source: CertificateError,
}

/// All groups, shared by all data cores.
pub(crate) struct Groups {
    start_ms: u64,
    groups: Vec<Group>,
}

/// Servers that serve the same content.
pub(crate) struct Group {
    pub settings: Upstream,
    pub servers: Vec<Arc<Server>>,
    /// Which servers with TLS are believed, if there are any.
    pub trust: Option<Trust>,
    next: AtomicUsize,
}

/// One server's health and counters.
pub(crate) struct Server {
    pub address: ServerAddress,
    hash: u64,
    /// What the active check found.
    checked_healthy: AtomicBool,
    failures_in_a_row: AtomicU32,
    /// Until then, in milliseconds since the start, the server gets no requests; then one request probes it.
    out_until_ms: AtomicU64,
    in_progress: AtomicUsize,
    requests: AtomicU64,
    failures: AtomicU64,
    pipelined: AtomicU64,
    pipeline_faults: AtomicU64,
    repeated: AtomicU64,
    last_error: Mutex<Option<String>>,
}

impl Groups {
    /// With what is known of the servers that were there before, in a group of the same name: those that failed go on
    /// to be out, and what they are still doing counts.
    pub(crate) fn new(settings: &[Upstream], before: Option<&Self>) -> Result<Self, GroupError> {
        let group = |settings: &Upstream| {
            // Those that are to be known by something else are other servers.
            let same = |group: &&Group| {
                let (ours, theirs) = (settings, &group.settings);
                theirs.name == ours.name && theirs.tls == ours.tls && theirs.http2 == ours.http2
            };
            let mut known = before
                .and_then(|before| before.iter().find(same))
                .map_or(vec![], |same| same.servers.clone());
            let server =
                |address: &ServerAddress| match known.iter().position(|server| server.address == *address) {
                    Some(at) => known.swap_remove(at),
                    None => Arc::new(Server::new(address.clone())),
                };
            let servers: Vec<Arc<Server>> = settings.servers.iter().map(server).collect();
            if settings.health_check.is_none() {
                // Nobody would find out that it is well again.
                servers.iter().for_each(|server| server.checked_healthy.store(true, Ordering::Relaxed));
            }
            let trust =
                settings.trust().map_err(|source| GroupError { name: settings.name.clone(), source })?;
            Ok(Group { servers, settings: settings.clone(), trust, next: AtomicUsize::new(0) })
        };
        Ok(Self {
            start_ms: before.map_or_else(monotonic_ms, |before| before.start_ms),
            groups: settings.iter().map(group).collect::<Result<_, _>>()?,
        })
    }

    /// What there is for each server, with what `before` had for those of them that it had too.
    pub(crate) fn carry_over<T: Clone>(
        &self,
        before: Option<(&Self, &[Vec<T>])>,
        new: impl Fn() -> T,
    ) -> Vec<Vec<T>> {
        let mut known: Vec<(&Arc<Server>, &T)> = Vec::new();
        for (group, values) in before.into_iter().flat_map(|(groups, values)| groups.iter().zip(values)) {
            known.extend(group.servers.iter().zip(values));
        }
        let value = |server: &Arc<Server>| {
            let same = known.iter().find(|(known, _)| Arc::ptr_eq(known, server));
            same.map_or_else(&new, |(_, value)| (*value).clone())
        };
        self.iter().map(|group| group.servers.iter().map(value).collect()).collect()
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Group> {
        self.groups.get(index)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Group> {
        self.groups.iter()
    }

    pub(crate) fn now_ms(&self) -> u64 {
        monotonic_ms().saturating_sub(self.start_ms)
    }

    /// The state of every server.
    pub(crate) fn status(&self) -> Vec<UpstreamStatus> {
        let now_ms = self.now_ms();
        let status = |group: &Group, server: &Server| UpstreamStatus {
            group: group.settings.name.clone(),
            server: server.address.clone(),
            healthy: server.is_available(now_ms),
            in_progress: server.in_progress.load(Ordering::Relaxed) as u64,
            requests: server.requests.load(Ordering::Relaxed),
            failures: server.failures.load(Ordering::Relaxed),
            pipelined: server.pipelined.load(Ordering::Relaxed),
            pipeline_faults: server.pipeline_faults.load(Ordering::Relaxed),
            repeated: server.repeated.load(Ordering::Relaxed),
            last_error: server.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        self.groups
            .iter()
            .flat_map(|group| group.servers.iter().map(move |server| status(group, server)))
            .collect()
    }
}

impl Group {
    /// What `Host` says where nobody asks for anything else.
    pub(crate) fn host(&self) -> String {
        self.servers.first().map(|server| server.address.host()).unwrap_or_default()
    }

    /// The server for a request, none of those in `tried`. When every server is out because of its failures, the least
    /// recently failed is tried all the same: an answer that may come is better than none. One that failed its health
    /// check is not.
    pub(crate) fn pick(&self, request: &OutgoingRequest<'_>, tried: &[usize], now_ms: u64) -> Option<usize> {
        while let Some(index) = self.choose(request, tried, now_ms) {
            // Another core may have begun to probe it meanwhile, and then it is not available any more.
            if self.servers[index].begin(now_ms, self.settings.fail_timeout.as_millis() as u64) {
                return Some(index);
            }
        }
        (0..self.servers.len())
            .filter(|index| !tried.contains(index))
            .filter(|index| self.servers[*index].passes_checks())
            .min_by_key(|index| self.servers[*index].out_until_ms.load(Ordering::Relaxed))
    }

    fn choose(&self, request: &OutgoingRequest<'_>, tried: &[usize], now_ms: u64) -> Option<usize> {
        let available = || {
            (0..self.servers.len())
                .filter(|index| !tried.contains(index) && self.servers[*index].is_available(now_ms))
        };
        match self.settings.balance {
            Balance::RoundRobin => {
                let count = available().count();
                let turn = self.next.fetch_add(1, Ordering::Relaxed);
                available().nth(turn.checked_rem(count)?)
            }
            Balance::LeastConnections => {
                // Those that have equally few take turns: the first of them would get all requests that come one by
                // one.
                let turn = self.next.fetch_add(1, Ordering::Relaxed) % self.servers.len().max(1);
                available().min_by_key(|index| {
                    let busy = self.servers[*index].in_progress.load(Ordering::Relaxed);
                    (busy, (*index + self.servers.len() - turn) % self.servers.len())
                })
            }
            Balance::HashUrl | Balance::HashHost => {
                available().max_by_key(|index| self.servers[*index].rank(request.hash))
            }
        }
    }
}

impl Server {
    fn new(address: ServerAddress) -> Self {
        Self {
            hash: xxh3_64(address.to_string().as_bytes()),
            address,
            checked_healthy: AtomicBool::new(true),
            failures_in_a_row: AtomicU32::new(0),
            out_until_ms: AtomicU64::new(0),
            in_progress: AtomicUsize::new(0),
            requests: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            pipelined: AtomicU64::new(0),
            pipeline_faults: AtomicU64::new(0),
            repeated: AtomicU64::new(0),
            last_error: Mutex::new(None),
        }
    }

    fn is_available(&self, now_ms: u64) -> bool {
        self.passes_checks() && self.out_until_ms.load(Ordering::Relaxed) <= now_ms
    }

    /// Rendezvous hashing: the loss of a server moves only its own share.
    fn rank(&self, hash: u64) -> u64 {
        xxh3_64(&(self.hash ^ hash.rotate_left(17)).to_le_bytes())
    }

    /// Whether a request may go to this server, which was found available. One that comes back from an outage gets a
    /// single request; the others wait for how that one ends.
    fn begin(&self, now_ms: u64, fail_timeout_ms: u64) -> bool {
        let out_until_ms = self.out_until_ms.load(Ordering::Relaxed);
        if out_until_ms == 0 {
            return true;
        }
        let until_ms = now_ms.saturating_add(fail_timeout_ms).max(now_ms + 1);
        out_until_ms <= now_ms
            && self
                .out_until_ms
                .compare_exchange(out_until_ms, until_ms, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    pub(crate) fn request_began(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.in_progress.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn request_ended(&self) {
        self.in_progress.fetch_sub(1, Ordering::Relaxed);
    }

    /// Notes requests that were sent in one write, and how many of them have to be sent again. Once for all of them, so
    /// that the cores' shared counters cost each request little.
    pub(super) fn were_sent(&self, requests: usize, unanswered: usize) {
        if requests > 1 {
            self.pipelined.fetch_add(requests as u64, Ordering::Relaxed);
        }
        if unanswered > 0 {
            self.repeated.fetch_add(unanswered as u64, Ordering::Relaxed);
            self.pipeline_faults.fetch_add(u64::from(requests > 1), Ordering::Relaxed);
        }
    }

    pub(crate) fn succeeded(&self) {
        // Written only when it changes, so that the line stays shared between the cores.
        if self.failures_in_a_row.load(Ordering::Relaxed) != 0
            || self.out_until_ms.load(Ordering::Relaxed) != 0
        {
            self.failures_in_a_row.store(0, Ordering::Relaxed);
            if self.out_until_ms.swap(0, Ordering::Relaxed) != 0 {
                tracing::info!(server = %self.address, "upstream server is back");
            }
        }
    }

    pub(crate) fn failed(&self, error: &UpstreamError, settings: &Upstream, now_ms: u64) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
        let failures = self.failures_in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
        if settings.max_failures != 0 && failures >= settings.max_failures {
            let until_ms = now_ms.saturating_add(settings.fail_timeout.as_millis() as u64).max(1);
            if self.out_until_ms.swap(until_ms, Ordering::Relaxed) == 0 {
                tracing::warn!(server = %self.address, %error, "upstream server is taken out");
            }
        }
    }

    /// Whether it is healthy, as far as its checks say.
    pub(crate) fn passes_checks(&self) -> bool {
        self.checked_healthy.load(Ordering::Relaxed)
    }

    /// What its checks say now.
    pub(crate) fn checked(&self, group: &str, error: Option<String>) {
        self.checked_healthy.store(error.is_none(), Ordering::Relaxed);
        let Some(reason) = error else {
            tracing::info!(group, server = %self.address, "the server is healthy again");
            return;
        };
        tracing::warn!(group, server = %self.address, reason, "the health check fails: the server gets no requests");
        let reason = format!("health check: {reason}");
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
    }
}
