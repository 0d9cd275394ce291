//! The kernel programs themselves: that all load here, and what they cost the verifier.
#![allow(clippy::unwrap_used, reason = "a failure here is the test's failure")]

mod support;

use support::{Namespace, explained, needs_root};
use tidegate_gate::{Gate, Options};
use tidegate_policy::RuleSet;

/// The verifier gives up at a million; other kernels' verifiers go through more than this one's.
const MOST_VERIFIED: u32 = 250_000;

#[test]
fn every_program_loads_and_is_far_from_the_verifiers_limit() {
    needs_root();
    let _namespace = Namespace::enter_new();
    let gate = explained(Gate::load(&RuleSet::default(), &Options::default()));
    let costs = explained(gate.program_costs());
    println!("{:<16} {:>9} {:>13}", "program", "verified", "instructions");
    for cost in &costs {
        println!("{:<16} {:>9} {:>13}", cost.name, cost.verified, cost.instructions);
    }
    let names: Vec<&str> = costs.iter().map(|cost| cost.name.as_str()).collect();
    for name in
        ["tidegate_in", "tidegate_take", "tidegate_steer", "tidegate_url", "tidegate_out", "tidegate_state"]
    {
        assert!(names.contains(&name), "{name} is not loaded: {:?}", explained(gate.show()).unavailable);
    }
    assert!(costs.iter().all(|cost| (1..MOST_VERIFIED).contains(&cost.verified)), "{costs:#?}");
}
