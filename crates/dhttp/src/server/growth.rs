//! How long a response in several datagrams may be, network by network: the paper's "dynamic policies for choosing the
//! size threshold" (DHTTP §III-C and §VII).
//!
//! It begins with what TCP sends before it hears of the first of it (RFC 6928). While nothing is lost on the way it
//! doubles, as TCP's window would, but within seconds instead of round trips: nobody acknowledges pieces. One loss and
//! it is at the beginning again, until that has lost half its value; so it is when little was sent for a while, because
//! the path may have changed (RFC 7661).

use std::time::{Duration, Instant};

/// So many datagrams with pieces, none of them lost, say something.
const DATAGRAMS: usize = 100;
/// What is missing is asked for 200 milliseconds after the last piece that came: after so long it is known.
const PERIOD: Duration = Duration::from_secs(1);

/// One network's limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth {
    doublings: u32,
    /// Sent since it grew, or began.
    datagrams: usize,
    since: Instant,
}

impl Growth {
    pub fn new(now: Instant) -> Self {
        Self { doublings: 0, datagrams: 0, since: now }
    }

    /// Pieces were sent that had not been asked for before.
    pub fn on_pieces(&mut self, datagrams: usize) {
        self.datagrams = self.datagrams.saturating_add(datagrams);
    }

    pub fn on_loss(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// The limit, in bytes, between `first` and `most`. `resent` is how many requests were resent, each for what it
    /// still counts, and `forgotten_after` how long what is known about a path is good.
    pub fn bytes(
        &mut self,
        (first, most): (usize, usize),
        resent: f64,
        forgotten_after: Duration,
        now: Instant,
    ) -> usize {
        let elapsed = now.saturating_duration_since(self.since);
        if elapsed >= forgotten_after {
            *self = Self::new(now);
        } else if elapsed >= PERIOD && self.datagrams >= DATAGRAMS && resent <= 0.5 {
            let doublings =
                if first > 0 && self.reaches(first) < most { self.doublings + 1 } else { self.doublings };
            *self = Self { doublings, ..Self::new(now) };
        }
        self.reaches(first).min(most.max(first))
    }

    fn reaches(&self, first: usize) -> usize {
        first.checked_shl(self.doublings).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: (usize, usize) = (14_600, 50_000);
    const KNOWN_FOR: Duration = Duration::from_secs(30);

    fn bytes(growth: &mut Growth, now: Instant) -> usize {
        growth.bytes(LIMITS, 0.0, KNOWN_FOR, now)
    }

    #[test]
    fn a_limit_doubles_each_period_in_which_enough_was_sent_and_nothing_lost() {
        let mut now = Instant::now();
        let mut growth = Growth::new(now);
        for (sent, expected) in [(100, 29_200), (99, 29_200), (1, 50_000), (500, 50_000)] {
            growth.on_pieces(sent);
            let before = bytes(&mut growth, now);
            now += PERIOD;
            assert_eq!(bytes(&mut growth, now), expected, "{before} before");
        }
    }

    #[test]
    fn a_loss_brings_a_limit_back_until_it_no_longer_counts() {
        let mut now = Instant::now();
        let mut growth = Growth::new(now);
        growth.on_pieces(1000);
        now += PERIOD;
        assert_eq!(bytes(&mut growth, now), 29_200);
        growth.on_loss(now);
        growth.on_pieces(1000);
        now += PERIOD;
        assert_eq!(growth.bytes(LIMITS, 0.9, KNOWN_FOR, now), 14_600);
        assert_eq!(growth.bytes(LIMITS, 0.5, KNOWN_FOR, now), 29_200);
    }

    #[test]
    fn what_was_known_of_a_path_is_forgotten() {
        let mut now = Instant::now();
        let mut growth = Growth::new(now);
        growth.on_pieces(1000);
        now += PERIOD;
        assert_eq!(bytes(&mut growth, now), 29_200);
        growth.on_pieces(1000);
        now += KNOWN_FOR;
        assert_eq!(bytes(&mut growth, now), 14_600, "however much was sent before");
    }

    #[test]
    fn where_there_are_no_pieces_none_grow() {
        let mut now = Instant::now();
        let mut growth = Growth::new(now);
        for _ in 0..100 {
            growth.on_pieces(1000);
            now += PERIOD;
            assert_eq!(growth.bytes((0, 50_000), 0.0, KNOWN_FOR, now), 0);
        }
    }
}
