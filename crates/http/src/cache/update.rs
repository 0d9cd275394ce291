//! Taking over the field lines of a 304 (RFC 9111 §3.2, §4.3.4).

use crate::field::{FieldId, Fields};
use crate::forward::{ConnectionOptions, write_field};

/// Appends the field lines of a stored response updated from a newer response's: a field of the newer one replaces all
/// stored lines with its name, all others are kept.
///
/// Left as stored are the fields that describe the stored bytes rather than the resource: `Content-Encoding`,
/// `Content-Length`, `Content-Range`, `Content-MD5` and, because it was matched, `ETag`. Fields of one connection are not
/// taken over. `Age` is in the result in neither form: it says how old the newer response was when it came, and
/// [`super::Policy::validated`] counts from there.
pub fn merge(stored: &Fields<'_>, newer: &Fields<'_>, out: &mut Vec<u8>) {
    let options = ConnectionOptions::of(*newer);
    let stays = |id: FieldId, name: &[u8]| {
        id == FieldId::Age || describes_content(id, name) || (id == FieldId::Etag && stored.has(id))
    };
    let takes_over = |id: FieldId, name: &[u8]| !stays(id, name) && !options.removes(id, name);
    for (id, name, value) in stored.iter() {
        let is_in_newer = match id {
            FieldId::Other => newer.named(name).next().is_some(),
            id => newer.has(id),
        };
        if id != FieldId::Age && !(is_in_newer && takes_over(id, name)) {
            write_field(name, value, out);
        }
    }
    for (id, name, value) in newer.iter() {
        if takes_over(id, name) {
            write_field(name, value, out);
        }
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

    fn merged(stored: &[(&str, &str)], newer: &[(&str, &str)]) -> String {
        let mut out = Vec::new();
        merge(&OwnedFields::new(stored).view(), &OwnedFields::new(newer).view(), &mut out);
        String::from_utf8(out).unwrap()
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
}
