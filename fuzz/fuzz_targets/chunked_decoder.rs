//! Any split of the bytes gives the same body, the same end and the same refusal; a body coded anew decodes to itself;
//! no trailer comes through that must not.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_http::{
    BodyError, ChunkLimits, ChunkedDecoder, ExtensionScope, HeadLimits, RequestParser, write_chunk,
    write_last_chunk,
};

const LIMITS: ChunkLimits = ChunkLimits {
    extension_bytes: 64,
    extension_scope: ExtensionScope::Body,
    trailer_bytes: 256,
    trailer_fields: 4,
};

/// Of the message that the body belongs to.
const HEAD: &[u8] = b"PUT / HTTP/1.1\r\nHost: a\r\nConnection: x\r\n\r\n";
/// What `Connection` names there, and what RFC 9110 §6.5.1 means.
const NO_TRAILERS: [&[u8]; 6] =
    [b"x", b"host", b"connection", b"content-length", b"transfer-encoding", b"authorization"];

/// The trailers as text.
fn trailers(decoder: &ChunkedDecoder) -> String {
    let mut parser = RequestParser::new(HeadLimits::default());
    parser.parse(HEAD).expect("a head");
    let head = parser.head(HEAD);
    let trailers: Vec<_> = decoder.trailers(head.fields).collect();
    for (name, _) in &trailers {
        assert!(!NO_TRAILERS.iter().any(|forbidden| name.eq_ignore_ascii_case(forbidden)), "{trailers:?}");
    }
    format!("{trailers:?}")
}

fn decode(bytes: &[u8], piece: usize) -> (Vec<u8>, Result<Option<usize>, BodyError>, String) {
    let mut decoder = ChunkedDecoder::new(LIMITS);
    let mut body = Vec::new();
    let (mut taken, mut available) = (0, 0);
    loop {
        available = (available + piece).min(bytes.len());
        while taken < available {
            let window = bytes[taken..available].to_vec().into_boxed_slice();
            match decoder.decode(&window) {
                Ok(decoded) => {
                    assert!(decoded.consumed > 0 && decoded.data.end <= decoded.consumed);
                    body.extend_from_slice(&window[decoded.data]);
                    taken += decoded.consumed;
                    if decoded.done {
                        return (body, Ok(Some(taken)), trailers(&decoder));
                    }
                }
                Err(error) => return (body, Err(error), String::new()),
            }
        }
        if available == bytes.len() {
            return (body, Ok(None), String::new());
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&seed, bytes)) = data.split_first() else { return };
    let whole = decode(bytes, bytes.len().max(1));
    assert_eq!(decode(bytes, usize::from(seed) % 40 + 1), whole);
    let mut coded = Vec::new();
    for chunk in whole.0.chunks(usize::from(seed) + 1) {
        write_chunk(chunk, &mut coded);
    }
    write_last_chunk([], &mut coded);
    let length = coded.len();
    assert_eq!(decode(&coded, 7), (whole.0, Ok(Some(length)), "[]".to_owned()));
});
