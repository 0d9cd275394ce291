//! Reads stop at the end of the request: what follows on the socket is the next one, and the filters'.

use std::cell::Cell;

use libc::{
    c_int, c_long, c_uint, c_void, iovec, msghdr, nfds_t, off64_t, pollfd, size_t, sockaddr, socklen_t,
    ssize_t,
};
use rustix::io::Errno;
use tidegate_conditioning::server::{self, Calls, Reading};

use crate::next::next;
use crate::{fail, raw, rights};

/// The kernel takes no more at a time (UIO_MAXIOV).
pub(crate) const MOST_VECTORS: usize = 1024;

/// What a read may do, once it may do something; `flags` are those of recv(2).
pub(crate) fn ready(fd: c_int, wanted: usize, flags: c_int) -> Reading {
    let calls = Calls {
        recv: |buffer: *mut c_void, length: size_t, flags: c_int| next!(recv(fd: c_int, buffer: *mut c_void, length: size_t, flags: c_int) -> ssize_t),
        poll: |descriptors: *mut pollfd, count: nfds_t, timeout: c_int| next!(poll(descriptors: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int),
    };
    server::ready(fd, wanted, flags & libc::MSG_DONTWAIT != 0, &calls)
}

/// Reads into one buffer, with flags of recv(2); `real` reads at most so many bytes from the socket to there.
fn read_one(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
    real: &dyn Fn(*mut c_void, size_t) -> ssize_t,
) -> ssize_t {
    let peek = flags & libc::MSG_PEEK != 0;
    if length == 0 {
        return real(buffer, 0);
    }
    if server::is_ended(fd) {
        return 0;
    }
    let (got, may_go_on) = match ready(fd, length, flags) {
        Reading::AsUsual => return real(buffer, length),
        Reading::Fails(error) => return fail(error) as ssize_t,
        Reading::Ended => return 0,
        Reading::Copy(bytes) => {
            // SAFETY: the caller passes `length` writable bytes, and `bytes` are no more.
            if let Err(error) = unsafe { put(&bytes, buffer, flags) } {
                return fail(error) as ssize_t;
            }
            let mut got = bytes.len();
            if !peek {
                server::took(fd, got, true, true);
                let rest = iovec { iov_base: buffer.wrapping_byte_add(got), iov_len: length - got };
                got += go_on(fd, &[rest], flags);
            }
            (got as ssize_t, true)
        }
        Reading::Socket(most) => {
            let got = real(buffer, most);
            if got > 0 && !peek {
                server::took(fd, got as usize, false, true);
            }
            // Of content without a known end, no more than was there may be asked for at a time.
            (got, got == most as ssize_t)
        }
    };
    let taken = usize::try_from(got).unwrap_or(0);
    if !may_go_on || taken >= length || !wants_the_rest(fd, flags) {
        return got;
    }
    // Behind what was taken there is room for the rest, if there is any for what is thrown away.
    let behind = buffer.wrapping_byte_add(taken);
    got + read_one(fd, behind, length - taken, flags, real).max(0)
}

/// A read took what was rewritten of a request: takes what there is of it on the socket as well, as the system call
/// would, into what `vectors` describe. Waits for nothing, and is no point of cancellation, since what was taken would
/// be lost. Returns how much it was.
fn go_on(fd: c_int, vectors: &[iovec], flags: c_int) -> usize {
    let mut taken = 0;
    while taken < total(vectors) {
        let rest: Vec<iovec> = behind(vectors, taken).collect();
        let Ok(Reading::Socket(most)) = server::reading(fd, total(&rest)) else { break };
        let got = receive(fd, &cut(&rest, most), flags & libc::MSG_TRUNC | libc::MSG_DONTWAIT);
        server::took(fd, got, false, true);
        taken += got;
        // Of content without a known end, no more than was there may be asked for at a time.
        if got == 0 || got < most {
            break;
        }
    }
    taken
}

/// How much recvmsg(2) receives: nothing where it fails.
fn receive(fd: c_int, vectors: &[iovec], flags: c_int) -> usize {
    // SAFETY: a header of zeros is one of a message without anything.
    let mut header: msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = vectors.as_ptr().cast_mut();
    header.msg_iovlen = vectors.len();
    let arguments = [c_long::from(fd), (&raw mut header) as c_long, flags.into(), 0, 0, 0];
    usize::try_from(raw::call(libc::SYS_recvmsg, arguments)).unwrap_or(0)
}

/// Puts `bytes` where a read wants them: nowhere if it throws them away (MSG_TRUNC, tcp(7)).
///
/// # Safety
/// As many bytes may be written to `to`, unless that is null.
///
/// # Errors
/// EFAULT, as read(2).
unsafe fn put(bytes: &[u8], to: *mut c_void, flags: c_int) -> Result<(), Errno> {
    if flags & libc::MSG_TRUNC != 0 || bytes.is_empty() {
        return Ok(());
    }
    if to.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len()) };
    Ok(())
}

/// Whether a read that took a part of a request waits for the rest of it, too (MSG_WAITALL).
fn wants_the_rest(fd: c_int, flags: c_int) -> bool {
    flags & (libc::MSG_WAITALL | libc::MSG_PEEK) == libc::MSG_WAITALL && !server::is_read(fd)
}

/// read(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t {
    read_one(
        fd,
        buffer,
        length,
        0,
        &|buffer, most| next!(read(fd: c_int, buffer: *mut c_void, most: size_t) -> ssize_t),
    )
}

/// read(2) as fortified programs call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(fd: c_int, buffer: *mut c_void, length: size_t, room: size_t) -> ssize_t {
    if length > room {
        std::process::abort();
    }
    // SAFETY: the caller's own arguments.
    unsafe { read(fd, buffer, length) }
}

/// recv(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recv(fd: c_int, buffer: *mut c_void, length: size_t, flags: c_int) -> ssize_t {
    read_one(
        fd,
        buffer,
        length,
        flags,
        &|buffer, most| next!(recv(fd: c_int, buffer: *mut c_void, most: size_t, flags: c_int) -> ssize_t),
    )
}

/// recv(2) as fortified programs call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    if length > room {
        std::process::abort();
    }
    // SAFETY: the caller's own arguments.
    unsafe { recv(fd, buffer, length, flags) }
}

/// recvfrom(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_length: *mut socklen_t,
) -> ssize_t {
    let is_said = Cell::new(false);
    let got = read_one(fd, buffer, length, flags, &|buffer, most| {
        let got = next!(recvfrom(
            fd: c_int, buffer: *mut c_void, most: size_t, flags: c_int,
            address: *mut sockaddr, address_length: *mut socklen_t
        ) -> ssize_t);
        is_said.set(is_said.get() || got >= 0);
        got
    });
    if got >= 0 && !is_said.get() && !address.is_null() && !address_length.is_null() {
        // What comes over TCP comes without an address.
        // SAFETY: the caller's own length.
        unsafe { *address_length = 0 };
    }
    got
}

/// recvfrom(2) as fortified programs call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    room: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_length: *mut socklen_t,
) -> ssize_t {
    if length > room {
        std::process::abort();
    }
    // SAFETY: the caller's own arguments.
    unsafe { recvfrom(fd, buffer, length, flags, address, address_length) }
}

/// The first `most` bytes of what `vectors` describe.
fn cut(vectors: &[iovec], most: usize) -> Vec<iovec> {
    let mut left = most;
    let mut result = Vec::with_capacity(vectors.len());
    for vector in vectors {
        if left == 0 {
            break;
        }
        let length = vector.iov_len.min(left);
        left -= length;
        result.push(iovec { iov_base: vector.iov_base, iov_len: length });
    }
    result
}

/// What `vectors` describe behind the first `skipped` bytes.
pub(crate) fn behind(vectors: &[iovec], skipped: usize) -> impl Iterator<Item = iovec> {
    let mut left = skipped;
    vectors.iter().filter_map(move |vector| {
        let now = vector.iov_len.min(left);
        left -= now;
        let iov_base = vector.iov_base.wrapping_byte_add(now);
        (vector.iov_len > now).then_some(iovec { iov_base, iov_len: vector.iov_len - now })
    })
}

pub(crate) fn total(vectors: &[iovec]) -> usize {
    vectors.iter().fold(0, |sum, vector| sum.saturating_add(vector.iov_len))
}

/// Reads into several buffers, with flags of recv(2); `real` is given vectors that hold as much as may be read from the
/// socket.
fn read_many(fd: c_int, vectors: &[iovec], flags: c_int, real: &dyn Fn(&[iovec]) -> ssize_t) -> ssize_t {
    let peek = flags & libc::MSG_PEEK != 0;
    match ready(fd, total(vectors), flags) {
        Reading::AsUsual => real(vectors),
        Reading::Fails(error) => fail(error) as ssize_t,
        Reading::Copy(bytes) => {
            let mut rest = &bytes[..];
            for vector in cut(vectors, bytes.len()) {
                let (now, later) = rest.split_at(vector.iov_len);
                // SAFETY: the caller's vector describes as many writable bytes.
                if let Err(error) = unsafe { put(now, vector.iov_base, flags) } {
                    return fail(error) as ssize_t;
                }
                rest = later;
            }
            let mut got = bytes.len();
            if !peek {
                server::took(fd, got, true, true);
                let rest: Vec<iovec> = behind(vectors, got).collect();
                got += go_on(fd, &rest, flags);
            }
            if got < total(vectors) && wants_the_rest(fd, flags) {
                let rest: Vec<iovec> = behind(vectors, got).collect();
                got += usize::try_from(read_many(fd, &rest, flags, real)).unwrap_or(0);
            }
            got as ssize_t
        }
        Reading::Socket(most) => {
            let got = real(&cut(vectors, most));
            if got > 0 && !peek {
                server::took(fd, got as usize, false, true);
            }
            got
        }
        Reading::Ended => 0,
    }
}

/// The caller's vectors, if there is a sensible number of them.
pub(crate) fn vectors<'v>(first: *const iovec, count: usize) -> Option<&'v [iovec]> {
    if first.is_null() || count > MOST_VECTORS {
        return None;
    }
    // SAFETY: the caller passes `count` vectors, as for the system call.
    Some(unsafe { std::slice::from_raw_parts(first, count) })
}

/// readv(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, first: *const iovec, count: c_int) -> ssize_t {
    let real = |vectors: &[iovec]| {
        let (first, count) = (vectors.as_ptr(), vectors.len() as c_int);
        next!(readv(fd: c_int, first: *const iovec, count: c_int) -> ssize_t)
    };
    match vectors(first, count.max(0) as usize).filter(|_| count > 0) {
        Some(vectors) => read_many(fd, vectors, 0, &real),
        None => next!(readv(fd: c_int, first: *const iovec, count: c_int) -> ssize_t),
    }
}

/// Nothing in a socket has an offset but where it is (preadv2(2)).
pub(crate) const HERE: off64_t = -1;

/// preadv2(2): at the offset −1 it is readv(2) with flags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn preadv2(
    fd: c_int,
    first: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    let real = |vectors: &[iovec]| {
        let (first, count) = (vectors.as_ptr(), vectors.len() as c_int);
        next!(preadv2(fd: c_int, first: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t)
    };
    let is_here = count > 0 && offset == HERE;
    match vectors(first, count.max(0) as usize).filter(|_| is_here && server::is_ours(fd)) {
        Some(vectors) => read_many(fd, vectors, dont_wait(flags), &real),
        None => {
            next!(preadv2(fd: c_int, first: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t)
        }
    }
}

/// preadv2(2) with large offsets, which are the same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn preadv64v2(
    fd: c_int,
    first: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's own arguments.
    unsafe { preadv2(fd, first, count, offset, flags) }
}

/// What flags of preadv2(2) are for recv(2).
fn dont_wait(flags: c_int) -> c_int {
    if flags & libc::RWF_NOWAIT == 0 { 0 } else { libc::MSG_DONTWAIT }
}

/// recvmsg(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    let plain = || {
        let got = next!(recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t);
        // SAFETY: the caller passes a message header or nothing.
        if let Some(header) = unsafe { message.as_ref() }.filter(|_| got >= 0) {
            // SAFETY: the kernel has just filled it.
            unsafe { rights::received(header, flags) };
        }
        got
    };
    // SAFETY: the caller passes a message header or nothing.
    let header = unsafe { message.as_ref() };
    let found = header.and_then(|header| vectors(header.msg_iov, header.msg_iovlen));
    let Some(vectors) = found.filter(|vectors| total(vectors) > 0) else { return plain() };
    let is_said = Cell::new(false);
    let got = read_many(fd, vectors, flags, &|cut| {
        let got = if cut.len() == vectors.len() && total(cut) == total(vectors) {
            plain()
        } else {
            // SAFETY: `message` was read above; the copy lives for the call.
            let mut header = unsafe { message.read() };
            header.msg_iov = cut.as_ptr().cast_mut();
            header.msg_iovlen = cut.len();
            let cut = &raw mut header;
            let got = next!(recvmsg(fd: c_int, cut: *mut msghdr, flags: c_int) -> ssize_t);
            if got >= 0 {
                // SAFETY: the caller's own header.
                unsafe { say(message, header.msg_namelen, header.msg_controllen, header.msg_flags) };
            }
            got
        };
        is_said.set(is_said.get() || got >= 0);
        got
    });
    if got >= 0 && !is_said.get() {
        // What comes over TCP comes without an address, and what a filter wrote without control data.
        // SAFETY: the caller's own header, which was read above.
        unsafe {
            let name_length = if (*message).msg_name.is_null() { (*message).msg_namelen } else { 0 };
            say(message, name_length, 0, flags & libc::MSG_CMSG_CLOEXEC);
        }
    }
    got
}

/// What recvmsg(2) says of a message besides its bytes.
///
/// # Safety
/// `message` may be written to.
unsafe fn say(message: *mut msghdr, name_length: socklen_t, control_length: size_t, flags: c_int) {
    // SAFETY: as the caller promises.
    unsafe {
        (*message).msg_namelen = name_length;
        (*message).msg_controllen = control_length;
        (*message).msg_flags = flags;
    }
}

/// recvmmsg(2): descriptors may come with any of the messages. Of a request, there is one message at a time, as the
/// system call may return fewer than were asked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut libc::mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut libc::timespec,
) -> c_int {
    if count > 0 && !messages.is_null() && server::is_ours(fd) {
        // SAFETY: the caller passes `count` messages.
        let got = unsafe { recvmsg(fd, &raw mut (*messages).msg_hdr, flags & !libc::MSG_WAITFORONE) };
        let Ok(length) = c_uint::try_from(got) else { return -1 };
        // SAFETY: as above.
        unsafe { (*messages).msg_len = length };
        return 1;
    }
    let got = next!(recvmmsg(
        fd: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int, timeout: *mut libc::timespec
    ) -> c_int);
    for index in 0..usize::try_from(got).unwrap_or(0) {
        // SAFETY: the kernel has just filled so many of the caller's messages.
        unsafe { rights::received(&(*messages.add(index)).msg_hdr, flags) };
    }
    got
}
