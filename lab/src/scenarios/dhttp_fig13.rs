//! A congested link (DHTTP §VI-B2, Figure 13 and Table I).

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::dhttp::PAPER;
use super::dhttp_site::{Content, DHTTP_PORT, HTTP_PORT, Site};
use super::dhttp_users::{Catalog, Habits, Protocol, Usage, requests_per_s, use_site};
use crate::link::{Hosts, Profile, SERVER, Side, ip};
use crate::plot::{Plot, Point, Series};
use crate::table::{Table, thousands};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// Load hosts, and the users of each: two processes with 50 threads, as in the paper.
const HOSTS: [usize; 3] = [1, 2, 3];
const USERS: usize = 100;
/// How much more than two hosts' requests the link carries, as in the paper (its footnote 9): 9 and 8 Mbit/s.
const PAPER_HEADROOM: f64 = 9.0 / 8.0;
const ROUND_TRIP: Duration = Duration::from_millis(60);
const FILES: usize = 1000;
const MOST_BYTES: f64 = 1e6;
/// The first user's address; the others have the following ones.
const ADDRESSES: Ipv4Addr = Ipv4Addr::new(10, 98, 128, 1);

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dhttp-fig13",
    paper: &PAPER,
    figure: "Figure 13 and Table I",
    claim: "On a saturated link DHTTP's throughput is within 2 % of HTTP's, the share of answers by UDP falls as loss \
            grows, and resends stay below 2 % of them",
    published: "On a fractional T3 of 9 Mbit/s with up to three load hosts DHTTP has 15 % more throughput than Apache \
                with one host and virtually the same with two and three; the share of answers by UDP drops, and \
                resends stay below 2 % of them.",
    method: "One emulated link of 60 ms round trip whose queue holds a round trip's bytes, and SURGE's users, 100 for \
             each load host, with an address each. The link's rate bears the same proportion to the load as the \
             paper's: two hosts nearly fill it. HTTP is that of the same tidegate with up to three connections per \
             user, kept for 15 s. All objects of a page are asked for at once. A run is 30 s instead of two minutes, \
             after 20 s that are not counted: what is lost at the start is sent again, and known to the server, 5 to \
             15 s later. Throughput is the number of requests served, as in the paper (§VI-B1). The bytes, in the \
             table, say less: sizes have such tails that what is asked for within 30 s differs by 3.5 % (standard \
             deviation) from run to run. So that pauses do not decide either, the requests of the two runs that fill \
             the link are added up before they are compared. All runs are made at one time, each over a link and with \
             hosts of its own. The share by UDP comprises answers in several datagrams; resends are counted against \
             all answers, in the table also against those by UDP, as in the paper's.",
    run,
};

struct Run {
    hosts: usize,
    protocol: Protocol,
    usage: Usage,
    requests_per_s: f64,
    /// What tidegate counted meanwhile.
    counted: HashMap<String, f64>,
    lost_share: f64,
}

const HTTP: Protocol = Protocol::Http { connections: 3, altruistic: false };
const PROTOCOLS: [(Protocol, &str); 2] = [(HTTP, "HTTP"), (Protocol::Dhttp, "DHTTP")];

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let times = lab.choose((20.0, 30.0), (0.5, 1.0));
    let catalog = Arc::new(Catalog::new(FILES, MOST_BYTES, 13));
    let offered = 2.0 * USERS as f64 * requests_per_s();
    let rate_bits_per_s = catalog.mean_bytes() * 8.0 * offered * PAPER_HEADROOM;
    let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
    catalog.write(directory.path())?;
    let profile = Profile::clean(rate_bits_per_s as u64, ROUND_TRIP);
    let one = &|hosts, protocol| measure(lab, &catalog, directory.path(), profile, hosts, protocol, times);
    // Each run has hosts and a link of its own: the link is what is short, not the machine.
    let all = std::thread::scope(|scope| {
        let threads: Vec<_> = HOSTS
            .iter()
            .flat_map(|hosts| PROTOCOLS.map(|(protocol, _)| (*hosts, protocol)))
            .map(|(hosts, protocol)| scope.spawn(move || one(hosts, protocol)))
            .collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or(Err(Error::Nothing("a thread that panicked"))));
        joined.collect::<Vec<_>>()
    });
    let mut runs = Vec::new();
    for run in all {
        let run = run?;
        let what = format!(
            "{} hosts, {}: {:.0} requests/s, {:.0} ms",
            run.hosts,
            name_of(run.protocol),
            run.requests_per_s,
            run.usage.mean_latency_s() * 1e3
        );
        runs.push(run);
        lab.progress(runs.len(), HOSTS.len() * PROTOCOLS.len(), &what);
    }
    Ok(outcome(&runs))
}

fn measure(
    lab: &Lab,
    catalog: &Arc<Catalog>,
    files: &Path,
    profile: Profile,
    hosts: usize,
    protocol: Protocol,
    (warm_up_s, time_s): (f64, f64),
) -> Result<Run, Error> {
    let network = Hosts::new(vec![profile], 13)?;
    // Every address of this range is the client host's own.
    ip(&["-n", network.name(Side::Client), "route", "add", "local", "10.98.128.0/17", "dev", "lo"])?;
    let site = Site::start(lab, network.name(Side::Server), &[SERVER], Content::Files(files))?;
    let port = if protocol == Protocol::Dhttp { DHTTP_PORT } else { HTTP_PORT };
    let habits = Habits {
        server: SocketAddr::new(SERVER, port),
        protocol,
        users: hosts * USERS,
        pace: 1.0,
        addresses: ADDRESSES,
        warm_up: Duration::from_secs_f64(warm_up_s),
        time: Duration::from_secs_f64(time_s),
    };
    let mut counts = Vec::new();
    let usage = network.run(Side::Client, || {
        use_site(catalog, habits, || {
            counts.push(site.metrics()?);
            Ok(())
        })
    })?;
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
    let lost = count(&network.traffic().overflowed);
    Ok(Run {
        hosts,
        protocol,
        requests_per_s: usage.requests as f64 / time_s,
        usage,
        counted: difference(&counts),
        lost_share: lost / (lost + count(&network.traffic().delivered)),
    })
}

/// What the counters grew by from the first to the last reading.
fn difference(counts: &[HashMap<String, f64>]) -> HashMap<String, f64> {
    let (Some(first), Some(last)) = (counts.first(), counts.last()) else { return HashMap::new() };
    last.iter().map(|(name, value)| (name.clone(), value - first.get(name).unwrap_or(&0.0))).collect()
}

impl Run {
    fn metric(&self, name: &str) -> f64 {
        self.counted.get(&format!("tidegate_dhttp_{name}_total")).copied().unwrap_or(0.0)
    }

    fn by_udp(&self) -> f64 {
        self.metric("responses_udp") + self.metric("responses_pieces")
    }

    fn udp_share(&self) -> f64 {
        self.by_udp() / self.answers().max(1.0)
    }

    fn answers(&self) -> f64 {
        self.by_udp() + self.metric("responses_connection") + self.metric("stream_requests")
    }

    /// Of all answers.
    fn resent_share(&self) -> f64 {
        self.metric("requests_resent") / self.answers().max(1.0)
    }

    fn ignored_share(&self) -> f64 {
        self.metric("requests_answered") / self.metric("requests_resent").max(1.0)
    }
}

fn of(runs: &[Run], protocol: Protocol, hosts: usize) -> Option<&Run> {
    runs.iter().find(|run| run.protocol == protocol && run.hosts == hosts)
}

/// Requests served in a second by both runs that fill the link.
fn saturated_requests_per_s(runs: &[Run], protocol: Protocol) -> f64 {
    runs.iter().filter(|run| run.protocol == protocol && run.hosts > 1).map(|run| run.requests_per_s).sum()
}

fn outcome(runs: &[Run]) -> Outcome {
    let mut checks = Vec::new();
    checks.push(Check {
        what: "DHTTP's requests to HTTP's, two and three hosts together".to_owned(),
        ratio: saturated_requests_per_s(runs, Protocol::Dhttp) / saturated_requests_per_s(runs, HTTP),
        at_least: 0.98,
    });
    let dhttp: Vec<&Run> = HOSTS.iter().filter_map(|hosts| of(runs, Protocol::Dhttp, *hosts)).collect();
    if let (Some(first), Some(last)) = (dhttp.first(), dhttp.last()) {
        checks.push(Check {
            what: "share by UDP with one host to that with three".to_owned(),
            ratio: first.udp_share() / last.udp_share(),
            at_least: 1.0,
        });
    }
    for run in &dhttp {
        checks.push(Check {
            what: format!("2 % to the share of resends, {} hosts", run.hosts),
            ratio: 0.02 / run.resent_share().max(1e-6),
            at_least: 1.0,
        });
    }
    let line = |(protocol, name): (Protocol, &str), value: fn(&Run) -> f64| Series {
        name: name.to_owned(),
        points: runs
            .iter()
            .filter(|run| run.protocol == protocol)
            .map(|run| Point::exact(run.hosts as f64, value(run)))
            .collect(),
    };
    let plot = |title: &str, y: &str, value: fn(&Run) -> f64| Plot {
        title: title.to_owned(),
        x: "load hosts".to_owned(),
        x_log: false,
        y: y.to_owned(),
        series: PROTOCOLS.map(|protocol| line(protocol, value)).into(),
    };
    Outcome {
        raw: raw(runs),
        summary: summary(runs),
        plots: vec![
            (None, plot("Throughput of a congested link", "requests/s", |run| run.requests_per_s)),
            (
                Some("latency"),
                plot("Latency over a congested link", "mean latency, ms", |run| {
                    run.usage.mean_latency_s() * 1e3
                }),
            ),
        ],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    }
}

fn name_of(protocol: Protocol) -> &'static str {
    PROTOCOLS.iter().find(|(own, _)| *own == protocol).map_or("", |(_, name)| name)
}

fn raw(runs: &[Run]) -> Table {
    let mut table = Table::new([
        "hosts",
        "protocol",
        "requests_per_s",
        "bytes",
        "failed",
        "mean_latency_ms",
        "packets_lost_percent",
        "responses_udp",
        "responses_pieces",
        "responses_connection",
        "requests_resent",
        "requests_ignored",
    ]);
    for run in runs {
        let metric = |name| format!("{:.0}", run.metric(name));
        table.row([
            run.hosts.to_string(),
            name_of(run.protocol).to_owned(),
            format!("{:.1}", run.requests_per_s),
            run.usage.bytes.to_string(),
            run.usage.failed.to_string(),
            format!("{:.1}", run.usage.mean_latency_s() * 1e3),
            format!("{:.2}", run.lost_share * 100.0),
            metric("responses_udp"),
            metric("responses_pieces"),
            metric("responses_connection"),
            metric("requests_resent"),
            metric("requests_answered"),
        ]);
    }
    table
}

fn summary(runs: &[Run]) -> Table {
    let mut table = Table::new([
        "hosts",
        "protocol",
        "requests/s",
        "kB/s",
        "mean latency, ms",
        "packets lost, %",
        "by UDP, %",
        "resent, %",
        "resent, % of UDP",
        "resends ignored, %",
    ]);
    for run in runs {
        let percent = |share: f64| {
            if run.protocol == Protocol::Dhttp { format!("{:.1}", share * 100.0) } else { String::new() }
        };
        table.row([
            run.hosts.to_string(),
            name_of(run.protocol).to_owned(),
            format!("{:.0}", run.requests_per_s),
            thousands(
                (run.usage.bytes as f64 / run.usage.requests.max(1) as f64 * run.requests_per_s / 1e3) as u64,
            ),
            format!("{:.0}", run.usage.mean_latency_s() * 1e3),
            format!("{:.1}", run.lost_share * 100.0),
            percent(run.udp_share()),
            percent(run.resent_share()),
            percent(run.metric("requests_resent") / run.by_udp().max(1.0)),
            percent(run.ignored_share()),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(hosts: usize, protocol: Protocol, requests_per_s: f64, udp: f64, resent: f64) -> Run {
        let counted =
            [("responses_udp", udp), ("responses_connection", 100.0 - udp), ("requests_resent", resent)];
        Run {
            hosts,
            protocol,
            usage: Usage { requests: 100, bytes: 1000, failed: 0, latencies_s: vec![0.1] },
            requests_per_s,
            counted: counted
                .iter()
                .map(|(name, value)| (format!("tidegate_dhttp_{name}_total"), *value))
                .collect(),
            lost_share: 0.0,
        }
    }

    fn runs(requests_per_s: f64, last_udp: f64, resent: f64) -> Vec<Run> {
        let mut runs: Vec<Run> = HOSTS.iter().map(|hosts| run(*hosts, HTTP, 1000.0, 0.0, 0.0)).collect();
        runs.extend(
            [(1, 60.0), (2, 40.0), (3, last_udp)]
                .map(|(hosts, udp)| run(hosts, Protocol::Dhttp, requests_per_s, udp, resent)),
        );
        runs
    }

    #[test]
    fn less_throughput_a_growing_share_by_udp_and_many_resends_break_the_claim() {
        assert!(outcome(&runs(990.0, 10.0, 0.1)).verdict.holds);
        assert!(!outcome(&runs(970.0, 10.0, 0.1)).verdict.holds);
        assert!(!outcome(&runs(990.0, 70.0, 0.1)).verdict.holds);
        assert!(!outcome(&runs(990.0, 10.0, 3.0)).verdict.holds);
    }

    #[test]
    fn the_runs_that_fill_the_link_are_held_against_each_other_together() {
        let mut all = runs(970.0, 10.0, 0.1);
        let last = all.len() - 1;
        all[last].requests_per_s = 1000.0;
        assert!(outcome(&all).verdict.holds, "970 and 1000 of 1000 each");
        all[last].requests_per_s = 980.0;
        assert!(!outcome(&all).verdict.holds);
        // One host does not fill it.
        all[last].requests_per_s = 1000.0;
        all[3].requests_per_s = 1.0;
        assert!(outcome(&all).verdict.holds);
    }

    #[test]
    fn a_run_without_an_answer_breaks_the_claim_and_leaves_no_figure_undefined() {
        let mut all = runs(1000.0, 10.0, 0.1);
        let run = all.last_mut().unwrap();
        run.usage = Usage { requests: 0, bytes: 0, failed: 0, latencies_s: Vec::new() };
        (run.requests_per_s, run.counted) = (0.0, HashMap::new());
        let outcome = outcome(&all);
        assert!(!outcome.verdict.holds);
        for (_, plot) in &outcome.plots {
            assert!(
                plot.series.iter().flat_map(|series| &series.points).all(|point| point.y.median.is_finite())
            );
        }
    }

    #[test]
    fn counters_are_read_as_what_they_grew_by() {
        let reading = |value| HashMap::from([("a".to_owned(), value)]);
        assert_eq!(difference(&[reading(1.0), reading(4.0)])["a"], 3.0);
        assert!(difference(&[]).is_empty());
    }
}
