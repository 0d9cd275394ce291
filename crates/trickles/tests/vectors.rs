//! The vectors of docs/protocol/trickles.md are what the code computes. `TIDEGATE_WRITE_REFERENCE=1` writes them anew.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::fmt::Write;
use std::net::SocketAddr;
use tidegate_trickles::congestion::{self, Era, Run};
use tidegate_trickles::continuation::{Continuation, peer_bytes};
use tidegate_trickles::cwnd::tcp_cwnd;
use tidegate_trickles::keys::{EpochKeys, KeyRing};
use tidegate_trickles::mac::{Block, Cmac};
use tidegate_trickles::nonce::{EraCause, Secret, to_bytes};
use tidegate_trickles::user::{Kind, UserContinuation};
use tidegate_trickles::wire::{Ask, Input, Request, write_input};

const START: &str = "```vectors\n";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn vectors() -> String {
    let secret: Block = std::array::from_fn(|n| n as u8);
    let peer: SocketAddr = "192.0.2.1:4000".parse().unwrap();
    const NOW_MS: u64 = 0x018c_0102_0304;
    let connection = 0x0123_4567_89ab_cdef_u64;
    let mut out = String::new();
    let mut say = |name: &str, value: String| writeln!(out, "{name:<28} = {value}").unwrap();
    let root = Cmac::new(&secret);
    for (n, name) in (1..).zip(["transport", "user", "seal", "open"]) {
        let mut label = b"tidegate trickles".to_vec();
        label.push(n);
        say(&format!("{name} key"), hex(&root.tag(&label)));
    }
    let keys = EpochKeys::derive(1, &secret);
    say("address", hex(&peer_bytes(peer)));
    let sealed = keys.open.tag(&[&connection.to_be_bytes()[..], &peer_bytes(peer)].concat());
    say("sealed value", hex(&sealed));
    let plain = keys.seal.encrypt(sealed);
    say("connection's secret", hex(&plain));
    let connection_secret = Secret::new(&plain);
    let tag = connection_secret.next_era(0, EraCause::Open);
    say("tag of the first era", hex(&tag.to_be_bytes()));
    for number in [1, 2] {
        say(&format!("nonce of packet {number}"), hex(&to_bytes(connection_secret.packet(tag, number))));
    }
    say("nonces of packets 1 to 9", hex(&to_bytes(connection_secret.range(tag, 1, 9))));
    let recovery = connection_secret.next_era(tag, EraCause::Recovery { first_loss: 5 });
    say("tag, recovery from loss of 5", hex(&recovery.to_be_bytes()));
    let timeout = connection_secret.next_era(tag, EraCause::Timeout { first_loss: 5, attempt: 2 });
    say("tag, 2nd timeout, loss of 5", hex(&timeout.to_be_bytes()));
    let era = Era { counter: 0, tag, base: 0, start: 10, ssthresh: 32_767, flight: 3, cubic: None };
    let continuation = Continuation {
        epoch: 1,
        number: 1,
        era,
        timestamp_ms: NOW_MS as u32,
        srtt_us: 0,
        rttvar_us: 0,
        datagram_bytes: 1200,
        sealed,
    };
    say("continuation of packet 1", hex(&continuation.sign(&keys, peer, NOW_MS)));
    let user = UserContinuation { kind: Kind::Output, request: 1, start: 0, end: 1000, opaque: b"opaque" };
    let mut signed = Vec::new();
    user.sign(&KeyRing::new(1, &secret), &mut signed);
    say("output continuation", hex(&signed));
    let mut open = Vec::new();
    Request::encode_head(connection, 7, &Ask::Open { datagram_bytes: 1200 }, &mut open);
    let input = Input { request: 1, offset: 0, last: true, continuation: &[], data: b"/x" };
    write_input(&input, &mut open);
    say("open with input, unpadded", hex(&open));
    for (start, ssthresh, n) in [(10, 32_767, 5), (2, 8, 5), (2, 8, 6), (2, 8, 14), (8, 8, 100_000)] {
        say(&format!("TCPCwnd: s {start}, h {ssthresh}, n {n}"), tcp_cwnd(start, ssthresh, n).to_string());
    }
    let era = Era { base: 0, start: 8, ssthresh: 8, flight: 0, ..era };
    for (runs, number, group) in [
        (vec![Run { gap: 0, length: 4 }], 4, 2),
        (vec![Run { gap: 0, length: 4 }, Run { gap: 1, length: 1 }], 6, 1),
        (vec![Run { gap: 0, length: 4 }, Run { gap: 1, length: 4 }], 9, 1),
        (vec![Run { gap: 0, length: 4 }, Run { gap: 1, length: 7 }], 12, 1),
        (vec![Run { gap: 0, length: 2 }, Run { gap: 6, length: 1 }], 9, 1),
    ] {
        let release = congestion::acknowledge(&era, &runs, number, group).unwrap();
        let account: Vec<String> = runs.iter().map(|run| format!("-{}+{}", run.gap, run.length)).collect();
        let numbers: Vec<String> = release.numbers().map(|number| number.to_string()).collect();
        say(
            &format!("s 8, h 8: {} ack {group}", account.join("")),
            format!("counter {}, packets [{}]", release.era.counter, numbers.join(" ")),
        );
    }
    out
}

#[test]
fn the_vectors_of_the_document_are_those_of_the_code() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/protocol/trickles.md");
    let document = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = document.split_once(START).unwrap();
    let (listed, after) = rest.split_once("```").unwrap();
    if std::env::var_os("TIDEGATE_WRITE_REFERENCE").is_some() {
        std::fs::write(&path, format!("{before}{START}{}```{after}", vectors())).unwrap();
        return;
    }
    assert_eq!(
        listed,
        vectors(),
        "run TIDEGATE_WRITE_REFERENCE=1 cargo nextest run -p tidegate-trickles vectors"
    );
}
