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
    claim: "Clients that fetch 500 kB objects get within 5 % of TCP's throughput together, at every number of clients, \
            and no transfer of Trickles fails",
    published: "Aggregate throughput at a 100 Mbit/s bottleneck with 1 to 15,000 clients: Trickles is level with TCP \
                up to a few thousand clients, beyond which the TCP server fails for want of memory.",
    method: "A 100 Mbit/s link with 10 ms round trip. What arrives at all clients together is measured while all are \
             at work, 15,000 clients 20 s after they begin to open and for 24 s: what had come before, behind a gap, \
             counts once the gap is filled, and made TCP faster than its link in a third of that time. With thousands \
             of clients each gets so little that hardly a transfer ends meanwhile; the paper let them end. Reno's \
             bound of one packet a round trip is what congests the link then. A transfer fails whose connection is \
             refused, reset or given up, from the load's first moment on.",
    run,
};

/// What clients of one carrier got.
struct Measured {
    rate: f64,
    completed: u64,
    failed: u64,
    /// Clients that nothing arrived at.
    starved: usize,
}

/// What so many clients got of each carrier.
struct Step {
    clients: usize,
    of: [Measured; 2],
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let most = connections(15_000) as usize;
    let counts = lab.choose(vec![1, 10, 100, 1_000, most], vec![1, 20]);
    let bench = Bench::new(lab, &[OBJECT_BYTES], vec![Profile::clean(RATE, ROUND_TRIP)])?;
    let mut steps = Vec::new();
    for (step, &clients) in counts.iter().enumerate() {
        lab.progress(step + 1, counts.len(), &format!("{} clients", thousands(clients as u64)));
        let [trickles, tcp] = Carrier::BOTH;
        let of = [measure(lab, &bench, trickles, clients)?, measure(lab, &bench, tcp, clients)?];
        steps.push(Step { clients, of });
    }
    Ok(outcome(&steps))
}

fn measure(lab: &Lab, bench: &Bench, carrier: Carrier, clients: usize) -> Result<Measured, Error> {
    let (least_ms, time_ms) = lab.choose((1_500, 3_000), (300, 700));
    let warm_up = Duration::from_millis(least_ms.max((clients * 1_000 / OPENS_PER_S) as u64));
    let time = Duration::from_millis(if clients < MANY { time_ms } else { 8 * time_ms });
    let server = bench.server.address();
    let flows = Flows { carrier, server, bytes: OBJECT_BYTES, from: vec![client_address(0); clients] };
    let received = bench.hosts.run(Side::Client, || load(&[flows], warm_up, time))?;
    let of = received.into_iter().next().ok_or(Error::Nothing("a load of transfers"))?;
    Ok(Measured {
        rate: mbit_per_s(of.bytes.iter().sum(), time),
        completed: of.completed,
        failed: of.failed,
        starved: of.bytes.iter().filter(|bytes| **bytes == 0).count(),
    })
}

fn outcome(steps: &[Step]) -> Outcome {
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
    for Step { clients, of: [trickles, tcp] } in steps {
        for (index, (carrier, got)) in Carrier::BOTH.into_iter().zip([trickles, tcp]).enumerate() {
            series[index].1.push(Point::exact(*clients as f64, got.rate));
            raw.row([
                clients.to_string(),
                carrier.name().into(),
                format!("{:.2}", got.rate),
                got.completed.to_string(),
                got.failed.to_string(),
                got.starved.to_string(),
            ]);
        }
        best_tcp = best_tcp.max(tcp.rate);
        // Where TCP fails, Trickles has to give what TCP gave to fewer clients.
        let tcp_fails = tcp.rate < FAILED * best_tcp;
        let ratio = trickles.rate / if tcp_fails { best_tcp } else { tcp.rate };
        let clients = *clients as u64;
        summary.row([
            thousands(clients),
            format!("{:.1}", trickles.rate),
            format!("{:.1}", tcp.rate),
            format!("{ratio:.3}"),
            thousands(trickles.failed),
            thousands(tcp.failed),
        ]);
        checks.push(Check {
            what: format!("clients to clients and failed transfers of Trickles, with {}", thousands(clients)),
            ratio: clients as f64 / (clients + trickles.failed) as f64,
            at_least: 1.0,
        });
        let but = if tcp_fails { ", of which TCP serves hardly any," } else { "" };
        checks.push(Check {
            what: format!("throughput to TCP's with {} clients{but}", thousands(clients)),
            ratio,
            at_least: 0.95,
        });
    }
    Outcome {
        raw,
        summary,
        plots: vec![(None, plot("Throughput of all clients", ("clients", true), "Mbit/s", series.into()))],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    }
}
