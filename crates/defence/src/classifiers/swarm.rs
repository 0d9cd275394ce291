//! A botnet whose every address is quiet: seen by what a whole prefix does, punished address by address.
//!
//! A prefix is suspect if its shape is none that the site's usual traffic has: nearly all of its requests miss the cache
//! with URLs never seen, or fail, or cost the upstreams many times what requests cost, or are for one target although
//! clients usually ask for several, or its addresses go on and on at several times the pace of all others. Size alone makes nobody suspect, so that a crowd of good clients is left alone. In a
//! suspect prefix only those are refused that came with the attack and show the same shape themselves: neighbours that
//! were there before, or that do what clients usually do, are not.

use std::cell::Cell;

use tidegate_core::hooks::{Classifier, Decision, RequestView, Scene};
use tidegate_core::{Event, Mark, NodeId, PrefixTree, Reason, Verdict, Visit};

use crate::settings::Rule;

/// Fewer addresses are no swarm: limits on single clients see them.
const FEW_ADDRESSES: u32 = 8;
/// Fewer requests say nothing about a client.
const FEW_REQUESTS: u32 = 4;
/// How long a prefix stays suspect after it was last found so.
const SUSPECT_MS: u64 = 60_000;
/// Who came longer before the attack was found is known, and spared.
const NEWCOMER_MS: u64 = 20_000;
/// How much of the last window goes into what is usual.
const LEARNING: f32 = 0.2;
/// Requests of an address in a window below which nobody is rapid: a page with very many parts.
const RAPID: f32 = 100.0;
/// How many times the pace of all others is rapid, and from how many others their pace can be told.
const RAPID_TIMES: f32 = 3.0;
const OTHERS: u32 = 8;
/// Windows with fewer requests teach nothing.
const TEACHING_REQUESTS: u32 = 100;

/// What is usual for the site, learned while nobody is suspect.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Usual {
    novel_share: f32,
    error_share: f32,
    upstream_ms_per_request: f32,
    /// Share of the target that is asked for most; 1 until it is known: then nothing is too much.
    top_share: f32,
}

/// In which way a shape is unusual.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
enum Shape {
    Novel = 1,
    Errors,
    Costly,
    Monotonous,
    Rapid,
}

/// Finds suspect prefixes, and those in them who take part.
#[derive(Debug)]
pub(super) struct Swarm {
    limit: u32,
    verdict: Verdict,
    usual: Cell<Usual>,
    /// The window that was learned from last.
    learned: Cell<u64>,
    /// When a prefix was last found suspect.
    alarmed_ms: Cell<Option<u64>>,
}

impl Swarm {
    pub(super) fn new(rule: Rule, verdict: Verdict) -> Self {
        let usual =
            Usual { novel_share: 0.1, error_share: 0.05, upstream_ms_per_request: 20.0, top_share: 1.0 };
        Self {
            limit: rule.limit,
            verdict,
            usual: Cell::new(usual),
            learned: Cell::new(0),
            alarmed_ms: Cell::new(None),
        }
    }

    /// Whether a prefix does what the site's usual clients never do.
    fn look(&self, tree: &mut PrefixTree, prefix: NodeId, now_ms: u64) {
        let count = |event| tree.count(prefix, event, now_ms);
        if count(Event::Request) < self.limit || count(Event::Address) < FEW_ADDRESSES {
            return;
        }
        let shown = Shape::ALL.into_iter().find(|shape| match shape {
            Shape::Rapid => is_rapid(tree, prefix, now_ms),
            _ => self.shows(tree, prefix, *shape, now_ms),
        });
        let Some(shape) = shown else { return };
        let before = tree.mark(prefix, now_ms).filter(|mark| mark.kind == shape as u8);
        let since_ms = before.map_or(now_ms, |mark| mark.since_ms);
        tree.set_mark(prefix, Mark { since_ms, until_ms: now_ms + SUSPECT_MS, kind: shape as u8 });
        self.alarmed_ms.set(Some(now_ms));
    }

    /// Whether a prefix, or an address, shows this shape.
    fn shows(&self, tree: &PrefixTree, id: NodeId, shape: Shape, now_ms: u64) -> bool {
        let usual = self.usual.get();
        let requests = tree.count(id, Event::Request, now_ms).max(1) as f32;
        let per_request = |event| tree.count(id, event, now_ms) as f32 / requests;
        match shape {
            Shape::Novel => per_request(Event::Novel) > (3.0 * usual.novel_share).clamp(0.5, 0.9),
            Shape::Errors => per_request(Event::Error) > (3.0 * usual.error_share).clamp(0.5, 0.9),
            Shape::Costly => {
                per_request(Event::UpstreamMs) > (5.0 * usual.upstream_ms_per_request).max(100.0)
            }
            Shape::Monotonous => usual.top_share < 0.6 && tree.top_target(id).share() > 0.9,
            // Its prefix was compared with the others.
            Shape::Rapid => requests > RAPID,
        }
    }

    /// Whether a client in a suspect prefix takes part in what makes it so.
    fn takes_part(&self, scene: &Scene<'_>, prefix: NodeId, mark: Mark, requests: u32) -> bool {
        let (tree, client, now_ms) = (&*scene.tree, scene.client, scene.now_ms);
        let came_ms = now_ms.saturating_sub(tree.age_ms(client, now_ms));
        if requests < FEW_REQUESTS || mark.since_ms.saturating_sub(came_ms) > NEWCOMER_MS {
            return false;
        }
        let Some(shape) = Shape::of(mark.kind).filter(|shape| self.shows(tree, client, *shape, now_ms))
        else {
            return false;
        };
        shape != Shape::Monotonous || tree.top_target(client).target == tree.top_target(prefix).target
    }

    /// Takes the last window for usual, unless an attack was in it.
    fn learn(&self, tree: &PrefixTree, now_ms: u64) {
        let root = tree.root();
        let last = |event| tree.last_window(root, event, now_ms);
        let requests = last(Event::Request);
        let calm = self.alarmed_ms.get().is_none_or(|alarmed| now_ms.saturating_sub(alarmed) > SUSPECT_MS);
        if !calm || requests < TEACHING_REQUESTS {
            return;
        }
        let share = |event| last(event) as f32 / requests as f32;
        let toward = |old: f32, new: f32| old + LEARNING * (new - old);
        let usual = self.usual.get();
        self.usual.set(Usual {
            novel_share: toward(usual.novel_share, share(Event::Novel)),
            error_share: toward(usual.error_share, share(Event::Error)),
            upstream_ms_per_request: toward(usual.upstream_ms_per_request, share(Event::UpstreamMs)),
            top_share: match usual.top_share {
                // The first thing that is known.
                1.0 => tree.top_target(root).share().min(0.999),
                known => toward(known, tree.top_target(root).share()),
            },
        });
    }
}

impl Shape {
    const ALL: [Self; 5] = [Self::Novel, Self::Errors, Self::Costly, Self::Monotonous, Self::Rapid];

    fn of(kind: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|shape| *shape as u8 == kind)
    }
}

/// Whether the addresses of a prefix ask at several times the pace of all others, in this window and in the one before:
/// who loads a page with many parts is quiet afterwards.
fn is_rapid(tree: &PrefixTree, prefix: NodeId, now_ms: u64) -> bool {
    let pace = |count: &dyn Fn(NodeId, Event) -> u32| {
        let (own, own_addresses) = (count(prefix, Event::Request), count(prefix, Event::Address));
        let all = |event| count(tree.root(), event);
        let others = all(Event::Address).saturating_sub(own_addresses);
        let of_others = all(Event::Request).saturating_sub(own) as f32 / others.max(1) as f32;
        let pace = own as f32 / own_addresses.max(1) as f32;
        others >= OTHERS && pace > RAPID.max(RAPID_TIMES * of_others)
    };
    pace(&|id, event| tree.count(id, event, now_ms)) && pace(&|id, event| tree.last_window(id, event, now_ms))
}

impl Classifier for Swarm {
    fn name(&self) -> &'static str {
        Reason::Swarm.name()
    }

    fn on_request(&self, scene: &mut Scene<'_>, _: &RequestView<'_>, visit: &Visit) -> Decision {
        if let Some(prefix) = visit.due {
            // Everybody together is no prefix.
            if prefix != scene.tree.root() {
                self.look(scene.tree, prefix, scene.now_ms);
            }
        }
        match visit.suspect {
            Some((prefix, mark)) if self.takes_part(scene, prefix, mark, visit.requests) => {
                Decision::new(self.verdict, Reason::Swarm)
            }
            _ => Decision::CONTINUE,
        }
    }

    fn on_tick(&self, tree: &mut PrefixTree, now_ms: u64) {
        let window = now_ms / tree.window_ms();
        if self.learned.replace(window) != window {
            self.learn(tree, now_ms);
        }
    }
}
