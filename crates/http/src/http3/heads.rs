//! Requests as heads of HTTP/1.1 (RFC 9114 §4.1–§4.4).

use super::HeadError;
use super::qpack::{self, FIELD_OVERHEAD};
use super::sections::checked_field;
use crate::chars::{is_target, is_token};
use crate::field::{FieldId, Span};
use crate::forward::{is_hop_by_hop, write_field};
use crate::head::Method;
use crate::parser::{HeadLimits, content_length};

/// What a section may have by the measure of RFC 9114 §4.2.2, so that all that is within the limits by HTTP/1.1 is so
/// by HTTP/3.
pub const fn max_field_section_size(limits: &HeadLimits) -> u64 {
    limits.head_bytes as u64 + limits.fields as u64 * FIELD_OVERHEAD
}

/// Whether content comes after a request's head.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Content {
    /// The stream has ended.
    None,
    /// There may be some.
    MayFollow,
}

/// What has to be known of a request before its content.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RequestFacts {
    /// The method; the head has its bytes.
    pub method: Method,
    /// The length that the request states. Content of any other length makes it malformed (RFC 9114 §4.1.2).
    pub content_length: Option<u64>,
    /// `Expect: 100-continue` (RFC 9110 §10.1.1).
    pub expects_continue: bool,
}

/// A sound request, whose head is written but for its end.
///
/// It is read when its field section is there, and finished when it is known whether content follows, which may be
/// later: what the facts say may be of help.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Request {
    head: Vec<u8>,
    facts: RequestFacts,
}

impl Request {
    /// Reads a request's field section. Of `limits` the number of fields is that of the lines written, where all
    /// cookies make one.
    ///
    /// # Errors
    /// The section or the request is not sound, or beyond the limits.
    pub fn read(section: &[u8], limits: &HeadLimits) -> Result<Self, HeadError> {
        let mut reader = Reader::new(limits, section.len());
        qpack::decode(section, max_field_section_size(limits), |name, value| reader.field(name, value))?;
        reader.end()
    }

    /// What has to be known before the content.
    pub fn facts(&self) -> RequestFacts {
        self.facts
    }

    /// The head with its final empty line. Content whose length is not stated is chunked in what follows it.
    pub fn finish(self, content: Content) -> Vec<u8> {
        let mut head = self.head;
        let end: &[u8] = match (content, self.facts.content_length) {
            (Content::MayFollow, None) => b"transfer-encoding: chunked\r\n\r\n",
            _ => b"\r\n",
        };
        head.extend_from_slice(end);
        head
    }
}

/// The pseudo-header fields of a request (RFC 9114 §4.3.1), each with what it says in [`Reader::aside`].
#[derive(Clone, Copy, Debug, Default)]
struct PseudoFields {
    method: Option<Span>,
    scheme: Option<Span>,
    authority: Option<Span>,
    path: Option<Span>,
}

/// Writes a head while the fields come.
struct Reader<'l> {
    limits: &'l HeadLimits,
    head: Vec<u8>,
    /// What cannot be written yet: the pseudo-header fields until all of them are there, then the cookies.
    aside: Vec<u8>,
    pseudo: PseudoFields,
    /// All pseudo-header fields are there, and the request line is written.
    has_request_line: bool,
    /// Where the line of the host is, or comes to be.
    host_at: usize,
    /// The value of the host's line.
    host: Option<Span>,
    has_authority: bool,
    has_cookie: bool,
    lines: u16,
    facts: RequestFacts,
}

impl<'l> Reader<'l> {
    fn new(limits: &'l HeadLimits, section_bytes: usize) -> Self {
        Self {
            limits,
            // Names of the static table come to more than their numbers, coded text to a third more.
            head: Vec::with_capacity(section_bytes.saturating_mul(2).min(limits.head_bytes as usize) + 256),
            aside: Vec::with_capacity(256),
            pseudo: PseudoFields::default(),
            has_request_line: false,
            host_at: 0,
            host: None,
            has_authority: false,
            has_cookie: false,
            lines: 0,
            facts: RequestFacts { method: Method::Other, content_length: None, expects_continue: false },
        }
    }

    fn field(&mut self, name: &[u8], value: &[u8]) -> Result<(), HeadError> {
        if name.first() == Some(&b':') {
            return self.pseudo_field(name, value);
        }
        if !self.has_request_line {
            self.request_line()?;
        }
        let id = checked_field(name, value)?;
        match id {
            FieldId::Host => return self.host_field(value),
            FieldId::Cookie => return self.cookie(value),
            FieldId::ContentLength => {
                let length = content_length(value).map_err(|_| HeadError::Malformed)?;
                match self.facts.content_length.replace(length) {
                    None => {}
                    Some(before) if before == length => return Ok(()),
                    Some(_) => return Err(HeadError::Malformed),
                }
            }
            FieldId::Expect => self.facts.expects_continue |= lists_continue(value),
            _ => {}
        }
        self.count_line()?;
        if !is_hop_by_hop(id) {
            write_field(name, value, &mut self.head);
        }
        Ok(())
    }

    fn count_line(&mut self) -> Result<(), HeadError> {
        if self.lines >= self.limits.fields {
            return Err(HeadError::TooLarge);
        }
        self.lines += 1;
        Ok(())
    }

    /// §4.3: each once, before all other fields, and none that is not known.
    fn pseudo_field(&mut self, name: &[u8], value: &[u8]) -> Result<(), HeadError> {
        let place = match name {
            _ if self.has_request_line => return Err(HeadError::Malformed),
            b":method" => &mut self.pseudo.method,
            b":scheme" => &mut self.pseudo.scheme,
            b":authority" => &mut self.pseudo.authority,
            b":path" => &mut self.pseudo.path,
            _ => return Err(HeadError::Malformed),
        };
        // A section is smaller than 2^32 bytes, as its limits are.
        let span = Span { start: self.aside.len() as u32, length: value.len() as u32 };
        if place.replace(span).is_some() {
            return Err(HeadError::Malformed);
        }
        self.aside.extend_from_slice(value);
        Ok(())
    }

    /// All pseudo-header fields are there.
    fn request_line(&mut self) -> Result<(), HeadError> {
        let said = |span: Option<Span>| span.map(|span| span.of(&self.aside));
        let method = said(self.pseudo.method).ok_or(HeadError::Malformed)?;
        if method.is_empty() || !method.iter().copied().all(is_token) {
            return Err(HeadError::Malformed);
        }
        let authority = said(self.pseudo.authority);
        if authority.is_some_and(|authority| !is_host(authority)) {
            return Err(HeadError::Malformed);
        }
        self.facts.method = Method::from_bytes(method);
        let is_connect = self.facts.method == Method::Connect;
        let target = match (authority, said(self.pseudo.scheme), said(self.pseudo.path)) {
            // §4.4.
            (Some(authority), None, None) if is_connect => authority,
            (_, Some(scheme), Some(path)) if !is_connect => {
                let is_known =
                    [&b"http"[..], b"https"].iter().any(|known| scheme.eq_ignore_ascii_case(known));
                if !is_known || !is_path(path, self.facts.method) {
                    return Err(HeadError::Malformed);
                }
                path
            }
            _ => return Err(HeadError::Malformed),
        };
        for part in [method, b" ", target, b" HTTP/1.1\r\n"] {
            self.head.extend_from_slice(part);
        }
        if self.head.len() > self.limits.request_line_bytes as usize {
            return Err(HeadError::LongTarget);
        }
        self.host_at = self.head.len();
        if let Some(authority) = authority {
            write_field(b"host", authority, &mut self.head);
            self.host = Some(host_span(self.host_at, authority));
        }
        self.has_authority = authority.is_some();
        self.has_request_line = true;
        self.aside.clear();
        self.count_line()
    }

    /// §4.3.1: once; where there is an authority, too, they say the same.
    fn host_field(&mut self, value: &[u8]) -> Result<(), HeadError> {
        match self.host {
            None if is_host(value) => {
                let before = self.head.len();
                write_field(b"host", value, &mut self.head);
                let length = self.head.len() - before;
                self.head[self.host_at..].rotate_right(length);
                self.host = Some(host_span(self.host_at, value));
                Ok(())
            }
            Some(host) if self.has_authority && host.of(&self.head).eq_ignore_ascii_case(value) => {
                // Another one would be the second.
                self.has_authority = false;
                Ok(())
            }
            _ => Err(HeadError::Malformed),
        }
    }

    /// §4.2.1: in one field again, as servers of HTTP/1.1 expect it.
    fn cookie(&mut self, value: &[u8]) -> Result<(), HeadError> {
        if self.has_cookie {
            self.aside.extend_from_slice(b"; ");
        } else {
            self.count_line()?;
            self.has_cookie = true;
        }
        self.aside.extend_from_slice(value);
        Ok(())
    }

    fn end(mut self) -> Result<Request, HeadError> {
        if !self.has_request_line {
            self.request_line()?;
        }
        let Some(host) = self.host else { return Err(HeadError::Malformed) };
        if self.has_cookie {
            let before = self.head.len();
            write_field(b"cookie", &self.aside, &mut self.head);
            let length = self.head.len() - before;
            let after_host = (host.start + host.length) as usize + b"\r\n".len();
            self.head[after_host..].rotate_right(length);
        }
        if self.head.len() + b"\r\n".len() > self.limits.head_bytes as usize {
            return Err(HeadError::TooLarge);
        }
        Ok(Request { head: self.head, facts: self.facts })
    }
}

/// Where the value of the host's line is that begins at `at`.
fn host_span(at: usize, value: &[u8]) -> Span {
    Span { start: (at + b"host: ".len()) as u32, length: value.len() as u32 }
}

/// §4.3.1: somebody, and no "userinfo" (RFC 9110 §4.2.4). What ends an authority (RFC 3986 §3.2) is not in one; whether
/// it is a name is for whoever looks it up.
fn is_host(authority: &[u8]) -> bool {
    let belongs =
        |byte: u8| is_target(byte) && byte.is_ascii() && !matches!(byte, b'@' | b'/' | b'?' | b'#' | b'\\');
    !authority.is_empty() && authority.iter().copied().all(belongs)
}

/// §4.3.1: path and query, beginning with a slash, or the asterisk of OPTIONS.
fn is_path(path: &[u8], method: Method) -> bool {
    let belongs = |byte: u8| is_target(byte) && byte.is_ascii() && byte != b'#';
    match path {
        [b'/', ..] => path.iter().copied().all(belongs),
        _ => method == Method::Options && path == b"*",
    }
}

fn lists_continue(value: &[u8]) -> bool {
    value.split(|byte| *byte == b',').any(|member| member.trim_ascii().eq_ignore_ascii_case(b"100-continue"))
}
