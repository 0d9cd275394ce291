//! What the defence itself costs: processor time on a cached hit, and memory under very many addresses.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use tidegate_core::hooks::{ChainSource, Field, Fields, Peer, RequestView, Via};
use tidegate_defence::{Defence, Settings};

use super::defence::PAPER;
use super::sweep::Sweep;
use crate::plot::{Plot, Point, Series};
use crate::server::{Kind, short_request};
use crate::table::{Table, thousands};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const MOST_OVERHEAD: f64 = 0.1;
/// Bytes of the cached object.
const OBJECT_BYTES: usize = 1024;
const ADDRESSES: u32 = 1_000_000;
/// Points of the curve of memory.
const POINTS: u32 = 50;

pub(super) const OVERHEAD: Scenario = Scenario {
    name: "defence-overhead",
    paper: &PAPER,
    figure: "Overhead",
    claim: "All default classifiers together cost at most 10 % of the requests per CPU-second of a cached hit",
    published: "Tempesta §4.3 and §4.6 have classification in the way of every request; the paper does not say what \
                it costs.",
    method: "tidegate with its default classifiers and with `[defence] enabled = false`, in turn, on the same object \
             of 1 KiB from the cache. The load is exempt from what the defence decides, which still counts and judges \
             every request.",
    run: overhead,
};

pub(super) const MEMORY: Scenario = Scenario {
    name: "defence-memory",
    paper: &PAPER,
    figure: "Memory",
    claim: "Under 1,000,000 distinct attacking addresses the defence keeps to its configured memory of 256 MiB",
    published: "Tempesta §4.8 bounds its dynamic rules and evicts those hit least.",
    method: "In process: each of 1,000,000 addresses connects, makes a request and goes, once with neighbouring \
             addresses and once with addresses spread over all of IPv4, where each needs nodes for the networks around \
             it too. What counts is the growth of the process's anonymous memory.",
    run: memory,
};

fn overhead(lab: &Lab) -> Result<Outcome, Error> {
    let connections = [32, 512];
    let sweep = Sweep {
        kinds: &[Kind::Undefended, Kind::Tidegate],
        size_bytes: OBJECT_BYTES,
        request: short_request,
        connections: &connections,
        // Many and short, in turn: a machine's speed changes from second to second by more than what is measured.
        rounds: lab.choose(20, 2),
        time: Duration::from_secs(1),
    };
    let samples = sweep.run(lab)?;
    let checks = connections
        .iter()
        .map(|&connections| {
            let ratio = samples.efficiency(Kind::Tidegate, Kind::Undefended, connections);
            Ok(Check {
                what: format!(
                    "requests per CPU-second to those without defence at {connections} connections"
                ),
                ratio: ratio.ok_or(Error::Nothing("the load"))?.median,
                at_least: 1.0 - MOST_OVERHEAD,
            })
        })
        .collect::<Result<Vec<Check>, Error>>()?;
    Ok(Outcome {
        raw: samples.raw(),
        summary: samples.summary(Kind::Undefended),
        plots: vec![(
            None,
            samples.plot("What the classifiers cost on a cached hit", "CPU µs/request", |sample| {
                sample.cpu_us_per_request
            }),
        )],
        verdict: Verdict::of(&checks),
        servers: samples.servers,
    })
}

struct NoFields;

impl Fields for NoFields {
    fn get(&self, _: Field) -> Option<&[u8]> {
        None
    }
}

fn memory(lab: &Lab) -> Result<Outcome, Error> {
    let bound = Settings::default().memory_bytes as f64;
    let mut raw = Table::new(["addresses_are", "addresses", "anonymous_bytes"]);
    let mut summary =
        Table::new(["addresses", "MiB at the end", "MiB at most", "addresses known at the end"]);
    let mut checks = Vec::new();
    let mut series = Vec::new();
    type Way = (&'static str, fn(u32) -> u32);
    let ways: [Way; 2] = [
        ("neighbours", |index| 0x0a00_0000 + index),
        // An odd factor leaves no address out and names none twice.
        ("spread over all of IPv4", |index| index.wrapping_mul(0x9e37_79b1)),
    ];
    for (step, (name, address)) in ways.into_iter().enumerate() {
        let (curve, known) = fill(address)?;
        let greatest = curve.iter().map(|(_, bytes)| *bytes).fold(0.0, f64::max);
        let last = curve.last().map_or(f64::NAN, |(_, bytes)| *bytes);
        let mib = |bytes: f64| format!("{:.1}", bytes / f64::from(1 << 20));
        curve.iter().for_each(|(count, bytes)| {
            raw.row([name.to_owned(), count.to_string(), format!("{bytes:.0}")]);
        });
        summary.row([name.to_owned(), mib(last), mib(greatest), thousands(known)]);
        let what = format!("configured memory to that used, addresses: {name}");
        checks.push(Check { what, ratio: bound / greatest, at_least: 1.0 });
        let points =
            curve.iter().map(|(count, bytes)| Point::exact(f64::from(*count), bytes / f64::from(1 << 20)));
        series.push(Series { name: name.to_owned(), points: points.collect() });
        lab.progress(step + 1, ways.len(), &format!("{name}: {} MiB at most", mib(greatest)));
    }
    let plot = Plot {
        title: "Memory of the defence".to_owned(),
        x: "distinct addresses".to_owned(),
        x_log: false,
        y: "MiB".to_owned(),
        series,
    };
    let verdict = Verdict::of(&checks);
    Ok(Outcome { raw, summary, plots: vec![(None, plot)], verdict, servers: Vec::new() })
}

/// How much memory the defence takes after so many addresses, and how many of them it knows at the end.
fn fill(address: fn(u32) -> u32) -> Result<(Vec<(u32, f64)>, u64), Error> {
    let before = anonymous_bytes()?;
    let defence = Defence::new(Settings::default(), 1, [1; 32]);
    let chain = defence.chain(0, 1);
    let request = RequestView {
        method: b"GET",
        path: b"/",
        reading: None,
        query: None,
        has_body: false,
        fields: &NoFields,
    };
    let mut curve = Vec::new();
    for index in 0..ADDRESSES {
        let peer = Peer { address: IpAddr::V4(Ipv4Addr::from(address(index))), via: Via::Direct };
        let now_ms = u64::from(index) / 50;
        let (client, _) = chain.connect(peer, now_ms);
        let _ = chain.request(client, peer, &request, now_ms);
        chain.close(client, peer, now_ms);
        if (index + 1) % (ADDRESSES / POINTS) == 0 {
            curve.push((index + 1, anonymous_bytes()? - before));
        }
    }
    let known = |index: &u32| {
        chain.with_tree(|tree| tree.find(IpAddr::V4(Ipv4Addr::from(address(*index)))).is_some())
    };
    Ok((curve, (0..ADDRESSES).filter(known).count() as u64))
}

/// Of this process (proc_pid_status(5), RssAnon).
fn anonymous_bytes() -> Result<f64, Error> {
    let path = std::path::Path::new("/proc/self/status");
    let status = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    Ok(kibibytes.ok_or(Error::Nothing("/proc/self/status"))? * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_this_process_is_told() {
        let before = anonymous_bytes().unwrap();
        let filled = std::hint::black_box(vec![1u8; 64 << 20]);
        assert!(anonymous_bytes().unwrap() - before > 32e6);
        drop(filled);
    }
}
