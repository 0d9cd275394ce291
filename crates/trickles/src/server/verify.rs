//! What a datagram has to show before it is answered, and which packets it sets free then.

use super::{Event, Head, Minisocket, Outer, Refusal, Server, Template, kind_of};
use crate::client::LARGEST_DATAGRAM_BYTES;
use crate::congestion::{self, AccountError, Era, MAX_SUCCESSORS, Release, Run};
use crate::continuation::{Continuation, peer_bytes, proves};
use crate::cubic::{self, Cubic};
use crate::cwnd::{MAX_INITIAL_WINDOW, MAX_WINDOW};
use crate::nonce::{EraCause, Secret};
use crate::wire::{self, Account, Ask, RESPONSE_HEAD_BYTES, Request, WireError};
use std::net::SocketAddr;
use std::sync::Arc;

/// At most one timeout of a connection is answered in each slot of 2⁸ ms: a timeout starts two trickles that no
/// received packet paid for, so that it must not be had for nothing.
const TIMEOUT_SLOT_BITS: u32 = 8;

/// The round-trip time may halve within a recovery, whose requests must agree on it.
const RTT_SLACK: u8 = 2;
/// Shorter samples of the round-trip time are no shorter than clocks of milliseconds tell.
const LEAST_SAMPLE_US: u32 = 1000;

impl Server {
    /// Verifies one datagram, and builds the event for the application. `None` where the trickle ends with it.
    pub(super) fn verify<'d>(
        &mut self,
        datagram: &'d [u8],
        outer: Outer,
        peer: SocketAddr,
        now_ms: u64,
    ) -> Result<Option<(Event<'d>, Minisocket)>, Refusal> {
        if datagram.len() > self.config.datagram_bytes.max(LARGEST_DATAGRAM_BYTES).into() {
            // What waits for the application is kept: its length has to be bounded as its number is.
            return Err(WireError::Bounds { what: "datagram length", value: datagram.len() as u64 }.into());
        }
        let request = Request::decode(datagram)?;
        let socket = match &request.ask {
            Ask::Open { datagram_bytes } => self.open(&request, *datagram_bytes, outer, peer, now_ms)?,
            Ask::Continue { account, group } => {
                self.proceed(&request, account, *group, false, peer, now_ms)?
            }
            Ask::Timeout { account, attempt } => {
                self.proceed(&request, account, *attempt, true, peer, now_ms)?
            }
            Ask::Close { account } => {
                let (_, continuation, secret) =
                    self.authenticate(request.connection, account, peer, now_ms)?;
                let template = Template {
                    continuation,
                    now_ms,
                    secret,
                    connection: request.connection,
                    timestamp_us: 0,
                    head: Head::Full,
                };
                Some(Minisocket::new(Arc::clone(&self.keys), peer, template, std::iter::empty(), 0))
            }
        };
        let Some(socket) = socket else {
            self.counters.trickles_terminated_total.add(1);
            return Ok(None);
        };
        self.event(kind_of(&request.ask), &request, peer, socket).map(Some)
    }

    /// The paper's SYN (§6.1): answered at once, with no more than the address has paid for.
    fn open(
        &self,
        request: &Request<'_>,
        client_bytes: u16,
        Outer { received_bytes, answer_bytes }: Outer,
        peer: SocketAddr,
        now_ms: u64,
    ) -> Result<Option<Minisocket>, Refusal> {
        let cubic = (client_bytes & wire::CUBIC_WANTED != 0 && self.config.cubic).then(Cubic::default);
        let size = (client_bytes & !wire::CUBIC_WANTED).min(self.config.datagram_bytes);
        let budget = if received_bytes >= wire::PADDED_BYTES { 3 * received_bytes } else { received_bytes };
        let window = self.config.initial_window.clamp(1, MAX_INITIAL_WINDOW);
        let affordable = budget / (usize::from(size) + answer_bytes);
        let (flight, packet_bytes) = match affordable {
            0 if budget < RESPONSE_HEAD_BYTES + answer_bytes => return Err(Refusal::TooSmall),
            0 => (1, budget - answer_bytes),
            n => (n.min(window.into()) as u8, size.into()),
        };
        let keys = self.keys.current();
        let mut identity = [0; 26];
        identity[..8].copy_from_slice(&request.connection.to_be_bytes());
        identity[8..].copy_from_slice(&peer_bytes(peer));
        // The same open, repeated by network or client, opens the same connection again.
        let sealed = keys.open.tag(&identity);
        let secret = Secret::new(&keys.seal.encrypt(sealed));
        let era = Era {
            counter: 0,
            tag: secret.next_era(0, EraCause::Open),
            base: 0,
            start: window,
            ssthresh: MAX_WINDOW,
            flight: if u16::from(flight) < window { flight } else { 0 },
            cubic,
        };
        let continuation = Continuation {
            epoch: keys.epoch,
            number: 0,
            era,
            timestamp_ms: now_ms as u32,
            srtt_us: 0,
            rttvar_us: 0,
            datagram_bytes: size,
            sealed,
        };
        self.counters.trickles_opens_total.add(1);
        let (connection, timestamp_us) = (request.connection, request.timestamp_us);
        let template = Template { continuation, now_ms, secret, connection, timestamp_us, head: Head::Full };
        let numbers = 1..=u64::from(flight);
        Ok(Some(Minisocket::new(Arc::clone(&self.keys), peer, template, numbers, packet_bytes)))
    }

    /// Epoch, MAC and age of a request's continuation; also the plain secret and its expanded form.
    fn authenticate(
        &mut self,
        connection: u64,
        account: &Account,
        peer: SocketAddr,
        now_ms: u64,
    ) -> Result<([u8; 16], Continuation, Secret), Refusal> {
        let epoch = Continuation::epoch_of(&account.continuation);
        let keys = self.keys.get(epoch).ok_or(Refusal::UnknownEpoch { epoch, connection })?;
        if !Continuation::verify(&account.continuation, keys, peer, now_ms) {
            // The client's address may have changed, by the doing of a translator on the way that only we can see. One in
            // each millisecond is told: forged packets come by the million, and are not worth as many answers.
            let told_ms = std::mem::replace(&mut self.address_told_ms, now_ms);
            return Err(Refusal::Forged { connection: (told_ms != now_ms).then_some(connection) });
        }
        let continuation = Continuation::decode(&account.continuation)?;
        let age_ms = (now_ms as u32).wrapping_sub(continuation.timestamp_ms);
        let ahead_ms = age_ms.wrapping_neg();
        // From here on nothing of this request makes the table turn, which would forget what the age is judged by.
        self.replay.make_room(now_ms);
        let remembered = now_ms.saturating_sub(self.replay.complete_since_ms());
        let too_old = age_ms > self.config.horizon_ms || u64::from(age_ms) > remembered;
        if too_old && ahead_ms > self.config.clock_skew_ms {
            return Err(Refusal::Stale { connection });
        }
        let sealed = continuation.sealed;
        let (plain, secret) = self.soft.secret(epoch, sealed, || keys.seal.encrypt(sealed));
        Ok((plain, continuation, secret))
    }

    /// A request or timeout of an open connection.
    fn proceed(
        &mut self,
        request: &Request<'_>,
        account: &Account,
        argument: u8,
        timeout: bool,
        peer: SocketAddr,
        now_ms: u64,
    ) -> Result<Option<Minisocket>, Refusal> {
        let (plain, mut continuation, secret) =
            self.authenticate(request.connection, account, peer, now_ms)?;
        let (era, number) = (continuation.era, continuation.number);
        let runs: Vec<Run> = account.runs.iter().map(|proved| proved.run).collect();
        let mut release = if timeout {
            congestion::time_out(&era, &runs, number, argument)?
        } else {
            congestion::acknowledge(&era, &runs, number, argument)?
        };
        let (part, rtt) = era.split_argument(argument);
        if !timeout {
            update_round_trip(&mut continuation, account.held_ms, now_ms);
        }
        let of_era = era.cubic.filter(|_| !timeout).map_or(0, |cubic| cubic.rtt);
        self.check_account(&continuation, &secret, account, rtt.max(of_era), release.first_loss(), now_ms)?;
        let fresh = self.take_rights(&secret, era.tag, number, part, timeout, now_ms)?;
        // What an earlier request has set free is not set free again: this one repeats it in case that one was lost.
        let asked = release.count();
        if !timeout && fresh < part {
            let argument = era.join_argument(fresh, rtt).unwrap_or_default();
            release = congestion::acknowledge(&era, &runs, number, argument)?;
        }
        self.counters.trickles_requests_total.add(1);
        self.counters.trickles_timeouts_total.add(timeout.into());
        self.counters.trickles_recoveries_total.add((!timeout && release.cause.is_some()).into());
        if release.count() == 0 {
            return Ok(None);
        }
        continuation.era = release.era;
        if let Some(cause) = release.cause {
            continuation.era.tag = self.begin_era(&secret, era.tag, cause, &release, now_ms)?;
        }
        let head = self.renew(&mut continuation, plain, release.cause, now_ms);
        let (connection, timestamp_us) = (request.connection, request.timestamp_us);
        let most = if timeout { wire::most_bytes_of_attempt(part.into()) } else { u16::MAX };
        let size = continuation.datagram_bytes.min(self.config.datagram_bytes).min(most).into();
        let template = Template { continuation, now_ms, secret, connection, timestamp_us, head };
        let mut socket = Minisocket::new(Arc::clone(&self.keys), peer, template, release.numbers(), size);
        socket.answered_before = asked.saturating_sub(release.count()) as usize;
        Ok(Some(socket))
    }

    /// Whether an account is proved by its nonces, and agrees with what the server has measured and was told before.
    /// `rtt` is the code of the longest round-trip time that the client claims.
    fn check_account(
        &mut self,
        continuation: &Continuation,
        secret: &Secret,
        account: &Account,
        rtt: u8,
        first_loss: Option<u64>,
        now_ms: u64,
    ) -> Result<(), Refusal> {
        // A client that claims a longer round trip would have its window grow sooner, all through an era.
        if rtt > cubic::rtt_code(continuation.srtt_us) + RTT_SLACK {
            return Err(Refusal::Account(AccountError::BadGroup));
        }
        if !proves(secret, &continuation.era, &account.runs) {
            return Err(Refusal::Unproved);
        }
        let remembered = secret.era_to_remember(continuation.era.tag);
        if !self.replay.agrees(remembered, first_loss, continuation.number, now_ms) {
            return Err(Refusal::Account(AccountError::Contradiction));
        }
        Ok(())
    }

    /// Uses up the rights to an answer that a request has: one for each of the `part` packets up to `number` that it
    /// acknowledges, or the one of a timeout's slot. How many of them had not been used before, at least one.
    fn take_rights(
        &mut self,
        secret: &Secret,
        tag: u32,
        number: u64,
        part: u8,
        timeout: bool,
        now_ms: u64,
    ) -> Result<u8, Refusal> {
        let mut fingerprints = [0; congestion::MAX_GROUP as usize];
        let used = if timeout { 1 } else { usize::from(part) };
        match timeout {
            true => fingerprints[0] = secret.replay_of_timeout(now_ms >> TIMEOUT_SLOT_BITS),
            false => secret.replay_of_packets(tag, number, &mut fingerprints[..used]),
        }
        match self.replay.take_fresh(&fingerprints[..used], now_ms) {
            0 => Err(Refusal::Replayed),
            fresh => Ok(fresh as u8),
        }
    }

    /// The tag of the era that a loss or a timeout begins after the era `before`.
    fn begin_era(
        &mut self,
        secret: &Secret,
        before: u32,
        cause: EraCause,
        release: &Release,
        now_ms: u64,
    ) -> Result<u32, Refusal> {
        let tag = secret.next_era(before, cause);
        // All accounts of honest clients set other packets free; and a timeout that is sent again sets the same ones
        // free.
        let mut successors = [0; MAX_SUCCESSORS];
        let successors = successors.get_mut(..release.count() as usize).ok_or(AccountError::BadGroup)?;
        secret.replay_of_successors(tag, release.packets.end - 1, successors);
        if self.replay.take_fresh(successors, now_ms) < successors.len() {
            return Err(match cause {
                EraCause::Timeout { .. } => Refusal::Replayed,
                _ => Refusal::Account(AccountError::Contradiction),
            });
        }
        self.replay.keep_loss(secret.era_to_remember(tag), now_ms);
        Ok(tag)
    }

    /// Dates a continuation and puts it under the key epoch in force. How much of it the client has to be told.
    fn renew(
        &self,
        continuation: &mut Continuation,
        plain: [u8; 16],
        cause: Option<EraCause>,
        now_ms: u64,
    ) -> Head {
        continuation.timestamp_ms = now_ms as u32;
        let keys = self.keys.current();
        if continuation.epoch != keys.epoch {
            continuation.sealed = keys.reseal(plain);
            continuation.epoch = keys.epoch;
            return Head::Full;
        }
        // The client has a continuation of the key epoch: the one that it sent.
        if cause.is_some() { Head::Successor } else { Head::Delta }
    }
}

/// RFC 6298 §2 with the continuation's timestamp in place of a clock of the connection.
fn update_round_trip(continuation: &mut Continuation, held_ms: u16, now_ms: u64) {
    let elapsed_ms = (now_ms as u32).wrapping_sub(continuation.timestamp_ms);
    let Some(sample_ms) = elapsed_ms.checked_sub(held_ms.into()).filter(|&ms| ms < 120_000) else { return };
    let sample_us = sample_ms * 1000;
    // Who has answered late once, and says that it did not, has no long round trip for it from then on.
    continuation.srtt_us = continuation.srtt_us.min(2 * sample_us.max(LEAST_SAMPLE_US));
    if continuation.srtt_us == 0 {
        continuation.srtt_us = sample_us;
        continuation.rttvar_us = sample_us / 2;
    } else {
        let difference = continuation.srtt_us.abs_diff(sample_us);
        continuation.rttvar_us = continuation.rttvar_us - continuation.rttvar_us / 4 + difference / 4;
        continuation.srtt_us = continuation.srtt_us - continuation.srtt_us / 8 + sample_us / 8;
    }
}
