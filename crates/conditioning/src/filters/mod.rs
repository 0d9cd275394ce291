//! The filters, each a program of its own: `tidegate-cc filter NAME`.

use std::process::ExitCode;

use tidegate_core::metrics::Sample;

use crate::arguments::{Argument, ArgumentError, Arguments};
use crate::keeper::{Keeper, PACKAGE_ARGUMENTS, PERSIST_ARGUMENTS, Settings};
use crate::neighbours::{FilterError, Place};

/// One filter: a row of the table that names, help texts, checks and starts come from.
pub struct Kind {
    /// The name in `--filter`, in `ps` and in counters.
    pub name: &'static str,
    /// What it does, in one line.
    pub help: &'static str,
    /// The arguments that it takes.
    pub arguments: &'static [Argument],
    run: fn(&Arguments) -> Result<(), FilterError>,
    check: fn(&Arguments) -> Result<(), FilterError>,
}

/// Every filter that there is.
pub const KINDS: &[Kind] = &[
    Kind {
        name: "package",
        help: "owns the listening socket; hands on whole requests only; ends connections that stay incomplete",
        arguments: PACKAGE_ARGUMENTS,
        run: |arguments| Keeper::new(Place::inherit()?, Settings::read(arguments, true)?)?.run(),
        check: |arguments| Settings::read(arguments, true).map(drop),
    },
    Kind {
        name: "persist",
        help: "presents each request of a persistent connection as a connection of its own",
        arguments: PERSIST_ARGUMENTS,
        run: |arguments| Keeper::new(Place::inherit()?, Settings::read(arguments, false)?)?.run(),
        check: |arguments| Settings::read(arguments, false).map(drop),
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
            text.push_str(&format!("  {:<12} {} (default {:?})\n", argument.key, argument.help, argument.default));
        }
        text
    }
}

/// Runs a filter to its end. The process is the filter's own from here on.
pub fn run(name: &str, arguments: &str) -> ExitCode {
    let Some(kind) = find(name) else {
        eprintln!("tidegate-cc: unknown filter {name:?}; known are {}", names());
        return ExitCode::from(2);
    };
    if matches!(arguments, "--help" | "-h") {
        print!("{}", kind.help_text());
        return ExitCode::SUCCESS;
    }
    // What `ps` and `top` show; the launcher has set the first argument likewise.
    if let Ok(title) = std::ffi::CString::new(format!("cc-{name}")) {
        let _ = rustix::thread::set_name(&title);
    }
    // A filter never needs more than it was started with.
    let _ = rustix::thread::set_no_new_privs(true);
    match kind.read(arguments).map_err(FilterError::from).and_then(|arguments| (kind.run)(&arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            let usage = matches!(error, FilterError::Arguments(_) | FilterError::NotInAChain(_));
            ExitCode::from(if usage { 2 } else { 1 })
        }
    }
}

/// The names of all filters, for messages.
pub fn names() -> String {
    KINDS.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", ")
}

/// Writes a filter's counters to standard error, one line.
pub fn print_counters(name: &str, samples: &[Sample]) {
    let values: Vec<_> = samples.iter().map(|sample| format!("{}={}", sample.name, sample.value)).collect();
    eprintln!("{name}: {}", values.join(" "));
}
