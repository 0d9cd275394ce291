//! What else goes wrong than the loss of single datagrams: bursts of loss, blackouts, users who give up, malformed
//! datagrams.

use std::time::{Duration, Instant};

use rand::RngExt;
use rand::rngs::StdRng;

/// Faults that last.
#[derive(Clone, Copy, Default)]
pub struct Faults {
    /// Probability that a datagram begins a burst in which all are lost, and how long one lasts.
    pub bursts: (f64, Duration),
    /// Nothing gets through, by TCP neither, at the end of each period: the period, and how long.
    pub blackouts: Option<(Duration, Duration)>,
    /// Probability that the user gives a request up, at any time in the first seconds.
    pub given_up: f64,
}

/// The network's state.
pub struct Network {
    faults: Faults,
    start: Instant,
    burst_until: Instant,
}

impl Network {
    pub fn new(faults: Faults, start: Instant) -> Self {
        Self { faults, start, burst_until: start }
    }

    /// Whether a datagram sent now is lost with all others.
    pub fn loses(&mut self, now: Instant, rng: &mut StdRng) -> bool {
        if self.faults.bursts.0 > 0.0 && rng.random_bool(self.faults.bursts.0) {
            self.burst_until = self.burst_until.max(now + self.faults.bursts.1);
        }
        now < self.burst_until || self.dark_until(now).is_some()
    }

    /// When the blackout ends that there is now.
    pub fn dark_until(&self, now: Instant) -> Option<Instant> {
        let (period, length) = self.faults.blackouts?;
        let into = Duration::from_nanos(((now - self.start).as_nanos() % period.as_nanos()) as u64);
        (into >= period - length).then(|| now + (period - into))
    }

    /// When a user gives up what was asked just now, if ever.
    pub fn patience(&self, rng: &mut StdRng) -> Option<Duration> {
        let gives_up = rng.random_bool(self.faults.given_up);
        gives_up.then(|| Duration::from_millis(rng.random_range(0..6000)))
    }
}

/// A datagram that no client would send, made of one that a client has sent. Its HTTP is that of the original or cut
/// off, so that it cannot ask for what nobody has asked for.
pub fn malformed(original: &[u8], rng: &mut StdRng) -> Vec<u8> {
    let mut datagram = original.to_vec();
    match rng.random_range(0..5) {
        0 => (0..rng.random_range(0..64)).map(|_| rng.random()).collect(),
        1 => {
            datagram.truncate(rng.random_range(0..original.len()));
            datagram
        }
        2 => {
            let header = original.windows(5).position(|bytes| bytes == b"GET /").unwrap_or(1).max(1);
            datagram[rng.random_range(0..header)] ^= 1 << rng.random_range(0..8);
            datagram
        }
        // Beyond what the HTTP request says of its length.
        3 => {
            datagram.resize(original.len() + rng.random_range(1..100), b'x');
            datagram
        }
        // As long as a datagram can be.
        _ => {
            datagram.resize(65_507, 0);
            datagram
        }
    }
}
