//! A crowd of good clients, twenty times the usual.

use super::defence::{Course, PAPER, Run, Server, plot, raw, rounds, spread, summary};
use crate::crowd::Attack;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "defence-crowd",
    paper: &PAPER,
    figure: "Flash crowd",
    claim: "When twenty times as many good clients come as usual, nobody is refused and those who were there keep their rate",
    published: "Tempesta §4.7 says that a flash crowd cannot be told from some attacks, and evicts by weight under stress.",
    method: "20 clients, 5 requests a second each, and 400 more of the same kind after some seconds. Nobody attacks, so \
             that nobody may be refused.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let course = Course {
        good: 20,
        crowd: 400,
        attackers: 0,
        attack: Attack::Nobody,
        before_s: 3,
        during_s: lab.choose(15, 10),
    };
    let (runs, servers) = rounds(lab, course, lab.choose(3, 1))?;
    let of = |value: fn(&Run) -> f64| {
        spread(&runs, Server::Tidegate, value).map_or(f64::NAN, |spread| spread.median)
    };
    let checks = [
        Check {
            what: "rate of those who were there to that before".into(),
            ratio: of(|run| run.kept()),
            at_least: 0.95,
        },
        Check {
            what: "the crowd's requests that were answered to all".into(),
            ratio: of(|run| run.seen.crowd.0 as f64 / run.seen.crowd.1.max(1) as f64),
            at_least: 0.99,
        },
    ];
    Ok(Outcome {
        raw: raw(&runs),
        summary: summary(&runs),
        plots: vec![(None, plot(&runs, "Those who were there when a crowd comes"))],
        verdict: Verdict::of(&checks),
        servers,
    })
}
