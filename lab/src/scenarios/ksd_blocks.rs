//! A block list of a million addresses.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use tidegate_core::IpPrefix;
use tidegate_gate::{Gate, GateError, Mechanism, Options};

use super::ksd::{PAPER, text};
use crate::overload::{Template, Testbed, frame, rules};
use crate::plot::{Plot, Point, Series};
use crate::stats::Spread;
use crate::table::{Table, thousands};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const ENTRIES: u32 = 1_000_000;
const COLD_NS: f64 = 500.0;
const LOAD_S: f64 = 3.0;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "ksd-blocks",
    paper: &PAPER,
    figure: "Beyond the paper: a block list",
    claim: "1,000,000 addresses are loaded in 3 s, and a packet from one of them costs at most 0.5 µs when nothing of \
            it is in a cache",
    published: "Nothing: the paper has no block list; the bounds are ours.",
    method: "The kernel runs the program on frames from blocked addresses (BPF_PROG_TEST_RUN), each address once, in \
             an order in which no two share a cache line. A run by itself costs more than a run among many: what it \
             costs on one address again and again, one run each, is measured too, less what a run among many costs, \
             and is taken off.",
    run,
};

struct Measured {
    load_s: f64,
    hot_ns: f64,
    cold_ns: Vec<f64>,
    alone_ns: Vec<f64>,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bed = Testbed::new()?;
    let entries = lab.choose(ENTRIES, 20_000);
    let options = Options::default();
    let gate = bed.on_server(|| Gate::load(&rules(Vec::new(), Vec::new()), &options))?.map_err(failed)?;
    let address = |index: u32| Ipv4Addr::from(0x0b00_0000 + index.wrapping_mul(7919) % entries);
    let all: Vec<IpPrefix> =
        (0..entries).filter_map(|index| IpPrefix::new(address(index).into(), 32).ok()).collect();
    let begun = Instant::now();
    gate.blocks().add_many(&all, Some(Duration::from_secs(3600))).map_err(failed)?;
    let load_s = begun.elapsed().as_secs_f64();
    lab.progress(1, 3, &format!("{} addresses loaded in {load_s:.2} s", thousands(entries.into())));
    let once = |from: Ipv4Addr, repeat| -> Result<f64, Error> {
        let frame = frame(Template::Acknowledgement, from, 1);
        let trial = gate.try_frame(Mechanism::Xdp, &frame, repeat).map_err(failed)?;
        if trial.passed {
            Err(Error::Testbed(format!("{from} is not blocked")))
        } else {
            Ok(trial.mean.as_nanos() as f64)
        }
    };
    let hot_ns = once(address(5), lab.choose(300_000, 1000))?;
    let frames = lab.choose(20_000, 200);
    let rounds = lab.choose(5, 1);
    let mean = |from: &dyn Fn(u32) -> Ipv4Addr| -> Result<f64, Error> {
        Ok((0..frames).map(|index| once(from(index), 1)).sum::<Result<f64, _>>()? / f64::from(frames))
    };
    let mut measured = Measured { load_s, hot_ns, cold_ns: Vec::new(), alone_ns: Vec::new() };
    for round in 0..rounds {
        measured.alone_ns.push(mean(&|_| address(5))?);
        measured.cold_ns.push(mean(&|index| address(index.wrapping_mul(47) + round))?);
    }
    lab.progress(
        2,
        3,
        &format!("hot {hot_ns:.0} ns, one run {:?} ns, cold {:?} ns", measured.alone_ns, measured.cold_ns),
    );
    outcome(&measured, entries)
}

fn failed(error: GateError) -> Error {
    Error::Testbed(error.to_string())
}

fn outcome(measured: &Measured, entries: u32) -> Result<Outcome, Error> {
    let pairs = measured.cold_ns.iter().zip(&measured.alone_ns);
    let net = Spread::of(pairs.map(|(cold, alone)| cold - (alone - measured.hot_ns).max(0.0)));
    let (Some(net), Some(gross)) = (net, Spread::of(measured.cold_ns.clone())) else {
        return Err(Error::Nothing("the kernel"));
    };
    let checks = [
        Check {
            what: format!("bound to the cost of a cold packet ({:.0} ns)", net.median),
            ratio: COLD_NS / net.median,
            at_least: 1.0,
        },
        Check {
            what: format!(
                "3 s to the time to load {} addresses ({:.2} s)",
                thousands(entries.into()),
                measured.load_s
            ),
            ratio: LOAD_S / measured.load_s,
            at_least: 1.0,
        },
    ];
    let mut raw = Table::new(["round", "cold_ns", "same_address_run_by_run_ns", "hot_ns", "load_s"]);
    for (round, (cold, alone)) in measured.cold_ns.iter().zip(&measured.alone_ns).enumerate() {
        raw.row([
            (round + 1).to_string(),
            text(*cold),
            text(*alone),
            text(measured.hot_ns),
            format!("{:.3}", measured.load_s),
        ]);
    }
    let mut summary = Table::new(["", "ns a packet"]);
    summary.row(["in the cache, runs among many".into(), text(measured.hot_ns)]);
    summary.row(["each address once, with a run's own cost".into(), gross.text(0)]);
    summary.row(["each address once, without it".into(), net.text(0)]);
    let of = |name: &str, values: &[f64]| Series {
        name: name.into(),
        points: (1..).zip(values).map(|(round, value)| Point::exact(f64::from(round), *value)).collect(),
    };
    let plot = Plot {
        title: format!("A packet of one of {} blocked addresses", thousands(entries.into())),
        x: "round".into(),
        x_log: false,
        y: "ns a packet, with a run's own cost".into(),
        series: vec![of("each address once", &measured.cold_ns), of("one address", &measured.alone_ns)],
    };
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot)],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runs_own_cost_is_taken_off() {
        let holds = |cold, load_s| {
            let measured = Measured { load_s, hot_ns: 80.0, cold_ns: vec![cold], alone_ns: vec![280.0] };
            outcome(&measured, 1000).unwrap().verdict.holds
        };
        assert!(holds(700.0, 3.0) && !holds(701.0, 3.0) && !holds(600.0, 3.1));
    }
}
