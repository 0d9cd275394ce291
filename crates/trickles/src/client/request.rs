//! One request at the client: input on its way up, output on its way down.

use super::ranges::RangeSet;
use crate::server::RESET_EXPIRED;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// Output continuations kept for one request; more are ignored.
const MAX_CONTINUATIONS: usize = 64;
/// Pieces of output that wait for those before them: a window of packets of the least length is fewer.
const MAX_SEGMENTS: usize = 16_384;
/// Input waits while so many outputs are unread: a stream that is written ahead must not overrun the bound above.
const UNREAD_OUTPUTS: usize = 16;
/// How often the transport may ask, without any output in between, for a request to be repeated from the start.
const MAX_RESTARTS: u8 = 16;

/// From which time on the first byte that is missing is asked for in two packets at once. It goes first each time: a
/// path that loses every second packet could lose it for ever.
const ASKED_TWICE_FROM: u32 = 3;

/// What reading a request's output gives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Read {
    /// This many bytes were read.
    Data(usize),
    /// Nothing has arrived yet.
    Pending,
    /// The output has ended.
    End,
    /// The server refused the request with this code.
    Reset(u16),
}

/// What has arrived of a connection, as far as it tells whether its path carries long packets.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Arrivals {
    /// Packets of any length.
    pub(super) any: u64,
    /// Packets as long as the connection lets them be.
    pub(super) full: u64,
}

/// How often something was asked for in vain although the path carried other packets in between, none of full length:
/// where only short ones pass, what needs a long one never comes, and the others hide it from the timeouts.
#[derive(Clone, Copy, Debug, Default)]
struct Vain {
    /// What would have moved on.
    progress: u64,
    seen: Arrivals,
    times: u32,
    /// The same, whatever else arrived.
    asked: u32,
}

impl Vain {
    fn ask(&mut self, progress: u64, seen: Arrivals) {
        self.asked = if self.progress == progress { self.asked.saturating_add(1) } else { 1 };
        if self.asked == 1 || self.seen.full != seen.full {
            self.times = 0;
        } else if self.seen.any != seen.any {
            self.times += 1;
        }
        (self.progress, self.seen) = (progress, seen);
    }

    fn times(&self, progress: u64, seen: Arrivals) -> u32 {
        if (self.progress, self.seen.full) == (progress, seen.full) { self.times } else { 0 }
    }
}

#[derive(Debug)]
struct OutputContinuation {
    valid: Range<u64>,
    bytes: Vec<u8>,
}

/// State of one request.
#[derive(Debug, Default)]
pub(super) struct RequestState {
    /// Input from `input_start` on.
    input: Vec<u8>,
    input_start: u64,
    input_complete: bool,
    input_continuation: Vec<u8>,
    /// Input that the server has digested; the end of the input counts as one byte more, as TCP's FIN does.
    consumed: u64,
    input_in_flight: bool,
    /// The server has the input that is in flight and waits for what answers it: when it is sent again nevertheless, and
    /// how often that was so since something came.
    waits_until: Option<Instant>,
    waits: u32,
    restarts: u8,
    restarted: bool,
    /// The first answer: after a restart it must be the same one.
    first_output: Option<(Range<u64>, Vec<u8>)>,
    /// Packets on their way that the server may fill with output of its own accord.
    pushes: u32,
    /// Where output of the server's own accord begins: what was known before the input was sent ends there.
    push_from: u64,
    outputs: Vec<OutputContinuation>,
    have: RangeSet,
    asked: RangeSet,
    segments: BTreeMap<u64, Vec<u8>>,
    position: u64,
    end: Option<u64>,
    reset: Option<u16>,
    /// Asking for the first byte that is missing, and sending input.
    vain_want: Vain,
    vain_input: Vain,
}

impl RequestState {
    pub(super) fn append_input(&mut self, data: &[u8], last: bool) {
        if !self.input_complete {
            self.input.extend_from_slice(data);
            self.input_complete = last;
        }
    }

    /// Bytes of input that are kept.
    pub(super) fn input_bytes(&self) -> usize {
        self.input.len()
    }

    fn input_end(&self) -> u64 {
        self.input_start + self.input.len() as u64
    }

    /// Input to send now, `room` bytes at most: offset, bytes, whether they are the last, and the continuation.
    pub(super) fn next_input(&self, room: usize) -> (u64, &[u8], bool, &[u8]) {
        let from = self.consumed.min(self.input_end());
        let rest = &self.input[(from - self.input_start) as usize..];
        let part = &rest[..rest.len().min(room)];
        (from, part, self.input_complete && part.len() == rest.len(), &self.input_continuation)
    }

    pub(super) fn input_continuation(&self) -> &[u8] {
        &self.input_continuation
    }

    /// Whether input waits to be sent: all that the server has not digested, until it says where its output ends.
    pub(super) fn wants_to_send(&self) -> bool {
        let left = self.consumed < self.input_end() + u64::from(self.input_complete);
        left && self.end.is_none()
            && self.reset.is_none()
            && !self.input_in_flight
            && self.outputs.iter().filter(|output| output.valid.end > self.position).count() < UNREAD_OUTPUTS
    }

    /// Why input is not sent any more: the request was reset, or its output has ended.
    pub(super) fn refuses_input(&self) -> Option<Read> {
        self.reset.map(Read::Reset).or(self.end.map(|_| Read::End))
    }

    /// Input was sent; each packet of the answer is noted with [`RequestState::expect_push`].
    pub(super) fn input_sent(&mut self, seen: Arrivals) {
        self.vain_input.ask(self.consumed, seen);
        self.input_in_flight = true;
        self.waits_until = None;
        self.push_from = self.forget_unexplained();
    }

    /// Forgets output for which no continuation has come: it belongs to an answer whose first packet is lost, and the
    /// next answer may be another one. Returns where the known output ends.
    fn forget_unexplained(&mut self) -> u64 {
        let explained =
            self.outputs.iter().map(|output| output.valid.end).max().unwrap_or(0).max(self.position);
        self.have.remove(explained..u64::MAX);
        self.segments.split_off(&explained);
        if let Some((&start, bytes)) = self.segments.iter_mut().next_back() {
            bytes.truncate(usize::try_from(explained - start).unwrap_or(usize::MAX));
        }
        explained
    }

    pub(super) fn expect_push(&mut self) {
        self.pushes += 1;
    }

    /// A packet of the answer to input has come or is lost. After the last, input without an answer is sent again.
    pub(super) fn push_settled(&mut self) {
        self.pushes = self.pushes.saturating_sub(1);
        if self.pushes == 0 && self.waits_until.is_none() {
            self.input_in_flight = false;
        }
    }

    /// How often the server was waited for since something came.
    pub(super) fn waits(&self) -> u32 {
        self.waits
    }

    pub(super) fn waits_until(&self) -> Option<Instant> {
        self.waits_until
    }

    /// The server has the input and waits for what answers it. In case that is lost, the input is sent again at a time that
    /// the caller puts off more each time.
    pub(super) fn wait_until(&mut self, at: Instant) {
        if self.input_in_flight && self.waits_until.is_none() {
            (self.pushes, self.waits_until) = (0, Some(at));
            self.waits += 1;
            // What says so says nothing of the length that the path carries.
            self.vain_input = Vain::default();
        }
    }

    /// The server is not waited for any longer: what has not been answered is sent again.
    pub(super) fn end_wait(&mut self) {
        if self.waits_until.take().is_some() {
            self.input_in_flight = false;
        }
    }

    /// Something has come of what the server was waited for: beyond the output that was known when the input was sent.
    fn answered(&mut self) {
        self.end_wait();
        self.waits = 0;
    }

    /// The next range to ask for, `length` bytes at most, within `window` bytes of the reader.
    pub(super) fn next_want(&self, length: u64, window: u64) -> Option<(Range<u64>, &[u8])> {
        if self.reset.is_some() || self.outputs.is_empty() {
            return None;
        }
        // What the server sends of its own accord is not asked for.
        let pushed = if self.pushes > 0 { self.push_from } else { u64::MAX };
        let limit = self.end.unwrap_or(u64::MAX).min(self.position.saturating_add(window)).min(pushed);
        let mut at = self.position;
        while at < limit {
            if let Some(end) = self.have.end_of(at).or_else(|| self.asked.end_of(at)) {
                at = end;
                continue;
            }
            // The newest continuation that is valid here.
            let Some(output) = self.outputs.iter().rev().find(|output| output.valid.contains(&at)) else {
                let settled = self.input_complete && self.consumed > self.input_end();
                let before = self.outputs.iter().rev().find(|output| settled && output.valid.end == at);
                if let Some(output) = before {
                    // All that it makes is here, but neither an end nor what follows: they were lost, ask for them.
                    return Some((at..at + 1, &output.bytes));
                }
                at =
                    self.outputs.iter().map(|output| output.valid.start).filter(|&start| start > at).min()?;
                continue;
            };
            let bounds =
                [self.have.next_start(at), self.asked.next_start(at), Some(output.valid.end), Some(limit)];
            let end = bounds.into_iter().flatten().min().unwrap_or(limit).min(at + length);
            return Some((at..end, &output.bytes));
        }
        None
    }

    /// The newest continuation that a range from `at` on can be asked for with.
    pub(super) fn continuation_for(&self, at: u64) -> Option<&[u8]> {
        let makes = |output: &&OutputContinuation| output.valid.contains(&at);
        let ends = |output: &&OutputContinuation| output.valid.end == at;
        let newest = self.outputs.iter().rev().find(makes);
        newest.or_else(|| self.outputs.iter().rev().find(ends)).map(|output| &output.bytes[..])
    }

    /// Takes note that a range is asked for. Whether two packets should bring it: it is what the reader waits for, and
    /// has been lost before.
    pub(super) fn ask(&mut self, range: Range<u64>, seen: Arrivals) -> bool {
        let missing = self.first_missing();
        let is_first = range.start == missing;
        if is_first {
            self.vain_want.ask(missing, seen);
        }
        self.asked.insert(range);
        is_first && self.vain_want.asked >= ASKED_TWICE_FROM
    }

    fn first_missing(&self) -> u64 {
        self.have.end_of(self.position).unwrap_or(self.position)
    }

    /// How often what would have to be asked for or sent now has been in vain, with other packets in between.
    pub(super) fn times_in_vain(&self, seen: Arrivals) -> u32 {
        let missing = self.first_missing();
        let wants = match self.asked.end_of(missing) {
            None => self.vain_want.times(missing, seen),
            Some(_) => 0,
        };
        let input = if self.wants_to_send() { self.vain_input.times(self.consumed, seen) } else { 0 };
        wants.max(input)
    }

    pub(super) fn unask(&mut self, range: Range<u64>) {
        self.asked.remove(range);
    }

    /// Whether something is still to come from the server.
    pub(super) fn unfinished(&self, window: u64) -> bool {
        let input = (self.input_in_flight && self.waits_until.is_none()) || self.wants_to_send();
        self.reset.is_none()
            && (input || self.pushes > 0 || !self.asked.is_empty() || self.next_want(1, window).is_some())
    }

    /// Takes output that has arrived; what lies beyond `window` bytes of the reader was not asked for and is dropped.
    pub(super) fn receive(&mut self, offset: u64, data: &[u8], window: u64) {
        let limit = self.position.saturating_add(window).min(self.end.unwrap_or(u64::MAX));
        let end = offset.saturating_add(data.len() as u64).min(limit);
        for part in self.have.missing(offset.max(self.position)..end) {
            // What the reader waits for has room in any case. The rest is asked for again.
            if self.segments.len() >= MAX_SEGMENTS && part.start != self.position {
                continue;
            }
            let bytes = &data[(part.start - offset) as usize..(part.end - offset) as usize];
            self.segments.insert(part.start, bytes.to_vec());
            let is_new = part.end > self.push_from;
            self.have.insert(part);
            self.restarts = 0;
            if is_new {
                self.answered();
            }
        }
    }

    pub(super) fn ends_at(&mut self, offset: u64) {
        // The first word counts: an end that moves would cut off or leave out bytes that were handed out.
        if self.end.is_none() && offset >= self.position {
            self.end = Some(offset);
        }
    }

    /// Takes an output continuation; `opaque` are the application's bytes in it.
    pub(super) fn set_output(&mut self, valid: Range<u64>, opaque: &[u8], bytes: &[u8]) {
        let first = self.first_output.get_or_insert_with(|| (valid.clone(), opaque.to_vec()));
        if self.restarted && valid.start == first.0.start && (&first.0, &first.1[..]) != (&valid, opaque) {
            if self.position > 0 {
                // Bytes of another version must not be joined to those that were handed out.
                self.reset = Some(RESET_EXPIRED);
                return;
            }
            *first = (valid.clone(), opaque.to_vec());
            (self.have, self.end) = (RangeSet::default(), None);
            self.segments.clear();
        }
        if valid.end > self.push_from {
            self.answered();
        }
        self.outputs.retain(|output| output.valid != valid);
        if self.outputs.len() == MAX_CONTINUATIONS {
            let position = self.position;
            self.outputs.retain(|output| output.valid.end > position);
        }
        if self.outputs.len() < MAX_CONTINUATIONS {
            self.outputs.push(OutputContinuation { valid, bytes: bytes.to_vec() });
        }
    }

    pub(super) fn set_input(&mut self, consumed: u64, bytes: &[u8]) {
        let limit = self.input_end() + u64::from(self.input_complete);
        let first = self.input_continuation.is_empty() && consumed == self.consumed;
        if consumed > limit || (consumed <= self.consumed && !first) {
            return;
        }
        self.consumed = consumed;
        self.input_continuation = bytes.to_vec();
        self.input_in_flight = false;
        self.answered();
        if self.first_output.is_some() {
            // A stream that has been answered is never repeated from its start.
            let digested = consumed.min(self.input_end()) - self.input_start;
            self.input.drain(..digested as usize);
            self.input_start += digested;
        }
    }

    pub(super) fn fail(&mut self, code: u16) {
        let expired = code == RESET_EXPIRED;
        if expired && self.outputs.is_empty() && self.consumed == 0 {
            return; // Another packet has said so already: the request has started over.
        }
        let repeatable = self.input_start == 0 && (self.first_output.is_none() || self.consumed == 0);
        if expired && repeatable && self.restarts < MAX_RESTARTS {
            // What has arrived stays; everything else starts over with the whole input.
            self.restarts += 1;
            self.restarted = true;
            self.outputs.clear();
            self.consumed = 0;
            self.input_continuation.clear();
            (self.end, self.input_in_flight) = (self.end.filter(|&end| self.position == end), false);
            self.waits_until = None;
        } else if self.end.is_none_or(|end| self.position < end) {
            self.reset = Some(code);
        }
    }

    /// Forgets what is on its way: the transport connection it was asked on is gone.
    pub(super) fn forget_flight(&mut self) {
        self.asked.clear();
        self.pushes = 0;
        self.input_in_flight = false;
        self.waits_until = None;
    }

    /// Whether reading gives anything but [`Read::Pending`].
    pub(super) fn is_readable(&self) -> bool {
        self.reset.is_some()
            || self.end == Some(self.position)
            || self.segments.first_key_value().is_some_and(|(&start, _)| start == self.position)
    }

    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Read {
        let mut read = 0;
        while read < buffer.len() {
            let Some(mut entry) = self.segments.first_entry().filter(|entry| *entry.key() == self.position)
            else {
                break;
            };
            let length = entry.get().len().min(buffer.len() - read);
            buffer[read..read + length].copy_from_slice(&entry.get()[..length]);
            let rest = entry.get_mut().split_off(length);
            entry.remove();
            read += length;
            self.position += length as u64;
            if !rest.is_empty() {
                self.segments.insert(self.position, rest);
            }
        }
        match (read, self.reset) {
            (1.., _) => Read::Data(read),
            (0, Some(code)) => Read::Reset(code),
            (0, None) if self.end == Some(self.position) => Read::End,
            (0, None) => Read::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_in_crumbs_takes_no_more_than_so_many_pieces_and_what_is_read_next_has_room() {
        let mut state = RequestState::default();
        for offset in 0..2 * MAX_SEGMENTS as u64 {
            state.receive(2 * offset + 1, b"x", 1 << 20);
        }
        assert_eq!(state.segments.len(), MAX_SEGMENTS);
        state.receive(0, b"yz", 1 << 20);
        let mut buffer = [0; 10];
        let Read::Data(count) = state.read(&mut buffer) else { panic!("nothing to read") };
        // The piece that was there already is not overwritten.
        assert_eq!(&buffer[..count], b"yx");
    }
}
