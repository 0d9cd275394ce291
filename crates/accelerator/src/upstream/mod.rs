//! Origin servers: which one gets a request, the connections to it, and what is done when it fails.
//!
//! [`Groups`] is shared by all data cores: the servers, their health and counters. [`Pools`] is one core's: its idle
//! connections. A request goes through [`Pools::send`], which returns when the response's head is here; the body is
//! then read from the [`Response`], which gives its connection back to the pool once the body has been read.

mod encrypted;
mod error;
mod exchange;
mod groups;
mod health;
mod http2;
pub(crate) mod permits;
mod pipeline;
mod pool;
mod response;
mod stream;
mod upload;

pub(crate) use error::{BodyReadError, UpstreamError};
pub(crate) use exchange::{Head, OutgoingRequest, read_more};
pub(crate) use groups::{Group, Groups};
pub use groups::{GroupError, UpstreamStatus};
pub(crate) use health::run_health_checks;
pub(crate) use permits::{Permit, Permits};
pub(crate) use pool::Pools;
pub(crate) use response::{Interim, Response};
pub(crate) use stream::{Heard, Stream};
pub(crate) use upload::{EmptyBody, RequestBody, Upload, send_all};

#[cfg(test)]
mod tests;
