//! A flood of requests from a thousand addresses.

use super::defence::{Course, PAPER, Run, Server, plot, raw, rounds, spread, summary};
use crate::crowd::Attack;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "defence-flood",
    paper: &PAPER,
    figure: "Flood",
    claim: "Under a flood from 1,000 addresses good clients keep 95 % of their rate from the sixth second on, every attacker is stopped, and no good client is blocked",
    published: "Tempesta §5.3 measures the time of a block only; this is the experiment that its §4.6 is for.",
    method: "20 good clients, 5 requests a second each. 1,000 attackers, each on a connection of its own, ask again as \
             soon as they are answered, and come again half a second after they were refused. An attacker counts as \
             stopped if it had no answer 200 in the last third of the attack.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let course = Course {
        good: 20,
        crowd: 0,
        attackers: 1_000,
        attack: Attack::Flood,
        before_s: lab.choose(4, 3),
        during_s: lab.choose(15, 10),
    };
    let (runs, servers) = rounds(lab, course, lab.choose(3, 1))?;
    let of = |value: fn(&Run) -> f64| {
        spread(&runs, Server::Tidegate, value).map_or(f64::NAN, |spread| spread.median)
    };
    let checks = [
        Check {
            what: "good clients' rate to that before the attack".into(),
            ratio: of(|run| run.kept()),
            at_least: 0.95,
        },
        Check { what: "attackers stopped to all".into(), ratio: of(|run| run.stopped()), at_least: 1.0 },
    ];
    Ok(Outcome {
        raw: raw(&runs),
        summary: summary(&runs),
        plots: vec![(None, plot(&runs, "Good clients under a flood from 1,000 addresses"))],
        verdict: Verdict::of(&checks),
        servers,
    })
}
