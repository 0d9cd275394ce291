//! A small cached file against nginx (Tempesta §5.3, Figure 6).

use std::net::SocketAddr;
use std::time::Duration;

use super::sweep::Sweep;
use super::tempesta::PAPER;
use crate::server::{Kind, connections};
use crate::table::thousands;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// Bytes of the index page of nginx, which the paper serves.
const PAGE_BYTES: usize = 612;
const TIMES_NGINX: f64 = 1.6;
/// Where the claim is made; with fewer connections than that, the load waits and not the server.
const CLAIMED: [u32; 3] = [32, 512, 10_000];

pub(super) const SCENARIO: Scenario = Scenario {
    name: "tempesta-fig6",
    paper: &PAPER,
    figure: "Figure 6",
    claim: "At 32, 512 and 10,000 connections tidegate serves a cached 612-byte page with at least 1.6 times nginx's \
            requests per CPU-second",
    published: "A page of 612 bytes from the cache: Tempesta reaches 552,000 requests/s at 32 connections and nginx at \
                most 116,000, at 128 connections; with 512 nginx has fallen to 79,300.",
    method: "nginx at its best: one worker, sendfile, open files cached, no log, tcp_nodelay; tcp_nopush off, which \
             costs system calls on small files. The load is this program's own instead of siege, which has a thread \
             for each connection. Every server answers 1,000 requests before each measurement, as in the paper.",
    run,
};

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let most = connections(10_000);
    let points = lab.choose(vec![1, 8, 32, 128, 512, 2_048, most], vec![32, 512, most]);
    let sweep = Sweep {
        kinds: &[Kind::Bare, Kind::Nginx, Kind::Tidegate],
        size_bytes: PAGE_BYTES,
        request,
        connections: &points,
        rounds: lab.choose(5, 2),
        time: Duration::from_secs(lab.choose(3, 1)),
    };
    let samples = sweep.run(lab)?;
    let mut checks = Vec::new();
    let mut notes = Vec::new();
    for connections in CLAIMED.map(|claimed| claimed.min(most)) {
        let ratio = |reference, value: fn(&super::sweep::Sample) -> f64| {
            let ratio = samples.ratio(Kind::Tidegate, reference, connections, value);
            ratio.map(|ratio| ratio.median).ok_or(Error::Nothing("the load"))
        };
        checks.push(Check {
            what: format!(
                "requests per CPU-second to nginx's at {} connections",
                thousands(connections.into())
            ),
            ratio: ratio(Kind::Nginx, |sample| 1.0 / sample.cpu_us_per_request)?,
            at_least: TIMES_NGINX,
        });
        notes.push((
            ratio(Kind::Nginx, |sample| sample.requests_per_s)?,
            ratio(Kind::Bare, |sample| 1.0 / sample.cpu_us_per_request)?,
        ));
    }
    let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::INFINITY, f64::min);
    let note = format!(
        "requests/s to nginx's: at least {:.2}; requests per CPU-second to bare epoll's: at least {:.2}",
        least(&mut notes.iter().map(|note| note.0)),
        least(&mut notes.iter().map(|note| note.1))
    );
    Ok(Outcome {
        raw: samples.raw(),
        summary: samples.summary(Kind::Nginx),
        plots: vec![
            (
                None,
                samples.plot("Requests per second, 612 bytes", "requests/s", |sample| sample.requests_per_s),
            ),
            (
                Some("cpu"),
                samples.plot(
                    "Requests per second of server CPU, 612 bytes",
                    "requests per CPU-second",
                    |sample| 1e6 / sample.cpu_us_per_request,
                ),
            ),
        ],
        verdict: Verdict::of(&checks).noting(&note),
        servers: samples.servers,
    })
}

/// What siege sends.
fn request(server: SocketAddr) -> String {
    format!(
        "GET /object HTTP/1.1\r\nHost: {server}\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n\
         User-Agent: Mozilla/5.0 (pc-x86_64-linux-gnu) Siege/3.0\r\nConnection: keep-alive\r\n\r\n"
    )
}
