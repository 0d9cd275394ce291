//! When a data core is under stress (Tempesta §4.7): what it has to bear, against limits, with hysteresis.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tidegate_core::NodeId;
use tidegate_core::hooks::Load;

use crate::memory::list_bytes;

/// Looks in a row without stress after which it is over: at four looks a second three seconds.
const CALM_LOOKS: u32 = 12;
/// Share of the kernel's own limit on the memory of TCP beyond which it is under stress.
const MOST_TCP_MEMORY: f32 = 0.75;
/// Answers of the upstreams to fewer clients say nothing about them, and more clients are not told apart at once.
const FEW_CLIENTS: usize = 4;
const MAX_CLIENTS: usize = 64;
/// Looks within which so many clients have to be answered: two seconds. What they tell holds for as long.
const GATHERING_LOOKS: u32 = 8;
/// What one answer more counts for in what one takes usually.
const LEARNING: f32 = 1.0 / 32.0;

/// Limits beyond which a data core is under stress.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StressLimits {
    /// Share of its time in which the core's thread runs.
    pub busy: f32,
    /// How much later than due the event loop does what is due.
    pub lag: Duration,
    /// Connections open, as a share of those that there may be.
    pub connections: f32,
    /// How long the upstreams take to answer half of the clients, each in the mean of its answers.
    pub upstream_delay: Duration,
    /// Share of the clients for whom most of the upstreams' answers are failures.
    pub upstream_errors: f32,
}

impl Default for StressLimits {
    fn default() -> Self {
        Self {
            busy: 0.9,
            lag: Duration::from_millis(100),
            connections: 0.8,
            upstream_delay: Duration::from_secs(2),
            upstream_errors: 0.5,
        }
    }
}

/// What a core's upstreams did lately. Every client counts once, however much it asks for: who chooses what is slow, or
/// fails, says nothing about the upstreams.
#[derive(Debug, Default)]
pub(crate) struct Upstreams(Mutex<Answers>);

#[derive(Debug, Default)]
struct Answers {
    /// At most [`MAX_CLIENTS`].
    clients: Vec<OfClient>,
    /// Looks since the first of them.
    looks: u32,
    /// What was told last, as long as that holds.
    told: Option<UpstreamLoad>,
    /// What an answer takes usually, in milliseconds.
    usual_ms: f32,
}

#[derive(Debug)]
struct OfClient {
    client: NodeId,
    answers: u32,
    ms: u64,
    errors: u32,
}

/// What clients have to bear.
#[derive(Clone, Copy, Debug, Default)]
struct UpstreamLoad {
    /// Half of the clients wait longer.
    delay_ms: f32,
    /// For this share of the clients most answers are failures.
    errors: f32,
}

impl Upstreams {
    /// The most memory that one takes.
    pub(crate) const MOST_BYTES: usize = list_bytes::<OfClient>(MAX_CLIENTS + 1);

    /// An answer for this client came from an upstream, or none did.
    pub(crate) fn answered(&self, client: NodeId, status: u16, ms: u32) {
        let mut answers = self.lock();
        answers.usual_ms += LEARNING * (ms as f32 - answers.usual_ms);
        let clients = &mut answers.clients;
        let place = clients.iter().position(|of| of.client == client);
        let place = place.unwrap_or_else(|| {
            clients.push(OfClient { client, answers: 0, ms: 0, errors: 0 });
            clients.len() - 1
        });
        let of = &mut clients[place];
        of.answers += 1;
        of.ms += u64::from(ms);
        of.errors += u32::from(status >= 500);
        clients.truncate(MAX_CLIENTS);
    }

    /// What an answer takes usually, in milliseconds.
    pub(crate) fn usual_ms(&self) -> u32 {
        self.lock().usual_ms as u32
    }

    /// What there is to tell at another look.
    fn look(&self) -> Option<UpstreamLoad> {
        let mut answers = self.lock();
        answers.looks += 1;
        let is_enough = answers.clients.len() >= FEW_CLIENTS;
        if is_enough || answers.looks >= GATHERING_LOOKS {
            let clients = std::mem::take(&mut answers.clients);
            answers.looks = 0;
            answers.told = is_enough.then(|| UpstreamLoad::of(&clients));
        }
        answers.told
    }

    /// No step under the lock can fail half way.
    fn lock(&self) -> std::sync::MutexGuard<'_, Answers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UpstreamLoad {
    fn of(clients: &[OfClient]) -> Self {
        let mut means: Vec<f32> = clients.iter().map(|of| of.ms as f32 / of.answers.max(1) as f32).collect();
        means.sort_unstable_by(f32::total_cmp);
        let failing = clients.iter().filter(|of| 2 * of.errors > of.answers).count();
        Self {
            delay_ms: means.get(means.len().saturating_sub(1) / 2).copied().unwrap_or_default(),
            errors: failing as f32 / clients.len().max(1) as f32,
        }
    }
}

/// What is beyond its limit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Cause {
    /// The thread of a data core runs nearly all the time.
    Busy,
    /// The event loop is late.
    Lag,
    /// Nearly as many connections as there may be.
    Connections,
    /// The upstreams take long.
    UpstreamDelay,
    /// The upstreams fail.
    UpstreamErrors,
    /// The kernel is about to run out of memory for TCP.
    TcpMemory,
    /// Memory, pressure or the accept queue of the host, which others watch.
    Host,
}

impl Cause {
    /// What is logged.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Busy => "a data core is busy all the time",
            Self::Lag => "the event loop is late",
            Self::Connections => "nearly all connections that there may be are open",
            Self::UpstreamDelay => "the upstreams take long to answer",
            Self::UpstreamErrors => "the upstreams fail",
            Self::TcpMemory => "TCP's memory is nearly used up",
            Self::Host => "the host's memory or its accept queue is beyond [stress]",
        }
    }
}

/// Says when stress begins and when it is over: at a limit it does not flicker.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Whether the last two looks were beyond a limit.
    before: [bool; 2],
    calm: u32,
    since_ms: Option<u64>,
}

impl Watch {
    /// Takes one look; gives what is beyond its limit in it. One look that stands alone is no stress: two of three are.
    pub(crate) fn look(
        &mut self,
        limits: &StressLimits,
        load: &Load,
        upstreams: &Upstreams,
        host: &AtomicBool,
        now_ms: u64,
    ) -> Option<Cause> {
        let UpstreamLoad { delay_ms, errors } = upstreams.look().unwrap_or_default();
        let beyond = [
            (load.connections > limits.connections, Cause::Connections),
            (load.busy > limits.busy, Cause::Busy),
            (u128::from(load.lag_ms) > limits.lag.as_millis(), Cause::Lag),
            (delay_ms > limits.upstream_delay.as_millis() as f32, Cause::UpstreamDelay),
            (errors > limits.upstream_errors, Cause::UpstreamErrors),
            (load.tcp_memory > MOST_TCP_MEMORY, Cause::TcpMemory),
            (host.load(Ordering::Relaxed), Cause::Host),
        ];
        let cause = beyond.into_iter().find_map(|(is_beyond, cause)| is_beyond.then_some(cause));
        self.calm = if cause.is_some() { 0 } else { self.calm.saturating_add(1) };
        if cause.is_some() && self.before.contains(&true) {
            self.since_ms.get_or_insert(now_ms);
        } else if self.calm >= CALM_LOOKS {
            self.since_ms = None;
        }
        self.before = [self.before[1], cause.is_some()];
        cause
    }

    /// Since when there is stress.
    pub(crate) fn since_ms(&self) -> Option<u64> {
        self.since_ms
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::{PrefixTree, TreeConfig};

    use super::*;

    struct Bench {
        tree: PrefixTree,
        watch: Watch,
        upstreams: Upstreams,
        host: AtomicBool,
        now_ms: u64,
    }

    impl Bench {
        fn new() -> Self {
            Self {
                tree: PrefixTree::new(TreeConfig { memory_bytes: 1 << 20, window_ms: 10_000, seed: 1 }),
                watch: Watch::default(),
                upstreams: Upstreams::default(),
                host: AtomicBool::new(false),
                now_ms: 0,
            }
        }

        fn look(&mut self, load: Load) -> (Option<Cause>, bool) {
            self.now_ms += 250;
            let limits = StressLimits::default();
            let cause = self.watch.look(&limits, &load, &self.upstreams, &self.host, self.now_ms);
            (cause, self.watch.since_ms().is_some())
        }

        /// As many clients as there are statuses get an answer each.
        fn answer(&mut self, statuses: &[u16], ms: u32) {
            for (client, status) in (1..).zip(statuses) {
                let client = self.tree.locate([10, 0, 0, client].into(), 0);
                self.upstreams.answered(client, *status, ms);
            }
        }
    }

    const BUSY: Load = Load { busy: 0.99, lag_ms: 0, connections: 0.0, tcp_memory: 0.0 };
    const CALM: Load = Load { busy: 0.3, lag_ms: 3, connections: 0.1, tcp_memory: 0.1 };

    #[test]
    fn stress_takes_two_looks_of_three_to_begin_and_three_calm_seconds_to_end() {
        let mut bench = Bench::new();
        assert_eq!(bench.look(BUSY), (Some(Cause::Busy), false));
        assert_eq!(bench.look(CALM), (None, false));
        assert_eq!(bench.look(BUSY), (Some(Cause::Busy), true));
        assert_eq!(bench.watch.since_ms(), Some(750));
        for _ in 0..CALM_LOOKS - 1 {
            assert_eq!(bench.look(CALM), (None, true));
        }
        assert_eq!(bench.look(CALM), (None, false));
    }

    #[test]
    fn every_limit_is_a_cause_of_its_own() {
        let mut bench = Bench::new();
        let mut cause = |load| bench.look(load).0;
        assert_eq!(cause(Load { lag_ms: 101, ..CALM }), Some(Cause::Lag));
        assert_eq!(cause(Load { connections: 0.81, ..CALM }), Some(Cause::Connections));
        assert_eq!(cause(Load { tcp_memory: 0.76, ..CALM }), Some(Cause::TcpMemory));
        assert_eq!(cause(CALM), None);
        bench.answer(&[200; 4], 2_001);
        assert_eq!(bench.look(CALM).0, Some(Cause::UpstreamDelay));
        bench.answer(&[200, 502, 503, 504], 1);
        assert_eq!(bench.look(CALM).0, Some(Cause::UpstreamErrors));
        bench.answer(&[200; 4], 1);
        bench.host.store(true, Ordering::Relaxed);
        assert_eq!(bench.look(CALM).0, Some(Cause::Host));
    }

    #[test]
    fn each_client_counts_once_in_what_is_told_of_the_upstreams() {
        let mut bench = Bench::new();
        (0..GATHERING_LOOKS).for_each(|_| {
            (0..100).for_each(|_| bench.answer(&[500; 3], 60_000));
            assert_eq!(bench.look(CALM).0, None, "three clients say nothing");
        });
        bench.answer(&[200; 7], 20);
        (0..100).for_each(|_| bench.answer(&[500; 3], 60_000));
        assert_eq!(bench.look(CALM).0, None, "three of seven");
        bench.answer(&[200; 7], 20);
        (0..100).for_each(|_| bench.answer(&[500; 4], 60_000));
        assert_eq!(bench.look(CALM).0, Some(Cause::UpstreamDelay), "four of seven");
    }

    #[test]
    fn what_upstreams_do_is_gathered_for_two_seconds_and_holds_for_as_long() {
        let mut bench = Bench::new();
        for clients in 1..4 {
            bench.answer(&vec![200; clients], 2_001);
            assert_eq!(bench.look(CALM).0, None);
        }
        bench.answer(&[200; 4], 2_001);
        for _ in 0..GATHERING_LOOKS {
            assert_eq!(bench.look(CALM).0, Some(Cause::UpstreamDelay));
        }
        assert_eq!(bench.look(CALM).0, None);
        assert!(bench.upstreams.lock().clients.is_empty());
        let many: Vec<u16> = vec![200; 200];
        bench.answer(&many, 1);
        assert_eq!(bench.upstreams.lock().clients.len(), MAX_CLIENTS);
    }
}
