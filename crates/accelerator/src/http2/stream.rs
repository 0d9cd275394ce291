//! The halves of a stream as the library has them.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{Request, header};
use tidegate_http::{Method, ResponseHead};

use crate::http2::heads;
use crate::streams::{self, Ended, Fault, Gone, Incoming, Outgoing, Shared};

/// Answers a request.
pub(super) fn begin(shared: &Rc<Shared>, request: Request<RecvStream>, respond: SendResponse<Bytes>) {
    let (parts, content) = request.into_parts();
    let has_content = !content.is_end_stream();
    let request = match heads::write_request(&parts, has_content) {
        Ok(head) => Ok(streams::Request {
            head: head.into(),
            method: Method::from_bytes(parts.method.as_str().as_bytes()),
            expects_continue: parts
                .headers
                .get(header::EXPECT)
                .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue")),
            content: has_content.then_some(Content(content)),
        }),
        Err(heads::Malformed) => Err(Ended::Failed(Fault::Malformed)),
    };
    streams::begin(
        shared,
        std::future::ready(request),
        Answer { shared: Rc::clone(shared), respond, content: None },
    );
}

/// A request's content.
struct Content(RecvStream);

impl Incoming for Content {
    async fn piece(&mut self) -> Option<Result<Bytes, Gone>> {
        self.0.data().await.map(|piece| piece.map_err(|_| Gone))
    }

    fn taken(&mut self, bytes: usize) -> Result<(), Gone> {
        self.0.flow_control().release_capacity(bytes).map_err(|_| Gone)
    }

    async fn trailers(&mut self) -> Result<Bytes, Gone> {
        let trailers = self.0.trailers().await.map_err(|_| Gone)?;
        Ok(heads::trailer_section(&trailers.unwrap_or_default()))
    }
}

/// What is answered.
struct Answer {
    shared: Rc<Shared>,
    respond: SendResponse<Bytes>,
    /// Once the head is sent, if there is more.
    content: Option<SendStream<Bytes>>,
}

impl Answer {
    /// Waits for room for `wanted` bytes: for how many there is some.
    async fn room_for(&mut self, wanted: usize) -> Result<usize, Gone> {
        let stream = self.content.as_mut().ok_or(Gone)?;
        stream.reserve_capacity(wanted);
        while stream.capacity() == 0 {
            poll_fn(|context| stream.poll_capacity(context)).await.ok_or(Gone)?.map_err(|_| Gone)?;
        }
        Ok(stream.capacity())
    }
}

impl Outgoing for Answer {
    fn poll_given_up(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
        match &mut self.content {
            Some(stream) => stream.poll_reset(context).map(|_| Ended::Cancelled),
            None => self.respond.poll_reset(context).map(|_| Ended::Cancelled),
        }
    }

    async fn interim(&mut self, head: &ResponseHead<'_>) -> Result<(), Gone> {
        match heads::response(head) {
            Some(head) => self.respond.send_informational(head).map_err(|_| Gone),
            None => Ok(()),
        }
    }

    async fn head(&mut self, head: &ResponseHead<'_>, is_all: bool) -> Result<(), Ended> {
        let mut head = heads::response(head).ok_or(Ended::Failed(Fault::Aborted))?;
        if self.shared.carrier.is_encrypted() {
            self.shared.core.with_plan(|plan| heads::offer(&plan.alternatives.http3, &mut head));
        }
        let stream = self.respond.send_response(head, is_all).map_err(|_| Gone)?;
        self.content = Some(stream).filter(|_| !is_all);
        Ok(())
    }

    async fn room(&mut self) -> Result<(), Gone> {
        self.room_for(1).await.map(drop)
    }

    async fn send(&mut self, data: &mut Bytes, is_last: bool) -> Result<usize, Gone> {
        // An end without content needs no room.
        let room = if data.is_empty() { 0 } else { self.room_for(data.len()).await?.min(data.len()) };
        let piece = data.split_to(room);
        let stream = self.content.as_mut().ok_or(Gone)?;
        stream.send_data(piece, is_last && data.is_empty()).map_err(|_| Gone)?;
        Ok(room)
    }

    async fn trailers(&mut self, fields: &[(&[u8], &[u8])]) -> Result<(), Gone> {
        let stream = self.content.as_mut().ok_or(Gone)?;
        stream.send_trailers(heads::trailers(fields.iter().copied())).map_err(|_| Gone)
    }

    /// The connection's task watches how much the client has taken.
    async fn delivered(&mut self, _: &Shared) -> Result<(), Ended> {
        Ok(())
    }

    fn reset(&mut self, fault: Fault) {
        let reason = match fault {
            Fault::Aborted => Reason::INTERNAL_ERROR,
            // RFC 9113 §8.1.1.
            Fault::Malformed => Reason::PROTOCOL_ERROR,
            Fault::Excessive | Fault::Unread(_) => Reason::ENHANCE_YOUR_CALM,
            Fault::Incomplete => Reason::CANCEL,
        };
        match &mut self.content {
            Some(stream) => stream.send_reset(reason),
            None => self.respond.send_reset(reason),
        }
    }
}
