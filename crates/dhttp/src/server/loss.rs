//! How much is lost on the way, as far as a server that keeps no state can know (DHTTP §III-C).

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::ServerConfig;
use super::growth::Growth;
use super::ring::{AnsweredRing, GlobalId};

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

    /// A response was sent by UDP to a request without the resend flag, in so many datagrams: each of them might be
    /// lost, and it takes the loss of one alone for the client to ask again.
    pub fn on_fresh(&mut self, datagrams: usize, now: Instant) {
        self.age(now);
        self.fresh += datagrams as f64;
    }

    /// A request with the resend flag was received.
    pub fn on_resent(&mut self, now: Instant) {
        self.age(now);
        self.resent += 1.0;
    }

    /// Whether resent requests are more than the threshold allows. Time passes for who only asks, too.
    pub fn is_high(&mut self, now: Instant) -> bool {
        self.age(now);
        self.resent > self.allowed()
    }

    /// So many resent requests are not high yet.
    fn allowed(&self) -> f64 {
        self.threshold * self.fresh.max(LEAST_FRESH)
    }

    /// The threshold: also the fraction of short responses that go by UDP all the same while the loss is high.
    pub fn threshold(&self) -> f64 {
        self.threshold
    }

    /// By how much what was counted has lost its value.
    fn age(&mut self, now: Instant) -> f64 {
        let elapsed = now.saturating_duration_since(self.at);
        // In steps, because a power for each datagram would cost more than the rest of the decision.
        if elapsed < self.half_life / 8 {
            return 1.0;
        }
        let factor = 0.5f64.powf(elapsed.as_secs_f64() / self.half_life.as_secs_f64());
        self.fresh *= factor;
        self.resent *= factor;
        self.at = now;
        factor
    }
}

/// One network's part in what is known in all: so many have to suffer before those are concerned of which nothing is
/// known.
const NETWORKS_ALIKE: f64 = 8.0;
/// Resent requests that are remembered, so that one counts once however often it is sent.
const COUNTED: usize = 4096;

/// Conditions per network, and in all: the paper's aggregate lets one congested network push clients of all others to
/// TCP, and hides one that is congested alone (DHTTP §III-C, "finer grained algorithms").
#[derive(Debug)]
pub(super) struct Conditions {
    overall: LossMonitor,
    networks: HashMap<Network, NetworkConditions>,
    /// In the order in which they came; the oldest makes room for the newest.
    order: VecDeque<Network>,
    capacity: usize,
    counted: AnsweredRing,
    /// Shortest and longest limit of responses in several datagrams, in bytes.
    pieces_bytes: (usize, usize),
}

#[derive(Debug)]
struct NetworkConditions {
    monitor: LossMonitor,
    /// What of its resent requests counts in all, too.
    in_all: f64,
    growth: Growth,
}

impl NetworkConditions {
    fn age(&mut self, now: Instant) {
        self.in_all *= self.monitor.age(now);
    }
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
    pub fn new(config: &ServerConfig, now: Instant) -> Self {
        Self {
            overall: LossMonitor::new(config.loss_threshold, config.loss_half_life, now),
            networks: HashMap::new(),
            order: VecDeque::new(),
            capacity: config.networks.max(1),
            counted: AnsweredRing::new(COUNTED),
            pieces_bytes: (config.pieces_bytes, config.most_pieces_bytes),
        }
    }

    /// The same for a response in so many pieces.
    pub fn on_pieces(&mut self, client: IpAddr, datagrams: usize, now: Instant) {
        self.on_fresh(client, datagrams, now);
        self.network(client, now).growth.on_pieces(datagrams);
    }

    /// Longest response that goes in pieces to this client, in bytes.
    pub fn pieces_bytes(&mut self, client: IpAddr, now: Instant) -> usize {
        let (limits, half_life) = (self.pieces_bytes, self.overall.half_life);
        let Some(network) = self.networks.get_mut(&Network::of(client)) else { return limits.0 };
        network.age(now);
        network.growth.bytes(limits, network.monitor.resent, half_life, now)
    }

    /// Longest response that may have gone in pieces to anybody.
    pub fn most_pieces_bytes(&self) -> usize {
        match self.pieces_bytes {
            (0, _) => 0,
            (first, most) => first.max(most),
        }
    }

    pub fn on_fresh(&mut self, client: IpAddr, datagrams: usize, now: Instant) {
        self.overall.on_fresh(datagrams, now);
        let network = self.network(client, now);
        network.age(now);
        network.monitor.on_fresh(datagrams, now);
    }

    pub fn on_resent(&mut self, id: GlobalId, now: Instant) {
        if self.counted.contains(&id) {
            return;
        }
        self.counted.insert(id);
        self.overall.age(now);
        let most = self.overall.allowed() / NETWORKS_ALIKE;
        let network = self.network(id.0, now);
        network.age(now);
        network.monitor.on_resent(now);
        network.growth.on_loss(now);
        let more = (most - network.in_all).clamp(0.0, 1.0);
        network.in_all += more;
        self.overall.resent += more;
    }

    /// Whether loss on the way to this client is high; where too little is known of its network, whether it is in all.
    pub fn is_high_for(&mut self, client: IpAddr, now: Instant) -> bool {
        if let Some(network) = self.networks.get_mut(&Network::of(client)) {
            network.age(now);
            if network.monitor.is_high(now) {
                return true;
            }
            if network.monitor.fresh >= LEAST_FRESH {
                return false;
            }
        }
        self.overall.is_high(now)
    }

    /// Whether loss is high in all.
    pub fn is_high(&mut self, now: Instant) -> bool {
        self.overall.is_high(now)
    }

    pub fn threshold(&self) -> f64 {
        self.overall.threshold()
    }

    /// Panics if the tables contradict each other; for tests.
    pub fn check_invariants(&self) {
        assert!(self.networks.len() <= self.capacity);
        assert_eq!(self.networks.len(), self.order.len());
    }

    fn network(&mut self, client: IpAddr, now: Instant) -> &mut NetworkConditions {
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
        self.networks.entry(network).or_insert_with(|| NetworkConditions {
            monitor: LossMonitor::new(threshold, half_life, now),
            in_all: 0.0,
            growth: Growth::new(now),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::RequestId;

    const HALF_LIFE: Duration = Duration::from_secs(10);

    fn conditions(networks: usize, now: Instant) -> Conditions {
        Conditions::new(&ServerConfig { loss_half_life: HALF_LIFE, networks, ..ServerConfig::default() }, now)
    }

    #[test]
    fn one_resend_in_a_hundred_is_not_high_and_more_is() {
        let now = Instant::now();
        let mut loss = LossMonitor::new(0.01, HALF_LIFE, now);
        (0..1000).for_each(|_| loss.on_fresh(1, now));
        (0..10).for_each(|_| loss.on_resent(now));
        assert!(!loss.is_high(now));
        loss.on_resent(now);
        assert!(loss.is_high(now));
    }

    #[test]
    fn one_repair_for_a_hundred_datagrams_of_long_responses_is_not_high() {
        let now = Instant::now();
        let mut loss = LossMonitor::new(0.01, HALF_LIFE, now);
        (0..100).for_each(|_| loss.on_fresh(10, now));
        (0..10).for_each(|_| loss.on_resent(now));
        assert!(!loss.is_high(now));
        loss.on_resent(now);
        assert!(loss.is_high(now));
    }

    #[test]
    fn a_single_resend_to_a_quiet_server_is_not_high() {
        let now = Instant::now();
        let mut loss = LossMonitor::new(0.01, HALF_LIFE, now);
        loss.on_resent(now);
        assert!(!loss.is_high(now));
        loss.on_resent(now);
        assert!(loss.is_high(now));
    }

    #[test]
    fn loss_that_is_over_is_forgotten_though_nothing_else_is_heard() {
        let start = Instant::now();
        let mut loss = LossMonitor::new(0.01, HALF_LIFE, start);
        (0..50).for_each(|_| loss.on_resent(start));
        assert!(loss.is_high(start));
        assert!(!loss.is_high(start + HALF_LIFE * 6));
        let mut conditions = conditions(100, start);
        let client = ip("192.0.2.1");
        (0..50).for_each(|n| conditions.on_resent(id(client, n), start));
        assert!(conditions.is_high_for(client, start));
        assert!(!conditions.is_high_for(client, start + HALF_LIFE * 6));
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn id(client: IpAddr, n: u64) -> GlobalId {
        (client, RequestId(n.to_be_bytes()))
    }

    #[test]
    fn a_congested_network_is_told_from_others() {
        let now = Instant::now();
        let mut conditions = conditions(10, now);
        let [good, bad, unknown] = ["192.0.2.1", "198.51.100.1", "203.0.113.1"].map(ip);
        (0..200).for_each(|_| conditions.on_fresh(good, 1, now));
        (0..20).for_each(|n| conditions.on_resent(id(bad, n), now));
        assert!(conditions.is_high_for(bad, now) && !conditions.is_high_for(good, now));
        assert!(conditions.is_high_for(ip("198.51.100.77"), now), "the same network");
        assert!(!conditions.is_high_for(unknown, now), "one network says nothing of another");
    }

    #[test]
    fn many_congested_networks_say_something_of_others() {
        let now = Instant::now();
        let mut conditions = conditions(100, now);
        let unknown = ip("203.0.113.1");
        for network in 0..9 {
            assert!(!conditions.is_high_for(unknown, now), "{network}");
            let bad = IpAddr::from([198, 51, network, 1]);
            (0..1000).for_each(|n| conditions.on_resent(id(bad, n), now));
        }
        assert!(conditions.is_high_for(unknown, now));
    }

    #[test]
    fn a_request_that_is_sent_again_and_again_counts_once() {
        let now = Instant::now();
        let mut conditions = conditions(10, now);
        let client = ip("192.0.2.1");
        (0..50).for_each(|_| conditions.on_resent(id(client, 1), now));
        assert!(!conditions.is_high_for(client, now));
        conditions.on_resent(id(client, 2), now);
        assert!(conditions.is_high_for(client, now));
    }

    #[test]
    fn networks_beyond_the_capacity_push_out_the_oldest() {
        let now = Instant::now();
        let mut conditions = conditions(2, now);
        for client in ["192.0.2.1", "2001:db8::1", "2001:db8:0:ff::1", "198.51.100.1"] {
            conditions.on_fresh(client.parse().unwrap(), 1, now);
            conditions.check_invariants();
        }
        assert_eq!(conditions.networks.len(), 2);
        assert!(!conditions.networks.contains_key(&Network::of("192.0.2.1".parse().unwrap())));
    }

    #[test]
    fn responses_in_pieces_may_be_longer_where_nothing_was_lost_and_there_only() {
        let mut now = Instant::now();
        let mut conditions = conditions(10, now);
        let [good, other] = ["192.0.2.1", "198.51.100.1"].map(ip);
        assert_eq!(conditions.pieces_bytes(good, now), 14_600);
        conditions.on_pieces(good, 200, now);
        conditions.on_pieces(other, 50, now);
        now += Duration::from_secs(2);
        assert_eq!(conditions.pieces_bytes(good, now), 29_200);
        assert_eq!(conditions.pieces_bytes(other, now), 14_600, "too little is known");
        conditions.on_pieces(good, 200, now);
        conditions.on_resent(id(good, 1), now);
        now += Duration::from_secs(2);
        assert_eq!(conditions.pieces_bytes(good, now), 14_600, "something was lost");
    }
}
