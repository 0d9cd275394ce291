//! The connections that the server has opened to clients: which one carries a response (DHTTP §V), and which are
//! closed when there is no room.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::Path;
use super::ring::GlobalId;
use crate::wire::RequestId;

/// Names a connection that the server opened; never used twice by one server.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ConnectionId(u64);

/// Bounds of the connections to clients.
#[derive(Clone, Debug)]
pub struct ConnectionLimits {
    /// Most connections in all, open or being opened.
    pub total: usize,
    /// Most connections to one client address.
    pub per_client: usize,
    /// Most responses that wait for one connection.
    pub pending: usize,
    /// How long a connection is kept without a response on it.
    pub idle_timeout: Duration,
    /// How long a client may take to accept a connection.
    pub connect_timeout: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            total: 10_000,
            per_client: 3,
            pending: 64,
            idle_timeout: Duration::from_secs(15),
            connect_timeout: Duration::from_secs(3),
        }
    }
}

/// How many written responses are remembered in case their connection breaks.
const SENT_REMEMBERED: usize = 16;

/// The client's TCP channel, and the server's address where there are several: what came from another one would be taken
/// for a cache's.
type Ends = (SocketAddr, Option<IpAddr>);

/// A response that a connection owes: the request's id and the address its datagram came from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Owed {
    pub client: SocketAddr,
    /// The server's address that it asked, where there are several.
    pub local: Option<IpAddr>,
    pub id: RequestId,
}

impl Owed {
    pub fn path(&self) -> Path {
        Path { client: self.client, local: self.local }
    }

    pub fn global_id(&self) -> GlobalId {
        (self.client.ip(), self.id)
    }
}

/// A response that was written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Sent {
    pub owed: Owed,
    pub at: Instant,
}

#[derive(Debug)]
struct Connection {
    ends: Ends,
    open: bool,
    owed: VecDeque<Owed>,
    /// The last responses written: they may not have reached the client if the connection breaks.
    sent: VecDeque<Sent>,
    /// While being opened, when that has failed; while idle, when it is closed; meaningless while busy.
    deadline: Instant,
}

/// What carries a response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Choice {
    Existing(ConnectionId),
    /// One that is yet to be opened, and the one that was closed to make room for it.
    New(ConnectionId, Option<ConnectionId>),
    None,
}

#[derive(Debug)]
pub(super) struct Connections {
    limits: ConnectionLimits,
    all: HashMap<ConnectionId, Connection>,
    /// Never holds an empty list.
    by_peer: HashMap<Ends, Vec<ConnectionId>>,
    /// Never holds a zero.
    by_client: HashMap<IpAddr, usize>,
    connecting: BTreeSet<(Instant, ConnectionId)>,
    /// Least recently used first, because every idle connection waits equally long.
    idle: BTreeSet<(Instant, ConnectionId)>,
    next: u64,
}

impl Connections {
    pub fn new(limits: ConnectionLimits) -> Self {
        Self {
            limits,
            all: HashMap::new(),
            by_peer: HashMap::new(),
            by_client: HashMap::new(),
            connecting: BTreeSet::new(),
            idle: BTreeSet::new(),
            next: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether every response has been written.
    pub fn owe_nothing(&self) -> bool {
        self.all.values().all(|connection| connection.owed.is_empty())
    }

    /// Chooses what carries the response `owed` to `peer`, the client's TCP channel (DHTTP §V): an idle connection;
    /// else a new one; else the one with the fewest responses waiting. When the limit on all connections is reached, a
    /// client that has none takes the place of the connection that was idle longest.
    pub fn assign(&mut self, peer: SocketAddr, owed: Owed, now: Instant) -> Choice {
        let ends = (peer, owed.local);
        let to_peer = self.by_peer.get(&ends).map_or(&[][..], Vec::as_slice);
        let least_busy = to_peer
            .iter()
            .map(|id| (self.all.get(id).map_or(usize::MAX, |connection| connection.owed.len()), *id))
            .min();
        let below_client_limit =
            self.by_client.get(&peer.ip()).copied().unwrap_or(0) < self.limits.per_client;
        match least_busy {
            Some((0, id)) => self.owe(id, owed),
            _ if below_client_limit && self.all.len() < self.limits.total => {
                Choice::New(self.open(ends, owed, now), None)
            }
            Some((waiting, id)) if waiting < self.limits.pending => self.owe(id, owed),
            None if below_client_limit => match self.idle.first().copied() {
                Some((_, evicted)) => {
                    self.remove(evicted);
                    Choice::New(self.open(ends, owed, now), Some(evicted))
                }
                None => Choice::None,
            },
            _ => Choice::None,
        }
    }

    fn owe(&mut self, id: ConnectionId, owed: Owed) -> Choice {
        if let Some(connection) = self.all.get_mut(&id) {
            if connection.open && connection.owed.is_empty() {
                self.idle.remove(&(connection.deadline, id));
            }
            connection.owed.push_back(owed);
        }
        Choice::Existing(id)
    }

    fn open(&mut self, ends: Ends, owed: Owed, now: Instant) -> ConnectionId {
        let id = ConnectionId(self.next);
        self.next += 1;
        let deadline = now + self.limits.connect_timeout;
        self.all.insert(
            id,
            Connection { ends, open: false, owed: VecDeque::from([owed]), sent: VecDeque::new(), deadline },
        );
        self.by_peer.entry(ends).or_default().push(id);
        *self.by_client.entry(ends.0.ip()).or_default() += 1;
        self.connecting.insert((deadline, id));
        id
    }

    pub fn on_open(&mut self, id: ConnectionId, now: Instant) {
        let Some(connection) = self.all.get_mut(&id) else { return };
        if !connection.open {
            self.connecting.remove(&(connection.deadline, id));
            connection.open = true;
            self.rest(id, now);
        }
    }

    /// The response to `request` has been written.
    pub fn on_sent(&mut self, id: ConnectionId, request: RequestId, now: Instant) {
        let Some(connection) = self.all.get_mut(&id) else { return };
        if let Some(place) = connection.owed.iter().position(|owed| owed.id == request) {
            if connection.sent.len() == SENT_REMEMBERED {
                connection.sent.pop_front();
            }
            connection.sent.extend(connection.owed.remove(place).map(|owed| Sent { owed, at: now }));
            self.rest(id, now);
        }
    }

    /// Starts the idle timer of a connection that owes nothing.
    fn rest(&mut self, id: ConnectionId, now: Instant) {
        if let Some(connection) = self.all.get_mut(&id).filter(|c| c.open && c.owed.is_empty()) {
            connection.deadline = now + self.limits.idle_timeout;
            self.idle.insert((connection.deadline, id));
        }
    }

    /// Forgets a connection; the responses that it still owes, and those that it wrote last.
    pub fn remove(&mut self, id: ConnectionId) -> Option<(VecDeque<Owed>, VecDeque<Sent>)> {
        let connection = self.all.remove(&id)?;
        self.idle.remove(&(connection.deadline, id));
        self.connecting.remove(&(connection.deadline, id));
        if let Some(list) = self.by_peer.get_mut(&connection.ends) {
            list.retain(|other| *other != id);
            if list.is_empty() {
                self.by_peer.remove(&connection.ends);
            }
        }
        if let Some(count) = self.by_client.get_mut(&connection.ends.0.ip()) {
            *count -= 1;
            if *count == 0 {
                self.by_client.remove(&connection.ends.0.ip());
            }
        }
        Some((connection.owed, connection.sent))
    }

    /// The next connection that was idle too long, or was not accepted in time.
    pub fn expired(&self, now: Instant) -> Option<(ConnectionId, Expiry)> {
        let idle = self.idle.first().filter(|(deadline, _)| *deadline <= now);
        let connecting = self.connecting.first().filter(|(deadline, _)| *deadline <= now);
        idle.map(|(_, id)| (*id, Expiry::Idle))
            .or_else(|| connecting.map(|(_, id)| (*id, Expiry::NotAccepted)))
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let first = |set: &BTreeSet<(Instant, ConnectionId)>| set.first().map(|(deadline, _)| *deadline);
        first(&self.idle).into_iter().chain(first(&self.connecting)).min()
    }

    /// That the indexes agree with each other and with the limits.
    pub fn check_invariants(&self) {
        assert!(self.all.len() <= self.limits.total);
        assert_eq!(self.by_peer.values().map(Vec::len).sum::<usize>(), self.all.len());
        assert_eq!(self.by_client.values().sum::<usize>(), self.all.len());
        assert!(self.by_client.values().all(|count| (1..=self.limits.per_client).contains(count)));
        assert!(self.by_peer.values().all(|list| !list.is_empty()));
        for (id, connection) in &self.all {
            let at = (connection.deadline, *id);
            assert!(connection.owed.len() <= self.limits.pending.max(1));
            assert_eq!(self.connecting.contains(&at), !connection.open);
            assert_eq!(self.idle.contains(&at), connection.open && connection.owed.is_empty());
        }
        assert!(self.idle.len() + self.connecting.len() <= self.all.len());
    }
}

/// Why a connection's time is over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Expiry {
    Idle,
    NotAccepted,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(host: u8, port: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, host], port))
    }

    fn owed(n: u64) -> Owed {
        Owed { client: peer(1, 50_000), local: None, id: RequestId(n.to_be_bytes()) }
    }

    fn limits() -> ConnectionLimits {
        ConnectionLimits { total: 2, per_client: 2, pending: 2, ..ConnectionLimits::default() }
    }

    fn opened(choice: Choice) -> ConnectionId {
        match choice {
            Choice::New(id, _) => id,
            other => panic!("no new connection: {other:?}"),
        }
    }

    #[test]
    fn an_idle_connection_is_used_again_and_a_busy_one_is_not() {
        let now = Instant::now();
        let mut connections = Connections::new(limits());
        let first = opened(connections.assign(peer(1, 40_000), owed(1), now));
        connections.on_open(first, now);
        let second = opened(connections.assign(peer(1, 40_000), owed(2), now));
        connections.on_sent(first, owed(1).id, now);
        assert_eq!(connections.assign(peer(1, 40_000), owed(3), now), Choice::Existing(first));
        assert_ne!(first, second);
        connections.check_invariants();
    }

    #[test]
    fn at_the_limit_a_response_waits_for_the_least_busy_connection_until_that_is_full() {
        let now = Instant::now();
        let mut connections = Connections::new(limits());
        let first = opened(connections.assign(peer(1, 40_000), owed(1), now));
        let second = opened(connections.assign(peer(1, 40_000), owed(2), now));
        assert_eq!(connections.assign(peer(1, 40_000), owed(3), now), Choice::Existing(first));
        assert_eq!(connections.assign(peer(1, 40_000), owed(4), now), Choice::Existing(second));
        assert_eq!(connections.assign(peer(1, 40_000), owed(5), now), Choice::None);
        connections.check_invariants();
    }

    #[test]
    fn a_client_without_a_connection_takes_the_place_of_the_longest_idle_one() {
        let now = Instant::now();
        let mut connections = Connections::new(limits());
        let first = opened(connections.assign(peer(1, 40_000), owed(1), now));
        let second = opened(connections.assign(peer(2, 40_000), owed(2), now));
        assert_eq!(connections.assign(peer(3, 40_000), owed(3), now), Choice::None, "both are busy");
        for (id, request) in [(second, owed(2)), (first, owed(1))] {
            connections.on_open(id, now);
            connections.on_sent(id, request.id, now + Duration::from_secs(if id == first { 2 } else { 1 }));
        }
        let choice = connections.assign(peer(3, 40_000), owed(3), now + Duration::from_secs(3));
        assert!(matches!(choice, Choice::New(_, Some(evicted)) if evicted == second), "{choice:?}");
        connections.check_invariants();
    }

    #[test]
    fn a_client_with_other_ports_has_one_limit() {
        let now = Instant::now();
        let mut connections = Connections::new(ConnectionLimits { total: 10, ..limits() });
        opened(connections.assign(peer(1, 40_000), owed(1), now));
        opened(connections.assign(peer(1, 40_001), owed(2), now));
        assert_eq!(connections.assign(peer(1, 40_002), owed(3), now), Choice::None);
        connections.check_invariants();
    }

    #[test]
    fn idle_and_unaccepted_connections_expire() {
        let now = Instant::now();
        let mut connections = Connections::new(limits());
        let idle = opened(connections.assign(peer(1, 40_000), owed(1), now));
        connections.on_open(idle, now);
        connections.on_sent(idle, owed(1).id, now);
        let connecting = opened(connections.assign(peer(2, 40_000), owed(2), now));
        assert_eq!(connections.next_deadline(), Some(now + Duration::from_secs(3)));
        assert_eq!(
            connections.expired(now + Duration::from_secs(3)),
            Some((connecting, Expiry::NotAccepted))
        );
        assert_eq!(connections.remove(connecting), Some((VecDeque::from([owed(2)]), VecDeque::new())));
        assert_eq!(connections.expired(now + Duration::from_secs(14)), None);
        assert_eq!(connections.expired(now + Duration::from_secs(15)), Some((idle, Expiry::Idle)));
        connections.check_invariants();
    }
}
