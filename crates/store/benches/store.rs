//! Cost of a hit and of an insertion.
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use tidegate_store::{Config, Store};

fn benches(c: &mut Criterion) {
    let (store, _) = Store::open(Config::new(64 << 20)).expect("anonymous store");
    let body = [b'x'; 612];
    let head = [b'h'; 256];
    let meta = [b'm'; 64];
    let keys: Vec<String> = (0..1000).map(|n| format!("GET example.com /assets/file-{n}.html")).collect();
    for key in &keys {
        let mut writer = store.insert_sized(key.as_bytes(), &meta, &head, 612).expect("room");
        writer.write(&body).expect("room");
        writer.commit();
    }
    let mut n = 0;
    c.bench_function("get hit", |b| {
        b.iter(|| {
            n = (n + 1) % keys.len();
            black_box(store.get(keys[n].as_bytes()))
        });
    });
    let mut n = 0_u64;
    c.bench_function("insert 612 B", |b| {
        b.iter(|| {
            n += 1;
            let mut writer = store.insert_sized(&n.to_le_bytes(), &meta, &head, 612).expect("room");
            writer.write(&body).expect("room");
            black_box(writer.commit());
        });
    });
}

criterion_group!(store, benches);
criterion_main!(store);
