//! Cache directives of a response (RFC 9111 §5.2.2) and their targeted forms (RFC 9213).

use super::list::{Directive, MAX_SECONDS, directives, directives_with_targets, is_malformed, members};
use super::structured::{Item, dictionary};
use crate::field::{FieldId, Fields};

/// What a proxy tells its upstreams in `Surrogate-Capability` so that they can aim `Surrogate-Control` directives at it
/// (W3C Note "Edge Architecture Specification", §2.1).
pub const SURROGATE_CAPABILITY: &str = "tidegate=\"Surrogate/1.0\"";
const SURROGATE_TARGET: &[u8] = b"tidegate";

/// What an upstream asks of shared caches.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ResponseDirectives {
    /// A targeted field decided: `Cache-Control`, `Expires` and `Pragma` were not looked at (RFC 9213 §2.2).
    pub targeted: bool,
    /// Not to be stored, unless `must_understand` says otherwise.
    pub no_store: bool,
    /// Not to be reused without validation, with or without field names.
    pub no_cache: bool,
    /// Not for shared caches, with or without field names.
    pub private: bool,
    /// May be stored even where that is normally forbidden.
    pub public: bool,
    /// Not to be reused stale.
    pub must_revalidate: bool,
    /// Not to be reused stale by shared caches.
    pub proxy_revalidate: bool,
    /// To be stored only by caches that understand the status code, which then ignore `no_store`.
    pub must_understand: bool,
    /// Does not change while it is fresh (RFC 8246).
    pub immutable: bool,
    /// Freshness lifetime in seconds; 0 if it was no number or contradicted itself.
    pub max_age_s: Option<u32>,
    /// Freshness lifetime for shared caches in seconds; 0 if it was no number or contradicted itself.
    pub s_maxage_s: Option<u32>,
    /// How long it may be served stale while it is validated, in seconds (RFC 5861 §3).
    pub stale_while_revalidate_s: Option<u32>,
    /// How long it may be served stale when the upstream fails, in seconds (RFC 5861 §4).
    pub stale_if_error_s: Option<u32>,
}

impl ResponseDirectives {
    /// Reads the field that is aimed most closely at this cache: `CDN-Cache-Control` (RFC 9213) if it is valid and not
    /// empty, else `Surrogate-Control` if it holds a directive for this cache, else `Cache-Control`.
    pub fn parse(fields: &Fields<'_>) -> Self {
        Self::targeted(fields)
            .or_else(|| Self::surrogate(fields))
            .unwrap_or_else(|| Self::cache_control(fields))
    }

    fn cache_control(fields: &Fields<'_>) -> Self {
        let mut this = Self::default();
        for line in fields.get_all(FieldId::CacheControl) {
            directives(line).for_each(|directive| this.apply(&directive));
            this.heed_malformed(line);
        }
        this
    }

    /// RFC 9213 §2.1. Lines are parsed one by one, which differs from parsing them joined only where that is an error.
    fn targeted(fields: &Fields<'_>) -> Option<Self> {
        let mut this = Self { targeted: true, ..Self::default() };
        let mut any = false;
        for line in fields.get_all(FieldId::CdnCacheControl) {
            dictionary(line, |key, item| {
                any = true;
                this.apply_item(key, item);
            })?;
        }
        any.then_some(this)
    }

    /// W3C Note "Edge Architecture Specification", §2.2: `no-store`, and `max-age=N` or `max-age=N+M` where the
    /// response may be served stale for M more seconds. A directive with a parameter is for the device it names.
    fn surrogate(fields: &Fields<'_>) -> Option<Self> {
        let mut this = Self { targeted: true, ..Self::default() };
        let mut any = false;
        for (directive, target) in fields.get_all(FieldId::SurrogateControl).flat_map(directives_with_targets)
        {
            if target.is_some_and(|target| target != SURROGATE_TARGET) {
                continue;
            }
            if directive.is(b"no-store") {
                (this.no_store, any) = (true, true);
            } else if directive.is(b"max-age") {
                let argument = directive.argument.unwrap_or(b"");
                let (fresh, stale) = match argument.iter().position(|&byte| byte == b'+') {
                    Some(plus) => (&argument[..plus], Some(&argument[plus + 1..])),
                    None => (argument, None),
                };
                let fresh = Directive { name: directive.name, argument: Some(fresh) };
                restrict(&mut this.max_age_s, fresh.seconds());
                this.stale_while_revalidate_s = stale.and_then(super::list::delta_seconds);
                any = true;
            }
        }
        // A parameter is in order here, but not a string that does not end.
        if fields
            .get_all(FieldId::SurrogateControl)
            .any(|line| line.iter().filter(|&&byte| byte == b'"').count() % 2 == 1)
        {
            fields.get_all(FieldId::SurrogateControl).for_each(|line| this.heed_malformed(line));
        }
        any.then_some(this)
    }

    /// Where a malformed member may have been meant to restrict, it does so in the strictest sense.
    fn heed_malformed(&mut self, line: &[u8]) {
        let restricts = |member: &[u8]| {
            [&b"no-store"[..], b"private", b"no-cache"]
                .iter()
                .any(|name| member.windows(name.len()).any(|part| part.eq_ignore_ascii_case(name)))
        };
        if members(line).any(|member| is_malformed(member) && restricts(member)) {
            // `must-understand` takes no-store back, but not private.
            (self.no_store, self.private) = (true, true);
        }
    }

    fn apply(&mut self, directive: &Directive<'_>) {
        let seconds = directive.seconds();
        match directive.name.len() {
            6 if directive.is(b"public") => self.public = true,
            7 if directive.is(b"max-age") => restrict(&mut self.max_age_s, seconds),
            7 if directive.is(b"private") => self.private = true,
            8 if directive.is(b"no-store") => self.no_store = true,
            8 if directive.is(b"no-cache") => self.no_cache = true,
            8 if directive.is(b"s-maxage") => restrict(&mut self.s_maxage_s, seconds),
            9 if directive.is(b"immutable") => self.immutable = true,
            14 if directive.is(b"stale-if-error") => allow(&mut self.stale_if_error_s, seconds),
            15 if directive.is(b"must-revalidate") => self.must_revalidate = true,
            15 if directive.is(b"must-understand") => self.must_understand = true,
            16 if directive.is(b"proxy-revalidate") => self.proxy_revalidate = true,
            22 if directive.is(b"stale-while-revalidate") => {
                allow(&mut self.stale_while_revalidate_s, seconds)
            }
            _ => {}
        }
    }

    /// A member of a targeted field: the last of several with one name counts (RFC 9651 §4.2.2). A directive whose
    /// value is not of its kind is taken in its strictest sense where it restricts and left out where it allows.
    fn apply_item(&mut self, key: &[u8], item: Item) {
        let on = item != Item::Boolean(false);
        let seconds = match item {
            Item::Integer(number @ 0..) => {
                Some(u32::try_from(number).unwrap_or(MAX_SECONDS).min(MAX_SECONDS))
            }
            _ => None,
        };
        match key {
            b"public" => self.public = item == Item::Boolean(true),
            b"max-age" => self.max_age_s = Some(seconds.unwrap_or(0)),
            b"private" => self.private = on,
            b"no-store" => self.no_store = on,
            b"no-cache" => self.no_cache = on,
            b"s-maxage" => self.s_maxage_s = Some(seconds.unwrap_or(0)),
            b"immutable" => self.immutable = item == Item::Boolean(true),
            b"stale-if-error" => self.stale_if_error_s = seconds,
            b"must-revalidate" => self.must_revalidate = on,
            b"must-understand" => self.must_understand = on,
            b"proxy-revalidate" => self.proxy_revalidate = on,
            b"stale-while-revalidate" => self.stale_while_revalidate_s = seconds,
            _ => {}
        }
    }
}

/// RFC 9111 §4.2.1: a lifetime that is invalid or given twice differently makes the response stale.
fn restrict(lifetime_s: &mut Option<u32>, seconds: Option<u32>) {
    let seconds = seconds.unwrap_or(0);
    *lifetime_s = Some(match *lifetime_s {
        Some(known) if known != seconds => 0,
        _ => seconds,
    });
}

/// A permission to serve stale counts in its strictest sense.
fn allow(permission_s: &mut Option<u32>, seconds: Option<u32>) {
    let seconds = seconds.unwrap_or(0);
    *permission_s = Some(permission_s.map_or(seconds, |known| known.min(seconds)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::OwnedFields;
    use proptest::prelude::*;

    fn parse(lines: &[(&str, &str)]) -> ResponseDirectives {
        ResponseDirectives::parse(&OwnedFields::new(lines).view())
    }

    #[test]
    fn every_directive_is_read_in_any_case() {
        let parsed = parse(&[
            (
                "Cache-Control",
                "Public, MAX-age=1, private=\"a, b\", no-STORE, No-Cache=\"x\", s-maxage=\"2\"",
            ),
            ("Cache-Control", "immutable, stale-if-error=3, must-revalidate, must-understand"),
            ("Cache-Control", "proxy-revalidate,stale-while-revalidate=4, max-agent=9, ext=\"max-age=9\""),
        ]);
        let expected = ResponseDirectives {
            targeted: false,
            no_store: true,
            no_cache: true,
            private: true,
            public: true,
            must_revalidate: true,
            proxy_revalidate: true,
            must_understand: true,
            immutable: true,
            max_age_s: Some(1),
            s_maxage_s: Some(2),
            stale_while_revalidate_s: Some(4),
            stale_if_error_s: Some(3),
        };
        assert_eq!(parsed, expected);
    }

    #[test]
    fn invalid_and_conflicting_lifetimes_are_zero() {
        for value in [
            "max-age",
            "max-age=",
            "max-age=-5",
            "max-age=5.0",
            "max-age='5'",
            "max-age= 5",
            "max-age =5",
            "max-age=5x",
            "max-age=5, max-age=6",
            "max-age=6,max-age=5",
            "max-age=5, max-age=x",
        ] {
            assert_eq!(parse(&[("Cache-Control", value)]).max_age_s, Some(0), "{value}");
        }
        assert_eq!(parse(&[("Cache-Control", "max-age=5, MAX-AGE=5")]).max_age_s, Some(5));
    }

    #[test]
    fn a_malformed_field_restricts_wherever_it_may_have_been_meant_to() {
        for value in [
            "max-age=60, x=\"y, no-store",
            "public; private, max-age=60",
            "public; Private",
            "max-age=60 no-cache",
            "max-age=60, x=\"\"; NO-STORE",
            "max-age=60, must-understand; no-store",
            "private; x",
        ] {
            let parsed = parse(&[("Cache-Control", value)]);
            assert!(parsed.private && parsed.no_store, "{value}");
        }
        for value in
            ["max-age=60, x=\"no-store\"", "max-age=60; x", "x=\"y", "public, max-age=60", "not-private"]
        {
            let parsed = parse(&[("Cache-Control", value)]);
            assert!(!parsed.private && !parsed.no_store, "{value}");
        }
        assert!(parse(&[("Surrogate-Control", "max-age=60, x=\"y, no-store")]).no_store);
        assert!(!parse(&[("Surrogate-Control", "max-age=60;tidegate, no-store;other")]).no_store);
    }

    #[test]
    fn a_valid_targeted_field_replaces_cache_control() {
        let cdn = |value| parse(&[("Cache-Control", "max-age=1, no-store"), ("CDN-Cache-Control", value)]);
        let parsed = cdn("max-age=60, stale-if-error=5;x");
        assert!(parsed.targeted && !parsed.no_store);
        assert_eq!((parsed.max_age_s, parsed.stale_if_error_s), (Some(60), Some(5)));
        assert!(cdn("no-store").no_store);
        assert_eq!(cdn("max-age=60, max-age=70").max_age_s, Some(70));
        assert_eq!(cdn("max-age=\"60\"").max_age_s, Some(0));
        assert_eq!(cdn("max-age=-1").max_age_s, Some(0));
        assert_eq!(cdn("max-age=99999999999").max_age_s, Some(MAX_SECONDS));
        assert!(!cdn("private=?0, max-age=1").private);
    }

    #[test]
    fn an_invalid_or_empty_targeted_field_is_ignored() {
        for value in ["", " ", "max-age=60,", "Max-Age=60", "max-age=60, &", "max-age= 60"] {
            let parsed = parse(&[("Cache-Control", "max-age=1"), ("CDN-Cache-Control", value)]);
            assert!(!parsed.targeted, "{value}");
            assert_eq!(parsed.max_age_s, Some(1), "{value}");
        }
    }

    #[test]
    fn surrogate_control_comes_between() {
        let surrogate = |value| parse(&[("Cache-Control", "max-age=1"), ("Surrogate-Control", value)]);
        assert_eq!(surrogate("max-age=60").max_age_s, Some(60));
        assert_eq!(surrogate("MaX-aGe=60;tidegate, foo").max_age_s, Some(60));
        assert_eq!(surrogate("max-age=60;other").max_age_s, Some(1));
        assert_eq!(surrogate("foo").max_age_s, Some(1));
        assert_eq!(surrogate("max-age =60").max_age_s, Some(0));
        assert_eq!(surrogate("max-age=60+30").stale_while_revalidate_s, Some(30));
        assert!(surrogate("no-store").no_store);
        let both = parse(&[("Surrogate-Control", "max-age=2"), ("CDN-Cache-Control", "max-age=3")]);
        assert_eq!(both.max_age_s, Some(3));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(value in prop::collection::vec(any::<u8>(), 0..80), name in 0..3_usize) {
            let name = ["Cache-Control", "CDN-Cache-Control", "Surrogate-Control"][name];
            let fields = OwnedFields::new(&[(name.as_bytes(), &value[..])]);
            let _ = ResponseDirectives::parse(&fields.view());
            let _ = super::super::RequestDirectives::parse(&fields.view());
        }
    }
}
