//! The mapped file: the only place that turns offsets into addresses.
//!
//! What must hold for the `unsafe` users: bytes of an extent are written only by the [`crate::Writer`] that owns
//! the extent and has not published them yet, and are never written again until the extent is freed; an extent
//! is freed only when nobody pins its object. Words (extent and record headers, free-list links) are accessed
//! only as atomics and never lie inside a slice that was handed out.

use rustix::mm::{MapFlags, MlockFlags, MsyncFlags, ProtFlags, mlock_with, mmap, msync, munmap};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::{io, slice};

/// The unit of allocation: extents start at and fill whole granules.
pub(crate) const GRANULE_BYTES: u64 = 256;

/// A shared mapping of a whole file.
pub(crate) struct Arena {
    base: NonNull<u8>,
    length: usize,
    /// What is mapped, for whoever is to map it next.
    file: File,
}

// SAFETY: the mapping belongs to no thread; all access goes through atomics or through the `unsafe` functions,
// whose callers guarantee that no byte is written while another thread may read it.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps the first `length` bytes of `file`, which must be at least that long (no access may fault later).
    pub(crate) fn map(file: File, length: u64) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice aliases no Rust object.
        let base = unsafe { mmap(std::ptr::null_mut(), length, protection, flags, &file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { base, length, file })
    }

    pub(crate) fn length(&self) -> u64 {
        self.length as u64
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Keeps pages in memory from their first use on, as far as the process may (RLIMIT_MEMLOCK).
    pub(crate) fn lock_in_memory(&self) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping; locking changes no byte of it.
        unsafe { mlock_with(self.base.as_ptr().cast(), self.length, MlockFlags::ONFAULT) }?;
        Ok(())
    }

    /// Waits until all dirty pages are on the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping.
        unsafe { msync(self.base.as_ptr().cast(), self.length, MsyncFlags::SYNC) }?;
        Ok(())
    }

    /// Whether what is mapped lies at this path.
    pub(crate) fn lies_at(&self, path: &Path) -> io::Result<bool> {
        let (own, there) = match (self.file.metadata()?, path.metadata()) {
            (own, Ok(there)) => (own, there),
            (_, Err(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            (_, Err(error)) => return Err(error),
        };
        Ok((own.dev(), own.ino()) == (there.dev(), there.ino()))
    }

    #[inline]
    fn at(&self, offset: u64, length: usize, align: usize) -> *mut u8 {
        let offset = offset as usize;
        assert!(
            offset <= self.length && length <= self.length - offset && offset.is_multiple_of(align),
            "arena offset out of bounds: our bookkeeping is wrong"
        );
        // SAFETY: `offset` was just checked to lie within the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// The 32-bit word at byte `offset`, a multiple of 4.
    #[inline]
    pub(crate) fn word(&self, offset: u64) -> &AtomicU32 {
        // SAFETY: in bounds and aligned (checked by `at`, the base is page-aligned), valid for any bit pattern,
        // and lives as long as the mapping; words are accessed as atomics only (module invariant).
        unsafe { AtomicU32::from_ptr(self.at(offset, 4, 4).cast()) }
    }

    /// The 64-bit word at byte `offset`, a multiple of 8.
    #[inline]
    pub(crate) fn long(&self, offset: u64) -> &AtomicU64 {
        // SAFETY: as in `word`.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8, 8).cast()) }
    }

    /// Bytes at `offset`.
    ///
    /// # Safety
    /// For the life of the slice the caller has the object that owns these bytes pinned and they are published,
    /// or nobody else has access to the arena at all.
    #[inline]
    pub(crate) unsafe fn bytes(&self, offset: u64, length: usize) -> &[u8] {
        // SAFETY: in bounds (checked by `at`); the caller promises that nobody writes there.
        unsafe { slice::from_raw_parts(self.at(offset, length, 1), length) }
    }

    /// Copies `from` to `offset`.
    ///
    /// # Safety
    /// The caller owns the extent around these bytes and has not published them, so that no slice covers them.
    #[inline]
    pub(crate) unsafe fn write(&self, offset: u64, from: &[u8]) {
        // SAFETY: in bounds (checked by `at`); the caller promises exclusive access; `from` is ordinary memory
        // or a pinned part of the arena, which cannot overlap an unpublished one.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.at(offset, from.len(), 1), from.len()) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `map`; every borrow of it ended with `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
    }
}
