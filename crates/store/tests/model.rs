//! Any sequence of calls against a map that says what may be found.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use proptest::prelude::*;
use std::collections::HashMap;
use support::{body_of, put, verify};
use tidegate_store::{Config, Object, Store, Visit};

#[derive(Clone, Debug)]
enum Step {
    Insert { key: u8, length: usize, sized: bool },
    Abort { key: u8, length: usize },
    Get { key: u8, keep: bool },
    Remove { key: u8 },
    Replace { key: u8, meta_length: usize },
    Unpin,
    Purge { modulus: u8 },
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0_usize..3000, 2 => 3000_usize..40_000, 1 => 40_000_usize..700_000]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (any::<u8>(), length(), any::<bool>())
            .prop_map(|(key, length, sized)| Step::Insert { key, length, sized }),
        1 => (any::<u8>(), length()).prop_map(|(key, length)| Step::Abort { key, length }),
        4 => (any::<u8>(), any::<bool>()).prop_map(|(key, keep)| Step::Get { key, keep }),
        1 => any::<u8>().prop_map(|key| Step::Remove { key }),
        2 => (any::<u8>(), 0_usize..2000).prop_map(|(key, meta_length)| Step::Replace { key, meta_length }),
        2 => Just(Step::Unpin),
        1 => (2_u8..9).prop_map(|modulus| Step::Purge { modulus }),
    ]
}

/// What the store may hold: what was last put there, unless it was evicted.
#[derive(Default)]
struct Model {
    versions: HashMap<u8, u64>,
    clock: u64,
    pins: Vec<(u64, Object)>,
}

impl Model {
    fn apply(&mut self, store: &Store, step: Step) {
        match step {
            Step::Insert { key, length, sized } => {
                self.clock += 1;
                if let Ok(object) = put(store, &[key], self.clock, length, sized) {
                    assert_eq!(verify(&object), self.clock);
                    self.versions.insert(key, self.clock);
                }
            }
            Step::Abort { key, length } => {
                if let Ok(mut writer) = store.insert(&[key], b"", b"") {
                    let follower = writer.follow();
                    let body = body_of(&[key], 0, length);
                    let _ = writer.write(&body);
                    drop(writer);
                    let available = follower.available() as usize;
                    let mut seen = Vec::new();
                    while seen.len() < available {
                        seen.extend_from_slice(follower.body_at(seen.len() as u64));
                    }
                    assert!(seen == body[..available]);
                }
            }
            Step::Get { key, keep } => {
                let Some(object) = store.get(&[key]) else { return };
                assert_eq!(Some(&verify(&object)), self.versions.get(&key));
                if keep {
                    self.pins.push((verify(&object), object));
                }
            }
            Step::Remove { key } => {
                let known = self.versions.remove(&key).is_some();
                assert!(!store.remove(&[key]) || known);
                assert!(store.get(&[key]).is_none());
            }
            Step::Replace { key, meta_length } => self.replace(store, key, meta_length),
            Step::Unpin => {
                if !self.pins.is_empty() {
                    self.pins.remove(0);
                }
            }
            Step::Purge { modulus } => {
                store.for_each(|key, _| if key[0] % modulus == 0 { Visit::Remove } else { Visit::Keep });
                self.versions.retain(|key, _| key % modulus != 0);
                store.for_each(|key, _| {
                    assert!(self.versions.contains_key(&key[0]));
                    Visit::Keep
                });
            }
        }
    }

    fn replace(&mut self, store: &Store, key: u8, meta_length: usize) {
        let Some(old) = store.get(&[key]) else { return };
        let mut meta = old.meta()[..16].to_vec();
        meta.resize(16 + meta_length, b'm');
        let Ok(new) = store.replace_meta(&[key], &old, &meta, old.head()) else { return };
        assert_eq!(new.meta(), meta);
        assert_eq!(verify(&new), verify(&old));
        assert!(store.replace_meta(&[key], &old, &meta, b"").is_err(), "an outdated object was replaced");
        self.pins.push((verify(&old), old));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_store_holds_what_was_put_last_or_nothing(steps in prop::collection::vec(step(), 1..250)) {
        let config = Config { max_object_bytes: 600_000, ..Config::new(2 << 20) };
        let (store, _) = Store::open(config).unwrap();
        let mut model = Model::default();
        for step in steps {
            model.apply(&store, step);
            if model.pins.len() > 6 {
                model.pins.remove(0);
            }
            store.check_invariants();
        }
        for (version, object) in &model.pins {
            prop_assert_eq!(verify(object), *version);
        }
        model.pins.clear();
        store.for_each(|_, _| Visit::Remove);
        store.check_invariants();
        let stats = store.stats();
        prop_assert_eq!(stats.free_bytes, stats.capacity_bytes, "extents leaked");
    }
}
