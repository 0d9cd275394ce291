//! How requests are refused, and connections with them.

use std::io;

use tidegate_core::Verdict;
use tidegate_core::hooks::{Decision, Reply};
use tidegate_http::{BodyFraming, HeadError, RequestHead, Version};

use crate::data_core::Bytes;
use crate::session::context::RequestContext;
use crate::session::{Connection, Step, respond};

impl Connection<'_> {
    /// Does to a request what a rule says; `None` when the connection goes on.
    pub(super) fn turn_away(
        self,
        context: RequestContext,
        verdict: Verdict,
        head: &RequestHead<'_>,
    ) -> Option<Step> {
        self.core.metrics.requests_policed_total.add(1);
        match verdict {
            Verdict::Refuse | Verdict::Delay | Verdict::Continue => {}
            Verdict::Reset => return Some(self.reset()),
            _ => return Some(Step::Close),
        }
        self.answer_refused(context, head, &Reply { status: 503, ..Reply::default() })
    }

    /// Does to a request what the defence says; `None` when the connection goes on.
    pub(super) fn refuse_client(
        self,
        context: RequestContext,
        decision: Decision,
        reply: Option<&Reply>,
        head: &RequestHead<'_>,
    ) -> Option<Step> {
        self.core.metrics.requests_policed_total.add(1);
        match reply {
            Some(reply) => self.answer_refused(context, head, reply),
            None if decision.verdict == Verdict::Drop => Some(Step::Close),
            None => Some(self.reset()),
        }
    }

    /// With nothing to linger for, closing resets both ends (*Kernel Mechanisms*, section 3.3).
    pub(super) fn reset(self) -> Step {
        self.client.set_zero_linger();
        Step::Close
    }

    /// Answers a request that is refused; `None` when the connection goes on.
    fn answer_refused(self, context: RequestContext, head: &RequestHead<'_>, reply: &Reply) -> Option<Step> {
        // What follows a body that nobody reads cannot be told from it.
        let keep_alive = head.keep_alive && head.framing == BodyFraming::None && !self.core.is_draining();
        let (out, bytes) = respond::reply(self.core, head, reply, keep_alive);
        // A client that does not take its answers is not owed this one.
        let sent = self.client.try_write(&out).is_ok_and(|length| length == out.len());
        let RequestContext { peer, began, .. } = context;
        self.core.account(peer.ip(), head, reply.status, bytes, "none", began);
        if sent && keep_alive {
            self.await_next();
            return None;
        }
        Some(Step::finish())
    }

    /// Answers a head that is malformed or ambiguous, and ends the connection: what follows cannot be trusted.
    pub(super) fn refuse(self, error: HeadError) -> Step {
        tracing::debug!(client = %self.client.peer(), reason = error.name(), "request refused");
        match self.refuse_unreadable(error.status(), |out| self.client.try_write(out)) {
            true => Step::finish(),
            false => Step::Close,
        }
    }

    /// Answers a client that does not speak TLS where it has to.
    pub(super) fn refuse_in_clear(self) {
        self.refuse_unreadable(400, |out| self.client.try_write_in_clear(out));
    }

    /// Counts and logs a request that cannot be read; whether its client was answered.
    fn refuse_unreadable(self, status: u16, write: impl FnOnce(&[u8]) -> io::Result<usize>) -> bool {
        self.core.metrics.requests_refused_total.add(1);
        if !self.core.answers_malformed(self.client.place, self.client.peer()) {
            self.core.metrics.requests_policed_total.add(1);
            return false;
        }
        let sent = self.short_error(status, write);
        self.core.log_unreadable(self.client.peer(), Version::Http11, status, sent);
        true
    }

    /// Sends a short error without waiting: the connection ends and its socket buffer has room for it.
    pub(super) fn last_words(self, status: u16) {
        self.short_error(status, |out| self.client.try_write(out));
    }

    /// Returns what was sent of it.
    fn short_error(self, status: u16, write: impl FnOnce(&[u8]) -> io::Result<usize>) -> Bytes {
        let mut out = Vec::with_capacity(256);
        let body = respond::write_error(status, &self.core.clock.date(), false, &mut out);
        self.core.metrics.count_response(status, out.len() as u64);
        let sent = write(&out).unwrap_or(0) as u64;
        let head = out.len() as u64 - body;
        Bytes { head: sent.min(head), body: sent.saturating_sub(head) }
    }
}
