//! A connection to a server: by TCP, with TLS over it or not, or by a socket of the file system.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest};
use tokio::net::{TcpStream, UnixStream};

use crate::data_core::pacing;
use crate::settings::ServerAddress;
use crate::tls::Trust;
use crate::upstream::encrypted::{Direction, TlsStream};
use crate::upstream::http2::{Http2Stream, Session};

/// How long until a server whose queue is full is asked again: at first, and at most. Many requests may wait for it at once.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Sends and receives without waiting; whoever has to wait asks when it is ready.
pub(crate) enum Stream {
    Tcp(TcpStream),
    Tls(Box<TlsStream>),
    Unix(UnixStream),
    /// One of those that share a connection by HTTP/2, for one exchange.
    Http2(Box<Http2Stream>),
}

/// What a connection that is not used has to say.
pub(crate) enum Heard {
    Silence,
    End,
    /// What follows a response that was thought to be whole (RFC 9112 §9.2).
    Surplus,
}

impl Stream {
    /// `trust` says which servers with TLS are believed.
    pub(crate) async fn connect(address: &ServerAddress, trust: Option<&Trust>) -> io::Result<Self> {
        match address {
            ServerAddress::Ip(address) => connect_tcp(*address).await.map(Self::Tcp),
            ServerAddress::Tls(server) => {
                let trust = trust.ok_or(io::ErrorKind::Unsupported)?;
                TlsStream::connect(server, trust).await.map(|stream| Self::Tls(Box::new(stream)))
            }
            ServerAddress::Unix(path) => connect_unix(path).await.map(Self::Unix),
        }
    }

    pub(crate) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.readable().await,
            Self::Tls(stream) => stream.readable().await,
            Self::Unix(stream) => stream.readable().await,
            Self::Http2(stream) => stream.readable().await,
        }
    }

    pub(crate) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.writable().await,
            Self::Tls(stream) => stream.writable().await,
            Self::Unix(stream) => stream.writable().await,
            Self::Http2(stream) => stream.writable().await,
        }
    }

    pub(crate) fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read(bytes),
            Self::Tls(stream) => stream.try_read(bytes),
            Self::Unix(stream) => stream.try_read(bytes),
            Self::Http2(stream) => stream.try_read(bytes),
        }
    }

    pub(super) fn try_read_buf(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read_buf(buffer),
            Self::Tls(stream) => read_into_room(buffer, |room| stream.try_read(room)),
            Self::Unix(stream) => stream.try_read_buf(buffer),
            Self::Http2(stream) => read_into_room(buffer, |room| stream.try_read(room)),
        }
    }

    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write(bytes),
            Self::Tls(stream) => stream.try_write(bytes),
            Self::Unix(stream) => stream.try_write(bytes),
            Self::Http2(stream) => stream.try_write(bytes),
        }
    }

    /// Tells the reactor that a read has taken all there was, so that the next one waits without asking the kernel first:
    /// edge-triggered readiness means that a byte more is an event of its own (epoll(7)).
    pub(super) fn note_drained(&self) {
        let drained = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
        let _ = match self {
            Self::Tcp(stream) => stream.try_io(Interest::READABLE, drained),
            // What was read are records or frames that came before: that says nothing of the socket.
            Self::Tls(_) | Self::Http2(_) => return,
            Self::Unix(stream) => stream.try_io(Interest::READABLE, drained),
        };
    }

    /// The kernel is asked, because the reactor learns of what has arrived only when it is next polled.
    pub(crate) fn listen(&self) -> Heard {
        let socket = match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Tls(stream) => return stream.listen(),
            Self::Unix(stream) => stream.as_fd(),
            // It is for one exchange, and not kept.
            Self::Http2(_) => return Heard::End,
        };
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        match rustix::net::recv(socket, &mut [0; 1], flags) {
            Err(rustix::io::Errno::AGAIN) => Heard::Silence,
            Ok((1.., _)) => Heard::Surplus,
            _ => Heard::End,
        }
    }

    /// Both directions, each by itself.
    pub(crate) fn split(&mut self) -> (Box<dyn AsyncRead + Unpin + '_>, Box<dyn AsyncWrite + Unpin + '_>) {
        match self {
            Self::Tcp(stream) => {
                let (read, write) = stream.split();
                (Box::new(read), Box::new(write))
            }
            Self::Tls(stream) => {
                let direction = Direction(stream);
                (Box::new(direction), Box::new(direction))
            }
            Self::Unix(stream) => {
                let (read, write) = stream.split();
                (Box::new(read), Box::new(write))
            }
            // A response by HTTP/2 never changes protocols.
            Self::Http2(_) => (Box::new(tokio::io::empty()), Box::new(tokio::io::sink())),
        }
    }

    /// Speaks HTTP/2 from now on, if the server is known to: a stream of it.
    pub(super) async fn into_http2(self) -> io::Result<Self> {
        if matches!(&self, Self::Tls(stream) if !stream.is_for_http2()) {
            return Ok(self);
        }
        Session::start(self).await.map(|session| session.stream())
    }

    pub(super) fn http2(&self) -> Option<&Http2Stream> {
        match self {
            Self::Http2(stream) => Some(stream),
            _ => None,
        }
    }
}

/// Reads into what room there is behind what the buffer has.
pub(super) fn read_into_room(
    buffer: &mut Vec<u8>,
    read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
) -> io::Result<usize> {
    let start = buffer.len();
    buffer.resize(buffer.capacity(), 0);
    let read = read(buffer.get_mut(start..).unwrap_or_default());
    buffer.truncate(start + read.as_ref().map_or(0, |length| *length));
    read
}

/// Requests go out as they are written, and are not paced within the host.
pub(super) async fn connect_tcp(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    pacing::leave_out_within_host(&SockRef::from(&stream), address.ip());
    Ok(stream)
}

/// A socket of the file system does not say when its queue has room again (unix(7)), where TCP tries again by itself.
async fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    let mut pause = FIRST_PAUSE;
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(pause).await;
                pause = LONGEST_PAUSE.min(pause * 2);
            }
            connected => return connected,
        }
    }
}
