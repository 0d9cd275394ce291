//! All connections of a core: their deadlines, their part of the memory, and which have to go where there is too little.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::net::SocketAddr;
use std::rc::Rc;

use tidegate_core::NodeId;
use tidegate_http::http3::ErrorCode;

use crate::http3::connection::{Connection, Ends, canonical, code};
use crate::http3::endpoint::Server;
use crate::http3::greetings::Greetings;

/// Idle connections of a core that go on being heard for a moment once another process has the socket.
const IDLE_TAKEN_ALONG: usize = 512;
/// How often it is looked at what clients take and bring.
const LOOK_MS: u64 = 1000;
/// Bytes of responses that wait for clients, for all connections of a core, and for one of them.
const UNSENT_BYTES: u64 = 64 * 1024 * 1024;
const MOST_UNSENT_BYTES: u64 = 1024 * 1024;
const LEAST_UNSENT_BYTES: u64 = 32 * 1024;

/// All connections of a core by HTTP/3.
#[derive(Default)]
pub(crate) struct Connections {
    all: RefCell<Vec<Rc<Connection>>>,
    pub(super) greetings: Greetings,
    next_look_ms: Cell<u64>,
    /// Another process has the servers' sockets.
    has_parted: Cell<bool>,
}

impl Connections {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.all.borrow().len()
    }

    /// Others have their part of the room when they are looked at, this one at once.
    pub(super) fn add(&self, connection: &Rc<Connection>) {
        let mut all = self.all.borrow_mut();
        connection.number.set(all.len());
        all.push(Rc::clone(connection));
        drop(all);
        connection.quic.set_send_window(self.room());
    }

    pub(super) fn remove(&self, connection: &Connection) {
        let mut all = self.all.borrow_mut();
        let number = connection.number.get();
        all.swap_remove(number);
        if let Some(moved) = all.get(number) {
            moved.number.set(number);
        }
    }

    /// A connection's part of what may wait for clients.
    fn room(&self) -> u64 {
        let count = self.len().max(1) as u64;
        (UNSENT_BYTES / count).clamp(LEAST_UNSENT_BYTES, MOST_UNSENT_BYTES)
    }

    /// Ends those whose deadline has passed, and has the others look at how they are getting on.
    pub(crate) fn sweep(&self, now_ms: u64) {
        let looks = self.next_look_ms.get() <= now_ms;
        if looks {
            self.next_look_ms.set(now_ms + LOOK_MS);
        }
        let room = self.room();
        for connection in &*self.all.borrow() {
            if connection.deadline_ms.get() <= now_ms {
                connection.due.notify_one();
            }
            if looks {
                connection.quic.set_send_window(room);
                connection.look.notify_waiters();
                let address = connection.quic.remote_address().ip().to_canonical();
                if address != connection.ends.peer.ip() && connection.core.ignores(address) {
                    // It has moved to where it would not have been let in.
                    connection.quic.close(code(ErrorCode::NoError), b"");
                }
                if connection.floods() {
                    connection.is_flood.set(true);
                    connection.due.notify_one();
                }
            }
        }
    }

    /// Whether new clients are another process's.
    pub(super) fn has_parted(&self) -> bool {
        self.has_parted.get()
    }

    /// Another process has the servers' sockets from now on; connections with requests in progress go on here.
    pub(crate) fn part(&self, servers: &[Server]) {
        self.has_parted.set(true);
        for server in servers {
            server.sockets.part();
        }
        let take_along = |Ends { local, peer, sockets }: &Ends, now: SocketAddr| {
            let taken = sockets.take_along(*local, now);
            if let Err(error) = &taken {
                tracing::debug!(client = %peer, %error, "a connection stays behind");
            }
            taken.is_ok()
        };
        self.greetings.for_each(|ends| _ = take_along(ends, ends.peer));
        let all = self.all.borrow();
        let is_busy = |connection: &&Rc<Connection>| connection.deadline_ms.get() == u64::MAX;
        let (busy, idle): (Vec<_>, Vec<_>) = all.iter().partition(is_busy);
        // Of those that are idle some have sent a request by now.
        let taken = busy.len() + IDLE_TAKEN_ALONG;
        for (number, connection) in busy.into_iter().chain(idle).enumerate() {
            let now = canonical(connection.quic.remote_address());
            if number >= taken || !take_along(&connection.ends, now) {
                // Nothing more is heard of it. Its client learns that, and goes elsewhere.
                connection.quic.close(code(ErrorCode::NoError), b"");
            }
        }
    }

    /// Streams by which clients keep upstreams waiting.
    pub(crate) fn stalled(&self) -> usize {
        self.all.borrow().iter().map(|connection| usize::from(connection.debts.stalled())).sum()
    }

    /// Ends as many of the connections that keep the server waiting as `count` makes of how many there are, those with the
    /// greatest weight first; `only_stalled`: of those alone that keep an upstream waiting. Says how many.
    pub(crate) fn end_heaviest(
        &self,
        count: impl FnOnce(usize) -> usize,
        only_stalled: bool,
        weight: impl Fn(SocketAddr, Option<NodeId>) -> u64,
    ) -> usize {
        let all = self.all.borrow();
        let waits = |connection: &&Rc<Connection>| match only_stalled {
            true => connection.debts.stalled() > 0,
            false => connection.deadline_ms.get() != u64::MAX || connection.debts.owing() > 0,
        };
        let mut waiting: Vec<_> = all.iter().filter(waits).filter(|it| !it.is_shed.get()).collect();
        let count = count(waiting.len()).min(waiting.len());
        waiting.sort_by_cached_key(|connection| {
            (Reverse(weight(connection.ends.peer, connection.place)), connection.deadline_ms.get())
        });
        for connection in &waiting[..count] {
            connection.is_shed.set(true);
            connection.due.notify_one();
        }
        count
    }
}
