//! Registrations of a listening descriptor with epoll that nobody waits for are taken back until somebody does.
//!
//! Each of the processes of Apache's prefork prepares an epoll set with the listening sockets, and never asks it where there is
//! only one: it waits in accept(2). For a real listening socket that costs as much for each connection as it did here for each
//! request: 150 sets are told of it, which took `package` 8 µs.

use std::os::fd::RawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::epoll;
use rustix::fs::{FileType, OFlags};

use crate::server::connection::Interest;
use crate::server::table::{self, lock};
use crate::server::{add, borrow, process};

/// Registrations that are kept so; what exceeds this stays registered.
const MOST: usize = 16;

static PARKED: Mutex<Vec<Interest>> = Mutex::new(Vec::new());
/// Whether there are any, so that a call without costs one load.
static HAS_PARKED: AtomicBool = AtomicBool::new(false);

fn change(how: impl FnOnce(&mut Vec<Interest>)) {
    if HAS_PARKED.load(Ordering::Acquire) {
        let _in_use = process::in_use();
        let mut parked = lock(&PARKED);
        how(&mut parked);
        HAS_PARKED.store(!parked.is_empty(), Ordering::Release);
    }
}

/// The server has registered a descriptor with epoll. Of a listening one, and in a process where nobody waits meanwhile, that
/// is taken back. A server that waits for events does not want to wait in accept(2), and has said so before.
pub fn park(interest: Interest) {
    if !table::is_listener(interest.fd)
        || !process::has_one_thread()
        || rustix::fs::fcntl_getfl(borrow(interest.fd)).is_ok_and(|now| now.contains(OFlags::NONBLOCK))
    {
        return;
    }
    let _in_use = process::in_use();
    let mut parked = lock(&PARKED);
    if parked.len() < MOST && epoll::delete(borrow(interest.epoll), borrow(interest.fd)).is_ok() {
        parked.push(interest);
        HAS_PARKED.store(true, Ordering::Release);
    }
}

/// Somebody is about to wait for epoll events, or to change what is registered.
pub fn unpark() {
    change(|parked| parked.drain(..).for_each(add));
}

/// Somebody is about to wait for descriptors. An epoll instance among them may be the one of what is parked by another number,
/// or have that one in its own set.
pub fn unpark_for(mut descriptors: impl Iterator<Item = RawFd>) {
    if HAS_PARKED.load(Ordering::Acquire) && descriptors.any(may_be_epoll) {
        unpark();
    }
}

/// Only epoll instances and their like (eventfd, timerfd) are files of no type.
fn may_be_epoll(fd: RawFd) -> bool {
    fd >= 0
        && table::get(fd).is_none()
        && rustix::fs::fstat(borrow(fd))
            .is_ok_and(|file| FileType::from_raw_mode(file.st_mode) == FileType::Unknown)
}

/// Somebody is about to register an epoll instance with another, or has made a duplicate of one.
pub fn unpark_if(is_among: impl Fn(RawFd) -> bool) {
    change(|parked| {
        if parked.iter().any(|interest| is_among(interest.epoll)) {
            parked.drain(..).for_each(add);
        }
    });
}

/// Descriptors are about to be closed; those of a child of vfork(2), which runs in this memory, are its own.
pub(super) fn forget(is_closed: impl Fn(RawFd) -> bool) {
    let is_closed = |interest: &Interest| is_closed(interest.epoll) || is_closed(interest.fd);
    change(|parked| {
        if parked.iter().any(is_closed) && process::is_owner() {
            parked.retain(|interest| !is_closed(interest));
        }
    });
}
