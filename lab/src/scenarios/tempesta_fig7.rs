//! Time to block a client (Tempesta §5.3, Figure 7).

use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use tidegate_core::Verdict;
use tidegate_core::hooks::{ChainSource, Field, Fields, Peer, RequestView, Via};
use tidegate_defence::{Defence, Settings};
use tidegate_http::normalize::{Personality, normalize};
use tidegate_http::{FieldId, HeadLimits, Progress, RequestHead, RequestParser};

use super::parsers::browser_request;
use super::tempesta::PAPER;
use crate::plot::{Plot, Point, Series};
use crate::server::pin_to_one_core;
use crate::stats::Spread;
use crate::table::Table;
use crate::verdict::{Check, Verdict as Claim};
use crate::{Error, Lab, Outcome, Scenario};

/// Microseconds from the last byte of the offending request to the verdict.
const MOST_US: f64 = 4.0;
/// Clients that offend, one after the other.
const CLIENTS: u32 = 1_000;
const REQUEST_BYTES: usize = 373;
/// What one client may do: it offends with the request after that.
const ALLOWED: u32 = 10;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "tempesta-fig7",
    paper: &PAPER,
    figure: "Figure 7",
    claim: "From the last byte of the offending request to the verdict that blocks its client it takes at most 4 µs \
            in the median",
    published: "On average over 1,000 requests it takes Tempesta 4 µs to block a client and 6 µs to serve a cached \
                page; nginx takes 23 µs and 22 µs.",
    method: "In process, as a data core does it: the head is parsed and normalized, counted at its client's address \
             and at the prefixes around it, and judged by all classifiers. Each of 1,000 clients makes as many \
             browser's requests of 373 bytes as it may, and then the one that gets it blocked; that one is timed, \
             reading the clock included, and so is the one before. What follows on the connection costs a reset, and \
             later packets only what the block list costs.",
    run,
};

struct HeadFields<'h>(&'h RequestHead<'h>);

impl Fields for HeadFields<'_> {
    fn get(&self, field: Field) -> Option<&[u8]> {
        self.0.fields.get(match field {
            Field::UserAgent => FieldId::UserAgent,
            Field::Cookie => FieldId::Cookie,
            Field::ContentType => FieldId::ContentType,
            Field::Host => FieldId::Host,
        })
    }
}

/// Microseconds of each client's last request that was let pass, and of the one that got it blocked.
struct Round {
    passed_us: Vec<f64>,
    blocked_us: Vec<f64>,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    // On a thread of its own: the other scenarios need both cores.
    let ended = || Error::Load(std::io::Error::other("the measurement ended by a panic"));
    std::thread::scope(|scope| scope.spawn(|| measure_all(lab)).join().map_err(|_| ended())?)
}

fn measure_all(lab: &Lab) -> Result<Outcome, Error> {
    pin_to_one_core()?;
    let rounds = lab.choose(15, 3);
    let mut all = Vec::new();
    for round in 0..rounds {
        let measured = measure(round as u64).ok_or(Error::Nothing("the chain"))?;
        let median =
            |values: &[f64]| Spread::of(values.iter().copied()).map_or(f64::NAN, |spread| spread.median);
        let what = format!(
            "passed {:.2} us, blocked {:.2} us",
            median(&measured.passed_us),
            median(&measured.blocked_us)
        );
        lab.progress(round + 1, rounds, &what);
        all.push(measured);
    }
    outcome(&all)
}

fn measure(seed: u64) -> Option<Round> {
    let mut settings = Settings::default();
    for rule in &mut settings.rules {
        if rule.reason == tidegate_core::Reason::RequestRate {
            rule.limit = ALLOWED;
        }
    }
    let defence = Defence::new(settings, seed, [7; 32]);
    let chain = defence.chain(0, 1);
    let request = browser_request(REQUEST_BYTES);
    let mut parser = RequestParser::new(HeadLimits::default());
    let mut scratch = Vec::new();
    let mut round = Round { passed_us: Vec::new(), blocked_us: Vec::new() };
    for number in 0..CLIENTS {
        let address = IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + number * 4099));
        let peer = Peer { address, via: Via::Direct };
        let (client, _) = chain.connect(peer, 0);
        for index in 0..=ALLOWED {
            let began = Instant::now();
            parser.reset();
            let Ok(Progress::Complete { .. }) = parser.parse(&request) else { return None };
            let head = parser.head(&request);
            let normalized = normalize(&head, Personality::Strict, &mut scratch).ok()?;
            let fields = HeadFields(&head);
            let view = RequestView {
                method: head.method_bytes,
                path: normalized.path,
                reading: None,
                query: normalized.query,
                has_body: false,
                fields: &fields,
            };
            let decision = chain.request(client, peer, &view, 0);
            let took_us = began.elapsed().as_secs_f64() * 1e6;
            match decision.verdict {
                // The first two clients are alone, and nobody is in anybody's way.
                Verdict::Block(_) if index == ALLOWED => round.blocked_us.push(took_us),
                Verdict::Continue if index + 1 == ALLOWED => round.passed_us.push(took_us),
                _ => {}
            }
        }
    }
    (round.blocked_us.len() as u32 >= CLIENTS - 2).then_some(round)
}

fn outcome(rounds: &[Round]) -> Result<Outcome, Error> {
    let medians = |values: fn(&Round) -> &Vec<f64>| {
        let of = |round: &Round| Spread::of(values(round).iter().copied()).map(|spread| spread.median);
        Spread::of(rounds.iter().filter_map(of)).ok_or(Error::Nothing("the chain"))
    };
    let blocked = medians(|round| &round.blocked_us)?;
    let passed = medians(|round| &round.passed_us)?;
    let mut raw = Table::new(["round", "request", "median_us", "least_us", "greatest_us"]);
    for (index, round) in rounds.iter().enumerate() {
        for (name, values) in [("passed", &round.passed_us), ("blocked", &round.blocked_us)] {
            let Some(spread) = Spread::of(values.iter().copied()) else { continue };
            raw.row([
                (index + 1).to_string(),
                name.to_owned(),
                format!("{:.3}", spread.median),
                format!("{:.3}", spread.least),
                format!("{:.3}", spread.greatest),
            ]);
        }
    }
    let mut summary = Table::new(["request", "µs to the verdict"]);
    summary.row(["let pass".to_owned(), passed.text(2)]);
    summary.row(["gets its client blocked".to_owned(), blocked.text(2)]);
    let check = Check {
        what: "4 µs to the time from the last byte to the verdict that blocks".to_owned(),
        ratio: MOST_US / blocked.median,
        at_least: 1.0,
    };
    let note =
        format!("a block takes {:.2} µs, a request that is let pass {:.2} µs", blocked.median, passed.median);
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot(rounds))],
        verdict: Claim::of(&[check]).noting(&note),
        servers: Vec::new(),
    })
}

/// How many of all requests took at most how long.
fn plot(rounds: &[Round]) -> Plot {
    let curve = |name: &str, values: fn(&Round) -> &Vec<f64>| {
        let mut all: Vec<f64> = rounds.iter().flat_map(|round| values(round).iter().copied()).collect();
        all.sort_by(f64::total_cmp);
        let at = |percent: usize| all.get(all.len() * percent / 100).copied();
        let point = |percent: usize| Some(Point::exact(at(percent)?, percent as f64));
        Series { name: name.to_owned(), points: (1..100).filter_map(point).collect() }
    };
    Plot {
        title: "Time from a request's last byte to the verdict".to_owned(),
        x: "µs".to_owned(),
        x_log: false,
        y: "% of requests within".to_owned(),
        series: vec![
            curve("gets its client blocked", |round| &round.blocked_us),
            curve("let pass", |round| &round.passed_us),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_client_that_has_company_is_blocked_at_the_request_beyond_its_limit() {
        let round = measure(1).unwrap();
        assert!(round.blocked_us.len() as u32 >= CLIENTS - 2);
        assert_eq!(outcome(&[round]).unwrap().summary.len(), 2);
    }
}
