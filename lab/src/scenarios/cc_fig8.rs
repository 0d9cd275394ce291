//! What each further filter costs one client (paper §4.3.4, Figure 8).

use std::time::Duration;

use super::cc::{PAPER, at_most, slope};
use super::cc_hop::{Passes, measure};
use super::cc_load::{Client, connect, on_load_core};
use super::cc_servers::{Program, Server, object, site};
use crate::plot::{Plot, Point, Series};
use crate::stats::Spread;
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

pub(super) const MOST_FILTERS: usize = 10;
/// The prototypes: 3 to 6 µs and 2 µs; the paper: 34 µs.
const LATENCY_US: f64 = 6.0;
const CPU_US: f64 = 3.0;
/// What a round may take where other programs hold the processor.
const ROUND: Duration = Duration::from_millis(800);
const REQUEST: &[u8] = b"GET /object HTTP/1.1\r\nHost: lab\r\n\r\n";

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cc-fig8",
    paper: &PAPER,
    figure: "Figure 8",
    claim: "Each further filter, in a process of its own or in that of the one before it, adds at most 6 µs to the \
            median latency of one client and 3 µs of processor time to a request",
    published: "Latency over the number of filters, linear: 34 µs a filter on the HP, 94 µs on the Microtel.",
    method: "ccserver behind one to ten filters: `package`, which owns the connections, and `pass`, which passes on; \
             each a process of its own, as they are by default, or all of `pass` in one process (`--filter pass \
             --filter +pass`). One client asks for a file of 100 bytes on one connection, one request at a time. \
             Latency is the median of all requests of a round; processor time is that of the filters, as the kernel \
             accounts it. The slopes are those of the lines of least squares through the medians of the rounds. Beside \
             it, a row of processes is measured that only receive a message with a descriptor and send it on: what the \
             kernel takes for that and for switching between processes depends on the machine (much on a virtual one), \
             and no filter can take less. A second row passes on nothing: each process waits for an event counter and \
             wakes the next one (eventfd(2)), the least of any way to pass something on to another process, shared \
             memory included.",
    run,
};

/// `package` and so many others that pass requests on.
pub(super) fn chain(filters: usize) -> Vec<&'static str> {
    let mut chain = vec!["pass"; filters];
    chain[0] = "package";
    chain
}

/// The same, in two processes.
fn chain_of_two(filters: usize) -> Vec<&'static str> {
    let mut chain = chain(filters);
    chain.iter_mut().skip(2).for_each(|filter| *filter = "+pass");
    chain
}

const OWN: &str = "own";
const SHARED: &str = "shared";

struct Run {
    /// [`OWN`] or [`SHARED`].
    process: &'static str,
    filters: usize,
    latency_us: f64,
    cpu_us: f64,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let site = site()?;
    object(site.path(), "object", 100)?;
    on_load_core()?;
    let (rounds, count) = lab.choose((5, 4_000), (2, 1_000));
    let mut runs = Vec::new();
    let kinds = [(OWN, chain as fn(usize) -> Vec<&'static str>), (SHARED, chain_of_two)];
    let all = (1..=MOST_FILTERS).flat_map(|filters| kinds.map(|kind| (filters, kind)));
    for (done, (filters, (process, chain))) in all.enumerate() {
        let server = Server::start(lab, Program::CcServer, Some(&chain(filters)), site.path())?;
        let failed = |error| Error::Server(format!("ccserver behind {filters} filters: {error}"));
        let stream = connect(server.address(), None, Duration::from_secs(5)).map_err(failed)?;
        let mut client = Client::over(stream);
        client.latencies_us(REQUEST, count / 10, ROUND).map_err(failed)?;
        for _ in 0..rounds {
            let before = cpu_s_of_filters(&server);
            let latencies = client.latencies_us(REQUEST, count, ROUND).map_err(failed)?;
            let cpu_us = (cpu_s_of_filters(&server) - before) * 1e6 / latencies.len() as f64;
            runs.push(Run { process, filters, latency_us: latencies[latencies.len() / 2], cpu_us });
        }
        let last = &runs[runs.len() - 1];
        let (latency_us, cpu_us) = (last.latency_us, last.cpu_us);
        let what = format!("{filters} filters, {process} process: {latency_us:.1} us, {cpu_us:.1} us CPU");
        lab.progress(done + 1, kinds.len() * MOST_FILTERS, &what);
    }
    outcome(&runs, measure(count, Passes::Descriptors)?, measure(count, Passes::Wakes)?)
}

fn cpu_s_of_filters(server: &Server) -> f64 {
    let by_name = server.cpu_s_by_name();
    by_name.iter().filter(|(name, _)| name.starts_with("cc-")).map(|(_, cpu_s)| cpu_s).sum()
}

fn of(runs: &[Run], process: &str, filters: usize, value: fn(&Run) -> f64) -> Option<Spread> {
    Spread::of(runs.iter().filter(|run| (run.process, run.filters) == (process, filters)).map(value))
}

/// A figure over the number of filters.
fn line(runs: &[Run], process: &str, value: fn(&Run) -> f64) -> Vec<Point> {
    let points = (1..=MOST_FILTERS)
        .map(|filters| Some(Point { x: filters as f64, y: of(runs, process, filters, value)? }));
    points.flatten().collect()
}

/// What each further filter adds, in microseconds.
struct Added {
    latency_us: f64,
    cpu_us: f64,
}

impl Added {
    fn of(runs: &[Run], process: &str) -> Result<Self, Error> {
        // The first of a process that is shared makes it: what another adds is seen from the second on.
        let from = usize::from(process == SHARED);
        let slope_of = |value: fn(&Run) -> f64| {
            let points = line(runs, process, value);
            let medians: Vec<_> = points.iter().skip(from).map(|point| (point.x, point.y.median)).collect();
            if medians.len() < 2 { Err(Error::Nothing("the client")) } else { Ok(slope(&medians)) }
        };
        Ok(Self { latency_us: slope_of(|run| run.latency_us)?, cpu_us: slope_of(|run| run.cpu_us)? })
    }

    /// Bounds on what `who` adds and takes.
    fn checks(&self, who: &str) -> [Check; 2] {
        [
            at_most(format!("6 µs of latency a filter to what {who} adds"), self.latency_us, LATENCY_US),
            at_most(format!("3 µs of processor time a filter to what {who} takes"), self.cpu_us, CPU_US),
        ]
    }
}

/// `bare` is what each process of a row takes that does nothing but pass on, `woken` of one that is woken and wakes the
/// next, in microseconds of latency and of processor time.
fn outcome(runs: &[Run], bare: (f64, f64), woken: (f64, f64)) -> Result<Outcome, Error> {
    let (own, shared) = (Added::of(runs, OWN)?, Added::of(runs, SHARED)?);
    let checks = [own.checks("one in a process of its own"), shared.checks("one in a shared process")];
    let note = format!(
        "each filter in a process of its own adds {:.1} µs of latency and {:.1} µs of processor time, of which \
         {:.1} µs and {:.1} µs are what a process takes here that receives, sends on and does nothing else; to be \
         woken and to wake the next, without which no process passes anything on, takes {:.1} µs and {:.1} µs. Each \
         in a shared process adds {:.2} µs and {:.2} µs",
        own.latency_us, own.cpu_us, bare.0, bare.1, woken.0, woken.1, shared.latency_us, shared.cpu_us
    );
    let series = |name: &str, process, value: fn(&Run) -> f64| Series {
        name: name.to_owned(),
        points: line(runs, process, value),
    };
    let plot = Plot {
        title: "Latency and processor time over the number of filters".to_owned(),
        x: "filters".to_owned(),
        x_log: false,
        y: "µs a request".to_owned(),
        series: vec![
            series("latency, own processes", OWN, |run| run.latency_us),
            series("processor time, own processes", OWN, |run| run.cpu_us),
            series("latency, shared process", SHARED, |run| run.latency_us),
            series("processor time, shared process", SHARED, |run| run.cpu_us),
        ],
    };
    let (raw, summary) = tables(runs);
    let verdict = Verdict::of(checks.as_flattened()).noting(&note);
    Ok(Outcome { raw, summary, plots: vec![(None, plot)], verdict, servers: Vec::new() })
}

fn tables(runs: &[Run]) -> (Table, Table) {
    let mut raw = Table::new(["process", "filters", "latency_us", "cpu_us_of_filters"]);
    for run in runs {
        let (latency_us, cpu_us) = (format!("{:.2}", run.latency_us), format!("{:.2}", run.cpu_us));
        raw.row([run.process.to_owned(), run.filters.to_string(), latency_us, cpu_us]);
    }
    let mut summary = Table::new([
        "filters",
        "latency, own processes, µs",
        "processor time of the filters, µs",
        "latency, shared process, µs",
        "processor time of the filters, µs",
    ]);
    for filters in 1..=MOST_FILTERS {
        let text =
            |process, value| of(runs, process, filters, value).map_or(String::new(), |spread| spread.text(1));
        let both = |process| [text(process, |run| run.latency_us), text(process, |run| run.cpu_us)];
        let ([latency, cpu], [shared_latency, shared_cpu]) = (both(OWN), both(SHARED));
        summary.row([filters.to_string(), latency, cpu, shared_latency, shared_cpu]);
    }
    (raw, summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_that_costs_as_much_as_is_allowed_holds_and_one_that_costs_more_does_not() {
        let runs = |latency_us: f64, shared_us: f64| -> Vec<Run> {
            let run = |process, filters, adds_us: f64| Run {
                process,
                filters,
                latency_us: 50.0 + adds_us * filters as f64,
                cpu_us: 2.0,
            };
            let own = (1..=MOST_FILTERS).map(|filters| run(OWN, filters, latency_us));
            own.chain((1..=MOST_FILTERS).map(|filters| run(SHARED, filters, shared_us))).collect()
        };
        assert!(outcome(&runs(5.9, 0.1), (4.0, 1.0), (3.0, 0.9)).unwrap().verdict.holds);
        let missed = outcome(&runs(6.2, 0.1), (4.0, 1.0), (3.0, 0.9)).unwrap().verdict;
        assert!(!missed.holds && missed.text.contains("adds 6.2 µs of latency"), "{}", missed.text);
        assert!(!outcome(&runs(5.9, 6.1), (4.0, 1.0), (3.0, 0.9)).unwrap().verdict.holds);
    }
}
