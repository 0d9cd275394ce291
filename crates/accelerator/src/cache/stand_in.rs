//! What is stored in the place of an answer that does not come, or of an error (RFC 5861 §4, RFC 9111 §4.2.4).

use tidegate_http::cache::{Forwarded, Policy, RequestDirectives};
use tidegate_store::Object;

use crate::cache::entries::{Entry, write_url_key};
use crate::cache::fill::Forward;
use crate::cache::lookup::{Found, Hit, directives, find, hit};
use crate::service::answer::Answer;
use crate::service::fetch::Fetch;
use crate::upstream::{Response, UpstreamError};

impl Fetch<'_> {
    /// What is stored, if `sent` is a failure in the place of which it may answer; and whether the upstream was
    /// reached.
    pub(super) fn stand_in_for(
        &self,
        sent: &Result<Box<Response>, UpstreamError>,
        stale: Option<&Object>,
        reason: Forwarded,
    ) -> Option<(bool, Answer)> {
        let (reached, status) = match sent {
            Ok(response) => (true, response.head().status),
            Err(error) if error.is_clients_fault() => return None,
            Err(_) => (false, 0),
        };
        if reached && !matches!(status, 500 | 502..=504) {
            return None;
        }
        Some((reached, self.stand_in(stale, reached, self.forward(reason, status))?))
    }

    /// What is stored, if it may answer in the place of an upstream that has failed: by leave of the response or of the
    /// request if that was reached, and otherwise unless the response forbids it. The cache is looked into again: what
    /// was `stale` may have been purged or invalidated while the upstream was waited for.
    pub(super) fn stand_in(&self, stale: Option<&Object>, reached: bool, forward: Forward) -> Option<Answer> {
        let rule = match reached {
            true => Policy::may_serve_stale_on_error,
            false => Policy::may_serve_stale_when_disconnected,
        };
        stale?;
        let mut key = Vec::new();
        write_url_key(self.incoming.normalized, &self.incoming.info, &mut key);
        match find(self.core, self.core.store.as_deref()?, self.incoming.head, &mut key) {
            Found::Unusable { object, .. } if self.policy_allows(&object, rule) => {
                tracing::debug!(reached, "a stale response stands in for a failed upstream");
                Some(self.hit_of(object, true, forward))
            }
            // Another request has brought it.
            Found::Usable { hit, .. } => Some(self.stored(Hit { forwarded: Some(forward), ..hit })),
            Found::Unusable { .. } | Found::Nothing(_) => None,
        }
    }

    /// A stored response that is sent after the upstream was asked.
    pub(super) fn hit_of(&self, object: Object, stale: bool, forward: Forward) -> Answer {
        match Entry::decode(object.meta()) {
            Some(Entry::Response(entry)) => {
                if stale {
                    self.core.metrics.cache_stale_total.add(1);
                }
                let hit = hit(self.incoming.head, &object, &entry, self.core.clock.unix_s(), stale);
                Answer::Stored(Hit { forwarded: Some(forward), ..hit })
            }
            _ => Answer::status(502),
        }
    }

    /// RFC 9111 §5.2.2.2: the answer is 504 then.
    pub(super) fn must_fail_disconnected(&self, object: &Object) -> bool {
        let now_s = self.core.clock.unix_s();
        matches!(Entry::decode(object.meta()), Some(Entry::Response(entry)) if entry.policy.must_fail_when_disconnected(now_s))
    }

    fn policy_allows(&self, object: &Object, rule: fn(&Policy, &RequestDirectives, u64) -> bool) -> bool {
        let Some(Entry::Response(entry)) = Entry::decode(object.meta()) else { return false };
        let directives = directives(self.core, &self.incoming.head.fields);
        rule(&entry.policy, &directives, self.core.clock.unix_s())
    }
}
