//! S3-FIFO (Yang et al., SOSP 2023): a small queue that newcomers must prove themselves in, a main queue, and a
//! ghost of what the small queue let go. Queues are lists through the control blocks.

use crate::control::{Control, Queue};
use std::sync::atomic::Ordering::Relaxed;

/// Share of the arena that the small queue aims at, in percent (S3-FIFO §4.1).
const SMALL_PERCENT: u64 = 10;
/// Ghost slots a bucket.
const WAYS: usize = 4;
/// Arena bytes for each ghost slot.
const ARENA_BYTES_PER_GHOST: u64 = 1024;

/// A first-in first-out list; entries join at the head and leave at the tail.
#[derive(Debug, Default)]
pub(crate) struct Fifo {
    head: u32,
    pub(crate) tail: u32,
    pub(crate) count: u64,
    pub(crate) granules: u64,
}

pub(crate) struct Queues {
    pub(crate) small: Fifo,
    pub(crate) main: Fifo,
    pub(crate) ghost: Ghost,
    small_target_granules: u64,
}

impl Queues {
    pub(crate) fn new(arena_bytes: u64, granules: u64) -> Self {
        Self {
            small: Fifo::default(),
            main: Fifo::default(),
            ghost: Ghost::new(arena_bytes),
            small_target_granules: granules * SMALL_PERCENT / 100,
        }
    }

    /// Whether the next victim comes from the small queue.
    pub(crate) fn small_is_next(&self) -> bool {
        self.small.count > 0 && (self.main.count == 0 || self.small.granules > self.small_target_granules)
    }

    fn fifo(&mut self, queue: Queue) -> Option<&mut Fifo> {
        match queue {
            Queue::None => None,
            Queue::Small => Some(&mut self.small),
            Queue::Main => Some(&mut self.main),
        }
    }

    /// Puts the object `id`, which is in no queue, at the head of `queue`.
    pub(crate) fn push(&mut self, controls: &[Control], id: u32, queue: Queue, granules: u64) {
        let control = &controls[id as usize];
        control.set_queue(queue);
        let Some(fifo) = self.fifo(queue) else { return };
        control.previous.store(0, Relaxed);
        control.next.store(fifo.head, Relaxed);
        if fifo.head == 0 {
            fifo.tail = id;
        } else {
            controls[fifo.head as usize].previous.store(id, Relaxed);
        }
        fifo.head = id;
        fifo.count += 1;
        fifo.granules += granules;
    }

    /// Takes `id` out of the queue it is in, if any.
    pub(crate) fn unlink(&mut self, controls: &[Control], id: u32, granules: u64) {
        let control = &controls[id as usize];
        let Some(fifo) = self.fifo(control.queue()) else { return };
        let (previous, next) = (control.previous.load(Relaxed), control.next.load(Relaxed));
        match previous {
            0 => fifo.head = next,
            p => controls[p as usize].next.store(next, Relaxed),
        }
        match next {
            0 => fifo.tail = previous,
            n => controls[n as usize].previous.store(previous, Relaxed),
        }
        fifo.count -= 1;
        fifo.granules -= granules;
        control.set_queue(Queue::None);
    }
}

/// Remembers the hashes of recently evicted objects: a slot is a 32-bit fingerprint and the time of its eviction,
/// counted in evictions.
pub(crate) struct Ghost {
    slots: Box<[u64]>,
    clock: u32,
}

impl Ghost {
    fn new(arena_bytes: u64) -> Self {
        let buckets = (arena_bytes / ARENA_BYTES_PER_GHOST) as usize / WAYS + 1;
        Self { slots: vec![0; buckets * WAYS].into(), clock: 1 }
    }

    pub(crate) fn bytes(&self) -> u64 {
        size_of_val(&*self.slots) as u64
    }

    fn bucket(&mut self, hash: u64) -> &mut [u64] {
        let buckets = (self.slots.len() / WAYS) as u64;
        let at = (((hash >> 32) * buckets) >> 32) as usize * WAYS;
        &mut self.slots[at..at + WAYS]
    }

    pub(crate) fn insert(&mut self, hash: u64) {
        self.clock = self.clock.wrapping_add(1).max(1);
        let clock = self.clock;
        let entry = u64::from(hash as u32) << 32 | u64::from(clock);
        let age = |slot: u64| if slot == 0 { u32::MAX } else { clock.wrapping_sub(slot as u32) };
        if let Some(oldest) = self.bucket(hash).iter_mut().max_by_key(|slot| age(**slot)) {
            *oldest = entry;
        }
    }

    /// Forgets `hash`; `true` when it was among the last `capacity` evictions.
    pub(crate) fn take(&mut self, hash: u64, capacity: u64) -> bool {
        let clock = self.clock;
        let found =
            self.bucket(hash).iter_mut().find(|slot| **slot != 0 && **slot >> 32 == hash & 0xffff_ffff);
        let Some(slot) = found else { return false };
        let age = clock.wrapping_sub(*slot as u32);
        *slot = 0;
        u64::from(age) < capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ghost_is_remembered_once_and_for_its_capacity_only() {
        let mut ghost = Ghost::new(1 << 20);
        ghost.insert((7 << 40) | 1);
        ghost.insert((8 << 40) | 2);
        assert!(ghost.take((7 << 40) | 1, 10));
        assert!(!ghost.take((7 << 40) | 1, 10), "remembered after it was taken");
        for n in 0..10_u64 {
            ghost.insert((n << 50) | (100 + n));
        }
        assert!(!ghost.take((8 << 40) | 2, 10), "remembered beyond the capacity");
        assert!(ghost.take((9 << 50) | 109, 10));
    }

    #[test]
    fn a_queue_gives_back_in_the_order_it_took() {
        let controls: Vec<Control> = (0..6).map(|_| Control::default()).collect();
        let mut queues = Queues::new(1 << 20, 4096);
        (1..6).for_each(|id| queues.push(&controls, id, Queue::Small, u64::from(id)));
        queues.unlink(&controls, 3, 3);
        let mut order = Vec::new();
        while queues.small.tail != 0 {
            let id = queues.small.tail;
            queues.unlink(&controls, id, u64::from(id));
            order.push(id);
        }
        assert_eq!(order, [1, 2, 4, 5]);
        assert_eq!((queues.small.count, queues.small.granules), (0, 0));
    }
}
