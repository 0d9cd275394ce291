//! What comes in: a datagram is refused, answered at once, or becomes a request that is in flight.

use std::net::SocketAddr;
use std::time::Instant;

use tidegate_core::metrics::Counter;
use tidegate_http::status_reason;

use super::request::Check;
use super::{InFlight, Path, Received, Server, ServerMetrics, Wanted};
use crate::token::TokenAge;
use crate::wire::{Answer, ID_BYTES, PieceRange, Pieces, Request, RequestId};

impl Server {
    /// Feeds one datagram; an address alone will do as its path where the server has one address.
    pub fn handle_datagram<'a>(
        &mut self,
        path: impl Into<Path>,
        datagram: &'a [u8],
        now: Instant,
    ) -> Received<'a> {
        let Path { client, local } = path.into();
        let client = SocketAddr::new(client.ip().to_canonical(), client.port());
        let path = Path { client, local: local.map(|local| local.to_canonical()) };
        if !self.config.client_ports.contains(client.port()) {
            self.metrics.dhttp_requests_bad_port_total.add(1);
            return Received::Done;
        }
        let request = match Request::parse(datagram) {
            Ok(request) => request,
            Err(error) => {
                match error.id() {
                    Some(id) => {
                        self.metrics.dhttp_requests_bad_header_total.add(1);
                        self.refuse(path, id, 400, datagram.len());
                    }
                    None if datagram.len() < crate::wire::REQUEST_HEADER_BYTES => {
                        self.metrics.dhttp_requests_short_total.add(1);
                    }
                    None => self.metrics.dhttp_requests_looped_total.add(1),
                }
                return Received::Done;
            }
        };
        if !self.config.client_ports.contains(request.other_port) {
            self.metrics.dhttp_requests_bad_port_total.add(1);
            return Received::Done;
        }
        self.handle_request(path, &request, datagram.len(), now)
    }

    fn handle_request<'a>(
        &mut self,
        path: Path,
        request: &Request<'a>,
        received_bytes: usize,
        now: Instant,
    ) -> Received<'a> {
        let age = self.proves(request.token, path.client, now);
        let proved = age.is_some();
        if request.resend && proved {
            self.metrics.dhttp_requests_resent_total.add(1);
        }
        if self.is_known(path.client, request, proved, received_bytes) {
            return Received::Done;
        }
        if request.resend && proved {
            // Its answer was lost, or the request before it; one that is being answered is only slow. Who is not proved
            // may be anyone: it must not talk the server into its high-loss mode.
            self.loss.on_resent((path.client.ip(), request.id), now);
            self.report_loss(now);
        }
        let (head_bytes, repeatable) = match self.checker.check(request.http) {
            Check::Sound { head_bytes } => (head_bytes, true),
            Check::NotIdempotent { head_bytes } => (head_bytes, false),
            Check::Refused { status } => {
                self.metrics.dhttp_requests_bad_http_total.add(1);
                self.refuse(path, request.id, status, received_bytes);
                return Received::Done;
            }
        };
        let state = self.state_of(path, request, age, received_bytes, now);
        if !repeatable {
            return self.handle_once(request.id, request.once, state, request.http, head_bytes, now);
        }
        if request.resend && !proved {
            // Its response may only go by a connection, which it will not get: nothing is worth executing.
            self.ask_for_proof(request.id, &state, now);
            return Received::Done;
        }
        if self.in_flight.len() >= self.config.in_flight {
            return self.divert(path, request.id, |metrics| &metrics.dhttp_requests_shed_total);
        }
        self.metrics.dhttp_requests_total.add(1);
        Received::Request { ticket: self.put_in_flight(request.id, state), http: request.http, head_bytes }
    }

    /// Whether a request was answered, or is being answered: its answer is not made twice.
    fn is_known(
        &mut self,
        client: SocketAddr,
        request: &Request<'_>,
        proved: bool,
        received_bytes: usize,
    ) -> bool {
        let global_id = (client.ip(), request.id);
        if self.answered.contains(&global_id) {
            self.metrics.dhttp_requests_answered_total.add(1);
            return true;
        }
        let Some(in_flight) = self.in_flight.get_mut(&global_id) else { return false };
        // The answer goes to the first of them, but for what it may cost they count together.
        if in_flight.client == client {
            // A sealed one would have to be asked for again on a connection: it has come, and is only slow.
            in_flight.resent |= request.resend && in_flight.seal.is_none();
            in_flight.proved |= proved;
            in_flight.received_bytes = in_flight.received_bytes.saturating_add(received_bytes);
        }
        self.metrics.dhttp_requests_duplicate_total.add(1);
        true
    }

    /// What is to be remembered of a request while it is being answered.
    fn state_of(
        &mut self,
        path: Path,
        request: &Request<'_>,
        age: Option<TokenAge>,
        received_bytes: usize,
        now: Instant,
    ) -> InFlight {
        let (pieces, pieces_bytes) = match request.pieces {
            Pieces::Unknown => (Wanted::Nothing, 0),
            Pieces::Accepted => (Wanted::All, self.loss.pieces_bytes(path.client.ip(), now)),
            // They are less than the response, which was short enough when it was sent.
            Pieces::Repair { tag, ranges } => {
                let wanted = Wanted::Ranges(tag, PieceRange::read_all(ranges).collect());
                (wanted, self.loss.most_pieces_bytes())
            }
        };
        InFlight {
            client: path.client,
            local: path.local,
            tcp_port: request.other_port,
            resent: request.resend,
            knows_tokens: request.token.is_some(),
            proved: age.is_some(),
            well_proved: age == Some(TokenAge::New),
            pieces,
            pieces_bytes,
            received_bytes,
            once: None,
            seal: self.unsealed.take(),
            permit: None,
        }
    }

    /// Tells the client to use TCP; `why` is what counts that.
    pub(super) fn divert<'a>(
        &mut self,
        path: Path,
        id: RequestId,
        why: impl FnOnce(&ServerMetrics) -> &Counter,
    ) -> Received<'a> {
        why(&self.metrics).add(1);
        self.transmit(path, id, Answer::UseTcp);
        Received::Done
    }

    /// What a request's token proves; `None`: nothing.
    fn proves(&mut self, token: Option<&[u8]>, client: SocketAddr, now: Instant) -> Option<TokenAge> {
        let token = token.filter(|token| !token.is_empty())?;
        let checked = self.tokens.check(token, client, self.unix_s(now));
        if checked.is_err() {
            self.metrics.dhttp_tokens_refused_total.add(1);
        }
        checked.ok()
    }

    /// An error response, or silence if it would be more than an unproved address may get.
    pub(super) fn refuse(&mut self, path: Path, id: RequestId, status: u16, received_bytes: usize) {
        let http = format!("HTTP/1.1 {status} {}\r\nContent-Length: 0\r\n\r\n", status_reason(status));
        // The client of a sealed request takes no other answer than a sealed one.
        let sealed = self.unsealed.take().map(|seal| seal.seal(http.as_bytes()));
        let (token, http) = match &sealed {
            Some(sealed) => (Some(&[][..]), sealed.as_slice()),
            None => (None, http.as_bytes()),
        };
        let bytes = ID_BYTES + token.map_or(0, |_| 2) + http.len();
        if bytes > self.config.amplification.saturating_mul(received_bytes) {
            self.metrics.dhttp_answers_suppressed_total.add(1);
        } else {
            self.transmit(path, id, Answer::Http { token, http });
        }
    }
}
