//! What is normal holds nothing that two servers could read differently, and normalizing it again changes nothing.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_http::normalize::{Personality, normalize};
use tidegate_http::{HeadLimits, Progress, RequestParser};

type Normal = (Vec<u8>, Vec<u8>, Option<Vec<u8>>);

fn normal(request: &[u8], personality: Personality) -> Option<Normal> {
    let mut parser = RequestParser::new(HeadLimits::default());
    let Ok(Progress::Complete { .. }) = parser.parse(request) else { return None };
    let mut scratch = Vec::new();
    let normal = normalize(&parser.head(request), personality, &mut scratch).ok()?;
    Some((normal.authority.to_vec(), normal.path.to_vec(), normal.query.map(<[u8]>::to_vec)))
}

fn request(method: &[u8], target: &[u8], host: &[u8]) -> Vec<u8> {
    [method, b" ", target, b" HTTP/1.1\r\nHost: ", host, b"\r\n\r\n"].concat()
}

fuzz_target!(|data: &[u8]| {
    let Some((&seed, bytes)) = data.split_first() else { return };
    let method: &[u8] = [&b"GET"[..], b"OPTIONS", b"CONNECT"][usize::from(seed) % 3];
    let mut parts = bytes.splitn(2, |&byte| byte == b'\n');
    let target = parts.next().unwrap_or(b"");
    let host = parts.next().unwrap_or(b"a");
    for personality in Personality::ALL {
        let Some(first) = normal(&request(method, target, host), personality) else { continue };
        let (authority, path, query) = &first;
        assert!(!authority.is_empty());
        if method != b"CONNECT" && path != b"*" {
            assert_eq!(path[0], b'/');
            let mut segments: Vec<_> = path[1..].split(|&byte| byte == b'/').collect();
            segments.pop();
            assert!(segments.iter().all(|segment| !segment.is_empty()));
            assert!(path.split(|&byte| byte == b'/').all(|segment| segment != b"." && segment != b".."));
            assert!(path.len() + query.as_ref().map_or(0, Vec::len) <= 3 * target.len() + 1);
        }
        let printable = |part: &Vec<u8>| part.iter().all(|byte| byte.is_ascii_graphic());
        assert!(printable(authority) && printable(path) && query.as_ref().is_none_or(printable));
        let mut again = if method == b"CONNECT" { authority.clone() } else { path.clone() };
        if let Some(query) = query {
            again.push(b'?');
            again.extend_from_slice(query);
        }
        assert_eq!(
            normal(&request(method, &again, authority), personality).as_ref(),
            Some(&first),
            "{personality}"
        );
    }
});
