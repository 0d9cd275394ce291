//! The request parser beside another (Tempesta §5.2, Figure 5).

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::parsers::{Parser, browser_request};
use super::tempesta::PAPER;
use crate::plot::{Plot, Point, Series};
use crate::server::pin_to_one_core;
use crate::stats::Spread;
use crate::table::{Table, thousands};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const SIZES_BYTES: [usize; 5] = [128, 373, 700, 1381, 2800];
/// Where the claim is made: a first request to a site, and the request of the paper.
const CLAIMED_BYTES: [usize; 2] = [373, 1381];

pub(super) const SCENARIO: Scenario = Scenario {
    name: "tempesta-fig5",
    paper: &PAPER,
    figure: "Figure 5",
    claim: "On browsers' requests of 373 and 1,381 bytes tidegate's parser is at least as fast as httparse",
    published: "A million runs over a request of 1,381 bytes in the cache of the processor: the hybrid state machine \
                takes 4,541 ms for the header lines and 2,910 ms for the request line, the switch-driven one of nginx \
                6,101 ms and 5,378 ms.",
    method: "Whole heads instead of single functions, in turn in batches on one core, with the request in the \
             processor's cache. What counts is the processor time of the thread. httparse is the parser that most Rust \
             servers use, here in both of its forms. tidegate's also recognizes known field names, and checks Host, \
             framing and limits, all of which httparse leaves to others. Finding the ends of lines is the limit: the \
             least that reading a head takes.",
    run,
};

#[derive(Clone, Copy)]
struct Timing {
    parser: Parser,
    size_bytes: usize,
    round: usize,
    ns_per_request: f64,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let rounds = lab.choose(31, 5);
    let batch = Duration::from_millis(lab.choose(20, 4));
    // On a thread of its own, which alone is pinned.
    let timings = std::thread::scope(|scope| {
        let timing = scope.spawn(|| {
            pin_to_one_core()?;
            Ok(time_all(lab, rounds, batch))
        });
        timing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    outcome(&timings)
}

fn time_all(lab: &Lab, rounds: usize, batch: Duration) -> Vec<Timing> {
    let mut timings = Vec::new();
    for (index, size_bytes) in SIZES_BYTES.into_iter().enumerate() {
        let request = browser_request(size_bytes);
        let times = Parser::ALL.map(|parser| times_in(parser, &request, batch));
        for round in 0..rounds {
            for (parser, times) in Parser::ALL.into_iter().zip(times) {
                let ns_per_request = time(parser, &request, times).as_secs_f64() * 1e9 / f64::from(times);
                timings.push(Timing { parser, size_bytes, round, ns_per_request });
            }
        }
        lab.progress(
            index + 1,
            SIZES_BYTES.len(),
            &format!("requests of {} bytes", thousands(size_bytes as u64)),
        );
    }
    timings
}

/// Processor time and not the clock's: another program on the core must not count.
fn time(parser: Parser, request: &[u8], times: u32) -> Duration {
    let now = || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).unwrap_or(0))
    };
    let began = now();
    std::hint::black_box(parser.parse(request, times));
    now().saturating_sub(began)
}

/// How many runs fill a batch, and a warm-up.
fn times_in(parser: Parser, request: &[u8], batch: Duration) -> u32 {
    let mut times = 64;
    loop {
        let elapsed = time(parser, request, times);
        if elapsed * 4 >= batch || times > 1 << 28 {
            return (f64::from(times) * (batch.as_secs_f64() / elapsed.as_secs_f64().max(1e-9))).max(1.0)
                as u32;
        }
        times *= 2;
    }
}

fn outcome(timings: &[Timing]) -> Result<Outcome, Error> {
    let mut checks = Vec::new();
    for size_bytes in CLAIMED_BYTES {
        for httparse in [Parser::Httparse, Parser::HttparseUninit] {
            let ratio = ratio(timings, httparse, size_bytes).ok_or(Error::Nothing("the clock"))?;
            checks.push(Check {
                what: format!("speed on {} bytes, to {}", thousands(size_bytes as u64), httparse.label()),
                ratio: ratio.median,
                at_least: 1.0,
            });
        }
    }
    let plot = |title: &str, y: &str, value: fn(&Timing) -> f64| Plot {
        title: title.to_owned(),
        x: "bytes of the request".to_owned(),
        x_log: true,
        y: y.to_owned(),
        series: Parser::ALL.iter().map(|parser| line(timings, *parser, value)).collect(),
    };
    Ok(Outcome {
        raw: raw(timings),
        summary: summary(timings),
        plots: vec![(
            None,
            plot("Time to parse a request head", "ns per request", |timing| timing.ns_per_request),
        )],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

fn of(timings: &[Timing], parser: Parser, size_bytes: usize) -> impl Iterator<Item = &Timing> {
    timings.iter().filter(move |timing| timing.parser == parser && timing.size_bytes == size_bytes)
}

/// How many times as fast as `other` tidegate's parser is, each round by itself.
fn ratio(timings: &[Timing], other: Parser, size_bytes: usize) -> Option<Spread> {
    Spread::of(of(timings, Parser::Tidegate, size_bytes).filter_map(|own| {
        let other = of(timings, other, size_bytes).find(|other| other.round == own.round)?;
        Some(other.ns_per_request / own.ns_per_request)
    }))
}

fn line(timings: &[Timing], parser: Parser, value: fn(&Timing) -> f64) -> Series {
    let points = SIZES_BYTES.into_iter().filter_map(|size_bytes| {
        let y = Spread::of(of(timings, parser, size_bytes).map(value))?;
        Some(Point { x: size_bytes as f64, y })
    });
    Series { name: parser.label().to_owned(), points: points.collect() }
}

fn raw(timings: &[Timing]) -> Table {
    let mut table = Table::new(["bytes", "round", "parser", "ns_per_request"]);
    for timing in timings {
        table.row([
            timing.size_bytes.to_string(),
            (timing.round + 1).to_string(),
            timing.parser.label().to_owned(),
            format!("{:.1}", timing.ns_per_request),
        ]);
    }
    table
}

fn summary(timings: &[Timing]) -> Table {
    let mut table = Table::new(["bytes", "parser", "ns/request", "tidegate is so many times as fast"]);
    for size_bytes in SIZES_BYTES {
        for parser in Parser::ALL {
            let text = |spread: Option<Spread>, digits| spread.map_or(String::new(), |s| s.text(digits));
            table.row([
                thousands(size_bytes as u64),
                parser.label().to_owned(),
                text(Spread::of(of(timings, parser, size_bytes).map(|timing| timing.ns_per_request)), 0),
                text(ratio(timings, parser, size_bytes), 2),
            ]);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timings(tidegate_ns: f64) -> Vec<Timing> {
        let mut timings = Vec::new();
        for size_bytes in SIZES_BYTES {
            for parser in Parser::ALL {
                let ns_per_request = if parser == Parser::Tidegate { tidegate_ns } else { 100.0 };
                timings.push(Timing { parser, size_bytes, round: 0, ns_per_request });
            }
        }
        timings
    }

    #[test]
    fn as_fast_as_httparse_holds_and_slower_does_not() {
        assert!(outcome(&timings(100.0)).unwrap().verdict.holds);
        let slower = outcome(&timings(101.0)).unwrap();
        assert!(!slower.verdict.holds);
        assert!(slower.verdict.text.starts_with("0 of 4 bounds kept"), "{}", slower.verdict.text);
        assert_eq!(slower.raw.len(), SIZES_BYTES.len() * Parser::ALL.len());
    }

    #[test]
    fn batches_are_never_empty() {
        assert!(times_in(Parser::Lines, &browser_request(128), Duration::ZERO) >= 1);
    }
}
