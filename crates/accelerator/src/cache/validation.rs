//! Validation: what a stored response is recognized by, and what a 304 says about it (RFC 9111 §4.3).

use tidegate_http::cache::conditional::validators_match;
use tidegate_http::cache::update::{Recipient, is_for_one_client, merge};
use tidegate_http::cache::{Policy, vary};
use tidegate_http::{FieldId, HeadLimits, Method, Progress, ResponseHead, ResponseParser};
use tidegate_store::Object;

use crate::cache::entries::Entry;
use crate::cache::fill::{self, Storing};
use crate::service::fetch::ADDED;

/// What a stored response can be recognized by.
#[derive(Default)]
pub(super) struct Validators {
    status: Option<u16>,
    etag: Option<Vec<u8>>,
    last_modified: Option<[u8; 29]>,
}

impl Validators {
    pub(super) fn of(object: &Object) -> Self {
        match Entry::decode(object.meta()) {
            Some(Entry::Response(entry)) => Self {
                status: Some(entry.status),
                etag: entry.etag.map(<[u8]>::to_vec),
                last_modified: entry.last_modified_s.map(tidegate_http::date::format),
            },
            _ => Self::default(),
        }
    }

    /// That of the stored response.
    pub(super) fn status(&self) -> Option<u16> {
        self.status
    }

    /// The fields of a validating request, and those that every request has.
    pub(super) fn fields(&self) -> Vec<(&[u8], &[u8])> {
        let mut fields: Vec<(&[u8], &[u8])> = ADDED.to_vec();
        if let Some(etag) = &self.etag {
            fields.push((b"If-None-Match", etag));
        }
        if let Some(date) = &self.last_modified {
            fields.push((b"If-Modified-Since", date));
        }
        fields
    }
}

/// A stored response that a 304 has made fresh.
pub(super) struct Freshened {
    pub object: Object,
    /// For others too. If not, the 304 holds for this request, and what is stored is as it was or has been made fresh
    /// by another one.
    pub is_stored: bool,
    /// The head for the client whose request was validated, if the 304 says something to it alone.
    pub own_head: Option<Box<[u8]>>,
    /// The 304 came out of a cache on the way, which says how old it is.
    pub has_age: bool,
}

/// Takes over what a 200 to a HEAD says about a stored response that a GET would have been answered with, or removes that if
/// it is another one (RFC 9111 §4.3.5).
pub(super) fn take_over_from_head(storing: &Storing<'_>, stored: &Object, response: &ResponseHead<'_>) {
    let Some(Entry::Response(entry)) = Entry::decode(stored.meta()) else { return };
    // One that was compressed here has another length and validator than the server's.
    if entry.status != 200 || entry.is_by_coding {
        return;
    }
    let length = fill::decimal(&response.fields, FieldId::ContentLength);
    // Of an answer that could be about anything nothing follows.
    let is_told_apart = match entry.etag {
        Some(_) => response.fields.has(FieldId::Etag),
        None => {
            let has_date = entry.last_modified_s.is_some() && response.fields.has(FieldId::LastModified);
            has_date || response.fields.has(FieldId::Etag) || length.is_some()
        }
    };
    if length.is_some_and(|length| length != stored.body_length()) {
        remove_other(storing, stored, response);
    } else if is_told_apart {
        let _ = freshen(storing, stored, response);
    }
}

/// Removes what is stored, since `response` is about another one: unless that one may have been selected by a field that
/// does not count.
fn remove_other(storing: &Storing<'_>, stored: &Object, response: &ResponseHead<'_>) {
    if !vary::is_imitated(&response.fields, &storing.request.fields) {
        storing.store.remove(stored.key());
    }
}

/// Takes over what a 304 says about a stored response (RFC 9111 §4.3.4). `None` when it is about another one, or when
/// the stored one was removed on purpose meanwhile.
pub(super) fn freshen(
    storing: &Storing<'_>,
    stale: &Object,
    not_modified: &ResponseHead<'_>,
) -> Option<Freshened> {
    let Some(Entry::Response(entry)) = Entry::decode(stale.meta()) else { return None };
    if storing.core.with_plan(|plan| plan.is_outdated(entry.reviewed)) {
        return None;
    }
    if !validators_match(&not_modified.fields, entry.etag, entry.last_modified_s) {
        remove_other(storing, stale, not_modified);
        return None;
    }
    if !storing.core.flights.is_current(storing.url_key, storing.epoch) {
        return None;
    }
    let mut stored = stale.head().to_vec();
    stored.extend_from_slice(b"\r\n");
    // What was stored is as long as it may be, and what a route adds to it.
    let limits = HeadLimits { fields: u16::MAX, head_bytes: u32::MAX, ..HeadLimits::default() };
    let new_parser = || ResponseParser::new(limits);
    let mut parser = new_parser();
    parser.reset(Method::Get);
    let Ok(Progress::Complete { .. }) = parser.parse(&stored) else { return None };
    let now_s = storing.core.clock.unix_s();
    let (old, newer) = (parser.head(&stored), &not_modified.fields);
    let updated_for = |recipient| {
        let mut head = Vec::with_capacity(stored.len() + 64);
        fill::write_status_line(&old, &mut head);
        merge(&old.fields, newer, now_s, recipient, &mut head);
        head
    };
    let head = updated_for(Recipient::Everybody);
    let own_head = is_for_one_client(&old.fields, newer, now_s)
        .then(|| updated_for(Recipient::Validating).into_boxed_slice());
    let mut merged = head.clone();
    merged.extend_from_slice(b"\r\n");
    let mut merged_parser = new_parser();
    merged_parser.reset(Method::Get);
    let Ok(Progress::Complete { .. }) = merged_parser.parse(&merged) else { return None };
    let response = merged_parser.head(&merged);
    let policy =
        Policy::validated(storing.request, &response, not_modified, storing.request_time_s(now_s), now_s);
    let has_age = newer.has(FieldId::Age);
    let for_this_request = || {
        let own_head = Some(updated_for(Recipient::Validating).into_boxed_slice());
        Some(Freshened { object: stale.clone(), is_stored: false, own_head, has_age })
    };
    let policy = match policy {
        Err(refusal) if refusal.is_by_request() => return for_this_request(),
        policy => policy
            .ok()
            .filter(|_| storing.key_for(&response, entry.is_by_coding).is_some_and(|key| key == stale.key())),
    };
    // What is no longer to be stored, or is now selected by other fields (RFC 9111 §4.1), is gone for the next request.
    let Some(policy) = policy else {
        storing.store.remove(stale.key());
        return None;
    };
    let meta = fill::response_meta(&response, policy, entry.reviewed, entry.is_by_coding);
    match storing.store.replace_meta(stale.key(), stale, &meta, &head) {
        Ok(object) => Some(Freshened { object, is_stored: true, own_head, has_age }),
        Err(_) => for_this_request(),
    }
}
