//! bind, listen, accept, close, dup, epoll_ctl, setsockopt and what else is about a descriptor as a whole.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use libc::{c_int, c_long, c_uint, c_ulong, c_void, epoll_event, sockaddr, socklen_t};
use rustix::fs::OFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_timeout};
use tidegate_conditioning::server::{
    self, AcceptOptions, Closing, End, ForConnections, Listening, address, connection::Interest, options,
};

use crate::next::next;
use crate::{errno, fail, raw, state, streams};

fn borrow(fd: c_int) -> BorrowedFd<'static> {
    // SAFETY: a number from the server, used for single system calls that fail with EBADF if it is none.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

fn write_address(value: SocketAddr, to: *mut sockaddr, length: *mut socklen_t) {
    // SAFETY: the caller's own arguments, as for the system call.
    unsafe { address::write(value, to, length) }
}

/// bind(2): on the chain's port nothing is bound, because the first filter owns it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the caller's own arguments, as for the system call.
    if let Some(address) = unsafe { address::read(address, length) }
        && rustix::net::sockopt::socket_type(borrow(fd)) == Ok(rustix::net::SocketType::STREAM)
    {
        if state::is_taken(fd, address) {
            return fail(rustix::io::Errno::ADDRINUSE);
        }
        if state::bind(fd, address) {
            return 0;
        }
    }
    next!(bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int)
}

/// listen(2): the chain's link takes the place of the socket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    if server::listener(fd).is_some() {
        return 0;
    }
    let Some((address, chain)) = state::adopt_bound(fd).zip(state::chain()) else {
        state::listens_elsewhere(fd);
        return next!(listen(fd: c_int, backlog: c_int) -> c_int);
    };
    let put = || {
        let flags = rustix::fs::fcntl_getfl(borrow(fd))?;
        let cloexec = rustix::io::fcntl_getfd(borrow(fd))?.contains(rustix::io::FdFlags::CLOEXEC);
        let cloexec = if cloexec { rustix::io::DupFlags::CLOEXEC } else { rustix::io::DupFlags::empty() };
        let only_v6 = address.is_ipv6() && rustix::net::sockopt::ipv6_v6only(borrow(fd)).unwrap_or(false);
        let options = ForConnections::of(borrow(fd));
        let is_alone = !options::shares_address(borrow(fd));
        let waits_at_most = socket_timeout(borrow(fd), Timeout::Recv)?;
        let registrations = server::registrations("self", fd);
        // SAFETY: the server's own descriptor, which is the link from now on, and is not closed here.
        let mut own = std::mem::ManuallyDrop::new(unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) });
        rustix::io::dup3(&chain.link, &mut own, cloexec)?;
        rustix::fs::fcntl_setfl(borrow(fd), flags & OFlags::NONBLOCK)?;
        if waits_at_most.is_some() {
            set_socket_timeout(borrow(fd), Timeout::Recv, waits_at_most)?;
        }
        server::listen_with(fd, chain, Listening { address, only_v6 }, options)?;
        if is_alone {
            server::set_alone(fd);
        }
        server::carry_over(registrations);
        crate::programs::remember_listeners();
        Ok(())
    };
    put().map_or_else(fail, |()| 0)
}

/// accept(2) is a point of cancellation (pthreads(7)).
fn may_end() {
    unsafe extern "C" {
        fn pthread_testcancel();
    }
    // SAFETY: nothing is locked, nor is there anything to be dropped that somebody would miss.
    unsafe { pthread_testcancel() };
}

/// accept(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    let options = AcceptOptions { follow: true, may_end: Some(may_end), ..AcceptOptions::default() };
    match server::accept(fd, options) {
        Some(accepted) => present(accepted, address, length),
        None => next!(accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int),
    }
}

/// accept4(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let options = AcceptOptions {
        nonblocking: flags & libc::SOCK_NONBLOCK != 0,
        cloexec: flags & libc::SOCK_CLOEXEC != 0,
        follow: true,
        dont_wait: false,
        may_end: Some(may_end),
    };
    match server::accept(fd, options) {
        Some(accepted) => present(accepted, address, length),
        None => {
            next!(accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int)
        }
    }
}

fn present(
    accepted: Result<(c_int, SocketAddr), rustix::io::Errno>,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    match accepted {
        Ok((fd, peer)) => {
            write_address(peer, address, length);
            fd
        }
        Err(error) => fail(error),
    }
}

/// getsockname(2): a listening socket has the address that the server asked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    let listens = server::listener(fd).map(|listener| listener.address);
    if let Some(bound) = listens.or_else(|| state::bound_address(fd)) {
        write_address(bound, address, length);
        return 0;
    }
    match server::address_of(fd, End::Local) {
        Some(Ok(local)) => {
            write_address(local, address, length);
            0
        }
        Some(Err(error)) => fail(error),
        None => {
            // SAFETY: the caller's own length, if there is one.
            let room = unsafe { length.as_ref() }.copied();
            let result =
                next!(getsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int);
            if let Some(room) = room.filter(|_| result == 0)
                // SAFETY: the kernel has just written as much as there was room for.
                && unsafe { address::read(address, room.min(*length)) }.is_some_and(|named| named.port() == 0)
                && let Some(bound) = state::adopt_bound(fd)
            {
                // SAFETY: as much room as the caller said at first.
                unsafe { *length = room };
                write_address(bound, address, length);
            }
            result
        }
    }
}

/// getpeername(2): of the family of the server's listening socket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getpeername(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    match server::address_of(fd, End::Peer) {
        Some(Ok(peer)) => {
            write_address(peer, address, length);
            0
        }
        Some(Err(error)) => fail(error),
        None => next!(getpeername(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int),
    }
}

/// getsockopt(2): what stands for a listening socket, or for a connection that is over, answers like one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    let answer = match server::listener(fd) {
        Some(listens_on) => server::option_for_connections(fd, level, name)
            .or_else(|| options::of_listener(level, name, listens_on)),
        None if level == libc::SOL_SOCKET && server::is_ended(fd) => server::address_of(fd, End::Peer)
            .and_then(Result::ok)
            .and_then(|peer| options::of_stream(name, peer))
            .map(options::bytes),
        None => None,
    };
    let Some(answer) = answer.filter(|_| !value.is_null() && !length.is_null()) else {
        return next!(
            getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t) -> c_int
        );
    };
    // SAFETY: the caller passes `*length` writable bytes at `value`.
    unsafe {
        let room = (*length as usize).min(answer.len());
        std::ptr::copy_nonoverlapping(answer.as_ptr(), value.cast(), room);
        *length = room as socklen_t;
    }
    0
}

/// setsockopt(2): options of TCP mean nothing to a link, nor to a descriptor whose connection is over. Those that connections
/// have from their listening socket are theirs alone, but for how long an accept waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    if !value.is_null() && (length as usize) <= options::MOST_BYTES && server::listener(fd).is_some() {
        // SAFETY: the caller passes `length` readable bytes.
        let value = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), length as usize) };
        match server::set_for_connections(fd, level, name, value) {
            Some(Err(error)) => return fail(error),
            Some(Ok(())) if (level, name) != (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => return 0,
            _ => {}
        }
    }
    if level != libc::SOL_SOCKET && (server::is_ended(fd) || server::listener(fd).is_some()) {
        return 0;
    }
    let result = next!(
        setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t) -> c_int
    );
    if result == 0 && options::is_cork(level, name) && length as usize >= size_of::<c_int>() {
        // SAFETY: the kernel just read an int there.
        server::corked(fd, unsafe { value.cast::<c_int>().read_unaligned() } != 0);
    }
    if result == 0 && options::is_linger(level, name) {
        server::set_linger_option(fd);
    }
    result
}

/// shutdown(2): nothing is left to shut down where the server's end is over, and a listening socket is that no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    if server::shuts_down(fd) {
        return 0;
    }
    if server::listener(fd).is_some() {
        // What ends a listening socket is the end of its side that receives.
        if how == libc::SHUT_WR {
            return 0;
        }
        return match server::shut_down(fd) {
            Ok(at) => {
                // It keeps its name, and may listen again.
                state::bind(fd, at.address);
                0
            }
            Err(error) => fail(error),
        };
    }
    next!(shutdown(fd: c_int, how: c_int) -> c_int)
}

/// close(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if state::is_own(fd) {
        return fail(rustix::io::Errno::BADF);
    }
    closing(fd);
    next!(close(fd: c_int) -> c_int)
}

/// syscall(2): some programs close this way, libuv among them, or accept, as if their libc had no accept4. libuv would also
/// register with epoll by an io_uring, of which nothing could be followed; where there is none, it calls epoll_ctl(2), as
/// all do that know older kernels.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    if number == libc::SYS_close {
        // SAFETY: the caller's own number, cut to its size as by the kernel.
        return unsafe { close(a as c_int) }.into();
    }
    // Those close as well.
    match number {
        // SAFETY: as above.
        libc::SYS_close_range => return unsafe { close_range(a as c_uint, b as c_uint, c as c_int) }.into(),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        libc::SYS_dup2 => return unsafe { dup2(a as c_int, b as c_int) }.into(),
        // SAFETY: as above.
        libc::SYS_dup3 => return unsafe { dup3(a as c_int, b as c_int, c as c_int) }.into(),
        // No other definition is asked for these, which might come back here.
        libc::SYS_accept if server::listener(a as c_int).is_some() => {
            // SAFETY: the caller's own arguments.
            return unsafe { accept(a as c_int, b as *mut sockaddr, c as *mut socklen_t) }.into();
        }
        libc::SYS_accept4 if server::listener(a as c_int).is_some() => {
            let (address, length) = (b as *mut sockaddr, c as *mut socklen_t);
            // SAFETY: the caller's own arguments.
            return unsafe { accept4(a as c_int, address, length, d as c_int) }.into();
        }
        libc::SYS_io_uring_setup if state::is_behind_chain() => {
            return fail(rustix::io::Errno::NOSYS).into();
        }
        _ => {}
    }
    // Those that a call does not have are whatever the registers hold, as in libc's own wrapper.
    raw::call(number, [a, b, c, d, e, f])
}

fn closing(fd: c_int) {
    server::closing(fd, Closing::AsFollowed);
    state::forget(fd);
}

/// close_range(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const CLOSE_RANGE_CLOEXEC: c_int = 4;
    if first > last {
        return fail(rustix::io::Errno::INVAL);
    }
    // Of no descriptors: whether the system has the call, and these flags. Otherwise nothing is closed.
    let none = c_uint::MAX;
    let result = next!(close_range(none: c_uint, none: c_uint, flags: c_int) -> c_int);
    if result != 0 {
        return result;
    }
    let number = |n: c_uint| c_int::try_from(n).unwrap_or(c_int::MAX);
    if flags & CLOSE_RANGE_CLOEXEC == 0 {
        server::closing_range(number(first), number(last));
    } else {
        server::set_cloexec_range(number(first), number(last));
    }
    let mut from = first;
    for own in state::own().into_iter().filter_map(|fd| c_uint::try_from(fd).ok()) {
        if own < from || own > last {
            continue;
        }
        if own > from {
            let to = own - 1;
            let result = next!(close_range(from: c_uint, to: c_uint, flags: c_int) -> c_int);
            if result != 0 {
                return result;
            }
        }
        from = own + 1;
    }
    if from > last {
        return 0;
    }
    next!(close_range(from: c_uint, last: c_uint, flags: c_int) -> c_int)
}

/// closefrom(3)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: numbers.
    unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

/// fclose(3): closes the descriptor of a stream of libc's own without a call of close(2) that could be seen.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fclose(file: *mut libc::FILE) -> c_int {
    if streams::descriptor(file).is_some() {
        return next!(fclose(file: *mut libc::FILE) -> c_int);
    }
    // What is buffered goes out first: the end of the response may be in it.
    // SAFETY: the caller's own stream.
    let fd = unsafe {
        libc::fflush(file);
        libc::fileno(file)
    };
    if fd >= 0 {
        closing(fd);
    }
    next!(fclose(file: *mut libc::FILE) -> c_int)
}

fn duplicated(old: c_int, new: c_int) {
    if new >= 0 && old != new {
        server::duplicated(old, new);
        state::duplicated(old, new);
    }
}

/// dup(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    let new = next!(dup(fd: c_int) -> c_int);
    duplicated(fd, new);
    new
}

/// dup2(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(fd: c_int, other: c_int) -> c_int {
    if server::may_duplicate(fd, other) {
        closing(other);
    }
    let new = next!(dup2(fd: c_int, other: c_int) -> c_int);
    duplicated(fd, new);
    new
}

/// dup3(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(fd: c_int, other: c_int, flags: c_int) -> c_int {
    if flags & !libc::O_CLOEXEC == 0 && server::may_duplicate(fd, other) {
        closing(other);
    }
    let new = next!(dup3(fd: c_int, other: c_int, flags: c_int) -> c_int);
    duplicated(fd, new);
    new
}

/// Whether fcntl(2) is to change nothing. All descriptors whose end is over are one file, which waits for nothing: its
/// flags are not one connection's to change. And programs have all that they do not know close on exec before they
/// become others.
fn stays_as_it_is(fd: c_int, command: c_int) -> bool {
    match command {
        libc::F_SETFL => server::is_ended(fd),
        libc::F_SETFD => state::is_own(fd),
        _ => false,
    }
}

fn noted(fd: c_int, command: c_int, argument: usize, result: c_int) -> c_int {
    match command {
        libc::F_GETFL if result >= 0 => return server::status_flags(fd, result),
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicated(fd, result),
        libc::F_SETFL if result == 0 => {
            server::set_blocking_known(fd, argument & libc::O_NONBLOCK as usize == 0)
        }
        libc::F_SETFD if result == 0 => server::set_cloexec(fd, argument & libc::FD_CLOEXEC as usize != 0),
        _ => {}
    }
    result
}

/// fcntl(2), of which every command takes at most one argument of a register's size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    if stays_as_it_is(fd, command) {
        return 0;
    }
    let result = next!(fcntl(fd: c_int, command: c_int, argument: usize) -> c_int);
    noted(fd, command, argument, result)
}

/// fcntl(2) as programs with large offsets call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int {
    if stays_as_it_is(fd, command) {
        return 0;
    }
    let result = next!(fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int);
    noted(fd, command, argument, result)
}

/// ioctl(2), of which every request takes at most one argument of a register's size. FIONREAD counts no next request;
/// FIOCLEX and FIONCLEX do what fcntl(2) does by F_SETFD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let sets_cloexec = matches!(request, libc::FIOCLEX | libc::FIONCLEX);
    if sets_cloexec && state::is_own(fd) {
        return 0;
    }
    let result = next!(ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int);
    if result == 0 && request == libc::FIONREAD {
        let there = argument.cast::<c_int>();
        // SAFETY: the kernel has just stored an int there.
        unsafe {
            let bytes = usize::try_from(there.read_unaligned()).unwrap_or(0);
            there.write_unaligned(server::readable_bytes(fd, bytes).try_into().unwrap_or(c_int::MAX));
        }
    }
    if result == 0 && sets_cloexec {
        server::set_cloexec(fd, request == libc::FIOCLEX);
    }
    result
}

/// epoll_create1(2); a set of epoll_create(2) may live on in programs that the process starts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_create1(flags: c_int) -> c_int {
    let epoll = next!(epoll_create1(flags: c_int) -> c_int);
    if flags & libc::EPOLL_CLOEXEC != 0 {
        server::made_epoll(epoll);
    }
    epoll
}

/// epoll_ctl(2): registrations are written down, because a filter's handle to the same socket would keep them alive
/// after close.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_ctl(
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    server::unpark_to_change(epoll, fd);
    let call = || {
        let result =
            next!(epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int);
        let outcome = if result == 0 { Ok(()) } else { Err(errno()) };
        // SAFETY: the caller's own arguments, with which the call was made.
        let interest = unsafe { Interest::of_call(epoll, operation, fd, event, outcome) };
        if result == 0 && operation != libc::EPOLL_CTL_DEL {
            server::park(interest);
        }
        (interest, outcome)
    };
    match server::registering(epoll, operation, fd, call) {
        Ok(()) => 0,
        Err(error) => fail(error),
    }
}

/// _exit(2)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    server::before_exit(false);
    next!(_exit(status: c_int) -> !)
}

/// _Exit(3)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Exit(status: c_int) -> ! {
    server::before_exit(false);
    next!(_Exit(status: c_int) -> !)
}
