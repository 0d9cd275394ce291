//! User continuations in their standard form: what an application needs to go on with a request (Trickles §4.1–4.3).
//!
//! An *output* continuation makes the bytes `start..end` of a connection's output sequence space, the paper's
//! `validStart` and `validEnd`. An *input* continuation goes on reading a request whose first bytes are consumed. Both
//! wrap opaque bytes of the application and are authenticated; neither is bound to an address, so that a client takes
//! them along to another network or another transport connection.

use crate::keys::KeyRing;
use subtle::ConstantTimeEq;

/// Bytes of a user continuation besides the application's own.
pub const OVERHEAD_BYTES: usize = 38;
/// Most bytes an application may put into one. Beside them, a request that the smallest path of IPv6 carries in an
/// envelope has room for an account of 17 runs.
pub const MAX_OPAQUE_BYTES: usize = 768;
/// How many of them fit on every connection, however short its datagrams.
pub const LEAST_OPAQUE_BYTES: usize = 512;
/// Bits of a sequence number that count bytes within one request's region (Trickles §5.2: sparse sequence numbers).
pub const REGION_BITS: u32 = 40;
/// Largest request number.
pub const MAX_REQUEST: u32 = (1 << (64 - REGION_BITS)) - 1;

/// First sequence number of a request's region.
#[must_use]
pub fn region_start(request: u32) -> u64 {
    u64::from(request) << REGION_BITS
}

/// The request number and the offset in its region of a sequence number.
#[must_use]
pub fn split_sequence(sequence: u64) -> (u32, u64) {
    ((sequence >> REGION_BITS) as u32, sequence & ((1 << REGION_BITS) - 1))
}

/// Which of the two kinds a user continuation is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// Goes on producing output.
    Output = 1,
    /// Goes on consuming input.
    Input = 2,
}

/// A user continuation, borrowed from a datagram.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct UserContinuation<'a> {
    /// Output or input.
    pub kind: Kind,
    /// Number of the request that it belongs to, at most [`MAX_REQUEST`].
    pub request: u32,
    /// `validStart`: first offset of the output that it can make, or the input consumed so far.
    pub start: u64,
    /// `validEnd`: end of the output that it can make (exclusive); for input the same as `start`.
    pub end: u64,
    /// The application's own bytes.
    pub opaque: &'a [u8],
}

/// Why a user continuation is refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum UserError {
    /// Shorter than its fixed part, longer than allowed, or fields that make no sense.
    #[error("malformed user continuation")]
    Malformed,
    /// Signed under an epoch that is not accepted any more.
    #[error("user continuation of key epoch {epoch}, which is not accepted")]
    UnknownEpoch {
        /// The epoch.
        epoch: u8,
    },
    /// Not made by this server or its replicas.
    #[error("user continuation with a wrong MAC")]
    Forged,
}

impl<'a> UserContinuation<'a> {
    /// Appends the continuation, authenticated by the current epoch: kind (1), epoch (1), request (4), start (8),
    /// end (8), MAC (16), opaque bytes.
    pub fn sign(&self, keys: &KeyRing, out: &mut Vec<u8>) {
        let from = out.len();
        out.extend_from_slice(&[self.kind as u8, keys.current().epoch]);
        out.extend_from_slice(&self.request.to_be_bytes());
        out.extend_from_slice(&self.start.to_be_bytes());
        out.extend_from_slice(&self.end.to_be_bytes());
        out.extend_from_slice(&[0; 16]);
        out.extend_from_slice(self.opaque);
        let tag = keys.current().user.tag(&out[from..]);
        out[from + 22..from + OVERHEAD_BYTES].copy_from_slice(&tag);
    }

    /// Reads the fields; says nothing about who wrote them. What a client does.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, UserError> {
        let (head, opaque) = bytes.split_first_chunk::<OVERHEAD_BYTES>().ok_or(UserError::Malformed)?;
        let kind = match head[0] {
            1 => Kind::Output,
            2 => Kind::Input,
            _ => return Err(UserError::Malformed),
        };
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&head[at..at + 8]);
            u64::from_be_bytes(word)
        };
        let request = u32::from_be_bytes([head[2], head[3], head[4], head[5]]);
        let (start, end) = (word(6), word(14));
        if start > end || end > 1 << REGION_BITS || request > MAX_REQUEST || opaque.len() > MAX_OPAQUE_BYTES {
            return Err(UserError::Malformed);
        }
        Ok(Self { kind, request, start, end, opaque })
    }

    /// Reads and verifies; also whether the current epoch signed it. What a server does.
    pub fn open(bytes: &'a [u8], keys: &KeyRing) -> Result<(Self, bool), UserError> {
        let continuation = Self::decode(bytes)?;
        let epoch = bytes[1];
        let epoch_keys = keys.get(epoch).ok_or(UserError::UnknownEpoch { epoch })?;
        let mut copy = [0; OVERHEAD_BYTES + MAX_OPAQUE_BYTES];
        let copy = &mut copy[..bytes.len()];
        copy.copy_from_slice(bytes);
        copy[22..OVERHEAD_BYTES].fill(0);
        if bool::from(epoch_keys.user.tag(copy).ct_eq(&bytes[22..OVERHEAD_BYTES])) {
            Ok((continuation, epoch == keys.current().epoch))
        } else {
            Err(UserError::Forged)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_user_continuation_read_back_is_the_same(
            output: bool, request in 0..=MAX_REQUEST, start in 0..1_u64 << 40, length in 0..1_u64 << 30,
            opaque in prop::collection::vec(any::<u8>(), 0..MAX_OPAQUE_BYTES), bit: prop::sample::Index,
        ) {
            let end = (start + length).min(1 << REGION_BITS);
            let kind = if output { Kind::Output } else { Kind::Input };
            let continuation = UserContinuation { kind, request, start, end, opaque: &opaque };
            let mut keys = KeyRing::new(1, &[1; 16]);
            let mut bytes = Vec::new();
            continuation.sign(&keys, &mut bytes);
            prop_assert_eq!(UserContinuation::decode(&bytes), Ok(continuation));
            prop_assert_eq!(UserContinuation::open(&bytes, &keys), Ok((continuation, true)));
            keys.rotate(2, &[2; 16]);
            prop_assert_eq!(UserContinuation::open(&bytes, &keys), Ok((continuation, false)));
            let bit = bit.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(UserContinuation::open(&bytes, &keys).is_err());
            keys.retire(1);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(UserContinuation::open(&bytes, &keys), Err(UserError::UnknownEpoch { epoch: 1 }));
        }

        #[test]
        fn garbage_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..700)) {
            prop_assert!(UserContinuation::open(&bytes, &KeyRing::new(1, &[1; 16])).is_err());
        }

        #[test]
        fn a_sequence_number_is_a_request_and_an_offset(request in 0..=MAX_REQUEST, offset in 0..1_u64 << REGION_BITS) {
            prop_assert_eq!(split_sequence(region_start(request) + offset), (request, offset));
        }
    }
}
