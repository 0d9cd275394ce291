//! What goes into a client's core, and what comes out.

use std::net::SocketAddr;

use bytes::Bytes;
use tidegate_http::Method;

use crate::wire::RequestId;

/// A pair of ports, UDP and TCP, in the order in which they were taken into use.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Generation(pub(super) u32);

/// A request to be made.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// The server's address; its UDP and TCP ports have one number.
    pub server: SocketAddr,
    /// The host name of the URL, for the policy on caches.
    pub site: String,
    /// The request's method.
    pub method: Method,
    /// The HTTP request, head and body; empty if the body is too long to be held, which needs `by_tcp`.
    pub http: Bytes,
    /// `dhttpt://`: not by UDP (DHTTP §III-A).
    pub by_tcp: bool,
}

/// Why a request was not begun.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum StartError {
    /// Try again when another request is over.
    #[error("{limit} requests are outstanding already")]
    TooMany {
        /// The greatest number of outstanding requests.
        limit: usize,
    },
    /// [`super::Client::use_ports`] has not been called.
    #[error("the client has no ports yet")]
    NoPorts,
}

/// Why a request goes over a connection that the client opens.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TcpReason {
    /// It must not be repeated, is too long for a datagram, or its URL says so.
    Request,
    /// The server asked for it.
    Asked,
    /// No answer came, however often it was sent, or nothing that is sent to the server by UDP gets one.
    NoAnswer,
    /// The answer was of a cache that the policy refuses: TCP passes caches by (DHTTP §IV-A).
    CacheRefused,
    /// The answer was malformed, or the connection with the answer broke.
    BadAnswer,
}

/// What becomes of a request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Event {
    /// The response came by UDP and is complete.
    Response {
        /// The request.
        id: RequestId,
        /// Who answered: the server, or a cache.
        from: SocketAddr,
        /// The HTTP response.
        http: Bytes,
        /// Where its body starts.
        head_bytes: usize,
    },
    /// Open a connection to the server and send the request there with [`super::Client::tcp_header`] in front, once.
    UseTcp {
        /// The request.
        id: RequestId,
        /// Why.
        reason: TcpReason,
    },
    /// The request, which must not be repeated, may have been executed; nothing more will be known of it.
    OutcomeUnknown {
        /// The request.
        id: RequestId,
    },
    /// The server does not speak DHTTP: make the request by HTTP at once (DHTTP §IV-E).
    UseHttp {
        /// The request.
        id: RequestId,
    },
}

/// Why a connection's next response is refused. The connection must be closed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ClaimError {
    /// An id is not accepted twice, and not from nowhere.
    #[error("no request waits for this response")]
    Unmatched,
    /// The policy on caches.
    #[error("answers of this cache are refused")]
    CacheRefused,
}

/// A datagram to be sent.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Transmit {
    /// From the UDP port of this pair.
    pub generation: Generation,
    /// The server.
    pub to: SocketAddr,
    /// What to send.
    pub payload: Vec<u8>,
}
