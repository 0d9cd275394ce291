//! Expensive requests beyond what the server can do: limited by URL, and by the agent (§4.5, Figures 9 and 11).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate_gate::{Pilot, ServerTotals, Wanted};
use tidegate_policy::{Goals, Stress};

use super::ksd::{PAPER, client, closed, curves, plot, text, time};
use crate::overload::{
    Asked, Clients, Costs, Group, Guard, PORT, Pace, Server, Testbed, by_url, load, only, rules,
};
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const RATES: [f64; 5] = [30.0, 60.0, 120.0, 180.0, 240.0];
const QUICK: [f64; 2] = [30.0, 180.0];
/// 62.5 requests per second, as the paper's critical point.
const WORKERS: usize = 5;
const COSTS: Costs =
    Costs { plain: Duration::from_millis(5), dynamic: Duration::from_millis(80), body_bytes: 5120 };
/// The paper's limit.
const LIMIT: (f64, u32) = (60.0, 10);
/// How long clients wait for an expensive answer.
const PATIENCE: Duration = Duration::from_secs(1);
const AGENT_WITHIN_S: f64 = 10.0;
/// Twice what the server can do.
const AGENT_RATE: f64 = 125.0;
/// What the agent is to achieve for the preferred clients.
const GOALS: Goals = Goals { latency: Duration::from_millis(150), floor: 0.05 };
/// Seconds over which the agent's goodput is averaged.
const WINDOW_S: f64 = 3.0;
/// Of the critical point, what counts as having found it.
const FOUND: f64 = 0.8;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "ksd-fig11",
    paper: &PAPER,
    figure: "Figures 9 and 11",
    claim: "With a rate by URL throughput does not collapse past the critical point, and the agent finds that point by \
            itself within 10 s",
    published: "Throughput of an expensive CGI rises to 63 requests/s and then falls to 40; limited to 60/s it stays. \
                Limiting it from 40 to 2 requests/s raises a preferred client from 1 to 650 KB/s.",
    method: "Five workers need 80 ms for a dynamic request and 5 ms for any other: 62.5 dynamic requests/s. Clients \
             ask at a given rate whatever comes back and wait one second: an answer that comes later is work for \
             nobody, and that is how throughput collapses here (the paper's server ran out of memory). The rule is \
             that of the paper, 60/s with burst 10, and resets what is beyond. The agent has no rule but two \
             priorities and a latency of 150 ms for the preferred one; 125 dynamic requests/s come from the start, and \
             it has found the critical point when for three seconds 80 % of it are answered in time. Figure 9: ten \
             preferred clients beside 125 dynamic requests/s at three limits.",
    run,
};

struct Row {
    offered: f64,
    free: f64,
    limited: f64,
}

/// What came of the agent.
struct Agent {
    found_s: Option<f64>,
    /// Goodput of each second, from the first on.
    dynamic: Vec<f64>,
    preferred_ms: f64,
    said: Vec<String>,
}

fn dynamic(rate: f64) -> Group {
    let clients = (rate * PATIENCE.as_secs_f64()) as usize + 20;
    Group {
        from: client(2, 1),
        clients,
        path: "/cgi-bin/search",
        pace: Pace::PerSecond(rate),
        patience: PATIENCE,
    }
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bed = Testbed::new()?;
    let time = time(lab, 1500, 1500, 700);
    let limit = |rate, burst| -> Result<_, Error> {
        Ok(rules(Vec::new(), vec![by_url("/cgi-bin/*", only(rate, burst), None, None)?]))
    };
    let none = rules(Vec::new(), Vec::new());
    let guard = Guard::attach(&bed, &none)?;
    let offered = lab.choose(&RATES[..], &QUICK[..]);
    let preferred_limits = lab.choose(&[40.0, 10.0, 2.0][..], &[40.0, 2.0][..]);
    let steps = offered.len() + preferred_limits.len() + 1;
    let answered = |groups: &[Group]| -> Result<Vec<Asked>, Error> {
        let _server = Server::start(&bed, bed.address(), WORKERS, COSTS)?;
        load(&bed, bed.address(), groups, time)
    };
    let mut rows = Vec::new();
    for rate in offered {
        guard.replace(&none)?;
        let free = answered(&[dynamic(*rate)])?[0].rate();
        guard.replace(&limit(LIMIT.0, LIMIT.1)?)?;
        let limited = answered(&[dynamic(*rate)])?[0].rate();
        rows.push(Row { offered: *rate, free, limited });
        lab.progress(
            rows.len(),
            steps,
            &format!("{rate:.0}/s asked for: {free:.1}/s answered, {limited:.1}/s with the rule"),
        );
    }
    let mut preferred = Vec::new();
    for rate in preferred_limits {
        guard.replace(&none)?;
        guard.replace(&limit(*rate, 2)?)?;
        let got = answered(&[closed(1, 10, "/object", 3000), dynamic(AGENT_RATE)])?[0].rate();
        preferred.push((*rate, got));
        lab.progress(
            rows.len() + preferred.len(),
            steps,
            &format!("dynamic limited to {rate:.0}/s: preferred {got:.0}/s"),
        );
    }
    let agent = adapt(lab, &bed, &guard)?;
    lab.progress(
        steps,
        steps,
        &format!("the agent: {:?} s; {}", agent.found_s, agent.said.last().map_or("", String::as_str)),
    );
    outcome(&rows, &preferred, &agent)
}

fn adapt(lab: &Lab, bed: &Testbed, guard: &Guard) -> Result<Agent, Error> {
    let set = rules(
        Vec::new(),
        vec![by_url("/cgi-bin/*", None, Some(1), None)?, by_url("/*", None, Some(0), None)?],
    );
    guard.replace(&set)?;
    let _server = Server::start(bed, bed.address(), WORKERS, COSTS)?;
    // Nothing of the host's counts, only the server's latencies and queue.
    let stress = Stress { memory: 1e9, queue_delay: Duration::from_secs(3600) };
    let wanted = Wanted { goals: Some(GOALS), stress };
    let start = || Pilot::start(&guard.gate, wanted, &set, &[PORT], 128);
    let mut pilot = bed.on_server(start)?.map_err(|error| Error::Testbed(error.to_string()))?;
    let (end, mut said) = (AtomicBool::new(false), Vec::new());
    let seconds = lab.choose(16, 2);
    let time = Clients { settle: Duration::ZERO, measure: Duration::from_secs(seconds) };
    let preferred = Group {
        from: client(1, 1),
        clients: 20,
        path: "/object",
        pace: Pace::PerSecond(10.0),
        patience: PATIENCE,
    };
    let asked = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            bed.on_server(|| {
                while !end.load(Ordering::Relaxed) {
                    std::thread::sleep(Pilot::INTERVAL);
                    match pilot.tick(&guard.gate, &set, &ServerTotals::default()) {
                        Ok(lines) => said.extend(lines),
                        Err(error) => said.push(error.to_string()),
                    }
                }
            })
        });
        let asked = load(bed, bed.address(), &[preferred, dynamic(AGENT_RATE)], time);
        end.store(true, Ordering::Relaxed);
        watch.join().map_err(|_| Error::Testbed("the agent panicked".into()))??;
        asked
    })?;
    guard.gate.limit_classes(&set, &[]).map_err(|error| Error::Testbed(error.to_string()))?;
    let each = |second: u64| asked[1].answered_at_s.iter().filter(|at| **at as u64 == second).count() as f64;
    let critical = WORKERS as f64 / COSTS.dynamic.as_secs_f64();
    Ok(Agent {
        found_s: found(&asked[1].answered_at_s, seconds as f64, critical * FOUND),
        dynamic: (0..seconds).map(each).collect(),
        preferred_ms: asked[0].median_ms(),
        said,
    })
}

/// When, in seconds, the first window begins over which so many per second are answered.
fn found(answered_at_s: &[f64], seconds: f64, wanted: f64) -> Option<f64> {
    let starts = (0..).map(|step| f64::from(step) * 0.25).take_while(|start| start + WINDOW_S <= seconds);
    let rate = |start: f64| {
        let within = answered_at_s.iter().filter(|at| (start..start + WINDOW_S).contains(*at));
        within.count() as f64 / WINDOW_S
    };
    // While the queue is still short everything is answered in time: that is not the agent's doing.
    let mut collapsed = false;
    starts.into_iter().find(|start| {
        collapsed |= rate(*start) < wanted;
        collapsed && rate(*start) >= wanted
    })
}

fn outcome(rows: &[Row], preferred: &[(f64, f64)], agent: &Agent) -> Result<Outcome, Error> {
    let best = rows.iter().map(|row| row.limited).fold(0.0, f64::max);
    let last = rows.last().ok_or(Error::Nothing("the load"))?;
    let mut checks: Vec<Check> = rows
        .iter()
        .filter(|row| row.offered > LIMIT.0)
        .map(|row| Check {
            what: format!("throughput with the rule at {:.0}/s to the configured rate", row.offered),
            ratio: row.limited / LIMIT.0,
            at_least: 0.9,
        })
        .collect();
    checks.push(Check {
        what: "10 s to the time in which the agent found the critical point".into(),
        ratio: agent.found_s.map_or(0.0, |found_s| AGENT_WITHIN_S / found_s.max(0.25)),
        at_least: 1.0,
    });
    let mut raw = Table::new(["part", "x", "without_rule_per_s", "with_rule_per_s"]);
    let mut summary = Table::new(["asked for/s", "answered/s without a rule", "with 60/s by URL"]);
    for row in rows {
        raw.row(["fig11".into(), text(row.offered), text(row.free), text(row.limited)]);
        summary.row([text(row.offered), text(row.free), text(row.limited)]);
    }
    for (rate, got) in preferred {
        raw.row(["fig9".into(), text(*rate), String::new(), text(*got)]);
    }
    for (second, got) in agent.dynamic.iter().enumerate() {
        raw.row(["agent".into(), second.to_string(), String::new(), text(*got)]);
    }
    let series = curves(
        rows,
        &["no rule", "60/s by URL"],
        |row| row.offered,
        |row, index| [row.free, row.limited][index],
    );
    let nine = curves(preferred, &["preferred"], |row| row.0, |row, _| row.1);
    let seconds: Vec<(f64, f64)> =
        agent.dynamic.iter().enumerate().map(|(at, got)| (at as f64, *got)).collect();
    let learning = curves(&seconds, &["dynamic, adapted"], |row| row.0, |row, _| row.1);
    let when = agent.found_s.map_or("never".to_owned(), |found_s| format!("after {found_s:.2} s"));
    let note = format!(
        "at {:.0}/s without a rule {:.1}/s are answered, with it {:.1}/s (most {best:.1}/s); the agent found the \
         critical point {when}, preferred clients then had a median of {:.0} ms",
        last.offered, last.free, last.limited, agent.preferred_ms
    );
    Ok(Outcome {
        raw,
        summary,
        plots: vec![
            (None, plot("Expensive requests", "requests/s asked for", "answered in time/s", series)),
            (
                Some("fig9"),
                plot(
                    "Preferred clients beside limited expensive requests",
                    "limit of dynamic requests/s",
                    "preferred requests/s",
                    nine,
                ),
            ),
            (
                Some("agent"),
                plot("The agent before 125 expensive requests/s", "seconds", "answered in time/s", learning),
            ),
        ],
        verdict: Verdict::of(&checks).noting(&note),
        servers: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_critical_point_is_found_when_goodput_has_come_back() {
        let seconds = |from: f64, to: f64, rate: f64| {
            (0..((to - from) * rate) as u32).map(move |index| from + f64::from(index) / rate)
        };
        let all: Vec<f64> =
            seconds(0.0, 2.0, 60.0).chain(seconds(2.0, 7.0, 5.0)).chain(seconds(7.0, 16.0, 60.0)).collect();
        let at = found(&all, 16.0, 50.0).unwrap();
        assert!((6.0..=7.0).contains(&at), "{at}");
        assert_eq!(found(&all[..120], 16.0, 50.0), None);
    }

    #[test]
    fn a_collapse_or_a_slow_agent_breaks_the_claim() {
        let holds = |limited, found_s| {
            let agent = Agent { found_s, dynamic: vec![1.0], preferred_ms: 10.0, said: Vec::new() };
            outcome(&[Row { offered: 120.0, free: 5.0, limited }], &[(2.0, 1.0)], &agent)
                .unwrap()
                .verdict
                .holds
        };
        assert!(holds(58.0, Some(6.0)));
        assert!(!holds(40.0, Some(6.0)) && !holds(58.0, Some(12.0)) && !holds(58.0, None));
    }
}
