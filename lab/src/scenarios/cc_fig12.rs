//! Slow persistent connections (paper §4.4.3, Figure 12).

use std::time::Duration;

use super::cc::{PAPER, Sample, at_most, series, spread};
use super::cc_attack::Attack;
use super::cc_fig4::{raw, summary};
use super::cc_load::{Mix, What, Wrk};
use super::cc_servers::{APACHE_WORKERS, Program, Server, object, site};
use crate::plot::Plot;
use crate::stats::Spread;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const SLOW: [u32; 4] = [0, 100, 400, 15_000];
/// Slow connections with which bare Apache is tried at most: with more, each try takes minutes.
const BARE_UP_TO: u32 = 400;
const CONDITIONED: &str = "conditioned Apache";
const BARE: &str = "Apache";
const CHAIN: &[&str] = &["package", "persist"];
const KEPT: f64 = 0.98;
/// Beyond its processes bare Apache keeps at most so much: the paper's curve is near zero there.
const COLLAPSED: f64 = 0.1;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cc-fig12",
    paper: &PAPER,
    figure: "Figure 12",
    claim: "With up to 15,000 slow persistent connections conditioned Apache loses at most 2 %; bare Apache, of 150 \
            processes, collapses past 150",
    published: "Throughput of 16 regular clients over the number of slow persistent connections: Apache's drops beyond \
                150, CC-Apache's stays.",
    method: "An attacker opens connections, asks each for a small file, and holds it; what the server ends, it opens \
             again. Meanwhile 16 connections of a regular client ask for the SPECweb99-like mix of 50 MB. Apache has \
             150 processes and its default timeout of 15 s for persistent connections. The conditioned one is compared \
             with another that is not attacked, in turn, per CPU-second, because the attacker shares the client's \
             core; then the other is attacked, in as many rounds. Bare Apache is tried with up to 400. To \
             collapse means to keep less than a tenth.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let site = site()?;
    let mix = Mix::write(site.path(), 10)?;
    object(site.path(), "small", 100)?;
    let slow = lab.choose(SLOW.to_vec(), vec![0, 400]);
    let load = |seconds| Wrk { connections: 16, time: Duration::from_secs(seconds), what: What::Mix(&mix) };
    let text = "GET /small HTTP/1.1\r\nHost: lab\r\n\r\n";
    let start = |chain| Server::start(lab, Program::Apache(APACHE_WORKERS), chain, site.path());
    let mut samples = Vec::new();
    let mut pairs = Vec::new();
    {
        let (one, other) = (start(Some(CHAIN))?, start(Some(CHAIN))?);
        for &count in &slow {
            // Two of a kind differ by more than the bound allows: each is attacked in its turn.
            for (attacked, spared) in [(&one, &other), (&other, &one)] {
                let mut attack = Attack::start(attacked.address(), count, true, text)?;
                attack.settle(count)?;
                for round in 0..lab.choose(6, 1) {
                    let (attacked, spared) = ((attacked, CONDITIONED), (spared, CONDITIONED));
                    pairs.push(load(1).in_turn(attacked, spared, f64::from(count), round)?);
                }
                tell(lab, CONDITIONED, count, attack.held()?, &pairs[pairs.len() - 1][0]);
            }
        }
    }
    samples.extend(pairs.iter().map(|[attacked, _]| *attacked));
    let server = start(None)?;
    for &count in slow.iter().filter(|&&count| count <= BARE_UP_TO) {
        let mut attack = Attack::start(server.address(), count, true, text)?;
        for round in 0..if count == 0 { lab.choose(3, 1) } else { 1 } {
            samples.push(load(lab.choose(2, 1)).run(&server, BARE, f64::from(count), round)?);
        }
        tell(lab, BARE, count, attack.held()?, &samples[samples.len() - 1]);
    }
    outcome(&samples, &pairs, &slow)
}

fn tell(lab: &Lab, label: &str, count: u32, held: u64, sample: &Sample) {
    let rate = sample.requests_per_s;
    lab.progress(1, 1, &format!("{label}, {count} slow, {held} held: {rate:.0} requests/s"));
}

fn outcome(samples: &[Sample], pairs: &[[Sample; 2]], slow: &[u32]) -> Result<Outcome, Error> {
    let (mut checks, mut spreads) = (Vec::new(), Vec::new());
    for &count in slow {
        let x = f64::from(count);
        let of_count = pairs.iter().filter(|[attacked, _]| attacked.x == x);
        let ratios = of_count.map(|[attacked, other]| attacked.requests_per_cpu_s / other.requests_per_cpu_s);
        let ratio = Spread::of(ratios).ok_or(Error::Nothing("the load"))?;
        spreads.push(format!("{count}: {}", ratio.text(3)));
        if count == 0 {
            continue;
        }
        let what = format!("conditioned Apache's rate with {count} slow connections to that of one without");
        checks.push(Check { what, ratio: ratio.median, at_least: KEPT });
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
        verdict: Verdict::of(&checks).noting(&spreads.join(", ")),
        servers: Vec::new(),
    })
}
