//! What the scenarios of the Trickles paper have in common.

use std::time::Duration;

use crate::link::{Hosts, Profile, SERVER, Side};
use crate::plot::{Plot, Point, Series};
use crate::stats::Spread;
use crate::transfer::{Replica, Site};
use crate::{Error, Lab, Paper};

pub(super) static PAPER: Paper = Paper {
    name: "trickles",
    title: "Trickles: A Stateless Network Stack (its §6)",
    setting: "The paper's machines were joined by a 100 Mbit/s or 1 Gbit/s switch and dummynet; its Trickles and its \
              TCP were both in the kernel. Here both hosts are network namespaces of one machine, and a program \
              between two TUN devices is the link: rate, delay, loss and a queue of one bandwidth-delay product, to \
              which every packet comes after a wait by chance of up to one packet's time (Figure 13 says its own); \
              segments leave one by one. Link, server and clients have real-time priority, as the kernel's TCP has \
              that answers in the link's thread (decision 14). The server is one tidegate with one worker, which \
              serves the same files over Trickles (in UDP datagrams) and over the kernel's TCP, with Reno's congestion \
              control as in the paper; clients of both kinds are tasks of one process. Clients compare every byte with \
              what it must be. Headers are in the link's rate: of 1500 bytes a packet of Trickles has 1404 for content \
              and one of TCP 1448, so that at a full link 0.97 of TCP's content is parity.",
};

/// Two hosts with a server that both carriers reach.
pub(super) struct Bench {
    // Before the hosts, whose namespace it runs in.
    pub(super) server: Replica,
    pub(super) site: Site,
    pub(super) hosts: Hosts,
}

impl Bench {
    /// A server of files of these lengths behind links of these profiles.
    pub(super) fn new(lab: &Lab, lengths: &[u64], profiles: Vec<Profile>) -> Result<Self, Error> {
        let hosts = Hosts::new(profiles, 1)?;
        // What runs beside a quick run, tests for example, need not wait for figures that mean nothing.
        let hosts = if lab.quick { hosts } else { hosts.in_real_time() };
        let site = Site::new(lengths)?;
        let server = Replica::start(lab, &site, SERVER, 0, |program| hosts.command(Side::Server, program))?;
        Ok(Self { server, site, hosts })
    }
}

/// The paper's bottleneck.
pub(super) const RATE: u64 = 100_000_000;

/// The paper's round trip.
pub(super) const ROUND_TRIP: Duration = Duration::from_millis(10);

pub(super) fn mbit_per_s(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8.0 / 1e6 / time.as_secs_f64()
}

pub(super) fn spread(values: impl IntoIterator<Item = f64>) -> Result<Spread, Error> {
    Spread::of(values).ok_or(Error::Nothing("the load"))
}

pub(super) fn plot(
    title: &str,
    (x, x_log): (&str, bool),
    y: &str,
    series: Vec<(String, Vec<Point>)>,
) -> Plot {
    let series = series.into_iter().map(|(name, points)| Series { name, points }).collect();
    Plot { title: title.into(), x: x.into(), x_log, y: y.into(), series }
}
