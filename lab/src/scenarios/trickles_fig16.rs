//! A server that is killed in mid-transfer (Trickles §6.1, Figure 16).

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::trickles::{Bench, PAPER, RATE, plot, spread};
use crate::link::{Hosts, OTHER_SERVER, Profile, SERVER, Side, client_address};
use crate::plot::Point;
use crate::stats::Spread;
use crate::table::Table;
use crate::transfer::{Carrier, Replica, block_on, fetch};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const ROUND_TRIP: Duration = Duration::from_millis(20);
/// One timeout: what RFC 6298 gives with the floor that both ends have.
const TIMEOUT: Duration = Duration::from_millis(200);
/// What waking up a client, and the difference between two round trips, may take.
const LATE: Duration = Duration::from_millis(1);
/// What shows how long a round trip takes, and how often.
const SMALL: (u64, usize) = (100, 5);
/// When the server is killed.
const KILLED: Duration = Duration::from_millis(700);
/// A client's program takes a server for lost that has sent nothing for so long, and begins again.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often it begins.
const MOST_REQUESTS: u32 = 3;
/// Points of a curve are so far apart.
const STEP: Duration = Duration::from_millis(20);

pub(super) const SCENARIO: Scenario = Scenario {
    name: "trickles-fig16",
    paper: &PAPER,
    figure: "Figure 16",
    claim: "When its server is killed and restarted, or another takes its place, a transfer goes on with no byte lost \
            within two round trips or one timeout, whichever is longer",
    published: "Sequence number against time with a server that fails over to another: the Trickles transfer stops for \
                a moment and goes on; a TCP connection is lost.",
    method: "A 100 Mbit/s link with 20 ms round trip. The server gets SIGKILL after 0.7 s. Another replica on the same \
             host, which the client knows, takes over at once: the host's kernel says that the first one's port is \
             closed. Or the same server is started again. Or its host vanishes, so that nothing says anything, and a \
             replica at another address is there: the client learns of it by a timeout alone. The pause is the longest \
             between two arrivals of content after the kill. Recovery is the pause, less the time in it in which no \
             server ran, less one round trip: the client waits one timeout from the last packet on, and then for the \
             answer of the server that it asks. The round trip is measured before, by transfers of 100 bytes. The \
             timeout is 200 ms, RFC 6298's with the floor that both ends have; up to 1 ms more is allowed for waking \
             up, and as no round trip is like another. The longest of all rounds counts. A client's program begins \
             again, at the next server, when a transfer fails or nothing comes for 1 s; TCP's has to.",
    run,
};

/// What arrived when, in bytes so far, from the start on.
type Arrivals = Vec<(Duration, u64)>;

#[derive(Clone, Copy, PartialEq)]
enum Then {
    /// Another server of the same host, whose kernel says that the port is closed.
    Replaced,
    Restarted,
    /// A server of another host; nothing says that the first one is gone.
    Silent,
}

/// A carrier, what happens after its server is killed, and what came of that in each round.
struct Case {
    name: &'static str,
    carrier: Carrier,
    crashes: Vec<Crash>,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let bytes = lab.choose(20_000_000, 14_000_000);
    let rounds = lab.choose(3, 1);
    let kinds = [
        ("Trickles, replaced", Carrier::Trickles, Then::Replaced),
        ("Trickles, restarted", Carrier::Trickles, Then::Restarted),
        ("Trickles, host vanished", Carrier::Trickles, Then::Silent),
        ("TCP Reno, another server", Carrier::Tcp, Then::Replaced),
        ("TCP Reno, host vanished", Carrier::Tcp, Then::Silent),
    ];
    let mut cases = Vec::new();
    for (step, (name, carrier, then)) in kinds.into_iter().enumerate() {
        lab.progress(step + 1, kinds.len(), name);
        let crashes = (0..rounds).map(|_| crash(lab, carrier, then, bytes)).collect::<Result<_, _>>()?;
        cases.push(Case { name, carrier, crashes });
    }
    outcome(&cases, bytes)
}

fn outcome(cases: &[Case], bytes: u64) -> Result<Outcome, Error> {
    let mut raw = Table::new(["case", "round", "ms", "bytes"]);
    let mut summary = Table::new([
        "case",
        "longest pause, ms",
        "no server ran, ms",
        "round trip, ms",
        "recovery, ms",
        "requests of the client's program",
        "bytes that came again",
    ]);
    let (mut series, mut checks) = (Vec::new(), Vec::new());
    for case in cases {
        for (round, crash) in (1..).zip(&case.crashes) {
            let curve = crash.fetched.curve();
            for (ms, bytes) in &curve {
                raw.row([case.name.into(), round.to_string(), format!("{ms:.1}"), bytes.to_string()]);
            }
            if round == 1 {
                let points = curve.into_iter().map(|(ms, bytes)| Point::exact(ms, bytes as f64 / 1e6));
                series.push((case.name.to_owned(), points.collect()));
            }
        }
        summary.row([
            case.name.into(),
            case.ms(|crash| crash.pause)?.text(1),
            case.ms(|crash| crash.without)?.text(1),
            case.ms(|crash| crash.round_trip)?.text(1),
            case.ms(|crash| crash.recovery)?.text(1),
            case.most(|fetched| u64::from(fetched.requests)).to_string(),
            case.most(|fetched| fetched.again).to_string(),
        ]);
        if case.carrier == Carrier::Trickles {
            checks.extend(case.checks(bytes)?);
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

impl Case {
    fn ms(&self, time: fn(&Crash) -> Duration) -> Result<Spread, Error> {
        spread(self.crashes.iter().map(|crash| time(crash).as_secs_f64() * 1e3))
    }

    fn most(&self, count: fn(&Fetched) -> u64) -> u64 {
        self.crashes.iter().map(|crash| count(&crash.fetched)).max().unwrap_or(0)
    }

    /// That a transfer of so many bytes goes on in time, and without its program.
    fn checks(&self, bytes: u64) -> Result<[Check; 2], Error> {
        let name = self.name;
        let allowed = (TIMEOUT + LATE).max(2 * ROUND_TRIP).as_secs_f64() * 1e3;
        let again = self.most(|fetched| fetched.again);
        Ok([
            Check {
                what: format!("{name}: the time allowed to the time taken"),
                ratio: allowed / self.ms(|crash| crash.recovery)?.greatest,
                at_least: 1.0,
            },
            Check {
                what: format!(
                    "{name}: bytes of the file to bytes received, of all that its program asked for"
                ),
                ratio: bytes as f64 / (bytes + again) as f64,
                at_least: 1.0,
            },
        ])
    }
}

struct Crash {
    fetched: Fetched,
    pause: Duration,
    /// The part of the pause in which no server ran.
    without: Duration,
    /// Of a small transfer on the same link.
    round_trip: Duration,
    recovery: Duration,
}

fn crash(lab: &Lab, carrier: Carrier, then: Then, bytes: u64) -> Result<Crash, Error> {
    let Bench { mut server, site, hosts } =
        Bench::new(lab, &[bytes, SMALL.0], vec![Profile::clean(RATE, ROUND_TRIP)])?;
    let start = |hosts: &Hosts, ip, n| {
        Replica::start(lab, &site, ip, n, |program| hosts.command(Side::Server, program))
    };
    let other = match then {
        Then::Replaced => Some(start(&hosts, SERVER, 1)?),
        Then::Silent => Some(start(&hosts, OTHER_SERVER, 1)?),
        Then::Restarted => None,
    };
    let servers: Vec<SocketAddr> =
        [Some(&server), other.as_ref()].into_iter().flatten().map(Replica::address).collect();
    let round_trip = hosts.run(Side::Client, || round_trip(server.address()))?;
    let began = Instant::now();
    let fetched = Mutex::new(Fetched::default());
    let down = std::thread::scope(|scope| {
        let client =
            scope.spawn(|| hosts.run(Side::Client, || download(carrier, &servers, bytes, began, &fetched)));
        std::thread::sleep(KILLED);
        if let (Then::Silent, IpAddr::V4(address)) = (then, SERVER) {
            hosts.lose(address);
        }
        server.kill();
        let killed = began.elapsed();
        let restarted = match then {
            Then::Restarted => Some(start(&hosts, SERVER, 0)),
            Then::Replaced | Then::Silent => None,
        };
        let down = (killed, began.elapsed());
        client.join().unwrap_or(Err(Error::Nothing("a client that panicked")))?;
        restarted.transpose()?;
        Ok::<_, Error>(down)
    })?;
    let fetched = fetched.into_inner().unwrap_or_else(PoisonError::into_inner);
    let times = || fetched.arrivals.iter().map(|(at, _)| *at);
    // What had left the server when it ended comes later: the pause is what is longest then.
    let pauses = times().zip(times().skip(1)).filter(|(_, to)| *to >= down.0);
    let (from, to) = pauses
        .max_by_key(|(from, to)| *to - *from)
        .ok_or(Error::Nothing("a transfer that ended too soon"))?;
    let without = match then {
        Then::Restarted => down.1.min(to).saturating_sub(from.max(down.0)),
        Then::Replaced | Then::Silent => Duration::ZERO,
    };
    let pause = to - from;
    let recovery = pause.saturating_sub(without).saturating_sub(round_trip);
    Ok(Crash { fetched, pause, without, round_trip, recovery })
}

/// The median of several small transfers' times.
fn round_trip(server: SocketAddr) -> Result<Duration, Error> {
    let mut times = Vec::new();
    for _ in 0..SMALL.1 {
        let nothing = |_| ();
        let time = block_on(fetch(Carrier::Trickles, &[server], client_address(0), SMALL.0, nothing))?;
        times.push(time.as_secs_f64());
    }
    Ok(Duration::from_secs_f64(spread(times)?.median))
}

/// What the client's program has fetched.
#[derive(Default)]
struct Fetched {
    arrivals: Arrivals,
    requests: u32,
    /// Bytes that came once more, because the program had to begin anew.
    again: u64,
}

impl Fetched {
    /// What had arrived by some of the milliseconds, in bytes.
    fn curve(&self) -> Vec<(f64, u64)> {
        let mut next = Duration::ZERO;
        let mut curve = Vec::new();
        for (at, bytes) in &self.arrivals {
            if *at >= next {
                next = *at + STEP;
                curve.push((at.as_secs_f64() * 1e3, *bytes));
            }
        }
        curve
    }
}

/// Downloads as a program does that knows of several servers: it begins anew, at the next one, when a transfer fails or
/// nothing comes for long.
fn download(
    carrier: Carrier,
    mut servers: &[SocketAddr],
    bytes: u64,
    began: Instant,
    fetched: &Mutex<Fetched>,
) -> Result<(), Error> {
    let fetched = || fetched.lock().unwrap_or_else(PoisonError::into_inner);
    block_on(async {
        loop {
            fetched().requests += 1;
            let (received, latest) = (Cell::new(0), Cell::new(Instant::now()));
            let seen = |piece| {
                received.set(received.get() + piece);
                latest.set(Instant::now());
                fetched().arrivals.push((began.elapsed(), received.get()));
            };
            let silence = async {
                while latest.get().elapsed() < PATIENCE {
                    tokio::time::sleep_until((latest.get() + PATIENCE).into()).await;
                }
            };
            let error = tokio::select! {
                result = fetch(carrier, servers, client_address(0), bytes, seen) => match result {
                    Ok(_) => return Ok(()),
                    Err(error @ Error::Load(_)) => error,
                    Err(error) => return Err(error),
                },
                () = silence => Error::Load(std::io::ErrorKind::TimedOut.into()),
            };
            if fetched().requests == MOST_REQUESTS {
                return Err(error);
            }
            fetched().again += received.get();
            if servers.len() > 1 {
                servers = &servers[1..];
            }
        }
    })
}
