//! The connections that carry responses, as they open, end and wait too long (DHTTP §V).

use std::time::Instant;

use super::connections::{Expiry, Remains};
use super::ring::GlobalId;
use super::{ConnectionId, REFUSAL_WINDOW, Server};
use crate::wire::Answer;

impl Server {
    /// The connection is open, and the response that was named for it before, if any, is written: names the next one,
    /// of which the id and the HTTP response are to be written. `None`: the connection is idle.
    pub fn next_response(&mut self, connection: ConnectionId, now: Instant) -> Option<GlobalId> {
        self.connections.next(connection, now).map(|owed| owed.global_id())
    }

    /// The connection could not be opened, broke, or was closed by the client. Clients that it still owed a response
    /// are told to open a connection themselves, so that a page never hangs behind a firewall (DHTTP §IV-C).
    pub fn on_connection_closed(&mut self, connection: ConnectionId, now: Instant) {
        self.connections.on_failed(connection, false, now);
        self.close(connection, true, now);
    }

    fn close(&mut self, connection: ConnectionId, broken: bool, now: Instant) {
        let Some(Remains { owed, sent }) = self.connections.remove(connection) else { return };
        self.metrics.dhttp_connections_open.sub(1);
        if !owed.is_empty() {
            self.metrics.dhttp_connections_failed_total.add(1);
        }
        for sent in sent.into_iter().filter(|_| broken) {
            // Written is not received: a client that asks again is answered again. One that closed so soon may have
            // refused the connection; if it has its answer after all, it ignores this one.
            self.answered.forget(&sent.owed.global_id());
            if now.saturating_duration_since(sent.at) < REFUSAL_WINDOW {
                self.metrics.dhttp_responses_use_tcp_total.add(1);
                self.transmit(sent.owed.path(), sent.owed.id, Answer::UseTcp);
            }
        }
        for owed in owed {
            self.answered.forget(&owed.global_id());
            self.given_up.push_back(owed.global_id());
            self.metrics.dhttp_responses_use_tcp_total.add(1);
            self.transmit(owed.path(), owed.id, Answer::UseTcp);
        }
    }

    /// Lets time pass.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.report_loss(now);
        while let Some((connection, expiry)) = self.connections.expired(now) {
            if expiry == Expiry::Idle {
                self.metrics.dhttp_connections_idle_total.add(1);
            }
            self.connections.on_failed(connection, true, now);
            self.close(connection, expiry == Expiry::NotAccepted, now);
            self.closes.push_back(connection);
        }
    }
}
