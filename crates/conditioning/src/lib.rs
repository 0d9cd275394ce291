//! Connection conditioning: small programs in front of a server pass the client's socket and its request along a chain.
//!
//! The paper is Park and Pai, "Connection Conditioning: Architecture-Independent Support for Simple, Robust Servers"
//! (§ numbers in this crate are its). [`wire`], [`link`] and [`ledger`] are the protocol between neighbours;
//! [`server`] is the server's end of the chain.

mod alive;
pub mod arguments;
pub mod confine;
mod draining;
pub mod filters;
pub mod host;
pub mod keeper;
pub mod launcher;
pub mod ledger;
pub mod link;
pub mod neighbours;
mod plain;
pub mod policy;
pub mod receipts;
pub mod server;
pub mod tree;
pub mod wire;
