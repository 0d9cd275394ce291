//! Pages by DHTTP beside HTTP/3 over a link with and without loss.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tidegate_dhttp::driver::{ClientOptions, DhttpClient, DhttpUrl, FetchRequest};
use tokio::task::JoinSet;

use super::dhttp::PAPER;
use super::dhttp_site::{Content, DHTTP_PORT, Site, inside, runtime};
use crate::http3::{Identity, fetch, serve};
use crate::link::{Hosts, Profile, SERVER, Side};
use crate::origin::path;
use crate::plot::{Plot, Point, Series};
use crate::stats::Spread;
use crate::table::Table;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const LOSSES_PPM: [u32; 3] = [0, 10_000, 50_000];
const RATE_BITS_PER_S: u64 = 100_000_000;
const ROUND_TRIP: Duration = Duration::from_millis(40);
/// The page and, when it is there, its objects, all at once.
const PAGE_BYTES: usize = 8_000;
const OBJECTS_BYTES: [usize; 10] = [600, 900, 1_200, 2_000, 3_000, 5_000, 8_000, 12_000, 30_000, 60_000];
/// Pages that are fetched at one time.
const AT_ONCE: usize = 12;
const HTTP3_PORT: u16 = 443;
/// A page that takes longer has failed: long enough for the page and then an object that need all of DHTTP's timers, 5 and twice
/// 10 s, and then a connection.
const PATIENCE: Duration = Duration::from_secs(90);

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dhttp-http3",
    paper: &PAPER,
    figure: "Beyond the paper",
    claim: "Every page comes whole by DHTTP and by HTTP/3 at 0, 1 and 5 % loss; which is faster is reported",
    published: "HTTP/3 is eighteen years younger than the paper.",
    method: "Two hosts and an emulated link of 100 Mbit/s and 40 ms round trip that loses none, 1 % or 5 % of the \
             packets in each direction. A page of 8,000 bytes, then ten objects of 600 to 60,000 bytes all at once, by \
             a client that has never spoken with the server: HTTP/3 makes a QUIC connection (quinn and h3), DHTTP \
             proves its address. DHTTP's timers are the paper's 5 and 10 s. DHTTP does not encrypt and HTTP/3 does; at \
             this rate that costs no time. Twelve pages at a time, each by a client of its own.",
    run,
};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Protocol {
    Dhttp,
    Http3,
}

impl Protocol {
    const ALL: [Self; 2] = [Self::Dhttp, Self::Http3];

    fn label(self) -> &'static str {
        match self {
            Self::Dhttp => "DHTTP",
            Self::Http3 => "HTTP/3",
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Page {
    protocol: Protocol,
    loss_ppm: u32,
    first_byte_s: f64,
    page_s: f64,
    whole: bool,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let rounds = lab.choose(2, 1);
    let identity = Identity::new().map_err(|error| Error::Server(format!("no HTTP/3: {error}")))?;
    let mut all = Vec::new();
    for (step, loss_ppm) in LOSSES_PPM.into_iter().enumerate() {
        let profile = Profile { loss_ppm, ..Profile::clean(RATE_BITS_PER_S, ROUND_TRIP) };
        let hosts = Hosts::new(vec![profile], 3)?;
        let _site = Site::start(lab, hosts.name(Side::Server), &[SERVER], Content::Made)?;
        let _http3 = Server::start(&identity, hosts.name(Side::Server))?;
        for protocol in Protocol::ALL {
            let made = hosts.run(Side::Client, || {
                let failed = |error| Error::Link(format!("no runtime for the clients: {error}"));
                runtime().map_err(failed)?.block_on(async {
                    let mut made = Vec::new();
                    for _ in 0..rounds {
                        let mut together = JoinSet::new();
                        for _ in 0..AT_ONCE {
                            let identity = identity.clone();
                            together.spawn(async move { page(protocol, loss_ppm, &identity).await });
                        }
                        made.extend(together.join_all().await);
                    }
                    Ok(made)
                })
            })?;
            let median =
                Spread::of(made.iter().map(|page| page.page_s)).map_or(f64::NAN, |spread| spread.median);
            let what = format!(
                "{} % loss, {}: {:.0} ms a page",
                f64::from(loss_ppm) / 1e4,
                protocol.label(),
                median * 1e3
            );
            lab.progress(
                step * Protocol::ALL.len() + protocol as usize + 1,
                LOSSES_PPM.len() * Protocol::ALL.len(),
                &what,
            );
            all.extend(made);
        }
    }
    Ok(outcome(&all))
}

/// A server thread that ends when this is dropped.
struct Server {
    running: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    fn start(identity: &Identity, namespace: &str) -> Result<Self, Error> {
        let (running, stopped) = tokio::sync::oneshot::channel::<()>();
        let (ready, started) = std::sync::mpsc::channel();
        let (identity, namespace) = (identity.clone(), namespace.to_owned());
        let thread = std::thread::spawn(move || {
            let failed = |error: std::io::Error| Error::Server(format!("the HTTP/3 server failed: {error}"));
            let served = inside(&namespace, || {
                runtime().map_err(failed)?.block_on(async {
                    let endpoint = identity.listen(SocketAddr::new(SERVER, HTTP3_PORT)).map_err(failed)?;
                    let _ = ready.send(Ok(()));
                    tokio::select! {
                        () = serve(endpoint) => {}
                        _ = stopped => {}
                    }
                    Ok(())
                })
            });
            if let Err(error) = served {
                let _ = ready.send(Err(error));
            }
        });
        let begun =
            started.recv().unwrap_or_else(|_| Err(Error::Server("the HTTP/3 server did not start".into())));
        begun?;
        Ok(Self { running: Some(running), thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.running.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One page by a client of its own.
async fn page(protocol: Protocol, loss_ppm: u32, identity: &Identity) -> Page {
    let began = Instant::now();
    let mut first = None;
    let fetched = tokio::time::timeout(PATIENCE, async {
        match protocol {
            Protocol::Dhttp => by_dhttp(began, &mut first).await,
            Protocol::Http3 => by_http3(identity, began, &mut first).await,
        }
    });
    let whole = fetched.await.ok().flatten().is_some();
    let page_s = began.elapsed().as_secs_f64();
    Page { protocol, loss_ppm, first_byte_s: first.unwrap_or(page_s), page_s, whole }
}

async fn by_dhttp(began: Instant, first: &mut Option<f64>) -> Option<()> {
    let client = DhttpClient::new(ClientOptions::default()).ok()?;
    let one = |size_bytes: usize, number: u64| {
        let target = path(size_bytes, number);
        let url = DhttpUrl { by_tcp: false, host: SERVER.to_string(), port: DHTTP_PORT, target };
        let (client, request) =
            (client.clone(), FetchRequest::get(&url, SocketAddr::new(SERVER, DHTTP_PORT)));
        async move {
            let fetched = client.fetch(request).await.ok()?;
            let headed = began.elapsed().as_secs_f64();
            let body = fetched.body.collect(1 << 20).await.ok()?;
            (fetched.status == 200 && body.len() == size_bytes).then_some(headed)
        }
    };
    *first = Some(one(PAGE_BYTES, 0).await?);
    let mut objects = JoinSet::new();
    for (number, size_bytes) in OBJECTS_BYTES.into_iter().enumerate() {
        objects.spawn(one(size_bytes, number as u64 + 1));
    }
    while let Some(fetched) = objects.join_next().await {
        fetched.ok()??;
    }
    Some(())
}

async fn by_http3(identity: &Identity, began: Instant, first: &mut Option<f64>) -> Option<()> {
    let connection = identity.connect(SocketAddr::new(SERVER, HTTP3_PORT)).await.ok()?;
    let headed = || *first = Some(began.elapsed().as_secs_f64());
    let bytes = fetch(connection.requests(), PAGE_BYTES, headed).await.ok()?;
    let mut objects = JoinSet::new();
    for size_bytes in OBJECTS_BYTES {
        let requests = connection.requests();
        objects.spawn(async move {
            fetch(requests, size_bytes, || {}).await.is_ok_and(|bytes| bytes == size_bytes)
        });
    }
    let mut whole = bytes == PAGE_BYTES;
    while let Some(fetched) = objects.join_next().await {
        whole &= fetched.unwrap_or(false);
    }
    whole.then_some(())
}

fn of(pages: &[Page], protocol: Protocol, loss_ppm: u32) -> impl Iterator<Item = &Page> + Clone {
    pages.iter().filter(move |page| page.protocol == protocol && page.loss_ppm == loss_ppm)
}

fn outcome(pages: &[Page]) -> Outcome {
    let mut checks = Vec::new();
    let mut notes = Vec::new();
    for loss_ppm in LOSSES_PPM {
        let median = |protocol, value: fn(&Page) -> f64| {
            Spread::of(of(pages, protocol, loss_ppm).map(value))
                .map_or(f64::NAN, |spread| spread.median * 1e3)
        };
        let percent = f64::from(loss_ppm) / 1e4;
        for protocol in Protocol::ALL {
            let all = of(pages, protocol, loss_ppm).count() as f64;
            let whole = of(pages, protocol, loss_ppm).filter(|page| page.whole).count() as f64;
            let what = format!("whole pages by {} at {percent} % loss, as a share", protocol.label());
            checks.push(Check { what, ratio: whole / all, at_least: 1.0 });
        }
        notes.push(format!(
            "at {percent} % first byte and page after {:.0} and {:.0} ms by DHTTP, {:.0} and {:.0} ms by HTTP/3",
            median(Protocol::Dhttp, |page| page.first_byte_s),
            median(Protocol::Dhttp, |page| page.page_s),
            median(Protocol::Http3, |page| page.first_byte_s),
            median(Protocol::Http3, |page| page.page_s),
        ));
    }
    let plot = |title: &str, value: fn(&Page) -> f64| Plot {
        title: title.to_owned(),
        x: "packets lost, %".to_owned(),
        x_log: false,
        y: "ms".to_owned(),
        series: Protocol::ALL
            .iter()
            .map(|protocol| Series {
                name: protocol.label().to_owned(),
                points: LOSSES_PPM
                    .iter()
                    .filter_map(|loss_ppm| {
                        let y = Spread::of(of(pages, *protocol, *loss_ppm).map(|page| value(page) * 1e3))?;
                        Some(Point { x: f64::from(*loss_ppm) / 1e4, y })
                    })
                    .collect(),
            })
            .collect(),
    };
    Outcome {
        raw: raw(pages),
        summary: summary(pages),
        plots: vec![
            (None, plot("Time until a page is whole", |page| page.page_s)),
            (Some("first"), plot("Time until the page's first byte", |page| page.first_byte_s)),
        ],
        verdict: Verdict::of(&checks).noting(&notes.join("; ")),
        servers: Vec::new(),
    }
}

fn raw(pages: &[Page]) -> Table {
    let mut table = Table::new(["loss_percent", "protocol", "first_byte_ms", "page_ms", "whole"]);
    for page in pages {
        table.row([
            (f64::from(page.loss_ppm) / 1e4).to_string(),
            page.protocol.label().to_owned(),
            format!("{:.1}", page.first_byte_s * 1e3),
            format!("{:.1}", page.page_s * 1e3),
            page.whole.to_string(),
        ]);
    }
    table
}

fn summary(pages: &[Page]) -> Table {
    let mut table = Table::new(["loss, %", "protocol", "first byte, ms", "page, ms", "not whole"]);
    for loss_ppm in LOSSES_PPM {
        for protocol in Protocol::ALL {
            let text = |value: fn(&Page) -> f64| {
                let spread = Spread::of(of(pages, protocol, loss_ppm).map(|page| value(page) * 1e3));
                spread.map_or(String::new(), |spread| spread.text(0))
            };
            table.row([
                (f64::from(loss_ppm) / 1e4).to_string(),
                protocol.label().to_owned(),
                text(|page| page.first_byte_s),
                text(|page| page.page_s),
                of(pages, protocol, loss_ppm).filter(|page| !page.whole).count().to_string(),
            ]);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_not_whole_breaks_the_claim_and_a_slow_one_does_not() {
        let pages = |whole, page_s| -> Vec<Page> {
            LOSSES_PPM
                .into_iter()
                .flat_map(|loss_ppm| {
                    Protocol::ALL.map(|protocol| Page {
                        protocol,
                        loss_ppm,
                        first_byte_s: 0.1,
                        page_s,
                        whole,
                    })
                })
                .collect()
        };
        assert!(outcome(&pages(true, 20.0)).verdict.holds);
        assert!(!outcome(&pages(false, 0.1)).verdict.holds);
    }
}
