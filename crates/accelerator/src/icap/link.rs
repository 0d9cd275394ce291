//! One exchange's connection to an ICAP server.

use std::rc::Rc;
use std::time::Duration;

use tidegate_icap::{Decoder, Event, ResponseHead};

use crate::icap::service::Lease;
use crate::icap::{Failure, Reviewed};
use crate::upstream::{Stream, UpstreamError, read_more};

/// A connection on which one answer is awaited or read.
pub(crate) struct Link {
    stream: Rc<Stream>,
    lease: Option<Lease>,
    decoder: Decoder,
    buffer: Vec<u8>,
    taken: usize,
    /// How long the server may be silent.
    silence: Duration,
    keep_alive: bool,
    /// In which state the service was when it answered.
    pub reviewed: Reviewed,
    /// All that the server was to be told has been sent.
    pub is_sent: bool,
}

/// What a server has said.
pub(crate) enum Heard {
    Head(ResponseHead),
    Sections(Vec<u8>),
    /// A piece of the body; [`Link::piece`] has it.
    Piece(std::ops::Range<usize>),
    End,
}

impl Link {
    pub(crate) fn new(stream: Stream, lease: Option<Lease>, silence: Duration) -> Self {
        Self {
            stream: Rc::new(stream),
            lease,
            decoder: Decoder::default(),
            buffer: Vec::new(),
            taken: 0,
            silence,
            keep_alive: true,
            reviewed: Reviewed::BY_NOBODY,
            is_sent: true,
        }
    }

    pub(crate) fn stream(&self) -> &Rc<Stream> {
        &self.stream
    }

    pub(crate) fn into_lease(self) -> Option<Lease> {
        self.lease
    }

    /// Whether the server has said nothing yet.
    pub(crate) fn is_untouched(&self) -> bool {
        self.buffer.is_empty() && self.decoder.is_untouched()
    }

    pub(crate) fn piece(&self, range: std::ops::Range<usize>) -> &[u8] {
        self.buffer.get(range).unwrap_or(&[])
    }

    /// What comes next. May be dropped while it waits: nothing is lost. While something is still to be sent the server
    /// may be waiting as we are, so that its silence means nothing.
    pub(crate) async fn hear(&mut self) -> Result<Heard, Failure> {
        loop {
            let input = self.buffer.get(self.taken..).unwrap_or(&[]);
            let before = self.taken;
            let decoded = self.decoder.decode(input)?;
            self.taken += decoded.consumed;
            match decoded.event {
                Some(Event::Head(head)) => {
                    self.keep_alive &= head.keep_alive;
                    if let Some(lease) = &self.lease {
                        self.reviewed = lease.heard(head.service_tag.as_deref());
                    }
                    return Ok(Heard::Head(*head));
                }
                Some(Event::Sections(sections)) => return Ok(Heard::Sections(sections)),
                Some(Event::Body(range)) => {
                    return Ok(Heard::Piece(before + range.start..before + range.end));
                }
                Some(Event::End) => return Ok(Heard::End),
                None => {}
            }
            self.buffer.clear();
            self.taken = 0;
            match read_more(&self.stream, &mut self.buffer, self.silence).await {
                Ok(0) => return Err(Failure::Connection(UpstreamError::Incomplete)),
                Ok(_) => {}
                Err(UpstreamError::ResponseTimeout) if !self.is_sent => {}
                Err(error) => return Err(Failure::Connection(error)),
            }
        }
    }

    /// The exchange has ended: the connection may carry another one if nothing is left over on either side.
    pub(crate) fn finish(self) {
        let is_clean = self.is_sent && self.keep_alive && self.decoder.is_done();
        if let (Some(lease), Some(stream)) = (self.lease, Rc::into_inner(self.stream))
            && is_clean
            && self.taken == self.buffer.len()
        {
            lease.give_back(stream);
        }
    }
}
