//! `slowread`: no address range may occupy more than its share of the connections in service (§4.2, slow read
//! prevention).

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::time::Instant;

use tidegate_core::metrics::{Kind, Sample};

use crate::arguments::{Argument, ArgumentError, Arguments};
use crate::host::{Disposition, Filter, WINDOW};
use crate::neighbours::FilterError;
use crate::wire::{Bundle, Id};

pub(super) const ARGUMENTS: &[Argument] = &[
    Argument { key: "wide", default: "25", help: "greatest share of an IPv4 /8 or IPv6 /32, in per cent" },
    Argument { key: "middle", default: "15", help: "greatest share of an IPv4 /16 or IPv6 /48, in per cent" },
    Argument { key: "narrow", default: "10", help: "greatest share of an IPv4 /24 or IPv6 /64, in per cent" },
    Argument {
        key: "exempt",
        default: "16",
        help: "a range with at most this many connections is never held up",
    },
    Argument {
        key: "refuse",
        default: "no",
        help: "answer 503 to what exceeds the share, instead of delaying it",
    },
    WINDOW,
];

/// The three nested ranges of an address, from wide to narrow: a length in bits and the bits.
type Ranges = [(u8, u128); 3];

fn ranges(address: IpAddr) -> Ranges {
    let (bits, lengths) = match address.to_canonical() {
        IpAddr::V4(v4) => (u128::from(u32::from(v4)) << 96, [8, 16, 24]),
        IpAddr::V6(v6) => (u128::from(v6), [32, 48, 64]),
    };
    // The lengths are all different, so that no IPv4 range is taken for an IPv6 one.
    lengths.map(|length| (length, bits >> (128 - length)))
}

/// Counts connections in service by range, and says whether one more fits. No I/O, no clock.
#[derive(Clone, Debug)]
pub struct Shares {
    per_cent: [u32; 3],
    exempt: u32,
    total: u32,
    by_range: HashMap<(u8, u128), u32>,
}

impl Shares {
    /// Greatest shares in per cent, wide to narrow; ranges with at most `exempt` connections are free.
    pub fn new(per_cent: [u32; 3], exempt: u32) -> Self {
        Self { per_cent, exempt, total: 0, by_range: HashMap::new() }
    }

    /// Whether one more connection from `address` stays within the shares of all its ranges.
    pub fn admits(&self, address: IpAddr) -> bool {
        ranges(address).iter().zip(self.per_cent).all(|(range, per_cent)| {
            let count = self.by_range.get(range).copied().unwrap_or(0) + 1;
            count <= self.exempt || u64::from(count) * 100 <= u64::from(self.total + 1) * u64::from(per_cent)
        })
    }

    /// A connection from `address` is in service now.
    pub fn enter(&mut self, address: IpAddr) {
        self.total += 1;
        for range in ranges(address) {
            *self.by_range.entry(range).or_insert(0) += 1;
        }
    }

    /// A connection from `address` that entered is over.
    pub fn leave(&mut self, address: IpAddr) {
        self.total = self.total.saturating_sub(1);
        for range in ranges(address) {
            if let Some(count) = self.by_range.get_mut(&range) {
                *count -= 1;
                if *count == 0 {
                    self.by_range.remove(&range);
                }
            }
        }
    }

    /// Connections in service.
    pub fn total(&self) -> u32 {
        self.total
    }
}

/// Narrow ranges tried in one go, so that many that wait do not cost a walk over all for each request.
const TRIES: usize = 256;

/// The filter around [`Shares`].
pub struct SlowRead {
    shares: Shares,
    refuses: bool,
    in_service: HashSet<Id>,
    /// Requests that wait. One that was closed before its turn, such as one that was presented again, is still in its
    /// queue.
    held: HashSet<Id>,
    /// What waits, by narrow range; the ranges take turns.
    waiting: HashMap<(u8, u128), VecDeque<(Id, IpAddr)>>,
    turns: VecDeque<(u8, u128)>,
    delayed: u64,
}

impl SlowRead {
    /// Delays or refuses what exceeds the shares.
    pub fn new(shares: Shares, refuses: bool) -> Self {
        Self {
            shares,
            refuses,
            in_service: HashSet::new(),
            held: HashSet::new(),
            waiting: HashMap::new(),
            turns: VecDeque::new(),
            delayed: 0,
        }
    }

    /// A request is in service from its admission on, that is while it is under way to the server too.
    fn enter(&mut self, id: Id, address: IpAddr) {
        self.shares.enter(address);
        self.in_service.insert(id);
    }
}

impl Filter for SlowRead {
    fn name(&self) -> &'static str {
        "slowread"
    }

    fn arrive(&mut self, request: &mut Bundle, _now: Instant) -> Disposition {
        let address = request.peer.ip();
        let narrow = ranges(address)[2];
        // Nobody overtakes a request of its own range that waits.
        if !self.waiting.contains_key(&narrow) && self.shares.admits(address) {
            self.enter(request.id, address);
            return Disposition::Pass;
        }
        self.delayed += 1;
        if self.refuses {
            return Disposition::Refuse(503, "Retry-After: 10\r\n");
        }
        let queue = self.waiting.entry(narrow).or_default();
        if queue.is_empty() {
            self.turns.push_back(narrow);
        }
        queue.push_back((request.id, address));
        self.held.insert(request.id);
        // Clients that leave before their turn come again and again.
        if queue.len() > 2 * self.held.len() {
            queue.retain(|(id, _)| self.held.contains(id));
        }
        Disposition::Hold
    }

    fn pick(&mut self, _now: Instant) -> Option<Id> {
        for _ in 0..self.turns.len().min(TRIES) {
            let narrow = self.turns.pop_front()?;
            let queue = self.waiting.get_mut(&narrow)?;
            while queue.front().is_some_and(|(id, _)| !self.held.contains(id)) {
                queue.pop_front();
            }
            let admitted = queue.front().copied().filter(|(_, address)| self.shares.admits(*address));
            if admitted.is_some() {
                queue.pop_front();
            }
            if queue.is_empty() {
                self.waiting.remove(&narrow);
            } else {
                self.turns.push_back(narrow);
            }
            if let Some((id, address)) = admitted {
                self.held.remove(&id);
                self.enter(id, address);
                return Some(id);
            }
        }
        None
    }

    fn wants_notices(&self) -> bool {
        true
    }

    fn closed(&mut self, request: &Bundle, _now: Instant) {
        if self.in_service.remove(&request.id) {
            self.shares.leave(request.peer.ip());
        } else {
            self.held.remove(&request.id);
        }
    }

    fn holds(&self) -> bool {
        true
    }

    fn samples(&self) -> Vec<Sample> {
        let sample = |name, help, kind, value| Sample { name, help, kind, value };
        vec![
            sample("in_service", "Connections in service.", Kind::Gauge, u64::from(self.shares.total())),
            sample(
                "over_share_total",
                "Requests delayed or refused: over a share.",
                Kind::Counter,
                self.delayed,
            ),
        ]
    }
}

pub(super) fn check(arguments: &Arguments) -> Result<SlowRead, FilterError> {
    let per_cent = |key| {
        let value: u32 = arguments.number(key)?;
        let wrong = || ArgumentError::Value { key, value: value.to_string(), expected: "1 to 100 per cent" };
        (1..=100).contains(&value).then_some(value).ok_or_else(wrong)
    };
    let per_cent = [per_cent("wide")?, per_cent("middle")?, per_cent("narrow")?];
    arguments.number::<usize>("window")?;
    Ok(SlowRead::new(Shares::new(per_cent, arguments.number("exempt")?), arguments.flag("refuse")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::testing::request;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn shares() -> Shares {
        let mut shares = Shares::new([25, 15, 10], 2);
        // A hundred connections from a hundred different /8 would be needed to be sparse; 90 from 90 do.
        for i in 0..90u8 {
            shares.enter(IpAddr::from([100 + i, i, i, i]));
        }
        shares
    }

    #[test]
    fn a_narrow_a_middle_and_a_wide_range_are_each_held_to_their_share() {
        let fill = |address: &dyn Fn(u8) -> IpAddr| {
            let mut shares = shares();
            let mut count = 0u8;
            while shares.admits(address(count)) {
                shares.enter(address(count));
                count += 1;
            }
            u32::from(count) * 100 / shares.total()
        };
        assert_eq!(fill(&|host| IpAddr::from([10, 0, 0, host])), 10);
        assert_eq!(fill(&|net| IpAddr::from([10, 0, net, 1])), 14);
        assert_eq!(fill(&|net| IpAddr::from([10, net, 0, 1])), 25);
        let v6 = |net: u8| {
            IpAddr::from(
                (0x2001_0db8_0000_0000_0000_0000_0000_0000u128 | u128::from(net) << 80).to_be_bytes(),
            )
        };
        assert_eq!(fill(&v6), 25);
    }

    #[test]
    fn small_counts_are_exempt() {
        let mut shares = Shares::new([25, 15, 10], 2);
        assert!(shares.admits(ip("10.0.0.1")));
        shares.enter(ip("10.0.0.1"));
        assert!(shares.admits(ip("10.0.0.2")));
        shares.enter(ip("10.0.0.2"));
        assert!(!shares.admits(ip("10.0.0.3")));
        shares.leave(ip("10.0.0.1"));
        assert!(shares.admits(ip("10.0.0.3")));
    }

    /// As of a neighbour that died: the next one has it from the same client, by another number.
    #[test]
    fn what_is_presented_again_while_it_waits_is_counted_once() {
        let now = Instant::now();
        let mut filter = SlowRead::new(Shares::new([25, 15, 10], 1), false);
        let mut first = request(1, "10.0.0.1", "");
        let (mut old, mut new) = (request(2, "10.0.0.2", ""), request(3, "10.0.0.2", ""));
        assert_eq!(filter.arrive(&mut first, now), Disposition::Pass);
        assert_eq!(filter.arrive(&mut old, now), Disposition::Hold);
        filter.closed(&old, now);
        assert_eq!(filter.arrive(&mut new, now), Disposition::Hold);
        filter.closed(&first, now);
        assert_eq!(filter.pick(now), Some(new.id));
        filter.closed(&new, now);
        assert_eq!((filter.pick(now), filter.shares.total()), (None, 0));
        assert!(filter.held.is_empty() && filter.waiting.is_empty());
        assert_eq!(filter.arrive(&mut first, now), Disposition::Pass);
    }

    #[test]
    fn clients_that_leave_and_come_again_behind_one_that_waits_do_not_pile_up() {
        let now = Instant::now();
        let mut filter = SlowRead::new(Shares::new([25, 15, 10], 1), false);
        for slot in [1, 2] {
            filter.arrive(&mut request(slot, "10.0.0.1", ""), now);
        }
        for slot in 3..1000 {
            let mut other = request(slot, "10.0.0.2", "");
            assert_eq!(filter.arrive(&mut other, now), Disposition::Hold);
            filter.closed(&other, now);
            assert_eq!(filter.pick(now), None);
        }
        assert_eq!(filter.held.len(), 1);
        assert!(filter.waiting.values().map(VecDeque::len).sum::<usize>() <= 4);
    }

    #[test]
    fn what_exceeds_a_share_waits_until_a_connection_of_the_range_is_over() {
        let now = Instant::now();
        let mut filter = SlowRead::new(Shares::new([25, 15, 10], 1), false);
        let mut first = request(1, "10.0.0.1", "");
        let mut second = request(2, "10.0.0.2", "");
        let mut other = request(3, "192.0.2.1", "");
        assert_eq!(filter.arrive(&mut first, now), Disposition::Pass);
        assert_eq!(filter.arrive(&mut second, now), Disposition::Hold);
        assert_eq!(filter.arrive(&mut other, now), Disposition::Pass);
        assert_eq!(filter.pick(now), None);
        filter.closed(&first, now);
        assert_eq!(filter.pick(now), Some(second.id));
        assert_eq!(filter.pick(now), None);
        filter.closed(&second, now);
        filter.closed(&other, now);
        assert_eq!(filter.shares.total(), 0);
        assert!(filter.shares.by_range.is_empty());
    }

    #[test]
    fn with_refuse_the_client_is_told_to_come_back() {
        let now = Instant::now();
        let mut filter = SlowRead::new(Shares::new([25, 15, 10], 1), true);
        assert_eq!(filter.arrive(&mut request(1, "10.0.0.1", ""), now), Disposition::Pass);
        let refused = filter.arrive(&mut request(2, "10.0.0.1", ""), now);
        assert_eq!(refused, Disposition::Refuse(503, "Retry-After: 10\r\n"));
    }
}
