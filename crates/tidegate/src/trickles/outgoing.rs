//! One question to the accelerator: its request, out of what Trickles knows.

use std::net::SocketAddr;

use bytes::Bytes;
use tidegate_http::{HeadLimits, Progress, RequestParser};
use tidegate_trickles::http::Asked;

/// Fields of a request that Trickles answers itself, or that belong to a connection.
const OWN_FIELDS: [&[u8]; 15] = [
    b"host",
    b"range",
    b"if-range",
    b"if-match",
    b"if-none-match",
    b"if-modified-since",
    b"if-unmodified-since",
    b"connection",
    b"keep-alive",
    b"te",
    b"upgrade",
    b"expect",
    b"content-length",
    b"transfer-encoding",
    b"proxy-connection",
];

/// A request as it is asked.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    /// The same for requests with the same answer.
    pub key: Vec<u8>,
    /// Whether asking it twice is the same as once.
    pub repeatable: bool,
    pub peer: SocketAddr,
    pub proved: bool,
    pub host: Vec<u8>,
    pub target: Vec<u8>,
    pub head: Vec<u8>,
    pub body: Bytes,
    /// Whether it says who asks: what is answered may be for nobody else.
    pub has_credentials: bool,
}

impl Outgoing {
    /// A GET stands for HEAD too: Trickles leaves the content away itself.
    pub(super) fn of(asked: &Asked<'_>) -> Self {
        let mut method = b"GET".to_vec();
        let mut fields = Vec::new();
        let mut has_credentials = false;
        let mut parser = RequestParser::new(HeadLimits::default());
        if let Ok(Progress::Complete { .. }) = parser.parse(asked.head) {
            let head = parser.head(asked.head);
            if head.method_bytes != b"HEAD" {
                method = head.method_bytes.to_vec();
            }
            for (_, name, value) in head.fields.iter() {
                if !OWN_FIELDS.iter().any(|own| own.eq_ignore_ascii_case(name)) {
                    has_credentials |= is_credential(name);
                    write_field(name, value, &mut fields);
                }
            }
        }
        if !asked.body.is_empty() || method != b"GET" {
            write_field(b"Content-Length", asked.body.len().to_string().as_bytes(), &mut fields);
        }
        let repeatable = method == b"GET" && asked.body.is_empty();
        let mut head =
            [&method[..], b" ", asked.target, b" HTTP/1.1\r\nHost: ", asked.host, b"\r\n"].concat();
        head.extend_from_slice(&fields);
        let mut key = [&head[..], b"\0", asked.body].concat();
        // What one client is answered is not another's; what may be shared the cache shares.
        key.extend_from_slice(format!("\0{}", asked.peer).as_bytes());
        if !repeatable {
            // The same words of the same client twice are two requests, unless the transport repeats them.
            key.extend_from_slice(format!(" {}", asked.request).as_bytes());
        }
        Self {
            key,
            repeatable,
            host: asked.host.to_vec(),
            target: asked.target.to_vec(),
            head,
            body: Bytes::copy_from_slice(asked.body),
            peer: asked.peer,
            proved: asked.proved,
            has_credentials,
        }
    }

    /// The same without what it says of who asks.
    pub(super) fn of_anybody(mut self) -> Self {
        if self.has_credentials {
            let lines = self.head.split_inclusive(|byte| *byte == b'\n');
            let name = |line: &[u8]| line.split(|byte| *byte == b':').next().unwrap_or_default().to_vec();
            self.head = lines.filter(|line| !is_credential(&name(line))).collect::<Vec<_>>().concat();
            self.has_credentials = false;
        }
        self
    }

    /// The same for a client that has shown that it is there, and has been counted when it asked first.
    pub(super) fn by(&self, peer: SocketAddr) -> Self {
        Self { peer, proved: false, ..self.clone() }
    }

    /// The same for a part of the representation.
    pub(super) fn range(mut self, first: u64, length: u64) -> Self {
        let range = format!("bytes={first}-{}", first + length - 1);
        write_field(b"Range", range.as_bytes(), &mut self.head);
        self
    }
}

/// The head of a request as it is judged, which did not have to be kept whole to be answered.
pub(super) fn head(asked: &Asked<'_>) -> Bytes {
    if !asked.head.is_empty() {
        return Bytes::copy_from_slice(asked.head);
    }
    [&b"GET "[..], asked.target, b" HTTP/1.1\r\nHost: ", asked.host, b"\r\n\r\n"].concat().into()
}

pub(super) fn write_field(name: &[u8], value: &[u8], out: &mut Vec<u8>) {
    for part in [name, b": ", value, b"\r\n"] {
        out.extend_from_slice(part);
    }
}

/// A field of a request that says who asks.
fn is_credential(name: &[u8]) -> bool {
    [&b"cookie"[..], b"authorization"].iter().any(|own| own.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked<'a>(head: &'a [u8], body: &'a [u8]) -> Asked<'a> {
        let peer = ([192, 0, 2, 1], 1).into();
        Asked { peer, proved: false, request: 1, host: b"h", target: b"/x", head, body }
    }

    #[test]
    fn requests_with_the_same_answer_have_the_same_key() {
        let key = |head: &[u8]| Outgoing::of(&asked(head, b"")).key;
        let get = key(b"GET /x HTTP/1.1\r\nHost: h\r\nAccept: */*\r\n\r\n");
        let same = key(b"HEAD /x HTTP/1.1\r\nHost: h\r\nRange: bytes=0-1\r\nAccept: */*\r\n\r\n");
        let other = key(b"GET /x HTTP/1.1\r\nHost: h\r\nAccept: text/html\r\n\r\n");
        assert_eq!(get, same);
        assert_ne!(get, other);
    }

    #[test]
    fn what_one_client_is_answered_is_not_anothers() {
        let head = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n";
        let other = Asked { peer: ([192, 0, 2, 2], 1).into(), ..asked(head, b"") };
        assert_ne!(Outgoing::of(&asked(head, b"")).key, Outgoing::of(&other).key);
    }

    #[test]
    fn what_is_for_all_is_asked_for_again_without_a_word_of_who_asked() {
        let head = b"GET /x HTTP/1.1\r\nHost: h\r\nCookie: a\r\nAccept: */*\r\nAuthorization: b\r\n\r\n";
        let request = Outgoing::of(&asked(head, b""));
        assert!(request.has_credentials);
        assert_eq!(request.of_anybody().head, b"GET /x HTTP/1.1\r\nHost: h\r\nAccept: */*\r\n");
    }

    #[test]
    fn a_post_is_the_same_only_when_the_transport_repeats_it() {
        let head = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n";
        let first = Outgoing::of(&asked(head, b"ab"));
        let next = Outgoing::of(&Asked { request: 2, ..asked(head, b"ab") });
        assert!(!first.repeatable && first.key != next.key);
        assert_eq!(first.key, Outgoing::of(&asked(head, b"ab")).key);
        assert!(first.head.ends_with(b"\r\nContent-Length: 2\r\n"));
    }
}
