//! Statically linked servers, which no preload library reaches: their bind, listen and accept are answered by the
//! launcher (seccomp user notification, seccomp_unotify(2)).
//!
//! On the chain's port nothing is bound, and `listen` puts one end of a pair in the socket's place, under the same
//! number, so that the server's poll and epoll work on it (see [`super::listeners`]). `accept` returns one end of
//! another pair; the launcher relays between the other end and the client, with the request's end and the response's
//! end in view (see [`super::relay`]). Options of TCP that the server sets at its end are set at the client's socket.
//!
//! A connection stays on the chain's link until the server accepts it, so that filters decide on the order until then.
//! The launcher looks at the first only, and tells the listener that it is for. One for a listener of which nobody
//! accepts would keep those behind it from theirs: after a while it is set aside.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketType};

use crate::launcher::asker::{
    Asker, flags_of, is_v6_only, kind_of, name_of, read_address, read_value, register, room_at,
    shares_address, write_address_at, write_value,
};
use crate::launcher::listeners::{self, Accepted, Listeners, Placed};
use crate::launcher::relay::Relay;
use crate::link::{self, Next};
use crate::server::{self, AcceptOptions, Closing, Listening, address::presented, options, table::Chain};

// linux/seccomp.h: _IOWR('!', 0, struct seccomp_notif) and its neighbours.
const NOTIF_RECV: libc::c_ulong = 0xc050_2100;
const NOTIF_SEND: libc::c_ulong = 0xc018_2101;
const NOTIF_ADDFD: libc::c_ulong = 0x4018_2103;

/// Whether a program makes its system calls itself: it is statically linked, or written in Go. Or it has another C library
/// than the preload library, which could not be loaded: musl's.
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
    let (mut has_interpreter, mut is_go, mut has_musl) = (false, false, false);
    for at in 0..u64::from(count.min(64)) {
        let mut header = [0u8; 56];
        file.seek(SeekFrom::Start(offset.saturating_add(at * u64::from(size))))?;
        file.read_exact(&mut header)?;
        let kind = header.first_chunk().map_or(0, |b| u32::from_le_bytes(*b));
        if kind == PT_INTERP {
            has_interpreter = true;
            let mut path = vec![0u8; u64_at(&header, 32).min(4096) as usize];
            file.read_exact_at(&mut path, u64_at(&header, 8))?;
            has_musl = memchr::memmem::find(&path, b"/ld-musl-").is_some();
        }
        if kind == PT_NOTE {
            let mut notes = vec![0u8; u64_at(&header, 32).min(4096) as usize];
            let alignment = u64_at(&header, 48).clamp(4, 8) as usize;
            is_go |= file.read_exact_at(&mut notes, u64_at(&header, 8)).is_ok()
                && has_note_of_go(&notes, alignment);
        }
    }
    Ok(!has_interpreter || is_go || has_musl && !cfg!(target_env = "musl"))
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
    /// Where the server was told to listen.
    expected: SocketAddr,
    /// Sockets that are bound in name only, by their name in /proc.
    bound: HashMap<String, SocketAddr>,
    listeners: Listeners,
    /// The first connection on the link; `None`: there is none, or it was not looked at.
    offered: Option<Offered>,
    /// Accepts that wait, as the server's listening socket is a blocking one.
    waiting: Vec<Waiting>,
    relay: Relay,
}

struct Offered {
    /// The listener that it is for.
    listener: u64,
    since: Instant,
}

struct Waiting {
    question: libc::seccomp_notif,
    listener: u64,
    /// The socket's name in /proc.
    name: String,
}

/// A listener of which nobody has accepted a connection for so long keeps others from theirs no longer. Until then they
/// wait behind it, in the order that the filters have chosen; what is set aside has left that order.
const STALLED_AFTER: Duration = Duration::from_secs(1);

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
        let chain = server::chain_without_children(link, ledger)?;
        server::listen(chain_fd(&chain), chain.clone(), any_address(expected))?;
        // That was in name only: the server has yet to say so.
        chain.ledger.clear_listening();
        Ok(Self {
            questions,
            chain,
            expected,
            bound: HashMap::new(),
            listeners: Listeners::default(),
            offered: None,
            waiting: Vec::new(),
            relay: Relay::new()?,
        })
    }

    /// Runs until the server is gone.
    pub fn run(mut self) {
        loop {
            let awaits_link = self.offered.is_none() && self.listeners.len() > 0;
            let link = awaits_link.then(|| self.chain.link.as_fd());
            let limit = self.time_to_stall();
            let Ok(ready) = self.relay.wait(self.questions.as_fd(), link, limit) else { return };
            ready.closed.iter().for_each(|&number| self.closed(number));
            if ready.is_over || ready.questions && self.question().is_err() {
                // What is under way to clients goes out.
                self.listeners = Listeners::default();
                return self.relay.drain();
            }
            if limit.is_some() && self.time_to_stall() == Some(Duration::ZERO) {
                self.stall();
            }
            if ready.link || ready.questions || limit.is_some() || !ready.closed.is_empty() {
                self.settle();
            }
        }
    }

    /// How long the listener that is offered a connection may take yet; `None`: it keeps nobody from anything, or the
    /// server has yet to begin to accept.
    fn time_to_stall(&self) -> Option<Duration> {
        let offered = self.offered.as_ref().filter(|_| self.listeners.len() > 1)?;
        let limit = || STALLED_AFTER.saturating_sub(offered.since.elapsed());
        self.chain.ledger.accepts().then(limit)
    }

    fn stall(&mut self) {
        if let Some(offered) = self.offered.take()
            && let Some(listener) = self.listeners.get(offered.listener)
        {
            listener.is_stalled = true;
        }
    }

    /// Gives accepts that wait what is there for them, and tells sockets of the rest.
    fn settle(&mut self) {
        loop {
            self.look();
            let offered = self.offered();
            let listeners = &mut self.listeners;
            let mut has_connection = |waiting: &Waiting| {
                let listener = waiting.listener;
                offered == Some(listener) || listeners.get(listener).is_some_and(|it| it.has_waiting())
            };
            let Some(at) = self.waiting.iter().position(&mut has_connection) else { break };
            let waiting = self.waiting.remove(at);
            self.answer(waiting.question);
        }
        self.listeners.tell(self.offered());
    }

    /// The listener that is offered a connection.
    fn offered(&self) -> Option<u64> {
        self.offered.as_ref().map(|offered| offered.listener)
    }

    /// Finds out whether there is a connection on the link, and for whom. Sets aside what nobody accepts.
    fn look(&mut self) {
        while self.offered.is_none() {
            let Some(id) = self.first_on_link() else { return };
            let Some(listener) = self.listeners.get(id) else { return };
            if !listener.lets_others_pass(Instant::now()) {
                listener.has_news = true;
                self.offered = Some(Offered { listener: id, since: Instant::now() });
            } else if let Err(error) = self.pull()
                && let Some(listener) = self.listeners.get(id)
            {
                // Out of descriptors, as it may be: it is tried again later.
                listener.is_stalled = error == Errno::AGAIN;
            }
        }
    }

    /// The listener that the first connection on the link is for.
    fn first_on_link(&mut self) -> Option<u64> {
        let first = self.listeners.first()?.id();
        // Of one alone nobody asks whether it is for that.
        if self.listeners.len() == 1 {
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            let next = rustix::net::recv(&self.chain.link, &mut [0u8; 1][..], flags);
            return (!matches!(next, Err(Errno::AGAIN | Errno::INTR))).then_some(first);
        }
        match link::next(self.chain.link.as_fd()) {
            Ok(Next::Nothing) => None,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => None,
            Ok(Next::To(local)) => self.listeners.for_local(local).map(|it| it.id()),
            // Of what is wrong, whoever accepts is told.
            Ok(Next::Other) | Err(_) => Some(first),
        }
    }

    /// Takes the first connection off the link: it waits for the listener that it is for.
    fn pull(&mut self) -> Result<(), Errno> {
        self.offered = None;
        let options =
            AcceptOptions { nonblocking: true, cloexec: true, follow: true, dont_wait: true, may_end: None };
        let (client, peer) = server::accept(chain_fd(&self.chain), options).unwrap_or(Err(Errno::INVAL))?;
        // SAFETY: `server::accept` opened it for us.
        let client = unsafe { OwnedFd::from_raw_fd(client) };
        let local = link::local_address(&client).unwrap_or(self.expected);
        let Some(listener) = self.listeners.for_local(local.ip()) else {
            server::closing(client.as_raw_fd(), Closing::ForAll);
            return Err(Errno::INVAL);
        };
        let as_v6 = listener.bound().address.is_ipv6();
        let addresses = (presented(peer, as_v6), presented(local, as_v6));
        let server = self.relay.add(client, addresses).map_err(|_| Errno::MFILE)?;
        listener.push(Accepted { server, peer: addresses.0 });
        Ok(())
    }

    /// Nobody has that listening socket any more.
    fn closed(&mut self, number: u64) {
        let Some(name) = self.listeners.remove(number) else { return };
        self.offered = None;
        let (over, waiting) = std::mem::take(&mut self.waiting).into_iter().partition(|it| it.name == name);
        self.waiting = waiting;
        let over: Vec<Waiting> = over;
        for waiting in over {
            self.respond(waiting.question.id, Answer::Error(Errno::INVAL));
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
        let listener = self.listeners.named(&name).map(|listener| (listener.id(), listener.bound()));
        let answer = match libc::c_long::from(question.data.nr) {
            libc::SYS_bind if listener.is_some() => Answer::Error(Errno::INVAL),
            libc::SYS_bind => self.bind(asker, fd, &name, arguments),
            libc::SYS_listen if listener.is_some() => Answer::Value(0),
            libc::SYS_listen => self.listen(&question, process, fd, &name),
            libc::SYS_accept | libc::SYS_accept4 => match listener {
                Some((listener, _)) => self.accept(Waiting { question, listener, name }, asker, fd),
                None => Answer::Continue,
            },
            libc::SYS_getsockname => match (listener, self.bound.get(&name)) {
                (Some((_, Listening { address, .. })), _) | (None, Some(&address)) => {
                    write_address(asker, arguments, address)
                }
                (None, None) => self.of_relay(asker, arguments, &name, false),
            },
            libc::SYS_getpeername if listener.is_some() => Answer::Error(Errno::NOTCONN),
            libc::SYS_getpeername => self.of_relay(asker, arguments, &name, true),
            libc::SYS_getsockopt => {
                self.get_option(asker, arguments, &name, listener.map(|(_, bound)| bound))
            }
            libc::SYS_setsockopt if listener.is_some() => Answer::Value(0),
            libc::SYS_setsockopt => self.set_option(asker, arguments, &name),
            _ => Answer::Continue,
        };
        self.respond(question.id, answer);
    }

    fn respond(&self, id: u64, answer: Answer) {
        let (value, error, flags) = match answer {
            Answer::None => return,
            Answer::Continue => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
            Answer::Value(value) => (value, 0, 0),
            Answer::Error(error) => (0, -error.raw_os_error(), 0),
        };
        let response = libc::seccomp_notif_resp { id, val: value, error, flags };
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
        if self.listeners.is_taken(wanted) && !shares_address(asker.process, fd) {
            return Answer::Error(Errno::ADDRINUSE);
        }
        self.bound.insert(name.to_owned(), wanted);
        Answer::Value(0)
    }

    /// Puts one end of a pair in the socket's place.
    fn listen(&mut self, question: &libc::seccomp_notif, process: u32, fd: RawFd, name: &str) -> Answer {
        let Some(&address) = self.bound.get(name) else { return Answer::Continue };
        let bound = Listening { address, only_v6: address.is_ipv6() && is_v6_only(process, fd) };
        match self.place(question.id, bound, (process, fd)) {
            Ok(()) => {}
            Err(error) => return Answer::Error(error),
        }
        self.bound.remove(name);
        // What was offered may be for this one.
        self.offered = None;
        self.look();
        self.listeners.hush_in_vain(self.offered());
        self.chain.ledger.set_listening();
        Answer::Value(0)
    }

    fn place(&mut self, id: u64, bound: Listening, (process, fd): (u32, RawFd)) -> Result<(), Errno> {
        let flags = flags_of(process, fd)?;
        let (ours, theirs) = listeners::pair()?;
        let name = name_of(std::process::id(), theirs.as_raw_fd()).ok_or(Errno::MFILE)?;
        rustix::io::ioctl_fionbio(&theirs, flags & libc::O_NONBLOCK != 0)?;
        let is_alone = !shares_address(process, fd);
        let number = self.listeners.next_number();
        self.relay.watch_listening(ours.as_fd(), number)?;
        let registrations = server::registrations(&process.to_string(), fd);
        let place = libc::SECCOMP_ADDFD_FLAG_SETFD as u32;
        self.add(id, theirs.as_raw_fd(), place, fd, flags & libc::O_CLOEXEC != 0)?;
        register(process, theirs.as_fd(), fd, registrations);
        self.listeners.add(bound, Placed { number, name, ours, opened_by: (process, fd), is_alone });
        Ok(())
    }

    fn accept(&mut self, asked: Waiting, asker: Asker, fd: RawFd) -> Answer {
        let question = asked.question;
        let listener = asked.listener;
        let accepted = match self.next_accepted(&asked, fd) {
            Ok(accepted) => accepted,
            Err(Errno::AGAIN) => match flags_of(asker.process, fd) {
                Ok(flags) if flags & libc::O_NONBLOCK == 0 => {
                    // A thread that asks again was interrupted.
                    self.waiting.retain(|other| other.question.pid != question.pid);
                    self.waiting.push(asked);
                    return Answer::None;
                }
                Ok(_) => return Answer::Error(Errno::AGAIN),
                Err(error) => return Answer::Error(error),
            },
            Err(error) => return Answer::Error(error),
        };
        let written = write_address_at(asker, question.data.args[1], question.data.args[2], accepted.peer);
        // A connection without its client's address ends some servers; that there are no descriptors ends none.
        let written = match written.as_ref().map_err(Errno::from_io_error) {
            Err(Some(error @ (Errno::MFILE | Errno::NFILE))) => Err(error),
            _ => Ok(()),
        };
        let wants = if libc::c_long::from(question.data.nr) == libc::SYS_accept4 {
            question.data.args[3] as i32
        } else {
            0
        };
        let _ = rustix::io::ioctl_fionbio(&accepted.server, wants & libc::SOCK_NONBLOCK != 0);
        let send = libc::SECCOMP_ADDFD_FLAG_SEND as u32;
        let closes_on_exec = wants & libc::SOCK_CLOEXEC != 0;
        // The kernel answers with the new number in the same step.
        let server = accepted.server.as_raw_fd();
        match written.and_then(|()| self.add(question.id, server, send, 0, closes_on_exec)) {
            Ok(()) => Answer::None,
            Err(error) => {
                // Interrupted by a signal, or one of us is out of descriptors: the server will ask again.
                if let Some(listener) = self.listeners.get(listener) {
                    listener.push_again(accepted);
                }
                Answer::Error(error)
            }
        }
    }

    fn next_accepted(&mut self, asked: &Waiting, fd: RawFd) -> Result<Accepted, Errno> {
        let listener = self.listeners.get(asked.listener).ok_or(Errno::INVAL)?;
        listener.hush(&asked.name, (asked.question.pid, fd));
        listener.accepts(Instant::now());
        loop {
            let listener = self.listeners.get(asked.listener).ok_or(Errno::INVAL)?;
            if let Some(accepted) = listener.pop() {
                // It was for whoever asked; what is left is told of again.
                listener.has_news = listener.has_waiting();
                return Ok(accepted);
            }
            self.look();
            if self.offered() != Some(asked.listener) {
                return Err(Errno::AGAIN);
            }
            self.pull()?;
        }
    }

    fn of_relay(&self, asker: Asker, arguments: [u64; 6], name: &str, peer: bool) -> Answer {
        match self.relay.addresses(name) {
            Some((client, local)) => write_address(asker, arguments, if peer { client } else { local }),
            None => Answer::Continue,
        }
    }

    /// What stands for a listening socket answers like one, and a relay like the client's socket.
    fn get_option(
        &self,
        asker: Asker,
        arguments: [u64; 6],
        name: &str,
        listener: Option<Listening>,
    ) -> Answer {
        let [_, level, option, at, length_at, _] = arguments;
        let (level, option) = (level as libc::c_int, option as libc::c_int);
        let mut value = [0; options::MOST_BYTES];
        let known = if let Some(bound) = listener {
            options::of_listener(level, option, bound)
        } else if let Some((peer, _)) = self.relay.addresses(name) {
            let of_stream = || options::of_stream(option, peer);
            (level == libc::SOL_SOCKET).then(of_stream).flatten().map(options::bytes)
        } else {
            return Answer::Continue;
        };
        let room = match room_at(asker, length_at) {
            Ok(room) => room.min(value.len()),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Answer::Error(Errno::INVAL),
            Err(_) => return Answer::Error(Errno::FAULT),
        };
        let length = match (known, self.relay.client(name)) {
            (Some(known), _) => {
                value[..known.len()].copy_from_slice(&known);
                room.min(known.len())
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

/// What the chain's own end listens on: clients' addresses come in the form that keeps those of both families.
fn any_address(server: SocketAddr) -> SocketAddr {
    SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), server.port())
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
