//! Policing and priority together, so that no class starves (§4.4 and §4.5, Tables 3 and 4).

use std::time::Duration;

use super::ksd::{PAPER, behind_tidegate, client, closed, curves, plot, text, time};
use crate::overload::{Asked, Clients, Costs, Guard, Server, Testbed, by_source, load, only, rules};
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// 400 requests per second.
const WORKERS: usize = 20;
const COSTS: Costs =
    Costs { plain: Duration::from_millis(50), dynamic: Duration::from_millis(100), body_bytes: 8192 };
/// What the high class may have, of Table 3 and of Table 4; `None`: no limit.
const HIGH: [Option<(f64, u32)>; 3] = [None, Some((300.0, 30)), Some((200.0, 20))];
const MEDIUM: (f64, u32) = (60.0, 6);
const DYNAMIC: [Option<(f64, u32)>; 3] = [None, Some((30.0, 10)), Some((10.0, 10))];

pub(super) const SCENARIO: Scenario = Scenario {
    name: "ksd-tables-3-4",
    paper: &PAPER,
    figure: "Tables 3 and 4",
    claim: "With the high class limited no class starves, and limited classes get within 5 % of their configured rates",
    published: "Unlimited, the high class takes 381 connections/s and the others nothing; limited to 300 or 200 it \
                leaves 78.6 and 4.1, or 180 and 13. By URL: 61.7 and 0; limited to 30 or 10 requests/s, 29.0 and 10.2, \
                or 10.1 and 117.",
    method: "Table 3: 150 high-priority clients on three hosts, 30 of medium and 30 of low priority, an accept queue \
             for each class before 20 workers of 50 ms; the medium class is limited to 60/s where the high one is \
             limited. Clients that are kept out try anew after 200 ms. Table 4: tidegate with kernel programs passes \
             on at most 20 requests at once; 40 clients ask for dynamic content of 100 ms with the higher priority, 60 \
             for static content of 50 ms; requests beyond the rate are reset at TC. A class starves if it gets less \
             than half of what its limits and those above leave to it.",
    run,
};

/// One set of limits: for each class its name, its configured rate and what it got.
struct Row {
    table: &'static str,
    limit: String,
    classes: Vec<(&'static str, Option<f64>, f64)>,
    /// What the limits leave to the last class.
    left: Option<f64>,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bed = Testbed::new()?;
    // The buckets are to be empty when it counts.
    let time = time(lab, 1500, 4000, 600);
    let mut rows = Vec::new();
    for limit in HIGH {
        rows.push(by_connection(&bed, time, limit)?);
        lab.progress(rows.len(), HIGH.len() + DYNAMIC.len(), &line(&rows[rows.len() - 1]));
    }
    // One request more or less is to be little of ten per second.
    let time = Clients { measure: lab.choose(Duration::from_secs(6), time.measure), ..time };
    for limit in DYNAMIC {
        rows.push(by_request(lab, &bed, time, limit)?);
        lab.progress(rows.len(), HIGH.len() + DYNAMIC.len(), &line(&rows[rows.len() - 1]));
    }
    outcome(&rows)
}

fn line(row: &Row) -> String {
    let classes: Vec<String> =
        row.classes.iter().map(|(name, _, got)| format!("{name} {got:.1}/s")).collect();
    format!("{}, {}: {}", row.table, row.limit, classes.join(", "))
}

fn said(limit: Option<(f64, u32)>) -> String {
    limit.map_or("none".into(), |(rate, burst)| format!("({rate:.0},{burst})"))
}

fn by_connection(bed: &Testbed, time: Clients, limit: Option<(f64, u32)>) -> Result<Row, Error> {
    let profile = |limit: Option<(f64, u32)>| limit.and_then(|(rate, burst)| only(rate, burst));
    let medium = limit.map(|_| MEDIUM);
    let classes = vec![
        by_source(1, profile(limit), Some(0)),
        by_source(2, profile(medium), Some(1)),
        by_source(3, None, Some(2)),
    ];
    let guard = Guard::attach(bed, &rules(classes, Vec::new()))?;
    let queue = guard.listen(bed, bed.address(), 3)?;
    let sockets = queue.listeners().try_clone().map_err(|error| Error::Server(error.to_string()))?;
    let _server = Server::on(sockets.into_sockets(), WORKERS, COSTS);
    // One rule for the class, whichever host a client is on.
    let mut groups: Vec<_> = (1..4)
        .map(|host| {
            let mut group = closed(1, 50, "/object", if limit.is_some() { 200 } else { 5000 });
            group.from = client(1, host);
            group
        })
        .collect();
    groups.extend([
        closed(2, 30, "/object", if medium.is_some() { 200 } else { 5000 }),
        closed(3, 30, "/object", 5000),
    ]);
    let rates: Vec<f64> = load(bed, bed.address(), &groups, time)?.iter().map(Asked::rate).collect();
    let high = rates[..3].iter().sum();
    let capacity = WORKERS as f64 / COSTS.plain.as_secs_f64();
    Ok(Row {
        table: "Table 3",
        limit: said(limit),
        classes: vec![
            ("high", limit.map(|(rate, _)| rate), high),
            ("medium", medium.map(|(rate, _)| rate), rates[3]),
            ("low", None, rates[4]),
        ],
        left: limit.map(|(rate, _)| capacity - rate - MEDIUM.0),
    })
}

fn by_request(lab: &Lab, bed: &Testbed, time: Clients, limit: Option<(f64, u32)>) -> Result<Row, Error> {
    let origin = ([127, 0, 0, 1], 9000).into();
    let _server = Server::start(bed, origin, WORKERS, COSTS)?;
    let folder = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
    let rate = limit.map_or(String::new(), |(rate, burst)| {
        format!("rate = {rate}\nburst = {burst}\naction = \"reset\"\n")
    });
    let rules = format!(
        "[[request]]\npath = \"/cgi-bin/*\"\npriority = 1\n{rate}[[request]]\npath = \"/static/*\"\npriority = 2\n\
         [gate]\nmechanism = \"auto\"\nreset_penalty = \"0ms\"\n"
    );
    let _tidegate = bed.start("tidegate", &behind_tidegate(lab, folder.path(), WORKERS, &rules)?)?;
    let groups = [closed(1, 40, "/cgi-bin/search", 3000), closed(2, 60, "/static/object", 5000)];
    let rates: Vec<f64> = load(bed, bed.address(), &groups, time)?.iter().map(Asked::rate).collect();
    // What the dynamic requests leave of the workers' time.
    let left = limit
        .map(|(rate, _)| (WORKERS as f64 - rate * COSTS.dynamic.as_secs_f64()) / COSTS.plain.as_secs_f64());
    Ok(Row {
        table: "Table 4",
        limit: said(limit),
        classes: vec![("high URL", limit.map(|(rate, _)| rate), rates[0]), ("low URL", None, rates[1])],
        left,
    })
}

fn outcome(rows: &[Row]) -> Result<Outcome, Error> {
    let mut checks = Vec::new();
    let mut raw = Table::new(["table", "limit", "class", "configured_per_s", "got_per_s"]);
    let mut summary = Table::new(["table", "limit of the high class", "class", "configured/s", "got/s"]);
    for row in rows {
        for (index, (name, configured, got)) in row.classes.iter().enumerate() {
            let cells = [
                row.table.into(),
                row.limit.clone(),
                (*name).into(),
                configured.map_or(String::new(), text),
                text(*got),
            ];
            raw.row(cells.clone());
            summary.row(cells);
            let what = format!("{} with {} limited to {}", row.table, name, row.limit);
            if let Some(configured) = configured {
                // Too much is as wrong as too little.
                let ratio = (got / configured).min(configured / got);
                checks.push(Check {
                    what: format!("{what}: share to its configured rate"),
                    ratio,
                    at_least: 0.95,
                });
            } else if let (Some(left), true) = (row.left, index + 1 == row.classes.len()) {
                checks.push(Check {
                    what: format!("{}, limit {}: {name} class to what is left", row.table, row.limit),
                    ratio: got / left,
                    at_least: 0.5,
                });
            }
        }
    }
    let of = |table: &str| rows.iter().filter(|row| row.table == table).collect::<Vec<_>>();
    let bars = |table: &str, names: &[&str]| {
        let rows = of(table);
        let numbered: Vec<(usize, &Row)> = rows.into_iter().enumerate().collect();
        curves(&numbered, names, |(number, _)| *number as f64, |(_, row), class| row.classes[class].2)
    };
    let x = "limits: 0 none, 1 the higher one, 2 the lower one";
    Ok(Outcome {
        raw,
        summary,
        plots: vec![
            (
                None,
                plot(
                    "Table 3: policing and priority",
                    x,
                    "connections/s",
                    bars("Table 3", &["high", "medium", "low"]),
                ),
            ),
            (
                Some("url"),
                plot(
                    "Table 4: URL policing and priority",
                    x,
                    "requests/s",
                    bars("Table 4", &["high URL", "low URL"]),
                ),
            ),
        ],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_must_be_as_configured_and_the_lowest_class_be_served() {
        let holds = |high, low| {
            let rows = ["Table 3", "Table 4"].map(|table| Row {
                table,
                limit: "(300,30)".into(),
                classes: vec![("high", Some(300.0), high), ("medium", Some(60.0), 60.0), ("low", None, low)],
                left: Some(40.0),
            });
            outcome(&rows).unwrap().verdict.holds
        };
        assert!(holds(296.0, 30.0));
        assert!(!holds(320.0, 30.0) && !holds(280.0, 30.0) && !holds(296.0, 10.0));
    }
}
