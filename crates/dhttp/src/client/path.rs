//! Whether datagrams pass between the client and a server: where they are dropped on the way, nothing says so.
//!
//! A server that gets a request without a token answers it at once, if only with a token. Where the client hears
//! nothing for a while, it asks for that; a server that takes its time for a response is told from one that is not
//! reached.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rand::RngExt;

use super::{Channel, Client, Generation, TLS_RECORD, TcpReason, Transmit};
use crate::wire::{Answer, Once, Pieces, Request, RequestId};

/// Asks for nothing that a site has, so that nothing but a token can be the answer.
const PROBE: &[u8] = b"OPTIONS * HTTP/1.1\r\nHost: dhttp.invalid\r\n\r\n";

/// So many times as long is a server waited for that has given a token: it makes responses before it answers, and may
/// be busy; the others answer at once.
const KNOWN: u32 = 4;

/// A server that has been sent something and not been heard since.
#[derive(Debug)]
pub(super) struct Watched {
    /// How long a sign of life is waited for.
    patience: Duration,
    deadline: Instant,
    /// The probes sent, at most as many as the settings allow.
    probes: Vec<RequestId>,
}

impl Client {
    /// Whether datagrams to `server` are thought to be lost on the way.
    pub(super) fn is_silent(&self, server: SocketAddr, now: Instant) -> bool {
        self.silent.get(&server).is_some_and(|until| *until > now)
    }

    /// Something has been sent to `server` from these ports.
    pub(super) fn watch(&mut self, server: SocketAddr, generation: Generation, now: Instant) {
        let is_off = self.config.probe_after.is_zero() || self.watched.len() >= self.config.outstanding;
        if is_off || self.watched.contains_key(&server) {
            return;
        }
        let is_known = self.tokens.get(&(generation, server)).is_some();
        let patience = self.config.probe_after.saturating_mul(if is_known { KNOWN } else { 1 });
        let deadline = now + patience;
        self.watched.insert(server, Watched { patience, deadline, probes: Vec::new() });
        self.watch_deadlines.insert((deadline, server));
    }

    /// `server` has been reached: it answers one of the client's ids.
    pub(super) fn heard(&mut self, server: SocketAddr) {
        self.unwatch(server);
        if self.silent.get(&server).is_some() {
            self.silent.retain(|known| *known != server);
        }
    }

    fn unwatch(&mut self, server: SocketAddr) {
        let Some(watched) = self.watched.remove(&server) else { return };
        self.watch_deadlines.remove(&(watched.deadline, server));
        for probe in watched.probes {
            self.probes.remove(&probe);
        }
    }

    /// Takes the answer to a probe, if it is one.
    pub(super) fn handle_probed(
        &mut self,
        generation: Generation,
        id: RequestId,
        answer: &Answer<'_>,
    ) -> bool {
        let Some((server, sent_from)) = self.probes.get(&id).copied() else { return false };
        if sent_from != generation {
            return false;
        }
        if let Answer::ProveAddress { token } = answer {
            self.tokens.insert((generation, server), Bytes::copy_from_slice(token));
        }
        self.heard(server);
        true
    }

    /// The times of servers that have kept silent.
    pub(super) fn handle_silence(&mut self, now: Instant) {
        while let Some(&(_, server)) = self.watch_deadlines.first().filter(|(deadline, _)| *deadline <= now) {
            let mut waiting: Vec<(RequestId, Generation)> = self
                .outstanding
                .iter()
                .filter(|(_, request)| request.request.server == server)
                .filter(|(_, request)| matches!(request.channel, Channel::Udp { .. }))
                .map(|(id, request)| (*id, request.generation))
                .collect();
            waiting.sort_unstable();
            let asked = self.watched.get(&server).map_or(0, |watched| watched.probes.len());
            match waiting.last() {
                None => self.unwatch(server),
                Some((_, generation)) if asked < self.config.probes => self.probe(server, *generation, now),
                Some(_) => {
                    self.unwatch(server);
                    self.tokens.retain(|(_, known)| *known != server);
                    // Known for longer once the server has answered by TCP.
                    self.silent.insert(server, now + self.config.max_timeout);
                    self.metrics.dhttp_client_silent_total.add(1);
                    waiting.iter().for_each(|(id, _)| self.use_tcp(*id, TcpReason::NoAnswer));
                }
            }
        }
    }

    /// The server has answered by TCP what it did not by UDP: for some time nothing is sent to it by UDP.
    pub fn on_tcp_answered(&mut self, id: RequestId, now: Instant) {
        let Some(server) = self.outstanding.get(&id).map(|request| request.request.server) else { return };
        if self.is_silent(server, now) {
            let until = self.silent.get(&server).copied().unwrap_or(now);
            // Once: requests that have gone by TCP for this reason prove nothing new.
            if until <= now + self.config.max_timeout {
                self.silent.insert(server, now + self.config.unreachable_for);
            }
        }
    }

    /// ICMP says that `server` cannot be reached by UDP: its requests are made by HTTP at once, and so are others for
    /// some time (DHTTP §IV-E).
    pub fn handle_unreachable(&mut self, server: SocketAddr, now: Instant) {
        let mut waiting: Vec<RequestId> = self
            .outstanding
            .iter()
            .filter(|(_, request)| request.request.server == server)
            .filter(|(_, request)| matches!(request.channel, Channel::Udp { .. }))
            .map(|(id, _)| *id)
            .collect();
        if waiting.is_empty() {
            return;
        }
        waiting.sort_unstable();
        self.metrics.dhttp_client_unreachable_total.add(1);
        self.unreachable.insert(server, now + self.config.unreachable_for);
        for id in waiting {
            // Another copy of it may have reached the server while it was there.
            if self.is_numbered(id) { self.outcome_unknown(id) } else { self.use_http(id) }
        }
    }

    fn probe(&mut self, server: SocketAddr, generation: Generation, now: Instant) {
        let id = loop {
            let id = RequestId(self.rng.random());
            let is_known = self.outstanding.contains_key(&id) || self.probes.contains_key(&id);
            if !id.0.starts_with(TLS_RECORD) && !is_known {
                break id;
            }
        };
        let other_port = self.tcp_ports.get(&generation).copied().unwrap_or_default();
        let pieces = Pieces::Unknown;
        let mut payload = Vec::new();
        Request { id, other_port, resend: false, token: Some(b""), pieces, once: Once::No, http: PROBE }
            .write(&mut payload);
        self.metrics.dhttp_client_probes_total.add(1);
        self.transmits.push_back(Transmit { generation, to: server, payload });
        self.probes.insert(id, (server, generation));
        let Some(watched) = self.watched.get_mut(&server) else { return };
        self.watch_deadlines.remove(&(watched.deadline, server));
        watched.deadline = now + watched.patience;
        watched.probes.push(id);
        self.watch_deadlines.insert((watched.deadline, server));
    }

    /// See [`Client::check_invariants`].
    pub(super) fn check_paths(&self) {
        let deadlines = self.watched.iter().map(|(server, watched)| (watched.deadline, *server));
        assert_eq!(deadlines.collect::<std::collections::BTreeSet<_>>(), self.watch_deadlines);
        assert!(self.watched.len() <= self.config.outstanding);
        let probes: usize = self.watched.values().map(|watched| watched.probes.len()).sum();
        assert_eq!(probes, self.probes.len());
        assert!(probes <= self.watched.len() * self.config.probes);
    }
}
