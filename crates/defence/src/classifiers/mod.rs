//! The classifiers, each a few lines on what the prefix tree has counted.

pub(crate) mod filters;
mod limits;
mod newcomers;
mod swarm;

use std::cell::RefCell;
use std::sync::Arc;

use tidegate_core::hooks::{
    Classifier, Decision, Field, Interest, Part, RequestView, ResponseView, Scene, Source, hash, hash_target,
};
use tidegate_core::{Event, Reason, Verdict, Visit};

use crate::Settings;
use crate::external::{External, Feed};
use crate::novelty::Novelty;
use crate::parts::Parts;
use crate::settings::Action;
use crate::stress::Upstreams;

/// Of so few addresses at once none can be in another's way: a load test from one address is nobody's flood, even if
/// something on the host asks for a page now and then to see whether all is well.
const ALONE: u32 = 2;
/// A failed login weighs this many unknown pages.
const FAILED_LOGIN_WEIGHT: u32 = 8;
/// A request that was given up while an upstream worked on it weighs this many: it works on, and nobody learns how
/// long.
const GIVEN_UP_WEIGHT: u32 = 4;
/// A set of ranges that is rejected weighs this many ranges that gain nothing.
const EXCESSIVE_WEIGHT: u32 = 8;

/// The most memory that the classifiers of one core take, with what is new when settings change and the old ones are
/// still there.
pub(crate) const BYTES: usize =
    2 * Novelty::BYTES + Parts::BYTES + 2 * (limits::MOST_BYTES + swarm::MOST_BYTES);

/// All that settings ask for, in the order in which they are asked: what costs least, and refuses soonest, first.
pub(crate) fn all(
    settings: &Settings,
    seed: u64,
    upstreams: &Arc<Upstreams>,
    feed: &Arc<Feed>,
) -> Vec<Box<dyn Classifier>> {
    let accounts = Accounts {
        novelty: RefCell::new(Novelty::new()),
        parts: RefCell::new(Parts::new()),
        seed,
        upstreams: Arc::clone(upstreams),
    };
    let mut chain: Vec<Box<dyn Classifier>> = vec![Box::new(accounts)];
    if settings.external {
        chain.push(Box::new(External(Arc::clone(feed))));
    }
    for dry_run in [false, true] {
        if settings.filters.iter().any(|filter| filter.dry_run == dry_run) {
            chain.push(Box::new(filters::Filters::new(settings, dry_run)));
        }
    }
    for rule in settings.rules.iter().filter(|rule| rule.limit > 0) {
        let verdict = verdict(rule.action, settings);
        match rule.reason {
            Reason::Swarm => chain.push(Box::new(swarm::Swarm::new(*rule, verdict))),
            Reason::Stress => chain.push(Box::new(newcomers::Newcomers::new(*rule, verdict))),
            _ => chain.extend(limits::classifier(*rule, verdict)),
        }
    }
    chain
}

pub(crate) fn verdict(action: Action, settings: &Settings) -> Verdict {
    match action {
        Action::Delay => Verdict::Delay,
        Action::Refuse => Verdict::Refuse,
        Action::Challenge => Verdict::Challenge,
        Action::Tarpit => Verdict::Tarpit,
        Action::Reset => Verdict::Reset,
        Action::Drop => Verdict::Drop,
        Action::Block => Verdict::Block(settings.block_for),
    }
}

/// Whether the client shares the server with enough others to be in their way. Asked only of who does too much.
#[cold]
fn is_crowded(scene: &Scene<'_>) -> bool {
    scene.tree.addresses_everywhere(scene.now_ms) > ALONE
}

/// Counts in the tree what only a look at requests and responses tells. Objects to nothing.
#[derive(Debug)]
struct Accounts {
    novelty: RefCell<Novelty>,
    parts: RefCell<Parts>,
    seed: u64,
    upstreams: Arc<Upstreams>,
}

impl Classifier for Accounts {
    fn name(&self) -> &'static str {
        "accounts"
    }

    fn interest(&self) -> Interest {
        Interest::Parts
    }

    fn on_request(&self, scene: &mut Scene<'_>, request: &RequestView<'_>, _: &Visit) -> Decision {
        let weight = match request.fields.part() {
            None => return Decision::CONTINUE,
            Some(Part::Excessive) => EXCESSIVE_WEIGHT,
            Some(Part::Bytes { start, end }) => {
                let host = request.field(Field::Host).unwrap_or_default();
                let target = hash_target(hash(self.seed, host), request.path, request.query);
                let is_idle =
                    self.parts.borrow_mut().is_idle(scene.client, target, (start, end), scene.now_ms);
                u32::from(is_idle)
            }
        };
        if weight > 0 {
            scene.tree.add(scene.client, Event::Range, weight, scene.now_ms);
        }
        Decision::CONTINUE
    }

    fn looks_at_responses(&self) -> bool {
        true
    }

    fn on_response(&self, scene: &mut Scene<'_>, response: &ResponseView<'_>) -> Decision {
        let mut add = |event, amount| scene.tree.add(scene.client, event, amount, scene.now_ms);
        match response.status {
            ResponseView::GIVEN_UP => add(Event::Error, GIVEN_UP_WEIGHT),
            401 | 403 => add(Event::Error, FAILED_LOGIN_WEIGHT),
            400..=499 => add(Event::Error, 1),
            _ => {}
        }
        if response.source != Source::Here {
            let ms = match response.status {
                // The upstream works on, and nobody learns for how long.
                ResponseView::GIVEN_UP => response.upstream_ms.max(self.upstreams.usual_ms()),
                status => {
                    self.upstreams.answered(scene.client, status, response.upstream_ms);
                    response.upstream_ms
                }
            };
            // Most answers of a fast upstream, whose time counts for nothing.
            if ms > 0 {
                add(Event::UpstreamMs, ms);
            }
        }
        // Another host, and another variant, is another thing to be asked for past the cache.
        let host = hash(self.seed, response.authority).wrapping_add(response.variant);
        let target = hash_target(host, response.path, response.query);
        if response.source == Source::Missed && self.novelty.borrow_mut().is_new(target, scene.now_ms) {
            add(Event::Novel, 1);
        }
        Decision::CONTINUE
    }
}
