//! Requests per second and server CPU of several servers over a number of connections.

use std::net::SocketAddr;
use std::time::Duration;

use crate::load::Load;
use crate::plot::{Plot, Point, Series};
use crate::server::{Kind, Servers};
use crate::stats::Spread;
use crate::table::{Table, thousands};
use crate::{Error, Lab};

const ESTABLISH_TIMEOUT: Duration = Duration::from_secs(60);
/// Requests that warm a server up before each measurement, as in Tempesta §5.3.
const WARM_UP: u32 = 1000;

/// How long one server is loaded before it is another's turn: what else shares the machine changes within seconds.
const SLICE: Duration = Duration::from_millis(250);

/// What is measured.
pub(super) struct Sweep<'a> {
    pub kinds: &'a [Kind],
    pub size_bytes: usize,
    pub request: fn(SocketAddr) -> String,
    pub connections: &'a [u32],
    pub rounds: usize,
    /// How long each server is loaded in a round.
    pub time: Duration,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample {
    pub kind: Kind,
    pub connections: u32,
    pub round: usize,
    pub requests_per_s: f64,
    pub cpu_us_per_request: f64,
}

/// All measurements of a sweep.
pub(super) struct Samples {
    pub samples: Vec<Sample>,
    pub servers: Vec<String>,
}

impl Sweep<'_> {
    pub(super) fn run(&self, lab: &Lab) -> Result<Samples, Error> {
        let servers = Servers::start(lab, self.kinds, self.size_bytes)?;
        let count = self.kinds.len();
        let (mut step, steps) = (0, self.connections.len() * self.rounds * count);
        let mut samples = Vec::with_capacity(steps);
        for &connections in self.connections {
            let mut loads = Vec::with_capacity(count);
            for index in 0..count {
                loads.push(self.establish(&servers, index, connections)?);
            }
            servers.settle()?;
            for round in 0..self.rounds {
                for (kind, sum) in self.kinds.iter().zip(self.round(&servers, &mut loads)?) {
                    let sample = sum.sample(*kind, connections, round)?;
                    step += 1;
                    let what = format!(
                        "{} connections, round {}: {:10} {:8.0} requests/s {:6.2} us CPU",
                        thousands(connections.into()),
                        round + 1,
                        kind.label(),
                        sample.requests_per_s,
                        sample.cpu_us_per_request
                    );
                    lab.progress(step, steps, &what);
                    samples.push(sample);
                }
            }
            drop(loads);
            servers.settle()?;
        }
        Ok(Samples { samples, servers: servers.versions() })
    }

    /// Opens the connections to one server, once more if one broke: thousands of clients that connect at once can
    /// overflow what the kernel keeps for a server. A server that fails again fails the scenario.
    fn establish(&self, servers: &Servers, index: usize, connections: u32) -> Result<Load, Error> {
        let address = servers.peers()[index].address();
        let established = || {
            let mut load = Load::start(address, connections, &(self.request)(address))?;
            load.establish(WARM_UP.div_ceil(connections.max(1)), ESTABLISH_TIMEOUT)?;
            Ok(load)
        };
        let first = established();
        let Err(error @ Error::Connections { .. }) = first else { return first };
        eprintln!("{}: {error}; once more", self.kinds[index].label());
        servers.settle()?;
        established()
    }

    /// Loads each server for a part of the time in turn, there and back again.
    fn round(&self, servers: &Servers, loads: &mut [Load]) -> Result<Vec<Sum>, Error> {
        let mut sums = vec![Sum::default(); loads.len()];
        let mut order: Vec<usize> = (0..loads.len()).collect();
        for _ in 0..self.time.as_millis().div_ceil(SLICE.as_millis()) {
            for &index in &order {
                let peer = &servers.peers()[index];
                let before = peer.threads_cpu_s().map_err(Error::Server)?;
                let report = loads[index].send(SLICE)?;
                let sum = &mut sums[index];
                sum.cpu_s += peer.threads_cpu_s().map_err(Error::Server)? - before;
                sum.answers += report.answers;
                sum.elapsed_s += report.elapsed_ns as f64 / 1e9;
            }
            order.reverse();
        }
        Ok(sums)
    }
}

/// What one server did in the parts of a round.
#[derive(Clone, Debug, Default)]
struct Sum {
    answers: u64,
    elapsed_s: f64,
    cpu_s: f64,
}

impl Sum {
    fn sample(&self, kind: Kind, connections: u32, round: usize) -> Result<Sample, Error> {
        if self.answers == 0 || self.elapsed_s == 0.0 {
            return Err(Error::Nothing("the load"));
        }
        let answers = self.answers as f64;
        let (requests_per_s, cpu_us_per_request) = (answers / self.elapsed_s, self.cpu_s * 1e6 / answers);
        Ok(Sample { kind, connections, round, requests_per_s, cpu_us_per_request })
    }
}

impl Samples {
    /// One row a measurement.
    pub(super) fn raw(&self) -> Table {
        let mut table =
            Table::new(["connections", "round", "server", "requests_per_s", "cpu_us_per_request"]);
        for sample in &self.samples {
            table.row([
                sample.connections.to_string(),
                (sample.round + 1).to_string(),
                sample.kind.label().to_owned(),
                format!("{:.0}", sample.requests_per_s),
                format!("{:.3}", sample.cpu_us_per_request),
            ]);
        }
        table
    }

    /// One row for each number of connections and server, with its ratio to `reference`.
    pub(super) fn summary(&self, reference: Kind) -> Table {
        let ratio_name = format!("requests per CPU-second, ratio to {}", reference.label());
        let mut table = Table::new(["connections", "server", "requests/s", "CPU µs/request", &ratio_name]);
        for connections in self.connections() {
            for kind in self.kinds() {
                let text = |spread: Option<Spread>, digits| spread.map_or(String::new(), |s| s.text(digits));
                table.row([
                    thousands(connections.into()),
                    kind.label().to_owned(),
                    text(self.spread(kind, connections, |s| s.requests_per_s), 0),
                    text(self.spread(kind, connections, |s| s.cpu_us_per_request), 2),
                    text(self.efficiency(kind, reference, connections), 2),
                ]);
            }
        }
        table
    }

    /// A plot of `value` over the connections, a line for each server.
    pub(super) fn plot(&self, title: &str, y: &str, value: impl Fn(&Sample) -> f64 + Copy) -> Plot {
        let series = self.kinds().into_iter().map(|kind| Series {
            name: kind.label().to_owned(),
            points: self
                .connections()
                .into_iter()
                .filter_map(|connections| {
                    Some(Point { x: connections.into(), y: self.spread(kind, connections, value)? })
                })
                .collect(),
        });
        Plot {
            title: title.to_owned(),
            x: "connections".to_owned(),
            x_log: true,
            y: y.to_owned(),
            series: series.collect(),
        }
    }

    /// Requests per CPU-second of `kind` as a multiple of those of `reference`, over the rounds.
    pub(super) fn efficiency(&self, kind: Kind, reference: Kind, connections: u32) -> Option<Spread> {
        self.ratio(kind, reference, connections, |sample| 1.0 / sample.cpu_us_per_request)
    }

    /// `value` of `kind` as a multiple of that of `reference`, each round by itself.
    pub(super) fn ratio(
        &self,
        kind: Kind,
        reference: Kind,
        connections: u32,
        value: impl Fn(&Sample) -> f64,
    ) -> Option<Spread> {
        let of = |kind| self.samples.iter().filter(move |s| s.kind == kind && s.connections == connections);
        Spread::of(of(kind).filter_map(|own| {
            let other = of(reference).find(|other| other.round == own.round)?;
            Some(value(own) / value(other))
        }))
    }

    pub(super) fn connections(&self) -> Vec<u32> {
        let mut all: Vec<u32> = self.samples.iter().map(|sample| sample.connections).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// In an order in which a server has the same colour in every plot.
    fn kinds(&self) -> Vec<Kind> {
        let has = |kind: &Kind| self.samples.iter().any(|sample| sample.kind == *kind);
        [Kind::Bare, Kind::Tidegate, Kind::Nginx, Kind::Undefended].into_iter().filter(has).collect()
    }

    fn spread(&self, kind: Kind, connections: u32, value: impl Fn(&Sample) -> f64) -> Option<Spread> {
        Spread::of(self.samples.iter().filter(|s| s.kind == kind && s.connections == connections).map(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Samples {
        let sample = |kind, round, cpu_us_per_request| Sample {
            kind,
            connections: 32,
            round,
            requests_per_s: 100.0,
            cpu_us_per_request,
        };
        // The second round ran on a machine at half the speed.
        let samples = vec![
            sample(Kind::Bare, 0, 4.0),
            sample(Kind::Tidegate, 0, 5.0),
            sample(Kind::Tidegate, 1, 10.0),
            sample(Kind::Bare, 1, 8.0),
        ];
        Samples { samples, servers: Vec::new() }
    }

    #[test]
    fn a_sample_is_the_sum_of_the_parts_of_its_round() {
        let sum = Sum { answers: 1000, elapsed_s: 0.5, cpu_s: 0.004 };
        let sample = sum.sample(Kind::Bare, 32, 1).unwrap();
        assert_eq!((sample.requests_per_s, sample.cpu_us_per_request), (2000.0, 4.0));
        assert!(Sum::default().sample(Kind::Bare, 32, 1).is_err(), "no answers");
    }

    #[test]
    fn ratios_compare_servers_within_a_round() {
        let ratio = samples().efficiency(Kind::Tidegate, Kind::Bare, 32).unwrap();
        assert_eq!(ratio, Spread { median: 0.8, least: 0.8, greatest: 0.8 });
        assert_eq!(samples().efficiency(Kind::Nginx, Kind::Bare, 32), None);
        assert_eq!(samples().efficiency(Kind::Tidegate, Kind::Bare, 64), None);
    }

    #[test]
    fn the_summary_has_a_row_for_each_server_that_was_measured() {
        let summary = samples().summary(Kind::Bare);
        assert_eq!(summary.len(), 2);
        assert!(summary.csv().contains("32,tidegate,100 (100–100),7.50 (5.00–10.00),0.80 (0.80–0.80)"));
        assert_eq!(samples().raw().len(), 4);
    }

    #[test]
    fn the_plot_has_a_line_for_each_server() {
        let plot = samples().plot("t", "y", |sample| sample.cpu_us_per_request);
        assert_eq!(plot.series.len(), 2);
        assert_eq!(plot.series[0].points[0].y.median, 6.0);
    }
}
