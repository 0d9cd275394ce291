//! One file, again and again, of several sizes (paper §4.3.2, Figures 4 and 5).

use std::time::Duration;

use super::cc::{PAPER, Sample, check, series, spread};
use super::cc_load::{What, Wrk};
use super::cc_servers::{APACHE_WORKERS, Program, Server, object, site};
use crate::plot::Plot;
use crate::table::Table;
use crate::verdict::Verdict;
use crate::{Error, Lab, Outcome, Scenario};

/// The paper employs a single filter unless it says otherwise (§4.3.1).
pub(super) const CHAIN: &[&str] = &["package"];
/// As [`CHAIN`], and the server may read the next request of a connection itself.
const LINGERING: &[&str] = &["--linger=1000", "package"];
pub(super) const LINGERING_NGINX: &str = "conditioned nginx, lingering";
pub(super) const LINGERING_APACHE: &str = "conditioned Apache, lingering";
/// Servers without and with a chain, and how they are called.
pub(super) const SERVERS: [(&str, Program, Option<&[&str]>); 7] = [
    ("ccserver", Program::CcServer, Some(CHAIN)),
    ("nginx", Program::Nginx, None),
    ("conditioned nginx", Program::Nginx, Some(CHAIN)),
    (LINGERING_NGINX, Program::Nginx, Some(LINGERING)),
    ("Apache", Program::Apache(APACHE_WORKERS), None),
    ("conditioned Apache", Program::Apache(APACHE_WORKERS), Some(CHAIN)),
    (LINGERING_APACHE, Program::Apache(APACHE_WORKERS), Some(LINGERING)),
];
const KBYTES: [f64; 4] = [0.1, 1.0, 100.0, 500.0];
/// What the bare server's requests per CPU-second may shrink to, at any size.
const AT_LEAST: f64 = 0.5;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cc-fig4",
    paper: &PAPER,
    figure: "Figures 4 and 5",
    claim: "At every file size from 0.1 to 500 kB, conditioned nginx and Apache serve at least half as many requests \
            per CPU-second as bare",
    published: "Requests/s and throughput of one file: Apache at most 1,900/s and CC-Apache 1,700/s, Flash 6,700/s and \
                CC-Flash 4,500/s, CCServer 3,900/s; the larger the file, the smaller the difference.",
    method: "64 connections, kept open, ask for the same file; a chain of one filter, as in the paper. ccserver is the \
             example of this project; it exists behind a chain only. nginx and Apache are measured with `--linger \
             1000` too, where they may read the next request of a connection themselves, and without, where each \
             request is a connection of its own to them; the bound is for nginx with it, and for Apache without. \
             Larger files cost the server more and the chain the same. The claim is ours: the paper has none for this \
             figure but that the overhead is tolerable.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let site = site()?;
    let name = |kbytes: f64| format!("file{kbytes}");
    let sizes = lab.choose(KBYTES.to_vec(), vec![1.0, 100.0]);
    for &kbytes in &sizes {
        object(site.path(), &name(kbytes), (kbytes * 1000.0) as usize)?;
    }
    let rounds = lab.choose(2, 1);
    let time = Duration::from_secs(1);
    let mut samples = Vec::new();
    for (index, &(label, program, chain)) in SERVERS.iter().enumerate() {
        let server = Server::start(lab, program, chain, site.path())?;
        lab.progress(index + 1, SERVERS.len(), label);
        for round in 0..rounds {
            for &kbytes in &sizes {
                let path = format!("/{}", name(kbytes));
                let wrk = Wrk { connections: 64, time, what: What::File(&path) };
                samples.push(wrk.run(&server, label, kbytes, round)?);
            }
        }
    }
    outcome(&samples, &sizes)
}

fn outcome(samples: &[Sample], sizes: &[f64]) -> Result<Outcome, Error> {
    let mut checks = Vec::new();
    for (conditioned, bare) in [(LINGERING_NGINX, "nginx"), ("conditioned Apache", "Apache")] {
        for &kbytes in sizes {
            let what = format!("{conditioned}'s requests per CPU-second to bare's, {kbytes} kB");
            let value = |sample: &Sample| sample.requests_per_cpu_s;
            checks.push(check(samples, (conditioned, kbytes), (bare, kbytes), AT_LEAST, what, value)?);
        }
    }
    let labels = SERVERS.map(|(label, _, _)| label);
    let plot = |title: &str, y: &str, value: fn(&Sample) -> f64| Plot {
        title: title.to_owned(),
        x: "file, kB".to_owned(),
        x_log: true,
        y: y.to_owned(),
        series: series(samples, &labels, value),
    };
    Ok(Outcome {
        raw: raw(samples, "kbytes"),
        summary: summary(samples, "kB", &labels, sizes),
        plots: vec![
            (None, plot("Requests per second, one file", "requests/s", |sample| sample.requests_per_s)),
            (
                Some("throughput"),
                plot("Throughput, one file", "Mbit/s", |sample| sample.requests_per_s * sample.x * 8e-3),
            ),
        ],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

/// A row for each sample.
pub(super) fn raw(samples: &[Sample], x: &str) -> Table {
    let mut table = Table::new(["server", x, "round", "requests_per_s", "requests_per_cpu_s"]);
    for sample in samples {
        table.row([
            sample.label.to_owned(),
            sample.x.to_string(),
            (sample.round + 1).to_string(),
            format!("{:.1}", sample.requests_per_s),
            format!("{:.1}", sample.requests_per_cpu_s),
        ]);
    }
    table
}

/// Medians and spreads, a row for each server and place where it was measured.
pub(super) fn summary(samples: &[Sample], x: &str, labels: &[&str], places: &[f64]) -> Table {
    let mut table = Table::new(["server", x, "requests/s", "requests per CPU-second"]);
    for label in labels {
        for &place in places {
            let of = |value: fn(&Sample) -> f64| spread(samples, label, place, value);
            // Not each is measured everywhere.
            let Some((rate, per_cpu_s)) =
                of(|sample| sample.requests_per_s).zip(of(|sample| sample.requests_per_cpu_s))
            else {
                continue;
            };
            table.row([(*label).to_owned(), place.to_string(), rate.text(0), per_cpu_s.text(0)]);
        }
    }
    table
}
