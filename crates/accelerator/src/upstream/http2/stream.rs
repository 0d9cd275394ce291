//! One request and its response.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use h2::client::ResponseFuture;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, Method};
use tidegate_http::write_chunk_header;

use crate::data_core::clock::monotonic_ms;
use crate::upstream::UpstreamError;
use crate::upstream::http2::heads::{self, Coding};
use crate::upstream::http2::{GIVEN_UP, Session};

/// How long the end of a stream is waited for of whose response nothing more can come.
const REST: Duration = Duration::from_secs(1);

/// A stream of a connection: a request goes out by it in parts, and the response comes as HTTP/1.1 has it.
pub(crate) struct Http2Stream {
    session: Rc<Session>,
    request: RefCell<Option<SendStream<Bytes>>>,
    response: RefCell<Incoming>,
}

struct Incoming {
    from: From,
    is_to_head: bool,
    /// What has come and was not taken yet.
    arrived: Bytes,
}

/// What is waited for.
enum From {
    /// Nothing: the request was not sent yet.
    Nowhere,
    Head(ResponseFuture),
    Content(RecvStream, Coding),
    Trailers(RecvStream, Coding),
    /// All of the response is here.
    End,
}

impl Http2Stream {
    pub(super) fn new(session: Rc<Session>) -> Self {
        session.streams.set(session.streams.get() + 1);
        let response = Incoming { from: From::Nowhere, is_to_head: false, arrived: Bytes::new() };
        Self { session, request: RefCell::default(), response: RefCell::new(response) }
    }

    pub(super) fn session(&self) -> &Rc<Session> {
        &self.session
    }

    /// Sends a request's head, with its final empty line. `has_content` says whether content follows, which is sent without a
    /// coding.
    pub(crate) fn send_head(&self, head: &[u8], has_content: bool) -> Result<(), UpstreamError> {
        let request = heads::read_request(head, self.session.is_encrypted).map_err(UpstreamError::NoHttp2)?;
        let is_to_head = *request.method() == Method::HEAD;
        let mut requests = self.session.requests.clone();
        let (response, stream) = requests
            .send_request(request, !has_content)
            .map_err(|error| UpstreamError::Untouched(io::Error::other(error)))?;
        *self.request.borrow_mut() = has_content.then_some(stream);
        let mut incoming = self.response.borrow_mut();
        (incoming.from, incoming.is_to_head) = (From::Head(response), is_to_head);
        Ok(())
    }

    /// Sends content, as far as the server takes it.
    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut request = self.request.borrow_mut();
        let stream = request.as_mut().ok_or(ErrorKind::BrokenPipe)?;
        stream.reserve_capacity(bytes.len());
        let Some(piece) = bytes.get(..stream.capacity().min(bytes.len())).filter(|piece| !piece.is_empty())
        else {
            return Err(ErrorKind::WouldBlock.into());
        };
        stream.send_data(Bytes::copy_from_slice(piece), false).map_err(of_library)?;
        Ok(piece.len())
    }

    /// Waits until the server takes more of the content, of which it took nothing when it was offered last.
    pub(crate) async fn writable(&self) -> io::Result<()> {
        let _stalled = Stalled::new(&self.session);
        poll_fn(|context| {
            let mut request = self.request.borrow_mut();
            let Some(stream) = request.as_mut() else { return Poll::Ready(Ok(())) };
            loop {
                if stream.capacity() > 0 {
                    return Poll::Ready(Ok(()));
                }
                match ready!(stream.poll_capacity(context)) {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Poll::Ready(Err(of_library(error))),
                    None => return Poll::Ready(Err(ErrorKind::BrokenPipe.into())),
                }
            }
        })
        .await
    }

    /// Ends the content, with trailer fields if there are any.
    pub(crate) fn end<'t>(&self, trailers: impl Iterator<Item = (&'t [u8], &'t [u8])>) -> io::Result<()> {
        let Some(mut stream) = self.request.borrow_mut().take() else { return Ok(()) };
        let trailers: HeaderMap = crate::http2::trailers(trailers);
        let ended = match trailers.is_empty() {
            true => stream.send_data(Bytes::new(), true),
            false => stream.send_trailers(trailers),
        };
        ended.map_err(of_library)
    }

    /// Reads what has come of the response, as HTTP/1.1 has it; 0 at its end.
    pub(crate) fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut incoming = self.response.borrow_mut();
        if let Poll::Ready(arrived) = incoming.poll(&mut Context::from_waker(Waker::noop())) {
            arrived?;
            let length = incoming.arrived.len().min(bytes.len());
            incoming.arrived.copy_to_slice(&mut bytes[..length]);
            return Ok(length);
        }
        Err(ErrorKind::WouldBlock.into())
    }

    pub(crate) async fn readable(&self) -> io::Result<()> {
        poll_fn(|context| self.response.borrow_mut().poll(context)).await
    }

    /// All that anybody wants of the response is here, but perhaps not its end: a server is not told that it is not wanted.
    pub(crate) fn finish(self: Box<Self>) {
        let is_whole = matches!(self.response.borrow().from, From::End);
        if !is_whole && self.request.borrow().is_none() {
            tokio::task::spawn_local(async move {
                let end = async { while matches!(self.skip().await, Ok(true)) {} };
                let _ = tokio::time::timeout(REST, end).await;
            });
        }
    }

    /// Waits for more, and throws it away; whether there was any.
    async fn skip(&self) -> io::Result<bool> {
        self.readable().await?;
        Ok(!std::mem::take(&mut self.response.borrow_mut().arrived).is_empty())
    }
}

impl Drop for Http2Stream {
    fn drop(&mut self) {
        let Session { streams, idle_since_ms, given_up, is_retired, .. } = &*self.session;
        streams.set(streams.get() - 1);
        idle_since_ms.set(monotonic_ms());
        match self.response.get_mut().from {
            From::Nowhere | From::End => return,
            // A server that is silent may be gone, which nobody would learn of before the next one had waited in vain.
            From::Head(_) => is_retired.set(true),
            From::Content(..) | From::Trailers(..) => given_up.set(given_up.get() + 1),
        }
        if given_up.get() >= GIVEN_UP {
            is_retired.set(true);
        }
    }
}

/// For as long as a request's content waits for room.
struct Stalled<'s>(&'s Session);

impl<'s> Stalled<'s> {
    fn new(session: &'s Session) -> Self {
        session.stalled.set(session.stalled.get() + 1);
        Self(session)
    }
}

impl Drop for Stalled<'_> {
    fn drop(&mut self) {
        self.0.stalled.set(self.0.stalled.get() - 1);
    }
}

impl Incoming {
    /// Waits until something has arrived, or is known to be the end.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.arrived.is_empty() {
            match &mut self.from {
                From::Nowhere | From::End => return Poll::Ready(Ok(())),
                From::Head(response) => {
                    let mut out = Vec::with_capacity(512);
                    if let Poll::Ready(Some(interim)) = response.poll_informational(context) {
                        let interim = interim.map_err(of_library)?;
                        heads::write_response(&interim, true, self.is_to_head, &mut out);
                    } else {
                        let response = ready!(Pin::new(response).poll(context)).map_err(of_library)?;
                        // §8.6: there is no other protocol to change to.
                        if response.status() == http::StatusCode::SWITCHING_PROTOCOLS {
                            return Poll::Ready(Err(ErrorKind::InvalidData.into()));
                        }
                        let is_bare = response.body().is_end_stream();
                        let coding = heads::write_response(&response, is_bare, self.is_to_head, &mut out);
                        self.from = From::Content(response.into_body(), coding);
                    }
                    self.arrived = out.into();
                }
                From::Content(content, coding) => match ready!(content.poll_data(context)) {
                    Some(Ok(piece)) => {
                        content.flow_control().release_capacity(piece.len()).map_err(of_library)?;
                        self.arrived = match coding {
                            Coding::Chunked if piece.is_empty() => piece,
                            Coding::Plain => piece,
                            Coding::Chunked => in_chunk(&piece),
                        };
                    }
                    Some(Err(error)) => return Poll::Ready(Err(of_library(error))),
                    None => {
                        let From::Content(content, coding) = std::mem::replace(&mut self.from, From::End)
                        else {
                            continue;
                        };
                        self.from = From::Trailers(content, coding);
                    }
                },
                From::Trailers(content, coding) => {
                    let trailers = ready!(content.poll_trailers(context)).map_err(of_library)?;
                    if *coding == Coding::Chunked {
                        let mut out = Vec::new();
                        heads::write_end(trailers.as_ref(), &mut out);
                        self.arrived = out.into();
                    }
                    self.from = From::End;
                }
            }
        }
        Poll::Ready(Ok(()))
    }
}

fn in_chunk(piece: &[u8]) -> Bytes {
    let mut out = Vec::with_capacity(piece.len() + 16);
    write_chunk_header(piece.len(), &mut out);
    out.extend_from_slice(piece);
    out.extend_from_slice(b"\r\n");
    out.into()
}

/// The server has nothing of a request, which can go elsewhere whatever it asks for (RFC 9113 §8.7).
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Untouched(h2::Error);

/// Whether what went wrong says that the server has done nothing about the request.
pub(crate) fn is_untouched(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|error| error.is::<Untouched>())
}

/// What has gone wrong with a stream or its connection.
pub(super) fn of_library(error: h2::Error) -> io::Error {
    let is_refused =
        error.is_remote() && (error.is_go_away() || error.reason() == Some(Reason::REFUSED_STREAM));
    if is_refused {
        return io::Error::new(ErrorKind::ConnectionAborted, Untouched(error));
    }
    if error.is_io() {
        return error.into_io().unwrap_or_else(|| ErrorKind::BrokenPipe.into());
    }
    io::Error::new(ErrorKind::InvalidData, error)
}
