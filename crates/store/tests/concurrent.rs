//! Several threads on one small store: every byte that anybody sees is right.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use support::{Random, body_of, put, verify};
use tidegate_store::{Config, Progress, Store, Visit};

fn one_thread(store: &Store, seed: u64) {
    let mut random = Random(seed);
    let mut pins = Vec::new();
    for step in 0..3000 {
        let key = random.below(300).to_le_bytes();
        match random.below(10) {
            0..=4 => {
                if let Some(object) = store.get(&key) {
                    assert_eq!(object.key(), key);
                    verify(&object);
                    pins.push(object);
                }
            }
            5..=7 => {
                let length = if random.below(20) == 0 { random.below(200_000) } else { random.below(5_000) };
                let _ = put(store, &key, seed << 32 | step, length as usize, random.below(2) == 0);
            }
            8 => {
                store.remove(&key);
            }
            _ => {
                if let Some(object) = store.get(&key) {
                    let _ = store.replace_meta(&key, &object, object.meta(), object.head());
                }
            }
        }
        if pins.len() > 8 {
            verify(&pins.remove(random.below(8) as usize));
        }
    }
}

#[test]
fn threads_that_store_read_and_remove_see_no_wrong_byte() {
    let (store, _) = Store::open(Config::new(2 << 20)).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|seed| {
                let store = &store;
                scope.spawn(move || one_thread(store, seed))
            })
            .collect();
        let walker = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                store.for_each(|key, info| {
                    assert_eq!((key.len(), info.meta.len()), (8, 16));
                    if key[0] == 9 { Visit::Remove } else { Visit::Keep }
                });
            }
        });
        let results: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        done.store(true, Ordering::Relaxed);
        walker.join().unwrap();
        results.into_iter().for_each(|result| result.unwrap());
    });
    store.check_invariants();
    store.for_each(|_, _| Visit::Remove);
    store.check_invariants();
    let stats = store.stats();
    assert_eq!(stats.free_bytes, stats.capacity_bytes, "extents leaked: {stats:?}");
}

#[test]
fn a_follower_reads_the_body_while_it_is_written() {
    let (store, _) = Store::open(Config { max_object_bytes: 2 << 20, ..Config::new(4 << 20) }).unwrap();
    let store = Arc::new(store);
    let body = body_of(b"followed", 1, 1_500_000);
    let mut writer = store.insert(b"followed", b"", b"").unwrap();
    let readers: Vec<_> = (0..3)
        .map(|_| {
            let (follower, body) = (writer.follow(), body.clone());
            std::thread::spawn(move || {
                let mut read = 0;
                loop {
                    let progress = follower.progress();
                    let piece = follower.body_at(read as u64);
                    assert!(piece == &body[read..read + piece.len()]);
                    read += piece.len();
                    if piece.is_empty() && progress != Progress::Writing {
                        return (read, progress);
                    }
                    std::thread::yield_now();
                }
            })
        })
        .collect();
    for piece in body.chunks(1400) {
        writer.write(piece).unwrap();
    }
    let object = writer.commit();
    assert_eq!(object.body_length(), body.len() as u64);
    for reader in readers {
        assert_eq!(reader.join().unwrap(), (body.len(), Progress::Committed));
    }
}
