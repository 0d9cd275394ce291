#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test's helper: a failure here is the test's failure")]
//! What the end-to-end tests are written with: a scripted [`Origin`], the [`Tidegate`] under test, and a [`Client`]
//! that sends exactly the bytes it is given.
//!
//! Nothing here knows tidegate's inside. Every wait is bounded by [`PATIENCE`]; nothing sleeps for long enough.

mod certificate;
mod client;
pub mod http2;
pub mod http2_origin;
pub mod http3;
mod message;
mod origin;
mod pages;
mod ports;
mod process;
mod server;
mod site;
mod tls_door;

use std::time::{Duration, Instant};

pub use certificate::Certificate;
pub use client::Client;
pub use message::{Fields, Response};
pub use origin::{Gate, Origin, Reply, Request};
pub use pages::{Block, Page, commands_of, pages, project};
pub use ports::free_port;
pub use process::Process;
pub use server::{Builder, Tidegate};
pub use site::Site;
pub use tls_door::{DoorManners, TlsDoor};

/// How long a test waits for what must happen: far more than it takes, so that a busy machine fails no test.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Asks `probe` again and again until it answers, for at most [`PATIENCE`].
///
/// # Panics
/// When the time is over; `what` says what was waited for.
pub fn eventually<T>(what: &str, probe: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, what, probe)
}

/// As [`eventually`], for at most `limit`.
///
/// # Panics
/// When the time is over; `what` says what was waited for.
pub fn within<T>(limit: Duration, what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {limit:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// `size` bytes that depend on `seed` alone, for bodies whose every byte can be checked.
pub fn content(seed: u64, size: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}
