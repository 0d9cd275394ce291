//! How well the arena is used when it is full.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use support::{Random, put, verify};
use tidegate_store::{Config, Store};

fn mixed_length(random: &mut Random) -> usize {
    let length = match random.below(200) {
        0 => 100_000 + random.below(900_000),
        1..=20 => 8_000 + random.below(92_000),
        21..=100 => 1_000 + random.below(7_000),
        _ => random.below(1_000),
    };
    length as usize
}

#[test]
fn a_full_arena_with_mixed_sizes_has_little_free_space() {
    for sized in [true, false] {
        let (store, _) = Store::open(Config::new(32 << 20)).expect("anonymous store");
        let mut random = Random(21);
        let (mut least, mut pieces, mut large) = (u64::MAX, 0, 0);
        for n in 0..30_000_u64 {
            let object = put(&store, &n.to_le_bytes(), 1, mixed_length(&mut random), sized).expect("room");
            if (32_000..256_000).contains(&object.body_length()) {
                large += 1;
                pieces += object.body().count();
            }
            if n > 10_000 && n % 100 == 0 {
                least = least.min(store.stats().used_bytes);
            }
        }
        store.check_invariants();
        let stats = store.stats();
        let used = least as f64 / stats.capacity_bytes as f64;
        let pieces = f64::from(pieces as u32) / f64::from(large);
        println!("sized {sized}: at least {used:.3} used, {pieces:.2} extents for an object of 32..256 kB");
        println!("{stats:?}");
        assert!(used > 0.8, "sized {sized}: only {used:.3} of the arena used");
        assert!(pieces < if sized { 1.5 } else { 6.0 }, "sized {sized}: {pieces:.2} extents");
    }
}

#[test]
fn a_large_object_evicts_about_its_own_size_among_small_ones() {
    let (store, _) = Store::open(Config::new(16 << 20)).expect("anonymous store");
    for n in 0..20_000_u64 {
        put(&store, &n.to_le_bytes(), 1, 1000, true).expect("room");
    }
    let before = store.stats();
    let object = put(&store, b"large", 1, 2_000_000, true).expect("room");
    verify(&object);
    let after = store.stats();
    let evicted = (after.evictions - before.evictions) * 1280;
    assert!(evicted < 2 * 2_000_000, "{evicted} bytes evicted");
}

#[test]
fn a_pinned_object_stays_while_everything_else_is_evicted() {
    let (store, _) = Store::open(Config::new(1 << 20)).expect("anonymous store");
    let pin = put(&store, b"pinned", 1, 1000, true).expect("room");
    for n in 0..5_000_u64 {
        put(&store, &n.to_le_bytes(), 1, 1000, true).expect("room");
    }
    assert_eq!(verify(&pin), 1);
    assert!(store.get(b"pinned").is_some());
    assert!(store.get(&0_u64.to_le_bytes()).is_none());
    let mut pins = Vec::new();
    let refused = (0..5_000_u64).map(|n| put(&store, &n.to_le_bytes(), 2, 1000, true).map(|o| pins.push(o)));
    assert_eq!(refused.filter_map(Result::err).next(), Some(tidegate_store::InsertError::NoSpace));
    pins.iter().for_each(|pin| assert_eq!(verify(pin), 2));
}
