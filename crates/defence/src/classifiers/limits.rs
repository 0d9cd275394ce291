//! Limits on one client: so many events within the sliding window, or connections at once.

use std::cell::RefCell;

use tidegate_core::hooks::{Classifier, Decision, Interest, RequestView, ResponseView, Scene, Slow, Source};
use tidegate_core::{Event, NodeId, Reason, Verdict, Visit};

use super::is_crowded;
use crate::memory::list_bytes;
use crate::settings::Rule;

/// How many times what half of the clients take of the upstreams' time at most is far more.
const FAR_MORE: u64 = 8;
/// Clients of the upstreams that one is compared with.
const MAX_COMPARED: usize = 256;

/// The most memory that these classifiers take.
pub(super) const MOST_BYTES: usize = list_bytes::<NodeId>(MAX_COMPARED);

/// A limit on how often something happens.
#[derive(Debug)]
struct Limit {
    reason: Reason,
    limit: u32,
    verdict: Verdict,
}

/// The classifier of a rule about one client.
pub(super) fn classifier(rule: Rule, verdict: Verdict) -> Option<Box<dyn Classifier>> {
    let limit = Limit { reason: rule.reason, limit: rule.limit, verdict };
    Some(match rule.reason {
        Reason::RequestRate => Box::new(RequestRate(limit)),
        Reason::ConnectionRate => Box::new(ConnectionRate(limit)),
        Reason::Connections => Box::new(Connections(limit)),
        Reason::Errors => Box::new(Errors(limit)),
        Reason::UpstreamTime => Box::new(UpstreamTime { limit, clients: RefCell::default() }),
        Reason::CacheBusting => Box::new(CacheBusting(limit)),
        Reason::Ranges => Box::new(Ranges(limit)),
        Reason::Slow => Box::new(TooSlow(limit)),
        _ => return None,
    })
}

impl Limit {
    fn exceeded(&self) -> Decision {
        Decision::new(self.verdict, self.reason)
    }

    /// Whether the decision is made as soon as a response has ended: a block. Anything else is done to the next
    /// request.
    fn acts_at_end(&self) -> bool {
        matches!(self.verdict, Verdict::Block(_))
    }

    /// Requests of clients that may be beyond it.
    fn interest(&self, event: Event) -> Interest {
        Interest::Beyond(event, self.limit)
    }

    fn check(&self, scene: &Scene<'_>, event: Event) -> Decision {
        if scene.count(event) > self.limit { self.exceeded() } else { Decision::CONTINUE }
    }
}

/// More requests than one client may make, cached ones included, where others are there too.
#[derive(Debug)]
struct RequestRate(Limit);

impl Classifier for RequestRate {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn interest(&self) -> Interest {
        self.0.interest(Event::Request)
    }

    fn on_request(&self, scene: &mut Scene<'_>, _: &RequestView<'_>, visit: &Visit) -> Decision {
        if visit.requests > self.0.limit && is_crowded(scene) {
            return self.0.exceeded();
        }
        Decision::CONTINUE
    }
}

/// More new connections than one client may open, where others are there too.
#[derive(Debug)]
struct ConnectionRate(Limit);

impl Classifier for ConnectionRate {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn interest(&self) -> Interest {
        Interest::Never
    }

    fn on_connect(&self, scene: &mut Scene<'_>, _: u32) -> Decision {
        match self.0.check(scene, Event::Connection) {
            exceeded if is_crowded(scene) => exceeded,
            _ => Decision::CONTINUE,
        }
    }
}

/// More connections at once than one client may have, where others are there too.
#[derive(Debug)]
struct Connections(Limit);

impl Classifier for Connections {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn interest(&self) -> Interest {
        Interest::Never
    }

    fn on_connect(&self, scene: &mut Scene<'_>, open: u32) -> Decision {
        if open > self.0.limit && is_crowded(scene) {
            return self.0.exceeded();
        }
        Decision::CONTINUE
    }
}

/// Failed logins, unknown pages, and requests that are given up while an upstream works on them: a block as the result
/// of the last response, anything else at the next request.
#[derive(Debug)]
struct Errors(Limit);

impl Classifier for Errors {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn interest(&self) -> Interest {
        if self.0.acts_at_end() { Interest::Never } else { self.0.interest(Event::Error) }
    }

    fn on_request(&self, scene: &mut Scene<'_>, _: &RequestView<'_>, _: &Visit) -> Decision {
        self.0.check(scene, Event::Error)
    }

    fn looks_at_responses(&self) -> bool {
        true
    }

    fn on_response(&self, scene: &mut Scene<'_>, response: &ResponseView<'_>) -> Decision {
        let has_failed = response.status >= 400 || response.status == ResponseView::GIVEN_UP;
        if !has_failed || !self.0.acts_at_end() {
            return Decision::CONTINUE;
        }
        self.0.check(scene, Event::Error)
    }
}

/// Took so much of the upstreams' time that others have to wait for it: beyond the limit, and far more than half of the
/// others that the upstreams work for, so that a slow upstream is not its clients' fault. A mean would be the heaviest
/// clients' own: a few who do the same would excuse each other.
#[derive(Debug)]
struct UpstreamTime {
    limit: Limit,
    /// Whom the upstreams have worked for lately; at most [`MAX_COMPARED`].
    clients: RefCell<Vec<NodeId>>,
}

impl UpstreamTime {
    /// Whether others have to wait for what one takes.
    #[cold]
    fn is_far_more(&self, scene: &Scene<'_>, own: u32) -> bool {
        is_crowded(scene) && u64::from(own) > FAR_MORE * u64::from(self.usual(scene))
    }

    /// What half of the others take at most.
    fn usual(&self, scene: &Scene<'_>) -> u32 {
        let count = |id: &NodeId| scene.tree.count_everywhere(*id, Event::UpstreamMs, scene.now_ms);
        let clients = self.clients.borrow();
        let others = clients.iter().filter(|id| **id != scene.client);
        let mut of_others: Vec<u32> = others.map(count).filter(|ms| *ms > 0).collect();
        of_others.sort_unstable();
        of_others.get(of_others.len() / 2).copied().unwrap_or_default()
    }
}

impl Classifier for UpstreamTime {
    fn name(&self) -> &'static str {
        self.limit.reason.name()
    }

    fn interest(&self) -> Interest {
        self.limit.interest(Event::UpstreamMs)
    }

    fn on_request(&self, scene: &mut Scene<'_>, _: &RequestView<'_>, _: &Visit) -> Decision {
        let own = scene.count(Event::UpstreamMs);
        if own > self.limit.limit && self.is_far_more(scene, own) {
            return self.limit.exceeded();
        }
        Decision::CONTINUE
    }

    fn looks_at_responses(&self) -> bool {
        true
    }

    fn on_response(&self, scene: &mut Scene<'_>, response: &ResponseView<'_>) -> Decision {
        let mut clients = self.clients.borrow_mut();
        if response.source == Source::Here || clients.contains(&scene.client) {
            return Decision::CONTINUE;
        }
        if clients.len() >= MAX_COMPARED {
            clients.retain(|id| scene.tree.count(*id, Event::UpstreamMs, scene.now_ms) > 0);
        }
        if clients.len() < MAX_COMPARED {
            clients.push(scene.client);
        }
        Decision::CONTINUE
    }
}

/// Asks past the cache for URLs that nobody has asked for, and for little else or for very many, where others are there
/// too: a crawler that has the site to itself is in nobody's way.
#[derive(Debug)]
struct CacheBusting(Limit);

impl CacheBusting {
    fn check(&self, scene: &Scene<'_>) -> Decision {
        let exceeded = self.0.check(scene, Event::Novel);
        if exceeded.is_continue() || !is_crowded(scene) {
            return Decision::CONTINUE;
        }
        let novel = scene.count(Event::Novel);
        // What is asked for from the cache besides costs next to nothing, and is no excuse for half as much again.
        let is_much = novel > self.0.limit.saturating_add(self.0.limit / 2);
        if is_much || novel > scene.count(Event::Request) / 2 { exceeded } else { Decision::CONTINUE }
    }
}

impl Classifier for CacheBusting {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn interest(&self) -> Interest {
        if self.0.acts_at_end() { Interest::Never } else { self.0.interest(Event::Novel) }
    }

    fn on_request(&self, scene: &mut Scene<'_>, _: &RequestView<'_>, _: &Visit) -> Decision {
        self.check(scene)
    }

    fn looks_at_responses(&self) -> bool {
        true
    }

    fn on_response(&self, scene: &mut Scene<'_>, _: &ResponseView<'_>) -> Decision {
        if self.0.acts_at_end() { self.check(scene) } else { Decision::CONTINUE }
    }
}

/// Asks for parts of responses and gains next to nothing by it, again and again, where others are there too.
#[derive(Debug)]
struct Ranges(Limit);

impl Classifier for Ranges {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn interest(&self) -> Interest {
        self.0.interest(Event::Range)
    }

    fn on_request(&self, scene: &mut Scene<'_>, _: &RequestView<'_>, _: &Visit) -> Decision {
        if scene.count(Event::Range) > self.0.limit && is_crowded(scene) {
            return self.0.exceeded();
        }
        Decision::CONTINUE
    }
}

/// Kept connections waiting until they were ended, again and again.
#[derive(Debug)]
struct TooSlow(Limit);

impl Classifier for TooSlow {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn interest(&self) -> Interest {
        Interest::Never
    }

    fn on_slow(&self, scene: &mut Scene<'_>, _: Slow) -> Decision {
        self.0.check(scene, Event::Slow)
    }
}
