//! HTTP heads as a service is shown them, and as they are read from what it answers.

use tidegate_http::forward::{ConnectionOptions, write_field, write_response_fields};
use tidegate_http::normalize::Normalized;
use tidegate_http::{
    BodyFraming, FieldId, HeadLimits, Method, ParsedRequest, ParsedResponse, Progress, RequestHead,
    RequestParser, ResponseHead, ResponseParser, write_decimal,
};

use crate::cache::fill::write_status_line;

/// A request as it is judged: without what concerns the connection, and its target in the normal form and absolute, as
/// proxies send it: c-icap's services take the first letter off anything else.
pub(crate) fn write_request(head: &RequestHead<'_>, normalized: &Normalized<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(head.method_bytes);
    out.push(b' ');
    if normalized.path.starts_with(b"/") {
        out.extend_from_slice(b"http://");
        out.extend_from_slice(normalized.authority);
    }
    out.extend_from_slice(normalized.path);
    if let Some(query) = normalized.query {
        out.push(b'?');
        out.extend_from_slice(query);
    }
    out.extend_from_slice(b" HTTP/1.1\r\n");
    write_field(b"Host", normalized.authority, out);
    write_request_fields(head, |id| id == FieldId::Host, out);
    if let BodyFraming::Length(length) = head.framing {
        write_length(length, out);
    }
    out.extend_from_slice(b"\r\n");
}

/// The end-to-end fields, but for those of the framing and those to `skip`.
fn write_request_fields(head: &RequestHead<'_>, skip: impl Fn(FieldId) -> bool, out: &mut Vec<u8>) {
    let options = ConnectionOptions::of(head.fields);
    for (id, name, value) in head.fields.iter() {
        let is_ours = matches!(id, FieldId::ContentLength | FieldId::TransferEncoding | FieldId::Expect);
        if !is_ours && !skip(id) && !options.removes(id, name) {
            write_field(name, value, out);
        }
    }
}

/// A response as it is judged.
pub(crate) fn write_response(head: &ResponseHead<'_>, out: &mut Vec<u8>) {
    write_status_line(head, out);
    write_response_fields(head, |id, _| is_framing(id), out);
    if let BodyFraming::Length(length) = head.framing {
        write_length(length, out);
    }
    out.extend_from_slice(b"\r\n");
}

/// A head that a service made, in the form in which our own parsers read it, and the length that it announces.
pub(crate) struct Adapted<P> {
    pub bytes: Vec<u8>,
    pub parsed: P,
    pub length: Option<u64>,
}

/// Reads a request's head as strictly as a client's, and gives it the framing of the body that follows.
pub(crate) fn read_request(
    bytes: &[u8],
    has_body: bool,
    limits: HeadLimits,
) -> Option<Adapted<ParsedRequest>> {
    let mut parser = RequestParser::new(limits);
    let head = whole(parser.parse(bytes).ok()?, bytes.len()).then(|| parser.head(bytes))?;
    if head.method == Method::Connect {
        return None;
    }
    let mut out = Vec::with_capacity(bytes.len() + 32);
    for part in [head.method_bytes, b" ", head.target, b" HTTP/1.1\r\n"] {
        out.extend_from_slice(part);
    }
    write_request_fields(&head, |_| false, &mut out);
    let length = announced(head.framing).filter(|_| has_body);
    match (has_body, length) {
        (false, _) => {}
        (true, Some(length)) => write_length(length, &mut out),
        (true, None) => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
    }
    out.extend_from_slice(b"\r\n");
    let mut parser = RequestParser::new(HeadLimits { head_bytes: limits.head_bytes + 64, ..limits });
    let is_whole = whole(parser.parse(&out).ok()?, out.len());
    is_whole.then(|| Adapted { bytes: out, parsed: parser.parsed(), length })
}

/// Reads a final response's head, an answer to `method`, and gives it the framing of the body that follows. To HEAD none
/// follows, whatever a service makes of it: many answer as they would answer GET (RFC 9110 §9.3.2).
pub(crate) fn read_response(bytes: &[u8], has_body: bool, method: Method) -> Option<Adapted<ParsedResponse>> {
    // The service may add fields to those of an origin.
    let limits = HeadLimits { fields: 1000, head_bytes: 256 * 1024, ..HeadLimits::default() };
    let mut parser = ResponseParser::new(limits);
    parser.reset(method);
    let head = whole(parser.parse(bytes).ok()?, bytes.len()).then(|| parser.head(bytes))?;
    let has_body = has_body && method != Method::Head;
    let never_has_body = matches!(head.status, 204 | 304);
    if head.status < 200 || (has_body && never_has_body) {
        return None;
    }
    let mut out = Vec::with_capacity(bytes.len() + 32);
    write_status_line(&head, &mut out);
    write_response_fields(&head, |id, _| is_framing(id), &mut out);
    let length = announced(head.framing).filter(|_| has_body);
    match (has_body, length) {
        (false, _) if never_has_body || method == Method::Head => {}
        (false, _) => write_length(0, &mut out),
        (true, Some(length)) => write_length(length, &mut out),
        (true, None) => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
    }
    out.extend_from_slice(b"\r\n");
    let mut parser = ResponseParser::new(HeadLimits { head_bytes: limits.head_bytes + 64, ..limits });
    parser.reset(method);
    let is_whole = whole(parser.parse(&out).ok()?, out.len());
    is_whole.then(|| Adapted { bytes: out, parsed: parser.parsed(), length })
}

/// Nothing may follow a head in its section.
fn whole(progress: Progress, length: usize) -> bool {
    progress == Progress::Complete { length }
}

fn announced(framing: BodyFraming) -> Option<u64> {
    match framing {
        BodyFraming::Length(length) => Some(length),
        _ => None,
    }
}

fn is_framing(id: FieldId) -> bool {
    matches!(id, FieldId::ContentLength | FieldId::TransferEncoding)
}

fn write_length(length: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(b"Content-Length: ");
    write_decimal(length, out);
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(bytes: &[u8], has_body: bool) -> Option<String> {
        read_request(bytes, has_body, HeadLimits::default())
            .map(|adapted| String::from_utf8(adapted.bytes).unwrap())
    }

    #[test]
    fn an_adapted_request_has_one_framing() {
        let adapted = request(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n", true).unwrap();
        assert_eq!(adapted, "POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n");
        let adapted = request(b"POST /a HTTP/1.1\r\nHost: h\r\n\r\n", true).unwrap();
        assert!(adapted.ends_with("Transfer-Encoding: chunked\r\n\r\n"));
        let adapted = request(b"GET /a HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n", false).unwrap();
        assert_eq!(adapted, "GET /a HTTP/1.1\r\nHost: h\r\n\r\n");
    }

    #[test]
    fn what_a_service_may_not_put_in_the_place_of_a_request() {
        let smuggled = b"GET / HTTP/1.1\r\nHost: h\r\n\r\nGET /b HTTP/1.1\r\nHost: h\r\n\r\n";
        let both = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n";
        for bytes in [
            &smuggled[..],
            both,
            b"GET / HTTP/1.1\r\nHost: h\r\n",
            b"CONNECT h:1 HTTP/1.1\r\nHost: h:1\r\n\r\n",
        ] {
            assert_eq!(request(bytes, true), None);
        }
    }

    #[test]
    fn what_a_service_may_not_put_in_the_place_of_a_response() {
        let read = |bytes: &[u8], has_body, method| read_response(bytes, has_body, method).is_some();
        assert!(read(b"HTTP/1.1 200 OK\r\n\r\n", true, Method::Get));
        assert!(read(b"HTTP/1.1 204 No Content\r\n\r\n", false, Method::Get));
        assert!(!read(b"HTTP/1.1 204 No Content\r\n\r\n", true, Method::Get));
        assert!(!read(b"HTTP/1.1 100 Continue\r\n\r\n", false, Method::Get));
        assert!(!read(
            b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            false,
            Method::Get
        ));
        let to_head =
            read_response(b"HTTP/1.1 403 No\r\nContent-Length: 5\r\n\r\n", true, Method::Head).unwrap();
        assert_eq!((&to_head.bytes[..], to_head.length), (&b"HTTP/1.1 403 No\r\n\r\n"[..], None));
        assert!(!read(b"HTTP/1.1 200 OK\r\n\r\nextra", true, Method::Get));
    }
}
