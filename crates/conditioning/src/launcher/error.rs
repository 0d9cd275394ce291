//! What can be wrong with a chain, and the exit code that says so.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::keeper::MOST_LISTENERS;
use crate::launcher::supervision::shown;
use crate::launcher::{PATIENCE, Via};

/// Why a chain could not be started, or could not go on. One line each.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// No filter has that name.
    #[error("unknown filter {name:?}; known are {known}{}", file_hint(name))]
    UnknownFilter {
        /// The name as given.
        name: String,
        /// What there is.
        known: String,
    },
    /// A filter's arguments were refused.
    #[error("filter {name}: {reason}")]
    FilterArguments {
        /// The filter.
        name: String,
        /// Why.
        reason: String,
    },
    /// A filter wants to see each request, and `--linger` lets the server read some itself.
    #[error(
        "--linger is for chains of package, persist, normalize and prior: {0} would not see every request; leave out one of the two"
    )]
    UnseenRequests(String),
    /// There is no such user.
    #[error("there is no user {0:?}; name one with --filter-user")]
    UnknownUser(String),
    /// The listening socket could not be made.
    #[error("cannot listen on {address}: {reason}{}", address_hint(reason.kind()))]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// Why, such as "address in use".
        reason: io::Error,
    },
    /// An address to listen on is given more than once.
    #[error("--listen {0} is given twice; once is enough")]
    ListensTwice(SocketAddr),
    /// A filter's program is none.
    #[error("filter {program}: {reason}")]
    NoProgram {
        /// Its path as given.
        program: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// Too many listening addresses, or none.
    #[error("{0} addresses to listen on; a chain has 1 to {MOST_LISTENERS}")]
    Listeners(usize),
    /// A file that belongs to the installation is missing.
    #[error("cannot find {0}; name it with {1}")]
    Missing(&'static str, &'static str),
    /// A file that was named in place of the installation's is none.
    #[error("{given}: there is no file {path:?}; without it, {file} is looked for where it is installed")]
    NoFile {
        /// What names it.
        given: &'static str,
        /// The path as given.
        path: PathBuf,
        /// What it was to take the place of.
        file: &'static str,
    },
    /// A program could not be started.
    #[error("cannot start {}: {reason}", shown(program))]
    Start {
        /// The program.
        program: String,
        /// Why.
        reason: io::Error,
    },
    /// A filter ended before it was ready.
    #[error("filter {name} exited at start ({status})")]
    FilterExited {
        /// The filter.
        name: String,
        /// What it said of the reason, or its exit status.
        status: String,
    },
    /// A filter did not become ready in time.
    #[error("filter {name} was not ready after {} s", PATIENCE.as_secs())]
    FilterSilent {
        /// The filter.
        name: String,
    },
    /// The command does not serve.
    #[error(
        "{command} did not listen on port {port} within {seconds} s; it may take longer (--start-timeout), {}or use another port (--server-port)",
        other_way(*via)
    )]
    NeverListened {
        /// The command.
        command: String,
        /// The port it was expected to listen on.
        port: u16,
        /// How long it was waited for.
        seconds: u64,
        /// How it is reached.
        via: Via,
    },
    /// The command listens, and a client waits in vain.
    #[error(
        "{command} listens on port {port}, but did not accept its first client within {seconds} s; it may take longer (--start-timeout), {}accept by io_uring, which is not followed, or not accept at all with the options that it was given",
        other_way(*via)
    )]
    NeverAccepted {
        /// The command.
        command: String,
        /// The port it listens on.
        port: u16,
        /// How long the client was left waiting.
        seconds: u64,
        /// How it is reached.
        via: Via,
    },
    /// The command ended before it served.
    #[error("{command} ended (exit code {code}) before it listened on port {port}")]
    CommandEnded {
        /// The command.
        command: String,
        /// Its exit code.
        code: u8,
        /// The port it was expected to listen on.
        port: u16,
    },
    /// The command serves, but not where it was expected to.
    #[error("{command} listens on port {other}, not {port}; say --server-port {other} to condition that")]
    ListensElsewhere {
        /// The command.
        command: String,
        /// The port it was expected to listen on.
        port: u16,
        /// The port that it listens on.
        other: u16,
    },
    /// A system call of the launcher's own failed.
    #[error("{0}: {1}")]
    System(&'static str, #[source] io::Error),
}

impl LaunchError {
    /// The exit code: 2 for bad usage, 1 for failures at run time.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::CommandEnded { code, .. } if *code != 0 => *code,
            Self::UnknownFilter { .. }
            | Self::FilterArguments { .. }
            | Self::UnknownUser(_)
            | Self::UnseenRequests(_)
            | Self::ListensTwice(_)
            | Self::NoProgram { .. }
            | Self::Listeners(_) => 2,
            _ => 1,
        }
    }
}

/// What may be the reason if a command is reached by a library, and could be reached otherwise.
fn other_way(via: Via) -> &'static str {
    match via {
        Via::Preload => "make its system calls itself, as statically linked programs do (--via seccomp), ",
        Via::Seccomp => "",
    }
}

/// What is meant where a program's name is given as a filter's.
fn file_hint(name: &str) -> String {
    if std::path::Path::new(name).is_file() {
        format!("; a program is named by its path: ./{name}")
    } else {
        String::new()
    }
}

/// What can be done where an address is not to be had.
fn address_hint(why: io::ErrorKind) -> &'static str {
    match why {
        io::ErrorKind::AddrInUse => {
            "; `ss -ltnp` shows which program has it, perhaps the server itself, started without a chain: end that, or choose another address"
        }
        io::ErrorKind::PermissionDenied => "; ports below 1024 need root or CAP_NET_BIND_SERVICE",
        io::ErrorKind::AddrNotAvailable => "; it is no address of this host: `ip address` shows them",
        _ => "",
    }
}
