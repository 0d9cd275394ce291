//! The server's half of the protocol, without I/O.
//!
//! A datagram goes in by [`Server::handle_datagram`]. If it is a request to be answered, the caller gets a [`Ticket`]
//! and gives it back with the response by [`Server::respond`], or as soon as the response is known to be long by
//! [`Server::respond_long`], so that a connection is set up while the response is still being made.
//! After any call that takes `&mut self`, drain [`Server::poll_transmit`], [`Server::poll_given_up`],
//! [`Server::poll_close`] and [`Server::poll_timeout`], in that order.

mod carry;
mod config;
mod connections;
mod growth;
mod loss;
mod metrics;
pub(crate) mod once;
mod receive;
mod request;
mod respond;
mod ring;
mod seal;
#[cfg(test)]
mod tests;
mod unreachable;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;
use tidegate_http::normalize::Personality;
use tidegate_http::{HeadLimits, RequestHead};

use crate::quota::Quota;
use crate::sealed::{ResponseSealer, ServerKeys};
use crate::token::TokenKeys;
use crate::wire::{Answer, Numbered, PieceRange, RequestId, Response};

pub use config::ServerConfig;
pub use connections::{ConnectionId, ConnectionLimits};
pub use loss::LossMonitor;
pub use metrics::ServerMetrics;
pub use once::SharedWindow;
pub use ring::GlobalId;
pub use seal::Unsealed;
pub use unreachable::Unreachable;

pub use crate::quota::Permit;

use connections::Connections;
use loss::Conditions;
use request::Checker;
use ring::AnsweredRing;

/// What goes in front of an HTTP response, or a piece of one, is about as long.
const HEADER_BYTES: usize = 64;

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
    /// Longest response that goes in pieces.
    pieces_bytes: usize,
    received_bytes: usize,
    /// It must not be repeated.
    once: Option<Numbered>,
    /// It was sealed, and so is its response.
    seal: Option<ResponseSealer>,
    /// Its client's, once the site is to work for it.
    permit: Option<Permit>,
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
    quota: Quota,
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
            loss: Conditions::new(&config, now),
            quota: Quota::default(),
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

    /// A permit of its client's quota for the request, to be kept while the site works for it. `None`: the client has
    /// as many as it may have, and has been told to use TCP; forget the request.
    pub fn begin(&mut self, ticket: Ticket) -> Option<(Ticket, Permit)> {
        let request = self.in_flight.get_mut(&ticket.0)?;
        let (client, kept) = (request.client.ip(), request.permit.take());
        match kept.or_else(|| self.permit_for(client)) {
            Some(permit) => Some((ticket, permit)),
            None => {
                let request = self.take(ticket.0)?;
                self.metrics.dhttp_requests_crowded_total.add(1);
                self.transmit(request.path(), ticket.0.1, Answer::UseTcp);
                None
            }
        }
    }

    fn permit_for(&self, client: IpAddr) -> Option<Permit> {
        self.quota.take(client, self.config.per_client, usize::MAX)
    }

    /// Remembers a request until it is answered.
    fn put_in_flight(&mut self, id: RequestId, request: InFlight) -> Ticket {
        let global_id = (request.client.ip(), id);
        self.in_flight.insert(global_id, request);
        self.metrics.dhttp_requests_in_flight.add(1);
        Ticket(global_id)
    }

    fn take(&mut self, id: GlobalId) -> Option<InFlight> {
        let request = self.in_flight.remove(&id)?;
        self.metrics.dhttp_requests_in_flight.sub(1);
        Some(request)
    }

    /// The next datagram to send. At most one for each datagram received, or the pieces of one response, and one for
    /// each response that a broken connection owed.
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

    fn transmit(&mut self, path: Path, id: RequestId, answer: Answer<'_>) {
        let body_bytes = match answer {
            Answer::Http { http, .. } => http.len(),
            Answer::Piece { piece, .. } => piece.len(),
            _ => 0,
        };
        let mut payload = Vec::with_capacity(HEADER_BYTES + body_bytes);
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
