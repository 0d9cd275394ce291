//! Many clients at once: botnets and crowds, over a site's good clients, from a seed.

use std::net::{IpAddr, Ipv4Addr};

use tidegate_defence::Settings;

use crate::site::{Readers, SECOND_MS, STEP_MS, Site, Tally, calm, everywhere, run};
use crate::support::host;

#[test]
fn flood_from_a_thousand_addresses_is_blocked_and_nobody_else() {
    for seed in 1..4 {
        let (mut site, mut readers, mut good) = calm(seed);
        let mut bad = Tally::default();
        run(&mut site, &mut [(&mut readers, &mut good)], 30, |site| {
            for bot in 0..1_000 {
                for _ in 0..15 {
                    site.tallied(&mut bad, host([99, (bot % 200) as u8], bot), "/page/0", 30, 200);
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
                    site.tallied(&mut bad, host([99, (bot % 4) as u8], bot), &page, 30, 200);
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
                    site.tallied(&mut class, host([97, 1], pupil), &target, 3, 200);
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
        let mut before = Readers::new((0..50).map(|i| host([99, 1], i * 80)), &mut site);
        let mut neighbours = Tally::default();
        run(&mut site, &mut [(&mut readers, &mut good), (&mut before, &mut neighbours)], 60, |_| {});
        let mut newcomers = Readers::new((0..50).map(|i| host([99, 1], i * 80 + 2)), &mut site);
        let (mut new, mut bad) = (Tally::default(), Tally::default());
        let mut readers =
            [(&mut readers, &mut good), (&mut before, &mut neighbours), (&mut newcomers, &mut new)];
        // Every one asks for the front page once a second.
        run(&mut site, &mut readers, 60, |site| {
            let phase = site.now_ms / STEP_MS % 10;
            for bot in (0..1_900u32).filter(|bot| u64::from(*bot) % 10 == phase) {
                site.tallied(&mut bad, host([99, 1], bot * 2 + 3), "/page/0", 30, 200);
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
                site.tallied(&mut neighbours, host([99, 3], client), &page, 3, 200);
            }
            for bot in (0..60u32).filter(|bot| u64::from(*bot) % 4 == phase % 4) {
                site.tallied(&mut bad, host([99, 3], 10 + bot * 4), "/object", 3, 200);
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
            site.tallied(&mut tally, host([99, 4], bot), &target, 2_000, 203);
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
                site.tallied(&mut bad, host([99, (bot % 16) as u8], bot), "/search?q=a", 400, 203);
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
                    site.tallied(&mut bad, host([99, 2], bot), &target, 30, 200);
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
        let crowd: Vec<IpAddr> = everywhere(2_000).chain((0..2_000).map(|i| host([98, 7], i * 5))).collect();
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
                    true => host([99, 0], index),
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
                site.tallied(&mut bad, host([99, 3], bot * 300), "/page/0", 30, 200);
            }
        }
        if site.now_ms - start_ms >= 10 * SECOND_MS {
            served_after_first += bad.sent - bad.refused - before;
        }
    });
    assert_eq!((good.refused, bad.blocked.len(), served_after_first), (0, 100, 0));
}
