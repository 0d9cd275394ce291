//! What the scenarios of attacks have in common: the servers, the course of a run, and how good clients' share is told.

use std::time::Duration;

use tempfile::TempDir;
use tidegate_bench::peers::{Peer, Site, install};

use super::defence_origin::{Origin, Second};
use crate::crowd::{Attack, Scene, Seen, play};
use crate::plot::{Plot, Point, Series};
use crate::server::{check_cores, tidegate, version};
use crate::stats::Spread;
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Paper};

pub(super) static PAPER: Paper = Paper {
    name: "defence",
    title: "Attacks, with good clients beside the attackers",
    setting: "20 good clients ask for objects of 1 KiB, 5 requests a second each, each from its own address of \
              127.0.0.0/8; after three seconds attackers come. An attacker counts as stopped if it had no answer 200 \
              in the last third of the attack, and a slow one if it holds no connection at the end. What good clients \
              get during the attack, from its sixth second on, is compared with what they got before it. The same \
              attack meets tidegate with its default settings and one data core, nginx with `limit_req` (100 requests \
              a second, burst 200) and `limit_conn` (100), and haproxy with a stick table and the same limits, each \
              alone on the server's core; clients and attackers share the other. The attack comes by the loopback \
              interface, where no kernel program is attached: every refusal costs its server.",
};

/// Bytes of what slow readers ask for.
const LARGE_BYTES: usize = 8 << 20;
/// Bytes of the object.
const OBJECT_BYTES: usize = 1024;
/// Good clients; each asks so often, in a second.
const GOOD: u32 = 20;
const RATE_PER_S: u32 = 5;
/// The time before the attack.
const BEFORE_S: u64 = 3;
/// The time that a server has to find out about the attack.
const FIND_OUT_S: usize = 5;

/// A server under attack.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Server {
    Tidegate,
    Nginx,
    Haproxy,
}

impl Server {
    pub(super) const ALL: [Self; 3] = [Self::Tidegate, Self::Nginx, Self::Haproxy];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Tidegate => "tidegate",
            Self::Nginx => "nginx",
            Self::Haproxy => "haproxy",
        }
    }
}

/// Who takes part in an attack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Course {
    pub crowd: u32,
    pub attackers: u32,
    pub attack: Attack,
    /// Its length in whole seconds.
    pub during_s: u64,
}

/// One run against one server.
pub(super) struct Run {
    pub server: Server,
    pub course: Course,
    pub seen: Seen,
    /// What its origin saw, second by second from the start.
    pub behind: Vec<Second>,
}

impl Run {
    /// What good clients get during the attack, as a share of what they got before.
    pub(super) fn kept(&self) -> f64 {
        let before = self.seen.rate(1, BEFORE_S as usize);
        self.seen.rate(self.found_out(), (BEFORE_S + self.course.during_s) as usize) / before
    }

    /// The second from which on the server should have found out about the attack; pulses hurt by their start only.
    fn found_out(&self) -> usize {
        match self.course.attack {
            Attack::Pulses { .. } => BEFORE_S as usize,
            _ => BEFORE_S as usize + FIND_OUT_S,
        }
    }

    /// Attackers that were stopped, as a share of all.
    pub(super) fn stopped(&self) -> f64 {
        f64::from(self.seen.stopped) / f64::from(self.course.attackers.max(1))
    }

    /// Good clients' requests during the attack that were answered in time and not refused, as a share of all of them.
    pub(super) fn answered(&self) -> f64 {
        let during = |counts: &[u64]| counts.iter().skip(BEFORE_S as usize).sum::<u64>() as f64;
        let (answered, refused) = (during(&self.seen.answered_per_s), during(&self.seen.refused_per_s));
        answered / (answered + refused)
    }

    /// Good clients' requests during the attack that did not reach the origin, as a share of those answered.
    pub(super) fn hit_ratio(&self) -> f64 {
        let asked: u64 = self.behind.iter().skip(BEFORE_S as usize).map(|second| second.good).sum();
        let answered: u64 = self.seen.answered_per_s.iter().skip(BEFORE_S as usize).sum();
        1.0 - asked as f64 / answered as f64
    }

    /// The share of time in which the origin had room for another costly request, in the last third of the attack.
    pub(super) fn unsaturated(&self) -> f64 {
        let seconds = || self.behind.iter().skip((BEFORE_S + self.course.during_s * 2 / 3) as usize);
        let looks: u64 = seconds().map(|second| second.looks).sum();
        1.0 - seconds().map(|second| second.saturated).sum::<u64>() as f64 / looks as f64
    }
}

/// Plays the course against every server, each alone and fresh; gives the runs, and the servers' versions.
pub(super) fn rounds(lab: &Lab, course: Course) -> Result<(Vec<Run>, Vec<String>), Error> {
    check_cores()?;
    install("nginx", "nginx-light").map_err(Error::Server)?;
    install("haproxy", "haproxy").map_err(Error::Server)?;
    if matches!(course.attack, Attack::Programs { .. }) {
        install("slowhttptest", "slowhttptest").map_err(Error::Server)?;
    }
    let binary = tidegate(lab)?;
    let versions = [version(&binary, "--version"), version("nginx", "-v"), version("haproxy", "-v")];
    let mut runs: Vec<Run> = Vec::new();
    for server in Server::ALL {
        let started = Started::new(server, course.attack, &binary)?;
        let scene = Scene {
            server: started.peer.address(),
            good: GOOD,
            rate_per_s: RATE_PER_S,
            crowd: course.crowd,
            attackers: course.attackers,
            attack: course.attack,
            before: Duration::from_secs(BEFORE_S),
            during: Duration::from_secs(course.during_s),
        };
        started.origin.iter().for_each(Origin::begin);
        let seen = play(scene)?;
        let behind = started.origin.as_ref().map(Origin::seconds).unwrap_or_default();
        let run = Run { server, course, seen, behind };
        let what = format!(
            "{:9} good clients keep {:.3}, answered {:.3}, attackers stopped {:.3}",
            server.label(),
            run.kept(),
            run.answered(),
            run.stopped()
        );
        runs.push(run);
        lab.progress(runs.len(), Server::ALL.len(), &what);
    }
    Ok((runs, versions.into_iter().flatten().collect()))
}

struct Started {
    peer: Peer,
    // Ended after the server, and deleted after both.
    _bare: Option<Peer>,
    origin: Option<Origin>,
    _directory: TempDir,
}

impl Started {
    /// Attacks on what is behind a server meet one that has an origin; the others one that has files.
    fn new(server: Server, attack: Attack, binary: &std::path::Path) -> Result<Self, Error> {
        let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
        let site = Site::create(directory.path(), OBJECT_BYTES).map_err(Error::Server)?;
        let large = directory.path().join(format!("site-{OBJECT_BYTES}")).join("large");
        std::fs::write(&large, vec![b'a'; LARGE_BYTES]).map_err(Error::file("write", &large))?;
        let (mut bare, mut origin) = (None, None);
        let peer = if matches!(attack, Attack::RandomUrls | Attack::Costly { .. }) {
            let behind = origin.insert(Origin::start(OBJECT_BYTES)?).address();
            match server {
                Server::Tidegate => Peer::tidegate_limited_proxy(binary, &site, behind),
                Server::Nginx => Peer::nginx_limited_proxy(&site, behind),
                Server::Haproxy => Peer::haproxy_limited(&site, behind),
            }
        } else {
            match server {
                Server::Tidegate => Peer::tidegate(binary, &site, ""),
                Server::Nginx => Peer::nginx_limited(&site),
                Server::Haproxy => {
                    let behind = Peer::origin(OBJECT_BYTES).map_err(Error::Server)?;
                    let address = behind.address();
                    bare = Some(behind);
                    Peer::haproxy_limited(&site, address)
                }
            }
        };
        let peer = peer.map_err(Error::Server)?;
        peer.verify(OBJECT_BYTES).map_err(Error::Server)?;
        Ok(Self { peer, _bare: bare, origin, _directory: directory })
    }
}

/// Of one server's runs.
pub(super) fn spread(runs: &[Run], server: Server, value: impl Fn(&Run) -> f64) -> Option<Spread> {
    Spread::of(runs.iter().filter(|run| run.server == server).map(value))
}

/// What a scenario gives back: tidegate's verdict, with what good clients of the other servers keep.
pub(super) fn outcome(runs: &[Run], title: &str, checks: &[Check], servers: Vec<String>) -> Outcome {
    let others = [Server::Nginx, Server::Haproxy].map(|server| {
        let kept = spread(runs, server, Run::kept).map_or(f64::NAN, |spread| spread.median);
        format!("with {} they keep {kept:.3}", server.label())
    });
    Outcome {
        raw: raw(runs),
        summary: summary(runs),
        plots: vec![(None, plot(runs, title))],
        verdict: Verdict::of(checks).noting(&others.join(", ")),
        servers,
    }
}

fn raw(runs: &[Run]) -> Table {
    let mut table = Table::new(["server", "second", "answered", "refused"]);
    for run in runs {
        for (second, answered) in run.seen.answered_per_s.iter().enumerate() {
            table.row([
                run.server.label().to_owned(),
                second.to_string(),
                answered.to_string(),
                run.seen.refused_per_s.get(second).copied().unwrap_or(0).to_string(),
            ]);
        }
    }
    table
}

fn summary(runs: &[Run]) -> Table {
    type Column = (&'static str, fn(&Run) -> f64);
    let further: Option<Column> = match runs.first().map(|run| run.course.attack) {
        Some(Attack::RandomUrls) => Some(("hit ratio of good clients", Run::hit_ratio)),
        Some(Attack::Costly { .. }) => Some(("time with room at the origin", Run::unsaturated)),
        Some(Attack::Nobody) => {
            Some(("latency of the crowd, ms", |run| percentile(&run.seen.crowd_latencies_ms, 99)))
        }
        _ => None,
    };
    let [kept, answered, stopped, latency] = [
        "good clients keep",
        "good requests answered",
        "attackers stopped",
        "latency of good clients, 99th percentile, ms",
    ];
    let mut table = match further {
        Some((name, _)) => Table::new(["server", kept, answered, stopped, latency, name]),
        None => Table::new(["server", kept, answered, stopped, latency]),
    };
    for run in runs {
        table.row([
            run.server.label().to_owned(),
            format!("{:.3}", run.kept()),
            format!("{:.4}", run.answered()),
            format!("{:.3}", run.stopped()),
            format!("{:.1}", percentile(&run.seen.latencies_ms, 99)),
            further.map_or(String::new(), |(_, value)| format!("{:.3}", value(run))),
        ]);
    }
    table
}

pub(super) fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() * percent / 100).copied().unwrap_or(f64::NAN)
}

/// Good clients' answers second by second.
fn plot(runs: &[Run], title: &str) -> Plot {
    let curve = |server: Server| {
        let run = runs.iter().find(|run| run.server == server)?;
        let seconds = run.seen.answered_per_s.iter().enumerate();
        Some(Series {
            name: server.label().to_owned(),
            points: seconds.map(|(second, count)| Point::exact(second as f64, *count as f64)).collect(),
        })
    };
    Plot {
        title: title.to_owned(),
        x: "seconds".to_owned(),
        x_log: false,
        y: "good clients' requests answered in a second".to_owned(),
        series: Server::ALL.into_iter().filter_map(curve).collect(),
    }
}
