//! A response's content while it is being compressed.

use std::io;
use std::sync::Arc;

use crate::cache::transfer::ready;
use crate::compression::{Encoder, Slot, is_about_bytes};
use crate::telemetry::metrics::CoreMetrics;
use crate::upstream::{Response, UpstreamError};

/// So much is handed on in one piece, where it comes at once.
const PIECE_BYTES: usize = 16 * 1024;

/// The content of `response`, compressed as it comes. What the server pauses after goes on to the client at once.
pub(crate) struct CompressedContent {
    response: Box<Response>,
    /// Gone at the end.
    encoder: Option<(Encoder, Slot)>,
    piece: Vec<u8>,
    /// Something has gone into the encoder that has not come out.
    is_behind: bool,
    metrics: Arc<CoreMetrics>,
}

impl CompressedContent {
    pub(super) fn new(
        response: Box<Response>,
        encoder: Encoder,
        slot: Slot,
        metrics: Arc<CoreMetrics>,
    ) -> Self {
        let encoder = Some((encoder, slot));
        Self { response, encoder, piece: Vec::new(), is_behind: false, metrics }
    }

    /// The next piece; `None` at the end. A call that is dropped while it waits loses nothing.
    pub(crate) async fn piece(&mut self) -> Result<Option<&[u8]>, UpstreamError> {
        self.piece.clear();
        while let Some((encoder, slot)) = &mut self.encoder {
            slot.turn().await;
            let chunk = match ready(self.response.chunk()).await {
                Some(chunk) => chunk?,
                None if self.is_behind => {
                    slot.spend(|| encoder.flush()).map_err(failed)?;
                    self.is_behind = false;
                    if !encoder.output().is_empty() {
                        return Ok(Some(self.hand_on()));
                    }
                    continue;
                }
                None => match self.response.chunk().await? {
                    // It waits for its turn like what comes at once.
                    Some(chunk) => {
                        let chunk = chunk.to_vec();
                        self.response.put_back(chunk);
                        continue;
                    }
                    None => None,
                },
            };
            let Some(chunk) = chunk else {
                if let Some((encoder, slot)) = self.encoder.take() {
                    self.piece = slot.spend(|| encoder.finish()).map_err(failed)?;
                    self.metrics.compressed_bytes_total.add(self.piece.len() as u64);
                }
                break;
            };
            slot.spend(|| encoder.write(chunk)).map_err(failed)?;
            self.metrics.compressed_input_bytes_total.add(chunk.len() as u64);
            self.is_behind = true;
            slot.took(chunk.len());
            if encoder.output().len() >= PIECE_BYTES {
                return Ok(Some(self.hand_on()));
            }
        }
        Ok(Some(&self.piece[..]).filter(|piece| !piece.is_empty()))
    }

    /// What has come out of the encoder.
    fn hand_on(&mut self) -> &[u8] {
        if let Some((encoder, _)) = &mut self.encoder {
            std::mem::swap(&mut self.piece, encoder.output());
        }
        self.metrics.compressed_bytes_total.add(self.piece.len() as u64);
        &self.piece
    }

    /// Trailer fields of the response, once the content has been read, without those that were about its bytes.
    pub(crate) fn trailers(&self) -> Box<dyn Iterator<Item = (&[u8], &[u8])> + '_> {
        Box::new(self.response.trailers().filter(|(name, _)| !is_about_bytes(name)))
    }
}

/// An encoder writes into memory: only for want of it.
fn failed(error: io::Error) -> UpstreamError {
    tracing::warn!(%error, "a response could not be compressed any further");
    UpstreamError::Incomplete
}
