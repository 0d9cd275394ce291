//! What is measured, on which servers, in which order.

use std::net::SocketAddr;
use std::path::Path;

use tidegate_bench::peers::{Peer, Site, install, settle};
use tidegate_bench::wrk::{Figure, Load};
use tidegate_bench::{h2load, h3load, idle};

use crate::Cli;

/// For [`Server::Pipelining`].
const PIPELINE: &str = "pipeline = 32\n";
/// Requests at once on each connection of [`Kind::Http2`] and [`Kind::Http3`], as of a page with its parts.
const STREAMS: usize = 10;
/// Processor time of the origin for a request, below which the answers cannot have come from it.
const LEAST_ORIGIN_US: f64 = 0.5;

/// One load, and its goal.
pub(crate) struct Scenario {
    pub name: &'static str,
    pub size_bytes: usize,
    pub connections: usize,
    pub kind: Kind,
    /// The least ratio to nginx's requests per CPU-second; of [`Kind::Idle`], the most bytes for a connection. Nothing
    /// where nginx does something else.
    pub goal: Option<f64>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// One object, from a cache or a file.
    Cached,
    /// The same with a connection for each request.
    Close,
    /// A URL for each request, through to an upstream.
    Misses,
    /// As [`Self::Cached`], over TLS.
    Encrypted,
    /// As [`Self::Encrypted`], by HTTP/2 with [`STREAMS`] requests at once on each connection.
    Http2,
    /// As [`Self::Http2`], by HTTP/3, beside servers by HTTP/2.
    Http3,
    /// As [`Self::Close`], over TLS: a whole handshake for each request.
    Handshakes,
    /// Memory of connections on which nothing happens.
    Idle,
}

impl Kind {
    fn is_encrypted(self) -> bool {
        matches!(self, Self::Encrypted | Self::Http2 | Self::Http3 | Self::Handshakes)
    }
}

const fn load(name: &'static str, size_bytes: usize, connections: usize, kind: Kind, goal: f64) -> Scenario {
    Scenario { name, size_bytes, connections, kind, goal: Some(goal) }
}

const fn http3(name: &'static str, size_bytes: usize) -> Scenario {
    Scenario { name, size_bytes, connections: 32, kind: Kind::Http3, goal: None }
}

pub(crate) const SCENARIOS: [Scenario; 17] = [
    load("612 B, 32 connections", 612, 32, Kind::Cached, 1.6),
    load("612 B, 512 connections", 612, 512, Kind::Cached, 1.6),
    load("612 B, 10,000 connections", 612, 10_000, Kind::Cached, 1.6),
    load("8 KiB, 32 connections", 8 << 10, 32, Kind::Cached, 1.4),
    load("100 KiB, 32 connections", 100 << 10, 32, Kind::Cached, 1.0),
    load("612 B, Connection: close", 612, 32, Kind::Close, 1.1),
    load("612 B misses, 32 connections", 612, 32, Kind::Misses, 1.2),
    load("612 B misses, 512 connections", 612, 512, Kind::Misses, 1.2),
    load("612 B over TLS, 32 connections", 612, 32, Kind::Encrypted, 1.0),
    load("100 KiB over TLS, 32 connections", 100 << 10, 32, Kind::Encrypted, 1.0),
    load("612 B over HTTP/2, 32 connections", 612, 32, Kind::Http2, 1.0),
    load("8 KiB over HTTP/2, 32 connections", 8 << 10, 32, Kind::Http2, 1.0),
    http3("612 B over HTTP/3, 32 connections", 612),
    http3("8 KiB over HTTP/3, 32 connections", 8 << 10),
    http3("100 KiB over HTTP/3, 32 connections", 100 << 10),
    load("612 B over TLS, Connection: close", 612, 32, Kind::Handshakes, 1.0),
    load("memory of 10,000 idle connections", 612, 10_000, Kind::Idle, 2048.0),
];

/// A server that is compared.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Server {
    Bare,
    Nginx,
    Tidegate,
    /// With several requests on one connection to the upstream.
    Pipelining,
    Haproxy,
    Varnish,
    /// By HTTP/2, where [`Self::Tidegate`] is asked by HTTP/3.
    TidegateHttp2,
    Caddy,
}

impl Server {
    const ALL: &[Self] = &[Self::Bare, Self::Nginx, Self::Tidegate, Self::Haproxy, Self::Varnish];
    const PROXIES: &[Self] = &[Self::Nginx, Self::Tidegate, Self::Pipelining, Self::Haproxy, Self::Varnish];
    const WITH_TLS: &[Self] = &[Self::Nginx, Self::Tidegate, Self::Haproxy];
    const WITH_HTTP3: &[Self] = &[Self::Nginx, Self::TidegateHttp2, Self::Tidegate, Self::Caddy];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Bare => "bare epoll",
            Self::Nginx => "nginx",
            Self::Tidegate => "tidegate",
            Self::Pipelining => "tidegate, pipelining",
            Self::Haproxy => "haproxy",
            Self::Varnish => "varnish",
            Self::TidegateHttp2 => "tidegate, HTTP/2",
            Self::Caddy => "caddy",
        }
    }

    fn start(self, cli: &Cli, parent: &Path, scenario: &Scenario, origin: &Peer) -> Result<Peer, String> {
        // Each in a directory of its own: one that watches its files must not see another's.
        let site = Site::create(&parent.join(self.label()), scenario.size_bytes)?;
        let origin: SocketAddr = origin.address();
        let misses = scenario.kind == Kind::Misses;
        let encrypted = scenario.kind.is_encrypted();
        let peer = match self {
            Self::Bare => Peer::bare(scenario.size_bytes),
            Self::Nginx if misses => Peer::nginx_proxy(&site, origin),
            Self::Nginx if encrypted => Peer::nginx_tls(&site),
            Self::Nginx => Peer::nginx(&site),
            Self::Tidegate | Self::TidegateHttp2 if encrypted => Peer::tidegate_tls(&cli.tidegate, &site),
            Self::Tidegate if misses => Peer::tidegate_proxy(&cli.tidegate, &site, origin, ""),
            Self::Pipelining => Peer::tidegate_proxy(&cli.tidegate, &site, origin, PIPELINE),
            Self::Tidegate | Self::TidegateHttp2 => Peer::tidegate(&cli.tidegate, &site, ""),
            Self::Haproxy => {
                install("haproxy", "haproxy")?;
                match scenario.kind {
                    Kind::Misses => Peer::haproxy_proxy(&site, origin),
                    kind if kind.is_encrypted() => Peer::haproxy_tls(&site, origin),
                    _ => Peer::haproxy(&site, origin),
                }
            }
            Self::Varnish => {
                install("varnishd", "varnish")?;
                if misses { Peer::varnish_proxy(&site, origin) } else { Peer::varnish(&site, origin) }
            }
            Self::Caddy => {
                install("caddy", "caddy")?;
                Peer::caddy(&site)
            }
        }?;
        peer.verify(scenario.size_bytes)?;
        Ok(peer)
    }
}

/// A server's figures, one for each round; or why it was left out.
pub(crate) struct Entry<T> {
    pub server: Server,
    pub figures: Result<Vec<T>, String>,
}

pub(crate) enum Results {
    Load(Vec<Entry<Figure>>),
    /// Bytes for a connection.
    Idle(Vec<Entry<f64>>),
}

impl Scenario {
    pub(crate) fn run(&self, cli: &Cli, directory: &Path) -> Result<Results, String> {
        eprintln!("{}", self.name);
        match self.kind {
            Kind::Idle => self.idle(cli, directory).map(Results::Idle),
            _ => self.load(cli, directory).map(Results::Load),
        }
    }

    fn load(&self, cli: &Cli, directory: &Path) -> Result<Vec<Entry<Figure>>, String> {
        let origin = self.origin(directory)?;
        if matches!(self.kind, Kind::Http2 | Kind::Http3) {
            install("h2load", "nghttp2-client")?;
        }
        let servers = match self.kind {
            Kind::Misses => Server::PROXIES,
            Kind::Http3 => Server::WITH_HTTP3,
            kind if kind.is_encrypted() => Server::WITH_TLS,
            _ => Server::ALL,
        };
        let peers: Vec<_> =
            servers.iter().map(|server| server.start(cli, directory, self, &origin)).collect();
        // Without the origin behind them, only a cache can answer.
        let origin = (self.kind == Kind::Misses).then_some(origin);
        let ready = peers.iter().map(|peer| peer.as_ref().map(|_| ()).map_err(Clone::clone));
        let entries = in_turn(cli.rounds.into(), servers, ready, |index, round| {
            let Ok(peer) = &peers[index] else { return Err("it does not run".to_owned()) };
            let unique = origin.is_some().then_some(round);
            let load = Load {
                connections: self.connections,
                close: matches!(self.kind, Kind::Close | Kind::Handshakes),
                unique,
                seconds: self.seconds(cli),
            };
            let before = origin.as_ref().map_or(Ok(0.0), Peer::cpu_s)?;
            let (connections, seconds) = (self.connections, self.seconds(cli));
            let figure = match (self.kind, servers[index]) {
                (Kind::Http2, _) | (Kind::Http3, Server::Nginx | Server::TidegateHttp2) => {
                    h2load::run(peer, connections, STREAMS, seconds)?
                }
                (Kind::Http3, _) => h3load::run(peer, self.size_bytes, connections, STREAMS, seconds)?,
                _ => load.run(peer)?,
            };
            if let Some(origin) = &origin {
                let requests = figure.requests_per_s * f64::from(self.seconds(cli));
                if (origin.cpu_s()? - before) * 1e6 < requests * LEAST_ORIGIN_US {
                    return Err("it did not ask the origin each time".to_owned());
                }
            }
            settle(peers.iter().flatten())?;
            eprintln!(
                "  [{}/{}] {:20} {:8.0} requests/s {:6.2} us CPU",
                round + 1,
                cli.rounds,
                servers[index].label(),
                figure.requests_per_s,
                figure.cpu_us_per_request
            );
            Ok(figure)
        });
        Ok(entries)
    }

    fn idle(&self, cli: &Cli, directory: &Path) -> Result<Vec<Entry<f64>>, String> {
        let origin = self.origin(directory)?;
        let entries = in_turn(cli.rounds.into(), Server::ALL, std::iter::repeat(Ok(())), |index, round| {
            // A new one each round: allocators keep what a round before has left.
            let peer = Server::ALL[index].start(cli, directory, self, &origin)?;
            let bytes = idle::bytes_per_connection(&peer, self.connections, self.size_bytes)?;
            eprintln!(
                "  [{}/{}] {:10} {bytes:8.0} bytes for a connection",
                round + 1,
                cli.rounds,
                Server::ALL[index].label()
            );
            Ok(bytes)
        });
        Ok(entries)
    }

    /// wrk opens its connections within its time, which takes a second for many.
    pub(crate) fn seconds(&self, cli: &Cli) -> u32 {
        if self.connections < 10_000 { cli.seconds } else { cli.seconds.saturating_mul(2) }
    }

    /// What the caches are filled from, or what misses go through to.
    fn origin(&self, directory: &Path) -> Result<Peer, String> {
        if self.kind == Kind::Misses {
            Peer::origin(self.size_bytes)
        } else {
            // It tells caches what they need to know, as the bare responder does not.
            Peer::nginx(&Site::create(&directory.join("origin"), self.size_bytes)?)
        }
    }
}

/// Measures every server once a round, each of them first in turn. One that fails is left out from there on.
fn in_turn<T>(
    rounds: usize,
    servers: &[Server],
    ready: impl Iterator<Item = Result<(), String>>,
    mut measure: impl FnMut(usize, usize) -> Result<T, String>,
) -> Vec<Entry<T>> {
    let mut entries: Vec<Entry<T>> = servers
        .iter()
        .zip(ready)
        .map(|(&server, ready)| Entry { server, figures: ready.map(|()| Vec::new()) })
        .collect();
    for round in 0..rounds {
        for index in (0..servers.len()).map(|index| (index + round) % servers.len()) {
            let Ok(figures) = &mut entries[index].figures else { continue };
            match measure(index, round) {
                Ok(figure) => figures.push(figure),
                Err(reason) => entries[index].figures = Err(reason),
            }
        }
    }
    for entry in &entries {
        if let Err(reason) = &entry.figures {
            eprintln!("  {} is left out: {reason}", entry.server.label());
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_server_is_first_in_turn_and_one_that_fails_is_left_out_with_its_reason() {
        let mut order = Vec::new();
        let mut ready = [const { Ok(()) }; 5];
        ready[4] = Err("not installed".to_owned());
        let entries = in_turn(2, Server::ALL, ready.into_iter(), |index, round| {
            order.push(index);
            if index == 3 && round == 1 { Err("it broke".to_owned()) } else { Ok(round) }
        });
        assert_eq!(order, [0, 1, 2, 3, 1, 2, 3, 0]);
        assert_eq!(entries[0].figures, Ok(vec![0, 1]));
        assert_eq!(entries[3].figures, Err("it broke".to_owned()));
        assert_eq!(entries[4].figures, Err("not installed".to_owned()));
    }
}
