//! Whatever claims to be a server sends, a client neither panics nor loses its bearings.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::time::{Duration, Instant};
use tidegate_trickles::client::{Client, Config};
use tidegate_trickles::keys::KeyRing;
use tidegate_trickles::wire::Answer;

fuzz_target!(|data: &[u8]| {
    let _ = Answer::decode(data);
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = KeyRing::from_text(text);
    }
    let start = Instant::now();
    // Continuations of either format, and deltas of both kinds.
    let cubic = data.first().is_some_and(|&byte| byte & 1 == 1);
    let mut client = Client::new(Config { cubic, ..Config::default() }, &[1; 16], start);
    let request = client.request(b"/x", start).expect("the first request");
    let open = client.poll_transmit(start).expect("an open");
    // Pieces of the input as answers of this connection: each begins with its length.
    let (mut rest, mut now) = (data, start);
    while let Some((&length, tail)) = rest.split_first() {
        let (body, tail) = tail.split_at(tail.len().min(usize::from(length) * 2));
        rest = tail;
        let mut answer = open[..10].to_vec();
        answer[1] = match length % 16 {
            0 => 0x82,
            1..4 => 0x83,
            4..7 => 0x84,
            _ => 0x81,
        };
        answer.extend_from_slice(body);
        now += Duration::from_millis(7);
        let _ = client.handle_datagram(&answer, now);
        while let Some(datagram) = client.poll_transmit(now) {
            assert!(datagram.len() <= 1472);
        }
        client.check_invariants();
        let _ = client.read(request, &mut [0; 100]);
        if let Some(at) = client.poll_timeout() {
            now = now.max(at);
            client.handle_timeout(now);
        }
    }
});
