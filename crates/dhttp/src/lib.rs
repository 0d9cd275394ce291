#![forbid(unsafe_code)]
//! DHTTP (Rabinovich and Wang, "DHTTP: An Efficient and Cache-Friendly Transfer Protocol for the Web"): requests and
//! short responses are single UDP datagrams, long responses go over a TCP connection that the *server* opens.
//!
//! [`wire`], [`token`], [`once`], [`server`] and [`client`] see no socket, clock or random source: time, bytes and a
//! seed come in as arguments, actions come out. The normative text is docs/protocol/dhttp.md.

pub mod client;
pub mod driver;
pub mod gateway;
pub mod intercept;
pub mod once;
pub mod pieces;
pub mod ports;
mod quota;
mod recent;
pub mod sealed;
pub mod server;
pub mod token;
pub mod wire;
