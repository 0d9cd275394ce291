//! A connection to a server, by TCP or by a socket of the file system.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest};
use tokio::net::{TcpStream, UnixStream};

use crate::data_core::pacing;
use crate::settings::ServerAddress;

/// How long until a server whose queue is full is asked again: at first, and at most. Many requests may wait for it at once.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Sends and receives without waiting; whoever has to wait asks when it is ready.
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    pub(crate) async fn connect(address: &ServerAddress) -> io::Result<Self> {
        match address {
            ServerAddress::Ip(address) => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                pacing::leave_out_within_host(&SockRef::from(&stream), address.ip());
                Ok(Self::Tcp(stream))
            }
            ServerAddress::Unix(path) => connect_unix(path).await.map(Self::Unix),
        }
    }

    pub(crate) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.readable().await,
            Self::Unix(stream) => stream.readable().await,
        }
    }

    pub(crate) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.writable().await,
            Self::Unix(stream) => stream.writable().await,
        }
    }

    pub(crate) fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read(bytes),
            Self::Unix(stream) => stream.try_read(bytes),
        }
    }

    pub(super) fn try_read_buf(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read_buf(buffer),
            Self::Unix(stream) => stream.try_read_buf(buffer),
        }
    }

    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write(bytes),
            Self::Unix(stream) => stream.try_write(bytes),
        }
    }

    pub(super) fn try_io<T>(
        &self,
        interest: Interest,
        operation: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        match self {
            Self::Tcp(stream) => stream.try_io(interest, operation),
            Self::Unix(stream) => stream.try_io(interest, operation),
        }
    }

    /// Both directions, each by itself.
    pub(crate) fn split(&mut self) -> (Box<dyn AsyncRead + Unpin + '_>, Box<dyn AsyncWrite + Unpin + '_>) {
        match self {
            Self::Tcp(stream) => {
                let (read, write) = stream.split();
                (Box::new(read), Box::new(write))
            }
            Self::Unix(stream) => {
                let (read, write) = stream.split();
                (Box::new(read), Box::new(write))
            }
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
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
