use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tidegate_accelerator::PurgePattern;
use tidegate_conditioning::neighbours::environment;
use tidegate_conditioning::{filters, launcher};
use tidegate_core::IpPrefix;
use tidegate_policy::PortRange;

use crate::gate::commands::{self, Add, Attach};
use crate::units::ListenAddress;
use crate::{client, config, fetch, gateway, intercept, man, run, top, units};

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
    #[arg(long, value_enum, default_value_t = LogForm::Text, global = true, env = environment::LOG_FORM)]
    log: LogForm,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
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
    /// Show who does most: from where, what it costs, and what was decided about it.
    #[command(after_help = "Examples:\n  tidegate top\n  tidegate top --once --json")]
    Top {
        #[command(flatten)]
        client: ClientArgs,
        /// At most so many clients.
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=256))]
        limit: u16,
        /// Print once and end; so it is anyway where standard output is no terminal.
        #[arg(long)]
        once: bool,
    },
    /// Read the configuration again; on an error the old one stays in force.
    #[command(after_help = "Example:\n  tidegate reload")]
    Reload(ClientArgs),
    /// Stop accepting, finish what is in progress, and end.
    #[command(after_help = "Example:\n  tidegate drain")]
    Drain(ClientArgs),
    /// Have the program that lies at its path now take the place of a running tidegate; nobody is refused meanwhile. On
    /// an error the old one goes on.
    #[command(after_help = "Example:\n  tidegate upgrade")]
    Upgrade(ClientArgs),
    /// Look into the cache of a running tidegate, or remove from it.
    #[command(after_help = "Example:\n  tidegate cache purge 'http://example.org/news/*'")]
    Cache {
        #[command(subcommand)]
        command: CacheCommand,
    },
    /// Keep addresses and prefixes out.
    #[command(
        after_help = "Example:\n  tidegate block add 192.0.2.0/24 --for 1h --reason 'password guessing'"
    )]
    Block {
        #[command(subcommand)]
        command: BlockCommand,
    },
    /// Overload control in the kernel, in front of any server of this host; needs CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON.
    #[command(after_help = "Example:\n  tidegate gate attach eth0 --config /etc/tidegate/gate.toml")]
    Gate {
        #[command(subcommand)]
        command: GateCommand,
    },
    /// Fetch a URL by HTTP, DHTTP or Trickles.
    #[command(
        after_help = "Examples:\n  tidegate fetch -v -o page.html dhttp://127.0.0.1:8080/page\n  tidegate fetch -o file.iso trickles://192.0.2.1:4000,192.0.2.2:4000/file.iso"
    )]
    Fetch(fetch::FetchArgs),
    /// Be a local HTTP proxy that speaks DHTTP to servers that offer it, or leads one site's clients over Trickles.
    #[command(
        after_help = "Examples:\n  tidegate gateway --listen 127.0.0.1:3128\n  curl --proxy http://127.0.0.1:3128 http://example.org/\n  tidegate gateway --listen 127.0.0.1:8080 --to trickles://192.0.2.1:4000,192.0.2.2:4000\n  curl http://127.0.0.1:8080/file.iso"
    )]
    Gateway(gateway::GatewayArgs),
    /// Be a cache on a router that answers DHTTP requests on their way to servers.
    #[command(
        after_help = "Example:\n  nft add table ip dhttp\n  nft add chain ip dhttp on_the_way '{ type filter hook prerouting priority mangle; }'\n  nft add rule ip dhttp on_the_way udp dport 80 tproxy to :8053 meta mark set 1 accept\n  ip rule add fwmark 1 lookup 100\n  ip route add local default dev lo table 100\n  tidegate intercept --listen 0.0.0.0:8053 --from 192.0.2.1:8054"
    )]
    Intercept(intercept::InterceptArgs),
    /// Run a server, unmodified, behind a chain of filters.
    Condition(launcher::ConditionArgs),
    /// Be one filter of a chain: what `condition` starts.
    #[command(hide = true, disable_help_flag = true)]
    Filter(filters::FilterArgs),
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
        after_help = "Examples:\n  tidegate cache purge http://example.org/page\n  tidegate cache purge '/images/*'\n  tidegate cache purge file:/srv/site/page.html\n  tidegate cache purge tag:news"
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

#[derive(Subcommand)]
enum BlockCommand {
    /// Block addresses and prefixes.
    #[command(
        after_help = "Examples:\n  tidegate block add 192.0.2.7\n  tidegate block add 2001:db8::/32 --for forever --reason 'not ours'\n  tidegate block add --file /etc/tidegate/drop.list"
    )]
    Add {
        /// Addresses, or prefixes such as 192.0.2.0/24.
        #[arg(value_name = "ADDR[/N]", required_unless_present = "file")]
        prefixes: Vec<IpPrefix>,
        /// A list of addresses and prefixes, one a line.
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
        /// For how long: 90s, 10m, 1h, 2d or forever; as `block.for` says by default.
        #[arg(long = "for", value_name = "TIME", value_parser = lifetime)]
        lifetime: Option<Duration>,
        /// Why: a text that `block list` shows.
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// List what is blocked.
    #[command(after_help = "Example:\n  tidegate block list --json")]
    List {
        /// At most so many.
        #[arg(long, default_value_t = 1000)]
        limit: usize,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Say what is known about an address: whether it is blocked, what it does, and why it was decided on.
    #[command(after_help = "Example:\n  tidegate block explain 192.0.2.7")]
    Explain {
        /// The address.
        #[arg(value_name = "ADDR")]
        address: IpAddr,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Let addresses and prefixes in again.
    #[command(after_help = "Example:\n  tidegate block remove 192.0.2.0/24")]
    Remove {
        /// As they were blocked.
        #[arg(value_name = "ADDR[/N]", required = true)]
        prefixes: Vec<IpPrefix>,
        #[command(flatten)]
        client: ClientArgs,
    },
}

#[derive(Subcommand)]
enum GateCommand {
    /// Attach to network interfaces, and hold the rules in force until a signal or `gate detach`.
    #[command(
        after_help = "Examples:\n  tidegate gate attach eth0 --config /etc/tidegate/gate.toml\n  tidegate gate attach eth0 --http 80 --http 8000-8099\n\nSIGHUP reads the rules again; SIGTERM, SIGINT and the end of the process in any way detach."
    )]
    Attach {
        /// Network interfaces.
        #[arg(value_name = "IFACE", required = true)]
        interfaces: Vec<String>,
        /// A configuration file: its tables connection, request, block, gate and adapt hold.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Ports on which cleartext HTTP is spoken; those of the file's listeners, or 80, by default.
        #[arg(long, value_name = "PORTS")]
        http: Vec<PortRange>,
        /// Listen here for a server, with an accept queue per priority: a `tidegate run` with this listener gets the
        /// sockets, and clients that connect while it restarts wait.
        #[arg(long, value_name = "ADDR", value_parser = units::listen_address)]
        listen: Vec<ListenAddress>,
        /// Accept queue depth from which new connections of lower classes are held back.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=65_535))]
        hold_depth: Option<u32>,
    },
    /// Check what the rules of a file would become here: compile them, load them with the programs into the kernel, and
    /// say what would be enforced where. Nothing is attached.
    #[command(after_help = "Example:\n  tidegate gate check eth0 --config rules.toml --http 80")]
    Check {
        /// Network interfaces that the gate is to be attached to.
        #[arg(value_name = "IFACE")]
        interfaces: Vec<String>,
        /// Configuration file with the rules and the `[gate]` section; other sections are ignored.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Ports on which cleartext HTTP is spoken; those of the file's listeners, or 80, by default.
        #[arg(long, value_name = "PORTS")]
        http: Vec<PortRange>,
        /// As `tidegate run` would, which also decides what no segment shows.
        #[arg(long)]
        run: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Detach, whichever process holds the programs.
    #[command(after_help = "Example:\n  tidegate gate detach eth0")]
    Detach {
        /// One network interface; all by default.
        #[arg(value_name = "IFACE")]
        interface: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show which mechanism enforces which rule, why not a better one, and what was passed and refused.
    #[command(after_help = "Example:\n  tidegate gate show --json")]
    Show(ClientArgs),
}

/// A duration, or `forever`.
fn lifetime(text: &str) -> Result<Duration, String> {
    match text {
        "forever" => Ok(Duration::ZERO),
        _ => match units::duration(text) {
            Ok(Duration::ZERO) => Err("expected a time above zero, or forever".into()),
            other => other,
        },
    }
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
    /// The web server in front of which to run, such as http://127.0.0.1:9000 or unix:/run/app.sock.
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
    // As text, a chain's processes say lines of their own.
    if matches!(cli.command, Command::Condition(_) | Command::Filter(_)) && cli.log == LogForm::Json {
        run::start_log(cli.log);
    }
    match cli.command {
        Command::Run(args) => run::run(&args, cli.log),
        Command::Check { schema: true, .. } => print(&config::schema()),
        Command::Check { file, json, .. } => check(&file.unwrap_or_default(), json),
        Command::Status(args) => client::status(args.admin, args.json),
        Command::Top { client: args, limit, once } => top::top(args.admin, limit, once, args.json),
        Command::Reload(args) => client::post(args.admin, "/api/reload", args.json),
        Command::Drain(args) => client::post(args.admin, "/api/drain", args.json),
        Command::Upgrade(args) => client::upgrade(args.admin, args.json),
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
        Command::Block { command } => block(&command),
        Command::Gate { command } => match command {
            GateCommand::Attach { interfaces, config, http, listen, hold_depth } => {
                run::start_log(cli.log);
                let attach = Attach {
                    interfaces: &interfaces,
                    config: config.as_deref(),
                    http: &http,
                    listen: &listen,
                    hold_depth,
                };
                commands::attach(&attach)
            }
            GateCommand::Check { interfaces, config, http, run, json } => {
                let attach = Attach {
                    interfaces: &interfaces,
                    config: Some(&config),
                    http: &http,
                    listen: &[],
                    hold_depth: None,
                };
                commands::check(&attach, run, json)
            }
            GateCommand::Detach { interface, json } => commands::detach(interface.as_deref(), json),
            GateCommand::Show(args) => commands::show(args.admin, args.json),
        },
        Command::Fetch(args) => fetch::fetch(&args),
        Command::Gateway(args) => gateway::run(&args, cli.log),
        Command::Intercept(args) => intercept::run(&args, cli.log),
        Command::Condition(args) => condition(&args),
        Command::Filter(args) => std::process::exit(filters::run(&args).into()),
        Command::Completions { shell } => {
            let mut command = <Cli as clap::CommandFactory>::command();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command, "tidegate", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
        Command::Man { out } => write_man(&out),
    }
}

fn block(command: &BlockCommand) -> Result<(), Failure> {
    match command {
        BlockCommand::Add { prefixes, file, lifetime, reason, client } => {
            let add = Add { prefixes, file: file.as_ref(), lifetime: *lifetime, reason: reason.as_deref() };
            commands::block_add(client.admin, &add, client.json)
        }
        BlockCommand::List { limit, client } => commands::block_list(client.admin, *limit, client.json),
        BlockCommand::Explain { address, client } => top::explain(client.admin, *address, client.json),
        BlockCommand::Remove { prefixes, client } => {
            commands::block_remove(client.admin, prefixes, client.json)
        }
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
        Ok(loaded) => {
            let mut errors = config::still_missing(&loaded, Some(file));
            errors.extend(config::wrong_keys(&loaded));
            let of_host = config::not_on_this_host(&loaded, file);
            (errors, loaded.warnings.into_iter().chain(of_host).collect())
        }
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

/// Ends with the command's exit code.
fn condition(args: &launcher::ConditionArgs) -> Result<(), Failure> {
    match launcher::condition(args) {
        Ok(0) => Ok(()),
        Ok(code) => std::process::exit(code.into()),
        Err(error) => Err(Failure { code: error.exit_code(), message: format!("error: {error}") }),
    }
}

fn write_man(out: &Path) -> Result<(), Failure> {
    let command = <Cli as clap::CommandFactory>::command();
    let written = man::write_pages(command, out).map_err(|error| {
        Failure::runtime(format!("error: cannot write manual pages to {}: {error}", out.display()))
    })?;
    print(&format!("{written} manual pages written to {}\n", out.display()))
}
