//! Packet nonces that a server recomputes, and checks over any range, in constant time (Trickles §2.2).
//!
//! r(x) = f(S, tag, x) and packet x carries p(x) = r(x) ⊕ r(x+1), so the nonces of packets m…n together are
//! r(m) ⊕ r(n+1). S is a secret of the connection, `tag` names the *era* (the time between two loss events): a packet
//! that is sent again after a loss belongs to another era, so that its nonce says nothing about the lost one's. That
//! is the paper's second key K′, one for each loss event instead of one for all.

use crate::mac::{Aes128, Block};

/// Bytes of a nonce on the wire.
pub const NONCE_BYTES: usize = 6;
/// The 48 bits that a nonce has.
const NONCE_MASK: u64 = (1 << (8 * NONCE_BYTES)) - 1;
/// Packets in a row whose fingerprints are side by side: as many as a line of the processor's cache has room for.
const TOGETHER: u64 = 8;

/// First byte of each block that is encrypted under a connection's secret: keeps the uses apart.
#[derive(Clone, Copy)]
enum Use {
    Nonce = 1,
    Era = 2,
    Replay = 3,
}

/// Why a new era began; enters its tag.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum EraCause {
    /// The connection's first era.
    Open,
    /// Fast retransmit after the loss of this packet.
    Recovery {
        /// Number of the first lost packet.
        first_loss: u64,
    },
    /// A retransmission timeout.
    Timeout {
        /// Number of the first lost packet.
        first_loss: u64,
        /// Which attempt of the client, from 1.
        attempt: u8,
    },
}

/// What a connection's nonces, era tags and replay fingerprints are made from. Never leaves the server.
#[derive(Clone, Debug)]
pub struct Secret(Aes128);

impl Secret {
    /// Expands a connection's secret.
    #[inline]
    #[must_use]
    pub fn new(secret: &Block) -> Self {
        Self(Aes128::new(secret))
    }

    fn word(&self, purpose: Use, extra: [u8; 3], tag: u32, number: u64) -> u64 {
        let mut block = [0; 16];
        block[0] = purpose as u8;
        block[1..4].copy_from_slice(&extra);
        block[4..8].copy_from_slice(&tag.to_be_bytes());
        block[8..].copy_from_slice(&number.to_be_bytes());
        let [a, b, c, d, e, f, g, h, ..] = self.0.encrypt(block);
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }

    /// The XOR of the nonces of the packets `first..=last` of the era `tag`: two block encryptions for any range.
    #[inline]
    #[must_use]
    pub fn range(&self, tag: u32, first: u64, last: u64) -> u64 {
        let r = |x| self.word(Use::Nonce, [0; 3], tag, x);
        (r(first) ^ r(last.wrapping_add(1))) & NONCE_MASK
    }

    /// The nonce of one packet.
    #[inline]
    #[must_use]
    pub fn packet(&self, tag: u32, number: u64) -> u64 {
        self.range(tag, number, number)
    }

    /// The tag of the era that follows the era `tag` for this cause.
    #[must_use]
    pub fn next_era(&self, tag: u32, cause: EraCause) -> u32 {
        let (extra, number) = match cause {
            EraCause::Open => ([1, 0, 0], 0),
            EraCause::Recovery { first_loss } => ([2, 0, 0], first_loss),
            EraCause::Timeout { first_loss, attempt } => ([3, attempt, 0], first_loss),
        };
        (self.word(Use::Era, extra, tag, number) >> 32) as u32
    }

    /// The nonces of packets of the era `tag`, each with one block encryption where it follows the one before.
    pub(crate) fn nonces(&self, tag: u32) -> Nonces<'_> {
        Nonces { secret: self, tag, next: None }
    }

    /// Fingerprints of the right to be answered once for each of the packets `newest`, `newest − 1`… of the era
    /// `tag`. Those of eight packets in a row differ in their lowest bits only, so that a table has them side by side.
    #[inline]
    pub fn replay_of_packets(&self, tag: u32, newest: u64, fingerprints: &mut [u64]) {
        let mut word = 0;
        for (fingerprint, back) in fingerprints.iter_mut().zip(0..) {
            let number = newest.wrapping_sub(back);
            let which = number % TOGETHER;
            if back == 0 || which == TOGETHER - 1 {
                word = self.word(Use::Replay, [1, 0, 0], tag, number / TOGETHER);
            }
            *fingerprint = word & !(TOGETHER - 1) | which;
        }
    }

    /// Fingerprints of the right to be sent once for each of the packets `newest`, `newest − 1`… with which the era
    /// `tag` begins: a loss or a timeout sets them free, as which a client may tell of many.
    #[inline]
    pub fn replay_of_successors(&self, tag: u32, newest: u64, fingerprints: &mut [u64]) {
        for (fingerprint, back) in fingerprints.iter_mut().zip(0..) {
            *fingerprint = self.word(Use::Replay, [4, 0, 0], tag, newest.wrapping_sub(back));
        }
    }

    /// What the era `tag` is remembered by.
    #[inline]
    #[must_use]
    pub fn era_to_remember(&self, tag: u32) -> u64 {
        self.word(Use::Replay, [3, 0, 0], tag, 0)
    }

    /// Fingerprint of the right to one timeout of the connection in the time slot `slot`.
    #[inline]
    #[must_use]
    pub fn replay_of_timeout(&self, slot: u64) -> u64 {
        self.word(Use::Replay, [2, 0, 0], 0, slot)
    }
}

/// What [`Secret::nonces`] gives.
pub(crate) struct Nonces<'a> {
    secret: &'a Secret,
    tag: u32,
    /// The packet after the last one, and its share of both nonces.
    next: Option<(u64, u64)>,
}

impl Nonces<'_> {
    /// The nonce of packet `number`.
    pub(crate) fn packet(&mut self, number: u64) -> u64 {
        let r = |x| self.secret.word(Use::Nonce, [0; 3], self.tag, x);
        let own = self.next.filter(|&(next, _)| next == number).map_or_else(|| r(number), |(_, own)| own);
        let after = number.wrapping_add(1);
        let following = r(after);
        self.next = Some((after, following));
        (own ^ following) & NONCE_MASK
    }
}

/// A nonce as it travels.
#[must_use]
pub fn to_bytes(nonce: u64) -> [u8; NONCE_BYTES] {
    let [_, _, a, b, c, d, e, f] = nonce.to_be_bytes();
    [a, b, c, d, e, f]
}

/// A nonce from the wire.
#[must_use]
pub fn from_bytes(bytes: [u8; NONCE_BYTES]) -> u64 {
    let [a, b, c, d, e, f] = bytes;
    u64::from_be_bytes([0, 0, a, b, c, d, e, f])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_range_is_the_xor_of_its_packets(key: Block, tag: u32, first in 0..u64::MAX - 100, length in 0..100_u64) {
            let secret = Secret::new(&key);
            let whole = (first..=first + length).fold(0, |sum, number| sum ^ secret.packet(tag, number));
            prop_assert_eq!(secret.range(tag, first, first + length), whole);
            prop_assert_eq!(from_bytes(to_bytes(whole)), whole);
        }

        #[test]
        fn nonces_of_packets_are_those_of_ranges(
            key: Block,
            tag: u32,
            numbers in prop::collection::vec(0..9_u64, 1..20),
        ) {
            let secret = Secret::new(&key);
            let mut nonces = secret.nonces(tag);
            for number in numbers {
                prop_assert_eq!(nonces.packet(number), secret.packet(tag, number));
            }
        }

        #[test]
        fn a_fingerprint_is_that_of_the_packet_whatever_is_acknowledged_with_it(
            key: Block,
            tag: u32,
            newest in 40..u64::MAX,
            counts in (1..40_usize, 1..40_usize),
        ) {
            let secret = Secret::new(&key);
            let of = |newest, count| {
                let mut fingerprints = vec![0; count];
                secret.replay_of_packets(tag, newest, &mut fingerprints);
                fingerprints
            };
            let all = of(newest, counts.0 + counts.1);
            prop_assert_eq!(&all[counts.0..], &of(newest - counts.0 as u64, counts.1)[..]);
            // Side by side: each eight differ in their lowest three bits only.
            for (fingerprint, back) in all.iter().zip(0..) {
                let number = newest - back;
                prop_assert_eq!(fingerprint & 7, number & 7);
                let eight = (0..=number & 7).filter_map(|before| all.get((back + before) as usize));
                prop_assert!(eight.clone().all(|other| other >> 3 == fingerprint >> 3));
            }
            let mut different = all.clone();
            different.sort_unstable();
            different.dedup();
            prop_assert_eq!(different.len(), all.len());
            prop_assert_ne!(of(newest, 1), {
                let mut other = [0];
                secret.replay_of_packets(tag ^ 1, newest, &mut other);
                other.to_vec()
            });
        }

        #[test]
        fn a_packet_sent_again_after_a_loss_has_another_nonce(key: Block, number: u64) {
            let secret = Secret::new(&key);
            let first = secret.next_era(0, EraCause::Open);
            let causes = [
                EraCause::Recovery { first_loss: number },
                EraCause::Timeout { first_loss: number, attempt: 1 },
                EraCause::Timeout { first_loss: number, attempt: 2 },
            ];
            let mut nonces: Vec<u64> =
                causes.iter().map(|&cause| secret.packet(secret.next_era(first, cause), number)).collect();
            nonces.push(secret.packet(first, number));
            nonces.sort_unstable();
            nonces.dedup();
            prop_assert_eq!(nonces.len(), 4);
        }
    }
}
