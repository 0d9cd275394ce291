//! Finding a stored response that answers a request, without waiting.

use tidegate_http::cache::conditional::{self, Precondition, is_strong_date, is_weak};
use tidegate_http::cache::range::{self, RangeResult};
use tidegate_http::cache::{Forwarded, RequestDirectives, Reuse, Validation};
use tidegate_http::normalize::Normalized;
use tidegate_http::{FieldId, FieldSet, Fields, Method, RequestHead};
use tidegate_store::{Object, Store};

use crate::cache::entries::{Entry, ResponseEntry, append_variant, write_url_key};
use crate::cache::fill::Forward;
use crate::data_core::DataCore;
use crate::service::client_info::ClientInfo;
use crate::service::plan::Plan;
use crate::service::routes::Destination;
use crate::static_files::serve;

/// Whether the cache answers.
pub(crate) enum Lookup {
    Hit(Hit),
    /// Nothing is stored under this URL.
    Absent,
    /// The upstream has to be asked, or a file read.
    Miss,
}

/// A stored response and the form in which this request gets it.
pub(crate) struct Hit {
    pub object: Object,
    pub status: u16,
    pub form: Form,
    /// `None`: the origin has made or validated it for this request, which is what no `Age` says (RFC 9111 §5.1).
    pub age_s: Option<u64>,
    pub ttl_s: i64,
    pub stale: bool,
    pub is_file: bool,
    /// The upstream was asked first.
    pub forwarded: Option<Forward>,
    /// Status line and field lines for this client, where they are not the stored ones.
    pub own_head: Option<Box<[u8]>>,
}

impl Hit {
    /// Status line and field lines of the whole response.
    #[inline]
    pub(crate) fn head(&self) -> &[u8] {
        self.own_head.as_deref().unwrap_or_else(|| self.object.head())
    }
}

/// What of a stored response is sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Form {
    Whole,
    /// Bytes `start..end` of the body (RFC 9110 §14).
    Part {
        start: u64,
        end: u64,
    },
    NotModified,
    PreconditionFailed,
    Unsatisfiable,
}

/// What the cache holds for a request.
pub(crate) enum Found {
    /// May be sent; `refresh` asks for a validation in the background (RFC 5861 §3).
    Usable {
        hit: Hit,
        refresh: bool,
    },
    /// Must be validated first, because of its own age or because the request says so.
    Unusable {
        object: Object,
        reason: Forwarded,
    },
    Nothing(Forwarded),
}

/// Answers from the cache if a stored response is fresh enough for this request. Leaves the key in `key`.
#[inline]
pub(crate) fn lookup(
    core: &DataCore,
    plan: &Plan,
    head: &RequestHead<'_>,
    normalized: &Normalized<'_>,
    info: &ClientInfo<'_>,
    key: &mut Vec<u8>,
) -> Lookup {
    locate(core, plan, (head, normalized, info), key)
        .map_or(Lookup::Miss, |store| look(core, store, head, key))
}

/// The first half of [`lookup`], for those who have something else to do before [`look`]: writes the key. Returns where
/// to look for it; `None`: the cache has nothing to do with the request.
#[inline]
pub(crate) fn locate<'c>(
    core: &'c DataCore,
    plan: &Plan,
    (head, normalized, info): (&RequestHead<'_>, &Normalized<'_>, &ClientInfo<'_>),
    key: &mut Vec<u8>,
) -> Option<&'c Store> {
    let store = core.store.as_deref()?;
    match plan.route(normalized)? {
        Destination::Upstream(_) => write_url_key(normalized, info, key),
        Destination::Root(root) => serve::write_key(plan, root, head, normalized, key)?,
        Destination::Redirect(_) => return None,
    }
    Some(store)
}

/// The second half of [`lookup`], with the key that [`locate`] has written.
#[inline]
pub(crate) fn look(core: &DataCore, store: &Store, head: &RequestHead<'_>, key: &mut Vec<u8>) -> Lookup {
    match find(core, store, head, key) {
        Found::Usable { hit, refresh: false } => Lookup::Hit(hit),
        Found::Nothing(Forwarded::UriMiss) => Lookup::Absent,
        _ => Lookup::Miss,
    }
}

/// How the access log names the reason why an upstream was asked. `stale` is there what was answered without asking.
pub(crate) fn label(reason: Forwarded) -> &'static str {
    match reason {
        Forwarded::Stale => "expired",
        reason => reason.token(),
    }
}

/// Counts a hit that is sent.
#[inline]
pub(crate) fn count_hit(core: &DataCore, hit: &Hit) {
    let counter = if hit.stale { &core.metrics.cache_stale_total } else { &core.metrics.cache_hits_total };
    counter.add(1);
}

/// Looks for what answers `head` under the URL's `key`, which becomes the variant's key if there are variants. Under
/// stress a stale response that may answer in the place of an error (RFC 5861 §4) does so before there is one (Tempesta
/// §4.7).
pub(crate) fn find(core: &DataCore, store: &Store, head: &RequestHead<'_>, key: &mut Vec<u8>) -> Found {
    let now_s = core.clock.unix_s();
    let Some(mut object) = store.get(key) else { return Found::Nothing(Forwarded::UriMiss) };
    if let Some(Entry::Variants { generation, names }) = Entry::decode(object.meta()) {
        append_variant(generation, names, head.fields, core.own_cookie(), key);
        match store.get(key) {
            Some(variant) => object = variant,
            None => return Found::Nothing(Forwarded::VaryMiss),
        }
    }
    let Some(Entry::Response(entry)) = Entry::decode(object.meta()) else {
        return Found::Nothing(Forwarded::UriMiss);
    };
    if entry.is_file {
        if entry.policy.ttl_s(now_s) <= 0 {
            return Found::Nothing(Forwarded::Stale);
        }
        let parts = Parts::of(head, object.body_length(), &entry, now_s);
        return Found::Usable { hit: parts.of_object(object, false), refresh: false };
    }
    if core.with_plan(|plan| plan.is_outdated(entry.reviewed)) {
        // Not even as the answer that stands in for an error, and no 304 would make it good.
        return Found::Nothing(Forwarded::Stale);
    }
    let directives = directives(core, &head.fields);
    let (stale, refresh) = match entry.policy.reuse(&directives, now_s) {
        Reuse::Fresh { .. } => (false, false),
        Reuse::StaleAllowed { .. } => (true, false),
        Reuse::StaleWhileRevalidate { .. } => (true, !core.is_stressed()),
        Reuse::Validate(Validation::Stale)
            if core.is_stressed() && entry.policy.may_serve_stale_on_error(&directives, now_s) =>
        {
            (true, false)
        }
        Reuse::Validate(Validation::Request) => {
            return Found::Unusable { object, reason: Forwarded::Request };
        }
        _ => return Found::Unusable { object, reason: Forwarded::Stale },
    };
    if head.fields.has_any(FOR_THE_ORIGIN) && core.with_plan(|plan| plan.client_directives) {
        return Found::Unusable { object, reason: Forwarded::Request };
    }
    let parts = Parts::of(head, object.body_length(), &entry, now_s);
    Found::Usable { hit: parts.of_object(object, stale), refresh }
}

/// What a client asks of the cache, where clients are heeded.
pub(crate) fn directives(core: &DataCore, fields: &Fields<'_>) -> RequestDirectives {
    if fields.has_any(ASKING) && core.with_plan(|plan| plan.client_directives) {
        return RequestDirectives::parse(fields);
    }
    RequestDirectives::default()
}

/// All of a hit but its object, from which it is read: an object that is not cloned costs four locked instructions
/// less.
struct Parts {
    status: u16,
    form: Form,
    age_s: u64,
    ttl_s: i64,
    is_file: bool,
}

impl Parts {
    #[inline]
    fn of(head: &RequestHead<'_>, length: u64, entry: &ResponseEntry<'_>, now_s: u64) -> Self {
        Self {
            status: entry.status,
            form: form(head, length, entry, now_s),
            age_s: entry.policy.age_s(now_s),
            ttl_s: entry.policy.ttl_s(now_s),
            is_file: entry.is_file,
        }
    }

    #[inline]
    fn of_object(self, object: Object, stale: bool) -> Hit {
        let Self { status, form, age_s, ttl_s, is_file } = self;
        let age_s = Some(age_s);
        Hit { object, status, form, age_s, ttl_s, stale, is_file, forwarded: None, own_head: None }
    }
}

/// The form in which `head` gets a stored response: conditions first, then ranges (RFC 9110 §13.2.2).
pub(crate) fn hit(
    head: &RequestHead<'_>,
    object: &Object,
    entry: &ResponseEntry<'_>,
    now_s: u64,
    stale: bool,
) -> Hit {
    Parts::of(head, object.body_length(), entry, now_s).of_object(object.clone(), stale)
}

/// The fields that ask for something other than the whole.
const SELECTING: FieldSet = FieldSet::of(&[
    FieldId::IfMatch,
    FieldId::IfNoneMatch,
    FieldId::IfModifiedSince,
    FieldId::IfUnmodifiedSince,
    FieldId::Range,
]);

/// Conditions that are none for a cache (RFC 9111 §4.3.2): only the origin knows what is current.
pub(crate) const FOR_THE_ORIGIN: FieldSet = FieldSet::of(&[FieldId::IfMatch, FieldId::IfUnmodifiedSince]);

/// The fields by which a client asks something of the cache.
const ASKING: FieldSet = FieldSet::of(&[FieldId::CacheControl, FieldId::Pragma]);

#[inline]
fn form(head: &RequestHead<'_>, length: u64, entry: &ResponseEntry<'_>, now_s: u64) -> Form {
    // Conditions apply to what would be a success (RFC 9110 §13.2.1).
    if entry.status != 200 || !head.fields.has_any(SELECTING) {
        return Form::Whole;
    }
    if let (true, Some(modified_s)) = (entry.is_file, entry.last_modified_s) {
        return form_of_file(head, length, entry.etag, modified_s, now_s);
    }
    // RFC 9111 §4.3.2: without Last-Modified, the date of the response is what If-Modified-Since is compared with.
    let date_s = entry.policy.date_s();
    let modified_s = entry.last_modified_s.unwrap_or(date_s);
    let condition = conditional::evaluate_for_cache(head.method, &head.fields, entry.etag, Some(modified_s));
    // What was compressed at one time and at another has the same date, and need not have the same bytes.
    let may_be_compressed = entry.etag.map_or(entry.is_by_coding, is_weak);
    let strong_s =
        entry.last_modified_s.filter(|modified_s| !may_be_compressed && is_strong_date(*modified_s, date_s));
    selected(head, length, condition, entry.etag, strong_s)
}

/// The form in which `head` gets a file with these validators and this length.
pub(crate) fn form_of_file(
    head: &RequestHead<'_>,
    length: u64,
    etag: Option<&[u8]>,
    modified_s: u64,
    now_s: u64,
) -> Form {
    let condition = conditional::evaluate(head.method, &head.fields, etag, Some(modified_s));
    // Within the second of the change there may be another one.
    let strong_s = Some(modified_s).filter(|modified_s| is_strong_date(*modified_s, now_s));
    selected(head, length, condition, etag, strong_s)
}

/// What a condition leaves of a 200 response, of which a part may be asked for.
fn selected(
    head: &RequestHead<'_>,
    length: u64,
    condition: Precondition,
    etag: Option<&[u8]>,
    strong_date_s: Option<u64>,
) -> Form {
    match condition {
        Precondition::NotModified => return Form::NotModified,
        Precondition::Failed => return Form::PreconditionFailed,
        Precondition::Proceed => {}
    }
    let Some(value) = head.fields.get(FieldId::Range).filter(|_| head.method == Method::Get) else {
        return Form::Whole;
    };
    if !conditional::if_range_holds(&head.fields, etag, strong_date_s) {
        return Form::Whole;
    }
    match range::parse(value, length) {
        RangeResult::Single { start, end } => Form::Part { start, end },
        RangeResult::Unsatisfiable => Form::Unsatisfiable,
        // RFC 9110 §14.2: a server may ignore Range; several ranges at once cost more than they save.
        _ => Form::Whole,
    }
}
