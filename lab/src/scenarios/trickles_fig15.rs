//! Round trips and losses (Trickles §6.1, Figure 15).

use std::time::Duration;

use super::trickles::{Bench, PAPER, mbit_per_s, plot};
use super::trickles_simulation::{Pattern, Took, transfer, transfer_in};
use crate::link::{Profile, Side, client_address};
use crate::plot::Point;
use crate::table::{Table, thousands};
use crate::transfer::{Carrier, Flows, load};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const OBJECT_BYTES: u64 = 50_000_000;
const ROUND_TRIPS_MS: [u64; 5] = [10, 50, 100, 200, 400];
/// Of 1,000,000 packets, in each direction.
const LOSSES_PPM: [u32; 4] = [0, 1_000, 10_000, 50_000];
/// Each flow has a link of its own; all of them at once must not fill the machine.
const LINK_RATE: u64 = 10_000_000;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig15",
    paper: &PAPER,
    figure: "Figure 15",
    claim: "10,000 seeded transfers over links with round trips of 10 to 400 ms and losses up to 5 % in both directions end with every byte right",
    published: "Throughput against the loss rate: Trickles and TCP Reno fall alike.",
    method: "The seeded transfers run through client and server in virtual time, with reordering and duplication besides; \
             a tenth as many each with bursts of losses (Gilbert and Elliott), 20 % lost on one of the ways only, one packet in \
             ten late by up to a round trip, a third duplicated, blackouts of 3 s, and most of this at once. \
             A transfer hangs that takes longer than its path explains with a window of one packet: a round trip for each packet, \
             a timeout for each that is lost or whose acknowledgement is, which doubles where it is lost again, and once as many \
             timeouts in a row as one exchange in a million has; a blackout counts three times. \
             The throughput beside it is measured on emulated links of 10 Mbit/s, one for each flow, three flows of each kind \
             for each round trip and loss rate, all at once.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let seeds = lab.choose(10_000, 100);
    lab.progress(1, 3, &format!("{} transfers in virtual time", thousands(seeds)));
    let mut right = 0_u64;
    let mut first_wrong = String::new();
    let (mut longest, mut tightest) = (Took::default(), 0.0_f64);
    for seed in 0..seeds {
        match transfer(seed) {
            Ok(took) => {
                right += 1;
                longest = longest.max(took);
                tightest = tightest.max(took.share());
            }
            Err(error) if first_wrong.is_empty() => first_wrong = format!("seed {seed}: {error}"),
            Err(_) => {}
        }
    }
    let (patterns, each) = (Pattern::OTHERS, seeds / 10);
    lab.progress(2, 3, "transfers over links that lose, repeat and reorder in other ways");
    let mut patterns_right = 0_u64;
    for (pattern, name) in patterns {
        for seed in 0..each {
            match transfer_in(pattern, seed) {
                Ok(took) => {
                    patterns_right += 1;
                    longest = longest.max(took);
                    tightest = tightest.max(took.share());
                }
                Err(error) if first_wrong.is_empty() => first_wrong = format!("{name}, seed {seed}: {error}"),
                Err(_) => {}
            }
        }
    }
    let all_patterns = each * patterns.len() as u64;
    lab.progress(3, 3, "throughput on emulated links");
    let (mut raw, mut summary) = (
        Table::new(["round_trip_ms", "loss_ppm", "carrier", "flow", "mbit_per_s"]),
        Table::new([
            "round trip, ms",
            "loss each way, %",
            "Trickles, Mbit/s",
            "TCP Reno, Mbit/s",
            "Trickles to TCP",
        ]),
    );
    let flows_each = lab.choose(3, 1);
    let cells: Vec<(u64, u32)> =
        ROUND_TRIPS_MS.iter().flat_map(|trip| LOSSES_PPM.iter().map(move |loss| (*trip, *loss))).collect();
    let cells = if lab.quick { cells[..4].to_vec() } else { cells };
    let rates = throughput(lab, &cells, flows_each)?;
    let mut least = f64::INFINITY;
    let mut series: Vec<(String, Vec<Point>)> = Vec::new();
    for (&(trip, loss), both) in cells.iter().zip(&rates) {
        let mean = both.each_ref().map(|flows| flows.iter().sum::<f64>() / flows.len() as f64);
        for (carrier, flows) in Carrier::BOTH.into_iter().zip(both) {
            for (flow, rate) in flows.iter().enumerate() {
                raw.row([
                    trip.to_string(),
                    loss.to_string(),
                    carrier.name().into(),
                    (flow + 1).to_string(),
                    format!("{rate:.3}"),
                ]);
            }
        }
        let ratio = mean[0] / mean[1];
        least = least.min(ratio);
        summary.row([
            trip.to_string(),
            format!("{:.1}", f64::from(loss) / 1e4),
            format!("{:.2}", mean[0]),
            format!("{:.2}", mean[1]),
            format!("{ratio:.2}"),
        ]);
        for (carrier, rate) in Carrier::BOTH.into_iter().zip(mean) {
            if trip == 10 || trip == 100 {
                let name = format!("{}, {trip} ms", carrier.label());
                let index = series.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
                    series.push((name, Vec::new()));
                    series.len() - 1
                });
                series[index].1.push(Point::exact(f64::from(loss) / 1e4, rate));
            }
        }
    }
    let check =
        |what: String, right: u64, of: u64| Check { what, ratio: right as f64 / of as f64, at_least: 1.0 };
    let checks = [
        check(
            format!("share of {} transfers that ended with every byte right", thousands(seeds)),
            right,
            seeds,
        ),
        check(
            format!("the same of {} over links of other kinds", thousands(all_patterns)),
            patterns_right,
            all_patterns,
        ),
    ];
    let note = format!(
        "the longest transfer took {:.0} s of {:.0} s allowed, the slowest for its path {tightest:.2} of its time; throughput to TCP \
         Reno's: at least {least:.2}",
        longest.time.as_secs_f64(),
        longest.most.as_secs_f64(),
    );
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(
            None,
            plot("Throughput of a flow on a link with losses", ("loss each way, %", false), "Mbit/s", series),
        )],
        verdict: Verdict::of(&checks).noting(&first_wrong).noting(&note),
        servers: Vec::new(),
    })
}

/// Mbit/s of each flow, by cell and carrier.
fn throughput(lab: &Lab, cells: &[(u64, u32)], flows_each: usize) -> Result<Vec<[Vec<f64>; 2]>, Error> {
    let mut profiles = Vec::new();
    for &(trip, loss_ppm) in cells {
        let profile = Profile { loss_ppm, ..Profile::clean(LINK_RATE, Duration::from_millis(trip)) };
        profiles.extend(vec![profile; 2 * flows_each]);
    }
    let bench = Bench::new(lab, &[OBJECT_BYTES], profiles)?;
    let server = bench.server.address();
    let flows: Vec<Flows> = (0..cells.len() * 2)
        .map(|kind| Flows {
            carrier: Carrier::BOTH[kind % 2],
            server,
            bytes: OBJECT_BYTES,
            from: (0..flows_each).map(|flow| client_address(kind * flows_each + flow)).collect(),
        })
        .collect();
    let (warm_up, time) = lab.choose((2, 20), (0, 2));
    let (warm_up, time) = (Duration::from_secs(warm_up), Duration::from_secs(time));
    let received = bench.hosts.run(Side::Client, || load(&flows, warm_up, time))?;
    let rates = |index: usize| {
        let bytes = received.get(index).map(|of| of.bytes.clone()).unwrap_or_default();
        bytes.into_iter().map(|bytes| mbit_per_s(bytes, time)).collect::<Vec<_>>()
    };
    Ok((0..cells.len()).map(|cell| [rates(2 * cell), rates(2 * cell + 1)]).collect())
}
