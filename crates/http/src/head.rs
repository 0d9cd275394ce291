//! What a parsed message head says.

use crate::field::Fields;

/// A request method; what is not listed is [`Method::Other`] and known by its bytes.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[allow(missing_docs)]
pub enum Method {
    Get,
    Head,
    Post,
    Put,
    Delete,
    Connect,
    Options,
    Trace,
    Patch,
    Purge,
    Query,
    Other,
}

impl Method {
    /// RFC 9110 §9.2.1, and what defines QUERY: the client asks for no change of state.
    pub fn is_safe(self) -> bool {
        matches!(self, Self::Get | Self::Head | Self::Options | Self::Trace | Self::Query)
    }

    /// RFC 9110 §9.2.2: repeating the request has the effect of one.
    pub fn is_idempotent(self) -> bool {
        self.is_safe() || matches!(self, Self::Put | Self::Delete)
    }
}

/// The protocol version of a message.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Version {
    /// HTTP/1.0
    Http10,
    /// HTTP/1.1, or a later HTTP/1
    Http11,
    /// HTTP/2; the message itself is written as one of HTTP/1.1
    Http2,
    /// HTTP/3, likewise
    Http3,
}

/// How the end of a body is found (RFC 9112 §6.3).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BodyFraming {
    /// There is no body.
    None,
    /// The body has this many bytes.
    Length(u64),
    /// The body is chunked.
    Chunked,
    /// The body ends with the connection (responses only).
    UntilClose,
}

/// A request head as parsed: views into the receive buffer.
#[derive(Clone, Copy, Debug)]
pub struct RequestHead<'a> {
    /// The method.
    pub method: Method,
    /// The method as received.
    pub method_bytes: &'a [u8],
    /// The request target as received.
    pub target: &'a [u8],
    /// The version of the message.
    pub version: Version,
    /// The field lines.
    pub fields: Fields<'a>,
    /// How the body ends; never [`BodyFraming::UntilClose`].
    pub framing: BodyFraming,
    /// Whether the client keeps the connection open after the response (RFC 9112 §9.3).
    pub keep_alive: bool,
    /// `Expect: 100-continue` on HTTP/1.1 with a body to come (RFC 9110 §10.1.1).
    pub expect_continue: bool,
    /// `Connection: upgrade` with an `Upgrade` field on HTTP/1.1 (RFC 9110 §7.8).
    pub upgrade: bool,
}

/// A response head as parsed: views into the receive buffer.
#[derive(Clone, Copy, Debug)]
pub struct ResponseHead<'a> {
    /// The status code, 100 to 999.
    pub status: u16,
    /// The reason phrase as received.
    pub reason: &'a [u8],
    /// The version of the message.
    pub version: Version,
    /// The field lines.
    pub fields: Fields<'a>,
    /// How the body ends, given the request method the parser was told.
    pub framing: BodyFraming,
    /// Whether the connection may be used again (RFC 9112 §9.3).
    pub keep_alive: bool,
}
