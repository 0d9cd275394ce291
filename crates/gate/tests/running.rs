//! What another process sees of a gate, and that nothing is left of it.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use support::{Namespace, Pair, SERVER4, SERVER6, connection, connections, explained, ip, needs_root};
use tidegate_gate::{Gate, GateError, ListenQueue, Options, Running};
use tidegate_policy::{Action, PortRange, RequestRule, RuleSet, When};

#[test]
fn gate_is_found_shown_fed_and_detached_by_another_process() {
    needs_root();
    let pair = Pair::new();
    let mut rules =
        connections(vec![connection("*:80", "10.1.0.0/16", 5.0, 2), connection("*:443", "*", 9.5, 3)]);
    rules.http_ports = vec![PortRange::one(80)];
    rules.requests = vec![RequestRule {
        path: "*.php".parse().unwrap(),
        cookie: None,
        limit: None,
        when: When::Always,
        action: Some(Action::Reset),
        class: None,
    }];
    let gate = pair.gate(&rules);
    let (queue, _) = explained(ListenQueue::bind(&gate, format!("{SERVER4}:0").parse().unwrap(), 2, 8));
    let running = explained(Running::find(Some("gate0")));
    let (theirs, ours) = (explained(running.show()), explained(gate.show()));
    assert_eq!(theirs.rules, ours.rules);
    assert_eq!(theirs.interfaces, ["gate0"]);
    let text = theirs.to_string();
    for line in ["*:80 from 10.1.0.0/16 rate=5 burst=2", "*:443 from * rate=9.5 burst=3", "*.php reset"] {
        assert!(text.contains(line), "{text}");
    }
    assert!(theirs.unavailable.is_empty(), "{text}");
    explained(running.blocks().add("10.2.3.4".parse().unwrap(), None));
    assert_eq!(explained(gate.blocks().list())[0].prefix.to_string(), "10.2.3.4/32");
    explained(running.set_overload(true));
    assert!(explained(gate.show()).overloaded);
    // The same interface number in another namespace is another interface.
    let elsewhere = Namespace::new().run(|| Running::find(None));
    assert!(matches!(elsewhere, Err(GateError::NotAttached { interface: None })));
    assert!(gate.is_attached());
    explained(running.detach());
    assert!(!gate.is_attached());
    let error = Running::find(Some("gate0")).unwrap_err();
    assert!(error.to_string().contains("no gate is attached to `gate0`"), "{error}");
    drop(queue);
}

#[test]
fn interfaces_are_those_of_the_addresses_without_loopback_and_without_tunnels() {
    needs_root();
    let _pair = Pair::new();
    let of = |address: &str| tidegate_gate::interfaces_of(&[address.parse().unwrap()]);
    for address in [format!("{SERVER4}:80"), format!("[{SERVER6}]:80"), "0.0.0.0:80".into(), "[::]:80".into()]
    {
        assert_eq!(of(&address).unwrap(), ["gate0"], "{address}");
    }
    assert_eq!(of("127.0.0.1:80").unwrap(), [] as [String; 0]);
    ip("tuntap add dev tun9 mode tun");
    ip("address add 10.88.0.1/24 dev tun9");
    ip("link set tun9 up");
    assert!(of("[::]:80").unwrap_err().to_string().contains("`tun9` carries no Ethernet"));
    assert_eq!(of(&format!("{SERVER4}:80")).unwrap(), ["gate0"]);
}

#[test]
fn nothing_is_attached_after_the_gate_is_gone() {
    needs_root();
    let pair = Pair::new();
    let gate = pair.gate(&RuleSet::default());
    explained(Running::find(None));
    drop(gate);
    assert!(matches!(Running::find(None), Err(GateError::NotAttached { .. })));
    // And another takes its place.
    let gate = explained(Gate::attach("gate0", &RuleSet::default(), &Options::default()));
    assert!(gate.is_attached());
}
