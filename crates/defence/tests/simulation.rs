//! Sites with good clients and attackers, in virtual time and from a seed: who is refused, and who is not.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use tidegate_core::hooks::{
    Chain, ChainSource, Decision, Field, Fields, Load, Part, Peer, RequestLine, RequestView, ResponseView,
    Slow, Source, Via,
};
use tidegate_core::{NodeId, Reason, Verdict};
use tidegate_defence::{Action, Defence, Exemption, Filter, Settings};

const SECOND_MS: u64 = 1_000;
const STEP_MS: u64 = 100;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// The fields of a simulated request.
#[derive(Default)]
struct Sent {
    user_agent: &'static str,
    part: Option<Part>,
}

impl Fields for Sent {
    fn get(&self, field: Field) -> Option<&[u8]> {
        match field {
            Field::UserAgent => Some(self.user_agent.as_bytes()),
            _ => None,
        }
    }

    fn part(&self) -> Option<Part> {
        self.part
    }
}

fn get<'r>(target: &'r str, fields: &'r Sent) -> RequestView<'r> {
    let (path, query) = target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)));
    RequestView {
        method: b"GET",
        path: path.as_bytes(),
        reading: None,
        query: query.map(str::as_bytes),
        has_body: false,
        fields,
    }
}

/// What became of one group's requests.
#[derive(Debug, Default)]
struct Tally {
    sent: u64,
    refused: u64,
    senders: HashSet<IpAddr>,
    blocked: HashSet<IpAddr>,
}

impl Tally {
    fn refused_share(&self) -> f64 {
        self.refused as f64 / self.sent.max(1) as f64
    }

    fn blocked_share(&self) -> f64 {
        self.blocked.len() as f64 / self.senders.len().max(1) as f64
    }
}

/// A site behind one data core.
struct Site {
    defence: Defence,
    chain: Chain,
    now_ms: u64,
    random: Random,
    cached: HashSet<String>,
    load: Load,
}

impl Site {
    fn new(settings: Settings, seed: u64) -> Self {
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

    fn peer(address: IpAddr) -> Peer {
        Peer { address, via: Via::Direct }
    }

    fn client(&mut self, address: IpAddr) -> NodeId {
        self.chain.locate(address, self.now_ms)
    }

    /// One request on a connection that is there. What is not cached costs the upstream `cost_ms` and ends with `status`.
    fn ask(&mut self, address: IpAddr, target: &str, cost_ms: u32, status: u16) -> Decision {
        let client = self.client(address);
        let peer = Self::peer(address);
        let fields = Sent::default();
        let request = get(target, &fields);
        let decision = self.chain.request(client, peer, &request, self.now_ms);
        if !decision.is_continue() || (status == 200 && self.cached.contains(target)) {
            return decision;
        }
        if status == 200 && self.cached.len() < 100_000 {
            self.cached.insert(target.to_owned());
        }
        let RequestView { path, query, .. } = request;
        let response = ResponseView {
            path,
            query,
            authority: b"example.org",
            variant: 0,
            status,
            source: Source::Missed,
            upstream_ms: cost_ms,
        };
        self.chain.response(client, peer, &response, self.now_ms)
    }

    fn tallied(&mut self, tally: &mut Tally, address: IpAddr, target: &str, cost_ms: u32, status: u16) {
        let decision = self.ask(address, target, cost_ms, status);
        tally.sent += 1;
        tally.senders.insert(address);
        if !decision.is_continue() {
            tally.refused += 1;
            tally.blocked.insert(address);
        }
    }
}

/// People who read pages: a page with its pictures, then a pause.
struct Readers {
    addresses: Vec<(IpAddr, u64)>,
}

impl Readers {
    fn new(addresses: impl Iterator<Item = IpAddr>, site: &mut Site) -> Self {
        let start = |address| (address, site.now_ms + site.random.below(10 * SECOND_MS));
        Self { addresses: addresses.map(start).collect() }
    }

    fn step(&mut self, site: &mut Site, tally: &mut Tally) {
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

fn v4(network: [u8; 2], host: u32) -> IpAddr {
    let [a, b] = network;
    IpAddr::V4(Ipv4Addr::from(u32::from_be_bytes([a, b, 0, 0]) + host))
}

/// All over the place, as people are.
fn everywhere(count: u32) -> impl Iterator<Item = IpAddr> {
    (0..count).map(|i| v4([20 + (i % 60) as u8, (i * 7 % 250) as u8], i * 97 % 65_536))
}

/// Runs for some time; `attack` is called every tenth of a second.
fn run(
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
fn calm(seed: u64) -> (Site, Readers, Tally) {
    let mut site = Site::new(Settings::default(), seed);
    let mut readers = Readers::new(everywhere(200), &mut site);
    let mut good = Tally::default();
    run(&mut site, &mut [(&mut readers, &mut good)], 60, |_| {});
    assert_eq!(good.refused, 0, "seed {seed}");
    (site, readers, good)
}

#[test]
fn flood_from_a_thousand_addresses_is_blocked_and_nobody_else() {
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        let mut bad = Tally::default();
        run(&mut site, &mut [(&mut readers, &mut good)], 30, |site| {
            for bot in 0..1_000 {
                for _ in 0..15 {
                    site.tallied(&mut bad, v4([99, (bot % 200) as u8], bot), "/page/0", 30, 200);
                }
            }
        });
        assert_eq!(good.refused, 0, "seed {seed}");
        assert_eq!(bad.blocked.len(), 1_000, "seed {seed}");
    }
}

#[test]
fn flood_below_the_limit_of_each_address_is_seen_by_its_pace() {
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        let mut bad = Tally::default();
        run(&mut site, &mut [(&mut readers, &mut good)], 30, |site| {
            for bot in 0..1_000 {
                for _ in 0..2 {
                    let page = format!("/page/{}", site.random.below(100));
                    site.tallied(&mut bad, v4([99, (bot % 4) as u8], bot), &page, 30, 200);
                }
            }
        });
        assert_eq!(good.refused, 0, "seed {seed}");
        assert!(bad.blocked_share() >= 0.95, "seed {seed}: {}", bad.blocked_share());
    }
}

#[test]
fn class_of_pupils_that_loads_heavy_pages_is_served() {
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        let mut class = Tally::default();
        let start_ms = site.now_ms;
        run(&mut site, &mut [(&mut readers, &mut good)], 40, |site| {
            // Thirty neighbours load a page of 150 parts within a second, and the next one half a minute later.
            let at_ms = (site.now_ms - start_ms) % (30 * SECOND_MS);
            for pupil in 0..30 {
                for part in 0..if at_ms < SECOND_MS { 15 } else { 0 } {
                    let target = format!("/heavy/{}", at_ms / STEP_MS * 15 + part);
                    site.tallied(&mut class, v4([97, 1], pupil), &target, 3, 200);
                }
            }
        });
        assert_eq!((good.refused, class.refused), (0, 0), "seed {seed}");
    }
}

#[test]
fn quiet_botnet_in_a_prefix_is_blocked_and_its_neighbours_are_not() {
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        // Neighbours who were there before, and some who come during the attack.
        let mut before = Readers::new((0..50).map(|i| v4([99, 1], i * 80)), &mut site);
        let mut neighbours = Tally::default();
        run(&mut site, &mut [(&mut readers, &mut good), (&mut before, &mut neighbours)], 60, |_| {});
        let mut newcomers = Readers::new((0..50).map(|i| v4([99, 1], i * 80 + 2)), &mut site);
        let (mut new, mut bad) = (Tally::default(), Tally::default());
        let mut readers =
            [(&mut readers, &mut good), (&mut before, &mut neighbours), (&mut newcomers, &mut new)];
        // Every one asks for the front page once a second.
        run(&mut site, &mut readers, 60, |site| {
            let phase = site.now_ms / STEP_MS % 10;
            for bot in (0..1_900u32).filter(|bot| u64::from(*bot) % 10 == phase) {
                site.tallied(&mut bad, v4([99, 1], bot * 2 + 3), "/page/0", 30, 200);
            }
        });
        assert!(bad.blocked_share() >= 0.95, "seed {seed}: {}", bad.blocked_share());
        assert_eq!((good.refused, neighbours.refused), (0, 0), "seed {seed}");
        assert!(new.refused_share() <= 0.01, "seed {seed}: {}", new.refused_share());
    }
}

#[test]
fn botnet_whose_good_neighbours_ask_for_other_things_is_blocked_and_they_are_not() {
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        let (mut neighbours, mut bad) = (Tally::default(), Tally::default());
        run(&mut site, &mut [(&mut readers, &mut good)], 20, |site| {
            let phase = site.now_ms / STEP_MS;
            // Four who ask five times a second, and sixty who ask once in 400 ms, all in one network.
            for client in (0..4).filter(|_| phase.is_multiple_of(2)) {
                let page = format!("/page/{}", site.random.below(100));
                site.tallied(&mut neighbours, v4([99, 3], client), &page, 3, 200);
            }
            for bot in (0..60u32).filter(|bot| u64::from(*bot) % 4 == phase % 4) {
                site.tallied(&mut bad, v4([99, 3], 10 + bot * 4), "/object", 3, 200);
            }
        });
        assert_eq!((good.refused, neighbours.refused), (0, 0), "seed {seed}");
        assert!(bad.blocked_share() >= 0.95, "seed {seed}: {}", bad.blocked_share());
    }
}

#[test]
fn what_costs_very_much_is_challenged_at_its_second_request() {
    let (mut site, mut readers, mut good) = calm(9);
    let mut late = Tally::default();
    let start_ms = site.now_ms;
    run(&mut site, &mut [(&mut readers, &mut good)], 20, |site| {
        // Each once in four seconds: three requests in a window.
        let phase = site.now_ms / STEP_MS % 40;
        for bot in (0..600u32).filter(|bot| u64::from(*bot) % 40 == phase) {
            let target = format!("/search?q={}", site.random.below(1_000));
            let mut tally = Tally::default();
            site.tallied(&mut tally, v4([99, 4], bot), &target, 2_000, 203);
            if site.now_ms - start_ms > 12 * SECOND_MS {
                late.sent += tally.sent;
                late.refused += tally.refused;
            }
        }
    });
    assert_eq!(good.refused, 0);
    assert!(late.refused_share() >= 0.95, "{}", late.refused_share());
}

#[test]
fn expensive_url_at_a_low_rate_from_many_is_stopped() {
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        let mut bad = Tally::default();
        run(&mut site, &mut [(&mut readers, &mut good)], 60, |site| {
            let phase = site.now_ms / STEP_MS % 20;
            for bot in (0..2_000u32).filter(|bot| u64::from(*bot) % 20 == phase) {
                // A search that no cache answers: the status keeps it out of the simulated one.
                site.tallied(&mut bad, v4([99, (bot % 16) as u8], bot), "/search?q=a", 400, 203);
            }
        });
        assert_eq!(good.refused, 0, "seed {seed}");
        assert!(bad.blocked_share() >= 0.95, "seed {seed}: {}", bad.blocked_share());
    }
}

#[test]
fn random_urls_against_the_cache_are_stopped_whether_from_one_or_from_many() {
    for (seed, bots, each) in [(1, 5u32, 30u32), (2, 1_000, 1)] {
        let (mut site, mut readers, mut good) = calm(seed);
        let mut bad = Tally::default();
        run(&mut site, &mut [(&mut readers, &mut good)], 40, |site| {
            for bot in 0..bots {
                if bots > 100 && u64::from(bot) % 10 != site.now_ms / STEP_MS % 10 {
                    continue;
                }
                for _ in 0..each {
                    let target = format!("/page/1?{:x}", site.random.next());
                    site.tallied(&mut bad, v4([99, 2], bot), &target, 30, 200);
                }
            }
        });
        assert_eq!(good.refused, 0, "seed {seed}");
        assert!(bad.blocked_share() >= 0.95, "seed {seed}: {}", bad.blocked_share());
    }
}

#[test]
fn flash_crowd_is_served() {
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        // Twenty times as many, half of them in one city's network.
        let crowd: Vec<IpAddr> = everywhere(2_000).chain((0..2_000).map(|i| v4([98, 7], i * 5))).collect();
        let mut crowd = Readers::new(crowd.into_iter(), &mut site);
        let mut tally = Tally::default();
        run(&mut site, &mut [(&mut readers, &mut good), (&mut crowd, &mut tally)], 60, |_| {});
        assert!(tally.sent > 100_000);
        assert_eq!((good.refused, tally.refused), (0, 0), "seed {seed}");
    }
}

#[test]
fn very_many_who_ask_once_and_leave_are_asked_to_prove_themselves_wherever_they_are() {
    for (seed, in_one_network, known_s) in [(1, true, 60), (2, true, 3), (3, false, 60), (4, false, 3)] {
        let mut site = Site::new(Settings::default(), seed);
        let mut readers = Readers::new(everywhere(200), &mut site);
        let (mut good, mut bad) = (Tally::default(), Tally::default());
        run(&mut site, &mut [(&mut readers, &mut good)], known_s, |_| {});
        assert_eq!(good.refused, 0, "seed {seed}");
        let mut index = 0u32;
        let mut flood = |site: &mut Site, bad: &mut Tally| {
            for _ in 0..1_000 {
                index = (index + 1) % 100_000;
                let address = match in_one_network {
                    // One after the other, so that the counts of all prefixes around them go in step.
                    true => v4([99, 0], index),
                    false => IpAddr::V4(Ipv4Addr::from(index.wrapping_mul(0x9e37_79b1))),
                };
                let page = format!("/page/{}", site.random.below(100));
                site.tallied(bad, address, &page, 5, 200);
            }
        };
        run(&mut site, &mut [(&mut readers, &mut good)], 5, |site| flood(site, &mut bad));
        let mut late = Tally::default();
        run(&mut site, &mut [(&mut readers, &mut good)], 15, |site| flood(site, &mut late));
        assert_eq!(late.refused, late.sent, "seed {seed}: {}", late.refused_share());
        // Who comes together with those who are everywhere is asked too, which a browser answers by itself.
        assert!(
            good.refused == 0 || !in_one_network && known_s == 3,
            "seed {seed}: {}",
            good.refused_share()
        );
    }
}

#[test]
fn site_whose_visitors_ask_once_each_is_served_when_very_many_come() {
    let mut site = Site::new(Settings::default(), 7);
    let mut visitors = Tally::default();
    let mut index = 0u32;
    let mut visit = |site: &mut Site, count: u32| {
        for _ in 0..count {
            index = index.wrapping_add(1);
            let address = IpAddr::V4(Ipv4Addr::from(index.wrapping_mul(0x9e37_79b1)));
            let page = format!("/page/{}", site.random.below(100));
            site.tallied(&mut visitors, address, &page, 5, 200);
        }
    };
    run(&mut site, &mut [], 30, |site| visit(site, 10));
    run(&mut site, &mut [], 20, |site| visit(site, 200));
    assert_eq!(visitors.refused, 0);
}

#[test]
fn pulses_are_blocked_at_the_first() {
    let (mut site, mut readers, mut good) = calm(5);
    let mut bad = Tally::default();
    let mut served_after_first = 0;
    let start_ms = site.now_ms;
    run(&mut site, &mut [(&mut readers, &mut good)], 30, |site| {
        let at_ms = (site.now_ms - start_ms) % (10 * SECOND_MS);
        if at_ms >= 3 * SECOND_MS {
            return;
        }
        let before = bad.sent - bad.refused;
        for bot in 0..100 {
            for _ in 0..50 {
                site.tallied(&mut bad, v4([99, 3], bot * 300), "/page/0", 30, 200);
            }
        }
        if site.now_ms - start_ms >= 10 * SECOND_MS {
            served_after_first += bad.sent - bad.refused - before;
        }
    });
    assert_eq!((good.refused, bad.blocked.len(), served_after_first), (0, 100, 0));
}

#[test]
fn password_guessing_is_blocked_and_a_typing_error_is_not() {
    let (mut site, ..) = calm(6);
    let (guesser, user) = (v4([99, 4], 1), v4([99, 4], 2));
    let tries = (0..).take_while(|_| site.ask(guesser, "/login", 5, 401).is_continue()).count();
    assert!(tries <= 30, "{tries}");
    assert!((0..5).all(|_| site.ask(user, "/login", 5, 401).is_continue()));
}

#[test]
fn load_test_from_one_address_is_nobodys_flood() {
    let mut site = Site::new(Settings::default(), 7);
    let tester = v4([127, 0], 1);
    for _ in 0..200 {
        assert!((0..1_000).all(|_| site.ask(tester, "/page/0", 1, 200).is_continue()));
        site.now_ms += STEP_MS;
        site.chain.tick(&site.load, site.now_ms);
    }
    // Others come, and it is one.
    for other in 0..5 {
        site.ask(v4([99, 5], other), "/page/1", 1, 200);
    }
    assert_eq!(site.ask(tester, "/page/0", 1, 200).reason, Reason::RequestRate);
}

#[test]
fn slow_clients_are_blocked_when_they_do_it_again_and_again() {
    let mut site = Site::new(Settings::default(), 8);
    let address = v4([99, 6], 1);
    let client = site.client(address);
    let decisions: Vec<bool> =
        (0..12).map(|_| site.chain.slow(client, Site::peer(address), Slow::Head, 0).is_continue()).collect();
    assert_eq!(decisions.iter().filter(|fine| **fine).count(), 10);
}

#[test]
fn connections_are_limited_at_once_and_refused_after_a_block() {
    let mut site = Site::new(Settings::default(), 9);
    for other in 0..5 {
        site.ask(v4([99, 5], other), "/page/1", 1, 200);
    }
    let address = v4([99, 6], 1);
    let mut open: Vec<(NodeId, Decision)> =
        (0..300).map(|_| site.chain.connect(Site::peer(address), 0)).collect();
    let dropped = open.iter().filter(|(_, decision)| decision.verdict == Verdict::Drop).count();
    assert_eq!(dropped, 300 - 256);
    open.drain(..).for_each(|(client, _)| site.chain.close(client, Site::peer(address), 0));
    assert!(site.chain.connect(Site::peer(address), 0).1.is_continue());
    while site.ask(address, "/login", 1, 401).is_continue() {}
    let (_, decision) = site.chain.connect(Site::peer(address), 1);
    assert_eq!((decision.verdict, decision.reason), (Verdict::Reset, Reason::Blocked));
    let (_, decision) = site.chain.connect(Site::peer(address), 601 * SECOND_MS);
    assert!(decision.is_continue(), "a block has its time");
}

#[test]
fn dry_run_tells_and_does_nothing() {
    let settings = Settings { dry_run: true, ..Settings::default() };
    let mut site = Site::new(settings, 10);
    let notices = site.defence.take_notices().unwrap();
    let address = v4([99, 6], 1);
    assert!((0..100).all(|_| site.ask(address, "/login", 1, 401).is_continue()));
    let notice = notices.try_recv().unwrap();
    assert!(notice.dry_run && notice.decision.reason == Reason::Errors);
    let count = site.defence.counts().into_iter().find(|count| count.reason == Reason::Errors).unwrap();
    assert_eq!((count.acted, count.dry_run > 0), (0, true));
}

#[test]
fn exempt_clients_are_never_acted_on() {
    let source = "99.6.0.0/16".parse().unwrap();
    let exempt = vec![Exemption { source, user_agent: String::new() }];
    let mut site = Site::new(Settings { exempt, ..Settings::default() }, 11);
    assert!((0..100).all(|_| site.ask(v4([99, 6], 1), "/login", 1, 401).is_continue()));
    let blocked = (0..100).find(|_| !site.ask(v4([99, 7], 1), "/login", 1, 401).is_continue());
    assert!(blocked.is_some());
}

#[test]
fn clients_that_are_exempt_by_their_user_agent_are_judged_when_it_is_known() {
    let exempt = vec![Exemption { source: "99.6.0.0/16".parse().unwrap(), user_agent: "goodbot".into() }];
    let methods = vec!["GET".into()];
    let filter = Filter {
        source: Some("99.6.9.0/24".parse().unwrap()),
        user_agent: String::new(),
        path: String::new(),
        content_type: String::new(),
        methods,
        action: Action::Reset,
        dry_run: false,
    };
    let site = Site::new(Settings { exempt, filters: vec![filter], ..Settings::default() }, 11);
    let (bot, impostor) = (v4([99, 6], 1), v4([99, 6], 2));
    for address in (1..9).map(|other| v4([10, 7], other)).chain([bot, impostor]) {
        let client = site.chain.locate(address, 0);
        let _ = site.chain.request(client, Site::peer(address), &get("/", &Sent::default()), 0);
    }
    let ask = |address, user_agent| {
        let (client, peer) = (site.chain.locate(address, 0), Site::peer(address));
        let fields = Sent { user_agent, ..Sent::default() };
        site.chain.request(client, peer, &get("/login", &fields), 0)
    };
    let fail = |address| {
        let (client, peer) = (site.chain.locate(address, 0), Site::peer(address));
        let response = ResponseView {
            path: b"/login",
            query: None,
            authority: b"",
            variant: 0,
            status: 401,
            source: Source::Here,
            upstream_ms: 0,
        };
        site.chain.response(client, peer, &response, 0)
    };
    // What was not asked yet and what was answered says nothing of the User-Agent: nobody there is acted on.
    for address in [bot, impostor] {
        for _ in 0..600 {
            let (client, decision) = site.chain.connect(Site::peer(address), 0);
            assert!(decision.is_continue());
            site.chain.close(client, Site::peer(address), 0);
        }
        assert!((0..300).all(|_| fail(address).is_continue()));
        let client = site.chain.locate(address, 0);
        assert!((0..20).all(|_| site.chain.slow(client, Site::peer(address), Slow::Head, 0).is_continue()));
    }
    let filtered: IpAddr = "99.6.9.1".parse().unwrap();
    let client = site.chain.locate(filtered, 0);
    let line = RequestLine { method: b"GET", target: b"/" };
    assert!(site.chain.request_line(client, Site::peer(filtered), &line, 0).is_continue());
    assert!(ask(filtered, "a GoodBot").is_continue());
    assert_eq!(
        ask(filtered, "curl").verdict,
        Verdict::Reset,
        "a filter about the line is a filter of the head too"
    );
    assert!((0..2_000).all(|_| ask(bot, "a GoodBot").is_continue()));
    let refused = (0..2_000).map(|_| ask(impostor, "curl")).find(|decision| !decision.is_continue());
    assert!(refused.is_some_and(|decision| matches!(decision.verdict, Verdict::Block(_))), "{refused:?}");
    // The mark is on the address, and is looked at when the head is here.
    let (client, decision) = site.chain.connect(Site::peer(impostor), 1);
    assert!(decision.is_continue());
    site.chain.close(client, Site::peer(impostor), 1);
    assert_eq!(ask(impostor, "curl").reason, Reason::Blocked);
    assert!(ask(impostor, "goodbot").is_continue());
    let settings = site.defence.settings();
    let may = |prefix: &str| settings.may_block_below_http(prefix.parse().unwrap());
    assert!(!may("99.6.0.2") && !may("99.6.0.0/24") && !may("99.0.0.0/8") && may("99.7.0.2"));
}

#[test]
fn block_from_outside_spares_the_exempt_and_trusted_proxies() {
    let exempt = ["99.6.0.0/16", "99.7.0.0/16"].map(|source| Exemption {
        source: source.parse().unwrap(),
        user_agent: if source == "99.7.0.0/16" { "goodbot".into() } else { String::new() },
    });
    let trusted_proxies = vec!["99.8.0.1".parse().unwrap()];
    let site = Site::new(Settings { exempt: exempt.to_vec(), trusted_proxies, ..Settings::default() }, 15);
    let block = |address: &str| site.defence.block(address.parse().unwrap(), Duration::from_secs(60));
    assert!(!block("99.6.0.1") && !block("99.8.0.1"));
    assert!(block("99.7.0.1") && block("99.8.0.2"));
    let settings = site.defence.settings();
    let may = |prefix: &str| settings.may_block_below_http(prefix.parse().unwrap());
    assert!(!may("99.7.0.1") && !may("99.8.0.1") && may("99.8.0.2"));
}

#[test]
fn lifted_block_is_forgotten_by_the_tree() {
    let mut site = Site::new(Settings::default(), 12);
    let address = v4([99, 6], 1);
    while site.ask(address, "/login", 1, 401).is_continue() {}
    let number = site.defence.ask_about(address);
    site.chain.tick(&Load::default(), 0);
    let (cores, rows) = site.defence.seen(number);
    assert_eq!((cores, rows.len()), (1, 7), "the address, five prefixes around it and everybody: {rows:?}");
    assert!(matches!(rows[0].blocked, Some((Reason::Errors, _))), "{rows:?}");
    site.defence.lift("99.6.0.0/24".parse().unwrap());
    site.chain.tick(&Load::default(), 0);
    assert!(site.ask(address, "/page/0", 1, 200).is_continue());
}

#[test]
fn filters_match_across_layers() {
    let filter = Filter {
        source: Some("99.6.0.0/16".parse().unwrap()),
        user_agent: "badbot".into(),
        path: "/api/".into(),
        content_type: String::new(),
        methods: vec!["GET".into()],
        action: Action::Refuse,
        dry_run: false,
    };
    let mut site = Site::new(Settings { filters: vec![filter], ..Settings::default() }, 13);
    let mut ask = |address, target: &str, user_agent| {
        let client = site.client(address);
        let fields = Sent { user_agent, ..Sent::default() };
        let request = get(target, &fields);
        site.chain.request(client, Site::peer(address), &request, 0).verdict
    };
    assert_eq!(ask(v4([99, 6], 1), "/api/x", "Mozilla BadBot/1"), Verdict::Refuse);
    assert_eq!(ask(v4([99, 7], 1), "/api/x", "Mozilla BadBot/1"), Verdict::Continue);
    assert_eq!(ask(v4([99, 6], 1), "/x", "Mozilla BadBot/1"), Verdict::Continue);
    assert_eq!(ask(v4([99, 6], 1), "/api/x", "Mozilla"), Verdict::Continue);
    assert_eq!(ask(v4([99, 6], 1), "/API/x", "Mozilla BadBot/1"), Verdict::Continue);
}

#[test]
fn a_filter_matches_what_the_server_behind_takes_for_its_path() {
    let filter = Filter {
        source: None,
        user_agent: String::new(),
        path: "/Admin".into(),
        content_type: String::new(),
        methods: Vec::new(),
        action: Action::Refuse,
        dry_run: false,
    };
    let settings = Settings { filters: vec![filter], folds_case: true, ..Settings::default() };
    let mut site = Site::new(settings, 13);
    let mut ask = |path: &str, reading: Option<&str>| {
        let client = site.client(v4([99, 6], 1));
        let fields = Sent::default();
        let request = RequestView { reading: reading.map(str::as_bytes), ..get(path, &fields) };
        site.chain.request(client, Site::peer(v4([99, 6], 1)), &request, 0).verdict
    };
    for path in ["/Admin/x", "/ADMIN/x", "/admin"] {
        assert_eq!(ask(path, None), Verdict::Refuse, "{path}");
    }
    assert_eq!(ask("/;x/admin", None), Verdict::Continue);
    assert_eq!(ask("/;x/admin", Some("/admin")), Verdict::Refuse);
    assert_eq!(ask("/other;x", Some("/other")), Verdict::Continue);
}

/// A gigabyte.
const FILM: u64 = 1 << 30;

/// Asks for a part of `target`, from where it is in the cache.
fn ask_part(site: &mut Site, tally: &mut Tally, address: IpAddr, target: &str, part: Part) {
    let client = site.client(address);
    let fields = Sent { part: Some(part), ..Sent::default() };
    let decision = site.chain.request(client, Site::peer(address), &get(target, &fields), site.now_ms);
    tally.sent += 1;
    tally.senders.insert(address);
    if !decision.is_continue() {
        tally.refused += 1;
        tally.blocked.insert(address);
    }
}

fn bytes(start: u64, length: u64) -> Part {
    Part::Bytes { start, end: start.saturating_add(length) }
}

#[test]
fn players_readers_of_documents_and_download_managers_are_served() {
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        let mut tally = Tally::default();
        let (mut segments, mut chunk) = ([0; 8], 0);
        run(&mut site, &mut [(&mut readers, &mut good)], 30, |site| {
            let step = site.now_ms / STEP_MS;
            // A page with thirty films, of each of which a browser looks at two bytes, then at the start.
            let film = format!("/film/{}", step % 30);
            ask_part(site, &mut tally, v4([91, 1], 1), &film, bytes(0, 2));
            ask_part(site, &mut tally, v4([91, 1], 1), &film, bytes(0, 256 << 10));
            // Somebody who looks for a scene: each time from there to the end.
            let scene = site.random.below(FILM);
            ask_part(site, &mut tally, v4([92, 1], 1), "/film/0", bytes(scene, FILM));
            // A document in pieces, those that are on the screen before others.
            for _ in 0..5 {
                let (piece, jump) = (64 << 10, site.random.below(3) * 16);
                ask_part(site, &mut tally, v4([93, 1], 1), "/book", bytes((chunk + jump) * piece, piece));
                chunk += jump + 1;
            }
            // Eight segments of a large file, a quarter of a mebibyte at a time; and with an open end, for as long as it takes.
            for (index, done) in segments.iter_mut().enumerate() {
                let start = index as u64 * (FILM / 8) + *done;
                *done += 256 << 10;
                ask_part(site, &mut tally, v4([94, 1], 1), "/image.iso", bytes(start, 256 << 10));
                if step.is_multiple_of(10) {
                    ask_part(site, &mut tally, v4([95, 1], 1), "/image.iso", bytes(start, FILM));
                }
            }
        });
        assert_eq!((good.refused, tally.refused), (0, 0), "seed {seed}");
    }
}

#[test]
fn who_asks_for_parts_and_gains_nothing_is_blocked() {
    type Ask = fn(&mut Random, u64) -> Part;
    let ways: [Ask; 6] = [
        // A single byte, anywhere.
        |random, _| bytes(random.below(FILM), 1),
        // The same again and again.
        |_, _| bytes(0, 64 << 10),
        |_, turn| bytes(turn % 2 * (1 << 20), 64 << 10),
        // Always a little earlier or later, and always nearly everything.
        |_, turn| bytes(FILM - turn * 2_048, u64::MAX),
        |_, turn| bytes(turn * 2_048, FILM),
        |_, _| Part::Excessive,
    ];
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        let (mut bad, mut turn) = (Tally::default(), 0);
        run(&mut site, &mut [(&mut readers, &mut good)], 12, |site| {
            for (bot, way) in (0..).zip(ways) {
                for _ in 0..8 {
                    turn += 1;
                    let part = way(&mut site.random, turn);
                    ask_part(site, &mut bad, v4([99, 9], bot * 700), "/film/0", part);
                }
            }
        });
        assert_eq!((good.refused, bad.blocked.len()), (0, ways.len()), "seed {seed}");
    }
}
