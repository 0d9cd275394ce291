//! Requests per second against the number of connections (Tempesta §5.1, Figure 4).

use std::time::Duration;

use super::sweep::Sweep;
use super::tempesta::{BEHIND_BARE, PAPER};
use crate::server::{Kind, bound_on, connections, short_request};
use crate::table::thousands;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// Connections of the paper.
const WANTED: u32 = 20_000;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "tempesta-fig4",
    paper: &PAPER,
    figure: "Figure 4",
    claim: "From 32 to 20,000 connections tidegate is at most 15 % behind a bare epoll server in requests per \
            CPU-second",
    published: "Messages of 64 bytes on 32 to 20,000 connections to one server core: synchronous sockets stay \
                nearly level (3.36 million messages/s at 20,000 connections), kernel and user-space sockets fall.",
    method: "Every connection has one request of 64 bytes under way, which is answered with a body of 64 bytes. A \
             server process holds all connections; where its limit on descriptors does not allow for 20,000, the last \
             point lies 200 below that limit.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let most = connections(WANTED);
    let points = lab.choose(vec![32, 128, 512, 2_048, 8_192, most], vec![32, 512, most]);
    let sweep = Sweep {
        kinds: &[Kind::Bare, Kind::Tidegate],
        size_bytes: 64,
        request: short_request,
        connections: &points,
        rounds: lab.choose(5, 2),
        time: Duration::from_secs(lab.choose(3, 1)),
    };
    let samples = sweep.run(lab)?;
    let mut checks = Vec::new();
    let mut least_rate = f64::INFINITY;
    for connections in samples.connections() {
        let ratio =
            samples.efficiency(Kind::Tidegate, Kind::Bare, connections).ok_or(Error::Nothing("the load"))?;
        checks.push(Check {
            what: format!(
                "requests per CPU-second to bare epoll's at {} connections",
                thousands(connections.into())
            ),
            ratio: ratio.median,
            at_least: BEHIND_BARE,
        });
        let rate = samples.ratio(Kind::Tidegate, Kind::Bare, connections, |sample| sample.requests_per_s);
        least_rate = least_rate.min(rate.map_or(f64::NAN, |rate| rate.median));
    }
    Ok(Outcome {
        raw: samples.raw(),
        summary: samples.summary(Kind::Bare),
        plots: vec![
            (None, samples.plot("Requests per second", "requests/s", |sample| sample.requests_per_s)),
            (
                Some("cpu"),
                samples.plot("Requests per second of server CPU", "requests per CPU-second", |sample| {
                    1e6 / sample.cpu_us_per_request
                }),
            ),
        ],
        verdict: Verdict::of(&checks)
            .noting(&format!("requests/s to bare epoll's: at least {least_rate:.2}"))
            .noting(&bound_on(most, WANTED)),
        servers: samples.servers,
    })
}
