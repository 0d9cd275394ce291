//! The clients' sockets of a core, and the event loop that watches them.
//!
//! A connection that waits for its next request is one small object and one entry of an epoll instance: it has no task,
//! no timer and no buffer. What it says is handled on the spot; only what has to wait gets a task, for as long as it
//! waits. The runtime, which drives those tasks, sees all clients as one descriptor: that of the epoll instance.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::{self, IoSlice, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags};
use tidegate_core::NodeId;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

use crate::data_core::DataCore;
use crate::session;
use crate::session::Partial;
use crate::session::deadlines::Slot;
use crate::session::round::AT_ONCE;
use crate::tls::{self, HandshakeError};

/// Events taken from the kernel at once; the core's tasks have their turn after fewer than twice as many.
const BATCH: usize = 256;
/// So many events at once mean that more have come by the time they are handled.
const BUSY: usize = 8;

/// Something to be read, the end of it included.
const READ: u8 = 1;
/// Room to write.
const WRITE: u8 = 2;
/// The client sends no more; what it sent is still to be read.
const ENDED: u8 = 4;
/// The client has reset the connection.
const FAILED: u8 = 8;

/// One client's connection.
pub(crate) struct Client {
    socket: TcpStream,
    peer: SocketAddr,
    /// What the kernel has said and nobody has used up yet.
    ready: Cell<u8>,
    watched: Cell<Watched>,
    /// A task answers it.
    is_busy: Cell<bool>,
    /// Its request is with an upstream, or on its way there.
    pub(crate) has_upstream: Cell<bool>,
    /// It is in [`Clients::again`].
    is_queued: Cell<bool>,
    /// Of that task.
    waker: RefCell<Option<Waker>>,
    /// A head of which only a part has arrived.
    pub(crate) pending: RefCell<Option<Box<Partial>>>,
    pub(crate) slot: Slot,
    /// Its address's place in the prefix tree, if anybody watches.
    pub(crate) place: Option<NodeId>,
    /// What stands between the socket and HTTP, if anything does.
    tls: Option<Box<RefCell<tls::Session>>>,
}

/// What is spoken on a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Spoken {
    Http1,
    Http2,
}

/// What the kernel was asked to tell.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Watched {
    /// Nothing yet.
    No,
    /// What arrives.
    Input,
    /// What arrives, and when there is room to write again.
    Both,
}

impl Client {
    pub(crate) fn new(
        socket: TcpStream,
        peer: SocketAddr,
        place: Option<NodeId>,
        tls: Option<tls::Session>,
    ) -> Self {
        Self {
            tls: tls.map(|session| Box::new(RefCell::new(session))),
            socket,
            peer,
            ready: Cell::new(READ | WRITE),
            watched: Cell::new(Watched::No),
            is_busy: Cell::new(false),
            has_upstream: Cell::new(false),
            is_queued: Cell::new(false),
            waker: RefCell::new(None),
            pending: RefCell::new(None),
            slot: Slot::default(),
            place,
        }
    }

    /// The other end.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// This end.
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Whether a read may find something.
    pub(crate) fn is_readable(&self) -> bool {
        self.ready.get() & (READ | ENDED) != 0
    }

    /// Whether the client leaves the socket full.
    pub(crate) fn is_stuck(&self) -> bool {
        self.watched.get() == Watched::Both && self.ready.get() & WRITE == 0
    }

    /// Whether it has a connection to an upstream and keeps that waiting, for its body or by not reading.
    pub(crate) fn is_slow_at_upstream(&self) -> bool {
        self.has_upstream.get() && (self.slot.awaits_body() || self.is_stuck())
    }

    /// Whether a task answers this client now.
    pub(crate) fn is_busy(&self) -> bool {
        self.is_busy.get()
    }

    /// Whether its connection is one with TLS.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Goes on with the handshake of TLS, if there is one to be made: what is spoken once the peers have agreed.
    #[inline]
    pub(crate) fn agree(&self) -> Result<Spoken, HandshakeError> {
        match &self.tls {
            None => Ok(Spoken::Http1),
            Some(tls) => self.shake_hands(&mut tls.borrow_mut()),
        }
    }

    fn shake_hands(&self, tls: &mut tls::Session) -> Result<Spoken, HandshakeError> {
        match tls.shake_hands(&self.socket) {
            Ok(()) if tls.speaks_http2() => Ok(Spoken::Http2),
            Ok(()) => Ok(Spoken::Http1),
            Err(error) => {
                if matches!(&error, HandshakeError::Io(error) if error.kind() == io::ErrorKind::WouldBlock) {
                    self.used_up(READ | ENDED);
                }
                Err(error)
            }
        }
    }

    /// Sends bytes past TLS, to a client that does not speak it.
    pub(crate) fn try_write_in_clear(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(net::send(&self.socket, bytes, SendFlags::NOSIGNAL)?)
    }

    // A hit is read and sent by system calls of our own: the C library's are points of cancellation, which in a process of
    // several threads costs it two locked instructions each.

    pub(crate) fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match &self.tls {
            Some(tls) => self.try_read_with(&mut tls.borrow_mut(), buffer),
            None => self.try_discard(buffer),
        }
    }

    /// Reads what nobody wants to understand any more, TLS or not.
    pub(crate) fn try_discard(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let asked = buffer.len();
        let read = net::recv(&self.socket, buffer, RecvFlags::empty()).map(|(length, _)| length);
        self.has_read(read, asked)
    }

    fn try_read_with(&self, tls: &mut tls::Session, buffer: &mut [u8]) -> io::Result<usize> {
        let read = tls.read(&self.socket, buffer);
        match &read {
            Ok(_) if tls.is_drained() => self.used_up(READ),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.used_up(READ | ENDED),
            _ => {}
        }
        read
    }

    /// Reads what fits into the buffer's spare capacity, of which there must be some.
    pub(crate) fn try_read_buf(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        let room = buffer.capacity() - buffer.len();
        if let Some(tls) = &self.tls {
            let start = buffer.len();
            buffer.resize(start + room, 0);
            let read = self.try_read_with(&mut tls.borrow_mut(), &mut buffer[start..]);
            buffer.truncate(start + read.as_ref().map_or(0, |length| *length));
            return read;
        }
        let read = rustix::io::read(&self.socket, rustix::buffer::spare_capacity(buffer));
        self.has_read(read, room)
    }

    fn has_read(&self, read: rustix::io::Result<usize>, asked: usize) -> io::Result<usize> {
        match read {
            // Whatever comes after a short read is told as a new event (epoll(7), edge-triggered).
            Ok(length) if length < asked => self.used_up(READ),
            Err(Errno::AGAIN) => self.used_up(READ | ENDED),
            _ => {}
        }
        Ok(read?)
    }

    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(tls) = &self.tls {
            return self.writing(|socket| tls.borrow_mut().write(socket, &[IoSlice::new(bytes)]));
        }
        self.writing(|socket| Ok(net::send(socket, bytes, SendFlags::NOSIGNAL)?))
    }

    /// As [`Self::try_write`], for what is followed by more at once: a segment that is not full waits for it.
    pub(crate) fn try_write_with_more(&self, bytes: &[u8]) -> io::Result<usize> {
        if self.is_encrypted() {
            return self.try_write(bytes);
        }
        self.writing(|socket| Ok(net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::MORE)?))
    }

    pub(crate) fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if let Some(tls) = &self.tls {
            return self.writing(|socket| tls.borrow_mut().write(socket, slices));
        }
        self.writing(|mut socket| socket.write_vectored(slices))
    }

    /// Sends up to `length` bytes of a file from `offset` on. Not where there is TLS, which the kernel knows nothing of.
    pub(crate) fn try_send_file(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        length: usize,
    ) -> io::Result<usize> {
        if self.is_encrypted() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.writing(|socket| {
            let mut offset = offset;
            Ok(rustix::fs::sendfile(socket, file, Some(&mut offset), length)?)
        })
    }

    /// Tries something that fails with `WouldBlock` where the socket is full.
    fn writing<T>(&self, write: impl FnOnce(&TcpStream) -> io::Result<T>) -> io::Result<T> {
        let written = write(&self.socket);
        if written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            self.used_up(WRITE);
        }
        written
    }

    fn used_up(&self, bits: u8) {
        self.ready.set(self.ready.get() & !bits);
    }

    /// Whether it is one of the core's clients, and not only held by somebody who has not noticed its end.
    pub(crate) fn is_watched(&self) -> bool {
        self.watched.get() != Watched::No
    }

    /// Ends when the deadline has passed.
    pub(crate) async fn expired(&self) {
        poll_fn(|context| match self.slot.expired() {
            Some(_) => Poll::Ready(()),
            None => self.poll_ready(context, 0),
        })
        .await;
    }

    /// Lets the task that answers it look again.
    pub(crate) fn wake(&self) {
        self.waker.borrow().iter().for_each(Waker::wake_by_ref);
    }

    /// Waits until a read may find something.
    pub(crate) async fn readable(&self) {
        poll_fn(|context| self.poll_ready(context, READ | ENDED)).await;
    }

    /// Ends when the client has reset the connection.
    pub(crate) async fn failed(&self) {
        poll_fn(|context| self.poll_ready(context, FAILED)).await;
    }

    /// Waits until a write may find room.
    pub(crate) async fn writable(&self, clients: &Clients) -> io::Result<()> {
        clients.watch_output(self)?;
        poll_fn(|context| self.poll_ready(context, WRITE)).await;
        Ok(())
    }

    /// Every wait for one client is part of the task that answers it, so that one waker will do.
    fn poll_ready(&self, context: &Context<'_>, bits: u8) -> Poll<()> {
        if self.ready.get() & bits != 0 {
            return Poll::Ready(());
        }
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
        Poll::Pending
    }

    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.socket.shutdown(how)
    }

    /// Ends what is sent to the client: it has all of it.
    pub(crate) fn finish_output(&self) -> io::Result<()> {
        self.close_tls();
        self.socket.shutdown(Shutdown::Write)
    }

    /// Where there is TLS, says that nothing more comes: that the connection was not cut off.
    pub(crate) fn close_tls(&self) {
        if let Some(tls) = &self.tls {
            tls.borrow_mut().close(&self.socket);
        }
    }

    /// Resets the connection (connect(2) to nothing): the client learns that what it got is not all.
    pub(crate) fn reset(&self) {
        let _ = rustix::net::connect_unspec(&self.socket);
    }

    /// Closing now resets the connection, and what the kernel holds for the client is lost.
    pub(crate) fn set_zero_linger(&self) {
        let _ = socket2::SockRef::from(&self.socket).set_linger(Some(std::time::Duration::ZERO));
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A client as a stream, for what goes on for long.
#[derive(Clone, Copy)]
pub(crate) struct ClientStream<'c> {
    pub client: &'c Client,
    pub clients: &'c Clients,
}

impl AsyncRead for ClientStream<'_> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            std::task::ready!(self.client.poll_ready(context, READ | ENDED));
            match self.client.try_read(buffer.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(length) => {
                    buffer.advance(length);
                    return Poll::Ready(Ok(()));
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for ClientStream<'_> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            match self.client.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
            self.clients.watch_output(self.client)?;
            std::task::ready!(self.client.poll_ready(context, WRITE));
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.client.try_write_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
            self.clients.watch_output(self.client)?;
            std::task::ready!(self.client.poll_ready(context, WRITE));
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.client.finish_output())
    }
}

/// All clients of a core.
pub(crate) struct Clients {
    epoll: OwnedFd,
    /// By descriptor, which the kernel numbers from the lowest that is free.
    table: RefCell<Vec<Option<Rc<Client>>>>,
    count: Cell<usize>,
    /// Those that had more to say than they were let.
    again: RefCell<Vec<Rc<Client>>>,
}

impl Clients {
    /// What [`Self::new`] takes.
    pub(crate) fn epoll() -> io::Result<OwnedFd> {
        Ok(epoll::create(CreateFlags::CLOEXEC)?)
    }

    pub(crate) fn new(epoll: OwnedFd) -> Self {
        Self { epoll, table: RefCell::default(), count: Cell::new(0), again: RefCell::default() }
    }

    /// Number of connections.
    pub(crate) fn len(&self) -> usize {
        self.count.get()
    }

    /// Watches a client until [`Self::remove`].
    pub(crate) fn add(&self, client: &Rc<Client>) -> io::Result<()> {
        let index = index_of(client);
        let interest = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, &client.socket, EventData::new_u64(index as u64), interest)?;
        client.watched.set(Watched::Input);
        let mut table = self.table.borrow_mut();
        if table.len() <= index {
            table.resize_with(index + 1, || None);
        }
        table[index] = Some(Rc::clone(client));
        self.count.set(self.count.get() + 1);
        Ok(())
    }

    /// Forgets a client; says whether it was known. Its socket is closed when nobody holds it any more, which ends the
    /// kernel's watch too.
    pub(crate) fn remove(&self, client: &Rc<Client>) -> bool {
        let mut table = self.table.borrow_mut();
        let place = table.get_mut(index_of(client));
        let known = place.and_then(|place| place.take_if(|known| Rc::ptr_eq(known, client)));
        if known.is_some() {
            client.watched.set(Watched::No);
            self.count.set(self.count.get() - 1);
        }
        known.is_some()
    }

    /// Goes on with a client after the others had their turn.
    pub(crate) fn again(&self, client: &Rc<Client>) {
        if !client.is_queued.replace(true) {
            self.again.borrow_mut().push(Rc::clone(client));
        }
    }

    pub(crate) fn for_each(&self, f: impl FnMut(&Rc<Client>)) {
        self.table.borrow().iter().flatten().for_each(f);
    }

    /// Asks to be told when a client takes more, which most never have to be asked.
    fn watch_output(&self, client: &Client) -> io::Result<()> {
        if client.watched.get() == Watched::Input {
            let interest = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
            let data = EventData::new_u64(client.socket.as_raw_fd() as u64);
            epoll::modify(&self.epoll, &client.socket, data, interest)?;
            client.watched.set(Watched::Both);
        }
        Ok(())
    }

    /// Another client may have got the descriptor since: it finds nothing to read, and goes on waiting.
    fn told_of(&self, event: &Event) -> Option<Rc<Client>> {
        let index = usize::try_from(event.data.u64()).ok()?;
        self.table.borrow().get(index).and_then(Option::clone)
    }
}

fn index_of(client: &Client) -> usize {
    usize::try_from(client.socket.as_raw_fd()).unwrap_or(0)
}

/// A client that a task answers; taken back whatever becomes of the task.
pub(crate) struct Busy {
    pub core: Rc<DataCore>,
    pub client: Rc<Client>,
}

impl Busy {
    pub(crate) fn new(core: &Rc<DataCore>, client: &Rc<Client>) -> Self {
        client.is_busy.set(true);
        Self { core: Rc::clone(core), client: Rc::clone(client) }
    }

    /// The client waits for nothing but its next request.
    pub(crate) fn hand_back(self) {
        self.client.is_busy.set(false);
        self.client.waker.take();
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if self.client.is_busy.get() {
            self.core.end(&self.client);
        }
    }
}

impl DataCore {
    /// Handles what clients send, for ever.
    pub(crate) async fn watch_clients(self: Rc<Self>) {
        let descriptor = match self.clients.epoll.try_clone().and_then(watch_readable) {
            Ok(descriptor) => descriptor,
            Err(error) => {
                tracing::error!(%error, "clients cannot be watched");
                return;
            }
        };
        let mut events: Vec<Event> = Vec::with_capacity(BATCH);
        loop {
            if self.clients.again.borrow().is_empty() {
                let Ok(mut ready) = descriptor.readable().await else { return };
                let mut handled = 0;
                // While many come at once, asking for more costs less than coming back here by way of the runtime.
                while self.take_events(&mut events) >= BUSY && handled + events.len() < BATCH {
                    handled += events.len();
                    self.dispatch_all(&events);
                }
                if events.len() < BATCH {
                    // The kernel has no more for now, and says so when it has. Until then the tasks have their turn.
                    ready.clear_ready();
                }
            } else {
                let turn = self.clock.turn();
                for client in self.clients.again.take() {
                    client.is_queued.set(false);
                    session::resume(&self, &client);
                }
                drop(turn);
                self.take_events(&mut events);
            }
            self.dispatch_all(&events);
            if events.len() == BATCH || !self.clients.again.borrow().is_empty() {
                tokio::task::yield_now().await;
            }
        }
    }

    fn take_events(&self, events: &mut Vec<Event>) -> usize {
        events.clear();
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let buffer = rustix::buffer::spare_capacity(events);
        // Interrupted or not, what is left is told again.
        epoll::wait(&self.clients.epoll, buffer, Some(&at_once)).unwrap_or(0)
    }

    fn dispatch_all(self: &Rc<Self>, events: &[Event]) {
        let _turn = self.clock.turn();
        for events in events.chunks(AT_ONCE) {
            self.round.run(self, events.iter().filter_map(|event| self.to_go_on(event)));
        }
    }

    /// The client that an event is about, unless somebody else goes on with it.
    fn to_go_on(&self, event: &Event) -> Option<Rc<Client>> {
        let client = self.clients.told_of(event)?;
        client.ready.set(client.ready.get() | bits_of(event.flags));
        if client.is_busy() {
            client.wake();
            return None;
        }
        (!client.is_queued.get()).then_some(client)
    }

    /// The connection ends here, whatever is left to say.
    pub(crate) fn end(&self, client: &Rc<Client>) {
        if self.clients.remove(client) {
            self.connection_ended(client);
        }
    }
}

fn watch_readable(epoll: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is open, and `AsyncFd` owns it until both are gone; nothing takes it out.
    unsafe { AsyncFd::register_with_interest(epoll, Interest::READABLE) }.map_err(io::Error::from)
}

fn bits_of(flags: EventFlags) -> u8 {
    let mut bits = 0;
    if flags.contains(EventFlags::IN) {
        bits |= READ;
    }
    if flags.contains(EventFlags::OUT) {
        bits |= WRITE;
    }
    if flags.contains(EventFlags::RDHUP) {
        bits |= ENDED;
    }
    if flags.intersects(EventFlags::ERR | EventFlags::HUP) {
        // Reads and writes will say what has happened.
        bits |= READ | WRITE | ENDED;
    }
    if flags.contains(EventFlags::ERR) {
        bits |= FAILED;
    }
    bits
}
