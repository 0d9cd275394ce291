//! Options of sockets in whose place the server has something else.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use libc::{c_int, c_long, socklen_t};
use rustix::io::Errno;
use rustix::net::sockopt::socket_domain;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::table::lock;
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

/// What connections have from the listening socket that they come from (socket(7), tcp(7), ip(7), ipv6(7)), as far as it
/// concerns the server. Filters wait for whole requests on the same sockets, so that what delays or hides bytes is not
/// among it, such as SO_RCVLOWAT.
const INHERITED: [(c_int, c_int); 20] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::SOL_SOCKET, libc::SO_MARK),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_RCVBUF),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDBUF),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::IPPROTO_TCP, libc::TCP_CONGESTION),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_LINGER2),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    (libc::IPPROTO_IP, libc::IP_TOS),
    (libc::IPPROTO_IP, libc::IP_TTL),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
];

/// A smaller buffer might not have room for a request that filters wait for as a whole.
const LEAST_RECEIVED: c_int = 256 * 1024;

/// The options that a server has set on a listening socket, for the connections that come from it.
#[derive(Debug, Default)]
pub struct ForConnections(Mutex<Vec<SocketOption>>);

#[derive(Debug)]
struct SocketOption {
    level: c_int,
    name: c_int,
    /// As getsockopt(2) says.
    value: Vec<u8>,
}

impl ForConnections {
    /// Of `socket`, which is about to listen: all in which it differs from a new one.
    pub fn of(socket: BorrowedFd<'_>) -> Self {
        let differing = || {
            let new = new_like(socket_domain(socket)?)?;
            let differs = |&(level, name): &(c_int, c_int)| {
                let value = value_of(socket, level, name)?;
                (value_of(new.as_fd(), level, name)? != value).then_some(SocketOption { level, name, value })
            };
            Ok::<_, Errno>(INHERITED.iter().filter_map(differs).collect())
        };
        Self(Mutex::new(differing().unwrap_or_default()))
    }

    /// The server sets an option of the listening socket, which is at `address`. `None`: connections would not have it.
    ///
    /// # Errors
    /// As setsockopt(2).
    pub fn set(
        &self,
        address: SocketAddr,
        level: c_int,
        name: c_int,
        value: &[u8],
    ) -> Option<Result<(), Errno>> {
        if !INHERITED.contains(&(level, name)) {
            return None;
        }
        let set = || {
            let new = new_at(address)?;
            set_raw(new.as_fd(), level, name, value)?;
            let value = value_of(new.as_fd(), level, name).ok_or(Errno::INVAL)?;
            let mut all = lock(&self.0);
            all.retain(|one| (one.level, one.name) != (level, name));
            all.push(SocketOption { level, name, value });
            Ok(())
        };
        Some(set())
    }

    /// What getsockopt(2) says of it: without a value of its own, as of a new socket.
    pub fn get(&self, address: SocketAddr, level: c_int, name: c_int) -> Option<Vec<u8>> {
        if !INHERITED.contains(&(level, name)) {
            return None;
        }
        let is_this = |one: &&SocketOption| (one.level, one.name) == (level, name);
        let set = lock(&self.0).iter().find(is_this).map(|one| one.value.clone());
        set.or_else(|| value_of(new_at(address).ok()?.as_fd(), level, name))
    }

    /// Sets them at a connection, as far as it takes them. Returns whether they say what its close does.
    pub fn give(&self, connection: BorrowedFd<'_>) -> bool {
        let all = lock(&self.0);
        for SocketOption { level, name, value } in &*all {
            let size = value.first_chunk().map(|bytes| c_int::from_ne_bytes(*bytes));
            // The kernel says twice what it was told.
            let told = match (*level, *name, size) {
                (libc::SOL_SOCKET, libc::SO_RCVBUF, Some(size)) => &bytes(size.max(LEAST_RECEIVED) / 2),
                (libc::SOL_SOCKET, libc::SO_SNDBUF, Some(size)) => &bytes(size / 2),
                _ => value,
            };
            let _ = set_raw(connection, *level, *name, told);
        }
        all.iter().any(|one| is_linger(one.level, one.name))
    }
}

fn new_at(address: SocketAddr) -> Result<OwnedFd, Errno> {
    new_like(if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET })
}

fn new_like(family: AddressFamily) -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

fn value_of(socket: BorrowedFd<'_>, level: c_int, name: c_int) -> Option<Vec<u8>> {
    let mut value = vec![0; MOST_BYTES];
    let length = get_raw(socket, level, name, &mut value).ok()?;
    value.truncate(length);
    Some(value)
}

/// Whether a socket that is to listen shares its address with others that say so, too (SO_REUSEPORT, socket(7)).
pub fn shares_address(socket: BorrowedFd<'_>) -> bool {
    rustix::net::sockopt::socket_reuseport(socket) != Ok(false)
}

/// An option that says nothing of a socket that never has a connection.
const MARKED: (c_int, c_int) = (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE);
/// Its value on sockets that are bound in name only, by which a process knows one that it gets from another.
const MARK: c_int = 0x7469_6465;

/// Marks a socket as one that is bound in name only.
pub fn mark(socket: BorrowedFd<'_>) {
    let _ = set_raw(socket, MARKED.0, MARKED.1, &MARK.to_ne_bytes());
}

/// Whether it is one.
pub fn is_marked(socket: BorrowedFd<'_>) -> bool {
    let mut value = [0; 4];
    get_raw(socket, MARKED.0, MARKED.1, &mut value) == Ok(4) && value == MARK.to_ne_bytes()
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
