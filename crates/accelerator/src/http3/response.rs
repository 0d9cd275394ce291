//! The server's half of a stream: heads, content, trailer fields.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use quinn::{SendStream, StoppedError, VarInt};
use tidegate_http::http3::{self, ErrorCode, FrameHeader, frame_type};
use tidegate_http::{FieldId, ResponseHead};

use crate::http3::connection::{Connection, code};
use crate::http3::stream::Both;
use crate::streams::{self, Carrier, End, Ended, Fault, Gone, Outgoing, Shared};

/// A client of which nothing has come for so long while it has something to take is gone.
const GONE_MS: u64 = 30_000;
/// What counts of such a silence that has ended.
const SILENCE_BORNE_MS: u64 = 5000;

/// What ends when the client has all of a response, or wants no more of it.
type Stopped = Pin<Box<dyn Future<Output = Result<Option<VarInt>, StoppedError>>>>;

/// What is answered.
pub(super) struct Answer {
    connection: Rc<Connection>,
    both: Rc<Both>,
    send: SendStream,
    stopped: Stopped,
    /// The header of a frame of content, as far as it has not gone out.
    frame: Bytes,
    /// Bytes to come of that frame.
    left: usize,
    /// The response has been sent to its end, or its stream was reset.
    is_whole: bool,
}

impl Answer {
    pub(super) fn new(connection: &Rc<Connection>, both: &Rc<Both>, send: SendStream) -> Self {
        Self {
            connection: Rc::clone(connection),
            both: Rc::clone(both),
            stopped: Box::pin(send.stopped()),
            send,
            frame: Bytes::new(),
            left: 0,
            is_whole: false,
        }
    }

    async fn send_fields(&mut self, section: &[u8]) -> Result<(), Gone> {
        let mut frame = Vec::with_capacity(section.len() + FrameHeader::MOST_BYTES);
        FrameHeader { kind: frame_type::HEADERS, length: section.len() as u64 }.write(&mut frame);
        frame.extend_from_slice(section);
        self.send.write_chunk(frame.into()).await.map_err(|_| Gone)
    }

    fn finish(&mut self) -> Result<(), Gone> {
        self.is_whole = true;
        self.send.finish().map_err(|_| Gone)
    }
}

impl Outgoing for Answer {
    fn poll_given_up(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
        match self.both.poll_fault(context) {
            Poll::Ready(ErrorCode::RequestCancelled) => return Poll::Ready(Ended::Cancelled),
            Poll::Ready(_) => return Poll::Ready(Ended::Failed(Fault::Malformed)),
            Poll::Pending => {}
        }
        self.stopped.as_mut().poll(context).map(|_| Ended::Cancelled)
    }

    async fn interim(&mut self, head: &ResponseHead<'_>) -> Result<(), Gone> {
        let mut section = Vec::new();
        http3::write_response(head.status, head.fields.iter(), &mut section);
        self.send_fields(&section).await
    }

    async fn head(&mut self, head: &ResponseHead<'_>, is_all: bool) -> Result<(), Ended> {
        self.interim(head).await?;
        if is_all {
            self.finish()?;
        }
        Ok(())
    }

    /// What is kept for a client meanwhile is one piece, and the library's to send is bounded.
    async fn room(&mut self) -> Result<(), Gone> {
        Ok(())
    }

    async fn send(&mut self, data: &mut Bytes, is_last: bool) -> Result<usize, Gone> {
        if self.left == 0 && !data.is_empty() {
            let mut frame = Vec::with_capacity(FrameHeader::MOST_BYTES);
            FrameHeader { kind: frame_type::DATA, length: data.len() as u64 }.write(&mut frame);
            self.frame = frame.into();
            self.left = data.len();
        }
        let before = data.len();
        let mut chunks = [std::mem::take(&mut self.frame), std::mem::take(data)];
        // Given up in the midst of it, the stream is not gone on with.
        let written = match before {
            0 => Ok(()),
            _ => self.send.write_chunks(&mut chunks).await.map(drop),
        };
        [self.frame, *data] = chunks;
        written.map_err(|_| Gone)?;
        let sent = before - data.len();
        self.left -= sent;
        if is_last && data.is_empty() {
            self.finish()?;
        }
        Ok(sent)
    }

    async fn trailers(&mut self, fields: &[(&[u8], &[u8])]) -> Result<(), Gone> {
        let mut section = Vec::new();
        let fields = fields.iter().map(|(name, value)| (FieldId::from_name(name), *name, *value));
        http3::write_trailers(fields, &mut section);
        self.send_fields(&section).await?;
        self.finish()
    }

    /// A client that does not take what it has asked for is waited for as long as it keeps up the minimum rate.
    async fn delivered(&mut self, shared: &Shared) -> Result<(), Ended> {
        let Self { connection, stopped, .. } = self;
        let clock = &shared.core.clock;
        let _awaited = connection.debts().owes();
        let mut allowance = streams::of_responses(shared);
        let mut since_ms = clock.elapsed_ms();
        // It is as far as that; what has passed since something was heard is not spent yet.
        let mut seen = connection.progress();
        let mut silent_ms = 0;
        loop {
            tokio::select! {
                biased;
                stopped = &mut *stopped => return match stopped {
                    Ok(Some(_)) => Err(Ended::Cancelled),
                    Ok(None) | Err(_) => Ok(()),
                },
                () = connection.looked_at() => {
                    let (now_ms, now) = (clock.elapsed_ms(), connection.progress());
                    silent_ms += now_ms - since_ms;
                    since_ms = now_ms;
                    if now.acknowledged > seen.acknowledged {
                        // It may have had no network for a while.
                        allowance.spend(silent_ms.min(SILENCE_BORNE_MS));
                        allowance.earn(if now.frames > seen.frames { now.bytes.saturating_sub(seen.bytes) } else { 0 });
                        silent_ms = 0;
                    } else if now.heard > seen.heard {
                        // It is there, and takes nothing.
                        allowance.spend(silent_ms);
                        silent_ms = 0;
                    }
                    seen = now;
                    if allowance.left_ms() == Some(0) {
                        return Err(Ended::TooSlow);
                    }
                    if silent_ms > GONE_MS {
                        shared.core.metrics.clients_gone_total.add(1);
                        return Err(Ended::Connection(End::Closed));
                    }
                }
            }
        }
    }

    fn reset(&mut self, fault: Fault) {
        self.is_whole = true;
        let why = match fault {
            Fault::Aborted => ErrorCode::InternalError,
            Fault::Malformed => ErrorCode::MessageError,
            Fault::Excessive | Fault::Unread(_) => ErrorCode::ExcessiveLoad,
            Fault::Incomplete => ErrorCode::RequestIncomplete,
        };
        // The client may have stopped it.
        let _ = self.send.reset(code(self.both.fault().unwrap_or(why)));
    }
}

impl Drop for Answer {
    /// The library would take it for whole.
    fn drop(&mut self) {
        if !self.is_whole {
            self.reset(Fault::Aborted);
        }
    }
}
