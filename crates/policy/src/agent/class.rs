//! What the agent knows of one class, and how its limit moves.

use super::ClassObservation;
use crate::Profile;

/// Growth per interval well below the rate that was too much, near it, and at most beyond it.
const FAST: f64 = 0.12;
const SLOW: f64 = 0.012;
const PROBE_MAX: f64 = 0.08;
/// Well below: up to this share of the rate that was too much.
const NEAR: f64 = 0.85;
/// A class that uses less than this share of its limit is not held back by it.
const USED: f64 = 0.7;
/// Intervals in which a limit keeps nothing out before it is lifted.
const LIFT_INTERVALS: u32 = 40;
/// Intervals of less service than the floor before those above have to give way.
const STARVED_INTERVALS: u32 = 8;
/// Far from overload, as a share of the limit, and for how many intervals until the past is forgotten.
const EASY: f64 = 0.3;
const EASY_INTERVALS: u32 = 24;
/// Weight of the last interval in what is remembered of rates.
const WEIGHT: f64 = 0.4;
/// No limit is below this, in connections or requests per second.
const LEAST: f64 = 1.0;

#[derive(Clone, Debug, Default)]
pub(super) struct ClassState {
    /// Per second; `None`: unlimited.
    limit: Option<f64>,
    /// The limit, or the rate admitted, that last was too much.
    critical: Option<f64>,
    /// What came, was admitted and was answered per second in the last interval.
    offered: f64,
    admitted: f64,
    completed: f64,
    /// Its latency, as a share of what is too long.
    slow: f64,
    /// Intervals until its queue may be shortened again.
    settling: u32,
    /// The greatest rate at which it was served without limits, slowly forgotten: what its floor is a share of.
    served: f64,
    /// Intervals of growth beyond the critical rate.
    beyond: u32,
    /// Intervals in which nothing was near overload.
    easy: u32,
    /// Intervals in which its limit kept nothing out.
    idle: u32,
    /// Intervals in which it was served less than its floor.
    starved: u32,
}

impl ClassState {
    pub(super) fn see(
        &mut self,
        seen: &ClassObservation,
        seconds: f64,
        too_long_s: f64,
        floor: f64,
        free: bool,
    ) {
        for (rate, count) in [
            (&mut self.offered, seen.offered),
            (&mut self.admitted, seen.admitted),
            (&mut self.completed, seen.completed),
        ] {
            *rate += (count as f64 / seconds - *rate) * WEIGHT;
        }
        self.slow = seen.latency.map_or(0.0, |latency| latency.as_secs_f64() / too_long_s);
        self.settling = self.settling.saturating_sub(1);
        if free {
            self.served = (self.served * 0.9995).max(self.completed);
        } else {
            // Limited from the start: what it was served then is all that is known.
            self.served = self.served.max(self.completed);
        }
        // A moment in which it asks for more does not start the count anew.
        self.idle = if self.is_held_back() { self.idle.saturating_sub(4) } else { self.idle + 1 };
        let least = self.least(floor);
        // A backlog that is worked off raises what it was served, and so its floor.
        self.limit = self.limit.map(|limit| limit.max(least));
        let starves = self.offered >= LEAST && self.completed < least * 0.7;
        self.starved = if starves { self.starved + 1 } else { self.starved.saturating_sub(2) };
    }

    /// What it may have in any case, per second.
    fn least(&self, floor: f64) -> f64 {
        (self.served * floor).max(LEAST)
    }

    /// Whether more of it is answered than comes in.
    pub(super) fn drains(&self) -> bool {
        self.completed > self.admitted * 1.05
    }

    pub(super) fn admitted(&self) -> f64 {
        self.admitted
    }

    pub(super) fn completed(&self) -> f64 {
        self.completed
    }

    pub(super) fn is_limited(&self) -> bool {
        self.limit.is_some()
    }

    /// Whether its limit keeps out what asks for admission.
    pub(super) fn is_held_back(&self) -> bool {
        self.limit.is_some_and(|limit| self.offered > limit * USED)
    }

    /// Whether it is served less than its floor, or was a moment ago.
    pub(super) fn is_short(&self) -> bool {
        self.starved > 0
    }

    /// Whether it has been served less than its floor for a while.
    pub(super) fn is_starved(&self) -> bool {
        self.starved >= STARVED_INTERVALS
    }

    pub(super) fn profile(&self, latency_s: f64) -> Option<Profile> {
        let limit = self.limit?;
        // What a server can take at once and still be in time (the trade-off of the paper's figure 6).
        let burst = (limit * latency_s / 2.0).ceil().clamp(2.0, 1000.0) as u32;
        let most = f64::from(Profile::MAX_RATE_PER_S);
        Profile::new(limit.clamp(LEAST, most), burst).ok()
    }

    /// Admits less, down to a share of what it was served without limits. Whether it is known how much is too much, or
    /// only that there is too much, decides how fast it may grow again. `None`: it admits the least already, or
    /// nothing comes that would have to be admitted.
    pub(super) fn decrease(&mut self, factor: f64, floor: f64, is_known: bool) -> Option<(Option<f64>, f64)> {
        let least = self.least(floor);
        let base = match self.limit {
            // A limit that is not used up is not what is too much.
            Some(limit) => limit.min((self.admitted * 1.5).max(least)),
            // With full queues little is admitted and nothing answered: what it was served before is a better guess.
            None => self.completed.max(self.admitted.min(self.served)).max(self.served / 2.0),
        };
        if base <= least || (self.limit.is_none() && self.offered < LEAST) {
            return None;
        }
        let from = self.limit;
        let to = (base * factor).max(least);
        self.critical = Some(base).filter(|_| is_known || from.is_some());
        self.limit = Some(to);
        (self.beyond, self.easy, self.idle) = (0, 0, 0);
        Some((from, to))
    }

    /// Admits a little less than is answered, if answers take too long and the queue grows.
    pub(super) fn shorten(&mut self, floor: f64) -> Option<(Option<f64>, f64)> {
        if self.slow <= 1.0 || self.settling > 0 || self.completed >= self.admitted {
            return None;
        }
        let least = self.least(floor);
        let from = self.limit;
        let now = self.limit.unwrap_or(f64::MAX);
        let to = (self.completed * 0.9).max(least);
        if to >= now {
            return None;
        }
        self.critical = Some(self.completed.max(least));
        self.limit = Some(to);
        (self.beyond, self.easy, self.idle, self.settling) = (0, 0, 0, 8);
        Some((from, to))
    }

    /// Admits more, if the limit keeps anything out; lifts the limit if for long nothing was. `signal` is how close
    /// everything is to overload.
    pub(super) fn increase(&mut self, signal: f64) -> Option<(f64, Option<f64>)> {
        let limit = self.limit?;
        let easy = signal < EASY && self.slow < EASY;
        self.easy = if easy { self.easy + 1 } else { 0 };
        if self.idle >= LIFT_INTERVALS {
            (self.limit, self.critical, self.beyond, self.idle) = (None, None, 0, 0);
            return Some((limit, None));
        }
        if !self.is_held_back() || self.slow > 0.75 {
            return None;
        }
        let critical = self.critical.unwrap_or(f64::MAX);
        // Far from overload for long: what was too much then is not now.
        let growth = if limit < critical * NEAR || self.easy >= EASY_INTERVALS {
            FAST
        } else if limit < critical {
            SLOW
        } else {
            self.beyond += 1;
            (SLOW * f64::from(self.beyond) / 4.0).min(PROBE_MAX)
        };
        let mut next = (limit * (1.0 + growth)).max(limit + 0.1);
        if limit < critical * NEAR {
            next = next.min(critical * NEAR);
        }
        let next = next.min(f64::from(Profile::MAX_RATE_PER_S));
        self.limit = Some(next);
        Some((limit, Some(next)))
    }

    pub(super) fn check_invariants(&self) {
        if let Some(limit) = self.limit {
            assert!(limit.is_finite() && limit >= LEAST, "{self:?}");
        }
        assert!(self.served >= 0.0 && self.offered >= 0.0, "{self:?}");
    }
}
