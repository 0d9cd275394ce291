//! What sound heads say, and that it does not depend on how their bytes arrive.

#![allow(clippy::unwrap_used)] // A failed expectation ends the test.

use proptest::prelude::*;
use tidegate_http::{
    BodyFraming, FieldId, HeadLimits, Method, Progress, RequestHead, RequestParser, ResponseParser, Version,
};

fn parsed(bytes: &[u8]) -> RequestParser {
    let mut parser = RequestParser::new(HeadLimits::default());
    assert!(
        matches!(parser.parse(bytes), Ok(Progress::Complete { .. })),
        "{}",
        String::from_utf8_lossy(bytes)
    );
    parser
}

/// Everything a head says, for comparisons.
fn describe(head: &RequestHead<'_>) -> String {
    format!("{head:?} {:?}", head.fields.iter().collect::<Vec<_>>())
}

const CORPUS: &[&str] = &[
    "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "\r\n\r\nGET / HTTP/1.0\r\n\r\n",
    "OPTIONS * HTTP/1.1\r\nhost:\r\n\r\n",
    "GET /index.html?a=b HTTP/1.1\r\nHost: www.example.com\r\nUser-Agent: wrk\r\nConnection: keep-alive\r\n\r\n",
    "POST /form HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello",
    "PROPFIND /dav HTTP/1.1\r\nHOST: \t a:8080 \t\r\nDepth:1\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\n\r\n",
    "GET /chat HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: a\r\nX-Empty:\r\nX-Blank:   \r\nX-Bytes: \u{e9}\u{4e2d} \t x\r\nxx: y\r\nx: y\r\n\r\n",
    "CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n",
    "GET http://a/ HTTP/1.1\r\nhOsT: b\r\nAccept: */*\r\nAccept-Encodin: x\r\nAccept-Encodings: y\r\nTe: a\r\nVi: b\r\n\r\n",
];

#[test]
fn every_split_into_two_and_every_piece_length_gives_the_same_head() {
    for text in CORPUS {
        let bytes = text.as_bytes();
        let whole = parsed(bytes);
        let expected = describe(&whole.head(bytes));
        for split in 0..bytes.len() {
            let mut parser = RequestParser::new(HeadLimits::default());
            let _ = parser.parse(&bytes[..split]).unwrap();
            let _ = parser.parse(bytes).unwrap();
            assert_eq!(describe(&parser.head(bytes)), expected, "{text:?} split at {split}");
        }
        for piece in 1..bytes.len() {
            let mut parser = RequestParser::new(HeadLimits::default());
            for end in (piece..bytes.len()).step_by(piece).chain([bytes.len()]) {
                // Exactly these bytes, with nothing behind them.
                let _ = parser.parse(&bytes[..end].to_vec().into_boxed_slice()).unwrap();
            }
            assert_eq!(describe(&parser.head(bytes)), expected, "{text:?} in pieces of {piece}");
        }
    }
}

#[test]
fn a_head_ends_where_its_empty_line_ends() {
    let text = CORPUS[4].as_bytes();
    let mut parser = RequestParser::new(HeadLimits::default());
    let length = text.len() - b"hello".len();
    for end in 0..length {
        assert_eq!(parser.parse(&text[..end]), Ok(Progress::Incomplete));
    }
    assert_eq!(parser.parse(text), Ok(Progress::Complete { length }));
    assert_eq!(parser.parse(text), Ok(Progress::Complete { length }));
    parser.reset();
    assert_eq!(parser.parse(CORPUS[0].as_bytes()), Ok(Progress::Complete { length: CORPUS[0].len() }));
    assert_eq!(parser.head(CORPUS[0].as_bytes()).fields.len(), 1);
}

#[test]
fn what_is_kept_of_a_head_says_the_same_when_the_parser_has_gone_on() {
    for text in CORPUS {
        let bytes = text.as_bytes();
        let mut parser = parsed(bytes);
        let (kept, expected) = (parser.parsed(), describe(&parser.head(bytes)));
        parser.reset();
        let _ = parser
            .parse(b"POST /other HTTP/1.0\r\nHost: b\r\nContent-Length: 1\r\nUpgrade: x\r\n\r\n")
            .unwrap();
        assert_eq!(describe(&kept.head(bytes)), expected);
    }
    let response = b"HTTP/1.1 404 Not here\r\nContent-Length: 5\r\nEtag: \"a\"\r\nConnection: close\r\n\r\n";
    let mut parser = ResponseParser::new(HeadLimits::default());
    let _ = parser.parse(response).unwrap();
    let kept = parser.parsed();
    parser.reset(Method::Head);
    let _ = parser.parse(b"HTTP/1.0 200 OK\r\n\r\n").unwrap();
    let head = kept.head(response);
    assert_eq!((head.status, head.reason, head.version), (404, &b"Not here"[..], Version::Http11));
    assert_eq!((head.framing, head.keep_alive), (BodyFraming::Length(5), false));
    assert_eq!((head.fields.len(), head.fields.get(FieldId::Etag)), (3, Some(&b"\"a\""[..])));
}

#[test]
fn a_higher_minor_version_is_read_as_1_1() {
    for minor in 2..=9 {
        let head = format!("GET /a HTTP/1.{minor}\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
        for split in 0..head.len() {
            let mut parser = RequestParser::new(HeadLimits::default());
            assert_eq!(parser.parse(&head.as_bytes()[..split]), Ok(Progress::Incomplete));
            assert_eq!(parser.parse(head.as_bytes()), Ok(Progress::Complete { length: head.len() }));
            let request = parser.head(head.as_bytes());
            assert_eq!((request.version, request.target), (Version::Http11, &b"/a"[..]));
            assert_eq!((request.framing, request.keep_alive), (BodyFraming::Chunked, true));
        }
        let head = format!("HTTP/1.{minor} 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        for split in 0..head.len() {
            let mut parser = ResponseParser::new(HeadLimits::default());
            assert_eq!(parser.parse(&head.as_bytes()[..split]), Ok(Progress::Incomplete));
            assert_eq!(parser.parse(head.as_bytes()), Ok(Progress::Complete { length: head.len() }));
            let response = parser.head(head.as_bytes());
            assert_eq!((response.version, response.status), (Version::Http11, 200));
            assert_eq!((response.framing, response.keep_alive), (BodyFraming::Chunked, true));
        }
    }
}

#[test]
fn a_request_says_what_its_fields_say() {
    let (get, old, post, other, upgrade) = (CORPUS[3], CORPUS[1], CORPUS[4], CORPUS[5], CORPUS[6]);
    let parser = parsed(get.as_bytes());
    let head = parser.head(get.as_bytes());
    assert_eq!(
        (head.method, head.target, head.version),
        (Method::Get, &b"/index.html?a=b"[..], Version::Http11)
    );
    assert_eq!(head.fields.get(FieldId::UserAgent), Some(&b"wrk"[..]));
    assert_eq!((head.framing, head.keep_alive, head.expect_continue), (BodyFraming::None, true, false));

    let parser = parsed(old.as_bytes());
    assert!(!parser.head(old.as_bytes()).keep_alive);

    let parser = parsed(post.as_bytes());
    let head = parser.head(post.as_bytes());
    assert_eq!((head.framing, head.expect_continue), (BodyFraming::Length(5), true));

    let parser = parsed(other.as_bytes());
    let head = parser.head(other.as_bytes());
    assert_eq!((head.method, head.method_bytes), (Method::Other, &b"PROPFIND"[..]));
    assert_eq!((head.framing, head.fields.get(FieldId::Host)), (BodyFraming::Chunked, Some(&b"a:8080"[..])));
    assert_eq!(head.fields.named(b"depth").collect::<Vec<_>>(), [b"1"]);

    let parser = parsed(upgrade.as_bytes());
    assert!(parser.head(upgrade.as_bytes()).upgrade && parser.head(upgrade.as_bytes()).keep_alive);
}

#[test]
fn an_expectation_is_found_in_a_list_and_query_is_a_method_of_its_own() {
    for (expect, is_met) in [
        ("100-continue", true),
        ("x, 100-Continue", true),
        ("100-continue,", true),
        ("x", false),
        ("100-continued", false),
    ] {
        let text = format!("QUERY / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: {expect}\r\n\r\n");
        let parser = parsed(text.as_bytes());
        let head = parser.head(text.as_bytes());
        assert_eq!((head.expect_continue, head.method), (is_met, Method::Query), "{expect}");
        assert!(head.method.is_safe() && head.method.is_idempotent());
    }
}

#[test]
fn connections_persist_as_version_and_options_say() {
    let table = [
        ("HTTP/1.1", "x", true),
        ("HTTP/1.1", "close", false),
        ("HTTP/1.1", "foo, CLOSE", false),
        ("HTTP/1.1", "keep-alive, close", false),
        ("HTTP/1.0", "x", false),
        ("HTTP/1.0", "Keep-Alive", true),
        ("HTTP/1.0", "keep-alive, close", false),
    ];
    for (version, options, persists) in table {
        let text = format!("GET / {version}\r\nHost: a\r\nConnection: {options}\r\n\r\n");
        assert_eq!(parsed(text.as_bytes()).head(text.as_bytes()).keep_alive, persists, "{version} {options}");
    }
}

#[test]
fn the_framing_of_a_response_follows_rfc_9112_section_6_3() {
    use BodyFraming as B;
    let table = [
        (Method::Get, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", B::Length(5), true),
        (Method::Get, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", B::Chunked, true),
        (Method::Get, "HTTP/1.1 200 OK\r\n\r\n", B::UntilClose, false),
        (Method::Get, "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n", B::Length(5), false),
        (
            Method::Get,
            "HTTP/1.0 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\n",
            B::Length(5),
            true,
        ),
        (Method::Get, "HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", B::Length(0), true),
        (Method::Get, "HTTP/1.1 200 \r\nContent-Length: 0\r\nConnection: close\r\n\r\n", B::Length(0), false),
        (Method::Head, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", B::None, true),
        (Method::Head, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", B::None, true),
        (Method::Get, "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", B::None, true),
        (Method::Get, "HTTP/1.1 204 No Content\r\n\r\n", B::None, true),
        (Method::Get, "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", B::None, false),
        (Method::Get, "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", B::None, true),
        (Method::Get, "HTTP/1.1 101 Switching Protocols\r\n\r\n", B::None, false),
        (Method::Connect, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", B::None, false),
        (Method::Connect, "HTTP/1.1 403 Forbidden\r\nContent-Length: 5\r\n\r\n", B::Length(5), true),
    ];
    let mut parser = ResponseParser::new(HeadLimits::default());
    for (method, text, framing, keep_alive) in table {
        for split in 0..text.len() {
            parser.reset(method);
            assert_eq!(
                parser.parse(&text.as_bytes()[..split]),
                Ok(Progress::Incomplete),
                "{text:?} at {split}"
            );
            assert_eq!(parser.parse(text.as_bytes()), Ok(Progress::Complete { length: text.len() }));
            let head = parser.head(text.as_bytes());
            assert_eq!((head.framing, head.keep_alive), (framing, keep_alive), "{text:?}");
            assert_eq!(head.status.to_string(), text[9..12]);
        }
    }
}

/// RFC 9112 §5.1: "A proxy MUST remove any such whitespace from a response message".
#[test]
fn whitespace_before_a_colon_is_no_part_of_a_response() {
    let text =
        "HTTP/1.1 200 OK\r\nServer: a\r\nX-Spaced \t: b\r\nContent-Length : 5\r\nX\t:\r\nVary: c\r\n\r\n";
    let mut parser = ResponseParser::for_proxy(HeadLimits::default());
    for split in 0..text.len() {
        parser.reset(Method::Get);
        assert_eq!(parser.parse(&text.as_bytes()[..split]), Ok(Progress::Incomplete), "at {split}");
        assert_eq!(parser.parse(text.as_bytes()), Ok(Progress::Complete { length: text.len() }));
        let head = parser.head(text.as_bytes());
        assert_eq!(head.framing, BodyFraming::Length(5));
        let fields: Vec<_> = head.fields.iter().collect();
        let expected: [(FieldId, &[u8], &[u8]); 5] = [
            (FieldId::Server, b"Server", b"a"),
            (FieldId::Other, b"X-Spaced", b"b"),
            (FieldId::ContentLength, b"Content-Length", b"5"),
            (FieldId::Other, b"X", b""),
            (FieldId::Vary, b"Vary", b"c"),
        ];
        assert_eq!(fields, expected, "split at {split}");
    }
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding : chunked\r\n\r\n";
    parser.reset(Method::Get);
    assert_eq!(parser.parse(chunked.as_bytes()), Ok(Progress::Complete { length: chunked.len() }));
    assert_eq!(parser.head(chunked.as_bytes()).framing, BodyFraming::Chunked);
}

prop_compose! {
    /// A sound request head as its parts: method, target, and fields that are no framing, with whatever else is
    /// allowed.
    fn request_parts()(
        method in "(GET|POST|PUT|DELETE|HEAD|PATCH|OPTIONS|PURGE|[A-Z]{1,12}|[!#$%&'*+.^_`|~0-9A-Za-z-]{1,6})",
        target in "/[!-~]{0,60}",
        http10 in any::<bool>(),
        mut fields in prop::collection::vec(field(), 0..20),
        host_at in any::<prop::sample::Index>(),
    ) -> (String, String, bool, Vec<(String, Vec<u8>)>) {
        let host_at = host_at.index(fields.len() + 1);
        fields.insert(host_at, ("hOst".to_owned(), b"example.com".to_vec()));
        (method, target, http10, fields)
    }
}

fn field() -> impl Strategy<Value = (String, Vec<u8>)> {
    let known: Vec<&str> = FieldId::KNOWN
        .iter()
        .map(|&(_, name)| name)
        .filter(|name| !matches!(*name, "host" | "content-length" | "transfer-encoding"))
        .collect();
    let name = prop_oneof![
        prop::sample::select(known).prop_map(|name| name.to_owned()),
        prop::sample::select(FieldId::KNOWN).prop_map(|(_, name)| format!("{}-x", name.to_ascii_uppercase())),
        "[!#$%&'*+.^_`|~0-9A-Za-z-]{1,40}",
    ];
    let value =
        prop::collection::vec(prop_oneof![8 => 0x21..=0x7eu8, 1 => 0x80..=0xffu8, 1 => Just(b' ')], 0..80)
            .prop_map(|value| value.trim_ascii().to_vec());
    (name, value).prop_filter("framing has its own tests", |(name, _)| {
        !matches!(name.to_ascii_lowercase().as_str(), "host" | "content-length" | "transfer-encoding")
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read_back_whatever_the_split(
        (method, target, http10, fields) in request_parts(),
        blanks in "[ \t]{0,3}",
        mut splits in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let mut bytes = format!("{method} {target} HTTP/1.{}\r\n", u8::from(!http10)).into_bytes();
        for (name, value) in &fields {
            bytes.extend_from_slice(&[name.as_bytes(), b":", blanks.as_bytes(), value, blanks.as_bytes(), b"\r\n"].concat());
        }
        bytes.extend_from_slice(b"\r\n");
        let mut parser = RequestParser::new(HeadLimits::default());
        splits.sort_by_key(|split| split.index(bytes.len()));
        for split in splits {
            prop_assert_eq!(parser.parse(&bytes[..split.index(bytes.len())]), Ok(Progress::Incomplete));
        }
        prop_assert_eq!(parser.parse(&bytes), Ok(Progress::Complete { length: bytes.len() }));
        let head = parser.head(&bytes);
        prop_assert_eq!(head.method_bytes, method.as_bytes());
        prop_assert_eq!(head.target, target.as_bytes());
        prop_assert_eq!(head.version == Version::Http10, http10);
        prop_assert_eq!(head.fields.len(), fields.len());
        for ((id, name, value), (sent_name, sent_value)) in head.fields.iter().zip(&fields) {
            prop_assert_eq!(name, sent_name.as_bytes());
            prop_assert_eq!(value, &sent_value[..]);
            prop_assert_eq!(id, FieldId::from_name(name));
            prop_assert!(id == FieldId::Other || head.fields.has(id));
        }
    }

    #[test]
    fn arbitrary_bytes_give_the_same_answer_whatever_the_split(
        head in prop::sample::select(CORPUS),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        split in any::<prop::sample::Index>(),
    ) {
        let mut bytes = head.as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let mut whole = RequestParser::new(HeadLimits::default());
        let expected = whole.parse(&bytes);
        let mut parser = RequestParser::new(HeadLimits::default());
        let first = parser.parse(&bytes[..split.index(bytes.len())]);
        let result = if first == Ok(Progress::Incomplete) { parser.parse(&bytes) } else { first };
        prop_assert_eq!(result, expected);
        if matches!(expected, Ok(Progress::Complete { .. })) {
            prop_assert_eq!(describe(&parser.head(&bytes)), describe(&whole.head(&bytes)));
        }
    }
}
