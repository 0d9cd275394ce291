//! The attacks of the table: what attackers do, and what has to hold beside them.

use super::defence::{Course, PAPER, Run, Server, outcome, rounds, spread};
use crate::crowd::{Attack, Slow};
use crate::verdict::Check;
use crate::{Error, Lab, Outcome, Scenario};

/// Connections that slow attackers hold, all together; one process may have 20,000 descriptors here.
const SLOW_ATTACKERS: u32 = 200;
const SLOW_CONNECTIONS: u32 = 75;

/// What has to hold for tidegate.
struct Goals {
    /// Good clients' rate to that before the attack.
    kept: f64,
    /// Good requests that are answered, of all.
    answered: f64,
    /// Attackers that are stopped; 0: none has to be.
    stopped: f64,
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
        published: "Tempesta §4.6 to §4.8 describe the means; the paper measures the time of a block only.",
        method,
        run,
    }
}

pub(super) const FLOOD: Scenario = scenario(
    "defence-flood",
    "Flood",
    "Under a flood from 1,000 addresses good clients keep 95 % of their rate from the sixth second on, every attacker \
     is stopped, and no good client is blocked",
    "1,000 attackers, each on a connection of its own, ask again as soon as they are answered, and come again half a \
     second after they were refused.",
    |lab| measure(lab, 1_000, Attack::Flood, 8, &Goals { kept: 0.95, answered: 0.95, stopped: 1.0 }),
);

pub(super) const MANY: Scenario = scenario(
    "defence-many",
    "Flood of passers",
    "Under a flood from 100,000 addresses, each of which asks once and leaves, good clients keep 95 % of their rate \
     from the sixth second on and every attacker is stopped",
    "100,000 attackers ask one after the other, each on a connection of its own, as fast as one core of load makes \
     connections, and then from the first again.",
    |lab| measure(lab, 100_000, Attack::Passers, 9, &Goals { kept: 0.95, answered: 0.95, stopped: 1.0 }),
);

const SLOW_GOALS: Goals = Goals { kept: 0.95, answered: 0.95, stopped: 0.0 };

const fn slow(kind: Slow) -> Attack {
    Attack::Slow { kind, connections: SLOW_CONNECTIONS }
}

pub(super) const HEADS: Scenario = scenario(
    "defence-slow-heads",
    "Slow heads",
    "While attackers hold 15,000 connections with heads that never end, good clients keep 95 % of their rate",
    "Each of 200 attackers opens 75 connections, sends the start of a head and then a byte a second, and opens a new \
     connection for each that is ended. Every server gives a head 10 s.",
    |lab| measure(lab, SLOW_ATTACKERS, slow(Slow::Heads), 8, &SLOW_GOALS),
);

pub(super) const BODIES: Scenario = scenario(
    "defence-slow-bodies",
    "Slow bodies",
    "While attackers hold 15,000 connections with bodies that never end, good clients keep 95 % of their rate",
    "As with slow heads; the head announces 100,000 bytes, which come one a second.",
    |lab| measure(lab, SLOW_ATTACKERS, slow(Slow::Bodies), 8, &SLOW_GOALS),
);

pub(super) const READERS: Scenario = scenario(
    "defence-slow-readers",
    "Slow readers",
    "While attackers hold 15,000 connections on which they ask for 8 MiB and read nothing, good clients keep 95 % of \
     their rate",
    "As with slow heads; each connection asks again and again, and nothing is read of the answers.",
    |lab| measure(lab, SLOW_ATTACKERS, slow(Slow::Readers), 8, &SLOW_GOALS),
);

pub(super) const PROGRAMS: Scenario = scenario(
    "defence-slowhttptest",
    "slowhttptest",
    "While slowhttptest holds 4,000 connections each with slow heads, slow bodies and slow reading, good clients keep \
     95 % of their rate",
    "Debian's slowhttptest three times at once (-H, -B and -X), 4,000 connections each, all from one address.",
    |lab| measure(lab, 1, Attack::Programs { connections: 4_000 }, 8, &SLOW_GOALS),
);

pub(super) const PULSES: Scenario = scenario(
    "defence-pulses",
    "Pulses",
    "While 300 attackers flood for 3 s of every 10, good clients keep 95 % of their rate throughout",
    "A flood that comes and goes: what good clients keep is told from its first second on.",
    |lab| {
        measure(lab, 300, Attack::Pulses { on_s: 3 }, 13, &Goals { kept: 0.95, answered: 0.95, stopped: 1.0 })
    },
);

pub(super) const RANDOM: Scenario = scenario(
    "defence-random",
    "Random URLs",
    "While 200 attackers ask past the cache for URLs that nobody has asked for, good clients keep 90 % of their rate \
     and their hit ratio",
    "Good clients ask for 20 pages that may be kept. Attackers put a random query at the end of a page's URL, as fast \
     as they are answered. Every server caches 16 MiB. What the origin was asked for on behalf of good clients during \
     the attack tells their hit ratio.",
    |lab| measure(lab, 200, Attack::RandomUrls, 8, &Goals { kept: 0.9, answered: 0.9, stopped: 1.0 }),
);

pub(super) const COSTLY: Scenario = scenario(
    "defence-costly",
    "Expensive URL",
    "While 300 attackers ask once in two seconds each for what takes the origin 200 ms, good clients keep 90 % of \
     their rate, and in the last third of the attack the origin is not saturated",
    "The origin works on 8 such answers at once, 40 a second; 150 a second are asked for. Good clients ask for pages. \
     The origin counts as saturated while it works on 8; what was asked for before anybody was found out keeps it so \
     for 8 s.",
    |lab| {
        let goals = Goals { kept: 0.9, answered: 0.9, stopped: 0.95 };
        measure(lab, 300, Attack::Costly { every_ms: 2_000 }, 15, &goals)
    },
);

pub(super) const NEIGHBOURS: Scenario = scenario(
    "defence-neighbours",
    "Botnet next door",
    "Of a botnet whose addresses are those next to good clients' 95 % is blocked, and at most 1 % of good requests is \
     refused",
    "300 attackers in the networks of 24 bits that hold the 20 good clients ask for one page, each once in 400 ms; \
     good clients ask for 20 pages.",
    |lab| {
        let goals = Goals { kept: 0.95, answered: 0.99, stopped: 0.95 };
        measure(lab, 300, Attack::Neighbours { every_ms: 400 }, 8, &goals)
    },
);

pub(super) const FORGED: Scenario = scenario(
    "defence-forged",
    "Forged addresses",
    "Attackers that say in X-Forwarded-For, Forwarded and X-Real-IP that they are good clients harm none of those",
    "As the flood, with 300 attackers; each request names a good client's address.",
    |lab| measure(lab, 300, Attack::Forged, 8, &Goals { kept: 0.95, answered: 0.99, stopped: 1.0 }),
);

fn measure(
    lab: &Lab,
    attackers: u32,
    attack: Attack,
    during_s: u64,
    goals: &Goals,
) -> Result<Outcome, Error> {
    let course = Course { crowd: 0, attackers, attack, during_s };
    let (runs, servers) = rounds(lab, course)?;
    let of = |value: &dyn Fn(&Run) -> f64| {
        spread(&runs, Server::Tidegate, value).map_or(f64::NAN, |spread| spread.median)
    };
    let mut checks = vec![
        Check {
            what: "good clients' rate to that before the attack".into(),
            ratio: of(&Run::kept),
            at_least: goals.kept,
        },
        Check {
            what: "good clients' requests that were answered to all during the attack".into(),
            ratio: of(&Run::answered),
            at_least: goals.answered,
        },
    ];
    if goals.stopped > 0.0 {
        let what = "attackers stopped to all".into();
        checks.push(Check { what, ratio: of(&Run::stopped), at_least: goals.stopped });
    }
    if attack == Attack::RandomUrls {
        let what = "good clients' hit ratio".into();
        checks.push(Check { what, ratio: of(&Run::hit_ratio), at_least: 0.99 });
    }
    if matches!(attack, Attack::Costly { .. }) {
        let what = "time in which the origin was not saturated to all in the last third".into();
        checks.push(Check { what, ratio: of(&Run::unsaturated), at_least: 0.95 });
    }
    Ok(outcome(&runs, "Good clients under the attack", &checks, servers))
}
