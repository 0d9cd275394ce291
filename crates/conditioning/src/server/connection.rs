//! A client's socket in the server: what the server may still read of the request, and when its end is over.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use libc::c_long;
use rustix::event::epoll;
use rustix::io::Errno;
use tidegate_http::Method;

use crate::keeper::whole::Whole;
use crate::ledger::{Passage, Passed, State};
use crate::link;
use crate::server::content::Chunks;
use crate::server::response::{Change, Extent, ResponseTracker};
use crate::server::table::Chain;
use crate::server::{head, lingering, process, raw};
use crate::wire::{Bundle, Id, Notice, UNKNOWN_END, flags};

/// Content without a known end is skipped in pieces of so many bytes.
const SKIPPED_BYTES: usize = 64 * 1024;
/// No more of a request is thrown away for a server: a client may send faster than that.
const MOST_SKIPPED: u64 = 4 * 1024 * 1024;

/// Where the next bytes of the request come from.
#[derive(Debug, Eq, PartialEq)]
pub enum Source {
    /// From the copy in the bundle, which replaces what is on the socket.
    Copy,
    /// From the socket, at most so many bytes.
    Socket(u64),
    /// From the socket, where nothing is that is known to belong to the request.
    Unseen,
    /// The request has been read to its end.
    Exhausted,
    /// The request has no end: what comes next belongs to nobody.
    Malformed,
}

/// One accepted request.
#[derive(Debug)]
pub struct Connection {
    chain: Arc<Chain>,
    id: Id,
    flags: u16,
    /// Rewritten bytes, and how many of them were read.
    copy: Vec<u8>,
    copy_read: usize,
    /// Bytes to discard from the socket once the copy has been read. They stay there until then, so that poll, select
    /// and epoll find the descriptor readable as long as there is something to read.
    replaces: u64,
    /// Bytes on the socket that belong to the request as far as is known; all, unless there are `chunks`.
    socket_left: u64,
    /// Content whose end was not seen, behind those; or that has none.
    chunks: Option<Box<Chunks>>,
    /// The connection is of another protocol: all that comes may be read.
    is_the_servers: bool,
    tracker: Option<ResponseTracker>,
    /// What [`written`] was before the response, if that is worth knowing.
    written_before: Option<u64>,
    corked: bool,
    /// The server said what its close does (SO_LINGER).
    has_linger_option: bool,
    is_untouched: bool,
    is_shared: bool,
    is_read_elsewhere: bool,
    /// The client speaks HTTP/1.1 and wants to keep the connection.
    keeps_alive: bool,
    /// How much of the request was thrown away.
    skipped: u64,
    /// The server announced its end, of which the client was not told.
    ends_itself: bool,
    /// What is left of a head that is written instead of the server's.
    head_left: Vec<u8>,
    /// The server's listening socket is an IPv6 one, which shows IPv4 clients as mapped addresses.
    pub presents_v6: bool,
    /// Whether its descriptors close on exec.
    pub cloexec: bool,
    /// Whether the server's calls wait, as far as it said so by calls that were seen.
    pub is_blocking: bool,
    /// Descriptors of this process that are this connection.
    pub descriptors: Vec<RawFd>,
    /// Where the server registered them.
    pub interests: Vec<Interest>,
    /// Whether a registration was changed, so that the server is not told of what arrives.
    pub is_muted: bool,
    /// The number of its stay, if it lingers, and whether the server wrote meanwhile.
    lingers: Option<u64>,
    wrote_lingering: bool,
    /// How many of its requests no filter presented, the last ones: nobody else knows of the last.
    resumed: u32,
}

/// A registration with epoll.
#[derive(Clone, Copy, Debug)]
pub struct Interest {
    /// The epoll descriptor.
    pub epoll: RawFd,
    /// The connection's descriptor.
    pub fd: RawFd,
    /// What was asked for.
    pub events: u32,
    /// The server's own data.
    pub data: u64,
}

impl Interest {
    /// What a call of epoll_ctl(2) that came out so registers.
    ///
    /// # Safety
    /// As for the call, which was made.
    pub unsafe fn of_call(
        epoll: RawFd,
        operation: i32,
        fd: RawFd,
        event: *const libc::epoll_event,
        outcome: Result<(), Errno>,
    ) -> Self {
        // Of a deletion it is not read; of others before anything else is looked at.
        let was_read = operation != libc::EPOLL_CTL_DEL && outcome != Err(Errno::FAULT);
        // SAFETY: the kernel has just read the event; it is packed, hence the unaligned read.
        let event = was_read.then(|| unsafe { event.read_unaligned() });
        let (events, data) = event.map_or((0, 0), |event| (event.events, event.u64));
        Self { epoll, fd, events, data }
    }
}

impl Connection {
    /// A request just claimed; with `follow`, the response is followed to its end.
    pub fn new(chain: Arc<Chain>, mut bundle: Bundle, fd: RawFd, follow: bool) -> Self {
        let has_content = head::ask_for_the_end(&mut bundle);
        let rewritten = bundle.has(flags::REWRITTEN);
        let replaces = if rewritten { u64::from(bundle.replaces) } else { 0 };
        let method = if bundle.has(flags::HEAD_METHOD) {
            Method::Head
        } else if head::asks_for_a_tunnel(bundle.head()) {
            Method::Connect
        } else {
            Method::Get
        };
        let persists = bundle.has(flags::PERSISTENT);
        let keeps_alive = follow && persists && head::speaks_http_1_1(bundle.head());
        let follow = follow && (persists || has_content || bundle.has(flags::FINAL));
        let has_end = bundle.socket_bytes != UNKNOWN_END;
        // A copy that was rewritten stands for the head.
        let head_bytes = if rewritten { replaces } else { bundle.head_bytes.into() };
        let socket_bytes = if has_end { bundle.socket_bytes } else { head_bytes };
        Self {
            chain,
            id: bundle.id,
            flags: bundle.flags,
            socket_left: socket_bytes.saturating_sub(replaces),
            chunks: (!has_end).then(|| Box::new(Chunks::new())),
            is_the_servers: false,
            copy: if rewritten { bundle.request } else { Vec::new() },
            copy_read: 0,
            replaces,
            tracker: follow.then(|| ResponseTracker::new(method)),
            written_before: None,
            corked: false,
            has_linger_option: false,
            is_untouched: true,
            is_shared: false,
            is_read_elsewhere: false,
            keeps_alive,
            skipped: 0,
            ends_itself: false,
            head_left: Vec::new(),
            presents_v6: false,
            cloexec: false,
            is_blocking: false,
            descriptors: vec![fd],
            interests: Vec::new(),
            is_muted: false,
            lingers: None,
            wrote_lingering: false,
            resumed: 0,
        }
    }

    /// The number of its stay, if the connection lingers after its response (`tidegate condition --linger`).
    pub fn lingers(&self) -> Option<u64> {
        self.lingers
    }

    /// How many requests the server has read from it in a row.
    pub fn in_a_row(&self) -> u32 {
        self.resumed
    }

    /// The ledger says that it lingers.
    pub fn begin_to_linger(&mut self, number: u64) {
        self.lingers = Some(number);
        self.wrote_lingering = false;
        self.tracker = None;
    }

    /// The next request is there, at the start of `bytes`: takes it, if no filter was first.
    pub fn resume(&mut self, whole: &Whole, bytes: &[u8]) -> bool {
        let Some(id) = self.chain.ledger.resume_for(self.id, process::owner()) else { return false };
        lingering::left();
        self.lingers = None;
        self.resumed += 1;
        self.id = id;
        self.flags = whole.flags;
        self.socket_left = whole.socket_bytes;
        let method = if whole.flags & flags::HEAD_METHOD != 0 { Method::Head } else { Method::Get };
        let persists = whole.flags & flags::PERSISTENT != 0;
        self.tracker = persists.then(|| ResponseTracker::new(method));
        // What was written before was the response to another request.
        self.written_before = None;
        self.keeps_alive = persists && head::speaks_http_1_1(bytes);
        self.ends_itself = false;
        self.head_left = Vec::new();
        // Only what is whole, and stays what it is, is taken so.
        self.chunks = None;
        true
    }

    /// A request that the program before this one accepted in this process. How much of it was read is not known: its
    /// connection ends with this program's close.
    pub fn inherited_by_exec(chain: Arc<Chain>, id: Id, fd: RawFd) -> Self {
        let peer = std::net::SocketAddr::from(([0, 0, 0, 0], 0));
        let (socket_bytes, request) = (0, Vec::new());
        let bundle =
            Bundle { id, flags: 0, peer, socket_bytes, arrived_ns: 0, replaces: 0, head_bytes: 0, request };
        let mut connection = Self::new(chain, bundle, fd, false);
        connection.is_the_servers = true;
        connection
    }

    /// A request that another process of the server accepted, and passed to this one.
    pub fn passed(chain: Arc<Chain>, passage: Passage, fd: RawFd) -> Self {
        let peer = std::net::SocketAddr::from(([0, 0, 0, 0], 0));
        let bundle = Bundle {
            id: passage.id,
            flags: passage.flags,
            peer,
            socket_bytes: passage.socket_left.saturating_add(passage.replaces.into()),
            arrived_ns: 0,
            replaces: passage.replaces,
            head_bytes: 0,
            request: passage.copy,
        };
        let mut connection = Self::new(chain, bundle, fd, passage.follows);
        connection.is_the_servers = passage.is_the_servers;
        connection.chunks = match passage.chunks {
            Passed::None => None,
            Passed::Untouched => Some(Box::new(Chunks::new())),
            Passed::Lost => Some(Box::new(Chunks::lost())),
        };
        if let Some(tracker) = connection.tracker.as_mut().filter(|_| passage.is_connect) {
            *tracker = ResponseTracker::new(Method::Connect);
        }
        connection.keeps_alive = passage.keeps_alive && connection.tracker.is_some();
        connection.presents_v6 = passage.presents_v6;
        connection.resumed = passage.is_resumed.into();
        connection
    }

    /// What another process must know to go on with the connection. A response that this one has begun is not followed
    /// there.
    pub fn passage(&self) -> Passage {
        Passage {
            id: self.id,
            flags: self.flags,
            follows: self.tracker.as_ref().is_some_and(|tracker| tracker.bytes() == 0),
            keeps_alive: self.keeps_alive,
            presents_v6: self.presents_v6,
            is_resumed: self.resumed > 0,
            is_the_servers: self.is_the_servers,
            is_connect: self.tracker.as_ref().is_some_and(|tracker| tracker.method() == Method::Connect),
            chunks: match &self.chunks {
                None => Passed::None,
                Some(chunks) if chunks.is_untouched() => Passed::Untouched,
                Some(_) => Passed::Lost,
            },
            replaces: u32::try_from(self.replaces).unwrap_or(u32::MAX),
            socket_left: self.socket_left,
            copy: self.unread_copy().to_vec(),
        }
    }

    /// Which presentation this is.
    pub fn id(&self) -> Id {
        self.id
    }

    /// The chain that it came from.
    pub fn chain(&self) -> &Arc<Chain> {
        &self.chain
    }

    /// Where the next bytes are.
    pub fn source(&self) -> Source {
        if self.copy_read < self.copy.len() {
            Source::Copy
        } else if self.is_the_servers {
            Source::Socket(u64::MAX)
        } else if self.socket_left > 0 {
            Source::Socket(self.socket_left)
        } else {
            match &self.chunks {
                None => Source::Exhausted,
                Some(chunks) if chunks.is_malformed() => Source::Malformed,
                Some(_) => Source::Unseen,
            }
        }
    }

    /// As [`Self::source`], for up to `wanted` bytes: looks how many of those on the socket belong to the request, if
    /// that is not known. All that are there are found, because a server takes less than it wanted for all that there
    /// was.
    pub fn source_of(&mut self, fd: BorrowedFd<'_>, wanted: usize) -> Source {
        let has_looked =
            self.copy_read < self.copy.len() || self.is_the_servers || self.socket_left >= wanted as u64;
        if let Some(chunks) = self.chunks.as_mut().filter(|_| !has_looked) {
            let found = chunks.look(fd, self.socket_left, wanted);
            self.socket_left = self.socket_left.saturating_add(found);
            if chunks.is_done() {
                self.chunks = None;
            }
        }
        self.source()
    }

    /// How many bytes of the request are on the socket.
    pub fn left(&self) -> usize {
        usize::try_from(self.socket_left).unwrap_or(usize::MAX)
    }

    /// Rewritten bytes that were not read yet.
    pub fn unread_copy(&self) -> &[u8] {
        &self.copy[self.copy_read..]
    }

    /// The server took `length` bytes of the copy.
    pub fn took_copy(&mut self, fd: BorrowedFd<'_>, length: usize) {
        self.is_untouched = false;
        self.copy_read = (self.copy_read + length).min(self.copy.len());
        if self.copy_read == self.copy.len() {
            self.copy = Vec::new();
            self.copy_read = 0;
            discard(fd, self.replaces);
            self.replaces = 0;
        }
    }

    /// The server took `length` bytes from the socket.
    pub fn took_from_socket(&mut self, length: u64) {
        self.is_untouched = false;
        self.socket_left = self.socket_left.saturating_sub(length);
    }

    /// The tracker of the response, if it is followed.
    pub fn tracker(&mut self) -> Option<&mut ResponseTracker> {
        self.tracker.as_mut()
    }

    /// The response says that the protocol changes: all that comes is the server's from now on if the request asked for
    /// that; and nobody's if it did not, or if what comes are requests that no filter could see. True once.
    pub fn changes_protocol(&mut self) -> bool {
        let Some(change) = self.tracker.as_ref().and_then(ResponseTracker::change) else { return false };
        self.is_the_servers = self.flags & flags::FINAL != 0 && change == Change::Another;
        if !self.is_the_servers {
            self.chunks = Some(Box::new(Chunks::lost()));
        }
        self.tracker = None;
        self.keeps_alive = false;
        true
    }

    /// The server has begun to read: has [`Self::wrote_unseen`] find out what it writes from now on; `socket` is the
    /// connection's. Worth a system call only for servers that wait in their reads.
    pub fn watch_for_unseen(&mut self, socket: BorrowedFd<'_>) {
        let begins = self.is_untouched || self.written_before.is_none();
        if begins && self.is_blocking && self.tracker.is_some() {
            self.written_before = written(socket);
        }
    }

    /// The server has written something. Of one that waits for events it is asked now, before it writes content whose end
    /// is known, what it had written before.
    pub fn watch_for_unseen_content(&mut self, socket: BorrowedFd<'_>) {
        if self.written_before.is_some() || !self.persists() {
            return;
        }
        if let Some(tracker) = self.tracker.as_ref().filter(|tracker| tracker.content_left().is_some()) {
            self.written_before = written(socket).map(|now| now.wrapping_sub(tracker.bytes()));
        }
    }

    /// How much the server wrote by calls that nobody saw, as dprintf(3) does.
    fn unseen(&self, socket: BorrowedFd<'_>) -> u64 {
        let (Some(before), Some(tracker)) = (self.written_before, &self.tracker) else { return 0 };
        written(socket).map_or(0, |now| now.wrapping_sub(before).saturating_sub(tracker.bytes()))
    }

    /// Whether it did: its response is not followed then, and it may be complete.
    pub fn wrote_unseen(&self, socket: BorrowedFd<'_>) -> bool {
        self.unseen(socket) > 0
    }

    /// Whether the rest of its response may be written by such calls, and [`Self::follow_unseen`] tells when it is
    /// complete.
    pub fn may_end_unseen(&self) -> bool {
        let is_under_way = |tracker: &ResponseTracker| tracker.content_left().is_some();
        self.written_before.is_some() && self.tracker.as_ref().is_some_and(is_under_way)
    }

    /// Takes what the server wrote by such calls for content of its response, if that has a length.
    pub fn follow_unseen(&mut self, socket: BorrowedFd<'_>) {
        let unseen = if self.may_end_unseen() { self.unseen(socket) } else { 0 };
        if let Some(tracker) = self.tracker.as_mut().filter(|_| unseen > 0) {
            tracker.wrote_unseen(unseen);
        }
    }

    /// The server wrote something.
    pub fn set_touched(&mut self) {
        self.is_untouched = false;
        self.wrote_lingering |= self.lingers.is_some();
    }

    /// What the server is to write instead of the first of `bytes`, or of as many as there are: a server that ends each
    /// connection after one response does so locally, and the client that wanted to keep its connection need not be
    /// told. Not so where content is still to come: the client may send no more of it, and the server close before it
    /// has come.
    pub fn instead_of(&mut self, fd: BorrowedFd<'_>, bytes: &[u8]) -> Option<Vec<u8>> {
        if !self.head_left.is_empty() {
            return Some(self.head_left.clone());
        }
        if !self.keeps_alive {
            return None;
        }
        let instead = self.tracker.as_mut()?.without_close(bytes)?;
        if !self.is_all_there(fd) {
            return None;
        }
        self.ends_itself = true;
        Some(instead)
    }

    /// Whether [`Self::instead_of`] wants to see a whole head: one begins with what the server writes next.
    pub fn wants_whole_head(&self) -> bool {
        self.keeps_alive && self.tracker.as_ref().is_some_and(ResponseTracker::comes_to_head)
    }

    /// Whether what was not read of the request is on the socket.
    fn is_all_there(&mut self, fd: BorrowedFd<'_>) -> bool {
        if self.source() == Source::Exhausted {
            return true;
        }
        self.source_of(fd, usize::MAX);
        let left = self.replaces.saturating_add(self.socket_left);
        self.chunks.is_none() && rustix::io::ioctl_fionread(fd).is_ok_and(|there| there >= left)
    }

    /// The server wrote so many bytes of which the first are `instead`: the rest of it is still to be written.
    pub fn wrote_instead(&mut self, instead: &[u8], written: usize) {
        self.head_left = instead.get(written..).unwrap_or_default().to_vec();
    }

    /// Whether the server said that it ends the connection after this response.
    pub fn ends_itself(&self) -> bool {
        self.ends_itself
    }

    /// The server set TCP_CORK.
    pub fn set_corked(&mut self, corked: bool) {
        self.corked = corked;
    }

    /// The server set SO_LINGER.
    pub fn set_linger_option(&mut self) {
        self.has_linger_option = true;
    }

    /// Whether the server's end is over although it keeps its descriptor: the request is read to its end, the response
    /// complete, and both sides want to keep the connection.
    pub fn is_over(&self) -> bool {
        self.source() == Source::Exhausted && self.is_answered()
    }

    /// Whether the response is complete before the request was read to its end, and does not say that the connection
    /// ends.
    pub fn is_answered_early(&self) -> bool {
        self.lingers.is_none() && (self.is_kept() || self.is_exceeded()) && self.source() != Source::Exhausted
    }

    /// Whether, moreover, the server did not say so either: it might take the rest for its next request.
    pub fn may_mistake_content(&self) -> bool {
        !self.ends_itself && self.is_answered_early()
    }

    fn extent(&self) -> Option<Extent> {
        self.tracker.as_ref().map(ResponseTracker::extent)
    }

    /// Whether more than a whole response was written, and does not say that the connection ends.
    fn is_exceeded(&self) -> bool {
        self.tracker.as_ref().is_some_and(ResponseTracker::is_exceeded)
    }

    /// Whether, moreover, it says that the connection goes on.
    fn is_kept(&self) -> bool {
        self.extent() == Some(Extent::Complete { keep_alive: true })
    }

    fn is_answered(&self) -> bool {
        self.persists() && self.is_kept()
    }

    /// Whether the server goes on where there is nothing to go on with: the client has asked for one response, and has
    /// it, or has more.
    pub fn goes_on_in_vain(&self) -> bool {
        let is_last = !self.persists() && self.is_kept() || self.is_exceeded();
        is_last && self.source() == Source::Exhausted
    }

    /// Whether the connection may bring another request.
    pub fn persists(&self) -> bool {
        self.flags & flags::PERSISTENT != 0
    }

    /// Whether enough of the request was thrown away.
    pub fn has_skipped_enough(&self) -> bool {
        self.skipped >= MOST_SKIPPED
    }

    /// Whether closing now is a local matter, as far as can be known from following the response. `None`: this process
    /// did nothing with the connection, and another may.
    pub fn closes_locally(&mut self, fd: BorrowedFd<'_>) -> Option<bool> {
        if self.is_answered() {
            return self.close_locally(fd);
        }
        if self.is_untouched { None } else { Some(false) }
    }

    /// The server closes its end only. Takes what is left of the request off the socket, and says whether the
    /// connection can go on: the rest was there, and the client wants to keep it. `None`: another process has the
    /// request.
    pub fn close_locally(&mut self, fd: BorrowedFd<'_>) -> Option<bool> {
        if self.is_shared && self.is_untouched {
            return None;
        }
        if self.flags & flags::PERSISTENT == 0 || self.is_the_servers {
            return Some(false);
        }
        if (self.replaces > 0 || self.socket_left > 0 || self.chunks.is_some()) && self.is_read_elsewhere {
            return Some(false);
        }
        Some(self.skip(fd) == Source::Exhausted)
    }

    /// Takes what is there of the request off the socket, which nobody will read, but no more than 4 MiB of it. Returns
    /// where the next bytes are.
    pub fn skip(&mut self, fd: BorrowedFd<'_>) -> Source {
        self.copy = Vec::new();
        self.copy_read = 0;
        self.socket_left = self.socket_left.saturating_add(std::mem::take(&mut self.replaces));
        while self.skipped < MOST_SKIPPED {
            let skipped = discard(fd, self.socket_left.min(MOST_SKIPPED - self.skipped));
            self.socket_left -= skipped;
            self.skipped += skipped;
            if self.socket_left > 0 || !matches!(self.source_of(fd, SKIPPED_BYTES), Source::Socket(_)) {
                break;
            }
        }
        self.source()
    }

    /// The process forks: both have the connection.
    pub fn share(&mut self) {
        self.is_shared = true;
        self.chain.ledger.share(self.id);
    }

    /// Another process has the request now: unless this one does something with it again, its close says nothing about
    /// how the connection ends.
    pub fn leave_to_others(&mut self) {
        self.is_untouched = true;
    }

    /// This process is a child of the one that had the connection.
    pub fn inherited(&mut self) {
        self.interests.clear();
        // What the parent began to read, it reads to its end.
        self.is_read_elsewhere = !self.is_untouched;
    }

    /// The last descriptor of this process is gone, or about to go.
    pub fn release(&mut self, fd: Option<BorrowedFd<'_>>, locally: Option<bool>) {
        if self.lingers.is_some() {
            return self.release_lingering(fd);
        }
        let end = locally.map(|locally| if locally { State::EndedLocally } else { State::EndedForAll });
        if let Some(fd) = fd.filter(|_| locally == Some(true) && self.corked) {
            // What is corked would otherwise wait for the next response, or 200 ms.
            let _ = rustix::net::sockopt::set_tcp_cork(fd, false);
        }
        if let Some(fd) = fd.filter(|&fd| self.has_linger_option && (locally == Some(true) || !resets(fd))) {
            // It is of this end alone, and a filter that closes the connection must not wait for the client.
            let _ = rustix::net::sockopt::set_socket_linger(fd, None);
            self.has_linger_option = false;
        }
        let Some((end, is_due)) = self.chain.ledger.release(self.id, end) else { return };
        if is_due || self.resumed > 0 {
            self.tell_end(fd, end);
        }
    }

    /// A connection that lingers is the filters' again, unless they have it already.
    fn release_lingering(&mut self, fd: Option<BorrowedFd<'_>>) {
        self.lingers = None;
        lingering::left();
        let end = if self.wrote_lingering { State::EndedForAll } else { State::EndedLocally };
        if self.chain.ledger.let_go(self.id, end) {
            // What arrived while it lingered was left to this process.
            self.tell_end(fd, end);
        }
    }

    fn tell_end(&self, fd: Option<BorrowedFd<'_>>, end: State) {
        let locally = end == State::EndedLocally;
        if !locally && let Some(fd) = fd {
            // The filters close their copies a moment later; the client need not wait for that.
            if resets(fd) {
                let _ = rustix::net::connect_unspec(fd);
            } else {
                let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
            }
        }
        let notice = if locally { Notice::ClosedLocally(self.id) } else { Notice::ClosedForAll(self.id) };
        // A full link loses nothing: the ledger says the same, and filters look there.
        let _ = link::send_notice(std::os::fd::AsFd::as_fd(&self.chain.link), notice);
    }

    /// Removes the registrations of `fd`: epoll would keep them as long as any filter holds the socket.
    pub fn forget_interests(&mut self, fd: RawFd) -> Vec<Interest> {
        let (of_fd, others) = self.interests.drain(..).partition(|interest: &Interest| interest.fd == fd);
        self.interests = others;
        let of_fd: Vec<Interest> = of_fd;
        for interest in &of_fd {
            // SAFETY: numbers borrowed for one call each, which fails harmlessly if the server closed them.
            let (epoll, fd) =
                unsafe { (BorrowedFd::borrow_raw(interest.epoll), BorrowedFd::borrow_raw(interest.fd)) };
            let _ = epoll::delete(epoll, fd);
        }
        of_fd
    }
}

/// Bytes that were ever written to a TCP socket: those that were sent, but for repetitions, and those that were not
/// yet.
fn written(fd: BorrowedFd<'_>) -> Option<u64> {
    /// `struct tcp_info` (linux/tcp.h), of which libc has the beginning only.
    const NOTSENT_BYTES: usize = 144;
    const BYTES_SENT: usize = 200;
    const BYTES_RETRANS: usize = 208;
    const END: usize = 216;
    let mut information = [0u8; END];
    let mut length = END as libc::socklen_t;
    let (fd, to, at) = (fd.as_raw_fd(), information.as_mut_ptr() as c_long, (&raw mut length) as c_long);
    let arguments = [fd.into(), libc::IPPROTO_TCP.into(), libc::TCP_INFO.into(), to, at, 0];
    // SAFETY: getsockopt writes at most `length` bytes, and how many.
    let done = unsafe { raw::call(libc::SYS_getsockopt, arguments) };
    // Linux 4.19 has all of it.
    if done.is_err() || (length as usize) < END {
        return None;
    }
    let long = |at: usize| Some(u64::from_ne_bytes(*information.get(at..)?.first_chunk()?));
    let notsent = u32::from_ne_bytes(*information.get(NOTSENT_BYTES..)?.first_chunk()?);
    Some(long(BYTES_SENT)?.wrapping_sub(long(BYTES_RETRANS)?).wrapping_add(notsent.into()))
}

/// Whether the server's close is to reset the connection (SO_LINGER with no time, socket(7)): it tells the client that
/// what it got is not all. To connect it to nothing does that at once (connect(2)), however many have the socket.
fn resets(fd: BorrowedFd<'_>) -> bool {
    rustix::net::sockopt::socket_linger(fd) == Ok(Some(std::time::Duration::ZERO))
}

/// Takes up to `length` bytes off the socket and throws them away (MSG_TRUNC on TCP, tcp(7)). Returns how many.
fn discard(fd: BorrowedFd<'_>, length: u64) -> u64 {
    let mut left = length;
    while left > 0 {
        let flags = libc::MSG_TRUNC | libc::MSG_DONTWAIT;
        let now = left.min(1 << 30);
        let arguments = [fd.as_raw_fd().into(), 0, now as c_long, flags.into(), 0, 0];
        // SAFETY: with MSG_TRUNC, TCP writes nothing to the buffer.
        let got = unsafe { raw::call(libc::SYS_recvfrom, arguments) };
        match got.map(u64::try_from) {
            Ok(Ok(got)) if got > 0 => left -= got.min(left),
            _ => break,
        }
    }
    length - left
}

#[cfg(test)]
mod tests;
