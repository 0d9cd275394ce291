#![forbid(unsafe_code)]
//! The vocabulary every other crate shares: network prefixes, verdicts and metric declarations.
//! Depends on nothing and does no I/O.

pub mod metrics;
mod prefix;
mod verdict;

pub use prefix::{IpPrefix, PrefixError};
pub use verdict::Verdict;
