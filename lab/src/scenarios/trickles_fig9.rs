//! Aggregate throughput against the number of clients (Trickles §6.1, Figure 9).

use std::time::Duration;

use super::trickles::{Bench, PAPER, RATE, ROUND_TRIP, mbit_per_s, plot};
use crate::link::{Profile, Side, client_address};
use crate::plot::Point;
use crate::server::connections;
use crate::table::{Table, thousands};
use crate::transfer::{Carrier, Flows, load};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// What every client fetches, again and again.
const OBJECT_BYTES: u64 = 500_000;
/// How many clients a second come to be at work: with their padding an open fills a packet, most of which are lost
/// while so many open at once, and a client waits longer after each.
const OPENS_PER_S: usize = 750;
/// From so many clients on a single one gets too little for a short measurement.
const MANY: usize = 10_000;
/// TCP has failed where it reaches less than this part of what it reached with fewer clients.
const FAILED: f64 = 0.5;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig9",
    paper: &PAPER,
    figure: "Figure 9",
    claim: "Clients that fetch 500 kB objects get within 5 % of TCP's throughput together, at every number of clients, and no transfer of Trickles fails",
    published: "Aggregate throughput at a 100 Mbit/s bottleneck with 1 to 15,000 clients: Trickles is level with TCP up to a \
                few thousand clients, beyond which the TCP server fails for want of memory.",
    method: "A 100 Mbit/s link with 10 ms round trip. What arrives at all clients together is measured while all are at \
             work, 15,000 clients 20 s after they begin to open and for 24 s: what had come before, behind a gap, counts once the gap \
             is filled, and made TCP faster than its link in a third of that time. With thousands of clients each gets so little that hardly a transfer \
             ends meanwhile; the paper let them end. Reno's bound of one packet a round trip is what congests the link then. A transfer fails whose connection is refused, reset \
             or given up, from the load's first moment on.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let most = connections(15_000) as usize;
    let counts = lab.choose(vec![1, 10, 100, 1_000, most], vec![1, 20]);
    let (least_ms, time) = lab.choose((1_500, 3_000), (300, 700));
    let time = Duration::from_millis(time);
    let bench = Bench::new(lab, &[OBJECT_BYTES], vec![Profile::clean(RATE, ROUND_TRIP)])?;
    let mut raw = Table::new(["clients", "carrier", "mbit_per_s", "completed", "failed", "without_a_byte"]);
    let mut summary = Table::new([
        "clients",
        "Trickles, Mbit/s",
        "TCP Reno, Mbit/s",
        "Trickles to TCP",
        "failed transfers, Trickles",
        "failed transfers, TCP Reno",
    ]);
    let mut series = Carrier::BOTH.map(|carrier| (carrier.label().to_owned(), Vec::new()));
    let mut checks = Vec::new();
    let mut best_tcp: f64 = 0.0;
    for (step, &count) in counts.iter().enumerate() {
        lab.progress(step + 1, counts.len(), &format!("{} clients", thousands(count as u64)));
        let warm_up = Duration::from_millis(least_ms.max((count * 1_000 / OPENS_PER_S) as u64));
        let (mut rates, mut failures) = ([0.0; 2], [0; 2]);
        for (index, carrier) in Carrier::BOTH.into_iter().enumerate() {
            let server = bench.server.address();
            let flows = Flows { carrier, server, bytes: OBJECT_BYTES, from: vec![client_address(0); count] };
            let time = if count < MANY { time } else { 8 * time };
            let received = bench.hosts.run(Side::Client, || load(&[flows], warm_up, time))?;
            let of = received.into_iter().next().ok_or(Error::Nothing("a load of transfers"))?;
            failures[index] = of.failed;
            rates[index] = mbit_per_s(of.bytes.iter().sum(), time);
            series[index].1.push(Point::exact(count as f64, rates[index]));
            raw.row([
                count.to_string(),
                carrier.name().into(),
                format!("{:.2}", rates[index]),
                of.completed.to_string(),
                of.failed.to_string(),
                of.bytes.iter().filter(|bytes| **bytes == 0).count().to_string(),
            ]);
        }
        best_tcp = best_tcp.max(rates[1]);
        // Where TCP fails, Trickles has to give what TCP gave to fewer clients.
        let failed = rates[1] < FAILED * best_tcp;
        let ratio = rates[0] / if failed { best_tcp } else { rates[1] };
        summary.row([
            thousands(count as u64),
            format!("{:.1}", rates[0]),
            format!("{:.1}", rates[1]),
            format!("{ratio:.3}"),
            thousands(failures[0]),
            thousands(failures[1]),
        ]);
        checks.push(Check {
            what: format!(
                "clients to clients and failed transfers of Trickles, with {}",
                thousands(count as u64)
            ),
            ratio: count as f64 / (count as u64 + failures[0]) as f64,
            at_least: 1.0,
        });
        checks.push(Check {
            what: format!(
                "throughput to TCP's with {} clients{}",
                thousands(count as u64),
                if failed { ", of which TCP serves hardly any," } else { "" }
            ),
            ratio,
            at_least: 0.95,
        });
    }
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot("Throughput of all clients", ("clients", true), "Mbit/s", series.into()))],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}
