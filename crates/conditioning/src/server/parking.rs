//! Registrations of a listening descriptor with epoll that nobody waits for are taken back until somebody does.
//!
//! Each of the processes of Apache's prefork prepares an epoll set with the listening sockets, and never asks it where
//! there is only one: it waits in accept(2). For a real listening socket that costs as much for each connection as it
//! did here for each request: 150 sets are told of it, which took `package` 8 µs.
//!
//! Only what this process does is seen here. So that is for sets that nobody else can wait in: made by this process
//! since it last forked, closed in the programs that it starts, and neither duplicated nor passed on.

use std::os::fd::RawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use rustix::event::epoll;
use rustix::fs::{FileType, OFlags};

use crate::server::connection::Interest;
use crate::server::table::{self, lock};
use crate::server::{add, borrow, process};

/// Epoll sets that may be known at a time, and registrations that are kept; what exceeds this stays registered.
const MOST: usize = 16;

const NONE: RawFd = -1;
/// Sets that only this process can wait in, by their only descriptors.
static OWN: [AtomicI32; MOST] = [const { AtomicI32::new(NONE) }; MOST];

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

/// The server has made the epoll set `fd`, which closes on exec.
pub fn made(fd: RawFd) {
    // Before the server listens, forks are not seen.
    if fd >= 0 && process::is_owner() {
        disown(|own| own == fd);
        let free = |place: &&AtomicI32| {
            place.compare_exchange(NONE, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let _ = OWN.iter().find(free);
    }
}

fn is_own(epoll: RawFd) -> bool {
    OWN.iter().any(|own| own.load(Ordering::Acquire) == epoll)
}

fn disown(is_meant: impl Fn(RawFd) -> bool) {
    for place in &OWN {
        let own = place.load(Ordering::Acquire);
        if own != NONE && is_meant(own) {
            let _ = place.compare_exchange(own, NONE, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

/// The server has registered a descriptor with epoll. Of a listening one, and in a process where nobody waits
/// meanwhile, that is taken back. A server that waits for events does not want to wait in accept(2), and has said so
/// before.
pub fn park(interest: Interest) {
    if !table::is_listener(interest.fd)
        || !is_own(interest.epoll)
        || !process::is_owner()
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

/// Somebody is about to wait for epoll events.
pub fn unpark() {
    change(|parked| parked.drain(..).for_each(add));
}

/// Somebody is about to wait for descriptors. An epoll instance among them may be the one of what is parked by another
/// number, or have that one in its own set.
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

/// Somebody is about to change what is registered with `epoll`, or to register `fd` with it, which may be an epoll set
/// itself.
pub fn unpark_to_change(epoll: RawFd, fd: RawFd) {
    if is_own(fd) {
        share(fd);
    }
    unpark_if(|parked| parked == epoll);
}

/// `fd` is not the only one by which one can wait in an epoll set any more, nor is this the only process.
pub fn share(fd: RawFd) {
    disown(|own| own == fd);
    unpark_if(|parked| parked == fd);
}

/// The process is about to fork: its child will have its sets as well.
pub(super) fn before_fork() {
    unpark();
    disown(|_| true);
}

fn unpark_if(is_meant: impl Fn(RawFd) -> bool) {
    change(|parked| {
        if parked.iter().any(|interest| is_meant(interest.epoll)) {
            parked.drain(..).for_each(add);
        }
    });
}

/// Descriptors are about to be closed; those of a child of vfork(2), which runs in this memory, are its own.
pub(super) fn forget(is_closed: impl Fn(RawFd) -> bool) {
    if OWN.iter().any(|own| is_closed(own.load(Ordering::Acquire))) && process::is_owner() {
        disown(&is_closed);
    }
    let is_closed = |interest: &Interest| is_closed(interest.epoll) || is_closed(interest.fd);
    change(|parked| {
        if parked.iter().any(is_closed) && process::is_owner() {
            parked.retain(|interest| !is_closed(interest));
        }
    });
}
