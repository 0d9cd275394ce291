//! A response on its way from an upstream to a client, and into the cache as it passes.

use std::collections::VecDeque;
use std::rc::Rc;

use tidegate_http::cache::conditional::{Precondition, evaluate_for_cache};
use tidegate_http::cache::{self, Forwarded, Handling, NotStorable, Policy, RequestDirectives, Reuse, vary};
use tidegate_http::date;
use tidegate_http::forward::write_response_fields;
use tidegate_http::{
    BodyFraming, FieldId, Fields, RequestHead, ResponseHead, Version, status_reason, write_decimal,
};
use tidegate_store::{InsertError, Object, Store, Writer};

use crate::cache::entries::{Entry, ResponseEntry, append_variant, encode_variants, name_by_coding};
use crate::cache::flights::{Epoch, Flights, Leader, Outcome, Started};
use crate::cache::transfer::{Fill, Pumped, Reader, Rest};
use crate::data_core::DataCore;
use crate::icap::Reviewed;
use crate::upstream::{Interim, Response, Upload, UpstreamError};

/// A response with more bytes of tags than this is not stored, since it could not be purged by all of them.
const TAG_BYTES: usize = 16 * 1024;

/// The fields in which an origin names the tags by which a response can be purged.
const TAG_FIELDS: [FieldId; 2] = [FieldId::CacheTag, FieldId::SurrogateKey];

/// A response that comes as a stream: from an upstream, or from the cache while it is being stored there.
pub(crate) struct Streamed {
    pub status: u16,
    pub framing: BodyFraming,
    /// `Content-Length` as it was given, which in an answer to HEAD says nothing of the framing.
    pub content_length: Option<u64>,
    pub age_s: Option<u64>,
    /// For how long what is being stored stays fresh.
    pub ttl_s: Option<i64>,
    /// Status line and field lines for the client, without framing and the empty line.
    pub head: Vec<u8>,
    pub forward: Forward,
    interim: VecDeque<Interim>,
    source: Source,
    /// Of content whose length was announced, what is to come of it.
    announced: Option<u64>,
}

/// Where a body comes from.
enum Source {
    Upstream(Rest),
    Stored(Reader),
    Nothing,
}

/// Why a request went to the upstream and what came of it, as `Cache-Status` and the log tell it (RFC 9211 §2).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Forward {
    pub reason: Forwarded,
    pub upstream_status: u16,
    pub stored: bool,
    pub collapsed: bool,
    /// A hash of the key of the variant that the cache did not have; 0 if it was not a variant that was missing.
    pub variant: u64,
}

impl Forward {
    pub(crate) fn handling(self) -> Handling {
        Handling::Forwarded {
            reason: self.reason,
            status: Some(self.upstream_status).filter(|status| *status != 0),
            stored: self.stored,
            collapsed: self.collapsed,
        }
    }
}

impl Streamed {
    /// A response that passes through without being stored.
    pub(crate) fn passing(mut response: Box<Response>, head: Vec<u8>, forward: Forward) -> Self {
        let interim = response.take_informational();
        let mut streamed = Self::about(&response.head(), head, forward);
        streamed.interim = interim;
        streamed.source = Source::Upstream(Rest::all_of(response));
        streamed
    }

    /// Another request's response, which is being stored, and is `age_s` old by now.
    pub(crate) fn following(started: &Started, age_s: u64, ttl_s: i64, forward: Forward) -> Self {
        Self {
            status: started.status,
            framing: BodyFraming::Length(started.length),
            content_length: Some(started.length),
            age_s: Some(age_s),
            ttl_s: Some(ttl_s),
            head: started.head.clone(),
            forward,
            interim: VecDeque::new(),
            source: Source::Stored(Reader::following(started.tail.clone())),
            announced: Some(started.length),
        }
    }

    fn about(response: &ResponseHead<'_>, head: Vec<u8>, forward: Forward) -> Self {
        let announced = match response.framing {
            BodyFraming::Length(length) => Some(length),
            _ => None,
        };
        Self {
            status: response.status,
            framing: response.framing,
            content_length: announced.or_else(|| decimal(&response.fields, FieldId::ContentLength)),
            age_s: decimal(&response.fields, FieldId::Age),
            ttl_s: None,
            head,
            forward,
            interim: VecDeque::new(),
            source: Source::Nothing,
            announced,
        }
    }

    /// Turns the response into the 304 of a client that has it already.
    fn into_not_modified(self) -> Self {
        let mut head = b"HTTP/1.1 304 Not Modified\r\n".to_vec();
        write_not_modified_fields(&self.head, &mut head);
        let framing = BodyFraming::None;
        Self { status: 304, framing, head, source: Source::Nothing, announced: None, ..self }
    }

    /// The next interim response that came before this one.
    pub(crate) fn next_informational(&mut self) -> Option<Interim> {
        self.interim.pop_front()
    }

    /// The next piece of the body; `None` at its end, by which time an object that is stored is in the cache. Whatever it
    /// comes from, it is as long as the client was told, or an error: another byte would be taken for the next response.
    pub(crate) async fn chunk(&mut self) -> Result<Option<&[u8]>, UpstreamError> {
        if let Source::Stored(reader) = &mut self.source
            && let Some(rest) = reader.arrive().await?
        {
            self.source = Source::Upstream(rest);
        }
        let piece = match &mut self.source {
            Source::Upstream(rest) => rest.chunk().await?,
            Source::Stored(reader) => reader.take(),
            Source::Nothing => None,
        };
        count_off(&mut self.announced, piece)?;
        Ok(piece)
    }

    /// Trailer fields, once the body has been read (RFC 9112 §7.1.2).
    pub(crate) fn trailers(&self) -> Box<dyn Iterator<Item = (&[u8], &[u8])> + '_> {
        match &self.source {
            Source::Upstream(rest) => rest.response.trailers(),
            Source::Stored(_) | Source::Nothing => Box::new(std::iter::empty()),
        }
    }

    /// What is left of the request's body: it goes out while the response comes in.
    pub(crate) fn take_upload(&mut self) -> Option<Upload> {
        match &mut self.source {
            Source::Upstream(rest) => rest.response.take_upload(),
            Source::Stored(_) | Source::Nothing => None,
        }
    }

    /// The upstream's response, if it does not go by way of the cache.
    pub(crate) fn into_response(self) -> Option<Box<Response>> {
        match self.source {
            Source::Upstream(rest) => Some(rest.response),
            Source::Stored(_) | Source::Nothing => None,
        }
    }
}

/// Takes a piece of content off what was announced of it, if anything was; with `None` nothing more comes.
fn count_off(announced: &mut Option<u64>, piece: Option<&[u8]>) -> Result<(), UpstreamError> {
    let Some(left) = announced else { return Ok(()) };
    match piece {
        Some(piece) => *left = left.checked_sub(piece.len() as u64).ok_or(UpstreamError::OtherLength)?,
        None if *left > 0 => return Err(UpstreamError::OtherLength),
        None => {}
    }
    Ok(())
}

/// The number that a field is.
pub(super) fn decimal(fields: &Fields<'_>, id: FieldId) -> Option<u64> {
    std::str::from_utf8(fields.get(id)?).ok()?.trim().parse().ok()
}

/// A response that was given to the cache.
pub(crate) enum Begun {
    /// It is there already.
    Stored {
        object: Object,
        /// It came out of a cache on the way, which says how old it is.
        has_age: bool,
        forward: Forward,
    },
    Streamed(Box<Streamed>),
}

/// Everything that decides how a response is stored.
pub(crate) struct Storing<'a> {
    pub core: &'a Rc<DataCore>,
    pub store: &'a Store,
    /// The URL's key.
    pub url_key: &'a [u8],
    pub request: &'a RequestHead<'a>,
    /// When the upstream was asked, by the core's clock.
    pub asked_ms: u64,
    /// [`Flights::epoch`] when the request was sent.
    pub epoch: Epoch,
    /// What the cache has, and the upstream was asked about.
    pub stale: Option<&'a Object>,
}

/// An object to be written.
struct Begin {
    writer: Writer,
    policy: Policy,
    /// It may answer further requests without asking the origin.
    is_fresh: bool,
    /// It may answer those that wait for it as it comes, whatever their fields.
    is_shared: bool,
}

/// Why a response is not stored, which decides what those do who wait for it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Unstored {
    /// The next answer for this URL will most likely not be stored either.
    ForGood,
    /// Something about this response, such as an error of the server's. Those who wait ask side by side: a server that
    /// fails does so for the next one too, and after waiting for each other in turn the last one would be told so very
    /// late.
    ByResponse,
    /// Something about the request. One client must not make all the others ask at once.
    ByRequest,
    /// That the request identifies its client. So may others, whose answers will most likely be for them alone too.
    ByClient,
}

impl Unstored {
    fn outcome(self) -> Outcome {
        match self {
            Self::ForGood | Self::ByResponse => Outcome::NotShared,
            Self::ByRequest => Outcome::ForLeaderAlone,
            Self::ByClient => Outcome::ForItsClient,
        }
    }
}

/// Whether the rules keep whatever answers such a request from being stored, unless a response to a request with
/// credentials allows it: who asks so can do nothing for others.
pub(crate) fn asks_for_itself(request: &RequestHead<'_>) -> bool {
    request.fields.has(FieldId::Authorization) || RequestDirectives::parse(&request.fields).no_store
}

/// Whether a stored response may answer a plain request without asking the origin.
pub(crate) fn is_fresh(object: &Object, now_s: u64) -> bool {
    let Some(Entry::Response(entry)) = Entry::decode(object.meta()) else { return false };
    matches!(entry.policy.reuse(&RequestDirectives::default(), now_s), Reuse::Fresh { .. })
}

impl Storing<'_> {
    /// When the upstream was asked, in seconds since 1970, if it is `now_s`. Told from the time that has passed: two
    /// readings of whole seconds may be a second apart after a millisecond, by which every age would be too much.
    pub(crate) fn request_time_s(&self, now_s: u64) -> u64 {
        now_s.saturating_sub((self.core.clock.elapsed_ms() - self.asked_ms) / 1000)
    }

    /// Starts to store `response` if the rules allow it. `head` is what goes to the client.
    pub(crate) async fn begin(
        &self,
        response: Box<Response>,
        head: Vec<u8>,
        mut forward: Forward,
        leader: Option<Leader>,
    ) -> Result<Begun, UpstreamError> {
        let Begin { writer, policy, is_fresh, is_shared } = match self.writer(&response, &head) {
            Ok(begun) => begun,
            Err(unstored) => {
                if let Some(leader) = leader {
                    if matches!(unstored, Unstored::ForGood | Unstored::ByClient) {
                        leader.remember_not_shared(self.core.clock.unix_s());
                    }
                    leader.finish(unstored.outcome());
                }
                // What was stored is not what there is now (RFC 9111 §4.3.3), if not for this client alone.
                if let Some(stale) = self.stale.filter(|_| unstored == Unstored::ForGood)
                    && !cache::identifies_client(self.request)
                {
                    self.store.remove(stale.key());
                }
                let not_modified = self.is_not_modified(&response.head());
                let streamed = Streamed::passing(response, head, forward);
                let streamed = if not_modified { streamed.into_not_modified() } else { streamed };
                return Ok(Begun::Streamed(Box::new(streamed)));
            }
        };
        forward.stored = true;
        let length = match response.head().framing {
            BodyFraming::Length(length) => Some(length),
            BodyFraming::None => Some(0),
            _ => None,
        };
        let mut streamed = Streamed::about(&response.head(), head, forward);
        let now_s = self.core.clock.unix_s();
        streamed.ttl_s = Some(policy.ttl_s(now_s));
        // As if all of it had come at once.
        let has_age = response.head().fields.has(FieldId::Age);
        streamed.age_s = has_age.then(|| policy.age_s(now_s));
        let not_modified = self.is_not_modified(&response.head());
        let started = |tail| {
            let (status, length) = (streamed.status, length.filter(|_| is_shared)?);
            Some(Started { status, head: streamed.head.clone(), policy, length, tail })
        };
        let fill = Fill { writer, length, leader, core: Rc::clone(self.core), epoch: self.epoch, is_fresh };
        // Boxed, so that a request whose response is not stored carries no room for it.
        match Box::pin(fill.pump(response, started)).await? {
            Pumped::Whole(object) => Ok(Begun::Stored { object, has_age, forward }),
            Pumped::Coming(_) if not_modified => Ok(Begun::Streamed(Box::new(streamed.into_not_modified()))),
            Pumped::Coming(reader) => {
                streamed.source = Source::Stored(reader);
                Ok(Begun::Streamed(Box::new(streamed)))
            }
        }
    }

    /// Whether the client has what the upstream has just sent.
    fn is_not_modified(&self, response: &ResponseHead<'_>) -> bool {
        let etag = response.fields.get(FieldId::Etag);
        let last_modified_s = response.fields.get(FieldId::LastModified).and_then(date::parse);
        let (method, fields) = (self.request.method, &self.request.fields);
        response.status == 200
            && evaluate_for_cache(method, fields, etag, last_modified_s) == Precondition::NotModified
    }

    fn writer(&self, response: &Response, head: &[u8]) -> Result<Begin, Unstored> {
        let (reviewed, is_by_coding) = (response.reviewed, response.is_by_coding);
        let response = &response.head();
        let now_s = self.core.clock.unix_s();
        let policy = match Policy::new(self.request, response, self.request_time_s(now_s), now_s) {
            Ok(policy) => policy,
            Err(reason) => {
                tracing::trace!(?reason, "response is not to be stored");
                return Err(match (reason, response.status) {
                    (NotStorable::Identified, 200..400 | 404 | 410) => Unstored::ByClient,
                    (reason, _) if reason.is_by_request() => Unstored::ByRequest,
                    // A head or a body that is too large or too slow, whatever the URL.
                    (NotStorable::Status, 400 | 408 | 413 | 431) => Unstored::ByRequest,
                    (_, 200..400 | 404 | 410) => Unstored::ForGood,
                    _ => Unstored::ByResponse,
                });
            }
        };
        if tag_bytes(response) > TAG_BYTES {
            tracing::warn!(limit_bytes = TAG_BYTES, "a response with too many cache tags is not stored");
            return Err(Unstored::ForGood);
        }
        let key = self.key_for(response, is_by_coding).ok_or(Unstored::ByResponse)?;
        if self.is_overtaken(&key, &policy, now_s) {
            return Err(Unstored::ByResponse);
        }
        let is_fresh = matches!(policy.reuse(&RequestDirectives::default(), now_s), Reuse::Fresh { .. });
        let is_shared = is_fresh && key == self.url_key;
        let meta = response_meta(response, policy, reviewed, is_by_coding);
        // The stored head is without Age, which each answer computes.
        let writer = match response.framing {
            // A known length lets the store find one place for all of it.
            BodyFraming::Length(length) => self.store.insert_sized(&key, &meta, head, length),
            _ => self.store.insert(&key, &meta, head),
        };
        match writer {
            Ok(writer) => Ok(Begin { writer, policy, is_fresh, is_shared }),
            Err(error) => {
                self.core.not_stored(&error);
                Err(match error {
                    InsertError::TooLarge { .. } => Unstored::ForGood,
                    _ => Unstored::ByResponse,
                })
            }
        }
    }

    /// Whether what is stored came while this response was waited for, and is more recent (RFC 9111 §4): then another
    /// request has overtaken this one, and time does not go back. Only who waits for long is overtaken.
    fn is_overtaken(&self, key: &[u8], policy: &Policy, now_s: u64) -> bool {
        let asked_s = self.request_time_s(now_s);
        let is_more_recent = |stored: &Object| match Entry::decode(stored.meta()) {
            Some(Entry::Response(entry)) => {
                entry.policy.received_s() >= asked_s && entry.policy.date_s() > policy.date_s()
            }
            _ => false,
        };
        asked_s < now_s && self.store.get(key).as_ref().is_some_and(is_more_recent)
    }

    /// The URL's key, or the variant's; makes or remakes the entry that names what selects a variant.
    pub(crate) fn key_for(&self, response: &ResponseHead<'_>, is_by_coding: bool) -> Option<Vec<u8>> {
        let mut key = self.url_key.to_vec();
        let mut names = Vec::new();
        if !vary::write_names(&response.fields, &mut names) {
            return Some(key);
        }
        if is_by_coding {
            names = name_by_coding(&names);
        }
        let known = self.store.get(&key).and_then(|object| variants_of(object.meta(), &names));
        let generation = match known {
            Some(generation) => generation,
            None => {
                let generation =
                    std::time::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_nanos() as u64);
                let mut meta = Vec::new();
                encode_variants(generation, &names, &mut meta);
                self.store.insert(&key, &meta, b"").ok()?.commit();
                generation
            }
        };
        append_variant(generation, &names, self.request.fields, self.core.own_cookie(), &mut key);
        Some(key)
    }
}

/// The generation of an entry whose variants are selected by exactly these fields.
fn variants_of(meta: &[u8], wanted: &[u8]) -> Option<u64> {
    match crate::cache::entries::Entry::decode(meta)? {
        crate::cache::entries::Entry::Variants { generation, names } if names == wanted => Some(generation),
        _ => None,
    }
}

fn tag_bytes(response: &ResponseHead<'_>) -> usize {
    TAG_FIELDS.iter().flat_map(|id| response.fields.get_all(*id)).map(|value| value.len() + 1).sum()
}

/// What is stored beside a response.
pub(crate) fn response_meta(
    response: &ResponseHead<'_>,
    policy: Policy,
    reviewed: Reviewed,
    is_by_coding: bool,
) -> Vec<u8> {
    let mut tags = Vec::new();
    for id in TAG_FIELDS {
        for value in response.fields.get_all(id) {
            tags.extend_from_slice(value);
            tags.push(b' ');
        }
    }
    let entry = ResponseEntry {
        status: response.status,
        is_file: false,
        is_by_coding,
        policy,
        reviewed,
        last_modified_s: response.fields.get(FieldId::LastModified).and_then(date::parse),
        etag: response.fields.get(FieldId::Etag),
        tags: &tags,
    };
    let mut meta = Vec::with_capacity(96 + tags.len());
    entry.encode(&mut meta);
    meta
}

/// The status line and the field lines that go to the client: hop-by-hop fields, framing and our own fields left out.
pub(crate) fn write_client_head(
    response: &ResponseHead<'_>,
    pseudonym: &str,
    date: &[u8; 29],
    out: &mut Vec<u8>,
) {
    write_status_line(response, out);
    write_response_fields(response, |id, _| is_ours(id), out);
    if !response.fields.has(FieldId::Date) {
        // RFC 9110 §6.6.1: a recipient with a clock adds what an origin without one left out.
        out.extend_from_slice(b"Date: ");
        out.extend_from_slice(date);
        out.extend_from_slice(b"\r\n");
    }
    let version = match response.version {
        Version::Http10 => "1.0",
        Version::Http11 => "1.1",
        Version::Http2 => "2",
        Version::Http3 => "3",
    };
    for part in ["Via: ", version, " ", pseudonym, "\r\n"] {
        out.extend_from_slice(part.as_bytes());
    }
}

/// An interim response as it goes on to the client (RFC 9110 §15.2).
pub(crate) fn write_informational(head: &ResponseHead<'_>, out: &mut Vec<u8>) {
    write_status_line(head, out);
    write_response_fields(head, |id, _| is_ours(id), out);
    out.extend_from_slice(b"\r\n");
}

pub(crate) fn write_status_line(response: &ResponseHead<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(b"HTTP/1.1 ");
    write_decimal(u64::from(response.status), out);
    out.push(b' ');
    if response.reason.is_empty() {
        out.extend_from_slice(status_reason(response.status).as_bytes());
    } else {
        out.extend_from_slice(response.reason);
    }
    out.extend_from_slice(b"\r\n");
}

/// Fields that each answer states anew.
pub(crate) fn is_ours(id: FieldId) -> bool {
    matches!(id, FieldId::ContentLength | FieldId::Age)
}

/// The field lines of a stored head, without its status line.
pub(crate) fn stored_fields_of(head: &[u8]) -> &[u8] {
    let start = head.iter().position(|byte| *byte == b'\n').map_or(head.len(), |end| end + 1);
    head.get(start..).unwrap_or(b"")
}

/// Removes a URL and, with it, all its variants (RFC 9111 §4.4); what is on its way for it will not be stored.
pub(crate) fn invalidate(store: &Store, flights: &Flights, url_key: &[u8]) {
    flights.new_epoch(Some(url_key));
    store.remove(url_key);
}

/// RFC 9110 §15.4.5: what a 200 would carry that the client needs, and no description of content that it has.
pub(crate) fn write_not_modified_fields(head: &[u8], out: &mut Vec<u8>) {
    const DESCRIBES_CONTENT: [&[u8]; 5] =
        [b"content-type", b"content-encoding", b"content-language", b"content-range", b"content-disposition"];
    write_fields_but(&DESCRIBES_CONTENT, head, out);
}

/// RFC 9110 §15.3.7: what a 200 would carry. That says nothing by a Content-Range of its own (§14.4), which would stand
/// beside ours.
pub(crate) fn write_fields_of_a_part(head: &[u8], out: &mut Vec<u8>) {
    write_fields_but(&[b"content-range"], head, out);
}

fn write_fields_but(left_out: &[&[u8]], head: &[u8], out: &mut Vec<u8>) {
    for line in stored_fields_of(head).split_inclusive(|byte| *byte == b'\n') {
        let name = line.split(|byte| *byte == b':').next().unwrap_or(b"");
        if !left_out.iter().any(|known| name.eq_ignore_ascii_case(known)) {
            out.extend_from_slice(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_304_leaves_out_what_describes_content() {
        let mut out = Vec::new();
        write_not_modified_fields(
            b"HTTP/1.1 200 OK\r\nETag: \"a\"\r\nContent-Type: text/css\r\nVary: Accept\r\n",
            &mut out,
        );
        assert_eq!(out, b"ETag: \"a\"\r\nVary: Accept\r\n");
    }

    #[test]
    fn content_is_as_long_as_it_was_announced_or_an_error() {
        /// Which of these pieces, and of the end behind them, go on to the client.
        fn go_on(mut announced: Option<u64>, pieces: &[&[u8]]) -> Vec<bool> {
            let pieces = pieces.iter().map(|piece| Some(*piece)).chain([None]);
            pieces.map(|piece| count_off(&mut announced, piece).is_ok()).collect()
        }
        assert_eq!(go_on(Some(3), &[b"ab", b"c"]), [true, true, true]);
        assert_eq!(go_on(Some(3), &[b"ab", b"", b"c", b""]), [true; 5]);
        assert_eq!(go_on(Some(3), &[b"ab", b"cd"])[..2], [true, false], "none of the piece that is too long");
        assert_eq!(go_on(Some(3), &[b"abc", b"d"])[..2], [true, false]);
        assert_eq!(go_on(Some(3), &[b"ab"]), [true, false], "too short");
        assert_eq!(go_on(Some(0), &[]), [true]);
        assert_eq!(go_on(None, &[b"ab", b"c"]), [true; 3]);
    }
}
