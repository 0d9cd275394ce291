//! The store's state and everything that changes it.
//!
//! Locks: `core` before a shard, never two shards. A lookup takes its shard's lock alone; whatever adds or removes
//! objects holds `core`, and a shard's lock within it for the moment the index changes.

use crate::arena::{Arena, GRANULE_BYTES};
use crate::control::{ARENA_BYTES_PER_OBJECT, Control, Queue};
use crate::eviction::Queues;
use crate::index::{self, Shard};
use crate::record;
use crate::space::{Extent, Space};
use crate::{Config, InsertError};
use std::fs::File;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes at the start of the arena that hold no objects.
pub(crate) const SUPERBLOCK_BYTES: u64 = 4096;
/// How often `core` is taken anew, and how many victims are sought each time, before an allocation fails.
const ROUNDS: u32 = 64;
const VICTIMS_PER_ROUND: u32 = 32;
/// Queue entries that may be looked at for one victim: bounds the time under the lock.
const MAX_LOOKS: u32 = 512;
/// Extents longer than this make room around the first victim instead of waiting for luck.
const PATIENT_GRANULES: u32 = 16;
/// Victims in vain after which their neighbours go too, first the cold ones, then any.
const PATIENCE: u32 = 4;

/// What only insertions, removals and evictions touch.
pub(crate) struct Core {
    pub(crate) space: Space,
    pub(crate) queues: Queues,
    /// First of the list of free control blocks through `Control::next`, or 0.
    free_id: u32,
    /// While another process takes the arena over nothing is published, evicted or freed.
    pub(crate) frozen: bool,
    /// What is to be freed once that is over: objects through `Control::next`, and extents that were no object's yet.
    pub(crate) unfreed_id: u32,
    pub(crate) unfreed: Vec<Extent>,
}

pub(crate) struct Inner {
    pub(crate) arena: Arena,
    pub(crate) controls: Box<[Control]>,
    pub(crate) shards: Box<[Shard]>,
    core: Mutex<Core>,
    pub(crate) config: Config,
    pub(crate) salt: u64,
    /// Ids from here on have never been used.
    pub(crate) unused_id: AtomicU32,
    pub(crate) generation: AtomicU64,
    pub(crate) inserts: AtomicU64,
    pub(crate) evictions: AtomicU64,
    pub(crate) removals: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) torn_dropped: AtomicU64,
    /// Another process uses the arena too: each clears the magic of what it removes, and the other finds it cleared.
    pub(crate) shared: AtomicBool,
    /// Holds the directory's lock as long as the arena is mapped.
    pub(crate) lock: Option<File>,
}

/// What a committed record replaces.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Replaces {
    /// Whatever is stored under the key.
    Any,
    /// This object only, whose continuation extents it takes over.
    Only(u32),
}

impl Inner {
    pub(crate) fn new(arena: Arena, config: Config, salt: u64, lock: Option<File>) -> Self {
        let granules = (arena.length() / GRANULE_BYTES) as u32;
        let objects = (arena.length() / ARENA_BYTES_PER_OBJECT) as usize;
        let first = (SUPERBLOCK_BYTES / GRANULE_BYTES) as u32;
        let core = Core {
            space: Space::new(first, granules),
            queues: Queues::new(arena.length(), u64::from(granules - first)),
            free_id: 0,
            frozen: false,
            unfreed_id: 0,
            unfreed: Vec::new(),
        };
        Self {
            controls: (0..=objects).map(|_| Control::default()).collect(),
            shards: index::shards(objects),
            core: Mutex::new(core),
            arena,
            config,
            salt,
            unused_id: AtomicU32::new(1),
            generation: AtomicU64::new(1),
            inserts: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            removals: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            torn_dropped: AtomicU64::new(0),
            shared: AtomicBool::new(false),
            lock,
        }
    }

    /// Unmaps the arena and hands its directory's lock back.
    pub(crate) fn into_lock(self) -> Option<File> {
        self.lock
    }

    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn shard(&self, hash: u64) -> &Shard {
        &self.shards[self.shard_number(hash)]
    }

    #[inline]
    pub(crate) fn shard_number(&self, hash: u64) -> usize {
        hash as usize & (self.shards.len() - 1)
    }

    #[inline]
    pub(crate) fn hash(&self, key: &[u8]) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(key, self.salt)
    }

    #[inline]
    pub(crate) fn control(&self, id: u32) -> &Control {
        &self.controls[id as usize]
    }

    #[inline]
    pub(crate) fn offset(&self, id: u32) -> u64 {
        u64::from(self.control(id).granule.load(Relaxed)) * GRANULE_BYTES
    }

    /// Whether the live object `id` has this key. The caller holds a reference or the lock of the shard whose
    /// index holds one.
    #[inline]
    pub(crate) fn has_key(&self, id: u32, key: &[u8]) -> bool {
        let offset = self.offset(id);
        let length = self.arena.word(offset + record::KEY_LENGTH).load(Relaxed) as usize;
        // SAFETY: the object cannot be freed meanwhile (see above), and keys are published before the object is
        // in the index.
        length == key.len() && unsafe { self.arena.bytes(offset + record::HEADER_BYTES, length) } == key
    }

    /// Allocates at least `min` and at best `want` granules, evicting as needed.
    pub(crate) fn allocate(&self, min: u32, want: u32) -> Result<Extent, InsertError> {
        let mut in_vain = 0;
        for _ in 0..ROUNDS {
            let mut core = self.core();
            if core.frozen {
                return Err(InsertError::Frozen);
            }
            for _ in 0..VICTIMS_PER_ROUND {
                if let Some(extent) = core.space.take(&self.arena, min, want) {
                    return Ok(extent);
                }
                let Some(at) = self.evict_one(&mut core) else { return Err(InsertError::NoSpace) };
                in_vain += 1;
                if min > PATIENT_GRANULES || in_vain > PATIENCE {
                    self.clear_around(&mut core, at, min, in_vain > PATIENCE);
                }
            }
        }
        Err(InsertError::NoSpace)
    }

    /// As [`Self::allocate`], for an object that is being written: while the arena changes hands there is some room for
    /// those, so that whoever reads along gets all of it.
    pub(crate) fn allocate_more(&self, min: u32, want: u32) -> Result<Extent, InsertError> {
        {
            let mut core = self.core();
            if core.frozen {
                return core.space.take(&self.arena, min, want).ok_or(InsertError::Frozen);
            }
        }
        self.allocate(min, want)
    }

    /// Lengthens an extent that is being written in place by at most `extra` granules; returns its new length.
    pub(crate) fn grow(&self, extent: Extent, extra: u32) -> u32 {
        let mut core = self.core();
        // Free neighbours may be the other process's.
        if core.frozen { extent.granules } else { core.space.grow(&self.arena, extent, extra) }
    }

    /// Gives the end of an extent back so that `keep` granules remain.
    pub(crate) fn trim(&self, extent: Extent, keep: u32) {
        if keep < extent.granules {
            let tail = Extent { granule: extent.granule + keep, granules: extent.granules - keep };
            self.give(&mut self.core(), tail);
        }
    }

    /// Gives an extent back, or notes that it is to be given back.
    pub(crate) fn give(&self, core: &mut Core, extent: Extent) {
        if core.frozen {
            core.unfreed.push(extent);
        } else {
            core.space.give(&self.arena, extent);
        }
    }

    /// Allocates a control block with one reference, that of the caller.
    pub(crate) fn allocate_control(&self, hash: u64, granule: u32) -> Result<u32, InsertError> {
        let mut core = self.core();
        if core.frozen {
            return Err(InsertError::Frozen);
        }
        loop {
            if let Some(id) = self.free_control(&mut core) {
                let control = self.control(id);
                control.refs.store(1, Relaxed);
                control.set_frequency(0);
                control.set_queue(Queue::None);
                control.successor.store(0, Relaxed);
                control.hash.store(hash, Relaxed);
                control.granule.store(granule, Release);
                return Ok(id);
            }
            self.evict_one(&mut core).ok_or(InsertError::NoSpace)?;
        }
    }

    fn free_control(&self, core: &mut Core) -> Option<u32> {
        if core.free_id != 0 {
            let id = core.free_id;
            core.free_id = self.control(id).next.load(Relaxed);
            return Some(id);
        }
        let id = self.unused_id.load(Relaxed);
        if id as usize >= self.controls.len() {
            return None;
        }
        self.unused_id.store(id + 1, Release);
        Some(id)
    }

    /// Removes the object that S3-FIFO would; returns a granule that it freed, or `None` when nothing can go.
    pub(crate) fn evict_one(&self, core: &mut Core) -> Option<u32> {
        if core.space.has_quarantine() {
            return self.evict_newcomer(core);
        }
        for look in 0..MAX_LOOKS {
            let small = core.queues.small_is_next();
            let id = if small { core.queues.small.tail } else { core.queues.main.tail };
            if id == 0 {
                return None;
            }
            let control = self.control(id);
            let frequency = control.frequency();
            let spare = if small { frequency > 1 } else { frequency > 0 };
            // Towards the end of the search the first object that nobody reads goes, whatever its worth.
            if !spare || look > MAX_LOOKS / 2 {
                let granule = control.granule.load(Relaxed);
                if self.evict(core, id, small) {
                    return Some(granule);
                }
            }
            let granules = self.granules(id);
            core.queues.unlink(&self.controls, id, granules);
            core.queues.push(&self.controls, id, Queue::Main, granules);
            control.set_frequency(if small { 0 } else { frequency.saturating_sub(1) });
        }
        None
    }

    /// While what was there before is in quarantine, only newcomers make room when they go; they enter by the small
    /// queue.
    fn evict_newcomer(&self, core: &mut Core) -> Option<u32> {
        for _ in 0..MAX_LOOKS {
            let id = core.queues.small.tail;
            if id == 0 {
                return None;
            }
            let granule = self.control(id).granule.load(Relaxed);
            if !core.space.is_quarantined(granule) && self.evict(core, id, true) {
                return Some(granule);
            }
            let granules = self.granules(id);
            core.queues.unlink(&self.controls, id, granules);
            core.queues.push(&self.controls, id, Queue::Main, granules);
        }
        None
    }

    /// Evicts `id` unless somebody reads it.
    fn evict(&self, core: &mut Core, id: u32, remember: bool) -> bool {
        let control = self.control(id);
        let hash = control.hash.load(Relaxed);
        {
            let mut shard = self.shard(hash).lock();
            // The index's own reference is the only one: whoever wants another needs the lock we hold.
            if !control.indexed.load(Relaxed) || control.refs.load(Acquire) != 1 || !shard.remove(hash, id) {
                return false;
            }
            control.indexed.store(false, Release);
        }
        if remember {
            core.queues.ghost.insert(hash);
        }
        self.evictions.fetch_add(1, Relaxed);
        self.retire(core, id);
        true
    }

    /// What follows when `id` has left the index: no restart finds it again, and the index's reference goes.
    fn retire(&self, core: &mut Core, id: u32) {
        record::set_magic(&self.arena, self.offset(id), 0);
        let granules = self.granules(id);
        core.queues.unlink(&self.controls, id, granules);
        self.release_locked(core, id);
    }

    /// Evicts the neighbours of the free granule `at` until `min` granules in a row are free. Objects that are
    /// read, written or, unless `any`, often asked for stop it on their side.
    fn clear_around(&self, core: &mut Core, at: u32, min: u32, any: bool) {
        while let Some(run) = core.space.free_run(&self.arena, at) {
            if run.granules >= min
                || !(self.evict_around(core, run.end(), any) || self.evict_around(core, run.granule - 1, any))
            {
                return;
            }
        }
    }

    /// Evicts the object that occupies `granule`.
    fn evict_around(&self, core: &mut Core, granule: u32, any: bool) -> bool {
        let Some(start) = core.space.extent_around(granule) else { return false };
        let owner = self.arena.word(u64::from(start) * GRANULE_BYTES + record::OWNER).load(Relaxed);
        let Some(control) = self.controls.get(owner as usize).filter(|_| owner != 0) else { return false };
        (any || control.frequency() < 2) && self.evict(core, owner, true)
    }

    /// Granules of all extents of `id`. The caller has a reference or holds `core`.
    pub(crate) fn granules(&self, id: u32) -> u64 {
        let mut sum = 0;
        self.for_each_extent(id, |extent| sum += u64::from(extent.granules));
        sum
    }

    pub(crate) fn for_each_extent(&self, id: u32, mut f: impl FnMut(Extent)) {
        let mut granule = self.control(id).granule.load(Relaxed);
        while granule != 0 {
            let extent = record::extent(&self.arena, granule);
            granule = record::next_extent(&self.arena, extent.offset());
            f(extent);
        }
    }

    /// Gives a reference back.
    pub(crate) fn release(&self, id: u32) {
        // As in `std::sync::Arc`: what was read before this must be seen as done by whoever frees.
        if self.control(id).refs.fetch_sub(1, Release) == 1 {
            fence(Acquire);
            let mut core = self.core();
            self.free(&mut core, id);
        }
    }

    fn release_locked(&self, core: &mut Core, id: u32) {
        if self.control(id).refs.fetch_sub(1, AcqRel) == 1 {
            self.free(core, id);
        }
    }

    /// Frees extents and control block of `id`, and of those that only it kept alive.
    pub(crate) fn free(&self, core: &mut Core, mut id: u32) {
        if core.frozen {
            self.control(id).next.store(core.unfreed_id, Relaxed);
            core.unfreed_id = id;
            return;
        }
        loop {
            let control = self.control(id);
            let successor = control.successor.swap(0, Relaxed);
            let mut granule = control.granule.swap(0, Relaxed);
            while granule != 0 {
                let extent = record::extent(&self.arena, granule);
                granule = match successor {
                    0 => record::next_extent(&self.arena, extent.offset()),
                    _ => 0,
                };
                core.space.give(&self.arena, extent);
            }
            control.next.store(core.free_id, Relaxed);
            core.free_id = id;
            if successor == 0 || self.control(successor).refs.fetch_sub(1, AcqRel) != 1 {
                return;
            }
            id = successor;
        }
    }

    /// Makes the finished record `id` visible. The caller's reference becomes the index's; `false`: the index is
    /// full or the object to be replaced is gone, and the caller's reference remains the caller's.
    pub(crate) fn publish(&self, id: u32, key: &[u8], replaces: Replaces) -> bool {
        let control = self.control(id);
        let hash = control.hash.load(Relaxed);
        let mut core = self.core();
        let core = &mut *core;
        if core.frozen {
            return false;
        }
        let granules = self.granules(id);
        let old = {
            let mut shard = self.shard(hash).lock();
            let old = shard.find(&self.controls, hash, |id| self.has_key(id, key));
            let done = match (old, replaces) {
                (Some(old), Replaces::Any) => shard.replace(hash, old, id),
                (None, Replaces::Any) => shard.insert(hash, id),
                (Some(old), Replaces::Only(only)) => {
                    old == only && self.is_there(old) && shard.replace(hash, old, id)
                }
                (None, Replaces::Only(_)) => false,
            };
            if !done {
                return false;
            }
            if let Some(old) = old {
                self.control(old).indexed.store(false, Release);
            }
            control.indexed.store(true, Release);
            // Within the lock: as soon as it is released the object may be found.
            record::set_magic(&self.arena, self.offset(id), record::RECORD_MAGIC);
            old
        };
        let mut queue = Queue::Small;
        if let Some(old) = old {
            if self.control(old).queue() == Queue::Main {
                queue = Queue::Main;
            }
            control.set_frequency(self.control(old).frequency());
        } else if core.queues.ghost.take(hash, core.queues.main.count) {
            queue = Queue::Main;
        }
        core.queues.push(&self.controls, id, queue, granules);
        if let (Some(old), Replaces::Only(_)) = (old, replaces) {
            self.hand_over(id, old);
        }
        if let Some(old) = old {
            self.removals.fetch_add(1, Relaxed);
            self.retire(core, old);
        }
        self.inserts.fetch_add(1, Relaxed);
        true
    }

    /// `id` takes over the continuation extents of `old`. Those who still read `old` read them too, so `old`
    /// keeps `id` alive.
    fn hand_over(&self, id: u32, old: u32) {
        let mut first = true;
        self.for_each_extent(id, |extent| {
            if !first {
                self.arena.word(extent.offset() + record::OWNER).store(id, Relaxed);
            }
            first = false;
        });
        self.control(id).refs.fetch_add(1, Relaxed);
        self.control(old).successor.store(id, Release);
    }

    /// Whether the object, which is in the index, was not removed by the other process that has the arena.
    #[inline]
    pub(crate) fn is_there(&self, id: u32) -> bool {
        !self.shared.load(Relaxed) || record::magic(&self.arena, self.offset(id)) == record::RECORD_MAGIC
    }

    /// Takes the object `id`, or whatever is under `hash` and `key`, out of the store.
    pub(crate) fn remove(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> bool {
        let mut core = self.core();
        let id = {
            let mut shard = self.shard(hash).lock();
            let Some(id) = shard.find(&self.controls, hash, is_it) else { return false };
            shard.remove(hash, id);
            self.control(id).indexed.store(false, Release);
            id
        };
        self.removals.fetch_add(1, Relaxed);
        self.retire(&mut core, id);
        true
    }

    /// Panics when the parts of the state disagree. Only for a store that nobody else uses meanwhile.
    pub(crate) fn check_invariants(&self) {
        let core = self.core();
        let mut extents = Vec::new();
        let mut queued = [(0, 0); 3];
        let mut indexed = 0;
        for id in 1..self.unused_id.load(Relaxed) {
            let control = self.control(id);
            if control.granule.load(Relaxed) == 0 {
                continue;
            }
            assert!(control.refs.load(Relaxed) > 0, "object {id} lives without a reference");
            let successor = control.successor.load(Relaxed);
            let mut own = true;
            self.for_each_extent(id, |extent| {
                if own {
                    extents.push(extent);
                    let owner = self.arena.word(extent.offset() + record::OWNER).load(Relaxed);
                    assert_eq!(owner, id, "extent {extent:?} belongs to another object");
                }
                own = successor == 0;
            });
            let (count, granules) = &mut queued[control.queue() as usize];
            *count += 1;
            *granules += self.granules(id);
            let is_indexed = control.indexed.load(Relaxed);
            assert_eq!(
                is_indexed,
                control.queue() != Queue::None,
                "object {id} in index but in no queue or reverse"
            );
            let magic = record::magic(&self.arena, self.offset(id));
            assert_eq!(
                is_indexed,
                magic == record::RECORD_MAGIC,
                "object {id} would not survive or be resurrected"
            );
            indexed += usize::from(is_indexed);
        }
        for (queue, fifo) in [(Queue::Small, &core.queues.small), (Queue::Main, &core.queues.main)] {
            assert_eq!(queued[queue as usize], (fifo.count, fifo.granules), "{queue:?} queue miscounted");
        }
        for shard in &self.shards {
            for id in shard.lock().ids() {
                assert!(self.control(id).indexed.load(Relaxed), "index names {id}, which has left it");
            }
        }
        assert_eq!(self.shards.iter().map(|s| s.lock().len()).sum::<usize>(), indexed, "index miscounted");
        core.space.check_invariants(&self.arena, &extents);
    }
}
