//! The server's end of a chain: accepts conditioned sockets, bounds what is read from them by the request, follows the
//! response, and says when the server is done. The C library and the preload library are thin faces of this module.
//!
//! No call here goes through libc's wrappers of `read`, `write`, `close` and so on, which the preload library interposes.

pub mod address;
pub mod connection;
mod content;
mod ended;
mod exec;
mod lingering;
pub mod options;
mod parking;
mod passing;
mod process;
pub mod response;
pub mod table;
mod turns;
mod waiting;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libc::{c_int, c_void, nfds_t, pollfd, size_t, ssize_t};
use rustix::event::epoll;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, socket_timeout};

use crate::ledger::Ledger;
use crate::link::{self, Received};
use crate::wire::{Notice, REQUEST_BYTES};
use connection::{Connection, Interest, Source};
use ended::{at_end_of_file, replace};
pub use ended::{is_ended, status_flags};
pub use exec::{inherit_standard_streams, programs_may_serve};
use lingering::Next;
pub use lingering::{WaitAlone, Waited, expire, lingers, set_linger};
pub use parking::{made as made_epoll, park, unpark_for, unpark_to_change};
pub use passing::{Passing, pass, receive};
pub use process::{InUse, in_use};
pub use response::{Extent, ResponseTracker};
use table::{Chain, Entry, lock};
pub use waiting::{Wait, waits};

/// How a connection is to be presented.
#[derive(Clone, Copy, Debug, Default)]
pub struct AcceptOptions {
    /// The descriptor is non-blocking.
    pub nonblocking: bool,
    /// The descriptor closes on exec.
    pub cloexec: bool,
    /// The response is followed, and the server's end ends with it; for servers that do not say so themselves.
    pub follow: bool,
    /// The listening descriptor counts as a non-blocking one, whatever its flags say.
    pub dont_wait: bool,
}

/// What a read of a descriptor may do.
#[derive(Debug)]
pub enum Reading {
    /// The descriptor is none of ours: read as usual.
    AsUsual,
    /// Nothing can be read: EAGAIN because nothing is there yet, or EINTR.
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
    /// The client's end: the request has been read to its own, and what is on the socket belongs to the next one.
    End,
}

fn borrow(fd: RawFd) -> BorrowedFd<'static> {
    // SAFETY: numbers that the server passed in, used for single system calls that fail with EBADF if it closed them.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Makes `fd` stand for the listening socket of a chain, at the address that the server asked for.
///
/// # Errors
/// The number is too high.
pub fn listen(fd: RawFd, chain: Arc<Chain>, address: SocketAddr) -> Result<(), Errno> {
    exec::listens();
    chain.ledger.set_listening();
    if table::set(fd, Entry::Listener { chain, address }) { Ok(()) } else { Err(Errno::MFILE) }
}

/// A chain from its link and its ledger's memory file.
///
/// # Errors
/// The ledger cannot be mapped.
pub fn chain(link: OwnedFd, ledger: &OwnedFd) -> std::io::Result<Arc<Chain>> {
    process::own(true);
    Ok(Arc::new(Chain { link, ledger: Ledger::open(ledger.as_fd())? }))
}

/// As [`chain`], for a process of which children never serve its connections.
///
/// # Errors
/// The ledger cannot be mapped.
pub fn chain_without_children(link: OwnedFd, ledger: &OwnedFd) -> std::io::Result<Arc<Chain>> {
    process::own(false);
    Ok(Arc::new(Chain { link, ledger: Ledger::open(ledger.as_fd())? }))
}

/// The address that the listening socket `fd` stands for was asked to have; `None`: it is no listener of ours.
pub fn listener(fd: RawFd) -> Option<SocketAddr> {
    if !table::is_listener(fd) {
        return None;
    }
    match table::get(fd)? {
        Entry::Listener { address, .. } => Some(address),
        _ => None,
    }
}

/// An address as a socket shows it whose listening socket is an IPv6 one, or is not. A server that listens for IPv4 has no
/// room for another address: nginx closes such a connection at once.
fn presented(address: SocketAddr, as_v6: bool) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(v4) if as_v6 => v4.to_ipv6_mapped().into(),
        IpAddr::V6(v6) if !as_v6 => v6.to_ipv4_mapped().unwrap_or(Ipv4Addr::UNSPECIFIED).into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// Which end of a connection an address is of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum End {
    /// The client's.
    Peer,
    /// The server's.
    Local,
}

/// An address of the connection `fd`, as the server's listening socket would show it; `None`: it is no connection of ours.
///
/// # Errors
/// As getsockname(2) and getpeername(2).
pub fn address_of(fd: RawFd, end: End) -> Option<Result<SocketAddr, Errno>> {
    let as_v6 = table::connection(fd)?.lock().presents_v6;
    let get = || {
        let address = match end {
            End::Peer => rustix::net::getpeername(borrow(fd))?.ok_or(Errno::NOTCONN)?,
            End::Local => rustix::net::getsockname(borrow(fd))?,
        };
        Ok(presented(SocketAddr::try_from(address).map_err(|_| Errno::INVAL)?, as_v6))
    };
    Some(get())
}

/// Accepts the next request. `None`: `fd` is no listener of ours.
///
/// # Errors
/// As accept(2): EAGAIN, EINTR, EMFILE; EINVAL when the chain is gone; ECONNABORTED for a bundle that was refused.
pub fn accept(fd: RawFd, options: AcceptOptions) -> Option<Result<(RawFd, SocketAddr), Errno>> {
    match table::get(fd) {
        Some(Entry::Listener { chain, address }) => Some(accept_from(fd, &chain, address.is_ipv6(), options)),
        _ => None,
    }
}

fn accept_from(
    fd: RawFd,
    chain: &Arc<Chain>,
    presents_v6: bool,
    options: AcceptOptions,
) -> Result<(RawFd, SocketAddr), Errno> {
    lingering::accepts();
    chain.ledger.set_accepts();
    loop {
        let received = turns::receive(borrow(fd), chain, options)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let request = match received {
            Received::Request(request) => request,
            Received::Nothing => return Err(Errno::AGAIN),
            Received::Gone => return Err(Errno::INVAL),
            Received::Refused(_) => return Err(Errno::CONNABORTED),
            Received::OutOfDescriptors(bundle) => {
                let _ = link::send_notice(chain.link.as_fd(), Notice::HandAgain(bundle.id));
                return Err(Errno::MFILE);
            }
        };
        let _in_use = process::in_use();
        let (bundle, socket) = (request.bundle, request.socket);
        let number = socket.as_raw_fd();
        if number as usize >= table::DESCRIPTORS {
            let _ = link::send_notice(chain.link.as_fd(), Notice::HandAgain(bundle.id));
            return Err(Errno::MFILE);
        }
        // Lost: another copy of this bundle is being served, or its connection is over.
        if !chain.ledger.claim_for(bundle.id, process::owner()) {
            continue;
        }
        set_blocking(socket.as_fd(), !options.nonblocking);
        let peer = presented(bundle.peer, presents_v6);
        let mut connection = Connection::new(chain.clone(), bundle, number, options.follow);
        connection.presents_v6 = presents_v6;
        connection.cloexec = options.cloexec;
        connection.is_blocking = !options.nonblocking;
        ended::is_new(number);
        if !table::set(number, Entry::Connection(Arc::new(Mutex::new(connection)))) {
            return Err(Errno::MFILE);
        }
        return Ok((socket.into_raw_fd(), peer));
    }
}

/// The flag belongs to the socket, which others had before: it may be either way. To ask first would be as dear as to set it.
fn set_blocking(fd: BorrowedFd<'_>, blocking: bool) {
    let _ = rustix::fs::fcntl_setfl(fd, if blocking { OFlags::empty() } else { OFlags::NONBLOCK });
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
    let Some(connection) = table::connection(fd) else { return Ok(Ok(Reading::AsUsual)) };
    let mut connection = connection.lock();
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

/// As [`reading`], once there is something that the read may do: `dont_wait` says that it does not wait whatever the
/// descriptor's flags say.
pub fn ready<R, P>(fd: RawFd, wanted: usize, dont_wait: bool, calls: &Calls<R, P>) -> Reading
where
    R: Fn(*mut c_void, size_t, c_int) -> ssize_t,
    P: Fn(*mut pollfd, nfds_t, c_int) -> c_int,
{
    loop {
        match reading(fd, wanted) {
            Ok(reading) => return reading,
            Err(Awaited::Content) => {
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
        // Behind what was rewritten, the rest of the request may be on the socket since before it was told of any: a server that
        // got less than it wanted takes that for all that there is.
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

/// A wait beyond the end of a request looks again at first so soon, and then less and less often, at last every so often.
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
            1.. if has_next(fd) && (is_looked_at || !waits) => {
                if is_looked_at && poll(&raw mut watched, 0, pause.map_or(-1, milliseconds)) < 0 {
                    return Err(last_error());
                }
            }
            1.. => return Ok(Beyond::End),
            _ => return Err(last_error()),
        }
        if is_looked_at && !is_read(number) {
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

/// Whether what the kernel has to read on `fd` is the next request, of which the server is not to hear yet: it has read the
/// one before to its end, and not ended its response.
pub fn hides(fd: RawFd) -> bool {
    let Some(connection) = table::connection(fd) else { return false };
    let is_exhausted = {
        let connection = connection.lock();
        connection.source() == Source::Exhausted && connection.lingers().is_none()
    };
    let fd = borrow(fd);
    is_exhausted && has_next(fd) && !has_ended_unseen(fd)
}

/// Whether the client has ended its side.
pub fn is_left(fd: RawFd) -> bool {
    let fd = borrow(fd);
    let mut watched = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::RDHUP)];
    rustix::event::poll(&mut watched, Some(&rustix::time::Timespec::default())).is_ok_and(|left| left > 0)
}

/// A server that waits for the next request has ended its response, in ways that could not be followed.
fn has_ended_unseen(fd: BorrowedFd<'_>) -> bool {
    let is_blocking = rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK));
    is_blocking && has_written_unseen(fd)
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
    connection.is_muted = true;
    for interest in connection.interests.iter().filter(|interest| interest.events & once == 0) {
        let events = epoll::EventFlags::from_bits_retain(interest.events & !(told as u32));
        let data = epoll::EventData::new_u64(interest.data);
        let _ = epoll::modify(borrow(interest.epoll), borrow(interest.fd), data, events);
    }
}

/// The server is about to write `bytes`, or the kernel for it, or to shut `fd` down: what is to be written instead of the first of them,
/// or of as many as there are, followed by [`wrote_instead`]; `None`: these bytes. What only lingers goes on without the server.
///
/// # Errors
/// EPIPE: the server's end of the connection is over. It was before, or its response is complete, and what it writes now is
/// no part of one.
pub fn before_write(fd: RawFd, bytes: Option<&[u8]>) -> Result<Option<Vec<u8>>, Errno> {
    if let Some(connection) = table::connection(fd) {
        let mut connection = connection.lock();
        if connection.lingers().is_none() {
            return Ok(bytes.and_then(|bytes| connection.instead_of(bytes)));
        }
        end_locally(&mut connection);
    }
    if is_ended(fd) { Err(Errno::PIPE) } else { Ok(None) }
}

/// The server wrote `written` bytes that begin with `instead`, or with a part of it: what is left of it takes the place of what the server
/// writes next, since it goes on from bytes of its own.
pub fn wrote_instead(fd: RawFd, instead: &[u8], written: usize) {
    if let Some(connection) = table::connection(fd) {
        connection.lock().wrote_instead(instead, written);
    }
}

/// The server wrote: `follow` is given the tracker. Ends the server's end of the connection once the response is complete.
pub fn wrote(fd: RawFd, follow: impl FnOnce(&mut ResponseTracker)) {
    let Some(connection) = table::connection(fd) else { return };
    let mut guard = connection.lock();
    guard.set_touched();
    if let Some(tracker) = guard.tracker() {
        follow(tracker);
    }
    note_holder(&guard);
    if guard.changes_protocol() {
        guard.is_muted = false;
        report_again(&guard, 0);
    }
    if guard.is_over() {
        over(&mut guard);
    }
}

/// The server is to be told of what is on the socket, although it was told of it before; by sets that have `events`.
fn report_again(connection: &Connection, events: u32) {
    // A registration for one event may be spent: the server will ask again.
    let is_meant = |interest: &&Interest| {
        interest.events & libc::EPOLLONESHOT as u32 == 0 && interest.events & events == events
    };
    for interest in connection.interests.iter().filter(is_meant) {
        let events = epoll::EventFlags::from_bits_retain(interest.events);
        let data = epoll::EventData::new_u64(interest.data);
        let _ = epoll::modify(borrow(interest.epoll), borrow(interest.fd), data, events);
    }
}

/// Request and response are complete, and both sides want to keep the connection.
fn over(connection: &mut Connection) {
    if !lingering::linger(connection) {
        end_locally(connection);
    }
}

fn note_holder(connection: &Connection) {
    let ledger = &connection.chain().ledger;
    if ledger.holder(connection.id().slot) == 0 {
        ledger.note_holder(connection.id().slot);
    }
}

/// The server reads end-of-file from now on; the client notices nothing (§4.2, persistent connection management).
fn end_locally(connection: &mut Connection) {
    let Some(ended) = at_end_of_file() else { return };
    let descriptors = std::mem::take(&mut connection.descriptors);
    let socket = descriptors.first().map(|&fd| borrow(fd));
    connection.release(socket, Some(true));
    for fd in descriptors {
        let mut interests = connection.forget_interests(fd);
        replace(ended, fd, connection.cloexec);
        // A registration for one event may be spent: the server will ask again (see `registered`).
        interests.retain(|interest| interest.events & libc::EPOLLONESHOT as u32 == 0);
        let ended = Arc::new(Mutex::new(Vec::new()));
        let _ = table::set(fd, Entry::Ended(ended.clone()));
        waiting::owe(fd, ended, interests);
    }
}

fn add(interest: Interest) {
    let data = epoll::EventData::new_u64(interest.data);
    let events = epoll::EventFlags::from_bits_retain(interest.events);
    let _ = epoll::add(borrow(interest.epoll), borrow(interest.fd), data, events);
}

fn remove(interest: Interest) {
    // Fails harmlessly if the server removed it itself, or closed its epoll descriptor.
    let _ = epoll::delete(borrow(interest.epoll), borrow(interest.fd));
}

/// The server changed its registration of `fd` with epoll; `result` is what the call returned. Returns what it should.
pub fn registered(interest: Interest, operation: i32, result: Result<(), Errno>) -> Result<(), Errno> {
    let _in_use = process::in_use();
    match table::get(interest.fd) {
        Some(Entry::Connection(connection)) if result.is_ok() => {
            note_interest(&mut lock(&connection).interests, interest, operation);
        }
        Some(Entry::Ended(interests)) if matches!(result, Ok(()) | Err(Errno::NOENT)) => {
            // From here on nobody registers for the descriptor but the server.
            waiting::forget(interest.epoll, interest.fd);
            match operation {
                libc::EPOLL_CTL_DEL => remove(interest),
                libc::EPOLL_CTL_MOD if result.is_err() => add(interest),
                _ => {}
            }
            note_interest(&mut lock(&interests), interest, operation);
            return Ok(());
        }
        _ => {}
    }
    result
}

fn note_interest(interests: &mut Vec<Interest>, interest: Interest, operation: i32) {
    interests.retain(|i| (i.epoll, i.fd) != (interest.epoll, interest.fd));
    // One descriptor is in a handful of epoll sets at most; a server that exceeds this leaks a registration.
    if operation != libc::EPOLL_CTL_DEL && interests.len() < 64 {
        interests.push(interest);
    }
}

/// The server set or cleared TCP_CORK.
pub fn corked(fd: RawFd, on: bool) {
    if let Some(connection) = table::connection(fd) {
        connection.lock().set_corked(on);
    }
}

/// The server set what its close does (SO_LINGER).
pub fn set_linger_option(fd: RawFd) {
    if let Some(connection) = table::connection(fd) {
        connection.lock().set_linger_option();
    }
}

/// Whether `fd` is a connection, or was one.
pub fn is_ours(fd: RawFd) -> bool {
    table::is_connection(fd) || table::is_ended(fd)
}

/// Whether `fd` is a connection of which the request has been read to its end.
pub fn is_read(fd: RawFd) -> bool {
    let Some(connection) = table::connection(fd) else { return false };
    connection.lock().source() == Source::Exhausted
}

/// The server changed whether calls on `fd` wait.
pub fn set_blocking_known(fd: RawFd, is_blocking: bool) {
    if let Some(connection) = table::connection(fd) {
        connection.lock().is_blocking = is_blocking;
    }
}

/// The server changed whether `fd` closes on exec.
pub fn set_cloexec(fd: RawFd, cloexec: bool) {
    if !cloexec {
        parking::share(fd);
    }
    if let Some(connection) = table::connection(fd) {
        connection.lock().cloexec = cloexec;
    }
}

/// This process serves its connections from here on: filters ask after it if they wonder.
pub fn adopt_connections() {
    for (_, connection) in table::connections() {
        let connection = lock(&connection);
        connection.chain().ledger.note_holder(connection.id().slot);
    }
}

/// Who is to close a connection when the server does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Closing {
    /// Only the server; the connection may bring more requests.
    Locally,
    /// Everybody.
    ForAll,
    /// What following the response says.
    AsFollowed,
}

/// The server is about to close `fd`: call before close(2). Tells the chain if this is the last descriptor of its
/// connection in any process.
pub fn closing(fd: RawFd, closing: Closing) {
    parking::forget(|closed| closed == fd);
    if table::get(fd).is_none() {
        return;
    }
    if !process::is_owner() {
        // A child of vfork(2), _Fork(3) or clone(2): its numbers are not the table's any more.
        return ended::closes_for_another(fd);
    }
    let _in_use = process::in_use();
    let connection = match table::take(fd) {
        Some(Entry::Connection(connection)) => connection,
        Some(Entry::Ended(interests)) => {
            ended::closes(fd);
            lock(&interests)
                .iter()
                .filter(|interest| interest.fd == fd)
                .for_each(|&interest| remove(interest));
            return;
        }
        _ => return,
    };
    let mut guard = lock(&connection);
    guard.forget_interests(fd);
    guard.descriptors.retain(|&other| other != fd);
    if !guard.descriptors.is_empty() {
        return;
    }
    let socket = Some(borrow(fd));
    let locally = match closing {
        Closing::Locally => guard.close_locally(borrow(fd)),
        Closing::ForAll => Some(false),
        Closing::AsFollowed => guard.closes_locally(),
    };
    guard.release(socket, locally);
    let ledger = &guard.chain().ledger;
    let slot = guard.id().slot;
    if ledger.holder(slot) == process::owner() {
        ledger.forget_holder(slot);
    }
}

/// `new` has become a duplicate of `old`.
pub fn duplicated(old: RawFd, new: RawFd) {
    parking::share(old);
    if table::get(old).is_none() {
        return;
    }
    if !process::is_owner() {
        return exec::duplicated_for_another_program(old, new);
    }
    let _in_use = process::in_use();
    let Some(entry) = table::get(old) else { return };
    if let Entry::Connection(connection) = &entry {
        lock(connection).descriptors.push(new);
    }
    let _ = table::set(new, entry);
}

/// The process is about to end, or to become another program: its connections go with it, but for those that the new
/// program gets as its standard input or output.
pub fn before_exit(becomes_another: bool) {
    if !process::is_owner() {
        return;
    }
    lingering::give_back();
    turns::leave();
    if becomes_another {
        parking::unpark();
    }
    for (fd, entry) in table::numbered_entries() {
        if !becomes_another || fd > 2 {
            closing(fd, Closing::AsFollowed);
        } else if let Entry::Connection(connection) = entry {
            exec::keep(&lock(&connection));
        }
    }
}

/// The server is about to close every descriptor from `first` to `last`.
pub fn closing_range(first: RawFd, last: RawFd) {
    parking::forget(|closed| (first..=last).contains(&closed));
    for (fd, _) in table::numbered_entries() {
        if (first..=last).contains(&fd) {
            closing(fd, Closing::AsFollowed);
        }
    }
}
