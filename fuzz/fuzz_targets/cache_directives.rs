//! A restriction is never lost to what stands around it, and what is decided from the directives survives being stored.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_http::cache::{Policy, RequestDirectives, ResponseDirectives, Reuse};
use tidegate_http::{HeadLimits, Method, Progress, RequestHead, RequestParser, ResponseHead, ResponseParser};

/// RFC 9111 §1.2.2: more seconds than this count as this many.
const MAX_SECONDS: u32 = 1 << 31;
const NOW_S: u64 = 1_800_000_000;

fn with_response<T>(fields: &[u8], read: impl FnOnce(&ResponseHead<'_>) -> T) -> Option<T> {
    let head = [b"HTTP/1.1 200 OK\r\n", fields, b"\r\n"].concat();
    let mut parser = ResponseParser::new(HeadLimits::default());
    parser.reset(Method::Get);
    let Ok(Progress::Complete { length }) = parser.parse(&head) else { return None };
    (length == head.len()).then(|| read(&parser.head(&head)))
}

fn with_request<T>(fields: &[u8], read: impl FnOnce(&RequestHead<'_>) -> T) -> Option<T> {
    let head = [b"GET / HTTP/1.1\r\nHost: a\r\n", fields, b"\r\n"].concat();
    let mut parser = RequestParser::new(HeadLimits::default());
    let Ok(Progress::Complete { length }) = parser.parse(&head) else { return None };
    (length == head.len()).then(|| read(&parser.head(&head)))
}

fn check_response(fields: &[u8]) {
    let Some(directives) = with_response(fields, |head| ResponseDirectives::parse(&head.fields)) else {
        return;
    };
    let seconds = [
        directives.max_age_s,
        directives.s_maxage_s,
        directives.stale_while_revalidate_s,
        directives.stale_if_error_s,
    ];
    assert!(seconds.into_iter().flatten().all(|seconds| seconds <= MAX_SECONDS), "{directives:?}");
    if !directives.targeted {
        // Whatever else the field says, one line more restricts it further.
        let further = [fields, b"Cache-Control: no-store, private, no-cache, max-age=0\r\n"].concat();
        let restricted = with_response(&further, |head| ResponseDirectives::parse(&head.fields));
        let restricted = restricted.unwrap_or(directives);
        if restricted != directives {
            assert!(restricted.no_store && restricted.private && restricted.no_cache, "{restricted:?}");
            assert_eq!(restricted.max_age_s, Some(0));
        }
    }
    let policy = with_response(fields, |response| {
        with_request(b"", |request| Policy::new(request, response, NOW_S, NOW_S).ok()).flatten()
    });
    let Some(policy) = policy.flatten() else { return };
    assert!(!directives.private && (!directives.no_store || directives.must_understand), "{directives:?}");
    assert_eq!(Policy::from_bytes(&policy.to_bytes()), Some(policy));
    for later_s in [0, 1, 60, u64::from(MAX_SECONDS)] {
        let now_s = NOW_S + later_s;
        assert_eq!(policy.age_s(now_s), policy.age_s(NOW_S) + later_s);
        if let Reuse::Fresh { age_s } = policy.reuse(&RequestDirectives::default(), now_s) {
            assert!(policy.ttl_s(now_s) > 0 && age_s == policy.age_s(now_s) && !directives.no_cache);
        }
    }
}

fn check_request(fields: &[u8]) {
    let further = [fields, b"Cache-Control: no-cache, no-store, only-if-cached, max-age=0\r\n"].concat();
    if let Some(more) = with_request(&further, |head| RequestDirectives::parse(&head.fields)) {
        assert!(
            more.no_cache && more.no_store && more.only_if_cached && more.max_age_s == Some(0),
            "{more:?}"
        );
    }
}

// Each line of the input is a line of the field that its first byte chooses.
fuzz_target!(|data: &[u8]| {
    let (mut response, mut request) = (Vec::new(), Vec::new());
    for line in data.split(|&byte| byte == b'\n').take(16) {
        let Some((&chosen, value)) = line.split_first() else { continue };
        let names = [
            "Cache-Control",
            "CDN-Cache-Control",
            "Surrogate-Control",
            "Expires",
            "Age",
            "Pragma",
            "ETag",
            "Date",
        ];
        let name = names[usize::from(chosen) % names.len()];
        let line = [name.as_bytes(), b": ", value, b"\r\n"].concat();
        if matches!(name, "Cache-Control" | "Pragma") {
            request.extend_from_slice(&line);
        }
        response.extend_from_slice(&line);
    }
    check_response(&response);
    check_request(&request);
});
