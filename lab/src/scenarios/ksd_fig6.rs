//! How many connections at once a policed client may open (§4.2, Figure 6).

use std::time::Duration;

use super::ksd::{PAPER, client, closed, curves, plot, rates, text, time};
use crate::overload::{Costs, Group, Guard, Pace, Server, Testbed, by_source, load, only, rules};
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const BURSTS: [u32; 5] = [5, 10, 20, 30, 50];
const QUICK: [u32; 2] = [5, 50];
const RATE: f64 = 50.0;
const WORKERS: usize = 10;
const COSTS: Costs =
    Costs { plain: Duration::from_millis(20), dynamic: Duration::from_millis(80), body_bytes: 8192 };

pub(super) const SCENARIO: Scenario = Scenario {
    name: "ksd-fig6",
    paper: &PAPER,
    figure: "Figure 6",
    claim: "A larger burst gives the policed client more of its rate and costs the preferred one throughput",
    published: "With 50 connections/s and a burst from 5 to 50, the policed client goes from 36.6 to 47.7 \
                connections/s, the preferred one from 140 to 79.",
    method: "The policed client opens 50 to 80 connections together twice a second, times and sizes being the same in \
             every run, and asks for dynamic content of 80 ms; 40 preferred clients ask for static content of 20 ms as \
             fast as they are answered. The server has ten workers. Connections that are kept out are tried once: the \
             clients' patience of 900 ms is less than the kernel's first retransmission.",
    run,
};

struct Row {
    burst: u32,
    policed: f64,
    preferred: f64,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bed = Testbed::new()?;
    let time = time(lab, 1500, 5000, 1100);
    let pace = Pace::Bursts { size: (50, 80), every: Duration::from_millis(500) };
    let patience = Duration::from_millis(900);
    let greedy = Group { from: client(2, 1), clients: 160, path: "/cgi-bin/report", pace, patience };
    let groups = [closed(1, 40, "/object", 3000), greedy];
    let guard = Guard::attach(&bed, &rules(Vec::new(), Vec::new()))?;
    let bursts = lab.choose(&BURSTS[..], &QUICK[..]);
    let mut rows = Vec::new();
    for burst in bursts {
        // A rule that is not there any more forgets its tokens.
        guard.replace(&rules(Vec::new(), Vec::new()))?;
        guard.replace(&rules(vec![by_source(2, only(RATE, *burst), None)], Vec::new()))?;
        let _server = Server::start(&bed, bed.address(), WORKERS, COSTS)?;
        let rates = rates(&load(&bed, bed.address(), &groups, time)?);
        let row = Row { burst: *burst, policed: rates[1], preferred: rates[0] };
        rows.push(row);
        lab.progress(
            rows.len(),
            bursts.len(),
            &format!("burst {burst}: policed {:.1}/s, preferred {:.1}/s", rates[1], rates[0]),
        );
    }
    outcome(&rows)
}

fn outcome(rows: &[Row]) -> Result<Outcome, Error> {
    let (Some(first), Some(last)) = (rows.first(), rows.last()) else {
        return Err(Error::Nothing("the load"));
    };
    let checks = [
        Check {
            what: "policed throughput, largest burst to smallest".into(),
            ratio: last.policed / first.policed,
            at_least: 1.1,
        },
        Check {
            what: "preferred throughput, smallest burst to largest".into(),
            ratio: first.preferred / last.preferred,
            at_least: 1.0,
        },
    ];
    let mut raw = Table::new(["burst", "policed_per_s", "preferred_per_s"]);
    let mut summary = Table::new(["burst", "policed/s", "preferred/s", "together/s"]);
    for row in rows {
        raw.row([row.burst.to_string(), text(row.policed), text(row.preferred)]);
        summary.row([
            row.burst.to_string(),
            text(row.policed),
            text(row.preferred),
            text(row.policed + row.preferred),
        ]);
    }
    let series = curves(
        rows,
        &["policed", "preferred", "together"],
        |row| f64::from(row.burst),
        |row, index| [row.policed, row.preferred, row.policed + row.preferred][index],
    );
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(
            None,
            plot("Burst of a policed client (50 connections/s)", "burst", "requests/s", series),
        )],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trade_off_is_two_sided() {
        let rows = |policed, preferred| {
            [Row { burst: 5, policed: 10.0, preferred: 100.0 }, Row { burst: 50, policed, preferred }]
        };
        assert!(outcome(&rows(20.0, 90.0)).unwrap().verdict.holds);
        assert!(!outcome(&rows(10.0, 90.0)).unwrap().verdict.holds);
        assert!(!outcome(&rows(20.0, 110.0)).unwrap().verdict.holds);
        assert!(outcome(&[]).is_err());
    }
}
