//! The accelerator: listeners, sessions, cache, static files and upstreams.
//!
//! A request's path through this crate: `engine` starts a `data_core` for each processor, which accepts and watches its
//! clients' sockets. What they say goes through `tls`, if there is any, to `session` (HTTP/1) or `http2`; `http3`
//! and `dhttp` have ways in of their own, and `streams` is what HTTP/2 and HTTP/3 have in common. All of them ask `service`, which takes the answer from `cache`, `static_files` or `upstream`, past
//! `icap` and `compression` where that is wished. `defence` is asked on the way, and `telemetry` is told.

mod cache;
mod compression;
mod data_core;
mod defence;
mod dhttp;
mod engine;
mod http2;
mod http3;
mod icap;
mod message;
mod service;
mod session;
pub mod settings;
mod static_files;
mod streams;
mod telemetry;
pub mod tls;
mod upstream;

pub use cache::entries::{PurgePattern, PurgePatternError};
pub use cache::heir::{Outdated, Tidings};
pub use cache::listing::{CacheEntry, SelectingField};
pub use data_core::admission::{Admission, Asked};
pub use data_core::inside::{Inside, Unavailable};
pub use engine::{Engine, Handover, Listening, StartError, Whose};
pub use service::plan::PlanError;
pub use static_files::content_type;
pub use telemetry::latency::Histogram;
pub use telemetry::metrics;
pub use upstream::{GroupError, UpstreamStatus};
