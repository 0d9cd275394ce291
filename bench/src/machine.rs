//! What else the machine does during a run.

/// Shares of other programs above this make figures doubtful.
pub const BUSY_PERCENT: f64 = 5.0;

/// Watches what the machine does beside a run.
pub struct Watch {
    began: Option<Usage>,
}

/// Ticks since the machine's start, and of those the run's own.
#[derive(Clone, Copy)]
struct Usage {
    total: f64,
    busy: f64,
    own: f64,
}

impl Watch {
    /// Begins to watch.
    pub fn start() -> Self {
        Self { began: usage() }
    }

    /// Share of the machine's processor time that went to other programs meanwhile; 100 if it cannot be told. Processes
    /// that the run started must have ended and been awaited.
    pub fn others_percent(&self) -> f64 {
        match (self.began, usage()) {
            (Some(began), Some(now)) if now.total > began.total => {
                let others = (now.busy - began.busy) - (now.own - began.own);
                (100.0 * others / (now.total - began.total)).clamp(0.0, 100.0)
            }
            // Over before the clock ticked.
            (Some(_), Some(_)) => 0.0,
            _ => 100.0,
        }
    }
}

fn usage() -> Option<Usage> {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let (total, busy) = machine_ticks(&read("/proc/stat"))?;
    Some(Usage { total, busy, own: own_ticks(&read("/proc/self/stat"))? })
}

/// proc_stat(5): user, nice, system, idle, iowait, irq, softirq, steal. What the hypervisor steals is time of others.
fn machine_ticks(stat: &str) -> Option<(f64, f64)> {
    let ticks: Vec<f64> =
        stat.lines().next()?.split_whitespace().skip(1).take(8).map_while(|t| t.parse().ok()).collect();
    let idle = ticks.get(3)? + ticks.get(4)?;
    let total: f64 = ticks.iter().sum();
    Some((total, total - idle))
}

/// proc_pid_stat(5): fields 14 to 17, user and system time of the process and of its awaited children.
fn own_ticks(stat: &str) -> Option<f64> {
    crate::peers::fields(stat).get(11..15)?.iter().map(|field| field.parse::<f64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read_as_documented() {
        assert_eq!(machine_ticks("cpu  10 1 5 80 2 1 1 0 0 0\ncpu0 1 2"), Some((100.0, 18.0)));
        assert_eq!(machine_ticks(""), None);
        let stat = "7 (a) b) S 1 1 1 0 -1 0 1 2 3 4 100 20 3 4 20 0";
        assert_eq!(own_ticks(stat), Some(127.0));
        assert_eq!(own_ticks("7 (short) S 1"), None);
    }
}
