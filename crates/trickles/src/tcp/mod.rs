//! The paper's format: TCP on the wire (Trickles §2.6), so that address translators and shapers see what they know.
//!
//! A segment's payload is one packet of the protocol; an experimental TCP option (RFC 6994) marks it. Packets are taken
//! by AF_PACKET before the kernel's TCP sees them and sent by a raw socket; a firewall rule that matches the option
//! alone keeps the kernel's TCP from answering them. Everything else stays with the kernel. Needs CAP_NET_RAW,
//! CAP_NET_ADMIN and `nft`.

pub mod segment;
mod socket;

use std::os::fd::BorrowedFd;

/// Another way in for segments, before the kernel's stack: what it takes, AF_PACKET and the kernel's TCP never see.
pub trait PacketSource: std::fmt::Debug + Send + Sync {
    /// Readable where packets wait.
    fn poll_fd(&self) -> BorrowedFd<'_>;
    /// Copies the next IP packet into `packet`; 0 for one that has no room there.
    fn next(&self, packet: &mut [u8]) -> Option<usize>;
}

pub(crate) use socket::{Received as SegmentFrom, TcpSocket};
