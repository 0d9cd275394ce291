//! Sockets that one process of the server passes to another (SCM_RIGHTS, unix(7)), as a primary process that accepts
//! for its workers does: the worker reads, answers and ends the connection as if it had accepted it itself.

use std::net::SocketAddr;
use std::os::fd::{AsFd, RawFd};
use std::sync::{Arc, Mutex};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, sockopt};

use crate::ledger::State;
use crate::server::connection::Connection;
use crate::server::table::{self, Chain, Entry};
use crate::server::{borrow, end_locally, ended, parking, process};

/// A connection that is about to go to another process as well.
#[derive(Debug)]
pub struct Passing {
    fd: RawFd,
    cookie: u64,
}

impl Passing {
    /// It did not go.
    pub fn failed(self) {
        let Some(connection) = table::connection(self.fd) else { return };
        let connection = connection.lock();
        let ledger = &connection.chain().ledger;
        if ledger.passed(self.cookie).is_some() {
            ledger.release(connection.id(), None);
        }
    }
}

/// `fd` is about to be sent to another process. `None`: it is no connection.
///
/// # Errors
/// ETOOMANYREFS: too many are on their way; EMSGSIZE: a filter rewrote more than can go along.
pub fn pass(fd: RawFd) -> Result<Option<Passing>, Errno> {
    parking::share(fd);
    let Some(connection) = table::connection(fd) else { return Ok(None) };
    let mut connection = connection.lock();
    if connection.lingers().is_some() {
        end_locally(&mut connection);
        return Ok(None);
    }
    let passage = connection.passage();
    if passage.copy.len() > crate::ledger::PASSED_BYTES {
        return Err(Errno::MSGSIZE);
    }
    let cookie = sockopt::socket_cookie(borrow(fd))?;
    if !connection.chain().ledger.pass(cookie, &passage) {
        return Err(Errno::TOOMANYREFS);
    }
    connection.share();
    connection.leave_to_others();
    Ok(Some(Passing { fd, cookie }))
}

/// Another process has sent `fd`: if it is a connection of the chain, or a handle to its link, it is known as such from
/// now on. `address` is what the server listens on.
pub fn receive(chain: &Arc<Chain>, fd: RawFd, cloexec: bool, address: SocketAddr) {
    let file = |fd| rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino));
    let inet = [AddressFamily::INET, AddressFamily::INET6];
    match sockopt::socket_domain(borrow(fd)) {
        Ok(domain) if inet.contains(&domain) => {}
        Ok(_) if file(borrow(fd)) == file(chain.link.as_fd()) => {
            let _ = super::listen(fd, chain.clone(), address);
            return;
        }
        _ => return,
    }
    let Ok(cookie) = sockopt::socket_cookie(borrow(fd)) else { return };
    let Some(passage) = chain.ledger.passed(cookie) else { return };
    if chain.ledger.state(passage.id.slot) != (passage.id.generation, State::Accepted) {
        return;
    }
    let _in_use = process::in_use();
    let id = passage.id;
    let mut connection = Connection::passed(chain.clone(), passage, fd);
    connection.cloexec = cloexec;
    connection.is_blocking =
        rustix::fs::fcntl_getfl(borrow(fd)).is_ok_and(|now| !now.contains(OFlags::NONBLOCK));
    ended::is_new(fd);
    if table::set(fd, Entry::Connection(Arc::new(Mutex::new(connection)))) {
        chain.ledger.note_holder(id.slot);
    }
}
