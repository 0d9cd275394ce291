//! Establishing 20,000 connections while each sends (Tempesta §5.1, Figure 3).

use std::time::Duration;

use super::tempesta::{BEHIND_BARE, PAPER};
use crate::load::Load;
use crate::plot::{Plot, Point, Series};
use crate::server::{Kind, Servers, bound_on, connections, short_request};
use crate::stats::Spread;
use crate::table::{Table, thousands};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const KINDS: [Kind; 2] = [Kind::Bare, Kind::Tidegate];
/// Requests on each connection, from the moment it is established.
const MESSAGES: u32 = 20;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Points of a curve.
const POINTS: usize = 100;

/// Connections of the paper.
const WANTED: u32 = 20_000;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "tempesta-fig3",
    paper: &PAPER,
    figure: "Figure 3",
    claim: "While 20,000 connections are established and each sends, tidegate is at most 15 % behind a bare epoll \
            server in connections per CPU-second",
    published: "A client establishes 20,000 connections and sends 64-byte messages on each from the moment it is \
                established: with synchronous sockets it takes less than 2 s, with kernel sockets over 9 s, with \
                user-space sockets longer.",
    method: "Every connection sends 20 requests of 64 bytes, one after the other, from the moment it is established, \
             and stays open: so the work is the same for every server, and server CPU per connection comprises its 20 \
             requests. A connection counts as established when its first answer has come, which takes the server's \
             accept; the kernel alone completes the handshake. At most 256 connections wait for their first answer at \
             once. A server process holds all connections; where its limit on descriptors does not allow for 20,000, \
             there are 200 fewer than that limit. The load is two processes on one core, with 250 connections from \
             each of 80 addresses. The curve is that of the round in the middle.",
    run,
};

struct Run {
    kind: Kind,
    round: usize,
    /// For each connection, when it was established, in seconds after the start; ascending.
    established_s: Vec<f64>,
    cpu_us_per_connection: f64,
}

impl Run {
    /// Connections established in a second, from the start to the last one.
    fn rate(&self) -> f64 {
        self.established_s.last().map_or(f64::NAN, |last| self.established_s.len() as f64 / last)
    }

    /// About [`POINTS`] points of the curve: seconds and connections established by then.
    fn curve(&self) -> impl Iterator<Item = (f64, usize)> {
        let count = self.established_s.len();
        (1..=POINTS).filter_map(move |step| {
            let established = count * step / POINTS;
            Some((*self.established_s.get(established.checked_sub(1)?)?, established))
        })
    }
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let count = connections(WANTED);
    let rounds = lab.choose(7, 2);
    let servers = Servers::start(lab, &KINDS, 64)?;
    let mut runs: Vec<Run> = Vec::new();
    for round in 0..rounds {
        for index in (0..KINDS.len()).map(|index| (index + round) % KINDS.len()) {
            let peer = &servers.peers()[index];
            let mut load = Load::start(peer.address(), count, &short_request(peer.address()))?;
            let before = peer.cpu_s().map_err(Error::Server)?;
            let report = load.establish(MESSAGES, TIMEOUT)?;
            let cpu_s = peer.cpu_s().map_err(Error::Server)? - before;
            drop(load);
            servers.settle()?;
            let seconds = |at_ns: &u64| at_ns.saturating_sub(report.began_at_ns) as f64 / 1e9;
            let run = Run {
                kind: KINDS[index],
                round,
                established_s: report.established_at_ns.iter().map(seconds).collect(),
                cpu_us_per_connection: cpu_s * 1e6 / f64::from(count),
            };
            let what = format!(
                "round {}: {:10} {:6.0} connections/s {:6.1} us CPU",
                round + 1,
                run.kind.label(),
                run.rate(),
                run.cpu_us_per_connection
            );
            runs.push(run);
            lab.progress(runs.len(), rounds * KINDS.len(), &what);
        }
    }
    outcome(&runs, count, servers.versions())
}

fn outcome(runs: &[Run], count: u32, servers: Vec<String>) -> Result<Outcome, Error> {
    let efficiency = ratio(runs, |run| 1.0 / run.cpu_us_per_connection).ok_or(Error::Nothing("the load"))?;
    let rate = ratio(runs, Run::rate).ok_or(Error::Nothing("the load"))?;
    let check = Check {
        what: format!("connections per CPU-second to bare epoll's, {} connections", thousands(count.into())),
        ratio: efficiency.median,
        at_least: BEHIND_BARE,
    };
    let note = format!("connections established per second to bare epoll's: {}", rate.text(2));
    let title = format!("{} connections established while each sends", thousands(count.into()));
    let plot = Plot {
        title,
        x: "seconds".to_owned(),
        x_log: false,
        y: "connections established".to_owned(),
        series: KINDS.iter().filter_map(|kind| Some(curve(middle(runs, *kind)?))).collect(),
    };
    Ok(Outcome {
        raw: raw(runs),
        summary: summary(runs),
        plots: vec![(None, plot)],
        verdict: Verdict::of(&[check]).noting(&note).noting(&bound_on(count, WANTED)),
        servers,
    })
}

fn of(runs: &[Run], kind: Kind) -> impl Iterator<Item = &Run> {
    runs.iter().filter(move |run| run.kind == kind)
}

/// tidegate's figure as a multiple of bare epoll's, each round by itself.
fn ratio(runs: &[Run], value: impl Fn(&Run) -> f64) -> Option<Spread> {
    Spread::of(of(runs, Kind::Tidegate).filter_map(|own| {
        let bare = of(runs, Kind::Bare).find(|bare| bare.round == own.round)?;
        Some(value(own) / value(bare))
    }))
}

/// The run with the middle rate.
fn middle(runs: &[Run], kind: Kind) -> Option<&Run> {
    let mut own: Vec<&Run> = of(runs, kind).collect();
    own.sort_by(|a, b| a.rate().total_cmp(&b.rate()));
    own.get(own.len() / 2).copied()
}

fn curve(run: &Run) -> Series {
    let points = run.curve().map(|(seconds, established)| Point::exact(seconds, established as f64));
    Series {
        name: run.kind.label().to_owned(),
        points: std::iter::once(Point::exact(0.0, 0.0)).chain(points).collect(),
    }
}

fn raw(runs: &[Run]) -> Table {
    let mut table =
        Table::new(["round", "server", "seconds", "connections_established", "cpu_us_per_connection"]);
    for run in runs {
        for (seconds, established) in run.curve() {
            table.row([
                (run.round + 1).to_string(),
                run.kind.label().to_owned(),
                format!("{seconds:.4}"),
                established.to_string(),
                format!("{:.2}", run.cpu_us_per_connection),
            ]);
        }
    }
    table
}

fn summary(runs: &[Run]) -> Table {
    let mut table =
        Table::new(["server", "connections established/s", "seconds for all", "CPU µs/connection"]);
    for kind in KINDS {
        let text = |value: fn(&Run) -> f64, digits| {
            Spread::of(of(runs, kind).map(value)).map_or(String::new(), |spread| spread.text(digits))
        };
        table.row([
            kind.label().to_owned(),
            text(Run::rate, 0),
            text(|run| run.established_s.last().copied().unwrap_or(f64::NAN), 2),
            text(|run| run.cpu_us_per_connection, 1),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_of(kind: Kind, round: usize, last_s: f64, cpu_us_per_connection: f64) -> Run {
        let established_s = (1..=1000).map(|index| last_s * f64::from(index) / 1000.0).collect();
        Run { kind, round, established_s, cpu_us_per_connection }
    }

    fn runs() -> Vec<Run> {
        vec![
            run_of(Kind::Bare, 0, 1.0, 80.0),
            run_of(Kind::Tidegate, 0, 1.25, 100.0),
            run_of(Kind::Tidegate, 1, 1.25, 100.0),
            run_of(Kind::Bare, 1, 1.0, 80.0),
        ]
    }

    #[test]
    fn the_claim_is_about_cpu_and_the_rate_is_noted() {
        let outcome = outcome(&runs(), 1000, Vec::new()).unwrap();
        assert!(!outcome.verdict.holds, "0.8 is more than 15 % behind");
        assert!(outcome.verdict.text.contains("per second to bare epoll's: 0.80 (0.80–0.80)"));
        assert_eq!(outcome.raw.len(), 4 * POINTS);
        assert_eq!(outcome.summary.len(), 2);
    }

    #[test]
    fn a_curve_ends_with_the_last_connection() {
        let run = run_of(Kind::Bare, 0, 2.0, 1.0);
        assert_eq!(run.rate(), 500.0);
        assert_eq!(run.curve().last(), Some((2.0, 1000)));
        let few = Run { established_s: vec![0.5, 1.0], ..run };
        assert_eq!(few.curve().last(), Some((1.0, 2)));
    }

    #[test]
    fn without_connections_there_is_no_outcome() {
        assert!(outcome(&[], 0, Vec::new()).is_err());
    }
}
