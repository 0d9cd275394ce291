//! A response as a function: everything that its bytes follow from fits into an output continuation.

use super::digest::HttpRequest;
use super::{Asked, Lost, Missing, Part, Resource, Site};
use crate::server::Wait;
use crate::user::MAX_OPAQUE_BYTES;
use std::borrow::Cow;
use std::net::SocketAddr;
use tidegate_http::cache::conditional::{self, Precondition};
use tidegate_http::cache::range::{self, RangeResult};
use tidegate_http::{HeadLimits, Method, Progress, RequestParser, date, status_reason};

/// Most bytes of a URL's host, path and query together; less where a client's datagrams are short.
pub const MAX_URL_BYTES: usize = MAX_OPAQUE_BYTES - FIXED_BYTES;

const FLAG_HEAD_ONLY: u8 = 1;
const FLAG_CLOSE: u8 = 2;
const FLAG_HTTP_10: u8 = 4;
/// Head and body are a resource's, not our own words.
const FLAG_RESOURCE: u8 = 8;
/// Opaque bytes besides host and target.
pub(super) const FIXED_BYTES: usize = 39;

/// What a response is made of. Of an error there is no resource; `start..end` is then its text.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Response<'a> {
    status: u16,
    flags: u8,
    date_s: u64,
    /// Version of the resource that head and body come from.
    version: u64,
    /// The part of the representation that is the body.
    start: u64,
    end: u64,
    head_bytes: u16,
    host: Cow<'a, [u8]>,
    target: Cow<'a, [u8]>,
}

impl<'a> Response<'a> {
    /// The response to `request`.
    pub(super) fn to(
        request: &HttpRequest,
        asked: &Asked<'_>,
        site: &mut impl Site,
        now_s: u64,
    ) -> Response<'static> {
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        let mut response = Response {
            status: request.refused.unwrap_or(200),
            flags: flag(request.head_only, FLAG_HEAD_ONLY)
                | flag(!request.keep_alive, FLAG_CLOSE)
                | flag(request.http_10, FLAG_HTTP_10),
            date_s: now_s,
            version: 0,
            start: 0,
            end: 0,
            head_bytes: 0,
            host: Cow::Owned(request.host.clone()),
            target: Cow::Owned(request.target.clone()),
        };
        let found = match request.refused {
            None => site.find(asked),
            Some(_) => Err(Missing::NotFound),
        };
        match &found {
            Ok(resource) => response.choose(request, resource),
            Err(missing) => {
                response.status = match missing {
                    _ if request.refused.is_some() => response.status,
                    Missing::NotFound => 404,
                    Missing::Unavailable => 503,
                    Missing::Refused => 429,
                    Missing::MovedTo(path) => {
                        response.target = Cow::Owned(path.clone());
                        301
                    }
                };
            }
        }
        if !response.has_resource() {
            response.end = response.text().len() as u64;
        }
        let head = response.head(found.as_ref().ok());
        // Only a site with fields of many kilobytes gets here; its resource cannot be described.
        response.head_bytes = u16::try_from(head.len()).unwrap_or(0);
        response
    }

    /// Whole, part, unchanged or unsatisfiable (RFC 9110 §13.2.2, §14.2).
    fn choose(&mut self, request: &HttpRequest, resource: &Resource) {
        (self.version, self.end) = (resource.version, resource.length);
        self.flags |= FLAG_RESOURCE;
        if resource.status != 200 {
            self.status = resource.status;
            return;
        }
        let mut parser = RequestParser::new(HeadLimits::default());
        let Ok(Progress::Complete { .. }) = parser.parse(&request.head) else { return };
        let head = parser.head(&request.head);
        let etag = Some(&resource.etag[..]).filter(|etag| !etag.is_empty());
        match conditional::evaluate(head.method, &head.fields, etag, resource.modified_s) {
            Precondition::Proceed => {}
            Precondition::NotModified => {
                (self.status, self.start, self.end) = (304, 0, 0);
                return;
            }
            Precondition::Failed => {
                (self.status, self.version) = (412, 0);
                self.flags &= !FLAG_RESOURCE;
                return;
            }
        }
        let Some(value) = head.fields.get(tidegate_http::FieldId::Range) else { return };
        // Who has an entity tag asks by it (RFC 9110 §13.1.5); of a date it is not known here whether it is a strong
        // one.
        let strong_s = resource.modified_s.filter(|_| etag.is_none());
        if head.method != Method::Get || !conditional::if_range_holds(&head.fields, etag, strong_s) {
            return;
        }
        match range::parse(value, resource.length) {
            RangeResult::Single { start, end } => (self.status, self.start, self.end) = (206, start, end),
            RangeResult::Unsatisfiable => (self.status, self.start, self.end) = (416, 0, 0),
            // RFC 9110 §14.2: a server may ignore Range.
            RangeResult::Whole | RangeResult::Multiple(_) => {}
        }
    }

    fn has_resource(&self) -> bool {
        self.flags & FLAG_RESOURCE != 0
    }

    fn head_only(&self) -> bool {
        self.flags & FLAG_HEAD_ONLY != 0 || matches!(self.status, 204 | 304)
    }

    /// Whether the conversation ends with this response.
    pub(super) fn closes(&self) -> bool {
        self.flags & FLAG_CLOSE != 0
    }

    /// Bytes of head and body.
    pub(super) fn total_bytes(&self) -> u64 {
        let body = if self.head_only() { 0 } else { self.end - self.start };
        u64::from(self.head_bytes) + body
    }

    fn text(&self) -> Vec<u8> {
        let reason = status_reason(self.status);
        match self.status {
            414 => {
                format!(
                    "414 {reason}: host, path and query have at most {MAX_URL_BYTES} bytes over Trickles\n"
                )
            }
            status => format!("{status} {reason}\n"),
        }
        .into_bytes()
    }

    /// Status line and fields; the same bytes whenever it is called.
    fn head(&self, resource: Option<&Resource>) -> Vec<u8> {
        use std::io::Write;
        let mut out = Vec::with_capacity(384);
        let _ = write!(out, "HTTP/1.1 {} {}\r\nDate: ", self.status, status_reason(self.status));
        out.extend_from_slice(&date::format(self.date_s));
        out.extend_from_slice(b"\r\n");
        match resource.filter(|_| self.has_resource()) {
            Some(resource) => self.resource_fields(resource, &mut out),
            None => {
                out.extend_from_slice(b"Content-Type: text/plain; charset=utf-8\r\n");
                match self.status {
                    301 => {
                        out.extend_from_slice(b"Location: ");
                        out.extend_from_slice(&self.target);
                        out.extend_from_slice(b"\r\n");
                    }
                    405 => out.extend_from_slice(b"Allow: GET, HEAD\r\n"),
                    _ => {}
                }
            }
        }
        if !matches!(self.status, 204 | 304) {
            let _ = write!(out, "Content-Length: {}\r\n", self.end - self.start);
        }
        match (self.closes(), self.flags & FLAG_HTTP_10 != 0) {
            (true, _) => out.extend_from_slice(b"Connection: close\r\n"),
            (false, true) => out.extend_from_slice(b"Connection: keep-alive\r\n"),
            (false, false) => {}
        }
        out.extend_from_slice(b"\r\n");
        out
    }

    fn resource_fields(&self, resource: &Resource, out: &mut Vec<u8>) {
        if !resource.etag.is_empty() {
            out.extend_from_slice(b"ETag: ");
            out.extend_from_slice(&resource.etag);
            out.extend_from_slice(b"\r\n");
        }
        if let Some(modified_s) = resource.modified_s {
            out.extend_from_slice(b"Last-Modified: ");
            out.extend_from_slice(&date::format(modified_s));
            out.extend_from_slice(b"\r\n");
        }
        if resource.status == 200 {
            out.extend_from_slice(b"Accept-Ranges: bytes\r\n");
        }
        match self.status {
            206 => {
                out.extend_from_slice(b"Content-Range: ");
                range::write_content_range(self.start, self.end, resource.length, out);
                out.extend_from_slice(b"\r\n");
            }
            416 => {
                out.extend_from_slice(b"Content-Range: ");
                range::write_unsatisfied(resource.length, out);
                out.extend_from_slice(b"\r\n");
            }
            _ => {}
        }
        out.extend_from_slice(&resource.fields);
    }

    /// Fills `buffer` with the response's bytes from `offset` on.
    pub(super) fn read(&self, site: &mut impl Site, offset: u64, buffer: &mut [u8]) -> Result<(), Lost> {
        let head_bytes = u64::from(self.head_bytes);
        let mut filled = 0;
        if offset < head_bytes {
            let resource = match self.has_resource() {
                true => Some(site.known(&self.host, &self.target, self.version)?),
                false => None,
            };
            let head = self.head(resource.as_ref());
            let part = head.get(offset as usize..).filter(|_| head.len() as u64 == head_bytes);
            let part = part.ok_or(Lost::Gone)?;
            filled = part.len().min(buffer.len());
            buffer[..filled].copy_from_slice(&part[..filled]);
        }
        let rest = &mut buffer[filled..];
        if rest.is_empty() {
            return Ok(());
        }
        let from = (offset + filled as u64).checked_sub(head_bytes).ok_or(Lost::Gone)?;
        if self.has_resource() {
            let read = site.read(&self.host, &self.target, self.version, self.start + from, rest)?;
            return if read == rest.len() { Ok(()) } else { Err(Lost::Gone) };
        }
        let text = self.text();
        let from = usize::try_from(from).map_err(|_| Lost::Gone)?;
        rest.copy_from_slice(text.get(from..from + rest.len()).ok_or(Lost::Gone)?);
        Ok(())
    }

    /// What reading `length` bytes from `offset` on has to wait for.
    pub(super) fn prepare(
        &self,
        site: &mut impl Site,
        peer: SocketAddr,
        offset: u64,
        length: usize,
    ) -> Option<Wait> {
        if !self.has_resource() {
            return None;
        }
        let head_bytes = u64::from(self.head_bytes);
        let from = offset.saturating_sub(head_bytes);
        let end = (offset + length as u64).min(self.total_bytes()).saturating_sub(head_bytes);
        let length = usize::try_from(end.saturating_sub(from)).unwrap_or(usize::MAX);
        let part =
            Part { version: self.version, head: offset < head_bytes, offset: self.start + from, length };
        site.prepare_read(peer, &self.host, &self.target, part)
    }

    /// As the opaque bytes of an output continuation; `None` where host and target are too long for one, or the head
    /// for the format.
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        let host_bytes = u16::try_from(self.host.len()).ok()?;
        let mut out = Vec::with_capacity(FIXED_BYTES + self.host.len() + self.target.len());
        out.extend_from_slice(&self.status.to_be_bytes());
        out.push(self.flags);
        for number in [self.date_s, self.version, self.start, self.end] {
            out.extend_from_slice(&number.to_be_bytes());
        }
        out.extend_from_slice(&self.head_bytes.to_be_bytes());
        out.extend_from_slice(&host_bytes.to_be_bytes());
        out.extend_from_slice(&self.host);
        out.extend_from_slice(&self.target);
        (out.len() <= MAX_OPAQUE_BYTES && self.head_bytes > 0).then_some(out)
    }

    /// Reads opaque bytes that [`Response::encode`] wrote.
    pub(super) fn decode(opaque: &'a [u8]) -> Option<Self> {
        let (fixed, names) = opaque.split_first_chunk::<FIXED_BYTES>()?;
        let short = |at: usize| u16::from_be_bytes([fixed[at], fixed[at + 1]]);
        let long = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&fixed[at..at + 8]);
            u64::from_be_bytes(bytes)
        };
        let (host, target) = names.split_at_checked(short(37).into())?;
        let (start, end) = (long(19), long(27));
        (start <= end).then(|| Self {
            status: short(0),
            flags: fixed[2],
            date_s: long(3),
            version: long(11),
            start,
            end,
            head_bytes: short(35),
            host: Cow::Borrowed(host),
            target: Cow::Borrowed(target),
        })
    }
}
