//! Heads of HTTP/1.1 written as those of HTTP/2, and the other way round (RFC 9113 §8).

use std::io::{self, ErrorKind};

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri, header, uri};
use tidegate_http::forward::{is_hop_by_hop, write_field};
use tidegate_http::{
    FieldId, HeadLimits, Progress, RequestHead, RequestParser, status_reason, write_decimal, write_last_chunk,
};

/// The request whose head this is, final empty line included.
pub(super) fn read_request(bytes: &[u8], is_encrypted: bool) -> io::Result<Request<()>> {
    let mut parser = RequestParser::new(HeadLimits::NONE);
    match parser.parse(bytes) {
        Ok(Progress::Complete { .. }) => request(&parser.head(bytes), is_encrypted),
        _ => Err(ErrorKind::InvalidInput.into()),
    }
}

fn request(head: &RequestHead<'_>, is_encrypted: bool) -> io::Result<Request<()>> {
    let mut request = Request::new(());
    *request.method_mut() = Method::from_bytes(head.method_bytes).map_err(invalid)?;
    // §8.3.1: what `Host` says is `:authority`.
    let authority = head.fields.get(FieldId::Host).unwrap_or_default();
    let mut parts = uri::Parts::default();
    parts.scheme = Some(if is_encrypted { uri::Scheme::HTTPS } else { uri::Scheme::HTTP });
    parts.authority = Some(authority.try_into().map_err(invalid)?);
    parts.path_and_query = Some(in_uri_characters(head.target).as_slice().try_into().map_err(invalid)?);
    *request.uri_mut() = Uri::from_parts(parts).map_err(invalid)?;
    let headers = request.headers_mut();
    for (id, name, value) in head.fields.iter() {
        // §8.2.2.
        if id != FieldId::Host && !is_hop_by_hop(id) {
            let name = HeaderName::from_bytes(name).map_err(invalid)?;
            let mut value = HeaderValue::from_bytes(value).map_err(invalid)?;
            // RFC 7541 §7.1.3: clients share the connection, and learn nothing of each other's by what is shorter than before.
            value.set_sensitive(matches!(name, header::AUTHORIZATION | header::COOKIE));
            headers.append(name, value);
        }
    }
    // Trailers are understood, and passed on to who understands them; servers of gRPC want to know that.
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    Ok(request)
}

/// A target with its characters that no URI has (RFC 3986 §2) encoded: some clients send them as they are.
fn in_uri_characters(target: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(target.len());
    for byte in target {
        match byte {
            b'"' | b'<' | b'>' | b'\\' | b'^' | b'`' | b'{' | b'|' | b'}' | b'#' | 0x80.. => {
                out.extend_from_slice(format!("%{byte:02X}").as_bytes());
            }
            _ => out.push(*byte),
        }
    }
    out
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, error)
}

/// How a response's content comes after its head.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Coding {
    /// As it is: there is none, or the head says how much.
    Plain,
    Chunked,
}

/// Writes a response's head. `is_bare` says that no content follows.
pub(super) fn write_response<B>(
    response: &Response<B>,
    is_bare: bool,
    is_to_head: bool,
    out: &mut Vec<u8>,
) -> Coding {
    let status = response.status().as_u16();
    out.extend_from_slice(b"HTTP/1.1 ");
    write_decimal(u64::from(status), out);
    out.push(b' ');
    out.extend_from_slice(status_reason(status).as_bytes());
    out.extend_from_slice(b"\r\n");
    write_fields(response.headers(), out);
    let has_length = response.headers().contains_key(header::CONTENT_LENGTH);
    let coding = match is_bare {
        _ if has_length || is_to_head || matches!(status, 100..200 | 204 | 304) => Coding::Plain,
        true => {
            out.extend_from_slice(b"content-length: 0\r\n");
            Coding::Plain
        }
        false => {
            out.extend_from_slice(b"transfer-encoding: chunked\r\n");
            Coding::Chunked
        }
    };
    out.extend_from_slice(b"\r\n");
    coding
}

fn write_fields(headers: &HeaderMap, out: &mut Vec<u8>) {
    for (name, value) in headers {
        // A server that speaks of a connection here is wrong (§8.2.2).
        if !is_hop_by_hop(FieldId::from_name(name.as_str().as_bytes())) {
            write_field(name.as_str().as_bytes(), value.as_bytes(), out);
        }
    }
}

/// The end of content that is chunked, with its trailer fields.
pub(super) fn write_end(trailers: Option<&HeaderMap>, out: &mut Vec<u8>) {
    let fields = trailers.into_iter().flatten();
    write_last_chunk(fields.map(|(name, value)| (name.as_str().as_bytes(), value.as_bytes())), out);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> io::Result<Request<()>> {
        read_request(text.replace('\n', "\r\n").as_bytes(), true)
    }

    #[test]
    fn a_request_is_read_with_its_host_as_authority_and_without_what_is_about_a_connection() {
        let head = "POST /a%20b?c=d|e HTTP/1.1\nHost: [::1]:8080\nX-A: b\nConnection: close\nTE: gzip\nCookie: a=1; b=2\n\
                    Transfer-Encoding: chunked\nAuthorization: Basic x\n\n";
        let request = read(head).unwrap();
        assert_eq!(request.uri(), "https://[::1]:8080/a%20b?c=d%7Ce");
        let fields: Vec<_> =
            request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        let expected: [(&str, &[u8]); 4] =
            [("x-a", b"b"), ("cookie", b"a=1; b=2"), ("authorization", b"Basic x"), ("te", b"trailers")];
        assert_eq!(fields, expected);
        let is_secret = |name: &str| request.headers()[name].is_sensitive();
        assert!(is_secret("cookie") && is_secret("authorization") && !is_secret("x-a"));
        let asterisk = read("OPTIONS * HTTP/1.1\nHost: a\n\n").unwrap();
        assert_eq!(asterisk.uri().path_and_query().unwrap(), "*");
    }

    #[test]
    fn every_target_that_goes_to_a_server_by_http_1_goes_by_http_2() {
        for byte in (0x21..=0xFF).filter(|byte| *byte != 0x7F) {
            let target = [b"/a", &[byte][..], b"?", &[byte], b"=1"].concat();
            let head = [b"GET ", &target[..], b" HTTP/1.1\r\nHost: a\r\n\r\n"].concat();
            let mut parser = RequestParser::new(HeadLimits::NONE);
            if parser.parse(&head).is_ok() {
                let uri = read_request(&head, false).unwrap().uri().to_string();
                assert!(uri.starts_with("http://a/a"), "{byte:02x}: {uri}");
            }
        }
        assert!(read("GET / HTTP/1.1\nHost: a b\n\n").is_err());
        assert!(read("GET / HTTP/1.1\nHost: a\n").is_err(), "not whole");
    }

    #[test]
    fn a_response_is_written_with_one_framing() {
        let write = |status: u16, length: Option<&str>, is_bare: bool, is_to_head: bool| {
            let mut builder =
                Response::builder().status(status).header("x-a", "b").header("connection", "close");
            if let Some(length) = length {
                builder = builder.header("content-length", length);
            }
            let mut out = Vec::new();
            let coding = write_response(&builder.body(()).unwrap(), is_bare, is_to_head, &mut out);
            let text = String::from_utf8(out).unwrap();
            let (start, fields) = text.split_once("\r\nx-a: b\r\n").unwrap();
            let status_code = start.split(' ').nth(1).unwrap();
            assert_eq!(status_code, status.to_string());
            (fields.trim_end().to_owned(), coding)
        };
        let (none, empty) = (String::new(), "content-length: 0".to_owned());
        let (five, chunked) = ("content-length: 5".to_owned(), "transfer-encoding: chunked".to_owned());
        assert_eq!(write(200, None, false, false), (chunked, Coding::Chunked));
        assert_eq!(write(200, Some("5"), false, false), (five.clone(), Coding::Plain));
        assert_eq!(write(200, None, true, false), (empty, Coding::Plain));
        assert_eq!(write(200, None, true, true), (none.clone(), Coding::Plain));
        assert_eq!(write(200, Some("5"), true, true), (five, Coding::Plain));
        for status in [103, 204, 304] {
            assert_eq!(write(status, None, true, false), (none.clone(), Coding::Plain));
        }
    }
}
