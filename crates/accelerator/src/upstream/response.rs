//! A response as it is read from a server.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use tidegate_http::{
    BodyFraming, ChunkLimits, ChunkedDecoder, FieldRules, HeadError, Method, ResponseHead, RuledResponse,
};

use crate::cache::fill::write_status_line;
use crate::compression::CompressedContent;
use crate::icap::{AdaptedBody, OriginBody, Reviewed};
use crate::upstream::exchange::{Head, Received, read_more};
use crate::upstream::pool::Lease;
use crate::upstream::upload::{Upload, UploadState};
use crate::upstream::{Stream, UpstreamError};

/// An interim response (RFC 9110 §15.2).
pub(crate) struct Interim(Head);

impl Interim {
    pub(crate) fn head(&self) -> ResponseHead<'_> {
        self.0.get()
    }
}

/// A response whose head is here; in a box, since it is handed on by many. Reading the body to its end gives the
/// connection back to the pool.
pub(crate) struct Response {
    head: Head,
    interim: Vec<Head>,
    /// What was read ahead of the body and comes again first, and the piece that was given out of it.
    ahead: Option<Vec<u8>>,
    given: Vec<u8>,
    body: Body,
    buffer: Vec<u8>,
    taken: usize,
    silence: Duration,
    connection: Option<(Rc<Stream>, Rc<Lease>)>,
    /// The server keeps the connection open.
    keep_alive: bool,
    /// Further responses come on the connection, for which nobody waits.
    has_others_behind: bool,
    upload: Option<Upload>,
    upload_state: Option<Rc<Cell<UploadState>>>,
    /// By which ICAP service, and in which state of it.
    pub(crate) reviewed: Reviewed,
    /// The codings that clients accept select it, by this server's choice alone.
    pub(crate) is_by_coding: bool,
    passes_trailers: bool,
}

enum Body {
    Done,
    Length {
        left: u64,
    },
    Chunked(Box<ChunkedDecoder>),
    UntilClose,
    /// What an ICAP service has put in the place of the server's.
    Adapted(Box<AdaptedBody<OriginBody>>),
    /// The server's, compressed here.
    Compressed(Box<CompressedContent>),
}

impl Response {
    /// On this connection, if it is to be given back or more is to come on it. With `has_others_behind` answers to
    /// others follow, and it is not given back.
    pub(crate) fn new(
        received: Box<Received>,
        silence: Duration,
        connection: Option<(Rc<Stream>, Rc<Lease>)>,
        has_others_behind: bool,
    ) -> Box<Self> {
        let head = received.head.get();
        let body = match head.framing {
            BodyFraming::None | BodyFraming::Length(0) => Body::Done,
            BodyFraming::Length(left) => Body::Length { left },
            BodyFraming::Chunked => Body::Chunked(Box::new(ChunkedDecoder::new(ChunkLimits::of_responses()))),
            BodyFraming::UntilClose => Body::UntilClose,
        };
        let keep_alive = head.keep_alive && head.status != 101;
        let received = *received;
        let mut response = Box::new(Self {
            head: received.head,
            interim: received.interim,
            ahead: None,
            given: Vec::new(),
            body,
            buffer: received.rest,
            taken: 0,
            silence,
            connection,
            keep_alive,
            has_others_behind,
            upload_state: received.upload.as_ref().map(Upload::state),
            upload: received.upload,
            reviewed: Reviewed::BY_NOBODY,
            is_by_coding: false,
            passes_trailers: true,
        });
        response.finish_if_done();
        response
    }

    /// What an ICAP service has put in the place of a server's response.
    pub(crate) fn adapted(head: Head, content: Option<AdaptedBody<OriginBody>>) -> Box<Self> {
        Self::replacing(head, content.map_or(Body::Done, |content| Body::Adapted(Box::new(content))))
    }

    /// A server's response with another head, and compressed.
    pub(crate) fn compressed(head: Head, content: CompressedContent) -> Box<Self> {
        Self::replacing(head, Body::Compressed(Box::new(content)))
    }

    fn replacing(head: Head, body: Body) -> Box<Self> {
        Box::new(Self {
            head,
            interim: Vec::new(),
            ahead: None,
            given: Vec::new(),
            body,
            buffer: Vec::new(),
            taken: 0,
            silence: Duration::ZERO,
            connection: None,
            keep_alive: false,
            has_others_behind: false,
            upload: None,
            upload_state: None,
            reviewed: Reviewed::BY_NOBODY,
            is_by_coding: false,
            passes_trailers: true,
        })
    }

    /// Changes the fields as an operator wants them; the framing stays. Trailer fields do not go on then, which rules would be
    /// about as well.
    pub(crate) fn change_fields(
        &mut self,
        rules: &FieldRules,
        method: Method,
        of: RuledResponse,
    ) -> Result<(), UpstreamError> {
        let head = self.head();
        if head.status == 101 {
            return Ok(());
        }
        let mut out = Vec::with_capacity(512);
        write_status_line(&head, &mut out);
        rules.write_response(&head, of, &mut out);
        if head.framing == BodyFraming::Chunked {
            out.extend_from_slice(b"Transfer-Encoding: chunked\r\n");
        }
        let too_many = HeadError::TooManyFields { limit: u16::MAX };
        let version = head.version;
        let Head { bytes, parsed } = Head::read(out, method).ok_or(UpstreamError::Head(too_many))?;
        self.head = Head { bytes, parsed: parsed.received_by(version) };
        self.passes_trailers = false;
        Ok(())
    }

    /// Says something else of the same body, in the same framing.
    pub(crate) fn set_head(&mut self, head: Head) {
        self.head = head;
    }

    pub(crate) fn head(&self) -> ResponseHead<'_> {
        self.head.get()
    }

    /// What is left of the request's body: it goes out while the response comes in.
    pub(crate) fn take_upload(&mut self) -> Option<Upload> {
        self.upload.take()
    }

    /// The same, for [`Self::restore`].
    pub(crate) fn take_interim(&mut self) -> Vec<Head> {
        std::mem::take(&mut self.interim)
    }

    /// What was taken out before an ICAP service looked at the response.
    pub(crate) fn restore(&mut self, interim: Vec<Head>, upload: Option<Upload>) {
        self.interim = interim;
        self.upload = upload;
    }

    /// Gives back what was read ahead of the body, in one piece.
    pub(crate) fn put_back(&mut self, bytes: Vec<u8>) {
        self.ahead = Some(bytes).filter(|bytes| !bytes.is_empty());
    }

    /// The interim responses that came before this one.
    pub(crate) fn take_informational(&mut self) -> VecDeque<Interim> {
        self.interim.drain(..).map(Interim).collect()
    }

    /// The next piece of the body; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<&[u8]>, UpstreamError> {
        if let Some(ahead) = self.ahead.take() {
            self.given = ahead;
            return Ok(Some(&self.given));
        }
        if matches!(self.body, Body::Adapted(_) | Body::Compressed(_)) {
            return self.replaced_chunk().await;
        }
        let piece = loop {
            match self.decode()? {
                Decoded::Piece(piece) => break piece,
                Decoded::End => {
                    self.finish_if_done();
                    return Ok(None);
                }
                Decoded::Again => {}
                Decoded::NeedMore => self.read().await?,
            }
        };
        Ok(Some(self.buffer.get(piece).unwrap_or(&[])))
    }

    async fn replaced_chunk(&mut self) -> Result<Option<&[u8]>, UpstreamError> {
        match &mut self.body {
            // Boxed, because it may read from a response of its own.
            Body::Adapted(content) => Box::pin(content.piece()).await.map_err(|error| match error {
                // That of the response in whose place it stands.
                UpstreamError::Client(_) => UpstreamError::Incomplete,
                error => error,
            }),
            Body::Compressed(content) => Box::pin(content.piece()).await,
            _ => Ok(None),
        }
    }

    /// Trailer fields, once the body has been read (RFC 9112 §7.1.2).
    pub(crate) fn trailers(&self) -> Box<dyn Iterator<Item = (&[u8], &[u8])> + '_> {
        match &self.body {
            Body::Chunked(decoder) if self.passes_trailers => Box::new(decoder.trailers(self.head().fields)),
            Body::Compressed(content) => content.trailers(),
            _ => Box::new(std::iter::empty()),
        }
    }

    /// The connection of a 101 response, its place among the server's connections, and what has arrived since.
    pub(crate) fn into_tunnel(mut self) -> Option<(Stream, Rc<Lease>, Vec<u8>)> {
        let (stream, lease) = self.connection.take()?;
        Some((Rc::into_inner(stream)?, lease, self.buffer.split_off(self.taken)))
    }

    async fn read(&mut self) -> Result<(), UpstreamError> {
        let Some((stream, lease)) = &self.connection else { return Err(UpstreamError::Incomplete) };
        self.buffer.drain(..self.taken);
        self.taken = 0;
        let read = loop {
            let uploading = self.is_uploading();
            match read_more(stream, &mut self.buffer, self.silence).await {
                // While the request is on its way, the server may be waiting for the client.
                Err(UpstreamError::ResponseTimeout) if uploading => {}
                read => break read,
            }
        };
        match read {
            Ok(0) if matches!(self.body, Body::UntilClose) => {
                self.body = Body::Done;
                Ok(())
            }
            Ok(0) => {
                lease.failed(&UpstreamError::Incomplete);
                Err(UpstreamError::Incomplete)
            }
            Ok(_) => Ok(()),
            Err(error) => {
                lease.failed(&error);
                Err(error)
            }
        }
    }

    fn is_uploading(&self) -> bool {
        self.upload_state.as_ref().is_some_and(|state| state.get() == UploadState::Running)
    }

    fn decode(&mut self) -> Result<Decoded, UpstreamError> {
        let input = self.buffer.get(self.taken..).unwrap_or(&[]);
        let available = input.len();
        let take = match &mut self.body {
            Body::Done | Body::Adapted(_) | Body::Compressed(_) => return Ok(Decoded::End),
            Body::UntilClose => available,
            Body::Length { left } => {
                let take = usize::try_from(*left).unwrap_or(usize::MAX).min(available);
                *left -= take as u64;
                if *left == 0 {
                    self.body = Body::Done;
                }
                take
            }
            Body::Chunked(decoder) => {
                if decoder.is_done() {
                    return Ok(Decoded::End);
                }
                let decoded = decoder.decode(input).map_err(UpstreamError::Body)?;
                let piece = self.taken + decoded.data.start..self.taken + decoded.data.end;
                self.taken += decoded.consumed;
                return Ok(match (piece.is_empty(), decoded.done, decoded.consumed) {
                    (false, ..) => Decoded::Piece(piece),
                    (true, true, _) => Decoded::End,
                    (true, false, 0) => Decoded::NeedMore,
                    (true, false, _) => Decoded::Again,
                });
            }
        };
        if take == 0 {
            return Ok(Decoded::NeedMore);
        }
        let piece = self.taken..self.taken + take;
        self.taken += take;
        Ok(Decoded::Piece(piece))
    }

    /// Gives the connection back once nothing more will come on it; bytes beyond the response spoil it.
    fn finish_if_done(&mut self) {
        let done = match &self.body {
            Body::Done => true,
            Body::Chunked(decoder) => decoder.is_done(),
            _ => false,
        };
        if done
            && self.head().status != 101
            && let Some((stream, lease)) = self.connection.take()
        {
            let sent_all =
                self.upload_state.as_ref().is_none_or(|state| state.get() == UploadState::Complete);
            if self.taken < self.buffer.len() && !self.has_others_behind {
                lease.distrust();
            } else if self.keep_alive && sent_all && !self.has_others_behind {
                lease.give_back(stream);
            }
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
