//! What a data core has to bear, measured a few times a second and off the way of requests (Tempesta §4.7).

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use tidegate_core::hooks::Load;

/// Measures between two readings.
pub(crate) struct Meter {
    interval: Duration,
    last: Instant,
    busy: Duration,
    /// Pages of memory at which the kernel begins to save on TCP.
    pressure_pages: f32,
}

impl Meter {
    /// For readings that are due every `interval`, on the thread that is measured.
    pub(crate) fn new(interval: Duration) -> Self {
        Self { interval, last: Instant::now(), busy: thread_busy(), pressure_pages: tcp_pressure_pages() }
    }

    /// What happened since the last reading, with so many connections `open` of `most`.
    pub(crate) fn read(&mut self, open: usize, most: usize) -> Load {
        let (now, busy) = (Instant::now(), thread_busy());
        let elapsed = now.duration_since(self.last);
        let ran = busy.saturating_sub(self.busy);
        (self.last, self.busy) = (now, busy);
        Load {
            busy: ran.as_secs_f32() / elapsed.as_secs_f32().max(0.001),
            lag_ms: u32::try_from(elapsed.saturating_sub(self.interval).as_millis()).unwrap_or(u32::MAX),
            connections: open as f32 / most.max(1) as f32,
            tcp_memory: tcp_pages() / self.pressure_pages,
        }
    }
}

/// How long this thread ran, or waited for a processor: a core that others crowd out is as busy as one that works.
fn thread_busy() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let mut numbers = text.split_ascii_whitespace().map_while(|word| word.parse().ok());
    match (numbers.next(), numbers.next()) {
        (Some(ran_ns), Some(waited_ns)) => Duration::from_nanos(ran_ns) + Duration::from_nanos(waited_ns),
        // A kernel without CONFIG_SCHED_INFO.
        _ => thread_cpu(),
    }
}

/// Pages that the sockets of TCP hold, of all processes (proc(5), `sockstat`); 0 where the kernel does not say.
fn tcp_pages() -> f32 {
    let text = std::fs::read_to_string("/proc/self/net/sockstat").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("TCP:"));
    let words = line.unwrap_or_default().split_ascii_whitespace();
    words.skip_while(|word| *word != "mem").nth(1).and_then(|word| word.parse().ok()).unwrap_or(0.0)
}

/// The second of the three values of `tcp_mem` (tcp(7)); without limit where the kernel does not say.
fn tcp_pressure_pages() -> f32 {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_mem").unwrap_or_default();
    text.split_ascii_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(f32::INFINITY)
}

fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0));
    seconds + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_tcp_is_a_share_of_what_the_kernel_allows() {
        let pressure = tcp_pressure_pages();
        assert!(pressure > 1.0 && pressure.is_finite(), "{pressure} pages");
        let load = Meter::new(Duration::ZERO).read(0, 1);
        assert!((0.0..4.0).contains(&load.tcp_memory), "{load:?}");
    }

    #[test]
    fn thread_that_works_is_busy_and_connections_are_a_share() {
        let mut meter = Meter::new(Duration::ZERO);
        let before = thread_cpu();
        while thread_cpu().saturating_sub(before) < Duration::from_millis(20) {
            std::hint::black_box(0);
        }
        let load = meter.read(3, 4);
        assert!(load.busy > 0.0 && load.connections == 0.75, "{load:?}");
        assert!(load.lag_ms >= 20, "{load:?}");
    }
}
