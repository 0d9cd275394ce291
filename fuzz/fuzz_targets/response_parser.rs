//! Any split of the bytes gives the same result, and fields are known by their names and by nothing else.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_http::{FieldId, HeadLimits, Method, Progress, ResponseParser};

const LIMITS: HeadLimits = HeadLimits { request_line_bytes: 64, head_bytes: 1024, fields: 12 };

fn parse_in_pieces(bytes: &[u8], method: Method, is_proxy: bool, piece: usize) -> String {
    let mut parser = if is_proxy { ResponseParser::for_proxy(LIMITS) } else { ResponseParser::new(LIMITS) };
    parser.reset(method);
    let mut available = 0;
    loop {
        available = (available + piece).min(bytes.len());
        let window = bytes[..available].to_vec().into_boxed_slice();
        let result = parser.parse(&window);
        match result {
            Ok(Progress::Complete { length }) => {
                let head = parser.head(&bytes[..length]);
                assert!(head.fields.iter().all(|(id, name, _)| id == FieldId::from_name(name)));
                return format!("{length} {head:?}");
            }
            Ok(Progress::Incomplete) if available < bytes.len() => {}
            other => return format!("{other:?}"),
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&seed, bytes)) = data.split_first() else { return };
    let method = [Method::Get, Method::Head, Method::Connect, Method::Post][usize::from(seed % 4)];
    let is_proxy = seed & 128 != 0;
    let whole = parse_in_pieces(bytes, method, is_proxy, bytes.len().max(1));
    assert_eq!(parse_in_pieces(bytes, method, is_proxy, usize::from(seed / 4) % 32 + 1), whole);
});
