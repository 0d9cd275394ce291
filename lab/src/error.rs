//! Why a scenario could not be run. That its claim does not hold is a result, not an error.

use std::io;
use std::path::PathBuf;

/// What went wrong, as a sentence for the person who ran the lab.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The command line names what does not exist.
    #[error("{0}")]
    Usage(String),
    /// The binary to measure is not there.
    #[error("{} is not there; build it with: cargo build --release -p tidegate, or name it with --tidegate", .0.display())]
    NoTidegate(PathBuf),
    /// Server and load need a core each.
    #[error("cannot run on core {core}: {source}; a server needs core 0 and its load core 1")]
    Core {
        /// The core that is missing.
        core: usize,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A server did not start, answered wrongly or ended.
    #[error("{0}")]
    Server(String),
    /// A load process did not start or ended early.
    #[error("the load process failed: {0}")]
    Load(#[source] io::Error),
    /// An emulated link could not be made.
    #[error("{0}")]
    Link(String),
    /// Some connections did not come through.
    #[error("{failed} of {of} connections failed: refused, closed, answered wrongly or not in time")]
    Connections {
        /// How many failed.
        failed: u64,
        /// How many there should have been.
        of: u32,
    },
    /// A file could not be written or read.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was tried: "write" or "read".
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A record of results was written by another version, or damaged.
    #[error("{} is no record of results: {source}; run the scenario again", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A plot could not be drawn.
    #[error("cannot draw {name}: {message}")]
    Plot {
        /// The plot's title.
        name: String,
        /// The drawing library's message.
        message: String,
    },
    /// A measurement gave nothing to compare.
    #[error("{0} measured nothing")]
    Nothing(&'static str),
}

impl Error {
    /// 2 for bad usage, 1 for everything else.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, Self::Usage(_)) { 2 } else { 1 }
    }

    /// For `map_err`, with what was tried on which file.
    pub(crate) fn file(action: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { action, path, source }
    }
}
