//! Notices changes below a directory by inotify(7), on a thread of its own.

use std::collections::HashMap;
use std::ffi::OsStr;
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

/// How often the root itself is looked at, which may be a link that points elsewhere now.
const ROOT_INTERVAL: Duration = Duration::from_millis(500);
/// Directories watched at once; a tree with more cannot be watched.
const WATCHES: usize = 16_384;

/// Watches a tree until it is dropped.
pub(crate) struct Watcher {
    stop: Arc<OwnedFd>,
}

impl Watcher {
    /// Calls `on_change` with the path below `root` of everything that changes; with an empty path when anything may
    /// have changed, even which directory `root` is.
    ///
    /// # Errors
    /// inotify is not available, or the tree has more directories than may be watched.
    pub(crate) fn spawn(root: &Path, on_change: impl Fn(&Path) + Send + 'static) -> io::Result<Self> {
        let tree = Tree::new(root)?;
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
}

impl Tree {
    fn new(root: &Path) -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let identity = identity(root)?;
        let mut tree = Self { inotify, root: root.to_path_buf(), identity, directories: HashMap::new() };
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
            if self.directories.len() >= WATCHES {
                return Err(io::Error::other(format!("more than {WATCHES} directories")));
            }
            let path = self.root.join(&relative);
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
                // It is gone again, or was a link.
                Err(_) if !is_root => continue,
                Err(error) => return Err(error.into()),
            };
            let Ok(entries) = std::fs::read_dir(&path) else { continue };
            for entry in entries.flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    pending.push(relative.join(entry.file_name()));
                }
            }
        }
        Ok(())
    }

    fn run(mut self, stop: &OwnedFd, on_change: impl Fn(&Path)) {
        let everything = Path::new("");
        let mut looked = Instant::now();
        let timeout = Timespec { tv_sec: 0, tv_nsec: ROOT_INTERVAL.subsec_nanos().into() };
        loop {
            if looked.elapsed() >= ROOT_INTERVAL {
                looked = Instant::now();
                if self.has_moved()
                    && let Ok(tree) = Self::new(&self.root)
                {
                    self = tree;
                    on_change(everything);
                }
            }
            let inotify = self.inotify.as_fd();
            let mut wanted = [PollFd::new(&inotify, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            match rustix::event::poll(&mut wanted, Some(&timeout)) {
                Ok(_) if !wanted[1].revents().is_empty() => return,
                Ok(0) => continue,
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => {
                    tracing::error!(%error, root = %self.root.display(), "changes are no longer noticed");
                    on_change(everything);
                    return;
                }
            }
            for change in self.read_changes() {
                match change {
                    Change::At(path) => on_change(&path),
                    Change::NewDirectory(path) => {
                        if let Err(error) = self.add(&path) {
                            tracing::error!(%error, path = %path.display(), "a new directory is not watched");
                        }
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
            changes.push(match (is_directory, flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO)) {
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

enum Change {
    At(PathBuf),
    NewDirectory(PathBuf),
    Anything,
}
