//! The defence keeps to its memory, whatever addresses attackers invent: all of it, not the prefix trees alone.
//! What is measured is the growth of the process, of which each test has one of its own (nextest).

#![allow(clippy::unwrap_used)] // A test that cannot go on has failed.

use std::net::{IpAddr, Ipv4Addr};

use tidegate_core::hooks::{ChainSource, Field, Fields, Peer, RequestView, ResponseView, Source, Via};
use tidegate_defence::{Defence, Settings};

struct NoFields;

impl Fields for NoFields {
    fn get(&self, _: Field) -> Option<&[u8]> {
        None
    }
}

/// Of this process (proc_pid_status(5), RssAnon).
fn anonymous_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
}

/// The most by which the process grows under very many addresses all over IPv4, each of which needs nodes for the
/// networks around it too, on so many cores.
fn greatest_growth(settings: Settings, cores: usize) -> usize {
    let before = anonymous_bytes();
    let defence = Defence::new(settings, 1, [1; 32]);
    let chains: Vec<_> = (0..cores).map(|core| defence.chain(core, cores)).collect();
    let fields = &NoFields;
    let request =
        RequestView { method: b"GET", path: b"/", reading: None, query: None, has_body: false, fields };
    let response = ResponseView {
        path: b"/",
        query: None,
        authority: b"h",
        variant: 0,
        status: 404,
        source: Source::Missed,
        upstream_ms: 1,
    };
    let mut greatest = 0;
    for index in 0..250_000_u32 {
        // An odd factor leaves no address out and names none twice.
        let address = IpAddr::V4(Ipv4Addr::from(index.wrapping_mul(0x9e37_79b1)));
        let (peer, now_ms) = (Peer { address, via: Via::Direct }, u64::from(index) / 50);
        let chain = &chains[index as usize % cores];
        let (client, _) = chain.connect(peer, now_ms);
        let _ = chain.request(client, peer, &request, now_ms);
        let _ = chain.response(client, peer, &response, now_ms);
        chain.close(client, peer, now_ms);
        if index % 10_000 == 0 {
            chains.iter().for_each(|chain| chain.tick(&Default::default(), now_ms));
            greatest = greatest.max(anonymous_bytes() - before);
        }
    }
    greatest.max(anonymous_bytes() - before)
}

/// Less than what so many addresses would take.
const BOUND: usize = 64 << 20;

fn settings() -> Settings {
    Settings { memory_bytes: BOUND, ..Settings::default() }
}

#[test]
fn very_many_addresses_stay_within_the_memory_and_use_most_of_it() {
    let growth = greatest_growth(settings(), 1);
    assert!(growth <= BOUND, "{growth} of {BOUND} bytes");
    assert!(growth > BOUND / 4 * 3, "{growth} of {BOUND} bytes");
}

#[test]
fn cores_share_the_memory_with_all_that_each_has_of_its_own() {
    let growth = greatest_growth(settings(), 4);
    assert!(growth <= BOUND, "{growth} of {BOUND} bytes");
    assert!(growth > BOUND / 2, "{growth} of {BOUND} bytes");
}
