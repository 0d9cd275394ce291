//! Who of a chain's classifiers is asked about a request, and in which order.

#![allow(clippy::unwrap_used)] // A test that cannot go on has failed.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use tidegate_core::hooks::{
    Arbiter, Chain, Classifier, Decision, Field, Fields, Interest, Peer, Reply, RequestView, Scene, Via,
};
use tidegate_core::{PrefixTree, TreeConfig, Visit};

/// Notes that it was asked.
#[derive(Debug)]
struct Witness {
    name: &'static str,
    interest: Interest,
    asked: Arc<Mutex<Vec<&'static str>>>,
}

impl Classifier for Witness {
    fn name(&self) -> &'static str {
        self.name
    }

    fn on_connect(&self, _: &mut Scene<'_>, _: u32) -> Decision {
        self.asked.lock().unwrap().push(self.name);
        Decision::CONTINUE
    }

    fn interest(&self) -> Interest {
        self.interest
    }

    fn on_request(&self, _: &mut Scene<'_>, _: &RequestView<'_>, _: &Visit) -> Decision {
        self.asked.lock().unwrap().push(self.name);
        Decision::CONTINUE
    }
}

/// Puts others in the place of the classifiers at the first tick.
#[derive(Debug)]
struct Renewing(Arc<Mutex<Vec<&'static str>>>);

impl Arbiter for Renewing {
    fn decide(&self, _: &mut Scene<'_>, _: &'static str, decision: Decision) -> Decision {
        decision
    }

    fn marked(&self, _: &mut Scene<'_>) -> Decision {
        Decision::CONTINUE
    }

    fn reply(&self, _: Peer, _: &RequestView<'_>, _: Decision, _: u64) -> Reply {
        Reply::default()
    }

    fn renewed(&self) -> Option<Vec<Box<dyn Classifier>>> {
        Some(witnesses(&self.0, &[("e", Interest::Never), ("f", Interest::Always)]))
    }
}

fn witnesses(
    asked: &Arc<Mutex<Vec<&'static str>>>,
    names: &[(&'static str, Interest)],
) -> Vec<Box<dyn Classifier>> {
    let witness = |(name, interest): &(&'static str, Interest)| {
        let (name, interest, asked) = (*name, *interest, Arc::clone(asked));
        Box::new(Witness { name, interest, asked }) as Box<dyn Classifier>
    };
    names.iter().map(witness).collect()
}

struct NoFields;

impl Fields for NoFields {
    fn get(&self, _: Field) -> Option<&[u8]> {
        None
    }
}

#[test]
fn only_who_looks_at_requests_is_asked_about_them_also_after_a_change_of_the_settings() {
    let asked = Arc::default();
    let tree = PrefixTree::new(TreeConfig { memory_bytes: 1 << 20, window_ms: 10_000, seed: 1 });
    let all = witnesses(
        &asked,
        &[("a", Interest::Always), ("b", Interest::Never), ("c", Interest::Never), ("d", Interest::Always)],
    );
    let chain = Chain::new(tree, all, Box::new(Renewing(Arc::clone(&asked))), 1);
    let peer = Peer { address: IpAddr::from([10, 0, 0, 1]), via: Via::Direct };
    let fields = &NoFields;
    let request =
        RequestView { method: b"GET", path: b"/", reading: None, query: None, has_body: false, fields };
    let told = || std::mem::take(&mut *asked.lock().unwrap());
    let (client, _) = chain.connect(peer, 0);
    assert_eq!(told(), ["a", "b", "c", "d"]);
    assert!(chain.request(client, peer, &request, 0).is_continue());
    assert_eq!(told(), ["a", "d"]);
    chain.tick(&Default::default(), 250);
    assert!(chain.request(client, peer, &request, 250).is_continue());
    assert_eq!(told(), ["f"]);
}
