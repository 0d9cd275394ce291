//! What the scenarios of attacks have in common: the servers, the course of a run, and how good clients' share is told.

use std::time::Duration;

use tempfile::TempDir;
use tidegate_bench::peers::{Peer, Site, install};

use super::defence_origin::Origin;
use crate::crowd::{Attack, Scene, Seen, play};
use crate::plot::{Plot, Point, Series};
use crate::server::{check_cores, tidegate, version};
use crate::stats::Spread;
use crate::table::Table;
use crate::{Error, Lab, Paper};

pub(super) static PAPER: Paper = Paper {
    name: "defence",
    title: "Attacks, with good clients beside the attackers",
    setting: "Good clients ask for an object of 1 KiB at a pace of their own, each from its own address of 127.0.0.0/8; \
              then attackers come. What good clients get during the attack, from its sixth second on, is compared with \
              what they got before it. The same attack meets tidegate with its default settings and one data core, nginx \
              with `limit_req` (100 requests a second, burst 200) and `limit_conn` (100), and haproxy with a stick table \
              and the same limits, each alone on the server's core; clients and attackers share the other. The attack \
              comes by the loopback interface, where no kernel program is attached: every refusal costs its server.",
};

/// Bytes of what slow readers ask for.
const LARGE_BYTES: usize = 8 << 20;
/// Bytes of the object.
const OBJECT_BYTES: usize = 1024;
/// Each good client asks so often, in a second.
const RATE_PER_S: u32 = 5;
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
    pub good: u32,
    pub crowd: u32,
    pub attackers: u32,
    pub attack: Attack,
    /// Whole seconds before and during the attack.
    pub before_s: u64,
    pub during_s: u64,
}

/// One run against one server.
pub(super) struct Run {
    pub server: Server,
    pub round: usize,
    pub course: Course,
    pub seen: Seen,
}

impl Run {
    /// What good clients get during the attack, as a share of what they got before.
    pub(super) fn kept(&self) -> f64 {
        let before = self.seen.rate(1, self.course.before_s as usize);
        let from = self.course.before_s as usize + FIND_OUT_S.min(self.course.during_s as usize / 2);
        self.seen.rate(from, (self.course.before_s + self.course.during_s) as usize) / before
    }

    /// Attackers that were stopped, as a share of all.
    pub(super) fn stopped(&self) -> f64 {
        f64::from(self.seen.stopped) / f64::from(self.course.attackers.max(1))
    }

    /// Good clients' requests during the attack that were refused or had no answer in time, as a share of all of them.
    pub(super) fn refused(&self) -> f64 {
        let from = self.course.before_s as usize;
        let refused: u64 = self.seen.refused_per_s.iter().skip(from).sum();
        let answered: u64 = self.seen.answered_per_s.iter().skip(from).sum();
        refused as f64 / (refused + answered).max(1) as f64
    }
}

/// Plays the course against every server in each round, each server alone and fresh; gives the runs, and the servers'
/// versions.
pub(super) fn rounds(lab: &Lab, course: Course, count: usize) -> Result<(Vec<Run>, Vec<String>), Error> {
    check_cores()?;
    install("nginx", "nginx-light").map_err(Error::Server)?;
    install("haproxy", "haproxy").map_err(Error::Server)?;
    let binary = tidegate(lab)?;
    let versions = [version(&binary, "--version"), version("nginx", "-v"), version("haproxy", "-v")];
    let mut runs: Vec<Run> = Vec::new();
    for round in 0..count {
        for server in Server::ALL {
            let started = Started::new(server, course.attack, &binary)?;
            let scene = Scene {
                server: started.peer.address(),
                good: course.good,
                rate_per_s: RATE_PER_S,
                crowd: course.crowd,
                attackers: course.attackers,
                attack: course.attack,
                before: Duration::from_secs(course.before_s),
                during: Duration::from_secs(course.during_s),
            };
            let run = Run { server, round, course, seen: play(scene)? };
            let what = format!(
                "round {}: {:9} good clients keep {:.3}, attackers stopped {:.3}",
                round + 1,
                server.label(),
                run.kept(),
                run.stopped()
            );
            runs.push(run);
            lab.progress(runs.len(), count * Server::ALL.len(), &what);
        }
    }
    Ok((runs, versions.into_iter().flatten().collect()))
}

struct Started {
    peer: Peer,
    // Ended after the server, and deleted after both.
    _bare: Option<Peer>,
    _origin: Option<Origin>,
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
                Server::Tidegate => Peer::tidegate_proxy(binary, &site, behind),
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
        Ok(Self { peer, _bare: bare, _origin: origin, _directory: directory })
    }
}

/// Of one server's runs.
pub(super) fn spread(runs: &[Run], server: Server, value: impl Fn(&Run) -> f64) -> Option<Spread> {
    Spread::of(runs.iter().filter(|run| run.server == server).map(value))
}

pub(super) fn raw(runs: &[Run]) -> Table {
    let mut table = Table::new(["round", "server", "second", "answered", "refused"]);
    for run in runs {
        for (second, answered) in run.seen.answered_per_s.iter().enumerate() {
            table.row([
                (run.round + 1).to_string(),
                run.server.label().to_owned(),
                second.to_string(),
                answered.to_string(),
                run.seen.refused_per_s.get(second).copied().unwrap_or(0).to_string(),
            ]);
        }
    }
    table
}

pub(super) fn summary(runs: &[Run]) -> Table {
    let mut table = Table::new([
        "server",
        "good clients keep",
        "good requests refused or late",
        "attackers stopped",
        "latency of good clients, 99th percentile, ms",
    ]);
    for server in Server::ALL {
        let text = |value: fn(&Run) -> f64, digits| {
            spread(runs, server, value).map_or(String::new(), |spread| spread.text(digits))
        };
        table.row([
            server.label().to_owned(),
            text(Run::kept, 3),
            text(Run::refused, 4),
            text(Run::stopped, 3),
            text(|run| percentile(&run.seen.latencies_ms, 99), 1),
        ]);
    }
    table
}

pub(super) fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() * percent / 100).copied().unwrap_or(f64::NAN)
}

/// Good clients' answers second by second, of each server's first run.
pub(super) fn plot(runs: &[Run], title: &str) -> Plot {
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
