//! The protocol over tokio's sockets: a server in front of a [`Service`], and a client.

mod accepted;
mod carry;
mod client;
mod handle;
mod handover;
mod icmp;
mod listener;
mod once;
mod opened;
mod ports;
mod request;
mod security;
mod server;
mod service;
pub(crate) mod stream;
mod udp;

pub use client::{ClientOptions, DhttpClient};
pub use handle::{DriverMetrics, ServerHandle};
pub use listener::{BindError, Listener};
pub use once::Window;
pub use request::{DEFAULT_PORT, DhttpUrl, FetchBody, FetchError, FetchRequest, FetchResponse, Upload, Via};
pub use security::{Fingerprint, Security};
pub use server::{ServerOptions, random_secret, serve};
pub use service::{
    Aborted, Arrival, Body, BodySender, Immediate, Note, Reading, Request, Response, ResponseSender, Room,
    Service, method_of,
};
