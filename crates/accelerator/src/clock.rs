//! The data core's clock: monotonic seconds for deadlines, wall time for `Age` and `Date`.

use std::cell::Cell;

use rustix::time::{ClockId, clock_gettime};
use tidegate_http::date;

/// One core's clock. The text of the current second is kept, since every response carries it.
pub(crate) struct Clock {
    start_ms: u64,
    date: Cell<(u64, [u8; 29])>,
}

impl Clock {
    pub(crate) fn new() -> Self {
        let now = unix_now_s();
        Self { start_ms: monotonic_ms(), date: Cell::new((now, date::format(now))) }
    }

    /// Seconds since 1970.
    pub(crate) fn unix_s(&self) -> u64 {
        unix_now_s()
    }

    /// Milliseconds since this core started: the unit of deadlines.
    pub(crate) fn elapsed_ms(&self) -> u64 {
        monotonic_ms() - self.start_ms
    }

    /// The current `Date` field value (RFC 9110 §5.6.7).
    pub(crate) fn date(&self) -> [u8; 29] {
        let now = unix_now_s();
        let (second, text) = self.date.get();
        if second == now {
            return text;
        }
        let text = date::format(now);
        self.date.set((now, text));
        text
    }
}

// The coarse clocks tick every few milliseconds, which is enough for both uses, and cost a few nanoseconds.

fn unix_now_s() -> u64 {
    u64::try_from(clock_gettime(ClockId::RealtimeCoarse).tv_sec).unwrap_or(0)
}

fn monotonic_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    (now.tv_sec * 1000 + now.tv_nsec / 1_000_000).unsigned_abs()
}
