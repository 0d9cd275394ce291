//! From a prefix to its node: open addressing over node numbers, four bytes an entry.

use std::hash::{DefaultHasher, Hasher};

use super::Key;

/// Slots of an index that has no nodes yet.
const FIRST_SLOTS: usize = 64;

/// No node.
pub(super) const NONE: u32 = u32::MAX;

/// Finds nodes by their keys. The keys stand in the nodes; callers say which key a node has.
#[derive(Debug)]
pub(super) struct Index {
    slots: Vec<u32>,
    used: usize,
    seed: u64,
}

impl Index {
    pub(super) fn new(seed: u64) -> Self {
        Self { slots: vec![NONE; FIRST_SLOTS], used: 0, seed }
    }

    pub(super) fn len(&self) -> usize {
        self.used
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<u32>()
    }

    /// The most memory that an index of so many nodes takes: with the slots that the last ones were moved out of.
    pub(super) fn most_bytes(nodes: usize) -> usize {
        let mut slots = FIRST_SLOTS;
        while nodes * 4 > slots * 3 {
            slots *= 2;
        }
        (slots + slots / 2) * size_of::<u32>()
    }

    /// Keyed, so that nobody can choose addresses that meet in one slot.
    fn home(&self, key: Key) -> usize {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.seed);
        hasher.write_u64(key.bits);
        hasher.write_u8(key.level);
        hasher.finish() as usize & (self.slots.len() - 1)
    }

    pub(super) fn find(&self, key: Key, key_of: impl Fn(u32) -> Key) -> Option<u32> {
        let mut slot = self.home(key);
        loop {
            match self.slots[slot] {
                NONE => return None,
                node if key_of(node) == key => return Some(node),
                _ => slot = (slot + 1) & (self.slots.len() - 1),
            }
        }
    }

    /// Adds a node whose key is not there yet.
    pub(super) fn insert(&mut self, node: u32, key_of: impl Fn(u32) -> Key) {
        if (self.used + 1) * 4 > self.slots.len() * 3 {
            let doubled = vec![NONE; self.slots.len() * 2];
            let old = std::mem::replace(&mut self.slots, doubled);
            for node in old.into_iter().filter(|node| *node != NONE) {
                self.place(node, key_of(node));
            }
        }
        self.place(node, key_of(node));
        self.used += 1;
    }

    fn place(&mut self, node: u32, key: Key) {
        let mut slot = self.home(key);
        while self.slots[slot] != NONE {
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        self.slots[slot] = node;
    }

    /// Removes a node that is there. Those behind it move up, so that no search ends too early.
    pub(super) fn remove(&mut self, node: u32, key_of: impl Fn(u32) -> Key) {
        let mask = self.slots.len() - 1;
        let mut slot = self.home(key_of(node));
        while self.slots[slot] != node {
            if self.slots[slot] == NONE {
                return;
            }
            slot = (slot + 1) & mask;
        }
        self.used -= 1;
        let mut hole = slot;
        let mut next = slot;
        loop {
            self.slots[hole] = NONE;
            loop {
                next = (next + 1) & mask;
                let moved = self.slots[next];
                if moved == NONE {
                    return;
                }
                let home = self.home(key_of(moved));
                // It may fill the hole unless its home lies between the hole and itself.
                if (next.wrapping_sub(home) & mask) >= (next.wrapping_sub(hole) & mask) {
                    self.slots[hole] = moved;
                    hole = next;
                    break;
                }
            }
        }
    }
}
