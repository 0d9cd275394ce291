//! Load by h2load (HTTP/2 over TLS), from the load's core.

use std::process::Command;

use crate::LOAD_CORE;
use crate::peers::{Peer, pinned};
use crate::wrk::Figure;

/// Loads `peer` with requests for one URL, over so many connections with so many streams each.
///
/// # Errors
/// A sentence that says what went wrong, wrong answers and broken connections included.
pub fn run(peer: &Peer, connections: usize, streams: usize, seconds: u32) -> Result<Figure, String> {
    let mut h2load = Command::new("h2load");
    h2load.args(["-t1", &format!("-c{connections}"), &format!("-m{streams}"), &format!("-D{seconds}")]);
    h2load.arg(peer.url());
    let before = peer.cpu_s()?;
    let output =
        pinned(LOAD_CORE, &h2load).output().map_err(|error| format!("cannot start h2load: {error}"))?;
    let cpu_s = peer.cpu_s()? - before;
    let outcome = read(&String::from_utf8_lossy(&output.stdout))?;
    Ok(Figure {
        requests_per_s: outcome.requests_per_s,
        cpu_us_per_request: cpu_s * 1e6 / outcome.requests,
        late: 0,
    })
}

#[derive(Debug, PartialEq)]
struct Outcome {
    requests: f64,
    requests_per_s: f64,
}

/// What h2load has printed.
fn read(text: &str) -> Result<Outcome, String> {
    if !text.contains("Application protocol: h2") {
        return Err("h2load and the server did not agree on HTTP/2".to_owned());
    }
    // "finished in 2.00s, 98213.50 req/s, 60.23MB/s"
    let rate = number(text, "finished in ", " req/s");
    // "requests: 10 total, 10 started, 10 done, 10 succeeded, 0 failed, 0 errored, 0 timeout"
    let [failed, errored, timeout] =
        ["failed", "errored", "timeout"].map(|what| number(text, "requests: ", &format!(" {what}")));
    let answered = number(text, "status codes: ", " 2xx");
    let (Some(requests_per_s), Some(requests), Some(failed), Some(errored), Some(timeout)) =
        (rate, answered, failed, errored, timeout)
    else {
        return Err("h2load measured nothing".to_owned());
    };
    let wrong = failed + errored + timeout;
    match requests > 0.0 {
        _ if wrong > 0.0 => Err(format!("{wrong} requests failed or had another status than 2xx")),
        true => Ok(Outcome { requests, requests_per_s }),
        false => Err("h2load got no answer".to_owned()),
    }
}

/// The number before `unit` in the line that begins with `start`.
fn number(text: &str, start: &str, unit: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with(start))?;
    let before = &line[..line.find(unit)?];
    before.rsplit([' ', ',']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "Application protocol: h2\n\
        finished in 2.00s, 98213.50 req/s, 60.23MB/s\n\
        requests: 196747 total, 196747 started, 196427 done, 196427 succeeded, 0 failed, 0 errored, 0 timeout\n\
        status codes: 196427 2xx, 0 3xx, 0 4xx, 0 5xx\n";

    #[test]
    fn rate_and_requests_are_read() {
        assert_eq!(read(GOOD), Ok(Outcome { requests: 196_427.0, requests_per_s: 98_213.5 }));
    }

    #[test]
    fn wrong_answers_another_protocol_and_silence_are_no_figures() {
        let wrong = GOOD.replace("0 failed", "3 failed");
        assert_eq!(read(&wrong), Err("3 requests failed or had another status than 2xx".to_owned()));
        let other = GOOD.replace("protocol: h2", "protocol: http/1.1");
        assert_eq!(read(&other), Err("h2load and the server did not agree on HTTP/2".to_owned()));
        let silent = GOOD.replace("196427 2xx", "0 2xx");
        assert_eq!(read(&silent), Err("h2load got no answer".to_owned()));
        assert!(read("Application protocol: h2\n").is_err());
    }
}
