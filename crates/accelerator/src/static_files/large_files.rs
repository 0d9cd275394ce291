//! Large files go out from their own pages and not from the arena: sendfile(2) copies nothing (docs/decisions/0021).
//! What the arena holds decides what is sent, and takes over wherever a file is seen to be another one by now.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::static_files::{Stamp, StaticFile};

/// From this length on it takes less to have the kernel fetch the pages of a file than to copy its bytes.
pub(crate) const LARGE_BYTES: u64 = 32 * 1024;

/// Files of one root that are kept open.
const MOST: usize = 256;

/// A file that is kept open.
pub(crate) struct LargeFile {
    file: File,
    stamp: Stamp,
    etag: String,
    /// Since room was last made.
    is_used: AtomicBool,
    /// It was seen to have changed.
    has_changed: AtomicBool,
    /// The system would not send from it.
    is_unfit: AtomicBool,
}

impl LargeFile {
    fn new(StaticFile { file, stamp, etag, .. }: StaticFile) -> Self {
        let [has_changed, is_unfit] = [const { AtomicBool::new(false) }; 2];
        Self { file, stamp, etag, is_used: AtomicBool::new(true), has_changed, is_unfit }
    }

    /// Whether it is still as it was stored, as far as the system tells.
    pub(crate) fn is_as_stored(&self) -> bool {
        let is_same = Stamp::of(&self.file).is_ok_and(|stamp| stamp == self.stamp);
        if !is_same {
            self.has_changed.store(true, Ordering::Relaxed);
        }
        is_same
    }

    /// Nothing is sent from it from now on.
    pub(crate) fn give_up(&self) {
        self.is_unfit.store(true, Ordering::Relaxed);
    }
}

impl AsFd for LargeFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// `None` is being opened, or cannot be kept open.
type Kept = Option<Arc<LargeFile>>;
type Keys = HashMap<Box<[u8]>, Kept>;

/// The large files of one root, by the keys of what is stored of them.
#[derive(Default)]
pub(crate) struct LargeFiles {
    kept: RwLock<Keys>,
}

/// What is known of the file behind a stored object.
pub(crate) enum Known {
    /// It is what is stored.
    Open(Arc<LargeFile>),
    /// The caller is to open it: from now on nobody else does. What was closed to make room for it is to be dropped
    /// where that may take its time.
    Unopened(Vec<Kept>),
    /// It is not to be had.
    Closed,
}

impl LargeFiles {
    fn read(&self) -> RwLockReadGuard<'_, Keys> {
        self.kept.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Keys> {
        self.kept.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file stored under `key` with this entity tag.
    pub(crate) fn find(&self, key: &[u8], etag: &[u8]) -> Known {
        match self.read().get(key) {
            Some(None) => return Known::Closed,
            Some(Some(file)) if file.is_unfit.load(Ordering::Relaxed) => return Known::Closed,
            Some(Some(file)) if file.etag.as_bytes() == etag && !file.has_changed.load(Ordering::Relaxed) => {
                file.is_used.store(true, Ordering::Relaxed);
                return Known::Open(Arc::clone(file));
            }
            _ => {}
        }
        let mut kept = self.write();
        // What nobody has asked for since room was made before goes; all, if everything was asked for.
        let is_used =
            |file: &Kept| file.as_ref().is_some_and(|file| file.is_used.swap(false, Ordering::Relaxed));
        let mut closed = Vec::new();
        if kept.len() >= MOST {
            closed.extend(kept.extract_if(|_, file| !is_used(file)).map(|(_, file)| file));
        }
        if kept.len() >= MOST {
            closed.extend(kept.drain().map(|(_, file)| file));
        }
        match kept.insert(key.into(), None) {
            // Another core was faster.
            Some(None) => Known::Closed,
            before => {
                closed.extend(before);
                Known::Unopened(closed)
            }
        }
    }

    /// Keeps a file open, unless something has changed since it was opened; then the next request opens it again.
    pub(crate) fn keep(&self, key: &[u8], file: StaticFile, is_current: impl Fn() -> bool) {
        let file = Arc::new(LargeFile::new(file));
        let mut kept = self.write();
        if is_current() {
            kept.insert(key.into(), Some(file));
        } else {
            kept.remove(key);
        }
    }

    /// A file that was removed keeps its place on the disk for as long as it is open.
    pub(crate) fn close(&self, key: &[u8]) {
        let closed = self.write().remove(key);
        drop(closed);
    }

    pub(crate) fn close_all(&self) {
        let closed = std::mem::take(&mut *self.write());
        drop(closed);
    }
}
