//! Response heads as bytes: for a stored object in its several forms, and for answers made here.

use std::io::Write;

use tidegate_core::hooks::Reply;
use tidegate_http::cache::{self, CacheStatus};
use tidegate_http::{BodyFraming, Method, RequestHead, Version, status_reason, write_decimal};

use crate::cache::fill::{self, Streamed};
use crate::cache::lookup::{Form, Hit};
use crate::data_core::{Bytes, DataCore};
use crate::static_files::serve::OpenFile;

/// How a stored object is sent.
pub(crate) struct HitForm {
    pub status: u16,
    /// The stored head goes out as it is, before the bytes that were put together.
    pub with_stored_head: bool,
    /// The part of the body that is sent.
    pub body: (u64, u64),
}

/// What a response says because of the connection that it goes by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OfConnection {
    /// Whether another request may follow.
    pub keep_alive: bool,
    pub is_encrypted: bool,
}

/// Puts together what precedes the body beyond the stored head. `connection` is absent where the client has none that
/// could be kept or closed.
pub(crate) fn write_hit(
    core: &DataCore,
    pseudonym: &str,
    head: &RequestHead<'_>,
    hit: &Hit,
    connection: Option<OfConnection>,
    out: &mut Vec<u8>,
) -> HitForm {
    let length = hit.object.body_length();
    let mut form = HitForm { status: hit.status, with_stored_head: true, body: (0, length) };
    match hit.form {
        // RFC 9110 §8.6: 204 has none.
        Form::Whole if hit.status == 204 => {}
        Form::Whole => write_length(length, out),
        Form::Part { start, end } => {
            form = HitForm { status: 206, with_stored_head: false, body: (start, end) };
            out.extend_from_slice(b"HTTP/1.1 206 Partial Content\r\n");
            fill::write_fields_of_a_part(hit.head(), out);
            let _ = write!(out, "Content-Range: bytes {start}-{}/{length}\r\n", end - 1);
            write_length(end - start, out);
        }
        Form::Unsatisfiable => {
            form = HitForm { status: 416, with_stored_head: false, body: (0, 0) };
            out.extend_from_slice(b"HTTP/1.1 416 Range Not Satisfiable\r\n");
            let _ = write!(out, "Content-Range: bytes */{length}\r\nContent-Length: 0\r\n");
            write_date(core, out);
        }
        Form::NotModified => {
            form = HitForm { status: 304, with_stored_head: false, body: (0, 0) };
            out.extend_from_slice(b"HTTP/1.1 304 Not Modified\r\n");
            fill::write_not_modified_fields(hit.head(), out);
        }
        Form::PreconditionFailed => {
            form = HitForm { status: 412, with_stored_head: false, body: (0, 0) };
            out.extend_from_slice(b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n");
            write_date(core, out);
        }
    }
    if head.method == Method::Head {
        form.body = (0, 0);
    }
    if !hit.is_file {
        if let Some(age_s) = hit.age_s {
            write_age(age_s, out);
        }
        out.extend_from_slice(b"Cache-Status: ");
        match hit.forwarded {
            None => write_hit_status(pseudonym, hit.ttl_s, out),
            Some(forwarded) => {
                let handling = forwarded.handling();
                CacheStatus { handling, ttl_s: Some(hit.ttl_s), key: None }.write(pseudonym, out);
            }
        }
        out.extend_from_slice(b"\r\n");
    } else if form.with_stored_head || form.status == 206 || form.status == 304 {
        write_date(core, out);
    }
    end_fields(core, head.version, connection, out);
    form
}

/// Everything that precedes a stored object's body, in one piece: for ways out that do not gather it from two.
pub(crate) fn stored_head(
    core: &DataCore,
    head: &RequestHead<'_>,
    hit: &Hit,
    connection: Option<OfConnection>,
) -> (Vec<u8>, HitForm) {
    let mut out = Vec::with_capacity(512);
    let form = core.with_plan(|plan| write_hit(core, &plan.pseudonym, head, hit, connection, &mut out));
    let mut first = if form.with_stored_head { hit.head().to_vec() } else { Vec::new() };
    first.extend_from_slice(&out);
    (first, form)
}

/// How a file is sent.
pub(crate) enum FileForm {
    /// This head, then this part of the file; the part is empty for HEAD.
    Sent { status: u16, head: Vec<u8>, part: (u64, u64) },
    /// Not at all: an error with these fields.
    Refused { status: u16, fields: String },
}

/// What precedes a file's body, for the form that the request's conditions and ranges led to.
pub(crate) fn file_form(
    core: &DataCore,
    head: &RequestHead<'_>,
    file: &OpenFile,
    connection: Option<OfConnection>,
) -> FileForm {
    let (status, start, end) = match file.form {
        Form::Whole => (200, 0, file.length),
        Form::Part { start, end } => (206, start, end),
        Form::NotModified => (304, 0, 0),
        Form::PreconditionFailed => return FileForm::Refused { status: 412, fields: String::new() },
        Form::Unsatisfiable => {
            let fields = format!("Content-Range: bytes */{}\r\n", file.length);
            return FileForm::Refused { status: 416, fields };
        }
    };
    let mut out = Vec::with_capacity(512);
    let _ = write!(out, "HTTP/1.1 {status} {}\r\n", status_reason(status));
    write_date(core, &mut out);
    out.extend_from_slice(fill::stored_fields_of(&file.head));
    if status == 206 {
        let _ = write!(out, "Content-Range: bytes {start}-{}/{}\r\n", end - 1, file.length);
    }
    if status != 304 {
        write_length(end - start, &mut out);
    }
    end_fields(core, head.version, connection, &mut out);
    let part = if head.method == Method::Head { (0, 0) } else { (start, end) };
    FileForm::Sent { status, head: out, part }
}

/// What follows the status line and fields of a streamed response.
pub(crate) fn end_streamed_head(
    core: &DataCore,
    version: Version,
    streamed: &Streamed,
    framing: ClientFraming,
    connection: Option<OfConnection>,
    out: &mut Vec<u8>,
) {
    core.with_plan(|plan| write_cache_status(&plan.pseudonym, streamed, out));
    framing.write_fields(out);
    end_fields(core, version, connection, out);
}

/// What concerns the connection, if there is one, and the end of the head.
fn end_fields(core: &DataCore, version: Version, connection: Option<OfConnection>, out: &mut Vec<u8>) {
    if let Some(OfConnection { keep_alive, is_encrypted }) = connection {
        write_connection(version, keep_alive, out);
        core.with_plan(|plan| out.extend_from_slice(plan.alternatives.of(is_encrypted)));
    }
    out.extend_from_slice(b"\r\n");
}

/// A complete error response made here, and how much of it is body.
pub(crate) fn local_response(
    core: &DataCore,
    head: &RequestHead<'_>,
    status: u16,
    fields: &[u8],
    keep_alive: bool,
) -> (Vec<u8>, Bytes) {
    let mut out = Vec::with_capacity(512);
    let is_head = head.method == Method::Head;
    write_error_for(head.version, is_head, status, &core.clock.date(), keep_alive, fields, &mut out);
    let body = if is_head { 0 } else { error_body(status).len() as u64 };
    let head = out.len() as u64 - body;
    (out, Bytes { head, body })
}

/// [`CacheStatus::write`] for a hit, without the formatting machinery.
fn write_hit_status(pseudonym: &str, ttl_s: i64, out: &mut Vec<u8>) {
    cache::write_name(pseudonym, out);
    out.extend_from_slice(b"; hit; ttl=");
    if ttl_s < 0 {
        out.push(b'-');
    }
    write_decimal(ttl_s.unsigned_abs(), out);
}

fn write_length(length: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(b"Content-Length: ");
    write_decimal(length, out);
    out.extend_from_slice(b"\r\n");
}

fn write_age(age_s: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(b"Age: ");
    write_decimal(age_s, out);
    out.extend_from_slice(b"\r\n");
}

fn write_date(core: &DataCore, out: &mut Vec<u8>) {
    out.extend_from_slice(b"Date: ");
    out.extend_from_slice(&core.clock.date());
    out.extend_from_slice(b"\r\n");
}

/// `Connection`, where the version's default is not what is meant (RFC 9112 §9.3).
fn write_connection(version: Version, keep_alive: bool, out: &mut Vec<u8>) {
    match (version, keep_alive) {
        (_, false) => out.extend_from_slice(b"Connection: close\r\n"),
        (Version::Http10, true) => out.extend_from_slice(b"Connection: keep-alive\r\n"),
        (Version::Http11 | Version::Http2 | Version::Http3, true) => {}
    }
}

fn error_body(status: u16) -> String {
    format!("{status} {}\n", status_reason(status))
}

/// The response that refuses a request, with a page of its own or a short text, and how much of it is body.
pub(crate) fn reply(
    core: &DataCore,
    head: &RequestHead<'_>,
    reply: &Reply,
    keep_alive: bool,
) -> (Vec<u8>, Bytes) {
    if reply.page.is_empty() {
        return local_response(core, head, reply.status, &reply.fields, keep_alive);
    }
    let content = ("text/html; charset=utf-8", &reply.page[..]);
    whole_response(core, head, reply.status, content, &reply.fields, keep_alive)
}

/// What an authority is answered that looks whether the host is ours (RFC 8555 §8.3).
pub(crate) fn key_authorization(
    core: &DataCore,
    head: &RequestHead<'_>,
    text: &str,
    keep_alive: bool,
) -> (Vec<u8>, Bytes) {
    core.metrics.acme_challenges_total.add(1);
    let content = ("application/octet-stream", text.as_bytes());
    whole_response(core, head, 200, content, b"", keep_alive)
}

/// A response that was made here, with its media type and content.
fn whole_response(
    core: &DataCore,
    head: &RequestHead<'_>,
    status: u16,
    (media_type, content): (&str, &[u8]),
    fields: &[u8],
    keep_alive: bool,
) -> (Vec<u8>, Bytes) {
    let length = content.len();
    let mut out = Vec::with_capacity(512 + length);
    let _ = write!(out, "HTTP/1.1 {status} {}\r\nDate: ", status_reason(status));
    out.extend_from_slice(&core.clock.date());
    let _ = write!(out, "\r\nContent-Type: {media_type}\r\nContent-Length: {length}\r\n");
    out.extend_from_slice(fields);
    write_connection(head.version, keep_alive, &mut out);
    out.extend_from_slice(b"\r\n");
    let mut bytes = Bytes { head: out.len() as u64, body: 0 };
    if head.method != Method::Head {
        out.extend_from_slice(content);
        bytes.body = length as u64;
    }
    (out, bytes)
}

/// A complete error response with a short text. Returns how many bytes of it are content.
pub(crate) fn write_error(status: u16, date: &[u8; 29], keep_alive: bool, out: &mut Vec<u8>) -> u64 {
    write_error_for(Version::Http11, false, status, date, keep_alive, b"", out);
    error_body(status).len() as u64
}

/// A complete error response for a known request; `fields` are further field lines.
fn write_error_for(
    version: Version,
    is_head: bool,
    status: u16,
    date: &[u8; 29],
    keep_alive: bool,
    fields: &[u8],
    out: &mut Vec<u8>,
) {
    let reason = status_reason(status);
    let body = error_body(status);
    let _ = write!(out, "HTTP/1.1 {status} {reason}\r\nDate: ");
    out.extend_from_slice(date);
    let _ = write!(out, "\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n", body.len());
    if status == 503 && !fields.starts_with(b"Retry-After") {
        out.extend_from_slice(b"Retry-After: 5\r\n");
    }
    out.extend_from_slice(fields);
    write_connection(version, keep_alive, out);
    out.extend_from_slice(b"\r\n");
    if !is_head {
        out.extend_from_slice(body.as_bytes());
    }
}

/// How the client learns where the body ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ClientFraming {
    NoBody,
    /// No body, but the length that a GET would have had.
    HeadOnly(u64),
    Length(u64),
    Chunked,
    UntilClose,
}

impl ClientFraming {
    /// RFC 9112 §6.3, for our own response.
    pub(crate) fn of(request: &RequestHead<'_>, response: &Streamed) -> Self {
        // RFC 9110 §8.6: these have no length, not even in an answer to HEAD.
        if matches!(response.status, 0..200 | 204) {
            return Self::NoBody;
        }
        if request.method == Method::Head {
            return response.content_length.map_or(Self::NoBody, Self::HeadOnly);
        }
        match response.framing {
            BodyFraming::None if matches!(response.status, 204 | 304 | 0..200) => Self::NoBody,
            BodyFraming::None => Self::Length(0),
            BodyFraming::Length(length) => Self::Length(length),
            BodyFraming::Chunked | BodyFraming::UntilClose if request.version == Version::Http11 => {
                Self::Chunked
            }
            BodyFraming::Chunked | BodyFraming::UntilClose => Self::UntilClose,
        }
    }

    fn write_fields(self, out: &mut Vec<u8>) {
        match self {
            Self::Length(length) | Self::HeadOnly(length) => {
                out.extend_from_slice(b"Content-Length: ");
                write_decimal(length, out);
                out.extend_from_slice(b"\r\n");
            }
            Self::Chunked => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
            Self::NoBody | Self::UntilClose => {}
        }
    }
}

/// `Age` of a response that comes from elsewhere, and what became of the request in this cache (RFC 9211).
fn write_cache_status(pseudonym: &str, streamed: &Streamed, out: &mut Vec<u8>) {
    if let Some(age_s) = streamed.age_s {
        write_age(age_s, out);
    }
    out.extend_from_slice(b"Cache-Status: ");
    let handling = streamed.forward.handling();
    CacheStatus { handling, ttl_s: streamed.ttl_s, key: None }.write(pseudonym, out);
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_form_of_a_hits_status_is_the_long_one() {
        for ttl_s in [0, 7, -7, 86_400] {
            let (mut short, mut long) = (Vec::new(), Vec::new());
            write_hit_status("t", ttl_s, &mut short);
            let handling = tidegate_http::cache::Handling::Hit;
            CacheStatus { handling, ttl_s: Some(ttl_s), key: None }.write("t", &mut long);
            assert_eq!(short, long);
        }
    }

    #[test]
    fn a_503_says_when_to_come_back() {
        let mut out = Vec::new();
        write_error(503, b"Sun, 06 Nov 1994 08:49:37 GMT", false, &mut out);
        let text = String::from_utf8(out).unwrap();
        assert!(text.starts_with("HTTP/1.1 503 Service Unavailable\r\n"));
        assert!(text.contains("\r\nRetry-After: 5\r\n"));
        assert!(text.contains("\r\nConnection: close\r\n\r\n503 "));
    }
}
