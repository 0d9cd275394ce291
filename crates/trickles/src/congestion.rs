//! What a request sets free: continue, split or terminate a trickle, recover from a loss, start over after a timeout
//! (Trickles §2.3 to §2.5). Server and client compute the same function, the client to know what to ask for and wait for.
//!
//! A connection is cut into *eras* at its loss events. In an era nothing is lost before packet a, the *first loss*, and
//! the number of every packet follows from the closed form: once k is acknowledged, packets up to k + TCPCwnd(k) have
//! been sent. At the loss W = TCPCwnd(a − 1) packets a…E are in flight. Their acknowledgements, which all report the
//! loss, set free H = W/2 packets E+1…E+H of the next era: the first acknowledgement after the loss sets free E+1, the
//! fast retransmission, and the last H − 1 of the flight, the *survivors*, one each. The others terminate. Where a
//! survivor's packet is itself lost, the next acknowledgement sets its packet free too, up to a burst limit.

use crate::cwnd::{MAX_WINDOW, tcp_cwnd};
use crate::nonce::EraCause;
use std::ops::Range;

/// Window in packets after a timeout; RFC 5681 §3.1 allows one, two survive a second loss.
pub const LOSS_WINDOW: u16 = 2;
/// Smallest slow start threshold, RFC 5681 (4).
const MIN_SSTHRESH: u64 = 2;
/// Most packets that one request may acknowledge. RFC 5681 §4.2 asks for an acknowledgement of every second.
pub const MAX_GROUP: u8 = 4;
/// Most lost survivors that one acknowledgement recreates (Trickles §2.5, burstLimit).
pub const BURST_LIMIT: u64 = 4;

/// The state of congestion control, constant between two loss events.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Era {
    /// Orders the eras of a connection. A recovery adds one, attempt n of a timeout 1 + n.
    pub counter: u32,
    /// Names the era in its nonces; only the server can compute it.
    pub tag: u32,
    /// TCPBase: the last packet number before the era's first.
    pub base: u64,
    /// startCwnd in packets.
    pub start: u16,
    /// Slow start threshold in packets.
    pub ssthresh: u16,
    /// Packets sent at the era's start, `base + 1` on; 0 stands for `start` packets. Fewer than `start` were sent if the
    /// client's address was not proved yet; the rest follows with the answer to the first acknowledgement.
    pub flight: u8,
}

impl Era {
    /// TCPCwnd(k) in packets, for `k ≥ base`.
    #[must_use]
    pub fn cwnd(&self, k: u64) -> u16 {
        tcp_cwnd(self.start, self.ssthresh, k.saturating_sub(self.base))
    }

    /// The highest packet number sent once all packets up to `k ≥ base` are acknowledged.
    #[must_use]
    pub fn sent(&self, k: u64) -> u64 {
        if k <= self.base && self.flight != 0 {
            return self.base.saturating_add(self.flight.into());
        }
        k.max(self.base).saturating_add(self.cwnd(k).into())
    }

    fn after_loss(&self, first_loss: u64, cause: EraCause) -> Self {
        let end = self.sent(first_loss - 1);
        let in_flight = end.saturating_sub(first_loss - 1);
        let half = (in_flight / 2).clamp(MIN_SSTHRESH, MAX_WINDOW.into()) as u16;
        let (start, step) = match cause {
            EraCause::Timeout { attempt, .. } => (LOSS_WINDOW, 1 + u32::from(attempt)),
            _ => (half, 1),
        };
        Self {
            counter: self.counter.saturating_add(step),
            tag: 0,
            base: end,
            start,
            ssthresh: half,
            flight: 0,
        }
    }
}

/// A run of packets of an era: `gap` lost ones, then `length` received ones.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Run {
    /// Packets lost before the run.
    pub gap: u16,
    /// Packets received, at least 1.
    pub length: u32,
}

/// Why a request's account of an era is refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum AccountError {
    /// No runs, an empty run, or two runs without a gap between them.
    #[error("the runs of received packets are malformed")]
    BadRuns,
    /// The runs end before or after the packet whose continuation the request carries.
    #[error("the runs do not end with the packet of the continuation")]
    WrongEnd,
    /// More packets acknowledged at once than the last run or the protocol has, or none.
    #[error("the number of acknowledged packets is out of bounds")]
    BadGroup,
    /// A packet that could only have been sent if nothing was lost is reported received after a loss.
    #[error("a packet after the flight of the loss")]
    BeyondFlight,
}

/// What a request sets free.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Release {
    /// The era of the released packets; its tag is not set where `cause` is.
    pub era: Era,
    /// Set if the packets belong to an era that follows the request's.
    pub cause: Option<EraCause>,
    /// Numbers of trickles recreated because the packets that carried them were lost.
    pub recreated: Range<u64>,
    /// Numbers of the packets that the acknowledged packets' own trickles go on with.
    pub own: Range<u64>,
}

impl Release {
    /// The released packet numbers in order.
    pub fn numbers(&self) -> impl Iterator<Item = u64> + use<> {
        self.recreated.clone().chain(self.own.clone())
    }

    /// How many packets are released. Zero terminates the trickle.
    #[must_use]
    pub fn count(&self) -> u64 {
        let length = |range: &Range<u64>| range.end.saturating_sub(range.start);
        length(&self.recreated) + length(&self.own)
    }
}

/// The account of an era, checked: first loss, and the last run.
struct Account {
    first_loss: Option<u64>,
    last: Run,
}

fn account(era: &Era, runs: &[Run], number: u64) -> Result<Account, AccountError> {
    let mut position = era.base;
    let mut first_loss = None;
    for (index, run) in runs.iter().enumerate() {
        if run.length == 0 || (index > 0 && run.gap == 0) {
            return Err(AccountError::BadRuns);
        }
        if run.gap > 0 && first_loss.is_none() {
            first_loss = Some(position + 1);
        }
        position =
            position.checked_add(u64::from(run.gap) + u64::from(run.length)).ok_or(AccountError::BadRuns)?;
    }
    let last = *runs.last().ok_or(AccountError::BadRuns)?;
    if position != number {
        return Err(AccountError::WrongEnd);
    }
    if first_loss.is_some_and(|loss| number > era.sent(loss - 1)) {
        return Err(AccountError::BeyondFlight);
    }
    Ok(Account { first_loss, last })
}

/// What a request releases that acknowledges the `group` packets up to `number`, `runs` being the account of the era
/// from its base to `number` (the prefix property of Trickles §2.4).
pub fn acknowledge(era: &Era, runs: &[Run], number: u64, group: u8) -> Result<Release, AccountError> {
    let account = account(era, runs, number)?;
    if group == 0 || group > MAX_GROUP || u32::from(group) > account.last.length {
        return Err(AccountError::BadGroup);
    }
    let before = number - u64::from(group);
    let Some(first_loss) = account.first_loss else {
        let own = era.sent(before) + 1..era.sent(number) + 1;
        return Ok(Release { era: *era, cause: None, recreated: 0..0, own });
    };
    let cause = EraCause::Recovery { first_loss };
    let next = era.after_loss(first_loss, cause);
    let window = next.base - (first_loss - 1);
    let survivors_from = window - u64::from(next.start).min(window) + 1;
    // Offsets from the first loss → packet numbers of the next era. Offset 0 is its first packet, the survivors follow.
    let released = |offsets: Range<u64>| {
        let tail = offsets.start.max(survivors_from)..offsets.end;
        let first = match (offsets.start, offsets.is_empty(), tail.is_empty()) {
            (0, false, _) => 0,
            (_, _, true) => return 0..0,
            _ => tail.start + 1 - survivors_from,
        };
        let end = if tail.is_empty() { first + 1 } else { tail.end + 1 - survivors_from };
        next.base + 1 + first..next.base + 1 + end
    };
    let run_ends_here = account.last.gap > 0 && account.last.length == u32::from(group);
    let lost = if run_ends_here { u64::from(account.last.gap) } else { 0 };
    let own_start = before + 1 - first_loss;
    let mut recreated = released(own_start - lost..own_start);
    recreated.end = recreated.end.min(recreated.start + BURST_LIMIT);
    let own = released(own_start..number + 1 - first_loss);
    Ok(Release { era: next, cause: Some(cause), recreated, own })
}

/// What attempt `attempt` (from 1) of a timeout request releases: a new era that slow starts (Trickles §2.5).
pub fn time_out(era: &Era, runs: &[Run], number: u64, attempt: u8) -> Result<Release, AccountError> {
    if attempt == 0 {
        return Err(AccountError::BadGroup);
    }
    let first_loss = account(era, runs, number)?.first_loss.unwrap_or(number + 1);
    let cause = EraCause::Timeout { first_loss, attempt };
    let next = era.after_loss(first_loss, cause);
    let own = next.base + 1..next.base + 1 + u64::from(next.start);
    Ok(Release { era: next, cause: Some(cause), recreated: 0..0, own })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn era(start: u16, ssthresh: u16) -> Era {
        Era { counter: 0, tag: 0, base: 100, start, ssthresh, flight: 0 }
    }

    fn runs_of(base: u64, received: &[u64]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut last = base;
        for &number in received {
            match runs.last_mut() {
                Some(run) if number == last + 1 => run.length += 1,
                None if number == last + 1 => runs.push(Run { gap: 0, length: 1 }),
                _ => runs.push(Run { gap: (number - last - 1) as u16, length: 1 }),
            }
            last = number;
        }
        runs
    }

    #[test]
    fn slow_start_splits_each_trickle_in_two() {
        let era = era(3, 1000);
        let mut next = era.sent(100) + 1;
        assert_eq!(next, 104);
        for k in 101..200 {
            let release = acknowledge(&era, &[Run { gap: 0, length: (k - 100) as u32 }], k, 1).unwrap();
            assert_eq!((release.own.start, release.count()), (next, 2));
            next = release.own.end;
        }
    }

    #[test]
    fn congestion_avoidance_adds_one_trickle_a_window() {
        let era = era(10, 10);
        let released: u64 = (101..=110)
            .map(|k| acknowledge(&era, &[Run { gap: 0, length: (k - 100) as u32 }], k, 1).unwrap().count())
            .sum();
        assert_eq!(released, 11);
    }

    #[test]
    fn a_delayed_acknowledgement_releases_what_two_would() {
        let era = era(4, 6);
        for k in 102..200 {
            let runs = [Run { gap: 0, length: (k - 100) as u32 }];
            let earlier = [Run { gap: 0, length: (k - 101) as u32 }];
            let two = acknowledge(&era, &runs, k, 2).unwrap().own;
            let first = acknowledge(&era, &earlier, k - 1, 1).unwrap().own;
            let second = acknowledge(&era, &runs, k, 1).unwrap().own;
            assert_eq!((first.start, first.end, second.end), (two.start, second.start, two.end));
        }
    }

    #[test]
    fn a_first_flight_cut_short_is_completed_by_the_first_acknowledgement() {
        let era = Era { flight: 3, ..era(10, 1000) };
        assert_eq!(era.sent(100), 103);
        assert_eq!(acknowledge(&era, &[Run { gap: 0, length: 1 }], 101, 1).unwrap().own, 104..113);
        assert_eq!(acknowledge(&era, &[Run { gap: 0, length: 2 }], 102, 1).unwrap().own, 113..115);
    }

    /// Figure 7: of five in flight the first is lost; two packets go on, the retransmission and one survivor.
    #[test]
    fn one_loss_of_five_leaves_two_trickles() {
        let era = era(5, 5);
        let after = |k: u64| {
            acknowledge(&era, &[Run { gap: 1, length: (k - 101) as u32 }], k, 1)
                .unwrap()
                .numbers()
                .collect::<Vec<_>>()
        };
        assert_eq!(after(102), [106], "the first acknowledgement after the loss retransmits");
        assert!(after(103).is_empty() && after(104).is_empty());
        assert_eq!(after(105), [107], "the last one survives");
    }

    #[test]
    fn a_packet_beyond_the_flight_of_the_loss_is_refused() {
        let runs = [Run { gap: 1, length: 5 }];
        assert_eq!(acknowledge(&era(5, 5), &runs, 106, 1), Err(AccountError::BeyondFlight));
        assert_eq!(time_out(&era(5, 5), &runs, 106, 1), Err(AccountError::BeyondFlight));
    }

    #[test]
    fn malformed_accounts_are_refused() {
        let era = era(50, 50);
        let run = |gap, length| Run { gap, length };
        assert_eq!(acknowledge(&era, &[], 100, 1), Err(AccountError::BadRuns));
        assert_eq!(acknowledge(&era, &[run(0, 0)], 100, 1), Err(AccountError::BadRuns));
        assert_eq!(acknowledge(&era, &[run(0, 1), run(0, 1)], 102, 1), Err(AccountError::BadRuns));
        assert_eq!(acknowledge(&era, &[run(0, 1)], 102, 1), Err(AccountError::WrongEnd));
        assert_eq!(acknowledge(&era, &[run(0, 2)], 102, 3), Err(AccountError::BadGroup));
        assert_eq!(acknowledge(&era, &[run(0, 2)], 102, 0), Err(AccountError::BadGroup));
        assert_eq!(acknowledge(&era, &[run(0, 9)], 109, 5), Err(AccountError::BadGroup));
        assert_eq!(time_out(&era, &[run(0, 2)], 102, 0), Err(AccountError::BadGroup));
    }

    #[test]
    fn a_timeout_slow_starts_with_half_the_window_as_threshold() {
        let release = time_out(&era(20, 20), &[Run { gap: 0, length: 5 }], 105, 2).unwrap();
        assert_eq!(release.era.start, LOSS_WINDOW);
        assert_eq!(release.era.ssthresh, 10);
        assert_eq!(release.era.counter, 3);
        assert_eq!(release.own, 126..128, "numbers after everything that may have been sent");
    }

    proptest! {
        /// Whatever is lost, nothing is released twice, never more than half the window goes on, and all of it does
        /// where no run of losses exceeds the burst limit or ends the flight.
        #[test]
        fn recovery_halves_the_window(
            window in 2..200_u16,
            lead in 0..20_u64,
            lost in prop::collection::vec(any::<bool>(), 200),
            groups in prop::collection::vec(1..=2_u8, 200),
        ) {
            let era = era(window, 2);
            let first_loss = era.base + lead + 1;
            let end = era.sent(first_loss - 1);
            let mut received: Vec<u64> = (era.base + 1..first_loss).collect();
            received.extend((first_loss + 1..=end).filter(|n| !lost[(n - first_loss) as usize % 200]));
            let half = ((end + 1 - first_loss) / 2).max(2);
            let mut released = Vec::new();
            let mut index = lead as usize;
            while index < received.len() {
                let mut last = index;
                if groups[index % 200] == 2 && received.get(index + 1) == Some(&(received[index] + 1)) {
                    last += 1;
                }
                let runs = runs_of(era.base, &received[..=last]);
                let release = acknowledge(&era, &runs, received[last], (last - index + 1) as u8).unwrap();
                prop_assert_eq!(release.era.base, end);
                prop_assert_eq!(u64::from(release.era.start), half);
                released.extend(release.numbers());
                index = last + 1;
            }
            prop_assert!(released.windows(2).all(|pair| pair[0] < pair[1]), "{released:?}");
            prop_assert!(released.iter().all(|n| (end + 1..=end + half).contains(n)), "{released:?}");
            let long_run = runs_of(era.base, &received).iter().any(|run| u64::from(run.gap) > BURST_LIMIT);
            if received.last() == Some(&end) && !long_run {
                prop_assert_eq!(released.len() as u64, half);
            }
        }
    }
}
