#![forbid(unsafe_code)]
//! `tidegate`: the command line, the configuration file and the admin server.

mod acme;
mod admin;
mod cli;
mod client;
mod config;
mod defence;
#[cfg(test)]
mod documents;
mod external;
mod fetch;
mod gate;
mod gateway;
mod intercept;
mod man;
mod notify;
mod run;
mod top;
mod trickles;
mod units;
mod upgrade;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let outcome = match cli::Cli::try_parse() {
        Ok(cli) => cli::execute(cli),
        Err(error) => cli::not_understood(&error),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Nobody may be left to read it; that is no reason to panic.
            let _ = writeln!(std::io::stderr(), "{}", failure.message);
            ExitCode::from(failure.code)
        }
    }
}
