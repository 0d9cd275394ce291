//! SYN policing protects a preferred client from 250 greedy ones (§4.1, Figure 5).

use std::time::Duration;

use super::ksd::{PAPER, closed, curves, plot, rates, text, time};
use crate::overload::{Costs, Group, Guard, Pace, Server, Testbed, by_source, load, only, rules};
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// Accepted connections per second of each of the five greedy hosts.
const RATES: [f64; 6] = [300.0, 200.0, 150.0, 100.0, 50.0, 25.0];
const QUICK: [f64; 2] = [300.0, 25.0];
/// 1,000 requests per second.
const WORKERS: usize = 10;
const COSTS: Costs =
    Costs { plain: Duration::from_millis(10), dynamic: Duration::from_millis(10), body_bytes: 8192 };
/// What two measurements of the same may differ by.
const NOISE: f64 = 0.97;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "ksd-fig5",
    paper: &PAPER,
    figure: "Figure 5",
    claim: "As 250 greedy clients are policed from 300 to 25 connections/s a host, the preferred client's throughput \
            rises monotonically, and at 25/s it has at least 99 % of what it has alone",
    published: "A client that replays a trace competes with five machines of 50 Webstone clients; without policing it \
                has 6 KB/s; from 300 to 25 requests/s it rises from 100 to 800 KB/s.",
    method: "The preferred host has two clients, five greedy hosts have 50 each; all ask for 8 KB as fast as they are \
             answered, the greedy ones anew after 400 ms. The server has ten workers and 10 ms a request. Rates are \
             per greedy host, as a rule with burst 5 for each. The lowest rate and the preferred clients alone take \
             turns three times, and the medians are compared. Two neighbouring rates count as rising if the lower one \
             gives at least 97 % of the higher one's throughput, which is what two runs of the same differ by. Greedy \
             clients begin at any time within their patience. If all of them began at once, they would come back at \
             once every 400 ms, and find all their buckets full: five bursts of five, at once, for ten workers, so \
             that the preferred clients wait for a worker's 10 ms in each 400. That is shown as \"in step\" and is not \
             judged: it is what a burst costs (Figure 6), not a rate.",
    run,
};

/// Turns of the lowest rate and of the preferred clients alone.
const TURNS: usize = 3;

struct Row {
    what: &'static str,
    rate: Option<f64>,
    preferred: f64,
    greedy: f64,
}

impl Row {
    fn name(&self) -> String {
        self.rate.map_or(String::new(), |rate| format!("{rate:.0}/s")) + self.what
    }
}

/// The row whose preferred clients had the middle throughput.
fn middle(mut rows: Vec<Row>) -> Result<Row, Error> {
    rows.sort_by(|a, b| a.preferred.total_cmp(&b.preferred));
    let middle = rows.len() / 2;
    rows.into_iter().nth(middle).ok_or(Error::Nothing("the load"))
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bed = Testbed::new()?;
    let clients = |greedy: Pace| -> Vec<Group> {
        let greedy = |network| Group { pace: greedy, ..closed(network, 50, "/object", 400) };
        std::iter::once(closed(1, 2, "/object", 3000)).chain((2..7).map(greedy)).collect()
    };
    let (all, in_step) = (clients(Pace::Scattered), clients(Pace::Closed));
    let (passing, compared) = (time(lab, 1000, 2500, 400), time(lab, 500, 4000, 400));
    let measured = lab.choose(&RATES[..], &QUICK[..]);
    let turns = lab.choose(TURNS, 1);
    let (last, higher) = measured.split_last().ok_or(Error::Nothing("the load"))?;
    let guard = Guard::attach(&bed, &rules(Vec::new(), Vec::new()))?;
    let (mut step, steps) = (0, higher.len() + 2 + 2 * turns);
    let mut measure = |what, groups: &[_], rate: Option<f64>, time| -> Result<Row, Error> {
        let policed = (2..7).filter_map(|network| Some(by_source(network, only(rate?, 5), None))).collect();
        guard.replace(&rules(policed, Vec::new()))?;
        // What waits in the accept queue of one run is not the next one's.
        let _server = Server::start(&bed, bed.address(), WORKERS, COSTS)?;
        let rates = rates(&load(&bed, bed.address(), groups, time)?);
        let row = Row {
            what,
            rate,
            preferred: rates[0],
            greedy: rates[1..].iter().fold(0.0, |sum, rate| sum + rate),
        };
        step += 1;
        let (name, preferred, greedy) = (row.name(), row.preferred, row.greedy);
        lab.progress(step, steps, &format!("{name}: preferred {preferred:.1}/s, greedy {greedy:.1}/s"));
        Ok(row)
    };
    let unpoliced = measure("no policing", &all, None, passing)?;
    let mut rows =
        higher.iter().map(|rate| measure("", &all, Some(*rate), passing)).collect::<Result<Vec<_>, _>>()?;
    let (mut alone, mut lowest) = (Vec::new(), Vec::new());
    for _ in 0..turns {
        alone.push(measure("alone", &all[..1], None, compared)?);
        lowest.push(measure("", &all, Some(*last), compared)?);
    }
    rows.push(middle(lowest)?);
    let in_step = measure(" in step", &in_step, Some(*last), passing)?;
    outcome(&middle(alone)?, &unpoliced, &rows, &in_step)
}

fn outcome(alone: &Row, unpoliced: &Row, rows: &[Row], in_step: &Row) -> Result<Outcome, Error> {
    let last = rows.last().ok_or(Error::Nothing("the load"))?;
    let mut checks = vec![Check {
        what: "preferred throughput at the lowest rate to that alone".into(),
        ratio: last.preferred / alone.preferred,
        at_least: 0.99,
    }];
    for pair in rows.windows(2) {
        checks.push(Check {
            what: format!(
                "preferred throughput at {:.0}/s to that at {:.0}/s",
                pair[1].rate.unwrap_or(0.0),
                pair[0].rate.unwrap_or(0.0)
            ),
            ratio: pair[1].preferred / pair[0].preferred,
            at_least: NOISE,
        });
    }
    let mut raw = Table::new(["greedy_rate_per_host_per_s", "preferred_per_s", "greedy_per_s"]);
    let mut summary = Table::new(["greedy hosts may have", "preferred/s", "greedy/s together"]);
    for row in [alone, unpoliced].into_iter().chain(rows).chain([in_step]) {
        let rate = row.rate.map_or(String::new(), |rate| rate.to_string());
        raw.row([rate + row.what, text(row.preferred), text(row.greedy)]);
        summary.row([row.name(), text(row.preferred), text(row.greedy)]);
    }
    let series = curves(
        rows,
        &["preferred", "greedy together", "preferred alone"],
        |row| row.rate.unwrap_or(0.0),
        |row, index| [row.preferred, row.greedy, alone.preferred][index],
    );
    let note = format!(
        "alone {:.0}/s, beside unpoliced greedy clients {:.0}/s",
        alone.preferred, unpoliced.preferred
    );
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(
            None,
            plot("SYN policing of greedy clients", "connections/s of each greedy host", "requests/s", series),
        )],
        verdict: Verdict::of(&checks).noting(&note),
        servers: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(rate: f64, preferred: f64) -> Row {
        Row { what: "", rate: Some(rate), preferred, greedy: 1.0 }
    }

    #[test]
    fn throughput_must_rise_and_reach_what_it_is_alone() {
        let alone = Row { what: "alone", rate: None, preferred: 200.0, greedy: 0.0 };
        let in_step = row(25.0, 100.0);
        let holds = |preferred: [f64; 3]| {
            let rows: Vec<Row> =
                [300.0, 100.0, 25.0].iter().zip(preferred).map(|(rate, got)| row(*rate, got)).collect();
            outcome(&alone, &alone, &rows, &in_step).unwrap().verdict.holds
        };
        assert!(holds([20.0, 150.0, 199.0]));
        assert!(!holds([20.0, 199.0, 150.0]) && !holds([20.0, 150.0, 190.0]));
    }

    #[test]
    fn of_three_turns_the_middle_one_counts() {
        let turns = [190.0, 120.0, 192.0].map(|preferred| row(25.0, preferred));
        assert_eq!(middle(turns.into()).unwrap().preferred, 190.0);
    }
}
