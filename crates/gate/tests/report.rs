//! What a gate says about where its rules are enforced.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use support::{ACK, Namespace, explained, frame, needs_root};
use tidegate_gate::{Gate, Mechanism, Options};
use tidegate_policy::{Action, PortRange, RequestRule, RuleSet, When};

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
