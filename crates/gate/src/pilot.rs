//! The adaptation agent at work: its sensors, and its hands on a gate.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use tidegate_policy::{Agent, ClassObservation, Goals, Observation, Profile, RuleSet, Stress, StressWatch};

use crate::{Gate, GateError, abi, accept_queue};

/// Explanations that are kept for people.
const LINES_KEPT: usize = 50;
/// Fewer requests to upstreams in an interval say little about them.
const MEANINGFUL_REQUESTS: u64 = 10;
const BUCKETS: usize = abi::TG_LATENCY_BUCKETS as usize;

/// What happened in one class since the gate was loaded.
#[derive(Clone, Debug)]
pub(crate) struct ClassTotals {
    pub(crate) passed: u64,
    pub(crate) refused: u64,
    /// How many requests took how long; `None`: nobody measures it.
    pub(crate) latencies: Option<Vec<u64>>,
}

/// What an operator wants to be watched.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wanted {
    /// What the agent is to achieve; `None`: no limits are adapted.
    pub goals: Option<Goals>,
    /// What counts as overload by itself.
    pub stress: Stress,
}

/// What a server in this process has counted since it started; before other servers, nothing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ServerTotals {
    /// Connections accepted.
    pub accepted: u64,
    /// Requests sent to upstreams.
    pub upstream_requests: u64,
    /// ... that they failed.
    pub upstream_failures: u64,
}

/// Says when there is overload, and lets the agent adapt the limits of a gate's classes.
#[derive(Debug)]
pub struct Pilot {
    agent: Option<Agent>,
    stress: Stress,
    watch: StressWatch,
    /// What the agent says of overload.
    overload: bool,
    /// What others say of it.
    told: bool,
    /// What the gate was told last.
    in_force: bool,
    ports: Vec<u16>,
    backlog: u32,
    before: Vec<ClassTotals>,
    server: ServerTotals,
    pressure: [Option<u64>; 2],
    last: Instant,
    lines: VecDeque<String>,
    limits: Vec<String>,
}

impl Pilot {
    /// How often [`Pilot::tick`] wants to be called.
    pub const INTERVAL: Duration = Agent::INTERVAL;

    /// Begins to watch. `ports` are those of listeners whose accept queues together hold `backlog` connections.
    pub fn start(
        gate: &Gate,
        wanted: Wanted,
        rules: &RuleSet,
        ports: &[u16],
        backlog: u32,
    ) -> Result<Self, GateError> {
        if wanted.goals.is_some() {
            gate.limit_classes(rules, &[])?;
        }
        Ok(Self {
            agent: wanted.goals.map(|goals| Agent::new(goals, rules.classes())),
            stress: wanted.stress,
            watch: StressWatch::default(),
            overload: false,
            told: false,
            in_force: false,
            ports: ports.to_vec(),
            backlog: backlog.max(1),
            before: gate.class_totals()?,
            server: ServerTotals::default(),
            pressure: [pressure_us("cpu"), pressure_us("memory")],
            last: Instant::now(),
            lines: VecDeque::new(),
            limits: Vec::new(),
        })
    }

    /// Other bounds count from now on.
    pub fn set_stress(&mut self, stress: Stress) {
        self.stress = stress;
    }

    /// Somebody else finds that the server is overloaded, or no longer: for the rules that act only then, from the next
    /// tick on.
    pub fn set_told(&mut self, overloaded: bool) {
        self.told = overloaded;
    }

    /// Whether there is overload, by what counts as that itself or by what the agent says.
    pub fn is_overloaded(&self) -> bool {
        self.overload || self.watch.is_stressed()
    }

    /// Looks and adjusts; gives a line for each change.
    pub fn tick(
        &mut self,
        gate: &Gate,
        rules: &RuleSet,
        server: &ServerTotals,
    ) -> Result<Vec<String>, GateError> {
        let observation = self.observe(gate, server)?;
        let stressed = self.watch.is_stressed();
        let mut lines = Vec::new();
        if self.watch.look(&observation.stress) != stressed {
            let ended = "what [stress] bounds is within its bounds again".to_owned();
            lines.push(if stressed { ended } else { format!("overload: {}", observation.stress) });
        }
        if let Some(adjustment) = self.agent.as_mut().and_then(|agent| agent.observe(&observation)) {
            gate.limit_classes(rules, &adjustment.limits)?;
            self.overload = adjustment.overload;
            self.limits = (1..).zip(&adjustment.limits).filter_map(limit_line).collect();
            lines.extend(adjustment.lines);
        }
        let overloaded = self.is_overloaded() || self.told;
        if overloaded != self.in_force {
            gate.set_overload(overloaded)?;
            self.in_force = overloaded;
        }
        let room = LINES_KEPT.saturating_sub(lines.len());
        self.lines.drain(..self.lines.len().saturating_sub(room));
        self.lines.extend(lines.iter().cloned());
        Ok(lines)
    }

    /// What is limited now, and the last explanations, the oldest first.
    pub fn explain(&self) -> Vec<String> {
        self.limits.iter().chain(&self.lines).cloned().collect()
    }

    fn observe(&mut self, gate: &Gate, server: &ServerTotals) -> Result<Observation, GateError> {
        let now = Instant::now();
        let elapsed = now.duration_since(self.last);
        self.last = now;
        let totals = gate.class_totals()?;
        let classes: Vec<ClassObservation> =
            totals.iter().zip(&self.before).map(|(now, before)| since(now, before)).collect();
        self.before = totals;
        let before = std::mem::replace(&mut self.server, *server);
        let accepted = server.accepted.saturating_sub(before.accepted);
        let completed = classes.iter().map(|class| class.completed).sum::<u64>();
        let depth = accept_queue::depth(&self.ports);
        let queue_delay = delay(depth, accepted.max(completed), elapsed);
        let [cpu, memory] = ["cpu", "memory"].map(pressure_us);
        let share = |now: Option<u64>, before: Option<u64>| match (now, before) {
            (Some(now), Some(before)) => {
                now.saturating_sub(before) as f64 / elapsed.as_micros().max(1) as f64
            }
            _ => 0.0,
        };
        let requests = server.upstream_requests.saturating_sub(before.upstream_requests);
        let failures = server.upstream_failures.saturating_sub(before.upstream_failures);
        let observation = Observation {
            elapsed,
            classes,
            queue_delay,
            queue_fill: f64::from(depth) / f64::from(self.backlog),
            memory_pressure: share(memory, self.pressure[1]),
            cpu_pressure: share(cpu, self.pressure[0]),
            // One failure of the only request is no overload.
            upstream_errors: failures as f64 / requests.max(MEANINGFUL_REQUESTS) as f64,
            stress: self.stress.level(memory_in_use(), queue_delay),
        };
        self.pressure = [cpu, memory];
        Ok(observation)
    }
}

fn limit_line((priority, limit): (u32, &Option<Profile>)) -> Option<String> {
    let limit = (*limit)?;
    Some(format!("priority {priority} may have {:.1}/s, {} at once", limit.rate_per_s(), limit.burst()))
}

/// How long the last that waits will have waited (Little's law). Where none was taken, as long as nobody was watched.
fn delay(depth: u32, taken: u64, elapsed: Duration) -> Option<Duration> {
    (depth > 0).then(|| elapsed.mul_f64(f64::from(depth) / taken.max(1) as f64))
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

/// Share of the memory in use: of the control group's or of one of its parents', if one is limited, otherwise of the
/// host's.
fn memory_in_use() -> Option<f64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    if let Some(share) = group_memory_in_use(Path::new("/sys/fs/cgroup"), &groups) {
        return Some(share);
    }
    let host = std::fs::read_to_string("/proc/meminfo").ok()?;
    Some(1.0 - field(&host, "MemAvailable:")? / field(&host, "MemTotal:")?)
}

/// Of the groups that `groups` tells of (cgroups(7)), of version 2 and mounted at `root`, the greatest share: whichever
/// reaches its limit first, memory is short. `None`: none is limited.
fn group_memory_in_use(root: &Path, groups: &str) -> Option<f64> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    // From a namespace of groups one outside of it is seen with `..`.
    let names: Vec<&str> = group.split('/').filter(|name| !matches!(*name, "" | "." | "..")).collect();
    (0..=names.len())
        .filter_map(|depth| limited_memory_in_use(&root.join(names[..depth].join("/"))))
        .max_by(f64::total_cmp)
}

fn limited_memory_in_use(group: &Path) -> Option<f64> {
    let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<f64>().ok();
    let (most, now) = (number("memory.max")?, number("memory.current")?);
    // What files were read into is given back when it is needed.
    let of_files = field(&read("memory.stat").unwrap_or_default(), "inactive_file").unwrap_or(0.0);
    Some((now - of_files).max(0.0) / most.max(1.0))
}

/// The number after a name in one of the kernel's tables.
fn field(text: &str, name: &str) -> Option<f64> {
    let words = text.lines().map(|line| line.split_ascii_whitespace());
    words.filter_map(|mut words| (words.next()? == name).then(|| words.next()?.parse().ok())?).next()
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
    fn memory_in_use_is_a_share_and_fields_are_found_by_name() {
        assert!(memory_in_use().is_some_and(|share| share > 0.0 && share < 1.0));
        let table = "MemTotal:  100 kB\nMemAvailable:  25 kB\n";
        assert_eq!((field(table, "MemAvailable:"), field(table, "Mem")), (Some(25.0), None));
    }

    #[test]
    fn memory_in_use_is_that_of_the_own_group_or_of_the_parent_that_is_fuller() {
        let root = std::env::temp_dir().join(format!("tidegate-memory-{}", std::process::id()));
        let service = root.join("system.slice/tidegate.service");
        std::fs::create_dir_all(&service).unwrap();
        let set = |group: &Path, file: &str, text: &str| std::fs::write(group.join(file), text).unwrap();
        let share = |group: &str| group_memory_in_use(&root, &format!("3:cpu:/other\n0::{group}\n"));
        // The root has no such files.
        let own = "/system.slice/tidegate.service";
        set(&service, "memory.max", "max\n");
        set(&service, "memory.current", "900\n");
        assert_eq!(share(own), None);
        set(&service, "memory.max", "1000\n");
        set(&service, "memory.stat", "anon 600\ninactive_file 300\n");
        assert_eq!((share(own), share("/"), share("/system.slice")), (Some(0.6), None, None));
        set(&root.join("system.slice"), "memory.max", "2000\n");
        set(&root.join("system.slice"), "memory.current", "1500\n");
        assert_eq!((share(own), share("/system.slice")), (Some(0.75), Some(0.75)));
        // The root of a namespace of groups may be limited.
        set(&root, "memory.max", "100\n");
        set(&root, "memory.current", "95\n");
        assert_eq!((share("/"), share("/../beside")), (Some(0.95), Some(0.95)));
        assert_eq!(group_memory_in_use(&root, "2:memory:/old\n"), None);
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_queue_takes_as_long_as_its_length_at_the_rate_at_which_it_is_taken_from() {
        let quarter = Duration::from_millis(250);
        assert_eq!(delay(0, 0, quarter), None);
        assert_eq!(delay(50, 100, quarter), Some(Duration::from_millis(125)));
        assert_eq!(delay(2, 0, quarter), Some(2 * quarter));
    }
}
