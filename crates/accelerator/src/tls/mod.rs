//! TLS (RFC 8446, RFC 5246) on a client's connection, between its socket and whoever speaks HTTP on it; and whom we trust
//! on connections to servers.

mod certificates;
mod issued;
mod records;
mod trust;

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use rustix::net::{self, RecvFlags, SendFlags};
use rustls::{ServerConfig, ServerConnection};

pub(crate) use certificates::server_config;
pub use certificates::{CertificateError, CertificateStatus, check};
use issued::ALPN_CHALLENGE;
pub use issued::{Issued, IssuedCertificate, Proving, SigningRequest};
use records::Records;
pub use trust::Trust;

/// HTTP/2 and HTTP/1.1, as clients name them in the handshake (RFC 7301).
pub(crate) const ALPN_HTTP2: &[u8] = b"h2";
const ALPN_HTTP1: &[u8] = b"http/1.1";

/// Ciphertext that is kept for a socket that is full, and what is encrypted at once: a record of the most content.
const RECORD_BYTES: usize = 16 * 1024;
/// What a record of the handshake begins with (RFC 8446 §5.1).
const HANDSHAKE_RECORD: u8 = 22;

/// The TLS session of one connection.
///
/// It is read from and written to as its socket would be, without waiting. What could be encrypted, but not be sent
/// whole, is owed: the write fails with `WouldBlock` as if nothing had been taken, and whoever writes begins the next
/// one with the same bytes, as is right for a socket too.
pub(crate) struct Session {
    tls: ServerConnection,
    /// Bytes that are encrypted and were not said to be taken.
    owed: usize,
    /// The socket had less than was asked of it, and the client has not said that it was all.
    is_short: bool,
    /// All that the socket had has been handed on.
    is_drained: bool,
    has_begun: bool,
    /// Those since the handshake.
    records: Records,
    /// The client sends records for their own sake.
    is_flood: bool,
    /// The connection is reset: nothing may look like its end.
    is_cut_off: bool,
}

impl Session {
    pub(crate) fn new(config: Arc<ServerConfig>) -> Result<Self, rustls::Error> {
        let mut tls = ServerConnection::new(config)?;
        tls.set_buffer_limit(Some(RECORD_BYTES));
        Ok(Self {
            tls,
            owed: 0,
            is_short: false,
            is_drained: false,
            has_begun: false,
            records: Records::new(),
            is_flood: false,
            is_cut_off: false,
        })
    }

    /// Whether the client has sent records for their own sake, for which the connection is ended.
    pub(crate) fn is_flood(&self) -> bool {
        self.is_flood
    }

    /// Whether the client chose HTTP/2.
    pub(crate) fn speaks_http2(&self) -> bool {
        self.tls.alpn_protocol() == Some(ALPN_HTTP2)
    }

    /// Whether nothing is to be read before the socket has more.
    pub(crate) fn is_drained(&self) -> bool {
        self.is_drained
    }

    /// Goes on with the handshake until it is done. `WouldBlock` while the client has to say more.
    pub(crate) fn shake_hands(&mut self, socket: &TcpStream) -> Result<(), HandshakeError> {
        if !self.tls.is_handshaking() {
            return Ok(());
        }
        while self.tls.is_handshaking() {
            if !self.has_begun {
                match first_byte(socket)? {
                    Some(HANDSHAKE_RECORD) | None => self.has_begun = true,
                    Some(_) => return Err(HandshakeError::NotTls),
                }
            }
            if self.receive(socket)? == 0 {
                return Err(HandshakeError::Io(ErrorKind::UnexpectedEof.into()));
            }
        }
        if self.tls.alpn_protocol() == Some(ALPN_CHALLENGE) {
            return Err(HandshakeError::Challenge);
        }
        // A deadline bounds the handshake.
        self.records.begin(Instant::now());
        Ok(())
    }

    /// Reads what was encrypted for us; 0 at the end, announced or not: the framing of HTTP tells what is whole.
    pub(crate) fn read(&mut self, socket: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // A client that never lets the socket run dry does not keep the core from others for long.
                    if self.records.is_flood(Instant::now) {
                        self.is_flood = true;
                        return Err(ErrorKind::InvalidData.into());
                    }
                    self.receive(socket)?
                }
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                Ok(length) => {
                    self.records.brought(length);
                    // Whatever comes after a short read is told as a new event (epoll(7), edge-triggered).
                    self.is_drained = self.is_short && length < buffer.len();
                    return Ok(length);
                }
                Err(error) => return Err(error),
            };
        }
    }

    /// Takes one read's worth of records, and sends what they call for. Returns how many bytes the socket had.
    fn receive(&mut self, socket: &TcpStream) -> io::Result<usize> {
        let mut input = Input { socket, records: &mut self.records, is_short: false };
        let length = self.tls.read_tls(&mut input)?;
        let is_short = input.is_short;
        let state = self.tls.process_new_packets();
        // An alert says what was wrong, and may have the socket to itself.
        let sent = self.send(socket);
        let state = state.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        self.is_short = is_short && !state.peer_has_closed();
        match sent {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(length),
        }
    }

    /// Encrypts and sends as much as one record holds.
    pub(crate) fn write(&mut self, socket: &TcpStream, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.tls.is_handshaking() {
            return Err(ErrorKind::NotConnected.into());
        }
        self.send(socket)?;
        if self.owed > 0 {
            return Ok(std::mem::take(&mut self.owed));
        }
        let taken = self.tls.writer().write_vectored(slices)?;
        match self.send(socket) {
            Ok(()) => Ok(taken),
            Err(error) => {
                self.owed = taken;
                Err(error)
            }
        }
    }

    /// From now on the client is not told that nothing more is sent: it has not got all.
    pub(crate) fn cut_off(&mut self) {
        self.is_cut_off = true;
    }

    /// Says that nothing more is sent (RFC 8446 §6.1), as far as the socket has room for that.
    pub(crate) fn close(&mut self, socket: &TcpStream) {
        if self.owed == 0 && !self.is_cut_off && !self.tls.is_handshaking() {
            self.tls.send_close_notify();
            // Whoever is gone need not be told.
            let _ = self.send(socket);
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

/// Why there is no TLS session.
pub(crate) enum HandshakeError {
    /// What the client sent first is no TLS.
    NotTls,
    /// It was a certificate authority's, which has seen what it came for (RFC 8737 §3).
    Challenge,
    Io(io::Error),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// What a client's first byte is, which stays to be read; `None` at the end.
fn first_byte(socket: &TcpStream) -> io::Result<Option<u8>> {
    let mut first = [0; 1];
    let (_, length) = net::recv(socket, &mut first, RecvFlags::PEEK)?;
    Ok((length > 0).then_some(first[0]))
}

struct Input<'s> {
    socket: &'s TcpStream,
    records: &'s mut Records,
    /// The socket had less than there was room for.
    is_short: bool,
}

impl Read for Input<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let asked = buffer.len();
        let (length, _) = net::recv(self.socket, &mut *buffer, RecvFlags::empty())?;
        self.is_short = length < asked;
        self.records.follow(&buffer[..length]);
        Ok(length)
    }
}

struct Output<'s>(&'s TcpStream);

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(net::send(self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match slices {
            [one] => self.write(one),
            _ => self.0.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
