//! One question to the accelerator: a request head out of what Trickles knows, and the response as blocks.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use tidegate_accelerator::Inside;
use tidegate_dhttp::driver::Body;
use tidegate_http::{
    BodyFraming, ChunkLimits, ChunkedDecoder, FieldId, HeadLimits, Progress, RequestParser, ResponseParser,
    date,
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
    host: Vec<u8>,
    target: Vec<u8>,
    head: Vec<u8>,
    body: Bytes,
    peer: SocketAddr,
    proved: bool,
}

impl Outgoing {
    /// A GET stands for HEAD too: Trickles leaves the content away itself.
    pub(super) fn of(asked: &Asked<'_>) -> Self {
        let mut method = b"GET".to_vec();
        let mut fields = Vec::new();
        let mut parser = RequestParser::new(HeadLimits::default());
        if let Ok(Progress::Complete { .. }) = parser.parse(asked.head) {
            let head = parser.head(asked.head);
            if head.method_bytes != b"HEAD" {
                method = head.method_bytes.to_vec();
            }
            for (_, name, value) in head.fields.iter() {
                if !OWN_FIELDS.iter().any(|own| own.eq_ignore_ascii_case(name)) {
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
        }
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

/// A response whose content is being taken.
pub(super) struct Begun {
    /// What the response is of; its length is right once it is known.
    pub resource: Resource,
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
    let validator = if etag.starts_with(b"\"") { &etag[..] } else { modified };
    let pinned = matches!(head.status, 200 | 206) && !validator.is_empty() && length.is_some();
    let version = match length.filter(|_| pinned) {
        Some(length) => {
            // A head with a cookie is for nobody else.
            let parts = [&resource_name[..], b"\0", validator, b"\0", &length.to_be_bytes(), &cookies];
            xxh3_64(&parts.concat())
        }
        None => unique()?,
    };
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
    Ok(Begun { resource, pinned, whole, fills, content, at, block: BytesMut::new(), failed: false })
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

    /// What was read of a block. A part may begin later or end earlier than it was asked for (RFC 9110 §15.3.7): that is none.
    fn take_block(&mut self, index: u64) -> Option<(u64, Bytes)> {
        let block = self.block.split().freeze();
        let whole = self.resource.length.saturating_sub(index * BLOCK_BYTES).min(BLOCK_BYTES);
        self.failed |= self.pinned && block.len() as u64 != whole;
        (!self.failed).then_some((index, block))
    }

    /// Whether the answer to a question for a part says that what was there is gone, not that this client may not have it now.
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
