use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tidegate_accelerator::PurgePattern;

use crate::{client, config, run};

/// Why the program ends with an error, and with which exit code: 1 at run time, 2 for bad usage.
pub(crate) struct Failure {
    pub message: String,
    pub code: u8,
}

impl Failure {
    pub(crate) fn runtime(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 1 }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 2 }
    }
}

/// A web front end that makes a site fast and keeps it answering.
#[derive(Parser)]
#[command(
    name = "tidegate",
    version,
    after_help = "Example:\n  tidegate run --listen :8080 --upstream http://127.0.0.1:9000"
)]
pub(crate) struct Cli {
    /// The form of log lines on standard error.
    #[arg(long, value_enum, default_value_t = LogForm::Text, global = true)]
    log: LogForm,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum LogForm {
    Text,
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a site.
    #[command(
        after_help = "Examples:\n  tidegate run --listen :8080 --upstream http://127.0.0.1:9000\n  tidegate run --config /etc/tidegate/tidegate.toml"
    )]
    Run(RunArgs),
    /// Check a configuration file: each error with its line, its column and what was expected.
    #[command(after_help = "Example:\n  tidegate check /etc/tidegate/tidegate.toml")]
    Check {
        /// The file to check.
        #[arg(required_unless_present = "schema")]
        file: Option<PathBuf>,
        /// Print the JSON Schema of configuration files instead.
        #[arg(long)]
        schema: bool,
    },
    /// Show what a running tidegate does.
    #[command(after_help = "Example:\n  tidegate status --json")]
    Status(ClientArgs),
    /// Read the configuration again; on an error the old one stays in force.
    #[command(after_help = "Example:\n  tidegate reload")]
    Reload(ClientArgs),
    /// Stop accepting, finish what is in progress, and end.
    #[command(after_help = "Example:\n  tidegate drain")]
    Drain(ClientArgs),
    /// Look into the cache of a running tidegate, or remove from it.
    #[command(after_help = "Example:\n  tidegate cache purge 'http://example.org/news/*'")]
    Cache {
        #[command(subcommand)]
        command: CacheCommand,
    },
    /// Print a shell's completions.
    #[command(after_help = "Example:\n  tidegate completions bash > /etc/bash_completion.d/tidegate")]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write manual pages.
    #[command(after_help = "Example:\n  tidegate man --out /usr/local/share/man/man1")]
    Man {
        /// The directory to write to.
        #[arg(long, default_value = ".")]
        out: PathBuf,
    },
}

#[derive(Subcommand)]
enum CacheCommand {
    /// List stored responses.
    #[command(after_help = "Example:\n  tidegate cache list --limit 20")]
    List {
        #[command(flatten)]
        client: ClientArgs,
        /// At most so many.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Remove stored responses: a URL, a prefix ending in *, tag:NAME, or * for all.
    #[command(
        after_help = "Examples:\n  tidegate cache purge http://example.org/page\n  tidegate cache purge '/images/*'\n  tidegate cache purge tag:news"
    )]
    Purge {
        #[command(flatten)]
        client: ClientArgs,
        /// What to remove.
        pattern: String,
    },
    /// Write the cache to its file now.
    #[command(after_help = "Example:\n  tidegate cache save")]
    Save(ClientArgs),
}

/// What `tidegate run` takes.
#[derive(Args, Clone)]
pub(crate) struct RunArgs {
    /// Configuration file.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where clients connect: ADDRESS:PORT, or :PORT for every address.
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<String>,
    /// The web server in front of which to run, such as http://127.0.0.1:9000.
    #[arg(long, value_name = "URL", conflicts_with = "root")]
    pub upstream: Option<String>,
    /// A directory of files to serve.
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Where the admin server listens.
    #[arg(long, value_name = "ADDR")]
    pub admin: Option<String>,
    /// Number of data cores; all of the machine's by default.
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// Start even if no server of an upstream can be reached yet.
    #[arg(long)]
    pub allow_unreachable: bool,
}

#[derive(Args)]
struct ClientArgs {
    /// Where the admin server of the running tidegate listens.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9090")]
    admin: SocketAddr,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Does what the command line asks for.
pub(crate) fn execute(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Run(args) => run::run(&args, cli.log),
        Command::Check { schema: true, .. } => {
            println!("{}", config::schema());
            Ok(())
        }
        Command::Check { file, .. } => check(&file.unwrap_or_default()),
        Command::Status(args) => client::status(args.admin, args.json),
        Command::Reload(args) => client::post(args.admin, "/api/reload", args.json),
        Command::Drain(args) => client::post(args.admin, "/api/drain", args.json),
        Command::Cache { command } => match command {
            CacheCommand::List { client: args, limit } => client::cache_list(args.admin, limit, args.json),
            CacheCommand::Purge { client: args, pattern } => {
                pattern
                    .parse::<PurgePattern>()
                    .map_err(|error| Failure::usage(format!("error: pattern {pattern:?}: {error}")))?;
                client::purge(args.admin, &pattern, args.json)
            }
            CacheCommand::Save(args) => client::post(args.admin, "/api/cache/save", args.json),
        },
        Command::Completions { shell } => {
            let mut command = <Cli as clap::CommandFactory>::command();
            clap_complete::generate(shell, &mut command, "tidegate", &mut std::io::stdout());
            Ok(())
        }
        Command::Man { out } => man(&out),
    }
}

fn check(file: &std::path::Path) -> Result<(), Failure> {
    let loaded = config::load(file).map_err(|errors| Failure::runtime(config::report(&errors)))?;
    for warning in &loaded.warnings {
        eprintln!("warning: {warning}");
    }
    println!("{}: no errors", file.display());
    Ok(())
}

fn man(out: &std::path::Path) -> Result<(), Failure> {
    let command = <Cli as clap::CommandFactory>::command();
    clap_mangen::generate_to(command, out).map_err(|error| {
        Failure::runtime(format!("error: cannot write manual pages to {}: {error}", out.display()))
    })
}
