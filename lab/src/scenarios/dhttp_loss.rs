//! 100,000 requests over a link that loses, duplicates and reorders packets: each is answered once, and what must not
//! be repeated is executed once.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidegate_dhttp::client::ClientConfig;
use tidegate_dhttp::driver::{ClientOptions, DhttpClient, DhttpUrl, FetchBody, FetchRequest, Via};
use tidegate_http::Method;

use super::dhttp::PAPER;
use super::dhttp_site::{Content, DHTTP_PORT, Site, runtime};
use crate::link::{Hosts, Profile, SERVER, Side, client_address};
use crate::origin::{body, path};
use crate::plot::{Plot, Point, Series};
use crate::table::{Table, thousands};
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

/// Client programs, each with an address of its own.
const CLIENTS: usize = 100;
/// Requests that each has on its way at one time.
const AT_ONCE: usize = 20;
/// Of 1,000,000 packets.
const FAULTS_PPM: u32 = 50_000;
/// For the link in each direction.
const RATE_BITS_PER_S: u64 = 1_000_000_000;
const ROUND_TRIP: Duration = Duration::from_millis(4);
/// Of ten requests, the first must not be repeated; the others ask for short, middling and long answers.
const SIZES_BYTES: [usize; 10] = [200, 300, 300, 300, 300, 300, 5_000, 5_000, 5_000, 30_000];
const POINTS: usize = 100;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dhttp-loss",
    paper: &PAPER,
    figure: "Beyond the paper",
    claim: "Of 100,000 requests at 5 % loss, duplication and reordering each is answered once, and those that must not \
            be repeated are executed once",
    published: "The paper has resends (§III-A) and does not measure that they do no harm.",
    method: "Two hosts and an emulated link of 1 Gbit/s and 4 ms round trip that loses 5 % of all packets in each \
             direction, duplicates 5 % and lets 5 % be overtaken, TCP's too. 100 clients with 20 requests each on \
             their way; of ten requests one is a POST, five have short answers, three of 5,000 and one of 30,000 \
             bytes. Every answer holds the number of its request. Nothing is cached: a server behind tidegate counts \
             the POSTs that it executes. The clients' resend timers are 0.5 and 1 s instead of 5 and 10 s, so that the \
             run ends within a minute.",
    run,
};

/// What became of the requests.
#[derive(Default)]
struct Report {
    /// Answers with the right number and size, for each request.
    answered: HashMap<u64, u32>,
    /// Seconds from the start, in the order of answers, and the way.
    answers: Vec<(f64, Via)>,
    latencies_s: Vec<f64>,
    failures: Vec<String>,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let count: u64 = lab.choose(100_000, 4_000);
    let profile = Profile {
        loss_ppm: FAULTS_PPM,
        duplicate_ppm: FAULTS_PPM,
        reorder_ppm: FAULTS_PPM,
        ..Profile::clean(RATE_BITS_PER_S, ROUND_TRIP)
    };
    let hosts = Hosts::new(vec![profile; CLIENTS], 7)?;
    let site = Site::start(lab, hosts.name(Side::Server), &[SERVER], Content::Made)?;
    lab.progress(1, 2, "hosts, link and server are there");
    let report = hosts.run(Side::Client, || {
        let failed = |error| Error::Link(format!("no runtime for the clients: {error}"));
        runtime().map_err(failed)?.block_on(fetch_all(count))
    })?;
    lab.progress(2, 2, &format!("{} answers", thousands(report.answers.len() as u64)));
    let metrics = site.metrics()?;
    Ok(outcome(count, &report, &site.executed(), &metrics, hosts.traffic().lost.load(Ordering::Relaxed)))
}

async fn fetch_all(count: u64) -> Result<Report, Error> {
    let next = std::sync::Arc::new(AtomicU64::new(0));
    let report = std::sync::Arc::new(Mutex::new(Report::default()));
    let began = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for index in 0..CLIENTS {
        let client =
            client(index).map_err(|error| Error::Link(format!("a client does not start: {error}")))?;
        for _ in 0..AT_ONCE {
            let (client, next, report) = (client.clone(), next.clone(), report.clone());
            tasks.spawn(async move {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let asked = Instant::now();
                    let fetched = fetch(&client, number).await;
                    let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
                    match fetched {
                        Ok(via) => {
                            *report.answered.entry(number).or_insert(0) += 1;
                            report.answers.push((began.elapsed().as_secs_f64(), via));
                            report.latencies_s.push(asked.elapsed().as_secs_f64());
                        }
                        Err(why) => report.failures.push(why),
                    }
                }
            });
        }
    }
    while tasks.join_next().await.is_some() {}
    Ok(std::mem::take(&mut *report.lock().unwrap_or_else(PoisonError::into_inner)))
}

fn client(index: usize) -> std::io::Result<DhttpClient> {
    let IpAddr::V4(bind_v4) = client_address(index) else {
        return Err(std::io::ErrorKind::Unsupported.into());
    };
    let protocol = ClientConfig {
        first_timeout: Duration::from_millis(500),
        max_timeout: Duration::from_secs(1),
        ..ClientConfig::default()
    };
    // A tenth of all handshakes' first packets are lost: patience, so that what fails is not the test's.
    let connect_timeout = Duration::from_secs(60);
    DhttpClient::new(ClientOptions { protocol, bind_v4, connect_timeout, ..ClientOptions::default() })
}

/// Which way the right answer came; or what came instead.
async fn fetch(client: &DhttpClient, number: u64) -> Result<Via, String> {
    let kind = usize::try_from(number).unwrap_or(0) % SIZES_BYTES.len();
    let size_bytes = SIZES_BYTES[kind];
    let server = SocketAddr::new(SERVER, DHTTP_PORT);
    let url = DhttpUrl {
        by_tcp: false,
        host: SERVER.to_string(),
        port: DHTTP_PORT,
        target: path(size_bytes, number),
    };
    let mut request = FetchRequest::get(&url, server);
    if kind == 0 {
        request.method = Method::Post;
        request.head =
            format!("POST {} HTTP/1.1\r\nHost: {}\r\nContent-Length: 4\r\n\r\n", url.target, url.authority())
                .into();
        request.body = FetchBody::Full(Bytes::from_static(b"once"));
    }
    let fetched = client.fetch(request).await.map_err(|error| error.to_string())?;
    let (status, via) = (fetched.status, fetched.via);
    let found = fetched.body.collect(1 << 20).await.map_err(|error| error.to_string())?;
    if status == 200 && found == body(size_bytes, number) {
        Ok(via)
    } else {
        Err(format!("status {status} and {} bytes to request {number}", found.len()))
    }
}

fn outcome(
    count: u64,
    report: &Report,
    executed: &HashMap<u64, u32>,
    metrics: &HashMap<String, f64>,
    lost: u64,
) -> Outcome {
    let posts = count.div_ceil(SIZES_BYTES.len() as u64);
    let once = |counts: &HashMap<u64, u32>| counts.values().filter(|times| **times == 1).count() as f64;
    let checks = [
        Check {
            what: format!("requests answered once, of {}", thousands(count)),
            ratio: once(&report.answered) / count as f64,
            at_least: 1.0,
        },
        Check {
            what: format!("non-idempotent requests executed once, of {}", thousands(posts)),
            ratio: once(executed) / posts as f64,
            at_least: 1.0,
        },
    ];
    let metric = |name: &str| metrics.get(name).copied().unwrap_or(0.0) as u64;
    let mut verdict = Verdict::of(&checks).noting(&format!(
        "{} packets lost; requests sent again {}, asked for again in part {}, duplicates not executed {}",
        thousands(lost),
        thousands(metric("tidegate_dhttp_requests_resent_total")),
        thousands(metric("tidegate_dhttp_repairs_total")),
        thousands(
            metric("tidegate_dhttp_requests_duplicate_total")
                + metric("tidegate_dhttp_requests_answered_total")
        ),
    ));
    if let [first, .., last] | [first @ last] = &report.failures[..] {
        verdict = verdict.noting(&format!(
            "{} failed, the first: {first}, the last: {last}; the site behind tidegate failed {} times",
            report.failures.len(),
            metric("tidegate_upstream_failures_total"),
        ));
    }
    Outcome {
        raw: raw(report),
        summary: summary(report),
        plots: vec![(None, plot(report))],
        verdict,
        servers: Vec::new(),
    }
}

const WAYS: [(Via, &str); 3] = [
    (Via::Datagram, "by UDP"),
    (Via::ServerConnection, "by a connection of the server"),
    (Via::ClientConnection, "by a connection of the client"),
];

/// Seconds and answers by then, of one way.
fn curve(report: &Report, way: Via) -> Vec<(f64, usize)> {
    let times: Vec<f64> =
        report.answers.iter().filter(|(_, via)| *via == way).map(|(at_s, _)| *at_s).collect();
    (1..=POINTS)
        .filter_map(|step| {
            let answers = times.len() * step / POINTS;
            Some((*times.get(answers.checked_sub(1)?)?, answers))
        })
        .collect()
}

fn plot(report: &Report) -> Plot {
    let line = |(way, name): (Via, &str)| Series {
        name: name.to_owned(),
        points: std::iter::once(Point::exact(0.0, 0.0))
            .chain(curve(report, way).into_iter().map(|(at_s, answers)| Point::exact(at_s, answers as f64)))
            .collect(),
    };
    Plot {
        title: "Answers over a link with 5 % loss, duplication and reordering".to_owned(),
        x: "seconds".to_owned(),
        x_log: false,
        y: "requests answered".to_owned(),
        series: WAYS.map(line).into(),
    }
}

fn raw(report: &Report) -> Table {
    let mut table = Table::new(["way", "seconds", "answers"]);
    for (way, name) in WAYS {
        for (at_s, answers) in curve(report, way) {
            table.row([name.to_owned(), format!("{at_s:.3}"), answers.to_string()]);
        }
    }
    table
}

fn summary(report: &Report) -> Table {
    let mut table = Table::new(["way", "answers"]);
    for (way, name) in WAYS {
        let answers = report.answers.iter().filter(|(_, via)| *via == way).count();
        table.row([name.to_owned(), thousands(answers as u64)]);
    }
    let mut latencies = report.latencies_s.clone();
    latencies.sort_by(f64::total_cmp);
    let quantile =
        |share: f64| latencies.get((latencies.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
    for (share, name) in [(0.5, "median latency"), (0.99, "latency of 99 %"), (0.9999, "latency of 99.99 %")]
    {
        table.row([name.to_owned(), format!("{:.0} ms", quantile(share) * 1e3)]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(answered: &[(u64, u32)]) -> Report {
        let mut report = Report { answered: answered.iter().copied().collect(), ..Report::default() };
        report.answers = answered.iter().map(|(number, _)| (*number as f64, Via::Datagram)).collect();
        report
    }

    #[test]
    fn a_request_without_an_answer_and_one_executed_twice_break_the_claim() {
        let judge = |answered: &[(u64, u32)], executed: &[(u64, u32)]| {
            let executed = executed.iter().copied().collect();
            outcome(2, &report(answered), &executed, &HashMap::new(), 0).verdict.holds
        };
        assert!(judge(&[(0, 1), (1, 1)], &[(0, 1)]));
        assert!(!judge(&[(0, 1)], &[(0, 1)]), "one was not answered");
        assert!(!judge(&[(0, 1), (1, 2)], &[(0, 1)]), "one was answered twice");
        assert!(!judge(&[(0, 1), (1, 1)], &[(0, 2)]), "it was executed twice");
        assert!(!judge(&[(0, 1), (1, 1)], &[]), "it was not executed");
    }
}
