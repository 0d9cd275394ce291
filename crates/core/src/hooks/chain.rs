//! One data core's hooks: who is asked, in which order, and what becomes of it.

use std::cell::{Cell, RefCell};
use std::net::IpAddr;

use super::{
    Arbiter, Classifier, Decision, Interest, Load, Peer, Reply, RequestLine, RequestView, ResponseView,
    Scene, Slow, Via, hash_target,
};
use crate::{Event, NodeId, PrefixTree, Verdict, Visit};

/// One data core's hooks.
#[derive(Debug)]
pub struct Chain {
    tree: RefCell<PrefixTree>,
    classifiers: RefCell<Classifiers>,
    arbiter: Box<dyn Arbiter>,
    seed: u64,
    stressed_ms: Cell<Option<u64>>,
}

/// The classifiers of a chain, in the order in which they are asked, and what they look at of what not all do.
#[derive(Debug)]
struct Classifiers {
    all: Vec<Box<dyn Classifier>>,
    /// The places of those that look at requests, and at which.
    of_requests: Vec<(usize, Interest)>,
    /// The places of those that look at responses.
    of_responses: Vec<usize>,
    any_of_lines: bool,
    any_of_starts: bool,
}

impl Classifiers {
    fn new(all: Vec<Box<dyn Classifier>>) -> Self {
        let interests = all.iter().map(|classifier| classifier.interest()).enumerate();
        let responses = all.iter().enumerate().filter(|(_, classifier)| classifier.looks_at_responses());
        Self {
            of_requests: interests.filter(|(_, interest)| *interest != Interest::Never).collect(),
            of_responses: responses.map(|(place, _)| place).collect(),
            any_of_lines: all.iter().any(|classifier| classifier.looks_at_lines()),
            any_of_starts: all.iter().any(|classifier| classifier.looks_at_starts()),
            all,
        }
    }
}

impl Interest {
    /// Whether a request is one of those. Nearly all hits are none that any classifier has something to say of, which
    /// costs less to find out here than to ask it.
    #[inline]
    fn includes(self, scene: &Scene<'_>, request: &RequestView<'_>, visit: &Visit) -> bool {
        match self {
            Self::Never => false,
            Self::Beyond(Event::Request, limit) => visit.requests > limit,
            Self::Beyond(event, limit) => scene.tree.may_exceed(scene.client, event, limit),
            Self::Prefixes => visit.due.is_some() || visit.suspect.is_some(),
            Self::Parts => request.fields.part().is_some(),
            Self::Stress => scene.stressed_ms.is_some(),
            Self::Always => true,
        }
    }
}

impl Chain {
    /// Classifiers in the order in which they are asked. `seed` keeps what targets hash to a secret.
    pub fn new(
        tree: PrefixTree,
        classifiers: Vec<Box<dyn Classifier>>,
        arbiter: Box<dyn Arbiter>,
        seed: u64,
    ) -> Self {
        let (tree, classifiers) = (RefCell::new(tree), RefCell::new(Classifiers::new(classifiers)));
        Self { tree, classifiers, arbiter, seed, stressed_ms: Cell::new(None) }
    }

    /// Since when the server is under stress; `None`: it is not.
    pub fn stressed_ms(&self) -> Option<u64> {
        self.stressed_ms.get()
    }

    /// Finds the client of a request that a trusted proxy passes on.
    pub fn locate(&self, address: IpAddr, now_ms: u64) -> NodeId {
        self.tree.borrow_mut().locate(address, now_ms)
    }

    /// A connection was accepted. The handle is the connection's until [`Self::close`].
    pub fn connect(&self, peer: Peer, now_ms: u64) -> (NodeId, Decision) {
        let mut tree = self.tree.borrow_mut();
        let client = tree.locate(peer.address, now_ms);
        tree.open(client);
        let open = tree.open_everywhere(client);
        if peer.via == Via::Proxy {
            return (client, Decision::CONTINUE);
        }
        tree.add(client, Event::Connection, 1, now_ms);
        let marked = tree.mark(client, now_ms).is_some() && tree.is_address(client);
        let mut scene = self.scene(&mut tree, client, peer, now_ms);
        let decision = match marked {
            true => self.arbiter.marked(&mut scene),
            false => {
                let classifiers = self.classifiers.borrow();
                self.ask(&mut scene, &classifiers.all, |classifier, scene| classifier.on_connect(scene, open))
            }
        };
        (client, decision)
    }

    /// A connection was closed.
    pub fn close(&self, client: NodeId, peer: Peer, now_ms: u64) {
        let mut tree = self.tree.borrow_mut();
        tree.close(client);
        let mut scene = self.scene(&mut tree, client, peer, now_ms);
        self.classifiers.borrow().all.iter().for_each(|classifier| classifier.on_close(&mut scene));
    }

    /// Whether anybody looks at first lines.
    #[inline]
    pub fn looks_at_lines(&self) -> bool {
        self.classifiers.borrow().any_of_lines
    }

    /// A request's first line is here.
    pub fn request_line(&self, client: NodeId, peer: Peer, line: &RequestLine<'_>, now_ms: u64) -> Decision {
        self.event(client, peer, now_ms, |classifier, scene| classifier.on_request_line(scene, line))
    }

    /// A request's head is complete.
    #[inline]
    pub fn request(&self, client: NodeId, peer: Peer, request: &RequestView<'_>, now_ms: u64) -> Decision {
        let mut tree = self.tree.borrow_mut();
        let target = hash_target(self.seed, request.path, request.query);
        let visit = tree.request(client, (target >> 32) as u32, now_ms);
        let mut scene = Scene { request: Some(request), ..self.scene(&mut tree, client, peer, now_ms) };
        if visit.mark.is_some() && scene.tree.is_address(client) {
            return self.arbiter.marked(&mut scene);
        }
        let classifiers = self.classifiers.borrow();
        let mut delayed = Decision::CONTINUE;
        for (place, interest) in &classifiers.of_requests {
            // In its turn: what those before it have counted is counted.
            if !interest.includes(&scene, request, &visit) {
                continue;
            }
            let Some(classifier) = classifiers.all.get(*place) else { continue };
            let decision = classifier.on_request(&mut scene, request, &visit);
            if let Some(last) = self.weigh(&mut scene, classifier.name(), decision, &mut delayed) {
                return last;
            }
        }
        delayed
    }

    /// A piece of a request's body has arrived.
    pub fn body(&self, client: NodeId, peer: Peer, piece: &[u8], received: u64, now_ms: u64) -> Decision {
        self.event(client, peer, now_ms, |classifier, scene| classifier.on_body(scene, piece, received))
    }

    /// Whether anybody looks at the start of responses.
    #[inline]
    pub fn looks_at_starts(&self) -> bool {
        self.classifiers.borrow().any_of_starts
    }

    /// A response is to be sent.
    pub fn response_start(
        &self,
        client: NodeId,
        peer: Peer,
        response: &ResponseView<'_>,
        now_ms: u64,
    ) -> Decision {
        self.event(client, peer, now_ms, |classifier, scene| classifier.on_response_start(scene, response))
    }

    /// A response ended.
    pub fn response(&self, client: NodeId, peer: Peer, response: &ResponseView<'_>, now_ms: u64) -> Decision {
        let mut tree = self.tree.borrow_mut();
        let mut scene = self.scene(&mut tree, client, peer, now_ms);
        let classifiers = self.classifiers.borrow();
        let asked = classifiers.of_responses.iter().filter_map(|place| classifiers.all.get(*place));
        self.ask(&mut scene, asked, |classifier, scene| classifier.on_response(scene, response))
    }

    /// A connection is being ended because its client was too slow.
    pub fn slow(&self, client: NodeId, peer: Peer, slow: Slow, now_ms: u64) -> Decision {
        self.tree.borrow_mut().add(client, Event::Slow, 1, now_ms);
        self.event(client, peer, now_ms, |classifier, scene| classifier.on_slow(scene, slow))
    }

    /// Others than classifiers have turned a client's request away.
    pub fn note(&self, client: NodeId, peer: Peer, decision: Decision, now_ms: u64) {
        let mut tree = self.tree.borrow_mut();
        self.arbiter.note(&mut self.scene(&mut tree, client, peer, now_ms), decision);
    }

    /// Wants to be called several times a second.
    pub fn tick(&self, load: &Load, now_ms: u64) {
        let mut tree = self.tree.borrow_mut();
        self.stressed_ms.set(self.arbiter.on_tick(&mut tree, load, now_ms));
        if let Some(renewed) = self.arbiter.renewed() {
            *self.classifiers.borrow_mut() = Classifiers::new(renewed);
        }
        self.classifiers.borrow().all.iter().for_each(|classifier| classifier.on_tick(&mut tree, now_ms));
    }

    /// The response that carries a decision to the client.
    pub fn reply(&self, peer: Peer, request: &RequestView<'_>, decision: Decision, now_ms: u64) -> Reply {
        self.arbiter.reply(peer, request, decision, now_ms)
    }

    /// Looks into the tree.
    pub fn with_tree<T>(&self, look: impl FnOnce(&mut PrefixTree) -> T) -> T {
        look(&mut self.tree.borrow_mut())
    }

    #[inline]
    fn scene<'s>(&self, tree: &'s mut PrefixTree, client: NodeId, peer: Peer, now_ms: u64) -> Scene<'s> {
        Scene { tree, client, peer, request: None, stressed_ms: self.stressed_ms.get(), now_ms }
    }

    fn event(
        &self,
        client: NodeId,
        peer: Peer,
        now_ms: u64,
        ask: impl Fn(&dyn Classifier, &mut Scene<'_>) -> Decision,
    ) -> Decision {
        let mut tree = self.tree.borrow_mut();
        let mut scene = self.scene(&mut tree, client, peer, now_ms);
        self.ask(&mut scene, &self.classifiers.borrow().all, ask)
    }

    #[inline]
    fn ask<'c>(
        &self,
        scene: &mut Scene<'_>,
        asked: impl IntoIterator<Item = &'c Box<dyn Classifier>>,
        ask: impl Fn(&dyn Classifier, &mut Scene<'_>) -> Decision,
    ) -> Decision {
        let mut delayed = Decision::CONTINUE;
        for classifier in asked {
            let decision = ask(&**classifier, scene);
            if let Some(last) = self.weigh(scene, classifier.name(), decision, &mut delayed) {
                return last;
            }
        }
        delayed
    }

    /// What becomes of a classifier's decision: `Some`: no other is asked. Who is delayed has to come past the others.
    #[inline]
    fn weigh(
        &self,
        scene: &mut Scene<'_>,
        classifier: &'static str,
        decision: Decision,
        delayed: &mut Decision,
    ) -> Option<Decision> {
        if decision.is_continue() {
            return None;
        }
        let decision = self.arbiter.decide(scene, classifier, decision);
        match decision.verdict {
            Verdict::Continue => {}
            Verdict::Delay => *delayed = delayed.or(decision),
            _ => return Some(decision),
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::Source;
    use super::*;
    use crate::{Reason, TreeConfig};

    /// Objects to bodies with a word in them, and to nothing else.
    #[derive(Debug)]
    struct Word;

    impl Classifier for Word {
        fn name(&self) -> &'static str {
            "word"
        }

        fn on_body(&self, scene: &mut Scene<'_>, piece: &[u8], received: u64) -> Decision {
            assert_eq!((scene.count(Event::Connection), received), (1, piece.len() as u64));
            match piece {
                b"word" => Decision::new(Verdict::Reset, Reason::Content),
                _ => Decision::CONTINUE,
            }
        }
    }

    /// Objects to a method as soon as its line is here, and to responses that say too much.
    #[derive(Debug)]
    struct Early;

    impl Classifier for Early {
        fn name(&self) -> &'static str {
            "word"
        }

        fn looks_at_lines(&self) -> bool {
            true
        }

        fn on_request_line(&self, _: &mut Scene<'_>, line: &RequestLine<'_>) -> Decision {
            match line.method {
                b"BREW" => Decision::new(Verdict::Drop, Reason::Form),
                _ => Decision::CONTINUE,
            }
        }

        fn looks_at_starts(&self) -> bool {
            true
        }

        fn on_response_start(&self, _: &mut Scene<'_>, response: &ResponseView<'_>) -> Decision {
            match response.status {
                500 => Decision::new(Verdict::Refuse, Reason::Content),
                _ => Decision::CONTINUE,
            }
        }
    }

    #[test]
    fn first_lines_and_responses_that_begin_are_judged_where_somebody_looks_at_them() {
        let tree = || PrefixTree::new(TreeConfig { memory_bytes: 1 << 20, window_ms: 10_000, seed: 1 });
        let blind = Chain::new(tree(), vec![Box::new(Word)], Box::new(Lenient), 1);
        assert!(!blind.looks_at_lines() && !blind.looks_at_starts());
        let chain = Chain::new(tree(), vec![Box::new(Word), Box::new(Early)], Box::new(Lenient), 1);
        assert!(chain.looks_at_lines() && chain.looks_at_starts());
        let peer = Peer { address: IpAddr::from([10, 0, 0, 2]), via: Via::Direct };
        let (client, _) = chain.connect(peer, 0);
        let line =
            |method| chain.request_line(client, peer, &RequestLine { method, target: b"/" }, 0).verdict;
        assert_eq!((line(b"GET"), line(b"BREW")), (Verdict::Continue, Verdict::Drop));
        let start = |status| {
            let response = ResponseView {
                path: b"/",
                query: None,
                authority: b"h",
                variant: 0,
                status,
                source: Source::Passed,
                upstream_ms: 1,
            };
            chain.response_start(client, peer, &response, 0).verdict
        };
        assert_eq!((start(200), start(500)), (Verdict::Continue, Verdict::Refuse));
    }

    /// Lets everybody from 10.0.0.1 do what they like.
    #[derive(Debug)]
    struct Lenient;

    impl Arbiter for Lenient {
        fn decide(&self, scene: &mut Scene<'_>, classifier: &'static str, decision: Decision) -> Decision {
            assert_eq!(classifier, "word");
            if scene.peer.address == IpAddr::from([10, 0, 0, 1]) { Decision::CONTINUE } else { decision }
        }

        fn marked(&self, _: &mut Scene<'_>) -> Decision {
            Decision::CONTINUE
        }

        fn reply(&self, _: Peer, _: &RequestView<'_>, _: Decision, _: u64) -> Reply {
            Reply::default()
        }
    }

    #[test]
    fn classifier_objects_and_the_arbiter_has_the_last_word() {
        let tree = PrefixTree::new(TreeConfig { memory_bytes: 1 << 20, window_ms: 10_000, seed: 1 });
        let chain = Chain::new(tree, vec![Box::new(Word)], Box::new(Lenient), 1);
        let verdict = |last: u8, piece: &[u8]| {
            let peer = Peer { address: IpAddr::from([10, 0, 0, last]), via: Via::Direct };
            let (client, decision) = chain.connect(peer, 0);
            assert!(decision.is_continue());
            let verdict = chain.body(client, peer, piece, piece.len() as u64, 0).verdict;
            chain.close(client, peer, 0);
            verdict
        };
        assert_eq!(verdict(1, b"word"), Verdict::Continue);
        assert_eq!(verdict(2, b"word"), Verdict::Reset);
        assert_eq!(verdict(3, b"other"), Verdict::Continue);
    }

    /// Delays whatever is asked.
    #[derive(Debug)]
    struct Later;

    impl Classifier for Later {
        fn name(&self) -> &'static str {
            "word"
        }

        fn on_body(&self, _: &mut Scene<'_>, _: &[u8], _: u64) -> Decision {
            Decision::new(Verdict::Delay, Reason::Form)
        }
    }

    #[test]
    fn who_is_delayed_has_to_come_past_the_other_classifiers() {
        let tree = PrefixTree::new(TreeConfig { memory_bytes: 1 << 20, window_ms: 10_000, seed: 1 });
        let chain = Chain::new(tree, vec![Box::new(Later), Box::new(Word)], Box::new(Lenient), 1);
        let peer = Peer { address: IpAddr::from([10, 0, 0, 2]), via: Via::Direct };
        let (client, _) = chain.connect(peer, 0);
        let verdict = |piece: &[u8]| chain.body(client, peer, piece, piece.len() as u64, 0).verdict;
        assert_eq!((verdict(b"other"), verdict(b"word")), (Verdict::Delay, Verdict::Reset));
    }
}
