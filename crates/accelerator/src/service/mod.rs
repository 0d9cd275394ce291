//! What answers a request: the cache, a root directory or an upstream. Nothing here knows the client's transport.

pub(crate) mod answer;
pub(crate) mod block_list;
pub(crate) mod client_info;
pub(crate) mod fetch;
pub mod plan;
pub(crate) mod routes;
