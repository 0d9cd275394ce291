//! The accelerator: listeners, sessions, cache, static files and upstreams.
//!
//! A request's path through this crate: `engine` (a thread, a runtime and listening sockets per core) → `session`
//! (HTTP/1 over one connection) → `service` (route, cache, static files or `upstream`) → back through the session.

pub mod settings;
