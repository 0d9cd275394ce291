//! A request body as it arrives from the client, bounded in size and held to a minimum rate.

use std::io;
use std::ops::Range;
use std::rc::Rc;

use tidegate_http::{BodyError, BodyFraming, ChunkLimits, ChunkedDecoder, RequestHead};
use tokio::net::TcpStream;

use crate::data_core::DataCore;
use crate::session::deadlines::{Slot, Waiting};
use crate::upstream::{BodyReadError, RequestBody};

/// Bytes read from the client at once.
const READ_BYTES: usize = 16 * 1024;
/// What a client may be behind the minimum rate before it is ended.
const GRACE_MS: u64 = 10_000;
/// What is read and thrown away so that a connection can be used again after an early answer.
const DISCARD_BYTES: u64 = 64 * 1024;

/// A request body on its way in.
pub(crate) struct ClientBody<'c> {
    stream: &'c TcpStream,
    core: &'c Rc<DataCore>,
    slot: &'c Slot,
    framing: Framing,
    /// What has arrived; `taken` bytes of it are used.
    buffer: Vec<u8>,
    taken: usize,
    received: u64,
    limit: u64,
    rate_bytes_per_s: u64,
    waited_ms: u64,
    expects_continue: bool,
    untouched: bool,
}

enum Framing {
    Done,
    Length { left: u64 },
    Chunked(Box<ChunkedDecoder>),
}

impl<'c> ClientBody<'c> {
    /// The body of `head`; `rest` is what arrived after the head.
    pub(crate) fn new(
        stream: &'c TcpStream,
        core: &'c Rc<DataCore>,
        slot: &'c Slot,
        head: &RequestHead<'_>,
        rest: Vec<u8>,
    ) -> Self {
        let framing = match head.framing {
            BodyFraming::Chunked => Framing::Chunked(Box::new(ChunkedDecoder::new(ChunkLimits::default()))),
            BodyFraming::Length(left) if left > 0 => Framing::Length { left },
            _ => Framing::Done,
        };
        let (limit, rate_bytes_per_s) =
            core.with_plan(|plan| (plan.limits.body_bytes, plan.limits.body_min_rate_bytes_per_s));
        Self {
            stream,
            core,
            slot,
            framing,
            buffer: rest,
            taken: 0,
            received: 0,
            limit,
            rate_bytes_per_s,
            waited_ms: 0,
            expects_continue: head.expect_continue,
            untouched: true,
        }
    }

    /// Whether all of the body has been read.
    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.framing, Framing::Done)
    }

    /// What the client sent after the body.
    pub(crate) fn into_rest(mut self) -> Vec<u8> {
        self.buffer.drain(..self.taken.min(self.buffer.len()));
        self.buffer
    }

    /// Reads what is left of the body, if it is little; `false` when the connection cannot be used again.
    pub(crate) async fn discard(&mut self) -> bool {
        if self.is_complete() {
            return true;
        }
        // A client that waits for 100 (Continue) and gets a final answer need not send the body, nor say so
        // (RFC 9110 §10.1.1): what comes next cannot be told from a body.
        if self.expects_continue {
            return false;
        }
        let end = self.received + DISCARD_BYTES;
        while self.received <= end {
            match self.chunk().await {
                Ok(Some(_)) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
        false
    }

    /// Finds the next piece of the body in what has arrived.
    fn decode(&mut self) -> Result<Decoded, BodyReadError> {
        let input = self.buffer.get(self.taken..).unwrap_or(&[]);
        match &mut self.framing {
            Framing::Done => Ok(Decoded::End),
            Framing::Length { left } => {
                if input.is_empty() {
                    return Ok(Decoded::NeedMore);
                }
                let take = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                let piece = self.taken..self.taken + take;
                self.taken += take;
                *left -= take as u64;
                if *left == 0 {
                    self.framing = Framing::Done;
                }
                Ok(Decoded::Piece(piece))
            }
            Framing::Chunked(decoder) => {
                let decoded = decoder.decode(input).map_err(|error: BodyError| {
                    self.core.metrics.requests_refused_total.add(1);
                    tracing::debug!(%error, "request body refused");
                    BodyReadError::Malformed
                })?;
                let piece = self.taken + decoded.data.start..self.taken + decoded.data.end;
                self.taken += decoded.consumed;
                if decoded.done {
                    self.framing = Framing::Done;
                }
                Ok(match (piece.is_empty(), decoded.done, decoded.consumed) {
                    (false, ..) => Decoded::Piece(piece),
                    (true, true, _) => Decoded::End,
                    (true, false, 0) => Decoded::NeedMore,
                    (true, false, _) => Decoded::Again,
                })
            }
        }
    }

    async fn read(&mut self) -> Result<(), BodyReadError> {
        if std::mem::take(&mut self.expects_continue) {
            self.core.metrics.responses_1xx_total.add(1);
            let interim = b"HTTP/1.1 100 Continue\r\n\r\n";
            // The socket is empty before a response, so that a short write cannot happen unless the client is gone.
            if self.stream.try_write(interim).ok() != Some(interim.len()) {
                return Err(BodyReadError::ClientGone);
            }
        }
        self.buffer.drain(..self.taken.min(self.buffer.len()));
        self.taken = 0;
        let kept = self.buffer.len();
        self.buffer.resize(kept + READ_BYTES, 0);
        let read = self.read_at(kept).await;
        self.buffer.truncate(kept + read.as_ref().map_or(0, |read| *read));
        match read {
            Ok(0) | Err(_) if self.slot.expired().is_some() => {
                self.core.metrics.slow_bodies_total.add(1);
                Err(BodyReadError::TooSlow)
            }
            Ok(0) | Err(_) => Err(BodyReadError::ClientGone),
            Ok(_) => Ok(()),
        }
    }

    async fn read_at(&mut self, at: usize) -> io::Result<usize> {
        loop {
            match self.stream.try_read(self.buffer.get_mut(at..).unwrap_or(&mut [])) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            let start_ms = self.core.clock.elapsed_ms();
            let allowed_ms = match self.rate_bytes_per_s {
                0 => u64::MAX / 2,
                rate => (GRACE_MS + self.received.saturating_mul(1000) / rate).saturating_sub(self.waited_ms),
            };
            self.slot.set(Waiting::Body, start_ms.saturating_add(allowed_ms));
            self.stream.readable().await?;
            self.waited_ms += self.core.clock.elapsed_ms() - start_ms;
            self.slot.clear();
        }
    }
}

enum Decoded {
    Piece(Range<usize>),
    End,
    NeedMore,
    /// Something was used up that is not data, such as a chunk's size.
    Again,
}

impl RequestBody for ClientBody<'_> {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        self.untouched = false;
        loop {
            match self.decode()? {
                Decoded::End => return Ok(None),
                Decoded::Again => {}
                Decoded::NeedMore => self.read().await?,
                Decoded::Piece(piece) => {
                    self.received += piece.len() as u64;
                    if self.received > self.limit {
                        return Err(BodyReadError::TooLarge);
                    }
                    return Ok(Some(self.buffer.get(piece).unwrap_or(&[])));
                }
            }
        }
    }

    fn is_replayable(&self) -> bool {
        self.untouched || (self.is_complete() && self.received == 0)
    }
}
