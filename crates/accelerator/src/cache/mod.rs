//! The cache before the upstreams (RFC 9111): what is found in it, what is fetched for it, and who waits for that.

pub mod entries;
pub(crate) mod fetch;
pub(crate) mod fill;
pub(crate) mod flights;
mod follow;
pub(crate) mod heir;
pub(crate) mod listing;
pub(crate) mod lookup;
mod refresh;
mod stand_in;
pub(crate) mod transfer;
mod validation;
