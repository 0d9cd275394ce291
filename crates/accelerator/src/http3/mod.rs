//! HTTP/3 (RFC 9114): QUIC is the library's, what is said on its streams is ours.
//!
//! An endpoint for each core and address accepts connections (`endpoint`); each has a task that accepts its streams
//! (`connection`), of which one is what the client says of the connection (`control`) and the others are requests
//! (`stream`). What becomes of a request is [`crate::streams`]' business.

mod connection;
mod control;
mod endpoint;
mod frames;
mod setup;
mod sockets;
mod steering;
mod stream;

pub(crate) use connection::Connections;
pub(crate) use endpoint::serve;
pub(crate) use setup::Quic;
pub(crate) use steering::steer;
