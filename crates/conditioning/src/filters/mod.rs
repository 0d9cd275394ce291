//! The filters, each a program of its own: `tidegate-cc filter NAME`.

pub mod auth;
pub mod normalize;
pub mod pass;
pub mod police;
pub mod prior;
pub mod slowread;
pub mod stats;

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use tidegate_core::metrics::Sample;

use crate::arguments::{Argument, ArgumentError, Arguments};
use crate::host::{self, Filter};
use crate::keeper::{Keeper, PACKAGE_ARGUMENTS, PERSIST_ARGUMENTS, Settings};
use crate::neighbours::{FilterError, Place, environment, raise_descriptor_limit, say, word};

/// One filter: a row of the table that names, help texts, checks and starts come from.
pub struct Kind {
    /// The name in `--filter`, in `ps` and in counters.
    pub name: &'static str,
    /// What it does, in one line.
    pub help: &'static str,
    /// The arguments that it takes.
    pub arguments: &'static [Argument],
    start: Start,
    check: fn(&Arguments) -> Result<(), FilterError>,
}

/// How a filter is started.
enum Start {
    /// It is a program of its own.
    Alone(fn(&Arguments) -> Result<(), FilterError>),
    /// The framework runs it, and several in a row if need be.
    Passing(fn(&Arguments) -> Result<Box<dyn Filter>, FilterError>),
    /// As before, and it holds requests until it is asked for one: the last of a row.
    Holding(fn(&Arguments) -> Result<Box<dyn Filter>, FilterError>),
}

/// What filters are to the framework.
fn boxed(filter: impl Filter + 'static) -> Box<dyn Filter> {
    Box::new(filter)
}

/// Every filter that there is.
pub const KINDS: &[Kind] = &[
    Kind {
        name: "package",
        help: "owns the listening socket; hands on whole requests only; ends connections that stay incomplete",
        arguments: PACKAGE_ARGUMENTS,
        start: Start::Alone(|arguments| {
            Keeper::new(Place::inherit()?, Settings::read(arguments, true)?)?.run()
        }),
        check: |arguments| Settings::read(arguments, true).map(drop),
    },
    Kind {
        name: "persist",
        help: "presents each request of a persistent connection as a connection of its own",
        arguments: PERSIST_ARGUMENTS,
        start: Start::Alone(|arguments| {
            Keeper::new(Place::inherit()?, Settings::read(arguments, false)?)?.run()
        }),
        check: |arguments| Settings::read(arguments, false).map(drop),
    },
    Kind {
        name: "prior",
        help: "serves the least recently served address range next",
        arguments: prior::ARGUMENTS,
        start: Start::Holding(|arguments| prior::check(arguments).map(boxed)),
        check: |arguments| prior::check(arguments).map(drop),
    },
    Kind {
        name: "slowread",
        help: "holds address ranges to their share of the connections in service",
        arguments: slowread::ARGUMENTS,
        start: Start::Holding(|arguments| slowread::check(arguments).map(boxed)),
        check: |arguments| slowread::check(arguments).map(drop),
    },
    Kind {
        name: "normalize",
        help: "refuses what is malformed or ambiguous, and CONNECT; brings URLs into one form",
        arguments: normalize::ARGUMENTS,
        start: Start::Passing(|arguments| normalize::check(arguments).map(boxed)),
        check: |arguments| normalize::check(arguments).map(drop),
    },
    Kind {
        name: "police",
        help: "holds URLs, cookies and address ranges to their rates, and serves by priority",
        arguments: police::ARGUMENTS,
        start: Start::Holding(|arguments| police::check(arguments).map(boxed)),
        check: |arguments| police::check(arguments).map(drop),
    },
    Kind {
        name: "auth",
        help: "lets only clients pass that prove who they are",
        arguments: auth::ARGUMENTS,
        start: Start::Passing(|arguments| auth::load(arguments).map(boxed)),
        check: |arguments| auth::load(arguments).map(drop),
    },
    Kind {
        name: "stats",
        help: "counts and times requests, for Prometheus",
        arguments: stats::ARGUMENTS,
        start: Start::Passing(|arguments| stats::listen(arguments).map(boxed)),
        check: stats::check,
    },
    Kind {
        name: "pass",
        help: "hands on everything unchanged",
        arguments: pass::ARGUMENTS,
        start: Start::Passing(|arguments| pass::check(arguments).map(boxed)),
        check: |arguments| pass::check(arguments).map(drop),
    },
];

/// The filter of that name.
pub fn find(name: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.name == name)
}

impl Kind {
    /// Checks arguments without running anything.
    ///
    /// # Errors
    /// An argument is unknown or its value not of its kind.
    pub fn check(&self, text: &str) -> Result<(), FilterError> {
        (self.check)(&self.read(text)?)
    }

    /// Whether another filter may be in the same process, before it and after it.
    pub fn may_share(&self) -> (bool, bool) {
        match self.start {
            Start::Alone(_) => (false, false),
            Start::Passing(_) => (true, true),
            Start::Holding(_) => (true, false),
        }
    }

    fn read(&self, text: &str) -> Result<Arguments, ArgumentError> {
        Arguments::parse(text, self.arguments)
    }

    /// The text of `--help`.
    pub fn help_text(&self) -> String {
        let mut text = format!("{}: {}\n\nArguments, as in `--filter {}", self.name, self.help, self.name);
        if let Some(first) = self.arguments.first() {
            text.push_str(&format!("={}={}", first.key, first.default));
        }
        text.push_str("`:\n");
        for argument in self.arguments {
            text.push_str(&format!(
                "  {:<12} {} (default {:?})\n",
                argument.key, argument.help, argument.default
            ));
        }
        text
    }
}

/// The arguments of a filter's process.
#[derive(clap::Args, Clone, Debug)]
pub struct FilterArgs {
    /// The filter's name; without it, all filters are listed.
    #[arg(allow_hyphen_values = true)]
    name: Option<String>,
    /// `key=value,key=value`, or --help.
    #[arg(default_value = "", allow_hyphen_values = true)]
    arguments: String,
    /// Names and arguments of those that share its process.
    #[arg(hide = true)]
    more: Vec<String>,
}

/// Runs a filter to its end and returns the exit code. The process is the filter's own from here on.
pub fn run(args: &FilterArgs) -> u8 {
    let is_help = |text: &str| matches!(text, "--help" | "-h");
    let Some(name) = args.name.as_ref().filter(|name| !is_help(name)) else {
        for kind in KINDS {
            println!("{:<10} {}", kind.name, kind.help);
        }
        return 0;
    };
    let mut row = vec![(name.as_str(), args.arguments.as_str())];
    row.extend(args.more.chunks(2).map(|more| (more[0].as_str(), more.get(1).map_or("", String::as_str))));
    let mut kinds = Vec::new();
    for (name, text) in row {
        let Some(kind) = find(name) else {
            eprintln!("error: unknown filter {name:?}; known are {}", names());
            return 2;
        };
        if is_help(text) {
            print!("{}", kind.help_text());
            return 0;
        }
        kinds.push((kind, text));
    }
    let name = kinds.iter().map(|(kind, _)| kind.name).collect::<Vec<_>>().join("+");
    // What `ps` and `top` show; the launcher has set the first argument likewise.
    if let Ok(title) = std::ffi::CString::new(format!("cc-{name}")) {
        let _ = rustix::thread::set_name(&title);
    }
    raise_descriptor_limit();
    // A filter never needs more than it was started with.
    let _ = rustix::thread::set_no_new_privs(true);
    let launcher = launcher();
    match start(&kinds) {
        Ok(()) => 0,
        Err(error) => {
            if !launcher.is_some_and(|launcher| tell(&launcher, &error)) {
                say(&format!("{name}: {error}"));
            }
            if matches!(error, FilterError::Arguments(_) | FilterError::NotInAChain(_)) { 2 } else { 1 }
        }
    }
}

/// The launcher, if there is one: what has begun to run takes its descriptors over.
fn launcher() -> Option<OwnedFd> {
    let number: RawFd = std::env::var(environment::CONTROL).ok()?.parse().ok()?;
    // SAFETY: borrowed for one fcntl, which fails on a number that is no open descriptor.
    let borrowed = if number > 2 { unsafe { BorrowedFd::borrow_raw(number) } } else { return None };
    rustix::io::fcntl_dupfd_cloexec(borrowed, 3).ok()
}

/// Has the launcher say why this filter cannot run; false if it is not heard.
fn tell(launcher: &OwnedFd, error: &FilterError) -> bool {
    let mut message = [&[word::FAILED], error.to_string().as_bytes()].concat();
    message.truncate(word::REASON_BYTES);
    let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
    rustix::net::send(launcher, &message, flags).is_ok()
}

fn start(kinds: &[(&Kind, &str)]) -> Result<(), FilterError> {
    let mut row = Vec::new();
    let mut window_bytes = 0;
    for (kind, text) in kinds {
        let arguments = kind.read(text)?;
        match kind.start {
            Start::Alone(run) => return run(&arguments),
            Start::Passing(load) | Start::Holding(load) => row.push(load(&arguments)?),
        }
        // That of the last one, which hands on.
        window_bytes = arguments.number("window")?;
    }
    host::run(row, window_bytes)
}

/// A file that an argument names.
fn read_file(key: &'static str, file: &str) -> Result<String, ArgumentError> {
    if file.is_empty() {
        return Err(ArgumentError::Value { key, value: String::new(), expected: "the name of a file" });
    }
    std::fs::read_to_string(file)
        .map_err(|error| ArgumentError::File { file: file.to_owned(), reason: error.to_string() })
}

/// The names of all filters, for messages.
pub fn names() -> String {
    KINDS.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", ")
}

/// Writes a filter's counters to standard error, one line.
pub fn print_counters(name: &str, samples: &[Sample]) {
    let values: Vec<_> = samples.iter().map(|sample| format!("{}={}", sample.name, sample.value)).collect();
    say(&format!("{name}: {}", values.join(" ")));
}

#[cfg(test)]
pub(crate) mod testing {
    use crate::wire::{Bundle, Id};

    /// A request as it comes to a filter; without a head, the shortest one.
    pub(crate) fn request(slot: u32, peer: &str, head: &str) -> Bundle {
        let head = if head.is_empty() { "GET / HTTP/1.0\r\n\r\n" } else { head };
        Bundle {
            id: Id { slot, generation: 1 },
            flags: 0,
            peer: std::net::SocketAddr::new(peer.parse().unwrap(), 1000),
            socket_bytes: head.len() as u64,
            arrived_ns: 0,
            replaces: 0,
            head_bytes: head.len() as u32,
            request: head.into(),
        }
    }

    #[test]
    fn every_default_is_accepted_by_its_filter() {
        for kind in super::KINDS.iter().filter(|kind| kind.name != "auth") {
            kind.check("").unwrap_or_else(|error| panic!("{}: {error}", kind.name));
            assert!(kind.help_text().contains(kind.help));
        }
    }

    #[test]
    fn who_holds_requests_is_the_last_of_its_process() {
        for name in ["prior", "slowread", "normalize", "police", "pass"] {
            let kind = super::find(name).unwrap();
            let arguments = kind.read("").unwrap();
            match kind.start {
                super::Start::Passing(load) => assert!(!load(&arguments).unwrap().holds(), "{name}"),
                super::Start::Holding(load) => assert!(load(&arguments).unwrap().holds(), "{name}"),
                super::Start::Alone(_) => panic!("{name} is a program of its own"),
            }
        }
    }
}
