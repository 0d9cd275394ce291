//! A site behind one data core, its good clients, and what becomes of requests.

use std::collections::HashSet;
use std::net::IpAddr;

use tidegate_core::NodeId;
use tidegate_core::hooks::{Chain, ChainSource, Decision, Load, Source};
use tidegate_defence::{Defence, Settings};

use crate::support::{Sent, direct, get, host, response};

pub(crate) const SECOND_MS: u64 = 1_000;
pub(crate) const STEP_MS: u64 = 100;

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// What became of one group's requests.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) sent: u64,
    pub(crate) refused: u64,
    pub(crate) senders: HashSet<IpAddr>,
    pub(crate) blocked: HashSet<IpAddr>,
}

impl Tally {
    pub(crate) fn note(&mut self, address: IpAddr, decision: Decision) {
        self.sent += 1;
        self.senders.insert(address);
        if !decision.is_continue() {
            self.refused += 1;
            self.blocked.insert(address);
        }
    }

    pub(crate) fn refused_share(&self) -> f64 {
        self.refused as f64 / self.sent.max(1) as f64
    }

    pub(crate) fn blocked_share(&self) -> f64 {
        self.blocked.len() as f64 / self.senders.len().max(1) as f64
    }
}

/// A site behind one data core.
pub(crate) struct Site {
    pub(crate) defence: Defence,
    pub(crate) chain: Chain,
    pub(crate) now_ms: u64,
    pub(crate) random: Random,
    pub(crate) cached: HashSet<String>,
    pub(crate) load: Load,
}

impl Site {
    pub(crate) fn new(settings: Settings, seed: u64) -> Self {
        let defence = Defence::new(settings, seed, [seed as u8; 32]);
        let chain = defence.chain(0, 1);
        Self {
            defence,
            chain,
            now_ms: 0,
            random: Random(seed),
            cached: HashSet::new(),
            load: Load::default(),
        }
    }

    pub(crate) fn client(&mut self, address: IpAddr) -> NodeId {
        self.chain.locate(address, self.now_ms)
    }

    /// One request on a connection that is there. What is not cached costs the upstream `cost_ms` and ends with
    /// `status`.
    pub(crate) fn ask(&mut self, address: IpAddr, target: &str, cost_ms: u32, status: u16) -> Decision {
        let client = self.client(address);
        let decision = self.chain.request(client, direct(address), &get(target, &Sent::PLAIN), self.now_ms);
        if !decision.is_continue() || (status == 200 && self.cached.contains(target)) {
            return decision;
        }
        if status == 200 && self.cached.len() < 100_000 {
            self.cached.insert(target.to_owned());
        }
        let response = response(target, status, Source::Missed, cost_ms);
        self.chain.response(client, direct(address), &response, self.now_ms)
    }

    pub(crate) fn tallied(
        &mut self,
        tally: &mut Tally,
        address: IpAddr,
        target: &str,
        cost_ms: u32,
        status: u16,
    ) {
        let decision = self.ask(address, target, cost_ms, status);
        tally.note(address, decision);
    }
}

/// People who read pages: a page with its pictures, then a pause.
pub(crate) struct Readers {
    addresses: Vec<(IpAddr, u64)>,
}

impl Readers {
    pub(crate) fn new(addresses: impl Iterator<Item = IpAddr>, site: &mut Site) -> Self {
        let start = |address| (address, site.now_ms + site.random.below(10 * SECOND_MS));
        Self { addresses: addresses.map(start).collect() }
    }

    pub(crate) fn step(&mut self, site: &mut Site, tally: &mut Tally) {
        for (address, next_ms) in &mut self.addresses {
            if site.now_ms < *next_ms {
                continue;
            }
            // The lower half of a square is asked for more often.
            let page = site.random.below(200) * site.random.below(200) / 200;
            site.tallied(tally, *address, &format!("/page/{page}"), 30, 200);
            for asset in 0..5 {
                site.tallied(tally, *address, &format!("/asset/{}", (page + asset) % 40), 5, 200);
            }
            *next_ms = site.now_ms + 3 * SECOND_MS + site.random.below(9 * SECOND_MS);
        }
    }
}

/// All over the place, as people are.
pub(crate) fn everywhere(count: u32) -> impl Iterator<Item = IpAddr> {
    (0..count).map(|i| host([20 + (i % 60) as u8, (i * 7 % 250) as u8], i * 97 % 65_536))
}

/// Runs for some time; `attack` is called every tenth of a second.
pub(crate) fn run(
    site: &mut Site,
    readers: &mut [(&mut Readers, &mut Tally)],
    seconds: u64,
    mut attack: impl FnMut(&mut Site),
) {
    for _ in 0..seconds * SECOND_MS / STEP_MS {
        for (group, tally) in readers.iter_mut() {
            group.step(site, tally);
        }
        attack(site);
        site.now_ms += STEP_MS;
        site.chain.tick(&site.load, site.now_ms);
    }
    site.chain.with_tree(|tree| tree.check_invariants());
}

/// A minute of ordinary life.
pub(crate) fn calm(seed: u64) -> (Site, Readers, Tally) {
    let mut site = Site::new(Settings::default(), seed);
    let mut readers = Readers::new(everywhere(200), &mut site);
    let mut good = Tally::default();
    run(&mut site, &mut [(&mut readers, &mut good)], 60, |_| {});
    assert_eq!(good.refused, 0, "seed {seed}");
    (site, readers, good)
}
