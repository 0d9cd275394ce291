//! A request body as it arrives from the client, bounded in size and held to a minimum rate.

use std::io;
use std::ops::Range;
use std::rc::Rc;

use tidegate_http::{
    BodyError, BodyFraming, ChunkLimits, ChunkedDecoder, Fields, RequestHead, ResponseHead, Version,
};

use crate::cache::fill;
use crate::data_core::DataCore;
use crate::data_core::client::Client;
use crate::session::allowance::Allowance;
use crate::session::deadlines::{Slot, Waiting};
use crate::session::transmit::RateWatch;
use crate::upstream::{BodyReadError, RequestBody};

/// Bytes read from the client at once.
const READ_BYTES: usize = 16 * 1024;
/// What is read and thrown away so that a connection can be used again after an early answer.
const DISCARD_BYTES: u64 = 64 * 1024;
/// Of interim responses, what waits for the socket before further ones are left out.
const LATE_BYTES: usize = 64 * 1024;

/// A request body on its way in.
pub(crate) struct ClientBody<'c> {
    client: &'c Client,
    core: &'c Rc<DataCore>,
    framing: Framing,
    /// Those of the head.
    fields: Fields<'c>,
    /// What has arrived; `taken` bytes of it are used.
    buffer: Vec<u8>,
    taken: usize,
    /// What was read ahead and comes again first, and the piece that was given out of it.
    ahead: Option<Vec<u8>>,
    given: Vec<u8>,
    received: u64,
    limit: u64,
    allowance: Allowance,
    version: Version,
    expects_continue: bool,
    /// Of interim responses, what the socket had no room for: the response to a request before this one may still fill
    /// it.
    late: Vec<u8>,
    untouched: bool,
}

enum Framing {
    /// Bytes to come.
    Length {
        left: u64,
    },
    Chunked(Box<ChunkedDecoder>),
}

impl<'c> ClientBody<'c> {
    /// The body of `head`; `rest` is what arrived after the head.
    pub(crate) fn new(
        client: &'c Client,
        core: &'c Rc<DataCore>,
        head: &RequestHead<'c>,
        rest: Vec<u8>,
    ) -> Self {
        let framing = match head.framing {
            BodyFraming::Chunked => Framing::Chunked(Box::new(ChunkedDecoder::new(ChunkLimits::default()))),
            BodyFraming::Length(left) => Framing::Length { left },
            _ => Framing::Length { left: 0 },
        };
        let (limit, rate_bytes_per_s) =
            core.with_plan(|plan| (plan.limits.body_bytes, plan.limits.body_min_rate_bytes_per_s));
        Self {
            client,
            core,
            framing,
            fields: head.fields,
            buffer: rest,
            taken: 0,
            ahead: None,
            given: Vec::new(),
            received: 0,
            limit,
            allowance: Allowance::new(rate_bytes_per_s),
            version: head.version,
            expects_continue: head.expect_continue,
            late: Vec::new(),
            untouched: true,
        }
    }

    /// Whether all of the body has been read.
    pub(crate) fn is_complete(&self) -> bool {
        match &self.framing {
            Framing::Length { left } => *left == 0,
            Framing::Chunked(decoder) => decoder.is_done(),
        }
    }

    /// Whether the client waits for 100 (Continue), which comes too late once the final response has begun.
    pub(crate) fn awaits_continue(&self) -> bool {
        self.expects_continue
    }

    /// Whether the connection can be used again although nobody wants the rest of the body.
    pub(crate) fn is_disposable(&self) -> bool {
        // A client that waits for 100 (Continue) and gets a final answer need not send the body, nor say so
        // (RFC 9110 §10.1.1): what comes next cannot be told from a body.
        match &self.framing {
            _ if self.is_complete() => true,
            _ if self.expects_continue => false,
            Framing::Length { left } => *left <= DISCARD_BYTES,
            Framing::Chunked(_) => true,
        }
    }

    /// What the client sent after the body.
    pub(crate) fn into_rest(mut self) -> Vec<u8> {
        self.buffer.drain(..self.taken.min(self.buffer.len()));
        self.buffer
    }

    /// Reads what is left of the body, if it is little; `false` when the connection cannot be used again.
    pub(crate) async fn discard(&mut self) -> bool {
        if self.is_complete() || !self.is_disposable() {
            return self.is_complete();
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
            Framing::Length { left: 0 } => Ok(Decoded::End),
            Framing::Length { left } => {
                if input.is_empty() {
                    return Ok(Decoded::NeedMore);
                }
                let take = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                let piece = self.taken..self.taken + take;
                self.taken += take;
                *left -= take as u64;
                Ok(Decoded::Piece(piece))
            }
            Framing::Chunked(decoder) => {
                // What lies in many small chunks comes out as one piece, so that it costs no more than in a large one.
                let (mut start, mut end) = (self.taken, self.taken);
                while !decoder.is_done() {
                    let input = self.buffer.get(self.taken..).unwrap_or(&[]);
                    let decoded = decoder.decode(input).map_err(|error: BodyError| {
                        self.core.metrics.requests_refused_total.add(1);
                        tracing::debug!(%error, "request body refused");
                        BodyReadError::Malformed
                    })?;
                    let data = self.taken + decoded.data.start..self.taken + decoded.data.end;
                    self.taken += decoded.consumed;
                    if start == end {
                        (start, end) = (data.start, data.end);
                    } else {
                        let length = data.len();
                        self.buffer.copy_within(data, end);
                        end += length;
                    }
                    if decoded.consumed == 0 {
                        break;
                    }
                }
                Ok(match (start < end, decoder.is_done()) {
                    (true, _) => Decoded::Piece(start..end),
                    (false, true) => Decoded::End,
                    (false, false) => Decoded::NeedMore,
                })
            }
        }
    }

    async fn read(&mut self) -> Result<(), BodyReadError> {
        if std::mem::take(&mut self.expects_continue) {
            self.core.metrics.responses_1xx_total.add(1);
            self.late.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
        if self.has_late() {
            Box::pin(self.send_late()).await.map_err(|_| BodyReadError::ClientGone)?;
        }
        self.buffer.drain(..self.taken.min(self.buffer.len()));
        self.taken = 0;
        self.buffer.reserve(READ_BYTES);
        let read = self.read_more().await;
        match read {
            Ok(0) | Err(_) if self.client.slot.expired().is_some() => {
                self.core.metrics.slow_bodies_total.add(1);
                Err(BodyReadError::TooSlow)
            }
            Ok(0) | Err(_) => Err(BodyReadError::ClientGone),
            Ok(length) => {
                self.allowance.earn(length as u64);
                Ok(())
            }
        }
    }

    /// Whether something is left of interim responses.
    pub(crate) fn has_late(&self) -> bool {
        !self.late.is_empty()
    }

    /// Sends what is left of interim responses, which comes before all else. May be dropped while it waits: nothing is
    /// lost.
    pub(crate) async fn send_late(&mut self) -> io::Result<()> {
        let mut watch = RateWatch::new(self.core);
        while !self.late.is_empty() {
            match self.client.try_write(&self.late) {
                Ok(sent) => drop(self.late.drain(..sent)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    watch.writable(self.client, self.core).await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn read_more(&mut self) -> io::Result<usize> {
        loop {
            match self.client.try_read_buf(&mut self.buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            let start_ms = self.core.clock.elapsed_ms();
            let allowed_ms = self.allowance.left_ms().unwrap_or(u64::MAX);
            self.client.slot.set(Waiting::Body, start_ms.saturating_add(allowed_ms));
            let owed = Owed(&self.client.slot);
            self.client.readable().await;
            drop(owed);
            self.allowance.spend(self.core.clock.elapsed_ms() - start_ms);
        }
    }
}

/// The client owes a part of its body until this is dropped, be it because nobody waits for it any more.
struct Owed<'s>(&'s Slot);

impl Drop for Owed<'_> {
    fn drop(&mut self) {
        // An expired deadline keeps its reason.
        if self.0.expired().is_none() {
            self.0.clear();
        }
    }
}

enum Decoded {
    Piece(Range<usize>),
    End,
    NeedMore,
}

impl RequestBody for ClientBody<'_> {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        if let Some(ahead) = self.ahead.take() {
            self.given = ahead;
            return Ok(Some(&self.given));
        }
        self.untouched = false;
        loop {
            match self.decode()? {
                Decoded::End => return Ok(None),
                Decoded::NeedMore => self.read().await?,
                Decoded::Piece(piece) => {
                    self.received += piece.len() as u64;
                    if self.received > self.limit {
                        return Err(BodyReadError::TooLarge);
                    }
                    let piece = self.buffer.get(piece).unwrap_or(&[]);
                    if self.core.refuses_body((self.client.place, self.client.peer()), piece, self.received) {
                        return Err(BodyReadError::Refused);
                    }
                    return Ok(Some(piece));
                }
            }
        }
    }

    fn put_back(&mut self, bytes: Vec<u8>) {
        self.ahead = Some(bytes).filter(|bytes| !bytes.is_empty());
    }

    fn trailers(&self) -> Box<dyn Iterator<Item = (&[u8], &[u8])> + '_> {
        match &self.framing {
            Framing::Chunked(decoder) => Box::new(decoder.trailers(self.fields)),
            Framing::Length { .. } => Box::new(std::iter::empty()),
        }
    }

    /// RFC 9110 §15.2: interim responses go on to clients that understand them, at once: to come early is all they are
    /// for. Our own 100 (Continue) has gone out already.
    fn informational(&mut self, head: &ResponseHead<'_>) {
        if self.version == Version::Http10 || head.status == 100 || self.late.len() > LATE_BYTES {
            return;
        }
        let is_first = self.late.is_empty();
        fill::write_informational(head, &mut self.late);
        self.core.metrics.responses_1xx_total.add(1);
        // A client that has left is noticed by whoever sends the response.
        if is_first && let Ok(sent) = self.client.try_write(&self.late) {
            self.late.drain(..sent);
        }
    }

    fn is_replayable(&self) -> bool {
        self.untouched || (self.is_complete() && self.received == 0)
    }
}
