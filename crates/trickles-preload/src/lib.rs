//! Preload library (Trickles §4): `LD_PRELOAD=libtidegate_trickles_preload.so TIDEGATE_TRICKLES='*:8080' curl …` makes an
//! unmodified program reach the servers at port 8080 over Trickles. Where none answers, TCP takes its place
//! (Trickles §2.6).
//!
//! Packets are encrypted for whoever answers; for the owner of a key alone with `TIDEGATE_TRICKLES_KEY`, which rules TCP out.
//! `TIDEGATE_TRICKLES_KEY=none` sends them in the clear.
//!
//! A stream socket that connects to a chosen destination is replaced by one end of a socket pair; a thread moves bytes
//! between the other end and a Trickles stream. Programs that fork after connecting, or that register a socket with
//! epoll before they connect it, are not served.

mod pump;
pub mod rules;

use libc::{c_int, c_void, sockaddr, socklen_t};
use pump::Job;
use rules::Rule;
use std::collections::HashMap;
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, OnceLock, PoisonError};
use tidegate_trickles::sealed::Encryption;

type Connect = unsafe extern "C" fn(c_int, *const sockaddr, socklen_t) -> c_int;
type Name = unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int;
type SetOption = unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int;

/// Sockets that were replaced, by descriptor: the inode tells whether it is still the same one.
static REPLACED: Mutex<Option<HashMap<c_int, Replaced>>> = Mutex::new(None);
/// Descriptors that are remembered; far beyond what a process may have open.
const MAX_REPLACED: usize = 1 << 20;

#[derive(Clone, Copy)]
struct Replaced {
    inode: libc::ino_t,
    destination: SocketAddr,
}

/// The next definition of a function: the system's.
macro_rules! system {
    ($name:literal, $type:ty) => {{
        static FOUND: OnceLock<Option<$type>> = OnceLock::new();
        *FOUND.get_or_init(|| {
            // SAFETY: the name ends with a zero byte; RTLD_NEXT asks for the definition after this library's.
            let found = unsafe { libc::dlsym(libc::RTLD_NEXT, $name.as_ptr()) };
            // SAFETY: the symbol of this name has this type by POSIX; a null pointer becomes `None`.
            unsafe { std::mem::transmute::<*mut c_void, Option<$type>>(found) }
        })
    }};
}

fn fail(error: c_int) -> c_int {
    // SAFETY: the pointer is to the calling thread's own error number.
    unsafe { *libc::__errno_location() = error };
    -1
}

fn rules() -> &'static [Rule] {
    static RULES: OnceLock<Vec<Rule>> = OnceLock::new();
    RULES.get_or_init(|| {
        let text = std::env::var("TIDEGATE_TRICKLES").unwrap_or_default();
        rules::parse(&text).unwrap_or_else(|error| {
            eprintln!("tidegate: TIDEGATE_TRICKLES: {error}; everything goes over TCP");
            Vec::new()
        })
    })
}

/// Whether packets are encrypted, and for whom. `None` where the key cannot be read: who names one wants no other.
fn encryption() -> Option<Encryption> {
    static ENCRYPTION: OnceLock<Option<Encryption>> = OnceLock::new();
    *ENCRYPTION.get_or_init(|| {
        let text = std::env::var_os("TIDEGATE_TRICKLES_KEY").unwrap_or_default();
        let encryption = text.to_str().and_then(rules::encryption);
        if encryption.is_none() {
            eprintln!(
                "tidegate: TIDEGATE_TRICKLES_KEY: expected 64 hexadecimal digits, or none; connections that \
                 TIDEGATE_TRICKLES lists are refused"
            );
        }
        encryption
    })
}

/// Reads an Internet address.
///
/// # Safety
/// `address` is null or readable for `length` bytes.
unsafe fn destination(address: *const sockaddr, length: socklen_t) -> Option<SocketAddr> {
    let length = length as usize;
    if address.is_null() || length < size_of::<libc::sa_family_t>() {
        return None;
    }
    // SAFETY: readable for at least the family by the check above; no alignment is assumed.
    let family = unsafe { address.cast::<libc::sa_family_t>().read_unaligned() };
    match c_int::from(family) {
        libc::AF_INET if length >= size_of::<libc::sockaddr_in>() => {
            // SAFETY: readable for the whole structure by the match's guard; every bit pattern is a value.
            let address = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            let ip = IpAddr::from(address.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::new(ip, u16::from_be(address.sin_port)))
        }
        libc::AF_INET6 if length >= size_of::<libc::sockaddr_in6>() => {
            // SAFETY: as above.
            let address = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(SocketAddr::new(IpAddr::from(address.sin6_addr.s6_addr), u16::from_be(address.sin6_port)))
        }
        _ => None,
    }
}

fn inode(descriptor: c_int) -> Option<libc::ino_t> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the buffer is as large as fstat writes.
    if unsafe { libc::fstat(descriptor, stat.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: fstat succeeded, so that it has filled the structure.
    Some(unsafe { stat.assume_init() }.st_ino)
}

fn is_stream(descriptor: c_int) -> bool {
    let mut kind: c_int = 0;
    let mut length = size_of::<c_int>() as socklen_t;
    // SAFETY: value and length are valid for writes of their sizes.
    let result = unsafe {
        libc::getsockopt(descriptor, libc::SOL_SOCKET, libc::SO_TYPE, (&raw mut kind).cast(), &raw mut length)
    };
    result == 0 && kind == libc::SOCK_STREAM
}

fn replaced(descriptor: c_int) -> Option<Replaced> {
    let table = REPLACED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = *table.as_ref()?.get(&descriptor)?;
    (inode(descriptor) == Some(known.inode)).then_some(known)
}

/// Puts one end of a socket pair in the place of `descriptor` and hands the other to the pump.
fn replace(
    descriptor: c_int,
    destination: SocketAddr,
    servers: Vec<SocketAddr>,
    encryption: Encryption,
) -> std::io::Result<()> {
    let (ours, theirs) = UnixStream::pair()?;
    // SAFETY: these read the flags of a descriptor that the caller has open.
    let (status, close_on_exec) =
        unsafe { (libc::fcntl(descriptor, libc::F_GETFL), libc::fcntl(descriptor, libc::F_GETFD)) };
    theirs.set_nonblocking(status >= 0 && status & libc::O_NONBLOCK != 0)?;
    let flags = if close_on_exec >= 0 && close_on_exec & libc::FD_CLOEXEC != 0 { libc::O_CLOEXEC } else { 0 };
    // SAFETY: both descriptors are open; the program's is replaced by what it asked for, a connected stream.
    if unsafe { libc::dup3(theirs.as_raw_fd(), descriptor, flags) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    drop(theirs);
    pump::start(Job { program: ours, servers, destination, encryption })?;
    if let Some(inode) = inode(descriptor) {
        let mut table = REPLACED.lock().unwrap_or_else(PoisonError::into_inner);
        let table = table.get_or_insert_with(HashMap::new);
        if table.len() < MAX_REPLACED {
            table.insert(descriptor, Replaced { inode, destination });
        }
    }
    Ok(())
}

/// `connect(2)`: chosen destinations over Trickles, all others as ever.
///
/// # Safety
/// That of connect(2): `address` is readable for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(descriptor: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    let Some(system) = system!(c"connect", Connect) else { return fail(libc::ENOSYS) };
    if !pump::is_worker() && is_stream(descriptor) {
        if replaced(descriptor).is_some() {
            return fail(libc::EISCONN);
        }
        // SAFETY: the caller's promise.
        let chosen = unsafe { destination(address, length) }
            .and_then(|destination| Some((destination, rules::servers(rules(), destination)?)));
        if let Some((destination, servers)) = chosen {
            let Some(encryption) = encryption() else { return fail(libc::ECONNREFUSED) };
            return match replace(descriptor, destination, servers, encryption) {
                Ok(()) => 0,
                Err(error) => fail(error.raw_os_error().unwrap_or(libc::EIO)),
            };
        }
    }
    // SAFETY: the caller's promise, passed on.
    unsafe { system(descriptor, address, length) }
}

/// Writes an address as getpeername(2) does: cut to the caller's room, with its whole length.
///
/// # Safety
/// `length` is valid for reads and writes, `address` for writes of `*length` bytes.
unsafe fn put_address(from: SocketAddr, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    if address.is_null() || length.is_null() {
        return fail(libc::EFAULT);
    }
    let mut bytes = [0_u8; size_of::<libc::sockaddr_in6>()];
    let whole = match from {
        SocketAddr::V4(from) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET as libc::sa_family_t).to_ne_bytes());
            bytes[2..4].copy_from_slice(&from.port().to_be_bytes());
            bytes[4..8].copy_from_slice(&from.ip().octets());
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(from) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET6 as libc::sa_family_t).to_ne_bytes());
            bytes[2..4].copy_from_slice(&from.port().to_be_bytes());
            bytes[8..24].copy_from_slice(&from.ip().octets());
            bytes.len()
        }
    };
    // SAFETY: valid by the caller's promise.
    let room = unsafe { *length } as usize;
    // SAFETY: at most the caller's room and what `bytes` has; the two do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address.cast::<u8>(), whole.min(room)) };
    // SAFETY: valid by the caller's promise.
    unsafe { *length = whole as socklen_t };
    0
}

/// `getpeername(2)`: the destination that the program asked for.
///
/// # Safety
/// That of getpeername(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getpeername(
    descriptor: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    if let Some(known) = replaced(descriptor) {
        // SAFETY: the caller's promise.
        return unsafe { put_address(known.destination, address, length) };
    }
    let Some(system) = system!(c"getpeername", Name) else { return fail(libc::ENOSYS) };
    // SAFETY: the caller's promise, passed on.
    unsafe { system(descriptor, address, length) }
}

/// `getsockname(2)`: of the destination's family, unspecified.
///
/// # Safety
/// That of getsockname(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockname(
    descriptor: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    if let Some(known) = replaced(descriptor) {
        let unspecified = match known.destination {
            SocketAddr::V4(_) => SocketAddr::from(([0; 4], 0)),
            SocketAddr::V6(_) => SocketAddr::from(([0_u16; 8], 0)),
        };
        // SAFETY: the caller's promise.
        return unsafe { put_address(unspecified, address, length) };
    }
    let Some(system) = system!(c"getsockname", Name) else { return fail(libc::ENOSYS) };
    // SAFETY: the caller's promise, passed on.
    unsafe { system(descriptor, address, length) }
}

/// `setsockopt(2)`: options of TCP and IP mean nothing to Trickles and are accepted.
///
/// # Safety
/// That of setsockopt(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    descriptor: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    if matches!(level, libc::IPPROTO_TCP | libc::IPPROTO_IP | libc::IPPROTO_IPV6)
        && replaced(descriptor).is_some()
    {
        return 0;
    }
    let Some(system) = system!(c"setsockopt", SetOption) else { return fail(libc::ENOSYS) };
    // SAFETY: the caller's promise, passed on.
    unsafe { system(descriptor, level, name, value, length) }
}
