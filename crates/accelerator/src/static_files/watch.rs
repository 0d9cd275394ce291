//! Notices changes below a directory by inotify(7), on a thread of its own.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{Access, AtFlags, CWD};
use rustix::io::Errno;

/// How often the root itself is looked at, which may be a link that points elsewhere now.
const ROOT_INTERVAL: Duration = Duration::from_millis(500);
/// Directories watched at once; a tree with more cannot be watched.
pub(super) const WATCHES: usize = 16_384;
/// How often anything may have changed in a tree that is no longer watched.
const UNWATCHED_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Watches a tree until it is dropped.
pub(crate) struct Watcher {
    stop: Arc<OwnedFd>,
}

impl Watcher {
    /// Calls `on_change` with the path below `root` of everything that changes; with an empty path when anything may
    /// have changed, even which directory `root` is. If a directory that comes later cannot be watched, anything may
    /// have changed each second. What lies below a directory that may not be listed is not told of: those files are
    /// linked ones ([`StaticRoot::lookup`](super::StaticRoot::lookup)).
    ///
    /// # Errors
    /// inotify is not available, or the tree has more directories than may be watched.
    pub(crate) fn spawn(root: &Path, on_change: impl Fn(&Path) + Send + 'static) -> io::Result<Self> {
        Self::with_limit(root, WATCHES, on_change)
    }

    /// With at most so many directories.
    pub(super) fn with_limit(
        root: &Path,
        limit: usize,
        on_change: impl Fn(&Path) + Send + 'static,
    ) -> io::Result<Self> {
        let tree = Tree::new(root, limit)?;
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let stopped = Arc::clone(&stop);
        std::thread::Builder::new().name("watch".into()).spawn(move || tree.run(&stopped, on_change))?;
        Ok(Self { stop })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // An event counter that is full is readable as well.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }
}

struct Tree {
    inotify: OwnedFd,
    root: PathBuf,
    /// Device and inode of the root.
    identity: (u64, u64),
    /// Watched directories below the root, by watch descriptor.
    directories: HashMap<i32, PathBuf>,
    /// How many those may be.
    limit: usize,
}

impl Tree {
    fn new(root: &Path, limit: usize) -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|error| unwatched(root, error))?;
        let identity = identity(root)?;
        let mut tree =
            Self { inotify, root: root.to_path_buf(), identity, directories: HashMap::new(), limit };
        tree.add(Path::new(""))?;
        Ok(tree)
    }

    /// Whether the root's name now means another directory.
    fn has_moved(&self) -> bool {
        identity(&self.root).is_ok_and(|identity| identity != self.identity)
    }

    /// Watches a directory and all below it. A watch is set before the directory is read, so that nothing that appears
    /// meanwhile is missed.
    fn add(&mut self, relative: &Path) -> io::Result<()> {
        let mut pending = vec![relative.to_path_buf()];
        while let Some(relative) = pending.pop() {
            let path = self.root.join(&relative);
            if self.directories.len() >= self.limit {
                let reason = format!("{}: more than {} directories", path.display(), self.limit);
                return Err(io::Error::other(reason));
            }
            let interests = WatchFlags::MODIFY
                | WatchFlags::CLOSE_WRITE
                | WatchFlags::ATTRIB
                | WatchFlags::CREATE
                | WatchFlags::DELETE
                | WatchFlags::MOVED_FROM
                | WatchFlags::MOVED_TO
                | WatchFlags::MOVE_SELF
                | WatchFlags::ONLYDIR;
            // What lies behind a link is not watched, unless that is the root.
            let is_root = relative.as_os_str().is_empty();
            let interests = if is_root { interests } else { interests | WatchFlags::DONT_FOLLOW };
            match inotify::add_watch(&self.inotify, &path, interests) {
                Ok(watch) => self.directories.insert(watch, relative.clone()),
                Err(error) if !is_root && is_gone(error) => continue,
                // The event of a mode that changes leads here again.
                Err(Errno::ACCESS) if !is_root && !may(&path, Access::READ_OK) => {
                    // Below what may not be entered either, no file is served.
                    if may(&path, Access::EXEC_OK) {
                        tracing::warn!(
                            path = %path.display(),
                            "the directory may not be read and thus not be watched: files below it are looked at each \
                             second; make it readable, as by chmod o+r"
                        );
                    }
                    continue;
                }
                Err(error) => return Err(unwatched(&path, error)),
            };
            match subdirectories(&path) {
                Ok(names) => pending.extend(names.into_iter().map(|name| relative.join(name))),
                Err(error) if !is_root && Errno::from_io_error(&error).is_some_and(is_gone) => {}
                Err(error) => return Err(io::Error::other(format!("{}: {error}", path.display()))),
            }
        }
        Ok(())
    }

    /// Tells of changes until it is stopped. What cannot be watched must not stay in a cache: from then on anything may
    /// have changed each second.
    fn run(mut self, stop: &OwnedFd, on_change: impl Fn(&Path)) {
        let Err(error) = self.tell(stop, &on_change) else { return };
        tracing::warn!(
            %error, root = %self.root.display(),
            "a directory is not watched: all files of its root leave the cache each second, until a reload"
        );
        let root = self.root.clone();
        // Its watches are of use to others.
        drop(self);
        loop {
            on_change(Path::new(""));
            let mut wanted = [PollFd::new(stop, PollFlags::IN)];
            match rustix::event::poll(&mut wanted, Some(&UNWATCHED_INTERVAL)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return,
                Err(error) => {
                    tracing::error!(%error, root = %root.display(), "waiting failed");
                    std::thread::sleep(Duration::from_secs(1));
                }
            }
        }
    }

    /// Returns when it is stopped.
    ///
    /// # Errors
    /// Something below the root is not watched.
    fn tell(&mut self, stop: &OwnedFd, on_change: impl Fn(&Path)) -> io::Result<()> {
        let everything = Path::new("");
        let mut looked = Instant::now();
        let timeout = Timespec { tv_sec: 0, tv_nsec: ROOT_INTERVAL.subsec_nanos().into() };
        loop {
            if looked.elapsed() >= ROOT_INTERVAL {
                looked = Instant::now();
                if self.has_moved() {
                    match Self::new(&self.root, self.limit) {
                        Ok(tree) => {
                            *self = tree;
                            on_change(everything);
                        }
                        // Its name means nothing for the moment.
                        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                        Err(error) => return Err(error),
                    }
                }
            }
            let inotify = self.inotify.as_fd();
            let mut wanted = [PollFd::new(&inotify, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            match rustix::event::poll(&mut wanted, Some(&timeout)) {
                Ok(_) if !wanted[1].revents().is_empty() => return Ok(()),
                Ok(0) => continue,
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            for change in self.read_changes() {
                match change {
                    Change::At(path) => on_change(&path),
                    Change::NewDirectory(path) => {
                        self.add(&path)?;
                        // What appeared in it before the watch was set has caused no event.
                        on_change(everything);
                    }
                    Change::Anything => on_change(everything),
                }
            }
        }
    }

    fn read_changes(&mut self) -> Vec<Change> {
        let mut buffer = [MaybeUninit::uninit(); 16 * 1024];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        let mut changes = Vec::new();
        loop {
            let Ok(event) = reader.next() else { return changes };
            let flags = event.events();
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                changes.push(Change::Anything);
                continue;
            }
            if flags.contains(ReadFlags::IGNORED) {
                self.directories.remove(&event.wd());
                continue;
            }
            let Some(directory) = self.directories.get(&event.wd()) else { continue };
            let is_directory = flags.contains(ReadFlags::ISDIR);
            let path = match event.file_name() {
                Some(name) => directory.join(OsStr::from_bytes(name.to_bytes())),
                None => {
                    changes.push(Change::Anything);
                    continue;
                }
            };
            // One whose mode changes may be one that could not be read before.
            let is_new = flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO | ReadFlags::ATTRIB);
            changes.push(match (is_directory, is_new) {
                (false, _) => Change::At(path),
                (true, true) => Change::NewDirectory(path),
                (true, false) => Change::Anything,
            });
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Whether there is no such directory (any more), or a link in its place.
fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NOTDIR | Errno::LOOP)
}

fn may(path: &Path, access: Access) -> bool {
    rustix::fs::accessat(CWD, path, access, AtFlags::EACCESS).is_ok()
}

fn subdirectories(path: &Path) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => names.push(entry.file_name()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(names)
}

/// Why a directory is not watched, and what to do about it.
pub(super) fn unwatched(path: &Path, error: Errno) -> io::Error {
    let advice = match error {
        Errno::NOSPC => "; raise fs.inotify.max_user_watches by sysctl",
        Errno::MFILE => "; raise fs.inotify.max_user_instances by sysctl, or the limit of open files",
        _ => "",
    };
    io::Error::new(io::Error::from(error).kind(), format!("{}: {error}{advice}", path.display()))
}

enum Change {
    At(PathBuf),
    /// Or one that may be watched only now.
    NewDirectory(PathBuf),
    Anything,
}
