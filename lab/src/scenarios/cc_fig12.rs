//! Slow persistent connections (paper §4.4.3, Figure 12).

use std::time::Duration;

use super::cc::{PAPER, Sample, at_most, check, series, spread};
use super::cc_attack::Attack;
use super::cc_fig4::{raw, summary};
use super::cc_load::{Mix, What, Wrk};
use super::cc_servers::{APACHE_WORKERS, Program, Server, object, site};
use crate::plot::Plot;
use crate::verdict::Verdict;
use crate::{Error, Lab, Outcome, Scenario};

const SLOW: [u32; 4] = [0, 100, 400, 15_000];
/// Slow connections with which bare Apache is tried at most: with more, each try takes minutes.
const BARE_UP_TO: u32 = 400;
const CONDITIONED: &str = "conditioned Apache";
const BARE: &str = "Apache";
const SERVERS: [(&str, Option<&[&str]>); 2] = [(CONDITIONED, Some(&["package", "persist"])), (BARE, None)];
const KEPT: f64 = 0.98;
/// Beyond its processes bare Apache keeps at most so much: the paper's curve is near zero there.
const COLLAPSED: f64 = 0.1;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cc-fig12",
    paper: &PAPER,
    figure: "Figure 12",
    claim: "With up to 15,000 slow persistent connections conditioned Apache loses at most 2 %; bare Apache, of 150 processes, collapses past 150",
    published: "Throughput of 16 regular clients over the number of slow persistent connections: Apache's drops beyond 150, \
                CC-Apache's stays.",
    method: "An attacker opens connections, asks each for a small file, and holds it; what the server ends, it opens again. \
             Meanwhile 16 connections of a regular client ask for the SPECweb99-like mix of 50 MB. Apache has 150 processes \
             and its default timeout of 15 s for persistent connections. The rates of the conditioned one are compared per \
             CPU-second, because the attacker shares the client's core. Bare Apache is tried with up to 400. To collapse means to keep less than a tenth.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let site = site()?;
    let mix = Mix::write(site.path(), 10)?;
    object(site.path(), "small", 100)?;
    let slow = lab.choose(SLOW.to_vec(), vec![0, 400]);
    let rounds = lab.choose(3, 1);
    let mut samples = Vec::new();
    for (label, chain) in SERVERS {
        let server = Server::start(lab, Program::Apache(APACHE_WORKERS), chain, site.path())?;
        for &count in slow.iter().filter(|&&count| chain.is_some() || count <= BARE_UP_TO) {
            let text = "GET /small HTTP/1.1\r\nHost: lab\r\n\r\n";
            let mut attack = Attack::start(server.address(), count, true, text)?;
            if chain.is_some() {
                attack.settle(count)?;
            }
            for round in 0..if chain.is_none() && count > 0 { 1 } else { rounds } {
                let time = Duration::from_secs(lab.choose(2, 1));
                let wrk = Wrk { connections: 16, time, what: What::Mix(&mix) };
                samples.push(wrk.run(&server, label, f64::from(count), round)?);
            }
            let held = attack.held()?;
            let rate = samples[samples.len() - 1].requests_per_s;
            let what = format!("{label}, {count} slow, {held} held: {rate:.0} requests/s");
            lab.progress(samples.len(), samples.len(), &what);
        }
    }
    outcome(&samples, &slow)
}

fn outcome(samples: &[Sample], slow: &[u32]) -> Result<Outcome, Error> {
    let mut checks = Vec::new();
    for &count in &slow[1..] {
        let x = f64::from(count);
        let what = format!("conditioned Apache's rate with {count} slow connections to its own without");
        let value = |sample: &Sample| sample.requests_per_cpu_s;
        checks.push(check(samples, (CONDITIONED, x), (CONDITIONED, 0.0), KEPT, what, value)?);
        if count > APACHE_WORKERS && count <= BARE_UP_TO {
            let rate = |x| spread(samples, BARE, x, |sample| sample.requests_per_s);
            let (now, before) = rate(x).zip(rate(0.0)).ok_or(Error::Nothing("the load"))?;
            let what = format!("a tenth to what bare Apache keeps of its rate with {count}");
            checks.push(at_most(what, now.median / before.median, COLLAPSED));
        }
    }
    let labels = [CONDITIONED, BARE];
    let places: Vec<f64> = slow.iter().map(|&count| f64::from(count)).collect();
    let plot = Plot {
        title: "16 regular connections beside slow persistent ones".to_owned(),
        x: "slow persistent connections".to_owned(),
        x_log: false,
        y: "requests/s".to_owned(),
        series: series(samples, &labels, |sample| sample.requests_per_s),
    };
    Ok(Outcome {
        raw: raw(samples, "slow_connections"),
        summary: summary(samples, "slow connections", &labels, &places),
        plots: vec![(None, plot)],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}
