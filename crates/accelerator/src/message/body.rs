//! A request body as its transport hands it on, bounded in size.

use bytes::Bytes;
use tidegate_dhttp::driver::Body;
use tidegate_http::{ChunkLimits, ChunkedDecoder, Fields, ResponseHead};
use tokio::sync::mpsc;

use crate::cache::fill;
use crate::upstream::{BodyReadError, RequestBody};

/// A request body on its way in. The transport holds the client to the minimum rate.
pub(crate) struct UploadedBody {
    body: Body,
    piece: Bytes,
    /// What was read ahead and comes again first.
    ahead: Option<Bytes>,
    received: u64,
    limit: u64,
    untouched: bool,
    ended: bool,
    /// What has read the trailers, if there are any.
    trailers: Option<Box<ChunkedDecoder>>,
    interim: Option<mpsc::Sender<Vec<u8>>>,
}

impl UploadedBody {
    /// One without content.
    pub(crate) fn none() -> Self {
        Self::new(Body::full(Bytes::new()), 0, None)
    }

    /// Of at most `limit` bytes. Interim responses that come meanwhile are put into `interim`.
    pub(crate) fn new(body: Body, limit: u64, interim: Option<mpsc::Sender<Vec<u8>>>) -> Self {
        let (piece, ahead, trailers) = (Bytes::new(), None, None);
        Self { body, piece, ahead, received: 0, limit, untouched: true, ended: false, trailers, interim }
    }
}

/// Reads a trailer section as that of a chunked body: by the same limits, and with the same fields left out.
fn read_trailers(section: &[u8]) -> Result<Option<Box<ChunkedDecoder>>, BodyReadError> {
    if section.is_empty() {
        return Ok(None);
    }
    let mut decoder = Box::new(ChunkedDecoder::new(ChunkLimits::default()));
    for part in [b"0\r\n", section, b"\r\n"] {
        decoder.decode(part).map_err(|_| BodyReadError::Malformed)?;
    }
    decoder.is_done().then_some(Some(decoder)).ok_or(BodyReadError::Malformed)
}

impl RequestBody for UploadedBody {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        if let Some(ahead) = self.ahead.take() {
            self.piece = ahead;
            return Ok(Some(&self.piece));
        }
        self.untouched = false;
        if self.ended {
            return Ok(None);
        }
        loop {
            match self.body.next().await {
                None => {
                    self.ended = true;
                    self.trailers = read_trailers(self.body.trailers())?;
                    return Ok(None);
                }
                Some(Err(_)) if self.body.is_late() => return Err(BodyReadError::TooSlow),
                Some(Err(_)) => return Err(BodyReadError::ClientGone),
                Some(Ok(piece)) if piece.is_empty() => {}
                Some(Ok(piece)) => {
                    self.received += piece.len() as u64;
                    if self.received > self.limit {
                        return Err(BodyReadError::TooLarge);
                    }
                    self.piece = piece;
                    return Ok(Some(&self.piece));
                }
            }
        }
    }

    fn put_back(&mut self, bytes: Vec<u8>) {
        self.ahead = Some(Bytes::from(bytes)).filter(|bytes| !bytes.is_empty());
    }

    fn trailers(&self) -> Box<dyn Iterator<Item = (&[u8], &[u8])> + '_> {
        // No field of a message is about its connection.
        let head = Fields::new(b"", &[], 0);
        Box::new(self.trailers.iter().flat_map(move |decoder| decoder.trailers(head)))
    }

    /// Whoever has no room for it does without: it is a hint. 100 (Continue) has been said already.
    fn informational(&mut self, head: &ResponseHead<'_>) {
        if let Some(interim) = self.interim.as_ref().filter(|_| head.status != 100) {
            let mut bytes = Vec::with_capacity(256);
            fill::write_informational(head, &mut bytes);
            let _ = interim.try_send(bytes);
        }
    }

    fn is_replayable(&self) -> bool {
        self.untouched || (self.ended && self.received == 0)
    }
}
