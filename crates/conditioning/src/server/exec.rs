//! Connections that become the standard streams of another program, as servers in the style of inetd(8) start one for
//! each connection: the new program has them from the ledger, in which it is written that its process holds them.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::FdFlags;
use rustix::net::{AddressFamily, sockopt};

use crate::server::connection::Connection;
use crate::server::table::{self, Chain, Entry, lock};
use crate::wire::Id;

/// The highest of the standard streams.
const LAST: RawFd = 2;

/// This process is about to become another program that keeps `connection`.
pub(super) fn keep(connection: &Connection) {
    connection.chain().ledger.note_holder(connection.id().slot);
}

/// In a child of vfork(2), which runs in its parent's memory until it becomes another program: `old`, a connection of
/// the parent's, is to be the standard stream `new` of that program. So one more process is about to hold it.
pub(super) fn duplicated_for_another_program(old: RawFd, new: RawFd) {
    // A program's input and output mostly are the same connection, which counts once for the process.
    static COUNTED: Mutex<Option<(u32, Id)>> = Mutex::new(None);
    let Some(Entry::Connection(connection)) = table::get(old).filter(|_| new <= LAST) else { return };
    let connection = lock(&connection);
    let now = Some((std::process::id(), connection.id()));
    let mut counted = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    if std::mem::replace(&mut *counted, now) != now {
        connection.chain().ledger.share(connection.id());
        keep(&connection);
    }
}

/// This program, or the one whose child this process is, has listened.
static HAS_LISTENED: AtomicBool = AtomicBool::new(false);

/// A socket of the chain's listens.
pub(super) fn listens() {
    HAS_LISTENED.store(true, Ordering::Relaxed);
}

/// Whether a program that this process becomes or starts may serve the chain: any may as long as nobody listens, and
/// then those that get something of the chain's along. Programs that a server starts for its own purposes, such as CGI,
/// do not.
///
/// For children of vfork(2), too: it takes no lock.
pub fn programs_may_serve(becomes_another: bool) -> bool {
    // A failed attempt to become another program has given up what it had.
    static HAD: AtomicBool = AtomicBool::new(false);
    if !HAS_LISTENED.load(Ordering::Relaxed) || becomes_another && HAD.load(Ordering::Relaxed) {
        return true;
    }
    let goes_along =
        |fd| rustix::io::fcntl_getfd(super::borrow(fd)).is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC));
    let may_serve = (0..=LAST).any(is_internet) || table::numbers().any(goes_along);
    if may_serve && becomes_another && super::process::is_owner() {
        HAD.store(true, Ordering::Relaxed);
    }
    may_serve
}

fn is_internet(fd: RawFd) -> bool {
    let inet = [AddressFamily::INET, AddressFamily::INET6];
    sockopt::socket_domain(super::borrow(fd)).is_ok_and(|domain| inet.contains(&domain))
}

/// A program starts: a connection that it was given as its standard streams is its own from here on, and ends with it.
pub fn inherit_standard_streams(chain: &Arc<Chain>) {
    let is_ours = |fd: &RawFd| is_internet(*fd) && table::get(*fd).is_none();
    let streams: Vec<RawFd> = (0..=LAST).filter(is_ours).collect();
    let Some((&first, others)) = streams.split_first() else { return };
    // Of several it is not known which is which; filters see that their process has ended when it has.
    let &[id] = chain.ledger.accepted_by(std::process::id()).as_slice() else { return };
    let mut connection = Connection::inherited_by_exec(chain.clone(), id, first);
    connection.descriptors.extend(others);
    let connection = Arc::new(Mutex::new(connection));
    for fd in streams {
        let _ = table::set(fd, Entry::Connection(connection.clone()));
    }
}
