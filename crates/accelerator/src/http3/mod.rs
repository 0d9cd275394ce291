//! HTTP/3 (RFC 9114): QUIC is the library's, what is said on its streams is ours.
//!
//! A socket for each core and address (`steering`, `sockets`) has an endpoint that lets clients in (`endpoint`, `greetings`). Each
//! connection has a task that accepts its streams (`connection`, `connections`): what the client says of the connection
//! (`control`), and requests (`stream`), which come as frames (`frames`, `request`) and are answered so (`response`). What becomes
//! of a request is [`crate::streams`]' business.

mod connection;
mod connections;
mod control;
mod endpoint;
mod frames;
mod greetings;
mod request;
mod response;
mod setup;
mod sockets;
mod steering;
mod stream;

pub(crate) use connections::Connections;
pub(crate) use endpoint::serve;
pub(crate) use setup::{Quic, TokenSecret};
pub(crate) use steering::steer;
