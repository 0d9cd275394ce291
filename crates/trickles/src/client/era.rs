//! One era at the client: which of its packets arrived, what is proved about them, and whose trickles are free to use.

use crate::congestion::{Era, Run};
use crate::continuation::{MAX_RUNS, ProvedRun, RawContinuation, RawDelta, apply_delta, is_kin};
use crate::cwnd::MAX_WINDOW;
use crate::wire::Account;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

/// Later packets that make an earlier one count as lost (RFC 5681 §3.2).
const DUPLICATE_THRESHOLD: u64 = 3;

/// Smallest window in packets whose slow start is ended early (RFC 9406 §4.3, LOW_CWND).
const SLOW_START_WINDOW: u16 = 16;

/// Requests among which what is on its way is divided at least: one that is lost must not take everything with it.
const REQUESTS_A_WINDOW: usize = 4;
/// Packets that have to have come since the last loss for each that a request acknowledges beyond two: where requests
/// are lost, few packets should be lost with each.
const CLEAN_PACKETS: u64 = 64;

/// What a packet that is on its way was asked to bring.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    /// A range of output of a request.
    pub(super) want: Option<(u32, Range<u64>)>,
    /// Requests whose input was sent: the packet may bring the answer, and output of the server's own accord.
    pub(super) pushes: Vec<u32>,
}

/// A packet that arrived before all earlier ones were accounted for.
#[derive(Debug)]
struct Held {
    raw: RawContinuation,
    nonce: u64,
    arrived: Instant,
}

/// A packet whose trickle has not been used yet; all earlier packets are accounted for.
#[derive(Clone, Debug)]
pub(super) struct Ready {
    pub(super) number: u64,
    pub(super) arrived: Instant,
    pub(super) raw: RawContinuation,
    /// The account up to this packet: whole runs, then part of one.
    whole_runs: usize,
    last: ProvedRun,
}

impl Ready {
    /// Packets that a request with this trickle may acknowledge at most: those of the last run.
    pub(super) fn acknowledges(&self) -> u32 {
        self.last.run.length
    }
}

/// What the last request of an era acknowledged and set free.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    /// The newest packet that it acknowledged, and how many.
    pub(super) by: u64,
    pub(super) group: u8,
    /// The era of the packets that it set free.
    pub(super) era: u32,
    pub(super) packets: Range<u64>,
}

/// A continuation and the shortest account that proves it: what a timeout request carries.
#[derive(Clone, Debug)]
pub(super) struct Anchor {
    pub(super) era: Era,
    pub(super) number: u64,
    pub(super) raw: RawContinuation,
    runs: Vec<ProvedRun>,
}

impl Anchor {
    pub(super) fn account(&self) -> Account {
        Account { continuation: self.raw, held_ms: 0, runs: self.runs.clone() }
    }
}

/// What accounting for packets found.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// What was expected of packets that are lost.
    pub(super) lost: Vec<Expected>,
}

#[derive(Debug)]
pub(super) struct EraState {
    pub(super) era: Era,
    /// Whether a packet of the era was seen, so that its tag is known.
    pub(super) seen: bool,
    /// Packets of the era that arrived.
    pub(super) arrivals: u64,
    /// Lowest packet number that is not accounted for.
    next: u64,
    runs: Vec<ProvedRun>,
    gap: u64,
    first_loss: Option<u64>,
    received: BTreeMap<u64, Held>,
    pub(super) ready: VecDeque<Ready>,
    pub(super) expected: BTreeMap<u64, Expected>,
    pub(super) asked: Option<Asked>,
    anchor: Option<Anchor>,
    blocked_since: Option<Instant>,
    /// A continuation that deltas are applied to, and the number of its packet.
    known: Option<RawContinuation>,
    known_number: u64,
    /// The next packet begins a run of its own: slow start ends before it.
    ends_slow_start: bool,
    /// The packet with which slow start ended.
    slow_start_end: Option<u64>,
    /// The code of the round-trip time that all reports of its loss state.
    pub(super) rtt: Option<u8>,
}

impl EraState {
    pub(super) fn new(era: Era) -> Self {
        Self {
            era,
            seen: false,
            arrivals: 0,
            next: era.base + 1,
            runs: Vec::new(),
            gap: 0,
            first_loss: None,
            received: BTreeMap::new(),
            ready: VecDeque::new(),
            expected: BTreeMap::new(),
            asked: None,
            anchor: None,
            blocked_since: None,
            ends_slow_start: false,
            slow_start_end: None,
            rtt: None,
            known: None,
            known_number: 0,
        }
    }

    /// Ends slow start before it fills a queue to the brim (RFC 9406): the window grows by a packet a round trip from
    /// here. A small window has no need of it.
    pub(super) fn end_slow_start(&mut self) {
        let window = self.window(self.next - 1);
        let slow = self.era.ssthresh == MAX_WINDOW && (SLOW_START_WINDOW..MAX_WINDOW).contains(&window);
        self.ends_slow_start = slow && self.slow_start_end.is_none() && !self.recovering();
    }

    /// The era with the threshold that the client has set.
    fn bounded(&self) -> Era {
        self.slow_start_end.map_or(self.era, |end| self.era.slow_start_ended(end, self.rtt.unwrap_or(0)))
    }

    /// The window in packets once packet `number` is acknowledged.
    pub(super) fn window(&self, number: u64) -> u16 {
        self.bounded().cwnd(number)
    }

    /// The last packet that is accounted for.
    pub(super) fn accounted(&self) -> u64 {
        self.next - 1
    }

    pub(super) fn recovering(&self) -> bool {
        self.first_loss.is_some()
    }

    /// The highest packet number that the server can have sent in this era.
    fn end(&self) -> u64 {
        self.bounded().sent(self.first_loss.unwrap_or(self.next) - 1)
    }

    /// Whether every packet is accounted for and used: only possible once a loss has ended the era.
    pub(super) fn finished(&self) -> bool {
        self.recovering() && self.next > self.end() && self.ready.is_empty()
    }

    /// The continuation that a delta of this era tells.
    pub(super) fn apply(&self, delta: &RawDelta) -> Option<RawContinuation> {
        apply_delta(self.known.as_ref()?, delta)
    }

    /// A continuation of the era.
    pub(super) fn known(&self) -> Option<&RawContinuation> {
        self.known.as_ref()
    }

    /// Whether a packet was seen or given up.
    pub(super) fn knows(&self, number: u64) -> bool {
        number < self.next || self.received.contains_key(&number)
    }

    /// Takes a packet; `false` for one that was seen, given up or cannot have been sent, and for one that answers another
    /// open than the first that came: it goes on with other packets, and deltas of the two do not fit together.
    pub(super) fn insert(&mut self, number: u64, raw: RawContinuation, nonce: u64, now: Instant) -> bool {
        // No server has more packets on their way, or unanswered, than the largest window.
        let held = self.received.len() + self.ready.len();
        if self.knows(number) || number > self.end() || held >= MAX_WINDOW.into() {
            return false;
        }
        if self.known.as_ref().is_some_and(|known| !is_kin(known, &raw)) {
            return false;
        }
        self.arrivals += 1;
        // The newest key epoch is that of the newest packet.
        if number >= self.known_number {
            (self.known, self.known_number) = (Some(raw), number);
        }
        self.received.insert(number, Held { raw, nonce, arrived: now });
        true
    }

    /// Accounts for packets in order. `later` counts packets of the next era that arrived: they were sent after all of
    /// this one's. After `reordering` a missing packet is given up for a single later one.
    pub(super) fn advance(&mut self, later: u64, now: Instant, reordering: std::time::Duration) -> Progress {
        let mut progress = Progress::default();
        // A server that lies may have every packet of the largest window given up at once: the end is reckoned once, as
        // it stays where it is from the first loss on.
        let mut end = None;
        loop {
            if let Some(held) = self.received.remove(&self.next) {
                self.resolve(held);
            } else {
                let evidence = self.received.len() as u64 + if self.recovering() { later } else { 0 };
                if evidence == 0 || self.next > *end.get_or_insert_with(|| self.end()) {
                    self.blocked_since = None;
                    return progress;
                }
                let since = *self.blocked_since.get_or_insert(now);
                if evidence < DUPLICATE_THRESHOLD && now < since + reordering {
                    return progress;
                }
                self.first_loss.get_or_insert(self.next);
                self.gap += 1;
                progress.lost.extend(self.expected.remove(&self.next));
            }
            // The next gap has its own time to fill; a run of lost packets shares one.
            if self.gap == 0 {
                self.blocked_since = None;
            }
            self.next += 1;
        }
    }

    fn resolve(&mut self, held: Held) {
        let gap = std::mem::take(&mut self.gap);
        let slow_start_ends =
            std::mem::take(&mut self.ends_slow_start) && self.runs.len() == 1 && !self.recovering();
        if slow_start_ends {
            self.slow_start_end = Some(self.next - 1);
        }
        match self.runs.last_mut().filter(|_| gap == 0 && !slow_start_ends) {
            Some(last) => {
                last.run.length = last.run.length.saturating_add(1);
                last.nonces ^= held.nonce;
            }
            None => {
                let gap = u16::try_from(gap).unwrap_or(u16::MAX);
                self.runs.push(ProvedRun { run: Run { gap, length: 1 }, nonces: held.nonce });
            }
        }
        let last = self.runs[self.runs.len() - 1];
        if self.runs.len() == 1 || !self.recovering() {
            let (era, number) = (self.era, self.next);
            self.anchor = Some(Anchor { era, number, raw: held.raw, runs: self.runs.clone() });
        }
        // An account beyond the format's bound cannot be sent: the trickle is given up, a timeout starts over.
        if self.runs.len() <= MAX_RUNS {
            let whole_runs = self.runs.len() - 1;
            self.ready.push_back(Ready {
                number: self.next,
                arrived: held.arrived,
                raw: held.raw,
                whole_runs,
                last,
            });
        }
    }

    /// The account for `ready`, with the time that its continuation was held.
    pub(super) fn account(&self, ready: &Ready, now: Instant) -> Account {
        let mut runs = self.runs[..ready.whole_runs].to_vec();
        runs.push(ready.last);
        let held_ms = now.saturating_duration_since(ready.arrived).as_millis();
        Account { continuation: ready.raw, held_ms: u16::try_from(held_ms).unwrap_or(u16::MAX), runs }
    }

    /// The first trickles that may be acknowledged as one, at most `most`: the last of them, and how many.
    pub(super) fn next_group(&self, most: usize) -> Option<(&Ready, u8)> {
        let first = self.ready.front()?;
        let together =
            (first.number..).zip(&self.ready).take(self.group_limit(first.number).min(most.max(1)));
        let together = together
            .take_while(|(number, ready)| ready.number == *number && ready.whole_runs == first.whole_runs);
        together.map(|(_, ready)| ready).zip(1..).last()
    }

    /// Packets from `first` on that one request may acknowledge, as far as its loss is to be borne.
    fn group_limit(&self, first: u64) -> usize {
        if self.recovering() {
            return 2;
        }
        let under_way = (self.ready.len() + self.expected.len()) / REQUESTS_A_WINDOW;
        let clean = match self.era.counter {
            0 => usize::MAX,
            _ => usize::try_from((first - self.era.base) / CLEAN_PACKETS).unwrap_or(usize::MAX),
        };
        under_way.min(clean).clamp(2, self.era.max_group().into())
    }

    /// When the missing packet that blocks the era is given up.
    pub(super) fn give_up_at(&self, reordering: std::time::Duration) -> Option<Instant> {
        self.blocked_since.map(|since| since + reordering)
    }

    /// The best continuation for a timeout request: the last one before the first loss, else the first one after it.
    pub(super) fn anchor(&self) -> Option<Anchor> {
        self.anchor.clone().or_else(|| {
            let (&number, held) = self.received.first_key_value()?;
            let gap = u16::try_from(number - self.era.base - 1).ok()?;
            let run = ProvedRun { run: Run { gap, length: 1 }, nonces: held.nonce };
            Some(Anchor { era: self.era, number, raw: held.raw, runs: vec![run] })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: RawContinuation = {
        let mut raw = [0; size_of::<RawContinuation>()];
        raw[0] = 1;
        raw
    };

    /// How many of `count` packets that have come together one request acknowledges, at the begin of an era.
    fn group_of(count: u64, counter: u32, cubic: bool, most: usize) -> u8 {
        let cubic = cubic.then(crate::cubic::Cubic::default);
        let era = Era { counter, tag: 0, base: 0, start: 200, ssthresh: 200, flight: 0, cubic };
        let mut state = EraState::new(era);
        for number in 1..=count {
            assert!(state.insert(number, RAW, 0, Instant::now()));
        }
        state.advance(0, Instant::now(), std::time::Duration::ZERO);
        let (ready, group) = state.next_group(most).unwrap();
        assert_eq!(ready.number, u64::from(group), "the newest of them is told of");
        group
    }

    #[test]
    fn a_batch_is_acknowledged_together_but_for_what_its_loss_would_cost() {
        assert_eq!(group_of(1, 0, false, 32), 1);
        assert_eq!(group_of(3, 0, false, 32), 2, "of few, a lost request would take too many");
        assert_eq!(group_of(64, 0, false, 32), 16);
        assert_eq!(group_of(180, 0, false, 100), 32, "the protocol's most");
        assert_eq!(group_of(180, 0, false, 20), 20, "room for ranges");
        assert_eq!(group_of(180, 0, false, 1), 1);
        assert_eq!(group_of(180, 0, true, 32), 7, "CUBIC's most");
        assert_eq!(group_of(180, 1, false, 32), 2, "something was lost just now");
    }

    #[test]
    fn no_group_goes_beyond_a_run() {
        let ssthresh = MAX_WINDOW;
        let era = Era { counter: 0, tag: 0, base: 0, start: 200, ssthresh, flight: 0, cubic: None };
        let mut state = EraState::new(era);
        let now = Instant::now();
        for number in 1..=9 {
            state.insert(number, RAW, 0, now);
        }
        state.advance(0, now, std::time::Duration::ZERO);
        // The next packet begins a run, without a gap.
        state.end_slow_start();
        for number in (10..=69).chain(71..=180) {
            state.insert(number, RAW, 0, now);
        }
        let mut groups = Vec::new();
        let mut take_all = |state: &mut EraState| {
            while let Some((ready, group)) = state.next_group(32) {
                groups.push((ready.number, group));
                state.ready.drain(..usize::from(group));
            }
        };
        // Before the gap is known of.
        state.advance(0, now, std::time::Duration::MAX / 4);
        take_all(&mut state);
        assert!(groups.iter().any(|&(number, _)| number == 9), "a group ends with the run: {groups:?}");
        assert!(groups.contains(&(69, groups[groups.len() - 1].1)), "and with what has come: {groups:?}");
    }

    #[test]
    fn groups_grow_again_after_a_loss() {
        let era = Era { counter: 1, tag: 0, base: 0, start: 200, ssthresh: 200, flight: 0, cubic: None };
        let mut state = EraState::new(era);
        let now = Instant::now();
        let mut groups = Vec::new();
        for number in 1..=700 {
            state.insert(number, RAW, 0, now);
            if number % 100 == 0 {
                state.advance(0, now, std::time::Duration::ZERO);
                groups.push(state.next_group(32).unwrap().1);
                state.ready.clear();
            }
        }
        assert_eq!(groups, [2, 2, 3, 4, 6, 7, 9]);
    }

    #[test]
    fn a_server_that_sends_without_end_is_not_kept_book_of_without_end() {
        let ssthresh = MAX_WINDOW;
        let era = Era { counter: 0, tag: 0, base: 0, start: 10, ssthresh, flight: 0, cubic: None };
        let mut state = EraState::new(era);
        let now = Instant::now();
        let raw = RAW;
        let kept = (1..200_000)
            .take_while(|&number| {
                let kept = state.insert(number, raw, 0, now);
                state.advance(0, now, std::time::Duration::ZERO);
                kept
            })
            .count();
        assert_eq!(kept, usize::from(MAX_WINDOW));
        // Once some are answered there is room again.
        state.ready.pop_front();
        assert!(state.insert(kept as u64 + 1, raw, 0, now));
    }
}
