//! One URL over Trickles: `trickles://host[:port][,host[:port]…]/path`. All hosts are replicas; each address of a
//! name is one too.

use crate::udp::Connection;
use std::io;
use std::net::SocketAddr;
use tidegate_http::{BodyFraming, HeadLimits, Progress, ResponseParser};
use tokio::io::AsyncReadExt;

/// Port of a URL that names none: that of HTTP.
pub const DEFAULT_PORT: u16 = 80;
const SCHEME: &str = "trickles://";
/// Bytes read at once.
const PIECE_BYTES: usize = 64 * 1024;

/// Why a URL was not fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// Not a URL of this scheme.
    #[error("expected trickles://HOST[:PORT]/PATH: {0}")]
    Url(&'static str),
    /// No server's name has an address.
    #[error("cannot resolve {host}: {source}")]
    Resolve {
        /// The host as written.
        host: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// The transport failed.
    #[error("{0}")]
    Transport(#[source] io::Error),
    /// The response is not HTTP.
    #[error("malformed response: {0}")]
    Response(#[from] tidegate_http::HeadError),
    /// The response ended before its head or Content-Length said.
    #[error("the response ended early, {missing} bytes before its end")]
    Truncated {
        /// Bytes that were still to come; 0 if they were not announced.
        missing: u64,
    },
    /// The sink refused what was read.
    #[error("{0}")]
    Sink(#[source] io::Error),
}

/// A parsed URL.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Url {
    /// Each with a port.
    pub authorities: Vec<String>,
    /// What Host says: the first authority as written.
    pub host: String,
    /// Path and query.
    pub target: String,
}

impl Url {
    /// Reads a URL.
    ///
    /// # Errors
    /// Another scheme, no host, or bytes that a request line cannot have.
    pub fn parse(text: &str) -> Result<Self, FetchError> {
        let (scheme, rest) = text.split_at_checked(SCHEME.len()).ok_or(FetchError::Url("no scheme"))?;
        if !scheme.eq_ignore_ascii_case(SCHEME) {
            return Err(FetchError::Url("another scheme"));
        }
        let rest = rest.split('#').next().unwrap_or(rest);
        let (hosts, target) = match rest.find(['/', '?']) {
            Some(at) => rest.split_at(at),
            None => (rest, "/"),
        };
        let target = if target.starts_with('/') { target.to_owned() } else { format!("/{target}") };
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(FetchError::Url(
                "spaces, control characters and other letters must be percent-encoded",
            ));
        }
        let authorities = hosts.split(',').map(with_port).collect::<Result<Vec<_>, _>>()?;
        let host = hosts.split(',').next().unwrap_or(hosts).to_owned();
        Ok(Self { authorities, host, target })
    }

    /// Every address of every host, in their order, and what is wrong with hosts that have none.
    ///
    /// # Errors
    /// No name can be resolved.
    pub async fn resolve(&self) -> Result<(Vec<SocketAddr>, Vec<FetchError>), FetchError> {
        let (mut servers, mut unknown) = (Vec::new(), Vec::new());
        for authority in &self.authorities {
            match tokio::net::lookup_host(authority).await {
                Ok(addresses) => servers.extend(addresses),
                Err(source) => unknown.push(FetchError::Resolve { host: authority.clone(), source }),
            }
        }
        match unknown.pop() {
            Some(error) if servers.is_empty() => Err(error),
            last => {
                unknown.extend(last);
                Ok((servers, unknown))
            }
        }
    }
}

fn with_port(authority: &str) -> Result<String, FetchError> {
    let wrong = |what| Err(FetchError::Url(what));
    let (host, port) = match authority.rfind([':', ']']) {
        Some(at) if authority[at..].starts_with(':') => (&authority[..at], Some(&authority[at + 1..])),
        _ => (authority, None),
    };
    if host.is_empty() {
        return wrong("a host is missing");
    }
    if host.contains('@') {
        return wrong("names and passwords are not sent");
    }
    let is_bracketed = host.starts_with('[') && host.ends_with(']');
    if !is_bracketed && host.contains([':', '[', ']']) {
        return wrong("an IPv6 address is written in brackets: [2001:db8::1]:4000");
    }
    match port.map_or(Some(DEFAULT_PORT), |port| port.parse().ok().filter(|&port| port > 0)) {
        Some(port) => Ok(format!("{host}:{port}")),
        None => wrong("the port is no number from 1 to 65535"),
    }
}

/// What receives a response.
pub trait Sink {
    /// The status, and the head with its final empty line.
    fn head(&mut self, status: u16, head: &[u8]) -> io::Result<()>;
    /// The next bytes of content.
    fn content(&mut self, bytes: &[u8]) -> io::Result<()>;
}

/// Gets `url` over a connection to its servers and passes the response to `sink`; returns the status.
///
/// # Errors
/// See [`FetchError`]; what was read before has been passed on.
pub async fn fetch(url: &Url, connection: &Connection, sink: &mut impl Sink) -> Result<u16, FetchError> {
    let transport = FetchError::Transport;
    let request = format!("GET {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", url.target, url.host);
    let mut stream = connection.request(request.as_bytes()).map_err(|error| transport(error.into()))?;
    let mut parser = ResponseParser::new(HeadLimits::default());
    let mut received = Vec::with_capacity(PIECE_BYTES);
    let head_bytes = loop {
        if let Progress::Complete { length } = parser.parse(&received)? {
            break length;
        }
        if stream.read_buf(&mut received).await.map_err(transport)? == 0 {
            return Err(FetchError::Truncated { missing: 0 });
        }
    };
    let head = parser.head(&received);
    let (status, framing) = (head.status, head.framing);
    sink.head(status, &received[..head_bytes]).map_err(FetchError::Sink)?;
    let mut left = match framing {
        BodyFraming::None => Some(0),
        BodyFraming::Length(length) => Some(length),
        // This service announces every length; of another the end of the output is the end.
        BodyFraming::Chunked | BodyFraming::UntilClose => None,
    };
    received.drain(..head_bytes);
    loop {
        let take = left
            .map_or(received.len(), |left| received.len().min(usize::try_from(left).unwrap_or(usize::MAX)));
        sink.content(&received[..take]).map_err(FetchError::Sink)?;
        left = left.map(|left| left - take as u64);
        received.clear();
        if left == Some(0) {
            return Ok(status);
        }
        if stream.read_buf(&mut received).await.map_err(transport)? == 0 {
            return match left {
                None => Ok(status),
                Some(missing) => Err(FetchError::Truncated { missing }),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_with_hosts_ports_and_targets() {
        let url = Url::parse("trickles://a,b:81,[::1]:82/x?y#z").unwrap();
        assert_eq!(url.authorities, ["a:80", "b:81", "[::1]:82"]);
        assert_eq!((url.host.as_str(), url.target.as_str()), ("a", "/x?y"));
        assert_eq!(Url::parse("TRICKLES://[::1]").unwrap().authorities, ["[::1]:80"]);
        assert!(Url::parse("trickles://::1:4000/").unwrap_err().to_string().contains("in brackets"));
        assert_eq!(Url::parse("trickles://h?q").unwrap().target, "/?q");
        for wrong in [
            "http://a/",
            "trickles://",
            "trickles:///x",
            "trickles://a:x/",
            "trickles://a/ b",
            "trickles://u@a/",
            "trickles://a,/",
            "trickles://::1:4000/",
            "trickles://[::1/",
            "trickles://::1]/",
        ] {
            assert!(Url::parse(wrong).is_err(), "{wrong}");
        }
    }
}
