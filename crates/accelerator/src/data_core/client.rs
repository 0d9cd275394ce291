//! One client's connection: its socket, TLS on it if there is any, and what the kernel has said of it.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::{self, IoSlice, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags};
use tidegate_core::NodeId;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::data_core::clients::Clients;
use crate::session::Partial;
use crate::session::deadlines::Slot;
use crate::streams::{Carrier, Debts};
use crate::tls::{self, HandshakeError};

/// Something to be read, the end of it included.
pub(super) const READ: u8 = 1;
/// Room to write.
pub(super) const WRITE: u8 = 2;
/// The client sends no more; what it sent is still to be read.
pub(super) const ENDED: u8 = 4;
/// The client has reset the connection.
pub(super) const FAILED: u8 = 8;

/// What a connection with HTTP/2 begins with (RFC 9113 §3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// One client's connection.
pub(crate) struct Client {
    pub(super) socket: TcpStream,
    peer: SocketAddr,
    /// A PROXY header names that peer.
    introduced: Introduced,
    /// What the kernel has said and nobody has used up yet.
    pub(super) ready: Cell<u8>,
    pub(super) watched: Cell<Watched>,
    /// A task answers it.
    pub(super) is_busy: Cell<bool>,
    /// Its request is with an upstream, or on its way there.
    pub(crate) has_upstream: Cell<bool>,
    /// Its streams that wait for it, where it has several.
    debts: Debts,
    /// Whether its first bytes say which version of HTTP it speaks.
    may_speak_http2: Cell<bool>,
    /// It is in [`Clients::again`].
    pub(super) is_queued: Cell<bool>,
    /// Of that task.
    pub(super) waker: RefCell<Option<Waker>>,
    /// A head of which only a part has arrived.
    pub(crate) pending: RefCell<Option<Box<Partial>>>,
    pub(crate) slot: Slot,
    /// Its address's place in the prefix tree, if anybody watches.
    pub(crate) place: Option<NodeId>,
    /// What stands between the socket and HTTP, if anything does.
    tls: Option<Box<RefCell<tls::Session>>>,
}

/// What a connection between requests takes.
const _: () = assert!(size_of::<Client>() <= 128);

/// Whether a connection began with a PROXY header, and whom that names.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Introduced {
    /// There was none.
    No,
    /// Its client, who is the connection's peer from then on.
    Named,
    /// Nobody: the peer is the proxy, and the client may be anybody.
    Unnamed,
}

/// What is spoken on a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Spoken {
    Http1,
    Http2,
}

/// What the kernel was asked to tell.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum Watched {
    /// Nothing yet.
    No,
    /// What arrives.
    Input,
    /// What arrives, and when there is room to write again.
    Both,
}

impl Client {
    pub(crate) fn new(
        socket: TcpStream,
        peer: SocketAddr,
        introduced: Introduced,
        place: Option<NodeId>,
        (tls, may_speak_http2): (Option<tls::Session>, bool),
    ) -> Self {
        Self {
            tls: tls.map(|session| Box::new(RefCell::new(session))),
            socket,
            peer,
            introduced,
            ready: Cell::new(READ | WRITE),
            watched: Cell::new(Watched::No),
            is_busy: Cell::new(false),
            has_upstream: Cell::new(false),
            debts: Debts::default(),
            may_speak_http2: Cell::new(may_speak_http2),
            is_queued: Cell::new(false),
            waker: RefCell::new(None),
            pending: RefCell::new(None),
            slot: Slot::default(),
            place,
        }
    }

    /// The other end, or whom the proxy there has named as its client.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Whether packets come from somebody else: rules below HTTP have not met the peer.
    pub(crate) fn is_named(&self) -> bool {
        self.introduced == Introduced::Named
    }

    /// How the connection began.
    pub(crate) fn introduced(&self) -> Introduced {
        self.introduced
    }

    /// This end.
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Whether a read may find something.
    pub(crate) fn is_readable(&self) -> bool {
        self.ready.get() & (READ | ENDED) != 0
    }

    /// Whether the client leaves the socket full.
    pub(crate) fn is_stuck(&self) -> bool {
        self.watched.get() == Watched::Both && self.ready.get() & WRITE == 0
    }

    /// How many connections to upstreams it keeps waiting, for a body or by not reading.
    pub(crate) fn stalled_at_upstream(&self) -> usize {
        let is_slow = self.has_upstream.get() && (self.slot.awaits_body() || self.is_stuck());
        usize::from(is_slow) + usize::from(self.debts.stalled())
    }

    /// Whether one of its streams waits for it: for content of a request, or for room for content of a response.
    pub(crate) fn is_owing(&self) -> bool {
        self.debts.owing() > 0
    }

    /// Whether a task answers this client now.
    pub(crate) fn is_busy(&self) -> bool {
        self.is_busy.get()
    }

    /// Whether its connection is one with TLS.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether what comes is known to be HTTP/1 as it stands.
    #[inline]
    pub(crate) fn speaks_plain_http1(&self) -> bool {
        self.tls.is_none() && !self.may_speak_http2.get()
    }

    /// Whether it has sent records of TLS for their own sake.
    pub(crate) fn is_tls_flood(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.borrow().is_flood())
    }

    /// Goes on with the handshake of TLS, if there is one to be made: what is spoken once the peers have agreed.
    #[inline]
    pub(crate) fn agree(&self) -> Result<Spoken, HandshakeError> {
        match &self.tls {
            None if self.may_speak_http2.get() => self.look_at_preface(),
            None => Ok(Spoken::Http1),
            Some(tls) => self.shake_hands(&mut tls.borrow_mut()),
        }
    }

    /// Looks whether a connection begins as one with HTTP/2 does (RFC 9113 §3.4), and leaves what is there to be read.
    #[cold]
    fn look_at_preface(&self) -> Result<Spoken, HandshakeError> {
        let mut start = [0; PREFACE.len()];
        let seen = match net::recv(&self.socket, &mut start[..], RecvFlags::PEEK) {
            Ok((seen, _)) => seen,
            Err(Errno::AGAIN) => {
                self.used_up(READ | ENDED);
                return Err(HandshakeError::Io(Errno::AGAIN.into()));
            }
            // Whoever reads finds it out.
            Err(_) => return Ok(Spoken::Http1),
        };
        let start = start.get(..seen).unwrap_or(&[]);
        let is_all = seen == PREFACE.len() || seen == 0 || self.ready.get() & ENDED != 0;
        if !is_all && PREFACE.starts_with(start) {
            // Whatever comes is told as a new event, though what was seen is still there (epoll(7), edge-triggered).
            self.used_up(READ);
            return Err(HandshakeError::Io(io::ErrorKind::WouldBlock.into()));
        }
        self.may_speak_http2.set(false);
        Ok(if start == &PREFACE[..] { Spoken::Http2 } else { Spoken::Http1 })
    }

    fn shake_hands(&self, tls: &mut tls::Session) -> Result<Spoken, HandshakeError> {
        match tls.shake_hands(&self.socket) {
            Ok(()) if tls.speaks_http2() => Ok(Spoken::Http2),
            Ok(()) => Ok(Spoken::Http1),
            Err(error) => {
                if matches!(&error, HandshakeError::Io(error) if error.kind() == io::ErrorKind::WouldBlock) {
                    self.used_up(READ | ENDED);
                }
                Err(error)
            }
        }
    }

    /// Sends bytes past TLS, to a client that does not speak it.
    pub(crate) fn try_write_in_clear(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(net::send(&self.socket, bytes, SendFlags::NOSIGNAL)?)
    }

    // A hit is read and sent by system calls of our own: the C library's are points of cancellation, which in a process
    // of several threads costs it two locked instructions each.

    pub(crate) fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match &self.tls {
            Some(tls) => self.try_read_with(&mut tls.borrow_mut(), buffer),
            None => self.try_discard(buffer),
        }
    }

    /// Reads what nobody wants to understand any more, TLS or not.
    pub(crate) fn try_discard(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let asked = buffer.len();
        let read = net::recv(&self.socket, buffer, RecvFlags::empty()).map(|(length, _)| length);
        self.has_read(read, asked)
    }

    fn try_read_with(&self, tls: &mut tls::Session, buffer: &mut [u8]) -> io::Result<usize> {
        let read = tls.read(&self.socket, buffer);
        match &read {
            Ok(_) if tls.is_drained() => self.used_up(READ),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.used_up(READ | ENDED),
            _ => {}
        }
        read
    }

    /// Reads what fits into the buffer's spare capacity, of which there must be some.
    pub(crate) fn try_read_buf(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        let room = buffer.capacity() - buffer.len();
        if let Some(tls) = &self.tls {
            let start = buffer.len();
            buffer.resize(start + room, 0);
            let read = self.try_read_with(&mut tls.borrow_mut(), &mut buffer[start..]);
            buffer.truncate(start + read.as_ref().map_or(0, |length| *length));
            return read;
        }
        let read = rustix::io::read(&self.socket, rustix::buffer::spare_capacity(buffer));
        self.has_read(read, room)
    }

    fn has_read(&self, read: rustix::io::Result<usize>, asked: usize) -> io::Result<usize> {
        match read {
            // Whatever comes after a short read is told as a new event (epoll(7), edge-triggered).
            Ok(length) if length < asked => self.used_up(READ),
            Err(Errno::AGAIN) => self.used_up(READ | ENDED),
            _ => {}
        }
        Ok(read?)
    }

    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(tls) = &self.tls {
            return self.writing(|socket| tls.borrow_mut().write(socket, &[IoSlice::new(bytes)]));
        }
        self.writing(|socket| Ok(net::send(socket, bytes, SendFlags::NOSIGNAL)?))
    }

    /// As [`Self::try_write`], for what is followed by more at once: a segment that is not full waits for it.
    pub(crate) fn try_write_with_more(&self, bytes: &[u8]) -> io::Result<usize> {
        if self.is_encrypted() {
            return self.try_write(bytes);
        }
        self.writing(|socket| Ok(net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::MORE)?))
    }

    pub(crate) fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if let Some(tls) = &self.tls {
            return self.writing(|socket| tls.borrow_mut().write(socket, slices));
        }
        self.writing(|mut socket| socket.write_vectored(slices))
    }

    /// Sends up to `length` bytes of a file from `offset` on. Not where there is TLS, which the kernel knows nothing
    /// of.
    pub(crate) fn try_send_file(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        length: usize,
    ) -> io::Result<usize> {
        if self.is_encrypted() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.writing(|socket| {
            let mut offset = offset;
            Ok(rustix::fs::sendfile(socket, file, Some(&mut offset), length)?)
        })
    }

    /// Tries something that fails with `WouldBlock` where the socket is full.
    fn writing<T>(&self, write: impl FnOnce(&TcpStream) -> io::Result<T>) -> io::Result<T> {
        let written = write(&self.socket);
        if written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            self.used_up(WRITE);
        }
        written
    }

    fn used_up(&self, bits: u8) {
        self.ready.set(self.ready.get() & !bits);
    }

    /// Whether it is one of the core's clients, and not only held by somebody who has not noticed its end.
    pub(crate) fn is_watched(&self) -> bool {
        self.watched.get() != Watched::No
    }

    /// Ends when the deadline has passed.
    pub(crate) async fn expired(&self) {
        poll_fn(|context| match self.slot.expired() {
            Some(_) => Poll::Ready(()),
            None => self.poll_ready(context, 0),
        })
        .await;
    }

    /// From now on [`Self::wake`] wakes the task of `context`.
    pub(crate) fn let_wake(&self, context: &Context<'_>) {
        let _ = self.poll_ready(context, 0);
    }

    /// Lets the task that answers it look again.
    pub(crate) fn wake(&self) {
        self.waker.borrow().iter().for_each(Waker::wake_by_ref);
    }

    /// Waits until a read may find something.
    pub(crate) async fn readable(&self) {
        poll_fn(|context| self.poll_ready(context, READ | ENDED)).await;
    }

    /// Whether the client has reset the connection; if not, the task is woken when it does.
    pub(crate) fn poll_failed(&self, context: &Context<'_>) -> Poll<()> {
        self.poll_ready(context, FAILED)
    }

    /// Waits until a write may find room.
    pub(crate) async fn writable(&self, clients: &Clients) -> io::Result<()> {
        clients.watch_output(self)?;
        poll_fn(|context| self.poll_ready(context, WRITE)).await;
        Ok(())
    }

    /// Every wait for one client is part of the task that answers it, so that one waker will do.
    fn poll_ready(&self, context: &Context<'_>, bits: u8) -> Poll<()> {
        if self.ready.get() & bits != 0 {
            return Poll::Ready(());
        }
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
        Poll::Pending
    }

    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.socket.shutdown(how)
    }

    /// Ends what is sent to the client: it has all of it.
    pub(crate) fn finish_output(&self) -> io::Result<()> {
        self.close_tls();
        self.socket.shutdown(Shutdown::Write)
    }

    /// Where there is TLS, says that nothing more comes: that the connection was not cut off.
    pub(crate) fn close_tls(&self) {
        if let Some(tls) = &self.tls {
            tls.borrow_mut().close(&self.socket);
        }
    }

    /// Resets the connection (connect(2) to nothing): the client learns that what it got is not all.
    pub(crate) fn reset(&self) {
        let _ = rustix::net::connect_unspec(&self.socket);
    }

    /// Closing now resets the connection, and what the kernel holds for the client is lost.
    pub(crate) fn set_zero_linger(&self) {
        if let Some(tls) = &self.tls {
            tls.borrow_mut().cut_off();
        }
        let _ = socket2::SockRef::from(&self.socket).set_linger(Some(std::time::Duration::ZERO));
    }
}

impl Carrier for Client {
    fn peer(&self) -> SocketAddr {
        self.peer
    }

    fn place(&self) -> Option<NodeId> {
        self.place
    }

    fn introduced(&self) -> Introduced {
        self.introduced
    }

    fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    fn debts(&self) -> &Debts {
        &self.debts
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A client as a stream, for what goes on for long.
#[derive(Clone, Copy)]
pub(crate) struct ClientStream<'c> {
    pub client: &'c Client,
    pub clients: &'c Clients,
}

impl AsyncRead for ClientStream<'_> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            std::task::ready!(self.client.poll_ready(context, READ | ENDED));
            match self.client.try_read(buffer.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(length) => {
                    buffer.advance(length);
                    return Poll::Ready(Ok(()));
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for ClientStream<'_> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            match self.client.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
            self.clients.watch_output(self.client)?;
            std::task::ready!(self.client.poll_ready(context, WRITE));
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.client.try_write_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
            self.clients.watch_output(self.client)?;
            std::task::ready!(self.client.poll_ready(context, WRITE));
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.client.finish_output())
    }
}
