//! Which granules are free: two-level segregated fit (Masmano et al., ECRTS 2004) with the free lists kept in the
//! free granules themselves, so that bookkeeping outside the arena is two bits a granule.

use crate::arena::{Arena, GRANULE_BYTES};
use crate::record;
use std::sync::atomic::Ordering::Relaxed;

/// Size classes: exact below 16 granules, then 16 to each power of two.
const CLASSES: usize = 464;
/// Entries of a class's own list that are tried before a larger class is split.
const PROBES: usize = 8;
/// Words of a free block, in bytes from its start. The first is the record magic's place and is zeroed.
const PREVIOUS: u64 = 16;
const NEXT: u64 = 20;

/// A run of granules.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Extent {
    pub(crate) granule: u32,
    pub(crate) granules: u32,
}

impl Extent {
    pub(crate) fn offset(self) -> u64 {
        u64::from(self.granule) * GRANULE_BYTES
    }

    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.granules) * GRANULE_BYTES
    }

    pub(crate) fn end(self) -> u32 {
        self.granule + self.granules
    }
}

pub(crate) struct Space {
    /// A bit a granule: allocated.
    used: Box<[u64]>,
    /// A bit a granule: first of an allocated extent.
    starts: Box<[u64]>,
    heads: Box<[u32; CLASSES]>,
    nonempty: [u64; CLASSES.div_ceil(64)],
    first: u32,
    end: u32,
    free: u64,
    quarantine: Option<Quarantine>,
}

/// Space that an earlier process has left behind and may still read.
struct Quarantine {
    /// A bit a granule: was allocated when the arena changed hands.
    taken: Box<[u64]>,
    /// A bit a granule: of those, the ones that hold nothing any more. They count as used.
    waiting: Box<[u64]>,
}

fn class_of(granules: u32) -> usize {
    if granules < 16 {
        return granules as usize;
    }
    let log = granules.ilog2();
    ((log - 3) * 16 + ((granules >> (log - 4)) & 15)) as usize
}

fn set(bits: &mut [u64], from: u32, count: u32, value: bool) {
    let (mut at, end) = (u64::from(from), u64::from(from) + u64::from(count));
    while at < end {
        let low = at % 64;
        let width = (64 - low).min(end - at);
        let mask = (u64::MAX >> (64 - width)) << low;
        let word = &mut bits[(at / 64) as usize];
        *word = if value { *word | mask } else { *word & !mask };
        at += width;
    }
}

fn get(bits: &[u64], at: u32) -> bool {
    bits[(at / 64) as usize] >> (at % 64) & 1 == 1
}

/// The greatest position at or below `at` whose bit is set.
fn previous_set(bits: &[u64], at: u32) -> Option<u32> {
    let mut index = (at / 64) as usize;
    let mut word = bits[index] & (u64::MAX >> (63 - at % 64));
    loop {
        if word != 0 {
            return Some(index as u32 * 64 + 63 - word.leading_zeros());
        }
        index = index.checked_sub(1)?;
        word = bits[index];
    }
}

/// The least position at or above `at` whose bit is set, below `end`.
fn next_set(bits: &[u64], at: u32, end: u32) -> u32 {
    let mut index = (at / 64) as usize;
    let Some(word) = bits.get(index) else { return end };
    let mut word = word & (u64::MAX << (at % 64));
    loop {
        if word != 0 {
            return (index as u32 * 64 + word.trailing_zeros()).min(end);
        }
        index += 1;
        match bits.get(index) {
            Some(next) if index as u64 * 64 < u64::from(end) => word = *next,
            _ => return end,
        }
    }
}

/// The least position at or above `at` whose bit is not set, below `end`.
fn next_clear(bits: &[u64], at: u32, end: u32) -> u32 {
    let mut at = at;
    while at < end && get(bits, at) {
        let rest = !(bits[(at / 64) as usize] >> (at % 64));
        // Zeros come in from above, so that a run up to the end of the word ends there.
        at = (at + rest.trailing_zeros().min(64 - at % 64)).min(end);
    }
    at
}

impl Space {
    /// Granules `first..end`, none of them in a free list yet: [`Self::claim`] what is in use, then
    /// [`Self::release_unclaimed`].
    pub(crate) fn new(first: u32, end: u32) -> Self {
        let words = (end as usize).div_ceil(64);
        let mut used = vec![0; words].into_boxed_slice();
        set(&mut used, 0, first, true);
        let starts = vec![0; words].into_boxed_slice();
        let heads = Box::new([0; CLASSES]);
        Self { used, starts, heads, nonempty: [0; _], first, end, free: 0, quarantine: None }
    }

    /// Until [`Self::quarantine`], only the granules whose bits are set in `taken` can be claimed.
    pub(crate) fn restrict_to(&mut self, taken: &[u64]) {
        self.used.iter_mut().zip(taken).for_each(|(used, taken)| *used = !taken);
        set(&mut self.used, 0, self.first, true);
    }

    /// After [`Self::restrict_to`]: of what is `taken`, what was not claimed is free only when the quarantine is
    /// lifted, and so is what was claimed and is given back before. What was not taken is free.
    pub(crate) fn quarantine(&mut self, taken: Box<[u64]>) {
        let waiting = self.used.iter().zip(&taken).map(|(claimed, taken)| taken & !claimed).collect();
        let mut quarantine = Quarantine { taken, waiting };
        // The superblock is nobody's.
        for bits in [&mut quarantine.taken, &mut quarantine.waiting] {
            set(bits, 0, self.first, false);
        }
        self.used.copy_from_slice(&quarantine.taken);
        set(&mut self.used, 0, self.first, true);
        self.quarantine = Some(quarantine);
    }

    pub(crate) fn has_quarantine(&self) -> bool {
        self.quarantine.is_some()
    }

    /// Whether the granule, when it is given back, stays unused for a while.
    pub(crate) fn is_quarantined(&self, granule: u32) -> bool {
        self.quarantine.as_ref().is_some_and(|quarantine| get(&quarantine.taken, granule))
    }

    /// Runs of granules that wait for the end of the quarantine.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Extent> {
        let end = self.end;
        let bits: &[u64] = self.quarantine.as_ref().map_or(&[], |quarantine| &quarantine.waiting);
        let mut at = self.first;
        std::iter::from_fn(move || {
            let start = next_set(bits, at, end);
            (start < end).then(|| {
                at = next_clear(bits, start, end);
                Extent { granule: start, granules: at - start }
            })
        })
    }

    /// Frees what has waited: nobody but this process reads from the arena any more.
    pub(crate) fn lift_quarantine(&mut self, arena: &Arena) {
        let waiting: Vec<Extent> = self.waiting().collect();
        self.quarantine = None;
        waiting.into_iter().for_each(|extent| self.give_part(arena, extent));
    }

    /// Leaves about `granules` in the free lists and forgets the rest, which is another process's from now on. Returns
    /// a bit a granule: what is used or left. [`Self::relink`] takes it back.
    pub(crate) fn share(&mut self, arena: &Arena, granules: u64) -> Box<[u64]> {
        let mut left = Vec::new();
        let mut missing = granules;
        while missing > 0 {
            let Some(mut block) = self.largest(arena) else { break };
            self.unlink(arena, block);
            block.granules = u64::from(block.granules).min(missing) as u32;
            missing -= u64::from(block.granules);
            left.push(block);
        }
        self.forget_lists();
        let mut bits = self.used.clone();
        for block in left {
            set(&mut bits, block.granule, block.granules, true);
            self.link(arena, block);
        }
        bits
    }

    /// Forgets the free lists and makes them anew: whatever stands in free granules, another process may have written
    /// it.
    pub(crate) fn relink(&mut self, arena: &Arena) {
        self.forget_lists();
        self.release_unclaimed(arena);
    }

    pub(crate) fn first(&self) -> u32 {
        self.first
    }

    pub(crate) fn end(&self) -> u32 {
        self.end
    }

    pub(crate) fn free_granules(&self) -> u64 {
        self.free
    }

    /// Marks an extent as allocated; `false` when it is out of bounds or overlaps another.
    pub(crate) fn claim(&mut self, extent: Extent) -> bool {
        let Some(end) = extent.granule.checked_add(extent.granules) else { return false };
        if extent.granule < self.first || extent.granules == 0 || end > self.end {
            return false;
        }
        if next_set(&self.used, extent.granule, end) < end {
            return false;
        }
        self.mark(extent);
        true
    }

    /// Undoes [`Self::claim`] before [`Self::release_unclaimed`].
    pub(crate) fn unclaim(&mut self, extent: Extent) {
        set(&mut self.used, extent.granule, extent.granules, false);
        set(&mut self.starts, extent.granule, 1, false);
    }

    fn forget_lists(&mut self) {
        self.heads.fill(0);
        self.nonempty.fill(0);
        self.free = 0;
    }

    /// Puts every unclaimed granule into the free lists.
    pub(crate) fn release_unclaimed(&mut self, arena: &Arena) {
        let mut at = self.first;
        while at < self.end {
            let next = next_set(&self.used, at, self.end);
            if next > at {
                self.link(arena, Extent { granule: at, granules: next - at });
            }
            at = next_clear(&self.used, next, self.end);
        }
    }

    pub(crate) fn is_used(&self, granule: u32) -> bool {
        get(&self.used, granule)
    }

    /// Takes an extent of `want` granules, or failing that one of at least `min`.
    pub(crate) fn take(&mut self, arena: &Arena, min: u32, want: u32) -> Option<Extent> {
        let block = self.find(arena, want).or_else(|| {
            if min == want {
                return None;
            }
            self.largest(arena).filter(|b| b.granules >= min).or_else(|| self.find(arena, min))
        })?;
        self.unlink(arena, block);
        let taken = Extent { granule: block.granule, granules: block.granules.min(want) };
        if taken.granules < block.granules {
            let rest = Extent { granule: taken.end(), granules: block.granules - taken.granules };
            self.link(arena, rest);
        }
        self.mark(taken);
        Some(taken)
    }

    /// Lengthens `extent` in place by at most `extra` granules; returns its new length.
    pub(crate) fn grow(&mut self, arena: &Arena, extent: Extent, extra: u32) -> u32 {
        let at = extent.end();
        if at >= self.end || get(&self.used, at) || extra == 0 {
            return extent.granules;
        }
        let block = self.block(arena, at);
        self.unlink(arena, block);
        let added = block.granules.min(extra);
        if added < block.granules {
            self.link(arena, Extent { granule: at + added, granules: block.granules - added });
        }
        set(&mut self.used, at, added, true);
        extent.granules + added
    }

    /// Gives an extent back and joins it with its free neighbours.
    pub(crate) fn give(&mut self, arena: &Arena, extent: Extent) {
        set(&mut self.starts, extent.granule, 1, false);
        self.give_part(arena, extent);
    }

    /// The free block around `granule`, if that is free.
    pub(crate) fn free_run(&self, arena: &Arena, granule: u32) -> Option<Extent> {
        if granule < self.first || granule >= self.end || get(&self.used, granule) {
            return None;
        }
        // Granules below `first` are marked used, so there always is one.
        let start = previous_set(&self.used, granule).map_or(self.first, |used| used + 1);
        Some(self.block(arena, start))
    }

    /// The start of the allocated extent around `granule`, if that is allocated.
    pub(crate) fn extent_around(&self, granule: u32) -> Option<u32> {
        if granule < self.first || granule >= self.end || !get(&self.used, granule) {
            return None;
        }
        // What waits has no start, and to give back what is quarantined makes no room.
        if self.is_quarantined(granule) {
            return None;
        }
        previous_set(&self.starts, granule)
    }

    fn mark(&mut self, extent: Extent) {
        set(&mut self.used, extent.granule, extent.granules, true);
        set(&mut self.starts, extent.granule, 1, true);
    }

    fn give_part(&mut self, arena: &Arena, extent: Extent) {
        if let Some(quarantine) = &mut self.quarantine
            && get(&quarantine.taken, extent.granule)
        {
            set(&mut quarantine.waiting, extent.granule, extent.granules, true);
            return;
        }
        set(&mut self.used, extent.granule, extent.granules, false);
        let mut whole = extent;
        if extent.end() < self.end && !get(&self.used, extent.end()) {
            let right = self.block(arena, extent.end());
            self.unlink(arena, right);
            whole.granules += right.granules;
        }
        if extent.granule > self.first && !get(&self.used, extent.granule - 1) {
            let granules = arena.word(extent.offset() - 4).load(Relaxed);
            let left = Extent { granule: extent.granule - granules, granules };
            self.unlink(arena, left);
            whole = Extent { granule: left.granule, granules: left.granules + whole.granules };
        }
        self.link(arena, whole);
    }

    fn block(&self, arena: &Arena, granule: u32) -> Extent {
        let offset = u64::from(granule) * GRANULE_BYTES;
        Extent { granule, granules: arena.word(offset + record::GRANULES).load(Relaxed) }
    }

    fn find(&self, arena: &Arena, granules: u32) -> Option<Extent> {
        let class = class_of(granules);
        let mut at = self.heads[class];
        for _ in 0..PROBES {
            if at == 0 {
                break;
            }
            let block = self.block(arena, at);
            if block.granules >= granules {
                return Some(block);
            }
            at = arena.word(block.offset() + NEXT).load(Relaxed);
        }
        let class = next_set(&self.nonempty, class as u32 + 1, CLASSES as u32) as usize;
        (class < CLASSES).then(|| self.block(arena, self.heads[class]))
    }

    fn largest(&self, arena: &Arena) -> Option<Extent> {
        let class = previous_set(&self.nonempty, CLASSES as u32 - 1)?;
        Some(self.block(arena, self.heads[class as usize]))
    }

    fn link(&mut self, arena: &Arena, block: Extent) {
        let class = class_of(block.granules);
        let (offset, head) = (block.offset(), self.heads[class]);
        arena.word(offset).store(0, Relaxed);
        arena.word(offset + record::GRANULES).store(block.granules, Relaxed);
        arena.word(offset + PREVIOUS).store(0, Relaxed);
        arena.word(offset + NEXT).store(head, Relaxed);
        arena.word(offset + block.bytes() - 4).store(block.granules, Relaxed);
        if head != 0 {
            arena.word(u64::from(head) * GRANULE_BYTES + PREVIOUS).store(block.granule, Relaxed);
        }
        self.heads[class] = block.granule;
        set(&mut self.nonempty, class as u32, 1, true);
        self.free += u64::from(block.granules);
    }

    fn unlink(&mut self, arena: &Arena, block: Extent) {
        let previous = arena.word(block.offset() + PREVIOUS).load(Relaxed);
        let next = arena.word(block.offset() + NEXT).load(Relaxed);
        if next != 0 {
            arena.word(u64::from(next) * GRANULE_BYTES + PREVIOUS).store(previous, Relaxed);
        }
        if previous != 0 {
            arena.word(u64::from(previous) * GRANULE_BYTES + NEXT).store(next, Relaxed);
        } else {
            let class = class_of(block.granules);
            self.heads[class] = next;
            set(&mut self.nonempty, class as u32, 1, next != 0);
        }
        self.free -= u64::from(block.granules);
    }

    /// Walks all granules and panics when bits, blocks and lists disagree. `extents` are all allocated extents.
    pub(crate) fn check_invariants(&self, arena: &Arena, extents: &[Extent]) {
        let mut sorted: Vec<Extent> = extents.iter().copied().chain(self.waiting()).collect();
        sorted.sort_by_key(|e| e.granule);
        let (mut at, mut free) = (self.first, 0);
        for extent in sorted.iter().copied().chain([Extent { granule: self.end, granules: 0 }]) {
            assert!(extent.granule >= at, "extents overlap at {at}: {extent:?}");
            if extent.granule > at {
                let block = self.block(arena, at);
                assert_eq!(block.end(), extent.granule, "free block at {at} does not reach its neighbour");
                assert_eq!(arena.word(block.offset() + block.bytes() - 4).load(Relaxed), block.granules);
                assert_eq!(next_set(&self.used, at, self.end), extent.granule, "free granules marked used");
                free += u64::from(block.granules);
            }
            let is_waiting = self
                .quarantine
                .as_ref()
                .is_some_and(|q| extent.granules > 0 && get(&q.waiting, extent.granule));
            if extent.granules > 0 && !is_waiting {
                assert!(get(&self.starts, extent.granule), "extent without its start bit: {extent:?}");
                assert!((extent.granule..extent.end()).all(|g| get(&self.used, g)), "hole in {extent:?}");
            }
            at = extent.end();
        }
        assert_eq!(free, self.free, "free granules miscounted");
        let starts: u32 = self.starts.iter().map(|w| w.count_ones()).sum();
        assert_eq!(starts as usize, extents.len(), "start bits left behind");
    }
}
