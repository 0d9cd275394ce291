//! The client's socket, or what TLS makes of it, as the library takes it.
//!
//! The library flushes after each frame of content. Frames are gathered here instead, and go out when there is enough of
//! them for a TLS record or nothing more to add: one system call and one record for what many streams have to say.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop;

use crate::data_core::DataCore;
use crate::data_core::client::{Client, ClientStream};
use crate::http2::frames::{Received, Sent};
use crate::streams::borne;

/// Bytes that are sent at once: those of the largest record of TLS (RFC 8446 §5.1).
const GATHERED_BYTES: usize = 16 * 1024;
/// A connection below the library.
pub(super) struct Line {
    core: Rc<DataCore>,
    client: Rc<Client>,
    /// What waits to be sent. It takes no memory while it is empty.
    gathered: RefCell<Vec<u8>>,
    /// The library waits for room, and has perhaps not looked at all that has come.
    is_blocked: Cell<bool>,
    sent_bytes: Cell<u64>,
    sent: RefCell<Sent>,
    received: RefCell<Received>,
    /// Streams that the library has handed on, and those of which it was told that it had refused them.
    accepted: Cell<u64>,
    refused: Cell<u64>,
    began_ms: u64,
}

impl Line {
    pub(super) fn new(core: &Rc<DataCore>, client: &Rc<Client>) -> Rc<Self> {
        Rc::new(Self {
            core: Rc::clone(core),
            client: Rc::clone(client),
            gathered: RefCell::default(),
            is_blocked: Cell::new(false),
            sent_bytes: Cell::new(0),
            sent: RefCell::new(Sent::new()),
            received: RefCell::new(Received::new()),
            accepted: Cell::new(0),
            refused: Cell::new(0),
            began_ms: core.clock.elapsed_ms(),
        })
    }

    /// Bytes that the socket has taken.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.sent_bytes.get()
    }

    /// The library has handed on a stream.
    pub(super) fn accepted(&self) {
        self.accepted.set(self.accepted.get() + 1);
    }

    /// Ends when the library has refused streams by itself: their heads are malformed or too large. It does not say so, but
    /// those that have come and were not handed on are these. To be asked when nothing is there to be accepted.
    pub(super) async fn refused(&self) -> u64 {
        poll_fn(|_| {
            let gone = self.accepted.get() + self.refused.get() + self.sent.borrow().turned_away;
            match self.received.borrow().opened.saturating_sub(gone) {
                0 => Poll::Pending,
                _ if self.is_blocked.get() => Poll::Pending,
                more => {
                    self.refused.set(self.refused.get() + more);
                    Poll::Ready(more)
                }
            }
        })
        .await
    }

    /// Ends when [`Self::is_flood`] is true.
    pub(super) async fn flooded(&self) {
        poll_fn(|_| if self.is_flood() { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    /// Whether the client sends little but frames that ask for nothing, each of which is work (RFC 9113 §10.5).
    pub(super) fn is_flood(&self) -> bool {
        let stayed_ms = self.core.clock.elapsed_ms() - self.began_ms;
        self.received.borrow().idle() > borne(self.accepted.get(), self.sent_bytes.get(), stayed_ms)
    }

    /// What `future` comes to, which works on the connection. Whenever it waits, what is gathered is sent: without this
    /// nothing is.
    pub(super) async fn sending<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        poll_fn(|context| {
            let polled = future.as_mut().poll(context);
            if polled.is_pending() {
                // Who has reset the connection is found by the next read or write.
                let _ = self.poll_send(context);
            }
            polled
        })
        .await
    }

    fn poll_send(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut gathered = self.gathered.borrow_mut();
        let mut at = 0;
        let ended = loop {
            if at == gathered.len() {
                break Poll::Ready(Ok(()));
            }
            match Pin::new(&mut self.stream()).poll_write(context, &gathered[at..]) {
                Poll::Ready(Ok(length)) => at += length,
                Poll::Ready(Err(error)) => break Poll::Ready(Err(error)),
                Poll::Pending => break Poll::Pending,
            }
        };
        self.sent_bytes.set(self.sent_bytes.get() + at as u64);
        if at == gathered.len() {
            *gathered = Vec::new();
        } else {
            gathered.drain(..at);
        }
        ended
    }

    /// Takes as many of these bytes as there is room for, which is made when there is none.
    fn poll_gather(&self, context: &mut Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if self.gathered.borrow().len() >= GATHERED_BYTES {
            self.is_blocked.set(true);
            ready!(self.poll_send(context))?;
        }
        self.is_blocked.set(false);
        let mut gathered = self.gathered.borrow_mut();
        if gathered.capacity() == 0 {
            gathered.reserve_exact(GATHERED_BYTES);
        }
        let before = gathered.len();
        for slice in slices {
            let room = GATHERED_BYTES - gathered.len();
            gathered.extend_from_slice(&slice[..slice.len().min(room)]);
        }
        self.sent.borrow_mut().follow(&gathered[before..]);
        Poll::Ready(Ok(gathered.len() - before))
    }

    fn stream(&self) -> ClientStream<'_> {
        ClientStream { client: &self.client, clients: &self.core.clients }
    }
}

/// Both directions of a connection.
pub(super) struct Socket(pub Rc<Line>);

impl AsyncRead for Socket {
    /// A client that never stops sending does not keep the core from others.
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let turn = ready!(coop::poll_proceed(context));
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.0.stream()).poll_read(context, buffer));
        turn.made_progress();
        self.0.received.borrow_mut().follow(&buffer.filled()[before..]);
        Poll::Ready(read)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_gather(context, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_gather(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// More may follow at once: [`Line::sending`] knows when it does not.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.0.poll_send(context))?;
        Pin::new(&mut self.0.stream()).poll_shutdown(context)
    }
}
