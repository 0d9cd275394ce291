#![forbid(unsafe_code)]
//! `tidegate-lab`: the command line of the lab.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidegate_lab::record::{Record, Watch};
use tidegate_lab::{Error, Lab, Scenario, interrupt, load, page, scenarios};

/// The papers' experiments, run again: each gives figures (CSV), plots (SVG) and a verdict.
#[derive(Parser)]
#[command(
    name = "tidegate-lab",
    version,
    after_help = "Example:\n  tidegate-lab run tempesta-fig4 --quick\n\nExit codes: 0 the claims hold; 1 one does not, or a run failed; 2 bad usage."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the scenarios and what they claim.
    #[command(after_help = "Example:\n  tidegate-lab list --json")]
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run scenarios, or all of a paper; write NAME.csv, NAME.svg and NAME.json; print a verdict for each.
    #[command(
        after_help = "Examples:\n  tidegate-lab run tempesta-fig3\n  tidegate-lab run tempesta --out /tmp/lab --quick"
    )]
    Run(RunArgs),
    /// Write the pages of the papers, with the plots, from the results of the last runs.
    #[command(after_help = "Example:\n  tidegate-lab report --results target/lab --pages docs/papers")]
    Report {
        /// Where the runs have written to.
        #[arg(long, value_name = "DIR", default_value = "target/lab")]
        results: PathBuf,
        /// Where the pages are written.
        #[arg(long, value_name = "DIR", default_value = "docs/papers")]
        pages: PathBuf,
    },
    /// The limit of servers: answers with fixed bytes.
    #[command(hide = true)]
    Bare {
        /// Where to listen.
        address: SocketAddr,
        /// Bytes of the body.
        size_bytes: usize,
    },
    /// A load process; its orders come on standard input.
    #[command(hide = true)]
    Load,
    /// Pass on messages with their descriptors, from standard input to standard output, both links; or wake-ups, both
    /// event counters.
    #[command(hide = true)]
    PassOn {
        #[arg(long)]
        wakes: bool,
    },
    /// An attacking process; it ends with its standard input.
    #[command(hide = true)]
    Attack {
        /// The server.
        server: SocketAddr,
        /// Connections to hold.
        connections: usize,
        /// The first source address.
        source: std::net::Ipv4Addr,
        /// What each connection sends once.
        text: String,
        /// Open again what the server ends.
        #[arg(long)]
        reopen: bool,
    },
}

#[derive(Args)]
struct RunArgs {
    /// Names as `list` prints them, or a paper's short name for all of its scenarios, or `all`.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Where the results are written.
    #[arg(long, value_name = "DIR", default_value = "target/lab")]
    out: PathBuf,
    /// End within 60 s a scenario; the figures are less certain.
    #[arg(long)]
    quick: bool,
    /// The tidegate binary; the one beside this program by default.
    #[arg(long, value_name = "BIN", env = "TIDEGATE_BIN")]
    tidegate: Option<PathBuf>,
    /// A log in the common format, for scenarios that simulate a trace; a made one by default.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::List { json } => list(json),
        Command::Run(args) => run(&args),
        Command::Report { results, pages } => report(&results, &pages),
        Command::Bare { address, size_bytes } => tidegate_bench::bare::serve(address, size_bytes)
            .map(|()| ExitCode::SUCCESS)
            .map_err(|error| Error::Server(format!("bare: {error}"))),
        Command::PassOn { wakes } => {
            scenarios::cc_hop::pass_on(wakes).map(|()| ExitCode::SUCCESS).map_err(Error::Load)
        }
        Command::Attack { server, connections, source, text, reopen } => {
            scenarios::cc_attack::attack(server, connections, source, &text, reopen)
                .map(|()| ExitCode::SUCCESS)
                .map_err(Error::Load)
        }
        Command::Load => load::follow(std::io::stdin().lock(), std::io::stdout().lock())
            .map(|()| ExitCode::SUCCESS)
            .map_err(Error::Load),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::from(error.exit_code())
    })
}

fn list(json: bool) -> Result<ExitCode, Error> {
    if json {
        let rows: Vec<_> = scenarios::ALL
            .iter()
            .map(|scenario| {
                serde_json::json!({
                    "name": scenario.name,
                    "paper": scenario.paper.title,
                    "figure": scenario.figure,
                    "claim": scenario.claim,
                })
            })
            .collect();
        println!("{}", serde_json::Value::from(rows));
    } else {
        for scenario in scenarios::ALL {
            println!("{:16} {}", scenario.name, scenario.claim);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn run(args: &RunArgs) -> Result<ExitCode, Error> {
    let chosen = scenarios::choose(&args.names)?;
    if cfg!(debug_assertions) {
        eprintln!("warning: built without optimization; the figures mean nothing");
    }
    raise_descriptor_limit();
    if let Err(error) = interrupt::watch() {
        eprintln!("warning: what an interrupted run started stays behind: {error}");
    }
    let mut all_hold = true;
    let mut failure = None;
    for scenario in chosen {
        let outcome = run_one(scenario, args);
        interrupt::stop_if_it_came();
        match outcome {
            Ok(record) => {
                println!("{}", record.verdict.line(scenario.name));
                all_hold &= record.verdict.holds;
                if let Some(doubts) = record.conditions.doubts() {
                    eprintln!("{}: not to be trusted: {doubts}", scenario.name);
                }
            }
            // The others may still run; the last failure ends the program.
            Err(error) => {
                eprintln!("error: {}: {error}", scenario.name);
                failure = Some(error.exit_code());
            }
        }
    }
    Ok(failure.map_or(if all_hold { ExitCode::SUCCESS } else { ExitCode::FAILURE }, ExitCode::from))
}

fn run_one(scenario: &Scenario, args: &RunArgs) -> Result<Record, Error> {
    let tidegate = args.tidegate.clone().unwrap_or_else(|| {
        let own = std::env::current_exe().unwrap_or_default();
        own.with_file_name("tidegate")
    });
    let watch = Watch::start();
    let outcome =
        (scenario.run)(&Lab { quick: args.quick, tidegate, trace: args.trace.clone(), name: scenario.name })?;
    let conditions = watch.conditions(outcome.servers.clone(), args.quick);
    Record::write(&args.out, scenario, &outcome, conditions)
}

fn report(results: &std::path::Path, pages: &std::path::Path) -> Result<ExitCode, Error> {
    let written = page::publish(results, pages, scenarios::ALL)?;
    if written.is_empty() {
        eprintln!("error: no results in {}; run a scenario first: tidegate-lab run NAME", results.display());
        return Ok(ExitCode::FAILURE);
    }
    for path in written {
        println!("wrote {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Servers and load processes inherit it. Without, fewer connections are possible, which the kernel will say then.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        eprintln!("warning: the limit on file descriptors stays at {:?}: {error}", limit.current);
    }
}
