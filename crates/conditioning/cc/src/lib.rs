//! The C library of connection conditioning: `tidegate/cc.h`, in which each call is described.
#![allow(clippy::missing_safety_doc, clippy::not_unsafe_ptr_arg_deref)]

mod chain;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use libc::{
    c_char, c_int, c_void, epoll_event, fd_set, in_addr, in6_addr, nfds_t, pollfd, size_t, sockaddr,
    socklen_t,
};
use libc::{ssize_t, timeval};
use rustix::io::Errno;
use tidegate_conditioning::server::{
    self, AcceptOptions, Calls, Closing, Reading, address, connection::Interest,
};

fn fail(error: Errno) -> c_int {
    // SAFETY: the calling thread's errno.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
    -1
}

fn errno() -> Errno {
    // SAFETY: the calling thread's errno.
    Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cc_createlsock(
    sin_addr: in_addr,
    sin_port: u16,
    backlog: c_int,
    filters: *const *const c_char,
) -> c_int {
    let ip = Ipv4Addr::from(u32::from_be(sin_addr.s_addr));
    // SAFETY: the caller's array, which ends with NULL.
    unsafe { create(ip.into(), sin_port, backlog, filters) }
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cc_createlsock6(
    sin6_addr: in6_addr,
    sin6_port: u16,
    backlog: c_int,
    filters: *const *const c_char,
) -> c_int {
    // SAFETY: the caller's array, which ends with NULL.
    unsafe { create(Ipv6Addr::from(sin6_addr.s6_addr).into(), sin6_port, backlog, filters) }
}

unsafe fn create(ip: IpAddr, port: u16, backlog: c_int, filters: *const *const c_char) -> c_int {
    // SAFETY: as the caller promises.
    let Some(names) = (unsafe { chain::names(filters) }) else { return fail(Errno::INVAL) };
    chain::create(SocketAddr::new(ip, u16::from_be(port)), backlog, names).unwrap_or_else(fail)
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cc_accept(s: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int {
    match server::accept(s, AcceptOptions::default()) {
        Some(Ok((fd, peer))) => {
            // SAFETY: the caller passes room for an address and its length, or nothing.
            unsafe { address::write(peer, addr, addrlen) };
            fd
        }
        Some(Err(error)) => fail(error),
        // SAFETY: the caller's own arguments.
        None => unsafe { libc::accept(s, addr, addrlen) },
    }
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cc_read(fd: c_int, buf: *mut c_void, count: size_t) -> ssize_t {
    let calls = Calls {
        // SAFETY: as [`server::ready`] asks for.
        recv: |to, length, flags| unsafe { libc::recv(fd, to, length, flags) },
        // SAFETY: likewise.
        poll: |descriptors, count, timeout| unsafe { libc::poll(descriptors, count, timeout) },
    };
    match server::ready(fd, count, false, &calls) {
        // SAFETY: the caller's own arguments.
        Reading::AsUsual => unsafe { libc::read(fd, buf, count) },
        Reading::Fails(error) => fail(error) as ssize_t,
        Reading::Copy(bytes) => {
            // SAFETY: the caller passes `count` writable bytes, and `bytes` are no more.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buf.cast(), bytes.len()) };
            server::took(fd, bytes.len(), true, false);
            bytes.len() as ssize_t
        }
        Reading::Socket(most) => {
            // SAFETY: no more than the caller's `count`.
            let got = unsafe { libc::read(fd, buf, most) };
            if got > 0 {
                server::took(fd, got as usize, false, false);
            }
            got
        }
        Reading::Ended => 0,
    }
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn cc_close(fd: c_int, closeAllFilters: c_int) -> c_int {
    server::closing(fd, if closeAllFilters != 0 { Closing::ForAll } else { Closing::Locally });
    // SAFETY: the caller's own descriptor.
    unsafe { libc::close(fd) }
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cc_select(
    n: c_int,
    readfds: *mut fd_set,
    writefds: *mut fd_set,
    exceptfds: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    if !readfds.is_null() {
        for fd in (0..n).filter(|&fd| server::is_read(fd)) {
            // SAFETY: the caller's set, which has room for `n` descriptors.
            unsafe { libc::FD_CLR(fd, readfds) };
        }
    }
    // SAFETY: the caller's own arguments.
    unsafe { libc::select(n, readfds, writefds, exceptfds, timeout) }
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cc_poll(fds: *mut pollfd, nfds: nfds_t, timeout: c_int) -> c_int {
    let asked: &mut [pollfd] = if fds.is_null() {
        &mut []
    } else {
        // SAFETY: the caller passes `nfds` entries.
        unsafe { std::slice::from_raw_parts_mut(fds, nfds as usize) }
    };
    let mut read = Vec::new();
    for (at, entry) in asked.iter_mut().enumerate() {
        if entry.events & libc::POLLIN != 0 && server::is_read(entry.fd) {
            // What is readable is the next request; only the client's end is of interest.
            read.push((at, entry.events));
            entry.events = (entry.events & !libc::POLLIN) | libc::POLLRDHUP;
        }
    }
    // SAFETY: the caller's own arguments.
    let result = unsafe { libc::poll(fds, nfds, timeout) };
    for (at, events) in read {
        let entry = &mut asked[at];
        entry.events = events;
        if entry.revents & libc::POLLRDHUP != 0 {
            entry.revents |= libc::POLLIN;
        }
        entry.revents &= events | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;
    }
    result
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cc_epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    let call = || {
        // SAFETY: the caller's own arguments.
        let result = unsafe { libc::epoll_ctl(epfd, op, fd, event) };
        let outcome = if result == 0 { Ok(()) } else { Err(errno()) };
        // SAFETY: as above.
        (unsafe { Interest::of_call(epfd, op, fd, event, outcome) }, outcome)
    };
    match server::registering(epfd, op, fd, call) {
        Ok(()) => 0,
        Err(error) => fail(error),
    }
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cc_epoll_wait(
    epfd: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the caller's own arguments.
    unsafe { libc::epoll_wait(epfd, events, most, timeout) }
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
pub extern "C" fn cc_dup(oldfd: c_int) -> c_int {
    // SAFETY: a number.
    let new = unsafe { libc::dup(oldfd) };
    if new >= 0 {
        server::duplicated(oldfd, new);
    }
    new
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
pub extern "C" fn cc_dup2(oldfd: c_int, newfd: c_int) -> c_int {
    if server::may_duplicate(oldfd, newfd) {
        server::closing(newfd, Closing::Locally);
    }
    // SAFETY: numbers.
    let new = unsafe { libc::dup2(oldfd, newfd) };
    if new >= 0 && oldfd != newfd {
        server::duplicated(oldfd, new);
    }
    new
}

/// See `tidegate/cc.h`.
#[unsafe(no_mangle)]
pub extern "C" fn cc_fork() -> libc::pid_t {
    // SAFETY: what holds of fork(2) in the caller's program.
    let child = unsafe { libc::fork() };
    if child == 0 {
        server::adopt_connections();
    }
    child
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// It is read where the kernel has read it, which says so of one that cannot be.
    #[test]
    fn an_event_that_is_none_is_not_read() {
        let nothing = std::ptr::without_provenance_mut(8);
        let mut event = epoll_event { events: libc::EPOLLIN as u32, u64: 1 };
        // SAFETY: descriptors of this test's own.
        unsafe {
            let epoll = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC);
            assert_eq!(cc_epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, nothing), -1);
            assert_eq!(errno(), Errno::FAULT);
            assert_eq!(cc_epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event), 0);
            assert_eq!(cc_epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, nothing), 0);
        }
    }
}
