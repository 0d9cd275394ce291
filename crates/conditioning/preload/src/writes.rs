//! What the server writes is followed, to know when its response is complete.

use libc::{c_int, c_uint, c_void, iovec, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t};
use tidegate_conditioning::server;

use crate::next::next;
use crate::reads::vectors;

fn wrote(fd: c_int, buffer: *const c_void, written: ssize_t) {
    if written > 0 {
        // SAFETY: the kernel just read that many bytes of the caller's buffer.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), written as usize) };
        server::wrote(fd, |tracker| tracker.wrote(bytes));
    }
}

fn wrote_vectors(fd: c_int, first: *const iovec, count: usize, written: ssize_t) {
    let Some(vectors) = vectors(first, count).filter(|_| written > 0 && server::is_followed(fd)) else {
        return;
    };
    server::wrote(fd, |tracker| {
        let mut left = written as usize;
        for vector in vectors {
            let length = vector.iov_len.min(left);
            if length > 0 {
                // SAFETY: the kernel just read these bytes of the caller's.
                tracker.wrote(unsafe { std::slice::from_raw_parts(vector.iov_base.cast::<u8>(), length) });
            }
            left -= length;
        }
    });
}

fn wrote_unseen(fd: c_int, written: ssize_t) {
    if written > 0 {
        server::wrote(fd, |tracker| tracker.wrote_unseen(written as u64));
    }
}

/// write(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t {
    let written = next!(write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t);
    wrote(fd, buffer, written);
    written
}

/// send(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t {
    let written = next!(send(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t);
    wrote(fd, buffer, written);
    written
}

/// sendto(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
    address: *const sockaddr,
    address_length: socklen_t,
) -> ssize_t {
    let written = next!(sendto(
        fd: c_int, buffer: *const c_void, length: size_t, flags: c_int,
        address: *const sockaddr, address_length: socklen_t
    ) -> ssize_t);
    wrote(fd, buffer, written);
    written
}

/// writev(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, first: *const iovec, count: c_int) -> ssize_t {
    let written = next!(writev(fd: c_int, first: *const iovec, count: c_int) -> ssize_t);
    wrote_vectors(fd, first, count.max(0) as usize, written);
    written
}

/// sendmsg(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    let written = next!(sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t);
    // SAFETY: the kernel just read the header.
    if let Some(header) = unsafe { message.as_ref() }.filter(|_| written > 0) {
        wrote_vectors(fd, header.msg_iov, header.msg_iovlen, written);
    }
    written
}

/// sendfile(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    let written = next!(sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t);
    wrote_unseen(to, written);
    written
}

/// sendfile(2) with large offsets.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile64(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    let written = next!(sendfile64(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t);
    wrote_unseen(to, written);
    written
}

/// splice(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn splice(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    length: size_t,
    flags: c_uint,
) -> ssize_t {
    let written = next!(splice(
        from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, length: size_t, flags: c_uint
    ) -> ssize_t);
    wrote_unseen(to, written);
    written
}
