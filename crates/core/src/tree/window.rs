//! What is counted for one network prefix, over a sliding window.

macro_rules! events {
    ($($variant:ident $doc:literal,)*) => {
        /// What is counted for every address and for every prefix that it is in.
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        pub enum Event { $(#[doc = $doc] $variant,)* }

        impl Event {
            /// Every event, in the order of the counters.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];
        }
    };
}

events! {
    Request "A request whose head is complete.",
    Connection "A new connection.",
    Address "An address, or an IPv6 network of 64 bits, that did something for the first time in a window.",
    Novel "A request that missed the cache, for a URL that nobody has asked for lately.",
    Error "A response that tells of a fault of the client's: unknown pages, and with more weight failed logins.",
    UpstreamMs "A millisecond of the upstreams' time.",
    Range "A request for a part of a response that is tiny or was asked for before.",
    Slow "A connection that was ended because its client was too slow.",
    Violation "A verdict against the client.",
}

impl Event {
    /// So many within the sliding window make an address worth telling other owners of: few to what any limit allows.
    pub const fn worth_telling(self) -> u32 {
        match self {
            Self::Request => 64,
            Self::UpstreamMs => 1_024,
            _ => 16,
        }
    }
}

/// How many events are told apart.
pub(super) const EVENTS: usize = Event::ALL.len();

/// Counters of the window in progress and of the one before.
///
/// A sliding count is the current window's plus that part of the previous window's which the sliding window still
/// covers, as if that window's events had been spread evenly over it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Window {
    index: u32,
    current: [u32; EVENTS],
    previous: [u32; EVENTS],
}

/// A moment as a window's index and the share of it that has passed, in 1/65536.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub index: u32,
    passed: u32,
}

impl Moment {
    pub(super) fn new(now_ms: u64, window_ms: u64) -> Self {
        let passed = ((now_ms % window_ms) << 16) / window_ms;
        Self { index: (now_ms / window_ms) as u32, passed: passed as u32 }
    }
}

impl Window {
    pub(super) fn new(moment: Moment) -> Self {
        Self { index: moment.index, ..Self::default() }
    }

    /// Moves on to the window of `moment`; whether that is another one than before. Time that goes back stands still.
    #[inline]
    pub(super) fn roll(&mut self, moment: Moment) -> bool {
        moment.index != self.index && self.roll_on(moment)
    }

    #[cold]
    fn roll_on(&mut self, moment: Moment) -> bool {
        let windows = moment.index.wrapping_sub(self.index);
        if windows > u32::MAX / 2 {
            return false;
        }
        self.previous = if windows == 1 { self.current } else { [0; EVENTS] };
        self.current = [0; EVENTS];
        self.index = moment.index;
        true
    }

    /// Counts an event; how often it was counted in this window.
    #[inline]
    pub(super) fn add(&mut self, event: Event, amount: u32) -> u32 {
        let counter = &mut self.current[event as usize];
        *counter = counter.saturating_add(amount);
        *counter
    }

    /// The sliding count.
    #[inline]
    pub(super) fn count(&self, event: Event, moment: Moment) -> u32 {
        let (current, previous) = match moment.index.wrapping_sub(self.index) {
            0 => (self.current[event as usize], self.previous[event as usize]),
            1 => (0, self.current[event as usize]),
            windows if windows > u32::MAX / 2 => {
                (self.current[event as usize], self.previous[event as usize])
            }
            _ => return 0,
        };
        let covered = (u64::from(previous) * u64::from(65_536 - moment.passed)) >> 16;
        current.saturating_add(covered as u32)
    }

    /// The window in which something was last counted.
    pub(super) fn index(&self) -> u32 {
        self.index
    }

    /// Only this window's own counter.
    pub(super) fn current(&self, event: Event) -> u32 {
        self.current[event as usize]
    }

    pub(super) fn previous(&self, event: Event) -> u32 {
        self.previous[event as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 10_000;

    #[test]
    fn count_fades_over_the_window_after() {
        let mut window = Window::new(Moment::new(0, MS));
        window.add(Event::Request, 100);
        let count = |window: &Window, now| window.count(Event::Request, Moment::new(now, MS));
        assert_eq!(count(&window, 9_999), 100);
        assert_eq!(count(&window, 10_000), 100);
        assert_eq!(count(&window, 15_000), 50);
        assert_eq!(count(&window, 20_000), 0);
        window.roll(Moment::new(15_000, MS));
        window.add(Event::Request, 10);
        assert_eq!(count(&window, 15_000), 60);
    }

    #[test]
    fn clock_that_goes_back_loses_nothing() {
        let mut window = Window::new(Moment::new(50_000, MS));
        window.add(Event::Request, 7);
        assert!(!window.roll(Moment::new(20_000, MS)));
        assert_eq!(window.count(Event::Request, Moment::new(20_000, MS)), 7);
    }
}
