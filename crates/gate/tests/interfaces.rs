//! Which interfaces a gate can be attached to, and what becomes of it when one of several goes.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use support::{Pair, ip, needs_root};
use tidegate_gate::{Gate, GateError, Options, Running};
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
