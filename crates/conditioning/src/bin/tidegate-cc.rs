//! The filters of connection conditioning, each started as a process of its own, and the launcher of a chain.

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
    /// Run a server behind a chain of filters
    Condition(launcher::ConditionArgs),
    /// Be one filter of a chain; what a launcher starts
    #[command(disable_help_flag = true)]
    Filter {
        /// The filter's name; without it, all filters are listed
        name: Option<String>,
        /// `key=value,key=value`, or --help
        #[arg(default_value = "", allow_hyphen_values = true)]
        arguments: String,
    },
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Condition(args) => match launcher::condition(&args) {
            Ok(code) => ExitCode::from(code),
            Err(error) => {
                eprintln!("tidegate-cc: {error}");
                ExitCode::from(error.exit_code())
            }
        },
        Command::Filter { name: Some(name), arguments } => filters::run(&name, &arguments),
        Command::Filter { name: None, .. } => {
            for kind in filters::KINDS {
                println!("{:<10} {}", kind.name, kind.help);
            }
            ExitCode::SUCCESS
        }
    }
}
