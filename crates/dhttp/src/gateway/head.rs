//! Heads on their way through the gateway, and tunnels.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use tidegate_http::forward::{ConnectionOptions, write_field, write_response_fields};
use tidegate_http::{
    BodyFraming, FieldId, HeadLimits, Method, Progress, RequestParser, ResponseParser, Version, status_reason,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::PSEUDONYM;
use super::refusal::Refusal;
use crate::driver::stream::StreamError;
use crate::driver::{FetchResponse, Via};

/// Bytes copied at once in either direction of a tunnel.
const TUNNEL_BYTES: usize = 16 * 1024;

/// What a client wants from where.
#[derive(Debug)]
pub(super) struct Target {
    pub method: Method,
    pub host: String,
    pub port: u16,
    /// The Host field for the server.
    authority: String,
    /// Path and query for the server.
    pub path: Vec<u8>,
    pub keep_alive: bool,
    pub http11: bool,
    /// It waits for 100 (Continue) before it sends the body.
    pub expects_continue: bool,
}

impl Target {
    /// Reads a well-formed request head of a client that knows that it speaks to a proxy, which is at `gateway`.
    ///
    /// # Errors
    /// What to answer.
    pub fn of(head: &Bytes, gateway: SocketAddr) -> Result<Self, Refusal> {
        let mut parser = RequestParser::new(HeadLimits::default());
        let Ok(Progress::Complete { .. }) = parser.parse(head) else {
            return Err(Refusal::request("malformed request"));
        };
        let head = parser.head(head);
        if head.fields.get_all(FieldId::Via).any(names_this_proxy) {
            // RFC 9110 §7.6.3: forwarding it again would never end.
            return Err(Refusal::new(508, "proxy_loop_detected", "the request has passed this proxy before"));
        }
        let malformed = || Refusal::request("malformed request target");
        let target = std::str::from_utf8(head.target).map_err(|_| malformed())?;
        let (authority, path) = if head.method == Method::Connect {
            (target, "")
        } else {
            let rest = after_scheme(target, gateway)?;
            rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()))
        };
        let (host, port) =
            split_authority(authority, head.method != Method::Connect).ok_or_else(malformed)?;
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        Ok(Self {
            method: head.method,
            host: host.to_owned(),
            port,
            authority: authority.to_owned(),
            path: path.into_bytes(),
            keep_alive: head.keep_alive,
            http11: head.version == Version::Http11,
            expects_continue: head.expect_continue,
        })
    }

    /// Host and port, for people.
    pub fn whom(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

/// What follows `http://`.
fn after_scheme(target: &str, gateway: SocketAddr) -> Result<&str, Refusal> {
    match target.split_once("://") {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => Ok(rest),
        Some((scheme, _)) if scheme.eq_ignore_ascii_case("https") => {
            Err(Refusal::request("https goes through a tunnel: ask with CONNECT, as browsers and curl do"))
        }
        Some((scheme, _)) if !scheme.starts_with('/') => {
            Err(Refusal::request(format!("this proxy fetches http:// URLs, not {scheme}://")))
        }
        _ => Err(Refusal::request(format!(
            "this is an HTTP proxy, not a web server: set http://{gateway} as your browser's HTTP proxy, or try curl \
             --proxy http://{gateway} http://www.example.org/"
        ))),
    }
}

fn names_this_proxy(via: &[u8]) -> bool {
    via.windows(PSEUDONYM.len()).any(|part| part.eq_ignore_ascii_case(PSEUDONYM.as_bytes()))
}

/// Host without brackets, and port; without one it is HTTP's, if that may be left out.
fn split_authority(authority: &str, default: bool) -> Option<(&str, u16)> {
    if authority.contains('@') {
        return None;
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once(']')?,
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let port = match port.strip_prefix(':') {
        Some(digits) => digits.parse().ok().filter(|port| *port != 0)?,
        None if port.is_empty() && default => 80,
        None => return None,
    };
    (!host.is_empty()).then_some((host, port))
}

/// The head for the server: its own target form, nothing that concerns the client's connection only.
pub(super) fn request_head(head: &Bytes, target: &Target, framing: BodyFraming) -> Bytes {
    let mut parser = RequestParser::new(HeadLimits::default());
    let mut out = Vec::with_capacity(head.len() + 64);
    if let Ok(Progress::Complete { .. }) = parser.parse(head) {
        let head = parser.head(head);
        out.extend_from_slice(head.method_bytes);
        out.push(b' ');
        out.extend_from_slice(&target.path);
        out.extend_from_slice(b" HTTP/1.1\r\n");
        write_field(b"Host", target.authority.as_bytes(), &mut out);
        let options = ConnectionOptions::of(head.fields);
        for (id, name, value) in head.fields.iter() {
            let ours = matches!(id, FieldId::Host | FieldId::ContentLength | FieldId::Expect);
            if !ours && !options.removes(id, name) {
                write_field(name, value, &mut out);
            }
        }
    }
    match framing {
        BodyFraming::Length(length) => {
            write_field(b"Content-Length", length.to_string().as_bytes(), &mut out);
        }
        BodyFraming::Chunked => write_field(b"Transfer-Encoding", b"chunked", &mut out),
        // RFC 9110 §8.6: where the method lets a server expect content.
        BodyFraming::None if matches!(target.method, Method::Post | Method::Put | Method::Patch) => {
            write_field(b"Content-Length", b"0", &mut out);
        }
        BodyFraming::None | BodyFraming::UntilClose => {}
    }
    out.extend_from_slice(b"\r\n");
    out.into()
}

/// How a body goes to the client.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Framing {
    /// There is none.
    None,
    /// Its length is stated.
    AsIs,
    Chunked,
    /// The connection ends with it.
    UntilClose,
}

/// The head for the client, the framing of the body behind it, and what `Alt-Svc` said; `None` if it is malformed.
pub(super) fn response_head(
    response: &FetchResponse,
    target: &Target,
) -> Option<(Vec<u8>, Framing, Option<Vec<u8>>)> {
    let mut parser = ResponseParser::new(HeadLimits::default());
    parser.reset(target.method);
    let Ok(Progress::Complete { .. }) = parser.parse(&response.head) else { return None };
    let head = parser.head(&response.head);
    let framing = match head.framing {
        BodyFraming::None => Framing::None,
        BodyFraming::Length(_) => Framing::AsIs,
        BodyFraming::Chunked | BodyFraming::UntilClose if target.http11 => Framing::Chunked,
        BodyFraming::Chunked | BodyFraming::UntilClose => Framing::UntilClose,
    };
    let mut out = format!("HTTP/1.1 {} {}\r\n", head.status, status_reason(head.status)).into_bytes();
    // Alternatives are for whoever speaks to the server, which is this proxy.
    write_response_fields(&head, |id, _| id == FieldId::AltSvc, &mut out);
    let way = match response.via {
        Via::Datagram => "DHTTP (datagram)",
        Via::ServerConnection => "DHTTP (server's connection)",
        Via::ClientConnection => "DHTTP (client's connection)",
        Via::Http => "1.1",
    };
    let (protocol, comment) = way.split_once(' ').unwrap_or((way, ""));
    let via = format!("{protocol} {PSEUDONYM} {comment}");
    write_field(b"Via", via.trim_end().as_bytes(), &mut out);
    match framing {
        Framing::Chunked => write_field(b"Transfer-Encoding", b"chunked", &mut out),
        Framing::None | Framing::AsIs | Framing::UntilClose => {}
    }
    match (target.keep_alive && framing != Framing::UntilClose, target.http11) {
        (false, _) => write_field(b"Connection", b"close", &mut out),
        (true, false) => write_field(b"Connection", b"keep-alive", &mut out),
        (true, true) => {}
    }
    out.extend_from_slice(b"\r\n");
    Some((out, framing, head.fields.get(FieldId::AltSvc).map(<[u8]>::to_vec)))
}

/// Copies both ways until either side has ended, or neither has said anything for `silence`.
pub(super) async fn tunnel(
    mut client: TcpStream,
    mut server: TcpStream,
    early: &[u8],
    silence: Duration,
) -> Result<(), StreamError> {
    server.write_all(early).await?;
    let mut from_client = vec![0; TUNNEL_BYTES];
    let mut from_server = vec![0; TUNNEL_BYTES];
    let (mut client_open, mut server_open) = (true, true);
    while client_open || server_open {
        let step = async {
            tokio::select! {
                read = client.read(&mut from_client), if client_open => {
                    let length = read?;
                    client_open = length > 0;
                    match length {
                        0 => server.shutdown().await,
                        length => server.write_all(from_client.get(..length).unwrap_or_default()).await,
                    }
                }
                read = server.read(&mut from_server), if server_open => {
                    let length = read?;
                    server_open = length > 0;
                    match length {
                        0 => client.shutdown().await,
                        length => client.write_all(from_server.get(..length).unwrap_or_default()).await,
                    }
                }
            }
        };
        match timeout(silence, step).await {
            Ok(stepped) => stepped?,
            Err(_) => return Err(StreamError::Slow),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(head: &'static str) -> Result<(String, u16, String), (u16, String)> {
        let gateway = "127.0.0.1:3128".parse().unwrap();
        let target = Target::of(&Bytes::from_static(head.as_bytes()), gateway)
            .map_err(|refusal| (refusal.status, refusal.details))?;
        Ok((target.host, target.port, String::from_utf8(target.path).unwrap()))
    }

    #[test]
    fn targets_are_absolute_and_lead_somewhere_else() {
        let wanted = |host: &str, port, path: &str| Ok((host.to_owned(), port, path.to_owned()));
        assert_eq!(
            target("GET http://a.example/x?y HTTP/1.1\r\nHost: a.example\r\n\r\n"),
            wanted("a.example", 80, "/x?y")
        );
        assert_eq!(
            target("GET HTTP://[::1]:81?q HTTP/1.1\r\nHost: [::1]:81\r\n\r\n"),
            wanted("::1", 81, "/?q")
        );
        assert_eq!(target("CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n"), wanted("a", 443, "/"));
        for (head, status, said) in [
            ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", 400, "curl --proxy http://127.0.0.1:3128 "),
            ("GET https://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400, "CONNECT"),
            ("GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400, "not ftp://"),
            ("GET http://a/ HTTP/1.1\r\nHost: a\r\nVia: 1.1 Tidegate-Gateway\r\n\r\n", 508, "before"),
        ] {
            let (got, details) = target(head).unwrap_err();
            assert!(got == status && details.contains(said), "{head}: {got} {details}");
        }
    }

    #[test]
    fn what_concerns_the_clients_connection_stays_behind() {
        let head = Bytes::from_static(
            b"POST http://a:81/x HTTP/1.1\r\nHost: b\r\nProxy-Connection: keep-alive\r\nConnection: X-One\r\n\
              X-One: 1\r\nX-Two: 2\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n",
        );
        let target = Target::of(&head, "127.0.0.1:3128".parse().unwrap()).unwrap();
        assert_eq!(
            request_head(&head, &target, BodyFraming::Length(3)),
            "POST /x HTTP/1.1\r\nHost: a:81\r\nX-Two: 2\r\nContent-Length: 3\r\n\r\n"
        );
    }
}
