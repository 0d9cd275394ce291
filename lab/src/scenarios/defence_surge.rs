//! A crowd of good clients that wants more than the server can give.

use std::time::Duration;

use tempfile::TempDir;
use tidegate_bench::peers::{Peer, Site, install};

use super::defence::{PAPER, percentile};
use crate::crowd::{Group, Served, surge};
use crate::plot::{Plot, Point, Series};
use crate::quota::Quota;
use crate::server::{check_cores, tidegate, version};
use crate::stats::Spread;
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// The server's share of its core: one core of load asks for more than that.
const SHARE: f64 = 0.1;
const PERIOD: Duration = Duration::from_millis(10);
const OBJECT_BYTES: usize = 1024;
/// Clients that are there before.
const USUAL: u32 = 100;
/// How many times as many come.
const TIMES: u32 = 20;
/// What all clients together want, as a multiple of the capacity.
const DEMAND: f64 = 1.5;
/// The time before the crowd, and after its start until it counts: by then all of it have come.
const BEFORE: Duration = Duration::from_secs(3);
const ARRIVAL: Duration = Duration::from_secs(2);
/// Bounds of fairness: Jain's index of what clients get, and the median of latencies to their 90th percentile.
const JAIN: f64 = 0.95;
const EVEN: f64 = 0.5;
/// Nobody is ever refused on account of what it does here: this measures what the server can do at most.
const EXEMPT: &str = "[[exempt]]\nsource = \"127.0.0.0/8\"\n";

pub(super) const SCENARIO: Scenario = Scenario {
    name: "defence-surge",
    paper: &PAPER,
    figure: "Flash crowd beyond capacity",
    claim: "When 20 times as many good clients come as usual and want 1.5 times what the server can give, nobody is \
            refused, goodput is at least 95 % of the server's capacity, and all get the same",
    published: "Tempesta §4.7 says that a flash crowd cannot be told from some attacks, and evicts by weight under \
                stress.",
    method: "The server has a tenth of a core, so that one core of load can ask for more than it gives. Its capacity \
             is what 2,100 clients get that ask again as soon as they are answered, of a server with the same \
             classifiers in which they are exempt (nginx: one without limits), the mean of before and after. In \
             between 100 clients ask a fresh server with its default settings at a pace of their own, and three \
             seconds later 2,000 more come, from addresses of their own and at the same pace, which is such that all \
             together want 1.5 times the capacity; who is answered late asks its next at once. Counted from two \
             seconds after that on. Nobody gives up before 5 s. tidegate has three such rounds, of which medians of \
             rates and the worst of all else count. Jain's index compares what each client gets with what the others \
             do.",
    run,
};

#[derive(Clone, Copy)]
enum Server {
    Tidegate,
    Nginx,
}

/// What a server did.
struct Run {
    server: Server,
    round: usize,
    capacity_per_s: f64,
    goodput_per_s: f64,
    wanted_per_s: f64,
    usual: Served,
    crowd: Served,
}

impl Server {
    fn label(self) -> &'static str {
        match self {
            Self::Tidegate => "tidegate",
            Self::Nginx => "nginx",
        }
    }

    /// With its share of a core, and its limits or none.
    fn start(self, lab: &Lab, limited: bool) -> Result<Running, Error> {
        let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
        let site = Site::create(directory.path(), OBJECT_BYTES).map_err(Error::Server)?;
        let quota = Quota::new()?;
        let peer = match (self, limited) {
            (Self::Tidegate, true) => Peer::tidegate(&tidegate(lab)?, &site, ""),
            (Self::Tidegate, false) => Peer::tidegate(&tidegate(lab)?, &site, EXEMPT),
            (Self::Nginx, true) => Peer::nginx_limited(&site),
            (Self::Nginx, false) => Peer::nginx(&site),
        };
        let peer = peer.map_err(Error::Server)?;
        peer.verify(OBJECT_BYTES).map_err(Error::Server)?;
        for process in peer.processes() {
            quota.take(process)?;
        }
        quota.settle()?;
        quota.enforce(SHARE, PERIOD)?;
        Ok(Running { peer, _quota: quota, _directory: directory })
    }
}

struct Running {
    // Ended in this order.
    peer: Peer,
    _quota: Quota,
    _directory: TempDir,
}

/// What all clients get of a server that refuses none of them, asking again as soon as they are answered.
fn capacity_per_s(lab: &Lab, server: Server) -> Result<f64, Error> {
    let running = server.start(lab, false)?;
    let time = lab.choose(Duration::from_secs(5), Duration::from_secs(4));
    let group = Group { clients: USUAL * (1 + TIMES), from: Duration::ZERO, every: Duration::ZERO };
    let served = surge(running.peer.address(), &[group], ARRIVAL, ARRIVAL + time)?;
    let answers = served.iter().flat_map(|served| &served.answers).sum::<u64>();
    Ok(answers as f64 / time.as_secs_f64())
}

impl Run {
    fn measure(lab: &Lab, server: Server, round: usize) -> Result<Self, Error> {
        let before = capacity_per_s(lab, server)?;
        let all = USUAL * (1 + TIMES);
        let every = Duration::from_secs_f64(f64::from(all) / (DEMAND * before.max(1.0)));
        let groups = [
            Group { clients: USUAL, from: Duration::ZERO, every },
            Group { clients: USUAL * TIMES, from: BEFORE, every },
        ];
        let time = lab.choose(Duration::from_secs(8), Duration::from_secs(6));
        let mut served = {
            let running = server.start(lab, true)?;
            surge(running.peer.address(), &groups, BEFORE + ARRIVAL, BEFORE + ARRIVAL + time)?.into_iter()
        };
        let (usual, crowd) = (served.next().unwrap_or_default(), served.next().unwrap_or_default());
        let answers: u64 = usual.answers.iter().chain(&crowd.answers).sum();
        Ok(Self {
            server,
            round,
            capacity_per_s: f64::midpoint(before, capacity_per_s(lab, server)?),
            goodput_per_s: answers as f64 / time.as_secs_f64(),
            wanted_per_s: f64::from(all) / every.as_secs_f64(),
            usual,
            crowd,
        })
    }

    fn kept(&self) -> f64 {
        self.goodput_per_s / self.capacity_per_s
    }

    fn latency_ms(&self, percent: usize) -> f64 {
        percentile(&[&self.usual.latencies_ms[..], &self.crowd.latencies_ms].concat(), percent)
    }

    fn jain(&self) -> f64 {
        jain(self.usual.answers.iter().chain(&self.crowd.answers).map(|answers| *answers as f64))
    }

    fn never_refused(&self) -> f64 {
        1.0 - (self.usual.refused + self.crowd.refused) as f64 / f64::from(USUAL * (1 + TIMES))
    }

    fn answered(&self) -> f64 {
        let given_up = (self.usual.given_up + self.crowd.given_up) as f64;
        let answers = self.usual.answers.iter().chain(&self.crowd.answers).sum::<u64>() as f64;
        answers / (answers + given_up)
    }
}

/// 1 where all get the same, and one nth where one of n gets all (Jain, Chiu, Hawe 1984).
fn jain(shares: impl Iterator<Item = f64> + Clone) -> f64 {
    let (count, sum) = (shares.clone().count() as f64, shares.clone().sum::<f64>());
    let squares: f64 = shares.map(|share| share * share).sum();
    sum * sum / (count * squares)
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    check_cores()?;
    install("nginx", "nginx-light").map_err(Error::Server)?;
    let rounds = lab.choose(3, 1);
    let mut turns = vec![Server::Tidegate; rounds];
    turns.push(Server::Nginx);
    let mut runs = Vec::new();
    for (index, &server) in turns.iter().enumerate() {
        let run = Run::measure(lab, server, index % rounds + 1)?;
        let what = format!(
            "{}: {:.0} of {:.0} answers a second, {} clients refused, Jain's index {:.3}",
            server.label(),
            run.goodput_per_s,
            run.capacity_per_s,
            run.usual.refused + run.crowd.refused,
            run.jain()
        );
        lab.progress(index + 1, turns.len(), &what);
        runs.push(run);
    }
    let versions = [version(tidegate(lab)?, "--version"), version("nginx", "-v")];
    let (theirs, ours) = runs.split_last().ok_or(Error::Nothing("the load"))?;
    let check = |what: &str, figure: fn(&Run) -> f64, at_least| {
        let spread = Spread::of(ours.iter().map(figure)).ok_or(Error::Nothing("the load"))?;
        Ok(Check { what: what.into(), ratio: spread.median, at_least })
    };
    // Whatever happens to a client in any of the rounds counts.
    let never = |what: &str, figure: fn(&Run) -> f64, at_least| Check {
        what: what.into(),
        ratio: ours.iter().map(figure).fold(f64::INFINITY, f64::min),
        at_least,
    };
    let checks = [
        check("demand to capacity", |run| run.wanted_per_s / run.capacity_per_s, 1.4)?,
        never("clients that were never refused to all", Run::never_refused, 1.0),
        check("goodput to capacity", Run::kept, 0.95)?,
        never("answers to those and what clients gave up", Run::answered, 0.999),
        never("Jain's index of what clients get", Run::jain, JAIN),
        check("median latency to its 90th percentile", |run| run.latency_ms(50) / run.latency_ms(90), EVEN)?,
    ];
    let note = format!(
        "with nginx goodput is {:.3} of its capacity, {} clients are refused and Jain's index is {:.3}",
        theirs.kept(),
        theirs.usual.refused + theirs.crowd.refused,
        theirs.jain()
    );
    Ok(Outcome {
        raw: raw(&runs),
        summary: summary(&runs),
        plots: vec![(None, plot(&runs))],
        verdict: Verdict::of(&checks).noting(&note),
        servers: versions.into_iter().flatten().collect(),
    })
}

fn raw(runs: &[Run]) -> Table {
    let mut table = Table::new(["server", "round", "client", "answers"]);
    for run in runs {
        for (client, answers) in run.usual.answers.iter().chain(&run.crowd.answers).enumerate() {
            table.row([
                run.server.label().to_owned(),
                run.round.to_string(),
                client.to_string(),
                answers.to_string(),
            ]);
        }
    }
    table
}

fn summary(runs: &[Run]) -> Table {
    let mut table = Table::new([
        "server",
        "round",
        "capacity, answers a second",
        "goodput to capacity",
        "clients refused",
        "requests given up",
        "Jain's index",
        "latency, median, ms",
        "latency, 90th percentile, ms",
        "latency, 99th percentile, ms",
    ]);
    for run in runs {
        table.row([
            run.server.label().to_owned(),
            run.round.to_string(),
            format!("{:.0}", run.capacity_per_s),
            format!("{:.3}", run.kept()),
            (run.usual.refused + run.crowd.refused).to_string(),
            (run.usual.given_up + run.crowd.given_up).to_string(),
            format!("{:.3}", run.jain()),
            format!("{:.1}", run.latency_ms(50)),
            format!("{:.1}", run.latency_ms(90)),
            format!("{:.1}", run.latency_ms(99)),
        ]);
    }
    table
}

/// For each share of clients what they get at most.
fn plot(runs: &[Run]) -> Plot {
    let curve = |run: &Run| {
        let mut answers: Vec<u64> = run.usual.answers.iter().chain(&run.crowd.answers).copied().collect();
        answers.sort_unstable();
        let point = |percent: usize| {
            let at = (answers.len() * percent / 100).min(answers.len().saturating_sub(1));
            Some(Point::exact(percent as f64, *answers.get(at)? as f64))
        };
        Series {
            name: format!("{}, round {}", run.server.label(), run.round),
            points: (0..=100).filter_map(point).collect(),
        }
    };
    Plot {
        title: "What each client gets when a crowd wants more than there is".to_owned(),
        x: "clients, least served first, %".to_owned(),
        x_log: false,
        y: "answers to the client".to_owned(),
        series: runs.iter().map(curve).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_is_one_for_equal_shares_and_one_nth_for_a_single_winner() {
        assert_eq!(jain([3.0; 4].into_iter()), 1.0);
        assert_eq!(jain([8.0, 0.0, 0.0, 0.0].into_iter()), 0.25);
    }
}
