//! Which request fields select a stored response (RFC 9111 §4.1).

use super::directives::{members, parts};
use crate::chars::is_token;
use crate::field::{FieldId, Fields};
use crate::field_rules::imitates;
use crate::forward::{ConnectionOptions, without_cookie};

/// More members than this are not sorted; the key then depends on their order.
const SORTED_MEMBERS: usize = 16;

/// Whether `Vary` has the member `*`: no request ever matches. A member that is no field name, such as `A; B` or `A B`,
/// is taken for one: which fields select the response is not known then.
pub fn is_any(response: &Fields<'_>) -> bool {
    let is_name = |name: &[u8]| name != b"*" && name.iter().all(|&byte| is_token(byte));
    response.get_all(FieldId::Vary).flat_map(members).any(|name| !is_name(name))
}

/// Whether `Vary` names a field that a gateway writes anew, so that the request's own value does not tell which
/// response it gets: those with the client's address always; the scheme and the host, which are part of the URL, if
/// `request` has that field too.
pub fn is_by_client(response: &Fields<'_>, request: &Fields<'_>) -> bool {
    response.get_all(FieldId::Vary).flat_map(members).any(|name| match FieldId::from_name(name) {
        FieldId::Forwarded | FieldId::XForwardedFor | FieldId::XRealIp | FieldId::Via => true,
        id @ (FieldId::XForwardedProto | FieldId::XForwardedHost) => request.has(id),
        FieldId::Other => crate::forward::is_deceptive(name),
        _ => false,
    })
}

/// Whether some server takes a field of `request` for one that `Vary` names, such as `X_Tenant` for `X-Tenant`: its value may
/// have selected the response without being part of what other requests are compared by.
pub fn is_imitated(response: &Fields<'_>, request: &Fields<'_>) -> bool {
    response
        .get_all(FieldId::Vary)
        .flat_map(members)
        .any(|name| request.iter().any(|(id, sent, _)| id == FieldId::Other && imitates(sent, name)))
}

/// Appends the names that `Vary` lists: in lower case, each once, in alphabetical order, separated by commas. `false`
/// and nothing appended if there is none. The order does not matter to which requests match, so it must not matter
/// here.
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
/// Two requests get the same bytes exactly if the origin is sent the same value of each named field, where RFC 9111 §4.1
/// lets a cache take these for the same, and no more than these, because nobody knows what an application makes of `1,`:
/// - of fields that are not known here, and of known ones with list syntax, lines are joined (RFC 9110 §5.3) and
///   whitespace around commas outside quotes does not count;
/// - of `Accept-Encoding` and `Accept-Language` (RFC 9110 §12.5.3, §12.5.4) only the weights count, not the order, the
///   case, or how the weights are written;
/// - of all other known fields each line counts byte by byte.
///
/// A field that `Connection` names does not reach the origin, so it is absent here; so are cookies named `own_cookie`,
/// as in [`crate::forward::ForwardContext`].
pub fn write_secondary_key(names: &[u8], request: &Fields<'_>, own_cookie: &[u8], out: &mut Vec<u8>) {
    for name in names.split(|&byte| byte == b',').filter(|name| !name.is_empty()) {
        match FieldId::from_name(name) {
            FieldId::Other if is_removed(name, request) => out.push(ABSENT),
            FieldId::Other => write_list(request.named(name), out),
            id @ (FieldId::Accept | FieldId::AcceptCharset) => write_list(request.get_all(id), out),
            id @ (FieldId::AcceptEncoding | FieldId::AcceptLanguage) => write_weighted(request, id, out),
            FieldId::Cookie => {
                let lines = request.get_all(FieldId::Cookie);
                write_lines(lines.filter_map(|line| without_cookie(line, own_cookie)), out);
            }
            id => write_lines(request.get_all(id), out),
        }
    }
}

/// A request field that selects a response, and its value in a request for that, if it had one.
pub type Selecting<'n> = (&'n [u8], Option<Vec<u8>>);

/// What [`write_secondary_key`] wrote for `names`, to be shown: a value may look other than in the request. `None` if
/// it is not for these names.
pub fn read_secondary_key<'n>(names: &'n [u8], mut key: &[u8]) -> Option<Vec<Selecting<'n>>> {
    let mut fields = Vec::new();
    for name in names.split(|&byte| byte == b',').filter(|name| !name.is_empty()) {
        let value = match key.split_first()? {
            (&ABSENT, rest) => {
                key = rest;
                None
            }
            (&FIELD_END, rest) => {
                key = rest;
                Some(shown_weights(until_end(&mut key)?))
            }
            _ => Some(shown_lines(until_end(&mut key)?)),
        };
        fields.push((name, value));
    }
    key.is_empty().then_some(fields)
}

/// Takes what stands before the end of a field out of `key`, with its end.
fn until_end<'k>(key: &mut &'k [u8]) -> Option<&'k [u8]> {
    let length = key.iter().position(|&byte| byte == FIELD_END)?;
    let field = &key[..length];
    *key = &key[length + 1..];
    Some(field)
}

fn shown_lines(field: &[u8]) -> Vec<u8> {
    let field = field.strip_suffix(&[LINE_END]).unwrap_or(field);
    field.split(|&byte| byte == LINE_END).collect::<Vec<_>>().join(&b", "[..])
}

fn shown_weights(field: &[u8]) -> Vec<u8> {
    let shown = |member: &[u8]| {
        let mut parts = member.splitn(2, |&byte| byte == b';');
        let mut out = parts.next().unwrap_or(b"").to_vec();
        let digits = parts.next().and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(unwanted) = digits.and_then(|digits| u16::from_str_radix(digits, 16).ok()) {
            let weight = format!("{:04}", 1000_u16.saturating_sub(unwanted));
            let thousandths = weight[1..].trim_end_matches('0');
            let point = if thousandths.is_empty() { "" } else { "." };
            out.extend_from_slice(format!(";q={}{point}{thousandths}", &weight[..1]).as_bytes());
        }
        out
    };
    field.split(|&byte| byte == b',').map(shown).collect::<Vec<_>>().join(&b", "[..])
}

// A field is written as `ABSENT`, as one or more times a line (or a list) and `LINE_END` and then `FIELD_END`, or as
// `FIELD_END`, weights and `FIELD_END`. None of these bytes can be in a field value, so that no value looks like
// another.
const ABSENT: u8 = 0;
const LINE_END: u8 = b'\r';
const FIELD_END: u8 = b'\n';

/// Whether a field does not go on because `Connection` names it (RFC 9110 §7.6.1).
fn is_removed(name: &[u8], request: &Fields<'_>) -> bool {
    request.has(FieldId::Connection) && ConnectionOptions::of(*request).removes(FieldId::Other, name)
}

fn write_list<'a>(lines: impl Iterator<Item = &'a [u8]>, out: &mut Vec<u8>) {
    let start = out.len();
    for (i, line) in lines.enumerate() {
        for (j, part) in parts(line).enumerate() {
            if i + j > 0 {
                // What ended the list is what separates it from the next line.
                out.pop_if(|last| *last == LINE_END);
                out.push(b',');
            }
            out.extend_from_slice(part);
        }
        out.push(LINE_END);
    }
    out.push(if out.len() == start { ABSENT } else { FIELD_END });
}

fn write_lines(lines: impl Iterator<Item = impl AsRef<[u8]>>, out: &mut Vec<u8>) {
    let start = out.len();
    for line in lines {
        out.extend_from_slice(line.as_ref());
        out.push(LINE_END);
    }
    out.push(if out.len() == start { ABSENT } else { FIELD_END });
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

fn write_weighted(request: &Fields<'_>, id: FieldId, out: &mut Vec<u8>) {
    let start = out.len();
    out.push(FIELD_END);
    if !request.has(id) || write_sorted(request, id, out).is_none() {
        out.truncate(start);
        return write_lines(request.get_all(id), out);
    }
    out.push(FIELD_END);
}

/// Writes the members by falling weight and then by name; `None` if one of them is malformed or there are too many.
fn write_sorted(request: &Fields<'_>, id: FieldId, out: &mut Vec<u8>) -> Option<()> {
    let mut found = [Weighted { unwanted: 0, name: Name { start: 0, end: 0 } }; SORTED_MEMBERS];
    let mut count = 0;
    let start = out.len();
    for member in request.get_all(id).flat_map(members) {
        let mut parts = member.split(|&byte| byte == b';').map(<[u8]>::trim_ascii);
        let name = parts.next()?;
        if name.is_empty() || !name.iter().all(|&byte| is_token(byte)) {
            return None;
        }
        let weight = parts.next().map_or(Some(MOST_WANTED), weight)?;
        if parts.next().is_some() {
            return None;
        }
        let name_start = out.len();
        out.extend(name.iter().map(u8::to_ascii_lowercase));
        *found.get_mut(count)? =
            Weighted { unwanted: MOST_WANTED - weight, name: Name { start: name_start, end: out.len() } };
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

/// What a member of a weighted list without a weight has.
pub const MOST_WANTED: u16 = 1000;

/// `q=0.5` in thousandths (RFC 9110 §12.4.2); `None` if it is malformed.
pub fn weight(parameter: &[u8]) -> Option<u16> {
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
    (weight <= MOST_WANTED).then_some(weight)
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
        write_secondary_key(names.as_bytes(), &OwnedFields::new(lines).view(), b"pass", &mut out);
        assert!(out.starts_with(b"prefix"));
        out
    }

    #[test]
    fn what_we_write_ourselves_selects_nothing() {
        let is_by_client = |vary: &str, sent: &str| {
            super::is_by_client(
                &OwnedFields::new(&[("Vary", vary)]).view(),
                &OwnedFields::new(&[(sent, "x")]).view(),
            )
        };
        for name in ["Forwarded", "X-Forwarded-For", "X-Real-IP", "Via", "CF-Connecting-IP", "x_real_ip"] {
            assert!(is_by_client(&format!("Accept, {name}"), "X-A"), "{name}");
        }
        for name in ["X-Forwarded-Proto", "X-Forwarded-Host"] {
            assert!(is_by_client(name, name) && !is_by_client(name, "X-A"), "{name}");
        }
        assert!(!is_by_client("Accept, X-Real", "X-A"));
    }

    #[test]
    fn what_servers_take_for_a_field_that_selects_is_told_from_it() {
        let is_imitated = |vary: &str, sent: &str| {
            let request = OwnedFields::new(&[("Accept", "*/*"), (sent, "x")]);
            super::is_imitated(&OwnedFields::new(&[("Vary", vary)]).view(), &request.view())
        };
        for sent in ["X_Tenant", "x.tenant", "X~TENANT"] {
            assert!(is_imitated("Accept, X-Tenant", sent), "{sent}");
            assert!(!is_imitated("Accept", sent), "{sent}");
        }
        assert!(is_imitated("X_Tenant", "X-Tenant"));
        for sent in ["X-Tenant", "x-tenant", "X_Tenants", "XxTenant", "X_Tenan"] {
            assert!(!is_imitated("Accept, X-Tenant", sent), "{sent}");
        }
    }

    #[test]
    fn own_cookie_selects_no_response() {
        let of = |cookie: &str| key("cookie", &[("Cookie", cookie)]);
        assert_eq!(of("a=b; pass=1"), of("a=b"));
        assert_eq!(of("pass=1"), key("cookie", &[]));
        assert_ne!(of("passport=1"), key("cookie", &[]));
    }

    #[test]
    fn names_are_sorted_lowered_and_unique() {
        let lines = [("Vary", "Foo, accept-encoding ,"), ("vary", "FOO,Bar")];
        assert_eq!(names(&lines).as_deref(), Some("accept-encoding,bar,foo"));
        assert_eq!(names(&[]), None);
        assert_eq!(names(&[("Vary", " , ")]), None);
    }

    #[test]
    fn what_selects_a_response_can_be_read_from_its_key() {
        let names = "accept,accept-encoding,accept-language,cookie,x-a,x-b";
        let lines = [
            ("Accept", "text/html , */*"),
            ("Accept-Encoding", "gzip;q=0.25, BR, zstd;q=0, x;q=0.999"),
            ("Accept-Language", "de; level=1"),
            ("Cookie", "a=1"),
            ("Cookie", "pass=2; b=2"),
            ("X-A", ""),
        ];
        let written = key(names, &lines);
        let read = read_secondary_key(names.as_bytes(), &written[b"prefix".len()..]).unwrap();
        let shown: Vec<(&str, Option<String>)> = read
            .into_iter()
            .map(|(name, value)| {
                (std::str::from_utf8(name).unwrap(), value.map(|it| String::from_utf8(it).unwrap()))
            })
            .collect();
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            shown,
            [
                ("accept", some("text/html,*/*")),
                ("accept-encoding", some("br, x;q=0.999, gzip;q=0.25, zstd;q=0")),
                ("accept-language", some("de; level=1")),
                ("cookie", some("a=1, b=2")),
                ("x-a", some("")),
                ("x-b", None),
            ]
        );
    }

    #[test]
    fn a_star_anywhere_matches_nothing() {
        for value in ["*", "*, *", ", *", "*, Foo", "Foo, *", "X-A; X-B", "X-A X-B", "\"a, b\"", "a,b=\"c"] {
            assert!(is_any(&OwnedFields::new(&[("Vary", value)]).view()), "{value}");
        }
        assert!(is_any(&OwnedFields::new(&[("Vary", ""), ("Vary", "*")]).view()));
        assert!(!is_any(&OwnedFields::new(&[("Vary", "Foo, , x-b_c")]).view()));
    }

    #[test]
    fn equal_requests_have_equal_keys() {
        for (names, one, other) in [
            ("foo", vec![("Foo", "1, 2")], vec![("fOO", "1"), ("foo", "2")]),
            ("foo", vec![("Foo", "1,2")], vec![("Foo", "1 ,  2")]),
            ("rsc", vec![("RSC", "1"), ("Connection", "close, rSc")], vec![]),
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
            ("foo", vec![("Foo", "1")], vec![("Foo", "1,")]),
            ("foo", vec![("Foo", "1")], vec![("Foo", ", 1")]),
            ("foo", vec![("Foo", "1")], vec![("Foo", "1"), ("Foo", "")]),
            ("foo", vec![("Foo", "1, 2")], vec![("Foo", "1,, 2")]),
            ("cookie", vec![("Cookie", "1, 2")], vec![("Cookie", "1"), ("Cookie", "2")]),
            ("foo", vec![("Foo", "1"), ("Foo", "2")], vec![("Foo", "2"), ("Foo", "1")]),
            ("foo", vec![("Foo", "1"), ("Connection", "close")], vec![]),
            ("rsc", vec![("RSC", "1"), ("Connection", "RSC")], vec![("RSC", "1")]),
            ("cookie", vec![("Cookie", "s=a , b")], vec![("Cookie", "s=a,b")]),
            // End-to-end fields go on whatever Connection says.
            ("cookie", vec![("Cookie", "a"), ("Connection", "Cookie")], vec![]),
            (
                "accept-language",
                vec![("Accept-Language", "de-de,de;064,en;0c8")],
                vec![("Accept-Language", "de-DE,de;q=0.9,en;q=0.8")],
            ),
            (
                "accept-encoding",
                vec![("Accept-Encoding", "gzip;1f4")],
                vec![("Accept-Encoding", "gzip;q=0.5")],
            ),
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
        assert_ne!(one, key("accept-language", &[("Accept-Language", &backwards.join(", "))]));
    }

    proptest! {
        #[test]
        fn no_key_makes_it_panic_and_every_written_one_is_read(
            names in "(accept-encoding|cookie|x-a)(,accept-language|,x-b){0,3}",
            key in prop::collection::vec(any::<u8>(), 0..30),
            value in "[a-z0-9;=., ]{0,20}",
        ) {
            let _ = read_secondary_key(names.as_bytes(), &key);
            let lines: Vec<(&str, &str)> = names.split(',').map(|name| (name, value.trim())).collect();
            let mut written = Vec::new();
            write_secondary_key(names.as_bytes(), &OwnedFields::new(&lines).view(), b"pass", &mut written);
            let read = read_secondary_key(names.as_bytes(), &written);
            prop_assert_eq!(read.map(|fields| fields.len()), Some(names.split(',').count()));
        }

        #[test]
        fn no_bytes_make_it_panic(
            names in prop::collection::vec(any::<u8>(), 0..30),
            value in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            let fields = OwnedFields::new(&[(&b"Accept-Language"[..], &value[..]), (b"Vary", &value)]);
            let mut out = Vec::new();
            write_secondary_key(&names, &fields.view(), b"", &mut out);
            write_secondary_key(b"accept-language", &fields.view(), b"", &mut out);
            write_names(&fields.view(), &mut out);
        }

        /// Nothing of what makes the key takes part in the oracle.
        #[test]
        fn keys_are_equal_exactly_if_the_origin_is_sent_the_same(
            one in prop::collection::vec((0..3_usize, "[ab,; \"]{0,4}"), 0..5),
            other in prop::collection::vec((0..3_usize, "[ab,; \"]{0,4}"), 0..5),
            dropped in prop::option::of(0..3_usize),
        ) {
            const NAMES: [&str; 3] = ["X-A", "X-B", "Cookie"];
            // The separators stay, the spaces before and behind them go.
            let tight = |line: &String| {
                let (mut out, mut quoted) = (String::new(), false);
                for byte in line.trim().chars() {
                    match byte {
                        ',' if !quoted => out.truncate(out.trim_end().len()),
                        ' ' if !quoted && out.ends_with(',') => continue,
                        '"' => quoted = !quoted,
                        _ => {}
                    }
                    out.push(byte);
                }
                out
            };
            let sent = |lines: &[(usize, String)], dropped: Option<usize>| -> Vec<Vec<String>> {
                let of = |name: usize| move |line: &&(usize, String)| line.0 == name;
                let values = |name| lines.iter().filter(of(name)).map(|(_, value)| value.trim().to_owned()).collect();
                let list = |name| {
                    let lines: Vec<String> = lines.iter().filter(of(name)).map(|(_, value)| tight(value)).collect();
                    if lines.is_empty() || dropped == Some(name) { vec![] } else { vec![lines.join(",")] }
                };
                // Cookie is a known end-to-end field without list syntax, which Connection does not remove.
                vec![list(0), list(1), values(2)]
            };
            let of = |lines: &[(usize, String)], dropped: Option<usize>| {
                let mut fields: Vec<(&str, &str)> =
                    lines.iter().map(|(name, value)| (NAMES[*name], value.trim())).collect();
                fields.extend(dropped.map(|name| ("Connection", NAMES[name])));
                key("cookie,x-a,x-b", &fields)
            };
            prop_assert_eq!(sent(&one, dropped) == sent(&other, None), of(&one, dropped) == of(&other, None));
        }

        /// What `q` means is computed here in tenths, from the parts of which the field is made.
        #[test]
        fn weights_and_what_looks_like_them_never_collide(
            one in prop::collection::vec(("[ab]", 0..=10_u8), 1..4),
            other in prop::collection::vec(("[ab]", 0..=10_u8), 1..4),
            junk in "[ab01;,c8]{0,8}",
        ) {
            let field = |list: &[(String, u8)]| -> String {
                let item = |(name, tenths): &(String, u8)| format!("{name};q={}.{}", tenths / 10, tenths % 10);
                list.iter().map(item).collect::<Vec<_>>().join(", ")
            };
            let meaning = |list: &[(String, u8)]| {
                let mut list = list.to_vec();
                list.sort();
                list
            };
            let of = |value: &str| key("accept-language", &[("Accept-Language", value)]);
            let (a, b) = (of(&field(&one)), of(&field(&other)));
            prop_assert_eq!(meaning(&one) == meaning(&other), a == b);
            // A parameter that is no weight makes it something else, whatever it looks like.
            if junk.split(',').any(|member| member.contains(';')) {
                prop_assert_ne!(of(&junk), a);
            }
        }
    }
}
