//! Requests that wait for another one's answer (RFC 9111 §4), and what they do when it does not come.

use std::net::IpAddr;
use std::time::Duration;

use tidegate_core::network_of;
use tidegate_http::FieldId;
use tidegate_http::cache::{Forwarded, RequestDirectives, Reuse, identifies_client};
use tidegate_store::Object;
use tokio::time::Instant;

use crate::cache::fill::{Forward, Streamed, asks_for_itself};
use crate::cache::flights::{Flight, News, Outcome, Started};
use crate::service::answer::Answer;
use crate::service::fetch::Fetch;

/// Answers of others that a request cannot use, before it asks for itself.
const FOLLOW_ATTEMPTS: usize = 3;
/// Clients for whom the upstream has failed to answer, until others believe that it would fail for them too.
const FAILURES_BELIEVED: usize = 3;
/// How much longer than the upstream may take to answer a request waits for others' answers: an upstream that does not
/// answer is found out by few, and not by each.
const FOLLOW_GRACE: Duration = Duration::from_secs(1);

/// A request that waits for others' answers.
#[derive(Default)]
pub(super) struct Follower {
    until: Option<Instant>,
    /// Answers that came and were of no use to it.
    looks: usize,
    /// For which other clients the upstream has failed to answer, and with what status the last one was told so.
    failed_for: Vec<IpAddr>,
    failed: Option<u16>,
    pub forward: Option<Forward>,
}

/// What a request does that has waited for another one's answer.
pub(super) enum Followed {
    /// It has its own.
    Answered(Box<Answer>),
    /// Looks into the cache again.
    Look,
    /// Takes the leader's place.
    Overtake,
    /// Asks for itself.
    Ask,
}

/// What a follower does next.
enum Next<'f> {
    Look,
    /// Reads along what is `age_s` old.
    Read {
        started: &'f Started,
        age_s: u64,
    },
    Overtake,
    /// Takes what is stored, as the leader did.
    StandIn {
        reached: bool,
    },
    /// Asks for itself.
    Ask,
    Fail(u16),
}

impl Follower {
    /// After an answer that was of no use, for as long as there have been few of them: who has waited for several in
    /// vain waits no longer.
    fn look_again<'f>(&mut self) -> Next<'f> {
        self.looks += 1;
        if self.looks < FOLLOW_ATTEMPTS { Next::Look } else { Next::Ask }
    }
}

impl Fetch<'_> {
    /// Waits for another request's answer, and takes it where that is of use. `stale` is what the cache has, and may
    /// not be used for this `reason`.
    pub(super) async fn follow(
        &self,
        flight: &Flight,
        follower: &mut Follower,
        stale: Option<&Object>,
        reason: Forwarded,
    ) -> Followed {
        let collapsed = |status| Forward { collapsed: true, ..self.forward(reason, status) };
        follower.forward = Some(collapsed(0));
        let answer = match self.next(flight, follower).await {
            Next::Look => return Followed::Look,
            Next::Overtake => return Followed::Overtake,
            Next::Ask => return Followed::Ask,
            Next::StandIn { reached } => match self.stand_in(stale, reached, collapsed(0)) {
                Some(answer) => answer,
                None => return Followed::Ask,
            },
            Next::Read { started, age_s } => {
                let ttl_s = started.policy.ttl_s(self.core.clock.unix_s());
                let streamed = Streamed::following(started, age_s, ttl_s, collapsed(started.status));
                Answer::Streamed(Box::new(streamed))
            }
            Next::Fail(status) => {
                let stored = self.stand_in(stale, false, self.forward(reason, 0));
                stored.unwrap_or_else(|| Answer::status(status))
            }
        };
        Followed::Answered(Box::new(answer))
    }

    /// Waits for another request's answer. What one request's fields, or its client's leaving, make fail is no reason
    /// to fail the others, nor for all of them to ask at once: one of them asks next.
    async fn next<'f>(&self, flight: &'f Flight, follower: &mut Follower) -> Next<'f> {
        if follower.until.is_none() {
            self.core.metrics.cache_collapsed_total.add(1);
        }
        let until = *follower.until.get_or_insert_with(|| Instant::now() + self.patience());
        let Ok(news) = tokio::time::timeout_at(until, flight.news(self.may_read_along())).await else {
            return Next::Fail(follower.failed.unwrap_or(504));
        };
        match news {
            News::Started(started) => {
                match started.policy.reuse(&RequestDirectives::default(), self.core.clock.unix_s()) {
                    Reuse::Fresh { age_s } => Next::Read { started, age_s },
                    // It has been on its way for longer than it was good for: somebody asks again.
                    _ => Next::Overtake,
                }
            }
            News::Late => Next::Overtake,
            News::Ended(Outcome::Stored) => follower.look_again(),
            // It would be told the same, and lead nobody to anything.
            News::Ended(Outcome::ForLeaderAlone) if asks_for_itself(self.incoming.head) => Next::Ask,
            News::Ended(Outcome::ForItsClient) if identifies_client(self.incoming.head) => Next::Ask,
            News::Ended(Outcome::ForLeaderAlone | Outcome::ForItsClient) => follower.look_again(),
            News::Ended(Outcome::StoodIn { reached }) => Next::StandIn { reached },
            News::Ended(Outcome::Abandoned) => Next::Look,
            News::Ended(Outcome::Failed { status, client }) => {
                follower.failed = Some(status);
                if !follower.failed_for.contains(&client) {
                    follower.failed_for.push(client);
                }
                let is_own = client == network_of(self.incoming.info.client);
                match is_own || follower.failed_for.len() >= FAILURES_BELIEVED {
                    true => Next::Fail(status),
                    false => Next::Look,
                }
            }
            News::Ended(Outcome::Unreachable(status)) => Next::Fail(status),
            News::Ended(Outcome::NotShared) => Next::Ask,
        }
    }

    fn patience(&self) -> Duration {
        let group = self.plan.groups().get(self.to.index);
        group.map_or(FOLLOW_GRACE, |group| {
            group.settings.connect_timeout + group.settings.response_timeout + FOLLOW_GRACE
        })
    }

    /// Whether the request takes whatever the same URL gives another one now.
    fn may_read_along(&self) -> bool {
        let asks = [FieldId::IfNoneMatch, FieldId::IfModifiedSince, FieldId::CacheControl, FieldId::Pragma];
        !asks.iter().any(|id| self.incoming.head.fields.has(*id))
    }
}
