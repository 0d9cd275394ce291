//! One question to the accelerator: its response, as blocks.

use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use tidegate_accelerator::Inside;
use tidegate_dhttp::driver::Body;
use tidegate_http::{
    BodyFraming, ChunkLimits, ChunkedDecoder, FieldId, Fields, HeadLimits, Progress, ResponseParser, date,
};
use tidegate_trickles::http::{Missing, Resource};
use xxhash_rust::xxh3::xxh3_64;

use super::inner::BLOCK_BYTES;
use super::outgoing::{Outgoing, write_field};

/// Longest response without a validator, or without a length: it has to be kept as a whole.
const MAX_WHOLE_BYTES: u64 = 8 << 20;
/// Blocks that are kept of a response on its way into the cache.
const KEPT_AHEAD: u64 = 4;
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

/// A response whose content is being taken.
pub(super) struct StreamingResponse {
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
pub(super) async fn begin(
    inside: &Inside,
    local: SocketAddr,
    request: Outgoing,
) -> Result<StreamingResponse, Missing> {
    let mut head = request.head;
    head.extend_from_slice(b"\r\n");
    let asked_with = xxh3_64(&head);
    let body = inside.ask(head.into(), request.body, (request.peer, request.proved), local).await;
    let mut body = body.map_err(|_| Missing::Unavailable)?;
    let (parser, bytes, wire) = read_head(&mut body).await?;
    let head = parser.head(&bytes);
    let KeptFields { fields, cookies, fills } = KeptFields::of(&head.fields);
    let text = |id| head.fields.get(id).unwrap_or_default();
    let part = content_range(text(FieldId::ContentRange)).filter(|_| head.status == 206);
    let coding = Coding::of(head.framing).ok_or(Missing::Unavailable)?;
    let length = match (&coding, part) {
        (_, Some((_, total))) => Some(total),
        (Coding::Length(length), None) => Some(*length),
        (Coding::Chunked(_), None) => None,
    };
    let validator = validator(&head.fields, asked_with);
    let may_pin = request.repeatable && matches!(head.status, 200 | 206) && !validator.is_empty();
    let pinned_length = length.filter(|_| may_pin);
    let versions = match pinned_length {
        Some(length) => {
            let (host, target, length) = (&request.host[..], &request.target[..], length.to_be_bytes());
            let parts =
                [host, b"\0", target, b"\0", &validator[..], b"\0", &length[..], &cookies[..]].concat();
            let peer = request.peer.to_string();
            [xxh3_64(&parts), xxh3_64(&[&parts[..], b"\0", peer.as_bytes()].concat())]
        }
        None => [unique()?; 2],
    };
    let version = versions[usize::from(!is_for_all(&head.fields, request.has_credentials))];
    let resource = Resource {
        status: if part.is_some() { 200 } else { head.status },
        length: length.unwrap_or(0),
        version,
        modified_s: date::parse(text(FieldId::LastModified)),
        etag: text(FieldId::Etag).to_vec(),
        fields,
    };
    Ok(StreamingResponse {
        resource,
        versions,
        pinned: pinned_length.is_some(),
        whole: part.is_none(),
        fills,
        content: Content { body, wire, plain: BytesMut::new(), coding },
        at: part.map_or(0, |(first, _)| first),
        block: BytesMut::new(),
        failed: false,
    })
}

/// The head of a response, as what has parsed it and its bytes; and what has come of the content with it.
async fn read_head(body: &mut Body) -> Result<(ResponseParser, BytesMut, BytesMut), Missing> {
    let mut buffer = BytesMut::new();
    let mut parser = ResponseParser::new(HeadLimits::default());
    loop {
        match parser.parse(&buffer) {
            Ok(Progress::Complete { length }) => {
                let head = buffer.split_to(length);
                return Ok((parser, head, buffer));
            }
            Ok(Progress::Incomplete) => {}
            Err(_) => return Err(Missing::Unavailable),
        }
        match body.next().await {
            Some(Ok(piece)) => buffer.extend_from_slice(&piece),
            _ => return Err(Missing::Unavailable),
        }
    }
}

/// What is kept of a response's fields.
struct KeptFields {
    /// Lines of those that Trickles does not write itself.
    fields: Vec<u8>,
    /// Lines of those that set cookies, which are among them.
    cookies: Vec<u8>,
    /// See [`StreamingResponse::fills`].
    fills: bool,
}

impl KeptFields {
    fn of(all: &Fields<'_>) -> Self {
        let mut kept = Self { fields: Vec::new(), cookies: Vec::new(), fills: false };
        for (_, name, value) in all.iter() {
            if name.eq_ignore_ascii_case(b"set-cookie") {
                write_field(name, value, &mut kept.cookies);
            }
            kept.fills |= name.eq_ignore_ascii_case(b"cache-status") && is_stored(value);
            if !VOLATILE_FIELDS.iter().any(|own| own.eq_ignore_ascii_case(name)) {
                write_field(name, value, &mut kept.fields);
            }
        }
        kept
    }
}

impl Coding {
    fn of(framing: BodyFraming) -> Option<Self> {
        match framing {
            BodyFraming::None => Some(Self::Length(0)),
            BodyFraming::Length(length) => Some(Self::Length(length)),
            BodyFraming::Chunked => {
                Some(Self::Chunked(Box::new(ChunkedDecoder::new(ChunkLimits::default()))))
            }
            // The accelerator frames what it sends on.
            BodyFraming::UntilClose => None,
        }
    }
}

/// What the bytes of a representation are known by; empty if nothing says so. `asked_with` is a hash of the request.
fn validator(fields: &Fields<'_>, asked_with: u64) -> Vec<u8> {
    let text = |id| fields.get(id).unwrap_or_default();
    let (etag, modified) = (text(FieldId::Etag), text(FieldId::LastModified));
    if etag.starts_with(b"\"") {
        return etag.to_vec();
    }
    if !is_strong(modified, text(FieldId::Date)) {
        return Vec::new();
    }
    // One time for all of its variants: which one it is follows from the request.
    match fields.get(FieldId::Vary) {
        Some(_) => [modified, b"\0", &asked_with.to_be_bytes()].concat(),
        None => modified.to_vec(),
    }
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

impl StreamingResponse {
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
