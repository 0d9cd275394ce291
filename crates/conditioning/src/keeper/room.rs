//! Room in a socket's buffer for the rest of a request behind others.
//!
//! The kernel joins what arrives into buffers of up to 17 pieces (MAX_SKB_FRAGS), over the loopback interface of 32 KiB
//! each, and keeps all of such a buffer until its last byte is read. What is left of it, such as the beginning of the
//! next upload, may fill the socket's 128 KiB so far that it announces no window. A reader would read it away; a keeper
//! only looks, and waits for what cannot come.

use std::os::fd::{AsRawFd, BorrowedFd};

/// The largest such buffer, and a window for one more segment of 64 KiB.
const BYTES: libc::c_int = (17 * 32 + 96) * 1024;

/// Has the kernel make the buffer so large at least, as it does for a reader that wants to be woken for so much and no
/// less, which nobody does from then on. What is set by SO_RCVBUF would not grow with the connection any more (tcp(7)).
pub fn make(socket: BorrowedFd<'_>) {
    for bytes in [BYTES, 1] {
        let size = size_of_val(&bytes) as libc::socklen_t;
        // SAFETY: an open socket; the kernel reads a number of this size. Without more room, the connection goes on as
        // before.
        unsafe {
            let value = (&raw const bytes).cast();
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, value, size)
        };
    }
}
