//! The client's half: it keeps all state, its own and the server's, and has no socket, clock or randomness of its own.

mod era;
mod ranges;
mod request;
mod rtt;
mod timers;
mod transmit;

pub use request::Read;

use crate::congestion::Era;
use crate::continuation::{
    Continuation, RawContinuation, RawDelta, apply_successor, era_of, successor_counter,
};
use crate::cwnd::MAX_INITIAL_WINDOW;
use crate::mac::{Aes128, Block};
use crate::server::RESET_EXPIRED;
use crate::user::{Kind, MAX_REQUEST, UserContinuation, split_sequence};
use crate::wire::{Answer, Frame, LONG_ATTEMPTS, MIN_DATAGRAM_BYTES, PADDED_BYTES, WireError};
use era::{Anchor, EraState, Expected};
use request::{Arrivals, RequestState};
use rtt::RoundTrip;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Eras that are kept at once: the current one, and those whose packets may still arrive.
const MAX_ERAS: usize = 4;

/// What an Ethernet frame holds, less the headers of IPv4 and UDP.
pub const LARGEST_DATAGRAM_BYTES: u16 = 1472;

/// Limits and timers of a client.
#[derive(Clone, Debug)]
pub struct Config {
    /// Largest datagram in bytes that is sent and asked for, headers of UDP and IP not counted. An open that was not
    /// answered is repeated with 1200.
    pub datagram_bytes: u16,
    /// Whether CUBIC governs the window where the server has it, see [`crate::cubic`]; Reno does otherwise.
    pub cubic: bool,
    /// To how many bytes an open is padded, with those of an envelope around it not counted: 1200 buy an answer that is
    /// three times as long.
    pub padded_bytes: usize,
    /// Largest datagram in bytes that is asked for where longer ones do not pass.
    pub short_datagram_bytes: u16,
    /// Bytes of output that each request buffers ahead of its reader.
    pub window_bytes: u64,
    /// Requests at once.
    pub max_requests: usize,
    /// Bytes of input that one request may have.
    pub max_input_bytes: usize,
    /// Smallest retransmission timeout.
    pub min_rto: Duration,
    /// How long an acknowledgement waits for a second packet (RFC 5681 §4.2 allows 500 ms).
    pub delayed_ack: Duration,
    /// Age from which an unused continuation is not worth sending: below the server's freshness horizon.
    pub park_limit: Duration,
    /// Open requests without an answer, or new connections without progress, after which the client gives up.
    pub max_attempts: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            datagram_bytes: LARGEST_DATAGRAM_BYTES,
            cubic: false,
            padded_bytes: PADDED_BYTES,
            short_datagram_bytes: PADDED_BYTES as u16,
            window_bytes: 4 << 20,
            max_requests: 64,
            max_input_bytes: 1 << 20,
            min_rto: Duration::from_millis(200),
            delayed_ack: Duration::from_millis(25),
            park_limit: Duration::from_secs(20),
            max_attempts: 14,
        }
    }
}

/// Why a client cannot go on, or cannot take more.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ClientError {
    /// The server has not answered for many attempts.
    #[error("no answer after {attempts} attempts")]
    Unreachable {
        /// Attempts made.
        attempts: u32,
    },
    /// As many requests as the configuration allows are under way.
    #[error("too many requests at once")]
    TooManyRequests,
    /// The input exceeds what the configuration allows.
    #[error("request input too long")]
    InputTooLong,
    /// There is no such request (any more).
    #[error("no request {request}")]
    NoSuchRequest {
        /// The number.
        request: u32,
    },
}

/// Why a datagram from the network was not taken; the connection goes on regardless.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum PeerError {
    /// Not an answer.
    #[error("malformed answer: {0}")]
    Wire(#[from] WireError),
    /// Not for this connection: an old one's, or forged.
    #[error("answer for another connection")]
    OtherConnection,
    /// The continuation is not of this version.
    #[error("malformed continuation in an answer")]
    Continuation,
    /// A user continuation is malformed.
    #[error("malformed user continuation in an answer")]
    UserContinuation,
}

/// A client of one server. After any `handle_*`, and after new requests or reads, call [`Client::poll_transmit`] until
/// it gives nothing, then [`Client::poll_timeout`].
#[derive(Debug)]
pub struct Client {
    config: Config,
    random: Aes128,
    random_drawn: u64,
    started: Instant,
    round_trip: RoundTrip,
    requests: BTreeMap<u32, RequestState>,
    next_request: u32,
    last_served: u32,

    connection: u64,
    established: bool,
    open_due: bool,
    attempts: u32,
    open_wants: Vec<(u32, Range<u64>)>,
    open_inputs: Vec<u32>,

    /// Oldest first; the newest is where timeouts and recoveries lead.
    eras: VecDeque<EraState>,
    last_anchor: Option<Anchor>,
    timeout_due: bool,
    backoff: u32,
    /// By how much chance shortens the wait for an open's answer.
    open_haste: u8,
    timeouts: u64,
    /// Times that something arrived only after the attempts that are answered by packets of any length, since one of
    /// full length did.
    only_short: u32,
    arrivals: Arrivals,
    /// Packets that requests asked for a second time, and packets that arrived twice.
    repeated: u64,
    copies: u64,
    /// Packets that the server will send again, with what it waits for.
    promised: u64,
    /// Since when nothing has happened although something should; `None` while nothing is wanted.
    waiting_since: Option<Instant>,
    probed: bool,
    ack_at: Option<Instant>,
    server_datagram_bytes: u16,
    close_due: bool,
    failure: Option<ClientError>,
}

impl Client {
    /// A client; `seed` makes its connection ids and must not be guessable from the outside.
    #[must_use]
    pub fn new(config: Config, seed: &Block, now: Instant) -> Self {
        let datagram_bytes = config.datagram_bytes.max(MIN_DATAGRAM_BYTES);
        let mut client = Self {
            round_trip: RoundTrip::new(config.min_rto),
            config: Config { datagram_bytes, ..config },
            random: Aes128::new(seed),
            random_drawn: 0,
            started: now,
            requests: BTreeMap::new(),
            next_request: 1,
            last_served: 0,
            connection: 0,
            established: false,
            open_due: true,
            attempts: 0,
            open_wants: Vec::new(),
            open_inputs: Vec::new(),
            eras: VecDeque::new(),
            last_anchor: None,
            timeout_due: false,
            backoff: 0,
            open_haste: 0,
            timeouts: 0,
            only_short: 0,
            arrivals: Arrivals::default(),
            repeated: 0,
            copies: 0,
            promised: 0,
            waiting_since: None,
            probed: false,
            ack_at: None,
            server_datagram_bytes: datagram_bytes,
            close_due: false,
            failure: None,
        };
        client.connection = client.draw();
        client
    }

    fn draw(&mut self) -> u64 {
        self.random_drawn += 1;
        let mut block = [0; 16];
        block[..8].copy_from_slice(&self.random_drawn.to_be_bytes());
        let [a, b, c, d, e, f, g, h, ..] = self.random.encrypt(block);
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }

    /// Starts a request whose whole input is `input`; returns its number. Requests run side by side (Trickles §5.2).
    pub fn request(&mut self, input: &[u8], now: Instant) -> Result<u32, ClientError> {
        let request = self.start(now)?;
        self.write(request, input, true, now)?;
        Ok(request)
    }

    /// Starts a request whose input follows with [`Client::write`].
    pub fn start(&mut self, now: Instant) -> Result<u32, ClientError> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        if self.requests.len() >= self.config.max_requests || self.next_request > MAX_REQUEST {
            return Err(ClientError::TooManyRequests);
        }
        let request = self.next_request;
        self.next_request += 1;
        self.requests.insert(request, RequestState::default());
        self.update_waiting(now);
        Ok(request)
    }

    /// Adds to the input of `request`; nothing follows once `last` was set.
    pub fn write(&mut self, request: u32, data: &[u8], last: bool, now: Instant) -> Result<(), ClientError> {
        let limit = self.config.max_input_bytes;
        let state = self.requests.get_mut(&request).ok_or(ClientError::NoSuchRequest { request })?;
        if state.input_bytes() + data.len() > limit {
            return Err(ClientError::InputTooLong);
        }
        state.append_input(data, last);
        self.update_waiting(now);
        Ok(())
    }

    /// Bytes of input that `request` takes now.
    #[must_use]
    pub fn input_room(&self, request: u32) -> usize {
        let held = self.requests.get(&request).map_or(0, RequestState::input_bytes);
        self.config.max_input_bytes.saturating_sub(held)
    }

    /// Why `request` sends no more of its input, so that room for more never comes: [`Read::Reset`], or [`Read::End`]
    /// where the server has said where the output ends.
    #[must_use]
    pub fn refuses_input(&self, request: u32) -> Option<Read> {
        self.requests.get(&request).and_then(RequestState::refuses_input)
    }

    /// Reads output of `request` in order.
    pub fn read(&mut self, request: u32, buffer: &mut [u8]) -> Result<Read, ClientError> {
        let state = self.requests.get_mut(&request).ok_or(ClientError::NoSuchRequest { request })?;
        let read = state.read(buffer);
        match (read, self.failure) {
            (Read::Pending, Some(failure)) => Err(failure),
            _ => Ok(read),
        }
    }

    /// Whether [`Client::read`] gives anything but [`Read::Pending`].
    #[must_use]
    pub fn is_readable(&self, request: u32) -> bool {
        self.failure.is_some() || self.requests.get(&request).is_none_or(RequestState::is_readable)
    }

    /// Forgets a request: read to its end, or not wanted any more.
    pub fn discard(&mut self, request: u32) {
        self.requests.remove(&request);
    }

    /// Why the client has given up, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<ClientError> {
        self.failure
    }

    /// Whether the server has answered on the current connection.
    #[must_use]
    pub fn is_established(&self) -> bool {
        self.established
    }

    /// The congestion window in packets, as the server will compute it next; `None` before the first answer.
    #[must_use]
    pub fn congestion_window(&self) -> Option<u16> {
        let state = self.eras.back()?;
        Some(
            state
                .ready
                .back()
                .map_or_else(|| state.window(state.accounted()), |ready| state.window(ready.number)),
        )
    }

    /// Times that the window of the current connection was cut: recoveries and timeouts.
    #[must_use]
    pub fn loss_events(&self) -> u64 {
        self.eras.back().map_or(0, |state| state.era.counter.into())
    }

    /// Tells the server that the client is done, with the next [`Client::poll_transmit`]. Not needed: a server keeps
    /// nothing.
    pub fn close(&mut self) {
        self.close_due = true;
        self.requests.clear();
    }

    /// Feeds one datagram. An error says why it was ignored; the connection goes on.
    pub fn handle_datagram(&mut self, datagram: &[u8], now: Instant) -> Result<(), PeerError> {
        let (timestamp_us, continuation, nonce, frames) = match Answer::decode(datagram)? {
            Answer::Refused { connection, .. } if connection == self.connection && self.established => {
                self.reopen(now);
                return Ok(());
            }
            Answer::Response { connection, timestamp_us, continuation, nonce, frames }
                if connection == self.connection =>
            {
                (timestamp_us, continuation, nonce, frames)
            }
            Answer::Delta { connection, timestamp_us, delta, successor, nonce, frames }
                if connection == self.connection =>
            {
                let told = if successor { self.successor(&delta) } else { self.apply(&delta) };
                (timestamp_us, told.ok_or(PeerError::Continuation)?, nonce, frames)
            }
            _ => return Err(PeerError::OtherConnection),
        };
        let packet = Continuation::decode(&continuation).map_err(|_| PeerError::Continuation)?;
        let era = &packet.era;
        // Only an open has fewer packets sent at first than its window: what is missing, up to the largest window,
        // follows with the first acknowledgement.
        let is_cut_short = era.flight != 0 && era.counter > 0;
        if packet.number <= era.base || era.start == 0 || era.base > u64::MAX / 2 || is_cut_short {
            return Err(PeerError::Continuation);
        }
        let result = self.take_frames(&frames, self.is_fresh(&packet), now);
        self.sample(timestamp_us, &packet, now);
        self.take_packet(&packet, continuation, nonce, now);
        self.arrivals.any += 1;
        if datagram.len() >= usize::from(self.server_datagram_bytes) {
            self.arrivals.full += 1;
            self.only_short = 0;
        }
        if self.round_trip.path_is_full()
            && let Some(newest) = self.eras.back_mut()
        {
            newest.end_slow_start();
        }
        self.account(now);
        self.update_waiting(now);
        result
    }

    /// The continuation that a delta tells; of an era that was given up nothing goes on.
    fn apply(&self, delta: &RawDelta) -> Option<RawContinuation> {
        let counter = era_of(delta);
        self.eras.iter().find(|state| state.era.counter == counter)?.apply(delta)
    }

    /// The continuation that the delta of an era tells which a request of ours has begun.
    fn successor(&self, delta: &RawDelta) -> Option<RawContinuation> {
        let counter = successor_counter(delta);
        let era = self.eras.iter().find(|state| state.era.counter as u16 == counter)?.era;
        let known = self.eras.iter().filter_map(EraState::known);
        let mut known = known.chain(self.last_anchor.as_ref().map(|anchor| &anchor.raw));
        known.find_map(|known| apply_successor(known, &era, delta))
    }

    fn sample(&mut self, timestamp_us: u32, packet: &Continuation, now: Instant) {
        let elapsed_us = self.timestamp_us(now).wrapping_sub(timestamp_us);
        if elapsed_us < 120_000_000 {
            // What was sent before its own acknowledgement: with that, each round would begin a little later in a
            // train.
            let sent = packet.era.sent(packet.number - 1);
            self.round_trip.sample(Duration::from_micros(elapsed_us.into()), packet.number, sent, now);
        }
    }

    fn timestamp_us(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.started).as_micros() as u32
    }

    /// Whether a packet comes for the first time, and its era goes on.
    fn is_fresh(&self, packet: &Continuation) -> bool {
        let (counter, newest) = (packet.era.counter, self.eras.back().map_or(0, |state| state.era.counter));
        let of_era = self.eras.iter().find(|state| state.era.counter == counter);
        !self.established
            || of_era.map_or(counter > newest, |state| !state.seen || !state.knows(packet.number))
    }

    fn take_frames(&mut self, frames: &[Frame<'_>], fresh: bool, now: Instant) -> Result<(), PeerError> {
        let window = self.config.window_bytes;
        let waits = |frame: &Frame<'_>| matches!(frame, Frame::Waits { .. });
        self.promised += u64::from(fresh && frames.iter().any(waits));
        for frame in frames {
            match *frame {
                Frame::Data { sequence, data } => {
                    let (request, offset) = split_sequence(sequence);
                    if let Some(state) = self.requests.get_mut(&request) {
                        state.receive(offset, data, window);
                    }
                }
                Frame::OutputContinuation { continuation } => {
                    let user =
                        UserContinuation::decode(continuation).map_err(|_| PeerError::UserContinuation)?;
                    if user.kind != Kind::Output {
                        return Err(PeerError::UserContinuation);
                    }
                    if let Some(state) = self.requests.get_mut(&user.request) {
                        state.set_output(user.start..user.end, user.opaque, continuation);
                    }
                }
                Frame::InputContinuation { request, consumed, continuation } => {
                    if let Some(state) = self.requests.get_mut(&request) {
                        state.set_input(consumed, continuation);
                    }
                }
                Frame::Skip { from } => {
                    let (request, offset) = split_sequence(from);
                    if let Some(state) = self.requests.get_mut(&request) {
                        state.ends_at(offset);
                    }
                }
                Frame::Waits { request } => {
                    if let Some(state) = self.requests.get_mut(&request).filter(|_| fresh) {
                        state.wait_until(now + self.round_trip.backed_off_open(state.waits(), 0));
                    }
                }
                // The continuation that a late copy speaks of is not the one that has come since.
                Frame::Reset { code: RESET_EXPIRED, .. } if !fresh => {}
                Frame::Reset { request, code } => {
                    if let Some(state) = self.requests.get_mut(&request) {
                        state.fail(code);
                    }
                }
            }
        }
        Ok(())
    }

    /// Puts a packet into its era. A packet of an era that was given up brings data but no trickle.
    fn take_packet(&mut self, packet: &Continuation, raw: RawContinuation, nonce: u64, now: Instant) {
        let opens = !self.established;
        if opens {
            if packet.era.start > MAX_INITIAL_WINDOW {
                return;
            }
            self.establish(packet);
        }
        let newest = self.eras.back().map_or(0, |state| state.era.counter);
        if packet.era.counter > newest {
            // An era that we did not foresee, for example of a server with another burst limit: it decides.
            self.add_era(packet.era);
        }
        let Some(state) = self.eras.iter_mut().find(|state| state.era.counter == packet.era.counter) else {
            return;
        };
        if !state.seen {
            if state.era.base != packet.era.base {
                let expected = std::mem::take(&mut state.expected);
                *state = EraState::new(packet.era);
                for expected in expected.into_values() {
                    settle(&mut self.requests, expected);
                }
            }
            state.era = packet.era;
            state.seen = true;
        }
        if state.era.tag != packet.era.tag || !state.insert(packet.number, raw, nonce, now) {
            match self.promised.checked_sub(1) {
                Some(left) => self.promised = left,
                None => self.copies += 1,
            }
            return;
        }
        if let Some(expected) = state.expected.remove(&packet.number) {
            settle(&mut self.requests, expected);
        }
        self.server_datagram_bytes =
            packet.datagram_bytes.max(MIN_DATAGRAM_BYTES).min(self.config.datagram_bytes);
        if !opens && self.backoff > LONG_ATTEMPTS {
            self.only_short += 1;
        }
        self.backoff = 0;
        self.attempts = 0;
        self.probed = false;
        self.timeout_due = false;
        self.waiting_since = self.waiting_since.map(|_| now);
    }

    /// The longest datagram that every path is believed to carry.
    fn short_bytes(&self) -> u16 {
        self.config.short_datagram_bytes.max(MIN_DATAGRAM_BYTES)
    }

    /// The first answer to an open request tells how many packets the server has sent.
    fn establish(&mut self, packet: &Continuation) {
        self.established = true;
        self.open_due = false;
        let mut state = EraState::new(packet.era);
        let wants = std::mem::take(&mut self.open_wants);
        let inputs = std::mem::take(&mut self.open_inputs);
        let last = packet.era.sent(packet.era.base);
        for number in packet.era.base + 1..=last {
            let index = (number - packet.era.base - 1) as usize;
            let want = wants.get(index).cloned();
            // The last packet answers input also where it brings what was asked for.
            let pushes =
                if want.is_none() || number == last { self.count_pushes(&inputs) } else { Vec::new() };
            state.expected.insert(number, Expected { want, pushes });
        }
        for (request, range) in wants.into_iter().skip(state.expected.len()) {
            if let Some(state) = self.requests.get_mut(&request) {
                state.unask(range);
            }
        }
        self.eras.clear();
        self.eras.push_back(state);
    }

    fn count_pushes(&mut self, inputs: &[u32]) -> Vec<u32> {
        let mut pushes = Vec::new();
        for request in inputs {
            if let Some(state) = self.requests.get_mut(request) {
                state.expect_push();
                pushes.push(*request);
            }
        }
        pushes
    }

    /// Accounts for packets in all eras and takes back what lost packets were to bring.
    fn account(&mut self, now: Instant) {
        let reordering = self.round_trip.reordering();
        for index in 0..self.eras.len() {
            let later = self.eras.get(index + 1).map_or(0, |next| next.arrivals);
            for expected in self.eras[index].advance(later, now, reordering).lost {
                settle(&mut self.requests, expected);
            }
        }
        while self.eras.len() > 1 && self.eras[0].finished() {
            self.drop_oldest_era();
        }
    }

    /// Room for an era that is not known yet, before those that are newer: a server may have told of one that we did
    /// not foresee.
    fn add_era(&mut self, era: Era) -> &mut EraState {
        if self.eras.len() == MAX_ERAS {
            self.drop_oldest_era();
        }
        let place = self.eras.partition_point(|state| state.era.counter < era.counter);
        self.eras.insert(place, EraState::new(era));
        &mut self.eras[place]
    }

    fn drop_oldest_era(&mut self) {
        if let Some(state) = self.eras.pop_front() {
            self.last_anchor = state.anchor().or(self.last_anchor.take());
            for expected in state.expected.into_values() {
                settle(&mut self.requests, expected);
            }
        }
    }

    /// Where a timeout starts over from: the newest era of which a packet arrived.
    fn anchor(&self) -> Option<Anchor> {
        self.eras.iter().rev().find_map(EraState::anchor).or_else(|| self.last_anchor.clone())
    }

    fn unfinished(&self) -> bool {
        let window = self.config.window_bytes;
        self.requests.values().any(|state| state.unfinished(window))
    }

    fn update_waiting(&mut self, now: Instant) {
        if !self.unfinished() {
            self.waiting_since = None;
        } else if self.waiting_since.is_none() {
            self.waiting_since = Some(now);
        }
    }

    /// Checks what must always hold; for tests.
    ///
    /// # Panics
    ///
    /// Where it does not.
    #[doc(hidden)]
    pub fn check_invariants(&self) {
        assert!(self.eras.len() <= MAX_ERAS, "eras are bounded");
        let counters: Vec<u32> = self.eras.iter().map(|state| state.era.counter).collect();
        assert!(counters.windows(2).all(|pair| pair[0] < pair[1]), "eras are in order: {counters:?}");
        assert!(
            self.failure.is_some()
                || !self.unfinished()
                || self.open_due
                || self.timeout_due
                || self.rto_at().is_some(),
            "a timer runs while anything is wanted"
        );
        for state in &self.eras {
            let numbers: Vec<u64> = state.ready.iter().map(|ready| ready.number).collect();
            assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "trickles are in order: {numbers:?}");
        }
    }
}

/// Takes note that a packet has come, or will not come: what it did not bring may be asked for again.
fn settle(requests: &mut BTreeMap<u32, RequestState>, expected: Expected) {
    if let Some((request, range)) = expected.want
        && let Some(state) = requests.get_mut(&request)
    {
        state.unask(range);
    }
    for request in expected.pushes {
        if let Some(state) = requests.get_mut(&request) {
            state.push_settled();
        }
    }
}
