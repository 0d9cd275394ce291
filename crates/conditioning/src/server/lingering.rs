//! A server that waits for events may keep a connection for a moment after its response, and read the client's next request
//! itself: no filter presents it, and none of the server's work for a new connection is done. Only for chains without filters
//! that want to see each request.
//!
//! The ledger arbitrates: the server moves *lingering* to *accepted* when the next request is whole, and whoever is first,
//! server or keeper, moves it to *ended locally*. Whatever is not a whole, small request is the filters' again.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::keeper::whole::{Progression, Reader, Whole};
use crate::server::connection::Connection;
use crate::server::table::{self, Entry, lock};
use crate::server::{borrow, end_locally, process};
use crate::wire::flags;

/// Connections that a process keeps so at a time; those above it end with their response.
const MOST: usize = 256;
/// Entries that are looked through when the process waits next: each stay leaves one until its time is over.
const MOST_STAYS: usize = 16 * MOST;
/// Requests whose head and content are longer go by the filters.
const PEEKED_BYTES: usize = 4096;

/// How long a connection is kept; not at all if it is not set.
static LINGER: OnceLock<Duration> = OnceLock::new();
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
    since: Instant,
}

impl Stay {
    fn connection(&self) -> Option<std::sync::Arc<Mutex<Connection>>> {
        let Some(Entry::Connection(connection)) = table::get(self.fd) else { return None };
        let is_this = lock(&connection).lingers() == Some(self.number);
        is_this.then_some(connection)
    }
}

/// Servers of this process keep connections for so long.
pub fn set_linger(linger: Duration) {
    let _ = LINGER.set(linger);
}

/// The response is complete and the connection persistent: keeps it, if that is allowed and nobody asked for its end.
pub(super) fn linger(connection: &mut Connection) -> bool {
    let waits_for_events = connection.interests.len() == 1 && !connection.is_muted;
    if LINGER.get().is_none() || !waits_for_events || COUNT.load(Ordering::Relaxed) >= MOST {
        return false;
    }
    let &[fd] = &connection.descriptors[..] else { return false };
    if !connection.chain().ledger.linger(connection.id()) {
        return false;
    }
    let number = NEXT_STAY.fetch_add(1, Ordering::Relaxed);
    connection.begin_to_linger(number);
    COUNT.fetch_add(1, Ordering::Relaxed);
    // What came before this has been reported to the server already, which need not be told again (edge-triggered epoll),
    // and not to the filters.
    if rustix::io::ioctl_fionread(borrow(fd)).is_ok_and(|unread| unread > 0) {
        return false;
    }
    let mut stays = lock(&STAYS);
    stays.push_back(Stay { fd, number, since: Instant::now() });
    HAS_STAYS.store(true, Ordering::Release);
    true
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
    /// The client has left, or the connection failed: the server's own read tells.
    Left,
    /// The filters have the connection again, and the server's end is over.
    Over,
}

/// Looks for the next request of a connection that lingers.
pub(super) fn next(connection: &mut Connection, fd: BorrowedFd<'_>) -> Next {
    let mut bytes = [0; PEEKED_BYTES];
    let length = match rustix::net::recv(fd, &mut bytes[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((length, _)) if length > 0 => length,
        Err(Errno::AGAIN | Errno::INTR) => {
            let waits =
                !rustix::fs::fcntl_getfl(fd).is_ok_and(|now| now.contains(rustix::fs::OFlags::NONBLOCK));
            if !waits {
                return Next::Nothing;
            }
            // A server that waits in its read is to wait for new connections instead.
            end_locally(connection);
            return Next::Over;
        }
        _ => return Next::Left,
    };
    let bytes = &bytes[..length];
    match whole(bytes).filter(|whole| whole.socket_bytes <= length as u64) {
        Some(whole) if connection.resume(&whole, bytes) => Next::Request,
        // Incomplete, malformed, too long or without an end: the filters know what to do. Or they were first.
        _ => {
            end_locally(connection);
            Next::Over
        }
    }
}

fn whole(bytes: &[u8]) -> Option<Whole> {
    thread_local! {
        static READER: std::cell::RefCell<Reader> = std::cell::RefCell::new(Reader::new(PEEKED_BYTES as u64));
    }
    let judge = |reader: &std::cell::RefCell<Reader>| reader.try_borrow_mut().ok()?.judge(bytes).ok();
    match READER.try_with(judge).ok()?? {
        Progression::Whole(whole) if whole.flags & flags::FINAL == 0 => Some(whole),
        _ => None,
    }
}

/// The process is about to wait: ends what has lingered long enough.
pub(super) fn expire() {
    if !HAS_STAYS.load(Ordering::Acquire) {
        return;
    }
    let _in_use = process::in_use();
    let Some(&linger) = LINGER.get() else { return };
    let now = Instant::now();
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
            let first = stays.pop_front();
            HAS_STAYS.store(first.is_some(), Ordering::Release);
            first
        };
        let Some(stay) = first else { return };
        let Some(connection) = stay.connection() else { continue };
        if now.saturating_duration_since(stay.since) < linger {
            return lock(&STAYS).push_front(stay);
        }
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
}
