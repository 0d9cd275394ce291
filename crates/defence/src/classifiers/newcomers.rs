//! While the server is under stress those who came with it, or shortly before, may do less (Tempesta §4.7): new work of
//! those who do far more than clients usually do goes first.
//!
//! A crowd of good clients does what clients usually do, and is served as far as that goes.

use std::cell::Cell;

use tidegate_core::hooks::{Classifier, Decision, Interest, RequestView, Scene};
use tidegate_core::{Event, PrefixTree, Reason, Verdict, Visit};

use super::is_crowded;
use crate::settings::Rule;

/// Who was there longer before stress began is known.
const KNOWN_MS: u64 = 20_000;
/// Those who are known may do so many times as much.
const KNOWN_TIMES: u32 = 4;
/// How many times what a client usually does is far more.
const FAR_MORE: f32 = 3.0;
const LEARNING: f32 = 0.3;
/// Windows with fewer requests teach nothing.
const TEACHING_REQUESTS: u32 = 20;

#[derive(Debug)]
pub(super) struct Newcomers {
    limit: u32,
    verdict: Verdict,
    /// Requests of one address in a window without stress.
    usual: Cell<f32>,
    /// The window that was learned from last.
    learned: Cell<u64>,
    /// When there was stress last.
    stressed_ms: Cell<Option<u64>>,
}

impl Newcomers {
    pub(super) fn new(rule: Rule, verdict: Verdict) -> Self {
        Self {
            limit: rule.limit,
            verdict,
            usual: Cell::new(0.0),
            learned: Cell::new(0),
            stressed_ms: Cell::new(None),
        }
    }

    /// What a newcomer may do in a window.
    fn allowed(&self) -> u32 {
        self.limit.max((FAR_MORE * self.usual.get()) as u32)
    }

    /// Takes the last window for usual, unless there was stress in it.
    fn learn(&self, tree: &PrefixTree, now_ms: u64) {
        let root = tree.root();
        // What is known of the window in progress is better than nothing.
        let last = |event| match self.usual.get() {
            0.0 => tree.count(root, event, now_ms),
            _ => tree.last_window(root, event, now_ms),
        };
        let calm =
            self.stressed_ms.get().is_none_or(|last| now_ms.saturating_sub(last) > 2 * tree.window_ms());
        let (requests, addresses) = (last(Event::Request), last(Event::Address));
        if !calm || requests < TEACHING_REQUESTS {
            return;
        }
        let pace = requests as f32 / addresses.max(1) as f32;
        let usual = self.usual.get();
        // The first thing that is known.
        self.usual.set(if usual == 0.0 { pace } else { usual + LEARNING * (pace - usual) });
    }
}

impl Classifier for Newcomers {
    fn name(&self) -> &'static str {
        Reason::Stress.name()
    }

    fn interest(&self) -> Interest {
        Interest::Stress
    }

    fn on_request(&self, scene: &mut Scene<'_>, _: &RequestView<'_>, visit: &Visit) -> Decision {
        match scene.stressed_ms {
            None => Decision::CONTINUE,
            Some(since_ms) => self.under_stress(scene, visit, since_ms),
        }
    }

    fn on_tick(&self, tree: &mut PrefixTree, now_ms: u64) {
        let window = now_ms / tree.window_ms();
        if self.learned.replace(window) != window || self.usual.get() == 0.0 {
            self.learn(tree, now_ms);
        }
    }
}

impl Newcomers {
    #[inline(never)]
    fn under_stress(&self, scene: &Scene<'_>, visit: &Visit, since_ms: u64) -> Decision {
        self.stressed_ms.set(Some(scene.now_ms));
        let allowed = self.allowed();
        if visit.requests <= allowed || !is_crowded(scene) {
            return Decision::CONTINUE;
        }
        let came_ms = scene.now_ms.saturating_sub(scene.tree.age_ms(scene.client, scene.now_ms));
        let is_known = came_ms + KNOWN_MS <= since_ms;
        if is_known && visit.requests <= KNOWN_TIMES * allowed {
            return Decision::CONTINUE;
        }
        Decision::new(self.verdict, Reason::Stress)
    }
}
