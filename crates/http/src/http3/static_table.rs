//! Fields that everybody knows by a number (RFC 9204 Appendix A).

/// Name and value, by index.
pub(super) static FIELDS: [(&[u8], &[u8]); 99] = [
    (b":authority", b""),
    (b":path", b"/"),
    (b"age", b"0"),
    (b"content-disposition", b""),
    (b"content-length", b"0"),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"referer", b""),
    (b"set-cookie", b""),
    (b":method", b"CONNECT"),
    (b":method", b"DELETE"),
    (b":method", b"GET"),
    (b":method", b"HEAD"),
    (b":method", b"OPTIONS"),
    (b":method", b"POST"),
    (b":method", b"PUT"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"103"),
    (b":status", b"200"),
    (b":status", b"304"),
    (b":status", b"404"),
    (b":status", b"503"),
    (b"accept", b"*/*"),
    (b"accept", b"application/dns-message"),
    (b"accept-encoding", b"gzip, deflate, br"),
    (b"accept-ranges", b"bytes"),
    (b"access-control-allow-headers", b"cache-control"),
    (b"access-control-allow-headers", b"content-type"),
    (b"access-control-allow-origin", b"*"),
    (b"cache-control", b"max-age=0"),
    (b"cache-control", b"max-age=2592000"),
    (b"cache-control", b"max-age=604800"),
    (b"cache-control", b"no-cache"),
    (b"cache-control", b"no-store"),
    (b"cache-control", b"public, max-age=31536000"),
    (b"content-encoding", b"br"),
    (b"content-encoding", b"gzip"),
    (b"content-type", b"application/dns-message"),
    (b"content-type", b"application/javascript"),
    (b"content-type", b"application/json"),
    (b"content-type", b"application/x-www-form-urlencoded"),
    (b"content-type", b"image/gif"),
    (b"content-type", b"image/jpeg"),
    (b"content-type", b"image/png"),
    (b"content-type", b"text/css"),
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-type", b"text/plain"),
    (b"content-type", b"text/plain;charset=utf-8"),
    (b"range", b"bytes=0-"),
    (b"strict-transport-security", b"max-age=31536000"),
    (b"strict-transport-security", b"max-age=31536000; includesubdomains"),
    (b"strict-transport-security", b"max-age=31536000; includesubdomains; preload"),
    (b"vary", b"accept-encoding"),
    (b"vary", b"origin"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-xss-protection", b"1; mode=block"),
    (b":status", b"100"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"302"),
    (b":status", b"400"),
    (b":status", b"403"),
    (b":status", b"421"),
    (b":status", b"425"),
    (b":status", b"500"),
    (b"accept-language", b""),
    (b"access-control-allow-credentials", b"FALSE"),
    (b"access-control-allow-credentials", b"TRUE"),
    (b"access-control-allow-headers", b"*"),
    (b"access-control-allow-methods", b"get"),
    (b"access-control-allow-methods", b"get, post, options"),
    (b"access-control-allow-methods", b"options"),
    (b"access-control-expose-headers", b"content-length"),
    (b"access-control-request-headers", b"content-type"),
    (b"access-control-request-method", b"get"),
    (b"access-control-request-method", b"post"),
    (b"alt-svc", b"clear"),
    (b"authorization", b""),
    (b"content-security-policy", b"script-src 'none'; object-src 'none'; base-uri 'none'"),
    (b"early-data", b"1"),
    (b"expect-ct", b""),
    (b"forwarded", b""),
    (b"if-range", b""),
    (b"origin", b""),
    (b"purpose", b"prefetch"),
    (b"server", b""),
    (b"timing-allow-origin", b"*"),
    (b"upgrade-insecure-requests", b"1"),
    (b"user-agent", b""),
    (b"x-forwarded-for", b""),
    (b"x-frame-options", b"deny"),
    (b"x-frame-options", b"sameorigin"),
];

/// No entry.
const NONE: u8 = u8::MAX;

/// Entries with one name are in a chain: by index, the next one's.
static NEXT: [u8; FIELDS.len()] = {
    let mut next = [NONE; FIELDS.len()];
    let mut at = 0;
    while at < FIELDS.len() {
        let mut other = at + 1;
        while other < FIELDS.len() && next[at] == NONE {
            if equals(FIELDS[at].0, FIELDS[other].0) {
                next[at] = other as u8;
            }
            other += 1;
        }
        at += 1;
    }
    next
};

const fn equals(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

const SLOT_BITS: u32 = 8;

/// Where [`FIRST`] has a name: four of its bytes, in lower case, tell the names of the table from each other.
const fn slot(name: &[u8], multiplier: u32) -> usize {
    let Some(last) = name.len().checked_sub(1) else { return 0 };
    let bytes = [name.len() as u8, name[0] | 0x20, name[name.len() * 3 / 4] | 0x20, name[last] | 0x20];
    (u32::from_le_bytes(bytes).wrapping_mul(multiplier) >> (u32::BITS - SLOT_BITS)) as usize
}

/// A perfect hash: a multiplier that leaves no two names in one slot, and by slot the first entry's index.
const PERFECT: (u32, [u8; 1 << SLOT_BITS]) = {
    let mut multiplier = 0x9e37_79b1u32;
    'search: loop {
        let mut first = [NONE; 1 << SLOT_BITS];
        let mut at = 0;
        while at < FIELDS.len() {
            let slot = slot(FIELDS[at].0, multiplier);
            if first[slot] == NONE {
                first[slot] = at as u8;
            } else if !equals(FIELDS[first[slot] as usize].0, FIELDS[at].0) {
                multiplier = multiplier.wrapping_mul(0x2545_f491).wrapping_add(2);
                continue 'search;
            }
            at += 1;
        }
        break (multiplier, first);
    }
};

const MULTIPLIER: u32 = PERFECT.0;
static FIRST: [u8; 1 << SLOT_BITS] = PERFECT.1;

/// What the table has of a field.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Found {
    /// Name and value, at this index.
    Field(u8),
    /// The name, first at this index.
    Name(u8),
    /// Nothing.
    Nothing,
}

/// Looks for a field whose name may be in any case.
pub(super) fn find(name: &[u8], value: &[u8]) -> Found {
    let first = FIRST[slot(name, MULTIPLIER)];
    match FIELDS.get(usize::from(first)) {
        Some((known, _)) if known.eq_ignore_ascii_case(name) => {}
        _ => return Found::Nothing,
    }
    let mut at = first;
    while let Some((_, known)) = FIELDS.get(usize::from(at)) {
        if *known == value {
            return Found::Field(at);
        }
        at = NEXT[usize::from(at)];
    }
    Found::Name(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_found_at_its_index_and_by_its_name() {
        for (at, (name, value)) in FIELDS.iter().enumerate() {
            assert_eq!(find(name, value), Found::Field(at as u8));
            assert_eq!(find(&name.to_ascii_uppercase(), value), Found::Field(at as u8));
            let first = FIELDS.iter().position(|(known, _)| known == name).unwrap();
            assert_eq!(find(name, b"another"), Found::Name(first as u8));
            assert_eq!(find(&[name, &b"x"[..]].concat(), value), Found::Nothing);
            assert_eq!(find(&name[..name.len() - 1], value), Found::Nothing);
        }
        assert_eq!(find(b"", b""), Found::Nothing);
        assert_eq!(find(b"x", b""), Found::Nothing);
    }

    #[test]
    fn entries_are_where_rfc_9204_has_them() {
        for (at, name, value) in [
            (0, ":authority", ""),
            (1, ":path", "/"),
            (25, ":status", "200"),
            (57, "strict-transport-security", "max-age=31536000; includesubdomains"),
            (62, "x-xss-protection", "1; mode=block"),
            (74, "access-control-allow-credentials", "TRUE"),
            (85, "content-security-policy", "script-src 'none'; object-src 'none'; base-uri 'none'"),
            (98, "x-frame-options", "sameorigin"),
        ] {
            assert_eq!(FIELDS[at], (name.as_bytes(), value.as_bytes()));
        }
    }
}
