use std::path::{Path, PathBuf};

/// The smallest arena that is worth its bookkeeping.
pub const MIN_BUDGET_BYTES: u64 = 1 << 20;

/// The largest arena that 32-bit granule numbers can address.
pub const MAX_BUDGET_BYTES: u64 = 1 << 39;

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct Config {
    /// Size of the arena in bytes, rounded down to whole pages. Bookkeeping outside the arena adds at most
    /// 8 % to it.
    pub budget_bytes: u64,
    /// Directory of the arena's file; it is created when absent. `None`: anonymous memory, lost at exit.
    pub path: Option<PathBuf>,
    /// An object (key, meta, head and body) beyond this many bytes is refused.
    pub max_object_bytes: u64,
}

impl Config {
    /// An anonymous arena of `budget_bytes`; an object may fill an eighth of it.
    pub fn new(budget_bytes: u64) -> Self {
        Self { budget_bytes, path: None, max_object_bytes: budget_bytes / 8 }
    }

    /// The same, kept in a file in the directory `path` so that it survives restarts.
    pub fn with_path(mut self, path: impl AsRef<Path>) -> Self {
        self.path = Some(path.as_ref().to_owned());
        self
    }
}

/// What opening a store found.
#[derive(Clone, Debug, Default)]
pub struct OpenReport {
    /// Objects recovered from the file.
    pub objects: u64,
    /// Arena bytes that the recovered objects occupy.
    pub bytes: u64,
    /// Records that were dropped because a checksum, a length or an extent of theirs is wrong.
    pub torn_dropped: u64,
    /// Records that were dropped because a newer record has the same key.
    pub superseded: u64,
    /// Whether the arena's pages stay in memory. If not (RLIMIT_MEMLOCK is too low), the kernel may drop clean ones
    /// when memory is short, and a hit then waits for the disk.
    pub locked_in_memory: bool,
    /// The file that was found unusable as a whole and put out of the way; the store then starts empty.
    pub set_aside: Option<SetAside>,
}

/// A file that was renamed because it cannot be used.
#[derive(Clone, Debug)]
pub struct SetAside {
    /// Its new name.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: Unusable,
}

/// Why a file as a whole is not an arena that this program can use.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Unusable {
    /// Not a regular file, or it does not start with the arena's magic number.
    #[error("not an arena file")]
    Magic,
    /// Written by another version of the format.
    #[error("format version {found}, this program uses {expected}")]
    Version {
        /// The version in the file.
        found: u32,
        /// The version that this program reads and writes.
        expected: u32,
    },
    /// The file's size differs from the configured budget or from its own superblock.
    #[error("file of {found} bytes, expected {expected}")]
    Size {
        /// Size in bytes that the file has.
        found: u64,
        /// Size in bytes that the configuration asks for.
        expected: u64,
    },
    /// The superblock's checksum is wrong.
    #[error("damaged superblock")]
    Superblock,
    /// Its records are such that checking them would take longer than reading the file several times.
    #[error("too many overlapping records")]
    Overlapping,
}

/// Why a store could not be opened or synchronized.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The configured budget is outside what the arena supports.
    #[error("cache budget of {budget_bytes} bytes is outside {MIN_BUDGET_BYTES}..={MAX_BUDGET_BYTES}")]
    Budget {
        /// The configured size in bytes.
        budget_bytes: u64,
    },
    /// Another process has this store open.
    #[error("{}: in use by another process", path.display())]
    InUse {
        /// The lock file.
        path: PathBuf,
    },
    /// The arena's whole size is reserved when it is opened, so that a full disk shows here and not later.
    #[error("{}: no space for {needed_bytes} bytes", path.display())]
    DiskFull {
        /// The file that was to be created.
        path: PathBuf,
        /// Its size in bytes.
        needed_bytes: u64,
    },
    /// What another process hands over is not what it should be.
    #[error("{}: cannot be taken over: {reason}", path.display())]
    NotTaken {
        /// The arena's file.
        path: PathBuf,
        /// What is wrong.
        reason: Unusable,
    },
    /// The process before still reads from the arena, so that it cannot be handed on.
    #[error("the process before still reads from the cache")]
    StillRead,
    /// Another file lies there, or none.
    #[error("{}: the cache's file was removed or replaced: what it has ends with the process", path.display())]
    Removed {
        /// Where the arena's file was.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// Why an object was not stored. Each of them is survivable: the response is delivered uncached.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InsertError {
    /// The object exceeds [`Config::max_object_bytes`], or its key, meta or head exceeds its own bound.
    #[error("object exceeds {limit_bytes} bytes")]
    TooLarge {
        /// The bound in bytes that was exceeded.
        limit_bytes: u64,
    },
    /// Eviction could not make room: too much is pinned by readers or being written.
    #[error("no room in the arena")]
    NoSpace,
    /// The object to be replaced is no longer the one stored under its key.
    #[error("object was replaced or removed meanwhile")]
    Superseded,
    /// Another process takes the arena over, or is about to let go of it: nothing is stored meanwhile.
    #[error("the cache changes hands")]
    Frozen,
}
