//! A botnet whose every address is quiet: seen by what a whole prefix does, punished address by address.
//!
//! A prefix is suspect if its shape is none that the site's usual traffic has: nearly all of its requests miss the
//! cache with URLs never seen, or fail, or cost the upstreams many times what requests cost usually and what all
//! others' cost now, or are for one target although clients usually ask for several, or its addresses go on and on at
//! several times the pace of all others, or very many of them ask once and leave although clients usually stay. Size
//! alone makes nobody suspect, so that a crowd of good clients is left alone. In a suspect prefix only those are
//! refused that came with the attack and show the same shape themselves: neighbours that were there before, or that do
//! what clients usually do, are not. Where the prefix is wider than one network, or the shape is cost, of which a
//! client decides less than the upstream, they are asked to prove that they are browsers, and not blocked.
//!
//! Where very many addresses do so little each that none of them shows a shape of its own, the prefix's shape has to
//! do: newcomers in it are asked to prove that they are browsers, which costs a good client a redirect or a second.

use std::cell::{Cell, RefCell};

use tidegate_core::hooks::{Classifier, Decision, Interest, RequestView, Scene};
use tidegate_core::{Event, Mark, NodeId, PrefixTree, Reason, Verdict, Visit};

use crate::memory::list_bytes;
use crate::settings::Rule;

/// Fewer addresses are no swarm: limits on single clients see them.
const FEW_ADDRESSES: u32 = 8;
/// Fewer requests say nothing about a client.
const FEW_REQUESTS: u32 = 4;
/// How many times what others' requests cost is costly, and what never is, in milliseconds a request.
const COSTLY_TIMES: f32 = 5.0;
const CHEAP_MS: f32 = 100.0;
/// Of so few requests in all outside of a prefix nobody can tell what others' cost.
const FEW_OF_OTHERS: u32 = 20;
/// Wider prefixes than these, of IPv4 and IPv6, are not one network: who is in them has little to do with another.
const NETWORK_BITS4: u8 = 20;
const NETWORK_BITS6: u8 = 48;
/// How much more of a prefix's requests than usual are for one target, and of a client's who does little else.
const MONOTONOUS_MORE: f32 = 0.5;
const MONOTONOUS: f32 = 0.9;
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
const OTHERS: u32 = 3;
/// For how long the pace has to be kept up, which who loads a page with many parts does not.
const RAPID_MS: u64 = 2_000;
/// Prefixes that may be on their way to be rapid at once.
const MAX_PACERS: usize = 64;
/// Prefixes right below everybody that may be passing by at once: all of IPv4's, and as many of IPv6's.
const MAX_WIDEST: usize = 512;
/// Without a look at it in this time a prefix has stopped.
const PACER_GONE_MS: u64 = 3_000;
/// How many times the limit of requests, from how many addresses, makes newcomers of a prefix prove themselves.
const MASS_TIMES: u32 = 10;
const MASS_ADDRESSES: u32 = 500;
/// Requests of an address below which it has passed by, and above which clients usually stay.
const PASSING: f32 = 1.5;
const STAYING: f32 = 3.0;
/// The share of all requests of a prefix that nobody known is in, which under stress is such a mass.
const MASS_SHARE: f32 = 0.3;
/// Windows for which a site has to be known before a prefix can be new to it.
const MASS_WINDOWS: u64 = 3;
/// Windows with fewer requests teach nothing.
const TEACHING_REQUESTS: u32 = 100;

/// The most memory that this classifier takes.
pub(super) const MOST_BYTES: usize = list_bytes::<Pacer>(MAX_PACERS) + list_bytes::<NodeId>(MAX_WIDEST);

/// What is usual for the site, learned while nobody is suspect.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Usual {
    novel_share: f32,
    error_share: f32,
    upstream_ms_per_request: f32,
    /// Share of the target that is asked for most; 1 until it is known: then nothing is too much.
    top_share: f32,
    /// Requests of one address in a window; 0 until it is known.
    pace: f32,
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
    /// Very many addresses that ask once, of which not even everybody together has that many usually.
    Passing,
    /// Under stress: a great part of all requests, from where nearly nobody came before.
    Mass,
}

/// A prefix whose addresses are rapid now.
#[derive(Clone, Copy, Debug)]
struct Pacer {
    prefix: NodeId,
    since_ms: u64,
    last_ms: u64,
    /// Looks since then, each after [`PrefixTree::LOOK_EVERY`] requests.
    looks: u32,
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
    pacers: RefCell<Vec<Pacer>>,
    /// Prefixes right below everybody whose addresses ask once and leave.
    widest: RefCell<Vec<NodeId>>,
}

impl Swarm {
    pub(super) fn new(rule: Rule, verdict: Verdict) -> Self {
        let usual = Usual {
            novel_share: 0.1,
            error_share: 0.05,
            upstream_ms_per_request: 20.0,
            top_share: 1.0,
            pace: 0.0,
        };
        Self {
            limit: rule.limit,
            verdict,
            usual: Cell::new(usual),
            learned: Cell::new(0),
            alarmed_ms: Cell::new(None),
            pacers: RefCell::default(),
            widest: RefCell::default(),
        }
    }

    /// Whether a prefix does what the site's usual clients never do.
    fn look(&self, tree: &mut PrefixTree, prefix: NodeId, stressed: bool, now_ms: u64) {
        let count = |event| tree.count_everywhere(prefix, event, now_ms);
        if count(Event::Request) < self.limit || count(Event::Address) < FEW_ADDRESSES {
            return;
        }
        // Everybody together is no prefix, and has no others to be compared with.
        let shapes: &[Shape] = if prefix == tree.root() { &[Shape::Passing] } else { &Shape::ALL };
        let shown = shapes.iter().copied().find(|shape| match shape {
            Shape::Rapid => self.is_rapid(tree, prefix, now_ms),
            Shape::Mass => stressed && is_new_mass(tree, prefix, now_ms),
            Shape::Costly => {
                self.shows(tree, prefix, *shape, now_ms) && is_dearer(tree, prefix, prefix, now_ms)
            }
            _ => self.shows(tree, prefix, *shape, now_ms),
        });
        let Some(shape) = shown else { return };
        let before = tree.mark(prefix, now_ms).filter(|mark| mark.kind == shape as u8);
        let since_ms = before.map_or(now_ms, |mark| mark.since_ms);
        tree.set_mark(prefix, Mark { since_ms, until_ms: now_ms + SUSPECT_MS, kind: shape as u8 });
        self.alarmed_ms.set(Some(now_ms));
        let mut widest = self.widest.borrow_mut();
        if shape == Shape::Passing
            && tree.parent(prefix) == Some(tree.root())
            && widest.len() < MAX_WIDEST
            && !widest.contains(&prefix)
        {
            widest.push(prefix);
        }
    }

    /// Whether a prefix, or an address, shows this shape.
    fn shows(&self, tree: &PrefixTree, id: NodeId, shape: Shape, now_ms: u64) -> bool {
        let usual = self.usual.get();
        let count = |event| tree.count_everywhere(id, event, now_ms) as f32;
        let requests = count(Event::Request).max(1.0);
        let per_request = |event| count(event) / requests;
        match shape {
            Shape::Novel => per_request(Event::Novel) > (3.0 * usual.novel_share).clamp(0.5, 0.9),
            Shape::Errors => per_request(Event::Error) > (3.0 * usual.error_share).clamp(0.5, 0.9),
            Shape::Costly => {
                per_request(Event::UpstreamMs) > (COSTLY_TIMES * usual.upstream_ms_per_request).max(CHEAP_MS)
            }
            Shape::Monotonous => {
                // Good neighbours who ask for other things are no excuse for a prefix.
                let most = match tree.is_address(id) {
                    true => MONOTONOUS,
                    false => (usual.top_share + MONOTONOUS_MORE).min(MONOTONOUS),
                };
                usual.top_share < 0.6 && tree.top_target(id).share() > most
            }
            // Its prefix was compared with the others.
            Shape::Rapid => requests > RAPID,
            Shape::Passing => usual.pace > STAYING && self.is_passing(tree, id, now_ms),
            Shape::Mass => true,
        }
    }

    /// What becomes of a client in a suspect prefix: who takes part in what makes it so is stopped, and who may is
    /// asked to prove that it does not.
    fn judge(&self, scene: &Scene<'_>, prefix: NodeId, mark: Mark, requests: u32) -> Verdict {
        let (tree, client, now_ms) = (&*scene.tree, scene.client, scene.now_ms);
        let came_ms = now_ms.saturating_sub(tree.age_ms(client, now_ms));
        if mark.since_ms.saturating_sub(came_ms) > NEWCOMER_MS {
            return Verdict::Continue;
        }
        let Some(shape) = Shape::of(mark.kind) else { return Verdict::Continue };
        let takes_part = || {
            self.shows(tree, client, shape, now_ms)
                && (shape != Shape::Monotonous
                    || tree.top_target(client).target == tree.top_target(prefix).target)
        };
        let is_told_apart = !matches!(shape, Shape::Mass | Shape::Costly) && requests >= FEW_REQUESTS;
        if is_told_apart && takes_part() {
            return if is_one_network(tree, prefix) { self.verdict } else { Verdict::Challenge };
        }
        // The narrowest suspect prefix may be too narrow for what the ones around it hold.
        let around = || {
            std::iter::successors(Some(prefix), |id| tree.parent(*id)).filter_map(|id| {
                let mark = tree.mark(id, now_ms)?;
                let is_new = mark.since_ms.saturating_sub(came_ms) <= NEWCOMER_MS;
                Shape::of(mark.kind).filter(|_| is_new).map(|shape| (id, shape))
            })
        };
        // What costs much may come so seldom that waiting for more of it would be too late: one answer tells. Who was
        // found out costs nothing since, and is let go when it stops asking or has solved its challenge.
        let is_costly = around().any(|(id, shape)| {
            let is_dear = || self.shows(tree, client, shape, now_ms) && is_dearer(tree, client, id, now_ms);
            shape == Shape::Costly && (scene.count(Event::Violation) > 0 || is_dear())
        });
        if is_costly {
            return Verdict::Challenge;
        }
        if is_told_apart || shape == Shape::Costly && requests >= FEW_REQUESTS {
            return Verdict::Continue;
        }
        let is_of_mass = around().any(|(id, shape)| {
            let shares_target = || tree.top_target(client).target == tree.top_target(id).target;
            self.is_many(tree, id, now_ms)
                && match shape {
                    Shape::Rapid => false,
                    Shape::Monotonous => shares_target(),
                    _ => true,
                }
        });
        if is_of_mass { Verdict::Challenge } else { Verdict::Continue }
    }

    /// Whether those in a prefix ask once and leave. Of everybody those are left out who are known for it by their
    /// prefix: they say nothing about the others.
    fn is_passing(&self, tree: &PrefixTree, id: NodeId, now_ms: u64) -> bool {
        let mut widest = self.widest.borrow_mut();
        widest.retain(|other| tree.mark(*other, now_ms).is_some());
        // The prefixes that make everybody look so are found first.
        let (left_out, share) = if id == tree.root() { (&widest[..], 2) } else { (&[][..], 1) };
        let count = |event| {
            let of_others = left_out.iter().map(|other| tree.count(*other, event, now_ms)).sum::<u32>();
            tree.count(id, event, now_ms).saturating_sub(of_others)
        };
        let (requests, addresses) = (count(Event::Request), count(Event::Address));
        self.is_mass(requests / share, addresses) && (requests as f32) < PASSING * addresses as f32
    }

    fn is_mass(&self, requests: u32, addresses: u32) -> bool {
        requests > MASS_TIMES.saturating_mul(self.limit) && addresses > MASS_ADDRESSES
    }

    /// Whether a prefix holds so many who do so much together that none of them has to show a shape of its own.
    fn is_many(&self, tree: &PrefixTree, id: NodeId, now_ms: u64) -> bool {
        self.is_mass(tree.count(id, Event::Request, now_ms), tree.count(id, Event::Address, now_ms))
    }

    /// Whether the addresses of a prefix ask at several times the pace of all others, and keep that up.
    fn is_rapid(&self, tree: &PrefixTree, prefix: NodeId, now_ms: u64) -> bool {
        let count = |id, event| tree.count_everywhere(id, event, now_ms);
        let (own, addresses) = (count(prefix, Event::Request), count(prefix, Event::Address).max(1));
        let all = |event| count(tree.root(), event);
        let others = all(Event::Address).saturating_sub(addresses);
        let of_others = all(Event::Request).saturating_sub(own) as f32 / others.max(1) as f32;
        let pace = own as f32 / addresses as f32;
        let is_fast = others >= OTHERS && pace > RAPID.max(RAPID_TIMES * of_others);
        let mut pacers = self.pacers.borrow_mut();
        pacers.retain(|pacer| now_ms.saturating_sub(pacer.last_ms) <= PACER_GONE_MS);
        let known = pacers.iter_mut().find(|pacer| pacer.prefix == prefix);
        let Some(pacer) = known.filter(|_| is_fast) else {
            pacers.retain(|pacer| pacer.prefix != prefix);
            if is_fast && pacers.len() < MAX_PACERS {
                pacers.push(Pacer { prefix, since_ms: now_ms, last_ms: now_ms, looks: 0 });
            }
            return false;
        };
        (pacer.last_ms, pacer.looks) = (now_ms, pacer.looks + 1);
        let elapsed_ms = now_ms - pacer.since_ms;
        let since = (pacer.looks * PrefixTree::LOOK_EVERY) as f32;
        // Half of the pace tells that it goes on: nobody asks evenly.
        let goes_on = since / addresses as f32 > RAPID / 2.0 * elapsed_ms as f32 / tree.window_ms() as f32;
        elapsed_ms >= RAPID_MS && goes_on
    }

    /// Takes the last window for usual, unless an attack was in it.
    fn learn(&self, tree: &PrefixTree, now_ms: u64) {
        let root = tree.root();
        let is_first = self.usual.get().top_share == 1.0;
        // What is known of the window in progress is better than nothing.
        let last = |event| match is_first {
            true => tree.count(root, event, now_ms),
            false => tree.last_window(root, event, now_ms),
        };
        let requests = last(Event::Request);
        let calm = self.alarmed_ms.get().is_none_or(|alarmed| now_ms.saturating_sub(alarmed) > SUSPECT_MS);
        if !calm || requests < TEACHING_REQUESTS {
            return;
        }
        let share = |event| last(event) as f32 / requests as f32;
        let pace = requests as f32 / last(Event::Address).max(1) as f32;
        let toward = |old: f32, new: f32| old + LEARNING * (new - old);
        let usual = self.usual.get();
        self.usual.set(Usual {
            novel_share: toward(usual.novel_share, share(Event::Novel)),
            error_share: toward(usual.error_share, share(Event::Error)),
            upstream_ms_per_request: toward(usual.upstream_ms_per_request, share(Event::UpstreamMs)),
            pace: match usual.pace {
                0.0 => pace,
                known => toward(known, pace),
            },
            top_share: match usual.top_share {
                // The first thing that is known.
                1.0 => tree.top_target(root).share().min(0.999),
                known => toward(known, tree.top_target(root).share()),
            },
        });
    }
}

impl Shape {
    const ALL: [Self; 7] =
        [Self::Costly, Self::Novel, Self::Errors, Self::Monotonous, Self::Rapid, Self::Passing, Self::Mass];

    fn of(kind: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|shape| *shape as u8 == kind)
    }
}

/// Whether a prefix, or an address in it, costs the upstreams many times what everybody outside of the prefix does at
/// this time: an upstream that is slow for all is not its clients' fault. Where nobody else is there, nobody is dearer.
fn is_dearer(tree: &PrefixTree, id: NodeId, prefix: NodeId, now_ms: u64) -> bool {
    // A core's own clients are compared with each other.
    let count = |id, event| tree.count(id, event, now_ms);
    let outside = |event| count(tree.root(), event).saturating_sub(count(prefix, event));
    let cost = |ms: u32, requests: u32| ms as f32 / requests.max(1) as f32;
    let others = outside(Event::Request);
    others >= FEW_OF_OTHERS
        && cost(count(id, Event::UpstreamMs), count(id, Event::Request))
            > COSTLY_TIMES * cost(outside(Event::UpstreamMs), others)
}

/// Whether a prefix is so narrow that its addresses are somebody's, and not just anybody's.
fn is_one_network(tree: &PrefixTree, prefix: NodeId) -> bool {
    tree.prefix(prefix).is_some_and(|prefix| {
        let bits = if prefix.address().is_ipv4() { NETWORK_BITS4 } else { NETWORK_BITS6 };
        prefix.length_bits() >= bits
    })
}

/// Whether a great part of all requests comes from a prefix from which nearly none came before, on a site that is known
/// for long enough to say so.
fn is_new_mass(tree: &PrefixTree, prefix: NodeId, now_ms: u64) -> bool {
    let (root, window_ms) = (tree.root(), tree.window_ms());
    let share = |count: &dyn Fn(NodeId) -> u32| count(prefix) as f32 / count(root).max(1) as f32;
    let last = |id| tree.last_window(id, Event::Request, now_ms);
    let is_known = now_ms >= MASS_WINDOWS * window_ms && last(root) >= TEACHING_REQUESTS;
    let is_new = tree.age_ms(prefix, now_ms) <= window_ms
        && tree.age_ms(root, now_ms) >= MASS_WINDOWS * window_ms
        || share(&last) < MASS_SHARE / 10.0;
    is_known && is_new && share(&|id| tree.count(id, Event::Request, now_ms)) > MASS_SHARE
}

impl Classifier for Swarm {
    fn name(&self) -> &'static str {
        Reason::Swarm.name()
    }

    fn interest(&self) -> Interest {
        Interest::Prefixes
    }

    fn on_request(&self, scene: &mut Scene<'_>, _: &RequestView<'_>, visit: &Visit) -> Decision {
        // Prefixes whose counts go in step are due together: each of them is looked at, or the wider ones never would
        // be.
        let mut due = visit.due;
        while let Some(prefix) = due {
            if scene.tree.is_due(prefix) {
                self.look(scene.tree, prefix, scene.stressed_ms.is_some(), scene.now_ms);
            }
            due = scene.tree.parent(prefix);
        }
        let Some((prefix, mark)) = visit.suspect else { return Decision::CONTINUE };
        match self.judge(scene, prefix, mark, visit.requests) {
            Verdict::Continue => Decision::CONTINUE,
            verdict => Decision::new(verdict, Reason::Swarm),
        }
    }

    fn on_tick(&self, tree: &mut PrefixTree, now_ms: u64) {
        let window = now_ms / tree.window_ms();
        if self.learned.replace(window) != window || self.usual.get().top_share == 1.0 {
            self.learn(tree, now_ms);
        }
    }
}
