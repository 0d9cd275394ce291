//! What a server process knows about its conditioned descriptors, by number.

use std::net::SocketAddr;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::ledger::Ledger;
use crate::server::connection::{Connection, Interest};
use crate::server::listening::{self, Listening};
use crate::server::options::ForConnections;
use crate::server::process::{self, InUse};

/// Descriptors from this number on are never conditioned; accepting one fails as if the process were out of them.
pub const DESCRIPTORS: usize = 65_536;

/// The server's end of a chain.
#[derive(Debug)]
pub struct Chain {
    /// The link to the nearest filter.
    pub link: OwnedFd,
    /// The chain's ledger.
    pub ledger: Ledger,
}

/// What a descriptor is.
#[derive(Clone, Debug)]
pub enum Entry {
    /// Stands for the listening socket: a handle to the chain's link.
    Listener {
        /// The chain.
        chain: Arc<Chain>,
        /// Where the server asked to listen.
        at: Listening,
        /// What it has set for the connections that it accepts there.
        options: Arc<ForConnections>,
    },
    /// A client's socket.
    Connection(Arc<Mutex<Connection>>),
    /// Was a client's socket; now it is at end-of-file, because the server's end of the connection is over. All these
    /// descriptors are one file, which is never closed: closing one would leave what is registered for it with epoll.
    Ended(Arc<Over>),
}

/// What a server may still ask about a connection that is over for it.
#[derive(Debug, Default)]
pub struct Over {
    /// Where it registered the descriptor.
    pub interests: Mutex<Vec<Interest>>,
    /// The client's and the server's address, as its listening socket shows them.
    pub addresses: Option<(SocketAddr, SocketAddr)>,
}

const NONE: u8 = 0;
const LISTENER: u8 = 1;
const CONNECTION: u8 = 2;
const ENDED: u8 = 3;

// Read on every interposed call, so that descriptors that are none of ours cost one load.
static KINDS: [AtomicU8; DESCRIPTORS] = [const { AtomicU8::new(NONE) }; DESCRIPTORS];
static ENTRIES: [Mutex<Option<Entry>>; DESCRIPTORS] = [const { Mutex::new(None) }; DESCRIPTORS];

fn index(fd: RawFd) -> Option<usize> {
    usize::try_from(fd).ok().filter(|&index| index < DESCRIPTORS)
}

/// Locks although another thread panicked: every change under these locks is a single assignment.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What `fd` is, if it is ours.
pub fn get(fd: RawFd) -> Option<Entry> {
    let index = index(fd)?;
    if KINDS[index].load(Ordering::Acquire) == NONE {
        return None;
    }
    let _in_use = process::in_use();
    lock(&ENTRIES[index]).clone()
}

/// A connection that is looked at: the table is in use meanwhile.
pub struct Looked {
    connection: Arc<Mutex<Connection>>,
    // The last to go: what is dropped before it may close descriptors.
    _in_use: InUse,
}

impl Looked {
    /// The connection, locked.
    pub fn lock(&self) -> MutexGuard<'_, Connection> {
        lock(&self.connection)
    }

    /// The connection, which is to be looked at again.
    pub fn shared(&self) -> Arc<Mutex<Connection>> {
        self.connection.clone()
    }
}

/// The connection that `fd` is.
#[inline]
pub fn connection(fd: RawFd) -> Option<Looked> {
    if !is_connection(fd) {
        return None;
    }
    let _in_use = process::in_use();
    match &*lock(&ENTRIES[index(fd)?]) {
        Some(Entry::Connection(connection)) => Some(Looked { connection: connection.clone(), _in_use }),
        _ => None,
    }
}

/// Whether `fd` stands for a listening socket.
pub fn is_listener(fd: RawFd) -> bool {
    index(fd).is_some_and(|index| KINDS[index].load(Ordering::Acquire) == LISTENER)
}

/// Whether `fd` is a connection.
pub fn is_connection(fd: RawFd) -> bool {
    index(fd).is_some_and(|index| KINDS[index].load(Ordering::Acquire) == CONNECTION)
}

/// Whether `fd` was a connection whose end is over.
pub fn is_ended(fd: RawFd) -> bool {
    index(fd).is_some_and(|index| KINDS[index].load(Ordering::Acquire) == ENDED)
}

/// Says what `fd` is; false if its number is too high.
#[must_use]
pub fn set(fd: RawFd, entry: Entry) -> bool {
    let Some(index) = index(fd) else { return false };
    let kind = match entry {
        Entry::Listener { .. } => LISTENER,
        Entry::Connection(_) => CONNECTION,
        Entry::Ended(_) => ENDED,
    };
    let listener = match &entry {
        Entry::Listener { chain, at, .. } => Some((chain.clone(), *at)),
        _ => None,
    };
    let _in_use = process::in_use();
    let before = lock(&ENTRIES[index]).replace(entry);
    KINDS[index].store(kind, Ordering::Release);
    match listener {
        Some((chain, at)) => listening::added(fd, &chain, at),
        None if matches!(before, Some(Entry::Listener { .. })) => listening::removed(fd),
        None => {}
    }
    true
}

/// `fd` is about to be closed: it is nothing of ours any more.
pub fn take(fd: RawFd) -> Option<Entry> {
    let index = index(fd)?;
    if KINDS[index].load(Ordering::Acquire) == NONE {
        return None;
    }
    let _in_use = process::in_use();
    KINDS[index].store(NONE, Ordering::Release);
    let before = lock(&ENTRIES[index]).take();
    if matches!(before, Some(Entry::Listener { .. })) {
        listening::removed(fd);
    }
    before
}

/// The numbers of what stands for listening sockets, and of connections. Takes no lock.
pub fn numbers() -> impl Iterator<Item = RawFd> {
    let is_of_use = |kind: &AtomicU8| matches!(kind.load(Ordering::Acquire), LISTENER | CONNECTION);
    KINDS.iter().enumerate().filter(move |(_, kind)| is_of_use(kind)).map(|(index, _)| index as RawFd)
}

/// Every descriptor that is ours and what it is.
pub fn numbered_entries() -> impl Iterator<Item = (RawFd, Entry)> {
    let used = KINDS.iter().enumerate().filter(|(_, kind)| kind.load(Ordering::Acquire) != NONE);
    used.filter_map(|(index, _)| Some((index as RawFd, get(index as RawFd)?)))
}

/// What the descriptors of this process are that are ours.
pub fn entries() -> impl Iterator<Item = Entry> {
    numbered_entries().map(|(_, entry)| entry)
}

/// Every connection of this process, once for each of its descriptors.
pub fn connections() -> Vec<(RawFd, Arc<Mutex<Connection>>)> {
    let connections = numbered_entries().filter_map(|(fd, entry)| match entry {
        Entry::Connection(connection) => Some((fd, connection)),
        _ => None,
    });
    connections.collect()
}
