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
/// Round trips whose throughput is plotted.
const PLOTTED_MS: [u64; 2] = [10, 100];
/// Of 1,000,000 packets, in each direction.
const LOSSES_PPM: [u32; 4] = [0, 1_000, 10_000, 50_000];
/// Each flow has a link of its own; all of them at once must not fill the machine.
const LINK_RATE: u64 = 10_000_000;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig15",
    paper: &PAPER,
    figure: "Figure 15",
    claim: "10,000 seeded transfers over links with round trips of 10 to 400 ms and losses up to 5 % in both \
            directions end with every byte right",
    published: "Throughput against the loss rate: Trickles and TCP Reno fall alike.",
    method: "The seeded transfers run through client and server in virtual time, with reordering and duplication \
             besides; a tenth as many each with bursts of losses (Gilbert and Elliott), 20 % lost on one of the ways \
             only, one packet in ten late by up to a round trip, a third duplicated, blackouts of 3 s, and most of \
             this at once. A transfer hangs that takes longer than its path explains with a window of one packet: a \
             round trip for each packet, a timeout for each that is lost or whose acknowledgement is, which doubles \
             where it is lost again, and once as many timeouts in a row as one exchange in a million has; a blackout \
             counts three times. The throughput beside it is measured on emulated links of 10 Mbit/s, one for each \
             flow, three flows of each kind for each round trip and loss rate, all at once.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let seeds = lab.choose(10_000, 100);
    lab.progress(1, 3, &format!("{} transfers in virtual time", thousands(seeds)));
    let mut uniform = Transfers::default();
    for seed in 0..seeds {
        uniform.add(transfer(seed), format_args!("seed {seed}"));
    }
    lab.progress(2, 3, "transfers over links that lose, repeat and reorder in other ways");
    let mut others = Transfers::default();
    for (pattern, name) in Pattern::OTHERS {
        for seed in 0..seeds / 10 {
            others.add(transfer_in(pattern, seed), format_args!("{name}, seed {seed}"));
        }
    }
    lab.progress(3, 3, "throughput on emulated links");
    let links: Vec<(u64, u32)> =
        ROUND_TRIPS_MS.iter().flat_map(|trip| LOSSES_PPM.iter().map(move |loss| (*trip, *loss))).collect();
    let links = if lab.quick { &links[..4] } else { &links };
    let rates = throughput(lab, links, lab.choose(3, 1))?;
    let (raw, summary) = tables(&rates);
    let title = "Throughput of a flow on a link with losses";
    let plot = plot(title, ("loss each way, %", false), "Mbit/s", series(&rates));
    let verdict = verdict(&uniform, &others, &rates);
    Ok(Outcome { raw, summary, plots: vec![(None, plot)], verdict, servers: Vec::new() })
}

/// What came of transfers in virtual time.
#[derive(Default)]
struct Transfers {
    right: u64,
    all: u64,
    /// The first that did not end right, and why.
    first_wrong: Option<String>,
    longest: Took,
    /// The greatest part of the time allowed that one of them needed.
    tightest: f64,
}

impl Transfers {
    fn add(&mut self, transfer: Result<Took, String>, name: std::fmt::Arguments<'_>) {
        self.all += 1;
        match transfer {
            Ok(took) => {
                self.right += 1;
                self.longest = self.longest.max(took);
                self.tightest = self.tightest.max(took.share());
            }
            Err(error) => {
                self.first_wrong.get_or_insert_with(|| format!("{name}: {error}"));
            }
        }
    }

    fn check(&self, what: String) -> Check {
        Check { what, ratio: self.right as f64 / self.all as f64, at_least: 1.0 }
    }
}

fn verdict(uniform: &Transfers, others: &Transfers, rates: &[Rates]) -> Verdict {
    let checks = [
        uniform
            .check(format!("share of {} transfers that ended with every byte right", thousands(uniform.all))),
        others.check(format!("the same of {} over links of other kinds", thousands(others.all))),
    ];
    let first_wrong = uniform.first_wrong.as_ref().or(others.first_wrong.as_ref());
    let longest = uniform.longest.max(others.longest);
    let tightest = uniform.tightest.max(others.tightest);
    let least = rates.iter().map(Rates::ratio).fold(f64::INFINITY, f64::min);
    let note = format!(
        "the longest transfer took {:.0} s of {:.0} s allowed, the slowest for its path {tightest:.2} of its time; \
         throughput to TCP Reno's: at least {least:.2}",
        longest.time.as_secs_f64(),
        longest.most.as_secs_f64(),
    );
    Verdict::of(&checks).noting(first_wrong.map_or("", String::as_str)).noting(&note)
}

/// Mbit/s of the flows of each carrier, on links of one round trip and loss rate.
struct Rates {
    trip_ms: u64,
    loss_ppm: u32,
    of: [Vec<f64>; 2],
}

impl Rates {
    fn loss_percent(&self) -> f64 {
        f64::from(self.loss_ppm) / 1e4
    }

    fn means(&self) -> [f64; 2] {
        self.of.each_ref().map(|flows| flows.iter().sum::<f64>() / flows.len() as f64)
    }

    /// Trickles' to TCP's.
    fn ratio(&self) -> f64 {
        let [trickles, tcp] = self.means();
        trickles / tcp
    }
}

/// Every flow, and the means with their ratio.
fn tables(rates: &[Rates]) -> (Table, Table) {
    let mut raw = Table::new(["round_trip_ms", "loss_ppm", "carrier", "flow", "mbit_per_s"]);
    let mut summary = Table::new([
        "round trip, ms",
        "loss each way, %",
        "Trickles, Mbit/s",
        "TCP Reno, Mbit/s",
        "Trickles to TCP",
    ]);
    for link in rates {
        for (carrier, flows) in Carrier::BOTH.into_iter().zip(&link.of) {
            for (flow, rate) in flows.iter().enumerate() {
                raw.row([
                    link.trip_ms.to_string(),
                    link.loss_ppm.to_string(),
                    carrier.name().into(),
                    (flow + 1).to_string(),
                    format!("{rate:.3}"),
                ]);
            }
        }
        let [trickles, tcp] = link.means();
        summary.row([
            link.trip_ms.to_string(),
            format!("{:.1}", link.loss_percent()),
            format!("{trickles:.2}"),
            format!("{tcp:.2}"),
            format!("{:.2}", link.ratio()),
        ]);
    }
    (raw, summary)
}

/// A line for each carrier at some of the round trips.
fn series(rates: &[Rates]) -> Vec<(String, Vec<Point>)> {
    let mut series = Vec::new();
    for trip_ms in PLOTTED_MS {
        for (index, carrier) in Carrier::BOTH.into_iter().enumerate() {
            let links = rates.iter().filter(|link| link.trip_ms == trip_ms);
            let points = links.map(|link| Point::exact(link.loss_percent(), link.means()[index]));
            series.push((format!("{}, {trip_ms} ms", carrier.label()), points.collect::<Vec<_>>()));
        }
    }
    series.retain(|(_, points)| !points.is_empty());
    series
}

/// The throughput of so many flows of each carrier on each of the links, all at once.
fn throughput(lab: &Lab, links: &[(u64, u32)], flows_each: usize) -> Result<Vec<Rates>, Error> {
    let mut profiles = Vec::new();
    for &(trip_ms, loss_ppm) in links {
        let profile = Profile { loss_ppm, ..Profile::clean(LINK_RATE, Duration::from_millis(trip_ms)) };
        profiles.extend(vec![profile; 2 * flows_each]);
    }
    let bench = Bench::new(lab, &[OBJECT_BYTES], profiles)?;
    let server = bench.server.address();
    let flows: Vec<Flows> = (0..links.len() * 2)
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
    let of_link = |(link, &(trip_ms, loss_ppm)): (usize, &(u64, u32))| Rates {
        trip_ms,
        loss_ppm,
        of: [rates(2 * link), rates(2 * link + 1)],
    };
    Ok(links.iter().enumerate().map(of_link).collect())
}
