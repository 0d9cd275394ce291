//! A client's connection in a keeper.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use crate::keeper::list::{Place, Places};
use crate::keeper::whole::Whole;
use crate::neighbours::monotonic_ns;
use crate::wire::{Bundle, Id, UNKNOWN_END};

/// What a connection is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Phase {
    /// Being looked at, in no list.
    Reading,
    /// A request has begun, or the connection is new.
    Incomplete,
    /// Between requests.
    Idle,
    /// A whole request waits to be handed on.
    Queued,
    /// Handed on.
    Handed,
}

/// A client's connection.
#[derive(Debug)]
pub struct Connection {
    pub socket: OwnedFd,
    pub peer: SocketAddr,
    pub slot: u32,
    pub phase: Phase,
    /// When the phase began.
    pub since: Instant,
    /// Its place in the tree of incomplete connections.
    pub ticket: Option<u64>,
    /// Whether epoll knows the socket.
    pub is_watched: bool,
    /// Whether epoll reports each arrival, not only the next.
    pub is_followed: bool,
    /// Whether nothing is to be reported of it although epoll knows it.
    pub is_muted: bool,
    /// Whether the client has ended its side.
    pub is_half_closed: bool,
    /// Whether what it has sent was refused, and more may come.
    pub is_refused: bool,
    /// More than the request is on the socket, or may be by its end: the next one may not be reported.
    pub has_more: bool,
    /// Whether a request of it was served before.
    pub has_served: bool,
    /// How often its incomplete request was looked at.
    pub looks: u8,
    /// Whether its socket's buffer was made large enough for an incomplete request.
    pub has_room: bool,
    /// Whether it has leave to send the content of its request.
    pub has_leave: bool,
    /// Whether more of a request that drips in has arrived since the last look.
    pub has_dripped: bool,
    /// The last presentation's, among those handed on.
    pub number: u64,
    /// How often the request was handed more than once.
    pub again: u8,
    /// Whether its next request is this keeper's to find, although another was to keep it: that one is no more.
    pub comes_back: bool,
    /// The last presentation.
    pub id: Option<Id>,
    /// What is handed on, kept until the server is done, to be handed again.
    pub bundle: Option<Box<Bundle>>,
    serial: u32,
    place: Place,
}

impl Connection {
    pub fn new(socket: OwnedFd, peer: SocketAddr, slot: u32, now: Instant) -> Self {
        Self {
            socket,
            peer: SocketAddr::new(peer.ip().to_canonical(), peer.port()),
            slot,
            phase: Phase::Reading,
            since: now,
            ticket: None,
            is_watched: false,
            is_followed: false,
            is_muted: false,
            is_half_closed: false,
            is_refused: false,
            has_more: false,
            has_served: false,
            looks: 0,
            has_room: false,
            has_leave: false,
            has_dripped: false,
            number: 0,
            again: 0,
            comes_back: false,
            id: None,
            bundle: None,
            serial: 0,
            place: Place::default(),
        }
    }

    /// A connection whose first request comes from the upstream neighbour.
    pub fn from_request(bundle: Bundle, socket: OwnedFd, now: Instant) -> Self {
        let mut connection = Self::new(socket, bundle.peer, bundle.id.slot, now);
        connection.phase = Phase::Queued;
        connection.id = Some(bundle.id);
        connection.bundle = Some(Box::new(bundle));
        connection
    }

    pub fn key(&self, index: u32) -> u64 {
        u64::from(self.serial) << 32 | u64::from(index)
    }

    pub fn is_reading(&self) -> bool {
        matches!(self.phase, Phase::Reading | Phase::Incomplete | Phase::Idle)
    }

    /// A request is whole; `seen` starts with it.
    pub fn arrived(&mut self, whole: Whole, seen: &[u8]) {
        let head = &seen[..(whole.head_bytes as usize).min(seen.len())];
        self.has_more = whole.socket_bytes == UNKNOWN_END || seen.len() as u64 > whole.socket_bytes;
        let id = Id { slot: self.slot, generation: 0 };
        self.bundle = Some(Box::new(Bundle {
            id,
            flags: whole.flags,
            peer: self.peer,
            socket_bytes: whole.socket_bytes,
            arrived_ns: monotonic_ns(),
            replaces: 0,
            head_bytes: whole.head_bytes,
            request: head.to_vec(),
        }));
    }

    /// Whether its client may be sending, or be about to send, what nobody will read: content of its request.
    pub fn may_send_in_vain(&self) -> bool {
        self.is_refused || self.bundle.as_deref().is_some_and(Bundle::has_content)
    }

    /// The request got its identity and waits in the queue.
    pub fn presented(&mut self, id: Id) {
        self.id = Some(id);
        if let Some(bundle) = &mut self.bundle {
            bundle.id = id;
        }
        self.phase = Phase::Queued;
        self.looks = 0;
        self.has_leave = false;
        self.again = 0;
        self.comes_back = false;
    }

    /// The server is done with the request, and the connection goes on.
    pub fn served(&mut self, now: Instant) {
        self.phase = Phase::Reading;
        self.since = now;
        self.has_served = true;
        self.looks = 0;
        self.bundle = None;
    }
}

/// All connections of a keeper, by index; a key also tells apart those that had the same index.
#[derive(Debug, Default)]
pub struct Connections {
    slots: Vec<Option<Connection>>,
    free: Vec<u32>,
    next_serial: u32,
    pub last_drip: Option<Instant>,
}

impl Connections {
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub fn insert(&mut self, mut connection: Connection) -> u64 {
        // The upper half of a key is never all ones, so that no key is one of the keeper's own.
        self.next_serial = (self.next_serial + 1) % (u32::MAX - 1);
        connection.serial = self.next_serial;
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(None);
                (self.slots.len() - 1) as u32
            }
        };
        let key = connection.key(index);
        self.slots[index as usize] = Some(connection);
        key
    }

    pub fn by_index(&mut self, index: u32) -> Option<&mut Connection> {
        self.slots.get_mut(index as usize)?.as_mut()
    }

    pub fn get(&mut self, key: u64) -> Option<&mut Connection> {
        self.by_index(key as u32).filter(|connection| connection.serial == (key >> 32) as u32)
    }

    pub fn remove(&mut self, index: u32) -> Option<Connection> {
        let connection = self.slots.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(connection)
    }

    /// Every connection and its index.
    pub fn all(&self) -> impl Iterator<Item = (u32, &Connection)> + Clone {
        (0..).zip(&self.slots).filter_map(|(index, slot)| Some((index, slot.as_ref()?)))
    }

    /// Indexes of the connections in a phase.
    pub fn indexes(&self, phase: Phase) -> Vec<u32> {
        self.all().filter(|(_, connection)| connection.phase == phase).map(|(index, _)| index).collect()
    }
}

impl Places for Connections {
    fn place(&mut self, index: u32) -> &mut Place {
        // Only connections that exist are in lists; a place for one that does not would be our own fault.
        &mut self.slots[index as usize].as_mut().expect("a connection in a list").place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of an upload whose end is not known, the next request was found a second or two after it had come.
    #[test]
    fn what_may_be_more_than_a_request_counts_as_more() {
        let socket = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let mut connection = Connection::new(socket, ([127, 0, 0, 1], 1).into(), 0, Instant::now());
        for (socket_bytes, has_more) in [(4, false), (3, true), (9, false), (UNKNOWN_END, true)] {
            connection.arrived(Whole { head_bytes: 3, socket_bytes, flags: 0 }, b"seen");
            assert_eq!(connection.has_more, has_more, "{socket_bytes}");
        }
    }
}
