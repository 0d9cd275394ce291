//! Taking over the field lines of a 304 (RFC 9111 §3.2, §4.3.4).

use crate::cache::policy::is_explicitly_fresh;
use crate::date;
use crate::field::{FieldId, Fields};
use crate::forward::{ConnectionOptions, write_field};

/// Who gets what [`merge`] writes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Recipient {
    /// The store, and with it whoever asks from now on.
    Everybody,
    /// The client whose request was validated.
    Validating,
}

/// Appends the field lines of a stored response updated from a newer response's that came at `received_s`, in seconds
/// since 1970: a field of the newer one replaces all stored lines with its name, all others are kept.
///
/// Left as stored are the fields that describe the stored bytes rather than the resource: `Content-Encoding`,
/// `Content-Length`, `Content-Range`, `Content-MD5` and, because it was matched, `ETag`. Fields of one connection are
/// not taken over. `Age` is in the result in neither form: it says how old the newer response was when it came, and
/// [`super::Policy::validated`] counts from there. A newer response without `Date` is of the time at which it came (RFC
/// 9110 §6.6.1), and with the stored date it would be as old as what it was to freshen.
///
/// What the newer response says to its own client alone, such as a session's cookie (RFC 9111 §7.3), is left out for
/// [`Recipient::Everybody`]: see [`is_for_one_client`].
pub fn merge(
    stored: &Fields<'_>,
    newer: &Fields<'_>,
    received_s: u64,
    recipient: Recipient,
    out: &mut Vec<u8>,
) {
    let options = ConnectionOptions::of(*newer);
    let withheld = |id: FieldId, name: &[u8]| {
        recipient == Recipient::Everybody
            && is_for_client(id, name)
            && !is_for_everybody(stored, newer, received_s, id, name)
    };
    let stays = |id: FieldId, name: &[u8]| {
        id == FieldId::Age || describes_content(id, name) || (id == FieldId::Etag && stored.has(id))
    };
    let takes_over =
        |id: FieldId, name: &[u8]| !stays(id, name) && !options.removes(id, name) && !withheld(id, name);
    let is_redated = stored.has(FieldId::Date) && !newer.has(FieldId::Date);
    for (id, name, value) in stored.iter() {
        let is_replaced = has(newer, id, name) && takes_over(id, name) || is_redated && id == FieldId::Date;
        if id != FieldId::Age && !is_replaced {
            write_field(name, value, out);
        }
    }
    for (id, name, value) in newer.iter() {
        if takes_over(id, name) {
            write_field(name, value, out);
        }
    }
    if is_redated {
        write_field(b"Date", &date::format(received_s), out);
    }
}

/// Whether a newer response says something that only the client gets whose request was validated: then [`merge`] writes
/// different heads for it and for everybody.
pub fn is_for_one_client(stored: &Fields<'_>, newer: &Fields<'_>, received_s: u64) -> bool {
    newer.iter().any(|(id, name, _)| {
        is_for_client(id, name) && !is_for_everybody(stored, newer, received_s, id, name)
    })
}

/// The fields in which a response speaks to the client that asked (RFC 9111 §7.3, RFC 9110 §11.6.3, §11.7.3).
fn is_for_client(id: FieldId, name: &[u8]) -> bool {
    const OTHERS: [&[u8]; 3] = [b"set-cookie2", b"authentication-info", b"proxy-authentication-info"];
    match id {
        FieldId::SetCookie => true,
        FieldId::Other => OTHERS.iter().any(|known| name.eq_ignore_ascii_case(known)),
        _ => false,
    }
}

/// Whether such a field is for everybody nevertheless: the origin has put one into the shared response before, and says
/// as explicitly as it must for a whole response how long the new one lasts. A response that had none never gets one.
fn is_for_everybody(
    stored: &Fields<'_>,
    newer: &Fields<'_>,
    received_s: u64,
    id: FieldId,
    name: &[u8],
) -> bool {
    has(stored, id, name) && is_explicitly_fresh(newer, received_s)
}

fn has(fields: &Fields<'_>, id: FieldId, name: &[u8]) -> bool {
    match id {
        FieldId::Other => fields.named(name).next().is_some(),
        id => fields.has(id),
    }
}

fn describes_content(id: FieldId, name: &[u8]) -> bool {
    match id {
        FieldId::ContentEncoding | FieldId::ContentLength | FieldId::ContentRange => true,
        FieldId::Other => name.eq_ignore_ascii_case(b"content-md5"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::OwnedFields;

    /// 1994-11-06 08:49:37.
    const NOW_S: u64 = 784_111_777;

    fn merged_for(recipient: Recipient, stored: &[(&str, &str)], newer: &[(&str, &str)]) -> String {
        let (stored, newer) = (OwnedFields::new(stored), OwnedFields::new(newer));
        let mut out = Vec::new();
        merge(&stored.view(), &newer.view(), NOW_S, recipient, &mut out);
        String::from_utf8(out).unwrap()
    }

    fn merged(stored: &[(&str, &str)], newer: &[(&str, &str)]) -> String {
        merged_for(Recipient::Everybody, stored, newer)
    }

    #[test]
    fn newer_fields_replace_and_others_stay() {
        let stored = [("A", "1"), ("a", "2"), ("Cache-Control", "max-age=1"), ("B", "3")];
        let newer = [("cache-control", "max-age=2"), ("A", "4"), ("C", "5"), ("C", "6")];
        assert_eq!(merged(&stored, &newer), "B: 3\r\ncache-control: max-age=2\r\nA: 4\r\nC: 5\r\nC: 6\r\n");
    }

    #[test]
    fn what_describes_the_stored_bytes_is_kept() {
        let stored = [
            ("Content-Length", "5"),
            ("Content-Encoding", "gzip"),
            ("Content-MD5", "x"),
            ("ETag", "\"a\""),
            ("Content-Type", "text/plain"),
        ];
        let newer = [
            ("Content-Length", "0"),
            ("Content-Encoding", "br"),
            ("content-md5", "y"),
            ("Content-Range", "bytes 0-1/2"),
            ("ETag", "W/\"a\""),
            ("Content-Type", "text/html"),
        ];
        assert_eq!(
            merged(&stored, &newer),
            "Content-Length: 5\r\nContent-Encoding: gzip\r\nContent-MD5: x\r\nETag: \"a\"\r\nContent-Type: text/html\r\n"
        );
        assert_eq!(merged(&[], &[("ETag", "\"b\"")]), "ETag: \"b\"\r\n");
    }

    #[test]
    fn fields_of_the_connection_and_ages_are_left_out() {
        let newer = [("Connection", "close, x-hop"), ("X-Hop", "1"), ("Keep-Alive", "5"), ("Age", "7")];
        assert_eq!(merged(&[("Age", "3"), ("X-Hop", "0")], &newer), "X-Hop: 0\r\n");
    }

    #[test]
    fn what_a_304_says_to_its_client_nobody_else_is_told() {
        let stored = [("ETag", "\"a\""), ("Cache-Control", "max-age=3")];
        for name in ["Set-Cookie", "set-cookie2", "Authentication-Info", "Proxy-Authentication-Info"] {
            for newer in [
                &[(name, "alice"), ("X", "1")][..],
                &[(name, "alice"), ("X", "1"), ("Cache-Control", "max-age=3")],
            ] {
                let (everybody, client) =
                    (merged(&stored, newer), merged_for(Recipient::Validating, &stored, newer));
                assert!(!everybody.contains("alice") && everybody.contains("X: 1"), "{name}: {everybody}");
                assert!(client.contains(&format!("{name}: alice\r\n")), "{name}: {client}");
                assert!(is_for_one_client(
                    &OwnedFields::new(&stored).view(),
                    &OwnedFields::new(newer).view(),
                    NOW_S
                ));
            }
        }
    }

    #[test]
    fn a_cookie_that_everybody_has_is_renewed_only_if_its_lifetime_is_stated() {
        let stored = [("Set-Cookie", "a=b"), ("Set-Cookie", "c=d"), ("Cache-Control", "max-age=3")];
        let stated = [("Set-Cookie", "a=c"), ("Cache-Control", "max-age=3")];
        assert_eq!(merged(&stored, &stated), "Set-Cookie: a=c\r\nCache-Control: max-age=3\r\n");
        for newer in [
            &[("Set-Cookie", "a=c")][..],
            &[("Set-Cookie", "a=c"), ("Cache-Control", "no-cache")],
            &[("Set-Cookie", "a=c"), ("Cache-Control", "max-age=0")],
        ] {
            let merged = merged(&stored, newer);
            assert!(merged.contains("Set-Cookie: a=b\r\nSet-Cookie: c=d\r\n"), "{merged}");
            assert!(!merged.contains("a=c"), "{merged}");
        }
        let client = merged_for(Recipient::Validating, &stored, &[("Set-Cookie", "a=c")]);
        assert_eq!(client, "Cache-Control: max-age=3\r\nSet-Cookie: a=c\r\n");
    }

    #[test]
    fn a_304_without_a_date_is_of_the_time_at_which_it_came() {
        let stored = [("Date", "Sun, 06 Nov 1994 08:00:00 GMT"), ("A", "1")];
        assert_eq!(merged(&stored, &[("B", "2")]), "A: 1\r\nB: 2\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\n");
        let dated = [("Date", "Sun, 06 Nov 1994 08:30:00 GMT")];
        assert_eq!(merged(&stored, &dated), "A: 1\r\nDate: Sun, 06 Nov 1994 08:30:00 GMT\r\n");
    }
}
