//! Who asks for parts of responses.

use std::net::IpAddr;

use tidegate_core::hooks::Part;

use crate::site::{Random, STEP_MS, Site, Tally, calm, run};
use crate::support::{Sent, direct, get, host};

/// A gigabyte.
const FILM: u64 = 1 << 30;

/// Asks for a part of `target`, from where it is in the cache.
fn ask_part(site: &mut Site, tally: &mut Tally, address: IpAddr, target: &str, part: Part) {
    let client = site.client(address);
    let fields = Sent { part: Some(part), ..Sent::PLAIN };
    let decision = site.chain.request(client, direct(address), &get(target, &fields), site.now_ms);
    tally.note(address, decision);
}

fn bytes(start: u64, length: u64) -> Part {
    Part::Bytes { start, end: start.saturating_add(length) }
}

#[test]
fn players_readers_of_documents_and_download_managers_are_served() {
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        let mut tally = Tally::default();
        let (mut segments, mut chunk) = ([0; 8], 0);
        run(&mut site, &mut [(&mut readers, &mut good)], 30, |site| {
            let step = site.now_ms / STEP_MS;
            // A page with thirty films, of each of which a browser looks at two bytes, then at the start.
            let film = format!("/film/{}", step % 30);
            ask_part(site, &mut tally, host([91, 1], 1), &film, bytes(0, 2));
            ask_part(site, &mut tally, host([91, 1], 1), &film, bytes(0, 256 << 10));
            // Somebody who looks for a scene: each time from there to the end.
            let scene = site.random.below(FILM);
            ask_part(site, &mut tally, host([92, 1], 1), "/film/0", bytes(scene, FILM));
            // A document in pieces, those that are on the screen before others.
            for _ in 0..5 {
                let (piece, jump) = (64 << 10, site.random.below(3) * 16);
                ask_part(site, &mut tally, host([93, 1], 1), "/book", bytes((chunk + jump) * piece, piece));
                chunk += jump + 1;
            }
            // Eight segments of a large file, a quarter of a mebibyte at a time; and with an open end, for as long as
            // it takes.
            for (index, done) in segments.iter_mut().enumerate() {
                let start = index as u64 * (FILM / 8) + *done;
                *done += 256 << 10;
                ask_part(site, &mut tally, host([94, 1], 1), "/image.iso", bytes(start, 256 << 10));
                if step.is_multiple_of(10) {
                    ask_part(site, &mut tally, host([95, 1], 1), "/image.iso", bytes(start, FILM));
                }
            }
        });
        assert_eq!((good.refused, tally.refused), (0, 0), "seed {seed}");
    }
}

#[test]
fn who_asks_for_parts_and_gains_nothing_is_blocked() {
    type Ask = fn(&mut Random, u64) -> Part;
    let ways: [Ask; 6] = [
        // A single byte, anywhere.
        |random, _| bytes(random.below(FILM), 1),
        // The same again and again.
        |_, _| bytes(0, 64 << 10),
        |_, turn| bytes(turn % 2 * (1 << 20), 64 << 10),
        // Always a little earlier or later, and always nearly everything.
        |_, turn| bytes(FILM - turn * 2_048, u64::MAX),
        |_, turn| bytes(turn * 2_048, FILM),
        |_, _| Part::Excessive,
    ];
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        let (mut bad, mut turn) = (Tally::default(), 0);
        run(&mut site, &mut [(&mut readers, &mut good)], 12, |site| {
            for (bot, way) in (0..).zip(ways) {
                for _ in 0..8 {
                    turn += 1;
                    let part = way(&mut site.random, turn);
                    ask_part(site, &mut bad, host([99, 9], bot * 700), "/film/0", part);
                }
            }
        });
        assert_eq!((good.refused, bad.blocked.len()), (0, ways.len()), "seed {seed}");
    }
}
