//! The clients' sockets of a core, and the event loop that watches them.
//!
//! A connection that waits for its next request is one small object and one entry of an epoll instance: it has no task,
//! no timer and no buffer. What it says is handled on the spot; only what has to wait gets a task, for as long as it
//! waits. The runtime, which drives those tasks, sees all clients as one descriptor: that of the epoll instance.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::data_core::DataCore;
use crate::data_core::client::{Client, ENDED, FAILED, READ, WRITE, Watched};
use crate::session;
use crate::session::batch::AT_ONCE;

/// Events taken from the kernel at once; the core's tasks have their turn after fewer than twice as many.
const BATCH: usize = 256;
/// So many events at once mean that more have come by the time they are handled.
const BUSY: usize = 8;

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
    pub(super) fn watch_output(&self, client: &Client) -> io::Result<()> {
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
            self.batch.run(self, events.iter().filter_map(|event| self.to_go_on(event)));
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
