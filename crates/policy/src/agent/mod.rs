//! The adaptation agent that the paper leaves as future work (its section 7): given what an operator wants, it finds
//! the rates at which the lower classes may be admitted.
//!
//! No clock, no socket, no random source: observations come in, adjustments with the reason for each go out. One class
//! at a time is changed, the lowest first when there is too much to do and the highest first when there is room, so
//! that no assumption is needed on what a connection of each class costs. The rate that was too much is remembered:
//! growth is fast well below it, slow near it, and probing beyond it.

mod class;

use std::fmt;
use std::time::Duration;

use crate::{MAX_CLASSES, Profile, StressLevel};
use class::ClassState;

/// What an operator wants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goals {
    /// How long nine in ten requests of the preferred class may take.
    pub latency: Duration,
    /// Never starve a class below this share of the rate at which it was served while nothing was limited.
    pub floor: f64,
}

impl Default for Goals {
    fn default() -> Self {
        Self { latency: Duration::from_millis(200), floor: 0.05 }
    }
}

/// What happened in one class since the observation before.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ClassObservation {
    /// Connections or requests that came.
    pub offered: u64,
    /// Those that were let in.
    pub admitted: u64,
    /// Those that were answered.
    pub completed: u64,
    /// The time that nine in ten of those took at most; `None`: nothing was answered.
    pub latency: Option<Duration>,
}

/// What the sensors saw since the observation before.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observation {
    /// How long that was.
    pub elapsed: Duration,
    /// The classes, the preferred one first.
    pub classes: Vec<ClassObservation>,
    /// How long the head of the preferred class's accept queue (or of the only one) has waited, if that is known.
    pub queue_delay: Option<Duration>,
    /// Connections that wait there, as a share of the backlog.
    pub queue_fill: f64,
    /// Share of the time in which some task waited for memory (PSI).
    pub memory_pressure: f64,
    /// Share of the time in which some task waited for a processor (PSI). High under any full load: it only explains.
    pub cpu_pressure: f64,
    /// Share of requests that the upstream failed.
    pub upstream_errors: f64,
    /// How close the host is to what counts as overload by itself.
    pub stress: StressLevel,
}

/// What is too high.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cause {
    Latency(Duration),
    QueueDelay(Duration),
    QueueFill(f64),
    Memory(f64),
    Upstream(f64),
    Stress(StressLevel),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Latency(time) => write!(f, "the preferred class takes {} ms", time.as_millis()),
            Self::QueueDelay(time) => write!(f, "connections wait {} ms to be accepted", time.as_millis()),
            Self::QueueFill(share) => write!(f, "the accept queue is {:.0} % full", share * 100.0),
            Self::Memory(share) => write!(f, "tasks wait for memory {:.0} % of the time", share * 100.0),
            Self::Upstream(share) => write!(f, "the upstream fails {:.0} % of requests", share * 100.0),
            Self::Stress(level) => level.fmt(f),
        }
    }
}

/// What is to be put in force, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Adjustment {
    /// The limit of each class, the preferred one first; `None`: unlimited.
    pub limits: Vec<Option<Profile>>,
    /// Whether there is overload: rules that act only then are to act.
    pub overload: bool,
    /// One line for each change, for the log and for people.
    pub lines: Vec<String>,
}

/// Lower classes may take so many times as long as the preferred one before that counts as overload by itself.
const LOWER_LATENCY_FACTOR: f64 = 8.0;
/// Shares that count as overload.
const MEMORY_LIMIT: f64 = 0.2;
const UPSTREAM_LIMIT: f64 = 0.2;
const QUEUE_FILL_LIMIT: f64 = 0.5;
/// Of the signal (1 is the limit): below there is room, between the two nothing changes.
const ROOM_BELOW: f64 = 0.75;
/// Intervals that a decrease is given to show an effect.
const SETTLING: u32 = 2;
/// Beyond this all lower classes are limited at once.
const URGENT: f64 = 2.0;
/// Intervals without overload after which overload is no longer signalled.
const CALM_INTERVALS: u32 = 12;
/// Intervals for which limiting the lower classes must have been in vain before the preferred one is limited.
const PATIENCE: u32 = 60;

/// Watches and adjusts.
#[derive(Debug)]
pub struct Agent {
    goals: Goals,
    classes: Vec<ClassState>,
    /// The signals of the last intervals: one slow answer is no overload, and one fast one no end of it.
    recent: [f64; 3],
    /// Whether the signal is beyond the limit and rises fast.
    rising: bool,
    /// Intervals until another decrease: a decrease shows its effect once the queue has drained.
    settling: u32,
    /// Intervals in which every lower class was at its least and there was too much still.
    exhausted: u32,
    calm: u32,
    overload: bool,
}

impl Agent {
    /// How often [`Agent::observe`] wants to be called.
    pub const INTERVAL: Duration = Duration::from_millis(250);

    /// An agent for `classes` classes that limits nothing yet.
    pub fn new(goals: Goals, classes: usize) -> Self {
        Self {
            goals,
            classes: vec![ClassState::default(); classes.clamp(1, MAX_CLASSES)],
            recent: [0.0; 3],
            rising: false,
            settling: 0,
            exhausted: 0,
            calm: 0,
            overload: false,
        }
    }

    /// What the operator wants.
    pub fn goals(&self) -> Goals {
        self.goals
    }

    /// Takes one observation; gives what has to change, if anything has.
    pub fn observe(&mut self, observation: &Observation) -> Option<Adjustment> {
        let seconds = observation.elapsed.as_secs_f64();
        if seconds <= 0.0 {
            return None;
        }
        let (signal, cause) = self.signal(observation);
        self.rising = signal > 1.0 && signal > self.recent[2] * 1.25;
        let smooth = self.smooth(signal);
        // What is far beyond the limit is no outlier.
        let smooth = if signal > URGENT { smooth.max(signal / URGENT) } else { smooth };
        let unlimited = !self.classes.iter().any(ClassState::is_limited);
        let slow = self.goals.latency.as_secs_f64() * LOWER_LATENCY_FACTOR;
        for (class, seen) in self.classes.iter_mut().zip(&observation.classes) {
            class.see(seen, seconds, slow, self.goals.floor, unlimited && smooth <= 1.0);
        }
        let mut lines = Vec::new();
        if smooth > 1.0 {
            self.calm = 0;
            self.decrease(smooth, &cause, &mut lines);
        } else {
            self.settling = self.settling.saturating_sub(1);
            self.exhausted = 0;
            self.calm = self.calm.saturating_add(1);
            self.shorten_queues(&mut lines);
            self.feed_the_starved(&mut lines);
            if smooth < ROOM_BELOW && lines.is_empty() {
                self.increase(smooth, &mut lines);
            }
        }
        let limited = self.classes.iter().any(ClassState::is_limited);
        let overload = smooth > 1.0 || (self.overload && (self.calm < CALM_INTERVALS || limited));
        if overload != self.overload {
            self.overload = overload;
            let end = "there is no overload any more".to_owned();
            lines.push(if overload { format!("overload: {cause}") } else { end });
        }
        if lines.is_empty() {
            return None;
        }
        let latency_s = self.goals.latency.as_secs_f64();
        let limits = self.classes.iter().map(|class| class.profile(latency_s)).collect();
        Some(Adjustment { limits, overload: self.overload, lines })
    }

    /// How close to its limit the worst of everything is: 1 is the limit.
    fn signal(&self, seen: &Observation) -> (f64, Cause) {
        let target = self.goals.latency.as_secs_f64();
        let mut all = vec![
            (seen.queue_fill / QUEUE_FILL_LIMIT, Cause::QueueFill(seen.queue_fill)),
            (seen.memory_pressure / MEMORY_LIMIT, Cause::Memory(seen.memory_pressure)),
            (seen.upstream_errors / UPSTREAM_LIMIT, Cause::Upstream(seen.upstream_errors)),
            (seen.stress.level, Cause::Stress(seen.stress)),
        ];
        all.extend(seen.queue_delay.map(|delay| (delay.as_secs_f64() / target, Cause::QueueDelay(delay))));
        let preferred = seen.classes.first().and_then(|class| class.latency);
        all.extend(preferred.map(|latency| (latency.as_secs_f64() / target, Cause::Latency(latency))));
        let worst = all.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
        worst.unwrap_or((0.0, Cause::QueueFill(0.0)))
    }

    /// The median of three.
    fn smooth(&mut self, signal: f64) -> f64 {
        self.recent.rotate_left(1);
        self.recent[2] = if signal.is_finite() { signal } else { f64::MAX };
        let mut sorted = self.recent;
        sorted.sort_by(f64::total_cmp);
        sorted[1]
    }

    fn decrease(&mut self, signal: f64, cause: &Cause, lines: &mut Vec<String>) {
        // What was decreased before is having its effect: more goes than comes.
        let rates = self.classes.iter().fold((0.0, 0.0), |(admitted, completed), class| {
            (admitted + class.admitted(), completed + class.completed())
        });
        if self.settling > 0 || rates.1 > rates.0 * 1.05 {
            self.settling = self.settling.saturating_sub(1);
            return;
        }
        let urgent = signal > URGENT || self.rising;
        let factor = (1.0 / signal).clamp(0.5, 0.9);
        // A queue that grows fast is cut off at once: growing again takes less time than a long queue takes to drain.
        let factor = if urgent { factor / 2.0 } else { factor };
        let floor = self.goals.floor;
        // The preferred class is limited only when limiting all others has not helped.
        let highest = usize::from(self.classes.len() > 1 && self.exhausted < PATIENCE);
        for (index, class) in self.classes.iter_mut().enumerate().skip(highest).rev() {
            if let Some((from, to)) = class.decrease(factor, floor, false) {
                lines.push(describe(index, from, Some(to), &cause.to_string()));
                self.settling = SETTLING;
                if !urgent {
                    return;
                }
            }
        }
        if self.settling > 0 {
            return;
        }
        self.exhausted = self.exhausted.saturating_add(1);
    }

    /// A lower class whose answers take very long is admitted no faster than it is served: its clients would wait in
    /// vain.
    fn shorten_queues(&mut self, lines: &mut Vec<String>) {
        let floor = self.goals.floor;
        for (index, class) in self.classes.iter_mut().enumerate().skip(1) {
            if let Some((from, to)) = class.shorten(floor) {
                lines.push(describe(
                    index,
                    from,
                    Some(to),
                    "its answers take too long for its clients to wait",
                ));
            }
        }
    }

    /// Under strict priority a class can be starved by one above it; all but the preferred one give way.
    fn feed_the_starved(&mut self, lines: &mut Vec<String>) {
        let Some(starved) = self.classes.iter().rposition(ClassState::is_starved).filter(|index| *index > 1)
        else {
            return;
        };
        if self.settling > 0 {
            return;
        }
        let floor = self.goals.floor;
        for (index, class) in self.classes.iter_mut().enumerate().take(starved).skip(1) {
            if class.drains() {
                continue;
            }
            if let Some((from, to)) = class.decrease(0.75, floor, true) {
                lines.push(describe(index, from, Some(to), &format!("priority {} starves", starved + 1)));
                self.settling = 4 * SETTLING;
            }
        }
    }

    fn increase(&mut self, signal: f64, lines: &mut Vec<String>) {
        // What a class above takes is what one that is served less than its floor lacks.
        let starved = self.classes.iter().rposition(ClassState::is_short).unwrap_or(0);
        for (index, class) in self.classes.iter_mut().enumerate() {
            if index > 0 && index < starved {
                continue;
            }
            if let Some((from, to)) = class.increase(signal) {
                let why = if to.is_none() { "it asks for less than it may have" } else { "there is room" };
                lines.push(describe(index, Some(from), to, why));
            }
            // The next class has its turn once this one has what it asks for.
            if class.is_held_back() {
                return;
            }
        }
    }

    /// Checks what must hold at any time; for tests.
    #[doc(hidden)]
    pub fn check_invariants(&self) {
        for class in &self.classes {
            class.check_invariants();
        }
        assert!(self.settling <= 8);
    }
}

fn describe(index: usize, from: Option<f64>, to: Option<f64>, why: &str) -> String {
    let rate = |rate: Option<f64>| rate.map_or_else(|| "unlimited".to_owned(), |rate| format!("{rate:.1}/s"));
    format!("priority {}: {} -> {}: {why}", index + 1, rate(from), rate(to))
}
