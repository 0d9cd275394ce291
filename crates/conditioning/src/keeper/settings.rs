//! What a keeper is told, and what it counts.

use std::time::Duration;

use tidegate_core::metric_set;

use crate::arguments::{Argument, ArgumentError, Arguments};
use crate::host;
use crate::ledger::SLOTS;
use crate::neighbours::FilterError;

const TIMEOUT: Argument = Argument {
    key: "timeout",
    default: "10s",
    help: "how long a request may take to arrive whole; from its accept for a connection's first",
};
const IDLE: Argument =
    Argument { key: "idle", default: "60s", help: "how long a kept connection may be idle" };
const CONTENT: Argument = Argument {
    key: "content",
    default: "16384",
    help: "content of up to this many bytes is waited for; at most 65536",
};
/// What is waited for stays in the socket's buffer, which has to have room for it and the head.
const MOST_CONTENT_BYTES: u64 = 64 * 1024;
const CONNECTIONS: Argument = Argument {
    key: "connections",
    default: "0",
    help: "greatest number of connections; 0: as many as descriptors allow",
};
const KEEP: Argument = Argument {
    key: "keep",
    default: "yes",
    help: "present further requests of a connection too, where no `persist` does; no: end it with its first response",
};

/// A keeper has no order of its own to lose: a greater window costs fewer switches between it and the next program.
const WINDOW: Argument = Argument { default: "65536", ..host::WINDOW };

/// The arguments of `package`.
pub const PACKAGE_ARGUMENTS: &[Argument] = &[TIMEOUT, KEEP, IDLE, CONTENT, CONNECTIONS, WINDOW];

/// The arguments of `persist`.
pub const PERSIST_ARGUMENTS: &[Argument] = &[TIMEOUT, IDLE, CONTENT, CONNECTIONS, WINDOW];

metric_set! {
    /// What a keeper counts.
    pub struct Counters {
        Counter accepted_total: "Connections that came in.",
        Counter handed_total: "Requests handed on.",
        Counter handed_again_total: "Requests handed on once more after a neighbour died, or received and did not claim them.",
        Counter given_up_total: "Connections ended because their request was handed again too often.",
        Counter malformed_total: "Connections ended because their request was malformed.",
        Counter timed_out_total: "Connections ended because their request did not arrive whole in time.",
        Counter idle_total: "Connections ended because no further request came in time.",
        Counter pressed_incomplete_total: "Incomplete connections ended along the heaviest path, out of descriptors.",
        Counter pressed_idle_total: "Idle connections ended, out of descriptors.",
        Counter refused_total: "Connections ended at once because nothing else could be ended.",
        Counter server_died_total: "Connections ended because the process that served them died.",
        Gauge connections: "Connections held.",
        Gauge incomplete: "Connections whose request has not arrived whole.",
        Gauge draining: "Connections that are over, and whose client may still be sending.",
    }
}

/// How a keeper was told to behave.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub(super) timeout: Duration,
    pub(super) idle: Duration,
    pub(super) keep: bool,
    pub(super) content_bytes: u64,
    pub(super) most: usize,
    pub(super) window_bytes: usize,
}

impl Settings {
    /// Reads the arguments of `package` or `persist`.
    ///
    /// # Errors
    /// A value is not of its kind.
    pub fn read(arguments: &Arguments, is_first: bool) -> Result<Self, FilterError> {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1024);
        // `persist` gives way before `package` must: an idle connection is worth less than one that is arriving.
        let fits =
            usize::try_from(files).unwrap_or(1024).saturating_sub(64) * if is_first { 8 } else { 7 } / 8;
        let asked: usize = arguments.number("connections")?;
        Ok(Self {
            timeout: arguments.some_duration("timeout")?,
            idle: arguments.duration("idle")?,
            keep: if is_first { arguments.flag("keep")? } else { true },
            content_bytes: content_bytes(arguments)?,
            most: if asked == 0 { fits } else { asked.min(fits) }.clamp(1, SLOTS as usize),
            window_bytes: arguments.number("window")?,
        })
    }
}

fn content_bytes(arguments: &Arguments) -> Result<u64, ArgumentError> {
    let bytes: u64 = arguments.number("content")?;
    if bytes > MOST_CONTENT_BYTES {
        return Err(ArgumentError::Value {
            key: "content",
            value: bytes.to_string(),
            expected: "at most 65536 bytes: it waits in the socket's buffer",
        });
    }
    Ok(bytes)
}
