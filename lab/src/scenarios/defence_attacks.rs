//! The attacks of the table that differ in what attackers do only.

use super::defence::{Course, PAPER, Run, Server, plot, raw, rounds, spread, summary};
use crate::crowd::Attack;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// What has to hold for tidegate.
struct Goals {
    kept: f64,
    /// Attackers that are stopped; 0: none has to be.
    stopped: f64,
    /// Good requests that are answered, of all.
    answered: f64,
}

const fn scenario(
    name: &'static str,
    figure: &'static str,
    claim: &'static str,
    method: &'static str,
    run: fn(&Lab) -> Result<Outcome, Error>,
) -> Scenario {
    Scenario {
        name,
        paper: &PAPER,
        figure,
        claim,
        published: "Tempesta §4.6 to §4.8 describe the means; the paper measures no attack.",
        method,
        run,
    }
}

pub(super) const MANY: Scenario = scenario(
    "defence-many",
    "Flood of passers",
    "Under a flood from 100,000 addresses, each of which asks once and leaves, good clients keep 95 % of their rate and no attacker is served any more in the last third",
    "20 good clients, 5 requests a second each. 100,000 attackers (10,000 with --quick) ask one after the other, each on a \
     connection of its own, as fast as one core of load makes connections.",
    |lab| {
        let attackers = lab.choose(100_000, 10_000);
        measure(
            lab,
            (attackers, Attack::Passers),
            (3, lab.choose(48, 11)),
            &Goals { kept: 0.95, stopped: 1.0, answered: 0.99 },
        )
    },
);

pub(super) const PULSES: Scenario = scenario(
    "defence-pulses",
    "Pulses",
    "While 300 attackers flood for 3 s of every 10, good clients keep 95 % of their rate throughout",
    "20 good clients, 5 requests a second each, and a flood that comes and goes.",
    |lab| {
        let goals = Goals { kept: 0.95, stopped: 1.0, answered: 0.97 };
        measure(lab, (300, Attack::Pulses { on_s: 3 }), (3, lab.choose(24, 14)), &goals)
    },
);

pub(super) const RANDOM: Scenario = scenario(
    "defence-random",
    "Random URLs",
    "While 200 attackers ask past the cache for URLs that nobody has asked for, good clients keep 90 % of their rate",
    "20 good clients ask for 20 pages that may be kept. Attackers put a random query at the end of a page's URL, as fast as \
     they are answered. All servers cache.",
    |lab| {
        measure(
            lab,
            (200, Attack::RandomUrls),
            (4, lab.choose(15, 10)),
            &Goals { kept: 0.9, stopped: 1.0, answered: 0.9 },
        )
    },
);

pub(super) const COSTLY: Scenario = scenario(
    "defence-costly",
    "Expensive URL",
    "While 300 attackers ask once in two seconds each for what takes the origin 200 ms, good clients keep 90 % of their rate",
    "The origin works on 8 such answers at once, 40 a second; 150 a second are asked for. Good clients ask for pages.",
    |lab| {
        let goals = Goals { kept: 0.9, stopped: 0.9, answered: 0.9 };
        measure(lab, (300, Attack::Costly { every_ms: 2_000 }), (4, lab.choose(25, 14)), &goals)
    },
);

pub(super) const NEIGHBOURS: Scenario = scenario(
    "defence-neighbours",
    "Botnet next door",
    "Of a botnet whose addresses are those next to good clients' 95 % is blocked, and at most 1 % of good requests is refused",
    "300 attackers in the networks of 24 bits that hold the 20 good clients ask for one page, each once in 400 ms; good \
     clients ask for 20 pages.",
    |lab| {
        let goals = Goals { kept: 0.95, stopped: 0.95, answered: 0.99 };
        measure(lab, (300, Attack::Neighbours { every_ms: 400 }), (4, lab.choose(20, 12)), &goals)
    },
);

pub(super) const FORGED: Scenario = scenario(
    "defence-forged",
    "Forged addresses",
    "Attackers that say in X-Forwarded-For, Forwarded and X-Real-IP that they are good clients harm none of those",
    "As the flood, with 300 attackers; each request names a good client's address.",
    |lab| {
        measure(
            lab,
            (300, Attack::Forged),
            (3, lab.choose(15, 10)),
            &Goals { kept: 0.95, stopped: 1.0, answered: 0.97 },
        )
    },
);

pub(super) const BODIES: Scenario = scenario(
    "defence-slow-bodies",
    "Slow bodies",
    "While 200 attackers hold 40 connections each with bodies that never end, good clients keep 95 % of their rate",
    "As with slow heads; the head announces 100,000 bytes, which come five a second.",
    |lab| {
        let attack = Attack::SlowBodies { connections: 40 };
        measure(
            lab,
            (200, attack),
            (3, lab.choose(20, 12)),
            &Goals { kept: 0.95, stopped: 0.0, answered: 0.99 },
        )
    },
);

pub(super) const READERS: Scenario = scenario(
    "defence-slow-readers",
    "Slow readers",
    "While 200 attackers hold 40 connections each on which they ask for 8 MiB and read nothing, good clients keep 95 % of their rate",
    "As with slow heads; each connection asks again and again, and nothing is read of the answers.",
    |lab| {
        let attack = Attack::SlowReaders { connections: 40 };
        measure(
            lab,
            (200, attack),
            (3, lab.choose(20, 12)),
            &Goals { kept: 0.95, stopped: 0.0, answered: 0.99 },
        )
    },
);

fn measure(
    lab: &Lab,
    (attackers, attack): (u32, Attack),
    (before_s, during_s): (u64, u64),
    goals: &Goals,
) -> Result<Outcome, Error> {
    let course = Course { good: 20, crowd: 0, attackers, attack, before_s, during_s };
    let (runs, servers) = rounds(lab, course, 1)?;
    let of = |value: fn(&Run) -> f64| {
        spread(&runs, Server::Tidegate, value).map_or(f64::NAN, |spread| spread.median)
    };
    let mut checks = vec![
        Check {
            what: "good clients' rate to that before the attack".into(),
            ratio: of(|run| run.kept()),
            at_least: goals.kept,
        },
        Check {
            what: "good clients' requests that were answered to all during the attack".into(),
            ratio: 1.0 - of(|run| run.refused()),
            at_least: goals.answered,
        },
    ];
    if goals.stopped > 0.0 {
        let stopped = of(|run| run.stopped());
        checks.push(Check {
            what: "attackers stopped to all".into(),
            ratio: stopped,
            at_least: goals.stopped,
        });
    }
    Ok(Outcome {
        raw: raw(&runs),
        summary: summary(&runs),
        plots: vec![(None, plot(&runs, "Good clients under the attack"))],
        verdict: Verdict::of(&checks),
        servers,
    })
}
