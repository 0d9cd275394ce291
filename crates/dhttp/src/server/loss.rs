//! How much is lost on the way, as far as a server that keeps no state can know (DHTTP §III-C).

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
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

    /// A response was sent by UDP to a request without the resend flag, in so many datagrams: each of them might be lost,
    /// and it takes the loss of one alone for the client to ask again.
    pub fn on_fresh(&mut self, datagrams: usize, now: Instant) {
        self.age(now);
        self.fresh += datagrams as f64;
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

/// Conditions per network, and in all: the paper's aggregate lets one congested network push clients of all others to
/// TCP, and hides one that is congested alone (DHTTP §III-C, "finer grained algorithms").
#[derive(Clone, Debug)]
pub(super) struct Conditions {
    overall: LossMonitor,
    networks: HashMap<Network, LossMonitor>,
    /// In the order in which they came; the oldest makes room for the newest.
    order: VecDeque<Network>,
    capacity: usize,
}

/// A client's network: the first 24 bits of an IPv4 address, the first 48 of an IPv6 address.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Network {
    V4(u32),
    V6(u64),
}

impl Network {
    fn of(client: IpAddr) -> Self {
        match client.to_canonical() {
            IpAddr::V4(address) => Self::V4(address.to_bits() >> 8),
            IpAddr::V6(address) => Self::V6((address.to_bits() >> 80) as u64),
        }
    }
}

impl Conditions {
    pub fn new(threshold: f64, half_life: Duration, capacity: usize, now: Instant) -> Self {
        let overall = LossMonitor::new(threshold, half_life, now);
        Self { overall, networks: HashMap::new(), order: VecDeque::new(), capacity: capacity.max(1) }
    }

    pub fn on_fresh(&mut self, client: IpAddr, datagrams: usize, now: Instant) {
        self.overall.on_fresh(datagrams, now);
        self.network(client, now).on_fresh(datagrams, now);
    }

    pub fn on_resent(&mut self, client: IpAddr, now: Instant) {
        self.overall.on_resent(now);
        self.network(client, now).on_resent(now);
    }

    /// Whether loss on the way to this client is high; where too little is known of its network, whether it is in all.
    pub fn is_high_for(&self, client: IpAddr) -> bool {
        match self.networks.get(&Network::of(client)) {
            Some(network) if network.is_high() => true,
            Some(network) if network.fresh >= LEAST_FRESH => false,
            _ => self.overall.is_high(),
        }
    }

    /// Whether loss is high in all.
    pub fn is_high(&self) -> bool {
        self.overall.is_high()
    }

    pub fn threshold(&self) -> f64 {
        self.overall.threshold()
    }

    /// Panics if the tables contradict each other; for tests.
    pub fn check_invariants(&self) {
        assert!(self.networks.len() <= self.capacity);
        assert_eq!(self.networks.len(), self.order.len());
    }

    fn network(&mut self, client: IpAddr, now: Instant) -> &mut LossMonitor {
        let network = Network::of(client);
        if !self.networks.contains_key(&network) {
            if self.order.len() >= self.capacity
                && let Some(oldest) = self.order.pop_front()
            {
                self.networks.remove(&oldest);
            }
            self.order.push_back(network);
        }
        let (threshold, half_life) = (self.overall.threshold, self.overall.half_life);
        self.networks.entry(network).or_insert_with(|| LossMonitor::new(threshold, half_life, now))
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
        (0..1000).for_each(|_| loss.on_fresh(1, now));
        (0..10).for_each(|_| loss.on_resent(now));
        assert!(!loss.is_high());
        loss.on_resent(now);
        assert!(loss.is_high());
    }

    #[test]
    fn one_repair_for_a_hundred_datagrams_of_long_responses_is_not_high() {
        let now = Instant::now();
        let mut loss = LossMonitor::new(0.01, HALF_LIFE, now);
        (0..100).for_each(|_| loss.on_fresh(10, now));
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
        loss.on_fresh(1, later);
        assert!(!loss.is_high());
    }

    #[test]
    fn a_congested_network_is_told_from_others_once_enough_is_known_of_them() {
        let now = Instant::now();
        let mut conditions = Conditions::new(0.01, HALF_LIFE, 10, now);
        let [good, bad, unknown]: [IpAddr; 3] =
            ["192.0.2.1", "198.51.100.1", "203.0.113.1"].map(|address| address.parse().unwrap());
        (0..200).for_each(|_| conditions.on_fresh(good, 1, now));
        (0..20).for_each(|_| conditions.on_resent(bad, now));
        assert!(conditions.is_high_for(bad) && !conditions.is_high_for(good));
        assert!(conditions.is_high_for("198.51.100.77".parse().unwrap()), "the same network");
        assert!(conditions.is_high_for(unknown), "as it is in all");
        (0..2000).for_each(|_| conditions.on_fresh(good, 1, now));
        assert!(conditions.is_high_for(bad) && !conditions.is_high_for(unknown));
    }

    #[test]
    fn networks_beyond_the_capacity_push_out_the_oldest() {
        let now = Instant::now();
        let mut conditions = Conditions::new(0.01, HALF_LIFE, 2, now);
        for client in ["192.0.2.1", "2001:db8::1", "2001:db8:0:ff::1", "198.51.100.1"] {
            conditions.on_fresh(client.parse().unwrap(), 1, now);
            conditions.check_invariants();
        }
        assert_eq!(conditions.networks.len(), 2);
        assert!(!conditions.networks.contains_key(&Network::of("192.0.2.1".parse().unwrap())));
    }
}
