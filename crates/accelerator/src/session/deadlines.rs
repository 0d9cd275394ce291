//! Deadlines of client connections, kept by one sweep a second instead of a timer for every read.
//!
//! A session writes its deadline into a slot, which costs a store. When a deadline has passed, the sweep shuts the
//! socket's receiving side: the session wakes as if the client had left, finds its slot marked and ends with the right
//! answer and count.

use std::cell::{Cell, RefCell};
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use rustix::net::Shutdown;

/// What a connection is waiting for; decides what an expired deadline means.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Waiting {
    /// Nothing that the client owes: the upstream is working.
    Nothing,
    /// A request head to become complete.
    Head,
    /// The next request on a persistent connection.
    NextRequest,
    /// More of a request body.
    Body,
    /// Either side of an upgraded connection.
    Tunnel,
}

/// One connection's deadline.
pub(crate) struct Slot {
    raw_fd: Cell<i32>,
    deadline_ms: Cell<u64>,
    waiting: Cell<Waiting>,
    expired: Cell<bool>,
    index: Cell<usize>,
}

impl Slot {
    /// From now on the connection waits for `waiting`, until `deadline_ms` on the core's clock.
    #[inline]
    pub(crate) fn set(&self, waiting: Waiting, deadline_ms: u64) {
        self.waiting.set(waiting);
        self.deadline_ms.set(deadline_ms);
    }

    /// Nothing is owed by the client.
    pub(crate) fn clear(&self) {
        self.set(Waiting::Nothing, u64::MAX);
    }

    /// What the connection waited for when its deadline passed.
    pub(crate) fn expired(&self) -> Option<Waiting> {
        self.expired.get().then(|| self.waiting.get())
    }

    fn awaits_head(&self) -> bool {
        self.waiting.get() == Waiting::Head && !self.expired.get()
    }

    /// Whether the connection is between requests.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.get() == Waiting::NextRequest && !self.expired.get()
    }
}

/// All connections of a core.
#[derive(Default)]
pub(crate) struct Deadlines {
    slots: RefCell<Vec<Rc<Slot>>>,
}

impl Deadlines {
    /// Adds a connection, whose socket must stay open until [`Self::remove`].
    pub(crate) fn add(&self, raw_fd: i32) -> Rc<Slot> {
        let mut slots = self.slots.borrow_mut();
        let slot = Rc::new(Slot {
            raw_fd: Cell::new(raw_fd),
            deadline_ms: Cell::new(u64::MAX),
            waiting: Cell::new(Waiting::Nothing),
            expired: Cell::new(false),
            index: Cell::new(slots.len()),
        });
        slots.push(Rc::clone(&slot));
        slot
    }

    /// Forgets a connection; called before its socket is closed.
    pub(crate) fn remove(&self, slot: &Slot) {
        let mut slots = self.slots.borrow_mut();
        let index = slot.index.get();
        slots.swap_remove(index);
        if let Some(moved) = slots.get(index) {
            moved.index.set(index);
        }
    }

    /// Number of connections.
    pub(crate) fn len(&self) -> usize {
        self.slots.borrow().len()
    }

    /// Ends every connection whose deadline has passed.
    pub(crate) fn sweep(&self, now_ms: u64) {
        for slot in self.slots.borrow().iter() {
            if slot.deadline_ms.get() <= now_ms {
                expire(slot);
            }
        }
    }

    /// Ends every connection that is between requests: the first step of a drain. Says how many there were.
    pub(crate) fn end_idle(&self) -> usize {
        self.end(|slot| slot.is_idle())
    }

    /// Ends every upgraded connection: none of them would end by itself.
    pub(crate) fn end_tunnels(&self) {
        self.end(|slot| slot.waiting.get() == Waiting::Tunnel);
    }

    /// Ends connections that are of least use, to make room for others: those between requests, or else that half of
    /// those without a whole request head that has waited longest. Says how many there were.
    pub(crate) fn shed(&self) -> usize {
        let idle = self.end_idle();
        if idle > 0 {
            return idle;
        }
        let slots = self.slots.borrow();
        let mut deadlines: Vec<u64> =
            slots.iter().filter(|slot| slot.awaits_head()).map(|slot| slot.deadline_ms.get()).collect();
        drop(slots);
        if deadlines.is_empty() {
            return 0;
        }
        let middle = deadlines.len() / 2;
        let limit_ms = *deadlines.select_nth_unstable(middle).1;
        self.end(|slot| slot.awaits_head() && slot.deadline_ms.get() <= limit_ms)
    }

    fn end(&self, chosen: impl Fn(&Slot) -> bool) -> usize {
        let slots = self.slots.borrow();
        let chosen = slots.iter().filter(|slot| chosen(slot));
        chosen.map(|slot| expire(slot)).count()
    }
}

fn expire(slot: &Slot) {
    slot.deadline_ms.set(u64::MAX);
    slot.expired.set(true);
    let how = match slot.waiting.get() {
        Waiting::Head | Waiting::NextRequest | Waiting::Body => Shutdown::Read,
        Waiting::Nothing | Waiting::Tunnel => Shutdown::Both,
    };
    // SAFETY: a slot is removed before its socket is closed, so the descriptor is open and is this connection's.
    let socket = unsafe { BorrowedFd::borrow_raw(slot.raw_fd.get()) };
    // The peer may already have gone, which ends the session all the same.
    let _ = rustix::net::shutdown(socket, how);
}
