#![forbid(unsafe_code)]
//! What measuring programs share: servers that start pinned to a core, the bare responder that is the limit for them,
//! and the statistics of repeated measurements.

pub mod bare;
pub mod dhttp;
pub mod h2load;
pub mod h3load;
pub mod idle;
pub mod machine;
pub mod peers;
mod programs;
pub mod stats;
pub mod wrk;

/// The core that servers are pinned to.
pub const SERVER_CORE: usize = 0;
/// The core that the load is pinned to.
pub const LOAD_CORE: usize = 1;
