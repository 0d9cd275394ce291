//! Requests that must not be repeated, by datagram: each is executed once, however often it is sent, duplicated or
//! reordered on its way, and whichever core gets it.
//!
//! A server issues *tickets*; a client numbers such requests within a ticket. [`ReplayWindow`] remembers for each
//! ticket the last [`WINDOW`] numbers and, for a while, their responses, as the anti-replay window of RFC 4303 §3.4.3
//! does for packets. Cores share one window. A ticket is good in the window that issued it only, so that after a
//! restart what was asked before is refused, not executed again.
//!
//! ```text
//! ticket  time of issue, seconds since the window began (4)  serial (4)  MAC (8)
//! ```
//!
//! Tickets and numbers can be read on the way. So with a number goes a keyed hash of its request: who sends another one
//! under it, which is all that can be done by who has not seen what was sealed, is not told the response.
//!
//! The rule behind all that is bounded here: what went past the window (to a connection, because there was no room)
//! must never be accepted by it afterwards. `Network::closed_until_s` sees to that.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hasher;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use siphasher::sip::SipHasher24;
use tidegate_core::network_of;

use crate::wire::{Numbered, TICKET_BYTES};

/// Most numbers remembered for a ticket, the highest: a client's requests under way must lie within so many.
pub const WINDOW: u32 = 128;
/// What a kept response is charged besides its bytes.
const KEPT_OVERHEAD_BYTES: usize = 128;
/// One client network may have this part of the room that others leave: a few of them do not take it all.
const NETWORK_SHARE: usize = 8;

/// Bounds of a [`ReplayWindow`].
#[derive(Clone, Debug)]
pub struct WindowConfig {
    /// Most tickets in use at one time; for clients of one network an eighth of what others leave.
    pub tickets: usize,
    /// How long new numbers are taken under a ticket. A ticket is remembered for a minute more.
    pub ticket_lifetime: Duration,
    /// Most bytes of responses kept for requests that are sent again; for one network an eighth of what others leave.
    pub kept_bytes: usize,
    /// Longest response that is kept, in bytes.
    pub response_bytes: usize,
    /// How long a response is kept: longer than a client goes on asking.
    pub keep_for: Duration,
}

impl Default for WindowConfig {
    fn default() -> Self {
        Self {
            tickets: 10_000,
            ticket_lifetime: Duration::from_secs(600),
            kept_bytes: 16 << 20,
            response_bytes: 64 << 10,
            keep_for: Duration::from_secs(60),
        }
    }
}

/// After a ticket is out of date its numbers are remembered so long: what a client may still send of them.
const GRACE_S: u32 = 60;

/// How a request came.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Channel {
    /// By UDP.
    Datagram,
    /// On a connection that the client opened, where a client sends a request once at most.
    Stream,
}

/// What a number stands for.
#[derive(Clone, Copy, Debug)]
pub struct Content<'r> {
    /// The HTTP request, head and body.
    pub http: &'r [u8],
    /// It came sealed, or by TLS: what was answered to it is not for a copy in the clear.
    pub secret: bool,
}

/// What is to be done with a request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Admission {
    /// Execute it, and call [`ReplayWindow::executed`].
    Execute,
    /// It is being executed, or the client must have given it up: no answer.
    Running,
    /// It has been executed; this was the response.
    Executed(Bytes),
    /// It may have been executed, and what came of it is not known any more, or its number stands for another request:
    /// say so.
    Unknown,
    /// There is no room: it is to come on a connection.
    UseTcp,
    /// By this ticket it was not executed in this window, and never will be: say so, and give another ticket.
    NewTicket,
}

#[derive(Debug)]
enum Outcome {
    /// Sent to a connection for want of room.
    Diverted,
    Running,
    Kept(Bytes),
    /// Executed; the response was too long to be kept, or is kept no longer.
    Forgotten,
}

/// The keyed hash of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Digest(u64);

/// What is remembered of a number.
#[derive(Debug)]
struct Known {
    content: Digest,
    outcome: Outcome,
}

/// A ticket's time of issue and serial.
type TicketKey = (u32, u32);

#[derive(Debug)]
struct Ticket {
    network: IpAddr,
    /// Numbers below are not known any more: one of them had to go.
    floor: u32,
    numbers: BTreeMap<u32, Known>,
}

#[derive(Debug, Default)]
struct Network {
    tickets: usize,
    kept_bytes: usize,
    /// Tickets issued until then are not taken up any more: one of them was sent past the window.
    closed_until_s: Option<u32>,
}

/// Which requests have been executed.
#[derive(Debug)]
pub struct ReplayWindow {
    config: WindowConfig,
    key: [u8; 16],
    opened: Instant,
    /// The latest time that any core has named. Cores take the time before they take the lock, and none may make
    /// tickets younger than another has seen them.
    latest: Instant,
    next_serial: u32,
    /// In order of issue.
    tickets: BTreeMap<TicketKey, Ticket>,
    networks: HashMap<IpAddr, Network>,
    /// As [`Network::closed_until_s`], for all.
    closed_until_s: Option<u32>,
    /// What is kept until when, and what it is charged, in order of time.
    kept: VecDeque<(Instant, Kept)>,
    kept_bytes: usize,
}

#[derive(Debug)]
struct Kept {
    key: TicketKey,
    number: u32,
    network: IpAddr,
    charge_bytes: usize,
}

impl ReplayWindow {
    /// A window that has seen nothing. `key` must be random and used for no other window: that is what makes requests
    /// of before a restart be refused.
    pub fn new(config: WindowConfig, key: [u8; 16], now: Instant) -> Self {
        Self {
            config,
            key,
            opened: now,
            latest: now,
            next_serial: 0,
            tickets: BTreeMap::new(),
            networks: HashMap::new(),
            closed_until_s: None,
            kept: VecDeque::new(),
            kept_bytes: 0,
        }
    }

    /// Longest response that is kept, in bytes.
    pub fn response_bytes(&self) -> usize {
        self.config.response_bytes
    }

    /// For how many whole seconds this window has seen everything.
    pub fn age_s(&self, now: Instant) -> u32 {
        u32::try_from(now.saturating_duration_since(self.opened).as_secs()).unwrap_or(u32::MAX)
    }

    /// Time does not go backwards, whichever core says what it is.
    fn advance(&mut self, now: Instant) -> Instant {
        self.latest = self.latest.max(now);
        self.latest
    }

    /// A new ticket for a client at `client`; `None` if there would be no room for it.
    pub fn issue(&mut self, client: IpAddr, now: Instant) -> Option<[u8; TICKET_BYTES]> {
        let now = self.advance(now);
        self.expire(now);
        let issued_s = self.age_s(now);
        if !self.takes_up(network_of(client), issued_s) {
            return None;
        }
        let serial = self.next_serial;
        self.next_serial = self.next_serial.wrapping_add(1);
        let mut ticket = [0; TICKET_BYTES];
        ticket[..4].copy_from_slice(&issued_s.to_be_bytes());
        ticket[4..8].copy_from_slice(&serial.to_be_bytes());
        ticket[8..].copy_from_slice(&self.mac(issued_s, serial).to_be_bytes());
        Some(ticket)
    }

    /// Decides about a request from `client`.
    pub fn admit(
        &mut self,
        numbered: &Numbered,
        content: Content<'_>,
        client: IpAddr,
        channel: Channel,
        now: Instant,
    ) -> Admission {
        let digest = self.digest(content);
        self.admit_digest(numbered, digest, client, channel, now)
    }

    /// The same for a request that is decided about several times: of all its bytes only this is looked at again.
    pub(crate) fn admit_digest(
        &mut self,
        numbered: &Numbered,
        content: Digest,
        client: IpAddr,
        channel: Channel,
        now: Instant,
    ) -> Admission {
        let now = self.advance(now);
        self.expire(now);
        let not_ours = match channel {
            Channel::Datagram => Admission::NewTicket,
            Channel::Stream => Admission::Unknown,
        };
        let Some(key) = self.verify(&numbered.ticket) else { return not_ours };
        let age_s = self.age_s(now).saturating_sub(key.0);
        let current = age_s <= self.lifetime_s();
        let network = network_of(client);
        if let Some(ticket) = self.tickets.get(&key) {
            if ticket.network != network {
                // Whoever has read a ticket on its way learns nothing by it, and does nothing to its owner's requests.
                return match channel {
                    Channel::Datagram => Admission::Running,
                    Channel::Stream => Admission::Unknown,
                };
            }
        } else {
            if age_s > self.lifetime_s() + GRACE_S {
                return not_ours;
            }
            if current && self.takes_up(network, key.0) {
                let ticket = Ticket { network, floor: 0, numbers: BTreeMap::new() };
                self.tickets.insert(key, ticket);
                self.networks.entry(network).or_default().tickets += 1;
            } else {
                return self.pass_by(network, channel, current, now);
            }
        }
        self.admit_number(key, (numbered.number, content), channel, current)
    }

    /// A request whose ticket cannot be taken up: it was not executed, and must not be by another copy of it.
    fn pass_by(&mut self, network: IpAddr, channel: Channel, current: bool, now: Instant) -> Admission {
        if !current {
            // Out of date, so that no datagram is executed: on a connection it comes once.
            return if channel == Channel::Stream { Admission::Execute } else { Admission::NewTicket };
        }
        let until_s = Some(self.age_s(now));
        match self.networks.get_mut(&network) {
            Some(network) if self.tickets.len() < self.config.tickets => {
                network.closed_until_s = network.closed_until_s.max(until_s);
            }
            _ => self.closed_until_s = self.closed_until_s.max(until_s),
        }
        if channel == Channel::Stream { Admission::Execute } else { Admission::UseTcp }
    }

    fn admit_number(
        &mut self,
        key: TicketKey,
        (number, content): (u32, Digest),
        channel: Channel,
        current: bool,
    ) -> Admission {
        let Some(ticket) = self.tickets.get_mut(&key) else { return Admission::Unknown };
        let is_full = ticket.numbers.len() >= WINDOW as usize;
        let lowest = ticket.numbers.first_key_value().map_or(0, |(lowest, _)| *lowest);
        if number < ticket.floor || (is_full && number < lowest) {
            return match channel {
                Channel::Datagram => Admission::Running,
                Channel::Stream => Admission::Unknown,
            };
        }
        let known = ticket.numbers.get(&number);
        if known.is_some_and(|known| known.content != content) {
            return Admission::Unknown;
        }
        let kept_by_network = self.networks.get(&ticket.network).map_or(0, |network| network.kept_bytes);
        let kept_by_others = self.kept_bytes.saturating_sub(kept_by_network);
        let full = self.kept_bytes >= self.config.kept_bytes
            || kept_by_network >= self.config.kept_bytes.saturating_sub(kept_by_others) / NETWORK_SHARE;
        let (outcome, admission) = match (known.map(|known| &known.outcome), channel) {
            (Some(Outcome::Running), _) => return Admission::Running,
            (Some(Outcome::Kept(response)), _) => return Admission::Executed(response.clone()),
            (Some(Outcome::Forgotten), _) => return Admission::Unknown,
            (Some(Outcome::Diverted), Channel::Datagram) => return Admission::UseTcp,
            (None, Channel::Datagram) if !current => return Admission::NewTicket,
            (None, Channel::Datagram) if full => (Outcome::Diverted, Admission::UseTcp),
            (None, Channel::Datagram) | (None | Some(Outcome::Diverted), Channel::Stream) => {
                (Outcome::Running, Admission::Execute)
            }
        };
        ticket.numbers.insert(number, Known { content, outcome });
        // The lowest goes, not what is far below the highest: whoever else has seen the ticket cannot make its owner's
        // requests too old by one high number.
        if ticket.numbers.len() > WINDOW as usize {
            ticket.numbers.pop_first();
            ticket.floor = lowest.saturating_add(1);
        }
        admission
    }

    /// A request was executed, with this response if it is there whole. It is kept if there is room.
    pub fn executed(&mut self, numbered: &Numbered, response: Option<&[u8]>, now: Instant) {
        let now = self.advance(now);
        let Some(key) = self.verify(&numbered.ticket) else { return };
        let Some(ticket) = self.tickets.get_mut(&key) else { return };
        let network = ticket.network;
        let known = ticket.numbers.get_mut(&numbered.number).map(|known| &mut known.outcome);
        let Some(outcome @ Outcome::Running) = known else { return };
        let Some(response) = response.filter(|response| response.len() <= self.config.response_bytes) else {
            *outcome = Outcome::Forgotten;
            return;
        };
        *outcome = Outcome::Kept(Bytes::copy_from_slice(response));
        let charge_bytes = response.len() + KEPT_OVERHEAD_BYTES;
        self.kept_bytes += charge_bytes;
        self.networks.entry(network).or_default().kept_bytes += charge_bytes;
        let kept = Kept { key, number: numbered.number, network, charge_bytes };
        self.kept.push_back((now + self.config.keep_for, kept));
        // Requests that were under way together may have more to keep than there is room for: the oldest goes.
        while self.kept_bytes > self.config.kept_bytes + self.config.response_bytes {
            self.forget_oldest();
        }
    }

    fn expire(&mut self, now: Instant) {
        while self.kept.front().is_some_and(|(until, _)| *until <= now) {
            self.forget_oldest();
        }
        let now_s = self.age_s(now);
        let most_s = self.lifetime_s() + GRACE_S;
        while let Some(oldest) =
            self.tickets.first_entry().filter(|ticket| now_s.saturating_sub(ticket.key().0) > most_s)
        {
            let network = oldest.remove().network;
            if let Some(network) = self.networks.get_mut(&network) {
                network.tickets -= 1;
            }
            self.forget_network(network, now_s);
        }
        if self.networks.len() > 2 * self.config.tickets {
            let lifetime_s = self.lifetime_s();
            self.networks.retain(|_, network| network.is_needed(now_s, lifetime_s));
        }
    }

    fn forget_oldest(&mut self) {
        let Some((_, kept)) = self.kept.pop_front() else { return };
        self.kept_bytes -= kept.charge_bytes;
        if let Some(network) = self.networks.get_mut(&kept.network) {
            network.kept_bytes -= kept.charge_bytes;
        }
        let known = self.tickets.get_mut(&kept.key).and_then(|ticket| ticket.numbers.get_mut(&kept.number));
        if let Some(known) = known {
            known.outcome = Outcome::Forgotten;
        }
    }

    fn forget_network(&mut self, network: IpAddr, now_s: u32) {
        if self.networks.get(&network).is_some_and(|network| !network.is_needed(now_s, self.lifetime_s())) {
            self.networks.remove(&network);
        }
    }

    /// Whether there is room for a ticket that was issued at this time, and it cannot have been sent past the window.
    fn takes_up(&self, network: IpAddr, issued_s: u32) -> bool {
        let most = self.config.tickets;
        let is_open = |closed_until_s: Option<u32>| closed_until_s.is_none_or(|until| issued_s > until);
        let network = self.networks.get(&network);
        self.tickets.len() < most
            && self.networks.len() <= 2 * most
            && is_open(self.closed_until_s)
            && network.is_none_or(|network| {
                let left_by_others = most - (self.tickets.len() - network.tickets);
                network.tickets < (left_by_others / NETWORK_SHARE).max(1) && is_open(network.closed_until_s)
            })
    }

    fn lifetime_s(&self) -> u32 {
        self.config.ticket_lifetime.as_secs().clamp(1, 86_400) as u32
    }

    fn verify(&self, ticket: &[u8; TICKET_BYTES]) -> Option<TicketKey> {
        let number = |at: usize| ticket[at..].first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
        let (issued_s, serial) = (number(0), number(4));
        // One comparison: its time does not tell how many bytes were right.
        (self.mac(issued_s, serial).to_be_bytes() == ticket[8..]).then_some((issued_s, serial))
    }

    /// Nobody who does not know the key can make two requests with one hash.
    pub(crate) fn digest(&self, content: Content<'_>) -> Digest {
        let mut hasher = SipHasher24::new_with_key(&self.key);
        hasher.write(b"tidegate dhttp once content");
        hasher.write(&[u8::from(content.secret)]);
        hasher.write(content.http);
        Digest(hasher.finish())
    }

    fn mac(&self, issued_s: u32, serial: u32) -> u64 {
        let mut hasher = SipHasher24::new_with_key(&self.key);
        hasher.write(b"tidegate dhttp once ticket");
        hasher.write(&issued_s.to_be_bytes());
        hasher.write(&serial.to_be_bytes());
        hasher.finish()
    }

    /// Panics if the tables contradict each other or exceed their bounds; for tests.
    pub fn check_invariants(&self) {
        let most = self.config.tickets;
        assert!(self.tickets.len() <= most && self.networks.len() <= 2 * most + 1);
        assert!(self.tickets.values().all(|ticket| ticket.numbers.len() <= WINDOW as usize));
        assert_eq!(self.networks.values().map(|network| network.tickets).sum::<usize>(), self.tickets.len());
        let charged: usize = self.kept.iter().map(|(_, kept)| kept.charge_bytes).sum();
        assert_eq!(charged, self.kept_bytes);
        assert_eq!(self.networks.values().map(|network| network.kept_bytes).sum::<usize>(), charged);
        assert!(charged <= self.config.kept_bytes + self.config.response_bytes);
    }
}

impl Network {
    fn is_needed(&self, now_s: u32, lifetime_s: u32) -> bool {
        self.tickets > 0
            || self.kept_bytes > 0
            || self.closed_until_s.is_some_and(|until| now_s <= until.saturating_add(lifetime_s))
    }
}
