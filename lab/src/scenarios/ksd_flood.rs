//! A flood of SYNs from a million addresses.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use std::net::Ipv4Addr;

use tidegate_policy::ConnectionRule;

use super::ksd::{PAPER, client, text, time};
use crate::overload::{
    Asked, Clients, Costs, Flood, Group, Guard, Pace, Sent, Server, Template, Testbed, by_source, load, only,
    rules,
};
use crate::plot::{Plot, Point, Series};
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const SOURCES: u32 = 1_000_000;
const FIRST: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
const PER_S: f64 = 200_000.0;
const GOOD: f64 = 400.0;
/// What clients that no rule names may open, together.
const STRANGERS: (f64, u32) = (1000.0, 200);
const WORKERS: usize = 8;
const COSTS: Costs =
    Costs { plain: Duration::from_millis(2), dynamic: Duration::from_millis(2), body_bytes: 8192 };
const AT_MOST: Duration = Duration::from_secs(30);
const PHASES: [&str; 4] = ["nothing", "the gate", "a flood and no gate", "a flood and the gate"];
/// What the kernel may need more, in MB: noise of a machine that does other things as well.
const GROWTH_MB: f64 = 16.0;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "ksd-flood",
    paper: &PAPER,
    figure: "Beyond the paper: a SYN flood",
    claim: "While SYNs come from 1,000,000 addresses, 200,000/s or what the machine sends, good clients keep at least \
            90 % of their throughput and the kernel's memory does not grow",
    published: "Nothing: the paper's clients have few addresses; the bounds are ours.",
    method: "Good clients open 400 connections/s whatever comes back and give up after a second; a rule lets their \
             network in, another gives all strangers together 1,000 connections/s. A raw socket sends SYNs from \
             1,000,000 addresses in turn, sharing a core with the good clients. The kernel's memory is its slab, \
             per-CPU and page-table memory; 16 MB more count as none. Without the gate the kernel answers with SYN \
             cookies.",
    run,
};

struct Phase {
    good: Asked,
    sent: Sent,
    /// Of the kernel, before and after, in MB.
    memory_mb: (f64, f64),
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bed = Testbed::new()?;
    let time = time(lab, 500, 4000, 400);
    let per_s = lab.choose(PER_S, PER_S / 10.0);
    let _server = Server::start(&bed, bed.address(), WORKERS, COSTS)?;
    let strangers = ConnectionRule { source: None, ..by_source(0, only(STRANGERS.0, STRANGERS.1), None) };
    let set = rules(vec![by_source(1, None, None), strangers], Vec::new());
    let mut phases = Vec::new();
    for (number, name) in PHASES.iter().enumerate() {
        let _guard = (number % 2 == 1).then(|| Guard::attach(&bed, &set)).transpose()?;
        let phase = measure(&bed, if number < 2 { 0.0 } else { per_s }, time)?;
        lab.progress(
            number + 1,
            PHASES.len(),
            &format!(
                "{name}: good {:.0}/s {:.1} ms, {:.0} SYNs/s, memory {:.1} -> {:.1} MB",
                phase.good.rate(),
                phase.good.median_ms(),
                phase.sent.rate(),
                phase.memory_mb.0,
                phase.memory_mb.1
            ),
        );
        phases.push(phase);
    }
    outcome(&phases)
}

fn measure(bed: &Testbed, per_s: f64, time: Clients) -> Result<Phase, Error> {
    let patience = Duration::from_secs(1);
    let good =
        Group { from: client(1, 1), clients: 100, path: "/object", pace: Pace::PerSecond(GOOD), patience };
    let flood = Flood { template: Template::Syn, first: FIRST, sources: SOURCES, per_s };
    let end = AtomicBool::new(false);
    let before = kernel_mb()?;
    let (good, sent) = std::thread::scope(|scope| {
        let flood =
            scope.spawn(|| if per_s > 0.0 { flood.run(bed, &end, AT_MOST) } else { Ok(Sent::default()) });
        let asked = load(bed, bed.address(), &[good], time);
        end.store(true, Ordering::Relaxed);
        let sent = flood.join().map_err(|_| Error::Testbed("a sender panicked".into()))??;
        Ok::<_, Error>((asked?.remove(0), sent))
    })?;
    Ok(Phase { good, sent, memory_mb: (before, kernel_mb()?) })
}

/// What the kernel uses for itself.
fn kernel_mb() -> Result<f64, Error> {
    let path = std::path::Path::new("/proc/meminfo");
    let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
    let number = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0.0)
    };
    Ok(["SUnreclaim:", "Percpu:", "PageTables:"].iter().map(|name| number(name)).sum::<f64>() / 1024.0)
}

fn outcome(phases: &[Phase]) -> Result<Outcome, Error> {
    let [alone, _, bare, guarded] = phases else { return Err(Error::Nothing("the load")) };
    let (raw, summary) = tables(phases);
    let note = format!(
        "{:.0} SYNs/s were sent; without the gate good clients keep {:.0} % at {:.0} SYNs/s",
        guarded.sent.rate(),
        bare.good.rate() / alone.good.rate() * 100.0,
        bare.sent.rate()
    );
    let plot = Plot {
        title: "SYNs from 1,000,000 addresses".into(),
        x: "seconds".into(),
        x_log: false,
        y: "good requests answered/s".into(),
        series: PHASES.iter().zip(phases).map(|(name, phase)| curve(name, phase)).collect(),
    };
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot)],
        verdict: Verdict::of(&checks(alone, guarded)).noting(&note),
        servers: Vec::new(),
    })
}

/// That with the gate good clients keep their throughput in a flood, and the kernel its memory.
fn checks(alone: &Phase, guarded: &Phase) -> [Check; 2] {
    let grown = guarded.memory_mb.1 - guarded.memory_mb.0;
    [
        Check {
            what: "good clients' throughput in the flood to that without".into(),
            ratio: guarded.good.rate() / alone.good.rate(),
            at_least: 0.9,
        },
        Check {
            what: format!("16 MB to the growth of the kernel's memory in the flood ({grown:.1} MB)"),
            ratio: GROWTH_MB / grown.max(1.0),
            at_least: 1.0,
        },
    ]
}

fn tables(phases: &[Phase]) -> (Table, Table) {
    let mut raw = Table::new([
        "phase",
        "syns_per_s",
        "good_per_s",
        "good_median_ms",
        "memory_before_mb",
        "memory_after_mb",
    ]);
    let mut summary = Table::new(["with", "SYNs/s", "good/s", "good median ms", "kernel's memory MB"]);
    for (name, phase) in PHASES.iter().zip(phases) {
        let (before, after) = phase.memory_mb;
        let median = text(phase.good.median_ms());
        raw.row([
            (*name).into(),
            text(phase.sent.rate()),
            text(phase.good.rate()),
            median.clone(),
            text(before),
            text(after),
        ]);
        let sent = if phase.sent.packets > 0 { format!("{:.0}", phase.sent.rate()) } else { String::new() };
        summary.row([
            (*name).into(),
            sent,
            text(phase.good.rate()),
            median,
            format!("{before:.0} → {after:.0}"),
        ]);
    }
    (raw, summary)
}

/// Good requests answered in each second of a phase.
fn curve(name: &str, phase: &Phase) -> Series {
    let second = |second: u32| {
        let within = phase
            .good
            .answered_at_s
            .iter()
            .filter(|at| (f64::from(second)..f64::from(second) + 1.0).contains(*at));
        Point::exact(f64::from(second), within.count() as f64)
    };
    Series { name: name.into(), points: (0..phase.good.seconds.ceil() as u32).map(second).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_and_memory_both_count() {
        let phase = |good, memory_mb| Phase {
            good: Asked { answered: good, seconds: 1.0, answered_at_s: vec![0.5], ..Asked::default() },
            sent: Sent { packets: 1, seconds: 1.0 },
            memory_mb,
        };
        let holds = |good, after| {
            let calm = || phase(400, (100.0, 100.0));
            outcome(&[calm(), calm(), phase(100, (100.0, 120.0)), phase(good, (100.0, after))])
                .unwrap()
                .verdict
                .holds
        };
        assert!(holds(370, 101.0) && !holds(350, 101.0) && !holds(370, 130.0));
        assert!(outcome(&[]).is_err());
    }

    #[test]
    fn the_kernel_tells_its_memory() {
        assert!(kernel_mb().unwrap() > 1.0);
    }
}
