//! What a server's processor does for a gigabit (Trickles §6.1, Figure 12).

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tidegate_bench::peers::{install, pinned};
use tidegate_bench::{LOAD_CORE, SERVER_CORE};

use super::trickles::{PAPER, plot, spread};
use crate::link::{Hosts, Side};
use crate::plot::Point;
use crate::stats::Spread;
use crate::table::Table;
use crate::transfer::{Carrier, Flows, Replica, Site, load};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const OBJECT_BYTES: u64 = 8_000_000;
const FLOWS: usize = 4;
const CACHE_ENTRIES: usize = 1 << 12;
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Packets of one size as on a wire.
const MTU: &str = "1500";

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig12",
    paper: &PAPER,
    figure: "Figure 12",
    claim: "A gigabit over Trickles takes at most 2 times the server's processor time of kernel TCP without \
            segmentation offload",
    published: "Processor load against throughput: Trickles takes more than TCP, mostly for the MAC; the soft-state \
                cache of minisockets (§5.1) wins some of it back.",
    method: "Server and clients on a core each, joined by the loopback interface with packets of 1500 bytes; the user \
             and system time of the server's threads for the carrier, in which the loopback delivers what it sends. \
             Offload is turned off in two ways. By `ethtool -K lo tso off gso off`: the kernel still sends TCP in \
             large pieces, which it cuts last of all, in software, as it does for UDP sockets that ask for it. And by \
             gso_max_segs 1, so that every segment goes through the whole stack, as it did in the paper's kernel. The \
             soft-state cache, where it is on, remembers more connections than there are.",
    run,
};

/// What is measured, in turn: carrier, whether its server has a soft-state cache, and the names in raw figures and
/// legends.
const CASES: [(Carrier, bool, &str, &str); 3] = [
    (Carrier::Trickles, false, "trickles", "Trickles"),
    (Carrier::Trickles, true, "trickles-cache", "Trickles, soft-state cache"),
    (Carrier::Tcp, false, "tcp", "TCP Reno"),
];

/// How segments are made: the name, whether the interface's features are on, and its most segments of one piece. The
/// bound is for all but the last.
const OFFLOADS: [(&str, &str, &str); 3] =
    [("off: tso off gso off", "off", "65535"), ("off: gso_max_segs 1", "on", "1"), ("on", "on", "65535")];

/// Gbit/s and CPU-seconds per Gbit of each case with one kind of segments, round by round.
struct Figures {
    offload: &'static str,
    of: [Vec<(f64, f64)>; CASES.len()],
}

impl Figures {
    fn rates(&self, case: usize) -> impl Iterator<Item = f64> {
        self.of[case].iter().map(|(gbit_per_s, _)| *gbit_per_s)
    }

    fn costs(&self, case: usize) -> impl Iterator<Item = f64> {
        self.of[case].iter().map(|(_, cost)| *cost)
    }

    /// What a case costs to what TCP does, the last of them.
    fn times_tcp(&self, case: usize) -> Result<Spread, Error> {
        spread(self.costs(case).zip(self.costs(CASES.len() - 1)).map(|(ours, tcp)| ours / tcp))
    }
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    // Short ones: what shares the machine changes within seconds, and each ratio is of neighbours.
    let rounds = lab.choose(20, 1);
    let time = Duration::from_millis(lab.choose(400, 500));
    let hosts = Hosts::new(Vec::new(), 1)?;
    let sites = [Site::new(&[OBJECT_BYTES])?, Site::new(&[OBJECT_BYTES])?.with_cache(CACHE_ENTRIES)];
    let servers = [start(lab, &hosts, &sites[0], 0)?, start(lab, &hosts, &sites[1], 1)?];
    let mut raw = Table::new(["offload", "round", "way", "gbit_per_s", "cpu_s_per_gbit"]);
    let mut all = Vec::new();
    for (step, (offload, features, segments)) in OFFLOADS.into_iter().enumerate() {
        lab.progress(step + 1, OFFLOADS.len(), &format!("segmentation offload {offload}"));
        shape(&hosts, features, segments)?;
        let mut figures = Figures { offload, of: CASES.map(|_| Vec::new()) };
        for round in 0..rounds {
            let mut cases: Vec<_> = CASES.into_iter().enumerate().collect();
            if round % 2 == 1 {
                cases.reverse();
            }
            for (index, (carrier, cached, name, _)) in cases {
                let server = &servers[usize::from(cached)];
                let (gbit_per_s, cost) = measure(&hosts, server, carrier, time)?;
                figures.of[index].push((gbit_per_s, cost));
                raw.row([
                    offload.into(),
                    (round + 1).to_string(),
                    name.into(),
                    format!("{gbit_per_s:.3}"),
                    format!("{cost:.4}"),
                ]);
            }
        }
        all.push(figures);
    }
    outcome(raw, &all)
}

fn outcome(raw: Table, all: &[Figures]) -> Result<Outcome, Error> {
    let mut summary =
        Table::new(["segmentation offload", "way", "Gbit/s", "server CPU-s per Gbit", "times TCP's"]);
    let mut series = CASES.map(|(.., label)| (label.to_owned(), Vec::new()));
    let mut checks = Vec::new();
    let mut note = String::new();
    for (step, figures) in all.iter().enumerate() {
        let offload = figures.offload;
        for (index, (carrier, _, _, label)) in CASES.into_iter().enumerate() {
            let cost = spread(figures.costs(index))?;
            let ratio = figures.times_tcp(index)?;
            let ours = carrier == Carrier::Trickles;
            summary.row([
                offload.into(),
                label.into(),
                spread(figures.rates(index))?.text(2),
                cost.text(3),
                if ours { ratio.text(2) } else { String::new() },
            ]);
            series[index].1.push(Point { x: step as f64, y: cost });
            if ours && step + 1 < OFFLOADS.len() {
                checks.push(Check {
                    what: format!("TCP's processor time twice to that of {label}, offload {offload}"),
                    ratio: 2.0 / ratio.median,
                    at_least: 1.0,
                });
            } else if ours && note.is_empty() {
                note = format!("with offload {:.2} times TCP's", ratio.median);
            }
        }
    }
    let axis = ("segmentation offload: 0 by ethtool off, 1 by gso_max_segs off, 2 on", false);
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot("Server's processor time", axis, "CPU-s per Gbit", series.into()))],
        verdict: Verdict::of(&checks).noting(&note),
        servers: Vec::new(),
    })
}

fn start(lab: &Lab, hosts: &Hosts, site: &Site, n: u16) -> Result<Replica, Error> {
    Replica::start(lab, site, LOOPBACK, n, |program| {
        let program = pinned(SERVER_CORE, &Command::new(program));
        let mut command = hosts.command(Side::Server, program.get_program());
        command.args(program.get_args());
        command
    })
}

fn shape(hosts: &Hosts, features: &str, segments: &str) -> Result<(), Error> {
    let orders: [(&str, &str, &[&str]); 2] = [
        ("ethtool", "ethtool", &["-K", "lo", "tso", features, "gso", features]),
        ("ip", "iproute2", &["link", "set", "lo", "mtu", MTU, "gso_max_segs", segments]),
    ];
    for (program, package, arguments) in orders {
        install(program, package).map_err(Error::Link)?;
        let status = hosts.command(Side::Server, Path::new(program)).args(arguments).status();
        let failed = |why| Error::Link(format!("{program} {}: {why}", arguments.join(" ")));
        let status = status.map_err(|error| failed(error.to_string()))?;
        if !status.success() {
            return Err(failed(status.to_string()));
        }
    }
    Ok(())
}

/// Gbit/s and CPU-seconds per Gbit.
fn measure(hosts: &Hosts, server: &Replica, carrier: Carrier, time: Duration) -> Result<(f64, f64), Error> {
    let flows = Flows { carrier, server: server.address(), bytes: OBJECT_BYTES, from: vec![LOOPBACK; FLOWS] };
    let threads = match carrier {
        Carrier::Trickles => "trickles-",
        Carrier::Tcp => "core-",
    };
    let before = server.cpu_s(threads)?;
    let received = hosts.run(Side::Server, || {
        let mut core = rustix::thread::CpuSet::new();
        core.set(LOAD_CORE);
        rustix::thread::sched_setaffinity(None, &core)
            .map_err(|error| Error::Core { core: LOAD_CORE, source: error.into() })?;
        load(&[flows], Duration::ZERO, time)
    })?;
    let used = server.cpu_s(threads)? - before;
    let bytes: u64 = received.iter().flat_map(|of| &of.bytes).sum();
    let gbit = bytes as f64 * 8.0 / 1e9;
    if gbit == 0.0 {
        return Err(Error::Nothing("the load"));
    }
    Ok((gbit / time.as_secs_f64(), used / gbit))
}
