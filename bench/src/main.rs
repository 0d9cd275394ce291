#![forbid(unsafe_code)]
//! Ratios against peers: nginx and a bare epoll responder, alternating within one run on pinned cores.
//!
//! The server has core 0, the load core 1. Each round measures every peer once, so that a change of the machine's speed
//! meets all of them; the figures are medians with the least and the greatest. CPU is what the server's processes used,
//! user and system, divided by the requests that were answered.

mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tidegate_bench::bare;
use tidegate_bench::peers::{Figure, Peer, Site, install};

/// Compare tidegate with nginx and with a bare epoll responder.
#[derive(Parser)]
#[command(after_help = "Example:\n  tidegate-bench --rounds 5 --out docs/benchmarks.md")]
struct Cli {
    /// The tidegate binary; target/release/tidegate by default.
    #[arg(long, env = "TIDEGATE_BIN", default_value = "target/release/tidegate")]
    tidegate: PathBuf,
    /// Rounds; each measures every peer once.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of load for each figure.
    #[arg(long, default_value_t = 4)]
    seconds: u32,
    /// Only scenarios whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Where the page is written.
    #[arg(long, default_value = "docs/benchmarks.md")]
    out: PathBuf,
    #[command(subcommand)]
    command: Option<Internal>,
}

#[derive(Subcommand)]
enum Internal {
    /// Serve one fixed response: the limit against which servers are held.
    Bare {
        /// Where to listen.
        address: std::net::SocketAddr,
        /// Bytes of the body.
        size_bytes: usize,
    },
}

/// One load, and the ratio to nginx's requests per CPU-second that is the goal.
pub(crate) struct Scenario {
    pub name: &'static str,
    pub size_bytes: usize,
    pub connections: usize,
    pub close: bool,
    pub goal: f64,
}

const SCENARIOS: [Scenario; 6] = [
    Scenario { name: "612 B, 32 connections", size_bytes: 612, connections: 32, close: false, goal: 1.6 },
    Scenario { name: "612 B, 512 connections", size_bytes: 612, connections: 512, close: false, goal: 1.6 },
    Scenario {
        name: "612 B, 10,000 connections",
        size_bytes: 612,
        connections: 10_000,
        close: false,
        goal: 1.6,
    },
    Scenario { name: "8 KiB, 32 connections", size_bytes: 8 << 10, connections: 32, close: false, goal: 1.4 },
    Scenario {
        name: "100 KiB, 32 connections",
        size_bytes: 100 << 10,
        connections: 32,
        close: false,
        goal: 1.0,
    },
    Scenario { name: "612 B, Connection: close", size_bytes: 612, connections: 32, close: true, goal: 1.1 },
];

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match &cli.command {
        Some(Internal::Bare { address, size_bytes }) => {
            bare::serve(*address, *size_bytes).map_err(|error| error.to_string())
        }
        None => compare(&cli),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn compare(cli: &Cli) -> Result<(), String> {
    for (program, package) in [("nginx", "nginx-light"), ("wrk", "wrk")] {
        install(program, package)?;
    }
    if !cli.tidegate.exists() {
        return Err(format!(
            "{} is not there; build it with: cargo build --release -p tidegate",
            cli.tidegate.display()
        ));
    }
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let chosen =
        |scenario: &&Scenario| cli.only.as_ref().is_none_or(|only| scenario.name.contains(only.as_str()));
    let mut results = Vec::new();
    for scenario in SCENARIOS.iter().filter(chosen) {
        let site = Site::create(directory.path(), scenario.size_bytes)?;
        let peers = [
            Peer::bare(scenario.size_bytes)?,
            Peer::nginx(&site)?,
            Peer::tidegate(&cli.tidegate, &site, "")?,
        ];
        for peer in &peers {
            peer.verify(scenario.size_bytes)?;
        }
        let mut figures: [Vec<Figure>; 3] = Default::default();
        for round in 0..cli.rounds {
            for (peer, figures) in peers.iter().zip(&mut figures) {
                let figure = peer.measure(scenario.connections, scenario.close, cli.seconds)?;
                eprintln!(
                    "[{}/{}] {:26} {:9} {:9.0} requests/s {:6.2} us CPU",
                    round + 1,
                    cli.rounds,
                    scenario.name,
                    peer.name,
                    figure.requests_per_s,
                    figure.cpu_us_per_request
                );
                figures.push(figure);
            }
        }
        results.push((scenario, figures));
    }
    let page = report::page(&results, cli);
    std::fs::write(&cli.out, page).map_err(|error| format!("cannot write {}: {error}", cli.out.display()))?;
    println!("wrote {}", cli.out.display());
    Ok(())
}
