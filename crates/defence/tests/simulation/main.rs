//! Sites with good clients and attackers, in virtual time and from a seed: who is refused, and who is not.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bystanders;
mod clients;
mod cores;
mod ranges;
mod site;
mod stress;
mod support;
mod swarms;
