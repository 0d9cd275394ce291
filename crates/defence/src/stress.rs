//! When a data core is under stress (Tempesta §4.7): what it has to bear, against limits, with hysteresis.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use tidegate_core::hooks::Load;

/// Looks in a row without stress after which it is over: at four looks a second three seconds.
const CALM_LOOKS: u32 = 12;
/// Share of the kernel's own limit on the memory of TCP beyond which it is under stress.
const MOST_TCP_MEMORY: f32 = 0.75;
/// Fewer answers of the upstreams between two looks say nothing about them.
const FEW_ANSWERS: u32 = 4;

/// Limits beyond which a data core is under stress.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StressLimits {
    /// Share of its time in which the core's thread runs.
    pub busy: f32,
    /// How much later than due the event loop does what is due.
    pub lag: Duration,
    /// Connections open, as a share of those that there may be.
    pub connections: f32,
    /// How long the upstreams take to answer, in the mean.
    pub upstream_delay: Duration,
    /// Share of the upstreams' answers that are failures.
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

/// What a core's upstreams did since the last look.
#[derive(Debug, Default)]
pub(crate) struct Upstreams {
    answers: AtomicU32,
    ms: AtomicU32,
    errors: AtomicU32,
}

impl Upstreams {
    /// An answer came from an upstream, or none did.
    pub(crate) fn answered(&self, status: u16, ms: u32) {
        self.answers.fetch_add(1, Ordering::Relaxed);
        self.ms.fetch_add(ms.min(600_000), Ordering::Relaxed);
        if status >= 500 {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Mean milliseconds and share of failures since the last look, if there were enough to tell.
    fn take(&self) -> Option<(f32, f32)> {
        let [answers, ms, errors] =
            [&self.answers, &self.ms, &self.errors].map(|counter| counter.swap(0, Ordering::Relaxed));
        let answers_f = answers as f32;
        (answers >= FEW_ANSWERS).then(|| (ms as f32 / answers_f, errors as f32 / answers_f))
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
        let (upstream_ms, upstream_errors) = upstreams.take().unwrap_or_default();
        let beyond = [
            (load.connections > limits.connections, Cause::Connections),
            (load.busy > limits.busy, Cause::Busy),
            (u128::from(load.lag_ms) > limits.lag.as_millis(), Cause::Lag),
            (upstream_ms > limits.upstream_delay.as_millis() as f32, Cause::UpstreamDelay),
            (upstream_errors > limits.upstream_errors, Cause::UpstreamErrors),
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
    use super::*;

    struct Bench {
        watch: Watch,
        upstreams: Upstreams,
        host: AtomicBool,
        now_ms: u64,
    }

    impl Bench {
        fn new() -> Self {
            Self {
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
        (0..3).for_each(|_| bench.upstreams.answered(200, 60_000));
        assert_eq!(bench.look(CALM).0, None, "three answers say nothing");
        (0..4).for_each(|_| bench.upstreams.answered(200, 2_001));
        assert_eq!(bench.look(CALM).0, Some(Cause::UpstreamDelay));
        assert_eq!(bench.look(CALM).0, None, "what was looked at is gone");
        [200, 502, 503, 504].iter().for_each(|status| bench.upstreams.answered(*status, 1));
        assert_eq!(bench.look(CALM).0, Some(Cause::UpstreamErrors));
        bench.host.store(true, Ordering::Relaxed);
        assert_eq!(bench.look(CALM).0, Some(Cause::Host));
    }
}
