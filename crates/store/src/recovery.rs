//! Finding the objects that an earlier process left in the arena.
//!
//! Nothing in the file is believed before its checksum or a bound confirms it. A record counts when its magic,
//! the checksum of its fixed part (salted with its place), that of key, meta and head, and that of the body over
//! all extents agree, and its extents overlap no other's.

use crate::arena::{Arena, GRANULE_BYTES};
use crate::control::Queue;
use crate::inner::{Core, Inner};
use crate::record::{
    self, CONTINUATION_HEADER_BYTES, CONTINUATION_MAGIC, HEADER_BYTES, Layout, MAX_FIRST_BYTES,
    MAX_HEAD_BYTES, MAX_KEY_BYTES, MAX_META_BYTES, RECORD_MAGIC, Sums,
};
use crate::space::{Extent, Space};
use crate::{OpenReport, Unusable};
use std::sync::atomic::Ordering::{Relaxed, Release};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// How many times its length may be hashed before a file is given up: an intact one needs one.
const MAX_PASSES: u64 = 4;

/// A record that is intact in itself and owns its extents.
struct Found {
    generation: u64,
    granule: u32,
}

pub(crate) fn recover(inner: &Inner, report: &mut OpenReport) -> Result<(), Unusable> {
    let mut core = inner.core();
    find(inner, &mut core, report)?;
    inner.take_up(&mut core);
    Ok(())
}

/// As [`recover`], of an arena that another process has frozen and goes on reading. Only the granules whose bits are set
/// in `taken` are looked at, none of which is free before the quarantine is lifted, and nothing is written.
pub(crate) fn take_over(inner: &Inner, taken: Box<[u64]>, report: &mut OpenReport) -> Result<(), Unusable> {
    let mut core = inner.core();
    core.frozen = true;
    inner.shared.store(true, Relaxed);
    core.space.restrict_to(&taken);
    find(inner, &mut core, report)?;
    core.space.quarantine(taken);
    Ok(())
}

/// Finds what is there, and puts it into index and queues.
fn find(inner: &Inner, core: &mut Core, report: &mut OpenReport) -> Result<(), Unusable> {
    let mut found = scan(inner, &mut core.space, report)?;
    found.sort_unstable_by_key(|f| std::cmp::Reverse(f.generation));
    inner.generation.store(found.first().map_or(1, |f| f.generation.saturating_add(1)), Relaxed);
    let mut kept = 0;
    for at in 0..found.len() {
        if register(inner, found[at].granule) {
            found.swap(kept, at);
            kept += 1;
        } else {
            report.superseded += 1;
            for_each_extent(&inner.arena, found[at].granule, |extent| core.space.unclaim(extent));
        }
    }
    enqueue(inner, core, kept, report);
    inner.torn_dropped.store(report.torn_dropped, Relaxed);
    Ok(())
}

/// Finds and claims all intact records.
fn scan(inner: &Inner, space: &mut Space, report: &mut OpenReport) -> Result<Vec<Found>, Unusable> {
    let mut found = Vec::new();
    let mut budget = inner.arena.length().saturating_mul(MAX_PASSES);
    let mut granule = space.first();
    while granule < space.end() {
        let offset = u64::from(granule) * GRANULE_BYTES;
        if record::magic(&inner.arena, offset) != RECORD_MAGIC || space.is_used(granule) {
            granule += 1;
            continue;
        }
        match check(inner, space, granule, &mut budget)? {
            Some(extents) => {
                let generation = Sums::load(&inner.arena, offset).generation;
                found.push(Found { generation, granule });
                granule = extents.first().map_or(granule + 1, |first| first.end());
            }
            None => {
                report.torn_dropped += 1;
                granule += 1;
            }
        }
    }
    Ok(found)
}

/// The extents of the record at `granule`, claimed, if all of it is intact.
fn check(
    inner: &Inner,
    space: &mut Space,
    granule: u32,
    budget: &mut u64,
) -> Result<Option<Vec<Extent>>, Unusable> {
    let arena = &inner.arena;
    let first = record::extent(arena, granule);
    let offset = first.offset();
    if first.granules == 0 || u64::from(first.granule) + u64::from(first.granules) > u64::from(space.end()) {
        return Ok(None);
    }
    if !record::fixed_part_is_intact(arena, granule, inner.salt) {
        return Ok(None);
    }
    let (layout, sums) = (Layout::load(arena, offset), Sums::load(arena, offset));
    let within_limits = layout.key as usize <= MAX_KEY_BYTES
        && layout.meta as usize <= MAX_META_BYTES
        && layout.head as usize <= MAX_HEAD_BYTES
        && u64::from(layout.first) <= MAX_FIRST_BYTES
        && layout.body_start() + u64::from(layout.first) <= first.bytes();
    if !within_limits {
        return Ok(None);
    }
    let Some(pieces) = pieces(arena, space, first, &layout) else { return Ok(None) };
    let hashed = layout.body_start() + layout.body;
    *budget = budget.checked_sub(hashed).ok_or(Unusable::Overlapping)?;
    let prefix = (layout.body_start() - HEADER_BYTES) as usize;
    // SAFETY: nobody else has access to the arena while it is being opened; the bounds were just checked.
    if xxh3_64(unsafe { arena.bytes(offset + HEADER_BYTES, prefix) }) != sums.prefix {
        return Ok(None);
    }
    let mut body = Xxh3::new();
    for (_, start, length) in &pieces {
        // SAFETY: as above.
        body.update(unsafe { arena.bytes(*start, *length as usize) });
    }
    if body.digest() != sums.body {
        return Ok(None);
    }
    let extents: Vec<Extent> = pieces.into_iter().map(|(extent, ..)| extent).collect();
    for (claimed, extent) in extents.iter().enumerate() {
        if !space.claim(*extent) {
            extents[..claimed].iter().for_each(|e| space.unclaim(*e));
            return Ok(None);
        }
    }
    Ok(Some(extents))
}

/// The extents of a record with the part of the body in each (offset and length in bytes); `None` when they lie
/// outside the arena, do not end where the body does, or are already claimed.
fn pieces(arena: &Arena, space: &Space, first: Extent, layout: &Layout) -> Option<Vec<(Extent, u64, u64)>> {
    let mut pieces = vec![(first, first.offset() + layout.body_start(), u64::from(layout.first))];
    let mut rest = layout.body.checked_sub(u64::from(layout.first))?;
    let mut next = record::next_extent(arena, first.offset());
    while rest > 0 {
        // Each round takes at least one byte of a body that fits the arena, or ends the loop.
        if next < space.first() || next >= space.end() || layout.body > arena.length() || space.is_used(next)
        {
            return None;
        }
        let extent = record::extent(arena, next);
        if record::magic(arena, extent.offset()) != CONTINUATION_MAGIC {
            return None;
        }
        if extent.granules == 0
            || u64::from(extent.granule) + u64::from(extent.granules) > u64::from(space.end())
        {
            return None;
        }
        let length = rest.min(extent.bytes() - CONTINUATION_HEADER_BYTES);
        pieces.push((extent, extent.offset() + CONTINUATION_HEADER_BYTES, length));
        rest -= length;
        next = record::next_extent(arena, extent.offset());
    }
    (next == 0).then_some(pieces)
}

fn for_each_extent(arena: &Arena, granule: u32, mut f: impl FnMut(Extent)) {
    let mut granule = granule;
    while granule != 0 {
        let extent = record::extent(arena, granule);
        granule = record::next_extent(arena, extent.offset());
        f(extent);
    }
}

/// Gives the record a control block and a place in the index; `false` when a newer one has its key, or there is no
/// room for it.
fn register(inner: &Inner, granule: u32) -> bool {
    let id = inner.unused_id.load(Relaxed);
    if id as usize >= inner.controls.len() {
        return false;
    }
    let control = inner.control(id);
    control.granule.store(granule, Relaxed);
    let offset = inner.offset(id);
    let length = Layout::load(&inner.arena, offset).key as usize;
    // SAFETY: nobody else has access to the arena while it is being opened.
    let key = unsafe { inner.arena.bytes(offset + HEADER_BYTES, length) };
    let hash = inner.hash(key);
    let mut shard = inner.shard(hash).lock();
    let taken = shard.find(&inner.controls, hash, |other| inner.has_key(other, key)).is_some();
    if taken || !shard.insert(hash, id) {
        control.granule.store(0, Relaxed);
        return false;
    }
    control.hash.store(hash, Relaxed);
    control.refs.store(1, Relaxed);
    control.indexed.store(true, Release);
    inner.unused_id.store(id + 1, Relaxed);
    true
}

/// Fills the queues: ids were given newest first; the oldest survivors have proven themselves.
fn enqueue(inner: &Inner, core: &mut Core, kept: usize, report: &mut OpenReport) {
    let main = u64::from(core.space.end()) * 9 / 10;
    for id in (1..=kept as u32).rev() {
        let granules = inner.granules(id);
        let queue = if core.queues.main.granules + granules <= main { Queue::Main } else { Queue::Small };
        core.queues.push(&inner.controls, id, queue, granules);
        report.objects += 1;
        report.bytes += granules * GRANULE_BYTES;
    }
}
