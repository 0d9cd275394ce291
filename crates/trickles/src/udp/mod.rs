//! UDP encapsulation: drivers of the two cores over unprivileged sockets.
//!
//! One datagram is one packet of the protocol. Datagrams are received in batches and sent with segmentation offload
//! where the kernel has them.

mod alarm;
mod batch;
mod carry;
mod connection;
mod path;
mod server;
mod service;

pub use carry::carry;
pub use connection::{Connection, Format, Options, RequestStream, StreamError};
pub use path::{TooNarrow, least_mtu};
pub use server::{UdpServer, bind};
pub use service::UdpService;

use std::time::{SystemTime, UNIX_EPOCH};

/// The wall clock as servers of one service share it.
pub(crate) fn wall_clock_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// 16 bytes from the system's random source.
pub fn random_block() -> std::io::Result<crate::mac::Block> {
    let mut block = [0; 16];
    let mut filled = 0;
    while filled < block.len() {
        filled += rustix::rand::getrandom(&mut block[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(block)
}
