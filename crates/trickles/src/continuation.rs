//! The transport continuation: a server's state about a connection, carried by the client (Trickles §2.1).
//!
//! A continuation is [`CONTINUATION_BYTES`] bytes and authenticated. A request adds a count of runs m, one argument
//! byte and the account of received packets in m runs of 12 bytes: 75 + 12·m bytes together. All numbers are
//! big-endian.

use crate::congestion::{Era, Run};
use crate::cubic::Cubic;
use crate::keys::EpochKeys;
use crate::mac::Block;
use crate::nonce::{self, NONCE_BYTES, Secret};
use std::net::{IpAddr, SocketAddr};

/// Bytes of a continuation, its MAC included.
pub const CONTINUATION_BYTES: usize = 73;
/// Bytes that an account without runs adds to a continuation in a request.
pub const ACCOUNT_HEAD_BYTES: usize = 2;
/// Bytes of one run with its nonce.
pub const RUN_BYTES: usize = 12;
/// Most runs that an account may have.
pub const MAX_RUNS: usize = 64;

const AUTHENTICATED_BYTES: usize = CONTINUATION_BYTES - 16;
const PEER_BYTES: usize = 18;
/// The upper half of the server's clock, which a continuation does not tell.
const CLOCK_HIGH_BYTES: usize = 4;
const FORMAT: u8 = 1;
/// The same with CUBIC: the variation of the round-trip time has three bytes, before them one says what the era needs.
const FORMAT_CUBIC: u8 = 2;
const FAST: u8 = 0x80;

/// A continuation as it travels.
pub type RawContinuation = [u8; CONTINUATION_BYTES];

/// Bytes of what differs between two continuations of an era.
pub const DELTA_BYTES: usize = 37;

/// What differs between two continuations of an era, as it travels (Trickles §5.3): key epoch (1), packet number less
/// the base (4), era counter (4), the server's clock, round-trip time and variation (12), MAC (16).
pub type RawDelta = [u8; DELTA_BYTES];

/// Where these fields are in a continuation.
const DELTA_FIELDS: [std::ops::Range<usize>; 5] = [1..2, 10..14, 19..23, 27..39, 57..73];

/// Where the sealed value is.
const SEALED: std::ops::Range<usize> = 41..57;

/// What `raw` says that the client does not know from another continuation of the era.
#[must_use]
pub fn delta_of(raw: &RawContinuation) -> RawDelta {
    let mut delta = [0; DELTA_BYTES];
    let mut at = 0;
    for field in DELTA_FIELDS {
        delta[at..at + field.len()].copy_from_slice(&raw[field.clone()]);
        at += field.len();
    }
    delta
}

/// The era counter of a delta: the era whose continuations it can be applied to.
#[must_use]
pub fn era_of(delta: &RawDelta) -> u32 {
    u32::from_be_bytes([delta[5], delta[6], delta[7], delta[8]])
}

/// The continuation that `delta` was taken from, `known` being another one of the same era; `None` where it is not, or
/// of another key epoch.
#[must_use]
pub fn apply_delta(known: &RawContinuation, delta: &RawDelta) -> Option<RawContinuation> {
    if known[1] != delta[0] || known[19..23] != delta[5..9] {
        return None;
    }
    let base = Continuation::decode(known).ok()?.era.base;
    let mut raw = *known;
    let mut at = 0;
    for field in DELTA_FIELDS {
        let length = field.len();
        raw[field].copy_from_slice(&delta[at..at + length]);
        at += length;
    }
    let offset = u32::from_be_bytes([delta[1], delta[2], delta[3], delta[4]]);
    raw[2..10].copy_from_slice(&base.checked_add(offset.into())?.to_be_bytes());
    Some(raw)
}

/// Whether `raw` can be told by a delta to whoever has `known`, another continuation of the era, once the key epochs are
/// the same. Where a client has opened a connection twice and asked for different packets, the answers to one open are
/// not kin to those of the other.
#[must_use]
pub fn is_kin(known: &RawContinuation, raw: &RawContinuation) -> bool {
    let mut known = *known;
    if known[1] != raw[1] {
        known[1] = raw[1];
        known[SEALED].copy_from_slice(&raw[SEALED]);
    }
    apply_delta(&known, &delta_of(raw)).as_ref() == Some(raw)
}

/// Where the fields of a delta are that begins an era: packet number less the base (2) and era counter (2) in their
/// lower halves, and with the room that this leaves the era's tag, which only a server can compute.
const SUCCESSOR_FIELDS: [std::ops::Range<usize>; 6] = [1..2, 12..14, 21..23, 23..27, 27..39, 57..73];

/// What `raw` says that the client does not know from a continuation of another era and its own account, which led to
/// this one; `None` where that does not fit.
#[must_use]
pub fn successor_of(raw: &RawContinuation) -> Option<RawDelta> {
    let mut delta = [0; DELTA_BYTES];
    let mut at = 0;
    for field in SUCCESSOR_FIELDS {
        delta[at..at + field.len()].copy_from_slice(&raw[field.clone()]);
        at += field.len();
    }
    (raw[10..12] == [0, 0] && raw[18] == 0).then_some(delta)
}

/// The lower half of the era counter of a delta that begins an era.
#[must_use]
pub fn successor_counter(delta: &RawDelta) -> u16 {
    u16::from_be_bytes([delta[3], delta[4]])
}

/// The continuation that `delta` was taken from, `known` being any of the connection and `era` what the account led to;
/// `None` where they are not, or `known` is of another key epoch.
#[must_use]
pub fn apply_successor(known: &RawContinuation, era: &Era, delta: &RawDelta) -> Option<RawContinuation> {
    if known[1] != delta[0] || era.counter as u16 != successor_counter(delta) {
        return None;
    }
    let mut raw = *known;
    let offset = u64::from(u16::from_be_bytes([delta[1], delta[2]]));
    raw[2..10].copy_from_slice(&era.base.checked_add(offset)?.to_be_bytes());
    raw[10..14].copy_from_slice(&(offset as u32).to_be_bytes());
    raw[14..16].copy_from_slice(&era.start.to_be_bytes());
    raw[16..18].copy_from_slice(&era.ssthresh.to_be_bytes());
    raw[18] = 0;
    raw[19..23].copy_from_slice(&era.counter.to_be_bytes());
    let mut at = 0;
    for field in SUCCESSOR_FIELDS {
        let length = field.len();
        raw[field].copy_from_slice(&delta[at..at + length]);
        at += length;
    }
    Some(raw)
}

/// The state that a server hands to its client.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Continuation {
    /// Key epoch of the MAC and of `sealed`.
    pub epoch: u8,
    /// Number of the packet that carries the continuation; at least the era's base.
    pub number: u64,
    /// State of congestion control.
    pub era: Era,
    /// The server's clock when it was made, in milliseconds, modulo 2³².
    pub timestamp_ms: u32,
    /// Smoothed round-trip time; 0 before the first sample.
    pub srtt_us: u32,
    /// Variation of the round-trip time.
    pub rttvar_us: u32,
    /// Largest datagram, in bytes, that the client takes.
    pub datagram_bytes: u16,
    /// The connection's secret, sealed under the epoch's key.
    pub sealed: Block,
}

/// Why bytes are no continuation. A client meets it in a broken server; a server in a forged request.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("continuation format {format} is unknown")]
pub struct UnknownFormat {
    /// The format byte.
    pub format: u8,
}

impl Continuation {
    /// Writes and authenticates the continuation for the client at `peer`, at most 24 days from `now_ms`.
    ///
    /// The address is part of what is authenticated: whoever holds a continuation cannot have its packets sent to
    /// somebody else. So is the upper half of the clock: when the lower half comes round, in 50 days, no continuation
    /// is young again.
    #[must_use]
    pub fn sign(&self, keys: &EpochKeys, peer: SocketAddr, now_ms: u64) -> RawContinuation {
        let mut raw = [0; CONTINUATION_BYTES];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            raw[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&[if self.era.cubic.is_some() { FORMAT_CUBIC } else { FORMAT }, self.epoch]);
        put(&self.number.to_be_bytes());
        put(&((self.number - self.era.base) as u32).to_be_bytes());
        put(&self.era.start.to_be_bytes());
        put(&self.era.ssthresh.to_be_bytes());
        put(&[self.era.flight]);
        put(&self.era.counter.to_be_bytes());
        put(&self.era.tag.to_be_bytes());
        put(&self.timestamp_ms.to_be_bytes());
        put(&self.srtt_us.to_be_bytes());
        match self.era.cubic {
            None => put(&self.rttvar_us.to_be_bytes()),
            Some(cubic) => {
                let [_, variation @ ..] = self.rttvar_us.min(0xff_ffff).to_be_bytes();
                put(&[cubic.rtt | if cubic.fast { FAST } else { 0 }]);
                put(&variation);
            }
        }
        put(&self.datagram_bytes.to_be_bytes());
        put(&self.sealed);
        let tag = keys.transport.tag(&authenticated(&raw, peer, now_ms));
        raw[AUTHENTICATED_BYTES..].copy_from_slice(&tag);
        raw
    }

    /// Whether `keys` signed `raw` for the client at `peer`, at most 24 days from `now_ms`.
    #[must_use]
    pub fn verify(raw: &RawContinuation, keys: &EpochKeys, peer: SocketAddr, now_ms: u64) -> bool {
        let mut tag = [0; 16];
        tag.copy_from_slice(&raw[AUTHENTICATED_BYTES..]);
        keys.transport.verify(&authenticated(raw, peer, now_ms), &tag)
    }

    /// The epoch whose keys signed `raw`.
    #[must_use]
    pub fn epoch_of(raw: &RawContinuation) -> u8 {
        raw[1]
    }

    /// Reads the fields; says nothing about who wrote them.
    pub fn decode(raw: &RawContinuation) -> Result<Self, UnknownFormat> {
        if raw[0] != FORMAT && raw[0] != FORMAT_CUBIC {
            return Err(UnknownFormat { format: raw[0] });
        }
        let mut rest = &raw[1..];
        fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
            let mut bytes = [0; N];
            if let Some((head, tail)) = rest.split_first_chunk::<N>() {
                bytes = *head;
                *rest = tail;
            }
            bytes
        }
        let [epoch] = take(&mut rest);
        let number = u64::from_be_bytes(take(&mut rest));
        let base = number.saturating_sub(u32::from_be_bytes(take(&mut rest)).into());
        let start = u16::from_be_bytes(take(&mut rest));
        let ssthresh = u16::from_be_bytes(take(&mut rest));
        let [flight] = take(&mut rest);
        let counter = u32::from_be_bytes(take(&mut rest));
        let tag = u32::from_be_bytes(take(&mut rest));
        let timestamp_ms = u32::from_be_bytes(take(&mut rest));
        let srtt_us = u32::from_be_bytes(take(&mut rest));
        let mut variation: [u8; 4] = take(&mut rest);
        let cubic = (raw[0] == FORMAT_CUBIC).then(|| {
            let code = std::mem::take(&mut variation[0]);
            Cubic { rtt: code & !FAST, fast: code & FAST != 0 }
        });
        Ok(Self {
            epoch,
            number,
            era: Era { counter, tag, base, start, ssthresh, flight, cubic },
            timestamp_ms,
            srtt_us,
            rttvar_us: u32::from_be_bytes(variation),
            datagram_bytes: u16::from_be_bytes(take(&mut rest)),
            sealed: take(&mut rest),
        })
    }
}

fn authenticated(
    raw: &RawContinuation,
    peer: SocketAddr,
    now_ms: u64,
) -> [u8; AUTHENTICATED_BYTES + PEER_BYTES + CLOCK_HIGH_BYTES] {
    let mut message = [0; AUTHENTICATED_BYTES + PEER_BYTES + CLOCK_HIGH_BYTES];
    let (head, rest) = message.split_at_mut(AUTHENTICATED_BYTES);
    head.copy_from_slice(&raw[..AUTHENTICATED_BYTES]);
    rest[..PEER_BYTES].copy_from_slice(&peer_bytes(peer));
    // Of all times that end in the lower half, the nearest.
    let told_ms = u32::from_be_bytes([head[27], head[28], head[29], head[30]]);
    let since_ms = told_ms.wrapping_sub(now_ms as u32) as i32;
    let high = (now_ms.wrapping_add_signed(since_ms.into()) >> 32) as u32;
    rest[PEER_BYTES..].copy_from_slice(&high.to_be_bytes());
    message
}

/// An address and port as they enter a MAC: IPv4 as IPv4-mapped IPv6, so that a socket of either family agrees.
#[must_use]
pub fn peer_bytes(peer: SocketAddr) -> [u8; PEER_BYTES] {
    let mut bytes = [0; PEER_BYTES];
    let address = match peer.ip() {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    bytes[..16].copy_from_slice(&address.octets());
    bytes[16..].copy_from_slice(&peer.port().to_be_bytes());
    bytes
}

/// A run of received packets and the XOR of their nonces: 12 bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ProvedRun {
    /// Lost packets, then received packets.
    pub run: Run,
    /// XOR of the received packets' nonces, 48 bits.
    pub nonces: u64,
}

impl ProvedRun {
    /// The run as it travels: lost (2), received (4), nonces (6).
    #[must_use]
    pub fn to_bytes(&self) -> [u8; RUN_BYTES] {
        let mut bytes = [0; RUN_BYTES];
        bytes[..2].copy_from_slice(&self.run.gap.to_be_bytes());
        bytes[2..6].copy_from_slice(&self.run.length.to_be_bytes());
        bytes[6..].copy_from_slice(&nonce::to_bytes(self.nonces));
        bytes
    }

    /// A run from the wire.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; RUN_BYTES]) -> Self {
        let [g0, g1, l0, l1, l2, l3, n @ ..] = *bytes;
        const { assert!(NONCE_BYTES == RUN_BYTES - 6) };
        Self {
            run: Run { gap: u16::from_be_bytes([g0, g1]), length: u32::from_be_bytes([l0, l1, l2, l3]) },
            nonces: nonce::from_bytes(n),
        }
    }
}

/// Whether every run of an era was received: constant time for each run, however long (Trickles §2.2).
#[must_use]
pub fn proves(secret: &Secret, era: &Era, runs: &[ProvedRun]) -> bool {
    let mut position = era.base;
    let mut difference = 0;
    for proved in runs {
        let first = position.saturating_add(u64::from(proved.run.gap)).saturating_add(1);
        position = first.saturating_add(u64::from(proved.run.length)).saturating_sub(1);
        difference |= secret.range(era.tag, first, position) ^ proved.nonces;
    }
    difference == 0
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn any_continuation() -> impl Strategy<Value = Continuation> {
        let era = (any::<u32>(), any::<u32>(), 0..u64::MAX / 2, any::<u16>(), any::<u16>(), any::<u8>());
        (any::<u8>(), any::<u32>(), era, any::<[u32; 3]>(), any::<u16>(), any::<Block>()).prop_map(
            |(
                epoch,
                offset,
                (counter, tag, base, start, ssthresh, flight),
                times,
                datagram_bytes,
                sealed,
            )| {
                Continuation {
                    epoch,
                    number: base + u64::from(offset),
                    era: Era { counter, tag, base, start, ssthresh, flight, cubic: None },
                    timestamp_ms: times[0],
                    srtt_us: times[1],
                    rttvar_us: times[2],
                    datagram_bytes,
                    sealed,
                }
            },
        )
    }

    const NOW_MS: u64 = 1_700_000_000_000;

    fn peer() -> SocketAddr {
        "192.0.2.1:4000".parse().unwrap()
    }

    proptest! {
        #[test]
        fn a_continuation_read_back_is_the_same_and_verifies(continuation in any_continuation()) {
            let keys = EpochKeys::derive(continuation.epoch, &[3; 16]);
            let raw = continuation.sign(&keys, peer(), NOW_MS);
            prop_assert_eq!(Continuation::decode(&raw), Ok(continuation));
            prop_assert!(Continuation::verify(&raw, &keys, peer(), NOW_MS));
            prop_assert!(Continuation::verify(&raw, &keys, "[::ffff:192.0.2.1]:4000".parse().unwrap(), NOW_MS));
        }

        #[test]
        fn a_continuation_with_a_bit_changed_or_for_another_address_is_refused(
            continuation in any_continuation(), bit in 0..CONTINUATION_BYTES * 8,
        ) {
            let keys = EpochKeys::derive(continuation.epoch, &[3; 16]);
            let mut raw = continuation.sign(&keys, peer(), NOW_MS);
            prop_assert!(!Continuation::verify(&raw, &keys, "192.0.2.1:4001".parse().unwrap(), NOW_MS));
            prop_assert!(!Continuation::verify(&raw, &keys, "192.0.2.2:4000".parse().unwrap(), NOW_MS));
            raw[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!Continuation::verify(&raw, &keys, peer(), NOW_MS));
        }

        #[test]
        fn a_continuation_when_the_lower_half_of_the_clock_comes_round_then_it_is_refused(
            continuation in any_continuation(), since_ms in -0x7fff_ffff_i64..0x7fff_ffff, rounds in 1..9_u64,
        ) {
            let keys = EpochKeys::derive(continuation.epoch, &[3; 16]);
            let made_ms = NOW_MS & !0xffff_ffff | u64::from(continuation.timestamp_ms);
            let raw = continuation.sign(&keys, peer(), made_ms);
            let at_ms = made_ms.wrapping_add_signed(since_ms);
            prop_assert!(Continuation::verify(&raw, &keys, peer(), at_ms));
            prop_assert!(!Continuation::verify(&raw, &keys, peer(), at_ms + (rounds << 32)));
            prop_assert!(!Continuation::verify(&raw, &keys, peer(), at_ms - (rounds << 32)));
        }

        #[test]
        fn a_delta_applied_to_another_continuation_of_its_era_is_the_continuation(
            continuation in any_continuation(), other: u32, time: u32,
        ) {
            let keys = EpochKeys::derive(continuation.epoch, &[3; 16]);
            let raw = continuation.sign(&keys, peer(), NOW_MS);
            let base = Continuation::decode(&raw).unwrap().era.base;
            let known = Continuation {
                number: base.saturating_add(other.into()), timestamp_ms: time, srtt_us: time, ..continuation
            };
            let known = known.sign(&keys, peer(), NOW_MS);
            prop_assume!(Continuation::decode(&known).unwrap().era.base == base);
            let delta = delta_of(&raw);
            prop_assert_eq!(apply_delta(&known, &delta), Some(raw));
            for (at, field) in [(1, 0), (19, 5)] {
                let mut stranger = known;
                stranger[at] ^= 1;
                prop_assert_eq!(apply_delta(&stranger, &delta), None, "field {}", field);
            }
        }

        #[test]
        fn continuations_are_kin_where_they_differ_in_what_deltas_tell_and_in_what_an_epoch_brings(
            continuation in any_continuation(), other: u32, time: u32, sealed: Block,
        ) {
            let keys = EpochKeys::derive(continuation.epoch, &[3; 16]);
            let base = continuation.era.base;
            let known = continuation.sign(&keys, peer(), NOW_MS);
            let later = Continuation {
                number: base + u64::from(other), timestamp_ms: time, srtt_us: time, rttvar_us: time, ..continuation
            };
            prop_assert!(is_kin(&known, &later.sign(&keys, peer(), NOW_MS)));
            let renewed = Continuation { epoch: continuation.epoch ^ 1, sealed, ..later };
            prop_assert!(is_kin(&known, &renewed.sign(&keys, peer(), NOW_MS)));
            for era in [
                Era { counter: later.era.counter ^ 1, ..later.era },
                Era { tag: later.era.tag ^ 1, ..later.era },
                Era { start: later.era.start ^ 1, ..later.era },
                Era { ssthresh: later.era.ssthresh ^ 1, ..later.era },
                Era { flight: later.era.flight ^ 1, ..later.era },
                Era { cubic: Some(Cubic::default()), ..later.era },
            ] {
                let stranger = Continuation { era, ..later }.sign(&keys, peer(), NOW_MS);
                prop_assert!(!is_kin(&known, &stranger), "{:?}", era);
            }
            let shorter = Continuation { datagram_bytes: continuation.datagram_bytes ^ 1, ..later };
            prop_assert!(!is_kin(&known, &shorter.sign(&keys, peer(), NOW_MS)));
        }

        #[test]
        fn the_delta_of_a_foreseen_era_gives_the_continuation(
            continuation in any_continuation(), offset: u16, base in 0..1_u64 << 60, other: u32, time: u32,
        ) {
            let keys = EpochKeys::derive(continuation.epoch, &[3; 16]);
            let era = Era { flight: 0, base, ..continuation.era };
            let successor = Continuation { number: base + u64::from(offset), era, ..continuation };
            let raw = successor.sign(&keys, peer(), NOW_MS);
            let known_era = Era { base: 7, counter: other, tag: other, start: 3, ssthresh: 4, ..continuation.era };
            let known = Continuation { number: 9, timestamp_ms: time, srtt_us: time, era: known_era, ..continuation };
            let known = known.sign(&keys, peer(), NOW_MS);
            let delta = successor_of(&raw).unwrap();
            prop_assert_eq!(successor_counter(&delta), era.counter as u16);
            let foreseen = Era { tag: 0, ..era };
            prop_assert_eq!(apply_successor(&known, &foreseen, &delta), Some(raw));
            let another = Era { counter: era.counter ^ 1, ..foreseen };
            prop_assert_eq!(apply_successor(&known, &another, &delta), None);
            let mut stranger = known;
            stranger[1] ^= 1;
            prop_assert_eq!(apply_successor(&stranger, &foreseen, &delta), None);
        }

        #[test]
        fn a_run_read_back_is_the_same(gap: u16, length: u32, nonces in 0..1_u64 << 48) {
            let run = ProvedRun { run: Run { gap, length }, nonces };
            prop_assert_eq!(ProvedRun::from_bytes(&run.to_bytes()), run);
        }

        /// Hiding any one lost packet takes its nonce.
        #[test]
        fn an_account_that_hides_a_loss_proves_nothing(lost in 0..50_u64, key: Block, guess in 0..1_u64 << 48) {
            let secret = Secret::new(&key);
            let era = Era { counter: 0, tag: 9, base: 1000, start: 60, ssthresh: 60, flight: 0, cubic: None };
            let xor = |numbers: std::ops::Range<u64>| numbers.fold(0, |sum, n| sum ^ secret.packet(9, n));
            let lost = 1001 + lost;
            let honest = [
                ProvedRun { run: Run { gap: 0, length: (lost - 1001) as u32 }, nonces: xor(1001..lost) },
                ProvedRun { run: Run { gap: 1, length: (1060 - lost) as u32 }, nonces: xor(lost + 1..1061) },
            ];
            let honest = if lost == 1001 { &honest[1..] } else { &honest };
            prop_assert!(proves(&secret, &era, honest));
            let known = xor(1001..1061) ^ secret.packet(9, lost);
            let hiding = |nonces| [ProvedRun { run: Run { gap: 0, length: 60 }, nonces }];
            prop_assert!(!proves(&secret, &era, &hiding(known)));
            prop_assert!(!proves(&secret, &era, &hiding(known ^ secret.packet(10, lost))), "nonce of a retransmission");
            prop_assume!(guess != secret.packet(9, lost));
            prop_assert!(!proves(&secret, &era, &hiding(known ^ guess)));
        }
    }
}
