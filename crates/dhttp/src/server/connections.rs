//! The connections that the server has opened to clients: which one carries a response (DHTTP §V), and which are
//! closed when there is no room.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::Path;
use super::ring::GlobalId;
use super::unreachable::Unreachable;
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
    /// Most responses that wait for a client's connections, all of which are busy.
    pub pending: usize,
    /// How long a connection is kept without a response on it.
    pub idle_timeout: Duration,
    /// How long a client may take to accept a connection.
    pub connect_timeout: Duration,
    /// How long no connection is opened to a client's TCP channel that refused one, and to a client that did not
    /// answer.
    pub unreachable_for: Duration,
    /// Where they are remembered: one memory for all cores.
    pub unreachable: Unreachable,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            total: 10_000,
            per_client: 3,
            pending: 192,
            idle_timeout: Duration::from_secs(15),
            connect_timeout: Duration::from_secs(3),
            unreachable_for: Duration::from_secs(60),
            unreachable: Unreachable::default(),
        }
    }
}

/// How many written responses are remembered in case their connection breaks.
const SENT_REMEMBERED: usize = 16;

/// The client's TCP channel, and the server's address where there are several: what came from another one would be
/// taken for a cache's.
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

/// What a connection is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    /// The client has not accepted it yet.
    Opening,
    Idle,
    /// It is about to ask for a response.
    Called,
    Carrying(Owed),
}

#[derive(Debug)]
struct Connection {
    ends: Ends,
    state: State,
    /// The last responses written: they may not have reached the client if the connection breaks.
    sent: VecDeque<Sent>,
    /// While being opened, when that has failed; while idle, when it is closed; meaningless while busy.
    deadline: Instant,
}

/// A client's TCP channel.
#[derive(Debug, Default)]
struct Peer {
    /// Never empty.
    connections: Vec<ConnectionId>,
    /// Responses that the first of the connections will carry that has nothing else to do.
    waiting: VecDeque<Owed>,
}

/// What carries a response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Choice {
    /// This one, which was idle.
    Idle(ConnectionId),
    /// One that is yet to be opened, and the one that was closed to make room for it.
    New(ConnectionId, Option<ConnectionId>),
    /// Whichever has nothing else to do first.
    Queued,
    /// The client did not accept a connection a moment ago.
    Unreachable,
    /// There are too many.
    None,
}

/// What a connection leaves behind.
#[derive(Debug, Default, Eq, PartialEq)]
pub(super) struct Remains {
    /// Responses that no connection will carry.
    pub owed: Vec<Owed>,
    /// Those that it wrote last.
    pub sent: VecDeque<Sent>,
}

#[derive(Debug)]
pub(super) struct Connections {
    limits: ConnectionLimits,
    all: HashMap<ConnectionId, Connection>,
    peers: HashMap<Ends, Peer>,
    /// Never holds a zero.
    by_client: HashMap<IpAddr, usize>,
    opening: BTreeSet<(Instant, ConnectionId)>,
    /// Least recently used first, because every idle connection waits equally long.
    idle: BTreeSet<(Instant, ConnectionId)>,
    next: u64,
}

impl Connections {
    pub fn new(limits: ConnectionLimits) -> Self {
        Self {
            all: HashMap::new(),
            peers: HashMap::new(),
            by_client: HashMap::new(),
            opening: BTreeSet::new(),
            idle: BTreeSet::new(),
            limits,
            next: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether every response has been written.
    pub fn owe_nothing(&self) -> bool {
        self.all.values().all(|connection| !matches!(connection.state, State::Carrying(_)))
            && self.peers.values().all(|peer| peer.waiting.is_empty())
    }

    /// Chooses what carries the response `owed` to `peer`, the client's TCP channel (DHTTP §V): an idle connection;
    /// else a new one; else whichever is free first. When the limit on all connections is reached, a client that has
    /// none takes the place of the connection that was idle longest.
    pub fn assign(&mut self, peer: SocketAddr, owed: Owed, now: Instant) -> Choice {
        let ends = (peer, owed.local);
        let is_below_limit = self.by_client.get(&peer.ip()).copied().unwrap_or(0) < self.limits.per_client;
        let Some(known) = self.peers.get_mut(&ends) else {
            if self.limits.unreachable.has(peer, now) {
                return Choice::Unreachable;
            }
            if !is_below_limit {
                return Choice::None;
            }
            let mut evicted = None;
            if self.all.len() >= self.limits.total {
                evicted = self.idle.first().map(|(_, id)| *id);
                let Some(evicted) = evicted else { return Choice::None };
                self.remove(evicted);
            }
            return Choice::New(self.open(ends, owed, now), evicted);
        };
        let states = known.connections.iter().filter_map(|id| Some((*id, self.all.get(id)?.state)));
        let (mut idle, mut soon_free) = (None, 0);
        for (id, state) in states {
            match state {
                State::Idle => idle = idle.or(Some(id)),
                State::Opening | State::Called => soon_free += 1,
                State::Carrying(_) => {}
            }
        }
        if let Some(id) = idle {
            known.waiting.push_back(owed);
            if let Some(connection) = self.all.get_mut(&id) {
                self.idle.remove(&(connection.deadline, id));
                connection.state = State::Called;
            }
            return Choice::Idle(id);
        }
        if soon_free <= known.waiting.len() && is_below_limit && self.all.len() < self.limits.total {
            return Choice::New(self.open(ends, owed, now), None);
        }
        if known.waiting.len() >= self.limits.pending {
            return Choice::None;
        }
        known.waiting.push_back(owed);
        Choice::Queued
    }

    /// If the client never accepted the connection, none is opened to it for some time: to its TCP channel if it was
    /// refused there, to none if it keeps silent.
    pub fn on_failed(&mut self, id: ConnectionId, silent: bool, now: Instant) {
        let Some(connection) = self.all.get(&id).filter(|connection| connection.state == State::Opening)
        else {
            return;
        };
        let (peer, _) = connection.ends;
        self.limits.unreachable.on_failed(peer, silent, now + self.limits.unreachable_for, now);
    }

    fn open(&mut self, ends: Ends, owed: Owed, now: Instant) -> ConnectionId {
        let id = ConnectionId(self.next);
        self.next += 1;
        let deadline = now + self.limits.connect_timeout;
        self.all.insert(id, Connection { ends, state: State::Opening, sent: VecDeque::new(), deadline });
        let peer = self.peers.entry(ends).or_default();
        peer.connections.push(id);
        peer.waiting.push_back(owed);
        *self.by_client.entry(ends.0.ip()).or_default() += 1;
        self.opening.insert((deadline, id));
        id
    }

    /// The connection is open, and what it carried has been written: what it carries next. `None`: it is idle.
    pub fn next(&mut self, id: ConnectionId, now: Instant) -> Option<Owed> {
        let connection = self.all.get_mut(&id)?;
        match connection.state {
            State::Opening => {
                self.opening.remove(&(connection.deadline, id));
                self.limits.unreachable.on_accepted(connection.ends.0.ip(), now);
            }
            State::Idle => {
                self.idle.remove(&(connection.deadline, id));
            }
            State::Called => {}
            State::Carrying(owed) => {
                if connection.sent.len() == SENT_REMEMBERED {
                    connection.sent.pop_front();
                }
                connection.sent.push_back(Sent { owed, at: now });
            }
        }
        let next = self.peers.get_mut(&connection.ends).and_then(|peer| peer.waiting.pop_front());
        if let Some(owed) = next {
            connection.state = State::Carrying(owed);
        } else {
            connection.state = State::Idle;
            connection.deadline = now + self.limits.idle_timeout;
            self.idle.insert((connection.deadline, id));
        }
        next
    }

    /// Forgets a connection. What waits for its client's connections goes with the last of them.
    pub fn remove(&mut self, id: ConnectionId) -> Option<Remains> {
        let connection = self.all.remove(&id)?;
        self.idle.remove(&(connection.deadline, id));
        self.opening.remove(&(connection.deadline, id));
        let mut owed = Vec::new();
        if let State::Carrying(carried) = connection.state {
            owed.push(carried);
        }
        if let Some(peer) = self.peers.get_mut(&connection.ends) {
            peer.connections.retain(|other| *other != id);
            if peer.connections.is_empty() {
                owed.extend(peer.waiting.drain(..));
                self.peers.remove(&connection.ends);
            }
        }
        if let Some(count) = self.by_client.get_mut(&connection.ends.0.ip()) {
            *count -= 1;
            if *count == 0 {
                self.by_client.remove(&connection.ends.0.ip());
            }
        }
        Some(Remains { owed, sent: connection.sent })
    }

    /// The next connection that was idle too long, or was not accepted in time.
    pub fn expired(&self, now: Instant) -> Option<(ConnectionId, Expiry)> {
        let idle = self.idle.first().filter(|(deadline, _)| *deadline <= now);
        let opening = self.opening.first().filter(|(deadline, _)| *deadline <= now);
        idle.map(|(_, id)| (*id, Expiry::Idle)).or_else(|| opening.map(|(_, id)| (*id, Expiry::NotAccepted)))
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let first = |set: &BTreeSet<(Instant, ConnectionId)>| set.first().map(|(deadline, _)| *deadline);
        first(&self.idle).into_iter().chain(first(&self.opening)).min()
    }

    /// That the indexes agree with each other and with the limits.
    pub fn check_invariants(&self) {
        assert!(self.all.len() <= self.limits.total);
        assert_eq!(self.peers.values().map(|peer| peer.connections.len()).sum::<usize>(), self.all.len());
        assert_eq!(self.by_client.values().sum::<usize>(), self.all.len());
        assert!(self.by_client.values().all(|count| (1..=self.limits.per_client).contains(count)));
        for peer in self.peers.values() {
            assert!(!peer.connections.is_empty());
            assert!(peer.waiting.len() <= self.limits.pending.max(self.limits.per_client));
        }
        for (id, connection) in &self.all {
            let at = (connection.deadline, *id);
            assert!(self.peers[&connection.ends].connections.contains(id));
            assert_eq!(self.opening.contains(&at), connection.state == State::Opening);
            assert_eq!(self.idle.contains(&at), connection.state == State::Idle);
        }
        assert!(self.idle.len() + self.opening.len() <= self.all.len());
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
    use super::super::unreachable::REFUSALS;
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
        assert_eq!(connections.next(first, now), Some(owed(1)));
        let second = opened(connections.assign(peer(1, 40_000), owed(2), now));
        assert_ne!(first, second);
        assert_eq!(connections.next(second, now), Some(owed(2)));
        assert_eq!(connections.next(first, now), None);
        assert_eq!(connections.assign(peer(1, 40_000), owed(3), now), Choice::Idle(first));
        assert_eq!(connections.next(first, now), Some(owed(3)));
        connections.check_invariants();
    }

    #[test]
    fn at_the_limit_responses_wait_for_whichever_connection_is_free_first() {
        let now = Instant::now();
        let mut connections = Connections::new(limits());
        let first = opened(connections.assign(peer(1, 40_000), owed(1), now));
        let second = opened(connections.assign(peer(1, 40_000), owed(2), now));
        assert_eq!(connections.next(first, now), Some(owed(1)));
        assert_eq!(connections.next(second, now), Some(owed(2)));
        assert_eq!(connections.assign(peer(1, 40_000), owed(3), now), Choice::Queued);
        assert_eq!(connections.assign(peer(1, 40_000), owed(4), now), Choice::Queued);
        assert_eq!(connections.assign(peer(1, 40_000), owed(5), now), Choice::None, "too many wait");
        // The first one has a long response to carry; the second takes what waits, in its order.
        assert_eq!(connections.next(second, now), Some(owed(3)));
        assert_eq!(connections.next(second, now), Some(owed(4)));
        assert_eq!(connections.next(second, now), None);
        connections.check_invariants();
    }

    #[test]
    fn a_response_does_not_wait_for_the_connection_that_was_opened_for_it() {
        let now = Instant::now();
        let mut connections = Connections::new(limits());
        let first = opened(connections.assign(peer(1, 40_000), owed(1), now));
        let second = opened(connections.assign(peer(1, 40_000), owed(2), now));
        assert_eq!(connections.next(first, now), Some(owed(1)));
        assert_eq!(connections.next(first, now), Some(owed(2)));
        // The second one is still being opened, and will have nothing to do.
        assert_eq!(connections.assign(peer(1, 40_000), owed(3), now), Choice::Queued);
        assert_eq!(connections.next(second, now), Some(owed(3)));
        connections.check_invariants();
    }

    #[test]
    fn what_waits_outlives_a_connection_unless_it_is_the_clients_last() {
        let now = Instant::now();
        let mut connections = Connections::new(limits());
        let first = opened(connections.assign(peer(1, 40_000), owed(1), now));
        let second = opened(connections.assign(peer(1, 40_000), owed(2), now));
        assert_eq!(connections.next(first, now), Some(owed(1)));
        let remains = connections.remove(first).unwrap();
        assert_eq!(remains.owed, [owed(1)], "what it carried");
        connections.check_invariants();
        assert_eq!(connections.remove(second).unwrap().owed, [owed(2)]);
        assert!(connections.owe_nothing());
        connections.check_invariants();
    }

    #[test]
    fn a_client_without_a_connection_takes_the_place_of_the_longest_idle_one() {
        let now = Instant::now();
        let mut connections = Connections::new(limits());
        let first = opened(connections.assign(peer(1, 40_000), owed(1), now));
        let second = opened(connections.assign(peer(2, 40_000), owed(2), now));
        assert_eq!(connections.assign(peer(3, 40_000), owed(3), now), Choice::None, "both are busy");
        for (id, after_s) in [(second, 1), (first, 2)] {
            assert!(connections.next(id, now).is_some());
            assert_eq!(connections.next(id, now + Duration::from_secs(after_s)), None);
        }
        let choice = connections.assign(peer(3, 40_000), owed(3), now + Duration::from_secs(3));
        assert!(matches!(choice, Choice::New(_, Some(evicted)) if evicted == second), "{choice:?}");
        connections.check_invariants();
    }

    #[test]
    fn a_channel_that_refused_a_connection_gets_none_for_some_time_and_others_do() {
        let now = Instant::now();
        let mut connections = Connections::new(limits());
        let refused = opened(connections.assign(peer(1, 40_000), owed(1), now));
        connections.on_failed(refused, false, now);
        connections.remove(refused);
        let minute = Duration::from_secs(60);
        let just_before = now + minute - Duration::from_millis(1);
        assert_eq!(connections.assign(peer(1, 40_000), owed(2), just_before), Choice::Unreachable);
        opened(connections.assign(peer(1, 40_001), owed(3), just_before));
        opened(connections.assign(peer(1, 40_000), owed(4), now + minute));
        connections.check_invariants();
    }

    #[test]
    fn a_client_that_keeps_silent_gets_no_connection_on_any_port() {
        let now = Instant::now();
        let mut connections =
            Connections::new(ConnectionLimits { unreachable: Unreachable::new(1), ..limits() });
        for request in [1, 2] {
            let silent = opened(connections.assign(peer(1, 40_000), owed(request), now));
            connections.on_failed(silent, true, now);
            connections.remove(silent);
        }
        assert_eq!(connections.assign(peer(1, 40_001), owed(2), now), Choice::Unreachable);
        // Another one pushes it out of a memory that holds one.
        let other = opened(connections.assign(peer(2, 40_000), owed(3), now));
        connections.on_failed(other, true, now);
        connections.check_invariants();
        opened(connections.assign(peer(1, 40_001), owed(4), now));
    }

    #[test]
    fn a_client_that_refuses_at_every_port_gets_some_syns_and_no_more() {
        let (mut now, many) = (Instant::now(), ConnectionLimits { total: 1000, ..limits() });
        let mut connections = Connections::new(many);
        let mut syns = 0;
        for port in 40_000..40_100 {
            if let Choice::New(id, _) = connections.assign(peer(1, port), owed(1), now) {
                syns += 1;
                connections.on_failed(id, false, now);
                connections.remove(id);
            }
            connections.check_invariants();
        }
        assert_eq!(syns, REFUSALS);
        let other = connections.assign(peer(2, 40_000), owed(1), now);
        assert!(matches!(other, Choice::New(..)), "another client");
        now += connections.limits.unreachable_for;
        let id = opened(connections.assign(peer(1, 41_000), owed(1), now));
        assert_eq!(connections.next(id, now), Some(owed(1)));
        assert!(!connections.limits.unreachable.has(peer(1, 40_000), now), "it has accepted one");
    }

    #[test]
    fn what_one_core_finds_out_about_a_firewall_the_others_know() {
        let now = Instant::now();
        let shared = ConnectionLimits { unreachable: Unreachable::default(), ..limits() };
        let mut cores = [Connections::new(shared.clone()), Connections::new(shared)];
        for (core, port) in [(0, 40_000), (1, 40_001)] {
            let silent = opened(cores[core].assign(peer(1, port), owed(1), now));
            cores[core].on_failed(silent, true, now);
            cores[core].remove(silent);
        }
        for core in &mut cores {
            assert_eq!(core.assign(peer(1, 40_002), owed(2), now), Choice::Unreachable);
        }
        assert!(matches!(Connections::new(limits()).assign(peer(1, 40_002), owed(2), now), Choice::New(..)));
    }

    #[test]
    fn a_syn_that_was_lost_now_and_then_does_not_make_a_client_unreachable() {
        let now = Instant::now();
        let mut connections = Connections::new(limits());
        for request in 0..10 {
            let lost = opened(connections.assign(peer(1, 40_000), owed(request), now));
            connections.on_failed(lost, true, now);
            connections.remove(lost);
            let open = opened(connections.assign(peer(1, 40_000), owed(request), now));
            assert!(connections.next(open, now).is_some());
            connections.remove(open);
        }
        connections.check_invariants();
    }

    #[test]
    fn a_connection_that_breaks_later_says_nothing_of_the_next_one() {
        let now = Instant::now();
        let mut connections = Connections::new(limits());
        let open = opened(connections.assign(peer(1, 40_000), owed(1), now));
        assert!(connections.next(open, now).is_some());
        connections.on_failed(open, false, now);
        connections.remove(open);
        opened(connections.assign(peer(1, 40_000), owed(2), now));
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
        assert_eq!(connections.next(idle, now), Some(owed(1)));
        assert_eq!(connections.next(idle, now), None);
        let connecting = opened(connections.assign(peer(2, 40_000), owed(2), now));
        assert_eq!(connections.next_deadline(), Some(now + Duration::from_secs(3)));
        assert_eq!(
            connections.expired(now + Duration::from_secs(3)),
            Some((connecting, Expiry::NotAccepted))
        );
        assert_eq!(connections.remove(connecting).unwrap().owed, [owed(2)]);
        assert_eq!(connections.expired(now + Duration::from_secs(14)), None);
        assert_eq!(connections.expired(now + Duration::from_secs(15)), Some((idle, Expiry::Idle)));
        connections.check_invariants();
    }
}
