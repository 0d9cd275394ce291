//! The last word: who is exempt, what is only tried out, whose block is still in force, and what is made known.

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::hooks::{
    Arbiter, Classifier, Decision, Field, Load, Peer, Reply, RequestView, Scene, Via,
};
use tidegate_core::{Event, IpPrefix, Mark, NodeId, PrefixTree, Reason, Verdict};

use crate::Settings;
use crate::challenge::Challenger;
use crate::classifiers::filters::{TRIED_OUT, contains};
use crate::defence::{Notice, Order, Shared};
use crate::stress::{Upstreams, Watch};
use crate::{classifiers, view};

/// Windows in which a client may leave challenges unsolved before it is taken for a program: many at once may be tabs
/// that are opened again, or several people behind one address.
const UNSOLVED: u32 = 3;

#[derive(Debug)]
pub(crate) struct Judge {
    inner: RefCell<Inner>,
    core: usize,
    shared: Arc<Shared>,
    upstreams: Arc<Upstreams>,
    watch: RefCell<Watch>,
    /// How many orders this core has taken note of.
    ordered: Cell<u64>,
    /// The request for a view that was answered last.
    viewed: Cell<u64>,
    scratch: RefCell<Vec<NodeId>>,
}

/// What changes with the settings.
#[derive(Debug)]
struct Inner {
    settings: Settings,
    challenger: Challenger,
    /// Which settings these are.
    version: u64,
}

impl Judge {
    pub(crate) fn new(
        settings: Settings,
        challenger: Challenger,
        core: usize,
        shared: Arc<Shared>,
        upstreams: Arc<Upstreams>,
    ) -> Self {
        let ordered = Cell::new(shared.orders_count());
        let version = shared.settings_version();
        Self {
            inner: RefCell::new(Inner { settings, challenger, version }),
            core,
            shared,
            upstreams,
            watch: RefCell::default(),
            ordered,
            viewed: Cell::new(0),
            scratch: RefCell::default(),
        }
    }

    /// What a block is about: the address, or of IPv6 the network that counts as one.
    fn subject(scene: &Scene<'_>) -> IpPrefix {
        scene.tree.prefix(scene.client).unwrap_or_else(|| whole(scene.peer.address))
    }

    /// Counts a decision against a client, and tells of it: of every block, and of others now and then.
    fn make_known(&self, scene: &mut Scene<'_>, decision: Decision, dry_run: bool) {
        scene.tree.add(scene.client, Event::Violation, 1, scene.now_ms);
        let violations = scene.count(Event::Violation);
        self.shared.count(decision.reason, dry_run);
        let is_block = matches!(decision.verdict, Verdict::Block(_));
        if violations.is_power_of_two() || is_block && !dry_run {
            self.shared.tell(Notice {
                subject: Self::subject(scene),
                address: scene.peer.address,
                forwarded: scene.peer.via == Via::Proxy,
                decision,
                dry_run,
                requests: scene.count(Event::Request),
                violations,
            });
        }
    }

    /// A client that is challenged again and again and goes on without an answer is no browser: it is blocked, unless
    /// somebody else behind its address has solved one.
    fn insist(&self, scene: &mut Scene<'_>, decision: Decision) -> Decision {
        if decision.verdict != Verdict::Challenge
            || self.shared.passes.was_shown(scene.peer.address, scene.now_ms)
            || scene.tree.strike(scene.client, scene.now_ms) <= UNSOLVED
        {
            return decision;
        }
        Decision { verdict: Verdict::Block(self.inner.borrow().settings.block_for), ..decision }
    }
}

impl Inner {
    /// Whether nothing is done about the client. Where its User-Agent tells, nothing is as long as the head of its
    /// request is not at hand: what there is against it counts when it is.
    fn is_exempt(&self, scene: &Scene<'_>) -> bool {
        let has = |agent: &str| {
            let Some(request) = scene.request else { return true };
            contains(request.field(Field::UserAgent).unwrap_or_default(), agent)
        };
        let mut exempt = self.settings.exempt.iter();
        exempt.any(|exemption| exemption.source.contains(scene.peer.address) && has(&exemption.user_agent))
    }

    fn is_tried_out(&self, classifier: &str, reason: Reason) -> bool {
        self.settings.dry_run
            || classifier == TRIED_OUT
            || self.settings.rules.iter().any(|rule| rule.reason == reason && rule.dry_run)
    }

    fn has_pass(&self, scene: &Scene<'_>) -> bool {
        let cookie = scene.request.and_then(|request| request.field(Field::Cookie));
        cookie.is_some_and(|cookie| self.challenger.is_solved(cookie, scene.peer.address, scene.now_ms))
    }
}

impl Arbiter for Judge {
    fn decide(&self, scene: &mut Scene<'_>, classifier: &'static str, decision: Decision) -> Decision {
        // Without a node of its own, what was counted is not this client's.
        if !scene.tree.is_address(scene.client) {
            return Decision::CONTINUE;
        }
        let dry_run = {
            let inner = self.inner.borrow();
            if decision.verdict == Verdict::Challenge && inner.has_pass(scene) {
                self.shared.passes.shown(scene.peer.address, scene.now_ms);
                return Decision::CONTINUE;
            }
            if inner.is_exempt(scene) {
                return Decision::CONTINUE;
            }
            inner.is_tried_out(classifier, decision.reason)
        };
        let decision = self.insist(scene, decision);
        let is_block = matches!(decision.verdict, Verdict::Block(_));
        // Of what is left of its connections nobody wants to hear once more.
        if is_block && !dry_run && scene.tree.mark(scene.client, scene.now_ms).is_some() {
            return decision;
        }
        self.make_known(scene, decision, dry_run);
        if dry_run {
            return Decision::CONTINUE;
        }
        if let Verdict::Block(time) = decision.verdict {
            scene.tree.set_mark(scene.client, mark(time, decision.reason, scene.now_ms));
            let (address, forwarded) = (scene.peer.address, scene.peer.via == Via::Proxy);
            self.shared.order(Order::Block { address, time, reason: decision.reason, forwarded });
        }
        decision
    }

    fn marked(&self, scene: &mut Scene<'_>) -> Decision {
        if self.inner.borrow().is_exempt(scene) {
            return Decision::CONTINUE;
        }
        self.shared.count(Reason::Blocked, false);
        Decision::new(Verdict::Reset, Reason::Blocked)
    }

    fn note(&self, scene: &mut Scene<'_>, decision: Decision) {
        self.make_known(scene, decision, false);
    }

    fn reply(&self, peer: Peer, request: &RequestView<'_>, decision: Decision, now_ms: u64) -> Reply {
        if decision.verdict == Verdict::Challenge {
            return self.inner.borrow().challenge(peer.address, request, now_ms);
        }
        let (status, fields) = match decision.reason {
            Reason::Stress => (503, "Retry-After: 5\r\n"),
            Reason::Form | Reason::Content | Reason::Blocked => (403, ""),
            _ if matches!(decision.verdict, Verdict::Refuse) => (429, "Retry-After: 10\r\n"),
            _ => (403, ""),
        };
        Reply { status, fields: fields.into(), page: Vec::new() }
    }

    fn on_tick(&self, tree: &mut PrefixTree, load: &Load, now_ms: u64) -> Option<u64> {
        let (count, orders) = self.shared.orders_since(self.ordered.get());
        self.ordered.set(count);
        for order in orders {
            match order {
                Order::Block { address, time, reason, forwarded } => {
                    block(tree, address, forwarded, mark(time, reason, now_ms), now_ms);
                }
                Order::Lift(prefix) => self.lift(tree, prefix, now_ms),
            }
        }
        if let Some((number, wanted)) = self.shared.wanted(self.viewed.get()) {
            self.viewed.set(number);
            self.shared.show(self.core, number, view::look(tree, &wanted, now_ms));
        }
        self.shared.exchange(self.core, tree, now_ms);
        let limits = self.inner.borrow().settings.stress;
        let mut watch = self.watch.borrow_mut();
        let cause = watch.look(&limits, load, &self.upstreams, &self.shared.host_stressed, now_ms);
        self.shared.note_stress(self.core, watch.since_ms().is_some(), cause);
        watch.since_ms()
    }

    fn renewed(&self) -> Option<Vec<Box<dyn Classifier>>> {
        let version = self.shared.settings_version();
        if self.inner.borrow().version == version {
            return None;
        }
        let settings = self.shared.settings();
        let challenger = self.shared.challenger(&settings);
        let chain = classifiers::all(&settings, self.shared.seed, &self.upstreams, &self.shared.feed);
        *self.inner.borrow_mut() = Inner { settings, challenger, version };
        Some(chain)
    }
}

impl Inner {
    fn challenge(&self, client: IpAddr, request: &RequestView<'_>, now_ms: u64) -> Reply {
        let task = self.challenger.task(client, now_ms);
        let never_kept = "Cache-Control: no-store\r\n";
        if self.challenger.asks_for_work() || !matches!(request.method, b"GET" | b"HEAD") {
            let page = self.challenger.page(&task);
            let fields = format!("{never_kept}Retry-After: 5\r\n");
            return Reply { status: 503, fields: fields.into_bytes(), page };
        }
        let mut fields = format!("{never_kept}{}Location: ", self.challenger.set_cookie(&task)).into_bytes();
        // A path that begins with two slashes would be taken for another host.
        fields.extend_from_slice(b"/");
        let start = request.path.iter().take_while(|byte| **byte == b'/').count();
        fields.extend_from_slice(request.path.get(start..).unwrap_or_default());
        if let Some(query) = request.query {
            fields.push(b'?');
            fields.extend_from_slice(query);
        }
        fields.extend_from_slice(b"\r\n");
        Reply { status: 307, fields, page: Vec::new() }
    }
}

impl Judge {
    /// Forgets what addresses in a prefix were blocked for: they begin anew.
    fn lift(&self, tree: &mut PrefixTree, prefix: IpPrefix, now_ms: u64) {
        let mut found = self.scratch.borrow_mut();
        let within = |id: &NodeId| tree.prefix(*id).is_some_and(|own| overlaps(prefix, own));
        found.extend(tree.ids().filter(|id| tree.is_address(*id)).filter(within));
        for id in found.drain(..) {
            tree.forgive(id, now_ms);
        }
    }
}

fn mark(time: Duration, reason: Reason, now_ms: u64) -> Mark {
    let until_ms = now_ms.saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    Mark { since_ms: now_ms, until_ms, kind: reason as u8 }
}

/// Marks an address as blocked. Who is not known here meets the block list when it comes, unless it comes through a
/// proxy.
fn block(tree: &mut PrefixTree, address: IpAddr, forwarded: bool, mark: Mark, now_ms: u64) {
    let id = match tree.find(address) {
        Some(id) => id,
        None if forwarded => {
            let id = tree.locate(address, now_ms);
            // What makes it worth keeping.
            tree.add(id, Event::Violation, 1, now_ms);
            id
        }
        None => return,
    };
    if tree.is_address(id) && tree.mark(id, now_ms).is_none_or(|known| known.until_ms < mark.until_ms) {
        tree.set_mark(id, mark);
    }
}

/// Whether either prefix holds the other.
pub(crate) fn overlaps(a: IpPrefix, b: IpPrefix) -> bool {
    a.contains(b.address()) || b.contains(a.address())
}

pub(crate) fn whole(address: IpAddr) -> IpPrefix {
    let length = if address.to_canonical().is_ipv4() { 32 } else { 64 };
    // Both lengths are within their family's.
    IpPrefix::new(address.to_canonical(), length).unwrap_or_else(|_| unreachable_prefix())
}

fn unreachable_prefix() -> IpPrefix {
    "::/128".parse().unwrap_or_else(|_| unreachable!("a valid prefix"))
}
