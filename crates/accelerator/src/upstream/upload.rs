//! A request body on its way to a server.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use tidegate_http::{BodyFraming, ResponseHead, write_chunk_header, write_last_chunk};

use crate::upstream::{BodyReadError, Stream, UpstreamError};

/// A request body, read as it is sent.
pub(crate) trait RequestBody {
    /// The next piece; `None` at the end. A call that is dropped while it waits loses nothing.
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError>;
    /// Gives back what was read ahead, in one piece: the next call returns it again. Nothing else was taken out
    /// meanwhile.
    fn put_back(&mut self, bytes: Vec<u8>);
    /// Trailer fields, once the body has been read.
    fn trailers(&self) -> Box<dyn Iterator<Item = (&[u8], &[u8])> + '_> {
        Box::new(std::iter::empty())
    }
    /// An interim response has come.
    fn informational(&mut self, _head: &ResponseHead<'_>) {}
    /// Whether [`Self::put_back`] does so.
    fn takes_back(&self) -> bool {
        true
    }
    /// Whether the request can be sent again: nothing was read from the body yet, or there is nothing in it.
    fn is_replayable(&self) -> bool;
}

/// A request without a body.
pub(crate) struct EmptyBody;

impl RequestBody for EmptyBody {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        Ok(None)
    }

    fn put_back(&mut self, _: Vec<u8>) {}

    fn is_replayable(&self) -> bool {
        true
    }
}

impl<B: RequestBody> RequestBody for &mut B {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        (**self).chunk().await
    }

    fn put_back(&mut self, bytes: Vec<u8>) {
        (**self).put_back(bytes);
    }

    fn trailers(&self) -> Box<dyn Iterator<Item = (&[u8], &[u8])> + '_> {
        (**self).trailers()
    }

    fn informational(&mut self, head: &ResponseHead<'_>) {
        (**self).informational(head);
    }

    fn takes_back(&self) -> bool {
        (**self).takes_back()
    }

    fn is_replayable(&self) -> bool {
        (**self).is_replayable()
    }
}

/// A body whose beginning is kept, so that it can be sent again.
pub(super) struct Kept<B> {
    body: B,
    bytes: Vec<u8>,
    most: usize,
    /// It is all that was read.
    is_all: bool,
}

impl<B: RequestBody> Kept<B> {
    /// At most so much of it; 0: nothing.
    pub(super) fn new(body: B, most: usize) -> Self {
        let is_all = most > 0 && body.takes_back();
        Self { body, bytes: Vec::new(), most, is_all }
    }

    /// What was read comes again, if it was kept.
    pub(super) fn rewind(&mut self) {
        if !self.bytes.is_empty() {
            self.body.put_back(std::mem::take(&mut self.bytes));
        }
    }
}

impl<B: RequestBody> RequestBody for Kept<B> {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        let Self { body, bytes, most, is_all } = self;
        let piece = body.chunk().await?;
        if let Some(piece) = piece.filter(|_| *is_all) {
            *is_all = bytes.len() + piece.len() <= *most;
            match is_all {
                true => bytes.extend_from_slice(piece),
                false => *bytes = Vec::new(),
            }
        }
        Ok(piece)
    }

    fn put_back(&mut self, bytes: Vec<u8>) {
        self.body.put_back(bytes);
    }

    fn trailers(&self) -> Box<dyn Iterator<Item = (&[u8], &[u8])> + '_> {
        self.body.trailers()
    }

    fn informational(&mut self, head: &ResponseHead<'_>) {
        self.body.informational(head);
    }

    fn is_replayable(&self) -> bool {
        self.is_all || self.body.is_replayable()
    }
}

/// How far an upload has come; shared with the response, which may be on its way at the same time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum UploadState {
    Running,
    /// All of the request was sent.
    Complete,
    /// The server takes no more, or the client sends no more.
    Stopped,
}

/// Sends a body with the framing that the request's head announced, or in frames of HTTP/2, which need none.
pub(crate) struct Upload {
    stream: Rc<Stream>,
    framing: BodyFraming,
    passes_trailers: bool,
    silence: Duration,
    state: Rc<Cell<UploadState>>,
    /// What was read from the body and not sent yet, framed.
    frame: Vec<u8>,
    sent: usize,
    /// The end of the body is in `frame`.
    ended: bool,
}

impl Upload {
    pub(crate) fn new(
        stream: &Rc<Stream>,
        framing: BodyFraming,
        silence: Duration,
        passes_trailers: bool,
    ) -> Self {
        Self {
            stream: Rc::clone(stream),
            framing,
            passes_trailers,
            silence,
            state: Rc::new(Cell::new(UploadState::Running)),
            frame: Vec::new(),
            sent: 0,
            ended: false,
        }
    }

    /// How far it has come.
    pub(crate) fn state(&self) -> Rc<Cell<UploadState>> {
        Rc::clone(&self.state)
    }

    /// Sends what is left. May be dropped while it waits and called again: nothing is lost.
    pub(crate) async fn run<B: RequestBody>(&mut self, body: &mut B) -> Result<(), UpstreamError> {
        let result = self.send(body).await;
        self.state.set(if result.is_ok() { UploadState::Complete } else { UploadState::Stopped });
        result
    }

    async fn send<B: RequestBody>(&mut self, body: &mut B) -> Result<(), UpstreamError> {
        loop {
            while let Some(bytes) = self.frame.get(self.sent..).filter(|bytes| !bytes.is_empty()) {
                self.sent += send_some(&self.stream, bytes, self.silence).await?;
            }
            if self.ended {
                return Ok(());
            }
            let piece = body.chunk().await.map_err(UpstreamError::Client)?;
            self.frame.clear();
            self.sent = 0;
            match piece {
                Some(piece) if self.stream.http2().is_some() => {
                    count(&mut self.framing, piece)?;
                    self.frame.extend_from_slice(piece);
                }
                Some(piece) => push(&mut self.framing, piece, &mut self.frame)?,
                None => {
                    self.ended = true;
                    match self.framing {
                        BodyFraming::Length(left) if left > 0 => return Err(wrong_length()),
                        _ if let Some(stream) = self.stream.http2() => {
                            let passed = self.passes_trailers.then(|| body.trailers());
                            stream.end(passed.into_iter().flatten()).map_err(UpstreamError::of_connection)?;
                        }
                        BodyFraming::Chunked if self.passes_trailers => {
                            write_last_chunk(body.trailers(), &mut self.frame);
                        }
                        BodyFraming::Chunked => write_last_chunk(std::iter::empty(), &mut self.frame),
                        _ => {}
                    }
                }
            }
        }
    }
}

impl Drop for Upload {
    /// Nobody sends the rest any more: the server's silence is no longer the client's.
    fn drop(&mut self) {
        if self.state.get() == UploadState::Running {
            self.state.set(UploadState::Stopped);
        }
    }
}

/// Appends a piece of the body as it goes to the server by HTTP/1.1.
fn push(framing: &mut BodyFraming, piece: &[u8], frame: &mut Vec<u8>) -> Result<(), UpstreamError> {
    count(framing, piece)?;
    match framing {
        BodyFraming::Chunked if piece.is_empty() => {}
        BodyFraming::Chunked => {
            write_chunk_header(piece.len(), frame);
            frame.extend_from_slice(piece);
            frame.extend_from_slice(b"\r\n");
        }
        _ => frame.extend_from_slice(piece),
    }
    Ok(())
}

/// A length that was announced is kept to: a byte more would be the start of another request.
fn count(framing: &mut BodyFraming, piece: &[u8]) -> Result<(), UpstreamError> {
    match framing {
        BodyFraming::Chunked => {}
        BodyFraming::Length(left) => {
            *left = left.checked_sub(piece.len() as u64).ok_or_else(wrong_length)?;
        }
        _ => return Err(wrong_length()),
    }
    Ok(())
}

fn wrong_length() -> UpstreamError {
    UpstreamError::Client(BodyReadError::Malformed)
}

/// Sends all of `bytes`.
pub(crate) async fn send_all(
    stream: &Stream,
    mut bytes: &[u8],
    silence: Duration,
) -> Result<(), UpstreamError> {
    // What the socket takes at once, which is mostly all, needs no room for a wait.
    if !bytes.is_empty()
        && let Ok(sent) = stream.try_write(bytes)
    {
        bytes = bytes.get(sent..).unwrap_or(&[]);
    }
    while !bytes.is_empty() {
        let sent = Box::pin(send_some(stream, bytes, silence)).await?;
        bytes = bytes.get(sent..).unwrap_or(&[]);
    }
    Ok(())
}

/// Sends the start of `bytes`; waits at most `silence` for the server to take any.
async fn send_some(stream: &Stream, bytes: &[u8], silence: Duration) -> Result<usize, UpstreamError> {
    loop {
        match stream.try_write(bytes) {
            Ok(0) => return Err(UpstreamError::Broken(io::ErrorKind::WriteZero.into())),
            Ok(written) => return Ok(written),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let writable = tokio::time::timeout(silence, stream.writable()).await;
                writable
                    .map_err(|_| UpstreamError::ResponseTimeout)?
                    .map_err(UpstreamError::of_connection)?;
            }
            Err(error) => return Err(UpstreamError::of_connection(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_beyond_its_announced_length_is_stopped() {
        let (mut framing, mut frame) = (BodyFraming::Length(3), Vec::new());
        push(&mut framing, b"ab", &mut frame).unwrap();
        assert!(push(&mut framing, b"cd", &mut frame).is_err());
        assert_eq!(frame, b"ab", "nothing of the piece that is too long went out");
    }

    #[test]
    fn an_empty_piece_does_not_end_a_chunked_body() {
        let mut frame = Vec::new();
        push(&mut BodyFraming::Chunked, b"", &mut frame).unwrap();
        assert_eq!(frame, b"");
        push(&mut BodyFraming::Chunked, b"ab", &mut frame).unwrap();
        assert_eq!(frame, b"2\r\nab\r\n");
    }
}
