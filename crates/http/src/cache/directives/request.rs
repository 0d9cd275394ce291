//! Cache directives of a request (RFC 9111 §5.2.1).

use super::list::{MAX_SECONDS, directives};
use crate::field::{FieldId, Fields};

/// What a client asks of caches. The default asks nothing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RequestDirectives {
    /// A stored response must be validated first.
    pub no_cache: bool,
    /// Neither the request nor its response is to be stored.
    pub no_store: bool,
    /// Without a stored response the answer is 504, not a request to the upstream.
    pub only_if_cached: bool,
    /// The oldest acceptable response, in seconds.
    pub max_age_s: Option<u32>,
    /// How long the response must stay fresh, in seconds.
    pub min_fresh_s: Option<u32>,
    /// How long ago the response may have become stale, in seconds; without an argument any time.
    pub max_stale_s: Option<u32>,
    /// How long ago it may have become stale if the upstream fails, in seconds (RFC 5861 §4).
    pub stale_if_error_s: Option<u32>,
}

impl RequestDirectives {
    /// Reads `Cache-Control`, or `Pragma` when there is none (RFC 9111 §5.4).
    ///
    /// Arguments that are no number count as the strictest one.
    #[inline]
    pub fn parse(fields: &Fields<'_>) -> Self {
        if !fields.has(FieldId::CacheControl) && !fields.has(FieldId::Pragma) {
            return Self::default();
        }
        Self::parse_present(fields)
    }

    fn parse_present(fields: &Fields<'_>) -> Self {
        let mut this = Self::default();
        if !fields.has(FieldId::CacheControl) {
            this.no_cache = fields
                .get_all(FieldId::Pragma)
                .flat_map(directives)
                .any(|directive| directive.is(b"no-cache"));
            return this;
        }
        for directive in fields.get_all(FieldId::CacheControl).flat_map(directives) {
            let seconds = directive.seconds();
            if directive.is(b"no-cache") {
                this.no_cache = true;
            } else if directive.is(b"no-store") {
                this.no_store = true;
            } else if directive.is(b"only-if-cached") {
                this.only_if_cached = true;
            } else if directive.is(b"max-age") {
                this.max_age_s = Some(seconds.unwrap_or(0).min(this.max_age_s.unwrap_or(MAX_SECONDS)));
            } else if directive.is(b"min-fresh") {
                this.min_fresh_s = Some(seconds.unwrap_or(MAX_SECONDS).max(this.min_fresh_s.unwrap_or(0)));
            } else if directive.is(b"max-stale") {
                let limit = if directive.argument.is_none() { MAX_SECONDS } else { seconds.unwrap_or(0) };
                this.max_stale_s = Some(limit.min(this.max_stale_s.unwrap_or(MAX_SECONDS)));
            } else if directive.is(b"stale-if-error") {
                this.stale_if_error_s =
                    Some(seconds.unwrap_or(0).min(this.stale_if_error_s.unwrap_or(MAX_SECONDS)));
            }
        }
        this
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::OwnedFields;

    fn parse(lines: &[(&str, &str)]) -> RequestDirectives {
        RequestDirectives::parse(&OwnedFields::new(lines).view())
    }

    #[test]
    fn directives_are_read_in_any_case() {
        let parsed =
            parse(&[("Cache-Control", "No-Cache, no-STORE, max-age=10, min-fresh=\"20\", max-stale=30")]);
        let expected = RequestDirectives {
            no_cache: true,
            no_store: true,
            max_age_s: Some(10),
            min_fresh_s: Some(20),
            max_stale_s: Some(30),
            ..Default::default()
        };
        assert_eq!(parsed, expected);
        assert!(parse(&[("cache-control", "only-if-cached")]).only_if_cached);
        assert_eq!(parse(&[("cache-control", "stale-if-error=9")]).stale_if_error_s, Some(9));
    }

    #[test]
    fn repeated_and_odd_arguments_are_read_strictly() {
        let parsed = parse(&[
            ("Cache-Control", "max-age=10, max-age=5, min-fresh=1"),
            ("Cache-Control", "max-age=x, min-fresh=2, max-stale=-1"),
        ]);
        assert_eq!(parsed.max_age_s, Some(0));
        assert_eq!(parsed.min_fresh_s, Some(2));
        assert_eq!(parsed.max_stale_s, Some(0));
        assert_eq!(parse(&[("Cache-Control", "max-stale")]).max_stale_s, Some(MAX_SECONDS));
    }

    #[test]
    fn pragma_counts_only_alone() {
        assert!(parse(&[("Pragma", "no-cache")]).no_cache);
        assert!(!parse(&[("Pragma", "foo")]).no_cache);
        assert_eq!(parse(&[("Pragma", "no-cache"), ("Cache-Control", "x")]), RequestDirectives::default());
        assert_eq!(parse(&[]), RequestDirectives::default());
    }
}
