//! What a request sets free: continue, split or terminate a trickle, recover from a loss, start over after a timeout
//! (Trickles §2.3 to §2.5). Server and client compute the same function, the client to know what to ask for and wait
//! for.
//!
//! A connection is cut into *eras* at its loss events. In an era nothing is lost before packet a, the *first loss*, and
//! the number of every packet follows from the closed form: once k is acknowledged, packets up to k + TCPCwnd(k) have
//! been sent. At the loss W = TCPCwnd(a − 1) packets a…E are in flight. Their acknowledgements, which all report
//! the loss, set free H = W/2 packets E+1…E+H of the next era, spread evenly over the flight as RFC 6937 does it; the
//! first of them is the fast retransmission. The other trickles terminate. What lost packets of the flight would have
//! set free, the acknowledgements after them set free beside their own, few at a time (burst limit), so that the window
//! is halved once whatever the flight loses; only what is held up by the loss of its very end is not made good.

use crate::cubic::{self, Cubic, RTT_CODES};
use crate::cwnd::{MAX_WINDOW, tcp_cwnd};
use crate::nonce::EraCause;
use std::ops::Range;

/// Window in packets after a timeout; RFC 5681 §3.1 allows one, two survive a second loss.
pub const LOSS_WINDOW: u16 = 2;
/// Smallest slow start threshold, RFC 5681 (4).
const MIN_SSTHRESH: u64 = 2;
/// Most packets that one request may acknowledge. RFC 5681 §4.2 asks for an acknowledgement of every second; where
/// packets come in batches, one request for all of a batch saves its server most of the work, as receive offload does
/// for TCP.
pub const MAX_GROUP: u8 = 32;
/// Most packets that one acknowledged packet releases in a recovery beside its own, of those that losses hold up
/// (Trickles §2.5, burstLimit).
pub const BURST_LIMIT: u64 = 4;

/// Most packets that one request sets free of an era that follows its own.
pub const MAX_SUCCESSORS: usize = MAX_GROUP as usize * (1 + BURST_LIMIT as usize);

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
    /// Packets sent at the era's start, `base + 1` on; 0 stands for `start` packets. Fewer than `start` were sent if
    /// the client's address was not proved yet; the rest follows with the answer to the first acknowledgement.
    pub flight: u8,
    /// Set where CUBIC governs the window instead of Reno.
    pub cubic: Option<Cubic>,
}

/// A CUBIC client adds its round-trip time's code to the argument of a request, eight times.
const ARGUMENT_CODES: u8 = 8;

impl Era {
    /// TCPCwnd(k) in packets, for `k ≥ base`.
    #[must_use]
    pub fn cwnd(&self, k: u64) -> u16 {
        let acknowledged = k.saturating_sub(self.base);
        match &self.cubic {
            None => tcp_cwnd(self.start, self.ssthresh, acknowledged),
            Some(cubic) => cubic.cwnd(self.start, self.ssthresh, acknowledged),
        }
    }

    /// The highest packet number sent once all packets up to `k ≥ base` are acknowledged.
    #[must_use]
    pub fn sent(&self, k: u64) -> u64 {
        if k <= self.base && self.flight != 0 {
            return self.base.saturating_add(self.flight.into());
        }
        k.max(self.base).saturating_add(self.cwnd(k).into())
    }

    /// The era whose slow start the client has ended once it had packets up to `k`: what the window is then is the
    /// threshold. All that was sent before is the same. CUBIC goes on with the round-trip time of code `rtt`.
    #[must_use]
    pub fn slow_start_ended(&self, k: u64, rtt: u8) -> Self {
        let cubic = self.cubic.map(|cubic| Cubic { rtt, ..cubic });
        Self { ssthresh: self.ssthresh.min(self.cwnd(k)), cubic, ..*self }
    }

    /// Most packets that one request of the era may acknowledge.
    #[must_use]
    pub fn max_group(&self) -> u8 {
        if self.cubic.is_some() { ARGUMENT_CODES - 1 } else { MAX_GROUP }
    }

    /// What a request's argument says: packets acknowledged or the attempt, and the code of a round-trip time.
    #[must_use]
    pub fn split_argument(&self, argument: u8) -> (u8, u8) {
        match self.cubic {
            None => (argument, 0),
            Some(_) => (argument % ARGUMENT_CODES, argument / ARGUMENT_CODES),
        }
    }

    /// The argument of a request that reports a loss; `None` where the first part has no room.
    #[must_use]
    pub fn join_argument(&self, part: u8, rtt: u8) -> Option<u8> {
        match self.cubic {
            None => Some(part),
            Some(_) => (part < ARGUMENT_CODES).then(|| part + rtt.min(RTT_CODES - 1) * ARGUMENT_CODES),
        }
    }

    fn after_loss(&self, first_loss: u64, cause: EraCause, rtt: u8) -> Self {
        let end = self.sent(first_loss - 1);
        let in_flight = end.saturating_sub(first_loss - 1);
        let left = if self.cubic.is_some() { cubic::threshold(in_flight) } else { in_flight / 2 };
        let half = left.clamp(MIN_SSTHRESH, MAX_WINDOW.into()) as u16;
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
            cubic: self.cubic.map(|cubic| cubic.after_loss(self.start.max(self.ssthresh), in_flight, rtt)),
        }
    }
}

/// A run of packets of an era: `gap` lost ones, then `length` received ones.
///
/// In an era that began without a threshold, the second run may have a gap of 0: slow start ends between the two.
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
    /// No runs, an empty run, or two runs without a gap between them that end no slow start.
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
    /// An earlier account of the era had another first loss.
    #[error("the account contradicts an earlier one")]
    Contradiction,
}

/// What a request sets free.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Release {
    /// The era of the released packets; its tag is not set where `cause` is.
    pub era: Era,
    /// Set if the packets belong to an era that follows the request's.
    pub cause: Option<EraCause>,
    /// Numbers of the released packets.
    pub packets: Range<u64>,
}

impl Release {
    /// The first packet that the request's account says was lost.
    #[must_use]
    pub fn first_loss(&self) -> Option<u64> {
        match self.cause? {
            EraCause::Open => None,
            EraCause::Recovery { first_loss } | EraCause::Timeout { first_loss, .. } => Some(first_loss),
        }
    }

    /// The released packet numbers in order.
    pub fn numbers(&self) -> impl Iterator<Item = u64> + use<> {
        self.packets.clone()
    }

    /// How many packets are released. Zero terminates the trickle.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.packets.end.saturating_sub(self.packets.start)
    }
}

/// How the flight of a loss sets the next era's first packets free.
#[derive(Clone, Copy)]
struct Recovery {
    first_loss: u64,
    /// Packets of the next era that go on.
    half: u64,
    /// Offset of the last packet of the flight from the first loss, at least 1.
    last: u64,
}

impl Recovery {
    fn new(first_loss: u64, next: &Era) -> Self {
        Self { first_loss, half: next.start.into(), last: (next.base - first_loss).max(1) }
    }

    /// Packets that are due once the packet `number` of the flight is accounted for; the retransmission is due at once.
    fn due(&self, number: u64) -> u64 {
        1 + (number - self.first_loss) * (self.half - 1) / self.last
    }

    /// Packets released once `acknowledged` packets of a run up to `number` are acknowledged, where `before` had been
    /// before the run. What is due grows by at most one a packet, so that once all of it is released it stays so.
    fn released(&self, before: u64, acknowledged: u64, number: u64) -> u64 {
        match acknowledged {
            0 => before,
            _ => self.due(number).min(before + acknowledged * (1 + BURST_LIMIT)),
        }
    }
}

/// The account of an era, checked: first loss, and the last run.
struct Account {
    /// Its threshold is where the account says that slow start ended.
    era: Era,
    first_loss: Option<u64>,
    last: Run,
}

fn account(era: &Era, runs: &[Run], number: u64, rtt: u8) -> Result<Account, AccountError> {
    let mut position = era.base;
    let mut first_loss = None;
    let mut era = *era;
    for (index, run) in runs.iter().enumerate() {
        // Where there is a threshold, lowering it would move the acknowledgements that let the window grow, and a
        // client that told each of another one could have every one of them do so.
        let ends_slow_start = index == 1 && first_loss.is_none() && era.ssthresh == MAX_WINDOW;
        if run.length == 0 || (index > 0 && run.gap == 0 && !ends_slow_start) {
            return Err(AccountError::BadRuns);
        }
        if index > 0 && run.gap == 0 {
            era = era.slow_start_ended(position, rtt);
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
    Ok(Account { era, first_loss, last })
}

/// What a request releases that acknowledges as many packets up to `number` as `argument` says, `runs` being the
/// account of the era from its base to `number` (the prefix property of Trickles §2.4).
pub fn acknowledge(era: &Era, runs: &[Run], number: u64, argument: u8) -> Result<Release, AccountError> {
    let (group, rtt) = era.split_argument(argument);
    let account = account(era, runs, number, rtt)?;
    if group == 0 || group > era.max_group() || u32::from(group) > account.last.length {
        return Err(AccountError::BadGroup);
    }
    let group = u64::from(group);
    let Some(first_loss) = account.first_loss else {
        let packets = account.era.sent(number - group) + 1..account.era.sent(number) + 1;
        return Ok(Release { era: *era, cause: None, packets });
    };
    let cause = EraCause::Recovery { first_loss };
    let next = account.era.after_loss(first_loss, cause, rtt);
    let recovery = Recovery::new(first_loss, &next);
    let (mut position, mut before) = (era.base, 0);
    for run in &runs[..runs.len() - 1] {
        position += u64::from(run.gap) + u64::from(run.length);
        if position > first_loss {
            before = recovery.released(before, run.length.into(), position);
        }
    }
    let length = u64::from(account.last.length);
    let from = recovery.released(before, length - group, number - group);
    let to = recovery.released(before, length, number);
    Ok(Release { era: next, cause: Some(cause), packets: next.base + 1 + from..next.base + 1 + to })
}

/// What the attempt (from 1) of a timeout request that `argument` names releases: a new era that slow starts (Trickles
/// §2.5).
pub fn time_out(era: &Era, runs: &[Run], number: u64, argument: u8) -> Result<Release, AccountError> {
    let (attempt, rtt) = era.split_argument(argument);
    if attempt == 0 {
        return Err(AccountError::BadGroup);
    }
    let account = account(era, runs, number, rtt)?;
    let first_loss = account.first_loss.unwrap_or(number + 1);
    let cause = EraCause::Timeout { first_loss, attempt };
    let next = account.era.after_loss(first_loss, cause, rtt);
    let packets = next.base + 1..next.base + 1 + u64::from(next.start);
    Ok(Release { era: next, cause: Some(cause), packets })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn era(start: u16, ssthresh: u16) -> Era {
        Era { counter: 0, tag: 0, base: 100, start, ssthresh, flight: 0, cubic: None }
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
            assert_eq!((release.packets.start, release.count()), (next, 2));
            next = release.packets.end;
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
            let two = acknowledge(&era, &runs, k, 2).unwrap().packets;
            let first = acknowledge(&era, &earlier, k - 1, 1).unwrap().packets;
            let second = acknowledge(&era, &runs, k, 1).unwrap().packets;
            assert_eq!((first.start, first.end, second.end), (two.start, second.start, two.end));
        }
    }

    #[test]
    fn a_first_flight_cut_short_is_completed_by_the_first_acknowledgement() {
        let era = Era { flight: 3, ..era(10, 1000) };
        assert_eq!(era.sent(100), 103);
        assert_eq!(acknowledge(&era, &[Run { gap: 0, length: 1 }], 101, 1).unwrap().packets, 104..113);
        assert_eq!(acknowledge(&era, &[Run { gap: 0, length: 2 }], 102, 1).unwrap().packets, 113..115);
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
        assert_eq!(after(105), [107], "half of the window goes on");
    }

    #[test]
    fn a_packet_beyond_the_flight_of_the_loss_is_refused() {
        let runs = [Run { gap: 1, length: 5 }];
        assert_eq!(acknowledge(&era(5, 5), &runs, 106, 1), Err(AccountError::BeyondFlight));
        assert_eq!(time_out(&era(5, 5), &runs, 106, 1), Err(AccountError::BeyondFlight));
    }

    #[test]
    fn a_run_without_a_gap_ends_slow_start_and_takes_nothing_back() {
        let era = era(10, MAX_WINDOW);
        let runs = |before, after| [Run { gap: 0, length: before }, Run { gap: 0, length: after }];
        // 20 packets are acknowledged at a window of 30, until 150 have been sent; 30 more let it grow to 31.
        let mut next = era.sent(120) + 1;
        assert_eq!(next, 151);
        for k in 121..=150 {
            let release = acknowledge(&era, &runs(20, k as u32 - 120), k, 1).unwrap();
            assert_eq!((release.era, release.packets.start), (era, next));
            next = release.packets.end;
        }
        assert_eq!(next, 182);
        let lost = [Run { gap: 0, length: 20 }, Run { gap: 0, length: 10 }, Run { gap: 1, length: 1 }];
        assert_eq!(acknowledge(&era, &lost, 132, 1).unwrap().era.start, 15, "a loss halves the window of 30");
    }

    #[test]
    fn slow_start_ends_only_once_and_before_a_loss() {
        let (era, run) = (era(10, MAX_WINDOW), |gap, length| Run { gap, length });
        assert_eq!(acknowledge(&era, &[run(0, 2), run(0, 1), run(0, 1)], 104, 1), Err(AccountError::BadRuns));
        assert_eq!(acknowledge(&era, &[run(1, 2), run(0, 1)], 104, 1), Err(AccountError::BadRuns));
        assert_eq!(acknowledge(&era, &[run(0, 2), run(1, 1), run(0, 1)], 105, 1), Err(AccountError::BadRuns));
    }

    #[test]
    fn malformed_accounts_are_refused() {
        let era = era(50, 50);
        let run = |gap, length| Run { gap, length };
        assert_eq!(acknowledge(&era, &[], 100, 1), Err(AccountError::BadRuns));
        assert_eq!(acknowledge(&era, &[run(0, 0)], 100, 1), Err(AccountError::BadRuns));
        assert_eq!(
            acknowledge(&era, &[run(0, 1), run(0, 1)], 102, 1),
            Err(AccountError::BadRuns),
            "a threshold"
        );
        assert_eq!(acknowledge(&era, &[run(0, 1)], 102, 1), Err(AccountError::WrongEnd));
        assert_eq!(acknowledge(&era, &[run(0, 2)], 102, 3), Err(AccountError::BadGroup));
        assert_eq!(acknowledge(&era, &[run(0, 2)], 102, 0), Err(AccountError::BadGroup));
        assert_eq!(acknowledge(&era, &[run(0, 99)], 199, MAX_GROUP + 1), Err(AccountError::BadGroup));
        assert!(acknowledge(&era, &[run(0, 99)], 199, MAX_GROUP).is_ok());
        let cubic = Era { cubic: Some(Cubic::default()), ..era };
        assert_eq!(acknowledge(&cubic, &[run(0, 99)], 199, ARGUMENT_CODES), Err(AccountError::BadGroup));
        assert_eq!(time_out(&era, &[run(0, 2)], 102, 0), Err(AccountError::BadGroup));
    }

    #[test]
    fn a_timeout_slow_starts_with_half_the_window_as_threshold() {
        let release = time_out(&era(20, 20), &[Run { gap: 0, length: 5 }], 105, 2).unwrap();
        assert_eq!(release.era.start, LOSS_WINDOW);
        assert_eq!(release.era.ssthresh, 10);
        assert_eq!(release.era.counter, 3);
        assert_eq!(release.packets, 126..128, "numbers after everything that may have been sent");
    }

    #[test]
    fn what_losses_hold_up_is_released_by_what_arrives_after_them() {
        let era = era(40, 40);
        let run = |gap, length| Run { gap, length };
        let release = |runs: &[Run], number| {
            acknowledge(&era, runs, number, 1).unwrap().numbers().map(|n| n - 140).collect::<Vec<_>>()
        };
        // Of packets 101 to 140 all up to 130 are lost, at whose offset of 29 as many as 15 of 20 are due.
        assert_eq!(release(&[run(30, 1)], 131), [1, 2, 3, 4, 5]);
        assert_eq!(release(&[run(30, 2)], 132), [6, 7, 8, 9, 10]);
        assert_eq!(
            release(&[run(30, 2), run(1, 1)], 134),
            [11, 12, 13, 14, 15],
            "the debt goes on after a gap"
        );
        assert_eq!(release(&[run(30, 2), run(1, 2)], 135), [16, 17], "from here each releases its own");
        assert_eq!(release(&[run(30, 2), run(1, 7)], 140), [20]);
    }

    proptest! {
        /// Whatever is lost, nothing is released twice, never more than half the window goes on, and all of it does
        /// where the end of the flight arrives and no run of losses exceeds the burst limit.
        #[test]
        fn recovery_halves_the_window(
            window in 2..200_u16,
            lead in 0..20_u64,
            lost in prop::collection::vec(any::<bool>(), 200),
            groups in prop::collection::vec(1..=MAX_GROUP, 200),
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
                while last - index + 1 < groups[index % 200].into()
                    && received.get(last + 1) == Some(&(received[last] + 1))
                {
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
