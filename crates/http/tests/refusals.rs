//! One row per attack on the framing of a message or on the agreement between two parsers.

use tidegate_http::{HeadError, HeadLimits, Method, Progress, RequestParser, ResponseParser};

use HeadError as E;

fn request(head: &[u8]) -> Result<Progress, HeadError> {
    RequestParser::new(HeadLimits::default()).parse(head)
}

/// Whatever the bytes are split into, the answer is the same, and no byte beyond a slice's end is needed for it.
fn request_in_pieces(head: &[u8], piece: usize) -> Result<Progress, HeadError> {
    let mut parser = RequestParser::new(HeadLimits::default());
    for end in (piece..head.len()).step_by(piece) {
        match parser.parse(&head[..end].to_vec().into_boxed_slice())? {
            Progress::Incomplete => {}
            complete => return Ok(complete),
        }
    }
    parser.parse(head)
}

const REQUESTS: &[(&str, HeadError)] = &[
    // Request line.
    ("\r\n\r\n\r\n\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", E::TooManyEmptyLines),
    ("\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", E::BareLineFeed),
    ("\rGET / HTTP/1.1\r\nHost: a\r\n\r\n", E::BareCarriageReturn),
    (" GET / HTTP/1.1\r\nHost: a\r\n\r\n", E::BadMethod),
    ("G=T / HTTP/1.1\r\nHost: a\r\n\r\n", E::BadMethod),
    ("GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", E::BadMethod),
    ("GET\r\n\r\n", E::BadMethod),
    ("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", E::BadTarget),
    ("GET /\tHTTP/1.1\r\nHost: a\r\n\r\n", E::BadTarget),
    ("GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n", E::BadTarget),
    ("GET /\x7f HTTP/1.1\r\nHost: a\r\n\r\n", E::BadTarget),
    ("GET /\n", E::BareLineFeed),
    ("GET /\r\n", E::BadVersion),
    ("GET / \r\n\r\n", E::BadVersion),
    ("GET /  HTTP/1.1\r\nHost: a\r\n\r\n", E::BadVersion),
    ("GET / a HTTP/1.1\r\nHost: a\r\n\r\n", E::BadVersion),
    ("GET / http/1.1\r\nHost: a\r\n\r\n", E::BadVersion),
    ("GET / HTTP/1.\r\nHost: a\r\n\r\n", E::BadVersion),
    ("GET / HTTP/1.10\r\nHost: a\r\n\r\n", E::BadVersion),
    ("GET / HTTP/1.1 \r\nHost: a\r\n\r\n", E::BadVersion),
    ("GET / HTTP/+1.1\r\nHost: a\r\n\r\n", E::BadVersion),
    ("GET / HTTP/1.1\nHost: a\r\n\r\n", E::BareLineFeed),
    ("GET / HTTP/1.1\rHost: a\r\n\r\n", E::BareCarriageReturn),
    ("GET / HTTP/0.9\r\n\r\n", E::UnsupportedVersion),
    ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", E::UnsupportedVersion),
    ("GET / HTTP/3.1\r\nHost: a\r\n\r\n", E::UnsupportedVersion),
    ("GET / HTTP/1.20\r\nHost: a\r\n\r\n", E::BadVersion),
    ("GET / HTTP/1.2\r\n\r\n", E::MissingHost),
    ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", E::UnsupportedVersion),
    // Field lines.
    ("GET / HTTP/1.1\r\n Host: a\r\n\r\n", E::ObsoleteFold),
    ("GET / HTTP/1.1\r\nHost: a\r\n\tb: c\r\n\r\n", E::ObsoleteFold),
    ("GET / HTTP/1.1\r\nHost : a\r\n\r\n", E::WhitespaceBeforeColon),
    ("GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding\t: chunked\r\n\r\n", E::WhitespaceBeforeColon),
    ("GET / HTTP/1.1\r\n: a\r\n\r\n", E::EmptyFieldName),
    ("GET / HTTP/1.1\r\nHost\r\n\r\n", E::BadFieldName),
    ("GET / HTTP/1.1\r\nHo\0st: a\r\n\r\n", E::BadFieldName),
    ("GET / HTTP/1.1\r\nHost\u{e9}: a\r\n\r\n", E::BadFieldName),
    ("GET / HTTP/1.1\r\nHost: a\r\n(x): a\r\n\r\n", E::BadFieldName),
    ("GET / HTTP/1.1\r\nHost: a\n\r\n", E::BareLineFeed),
    ("GET / HTTP/1.1\r\nHost: a\r\nx\n: b\r\n\r\n", E::BareLineFeed),
    ("GET / HTTP/1.1\r\nHost: a\r\n\n", E::BareLineFeed),
    ("GET / HTTP/1.1\r\nHost: a\rb\r\n\r\n", E::BareCarriageReturn),
    ("GET / HTTP/1.1\r\nHost: a\r\n\rx", E::BareCarriageReturn),
    ("GET / HTTP/1.1\r\nHost: a\r\r\n\r\n", E::BareCarriageReturn),
    ("GET / HTTP/1.1\r\nHost: a\0b\r\n\r\n", E::ControlByte),
    ("GET / HTTP/1.1\r\nHost: a\x1b\r\n\r\n", E::ControlByte),
    ("GET / HTTP/1.1\r\nHost: a\x7f\r\n\r\n", E::ControlByte),
    // Host.
    ("GET / HTTP/1.1\r\n\r\n", E::MissingHost),
    ("GET http://a/ HTTP/1.1\r\nAccept: */*\r\n\r\n", E::MissingHost),
    ("GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n", E::RepeatedHost),
    ("GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", E::RepeatedHost),
    // Framing.
    (
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        E::AmbiguousFraming,
    ),
    (
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n",
        E::AmbiguousFraming,
    ),
    (
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 4\r\n\r\n",
        E::RepeatedContentLength,
    ),
    (
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
        E::RepeatedContentLength,
    ),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4, 4\r\n\r\n", E::BadContentLength),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n", E::BadContentLength),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +4\r\n\r\n", E::BadContentLength),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -4\r\n\r\n", E::BadContentLength),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x4\r\n\r\n", E::BadContentLength),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4 4\r\n\r\n", E::BadContentLength),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 18446744073709551616\r\n\r\n", E::BadContentLength),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", E::UnknownTransferCoding),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", E::UnknownTransferCoding),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n", E::UnknownTransferCoding),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", E::UnknownTransferCoding),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n", E::BadTransferEncoding),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", E::BadTransferEncoding),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked;x=1\r\n\r\n", E::BadTransferEncoding),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n", E::ControlByte),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n\r\n", E::BadTransferEncoding),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: ,chunked\r\n\r\n", E::BadTransferEncoding),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \"chunked\"\r\n\r\n", E::BadTransferEncoding),
    (
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        E::BadTransferEncoding,
    ),
    (
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n",
        E::BadTransferEncoding,
    ),
    ("POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", E::TransferEncodingOnHttp10),
];

#[test]
fn every_ambiguous_request_is_refused_with_its_reason_however_split() {
    for (head, expected) in REQUESTS {
        assert_eq!(request(head.as_bytes()), Err(*expected), "{head:?}");
        for piece in [1, 2, 3, 5, 16, 33] {
            assert_eq!(request_in_pieces(head.as_bytes(), piece), Err(*expected), "{head:?} by {piece}");
        }
    }
}

#[test]
fn a_head_beyond_a_limit_is_refused_with_its_status_however_split() {
    let line = |length: usize| format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(length - 16));
    let fields =
        |count: usize| format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "x-a: b\r\n".repeat(count - 1));
    let head =
        |length: usize| format!("GET / HTTP/1.1\r\nHost: a\r\nCookie: {}\r\n\r\n", "x".repeat(length - 37));
    let table = [
        (line(16384), Ok(16384 + 11)),
        (line(16385), Err((E::RequestLineTooLong { limit: 16384 }, 414))),
        (fields(100), Ok(16 + 9 + 99 * 8 + 2)),
        (fields(101), Err((E::TooManyFields { limit: 100 }, 431))),
        (head(65536), Ok(65536)),
        (head(65537), Err((E::HeadTooLarge { limit: 65536 }, 431))),
        ("x".repeat(70000), Err((E::RequestLineTooLong { limit: 16384 }, 414))),
        (format!("GET / HTTP/1.1\r\nx{}", "-".repeat(70000)), Err((E::HeadTooLarge { limit: 65536 }, 431))),
    ];
    for (head, expected) in table {
        for piece in [61, 4093, head.len()] {
            let result = request_in_pieces(head.as_bytes(), piece);
            match expected {
                Ok(length) => assert_eq!(result, Ok(Progress::Complete { length })),
                Err((error, status)) => {
                    assert_eq!(result, Err(error));
                    assert_eq!(error.status(), status);
                }
            }
        }
    }
}

#[test]
fn every_refusal_has_a_name_of_its_own() {
    let mut names = HeadError::NAMES.to_vec();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), HeadError::NAMES.len());
    assert_eq!(E::UnknownTransferCoding.status(), 501);
    assert_eq!(E::UnsupportedVersion.status(), 505);
    assert_eq!(E::AmbiguousFraming.status(), 400);
    assert!(HeadError::NAMES.contains(&E::HeadTooLarge { limit: 1 }.name()));
}

#[test]
fn every_ambiguous_response_is_refused_with_its_reason_however_split() {
    let table: &[(&str, HeadError)] = &[
        ("ICY 200 OK\r\n\r\n", E::BadVersion),
        ("HTTP/1.1200 OK\r\n\r\n", E::BadVersion),
        ("HTTP/2.0 200 OK\r\n\r\n", E::UnsupportedVersion),
        ("HTTP/1.20 200 OK\r\n\r\n", E::BadVersion),
        ("HTTP/1.1  200 OK\r\n\r\n", E::BadStatus),
        ("HTTP/1.1 20 OK\r\n\r\n", E::BadStatus),
        ("HTTP/1.1 099 OK\r\n\r\n", E::BadStatus),
        ("HTTP/1.1 2000 OK\r\n\r\n", E::BadStatus),
        ("HTTP/1.1 200\n\n", E::BareLineFeed),
        ("HTTP/1.1 200\rX\n", E::BareCarriageReturn),
        ("HTTP/1.1 200 OK\n\n", E::BareLineFeed),
        ("HTTP/1.1 200 O\0K\r\n\r\n", E::ControlByte),
        ("HTTP/1.1 200 OK\r\na: b\r\n c\r\n\r\n", E::ObsoleteFold),
        ("HTTP/1.1 200 OK\r\na: b\n\r\n", E::BareLineFeed),
        ("HTTP/1.1 200 OK\r\na b: c\r\n\r\n", E::BadFieldName),
        ("HTTP/1.1 200 OK\r\na \r\n\r\n", E::BadFieldName),
        ("HTTP/1.1 200 OK\r\na \n\r\n", E::BareLineFeed),
        ("HTTP/1.1 200 OK\r\n : c\r\n\r\n", E::ObsoleteFold),
        ("HTTP/1.1 200 OK\r\nContent-Length : 1\r\nContent-Length: 1\r\n\r\n", E::RepeatedContentLength),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding\t: chunked\r\n\r\n", E::AmbiguousFraming),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", E::RepeatedContentLength),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\n", E::BadContentLength),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", E::AmbiguousFraming),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", E::UnknownTransferCoding),
        ("HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", E::TransferEncodingOnHttp10),
        ("HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", E::BadTransferEncoding),
        ("HTTP/1.1 100 Continue\r\nTransfer-Encoding: chunked\r\n\r\n", E::BadTransferEncoding),
    ];
    for (head, expected) in table {
        for piece in 1..=head.len() {
            let mut parser = ResponseParser::for_proxy(HeadLimits::default());
            parser.reset(Method::Get);
            let result = (piece..head.len())
                .step_by(piece)
                .chain([head.len()])
                .map(|end| parser.parse(&head.as_bytes()[..end]))
                .find(|result| *result != Ok(Progress::Incomplete));
            assert_eq!(result, Some(Err(*expected)), "{head:?} by {piece}");
        }
    }
}

/// Who hands a head on as it came must not see fields in it that the next hop may not see.
#[test]
fn whitespace_before_a_colon_is_refused_unless_the_head_is_written_anew() {
    let mut parser = ResponseParser::new(HeadLimits::default());
    let head = b"HTTP/1.1 200 OK\r\nContent-Length : 1\r\n\r\n";
    assert_eq!(parser.parse(head), Err(E::WhitespaceBeforeColon));
}

/// Room for fields is made as they come: what was seen before and after that counts alike.
#[test]
fn a_repeated_field_is_seen_however_many_fields_lie_between() {
    for between in 0..70 {
        let others = "X-Other: 1\r\n".repeat(between);
        let head = format!("GET / HTTP/1.1\r\nHost: a\r\n{others}Host: b\r\n\r\n");
        for piece in [1, 7, head.len()] {
            let result = request_in_pieces(head.as_bytes(), piece);
            assert_eq!(result, Err(E::RepeatedHost), "{between} between, pieces of {piece}");
        }
    }
}
