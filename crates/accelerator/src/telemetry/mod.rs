//! What is told of the server's work: counters, times, the access log, and how often the log may speak of one thing.

pub(crate) mod access_log;
pub(crate) mod latency;
pub(crate) mod log_limiter;
pub mod metrics;
