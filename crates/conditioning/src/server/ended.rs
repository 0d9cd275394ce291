//! The file that takes the place of clients' sockets of which the server's end is over: a socket at end-of-file.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::OFlags;
use rustix::io::DupFlags;

use crate::server::{borrow, table};

/// Flags that mean nothing to a socket, and that no file of a server's has together with O_NONBLOCK: they tell, without
/// a look at the file itself, that a descriptor is the one at end-of-file.
const MARK: OFlags = OFlags::APPEND.union(OFlags::NOATIME);

/// A socket at end-of-file that takes the place of clients' sockets. Its other end stays open, so that nothing but the
/// end-of-file is reported.
pub(super) fn at_end_of_file() -> Option<BorrowedFd<'static>> {
    static PAIR: OnceLock<Option<(OwnedFd, OwnedFd)>> = OnceLock::new();
    let pair = PAIR.get_or_init(|| {
        let (ours, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK,
            None,
        )
        .ok()?;
        rustix::net::shutdown(&theirs, rustix::net::Shutdown::Write).ok()?;
        // Without it, what is asked below takes a little longer.
        let _ = rustix::fs::fcntl_setfl(&ours, OFlags::NONBLOCK | MARK);
        Some((ours, theirs))
    });
    pair.as_ref().map(|(ours, _)| ours.as_fd())
}

/// Whether all closes of this process are seen. A number that was closed in a way that nobody saw, such as by a
/// program's own system call, would pass for a connection at end-of-file as something else, and the server's files
/// would look empty. To ask the kernel each time costs a server like Apache five system calls a request; so it is asked
/// until the process has closed a number of such descriptors in a way that was seen, and always in one that has been
/// caught closing one otherwise.
struct Trust(AtomicU32);

static TRUST: Trust = Trust(AtomicU32::new(0));

impl Trust {
    /// Closes that earn it.
    const ENOUGH: u32 = 64;
    const NEVER: u32 = u32::MAX;

    fn is_given(&self) -> bool {
        (Self::ENOUGH..Self::NEVER).contains(&self.0.load(Ordering::Relaxed))
    }

    /// A close was seen.
    fn gain(&self) {
        let more = |seen| (seen < Self::ENOUGH).then(|| seen + 1);
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// One was not.
    fn lose(&self) {
        self.0.store(Self::NEVER, Ordering::Relaxed);
    }
}

/// Whether `fd` was a connection of which the server's end is over.
pub fn is_ended(fd: RawFd) -> bool {
    if !table::is_ended(fd) {
        return false;
    }
    let is_so = TRUST.is_given() || is_that_file(fd);
    if !is_so {
        TRUST.lose();
        table::take(fd);
    }
    is_so
}

/// The server closes `fd`, which was a connection, in a way that is seen.
pub(super) fn closes(fd: RawFd) {
    if !TRUST.is_given() {
        if is_that_file(fd) { TRUST.gain() } else { TRUST.lose() }
    }
}

/// A process closes `fd` that has the table, by inheritance or by sharing its memory, without being its owner.
pub(super) fn closes_for_another(fd: RawFd) {
    if table::is_ended(fd) {
        TRUST.lose();
    }
}

/// `fd` is new: what it was before has been closed.
pub(super) fn is_new(fd: RawFd) {
    if table::is_ended(fd) {
        TRUST.lose();
    }
}

fn is_that_file(fd: RawFd) -> bool {
    if rustix::fs::fcntl_getfl(borrow(fd)).is_ok_and(|flags| flags.contains(MARK | OFlags::NONBLOCK)) {
        return true;
    }
    static ENDED: OnceLock<Option<(u64, u64)>> = OnceLock::new();
    let file = |fd| rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino));
    let ended = ENDED.get_or_init(|| file(at_end_of_file()?));
    ended.is_none() || *ended == file(borrow(fd))
}

/// What fcntl(2) is to say of the flags of `fd`, of which the kernel says `flags`.
pub fn status_flags(fd: RawFd, flags: i32) -> i32 {
    let mark = MARK.bits() as i32;
    if table::is_ended(fd) && flags & mark == mark { flags & !mark } else { flags }
}

/// Puts the file in the place of the connection `fd`.
pub(super) fn replace(by: BorrowedFd<'_>, fd: RawFd, cloexec: bool) {
    let flags = if cloexec { DupFlags::CLOEXEC } else { DupFlags::empty() };
    // SAFETY: the server's own descriptor, which it still uses by number, and which is not closed here.
    let mut fd = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(fd) });
    // Not by libc's syscall(2), which the preload library interposes.
    let _ = rustix::io::dup3(by, &mut fd, flags);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trust_is_earned_by_closes_that_are_seen_and_lost_for_ever_by_one_that_is_not() {
        let trust = Trust(AtomicU32::new(0));
        (1..Trust::ENOUGH).for_each(|_| trust.gain());
        assert!(!trust.is_given());
        trust.gain();
        assert!(trust.is_given());
        trust.gain();
        assert!(trust.is_given());
        trust.lose();
        assert!(!trust.is_given());
        (0..2 * Trust::ENOUGH).for_each(|_| trust.gain());
        assert!(!trust.is_given());
    }
}
