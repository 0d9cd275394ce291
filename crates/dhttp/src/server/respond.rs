//! What goes out: by which way a response goes (DHTTP §III-C), in how many datagrams, and what an unproved address
//! gets instead.

use std::net::SocketAddr;
use std::time::Instant;

use rand::RngExt;

use super::connections::{Choice, Owed};
use super::{Carrier, InFlight, Route, Server, Ticket, Wanted};
use crate::pieces::tag_of;
use crate::sealed::RESPONSE_OVERHEAD_BYTES;
use crate::token::TOKEN_BYTES;
use crate::wire::{Answer, ID_BYTES, PIECE_HEADER_BYTES, PieceRange, RequestId};

impl Server {
    /// Whether the response goes by a connection however short it is: then [`Server::respond_long`] can be called
    /// before the request is executed. A request that was sent again must be answered by TCP (DHTTP §III-B).
    pub fn must_use_connection(&self, ticket: &Ticket) -> bool {
        self.in_flight.get(&ticket.0).is_some_and(|request| request.resent)
    }

    /// Takes a complete HTTP response and chooses its channel (DHTTP §III-C).
    pub fn respond(&mut self, ticket: Ticket, http: &[u8], now: Instant) -> Route {
        let Some(request) = self.take(ticket.0) else { return Route::Datagram };
        let id = ticket.0.1;
        self.on_executed(&request, Some(http), now);
        let sealed = request.seal.as_ref().map(|seal| seal.seal(http));
        let http = sealed.as_deref().unwrap_or(http);
        let room = self.datagram_bytes(request.client).saturating_sub(ID_BYTES);
        let room = if sealed.is_some() { room.saturating_sub(2) } else { room };
        let short = http.len() <= self.config.size_threshold_bytes && http.len() <= room;
        let monitor =
            self.loss.is_high_for(request.client.ip(), now) && !self.rng.random_bool(self.loss.threshold());
        if !short && !monitor && self.takes_pieces(&request) && http.len() <= request.pieces_bytes {
            self.transmit_pieces(id, &request, http, now);
            return Route::Datagram;
        }
        if !short || request.resent || monitor {
            return self.by_connection(id, &request, now);
        }
        let allowance = self.config.amplification.saturating_mul(request.received_bytes);
        if !request.proved && ID_BYTES + http.len() > allowance {
            self.ask_for_proof(id, &request, now);
            return Route::Datagram;
        }
        // A token for the next request where there is room, before this one is out of date.
        let with_token = ID_BYTES + 2 + TOKEN_BYTES + http.len();
        let attach = request.knows_tokens
            && !request.well_proved
            && with_token <= room + ID_BYTES
            && (request.proved || with_token <= allowance);
        let token = attach.then(|| self.tokens.issue(request.client, self.unix_s(now)));
        // A sealed response has the form with a token, perhaps an empty one.
        let token = token.as_ref().map(<[u8; _]>::as_slice).or(sealed.as_ref().map(|_| &[][..]));
        self.transmit(request.path(), id, Answer::Http { token, http });
        self.metrics.dhttp_responses_udp_total.add(1);
        self.loss.on_fresh(request.client.ip(), 1, now);
        self.report_loss(now);
        Route::Datagram
    }

    /// Several datagrams go only to who proved his address and takes them, while nothing speaks against more of them.
    fn takes_pieces(&self, request: &InFlight) -> bool {
        request.proved && !request.resent && !self.stressed && !matches!(request.pieces, Wanted::Nothing)
    }

    fn transmit_pieces(&mut self, id: RequestId, request: &InFlight, http: &[u8], now: Instant) {
        let tag = tag_of(http);
        let total = http.len();
        let most = self.datagram_bytes(request.client).saturating_sub(PIECE_HEADER_BYTES).max(1);
        let ranges = match &request.pieces {
            Wanted::Ranges(wanted, ranges) if *wanted == tag => ranges.as_slice(),
            // The response has been made anew and is another: all of it.
            _ => &[PieceRange { offset: 0, length: u32::MAX }],
        };
        if matches!(request.pieces, Wanted::Ranges(..)) {
            self.metrics.dhttp_repairs_total.add(1);
            self.loss.on_resent((request.client.ip(), id), now);
        } else {
            self.metrics.dhttp_responses_pieces_total.add(1);
            self.loss.on_pieces(request.client.ip(), total.div_ceil(most), now);
        }
        self.report_loss(now);
        let mut left = total;
        for range in ranges {
            let start = (range.offset as usize).min(total);
            // Ranges that overlap are no way to get more than the response.
            let end = start.saturating_add(range.length as usize).min(total).min(start + left);
            left -= end - start;
            let piece_of =
                http.get(start..end).unwrap_or_default().chunks(most).zip((start..end).step_by(most));
            for (piece, offset) in piece_of {
                let answer = Answer::Piece { tag, total: total as u32, offset: offset as u32, piece };
                self.metrics.dhttp_pieces_total.add(1);
                self.transmit(request.path(), id, answer);
            }
        }
    }

    /// Chooses a channel for a response that is known to be too long for a datagram, though it may not exist yet.
    pub fn respond_long(&mut self, ticket: Ticket, now: Instant) -> Route {
        match self.take(ticket.0) {
            Some(request) => {
                self.on_executed(&request, None, now);
                self.by_connection(ticket.0.1, &request, now)
            }
            None => Route::Datagram,
        }
    }

    /// There will be no response: the client's timers take over.
    pub fn abandon(&mut self, ticket: Ticket) {
        if let Some(request) = self.take(ticket.0) {
            self.on_executed(&request, None, self.started.0);
        }
    }

    /// Most bytes of an HTTP response that may answer this request by UDP.
    pub fn room_bytes(&self, ticket: &Ticket) -> usize {
        let Some(request) = self.in_flight.get(&ticket.0) else { return 0 };
        let allowance = self.config.amplification.saturating_mul(request.received_bytes);
        let datagram =
            self.datagram_bytes(request.client).min(if request.proved { usize::MAX } else { allowance });
        let one = datagram.saturating_sub(ID_BYTES).min(self.config.size_threshold_bytes);
        let room = if self.takes_pieces(request) { one.max(request.pieces_bytes) } else { one };
        let overhead_bytes = if request.seal.is_some() { 2 + RESPONSE_OVERHEAD_BYTES } else { 0 };
        room.saturating_sub(overhead_bytes)
    }

    fn by_connection(&mut self, id: RequestId, request: &InFlight, now: Instant) -> Route {
        if !request.proved {
            self.ask_for_proof(id, request, now);
            return Route::Datagram;
        }
        // A connection of the server's would be in the clear: the client opens one with TLS.
        let choice = if self.stressed || request.seal.is_some() {
            Choice::None
        } else {
            let peer = SocketAddr::new(request.client.ip(), request.tcp_port);
            self.connections.assign(peer, Owed { client: request.client, local: request.local, id }, now)
        };
        let carrier = match choice {
            Choice::Idle(connection) => Carrier::Idle(connection),
            Choice::Queued => Carrier::Busy,
            Choice::New(connection, evicted) => {
                if let Some(evicted) = evicted {
                    self.metrics.dhttp_connections_evicted_total.add(1);
                    self.metrics.dhttp_connections_open.sub(1);
                    self.closes.push_back(evicted);
                }
                self.metrics.dhttp_connections_opened_total.add(1);
                self.metrics.dhttp_connections_open.add(1);
                Carrier::New(connection, SocketAddr::new(request.client.ip(), request.tcp_port))
            }
            Choice::None | Choice::Unreachable => {
                if choice == Choice::Unreachable {
                    self.metrics.dhttp_connections_spared_total.add(1);
                } else if !self.stressed && request.seal.is_none() {
                    self.metrics.dhttp_connections_refused_total.add(1);
                }
                self.metrics.dhttp_responses_use_tcp_total.add(1);
                self.transmit(request.path(), id, Answer::UseTcp);
                return Route::UseTcp;
            }
        };
        self.metrics.dhttp_responses_connection_total.add(1);
        self.answered.insert((request.client.ip(), id));
        Route::Connection(carrier)
    }

    /// The answer for an address that is not proved. It is never longer than three times the shortest request.
    pub(super) fn ask_for_proof(&mut self, id: RequestId, request: &InFlight, now: Instant) {
        if request.knows_tokens {
            self.metrics.dhttp_tokens_asked_total.add(1);
            let token = self.tokens.issue(request.client, self.unix_s(now));
            self.transmit(request.path(), id, Answer::ProveAddress { token: &token });
        } else {
            self.metrics.dhttp_responses_use_tcp_total.add(1);
            self.transmit(request.path(), id, Answer::UseTcp);
        }
    }
}
