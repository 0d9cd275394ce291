#![forbid(unsafe_code)]
//! The vocabulary every other crate shares: network prefixes, the prefix tree, verdicts, hooks and metric declarations.
//! Depends on nothing and does no I/O.

pub mod hooks;
pub mod metrics;
mod prefix;
mod reason;
mod tree;
mod verdict;

pub use prefix::{IpPrefix, PrefixError, network_of};
pub use reason::Reason;
pub use tree::{Event, Mark, NodeId, PrefixTree, TopTarget, TreeConfig, Visit};
pub use verdict::Verdict;
