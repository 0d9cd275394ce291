//! Requests that must not be repeated, by UDP: the client numbers them within the server's ticket, and says so on a
//! connection too, so that the server knows a request again whichever way it comes.

use std::time::{Duration, Instant};

use super::{Channel, Client, Event, MOST_PROOFS};
use crate::once::WINDOW;
use crate::wire::{Numbered, Once, RequestId, TICKET_BYTES, TICKET_TAIL_BYTES};

/// Most bytes of the field in a request.
pub(super) const FIELD_BYTES: usize = 1 + TICKET_BYTES + 4;

/// For so long a server remembers numbers beyond their ticket, with something to spare.
const REMEMBERED: Duration = Duration::from_secs(50);

/// Where the numbers of one server's requests come from.
#[derive(Debug)]
pub(super) struct Numbering {
    ticket: [u8; TICKET_BYTES],
    next: u32,
}

/// A request that was sent with a number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    numbered: Numbered,
    /// When it was first sent with any number.
    first: Instant,
}

impl Client {
    /// What a request says of itself; `None`: it cannot go by UDP.
    pub(super) fn number(&mut self, id: RequestId, now: Instant) -> Option<Once> {
        let outstanding = self.outstanding.get(&id)?;
        if outstanding.request.method.is_idempotent() {
            return Some(Once::No);
        }
        if let Some(sent) = outstanding.once {
            return Some(Once::Numbered(sent.numbered));
        }
        let server = outstanding.request.server;
        let Some(Numbering { ticket, next }) = self.numberings.get(&server) else {
            return Some(Once::Unnumbered);
        };
        let numbered = Numbered { ticket: *ticket, number: *next };
        // The server knows a window of numbers: those under way must lie within.
        let oldest = self
            .outstanding
            .values()
            .filter_map(|other| other.once.filter(|sent| sent.numbered.ticket == numbered.ticket))
            .map(|sent| sent.numbered.number)
            .min();
        if oldest.is_some_and(|oldest| numbered.number - oldest >= WINDOW) || numbered.number == u32::MAX {
            return None;
        }
        self.numberings.insert(server, Numbering { ticket: numbered.ticket, next: numbered.number + 1 });
        let outstanding = self.outstanding.get_mut(&id)?;
        outstanding.once = Some(Sent { numbered, first: now });
        Some(Once::Numbered(numbered))
    }

    /// What a request that was sent before says of itself.
    pub(super) fn once_field(&self, id: RequestId) -> Once {
        let sent = self.outstanding.get(&id).and_then(|outstanding| outstanding.once);
        sent.map_or(Once::No, |sent| Once::Numbered(sent.numbered))
    }

    /// Whether the server may have executed a request that must not be repeated: it must not be made anywhere else.
    pub fn is_numbered(&self, id: RequestId) -> bool {
        self.outstanding.get(&id).is_some_and(|outstanding| outstanding.once.is_some())
    }

    /// The server says that by its ticket, if it had one, the request was not executed for `age_s` seconds, and will
    /// not be.
    pub(super) fn handle_ticket(
        &mut self,
        id: RequestId,
        ticket: [u8; TICKET_BYTES],
        refused: [u8; TICKET_TAIL_BYTES],
        age_s: u32,
        now: Instant,
    ) {
        let Some(outstanding) = self.outstanding.get(&id) else { return };
        let Channel::Udp { sent, proofs, .. } = outstanding.channel else { return };
        // What is said of another ticket is said of an earlier copy, which the answer to this one does not concern.
        if outstanding.request.method.is_idempotent() || refused != self.once_field(id).ticket_tail() {
            return;
        }
        let server = outstanding.request.server;
        let presented = outstanding.once;
        if let Some(Sent { first, .. }) = presented {
            let elapsed = now.saturating_duration_since(first);
            if elapsed >= Duration::from_secs(age_s.into()) || elapsed >= REMEMBERED {
                // It was another window that may have executed it: the server has been started again since.
                self.forget_numbering(id);
                return self.outcome_unknown(id);
            }
        }
        if proofs >= MOST_PROOFS {
            return self.use_tcp(id, super::TcpReason::Asked);
        }
        // Several requests may have been given tickets at once: all use the first of them.
        let known = self.numberings.get(&server).map(|numbering| numbering.ticket);
        if known.is_none() || known == presented.map(|sent| sent.numbered.ticket) {
            self.numberings.insert(server, Numbering { ticket, next: 0 });
        }
        self.metrics.dhttp_client_proofs_total.add(1);
        if let Some(outstanding) = self.outstanding.get_mut(&id) {
            outstanding.once = None;
        }
        self.send(id, sent, proofs + 1, now);
        // Both tickets are of one window, so that the time of the first sending still decides.
        if let (Some(before), Some(outstanding)) = (presented, self.outstanding.get_mut(&id))
            && let Some(after) = &mut outstanding.once
        {
            after.first = before.first;
        }
    }

    /// The ticket of this request is of no use any more.
    pub(super) fn forget_numbering(&mut self, id: RequestId) {
        let Some(outstanding) = self.outstanding.get(&id) else { return };
        let Some(Sent { numbered, .. }) = outstanding.once else { return };
        let server = outstanding.request.server;
        let is_current = |ticket: &[u8; TICKET_BYTES]| *ticket == numbered.ticket;
        if self.numberings.get(&server).is_some_and(|numbering| is_current(&numbering.ticket)) {
            self.numberings.retain(|known| *known != server);
        }
    }

    pub(super) fn outcome_unknown(&mut self, id: RequestId) {
        self.set_channel(id, Channel::Caller);
        self.metrics.dhttp_client_outcome_unknown_total.add(1);
        self.events.push_back(Event::OutcomeUnknown { id });
    }
}
