//! What the server writes is followed, to know when its response is complete.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use libc::{c_int, c_uint, c_void, iovec, msghdr, off_t, off64_t, size_t, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;
use tidegate_conditioning::server::response::{HEAD_LOOKED_AT, head_length};
use tidegate_conditioning::server::{self, Reading, ResponseTracker};

use crate::next::next;
use crate::reads::{self, vectors};
use crate::rights::Sending;
use crate::{errno, fail};

fn wrote(fd: c_int, buffer: *const c_void, written: ssize_t) {
    if written > 0 {
        // SAFETY: the kernel just read that many bytes of the caller's buffer.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), written as usize) };
        server::wrote(fd, |tracker| tracker.wrote(bytes));
    }
}

/// Whether the bytes that are sent with these flags have been copied when the call returns: only then others may take
/// their place.
fn are_copied(flags: c_int) -> bool {
    flags & libc::MSG_ZEROCOPY == 0
}

/// Writes one buffer by `real`, which sends with `flags`, with what is to be written instead of its beginning.
fn write_one(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
    real: impl Fn(*const c_void) -> ssize_t,
) -> ssize_t {
    let bytes = bytes(buffer, length).filter(|_| are_copied(flags));
    let instead = match server::before_write(fd, bytes) {
        Ok(instead) => instead,
        Err(error) => return fail(error) as ssize_t,
    };
    let Some((bytes, instead)) = bytes.zip(instead) else {
        let written = real(buffer);
        wrote(fd, buffer, written);
        return written;
    };
    let replaced = instead.len().min(length);
    let patched = [&instead[..replaced], &bytes[replaced..]].concat();
    let written = real(patched.as_ptr().cast());
    wrote_instead(fd, &instead, written);
    wrote(fd, patched.as_ptr().cast(), written);
    written
}

fn wrote_instead(fd: c_int, instead: &[u8], written: ssize_t) {
    if let Ok(written) = usize::try_from(written) {
        server::wrote_instead(fd, instead, written);
    }
}

fn bytes<'b>(buffer: *const c_void, length: size_t) -> Option<&'b [u8]> {
    if buffer.is_null() || length > isize::MAX as usize {
        return None;
    }
    // SAFETY: the caller passes `length` readable bytes, as for the system call; they are read during the call only.
    Some(unsafe { std::slice::from_raw_parts(buffer.cast(), length) })
}

/// What a call writes, with a copy of the response's head that it begins with in the first vector.
struct Joined {
    /// What the first vector points to, for as long as that is used.
    _head: Vec<u8>,
    vectors: Vec<iovec>,
}

impl Joined {
    /// `None` where a response's head does not begin here, ends in the first vector already, or does not end within
    /// what is looked at.
    fn of(fd: c_int, vectors: &[iovec]) -> Option<Self> {
        let filled = || vectors.iter().filter(|vector| vector.iov_len > 0);
        let first = filled().next()?;
        if filled().nth(1).is_none()
            || !server::wants_whole_head(fd)
            || head_length(bytes(first.iov_base, first.iov_len)?).is_some()
        {
            return None;
        }
        let mut head = Vec::with_capacity(HEAD_LOOKED_AT);
        for vector in filled() {
            let room = HEAD_LOOKED_AT - head.len();
            head.extend_from_slice(bytes(vector.iov_base, vector.iov_len.min(room))?);
        }
        head.truncate(head_length(&head)?);
        let mut joined = vec![iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() }];
        // No more than they were: the head took the place of two at least, of which it may have left a part of one.
        joined.extend(reads::behind(vectors, head.len()));
        Some(Self { _head: head, vectors: joined })
    }
}

/// Writes several buffers by `real`, which sends with `flags`, with what is to be written instead of their beginning: a
/// response's head, which some servers write with a vector for each word.
fn write_many(fd: c_int, vectors: &[iovec], flags: c_int, real: impl Fn(&[iovec]) -> ssize_t) -> ssize_t {
    let joined = if are_copied(flags) { Joined::of(fd, vectors) } else { None };
    let vectors = joined.as_ref().map_or(vectors, |joined| &joined.vectors);
    let first = vectors.iter().position(|vector| vector.iov_len > 0);
    let head = first.filter(|_| are_copied(flags));
    let head = head.and_then(|first| bytes(vectors[first].iov_base, vectors[first].iov_len));
    let instead = match server::before_write(fd, head) {
        Ok(instead) => instead,
        Err(error) => return fail(error) as ssize_t,
    };
    let Some(instead) = instead else {
        let written = real(vectors);
        wrote_vectors(fd, vectors.as_ptr(), vectors.len(), written);
        return written;
    };
    let replaced = instead.len().min(reads::total(vectors));
    let mut patched = vec![iovec { iov_base: instead.as_ptr().cast_mut().cast(), iov_len: replaced }];
    // Beyond as many as the kernel takes, the server writes the rest next.
    patched.extend(reads::behind(vectors, replaced).take(reads::MOST_VECTORS - 1));
    let written = real(&patched);
    wrote_instead(fd, &instead, written);
    wrote_vectors(fd, patched.as_ptr(), patched.len(), written);
    written
}

fn wrote_vectors(fd: c_int, first: *const iovec, count: usize, written: ssize_t) {
    let Some(vectors) = vectors(first, count).filter(|_| written > 0) else {
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
    write_one(
        fd,
        buffer,
        length,
        0,
        |buffer| next!(write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t),
    )
}

/// send(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t {
    write_one(
        fd,
        buffer,
        length,
        flags,
        |buffer| next!(send(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t),
    )
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
    write_one(fd, buffer, length, flags, |buffer| {
        next!(sendto(
            fd: c_int, buffer: *const c_void, length: size_t, flags: c_int,
            address: *const sockaddr, address_length: socklen_t
        ) -> ssize_t)
    })
}

/// writev(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, first: *const iovec, count: c_int) -> ssize_t {
    let Some(all) = vectors(first, count.max(0) as usize).filter(|_| server::is_ours(fd)) else {
        return next!(writev(fd: c_int, first: *const iovec, count: c_int) -> ssize_t);
    };
    write_many(fd, all, 0, |vectors| {
        let (first, count) = (vectors.as_ptr(), vectors.len() as c_int);
        next!(writev(fd: c_int, first: *const iovec, count: c_int) -> ssize_t)
    })
}

/// pwritev2(2): at the offset −1 it is writev(2) with flags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwritev2(
    fd: c_int,
    first: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    let all = vectors(first, count.max(0) as usize).filter(|_| offset == reads::HERE && server::is_ours(fd));
    let Some(all) = all else {
        return next!(
            pwritev2(fd: c_int, first: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t
        );
    };
    write_many(fd, all, 0, |vectors| {
        let (first, count) = (vectors.as_ptr(), vectors.len() as c_int);
        next!(pwritev2(fd: c_int, first: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t)
    })
}

/// pwritev2(2) with large offsets, which are the same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwritev64v2(
    fd: c_int,
    first: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's own arguments.
    unsafe { pwritev2(fd, first, count, offset, flags) }
}

/// sendmsg(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    let plain = || next!(sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t);
    // SAFETY: the caller passes a message header or nothing.
    let Some(header) = (unsafe { message.as_ref() }) else { return plain() };
    if !server::is_ours(fd) {
        // SAFETY: the caller's own message.
        let sending = match unsafe { Sending::of(header) } {
            Ok(sending) => sending,
            Err(error) => return fail(error) as ssize_t,
        };
        let result = plain();
        if result >= 0 {
            return result;
        }
        let error = errno();
        sending.failed();
        return fail(error) as ssize_t;
    }
    let Some(all) = vectors(header.msg_iov, header.msg_iovlen) else { return plain() };
    write_many(fd, all, flags, |vectors| {
        let mut header = *header;
        header.msg_iov = vectors.as_ptr().cast_mut();
        header.msg_iovlen = vectors.len();
        let message = &raw const header;
        next!(sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t)
    })
}

/// The kernel takes no more at a time (UIO_MAXIOV).
const MOST_MESSAGES: c_uint = 1024;

/// sendmmsg(2): one message at a time where there is something to be seen, as the system call may return fewer than
/// were asked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(
    fd: c_int,
    messages: *mut libc::mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller passes `count` messages; the kernel reads no more than these.
    let is_plain = |index| unsafe { (*messages.add(index)).msg_hdr.msg_control.is_null() };
    let count_seen = count.min(MOST_MESSAGES) as usize;
    if messages.is_null() || !server::is_ours(fd) && (0..count_seen).all(is_plain) || count == 0 {
        return next!(sendmmsg(fd: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int) -> c_int);
    }
    // SAFETY: as above.
    let sent = unsafe { sendmsg(fd, &raw const (*messages).msg_hdr, flags) };
    if sent < 0 {
        return -1;
    }
    // SAFETY: as above.
    unsafe { (*messages).msg_len = sent as c_uint };
    1
}

/// sendfile(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    if let Err(error) = server::before_write(to, None) {
        return fail(error) as ssize_t;
    }
    let written = next!(sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t);
    wrote_unseen(to, written);
    written
}

/// sendfile(2) with large offsets.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile64(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    if let Err(error) = server::before_write(to, None) {
        return fail(error) as ssize_t;
    }
    let written = next!(sendfile64(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t);
    wrote_unseen(to, written);
    written
}

/// A copy of what splice(2) is about to take from a pipe, to be read along: it says where the response ends.
struct Teed {
    pipe: OwnedFd,
    length: usize,
}

impl Teed {
    /// Of up to `length` bytes in the pipe `from`; `None`: there is nothing, or it is no pipe.
    fn of(from: c_int, length: size_t, flags: c_uint) -> Option<Self> {
        let mut ends = [-1; 2];
        // SAFETY: room for two descriptors, which are nobody else's.
        let (pipe, to) = unsafe {
            if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) != 0 {
                return None;
            }
            (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
        };
        // SAFETY: numbers.
        let teed = unsafe { libc::tee(from, to.as_raw_fd(), length, flags & libc::SPLICE_F_NONBLOCK) };
        usize::try_from(teed).ok().filter(|&teed| teed > 0).map(|length| Self { pipe, length })
    }

    /// The server wrote so many bytes of it.
    fn wrote(&self, tracker: &mut ResponseTracker, mut written: usize) {
        let mut bytes = [0; 4096];
        while written > 0 {
            let most = written.min(bytes.len());
            match rustix::io::read(&self.pipe, &mut bytes[..most]) {
                Ok(got) if got > 0 => {
                    tracker.wrote(&bytes[..got]);
                    written -= got;
                }
                _ => return tracker.wrote_unseen(written as u64),
            }
        }
    }
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
    if let Err(error) = server::before_write(to, None) {
        return fail(error) as ssize_t;
    }
    let waits = if flags & libc::SPLICE_F_NONBLOCK == 0 { 0 } else { libc::MSG_DONTWAIT };
    let length = match reads::ready(from, length, waits) {
        Reading::AsUsual => length,
        Reading::Fails(error) => return fail(error) as ssize_t,
        Reading::Socket(most) => most,
        // Who asks for bytes that are not on a socket reads them instead (splice(2), EINVAL).
        Reading::Copy(_) => return fail(Errno::INVAL) as ssize_t,
        Reading::Ended => return 0,
    };
    let teed = if server::comes_to_framing(to) { Teed::of(from, length, flags) } else { None };
    let length = teed.as_ref().map_or(length, |teed| teed.length);
    let written = next!(splice(
        from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, length: size_t, flags: c_uint
    ) -> ssize_t);
    if written > 0 {
        server::took(from, written as usize, false, true);
    }
    match teed.filter(|_| written > 0) {
        Some(teed) => server::wrote(to, |tracker| teed.wrote(tracker, written as usize)),
        None => wrote_unseen(to, written),
    }
    written
}
