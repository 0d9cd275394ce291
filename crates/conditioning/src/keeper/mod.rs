//! Holds clients' connections between requests: the filters `package`, which owns the listening socket, and `persist`,
//! which presents each request of a persistent connection as a connection of its own (§4.2).
//!
//! Requests stay in the kernel's socket buffer: a keeper peeks, and hands on the socket with a copy of the head. So a
//! request can be handed again as long as no server has claimed it, and a server needs no library to read it.

mod admission;
mod connection;
pub mod list;
mod outcome;
mod room;
mod settings;
mod watch;
pub mod whole;

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use crate::draining::Draining;
use crate::neighbours::{Downstream, FilterError, Place, Poller, TICK, say, word};
use crate::tree::AddressTree;
use connection::{Connections, Phase};

use list::List;
pub use settings::{Counters, PACKAGE_ARGUMENTS, PERSIST_ARGUMENTS, Settings};
use whole::{HEAD_BYTES, Reader};

const KEY_UPSTREAM: u64 = u64::MAX;
const KEY_DOWNSTREAM: u64 = u64::MAX - 1;
const KEY_CONTROL: u64 = u64::MAX - 2;
const LAST_LISTENER: u64 = u64::MAX - 3;
/// The first of the listening sockets' keys.
const KEY_LISTENERS: u64 = LAST_LISTENER + 1 - MOST_LISTENERS as u64;
/// Listening sockets that a chain may have.
pub(crate) const MOST_LISTENERS: usize = 16;
/// What the ledger knows and no notice said is looked for this often.
const SWEEP: Duration = TICK;
/// A request that drips in is looked at this often at most, and only when more of it arrived, so that each byte does
/// not cost a look at all before it.
const DRIP: Duration = Duration::from_millis(50);
/// Looks before a connection counts as dripping.
const PROMPT_LOOKS: u8 = 8;
const READ_ONCE: EventFlags = EventFlags::IN.union(EventFlags::RDHUP).union(EventFlags::ONESHOT);
/// What arrives is reported once: of a request that has begun, because what was peeked at is still there and would be
/// reported again and again; and while the server has the connection, because that is how its next request is found.
const READ_ALWAYS: EventFlags = EventFlags::IN.union(EventFlags::RDHUP).union(EventFlags::ET);

/// How a TLS handshake begins (RFC 8446 §5.1).
const TLS_RECORD: &[u8] = &[0x16, 0x03];

/// A keeper at work.
pub struct Keeper {
    place: Place,
    poller: Poller,
    settings: Settings,
    counters: Counters,
    connections: Connections,
    by_slot: HashMap<u32, u32>,
    /// Whole requests in the order in which they became so.
    queue: VecDeque<u64>,
    downstream: Downstream,
    incomplete: List,
    idle: List,
    draining: Draining,
    weights: AddressTree<u32>,
    dripping: Vec<u64>,
    reader: Reader,
    peeked: Vec<u8>,
    /// Whether it was said that a client speaks TLS.
    has_said_tls: bool,
    scratch: Vec<u8>,
    next_slot: u32,
    now: Instant,
    next_forced_sweep: Instant,
}

/// Whether the filter goes on.
type Flow = std::ops::ControlFlow<()>;

impl Keeper {
    /// A keeper in its place, ready to run.
    ///
    /// # Errors
    /// The descriptors of the place cannot be watched.
    pub fn new(place: Place, settings: Settings) -> Result<Self, FilterError> {
        let poller = Poller::new()?;
        let system = |error| FilterError::System("epoll_ctl", error);
        if let Some(upstream) = &place.upstream {
            poller.add(upstream.as_fd(), KEY_UPSTREAM, EventFlags::IN).map_err(system)?;
        }
        for (key, listener) in (KEY_LISTENERS..=LAST_LISTENER).zip(&place.listeners) {
            poller.add(listener.as_fd(), key, EventFlags::IN).map_err(system)?;
        }
        let downstream = Downstream::watch(&poller, &place, KEY_DOWNSTREAM).map_err(system)?;
        poller.add(place.control.as_fd(), KEY_CONTROL, EventFlags::IN).map_err(system)?;
        let now = Instant::now();
        let room = HEAD_BYTES as usize + settings.content_bytes as usize;
        Ok(Self {
            place,
            poller,
            settings,
            counters: Counters::default(),
            connections: Connections::default(),
            by_slot: HashMap::new(),
            queue: VecDeque::new(),
            downstream,
            incomplete: List::default(),
            idle: List::default(),
            draining: Draining::default(),
            weights: AddressTree::new(4 * settings.most + 64),
            dripping: Vec::new(),
            reader: Reader::new(settings.content_bytes),
            peeked: vec![0; room],
            has_said_tls: false,
            scratch: Vec::new(),
            next_slot: 0,
            now,
            next_forced_sweep: now,
        })
    }

    /// Runs until the launcher is gone.
    ///
    /// # Errors
    /// The link downstream failed, or epoll did.
    pub fn run(mut self) -> Result<(), FilterError> {
        crate::confine::confine(self.name());
        // What came before this process did: connections that the ledger knows belong to filters further on.
        self.place.say_ready();
        loop {
            let timeout = self.until_next_deadline();
            let events = self.poller.wait(timeout)?;
            self.now = Instant::now();
            for (key, flags) in events {
                if self.event(key, flags)?.is_break() {
                    return Ok(());
                }
            }
            self.look_at_dripping();
            self.expire();
            self.pump()?;
        }
    }

    fn event(&mut self, key: u64, flags: EventFlags) -> Result<Flow, FilterError> {
        match key {
            KEY_LISTENERS..=LAST_LISTENER => self.accept((key - KEY_LISTENERS) as usize),
            KEY_UPSTREAM => return self.take_bundles(),
            KEY_DOWNSTREAM => {
                if flags.contains(EventFlags::HUP) {
                    return Ok(Flow::Break(()));
                }
                self.notices();
            }
            KEY_CONTROL => loop {
                match self.place.launchers_word() {
                    Err(_) => return Ok(Flow::Break(())),
                    Ok(None) => break,
                    Ok(Some(word::HAND_AGAIN)) => self.hand_again(),
                    Ok(Some(word::COUNTERS)) => self.print_counters(),
                    Ok(Some(_)) => {}
                }
            },
            key => self.look_at_event(key, flags),
        }
        Ok(Flow::Continue(()))
    }

    /// How long to wait at most, if something is due before the next tick is certain.
    fn until_next_deadline(&mut self) -> Option<Duration> {
        let mut next = None;
        let lists =
            [(self.incomplete.first(), self.settings.timeout), (self.idle.first(), self.settings.idle)];
        for (first, after) in lists {
            if let Some(connection) = first.and_then(|index| self.connections.by_index(index)) {
                let due = connection.since + after;
                next = Some(next.map_or(due, |next: Instant| next.min(due)));
            }
        }
        let dripping = (!self.dripping.is_empty()).then(|| self.now + DRIP);
        for due in dripping.into_iter().chain(self.draining.due()) {
            next = Some(next.map_or(due, |next| next.min(due)));
        }
        let left = next?.saturating_duration_since(self.now);
        (left <= TICK).then_some(left)
    }

    /// Looks whether the request of a connection is whole.
    fn look(&mut self, key: u64) {
        let Some(connection) = self.connections.get(key) else { return };
        if !connection.is_reading() {
            return;
        }
        let (index, is_all) = (key as u32, connection.is_half_closed);
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        match rustix::net::recv(&connection.socket, &mut self.peeked[..], flags) {
            Ok((0, _)) => self.end(index),
            Ok((length, _)) => match self.reader.judge(&self.peeked[..length]) {
                Ok(whole::Progression::Whole(whole)) => {
                    connection.arrived(whole, &self.peeked[..length]);
                    // What lies behind a look that was not long enough is not reported again either.
                    connection.has_more |= length == self.peeked.len();
                    self.leave_lists(index);
                    self.present(key);
                }
                Ok(whole::Progression::Incomplete) if length == self.peeked.len() => {
                    self.refuse(index, 413);
                }
                // The client has said its last word (RFC 9112 §9.6), and it is no request.
                Ok(whole::Progression::Incomplete | whole::Progression::Expects) if is_all => self.end(index),
                Ok(whole::Progression::Incomplete) => self.wait_for_more(key, true),
                Ok(whole::Progression::Expects) => self.give_leave(key),
                Err(error) => {
                    self.counters.malformed_total.add(1);
                    if self.peeked[..length].starts_with(TLS_RECORD)
                        && !std::mem::replace(&mut self.has_said_tls, true)
                    {
                        say(
                            "tidegate: a client speaks TLS, which no filter reads: terminate it in front of the chain, or \
                             listen for it on a port that is not conditioned",
                        );
                    }
                    self.refuse(index, error.status());
                }
            },
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => self.wait_for_more(key, false),
            Err(_) => self.end(index),
        }
    }

    /// The client waits for leave to send its content (RFC 9110 §10.1.1), and a server would wait for the client. It
    /// may give leave once more when it has the request: a client takes any number of interim responses (RFC 9110
    /// §15.2).
    fn give_leave(&mut self, key: u64) {
        const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
        let Some(connection) = self.connections.get(key) else { return };
        if !connection.has_leave {
            let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
            match rustix::net::send(&connection.socket, CONTINUE, flags) {
                Ok(sent) if sent == CONTINUE.len() => connection.has_leave = true,
                // Responses before this one are under way: there is room later.
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                    if !std::mem::replace(&mut connection.has_dripped, true) {
                        self.dripping.push(key);
                    }
                }
                _ => return self.end(key as u32),
            }
        }
        self.wait_for_more(key, true);
    }

    fn refuse(&mut self, index: u32, status: u16) {
        if let Some(connection) = self.connections.by_index(index) {
            crate::neighbours::answer(connection.socket.as_fd(), status, "");
            connection.is_refused = true;
        }
        self.end(index);
    }

    fn wait_for_more(&mut self, key: u64, has_begun: bool) {
        let index = key as u32;
        let now = self.now;
        let Some(connection) = self.connections.get(key) else { return };
        let phase = if has_begun || !connection.has_served { Phase::Incomplete } else { Phase::Idle };
        if has_begun && connection.has_served && !std::mem::replace(&mut connection.has_room, true) {
            room::make(connection.socket.as_fd());
        }
        connection.looks = connection.looks.saturating_add(u8::from(has_begun));
        if !self.watch(key) {
            return self.end(index);
        }
        let Some(connection) = self.connections.get(key) else { return };
        if connection.phase == phase {
            return;
        }
        let (peer, since_accept) = (connection.peer.ip(), connection.since);
        self.leave_lists(index);
        let Some(connection) = self.connections.get(key) else { return };
        // A new connection's time runs from its accept, that of a further request from its first byte.
        connection.since = if connection.has_served { now } else { since_accept };
        connection.phase = phase;
        if phase == Phase::Idle {
            self.idle.push(&mut self.connections, index);
        } else {
            connection.ticket = Some(self.weights.insert(peer, index));
            self.incomplete.push(&mut self.connections, index);
            self.counters.incomplete.add(1);
        }
    }

    fn leave_lists(&mut self, index: u32) {
        let Some(connection) = self.connections.by_index(index) else { return };
        let (phase, peer, ticket) = (connection.phase, connection.peer.ip(), connection.ticket.take());
        connection.phase = Phase::Reading;
        match phase {
            Phase::Incomplete => {
                self.incomplete.remove(&mut self.connections, index);
                self.counters.incomplete.sub(1);
            }
            Phase::Idle => self.idle.remove(&mut self.connections, index),
            _ => {}
        }
        if let Some(ticket) = ticket {
            self.weights.remove(peer, ticket);
        }
    }

    fn look_at_dripping(&mut self) {
        if self.dripping.is_empty() || self.now < self.next_drip() {
            return;
        }
        for key in std::mem::take(&mut self.dripping) {
            if let Some(connection) = self.connections.get(key) {
                connection.has_dripped = false;
            }
            self.look(key);
        }
        self.connections.last_drip = Some(self.now);
    }

    fn next_drip(&self) -> Instant {
        self.connections.last_drip.map_or(self.now, |last| last + DRIP)
    }

    /// A request is whole: it gets its identity and waits for the next program to ask.
    fn present(&mut self, key: u64) {
        let index = key as u32;
        let Some(connection) = self.connections.get(key) else { return };
        match self.place.ledger.present(connection.slot) {
            Some(id) => {
                connection.presented(id);
                // What is there already is not reported again, nor the client's end; and without `keep` the server's
                // has to be known.
                if connection.has_more || connection.is_half_closed || !self.settings.keep {
                    self.place.ledger.ask(id);
                }
                self.queue.push_back(key);
            }
            // The server still has an earlier request of this connection, which cannot be: nobody may answer two.
            None => self.end(index),
        }
    }

    fn pump(&mut self) -> Result<(), FilterError> {
        self.hand_on()?;
        let waits = !self.queue.is_empty();
        let failed = |error| FilterError::System("epoll_ctl", error);
        // Should the neighbour have taken everything meanwhile, the kernel says so at once: the link is writable.
        self.downstream.waits(&self.poller, &self.place, waits).map_err(failed)
    }

    fn hand_on(&mut self) -> Result<(), FilterError> {
        while let Some(&key) = self.queue.front() {
            let Some(connection) = self.connections.get(key) else {
                self.queue.pop_front();
                continue;
            };
            if connection.phase != Phase::Queued || connection.bundle.is_none() {
                self.queue.pop_front();
                continue;
            }
            if !self.place.wants_more(self.settings.window_bytes) {
                return Ok(());
            }
            if self.place.keeps && !self.watch(key) {
                self.end(key as u32);
                continue;
            }
            let Some(connection) = self.connections.get(key) else { continue };
            let Some(bundle) = connection.bundle.as_ref() else { continue };
            let handed = self
                .place
                .hand(bundle, connection.socket.as_fd(), &mut self.scratch)
                .map_err(|error| FilterError::System("link downstream", error))?;
            let Some(number) = handed else { return Ok(()) };
            connection.phase = Phase::Handed;
            connection.number = number;
            connection.since = self.now;
            if !self.place.keeps {
                // What arrives now is `persist`'s business.
                self.mute(key);
            }
            self.counters.handed_total.add(1);
            self.queue.pop_front();
        }
        Ok(())
    }

    fn expire(&mut self) {
        while let Some(index) = self.incomplete.first() {
            let due = self.connections.by_index(index).map(|c| c.since + self.settings.timeout);
            if due.is_some_and(|due| due > self.now) {
                break;
            }
            self.counters.timed_out_total.add(1);
            self.end(index);
        }
        while let Some(index) = self.idle.first() {
            let due = self.connections.by_index(index).map(|c| c.since + self.settings.idle);
            if due.is_some_and(|due| due > self.now) {
                break;
            }
            self.counters.idle_total.add(1);
            self.end(index);
        }
        self.draining.look(self.now);
        if self.poller.has_ticked() {
            self.sweep();
        }
    }

    fn print_counters(&self) {
        self.counters.draining.set(self.draining.len() as u64);
        crate::filters::print_counters(self.name(), &self.counters.samples());
    }

    fn name(&self) -> &'static str {
        if self.place.upstream.is_none() { "package" } else { "persist" }
    }
}
