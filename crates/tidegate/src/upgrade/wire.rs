//! Messages between a process and the one that takes its place: packets of JSON over a socket pair, with descriptors.
//! Versions of either side may differ, so that nothing is believed of the other but what was asked for.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair, sockopt,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Descriptors that one message carries at most.
pub(super) const MAX_DESCRIPTORS: usize = 64;
/// The longest message, which names a URL's key.
const MAX_MESSAGE_BYTES: usize = 160 << 10;
/// How long a side that reads nothing is waited for.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Why there is no message.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    /// The other side has closed its end, most often by ending.
    #[error("the other process has gone")]
    Ended,
    #[error("the other process has said nothing for {} s", .0.as_secs())]
    TimedOut(Duration),
    #[error("what the other process says is no message of this protocol")]
    Garbage,
    #[error("cannot speak with the other process: {0}")]
    Io(#[from] io::Error),
}

/// One end of the socket pair.
#[derive(Debug)]
pub(super) struct Link(OwnedFd);

impl Link {
    /// Both ends; both are closed when another program is started.
    pub(super) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (here, there) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self::of(here)?, there))
    }

    pub(super) fn of(socket: OwnedFd) -> io::Result<Self> {
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(SEND_TIMEOUT))?;
        Ok(Self(socket))
    }

    pub(super) fn send(
        &self,
        message: &impl Serialize,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), LinkError> {
        let text = serde_json::to_vec(message).map_err(io::Error::from)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput).into());
        }
        match sendmsg(&self.0, &[IoSlice::new(&text)], &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(_) => Ok(()),
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => Err(LinkError::Ended),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    /// The next message, and the descriptors that came with it. `patience`: `None` waits for ever.
    pub(super) fn receive<M: DeserializeOwned>(
        &self,
        patience: Option<Duration>,
    ) -> Result<(M, Vec<OwnedFd>), LinkError> {
        self.wait(patience)?;
        let mut text = vec![0; MAX_MESSAGE_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&self.0, &mut [IoSliceMut::new(&mut text)], &mut ancillary, flags) {
            Ok(received) => received,
            Err(rustix::io::Errno::CONNRESET) => return Err(LinkError::Ended),
            Err(error) => return Err(io::Error::from(error).into()),
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if received.bytes == 0 {
            return Err(LinkError::Ended);
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(LinkError::Garbage);
        }
        let message = serde_json::from_slice(&text[..received.bytes.min(text.len())])
            .map_err(|_| LinkError::Garbage)?;
        Ok((message, descriptors))
    }

    /// Until there is a message, or the other side has gone.
    fn wait(&self, patience: Option<Duration>) -> Result<(), LinkError> {
        let since = Instant::now();
        loop {
            let left = patience.map(|patience| patience.saturating_sub(since.elapsed()));
            let timeout = left.map(Timespec::try_from).transpose();
            let timeout = timeout.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], timeout.as_ref()) {
                Ok(0) => return Err(LinkError::TimedOut(patience.unwrap_or_default())),
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }
}

/// Descriptors to send.
pub(super) fn borrowed<T: AsFd>(descriptors: &[T]) -> Vec<BorrowedFd<'_>> {
    descriptors.iter().map(AsFd::as_fd).collect()
}

#[cfg(test)]
mod tests {
    use rustix::net::send;

    use super::*;

    #[test]
    fn message_arrives_with_its_descriptors_and_anything_else_is_refused() {
        let (here, there) = Link::pair().unwrap();
        let there = Link::of(there).unwrap();
        let files = [(); 3].map(|()| std::fs::File::open("/dev/null").unwrap());
        here.send(&"hello", &borrowed(&files)).unwrap();
        let (text, descriptors) = there.receive::<String>(None).unwrap();
        assert_eq!((text.as_str(), descriptors.len()), ("hello", 3));
        for descriptor in &descriptors {
            assert!(rustix::io::fcntl_getfd(descriptor).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        }
        let timed_out = there.receive::<String>(Some(Duration::from_millis(1)));
        assert!(matches!(timed_out, Err(LinkError::TimedOut(_))));
        for garbage in [&b"\"no end"[..], b"\0\xff", b"{}", &vec![b' '; MAX_MESSAGE_BYTES + 1]] {
            send(&here.0, garbage, SendFlags::empty()).unwrap();
            assert!(matches!(there.receive::<String>(None), Err(LinkError::Garbage)));
        }
        drop(here);
        assert!(matches!(there.receive::<String>(None), Err(LinkError::Ended)));
        assert!(matches!(there.send(&"hello", &[]), Err(LinkError::Ended)));
    }
}
