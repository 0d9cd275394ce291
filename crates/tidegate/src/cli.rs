use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use tidegate_accelerator::PurgePattern;

use crate::{client, config, fetch, run};

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
        #[arg(long, conflicts_with = "json")]
        schema: bool,
        /// Print errors and warnings as JSON.
        #[arg(long)]
        json: bool,
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
    /// Fetch a URL over Trickles.
    #[command(after_help = "Example:\n  tidegate fetch -v -o page.html trickles://127.0.0.1:8080/page.html")]
    Fetch(fetch::FetchArgs),
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
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
    /// Start even if no server of an upstream can be reached yet; `require = false` says so for one upstream.
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
        Command::Check { schema: true, .. } => print(&config::schema()),
        Command::Check { file, json, .. } => check(&file.unwrap_or_default(), json),
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
        Command::Fetch(args) => fetch::fetch(&args),
        Command::Completions { shell } => {
            let mut command = <Cli as clap::CommandFactory>::command();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command, "tidegate", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
        Command::Man { out } => man(&out),
    }
}

/// A command line that cannot be understood: one line that says why and where to read on. Help that was asked for is
/// no error.
pub(crate) fn not_understood(error: &clap::Error) -> Result<(), Failure> {
    use clap::error::ErrorKind;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => print(&error.to_string()),
        // `tidegate` alone: the list of commands is the answer.
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Err(Failure::usage(error.to_string())),
        _ => Err(Failure::usage(one_line(&error.to_string()))),
    }
}

/// From clap's paragraphs (error, tips, usage, "for more information") to one line.
fn one_line(text: &str) -> String {
    let mut parts: Vec<String> = text
        .split("\n\n")
        .map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter(|line| {
            !line.is_empty() && !line.starts_with("Usage: ") && !line.starts_with("For more information")
        })
        .map(|line| line.strip_prefix("tip: ").map_or(line.clone(), str::to_owned))
        .collect();
    parts.push(format!("see '{} --help'", command_meant(std::env::args().skip(1))));
    parts.join("; ")
}

/// The command whose help is of use: "tidegate cache purge".
fn command_meant(arguments: impl Iterator<Item = String>) -> String {
    let mut command = <Cli as clap::CommandFactory>::command();
    let mut name = "tidegate".to_owned();
    for argument in arguments {
        if let Some(below) = command.find_subcommand(&argument) {
            name = format!("{name} {argument}");
            command = below.clone();
        }
    }
    name
}

/// Writes to standard output. A reader that went away has seen enough (`tidegate check --schema | head`).
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::runtime(format!("error: cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

fn check(file: &Path, json: bool) -> Result<(), Failure> {
    let (errors, warnings) = match config::load(file) {
        Ok(loaded) => (config::still_missing(&loaded, Some(file)), loaded.warnings),
        Err(errors) => (errors, Vec::new()),
    };
    if json {
        let findings = errors.iter().map(|error| error.to_json("error"));
        let all: Vec<_> = findings.chain(warnings.iter().map(|warning| warning.to_json("warning"))).collect();
        print(&format!("{:#}\n", serde_json::Value::Array(all)))?;
    } else {
        let mut err = std::io::stderr().lock();
        for warning in &warnings {
            let _ = writeln!(err, "warning: {warning}");
        }
    }
    match (errors.is_empty(), json) {
        (true, true) => Ok(()),
        (true, false) => print(&format!("{}: no errors\n", file.display())),
        (false, true) => Err(Failure::runtime(format!("error: {}: {} errors", file.display(), errors.len()))),
        (false, false) => Err(Failure::runtime(config::lines(&errors))),
    }
}

fn man(out: &Path) -> Result<(), Failure> {
    let command = <Cli as clap::CommandFactory>::command();
    clap_mangen::generate_to(command, out).map_err(|error| {
        Failure::runtime(format!("error: cannot write manual pages to {}: {error}", out.display()))
    })
}
