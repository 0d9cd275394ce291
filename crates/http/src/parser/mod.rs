//! Incremental parsers of message heads.
//!
//! The caller keeps the received bytes in one buffer that starts at the first byte of the head and grows; the parser
//! keeps its place, looks at every byte once and records spans, never copies.

mod framing;
mod lines;
mod request;
mod response;

pub(crate) use framing::content_length;
pub(crate) use lines::FieldLines;
pub use request::{ParsedRequest, RequestParser};
pub use response::{ParsedResponse, ResponseParser};

/// Bounds of one message head.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HeadLimits {
    /// Greatest length of the request line with its CRLF, in bytes (for responses the status line).
    pub request_line_bytes: u32,
    /// Greatest length of the whole head with its final CRLF, in bytes.
    pub head_bytes: u32,
    /// Greatest number of field lines.
    pub fields: u16,
}

impl HeadLimits {
    /// None, for heads that have been judged before or were written here.
    pub const NONE: Self = Self { request_line_bytes: u32::MAX, head_bytes: u32::MAX, fields: u16::MAX };
}

impl Default for HeadLimits {
    fn default() -> Self {
        Self { request_line_bytes: 16 * 1024, head_bytes: 64 * 1024, fields: 100 }
    }
}

/// How far a parser came.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Progress {
    /// All bytes so far are a sound beginning of a head; more are needed.
    Incomplete,
    /// The head is complete.
    Complete {
        /// Length of the head in bytes with its final CRLF; the body starts there.
        length: usize,
    },
}
