//! Starts a chain of filters and the command behind it, and keeps the chain whole.
//!
//! The launcher owns both ends of every link. A filter that dies is started anew on the same links, so that nothing
//! that was under way in them is lost and no neighbour has to connect again.

mod asker;
mod chain;
mod children;
mod error;
mod listeners;
mod notify;
mod plan;
mod questions;
mod relay;
mod supervision;

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use crate::keeper::MOST_LISTENERS;
use crate::ledger::Ledger;
use crate::link;
use crate::neighbours::{environment, word};
use chain::Chain;
use supervision::{Served, Supervision};

pub use error::LaunchError;
pub use plan::{FilterSpec, filter_program, plan};

/// How long filters may take to become ready, and the command to end.
const PATIENCE: Duration = Duration::from_secs(10);

fn after_help() -> String {
    format!(
        "Example:\n  tidegate condition --listen 0.0.0.0:80 -- nginx -g 'daemon off;'\n\n\
         Filters: {}; `tidegate filter NAME --help` explains one.",
        crate::filters::names()
    )
}

/// The arguments of `tidegate condition`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = after_help())]
pub struct ConditionArgs {
    /// Address and port that clients connect to; `:80` listens on every address. May be given several times.
    #[arg(long, value_name = "ADDR", value_parser = parse_listen, required = true)]
    pub listen: Vec<SocketAddr>,
    /// A filter and its arguments, the nearest to the client first; a name with a slash is a program of your own, and
    /// one with a + before it shares the process of the filter before it: cheaper, and not kept apart from it. Without
    /// any: package, persist, normalize, prior.
    #[arg(long = "filter", value_name = "NAME[=ARGS]")]
    pub filters: Vec<FilterSpec>,
    /// Port that COMMAND listens on, if it is not the one of the first --listen.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub server_port: Option<u16>,
    /// How COMMAND is reached; by default, what its program file calls for.
    #[arg(long, value_enum)]
    pub via: Option<Via>,
    /// How long COMMAND may take until it listens, and to accept its first client.
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    pub start_timeout: u64,
    /// Connections that may wait to be accepted.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(i32).range(1..))]
    pub backlog: i32,
    /// Leave scheduling as it is, instead of SCHED_BATCH: lower latency where cores are shared with other work, less
    /// throughput.
    #[arg(long)]
    pub preempt: bool,
    /// How long a server that waits for events (epoll), or has processes of one thread, may keep a connection after its
    /// response and read the next request itself: nearly as many requests as without a chain. For chains of package,
    /// persist, normalize and prior only; 0: not at all.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 0)]
    pub linger: u64,
    /// User that filters become when they are started as root.
    #[arg(long, value_name = "NAME", default_value = "nobody")]
    pub filter_user: String,
    /// The preload library, if it is not where it was installed.
    #[arg(long, value_name = "FILE", env = "TIDEGATE_PRELOAD")]
    pub preload: Option<PathBuf>,
    /// The server and its arguments.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// How the command's listening and accepting are taken over.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum Via {
    /// By a library that is loaded before libc.
    Preload,
    /// By the kernel's questions to the launcher: for programs that make their system calls themselves.
    Seccomp,
}

/// Reads `ADDR:PORT`, or `:PORT`.
fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let every = if has_ipv6() { "[::]" } else { "0.0.0.0" };
    let full = if text.starts_with(':') { format!("{every}{text}") } else { text.to_owned() };
    let wrong = "expected an address and a port, such as 127.0.0.1:8080, [::]:80 or :80";
    full.parse().ok().filter(|address: &SocketAddr| address.port() != 0).ok_or_else(|| wrong.to_owned())
}

fn has_ipv6() -> bool {
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::INET6, rustix::net::SocketType::STREAM, None);
    socket.is_ok_and(|socket| {
        rustix::net::bind(&socket, &SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, 0))).is_ok()
    })
}

/// Runs `tidegate condition` to its end and returns the command's exit code.
///
/// Call it on the main thread of a process that does nothing else: it takes over signals and child processes.
///
/// # Errors
/// See [`LaunchError`]; every process that was started has ended by then.
pub fn condition(args: &ConditionArgs) -> Result<u8, LaunchError> {
    let filters = plan(&args.filters)?;
    plan::check_programs(&filters)?;
    let terms = plan::terms(&filters, Duration::from_millis(args.linger))?;
    children::become_user(&args.filter_user)?;
    children::let_preempt(args.preempt);
    children::raise_descriptor_limit();
    // Whoever offers `condition` offers `filter` too.
    let program = std::env::current_exe().map_err(|error| LaunchError::System("program", error))?;
    let bypasses_libc = args.command.first().is_some_and(|program| notify::bypasses_libc(program.as_ref()));
    let via = args.via.unwrap_or(if bypasses_libc { Via::Seccomp } else { Via::Preload });
    let is_static = via == Via::Seccomp;
    let preload = if is_static { PathBuf::new() } else { plan::preload_library(args.preload.as_deref())? };
    let Some(first) = args.listen.first().filter(|_| args.listen.len() <= MOST_LISTENERS) else {
        return Err(LaunchError::Listeners(args.listen.len()));
    };
    let is_repeated = |&(at, address): &(usize, &SocketAddr)| args.listen[..at].contains(address);
    if let Some((_, &address)) = args.listen.iter().enumerate().find(is_repeated) {
        return Err(LaunchError::ListensTwice(address));
    }
    let listeners = args.listen.iter().map(|&address| listen(address, args.backlog));
    let mut chain = Chain::start(&filters, &program, listeners.collect::<Result<_, _>>()?)?;
    let server_port = args.server_port.unwrap_or(first.port());
    let address = SocketAddr::new(first.ip(), server_port);
    let server_end = chain.take_server_end();
    let command = if is_static {
        let (command, questions) = children::start_static_command(&args.command)?;
        let watched = questions.try_clone().map_err(|error| LaunchError::System("seccomp", error))?;
        chain.questions = Some(watched);
        let link = server_end.ok_or(LaunchError::System("link", io::ErrorKind::NotFound.into()))?;
        let supervisor = notify::Supervisor::new(questions, link, &chain.ledger_file, address)
            .map_err(|error| LaunchError::System("seccomp", error))?;
        // It ends with the server; should it not, then with this process.
        std::thread::spawn(move || supervisor.run());
        command
    } else {
        let keeps = terms.as_ref();
        let started =
            children::start_command(args, keeps, &preload, address, &server_end, &chain.ledger_file)?;
        // Only the server's processes hold this end: its hang-up says that they have ended.
        drop(server_end);
        started
    };
    let limit = Duration::from_secs(args.start_timeout);
    let served = Served {
        child: command,
        port: server_port,
        via,
        limit,
        command: &args.command,
        addresses: &args.listen,
    };
    Supervision::new(chain, served).run()
}

/// Runs a chain for a server that was started by somebody else and holds the other end of the last link: what
/// cc_createlsock starts. What belongs to the chain is inherited, as by a filter that is first and last at once.
/// Returns when that server is gone.
///
/// # Errors
/// See [`LaunchError`].
pub fn serve(filters: &[FilterSpec]) -> Result<u8, LaunchError> {
    let missing = || LaunchError::System("place", io::ErrorKind::NotFound.into());
    let need = |name| link::inherited(name).ok_or_else(missing);
    let (listener, filter_end) = (need(environment::LISTEN)?, need(environment::DOWNSTREAM)?);
    let (control, ledger_file) = (need(environment::CONTROL)?, need(environment::LEDGER)?);
    // The server waits for this process, and learns from the descriptor what came of its child.
    // SAFETY: this process has one thread; the parent ends without running anything of ours.
    match unsafe { libc::fork() } {
        -1 => return Err(LaunchError::System("fork", io::Error::last_os_error())),
        0 => {}
        // SAFETY: ends the process, which nothing waits for but the server.
        _ => unsafe { libc::_exit(0) },
    }
    let say = |byte: u8| {
        let _ = rustix::net::send(&control, &[byte], rustix::net::SendFlags::NOSIGNAL);
    };
    let _ = rustix::process::setsid();
    let outcome = start_serving(filters, listener, filter_end, ledger_file);
    match outcome {
        Ok(chain) => {
            say(word::READY);
            supervision::until_hung_up(chain).map(|()| 0)
        }
        Err(error) => {
            say(error.exit_code());
            Err(error)
        }
    }
}

fn start_serving(
    filters: &[FilterSpec],
    listener: OwnedFd,
    filter_end: OwnedFd,
    ledger_file: OwnedFd,
) -> Result<Chain, LaunchError> {
    let filters = plan(filters)?;
    children::become_user("nobody")?;
    let program = std::env::current_exe().map_err(|error| LaunchError::System("program", error))?;
    let ledger = Ledger::open(ledger_file.as_fd()).map_err(|error| LaunchError::System("ledger", error))?;
    Chain::start_with(&filters, &program, vec![listener], filter_end, None, (ledger, ledger_file))
}

/// A listening socket whose connections are reported once data has arrived.
///
/// # Errors
/// The address is in use, or not ours, or a privileged port.
pub fn listen(address: SocketAddr, backlog: i32) -> Result<OwnedFd, LaunchError> {
    let failed = |error: rustix::io::Errno| LaunchError::Listen { address, reason: error.into() };
    let family =
        if address.is_ipv4() { rustix::net::AddressFamily::INET } else { rustix::net::AddressFamily::INET6 };
    let socket = rustix::net::socket_with(
        family,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true).map_err(failed)?;
    if address.ip() == std::net::IpAddr::from(std::net::Ipv6Addr::UNSPECIFIED) {
        rustix::net::sockopt::set_ipv6_v6only(&socket, false).map_err(failed)?;
    }
    rustix::net::bind(&socket, &address).map_err(failed)?;
    rustix::net::listen(&socket, backlog).map_err(failed)?;
    let flags = rustix::fs::fcntl_getfl(&socket).map_err(failed)? | rustix::fs::OFlags::NONBLOCK;
    rustix::fs::fcntl_setfl(&socket, flags).map_err(failed)?;
    Ok(socket)
}
