//! Several data cores, over which the kernel spreads a client's connections: limits hold for the sum, and a block holds
//! on all of them; in virtual time.

use std::net::{IpAddr, Ipv4Addr};

use tidegate_core::hooks::{Chain, ChainSource, Decision, Load, Peer, RequestView, Source, Via};
use tidegate_core::{IpPrefix, Reason, Verdict};
use tidegate_defence::{Defence, Settings};

use crate::support::{Sent, direct, get, response};

const CORES: usize = 4;
const STEP_MS: u64 = 250;
const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(60, 1, 0, 1));

/// A site on several cores.
struct Site {
    defence: Defence,
    chains: Vec<Chain>,
    now_ms: u64,
}

impl Site {
    fn new() -> Self {
        let defence = Defence::new(Settings::default(), 3, [3; 32]);
        let chains = (0..CORES).map(|core| defence.chain(core, CORES)).collect();
        Self { defence, chains, now_ms: 0 }
    }

    fn ask(&self, core: usize, address: IpAddr, via: Via) -> Decision {
        let chain = &self.chains[core];
        let client = chain.locate(address, self.now_ms);
        let request = RequestView { method: b"POST", ..get("/login", &Sent::PLAIN) };
        chain.request(client, Peer { address, via }, &request, self.now_ms)
    }

    /// A login that fails; whether it was tried at all.
    fn guess(&self, core: usize, via: Via) -> bool {
        if !self.ask(core, CLIENT, via).is_continue() {
            return false;
        }
        let chain = &self.chains[core];
        let client = chain.locate(CLIENT, self.now_ms);
        let response = response("/login", 401, Source::Passed, 1);
        let _ = chain.response(client, Peer { address: CLIENT, via }, &response, self.now_ms);
        true
    }

    fn connect(&self, core: usize, address: IpAddr) -> Decision {
        self.chains[core].connect(direct(address), self.now_ms).1
    }

    /// Others, each on a core of its own.
    fn others_ask(&self) {
        for core in 0..CORES {
            let address = IpAddr::V4(Ipv4Addr::new(61, 1, core as u8, 1));
            assert!(self.ask(core, address, Via::Direct).is_continue());
        }
    }

    fn step(&mut self) {
        self.now_ms += STEP_MS;
        self.chains.iter().for_each(|chain| chain.tick(&Load::default(), self.now_ms));
    }
}

#[test]
fn guesses_on_all_cores_are_counted_together_and_the_block_holds_on_all() {
    for via in [Via::Direct, Via::Proxy] {
        let mut site = Site::new();
        let mut tried = 0;
        for _ in 0..80 {
            tried += (0..CORES).filter(|core| site.guess(*core, via)).count();
            site.step();
        }
        // 25 are let pass, and those of a step or two before all cores know.
        assert!((25..=25 + 3 * CORES).contains(&tried), "{via:?}: {tried}");
        let reasons: Vec<Reason> = (0..CORES).map(|core| site.ask(core, CLIENT, via).reason).collect();
        assert_eq!(reasons, [Reason::Blocked; CORES], "{via:?}");
    }
}

#[test]
fn block_behind_a_proxy_holds_on_cores_that_have_never_seen_the_client_until_it_is_lifted() {
    let mut site = Site::new();
    assert_eq!((0..30).filter(|_| site.guess(0, Via::Proxy)).count(), 26);
    assert!(site.ask(1, CLIENT, Via::Proxy).is_continue(), "nobody has told yet");
    site.step();
    for core in 0..CORES {
        assert_eq!(site.ask(core, CLIENT, Via::Proxy).verdict, Verdict::Reset, "core {core}");
    }
    let network: IpPrefix = "60.1.0.0/16".parse().unwrap();
    site.defence.lift(network);
    site.step();
    (0..CORES).for_each(|core| assert!(site.ask(core, CLIENT, Via::Proxy).is_continue(), "core {core}"));
}

#[test]
fn order_to_block_and_its_lifting_act_in_the_order_in_which_they_were_given() {
    let mut site = Site::new();
    (0..CORES).for_each(|core| assert!(site.ask(core, CLIENT, Via::Direct).is_continue()));
    assert!(site.defence.block(CLIENT, Settings::WINDOW));
    site.step();
    (0..CORES).for_each(|core| assert_eq!(site.ask(core, CLIENT, Via::Direct).reason, Reason::Blocked));
    assert!(site.defence.block(CLIENT, 100 * Settings::WINDOW));
    site.defence.lift("60.1.0.1".parse().unwrap());
    site.step();
    (0..CORES).for_each(|core| assert!(site.ask(core, CLIENT, Via::Direct).is_continue(), "core {core}"));
}

#[test]
fn flood_on_one_core_is_in_the_way_of_others_on_other_cores_and_alone_in_nobodys() {
    for with_others in [true, false] {
        let mut site = Site::new();
        let mut served = 0;
        for _ in 0..40 {
            if with_others {
                site.others_ask();
            }
            served += (0..100).filter(|_| site.ask(0, CLIENT, Via::Direct).is_continue()).count();
            site.step();
        }
        let expected = if with_others { 1_000..=1_100 } else { 4_000..=4_000 };
        assert!(expected.contains(&served), "{served} served, others: {with_others}");
    }
}

#[test]
fn connections_on_all_cores_count_together() {
    let mut site = Site::new();
    let mut opened = 0;
    for _ in 0..40 {
        site.others_ask();
        for core in 0..CORES {
            opened += (0..4).filter(|_| site.connect(core, CLIENT).is_continue()).count();
        }
        site.step();
    }
    assert!((256..=256 + 3 * 16).contains(&opened), "{opened}");
}
