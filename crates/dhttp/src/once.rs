//! Requests that must not be repeated, by datagram: each is executed once, however often it is sent, duplicated or
//! reordered on its way, and whichever core gets it.
//!
//! A server issues *tickets*; a client numbers such requests within a ticket. [`ReplayWindow`] remembers for each ticket
//! the last [`WINDOW`] numbers and, for a while, their responses, as the anti-replay window of RFC 4303 §3.4.3 does for
//! packets. Cores share one window. A ticket is good in the window that issued it only, so that after a restart what was
//! asked before is refused, not executed again.
//!
//! ```text
//! ticket  time of issue, seconds since the window began (4)  serial (4)  MAC (8)
//! ```
//!
//! The rule behind all that is bounded here: what went past the window (to a connection, because there was no room)
//! must never be accepted by it afterwards. `Network::closed_until_s` sees to that.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hasher;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use bytes::Bytes;
use siphasher::sip::SipHasher24;

use crate::wire::{Numbered, TICKET_BYTES};

/// Most numbers remembered for a ticket: a client's requests under way must lie within so many.
pub const WINDOW: u32 = 128;
/// What a kept response is charged besides its bytes.
const KEPT_OVERHEAD_BYTES: usize = 128;
/// The part of all room that one client network may have.
const NETWORK_SHARE: usize = 8;

/// Bounds of a [`ReplayWindow`].
#[derive(Clone, Debug)]
pub struct WindowConfig {
    /// Most tickets in use at one time; an eighth of them for clients of one network.
    pub tickets: usize,
    /// How long new numbers are taken under a ticket. A ticket is remembered for a minute more.
    pub ticket_lifetime: Duration,
    /// Most bytes of responses kept for requests that are sent again; an eighth of them for one network.
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

/// What is to be done with a request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Admission {
    /// Execute it, and call [`ReplayWindow::executed`].
    Execute,
    /// It is being executed, or the client must have given it up: no answer.
    Running,
    /// It has been executed; this was the response.
    Executed(Bytes),
    /// It may have been executed, and what came of it is not known any more: say so.
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

/// A ticket's time of issue and serial.
type TicketKey = (u32, u32);

#[derive(Debug)]
struct Ticket {
    network: IpAddr,
    /// Numbers below are not known any more.
    floor: u32,
    numbers: BTreeMap<u32, Outcome>,
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

    /// A new ticket for a client at `client`; `None` if there would be no room for it.
    pub fn issue(&mut self, client: IpAddr, now: Instant) -> Option<[u8; TICKET_BYTES]> {
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
        client: IpAddr,
        channel: Channel,
        now: Instant,
    ) -> Admission {
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
        self.admit_number(key, numbered.number, channel, current)
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

    fn admit_number(&mut self, key: TicketKey, number: u32, channel: Channel, current: bool) -> Admission {
        let most_kept = self.config.kept_bytes;
        let full = self.kept_bytes >= most_kept;
        let Some(ticket) = self.tickets.get_mut(&key) else { return Admission::Unknown };
        let full = full
            || self
                .networks
                .get(&ticket.network)
                .is_some_and(|network| network.kept_bytes >= most_kept / NETWORK_SHARE);
        if number < ticket.floor {
            return match channel {
                Channel::Datagram => Admission::Running,
                Channel::Stream => Admission::Unknown,
            };
        }
        let (outcome, admission) = match (ticket.numbers.get(&number), channel) {
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
        ticket.numbers.insert(number, outcome);
        ticket.floor = ticket.floor.max(number.saturating_sub(WINDOW - 1));
        ticket.numbers = ticket.numbers.split_off(&ticket.floor);
        admission
    }

    /// A request was executed, with this response if it is there whole. It is kept if there is room.
    pub fn executed(&mut self, numbered: &Numbered, response: Option<&[u8]>, now: Instant) {
        let Some(key) = self.verify(&numbered.ticket) else { return };
        let Some(ticket) = self.tickets.get_mut(&key) else { return };
        let network = ticket.network;
        let Some(outcome @ Outcome::Running) = ticket.numbers.get_mut(&numbered.number) else { return };
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
        let outcome = self.tickets.get_mut(&kept.key).and_then(|ticket| ticket.numbers.get_mut(&kept.number));
        if let Some(outcome) = outcome {
            *outcome = Outcome::Forgotten;
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
                network.tickets < (most / NETWORK_SHARE).max(1) && is_open(network.closed_until_s)
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

/// Whose share it is: one IPv4 address, or 64 bits of an IPv6 address, of which one client has all.
fn network_of(client: IpAddr) -> IpAddr {
    match client.to_canonical() {
        IpAddr::V6(address) => {
            let mut octets = address.octets();
            octets[8..].fill(0);
            Ipv6Addr::from(octets).into()
        }
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CLIENT: &str = "192.0.2.1";

    fn client() -> IpAddr {
        CLIENT.parse().unwrap()
    }

    fn window(config: WindowConfig) -> (ReplayWindow, Instant) {
        let now = Instant::now();
        (ReplayWindow::new(config, [7; 16], now), now)
    }

    fn after(now: Instant, seconds: u64) -> Instant {
        now + Duration::from_secs(seconds)
    }

    #[test]
    fn a_ticket_that_somebody_else_has_read_tells_and_changes_nothing() {
        let (mut window, now) = window(WindowConfig::default());
        let ticket = window.issue(client(), now).unwrap();
        let one = Numbered { ticket, number: 0 };
        assert_eq!(window.admit(&one, client(), Channel::Datagram, now), Admission::Execute);
        window.executed(&one, Some(b"secret"), now);
        let stranger: IpAddr = "198.51.100.99".parse().unwrap();
        let farthest = Numbered { ticket, number: u32::MAX };
        for number in [one, farthest] {
            assert_eq!(window.admit(&number, stranger, Channel::Datagram, now), Admission::Running);
            assert_eq!(window.admit(&number, stranger, Channel::Stream, now), Admission::Unknown);
        }
        let again = window.admit(&one, client(), Channel::Stream, now);
        assert_eq!(again, Admission::Executed(Bytes::from_static(b"secret")));
        window.check_invariants();
    }

    #[test]
    fn a_batch_that_was_taken_before_a_ticket_was_issued_does_not_forget_it() {
        let (mut window, now) = window(WindowConfig::default());
        let ticket = window.issue(client(), after(now, 10)).unwrap();
        let one = Numbered { ticket, number: 0 };
        assert_eq!(window.admit(&one, client(), Channel::Datagram, after(now, 10)), Admission::Execute);
        assert_eq!(window.admit(&one, client(), Channel::Datagram, after(now, 9)), Admission::Running);
        window.check_invariants();
    }

    #[test]
    fn a_request_is_executed_once_and_answered_as_often_as_it_is_sent() {
        let (mut window, now) = window(WindowConfig::default());
        let ticket = window.issue(client(), now).unwrap();
        let one = Numbered { ticket, number: 0 };
        let admit = |window: &mut ReplayWindow, channel| window.admit(&one, client(), channel, now);
        assert_eq!(admit(&mut window, Channel::Datagram), Admission::Execute);
        assert_eq!(admit(&mut window, Channel::Datagram), Admission::Running);
        assert_eq!(admit(&mut window, Channel::Stream), Admission::Running);
        window.executed(&one, Some(b"done"), now);
        for channel in [Channel::Datagram, Channel::Stream] {
            assert_eq!(admit(&mut window, channel), Admission::Executed(Bytes::from_static(b"done")));
        }
        let later = after(now, 61);
        assert_eq!(window.admit(&one, client(), Channel::Stream, later), Admission::Unknown);
        window.check_invariants();
    }

    #[test]
    fn another_window_knows_nothing_of_a_ticket_and_executes_nothing_by_it() {
        let (mut before, now) = window(WindowConfig::default());
        let ticket = before.issue(client(), now).unwrap();
        let mut restarted = ReplayWindow::new(WindowConfig::default(), [8; 16], now);
        let one = Numbered { ticket, number: 0 };
        assert_eq!(restarted.admit(&one, client(), Channel::Datagram, now), Admission::NewTicket);
        assert_eq!(restarted.admit(&one, client(), Channel::Stream, now), Admission::Unknown);
    }

    #[test]
    fn an_old_number_is_not_executed_again() {
        let (mut window, now) = window(WindowConfig::default());
        let ticket = window.issue(client(), now).unwrap();
        let admit = |window: &mut ReplayWindow, number, channel| {
            window.admit(&Numbered { ticket, number }, client(), channel, now)
        };
        assert_eq!(admit(&mut window, 0, Channel::Datagram), Admission::Execute);
        assert_eq!(admit(&mut window, WINDOW - 1, Channel::Datagram), Admission::Execute);
        assert_eq!(admit(&mut window, 0, Channel::Datagram), Admission::Running);
        assert_eq!(admit(&mut window, WINDOW, Channel::Datagram), Admission::Execute);
        assert_eq!(admit(&mut window, 0, Channel::Datagram), Admission::Running);
        assert_eq!(admit(&mut window, 0, Channel::Stream), Admission::Unknown);
        assert_eq!(
            admit(&mut window, 1, Channel::Datagram),
            Admission::Execute,
            "late, but within the window"
        );
        window.check_invariants();
    }

    #[test]
    fn a_ticket_out_of_date_executes_nothing_new_but_knows_what_it_did() {
        let (mut window, now) = window(WindowConfig::default());
        let ticket = window.issue(client(), now).unwrap();
        let numbered = |number| Numbered { ticket, number };
        window.admit(&numbered(0), client(), Channel::Datagram, after(now, 600));
        window.executed(&numbered(0), Some(b"x"), after(now, 600));
        let late = after(now, 601);
        assert_eq!(window.admit(&numbered(1), client(), Channel::Datagram, late), Admission::NewTicket);
        assert!(matches!(
            window.admit(&numbered(0), client(), Channel::Datagram, late),
            Admission::Executed(_)
        ));
        let gone = after(now, 661);
        assert_eq!(window.admit(&numbered(0), client(), Channel::Stream, gone), Admission::Unknown);
        assert_eq!(window.tickets.len(), 0);
        window.check_invariants();
    }

    #[test]
    fn what_a_full_window_sends_to_a_connection_is_never_taken_by_datagram_afterwards() {
        let (mut window, now) = window(WindowConfig { tickets: 2, ..WindowConfig::default() });
        let others: Vec<IpAddr> = (2..5).map(|n| IpAddr::from([192, 0, 2, n])).collect();
        let tickets: Vec<_> = others.iter().map(|other| window.issue(*other, now).unwrap()).collect();
        let one = |n: usize| Numbered { ticket: tickets[n], number: 0 };
        let soon = after(now, 100);
        for n in [0, 1] {
            assert_eq!(window.admit(&one(n), others[n], Channel::Datagram, soon), Admission::Execute);
        }
        assert_eq!(window.admit(&one(2), others[2], Channel::Datagram, soon), Admission::UseTcp);
        assert_eq!(window.admit(&one(2), others[2], Channel::Stream, soon), Admission::Execute);
        assert_eq!(window.issue(others[2], soon), None, "there is no room: no ticket is issued in vain");
        // The other tickets go; a copy that comes very late is still not executed.
        window.tickets.clear();
        window.networks.clear();
        assert_eq!(window.admit(&one(2), others[2], Channel::Datagram, soon), Admission::UseTcp);
        let next = window.issue(others[2], after(soon, 1)).unwrap();
        let next = Numbered { ticket: next, number: 0 };
        assert_eq!(window.admit(&next, others[2], Channel::Datagram, after(soon, 1)), Admission::Execute);
    }

    #[test]
    fn without_room_for_responses_requests_go_to_connections_and_are_executed_there_once() {
        let config = WindowConfig { kept_bytes: 8 * 400, ..WindowConfig::default() };
        let (mut window, now) = window(config);
        let ticket = window.issue(client(), now).unwrap();
        let numbered = |number| Numbered { ticket, number };
        assert_eq!(window.admit(&numbered(0), client(), Channel::Datagram, now), Admission::Execute);
        window.executed(&numbered(0), Some(&[0; 300]), now);
        for _ in 0..2 {
            assert_eq!(window.admit(&numbered(1), client(), Channel::Datagram, now), Admission::UseTcp);
        }
        assert_eq!(window.admit(&numbered(1), client(), Channel::Stream, now), Admission::Execute);
        assert_eq!(window.admit(&numbered(1), client(), Channel::Datagram, now), Admission::Running);
        let other = IpAddr::from([198, 51, 100, 1]);
        let theirs = Numbered { ticket: window.issue(other, now).unwrap(), number: 0 };
        assert_eq!(
            window.admit(&theirs, other, Channel::Datagram, now),
            Admission::Execute,
            "their own share"
        );
        window.check_invariants();
    }

    #[test]
    fn one_network_takes_an_eighth_of_the_tickets() {
        let (mut window, now) = window(WindowConfig { tickets: 16, ..WindowConfig::default() });
        let tickets: Vec<_> = (0..3).map(|_| window.issue(client(), now).unwrap()).collect();
        let mut admit =
            |ticket| window.admit(&Numbered { ticket, number: 0 }, client(), Channel::Datagram, now);
        let admitted: Vec<_> = tickets.into_iter().map(&mut admit).collect();
        assert_eq!(admitted, [Admission::Execute, Admission::Execute, Admission::UseTcp]);
        assert!(window.issue(IpAddr::from([198, 51, 100, 1]), now).is_some());
        window.check_invariants();
    }

    proptest! {
        /// Copies of requests come in any order, on any channel, at any time: none is executed twice.
        #[test]
        fn nothing_is_executed_twice(
            steps in prop::collection::vec((0..4_usize, 0..200_u32, any::<bool>(), 0..120_u64, any::<bool>()), 1..300),
        ) {
            let config = WindowConfig { tickets: 2, kept_bytes: 4000, ..WindowConfig::default() };
            let (mut window, mut now) = window(config);
            let addresses: Vec<IpAddr> = (0..4).map(|n| IpAddr::from([192, 0, 2, n])).collect();
            let tickets: Vec<_> = addresses.iter().map(|a| window.issue(*a, now).unwrap()).collect();
            let mut executed = std::collections::HashSet::new();
            let mut streamed = std::collections::HashSet::new();
            for (who, number, stream, wait, keeps) in steps {
                now = after(now, wait / 30);
                // A client sends a request on a connection once at most.
                if stream && !streamed.insert((who, number)) {
                    continue;
                }
                let numbered = Numbered { ticket: tickets[who], number };
                let channel = if stream { Channel::Stream } else { Channel::Datagram };
                if window.admit(&numbered, addresses[who], channel, now) == Admission::Execute {
                    prop_assert!(executed.insert((who, number)), "{who} {number}");
                    window.executed(&numbered, keeps.then_some(&b"response"[..]), now);
                }
                window.check_invariants();
            }
        }

        #[test]
        fn any_bytes_are_refused_as_a_ticket(ticket: [u8; TICKET_BYTES], number: u32) {
            let (mut window, now) = window(WindowConfig::default());
            let admission = window.admit(&Numbered { ticket, number }, client(), Channel::Datagram, now);
            prop_assert_eq!(admission, Admission::NewTicket);
        }
    }
}
