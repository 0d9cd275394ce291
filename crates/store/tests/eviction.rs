//! Hit ratios of the store against an LRU cache of the same number of objects.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::{BTreeMap, HashMap};
use support::Random;
use tidegate_store::{Config, Store};

const OBJECTS: usize = 20_000;
const REQUESTS: usize = 200_000;

/// Draws ranks from 0 with probability proportional to 1 / (rank + 1)^exponent.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new(objects: usize, exponent: f64) -> Self {
        let mut sum = 0.0;
        let mut cumulative: Vec<f64> = (1..=objects)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        cumulative.iter_mut().for_each(|c| *c /= sum);
        Self(cumulative)
    }

    fn draw(&self, random: &mut Random) -> u64 {
        let at = random.unit();
        self.0.partition_point(|c| *c < at) as u64
    }
}

fn zipf_trace(exponent: f64, seed: u64) -> Vec<u64> {
    let zipf = Zipf::new(OBJECTS, exponent);
    let mut random = Random(seed);
    (0..REQUESTS).map(|_| zipf.draw(&mut random)).collect()
}

/// The same with a crawler in between that asks for 2,000 objects once each, time and again.
fn scan_trace(exponent: f64, seed: u64) -> Vec<u64> {
    let mut scanned = OBJECTS as u64;
    let mut trace = Vec::new();
    for part in zipf_trace(exponent, seed).chunks(10_000) {
        trace.extend_from_slice(part);
        trace.extend(scanned..scanned + 2_000);
        scanned += 2_000;
    }
    trace
}

struct Lru {
    capacity: usize,
    clock: u64,
    last: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
}

impl Lru {
    fn request(&mut self, key: u64) -> bool {
        self.clock += 1;
        let before = self.last.insert(key, self.clock);
        if let Some(before) = before {
            self.order.remove(&before);
        }
        self.order.insert(self.clock, key);
        if self.order.len() > self.capacity
            && let Some((_, victim)) = self.order.pop_first()
        {
            self.last.remove(&victim);
        }
        before.is_some()
    }
}

/// Hits per request of the store and of LRU.
fn ratios(trace: &[u64]) -> (f64, f64) {
    let (store, _) = Store::open(Config::new(2 << 20)).unwrap();
    let body = [0; 700];
    let mut object_bytes = 0;
    let mut hits = 0;
    for key in trace {
        let key = key.to_le_bytes();
        if store.get(&key).is_some() {
            hits += 1;
            continue;
        }
        let mut writer = store.insert_sized(&key, b"", b"", 700).unwrap();
        writer.write(&body).unwrap();
        object_bytes = writer.commit().stored_bytes();
    }
    store.check_invariants();
    let capacity = (store.stats().capacity_bytes / object_bytes) as usize;
    let mut lru = Lru { capacity, clock: 0, last: HashMap::new(), order: BTreeMap::new() };
    let lru_hits = trace.iter().filter(|key| lru.request(**key)).count();
    (hits as f64 / trace.len() as f64, lru_hits as f64 / trace.len() as f64)
}

#[test]
fn on_zipf_traces_the_hit_ratio_is_at_least_that_of_lru() {
    for (seed, exponent) in [(1, 0.9), (2, 1.0), (3, 1.1)] {
        let (store, lru) = ratios(&zipf_trace(exponent, seed));
        println!("zipf {exponent}: store {store:.4}, LRU {lru:.4}");
        assert!(store >= lru, "zipf {exponent}, seed {seed}: store {store:.4}, LRU {lru:.4}");
    }
}

#[test]
fn on_scan_polluted_traces_the_hit_ratio_is_better_than_that_of_lru() {
    for (seed, exponent) in [(4, 0.9), (5, 1.0), (6, 1.1)] {
        let (store, lru) = ratios(&scan_trace(exponent, seed));
        println!("scan {exponent}: store {store:.4}, LRU {lru:.4}");
        // What a scan leaves is asked for once: it must not push out what is asked for again.
        assert!(store > lru * 1.05, "scan {exponent}, seed {seed}: store {store:.4}, LRU {lru:.4}");
    }
}
