//! Trickles and TCP Reno on one link (Trickles §6.1, Figure 13).

use std::net::IpAddr;
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
/// Packets in whose time on the link each waits by chance: 1 ms of a round trip of 20 ms on the whole link. A server in
/// user space answers one request after the other, and what it sends comes to a full queue spaced out, where the kernel
/// sends at the moment of each acknowledgement and loses more. A packet's time is too short a wait to hide that
/// (decision 14).
const CHANCE_WAIT_PACKETS: u32 = 8;
/// Round trip without queues.
const ROUND_TRIP: Duration = Duration::from_millis(20);
/// Two flows alone on the whole link halve their windows every few seconds, and seconds of one pair say nothing. So
/// there are this many pairs, each on a link of its own.
const PAIRS: usize = 8;
/// The rate of those links, of the whole one's.
const PAIR_SHARE: u64 = 4;

/// How one number of flows is measured.
#[derive(Clone, Copy)]
struct Step {
    /// Flows of each kind on a link.
    flows: usize,
    warm_up_ms: u64,
    time_ms: u64,
}

impl Step {
    const fn new(flows: usize, warm_up_ms: u64, time_ms: u64) -> Self {
        Self { flows, warm_up_ms, time_ms }
    }

    /// The clients of each kind: their links are numbered as they are. The last link is the whole one.
    fn clients(self) -> Vec<IpAddr> {
        match self.flows {
            1 => (0..PAIRS).map(client_address).collect(),
            flows => vec![client_address(PAIRS); flows],
        }
    }
}

/// A hundred flows of each kind begin with two thousand packets at once, of which the link holds three hundred.
const STEPS: [Step; 4] = [
    Step::new(1, 1_500, 24_000),
    Step::new(10, 1_500, 6_000),
    Step::new(50, 2_500, 8_000),
    Step::new(100, 6_000, 10_000),
];

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig13",
    paper: &PAPER,
    figure: "Figure 13",
    claim: "Beside as many TCP Reno flows a Trickles flow gets within 10 % of what a TCP flow gets",
    published: "Throughput of Trickles flows beside TCP flows at one bottleneck: they share it about equally.",
    method: "A 100 Mbit/s link with 20 ms round trip, shared by as many flows of the one kind as of the other. What \
             the flows of a kind get is summed up and compared; packets of Trickles hold less content, \
             0.97 of TCP's, and Reno counts packets. One flow of each kind is measured eight times at once, on links \
             of a quarter of the rate each: two flows alone lose seldom. On either way every packet waits by chance \
             for up to the time of eight packets, in order within its flow: a server in user space spaces its packets \
             out, and where a full queue drops what comes at one moment that alone is worth a fifth of the rate, and \
             more where flows are few (decision 14).",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let steps = lab.choose(STEPS.to_vec(), vec![Step::new(2, 500, 1_000)]);
    let rounds = lab.choose(5, 1);
    let link = |rate| {
        let clean = Profile::clean(rate, ROUND_TRIP);
        // A link without faults has packets wait by chance for the time of one.
        Profile { chance_wait: clean.chance_wait * CHANCE_WAIT_PACKETS, ..clean }
    };
    let mut links = vec![link(RATE / PAIR_SHARE); PAIRS];
    links.push(link(RATE));
    let bench = Bench::new(lab, &[OBJECT_BYTES], links)?;
    let mut raw = Table::new(["flows_of_each", "round", "carrier", "mbit_per_s"]);
    let mut summary =
        Table::new(["flows of each kind", "Trickles, Mbit/s", "TCP Reno, Mbit/s", "Trickles to TCP"]);
    let mut series = Carrier::BOTH.map(|carrier| (carrier.label().to_owned(), Vec::new()));
    let mut checks = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let count = step.flows;
        let (warm_up, time) = (Duration::from_millis(step.warm_up_ms), Duration::from_millis(step.time_ms));
        lab.progress(index + 1, steps.len(), &format!("{count} flows of each kind"));
        let mut rates = [Vec::new(), Vec::new()];
        for round in 0..rounds {
            let server = bench.server.address();
            let flows = Carrier::BOTH.map(|carrier| Flows {
                carrier,
                server,
                bytes: OBJECT_BYTES,
                from: step.clients(),
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
