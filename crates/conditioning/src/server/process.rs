//! Which process the table of descriptors belongs to, and what a fork does to it.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::ledger::namespace;
use crate::server::table::{self, Entry, lock};
use crate::server::{lingering, listening, parking, waiting};

static OWNER: AtomicU32 = AtomicU32::new(0);
/// Held for reading while the table is in use, so that a child of a threaded process never inherits a locked lock.
static IN_USE: RwLock<()> = RwLock::new(());

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static FORKING: RefCell<Option<RwLockWriteGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// The table, or something else that a child of a threaded process must not inherit locked, is in use as long as this
/// lives. Calls nest: dropping a descriptor closes it, which asks the table again.
#[must_use]
pub struct InUse {
    /// Not in a process of one thread, which does not fork meanwhile.
    is_counted: bool,
    _guard: Option<RwLockReadGuard<'static, ()>>,
}

/// See [`InUse`]: before a lock is taken, and until after it is released.
pub fn in_use() -> InUse {
    if has_one_thread() {
        return InUse { is_counted: false, _guard: None };
    }
    let depth = DEPTH.get();
    DEPTH.set(depth + 1);
    let guard = (depth == 0).then(|| IN_USE.read().unwrap_or_else(PoisonError::into_inner));
    InUse { is_counted: true, _guard: guard }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if self.is_counted {
            DEPTH.set(DEPTH.get() - 1);
        }
    }
}

/// Whether this process has one thread, as its libc knows it. The first thread that starts another says so before.
pub(super) fn has_one_thread() -> bool {
    static KNOWN: OnceLock<usize> = OnceLock::new();
    let known = *KNOWN.get_or_init(|| {
        // SAFETY: a terminated name; dlsym is thread-safe.
        unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) as usize }
    });
    // SAFETY: a `char` of libc's own for as long as the process lives (glibc 2.32); null where there is none.
    unsafe { (known as *const libc::c_char).as_ref() }.is_some_and(|&is_so| is_so != 0)
}

/// The process that the table describes.
pub(super) fn owner() -> u32 {
    OWNER.load(Ordering::Relaxed)
}

/// Whether this process is the one that the table describes: a child of vfork(2) runs in its parent's memory, closes
/// descriptors of its own and becomes another program, and none of that is news about the parent's.
pub(super) fn is_owner() -> bool {
    OWNER.load(Ordering::Relaxed) == std::process::id()
}

extern "C" fn before_fork() {
    // A fork from within the table's own code cannot be; one from a signal handler there is not served.
    let depth = DEPTH.get();
    DEPTH.set(depth + 1);
    if depth == 0 {
        let guard = IN_USE.write().unwrap_or_else(PoisonError::into_inner);
        // A thread that is ending forks without: its guard is dropped at once.
        let _ = FORKING.try_with(|forking| *forking.borrow_mut() = Some(guard));
    }
    parking::before_fork();
    for (fd, connection) in table::connections() {
        let mut connection = lock(&connection);
        if lingering::end_before_fork(&mut connection) {
            continue;
        }
        // Once for each process, however many descriptors it has.
        if connection.descriptors.first() == Some(&fd) {
            connection.share();
        }
    }
}

extern "C" fn in_parent() {
    DEPTH.set(DEPTH.get() - 1);
    let _ = FORKING.try_with(|forking| forking.borrow_mut().take());
}

extern "C" fn in_child() {
    OWNER.store(std::process::id(), Ordering::Relaxed);
    namespace::look();
    // What is registered with epoll is the parent's: the child's closes must not end it.
    for entry in table::entries() {
        match entry {
            Entry::Connection(connection) => lock(&connection).inherited(),
            Entry::Ended(over) => lock(&over.interests).clear(),
            Entry::Listener { .. } => {}
        }
    }
    listening::inherited();
    waiting::forget_all();
    lingering::forget_all();
    in_parent();
}

/// The table is this process's from now on; with `children`, it follows it through forks.
pub(super) fn own(children: bool) {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        OWNER.store(std::process::id(), Ordering::Relaxed);
        if !children {
            return;
        }
        // SAFETY: the handlers are plain functions that live as long as the program.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    });
}
