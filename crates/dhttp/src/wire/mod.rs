//! The messages (DHTTP §III, Fig. 2): views over received bytes, and their writers.
//!
//! ```text
//! request   id (8)  port of the other channel (2)  flags (1)  [token length (1)  token]
//!           [count (1)  [tag (4)  count × (offset (4)  length (4))]]
//!           [ticket length (1)  [ticket (16)  number (4)]]  HTTP request
//! response  id (8)  HTTP response
//!           id (8)  0  tag (4)  total (4)  offset (4)  piece      a piece of an HTTP response
//!           id (8)  1                                             resend this over TCP
//!           id (8)  1  1                                          this may have been executed
//!           id (8)  2  token length (1)  token                    resend this with the token
//!           id (8)  2  token length (1)  token  ticket (16)  refused (8)  age (4)   with another ticket
//!           id (8)  3  token length (1)  token  HTTP response, or a sealed one
//! ```
//!
//! Integers are big-endian. An HTTP response starts with `H`, so that the byte behind the id tells the forms apart. No
//! response reads as a request with a port that clients may use and known flags, so that two servers never answer each
//! other in a loop.

mod request;
mod response;
#[cfg(test)]
mod tests;

use std::fmt;

pub use request::{Flags, Numbered, Once, PieceRange, Pieces, Request};
pub use response::{Answer, Response};

/// Length of a request's fixed header in bytes.
pub const REQUEST_HEADER_BYTES: usize = 11;
/// Length of a request identifier in bytes.
pub const ID_BYTES: usize = 8;
/// Greatest length of a token in bytes.
pub const MAX_TOKEN_BYTES: usize = 32;
/// Length in bytes of a ticket for requests that must not be repeated; see [`crate::once`].
pub const TICKET_BYTES: usize = 16;
/// As many bytes of a ticket's end tell it from others.
pub const TICKET_TAIL_BYTES: usize = 8;
/// Most ranges that one request asks for.
pub const MAX_RANGES: usize = 16;

/// Bytes in front of a piece of a response.
pub const PIECE_HEADER_BYTES: usize = ID_BYTES + 13;

/// Most bytes a message adds in front of the HTTP message.
pub const MAX_HEADER_BYTES: usize =
    REQUEST_HEADER_BYTES + 1 + MAX_TOKEN_BYTES + 1 + 4 + 8 * MAX_RANGES + 1 + TICKET_BYTES + 4;

/// What a response is matched to its request by: eight random bytes, unique among a client's outstanding requests.
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct RequestId(pub [u8; ID_BYTES]);

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

/// Why a message was refused; always the fault of the peer that sent it.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Shorter than its header: there is not even an id to answer to.
    #[error("message is shorter than its header")]
    Short,
    /// A request that has the form of a response: answering it could go on for ever.
    #[error("a response where a request is expected")]
    ResponseAsRequest,
    /// A flag that this version of the protocol does not know.
    #[error("unknown flags {bits:#04x}")]
    UnknownFlags {
        /// The id, so that an error can be sent.
        id: RequestId,
        /// The byte as received.
        bits: u8,
    },
    /// The token is longer than any token, or than the message.
    #[error("malformed token")]
    BadToken {
        /// The id, so that an error can be sent.
        id: RequestId,
    },
    /// More ranges than there may be.
    #[error("malformed field on pieces")]
    BadPieces {
        /// The id, so that an error can be sent.
        id: RequestId,
    },
    /// The ticket is neither empty nor a ticket.
    #[error("malformed ticket")]
    BadTicket {
        /// The id, so that an error can be sent.
        id: RequestId,
    },
    /// Neither HTTP nor one of the control answers, or one with something behind it.
    #[error("malformed response")]
    BadResponse,
}

impl WireError {
    /// The id of the request that an error response can be sent to.
    pub const fn id(self) -> Option<RequestId> {
        match self {
            Self::UnknownFlags { id, .. }
            | Self::BadToken { id }
            | Self::BadPieces { id }
            | Self::BadTicket { id } => Some(id),
            Self::Short | Self::ResponseAsRequest | Self::BadResponse => None,
        }
    }
}

fn split_id(bytes: &[u8]) -> Option<(RequestId, &[u8])> {
    bytes.split_first_chunk().map(|(&id, rest)| (RequestId(id), rest))
}

/// A token, and what follows it.
type TokenAndRest<'a> = (&'a [u8], &'a [u8]);

/// `Ok(None)`: more bytes are needed.
fn split_token(bytes: &[u8]) -> Result<Option<TokenAndRest<'_>>, ()> {
    let Some((&length, rest)) = bytes.split_first() else { return Ok(None) };
    if usize::from(length) > MAX_TOKEN_BYTES {
        return Err(());
    }
    Ok(rest.split_at_checked(usize::from(length)))
}

fn write_token(token: &[u8], out: &mut Vec<u8>) {
    debug_assert!(token.len() <= MAX_TOKEN_BYTES);
    out.push(token.len() as u8);
    out.extend_from_slice(token);
}
