//! Which nodes there are: the arena grows up to its bound, and then addresses go for others.

use super::PrefixTree;
use super::index::{Index, NONE};
use super::node::{Key, Node, ROOT_LEVEL};
use super::window::Moment;

/// Addresses that one eviction compares.
const SAMPLE: usize = 8;

/// Nodes for which there is room whatever the bound, and whose number no bound reaches.
pub(super) const FEWEST_NODES: usize = 64;
const MOST_NODES: usize = NONE as usize / 2;

impl PrefixTree {
    pub(super) fn insert(&mut self, key: Key, parent: u32, moment: Moment) -> u32 {
        let index = match self.free.pop() {
            Some(index) => {
                let generation = self.nodes[index as usize].generation;
                self.nodes[index as usize] = Node::new(key, parent, generation, moment);
                index
            }
            None => {
                self.nodes.push(Node::new(key, parent, 0, moment));
                (self.nodes.len() - 1) as u32
            }
        };
        self.nodes[parent as usize].children += 1;
        let nodes = &self.nodes;
        self.index.insert(index, |node| nodes[node as usize].key);
        index
    }

    /// Removes addresses until `count` nodes fit; gives up where only addresses with open connections are left.
    pub(super) fn make_room(&mut self, count: usize, moment: Moment) -> bool {
        while self.len() + count > self.capacity {
            let Some(victim) = self.least_valuable(moment) else { return false };
            self.evicted += 1;
            self.remove(victim);
        }
        true
    }

    /// The least valuable of a few addresses here and there; where there are none that may go, the next that may.
    fn least_valuable(&mut self, moment: Moment) -> Option<u32> {
        let mut least: Option<((bool, u64), u32)> = None;
        let mut seen = 0;
        for looked_at in 0..self.nodes.len() + 4 * SAMPLE {
            if looked_at < 4 * SAMPLE {
                // Neighbours in the arena came one after the other and are often of one kind.
                self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                self.hand = (self.dice >> 33) as usize % self.nodes.len();
            } else if least.is_some() {
                break;
            } else {
                self.hand = (self.hand + 1) % self.nodes.len();
            }
            let node = &self.nodes[self.hand];
            if node.children > 0 || node.open > 0 || node.is_free() || node.key.level == ROOT_LEVEL {
                continue;
            }
            let value = node.value(moment);
            if least.is_none_or(|(known, _)| value < known) {
                least = Some((value, self.hand as u32));
            }
            seen += 1;
            if seen == SAMPLE {
                break;
            }
        }
        least.map(|(_, index)| index)
    }

    /// Removes a node without children, and each prefix around it that has no other.
    fn remove(&mut self, index: u32) {
        let mut at = index;
        while self.nodes[at as usize].children == 0 && self.nodes[at as usize].open == 0 && at != 0 {
            let nodes = &self.nodes;
            self.index.remove(at, |node| nodes[node as usize].key);
            let node = &mut self.nodes[at as usize];
            let parent = node.parent;
            node.generation = node.generation.wrapping_add(1);
            node.parent = NONE;
            self.free.push(at);
            self.nodes[parent as usize].children -= 1;
            at = parent;
        }
    }
}

/// The most nodes whose memory, with that of their index, is within the bound; at least a few.
pub(super) fn capacity_within(memory_bytes: usize) -> usize {
    let takes = |nodes: usize| nodes * size_of::<Node>() + Index::most_bytes(nodes);
    let (mut fits, mut too_many) = (FEWEST_NODES, MOST_NODES);
    while too_many - fits > 1 {
        let middle = fits.midpoint(too_many);
        match takes(middle) <= memory_bytes {
            true => fits = middle,
            false => too_many = middle,
        }
    }
    fits
}
