//! Datagrams read back as what was written; anything else is an error, never a panic.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use tidegate_trickles::congestion::Run;
use tidegate_trickles::continuation::{CONTINUATION_BYTES, MAX_RUNS, ProvedRun, RUN_BYTES, delta_of};
use tidegate_trickles::user::MAX_REQUEST;
use tidegate_trickles::wire::{
    Account, Answer, Ask, DELTA_HEAD_BYTES, Frame, Input, MIN_DATAGRAM_BYTES, RESPONSE_HEAD_BYTES,
    RefusalCode, Request, WireError, input_overhead, pad, wants_bytes, write_input, write_wants,
};

fn bytes(max: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..max)
}

fn any_account() -> impl Strategy<Value = Account> {
    let run = (any::<u16>(), any::<u32>(), 0..1_u64 << 48)
        .prop_map(|(gap, length, nonces)| ProvedRun { run: Run { gap, length }, nonces });
    (
        prop::collection::vec(any::<u8>(), CONTINUATION_BYTES),
        any::<u16>(),
        prop::collection::vec(run, 1..=MAX_RUNS),
    )
        .prop_map(|(raw, held_ms, runs)| Account {
            continuation: raw.try_into().unwrap(),
            held_ms,
            runs,
        })
}

fn any_ask() -> impl Strategy<Value = Ask> {
    prop_oneof![
        // The highest bit asks for CUBIC.
        (MIN_DATAGRAM_BYTES..1 << 15, any::<bool>())
            .prop_map(|(bytes, cubic)| Ask::Open { datagram_bytes: bytes | u16::from(cubic) << 15 }),
        (any_account(), any::<u8>()).prop_map(|(account, group)| Ask::Continue { account, group }),
        (any_account(), any::<u8>()).prop_map(|(account, attempt)| Ask::Timeout { account, attempt }),
        any_account().prop_map(|account| Ask::Close { account }),
    ]
}

type Inputs = Vec<(u32, u64, bool, Vec<u8>, Vec<u8>)>;

fn encode(
    id: u64,
    time: u32,
    ask: &Ask,
    inputs: &Inputs,
    wants: &[(u64, u32)],
    continuation: &[u8],
) -> Vec<u8> {
    let mut out = Vec::new();
    Request::encode_head(id, time, ask, &mut out);
    for (request, offset, last, continuation, data) in inputs {
        let before = out.len();
        let (request, offset, last) = (*request, *offset, *last);
        write_input(&Input { request, offset, last, continuation, data }, &mut out);
        assert_eq!(out.len() - before, input_overhead(continuation) + data.len());
    }
    let before = out.len();
    write_wants(wants, continuation, &mut out);
    assert_eq!(out.len() - before, wants_bytes(wants.len(), continuation));
    out
}

#[test]
fn an_account_of_m_runs_takes_75_and_12_m_bytes_and_the_time_held() {
    for m in 1..=MAX_RUNS {
        let run = ProvedRun { run: Run { gap: 0, length: 1 }, nonces: 0 };
        let account = Account { continuation: [0; CONTINUATION_BYTES], held_ms: 0, runs: vec![run; m] };
        let mut out = Vec::new();
        Request::encode_head(1, 2, &Ask::Continue { account, group: 1 }, &mut out);
        let header_time_and_held = 10 + 4 + 2;
        assert_eq!(out.len() - header_time_and_held, 75 + RUN_BYTES * m);
    }
}

proptest! {
    #[test]
    fn a_request_read_back_is_the_same(
        id: u64, time: u32, ask in any_ask(),
        inputs in prop::collection::vec((0..=MAX_REQUEST, any::<u64>(), any::<bool>(), bytes(500), bytes(900)), 0..3),
        wants in prop::collection::vec((any::<u64>(), any::<u32>()), 0..20), continuation in bytes(500),
        padding in 0..3000_usize, cut: prop::sample::Index,
    ) {
        let mut out = encode(id, time, &ask, &inputs, &wants, &continuation);
        let unpadded = out.len();
        pad(padding, &mut out);
        prop_assert!(out.len() == unpadded.max(padding) || padding < unpadded + 3);
        let request = Request::decode(&out).unwrap();
        prop_assert_eq!((request.connection, request.timestamp_us), (id, time));
        prop_assert_eq!(&request.ask, &ask);
        let read: Inputs = request.inputs.iter()
            .map(|i| (i.request, i.offset, i.last, i.continuation.to_vec(), i.data.to_vec())).collect();
        prop_assert_eq!(read, inputs);
        prop_assert!(request.wants.iter().all(|want| want.continuation == continuation));
        let read: Vec<(u64, u32)> = request.wants.iter().map(|want| (want.sequence, want.length)).collect();
        prop_assert_eq!(read, wants);
        // Cut anywhere, it is either refused as truncated or ends at a frame's boundary.
        let cut = cut.index(out.len());
        match Request::decode(&out[..cut]) {
            Ok(request) => prop_assert_eq!(&request.ask, &ask),
            Err(error) => prop_assert!(matches!(error, WireError::Truncated { .. }), "{}", error),
        }
    }

    #[test]
    fn a_response_read_back_is_the_same(
        id: u64, time: u32, raw in prop::collection::vec(any::<u8>(), CONTINUATION_BYTES), nonce in 0..1_u64 << 48,
        sequence: u64, data in bytes(1200), user in bytes(500), request in 0..=MAX_REQUEST, code: u16,
    ) {
        let raw = raw.try_into().unwrap();
        let frames = vec![
            Frame::OutputContinuation { continuation: &user },
            Frame::InputContinuation { request, consumed: sequence, continuation: &user },
            Frame::Skip { from: sequence },
            Frame::Waits { request: 7 },
            Frame::Reset { request, code },
            Frame::Data { sequence, data: &data },
        ];
        let mut out = Vec::new();
        Answer::encode_response_head(id, time, &raw, nonce, &mut out);
        prop_assert_eq!(out.len(), RESPONSE_HEAD_BYTES);
        for frame in &frames {
            let before = out.len();
            frame.encode(&mut out);
            prop_assert_eq!(out.len() - before, frame.wire_bytes());
        }
        for successor in [false, true] {
            let mut short = Vec::new();
            Answer::encode_delta_head(id, time, (&delta_of(&raw), successor), nonce, &mut short);
            prop_assert_eq!(short.len(), DELTA_HEAD_BYTES);
            let delta = Answer::Delta {
                connection: id, timestamp_us: time, delta: delta_of(&raw), successor, nonce, frames: Vec::new(),
            };
            prop_assert_eq!(Answer::decode(&short), Ok(delta));
        }
        let expected = Answer::Response { connection: id, timestamp_us: time, continuation: raw, nonce, frames };
        prop_assert_eq!(Answer::decode(&out), Ok(expected));
    }

    #[test]
    fn garbage_is_an_error_in_words(head in 0..8_usize, garbage in bytes(2000)) {
        let heads = [&[][..], &[0xd1], &[0xd1, 1], &[0xd1, 2], &[0xd1, 3], &[0xd1, 4], &[0xd1, 0x81], &[0xd1, 0x82]];
        let mut datagram = heads[head].to_vec();
        datagram.extend_from_slice(&garbage);
        if let Err(error) = Request::decode(&datagram) {
            prop_assert!(!error.to_string().is_empty());
        }
        if let Err(error) = Answer::decode(&datagram) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

#[test]
fn refusals_read_back_and_are_shorter_than_any_request() {
    for code in [RefusalCode::Stale, RefusalCode::UnknownEpoch, RefusalCode::OtherAddress] {
        let mut out = Vec::new();
        Answer::encode_refused(7, code, &mut out);
        assert_eq!(Answer::decode(&out), Ok(Answer::Refused { connection: 7, code }));
        assert!(out.len() < 75);
    }
}

#[test]
fn each_fault_of_a_datagram_has_its_own_error() {
    assert_eq!(Request::decode(&[]), Err(WireError::Truncated { what: "header" }));
    assert_eq!(Request::decode(&[0x45; 40]), Err(WireError::Version { version: 0x45 }));
    let mut open = Vec::new();
    Request::encode_head(1, 2, &Ask::Open { datagram_bytes: 1200 }, &mut open);
    assert!(Request::decode(&open).is_ok());
    assert_eq!(Answer::decode(&open), Err(WireError::Kind { kind: 1 }));
    open.extend_from_slice(&[0x77, 0, 0]);
    assert_eq!(Request::decode(&open), Err(WireError::Frame { frame: 0x77 }));
    let mut small = Vec::new();
    Request::encode_head(1, 2, &Ask::Open { datagram_bytes: 575 }, &mut small);
    assert_eq!(Request::decode(&small), Err(WireError::Bounds { what: "datagram size", value: 575 }));
}
