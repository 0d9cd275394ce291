//! What a client does when nothing comes: timeouts, probes, and starting over.

use std::time::Instant;

use super::era::Expected;
use super::request::RequestState;
use super::{Client, ClientError, settle};

/// How often a short packet ends what longer ones did not, with none of those in between, before only short ones are
/// asked for: the path's limit has sunk without a word (RFC 8899 §4.3).
const ONLY_SHORT: u32 = 3;

/// How often the same is asked for in vain while other packets arrive, none of them of full length, before only short
/// ones are asked for. A timeout sets two packets free: where the second one is short and passes, no timeout follows
/// the other, and no attempt comes to be answered by short packets.
const IN_VAIN: u32 = 4;

impl Client {
    /// Starts over with a new connection; the requests go on with their user continuations.
    pub(super) fn reopen(&mut self, now: Instant) {
        while !self.eras.is_empty() {
            self.drop_oldest_era();
        }
        self.last_anchor = None;
        for state in self.requests.values_mut() {
            state.forget_flight();
        }
        self.connection = self.draw();
        self.established = false;
        self.open_due = true;
        self.timeout_due = false;
        self.only_short = 0;
        self.promised = 0;
        self.backoff = 0;
        self.open_wants.clear();
        self.open_inputs.clear();
        self.count_attempt();
        self.waiting_since = self.waiting_since.map(|_| now);
    }

    fn count_attempt(&mut self) {
        self.attempts += 1;
        if self.attempts > self.config.max_attempts {
            self.failure = Some(ClientError::Unreachable { attempts: self.config.max_attempts });
        }
    }

    /// Does what is due at `now`.
    pub fn handle_timeout(&mut self, now: Instant) {
        for state in self.requests.values_mut() {
            if state.waits_until().is_some_and(|at| now >= at) {
                state.end_wait();
            }
        }
        self.update_waiting(now);
        self.account(now);
        if self.probe_at().is_some_and(|at| now >= at) {
            self.probe(now);
        }
        if self.rto_at().is_some_and(|at| now >= at) {
            self.time_out(now);
        }
    }

    /// The way to the server carries no datagrams of full length: what opens from now on is as short as padding lets it
    /// be, and an open that was not answered is sent again at once.
    pub fn handle_datagram_too_long(&mut self) {
        let short = self.short_bytes();
        if self.config.datagram_bytes > short {
            self.config.datagram_bytes = short;
            self.open_due |= !self.established && self.waiting_since.is_some();
        }
    }

    /// What was sent is lost because its server is gone; another that shares its keys takes the next datagram.
    pub fn handle_server_lost(&mut self, now: Instant) {
        for state in self.requests.values_mut() {
            state.end_wait();
        }
        self.update_waiting(now);
        if self.rto_at().is_some() {
            // Of many servers those that are gone say so within a round trip: no attempt was made in vain.
            self.attempts = self.attempts.saturating_sub(1);
            self.time_out(now);
            // Nothing speaks for congestion: the next timeout is not put off.
            self.backoff = self.backoff.saturating_sub(1);
            self.timeouts -= 1;
        }
    }

    /// Something has come from the server that is no packet: it tells a key, and what was sent is on its way again. An
    /// open that is lost now need not wait as if nobody were there.
    pub fn handle_sign_of_life(&mut self, now: Instant) {
        if !self.established {
            self.backoff = 0;
            self.waiting_since = self.waiting_since.map(|_| now);
        }
    }

    /// Datagrams leave from another address than before: continuations are bound to the old one, so that a new
    /// connection begins.
    pub fn handle_address_changed(&mut self, now: Instant) {
        if self.established {
            self.reopen(now);
        }
    }

    /// Retransmission timeouts since the start, among them those of an open without an answer.
    #[must_use]
    pub fn timeouts(&self) -> u64 {
        self.timeouts
    }

    fn time_out(&mut self, now: Instant) {
        self.timeouts += 1;
        self.waiting_since = Some(now);
        if !self.established {
            self.count_attempt();
            self.open_due = true;
            self.backoff += 1;
            self.open_haste = self.draw() as u8;
        } else if self.backoff == 0 && self.only_short_pass() {
            self.handle_datagram_too_long();
            self.reopen(now);
        } else if self.backoff < self.config.max_attempts.min(6) {
            self.backoff += 1;
            self.timeout_due = true;
        } else {
            self.reopen(now);
        }
    }

    fn only_short_pass(&self) -> bool {
        self.only_short >= ONLY_SHORT && self.config.datagram_bytes > self.short_bytes()
    }

    /// Whether what is asked for does not come although the path carries shorter packets.
    pub(super) fn long_packets_vanish(&self) -> bool {
        self.server_datagram_bytes > self.short_bytes()
            && self.requests.values().any(|state| state.times_in_vain(self.arrivals) >= IN_VAIN)
    }

    /// Asks again, with trickles that are not needed otherwise, for what has been on its way for too long: the last
    /// packets of an answer have none after them to reveal their loss.
    fn probe(&mut self, now: Instant) {
        self.probed = true;
        for state in &mut self.eras {
            for expected in state.expected.values_mut() {
                let (want, pushes) = (expected.want.take(), std::mem::take(&mut expected.pushes));
                settle(&mut self.requests, Expected { want, pushes });
            }
        }
        self.update_waiting(now);
    }

    /// When what has not been answered counts as lost.
    pub(crate) fn rto_at(&self) -> Option<Instant> {
        if self.failure.is_some() || self.open_due || self.timeout_due {
            return None;
        }
        let wait = match self.established {
            true => self.round_trip.backed_off(self.backoff),
            false => self.round_trip.backed_off_open(self.backoff, self.open_haste),
        };
        self.waiting_since.map(|since| since + wait)
    }

    pub(super) fn probe_at(&self) -> Option<Instant> {
        let parked = self.eras.iter().any(|state| !state.ready.is_empty());
        if self.probed || !parked || self.failure.is_some() {
            return None;
        }
        self.waiting_since.map(|since| since + self.round_trip.probe(self.config.delayed_ack))
    }

    /// When to call [`Client::handle_timeout`] at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let reordering = self.round_trip.reordering();
        let give_up = self.eras.iter().filter_map(|state| state.give_up_at(reordering)).min();
        let waits = self.requests.values().filter_map(RequestState::waits_until).min();
        [self.rto_at(), self.probe_at(), self.ack_at, give_up, waits].into_iter().flatten().min()
    }
}
