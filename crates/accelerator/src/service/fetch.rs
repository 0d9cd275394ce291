//! One request to one upstream group: past the cache, or for it.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use tidegate_http::cache::{self, Forwarded, range};
use tidegate_http::forward::{ForwardContext, hops_left, times_seen, write_upstream_request};
use tidegate_http::normalize::Normalized;
use tidegate_http::{BodyFraming, FieldId, Method, ResponseHead, RuledResponse};
use tidegate_store::Store;

use crate::cache::entries::write_url_key;
use crate::cache::fill::{self, Forward, Streamed};
use crate::compression;
use crate::data_core::DataCore;
use crate::icap;
use crate::service::answer::{Answer, Incoming};
use crate::service::plan::Plan;
use crate::service::routes::Changed;
use crate::settings::Balance;
use crate::upstream::{Group, OutgoingRequest, Pools, RequestBody, Response, UpstreamError};

/// How often a request may come by. More than once is not yet a loop: gateways in a row may share a pseudonym.
const MOST_ROUNDS: usize = 5;

/// Room beside a head for a body that comes with it; the buffer grows for a longer one.
const SHORT_BODY_BYTES: u64 = 4 * 1024;

/// What every request to an upstream has beside its own fields.
pub(crate) const ADDED: [(&[u8], &[u8]); 1] =
    [(b"Surrogate-Capability", cache::SURROGATE_CAPABILITY.as_bytes())];

/// One request to one upstream group.
pub(crate) struct Fetch<'a> {
    pub core: &'a Rc<DataCore>,
    pub plan: &'a Arc<Plan>,
    /// Those of the plan, to whose groups `to` belongs.
    pub pools: &'a Rc<Pools>,
    pub to: Changed,
    pub incoming: Incoming<'a>,
    /// A hash of the variant's key that the cache was asked for in vain.
    pub variant: Cell<u64>,
}

impl Fetch<'_> {
    pub(super) async fn answer<B: RequestBody>(&self, body: B) -> Answer {
        let head = self.incoming.head;
        let mut url_key = Vec::new();
        write_url_key(self.incoming.normalized, &self.incoming.info, &mut url_key);
        let cacheable = matches!(head.method, Method::Get | Method::Head)
            && matches!(head.framing, BodyFraming::None | BodyFraming::Length(0))
            && !head.upgrade;
        if let Some(answer) = self.last_hop() {
            return answer;
        }
        if times_seen(&head.fields, &self.plan.pseudonym) >= MOST_ROUNDS {
            return Answer::status(508);
        }
        // Many servers still do for each range what it asks for, however often.
        if head.method == Method::Get && head.fields.get(FieldId::Range).is_some_and(range::is_excessive) {
            return Answer::status(416);
        }
        match &self.core.store {
            Some(store) if cacheable => self.cached_or_fetched(store, url_key, body).await,
            store => {
                self.core.metrics.cache_passed_total.add(1);
                let sent = self.send_as_is(body).await;
                if let (Some(store), Ok(response)) = (store, &sent) {
                    self.invalidate(store, &url_key, &response.head());
                }
                // It is not for the method's sake that a GET with a body or for another protocol is passed on.
                let is_method = !matches!(head.method, Method::Get | Method::Head);
                self.passing(sent, if is_method { Forwarded::Method } else { Forwarded::Bypass })
            }
        }
    }

    /// RFC 9110 §7.6.2: with no hops left, OPTIONS is answered here. TRACE is refused at any distance, because a
    /// reflection shows what proxies have added, credentials among it.
    fn last_hop(&self) -> Option<Answer> {
        let head = self.incoming.head;
        let no_hops_left = hops_left(&head.fields) == Some(0);
        let status = match head.method {
            Method::Options if no_hops_left => 200,
            Method::Trace => 405,
            _ => return None,
        };
        let fields = b"Allow: GET, HEAD, OPTIONS, POST, PUT, PATCH, DELETE\r\n".to_vec();
        Some(Answer::Local { status, fields })
    }

    /// RFC 9111 §4.4: what an unsafe request has changed must not be served as it was.
    fn invalidate(&self, store: &Store, url_key: &[u8], response: &ResponseHead<'_>) {
        let (head, normalized) = (self.incoming.head, self.incoming.normalized);
        cache::invalidation::targets(head, normalized, response, self.plan.personality, |key| {
            let flights = &self.core.flights;
            match key {
                None => fill::invalidate(store, flights, url_key),
                Some(url) => {
                    // The same resource, whichever way clients came to it.
                    let rest = url.strip_prefix(b"http://").unwrap_or(url);
                    for scheme in [&b"http://"[..], b"https://"] {
                        fill::invalidate(store, flights, &[scheme, rest].concat());
                    }
                }
            }
        });
    }

    /// Forwards the request as it is.
    pub(crate) async fn send_as_is<B: RequestBody>(&self, body: B) -> Result<Box<Response>, UpstreamError> {
        self.send(&[FieldId::Expect], &ADDED, self.incoming.head.framing, (None, body)).await
    }

    /// Nothing is stored.
    pub(crate) fn passing(&self, sent: Result<Box<Response>, UpstreamError>, reason: Forwarded) -> Answer {
        match sent {
            Ok(response) => {
                let forward = self.forward(reason, response.head().status);
                let head = self.client_head(&response);
                Answer::Streamed(Box::new(Streamed::passing(response, head, forward)))
            }
            Err(error) => self.failed(error),
        }
    }

    /// `upstream_status` is 0 when no response came.
    pub(crate) fn forward(&self, reason: Forwarded, upstream_status: u16) -> Forward {
        let variant = self.variant.get();
        Forward { reason, upstream_status, stored: false, collapsed: false, variant }
    }

    pub(crate) fn client_head(&self, response: &Response) -> Vec<u8> {
        let body_bytes = match response.head().framing {
            BodyFraming::Length(length) => length.min(SHORT_BODY_BYTES) as usize,
            _ => 0,
        };
        let mut head = Vec::with_capacity(512 + body_bytes);
        fill::write_client_head(&response.head(), &self.plan.pseudonym, &self.core.clock.date(), &mut head);
        head
    }

    pub(crate) fn failed(&self, error: UpstreamError) -> Answer {
        self.failed_as(error.status(), error)
    }

    pub(crate) fn failed_as(&self, status: u16, error: UpstreamError) -> Answer {
        if !error.is_clients_fault() {
            self.core.metrics.upstream_errors_total.add(1);
            if self.core.log_limits.upstream.may_log(self.core.clock.elapsed_ms()) {
                let group = self.plan.groups().get(self.to.index).map_or("", |group| &group.settings.name);
                let target = String::from_utf8_lossy(self.incoming.head.target);
                tracing::warn!(%error, upstream = group, %target, "no answer from the upstream");
            }
        }
        Answer::status(status)
    }

    /// `validated` is the status of the stored response that a 304 is about.
    pub(crate) async fn send<B: RequestBody>(
        &self,
        removed: &[FieldId],
        added: &[(&[u8], &[u8])],
        framing: BodyFraming,
        (validated, body): (Option<u16>, B),
    ) -> Result<Box<Response>, UpstreamError> {
        let head = self.incoming.head;
        let changes = self.plan.routes.changes(self.to.changes);
        let default_host = match self.incoming.normalized.authority {
            b"" => self.plan.groups().get(self.to.index).map(Group::host).unwrap_or_default(),
            _ => String::new(),
        };
        let context = ForwardContext {
            client: self.incoming.peer,
            default_host: default_host.as_bytes(),
            scheme: if self.incoming.info.is_encrypted { "https" } else { "http" },
            via_pseudonym: &self.plan.pseudonym,
            trusted_client: self.plan.is_trusted(self.incoming.peer),
            keep_upgrade: head.upgrade,
            framing,
            removed,
            added,
            own_cookie: self.core.own_cookie(),
            rules: &changes.requests,
        };
        let path = changes.rewritten(self.incoming.normalized.path);
        let normalized = Normalized { path: &path, ..*self.incoming.normalized };
        let mut bytes = Vec::with_capacity(1024);
        write_upstream_request(head, &normalized, &context, &mut bytes);
        let request = OutgoingRequest {
            head: &bytes,
            method: head.method,
            client: Some(self.incoming.info.client),
            class: self.plan.class_of(head, self.incoming.normalized),
            framing,
            hash: self.placing_hash(),
            upgrade: head.upgrade.then_some(head.fields),
            // A rule for fields holds for what an application may take for one of them.
            passes_trailers: changes.requests.is_empty(),
        };
        let mut response = self.pools.send(self.to.index, request, body).await?;
        if !changes.responses.fields.is_empty() {
            let of = RuledResponse { validated, is_for_one_client: cache::identifies_client(head) };
            response.change_fields(&changes.responses.fields, head.method, of)?;
        }
        if !self.plan.icap.is_empty() {
            response = Box::pin(icap::review_response(self.core, &self.incoming, response)).await?;
        }
        let Some(compression) = &self.plan.compression else { return Ok(response) };
        if response.head().status == 304 {
            // Those of the cache are about what it has.
            if !removed.contains(&FieldId::IfNoneMatch) {
                compression::restate_for_client(&mut response, &head.fields);
            }
            return Ok(response);
        }
        Ok(compression::apply(self.core, compression, head, response))
    }

    /// What decides which server of the group answers, where that is decided so.
    fn placing_hash(&self) -> u64 {
        let normalized = self.incoming.normalized;
        match self.plan.groups().get(self.to.index).map(|group| group.settings.balance) {
            Some(Balance::HashUrl) => url_hash(normalized),
            Some(Balance::HashHost) => xxhash_rust::xxh3::xxh3_64(normalized.authority),
            _ => 0,
        }
    }
}

/// By which a server of a group is chosen for a URL: its path and its query, in their normal form.
fn url_hash(normalized: &Normalized<'_>) -> u64 {
    let path = xxhash_rust::xxh3::xxh3_64(normalized.path);
    normalized.query.map_or(path, |query| xxhash_rust::xxh3::xxh3_64_with_seed(query, path))
}
