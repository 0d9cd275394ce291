//! A connection to a server by TLS (RFC 8446, RFC 5246).

use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::net::{self, RecvFlags};
use rustls::ClientConnection;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::settings::TlsServer;
use crate::tls::{ALPN_HTTP2, Trust};
use crate::upstream::stream::{Heard, connect_tcp};

/// Reads from the socket before others get their turn, where they bring nothing to be read.
const READS_AT_ONCE: usize = 4;
/// Bytes of records that may come without content: some for tickets and the largest record, and no flood.
const MOST_WITHOUT_CONTENT: usize = 256 * 1024;

/// What is wrong with an end that was not announced (RFC 8446 §6.1).
const CUT_OFF: &str = "it was ended without close_notify";

/// Sends and receives as a socket does, without waiting.
pub(crate) struct TlsStream {
    socket: TcpStream,
    session: RefCell<Session>,
    /// A read has ended for the sake of others: the socket may have more, and would not say so again.
    has_more: Cell<bool>,
}

struct Session {
    tls: ClientConnection,
    /// Bytes that are encrypted and were not said to be taken: whoever writes begins the next write with the same ones.
    owed: usize,
    /// Bytes that have come since there was content.
    without_content: usize,
}

impl TlsStream {
    /// Connects, and waits until both sides know each other.
    pub(super) async fn connect(server: &TlsServer, trust: &Trust) -> io::Result<Self> {
        let socket = connect_tcp(server.address).await?;
        let session = RefCell::new(Session { tls: trust.client(server)?, owed: 0, without_content: 0 });
        let stream = Self { socket, session, has_more: Cell::new(false) };
        stream.shake_hands().await?;
        Ok(stream)
    }

    async fn shake_hands(&self) -> io::Result<()> {
        loop {
            let step = self.session.borrow_mut().go_on_shaking_hands(&self.socket);
            match step {
                Ok(Step::Done) => return Ok(()),
                Ok(Step::Read) => self.socket.readable().await?,
                Ok(Step::Write) => self.socket.writable().await?,
                Err(error) => return Err(error),
            }
        }
    }

    pub(super) async fn readable(&self) -> io::Result<()> {
        if self.has_more.take() {
            tokio::task::yield_now().await;
            return Ok(());
        }
        self.socket.readable().await
    }

    pub(super) async fn writable(&self) -> io::Result<()> {
        self.socket.writable().await
    }

    /// 0 at the end that the server has announced. Any other end is an error: what came before it need not be all.
    pub(super) fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let session = &mut *self.session.borrow_mut();
        for _ in 0..READS_AT_ONCE {
            match session.tls.reader().read(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => session.receive(&self.socket)?,
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    return Err(io::Error::new(error.kind(), CUT_OFF));
                }
                read => {
                    session.without_content = 0;
                    return read;
                }
            };
        }
        self.has_more.set(true);
        Err(ErrorKind::WouldBlock.into())
    }

    /// Whether the server has chosen HTTP/2 (RFC 7301).
    pub(super) fn is_for_http2(&self) -> bool {
        self.session.borrow().tls.alpn_protocol() == Some(ALPN_HTTP2)
    }

    /// What could be encrypted, but not be sent whole, is owed: `WouldBlock`, as if nothing had been taken.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let session = &mut *self.session.borrow_mut();
        session.send(&self.socket)?;
        if session.owed > 0 {
            return Ok(std::mem::take(&mut session.owed));
        }
        let taken = session.tls.writer().write(bytes)?;
        session.send(&self.socket).inspect_err(|_| session.owed = taken)?;
        Ok(taken)
    }

    /// What the server says on a connection that is not used. Servers give away tickets when they like (RFC 8446 §4.6.1),
    /// which says nothing.
    pub(super) fn listen(&self) -> Heard {
        let session = &mut *self.session.borrow_mut();
        for _ in 0..READS_AT_ONCE {
            match session.tls.reader().read(&mut [0]) {
                Ok(1..) => return Heard::Surplus,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                _ => return Heard::End,
            }
            // The kernel is asked: the reactor learns of what has arrived only when it is next polled.
            let mut arrived =
                Input(|bytes: &mut [u8]| Ok(net::recv(&self.socket, bytes, RecvFlags::empty())?.0));
            match session.read_records(&mut arrived, &self.socket) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Heard::Silence,
                Ok(1..) => {}
                _ => return Heard::End,
            }
        }
        Heard::End
    }
}

impl Drop for TlsStream {
    /// Says that nothing more is sent (RFC 8446 §6.1), as far as the socket has room for that.
    fn drop(&mut self) {
        let session = self.session.get_mut();
        if session.owed == 0 && !session.tls.is_handshaking() {
            session.tls.send_close_notify();
            // Whoever is gone need not be told.
            let _ = session.send(&self.socket);
        }
    }
}

/// What a handshake waits for.
enum Step {
    Done,
    Read,
    Write,
}

impl Session {
    fn go_on_shaking_hands(&mut self, socket: &TcpStream) -> io::Result<Step> {
        match self.send(socket) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Step::Write),
            sent => sent?,
        }
        if !self.tls.is_handshaking() {
            return Ok(Step::Done);
        }
        match self.receive(socket) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            // Where there is more already, the wait is none.
            _ if self.tls.is_handshaking() && !self.tls.wants_write() => Ok(Step::Read),
            _ => Ok(Step::Write),
        }
    }

    /// Takes one read's worth of records. Returns how many bytes the socket had.
    fn receive(&mut self, socket: &TcpStream) -> io::Result<usize> {
        self.read_records(&mut Input(|bytes: &mut [u8]| socket.try_read(bytes)), socket)
    }

    fn read_records(&mut self, input: &mut impl Read, socket: &TcpStream) -> io::Result<usize> {
        let length = self.tls.read_tls(input)?;
        self.without_content += length;
        if self.without_content > MOST_WITHOUT_CONTENT {
            return Err(io::Error::new(ErrorKind::InvalidData, "it sends records without content"));
        }
        let state = self.tls.process_new_packets();
        // An alert says what was wrong; what the socket has no room for goes with the next write.
        let sent = self.send(socket);
        state.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        match sent {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(length),
        }
    }

    fn send(&mut self, socket: &TcpStream) -> io::Result<()> {
        while self.tls.wants_write() {
            if self.tls.write_tls(&mut Output(socket))? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }
}

struct Input<F>(F);

impl<F: FnMut(&mut [u8]) -> io::Result<usize>> Read for Input<F> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        (self.0)(bytes)
    }
}

struct Output<'s>(&'s TcpStream);

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Both directions of a connection, for what goes on for long.
#[derive(Clone, Copy)]
pub(super) struct Direction<'s>(pub &'s TlsStream);

impl AsyncRead for Direction<'_> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            match self.0.try_read(buffer.initialize_unfilled()) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                read => {
                    buffer.advance(read?);
                    return Poll::Ready(Ok(()));
                }
            }
            if self.0.has_more.take() {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            ready!(self.0.socket.poll_read_ready(context))?;
        }
    }
}

impl AsyncWrite for Direction<'_> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            match self.0.try_write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
            ready!(self.0.socket.poll_write_ready(context))?;
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// The server may go on sending.
    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.session.borrow_mut().tls.send_close_notify();
        loop {
            let sent = self.0.session.borrow_mut().send(&self.0.socket);
            match sent {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                sent => return Poll::Ready(sent),
            }
            ready!(self.0.socket.poll_write_ready(context))?;
        }
    }
}
