//! Connections come in, from the listening socket or from the upstream neighbour, and end; out of descriptors, others
//! make room for them.

use std::os::fd::{AsFd, OwnedFd};

use crate::keeper::connection::Connection;
use crate::keeper::{Flow, Keeper, SWEEP};
use crate::ledger::{SLOTS, State};
use crate::link::{self, Received, Request};
use crate::neighbours::{FilterError, Sent, discard_unread};
use crate::wire::Notice;

impl Keeper {
    pub(super) fn accept(&mut self, listener: usize) {
        for _ in 0..64 {
            let Some(listener) = self.place.listeners.get(listener) else { return };
            let flags = rustix::net::SocketFlags::CLOEXEC;
            match rustix::net::acceptfrom_with(listener, flags) {
                Ok((socket, peer)) => {
                    let Some(peer) = peer.and_then(|peer| std::net::SocketAddr::try_from(peer).ok()) else {
                        continue;
                    };
                    self.counters.accepted_total.add(1);
                    let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
                    // HTTP knows no urgent data: to every program of the chain, and to the server, it is what it is to
                    // a reader that knows none either, a byte like others in its place.
                    let _ = rustix::net::sockopt::set_socket_oobinline(&socket, true);
                    if !self.make_room() {
                        self.counters.refused_total.add(1);
                        continue;
                    }
                    let Some(slot) = self.free_slot() else {
                        self.counters.refused_total.add(1);
                        continue;
                    };
                    let key = self.admit(Connection::new(socket, peer, slot, self.now));
                    self.look(key);
                }
                Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                    if !self.end_one_under_pressure() {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }

    fn free_slot(&mut self) -> Option<u32> {
        for _ in 0..SLOTS {
            let slot = self.next_slot;
            self.next_slot = (self.next_slot + 1) % SLOTS;
            if !self.by_slot.contains_key(&slot) && self.place.ledger.take(slot) {
                return Some(slot);
            }
        }
        None
    }

    /// Room for one more connection.
    fn make_room(&mut self) -> bool {
        self.connections.len() + self.draining.len() < self.settings.most || self.end_one_under_pressure()
    }

    /// Out of descriptors: what is over goes first, then the idlest connection; then one that is incomplete, along the
    /// heaviest path of the tree over the address (§4.2).
    fn end_one_under_pressure(&mut self) -> bool {
        if self.draining.give_up_one() {
            return true;
        }
        if self.idle.first().is_none() && self.now >= self.next_forced_sweep {
            // Connections that became idle since the last look.
            self.next_forced_sweep = self.now + SWEEP / 10;
            self.sweep_older(std::time::Duration::ZERO);
        }
        if let Some(index) = self.idle.first() {
            self.counters.pressed_idle_total.add(1);
            self.end(index);
            return true;
        }
        if let Some((_, index)) = self.weights.pop_heaviest() {
            self.counters.pressed_incomplete_total.add(1);
            if let Some(connection) = self.connections.by_index(index) {
                connection.ticket = None;
            }
            self.end(index);
            return true;
        }
        false
    }

    fn admit(&mut self, connection: Connection) -> u64 {
        let slot = connection.slot;
        let key = self.connections.insert(connection);
        self.by_slot.insert(slot, key as u32);
        self.counters.connections.add(1);
        key
    }

    pub(super) fn take_bundles(&mut self) -> Result<Flow, FilterError> {
        for _ in 0..64 {
            let Some(upstream) = &self.place.upstream else { break };
            match link::receive(upstream.as_fd(), true, true) {
                Ok(Received::Request(request)) => self.take_in(request),
                Ok(Received::Nothing) => break,
                Ok(Received::Gone) => return Ok(Flow::Break(())),
                Ok(Received::Refused(_)) => self.counters.refused_total.add(1),
                Ok(Received::OutOfDescriptors(bundle)) => {
                    self.end_one_under_pressure();
                    self.place.tell_upstream(Notice::HandAgain(bundle.id));
                }
                Err(_) => break,
            }
        }
        Ok(Flow::Continue(()))
    }

    fn take_in(&mut self, request: Request) {
        let Request { bundle, socket } = request;
        // An older copy of a request that is here, or that a server has.
        if !self.place.ledger.is_held(bundle.id) {
            return;
        }
        if let Some(&index) = self.by_slot.get(&bundle.id.slot) {
            let same =
                self.connections.by_index(index).is_some_and(|connection| connection.id == Some(bundle.id));
            if same {
                return;
            }
            self.forget(index);
        }
        if !self.make_room() {
            self.counters.refused_total.add(1);
            self.place.ledger.end(bundle.id);
            self.place.tell_upstream(Notice::ClosedForAll(bundle.id));
            return;
        }
        self.counters.accepted_total.add(1);
        let connection = Connection::from_request(bundle, socket, self.now);
        let key = self.admit(connection);
        self.queue.push_back(key);
    }

    /// Ends a connection for everybody.
    pub(super) fn end(&mut self, index: u32) {
        let Some(connection) = self.connections.by_index(index) else { return };
        let (slot, id) = (connection.slot, connection.id);
        let mut drains = false;
        let is_last_to_hold = self.place.keeps && self.place.ledger.state(slot).1 != State::Accepted;
        if connection.is_refused || is_last_to_hold {
            // Filters that have not learned of the last request's end hold the socket a moment longer.
            let _ = rustix::net::shutdown(&connection.socket, rustix::net::Shutdown::Write);
            // Requests that nobody will answer: unread, they would turn the close into a reset, which destroys the end
            // of the last response under way.
            let sent = discard_unread(connection.socket.as_fd());
            drains = sent != Sent::All && connection.may_send_in_vain();
        }
        if let Some(socket) = self.forget(index).filter(|_| drains) {
            self.draining.add(socket, self.now);
        }
        if self.place.upstream.is_none() {
            self.place.ledger.free(slot);
        } else if let Some(id) = id {
            self.place.ledger.end(id);
            self.place.tell_upstream(Notice::ClosedForAll(id));
        }
    }

    /// Gives this process's handle up.
    pub(super) fn forget(&mut self, index: u32) -> Option<OwnedFd> {
        self.leave_lists(index);
        let connection = self.connections.remove(index)?;
        self.by_slot.remove(&connection.slot);
        self.counters.connections.sub(1);
        if connection.is_watched {
            self.poller.remove(connection.socket.as_fd());
        }
        Some(connection.socket)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::arguments::Arguments;
    use crate::keeper::{PERSIST_ARGUMENTS, Settings};
    use crate::neighbours::tests::Neighbours;

    /// They hold descriptors like any other.
    #[test]
    fn connections_that_are_over_and_still_drained_are_counted_and_make_room_first() {
        for (most, left) in [(1, 0), (2, 1)] {
            let (place, neighbours) = Neighbours::around();
            let arguments = Arguments::parse(&format!("connections={most}"), PERSIST_ARGUMENTS).unwrap();
            let mut keeper = Keeper::new(place, Settings::read(&arguments, false).unwrap()).unwrap();
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            keeper.draining.add(listener.accept().unwrap().0.into(), keeper.now);
            neighbours.present();
            assert!(keeper.take_bundles().unwrap().is_continue());
            assert_eq!((keeper.connections.len(), keeper.draining.len()), (1, left), "of {most}");
        }
    }
}
