//! A request body as its transport hands it on, bounded in size.

use bytes::Bytes;
use tidegate_dhttp::driver::Body;
use tidegate_http::ResponseHead;
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
    interim: Option<mpsc::Sender<Vec<u8>>>,
}

impl UploadedBody {
    /// Of at most `limit` bytes. Interim responses that come meanwhile are put into `interim`.
    pub(crate) fn new(body: Body, limit: u64, interim: Option<mpsc::Sender<Vec<u8>>>) -> Self {
        let (piece, ahead) = (Bytes::new(), None);
        Self { body, piece, ahead, received: 0, limit, untouched: true, ended: false, interim }
    }
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
                    return Ok(None);
                }
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
