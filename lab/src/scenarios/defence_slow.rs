//! Request heads that never end.

use super::defence::{Course, PAPER, Server, plot, raw, rounds, spread, summary};
use crate::crowd::Attack;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "defence-slow",
    paper: &PAPER,
    figure: "Slow heads",
    claim: "While 200 attackers hold 40 connections each with heads that never end, good clients keep 95 % of their rate",
    published: "Tempesta §4.6 names slow HTTP attacks as what its TCP hooks are for; it measures none.",
    method: "20 good clients, 5 requests a second each. Each of 200 attackers opens 40 connections, sends the start of a \
             head and then a byte five times a second, and opens a new connection for each that is ended. Every server \
             gives a head 10 s.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let course = Course {
        good: 20,
        crowd: 0,
        attackers: 200,
        attack: Attack::SlowHeads { connections: 40 },
        before_s: 3,
        during_s: lab.choose(30, 14),
    };
    let (runs, servers) = rounds(lab, course, lab.choose(2, 1))?;
    let kept = spread(&runs, Server::Tidegate, |run| run.kept()).map_or(f64::NAN, |spread| spread.median);
    let check =
        Check { what: "good clients' rate to that before the attack".into(), ratio: kept, at_least: 0.95 };
    Ok(Outcome {
        raw: raw(&runs),
        summary: summary(&runs),
        plots: vec![(None, plot(&runs, "Good clients beside 8,000 heads that never end"))],
        verdict: Verdict::of(&[check]),
        servers,
    })
}
