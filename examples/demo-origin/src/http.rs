//! Just enough HTTP/1.1 for an origin behind a proxy that sends well-formed requests (RFC 9112).

use std::io::{self, BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::net::TcpStream;

/// Longest line of a head or chunk size that is read.
const MAX_LINE_BYTES: u64 = 16 << 10;
/// Most fields of a head.
const MAX_FIELDS: usize = 200;

/// How the end of a request's body is known (RFC 9112 §6).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Body {
    /// So many bytes, perhaps none.
    Length(u64),
    /// Chunks until the empty one.
    Chunked,
}

/// A request's head, as far as the demo cares.
pub struct Request {
    /// Method, as sent.
    pub method: String,
    /// Path without the query.
    pub path: String,
    /// Whether another request may follow.
    pub keep_alive: bool,
    /// `If-None-Match`, or an empty string.
    pub if_none_match: String,
    /// `Content-Type`, or an empty string.
    pub content_type: String,
    body: Body,
    expects_continue: bool,
}

/// A whole response.
pub struct Answer {
    /// Status line after the version: `200 OK`.
    pub status: &'static str,
    /// Field lines, each ended by CRLF.
    pub fields: String,
    /// The content.
    pub content: Vec<u8>,
}

/// One client connection.
pub struct Connection<'a> {
    input: BufReader<&'a TcpStream>,
    output: &'a TcpStream,
}

impl<'a> Connection<'a> {
    /// Reads from and writes to `stream`.
    pub fn new(stream: &'a TcpStream) -> Self {
        Self { input: BufReader::with_capacity(16 << 10, stream), output: stream }
    }

    /// The next request's head; `None` when the client has ended the connection.
    pub fn next_request(&mut self) -> io::Result<Option<Request>> {
        let line = self.line()?;
        if line.is_empty() {
            return Ok(None);
        }
        let mut parts = line.split(' ');
        let (Some(method), Some(target), Some(version)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(Error::new(ErrorKind::InvalidData, "not a request line"));
        };
        let mut request = Request {
            method: method.to_owned(),
            path: target.split('?').next().unwrap_or_default().to_owned(),
            keep_alive: version == "HTTP/1.1",
            if_none_match: String::new(),
            content_type: String::new(),
            body: Body::Length(0),
            expects_continue: false,
        };
        for _ in 0..MAX_FIELDS {
            let line = self.line()?;
            let Some((name, value)) = line.split_once(':') else {
                return Ok(Some(request));
            };
            request.note_field(&name.to_ascii_lowercase(), value.trim())?;
        }
        Err(Error::new(ErrorKind::InvalidData, "too many fields"))
    }

    /// Sends the request's body back as it comes in, never holding more than one piece of it.
    pub fn echo(&mut self, request: &Request) -> io::Result<()> {
        let kind =
            if request.content_type.is_empty() { "application/octet-stream" } else { &request.content_type };
        let go_on = if request.expects_continue { "HTTP/1.1 100 Continue\r\n\r\n" } else { "" };
        write!(
            self.output,
            "{go_on}HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nCache-Control: no-store\r\nTransfer-Encoding: chunked\r\n\r\n"
        )?;
        let mut output = self.output;
        self.each_piece(request, |piece| {
            write!(output, "{:x}\r\n", piece.len())?;
            output.write_all(piece)?;
            output.write_all(b"\r\n")
        })?;
        self.output.write_all(b"0\r\n\r\n")
    }

    /// Reads over a body that nobody asked for.
    pub fn discard_body(&mut self, request: &Request) -> io::Result<()> {
        self.each_piece(request, |_| Ok(()))
    }

    /// Sends a response, without its content when the request was HEAD.
    pub fn send(&mut self, request: &Request, answer: &Answer) -> io::Result<()> {
        let close = if request.keep_alive { "" } else { "Connection: close\r\n" };
        let mut message = format!("HTTP/1.1 {}\r\n{}{close}", answer.status, answer.fields).into_bytes();
        let not_modified = answer.status.starts_with("304");
        if !not_modified {
            message.extend_from_slice(format!("Content-Length: {}\r\n", answer.content.len()).as_bytes());
        }
        message.extend_from_slice(b"\r\n");
        if request.method != "HEAD" && !not_modified {
            message.extend_from_slice(&answer.content);
        }
        self.output.write_all(&message)
    }

    fn each_piece(
        &mut self,
        request: &Request,
        mut take: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        match request.body {
            Body::Length(length) => self.pieces(length, &mut take),
            Body::Chunked => loop {
                let line = self.line()?;
                let size = line.split(';').next().unwrap_or_default();
                let size = u64::from_str_radix(size.trim(), 16)
                    .map_err(|_| Error::new(ErrorKind::InvalidData, "bad chunk size"))?;
                if size == 0 {
                    // Trailers, of which the demo has no use.
                    while !self.line()?.is_empty() {}
                    return Ok(());
                }
                self.pieces(size, &mut take)?;
                self.line()?;
            },
        }
    }

    fn pieces(&mut self, mut left: u64, take: &mut impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        while left > 0 {
            let piece = self.input.fill_buf()?;
            if piece.is_empty() {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            let count = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            take(&piece[..count])?;
            self.input.consume(count);
            left -= count as u64;
        }
        Ok(())
    }

    /// One line without its end; an empty one also stands for the end of the connection.
    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        (&mut self.input).take(MAX_LINE_BYTES).read_line(&mut line)?;
        if line.len() as u64 == MAX_LINE_BYTES {
            return Err(Error::new(ErrorKind::InvalidData, "line too long"));
        }
        line.truncate(line.trim_end_matches(['\r', '\n']).len());
        Ok(line)
    }
}

impl Request {
    fn note_field(&mut self, name: &str, value: &str) -> io::Result<()> {
        match name {
            "content-length" => {
                let length = value.parse().map_err(|_| Error::new(ErrorKind::InvalidData, "bad length"))?;
                self.body = Body::Length(length);
            }
            "transfer-encoding" => self.body = Body::Chunked,
            "connection" if value.eq_ignore_ascii_case("close") => self.keep_alive = false,
            "expect" => self.expects_continue = value.eq_ignore_ascii_case("100-continue"),
            "if-none-match" => value.clone_into(&mut self.if_none_match),
            "content-type" => value.clone_into(&mut self.content_type),
            _ => {}
        }
        Ok(())
    }
}
