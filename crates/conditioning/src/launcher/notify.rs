//! Statically linked servers, which no preload library reaches: their bind, listen and accept are answered by the
//! launcher (seccomp user notification, seccomp_unotify(2)).
//!
//! On the chain's port nothing is bound, and `listen` puts the chain's link in the socket's place, under the same number,
//! so that the server's poll and epoll work on it. `accept` returns one end of a pair; the launcher relays between the
//! other end and the client, with the request's end and the response's end in view (see [`super::relay`]). Options of TCP
//! that the server sets at its end are set at the client's socket.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::SocketType;

use crate::launcher::asker::{
    Asker, flags_of, kind_of, name_of, read_address, read_value, room_at, write_address_at, write_value,
};
use crate::launcher::relay::Relay;
use crate::server::{self, AcceptOptions, options, table::Chain};

// linux/seccomp.h: _IOWR('!', 0, struct seccomp_notif) and its neighbours.
const NOTIF_RECV: libc::c_ulong = 0xc050_2100;
const NOTIF_SEND: libc::c_ulong = 0xc018_2101;
const NOTIF_ADDFD: libc::c_ulong = 0x4018_2103;

/// Whether a program makes its system calls itself: it is statically linked, or written in Go.
pub fn bypasses_libc(program: &Path) -> bool {
    let find = || -> Option<PathBuf> {
        if program.components().count() > 1 {
            return Some(program.to_owned());
        }
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|directory| directory.join(program)).find(|file| file.is_file())
    };
    find().and_then(|file| File::open(file).ok()).is_some_and(|mut file| inspect(&mut file).unwrap_or(false))
}

/// Looks through the program headers of a 64-bit ELF file (elf(5)).
fn inspect(file: &mut File) -> io::Result<bool> {
    const PT_INTERP: u32 = 3;
    const PT_NOTE: u32 = 4;
    let mut head = [0u8; 64];
    file.read_exact(&mut head)?;
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return Ok(false);
    }
    let u16_at = |bytes: &[u8], at: usize| bytes[at..].first_chunk().map_or(0, |b| u16::from_le_bytes(*b));
    let u64_at = |bytes: &[u8], at: usize| bytes[at..].first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
    let (offset, size, count) = (u64_at(&head, 32), u16_at(&head, 54), u16_at(&head, 56));
    let mut has_interpreter = false;
    let mut is_go = false;
    for at in 0..u64::from(count.min(64)) {
        let mut header = [0u8; 56];
        file.seek(SeekFrom::Start(offset.saturating_add(at * u64::from(size))))?;
        file.read_exact(&mut header)?;
        let kind = header.first_chunk().map_or(0, |b| u32::from_le_bytes(*b));
        has_interpreter |= kind == PT_INTERP;
        if kind == PT_NOTE {
            let mut notes = vec![0u8; u64_at(&header, 32).min(4096) as usize];
            let alignment = u64_at(&header, 48).clamp(4, 8) as usize;
            is_go |= file.read_exact_at(&mut notes, u64_at(&header, 8)).is_ok()
                && has_note_of_go(&notes, alignment);
        }
    }
    Ok(!has_interpreter || is_go)
}

/// Whether Go's build identity is among these notes: lengths of name and content, a kind, name and content.
fn has_note_of_go(mut notes: &[u8], alignment: usize) -> bool {
    while let Some((head, rest)) = notes.split_first_chunk::<12>() {
        let word = |at: usize| head[at..].first_chunk().map_or(0, |b| u32::from_le_bytes(*b)) as usize;
        let name = word(0).next_multiple_of(4);
        if rest.starts_with(b"Go\0\0") && name == 4 {
            return true;
        }
        let length = (12 + name.min(4096) + word(4).min(4096)).next_multiple_of(alignment);
        notes = notes.get(length..).unwrap_or_default();
    }
    false
}

/// Answers the questions of one server.
pub struct Supervisor {
    questions: OwnedFd,
    chain: std::sync::Arc<Chain>,
    /// Where the server was told to listen, and the name of the link in /proc.
    expected: SocketAddr,
    link_name: String,
    /// Sockets that are bound in name only, by their name in /proc.
    bound: HashMap<String, SocketAddr>,
    listens_on: SocketAddr,
    /// Accepts that wait, as the server's listening socket is a blocking one.
    waiting: Vec<libc::seccomp_notif>,
    /// Connections whose accept was gone when it was answered, because a signal came: the next one gets them.
    unanswered: Vec<Accepted>,
    relay: Relay,
}

/// A connection that the relay has, and a server has yet to get.
struct Accepted {
    /// The server's end.
    server: OwnedFd,
    peer: SocketAddr,
}

/// A server has a few listening sockets.
const MOST_BOUND: usize = 1024;

enum Answer {
    /// The kernel does what was asked.
    Continue,
    Value(i64),
    Error(Errno),
    /// It was answered already, or is to wait.
    None,
}

impl Supervisor {
    pub fn new(
        questions: OwnedFd,
        link: OwnedFd,
        ledger: &OwnedFd,
        expected: SocketAddr,
    ) -> io::Result<Self> {
        let link_name = name_of(std::process::id(), link.as_raw_fd()).unwrap_or_default();
        let chain = server::chain_without_children(link, ledger)?;
        server::listen(chain_fd(&chain), chain.clone(), expected)?;
        // That was in name only: the server has yet to say so.
        chain.ledger.clear_listening();
        Ok(Self {
            questions,
            chain,
            expected,
            link_name,
            bound: HashMap::new(),
            listens_on: expected,
            waiting: Vec::new(),
            unanswered: Vec::new(),
            relay: Relay::new()?,
        })
    }

    /// Runs until the server is gone.
    pub fn run(mut self) {
        loop {
            let link = (!self.waiting.is_empty()).then(|| self.chain.link.as_fd());
            let Ok(ready) = self.relay.wait(self.questions.as_fd(), link) else { return };
            if ready.is_over || ready.questions && self.question().is_err() {
                // What is under way to clients goes out.
                self.unanswered.clear();
                return self.relay.drain();
            }
            if ready.link {
                for question in std::mem::take(&mut self.waiting) {
                    self.answer(question);
                }
            }
        }
    }

    fn question(&mut self) -> io::Result<()> {
        // SAFETY: plain data, which the kernel wants zeroed and fills.
        let mut question: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let got = unsafe { libc::ioctl(self.questions.as_raw_fd(), NOTIF_RECV, &raw mut question) };
        if got == 0 {
            self.answer(question);
            return Ok(());
        }
        match io::Error::last_os_error() {
            // Who asked is gone.
            error if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            error => Err(error),
        }
    }

    fn answer(&mut self, question: libc::seccomp_notif) {
        let (process, fd) = (question.pid, question.data.args[0] as RawFd);
        let arguments = question.data.args;
        let asker = Asker { process, id: question.id, questions: self.questions.as_raw_fd() };
        // It may have waited since long, and another have its number.
        if !asker.waits() {
            return;
        }
        let name = name_of(process, fd).unwrap_or_default();
        let is_link = !name.is_empty() && name == self.link_name;
        let answer = match libc::c_long::from(question.data.nr) {
            libc::SYS_bind => self.bind(asker, fd, &name, arguments),
            libc::SYS_listen if is_link => Answer::Value(0),
            libc::SYS_listen => self.listen(&question, process, fd, &name),
            libc::SYS_accept | libc::SYS_accept4 if is_link => self.accept(&question, asker, fd),
            libc::SYS_getsockname if is_link => write_address(asker, arguments, self.listens_on),
            libc::SYS_getsockname => match self.bound.get(&name) {
                Some(&bound) => write_address(asker, arguments, bound),
                None => self.of_relay(asker, arguments, &name, false),
            },
            libc::SYS_getpeername => self.of_relay(asker, arguments, &name, true),
            libc::SYS_getsockopt => self.get_option(asker, arguments, &name, is_link),
            libc::SYS_setsockopt if is_link => Answer::Value(0),
            libc::SYS_setsockopt => self.set_option(asker, arguments, &name),
            _ => Answer::Continue,
        };
        let (value, error, flags) = match answer {
            Answer::None => return,
            Answer::Continue => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
            Answer::Value(value) => (value, 0, 0),
            Answer::Error(error) => (0, -error.raw_os_error(), 0),
        };
        let response = libc::seccomp_notif_resp { id: question.id, val: value, error, flags };
        // SAFETY: reads the structure; fails harmlessly if who asked is gone.
        unsafe { libc::ioctl(self.questions.as_raw_fd(), NOTIF_SEND, &raw const response) };
    }

    fn bind(&mut self, asker: Asker, fd: RawFd, name: &str, arguments: [u64; 6]) -> Answer {
        let Some(wanted) = read_address(asker, arguments) else { return Answer::Continue };
        let is_stream = kind_of(asker.process, fd) == Some(SocketType::STREAM);
        if !is_stream
            || wanted.port() != self.expected.port()
            || name.is_empty()
            || self.bound.len() >= MOST_BOUND
        {
            if is_stream && wanted.port() != 0 {
                self.chain.ledger.set_other_port(wanted.port());
            }
            return Answer::Continue;
        }
        self.bound.insert(name.to_owned(), wanted);
        Answer::Value(0)
    }

    /// Puts the link in the socket's place.
    fn listen(&mut self, question: &libc::seccomp_notif, process: u32, fd: RawFd, name: &str) -> Answer {
        let Some(&bound) = self.bound.get(name) else { return Answer::Continue };
        let flags = flags_of(process, fd);
        let closes_on_exec = flags & libc::O_CLOEXEC != 0;
        let nonblocking = flags & libc::O_NONBLOCK != 0;
        let mut link_flags = match rustix::fs::fcntl_getfl(&self.chain.link) {
            Ok(flags) => flags,
            Err(error) => return Answer::Error(error),
        };
        link_flags.set(rustix::fs::OFlags::NONBLOCK, nonblocking);
        let _ = rustix::fs::fcntl_setfl(&self.chain.link, link_flags);
        let place = libc::SECCOMP_ADDFD_FLAG_SETFD as u32;
        if let Err(error) = self.add(question.id, self.chain.link.as_raw_fd(), place, fd, closes_on_exec) {
            return Answer::Error(error);
        }
        self.listens_on = bound;
        self.bound.remove(name);
        match server::listen(chain_fd(&self.chain), self.chain.clone(), bound) {
            Ok(()) => Answer::Value(0),
            Err(error) => Answer::Error(error),
        }
    }

    fn accept(&mut self, question: &libc::seccomp_notif, asker: Asker, fd: RawFd) -> Answer {
        let accepted = match self.next_accepted() {
            Ok(accepted) => accepted,
            Err(Errno::AGAIN) if flags_of(asker.process, fd) & libc::O_NONBLOCK == 0 => {
                // A thread that asks again was interrupted.
                self.waiting.retain(|other| other.pid != question.pid);
                self.waiting.push(*question);
                return Answer::None;
            }
            Err(error) => return Answer::Error(error),
        };
        let wants = if libc::c_long::from(question.data.nr) == libc::SYS_accept4 {
            question.data.args[3] as i32
        } else {
            0
        };
        let _ = rustix::io::ioctl_fionbio(&accepted.server, wants & libc::SOCK_NONBLOCK != 0);
        let _ = write_address_at(asker, question.data.args[1], question.data.args[2], accepted.peer);
        let send = libc::SECCOMP_ADDFD_FLAG_SEND as u32;
        let closes_on_exec = wants & libc::SOCK_CLOEXEC != 0;
        // The kernel answers with the new number in the same step.
        match self.add(question.id, accepted.server.as_raw_fd(), send, 0, closes_on_exec) {
            Ok(()) => Answer::None,
            Err(error) => {
                // Interrupted by a signal, or the server is out of descriptors: it will ask again.
                self.unanswered.push(accepted);
                Answer::Error(error)
            }
        }
    }

    fn next_accepted(&mut self) -> Result<Accepted, Errno> {
        if let Some(accepted) = self.unanswered.pop() {
            return Ok(accepted);
        }
        let options = AcceptOptions { nonblocking: true, cloexec: true, follow: true, dont_wait: true };
        let (client, peer) = server::accept(chain_fd(&self.chain), options).unwrap_or(Err(Errno::INVAL))?;
        let server = self.relay.add(client, peer).map_err(|_| Errno::MFILE)?;
        Ok(Accepted { server, peer })
    }

    fn of_relay(&self, asker: Asker, arguments: [u64; 6], name: &str, peer: bool) -> Answer {
        match self.relay.addresses(name) {
            Some((client, local)) => write_address(asker, arguments, if peer { client } else { local }),
            None => Answer::Continue,
        }
    }

    /// What stands for a listening socket answers like one, and a relay like the client's socket.
    fn get_option(&self, asker: Asker, arguments: [u64; 6], name: &str, is_link: bool) -> Answer {
        let [_, level, option, at, length_at, _] = arguments;
        let (level, option) = (level as libc::c_int, option as libc::c_int);
        let mut value = [0; options::MOST_BYTES];
        let number = if is_link {
            options::of_listener(level, option, self.listens_on)
        } else if let Some((peer, _)) = self.relay.addresses(name) {
            let of_stream = || options::of_stream(option, peer);
            (level == libc::SOL_SOCKET).then(of_stream).flatten()
        } else {
            return Answer::Continue;
        };
        let room = match room_at(asker, length_at) {
            Ok(room) => room.min(value.len()),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Answer::Error(Errno::INVAL),
            Err(_) => return Answer::Error(Errno::FAULT),
        };
        let length = match (number, self.relay.client(name)) {
            (Some(number), _) => {
                value[..4].copy_from_slice(&number.to_ne_bytes());
                room.min(4)
            }
            (None, _) if level == libc::SOL_SOCKET => return Answer::Continue,
            (None, Some(client)) => match options::get(client, level, option, &mut value[..room]) {
                Ok(length) => length,
                Err(error) => return Answer::Error(error),
            },
            // The connection is over, which the server has yet to read.
            (None, None) => room.min(4),
        };
        match write_value(asker, &value[..length], at, length_at) {
            Ok(()) => Answer::Value(0),
            Err(_) => Answer::Error(Errno::FAULT),
        }
    }

    /// Options of TCP, and what close does, are set at the client's socket, on which they mean what the server wants.
    fn set_option(&self, asker: Asker, arguments: [u64; 6], name: &str) -> Answer {
        let [_, level, option, at, length, _] = arguments;
        let (level, option) = (level as libc::c_int, option as libc::c_int);
        let is_linger = options::is_linger(level, option);
        if level == libc::SOL_SOCKET && !is_linger || self.relay.addresses(name).is_none() {
            return Answer::Continue;
        }
        // Nothing is left to set where the connection is over.
        let Some(client) = self.relay.client(name) else { return Answer::Value(0) };
        let Ok(value) = read_value(asker, at, length) else { return Answer::Error(Errno::FAULT) };
        match options::set(client, level, option, &value) {
            Ok(()) => {
                if let Some(value) = value.first_chunk().filter(|_| options::is_cork(level, option)) {
                    server::corked(client.as_raw_fd(), i32::from_ne_bytes(*value) != 0);
                }
                if is_linger {
                    server::set_linger_option(client.as_raw_fd());
                    // The server's own end says so, too, if it is asked.
                    return Answer::Continue;
                }
                Answer::Value(0)
            }
            Err(error) => Answer::Error(error),
        }
    }

    /// Opens `fd` in the process that asked.
    fn add(&self, id: u64, fd: RawFd, flags: u32, place: RawFd, cloexec: bool) -> Result<(), Errno> {
        let newfd_flags = if cloexec { libc::O_CLOEXEC as u32 } else { 0 };
        let newfd = if flags & libc::SECCOMP_ADDFD_FLAG_SETFD as u32 != 0 { place as u32 } else { 0 };
        let request = libc::seccomp_notif_addfd { id, flags, srcfd: fd as u32, newfd, newfd_flags };
        // SAFETY: reads the structure.
        match unsafe { libc::ioctl(self.questions.as_raw_fd(), NOTIF_ADDFD, &raw const request) } {
            -1 => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
            _ => Ok(()),
        }
    }
}

fn chain_fd(chain: &Chain) -> RawFd {
    chain.link.as_raw_fd()
}

fn write_address(asker: Asker, arguments: [u64; 6], value: SocketAddr) -> Answer {
    match write_address_at(asker, arguments[1], arguments[2], value) {
        Ok(()) => Answer::Value(0),
        Err(_) => Answer::Error(Errno::FAULT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_of_gos_is_found_after_others() {
        let note = |name: &[u8], content: &[u8]| {
            let mut bytes = (name.len() as u32).to_le_bytes().to_vec();
            bytes.extend_from_slice(&(content.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&[4, 0, 0, 0]);
            bytes.extend_from_slice(name);
            bytes.extend_from_slice(content);
            bytes
        };
        let gnu = note(b"GNU\0", &[7; 20]);
        assert!(!has_note_of_go(&gnu, 4));
        let both = [gnu, note(b"Go\0\0", &[1; 8])].concat();
        assert!(has_note_of_go(&both, 4));
        for end in 0..both.len() {
            has_note_of_go(&both[..end], 4);
        }
        assert!(!has_note_of_go(&[0xff; 64], 8));
    }

    #[test]
    fn dynamically_linked_programs_are_reached_by_the_preload_library() {
        assert!(!bypasses_libc("sh".as_ref()));
        assert!(!bypasses_libc("/no/such/program".as_ref()));
    }
}
