//! An isolated client and objects of many sizes (Trickles §6.1, Figure 10).

use super::trickles::{Bench, PAPER, RATE, ROUND_TRIP, plot, spread};
use crate::link::{Profile, Side, client_address};
use crate::plot::Point;
use crate::table::{Table, thousands};
use crate::transfer::{Carrier, block_on, fetch};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// Objects up to this size, which the first flight to an unproved address holds, must be faster than by TCP, larger
/// ones within 5 %.
const SMALL_BYTES: u64 = 4_000;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig10",
    paper: &PAPER,
    figure: "Figure 10",
    claim: "On an idle link objects up to 4 kB arrive sooner than by TCP, larger ones within 5 % of TCP's time",
    published: "Throughput of one client against the object's size: Trickles is faster below about 5 kB, since the \
                request travels in the first packet, and even with TCP above.",
    method: "A 100 Mbit/s link with 10 ms round trip and nobody else. Each transfer opens a connection of its own; its \
             time runs from there to the last byte. Carriers alternate. An address that has proved nothing is sent \
             three packets at most, which hold 4 kB; what is longer takes as many round trips as by TCP.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let sizes =
        lab.choose(vec![100, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000], vec![100, 100_000]);
    let rounds = lab.choose(21, 3);
    let bench = Bench::new(lab, &sizes, vec![Profile::clean(RATE, ROUND_TRIP)])?;
    let mut raw = Table::new(["bytes", "round", "carrier", "ms"]);
    let mut summary = Table::new(["bytes", "Trickles, ms", "TCP Reno, ms", "TCP's time by Trickles'"]);
    let mut series = Carrier::BOTH.map(|carrier| (carrier.label().to_owned(), Vec::new()));
    let mut checks = Vec::new();
    for (step, &bytes) in sizes.iter().enumerate() {
        lab.progress(step + 1, sizes.len(), &format!("{} bytes", thousands(bytes)));
        let server = bench.server.address();
        let times = bench.hosts.run(Side::Client, || {
            block_on(async {
                let mut times = Vec::new();
                for _ in 0..rounds {
                    let mut round = [0.0; 2];
                    for (ms, carrier) in round.iter_mut().zip(Carrier::BOTH) {
                        let time = fetch(carrier, &[server], client_address(0), bytes, |_| ()).await?;
                        *ms = time.as_secs_f64() * 1e3;
                    }
                    times.push(round);
                }
                Ok(times)
            })
        })?;
        for (round, both) in times.iter().enumerate() {
            for (ms, carrier) in both.iter().zip(Carrier::BOTH) {
                raw.row([
                    bytes.to_string(),
                    (round + 1).to_string(),
                    carrier.name().into(),
                    format!("{ms:.3}"),
                ]);
            }
        }
        let ours = spread(times.iter().map(|both| both[0]))?;
        let tcp = spread(times.iter().map(|both| both[1]))?;
        let ratio = spread(times.iter().map(|both| both[1] / both[0]))?;
        for (points, time) in series.iter_mut().zip([ours, tcp]) {
            points.1.push(Point { x: bytes as f64, y: time });
        }
        summary.row([thousands(bytes), ours.text(2), tcp.text(2), ratio.text(3)]);
        checks.push(Check {
            what: format!("TCP's time by Trickles' for {} bytes", thousands(bytes)),
            ratio: ratio.median,
            at_least: if bytes <= SMALL_BYTES { 1.0 } else { 0.95 },
        });
    }
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot("Time to fetch an object", ("bytes", true), "ms", series.into()))],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}
