//! What a server is asked (RFC 3507 §4.3.2).

use std::io::Write;

/// What is asked for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Method {
    /// What the service can do.
    Options,
    /// To adapt a request.
    Reqmod,
    /// To adapt a response.
    Respmod,
}

/// The head of a request with what it encapsulates, except for the body.
#[derive(Clone, Copy, Debug)]
pub struct Request<'r> {
    /// What is asked for.
    pub method: Method,
    /// The service, such as `icap://127.0.0.1:1344/echo`.
    pub service: &'r str,
    /// The server, as `Host` names it.
    pub host: &'r str,
    /// The client whose message it is, for logs and rules of the server (`X-Client-IP`, a common extension).
    pub client: Option<std::net::IpAddr>,
    /// 204 is also understood when it comes after the whole body, which is kept.
    pub allow_204: bool,
    /// Bytes of the body that are sent first.
    pub preview_bytes: Option<usize>,
    /// The head of the HTTP request, with its empty line; of OPTIONS, nothing.
    pub http_request: &'r [u8],
    /// The head of the HTTP response, with its empty line, for RESPMOD.
    pub http_response: Option<&'r [u8]>,
    /// Whether a body follows, in the chunked coding.
    pub has_body: bool,
}

impl Request<'_> {
    /// Appends the head and the encapsulated heads; the body follows.
    pub fn write(&self, out: &mut Vec<u8>) {
        let method = match self.method {
            Method::Options => "OPTIONS",
            Method::Reqmod => "REQMOD",
            Method::Respmod => "RESPMOD",
        };
        // Writing to a vector does not fail.
        let _ = write!(out, "{method} {} ICAP/1.0\r\nHost: {}\r\n", self.service, self.host);
        if let Some(client) = self.client {
            let _ = write!(out, "X-Client-IP: {client}\r\n");
        }
        if self.allow_204 {
            out.extend_from_slice(b"Allow: 204\r\n");
        }
        if let Some(bytes) = self.preview_bytes {
            let _ = write!(out, "Preview: {bytes}\r\n");
        }
        self.write_encapsulated(out);
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(self.http_request);
        out.extend_from_slice(self.http_response.unwrap_or(b""));
    }

    /// RFC 3507 §4.4.1.
    fn write_encapsulated(&self, out: &mut Vec<u8>) {
        let (request, response) = (self.http_request.len(), self.http_response.map_or(0, <[u8]>::len));
        out.extend_from_slice(b"Encapsulated: ");
        if request > 0 {
            out.extend_from_slice(b"req-hdr=0, ");
        }
        if self.http_response.is_some() {
            let _ = write!(out, "res-hdr={request}, ");
        }
        let body = match (self.method, self.has_body) {
            (Method::Reqmod, true) => "req-body",
            (Method::Respmod, true) => "res-body",
            _ => "null-body",
        };
        let _ = write!(out, "{body}={}\r\n", request + response);
    }
}

/// Appends the end of a preview: `is_all` of the body was in it, or the server has to ask for the rest (RFC 3507 §4.5).
pub fn write_preview_end(is_all: bool, out: &mut Vec<u8>) {
    out.extend_from_slice(if is_all { b"0; ieof\r\n\r\n" } else { b"0\r\n\r\n" });
}
