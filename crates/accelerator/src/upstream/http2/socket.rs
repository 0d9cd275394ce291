//! A connection to a server as the library takes it.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::upstream::Stream;
use crate::upstream::encrypted::Direction;

/// Both directions of a connection.
pub(super) struct Socket {
    stream: Stream,
    /// The server takes no more, but may have said why: which requests it has not begun, or how it has answered them.
    is_shut: bool,
}

trait Both: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> Both for S {}

impl Socket {
    pub(super) fn new(stream: Stream) -> Self {
        Self { stream, is_shut: false }
    }

    /// What is written to who takes no more goes nowhere: what can still be read tells how the requests have ended.
    fn poll_write_while_open(
        &mut self,
        length: usize,
        write: impl FnOnce(Pin<&mut dyn Both>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if self.is_shut {
            return Poll::Ready(Ok(length));
        }
        match self.poll(write) {
            Poll::Ready(Err(error))
                if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) =>
            {
                self.is_shut = true;
                Poll::Ready(Ok(length))
            }
            written => written,
        }
    }

    fn poll<T>(
        &mut self,
        poll: impl FnOnce(Pin<&mut dyn Both>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match &mut self.stream {
            Stream::Tcp(stream) => poll(Pin::new(stream)),
            Stream::Unix(stream) => poll(Pin::new(stream)),
            Stream::Tls(stream) => poll(Pin::new(&mut Direction(stream))),
            Stream::Http2(_) => Poll::Ready(Err(ErrorKind::Unsupported.into())),
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
        self.poll_write_while_open(bytes.len(), |stream| stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let length = slices.iter().map(|slice| slice.len()).sum();
        self.poll_write_while_open(length, |stream| stream.poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        !matches!(self.stream, Stream::Tls(_))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(|stream| stream.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(|stream| stream.poll_shutdown(context))
    }
}
