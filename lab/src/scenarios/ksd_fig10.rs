//! Two classes by URL, as the load grows (§4.5, Figure 10): requests wait for an upstream in the order of their
//! classes.

use std::process::Command;
use std::time::Duration;

use super::ksd::{PAPER, behind_tidegate, closed, curves, plot, text, time};
use crate::overload::{Asked, Costs, Program, Server, Testbed, load};
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const CLIENTS: [usize; 3] = [5, 20, 40];
/// With rules and without take turns, so that what else the machine does meets both.
const ROUNDS: usize = 2;
const QUICK: [usize; 2] = [5, 30];
const WORKERS: usize = 20;
const COSTS: Costs =
    Costs { plain: Duration::from_millis(30), dynamic: Duration::from_millis(30), body_bytes: 8192 };
const RULES: &str =
    "[[request]]\npath = \"/high/*\"\npriority = 1\n[[request]]\npath = \"/low/*\"\npriority = 2\n";

pub(super) const SCENARIO: Scenario = Scenario {
    name: "ksd-fig10",
    paper: &PAPER,
    figure: "Figure 10",
    claim: "With two classes by URL the high one's response time stays within 20 % of its value alone, the low one is \
            not served before it, and throughput is within 3 % of that without rules",
    published: "The class with the low URL gets less, and almost nothing beyond 40 clients of the high one; throughput \
                is slightly lower than with priorities by connection.",
    method: "tidegate passes everything on to a server of 20 workers of 30 ms, at most 20 requests at once; what has \
             to wait for that waits in the order of the rules' priorities. The same load runs without rules, the two \
             taking turns twice. Clients of both classes come from the same network.",
    run,
};

struct Row {
    clients: usize,
    alone: Asked,
    /// High and low.
    ruled: Vec<Asked>,
    unruled: f64,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bed = Testbed::new()?;
    let time = time(lab, 500, 2000, 500);
    let origin = ([127, 0, 0, 1], 9000).into();
    let _server = Server::start(&bed, origin, WORKERS, COSTS)?;
    let numbers = lab.choose(&CLIENTS[..], &QUICK[..]);
    let folder = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
    let start = |rules: &str| -> Result<Program, Error> {
        let command: Command = behind_tidegate(lab, folder.path(), WORKERS, rules)?;
        bed.start("tidegate", &command)
    };
    let mut rows: Vec<Row> = Vec::new();
    for clients in numbers {
        let both = ["/high/object", "/low/object"].map(|path| closed(1, *clients, path, 10_000));
        let mut row = Row { clients: *clients, alone: Asked::default(), ruled: Vec::new(), unruled: 0.0 };
        for _ in 0..ROUNDS {
            let unruled = start("")?;
            let asked = load(&bed, bed.address(), &both, time)?;
            row.unruled += asked.iter().map(Asked::rate).sum::<f64>() / ROUNDS as f64;
            drop(unruled);
            let _ruled = start(RULES)?;
            let asked = load(&bed, bed.address(), &both, time)?;
            if row.ruled.is_empty() {
                row.ruled = asked;
                row.alone = load(&bed, bed.address(), &both[..1], time)?.remove(0);
            } else {
                row.ruled.iter_mut().zip(asked).for_each(|(all, more)| all.add(more));
            }
        }
        let what = format!(
            "{clients} clients a class: high {:.0}/s {:.0} ms, low {:.0}/s {:.0} ms, without rules {:.0}/s",
            row.ruled[0].rate(),
            row.ruled[0].median_ms(),
            row.ruled[1].rate(),
            row.ruled[1].median_ms(),
            row.unruled
        );
        rows.push(row);
        lab.progress(rows.len(), numbers.len(), &what);
    }
    outcome(&rows)
}

fn outcome(rows: &[Row]) -> Result<Outcome, Error> {
    let last = rows.last().ok_or(Error::Nothing("the load"))?;
    let total = |row: &Row| row.ruled.iter().map(Asked::rate).sum::<f64>();
    let mut checks = Vec::new();
    for row in rows {
        checks.push(Check {
            what: format!(
                "response time alone to that beside the low class, {} clients a class",
                row.clients
            ),
            ratio: row.alone.median_ms() / row.ruled[0].median_ms(),
            at_least: 1.0 / 1.2,
        });
        checks.push(Check {
            what: format!("throughput to that without rules, {} clients a class", row.clients),
            ratio: total(row) / row.unruled,
            at_least: 0.97,
        });
    }
    checks.push(Check {
        what: "rate of the high class to the low one's, most clients".into(),
        ratio: (last.ruled[0].rate() / last.ruled[1].rate()).min(1e6),
        at_least: 5.0,
    });
    let mut raw = Table::new(["clients_per_class", "class", "answered_per_s", "median_ms"]);
    let mut summary = Table::new([
        "clients a class",
        "high alone ms",
        "high ms",
        "low ms",
        "high/s",
        "low/s",
        "together/s",
        "without rules/s",
    ]);
    for row in rows {
        for (name, asked) in [("high alone", &row.alone), ("high", &row.ruled[0]), ("low", &row.ruled[1])] {
            raw.row([row.clients.to_string(), name.into(), text(asked.rate()), text(asked.median_ms())]);
        }
        raw.row([row.clients.to_string(), "both without rules".into(), text(row.unruled), String::new()]);
        summary.row([
            row.clients.to_string(),
            text(row.alone.median_ms()),
            text(row.ruled[0].median_ms()),
            text(row.ruled[1].median_ms()),
            text(row.ruled[0].rate()),
            text(row.ruled[1].rate()),
            text(total(row)),
            text(row.unruled),
        ]);
    }
    let series = curves(
        rows,
        &["high", "low", "both without rules"],
        |row| row.clients as f64,
        |row, index| row.ruled.get(index).map_or(row.unruled, Asked::rate),
    );
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot("Two classes by URL", "clients a class", "requests/s", series))],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(rate: u64, ms: f64) -> Asked {
        Asked { answered: rate, latencies_ms: vec![ms], seconds: 1.0, ..Asked::default() }
    }

    #[test]
    fn the_low_class_must_wait_and_nothing_be_lost() {
        let holds = |low, unruled| {
            let row = Row {
                clients: 30,
                alone: asked(600, 31.0),
                ruled: vec![asked(600, 33.0), asked(low, 900.0)],
                unruled,
            };
            outcome(&[row]).unwrap().verdict.holds
        };
        assert!(holds(20, 630.0) && !holds(20, 660.0) && !holds(300, 900.0));
    }
}
