//! The server's end of a chain: accepts conditioned sockets, bounds what is read from them by the request, follows the
//! response, and says when the server is done. The C library and the preload library are thin faces of this module.
//!
//! No call here goes through libc's wrappers of `read`, `write`, `close` and so on, which the preload library
//! interposes.

pub mod address;
pub mod connection;
mod content;
mod ended;
mod exec;
mod head;
mod lingering;
mod listening;
pub mod options;
mod parking;
mod passing;
mod process;
pub mod raw;
mod reading;
mod registrations;
pub mod response;
mod shut_down;
pub mod table;
mod terms;
mod turns;
mod waiting;

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::epoll;
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::ledger::Ledger;
use crate::link::{self, Received};
use crate::wire::Notice;
use address::presented;
use connection::{Connection, Interest};
use ended::{at_end_of_file, replace};
pub use ended::{is_ended, status_flags};
pub use exec::{inherit_standard_streams, programs_may_serve};
pub use lingering::{WaitAlone, Waited, expire, lingers, set_linger};
pub use listening::{Listening, chosen, described as described_listeners, described_of, is_taken, set_alone};
pub use options::ForConnections;
pub use parking::{made as made_epoll, park, unpark_for, unpark_to_change};
pub use passing::{Passing, pass, receive};
pub use process::{InUse, in_use};
pub use reading::{
    Awaited, Calls, Reading, brings_another, hides, is_left, is_read, readable_bytes, reading, ready, took,
};
pub use registrations::{carry_over, registrations};
pub use response::{Extent, ResponseTracker};
pub use shut_down::{LOOK, may_be_shut_down, shut_down};
use table::{Chain, Entry, Over, lock};
pub use terms::Terms;
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
    /// Called before a wait, and now and then while a process of several threads waits: a thread that was cancelled may
    /// end there (pthread_testcancel(3)).
    pub may_end: Option<fn()>,
}

fn borrow(fd: RawFd) -> BorrowedFd<'static> {
    // SAFETY: numbers that the server passed in, used for single system calls that fail with EBADF if it closed them.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Makes `fd` stand for the listening socket of a chain, at the address that the server asked for.
///
/// # Errors
/// The number is too high.
pub fn listen(fd: RawFd, chain: Arc<Chain>, at: impl Into<Listening>) -> Result<(), Errno> {
    listen_with(fd, chain, at.into(), ForConnections::default())
}

/// As [`listen`]; connections have `options` from it.
///
/// # Errors
/// The number is too high.
pub fn listen_with(
    fd: RawFd,
    chain: Arc<Chain>,
    at: Listening,
    options: ForConnections,
) -> Result<(), Errno> {
    exec::listens();
    chain.ledger.set_listening();
    let entry = Entry::Listener { chain, at, options: Arc::new(options) };
    if table::set(fd, entry) { Ok(()) } else { Err(Errno::MFILE) }
}

/// The server sets an option of the listening descriptor `fd`. `None`: it is none of those that connections would have from
/// it.
///
/// # Errors
/// As setsockopt(2).
pub fn set_for_connections(fd: RawFd, level: i32, name: i32, value: &[u8]) -> Option<Result<(), Errno>> {
    let (_, at) = listening::of(fd)?;
    listening::options_of(fd)?.set(at.address, level, name, value)
}

/// What getsockopt(2) says of such an option.
pub fn option_for_connections(fd: RawFd, level: i32, name: i32) -> Option<Vec<u8>> {
    let (_, at) = listening::of(fd)?;
    listening::options_of(fd)?.get(at.address, level, name)
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

/// Where the listening socket that `fd` stands for was asked to listen; `None`: it is no listener of ours.
pub fn listener(fd: RawFd) -> Option<Listening> {
    if !table::is_listener(fd) {
        return None;
    }
    listening::of(fd).map(|(_, at)| at)
}

/// Which end of a connection an address is of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum End {
    /// The client's.
    Peer,
    /// The server's.
    Local,
}

/// An address of the connection `fd`, which may be over, as the server's listening socket would show it; `None`: it is
/// no connection of ours.
///
/// # Errors
/// As getsockname(2) and getpeername(2).
pub fn address_of(fd: RawFd, end: End) -> Option<Result<SocketAddr, Errno>> {
    if is_ended(fd) {
        let Some(Entry::Ended(over)) = table::get(fd) else { return None };
        let (peer, local) = over.addresses?;
        return Some(Ok(if end == End::Peer { peer } else { local }));
    }
    if end == End::Peer && table::is_listener(fd) {
        return Some(Err(Errno::NOTCONN));
    }
    let as_v6 = table::connection(fd)?.lock().presents_v6;
    Some(address_presented(borrow(fd), end, as_v6))
}

fn address_presented(socket: BorrowedFd<'_>, end: End, as_v6: bool) -> Result<SocketAddr, Errno> {
    let address = match end {
        End::Peer => rustix::net::getpeername(socket)?.ok_or(Errno::NOTCONN)?,
        End::Local => rustix::net::getsockname(socket)?,
    };
    Ok(presented(SocketAddr::try_from(address).map_err(|_| Errno::INVAL)?, as_v6))
}

/// Accepts the next request. `None`: `fd` is no listener of ours.
///
/// # Errors
/// As accept(2): EAGAIN, EINTR, EMFILE; EINVAL when the chain is gone.
pub fn accept(fd: RawFd, options: AcceptOptions) -> Option<Result<(RawFd, SocketAddr), Errno>> {
    listening::of(fd).map(|(chain, at)| accept_from(fd, &chain, at, options))
}

/// Whether the last request came when there was no descriptor left for it.
static LACKED_DESCRIPTOR: AtomicBool = AtomicBool::new(false);

fn accept_from(
    fd: RawFd,
    chain: &Arc<Chain>,
    at: Listening,
    options: AcceptOptions,
) -> Result<(RawFd, SocketAddr), Errno> {
    lingering::accepts();
    // A server that tries again at once would be handed the same request until nobody is handed it any more.
    if LACKED_DESCRIPTOR.load(Ordering::Relaxed) {
        rustix::io::fcntl_dupfd_cloexec(&chain.link, 0)?;
    }
    loop {
        let received = match listening::receive(fd, at, chain, options) {
            // Another thread has shut it down.
            Err(_) | Ok(Received::Nothing) if !table::is_listener(fd) => return Err(Errno::INVAL),
            received => received.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?,
        };
        // A server that tries before anything is there has yet to show that it hears of what comes.
        if !matches!(received, Received::Nothing) {
            chain.ledger.set_accepts();
        }
        let request = match received {
            Received::Request(request) => request,
            Received::Nothing => return Err(Errno::AGAIN),
            Received::Gone => return Err(Errno::INVAL),
            // The filter's fault: it is as if it had sent nothing.
            Received::Refused(_) => continue,
            Received::OutOfDescriptors(bundle) => {
                LACKED_DESCRIPTOR.store(true, Ordering::Relaxed);
                let _ = link::send_notice(chain.link.as_fd(), Notice::HandAgain(bundle.id));
                return Err(Errno::MFILE);
            }
        };
        LACKED_DESCRIPTOR.store(false, Ordering::Relaxed);
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
        let presents_v6 = at.address.is_ipv6();
        let peer = presented(bundle.peer, presents_v6);
        let says_what_close_does =
            listening::options_of(fd).is_some_and(|options| options.give(socket.as_fd()));
        let mut connection = Connection::new(chain.clone(), bundle, number, options.follow);
        if says_what_close_does {
            connection.set_linger_option();
        }
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

/// The flag belongs to the socket, which others had before: it may be either way. To ask first would be as dear as to
/// set it.
fn set_blocking(fd: BorrowedFd<'_>, blocking: bool) {
    let _ = rustix::fs::fcntl_setfl(fd, if blocking { OFlags::empty() } else { OFlags::NONBLOCK });
}

/// The server is about to write `bytes`, or the kernel for it: what is to be written instead of the first of them, or
/// of as many as there are, followed by [`wrote_instead`]; `None`: these bytes. What only lingers goes on without the
/// server.
///
/// # Errors
/// EPIPE: the server's end of the connection is over. It was before, or its response is complete, and what it writes now is
/// no part of one, but for instance an answer to the content of its request. Or it is a listening socket.
pub fn before_write(fd: RawFd, bytes: Option<&[u8]>) -> Result<Option<Vec<u8>>, Errno> {
    if let Some(connection) = table::connection(fd) {
        let mut connection = connection.lock();
        if connection.is_answered_early() || connection.goes_on_in_vain() {
            return Err(Errno::PIPE);
        }
        if connection.lingers().is_none() {
            return Ok(bytes.and_then(|bytes| connection.instead_of(borrow(fd), bytes)));
        }
        end_locally(&mut connection);
    }
    if is_ended(fd) || table::is_listener(fd) { Err(Errno::PIPE) } else { Ok(None) }
}

/// Whether [`before_write`] is to be given the whole head of a response: one begins with what the server writes to `fd`
/// next, and the client's connection may go on behind it.
pub fn wants_whole_head(fd: RawFd) -> bool {
    table::connection(fd).is_some_and(|connection| connection.lock().wants_whole_head())
}

/// The server is about to shut `fd` down: whether that is a matter of its own, of which the client learns nothing. It
/// is once its response is complete, be it that content of the request is still to come.
pub fn shuts_down(fd: RawFd) -> bool {
    if let Some(connection) = table::connection(fd) {
        let mut connection = connection.lock();
        if connection.is_answered_early() && connection.persists() {
            return true;
        }
        if connection.lingers().is_some() {
            end_locally(&mut connection);
        }
    }
    is_ended(fd)
}

/// The server wrote `written` bytes that begin with `instead`, or with a part of it: what is left of it takes the place
/// of what the server writes next, since it goes on from bytes of its own.
pub fn wrote_instead(fd: RawFd, instead: &[u8], written: usize) {
    if let Some(connection) = table::connection(fd) {
        connection.lock().wrote_instead(instead, written);
    }
}

/// The server wrote: `follow` is given the tracker. Ends the server's end of the connection once the response is
/// complete.
pub fn wrote(fd: RawFd, follow: impl FnOnce(&mut ResponseTracker)) {
    let Some(connection) = table::connection(fd) else { return };
    let mut guard = connection.lock();
    guard.set_touched();
    if let Some(tracker) = guard.tracker() {
        follow(tracker);
    }
    guard.watch_for_unseen_content(borrow(fd));
    note_holder(&guard);
    if guard.changes_protocol() {
        guard.is_muted = false;
        report_again(&guard, 0);
    }
    if guard.is_over() {
        over(&mut guard);
    }
}

/// Whether what the server writes to `fd` next says where its response ends, so that it must be seen.
pub fn comes_to_framing(fd: RawFd) -> bool {
    let Some(connection) = table::connection(fd) else { return false };
    connection.lock().tracker().is_some_and(|tracker| tracker.comes_to_framing())
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
    let presented =
        |end| socket.and_then(|socket| address_presented(socket, end, connection.presents_v6).ok());
    let addresses = presented(End::Peer).zip(presented(End::Local));
    connection.release(socket, Some(true));
    for fd in descriptors {
        let mut interests = connection.forget_interests(fd);
        replace(ended, fd, connection.cloexec);
        // A registration for one event may be spent: the server will ask again (see `registered`).
        interests.retain(|interest| interest.events & libc::EPOLLONESHOT as u32 == 0);
        let over = Arc::new(Over { addresses, ..Over::default() });
        let _ = table::set(fd, Entry::Ended(over.clone()));
        waiting::owe(fd, over, interests);
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

/// The server changes its registration of `fd` with the set `epoll`: `call` does so, and says what it has registered and
/// what came of it. Returns what the server is to be told.
///
/// Who waits on the set may have served and ended the connection before the call returns: `fd` ends, and is closed, not
/// before the registration is written down, since from then on it could not be removed any more.
///
/// # Errors
/// As epoll_ctl(2).
pub fn registering(
    epoll: RawFd,
    operation: i32,
    fd: RawFd,
    call: impl FnOnce() -> (Interest, Result<(), Errno>),
) -> Result<(), Errno> {
    let _in_use = process::in_use();
    loop {
        match table::get(fd) {
            Some(Entry::Connection(connection)) => {
                let mut connection = lock(&connection);
                if !connection.descriptors.contains(&fd) {
                    // It has just ended.
                    continue;
                }
                let (interest, result) = call();
                if result.is_ok() {
                    note_interest(&mut connection.interests, interest, operation);
                }
                return result;
            }
            Some(Entry::Ended(over)) => {
                // From here on nobody registers for the descriptor but the server.
                waiting::forget(epoll, fd);
                return registering_ended(&mut lock(&over.interests), operation, call);
            }
            Some(Entry::Listener { .. }) => {
                let (interest, result) = call();
                if result.is_ok() {
                    listening::registered(interest, operation);
                }
                return result;
            }
            None => return call().1,
        }
    }
}

/// Of a descriptor whose end is over, a registration may be gone that the server has made.
fn registering_ended(
    interests: &mut Vec<Interest>,
    operation: i32,
    call: impl FnOnce() -> (Interest, Result<(), Errno>),
) -> Result<(), Errno> {
    let (interest, result) = call();
    if !matches!(result, Ok(()) | Err(Errno::NOENT)) {
        return result;
    }
    if operation == libc::EPOLL_CTL_MOD && result.is_err() {
        add(interest);
    }
    note_interest(interests, interest, operation);
    Ok(())
}

/// One descriptor is in a handful of epoll sets at most; a server that exceeds this leaks a registration.
const MOST_INTERESTS: usize = 64;

fn note_interest(interests: &mut Vec<Interest>, interest: Interest, operation: i32) {
    interests.retain(|i| (i.epoll, i.fd) != (interest.epoll, interest.fd));
    if operation != libc::EPOLL_CTL_DEL && interests.len() < MOST_INTERESTS {
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

/// The server has every descriptor from `first` to `last` close on exec.
pub fn set_cloexec_range(first: RawFd, last: RawFd) {
    for (fd, _) in table::numbered_entries() {
        if (first..=last).contains(&fd) {
            set_cloexec(fd, true);
        }
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
    listening::forget(|closed| closed == fd);
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
        Some(Entry::Ended(over)) => {
            ended::closes(fd);
            lock(&over.interests)
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
        Closing::AsFollowed => guard.closes_locally(borrow(fd)),
    };
    guard.release(socket, locally);
    let ledger = &guard.chain().ledger;
    let slot = guard.id().slot;
    if ledger.holder(slot) == process::owner() {
        ledger.forget_holder(slot);
    }
}

/// Whether dup2(2) would have `new` become a duplicate of `old`, and close it before. If it fails, it closes nothing.
pub fn may_duplicate(old: RawFd, new: RawFd) -> bool {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let fits = u64::try_from(new).is_ok_and(|new| most.is_none_or(|most| new < most));
    old != new && fits && rustix::io::fcntl_getfd(borrow(old)).is_ok()
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
    listening::forget(|closed| (first..=last).contains(&closed));
    for (fd, _) in table::numbered_entries() {
        if (first..=last).contains(&fd) {
            closing(fd, Closing::AsFollowed);
        }
    }
}
