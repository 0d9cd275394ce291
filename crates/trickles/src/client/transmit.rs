//! What a client sends: it gives each trickle something to do, or holds on to it.

use super::era::{Asked, EraState, Expected, Ready};
use super::{Client, MAX_ERAS};
use crate::congestion::{self, Era, Release};
use crate::continuation::{Continuation, RawContinuation};
use crate::cubic;
use crate::user::region_start;
use crate::wire::{
    self, Account, Ask, DATA_FRAME_BYTES, DELTA_HEAD_BYTES, HEADER_BYTES, Input, MAX_WANTS,
    RESPONSE_HEAD_BYTES, Request,
};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Packets at the start of a slow start that are acknowledged at once, one by one: it has no time to lose. After a
/// recovery that would be more than TCP takes, whose receivers wait for a second packet as soon as nothing is missing.
const QUICK_PACKETS: u64 = 8;
/// Ranges that an open request asks for: what a server may send to an unproved address.
const OPEN_WANTS: usize = 3;

/// Opens of full length, before shorter ones are tried.
const LONG_OPENS: u32 = 2;

/// Less of an input than this is not worth a packet, unless no more follows. The least open has room for it beside the
/// longest continuation that a server may give on its connection.
const LEAST_INPUT_BYTES: usize = 64;

/// Most packets that a request acknowledges that repeats another one.
const MAX_REPEATING: u8 = 4;

/// A range that is asked for a second time.
#[derive(Debug)]
struct RepeatedWant {
    range: (u64, u32),
    continuation: Vec<u8>,
}

/// Where one in so many packets that were asked for again comes twice, their servers do not know of each other; not
/// judged by the first few.
const COPIES_SHARE: u64 = 4;
const COPIES_AT_FIRST: u64 = 64;

/// Packets of an era that a request acknowledges.
struct Acknowledgement {
    /// The newest of them, and how many.
    ready: Ready,
    group: u8,
    account: Account,
    /// Bytes of the request that ask for nothing.
    beside_bytes: usize,
    /// The code of the round-trip time that it states.
    rtt: u8,
    argument: u8,
    /// What it sets free; `None`: the trickle ends.
    release: Option<Release>,
}

/// What a datagram asks for, by what its answer will be counted against.
#[derive(Debug, Default)]
struct Contents {
    wants: Vec<(u32, Range<u64>)>,
    inputs: Vec<u32>,
}

/// The code of the shortest round-trip time, or of what the server has measured if that is less: it takes little more.
fn rtt_of(raw: &RawContinuation, least: Duration) -> u8 {
    let least_us = u32::try_from(least.as_micros()).unwrap_or(u32::MAX);
    let measured_us = Continuation::decode(raw).map_or(0, |continuation| continuation.srtt_us);
    cubic::rtt_code(measured_us.min(least_us))
}

impl Client {
    /// The next datagram to send, if any.
    #[must_use]
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Vec<u8>> {
        if std::mem::take(&mut self.close_due) {
            return self.close_datagram(now);
        }
        if self.failure.is_some() || !self.unfinished() {
            self.ack_at = None;
            return None;
        }
        if self.established && self.long_packets_vanish() {
            self.handle_datagram_too_long();
            self.reopen(now);
        }
        let datagram = if !self.established {
            self.open_datagram(now)
        } else if self.timeout_due {
            self.timeout_datagram(now)
        } else {
            self.trickle_datagram(now)
        };
        self.update_waiting(now);
        datagram
    }

    fn close_datagram(&mut self, now: Instant) -> Option<Vec<u8>> {
        let account = self.anchor()?.account();
        let mut out = Vec::new();
        Request::encode_head(self.connection, self.timestamp_us(now), &Ask::Close { account }, &mut out);
        Some(out)
    }

    /// The paper's SYN with data (§6.1), padded so that the answer may be three times as long.
    fn open_datagram(&mut self, now: Instant) -> Option<Vec<u8>> {
        if !std::mem::take(&mut self.open_due) {
            return None;
        }
        for state in self.requests.values_mut() {
            state.forget_flight();
        }
        // Where nothing came back twice, the path may lose long datagrams in silence (RFC 8899). Once is more often the
        // doing of a full queue, and a connection keeps the limit that it opened with.
        let most = self.config.datagram_bytes;
        let datagram_bytes = if self.attempts < LONG_OPENS { most } else { most.min(self.short_bytes()) };
        self.server_datagram_bytes = datagram_bytes;
        let padded = usize::from(datagram_bytes).max(self.config.padded_bytes);
        let mut out = Vec::with_capacity(padded);
        let flag = if self.config.cubic { wire::CUBIC_WANTED } else { 0 };
        let ask = Ask::Open { datagram_bytes: datagram_bytes | flag };
        Request::encode_head(self.connection, self.timestamp_us(now), &ask, &mut out);
        let contents = self.write_frames(OPEN_WANTS, padded, RESPONSE_HEAD_BYTES, &mut out);
        wire::pad(padded, &mut out);
        self.open_wants = contents.wants;
        self.open_inputs = contents.inputs;
        self.waiting_since = Some(now);
        Some(out)
    }

    /// Starts over after a timeout (Trickles §2.5): every other trickle is given up.
    fn timeout_datagram(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.timeout_due = false;
        let Some(anchor) = self.anchor() else {
            self.reopen(now);
            return self.open_datagram(now);
        };
        // Whatever eras are known, the attempt's is a newer one.
        let newest = self.eras.back().map_or(anchor.era.counter, |state| state.era.counter);
        let attempt = newest.saturating_sub(anchor.era.counter).max(1);
        let account = anchor.account();
        let runs: Vec<_> = account.runs.iter().map(|proved| proved.run).collect();
        let release = u8::try_from(attempt).ok().and_then(|attempt| {
            let argument = anchor.era.join_argument(attempt, rtt_of(&anchor.raw, self.round_trip.least()))?;
            Some((argument, congestion::time_out(&anchor.era, &runs, anchor.number, argument).ok()?))
        });
        let limit = self.config.datagram_bytes.min(wire::most_bytes_of_attempt(attempt));
        let beside_bytes = HEADER_BYTES + 4 + Account::wire_bytes(runs.len());
        let release = release.filter(|_| self.has_room(1, beside_bytes, limit));
        let Some((argument, release)) = release else {
            self.reopen(now);
            return self.open_datagram(now);
        };
        while !self.eras.is_empty() {
            self.drop_oldest_era();
        }
        self.last_anchor = Some(anchor);
        Some(self.request_datagram(Ask::Timeout { account, attempt: argument }, limit, &release, &[], now))
    }

    /// Uses the first trickle that is free, if there is something to ask for.
    fn trickle_datagram(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.ack_at = None;
        let limit = self.config.datagram_bytes;
        let (mut index, mut most) = (0, usize::MAX);
        while index < self.eras.len() {
            let state = &self.eras[index];
            let Some((ready, group)) = state.next_group(most) else {
                index += 1;
                continue;
            };
            let ready = ready.clone();
            if group == 1 && !self.urgent(state, ready.number) && self.delays_ack(&ready, now) {
                index += 1;
                continue;
            }
            let ack = self.acknowledgement(index, ready, group, now);
            let has_room = |packets| self.has_room(packets, ack.beside_bytes, limit);
            if group > 1 && ack.release.as_ref().is_some_and(|release| !has_room(release.count())) {
                most = usize::from(group / 2);
                continue;
            }
            most = usize::MAX;
            let fits = ack.beside_bytes <= limit.into() && has_room(1);
            if ack.release.is_some() && !self.has_work() {
                return None;
            }
            let aged = now.saturating_duration_since(ack.ready.arrived) > self.config.park_limit;
            if aged || self.input_needs_open() {
                self.reopen(now);
                return self.open_datagram(now);
            }
            self.eras[index].ready.drain(..usize::from(group));
            // A trickle that ends here, to shrink the window, is not worth a packet. One whose account leaves no room
            // in a packet to ask for anything is given up.
            if fits && ack.release.is_some() {
                return self.ack_datagram(index, ack, now);
            }
        }
        None
    }

    /// Whether a lone packet waits for a second one, to be acknowledged with it (RFC 5681 §4.2).
    fn delays_ack(&mut self, ready: &Ready, now: Instant) -> bool {
        let due = ready.arrived + self.config.delayed_ack;
        if now >= due {
            return false;
        }
        self.ack_at = Some(self.ack_at.map_or(due, |at| at.min(due)));
        true
    }

    /// The acknowledgement of `group` packets of an era, of which `ready` is the newest.
    fn acknowledgement(&mut self, index: usize, ready: Ready, group: u8, now: Instant) -> Acknowledgement {
        let least = self.round_trip.least();
        let state = &mut self.eras[index];
        let account = state.account(&ready, now);
        let runs: Vec<_> = account.runs.iter().map(|proved| proved.run).collect();
        // Where an account has more than one run, all requests of the era state the same round-trip time.
        let simple = runs.len() == 1 && runs[0].gap == 0;
        let rtt = if simple { 0 } else { *state.rtt.get_or_insert(rtt_of(&ready.raw, least)) };
        let argument = state.era.join_argument(group, rtt).unwrap_or(group);
        let release = congestion::acknowledge(&state.era, &runs, ready.number, argument);
        let release = release.ok().filter(|release| release.count() > 0);
        let beside_bytes = HEADER_BYTES + 4 + Account::wire_bytes(runs.len());
        Acknowledgement { ready, group, account, beside_bytes, rtt, argument, release }
    }

    /// The request for an acknowledgement, which also repeats what the one before asked for if that may have been lost.
    fn ack_datagram(&mut self, index: usize, ack: Acknowledgement, now: Instant) -> Option<Vec<u8>> {
        let Acknowledgement { ready, group, account, beside_bytes, rtt, mut argument, release } = ack;
        let release = release?;
        let mut again = Vec::new();
        if let Some((whole, wants)) = self.repeatable(index, &ready, beside_bytes, release.packets.start)
            && let Some(joined) = self.eras[index].era.join_argument(whole, rtt)
        {
            (argument, again) = (joined, wants);
        }
        self.eras[index].asked = Some(Asked {
            by: ready.number,
            group,
            era: release.era.counter,
            packets: release.packets.clone(),
        });
        self.repeated += again.len() as u64;
        let ask = Ask::Continue { account, group: argument };
        Some(self.request_datagram(ask, self.config.datagram_bytes, &release, &again, now))
    }

    /// What the request before acknowledged, and the ranges that it asked for, to be repeated by the one for `ready`: a
    /// lost request costs as much as the loss of all its answers, and an acknowledgement of TCP costs nothing as the
    /// next one says the same. Only once something was lost, and not where servers that share no memory answer both.
    fn repeatable(
        &self,
        index: usize,
        ready: &Ready,
        account_bytes: usize,
        from: u64,
    ) -> Option<(u8, Vec<RepeatedWant>)> {
        let asked = self.eras.get(index)?.asked.as_ref()?;
        // What was acknowledged in between set nothing free.
        let whole = u8::try_from(ready.number.checked_sub(asked.by)?).ok()?.checked_add(asked.group)?;
        let lossy = self.loss_events() > 0;
        let answered_twice = self.copies * COPIES_SHARE > self.repeated + COPIES_AT_FIRST;
        let adjacent = asked.packets.end == from;
        if !lossy
            || answered_twice
            || !adjacent
            || whole > MAX_REPEATING
            || u32::from(whole) > ready.acknowledges()
        {
            return None;
        }
        let coming = self.eras.iter().find(|state| state.era.counter == asked.era)?;
        let mut wants = Vec::new();
        for number in asked.packets.clone() {
            let (request, range) = coming.expected.get(&number)?.want.clone()?;
            let continuation = self.requests.get(&request)?.continuation_for(range.start)?.to_vec();
            let sequence = region_start(request) + range.start;
            wants.push(RepeatedWant { range: (sequence, (range.end - range.start) as u32), continuation });
        }
        // What is asked for the first time has to fit too.
        let wants_bytes: usize = wants.iter().map(|want| wire::wants_bytes(1, &want.continuation)).sum();
        (account_bytes + 2 * wants_bytes <= self.config.datagram_bytes.into()).then_some((whole, wants))
    }

    /// Whether a request with `beside_bytes` of head and account has room for the ranges of so many packets. A packet
    /// that is not asked for anything comes empty.
    fn has_room(&self, packets: u64, beside_bytes: usize, limit: u16) -> bool {
        let window = self.config.window_bytes;
        let asking = self.requests.values().filter_map(|state| state.next_want(1, window));
        let (requests, longest) = asking.fold((0, &[][..]), |(count, longest), (_, continuation)| {
            (count + 1, if continuation.len() > longest.len() { continuation } else { longest })
        });
        let Some(ranges) = usize::try_from(packets).ok().filter(|&packets| packets > 0 && requests > 0)
        else {
            return true;
        };
        let ranges = ranges.min(MAX_WANTS);
        // Requests take turns, each with half of what is left.
        let frames = if requests > 1 { ranges.ilog2() as usize + 1 } else { 1 };
        let frames_bytes = wire::wants_bytes(ranges, longest) + (frames - 1) * wire::wants_bytes(0, longest);
        beside_bytes + frames_bytes <= limit.into()
    }

    /// Whether a lone packet is acknowledged without waiting for a second one.
    fn urgent(&self, state: &EraState, number: u64) -> bool {
        // Another one that it cannot be acknowledged with waits behind it.
        state.ready.len() > 1
            || state.recovering()
            || (state.era.start < state.era.ssthresh && number - state.era.base <= QUICK_PACKETS)
            || state.expected.is_empty()
            || self.requests.values().any(super::RequestState::wants_to_send)
    }

    fn has_work(&self) -> bool {
        let window = self.config.window_bytes;
        self.requests.values().any(|state| state.wants_to_send() || state.next_want(1, window).is_some())
    }

    /// Whether input waits that has no room beside the shortest account: an open, which has none, takes it.
    fn input_needs_open(&self) -> bool {
        let head_bytes = HEADER_BYTES + 4 + Account::wire_bytes(1);
        let room = usize::from(self.config.datagram_bytes).saturating_sub(head_bytes);
        self.requests.values().filter(|state| state.wants_to_send()).any(|state| {
            let (_, data, _, continuation) = state.next_input(LEAST_INPUT_BYTES);
            wire::input_overhead(continuation) + data.len() > room
        })
    }

    /// A request of at most `limit` bytes for packets no longer than that, and for those of the request before `again`.
    fn request_datagram(
        &mut self,
        ask: Ask,
        limit: u16,
        release: &Release,
        again: &[RepeatedWant],
        now: Instant,
    ) -> Vec<u8> {
        let mut out = Vec::with_capacity(limit.into());
        Request::encode_head(self.connection, self.timestamp_us(now), &ask, &mut out);
        let count = usize::try_from(release.count()).unwrap_or(MAX_WANTS).min(MAX_WANTS);
        for wants in again.chunk_by(|a, b| a.continuation == b.continuation) {
            let ranges: Vec<_> = wants.iter().map(|want| want.range).collect();
            wire::write_wants(&ranges, &wants[0].continuation, &mut out);
        }
        let contents = self.write_frames(count, limit.into(), DELTA_HEAD_BYTES, &mut out);
        let mut wants = contents.wants.into_iter();
        for number in release.numbers() {
            let want = wants.next();
            let pushes = if want.is_none() { self.count_pushes(&contents.inputs) } else { Vec::new() };
            self.era_of(release.era).expected.insert(number, Expected { want, pushes });
        }
        out
    }

    /// The state of the era in which released packets will arrive.
    fn era_of(&mut self, era: Era) -> &mut EraState {
        debug_assert!(self.eras.len() <= MAX_ERAS, "eras are bounded");
        match self.eras.iter().position(|state| state.era.counter == era.counter) {
            Some(index) => &mut self.eras[index],
            None => self.add_era(era),
        }
    }

    /// Fills a datagram of at most `limit` bytes whose answer has `packets` packets with heads of `head_bytes`: input
    /// first, then ranges.
    fn write_frames(
        &mut self,
        packets: usize,
        limit: usize,
        head_bytes: usize,
        out: &mut Vec<u8>,
    ) -> Contents {
        let mut contents = Contents::default();
        self.write_inputs(packets, limit, out, &mut contents);
        let for_wants = if contents.inputs.is_empty() { packets } else { packets - 1 };
        self.write_wants(for_wants.min(MAX_WANTS), limit, head_bytes, out, &mut contents);
        contents
    }

    fn write_inputs(&mut self, packets: usize, limit: usize, out: &mut Vec<u8>, contents: &mut Contents) {
        if packets == 0 {
            return;
        }
        for (&request, state) in &mut self.requests {
            if !state.wants_to_send() || contents.inputs.len() == MAX_WANTS {
                continue;
            }
            let overhead = wire::input_overhead(state.input_continuation());
            let room = limit.saturating_sub(out.len() + overhead);
            let (offset, data, last, continuation) = state.next_input(room);
            // Without room for a byte, only input that has none is worth a frame.
            if out.len() + overhead > limit || (data.is_empty() && !last) {
                continue;
            }
            wire::write_input(&Input { request, offset, last, continuation, data }, out);
            state.input_sent(self.arrivals);
            contents.inputs.push(request);
        }
    }

    /// Asks for ranges of all requests in turn, each as long as a packet, but no longer than the request may be.
    fn write_wants(
        &mut self,
        packets: usize,
        limit: usize,
        head_bytes: usize,
        out: &mut Vec<u8>,
        contents: &mut Contents,
    ) {
        let overhead = head_bytes + DATA_FRAME_BYTES;
        let packet = usize::from(self.server_datagram_bytes).min(limit);
        let length = packet.saturating_sub(overhead).max(1) as u64;
        let window = self.config.window_bytes;
        let mut idle = 0;
        while contents.wants.len() < packets && idle <= self.requests.len() {
            let after = self.last_served.saturating_add(1);
            let next = self.requests.range(after..).next().or_else(|| self.requests.iter().next());
            let Some((&request, _)) = next else { return };
            self.last_served = request;
            idle += 1;
            // A fair share of the packets at a time, so that one frame carries several ranges of a continuation.
            let left = packets - contents.wants.len();
            let share = if self.requests.len() > 1 { left.div_ceil(2) } else { left };
            let Some(state) = self.requests.get_mut(&request) else { return };
            let mut ranges = Vec::new();
            let mut used: Option<Vec<u8>> = None;
            while ranges.len() < share {
                let Some((range, continuation)) = state.next_want(length, window) else { break };
                let bytes = wire::wants_bytes(ranges.len() + 1, continuation);
                let same = used.as_deref().is_none_or(|used| used == continuation);
                if !same || out.len() + bytes > limit {
                    break;
                }
                if used.is_none() {
                    used = Some(continuation.to_vec());
                }
                let twice = state.ask(range.clone(), self.arrivals);
                // Even where that is another request's share: it has its turn next time.
                let has_room = contents.wants.len() + 2 <= packets
                    && used
                        .as_ref()
                        .is_some_and(|used| out.len() + wire::wants_bytes(ranges.len() + 2, used) <= limit);
                for _ in 0..1 + usize::from(twice && has_room) {
                    ranges.push((region_start(request) + range.start, (range.end - range.start) as u32));
                    contents.wants.push((request, range.clone()));
                }
            }
            if let Some(continuation) = used.filter(|_| !ranges.is_empty()) {
                wire::write_wants(&ranges, &continuation, out);
                idle = 0;
            }
        }
    }
}
