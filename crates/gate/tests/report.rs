//! What a gate says about where its rules are enforced.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use support::{ACK, Connection, Namespace, SYN, connection, explained, frame, needs_root, total};
use tidegate_gate::{Gate, Mechanism, Options};
use tidegate_policy::{Action, ConnectionRule, PortRange, Profile, RequestRule, RuleSet, When};

fn rule(path: &str, action: Option<Action>, class: Option<u8>) -> RequestRule {
    let path = path.parse().unwrap();
    RequestRule { path, cookie: None, limit: None, when: When::Always, action, class }
}

fn places(gate: &Gate) -> Vec<Mechanism> {
    explained(gate.show()).rules.iter().map(|rule| rule.mechanism).collect()
}

#[test]
fn rules_that_refuse_nothing_are_shown_where_somebody_goes_by_them() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let rules = RuleSet {
        requests: vec![
            rule("/a/b", None, None),
            rule("/shop/*", None, Some(0)),
            rule("/a/*", Some(Action::Drop), None),
        ],
        http_ports: vec![PortRange::one(80)],
        ..RuleSet::default()
    };
    // In front of another server.
    let gate = explained(Gate::load(&rules, &Options::default()));
    assert_eq!(places(&gate), [Mechanism::Tc, Mechanism::Nobody, Mechanism::Tc]);
    let passes = |path: &str| {
        let head = format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
        let segment = frame("10.0.0.9", "10.0.0.1", 80, ACK, head.as_bytes());
        explained(gate.try_frame(Mechanism::Tc, &segment, 1)).passed
    };
    assert_eq!(["/a/b", "/a/c", "/a/b", "/shop/x"].map(passes), [true, false, true, true]);
    let passed: Vec<u64> = explained(gate.show()).rules.iter().map(|rule| rule.passed).collect();
    assert_eq!(passed, [2, 1, 0]);
    // With an agent, whose limits hold for segments.
    explained(gate.limit_classes(&rules, &[]));
    assert_eq!(places(&gate), [Mechanism::Tc; 3]);
    // In a server.
    let gate = explained(Gate::load(&rules, &Options { for_server: true, ..Options::default() }));
    assert_eq!(places(&gate), [Mechanism::Server, Mechanism::Server, Mechanism::Tc]);
}

#[test]
fn what_its_class_has_no_token_for_is_counted_as_refused_and_costs_its_rule_nothing() {
    needs_root();
    let _namespace = Namespace::enter_new();
    // No token comes back while the test runs.
    let limit = |burst| Some(Profile::new(0.001, burst).unwrap());
    let rules = RuleSet {
        connections: vec![ConnectionRule {
            class: Some(0),
            limit: limit(5),
            ..connection("*:80", "*", 0.0, 0)
        }],
        requests: vec![RequestRule { limit: limit(5), ..rule("/a", Some(Action::Drop), Some(0)) }],
        http_ports: vec![PortRange::one(80)],
        ..RuleSet::default()
    };
    let gate = explained(Gate::load(&rules, &Options::default()));
    let held = Connection::open("10.0.0.9", "10.0.0.1");
    let syns = |count| {
        let passes = |_: &i32| {
            let syn = frame("10.0.0.9", "10.0.0.1", 80, SYN, b"");
            explained(gate.try_frame(Mechanism::Xdp, &syn, 1)).passed
        };
        (0..count).filter(passes).count()
    };
    // One that is reset has been made another packet, which passes: what counts is counted.
    let requests = |count| {
        for _ in 0..count {
            explained(gate.try_frame(Mechanism::Tc, &held.frame(b"GET /a HTTP/1.1\r\n\r\n"), 1));
        }
    };
    let counts = || {
        let rules = explained(gate.show()).rules;
        rules.iter().map(|rule| (rule.passed, rule.refused)).collect::<Vec<_>>()
    };
    explained(gate.limit_classes(&rules, &[limit(2)]));
    assert_eq!(syns(6), 2);
    assert_eq!(counts(), [(2, 4), (0, 0)]);
    explained(gate.limit_classes(&rules, &[limit(3)]));
    requests(4);
    assert_eq!((counts()[1], total(&gate, "gate_requests_passed_total")), ((0, 4), 0), "SYNs took them all");
    // Three of five tokens of the rule are left to connections, and all to requests.
    explained(gate.limit_classes(&rules, &[]));
    assert_eq!(syns(6), 3);
    requests(6);
    assert_eq!(counts(), [(5, 7), (5, 5)]);
    assert_eq!(total(&gate, "gate_syns_passed_total"), 5);
}
