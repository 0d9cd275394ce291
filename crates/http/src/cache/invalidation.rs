//! What an unsafe request made obsolete (RFC 9111 §4.4).

use crate::field::{FieldId, Fields};
use crate::head::{RequestHead, ResponseHead};
use crate::normalize::{Normalized, Personality, normalize};

/// URLs longer than this are not followed.
const MAX_URL_BYTES: usize = 16 * 1024;

/// Names every stored URL that `response` invalidates: `None` stands for the target of the request, `Some` is the
/// normalized absolute URL in `Location` or `Content-Location`, always with the scheme `http`. Nothing is named unless
/// the method may change state and the response is no error.
///
/// Only URLs of the target's own authority are named: otherwise one site could empty the cache of another.
pub fn targets(
    request: &RequestHead<'_>,
    target: &Normalized<'_>,
    response: &ResponseHead<'_>,
    personality: Personality,
    mut each: impl FnMut(Option<&[u8]>),
) {
    if request.method.is_safe() || !(200..400).contains(&response.status) {
        return;
    }
    each(None);
    for id in [FieldId::Location, FieldId::ContentLocation] {
        for reference in response.fields.get_all(id) {
            if let Some(url) = resolve(reference, target, personality) {
                each(Some(&url));
            }
        }
    }
}

/// The normalized URL that `reference` means relative to `base` (RFC 3986 §5.2); `None` if it is on another authority
/// or malformed.
fn resolve(reference: &[u8], base: &Normalized<'_>, personality: Personality) -> Option<Vec<u8>> {
    let reference = reference.split(|&byte| byte == b'#').next()?;
    if reference.len() > MAX_URL_BYTES || !base.path.starts_with(b"/") {
        return None;
    }
    let has_scheme =
        |scheme: &[u8]| reference.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme));
    let mut url = Vec::with_capacity(reference.len() + base.authority.len() + base.path.len() + 8);
    if has_scheme(b"http://") || has_scheme(b"https://") {
        url.extend_from_slice(reference);
    } else {
        url.extend_from_slice(b"http:");
        if !reference.starts_with(b"//") {
            url.extend_from_slice(b"//");
            url.extend_from_slice(base.authority);
            write_path(reference, base, &mut url)?;
            return normalized(&url, base, personality);
        }
        url.extend_from_slice(reference);
    }
    normalized(&url, base, personality)
}

fn write_path(reference: &[u8], base: &Normalized<'_>, url: &mut Vec<u8>) -> Option<()> {
    match reference.first() {
        Some(b'/') => {}
        Some(b'?') => url.extend_from_slice(base.path),
        None => {
            url.extend_from_slice(base.path);
            if let Some(query) = base.query {
                url.push(b'?');
                url.extend_from_slice(query);
            }
        }
        Some(_) => {
            // RFC 3986 §4.2: a colon in the first segment would make it a scheme.
            let segment = reference.split(|byte| matches!(byte, b'/' | b'?')).next()?;
            if segment.contains(&b':') {
                return None;
            }
            let directory = base.path.iter().rposition(|&byte| byte == b'/')?;
            url.extend_from_slice(&base.path[..=directory]);
        }
    }
    url.extend_from_slice(reference);
    Some(())
}

/// `url` as the target of a request that came in absolute-form.
fn normalized(url: &[u8], base: &Normalized<'_>, personality: Personality) -> Option<Vec<u8>> {
    let request = RequestHead {
        method: crate::head::Method::Get,
        method_bytes: b"GET",
        target: url,
        version: crate::head::Version::Http11,
        fields: Fields::new(b"", &[], 0),
        framing: crate::head::BodyFraming::None,
        keep_alive: true,
        expect_continue: false,
        upgrade: false,
    };
    let mut scratch = Vec::new();
    let target = normalize(&request, personality, &mut scratch).ok()?;
    if target.authority != base.authority {
        return None;
    }
    let mut out = Vec::with_capacity(url.len());
    out.extend_from_slice(b"http://");
    out.extend_from_slice(target.authority);
    out.extend_from_slice(target.path);
    if let Some(query) = target.query {
        out.push(b'?');
        out.extend_from_slice(query);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::{OwnedFields, request, response};
    use crate::head::Method;
    use proptest::prelude::*;

    const BASE: Normalized<'_> =
        Normalized { authority: b"a.example", path: b"/x/y", query: Some(b"q=1"), reading: None };

    fn named(method: Method, status: u16, lines: &[(&str, &str)]) -> Vec<String> {
        let (none, fields) = (OwnedFields::new::<&str, &str>(&[]), OwnedFields::new(lines));
        let mut urls = Vec::new();
        targets(
            &request(method, b"/x/y?q=1", &none),
            &BASE,
            &response(status, &fields),
            Personality::Strict,
            |url| {
                urls.push(url.map_or("self".into(), |url| String::from_utf8(url.to_vec()).unwrap()));
            },
        );
        urls
    }

    #[test]
    fn only_unsafe_requests_that_succeed_invalidate() {
        for method in [Method::Post, Method::Put, Method::Delete, Method::Patch, Method::Other] {
            assert_eq!(named(method, 200, &[]), ["self"]);
            assert_eq!(named(method, 303, &[]), ["self"]);
            assert!(named(method, 404, &[]).is_empty() && named(method, 500, &[]).is_empty());
        }
        for method in [Method::Get, Method::Head, Method::Options, Method::Trace, Method::Query] {
            assert!(named(method, 200, &[("Location", "/a")]).is_empty());
        }
    }

    #[test]
    fn locations_of_the_same_authority_are_resolved() {
        for (reference, expected) in [
            ("/p", "http://a.example/p"),
            ("/p/../q?r#f", "http://a.example/q?r"),
            ("z", "http://a.example/x/z"),
            ("../z", "http://a.example/z"),
            ("?r=2", "http://a.example/x/y?r=2"),
            ("", "http://a.example/x/y?q=1"),
            ("#f", "http://a.example/x/y?q=1"),
            ("//A.example/p", "http://a.example/p"),
            ("HTTP://a.example:80/%7Ep", "http://a.example/~p"),
            ("https://a.example/p", "http://a.example/p"),
        ] {
            assert_eq!(
                named(Method::Post, 201, &[("Location", reference)]),
                ["self", expected],
                "{reference}"
            );
        }
        let both = [("Location", "/a"), ("Content-Location", "/b")];
        assert_eq!(named(Method::Put, 200, &both), ["self", "http://a.example/a", "http://a.example/b"]);
    }

    #[test]
    fn other_authorities_and_nonsense_are_not_followed() {
        for reference in
            ["http://b.example/p", "//b.example/", "http://a.example:81/p", "mailto:x", "http://", "/%zz"]
        {
            assert_eq!(named(Method::Post, 201, &[("Location", reference)]), ["self"], "{reference}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(reference in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = resolve(&reference, &BASE, Personality::Strict);
        }
    }
}
