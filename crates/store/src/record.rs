//! The format of extents and records in the arena.
//!
//! Every extent starts with four words: magic, owner (control id, meaningless after a restart), granules and
//! the granule of the next extent of the same body or 0. A record's first extent goes on with the header below,
//! then key, meta, head and the body's first part, without gaps. The magic of a record is stored last when it is
//! committed and cleared first when it is removed: a process killed in between leaves no half of it behind.
//! Against a crash of the whole machine, which may lose any page, stand the checksums (XXH3-64).
//!
//! The checksum of the fixed part is seeded with the file's random salt and the record's place, so bytes of a
//! body that imitate a record, or an old copy of one, are not taken for one.

use crate::arena::{Arena, GRANULE_BYTES};
use crate::space::Extent;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Version of everything in this file and of the superblock.
pub(crate) const FORMAT_VERSION: u32 = 1;
pub(crate) const RECORD_MAGIC: u32 = u32::from_le_bytes(*b"TGrc");
pub(crate) const CONTINUATION_MAGIC: u32 = u32::from_le_bytes(*b"TGcn");

/// Words of every extent, in bytes from its start.
pub(crate) const MAGIC: u64 = 0;
pub(crate) const OWNER: u64 = 4;
pub(crate) const GRANULES: u64 = 8;
pub(crate) const NEXT_EXTENT: u64 = 12;
/// Bytes before the data of a continuation extent.
pub(crate) const CONTINUATION_HEADER_BYTES: u64 = 16;

const GENERATION: u64 = 16;
const BODY_LENGTH: u64 = 24;
const BODY_SUM: u64 = 32;
const PREFIX_SUM: u64 = 40;
pub(crate) const KEY_LENGTH: u64 = 48;
const META_LENGTH: u64 = 52;
const HEAD_LENGTH: u64 = 56;
const FIRST_LENGTH: u64 = 60;
const FIXED_SUM: u64 = 64;
/// Bytes before the key.
pub(crate) const HEADER_BYTES: u64 = 80;

pub(crate) const MAX_KEY_BYTES: usize = 64 << 10;
pub(crate) const MAX_META_BYTES: usize = 1 << 20;
pub(crate) const MAX_HEAD_BYTES: usize = 1 << 20;
/// The body's part in the first extent is at most this long, so that [`crate::Store::replace_meta`] copies little.
pub(crate) const MAX_FIRST_BYTES: u64 = 256 << 10;

/// Lengths of a record's parts in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Layout {
    pub(crate) key: u32,
    pub(crate) meta: u32,
    pub(crate) head: u32,
    /// The body's part in the first extent.
    pub(crate) first: u32,
    pub(crate) body: u64,
}

impl Layout {
    /// Bytes before the body's first part.
    pub(crate) fn body_start(&self) -> u64 {
        HEADER_BYTES + u64::from(self.key) + u64::from(self.meta) + u64::from(self.head)
    }

    #[inline]
    pub(crate) fn load(arena: &Arena, offset: u64) -> Self {
        let word = |at| arena.word(offset + at).load(Relaxed);
        Self {
            key: word(KEY_LENGTH),
            meta: word(META_LENGTH),
            head: word(HEAD_LENGTH),
            first: word(FIRST_LENGTH),
            body: arena.long(offset + BODY_LENGTH).load(Relaxed),
        }
    }
}

/// What a record's checksums say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sums {
    pub(crate) generation: u64,
    pub(crate) prefix: u64,
    pub(crate) body: u64,
}

impl Sums {
    pub(crate) fn load(arena: &Arena, offset: u64) -> Self {
        let long = |at| arena.long(offset + at).load(Relaxed);
        Self { generation: long(GENERATION), prefix: long(PREFIX_SUM), body: long(BODY_SUM) }
    }
}

fn fixed_sum(extent: Extent, next: u32, layout: &Layout, sums: &Sums, salt: u64) -> u64 {
    let mut bytes = [0; 64];
    let words =
        [extent.granule, extent.granules, next, layout.key, layout.meta, layout.head, layout.first, 0];
    for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    for (to, long) in
        bytes[32..].chunks_exact_mut(8).zip([sums.generation, sums.prefix, sums.body, layout.body])
    {
        to.copy_from_slice(&long.to_le_bytes());
    }
    xxh3_64_with_seed(&bytes, salt)
}

/// Fills in the header of a record at `extent`, all but its magic.
pub(crate) fn store_header(arena: &Arena, extent: Extent, layout: &Layout, sums: &Sums, salt: u64) {
    let offset = extent.offset();
    store_layout(arena, offset, layout);
    arena.long(offset + GENERATION).store(sums.generation, Relaxed);
    arena.long(offset + PREFIX_SUM).store(sums.prefix, Relaxed);
    arena.long(offset + BODY_SUM).store(sums.body, Relaxed);
    seal(arena, extent.granule, salt);
}

/// Stores the checksum of the fixed part as it stands.
pub(crate) fn seal(arena: &Arena, granule: u32, salt: u64) {
    let extent = extent(arena, granule);
    let offset = extent.offset();
    let (layout, sums) = (Layout::load(arena, offset), Sums::load(arena, offset));
    let sum = fixed_sum(extent, next_extent(arena, offset), &layout, &sums, salt);
    arena.long(offset + FIXED_SUM).store(sum, Relaxed);
}

/// Stores the lengths alone: enough for readers of an unfinished record.
pub(crate) fn store_layout(arena: &Arena, offset: u64, layout: &Layout) {
    arena.word(offset + KEY_LENGTH).store(layout.key, Relaxed);
    arena.word(offset + META_LENGTH).store(layout.meta, Relaxed);
    arena.word(offset + HEAD_LENGTH).store(layout.head, Relaxed);
    arena.word(offset + FIRST_LENGTH).store(layout.first, Relaxed);
    arena.long(offset + BODY_LENGTH).store(layout.body, Relaxed);
}

/// Whether the fixed part of the record at `granule` is what [`store_header`] wrote there. Everything else about
/// the record is still to be checked.
pub(crate) fn fixed_part_is_intact(arena: &Arena, granule: u32, salt: u64) -> bool {
    let offset = u64::from(granule) * GRANULE_BYTES;
    let extent = extent(arena, granule);
    let (layout, sums) = (Layout::load(arena, offset), Sums::load(arena, offset));
    let sum = arena.long(offset + FIXED_SUM).load(Relaxed);
    sum == fixed_sum(extent, next_extent(arena, offset), &layout, &sums, salt)
}

/// Starts an extent: its four words, not linked to anything, no magic.
pub(crate) fn start_extent(arena: &Arena, extent: Extent, owner: u32) {
    let offset = extent.offset();
    arena.word(offset + MAGIC).store(0, Relaxed);
    arena.word(offset + OWNER).store(owner, Relaxed);
    arena.word(offset + GRANULES).store(extent.granules, Relaxed);
    arena.word(offset + NEXT_EXTENT).store(0, Relaxed);
}

pub(crate) fn set_magic(arena: &Arena, offset: u64, magic: u32) {
    arena.word(offset + MAGIC).store(magic, Release);
}

pub(crate) fn magic(arena: &Arena, offset: u64) -> u32 {
    arena.word(offset + MAGIC).load(Relaxed)
}

pub(crate) fn extent(arena: &Arena, granule: u32) -> Extent {
    let offset = u64::from(granule) * GRANULE_BYTES;
    Extent { granule, granules: arena.word(offset + GRANULES).load(Relaxed) }
}

pub(crate) fn next_extent(arena: &Arena, offset: u64) -> u32 {
    arena.word(offset + NEXT_EXTENT).load(Acquire)
}

pub(crate) fn set_next_extent(arena: &Arena, offset: u64, next: u32) {
    arena.word(offset + NEXT_EXTENT).store(next, Release);
}

/// Where the body's bytes from `position` on lie: offset in the file and length up to the end of that extent, at
/// most up to `total`, of which `first` bytes lie in the extent of the record at `offset`. `(0, 0)` at the end.
pub(crate) fn locate(
    arena: &Arena,
    offset: u64,
    body_start: u64,
    first: u64,
    total: u64,
    position: u64,
) -> (u64, u64) {
    if position >= total {
        return (0, 0);
    }
    if position < first {
        return (offset + body_start + position, first.min(total) - position);
    }
    let mut before = first;
    let mut granule = next_extent(arena, offset);
    while granule != 0 {
        // Next before length: the writer lengthens or trims an extent only while it is the last.
        let next = next_extent(arena, u64::from(granule) * GRANULE_BYTES);
        let extent = extent(arena, granule);
        let capacity =
            if next == 0 { total - before } else { extent.bytes().saturating_sub(CONTINUATION_HEADER_BYTES) };
        if position < before + capacity {
            let start = extent.offset() + CONTINUATION_HEADER_BYTES + (position - before);
            return (start, (before + capacity).min(total) - position);
        }
        before += capacity;
        granule = next;
    }
    (0, 0)
}
