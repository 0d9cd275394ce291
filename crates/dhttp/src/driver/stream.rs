//! HTTP messages on a byte stream: the same for connections that a server opens and for those that a client opens.

use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, IoSlice};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use tidegate_http::normalize::normalize;
use tidegate_http::{
    BodyFraming, ChunkLimits, ChunkedDecoder, HeadLimits, Method, Progress, RequestParser, ResponseParser,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::service::{Aborted, Body, BodySender, Reading};
use crate::wire::{ID_BYTES, MAX_HEADER_BYTES, Numbered, Once, Request, RequestId, WireError};

/// Most bytes taken from a socket at once.
const READ_BYTES: usize = 16 * 1024;

/// Bounds of a stream.
#[derive(Clone, Debug)]
pub(crate) struct StreamLimits {
    /// How long a message head may take from its first byte.
    pub head_timeout: Duration,
    /// How long the peer may be silent within a body, and how long it may take nothing of what is sent.
    pub progress_timeout: Duration,
    /// How long a connection is kept between messages.
    pub idle_timeout: Duration,
    /// Slowest average at which the peer may send a body or take a response, in bytes per second; 0 turns it off.
    pub min_rate_bytes_per_s: u64,
}

/// How far a peer may be behind the minimum rate before its connection is ended.
const GRACE: Duration = Duration::from_secs(10);

/// Holds a peer to a minimum rate. Only the time spent waiting for the peer counts.
struct Pace {
    silence: Duration,
    rate_bytes_per_s: u64,
    waited: Duration,
    moved_bytes: u64,
}

impl Pace {
    fn new(limits: &StreamLimits) -> Self {
        Self {
            silence: limits.progress_timeout,
            rate_bytes_per_s: limits.min_rate_bytes_per_s,
            waited: Duration::ZERO,
            moved_bytes: 0,
        }
    }

    /// Waits for the peer as long as it may take.
    async fn within<T>(&mut self, moves: impl Future<Output = T>) -> Option<T> {
        let allowed = match self.rate_bytes_per_s {
            0 => self.silence,
            rate => (GRACE + Duration::from_millis(self.moved_bytes.saturating_mul(1000) / rate))
                .saturating_sub(self.waited)
                .min(self.silence),
        };
        let start = Instant::now();
        let moved = timeout(allowed, moves).await.ok();
        self.waited += start.elapsed();
        moved
    }
}

/// Why a stream cannot be read on. It must be closed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    #[error("connection closed")]
    Closed,
    #[error("peer is too slow")]
    Slow,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Wire(#[from] WireError),
    /// Of the request with this id, so that an error can be sent.
    #[error("malformed head: {1}")]
    RequestHead(RequestId, tidegate_http::HeadError),
    /// Of a request that has no id.
    #[error("malformed head: {0}")]
    Head(tidegate_http::HeadError),
    #[error("malformed response")]
    Response,
}

/// The head of a request on a stream.
pub(crate) struct RequestHead {
    pub id: RequestId,
    pub udp_port: u16,
    /// It must not be repeated, and may have come by UDP before.
    pub once: Option<Numbered>,
    pub head: Bytes,
    pub framing: BodyFraming,
}

/// The head of a response on a stream.
#[derive(Debug)]
pub(crate) struct ResponseHead {
    pub status: u16,
    pub head: Bytes,
    pub framing: BodyFraming,
}

/// The reading half, and what was read of it too early.
pub(crate) struct Reader<R> {
    inner: R,
    buffer: BytesMut,
    limits: StreamLimits,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    pub fn new(inner: R, limits: StreamLimits) -> Self {
        Self { inner, buffer: BytesMut::new(), limits }
    }

    /// Reads some more.
    async fn fill(&mut self, patience: Duration) -> Result<(), StreamError> {
        self.buffer.reserve(READ_BYTES);
        let read =
            async { self.inner.read_buf(&mut bytes::BufMut::limit(&mut self.buffer, READ_BYTES)).await };
        match timeout(patience, read).await {
            Err(_) => Err(StreamError::Slow),
            Ok(Ok(0)) => Err(StreamError::Closed),
            Ok(read) => Ok(read.map(|_| ())?),
        }
    }

    /// The id that the next response starts with; waits for it as long as a connection may be idle.
    pub async fn response_id(&mut self) -> Result<RequestId, StreamError> {
        let mut patience = self.limits.idle_timeout;
        while self.buffer.len() < ID_BYTES {
            self.fill(patience).await?;
            patience = self.limits.head_timeout;
        }
        let mut id = [0; ID_BYTES];
        id.copy_from_slice(&self.buffer.split_to(ID_BYTES));
        Ok(RequestId(id))
    }

    /// The head of the next request, with the protocol's header in front of it; `patience` is how long it may take to
    /// begin.
    pub async fn request_head(
        &mut self,
        reading: Reading,
        patience: Duration,
    ) -> Result<RequestHead, StreamError> {
        if self.buffer.is_empty() {
            self.fill(patience).await?;
        }
        let patience = self.limits.head_timeout;
        let read = async {
            let (id, udp_port, once, header_bytes) = loop {
                if let Some(request) = Request::parse_prefix(&self.buffer)? {
                    let once = match request.once {
                        Once::Numbered(numbered) => Some(numbered),
                        Once::No | Once::Unnumbered => None,
                    };
                    break (request.id, request.other_port, once, request.header_bytes());
                }
                debug_assert!(self.buffer.len() < MAX_HEADER_BYTES);
                self.fill(patience).await?;
            };
            let _ = self.buffer.split_to(header_bytes);
            let (head, framing) = self.read_head(reading).await.map_err(|error| match error {
                StreamError::Head(error) => StreamError::RequestHead(id, error),
                error => error,
            })?;
            Ok(RequestHead { id, udp_port, once, head, framing })
        };
        timeout(patience, read).await.map_err(|_| StreamError::Slow)?
    }

    /// The head of the next request on a connection that is HTTP's own.
    pub async fn http_request_head(&mut self, reading: Reading) -> Result<(Bytes, BodyFraming), StreamError> {
        if self.buffer.is_empty() {
            self.fill(self.limits.idle_timeout).await?;
        }
        let patience = self.limits.head_timeout;
        timeout(patience, self.read_head(reading)).await.map_err(|_| StreamError::Slow)?
    }

    async fn read_head(&mut self, reading: Reading) -> Result<(Bytes, BodyFraming), StreamError> {
        let mut parser = RequestParser::new(reading.limits);
        loop {
            match parser.parse(&self.buffer) {
                Ok(Progress::Complete { length }) => {
                    let head = parser.head(&self.buffer);
                    normalize(&head, reading.personality, &mut Vec::new()).map_err(StreamError::Head)?;
                    let framing = head.framing;
                    return Ok((self.buffer.split_to(length).freeze(), framing));
                }
                Ok(Progress::Incomplete) => self.fill(self.limits.head_timeout).await?,
                Err(error) => return Err(StreamError::Head(error)),
            }
        }
    }

    /// Whether nothing was read too early.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Where it reads from.
    pub fn inner(&mut self) -> &mut R {
        &mut self.inner
    }

    /// What was read too early, and where more comes from.
    pub fn into_parts(self) -> (BytesMut, R) {
        (self.buffer, self.inner)
    }

    /// The head of the final response to a request with `method`; interim ones are skipped. `patience` is how long the
    /// server may take to begin.
    pub async fn response_head(
        &mut self,
        method: Method,
        patience: Duration,
    ) -> Result<ResponseHead, StreamError> {
        let mut parser = ResponseParser::new(HeadLimits::default());
        // RFC 9110 §15.2: any number of interim responses; more than a few are nonsense.
        for _ in 0..8 {
            parser.reset(method);
            let (length, framing, status) = loop {
                match parser.parse(&self.buffer).map_err(|_| StreamError::Response)? {
                    Progress::Complete { length } => {
                        let head = parser.head(&self.buffer);
                        break (length, head.framing, head.status);
                    }
                    Progress::Incomplete => self.fill(patience).await?,
                }
            };
            let head = self.buffer.split_to(length).freeze();
            match status {
                101 => return Err(StreamError::Response),
                100..=199 => {}
                _ => return Ok(ResponseHead { status, head, framing }),
            }
        }
        Err(StreamError::Response)
    }

    /// Hands a body on as it arrives. `Err(Aborted)`: it is malformed or broke off, or nobody wants it; then the
    /// stream can be read no further.
    pub async fn body(&mut self, framing: BodyFraming, mut to: BodySender) -> Result<(), Aborted> {
        let mut pace = Pace::new(&self.limits);
        match framing {
            BodyFraming::None => {}
            BodyFraming::Length(mut left) => {
                while left > 0 {
                    if self.buffer.is_empty() {
                        self.fill_body(&mut pace).await.map_err(|_| Aborted)?;
                    }
                    let length = (self.buffer.len() as u64).min(left);
                    left -= length;
                    to.send(self.buffer.split_to(length as usize).freeze()).await?;
                }
            }
            BodyFraming::Chunked => self.chunked_body(&mut to, &mut pace).await?,
            BodyFraming::UntilClose => loop {
                if !self.buffer.is_empty() {
                    to.send(self.buffer.split().freeze()).await?;
                }
                match self.fill_body(&mut pace).await {
                    Ok(()) => {}
                    Err(StreamError::Closed) => break,
                    Err(_) => return Err(Aborted),
                }
            },
        }
        to.end();
        Ok(())
    }

    async fn chunked_body(&mut self, to: &mut BodySender, pace: &mut Pace) -> Result<(), Aborted> {
        let mut decoder = ChunkedDecoder::new(ChunkLimits::default());
        loop {
            let decoded = decoder.decode(&self.buffer).map_err(|_| Aborted)?;
            let mut consumed = self.buffer.split_to(decoded.consumed);
            if !decoded.data.is_empty() {
                consumed.truncate(decoded.data.end);
                to.send(consumed.split_off(decoded.data.start).freeze()).await?;
            }
            if decoded.done {
                return Ok(());
            }
            if self.buffer.is_empty() {
                self.fill_body(pace).await.map_err(|_| Aborted)?;
            }
        }
    }

    async fn fill_body(&mut self, pace: &mut Pace) -> Result<(), StreamError> {
        let before = self.buffer.len();
        let forever = Duration::from_secs(86_400);
        pace.within(self.fill(forever)).await.unwrap_or(Err(StreamError::Slow))?;
        pace.moved_bytes += (self.buffer.len() - before) as u64;
        Ok(())
    }

    /// Reads and forgets what the peer still sends, within reason.
    pub async fn linger(&mut self) {
        const READS: usize = 64;
        for _ in 0..READS {
            self.buffer.clear();
            if self.fill(Duration::from_secs(1)).await.is_err() {
                return;
            }
        }
    }

    /// Waits until the peer closes or says something, which it must not.
    pub async fn closed(&mut self) {
        let mut byte = [0];
        let _ = self.inner.read(&mut byte).await;
    }
}

/// Status, head and body of a response that is there whole; the body without the chunked coding.
pub(crate) fn whole_response(http: &Bytes, method: Method) -> Option<(u16, Bytes, Bytes)> {
    let mut parser = ResponseParser::new(HeadLimits::default());
    parser.reset(method);
    let Ok(Progress::Complete { length }) = parser.parse(http) else { return None };
    let head = parser.head(http);
    let body = http.slice(length..);
    let body = if head.framing == BodyFraming::Chunked { decode_chunked(&body)? } else { body };
    Some((head.status, http.slice(..length), body))
}

fn decode_chunked(mut coded: &[u8]) -> Option<Bytes> {
    let mut decoder = ChunkedDecoder::new(ChunkLimits::default());
    let mut body = Vec::new();
    loop {
        let decoded = decoder.decode(coded).ok()?;
        body.extend_from_slice(&coded[decoded.data]);
        coded = &coded[decoded.consumed..];
        if decoded.done {
            return Some(body.into());
        }
        if coded.is_empty() {
            return None;
        }
    }
}

/// Writes all of `bytes`, as long as the peer takes them.
async fn write_paced<W: AsyncWrite + Unpin>(to: &mut W, mut bytes: &[u8], pace: &mut Pace) -> io::Result<()> {
    while !bytes.is_empty() {
        match pace.within(to.write(bytes)).await {
            None => return Err(io::ErrorKind::TimedOut.into()),
            Some(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
            Some(written) => {
                let written = written?;
                pace.moved_bytes += written as u64;
                bytes = &bytes[written..];
            }
        }
    }
    Ok(())
}

/// Writes a message of the client's: `first`, then a body as it arrives.
pub(crate) async fn write_body<W: AsyncWrite + Unpin>(
    to: &mut W,
    first: &[u8],
    mut body: Body,
    limits: &StreamLimits,
) -> io::Result<()> {
    let mut pace = Pace::new(limits);
    write_paced(to, first, &mut pace).await?;
    while let Some(piece) = body.next().await {
        write_paced(to, &piece.map_err(io::Error::other)?, &mut pace).await?;
    }
    // TLS may hold records back.
    pace.within(to.flush()).await.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
}

/// Most pieces, and about as many bytes, that are written together.
const GATHERED: (usize, usize) = (4, 128 * 1024);

/// Writes an id and a body of HTTP as it arrives. What is there already goes together, so that a short response is one
/// segment and the head of a long one does not leave alone.
pub(crate) async fn write_message<W: AsyncWrite + Unpin>(
    to: &mut W,
    header: &[u8],
    mut http: Body,
    limits: &StreamLimits,
) -> io::Result<()> {
    let broken = |_| io::Error::from(io::ErrorKind::ConnectionAborted);
    let mut pace = Pace::new(limits);
    let mut pieces = VecDeque::from([Bytes::copy_from_slice(header)]);
    loop {
        let Some(first) = http.next().await else { break };
        pieces.push_back(first.map_err(broken)?);
        let mut ended = false;
        while pieces.len() < GATHERED.0 && pieces.iter().map(Bytes::len).sum::<usize>() < GATHERED.1 {
            match http.ready_now() {
                Poll::Ready(Some(piece)) => pieces.push_back(piece.map_err(broken)?),
                Poll::Ready(None) => {
                    ended = true;
                    break;
                }
                Poll::Pending => break,
            }
        }
        write_gathered(to, &mut pieces, &mut pace).await?;
        if ended {
            break;
        }
    }
    // Nothing but the header.
    write_gathered(to, &mut pieces, &mut pace).await?;
    // TLS may hold records back.
    pace.within(to.flush()).await.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
}

/// Writes and removes all of `pieces`, as long as the peer takes them.
async fn write_gathered<W: AsyncWrite + Unpin>(
    to: &mut W,
    pieces: &mut VecDeque<Bytes>,
    pace: &mut Pace,
) -> io::Result<()> {
    while let Some(first) = pieces.front() {
        if first.is_empty() {
            pieces.pop_front();
            continue;
        }
        let slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        let mut written = match pace.within(to.write_vectored(&slices)).await {
            None => return Err(io::ErrorKind::TimedOut.into()),
            Some(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
            Some(written) => written?,
        };
        pace.moved_bytes += written as u64;
        while written > 0
            && let Some(first) = pieces.front_mut()
        {
            let taken = written.min(first.len());
            bytes::Buf::advance(first, taken);
            written -= taken;
            if first.is_empty() {
                pieces.pop_front();
            }
        }
    }
    Ok(())
}
