//! Incomplete connections (paper §4.4.1, Figure 10).

use std::time::Duration;

use super::cc::{PAPER, Sample, at_most, check, series, spread};
use super::cc_attack::Attack;
use super::cc_fig4::{raw, summary};
use super::cc_load::{What, Wrk};
use super::cc_servers::{APACHE_WORKERS, Program, Server, object, site};
use crate::plot::Plot;
use crate::verdict::Verdict;
use crate::{Error, Lab, Outcome, Scenario};

const ATTEMPTED: [u32; 3] = [0, 4_000, 32_000];
/// What an attack may leave of a conditioned server's rate, and what it leaves of bare Apache's at most.
const KEPT: f64 = 0.95;
const COLLAPSED: f64 = 0.05;
/// Incomplete connections of which the last is more than bare Apache has processes: with more, each try takes minutes.
const BARE_ATTEMPTED: [u32; 2] = [0, 400];
/// Long enough that nobody is ended for being late while the others are measured.
const CHAIN: &[&str] = &["package=timeout=600s", "persist"];
const SERVERS: [(&str, Program, Option<&[&str]>); 4] = [
    ("ccserver", Program::CcServer, Some(CHAIN)),
    ("conditioned nginx", Program::Nginx, Some(CHAIN)),
    ("conditioned Apache", Program::Apache(APACHE_WORKERS), Some(CHAIN)),
    ("Apache", Program::Apache(APACHE_WORKERS), None),
];

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cc-fig10",
    paper: &PAPER,
    figure: "Figure 10",
    claim: "With up to 32,000 incomplete connections attempted, conditioned servers keep at least 95 % of their \
            unloaded rate; bare Apache, of 150 processes, keeps less than 5 %",
    published: "Requests/s of a regular client over the number of incomplete connections: Apache's drops to 0.5/s at \
                150, Flash's at 32,000, Haboob's at 100; CC-Apache, CC-Flash and CCServer keep theirs.",
    method: "Load processes of 16,000 connections each, from 127.128.0.0/16, open connections, send a part of a \
             request and nothing more. Once those of them that can be are established, 16 connections of a regular \
             client ask for a file of 1 kB. Of each server there are several at a time, one of which has no incomplete \
             connections; they are measured in turn, a second each, because a machine's speed changes from minute to \
             minute. A process has 20,000 descriptors here, so that beyond those `package` ends incomplete connections \
             of the heaviest range to take in others. The rates of conditioned servers are compared per CPU-second: \
             holding incomplete connections costs nothing once they are there, and the attackers share the client's \
             core. Bare Apache, which has no process left with 400, is not tried with more.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let site = site()?;
    object(site.path(), "object", 1_000)?;
    let attempted = lab.choose(ATTEMPTED.to_vec(), vec![0, 400]);
    let rounds = lab.choose(9, 1);
    let mut samples = Vec::new();
    let mut held_most = 0;
    for (label, program, chain) in SERVERS {
        let attempted = if chain.is_some() { &attempted[..] } else { &BARE_ATTEMPTED[..] };
        // One of the same for each: the attacked ones stay so, and all are measured in turn.
        let mut attacked = Vec::new();
        for &count in attempted {
            let server = Server::start(lab, program, chain, site.path())?;
            let mut attack = Attack::start(server.address(), count, false, "GET /object HTTP/1.1\r\nHost:")?;
            if chain.is_some() {
                attack.settle(count)?;
                server.rest();
            }
            attacked.push((count, server, attack));
        }
        // A bare server that has no process left need not be shown so again and again.
        for round in 0..if chain.is_some() { rounds } else { 1 } {
            for index in 0..attacked.len() {
                let first = (index + round) % attacked.len();
                let (count, server, attack) = &mut attacked[first];
                let wrk = Wrk { connections: 16, time: Duration::from_secs(1), what: What::File("/object") };
                let sample = wrk.run(server, label, f64::from(*count), round)?;
                let held = attack.held()?;
                held_most = held_most.max(if chain.is_some() { held } else { 0 });
                samples.push(sample);
                let (at, rate) = (samples.len(), sample.requests_per_s);
                lab.progress(
                    at,
                    at,
                    &format!("{label}, {count} attempted, {held} held: {rate:.0} requests/s"),
                );
            }
        }
    }
    outcome(&samples, &attempted, held_most)
}

fn outcome(samples: &[Sample], attempted: &[u32], held: u64) -> Result<Outcome, Error> {
    let mut checks = Vec::new();
    for (label, _, chain) in SERVERS {
        for &count in if chain.is_some() { &attempted[1..] } else { &BARE_ATTEMPTED[1..] } {
            let x = f64::from(count);
            let value = |sample: &Sample| sample.requests_per_cpu_s;
            if chain.is_some() {
                let what = format!("{label}'s rate with {count} incomplete connections to its own without");
                checks.push(check(samples, (label, x), (label, 0.0), KEPT, what, value)?);
            } else {
                let rate = |x| spread(samples, label, x, |sample| sample.requests_per_s);
                let (now, before) = rate(x).zip(rate(0.0)).ok_or(Error::Nothing("the load"))?;
                let what = format!("5 % to what bare Apache keeps of its rate with {count}");
                checks.push(at_most(what, now.median / before.median, COLLAPSED));
            }
        }
    }
    let labels = SERVERS.map(|(label, _, _)| label);
    let mut places: Vec<f64> =
        attempted.iter().chain(&BARE_ATTEMPTED).map(|&count| f64::from(count)).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let plot = Plot {
        title: "A regular client beside incomplete connections".to_owned(),
        x: "incomplete connections attempted".to_owned(),
        x_log: false,
        y: "requests/s".to_owned(),
        series: series(samples, &labels, |sample| sample.requests_per_s),
    };
    let note = format!("at most {held} of them were established at a time");
    Ok(Outcome {
        raw: raw(samples, "incomplete_connections"),
        summary: summary(samples, "incomplete connections", &labels, &places),
        plots: vec![(None, plot)],
        verdict: Verdict::of(&checks).noting(&note),
        servers: Vec::new(),
    })
}
