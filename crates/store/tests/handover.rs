//! An arena that changes hands while both stores serve from it. Two stores in one process stand for two processes: all
//! that they share is the file.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use support::{Random, body_of, put, verify};
use tidegate_store::{
    Config, Handed, InsertError, Object, Progress, Store, StoreError, Taken, Unusable, Visit,
};

const BUDGET: u64 = 4 << 20;

fn config(path: Option<&Path>) -> Config {
    Config { path: path.map(Into::into), max_object_bytes: 1 << 20, ..Config::new(BUDGET) }
}

fn open(path: Option<&Path>) -> Store {
    Store::open(config(path)).unwrap().0
}

fn take_over(path: Option<&Path>, handed: Handed) -> (Store, u64) {
    let (store, report) = Store::take_over(config(path), handed).unwrap();
    assert_eq!((report.torn_dropped, report.superseded), (0, 0));
    assert!(report.set_aside.is_none());
    (store, report.objects)
}

fn key(n: u64) -> [u8; 8] {
    n.to_le_bytes()
}

/// Every object that is found, by its key; each byte of it is checked.
fn contents(store: &Store) -> HashMap<Vec<u8>, u64> {
    let mut keys = Vec::new();
    store.for_each(|key, _| {
        keys.push(key.to_vec());
        Visit::Keep
    });
    keys.into_iter().filter_map(|key| store.get(&key).map(|object| (key, verify(&object)))).collect()
}

/// Stores newcomers until their own kind has to make room for them.
fn store_until_space_is_reused(store: &Store, from: u64) {
    let before = store.stats().evictions;
    for n in 0..10_000 {
        let _ = put(store, &key(from + n), n, 5_000, n % 2 == 0);
        if store.stats().evictions > before + 20 {
            return;
        }
    }
    panic!("nothing was evicted: {:?}", store.stats());
}

#[test]
fn frozen_store_serves_and_stores_nothing_until_it_thaws() {
    let store = open(None);
    (0..50).for_each(|n| drop(put(&store, &key(n), n, 3_000, true).unwrap()));
    let before = contents(&store);
    let mut under_way = store.insert(b"under way", b"", b"").unwrap();
    under_way.write(&body_of(b"under way", 1, 300_000)).unwrap();
    let follower = under_way.follow();
    let pinned = store.get(&key(7)).unwrap();
    let _handed = store.freeze().unwrap();
    assert!(matches!(store.freeze(), Err(StoreError::StillRead)), "one at a time");
    assert_eq!(put(&store, &key(99), 1, 10, true).unwrap_err(), InsertError::Frozen);
    assert_eq!(store.replace_meta(&key(7), &pinned, b"", b"").unwrap_err(), InsertError::Frozen);
    assert_eq!(contents(&store), before);
    // Whoever reads along gets all of it, though it is not stored.
    under_way.write(&body_of(b"", 2, 20_000)).unwrap();
    drop(under_way.commit());
    assert_eq!((follower.progress(), follower.available()), (Progress::Aborted, 320_000));
    assert_eq!(follower.body_at(0)[..1000], body_of(b"under way", 1, 300_000)[..1000]);
    assert!(store.get(b"under way").is_none());
    assert!(store.remove(&key(7)));
    drop((pinned, follower));
    store.thaw();
    store.check_invariants();
    assert_eq!(contents(&store).len(), 49);
    put(&store, &key(99), 1, 10, true).unwrap();
    store.check_invariants();
}

#[test]
fn successor_finds_everything_and_never_writes_where_the_first_may_read() {
    let directory = tempfile::tempdir().unwrap();
    for path in [Some(directory.path()), None] {
        let old = open(path);
        // More than there is room for: the arena is full.
        (0..800).for_each(|n| drop(put(&old, &key(n), n, 7_000, n % 3 == 0).unwrap()));
        put(&old, b"large", 1, 900_000, false).unwrap();
        let removed = old.get(b"large").unwrap();
        assert!(old.remove(b"large"));
        let mut under_way = old.insert(b"under way", b"", b"").unwrap();
        under_way.write(&body_of(b"under way", 1, 200_000)).unwrap();
        let follower = under_way.follow();
        let handed = old.freeze().unwrap();
        let before = contents(&old);
        let (new, found) = take_over(path, handed);
        assert_eq!(contents(&new), before);
        assert_eq!(found, before.len() as u64);
        assert_eq!(put(&new, &key(9_000), 1, 10, true).unwrap_err(), InsertError::Frozen);
        let pinned: Vec<Object> = before.keys().map(|key| old.get(key).unwrap()).collect();
        new.thaw();
        store_until_space_is_reused(&new, 10_000);
        under_way.write(&body_of(b"more", 1, 10_000)).unwrap();
        for object in pinned.iter().chain([&removed]) {
            verify(object);
        }
        let (mut at, mut read) = (0, Vec::new());
        while at < follower.available() {
            read.extend_from_slice(follower.body_at(at));
            at = read.len() as u64;
        }
        assert!(read == [body_of(b"under way", 1, 200_000), body_of(b"more", 1, 10_000)].concat());
        let kept = contents(&new);
        assert!(before.keys().all(|key| kept.contains_key(key)), "something old was evicted for nothing");
        new.check_invariants();
        drop((pinned, removed, follower, under_way));
        drop(old);
        new.lift_quarantine();
        new.check_invariants();
        assert!(kept.keys().all(|key| new.get(key).is_some()));
        // All of the arena is there again.
        (0..800).for_each(|n| drop(put(&new, &key(50_000 + n), n, 7_000, true).unwrap()));
        new.check_invariants();
        drop(new);
        if let Some(path) = path {
            let again = open(Some(path));
            contents(&again);
            again.check_invariants();
        }
    }
}

#[test]
fn what_one_side_removes_or_replaces_the_other_serves_no_more() {
    let old = open(None);
    (0..20).for_each(|n| drop(put(&old, &key(n), n, 2_000, true).unwrap()));
    let (new, _) = take_over(None, old.freeze().unwrap());
    let validated = new.get(&key(2)).unwrap();
    assert!(old.remove(&key(1)) && old.remove(&key(2)) && old.remove(&key(3)));
    assert!(new.get(&key(1)).is_none());
    new.thaw();
    // What the other has dropped comes to life no more.
    let meta = validated.meta().to_vec();
    let revived = new.replace_meta(&key(2), &validated, &meta, validated.head());
    assert_eq!(revived.unwrap_err(), InsertError::Superseded);
    assert!(new.remove(&key(4)));
    put(&new, &key(5), 55, 100, true).unwrap();
    assert!(old.get(&key(4)).is_none() && old.get(&key(5)).is_none());
    assert_eq!(verify(&new.get(&key(5)).unwrap()), 55);
    drop((old, validated));
    new.lift_quarantine();
    // Also what nobody has asked for in between.
    assert_eq!(new.stats().objects, 20 - 4);
    assert!(new.get(&key(3)).is_none());
    new.check_invariants();
}

#[test]
fn first_store_goes_on_after_its_successor_failed_whatever_that_has_written() {
    let directory = tempfile::tempdir().unwrap();
    for has_written in [false, true] {
        let old = open(Some(directory.path()));
        (0..400).for_each(|n| drop(put(&old, &key(n), n, 7_000, n % 2 == 0).unwrap()));
        let pinned = old.get(&key(399)).unwrap();
        let (new, _) = take_over(Some(directory.path()), old.freeze().unwrap());
        let mut removed = Vec::new();
        if has_written {
            new.thaw();
            store_until_space_is_reused(&new, 10_000);
            removed = contents(&old).into_keys().take(5).collect();
            assert!(removed.iter().all(|key| new.remove(key)));
        }
        let before = contents(&old);
        drop(new);
        old.thaw();
        old.check_invariants();
        assert_eq!(contents(&old), before);
        assert!(removed.iter().all(|key| old.get(key).is_none()));
        (0..400).for_each(|n| drop(put(&old, &key(1_000 + n), n, 7_000, true).unwrap()));
        verify(&pinned);
        old.check_invariants();
        drop(pinned);
        let before = contents(&old);
        drop(old);
        let again = open(Some(directory.path()));
        // Nothing of the one that failed is found.
        assert_eq!(contents(&again), before);
        again.check_invariants();
    }
}

#[test]
fn two_stores_over_one_arena_serve_no_wrong_and_no_outdated_byte() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let directory = tempfile::tempdir().unwrap();
        let path = (seed % 2 == 0).then_some(directory.path());
        let mut old = open(path);
        let mut versions: HashMap<u64, u64> = HashMap::new();
        let mut version = 0;
        let length = |random: &mut Random| match random.below(12) {
            0 => random.below(200_000) as usize,
            _ => random.below(9_000) as usize,
        };
        for generation in 0..3 {
            for _ in 0..400 {
                let n = random.below(500);
                version += 1;
                put(&old, &key(n), version, length(&mut random), random.below(2) == 0).unwrap();
                versions.insert(n, version);
            }
            let handed = old.freeze().unwrap();
            let (new, _) = take_over(path, handed);
            let mut pinned: Vec<Object> = Vec::new();
            let commit_at = random.below(100);
            let fails = random.below(4) == 0;
            for step in 0..600 {
                if step == commit_at {
                    new.thaw();
                }
                let n = random.below(500);
                match random.below(8) {
                    0..3 => {
                        version += 1;
                        let sized = random.below(2) == 0;
                        if put(&new, &key(n), version, length(&mut random), sized).is_ok() {
                            versions.insert(n, version);
                        }
                    }
                    3 => {
                        let side = if random.below(2) == 0 { &old } else { &new };
                        // What a side has never seen it cannot remove: whoever removes tells the other side, too.
                        side.remove(&key(n));
                        new.remove(&key(n));
                        versions.remove(&n);
                    }
                    4 => {
                        if let Some(object) = new.get(&key(n)) {
                            let meta = object.meta().to_vec();
                            let _ = new.replace_meta(&key(n), &object, &meta, object.head());
                        }
                    }
                    _ => {
                        for side in [&old, &new] {
                            let Some(object) = side.get(&key(n)) else { continue };
                            assert_eq!(Some(&verify(&object)), versions.get(&n), "seed {seed}, key {n}");
                            pinned.push(object);
                        }
                    }
                }
                if pinned.len() > 60 {
                    verify(&pinned.swap_remove(random.below(60) as usize));
                }
            }
            pinned.iter().for_each(|object| _ = verify(object));
            drop(pinned);
            if fails {
                drop(new);
                old.thaw();
            } else {
                drop(old);
                new.lift_quarantine();
                old = new;
            }
            old.check_invariants();
            for (key, found) in contents(&old) {
                let n = u64::from_le_bytes(key.try_into().unwrap());
                assert_eq!(Some(&found), versions.get(&n), "seed {seed}, generation {generation}, key {n}");
            }
            if fails {
                // What the one that failed has stored is gone with it.
                versions.retain(|n, _| old.get(&key(*n)).is_some());
            }
        }
    }
}

#[test]
fn successor_of_another_configuration_opens_what_that_says() {
    let directories = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [first, other] = [0, 1].map(|n| Some(directories[n].path()));
    let old = open(first);
    put(&old, b"a", 1, 10, true).unwrap();
    for path in [other, None] {
        let (new, report) = Store::take_over(config(path), old.freeze().unwrap()).unwrap();
        assert_eq!(report.objects, 0);
        // It is nobody's successor.
        put(&new, b"a", 1, 10, true).unwrap();
        drop(new);
        old.thaw();
    }
    assert_eq!(contents(&old).len(), 1);
    // In the same place there is no room for another one, of another size or of another version: the file stays as it is.
    let larger = Config { budget_bytes: 2 * BUDGET, ..config(first) };
    let error = Store::take_over(larger, old.freeze().unwrap()).unwrap_err();
    assert!(matches!(error, StoreError::NotTaken { reason: Unusable::Size { .. }, .. }), "{error}");
    old.thaw();
    put(&old, b"b", 1, 10, true).unwrap();
    assert_eq!(contents(&old).len(), 2);
    let handed = old.freeze().unwrap();
    handed.arena.write_all_at(&9_u32.to_le_bytes(), 8).unwrap();
    let error = Store::take_over(config(first), handed).unwrap_err();
    assert!(
        matches!(error, StoreError::NotTaken { reason: Unusable::Version { found: 9, .. }, .. }),
        "{error}"
    );
}

#[test]
fn lock_is_held_by_whoever_of_the_two_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let old = open(Some(directory.path()));
    let (new, _) = take_over(Some(directory.path()), old.freeze().unwrap());
    let is_in_use = || matches!(Store::open(config(Some(directory.path()))), Err(StoreError::InUse { .. }));
    assert!(is_in_use());
    drop(old);
    assert!(is_in_use());
    drop(new);
    assert!(!is_in_use());
}

#[test]
fn damaged_hand_over_is_refused() {
    let store = open(None);
    put(&store, b"a", 1, 10, true).unwrap();
    let file = || File::from(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let handed = store.freeze().unwrap();
    let short = Handed { taken: Taken(file()), arena: handed.arena.try_clone().unwrap(), lock: None };
    assert!(matches!(Store::take_over(config(None), short), Err(StoreError::Io { .. })));
    let empty = file();
    empty.write_all_at(&[0], BUDGET - 1).unwrap();
    let no_arena = Handed { taken: Taken(handed.taken.0.try_clone().unwrap()), arena: empty, lock: None };
    assert!(matches!(Store::take_over(config(None), no_arena), Err(StoreError::NotTaken { .. })));
    // The right one is as good as before.
    let (new, found) = take_over(None, handed);
    assert_eq!((found, verify(&new.get(b"a").unwrap())), (1, 1));
}
