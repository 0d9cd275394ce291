//! One control block an object: everything about it that changes while it is served. It lives outside the arena
//! so that a hit dirties no page of the file.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};

/// Bytes of arena for each object there can be: bounds the bookkeeping.
pub(crate) const ARENA_BYTES_PER_OBJECT: u64 = 768;
/// S3-FIFO §4.1 counts accesses in two bits.
pub(crate) const MAX_FREQUENCY: u8 = 3;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Queue {
    None,
    Small,
    Main,
}

#[derive(Default)]
#[repr(align(32))]
pub(crate) struct Control {
    /// References: one of the index, one for each pin, one of the writer, one of each object superseded by this
    /// one that shares its continuation extents. The last one gone frees the extents.
    pub(crate) refs: AtomicU32,
    frequency: AtomicU8,
    queue: AtomicU8,
    /// Written under the lock of the object's shard.
    pub(crate) indexed: AtomicBool,
    pub(crate) previous: AtomicU32,
    pub(crate) next: AtomicU32,
    /// The record's first granule; 0: this control block is free.
    pub(crate) granule: AtomicU32,
    /// The object that took over the continuation extents, or 0.
    pub(crate) successor: AtomicU32,
    pub(crate) hash: AtomicU64,
}

impl Control {
    pub(crate) fn queue(&self) -> Queue {
        match self.queue.load(Relaxed) {
            1 => Queue::Small,
            2 => Queue::Main,
            _ => Queue::None,
        }
    }

    pub(crate) fn set_queue(&self, queue: Queue) {
        self.queue.store(queue as u8, Relaxed);
    }

    pub(crate) fn frequency(&self) -> u8 {
        self.frequency.load(Relaxed)
    }

    pub(crate) fn set_frequency(&self, frequency: u8) {
        self.frequency.store(frequency, Relaxed);
    }

    /// Counts an access. Two cores may lose one of two counts; a hot object costs no store at all.
    #[inline]
    pub(crate) fn touch(&self) {
        let frequency = self.frequency();
        if frequency < MAX_FREQUENCY {
            self.set_frequency(frequency + 1);
        }
    }
}
