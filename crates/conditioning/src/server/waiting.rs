//! Registrations with epoll that a descriptor at end-of-file takes over from the client's socket that it was. Most servers
//! read on, find the end and close; so a registration is made only when somebody waits.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::server::connection::Interest;
use crate::server::table::{self, Entry, lock};
use crate::server::{add, process};

type Interests = Arc<Mutex<Vec<Interest>>>;

/// A descriptor whose end is over, and what is to be registered for it.
struct Owed {
    fd: RawFd,
    /// Tells the descriptor from a later one of the same number.
    ended: Interests,
    interests: Vec<Interest>,
}

static OWED: Mutex<Vec<Owed>> = Mutex::new(Vec::new());
/// Length of [`OWED`], so that a wait without anything owed costs one load.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Threads that wait.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// `fd` is at end-of-file: its registrations are owed to whoever waits next, or at once if somebody does.
pub(super) fn owe(fd: RawFd, ended: Interests, interests: Vec<Interest>) {
    if interests.is_empty() {
        return;
    }
    let mut owed = lock(&OWED);
    owed.push(Owed { fd, ended, interests });
    COUNT.store(owed.len(), Ordering::SeqCst);
    drop(owed);
    if WAITING.load(Ordering::SeqCst) > 0 {
        pay();
    }
}

/// The server itself changed a registration of `fd`.
pub(super) fn forget(epoll: RawFd, fd: RawFd) {
    for owed in lock(&OWED).iter_mut().filter(|owed| owed.fd == fd) {
        owed.interests.retain(|interest| interest.epoll != epoll);
    }
}

/// This process is a child: the registrations are its parent's.
pub(super) fn forget_all() {
    lock(&OWED).clear();
    COUNT.store(0, Ordering::SeqCst);
    WAITING.store(0, Ordering::SeqCst);
}

fn pay() {
    let _in_use = process::in_use();
    let owed = {
        let mut owed = lock(&OWED);
        COUNT.store(0, Ordering::SeqCst);
        std::mem::take(&mut *owed)
    };
    for Owed { fd, ended, interests } in owed {
        let is_the_same =
            matches!(table::get(fd), Some(Entry::Ended(current)) if Arc::ptr_eq(&current, &ended));
        if is_the_same {
            let mut registered = lock(&ended);
            for interest in interests {
                add(interest);
                registered.push(interest);
            }
        }
    }
}

/// A thread waits for epoll events as long as this lives.
pub struct Wait(());

/// Call before epoll_wait(2) and keep what it returns until after.
pub fn waits() -> Wait {
    WAITING.fetch_add(1, Ordering::SeqCst);
    if COUNT.load(Ordering::SeqCst) > 0 {
        pay();
    }
    Wait(())
}

impl Drop for Wait {
    fn drop(&mut self) {
        // A child that was forked meanwhile counts its own.
        let _ = WAITING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |waiting| waiting.checked_sub(1));
    }
}
