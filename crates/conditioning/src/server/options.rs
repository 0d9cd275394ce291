//! Options of sockets in whose place the server has something else.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{c_int, c_long, socklen_t};
use rustix::io::Errno;

use super::{Listening, raw};

/// Longest value of an option that is handed on. The kernel cuts what it tells to the room there is (`struct
/// tcp_info`).
pub const MOST_BYTES: usize = 512;

/// The value of an option that is a number.
pub fn bytes(number: c_int) -> Vec<u8> {
    number.to_ne_bytes().to_vec()
}

/// What getsockopt(2) says of a listening socket at `listens_on`, where another file stands in its place; `None`: the
/// same as of that.
pub fn of_listener(level: c_int, name: c_int, listens_on: Listening) -> Option<Vec<u8>> {
    /// linux/tcp_states.h
    const TCP_LISTEN: u8 = 10;
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_INFO) {
        // Its state comes first; how many connections wait, and how many may (`tcpi_unacked`, `tcpi_sacked`), is the
        // first filter's affair: 0 of 0.
        let mut information = vec![0; MOST_BYTES];
        information[0] = TCP_LISTEN;
        return Some(information);
    }
    let number = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_REUSEADDR | libc::SO_ACCEPTCONN) => 1,
        // What a server reads here it sets for the connections that it accepts, as Erlang does; 0 would be refused.
        (libc::IPPROTO_IP, libc::IP_TTL) => 64,
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => listens_on.only_v6.into(),
        (libc::SOL_SOCKET, _) => return of_stream(name, listens_on.address).map(bytes),
        _ => 0,
    };
    Some(bytes(number))
}

/// What tells a TCP socket at `address` from others.
pub fn of_stream(name: c_int, address: SocketAddr) -> Option<c_int> {
    match name {
        libc::SO_TYPE => Some(libc::SOCK_STREAM),
        libc::SO_PROTOCOL => Some(libc::IPPROTO_TCP),
        libc::SO_DOMAIN if address.is_ipv6() => Some(libc::AF_INET6),
        libc::SO_DOMAIN => Some(libc::AF_INET),
        _ => None,
    }
}

/// Whether a server that has a relay in the place of a client's socket may set this option of the socket. What takes
/// privileges is not among them, because it is the relay that sets it, nor what changes the meaning of the bytes.
fn may_set(level: c_int, name: c_int) -> bool {
    match level {
        libc::IPPROTO_TCP => matches!(
            name,
            libc::TCP_NODELAY
                | libc::TCP_MAXSEG
                | libc::TCP_CORK
                | libc::TCP_KEEPIDLE
                | libc::TCP_KEEPINTVL
                | libc::TCP_KEEPCNT
                | libc::TCP_SYNCNT
                | libc::TCP_LINGER2
                | libc::TCP_DEFER_ACCEPT
                | libc::TCP_WINDOW_CLAMP
                | libc::TCP_QUICKACK
                | libc::TCP_USER_TIMEOUT
                | libc::TCP_THIN_LINEAR_TIMEOUTS
                | libc::TCP_NOTSENT_LOWAT
        ),
        libc::IPPROTO_IP => matches!(
            name,
            libc::IP_TOS | libc::IP_TTL | libc::IP_MTU_DISCOVER | libc::IP_RECVTOS | libc::IP_RECVERR
        ),
        libc::SOL_SOCKET => is_linger(level, name),
        libc::IPPROTO_IPV6 => {
            matches!(name, libc::IPV6_TCLASS | libc::IPV6_UNICAST_HOPS | libc::IPV6_MTU_DISCOVER)
        }
        _ => false,
    }
}

/// Whether the server may ask for it. Some options of TCP take addresses, which would be the relay's.
fn may_get(level: c_int, name: c_int) -> bool {
    may_set(level, name)
        || level == libc::IPPROTO_TCP
            && matches!(name, libc::TCP_INFO | libc::TCP_CONGESTION | libc::TCP_FASTOPEN)
        || level == libc::IPPROTO_IP && name == libc::IP_MTU
        || level == libc::IPPROTO_IPV6 && matches!(name, libc::IPV6_V6ONLY | libc::IPV6_MTU)
}

/// Whether what is written after it is set waits for more.
pub fn is_cork(level: c_int, name: c_int) -> bool {
    (level, name) == (libc::IPPROTO_TCP, libc::TCP_CORK)
}

/// Whether it says what close(2) does.
pub fn is_linger(level: c_int, name: c_int) -> bool {
    (level, name) == (libc::SOL_SOCKET, libc::SO_LINGER)
}

/// Sets an option of the client's `socket`.
///
/// # Errors
/// As setsockopt(2); ENOPROTOOPT: it is not the server's to set.
pub fn set(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
    if !may_set(level, name) {
        return Err(Errno::NOPROTOOPT);
    }
    set_raw(socket, level, name, value)
}

/// Asks for an option of the client's `socket`. Returns how much of `room` was written to.
///
/// # Errors
/// As getsockopt(2); ENOPROTOOPT: it is not the server's to ask for.
pub fn get(socket: BorrowedFd<'_>, level: c_int, name: c_int, room: &mut [u8]) -> Result<usize, Errno> {
    if !may_get(level, name) {
        return Err(Errno::NOPROTOOPT);
    }
    get_raw(socket, level, name, room)
}

/// setsockopt(2), not seen by any library.
fn set_raw(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
    let (value, length) = (value.as_ptr() as c_long, value.len() as c_long);
    let arguments = [socket.as_raw_fd().into(), level.into(), name.into(), value, length, 0];
    // SAFETY: reads `value`, for its whole length.
    unsafe { raw::call(libc::SYS_setsockopt, arguments) }.map(|_| ())
}

/// getsockopt(2) likewise. Returns how much of `room` was written to.
fn get_raw(socket: BorrowedFd<'_>, level: c_int, name: c_int, room: &mut [u8]) -> Result<usize, Errno> {
    let mut length = room.len() as socklen_t;
    let (to, at) = (room.as_mut_ptr() as c_long, (&raw mut length) as c_long);
    let arguments = [socket.as_raw_fd().into(), level.into(), name.into(), to, at, 0];
    // SAFETY: as much room as is said.
    unsafe { raw::call(libc::SYS_getsockopt, arguments) }?;
    Ok(length as usize)
}
