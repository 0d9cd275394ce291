//! A server may keep a connection for a moment after its response, and read the client's next request itself: no filter
//! presents it, and none of the server's work for a new connection is done. Only for chains without filters that want
//! to see each request (see [`Terms`]); and only for servers that go on with others meanwhile: those that wait for
//! events, and processes of one thread that wait for one connection, but no longer than until somebody else has nobody
//! to turn to (see [`WaitAlone`]).
//!
//! The ledger arbitrates: the server moves *lingering* to *accepted* when the next request is whole, and whoever is
//! first, server or keeper, moves it to *ended locally*. Whatever is not a whole, small request is the filters' again.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::keeper::whole::{Progression, Reader, Whole};
use crate::link::{self, Received};
use crate::plain;
use crate::server::connection::Connection;
use crate::server::table::{self, Chain, lock};
use crate::server::terms::Terms;
use crate::server::{borrow, end_locally, process};
use crate::wire::{Notice, flags};

/// Connections that a process keeps so at a time; those above it end with their response.
const MOST: usize = 256;
/// Entries that are looked through when the process waits next: each stay leaves one until its time is over.
const MOST_STAYS: usize = 16 * MOST;
/// Requests whose head and content are longer go by the filters.
const PEEKED_BYTES: usize = 4096;
/// After so many requests in a row, a process that waits for one connection looks whether another client waits for it.
const IN_A_ROW: u32 = 100;
/// A process waits for one connection so long before it looks whether another needs it: clients that are near have
/// asked again by then, and those that wait for the process meanwhile wait no longer than this.
const UNDISTURBED: Duration = Duration::from_millis(5);

/// On which terms a connection is kept; on none if they are not set.
static TERMS: OnceLock<Terms> = OnceLock::new();
/// Numbers each stay of a connection, so that one that was left is told from a later one.
static NEXT_STAY: AtomicU64 = AtomicU64::new(1);
/// Connections that linger.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static STAYS: Mutex<VecDeque<Stay>> = Mutex::new(VecDeque::new());
/// Whether [`STAYS`] has any, so that a wait without costs one load.
static HAS_STAYS: AtomicBool = AtomicBool::new(false);

struct Stay {
    fd: RawFd,
    number: u64,
    /// By [`coarse_now`].
    since: Duration,
}

impl Stay {
    fn connection(&self) -> Option<Arc<Mutex<Connection>>> {
        let connection = table::connection(self.fd)?;
        let is_this = connection.lock().lingers() == Some(self.number);
        is_this.then(|| connection.shared())
    }
}

/// The time, to a few milliseconds: asking for it exactly is dear on some virtual machines.
fn coarse_now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32)
}

/// Servers of this process keep connections on such terms.
pub fn set_linger(terms: Terms) {
    let _ = TERMS.set(terms);
}

/// The response is complete and the connection persistent: keeps it, if that is allowed and nobody asked for its end.
pub(super) fn linger(connection: &mut Connection) -> bool {
    let may_wait = match connection.interests.len() {
        1 => !connection.is_muted,
        // With others, the thread that waits may not be the one that is needed.
        0 => process::has_one_thread() && !is_turn_of_others(connection),
        _ => false,
    };
    if TERMS.get().is_none() || !may_wait || connection.ends_itself() || COUNT.load(Ordering::Relaxed) >= MOST
    {
        return false;
    }
    let &[fd] = &connection.descriptors[..] else { return false };
    if !connection.chain().ledger.linger(connection.id()) {
        return false;
    }
    let number = NEXT_STAY.fetch_add(1, Ordering::Relaxed);
    connection.begin_to_linger(number);
    COUNT.fetch_add(1, Ordering::Relaxed);
    // What came before this has been reported to the server already, which need not be told again (edge-triggered
    // epoll), and not to the filters.
    let is_told_once = !connection.interests.is_empty();
    if is_told_once && rustix::io::ioctl_fionread(borrow(fd)).is_ok_and(|unread| unread > 0) {
        return false;
    }
    let mut stays = lock(&STAYS);
    let stay = Stay { fd, number, since: coarse_now() };
    // An earlier one of the same connection is over.
    while stays.back().is_some_and(|last| last.fd == fd) {
        stays.pop_back();
    }
    // A server that waits by calls that nobody sees leaves them all here.
    if stays.len() > 2 * MOST_STAYS {
        return false;
    }
    stays.push_back(stay);
    HAS_STAYS.store(true, Ordering::Release);
    true
}

/// Whether the process has served one connection for long, and nobody takes what others ask for.
fn is_turn_of_others(connection: &Connection) -> bool {
    let has_served_long = connection.in_a_row() % IN_A_ROW == IN_A_ROW - 1;
    has_served_long && readable(connection.chain().link.as_raw_fd(), Duration::ZERO) != Ok(false)
}

/// Whether any connection of this process lingers.
pub fn lingers() -> bool {
    COUNT.load(Ordering::Relaxed) > 0
}

/// A connection lingers no more.
pub(super) fn left() {
    let _ = COUNT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
}

/// What came on a connection that lingers.
pub(super) enum Next {
    /// A request, which is the server's now.
    Request,
    /// Nothing yet.
    Nothing,
    /// Nothing yet, and the server is about to wait for it.
    Wait(WaitAlone),
    /// The client has left, or the connection failed: the server's own read tells.
    Left,
    /// The filters have the connection again, and the server's end is over.
    Over,
}

/// Looks for the next request of a connection that lingers.
pub(super) fn next(connection: &mut Connection, fd: BorrowedFd<'_>) -> Next {
    // Not zeroed: most requests are a fraction of it.
    let mut block = [const { MaybeUninit::<u8>::uninit() }; PEEKED_BYTES];
    let (bytes, length) = match rustix::net::recv(fd, &mut block[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok(((bytes, _), length)) if length > 0 => (&*bytes, length),
        Err(Errno::AGAIN | Errno::INTR) => {
            let waits = connection.is_blocking
                && !rustix::fs::fcntl_getfl(fd).is_ok_and(|now| now.contains(rustix::fs::OFlags::NONBLOCK));
            if !waits {
                return Next::Nothing;
            }
            if let Some(stay) = connection.lingers().filter(|_| process::has_one_thread()) {
                return Next::Wait(WaitAlone { fd: fd.as_raw_fd(), stay });
            }
            // A thread that waits in its read may be needed for another connection.
            end_locally(connection);
            return Next::Over;
        }
        _ => return Next::Left,
    };
    match whole(bytes).filter(|whole| whole.socket_bytes <= length as u64) {
        Some(whole) if is_allowed(connection, &whole, bytes) && connection.resume(&whole, bytes) => {
            Next::Request
        }
        // Incomplete, malformed, too long or without an end, or not as the filters would have it: they know what to do.
        // Or they were first.
        _ => {
            end_locally(connection);
            Next::Over
        }
    }
}

fn is_allowed(connection: &Connection, whole: &Whole, bytes: &[u8]) -> bool {
    TERMS.get().is_some_and(|terms| terms.allow(whole, bytes, connection.chain().link.as_fd()))
}

fn whole(bytes: &[u8]) -> Option<Whole> {
    if let Some(whole) = plain::request(bytes) {
        return Some(whole);
    }
    thread_local! {
        static READER: std::cell::RefCell<Reader> = std::cell::RefCell::new(Reader::new(PEEKED_BYTES as u64));
    }
    let judge = |reader: &std::cell::RefCell<Reader>| reader.try_borrow_mut().ok()?.judge(bytes).ok();
    match READER.try_with(judge).ok()?? {
        Progression::Whole(whole) if whole.flags & flags::FINAL == 0 => Some(whole),
        _ => None,
    }
}

/// The chain, if this process gave up waiting for one connection because another needed it.
static NEEDED_BY: OnceLock<Arc<Chain>> = OnceLock::new();
/// Whether it has not accepted since.
static IS_NEEDED: AtomicBool = AtomicBool::new(false);

/// The process accepts.
pub(super) fn accepts() {
    IS_NEEDED.store(false, Ordering::Relaxed);
}

/// The process ends. If it was woken for a request, nobody else was: handed again, it wakes another process.
pub(super) fn give_back() {
    let Some(chain) = NEEDED_BY.get().filter(|_| IS_NEEDED.swap(false, Ordering::Relaxed)) else { return };
    if let Ok(Received::Request(request)) = link::receive(chain.link.as_fd(), true, true) {
        let _ = link::send_notice(chain.link.as_fd(), Notice::HandAgain(request.bundle.id));
    }
}

/// A process of one thread that is about to wait for one connection, which lingers.
pub struct WaitAlone {
    fd: RawFd,
    stay: u64,
}

/// How a wait for one connection ended.
pub enum Waited {
    /// There is something to read, be it that the server's end is over.
    Readable,
    /// The time is over that the server wanted to wait.
    TimedOut,
}

impl WaitAlone {
    /// For the connection `fd`, if it lingers, and this process may wait for it alone.
    pub fn of(fd: RawFd) -> Option<Self> {
        if !lingers() || !process::has_one_thread() {
            return None;
        }
        let connection = table::connection(fd)?;
        let stay = connection.lock().lingers()?;
        Some(Self { fd, stay })
    }

    /// Waits until there is something to read, but at most `timeout`. Ends the stay when its time is over, or when a
    /// request waits that no other process takes. No lock is held meanwhile: a signal may end the program.
    ///
    /// # Errors
    /// EINTR.
    pub fn wait(self, timeout: Option<Duration>) -> Result<Waited, Errno> {
        let begun = coarse_now();
        loop {
            let spent = coarse_now().saturating_sub(begun);
            let wanted = timeout.map(|timeout| timeout.saturating_sub(spent));
            let undisturbed = wanted.map_or(UNDISTURBED, |wanted| wanted.min(UNDISTURBED));
            if readable(self.fd, undisturbed)? {
                return Ok(Waited::Readable);
            }
            expire();
            let stays = TERMS.get().map(|terms| terms.time).unwrap_or_default().saturating_sub(spent);
            let wanted = wanted.map(|wanted| wanted.saturating_sub(undisturbed));
            let stays_longer = wanted.is_some_and(|wanted| wanted < stays);
            match self.with_others(wanted.map_or(stays, |wanted| wanted.min(stays)))? {
                Some(Turn::Own) => return Ok(Waited::Readable),
                // One that waits behind the others has nothing else to do.
                Some(Turn::Others(chain)) if chain.ledger.turns().call_another() => continue,
                Some(Turn::Others(chain)) => {
                    let _ = NEEDED_BY.set(chain);
                    IS_NEEDED.store(true, Ordering::Relaxed);
                }
                None if stays_longer => return Ok(Waited::TimedOut),
                None => {}
            }
            self.end();
            return Ok(Waited::Readable);
        }
    }

    /// Waits for the connection and for requests that nobody takes. Of all processes that wait, one is woken for each
    /// (EPOLLEXCLUSIVE), as for accept; those that have waited longest come first.
    fn with_others(&self, timeout: Duration) -> Result<Option<Turn>, Errno> {
        let Some(connection) = table::connection(self.fd) else { return Ok(Some(Turn::Own)) };
        let chain = connection.lock().chain().clone();
        drop(connection);
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let own = EventFlags::IN | EventFlags::RDHUP;
        epoll::add(&poll, borrow(self.fd), EventData::new_u64(0), own)?;
        epoll::add(&poll, &chain.link, EventData::new_u64(1), EventFlags::IN | EventFlags::EXCLUSIVE)?;
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 2];
        let (events, _) = epoll::wait(&poll, &mut events, Some(&timeout))?;
        let others = events.iter().any(|event| event.data.u64() == 1);
        Ok(events.first().map(|_| if others { Turn::Others(chain) } else { Turn::Own }))
    }

    fn end(&self) {
        let Some(connection) = table::connection(self.fd) else { return };
        let mut connection = connection.lock();
        if connection.lingers() == Some(self.stay) {
            end_locally(&mut connection);
        }
    }
}

enum Turn {
    /// Something came on the connection, or it lingers no more.
    Own,
    /// A request waits in the link.
    Others(Arc<Chain>),
}

fn readable(fd: RawFd, timeout: Duration) -> Result<bool, Errno> {
    let fd = borrow(fd);
    let mut watched = [PollFd::new(&fd, PollFlags::IN | PollFlags::RDHUP)];
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    Ok(rustix::event::poll(&mut watched, Some(&timeout))? > 0)
}

/// The process is about to wait: ends what has lingered long enough.
pub fn expire() {
    if !HAS_STAYS.load(Ordering::Acquire) {
        return;
    }
    let _in_use = process::in_use();
    let Some(linger) = TERMS.get().map(|terms| terms.time) else { return };
    let now = coarse_now();
    // No connection is locked while the stays are: a connection that begins to linger does it the other way round.
    if lock(&STAYS).len() > MOST_STAYS {
        let mut stays = std::mem::take(&mut *lock(&STAYS));
        stays.retain(|stay| stay.connection().is_some());
        let mut since = lock(&STAYS);
        stays.append(&mut since);
        *since = stays;
    }
    loop {
        let first = {
            let mut stays = lock(&STAYS);
            if stays.front().is_some_and(|stay| now.saturating_sub(stay.since) < linger) {
                return;
            }
            let first = stays.pop_front();
            HAS_STAYS.store(first.is_some(), Ordering::Release);
            first
        };
        let Some(stay) = first else { return };
        let Some(connection) = stay.connection() else { continue };
        let mut connection = lock(&connection);
        if connection.lingers() == Some(stay.number) {
            end_locally(&mut connection);
        }
    }
}

/// The process forks: what lingers ends, so that one process has each connection.
pub(super) fn end_before_fork(connection: &mut Connection) -> bool {
    let lingers = connection.lingers().is_some();
    if lingers {
        end_locally(connection);
    }
    lingers
}

/// This process is a child.
pub(super) fn forget_all() {
    lock(&STAYS).clear();
    COUNT.store(0, Ordering::Relaxed);
    HAS_STAYS.store(false, Ordering::Release);
    IS_NEEDED.store(false, Ordering::Relaxed);
}
