//! HTTP/2 to servers (RFC 9113): many requests at once on one connection, none of which waits for another.
//!
//! To all others each stream is a connection of its own for one exchange, whose response comes as HTTP/1.1 has it: so there
//! is one way to read, store and pass on responses, whatever brought them.

mod heads;
mod socket;
mod stream;

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use h2::client::{Builder, Connection, SendRequest};
use tidegate_http::HeadLimits;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::data_core::clock::monotonic_ms;
use crate::upstream::http2::socket::Socket;
use crate::upstream::{Stream, UpstreamError};

pub(crate) use stream::{Http2Stream, is_untouched};

/// Requests that are under way on a connection; a server may want fewer (RFC 9113 §5.1.2).
const STREAMS: u32 = 100;
/// What there is in the place of their number until the server has said it.
const NOT_SAID: usize = u32::MAX as usize + 1;
/// What a server may send of a response before somebody wants it.
const STREAM_WINDOW_BYTES: u32 = 128 * 1024;
/// Of all that are under way: a client that does not take its response holds up no other's.
const CONNECTION_WINDOW_BYTES: u32 = STREAM_WINDOW_BYTES * STREAMS;
/// Bytes of each request's content that wait for the connection.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Servers that take fewer are asked on several connections that are made at once.
const NARROW: usize = 16;
/// Requests given up, after which a connection gets no more: servers end one on which many are (CVE-2023-44487), with all that
/// others have asked for.
const GIVEN_UP: u32 = 50;
/// How long what ends a connection may take to be sent.
const GOODBYE: Duration = Duration::from_secs(1);

/// The connections to one server.
#[derive(Default)]
pub(super) struct Sessions {
    open: RefCell<Vec<Rc<Session>>>,
    /// Held by who connects: others that find no room meanwhile share what comes of it.
    connecting: tokio::sync::Mutex<()>,
    /// The server takes so few requests on a connection that sharing one is not worth a wait.
    has_narrow: Cell<bool>,
    /// The server has chosen HTTP/1.1, where each request has a connection of its own.
    is_http1: Cell<bool>,
}

impl Sessions {
    /// A stream of a connection that has room for one.
    pub(super) fn stream(&self, has_content: bool) -> Option<Stream> {
        // Mostly the first will do. Those that are of no use any more are swept out.
        let open = self.open.borrow();
        open.iter().find(|session| session.has_room(has_content) && session.is_usable()).map(Session::stream)
    }

    /// A stream of a new connection, which `connect` makes, or of one that somebody else has made meanwhile.
    pub(super) async fn connect(
        &self,
        patience: Duration,
        has_content: bool,
        connect: impl Future<Output = Result<Stream, UpstreamError>>,
    ) -> Result<Stream, UpstreamError> {
        if self.is_http1.get() {
            return Ok(self.note(connect.await?));
        }
        let turn = timeout(patience, self.connecting.lock()).await.map_err(|_| UpstreamError::Busy)?;
        if let Some(stream) = self.stream(has_content) {
            return Ok(stream);
        }
        let _turn = (!self.has_narrow.get()).then_some(turn);
        Ok(self.note(connect.await?))
    }

    fn note(&self, stream: Stream) -> Stream {
        self.is_http1.set(stream.http2().is_none());
        if let Some(stream) = stream.http2() {
            self.has_narrow.set(stream.session().requests.current_max_send_streams() < NARROW);
            self.open.borrow_mut().push(Rc::clone(stream.session()));
        }
        stream
    }

    /// Ends connections that nobody uses, beyond so many in all.
    pub(super) fn trim(&self, most: usize) {
        let mut open = self.open.borrow_mut();
        let mut surplus = open.len().saturating_sub(most);
        open.retain(|session| {
            let goes = surplus > 0 && session.streams.get() == 0;
            surplus -= usize::from(goes);
            !goes
        });
    }

    /// Ends the connections that nobody has used for so long.
    pub(super) fn sweep(&self, idle_ms: u64) {
        let oldest_ms = monotonic_ms().saturating_sub(idle_ms);
        let is_idle =
            |session: &Session| session.streams.get() == 0 && session.idle_since_ms.get() < oldest_ms;
        self.open.borrow_mut().retain(|session| session.is_usable() && !is_idle(session));
    }
}

/// One connection.
pub(super) struct Session {
    requests: SendRequest<Bytes>,
    is_encrypted: bool,
    /// Requests under way.
    streams: Cell<usize>,
    /// Since when there are none.
    idle_since_ms: Cell<u64>,
    /// Requests under way that have content for which the server has no room.
    stalled: Cell<usize>,
    /// Requests that were given up before their end.
    given_up: Cell<u32>,
    /// It gets no more requests: one of them had no answer, or many were given up.
    is_retired: Cell<bool>,
    /// Tells the connection's task that nobody needs it any more.
    _wanted: oneshot::Sender<Infallible>,
}

impl Session {
    /// Begins to speak HTTP/2 on a connection, and waits until the server does.
    pub(super) async fn start(connection: Stream) -> io::Result<Rc<Self>> {
        let is_encrypted = matches!(connection, Stream::Tls(_));
        let mut builder = Builder::new();
        builder
            .enable_push(false)
            .initial_max_send_streams(NOT_SAID)
            .initial_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_header_list_size(HeadLimits::default().head_bytes)
            .max_send_buffer_size(SEND_BUFFER_BYTES);
        let handshake = builder.handshake(Socket::new(connection)).await;
        let (requests, mut connection) = handshake.map_err(stream::of_library)?;
        // How many requests it takes at once is among the first that it says: more would be refused.
        poll_fn(|context| match Pin::new(&mut connection).poll(context) {
            Poll::Ready(ended) => Poll::Ready(ended.and(Err(Reason::NO_ERROR.into()))),
            Poll::Pending if requests.current_max_send_streams() == NOT_SAID => Poll::Pending,
            Poll::Pending => Poll::Ready(Ok(())),
        })
        .await
        .map_err(no_http2)?;
        if requests.current_max_send_streams() == 0 {
            return Err(io::Error::other("the server takes no requests"));
        }
        let (wanted, unwanted) = oneshot::channel();
        tokio::task::spawn_local(run(connection, unwanted));
        Ok(Rc::new(Self {
            requests,
            is_encrypted,
            streams: Cell::new(0),
            stalled: Cell::new(0),
            given_up: Cell::new(0),
            idle_since_ms: Cell::new(monotonic_ms()),
            is_retired: Cell::new(false),
            _wanted: wanted,
        }))
    }

    /// One that is to carry a request.
    pub(super) fn stream(self: &Rc<Self>) -> Stream {
        Stream::Http2(Box::new(Http2Stream::new(Rc::clone(self))))
    }

    /// Whether it is there, and the server has not said that it is going to end it (RFC 9113 §6.8).
    fn is_usable(&self) -> bool {
        let ready = self.requests.clone().poll_ready(&mut Context::from_waker(Waker::noop()));
        !self.is_retired.get() && matches!(ready, Poll::Ready(Ok(())))
    }

    /// Content waits for room that all requests of a connection share: where some waits already, more would wait behind it.
    fn has_room(&self, has_content: bool) -> bool {
        let is_stalled = has_content && self.stalled.get() > 0;
        !is_stalled && self.streams.get() < self.requests.current_max_send_streams().min(STREAMS as usize)
    }
}

fn no_http2(error: h2::Error) -> io::Error {
    io::Error::other(format!("the server does not speak HTTP/2: {error}"))
}

/// Works on a connection until it ends, or nobody needs it.
async fn run(connection: Connection<Socket, Bytes>, unwanted: oneshot::Receiver<Infallible>) {
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        biased;
        ended = &mut connection => Ok(ended),
        // A server that does not listen is not waited for.
        _ = unwanted => timeout(GOODBYE, connection).await,
    };
    if let Ok(Err(error)) = ended {
        tracing::debug!(%error, "HTTP/2 to a server ends");
    }
}
