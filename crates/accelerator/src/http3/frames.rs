//! Frames of a stream as they come (RFC 9114 §7.1).

use bytes::{Buf, Bytes};
use quinn::{ReadError, RecvStream};
use tidegate_http::http3::{ErrorCode, FrameHeader};

/// Bytes that are taken from a stream at once.
const PIECE_BYTES: usize = 64 * 1024;

/// Why there is nothing more to be read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Ended {
    /// The client has reset the stream, or the connection is gone.
    Gone,
    /// What came ends the connection.
    Fault(ErrorCode),
}

impl From<ReadError> for Ended {
    fn from(_: ReadError) -> Self {
        Self::Gone
    }
}

/// The client's half of a stream. What waits here may be given up and waited for again.
pub(super) struct Frames {
    stream: RecvStream,
    /// What has come and nobody has taken yet.
    rest: Bytes,
    /// A frame's header that came in pieces, as far as it is there.
    header: Vec<u8>,
    has_ended: bool,
}

impl Frames {
    pub(super) fn new(stream: RecvStream) -> Self {
        Self { stream, rest: Bytes::new(), header: Vec::new(), has_ended: false }
    }

    /// The next frame's header; `None` at the end of the stream.
    pub(super) async fn header(&mut self) -> Result<Option<FrameHeader>, Ended> {
        loop {
            if self.header.is_empty()
                && let Some((header, length)) = FrameHeader::read(&self.rest)
            {
                self.rest.advance(length);
                return Ok(Some(header));
            }
            while self.rest.has_remaining() {
                self.header.push(self.rest.get_u8());
                if let Some((header, _)) = FrameHeader::read(&self.header) {
                    self.header.clear();
                    return Ok(Some(header));
                }
            }
            if !self.fill().await? {
                return match self.header.is_empty() {
                    true => Ok(None),
                    false => Err(Ended::Fault(ErrorCode::FrameError)),
                };
            }
        }
    }

    /// At most `most` bytes of a frame's payload; never none.
    pub(super) async fn payload(&mut self, most: u64) -> Result<Bytes, Ended> {
        while self.rest.is_empty() {
            if !self.fill().await? {
                return Err(Ended::Fault(ErrorCode::FrameError));
            }
        }
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        Ok(self.rest.split_to(most.min(self.rest.len())))
    }

    /// Takes more from the stream; `false` at its end.
    async fn fill(&mut self) -> Result<bool, Ended> {
        if self.has_ended {
            return Ok(false);
        }
        match self.stream.read_chunk(PIECE_BYTES, true).await? {
            Some(chunk) => self.rest = chunk.bytes,
            None => self.has_ended = true,
        }
        Ok(!self.has_ended)
    }

    /// The client need not send any more.
    pub(super) fn stop(&mut self, why: ErrorCode) {
        if !self.has_ended {
            // Who has ended it is not told.
            let _ = self.stream.stop(super::connection::code(why));
        }
    }
}
