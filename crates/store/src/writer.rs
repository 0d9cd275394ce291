use crate::InsertError;
use crate::arena::GRANULE_BYTES;
use crate::inner::{Inner, Replaces};
use crate::object::{Follower, Lease, Object, Published};
use crate::record::{
    self, CONTINUATION_HEADER_BYTES, HEADER_BYTES, Layout, MAX_FIRST_BYTES, MAX_HEAD_BYTES, MAX_KEY_BYTES,
    MAX_META_BYTES, Sums,
};
use crate::space::Extent;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Room for the body that an object of unknown length starts with; later extents double what is there.
const FIRST_GUESS_BYTES: u64 = 16 << 10;
/// Objects up to this size get one extent if they must evict for it; larger ones take a quarter of it too.
const CONTIGUOUS_BYTES: u64 = 128 << 10;
const MIN_CONTINUATION_BYTES: u64 = 4 << 10;
const MAX_CONTINUATION_BYTES: u64 = 4 << 20;

/// An object being written; it becomes visible at [`Writer::commit`], and is discarded when it is dropped before.
pub struct Writer {
    lease: Arc<Lease>,
    id: u32,
    /// The record's first extent and the last one, into which bytes go at `used`.
    first: Extent,
    last: Extent,
    used: u64,
    layout: Layout,
    expected: Option<u64>,
    prefix_sum: u64,
    body_sum: Xxh3,
    published: Arc<Published>,
}

fn granules(bytes: u64) -> u32 {
    bytes.div_ceil(GRANULE_BYTES).min(u64::from(u32::MAX)) as u32
}

/// Writes key, meta and head at the start of a new extent; returns the sum over them.
fn write_prefix(inner: &Inner, extent: Extent, parts: [&[u8]; 3]) -> u64 {
    let start = extent.offset() + HEADER_BYTES;
    let mut at = start;
    for part in parts {
        // SAFETY: the extent was just allocated, long enough for the parts, and nobody else knows of it.
        unsafe { inner.arena.write(at, part) };
        at += part.len() as u64;
    }
    // SAFETY: as above; the slice is gone when this function returns.
    xxh3_64(unsafe { inner.arena.bytes(start, (at - start) as usize) })
}

fn layout_of(inner: &Inner, [key, meta, head]: [&[u8]; 3], body: u64) -> Result<Layout, InsertError> {
    for (part, limit) in [(key, MAX_KEY_BYTES), (meta, MAX_META_BYTES), (head, MAX_HEAD_BYTES)] {
        if part.len() > limit {
            return Err(InsertError::TooLarge { limit_bytes: limit as u64 });
        }
    }
    let layout =
        Layout { key: key.len() as u32, meta: meta.len() as u32, head: head.len() as u32, first: 0, body: 0 };
    let limit_bytes = inner.config.max_object_bytes;
    match layout.body_start().checked_add(body) {
        Some(total) if total <= limit_bytes => Ok(layout),
        _ => Err(InsertError::TooLarge { limit_bytes }),
    }
}

/// Counts the failure of an insertion.
pub(crate) fn counted<T>(inner: &Inner, result: Result<T, InsertError>) -> Result<T, InsertError> {
    if result.is_err() {
        inner.failures.fetch_add(1, Relaxed);
    }
    result
}

impl Writer {
    pub(crate) fn start(
        lease: Arc<Lease>,
        hash: u64,
        parts: [&[u8]; 3],
        expected: Option<u64>,
    ) -> Result<Self, InsertError> {
        let inner = &lease.0;
        let layout = layout_of(inner, parts, expected.unwrap_or(0))?;
        let prefix = layout.body_start();
        let body = expected.unwrap_or(FIRST_GUESS_BYTES).min(MAX_FIRST_BYTES);
        let want = prefix + body;
        let first = match expected {
            Some(_) if want <= CONTIGUOUS_BYTES => inner.allocate(granules(want), granules(want)),
            Some(_) => Err(InsertError::NoSpace),
            None => inner.allocate(granules(prefix + 1), granules(want)),
        };
        let min = (prefix + 1).max(want / 4).min(want);
        let first = first.or_else(|_| inner.allocate(granules(min), granules(want)))?;
        let id = match inner.allocate_control(hash, first.granule) {
            Ok(id) => id,
            Err(error) => {
                inner.give(&mut inner.core(), first);
                return Err(error);
            }
        };
        record::start_extent(&inner.arena, first, id);
        record::store_layout(&inner.arena, first.offset(), &layout);
        let prefix_sum = write_prefix(inner, first, parts);
        let published = Arc::new(Published::default());
        let body_sum = Xxh3::new();
        Ok(Self {
            lease,
            id,
            first,
            last: first,
            used: prefix,
            layout,
            expected,
            prefix_sum,
            body_sum,
            published,
        })
    }

    /// Appends to the body. After an error the object cannot be completed: drop the writer. A part of `bytes` may be
    /// written by then, and read by those who follow: [`Self::written`] says how much.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), InsertError> {
        let result = self.append(bytes);
        self.published.bytes.store(self.layout.body, Release);
        counted(&self.lease.0, result)
    }

    fn append(&mut self, mut bytes: &[u8]) -> Result<(), InsertError> {
        let limit_bytes = self.lease.0.config.max_object_bytes;
        if self.layout.body_start() + self.layout.body + bytes.len() as u64 > limit_bytes {
            return Err(InsertError::TooLarge { limit_bytes });
        }
        while !bytes.is_empty() {
            let room = self.room();
            if room == 0 {
                self.extend(bytes.len() as u64)?;
                continue;
            }
            let (now, later) = bytes.split_at(bytes.len().min(room as usize));
            // SAFETY: `last` is this writer's, and bytes from `used` on are not published yet.
            unsafe { self.lease.0.arena.write(self.last.offset() + self.used, now) };
            self.body_sum.update(now);
            self.used += now.len() as u64;
            self.layout.body += now.len() as u64;
            bytes = later;
        }
        Ok(())
    }

    fn in_first(&self) -> bool {
        self.first.granule == self.last.granule
    }

    /// Bytes that still go into the last extent.
    fn room(&self) -> u64 {
        let end = match self.in_first() {
            true => self.last.bytes().min(self.layout.body_start() + MAX_FIRST_BYTES),
            false => self.last.bytes(),
        };
        end - self.used
    }

    /// Makes room for more: lengthens the last extent or adds another.
    fn extend(&mut self, at_least: u64) -> Result<(), InsertError> {
        let inner = &self.lease.0;
        let most = inner.config.max_object_bytes - self.layout.body_start() - self.layout.body;
        let more = match self.expected.map(|expected| expected.saturating_sub(self.layout.body)) {
            Some(rest) if rest > 0 => rest,
            _ => self.layout.body.clamp(MIN_CONTINUATION_BYTES, MAX_CONTINUATION_BYTES),
        };
        let more = more.max(at_least.min(MAX_CONTINUATION_BYTES)).min(most);
        let may_grow = match self.in_first() {
            true => (self.layout.body_start() + MAX_FIRST_BYTES).saturating_sub(self.used).min(more),
            false => more,
        };
        if may_grow >= GRANULE_BYTES {
            let grown = inner.grow(self.last, granules(may_grow));
            if grown > self.last.granules {
                self.set_last_length(grown);
                return Ok(());
            }
        }
        let want = granules(more.min(MAX_CONTINUATION_BYTES) + CONTINUATION_HEADER_BYTES);
        let min = (want / 8).max(granules(MIN_CONTINUATION_BYTES)).min(want);
        let extent = inner.allocate_more(min, want)?;
        record::start_extent(&inner.arena, extent, self.id);
        record::set_magic(&inner.arena, extent.offset(), record::CONTINUATION_MAGIC);
        if self.in_first() {
            // All of the first extent's capacity must be body: whoever follows computes its part from its length.
            let keep = granules(self.used);
            inner.trim(self.last, keep);
            self.first.granules = keep;
            inner.arena.word(self.first.offset() + record::GRANULES).store(keep, Relaxed);
            self.layout.first = self.layout.body as u32;
            record::store_layout(&inner.arena, self.first.offset(), &self.layout);
        }
        record::set_next_extent(&inner.arena, self.last.offset(), extent.granule);
        self.last = extent;
        self.used = CONTINUATION_HEADER_BYTES;
        Ok(())
    }

    fn set_last_length(&mut self, granules: u32) {
        let first = self.in_first();
        self.last.granules = granules;
        if first {
            self.first.granules = granules;
        }
        self.lease.0.arena.word(self.last.offset() + record::GRANULES).store(granules, Relaxed);
    }

    /// Bytes of the body written so far.
    pub fn written(&self) -> u64 {
        self.layout.body
    }

    /// A reader of what is already written, for requests that collapsed onto this one.
    pub fn follow(&self) -> Follower {
        self.lease.0.control(self.id).refs.fetch_add(1, Relaxed);
        Follower::adopt(self.lease.clone(), self.id, self.published.clone())
    }

    /// Makes the object visible in place of any other of its key. Should the index have no room for it, only the
    /// returned object has it.
    pub fn commit(mut self) -> Object {
        let inner = self.lease.0.clone();
        let keep = granules(self.used);
        if keep < self.last.granules {
            let last = self.last;
            self.set_last_length(keep);
            inner.trim(last, keep);
        }
        if self.in_first() {
            self.layout.first = self.layout.body as u32;
        }
        let generation = inner.generation.fetch_add(1, Relaxed);
        let sums = Sums { generation, prefix: self.prefix_sum, body: self.body_sum.digest() };
        record::store_header(&inner.arena, self.first, &self.layout, &sums, inner.salt);
        inner.control(self.id).refs.fetch_add(1, Relaxed);
        let object = Object::adopt(self.lease.clone(), self.id);
        if inner.publish(self.id, object.key(), Replaces::Any) {
            self.published.progress.store(1, Release);
            // The reference is the index's now.
            self.id = 0;
        } else {
            inner.failures.fetch_add(1, Relaxed);
        }
        object
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.id != 0 {
            self.published.progress.store(2, Release);
            self.lease.0.release(self.id);
        }
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer").field("id", &self.id).field("layout", &self.layout).finish_non_exhaustive()
    }
}

/// Stores `old` anew with other meta and head. The body's first part is copied; continuation extents are taken
/// over as they are.
pub(crate) fn replace_meta(
    lease: &Arc<Lease>,
    old: &Object,
    meta: &[u8],
    head: &[u8],
) -> Result<Object, InsertError> {
    let inner = &lease.0;
    let parts = [old.key(), meta, head];
    let old_layout = *old.layout();
    let mut layout = layout_of(inner, parts, old_layout.body)?;
    (layout.first, layout.body) = (old_layout.first, old_layout.body);
    let length = granules(layout.body_start() + u64::from(layout.first));
    let extent = inner.allocate(length, length)?;
    let hash = inner.control(old.id()).hash.load(Relaxed);
    let id = match inner.allocate_control(hash, extent.granule) {
        Ok(id) => id,
        Err(error) => {
            inner.give(&mut inner.core(), extent);
            return Err(error);
        }
    };
    record::start_extent(&inner.arena, extent, id);
    let prefix = write_prefix(inner, extent, parts);
    let first = old.body_at(0).get(..layout.first as usize).unwrap_or_default();
    // SAFETY: the extent is new, long enough, and nobody else knows of it.
    unsafe { inner.arena.write(extent.offset() + layout.body_start(), first) };
    let generation = inner.generation.fetch_add(1, Relaxed);
    let sums = Sums { generation, prefix, ..Sums::load(&inner.arena, old.offset()) };
    let shared = record::next_extent(&inner.arena, old.offset());
    record::set_next_extent(&inner.arena, extent.offset(), shared);
    record::store_header(&inner.arena, extent, &layout, &sums, inner.salt);
    inner.control(id).refs.fetch_add(1, Relaxed);
    let object = Object::adopt(lease.clone(), id);
    if inner.publish(id, old.key(), Replaces::Only(old.id())) {
        return Ok(object);
    }
    // Not published: the continuation extents are still the old object's and must not be freed with this one.
    record::set_next_extent(&inner.arena, extent.offset(), 0);
    inner.release(id);
    Err(InsertError::Superseded)
}
