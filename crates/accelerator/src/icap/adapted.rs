//! The body that a service has put in the place of a message's own.

use std::ops::Range;

use crate::icap::link::{Heard, Link};
use crate::upstream::{BodyReadError, RequestBody, Upload, UpstreamError};

/// A body as it comes from the service, which may still be reading the one it replaces.
pub(crate) struct AdaptedBody<B> {
    /// `None` once the end was read.
    link: Option<Link>,
    /// What is left of the original, on its way to the service.
    feed: Option<(Upload, B)>,
    /// Bytes that the new head announced and that have not come.
    left: Option<u64>,
    untouched: bool,
}

impl<B: RequestBody> AdaptedBody<B> {
    pub(crate) fn new(link: Link, feed: Option<(Upload, B)>, length: Option<u64>) -> Self {
        Self { link: Some(link), feed, left: length, untouched: true }
    }

    /// The next piece; `None` at the end. A call that is dropped while it waits loses nothing.
    pub(crate) async fn piece(&mut self) -> Result<Option<&[u8]>, UpstreamError> {
        let range = self.advance().await?;
        Ok(range.and_then(|range| Some(self.link.as_ref()?.piece(range))))
    }

    /// Where in the link's buffer the next piece lies.
    async fn advance(&mut self) -> Result<Option<Range<usize>>, UpstreamError> {
        self.untouched = false;
        let Some(link) = &mut self.link else { return Ok(None) };
        let heard = loop {
            let Some((upload, body)) = &mut self.feed else { break link.hear().await };
            tokio::select! {
                biased;
                heard = link.hear() => break heard,
                sent = upload.run(body) => {
                    // A server that takes no more may still answer in full.
                    link.is_sent = sent.is_ok();
                    self.feed = None;
                    if let Err(error @ UpstreamError::Client(_)) = sent {
                        return Err(error);
                    }
                }
            }
        };
        let broken = |error| {
            tracing::debug!(%error, "an adapted body ended early");
            UpstreamError::Incomplete
        };
        match heard.map_err(broken)? {
            Heard::Piece(range) => {
                if let Some(left) = &mut self.left {
                    // A byte more than was announced would be read as the start of another message.
                    *left = left.checked_sub(range.len() as u64).ok_or(UpstreamError::Incomplete)?;
                }
                Ok(Some(range))
            }
            Heard::End if self.left.is_some_and(|left| left > 0) => Err(UpstreamError::Incomplete),
            Heard::End => {
                self.link.take().into_iter().for_each(Link::finish);
                Ok(None)
            }
            Heard::Head(_) | Heard::Sections(_) => Err(UpstreamError::Incomplete),
        }
    }
}

impl<B: RequestBody> RequestBody for AdaptedBody<B> {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        self.piece().await.map_err(|error| match error {
            UpstreamError::Client(error) => error,
            _ => BodyReadError::Adaptation,
        })
    }

    fn put_back(&mut self, _: Vec<u8>) {
        // One service looks at a message: nobody reads ahead of the upstream.
    }

    fn takes_back(&self) -> bool {
        false
    }

    fn is_replayable(&self) -> bool {
        self.untouched && self.link.is_none()
    }
}
