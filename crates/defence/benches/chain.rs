//! What the default classifiers cost on the way of a cached hit, and what a client costs that is seen for the first
//! time.

#![allow(missing_docs, clippy::unwrap_used)] // criterion writes functions of its own.

use std::hint::black_box;
use std::net::IpAddr;

use criterion::{Criterion, criterion_group, criterion_main};
use tidegate_core::hooks::{ChainSource, Field, Fields, Peer, RequestView, Via};
use tidegate_defence::{Defence, Exemption, Settings};

struct NoFields;

impl Fields for NoFields {
    fn get(&self, _: Field) -> Option<&[u8]> {
        None
    }
}

fn chain(c: &mut Criterion) {
    // Counted like everybody, and never refused.
    let exempt = ["0.0.0.0/0", "::/0"]
        .map(|all| Exemption { source: all.parse().unwrap(), user_agent: String::new() });
    let settings = Settings { exempt: exempt.to_vec(), ..Settings::default() };
    let defence = Defence::new(settings, 1, [1; 32]);
    let chain = defence.chain(0, 1);
    let request = RequestView {
        method: b"GET",
        path: b"/images/logo.png",
        reading: None,
        query: None,
        has_body: false,
        fields: &NoFields,
    };
    let peer = |number: u32| Peer { address: IpAddr::V4((0x0a00_0000 + number).into()), via: Via::Direct };
    let known: Vec<_> =
        (0..1_000).map(|number| (peer(number * 37), chain.connect(peer(number * 37), 0).0)).collect();
    // A millisecond each, so that limits on rates are not reached.
    let mut now_ms = 0;
    c.bench_function("request of one of 1,000 clients, 8 at a time", |bencher| {
        bencher.iter(|| {
            now_ms += 1;
            let (peer, id) = known[(now_ms / 8 % 1_000) as usize];
            black_box(chain.request(id, peer, black_box(&request), now_ms))
        });
    });
    c.bench_function("connection of a client seen for the first time", |bencher| {
        let mut number = 0x0100_0000u32;
        bencher.iter(|| {
            number = number.wrapping_add(256);
            let (id, _) = chain.connect(peer(number), now_ms);
            chain.close(id, peer(number), now_ms);
        });
    });
    c.bench_function("connection of a known client", |bencher| {
        bencher.iter(|| {
            now_ms += 1;
            let (peer, _) = known[(now_ms % 1_000) as usize];
            let (id, decision) = chain.connect(peer, now_ms);
            chain.close(id, peer, now_ms);
            black_box(decision)
        });
    });
}

criterion_group!(benches, chain);
criterion_main!(benches);
