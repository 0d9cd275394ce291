//! Many objects over one connection (Trickles §5.2, §6.1, Figure 14).

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tidegate_trickles::client::Config;
use tidegate_trickles::udp::{Connection, Options};
use tokio::io::AsyncWriteExt;
use tokio::task::JoinSet;

use super::trickles::{Bench, PAPER, RATE, ROUND_TRIP, mbit_per_s, plot, spread};
use crate::link::{Profile, Side, client_address};
use crate::plot::Point;
use crate::table::{Table, thousands};
use crate::transfer::{Carrier, block_on, open, read_response, request};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// Objects of each size that are asked for at once.
const OBJECTS: [(u64, usize); 2] = [(20_000, 150), (250_000, 30)];

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig14",
    paper: &PAPER,
    figure: "Figure 14",
    claim: "Objects of 20 kB and 250 kB that are asked for at once arrive within 5 % of the time that TCP takes",
    published: "Throughput of pipelined requests for small and larger objects: with parallel requests over sparse \
                sequence numbers Trickles reaches TCP.",
    method: "A 100 Mbit/s link with 10 ms round trip. One connection, 150 objects of 20 kB or 30 of 250 kB, all asked \
             for at the start: by TCP and by Trickles pipelined on one stream, and by Trickles as parallel requests, \
             each in a region of sequence numbers of its own that a SKIP ends.",
    run,
};

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Pipelined(Carrier),
    Parallel,
}

const WAYS: [(Way, &str, &str); 3] = [
    (Way::Pipelined(Carrier::Trickles), "trickles-pipelined", "Trickles, pipelined"),
    (Way::Parallel, "trickles-parallel", "Trickles, parallel"),
    (Way::Pipelined(Carrier::Tcp), "tcp-pipelined", "TCP Reno, pipelined"),
];

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let rounds = lab.choose(11, 2);
    let lengths = OBJECTS.map(|(bytes, _)| bytes);
    let bench = Bench::new(lab, &lengths, vec![Profile::clean(RATE, ROUND_TRIP)])?;
    let mut raw = Table::new(["bytes", "round", "way", "ms"]);
    let mut summary = Table::new(["objects", "way", "ms", "Mbit/s", "TCP's time by this"]);
    let mut series = WAYS.map(|(_, _, label)| (label.to_owned(), Vec::new()));
    let mut checks = Vec::new();
    for (step, (bytes, objects)) in OBJECTS.into_iter().enumerate() {
        lab.progress(step + 1, OBJECTS.len(), &format!("{objects} objects of {} bytes", thousands(bytes)));
        let times = measure(&bench, bytes, objects, rounds)?;
        for (index, (way, name, label)) in WAYS.into_iter().enumerate() {
            for (round, ways) in times.iter().enumerate() {
                raw.row([
                    bytes.to_string(),
                    (round + 1).to_string(),
                    name.into(),
                    format!("{:.2}", ways[index]),
                ]);
            }
            let time = spread(times.iter().map(|ways| ways[index]))?;
            let ratio = spread(times.iter().map(|ways| ways[WAYS.len() - 1] / ways[index]))?;
            let total = bytes * objects as u64;
            let rate = spread(
                times.iter().map(|ways| mbit_per_s(total, Duration::from_secs_f64(ways[index] / 1e3))),
            )?;
            summary.row([
                format!("{objects} of {} bytes", thousands(bytes)),
                label.into(),
                time.text(1),
                format!("{:.1}", rate.median),
                ratio.text(3),
            ]);
            series[index].1.push(Point { x: bytes as f64, y: rate });
            if way != Way::Pipelined(Carrier::Tcp) {
                checks.push(Check {
                    what: format!("{label}: TCP's time by this for objects of {} bytes", thousands(bytes)),
                    ratio: ratio.median,
                    at_least: 0.95,
                });
            }
        }
    }
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(
            None,
            plot("Objects asked for at once", ("bytes of an object", true), "Mbit/s", series.into()),
        )],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

/// Milliseconds that each way takes in each round.
fn measure(
    bench: &Bench,
    bytes: u64,
    objects: usize,
    rounds: usize,
) -> Result<Vec<[f64; WAYS.len()]>, Error> {
    let server = bench.server.address();
    bench.hosts.run(Side::Client, || {
        block_on(async {
            let mut times = Vec::new();
            for _ in 0..rounds {
                let mut round = [0.0; WAYS.len()];
                for (ms, (way, ..)) in round.iter_mut().zip(WAYS) {
                    *ms = fetch_all(way, server, bytes, objects).await?.as_secs_f64() * 1e3;
                }
                times.push(round);
            }
            Ok(times)
        })
    })
}

async fn fetch_all(way: Way, server: SocketAddr, bytes: u64, objects: usize) -> Result<Duration, Error> {
    let began = Instant::now();
    match way {
        Way::Pipelined(carrier) => {
            let mut stream = open(carrier, &[server], client_address(0)).await?;
            let text: String = (1..=objects).map(|n| request(bytes, n == objects)).collect();
            stream.write_all(text.as_bytes()).await.map_err(Error::Load)?;
            if carrier == Carrier::Trickles {
                stream.shutdown().await.map_err(Error::Load)?;
            }
            let mut buffer = Vec::new();
            for _ in 0..objects {
                read_response(&mut stream, &mut buffer, bytes, |_| ()).await?;
            }
        }
        Way::Parallel => {
            // All of them at once, as by the other ways.
            let config = Config { max_requests: objects, ..Config::default() };
            let local = Some(client_address(0));
            let connection = Connection::new(&Options { config, local, ..Options::to(vec![server]) });
            let connection = connection.map_err(Error::Load)?;
            let text = request(bytes, true);
            let ask = |_| connection.request(text.as_bytes()).map_err(|error| Error::Load(error.into()));
            let streams: Vec<_> = (0..objects).map(ask).collect::<Result<_, _>>()?;
            // Read as they come: what were left for the end would be added to the time.
            let mut readers = JoinSet::new();
            for mut stream in streams {
                readers
                    .spawn(async move { read_response(&mut stream, &mut Vec::new(), bytes, |_| ()).await });
            }
            while let Some(read) = readers.join_next().await {
                read.map_err(|error| Error::Load(error.into()))??;
            }
        }
    }
    Ok(began.elapsed())
}
