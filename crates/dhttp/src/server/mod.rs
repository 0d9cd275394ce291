//! The server's half of the protocol, without I/O.
//!
//! A datagram goes in by [`Server::handle_datagram`]. If it is a request to be answered, the caller gets a [`Ticket`]
//! and gives it back with the response by [`Server::respond`], or as soon as the response is known to be long by
//! [`Server::respond_long`], so that a connection is set up while the response is still being made.
//! After any call that takes `&mut self`, drain [`Server::poll_transmit`], [`Server::poll_given_up`],
//! [`Server::poll_close`] and [`Server::poll_timeout`], in that order.

mod config;
mod connections;
mod loss;
mod metrics;
pub(crate) mod once;
mod request;
mod ring;
mod seal;
mod share;
#[cfg(test)]
mod tests;
mod unreachable;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tidegate_http::normalize::Personality;
use tidegate_http::{HeadLimits, RequestHead, status_reason};

use crate::pieces::tag_of;
use crate::sealed::{RESPONSE_OVERHEAD_BYTES, ResponseSealer, ServerKeys};
use crate::token::{TOKEN_BYTES, TokenKeys, Wear};
use crate::wire::{
    Answer, ID_BYTES, Numbered, PIECE_HEADER_BYTES, PieceRange, Pieces, Request, RequestId, Response,
};

pub use config::ServerConfig;
pub use connections::{ConnectionId, ConnectionLimits};
pub use loss::LossMonitor;
pub use metrics::ServerMetrics;
pub use once::SharedWindow;
pub use ring::GlobalId;
pub use seal::Unsealed;
pub use share::Share;
pub(crate) use share::Shares;
pub use unreachable::Unreachable;

use connections::{Choice, Connections, Expiry, Owed, Remains};
use loss::Conditions;
use request::{Check, Checker};
use ring::AnsweredRing;

/// A client that closes a connection within this time of a response may not have read it.
const REFUSAL_WINDOW: Duration = Duration::from_secs(1);

/// A request that is being answered. Give it back by [`Server::respond`], [`Server::respond_long`] or
/// [`Server::abandon`]: until then it counts as in flight.
#[derive(Debug, Eq, PartialEq)]
#[must_use]
pub struct Ticket(GlobalId);

impl Ticket {
    /// The request's identifier.
    pub fn id(&self) -> RequestId {
        self.0.1
    }

    /// The same, among those of all clients.
    pub fn global_id(&self) -> GlobalId {
        self.0
    }
}

/// What became of a datagram.
#[derive(Debug, Eq, PartialEq)]
pub enum Received<'a> {
    /// A sound request that has not been executed if it must not be repeated: answer it.
    Request {
        /// To be given back with the response.
        ticket: Ticket,
        /// The HTTP request, head and body.
        http: &'a [u8],
        /// Where its body starts.
        head_bytes: usize,
    },
    /// A request that must not be repeated, and has been executed: give this response back.
    Executed {
        /// To be given back with the response.
        ticket: Ticket,
        /// The HTTP response, as [`Server::respond`] had it.
        response: bytes::Bytes,
    },
    /// It was refused or is dealt with; if there is an answer, [`Server::poll_transmit`] has it.
    Done,
}

/// Which way a response goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Route {
    /// [`Server::poll_transmit`] has what is to be sent, which may be the answer "use TCP" or nothing: the response
    /// itself is no longer needed.
    Datagram,
    /// As [`Route::Datagram`], and the answer is "use TCP": the client will ask for the response again on a connection.
    UseTcp,
    /// Keep the response until [`Server::next_response`] names it for one of the client's connections, or
    /// [`Server::poll_given_up`] does.
    Connection(Carrier),
}

/// What is to be done so that a connection carries a response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Carrier {
    /// This connection is open and idle: call [`Server::next_response`] for it.
    Idle(ConnectionId),
    /// Open a connection to the client's TCP channel at this address, then call [`Server::next_response`], or
    /// [`Server::on_connection_closed`] if that fails.
    New(ConnectionId, SocketAddr),
    /// Nothing: the client's connections are busy, and the first that no longer is will be told.
    Busy,
}

/// The two ends that a datagram has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Path {
    /// The client's address and UDP port.
    pub client: SocketAddr,
    /// The server's address that the client asked, where the server has several: answers must leave from it.
    pub local: Option<IpAddr>,
}

impl From<SocketAddr> for Path {
    fn from(client: SocketAddr) -> Self {
        Self { client, local: None }
    }
}

/// A datagram to be sent.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Transmit {
    /// The client.
    pub to: SocketAddr,
    /// From which of the server's addresses; `None`: from the only one.
    pub from: Option<IpAddr>,
    /// What to send.
    pub payload: Vec<u8>,
}

/// What is remembered of a request while it is being answered.
#[derive(Debug)]
struct InFlight {
    client: SocketAddr,
    local: Option<IpAddr>,
    tcp_port: u16,
    resent: bool,
    knows_tokens: bool,
    proved: bool,
    /// The token has long to live: no other is needed yet.
    well_proved: bool,
    pieces: Wanted,
    received_bytes: usize,
    /// It must not be repeated.
    once: Option<Numbered>,
    /// It was sealed, and so is its response.
    seal: Option<ResponseSealer>,
    /// Its client's, once the site is to work for it.
    share: Option<Share>,
}

impl InFlight {
    fn path(&self) -> Path {
        Path { client: self.client, local: self.local }
    }
}

/// Which pieces of a response a client takes.
#[derive(Debug)]
enum Wanted {
    /// None: it does not know them.
    Nothing,
    All,
    /// These ranges, if the response has this tag.
    Ranges(u32, Vec<PieceRange>),
}

/// One core's half of the protocol. Cores share nothing but the secret of their tokens.
#[derive(Debug)]
pub struct Server {
    config: ServerConfig,
    tokens: TokenKeys,
    rng: StdRng,
    started: (Instant, u64),
    loss: Conditions,
    answered: AnsweredRing,
    in_flight: HashMap<GlobalId, InFlight>,
    connections: Connections,
    checker: Checker,
    window: Option<SharedWindow>,
    keys: Option<ServerKeys>,
    /// Of the datagram that was opened last.
    unsealed: Option<ResponseSealer>,
    /// How many datagrams of unproved addresses were opened in this second.
    opened: (u64, u32),
    shares: Shares,
    stressed: bool,
    transmits: VecDeque<Transmit>,
    closes: VecDeque<ConnectionId>,
    given_up: VecDeque<GlobalId>,
    metrics: Arc<ServerMetrics>,
}

impl Server {
    /// A server that issues tokens with `token_secret`, which cores and servers of one site share. `seed` must be
    /// random; `now` is `unix_s` seconds after the Unix epoch.
    pub fn new(
        config: ServerConfig,
        token_secret: [u8; 16],
        seed: [u8; 32],
        now: Instant,
        unix_s: u64,
    ) -> Self {
        Self {
            tokens: TokenKeys::new(token_secret, config.token_lifetime),
            rng: StdRng::from_seed(seed),
            started: (now, unix_s),
            loss: Conditions::new(config.loss_threshold, config.loss_half_life, config.networks, now),
            shares: Shares::new(config.per_client),
            answered: AnsweredRing::new(config.answered_ids),
            in_flight: HashMap::new(),
            connections: Connections::new(config.connections.clone()),
            checker: Checker::new(config.personality, config.head_limits),
            window: None,
            keys: None,
            unsealed: None,
            opened: (0, 0),
            stressed: false,
            transmits: VecDeque::new(),
            closes: VecDeque::new(),
            given_up: VecDeque::new(),
            metrics: Arc::default(),
            config,
        }
    }

    /// The counters.
    pub fn metrics(&self) -> Arc<ServerMetrics> {
        Arc::clone(&self.metrics)
    }

    /// Under stress no connection is opened: what does not fit a datagram is answered "use TCP" and forgotten
    /// (DHTTP §VI-B3).
    pub fn set_stressed(&mut self, stressed: bool) {
        self.stressed = stressed;
    }

    /// How request heads are read from now on.
    pub fn set_reading(&mut self, personality: Personality, limits: HeadLimits) {
        if self.config.personality != personality || self.config.head_limits != limits {
            self.config.personality = personality;
            self.config.head_limits = limits;
            self.checker = Checker::new(personality, limits);
        }
    }

    /// The parsed head of the `http` that [`Server::handle_datagram`] has just returned.
    pub fn request_head<'a>(&'a self, http: &'a [u8]) -> RequestHead<'a> {
        self.checker.head(http)
    }

    /// Whether nothing is being answered, and no connection owes a response.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.connections.owe_nothing()
    }

    /// See [`Server::set_stressed`].
    pub fn is_stressed(&self) -> bool {
        self.stressed
    }

    /// Whether the client's address is proved: if not, [`Server::respond_long`] only asks for the proof.
    pub fn is_proved(&self, ticket: &Ticket) -> bool {
        self.in_flight.get(&ticket.0).is_some_and(|request| request.proved)
    }

    /// Whether a response that is too long for UDP may go by a connection of the server's, if there are not too many.
    pub fn may_connect(&self, ticket: &Ticket) -> bool {
        let may = |request: &InFlight| request.proved && request.seal.is_none() && !self.stressed;
        self.in_flight.get(&ticket.0).is_some_and(may)
    }

    /// Whether the request was sealed.
    pub fn is_sealed(&self, ticket: &Ticket) -> bool {
        self.in_flight.get(&ticket.0).is_some_and(|request| request.seal.is_some())
    }

    /// A place for the request among those of its client, to be kept while the site works for it. `None`: the client has as
    /// many as it may have, and has been told to use TCP; forget the request.
    pub fn begin(&mut self, ticket: Ticket) -> Option<(Ticket, Share)> {
        let request = self.in_flight.get_mut(&ticket.0)?;
        match request.share.take().or_else(|| self.shares.take(request.client.ip())) {
            Some(share) => Some((ticket, share)),
            None => {
                let request = self.take(ticket.0)?;
                self.metrics.dhttp_requests_crowded_total.add(1);
                self.transmit(request.path(), ticket.0.1, Answer::UseTcp);
                None
            }
        }
    }

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
        let Path { client, local } = path;
        let wear = self.proves(request.token, client, now);
        let proved = wear.is_some();
        if request.resend && proved {
            self.metrics.dhttp_requests_resent_total.add(1);
        }
        let global_id = (client.ip(), request.id);
        if self.answered.contains(&global_id) {
            self.metrics.dhttp_requests_answered_total.add(1);
            return Received::Done;
        }
        if let Some(in_flight) = self.in_flight.get_mut(&global_id) {
            // The answer goes to the first of them, but for what it may cost they count together.
            if in_flight.client == client {
                // A sealed one would have to be asked for again on a connection: it has come, and is only slow.
                in_flight.resent |= request.resend && in_flight.seal.is_none();
                in_flight.proved |= proved;
                in_flight.received_bytes = in_flight.received_bytes.saturating_add(received_bytes);
            }
            self.metrics.dhttp_requests_duplicate_total.add(1);
            return Received::Done;
        }
        if request.resend && proved {
            // Its answer was lost, or the request before it; one that is being answered is only slow. Who is not proved may be
            // anyone: it must not talk the server into its high-loss mode.
            self.loss.on_resent(global_id, now);
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
        let request_state = InFlight {
            client,
            local,
            tcp_port: request.other_port,
            resent: request.resend,
            knows_tokens: request.token.is_some(),
            proved,
            well_proved: wear == Some(Wear::New),
            pieces: match request.pieces {
                Pieces::Unknown => Wanted::Nothing,
                Pieces::Accepted => Wanted::All,
                Pieces::Repair { tag, ranges } => Wanted::Ranges(tag, PieceRange::read_all(ranges).collect()),
            },
            received_bytes,
            once: None,
            seal: self.unsealed.take(),
            share: None,
        };
        if !repeatable {
            return self.handle_once(request.id, request.once, request_state, request.http, head_bytes, now);
        }
        if request.resend && !proved {
            // Its response may only go by a connection, which it will not get: nothing is worth executing.
            self.ask_for_proof(request.id, &request_state, now);
            return Received::Done;
        }
        if self.in_flight.len() >= self.config.in_flight {
            self.metrics.dhttp_requests_shed_total.add(1);
            self.transmit(path, request.id, Answer::UseTcp);
            return Received::Done;
        }
        self.in_flight.insert(global_id, request_state);
        self.metrics.dhttp_requests_total.add(1);
        self.metrics.dhttp_requests_in_flight.add(1);
        Received::Request { ticket: Ticket(global_id), http: request.http, head_bytes }
    }

    /// What a request's token proves; `None`: nothing.
    fn proves(&mut self, token: Option<&[u8]>, client: SocketAddr, now: Instant) -> Option<Wear> {
        let token = token.filter(|token| !token.is_empty())?;
        let checked = self.tokens.check(token, client, self.unix_s(now));
        if checked.is_err() {
            self.metrics.dhttp_tokens_refused_total.add(1);
        }
        checked.ok()
    }

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
        if !short && !monitor && self.takes_pieces(&request) && http.len() <= self.config.pieces_bytes {
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
            self.loss.on_fresh(request.client.ip(), total.div_ceil(most), now);
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
        let room = if self.takes_pieces(request) { one.max(self.config.pieces_bytes) } else { one };
        let overhead_bytes = if request.seal.is_some() { 2 + RESPONSE_OVERHEAD_BYTES } else { 0 };
        room.saturating_sub(overhead_bytes)
    }

    fn take(&mut self, id: GlobalId) -> Option<InFlight> {
        let request = self.in_flight.remove(&id)?;
        self.metrics.dhttp_requests_in_flight.sub(1);
        Some(request)
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

    /// The next datagram to send. At most one for each datagram received, or the pieces of one response, and one for each
    /// response that a broken connection owed.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// The next connection to close, whatever is still being done with it.
    pub fn poll_close(&mut self) -> Option<ConnectionId> {
        self.closes.pop_front()
    }

    /// The next response that no connection will carry, though [`Route::Connection`] was said: its client has been told
    /// to use TCP.
    pub fn poll_given_up(&mut self) -> Option<GlobalId> {
        self.given_up.pop_front()
    }

    /// When [`Server::handle_timeout`] is to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.connections.next_deadline()
    }

    /// Panics if the tables contradict each other or exceed their bounds; for tests.
    pub fn check_invariants(&self) {
        self.connections.check_invariants();
        self.loss.check_invariants();
        assert!(self.in_flight.len() <= self.config.in_flight);
        assert_eq!(self.metrics.dhttp_connections_open.get(), self.connections.len() as u64);
        assert_eq!(self.metrics.dhttp_requests_in_flight.get(), self.in_flight.len() as u64);
    }

    /// The answer for an address that is not proved. It is never longer than three times the shortest request.
    fn ask_for_proof(&mut self, id: RequestId, request: &InFlight, now: Instant) {
        if request.knows_tokens {
            self.metrics.dhttp_tokens_asked_total.add(1);
            let token = self.tokens.issue(request.client, self.unix_s(now));
            self.transmit(request.path(), id, Answer::ProveAddress { token: &token });
        } else {
            self.metrics.dhttp_responses_use_tcp_total.add(1);
            self.transmit(request.path(), id, Answer::UseTcp);
        }
    }

    /// An error response, or silence if it would be more than an unproved address may get.
    fn refuse(&mut self, path: Path, id: RequestId, status: u16, received_bytes: usize) {
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

    fn transmit(&mut self, path: Path, id: RequestId, answer: Answer<'_>) {
        let mut payload = Vec::new();
        Response { id, answer }.write(&mut payload);
        self.transmits.push_back(Transmit { to: path.client, from: path.local, payload });
    }

    fn datagram_bytes(&self, client: SocketAddr) -> usize {
        if client.is_ipv4() { self.config.datagram_v4_bytes } else { self.config.datagram_v6_bytes }
    }

    fn unix_s(&self, now: Instant) -> u64 {
        self.started.1 + now.saturating_duration_since(self.started.0).as_secs()
    }

    fn report_loss(&mut self, now: Instant) {
        let shown = self.metrics.dhttp_high_loss.get();
        let high = u64::from(self.loss.is_high(now));
        self.metrics.dhttp_high_loss.add(high.wrapping_sub(shown));
    }
}
