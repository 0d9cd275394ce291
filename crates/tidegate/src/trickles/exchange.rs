//! One question to the accelerator: a request head out of what Trickles knows, and the response as blocks.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use tidegate_accelerator::Inside;
use tidegate_dhttp::driver::Body;
use tidegate_http::{
    BodyFraming, ChunkLimits, ChunkedDecoder, FieldId, Fields, HeadLimits, Progress, RequestParser,
    ResponseParser, date,
};
use tidegate_trickles::http::{Asked, Missing, Resource};
use xxhash_rust::xxh3::xxh3_64;

use super::inner::BLOCK_BYTES;

/// Longest response without a validator, or without a length: it has to be kept as a whole.
const MAX_WHOLE_BYTES: u64 = 8 << 20;
/// Blocks that are kept of a response on its way into the cache.
const KEPT_AHEAD: u64 = 4;
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
/// Fields of a response that Trickles writes itself, that belong to a connection, or that differ between replicas.
const VOLATILE_FIELDS: [&[u8]; 15] = [
    b"date",
    b"content-length",
    b"content-range",
    b"etag",
    b"last-modified",
    b"accept-ranges",
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
    b"trailer",
    b"upgrade",
    b"age",
    b"cache-status",
    b"via",
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
    host: Vec<u8>,
    target: Vec<u8>,
    head: Vec<u8>,
    body: Bytes,
    /// Whether it says who asks: what is answered may be for nobody else.
    has_credentials: bool,
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

fn write_field(name: &[u8], value: &[u8], out: &mut Vec<u8>) {
    for part in [name, b": ", value, b"\r\n"] {
        out.extend_from_slice(part);
    }
}

/// A field of a request that says who asks.
fn is_credential(name: &[u8]) -> bool {
    [&b"cookie"[..], b"authorization"].iter().any(|own| own.eq_ignore_ascii_case(name))
}

/// A response whose content is being taken.
pub(super) struct Begun {
    /// What the response is of; its length is right once it is known.
    pub resource: Resource,
    /// The versions that it may have been begun with: for all, and for this client alone.
    versions: [u64; 2],
    pinned: bool,
    /// Whether it is the representation, not a part of it.
    whole: bool,
    /// Whether the rest comes into the cache only if it is taken: it is not there already, and will be stored.
    fills: bool,
    content: Content,
    /// Where in the representation the next content byte belongs.
    at: u64,
    block: BytesMut,
    failed: bool,
}

/// Content without its transfer coding.
struct Content {
    body: Body,
    /// As received, not decoded yet.
    wire: BytesMut,
    plain: BytesMut,
    coding: Coding,
}

enum Coding {
    Length(u64),
    Chunked(Box<ChunkedDecoder>),
}

/// Sends the request and reads the response's head.
pub(super) async fn begin(inside: &Inside, local: SocketAddr, request: Outgoing) -> Result<Begun, Missing> {
    let mut head = request.head;
    head.extend_from_slice(b"\r\n");
    let resource_name = [&request.host[..], b"\0", &request.target].concat();
    let (peer, has_credentials, repeatable) =
        (request.peer.to_string(), request.has_credentials, request.repeatable);
    let asked_with = xxh3_64(&head);
    let body = inside.ask(head.into(), request.body, (request.peer, request.proved), local).await;
    let mut body = body.map_err(|_| Missing::Unavailable)?;
    let mut buffer = BytesMut::new();
    let mut parser = ResponseParser::new(HeadLimits::default());
    let head_bytes = loop {
        match parser.parse(&buffer) {
            Ok(Progress::Complete { length }) => break length,
            Ok(Progress::Incomplete) => {}
            Err(_) => return Err(Missing::Unavailable),
        }
        match body.next().await {
            Some(Ok(piece)) => buffer.extend_from_slice(&piece),
            _ => return Err(Missing::Unavailable),
        }
    };
    let bytes = buffer.split_to(head_bytes);
    let head = parser.head(&bytes);
    let (mut fields, mut cookies) = (Vec::new(), Vec::new());
    let mut fills = false;
    for (_, name, value) in head.fields.iter() {
        if name.eq_ignore_ascii_case(b"set-cookie") {
            write_field(name, value, &mut cookies);
        }
        fills |= name.eq_ignore_ascii_case(b"cache-status") && is_stored(value);
        if !VOLATILE_FIELDS.iter().any(|own| own.eq_ignore_ascii_case(name)) {
            write_field(name, value, &mut fields);
        }
    }
    let text = |id| head.fields.get(id).unwrap_or_default();
    let etag = text(FieldId::Etag).to_vec();
    let part = content_range(text(FieldId::ContentRange)).filter(|_| head.status == 206);
    let coding = match head.framing {
        BodyFraming::None => Coding::Length(0),
        BodyFraming::Length(length) => Coding::Length(length),
        BodyFraming::Chunked => Coding::Chunked(Box::new(ChunkedDecoder::new(ChunkLimits::default()))),
        // The accelerator frames what it sends on.
        BodyFraming::UntilClose => return Err(Missing::Unavailable),
    };
    let length = match (&coding, part) {
        (_, Some((_, total))) => Some(total),
        (Coding::Length(length), None) => Some(*length),
        (Coding::Chunked(_), None) => None,
    };
    let modified = text(FieldId::LastModified);
    let varies = head.fields.get(FieldId::Vary).is_some();
    let validator = match etag.starts_with(b"\"") {
        true => etag.clone(),
        false if !is_strong(modified, text(FieldId::Date)) => Vec::new(),
        // One time for all of its variants: which one it is follows from the request.
        false if varies => [modified, b"\0", &asked_with.to_be_bytes()].concat(),
        false => modified.to_vec(),
    };
    let pinned = repeatable && matches!(head.status, 200 | 206) && !validator.is_empty() && length.is_some();
    let versions = match length.filter(|_| pinned) {
        Some(length) => {
            let parts =
                [&resource_name[..], b"\0", &validator, b"\0", &length.to_be_bytes(), &cookies].concat();
            [xxh3_64(&parts), xxh3_64(&[&parts[..], b"\0", peer.as_bytes()].concat())]
        }
        None => [unique()?; 2],
    };
    let version = versions[usize::from(!is_for_all(&head.fields, has_credentials))];
    let resource = Resource {
        status: if part.is_some() { 200 } else { head.status },
        length: length.unwrap_or(0),
        version,
        modified_s: date::parse(modified),
        etag,
        fields,
    };
    let at = part.map_or(0, |(first, _)| first);
    let content = Content { body, wire: buffer, plain: BytesMut::new(), coding };
    let whole = part.is_none();
    let block = BytesMut::new();
    Ok(Begun { resource, versions, pinned, whole, fills, content, at, block, failed: false })
}

/// Whether two answers to one request with this Last-Modified are the same bytes: RFC 9110 §8.8.2.2, the time is over
/// in which it may have been modified once more.
fn is_strong(modified: &[u8], date: &[u8]) -> bool {
    matches!((date::parse(modified), date::parse(date)), (Some(modified), Some(date)) if modified < date)
}

/// Whether a response may be another client's too. Tags are compared within one client's answers only, unless the
/// origin says that they are for all, or does not know who asks.
fn is_for_all(fields: &Fields<'_>, has_credentials: bool) -> bool {
    let names = |id, wanted: &[&[u8]]| {
        let mut members = fields.get_all(id).flat_map(|value| value.split(|byte| *byte == b','));
        members.any(|member| {
            let name = member.split(|byte| *byte == b'=').next().unwrap_or_default().trim_ascii();
            wanted.iter().any(|wanted| wanted.eq_ignore_ascii_case(name))
        })
    };
    let is_one_clients = fields.get(FieldId::SetCookie).is_some()
        || names(FieldId::CacheControl, &[b"private", b"no-store"])
        || names(FieldId::Vary, &[b"cookie", b"authorization", b"*"]);
    !is_one_clients && (!has_credentials || names(FieldId::CacheControl, &[b"public", b"s-maxage"]))
}

/// RFC 9211 §2.5: the response is being stored.
fn is_stored(value: &[u8]) -> bool {
    value.split(|byte| *byte == b';').any(|part| part.trim_ascii() == b"stored")
}

/// First byte and complete length of `bytes first-last/length`.
fn content_range(value: &[u8]) -> Option<(u64, u64)> {
    let (range, total) = std::str::from_utf8(value).ok()?.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()?))
}

fn unique() -> Result<u64, Missing> {
    let block = tidegate_trickles::udp::random_block().map_err(|_| Missing::Unavailable)?;
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&block[..8]);
    Ok(u64::from_be_bytes(bytes))
}

impl Begun {
    /// Whether others may be answered with it.
    pub(super) fn is_for_all(&self) -> bool {
        self.resource.version == self.versions[0]
    }

    /// Whether it is what a response with this version was begun with. One that was for a client alone may look as if
    /// it were for all where it is asked for without that client's cookies.
    pub(super) fn goes_on_with(&mut self, version: u64) -> bool {
        let goes_on = self.pinned && self.versions.contains(&version);
        if goes_on {
            self.resource.version = version;
        }
        goes_on
    }

    /// Whether the response can be asked for again in parts.
    pub(super) fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// Whether more follows than was asked for: all of the representation.
    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    /// Whether the rest comes into the cache, if it is taken.
    pub(super) fn fills(&self) -> bool {
        self.fills
    }

    /// Whether all has been read.
    pub(super) fn is_at_end(&self) -> bool {
        self.failed || (self.pinned && self.at >= self.resource.length)
    }

    /// The block that comes next.
    pub(super) fn next_index(&self) -> u64 {
        self.at / BLOCK_BYTES
    }

    /// The resource, if all that must be kept of it has been read.
    pub(super) fn complete(&mut self) -> Option<Resource> {
        if !self.pinned {
            self.resource.length = self.at;
        }
        (!self.failed).then(|| self.resource.clone())
    }

    /// The next block and its number; `None` at the end, or where the response is not to be had whole.
    pub(super) async fn next_block(&mut self) -> Option<(u64, Bytes)> {
        loop {
            let index = self.at / BLOCK_BYTES;
            let room = (BLOCK_BYTES - self.at % BLOCK_BYTES) as usize;
            match self.content.next(room).await {
                Ok(Some(piece)) => {
                    self.at += piece.len() as u64;
                    self.block.extend_from_slice(&piece);
                    if !self.pinned && self.at > MAX_WHOLE_BYTES {
                        self.failed = true;
                        return None;
                    }
                    if piece.len() == room {
                        return self.take_block(index);
                    }
                }
                Ok(None) if self.block.is_empty() => return None,
                Ok(None) => return self.take_block(index),
                Err(()) => {
                    self.failed = true;
                    return None;
                }
            }
        }
    }

    /// What was read of a block. A part may begin later or end earlier than it was asked for (RFC 9110 §15.3.7): that
    /// is none.
    fn take_block(&mut self, index: u64) -> Option<(u64, Bytes)> {
        let block = self.block.split().freeze();
        let whole = self.resource.length.saturating_sub(index * BLOCK_BYTES).min(BLOCK_BYTES);
        self.failed |= self.pinned && block.len() as u64 != whole;
        (!self.failed).then_some((index, block))
    }

    /// Whether the answer to a question for a part says that what was there is gone, not that this client may not have
    /// it now.
    pub(super) fn tells_of_another(&self) -> bool {
        matches!(self.resource.status, 200 | 206 | 404 | 410 | 416)
    }

    /// Passes over content before `offset`, which a whole response has and a part has not.
    pub(super) async fn skip_to(&mut self, offset: u64) {
        while self.at < offset {
            let room = usize::try_from(offset - self.at).unwrap_or(usize::MAX);
            match self.content.next(room).await {
                Ok(Some(piece)) => self.at += piece.len() as u64,
                _ => return,
            }
        }
    }

    /// Takes the rest; `keep` gets the first blocks.
    pub(super) async fn drain(&mut self, keep: impl Fn(u64, Bytes)) {
        while let Some((index, block)) = self.next_block().await {
            if index < KEPT_AHEAD {
                keep(index, block);
            }
        }
    }
}

impl Content {
    /// At most `room` bytes; `None` at the end.
    async fn next(&mut self, room: usize) -> Result<Option<Bytes>, ()> {
        loop {
            if !self.plain.is_empty() {
                let take = self.plain.len().min(room);
                return Ok(Some(self.plain.split_to(take).freeze()));
            }
            match &mut self.coding {
                Coding::Length(0) => return Ok(None),
                Coding::Chunked(decoder) if decoder.is_done() => return Ok(None),
                _ => {}
            }
            if self.wire.is_empty() {
                match self.body.next().await {
                    Some(Ok(piece)) => self.wire.extend_from_slice(&piece),
                    _ => return Err(()),
                }
            }
            self.decode()?;
        }
    }

    /// Moves what has arrived to where it can be taken from.
    fn decode(&mut self) -> Result<(), ()> {
        match &mut self.coding {
            Coding::Length(left) => {
                let take = self.wire.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= take as u64;
                self.plain = self.wire.split_to(take);
                self.wire.clear();
            }
            Coding::Chunked(decoder) => {
                while !self.wire.is_empty() && !decoder.is_done() {
                    let decoded = decoder.decode(&self.wire).map_err(|_| ())?;
                    self.plain.extend_from_slice(&self.wire[decoded.data]);
                    let _ = self.wire.split_to(decoded.consumed);
                }
            }
        }
        Ok(())
    }
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

    /// Whether a response with these fields is for all, to a request without and with credentials.
    fn for_all(fields: &str) -> [bool; 2] {
        let bytes = format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 0\r\n\r\n");
        let mut parser = ResponseParser::new(HeadLimits::default());
        parser.parse(bytes.as_bytes()).unwrap();
        let head = parser.head(bytes.as_bytes());
        [false, true].map(|has_credentials| is_for_all(&head.fields, has_credentials))
    }

    #[test]
    fn a_response_is_for_all_unless_somebody_is_known_to_ask_or_to_be_answered() {
        assert_eq!(for_all(""), [true, false]);
        assert_eq!(for_all("Cache-Control: max-age=60, Public\r\n"), [true, true]);
        assert_eq!(for_all("Cache-Control: s-maxage=60\r\nVary: Accept\r\n"), [true, true]);
        for one in [
            "Set-Cookie: a=b\r\n",
            "Cache-Control: max-age=60, private\r\n",
            "Cache-Control: public\r\nCache-Control: no-store\r\n",
            "Cache-Control: private=\"x\"\r\n",
            "Cache-Control: public\r\nVary: Accept, Cookie\r\n",
            "Vary: *\r\n",
        ] {
            assert_eq!(for_all(one), [false, false], "{one}");
        }
    }

    #[test]
    fn a_time_of_modification_tells_versions_apart_once_it_has_passed() {
        let at = |second| format!("Mon, 23 Nov 2026 10:00:0{second} GMT").into_bytes();
        assert!(is_strong(&at(1), &at(2)));
        assert!(!is_strong(&at(1), &at(1)) && !is_strong(&at(2), &at(1)) && !is_strong(b"", &at(1)));
        assert!(!is_strong(&at(1), b""));
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

    #[test]
    fn a_content_range_is_read_and_nonsense_is_none() {
        assert_eq!(content_range(b"bytes 5-9/100"), Some((5, 100)));
        for wrong in [&b"bytes */100"[..], b"bytes 5-9/*", b"", b"items 1-2/3", b"\xff"] {
            assert_eq!(content_range(wrong), None);
        }
    }

    #[tokio::test]
    async fn content_in_chunks_is_decoded_whatever_the_pieces() {
        let wire = b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n";
        for size in 1..wire.len() {
            let pieces: Vec<Bytes> = wire.chunks(size).map(Bytes::copy_from_slice).collect();
            let body = Body::pieces(Bytes::new(), pieces.into_iter());
            let decoder = ChunkedDecoder::new(ChunkLimits::default());
            let coding = Coding::Chunked(Box::new(decoder));
            let mut content = Content { body, wire: BytesMut::new(), plain: BytesMut::new(), coding };
            let mut all = Vec::new();
            while let Some(piece) = content.next(4).await.unwrap() {
                assert!(piece.len() <= 4);
                all.extend_from_slice(&piece);
            }
            assert_eq!(all, b"hello world", "pieces of {size}");
        }
    }
}
