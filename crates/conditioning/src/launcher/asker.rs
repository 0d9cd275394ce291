//! The process that asks: its descriptors and its memory.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::SocketType;
use rustix::thread::UnshareFlags;

use crate::server::{address, connection::Interest, options, options::MOST_BYTES};

/// What a descriptor of a process is called: `socket:[12345]`.
pub fn name_of(process: u32, fd: RawFd) -> Option<String> {
    let name = std::fs::read_link(format!("/proc/{process}/fd/{fd}")).ok()?;
    Some(name.to_string_lossy().into_owned()).filter(|name| name.starts_with("socket:"))
}

/// The flags of a descriptor of a process (fcntl(2)).
///
/// # Errors
/// This process is out of descriptors, or that one is gone.
pub fn flags_of(process: u32, fd: RawFd) -> Result<libc::c_int, Errno> {
    let text = std::fs::read_to_string(format!("/proc/{process}/fdinfo/{fd}"));
    let text = text.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::SRCH))?;
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    Ok(flags.and_then(|flags| libc::c_int::from_str_radix(flags.trim(), 8).ok()).unwrap_or(0))
}

/// A handle of our own to a descriptor of a process (pidfd_getfd(2)).
pub fn handle_to(process: u32, fd: RawFd) -> Option<OwnedFd> {
    let process = rustix::process::Pid::from_raw(process as i32)?;
    // The process that asked may be a thread: its group's descriptors are the same.
    let open = |pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
    let pidfd = open(process).or_else(|_| open(leader_of(process)?)).ok()?;
    rustix::process::pidfd_getfd(&pidfd, fd, rustix::process::PidfdGetfdFlags::empty()).ok()
}

pub fn kind_of(process: u32, fd: RawFd) -> Option<SocketType> {
    rustix::net::sockopt::socket_type(handle_to(process, fd)?).ok()
}

/// Whether it is an IPv6 socket that takes no IPv4 clients.
pub fn is_v6_only(process: u32, fd: RawFd) -> bool {
    handle_to(process, fd).is_some_and(|socket| rustix::net::sockopt::ipv6_v6only(socket).unwrap_or(false))
}

/// Whether it is a socket that shares its address with others.
pub fn shares_address(process: u32, fd: RawFd) -> bool {
    handle_to(process, fd).is_none_or(|socket| options::shares_address(socket.as_fd()))
}

/// Registers `file`, which has the number `fd` in a process, with epoll sets of that process. The kernel tells
/// registrations apart by the number too, so that this takes a thread with a table of descriptors of its own, in which
/// the file has the same number.
pub fn register(process: u32, file: BorrowedFd<'_>, fd: RawFd, registrations: Vec<Interest>) {
    if registrations.is_empty() {
        return;
    }
    let register = || -> Result<(), Errno> {
        // SAFETY: nothing that this thread closes, or puts in the place of something, is anybody else's.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FILES)? };
        // SAFETY: whatever has the number here is of no use to this thread, which closes it with its table.
        let mut place = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(fd) });
        if file.as_raw_fd() != fd {
            rustix::io::dup2(file, &mut place)?;
        }
        for Interest { epoll, events, data, .. } in registrations {
            let Some(epoll) = handle_to(process, epoll) else { continue };
            let events = epoll::EventFlags::from_bits_retain(events);
            let _ = epoll::add(epoll, &*place, epoll::EventData::new_u64(data), events);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        // The server gets what it asked for in any case, and hears of clients where this comes out well.
        let _ = std::thread::Builder::new().spawn_scoped(scope, register);
    });
}

fn leader_of(thread: rustix::process::Pid) -> Result<rustix::process::Pid, Errno> {
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", thread.as_raw_nonzero())).unwrap_or_default();
    let group =
        status.lines().find_map(|line| line.strip_prefix("Tgid:")).and_then(|id| id.trim().parse().ok());
    group.and_then(rustix::process::Pid::from_raw).ok_or(Errno::SRCH)
}

/// Who waits for an answer.
#[derive(Clone, Copy)]
pub struct Asker {
    pub process: u32,
    /// The question's number, and the descriptor that it came from.
    pub id: u64,
    pub questions: RawFd,
}

impl Asker {
    /// Whether it still waits: a signal ends the call, and the memory is its own again.
    pub fn waits(self) -> bool {
        // linux/seccomp.h: _IOW('!', 2, __u64)
        const NOTIF_ID_VALID: libc::c_ulong = 0x4008_2102;
        // SAFETY: reads the number.
        unsafe { libc::ioctl(self.questions, NOTIF_ID_VALID, &raw const self.id) == 0 }
    }

    /// Its memory. Whose it is, is certain only if it still waits once the file is open (seccomp_unotify(2)).
    fn memory(self) -> io::Result<File> {
        let file = File::options().read(true).write(true).open(format!("/proc/{}/mem", self.process))?;
        if self.waits() { Ok(file) } else { Err(Errno::INTR.into()) }
    }
}

pub fn read_address(asker: Asker, arguments: [u64; 6]) -> Option<SocketAddr> {
    // Room for any address (struct sockaddr_storage), aligned as one.
    let mut bytes = [0u64; 16];
    let length = (arguments[2] as usize).min(size_of_val(&bytes));
    // SAFETY: plain data seen as bytes, for its whole length.
    let view = unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<u8>(), length) };
    asker.memory().ok()?.read_exact_at(view, arguments[1]).ok()?;
    // SAFETY: `length` bytes at an aligned address.
    unsafe { address::read(bytes.as_ptr().cast(), length as libc::socklen_t) }
}

/// Writes an address where getsockname(2) would: cut to the room there is, with the full length reported.
pub fn write_address_at(asker: Asker, at: u64, length_at: u64, value: SocketAddr) -> io::Result<()> {
    if at == 0 || length_at == 0 {
        return Ok(());
    }
    let memory = asker.memory()?;
    let mut room = [0u8; 4];
    memory.read_exact_at(&mut room, length_at)?;
    let mut bytes = [0u64; 16];
    let mut length = size_of_val(&bytes) as libc::socklen_t;
    // SAFETY: as much room as is said.
    unsafe { address::write(value, bytes.as_mut_ptr().cast(), &raw mut length) };
    // SAFETY: plain data seen as bytes, less than its whole length.
    let written = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<u8>(), length as usize) };
    let fits = written.len().min(u32::from_ne_bytes(room) as usize);
    memory.write_all_at(&written[..fits], at)?;
    memory.write_all_at(&length.to_ne_bytes(), length_at)
}

/// An option's value, as setsockopt(2) reads it, unless it is longer than those that are known.
pub fn read_value(asker: Asker, at: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut value = vec![0; (length as usize).min(MOST_BYTES)];
    asker.memory()?.read_exact_at(&mut value, at)?;
    Ok(value)
}

/// How much room there is for an option's value.
pub fn room_at(asker: Asker, length_at: u64) -> io::Result<usize> {
    let mut room = [0u8; 4];
    asker.memory()?.read_exact_at(&mut room, length_at)?;
    usize::try_from(i32::from_ne_bytes(room)).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Writes an option's value where getsockopt(2) would.
pub fn write_value(asker: Asker, value: &[u8], at: u64, length_at: u64) -> io::Result<()> {
    let memory = asker.memory()?;
    memory.write_all_at(value, at)?;
    memory.write_all_at(&(value.len() as u32).to_ne_bytes(), length_at)
}
