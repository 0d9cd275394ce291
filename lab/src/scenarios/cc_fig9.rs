//! Throughput over the number of filters (paper §4.3.4, Figure 9).

use std::time::Duration;

use super::cc::{PAPER, Sample, check, series};
use super::cc_fig4::{raw, summary};
use super::cc_fig8::{MOST_FILTERS, chain};
use super::cc_load::{Mix, What, Wrk};
use super::cc_servers::{Program, Server, site};
use crate::plot::Plot;
use crate::verdict::Verdict;
use crate::{Error, Lab, Outcome, Scenario};

const LABEL: &str = "ccserver";
/// What ten filters must leave of the throughput of one: a tenth would be linear, less a collapse.
const ALL_AT_LEAST: f64 = 0.25;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cc-fig9",
    paper: &PAPER,
    figure: "Figure 9",
    claim: "Throughput does not collapse: ten filters leave at least 25 % of one's",
    published: "Throughput of a mix in memory over the number of filters: close to linear for few filters, then the \
                degradation slows down.",
    method: "ccserver behind one to ten filters, as in Figure 8, under the SPECweb99-like mix of 50 MB; 64 \
             connections, kept open. The whole chain is on one core. The bound is ours.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let site = site()?;
    let mix = Mix::write(site.path(), 10)?;
    let rounds = lab.choose(2, 1);
    let mut samples = Vec::new();
    for filters in 1..=MOST_FILTERS {
        let server = Server::start(lab, Program::CcServer, Some(&chain(filters)), site.path())?;
        for round in 0..rounds {
            let time = Duration::from_secs(1);
            let wrk = Wrk { connections: 64, time, what: What::Mix(&mix) };
            samples.push(wrk.run(&server, LABEL, filters as f64, round)?);
        }
        let rate = samples[samples.len() - 1].requests_per_s;
        lab.progress(filters, MOST_FILTERS, &format!("{filters} filters: {rate:.0} requests/s"));
    }
    outcome(&samples)
}

fn outcome(samples: &[Sample]) -> Result<Outcome, Error> {
    let value = |sample: &Sample| sample.requests_per_cpu_s;
    let most = MOST_FILTERS as f64;
    let what = "requests per CPU-second with ten filters to those with one".to_owned();
    let check = check(samples, (LABEL, most), (LABEL, 1.0), ALL_AT_LEAST, what, value)?;
    let places: Vec<f64> = (1..=MOST_FILTERS).map(|filters| filters as f64).collect();
    let plot = Plot {
        title: "Throughput over the number of filters".to_owned(),
        x: "filters".to_owned(),
        x_log: false,
        y: "requests/s".to_owned(),
        series: series(samples, &[LABEL], |sample| sample.requests_per_s),
    };
    Ok(Outcome {
        raw: raw(samples, "filters"),
        summary: summary(samples, "filters", &[LABEL], &places),
        plots: vec![(None, plot)],
        verdict: Verdict::of(&[check]),
        servers: Vec::new(),
    })
}
