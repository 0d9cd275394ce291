//! A connection to a server as the library takes it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::upstream::Stream;
use crate::upstream::encrypted::Direction;

/// Both directions of a connection.
pub(super) struct Socket(pub Stream);

trait Both: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> Both for S {}

impl Socket {
    fn poll<T>(
        &mut self,
        poll: impl FnOnce(Pin<&mut dyn Both>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match &mut self.0 {
            Stream::Tcp(stream) => poll(Pin::new(stream)),
            Stream::Unix(stream) => poll(Pin::new(stream)),
            Stream::Tls(stream) => poll(Pin::new(&mut Direction(stream))),
            Stream::Http2(_) => Poll::Ready(Err(io::ErrorKind::Unsupported.into())),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll(|stream| stream.poll_read(context, buffer))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll(|stream| stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll(|stream| stream.poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        !matches!(self.0, Stream::Tls(_))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(|stream| stream.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(|stream| stream.poll_shutdown(context))
    }
}
