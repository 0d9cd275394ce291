#![deny(unsafe_code)]
//! Trickles: a transport whose server keeps no per-connection state.
//!
//! Everything that a server would remember about a connection travels in a *continuation* that the client hands back
//! with its next request. The protocol is written down in `docs/protocol/trickles.md`; section numbers after
//! "Trickles" are those of Shieh, Myers, Sirer: "Trickles: A Stateless Network Stack for Improved Scalability,
//! Resilience, and Flexibility" (NSDI 2005).

pub mod client;
pub mod congestion;
pub mod continuation;
pub mod cubic;
pub mod cwnd;
pub mod fetch;
pub mod files;
pub mod http;
pub mod keys;
pub mod mac;
pub mod nonce;
pub mod replay;
pub mod sealed;
pub mod server;
pub mod tcp;
pub mod udp;
pub mod user;
pub mod wire;
