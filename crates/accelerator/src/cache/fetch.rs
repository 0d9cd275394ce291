//! Requests that may be answered from the cache: what it has is validated, what it lacks is fetched once for all who
//! ask, and stored.

use tidegate_core::network_of;
use tidegate_http::cache::{self, Forwarded};
use tidegate_http::{BodyFraming, FieldId, Method, RequestHead};
use tidegate_store::{Object, Store};

use crate::cache::entries::Entry;
use crate::cache::fill::{self, Begun, Forward, Storing};
use crate::cache::flights::{Epoch, Join, Leader, Outcome};
use crate::cache::follow::{Followed, Follower};
use crate::cache::lookup::{FOR_THE_ORIGIN, Found, Hit, count_hit, directives, find};
use crate::cache::validation::{Freshened, Validators, freshen, take_over_from_head};
use crate::compression;
use crate::service::answer::Answer;
use crate::service::fetch::{ADDED, Fetch};
use crate::upstream::{RequestBody, UpstreamError};

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

/// What the cache does not answer.
pub(super) struct Miss {
    /// The URL's, from before the request is sent.
    pub epoch: Epoch,
    /// What it has for the request and may not use as it is.
    pub stale: Option<Object>,
    pub leader: Option<Leader>,
    pub reason: Forwarded,
}

impl Fetch<'_> {
    /// `key` is the URL's, and becomes that of the variant that is looked for.
    pub(crate) async fn cached_or_fetched<B: RequestBody>(
        &self,
        store: &Store,
        mut key: Vec<u8>,
        body: B,
    ) -> Answer {
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
                    if refresh {
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
                let url_key = &key[..url_bytes];
                return Box::pin(self.passed_or_stood_in(store, url_key, stale, reason, body)).await;
            }
            let mut epoch = self.core.flights.epoch(&key[..url_bytes]);
            let identifies = cache::identifies_client(head);
            let is_not_shared = self.core.flights.is_not_shared(&key, identifies, self.core.clock.unix_s());
            if is_not_shared && stale.is_none() && self.is_conditional() {
                // Who is no cache for a response leaves its conditions to the origin (RFC 9110 §13.2.1).
                return self.passing(Box::pin(self.send_as_is(body)).await, reason);
            }
            // Who wants the origin's own word can do nothing with another request's answer.
            let leader = if is_not_shared || asked.no_cache || asked.max_age_s == Some(0) {
                None
            } else {
                match self.core.flights.join(&key, epoch, identifies) {
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
                        let followed =
                            Box::pin(self.follow(&flight, &mut follower, stale.as_ref(), reason)).await;
                        // What was removed while this request waited is no reason not to store its answer.
                        epoch = self.core.flights.epoch(&key[..url_bytes]);
                        match followed {
                            Followed::Answered(answer) => return *answer,
                            Followed::Look => continue,
                            Followed::Overtake => match self.core.flights.overtake(&flight, identifies) {
                                Some(leader) => Some(leader),
                                None => continue,
                            },
                            Followed::Ask => None,
                        }
                    }
                }
            };
            return self.fetch(store, &key[..url_bytes], Miss { epoch, stale, leader, reason }, body).await;
        }
    }

    /// The upstream's answer to a request of which nothing may be stored, or what the cache has in its place.
    async fn passed_or_stood_in<B: RequestBody>(
        &self,
        store: &Store,
        url_key: &[u8],
        stale: Option<Object>,
        reason: Forwarded,
        body: B,
    ) -> Answer {
        let (asked_ms, epoch) = (self.core.clock.elapsed_ms(), self.core.flights.epoch(url_key));
        let sent = self.send_as_is(body).await;
        if self.incoming.head.method == Method::Head
            && let (Ok(response), Some(stored)) = (&sent, &stale)
            && response.head().status == 200
        {
            // What a GET would have been told now (RFC 9111 §4.3.5).
            let request = RequestHead { method: Method::Get, ..*self.incoming.head };
            let storing =
                Storing { request: &request, ..self.storing(store, url_key, asked_ms, epoch, None) };
            take_over_from_head(&storing, stored, &response.head());
        }
        // Conditions that are the origin's to judge stay unanswered.
        let stale = stale.filter(|_| !self.incoming.head.fields.has_any(FOR_THE_ORIGIN));
        let stored = self.stand_in_for(&sent, stale.as_ref(), reason);
        stored.map_or_else(|| self.passing(sent, reason), |(_, answer)| answer)
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
        let validated = validators.as_ref().and_then(Validators::status);
        let mut sent = self.send(&CLIENT_CONDITIONS, added, BodyFraming::None, (validated, &mut body)).await;
        if let (Ok(response), Some(stale)) = (&mut sent, &stale)
            && response.head().status == 304
        {
            if let Some(Entry::Response(entry)) = Entry::decode(stale.meta())
                && entry.is_by_coding
            {
                compression::restate_not_modified(response, entry.etag);
            }
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
            sent =
                Box::pin(self.send(&CLIENT_CONDITIONS, &ADDED, BodyFraming::None, (None, &mut body))).await;
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
            false => Outcome::Failed { status, client: network_of(self.incoming.info.client) },
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

    /// A response that the upstream has just sent or validated. It is as old as caches on the way say: what comes from
    /// the origin itself has no age (RFC 9111 §5.1).
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
}
