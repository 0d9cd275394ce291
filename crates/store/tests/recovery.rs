//! What is found again after a restart, from intact and from damaged files.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::fs;
use std::path::Path;
use support::{Random, put, verify};
use tidegate_store::{Config, MIN_BUDGET_BYTES, Store, StoreError, Unusable, Visit};

const BUDGET: u64 = 2 * MIN_BUDGET_BYTES;

fn open(path: &Path) -> (Store, tidegate_store::OpenReport) {
    Store::open(Config::new(BUDGET).with_path(path)).unwrap()
}

fn fill(store: &Store, objects: u64) {
    for n in 0..objects {
        let length = if n % 10 == 0 { 90_000 } else { 100 * n as usize };
        put(store, &n.to_le_bytes(), n, length, n % 2 == 0).unwrap();
    }
}

fn verify_all(store: &Store) -> u64 {
    store.check_invariants();
    let mut objects = 0;
    let mut keys = Vec::new();
    store.for_each(|key, _| {
        keys.push(key.to_vec());
        Visit::Keep
    });
    for key in keys {
        let object = store.get(&key).unwrap();
        assert_eq!(verify(&object).to_le_bytes(), key[..]);
        objects += 1;
    }
    objects
}

#[test]
fn a_reopened_store_holds_what_was_committed_and_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let (store, report) = open(directory.path());
    assert_eq!(report.objects, 0);
    fill(&store, 40);
    assert!(store.remove(&7_u64.to_le_bytes()));
    put(&store, &8_u64.to_le_bytes(), 8, 5, true).unwrap();
    let mut unfinished = store.insert(b"unfinished", b"", b"").unwrap();
    unfinished.write(b"half a body").unwrap();
    drop(unfinished);
    let before = store.stats();
    store.sync().unwrap();
    drop(store);
    let (store, report) = open(directory.path());
    assert_eq!((report.objects, report.torn_dropped), (before.objects, 0));
    assert_eq!(report.bytes, before.used_bytes);
    assert_eq!(verify_all(&store), 39);
    assert_eq!(store.get(&8_u64.to_le_bytes()).unwrap().body_length(), 5);
    assert!(store.get(&7_u64.to_le_bytes()).is_none());
    fill(&store, 60);
    store.check_invariants();
}

#[test]
fn a_file_that_was_removed_or_replaced_is_not_said_to_be_written() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = open(directory.path());
    let file = directory.path().join("arena");
    let is_removed = || matches!(store.sync(), Err(StoreError::Removed { path }) if path == file);
    assert!(!is_removed());
    fs::rename(&file, directory.path().join("away")).unwrap();
    assert!(is_removed());
    fs::write(&file, b"another").unwrap();
    assert!(is_removed());
    fs::rename(directory.path().join("away"), &file).unwrap();
    store.sync().unwrap();
    Store::open(Config::new(BUDGET)).unwrap().0.sync().unwrap();
}

#[test]
fn meta_replaced_after_a_304_survives_with_a_body_in_several_extents() {
    let directory = tempfile::tempdir().unwrap();
    let config = || Config { max_object_bytes: 1 << 20, ..Config::new(4 << 20).with_path(directory.path()) };
    let (store, _) = Store::open(config()).unwrap();
    let old = put(&store, b"large", 3, 900_000, false).unwrap();
    assert!(old.body().count() > 1);
    let meta = [old.meta(), b"revalidated"].concat();
    let used = store.stats().used_bytes;
    let new = store.replace_meta(b"large", &old, &meta, old.head()).unwrap();
    assert!(store.stats().used_bytes - used < 300_000, "the whole body was copied");
    drop(new);
    assert_eq!(verify(&old), 3);
    drop(old);
    store.check_invariants();
    drop(store);
    let (store, report) = Store::open(config()).unwrap();
    assert_eq!((report.objects, report.torn_dropped), (1, 0));
    let object = store.get(b"large").unwrap();
    assert_eq!(object.meta(), meta);
    assert_eq!(verify(&object), 3);
}

#[test]
fn a_second_process_on_the_same_directory_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = open(directory.path());
    let second = Store::open(Config::new(BUDGET).with_path(directory.path()));
    assert!(matches!(second, Err(StoreError::InUse { .. })));
    let pin = put(&store, b"pinned", 1, 10, true).unwrap();
    drop(store);
    let second = Store::open(Config::new(BUDGET).with_path(directory.path()));
    assert!(matches!(second, Err(StoreError::InUse { .. })), "the arena is still mapped");
    drop(pin);
    assert_eq!(open(directory.path()).1.objects, 1);
}

#[test]
fn an_unusable_file_is_set_aside_with_the_reason_and_few_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    let arena = directory.path().join("arena");
    type Damage = fn(&Path);
    type Expected = fn(Unusable) -> bool;
    let damages: [(Damage, Expected); 6] = [
        (|p| fs::write(p, b"").unwrap(), |r| r == Unusable::Magic),
        (|p| fs::write(p, [7; 5000]).unwrap(), |r| r == Unusable::Magic),
        (|p| flip(p, 8), |r| matches!(r, Unusable::Version { .. })),
        (|p| flip(p, 25), |r| r == Unusable::Superblock),
        (
            |p| fs::OpenOptions::new().write(true).open(p).unwrap().set_len(BUDGET / 2).unwrap(),
            |r| r == Unusable::Size { found: BUDGET / 2, expected: BUDGET },
        ),
        (
            |p| {
                fs::remove_file(p).unwrap();
                std::os::unix::fs::symlink("/dev/zero", p).unwrap();
            },
            |r| r == Unusable::Magic,
        ),
    ];
    for (damage, expected) in damages {
        let (store, _) = open(directory.path());
        fill(&store, 5);
        drop(store);
        damage(&arena);
        let (store, report) = open(directory.path());
        let set_aside = report.set_aside.expect("set aside");
        assert!(expected(set_aside.reason), "{}", set_aside.reason);
        assert!(set_aside.path.symlink_metadata().is_ok());
        assert_eq!((report.objects, store.stats().objects), (0, 0));
        fill(&store, 5);
    }
    let kept = fs::read_dir(directory.path()).unwrap();
    let kept =
        kept.filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains("set-aside")).count();
    assert_eq!(kept, 2);
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x41;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_file_with_damaged_bytes_gives_intact_objects_only() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = open(directory.path());
    fill(&store, 60);
    drop(store);
    let arena = directory.path().join("arena");
    let intact = fs::read(&arena).unwrap();
    let (mut dropped, mut survived) = (0, 0);
    for seed in 0..120_u64 {
        let mut random = Random(seed);
        let mut bytes = intact.clone();
        for _ in 0..1 + random.below(60) {
            let at = 4096 + random.below(BUDGET - 4096) as usize;
            // Words at the start of a granule are where the format lives: damage those as often as bodies.
            let at = if random.below(2) == 0 { at } else { at / 256 * 256 + random.below(128) as usize };
            match random.below(3) {
                0 => bytes[at] ^= 1 << random.below(8),
                1 => bytes[at] = random.next() as u8,
                _ => {
                    let from = random.below(BUDGET - 4096) as usize;
                    let length = (random.below(4096) as usize).min(bytes.len() - at.max(from));
                    bytes.copy_within(from..from + length, at);
                }
            }
        }
        fs::write(&arena, bytes).unwrap();
        let (store, report) = open(directory.path());
        assert!(report.set_aside.is_none(), "seed {seed}");
        dropped += report.torn_dropped;
        survived += verify_all(&store);
        fill(&store, 90);
        store.check_invariants();
    }
    assert!(dropped > 100 && survived > 1000, "{dropped} dropped, {survived} survived");
}

#[test]
fn a_body_that_imitates_a_record_is_not_taken_for_one() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = open(directory.path());
    put(&store, b"victim", 1, 100, true).unwrap();
    drop(store);
    let file = fs::read(directory.path().join("arena")).unwrap();
    let at = (0..file.len()).step_by(256).find(|at| file[*at..].starts_with(b"TGrc")).unwrap();
    let record = file[at..at + 256].to_vec();
    let (store, _) = open(directory.path());
    let mut writer = store.insert_sized(b"attacker", b"", b"", 257 * 256).unwrap();
    // Wherever the body starts, one of the copies lies at the start of a granule.
    for _ in 0..256 {
        writer.write(&[0]).unwrap();
        writer.write(&record).unwrap();
    }
    let object = writer.commit();
    drop(object);
    store.remove(b"attacker");
    store.remove(b"victim");
    drop(store);
    let (store, report) = open(directory.path());
    assert_eq!(report.objects, 0);
    assert!(store.get(b"victim").is_none());
}

#[test]
fn records_of_another_file_are_not_taken_over() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for directory in [&one, &other] {
        fill(&open(directory.path()).0, 30);
    }
    let from = fs::read(one.path().join("arena")).unwrap();
    let mut to = fs::read(other.path().join("arena")).unwrap();
    to[4096..].copy_from_slice(&from[4096..]);
    fs::write(other.path().join("arena"), to).unwrap();
    let (_, report) = open(other.path());
    assert_eq!((report.objects, report.torn_dropped), (0, 30));
}

#[test]
fn an_older_record_of_the_same_key_is_dropped_for_good() {
    let directory = tempfile::tempdir().unwrap();
    let arena = directory.path().join("arena");
    let (store, _) = open(directory.path());
    // The old record is to lie within a free block, not at its start, where it would be overwritten anyway.
    put(&store, b"before it", 1, 100, true).unwrap();
    put(&store, b"key", 1, 100, true).unwrap();
    let old = fs::read(&arena).unwrap();
    put(&store, b"key", 2, 100, true).unwrap();
    store.remove(b"before it");
    drop(store);
    let mut both = fs::read(&arena).unwrap();
    let at = (4096..old.len()).step_by(256).filter(|at| old[*at..].starts_with(b"TGrc")).nth(1).unwrap();
    both[at..at + 256].copy_from_slice(&old[at..at + 256]);
    fs::write(&arena, both).unwrap();
    let (store, report) = open(directory.path());
    assert_eq!((report.objects, report.superseded), (1, 1));
    assert_eq!(verify(&store.get(b"key").unwrap()), 2);
    assert!(store.remove(b"key"));
    drop(store);
    let (_, report) = open(directory.path());
    assert_eq!((report.objects, report.torn_dropped), (0, 0));
}

#[test]
fn records_that_lie_about_their_extents_do_no_harm() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = open(directory.path());
    // Large objects whose extents fill holes before and after their heads.
    (0..470_u64).for_each(|n| drop(put(&store, &n.to_le_bytes(), n, 4000, true).unwrap()));
    (0..470_u64).filter(|n| n % 3 == 1).for_each(|n| assert!(store.remove(&n.to_le_bytes())));
    let large = (1000..1010_u64).map(|n| put(&store, &n.to_le_bytes(), n, 40_000, false).unwrap());
    let extents = large.map(|object| object.body().count()).sum::<usize>();
    assert!(extents > 40, "{extents}");
    drop(store);
    let arena = directory.path().join("arena");
    let intact = fs::read(&arena).unwrap();
    let granules: Vec<usize> =
        (4096..intact.len()).step_by(256).filter(|at| &intact[*at..*at + 2] == b"TG").collect();
    let mut survived = 0;
    for seed in 0..300_u64 {
        let mut random = Random(seed);
        let mut bytes = intact.clone();
        for _ in 0..1 + random.below(30) {
            let granule = granules[random.below(granules.len() as u64) as usize];
            let words = if random.below(2) == 0 { 4 } else { 16 };
            let at = granule + random.below(words) as usize * 4;
            let old = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let other = granules[random.below(granules.len() as u64) as usize] as u32 / 256;
            let new = [other, old.wrapping_add(1), old.wrapping_sub(1), u32::MAX, 0, 1 << random.below(32)];
            bytes[at..at + 4].copy_from_slice(&new[random.below(6) as usize].to_le_bytes());
        }
        fs::write(&arena, bytes).unwrap();
        tidegate_store::reseal(&arena).unwrap();
        let (store, _) = open(directory.path());
        store.check_invariants();
        store.for_each(|key, _| {
            let object = store.get(key).unwrap();
            assert_eq!(
                object.body().map(<[u8]>::len).sum::<usize>() as u64,
                object.body_length(),
                "seed {seed}"
            );
            survived += 1;
            Visit::Keep
        });
        fill(&store, 90);
        store.check_invariants();
    }
    assert!(survived > 5000, "{survived}");
}

#[test]
fn a_file_whose_records_claim_the_same_bytes_over_and_over_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = open(directory.path());
    put(&store, b"where they lie", 1, 20_000, true).unwrap();
    put(&store, b"large", 2, 200_000, true).unwrap();
    drop(store);
    let arena = directory.path().join("arena");
    let intact = fs::read(&arena).unwrap();
    let mut records = (4096..intact.len()).step_by(256).filter(|at| intact[*at..].starts_with(b"TGrc"));
    let (small, large) = (records.next().unwrap(), records.next().unwrap());
    // Heads that are in order, of bodies that have to be hashed to the end before they are known not to be: with enough
    // of them a start would take hours. Four times its length may be hashed.
    let open_with_heads = |count: usize| {
        let mut bytes = intact.clone();
        (0..count).for_each(|n| bytes.copy_within(large..large + 256, small + 256 * n));
        fs::write(&arena, bytes).unwrap();
        tidegate_store::reseal(&arena).unwrap();
        open(directory.path())
    };
    let (store, report) = open_with_heads(40);
    assert!(report.set_aside.is_none());
    assert_eq!((report.objects, report.torn_dropped), (1, 40));
    assert_eq!(verify(&store.get(b"large").unwrap()), 2);
    drop(store);

    let (store, report) = open_with_heads(43);
    assert_eq!(report.set_aside.expect("set aside").reason, Unusable::Overlapping);
    assert_eq!(store.stats().objects, 0);
    fill(&store, 5);
    store.check_invariants();
}

#[test]
fn a_directory_that_cannot_be_created_is_one_clear_error_at_open() {
    let error = Store::open(Config::new(BUDGET).with_path("/proc/tidegate-store")).unwrap_err();
    assert!(error.to_string().starts_with("/proc/tidegate-store: cannot create directory"), "{error}");
    assert!(matches!(Store::open(Config::new(1)), Err(StoreError::Budget { .. })));
}
