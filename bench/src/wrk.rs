//! Load by wrk, from the load's core.

use std::process::Command;

use crate::LOAD_CORE;
use crate::peers::{Peer, pinned};

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// Requests answered in a second.
    pub requests_per_s: f64,
    /// User and system time of the server, divided by the requests that it answered.
    pub cpu_us_per_request: f64,
    /// Requests that had no answer for 2 s.
    pub late: u64,
}

/// What wrk asks for.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Connections at once.
    pub connections: usize,
    /// A connection for each request.
    pub close: bool,
    /// A URL for each request, different from those of every other run with another number; `None` for one URL.
    pub unique: Option<usize>,
    /// How long, in seconds.
    pub seconds: u32,
}

impl Load {
    /// Loads `peer`.
    ///
    /// # Errors
    /// A sentence that says what went wrong, wrong answers and broken connections included.
    pub fn run(&self, peer: &Peer) -> Result<Figure, String> {
        let script = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
        let mut wrk = Command::new("wrk");
        wrk.args(["-t1", &format!("-c{}", self.connections), &format!("-d{}", self.seconds)]);
        if self.close {
            wrk.args(["-H", "Connection: close"]);
        }
        if let Some(run) = self.unique {
            std::fs::write(script.path(), unique(run, &peer.address().to_string()))
                .map_err(|error| error.to_string())?;
            wrk.arg("-s").arg(script.path());
        }
        wrk.arg(peer.url());
        let before = peer.cpu_s()?;
        let output =
            pinned(LOAD_CORE, &wrk).output().map_err(|error| format!("cannot start wrk: {error}"))?;
        let cpu_s = peer.cpu_s()? - before;
        let text = String::from_utf8_lossy(&output.stdout);
        let said = String::from_utf8_lossy(&output.stderr);
        let outcome = read(&text).map_err(|message| match said.lines().next() {
            Some(line) => format!("{message}: {line}"),
            None => message,
        })?;
        Ok(Figure {
            requests_per_s: outcome.requests_per_s,
            cpu_us_per_request: cpu_s * 1e6 / outcome.requests,
            late: outcome.late,
        })
    }
}

/// A script by which every request of one run has a URL of its own. It puts the bytes together itself: wrk's own way
/// takes longer, on the core that the origin needs.
fn unique(run: usize, host: &str) -> String {
    format!(
        "local n = 0\nrequest = function() n = n + 1; \
         return \"GET /object?{run}-\" .. n .. \" HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n\" end\n"
    )
}

struct Outcome {
    requests: f64,
    requests_per_s: f64,
    late: u64,
}

/// What wrk has printed.
fn read(text: &str) -> Result<Outcome, String> {
    let number = |line: &str, word: usize| {
        let line = text.lines().find(|candidate| candidate.contains(line))?;
        line.split_whitespace().nth(word)?.trim_end_matches(',').parse::<f64>().ok()
    };
    if let Some(wrong) = number("Non-2xx", 4) {
        return Err(format!("{wrong} answers had another status than 200"));
    }
    // "Socket errors: connect 0, read 0, write 0, timeout 0"
    let broken: f64 = [3, 5, 7].iter().filter_map(|word| number("Socket errors:", *word)).sum();
    if broken > 0.0 {
        return Err(format!("{broken} connections were refused or broke"));
    }
    match (number("requests in", 0), number("Requests/sec:", 1)) {
        (Some(requests), Some(requests_per_s)) if requests > 0.0 => {
            Ok(Outcome { requests, requests_per_s, late: number("Socket errors:", 9).unwrap_or(0.0) as u64 })
        }
        _ => Err("wrk measured nothing".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "  87632 requests in 2.00s, 76.21MB read\nRequests/sec:  43807.57\n";

    #[test]
    fn rate_requests_and_late_ones_are_read() {
        let outcome = read(GOOD).unwrap();
        assert_eq!((outcome.requests, outcome.requests_per_s, outcome.late), (87_632.0, 43_807.57, 0));
        let late = format!("  Socket errors: connect 0, read 0, write 0, timeout 12\n{GOOD}");
        assert_eq!(read(&late).unwrap().late, 12);
    }

    #[test]
    fn wrong_answers_broken_connections_and_no_answers_are_errors() {
        for (line, expected) in [
            ("  Non-2xx or 3xx responses: 7\n", "7 answers had another status"),
            (
                "  Socket errors: connect 1, read 2, write 3, timeout 9\n",
                "6 connections were refused or broke",
            ),
        ] {
            let message = read(&format!("{line}{GOOD}")).err().unwrap();
            assert!(message.starts_with(expected), "{message}");
        }
        assert!(read("").err().unwrap().contains("nothing"));
        assert!(read("  0 requests in 2.00s, 0B read\nRequests/sec:      0.00\n").is_err());
    }

    #[test]
    fn urls_of_two_runs_differ() {
        let script = unique(7, "127.0.0.1:80");
        assert!(
            script.contains(r#""GET /object?7-" .. n .. " HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n""#),
            "{script}"
        );
        assert_ne!(script, unique(8, "127.0.0.1:80"));
    }
}
