//! SYN policing protects a preferred client from 250 greedy ones (§4.1, Figure 5).

use std::time::Duration;

use super::ksd::{PAPER, closed, curves, plot, rates, text, time};
use crate::overload::{Costs, Guard, Server, Testbed, by_source, load, only, rules};
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
    claim: "As 250 greedy clients are policed from 300 to 25 connections/s a host, the preferred client's throughput rises \
            monotonically, and at 25/s it has at least 99 % of what it has alone",
    published: "A client that replays a trace competes with five machines of 50 Webstone clients; without policing it has \
                6 KB/s; from 300 to 25 requests/s it rises from 100 to 800 KB/s.",
    method: "The preferred host has two clients, five greedy hosts have 50 each; all ask for 8 KB as fast as they are \
             answered, the greedy ones anew after 400 ms. The server has ten workers and 10 ms a request. Rates are per greedy host, as a rule with burst 5 \
             for each. Two neighbouring rates count as rising if the lower one gives at least 97 % of the higher one's \
             throughput, which is what two runs of the same differ by.",
    run,
};

struct Row {
    rate: Option<f64>,
    preferred: f64,
    greedy: f64,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bed = Testbed::new()?;
    let time = time(lab, 1500, 4000, 400);
    let all: Vec<_> = std::iter::once(closed(1, 2, "/object", 3000))
        .chain((2..7).map(|network| closed(network, 50, "/object", 400)))
        .collect();
    let measured = lab.choose(&RATES[..], &QUICK[..]);
    let guard = Guard::attach(&bed, &rules(Vec::new(), Vec::new()))?;
    let mut step = 0;
    let mut measure = |groups: &[_], rate: Option<f64>| -> Result<Row, Error> {
        let policed = (2..7).filter_map(|network| Some(by_source(network, only(rate?, 5), None))).collect();
        guard.replace(&rules(policed, Vec::new()))?;
        // What waits in the accept queue of one run is not the next one's.
        let _server = Server::start(&bed, bed.address(), WORKERS, COSTS)?;
        let rates = rates(&load(&bed, bed.address(), groups, time)?);
        let row =
            Row { rate, preferred: rates[0], greedy: rates[1..].iter().fold(0.0, |sum, rate| sum + rate) };
        step += 1;
        let what = rate.map_or("no policing".to_owned(), |rate| format!("{rate:.0}/s a host"));
        lab.progress(
            step,
            measured.len() + 2,
            &format!("{what}: preferred {:.0}/s, greedy {:.0}/s", row.preferred, row.greedy),
        );
        Ok(row)
    };
    let alone = measure(&all[..1], None)?;
    let unpoliced = measure(&all, None)?;
    let rows = measured.iter().map(|rate| measure(&all, Some(*rate))).collect::<Result<Vec<_>, _>>()?;
    outcome(&alone, &unpoliced, &rows)
}

fn outcome(alone: &Row, unpoliced: &Row, rows: &[Row]) -> Result<Outcome, Error> {
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
    for (name, row) in
        [("alone", alone), ("no policing", unpoliced)].into_iter().chain(rows.iter().map(|row| ("", row)))
    {
        let rate = row.rate.map_or(name.to_owned(), |rate| format!("{rate:.0}/s"));
        raw.row([
            row.rate.map_or(name.to_owned(), |rate| rate.to_string()),
            text(row.preferred),
            text(row.greedy),
        ]);
        summary.row([rate, text(row.preferred), text(row.greedy)]);
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
        Row { rate: Some(rate), preferred, greedy: 1.0 }
    }

    #[test]
    fn throughput_must_rise_and_reach_what_it_is_alone() {
        let alone = Row { rate: None, preferred: 200.0, greedy: 0.0 };
        let holds = |preferred: [f64; 3]| {
            let rows: Vec<Row> =
                [300.0, 100.0, 25.0].iter().zip(preferred).map(|(rate, got)| row(*rate, got)).collect();
            outcome(&alone, &alone, &rows).unwrap().verdict.holds
        };
        assert!(holds([20.0, 150.0, 199.0]));
        assert!(!holds([20.0, 199.0, 150.0]) && !holds([20.0, 150.0, 190.0]));
    }
}
