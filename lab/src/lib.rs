#![forbid(unsafe_code)]
//! The published experiments, run again: one scenario for each figure or table of the papers' evaluations.
//!
//! A scenario is one file in `scenarios/` with a constant [`Scenario`] that is listed in [`scenarios::ALL`]. It starts
//! servers ([`server`]), loads them ([`load`]), and gives an [`Outcome`]: rows of raw figures ([`table`]), plots
//! ([`plot`]) and a verdict ([`verdict`]). Everything else (files, pages, exit codes) is common.

pub mod crowd;
mod error;
pub mod http3;
pub mod interrupt;
pub mod link;
pub mod load;
pub mod origin;
pub mod overload;
pub mod page;
pub mod plot;
pub mod process;
pub mod quota;
pub mod record;
mod scenario;
pub mod scenarios;
pub mod server;
pub mod surge;
pub mod table;
pub mod topology;
pub mod trace;
pub mod transfer;
pub mod verdict;

pub use error::Error;
pub use scenario::{Lab, Outcome, Paper, Scenario};
pub use tidegate_bench::stats;
