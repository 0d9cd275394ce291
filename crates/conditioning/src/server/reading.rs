//! What the server may read of a connection: its request, and nothing that comes behind it.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use libc::{c_int, c_void, nfds_t, pollfd, size_t, ssize_t};
use rustix::event::epoll;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, socket_timeout};

use super::connection::Source;
use super::lingering::{self, Next, WaitAlone};
use super::listening;
use super::{borrow, note_holder, over, process, report_again, table, waiting};
use crate::wire::REQUEST_BYTES;

/// What a read of a descriptor may do.
#[derive(Debug)]
pub enum Reading {
    /// The descriptor is none of ours: read as usual.
    AsUsual,
    /// Nothing can be read: EAGAIN because nothing is there yet, EINTR, or ENOTCONN of a listening socket.
    Fails(Errno),
    /// Take from these bytes, then report with [`took`].
    Copy(Vec<u8>),
    /// Read from the socket at most this much, then report with [`took`].
    Socket(usize),
    /// End-of-file: there is nothing more to read, as if the client had ended.
    Ended,
}

/// What a read has to wait for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Awaited {
    /// Anything on the socket: the request has content whose end was not seen.
    Content,
    /// Anything on the socket: content that nobody reads, because the response is complete.
    Rest,
    /// The client's end: the request has been read to its own, and what is on the socket belongs to the next one.
    End,
}

/// What a read of up to `wanted` bytes from `fd` may do.
///
/// # Errors
/// What it has to wait for before it may do anything. Where the server is about to wait for a client's next request on a
/// connection that lingers, it does so here.
pub fn reading(fd: RawFd, wanted: usize) -> Result<Reading, Awaited> {
    loop {
        match reading_now(fd, wanted) {
            Ok(reading) => return reading,
            Err(wait) => match wait.wait(None) {
                Ok(_) => {}
                Err(error) => return Ok(Reading::Fails(error)),
            },
        }
    }
}

fn reading_now(fd: RawFd, wanted: usize) -> Result<Result<Reading, Awaited>, WaitAlone> {
    let Some(connection) = table::connection(fd) else {
        let is_listener = table::is_listener(fd);
        return Ok(Ok(if is_listener { Reading::Fails(Errno::NOTCONN) } else { Reading::AsUsual }));
    };
    let mut connection = connection.lock();
    if connection.may_mistake_content() {
        match connection.skip(borrow(fd)) {
            Source::Exhausted if connection.is_over() => over(&mut connection),
            Source::Exhausted => {}
            Source::Malformed => return Ok(Ok(Reading::Ended)),
            // Who sends on and on would have the server to itself.
            _ if connection.has_skipped_enough() => return Ok(Ok(Reading::Ended)),
            _ => return Ok(Err(Awaited::Rest)),
        }
        drop(connection);
        return reading_now(fd, wanted);
    }
    if connection.goes_on_in_vain() {
        return Ok(Ok(Reading::Ended));
    }
    Ok(Ok(match connection.source_of(borrow(fd), wanted) {
        Source::Exhausted if connection.lingers().is_some() => {
            match lingering::next(&mut connection, borrow(fd)) {
                Next::Request => Reading::Socket(connection.left().min(wanted)),
                Next::Nothing => Reading::Fails(Errno::AGAIN),
                Next::Wait(wait) => return Err(wait),
                Next::Left => Reading::Socket(wanted),
                Next::Over => return Ok(Err(Awaited::End)),
            }
        }
        Source::Copy => {
            let unread = connection.unread_copy();
            Reading::Copy(unread[..unread.len().min(wanted).min(REQUEST_BYTES)].to_vec())
        }
        Source::Socket(left) => Reading::Socket(usize::try_from(left).unwrap_or(usize::MAX).min(wanted)),
        Source::Unseen => return Ok(Err(Awaited::Content)),
        Source::Exhausted => return Ok(Err(Awaited::End)),
        Source::Malformed => Reading::Ended,
    }))
}

/// The system calls by which a read waits, each a point of cancellation (pthreads(7)) if it is libc's own.
pub struct Calls<R, P> {
    /// recv(2)
    pub recv: R,
    /// poll(2)
    pub poll: P,
}

/// What a wait for content has found may be gone at the next look, because another thread has read it: so often, and no
/// more.
const MOST_LOOKS: u32 = 100;

/// As [`reading`], once there is something that the read may do: `dont_wait` says that it does not wait whatever the
/// descriptor's flags say.
pub fn ready<R, P>(fd: RawFd, wanted: usize, dont_wait: bool, calls: &Calls<R, P>) -> Reading
where
    R: Fn(*mut c_void, size_t, c_int) -> ssize_t,
    P: Fn(*mut pollfd, nfds_t, c_int) -> c_int,
{
    // A read of nothing takes nothing, and waits for nothing.
    if wanted == 0 {
        return Reading::AsUsual;
    }
    let mut looks = 0;
    loop {
        match reading(fd, wanted) {
            Ok(reading) => return reading,
            // Something is there, and nothing of it can be read.
            Err(Awaited::Content) if looks == MOST_LOOKS => return Reading::Ended,
            Err(awaited @ (Awaited::Content | Awaited::Rest)) => {
                looks += u32::from(awaited == Awaited::Content);
                let mut byte = 0u8;
                let flags = libc::MSG_PEEK | if dont_wait { libc::MSG_DONTWAIT } else { 0 };
                match (calls.recv)((&raw mut byte).cast(), 1, flags) {
                    0 => return Reading::Ended,
                    1 => {}
                    _ => return Reading::Fails(last_error()),
                }
            }
            Err(Awaited::End) => match beyond(fd, dont_wait, &calls.poll) {
                Ok(Beyond::End) => return Reading::Ended,
                Ok(Beyond::News) => {}
                Err(error) => return Reading::Fails(error),
            },
        }
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// The server took `length` bytes after [`reading`] said from where. With `follow`, its end may now be over.
pub fn took(fd: RawFd, length: usize, from_copy: bool, follow: bool) {
    let Some(connection) = table::connection(fd) else { return };
    let mut guard = connection.lock();
    if follow {
        guard.watch_for_unseen(borrow(fd));
    }
    if from_copy {
        guard.took_copy(borrow(fd), length);
        // Behind what was rewritten, the rest of the request may be on the socket since before it was told of any: a
        // server that got less than it wanted takes that for all that there is.
        if guard.unread_copy().is_empty() && guard.source() != Source::Exhausted {
            report_again(&guard, libc::EPOLLET as u32);
        }
    } else {
        guard.took_from_socket(length as u64);
    }
    note_holder(&guard);
    if follow && guard.is_over() {
        over(&mut guard);
    }
}

/// What came of a read beyond the end of a request.
enum Beyond {
    /// The client has ended.
    End,
    /// The request is not at its end any more, or the server's end of the connection is over: another thread wrote.
    News,
}

/// A wait beyond the end of a request looks again at first so soon, and then less and less often, at last every so
/// often.
const SOONEST: Duration = Duration::from_millis(10);
const LATEST: Duration = Duration::from_millis(200);

/// Reads beyond the end of a request: what is on the socket belongs to the next one.
///
/// # Errors
/// EAGAIN while the client is there, of a read that does not wait; and after as long as one waits (SO_RCVTIMEO). EINTR.
fn beyond(
    number: RawFd,
    dont_wait: bool,
    poll: impl Fn(*mut pollfd, nfds_t, c_int) -> c_int,
) -> Result<Beyond, Errno> {
    if ends_unseen(number) {
        return Ok(Beyond::News);
    }
    let fd = borrow(number);
    let waits = !dont_wait && !rustix::fs::fcntl_getfl(fd)?.contains(OFlags::NONBLOCK);
    // A server that waits for the next request has ended its response, in ways that could not be followed.
    if waits && has_written_unseen(fd) {
        return Ok(Beyond::End);
    }
    let limit = if waits { socket_timeout(fd, Timeout::Recv)? } else { Some(Duration::ZERO) };
    let until = limit.map(|limit| Instant::now() + limit);
    let mut look_again = SOONEST;
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        // Another thread may end the response, or change the protocol by it.
        let is_looked_at = waits && !process::has_one_thread();
        let pause =
            if is_looked_at { Some(left.map_or(look_again, |left| left.min(look_again))) } else { left };
        // A blocking server learns here that its client has left, as it would from read(2).
        let mut watched = pollfd { fd: number, events: libc::POLLRDHUP, revents: 0 };
        match poll(&raw mut watched, 1, pause.map_or(-1, milliseconds)) {
            0 => {}
            // It has, but not before requests that it sent are answered, unless nobody can answer this one any more.
            1.. if brings_another(fd) && (is_looked_at || !waits) => {
                if is_looked_at && poll(&raw mut watched, 0, pause.map_or(-1, milliseconds)) < 0 {
                    return Err(last_error());
                }
            }
            1.. => return Ok(Beyond::End),
            _ => return Err(last_error()),
        }
        if is_looked_at && (ends_unseen(number) || !is_read(number)) {
            return Ok(Beyond::News);
        }
        if left.is_some_and(|left| pause.is_some_and(|pause| left <= pause)) {
            if !waits {
                mute(fd);
            }
            return Err(Errno::AGAIN);
        }
        look_again = (2 * look_again).min(LATEST);
    }
}

fn milliseconds(time: Duration) -> c_int {
    c_int::try_from(time.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX)
}

/// Whether what the kernel has to read on `fd` is not for the server now: the next request, while it has read the one
/// before to its end and not ended its response; or, where `fd` listens, a connection for another listening socket.
pub fn hides(fd: RawFd) -> bool {
    let Some(connection) = table::connection(fd) else { return listening::is_told_of_anothers(fd) };
    let is_exhausted = {
        let connection = connection.lock();
        connection.source() == Source::Exhausted && connection.lingers().is_none()
    };
    is_exhausted && has_next(borrow(fd)) && !ends_unseen(fd) && !has_ended_unseen(borrow(fd))
}

/// Whether the response is complete, and the server's end over, by what was written in ways that nobody saw.
pub(super) fn ends_unseen(fd: RawFd) -> bool {
    let Some(connection) = table::connection(fd) else { return false };
    let mut connection = connection.lock();
    if connection.lingers().is_some() {
        return false;
    }
    connection.follow_unseen(borrow(fd));
    let is_over = connection.is_over();
    if is_over {
        over(&mut connection);
    }
    is_over
}

/// Whether the client has ended its side.
pub fn is_left(fd: RawFd) -> bool {
    let fd = borrow(fd);
    let mut watched = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::RDHUP)];
    rustix::event::poll(&mut watched, Some(&rustix::time::Timespec::default())).is_ok_and(|left| left > 0)
}

/// A server that waits for the next request has ended its response, in ways that could not be followed. Of one whose end is
/// known it has not.
fn has_ended_unseen(fd: BorrowedFd<'_>) -> bool {
    let is_blocking = rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK));
    let is_under_way =
        || table::connection(fd.as_raw_fd()).is_some_and(|connection| connection.lock().may_end_unseen());
    is_blocking && has_written_unseen(fd) && !is_under_way()
}

/// Whether a further request is on the socket.
pub fn brings_another(fd: BorrowedFd<'_>) -> bool {
    let persists = table::connection(fd.as_raw_fd()).is_some_and(|connection| connection.lock().persists());
    persists && has_next(fd)
}

/// Whether something is on the socket.
fn has_next(fd: BorrowedFd<'_>) -> bool {
    let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
    matches!(rustix::net::recv(fd, &mut [0u8; 1][..], flags), Ok((1, _)))
}

/// Bytes that the server may read of the `there` that the kernel has on `fd` (FIONREAD, tty_ioctl(4)).
pub fn readable_bytes(fd: RawFd, there: usize) -> usize {
    let Some(connection) = table::connection(fd) else { return there };
    let mut connection = connection.lock();
    match connection.source_of(borrow(fd), there) {
        Source::Copy => connection.unread_copy().len(),
        Source::Socket(left) => usize::try_from(left).unwrap_or(usize::MAX).min(there),
        Source::Exhausted if connection.lingers().is_some() => there,
        Source::Exhausted | Source::Unseen | Source::Malformed => 0,
    }
}

fn has_written_unseen(fd: BorrowedFd<'_>) -> bool {
    let Some(connection) = table::connection(fd.as_raw_fd()) else { return false };
    connection.lock().wrote_unseen(fd)
}

/// The next request is on the socket, and the server is told so again and again: it is to hear of nothing but the
/// connection's end until its own end is over (level-triggered epoll), and not of that if it comes behind requests.
fn mute(fd: BorrowedFd<'_>) {
    let Some(connection) = table::connection(fd.as_raw_fd()) else { return };
    if !has_next(fd) {
        return;
    }
    let once = (libc::EPOLLET | libc::EPOLLONESHOT) as u32;
    let told = if is_left(fd.as_raw_fd()) { libc::EPOLLIN | libc::EPOLLRDHUP } else { libc::EPOLLIN };
    let mut connection = connection.lock();
    if connection.may_end_unseen() {
        waiting::look_at(fd.as_raw_fd());
    }
    connection.is_muted = true;
    for interest in connection.interests.iter().filter(|interest| interest.events & once == 0) {
        let events = epoll::EventFlags::from_bits_retain(interest.events & !(told as u32));
        let data = epoll::EventData::new_u64(interest.data);
        let _ = epoll::modify(borrow(interest.epoll), borrow(interest.fd), data, events);
    }
}

/// Whether `fd` is a connection of which the request has been read to its end.
pub fn is_read(fd: RawFd) -> bool {
    let Some(connection) = table::connection(fd) else { return false };
    connection.lock().source() == Source::Exhausted
}
