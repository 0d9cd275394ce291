//! What a packet costs the server's core: one that is answered with two, and one that is forged.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tidegate_trickles::client::{self, Client, Read};
use tidegate_trickles::files::{FileService, Object, Objects};
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::server::{self, Server};

const NOW_MS: u64 = 1_700_000_000_000;

struct Zeros;

impl Objects for Zeros {
    fn find(&mut self, _: &[u8]) -> Option<Object> {
        Some(Object { length: 2_000_000, version: 1 })
    }

    fn read(&mut self, _: &[u8], _: u64, _: u64, buffer: &mut [u8]) -> Option<usize> {
        buffer.fill(0);
        Some(buffer.len())
    }
}

fn server() -> Server {
    let config = server::Config { replay_entries: 1 << 12, ..server::Config::default() };
    Server::new(config, KeyRing::new(1, &[42; 16]), NOW_MS)
}

fn peer() -> SocketAddr {
    "192.0.2.7:5000".parse().unwrap()
}

/// Every request of a download without loss but the open.
fn requests() -> Vec<Vec<u8>> {
    let (mut server, mut service) = (server(), FileService::new(Zeros));
    let mut now = Instant::now();
    let mut client = Client::new(client::Config::default(), &[5; 16], now);
    let request = client.request(b"/x", now).unwrap();
    let (mut sent, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        let mut answers = Vec::new();
        while let Some(datagram) = client.poll_transmit(now) {
            let mut take = |packet: &[u8]| answers.push(packet.to_vec());
            server.handle(&datagram, peer(), NOW_MS, &mut service, &mut take).unwrap();
            sent.push(datagram);
        }
        now += Duration::from_millis(1);
        for answer in &answers {
            client.handle_datagram(answer, now).unwrap();
        }
        if answers.is_empty() {
            now = now.max(client.poll_timeout().unwrap());
            client.handle_timeout(now);
        }
        loop {
            match client.read(request, &mut buffer).unwrap() {
                Read::Data(_) => {}
                Read::End => {
                    sent.remove(0);
                    return sent;
                }
                _ => break,
            }
        }
    }
}

fn packets(criterion: &mut Criterion) {
    let requests = requests();
    let mut group = criterion.benchmark_group("server");
    group.throughput(Throughput::Elements(requests.len() as u64));
    group.bench_function("answered", |bencher| {
        bencher.iter_batched_ref(
            || (server(), FileService::new(Zeros)),
            |(server, service)| {
                for request in &requests {
                    server.handle(request, peer(), NOW_MS, service, &mut |_: &[u8]| {}).unwrap();
                }
            },
            BatchSize::SmallInput,
        );
    });
    group.throughput(Throughput::Elements(1));
    let mut forged = requests[requests.len() / 2].clone();
    forged[16 + 60] ^= 1;
    let (mut server, mut service) = (server(), FileService::new(Zeros));
    group.bench_function("forged", |bencher| {
        bencher.iter(|| {
            server.handle(&forged, peer(), NOW_MS, &mut service, &mut |_: &[u8]| {}).unwrap_err();
        });
    });
    group.finish();
}

criterion_group!(benches, packets);
criterion_main!(benches);
