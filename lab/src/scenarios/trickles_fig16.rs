//! A server that is killed in mid-transfer (Trickles §6.1, Figure 16).

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::trickles::{Bench, PAPER, RATE, plot};
use crate::link::{Hosts, Profile, SERVER, Side, client_address};
use crate::plot::Point;
use crate::table::Table;
use crate::transfer::{Carrier, Replica, block_on, fetch};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const ROUND_TRIP: Duration = Duration::from_millis(20);
/// One timeout: what RFC 6298 gives with the floor that both ends have.
const TIMEOUT: Duration = Duration::from_millis(200);
/// When the server is killed.
const KILLED: Duration = Duration::from_millis(700);
/// Points of a curve are so far apart.
const STEP: Duration = Duration::from_millis(20);

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig16",
    paper: &PAPER,
    figure: "Figure 16",
    claim: "When its server is killed and restarted, or another takes its place, a transfer goes on with no byte lost within two round trips or one timeout, whichever is longer",
    published: "Sequence number against time with a server that fails over to another: the Trickles transfer stops for a moment \
                and goes on; a TCP connection is lost.",
    method: "A 100 Mbit/s link with 20 ms round trip. The server gets SIGKILL after 0.7 s. Another replica, which the client \
             knows, takes over at once; or the same server is started again. Recovery is the longest pause after the kill, \
             less the time in which no server ran. TCP's client begins again at the other server, as any program must.",
    run,
};

/// What arrived when, in bytes so far, from the start on.
type Arrivals = Vec<(Duration, u64)>;

#[derive(Clone, Copy, PartialEq)]
enum Then {
    Replaced,
    Restarted,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bytes = lab.choose(20_000_000, 14_000_000);
    let rounds = lab.choose(3, 1);
    let cases = [
        ("Trickles, replaced", Carrier::Trickles, Then::Replaced),
        ("Trickles, restarted", Carrier::Trickles, Then::Restarted),
        ("TCP Reno, another server", Carrier::Tcp, Then::Replaced),
    ];
    let mut raw = Table::new(["case", "round", "ms", "bytes"]);
    let mut summary = Table::new([
        "case",
        "longest pause less the time without a server, ms",
        "bytes sent again by the client's program",
    ]);
    let mut series = Vec::new();
    let mut checks = Vec::new();
    for (step, (name, carrier, then)) in cases.into_iter().enumerate() {
        lab.progress(step + 1, cases.len(), name);
        let (mut pauses, mut repeated) = (Vec::new(), 0);
        for round in 0..rounds {
            let outcome = crash(lab, carrier, then, bytes)?;
            pauses.push(outcome.pause.as_secs_f64() * 1e3);
            repeated = repeated.max(outcome.repeated);
            let mut points = Vec::new();
            let mut next = Duration::ZERO;
            for (at, bytes) in outcome.arrivals {
                if at >= next {
                    next = at + STEP;
                    let ms = at.as_secs_f64() * 1e3;
                    raw.row([name.into(), (round + 1).to_string(), format!("{ms:.1}"), bytes.to_string()]);
                    points.push(Point::exact(ms, bytes as f64 / 1e6));
                }
            }
            if round == 0 {
                series.push((name.to_owned(), points));
            }
        }
        let pause = super::trickles::spread(pauses)?;
        summary.row([name.into(), pause.text(0), repeated.to_string()]);
        if carrier == Carrier::Trickles {
            let allowed = TIMEOUT.max(2 * ROUND_TRIP).as_secs_f64() * 1e3;
            checks.push(Check {
                what: format!("{name}: the time allowed to the time taken"),
                ratio: allowed / pause.median,
                at_least: 1.0,
            });
            checks.push(Check {
                what: format!("{name}: no byte sent again by the program"),
                ratio: f64::from(repeated == 0),
                at_least: 1.0,
            });
        }
    }
    Ok(Outcome {
        raw,
        summary,
        plots: vec![(None, plot("A server is killed after 0.7 s", ("ms", false), "MB received", series))],
        verdict: Verdict::of(&checks),
        servers: Vec::new(),
    })
}

struct Crash {
    arrivals: Arrivals,
    pause: Duration,
    repeated: u64,
}

fn crash(lab: &Lab, carrier: Carrier, then: Then, bytes: u64) -> Result<Crash, Error> {
    let Bench { mut server, site, hosts } =
        Bench::new(lab, &[bytes], vec![Profile::clean(RATE, ROUND_TRIP)])?;
    let start = |hosts: &Hosts, n| {
        Replica::start(lab, &site, SERVER, n, |program| hosts.command(Side::Server, program))
    };
    let other = if then == Then::Replaced { Some(start(&hosts, 1)?) } else { None };
    let servers: Vec<SocketAddr> =
        [Some(&server), other.as_ref()].into_iter().flatten().map(Replica::address).collect();
    let began = Instant::now();
    let arrivals = Mutex::new(Arrivals::new());
    let (repeated, down) = std::thread::scope(|scope| {
        let client =
            scope.spawn(|| hosts.run(Side::Client, || download(carrier, &servers, bytes, began, &arrivals)));
        std::thread::sleep(KILLED);
        server.kill();
        let killed = began.elapsed();
        let restarted = match then {
            Then::Restarted => Some(start(&hosts, 0)),
            Then::Replaced => None,
        };
        let down = (killed, began.elapsed());
        let repeated = client.join().unwrap_or(Err(Error::Nothing("a client that panicked")))?;
        restarted.transpose()?;
        Ok::<_, Error>((repeated, down))
    })?;
    let arrivals = arrivals.into_inner().unwrap_or_else(PoisonError::into_inner);
    let after: Vec<Duration> = arrivals.iter().map(|(at, _)| *at).filter(|at| *at >= down.0).collect();
    let pauses = std::iter::once(down.0).chain(after.iter().copied()).zip(&after);
    let longest = pauses.max_by_key(|(from, to)| to.saturating_sub(*from));
    let pause = longest.map_or(Duration::MAX, |(from, to)| {
        let without = if then == Then::Restarted {
            down.1.min(*to).saturating_sub(from.max(down.0))
        } else {
            Duration::ZERO
        };
        to.saturating_sub(from).saturating_sub(without)
    });
    Ok(Crash { arrivals, pause, repeated })
}

/// Downloads; bytes that had to be fetched again because the program had to begin anew.
fn download(
    carrier: Carrier,
    servers: &[SocketAddr],
    bytes: u64,
    began: Instant,
    arrivals: &Mutex<Arrivals>,
) -> Result<u64, Error> {
    block_on(async {
        let mut repeated = 0;
        let mut candidates = servers;
        loop {
            let mut received = 0;
            let seen = |piece| {
                received += piece;
                arrivals.lock().unwrap_or_else(PoisonError::into_inner).push((began.elapsed(), received));
            };
            match fetch(carrier, candidates, client_address(0), bytes, seen).await {
                Ok(_) => return Ok(repeated),
                Err(error @ Error::Load(_)) if carrier == Carrier::Trickles || candidates.len() < 2 => {
                    return Err(error);
                }
                Err(Error::Load(_)) => {
                    repeated += received;
                    candidates = &candidates[1..];
                }
                Err(error) => return Err(error),
            }
        }
    })
}
