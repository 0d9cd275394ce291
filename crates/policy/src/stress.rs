//! What counts as overload by itself, whatever the preferred class meets: too full a memory, too long a wait.

use std::fmt;
use std::time::Duration;

/// Looks in a row without overload after which overload is no longer signalled.
const CALM_LOOKS: u32 = 12;

/// Bounds beyond which a host is overloaded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stress {
    /// Share of the memory in use.
    pub memory: f64,
    /// How long a connection waits before it is served.
    pub queue_delay: Duration,
}

impl Default for Stress {
    fn default() -> Self {
        Self { memory: 0.9, queue_delay: Duration::from_millis(50) }
    }
}

/// How close to a bound the host is: 1 is the bound.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StressLevel {
    /// The worst of all, as a share of its bound.
    pub level: f64,
    cause: Option<Cause>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Cause {
    Memory(f64),
    QueueDelay(Duration),
}

impl Stress {
    /// Compares what was seen with the bounds; what is not known is no overload.
    pub fn level(&self, memory_use: Option<f64>, queue_delay: Option<Duration>) -> StressLevel {
        let memory = memory_use.map(|share| (share / self.memory, Cause::Memory(share)));
        let delay = queue_delay
            .map(|delay| (delay.as_secs_f64() / self.queue_delay.as_secs_f64(), Cause::QueueDelay(delay)));
        let worst = memory.into_iter().chain(delay).max_by(|a, b| a.0.total_cmp(&b.0));
        worst.map_or_else(StressLevel::default, |(level, cause)| StressLevel { level, cause: Some(cause) })
    }
}

impl fmt::Display for StressLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cause {
            Some(Cause::Memory(share)) => write!(f, "{:.0} % of the memory is in use", share * 100.0),
            Some(Cause::QueueDelay(delay)) => {
                write!(f, "connections wait {} ms before they are served", delay.as_millis())
            }
            None => f.write_str("nothing is known to be overloaded"),
        }
    }
}

/// Says when overload begins and when it has ended: at a bound it does not flicker.
#[derive(Clone, Debug, Default)]
pub struct StressWatch {
    /// Whether the last two looks were beyond a bound.
    before: [bool; 2],
    calm: u32,
    stressed: bool,
}

impl StressWatch {
    /// Takes one look. One that stands alone is no overload: two of three are.
    pub fn look(&mut self, level: &StressLevel) -> bool {
        let beyond = level.level > 1.0;
        self.calm = if beyond { 0 } else { self.calm.saturating_add(1) };
        let begins = beyond && self.before.contains(&true);
        self.stressed = begins || (self.stressed && self.calm < CALM_LOOKS);
        self.before = [self.before[1], beyond];
        self.stressed
    }

    /// Whether there is overload.
    pub fn is_stressed(&self) -> bool {
        self.stressed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Stress = Stress { memory: 0.8, queue_delay: Duration::from_millis(100) };

    #[test]
    fn the_worst_of_memory_and_wait_is_the_level_and_says_what_it_is() {
        let level = BOUNDS.level(Some(0.4), Some(Duration::from_millis(200)));
        assert_eq!(
            (level.level, level.to_string().as_str()),
            (2.0, "connections wait 200 ms before they are served")
        );
        let level = BOUNDS.level(Some(0.88), Some(Duration::from_millis(10)));
        assert!(level.level > 1.0 && level.to_string() == "88 % of the memory is in use");
        assert_eq!(BOUNDS.level(None, None).level, 0.0);
    }

    #[test]
    fn overload_takes_two_looks_to_begin_and_twelve_calm_ones_to_end() {
        let (calm, beyond) = (BOUNDS.level(Some(0.1), None), BOUNDS.level(Some(0.9), None));
        let mut watch = StressWatch::default();
        assert!(!watch.look(&beyond) && !watch.look(&calm) && !watch.look(&calm));
        assert!(!watch.look(&beyond) && !watch.look(&calm) && watch.look(&beyond));
        for _ in 0..CALM_LOOKS - 1 {
            assert!(watch.look(&calm));
        }
        assert!(!watch.look(&calm) && !watch.is_stressed());
    }
}
