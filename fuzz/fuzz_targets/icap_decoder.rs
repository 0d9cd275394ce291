//! Any split of what an ICAP server sends gives the same message, the same end and the same refusal.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_icap::{Decoder, Event, HEAD_BYTES, IcapError, SECTIONS_BYTES};

fn decode(bytes: &[u8], piece: usize) -> (Vec<Event>, Vec<u8>, Result<Option<usize>, IcapError>) {
    let mut decoder = Decoder::default();
    let (mut events, mut body) = (Vec::new(), Vec::new());
    let (mut taken, mut available) = (0, 0);
    loop {
        loop {
            let window = bytes[taken..available].to_vec().into_boxed_slice();
            let decoded = match decoder.decode(&window) {
                Ok(decoded) => decoded,
                Err(error) => return (events, body, Err(error)),
            };
            taken += decoded.consumed;
            match decoded.event {
                None => break,
                Some(Event::End) => return (events, body, Ok(Some(taken))),
                Some(Event::Body(range)) => {
                    assert!(!range.is_empty() && range.end <= decoded.consumed);
                    body.extend_from_slice(&window[range]);
                }
                Some(event) => {
                    if let Event::Sections(sections) = &event {
                        assert!(sections.len() <= SECTIONS_BYTES);
                    }
                    events.push(event);
                }
            }
        }
        assert_eq!(taken, available);
        if available == bytes.len() {
            return (events, body, Ok(None));
        }
        available = (available + piece).min(bytes.len());
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&seed, bytes)) = data.split_first() else { return };
    if bytes.len() > 2 * HEAD_BYTES {
        return;
    }
    let (whole, pieced) = (decode(bytes, bytes.len().max(1)), decode(bytes, usize::from(seed) % 40 + 1));
    assert_eq!(whole.2, pieced.2);
    if whole.2.is_ok() {
        assert_eq!(whole, pieced);
    }
});
