//! Requests by UDP that must not be repeated: through the window that all cores share, or to a connection.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{InFlight, Path, Received, Server, Ticket};
use crate::once::{Admission, Channel, Content, ReplayWindow};
use crate::wire::{Answer, Numbered, Once, RequestId};

/// The window, as cores share it. Few requests need it, and none for long.
pub type SharedWindow = Arc<Mutex<ReplayWindow>>;

/// The window. Whoever panicked with it has left it as it was: every method of it is one step.
pub(crate) fn lock(window: &SharedWindow) -> MutexGuard<'_, ReplayWindow> {
    window.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// From now on requests that must not be repeated are taken by UDP, each once in this window; without one they are
    /// told to use TCP. All cores that clients reach at one address must share it.
    pub fn share_window(&mut self, window: SharedWindow) {
        self.window = Some(window);
    }

    /// Which of its client's unrepeatable requests this is; `None`: it may be repeated.
    pub fn numbered(&self, ticket: &Ticket) -> Option<Numbered> {
        self.in_flight.get(&ticket.0).and_then(|request| request.once)
    }

    /// Decides about a request that must not be repeated; `request` is what would be remembered of it.
    pub(super) fn handle_once<'a>(
        &mut self,
        id: RequestId,
        once: Once,
        mut request: InFlight,
        http: &'a [u8],
        head_bytes: usize,
        now: Instant,
    ) -> Received<'a> {
        let path = request.path();
        let Some(window) = self.window.clone().filter(|_| once != Once::No && request.knows_tokens) else {
            return self.divert(path, id, |metrics| &metrics.dhttp_requests_unsafe_total);
        };
        let Once::Numbered(numbered) = once else {
            return self.give_ticket(&window, path, id, once, now);
        };
        if !request.proved {
            // Not even looked up: an address must not be answered what another has asked.
            self.ask_for_proof(id, &request, now);
            return Received::Done;
        }
        if self.in_flight.len() >= self.config.in_flight {
            return self.divert(path, id, |metrics| &metrics.dhttp_requests_shed_total);
        }
        let Some(permit) = self.permit_for(path.client.ip()) else {
            return self.divert(path, id, |metrics| &metrics.dhttp_requests_crowded_total);
        };
        request.once = Some(numbered);
        request.permit = Some(permit);
        let content = Content { http, secret: request.seal.is_some() };
        let admission = lock(&window).admit(&numbered, content, path.client.ip(), Channel::Datagram, now);
        match admission {
            Admission::Execute => {
                self.metrics.dhttp_requests_total.add(1);
                self.metrics.dhttp_once_executed_total.add(1);
                Received::Request { ticket: self.put_in_flight(id, request), http, head_bytes }
            }
            Admission::Executed(response) => {
                self.metrics.dhttp_once_repeated_total.add(1);
                Received::Executed { ticket: self.put_in_flight(id, request), response }
            }
            Admission::Running => {
                self.metrics.dhttp_requests_duplicate_total.add(1);
                Received::Done
            }
            Admission::UseTcp => self.divert(path, id, |metrics| &metrics.dhttp_requests_unsafe_total),
            Admission::Unknown => {
                self.metrics.dhttp_once_unknown_total.add(1);
                self.transmit(path, id, Answer::OutcomeUnknown);
                Received::Done
            }
            Admission::NewTicket => self.give_ticket(&window, path, id, once, now),
        }
    }

    /// Never more than three times the shortest such request.
    fn give_ticket<'a>(
        &mut self,
        window: &SharedWindow,
        path: Path,
        id: RequestId,
        once: Once,
        now: Instant,
    ) -> Received<'a> {
        let (ticket, age_s) = {
            let mut window = lock(window);
            (window.issue(path.client.ip(), now), window.age_s(now))
        };
        let Some(ticket) = ticket else {
            return self.divert(path, id, |metrics| &metrics.dhttp_requests_unsafe_total);
        };
        self.metrics.dhttp_once_tickets_total.add(1);
        let token = self.tokens.issue(path.client, self.unix_s(now));
        let answer = Answer::NewTicket { token: &token, ticket, refused: once.ticket_tail(), age_s };
        self.transmit(path, id, answer);
        Received::Done
    }

    /// Tells the window what came of a request.
    pub(super) fn on_executed(&self, request: &InFlight, response: Option<&[u8]>, now: Instant) {
        if let (Some(window), Some(numbered)) = (&self.window, &request.once) {
            lock(window).executed(numbered, response, now);
        }
    }

    /// Longest response of such a request that is kept, in bytes.
    pub fn kept_response_bytes(&self) -> usize {
        self.window.as_ref().map_or(0, |window| lock(window).response_bytes())
    }
}
