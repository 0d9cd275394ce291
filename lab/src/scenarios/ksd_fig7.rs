//! Three classes with an accept queue each, as the load grows (§4.3, Figures 7 and 8).

use std::time::Duration;

use super::ksd::{PAPER, closed, curves, plot, text, time};
use crate::overload::{Asked, Costs, Guard, Server, Testbed, by_source, load, rules};
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const CLIENTS: [usize; 5] = [2, 5, 10, 20, 40];
const QUICK: [usize; 2] = [2, 20];
const WORKERS: usize = 20;
const COSTS: Costs =
    Costs { plain: Duration::from_millis(30), dynamic: Duration::from_millis(30), body_bytes: 8192 };
const CLASSES: [&str; 3] = ["high", "medium", "low"];

pub(super) const SCENARIO: Scenario = Scenario {
    name: "ksd-fig7",
    paper: &PAPER,
    figure: "Figures 7 and 8",
    claim: "With a prioritized listen queue the high class's response time stays within 20 % of its value without the \
            other classes while those queue",
    published: "Three classes with equally many clients, 50 server processes: with more than 30 clients a class only \
                the high one is served; its response time grows sub-linearly, that of the others exponentially.",
    method: "Each class has a network of clients and an accept queue of its own; 20 workers of 30 ms accept from the \
             highest that has a connection. At each number of clients the high class is measured alone and beside the \
             two others; the median response times are compared.",
    run,
};

struct Row {
    clients: usize,
    alone: Asked,
    classes: Vec<Asked>,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bed = Testbed::new()?;
    let time = time(lab, 700, 2500, 400);
    let classes = (1..4).map(|network| by_source(network, None, Some(network - 1))).collect();
    let guard = Guard::attach(&bed, &rules(classes, Vec::new()))?;
    let numbers = lab.choose(&CLIENTS[..], &QUICK[..]);
    let mut rows = Vec::new();
    for clients in numbers {
        let groups: Vec<_> = (1..4).map(|network| closed(network, *clients, "/object", 10_000)).collect();
        let measure = |groups: &[_]| {
            let queue = guard.listen(&bed, bed.address(), CLASSES.len())?;
            let sockets = queue.listeners().try_clone().map_err(|error| Error::Server(error.to_string()))?;
            let _server = Server::on(sockets.into_sockets(), WORKERS, COSTS);
            load(&bed, bed.address(), groups, time)
        };
        let alone = measure(&groups[..1])?.remove(0);
        let row = Row { clients: *clients, alone, classes: measure(&groups)? };
        let shown: Vec<String> = row
            .classes
            .iter()
            .map(|class| format!("{:.0}/s {:.0} ms", class.rate(), class.median_ms()))
            .collect();
        rows.push(row);
        lab.progress(rows.len(), numbers.len(), &format!("{clients} clients a class: {}", shown.join(", ")));
    }
    outcome(&rows)
}

fn outcome(rows: &[Row]) -> Result<Outcome, Error> {
    let last = rows.last().ok_or(Error::Nothing("the load"))?;
    let mut checks: Vec<Check> = rows
        .iter()
        .map(|row| Check {
            what: format!("response time alone to that beside others, {} clients a class", row.clients),
            ratio: row.alone.median_ms() / row.classes[0].median_ms(),
            at_least: 1.0 / 1.2,
        })
        .collect();
    checks.push(Check {
        what: "rate of the high class to the low one's, most clients".into(),
        ratio: (last.classes[0].rate() / last.classes[2].rate()).min(1e6),
        at_least: 5.0,
    });
    let (raw, summary) = tables(rows);
    let x = |row: &Row| row.clients as f64;
    let throughput = curves(rows, &CLASSES, x, |row, class| row.classes[class].rate());
    let times = curves(rows, &["high", "medium", "low", "high alone"], x, |row, class| {
        row.classes.get(class).unwrap_or(&row.alone).median_ms()
    });
    Ok(Outcome {
        raw,
        summary,
        plots: vec![
            (None, plot("Prioritized listen queue", "clients a class", "requests/s", throughput)),
            (
                Some("times"),
                plot("Prioritized listen queue", "clients a class", "median response time, ms", times),
            ),
        ],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

fn tables(rows: &[Row]) -> (Table, Table) {
    let mut raw = Table::new(["clients_per_class", "class", "answered_per_s", "median_ms", "mean_ms"]);
    let mut summary = Table::new([
        "clients a class",
        "high alone ms",
        "high ms",
        "medium ms",
        "low ms",
        "high/s",
        "medium/s",
        "low/s",
    ]);
    for row in rows {
        for (name, asked) in
            std::iter::once(("high alone", &row.alone)).chain(CLASSES.into_iter().zip(&row.classes))
        {
            raw.row([
                row.clients.to_string(),
                name.into(),
                text(asked.rate()),
                text(asked.median_ms()),
                text(asked.mean_ms()),
            ]);
        }
        let [high, medium, low] = [0, 1, 2].map(|class| &row.classes[class]);
        summary.row([
            row.clients.to_string(),
            text(row.alone.median_ms()),
            text(high.median_ms()),
            text(medium.median_ms()),
            text(low.median_ms()),
            text(high.rate()),
            text(medium.rate()),
            text(low.rate()),
        ]);
    }
    (raw, summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(rate: u64, ms: f64) -> Asked {
        Asked { answered: rate, latencies_ms: vec![ms], seconds: 1.0, ..Asked::default() }
    }

    #[test]
    fn the_high_class_must_not_notice_the_others() {
        let holds = |high_ms, low| {
            let row = Row {
                clients: 2,
                alone: asked(100, 30.0),
                classes: vec![asked(100, high_ms), asked(10, 90.0), asked(low, 300.0)],
            };
            outcome(&[row]).unwrap().verdict.holds
        };
        assert!(holds(35.0, 1));
        assert!(!holds(37.0, 1) && !holds(35.0, 100));
        assert!(holds(35.0, 0), "a class that gets nothing is far behind");
    }
}
