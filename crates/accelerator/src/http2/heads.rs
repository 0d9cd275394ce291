//! Heads of HTTP/2 written as those of HTTP/1.1, and the other way round (RFC 9113 §8).

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version, header};
use tidegate_http::forward::{is_hop_by_hop, write_field};
use tidegate_http::{FieldId, ResponseHead, is_trimmed};

/// A request that HTTP/2 does not allow. The parser finds the others.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Malformed;

/// Writes a request's head with its final empty line. `has_content` says whether content may follow.
pub(super) fn write_request(parts: &Parts, has_content: bool) -> Result<Vec<u8>, Malformed> {
    let Parts { method, uri, headers, .. } = parts;
    // §8.2.1.
    if !headers.values().all(|value| is_trimmed(value.as_bytes())) {
        return Err(Malformed);
    }
    let mut out = Vec::with_capacity(1024);
    out.extend_from_slice(method.as_str().as_bytes());
    out.push(b' ');
    let authority = uri.authority().map(|authority| authority.as_str().as_bytes());
    match uri.path_and_query() {
        _ if *method == Method::CONNECT => out.extend_from_slice(authority.ok_or(Malformed)?),
        Some(target) => out.extend_from_slice(target.as_str().as_bytes()),
        None => return Err(Malformed),
    }
    out.extend_from_slice(b" HTTP/1.1\r\n");
    write_host(authority, headers, &mut out)?;
    let mut cookies = headers.get_all(header::COOKIE).iter();
    if let Some(first) = cookies.next() {
        // §8.2.3: in one field again, as servers of HTTP/1.1 expect it.
        out.extend_from_slice(b"cookie: ");
        out.extend_from_slice(first.as_bytes());
        cookies.for_each(|cookie| {
            out.extend_from_slice(b"; ");
            out.extend_from_slice(cookie.as_bytes());
        });
        out.extend_from_slice(b"\r\n");
    }
    for (name, value) in headers {
        match *name {
            header::HOST | header::COOKIE => {}
            // §8.2.2: what is about a connection is refused by the library, but for `TE: trailers`.
            _ if is_hop_by_hop(FieldId::from_name(name.as_str().as_bytes())) => {}
            _ => write_field(name.as_str().as_bytes(), value.as_bytes(), &mut out),
        }
    }
    if has_content && !headers.contains_key(header::CONTENT_LENGTH) {
        out.extend_from_slice(b"transfer-encoding: chunked\r\n");
    }
    out.extend_from_slice(b"\r\n");
    Ok(out)
}

/// §8.3.1: `:authority` is what `Host` is in HTTP/1.1; where there are both, they say the same.
fn write_host(authority: Option<&[u8]>, headers: &HeaderMap, out: &mut Vec<u8>) -> Result<(), Malformed> {
    let mut hosts = headers.get_all(header::HOST).iter().map(HeaderValue::as_bytes);
    let host = match (authority, hosts.next(), hosts.next()) {
        (_, Some(_), Some(_)) => return Err(Malformed),
        (Some(authority), Some(host), None) if !host.eq_ignore_ascii_case(authority) => {
            return Err(Malformed);
        }
        (Some(authority), ..) => authority,
        (None, Some(host), None) => host,
        (None, None, _) => return Err(Malformed),
    };
    out.extend_from_slice(b"host: ");
    out.extend_from_slice(host);
    out.extend_from_slice(b"\r\n");
    Ok(())
}

/// A response's head; `None` if HTTP/2 has no form for it.
pub(super) fn response(parsed: &ResponseHead<'_>) -> Option<Response<()>> {
    let mut head = Response::new(());
    *head.version_mut() = Version::HTTP_2;
    *head.status_mut() = StatusCode::from_u16(parsed.status).ok()?;
    for (id, name, value) in parsed.fields.iter() {
        // §8.2.2.
        if !is_hop_by_hop(id) {
            let name = HeaderName::from_bytes(name).ok()?;
            head.headers_mut().append(name, HeaderValue::from_bytes(value).ok()?);
        }
    }
    Some(head)
}

/// Says by which other protocol the site can be had (RFC 7838 §3), if there is one and the application names none.
pub(super) fn offer(alternative: &str, head: &mut Response<()>) {
    if !alternative.is_empty()
        && let Ok(value) = HeaderValue::from_str(alternative)
    {
        head.headers_mut().entry(header::ALT_SVC).or_insert(value);
    }
}

/// Trailer fields, without those that have no meaning there (§8.1).
pub(crate) fn trailers<'t>(fields: impl Iterator<Item = (&'t [u8], &'t [u8])>) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in fields {
        let is_kept = !is_hop_by_hop(FieldId::from_name(name));
        if let (true, Ok(name), Ok(value)) =
            (is_kept, HeaderName::from_bytes(name), HeaderValue::from_bytes(value))
        {
            map.append(name, value);
        }
    }
    map
}

/// The trailers of a request as lines (RFC 9112 §7.1.2).
pub(super) fn trailer_section(trailers: &HeaderMap) -> Bytes {
    let mut out = Vec::new();
    for (name, value) in trailers {
        write_field(name.as_str().as_bytes(), value.as_bytes(), &mut out);
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use http::Request;
    use tidegate_http::{HeadLimits, Progress, RequestParser, ResponseParser};

    use super::*;

    /// The head of a request with these fields, as a parser of HTTP/1.1 reads it: its target, and its fields in order.
    fn read(uri: &str, fields: &[(&str, &str)], has_content: bool) -> Result<Vec<String>, Malformed> {
        let mut builder = Request::builder().method("POST").uri(uri);
        for (name, value) in fields {
            builder = builder.header(*name, *value);
        }
        let (parts, ()) = builder.body(()).unwrap().into_parts();
        let bytes = write_request(&parts, has_content)?;
        let mut parser = RequestParser::new(HeadLimits::default());
        assert_eq!(parser.parse(&bytes), Ok(Progress::Complete { length: bytes.len() }));
        let head = parser.head(&bytes);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut read = vec![text(head.target)];
        read.extend(head.fields.iter().map(|(_, name, value)| format!("{}: {}", text(name), text(value))));
        Ok(read)
    }

    #[test]
    fn a_request_is_written_with_one_host_one_cookie_and_one_framing() {
        let fields =
            [("cookie", "a=1"), ("accept", "*/*"), ("te", "trailers"), ("cookie", "b=2"), ("trailer", "x")];
        let lines = read("https://site.example/a?b", &fields, true).unwrap();
        assert_eq!(
            lines,
            ["/a?b", "host: site.example", "cookie: a=1; b=2", "accept: */*", "transfer-encoding: chunked"]
        );
        let lines = read("https://site.example/", &[("content-length", "5")], true).unwrap();
        assert_eq!(lines, ["/", "host: site.example", "content-length: 5"]);
        assert_eq!(read("https://site.example/", &[], false).unwrap(), ["/", "host: site.example"]);
    }

    #[test]
    fn values_begin_and_end_without_space() {
        for value in [" 1", "1\t", "\t", " "] {
            for name in ["x-a", "cookie"] {
                assert_eq!(read("https://a.example/", &[(name, value)], false), Err(Malformed), "{value:?}");
            }
        }
        assert!(read("https://a.example/", &[("x-a", "1 2"), ("x-b", "")], false).is_ok());
    }

    #[test]
    fn host_and_authority_say_the_same_or_one_of_them_is_missing() {
        let host = |uri, hosts: &[&str]| {
            let fields: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
            read(uri, &fields, false).map(|lines| lines[1].clone())
        };
        assert_eq!(host("https://a.example/", &["A.example"]).unwrap(), "host: a.example");
        assert_eq!(host("/", &["b.example"]).unwrap(), "host: b.example");
        for (uri, hosts) in [
            ("https://a.example/", &["b.example"][..]),
            ("https://a.example/", &["a.example", "a.example"]),
            ("/", &[]),
        ] {
            assert_eq!(host(uri, hosts), Err(Malformed), "{uri} {hosts:?}");
        }
    }

    #[test]
    fn what_is_about_a_connection_of_http_1_does_not_reach_one_of_http_2() {
        let bytes = Bytes::from_static(
            b"HTTP/1.1 200 OK\r\nX-A: b\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        );
        let mut parser = ResponseParser::new(HeadLimits::default());
        assert_eq!(parser.parse(&bytes), Ok(Progress::Complete { length: bytes.len() - 5 }));
        let head = response(&parser.head(&bytes)).unwrap();
        let names: Vec<_> = head.headers().keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["x-a"]);
        let trailers = trailers([(&b"X-T"[..], &b"1"[..]), (b"Connection", b"close")].into_iter());
        assert_eq!(trailers.len(), 1);
    }
}
