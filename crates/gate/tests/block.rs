//! The block list: what is blocked, for how long, and what makes room.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::Duration;

use rustix::thread::CapabilitySet;
use support::{ACK, Namespace, Pair, SERVER4, SERVER6, explained, frame, needs_root, total};
use tidegate_core::IpPrefix;
use tidegate_gate::{BlockSources, Blocks, Gate, GateError, Keeper, Mechanism, Options, Running};
use tidegate_policy::RuleSet;

const TO: &str = "10.0.0.1";

fn load() -> Gate {
    explained(Gate::load(&RuleSet::default(), &Options::default()))
}

fn prefix(text: &str) -> IpPrefix {
    text.parse().unwrap()
}

fn passes(gate: &Gate, source: &str) -> bool {
    let to = if source.contains(':') { "2001:db8::1" } else { TO };
    explained(gate.try_frame(Mechanism::Xdp, &frame(source, to, 80, ACK, b"x"), 1)).passed
}

#[test]
fn blocked_addresses_and_prefixes_are_dropped_and_counted() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load();
    let blocks = gate.blocks();
    let listed = "10.9.0.1  # one\n192.0.2.0/24\n2001:db8:9::/48\n2001:db8::5\n::ffff:10.9.0.7\n";
    assert_eq!(explained(blocks.add_list(listed, None)), 5);
    for source in ["10.9.0.1", "192.0.2.77", "2001:db8:9::1", "2001:db8::5", "10.9.0.7"] {
        assert!(!passes(&gate, source), "{source}");
        assert!(!passes(&gate, source), "{source}");
    }
    for source in ["10.9.0.2", "192.0.3.1", "2001:db8:a::1", "2001:db8::6"] {
        assert!(passes(&gate, source), "{source}");
    }
    let list = explained(blocks.list());
    assert_eq!(list.len(), 5);
    assert!(list.iter().all(|entry| entry.hits == 2 && entry.remaining.is_none()), "{list:?}");
    for entry in list {
        assert!(explained(blocks.remove(&entry.prefix)), "{entry:?}");
        assert!(!explained(blocks.remove(&entry.prefix)));
    }
    assert!(["10.9.0.1", "192.0.2.77", "2001:db8:9::1"].into_iter().all(|source| passes(&gate, source)));
    // Nothing of a list with an error is taken.
    assert!(matches!(blocks.add_list("10.9.0.1\nten\n", None), Err(GateError::List(_))));
    assert!(passes(&gate, "10.9.0.1"));
}

/// An IP packet of a protocol: UDP to the ports of DHTTP, Trickles' own, an echo request, a later fragment.
fn of_protocol(source: &str, protocol: u8) -> Vec<u8> {
    let to = if source.contains(':') { "2001:db8::1" } else { TO };
    let mut packet = frame(source, to, 80, ACK, b"x");
    let at = if source.contains(':') { 14 + 6 } else { 14 + 9 };
    packet[at] = protocol;
    packet
}

#[test]
fn blocked_sources_are_dropped_whatever_protocol_they_speak() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load();
    explained(gate.blocks().add_list("10.9.0.1\n192.0.2.0/24\n2001:db8::5\n2001:db8:9::/48\n", None));
    let passes = |packet: &[u8]| explained(gate.try_frame(Mechanism::Xdp, packet, 1)).passed;
    // ICMP, UDP, ICMPv6, experiments (Trickles' default), no next header; TCP is tried elsewhere.
    for protocol in [1, 17, 58, 253, 59] {
        for blocked in ["10.9.0.1", "192.0.2.77", "2001:db8::5", "2001:db8:9::1"] {
            assert!(!passes(&of_protocol(blocked, protocol)), "{blocked} {protocol}");
        }
        for other in ["10.9.0.2", "2001:db8::6"] {
            assert!(passes(&of_protocol(other, protocol)), "{other} {protocol}");
        }
    }
    // A datagram's later fragments show no ports.
    let mut fragment = of_protocol("10.9.0.1", 17);
    fragment[14 + 6..14 + 8].copy_from_slice(&185u16.to_be_bytes());
    assert!(!passes(&fragment));
    // An address resolution is no IP packet: the host stays reachable for the rest of its link.
    let mut arp = of_protocol("10.9.0.1", 17);
    arp[12..14].copy_from_slice(&[8, 6]);
    assert!(passes(&arp));
}

#[test]
fn datagrams_of_a_blocked_client_reach_no_socket() {
    needs_root();
    let pair = Pair::new();
    let gate = pair.gate(&RuleSet::default());
    let server = UdpSocket::bind("[::]:4433").unwrap();
    server.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    for (blocked, other, to) in [("10.77.0.2", "10.77.0.3", SERVER4), ("fd77::2", "fd77::3", SERVER6)] {
        explained(gate.blocks().add(prefix(blocked), None));
        let before = total(&gate, "gate_blocked_packets_total");
        pair.client.run(|| {
            for (from, text) in [(blocked, b"blocked"), (other, b"another")] {
                let socket = UdpSocket::bind((from.parse::<IpAddr>().unwrap(), 0)).unwrap();
                socket.send_to(text, (to.parse::<IpAddr>().unwrap(), 4433)).unwrap();
            }
        });
        // One interface keeps the order of its packets.
        let mut received = [0; 64];
        let length = server.recv(&mut received).unwrap();
        assert_eq!(&received[..length], b"another", "{blocked}");
        assert!(total(&gate, "gate_blocked_packets_total") > before, "{blocked}");
    }
}

#[test]
fn ipv4_mapped_prefix_blocks_the_ipv4_addresses_that_it_means() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load();
    explained(gate.blocks().add(prefix("::ffff:10.94.0.0/112"), None));
    assert!(!passes(&gate, "10.94.3.4") && passes(&gate, "10.95.0.1"));
    assert!(matches!(gate.blocks().add_list("::ffff:10.94.0.0/64\n", None), Err(GateError::List(_))));
    assert!(explained(gate.blocks().remove(&prefix("10.94.0.0/16"))) && passes(&gate, "10.94.3.4"));
}

#[test]
fn expired_entries_block_nobody_and_hide_no_shorter_prefix() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load();
    let blocks = gate.blocks();
    assert!(!gate.ignores_any());
    let at_once = Some(Duration::ZERO);
    for gone in ["10.9.0.1", "10.9.8.0/24", "10.9.8.128/25", "2001:db8:9:8::/64", "10.8.0.0/16"] {
        explained(blocks.add(prefix(gone), at_once));
    }
    explained(blocks.add(prefix("10.9.0.0/16"), Some(Duration::from_secs(600))));
    explained(blocks.add(prefix("2001:db8:9::/48"), None));
    assert!(!passes(&gate, "10.9.8.200"));
    assert!(!passes(&gate, "2001:db8:9:8::1"));
    assert!(passes(&gate, "10.8.0.1"));
    assert_eq!(explained(blocks.list()).len(), 2);
    assert_eq!(explained(blocks.sweep()), 5);
    assert!(!passes(&gate, "10.9.0.1"), "the prefix still holds");
    assert!(gate.ignores_any());
    assert!(explained(blocks.remove(&prefix("10.9.0.0/16"))));
    assert!(passes(&gate, "10.9.0.1"));
    assert!(explained(blocks.remove(&prefix("2001:db8:9::/48"))));
    assert_eq!(explained(blocks.sweep()), 0);
    assert!(!gate.ignores_any());
}

#[test]
fn many_expired_prefixes_hide_no_shorter_one_after_the_next_tick() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load();
    let (mut keeper, _) = Keeper::start(&gate, &BlockSources::default());
    let blocks = gate.blocks();
    let mut nested = vec![("10.9.0.0/16", None), ("2001:db8::/32", None)];
    let v4 = ["10.9.8.0/24", "10.9.8.0/25", "10.9.8.0/26", "10.9.8.0/27", "10.9.8.0/28"];
    let v6 = ["2001:db8::/48", "2001:db8::/49", "2001:db8::/50", "2001:db8::/51", "2001:db8::/52"];
    nested.extend(v4.into_iter().chain(v6).map(|expired| (expired, Some(Duration::ZERO))));
    for (what, lifetime) in nested {
        explained(blocks.add(prefix(what), lifetime));
    }
    // What a host sends to itself is asked here.
    assert!(explained(blocks.blocks("10.9.8.1".parse().unwrap())));
    assert!(explained(blocks.blocks("2001:db8::1".parse().unwrap())));
    assert!(!explained(blocks.blocks("10.8.8.1".parse().unwrap())));
    assert!(keeper.tick(&gate).is_empty());
    assert!(!passes(&gate, "10.9.8.1") && !passes(&gate, "2001:db8::1"));
    assert_eq!(explained(blocks.stats()).prefixes, 2);
}

#[test]
fn blocks_for_longer_than_a_clock_tells_are_for_ever() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load();
    let user = Gate::user_space(&RuleSet::default(), &Options::default(), "test").unwrap();
    let ages = Duration::from_secs(5_124_096 * 3600);
    for gate in [&gate, &user] {
        for what in ["10.9.0.1", "10.9.8.0/24", "2001:db8::1", "2001:db8:1::/48"] {
            explained(gate.blocks().add(prefix(what), Some(ages)));
        }
        for entry in explained(gate.blocks().list()) {
            assert!(entry.remaining.is_none() && !entry.listed, "{entry:?}");
        }
    }
    explained(gate.blocks().set_lifetime(ages));
    assert!(explained(gate.blocks().lifetime()) > Some(ages / 2));
}

#[test]
fn million_addresses_fit_and_the_least_recently_hit_make_room() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load();
    let blocks = gate.blocks();
    let address = |i: u32| IpPrefix::new(Ipv4Addr::from(0x0b00_0000 + i).into(), 32).unwrap();
    let name = |i: u32| Ipv4Addr::from(0x0b00_0000 + i).to_string();
    let many: Vec<IpPrefix> = (0..Blocks::MAX_ADDRESSES).map(address).collect();
    explained(blocks.add_many(&many, None));
    assert_eq!(explained(blocks.stats()).addresses, Blocks::MAX_ADDRESSES as usize);
    // Those that hit stay, wherever they are.
    let hit = [0, 1, 4095, 500_000, Blocks::MAX_ADDRESSES - 1];
    assert!(hit.iter().all(|&i| !passes(&gate, &name(i))));
    assert!(passes(&gate, "12.0.0.1"));
    assert_eq!(explained(blocks.evicted()), 0);
    explained(blocks.add(prefix("12.0.0.1"), None));
    assert_eq!(explained(blocks.evicted()), u64::from(Blocks::MAX_ADDRESSES / 100));
    assert!(!passes(&gate, "12.0.0.1"));
    assert!(hit.iter().all(|&i| !passes(&gate, &name(i))));
    let left = explained(blocks.stats()).addresses;
    assert_eq!(left, Blocks::MAX_ADDRESSES as usize / 100 * 99 + 1, "a hundredth made room");
    // The other family has its own bound.
    explained(blocks.add(prefix("2001:db8::9"), None));
    assert!(!passes(&gate, "2001:db8::9"));
}

#[test]
fn user_space_list_gives_the_same_answers() {
    // Needs no privilege: this is what is left without one.
    let gate = Gate::user_space(&RuleSet::default(), &Options::default(), "test").unwrap();
    let blocks = gate.blocks();
    assert_eq!(blocks.add_list("10.9.0.1\n192.0.2.0/24\n", None).unwrap(), 2);
    blocks.add(prefix("10.9.0.9"), Some(Duration::ZERO)).unwrap();
    let refused = |source: &str| {
        let verdict = gate.on_connect(format!("{source}:1").parse().unwrap(), "10.0.0.1:80".parse().unwrap());
        verdict.verdict != tidegate_core::Verdict::Continue
    };
    assert!(refused("10.9.0.1") && refused("192.0.2.9"));
    assert!(!refused("10.9.0.2") && !refused("10.9.0.9"));
    assert_eq!(blocks.stats().unwrap().prefixes, 1);
    assert_eq!(blocks.list().unwrap().len(), 2);
    assert!(blocks.remove(&prefix("192.0.2.0/24")).unwrap());
    assert!(!refused("192.0.2.9"));
    assert_eq!(blocks.sweep().unwrap(), 1);
}

/// Takes all other capabilities from the calling thread.
fn keep_only(effective: CapabilitySet) {
    let mut sets = rustix::thread::capabilities(None).unwrap();
    sets.effective = effective;
    rustix::thread::set_capabilities(None, sets).unwrap();
}

/// What docs/guide/gate.md has the service run with.
#[test]
fn gate_without_cap_sys_admin_blocks_what_it_and_others_add() {
    needs_root();
    let documented = CapabilitySet::BPF | CapabilitySet::NET_ADMIN | CapabilitySet::PERFMON;
    let namespace = Namespace::new();
    let gate = namespace.run(|| {
        keep_only(documented - CapabilitySet::PERFMON);
        let refused = Gate::load(&RuleSet::default(), &Options::default()).unwrap_err();
        assert!(matches!(refused, GateError::NotPermitted), "{refused}");
        keep_only(documented);
        assert!(matches!(Running::all(None), Err(GateError::MayNotFind)));
        explained(Gate::attach("lo", &RuleSet::default(), &Options::default()))
    });
    namespace.run(|| {
        let running = explained(Running::find(Some("lo")));
        explained(running.blocks().add(prefix("10.9.0.1"), None));
    });
    namespace.run(|| {
        keep_only(documented);
        explained(gate.blocks().add(prefix("10.9.0.2"), None));
        let listed = explained(gate.blocks().list());
        assert_eq!(listed.len(), 2, "{listed:?}");
        assert!(!passes(&gate, "10.9.0.1") && !passes(&gate, "10.9.0.2") && passes(&gate, "10.9.0.3"));
        assert!(explained(gate.blocks().remove(&prefix("10.9.0.1"))) && passes(&gate, "10.9.0.1"));
    });
}

#[test]
fn prefixes_that_do_not_all_fit_are_refused_as_a_whole() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load();
    let user = Gate::user_space(&RuleSet::default(), &Options::default(), "test").unwrap();
    let prefix = |i: u32| IpPrefix::new(Ipv4Addr::from((20 << 24) + (i << 8)).into(), 24).unwrap();
    let all: Vec<IpPrefix> = (0..=Blocks::MAX_PREFIXES).map(prefix).collect();
    for gate in [&gate, &user] {
        let error = gate.blocks().add_many(&all, None).unwrap_err();
        assert!(error.to_string().contains("nothing was added"), "{error}");
        assert_eq!(explained(gate.blocks().stats()).prefixes, 0);
        explained(gate.blocks().add_many(&all[1..], None));
        // What is there already takes no more room.
        explained(gate.blocks().add_many(&all[1..3], None));
        assert!(matches!(gate.blocks().add(all[0], None), Err(GateError::Full { .. })));
        assert_eq!(explained(gate.blocks().stats()).prefixes, all.len() - 1);
    }
}

/// In the kernel and in user space: the networks of many hosts of IPv6, each blocked for a time.
#[test]
fn full_list_of_prefixes_evicts_hosts_of_ipv6_and_takes_addresses_whatever_it_holds() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load();
    let user = Gate::user_space(&RuleSet::default(), &Options::default(), "test").unwrap();
    let host = |i: u32| prefix(&format!("2001:db8:{:x}:{:x}::/64", i >> 16, i & 0xffff));
    let hour = Some(Duration::from_secs(3600));
    for gate in [&gate, &user] {
        let blocks = gate.blocks();
        explained(blocks.add_many(&[prefix("2001:db8:ffff::/48"), prefix("2001:db8:fffe::/64")], None));
        let hosts: Vec<IpPrefix> = (0..Blocks::MAX_PREFIXES + 5_000).map(host).collect();
        hosts.chunks(1_000).for_each(|some| explained(blocks.add_what_fits(some, hour)));
        let stats = explained(blocks.stats());
        assert!(stats.prefixes <= Blocks::MAX_PREFIXES as usize && stats.evicted >= 5_000, "{stats:?}");
        let is_blocked = |address: &str| explained(blocks.blocks(address.parse().unwrap()));
        assert!(is_blocked("2001:db8:1:1000::1") && !is_blocked("2001:db8:0:1::1"), "the oldest has gone");
        assert!(is_blocked("2001:db8:ffff:1::1") && is_blocked("2001:db8:fffe::1"), "an operator's has not");
        explained(blocks.add(host(7), hour));
        assert!(is_blocked("2001:db8:0:7::1"));
    }
    // With operators' prefixes alone in it, addresses are blocked all the same.
    let net = |i: u32| prefix(&format!("2001:{:x}:{:x}::/48", 0x1000 + (i >> 16), i & 0xffff));
    let nets: Vec<IpPrefix> = (0..Blocks::MAX_PREFIXES - 2).map(net).collect();
    for gate in [&gate, &user] {
        let blocks = gate.blocks();
        explained(blocks.add_many(&nets, None));
        let error = blocks.add_what_fits(&[prefix("10.0.0.1"), host(1), prefix("2001:db8::1")], hour);
        assert!(matches!(error, Err(GateError::Full { .. })), "{error:?}");
        let is_blocked = |address: &str| explained(blocks.blocks(address.parse().unwrap()));
        assert!(is_blocked("10.0.0.1") && is_blocked("2001:db8::1") && !is_blocked("2001:db8:0:1::1"));
    }
}
