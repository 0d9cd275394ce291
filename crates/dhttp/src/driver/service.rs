//! What a site offers, seen from the driver: a request goes in, a response comes out.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use tidegate_http::normalize::Personality;
use tidegate_http::{HeadLimits, Method, RequestHead, status_reason, write_chunk_header, write_last_chunk};
use tokio::sync::{Notify, mpsc};

use crate::server::Permit;

/// Pieces of a body that wait to be taken.
const BODY_PIECES: usize = 4;

/// The other side ended before the body did.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the body ended early")]
pub struct Aborted;

/// A body as it arrives: pieces of any size, then nothing more but trailers.
#[derive(Debug)]
pub struct Body {
    first: Option<Bytes>,
    rest: Option<Rest>,
    trailers: Bytes,
    is_late: bool,
    /// Of the client it is for, while it is still being made.
    permit: Option<Permit>,
}

enum Rest {
    Queue { pieces: mpsc::Receiver<Bytes>, both: Arc<Both> },
    Iterator(Box<dyn Iterator<Item = Bytes> + Send>),
}

/// What both ends of a queue know.
#[derive(Debug, Default)]
struct Both {
    /// The trailer section, set before the sender goes if the body is complete.
    trailers: OnceLock<Bytes>,
    /// The peer that it comes from was too slow for it to be complete.
    is_late: AtomicBool,
    /// There was nothing to take.
    demand: Notify,
}

impl std::fmt::Debug for Rest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Queue { .. } => f.write_str("Queue"),
            Self::Iterator(_) => f.write_str("Iterator"),
        }
    }
}

/// Where a body that is still being made is put. Dropping it without [`BodySender::end`] aborts the body.
#[derive(Debug)]
pub struct BodySender {
    pieces: mpsc::Sender<Bytes>,
    both: Arc<Both>,
}

impl BodySender {
    /// Hands on a piece, once there is room for it.
    ///
    /// # Errors
    /// Nobody wants the body any more.
    pub async fn send(&mut self, piece: Bytes) -> Result<(), Aborted> {
        self.pieces.send(piece).await.map_err(|_| Aborted)
    }

    /// Ends when all that was handed on has been taken and more is asked for. Whoever waits for that before a piece is made
    /// has none lying about for a peer that takes nothing.
    ///
    /// # Errors
    /// Nobody wants the body any more.
    pub async fn wanted(&self) -> Result<(), Aborted> {
        tokio::select! {
            biased;
            () = self.both.demand.notified() => Ok(()),
            () = self.pieces.closed() => Err(Aborted),
        }
    }

    /// Ends when nobody wants the body any more.
    pub async fn unwanted(&self) {
        self.pieces.closed().await;
    }

    /// The body is complete.
    pub fn end(self) {
        self.end_with(Bytes::new());
    }

    /// The body ends early because the peer that it comes from is too slow.
    pub fn give_up(self) {
        self.both.is_late.store(true, Ordering::Relaxed);
    }

    /// The body is complete, with these trailers: field lines, each with its CRLF (RFC 9112 §7.1.2).
    pub fn end_with(self, trailers: Bytes) {
        // Nobody else sets it.
        let _ = self.both.trailers.set(trailers);
    }
}

impl Body {
    /// A body that is there already.
    pub fn full(bytes: Bytes) -> Self {
        let first = Some(bytes).filter(|bytes| !bytes.is_empty());
        Self { first, rest: None, trailers: Bytes::new(), is_late: false, permit: None }
    }

    /// A body that is still being made.
    pub fn channel() -> (BodySender, Self) {
        Self::channel_after(Bytes::new())
    }

    /// The same, of which `first` is there already.
    pub fn channel_after(first: Bytes) -> (BodySender, Self) {
        let (sender, pieces) = mpsc::channel(BODY_PIECES);
        let both = Arc::<Both>::default();
        let rest = Some(Rest::Queue { pieces, both: Arc::clone(&both) });
        (BodySender { pieces: sender, both }, Self { rest, ..Self::full(first) })
    }

    /// `first`, then what is there already in pieces: taken one by one as the peer takes them.
    pub fn pieces(first: Bytes, rest: impl Iterator<Item = Bytes> + Send + 'static) -> Self {
        Self { rest: Some(Rest::Iterator(Box::new(rest))), ..Self::full(first) }
    }

    /// The next piece; `None` at the end.
    ///
    /// # Errors
    /// The body ended early.
    pub async fn next(&mut self) -> Option<Result<Bytes, Aborted>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        let piece = match self.rest.as_mut()? {
            Rest::Iterator(pieces) => pieces.next(),
            Rest::Queue { pieces, both } => match pieces.try_recv() {
                Ok(piece) => Some(piece),
                Err(_) => {
                    both.demand.notify_one();
                    pieces.recv().await
                }
            },
        };
        if let Some(piece) = piece {
            return Some(Ok(piece));
        }
        self.permit = None;
        let Some(Rest::Queue { both, .. }) = self.rest.take() else { return None };
        match both.trailers.get() {
            Some(trailers) => {
                self.trailers = trailers.clone();
                None
            }
            None => {
                self.is_late = both.is_late.load(Ordering::Relaxed);
                Some(Err(Aborted))
            }
        }
    }

    /// Whether the body ended early because the peer that it comes from was too slow.
    pub fn is_late(&self) -> bool {
        self.is_late
    }

    /// The trailer section, once [`Self::next`] has come to the end: field lines, each with its CRLF.
    pub fn trailers(&self) -> &Bytes {
        &self.trailers
    }

    /// The next piece if it is there already: nothing is waited for.
    pub(super) fn ready_now(&mut self) -> Poll<Option<Result<Bytes, Aborted>>> {
        // Whoever waits afterwards leaves a waker of its own.
        pin!(self.next()).poll(&mut Context::from_waker(Waker::noop()))
    }

    /// All of it, if that is not more than `limit_bytes`.
    ///
    /// # Errors
    /// The body ended early, or is longer.
    pub async fn collect(mut self, limit_bytes: usize) -> Result<Bytes, Aborted> {
        let mut whole = Vec::new();
        while let Some(piece) = self.next().await {
            let piece = piece?;
            if whole.len() + piece.len() > limit_bytes {
                return Err(Aborted);
            }
            whole.extend_from_slice(&piece);
        }
        Ok(whole.into())
    }

    /// A body that is still being made keeps its client's permit until then.
    pub(super) fn keep(&mut self, permit: Permit) {
        if matches!(self.rest, Some(Rest::Queue { .. })) {
            self.permit = Some(permit);
        }
    }

    /// Puts `bytes` in front of what is still to come.
    pub(super) fn unread(&mut self, bytes: Bytes) {
        debug_assert!(self.first.is_none());
        self.first = Some(bytes);
    }
}

/// Between whom a request is on its way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Arrival {
    /// The client's address and UDP port.
    pub client: SocketAddr,
    /// The address of this host that the client asked, where it listens on several.
    pub local: Option<IpAddr>,
    /// Whom the client asked, where that is somebody else: the request was taken on its way.
    pub server: Option<SocketAddr>,
}

/// A request for a [`Service`].
#[derive(Debug)]
pub struct Request {
    /// Between whom it is on its way.
    pub arrival: Arrival,
    /// The request head as received, with its final CRLF; well formed.
    pub head: Bytes,
    /// The body, without the chunked coding if there was one.
    pub body: Body,
}

/// A response from a [`Service`]: HTTP/1.1 as on the wire.
#[derive(Debug)]
pub struct Response {
    /// Length of the whole in bytes where it is known: the channel is chosen before the body is made.
    pub(super) total_bytes: Option<u64>,
    /// Head and body as they are sent. The body must be delimited by Content-Length or the chunked coding.
    pub(super) http: Body,
}

impl Response {
    /// A response as it is to be sent: head and body, the body delimited by Content-Length or the chunked coding.
    /// `total_bytes` is the length of all of it, where it is known beforehand.
    pub fn from_wire(http: Body, total_bytes: Option<u64>) -> Self {
        Self { total_bytes, http }
    }

    /// Head and body as they would be sent.
    pub fn into_wire(self) -> Body {
        self.http
    }

    /// A response with a body that is there already. `fields` must not state a framing.
    pub fn full(status: u16, fields: &[(&str, &str)], body: &[u8]) -> Self {
        let mut http = head(status, fields, Some(body.len() as u64));
        http.extend_from_slice(body);
        Self { total_bytes: Some(http.len() as u64), http: Body::full(http.into()) }
    }

    /// The bytes of a response that is there whole.
    pub(super) fn into_bytes(self) -> Bytes {
        self.http.first.unwrap_or_default()
    }

    /// The answer to HEAD for a body of this length.
    pub fn head_only(status: u16, fields: &[(&str, &str)], body_bytes: u64) -> Self {
        let http = head(status, fields, Some(body_bytes));
        Self { total_bytes: Some(http.len() as u64), http: Body::full(http.into()) }
    }

    /// A response whose body is still being made. Send exactly `body_bytes`, if stated; without it the body is chunked.
    pub fn streamed(status: u16, fields: &[(&str, &str)], body_bytes: Option<u64>) -> (ResponseSender, Self) {
        let http = head(status, fields, body_bytes);
        let total_bytes = body_bytes.map(|bytes| bytes.saturating_add(http.len() as u64));
        let (sender, mut body) = Body::channel();
        body.unread(http.into());
        (ResponseSender { sender, chunked: body_bytes.is_none() }, Self { total_bytes, http: body })
    }
}

/// Where the body of [`Response::streamed`] is put. Dropping it without [`ResponseSender::end`] aborts the response.
#[derive(Debug)]
pub struct ResponseSender {
    sender: BodySender,
    chunked: bool,
}

impl ResponseSender {
    /// Hands on a piece of the body, once there is room for it.
    ///
    /// # Errors
    /// The client is gone, or was answered in another way.
    pub async fn send(&mut self, piece: Bytes) -> Result<(), Aborted> {
        if !self.chunked {
            return self.sender.send(piece).await;
        }
        if piece.is_empty() {
            return Ok(());
        }
        let mut chunk = Vec::with_capacity(piece.len() + 24);
        write_chunk_header(piece.len(), &mut chunk);
        chunk.extend_from_slice(&piece);
        chunk.extend_from_slice(b"\r\n");
        self.sender.send(chunk.into()).await
    }

    /// The body is complete.
    pub async fn end(mut self) {
        if self.chunked {
            let mut last = Vec::new();
            write_last_chunk([], &mut last);
            // Nobody left to tell is no reason to abort.
            let _ = self.sender.send(last.into()).await;
        }
        self.sender.end();
    }
}

fn head(status: u16, fields: &[(&str, &str)], body_bytes: Option<u64>) -> Vec<u8> {
    let mut head = format!("HTTP/1.1 {status} {}\r\n", status_reason(status)).into_bytes();
    for (name, value) in fields {
        tidegate_http::forward::write_field(name.as_bytes(), value.as_bytes(), &mut head);
    }
    match body_bytes {
        Some(length) => {
            let length = length.to_string();
            tidegate_http::forward::write_field(b"Content-Length", length.as_bytes(), &mut head);
        }
        None => tidegate_http::forward::write_field(b"Transfer-Encoding", b"chunked", &mut head),
    }
    head.extend_from_slice(b"\r\n");
    head
}

/// How request heads are read.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// How request targets are normalized.
    pub personality: Personality,
    /// Sizes of a request head.
    pub limits: HeadLimits,
}

impl Default for Reading {
    fn default() -> Self {
        Self { personality: Personality::Strict, limits: HeadLimits::default() }
    }
}

/// How a response may go that is there already.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Room {
    /// Most bytes that go by UDP.
    pub most_bytes: usize,
    /// Whether longer ones go at once, by a connection that the server opens.
    pub connection: bool,
    /// Whether the client's address is proved. If not, it may be that of somebody who has asked for nothing.
    pub proved: bool,
}

/// What [`Service::respond_now`] can say of a response.
#[derive(Debug)]
pub enum Immediate {
    /// It was written, all of it.
    Written,
    /// It is too long for UDP, and there is a connection for it.
    Long(Response),
    /// It is too long for what there is room for.
    TooLong,
    /// It has to be made by [`Service::call`] first.
    Unknown,
}

/// What a service wants to know again of a connection.
pub type Note = u64;

/// A site. Every core has its own; what it calls may take its time, but a response that is there at the first poll is
/// sent without a task of its own.
pub trait Service: 'static {
    /// How request heads are read from now on; asked once for each batch of datagrams.
    fn reading(&self) -> Reading {
        Reading::default()
    }

    /// Whether anybody's datagrams are to be ignored just now; asked once for each batch of datagrams.
    fn blocks(&self) -> bool {
        false
    }

    /// Whether datagrams of this source are to be ignored, if [`Service::blocks`].
    fn is_blocked(&self, source: IpAddr) -> bool {
        let _ = source;
        false
    }

    /// Whether a connection that a client has opened to `local` is served. If so there is a note, to be given back to
    /// [`Service::part`] when it is closed.
    fn meet(&self, peer: SocketAddr, local: SocketAddr) -> Option<Note> {
        let _ = (peer, local);
        Some(Note::default())
    }

    /// A connection is closed that was met.
    fn part(&self, peer: SocketAddr, note: Note) {
        let _ = (peer, note);
    }

    /// Writes the response to a request by UDP if it is there already and there is room for it, with its body and
    /// without a transfer coding. This is how a cache hit costs neither a task nor a copy of the request.
    fn respond_now(
        &self,
        arrival: &Arrival,
        head: &RequestHead<'_>,
        room: Room,
        http: &mut Vec<u8>,
    ) -> Immediate {
        let _ = (arrival, head, room, http);
        Immediate::Unknown
    }

    /// Answers one request. Dropping the future gives the request up.
    fn call(&self, request: Request) -> impl Future<Output = Response> + 'static;
}

/// The method of a well-formed request head.
pub fn method_of(head: &[u8]) -> Method {
    Method::from_bytes(head.split(|byte| *byte == b' ').next().unwrap_or(b""))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn wire(response: Response) -> Result<Bytes, Aborted> {
        response.http.collect(10_000).await
    }

    #[tokio::test]
    async fn a_full_response_states_its_length() {
        let response = Response::full(404, &[("Content-Type", "text/plain")], b"none");
        assert_eq!(response.total_bytes, Some(75));
        let http = wire(response).await.unwrap();
        assert_eq!(
            http,
            "HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\nnone"
        );
    }

    #[tokio::test]
    async fn a_streamed_response_of_unknown_length_is_chunked() {
        let (mut sender, response) = Response::streamed(200, &[], None);
        sender.send(Bytes::from_static(b"abc")).await.unwrap();
        sender.send(Bytes::new()).await.unwrap();
        sender.end().await;
        assert!(wire(response).await.unwrap().ends_with(b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n"));
    }

    #[tokio::test]
    async fn a_piece_is_wanted_once_all_before_it_is_taken_and_more_is_asked_for() {
        let (mut sender, mut body) = Body::channel();
        let is_wanted = |sender: &BodySender| {
            pin!(sender.wanted()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
        };
        sender.send(Bytes::from_static(b"head")).await.unwrap();
        assert!(!is_wanted(&sender));
        assert_eq!(body.next().await, Some(Ok(Bytes::from_static(b"head"))));
        assert!(!is_wanted(&sender), "it may be all that there is room for");
        assert!(body.ready_now().is_pending());
        assert!(is_wanted(&sender));
        assert!(!is_wanted(&sender), "one piece");
        drop(body);
        assert_eq!(sender.wanted().await, Err(Aborted));
    }

    #[tokio::test]
    async fn a_sender_that_is_dropped_aborts_the_body_even_when_the_queue_is_full() {
        let (mut sender, response) = Response::streamed(200, &[], Some(100));
        for _ in 0..BODY_PIECES {
            sender.send(Bytes::from_static(b"abc")).await.unwrap();
        }
        drop(sender);
        assert_eq!(wire(response).await, Err(Aborted));
    }
}
