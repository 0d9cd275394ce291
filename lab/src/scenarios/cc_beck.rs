//! The attack named "beck": thousands of slashes (paper §3.1).

use std::time::Duration;

use super::cc::PAPER;
use super::cc_load::{Client, connect, on_load_core};
use super::cc_servers::{Program, Server, object, site};
use crate::plot::{Plot, Point, Series};
use crate::stats::Spread;
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const SLASHES: [usize; 5] = [1, 2_000, 4_000, 8_000, 16_000];
/// The last doubling of the slashes may cost so many times what linear growth would.
const LINEAR: f64 = 1.6;
/// What a round may take where other programs hold the processor.
const ROUND: Duration = Duration::from_secs(1);

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cc-beck",
    paper: &PAPER,
    figure: "§3.1",
    claim: "A URL with many slashes takes linear time, and the server never sees them",
    published: "A URL with thousands of slashes brought Apache to its knees, because the time to strip them grew with \
                the square of their number; with a filter the fix is in one place for every server.",
    method: "nginx behind package, persist and normalize, with a log of what it was asked for; one client asks for a \
             file of 100 bytes with more and more slashes before its name, as many as fit a request line of 16 KiB. \
             What is compared is the time that all processes of the chain and the server spend on a request. Linear \
             means that each doubling of the slashes at most doubles what they add, times 1.6 for the measurement's \
             noise.",
    run,
};

struct Run {
    slashes: usize,
    cpu_us: f64,
    latency_us: f64,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let site = site()?;
    object(site.path(), "small", 100)?;
    on_load_core()?;
    let chain: &[&str] = &["package", "persist", "normalize"];
    let server = Server::start(lab, Program::LoggingNginx, Some(chain), site.path())?;
    let failed = |error| Error::Server(format!("nginx: {error}"));
    let stream = connect(server.address(), None, Duration::from_secs(10)).map_err(failed)?;
    let mut client = Client::over(stream);
    let (rounds, count) = lab.choose((5, 1_000), (2, 100));
    let (mut runs, mut expected) = (Vec::new(), 0);
    for round in 0..rounds {
        for slashes in SLASHES {
            let request = format!("GET {}small HTTP/1.1\r\nHost: lab\r\n\r\n", "/".repeat(slashes));
            let before = server.cpu_s();
            let latencies = client.latencies_us(request.as_bytes(), count, ROUND).map_err(failed)?;
            let cpu_us = (server.cpu_s() - before) * 1e6 / latencies.len() as f64;
            expected += latencies.len();
            runs.push(Run { slashes, cpu_us, latency_us: latencies[latencies.len() / 2] });
        }
        lab.progress(round + 1, rounds, &format!("up to {} slashes", SLASHES[SLASHES.len() - 1]));
    }
    let log = server.file("access.log");
    let asked = |text: &str| {
        let with_slashes = text.lines().filter(|line| line.contains("//")).count();
        (text.lines().count(), with_slashes)
    };
    // nginx writes a line after each response.
    let deadline = std::time::Instant::now() + Duration::from_secs(5);
    let (lines, seen) = loop {
        let text = std::fs::read_to_string(&log).map_err(Error::file("read", &log))?;
        let (lines, seen) = asked(&text);
        if lines >= expected || std::time::Instant::now() > deadline {
            break (lines, seen);
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    outcome(&runs, lines, expected, seen)
}

fn outcome(runs: &[Run], lines: usize, expected: usize, seen: usize) -> Result<Outcome, Error> {
    let of = |slashes: usize, value: fn(&Run) -> f64| {
        Spread::of(runs.iter().filter(|run| run.slashes == slashes).map(value))
    };
    let cpu_us = |slashes| of(slashes, |run| run.cpu_us).map(|spread| spread.median);
    let nothing = || Error::Nothing("the client");
    let none = cpu_us(SLASHES[0]).ok_or_else(nothing)?;
    let added = |slashes| cpu_us(slashes).map(|us| (us - none).max(0.0)).ok_or_else(nothing);
    let (half, whole) = (added(SLASHES[3])?, added(SLASHES[4])?);
    let linear = half.max(1.0) * SLASHES[4] as f64 / SLASHES[3] as f64;
    let checks = [
        Check {
            what: format!("what {} slashes may add to what they do", SLASHES[4]),
            ratio: linear * LINEAR / whole.max(1.0),
            at_least: 1.0,
        },
        Check {
            what: "requests that the server logged, and without slashes, to those sent".to_owned(),
            ratio: (lines.min(expected) - seen.min(lines.min(expected))) as f64 / expected as f64,
            at_least: 1.0,
        },
    ];
    let note = format!(
        "{} slashes add {whole:.1} µs of processor time; of {lines} requests in the server's log {seen} have \
         consecutive slashes",
        SLASHES[4]
    );
    let line = |value: fn(&Run) -> f64| -> Vec<Point> {
        let points = SLASHES.iter().map(|&slashes| Some(Point { x: slashes as f64, y: of(slashes, value)? }));
        points.flatten().collect()
    };
    let plot = Plot {
        title: "Requests with many slashes".to_owned(),
        x: "slashes".to_owned(),
        x_log: false,
        y: "µs a request".to_owned(),
        series: vec![
            Series { name: "processor time".to_owned(), points: line(|run| run.cpu_us) },
            Series { name: "latency, median".to_owned(), points: line(|run| run.latency_us) },
        ],
    };
    let mut raw = Table::new(["slashes", "cpu_us", "latency_us"]);
    for run in runs {
        raw.row([run.slashes.to_string(), format!("{:.2}", run.cpu_us), format!("{:.2}", run.latency_us)]);
    }
    let mut summary = Table::new(["slashes", "processor time, µs", "latency, µs"]);
    for slashes in SLASHES {
        let text = |value| of(slashes, value).map_or(String::new(), |spread| spread.text(1));
        summary.row([slashes.to_string(), text(|run| run.cpu_us), text(|run| run.latency_us)]);
    }
    let verdict = Verdict::of(&checks).noting(&note);
    Ok(Outcome { raw, summary, plots: vec![(None, plot)], verdict, servers: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(us: impl Fn(f64) -> f64) -> Vec<Run> {
        SLASHES
            .map(|slashes| Run { slashes, cpu_us: us(slashes as f64), latency_us: 1.0 })
            .into_iter()
            .collect()
    }

    #[test]
    fn linear_time_holds_quadratic_time_and_a_slash_that_came_through_do_not() {
        let linear = runs(|slashes| 50.0 + slashes / 100.0);
        assert!(outcome(&linear, 10, 10, 0).unwrap().verdict.holds);
        assert!(!outcome(&linear, 10, 10, 1).unwrap().verdict.holds);
        assert!(!outcome(&linear, 9, 10, 0).unwrap().verdict.holds, "a request is missing in the log");
        let quadratic = runs(|slashes| 50.0 + slashes * slashes / 1e6);
        assert!(!outcome(&quadratic, 10, 10, 0).unwrap().verdict.holds);
    }
}
