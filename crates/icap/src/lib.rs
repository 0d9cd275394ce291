#![forbid(unsafe_code)]
//! The Internet Content Adaptation Protocol (RFC 3507), as its client speaks it, without I/O.
//!
//! [`Decoder`] reads what a server sends, at any split of the bytes; [`Request`] writes what it is asked. Nothing here
//! sees a socket or a clock. The server is not trusted: its heads and sections are bounded, and what it says of an HTTP
//! message is left as bytes, for the HTTP parsers to judge.

mod decoder;
mod error;
mod head;
mod options;
mod request;

pub use decoder::{Decoded, Decoder, Event};
pub use error::IcapError;
pub use head::{Body, ResponseHead, Sections};
pub use options::{Options, Transfer};
pub use request::{Method, Request, write_preview_end};

/// Greatest length of an ICAP response's own head, in bytes.
pub const HEAD_BYTES: usize = 16 * 1024;
/// Greatest length of all encapsulated HTTP heads of a message, in bytes.
pub const SECTIONS_BYTES: usize = 256 * 1024;
