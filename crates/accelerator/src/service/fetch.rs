//! Answers that take an upstream: misses, validations, and what is never cached.

use std::cell::Cell;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use tidegate_core::{Reason, network_of};
use tidegate_http::cache::range;
use tidegate_http::cache::{self, Forwarded};
use tidegate_http::forward::{ForwardContext, hops_left, times_seen, write_upstream_request};
use tidegate_http::normalize::{Normalized, normalize};
use tidegate_http::{BodyFraming, FieldId, Method, RequestHead, ResponseHead};
use tidegate_store::{Object, Store};

use crate::data_core::DataCore;
use crate::icap::{self, AdaptedRequest, Review};
use crate::service::entries::write_url_key;
use crate::service::files;
use crate::service::fill::{self, Begun, Forward, Storing, Streamed};
use crate::service::flights::{Epoch, Join, Leader, Outcome};
use crate::service::follow::{Follower, Next};
use crate::service::lookup::{FOR_THE_ORIGIN, Found, Hit, count_hit, directives, find};
use crate::service::plan::{Destination, Plan};
use crate::service::seen::Seen;
use crate::service::validation::{Freshened, Validators, freshen};
use crate::settings::Balance;
use crate::upstream::{EmptyBody, OutgoingRequest, Pools, RequestBody, Response, UpstreamError};

/// How often a request may come by. More than once is not yet a loop: gateways in a row may share a pseudonym.
const MOST_ROUNDS: usize = 5;

/// Room beside a head for a body that comes with it; the buffer grows for a longer one.
const SHORT_BODY_BYTES: u64 = 4 * 1024;

/// The fields by which a client asks for something other than the whole; a fetch for the cache leaves them out.
const CLIENT_CONDITIONS: [FieldId; 7] = [
    FieldId::IfMatch,
    FieldId::IfNoneMatch,
    FieldId::IfModifiedSince,
    FieldId::IfUnmodifiedSince,
    FieldId::Range,
    FieldId::IfRange,
    FieldId::Expect,
];

/// What every request to an upstream has beside its own fields.
pub(super) const ADDED: [(&[u8], &[u8]); 1] =
    [(b"Surrogate-Capability", cache::SURROGATE_CAPABILITY.as_bytes())];

/// What answers a request.
pub(crate) enum Answer {
    /// A stored response.
    Stored(Hit),
    /// A response on its way from an upstream.
    Streamed(Box<Streamed>),
    /// A file that is too large for the cache.
    File(files::OpenFile),
    /// An error or a redirect made here; `fields` are further field lines.
    Local { status: u16, fields: Vec<u8> },
}

impl Answer {
    pub(crate) fn status(status: u16) -> Self {
        Self::Local { status, fields: Vec::new() }
    }

    /// The status that the client is told; of a file it is not known yet whether all of it is asked for.
    pub(crate) fn code(&self) -> u16 {
        match self {
            Self::Stored(hit) => hit.status,
            Self::Streamed(streamed) => streamed.status,
            Self::File(_) => 200,
            Self::Local { status, .. } => *status,
        }
    }

    /// Whether it is the answer to another request, for which this one has waited.
    pub(crate) fn is_collapsed(&self) -> bool {
        let forward = match self {
            Self::Stored(hit) => hit.forwarded,
            Self::Streamed(streamed) => Some(streamed.forward),
            Self::File(_) | Self::Local { .. } => None,
        };
        forward.is_some_and(|forward| forward.collapsed)
    }
}

/// A request and where it came from.
#[derive(Clone, Copy)]
pub(crate) struct Incoming<'a> {
    pub head: &'a RequestHead<'a>,
    pub normalized: &'a Normalized<'a>,
    /// The head's bytes, from which a background validation reads the request again.
    pub buffer: &'a [u8],
    /// Who is connected to us: the client or a proxy.
    pub peer: IpAddr,
    pub seen: Seen<'a>,
    /// The cache had nothing for the URL a moment ago.
    pub is_absent: bool,
}

/// Answers a request that the cache alone could not.
pub(crate) async fn answer<B: RequestBody>(core: &Rc<DataCore>, incoming: Incoming<'_>, body: B) -> Answer {
    if core.with_plan(|plan| plan.reviews_request(incoming.head.method_bytes, incoming.normalized)) {
        // Boxed, as below: what few requests need is not made room for in each.
        return Box::pin(review(core, incoming, body)).await;
    }
    answer_reviewed(core, incoming, body).await
}

/// Has an ICAP service look at a request, and answers what it makes of it.
async fn review<B: RequestBody>(core: &Rc<DataCore>, incoming: Incoming<'_>, body: B) -> Answer {
    let plan = core.plan();
    match icap::review_request(core, &incoming, body).await {
        Review::Unchanged(body) => answer_reviewed(core, incoming, body).await,
        Review::Refused(status) => Answer::status(status),
        Review::Answered(response) => {
            if response.head().status == 403 {
                core.note_refused(incoming.peer, &incoming.seen, Reason::Content);
            }
            answer_of_service(core, &plan, response)
        }
        Review::Adapted(adapted) => {
            let AdaptedRequest { bytes, parsed, body } = *adapted;
            let head = RequestHead { version: incoming.head.version, ..parsed.head(&bytes) };
            let mut scratch = Vec::new();
            let Ok(normalized) = normalize(&head, plan.personality, &mut scratch) else {
                return Answer::status(502);
            };
            let adapted = Incoming {
                head: &head,
                normalized: &normalized,
                buffer: &bytes,
                is_absent: false,
                ..incoming
            };
            let mut answer = match body {
                Some(body) => Box::pin(answer_reviewed(core, adapted, body)).await,
                None => Box::pin(answer_reviewed(core, adapted, EmptyBody)).await,
            };
            // A server that answers early gets no more of the body: what the client still sends is not what the service
            // has put in its place.
            if let Answer::Streamed(streamed) = &mut answer {
                drop(streamed.take_upload());
            }
            answer
        }
    }
}

/// A service has answered in the upstream's place.
fn answer_of_service(core: &DataCore, plan: &Plan, response: Box<Response>) -> Answer {
    let mut head = Vec::with_capacity(512);
    fill::write_client_head(&response.head(), &plan.pseudonym, &core.clock.date(), &mut head);
    let forward = Forward {
        reason: Forwarded::Bypass,
        upstream_status: 0,
        stored: false,
        collapsed: false,
        variant: 0,
    };
    Answer::Streamed(Box::new(Streamed::passing(response, head, forward)))
}

/// Answers a request that may go on.
async fn answer_reviewed<B: RequestBody>(core: &Rc<DataCore>, incoming: Incoming<'_>, body: B) -> Answer {
    let (plan, pools) = core.plan_and_pools();
    match plan.route(incoming.normalized) {
        None => Answer::status(404),
        Some(Destination::Root(index)) => {
            Box::pin(files::answer(core, &plan, index, incoming.head, incoming.normalized)).await
        }
        Some(Destination::Upstream(group)) => {
            let fetch = Fetch { core, plan: &plan, pools: &pools, group, incoming, variant: Cell::new(0) };
            fetch.answer(body).await
        }
    }
}

/// What the cache does not answer.
pub(super) struct Miss {
    /// The URL's, from before the request is sent.
    pub epoch: Epoch,
    /// What it has for the request and may not use as it is.
    pub stale: Option<Object>,
    pub leader: Option<Leader>,
    pub reason: Forwarded,
}

/// One request to one upstream group.
pub(super) struct Fetch<'a> {
    pub core: &'a Rc<DataCore>,
    pub plan: &'a Arc<Plan>,
    /// Those of the plan, to whose groups `group` belongs.
    pub pools: &'a Rc<Pools>,
    pub group: usize,
    pub incoming: Incoming<'a>,
    /// A hash of the variant's key that the cache was asked for in vain.
    pub variant: Cell<u64>,
}

impl Fetch<'_> {
    async fn answer<B: RequestBody>(&self, body: B) -> Answer {
        let head = self.incoming.head;
        let mut url_key = Vec::new();
        write_url_key(self.incoming.normalized, &self.incoming.seen, &mut url_key);
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

    /// RFC 9110 §7.6.2: with no hops left, OPTIONS is answered here. TRACE is refused at any distance, because a reflection
    /// shows what proxies have added, credentials among it.
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

    /// `key` is the URL's, and becomes that of the variant that is looked for.
    async fn cached_or_fetched<B: RequestBody>(&self, store: &Store, mut key: Vec<u8>, body: B) -> Answer {
        let head = self.incoming.head;
        let url_bytes = key.len();
        let mut follower = Follower::default();
        let mut is_absent = self.incoming.is_absent;
        loop {
            key.truncate(url_bytes);
            let found = match std::mem::take(&mut is_absent) {
                // Whoever leads looks again.
                true => Found::Nothing(Forwarded::UriMiss),
                false => find(self.core, store, head, &mut key),
            };
            let (stale, reason) = match found {
                Found::Usable { hit, refresh } => {
                    // A validation asks for the whole, as GET does; HEAD or a condition would store something else.
                    if refresh && self.may_fill() {
                        self.refresh_in_background(&key[..url_bytes], hit.object.clone());
                    }
                    return self.stored(Hit { forwarded: follower.forward, ..hit });
                }
                Found::Unusable { object, reason } => (Some(object), reason),
                Found::Nothing(reason) => (None, reason),
            };
            if reason == Forwarded::VaryMiss {
                self.variant.set(xxhash_rust::xxh3::xxh3_64(&key));
            }
            let asked = directives(self.core, &head.fields);
            if asked.only_if_cached {
                return Answer::status(504);
            }
            if !self.may_fill() {
                let sent = Box::pin(self.send_as_is(body)).await;
                // Conditions that are the origin's to judge stay unanswered.
                let stale = stale.filter(|_| !head.fields.has_any(FOR_THE_ORIGIN));
                let stored = self.stand_in_for(&sent, stale.as_ref(), reason);
                return stored.map_or_else(|| self.passing(sent, reason), |(_, answer)| answer);
            }
            let joined = self.core.flights.epoch(&key[..url_bytes]);
            let identifies = cache::identifies_client(head);
            let is_not_shared = self.core.flights.is_not_shared(&key, identifies, self.core.clock.unix_s());
            if is_not_shared && stale.is_none() && self.is_conditional() {
                // Who is no cache for a response leaves its conditions to the origin (RFC 9110 §13.2.1).
                return self.passing(Box::pin(self.send_as_is(body)).await, reason);
            }
            // Who wants the origin's own word can do nothing with another request's answer.
            if is_not_shared || asked.no_cache || asked.max_age_s == Some(0) {
                let miss = Miss { epoch: joined, stale, leader: None, reason };
                return self.fetch(store, &key[..url_bytes], miss, body).await;
            }
            let mut epoch = joined;
            let leader = match self.core.flights.join(&key, joined, identifies) {
                Join::Lead(leader) => {
                    // Another request may have ended between the look and the join.
                    key.truncate(url_bytes);
                    if let Found::Usable { hit, .. } = find(self.core, store, head, &mut key) {
                        leader.finish(Outcome::Stored);
                        return self.stored(hit);
                    }
                    Some(leader)
                }
                Join::Follow(flight) => {
                    follower.forward = Some(Forward { collapsed: true, ..self.forward(reason, 0) });
                    let next = Box::pin(self.follow(&flight, &mut follower)).await;
                    // What was removed while this request waited is no reason not to store its answer.
                    epoch = self.core.flights.epoch(&key[..url_bytes]);
                    match next {
                        Next::Look => continue,
                        Next::Overtake => match self.core.flights.overtake(&flight, identifies) {
                            Some(leader) => Some(leader),
                            None => continue,
                        },
                        Next::StandIn { reached } => {
                            let forward = Forward { collapsed: true, ..self.forward(reason, 0) };
                            if let Some(answer) = self.stand_in(stale.as_ref(), reached, forward) {
                                return answer;
                            }
                            None
                        }
                        Next::Read { started, age_s } => {
                            let forward = self.forward(reason, started.status);
                            let forward = Forward { collapsed: true, ..forward };
                            let ttl_s = started.policy.ttl_s(self.core.clock.unix_s());
                            let streamed = Streamed::following(started, age_s, ttl_s, forward);
                            return Answer::Streamed(Box::new(streamed));
                        }
                        Next::Fail(status) => {
                            let stored = self.stand_in(stale.as_ref(), false, self.forward(reason, 0));
                            return stored.unwrap_or_else(|| Answer::status(status));
                        }
                        Next::Ask => None,
                    }
                }
            };
            return self.fetch(store, &key[..url_bytes], Miss { epoch, stale, leader, reason }, body).await;
        }
    }

    /// Whether the upstream's answer to this request, asked for as a whole, may be stored.
    fn may_fill(&self) -> bool {
        let fields = &self.incoming.head.fields;
        let asks_for_part = [FieldId::Range, FieldId::IfMatch, FieldId::IfUnmodifiedSince];
        self.incoming.head.method == Method::Get && !asks_for_part.iter().any(|id| fields.has(*id))
    }

    /// Whether the client has a response, and asks whether that is current.
    fn is_conditional(&self) -> bool {
        let fields = &self.incoming.head.fields;
        fields.has(FieldId::IfNoneMatch) || fields.has(FieldId::IfModifiedSince)
    }

    pub(super) fn stored(&self, hit: Hit) -> Answer {
        count_hit(self.core, &hit);
        Answer::Stored(hit)
    }

    /// Asks the upstream for the whole response, or whether the stored one still holds, and stores what comes.
    pub(super) async fn fetch<B: RequestBody>(
        &self,
        store: &Store,
        url_key: &[u8],
        miss: Miss,
        mut body: B,
    ) -> Answer {
        let Miss { mut epoch, stale, leader, reason } = miss;
        self.core.metrics.cache_misses_total.add(1);
        let asked_ms = self.core.clock.elapsed_ms();
        let validators = stale.as_ref().map(Validators::of);
        let fields = validators.as_ref().map(Validators::fields);
        let added = fields.as_deref().unwrap_or(&ADDED);
        let mut sent = self.send(&CLIENT_CONDITIONS, added, BodyFraming::None, &mut body).await;
        if let (Ok(response), Some(stale)) = (&sent, &stale)
            && response.head().status == 304
        {
            let storing = self.storing(store, url_key, asked_ms, epoch, None);
            if let Some(freshened) = freshen(&storing, stale, &response.head()) {
                let Freshened { object, is_stored, own_head, has_age } = freshened;
                self.core.metrics.cache_revalidated_total.add(1);
                match leader {
                    Some(leader) if !is_stored => leader.finish(Outcome::ForLeaderAlone),
                    leader => self.core.landed(leader, fill::is_fresh(&object, self.core.clock.unix_s())),
                }
                let forward = Forward { stored: is_stored, ..self.forward(reason, 304) };
                return self.fetched(object, own_head, has_age, forward);
            }
            // It is about another response than the stored one, which may not be used (RFC 9111 §4.3.3).
            epoch = self.core.flights.epoch(url_key);
            sent = Box::pin(self.send(&CLIENT_CONDITIONS, &ADDED, BodyFraming::None, &mut body)).await;
        }
        if let Some((reached, answer)) = self.stand_in_for(&sent, stale.as_ref(), reason) {
            if let Some(leader) = leader {
                leader.finish(match sent {
                    Err(error @ UpstreamError::ClientsShare) => self.outcome(&error, error.status()),
                    _ => Outcome::StoodIn { reached },
                });
            }
            return answer;
        }
        let response = match (sent, &stale) {
            (Ok(response), _) if response.head().status == 304 => {
                return self.failed(UpstreamError::UnaskedNotModified);
            }
            (Ok(response), _) => response,
            (Err(error), stale) => {
                let status = match stale {
                    Some(stale) if error.is_disconnection() && self.must_fail_disconnected(stale) => 504,
                    _ => error.status(),
                };
                if let Some(leader) = leader.filter(|_| !error.is_clients_fault()) {
                    leader.finish(self.outcome(&error, status));
                }
                return self.failed_as(status, error);
            }
        };
        let forward = self.forward(reason, response.head().status);
        let head = self.client_head(&response);
        let storing = self.storing(store, url_key, asked_ms, epoch, stale.as_ref());
        match storing.begin(response, head, forward, leader).await {
            Ok(Begun::Stored { object, has_age, forward }) => self.fetched(object, None, has_age, forward),
            Ok(Begun::Streamed(streamed)) => Answer::Streamed(streamed),
            Err(error) => {
                let stored = self.stand_in(stale.as_ref(), false, forward);
                stored.unwrap_or_else(|| self.failed(error))
            }
        }
    }

    /// What a failure of which the leader was told with `status` says to the others.
    fn outcome(&self, error: &UpstreamError, status: u16) -> Outcome {
        match error.is_servers_state() {
            true => Outcome::Unreachable(status),
            false => Outcome::Failed { status, client: network_of(self.incoming.seen.client) },
        }
    }

    fn storing<'s>(
        &'s self,
        store: &'s Store,
        url_key: &'s [u8],
        asked_ms: u64,
        epoch: Epoch,
        stale: Option<&'s Object>,
    ) -> Storing<'s> {
        Storing { core: self.core, store, url_key, request: self.incoming.head, asked_ms, epoch, stale }
    }

    /// A response that the upstream has just sent or validated. It is as old as caches on the way say: what comes from the
    /// origin itself has no age (RFC 9111 §5.1).
    fn fetched(
        &self,
        object: Object,
        own_head: Option<Box<[u8]>>,
        has_age: bool,
        forward: Forward,
    ) -> Answer {
        match self.hit_of(object, false, forward) {
            Answer::Stored(hit) => {
                let age_s = hit.age_s.filter(|_| has_age);
                Answer::Stored(Hit { age_s, own_head, ..hit })
            }
            answer => answer,
        }
    }

    /// Forwards the request as it is.
    async fn send_as_is<B: RequestBody>(&self, body: B) -> Result<Box<Response>, UpstreamError> {
        self.send(&[FieldId::Expect], &ADDED, self.incoming.head.framing, body).await
    }

    /// Nothing is stored.
    fn passing(&self, sent: Result<Box<Response>, UpstreamError>, reason: Forwarded) -> Answer {
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
    pub(super) fn forward(&self, reason: Forwarded, upstream_status: u16) -> Forward {
        let variant = self.variant.get();
        Forward { reason, upstream_status, stored: false, collapsed: false, variant }
    }

    fn client_head(&self, response: &Response) -> Vec<u8> {
        let body_bytes = match response.head().framing {
            BodyFraming::Length(length) => length.min(SHORT_BODY_BYTES) as usize,
            _ => 0,
        };
        let mut head = Vec::with_capacity(512 + body_bytes);
        fill::write_client_head(&response.head(), &self.plan.pseudonym, &self.core.clock.date(), &mut head);
        head
    }

    fn failed(&self, error: UpstreamError) -> Answer {
        self.failed_as(error.status(), error)
    }

    fn failed_as(&self, status: u16, error: UpstreamError) -> Answer {
        if !error.is_clients_fault() {
            self.core.metrics.upstream_errors_total.add(1);
            if self.core.quiet.upstream.may_log(self.core.clock.elapsed_ms()) {
                let group = self.plan.groups().get(self.group).map_or("", |group| &group.settings.name);
                let target = String::from_utf8_lossy(self.incoming.head.target);
                tracing::warn!(%error, upstream = group, %target, "no answer from the upstream");
            }
        }
        Answer::status(status)
    }

    async fn send<B: RequestBody>(
        &self,
        removed: &[FieldId],
        added: &[(&[u8], &[u8])],
        framing: BodyFraming,
        body: B,
    ) -> Result<Box<Response>, UpstreamError> {
        let head = self.incoming.head;
        let context = ForwardContext {
            client: self.incoming.peer,
            scheme: if self.incoming.seen.is_encrypted { "https" } else { "http" },
            via_pseudonym: &self.plan.pseudonym,
            trusted_client: self.plan.is_trusted(self.incoming.peer),
            keep_upgrade: head.upgrade,
            framing,
            removed,
            added,
            own_cookie: self.core.own_cookie(),
        };
        let mut bytes = Vec::with_capacity(1024);
        write_upstream_request(head, self.incoming.normalized, &context, &mut bytes);
        let request = OutgoingRequest {
            head: &bytes,
            method: head.method,
            client: Some(self.incoming.seen.client),
            class: self.plan.class_of(head, self.incoming.normalized),
            framing,
            hash: self.placing_hash(),
            upgrade: head.upgrade.then_some(head.fields),
        };
        let response = self.pools.send(self.group, request, body).await?;
        if self.plan.icap.is_empty() {
            return Ok(response);
        }
        Box::pin(icap::review_response(self.core, &self.incoming, response)).await
    }

    /// What decides which server of the group answers, where that is decided so.
    fn placing_hash(&self) -> u64 {
        let normalized = self.incoming.normalized;
        match self.plan.groups().get(self.group).map(|group| group.settings.balance) {
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
