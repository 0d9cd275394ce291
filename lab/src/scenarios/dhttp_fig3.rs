//! Interception caches and packets that take two routes (DHTTP §IV-A, Figure 3).

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, SystemTime};

use tidegate_dhttp::driver::{ClientOptions, DhttpClient};

use super::dhttp::PAPER;
use super::dhttp_site::{Content, DHTTP_PORT, HTTP_PORT, Site, inside, on_host, runtime};
use crate::plot::{Plot, Point, Series};
use crate::process::Process;
use crate::server::tidegate;
use crate::table::Table;
use crate::topology::Topology;
use crate::verdict::{Check, Verdict};
use crate::{Error, Lab, Outcome, Scenario};

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 99, 9, 1);
/// The first router, on which the caches are.
const CACHE: Ipv4Addr = Ipv4Addr::new(10, 99, 1, 1);
/// Files of the site: a datagram's worth, several datagrams, and a connection.
const FILES: [(&str, usize); 3] = [("short", 300), ("middling", 5_000), ("long", 200_000)];
/// Where nobody listens.
const DISCARD_PORT: u16 = 9;
/// How long a transfer may take before it counts as broken.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dhttp-fig3",
    paper: &PAPER,
    figure: "Figure 3",
    claim: "While packets alternate over two routes, DHTTP's interception cache on one of them breaks no transfer, and \
            a proxy that intercepts TCP does",
    published: "A router on one of two routes diverts TCP to a cache that answers as if it were the server. Packets on \
                the other route reach the server, which knows nothing of the connection and resets it.",
    method: "Client and server are joined by two routers; of the packets that each sends, every other one takes the \
             other route, whatever connection it belongs to. The first router has tidegate as a DHTTP interception \
             cache, and as a proxy to which nftables redirects TCP. Transfers of 300, 5,000 and 200,000 bytes are made \
             by HTTP without the proxy, by HTTP with it, and by DHTTP with the cache; one that is reset, wrong or not \
             complete within 5 s is broken.",
    run,
};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    Http,
    HttpIntercepted,
    Dhttp,
}

impl Way {
    const ALL: [Self; 3] = [Self::Http, Self::HttpIntercepted, Self::Dhttp];

    fn label(self) -> &'static str {
        match self {
            Self::Http => "HTTP, no proxy",
            Self::HttpIntercepted => "HTTP, TCP intercepted",
            Self::Dhttp => "DHTTP, interception cache",
        }
    }
}

struct Transfer {
    way: Way,
    file: usize,
    whole: bool,
    by_cache: bool,
}

fn run(lab: &Lab) -> Result<Outcome, Error> {
    let times = lab.choose(60, 20);
    let directory = tempfile::tempdir().map_err(Error::file("write", &std::env::temp_dir()))?;
    write_files(directory.path())?;
    let network = network()?;
    let server = network.namespace("s")?;
    let _site = Site::start(lab, server, &[SERVER.into()], Content::Files(directory.path()))?;
    let router = network.namespace("r1")?;
    let mut cache = on_host(router, tidegate(lab)?);
    cache.args(["intercept", "--listen", "0.0.0.0:8053", "--from", &format!("{CACHE}:8054")]);
    let _cache = Process::start(&mut cache, "intercepting at")?;
    let mut proxy = on_host(router, tidegate(lab)?);
    let upstream = format!("http://{SERVER}:{HTTP_PORT}");
    proxy.args([
        "run",
        "--workers",
        "1",
        "--admin",
        "127.0.0.1:9091",
        "--listen",
        "0.0.0.0:8081",
        "--upstream",
        &upstream,
    ]);
    let _proxy = Process::start(&mut proxy, "listening on http://")?;
    let mut transfers = Vec::new();
    for (step, way) in Way::ALL.into_iter().enumerate() {
        if way == Way::HttpIntercepted {
            network.on("r1", "nft add chain ip lab streams { type nat hook prerouting priority dstnat; }")?;
            network
                .on("r1", &format!("nft add rule ip lab streams tcp dport {HTTP_PORT} redirect to :8081"))?;
        }
        let made = inside(network.namespace("c")?, || match way {
            Way::Dhttp => by_dhttp(times),
            _ => Ok(by_http(way, times)),
        })?;
        let broken = made.iter().filter(|transfer| !transfer.whole).count();
        lab.progress(
            step + 1,
            Way::ALL.len(),
            &format!("{}: {broken} of {} broken", way.label(), made.len()),
        );
        transfers.extend(made);
    }
    Ok(outcome(&transfers))
}

/// Old files are fresh for long (RFC 9111 §4.2.2).
fn write_files(directory: &Path) -> Result<(), Error> {
    for (name, size_bytes) in FILES {
        let path = directory.join(name);
        std::fs::write(&path, vec![b'f'; size_bytes]).map_err(Error::file("write", &path))?;
        let file = std::fs::File::options().write(true).open(&path).map_err(Error::file("write", &path))?;
        let old = SystemTime::now() - Duration::from_secs(1000 * 86_400);
        file.set_modified(old).map_err(Error::file("write", &path))?;
    }
    Ok(())
}

/// c and s, each with its own address behind two devices; r1 and r2 between them, and joined.
fn network() -> Result<Topology, Error> {
    let network = Topology::new(&["c", "r1", "r2", "s"])?;
    network.join(("c", "eth1", "10.99.1.2/24"), ("r1", "to-c", "10.99.1.1/24"))?;
    network.join(("c", "eth2", "10.99.2.2/24"), ("r2", "to-c", "10.99.2.1/24"))?;
    network.join(("s", "eth1", "10.99.3.2/24"), ("r1", "to-s", "10.99.3.1/24"))?;
    network.join(("s", "eth2", "10.99.4.2/24"), ("r2", "to-s", "10.99.4.1/24"))?;
    network.join(("r1", "to-r2", "10.99.5.1/24"), ("r2", "to-r1", "10.99.5.2/24"))?;
    for (host, own, by_r1, by_r2) in
        [("c", CLIENT, "10.99.1.1", "10.99.2.1"), ("s", SERVER, "10.99.3.1", "10.99.4.1")]
    {
        network.on(host, &format!("ip address add {own}/32 dev lo"))?;
        network.on(host, &format!("ip route add default via {by_r1} src {own}"))?;
        for (mark, router) in [(1, by_r1), (2, by_r2)] {
            network.on(host, &format!("ip route add default via {router} src {own} table 10{mark}"))?;
            network.on(host, &format!("ip rule add fwmark {mark} lookup 10{mark}"))?;
        }
        network.on(host, "nft add table ip lab")?;
        network.on(host, "nft add chain ip lab out { type route hook output priority mangle; }")?;
        network.on(host, "nft add rule ip lab out oifname != lo meta mark set numgen inc mod 2 offset 1")?;
    }
    for (router, to_c, to_s) in [("r1", "10.99.1.2", "10.99.3.2"), ("r2", "10.99.2.2", "10.99.4.2")] {
        network.on(router, &format!("ip route add {CLIENT} via {to_c}"))?;
        network.on(router, &format!("ip route add {SERVER} via {to_s}"))?;
    }
    // To the cache, by whichever route.
    network.on("r2", "ip route add 10.99.1.0/24 via 10.99.5.1")?;
    network.on("r2", "ip route add 10.99.3.0/24 via 10.99.5.1")?;
    network.on("r1", "nft add table ip lab")?;
    network.on("r1", "nft add chain ip lab datagrams { type filter hook prerouting priority mangle; }")?;
    let rule = format!(
        "nft add rule ip lab datagrams udp dport {DHTTP_PORT} tproxy to :8053 meta mark set 1 accept"
    );
    network.on("r1", &rule)?;
    network.on("r1", "ip rule add fwmark 1 lookup 100")?;
    network.on("r1", "ip route add local default dev lo table 100")?;
    Ok(network)
}

fn by_http(way: Way, times: usize) -> Vec<Transfer> {
    let server = SocketAddr::new(SERVER.into(), HTTP_PORT);
    let fetch = |(name, size_bytes): (&str, usize)| -> std::io::Result<bool> {
        let mut stream = TcpStream::connect_timeout(&server, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let request = format!("GET /{name} HTTP/1.1\r\nHost: {SERVER}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let body =
            answer.windows(4).position(|window| window == b"\r\n\r\n").map_or(0, |at| answer.len() - at - 4);
        Ok(answer.starts_with(b"HTTP/1.1 200") && body == size_bytes)
    };
    let transfers = (0..times).flat_map(|_| 0..FILES.len());
    transfers
        .map(|file| Transfer { way, file, whole: fetch(FILES[file]).unwrap_or(false), by_cache: false })
        .collect()
}

fn by_dhttp(times: usize) -> Result<Vec<Transfer>, Error> {
    let failed = |error| Error::Link(format!("no DHTTP client: {error}"));
    runtime().map_err(failed)?.block_on(async {
        let client = DhttpClient::new(ClientOptions { bind_v4: CLIENT, ..ClientOptions::default() })
            .map_err(failed)?;
        let aside = std::net::UdpSocket::bind((CLIENT, 0)).map_err(failed)?;
        let mut transfers = Vec::new();
        for (round, file) in (0..times).flat_map(|round| (0..FILES.len()).map(move |file| (round, file))) {
            // A transfer may take an even number of packets: one more changes the route of the next one's first.
            if round % 2 == 1 {
                let _ = aside.send_to(b"x", (SERVER, DISCARD_PORT));
            }
            let (name, size_bytes) = FILES[file];
            let url = format!("dhttp://{SERVER}:{DHTTP_PORT}/{name}");
            let fetched = tokio::time::timeout(PATIENCE, async {
                let fetched = client.get(&url).await.ok()?;
                let from = fetched.from.ip();
                let body = fetched.body.collect(1 << 20).await.ok()?;
                Some((fetched.status == 200 && body.len() == size_bytes, from))
            });
            let (whole, from) = fetched.await.ok().flatten().unwrap_or((false, IpAddr::V4(SERVER)));
            transfers.push(Transfer { way: Way::Dhttp, file, whole, by_cache: from != IpAddr::V4(SERVER) });
        }
        Ok(transfers)
    })
}

fn of(transfers: &[Transfer], way: Way) -> impl Iterator<Item = &Transfer> {
    transfers.iter().filter(move |transfer| transfer.way == way)
}

fn share(transfers: &[Transfer], way: Way, is: impl Fn(&Transfer) -> bool) -> f64 {
    let all = of(transfers, way).count();
    of(transfers, way).filter(|transfer| is(transfer)).count() as f64 / all as f64
}

fn outcome(transfers: &[Transfer]) -> Outcome {
    let whole = |transfer: &Transfer| transfer.whole;
    let checks = [
        Check {
            what: "whole transfers by DHTTP, as a share".to_owned(),
            ratio: share(transfers, Way::Dhttp, whole),
            at_least: 1.0,
        },
        Check {
            what: "whole transfers by HTTP without a proxy, as a share".to_owned(),
            ratio: share(transfers, Way::Http, whole),
            at_least: 1.0,
        },
        Check {
            what: "transfers by HTTP that the intercepting proxy breaks, as a share".to_owned(),
            ratio: 1.0 - share(transfers, Way::HttpIntercepted, whole),
            at_least: 0.01,
        },
        // Otherwise nothing was shown.
        Check {
            what: "transfers by DHTTP that the cache answered, as a share".to_owned(),
            ratio: share(transfers, Way::Dhttp, |transfer| transfer.by_cache),
            at_least: 0.01,
        },
    ];
    let note = format!(
        "broken: {:.0} % of the transfers with the TCP-intercepting proxy, {:.0} % by DHTTP, of which the cache \
         answered {:.0} %",
        100.0 - share(transfers, Way::HttpIntercepted, whole) * 100.0,
        100.0 - share(transfers, Way::Dhttp, whole) * 100.0,
        share(transfers, Way::Dhttp, |transfer| transfer.by_cache) * 100.0
    );
    let line = |way: Way| Series {
        name: way.label().to_owned(),
        points: FILES
            .iter()
            .enumerate()
            .map(|(file, (_, size_bytes))| {
                let (all, broken) = counts(transfers, way, file);
                Point::exact(*size_bytes as f64, broken as f64 / all as f64 * 100.0)
            })
            .collect(),
    };
    let plot = Plot {
        title: "Transfers broken while packets alternate over two routes".to_owned(),
        x: "bytes".to_owned(),
        x_log: true,
        y: "broken, %".to_owned(),
        series: Way::ALL.map(line).into(),
    };
    let table = table(transfers);
    Outcome {
        raw: table.clone(),
        summary: table,
        plots: vec![(None, plot)],
        verdict: Verdict::of(&checks).noting(&note),
        servers: Vec::new(),
    }
}

fn counts(transfers: &[Transfer], way: Way, file: usize) -> (usize, usize) {
    let own = || of(transfers, way).filter(|transfer| transfer.file == file);
    (own().count(), own().filter(|transfer| !transfer.whole).count())
}

fn table(transfers: &[Transfer]) -> Table {
    let mut table = Table::new(["way", "bytes", "transfers", "broken", "answered by the cache"]);
    for way in Way::ALL {
        for (file, (_, size_bytes)) in FILES.iter().enumerate() {
            let (all, broken) = counts(transfers, way, file);
            let by_cache =
                of(transfers, way).filter(|transfer| transfer.file == file && transfer.by_cache).count();
            table.row([
                way.label().to_owned(),
                size_bytes.to_string(),
                all.to_string(),
                broken.to_string(),
                by_cache.to_string(),
            ]);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfers(dhttp_whole: bool, intercepted_whole: bool, by_cache: bool) -> Vec<Transfer> {
        let transfer = |way, whole| (0..FILES.len()).map(move |file| Transfer { way, file, whole, by_cache });
        transfer(Way::Http, true)
            .chain(transfer(Way::HttpIntercepted, intercepted_whole))
            .chain(transfer(Way::Dhttp, dhttp_whole))
            .collect()
    }

    #[test]
    fn the_claim_needs_both_that_dhttp_works_and_that_interception_breaks() {
        assert!(outcome(&transfers(true, false, true)).verdict.holds);
        assert!(!outcome(&transfers(false, false, true)).verdict.holds);
        assert!(!outcome(&transfers(true, true, true)).verdict.holds);
        assert!(!outcome(&transfers(true, false, false)).verdict.holds, "the cache has answered nothing");
    }
}
