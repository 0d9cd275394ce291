//! Requests, responses and trailers of HTTP/3, and which of them are refused (RFC 9114 §4).

#![allow(clippy::unwrap_used)] // A failed expectation ends the test.

use tidegate_http::http3::{
    Content, HeadError, Request, max_field_section_size, qpack, read_trailers, write_response, write_trailers,
};
use tidegate_http::{FieldId, HeadLimits, Method, Progress, RequestParser};

type Line<'l> = (&'l str, &'l str);

/// What most requests here begin with.
const GET: [Line<'_>; 4] =
    [(":method", "GET"), (":authority", "site.example"), (":scheme", "https"), (":path", "/a?b")];

/// A field section whose names and values are written as they are, whether they may be or not.
fn section(fields: &[Line<'_>]) -> Vec<u8> {
    let mut out = vec![0, 0];
    for (name, value) in fields {
        for (first, mask, text) in [(0x20, 0x07, name), (0x00, 0x7f, value)] {
            if text.len() < mask {
                out.push(first | text.len() as u8);
            } else {
                let rest = text.len() - mask;
                assert!(rest < 1 << 14);
                out.extend_from_slice(&[first | mask as u8, rest as u8 | 0x80, (rest >> 7) as u8]);
            }
            out.extend_from_slice(text.as_bytes());
        }
    }
    out
}

fn read(fields: &[Line<'_>]) -> Result<Request, HeadError> {
    Request::read(&section(fields), &HeadLimits::default())
}

fn read_after_get(fields: &[Line<'_>]) -> Result<Request, HeadError> {
    read(&[&GET[..], fields].concat())
}

/// The head's lines but for the empty one; a parser of HTTP/1.1 finds nothing wrong with it.
fn lines(request: Request, content: Content) -> Vec<String> {
    let head = request.finish(content);
    let mut parser = RequestParser::new(HeadLimits::default());
    assert_eq!(parser.parse(&head), Ok(Progress::Complete { length: head.len() }));
    let text = String::from_utf8(head).unwrap();
    text.strip_suffix("\r\n\r\n").unwrap().split("\r\n").map(String::from).collect()
}

/// What a section says, as `name: value`.
fn decoded(section: &[u8]) -> Vec<String> {
    let mut fields = Vec::new();
    qpack::decode(section, u64::MAX, |name, value| {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        fields.push(format!("{}: {}", text(name), text(value)));
        Ok::<_, HeadError>(())
    })
    .unwrap();
    fields
}

fn with_ids<'f>(fields: &[Line<'f>]) -> Vec<(FieldId, &'f [u8], &'f [u8])> {
    fields
        .iter()
        .map(|(name, value)| (FieldId::from_name(name.as_bytes()), name.as_bytes(), value.as_bytes()))
        .collect()
}

#[test]
fn a_request_is_written_with_one_host_one_cookie_and_one_framing() {
    let fields = [
        ("cookie", "a=1"),
        ("accept", "*/*"),
        ("te", "trailers"),
        ("cookie", "b=2"),
        ("trailer", "x"),
        ("x", ""),
    ];
    let request = read_after_get(&fields).unwrap();
    assert_eq!(
        lines(request.clone(), Content::MayFollow),
        [
            "GET /a?b HTTP/1.1",
            "host: site.example",
            "cookie: a=1; b=2",
            "accept: */*",
            "x: ",
            "transfer-encoding: chunked"
        ]
    );
    assert_eq!(lines(request, Content::None).len(), 5);
    let request = read_after_get(&[("content-length", "5"), ("content-length", "5")]).unwrap();
    assert_eq!(
        lines(request, Content::MayFollow),
        ["GET /a?b HTTP/1.1", "host: site.example", "content-length: 5"]
    );
}

#[test]
fn a_request_without_other_fields_is_one() {
    assert_eq!(lines(read(&GET).unwrap(), Content::None), ["GET /a?b HTTP/1.1", "host: site.example"]);
}

#[test]
fn pseudo_header_fields_may_be_in_any_order() {
    let expected = lines(read(&GET).unwrap(), Content::None);
    for by in 1..GET.len() {
        let mut fields = GET;
        fields.rotate_left(by);
        assert_eq!(lines(read(&fields).unwrap(), Content::None), expected);
        fields.reverse();
        assert_eq!(lines(read(&fields).unwrap(), Content::None), expected);
    }
}

#[test]
fn facts_are_known_before_content_is() {
    let facts = read_after_get(&[]).unwrap().facts();
    assert_eq!((facts.method, facts.content_length), (Method::Get, None));
    assert!(!facts.expects_continue);
    let fields = [(":method", "PUT"), (":scheme", "https"), (":authority", "a"), (":path", "/")];
    let more = [("content-length", "0012"), ("expect", "100-Continue")];
    let facts = read(&[&fields[..], &more].concat()).unwrap().facts();
    assert_eq!((facts.method, facts.content_length), (Method::Put, Some(12)));
    assert!(facts.expects_continue);
    assert!(!read_after_get(&[("expect", "100-continued")]).unwrap().facts().expects_continue);
}

#[test]
fn connect_has_an_authority_and_neither_scheme_nor_path() {
    let connect = [(":method", "CONNECT"), (":authority", "site.example:443")];
    let request = read(&connect).unwrap();
    assert_eq!(request.facts().method, Method::Connect);
    assert_eq!(
        lines(request, Content::None),
        ["CONNECT site.example:443 HTTP/1.1", "host: site.example:443"]
    );
    assert_eq!(read(&connect[..1]), Err(HeadError::Malformed));
    assert_eq!(read(&[connect[0], ("host", "site.example:443")]), Err(HeadError::Malformed));
    // RFC 9220: only where it is offered.
    for more in [
        &[(":path", "/")][..],
        &[(":scheme", "https")],
        &[(":scheme", "https"), (":path", "/")],
        &[(":protocol", "websocket"), (":scheme", "https"), (":path", "/")],
    ] {
        assert_eq!(read(&[&connect[..], more].concat()), Err(HeadError::Malformed), "{more:?}");
    }
}

#[test]
fn a_pseudo_header_field_that_is_missing_repeated_unknown_or_late_is_refused() {
    for missing in [0, 2, 3] {
        let mut fields = GET.to_vec();
        fields.remove(missing);
        assert_eq!(read(&fields), Err(HeadError::Malformed), "{missing}");
    }
    assert_eq!(read(&[]), Err(HeadError::Malformed));
    for (at, field) in GET.iter().enumerate() {
        assert_eq!(read_after_get(&[*field]), Err(HeadError::Malformed), "{field:?}");
        let mut late = GET.to_vec();
        late.remove(at);
        late.extend([("host", "site.example"), *field]);
        assert_eq!(read(&late), Err(HeadError::Malformed), "{field:?}");
    }
    for name in [":", ":status", ":protocol", ":Path", ":x"] {
        assert_eq!(read_after_get(&[(name, "200")]), Err(HeadError::Malformed), "{name}");
    }
}

#[test]
fn host_and_authority_say_the_same_or_one_of_them_is_missing() {
    let host = |authority: Option<&str>, hosts: &[&str]| {
        let mut fields = vec![GET[0], GET[2], GET[3]];
        fields.extend(authority.map(|authority| (":authority", authority)));
        fields.push(("accept", "*/*"));
        fields.extend(hosts.iter().map(|host| ("host", *host)));
        fields.push(("cookie", "a"));
        read(&fields).map(|request| lines(request, Content::None))
    };
    let lines_of = |host: &str| {
        ["GET /a?b HTTP/1.1", &format!("host: {host}"), "cookie: a", "accept: */*"].map(String::from).to_vec()
    };
    assert_eq!(host(Some("a.example"), &["A.example"]).unwrap(), lines_of("a.example"));
    assert_eq!(host(None, &["b.example:80"]).unwrap(), lines_of("b.example:80"));
    for (authority, hosts) in [
        (Some("a.example"), &["b.example"][..]),
        (Some("a.example"), &["a.example", "a.example"]),
        (Some("a.example"), &[""]),
        (None, &["a.example", "a.example"]),
        (None, &[]),
    ] {
        assert_eq!(host(authority, hosts), Err(HeadError::Malformed), "{authority:?} {hosts:?}");
    }
    for name in
        ["", "user@a", "@", "a/b", "a?b", "a#b", "a\\b", "a b", " a", "a\r\nx: y", "\u{e9}", "a\0", "a,\tb"]
    {
        assert_eq!(host(Some(name), &[]), Err(HeadError::Malformed), "{name:?}");
        assert_eq!(host(None, &[name]), Err(HeadError::Malformed), "{name:?}");
    }
}

#[test]
fn methods_schemes_and_paths_are_what_they_must_be() {
    let with = |at: usize, value: &'static str| {
        let mut fields = GET;
        fields[at].1 = value;
        read(&fields).map(|request| lines(request, Content::None)[0].clone())
    };
    assert_eq!(with(0, "get-it").unwrap(), "get-it /a?b HTTP/1.1");
    assert_eq!(with(2, "http").unwrap(), "GET /a?b HTTP/1.1");
    assert_eq!(with(3, "//x?[%]|").unwrap(), "GET //x?[%]| HTTP/1.1");
    for (at, value) in [
        (0, ""),
        (0, "G T"),
        (0, "GET\r"),
        (0, "GET /x HTTP/1.1\r\nx:"),
        (2, ""),
        (2, "ftp"),
        (2, "https:"),
        (3, "*"),
    ] {
        assert_eq!(with(at, value), Err(HeadError::Malformed), "{value:?}");
    }
    for path in
        ["", "a", "?a", "https://site.example/", "/a b", "/a#b", "/\t", "/\u{e9}", "/\u{7f}", "/\r\n", "/\0"]
    {
        assert_eq!(with(3, path), Err(HeadError::Malformed), "{path:?}");
    }
    let options = |path| read(&[(":method", "OPTIONS"), GET[1], GET[2], (":path", path)]);
    assert_eq!(lines(options("*").unwrap(), Content::None)[0], "OPTIONS * HTTP/1.1");
    assert_eq!(options("**"), Err(HeadError::Malformed));
}

#[test]
fn names_that_are_no_names_of_http_3_are_refused() {
    for name in ["", "Accept", "x-Y", "a b", "a:", "a\r\n", "a\0", "\u{e9}", "a\u{7f}", " a", "a,b"] {
        assert_eq!(read_after_get(&[(name, "x")]), Err(HeadError::Malformed), "{name:?}");
    }
    assert!(read_after_get(&[("!#$%&'*+-.^_`|~09az", "x")]).is_ok());
}

#[test]
fn values_with_controls_or_with_space_around_them_are_refused() {
    for byte in 0..=255 {
        let value = [b'a', byte, b'b'];
        let mut bytes = section(&GET);
        qpack::write_field(b"x", &value, &mut bytes);
        let expected = byte == b'\t' || byte >= b' ' && byte != 0x7f;
        assert_eq!(Request::read(&bytes, &HeadLimits::default()).is_ok(), expected, "{byte}");
    }
    for value in [" a", "a ", "\ta", "a\t", " "] {
        for name in ["x", "cookie", "content-type"] {
            assert_eq!(read_after_get(&[(name, value)]), Err(HeadError::Malformed), "{name} {value:?}");
        }
    }
    assert!(read_after_get(&[("x", ""), ("y", "a \t b"), ("z", "\u{e9}")]).is_ok());
}

#[test]
fn fields_about_a_connection_are_refused() {
    for (name, value) in [
        ("connection", "close"),
        ("keep-alive", "timeout=5"),
        ("proxy-connection", "keep-alive"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "websocket"),
        ("te", "gzip"),
        ("te", "trailers, gzip"),
        ("te", ""),
    ] {
        assert_eq!(read_after_get(&[(name, value)]), Err(HeadError::Malformed), "{name}: {value}");
        assert_eq!(
            read_trailers(&section(&[(name, value)]), &HeadLimits::default(), &mut Vec::new()),
            Err(HeadError::Malformed),
            "{name}: {value}"
        );
    }
}

#[test]
fn a_length_is_one_number() {
    for value in ["", "x", "+1", "-1", "1,1", "1 1", "18446744073709551616"] {
        assert_eq!(read_after_get(&[("content-length", value)]), Err(HeadError::Malformed), "{value:?}");
    }
    let lengths = [("content-length", "1"), ("x", "y"), ("content-length", "2")];
    assert_eq!(read_after_get(&lengths), Err(HeadError::Malformed));
}

#[test]
fn more_fields_than_the_limit_are_too_many_and_cookies_are_one() {
    let limits = HeadLimits { fields: 5, ..HeadLimits::default() };
    let with = |fields: &[Line<'_>]| Request::read(&section(&[&GET[..], fields].concat()), &limits);
    let cookies = [("cookie", "a=b"); 50];
    let others = [("x", "y"); 4];
    assert!(with(&others).is_ok());
    assert!(with(&[&cookies[..], &others[..3]].concat()).is_ok());
    assert_eq!(with(&[&cookies[..1], &others].concat()), Err(HeadError::TooLarge));
    assert_eq!(with(&[("te", "trailers"); 5]), Err(HeadError::TooLarge));
}

#[test]
fn what_fits_in_a_head_of_http_1_fits_here_and_nothing_larger() {
    let request_line = "GET /a?b HTTP/1.1\r\n".len() as u32;
    let head = "GET /a?b HTTP/1.1\r\nhost: site.example\r\nx: yyyy\r\n\r\n".len() as u32;
    let fields = section(&[&GET[..], &[("x", "yyyy")]].concat());
    let read = |request_line_bytes, head_bytes| {
        Request::read(&fields, &HeadLimits { request_line_bytes, head_bytes, fields: 10 })
    };
    assert_eq!(read(request_line, head).unwrap().finish(Content::None).len(), head as usize);
    assert_eq!(read(request_line - 1, head), Err(HeadError::LongTarget));
    assert_eq!(read(request_line, head - 1), Err(HeadError::TooLarge));
}

#[test]
fn a_section_beyond_the_limits_is_refused_before_it_is_read() {
    let limits = HeadLimits { request_line_bytes: 100, head_bytes: 200, fields: 2 };
    assert_eq!(max_field_section_size(&limits), 264);
    let mut bytes = section(&GET);
    // Of which each byte would be 60, with what counts for a field.
    bytes.extend_from_slice(&[0xc0 | 46; 10_000]);
    assert_eq!(Request::read(&bytes, &limits), Err(HeadError::TooLarge));
    // Seen before what is wrong behind it.
    bytes.push(0x80);
    assert_eq!(Request::read(&bytes, &limits), Err(HeadError::TooLarge));
    assert_eq!(Request::read(&[0, 0, 0x80], &limits), Err(HeadError::Compression));
    assert_eq!(Request::read(&[], &limits), Err(HeadError::Compression));
}

#[test]
fn a_response_has_its_status_and_names_in_lower_case() {
    let fields = [
        ("Content-Type", "text/css"),
        ("X-Own", "A"),
        ("Connection", "x"),
        ("Keep-Alive", "timeout=5"),
        ("Transfer-Encoding", "chunked"),
        ("Set-Cookie", "a=b"),
    ];
    for (status, indexed) in [(200, true), (404, true), (201, false), (599, false)] {
        let mut out = Vec::new();
        write_response(status, with_ids(&fields), &mut out);
        assert_eq!(out[2] & 0x80 != 0, indexed, "{status}");
        assert_eq!(
            decoded(&out),
            [&format!(":status: {status}"), "content-type: text/css", "x-own: A", "set-cookie: a=b"]
        );
    }
}

#[test]
fn trailers_go_both_ways_without_those_of_one_connection() {
    let fields = [("X-Sum", "1"), ("Trailer", "x-sum"), ("grpc-status", "0")];
    let mut section = Vec::new();
    write_trailers(with_ids(&fields), &mut section);
    assert_eq!(decoded(&section), ["x-sum: 1", "grpc-status: 0"]);
    let mut lines = Vec::new();
    read_trailers(&section, &HeadLimits::default(), &mut lines).unwrap();
    assert_eq!(lines, b"x-sum: 1\r\ngrpc-status: 0\r\n");
}

#[test]
fn trailers_that_must_not_be_are_refused() {
    let read = |fields: &[Line<'_>], limits| read_trailers(&section(fields), &limits, &mut Vec::new());
    for (name, value) in [(":path", "/"), (":status", "200"), ("X", "y"), ("x", "a\nb"), ("", "")] {
        assert_eq!(read(&[(name, value)], HeadLimits::default()), Err(HeadError::Malformed), "{name}");
    }
    let limits = HeadLimits { request_line_bytes: 0, head_bytes: 20, fields: 2 };
    assert_eq!(read(&[("x", "y"); 2], limits), Ok(()));
    assert_eq!(read(&[("x", "y"); 3], limits), Err(HeadError::TooLarge));
    assert_eq!(read(&[("x", "y"), ("x", "yyyyyyyyyyy")], limits), Err(HeadError::TooLarge));
    assert_eq!(read_trailers(&[0, 0, 0x80], &limits, &mut Vec::new()), Err(HeadError::Compression));
}
