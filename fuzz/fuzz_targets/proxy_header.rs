//! A PROXY header is at most as long as it may be, and more bytes never change what is known of those before.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_http::{MOST_PROXY_HEADER_BYTES, ProxyProgress, parse_proxy_header};

fuzz_target!(|data: &[u8]| {
    let whole = parse_proxy_header(data);
    if let Ok(ProxyProgress::Complete { length, .. }) = whole {
        assert!(length <= data.len().min(MOST_PROXY_HEADER_BYTES));
    }
    if data.len() >= MOST_PROXY_HEADER_BYTES {
        assert_ne!(whole, Ok(ProxyProgress::Incomplete), "it is waited for without a bound");
    }
    for length in (0..data.len()).take(256) {
        let part = parse_proxy_header(&data[..length]);
        assert!(part == Ok(ProxyProgress::Incomplete) || part == whole, "{length}");
    }
});
