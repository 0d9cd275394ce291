//! What is read as a DHTTP message is written as the same bytes, at any split; nothing is a response that a server
//! would answer as a request.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_dhttp::wire::{REQUEST_HEADER_BYTES, Request, Response, WireError};

fuzz_target!(|data: &[u8]| {
    let (request, response) = (Request::parse(data), Response::parse(data));
    if let Ok(request) = request {
        let mut written = Vec::new();
        request.write(&mut written);
        assert_eq!(written, data);
        assert_eq!(request.header_bytes() + request.http.len(), data.len());
        for split in 0..data.len().min(request.header_bytes() + 2) {
            let part = Request::parse_prefix(&data[..split]).expect("a sound beginning");
            assert_eq!(part.is_some(), split >= request.header_bytes());
        }
    } else if data.len() < REQUEST_HEADER_BYTES {
        assert!(matches!(request, Err(WireError::Short | WireError::ResponseAsRequest)));
    }
    if let Ok(response) = response {
        let mut written = Vec::new();
        response.write(&mut written);
        assert_eq!(written, data);
        // Anything else that starts with H is refused as HTTP when it is read, and is a request at best.
        if !data[8..].starts_with(b"H") || data[8..].starts_with(b"HTTP/") {
            assert!(request.is_err());
        }
    }
});
