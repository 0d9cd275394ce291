//! Where plain messages end, at a fraction of what the parsers take: those whose framing (RFC 9112 §6) is said once, by
//! a Content-Length or by nothing. Everything else has no answer here, and the parsers are asked. An answer is never
//! another than theirs; but what is malformed beside the framing may have one.

use crate::keeper::whole::Whole;
use crate::wire::flags;

/// Fields of a head that is plain: what the parsers allow a request.
const MOST_FIELDS: usize = 100;

/// The head of a final response that keeps its connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Response {
    /// Length of the head in bytes.
    pub head_bytes: usize,
    /// Length of the content in bytes.
    pub content_bytes: u64,
}

/// The response at the start of `bytes`, to a request that was no HEAD.
pub fn response(bytes: &[u8]) -> Option<Response> {
    let status = bytes.strip_prefix(b"HTTP/1.1 ")?.get(..4)?;
    // Interim responses and those without content whatever they say of it (RFC 9110 §6.4.1) are not plain.
    if !matches!(status, [b'2'..=b'5', b'0'..=b'9', b'0'..=b'9', b' '])
        || matches!(&status[..3], b"204" | b"205" | b"304")
    {
        return None;
    }
    let mut length = None;
    let head_bytes = fields(bytes, |line| {
        match line[0] | 0x20 {
            b'c' => match value(line, b"Content-Length") {
                Some(value) => length.replace(number(value)?).is_none().then_some(())?,
                None => harmless_c(line)?,
            },
            b't' | b'u' => return None,
            _ => {}
        }
        Some(())
    })?;
    Some(Response { head_bytes, content_bytes: length? })
}

/// The request at the start of `bytes`: GET or HEAD without content, of a client that keeps its connection.
pub fn request(bytes: &[u8]) -> Option<Whole> {
    let line = &bytes[..memchr::memchr2(b'\r', b'\n', bytes)?];
    let (method, target) = match line {
        [b'G', b'E', b'T', b' ', target @ ..] => (0, target),
        [b'H', b'E', b'A', b'D', b' ', target @ ..] => (flags::HEAD_METHOD, target),
        _ => return None,
    };
    let target = target.strip_suffix(b" HTTP/1.1")?;
    if target.first() != Some(&b'/') || memchr::memchr(b' ', target).is_some() {
        return None;
    }
    let mut hosts = 0;
    let head_bytes = fields(bytes, |line| {
        let is_harmless = match line[0] | 0x20 {
            b'c' => value(line, b"Cookie").is_some() || harmless_c(line).is_some(),
            b'u' => {
                value(line, b"User-Agent").is_some() || value(line, b"Upgrade-Insecure-Requests").is_some()
            }
            b'h' => {
                hosts += usize::from(value(line, b"Host").is_some());
                true
            }
            // Transfer-Encoding, TE, Trailer; Expect.
            b't' | b'e' => false,
            _ => true,
        };
        is_harmless.then_some(())
    })?;
    (hosts == 1).then_some(Whole {
        head_bytes: head_bytes as u32,
        socket_bytes: head_bytes as u64,
        flags: flags::PERSISTENT | method,
    })
}

/// Whether a field whose name begins with c says nothing of where a message or its connection ends.
fn harmless_c(line: &[u8]) -> Option<()> {
    let says_to_keep =
        || value(line, b"Connection").is_some_and(|value| value.eq_ignore_ascii_case(b"keep-alive"));
    let is_harmless =
        value(line, b"Cache-Control").is_some() || value(line, b"Content-Type").is_some() || says_to_keep();
    is_harmless.then_some(())
}

/// The value of a field line whose name is `name` in some case; in that of `name` it is found sooner.
fn value<'l, const N: usize>(line: &'l [u8], name: &[u8; N]) -> Option<&'l [u8]> {
    let (start, rest) = line.split_first_chunk()?;
    let is_it = rest.first() == Some(&b':') && (start == name || start.eq_ignore_ascii_case(name));
    is_it.then(|| rest[1..].trim_ascii())
}

fn number(digits: &[u8]) -> Option<u64> {
    // So many digits have room.
    if digits.is_empty() || digits.len() > 18 {
        return None;
    }
    digits
        .iter()
        .try_fold(0, |number, digit| digit.is_ascii_digit().then(|| number * 10 + u64::from(digit - b'0')))
}

/// Gives each line after the first to `field`, up to the empty one; where the head ends. None of them is empty or
/// starts with anything but a letter, and all end in CRLF and have no other CR or LF.
fn fields(bytes: &[u8], mut field: impl FnMut(&[u8]) -> Option<()>) -> Option<usize> {
    let mut at = 0;
    for number in 0..=MOST_FIELDS + 1 {
        let rest = &bytes[at..];
        let end = memchr::memchr2(b'\r', b'\n', rest)?;
        if !rest[end..].starts_with(b"\r\n") {
            return None;
        }
        at += end + 2;
        match &rest[..end] {
            [] => return Some(at),
            _ if number == 0 => {}
            line if line[0].is_ascii_alphabetic() => field(line)?,
            _ => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_http::{BodyFraming, HeadLimits, Method, Progress, ResponseParser};

    use super::*;
    use crate::keeper::whole::{Progression, Reader};

    fn parsed_response(bytes: &[u8]) -> Option<Response> {
        let mut parser = ResponseParser::new(HeadLimits::default());
        parser.reset(Method::Get);
        let Ok(Progress::Complete { length }) = parser.parse(bytes) else { return None };
        let head = parser.head(bytes);
        match head.framing {
            BodyFraming::Length(content_bytes) if head.keep_alive => {
                Some(Response { head_bytes: length, content_bytes })
            }
            _ => None,
        }
    }

    #[test]
    fn what_servers_and_browsers_say_is_plain() {
        let nginx = b"HTTP/1.1 200 OK\r\nServer: nginx\r\nDate: Mon, 23 Nov 2026 18:00:00 GMT\r\nContent-Type: text/html\r\n\
                      Content-Length: 612\r\nLast-Modified: Mon, 23 Nov 2026 18:00:00 GMT\r\nConnection: keep-alive\r\n\
                      ETag: \"a-1\"\r\nAccept-Ranges: bytes\r\n\r\ncontent";
        assert_eq!(response(nginx), Some(Response { head_bytes: nginx.len() - 7, content_bytes: 612 }));
        let browser = b"GET /a?b=c HTTP/1.1\r\nHost: a\r\nUser-Agent: b\r\nAccept: */*\r\nAccept-Encoding: gzip, br\r\n\
                        Connection: keep-alive\r\nCookie: a=b\r\nUpgrade-Insecure-Requests: 1\r\n\
                        Cache-Control: no-cache\r\n\r\n";
        let whole = request(browser).unwrap();
        assert_eq!((whole.head_bytes as usize, whole.flags), (browser.len(), flags::PERSISTENT));
        let head = request(b"HEAD / HTTP/1.1\r\nhost: a\r\n\r\nGET").unwrap();
        assert_eq!((head.socket_bytes, head.flags), (28, flags::PERSISTENT | flags::HEAD_METHOD));
    }

    #[test]
    fn what_needs_a_parser_is_not_plain() {
        for (first, fields) in [
            ("HTTP/1.1 200 OK", "Content-Length: 1\r\nContent-Length: 1"),
            ("HTTP/1.1 200 OK", "Content-Length : 1"),
            ("HTTP/1.1 200 OK", "Content-Length: +1"),
            ("HTTP/1.1 200 OK", "Content-Length: 1, 1"),
            ("HTTP/1.1 200 OK", "Content-Length: 1234567890123456789"),
            ("HTTP/1.1 200 OK", "Content-Length:"),
            ("HTTP/1.1 200 OK", "Content-Length: 1\r\nTransfer-Encoding: chunked"),
            ("HTTP/1.1 200 OK", "Content-Length: 1\r\nTransfer-Encoding : chunked"),
            ("HTTP/1.1 200 OK", "Content-Length: 1\r\nConnection: close"),
            ("HTTP/1.1 200 OK", "Content-Length: 1\r\nConnection: keep-alive, close"),
            ("HTTP/1.1 200 OK", "Content-Length: 1\r\n folded: x"),
            ("HTTP/1.1 200 OK", "Content-Length: 1\r\nA: b\rContent-Length: 2"),
            ("HTTP/1.1 200 OK", "Content-Length: 1\nA: b"),
            ("HTTP/1.1 200 OK", "Server: a"),
            ("HTTP/1.0 200 OK", "Content-Length: 1"),
            ("HTTP/1.1 204 No Content", "Content-Length: 1"),
            ("HTTP/1.1 304 Not Modified", "Content-Length: 1"),
            ("HTTP/1.1 101 Switching Protocols", "Content-Length: 1"),
            ("HTTP/1.1 2000 OK", "Content-Length: 1"),
        ] {
            assert_eq!(response(format!("{first}\r\n{fields}\r\n\r\n").as_bytes()), None, "{first} {fields}");
        }
        assert_eq!(response(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n"), None);
        for (first, fields) in [
            ("GET / HTTP/1.1", "Host: a\r\nContent-Length: 1"),
            ("GET / HTTP/1.1", "Host: a\r\ncontent-length : 1"),
            ("GET / HTTP/1.1", "Host: a\r\nTransfer-Encoding: chunked"),
            ("GET / HTTP/1.1", "Host: a\r\nExpect: 100-continue"),
            ("GET / HTTP/1.1", "Host: a\r\nUpgrade: websocket\r\nConnection: upgrade"),
            ("GET / HTTP/1.1", "Host: a\r\nConnection: close"),
            ("GET / HTTP/1.1", "Host: a\r\nHost: b"),
            ("GET / HTTP/1.1", "Host: a\r\n Content-Length: 1"),
            ("GET / HTTP/1.1", "Host: a\r\n\tContent-Length: 1"),
            ("GET / HTTP/1.1", "Host: a\r\n:b"),
            ("GET / HTTP/1.1", "Host: a\nContent-Length: 1"),
            ("GET / HTTP/1.1", "A: b"),
            ("GET / HTTP/1.0", "Host: a"),
            ("GET  / HTTP/1.1", "Host: a"),
            ("GET /a b HTTP/1.1", "Host: a"),
            ("GET http://a/ HTTP/1.1", "Host: a"),
            ("POST / HTTP/1.1", "Host: a"),
            ("OPTIONS * HTTP/1.1", "Host: a"),
        ] {
            assert_eq!(request(format!("{first}\r\n{fields}\r\n\r\n").as_bytes()), None, "{first} {fields}");
        }
        assert_eq!(request(b"GET / HTTP/1.1\r\nHost: a\r\n"), None);
        assert_eq!(request(b""), None);
        let many = format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "A: b\r\n".repeat(MOST_FIELDS));
        assert_eq!(request(many.as_bytes()), None);
    }

    /// Pieces of heads, those that bear on framing more often than by chance.
    fn head(first: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
        let names = [
            "Content-Length",
            "content-length",
            "Content-Length ",
            " Content-Length",
            "Transfer-Encoding",
            "Connection",
            "Connection",
            "Upgrade",
            "User-Agent",
            "Upgrade-Insecure-Requests",
            "Expect",
            "Host",
            "Cookie",
            "TE",
            "Date",
            "Cache-Control",
            "Content-Type",
            "Content",
            "C",
            "",
            "X-A",
            "\u{0}",
            "ContentLength",
            "Content-Length:",
        ];
        let values = [
            "5",
            "05",
            "+5",
            "5 ",
            "5,5",
            "",
            "chunked",
            "close",
            "keep-alive",
            "Keep-Alive",
            "keep-alive, close",
            "a",
            "upgrade",
            "websocket",
            "100-continue",
            "99999999999999999999",
            "\t5",
            "a\rb",
            "a: b",
            "\u{0}",
        ];
        let ends = ["\r\n", "\r\n", "\r\n", "\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r", "\r\n ", "\r\n\r\n"];
        let field = (
            prop::sample::select(names.to_vec()),
            prop::sample::select(values.to_vec()),
            prop::sample::select(ends.to_vec()),
        )
            .prop_map(|(name, value, end)| format!("{name}: {value}{end}"));
        (prop::sample::select(first), prop::collection::vec(field, 0..8), prop::option::of("\\PC{0,20}"))
            .prop_map(|(first, fields, rest)| {
                format!("{first}\r\n{}\r\n{}", fields.concat(), rest.unwrap_or_default()).into_bytes()
            })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn a_plain_response_is_what_the_parser_says(
            bytes in head(&["HTTP/1.1 200 OK", "HTTP/1.1 404 ", "HTTP/1.1 204 a", "HTTP/1.1 100 a", "HTTP/1.0 200 OK", "HTTP/1.1 200"])
        ) {
            let mut parser = ResponseParser::new(HeadLimits::default());
            parser.reset(Method::Get);
            if let (Some(plain), Ok(_)) = (response(&bytes), parser.parse(&bytes)) {
                prop_assert_eq!(Some(plain), parsed_response(&bytes));
            }
        }

        #[test]
        fn a_plain_request_is_what_the_parser_says(
            bytes in head(&["GET / HTTP/1.1", "HEAD /a HTTP/1.1", "POST / HTTP/1.1", "GET / HTTP/1.0", "GET /  HTTP/1.1", "GET * HTTP/1.1"])
        ) {
            if let (Some(plain), Ok(parsed)) = (request(&bytes), Reader::new(4096).judge(&bytes)) {
                prop_assert_eq!(Progression::Whole(plain), parsed);
            }
        }
    }
}
