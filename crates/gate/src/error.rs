//! What can go wrong, whose fault it is, and the remedy.

use std::io;

use tidegate_policy::{ListFileError, TableError};

/// Why the gate could not do what was asked. Whatever was in force before stays in force.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GateError {
    /// There is no such network interface in this network namespace.
    #[error("there is no network interface `{name}` here: `ip link` lists them")]
    NoInterface {
        /// The name asked for.
        name: String,
    },
    /// What passes the interface are no Ethernet frames, and the programs understand nothing else.
    #[error(
        "interface `{name}` carries no Ethernet frames (a tunnel), so nothing would be enforced there: attach where the \
         frames come in; `tidegate run` without gate.interfaces enforces the rules in user space"
    )]
    NotEthernet {
        /// The interface.
        name: String,
    },
    /// Loading programs is not allowed.
    #[error(
        "loading kernel programs needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON: grant them, or run as root"
    )]
    NotPermitted,
    /// Looking for what other processes hold is not allowed.
    #[error("finding the gates of other processes needs CAP_SYS_ADMIN: run as root")]
    MayNotFind,
    /// Some other program is at the interface's first hook.
    #[error("interface `{name}` already runs an XDP program: {}", detach_first(name, *by_tidegate))]
    InUse {
        /// The interface.
        name: String,
        /// Whether it is the program of another gate.
        by_tidegate: bool,
    },
    /// Neither the driver nor the kernel takes the program there.
    #[error(
        "interface `{name}` takes no XDP program: {source}: attach to another that the packets pass, such as the bridge or the bond it is part of, or have `tidegate run` enforce the rules in user space"
    )]
    NotTaken {
        /// The interface.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The connection rules do not compile.
    #[error(transparent)]
    Rules(#[from] TableError),
    /// Too many request rules.
    #[error("{count} request rules; at most {max} fit: join paths by prefixes")]
    TooManyRequests {
        /// How many there are.
        count: usize,
        /// How many fit.
        max: usize,
    },
    /// The kernel refused a program or an operation on a map.
    #[error("{doing}: {source}{detail}")]
    Kernel {
        /// What was being done.
        doing: &'static str,
        /// What the kernel said.
        source: libbpf_rs::Error,
        /// What the loader said besides, if anything.
        detail: String,
    },
    /// A system call failed.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The programs attached are of another version.
    #[error("the gate that runs on this host is of another version: stop it and attach again ({missing})")]
    OtherVersion {
        /// What this version expects and the other lacks.
        missing: &'static str,
    },
    /// This host cannot do it.
    #[error("{what} is not available: {why}")]
    Unavailable {
        /// What was asked for.
        what: &'static str,
        /// Why it cannot be had.
        why: String,
    },
    /// Nothing is attached.
    #[error("no gate is attached{}: `tidegate gate attach` attaches one", interface.as_ref().map(|name| format!(" to `{name}`")).unwrap_or_default())]
    NotAttached {
        /// The interface asked for; `None`: any.
        interface: Option<String>,
    },
    /// A bounded map is full.
    #[error("the {what} holds at most {max} entries, which is too few: {remedy}")]
    Full {
        /// Which map.
        what: &'static str,
        /// Its bound.
        max: u32,
        /// What to do.
        remedy: &'static str,
    },
    /// A block list file has an error; nothing of it was taken.
    #[error(transparent)]
    List(#[from] ListFileError),
    /// More classes than a listen queue can have.
    #[error("{classes} classes; a listen queue has from 1 to {max}")]
    Classes {
        /// How many were asked for.
        classes: usize,
        /// How many are possible.
        max: usize,
    },
}

fn detach_first(interface: &str, by_tidegate: bool) -> String {
    if by_tidegate {
        return format!("another tidegate's, which `tidegate gate detach {interface}` ends");
    }
    format!("end what has attached it, or try `ip link set dev {interface} xdp off`, first")
}

impl GateError {
    /// For `map_err` on calls into libbpf.
    pub(crate) fn kernel(doing: &'static str) -> impl FnOnce(libbpf_rs::Error) -> Self {
        move |source| Self::Kernel { doing, source, detail: String::new() }
    }

    /// For `map_err` on system calls.
    pub(crate) fn io<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { doing, source: source.into() }
    }
}
