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

/// Bytes that are sent at once: those of the largest record of TLS (RFC 8446 §5.1).
const GATHERED_BYTES: usize = 16 * 1024;

/// What is sent on a connection.
pub(super) struct Output {
    core: Rc<DataCore>,
    client: Rc<Client>,
    /// What waits to be sent. It takes no memory while it is empty.
    gathered: RefCell<Vec<u8>>,
    sent: Cell<u64>,
}

impl Output {
    pub(super) fn new(core: &Rc<DataCore>, client: &Rc<Client>) -> Rc<Self> {
        Rc::new(Self {
            core: Rc::clone(core),
            client: Rc::clone(client),
            gathered: RefCell::default(),
            sent: Cell::new(0),
        })
    }

    /// Bytes that the socket has taken.
    pub(super) fn sent(&self) -> u64 {
        self.sent.get()
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
        self.sent.set(self.sent.get() + at as u64);
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
            ready!(self.poll_send(context))?;
        }
        let mut gathered = self.gathered.borrow_mut();
        if gathered.capacity() == 0 {
            gathered.reserve_exact(GATHERED_BYTES);
        }
        let before = gathered.len();
        for slice in slices {
            let room = GATHERED_BYTES - gathered.len();
            gathered.extend_from_slice(&slice[..slice.len().min(room)]);
        }
        Poll::Ready(Ok(gathered.len() - before))
    }

    fn stream(&self) -> ClientStream<'_> {
        ClientStream { client: &self.client, clients: &self.core.clients }
    }
}

/// Both directions of a connection.
pub(super) struct Socket(pub Rc<Output>);

impl AsyncRead for Socket {
    /// A client that never stops sending does not keep the core from others.
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let turn = ready!(coop::poll_proceed(context));
        Pin::new(&mut self.0.stream()).poll_read(context, buffer).map(|read| {
            turn.made_progress();
            read
        })
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

    /// More may follow at once: [`Output::sending`] knows when it does not.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.0.poll_send(context))?;
        Pin::new(&mut self.0.stream()).poll_shutdown(context)
    }
}
