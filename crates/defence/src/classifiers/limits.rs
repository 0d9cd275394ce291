//! Limits on one client: so many events within the sliding window, or connections at once.

use tidegate_core::hooks::{Classifier, Decision, RequestView, ResponseView, Scene, Slow};
use tidegate_core::{Event, Reason, Verdict, Visit};

use super::is_crowded;
use crate::settings::Rule;

/// How many times the average client's upstream time is far more than others'.
const FAR_MORE: u64 = 8;

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
        Reason::UpstreamTime => Box::new(UpstreamTime(limit)),
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

    fn on_connect(&self, scene: &mut Scene<'_>, open: u32) -> Decision {
        if open > self.0.limit && is_crowded(scene) {
            return self.0.exceeded();
        }
        Decision::CONTINUE
    }
}

/// Failed logins, unknown pages, and requests that are given up while an upstream works on them.
#[derive(Debug)]
struct Errors(Limit);

impl Classifier for Errors {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn on_response(&self, scene: &mut Scene<'_>, response: &ResponseView<'_>) -> Decision {
        if response.status < 400 && response.status != ResponseView::GIVEN_UP {
            return Decision::CONTINUE;
        }
        self.0.check(scene, Event::Error)
    }
}

/// Took so much of the upstreams' time that others have to wait for it: beyond the limit, and far more than the average
/// client, so that a slow upstream is not its clients' fault.
#[derive(Debug)]
struct UpstreamTime(Limit);

impl Classifier for UpstreamTime {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn on_request(&self, scene: &mut Scene<'_>, _: &RequestView<'_>, _: &Visit) -> Decision {
        let own = scene.count(Event::UpstreamMs);
        if own <= self.0.limit || !is_crowded(scene) {
            return Decision::CONTINUE;
        }
        let everybody = scene.tree.root();
        let all = scene.tree.count(everybody, Event::UpstreamMs, scene.now_ms);
        let addresses = scene.tree.count(everybody, Event::Address, scene.now_ms);
        let others = u64::from(all.saturating_sub(own)) / u64::from(addresses.saturating_sub(1).max(1));
        if u64::from(own) > FAR_MORE * others { self.0.exceeded() } else { Decision::CONTINUE }
    }
}

/// Asks past the cache for URLs that nobody has asked for, and for little else, where others are there too: a crawler
/// that has the site to itself is in nobody's way.
#[derive(Debug)]
struct CacheBusting(Limit);

impl Classifier for CacheBusting {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn on_response(&self, scene: &mut Scene<'_>, _: &ResponseView<'_>) -> Decision {
        let novel = scene.count(Event::Novel);
        if novel > self.0.limit && novel > scene.count(Event::Request) / 2 && is_crowded(scene) {
            return self.0.exceeded();
        }
        Decision::CONTINUE
    }
}

/// Asks for parts of responses and gains next to nothing by it, again and again, where others are there too.
#[derive(Debug)]
struct Ranges(Limit);

impl Classifier for Ranges {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn on_request(&self, scene: &mut Scene<'_>, _: &RequestView<'_>, _: &Visit) -> Decision {
        match self.0.check(scene, Event::Range) {
            exceeded if is_crowded(scene) => exceeded,
            _ => Decision::CONTINUE,
        }
    }
}

/// Kept connections waiting until they were ended, again and again.
#[derive(Debug)]
struct TooSlow(Limit);

impl Classifier for TooSlow {
    fn name(&self) -> &'static str {
        self.0.reason.name()
    }

    fn on_slow(&self, scene: &mut Scene<'_>, _: Slow) -> Decision {
        self.0.check(scene, Event::Slow)
    }
}
