//! Which interfaces a gate can be attached to, and what becomes of it when one of several goes.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use support::{Pair, explained, ip, needs_root};
use tidegate_gate::{Gate, GateError, InterfaceChange, Options, Running};
use tidegate_policy::RuleSet;

#[test]
fn an_interface_without_ethernet_frames_is_refused() {
    needs_root();
    let _pair = Pair::new();
    ip("tuntap add dev tun9 mode tun");
    ip("tuntap add dev tap9 mode tap");
    let (rules, options) = (RuleSet::default(), Options::default());
    let refused = Gate::attach("tun9", &rules, &options);
    assert!(matches!(&refused, Err(GateError::NotEthernet { name }) if name == "tun9"), "{refused:?}");
    // Where the operator has named it, enforcing something else somewhere else would be no answer.
    let both = ["gate0".to_owned(), "tun9".to_owned()];
    let refused = Gate::attach_or_fall_back(&both, &rules, &options);
    assert!(matches!(&refused, Err(GateError::NotEthernet { .. })), "{refused:?}");
    assert!(matches!(Running::find(None), Err(GateError::NotAttached { .. })), "nothing stays attached");
    for frames in ["tap9", "lo", "gate0"] {
        assert!(Gate::attach(frames, &rules, &options).is_ok(), "{frames}");
    }
}

/// Jumbo frames lie in several pieces; a peer that sends on more queues than the interface receives on is what drivers
/// refuse with (`veth_xdp_set`).
#[test]
fn an_interface_whose_driver_refuses_xdp_is_attached_behind_the_driver_and_jumbo_frames_are_no_reason() {
    needs_root();
    let _pair = Pair::new();
    ip("link add jumbo0 mtu 9000 type veth peer name jumbo1 mtu 9000");
    ip("link add few0 numrxqueues 1 numtxqueues 1 type veth peer name few1 numrxqueues 4 numtxqueues 4");
    for name in ["jumbo0", "jumbo1", "few0", "few1"] {
        ip(&format!("link set {name} up"));
    }
    let gate = explained(Gate::attach("jumbo0", &RuleSet::default(), &Options::default()));
    assert_eq!(explained(gate.show()).unavailable.len(), 0, "{:?}", gate.show());
    gate.detach();
    let gate = explained(Gate::attach("few0", &RuleSet::default(), &Options::default()));
    let shown = explained(gate.show());
    assert!(gate.is_attached() && shown.interfaces == ["few0"], "{shown}");
    assert!(
        shown.to_string().contains("few0: ") && shown.to_string().contains("behind the driver"),
        "{shown}"
    );
    assert_eq!(explained(Running::find(Some("few0"))).interfaces(), ["few0"]);
    let second = Gate::attach("few0", &RuleSet::default(), &Options::default());
    assert!(matches!(&second, Err(GateError::InUse { by_tidegate: true, .. })), "{second:?}");
    gate.detach();
    assert!(matches!(Running::find(None), Err(GateError::NotAttached { .. })), "nothing stays attached");
}

/// A second interface of the server's; made, it can be removed and made again.
fn make_second() {
    ip("link add gate2 type veth peer name gate3");
    ip("link set gate2 up");
    ip("link set gate3 up");
}

fn gate_on_two() -> Gate {
    make_second();
    let mut gate = explained(Gate::attach("gate0", &RuleSet::default(), &Options::default()));
    explained(gate.attach_also("gate2"));
    gate
}

fn gone() -> InterfaceChange {
    InterfaceChange::Gone { name: "gate2".into() }
}

#[test]
fn an_interface_that_vanishes_leaves_the_others_attached_and_is_attached_when_it_comes_back() {
    needs_root();
    let _pair = Pair::new();
    let gate = gate_on_two();
    assert_eq!(gate.look_at_interfaces(), []);
    ip("link del gate2");
    assert_eq!(gate.look_at_interfaces(), [gone()]);
    assert_eq!(gate.look_at_interfaces(), [], "each change is told once");
    assert!(gate.is_attached() && gate.misses_an_interface());
    let shown = explained(gate.show());
    assert_eq!(shown.interfaces, ["gate0"]);
    assert!(shown.to_string().contains("`gate2` is gone"), "{shown}");
    assert_eq!(explained(Running::find(None)).interfaces(), ["gate0"]);

    make_second();
    assert_eq!(gate.look_at_interfaces(), [InterfaceChange::Back { name: "gate2".into() }]);
    assert!(!gate.misses_an_interface());
    assert_eq!(explained(gate.show()).interfaces, ["gate0", "gate2"]);
    explained(Running::find(Some("gate2")));
}

#[test]
fn a_gate_whose_interfaces_have_all_vanished_says_that_it_misses_them() {
    needs_root();
    let _pair = Pair::new();
    let gate = gate_on_two();
    ip("link del gate0");
    ip("link del gate2");
    assert_eq!(gate.look_at_interfaces().len(), 2);
    assert!(!gate.is_attached() && gate.misses_an_interface());
}

#[test]
fn detaching_from_one_interface_leaves_the_others_attached() {
    needs_root();
    let _pair = Pair::new();
    let gate = gate_on_two();
    explained(explained(Running::find(Some("gate2"))).detach_from("gate2"));
    assert_eq!(explained(Running::find(None)).interfaces(), ["gate0"]);
    assert!(matches!(Running::find(Some("gate2")), Err(GateError::NotAttached { .. })));
    assert_eq!(gate.look_at_interfaces(), [InterfaceChange::Detached { name: "gate2".into() }]);
    // What an operator has detached is not attached again.
    assert_eq!(gate.look_at_interfaces(), []);
    assert!(gate.is_attached() && !gate.misses_an_interface());
    assert_eq!(explained(gate.show()).interfaces, ["gate0"]);

    explained(explained(Running::find(None)).detach_from("gate0"));
    assert!(!gate.is_attached());
    assert!(matches!(Running::find(None), Err(GateError::NotAttached { .. })));
}

#[test]
fn naming_an_interface_twice_attaches_to_it_once() {
    needs_root();
    let _pair = Pair::new();
    let mut gate = gate_on_two();
    explained(gate.attach_also("gate0"));
    assert_eq!(explained(gate.show()).interfaces, ["gate0", "gate2"]);
}
