//! Which request fields select a stored response (RFC 9111 §4.1).

use super::directives::members;
use crate::field::{FieldId, Fields};

/// More members than this are not sorted; the key then depends on their order.
const SORTED_MEMBERS: usize = 16;

/// Whether `Vary` has the member `*`: no request ever matches.
pub fn is_any(response: &Fields<'_>) -> bool {
    response.get_all(FieldId::Vary).flat_map(members).any(|name| name == b"*")
}

/// Whether `Vary` names a field that a gateway writes anew, so that the request's own value does not tell which response
/// it gets: those with the client's address always; the scheme and the host, which are part of the URL, if `request` has
/// that field too.
pub fn is_by_client(response: &Fields<'_>, request: &Fields<'_>) -> bool {
    response.get_all(FieldId::Vary).flat_map(members).any(|name| match FieldId::from_name(name) {
        FieldId::Forwarded | FieldId::XForwardedFor | FieldId::XRealIp | FieldId::Via => true,
        id @ (FieldId::XForwardedProto | FieldId::XForwardedHost) => request.has(id),
        FieldId::Other => crate::forward::is_deceptive(name),
        _ => false,
    })
}

/// Appends the names that `Vary` lists: in lower case, each once, in alphabetical order, separated by commas. `false` and
/// nothing appended if there is none. The order does not matter to which requests match, so it must not matter here.
pub fn write_names(response: &Fields<'_>, out: &mut Vec<u8>) -> bool {
    if !response.has(FieldId::Vary) {
        return false;
    }
    let mut names: Vec<Vec<u8>> =
        response.get_all(FieldId::Vary).flat_map(members).map(<[u8]>::to_ascii_lowercase).collect();
    names.sort_unstable();
    names.dedup();
    for (i, name) in names.iter().enumerate() {
        if i > 0 {
            out.push(b',');
        }
        out.extend_from_slice(name);
    }
    !names.is_empty()
}

/// Appends what distinguishes `request` among the responses that vary by `names`, which [`write_names`] wrote.
///
/// Two requests get the same bytes exactly if each named field has the same value in both, or is in neither, where
/// - lines with one name are joined and whitespace around commas outside quotes does not count;
/// - of `Accept-Encoding` and `Accept-Language` (RFC 9110 §12.5.3, §12.5.4) only the weights count, not the order, the
///   case, or how the weights are written.
pub fn write_secondary_key(names: &[u8], request: &Fields<'_>, out: &mut Vec<u8>) {
    for name in names.split(|&byte| byte == b',').filter(|name| !name.is_empty()) {
        let start = out.len();
        // Neither NUL nor a line feed can be in a field value, so that no value looks like the end of another.
        out.push(b'\n');
        let is_present = match FieldId::from_name(name) {
            FieldId::Other => write_value(request.named(name), out),
            FieldId::AcceptEncoding => write_weighted(request, FieldId::AcceptEncoding, out),
            FieldId::AcceptLanguage => write_weighted(request, FieldId::AcceptLanguage, out),
            id => write_value(request.get_all(id), out),
        };
        if !is_present {
            out.truncate(start);
            out.push(0);
        }
    }
}

fn write_value<'a>(lines: impl Iterator<Item = &'a [u8]>, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    let mut is_present = false;
    for line in lines {
        is_present = true;
        for member in members(line) {
            if out.len() > start {
                out.push(b',');
            }
            out.extend_from_slice(member);
        }
    }
    is_present
}

/// A member of a weighted list (RFC 9110 §12.4.2): its weight in thousandths.
#[derive(Clone, Copy, Eq, Ord, PartialEq, PartialOrd)]
struct Weighted {
    unwanted: u16,
    name: Name,
}

/// A range of the output.
#[derive(Clone, Copy, Eq, Ord, PartialEq, PartialOrd)]
struct Name {
    start: usize,
    end: usize,
}

fn write_weighted(request: &Fields<'_>, id: FieldId, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    if write_sorted(request, id, out).is_none() {
        out.truncate(start);
        return write_value(request.get_all(id), out);
    }
    request.has(id)
}

/// Writes the members by falling weight and then by name; `None` if one of them is malformed or there are too many.
fn write_sorted(request: &Fields<'_>, id: FieldId, out: &mut Vec<u8>) -> Option<()> {
    let mut found = [Weighted { unwanted: 0, name: Name { start: 0, end: 0 } }; SORTED_MEMBERS];
    let mut count = 0;
    let start = out.len();
    for member in request.get_all(id).flat_map(members) {
        let mut parts = member.split(|&byte| byte == b';').map(<[u8]>::trim_ascii);
        let name = parts.next()?;
        if name.is_empty() || !name.iter().all(|&byte| crate::chars::is_token(byte)) {
            return None;
        }
        let weight = parts.next().map_or(Some(1000), weight)?;
        if parts.next().is_some() {
            return None;
        }
        let name_start = out.len();
        out.extend(name.iter().map(u8::to_ascii_lowercase));
        *found.get_mut(count)? =
            Weighted { unwanted: 1000 - weight, name: Name { start: name_start, end: out.len() } };
        count += 1;
    }
    let found = &mut found[..count];
    let names = out.split_off(start);
    let name_of = |member: &Weighted| &names[member.name.start - start..member.name.end - start];
    found.sort_unstable_by(|a, b| a.unwanted.cmp(&b.unwanted).then_with(|| name_of(a).cmp(name_of(b))));
    for (i, member) in found.iter().enumerate() {
        if i > 0 {
            out.push(b',');
        }
        out.extend_from_slice(name_of(member));
        if member.unwanted > 0 {
            out.extend_from_slice(&[b';', (member.unwanted >> 8) as u8 + b'0']);
            // Base 16 digits keep clear of the separators.
            out.push(b"0123456789abcdef"[usize::from(member.unwanted >> 4 & 15)]);
            out.push(b"0123456789abcdef"[usize::from(member.unwanted & 15)]);
        }
    }
    Some(())
}

/// `q=0.5` in thousandths.
fn weight(parameter: &[u8]) -> Option<u16> {
    let [b'q' | b'Q', b'=', whole @ (b'0' | b'1'), rest @ ..] = parameter else { return None };
    let digits = match rest {
        [] => &[][..],
        [b'.', digits @ ..] if digits.len() <= 3 && digits.iter().all(u8::is_ascii_digit) => digits,
        _ => return None,
    };
    let mut weight = u16::from(*whole - b'0');
    for i in 0..3 {
        weight = weight * 10 + digits.get(i).map_or(0, |digit| u16::from(digit - b'0'));
    }
    (weight <= 1000).then_some(weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::OwnedFields;
    use proptest::prelude::*;

    fn names(lines: &[(&str, &str)]) -> Option<String> {
        let mut out = Vec::new();
        write_names(&OwnedFields::new(lines).view(), &mut out).then(|| String::from_utf8(out).unwrap())
    }

    fn key(names: &str, lines: &[(&str, &str)]) -> Vec<u8> {
        let mut out = b"prefix".to_vec();
        write_secondary_key(names.as_bytes(), &OwnedFields::new(lines).view(), &mut out);
        assert!(out.starts_with(b"prefix"));
        out
    }

    #[test]
    fn names_are_sorted_lowered_and_unique() {
        let lines = [("Vary", "Foo, accept-encoding ,"), ("vary", "FOO,Bar")];
        assert_eq!(names(&lines).as_deref(), Some("accept-encoding,bar,foo"));
        assert_eq!(names(&[]), None);
        assert_eq!(names(&[("Vary", " , ")]), None);
    }

    #[test]
    fn a_star_anywhere_matches_nothing() {
        for value in ["*", "*, *", ", *", "*, Foo", "Foo, *"] {
            assert!(is_any(&OwnedFields::new(&[("Vary", value)]).view()), "{value}");
        }
        assert!(is_any(&OwnedFields::new(&[("Vary", ""), ("Vary", "*")]).view()));
        assert!(!is_any(&OwnedFields::new(&[("Vary", "Foo")]).view()));
    }

    #[test]
    fn equal_requests_have_equal_keys() {
        for (names, one, other) in [
            ("foo", vec![("Foo", "1, 2")], vec![("fOO", "1"), ("foo", "2")]),
            ("foo", vec![("Foo", "1,2")], vec![("Foo", "1 ,  2")]),
            ("foo", vec![("Bar", "1")], vec![("Bar", "2")]),
            ("accept-language", vec![("Accept-Language", "en, de")], vec![("Accept-Language", "De ,eN")]),
            (
                "accept-language",
                vec![("Accept-Language", "en;q=0.5, de")],
                vec![("Accept-Language", "de;q=1.0, en; Q=0.500")],
            ),
            (
                "accept-encoding",
                vec![("Accept-Encoding", "gzip, br")],
                vec![("Accept-Encoding", "br"), ("Accept-Encoding", "GZIP")],
            ),
        ] {
            assert_eq!(key(names, &one), key(names, &other), "{one:?} {other:?}");
        }
    }

    #[test]
    fn different_requests_have_different_keys() {
        for (names, one, other) in [
            ("foo", vec![("Foo", "1")], vec![("Foo", "2")]),
            ("foo", vec![("Foo", "1")], vec![]),
            ("foo", vec![("Foo", "")], vec![]),
            ("foo", vec![("Foo", "1, 2")], vec![("Foo", "2, 1")]),
            ("foo", vec![("Foo", "\"1, 2\"")], vec![("Foo", "\"1,2\"")]),
            ("foo", vec![("Foo", "a")], vec![("Foo", "A")]),
            ("bar,foo", vec![("Bar", "1")], vec![("Foo", "1")]),
            (
                "accept-language",
                vec![("Accept-Language", "en, de;q=0.5")],
                vec![("Accept-Language", "en, de")],
            ),
            ("accept-language", vec![("Accept-Language", "en;q=0")], vec![("Accept-Language", "en")]),
            ("accept-language", vec![("Accept-Language", "en;q=2")], vec![("Accept-Language", "en;q=1")]),
            ("accept-encoding", vec![("Accept-Encoding", "")], vec![]),
            ("accept-encoding", vec![("Accept-Encoding", "gzip")], vec![("Accept-Encoding", "br")]),
        ] {
            assert_ne!(key(names, &one), key(names, &other), "{one:?} {other:?}");
        }
    }

    #[test]
    fn long_lists_are_kept_in_order() {
        let long: Vec<String> = (0..40).map(|i| format!("x{i}")).collect();
        let backwards: Vec<String> = long.iter().rev().cloned().collect();
        let one = key("accept-language", &[("Accept-Language", &long.join(", "))]);
        assert_eq!(one, key("accept-language", &[("Accept-Language", &long.join(","))]));
        assert_ne!(one, key("accept-language", &[("Accept-Language", &backwards.join(","))]));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(
            names in prop::collection::vec(any::<u8>(), 0..30),
            value in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            let fields = OwnedFields::new(&[(&b"Accept-Language"[..], &value[..]), (b"Vary", &value)]);
            let mut out = Vec::new();
            write_secondary_key(&names, &fields.view(), &mut out);
            write_secondary_key(b"accept-language", &fields.view(), &mut out);
            write_names(&fields.view(), &mut out);
        }

        #[test]
        fn different_values_of_unknown_fields_never_collide(
            one in prop::collection::vec("[ab, \"]{0,5}", 2),
            other in prop::collection::vec("[ab, \"]{0,5}", 2),
        ) {
            let plain = |values: &[String]| -> Vec<Vec<Vec<u8>>> {
                values.iter().map(|value| members(value.as_bytes()).map(<[u8]>::to_vec).collect()).collect()
            };
            let of = |values: &[String]| key("x-a,x-b", &[("X-A", &values[0]), ("X-B", &values[1])]);
            prop_assert_eq!(plain(&one) == plain(&other), of(&one) == of(&other));
        }
    }
}
