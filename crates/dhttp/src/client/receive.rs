//! What comes in by UDP: an answer, or a question for proof of the address.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidegate_http::Method;

use super::answer::complete_response;
use super::{Channel, Client, Event, Generation, MOST_PROOFS, TcpReason};
use crate::pieces::Assembly;
use crate::wire::{Answer, RequestId, Response};

impl Client {
    /// Feeds one datagram that came to the UDP port of `generation`.
    pub fn handle_datagram(
        &mut self,
        generation: Generation,
        from: SocketAddr,
        datagram: &[u8],
        now: Instant,
    ) {
        let Ok(Response { id, answer }) = Response::parse(datagram) else {
            self.metrics.dhttp_client_malformed_total.add(1);
            return;
        };
        if self.handle_probed(generation, id, &answer) {
            return;
        }
        let asked = self.outstanding.get(&id).filter(|request| request.generation == generation);
        if let Some(server) = asked.map(|request| request.request.server) {
            self.heard(server);
        }
        let Some((server, method, sent, proofs)) = self.awaiting(id, generation) else { return };
        if !self.cache_is_allowed(id, from.ip()) {
            return;
        }
        match answer {
            Answer::UseTcp => {
                self.forget_numbering(id);
                self.use_tcp(id, TcpReason::Asked);
            }
            Answer::OutcomeUnknown => self.outcome_unknown(id),
            Answer::NewTicket { token, ticket, refused, age_s } => {
                self.tokens.insert((generation, server), Bytes::copy_from_slice(token));
                self.handle_ticket(id, ticket, refused, age_s, now);
            }
            Answer::ProveAddress { token } => self.prove((generation, server), id, token, sent, proofs, now),
            Answer::Http { token, http } => {
                if let Some(token) = token.filter(|token| !token.is_empty()) {
                    self.tokens.insert((generation, server), Bytes::copy_from_slice(token));
                }
                self.respond(id, method, from, Bytes::copy_from_slice(http));
            }
            Answer::Piece { total, .. } if total as usize > self.config.pieces_bytes => {
                self.metrics.dhttp_client_malformed_total.add(1);
            }
            Answer::Piece { tag, total, offset, piece } => match self.assemble(id, tag, total, offset, piece)
            {
                Ok(http) => self.respond(id, method, from, http),
                Err(wait) => self.set_channel(id, Channel::Udp { sent, proofs, deadline: now + wait }),
            },
        }
    }

    /// The server asks for proof of the address: the request is sent again with the token that it gave.
    fn prove(
        &mut self,
        server: (Generation, SocketAddr),
        id: RequestId,
        token: &[u8],
        sent: u32,
        proofs: u32,
        now: Instant,
    ) {
        // A duplicate of the question; other requests may have been asked, and given, the same.
        if self.outstanding.get(&id).is_some_and(|request| request.presented == token) {
            return;
        }
        if proofs >= MOST_PROOFS {
            // Answers come from a cache and from the server in turn: TCP goes to the server only.
            self.use_tcp(id, TcpReason::Asked);
            return;
        }
        self.metrics.dhttp_client_proofs_total.add(1);
        self.tokens.insert(server, Bytes::copy_from_slice(token));
        self.send(id, sent, proofs + 1, now);
    }

    /// Puts a piece of a response to those that have come.
    ///
    /// # Errors
    /// Pieces are missing: how long they are waited for.
    fn assemble(
        &mut self,
        id: RequestId,
        tag: u32,
        total: u32,
        offset: u32,
        piece: &[u8],
    ) -> Result<Bytes, Duration> {
        let assembly = self.assemblies.entry(id).or_insert_with(|| Assembly::new(tag, total));
        if !assembly.is_of(tag, total) {
            // The server has made the response anew.
            let repairs = assembly.repairs;
            *assembly = Assembly::new(tag, total);
            assembly.repairs = repairs;
        }
        assembly.insert(offset, piece);
        let wait = self.config.repair_timeout.saturating_mul(1 << assembly.repairs.min(8));
        assembly.complete().map(Bytes::copy_from_slice).ok_or(wait)
    }

    /// All of a response has come by UDP.
    fn respond(&mut self, id: RequestId, method: Method, from: SocketAddr, http: Bytes) {
        let Some(http) = self.unseal(id, http) else {
            // Not from whom has the key: the answer may still come.
            self.assemblies.remove(&id);
            self.metrics.dhttp_client_seal_refused_total.add(1);
            return;
        };
        match complete_response(&http, method) {
            Some(head_bytes) => {
                self.set_channel(id, Channel::Caller);
                self.metrics.dhttp_client_responses_udp_total.add(1);
                self.events.push_back(Event::Response { id, from, http, head_bytes });
            }
            None => {
                self.metrics.dhttp_client_bad_http_total.add(1);
                self.use_tcp(id, TcpReason::BadAnswer);
            }
        }
    }
}
