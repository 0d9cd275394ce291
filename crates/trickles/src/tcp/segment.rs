//! IP packets with marked TCP segments: what is written, and what is believed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Kind of the option: the first of RFC 4727's two for experiments.
pub const OPTION_KIND: u8 = 253;
/// Its experiment identifier (RFC 6994).
pub const EXPERIMENT: u16 = 0x5472;
/// Bytes of the TCP header with the option.
pub const TCP_BYTES: usize = 24;

const PROTOCOL_TCP: u8 = 6;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const HOP_LIMIT: u8 = 64;
const DONT_FRAGMENT: u16 = 0x4000;

/// SYN flag.
pub const SYN: u8 = 0x02;
/// RST flag.
pub const RST: u8 = 0x04;
/// PSH flag.
pub const PSH: u8 = 0x08;
/// ACK flag.
pub const ACK: u8 = 0x10;

/// A TCP segment. Sequence and acknowledgement numbers are for those on the way; Trickles has its own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Segment<'a> {
    /// Sender.
    pub from: SocketAddr,
    /// Receiver.
    pub to: SocketAddr,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgement number.
    pub acknowledgement: u32,
    /// Flags.
    pub flags: u8,
    /// Whether the option says that the payload is ours.
    pub marked: bool,
    /// The payload.
    pub payload: &'a [u8],
}

/// Why bytes are no segment that concerns us.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum SegmentError {
    /// Ends before its headers say.
    #[error("truncated packet")]
    Truncated,
    /// Not IP, not TCP, a fragment, or with extension headers.
    #[error("not a plain TCP packet")]
    Foreign,
    /// The checksum is wrong.
    #[error("wrong checksum")]
    Checksum,
}

fn short(bytes: &[u8], at: usize) -> Result<u16, SegmentError> {
    bytes.get(at..at + 2).map(|two| u16::from_be_bytes([two[0], two[1]])).ok_or(SegmentError::Truncated)
}

fn long(bytes: &[u8], at: usize) -> Result<u32, SegmentError> {
    let four = bytes.get(at..at + 4).ok_or(SegmentError::Truncated)?;
    Ok(u32::from_be_bytes([four[0], four[1], four[2], four[3]]))
}

/// RFC 1071: the sum of 16-bit words, folded.
fn sum(bytes: &[u8], mut total: u64) -> u64 {
    for pair in bytes.chunks(2) {
        total += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    }
    total
}

fn fold(mut total: u64) -> u16 {
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    !(total as u16)
}

fn pseudo_header(from: IpAddr, to: IpAddr, tcp_bytes: usize) -> u64 {
    let addresses = [from, to].into_iter().fold(0, |total, address| match address {
        IpAddr::V4(address) => sum(&address.octets(), total),
        IpAddr::V6(address) => sum(&address.octets(), total),
    });
    addresses + u64::from(PROTOCOL_TCP) + tcp_bytes as u64
}

/// Source, destination and TCP part of an IP packet.
fn ip(packet: &[u8]) -> Result<(IpAddr, IpAddr, &[u8]), SegmentError> {
    match packet.first().ok_or(SegmentError::Truncated)? >> 4 {
        4 => {
            let header = usize::from(packet[0] & 15) * 4;
            let total = usize::from(short(packet, 2)?);
            let fragment = short(packet, 6)? & !DONT_FRAGMENT;
            if header < IPV4_BYTES || total < header || packet.len() < total {
                return Err(SegmentError::Truncated);
            }
            if packet[9] != PROTOCOL_TCP || fragment != 0 {
                return Err(SegmentError::Foreign);
            }
            let address = |at| Ok(Ipv4Addr::from(long(packet, at)?).into());
            Ok((address(12)?, address(16)?, &packet[header..total]))
        }
        6 => {
            let total = IPV6_BYTES + usize::from(short(packet, 4)?);
            if packet.len() < total {
                return Err(SegmentError::Truncated);
            }
            if packet[6] != PROTOCOL_TCP {
                return Err(SegmentError::Foreign);
            }
            let address = |at: usize| {
                let mut bytes = [0; 16];
                bytes.copy_from_slice(&packet[at..at + 16]);
                IpAddr::from(Ipv6Addr::from(bytes))
            };
            Ok((address(8), address(24), &packet[IPV6_BYTES..total]))
        }
        _ => Err(SegmentError::Foreign),
    }
}

/// Whether the options of a TCP header have ours.
fn is_marked(mut options: &[u8]) -> bool {
    while let Some((&kind, rest)) = options.split_first() {
        match kind {
            0 => return false,
            1 => options = rest,
            _ => {
                let Some(&length) = rest.first() else { return false };
                let Some((option, after)) = options.split_at_checked(usize::from(length).max(2)) else {
                    return false;
                };
                if kind == OPTION_KIND && option.get(2..4) == Some(&EXPERIMENT.to_be_bytes()) {
                    return true;
                }
                options = after;
            }
        }
    }
    false
}

impl<'a> Segment<'a> {
    /// Reads an IP packet; its checksum is verified where the segment is ours.
    ///
    /// # Errors
    /// It is none, or was damaged on the way.
    pub fn decode(packet: &'a [u8]) -> Result<Self, SegmentError> {
        let (from, to, tcp) = ip(packet)?;
        let header = usize::from(tcp.get(12).ok_or(SegmentError::Truncated)? >> 4) * 4;
        if header < 20 || tcp.len() < header {
            return Err(SegmentError::Truncated);
        }
        let marked = is_marked(&tcp[20..header]);
        if marked && fold(sum(tcp, pseudo_header(from, to, tcp.len()))) != 0 {
            return Err(SegmentError::Checksum);
        }
        Ok(Self {
            from: SocketAddr::new(from, short(tcp, 0)?),
            to: SocketAddr::new(to, short(tcp, 2)?),
            sequence: long(tcp, 4)?,
            acknowledgement: long(tcp, 8)?,
            flags: tcp[13],
            marked,
            payload: &tcp[header..],
        })
    }

    /// Appends the IP packet, marked; `false` where the addresses are of two families or the payload is too long.
    pub fn encode(&self, out: &mut Vec<u8>) -> bool {
        let tcp_bytes = TCP_BYTES + self.payload.len();
        let Ok(total) = u16::try_from(tcp_bytes + IPV4_BYTES) else { return false };
        match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let start = out.len();
                out.extend_from_slice(&[0x45, 0]);
                out.extend_from_slice(&total.to_be_bytes());
                out.extend_from_slice(&[0, 0]);
                out.extend_from_slice(&DONT_FRAGMENT.to_be_bytes());
                out.extend_from_slice(&[HOP_LIMIT, PROTOCOL_TCP, 0, 0]);
                out.extend_from_slice(&from.octets());
                out.extend_from_slice(&to.octets());
                let checksum = fold(sum(&out[start..], 0));
                out[start + 10..start + 12].copy_from_slice(&checksum.to_be_bytes());
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                out.extend_from_slice(&[0x60, 0, 0, 0]);
                out.extend_from_slice(&(total - IPV4_BYTES as u16).to_be_bytes());
                out.extend_from_slice(&[PROTOCOL_TCP, HOP_LIMIT]);
                out.extend_from_slice(&from.octets());
                out.extend_from_slice(&to.octets());
            }
            _ => return false,
        }
        let start = out.len();
        out.extend_from_slice(&self.from.port().to_be_bytes());
        out.extend_from_slice(&self.to.port().to_be_bytes());
        out.extend_from_slice(&self.sequence.to_be_bytes());
        out.extend_from_slice(&self.acknowledgement.to_be_bytes());
        // Header length in words, flags, the largest window, checksum and urgent pointer.
        out.extend_from_slice(&[(TCP_BYTES as u8 / 4) << 4, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        out.extend_from_slice(&[OPTION_KIND, 4]);
        out.extend_from_slice(&EXPERIMENT.to_be_bytes());
        out.extend_from_slice(self.payload);
        let checksum = fold(sum(&out[start..], pseudo_header(self.from.ip(), self.to.ip(), tcp_bytes)));
        out[start + 16..start + 18].copy_from_slice(&checksum.to_be_bytes());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_segment_read_back_is_the_same_and_damage_is_noticed(
            v6: bool, a: [u8; 16], b: [u8; 16], ports: (u16, u16), sequence: u32, acknowledgement: u32,
            flags in 0..64_u8, payload in prop::collection::vec(any::<u8>(), 0..1300), bit: prop::sample::Index,
        ) {
            let address = |bytes: [u8; 16]| match v6 {
                true => IpAddr::from(bytes),
                false => IpAddr::from([bytes[0], bytes[1], bytes[2], bytes[3]]),
            };
            let from = SocketAddr::new(address(a), ports.0);
            let to = SocketAddr::new(address(b), ports.1);
            let segment = Segment { from, to, sequence, acknowledgement, flags, marked: true, payload: &payload };
            let mut packet = Vec::new();
            prop_assert!(segment.encode(&mut packet));
            prop_assert_eq!(Segment::decode(&packet), Ok(segment));
            for length in 0..packet.len().min(90) {
                prop_assert!(Segment::decode(&packet[..length]).is_err());
            }
            let ip_bytes = if v6 { IPV6_BYTES } else { IPV4_BYTES };
            let bit = ip_bytes * 8 + bit.index((packet.len() - ip_bytes) * 8);
            packet[bit / 8] ^= 1 << (bit % 8);
            let damaged = Segment::decode(&packet);
            prop_assert!(damaged.is_err() || !damaged.unwrap().marked);
        }

        #[test]
        fn garbage_is_an_error(mut bytes in prop::collection::vec(any::<u8>(), 0..200), v6: bool) {
            if let Some(first) = bytes.first_mut() {
                *first = if v6 { 0x60 } else { 0x45 };
            }
            prop_assert!(!Segment::decode(&bytes).is_ok_and(|segment| segment.marked));
        }
    }
}
