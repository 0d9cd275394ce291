//! An infrequent client behind large downloads (paper §4.4.2, Figure 11).

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use super::cc::PAPER;
use super::cc_load::{ask, on_load_core};
use super::cc_servers::{Program, Server, object, site};
use crate::load::Load;
use crate::plot::{Plot, Point, Series};
use crate::stats::Spread;
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// More than the kernel buffers for a connection, so that a process is busy until its client has most of it.
const LARGE_BYTES: usize = 16_000_000;
/// Far fewer than the paper's 150, and so fewer clients show the same.
const WORKERS: u32 = 10;
const CLIENTS: [u32; 4] = [5, 20, 40, 80];
const PRIOR: &str = "with prior";
const NO_PRIOR: &str = "without prior";
const CHAINS: [(&str, &[&str]); 2] =
    [(PRIOR, &["package", "persist", "prior"]), (NO_PRIOR, &["package", "persist"])];
/// The infrequent client comes from far away from the downloads' 127.64.0.0/16.
const SOURCE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 200, 0, 1));
const PAUSE: Duration = Duration::from_millis(20);
/// From the first to the last number of clients beyond the workers: flat at most doubles, linear grows with the
/// clients.
const FLAT: f64 = 2.0;
/// What linear growth must at least reach of proportional growth.
const LINEAR: f64 = 0.4;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cc-fig11",
    paper: &PAPER,
    figure: "Figure 11",
    claim: "With `prior`, the latency of an infrequent client is flat in the number of large downloads; without, it is \
            linear",
    published: "Latency of a small file over the number of clients that fetch large files from Apache with 150 \
                processes: linear beyond 150 clients; with the priority filter a small step there, and then level.",
    method: "Apache prefork with 10 processes; clients that download 16 MB again and again; and one from another \
             address range that asks for 100 bytes, on a new connection, 20 ms after its last answer. The chain is \
             package, persist and prior, or without prior. Flat means that latency at most doubles from 20 downloads \
             to 80; linear that it grows at least 0.4 times as much as the downloads do.",
    run,
};

struct Latency {
    chain: &'static str,
    clients: u32,
    ms: Vec<f64>,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let site = site()?;
    object(site.path(), "large", LARGE_BYTES)?;
    object(site.path(), "small", 100)?;
    on_load_core()?;
    let time = Duration::from_millis(lab.choose(2_500, 800));
    let clients = lab.choose(CLIENTS.to_vec(), vec![20, 60]);
    let mut latencies = Vec::new();
    for (label, chain) in CHAINS {
        let server = Server::start(lab, Program::Apache(WORKERS), Some(chain), site.path())?;
        for &count in &clients {
            let request = "GET /large HTTP/1.1\r\nHost: lab\r\n\r\n";
            let mut load = Load::start(server.address(), count, request)?;
            load.establish(1, Duration::from_secs(60))?;
            let ms = std::thread::scope(|scope| -> Result<Vec<f64>, Error> {
                let downloads = scope.spawn(|| load.send(time));
                let ms = small_ones(&server, time)?;
                downloads.join().map_err(|_| Error::Nothing("the downloads"))??;
                Ok(ms)
            })?;
            let spread = Spread::of(ms.iter().copied()).ok_or(Error::Nothing("the infrequent client"))?;
            latencies.push(Latency { chain: label, clients: count, ms });
            let what = format!("{label}, {count} downloads: {} ms", spread.text(1));
            lab.progress(latencies.len(), CHAINS.len() * clients.len(), &what);
        }
    }
    outcome(&latencies, &clients)
}

/// Milliseconds that small files took, until the time is over.
fn small_ones(server: &Server, time: Duration) -> Result<Vec<f64>, Error> {
    let end = Instant::now() + time;
    // The downloads' queue first fills.
    std::thread::sleep(time / 6);
    let mut ms = Vec::new();
    while Instant::now() < end {
        let began = Instant::now();
        let (status, body) = ask(server.address(), Some(SOURCE), "/small", Duration::from_secs(30))
            .map_err(|error| Error::Server(format!("the infrequent client: {error}")))?;
        if (status, body.len()) != (200, 100) {
            return Err(Error::Server(format!("the infrequent client: {status}, {} bytes", body.len())));
        }
        ms.push(began.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(PAUSE);
    }
    Ok(ms)
}

fn outcome(latencies: &[Latency], clients: &[u32]) -> Result<Outcome, Error> {
    let of = |chain: &str, clients: u32| {
        let found = latencies.iter().find(|l| l.chain == chain && l.clients == clients);
        found.and_then(|latency| Spread::of(latency.ms.iter().copied()))
    };
    // The first is below the number of workers: nobody waits there.
    let beyond: Vec<u32> = clients.iter().copied().filter(|&count| count > WORKERS).collect();
    let (Some(&first), Some(&last)) = (beyond.first(), beyond.last()) else {
        return Err(Error::Nothing("the downloads"));
    };
    let growth = |chain: &str| -> Result<f64, Error> {
        let (before, after) = of(chain, first).zip(of(chain, last)).ok_or(Error::Nothing("the client"))?;
        Ok(after.median / before.median)
    };
    let (flat, linear) = (growth(PRIOR)?, growth(NO_PRIOR)?);
    let downloads = f64::from(last) / f64::from(first);
    let checks = [
        Check {
            what: format!("a doubling to the growth of latency with prior, {first} to {last} downloads"),
            ratio: FLAT / flat,
            at_least: 1.0,
        },
        Check {
            what: format!("growth of latency without prior to that of downloads, {first} to {last}"),
            ratio: linear / downloads,
            at_least: LINEAR,
        },
    ];
    let series = CHAINS.map(|(chain, _)| Series {
        name: chain.to_owned(),
        points: clients
            .iter()
            .filter_map(|&count| Some(Point { x: f64::from(count), y: of(chain, count)? }))
            .collect(),
    });
    let plot = Plot {
        title: "An infrequent client behind large downloads".to_owned(),
        x: "clients that download".to_owned(),
        x_log: false,
        y: "latency, ms".to_owned(),
        series: series.into(),
    };
    let mut raw = Table::new(["chain", "downloads", "latency_ms"]);
    let mut summary = Table::new(["chain", "downloads", "latency, ms"]);
    for latency in latencies {
        for ms in &latency.ms {
            raw.row([latency.chain.to_owned(), latency.clients.to_string(), format!("{ms:.3}")]);
        }
        let text = of(latency.chain, latency.clients).map_or(String::new(), |spread| spread.text(1));
        summary.row([latency.chain.to_owned(), latency.clients.to_string(), text]);
    }
    let verdict = Verdict::of(&checks);
    Ok(Outcome { raw, summary, plots: vec![(None, plot)], verdict, servers: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn latencies(flat_ms: f64, linear_ms: f64) -> Vec<Latency> {
        let latency = |chain, clients, ms| Latency { chain, clients, ms: vec![ms] };
        vec![
            latency(PRIOR, 20, 10.0),
            latency(PRIOR, 200, flat_ms),
            latency(NO_PRIOR, 20, 20.0),
            latency(NO_PRIOR, 200, linear_ms),
        ]
    }

    #[test]
    fn flat_and_linear_hold_and_either_without_the_other_does_not() {
        let holds = |flat, linear| outcome(&latencies(flat, linear), &[20, 200]).unwrap().verdict.holds;
        assert!(holds(15.0, 190.0));
        assert!(!holds(25.0, 190.0) && !holds(15.0, 30.0));
    }
}
