//! Events that move to another host (Trickles §3.3): a request with its sender, authenticated so that it can be handed
//! on by anybody.
//!
//! The other host answers it as if it had arrived there. That is safe: a request says all that is needed, and the host
//! that gave it away refuses it from now on as a replay.

use crate::continuation::peer_bytes;
use crate::keys::KeyRing;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use subtle::ConstantTimeEq;

/// Bytes of an extracted event besides the datagram.
pub const EXTRACT_BYTES: usize = FIXED_BYTES + 16;
/// Format, key epoch, address and port.
const FIXED_BYTES: usize = 20;
/// First byte: keeps the MAC apart from those of user continuations, whose first byte is a kind below 3.
const FORMAT: u8 = 0xe1;

/// Why bytes are no event of this service.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ExtractError {
    /// Too short, or of another format.
    #[error("not an extracted event")]
    Malformed,
    /// Its key epoch is not accepted here.
    #[error("extracted event of key epoch {epoch}, which is not accepted")]
    UnknownEpoch {
        /// The epoch.
        epoch: u8,
    },
    /// Not made by a replica, or changed on the way.
    #[error("extracted event with a wrong MAC")]
    Forged,
}

/// The event of `datagram` from `peer`: format (1), epoch (1), address (16), port (2), MAC (16), datagram.
#[must_use]
pub fn extract(datagram: &[u8], peer: SocketAddr, keys: &KeyRing) -> Vec<u8> {
    let mut out = vec![FORMAT, keys.current().epoch];
    out.extend_from_slice(&peer_bytes(peer));
    out.extend_from_slice(&[0; 16]);
    out.extend_from_slice(datagram);
    let tag = keys.current().user.tag(&out);
    out[FIXED_BYTES..EXTRACT_BYTES].copy_from_slice(&tag);
    out
}

/// Datagram and sender of an event that [`extract`] made under a key that is accepted.
///
/// # Errors
/// It was not, or has been changed.
pub fn install<'e>(event: &'e [u8], keys: &KeyRing) -> Result<(&'e [u8], SocketAddr), ExtractError> {
    let (head, datagram) = event.split_at_checked(EXTRACT_BYTES).ok_or(ExtractError::Malformed)?;
    if head[0] != FORMAT {
        return Err(ExtractError::Malformed);
    }
    let epoch_keys = keys.get(head[1]).ok_or(ExtractError::UnknownEpoch { epoch: head[1] })?;
    let mut unsigned = event.to_vec();
    unsigned[FIXED_BYTES..EXTRACT_BYTES].fill(0);
    if !bool::from(epoch_keys.user.tag(&unsigned).ct_eq(&head[FIXED_BYTES..])) {
        return Err(ExtractError::Forged);
    }
    let mut address = [0; 16];
    address.copy_from_slice(&head[2..18]);
    let address = IpAddr::from(Ipv6Addr::from(address)).to_canonical();
    Ok((datagram, SocketAddr::new(address, u16::from_be_bytes([head[18], head[19]]))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_installed_is_the_one_extracted_and_changes_are_noticed() {
        let keys = KeyRing::new(1, &[1; 16]);
        for peer in ["192.0.2.1:4000", "[2001:db8::1]:5"] {
            let peer: SocketAddr = peer.parse().unwrap();
            let event = extract(b"datagram", peer, &keys);
            assert_eq!(install(&event, &keys), Ok((&b"datagram"[..], peer)));
            for bit in 0..event.len() * 8 {
                let mut changed = event.clone();
                changed[bit / 8] ^= 1 << (bit % 8);
                assert!(install(&changed, &keys).is_err(), "bit {bit}");
            }
            for length in 0..event.len() {
                assert!(install(&event[..length], &keys).is_err());
            }
            let other = KeyRing::new(2, &[2; 16]);
            assert_eq!(install(&event, &other), Err(ExtractError::UnknownEpoch { epoch: 1 }));
        }
    }
}
