//! Any split of the bytes gives the same result, fields are known by their names and by nothing else, a head written
//! and read back is the same head, and what is forwarded is one sound head with the framing that was asked for.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_http::forward::{ForwardContext, write_upstream_request};
use tidegate_http::normalize::{Personality, normalize};
use tidegate_http::{BodyFraming, FieldId, FieldRules, HeadError, HeadLimits, Progress, RequestParser};

const LIMITS: HeadLimits = HeadLimits { request_line_bytes: 256, head_bytes: 1024, fields: 12 };

fn describe(parser: &RequestParser, bytes: &[u8], result: Result<Progress, HeadError>) -> String {
    match result {
        Ok(Progress::Complete { length }) => {
            let head = parser.head(&bytes[..length]);
            assert!(head.fields.iter().all(|(id, name, _)| id == FieldId::from_name(name)));
            format!("{length} {head:?}")
        }
        other => format!("{other:?}"),
    }
}

fn parse_in_pieces(bytes: &[u8], mut seed: u32) -> String {
    let mut parser = RequestParser::new(LIMITS);
    let mut available = 0;
    loop {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        available = (available + (seed >> 24) as usize % 40).min(bytes.len());
        // A copy of exactly these bytes: a read beyond them is seen by the sanitizer.
        let window = bytes[..available].to_vec().into_boxed_slice();
        let result = parser.parse(&window);
        if available == bytes.len() || !matches!(result, Ok(Progress::Incomplete)) {
            return describe(&parser, bytes, result);
        }
    }
}

fn written(parser: &RequestParser, bytes: &[u8]) -> Vec<u8> {
    let head = parser.head(bytes);
    let mut out = [head.method_bytes, b" ", head.target, b" "].concat();
    out.extend_from_slice(format!("{:?}", head.version).replace("Http1", "HTTP/1.").as_bytes());
    out.extend_from_slice(b"\r\n");
    for (_, name, value) in head.fields.iter() {
        out.extend_from_slice(&[name, b":", value, b"\r\n"].concat());
    }
    out.extend_from_slice(b"\r\n");
    out
}

fn check_forwarded(parser: &RequestParser, bytes: &[u8]) {
    let head = parser.head(bytes);
    let mut scratch = Vec::new();
    let Ok(normalized) = normalize(&head, Personality::Strict, &mut scratch) else { return };
    let context = ForwardContext {
        client: std::net::Ipv4Addr::LOCALHOST.into(),
        scheme: "http",
        via_pseudonym: "tidegate",
        trusted_client: bytes.len() % 2 == 0,
        keep_upgrade: bytes.len() % 3 == 0,
        framing: head.framing,
        removed: &[],
        added: &[],
        default_host: b"",
        own_cookie: b"pass",
        rules: FieldRules::NONE,
    };
    let mut out = Vec::new();
    write_upstream_request(&head, &normalized, &context, &mut out);
    let mut upstream = RequestParser::new(HeadLimits::default());
    assert_eq!(upstream.parse(&out), Ok(Progress::Complete { length: out.len() }));
    let sent = upstream.head(&out);
    assert!(sent.keep_alive && sent.method == head.method);
    let empty = matches!(sent.framing, BodyFraming::Length(0)) && head.framing == BodyFraming::None;
    assert!(empty || sent.framing == head.framing);
}

fuzz_target!(|data: &[u8]| {
    let Some((seed, bytes)) = data.split_first_chunk() else { return };
    let mut parser = RequestParser::new(LIMITS);
    let result = parser.parse(bytes);
    let whole = describe(&parser, bytes, result);
    assert_eq!(parse_in_pieces(bytes, u32::from_le_bytes(*seed)), whole);
    if let Ok(Progress::Complete { .. }) = result {
        check_forwarded(&parser, bytes);
        let out = written(&parser, bytes);
        let mut again = RequestParser::new(LIMITS);
        assert_eq!(again.parse(&out), Ok(Progress::Complete { length: out.len() }));
        assert_eq!(written(&again, &out), out);
        let (a, b) = (parser.head(bytes), again.head(&out));
        assert_eq!((a.framing, a.keep_alive, a.upgrade), (b.framing, b.keep_alive, b.upgrade));
        assert!(a.fields.iter().eq(b.fields.iter()));
    }
});
