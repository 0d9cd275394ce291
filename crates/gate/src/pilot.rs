//! The adaptation agent at work: its sensors, and its hands on a gate.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use tidegate_policy::{Agent, ClassObservation, Goals, Observation, RuleSet};

use crate::abi;
use crate::{Gate, GateError};

/// Explanations that are kept for people.
const LINES_KEPT: usize = 50;
const BUCKETS: usize = abi::TG_LATENCY_BUCKETS as usize;

/// What happened in one class since the gate was loaded.
#[derive(Clone, Debug)]
pub(crate) struct ClassTotals {
    pub(crate) passed: u64,
    pub(crate) refused: u64,
    /// How many requests took how long; `None`: nobody measures it.
    pub(crate) latencies: Option<Vec<u64>>,
}

/// Lets the agent adapt the limits of a gate's classes.
#[derive(Debug)]
pub struct Pilot {
    agent: Agent,
    ports: Vec<u16>,
    backlog: u32,
    before: Vec<ClassTotals>,
    pressure: [Option<u64>; 2],
    last: Instant,
    lines: VecDeque<String>,
    limits: Vec<String>,
}

impl Pilot {
    /// How often [`Pilot::tick`] wants to be called.
    pub const INTERVAL: Duration = Agent::INTERVAL;

    /// Begins to watch. `ports` are those of listeners with one accept queue of `backlog` connections; none where each
    /// class has a queue of its own.
    pub fn start(
        gate: &Gate,
        goals: Goals,
        rules: &RuleSet,
        ports: &[u16],
        backlog: u32,
    ) -> Result<Self, GateError> {
        gate.limit_classes(rules, &[])?;
        Ok(Self {
            agent: Agent::new(goals, rules.classes()),
            ports: ports.to_vec(),
            backlog: backlog.max(1),
            before: gate.class_totals()?,
            pressure: [pressure_us("cpu"), pressure_us("memory")],
            last: Instant::now(),
            lines: VecDeque::new(),
            limits: Vec::new(),
        })
    }

    /// Looks and adjusts; gives a line for each change.
    pub fn tick(&mut self, gate: &Gate, rules: &RuleSet) -> Result<Vec<String>, GateError> {
        let observation = self.observe(gate)?;
        let Some(adjustment) = self.agent.observe(&observation) else { return Ok(Vec::new()) };
        gate.limit_classes(rules, &adjustment.limits)?;
        gate.set_overload(adjustment.overload)?;
        self.limits = (1..)
            .zip(&adjustment.limits)
            .filter_map(|(priority, limit)| {
                let limit = (*limit)?;
                Some(format!(
                    "priority {priority} may have {:.1}/s, {} at once",
                    limit.rate_per_s(),
                    limit.burst()
                ))
            })
            .collect();
        for line in &adjustment.lines {
            if self.lines.len() == LINES_KEPT {
                self.lines.pop_front();
            }
            self.lines.push_back(line.clone());
        }
        Ok(adjustment.lines)
    }

    /// What is limited now, and the last explanations, the oldest first.
    pub fn explain(&self) -> Vec<String> {
        self.limits.iter().chain(&self.lines).cloned().collect()
    }

    fn observe(&mut self, gate: &Gate) -> Result<Observation, GateError> {
        let now = Instant::now();
        let elapsed = now.duration_since(self.last);
        self.last = now;
        let totals = gate.class_totals()?;
        let classes: Vec<ClassObservation> =
            totals.iter().zip(&self.before).map(|(now, before)| since(now, before)).collect();
        self.before = totals;
        let depth = if self.ports.is_empty() { 0 } else { accept_queue_depth(&self.ports) };
        let per_s = classes.iter().map(|class| class.completed).sum::<u64>() as f64 / elapsed.as_secs_f64();
        // Little's law: so long does the last that waits have to wait.
        let delay_s = if depth > 0 && per_s > 0.0 { f64::from(depth) / per_s } else { 0.0 };
        let [cpu, memory] = ["cpu", "memory"].map(pressure_us);
        let share = |now: Option<u64>, before: Option<u64>| match (now, before) {
            (Some(now), Some(before)) => {
                now.saturating_sub(before) as f64 / elapsed.as_micros().max(1) as f64
            }
            _ => 0.0,
        };
        let observation = Observation {
            elapsed,
            classes,
            queue_delay: (delay_s > 0.0).then(|| Duration::from_secs_f64(delay_s.min(3600.0))),
            queue_fill: f64::from(depth) / f64::from(self.backlog),
            memory_pressure: share(memory, self.pressure[1]),
            cpu_pressure: share(cpu, self.pressure[0]),
            upstream_errors: 0.0,
        };
        self.pressure = [cpu, memory];
        Ok(observation)
    }
}

fn since(now: &ClassTotals, before: &ClassTotals) -> ClassObservation {
    let admitted = now.passed.saturating_sub(before.passed);
    let offered = admitted + now.refused.saturating_sub(before.refused);
    let (Some(now), Some(before)) = (&now.latencies, &before.latencies) else {
        // Nobody counts answers: a server that keeps up answers what it admits.
        return ClassObservation { offered, admitted, completed: admitted, latency: None };
    };
    let counts: Vec<u64> = now.iter().zip(before).map(|(now, before)| now.saturating_sub(*before)).collect();
    let completed: u64 = counts.iter().sum();
    ClassObservation { offered, admitted, completed, latency: percentile(&counts, completed) }
}

/// The time that nine in ten took at most.
fn percentile(counts: &[u64], total: u64) -> Option<Duration> {
    let wanted = (total * 9).div_ceil(10);
    let mut seen = 0;
    let bucket = counts.iter().position(|count| {
        seen += count;
        total > 0 && seen >= wanted
    })?;
    Some(Duration::from_micros(upper_us(bucket)))
}

/// The end of a bucket: quarters of powers of two.
fn upper_us(bucket: usize) -> u64 {
    if bucket < 4 {
        return bucket as u64 + 1;
    }
    let (power, quarter) = ((bucket + 4) / 4, (bucket + 4) % 4);
    (5 + quarter as u64) << (power - 2)
}

/// Time in which some task waited for a resource since the host started; `None`: the kernel does not say (PSI).
fn pressure_us(resource: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/pressure/{resource}")).ok()?;
    let line = text.lines().find(|line| line.starts_with("some "))?;
    line.rsplit_once("total=")?.1.trim().parse().ok()
}

/// Connections that wait to be accepted on these ports, in the calling thread's network namespace.
fn accept_queue_depth(ports: &[u16]) -> u32 {
    ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"]
        .into_iter()
        .map(|path| depth_in(path, ports))
        .sum()
}

/// Listening sockets come first in these files, so that the rest need not be read.
fn depth_in(path: &str, ports: &[u16]) -> u32 {
    const LISTENING: &str = "0A";
    let Ok(file) = File::open(path) else { return 0 };
    let mut depth = 0;
    for line in BufReader::new(file).lines().skip(1).map_while(Result::ok) {
        let words: Vec<&str> = line.split_ascii_whitespace().take(5).collect();
        let [_, local, _, state, queues] = words.as_slice() else { break };
        if *state != LISTENING {
            break;
        }
        let port = local.rsplit_once(':').and_then(|(_, port)| u16::from_str_radix(port, 16).ok());
        if port.is_some_and(|port| ports.contains(&port)) {
            let waiting =
                queues.rsplit_once(':').and_then(|(_, waiting)| u32::from_str_radix(waiting, 16).ok());
            depth += waiting.unwrap_or(0);
        }
    }
    depth
}

/// An empty histogram.
pub(crate) fn no_latencies() -> Vec<u64> {
    vec![0; BUCKETS]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_the_end_of_the_bucket_that_reaches_it() {
        let mut counts = no_latencies();
        assert_eq!(percentile(&counts, 0), None);
        // Ten requests: nine within 1,024 to 1,279 us, one far beyond.
        counts[36] = 9;
        counts[60] = 1;
        assert_eq!(percentile(&counts, 10), Some(Duration::from_micros(1280)));
        counts[60] = 2;
        assert_eq!(percentile(&counts, 11), Some(Duration::from_micros(upper_us(60))));
        assert!((0..BUCKETS - 1).all(|bucket| upper_us(bucket) <= upper_us(bucket + 1)));
    }

    #[test]
    fn depth_of_an_accept_queue_is_that_of_its_port() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let _clients: Vec<_> = (0..3).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
        assert_eq!(accept_queue_depth(&[address.port()]), 3);
        listener.accept().unwrap();
        assert_eq!(accept_queue_depth(&[address.port()]), 2);
        assert_eq!(accept_queue_depth(&[]), 0);
    }
}
