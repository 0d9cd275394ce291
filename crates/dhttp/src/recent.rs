//! A small map that forgets its oldest entry when it is full.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

#[derive(Debug)]
pub(crate) struct Recent<K, V> {
    capacity: usize,
    values: HashMap<K, V>,
    /// Every key of `values` once, oldest first.
    order: VecDeque<K>,
}

impl<K: Copy + Eq + Hash, V> Recent<K, V> {
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), values: HashMap::new(), order: VecDeque::new() }
    }

    pub fn get(&self, key: &K) -> Option<&V> {
        self.values.get(key)
    }

    pub fn insert(&mut self, key: K, value: V) {
        if self.values.insert(key, value).is_none() {
            self.order.push_back(key);
            if self.order.len() > self.capacity
                && let Some(oldest) = self.order.pop_front()
            {
                self.values.remove(&oldest);
            }
        }
    }

    pub fn retain(&mut self, mut keep: impl FnMut(&K) -> bool) {
        self.order.retain(|key| keep(key));
        self.values.retain(|key, _| keep(key));
    }

    pub fn len(&self) -> usize {
        self.values.len()
    }
}
