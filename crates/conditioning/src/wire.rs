//! The filter protocol's datagrams: a view of received bytes, and values to write. Normative text:
//! docs/protocol/filter.md.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The first bytes of every datagram.
pub const MAGIC: [u8; 4] = *b"TGCF";
/// The version of the protocol that this crate speaks.
pub const VERSION: u8 = 1;
/// Length of a bundle's header; the copy of the request follows it.
pub const HEADER_BYTES: usize = 64;
/// Length of a notice.
pub const NOTICE_BYTES: usize = 16;
/// A longer copy of a request travels in a memory file beside the socket, so that a bundle stays one datagram.
pub const INLINE_BYTES: usize = 32 * 1024;
/// Greatest length of the copy of a request, in bytes.
pub const REQUEST_BYTES: usize = 1024 * 1024;

/// Names one presentation of a connection's request: a slot of the ledger, and how often it has been used.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Id {
    /// The connection's slot in the ledger.
    pub slot: u32,
    /// Grows with every request that is presented from this slot.
    pub generation: u32,
}

/// The length of a request whose content is chunked and not whole: where it ends is found by who reads it.
pub const UNKNOWN_END: u64 = u64::MAX;

/// What a bundle says about its request, one bit each.
pub mod flags {
    /// The copy replaces the first `replaces` bytes on the socket. Without it the copy is for filters to look at only.
    pub const REWRITTEN: u16 = 1;
    /// The copy is in the memory file that is the second descriptor.
    pub const MEMORY_FILE: u16 = 2;
    /// The client wants the connection kept open after the response.
    pub const PERSISTENT: u16 = 4;
    /// The request's method is HEAD: its response has no content.
    pub const HEAD_METHOD: u16 = 8;
    /// The response may change the connection's protocol (101 to `Upgrade`, 2xx to CONNECT): from then on it is the
    /// server's, and ends with its close.
    pub const FINAL: u16 = 16;
    /// All flags that version 1 knows.
    pub const KNOWN: u16 = 31;
}

/// A bundle without its descriptors.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Bundle {
    /// Which presentation this is.
    pub id: Id,
    /// Bits of [`flags`].
    pub flags: u16,
    /// The client's address.
    pub peer: SocketAddr,
    /// Length in bytes of the request on the socket, head and content, or [`UNKNOWN_END`].
    pub socket_bytes: u64,
    /// When the request was whole, in nanoseconds of CLOCK_MONOTONIC.
    pub arrived_ns: u64,
    /// How many bytes on the socket `request` stands for.
    pub replaces: u32,
    /// Length in bytes of the head at the start of `request`.
    pub head_bytes: u32,
    /// A copy of the request's head, and of as much of its content as was asked for.
    pub request: Vec<u8>,
}

/// What travels from the server towards the first filter.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Notice {
    /// The server is done with this request; the connection may bring another.
    ClosedLocally(Id),
    /// The connection is to end: everybody closes it.
    ClosedForAll(Id),
    /// The receiver could not take the bundle: hand it again.
    HandAgain(Id),
}

/// Why a datagram was refused: the fault of the neighbour that sent it.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Shorter than its header, or not starting with [`MAGIC`].
    #[error("not a datagram of the filter protocol")]
    NotOurs,
    /// Another version of the protocol.
    #[error("filter protocol version {0}, not 1")]
    Version(u8),
    /// A kind, flag or address family that version 1 does not have.
    #[error("unknown kind, flag or address family")]
    Unknown,
    /// The lengths in the header contradict each other or the datagram.
    #[error("lengths contradict each other")]
    Lengths,
    /// The descriptors that the header promises are not there.
    #[error("descriptors are missing")]
    Descriptors,
}

const ARRIVED_AT: usize = 24;
const KIND_BUNDLE: u8 = 1;
const KIND_LOCAL: u8 = 2;
const KIND_ALL: u8 = 3;
const KIND_AGAIN: u8 = 4;

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u16::from_le_bytes(*b))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u32::from_le_bytes(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u64::from_le_bytes(*b))
}

fn check_start(datagram: &[u8], length: usize) -> Result<(), WireError> {
    if datagram.len() < length || !datagram.starts_with(&MAGIC) {
        return Err(WireError::NotOurs);
    }
    if datagram[4] != VERSION {
        return Err(WireError::Version(datagram[4]));
    }
    Ok(())
}

impl Bundle {
    /// Whether a flag is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// The head of the request.
    pub fn head(&self) -> &[u8] {
        self.request.get(..self.head_bytes as usize).unwrap_or(&self.request)
    }

    /// Whether the request has content. Of one without a copy of its head nothing is known.
    pub fn has_content(&self) -> bool {
        let (head_bytes, copied) = (self.head_bytes, self.request.len() as u64);
        let is_rewritten = self.has(flags::REWRITTEN);
        let stands_for = if is_rewritten { self.replaces } else { head_bytes };
        head_bytes > 0
            && (self.socket_bytes == UNKNOWN_END
                || self.socket_bytes > stands_for.into()
                || is_rewritten && copied > head_bytes.into())
    }

    /// Puts `head` in place of the request's head, for the server to read instead of what is on the socket.
    pub fn rewrite_head(&mut self, head: &[u8]) {
        if !self.has(flags::REWRITTEN) {
            self.replaces = self.request.len() as u32;
            self.flags |= flags::REWRITTEN;
        }
        let old = (self.head_bytes as usize).min(self.request.len());
        self.request.splice(..old, head.iter().copied());
        self.head_bytes = head.len() as u32;
    }

    /// Writes the header to `out`, which is cleared first, and the copy of the request if it fits a datagram; if not,
    /// the sender puts it into a memory file.
    pub fn write(&self, out: &mut Vec<u8>) {
        let inline = self.request.len() <= INLINE_BYTES;
        let flags = if inline { self.flags & !flags::MEMORY_FILE } else { self.flags | flags::MEMORY_FILE };
        let (family, address) = match self.peer.ip() {
            IpAddr::V4(v4) => {
                let mut address = [0; 16];
                address[..4].copy_from_slice(&v4.octets());
                (4, address)
            }
            IpAddr::V6(v6) => (6, v6.octets()),
        };
        out.clear();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[VERSION, KIND_BUNDLE]);
        out.extend_from_slice(&flags.to_le_bytes());
        out.extend_from_slice(&self.id.slot.to_le_bytes());
        out.extend_from_slice(&self.id.generation.to_le_bytes());
        out.extend_from_slice(&self.socket_bytes.to_le_bytes());
        out.extend_from_slice(&self.arrived_ns.to_le_bytes());
        out.extend_from_slice(&(self.request.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.replaces.to_le_bytes());
        out.extend_from_slice(&self.head_bytes.to_le_bytes());
        out.extend_from_slice(&[family, 0]);
        out.extend_from_slice(&self.peer.port().to_le_bytes());
        out.extend_from_slice(&address);
        debug_assert_eq!(out.len(), HEADER_BYTES);
        if inline {
            out.extend_from_slice(&self.request);
        }
    }

    /// When the request was whole ([`Self::arrived_ns`]), of a datagram of which this is the start.
    pub fn arrived_of(start: &[u8]) -> Option<u64> {
        check_start(start, ARRIVED_AT + 8)
            .ok()
            .filter(|()| start[5] == KIND_BUNDLE)
            .map(|()| u64_at(start, ARRIVED_AT))
    }

    /// Reads a bundle. With [`flags::MEMORY_FILE`] the request is left empty, and the second value is its length.
    ///
    /// # Errors
    /// The datagram is not a bundle of this version, or contradicts itself.
    pub fn read(datagram: &[u8]) -> Result<(Self, usize), WireError> {
        check_start(datagram, HEADER_BYTES)?;
        let flags = u16_at(datagram, 6);
        if datagram[5] != KIND_BUNDLE || flags & !flags::KNOWN != 0 {
            return Err(WireError::Unknown);
        }
        let id = Id { slot: u32_at(datagram, 8), generation: u32_at(datagram, 12) };
        let socket_bytes = u64_at(datagram, 16);
        let request_bytes = u32_at(datagram, 32) as usize;
        let replaces = u32_at(datagram, 36);
        let head_bytes = u32_at(datagram, 40);
        let port = u16_at(datagram, 46);
        let address: [u8; 16] = datagram.get(48..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default();
        let ip: IpAddr = match datagram[44] {
            4 => Ipv4Addr::new(address[0], address[1], address[2], address[3]).into(),
            6 => Ipv6Addr::from(address).into(),
            _ => return Err(WireError::Unknown),
        };
        let inline = if flags & flags::MEMORY_FILE == 0 { request_bytes } else { 0 };
        let sound = request_bytes <= REQUEST_BYTES
            && head_bytes as usize <= request_bytes
            && u64::from(replaces) <= socket_bytes
            && datagram.len() == HEADER_BYTES + inline;
        if !sound {
            return Err(WireError::Lengths);
        }
        let bundle = Self {
            id,
            flags,
            peer: SocketAddr::new(ip, port),
            socket_bytes,
            arrived_ns: u64_at(datagram, ARRIVED_AT),
            replaces,
            head_bytes,
            request: datagram[HEADER_BYTES..].to_vec(),
        };
        Ok((bundle, request_bytes))
    }
}

impl Notice {
    /// The presentation that the notice is about.
    pub fn id(self) -> Id {
        match self {
            Self::ClosedLocally(id) | Self::ClosedForAll(id) | Self::HandAgain(id) => id,
        }
    }

    /// The notice as a datagram.
    pub fn to_bytes(self) -> [u8; NOTICE_BYTES] {
        let kind = match self {
            Self::ClosedLocally(_) => KIND_LOCAL,
            Self::ClosedForAll(_) => KIND_ALL,
            Self::HandAgain(_) => KIND_AGAIN,
        };
        let mut out = [0; NOTICE_BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[5] = kind;
        out[8..12].copy_from_slice(&self.id().slot.to_le_bytes());
        out[12..].copy_from_slice(&self.id().generation.to_le_bytes());
        out
    }

    /// Reads a notice.
    ///
    /// # Errors
    /// The datagram is not a notice of this version.
    pub fn read(datagram: &[u8]) -> Result<Self, WireError> {
        check_start(datagram, NOTICE_BYTES)?;
        if datagram.len() != NOTICE_BYTES {
            return Err(WireError::Lengths);
        }
        let id = Id { slot: u32_at(datagram, 8), generation: u32_at(datagram, 12) };
        match datagram[5] {
            KIND_LOCAL => Ok(Self::ClosedLocally(id)),
            KIND_ALL => Ok(Self::ClosedForAll(id)),
            KIND_AGAIN => Ok(Self::HandAgain(id)),
            _ => Err(WireError::Unknown),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bundle() -> Bundle {
        Bundle {
            id: Id { slot: 7, generation: 3 },
            flags: flags::PERSISTENT,
            peer: "192.0.2.9:4711".parse().unwrap(),
            socket_bytes: 30,
            arrived_ns: 99,
            replaces: 0,
            head_bytes: 18,
            request: b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        }
    }

    proptest! {
        #[test]
        fn a_bundle_written_and_read_back_is_the_same(
            slot: u32, generation: u32, port: u16, v6: u128, is_v4: bool, arrived_ns: u64,
            request in proptest::collection::vec(any::<u8>(), 0..300), head in 0usize..300, more in 0u64..1000,
        ) {
            let ip = if is_v4 { IpAddr::from(Ipv4Addr::from(v6 as u32)) } else { Ipv6Addr::from(v6).into() };
            let bundle = Bundle {
                id: Id { slot, generation }, flags: flags::HEAD_METHOD | flags::REWRITTEN,
                peer: SocketAddr::new(ip, port), socket_bytes: request.len() as u64 + more, arrived_ns,
                replaces: request.len() as u32, head_bytes: head.min(request.len()) as u32, request,
            };
            let mut bytes = Vec::new();
            bundle.write(&mut bytes);
            let length = bundle.request.len();
            prop_assert_eq!(Bundle::read(&bytes), Ok((bundle, length)));
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Bundle::read(&bytes), Notice::read(&bytes));
            for (at, byte) in MAGIC.iter().copied().chain([VERSION, 1]).enumerate() {
                if let Some(place) = bytes.get_mut(at) { *place = byte; }
            }
            let _ = (Bundle::read(&bytes), Notice::read(&bytes));
        }
    }

    #[test]
    fn a_cut_bundle_is_refused_at_every_length() {
        let mut bytes = Vec::new();
        bundle().write(&mut bytes);
        for end in 0..bytes.len() {
            assert!(Bundle::read(&bytes[..end]).is_err(), "{end} bytes");
        }
        bytes.push(0);
        assert_eq!(Bundle::read(&bytes), Err(WireError::Lengths));
    }

    #[test]
    fn a_head_rewritten_twice_still_replaces_what_is_on_the_socket() {
        let mut bundle = bundle();
        bundle.rewrite_head(b"GET /a HTTP/1.1\r\n\r\n");
        bundle.rewrite_head(b"GET /bc HTTP/1.1\r\n\r\n");
        assert_eq!((bundle.replaces, bundle.head()), (18, &b"GET /bc HTTP/1.1\r\n\r\n"[..]));
        assert!(bundle.has(flags::REWRITTEN));
    }

    #[test]
    fn notices_survive_writing_and_reading() {
        let id = Id { slot: 1, generation: u32::MAX };
        for notice in [Notice::ClosedLocally(id), Notice::ClosedForAll(id), Notice::HandAgain(id)] {
            assert_eq!(Notice::read(&notice.to_bytes()), Ok(notice));
        }
        assert_eq!(Notice::read(b"TGCF\x02\x02----------"), Err(WireError::Version(2)));
    }
}
