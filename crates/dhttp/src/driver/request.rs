//! What a client is asked to fetch, and what it brings.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tidegate_http::{BodyFraming, HeadError, HeadLimits, Method, Progress, RequestParser};

use super::service::{Aborted, Body};
use crate::client::StartError;

/// The port of a URL that names none: HTTP's, as the paper assumes well-known ports.
pub const DEFAULT_PORT: u16 = 80;

/// A request to be fetched.
#[derive(Clone, Debug)]
pub struct FetchRequest {
    /// The server.
    pub server: SocketAddr,
    /// The host name of the URL, for the policy on caches.
    pub site: String,
    /// The method, which must be that of `head`.
    pub method: Method,
    /// The HTTP/1.1 request head with its final CRLF and, if there is a body, its framing.
    pub head: Bytes,
    /// The body as it is sent, in the framing that the head states.
    pub body: FetchBody,
    /// `dhttpt://`: not by UDP (DHTTP §III-A).
    pub by_tcp: bool,
    /// Where the same site speaks HTTP, for servers that turn out not to speak DHTTP (DHTTP §IV-E).
    pub http: Option<SocketAddr>,
}

/// The body of a request.
#[derive(Clone, Debug)]
pub enum FetchBody {
    /// It is there, perhaps empty, and can be sent again.
    Full(Bytes),
    /// It is still being made: the request goes by TCP, once.
    Streamed(Upload),
}

/// A body that is still being made. Clones are one body: the first request that has a connection takes it, so that
/// another address can be tried where none could be opened.
#[derive(Clone, Debug)]
pub struct Upload(Arc<Mutex<Option<Body>>>);

impl From<Body> for Upload {
    fn from(body: Body) -> Self {
        Self(Arc::new(Mutex::new(Some(body))))
    }
}

impl Upload {
    pub(super) fn take(&self) -> Option<Body> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Which way a response came.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Via {
    /// In one datagram, or in several as pieces.
    Datagram,
    /// On a connection that the server opened.
    ServerConnection,
    /// On a connection that the client opened.
    ClientConnection,
    /// By HTTP.
    Http,
}

/// A response.
#[derive(Debug)]
pub struct FetchResponse {
    /// The status.
    pub status: u16,
    /// The head as received, with its final CRLF; well formed.
    pub head: Bytes,
    /// The body, without the chunked coding if there was one.
    pub body: Body,
    /// Which way it came.
    pub via: Via,
    /// Who answered: the server, or an interception cache.
    pub from: SocketAddr,
    /// Who was asked.
    pub asked: SocketAddr,
}

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The caller's fault: not an absolute URL of a scheme that this client speaks.
    #[error("not a dhttp:// or dhttpt:// URL: {0}")]
    Url(&'static str),
    /// The caller's fault: the request is malformed.
    #[error("malformed request: {0}")]
    Request(#[from] HeadError),
    /// The caller's fault: the request head is not complete.
    #[error("incomplete request head")]
    IncompleteRequest,
    /// Too many requests at one time.
    #[error("{0}")]
    Start(#[from] StartError),
    /// This machine's fault: no ports to be had.
    #[error("cannot open a pair of ports: {0}")]
    Ports(std::io::Error),
    /// The name does not resolve.
    #[error("cannot resolve {0}")]
    Resolve(String),
    /// The server cannot be reached, or went away without an answer. If `sent` and the request must not be repeated,
    /// it may have been executed.
    #[error("no answer: {reason}")]
    NoAnswer {
        /// What went wrong.
        reason: std::io::Error,
        /// The request was sent, at least in part.
        sent: bool,
    },
    /// The server's fault: what it sent is no answer to this request.
    #[error("malformed answer")]
    BadAnswer,
    /// What answers at this port is HTTP.
    #[error("the server speaks HTTP at this port, not DHTTP")]
    SpeaksHttp,
    /// The body of the response broke off.
    #[error("{0}")]
    Aborted(#[from] Aborted),
    /// The client was dropped.
    #[error("the client has ended")]
    Ended,
}

/// A URL taken apart: scheme, host, port and the rest.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DhttpUrl {
    /// `dhttpt://`.
    pub by_tcp: bool,
    /// Host as written, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// What follows the authority; starts with `/`.
    pub target: String,
}

impl DhttpUrl {
    /// Takes a `dhttp://` or `dhttpt://` URL apart.
    ///
    /// # Errors
    /// It is none.
    pub fn parse(url: &str) -> Result<Self, FetchError> {
        let (scheme, rest) = url.split_once("://").ok_or(FetchError::Url("no scheme"))?;
        let by_tcp = if scheme.eq_ignore_ascii_case("dhttp") {
            false
        } else if scheme.eq_ignore_ascii_case("dhttpt") {
            true
        } else {
            return Err(FetchError::Url("unknown scheme"));
        };
        let rest = rest.split('#').next().unwrap_or(rest);
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, target) = rest.split_at(end);
        if authority.contains('@') {
            return Err(FetchError::Url("user information"));
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(bracketed) => bracketed.split_once(']').ok_or(FetchError::Url("unclosed bracket"))?,
            None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
        };
        let port = match port.strip_prefix(':') {
            Some(digits) => {
                digits.parse().ok().filter(|port| *port > 0).ok_or(FetchError::Url("bad port"))?
            }
            None if port.is_empty() => DEFAULT_PORT,
            None => return Err(FetchError::Url("bad port")),
        };
        if host.is_empty() {
            return Err(FetchError::Url("no host"));
        }
        // Anything else would end up in a request head.
        if !url.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(FetchError::Url("a byte that a URL may not have"));
        }
        let target = if target.starts_with('/') { target.to_owned() } else { format!("/{target}") };
        Ok(Self { by_tcp, host: host.to_owned(), port, target })
    }

    /// The Host field of requests for this URL.
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        if self.port == DEFAULT_PORT { host } else { format!("{host}:{}", self.port) }
    }
}

impl FetchError {
    /// Whether encryption failed because the server's certificate is not the one that was asked for.
    pub fn is_other_certificate(&self) -> bool {
        let Self::NoAnswer { reason, .. } = self else { return false };
        reason.get_ref().is_some_and(|inner| inner.is::<super::security::OtherCertificate>())
    }

    /// The request, which must not be repeated, may have been executed.
    pub(super) fn outcome_unknown() -> Self {
        let reason =
            std::io::Error::other("the request may have been executed; the server does not know any more");
        Self::NoAnswer { reason, sent: true }
    }

    /// What went wrong after the request had been sent by UDP.
    pub(super) fn after_sending(self) -> Self {
        match self {
            Self::NoAnswer { reason, .. } => Self::NoAnswer { reason, sent: true },
            error => error,
        }
    }
}

impl FetchRequest {
    /// A GET of `url` from `server`, which is what its host name resolves to.
    pub fn get(url: &DhttpUrl, server: SocketAddr) -> Self {
        let head = format!("GET {} HTTP/1.1\r\nHost: {}\r\n\r\n", url.target, url.authority());
        Self {
            server,
            site: url.host.clone(),
            method: Method::Get,
            head: head.into(),
            body: FetchBody::Full(Bytes::new()),
            by_tcp: url.by_tcp,
            http: None,
        }
    }

    /// Whether a datagram may hold it: the chunked coding is for connections.
    pub(super) fn is_delimited_by_length(&self) -> bool {
        let mut parser = RequestParser::new(HeadLimits::default());
        matches!(parser.parse(&self.head), Ok(Progress::Complete { .. }))
            && parser.head(&self.head).framing != BodyFraming::Chunked
    }

    /// That the head is one whole head, and nothing else, and is what `method` says.
    pub(super) fn check(&self) -> Result<(), FetchError> {
        let mut parser = RequestParser::new(HeadLimits::default());
        match parser.parse(&self.head)? {
            Progress::Complete { length }
                if length == self.head.len() && parser.head(&self.head).method == self.method =>
            {
                Ok(())
            }
            _ => Err(FetchError::IncompleteRequest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(url: &str) -> Option<(bool, String, u16, String)> {
        DhttpUrl::parse(url).ok().map(|url| (url.by_tcp, url.host, url.port, url.target))
    }

    #[test]
    fn urls_are_taken_apart() {
        let url = |by_tcp, host: &str, port, target: &str| Some((by_tcp, host.into(), port, target.into()));
        assert_eq!(parts("dhttp://a.example/x?y#z"), url(false, "a.example", 80, "/x?y"));
        assert_eq!(parts("DHTTPT://a.example:8080"), url(true, "a.example", 8080, "/"));
        assert_eq!(parts("dhttp://[::1]:81?q"), url(false, "::1", 81, "/?q"));
        for bad in [
            "http://a/",
            "dhttp:/a",
            "dhttp://",
            "dhttp://u@a/",
            "dhttp://a:0/",
            "dhttp://a:x/",
            "dhttp://[::1/",
            "dhttp://[::1]x/",
            "dhttp://a/ HTTP/1.1",
            "dhttp://a/\r\nX: y",
        ] {
            assert_eq!(parts(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_request_head_that_is_not_one_whole_head_is_refused() {
        let url = DhttpUrl::parse("dhttp://[2001:db8::1]:8080/x").unwrap();
        let mut request = FetchRequest::get(&url, "127.0.0.1:8080".parse().unwrap());
        assert!(request.head.ends_with(b"Host: [2001:db8::1]:8080\r\n\r\n"));
        assert!(request.check().is_ok());
        request.method = Method::Head;
        assert!(matches!(request.check(), Err(FetchError::IncompleteRequest)));
        request.method = Method::Get;
        request.head = request.head.slice(..request.head.len() - 1);
        assert!(matches!(request.check(), Err(FetchError::IncompleteRequest)));
    }
}
