//! Whether a response may be stored, and whether a stored one may be reused (RFC 9111 §3, §4.2).

use super::directives::{RequestDirectives, ResponseDirectives, members};
use super::vary;
use crate::date;
use crate::field::{FieldId, FieldSet, Fields};
use crate::head::{Method, RequestHead, ResponseHead};

/// RFC 9111 §1.2.2.
const MAX_SECONDS: u32 = 1 << 31;
/// No heuristic makes a response fresh for longer than a day: it says nothing about what the origin intends.
const MAX_HEURISTIC_S: u32 = 86_400;
/// For how long a response that says nothing about errors may be served stale while the upstream cannot be reached.
const DISCONNECTED_GRACE_S: u32 = 86_400;
/// How far ahead of the clock a stored response may be before it counts as stale: data cores and the steps of a clock
/// that is kept in time differ by less. The age of what was stored before a larger step back is not known.
const CLOCK_SLACK_S: u64 = 5;
/// `u32::MAX` stands for an absent number in the encoded form.
const ABSENT: u32 = u32::MAX;
const FORMAT: u8 = 1;

/// Not to be reused without validation (RFC 9111 §5.2.2.4).
const NO_CACHE: u8 = 1;
/// Not to be reused stale (RFC 9111 §4.2.4): must-revalidate, proxy-revalidate or s-maxage.
const NEVER_STALE: u8 = 1 << 1;
const IMMUTABLE: u8 = 1 << 2;
const HEURISTIC: u8 = 1 << 3;
const KNOWN_FLAGS: u8 = NO_CACHE | NEVER_STALE | IMMUTABLE | HEURISTIC;

/// Names and values of fields of a request that no server finds too long.
const SHORT_FIELDS_BYTES: usize = 2048;

/// Why a response must not, or had better not, be stored.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum NotStorable {
    /// Only responses to GET and HEAD are stored.
    Method,
    /// The status code is not final, or its response makes no sense without the request: 1xx, 206, 304. Or it blames
    /// the request for what is not part of the cache's key, so that one client's bad request would answer everybody:
    /// 408, 413, 431, and 400 where the request's fields are long. What 414 is about, the target, is part of the key.
    Status,
    /// `must-understand`, and the status code is not one of RFC 9110 (RFC 9111 §5.2.2.3).
    NotUnderstood,
    /// The request says `no-store` (RFC 9111 §5.2.1.5).
    RequestNoStore,
    /// The response says `no-store` (RFC 9111 §5.2.2.5).
    NoStore,
    /// The response says `private` (RFC 9111 §5.2.2.7).
    Private,
    /// The request carried credentials and the response does not permit sharing (RFC 9111 §3.5).
    Authorization,
    /// `Vary: *` never matches (RFC 9111 §4.1).
    VaryAny,
    /// It varies by a field that does not reach the origin as the client sent it, because we write it ourselves.
    VaryByClient,
    /// The request has a field that servers may take for one by which it varies.
    VaryImitated,
    /// Nothing makes it cacheable: neither freshness nor `public` nor a heuristically cacheable status (RFC 9111 §3).
    NoPermission,
    /// It would be stale at once and could not be validated.
    Useless,
    /// It sets a cookie and is not explicitly fresh: meant for one client.
    SetCookie,
    /// The request identifies its client, and the response says nothing about whom it may be reused for: it may be
    /// another one for each client.
    Identified,
}

impl NotStorable {
    /// Whether it is because of the request alone: the response to another one may be stored.
    pub fn is_by_request(self) -> bool {
        matches!(self, Self::RequestNoStore | Self::Authorization | Self::Identified | Self::VaryImitated)
    }
}

/// What may be done with a stored response now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Reuse {
    /// Send it.
    Fresh {
        /// Value of the Age field, in seconds.
        age_s: u64,
    },
    /// Send it and validate it in the background (RFC 5861 §3).
    StaleWhileRevalidate {
        /// Value of the Age field, in seconds.
        age_s: u64,
    },
    /// Send it: it is stale, and the client accepts that (`max-stale`).
    StaleAllowed {
        /// Value of the Age field, in seconds.
        age_s: u64,
    },
    /// Validate it first, or fetch it anew.
    Validate(Validation),
}

/// Why a stored response has to be validated.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Validation {
    /// It is stale, or says `no-cache`.
    Stale,
    /// It is fresh, but the request asks for more than that.
    Request,
}

/// What a shared cache has to know of a stored response in order to reuse it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Policy {
    /// When the response was received, in seconds since 1970.
    response_time_s: u64,
    /// When it was generated, in seconds since 1970: its Date, or `response_time_s`.
    date_s: u64,
    /// RFC 9111 §4.2.1.
    lifetime_s: u32,
    /// RFC 9111 §4.2.3: `corrected_initial_age`.
    initial_age_s: u32,
    /// RFC 5861 §3; 0 if not allowed.
    stale_while_revalidate_s: u32,
    /// RFC 5861 §4; `ABSENT` if nothing is said.
    stale_if_error_s: u32,
    flags: u8,
}

impl Default for Policy {
    /// For content that this server is itself the origin of: of age 0 and fresh at any time.
    fn default() -> Self {
        Self {
            response_time_s: u64::MAX,
            date_s: u64::MAX,
            lifetime_s: MAX_SECONDS,
            initial_age_s: 0,
            stale_while_revalidate_s: 0,
            stale_if_error_s: ABSENT,
            flags: 0,
        }
    }
}

impl Policy {
    /// For content that this server is itself the origin of, and looks at again after `lifetime_s` seconds.
    pub fn fresh_for(lifetime_s: u32, now_s: u64) -> Self {
        Self { response_time_s: now_s, date_s: now_s, lifetime_s, ..Self::default() }
    }

    /// Length of the encoded form, in bytes.
    pub const ENCODED_BYTES: usize = 34;

    /// Decides whether `response` to `request` may be stored, and how it may then be reused. Times are in seconds since
    /// 1970: when the request was sent and when the response came.
    ///
    /// For a response that a 304 updated, use [`Policy::validated`].
    ///
    /// # Errors
    /// Why the response is not to be stored.
    pub fn new(
        request: &RequestHead<'_>,
        response: &ResponseHead<'_>,
        request_time_s: u64,
        response_time_s: u64,
    ) -> Result<Self, NotStorable> {
        Self::with_age(request, response, &response.fields, request_time_s, response_time_s)
    }

    /// Like [`Policy::new`] for a stored response that was updated from a 304: the age is that of the 304, whose Age
    /// field is not part of what [`super::update::merge`] writes.
    ///
    /// # Errors
    /// Why the response is no longer to be stored.
    pub fn validated(
        request: &RequestHead<'_>,
        merged: &ResponseHead<'_>,
        not_modified: &ResponseHead<'_>,
        request_time_s: u64,
        response_time_s: u64,
    ) -> Result<Self, NotStorable> {
        Self::with_age(request, merged, &not_modified.fields, request_time_s, response_time_s)
    }

    fn with_age(
        request: &RequestHead<'_>,
        response: &ResponseHead<'_>,
        age_fields: &Fields<'_>,
        request_time_s: u64,
        response_time_s: u64,
    ) -> Result<Self, NotStorable> {
        let directives = ResponseDirectives::parse(&response.fields);
        may_store(request, response, &directives)?;
        // Most of what an application makes for one request; nobody needs to know its date.
        if !response.fields.has_any(LASTING) {
            let sets_cookie = response.fields.has(FieldId::SetCookie);
            return Err(if sets_cookie { NotStorable::SetCookie } else { NotStorable::Useless });
        }
        let date_s = date_of(&response.fields, response_time_s);
        let explicit_s = explicit_lifetime_s(&response.fields, &directives, date_s, response_time_s);
        let lifetime_s = match explicit_s {
            Some(seconds) => seconds,
            None => heuristic_lifetime_s(request, response, &directives, date_s),
        };
        let says_whom_for = explicit_s.is_some()
            || directives.public
            || directives.no_cache
            || directives.must_revalidate
            || directives.proxy_revalidate;
        if !says_whom_for && identifies_client(request) {
            return Err(NotStorable::Identified);
        }
        let is_explicitly_fresh = explicit_s.is_some_and(|seconds| seconds > 0) && !directives.no_cache;
        if !is_explicitly_fresh && response.fields.has(FieldId::SetCookie) {
            return Err(NotStorable::SetCookie);
        }
        let age = age_value(age_fields);
        let mut this = Self {
            response_time_s,
            date_s,
            lifetime_s,
            initial_age_s: initial_age_s(age, date_s, request_time_s, response_time_s),
            stale_while_revalidate_s: directives.stale_while_revalidate_s.unwrap_or(0),
            stale_if_error_s: directives.stale_if_error_s.unwrap_or(ABSENT),
            flags: 0,
        };
        this.set(NO_CACHE, directives.no_cache);
        this.set(
            NEVER_STALE,
            directives.must_revalidate || directives.proxy_revalidate || directives.s_maxage_s.is_some(),
        );
        this.set(IMMUTABLE, directives.immutable);
        this.set(HEURISTIC, explicit_s.is_none());
        if this.is_useless(&response.fields) { Err(NotStorable::Useless) } else { Ok(this) }
    }

    /// Whether the response could answer nothing, not even after validation.
    fn is_useless(&self, fields: &Fields<'_>) -> bool {
        let validates = fields.has(FieldId::Etag)
            || fields.get(FieldId::LastModified).is_some_and(|value| date::parse(value).is_some());
        let answers = self.lifetime_s > self.initial_age_s && !self.has(NO_CACHE);
        let answers_stale = !self.has(NO_CACHE)
            && !self.has(NEVER_STALE)
            && (self.stale_while_revalidate_s > 0 || !matches!(self.stale_if_error_s, 0 | ABSENT));
        !validates && !answers && !answers_stale
    }

    /// Whether a stored response may answer a request now, `now_s` being in seconds since 1970.
    #[inline]
    pub fn reuse(&self, request: &RequestDirectives, now_s: u64) -> Reuse {
        let age_s = self.age_s(now_s);
        let lifetime_s = u64::from(self.lifetime_s);
        if self.has(NO_CACHE) {
            return Reuse::Validate(Validation::Stale);
        }
        let is_fresh = lifetime_s > age_s;
        if !self.is_acceptable(request, age_s) {
            return Reuse::Validate(if is_fresh { Validation::Request } else { Validation::Stale });
        }
        if is_fresh {
            return Reuse::Fresh { age_s };
        }
        let staleness_s = age_s - lifetime_s;
        if self.has(NEVER_STALE) {
            return Reuse::Validate(Validation::Stale);
        }
        // `<=` without a grant of 0 would serve a response in the second in which it became stale.
        let within = |limit_s: u32| limit_s > 0 && staleness_s <= u64::from(limit_s);
        if within(self.stale_while_revalidate_s) {
            return Reuse::StaleWhileRevalidate { age_s };
        }
        if self.was_fresh() && request.max_stale_s.is_some_and(within) {
            return Reuse::StaleAllowed { age_s };
        }
        Reuse::Validate(Validation::Stale)
    }

    /// RFC 9111 §5.2.1: what the request demands beyond freshness.
    #[inline]
    fn is_acceptable(&self, request: &RequestDirectives, age_s: u64) -> bool {
        !request.no_cache
            && request.max_age_s.is_none_or(|limit_s| age_s <= u64::from(limit_s))
            && request
                .min_fresh_s
                .is_none_or(|seconds| u64::from(self.lifetime_s) >= age_s.saturating_add(u64::from(seconds)))
    }

    /// Whether a stale response may be sent because the upstream answered 500, 502, 503 or 504 (RFC 5861 §4): only if
    /// the response or the request says so.
    pub fn may_serve_stale_on_error(&self, request: &RequestDirectives, now_s: u64) -> bool {
        let asked_s = self.stale_if_error_asked(request);
        let limit_s = match self.stale_if_error_s {
            ABSENT => asked_s,
            limit_s => Some(limit_s.max(asked_s.unwrap_or(0))),
        };
        limit_s.is_some_and(|limit_s| self.may_serve_stale(now_s, limit_s))
    }

    /// Whether a stale response may be sent because the upstream cannot be reached (RFC 9111 §4.2.4): for as long as
    /// `stale-if-error` says, else for a day.
    pub fn may_serve_stale_when_disconnected(&self, request: &RequestDirectives, now_s: u64) -> bool {
        let limit_s = match self.stale_if_error_s {
            ABSENT if !self.was_fresh() => return false,
            ABSENT => DISCONNECTED_GRACE_S,
            limit_s => limit_s,
        };
        let asked_s = self.stale_if_error_asked(request).unwrap_or(0);
        self.may_serve_stale(now_s, limit_s.max(asked_s))
    }

    fn stale_if_error_asked(&self, request: &RequestDirectives) -> Option<u32> {
        request.stale_if_error_s.filter(|_| self.was_fresh())
    }

    /// What was never fresh is not served stale because a client asks for it or an upstream fails: nobody has said that
    /// it may answer anybody without the origin's word, and it may have been meant for one client.
    fn was_fresh(&self) -> bool {
        self.lifetime_s > 0
    }

    /// Whether a response is stale that must not be reused without validation then (RFC 9111 §5.2.2.2, §5.2.2.8): where
    /// the upstream cannot be reached, the answer is 504.
    pub fn must_fail_when_disconnected(&self, now_s: u64) -> bool {
        self.has(NEVER_STALE) && self.ttl_s(now_s) <= 0
    }

    /// The origin has been asked in vain. That a client would rather have its word (RFC 9111 §5.2.1: what requests say are
    /// preferences), as browsers do on every reload, makes an error no better an answer.
    fn may_serve_stale(&self, now_s: u64, limit_s: u32) -> bool {
        let staleness_s = self.age_s(now_s).saturating_sub(u64::from(self.lifetime_s));
        !self.has(NO_CACHE | NEVER_STALE) && staleness_s <= u64::from(limit_s)
    }

    /// Age at `now_s`, in seconds (RFC 9111 §4.2.3: `current_age`).
    #[inline]
    pub fn age_s(&self, now_s: u64) -> u64 {
        let ahead_s = self.response_time_s.saturating_sub(now_s);
        // What is of no time is our own content.
        if ahead_s > CLOCK_SLACK_S && self.response_time_s != u64::MAX {
            return u64::from(MAX_SECONDS);
        }
        u64::from(self.initial_age_s) + now_s.saturating_sub(self.response_time_s)
    }

    /// Seconds for which the response stays fresh; negative if it is stale. What RFC 9211 §2.4 calls `ttl`.
    #[inline]
    pub fn ttl_s(&self, now_s: u64) -> i64 {
        i64::from(self.lifetime_s).saturating_sub(i64::try_from(self.age_s(now_s)).unwrap_or(i64::MAX))
    }

    /// Whether it stays fresh at any time: content that this server is itself the origin of.
    pub fn never_expires(&self) -> bool {
        self.response_time_s == u64::MAX
    }

    /// When the response was generated, in seconds since 1970. `If-Modified-Since` is compared with it where there is
    /// no `Last-Modified` (RFC 9111 §4.3.2).
    pub fn date_s(&self) -> u64 {
        self.date_s
    }

    /// When the response was received, in seconds since 1970.
    pub fn received_s(&self) -> u64 {
        self.response_time_s
    }

    /// Whether no field says how long the response is fresh.
    pub fn is_heuristic(&self) -> bool {
        self.has(HEURISTIC)
    }

    /// RFC 8246: whether it does not change while it is fresh.
    pub fn is_immutable(&self) -> bool {
        self.has(IMMUTABLE)
    }

    /// The form in which a store keeps it.
    pub fn to_bytes(&self) -> [u8; Self::ENCODED_BYTES] {
        let mut out = [0; Self::ENCODED_BYTES];
        out[0] = FORMAT;
        out[1] = self.flags;
        out[2..10].copy_from_slice(&self.response_time_s.to_le_bytes());
        out[10..18].copy_from_slice(&self.date_s.to_le_bytes());
        out[18..22].copy_from_slice(&self.lifetime_s.to_le_bytes());
        out[22..26].copy_from_slice(&self.initial_age_s.to_le_bytes());
        out[26..30].copy_from_slice(&self.stale_while_revalidate_s.to_le_bytes());
        out[30..34].copy_from_slice(&self.stale_if_error_s.to_le_bytes());
        out
    }

    /// Reads what [`Policy::to_bytes`] wrote; `None` if another version did.
    #[inline]
    pub fn from_bytes(bytes: &[u8; Self::ENCODED_BYTES]) -> Option<Self> {
        let &[FORMAT, flags, ref numbers @ ..] = bytes else { return None };
        if flags & !KNOWN_FLAGS != 0 {
            return None;
        }
        let (response_time, numbers) = numbers.split_first_chunk()?;
        let (date, numbers) = numbers.split_first_chunk()?;
        let (numbers, _) = numbers.as_chunks::<4>();
        let &[lifetime, initial_age, stale_while_revalidate, stale_if_error] = numbers else { return None };
        Some(Self {
            response_time_s: u64::from_le_bytes(*response_time),
            date_s: u64::from_le_bytes(*date),
            lifetime_s: u32::from_le_bytes(lifetime),
            initial_age_s: u32::from_le_bytes(initial_age),
            stale_while_revalidate_s: u32::from_le_bytes(stale_while_revalidate),
            stale_if_error_s: u32::from_le_bytes(stale_if_error),
            flags,
        })
    }

    #[inline]
    fn has(&self, flags: u8) -> bool {
        self.flags & flags != 0
    }

    fn set(&mut self, flag: u8, on: bool) {
        if on {
            self.flags |= flag;
        }
    }
}

/// Without one of these, a response is neither fresh nor can be validated.
const LASTING: FieldSet = FieldSet::of(&[
    FieldId::CacheControl,
    FieldId::CdnCacheControl,
    FieldId::Etag,
    FieldId::Expires,
    FieldId::LastModified,
    FieldId::SurrogateControl,
]);

/// Whether a response may be an error that this request's fields have brought about.
fn blames_fields(request: &RequestHead<'_>, status: u16) -> bool {
    let bytes = || request.fields.iter().map(|(_, name, value)| name.len() + value.len()).sum::<usize>();
    match status {
        408 | 413 | 431 => true,
        // What servers say to a head that is longer than they take.
        400 => bytes() > SHORT_FIELDS_BYTES,
        _ => false,
    }
}

/// RFC 9111 §3.
fn may_store(
    request: &RequestHead<'_>,
    response: &ResponseHead<'_>,
    directives: &ResponseDirectives,
) -> Result<(), NotStorable> {
    let understood = is_understood(response.status);
    let refusal = if !matches!(request.method, Method::Get | Method::Head) {
        NotStorable::Method
    } else if response.status < 200
        || matches!(response.status, 206 | 304)
        || blames_fields(request, response.status)
    {
        NotStorable::Status
    } else if directives.must_understand && !understood {
        NotStorable::NotUnderstood
    } else if RequestDirectives::parse(&request.fields).no_store {
        NotStorable::RequestNoStore
    } else if directives.no_store && !directives.must_understand {
        NotStorable::NoStore
    } else if directives.private {
        NotStorable::Private
    } else if request.fields.has(FieldId::Authorization)
        && !directives.public
        && !directives.must_revalidate
        && directives.s_maxage_s.is_none()
    {
        NotStorable::Authorization
    } else if vary::is_any(&response.fields) {
        NotStorable::VaryAny
    } else if vary::is_by_client(&response.fields, &request.fields) {
        NotStorable::VaryByClient
    } else if !directives.public
        && directives.max_age_s.is_none()
        && directives.s_maxage_s.is_none()
        && (directives.targeted || !response.fields.has(FieldId::Expires))
        && !is_heuristically_cacheable(response.status)
    {
        NotStorable::NoPermission
    } else if vary::is_imitated(&response.fields, &request.fields) {
        NotStorable::VaryImitated
    } else {
        return Ok(());
    };
    Err(refusal)
}

/// RFC 9110 §6.6.1: without a usable Date it is the time of reception.
fn date_of(fields: &Fields<'_>, response_time_s: u64) -> u64 {
    let stated_s = fields.get(FieldId::Date).and_then(|date| date::parse_at(date, response_time_s));
    stated_s.unwrap_or(response_time_s)
}

/// Whether a response says itself that it may be reused without validation, and how long.
pub(super) fn is_explicitly_fresh(fields: &Fields<'_>, response_time_s: u64) -> bool {
    let directives = ResponseDirectives::parse(fields);
    let date_s = date_of(fields, response_time_s);
    let lifetime_s = explicit_lifetime_s(fields, &directives, date_s, response_time_s);
    lifetime_s.is_some_and(|seconds| seconds > 0) && !directives.no_cache
}

/// RFC 9111 §4.2.1.
fn explicit_lifetime_s(
    fields: &Fields<'_>,
    directives: &ResponseDirectives,
    date_s: u64,
    response_time_s: u64,
) -> Option<u32> {
    if let Some(seconds) = directives.s_maxage_s.or(directives.max_age_s) {
        return Some(seconds);
    }
    if directives.targeted {
        return None;
    }
    let mut lines = fields.get_all(FieldId::Expires);
    let expires = lines.next()?;
    // RFC 9111 §5.3: invalid dates, "0" above all, lie in the past.
    let contradicted = lines.any(|other| other != expires);
    let expires_s = date::parse_at(expires, response_time_s).filter(|_| !contradicted).unwrap_or(0);
    Some(u32::try_from(expires_s.saturating_sub(date_s)).unwrap_or(MAX_SECONDS).min(MAX_SECONDS))
}

/// Whether a request says who asks, so that its answer may be for one client.
pub fn identifies_client(request: &RequestHead<'_>) -> bool {
    request.fields.has(FieldId::Cookie) || request.fields.has(FieldId::Authorization)
}

/// RFC 9111 §4.2.2: a tenth of the time for which the response had not changed. Only for requests that do not identify
/// a client, because nobody said that the response may be shared.
fn heuristic_lifetime_s(
    request: &RequestHead<'_>,
    response: &ResponseHead<'_>,
    directives: &ResponseDirectives,
    date_s: u64,
) -> u32 {
    let fields = &response.fields;
    let has_consent = directives.public || is_heuristically_cacheable(response.status);
    // RFC 9111 §5.4 leaves Pragma in a response undefined; those who send it mean no-cache.
    let pragma = fields.has(FieldId::Pragma)
        && !fields.has(FieldId::CacheControl)
        && fields
            .get_all(FieldId::Pragma)
            .flat_map(members)
            .any(|member| member.eq_ignore_ascii_case(b"no-cache"));
    if !has_consent || (identifies_client(request) && !directives.public) || pragma {
        return 0;
    }
    let modified_s = fields.get(FieldId::LastModified).and_then(|value| date::parse_at(value, date_s));
    modified_s.map_or(0, |modified_s| {
        (date_s.saturating_sub(modified_s) / 10).min(u64::from(MAX_HEURISTIC_S)) as u32
    })
}

/// RFC 9111 §5.1: the first member counts, and a value that is no number of seconds is ignored. Parameters are allowed
/// for, since the field may come from a sender that writes structured fields (RFC 9651 §3.3).
fn age_value(fields: &Fields<'_>) -> u32 {
    let line = fields.get(FieldId::Age).unwrap_or(b"");
    let end = line.iter().position(|byte| matches!(byte, b',' | b';')).unwrap_or(line.len());
    let digits = line[..end].trim_ascii();
    if !digits.iter().all(u8::is_ascii_digit) {
        return 0;
    }
    let seconds = digits
        .iter()
        .fold(0_u64, |number, digit| (number * 10 + u64::from(digit - b'0')).min(u64::from(MAX_SECONDS)));
    seconds as u32
}

/// RFC 9111 §4.2.3.
fn initial_age_s(age_value_s: u32, date_s: u64, request_time_s: u64, response_time_s: u64) -> u32 {
    let apparent_age_s = response_time_s.saturating_sub(date_s);
    let response_delay_s = response_time_s.saturating_sub(request_time_s);
    let corrected_age_s = u64::from(age_value_s).saturating_add(response_delay_s);
    apparent_age_s.max(corrected_age_s).min(u64::from(MAX_SECONDS)) as u32
}

/// RFC 9110 §15.1.
fn is_heuristically_cacheable(status: u16) -> bool {
    matches!(status, 200 | 203 | 204 | 300 | 301 | 308 | 404 | 405 | 410 | 414 | 501)
}

/// The final status codes of RFC 9110 §15 whose caching rules are followed here.
fn is_understood(status: u16) -> bool {
    matches!(status, 200..=205 | 300..=303 | 305 | 307 | 308 | 400..=417 | 421 | 422 | 426 | 500..=505)
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
