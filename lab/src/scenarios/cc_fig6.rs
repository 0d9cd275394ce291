//! A mix of files like SPECweb99's (paper §4.3.3, Figures 6 and 7).

use std::time::Duration;

use super::cc::{PAPER, Sample, series};
use super::cc_fig4::{LINGERING_NGINX, SERVERS, raw, summary};
use super::cc_load::{Mix, What, Wrk};
use super::cc_servers::{APACHE_WORKERS, Program, Server, site};
use crate::plot::Plot;
use crate::stats::Spread;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// Directories of 5 MB.
const DIRECTORIES: [usize; 2] = [10, 50];
const MBYTES: [f64; 2] = [50.0, 250.0];
/// Behind the four filters that there are without `--filter`.
const BY_DEFAULT: [(&str, Program, Option<&[&str]>); 4] = [
    ("nginx, default chain", Program::Nginx, Some(&[])),
    ("nginx, default chain, lingering", Program::Nginx, Some(&["--linger=1000"])),
    ("Apache, default chain", Program::Apache(APACHE_WORKERS), Some(&[])),
    ("Apache, default chain, lingering", Program::Apache(APACHE_WORKERS), Some(&["--linger=1000"])),
];
/// What is compared in turn, and how much of the latter's requests per CPU-second the former keeps.
const PAIRS: [(&str, &str, f64); 2] =
    [(LINGERING_NGINX, "nginx", 0.7), ("conditioned Apache", "Apache", 0.9)];

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cc-fig6",
    paper: &PAPER,
    figure: "Figures 6 and 7",
    claim: "On the SPECweb99-like mix, conditioned Apache serves at least 90 % of the requests per CPU-second that \
            bare Apache does, and nginx, with --linger, at least 70 %",
    published: "Throughput over the size of the data set: while it fits into memory, CC-Apache is close to Apache and \
                CC-Flash at about four fifths of Flash.",
    method: "64 connections, kept open. A directory has nine files in each of four classes (0.1 to 0.9, 1 to 9, 10 to \
             90 and 100 to 900 kB, asked for in 35, 50, 14 and 1 % of requests); directories are asked for by Zipf's \
             law. Both data sets fit into memory: the disk would serve all servers alike. A chain of one filter, as in \
             the paper. nginx and Apache are measured with `--linger 1000` and without, as in Figure 4, and behind the \
             default chain of four filters (package, persist, normalize, prior), which has no bound. The bounds are \
             for nginx with it and for Apache without, behind one filter, in eight rounds of four seconds: bare, \
             conditioned, conditioned, bare, each alone on the core.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let site = site()?;
    let rounds = lab.choose(2, 1);
    let places: Vec<(usize, f64)> = DIRECTORIES.into_iter().zip(MBYTES).collect();
    let places = &places[..lab.choose(2, 1)];
    let (mut samples, mut pairs) = (Vec::new(), Vec::new());
    let mut servers = Vec::new();
    for &(label, program, chain) in SERVERS.iter().chain(&BY_DEFAULT) {
        servers.push((label, Server::start(lab, program, chain, site.path())?));
    }
    for &(directories, mbytes) in places {
        let mix = Mix::write(site.path(), directories)?;
        for round in 0..rounds {
            for index in 0..servers.len() {
                let (label, server) = &servers[(index + round) % servers.len()];
                let wrk = Wrk { connections: 64, time: Duration::from_secs(1), what: What::Mix(&mix) };
                let sample = wrk.run(server, label, mbytes, round)?;
                let what = format!("{label}, {mbytes} MB: {:.0} requests/s", sample.requests_per_s);
                samples.push(sample);
                lab.progress(samples.len(), places.len() * rounds * servers.len(), &what);
            }
        }
        for round in 0..lab.choose(8, 1) {
            for (label, bare, _) in PAIRS {
                let find = |label| servers.iter().find(|server| server.0 == label);
                let (own, bare) = find(label).zip(find(bare)).ok_or(Error::Nothing("the load"))?;
                let wrk = Wrk { connections: 64, time: Duration::from_secs(1), what: What::Mix(&mix) };
                pairs.push(wrk.in_turn((&own.1, label), (&bare.1, bare.0), mbytes, round)?);
            }
        }
    }
    let places: Vec<f64> = places.iter().map(|place| place.1).collect();
    outcome(&samples, &pairs, &places)
}

fn outcome(samples: &[Sample], pairs: &[[Sample; 2]], places: &[f64]) -> Result<Outcome, Error> {
    let (mut checks, mut spreads) = (Vec::new(), Vec::new());
    for (conditioned, _, at_least) in PAIRS {
        for &mbytes in places {
            let what = format!("{conditioned}'s requests per CPU-second to bare's, {mbytes} MB");
            let of_both = pairs.iter().filter(|[own, _]| own.label == conditioned && own.x == mbytes);
            let ratios = of_both.map(|[own, bare]| own.requests_per_cpu_s / bare.requests_per_cpu_s);
            let ratio = Spread::of(ratios).ok_or(Error::Nothing("the load"))?;
            spreads.push(format!("{conditioned} {mbytes} MB {}", ratio.text(2)));
            checks.push(Check { what, ratio: ratio.median, at_least });
        }
    }
    let labels: Vec<_> = SERVERS.iter().chain(&BY_DEFAULT).map(|(label, ..)| *label).collect();
    let plot = |title: &str, y: &str, value: fn(&Sample) -> f64| Plot {
        title: title.to_owned(),
        x: "data set, MB".to_owned(),
        x_log: true,
        y: y.to_owned(),
        series: series(samples, &labels, value),
    };
    Ok(Outcome {
        raw: raw(samples, "mbytes"),
        summary: summary(samples, "MB", &labels, places),
        plots: vec![
            (None, plot("Requests per second, mix", "requests/s", |sample| sample.requests_per_s)),
            (
                Some("cpu"),
                plot("Requests per CPU-second, mix", "requests per CPU-second", |sample| {
                    sample.requests_per_cpu_s
                }),
            ),
        ],
        verdict: Verdict::of(&checks).noting(&spreads.join(", ")),
        servers: Vec::new(),
    })
}
