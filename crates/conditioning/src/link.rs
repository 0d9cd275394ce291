//! One end of the Unix-domain SOCK_SEQPACKET pair between two neighbours of a chain.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::wire::{Bundle, HEADER_BYTES, INLINE_BYTES, NOTICE_BYTES, Notice, WireError, flags};

/// A request and the socket that it came on.
#[derive(Debug)]
pub struct Request {
    /// What is known about the request.
    pub bundle: Bundle,
    /// The client's socket.
    pub socket: OwnedFd,
}

impl Request {
    /// Another handle to the same request, to be handed again if the neighbour dies.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn duplicate(&self) -> io::Result<Self> {
        let socket = rustix::io::fcntl_dupfd_cloexec(&self.socket, 3)?;
        Ok(Self { bundle: self.bundle.clone(), socket })
    }
}

/// What came of an attempt to receive from the upstream neighbour.
#[derive(Debug)]
pub enum Received {
    /// A request.
    Request(Request),
    /// Nothing is there now.
    Nothing,
    /// The neighbour and everybody who held its end are gone.
    Gone,
    /// The datagram was refused; its descriptors are closed.
    Refused(WireError),
    /// The bundle came without its socket, because this process is out of descriptors.
    OutOfDescriptors(Bundle),
}

/// What the next datagram is, which stays in the link.
#[derive(Debug)]
pub enum Next {
    /// None is there.
    Nothing,
    /// The request of a connection to this address.
    To(IpAddr),
    /// Whatever [`receive`] makes of it.
    Other,
}

/// Looks at what [`receive`] would get now.
///
/// # Errors
/// The system call failed, `Interrupted` included.
pub fn next(link: BorrowedFd<'_>) -> io::Result<Next> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    match rustix::net::recvmsg(link, &mut [IoSliceMut::new(&mut [0])], &mut control, flags) {
        Ok(_) => {}
        Err(Errno::AGAIN) => return Ok(Next::Nothing),
        Err(Errno::CONNRESET) => return Ok(Next::Other),
        Err(error) => return Err(error.into()),
    }
    let mut rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    // The socket is the first of them; all are closed here.
    let local = rights.next().and_then(|mut rights| rights.next()).and_then(local_address);
    Ok(local.map_or(Next::Other, |local| Next::To(local.ip())))
}

/// When the request that [`receive`] would get now was whole, if there is one (see [`Bundle::arrived_ns`]).
pub fn arrived_ns(link: BorrowedFd<'_>) -> Option<u64> {
    let mut start = [0; HEADER_BYTES];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (got, _) = rustix::net::recv(link, &mut start[..], flags).ok()?;
    Bundle::arrived_of(&start[..got])
}

/// The address of this side of a connection.
pub(crate) fn local_address(socket: impl AsFd) -> Option<SocketAddr> {
    SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok()
}

/// A pair of connected ends: the upstream neighbour's and the downstream neighbour's. Both close on exec.
///
/// # Errors
/// The process is out of descriptors.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Hands a request downstream: whole or not at all. `scratch` is overwritten.
///
/// # Errors
/// `WouldBlock` if the neighbour has too much unread; others if the link or the memory file failed.
pub fn send_bundle(
    link: BorrowedFd<'_>,
    bundle: &Bundle,
    socket: BorrowedFd<'_>,
    scratch: &mut Vec<u8>,
) -> io::Result<()> {
    bundle.write(scratch);
    let file = if bundle.request.len() > INLINE_BYTES { Some(memory_file(&bundle.request)?) } else { None };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let both;
    let one;
    let descriptors: &[BorrowedFd<'_>] = match &file {
        Some(file) => {
            both = [socket, file.as_fd()];
            &both
        }
        None => {
            one = [socket];
            &one
        }
    };
    control.push(SendAncillaryMessage::ScmRights(descriptors));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(link, &[IoSlice::new(scratch)], &mut control, flags)?;
    Ok(())
}

fn memory_file(content: &[u8]) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("tidegate-request", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut at = 0;
    while at < content.len() {
        at += rustix::io::pwrite(&file, &content[at..], at as u64)?;
    }
    Ok(file)
}

/// Sends one descriptor and nothing else. Does not allocate.
///
/// # Errors
/// The other end is gone.
pub fn send_descriptor(to: BorrowedFd<'_>, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    rustix::net::sendmsg(to, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives what [`send_descriptor`] sent.
///
/// # Errors
/// The other end is gone, or sent none.
pub fn receive_descriptor(from: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8; 1];
    rustix::net::recvmsg(from, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    rights.next().and_then(|mut rights| rights.next()).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Sends a notice upstream.
///
/// # Errors
/// `WouldBlock` if the neighbour has too much unread; the ledger holds the same news.
pub fn send_notice(link: BorrowedFd<'_>, notice: Notice) -> io::Result<()> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::send(link, &notice.to_bytes(), flags)?;
    Ok(())
}

/// Receives a notice from downstream; `None` when there is none now, or nobody is there.
pub fn receive_notice(link: BorrowedFd<'_>) -> Option<Result<Notice, WireError>> {
    let mut bytes = [0; NOTICE_BYTES + 1];
    let mut length = 0;
    match rustix::net::recv(link, &mut bytes[..], RecvFlags::DONTWAIT) {
        Ok((got, _)) if got > 0 => length += got,
        _ => return None,
    }
    Some(Notice::read(&bytes[..length]))
}

/// Receives a request from upstream. Waits for one unless `dont_wait`, or the link is non-blocking.
///
/// # Errors
/// The system call failed, `Interrupted` included.
pub fn receive(link: BorrowedFd<'_>, dont_wait: bool, cloexec: bool) -> io::Result<Received> {
    thread_local! {
        // Kept, because clearing so much for each request takes longer than receiving it.
        static BUFFER: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    let mut flags = RecvFlags::empty();
    flags.set(RecvFlags::DONTWAIT, dont_wait);
    flags.set(RecvFlags::CMSG_CLOEXEC, cloexec);
    // A signal handler of the server's may accept while its thread does.
    let kept = BUFFER.try_with(|kept| kept.try_borrow_mut().map(|mut kept| std::mem::take(&mut *kept)));
    let mut buffer = kept.ok().and_then(Result::ok).unwrap_or_default();
    buffer.resize(HEADER_BYTES + INLINE_BYTES, 0);
    let received = receive_into(link, flags, &mut buffer);
    let _ = BUFFER.try_with(|kept| kept.try_borrow_mut().map(|mut kept| *kept = buffer));
    received
}

fn receive_into(link: BorrowedFd<'_>, flags: RecvFlags, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = match rustix::net::recvmsg(link, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
        Ok(message) => message,
        Err(Errno::AGAIN) => return Ok(Received::Nothing),
        Err(Errno::CONNRESET) => return Ok(Received::Gone),
        Err(error) => return Err(error.into()),
    };
    let mut descriptors = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        })
        .flatten();
    let socket = descriptors.next();
    let file = descriptors.next();
    if message.bytes == 0 && socket.is_none() {
        return Ok(Received::Gone);
    }
    let (mut bundle, request_bytes) = match Bundle::read(&buffer[..message.bytes]) {
        Ok(read) => read,
        Err(error) => return Ok(Received::Refused(error)),
    };
    let lacking = message.flags.contains(ReturnFlags::CTRUNC);
    let Some(socket) = socket else {
        return Ok(if lacking {
            Received::OutOfDescriptors(bundle)
        } else {
            Received::Refused(WireError::Descriptors)
        });
    };
    if bundle.has(flags::MEMORY_FILE) {
        let Some(file) = file else {
            return Ok(if lacking {
                Received::OutOfDescriptors(bundle)
            } else {
                Received::Refused(WireError::Descriptors)
            });
        };
        match read_file(&file, request_bytes) {
            Ok(request) => bundle.request = request,
            Err(_) => return Ok(Received::Refused(WireError::Lengths)),
        }
        bundle.flags &= !flags::MEMORY_FILE;
    }
    Ok(Received::Request(Request { bundle, socket }))
}

fn read_file(file: &OwnedFd, length: usize) -> io::Result<Vec<u8>> {
    let mut content = vec![0; length];
    let mut at = 0;
    while at < length {
        match rustix::io::pread(file, &mut content[at..], at as u64)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => at += got,
        }
    }
    Ok(content)
}

/// Bytes that the downstream neighbour has not taken yet, as the kernel accounts them: the unread end of the pull.
pub fn unread_bytes(link: BorrowedFd<'_>) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (= TIOCOUTQ) writes one int to the address given.
    let done = unsafe { libc::ioctl(link.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    if done == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
}

/// Takes over a descriptor that was inherited and named in the environment variable `name`.
pub fn inherited(name: &str) -> Option<OwnedFd> {
    take_over(&std::env::var(name).ok()?)
}

/// As [`inherited`], of several with commas between them.
pub fn inherited_all(name: &str) -> Vec<OwnedFd> {
    let names = std::env::var(name).unwrap_or_default();
    names.split(',').filter_map(take_over).collect()
}

fn take_over(number: &str) -> Option<OwnedFd> {
    let fd: RawFd = number.parse().ok()?;
    // SAFETY: borrowed for one fcntl, which fails on a number that is no open descriptor.
    let borrowed = if fd > 2 { unsafe { BorrowedFd::borrow_raw(fd) } } else { return None };
    let mut now = rustix::io::fcntl_getfd(borrowed).ok()?;
    now.insert(rustix::io::FdFlags::CLOEXEC);
    rustix::io::fcntl_setfd(borrowed, now).ok()?;
    // SAFETY: the parent opened it for this process, named it here, and nothing else in this process knows of it.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Id;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    fn bundle(request: Vec<u8>) -> Bundle {
        Bundle {
            id: Id { slot: 1, generation: 1 },
            flags: 0,
            peer: "127.0.0.1:1".parse().unwrap(),
            socket_bytes: request.len() as u64,
            arrived_ns: 0,
            replaces: 0,
            head_bytes: 0,
            request,
        }
    }

    fn connection() -> (TcpStream, OwnedFd) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0.into())
    }

    #[test]
    fn bundles_of_any_size_arrive_whole_with_a_socket_that_works() {
        let (up, down) = pair().unwrap();
        for length in [0, 1, INLINE_BYTES, INLINE_BYTES + 1, REQUEST_BYTES_TEST] {
            let (mut client, socket) = connection();
            let sent = bundle((0..length).map(|i| i as u8).collect());
            send_bundle(up.as_fd(), &sent, socket.as_fd(), &mut Vec::new()).unwrap();
            drop(socket);
            let Received::Request(got) = receive(down.as_fd(), true, true).unwrap() else { panic!() };
            assert_eq!(got.bundle, sent);
            TcpStream::from(got.socket).write_all(b"hello").unwrap();
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).unwrap();
            assert_eq!(answer, b"hello");
        }
        assert!(matches!(receive(down.as_fd(), true, true).unwrap(), Received::Nothing));
    }
    const REQUEST_BYTES_TEST: usize = crate::wire::REQUEST_BYTES;

    #[test]
    fn a_full_link_refuses_a_bundle_and_what_was_unread_is_counted() {
        let (up, down) = pair().unwrap();
        let (_client, socket) = connection();
        let sent = bundle(vec![b'x'; INLINE_BYTES]);
        assert_eq!(unread_bytes(up.as_fd()), 0);
        let mut sends = 0;
        while send_bundle(up.as_fd(), &sent, socket.as_fd(), &mut Vec::new()).is_ok() {
            sends += 1;
            assert!(sends < 1000);
        }
        assert!(unread_bytes(up.as_fd()) > INLINE_BYTES);
        for _ in 0..sends {
            assert!(matches!(receive(down.as_fd(), true, true).unwrap(), Received::Request(_)));
        }
        assert_eq!(unread_bytes(up.as_fd()), 0);
    }

    #[test]
    fn a_bundle_without_its_socket_is_refused() {
        let (up, down) = pair().unwrap();
        let mut bytes = Vec::new();
        bundle(b"abc".to_vec()).write(&mut bytes);
        rustix::net::send(&up, &bytes, SendFlags::empty()).unwrap();
        let got = receive(down.as_fd(), true, true).unwrap();
        assert!(matches!(got, Received::Refused(WireError::Descriptors)), "{got:?}");
        drop(up);
        assert!(matches!(receive(down.as_fd(), true, true).unwrap(), Received::Gone));
    }
}
