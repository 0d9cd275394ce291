//! Large files go out from their own pages and not from the arena: sendfile(2) copies nothing, and a file that is kept open has
//! the bytes that it had when it was stored, or it is seen to have changed.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

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
}

impl LargeFile {
    /// Whether its bytes are those of the stored object with this entity tag.
    fn is_still(&self, etag: &[u8]) -> bool {
        self.etag.as_bytes() == etag && Stamp::of(&self.file).is_ok_and(|stamp| stamp == self.stamp)
    }
}

impl AsFd for LargeFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// `None` is being opened, or cannot be kept open.
type Kept = Option<Arc<LargeFile>>;

/// The large files of one root, by the keys of what is stored of them.
#[derive(Default)]
pub(crate) struct LargeFiles {
    kept: RwLock<HashMap<Box<[u8]>, Kept>>,
}

/// What is known of the file behind a stored object.
pub(crate) enum Known {
    /// It is what is stored.
    Open(Arc<LargeFile>),
    /// The caller is to open it: from now on nobody else does.
    Unopened,
    /// It is not to be had.
    Closed,
}

impl LargeFiles {
    /// The file stored under `key` with this entity tag.
    pub(crate) fn find(&self, key: &[u8], etag: &[u8]) -> Known {
        match self.kept.read().unwrap_or_else(PoisonError::into_inner).get(key) {
            Some(Some(file)) if file.is_still(etag) => {
                file.is_used.store(true, Ordering::Relaxed);
                return Known::Open(Arc::clone(file));
            }
            Some(None) => return Known::Closed,
            _ => {}
        }
        let mut kept = self.kept.write().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= MOST {
            // What nobody has asked for since room was made before goes; all, if everything was asked for.
            kept.retain(|_, file| {
                file.as_ref().is_some_and(|file| file.is_used.swap(false, Ordering::Relaxed))
            });
            if kept.len() >= MOST {
                kept.clear();
            }
        }
        match kept.insert(key.into(), None) {
            // Another core was faster.
            Some(None) => Known::Closed,
            _ => Known::Unopened,
        }
    }

    /// Keeps a file open, unless something has changed since it was opened.
    pub(crate) fn keep(&self, key: &[u8], file: StaticFile, is_current: impl Fn() -> bool) {
        let StaticFile { file, stamp, etag, .. } = file;
        let mut kept = self.kept.write().unwrap_or_else(PoisonError::into_inner);
        if is_current() {
            let file = LargeFile { file, stamp, etag, is_used: AtomicBool::new(true) };
            kept.insert(key.into(), Some(Arc::new(file)));
        }
    }

    /// Closes all of them: a file that was removed keeps its place on the disk for as long as it is open.
    pub(crate) fn close(&self) {
        self.kept.write().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
