//! A TCP Reno sender with selective acknowledgements and its receiver, in virtual time: what Trickles shares a link
//! with.
//!
//! RFC 5681 and RFC 6675 with what Linux adds and what matters on a link that drops: ten packets at first (RFC 6928), a
//! retransmission that is lost again is found by what was sent after it (RFC 8985), and a probe for lost tails.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Later transmissions that arrived and make an earlier one count as lost.
const REORDERING: u64 = 3;
const MIN_RTO: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, Debug)]
struct Segment {
    /// The order of its last transmission among all, and when that was.
    order: u64,
    sent: Duration,
    again: bool,
    sacked: bool,
    lost: bool,
}

/// Packets count from 0; content is not modelled.
#[derive(Debug)]
pub struct Sender {
    total: u64,
    cwnd: f64,
    ssthresh: f64,
    /// Packets acknowledged since the window grew.
    counted: f64,
    next: u64,
    flight: BTreeMap<u64, Segment>,
    orders: u64,
    newest_acked_order: u64,
    /// When fewer later transmissions than [`REORDERING`] are taken for a loss all the same (RFC 8985 §6.2).
    overtaken_until: Option<Duration>,
    recover: Option<u64>,
    /// Of the recovery (RFC 6937): the window before, packets delivered and sent, and how many may be sent now.
    before: f64,
    delivered: f64,
    out: f64,
    may_send: f64,
    srtt: Option<Duration>,
    rttvar: Duration,
    backoff: u32,
    since: Option<Duration>,
    probed: bool,
    /// Times that the window was halved.
    pub recoveries: u64,
}

impl Sender {
    pub fn new(total: u64) -> Self {
        Self {
            total,
            cwnd: 10.0,
            ssthresh: f64::MAX,
            counted: 0.0,
            next: 0,
            flight: BTreeMap::new(),
            orders: 0,
            newest_acked_order: 0,
            overtaken_until: None,
            recover: None,
            before: 0.0,
            delivered: 0.0,
            out: 0.0,
            may_send: 0.0,
            srtt: None,
            rttvar: Duration::ZERO,
            backoff: 0,
            since: None,
            probed: false,
            recoveries: 0,
        }
    }

    fn pipe(&self) -> usize {
        self.flight.values().filter(|segment| !segment.sacked && !segment.lost).count()
    }

    fn mark(&mut self, number: u64, now: Duration, again: bool) -> u64 {
        self.orders += 1;
        let segment = Segment { order: self.orders, sent: now, again, sacked: false, lost: false };
        self.flight.insert(number, segment);
        self.since.get_or_insert(now);
        number
    }

    /// The next packet to send, if the window has room.
    pub fn poll(&mut self, now: Duration) -> Option<u64> {
        if self.recover.is_some() {
            if self.may_send < 1.0 {
                return None;
            }
            self.may_send -= 1.0;
            self.out += 1.0;
        } else if self.pipe() as f64 + 1.0 > self.cwnd {
            return None;
        }
        if let Some((&number, _)) = self.flight.iter().find(|(_, segment)| segment.lost) {
            return Some(self.mark(number, now, true));
        }
        (self.next < self.total).then(|| {
            self.next += 1;
            self.mark(self.next - 1, now, false)
        })
    }

    /// Packets below `una` have arrived, and those in `sacked`.
    pub fn acknowledge(&mut self, una: u64, sacked: &[u64], now: Duration) {
        let mut acked = 0;
        let below: Vec<u64> = self.flight.range(..una).map(|(&number, _)| number).collect();
        for number in below.iter().chain(sacked) {
            let Some(segment) = self.flight.get_mut(number).filter(|segment| !segment.sacked) else {
                continue;
            };
            segment.sacked = true;
            acked += 1;
            self.newest_acked_order = self.newest_acked_order.max(segment.order);
            if !segment.again {
                let sample = now - segment.sent;
                self.rttvar = match self.srtt {
                    None => sample / 2,
                    Some(srtt) => self.rttvar * 3 / 4 + srtt.abs_diff(sample) / 4,
                };
                self.srtt = Some(self.srtt.map_or(sample, |srtt| srtt * 7 / 8 + sample / 8));
            }
        }
        self.flight.retain(|&number, _| number >= una);
        if acked > 0 {
            (self.backoff, self.probed) = (0, false);
            self.since = (!self.flight.is_empty()).then_some(now);
        }
        if self.recover.is_some_and(|recover| una >= recover) {
            self.recover = None;
            self.cwnd = self.ssthresh;
        }
        let overtaken = |segment: &&mut Segment| {
            !segment.sacked && !segment.lost && segment.order < self.newest_acked_order
        };
        let waited = self.overtaken_until.is_some_and(|until| until <= now) || self.recover.is_some();
        let mut left = false;
        for segment in self.flight.values_mut().filter(overtaken) {
            segment.lost = waited || segment.order + REORDERING <= self.newest_acked_order;
            left |= !segment.lost;
        }
        self.overtaken_until = match (left, self.srtt) {
            (true, Some(srtt)) => self.overtaken_until.or(Some(now + srtt / 4)),
            _ => None,
        };
        if self.recover.is_none() && self.flight.values().any(|segment| segment.lost) {
            self.before = self.cwnd;
            (self.delivered, self.out) = (0.0, 0.0);
            self.ssthresh = (self.cwnd / 2.0).floor().max(2.0);
            self.recover = Some(self.next);
            self.counted = 0.0;
            self.recoveries += 1;
        } else if self.recover.is_none() {
            for _ in 0..acked {
                self.grow();
            }
        }
        if self.recover.is_some() {
            self.reduce(acked as f64);
        }
    }

    /// For one packet: in congestion avoidance a packet more for each window of them, counted in whole packets as Linux
    /// does.
    fn grow(&mut self) {
        if self.cwnd < self.ssthresh {
            self.cwnd += 1.0;
            return;
        }
        self.counted += 1.0;
        if self.counted >= self.cwnd {
            self.counted = 0.0;
            self.cwnd = self.cwnd.floor() + 1.0;
        }
    }

    /// RFC 6937: proportional rate reduction.
    fn reduce(&mut self, acked: f64) {
        self.delivered += acked;
        let pipe = self.pipe() as f64;
        let count = if pipe > self.ssthresh {
            (self.delivered * self.ssthresh / self.before).ceil() - self.out
        } else {
            (self.ssthresh - pipe).min((self.delivered - self.out).max(acked) + 1.0)
        };
        // The retransmission is never held back.
        self.may_send = count.max(if self.out == 0.0 { 1.0 } else { 0.0 });
        self.cwnd = pipe + self.may_send;
    }

    pub fn timer(&self) -> Option<Duration> {
        let since = self.since?;
        let rto = self.srtt.map_or(Duration::from_secs(1), |srtt| srtt + self.rttvar * 4).max(MIN_RTO);
        let rto = since + rto * (1 << self.backoff.min(8));
        let probe = self.srtt.filter(|_| !self.probed && self.recover.is_none()).map(|srtt| since + srtt * 2);
        [Some(rto), probe, self.overtaken_until].into_iter().flatten().min()
    }

    /// A packet to send at once, or `None` where the window was cut and [`Sender::poll`] goes on.
    pub fn expire(&mut self, now: Duration) -> Option<u64> {
        if self.overtaken_until.is_some_and(|until| until <= now) {
            let una = self.flight.first_key_value().map_or(self.next, |(&number, _)| number);
            self.acknowledge(una, &[], now);
            return None;
        }
        if !self.probed && self.recover.is_none() && self.srtt.is_some() {
            self.probed = true;
            let last = *self.flight.iter().rfind(|(_, segment)| !segment.sacked)?.0;
            return Some(self.mark(last, now, true));
        }
        self.ssthresh = (self.pipe() as f64 / 2.0).floor().max(2.0);
        self.cwnd = 1.0;
        self.backoff += 1;
        self.since = Some(now);
        self.recover = None;
        for segment in self.flight.values_mut().filter(|segment| !segment.sacked) {
            segment.lost = true;
        }
        None
    }

    pub fn window(&self) -> f64 {
        self.cwnd
    }
}

/// What arrived.
#[derive(Debug, Default)]
pub struct Receiver {
    pub next: u64,
    beyond: BTreeSet<u64>,
    /// Until when the acknowledgement of a lone packet waits.
    waits: Option<Duration>,
    taken: u64,
}

/// Packets that are acknowledged one by one at first, as Linux does.
const QUICK: u64 = 16;

impl Receiver {
    /// Takes a packet; the acknowledgement, all that arrived out of order told, unless it waits until `due` for a
    /// second.
    pub fn take(&mut self, number: u64, due: Duration) -> Option<(u64, Vec<u64>)> {
        let in_order = number == self.next && self.beyond.is_empty();
        self.taken += 1;
        if number >= self.next {
            self.beyond.insert(number);
        }
        while self.beyond.remove(&self.next) {
            self.next += 1;
        }
        if in_order && self.waits.is_none() && self.taken > QUICK {
            self.waits = Some(due);
            return None;
        }
        self.waits = None;
        Some((self.next, self.beyond.iter().copied().collect()))
    }

    /// The acknowledgement whose wait is over.
    pub fn expire(&mut self, now: Duration) -> Option<(u64, Vec<u64>)> {
        self.waits.take_if(|due| *due <= now).map(|_| (self.next, self.beyond.iter().copied().collect()))
    }
}
