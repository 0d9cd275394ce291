//! Conditional requests (RFC 9110 §13) and the comparison of validators (§8.8).

use crate::date;
use crate::field::{FieldId, Fields};
use crate::head::Method;

/// What the conditions of a request come to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Precondition {
    /// Answer as if there were no condition.
    Proceed,
    /// 304: the client's copy is current.
    NotModified,
    /// 412: the condition is false.
    Failed,
}

/// Evaluates the conditions of a request on a representation with these validators, in the order of RFC 9110 §13.2.2.
/// Without `Last-Modified`, `If-Unmodified-Since` is ignored (§13.1.4). `If-Range` is left to [`if_range_holds`], since
/// it only decides about `Range`.
pub fn evaluate(
    method: Method,
    request: &Fields<'_>,
    etag: Option<&[u8]>,
    last_modified_s: Option<u64>,
) -> Precondition {
    if request.has(FieldId::IfMatch) {
        if !lists(request, FieldId::IfMatch, etag, strongly_match) {
            return Precondition::Failed;
        }
    } else if let (Some(limit_s), Some(modified_s)) =
        (single_date(request, FieldId::IfUnmodifiedSince), last_modified_s)
        && modified_s > limit_s
    {
        return Precondition::Failed;
    }
    evaluate_for_cache(method, request, etag, last_modified_s)
}

/// Evaluates only the conditions that apply to a cache (RFC 9111 §4.3.2): `If-None-Match` and `If-Modified-Since`,
/// which is compared with the response's Date where there is no `Last-Modified`.
pub fn evaluate_for_cache(
    method: Method,
    request: &Fields<'_>,
    etag: Option<&[u8]>,
    last_modified_s: Option<u64>,
) -> Precondition {
    let reads = matches!(method, Method::Get | Method::Head);
    if request.has(FieldId::IfNoneMatch) {
        return match lists(request, FieldId::IfNoneMatch, etag, weakly_match) {
            false => Precondition::Proceed,
            true if reads => Precondition::NotModified,
            true => Precondition::Failed,
        };
    }
    match (single_date(request, FieldId::IfModifiedSince), last_modified_s) {
        (Some(since_s), Some(modified_s)) if reads && modified_s <= since_s => Precondition::NotModified,
        _ => Precondition::Proceed,
    }
}

/// Whether `Range` applies (RFC 9110 §13.1.5): there is no `If-Range`, or it names exactly this representation.
///
/// A date counts only if it equals the last modification. Whether that date is a strong validator (§8.8.2.2) cannot be
/// told without the response's `Date`; use [`is_strong_date`] and give `None` if it is not.
pub fn if_range_holds(request: &Fields<'_>, etag: Option<&[u8]>, last_modified_s: Option<u64>) -> bool {
    let mut lines = request.get_all(FieldId::IfRange);
    let Some(value) = lines.next() else { return true };
    if lines.next().is_some() {
        return false;
    }
    match date::parse(value) {
        Some(date_s) => last_modified_s == Some(date_s),
        None => etag.is_some_and(|etag| strongly_match(value, etag)),
    }
}

/// RFC 9110 §8.8.2.2: a modification date is a strong validator if the response came at least a second later.
pub fn is_strong_date(last_modified_s: u64, date_s: u64) -> bool {
    last_modified_s < date_s
}

/// Whether a 304 is about the stored response with these validators (RFC 9111 §4.3.4), which was the only one that the
/// request asked about.
///
/// A 304 without validators is accepted: many servers leave them out, and only one response can be meant.
pub fn validators_match(
    not_modified: &Fields<'_>,
    etag: Option<&[u8]>,
    last_modified_s: Option<u64>,
) -> bool {
    if let Some(new) = not_modified.get(FieldId::Etag) {
        return match etag {
            Some(stored) if is_weak(new) => weakly_match(new, stored),
            // A server may turn a strong tag weak on the way, as compression does; the opaque part identifies.
            Some(stored) if is_weak(stored) => weakly_match(new, stored),
            Some(stored) => new == stored,
            None => false,
        };
    }
    match (not_modified.get(FieldId::LastModified).and_then(date::parse), last_modified_s) {
        (Some(new_s), Some(stored_s)) => new_s == stored_s,
        _ => true,
    }
}

/// RFC 9110 §8.8.3.2: weak comparison.
pub fn weakly_match(one: &[u8], other: &[u8]) -> bool {
    opaque(one) == opaque(other)
}

/// RFC 9110 §8.8.3.2: strong comparison. Only well-formed tags match: what is malformed promises nothing.
pub fn strongly_match(one: &[u8], other: &[u8]) -> bool {
    one == other && matches!(one, [b'"', .., b'"'])
}

/// RFC 9110 §8.8.1: the tag is that of representations that need not be the same byte for byte.
pub fn is_weak(etag: &[u8]) -> bool {
    etag.starts_with(b"W/")
}

fn opaque(etag: &[u8]) -> &[u8] {
    etag.strip_prefix(b"W/").unwrap_or(etag)
}

/// Whether the field is `*`, which any representation matches, or lists a tag that matches `etag`.
fn lists(request: &Fields<'_>, id: FieldId, etag: Option<&[u8]>, matches: fn(&[u8], &[u8]) -> bool) -> bool {
    request.get_all(id).any(|line| {
        line == b"*" || etag.is_some_and(|etag| entity_tags(line).any(|candidate| matches(candidate, etag)))
    })
}

/// The members of a list of entity tags. Unlike in a quoted string a backslash escapes nothing (RFC 9110 §8.8.3). A
/// member without quotes ends at a comma.
pub fn entity_tags(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = value;
    std::iter::from_fn(move || {
        let start = rest.iter().position(|byte| !matches!(byte, b' ' | b'\t' | b','))?;
        rest = &rest[start..];
        let quote = match rest {
            [b'"', ..] => Some(0),
            [b'W', b'/', b'"', ..] => Some(2),
            _ => None,
        };
        let end = match quote {
            Some(quote) => rest[quote + 1..]
                .iter()
                .position(|&byte| byte == b'"')
                .map_or(rest.len(), |length| quote + length + 2),
            None => rest.iter().position(|&byte| byte == b',').unwrap_or(rest.len()),
        };
        let (member, after) = rest.split_at(end);
        rest = after;
        Some(member.trim_ascii_end())
    })
}

/// A date that is given once and is valid; otherwise the field is ignored (RFC 9110 §13.1.3, §13.1.4).
fn single_date(request: &Fields<'_>, id: FieldId) -> Option<u64> {
    let mut lines = request.get_all(id);
    let value = lines.next()?;
    if lines.next().is_some() { None } else { date::parse(value) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::OwnedFields;
    use proptest::prelude::*;

    const EARLIER: &str = "Sun, 06 Nov 1994 08:49:36 GMT";
    const MODIFIED: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
    const LATER: &str = "Sun, 06 Nov 1994 08:49:38 GMT";
    const MODIFIED_S: u64 = 784_111_777;

    fn get(lines: &[(&str, &str)], etag: Option<&str>) -> Precondition {
        evaluate(Method::Get, &OwnedFields::new(lines).view(), etag.map(str::as_bytes), Some(MODIFIED_S))
    }

    #[test]
    fn if_none_match_compares_weakly_over_the_whole_list() {
        for value in
            ["\"a\"", "W/\"a\"", "\"x\", \"a\"", "\"x\",W/\"a\" , \"y\"", "*", ",, \"a\"", "\"x,\", \"a\""]
        {
            assert_eq!(get(&[("If-None-Match", value)], Some("\"a\"")), Precondition::NotModified, "{value}");
            assert_eq!(
                get(&[("If-None-Match", value)], Some("W/\"a\"")),
                Precondition::NotModified,
                "{value}"
            );
        }
        for value in ["\"b\"", "a", "\"a", "\"A\"", "\"x\\\", \"y\"", ""] {
            assert_eq!(get(&[("If-None-Match", value)], Some("\"a\"")), Precondition::Proceed, "{value}");
        }
        assert_eq!(
            get(&[("If-None-Match", "\"x\""), ("If-None-Match", "\"a\"")], Some("\"a\"")),
            Precondition::NotModified
        );
        assert_eq!(get(&[("If-None-Match", "\"a,b\"")], Some("\"a,b\"")), Precondition::NotModified);
        assert_eq!(get(&[("If-None-Match", "\"a\"")], None), Precondition::Proceed);
        assert_eq!(get(&[("If-None-Match", "*")], None), Precondition::NotModified);
        assert_eq!(get(&[("If-None-Match", "abc, def")], Some("def")), Precondition::NotModified);
    }

    #[test]
    fn if_none_match_fails_a_request_that_changes_something() {
        let fields = OwnedFields::new(&[("If-None-Match", "*")]);
        assert_eq!(evaluate(Method::Put, &fields.view(), None, None), Precondition::Failed);
    }

    #[test]
    fn if_match_compares_strongly() {
        assert_eq!(get(&[("If-Match", "\"a\"")], Some("\"a\"")), Precondition::Proceed);
        assert_eq!(get(&[("If-Match", "\"b\", \"a\"")], Some("\"a\"")), Precondition::Proceed);
        assert_eq!(get(&[("If-Match", "*")], None), Precondition::Proceed);
        assert_eq!(get(&[("If-Match", "W/\"a\"")], Some("W/\"a\"")), Precondition::Failed);
        assert_eq!(get(&[("If-Match", "\"b\"")], Some("\"a\"")), Precondition::Failed);
    }

    #[test]
    fn dates_count_where_there_is_no_tag() {
        assert_eq!(get(&[("If-Modified-Since", MODIFIED)], None), Precondition::NotModified);
        assert_eq!(get(&[("If-Modified-Since", LATER)], None), Precondition::NotModified);
        assert_eq!(get(&[("If-Modified-Since", EARLIER)], None), Precondition::Proceed);
        assert_eq!(get(&[("If-Modified-Since", "yesterday")], None), Precondition::Proceed);
        assert_eq!(
            get(&[("If-Modified-Since", LATER), ("If-Modified-Since", LATER)], None),
            Precondition::Proceed
        );
        assert_eq!(get(&[("If-Unmodified-Since", EARLIER)], None), Precondition::Failed);
        assert_eq!(get(&[("If-Unmodified-Since", MODIFIED)], None), Precondition::Proceed);
        let fields = OwnedFields::new(&[("If-Modified-Since", LATER)]);
        assert_eq!(evaluate(Method::Post, &fields.view(), None, Some(MODIFIED_S)), Precondition::Proceed);
    }

    #[test]
    fn conditions_are_evaluated_in_order() {
        let inm_first = [("If-None-Match", "\"b\""), ("If-Modified-Since", LATER)];
        assert_eq!(get(&inm_first, Some("\"a\"")), Precondition::Proceed);
        let match_first = [("If-Match", "\"b\""), ("If-None-Match", "\"a\"")];
        assert_eq!(get(&match_first, Some("\"a\"")), Precondition::Failed);
        let match_beats_date = [("If-Match", "\"a\""), ("If-Unmodified-Since", EARLIER)];
        assert_eq!(get(&match_beats_date, Some("\"a\"")), Precondition::Proceed);
        let both_hold = [("If-Match", "\"a\""), ("If-None-Match", "\"a\"")];
        assert_eq!(get(&both_hold, Some("\"a\"")), Precondition::NotModified);
    }

    #[test]
    fn if_range_needs_exactly_this_representation() {
        let holds = |value: &str, etag: &str| {
            if_range_holds(
                &OwnedFields::new(&[("If-Range", value)]).view(),
                Some(etag.as_bytes()),
                Some(MODIFIED_S),
            )
        };
        assert!(holds("\"a\"", "\"a\"") && holds(MODIFIED, "\"a\""));
        assert!(
            !holds("\"b\"", "\"a\"")
                && !holds("W/\"a\"", "W/\"a\"")
                && !holds(LATER, "\"a\"")
                && !holds("", "\"a\"")
        );
        assert!(if_range_holds(&OwnedFields::new::<&str, &str>(&[]).view(), None, None));
        assert!(is_strong_date(1, 2) && !is_strong_date(2, 2));
    }

    #[test]
    fn a_304_is_about_the_response_whose_validators_it_has() {
        let matches = |lines: &[(&str, &str)], etag: Option<&str>| {
            validators_match(&OwnedFields::new(lines).view(), etag.map(str::as_bytes), Some(MODIFIED_S))
        };
        assert!(matches(&[("ETag", "\"a\"")], Some("\"a\"")));
        assert!(matches(&[("ETag", "W/\"a\"")], Some("\"a\"")));
        assert!(matches(&[("ETag", "\"a\""), ("Last-Modified", LATER)], Some("\"a\"")));
        assert!(matches(&[("Last-Modified", MODIFIED)], Some("\"a\"")));
        assert!(matches(&[], Some("\"a\"")));
        assert!(!matches(&[("ETag", "\"b\"")], Some("\"a\"")));
        assert!(!matches(&[("ETag", "\"b\"")], None));
        assert!(!matches(&[("Last-Modified", LATER)], None));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(
            value in prop::collection::vec(any::<u8>(), 0..60),
            etag in prop::option::of(prop::collection::vec(any::<u8>(), 0..10)),
        ) {
            let names = ["If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since", "If-Range", "ETag"];
            for name in names {
                let fields = OwnedFields::new(&[(name.as_bytes(), &value[..])]);
                let _ = evaluate(Method::Get, &fields.view(), etag.as_deref(), Some(1));
                let _ = if_range_holds(&fields.view(), etag.as_deref(), Some(1));
                let _ = validators_match(&fields.view(), etag.as_deref(), Some(1));
            }
        }

        #[test]
        fn every_tag_of_a_list_is_found(tags in prop::collection::vec("(W/)?\"[!#-~]{0,6}\"", 1..6), separator in "[ ]{0,2},[ ,]{0,2}") {
            let list = tags.join(&separator);
            let found: Vec<_> = entity_tags(list.as_bytes()).collect();
            let expected: Vec<_> = tags.iter().map(|tag| tag.as_bytes()).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
