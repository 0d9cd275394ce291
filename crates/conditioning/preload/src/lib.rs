//! Presents conditioned sockets to an unmodified, dynamically linked server (`LD_PRELOAD`).
//!
//! `listen` on the conditioned port puts the chain's link in place of the listening socket, under the same number:
//! poll, select and epoll work on it unchanged, and `accept` receives a bundle. The request is still in the client
//! socket's own buffer, so reads only have to stop at its end. What is written is followed; when the response is
//! complete and the connection persistent, the server's descriptor turns into one at end-of-file, and the filters have
//! the connection.
//!
//! Everything that is none of ours goes to the next definition of the same name.
#![allow(clippy::missing_safety_doc, clippy::not_unsafe_ptr_arg_deref)]

mod next;
mod programs;
mod raw;
mod reads;
mod rights;
mod sockets;
mod state;
mod streams;
mod waits;
mod writes;

use libc::c_int;

/// Sets errno and returns −1, as system call wrappers do.
pub(crate) fn fail(error: rustix::io::Errno) -> c_int {
    // SAFETY: the calling thread's errno.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
    -1
}

pub(crate) fn errno() -> rustix::io::Errno {
    // SAFETY: the calling thread's errno.
    rustix::io::Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}
