use std::io;

use tidegate_http::{BodyError, HeadError};

use crate::upstream::http2;

/// Why no response came, or not all of it. Says whose fault it is; [`UpstreamError::status`] is the answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum UpstreamError {
    /// Every server of the group is out.
    #[error("no server of the group is available")]
    NoServer,
    /// As many connections as allowed are busy, and none became free in time.
    #[error("all connections to the server are busy")]
    Busy,
    /// This client has as many connections, or as many requests that wait for one, as one client may: others may get
    /// one.
    #[error("the client has its share of the connections to the server")]
    ClientsShare,
    /// No connection could be established.
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    /// This host has no descriptor, port or memory for another connection, which says nothing of the server.
    #[error("this host has nothing left for another connection: {0}")]
    Exhausted(io::Error),
    /// The server took too long to accept the connection.
    #[error("the connection attempt timed out")]
    ConnectTimeout,
    /// The server was silent for too long.
    #[error("the server did not answer in time")]
    ResponseTimeout,
    /// The connection broke.
    #[error("the connection to the server broke: {0}")]
    Broken(io::Error),
    /// The server has done nothing about the request.
    #[error("the server does not take the request: {0}")]
    Untouched(io::Error),
    /// The request has something that HTTP/2 has no form for.
    #[error("the request cannot be said in HTTP/2: {0}")]
    NoHttp2(io::Error),
    /// The server ended a connection by HTTP/2 that such a request had for itself.
    #[error("the server ends its connection at a request's head of so many bytes")]
    LargeHead,
    /// The server closed the connection before the response was whole.
    #[error("the server closed the connection before the response was whole")]
    Incomplete,
    /// The response's head is malformed.
    #[error("malformed response: {0}")]
    Head(HeadError),
    /// The response's body is malformed.
    #[error("malformed response body: {0}")]
    Body(BodyError),
    /// The response's content is longer or shorter than its head announced; not the server's doing, whose framing was obeyed.
    #[error("the response's content is not as long as it was announced")]
    OtherLength,
    /// The server sent interim responses, and no final one among as many as are taken.
    #[error("the server sent too many interim responses")]
    TooManyInterim,
    /// The server answered 101 to a request that did not ask for another protocol.
    #[error("the server changed protocols without being asked to")]
    UnexpectedUpgrade,
    /// The server answered 304 to a request without conditions.
    #[error("the server answered 304 to a request without conditions")]
    UnaskedNotModified,
    /// An ICAP service was to look at the response, and did not decide.
    #[error("the response was not looked at by the ICAP service")]
    Unreviewed,
    /// The client's body could not be read.
    #[error("the request body could not be read: {0}")]
    Client(BodyReadError),
}

/// Why the client's body could not be read; the client's fault but for the last.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum BodyReadError {
    /// The chunked coding is wrong.
    #[error("malformed chunked coding")]
    Malformed,
    /// The client closed the connection before the body was whole.
    #[error("the client went away")]
    ClientGone,
    /// The body came more slowly than allowed.
    #[error("the body came too slowly")]
    TooSlow,
    /// The body is larger than allowed.
    #[error("the body is too large")]
    TooLarge,
    /// The defence does not let it pass.
    #[error("the body is refused")]
    Refused,
    /// What an ICAP service put in its place ended early; not the client's fault.
    #[error("the adapted body ended early")]
    Adaptation,
}

impl UpstreamError {
    /// The status that tells the client (RFC 9110 §15.6.3–5).
    pub(crate) fn status(&self) -> u16 {
        match self {
            Self::NoServer | Self::Busy | Self::ClientsShare | Self::Exhausted(_) | Self::Unreviewed => 503,
            Self::ConnectTimeout | Self::ResponseTimeout => 504,
            Self::Connect(_) | Self::Broken(_) | Self::Untouched(_) | Self::Incomplete => 502,
            Self::NoHttp2(_) => 400,
            Self::LargeHead => 431,
            Self::Head(_) | Self::Body(_) | Self::UnexpectedUpgrade | Self::UnaskedNotModified => 502,
            Self::TooManyInterim | Self::OtherLength => 502,
            Self::Client(BodyReadError::Malformed | BodyReadError::ClientGone) => 400,
            Self::Client(BodyReadError::TooSlow) => 408,
            Self::Client(BodyReadError::TooLarge) => 413,
            Self::Client(BodyReadError::Refused) => 403,
            Self::Client(BodyReadError::Adaptation) => 502,
        }
    }

    /// What has gone wrong with a connection, or with one of those that share it.
    pub(crate) fn of_connection(error: io::Error) -> Self {
        if http2::is_untouched(&error) { Self::Untouched(error) } else { Self::Broken(error) }
    }

    /// Of two servers that were tried, what is said of both: one that others can have says more than one that nobody
    /// can.
    pub(crate) fn or_then(self, next: Self) -> Self {
        if matches!(self, Self::ClientsShare) { self } else { next }
    }

    /// Whether it would be the same for any request: the upstream was not even asked.
    pub(crate) fn is_servers_state(&self) -> bool {
        matches!(
            self,
            Self::NoServer | Self::Busy | Self::Connect(_) | Self::ConnectTimeout | Self::Exhausted(_)
        )
    }

    /// Whether no server could be reached, as opposed to one that was and gave no answer, or to want of something here.
    pub(crate) fn is_disconnection(&self) -> bool {
        matches!(self, Self::NoServer | Self::Connect(_) | Self::ConnectTimeout)
    }

    /// Why the server was not asked: because it could not be reached, or for want of something here.
    pub(crate) fn of_connecting(error: io::Error) -> Self {
        const OWN: [i32; 5] = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EADDRNOTAVAIL];
        match error.raw_os_error() {
            Some(code) if OWN.contains(&code) => Self::Exhausted(error),
            _ => Self::Connect(error),
        }
    }

    /// Whether the server has had a part in it, so that its health suffers.
    pub(crate) fn is_servers_fault(&self) -> bool {
        let is_nobodys = match self {
            Self::Exhausted(_) | Self::Busy | Self::Untouched(_) | Self::OtherLength => true,
            // A page that is beyond our limits is so on every server, and says nothing of the others.
            Self::Head(error) => {
                matches!(error, HeadError::HeadTooLarge { .. } | HeadError::TooManyFields { .. })
            }
            _ => false,
        };
        !is_nobodys && !self.is_clients_fault()
    }

    /// Whether the client is to blame, so that the server's health does not suffer.
    pub(crate) fn is_clients_fault(&self) -> bool {
        match self {
            Self::NoHttp2(_) | Self::LargeHead => true,
            Self::Client(error) => *error != BodyReadError::Adaptation,
            _ => false,
        }
    }
}
