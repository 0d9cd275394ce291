//! Small cached answers by UDP beside nginx's over connections that are kept.

use tidegate_bench::dhttp::{Round, measure_rounds};
use tidegate_bench::wrk::Figure;

use super::dhttp::PAPER;
use crate::plot::{Plot, Point, Series};
use crate::server::{check_cores, tidegate, version};
use crate::stats::Spread;
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// Of nginx's requests per CPU-second.
const GOAL: f64 = 3.0;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dhttp-peak",
    paper: &PAPER,
    figure: "Beyond the paper",
    claim: "tidegate answers at least 3 times as many small cached requests per CPU-second by UDP as nginx over \
            connections that are kept",
    published: "The paper compares DHTTP with the HTTP of the same server under SURGE, not the cost of one request.",
    method: "An object of 612 bytes in the cache of each. wrk asks nginx over 32 connections that are kept, without \
             pipelining; a load of ours asks tidegate from 8 sockets with 32 requests each on their way, in batches. \
             The server has one core, the load the other. Only server CPU per answered request is compared: batches \
             make a difference to it, as they would with as many clients.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    check_cores()?;
    let binary = tidegate(lab)?;
    let (rounds, seconds) = lab.choose((5, 3), (2, 1));
    let measured = measure_rounds(&binary, rounds, seconds, |round, figures| {
        let (nginx, dhttp) = (figures.nginx.cpu_us_per_request, figures.dhttp.cpu_us_per_request);
        lab.progress(
            usize::from(round) + 1,
            rounds.into(),
            &format!("nginx {nginx:.2}, DHTTP {dhttp:.2} us CPU: {:.2} times", figures.ratio()),
        );
    });
    let mut servers: Vec<String> = version("nginx", "-v").into_iter().collect();
    servers.extend(version(&binary, "--version"));
    outcome(&measured.map_err(Error::Server)?, servers)
}

/// What one of the servers had in a round.
type Had = fn(&Round) -> Figure;

const SERVERS: [(&str, Had); 2] =
    [("nginx, connections kept", |round| round.nginx), ("tidegate, DHTTP", |round| round.dhttp)];

fn outcome(measured: &[Round], servers: Vec<String>) -> Result<Outcome, Error> {
    let ratio = Spread::of(measured.iter().map(Round::ratio)).ok_or(Error::Nothing("the load"))?;
    let check =
        Check { what: "requests per CPU-second to nginx's".to_owned(), ratio: ratio.median, at_least: GOAL };
    let series = SERVERS.map(|(name, figure)| Series {
        name: name.to_owned(),
        points: measured
            .iter()
            .enumerate()
            .map(|(round, figures)| {
                Point::exact(round as f64 + 1.0, 1e6 / figure(figures).cpu_us_per_request)
            })
            .collect(),
    });
    let plot = Plot {
        title: "Small cached answers".to_owned(),
        x: "round".to_owned(),
        x_log: false,
        y: "requests per CPU-second".to_owned(),
        series: series.into(),
    };
    let mut raw = Table::new(["round", "server", "requests_per_s", "cpu_us_per_request"]);
    let mut summary = Table::new(["server", "requests/s", "CPU µs/request"]);
    for (name, figure) in SERVERS {
        for (round, figures) in measured.iter().enumerate() {
            let figure = figure(figures);
            raw.row([
                (round + 1).to_string(),
                name.to_owned(),
                format!("{:.0}", figure.requests_per_s),
                format!("{:.3}", figure.cpu_us_per_request),
            ]);
        }
        let text = |value: fn(Figure) -> f64, digits| {
            Spread::of(measured.iter().map(|round| value(figure(round))))
                .map_or(String::new(), |spread| spread.text(digits))
        };
        summary.row([
            name.to_owned(),
            text(|figure| figure.requests_per_s, 0),
            text(|figure| figure.cpu_us_per_request, 2),
        ]);
    }
    let verdict = Verdict::of(&[check]).noting(&format!("over the rounds {}", ratio.text(2)));
    Ok(Outcome { raw, summary, plots: vec![(None, plot)], verdict, servers })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(nginx_us: f64, dhttp_us: f64) -> Round {
        let figure = |cpu_us_per_request| Figure { requests_per_s: 1.0, cpu_us_per_request, late: 0 };
        Round { nginx: figure(nginx_us), dhttp: figure(dhttp_us) }
    }

    #[test]
    fn the_median_of_the_rounds_decides() {
        let verdict = |rounds: &[Round]| outcome(rounds, Vec::new()).unwrap().verdict;
        assert!(verdict(&[round(6.0, 2.0)]).holds);
        let below = verdict(&[round(6.0, 2.1), round(6.0, 2.1), round(6.0, 1.0)]);
        assert!(!below.holds && below.text.contains("2.857 times"), "{}", below.text);
        assert!(outcome(&[], Vec::new()).is_err());
    }
}
