//! The accelerator: listeners, sessions, cache, static files and upstreams.
//!
//! A request's path through this crate: `engine` (starts the cores) → `data_core` (a thread, a runtime and listening
//! sockets) → `session` (HTTP/1 over one connection) or `dhttp` → `service` (route, cache, static files or `upstream`) → back
//! through the session or `dhttp`.

mod access_log;
mod admission;
mod clients;
mod clock;
mod data_core;
mod defence;
mod dhttp;
mod engine;
mod following;
mod http2;
mod icap;
mod inner;
mod latency;
mod load;
mod message;
pub mod metrics;
mod pacing;
mod quiet;
mod service;
mod session;
pub mod settings;
mod static_files;
pub mod tls;
mod upstream;

pub use admission::{Admission, Asked};
pub use engine::{Engine, StartError};
pub use inner::{Inside, Unavailable};
pub use latency::Histogram;
pub use service::entries::{PurgePattern, PurgePatternError};
pub use service::listing::{CacheEntry, SelectingField};
pub use service::plan::PlanError;
pub use static_files::content_type;
pub use upstream::UpstreamStatus;
