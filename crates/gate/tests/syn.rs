//! SYN policing: who connects, and what becomes of the SYN.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use support::{
    ACK, Namespace, Pair, SERVER4, SERVER6, SYN, connect, connection, connections, explained, frame,
    is_dropped, needs_root, total,
};
use tidegate_core::Verdict;
use tidegate_gate::{Asked, Gate, GateError, Mechanism, Options};
use tidegate_policy::{Action, ConnectionRule, PathPattern, Policer, PortRange, RequestRule, RuleSet, When};

fn load(rules: &RuleSet) -> Gate {
    explained(Gate::load(rules, &Options::default()))
}

fn passes(gate: &Gate, frame: &[u8]) -> bool {
    explained(gate.try_frame(Mechanism::Xdp, frame, 1)).passed
}

/// Rates so slow that no token comes back while a test runs.
const SLOW: f64 = 0.001;

#[test]
fn syns_beyond_the_burst_are_dropped_and_counted_per_rule() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load(&connections(vec![
        connection("*:80", "*", SLOW, 5),
        connection("*:80", "10.1.1.0/24", SLOW, 2),
        connection("*:80", "2001:db8::/32", SLOW, 3),
    ]));
    let sent = |source: &str, destination: &str| {
        (0..10).filter(|_| passes(&gate, &frame(source, destination, 80, SYN, b""))).count()
    };
    assert_eq!(sent("10.1.1.9", "10.0.0.1"), 2);
    assert_eq!(sent("10.1.2.9", "10.0.0.1"), 5);
    assert_eq!(sent("2001:db8::9", "2001:db8::1"), 3);
    // Nothing else is touched: other ports, other segments.
    assert!((0..20).all(|_| passes(&gate, &frame("10.1.1.9", "10.0.0.1", 81, SYN, b""))));
    assert!((0..20).all(|_| passes(&gate, &frame("10.1.1.9", "10.0.0.1", 80, ACK, b"x"))));
    assert!((0..20).all(|_| passes(&gate, &frame("10.1.1.9", "10.0.0.1", 80, SYN | ACK, b""))));
    let report = explained(gate.show());
    let counts: Vec<_> = report.rules.iter().map(|rule| (rule.passed, rule.refused)).collect();
    assert_eq!(counts, [(5, 5), (2, 8), (3, 7)]);
    assert!(report.rules.iter().all(|rule| rule.mechanism == Mechanism::Xdp));
}

#[test]
fn kernel_and_user_space_give_the_same_verdicts() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let rules = connections(vec![
        connection("*:80", "*", SLOW, 7),
        connection("*:80", "10.1.1.1", SLOW, 3),
        connection("12.1.1.1:80", "*", SLOW, 2),
        connection("12.1.0.0/16:8000-8099", "*", SLOW, 4),
        connection("*:8050-9000", "10.0.0.0/8", SLOW, 1),
        connection("[2001:db8::/32]:*", "*", SLOW, 5),
        connection("*:*", "2001:db8:1::/48", 0.0, 0),
        connection("*:22", "0.0.0.0/0", SLOW, 1),
    ]);
    let gate = load(&rules);
    let mut policer = Policer::new(&rules).unwrap();
    let (mut asked, mut dropped) = (0, 0);
    for round in 0..6 {
        for source in ["10.1.1.1", "10.1.1.2", "9.9.9.9", "2001:db8::7", "2001:db8:1::7", "fd00::1"] {
            for destination in ["12.1.1.1", "12.1.1.2", "13.0.0.1", "2001:db8::1", "fd00::2"] {
                let (from, to): (IpAddr, IpAddr) = (source.parse().unwrap(), destination.parse().unwrap());
                if from.is_ipv4() != to.is_ipv4() {
                    continue;
                }
                for port in [22, 80, 81, 8000, 8049, 8050, 8099, 8100, 9000, 9001] {
                    let kernel = passes(&gate, &frame(source, destination, port, SYN, b""));
                    let user = policer.on_connect(from, to, port, 0).verdict == Verdict::Continue;
                    assert_eq!(kernel, user, "round {round}: {source} to {destination}:{port}");
                    asked += 1;
                    dropped += u32::from(!kernel);
                }
            }
        }
    }
    // The table would prove nothing if everything passed.
    assert!(dropped > asked / 4 && dropped < asked, "{dropped} of {asked}");
    let kernel: Vec<_> = explained(gate.show()).rules.iter().map(|r| (r.passed, r.refused)).collect();
    let user: Vec<_> = policer.connection_counts().iter().map(|c| (c.passed, c.refused)).collect();
    assert_eq!(kernel, user);
}

#[test]
fn where_a_proxy_names_the_clients_its_packets_are_let_pass_and_they_are_policed_when_they_are_known() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let ports = [80, 81].map(PortRange::one);
    let path = PathPattern::Exact("/bad".to_owned());
    let bad = RequestRule {
        path,
        cookie: None,
        limit: None,
        when: When::Always,
        action: Some(Action::Reset),
        class: None,
    };
    let gate = load(&RuleSet {
        connections: vec![connection("*:*", "*", SLOW, 3), connection("*:*", "192.0.2.0/24", SLOW, 2)],
        requests: vec![bad],
        http_ports: ports.to_vec(),
        only_ports: ports.to_vec(),
        proxied_ports: vec![ports[0]],
        framed_ports: Vec::new(),
    });
    let proxy = "10.1.1.9";
    let passed = |port| (0..10).filter(|_| passes(&gate, &frame(proxy, "10.0.0.1", port, SYN, b""))).count();
    assert_eq!([passed(80), passed(81)], [10, 3]);
    let request = |port| {
        let segment = frame(proxy, "10.0.0.1", port, ACK, b"GET /bad HTTP/1.1\r\nHost: a\r\n\r\n");
        explained(gate.try_frame(Mechanism::Tc, &segment, 1)).passed
    };
    assert_eq!([request(80), request(81)], [true, false]);

    let client = |text: &str| SocketAddr::new(text.parse().unwrap(), 1);
    let met = |text: &str, port| {
        let local = SocketAddr::new("10.0.0.1".parse().unwrap(), port);
        let continues = || gate.on_connect(client(text), local).verdict == Verdict::Continue;
        (0..10).filter(|_| continues()).count()
    };
    assert_eq!(met("192.0.2.1", 80), 2, "its rule's tokens, as they come from the kernel's bucket");
    assert_eq!(met("192.0.2.1", 81), 10, "its SYN has paid");
    let asked = Asked { peer: client("192.0.2.1"), port: 80, path: b"/bad", cookie: None };
    assert_eq!(gate.on_request(&asked).verdict, Verdict::Reset);

    let gate = load(&RuleSet { proxied_ports: vec![ports[0]], ..RuleSet::default() });
    let met = |text: &str, port| {
        gate.on_connect(client(text), SocketAddr::new("10.0.0.1".parse().unwrap(), port)).verdict
    };
    explained(gate.blocks().add("192.0.2.7".parse().unwrap(), None));
    assert_eq!([met("192.0.2.7", 80), met("192.0.2.8", 80)], [Verdict::Drop, Verdict::Continue]);
    assert!(passes(&gate, &frame(proxy, "10.0.0.1", 80, SYN, b"")));
    assert!(!passes(&gate, &frame("192.0.2.7", "10.0.0.1", 80, SYN, b"")));
}

#[test]
fn rule_on_overload_acts_only_while_overload_is_signalled() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let rule = ConnectionRule { when: When::Overload, ..connection("*:80", "*", SLOW, 2) };
    let gate = load(&connections(vec![rule]));
    let syn = frame("10.1.1.9", "10.0.0.1", 80, SYN, b"");
    let passed = || (0..10).filter(|_| passes(&gate, &syn)).count();
    assert_eq!(passed(), 10);
    explained(gate.set_overload(true));
    assert_eq!(passed(), 2);
    assert!(explained(gate.show()).overloaded);
    explained(gate.set_overload(false));
    assert_eq!(passed(), 10);
}

#[test]
fn replaced_rules_keep_their_tokens_and_wrong_rules_change_nothing() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load(&connections(vec![connection("*:80", "*", SLOW, 3)]));
    let syn = frame("10.1.1.9", "10.0.0.1", 80, SYN, b"");
    assert_eq!((0..9).filter(|_| passes(&gate, &syn)).count(), 3);
    // A reload is no fresh burst; another rule beside it has one.
    explained(gate.replace_rules(&connections(vec![
        connection("*:443", "*", SLOW, 4),
        connection("*:80", "*", SLOW, 100),
    ])));
    assert_eq!((0..9).filter(|_| passes(&gate, &syn)).count(), 0);
    let other = frame("10.1.1.9", "10.0.0.1", 443, SYN, b"");
    assert_eq!((0..9).filter(|_| passes(&gate, &other)).count(), 4);
    let report = explained(gate.show());
    assert_eq!(report.rules[1].refused, 15, "{report}");
    let wrong = connections(vec![connection("10.0.0.1:80", "::/0", SLOW, 1)]);
    assert!(matches!(gate.replace_rules(&wrong), Err(GateError::Rules(_))));
    assert!(!passes(&gate, &other));
    explained(gate.replace_rules(&RuleSet::default()));
    assert!(passes(&gate, &syn) && passes(&gate, &other));
    assert!(explained(gate.show()).rules.is_empty());
}

#[test]
fn bucket_of_a_rule_whose_rate_is_replaced_holds_as_many_tokens_as_before() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let of = |rate: f64, burst: u32| connections(vec![connection("*:80", "*", rate, burst)]);
    let gate = load(&of(SLOW, 10));
    let syn = frame("10.1.1.9", "10.0.0.1", 80, SYN, b"");
    let passed = |frames: usize| (0..frames).filter(|_| passes(&gate, &syn)).count();
    assert_eq!(passed(4), 4);
    // Of six that are left, with another rate in between, two are taken, and then there is room for three.
    explained(gate.replace_rules(&of(SLOW * 10.0, 10)));
    explained(gate.replace_rules(&of(SLOW, 10)));
    assert_eq!(passed(2), 2);
    explained(gate.replace_rules(&of(SLOW * 10.0, 3)));
    assert_eq!(passed(9), 3);
    // From a rate that would fill it at once, and so has, to a slow one.
    explained(gate.replace_rules(&of(1_000_000.0, 5)));
    while !passes(&gate, &syn) {}
    thread::sleep(std::time::Duration::from_millis(1));
    explained(gate.replace_rules(&of(SLOW, 5)));
    assert_eq!(passed(9), 5);
}

#[test]
fn bucket_that_several_processors_take_from_gives_its_burst_and_no_more() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = load(&connections(vec![connection("*:80", "*", SLOW, 20_000)]));
    let syn = frame("10.1.1.9", "10.0.0.1", 80, SYN, b"");
    let started = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                started.wait();
                explained(gate.try_frame(Mechanism::Xdp, &syn, 10_000));
            });
        }
    });
    let report = explained(gate.show());
    assert_eq!((report.rules[0].passed, report.rules[0].refused), (20_000, 20_000));
}

#[test]
fn packets_under_replacement_see_one_set_or_the_other() {
    needs_root();
    let _namespace = Namespace::enter_new();
    // Both sets refuse the address, but number the classes of ports and destinations differently: looked up in one
    // map of the one and one of the other, the rule would not be found and the SYN would pass.
    let rule = connection("10.0.0.1:80", "10.1.1.9", SLOW, 1);
    let few = connections(vec![rule.clone()]);
    let many = connections(vec![
        connection("*:1-79", "*", SLOW, 1),
        connection("9.0.0.0/8:22", "*", SLOW, 1),
        connection("10.0.0.0/8:22", "*", SLOW, 1),
        rule,
    ]);
    let gate = load(&few);
    let syn = frame("10.1.1.9", "10.0.0.1", 80, SYN, b"");
    assert!(passes(&gate, &syn));
    let (stop, seen, passed) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                passed.fetch_add(passes(&gate, &syn).into(), Ordering::Relaxed);
                seen.fetch_add(1, Ordering::Relaxed);
            }
        });
        // Until packets have come while the set was replaced, often enough.
        let (mut meetings, mut replaced) = (0, 0);
        while meetings < 16 && replaced < 10_000 {
            for set in [&many, &few] {
                let before = seen.load(Ordering::Relaxed);
                explained(gate.replace_rules(set));
                // One may have begun before.
                meetings += u32::from(seen.load(Ordering::Relaxed) > before + 1);
                replaced += 1;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(meetings >= 16, "{meetings} of {replaced} replacements had packets");
    });
    assert_eq!(passed.into_inner(), 0, "of {} packets", seen.into_inner());
}

#[test]
fn vlan_tags_and_extension_headers_do_not_hide_a_syn() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let refusing = || {
        let gate = load(&connections(vec![connection("*:80", "*", SLOW, 1)]));
        assert!(passes(&gate, &frame("10.1.1.9", "10.0.0.1", 80, SYN, b"")));
        gate
    };
    let gate = refusing();
    let mut tagged = frame("10.1.1.9", "10.0.0.1", 80, SYN, b"");
    tagged.splice(12..12, [0x88, 0xa8, 0, 1, 0x81, 0, 0, 2]);
    assert!(!passes(&gate, &tagged));
    // The stack takes off any number of tags for VLAN 0: behind more than are looked behind nothing passes.
    let malformed = || total(&gate, "gate_malformed_packets_total");
    for (tags, expected) in [(0, true), (1, true), (2, true), (3, false), (4, false), (9, false)] {
        for kind in [[0x81, 0, 0, 0], [0x88, 0xa8, 0, 0]] {
            let before = malformed();
            let mut tagged = frame("10.1.1.9", "10.0.0.1", 81, SYN, b"");
            tagged.splice(12..12, kind.repeat(tags));
            assert_eq!(passes(&gate, &tagged), expected, "{tags} tags");
            assert_eq!(malformed() - before, u64::from(!expected), "{tags} tags");
        }
    }
    // Hop-by-hop options, then destination options, then TCP.
    let mut extended = frame("2001:db8::9", "2001:db8::1", 80, SYN, b"");
    extended[20] = 0;
    extended.splice(54..54, [60, 0, 1, 4, 0, 0, 0, 0, 6, 0, 1, 4, 0, 0, 0, 0]);
    let length = (extended.len() - 54) as u16;
    extended[18..20].copy_from_slice(&length.to_be_bytes());
    assert!(!passes(&gate, &extended));
    // More extension headers than anybody needs, at whose end a TCP header would not be seen.
    let chain = |gate: &Gate, headers: usize| {
        let mut extended = frame("2001:db8::9", "2001:db8::1", 81, SYN, b"");
        extended[20] = 60;
        let mut chain = [60, 0, 1, 4, 0, 0, 0, 0].repeat(headers);
        chain[(headers - 1) * 8] = 6;
        extended.splice(54..54, chain);
        let length = (extended.len() - 54) as u16;
        extended[18..20].copy_from_slice(&length.to_be_bytes());
        passes(gate, &extended)
    };
    assert!((1..=4).all(|headers| chain(&gate, headers)) && (5..30).all(|headers| !chain(&gate, headers)));
    // IPv4 options.
    let mut options = frame("10.1.1.9", "10.0.0.1", 80, SYN, b"");
    options[14] = 0x46;
    options.splice(34..34, [1, 1, 1, 1]);
    assert!(!passes(&gate, &options));
    // A first fragment that shows no ports, and the second that would rewrite them (RFC 1858).
    let mut first = frame("10.1.1.9", "10.0.0.1", 81, SYN, b"");
    first[20] = 0x20;
    first.truncate(34 + 8);
    assert!(!passes(&gate, &first));
    let mut second = frame("10.1.1.9", "10.0.0.1", 81, SYN, b"");
    second[20..22].copy_from_slice(&[0, 1]);
    assert!(!passes(&gate, &second));
    // Cut anywhere, nothing is refused that shows no SYN, and nothing fails.
    let whole = frame("2001:db8::9", "2001:db8::1", 81, SYN, b"");
    assert!((14..whole.len()).all(|end| passes(&gate, &whole[..end])));
}

#[test]
fn client_beyond_its_burst_gets_no_answer_and_others_are_served() {
    needs_root();
    let pair = Pair::new();
    let listener = TcpListener::bind("[::]:80").unwrap();
    let gate = pair.gate(&connections(vec![
        connection("*:80", "10.77.0.2", SLOW, 3),
        connection("*:80", "fd77::/64", SLOW, 2),
    ]));
    // A connection within the burst may take a retransmission; beyond it the SYNs are dropped.
    let connects = |from: &str, to: &str, burst: usize| {
        let to: SocketAddr = to.parse().unwrap();
        pair.client.run(|| {
            (0..burst).for_each(|_| drop(connect(from, to)));
            assert!((0..2).all(|_| is_dropped(&gate, "gate_syns_policed_total", from, to)), "{from}");
        });
    };
    connects("10.77.0.2:0", &format!("{SERVER4}:80"), 3);
    let all_connect = |from: &str| {
        let to = format!("{SERVER4}:80").parse().unwrap();
        pair.client.run(|| (0..5).for_each(|_| drop(connect(from, to))));
    };
    all_connect("10.77.0.3:0");
    connects("[fd77::2]:0", &format!("[{SERVER6}]:80"), 2);
    let report = explained(gate.show());
    assert_eq!(report.interfaces, ["gate0"]);
    // Retransmissions count too.
    assert!(report.rules.iter().all(|rule| rule.refused >= 2), "{report}");
    gate.detach();
    // Nothing stays attached.
    all_connect("10.77.0.2:0");
    drop(listener);
}

#[test]
fn missing_interface_and_second_gate_are_named() {
    needs_root();
    let pair = Pair::new();
    let error = Gate::attach("nowhere0", &RuleSet::default(), &Options::default()).unwrap_err();
    assert!(error.to_string().contains("no network interface `nowhere0`"), "{error}");
    let _gate = pair.gate(&RuleSet::default());
    let error = Gate::attach("gate0", &RuleSet::default(), &Options::default()).unwrap_err();
    assert!(matches!(error, GateError::InUse { .. }), "{error}");
    let fallback =
        Gate::attach_or_fall_back(&["gate0".to_owned()], &RuleSet::default(), &Options::default()).unwrap();
    assert!(!fallback.is_in_kernel());
    assert!(explained(fallback.show()).unavailable[0].why.contains("already runs an XDP program"));
}

/// Many sources of few lengths are in hashes, others in tries: the verdicts must not differ.
#[test]
fn many_sources_give_the_same_verdicts_as_in_user_space_whatever_their_lengths() {
    needs_root();
    let _namespace = Namespace::enter_new();
    for lengths in [&[32, 24, 0][..], &[32], &[32, 31, 24, 16, 8]] {
        let mut rules = Vec::new();
        for bits in lengths {
            for i in 0..100u32 {
                let (v4, v6) =
                    (format!("10.{}.{}.7/{bits}", i % 3, i), format!("2001:db8:{i:x}::7/{}", bits * 4));
                for (source, port) in [(v4, "80"), (v6, "*")] {
                    let prefix: tidegate_core::IpPrefix = source.parse().unwrap();
                    rules.push(connection(&format!("*:{port}"), &prefix.to_string(), SLOW, 1 + i % 2));
                }
            }
        }
        // Each once.
        rules.sort_by_key(ToString::to_string);
        rules.dedup_by_key(|rule| (rule.destination, rule.source));
        let rules = connections(rules);
        let gate = load(&rules);
        let mut policer = Policer::new(&rules).unwrap();
        for i in 0..120u32 {
            for (source, destination) in [
                (format!("10.{}.{i}.7", i % 3), "10.0.0.1"),
                (format!("10.{}.{i}.6", i % 3), "10.0.0.1"),
                (format!("10.{}.{i}.99", i % 4), "10.0.0.1"),
                (format!("2001:db8:{i:x}::7"), "2001:db8::1"),
                (format!("2001:db8:{i:x}::9"), "2001:db8::1"),
            ] {
                for port in [80, 81] {
                    let (from, to) = (source.parse().unwrap(), destination.parse().unwrap());
                    let wanted = policer.on_connect(from, to, port, 0).verdict == Verdict::Continue;
                    let got = passes(&gate, &frame(&source, destination, port, SYN, b""));
                    assert_eq!(got, wanted, "{lengths:?}: {source} to port {port}");
                }
            }
        }
    }
}
