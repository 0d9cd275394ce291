//! `kill -9` of each filter under load: ours, not the paper's.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::cc::PAPER;
use super::cc_load::{Client, connect, on_load_core};
use super::cc_servers::{Program, Server, object, site};
use crate::plot::{Plot, Point, Series};
use crate::table::{Table, thousands};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const FILTERS: [&str; 8] =
    ["persist", "normalize", "police", "stats", "slowread", "pass", "prior", "package"];
const CHAIN: [&str; 8] = [
    "package",
    "persist",
    "normalize",
    "police",
    "stats=listen=127.0.0.1:0",
    "slowread=exempt=1000",
    "pass",
    "prior",
];
const CLIENTS: usize = 8;
const BODY_BYTES: usize = 3_000;
const PATIENCE: Duration = Duration::from_secs(10);
/// Answers after each kill, before the next one.
const BETWEEN: u64 = 100;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cc-kill",
    paper: &PAPER,
    figure: "Ours",
    claim: "100 times kill -9 of each of eight filters under load: no wrong response and none lost on connections \
            whose request a filter beyond the first has had; new connections are lost with `package` only",
    published: "Nothing: the paper does not say what becomes of requests in a filter that dies.",
    method: "nginx behind eight filters; 8 clients ask for a file of 3 kB, byte for byte compared; half of them come \
             anew after every tenth answer. A filter is killed, and the next one after 100 further answers. A response \
             is lost when its connection ends before it is whole. A connection that has had an answer before lives in \
             `persist`: none of those may be lost. Of those without one, only `package` may lose any: it held requests \
             that had not arrived. It is killed last: connections that it had handed on live in `persist` alone then, \
             and would not survive that one too.",
    run,
};

#[derive(Default)]
struct Counts {
    answers: AtomicU64,
    wrong: AtomicU64,
    /// On connections that had an answer before.
    lost: AtomicU64,
    /// On connections without.
    lost_new: AtomicU64,
}

struct Killed {
    filter: &'static str,
    kills: u64,
    answers: u64,
    wrong: u64,
    lost: u64,
    lost_new: u64,
}

struct StopOnDrop<'s>(&'s AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let site = site()?;
    object(site.path(), "object", BODY_BYTES)?;
    let rounds = lab.choose(100, 3);
    let server = Server::start(lab, Program::Nginx, Some(&CHAIN), site.path())?;
    let (stop, counts) = (AtomicBool::new(false), Counts::default());
    let mut killed = Vec::new();
    std::thread::scope(|scope| -> Result<(), Error> {
        // Whatever happens below, the clients stop.
        let _guard = StopOnDrop(&stop);
        for index in 0..CLIENTS {
            let (server, stop, counts) = (&server, &stop, &counts);
            scope.spawn(move || {
                let _ = on_load_core();
                ask_until(server, stop, counts, index % 2 == 0);
            });
        }
        for filter in FILTERS {
            let before = read(&counts);
            for _ in 0..rounds {
                kill(&server, filter)?;
                let from = counts.answers.load(Ordering::Relaxed);
                await_so(filter, || counts.answers.load(Ordering::Relaxed) >= from + BETWEEN)?;
            }
            let after = read(&counts);
            let difference = |at: usize| after[at] - before[at];
            killed.push(Killed {
                filter,
                kills: rounds,
                answers: difference(0),
                wrong: difference(1),
                lost: difference(2),
                lost_new: difference(3),
            });
            lab.progress(killed.len(), FILTERS.len(), &format!("{filter}: {} answers", difference(0)));
        }
        Ok(())
    })?;
    outcome(&killed)
}

fn read(counts: &Counts) -> [u64; 4] {
    [&counts.answers, &counts.wrong, &counts.lost, &counts.lost_new]
        .map(|count| count.load(Ordering::Relaxed))
}

fn await_so(filter: &str, mut is_so: impl FnMut() -> bool) -> Result<(), Error> {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        if Instant::now() > deadline {
            return Err(Error::Server(format!(
                "no service {} s after {filter} was killed",
                PATIENCE.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn kill(server: &Server, filter: &str) -> Result<(), Error> {
    let mut process = None;
    await_so(filter, || {
        process = server.filter(filter);
        process.is_some()
    })?;
    let id = process.and_then(|process| i32::try_from(process).ok()).and_then(Pid::from_raw);
    let failed = |error: rustix::io::Errno| Error::Server(format!("cannot kill {filter}: {error}"));
    id.map_or(Ok(()), |id| kill_process(id, Signal::KILL)).map_err(failed)
}

fn ask_until(server: &Server, stop: &AtomicBool, counts: &Counts, comes_anew: bool) {
    let request = b"GET /object HTTP/1.1\r\nHost: lab\r\n\r\n";
    let mut client: Option<(Client, u64)> = None;
    while !stop.load(Ordering::Relaxed) {
        if client.as_ref().is_none_or(|(_, answers)| comes_anew && *answers >= 10) {
            let Ok(stream) = connect(server.address(), None, PATIENCE) else { continue };
            client = Some((Client::over(stream), 0));
        }
        let Some((connection, answers)) = &mut client else { continue };
        match connection.ask(request) {
            Ok((200, body)) if body.len() == BODY_BYTES && body.iter().all(|&byte| byte == b'a') => {
                *answers += 1;
                counts.answers.fetch_add(1, Ordering::Relaxed);
            }
            Ok(_) => {
                counts.wrong.fetch_add(1, Ordering::Relaxed);
                client = None;
            }
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                counts.wrong.fetch_add(1, Ordering::Relaxed);
                client = None;
            }
            Err(_) => {
                let lost = if *answers > 0 { &counts.lost } else { &counts.lost_new };
                lost.fetch_add(1, Ordering::Relaxed);
                client = None;
            }
        }
    }
}

fn outcome(killed: &[Killed]) -> Result<Outcome, Error> {
    let sum = |value: fn(&Killed) -> u64| killed.iter().map(value).sum::<u64>();
    let (kills, answers) = (sum(|k| k.kills), sum(|k| k.answers));
    if answers == 0 {
        return Err(Error::Nothing("the clients"));
    }
    let kept = |lost: u64| (answers - lost.min(answers)) as f64 / answers as f64;
    let elsewhere: u64 = killed.iter().filter(|k| k.filter != "package").map(|k| k.lost_new).sum();
    let checks = [
        ("responses that were not wrong", sum(|k| k.wrong)),
        ("responses not lost on connections that had one before", sum(|k| k.lost)),
        ("responses not lost on new connections with other filters than package", elsewhere),
    ]
    .map(|(what, lost)| Check { what: what.to_owned(), ratio: kept(lost), at_least: 1.0 });
    let note = format!(
        "{} kills, {} responses, {} wrong, {} lost; with package {} new connections ended before their request was \
         handed on",
        thousands(kills),
        thousands(answers),
        sum(|k| k.wrong),
        sum(|k| k.lost) + elsewhere,
        sum(|k| k.lost_new) - elsewhere
    );
    let mut table = Table::new(["filter", "kills", "responses", "wrong", "lost", "lost_new_connections"]);
    let mut points = Vec::new();
    for (index, k) in killed.iter().enumerate() {
        let numbers = [k.kills, k.answers, k.wrong, k.lost, k.lost_new].map(|number| number.to_string());
        let [kills, answers, wrong, lost, lost_new] = numbers;
        table.row([k.filter.to_owned(), kills, answers, wrong, lost, lost_new]);
        points.push(Point::exact((index + 1) as f64, (k.wrong + k.lost + k.lost_new) as f64));
    }
    let plot = Plot {
        title: "Responses wrong or lost, by filter in the order of the chain".to_owned(),
        x: "filter".to_owned(),
        x_log: false,
        y: "responses".to_owned(),
        series: vec![Series { name: "wrong or lost".to_owned(), points }],
    };
    let verdict = Verdict::of(&checks).noting(&note);
    let plots = vec![(None, plot)];
    Ok(Outcome { raw: table.clone(), summary: table, plots, verdict, servers: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_package_may_lose_connections_and_only_new_ones() {
        let killed = |filter, lost, lost_new| Killed {
            filter,
            kills: 100,
            answers: 10_000_000,
            wrong: 0,
            lost,
            lost_new,
        };
        assert!(outcome(&[killed("package", 0, 3), killed("prior", 0, 0)]).unwrap().verdict.holds);
        assert!(!outcome(&[killed("package", 1, 0)]).unwrap().verdict.holds);
        assert!(!outcome(&[killed("prior", 0, 1)]).unwrap().verdict.holds);
    }
}
