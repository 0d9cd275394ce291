//! Whatever an arena file holds, opening it succeeds, what is found can be read and the store works on. As long as
//! nobody forges the salted checksums, no object has a wrong byte.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::{env, fs, process};
use tidegate_store::{Config, MIN_BUDGET_BYTES, Store, Visit};

const GRANULE_BYTES: usize = 256;

struct Base {
    directory: PathBuf,
    file: Vec<u8>,
    /// Where extents start: the words that say most.
    extents: Vec<usize>,
}

fn config(directory: &PathBuf) -> Config {
    Config { max_object_bytes: 400_000, ..Config::new(MIN_BUDGET_BYTES).with_path(directory) }
}

fn body(n: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 251) as u8 ^ (at % 251) as u8 ^ n).collect()
}

fn length(n: u8) -> usize {
    if n == 20 { 300_000 } else { usize::from(n) * 157 }
}

fn put(store: &Store, n: u8) {
    let Ok(mut writer) = store.insert(&[n; 3], b"meta", b"head") else { return };
    if writer.write(&body(n, length(n))).is_ok() {
        writer.commit();
    }
}

fn base() -> &'static Base {
    static BASE: OnceLock<Base> = OnceLock::new();
    BASE.get_or_init(|| {
        let directory = env::temp_dir().join(format!("tidegate-fuzz-{}", process::id()));
        let (store, _) = Store::open(config(&directory)).expect("a new store");
        (0..24).for_each(|n| put(&store, n));
        store.remove(&[5; 3]);
        let large = store.get(&[20; 3]).expect("just stored");
        store.replace_meta(&[20; 3], &large, b"meta", b"head").expect("room");
        drop((store, large));
        let file = fs::read(directory.join("arena")).expect("readable");
        let starts = (0..file.len()).step_by(GRANULE_BYTES);
        let extents = starts.filter(|at| file[*at..].starts_with(b"TG")).collect();
        Base { directory, file, extents }
    })
}

/// Applies seven bytes of input: which extent or place, which word there, how it changes.
fn damage(file: &mut [u8], base: &Base, edit: &[u8]) {
    let place = usize::from(u16::from_le_bytes([edit[0], edit[1]]));
    let value = u32::from_le_bytes([edit[3], edit[4], edit[5], edit[6]]);
    let start = match edit[2] & 0x80 {
        0 => base.extents[place % base.extents.len()],
        _ => place * GRANULE_BYTES / 16 % file.len(),
    };
    let at = (start + usize::from(edit[2] & 0x1f) * 4).min(file.len() - 4);
    let old = u32::from_le_bytes([file[at], file[at + 1], file[at + 2], file[at + 3]]);
    let other = base.extents[value as usize % base.extents.len()];
    match edit[2] >> 5 & 3 {
        0 => file[at..at + 4].copy_from_slice(&value.to_le_bytes()),
        1 => file[at..at + 4].copy_from_slice(&old.wrapping_add(value).to_le_bytes()),
        2 => file[at..at + 4].copy_from_slice(&((other / GRANULE_BYTES) as u32).to_le_bytes()),
        _ => file.copy_within(other..(other + 512).min(file.len() - 4), start.min(file.len() - 512)),
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&mode, edits)) = data.split_first() else { return };
    let base = base();
    let mut file = base.file.clone();
    edits.chunks_exact(7).take(64).for_each(|edit| damage(&mut file, base, edit));
    if mode & 2 == 2 {
        file.truncate(edits.len() * 4099);
    }
    let arena = base.directory.join("arena");
    fs::write(&arena, file).expect("writable");
    let forged = mode & 1 == 1;
    if forged {
        tidegate_store::reseal(&arena).expect("readable");
    }
    let (store, _) = Store::open(config(&base.directory)).expect("never a failed start");
    store.check_invariants();
    store.for_each(|key, info| {
        let object = store.get(key).expect("shown");
        let read: Vec<u8> = object.body().flatten().copied().collect();
        assert_eq!(read.len() as u64, info.body_length);
        assert!(object.body_at(info.body_length).is_empty());
        if !forged {
            assert_eq!((key, info.meta, info.head), (&[key[0]; 3][..], &b"meta"[..], &b"head"[..]));
            assert!(read == body(key[0], length(key[0])));
        }
        Visit::Keep
    });
    (0..40).for_each(|n| put(&store, n));
    store.check_invariants();
});
