//! The `Cache-Status` field (RFC 9211).

use crate::write_decimal;

/// Why a request was sent on (RFC 9211 §2.2).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Forwarded {
    /// The cache was told to let it pass.
    Bypass,
    /// The method's semantics require it.
    Method,
    /// Nothing is stored for the URL.
    UriMiss,
    /// What is stored for the URL is for other request fields.
    VaryMiss,
    /// Nothing stored fits, for either of these reasons.
    Miss,
    /// What is stored is fresh, but the request asks for more.
    Request,
    /// What is stored is stale.
    Stale,
    /// Only a part of what was asked for is stored.
    Partial,
}

impl Forwarded {
    /// The token of RFC 9211 §2.2.
    pub const fn token(self) -> &'static str {
        match self {
            Self::Bypass => "bypass",
            Self::Method => "method",
            Self::UriMiss => "uri-miss",
            Self::VaryMiss => "vary-miss",
            Self::Miss => "miss",
            Self::Request => "request",
            Self::Stale => "stale",
            Self::Partial => "partial",
        }
    }
}

/// Whether the cache answered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Handling {
    /// From the store, without asking anybody.
    Hit,
    /// The request went to the upstream.
    Forwarded {
        /// Why.
        reason: Forwarded,
        /// The upstream's status code (RFC 9211 §2.3), if it differs from that of the answer or says why.
        status: Option<u16>,
        /// The response is stored (RFC 9211 §2.5).
        stored: bool,
        /// The request waited for another one like it (RFC 9211 §2.6).
        collapsed: bool,
    },
}

/// Appends the name of a cache, a token, as a structured field has it: as a string if it does not begin as its tokens
/// do (RFC 9651 §3.3.4).
pub fn write_name(name: &str, out: &mut Vec<u8>) {
    let is_token = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '*');
    let quote = if is_token { &b""[..] } else { b"\"" };
    out.extend_from_slice(quote);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(quote);
}

/// What a cache says about one answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CacheStatus<'a> {
    /// Whether the cache answered.
    pub handling: Handling,
    /// Seconds of freshness left, negative for a stale response (RFC 9211 §2.4).
    pub ttl_s: Option<i64>,
    /// The cache key (RFC 9211 §2.7); left out if it cannot be a structured string.
    pub key: Option<&'a [u8]>,
}

impl CacheStatus<'_> {
    /// Appends the member for the cache called `name`, a token.
    pub fn write(&self, name: &str, out: &mut Vec<u8>) {
        write_name(name, out);
        match self.handling {
            Handling::Hit => out.extend_from_slice(b"; hit"),
            Handling::Forwarded { reason, status, stored, collapsed } => {
                out.extend_from_slice(b"; fwd=");
                out.extend_from_slice(reason.token().as_bytes());
                if let Some(status) = status {
                    out.extend_from_slice(b"; fwd-status=");
                    write_decimal(u64::from(status), out);
                }
                if stored {
                    out.extend_from_slice(b"; stored");
                }
                if collapsed {
                    out.extend_from_slice(b"; collapsed");
                }
            }
        }
        if let Some(ttl_s) = self.ttl_s {
            // RFC 9651 §3.3.1: an integer has at most 15 digits.
            out.extend_from_slice(if ttl_s < 0 { b"; ttl=-" } else { b"; ttl=" });
            write_decimal(ttl_s.unsigned_abs().min(999_999_999_999_999), out);
        }
        if let Some(key) = self.key.filter(|key| key.iter().all(|byte| matches!(byte, b' '..=b'~'))) {
            out.extend_from_slice(b"; key=\"");
            for &byte in key {
                if matches!(byte, b'"' | b'\\') {
                    out.push(b'\\');
                }
                out.push(byte);
            }
            out.push(b'"');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(status: &CacheStatus<'_>) -> String {
        let mut out = Vec::new();
        status.write("tidegate", &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn members_are_structured_items() {
        let hit = CacheStatus { handling: Handling::Hit, ttl_s: Some(-5), key: Some(b"http://a/\"b\\") };
        assert_eq!(written(&hit), r#"tidegate; hit; ttl=-5; key="http://a/\"b\\""#);
        let forwarded = |reason, status, stored, collapsed| {
            let handling = Handling::Forwarded { reason, status, stored, collapsed };
            written(&CacheStatus { handling, ttl_s: None, key: None })
        };
        assert_eq!(
            forwarded(Forwarded::Stale, Some(304), true, false),
            "tidegate; fwd=stale; fwd-status=304; stored"
        );
        assert_eq!(forwarded(Forwarded::UriMiss, None, false, true), "tidegate; fwd=uri-miss; collapsed");
    }

    #[test]
    fn a_name_that_is_no_token_of_structured_fields_is_a_string_of_theirs() {
        for (name, written) in [("a9:/", "a9:/"), ("*a", "*a"), ("9edge", "\"9edge\""), (".x", "\".x\"")] {
            let mut out = Vec::new();
            write_name(name, &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), written);
        }
    }

    #[test]
    fn what_cannot_be_said_is_left_out() {
        let status = CacheStatus { handling: Handling::Hit, ttl_s: Some(i64::MIN), key: Some(b"\xff") };
        assert_eq!(written(&status), "tidegate; hit; ttl=-999999999999999");
    }
}
