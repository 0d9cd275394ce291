//! Registrations with epoll that a descriptor at end-of-file takes over from the client's socket that it was. Whoever
//! waits next is told of the end, and then servers close; only what is not closed by the wait after that is registered.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::server::connection::Interest;
use crate::server::table::{self, Entry, Over, lock};
use crate::server::{add, lingering, parking, process, reading};

/// A descriptor whose end is over, and what is to be registered for it.
struct Owed {
    fd: RawFd,
    /// Tells the descriptor from a later one of the same number.
    ended: Arc<Over>,
    interests: Vec<Interest>,
    news: News,
}

/// What is known of the end by whoever waits for events.
#[derive(Clone, Copy, Eq, PartialEq)]
enum News {
    Unknown,
    /// It is among the events of this wait, which has not returned: registered now, it would be reported by the kernel
    /// in the same wait, and servers close what the first of two such events is of.
    InWait(u64),
    Told,
}

impl Owed {
    fn is_current(&self) -> bool {
        matches!(table::get(self.fd), Some(Entry::Ended(current)) if Arc::ptr_eq(&current, &self.ended))
    }

    /// [`OWED`] is locked meanwhile, so that no change of a registration comes in between; so is what a thread that
    /// closes the descriptor looks at after it has taken it out of the table, so that nothing is registered for a
    /// number that may be somebody else's by then.
    fn register(self) {
        let mut registered = lock(&self.ended.interests);
        if self.is_current() {
            for interest in self.interests {
                add(interest);
                registered.push(interest);
            }
        }
    }
}

static OWED: Mutex<Vec<Owed>> = Mutex::new(Vec::new());
/// Length of [`OWED`], so that a wait without anything owed costs one load.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Tells waits apart.
static LAST_WAIT: AtomicU64 = AtomicU64::new(0);
/// Threads that wait.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Connections of which the next request is there, and the response under way in a way that may not be seen to its end:
/// the server is not told of that request again, and whoever waits next looks whether the response is complete.
static UNDER_WAY: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());
/// Length of [`UNDER_WAY`].
static COUNT_UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// Whoever waits next is to look at the connection `fd`.
pub(super) fn look_at(fd: RawFd) {
    let mut all = lock(&UNDER_WAY);
    if !all.contains(&fd) {
        all.push(fd);
    }
    COUNT_UNDER_WAY.store(all.len(), Ordering::Relaxed);
}

fn look() {
    if COUNT_UNDER_WAY.load(Ordering::Relaxed) == 0 {
        return;
    }
    let _in_use = process::in_use();
    let looked_at = std::mem::take(&mut *lock(&UNDER_WAY));
    for fd in looked_at {
        let may_end = || table::connection(fd).is_some_and(|connection| connection.lock().may_end_unseen());
        if !reading::ends_unseen(fd) && may_end() {
            look_at(fd);
        }
    }
    COUNT_UNDER_WAY.store(lock(&UNDER_WAY).len(), Ordering::Relaxed);
}

/// `fd` is at end-of-file: its registrations are owed to whoever waits next, or at once if somebody does.
pub(super) fn owe(fd: RawFd, ended: Arc<Over>, interests: Vec<Interest>) {
    if interests.is_empty() {
        return;
    }
    let mut owed = lock(&OWED);
    owed.push(Owed { fd, ended, interests, news: News::Unknown });
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
    lock(&UNDER_WAY).clear();
    COUNT_UNDER_WAY.store(0, Ordering::Relaxed);
    WAITING.store(0, Ordering::SeqCst);
}

fn pay() {
    let _in_use = process::in_use();
    let mut all = lock(&OWED);
    let (kept, due): (Vec<_>, Vec<_>) = all.drain(..).partition(|owed| matches!(owed.news, News::InWait(_)));
    due.into_iter().for_each(Owed::register);
    *all = kept;
    COUNT.store(all.len(), Ordering::SeqCst);
}

/// Tells the ends that `epoll` is to report: `tell` is given events and the server's data, and says whether there was
/// room. Returns the number of this wait, if it has told any.
fn tell(epoll: RawFd, mut tell: impl FnMut(u32, u64) -> bool) -> Option<u64> {
    let _in_use = process::in_use();
    let mut all = lock(&OWED);
    let mut wait = None;
    let (mut kept, mut due) = (Vec::new(), Vec::new());
    for mut owed in all.drain(..) {
        if matches!(owed.news, News::InWait(_)) {
            kept.push(owed);
            continue;
        }
        let is_told = match owed.interests[..] {
            [only] if only.epoll == epoll && only.events & READABLE != 0 && owed.news == News::Unknown => {
                !owed.is_current() || tell(only.events & ENDED, only.data)
            }
            // Registered for by other means than one wait, or told and not closed.
            _ => false,
        };
        if is_told {
            owed.news = News::InWait(*wait.get_or_insert_with(|| LAST_WAIT.fetch_add(1, Ordering::Relaxed)));
            kept.push(owed);
        } else {
            due.push(owed);
        }
    }
    due.into_iter().for_each(Owed::register);
    *all = kept;
    COUNT.store(all.len(), Ordering::SeqCst);
    wait
}

const READABLE: u32 = libc::EPOLLIN as u32;
/// What a socket at end-of-file reports, as far as it was asked for.
const ENDED: u32 = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLRDNORM) as u32;

/// A thread waits for epoll events as long as this lives.
pub struct Wait {
    told: Option<u64>,
}

/// Call before epoll_wait(2) and keep what it returns until after. Gives events that are not the kernel's to `put`,
/// which says whether there was room.
pub fn waits(epoll: RawFd, put: impl FnMut(u32, u64) -> bool) -> Wait {
    lingering::expire();
    parking::unpark();
    look();
    WAITING.fetch_add(1, Ordering::SeqCst);
    let is_owed = COUNT.load(Ordering::SeqCst) > 0;
    Wait { told: if is_owed { tell(epoll, put) } else { None } }
}

impl Drop for Wait {
    fn drop(&mut self) {
        // A child that was forked meanwhile counts its own.
        let _ = WAITING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |waiting| waiting.checked_sub(1));
        if let Some(wait) = self.told {
            let _in_use = process::in_use();
            let mut all = lock(&OWED);
            for owed in all.iter_mut().filter(|owed| owed.news == News::InWait(wait)) {
                owed.news = News::Told;
            }
        }
    }
}
