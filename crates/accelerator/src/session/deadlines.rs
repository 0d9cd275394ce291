//! Deadlines of client connections, kept by one sweep a second instead of a timer for every read.
//!
//! A session writes its deadline into a slot, which costs a store. When a deadline has passed, the sweep shuts the
//! socket's receiving side (or both sides, when the client does not take its response): the session wakes as if the
//! client had left, finds its slot marked and ends with the right answer and count.

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
    /// The client to take more of the response.
    Write,
    /// Either side of an upgraded connection.
    Tunnel,
}

/// One connection's deadline.
pub(crate) struct Slot {
    raw_fd: Cell<i32>,
    deadline_ms: Cell<u64>,
    waiting: Cell<Waiting>,
    /// The response has a deadline of its own, since it may be on its way while a body still comes in.
    write_deadline_ms: Cell<u64>,
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

    /// The client has until then to take more of the response; `u64::MAX` when it owes nothing.
    pub(crate) fn set_write(&self, deadline_ms: u64) {
        self.write_deadline_ms.set(deadline_ms);
    }

    /// What the connection waited for when its deadline passed.
    pub(crate) fn expired(&self) -> Option<Waiting> {
        self.expired.get().then(|| self.waiting.get())
    }

    /// Whether the connection is between requests.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.get() == Waiting::NextRequest
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
            write_deadline_ms: Cell::new(u64::MAX),
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
            if slot.write_deadline_ms.get() <= now_ms {
                slot.set(Waiting::Write, u64::MAX);
                expire(slot);
            } else if slot.deadline_ms.get() <= now_ms {
                expire(slot);
            }
        }
    }

    /// Ends every connection that is between requests: the first step of a drain.
    pub(crate) fn end_idle(&self) {
        for slot in self.slots.borrow().iter().filter(|slot| slot.is_idle()) {
            expire(slot);
        }
    }
}

fn expire(slot: &Slot) {
    slot.deadline_ms.set(u64::MAX);
    slot.write_deadline_ms.set(u64::MAX);
    slot.expired.set(true);
    let how = match slot.waiting.get() {
        Waiting::Head | Waiting::NextRequest | Waiting::Body => Shutdown::Read,
        Waiting::Nothing | Waiting::Write | Waiting::Tunnel => Shutdown::Both,
    };
    // SAFETY: a slot is removed before its socket is closed, so the descriptor is open and is this connection's.
    let socket = unsafe { BorrowedFd::borrow_raw(slot.raw_fd.get()) };
    // The peer may already have gone, which ends the session all the same.
    let _ = rustix::net::shutdown(socket, how);
}
