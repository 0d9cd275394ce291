use std::net::Ipv6Addr;

use super::room::FEWEST_NODES;
use super::*;

const WINDOW_MS: u64 = 10_000;

fn tree(nodes: usize) -> PrefixTree {
    let memory_bytes = nodes * size_of::<Node>() + Index::most_bytes(nodes);
    PrefixTree::new(TreeConfig { memory_bytes, window_ms: WINDOW_MS, seed: 7 })
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn path(tree: &PrefixTree, id: NodeId) -> Vec<String> {
    let up = std::iter::successors(Some(id), |id| tree.parent(*id));
    up.filter_map(|id| tree.prefix(id)).map(|prefix| prefix.to_string()).collect()
}

/// A small generator, so that a failing run is named by its seed.
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

#[test]
fn address_is_counted_at_every_level_of_its_family() {
    let mut tree = tree(100);
    let v4 = tree.locate(address("10.1.2.3"), 0);
    assert_eq!(
        path(&tree, v4),
        ["10.1.2.3/32", "10.1.2.0/24", "10.1.0.0/20", "10.1.0.0/16", "10.0.0.0/12", "10.0.0.0/8"]
    );
    let v6 = tree.locate(address("2001:db8:1234:5678::1"), 0);
    assert_eq!(path(&tree, v6)[0], "2001:db8:1234:5678::/64");
    assert_eq!(path(&tree, v6)[5], "2001:db8::/32");
    assert_eq!(
        tree.locate(address("2001:db8:1234:5678:ffff::2"), 0),
        v6,
        "one network of 64 bits is one client"
    );
    assert_eq!(tree.locate(address("::ffff:10.1.2.3"), 0), v4);
    tree.add(v4, Event::Request, 3, 0);
    tree.add(v6, Event::Request, 4, 0);
    let mut at = Some(v4);
    while let Some(id) = at.filter(|id| *id != tree.root()) {
        assert_eq!((tree.count(id, Event::Request, 0), tree.count(id, Event::Address, 0)), (3, 1));
        at = tree.parent(id);
    }
    assert_eq!(tree.count(tree.root(), Event::Request, 0), 7);
    assert_eq!(tree.count(tree.root(), Event::Address, 0), 2);
    tree.check_invariants();
}

#[test]
fn addresses_that_are_active_are_counted_once_a_window() {
    let mut tree = tree(100);
    let one = tree.locate(address("10.0.0.1"), 0);
    let other = tree.locate(address("10.0.0.2"), 0);
    for now_ms in [0, 1, 2, 10_000, 10_001] {
        tree.add(one, Event::Request, 1, now_ms);
        tree.add(other, Event::Request, 1, now_ms);
    }
    let prefix = tree.parent(one).unwrap();
    assert_eq!(tree.last_window(prefix, Event::Address, 10_001), 2);
    assert_eq!(tree.last_window(prefix, Event::Request, 10_001), 6);
    assert_eq!(tree.last_window(prefix, Event::Request, 30_001), 0);
}

#[test]
fn invented_addresses_displace_each_other_and_not_who_is_known() {
    let mut tree = tree(2_000);
    let regulars: Vec<NodeId> = (0..50u8)
        .map(|i| {
            let id = tree.locate(IpAddr::from([192, 0, 2, i]), 0);
            tree.add(id, Event::Request, 20, 0);
            id
        })
        .collect();
    for i in 0..100_000u32 {
        let now_ms = u64::from(i) / 20;
        let id = tree.locate(IpAddr::V4((0x0a00_0000 + i).into()), now_ms);
        tree.add(id, Event::Request, 1, now_ms);
    }
    tree.check_invariants();
    assert!(tree.len() <= tree.capacity());
    assert!(tree.evicted() > 90_000);
    assert!(regulars.iter().all(|id| tree.is_live(*id)), "who does more is worth more");
}

#[test]
fn address_with_open_connections_stays() {
    let mut tree = tree(100);
    let held = tree.locate(address("10.0.0.1"), 0);
    assert_eq!(tree.open(held), 1);
    let flood = |tree: &mut PrefixTree, from: u32| {
        for i in 0..1_000u32 {
            let id = tree.locate(IpAddr::V4((from + i).into()), 0);
            tree.add(id, Event::Request, 9, 0);
        }
    };
    flood(&mut tree, 0x0b00_0000);
    assert!(tree.is_live(held));
    tree.close(held);
    flood(&mut tree, 0x0c00_0000);
    assert!(!tree.is_live(held));
    tree.add(held, Event::Request, 1, 0);
    assert_eq!(
        (tree.count(held, Event::Request, 0), tree.prefix(held)),
        (0, None),
        "a stale handle does nothing"
    );
    tree.check_invariants();
}

#[test]
fn full_of_open_connections_it_knows_newcomers_by_their_prefix() {
    let mut tree = tree(64);
    let ids: Vec<NodeId> = (0..200u32)
        .map(|i| {
            let id = tree.locate(IpAddr::V4((0x0a00_0000 + i).into()), 0);
            tree.open(id);
            id
        })
        .collect();
    assert!(tree.is_address(ids[0]) && !tree.is_address(ids[199]));
    assert_eq!(tree.prefix(ids[199]).unwrap().to_string(), "10.0.0.0/24");
    tree.check_invariants();
}

#[test]
fn request_tells_of_marks_that_hold() {
    let mut tree = tree(100);
    let id = tree.locate(address("10.1.2.3"), 0);
    let narrow = tree.parent(id).unwrap();
    let wide = tree.parent(narrow).unwrap();
    let mark = |until_ms| Mark { since_ms: 0, until_ms, kind: 3 };
    tree.set_mark(wide, mark(2_000));
    tree.set_mark(narrow, mark(1_000));
    tree.set_mark(id, mark(500));
    let visit = tree.request(id, 1, 400);
    assert_eq!((visit.mark, visit.suspect), (Some(mark(500)), Some((narrow, mark(1_000)))));
    let visit = tree.request(id, 1, 1_500);
    assert_eq!((visit.requests, visit.mark, visit.suspect), (2, None, Some((wide, mark(2_000)))));
    assert_eq!(tree.request(id, 1, 2_000).suspect, None);
    let due = (3..PrefixTree::LOOK_EVERY).filter_map(|_| tree.request(id, 1, 2_000).due);
    assert_eq!(due.collect::<Vec<_>>(), [narrow]);
}

#[test]
fn as_many_nodes_fit_as_the_memory_has_room_for() {
    for nodes in [65, 97, 1_000, 6_145, 1_000_000] {
        let tree = tree(nodes);
        assert_eq!(tree.capacity(), nodes);
        assert!(tree.nodes.capacity() >= nodes, "nodes are never moved");
    }
    let tree = PrefixTree::new(TreeConfig { memory_bytes: 0, window_ms: WINDOW_MS, seed: 7 });
    assert_eq!(tree.capacity(), FEWEST_NODES);
}

#[test]
fn many_more_addresses_than_fit_stay_within_the_memory() {
    const BOUND: usize = 8 << 20;
    let mut tree = PrefixTree::new(TreeConfig { memory_bytes: BOUND, window_ms: WINDOW_MS, seed: 1 });
    let mut random = Random(3);
    for i in 0..150_000u64 {
        let id = tree.locate(IpAddr::V4((random.next() as u32).into()), i / 100);
        tree.add(id, Event::Request, 1, i / 100);
    }
    assert!(tree.memory_bytes() <= BOUND, "{} bytes", tree.memory_bytes());
    assert!(tree.evicted() > 0);
}

#[test]
fn majority_is_seen_whatever_the_order() {
    let mut tree = tree(100);
    let id = tree.locate(address("10.0.0.1"), 0);
    for i in 0..100u32 {
        tree.request(id, if i % 10 == 0 { i } else { 7 }, 0);
    }
    let top = tree.top_target(id);
    assert_eq!((top.target, top.of), (7, 100));
    assert!(top.share() > 0.75, "{top:?}");
    for i in 0..100u32 {
        tree.request(id, i, 0);
    }
    assert!(tree.top_target(id).share() < 0.5);
}

/// Any mixture of events, with time going on and now and then back, keeps the tree consistent and the counts right.
#[test]
fn random_histories_keep_the_invariants() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let mut tree = tree(80 + random.below(200) as usize);
        let mut open: Vec<NodeId> = Vec::new();
        let mut now_ms = 0u64;
        let mut total = 0u64;
        for _ in 0..3_000 {
            now_ms = match random.below(50) {
                0 => now_ms + WINDOW_MS * random.below(4),
                1 => now_ms.saturating_sub(random.below(100)),
                _ => now_ms + random.below(20),
            };
            let address = if random.below(3) == 0 {
                let bits = 0x2001_0db8u128 << 96 | u128::from(random.below(40)) << 70;
                IpAddr::V6(Ipv6Addr::from(bits | u128::from(random.next())))
            } else {
                IpAddr::V4(((10 << 24) + random.below(3000) as u32 * 7).into())
            };
            let id = tree.locate(address, now_ms);
            match random.below(8) {
                0 => {
                    tree.open(id);
                    open.push(id);
                }
                1 if !open.is_empty() => {
                    let index = random.below(open.len() as u64) as usize;
                    tree.close(open.swap_remove(index));
                }
                _ => {
                    if random.below(2) == 0 {
                        tree.request(id, random.below(5) as u32, now_ms);
                        total += 1;
                        continue;
                    }
                    let event = Event::ALL[random.below(Event::ALL.len() as u64) as usize];
                    if event != Event::Address {
                        tree.add(id, event, 1, now_ms);
                        total += u64::from(event == Event::Request);
                    }
                }
            }
            if open.len() > 20 {
                tree.close(open.remove(0));
            }
        }
        assert!(u64::from(tree.count(tree.root(), Event::Request, now_ms)) <= total, "seed {seed}");
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| tree.check_invariants()));
        assert!(checked.is_ok(), "seed {seed}");
    }
}

#[test]
fn who_is_said_not_to_exceed_a_limit_does_not() {
    let mut tree = tree(1_000);
    let mut random = Random(3);
    let ids: Vec<NodeId> = (1..20).map(|last| tree.locate(IpAddr::from([10, 0, 0, last]), 0)).collect();
    let (mut now_ms, mut refuted) = (0, 0);
    for _ in 0..20_000 {
        now_ms += random.below(40);
        let id = ids[random.below(19) as usize];
        match random.below(3) {
            0 => drop(tree.request(id, 1, now_ms)),
            1 => tree.add(id, Event::Range, random.below(20) as u32, now_ms),
            _ => {
                tree.forget_elsewhere();
                tree.set_elsewhere(id, [random.below(30) as u32; Event::ALL.len()], 0);
            }
        }
        for event in [Event::Request, Event::Range] {
            let count = tree.count_everywhere(id, event, now_ms);
            let limit = random.below(60) as u32;
            assert!(tree.may_exceed(id, event, limit) || count <= limit);
            refuted += u32::from(!tree.may_exceed(id, event, limit));
        }
    }
    assert!(refuted > 1_000, "{refuted}");
}

#[test]
fn what_others_have_counted_is_added_until_it_is_forgotten() {
    let mut tree = tree(100);
    let [one, other] = ["10.1.2.3", "10.1.2.4"].map(|text| tree.locate(address(text), 0));
    let mut counts = [0; Event::ALL.len()];
    counts[Event::Request as usize] = 500;
    counts[Event::Novel as usize] = 7;
    tree.set_elsewhere(one, counts, 3);
    tree.set_elsewhere(other, [0; Event::ALL.len()], 0);
    assert_eq!(tree.request(one, 1, 0).requests, 501);
    assert_eq!(tree.request(other, 1, 0).requests, 1);
    assert_eq!(tree.count_everywhere(one, Event::Novel, 0), 7);
    tree.open(one);
    assert_eq!(
        (tree.open_connections(one), tree.open_everywhere(one), tree.open_everywhere(other)),
        (1, 4, 0)
    );
    assert_eq!(tree.count(one, Event::Request, 0), 1, "the tree's own count stays its own");
    // Told again before it was forgotten, as of this moment.
    counts[Event::Request as usize] = 600;
    tree.set_elsewhere(one, counts, 3);
    assert_eq!(tree.count_everywhere(one, Event::Request, 0), 601);
    tree.forget_elsewhere();
    assert_eq!(tree.request(one, 1, 0).requests, 2);
    assert_eq!(tree.count_everywhere(one, Event::Novel, 0), 0);
    assert_eq!(tree.open_everywhere(one), 1);
}

#[test]
fn few_addresses_are_all_remembered_until_a_window_has_passed_without_them() {
    let mut tree = tree(100);
    let present = |tree: &PrefixTree, now_ms| {
        let mut all: Vec<String> = tree.present(now_ms).map(|prefix| prefix.to_string()).collect();
        all.sort();
        all
    };
    for last in [1, 2] {
        let id = tree.locate(address(&format!("10.1.2.{last}")), 0);
        tree.request(id, 1, 0);
        tree.request(id, 1, 0);
    }
    assert_eq!(present(&tree, 0), ["10.1.2.1/32", "10.1.2.2/32"]);
    let window_ms = tree.window_ms();
    let id = tree.locate(address("10.1.2.2"), window_ms);
    tree.add(id, Event::Connection, 1, window_ms);
    assert_eq!(present(&tree, 2 * window_ms), ["10.1.2.2/32"]);
    assert_eq!(tree.addresses_everywhere(2 * window_ms), 1);
    tree.set_present_everywhere(3);
    assert_eq!(tree.addresses_everywhere(2 * window_ms), 3);
    assert_eq!(present(&tree, 3 * window_ms), [""; 0]);
}

#[test]
fn addresses_that_do_much_of_anything_are_active() {
    let mut tree = tree(100);
    let id = tree.locate(address("10.1.2.3"), 0);
    tree.add(id, Event::Error, 8, 0);
    assert_eq!(tree.take_active(), []);
    tree.add(id, Event::Error, 8, 0);
    assert_eq!(tree.take_active(), [id]);
    (0..PrefixTree::OPEN_WORTH_TELLING).for_each(|_| assert!(tree.open(id) > 0));
    assert_eq!(tree.take_active(), [id]);
}

#[test]
fn connection_weighs_what_its_network_holds_and_closed_ones_nothing() {
    let mut tree = tree(1_000);
    let lone = tree.locate(address("20.1.2.3"), 0);
    tree.open(lone);
    // As many networks of 64 bits as anybody likes, one connection each.
    let many: Vec<NodeId> =
        (0..200).map(|index| tree.locate(address(&format!("2001:db8:1:{index:x}::1")), 0)).collect();
    many.iter().for_each(|id| assert_eq!(tree.open(*id), 1));
    assert_eq!(tree.open_connections(tree.root()), 201);
    assert!(tree.crowding(many[0]) > 8 * tree.crowding(lone), "{}", tree.crowding(many[0]));
    tree.check_invariants();
    many.iter().for_each(|id| tree.close(*id));
    assert_eq!((tree.open_connections(tree.root()), tree.crowding(many[0])), (1, 0));
    tree.check_invariants();
}

#[test]
fn connections_of_addresses_that_found_no_room_are_their_prefixes_until_they_close() {
    let mut tree = tree(64);
    let mut all = Vec::new();
    for last in 0..200 {
        let id = tree.locate(address(&format!("10.1.2.{last}")), 0);
        tree.open(id);
        all.push(id);
    }
    tree.check_invariants();
    assert_eq!(tree.open_connections(tree.root()), 200);
    all.into_iter().for_each(|id| tree.close(id));
    assert_eq!(tree.open_connections(tree.root()), 0);
    tree.check_invariants();
}
