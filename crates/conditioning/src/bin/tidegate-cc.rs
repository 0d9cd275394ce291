//! The filters of connection conditioning, each started as a process of its own, and the launcher of a chain: what the
//! C library starts for a server that was written with it.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tidegate_conditioning::{filters, launcher};

#[derive(Parser)]
#[command(version, about = "Connection conditioning: filters in front of any server")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a server, unmodified, behind a chain of filters
    Condition(launcher::ConditionArgs),
    /// Be one filter of a chain: what `condition` starts
    #[command(disable_help_flag = true)]
    Filter(filters::FilterArgs),
    /// Be the chain of a server that was written with the C library
    #[command(hide = true)]
    Serve {
        /// The filters, the nearest to the client first
        filters: Vec<launcher::FilterSpec>,
    },
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Condition(args) => ended(launcher::condition(&args)),
        Command::Serve { filters } => ended(launcher::serve(&filters)),
        Command::Filter(args) => ExitCode::from(filters::run(&args)),
    }
}

fn ended(outcome: Result<u8, launcher::LaunchError>) -> ExitCode {
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
