#![forbid(unsafe_code)]
//! Ratios against peers.
fn main() {}
