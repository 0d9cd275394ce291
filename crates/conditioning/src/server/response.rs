//! Follows what a server writes, to know when its response is complete by its own framing (RFC 9112 §6.3).

use tidegate_http::forward::upgrade_protocols;
use tidegate_http::{
    BodyFraming, ChunkLimits, ChunkedDecoder, FieldId, HeadLimits, Method, Progress, ResponseHead,
    ResponseParser,
};

use crate::plain;

/// Heads of responses are the server's own: generous, but bounded.
const LIMITS: HeadLimits = HeadLimits { request_line_bytes: 64 * 1024, head_bytes: 256 * 1024, fields: 1000 };

/// A `Connection` field is looked for in so many bytes.
pub const HEAD_LOOKED_AT: usize = 8192;

/// Length of the head at the start of `bytes`, if its end is among the first [`HEAD_LOOKED_AT`]. Lines may end in LF alone
/// (RFC 9112 §2.2).
pub fn head_length(bytes: &[u8]) -> Option<usize> {
    let start = &bytes[..bytes.len().min(HEAD_LOOKED_AT)];
    memchr::memchr_iter(b'\n', start).find_map(|at| match start[at + 1..] {
        [b'\n', ..] => Some(at + 2),
        [b'\r', b'\n', ..] => Some(at + 3),
        _ => None,
    })
}

/// How far a response has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Extent {
    /// Nothing, or a part, has been written.
    Unfinished,
    /// It is complete; the flag says whether the server keeps the connection.
    Complete {
        /// RFC 9112 §9.3.
        keep_alive: bool,
    },
    /// What was written cannot be followed: only the server's close tells the end.
    Unknown,
}

/// What a response that changes the protocol changes it to (RFC 9110 §7.8, §9.3.6).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Change {
    /// To one that carries no requests of its own, as far as is known.
    Another,
    /// To another version of HTTP, or to TLS: requests that no filter could see.
    Requests,
}

enum At {
    Head,
    Length(u64),
    Chunked(Box<ChunkedDecoder>),
    Complete,
    /// More than a whole response was written.
    Exceeded,
    Changed(Change),
    Unknown,
}

/// Reads along with one response and any interim responses before it.
pub struct ResponseTracker {
    /// For what is not plain.
    parser: Option<Box<ResponseParser>>,
    method: Method,
    /// The plain head that is about to be written, and where in memory it is.
    announced: Option<(usize, plain::Response)>,
    head: Vec<u8>,
    keep_alive: bool,
    at: At,
    /// Bytes that it was told of.
    bytes: u64,
}

impl ResponseTracker {
    /// Follows the response to a request with `method`.
    pub fn new(method: Method) -> Self {
        Self {
            parser: None,
            method,
            announced: None,
            head: Vec::new(),
            keep_alive: false,
            at: At::Head,
            bytes: 0,
        }
    }

    /// How far it has come.
    pub fn extent(&self) -> Extent {
        match self.at {
            At::Complete => Extent::Complete { keep_alive: self.keep_alive },
            At::Unknown | At::Exceeded | At::Changed(_) => Extent::Unknown,
            _ => Extent::Unfinished,
        }
    }

    /// Whether the server wrote more than a whole response that does not announce its end: the client's connection can
    /// bring no other response, and the server may take what it has not read of the request for another one.
    pub fn is_exceeded(&self) -> bool {
        matches!(self.at, At::Exceeded) && self.keep_alive
    }

    /// Whether the connection is of another protocol from here on.
    pub fn change(&self) -> Option<Change> {
        if let At::Changed(change) = self.at { Some(change) } else { None }
    }

    /// The method of the request.
    pub fn method(&self) -> Method {
        self.method
    }

    /// How many bytes the server wrote, as far as it was told.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How much of its content is to come, if it has a length, and its head has been written.
    pub fn content_left(&self) -> Option<u64> {
        if let At::Length(left) = self.at { Some(left) } else { None }
    }

    /// Whether what comes next says where the response ends: [`Self::wrote_unseen`] could not follow it.
    pub fn comes_to_framing(&self) -> bool {
        matches!(self.at, At::Head | At::Chunked(_))
    }

    /// Whether a head begins with what comes next, be it behind an interim response.
    pub fn comes_to_head(&self) -> bool {
        matches!(self.at, At::Head) && self.head.is_empty()
    }

    /// The server wrote these bytes.
    pub fn wrote(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            bytes = match &mut self.at {
                At::Head => self.head_bytes(bytes),
                At::Length(left) => {
                    let taken = (*left).min(bytes.len() as u64);
                    *left -= taken;
                    if *left == 0 {
                        self.at = At::Complete;
                    }
                    &bytes[taken as usize..]
                }
                At::Chunked(decoder) => match decoder.decode(bytes) {
                    Ok(decoded) => {
                        let rest = &bytes[decoded.consumed..];
                        if decoded.done {
                            self.at = At::Complete;
                        }
                        rest
                    }
                    Err(_) => return self.at = At::Unknown,
                },
                // More than a whole response: our reading of it was wrong, or the server's.
                At::Complete => return self.at = At::Exceeded,
                At::Unknown | At::Exceeded | At::Changed(_) => return,
            };
        }
    }

    /// The server had the kernel copy `length` bytes that nobody here saw: content, as long as framing allows.
    pub fn wrote_unseen(&mut self, length: u64) {
        static ZEROS: [u8; 4096] = [0; 4096];
        self.bytes += length;
        match &mut self.at {
            At::Length(left) if length <= *left => {
                *left -= length;
                if *left == 0 {
                    self.at = At::Complete;
                }
            }
            At::Chunked(decoder) => {
                let mut left = length;
                while left > 0 {
                    let block = &ZEROS[..left.min(ZEROS.len() as u64) as usize];
                    // Zeros are no framing: anything but data among them means that we lost our place.
                    match decoder.decode(block) {
                        Ok(decoded) if decoded.data == (0..block.len()) => left -= block.len() as u64,
                        _ => return self.at = At::Unknown,
                    }
                }
            }
            At::Changed(_) | At::Exceeded => {}
            _ if length == 0 => {}
            At::Complete => self.at = At::Exceeded,
            _ => self.at = At::Unknown,
        }
    }

    /// The head at the start of `bytes` without the announcement that the connection ends after this response, if it is
    /// the response's whole head, its framing says where it ends, and it announces so. The length stays the same.
    pub fn without_close(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        self.announced = None;
        if !self.comes_to_head() {
            return None;
        }
        if let Some(plain) = self.plain(bytes) {
            self.announced = Some((bytes.as_ptr().addr(), plain));
            return None;
        }
        // The parser is asked only about the few that may announce it.
        let start = &bytes[..bytes.len().min(HEAD_LOOKED_AT)];
        let is_1_0 = start.starts_with(b"HTTP/1.0 ");
        if !is_1_0 && memchr::memmem::find(start, b"lose").is_none() {
            return None;
        }
        let (length, keep_alive) = self.framed_head(bytes)?;
        if keep_alive {
            return None;
        }
        let mut patched = bytes[..length].to_vec();
        if is_1_0 {
            // RFC 9110 §6.2: who forwards a message sends a version of its own; the field is what HTTP/1.0 has instead.
            patched[7] = b'1';
        }
        remove_connection_close(&mut patched);
        self.framed_head(&patched).filter(|&found| found == (length, true)).map(|_| patched)
    }

    /// Length of the final response's head at the start of `bytes`, if its content has a known end, and whether the
    /// connection persists.
    fn framed_head(&self, bytes: &[u8]) -> Option<(usize, bool)> {
        let mut parser = ResponseParser::new(LIMITS);
        parser.reset(framed_as(self.method));
        let Ok(Progress::Complete { length }) = parser.parse(bytes) else { return None };
        let head = parser.head(bytes);
        let framed = head.framing != BodyFraming::UntilClose && head.status >= 200;
        framed.then_some((length, head.keep_alive))
    }

    /// The whole head at the start of `bytes`, if it needs no parser.
    fn plain(&self, bytes: &[u8]) -> Option<plain::Response> {
        if matches!(self.method, Method::Head | Method::Connect) { None } else { plain::response(bytes) }
    }

    fn head_bytes<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        let before = self.head.len();
        if before == 0 {
            let announced = self.announced.take().filter(|&(address, plain)| {
                address == bytes.as_ptr().addr() && plain.head_bytes <= bytes.len()
            });
            if let Some(plain) = announced.map(|(_, plain)| plain).or_else(|| self.plain(bytes)) {
                self.keep_alive = true;
                self.at =
                    if plain.content_bytes == 0 { At::Complete } else { At::Length(plain.content_bytes) };
                return &bytes[plain.head_bytes..];
            }
        }
        let method = self.method;
        let parser = self.parser.get_or_insert_with(|| {
            let mut parser = ResponseParser::new(LIMITS);
            parser.reset(framed_as(method));
            Box::new(parser)
        });
        // A head that one write brings is parsed where it lies.
        let progress = if before == 0 {
            parser.parse(bytes)
        } else {
            self.head.extend_from_slice(bytes);
            parser.parse(&self.head)
        };
        let length = match progress {
            Ok(Progress::Complete { length }) => length,
            Ok(Progress::Incomplete) => {
                if before == 0 {
                    self.head.extend_from_slice(bytes);
                }
                return &[];
            }
            Err(_) => {
                self.at = At::Unknown;
                return &[];
            }
        };
        let head = parser.head(if before == 0 { bytes } else { &self.head });
        let (status, framing) = (head.status, head.framing);
        let names_requests =
            head.fields.has(FieldId::Upgrade) && upgrade_protocols(&head.fields).next().is_none();
        let begins_tunnel = method == Method::Connect && begins_tunnel(&head);
        self.keep_alive = head.keep_alive;
        self.head.clear();
        if status == 101 {
            // CONNECT asks for a tunnel, and for no other protocol.
            let carries_requests = names_requests || method == Method::Connect;
            self.at = At::Changed(if carries_requests { Change::Requests } else { Change::Another });
        } else if begins_tunnel {
            self.at = At::Changed(Change::Another);
        } else if (100..200).contains(&status) {
            parser.reset(framed_as(method));
        } else {
            self.at = match framing {
                BodyFraming::None | BodyFraming::Length(0) => At::Complete,
                BodyFraming::Length(length) => At::Length(length),
                BodyFraming::Chunked => At::Chunked(Box::new(ChunkedDecoder::new(ChunkLimits::default()))),
                BodyFraming::UntilClose => At::Unknown,
            };
        }
        &bytes[length - before..]
    }
}

/// The method by which a response is framed. A 2xx to CONNECT may be no tunnel (see [`begins_tunnel`]): then it has
/// content like any.
fn framed_as(method: Method) -> Method {
    if method == Method::Connect { Method::Get } else { method }
}

/// Whether this response to CONNECT begins a tunnel. Servers that are no proxies answer CONNECT as they answer GET, and
/// read the next request afterwards: whatever says where the response ends speaks against a tunnel. Content and its
/// framing have no place in one (RFC 9110 §9.3.6), nor has an end of the connection that is announced. HTTP/1.0 ends it
/// unannounced, and proxies say so.
fn begins_tunnel(head: &ResponseHead<'_>) -> bool {
    let mut options =
        head.fields.get_all(FieldId::Connection).flat_map(|value| value.split(|&byte| byte == b','));
    let ends = options.any(|option| option.trim_ascii().eq_ignore_ascii_case(b"close"));
    let is_framed = head.framing != BodyFraming::UntilClose
        || head.fields.has(FieldId::ContentLength)
        || head.fields.has(FieldId::TransferEncoding);
    (200..300).contains(&head.status) && !is_framed && !ends
}

/// Removes fields that say `Connection: close` and nothing else. What the head loses in length it gets back as white
/// space around a neighbour's value (RFC 9110 §5.6.3), or in the reason phrase if there is no other field.
fn remove_connection_close(head: &mut [u8]) {
    let (mut start, mut end_before) = (0, 0);
    while let Some(length) = head[start..].iter().position(|&byte| byte == b'\n') {
        let next = start + length + 1;
        let end = if length > 0 && head[next - 2] == b'\r' { next - 2 } else { next - 1 };
        if is_connection_close(&head[start..end]) {
            match following_name(&head[next..]) {
                Following::Name(name) => {
                    let both = &mut head[start..next + name];
                    both.rotate_left(next - start);
                    both[name..].fill(b' ');
                    continue;
                }
                Following::Nothing => head[end_before..end].fill(b' '),
                Following::Other => {}
            }
        }
        (start, end_before) = (next, end);
    }
}

fn is_connection_close(line: &[u8]) -> bool {
    let Some(colon) = line.iter().position(|&byte| byte == b':') else { return false };
    let (name, value) = line.split_at(colon);
    name.eq_ignore_ascii_case(b"connection") && value[1..].trim_ascii().eq_ignore_ascii_case(b"close")
}

/// What comes behind a field.
enum Following {
    /// Another field, whose name and colon have so many bytes.
    Name(usize),
    /// The end of the head.
    Nothing,
    /// What still belongs to the field (obs-fold), or is no field.
    Other,
}

fn following_name(rest: &[u8]) -> Following {
    match rest {
        [b'\r' | b'\n', ..] => Following::Nothing,
        [b' ' | b'\t' | b':', ..] => Following::Other,
        _ => match rest.iter().position(|byte| b":\n".contains(byte)) {
            Some(at) if rest[at] == b':' => Following::Name(at + 1),
            _ => Following::Other,
        },
    }
}

impl std::fmt::Debug for ResponseTracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseTracker").field("extent", &self.extent()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEPT: Extent = Extent::Complete { keep_alive: true };

    fn extent(method: Method, response: &[u8]) -> Extent {
        let mut whole = ResponseTracker::new(method);
        whole.wrote(response);
        for split in 0..=response.len() {
            let mut tracker = ResponseTracker::new(method);
            tracker.wrote(&response[..split]);
            tracker.wrote(&response[split..]);
            assert_eq!(tracker.extent(), whole.extent(), "split at {split}");
        }
        whole.extent()
    }

    #[test]
    fn responses_are_complete_by_their_own_framing() {
        let length = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
        assert_eq!(extent(Method::Get, length), KEPT);
        assert_eq!(extent(Method::Get, &length[..length.len() - 1]), Extent::Unfinished);
        assert_eq!(extent(Method::Head, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"), KEPT);
        assert_eq!(extent(Method::Get, b"HTTP/1.1 304 Not Modified\r\n\r\n"), KEPT);
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
        assert_eq!(extent(Method::Get, chunked), KEPT);
        let interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n";
        assert_eq!(extent(Method::Post, interim), KEPT);
        let close = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
        assert_eq!(extent(Method::Get, close), Extent::Complete { keep_alive: false });
    }

    #[test]
    fn responses_that_end_with_the_connection_are_never_complete() {
        assert_eq!(extent(Method::Get, b"HTTP/1.0 200 OK\r\n\r\nhello"), Extent::Unknown);
        assert_eq!(extent(Method::Get, b"HTTP/1.1 101 Switching Protocols\r\n\r\n"), Extent::Unknown);
        assert_eq!(extent(Method::Get, b"not HTTP\r\n"), Extent::Unknown);
        let beyond = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab";
        assert_eq!(extent(Method::Get, beyond), Extent::Unknown);
    }

    /// Such as an empty line behind it, or the content of a response to HEAD.
    #[test]
    fn more_than_a_whole_response_is_known_for_that() {
        let exceeded = |method, response: &[u8]| {
            let mut tracker = ResponseTracker::new(method);
            response.iter().for_each(|byte| tracker.wrote(&[*byte]));
            let mut whole = ResponseTracker::new(method);
            whole.wrote(response);
            assert_eq!(tracker.is_exceeded(), whole.is_exceeded());
            whole.is_exceeded()
        };
        let (length, close) = ("Content-Length: 2", "Connection: close");
        let whole = format!("HTTP/1.1 200 OK\r\n{length}\r\n\r\nok");
        assert!(!exceeded(Method::Get, whole.as_bytes()));
        assert!(exceeded(Method::Head, whole.as_bytes()));
        assert!(exceeded(Method::Get, format!("{whole}\r\n").as_bytes()));
        let announced = format!("HTTP/1.1 200 OK\r\n{close}\r\n{length}\r\n\r\nok\r\n");
        assert!(!exceeded(Method::Get, announced.as_bytes()));
        let mut tracker = ResponseTracker::new(Method::Get);
        tracker.wrote(whole.as_bytes());
        tracker.wrote_unseen(1);
        assert!(tracker.is_exceeded());
    }

    #[test]
    fn a_response_may_change_the_protocol() {
        let changes = |method, response: &[u8]| {
            let mut tracker = ResponseTracker::new(method);
            tracker.wrote(response);
            tracker.wrote(b"another protocol");
            tracker.change()
        };
        let (upgrade, tunnel) = (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n");
        let another = Some(Change::Another);
        assert_eq!((changes(Method::Get, upgrade), changes(Method::Connect, tunnel)), (another, another));
        assert_eq!(changes(Method::Get, tunnel), None);
        assert_eq!(changes(Method::Connect, b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"), None);
        let interim = [&b"HTTP/1.1 100 Continue\r\n\r\n"[..], upgrade].concat();
        assert_eq!(changes(Method::Get, &interim), another);
        let to = |protocol: &str| {
            let head =
                format!("HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: {protocol}\r\n\r\n");
            changes(Method::Get, head.as_bytes())
        };
        assert_eq!(
            (to("websocket"), to("h2c"), to("TLS/1.0")),
            (another, Some(Change::Requests), Some(Change::Requests))
        );
    }

    /// Filters saw none of the requests behind it: servers that are no proxies answer CONNECT as they answer GET.
    #[test]
    fn an_ordinary_response_to_connect_begins_no_tunnel() {
        let answered = |response: &str| {
            let mut tracker = ResponseTracker::new(Method::Connect);
            tracker.wrote(response.as_bytes());
            (tracker.change(), extent(Method::Connect, response.as_bytes()))
        };
        for whole in [
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
            "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
            "HTTP/1.1 204 No Content\r\n\r\n",
        ] {
            assert_eq!(answered(whole), (None, KEPT), "{whole}");
        }
        for until_the_end in [
            "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nhello",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        ] {
            assert_eq!(answered(until_the_end), (None, Extent::Unknown), "{until_the_end}");
        }
        for tunnel in [
            "HTTP/1.1 200 Connection established\r\n\r\n",
            "HTTP/1.0 200 Connection established\r\nProxy-Agent: a\r\n\r\n",
            "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n\r\n",
        ] {
            assert_eq!(answered(tunnel).0, Some(Change::Another), "{tunnel}");
        }
        // It asked for no other protocol.
        assert_eq!(answered("HTTP/1.1 101 Switching Protocols\r\n\r\n").0, Some(Change::Requests));
    }

    #[test]
    fn a_server_that_closes_after_each_response_does_so_locally() {
        let patched = |response: &str| {
            let mut tracker = ResponseTracker::new(Method::Get);
            tracker.without_close(response.as_bytes()).map(|bytes| String::from_utf8(bytes).unwrap())
        };
        for (before, after) in [
            // RFC 9110 §5.6.3: white space may take the place of what is filtered out.
            (
                "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\na",
                "HTTP/1.1 200 OK\r\nContent-Length:                    1\r\n\r\na",
            ),
            (
                "HTTP/1.0 200 OK\r\nContent-Length: 1\r\nconnection:Close \r\n\r\n",
                "HTTP/1.1 200 OK\r\nContent-Length: 1                   \r\n\r\n",
            ),
            (
                "HTTP/1.1 200 OK\r\nA: b\r\nConnection: close\r\nCONNECTION:\tclose\r\nContent-Length:1\r\n\r\n",
                "HTTP/1.1 200 OK\r\nA: b\r\nContent-Length:                                      1\r\n\r\n",
            ),
            (
                "HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n",
                "HTTP/1.1 204 No Content                   \r\n\r\n",
            ),
        ] {
            let patched = patched(before).unwrap();
            assert_eq!(patched, after.trim_end_matches('a'));
            assert_eq!(before.len(), after.len());
        }
        for untouched in [
            "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end",
            "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n",
            "HTTP/1.1 200 OK\r\nX: close\r\nContent-Length: 1\r\n\r\n",
            "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nX: close\r\n\r\n",
            "HTTP/1.0 200 OK\r\n\r\nuntil the end",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n folded\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close, x\r\n\r\n",
            // The head goes out as it is, and a client need not take these for what they are meant to be.
            "HTTP/1.1 200 OK\r\nContent-Length : 1\r\nA: b\r\nConnection: close\r\n\r\na",
            "HTTP/1.0 200 OK\r\nContent-Length : 1\r\n\r\na",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding : chunked\r\nA: b\r\nConnection: close\r\n\r\n",
        ] {
            assert_eq!(patched(untouched), None, "{untouched}");
        }
    }

    #[test]
    fn a_heads_length_is_known_once_its_end_is_there() {
        for (head, length) in [
            ("HTTP/1.1 200 OK\r\nA: b\r\n\r\n\r\n", Some(25)),
            ("HTTP/1.1 200 OK\nA: b\n\n", Some(22)),
            ("HTTP/1.1 200 OK\r\n\n", Some(18)),
            ("HTTP/1.1 200 OK\r\nA: b\r\n\r", None),
            ("", None),
        ] {
            assert_eq!(head_length(head.as_bytes()), length, "{head:?}");
        }
        let long = |bytes: usize| format!("{}\r\n\r\n", "a".repeat(bytes - 4));
        assert_eq!(head_length(long(HEAD_LOOKED_AT).as_bytes()), Some(HEAD_LOOKED_AT));
        assert_eq!(head_length(long(HEAD_LOOKED_AT + 1).as_bytes()), None);
    }

    #[test]
    fn content_that_the_kernel_copied_counts() {
        let mut tracker = ResponseTracker::new(Method::Get);
        tracker.wrote(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n");
        tracker.wrote_unseen(99_999);
        assert_eq!(tracker.extent(), Extent::Unfinished);
        tracker.wrote_unseen(1);
        assert_eq!(tracker.extent(), KEPT);
        let mut tracker = ResponseTracker::new(Method::Get);
        tracker.wrote(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2710\r\n");
        tracker.wrote_unseen(10_000);
        tracker.wrote(b"\r\n0\r\n\r\n");
        assert_eq!(tracker.extent(), KEPT);
        let mut tracker = ResponseTracker::new(Method::Get);
        tracker.wrote_unseen(1);
        assert_eq!(tracker.extent(), Extent::Unknown);
    }
}
