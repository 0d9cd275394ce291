//! The data core's clock: monotonic milliseconds for deadlines, wall time for `Age` and `Date`, and how long requests
//! take.

use std::cell::Cell;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};
use tidegate_http::date;

/// One core's clock. The text of the current second is kept, since every response carries it.
pub(crate) struct Clock {
    start_ms: u64,
    date: Cell<(u64, [u8; 29])>,
    /// The time for all of the turn in progress.
    turn: Cell<Option<Reading>>,
}

/// What the clocks said when a turn began, and when it was last looked in it.
#[derive(Clone, Copy)]
struct Reading {
    elapsed_ms: u64,
    unix_s: u64,
    looked: Instant,
}

/// A turn: until this is dropped, the coarse clocks stand still.
pub(crate) struct Turn<'c>(&'c Clock);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.turn.set(None);
    }
}

impl Clock {
    pub(crate) fn new() -> Self {
        let now = unix_now_s();
        Self { start_ms: monotonic_ms(), date: Cell::new((now, date::format(now))), turn: Cell::new(None) }
    }

    /// Begins a turn, in which requests are answered one after the other without waiting: five looks at clocks for each
    /// of them would be a hundredth of its time.
    pub(crate) fn turn(&self) -> Turn<'_> {
        let (elapsed_ms, unix_s) = (self.elapsed_ms(), self.unix_s());
        self.turn.set(Some(Reading { elapsed_ms, unix_s, looked: Instant::now() }));
        Turn(self)
    }

    /// Seconds since 1970.
    #[inline]
    pub(crate) fn unix_s(&self) -> u64 {
        self.turn.get().map_or_else(unix_now_s, |turn| turn.unix_s)
    }

    /// Milliseconds since this core started: the unit of deadlines.
    #[inline]
    pub(crate) fn elapsed_ms(&self) -> u64 {
        self.turn.get().map_or_else(|| monotonic_ms() - self.start_ms, |turn| turn.elapsed_ms)
    }

    /// Now, to the nanosecond.
    #[inline]
    pub(crate) fn now(&self) -> Instant {
        let looked = Instant::now();
        if let Some(turn) = self.turn.get() {
            self.turn.set(Some(Reading { looked, ..turn }));
        }
        looked
    }

    /// When a request began that is the next in its turn: with the end of the one before.
    #[inline]
    pub(crate) fn next_began(&self) -> Instant {
        self.turn.get().map_or_else(Instant::now, |turn| turn.looked)
    }

    /// The current `Date` field value (RFC 9110 §5.6.7).
    pub(crate) fn date(&self) -> [u8; 29] {
        let now = self.unix_s();
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

/// Milliseconds since some moment before this program began.
pub(crate) fn monotonic_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    (now.tv_sec * 1000 + now.tv_nsec / 1_000_000).unsigned_abs()
}
