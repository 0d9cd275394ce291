//! A crowd of good clients, twenty times the usual.

use super::defence::{Course, PAPER, Run, Server, outcome, percentile, rounds, spread};
use crate::crowd::Attack;
use crate::verdict::Check;
use crate::{Error, Lab, Outcome, Scenario};

/// How many times the latency of those who were there the crowd's may be.
const FAIR: f64 = 2.0;
/// Milliseconds below which differences in latency are the clients' own: they share four threads.
const LEAST_MS: f64 = 10.0;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "defence-crowd",
    paper: &PAPER,
    figure: "Flash crowd",
    claim: "When twenty times as many good clients come as usual, nobody is refused, those who were there keep their \
            rate, and the crowd waits at most twice as long",
    published: "Tempesta §4.7 says that a flash crowd cannot be told from some attacks, and evicts by weight under \
                stress.",
    method: "400 more clients of the same kind come. Nobody attacks, so that nobody may be refused. Latencies are 99th \
             percentiles; less than 10 ms count as 10.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let course = Course { crowd: 400, attackers: 0, attack: Attack::Nobody, during_s: 8 };
    let (runs, servers) = rounds(lab, course)?;
    let of = |value: &dyn Fn(&Run) -> f64| {
        spread(&runs, Server::Tidegate, value).map_or(f64::NAN, |spread| spread.median)
    };
    let latency = |values: &[f64]| percentile(values, 99).max(LEAST_MS);
    let checks = [
        Check {
            what: "rate of those who were there to that before".into(),
            ratio: of(&Run::kept),
            at_least: 0.95,
        },
        Check {
            what: "the crowd's requests that were answered to all".into(),
            ratio: of(&|run| run.seen.crowd.0 as f64 / run.seen.crowd.1.max(1) as f64),
            at_least: 0.99,
        },
        Check {
            what: "latency of those who were there to the crowd's".into(),
            ratio: of(&|run| latency(&run.seen.latencies_ms) / latency(&run.seen.crowd_latencies_ms)),
            at_least: 1.0 / FAIR,
        },
    ];
    Ok(outcome(&runs, "Those who were there when a crowd comes", &checks, servers))
}
