//! How much is lost on the way, as far as a server that keeps no state can know (DHTTP §III-C).

use std::time::{Duration, Instant};

/// Fresh responses below which the ratio says nothing.
const LEAST_FRESH: f64 = 100.0;

/// Compares requests that were sent again with responses sent by UDP.
///
/// The paper counts from the start of the server. Here both counters lose half their value each half-life, so that a
/// server leaves the high-loss mode when the loss is over.
#[derive(Clone, Debug)]
pub struct LossMonitor {
    threshold: f64,
    half_life: Duration,
    fresh: f64,
    resent: f64,
    /// When the counters were last brought up to date.
    at: Instant,
}

impl LossMonitor {
    /// A monitor that reports high loss above `threshold`, a ratio from 0 to 1.
    pub fn new(threshold: f64, half_life: Duration, now: Instant) -> Self {
        let half_life = half_life.max(Duration::from_millis(1));
        Self { threshold: threshold.clamp(0.0, 1.0), half_life, fresh: 0.0, resent: 0.0, at: now }
    }

    /// A response was sent by UDP to a request without the resend flag.
    pub fn on_fresh(&mut self, now: Instant) {
        self.age(now);
        self.fresh += 1.0;
    }

    /// A request with the resend flag was received.
    pub fn on_resent(&mut self, now: Instant) {
        self.age(now);
        self.resent += 1.0;
    }

    /// Whether resent requests are more than the threshold allows.
    pub fn is_high(&self) -> bool {
        self.resent > self.threshold * self.fresh.max(LEAST_FRESH)
    }

    /// The threshold: also the fraction of short responses that go by UDP all the same while the loss is high.
    pub fn threshold(&self) -> f64 {
        self.threshold
    }

    fn age(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.at);
        // In steps, because a power for each datagram would cost more than the rest of the decision.
        if elapsed >= self.half_life / 8 {
            let factor = 0.5f64.powf(elapsed.as_secs_f64() / self.half_life.as_secs_f64());
            self.fresh *= factor;
            self.resent *= factor;
            self.at = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF_LIFE: Duration = Duration::from_secs(10);

    #[test]
    fn one_resend_in_a_hundred_is_not_high_and_more_is() {
        let now = Instant::now();
        let mut loss = LossMonitor::new(0.01, HALF_LIFE, now);
        (0..1000).for_each(|_| loss.on_fresh(now));
        (0..10).for_each(|_| loss.on_resent(now));
        assert!(!loss.is_high());
        loss.on_resent(now);
        assert!(loss.is_high());
    }

    #[test]
    fn a_single_resend_to_a_quiet_server_is_not_high() {
        let now = Instant::now();
        let mut loss = LossMonitor::new(0.01, HALF_LIFE, now);
        loss.on_resent(now);
        assert!(!loss.is_high());
        loss.on_resent(now);
        assert!(loss.is_high());
    }

    #[test]
    fn loss_that_is_over_is_forgotten() {
        let start = Instant::now();
        let mut loss = LossMonitor::new(0.01, HALF_LIFE, start);
        (0..50).for_each(|_| loss.on_resent(start));
        assert!(loss.is_high());
        let later = start + HALF_LIFE * 6;
        loss.on_fresh(later);
        assert!(!loss.is_high());
    }
}
