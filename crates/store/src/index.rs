//! Hash to object: shards of open-addressing tables, eight bytes a slot. A slot holds the hash's upper half, which
//! also says where its probe sequence starts, and the control id; 0 is an empty slot.

use crate::control::Control;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Slots a shard has beyond its share, against uneven hashing.
const SPARE_SLOTS: usize = 64;
/// Objects per shard below which more shards would only waste slots.
const OBJECTS_PER_SHARD: usize = 1024;
const MAX_SHARDS: usize = 64;

/// A part of the index with its own lock, on cache lines of its own.
#[repr(align(128))]
pub(crate) struct Shard {
    /// Where the slots lie and how many they are, which does not change; only for [`Self::prefetch`].
    first: AtomicPtr<u64>,
    length: usize,
    slots: Mutex<Slots>,
}

pub(crate) struct Slots {
    slots: Box<[u64]>,
    count: usize,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
}

impl Shard {
    fn new(length: usize) -> Self {
        let mut slots: Box<[u64]> = vec![0; length].into();
        let first = AtomicPtr::new(slots.as_mut_ptr());
        let slots = Mutex::new(Slots { slots, count: 0, hits: 0, misses: 0 });
        Self { first, length, slots }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the processor fetch what a look for `hash` reads first. The index of a large cache is in no processor's
    /// cache, and whoever knows early what it will look for need not wait for the memory then.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64) {
        crate::memory::prefetch(self.first.load(Relaxed).wrapping_add(home(hash, self.length)));
    }
}

/// Shards for at most `objects` objects.
pub(crate) fn shards(objects: usize) -> Box<[Shard]> {
    let shards = (objects / OBJECTS_PER_SHARD).clamp(1, MAX_SHARDS).next_power_of_two();
    let slots = objects.div_ceil(shards) * 4 / 3 + SPARE_SLOTS;
    (0..shards).map(|_| Shard::new(slots)).collect()
}

/// Where the probe sequence of a hash, or of a slot's upper half, begins.
#[inline]
fn home(slot_or_hash: u64, length: usize) -> usize {
    (((slot_or_hash >> 32) * length as u64) >> 32) as usize
}

impl Slots {
    pub(crate) fn bytes(&self) -> u64 {
        size_of_val(&*self.slots) as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = u32> {
        self.slots.iter().filter(|s| **s != 0).map(|s| *s as u32)
    }

    fn home(&self, slot_or_hash: u64) -> usize {
        home(slot_or_hash, self.slots.len())
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    /// The id under `hash` for which `is_it` holds.
    #[inline]
    pub(crate) fn find(&self, controls: &[Control], hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let mut at = self.home(hash);
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return None;
            }
            if slot >> 32 == hash >> 32 {
                let id = slot as u32;
                if controls[id as usize].hash.load(Relaxed) == hash && is_it(id) {
                    return Some(id);
                }
            }
            at = self.after(at);
        }
    }

    /// Adds an entry; `false` when the shard is full. One slot always stays empty: it ends every probe.
    pub(crate) fn insert(&mut self, hash: u64, id: u32) -> bool {
        if self.count + 1 >= self.slots.len() {
            return false;
        }
        let mut at = self.home(hash);
        while self.slots[at] != 0 {
            at = self.after(at);
        }
        self.slots[at] = (hash >> 32) << 32 | u64::from(id);
        self.count += 1;
        true
    }

    fn position(&self, hash: u64, id: u32) -> Option<usize> {
        let wanted = (hash >> 32) << 32 | u64::from(id);
        let mut at = self.home(hash);
        while self.slots[at] != wanted {
            if self.slots[at] == 0 {
                return None;
            }
            at = self.after(at);
        }
        Some(at)
    }

    /// Makes the entry of `old` point to `new`, which has the same hash.
    pub(crate) fn replace(&mut self, hash: u64, old: u32, new: u32) -> bool {
        let Some(at) = self.position(hash, old) else { return false };
        self.slots[at] = (hash >> 32) << 32 | u64::from(new);
        true
    }

    /// Removes an entry and moves later ones of the same run back, so that no tombstones pile up.
    pub(crate) fn remove(&mut self, hash: u64, id: u32) -> bool {
        let Some(mut hole) = self.position(hash, id) else { return false };
        let length = self.slots.len();
        let mut at = hole;
        loop {
            at = self.after(at);
            let slot = self.slots[at];
            if slot == 0 {
                break;
            }
            let from_home = (at + length - self.home(slot)) % length;
            let from_hole = (at + length - hole) % length;
            if from_home >= from_hole {
                self.slots[hole] = slot;
                hole = at;
            }
        }
        self.slots[hole] = 0;
        self.count -= 1;
        true
    }
}
