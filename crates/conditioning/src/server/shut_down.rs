//! A server shuts a listening socket down to have its threads stop that wait for clients: a blocked accept(2) fails with
//! EINVAL then, and poll(2) and its kin report the end.
//!
//! What stands for the socket is one of many handles to the chain's link, and the others go on. So a socket that does not
//! listen takes its place, which the kernel shows like one that was shut down. Who waits by the link is not woken by
//! that: threads look every so often.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::{DupFlags, Errno, FdFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::{Listening, borrow, carry_over, listening, process, registrations, remove, table};

/// How often a thread that waits for a listening descriptor looks whether another has shut it down.
pub const LOOK: Duration = Duration::from_millis(500);

/// Whether a wait for `fd` is to be interrupted that often.
pub fn may_be_shut_down(fd: RawFd) -> bool {
    table::is_listener(fd) && !process::has_one_thread()
}

/// The server shuts the listening descriptor `fd` down. Returns where it listened.
///
/// # Errors
/// ENOTSOCK: it is no listener of ours; EMFILE.
pub fn shut_down(fd: RawFd) -> Result<Listening, Errno> {
    let (_, at) = listening::of(fd).ok_or(Errno::NOTSOCK)?;
    let family = if at.address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let nonblocking = rustix::fs::fcntl_getfl(borrow(fd))? & OFlags::NONBLOCK;
    rustix::fs::fcntl_setfl(&socket, nonblocking)?;
    let closes_on_exec = rustix::io::fcntl_getfd(borrow(fd))?.contains(FdFlags::CLOEXEC);
    let flags = if closes_on_exec { DupFlags::CLOEXEC } else { DupFlags::empty() };
    // The link stays open elsewhere, and what is registered of it would, too.
    let registrations = registrations("self", fd);
    table::take(fd);
    registrations.iter().for_each(|&interest| remove(interest));
    // SAFETY: the server's own descriptor, which it still uses by number, and which is not closed here.
    let mut place = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(fd) });
    rustix::io::dup3(&socket, &mut place, flags)?;
    carry_over(registrations);
    Ok(at)
}

/// Whether accept(2) would have begun again after the signal that has just been handled, since every handler of the
/// process says so (SA_RESTART, signal(7)): poll(2), which waits in its place, never does.
pub(super) fn restarts() -> bool {
    (1..=libc::SIGRTMAX()).all(|signal| {
        // SAFETY: plain data, which the call fills in.
        let (done, action) = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            (libc::sigaction(signal, std::ptr::null(), &raw mut action), action)
        };
        let is_handled = done == 0 && !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
        !is_handled || action.sa_flags & libc::SA_RESTART != 0
    })
}
