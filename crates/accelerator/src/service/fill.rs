//! A response on its way from an upstream to a client, and into the cache as it passes.

use std::rc::Rc;

use tidegate_http::cache::{Forwarded, Handling, Policy, vary};
use tidegate_http::date;
use tidegate_http::forward::write_response_fields;
use tidegate_http::{BodyFraming, FieldId, Fields, RequestHead, ResponseHead, status_reason, write_decimal};
use tidegate_store::{InsertError, Object, Store, Writer};

use crate::data_core::DataCore;
use crate::service::entries::{KEY_SEPARATOR, ResponseEntry, append_variant, encode_variants};
use crate::service::flights::{Leader, Outcome};
use crate::upstream::{Response, UpstreamError};

/// Tags beyond this many bytes are not kept, and the response is then purged by its URL only.
const TAG_BYTES: usize = 1024;

/// A response that streams from an upstream.
pub(crate) struct Streamed {
    pub response: Response,
    /// Status line and field lines for the client, without framing and the empty line.
    pub head: Vec<u8>,
    pub forward: Forward,
    /// On the heap: it is large, and this value is moved about.
    fill: Option<Box<Fill>>,
}

/// Why a request went to the upstream and what came of it, as `Cache-Status` and the log tell it (RFC 9211 §2).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Forward {
    pub reason: Forwarded,
    pub upstream_status: u16,
    pub stored: bool,
    pub collapsed: bool,
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

/// An object that is being written.
struct Fill {
    writer: Writer,
    /// Bytes of the body to come, if the response says so.
    left: Option<u64>,
    leader: Option<Leader>,
    core: Rc<DataCore>,
}

impl Streamed {
    /// A response that passes through without being stored.
    pub(crate) fn passing(response: Response, head: Vec<u8>, forward: Forward) -> Self {
        Self { response, head, forward, fill: None }
    }

    /// The next piece of the body; `None` at its end, by which time the object is in the cache.
    pub(crate) async fn chunk(&mut self) -> Result<Option<&[u8]>, UpstreamError> {
        match self.response.chunk().await {
            Ok(Some(piece)) => {
                if let Some(fill) = &mut self.fill {
                    match fill.write(piece) {
                        Ok(false) => {}
                        Ok(true) => {
                            if let Some(fill) = self.fill.take() {
                                fill.commit();
                            }
                        }
                        Err(error) => {
                            tracing::debug!(%error, "response not stored");
                            if let Some(fill) = self.fill.take() {
                                fill.give_up();
                            }
                        }
                    }
                }
                Ok(Some(piece))
            }
            Ok(None) => {
                if let Some(fill) = self.fill.take() {
                    fill.commit();
                }
                Ok(None)
            }
            Err(error) => {
                if self.fill.take().is_some_and(|fill| fill.leader.is_some()) {
                    tracing::debug!(%error, "response ended early and is not stored");
                }
                Err(error)
            }
        }
    }

    /// Whether the response is on its way into the cache.
    pub(crate) fn is_stored(&self) -> bool {
        self.fill.is_some()
    }

    /// Reads the whole response into the cache; `None` when it did not get there.
    pub(crate) async fn into_object(mut self) -> Option<Object> {
        while let Ok(piece) = self.response.chunk().await {
            match (piece, &mut self.fill) {
                (Some(piece), Some(fill)) => fill.writer.write(piece).ok()?,
                (None, Some(_)) => return self.fill.take().map(|fill| fill.commit()),
                (_, None) => return None,
            }
        }
        None
    }
}

impl Fill {
    /// Takes a piece of the body; `true` when it was the last one. It is to be committed then, not at the response's
    /// end: a client that has read the whole response finds it in the cache with its next request.
    fn write(&mut self, piece: &[u8]) -> Result<bool, InsertError> {
        self.writer.write(piece)?;
        self.left = self.left.map(|left| left.saturating_sub(piece.len() as u64));
        Ok(self.left == Some(0))
    }

    fn commit(self) -> Object {
        let object = self.writer.commit();
        self.core.metrics.cache_stored_total.add(1);
        if let Some(leader) = self.leader {
            leader.finish(Outcome::Stored);
        }
        object
    }

    /// There is no room: the others must ask for themselves.
    fn give_up(self) {
        self.core.metrics.cache_store_failures_total.add(1);
        if let Some(leader) = self.leader {
            leader.finish(Outcome::NotShared);
        }
    }
}

/// Everything that decides how a response is stored.
pub(crate) struct Storing<'a> {
    pub core: &'a Rc<DataCore>,
    pub store: &'a Store,
    /// The URL's key.
    pub url_key: &'a [u8],
    pub request: &'a RequestHead<'a>,
    pub request_time_s: u64,
}

impl Storing<'_> {
    /// Starts to store `response` if the rules allow it; gives the leader back to be told otherwise.
    pub(crate) fn begin(
        &self,
        response: Response,
        head: Vec<u8>,
        mut forward: Forward,
        leader: Option<Leader>,
    ) -> Streamed {
        let writer = self.writer(&response.head(), &head);
        let Some(writer) = writer else {
            if let Some(leader) = leader {
                self.core.flights.remember_not_shared(leader.key(), self.core.clock.unix_s());
                leader.finish(Outcome::NotShared);
            }
            return Streamed::passing(response, head, forward);
        };
        forward.stored = true;
        let left = match response.head().framing {
            BodyFraming::Length(length) => Some(length),
            _ => None,
        };
        let fill = Fill { writer, left, leader, core: Rc::clone(self.core) };
        Streamed { response, head, forward, fill: Some(Box::new(fill)) }
    }

    fn writer(&self, response: &ResponseHead<'_>, head: &[u8]) -> Option<Writer> {
        let now_s = self.core.clock.unix_s();
        let policy = match Policy::new(self.request, response, self.request_time_s, now_s) {
            Ok(policy) => policy,
            Err(reason) => {
                tracing::trace!(?reason, "response is not to be stored");
                return None;
            }
        };
        let key = self.key_for(response)?;
        let meta = response_meta(response, policy);
        // The stored head is without Age, which each answer computes.
        let writer = match response.framing {
            // A known length lets the store find one place for all of it.
            BodyFraming::Length(length) => self.store.insert_sized(&key, &meta, head, length),
            _ => self.store.insert(&key, &meta, head),
        };
        match writer {
            Ok(writer) => Some(writer),
            Err(error) => {
                tracing::debug!(%error, "response not stored");
                self.core.metrics.cache_store_failures_total.add(1);
                None
            }
        }
    }

    /// The URL's key, or the variant's; makes or remakes the entry that names what selects a variant.
    fn key_for(&self, response: &ResponseHead<'_>) -> Option<Vec<u8>> {
        let mut key = self.url_key.to_vec();
        let mut names = Vec::new();
        if !vary::write_names(&response.fields, &mut names) {
            return Some(key);
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
        append_variant(generation, &names, self.request.fields, &mut key);
        Some(key)
    }
}

/// The generation of an entry whose variants are selected by exactly these fields.
fn variants_of(meta: &[u8], wanted: &[u8]) -> Option<u64> {
    match crate::service::entries::Entry::decode(meta)? {
        crate::service::entries::Entry::Variants { generation, names } if names == wanted => Some(generation),
        _ => None,
    }
}

/// What is stored beside a response.
pub(crate) fn response_meta(response: &ResponseHead<'_>, policy: Policy) -> Vec<u8> {
    let mut tags = Vec::new();
    for id in [FieldId::CacheTag, FieldId::SurrogateKey] {
        for value in response.fields.get_all(id) {
            if tags.len() + value.len() < TAG_BYTES {
                tags.extend_from_slice(value);
                tags.push(b' ');
            }
        }
    }
    let entry = ResponseEntry {
        status: response.status,
        is_file: false,
        policy,
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
    let version = if response.version == tidegate_http::Version::Http10 { "1.0" } else { "1.1" };
    for part in ["Via: ", version, " ", pseudonym, "\r\n"] {
        out.extend_from_slice(part.as_bytes());
    }
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

/// Merges what a 304 says into a stored response (RFC 9111 §3.2): its new head's field lines.
pub(crate) fn stored_fields_of(head: &[u8]) -> &[u8] {
    let start = head.iter().position(|byte| *byte == b'\n').map_or(head.len(), |end| end + 1);
    head.get(start..).unwrap_or(b"")
}

/// Removes a URL and, with it, all its variants (RFC 9111 §4.4).
pub(crate) fn invalidate(store: &Store, url_key: &[u8]) {
    let key = url_key.split(|byte| *byte == KEY_SEPARATOR).next().unwrap_or(url_key);
    store.remove(key);
}

/// The age that an upstream's response brings along, for a response that passes through.
pub(crate) fn upstream_age(fields: &Fields<'_>) -> Option<u64> {
    std::str::from_utf8(fields.get(FieldId::Age)?).ok()?.trim().parse().ok()
}
