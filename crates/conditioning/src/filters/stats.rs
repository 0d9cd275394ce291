//! `stats`: counts and timings of what passes, for Prometheus (text format 0.0.4).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::arguments::{Argument, ArgumentError, Arguments};
use crate::host::{Disposition, Filter, WINDOW};
use crate::neighbours::{FilterError, monotonic_ns};
use crate::wire::{Bundle, flags};

pub(super) const ARGUMENTS: &[Argument] = &[
    Argument { key: "listen", default: "127.0.0.1:9464", help: "address that answers GET /metrics" },
    WINDOW,
];

/// Upper bounds of the histograms' buckets, in seconds.
const BOUNDS_S: [f64; 12] = [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 10.0];

/// A histogram with one writer and one reader.
#[derive(Debug, Default)]
struct Histogram {
    buckets: [AtomicU64; BOUNDS_S.len() + 1],
    sum_ns: AtomicU64,
}

impl Histogram {
    fn record(&self, ns: u64) {
        let seconds = ns as f64 / 1e9;
        let bucket = BOUNDS_S.iter().position(|&bound| seconds <= bound).unwrap_or(BOUNDS_S.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    fn write(&self, name: &str, help: &str, out: &mut String) {
        use std::fmt::Write;
        let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} histogram\n");
        let mut count = 0;
        for (bucket, bound) in self.buckets.iter().zip(BOUNDS_S.map(Some).into_iter().chain([None])) {
            count += bucket.load(Ordering::Relaxed);
            let bound = bound.map_or_else(|| "+Inf".to_owned(), |bound| bound.to_string());
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {count}");
        }
        let sum_s = self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9;
        let _ = writeln!(out, "{name}_sum {sum_s}\n{name}_count {count}");
    }
}

/// What is counted.
#[derive(Debug, Default)]
pub struct Totals {
    requests: AtomicU64,
    persistent: AtomicU64,
    in_service: AtomicU64,
    waited: Histogram,
    served: Histogram,
}

impl Totals {
    /// The text that Prometheus reads.
    pub fn text(&self) -> String {
        use std::fmt::Write;
        let mut out = String::new();
        let rows = [
            ("tidegate_cc_requests_total", "counter", "Requests that passed.", &self.requests),
            (
                "tidegate_cc_persistent_total",
                "counter",
                "Requests whose client keeps the connection.",
                &self.persistent,
            ),
            (
                "tidegate_cc_in_service",
                "gauge",
                "Requests that the server is not done with.",
                &self.in_service,
            ),
        ];
        for (name, kind, help, value) in rows {
            let value = value.load(Ordering::Relaxed);
            let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
        }
        self.waited.write("tidegate_cc_wait_seconds", "From whole request to hand-over.", &mut out);
        self.served.write(
            "tidegate_cc_service_seconds",
            "From whole request to the server's close.",
            &mut out,
        );
        out
    }
}

/// Passes everything and counts it.
#[derive(Default)]
pub struct Stats {
    totals: Arc<Totals>,
}

impl Filter for Stats {
    fn name(&self) -> &'static str {
        "stats"
    }

    fn arrive(&mut self, request: &mut Bundle, _now: Instant) -> Disposition {
        self.totals.requests.fetch_add(1, Ordering::Relaxed);
        self.totals.in_service.fetch_add(1, Ordering::Relaxed);
        if request.has(flags::PERSISTENT) {
            self.totals.persistent.fetch_add(1, Ordering::Relaxed);
        }
        Disposition::Pass
    }

    fn handed(&mut self, request: &Bundle, _now: Instant) {
        self.totals.waited.record(monotonic_ns().saturating_sub(request.arrived_ns));
    }

    fn wants_notices(&self) -> bool {
        true
    }

    fn closed(&mut self, request: &Bundle, _now: Instant) {
        self.totals.in_service.fetch_sub(1, Ordering::Relaxed);
        self.totals.served.record(monotonic_ns().saturating_sub(request.arrived_ns));
    }
}

/// Answers one scrape after another; whoever is slow is cut off, and keeps nobody but other scrapers waiting.
fn serve(listener: &TcpListener, totals: &Totals) {
    for connection in listener.incoming().flatten() {
        let _ = answer(connection, totals);
    }
}

fn answer(mut connection: TcpStream, totals: &Totals) -> std::io::Result<()> {
    connection.set_read_timeout(Some(Duration::from_secs(1)))?;
    connection.set_write_timeout(Some(Duration::from_secs(1)))?;
    let mut request = [0; 2048];
    let mut length = 0;
    while length < request.len() && !request[..length].windows(4).any(|end| end == b"\r\n\r\n") {
        match connection.read(&mut request[length..])? {
            0 => return Ok(()),
            got => length += got,
        }
    }
    let (status, body) = if request.starts_with(b"GET /metrics ") {
        ("200 OK", totals.text())
    } else {
        ("404 Not Found", String::new())
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    connection.write_all(head.as_bytes())?;
    connection.write_all(body.as_bytes())
}

fn address(arguments: &Arguments) -> Result<SocketAddr, FilterError> {
    arguments.number::<usize>("window")?;
    let value = arguments.text("listen");
    let wrong =
        || ArgumentError::Value { key: "listen", value: value.to_owned(), expected: "an address and a port" };
    Ok(value.parse().map_err(|_| wrong())?)
}

pub(super) fn check(arguments: &Arguments) -> Result<(), FilterError> {
    address(arguments).map(drop)
}

pub(super) fn listen(arguments: &Arguments) -> Result<Stats, FilterError> {
    let stats = Stats::default();
    let address = address(arguments)?;
    let failed = |error: std::io::Error| {
        let text = format!("{address}: {error}; choose another address with stats=listen=ADDRESS:PORT");
        FilterError::System("listen of stats", std::io::Error::new(error.kind(), text))
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    let totals = Arc::clone(&stats.totals);
    std::thread::spawn(move || serve(&listener, &totals));
    Ok(stats)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::testing::request;

    #[test]
    fn what_passes_is_counted_and_timed() {
        let mut stats = Stats::default();
        let now = Instant::now();
        let mut one = request(1, "192.0.2.1", "");
        one.arrived_ns = monotonic_ns().saturating_sub(2_000_000_000);
        assert_eq!(stats.arrive(&mut one, now), Disposition::Pass);
        stats.handed(&one, now);
        assert!(stats.totals.text().contains("tidegate_cc_in_service 1\n"));
        stats.closed(&one, now);
        let text = stats.totals.text();
        assert!(text.contains("tidegate_cc_requests_total 1\n"), "{text}");
        assert!(text.contains("tidegate_cc_in_service 0\n"), "{text}");
        assert!(text.contains("tidegate_cc_service_seconds_bucket{le=\"1\"} 0\n"), "{text}");
        assert!(text.contains("tidegate_cc_service_seconds_bucket{le=\"10\"} 1\n"), "{text}");
    }
}
