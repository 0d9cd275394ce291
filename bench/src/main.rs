#![forbid(unsafe_code)]
//! Ratios against peers: nginx, haproxy, varnish and a bare epoll responder, alternating within one run on pinned
//! cores.
//!
//! The server has core 0, the load core 1. Each round measures every peer once, in an order that rotates, so that a
//! change of the machine's speed meets all of them; the figures are medians with the least and the greatest. CPU is
//! what the server's processes used, user and system, divided by the requests that were answered.

mod report;
mod scenarios;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidegate_bench::machine::Watch;
use tidegate_bench::peers::install;
use tidegate_bench::{bare, dhttp, h3load};

use crate::scenarios::{SCENARIOS, Scenario};

/// Compare tidegate with nginx, haproxy, varnish and a bare epoll responder.
#[derive(Parser)]
#[command(
    after_help = "Examples:\n  tidegate-bench --rounds 5 --out docs/benchmarks.md\n  tidegate-bench --only misses --rounds 1 --seconds 1 --out /tmp/misses.md"
)]
struct Cli {
    /// The tidegate binary; target/release/tidegate by default.
    #[arg(long, env = "TIDEGATE_BIN", default_value = "target/release/tidegate")]
    tidegate: PathBuf,
    /// Rounds; each measures every peer once.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Seconds of load for each figure.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
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
    /// Compare small answers by DHTTP with nginx's over connections that are kept.
    Dhttp,
    /// Load a server by HTTP/3, and print how many answers came.
    Http3(h3load::Load),
}

fn main() -> ExitCode {
    let mut cli = Cli::parse();
    raise_descriptor_limit();
    let result = match cli.command.take() {
        Some(Internal::Bare { address, size_bytes }) => {
            bare::serve(address, size_bytes).map_err(|error| format!("bare: {error}"))
        }
        Some(Internal::Dhttp) => dhttp::compare(&cli.tidegate, cli.rounds, cli.seconds),
        Some(Internal::Http3(load)) => load.print(),
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
    // Every name contains the empty text.
    let part = cli.only.as_deref().unwrap_or("");
    let chosen: Vec<&Scenario> = SCENARIOS.iter().filter(|scenario| scenario.name.contains(part)).collect();
    if chosen.is_empty() {
        let names = SCENARIOS.map(|scenario| scenario.name).join("; ");
        return Err(format!("no scenario's name contains {part:?}; there are: {names}"));
    }
    if !cli.tidegate.exists() {
        return Err(format!(
            "{} is not there; build it with: cargo build --release -p tidegate",
            cli.tidegate.display()
        ));
    }
    for (program, package) in [("nginx", "nginx-light"), ("wrk", "wrk")] {
        install(program, package)?;
    }
    let watch = Watch::start();
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let mut results = Vec::new();
    for scenario in chosen {
        results.push((scenario, scenario.run(cli, directory.path())?));
    }
    let page = report::page(&results, cli, watch.others_percent());
    std::fs::write(&cli.out, page).map_err(|error| format!("cannot write {}: {error}", cli.out.display()))?;
    println!("wrote {}", cli.out.display());
    Ok(())
}

/// Servers and wrk inherit it. Without, fewer connections are possible, which the kernel will say then.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        eprintln!("warning: the limit on file descriptors stays at {:?}: {error}", limit.current);
    }
}
