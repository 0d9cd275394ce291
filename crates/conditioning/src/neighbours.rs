//! A filter's place in its chain: the links to its neighbours, the launcher's word, and the ledger.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Resource, Rlimit};

use crate::ledger::{Ledger, State};
use crate::link;
use crate::receipts::Receipts;
use crate::wire::{Bundle, Id, Notice};

/// Environment variables that name inherited descriptors; a part of the protocol.
pub mod environment {
    /// The link to the upstream neighbour; absent for the first filter.
    pub const UPSTREAM: &str = "TIDEGATE_CC_UPSTREAM";
    /// The link to the downstream neighbour.
    pub const DOWNSTREAM: &str = "TIDEGATE_CC_DOWNSTREAM";
    /// The launcher's word.
    pub const CONTROL: &str = "TIDEGATE_CC_CONTROL";
    /// The ledger's memory file.
    pub const LEDGER: &str = "TIDEGATE_CC_LEDGER";
    /// The address and port that an unmodified server is expected to listen on; read by the preload library.
    pub const SERVER_ADDRESS: &str = "TIDEGATE_CC_ADDRESS";
    /// Which descriptors stand for the listening sockets of a server that has several, and where each listens: what a
    /// program learns of those that it inherits.
    pub const LISTENERS: &str = "TIDEGATE_CC_LISTENERS";
    /// On which terms the preload library may keep a connection for its next request; absent: on none.
    pub const LINGER: &str = "TIDEGATE_CC_LINGER";
    /// `USER:GROUP` in numbers that a filter started as root becomes.
    pub const USER: &str = "TIDEGATE_CC_USER";
    /// Set for the filter that keeps connections between requests: the last one of those that can.
    pub const KEEPS: &str = "TIDEGATE_CC_KEEPS";
    /// Set for the filter whose downstream neighbour is the server.
    pub const LAST: &str = "TIDEGATE_CC_LAST";
    /// The listening sockets, with commas between them; the first filter only.
    pub const LISTEN: &str = "TIDEGATE_CC_LISTEN";
    /// The form of the program's log lines: what `--log` says where there is no such option.
    pub const LOG_FORM: &str = "TIDEGATE_LOG_FORM";
}

/// The same file under a number that programs leave alone: low ones they give to what they start.
///
/// # Errors
/// The process is out of descriptors.
pub fn out_of_the_way(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    const HIGH: RawFd = 900;
    rustix::io::fcntl_dupfd_cloexec(fd, HIGH).or_else(|_| rustix::io::fcntl_dupfd_cloexec(fd, 3))
}

/// What the launcher says to a filter, one byte each.
pub mod word {
    /// From the filter: it is ready.
    pub const READY: u8 = b'R';
    /// From the filter: it cannot run, for the reason that follows.
    pub const FAILED: u8 = b'F';
    /// So many bytes of a reason are told.
    pub const REASON_BYTES: usize = 1000;
    /// The downstream neighbour was started anew: hand again what nobody took.
    pub const HAND_AGAIN: u8 = b'H';
    /// Write the counters to standard error.
    pub const COUNTERS: u8 = b'C';
}

/// Why a filter cannot run.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The descriptor that the environment names is not there: filters are started by a launcher.
    #[error("{0} names no open descriptor; filters are started by `tidegate condition` or cc_createlsock")]
    NotInAChain(&'static str),
    /// An argument was refused.
    #[error("{0}")]
    Arguments(#[from] crate::arguments::ArgumentError),
    /// A system call failed.
    #[error("{0}: {1}")]
    System(&'static str, #[source] io::Error),
}

/// A filter's descriptors.
#[derive(Debug)]
pub struct Place {
    /// Towards the client; `None` for the first filter.
    pub upstream: Option<OwnedFd>,
    /// Towards the server.
    pub downstream: OwnedFd,
    /// From the launcher.
    pub control: OwnedFd,
    /// The listening sockets, for the first filter.
    pub listeners: Vec<OwnedFd>,
    /// Whether this filter keeps connections between requests, and none behind it does.
    pub keeps: bool,
    /// Whether the downstream neighbour is the server.
    pub is_last: bool,
    /// The chain's ledger.
    pub ledger: Ledger,
    /// What the downstream neighbour has unread at most.
    pub unread: Unread,
    /// What the downstream neighbour has received.
    pub receipts: Receipts,
}

/// An upper bound of what is unread on the link downstream, so that not each request costs a question to the kernel.
#[derive(Debug)]
pub struct Unread {
    at_most_bytes: std::cell::Cell<usize>,
}

impl Default for Unread {
    fn default() -> Self {
        // Whoever had this place before may have left something.
        Self { at_most_bytes: std::cell::Cell::new(usize::MAX) }
    }
}

impl Unread {
    /// Whether at most `window_bytes` are unread; `ask` is called if the bound does not tell.
    fn fits(&self, window_bytes: usize, ask: impl FnOnce() -> usize) -> bool {
        if self.at_most_bytes.get() > window_bytes {
            self.at_most_bytes.set(ask());
        }
        self.at_most_bytes.get() <= window_bytes
    }

    /// A datagram of so many bytes was sent. The kernel accounts its own structures and rounding with it.
    fn sent(&self, datagram_bytes: usize) {
        let accounted = (datagram_bytes + 512).next_power_of_two() + 256;
        self.at_most_bytes.set(self.at_most_bytes.get().saturating_add(accounted));
    }
}

impl Place {
    /// Takes over what the launcher handed to this process.
    ///
    /// # Errors
    /// Something is missing, or the ledger cannot be mapped.
    pub fn inherit() -> Result<Self, FilterError> {
        use environment as env;
        let need = |name| link::inherited(name).ok_or(FilterError::NotInAChain(name));
        let ledger = need(env::LEDGER)?;
        Ok(Self {
            upstream: link::inherited(env::UPSTREAM),
            downstream: need(env::DOWNSTREAM)?,
            control: need(env::CONTROL)?,
            listeners: link::inherited_all(env::LISTEN),
            keeps: std::env::var_os(env::KEEPS).is_some(),
            is_last: std::env::var_os(env::LAST).is_some(),
            ledger: Ledger::open(ledger.as_fd()).map_err(|error| FilterError::System("ledger", error))?,
            unread: Unread::default(),
            receipts: Receipts::default(),
        })
    }

    /// Tells the launcher that this filter is ready. A launcher that is gone is noticed later.
    pub fn say_ready(&self) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let _ = rustix::net::send(&self.control, &[word::READY], flags);
    }

    /// What the launcher said; `Err` when it is gone.
    pub fn launchers_word(&self) -> Result<Option<u8>, LauncherGone> {
        let mut byte = [0; 1];
        match rustix::net::recv(&self.control, &mut byte[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(LauncherGone),
            Ok(_) => Ok(Some(byte[0])),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(_) => Err(LauncherGone),
        }
    }

    /// Sends a notice upstream, if there is an upstream.
    pub fn tell_upstream(&self, notice: Notice) {
        if let Some(upstream) = &self.upstream {
            // A full link loses nothing: the ledger says the same, and filters look there.
            let _ = link::send_notice(upstream.as_fd(), notice);
        }
    }

    /// Whether the downstream neighbour has taken enough to be handed more: at most `window_bytes` are unread.
    pub fn wants_more(&self, window_bytes: usize) -> bool {
        self.unread.fits(window_bytes, || link::unread_bytes(self.downstream.as_fd()))
    }

    /// Hands a request downstream: its number among those handed on; `None` if the link is full now.
    ///
    /// # Errors
    /// The link failed.
    pub fn hand(
        &self,
        bundle: &Bundle,
        socket: BorrowedFd<'_>,
        scratch: &mut Vec<u8>,
    ) -> io::Result<Option<u64>> {
        match link::send_bundle(self.downstream.as_fd(), bundle, socket, scratch) {
            Ok(()) => {
                self.unread.sent(scratch.len());
                Ok(Some(self.receipts.handed()))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            // ETOOMANYREFS: too many descriptors are under way; they will be taken.
            Err(error) if error.raw_os_error() == Some(libc::ETOOMANYREFS) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Which requests a process of the server has received, and neither claimed nor handed back (see [`Receipts`]):
    /// they are to be handed again. `handed` are those that were handed on, with their numbers and whether that was
    /// done more than once.
    pub fn lost(&self, handed: impl Iterator<Item = (Id, u64, bool)> + Clone, now: Instant) -> Vec<Id> {
        if !self.is_last {
            return Vec::new();
        }
        let is_claimed = |id: Id| {
            let (generation, state) = self.ledger.state(id.slot);
            let is_claimed = matches!(state, State::Accepted | State::EndedLocally | State::Lingering);
            generation == id.generation && is_claimed
        };
        // Of what was handed more than once, an earlier copy may be the one that was claimed.
        let once = handed.clone().filter(|&(.., is_again)| !is_again);
        let claimed = once.filter(|&(id, ..)| is_claimed(id)).map(|(_, number, _)| number).max();
        // Asked after the ledger, so that what has been handed on until now has been taken off an empty link.
        let is_unread = link::unread_bytes(self.downstream.as_fd()) > 0;
        let received = self.receipts.look(is_unread, claimed.unwrap_or(0), now);
        let lost = handed.filter(|&(id, number, _)| number <= received && self.ledger.is_held(id));
        lost.map(|(id, ..)| id).collect()
    }
}

/// The launcher is gone: the filter ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LauncherGone;

/// How often [`Poller::has_ticked`].
pub const TICK: Duration = Duration::from_secs(1);
const KEY_TICK: u64 = u64::MAX - (1 << 20);

/// An epoll set with a clock that ticks: a timeout of each wait would have the kernel set and clear a timer for each,
/// which costs a virtual machine more than the wait.
pub struct Poller {
    epoll: OwnedFd,
    clock: OwnedFd,
    has_ticked: bool,
    events: Vec<epoll::Event>,
}

impl Poller {
    /// A set without descriptors that reports up to 256 events at a time.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn new() -> Result<Self, FilterError> {
        use rustix::time::{
            Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
            timerfd_settime,
        };
        let system = |call| move |error: rustix::io::Errno| FilterError::System(call, error.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let clock = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(system("timerfd_create"))?;
        let tick = Timespec { tv_sec: TICK.as_secs() as i64, tv_nsec: 0 };
        let period = Itimerspec { it_interval: tick, it_value: tick };
        timerfd_settime(&clock, TimerfdTimerFlags::empty(), &period).map_err(system("timerfd_settime"))?;
        epoll::add(&epoll, &clock, EventData::new_u64(KEY_TICK), EventFlags::IN)
            .map_err(system("epoll_ctl"))?;
        Ok(Self { epoll, clock, has_ticked: false, events: Vec::with_capacity(256) })
    }

    /// Whether a second has passed since the last one; true once for each.
    pub fn has_ticked(&mut self) -> bool {
        std::mem::take(&mut self.has_ticked)
    }

    /// Watches a descriptor.
    ///
    /// # Errors
    /// As epoll_ctl(2).
    pub fn add(&self, fd: BorrowedFd<'_>, key: u64, events: EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(key), events)?)
    }

    /// Watches a descriptor that was added before, once more.
    ///
    /// # Errors
    /// As epoll_ctl(2).
    pub fn rearm(&self, fd: BorrowedFd<'_>, key: u64, events: EventFlags) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, EventData::new_u64(key), events)?)
    }

    /// Stops watching: closing is not enough, because others hold the same socket.
    pub fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events, a tick or `timeout`: the keys of those that came, with what came.
    ///
    /// # Errors
    /// As epoll_wait(2), but not for signals.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Vec<(u64, EventFlags)>, FilterError> {
        self.events.clear();
        let timeout = timeout.map(|timeout| rustix::time::Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        let spare = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, spare, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(FilterError::System("epoll_wait", error.into())),
        }
        let events = self.events.iter().map(|event| (event.data.u64(), event.flags));
        let others: Vec<_> = events.filter(|(key, _)| *key != KEY_TICK).collect();
        if others.len() < self.events.len() {
            let _ = rustix::io::read(&self.clock, &mut [0u8; 8][..]);
            self.has_ticked = true;
        }
        Ok(others)
    }
}

/// What a filter hears of its downstream neighbour. That the neighbour took something is reported only to a filter that
/// waits to hand on more: it would otherwise be woken for each request once more than needed.
#[derive(Debug)]
pub struct Downstream {
    key: u64,
    waits: bool,
}

impl Downstream {
    /// Notices are reported from now on.
    ///
    /// # Errors
    /// As epoll_ctl(2).
    pub fn watch(poller: &Poller, place: &Place, key: u64) -> io::Result<Self> {
        poller.add(place.downstream.as_fd(), key, EventFlags::IN | EventFlags::ET)?;
        Ok(Self { key, waits: false })
    }

    /// Says whether something waits to be handed on. Edge-triggered, "writable" is then reported each time the
    /// neighbour takes a bundle.
    ///
    /// # Errors
    /// As epoll_ctl(2).
    pub fn waits(&mut self, poller: &Poller, place: &Place, waits: bool) -> io::Result<()> {
        if waits != self.waits {
            let mut events = EventFlags::IN | EventFlags::ET;
            events.set(EventFlags::OUT, waits);
            poller.rearm(place.downstream.as_fd(), self.key, events)?;
            self.waits = waits;
        }
        Ok(())
    }
}

/// Allows this process as many descriptors as the administrator does, not as few as programs with select(2) can bear:
/// each connection is one, or more. Returns the limit that it had.
pub(crate) fn raise_descriptor_limit() -> Rlimit {
    let files = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files });
    files
}

/// CLOCK_MONOTONIC in nanoseconds: the clock of [`Bundle::arrived_ns`].
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Says a line on standard error in one piece: the processes of a chain share it. Where the program has a form for such
/// lines, it is in that form.
pub(crate) fn say(line: &str) {
    if tracing::dispatcher::has_been_set() {
        return tracing::info!("{line}");
    }
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Answers a client with an error and nothing else, as far as it fits the socket's buffer.
pub fn answer(socket: BorrowedFd<'_>, status: u16, extra_fields: &str) {
    let reason = tidegate_http::status_reason(status);
    let head =
        format!("HTTP/1.1 {status} {reason}\r\nContent-Length: 0\r\nConnection: close\r\n{extra_fields}\r\n");
    let _ = rustix::net::send(socket, head.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    let _ = discard_unread(socket);
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
}

/// Takes off what the client sent, up to 256 KiB: unread bytes would turn the close into a reset, which destroys what
/// the client has not received yet.
pub(crate) fn discard_unread(socket: BorrowedFd<'_>) -> Sent {
    let mut sink = [0u8; 4096];
    let mut sent = Sent::Nothing;
    for _ in 0..64 {
        match rustix::net::recv(socket, &mut sink[..], RecvFlags::DONTWAIT) {
            Ok((got, _)) if got > 0 => sent = Sent::Some,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => break,
            _ => return Sent::All,
        }
    }
    sent
}

/// What a client had sent when it was thrown away.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Sent {
    /// Nothing yet.
    Nothing,
    /// Something, and more may come.
    Some,
    /// All: the client has ended, or is gone.
    All,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    /// What is around a filter under test: its neighbours, and a client.
    pub(crate) struct Neighbours {
        pub ledger: Ledger,
        file: OwnedFd,
        upstream: OwnedFd,
        downstream: OwnedFd,
        _control: OwnedFd,
        client: TcpStream,
        /// As the server has it.
        socket: TcpStream,
    }

    impl Neighbours {
        /// The place of a filter that another presents requests to.
        pub(crate) fn around() -> (Place, Self) {
            let (ledger, file) = Ledger::create().unwrap();
            let ((upstream, up), (down, downstream)) = (link::pair().unwrap(), link::pair().unwrap());
            let (_control, control) = link::pair().unwrap();
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (socket, _) = listener.accept().unwrap();
            let place = Place {
                upstream: Some(up),
                downstream: down,
                control,
                listeners: Vec::new(),
                keeps: false,
                is_last: false,
                ledger: Ledger::open(file.as_fd()).unwrap(),
                unread: Unread::default(),
                receipts: Receipts::default(),
            };
            (place, Self { ledger, file, upstream, downstream, _control, client, socket })
        }

        /// One more mapping of the ledger.
        pub(crate) fn ledger(&self) -> Ledger {
            Ledger::open(self.file.as_fd()).unwrap()
        }

        /// The neighbour upstream presents the client's request.
        pub(crate) fn present(&self) -> Id {
            assert!(self.ledger.take(1));
            let request = b"GET / HTTP/1.1\r\nHost: test\r\n\r\n".to_vec();
            let (length, peer) = (request.len() as u32, self.client.local_addr().unwrap());
            let id = self.ledger.present(1).unwrap();
            let bundle = Bundle {
                id,
                flags: 0,
                peer,
                socket_bytes: length.into(),
                arrived_ns: 0,
                replaces: 0,
                head_bytes: length,
                request,
            };
            let socket = self.socket.as_fd();
            link::send_bundle(self.upstream.as_fd(), &bundle, socket, &mut Vec::new()).unwrap();
            id
        }

        /// The client sends.
        pub(crate) fn send(&mut self, bytes: &[u8]) {
            self.client.write_all(bytes).unwrap();
        }

        /// The client says that it sends no more.
        pub(crate) fn end_clients_side(&self) {
            self.client.shutdown(std::net::Shutdown::Write).unwrap();
        }

        /// The neighbour downstream sends a notice.
        pub(crate) fn notify(&self, notice: Notice) {
            link::send_notice(self.downstream.as_fd(), notice).unwrap();
        }

        /// What the neighbour upstream is told.
        pub(crate) fn told(&self) -> Option<Notice> {
            link::receive_notice(self.upstream.as_fd()).map(Result::unwrap)
        }

        /// The server answers: all that the client receives.
        pub(crate) fn answer(&mut self) -> String {
            // Fails if a filter has ended the connection.
            let _ = self.socket.write_all(b"the server's");
            let _ = self.socket.shutdown(std::net::Shutdown::Write);
            let mut received = String::new();
            self.client.read_to_string(&mut received).unwrap();
            received
        }
    }

    #[test]
    fn a_link_is_asked_only_when_the_bound_does_not_tell_and_never_exceeds_its_window() {
        let (up, down) = link::pair().unwrap();
        let unread = Unread::default();
        let asked = std::cell::Cell::new(0);
        let ask = || {
            asked.set(asked.get() + 1);
            link::unread_bytes(up.as_fd())
        };
        let datagram = [0; 150];
        let mut sent = 0;
        while unread.fits(16_384, ask) {
            rustix::net::send(&up, &datagram, SendFlags::DONTWAIT).unwrap();
            unread.sent(datagram.len());
            sent += 1;
            assert!(link::unread_bytes(up.as_fd()) <= unread.at_most_bytes.get(), "after {sent}");
        }
        assert!(link::unread_bytes(up.as_fd()) > 16_384 && asked.get() < sent, "{} for {sent}", asked.get());
        for _ in 0..sent {
            rustix::net::recv(&down, &mut [0; 200][..], RecvFlags::DONTWAIT).unwrap();
        }
        // A window of 0: one request at a time, and each time the kernel is asked.
        for _ in 0..3 {
            assert!(unread.fits(0, ask));
            rustix::net::send(&up, &datagram, SendFlags::DONTWAIT).unwrap();
            unread.sent(datagram.len());
            assert!(!unread.fits(0, ask));
            rustix::net::recv(&down, &mut [0; 200][..], RecvFlags::DONTWAIT).unwrap();
        }
    }
}
