//! Trickles and TCP Reno on one link (Trickles §6.1, Figure 13).

use std::time::Duration;

use super::trickles::{Bench, PAPER, RATE, mbit_per_s, plot, spread};
use crate::link::{Profile, Side, client_address};
use crate::plot::Point;
use crate::table::Table;
use crate::transfer::{Carrier, Flows, load};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// Long enough that flows do not end meanwhile.
const OBJECT_BYTES: u64 = 200_000_000;
/// What packets wait by chance, of a round trip of 20 ms. A server in user space answers one request after the other, and what it
/// sends comes to a full queue spaced out, where the kernel sends at the moment of each acknowledgement and loses more. A
/// packet's time is too short a wait to hide that (decision 14).
const CHANCE_WAIT: Duration = Duration::from_millis(1);
/// Flows of each kind, and milliseconds before and of the measurement: few flows halve their windows seldom.
const STEPS: [(usize, u64, u64); 4] =
    [(1, 2_000, 13_000), (10, 1_500, 3_500), (50, 1_500, 3_000), (100, 1_500, 3_000)];

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig13",
    paper: &PAPER,
    figure: "Figure 13",
    claim: "Beside as many TCP Reno flows a Trickles flow gets within 10 % of what a TCP flow gets",
    published: "Throughput of Trickles flows beside TCP flows at one bottleneck: they share it about equally.",
    method: "A 100 Mbit/s link with 20 ms round trip, shared by as many flows of the one kind as of the other. What the flows \
             of a kind get is summed up and compared; packets of Trickles hold less content, \
             0.97 of TCP's, and Reno counts packets. A flow loses a few times a second, so that short runs say little of few flows. On either way \
             every packet waits by chance for up to 1 ms, in order within its flow: a server in user space spaces its packets out, \
             and where a full queue drops what comes at one moment that alone is worth a fifth of the rate (decision 14).",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let steps = lab.choose(STEPS.to_vec(), vec![(2, 500, 1_000)]);
    let rounds = lab.choose(2, 1);
    let profile = Profile { chance_wait: CHANCE_WAIT, ..Profile::clean(RATE, Duration::from_millis(20)) };
    let bench = Bench::new(lab, &[OBJECT_BYTES], vec![profile])?;
    let mut raw = Table::new(["flows_of_each", "round", "carrier", "mbit_per_s"]);
    let mut summary =
        Table::new(["flows of each kind", "Trickles, Mbit/s", "TCP Reno, Mbit/s", "Trickles to TCP"]);
    let mut series = Carrier::BOTH.map(|carrier| (carrier.label().to_owned(), Vec::new()));
    let mut checks = Vec::new();
    for (step, &(count, warm_up, time)) in steps.iter().enumerate() {
        let (warm_up, time) = (Duration::from_millis(warm_up), Duration::from_millis(time));
        lab.progress(step + 1, steps.len(), &format!("{count} flows of each kind"));
        let mut rates = [Vec::new(), Vec::new()];
        for round in 0..rounds {
            let server = bench.server.address();
            let flows = Carrier::BOTH.map(|carrier| Flows {
                carrier,
                server,
                bytes: OBJECT_BYTES,
                from: vec![client_address(0); count],
            });
            let received = bench.hosts.run(Side::Client, || load(&flows, warm_up, time))?;
            for (index, (of, carrier)) in received.iter().zip(Carrier::BOTH).enumerate() {
                let rate = mbit_per_s(of.bytes.iter().sum(), time);
                rates[index].push(rate);
                raw.row([
                    count.to_string(),
                    (round + 1).to_string(),
                    carrier.name().into(),
                    format!("{rate:.2}"),
                ]);
            }
        }
        let ratio = spread(rates[0].iter().zip(&rates[1]).map(|(ours, tcp)| ours / tcp))?;
        let [ours, tcp] = [spread(rates[0].clone())?, spread(rates[1].clone())?];
        for (points, rate) in series.iter_mut().zip([ours, tcp]) {
            points.1.push(Point { x: count as f64, y: rate });
        }
        summary.row([count.to_string(), ours.text(1), tcp.text(1), ratio.text(3)]);
        let both_ways = ratio.median.min(1.0 / ratio.median);
        checks.push(Check {
            what: format!("share of the less fortunate kind with {count} flows of each"),
            ratio: both_ways,
            at_least: 0.9,
        });
    }
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(
            None,
            plot("Flows of both kinds at one link", ("flows of each kind", true), "Mbit/s", series.into()),
        )],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}
