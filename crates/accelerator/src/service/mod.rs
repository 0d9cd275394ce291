//! What answers a request: the cache, a root directory or an upstream. Nothing here knows the client's transport.

pub mod entries;
pub(crate) mod fetch;
pub(crate) mod files;
pub(crate) mod fill;
pub(crate) mod flights;
mod follow;
pub(crate) mod large_files;
pub(crate) mod listed;
pub(crate) mod listing;
pub(crate) mod lookup;
pub mod plan;
mod refresh;
pub(crate) mod seen;
mod stand_in;
pub(crate) mod transfer;
mod validation;
