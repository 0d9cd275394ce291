//! Trace-driven simulation: connections at once, in all, and their use (DHTTP §VI-A, Figures 6 to 9).

use super::dhttp::PAPER;
use super::dhttp_connections::{Load, Rules, simulate};
use crate::plot::{Plot, Point, Series};
use crate::table::{Table, thousands};
use crate::trace::{Access, read_log, synthetic};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const TIMEOUTS_S: [u32; 8] = [1, 2, 5, 10, 15, 30, 60, 120];
/// HTTP, and DHTTP with the paper's two thresholds.
const THRESHOLDS_BYTES: [u64; 3] = [0, 1460, 4096];
/// The timeout at which the paper names its reductions: Apache's default.
const APACHE_S: u32 = 15;

const TRACE: &str = "A simulation of the paper's rules: each access opens a connection until its client has as many as \
                     it may, then the one that was not used for longest is used again; an idle one ends after the \
                     timeout; under DHTTP shorter responses than the threshold go by UDP. The trace is made: it has \
                     the rate (100 million accesses in three months), the mean response of 13 kB and the shares of \
                     responses below 1,460 bytes (40 %) and 4 kB (58 %) of the paper's, with visits, pages and off \
                     times as in SURGE; three visits in ten are by a client that has been there before and half of \
                     whose responses say that its copy is still good. `--trace FILE` takes the accesses of any log in \
                     the common format instead.";

const CONNECTIONS_CLAIM: &str = "DHTTP needs no more connections than HTTP, at once and in all, at every timeout and \
                                 threshold";
const USE_CLAIM: &str =
    "A connection carries no fewer bytes under DHTTP than under HTTP, at every timeout and threshold";

pub(super) const FIG6: Scenario = Scenario {
    name: "dhttp-fig6",
    paper: &PAPER,
    figure: "Figure 6",
    claim: CONNECTIONS_CLAIM,
    published: "With three connections per client and a timeout of 15 s, connections at one time are fewer by a third \
                with a threshold of 4 kB and by 20 % with 1,460 bytes; in all they are fewer, the more so the shorter \
                the timeout.",
    method: TRACE,
    run: |lab| View { per_client: 3, shows: Shows::Connections }.run(lab),
};

pub(super) const FIG7: Scenario = Scenario {
    name: "dhttp-fig7",
    figure: "Figure 7",
    claim: USE_CLAIM,
    published: "With three connections per client, one carries over two times as many bytes under DHTTP as under HTTP, \
                for 4 kB and short timeouts.",
    run: |lab| View { per_client: 3, shows: Shows::Use }.run(lab),
    ..FIG6
};

pub(super) const FIG8: Scenario = Scenario {
    name: "dhttp-fig8",
    figure: "Figure 8",
    published: "With one connection per client, connections at one time are fewer by almost a factor of two for 5 s \
                and 4 kB; in all, HTTP comes down to DHTTP's number only with long timeouts.",
    run: |lab| View { per_client: 1, shows: Shows::Connections }.run(lab),
    ..FIG6
};

pub(super) const FIG9: Scenario = Scenario {
    name: "dhttp-fig9",
    figure: "Figure 9",
    claim: USE_CLAIM,
    published: "With one connection per client, DHTTP's advantage in the use of connections is much smaller than with \
                three, except for short timeouts.",
    run: |lab| View { per_client: 1, shows: Shows::Use }.run(lab),
    ..FIG6
};

#[derive(Clone, Copy)]
enum Shows {
    Connections,
    Use,
}

#[derive(Clone, Copy)]
struct View {
    per_client: usize,
    shows: Shows,
}

struct Cell {
    timeout_s: u32,
    threshold_bytes: u64,
    load: Load,
}

fn name(threshold_bytes: u64) -> String {
    match threshold_bytes {
        0 => "HTTP".to_owned(),
        bytes => format!("DHTTP, {} bytes", thousands(bytes)),
    }
}

impl View {
    fn run(self, lab: &Lab) -> Result<Outcome, Error> {
        let (trace, note) = match &lab.trace {
            Some(path) => {
                let (trace, others) = read_log(path)?;
                (trace, format!("{} of the log's lines are no accesses", thousands(others as u64)))
            }
            None => (synthetic(lab.choose(2_000_000, 200_000), 1), String::new()),
        };
        if trace.is_empty() {
            return Err(Error::Nothing("a trace without accesses"));
        }
        let mut cells = Vec::new();
        for threshold_bytes in THRESHOLDS_BYTES {
            for timeout_s in TIMEOUTS_S {
                let rules = Rules {
                    by_udp_below_bytes: threshold_bytes,
                    timeout_s: f64::from(timeout_s),
                    per_client: self.per_client,
                };
                cells.push(Cell { timeout_s, threshold_bytes, load: simulate(&trace, rules) });
            }
            lab.progress(cells.len(), THRESHOLDS_BYTES.len() * TIMEOUTS_S.len(), &name(threshold_bytes));
        }
        Ok(self.outcome(&cells, &trace, &note))
    }

    fn outcome(self, cells: &[Cell], trace: &[Access], note: &str) -> Outcome {
        let plots = match self.shows {
            Shows::Connections => vec![
                (
                    None,
                    self.plot(cells, "Connections at one time", "connections", |load| load.at_once as f64),
                ),
                (
                    Some("total"),
                    self.plot(cells, "Connections in all", "connections", |load| load.in_all as f64),
                ),
            ],
            Shows::Use => vec![(
                None,
                self.plot(cells, "Use of connections", "bytes per connection", Load::bytes_per_connection),
            )],
        };
        let share = |threshold_bytes| {
            let by_udp = at(cells, APACHE_S, threshold_bytes).map_or(0, |load| load.by_udp);
            by_udp as f64 / trace.len() as f64 * 100.0
        };
        let mut verdict = Verdict::of(&self.checks(cells));
        if let Shows::Connections = self.shows
            && self.per_client == 3
        {
            let fewer = |threshold_bytes| {
                let load = |bytes| at(cells, APACHE_S, bytes).map_or(f64::NAN, |load| load.at_once as f64);
                (1.0 - load(threshold_bytes) / load(0)) * 100.0
            };
            verdict = verdict.noting(&format!(
                "at {APACHE_S} s connections at one time are fewer by {:.0} % with 4,096 bytes (paper: 33 %) and by \
                 {:.0} % with 1,460 bytes (paper: 20 %)",
                fewer(4096),
                fewer(1460)
            ));
        }
        verdict = verdict.noting(&format!(
            "{} accesses, of which {:.0} % go by UDP with 1,460 bytes and {:.0} % with 4,096 (paper: 40 and 58 %)",
            thousands(trace.len() as u64),
            share(1460),
            share(4096)
        ));
        Outcome {
            raw: raw(cells),
            summary: self.summary(cells),
            plots,
            verdict: verdict.noting(note),
            servers: Vec::new(),
        }
    }

    fn checks(self, cells: &[Cell]) -> Vec<Check> {
        let mut checks = Vec::new();
        for cell in cells.iter().filter(|cell| cell.threshold_bytes > 0) {
            let Some(http) = at(cells, cell.timeout_s, 0) else { continue };
            let mut check = |what: &str, ratio: f64| {
                let what = format!("{what} at {} s, {}", cell.timeout_s, name(cell.threshold_bytes));
                checks.push(Check { what, ratio, at_least: 1.0 });
            };
            match self.shows {
                Shows::Connections => {
                    check(
                        "HTTP's connections at one time to DHTTP's",
                        http.at_once as f64 / cell.load.at_once as f64,
                    );
                    check(
                        "HTTP's connections in all to DHTTP's",
                        http.in_all as f64 / cell.load.in_all as f64,
                    );
                }
                Shows::Use => check(
                    "DHTTP's bytes per connection to HTTP's",
                    cell.load.bytes_per_connection() / http.bytes_per_connection(),
                ),
            }
        }
        checks
    }

    fn plot(self, cells: &[Cell], title: &str, y: &str, value: impl Fn(&Load) -> f64) -> Plot {
        let connections = if self.per_client == 1 { "connection" } else { "connections" };
        let line = |threshold_bytes| Series {
            name: name(threshold_bytes),
            points: cells
                .iter()
                .filter(|cell| cell.threshold_bytes == threshold_bytes)
                .map(|cell| Point::exact(f64::from(cell.timeout_s), value(&cell.load)))
                .collect(),
        };
        Plot {
            title: format!("{title}, {} {connections} per client", self.per_client),
            x: "timeout of idle connections, s".to_owned(),
            x_log: true,
            y: y.to_owned(),
            series: THRESHOLDS_BYTES.map(line).into(),
        }
    }

    fn summary(self, cells: &[Cell]) -> Table {
        let mut table = Table::new([
            "timeout, s",
            "protocol",
            "connections at once",
            "connections in all",
            "bytes/connection",
        ]);
        for timeout_s in TIMEOUTS_S {
            for threshold_bytes in THRESHOLDS_BYTES {
                let Some(load) = at(cells, timeout_s, threshold_bytes) else { continue };
                table.row([
                    timeout_s.to_string(),
                    name(threshold_bytes),
                    thousands(load.at_once),
                    thousands(load.in_all),
                    thousands(load.bytes_per_connection() as u64),
                ]);
            }
        }
        table
    }
}

fn at(cells: &[Cell], timeout_s: u32, threshold_bytes: u64) -> Option<&Load> {
    let cell =
        cells.iter().find(|cell| cell.timeout_s == timeout_s && cell.threshold_bytes == threshold_bytes);
    cell.map(|cell| &cell.load)
}

fn raw(cells: &[Cell]) -> Table {
    let mut table = Table::new([
        "timeout_s",
        "threshold_bytes",
        "connections_at_once",
        "connections_in_all",
        "bytes_by_tcp",
        "responses_by_udp",
    ]);
    for Cell { timeout_s, threshold_bytes, load } in cells {
        table.row([
            timeout_s.to_string(),
            threshold_bytes.to_string(),
            load.at_once.to_string(),
            load.in_all.to_string(),
            load.bytes.to_string(),
            load.by_udp.to_string(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(trace: Option<std::path::PathBuf>) -> Result<Outcome, Error> {
        let lab = Lab { quick: true, tidegate: Default::default(), trace, name: "dhttp-fig6" };
        (FIG6.run)(&lab)
    }

    #[test]
    fn the_made_trace_gives_a_figure_with_every_timeout_and_threshold() {
        let outcome = outcome(None).unwrap();
        assert_eq!(outcome.raw.len(), TIMEOUTS_S.len() * THRESHOLDS_BYTES.len());
        assert_eq!(outcome.plots.len(), 2);
        assert!(outcome.verdict.text.contains("(paper: 33 %)"), "{}", outcome.verdict.text);
    }

    #[test]
    fn a_log_is_taken_instead_of_the_made_trace() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let line = |host, second| {
            format!("{host} - - [10/Oct/2000:13:55:{second:02} +0000] \"GET / HTTP/1.1\" 200 9000\n")
        };
        std::fs::write(file.path(), [line("a", 1), line("b", 1), line("b", 2)].concat()).unwrap();
        let with_log = outcome(Some(file.path().to_owned())).unwrap();
        assert!(
            with_log.verdict.holds && with_log.verdict.text.contains("3 accesses"),
            "{}",
            with_log.verdict.text
        );
        std::fs::write(file.path(), "nothing\n").unwrap();
        assert!(outcome(Some(file.path().to_owned())).is_err());
    }
}
