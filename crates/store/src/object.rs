use crate::inner::Inner;
use crate::record::{self, HEADER_BYTES, Layout};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicU8, AtomicU64};

/// Keeps the store mapped. One for each shard, so that cores do not all count references in one place.
#[repr(align(64))]
pub(crate) struct Lease(pub(crate) Arc<Inner>);

/// A reference to an object's extents: they are not reused while it exists.
struct Pin {
    lease: Arc<Lease>,
    id: u32,
}

impl Clone for Pin {
    fn clone(&self) -> Self {
        self.lease.0.control(self.id).refs.fetch_add(1, Relaxed);
        Self { lease: self.lease.clone(), id: self.id }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.lease.0.release(self.id);
    }
}

/// A pinned object: its bytes stay where they are until the last clone is dropped, even when the store has removed
/// or replaced it meanwhile. Cloning is cheap.
#[derive(Clone)]
pub struct Object {
    pin: Pin,
    offset: u64,
    layout: Layout,
}

impl Object {
    /// Takes over a reference to `id`, which is committed.
    pub(crate) fn adopt(lease: Arc<Lease>, id: u32) -> Self {
        let offset = lease.0.offset(id);
        let layout = Layout::load(&lease.0.arena, offset);
        Self { pin: Pin { lease, id }, offset, layout }
    }

    pub(crate) fn id(&self) -> u32 {
        self.pin.id
    }

    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn belongs_to(&self, inner: &Arc<Inner>) -> bool {
        Arc::ptr_eq(&self.pin.lease.0, inner)
    }

    #[inline]
    fn bytes(&self, offset: u64, length: usize) -> &[u8] {
        // SAFETY: all callers ask for committed bytes of this object, which `self.pin` pins.
        unsafe { self.pin.lease.0.arena.bytes(offset, length) }
    }

    /// The key it is stored under.
    #[inline]
    pub fn key(&self) -> &[u8] {
        self.bytes(self.offset + HEADER_BYTES, self.layout.key as usize)
    }

    /// The cache's own description of the object, as inserted.
    #[inline]
    pub fn meta(&self) -> &[u8] {
        self.bytes(self.offset + HEADER_BYTES + u64::from(self.layout.key), self.layout.meta as usize)
    }

    /// The ready-to-send response head, as inserted.
    #[inline]
    pub fn head(&self) -> &[u8] {
        let before = u64::from(self.layout.key) + u64::from(self.layout.meta);
        self.bytes(self.offset + HEADER_BYTES + before, self.layout.head as usize)
    }

    /// Length of the body in bytes.
    #[inline]
    pub fn body_length(&self) -> u64 {
        self.layout.body
    }

    /// Arena bytes that the object occupies.
    pub fn stored_bytes(&self) -> u64 {
        self.pin.lease.0.granules(self.pin.id) * crate::arena::GRANULE_BYTES
    }

    /// The body's pieces in order: one up to 256 KiB, unless the arena was too fragmented; none when it is empty.
    pub fn body(&self) -> impl Iterator<Item = &[u8]> {
        let mut position = 0;
        std::iter::from_fn(move || {
            let piece = self.body_at(position);
            position += piece.len() as u64;
            (!piece.is_empty()).then_some(piece)
        })
    }

    /// The body from `offset` to the end of the extent that it lies in; empty at or beyond the end of the body.
    /// Any offset may be asked for, any number of times.
    #[inline]
    pub fn body_at(&self, offset: u64) -> &[u8] {
        let (start, length) = self.body_extent(offset);
        self.bytes(start, length as usize)
    }

    /// Where [`Self::body_at`]`(offset)` lies in the arena: offset and length in bytes.
    #[inline]
    fn body_extent(&self, offset: u64) -> (u64, u64) {
        let Layout { first, body, .. } = self.layout;
        let arena = &self.pin.lease.0.arena;
        record::locate(arena, self.offset, self.layout.body_start(), u64::from(first), body, offset)
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Object")
            .field("id", &self.pin.id)
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

/// How far a [`crate::Writer`] has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Progress {
    /// More bytes may come.
    Writing,
    /// Complete.
    Committed,
    /// Dropped without commit: what was written so far is all there is.
    Aborted,
}

/// What a writer shares with its followers.
#[derive(Debug, Default)]
pub(crate) struct Published {
    pub(crate) bytes: AtomicU64,
    pub(crate) progress: AtomicU8,
}

/// Reads what a [`crate::Writer`] has written so far, for requests that collapsed onto the one being fetched.
/// Whoever drives the writer also wakes those who follow it. Pins the extents even after an abort.
#[derive(Clone)]
pub struct Follower {
    pin: Pin,
    published: Arc<Published>,
}

impl Follower {
    /// Takes over a reference to `id`.
    pub(crate) fn adopt(lease: Arc<Lease>, id: u32, published: Arc<Published>) -> Self {
        Self { pin: Pin { lease, id }, published }
    }

    /// How far the writer has come. When this says that no more will come, [`Self::available`] is final.
    pub fn progress(&self) -> Progress {
        match self.published.progress.load(Acquire) {
            0 => Progress::Writing,
            1 => Progress::Committed,
            _ => Progress::Aborted,
        }
    }

    /// Bytes of the body that can be read.
    pub fn available(&self) -> u64 {
        self.published.bytes.load(Acquire)
    }

    /// The written part of the body from `offset` to the end of its extent; empty when there is none yet.
    pub fn body_at(&self, offset: u64) -> &[u8] {
        let (start, length) = self.body_extent(offset);
        // SAFETY: these bytes are published and pinned by `self.pin`.
        unsafe { self.pin.lease.0.arena.bytes(start, length as usize) }
    }

    /// Where [`Self::body_at`]`(offset)` lies in the arena: offset and length in bytes.
    fn body_extent(&self, offset: u64) -> (u64, u64) {
        let total = self.available();
        let inner = &self.pin.lease.0;
        let record = inner.offset(self.pin.id);
        // Next before layout: until the first extent is linked to a second one it holds all there is.
        let next = record::next_extent(&inner.arena, record);
        let layout = Layout::load(&inner.arena, record);
        let first = if next == 0 { total } else { u64::from(layout.first) };
        record::locate(&inner.arena, record, layout.body_start(), first, total, offset)
    }
}

impl fmt::Debug for Follower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follower").field("published", &self.published).finish_non_exhaustive()
    }
}
