//! The client's half of the protocol, without I/O.
//!
//! [`Client::start`] begins a request; what becomes of it comes out as an [`Event`] with its id. After any call that
//! takes `&mut self`, drain [`Client::poll_transmit`], [`Client::poll_event`] and [`Client::poll_timeout`], in that
//! order. When a request is over, however it ended, call [`Client::finish`].

mod answer;
mod config;
mod event;
mod metrics;
mod once;
mod path;
mod policy;
mod receive;
mod seal;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tidegate_http::Method;

use crate::pieces::Assembly;
use crate::recent::Recent;
use crate::sealed::{KeyConfig, SEALED_FLAG};
use crate::wire::{MAX_TOKEN_BYTES, Pieces, Request, RequestId};

pub use config::ClientConfig;
pub use event::{ClaimError, Event, Generation, NewRequest, StartError, TcpReason, Transmit};
pub use metrics::ClientMetrics;
pub use policy::CachePolicy;

use once::{Numbering, Sent};
use path::Watched;
use seal::Sealing;

/// How often one request is sent again because a server asks for proof of the address. A cache and its server on one
/// path take each other's tokens for forged, and each may ask.
const MOST_PROOFS: u32 = 3;
/// How often the missing pieces of one response are asked for before a connection is opened for it.
const MOST_REPAIRS: u32 = 4;

/// The first bytes of a TLS handshake (RFC 8446 §5.1).
pub(crate) const TLS_RECORD: &[u8] = &[22, 3];

/// Which channel has a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Channel {
    /// It was sent by UDP this often, and is sent again at the deadline.
    Udp { sent: u32, proofs: u32, deadline: Instant },
    /// A connection that the server opened carries the response.
    Claimed,
    /// The caller has it: as a response, over a connection of its own, or over HTTP.
    Caller,
}

#[derive(Debug)]
struct Outstanding {
    request: NewRequest,
    generation: Generation,
    channel: Channel,
    /// The token that it was last sent with; empty if there was none.
    presented: Bytes,
    /// A request that must not be repeated and was sent by UDP with a number: the server may have executed it.
    once: Option<Sent>,
    /// It is sealed, and so must be its response.
    seal: Option<Sealing>,
}

#[derive(Debug)]
struct Ports {
    generation: Generation,
    until: Instant,
    requests_left: u32,
}

/// One client's half of the protocol.
#[derive(Debug)]
pub struct Client {
    config: ClientConfig,
    rng: StdRng,
    ports: Option<Ports>,
    /// TCP ports of every pair that may still be in use.
    tcp_ports: HashMap<Generation, u16>,
    next_generation: u32,
    outstanding: HashMap<RequestId, Outstanding>,
    deadlines: BTreeSet<(Instant, RequestId)>,
    /// Responses of which some pieces are here; only of requests that wait for an answer by UDP.
    assemblies: HashMap<RequestId, Assembly>,
    tokens: Recent<(Generation, SocketAddr), Bytes>,
    unreachable: Recent<SocketAddr, Instant>,
    /// Servers that datagrams did not reach, and until when that is thought to be so.
    silent: Recent<SocketAddr, Instant>,
    /// Servers that something was sent to, and that have not been heard since.
    watched: HashMap<SocketAddr, Watched>,
    watch_deadlines: BTreeSet<(Instant, SocketAddr)>,
    /// The probes of all that is watched.
    probes: HashMap<RequestId, (SocketAddr, Generation)>,
    /// By server: how requests that must not be repeated are numbered.
    numberings: Recent<SocketAddr, Numbering>,
    transmits: VecDeque<Transmit>,
    events: VecDeque<Event>,
    metrics: Arc<ClientMetrics>,
}

impl Client {
    /// A client whose ids, ports and jitter follow from `seed`, which must be random and secret.
    pub fn new(config: ClientConfig, seed: [u8; 32]) -> Self {
        Self {
            rng: StdRng::from_seed(seed),
            ports: None,
            tcp_ports: HashMap::new(),
            next_generation: 0,
            outstanding: HashMap::new(),
            deadlines: BTreeSet::new(),
            assemblies: HashMap::new(),
            tokens: Recent::new(config.tokens),
            unreachable: Recent::new(config.unreachable),
            silent: Recent::new(config.unreachable),
            watched: HashMap::new(),
            watch_deadlines: BTreeSet::new(),
            probes: HashMap::new(),
            numberings: Recent::new(config.tokens),
            transmits: VecDeque::new(),
            events: VecDeque::new(),
            metrics: Arc::default(),
            config,
        }
    }

    /// The counters.
    pub fn metrics(&self) -> Arc<ClientMetrics> {
        Arc::clone(&self.metrics)
    }

    /// A random port to bind, UDP or TCP; if it is taken, ask for another (DHTTP §IV-C).
    pub fn random_port(&mut self) -> u16 {
        self.rng.random_range(self.config.ports.range())
    }

    /// Whether new requests should come from another pair of ports: bind one and call [`Client::use_ports`].
    pub fn wants_ports(&self, now: Instant) -> bool {
        self.ports.as_ref().is_none_or(|ports| ports.requests_left == 0 || ports.until <= now)
    }

    /// From now on new requests come from a new pair of ports. Keep the sockets of a pair until
    /// [`Client::is_in_use`] denies that any request needs them.
    pub fn use_ports(&mut self, tcp_port: u16, now: Instant) -> Generation {
        let generation = Generation(self.next_generation);
        self.next_generation += 1;
        let until = now + self.jittered(self.config.port_lifetime);
        let requests_left = self.config.port_requests.max(1);
        self.ports = Some(Ports { generation, until, requests_left });
        self.tcp_ports.insert(generation, tcp_port);
        self.forget_ports();
        generation
    }

    /// Whether this pair of ports is the current one, or a request that came from it is outstanding.
    pub fn is_in_use(&self, generation: Generation) -> bool {
        self.ports.as_ref().is_some_and(|ports| ports.generation == generation)
            || self.outstanding.values().any(|request| request.generation == generation)
    }

    /// Whether a request to a server at this address is outstanding.
    pub fn is_asked(&self, server: IpAddr) -> bool {
        let server = server.to_canonical();
        self.outstanding.values().any(|request| request.request.server.ip() == server)
    }

    /// Begins a request. Its response comes as an [`Event`] or by [`Client::claim`].
    ///
    /// # Errors
    /// Too many requests are outstanding, or there are no ports.
    pub fn start(&mut self, request: NewRequest, now: Instant) -> Result<RequestId, StartError> {
        self.start_sealed(request, None, now)
    }

    /// The same, sealed if the server's key is given: no answer but a sealed one is taken, and [`Event::UseTcp`] means
    /// a connection with TLS.
    ///
    /// # Errors
    /// As [`Client::start`].
    pub fn start_sealed(
        &mut self,
        request: NewRequest,
        key: Option<KeyConfig>,
        now: Instant,
    ) -> Result<RequestId, StartError> {
        if self.outstanding.len() >= self.config.outstanding {
            self.metrics.dhttp_client_refused_total.add(1);
            return Err(StartError::TooMany { limit: self.config.outstanding });
        }
        let ports = self.ports.as_mut().ok_or(StartError::NoPorts)?;
        ports.requests_left = ports.requests_left.saturating_sub(1);
        let generation = ports.generation;
        let id = loop {
            let id = RequestId(self.rng.random());
            // TLS begins like this: a connection's first bytes tell them apart.
            if !id.0.starts_with(TLS_RECORD) && !self.outstanding.contains_key(&id) {
                break id;
            }
        };
        let by_udp = !request.by_tcp
            && (request.method.is_idempotent() || self.config.once)
            && request.http.len() <= self.config.request_bytes
            && self.token_field(&request, key.is_some(), generation).is_some();
        let silent = by_udp && self.is_silent(request.server, now);
        let unreachable = by_udp && self.unreachable.get(&request.server).is_some_and(|until| *until > now);
        let seal = key.map(Sealing::new);
        let presented = Bytes::new();
        self.outstanding.insert(
            id,
            Outstanding { request, generation, channel: Channel::Caller, presented, once: None, seal },
        );
        self.metrics.dhttp_client_requests_total.add(1);
        self.metrics.dhttp_client_outstanding.add(1);
        if unreachable {
            self.use_http(id);
        } else if silent {
            self.use_tcp(id, TcpReason::NoAnswer);
        } else if by_udp {
            self.send(id, 1, 0, now);
        } else {
            self.use_tcp(id, TcpReason::Request);
        }
        Ok(id)
    }

    /// A connection that `from` opened to the TCP port of `generation` starts a response with `id`. On success the
    /// response belongs to this connection alone, and answers a request of the method returned.
    ///
    /// # Errors
    /// The response is refused.
    pub fn claim(
        &mut self,
        generation: Generation,
        from: IpAddr,
        id: RequestId,
    ) -> Result<Method, ClaimError> {
        let (server, method, ..) = self.awaiting(id, generation).ok_or(ClaimError::Unmatched)?;
        if self.is_sealed(id) {
            return Err(ClaimError::Unmatched);
        }
        self.heard(server);
        if !self.cache_is_allowed(id, from) {
            return Err(ClaimError::CacheRefused);
        }
        self.set_channel(id, Channel::Claimed);
        self.metrics.dhttp_client_responses_connection_total.add(1);
        Ok(method)
    }

    /// A connection that had claimed `id` broke, or its response is malformed, and nobody has seen a byte of it yet.
    pub fn on_claim_broken(&mut self, id: RequestId) {
        if self.outstanding.get(&id).is_some_and(|request| request.channel == Channel::Claimed) {
            self.use_tcp(id, TcpReason::BadAnswer);
        }
    }

    /// Lets time pass: requests without an answer are sent again, or given up for a connection.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.handle_silence(now);
        while let Some(&(deadline, id)) = self.deadlines.first().filter(|(deadline, _)| *deadline <= now) {
            let channel = self.outstanding.get(&id).map(|request| request.channel);
            match channel {
                Some(Channel::Udp { sent, proofs, .. }) if self.assemblies.contains_key(&id) => {
                    self.repair(id, sent, proofs, now);
                }
                Some(Channel::Udp { sent, proofs, .. }) if sent <= self.config.resends => {
                    self.metrics.dhttp_client_resends_total.add(1);
                    self.send(id, sent + 1, proofs, now);
                }
                Some(Channel::Udp { .. }) => self.use_tcp(id, TcpReason::NoAnswer),
                _ => {
                    self.deadlines.remove(&(deadline, id));
                }
            }
        }
    }

    /// What precedes the HTTP request on a connection that the client opens. `udp_port` is the other channel's.
    pub fn tcp_header(&self, id: RequestId, udp_port: u16) -> Vec<u8> {
        let mut header = Vec::new();
        let once = self.once_field(id);
        let pieces = Pieces::Unknown;
        Request { id, other_port: udp_port, resend: false, token: None, pieces, once, http: b"" }
            .write(&mut header);
        header
    }

    /// The request is over: its id is accepted no more.
    pub fn finish(&mut self, id: RequestId) {
        self.set_channel(id, Channel::Caller);
        if self.outstanding.remove(&id).is_some() {
            self.metrics.dhttp_client_outstanding.sub(1);
            self.forget_ports();
        }
    }

    /// The next datagram to send: at most one for each call of another method, and one for each resend or probe that is
    /// due.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// The next event: at most one for each outstanding request.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`Client::handle_timeout`] is to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let request = self.deadlines.first().map(|(deadline, _)| *deadline);
        let path = self.watch_deadlines.first().map(|(deadline, _)| *deadline);
        request.into_iter().chain(path).min()
    }

    /// Panics if the tables contradict each other or exceed their bounds; for tests.
    pub fn check_invariants(&self) {
        assert!(self.outstanding.len() <= self.config.outstanding);
        assert_eq!(self.metrics.dhttp_client_outstanding.get(), self.outstanding.len() as u64);
        let waiting = self.outstanding.iter().filter_map(|(id, request)| match request.channel {
            Channel::Udp { deadline, sent, .. } => {
                assert!(sent <= self.config.resends + 1);
                assert!(request.request.method.is_idempotent() || self.config.once);
                Some((deadline, *id))
            }
            _ => None,
        });
        assert_eq!(waiting.collect::<BTreeSet<_>>(), self.deadlines);
        for id in self.assemblies.keys() {
            let channel = self.outstanding.get(id).map(|request| request.channel);
            assert!(matches!(channel, Some(Channel::Udp { .. })));
        }
        assert!(self.tokens.len() <= self.config.tokens);
        self.check_paths();
        assert!(self.tcp_ports.len() <= self.outstanding.len() + 1);
    }

    /// Who is asked and how often, if request `id` awaits an answer at these ports.
    fn awaiting(&self, id: RequestId, generation: Generation) -> Option<(SocketAddr, Method, u32, u32)> {
        let request = self.outstanding.get(&id).filter(|request| request.generation == generation);
        match request.map(|request| (request, request.channel)) {
            Some((request, Channel::Udp { sent, proofs, .. })) => {
                Some((request.request.server, request.request.method, sent, proofs))
            }
            Some(_) => {
                self.metrics.dhttp_client_late_total.add(1);
                None
            }
            None => {
                self.metrics.dhttp_client_unmatched_total.add(1);
                None
            }
        }
    }

    /// Whether the policy lets `from` answer; if not, the request goes past the caches.
    fn cache_is_allowed(&mut self, id: RequestId, from: IpAddr) -> bool {
        let Some(Outstanding { request, .. }) = self.outstanding.get(&id) else { return false };
        if self.config.caches.allows(request.server.ip(), from, &request.site) {
            return true;
        }
        self.metrics.dhttp_client_caches_refused_total.add(1);
        self.use_tcp(id, TcpReason::CacheRefused);
        false
    }

    fn datagram_bytes(&self, server: SocketAddr) -> usize {
        let is_v4 = server.ip().to_canonical().is_ipv4();
        if is_v4 { self.config.datagram_v4_bytes } else { self.config.datagram_v6_bytes }
    }

    /// The token to send, perhaps an empty one; `None` if not even that leaves room for the request.
    fn token_field(&self, request: &NewRequest, sealed: bool, generation: Generation) -> Option<Bytes> {
        let once_bytes = if request.method.is_idempotent() { 0 } else { once::FIELD_BYTES };
        let seal_bytes = if sealed { crate::sealed::REQUEST_OVERHEAD_BYTES } else { 0 };
        let header_bytes = crate::wire::REQUEST_HEADER_BYTES + 1 + once_bytes + seal_bytes;
        let room = self.datagram_bytes(request.server).checked_sub(header_bytes + request.http.len())?;
        let token = self.tokens.get(&(generation, request.server)).cloned().unwrap_or_default();
        debug_assert!(token.len() <= MAX_TOKEN_BYTES);
        Some(if token.len() <= room { token } else { Bytes::new() })
    }

    fn send(&mut self, id: RequestId, sent: u32, proofs: u32, now: Instant) {
        let deadline = now + self.wait(sent);
        let Some(Outstanding { request, generation, seal, .. }) = self.outstanding.get(&id) else { return };
        let generation = *generation;
        let token = match self.token_field(request, seal.is_some(), generation) {
            Some(token) if proofs == 0 || !token.is_empty() => token,
            // No room for the proof that the server wants.
            _ => return self.use_tcp(id, TcpReason::Request),
        };
        let Some(once) = self.number(id, now) else { return self.use_tcp(id, TcpReason::Request) };
        let Some(http) = self.seal(id, once) else { return self.use_tcp(id, TcpReason::Request) };
        let Some(Outstanding { request, seal, .. }) = self.outstanding.get(&id) else { return };
        let sealed = seal.is_some();
        let other_port = self.tcp_ports.get(&generation).copied().unwrap_or_default();
        let mut payload = Vec::new();
        let mut message = Request {
            id,
            other_port,
            resend: sent > 1,
            token: Some(&token),
            pieces: Pieces::Unknown,
            once,
            http: &http,
        };
        let bytes = message.header_bytes() + http.len();
        if self.config.pieces_bytes > 0 && bytes < self.datagram_bytes(request.server) {
            message.pieces = Pieces::Accepted;
        }
        message.write(&mut payload);
        mark_sealed(&mut payload, sealed);
        let server = request.server;
        self.transmits.push_back(Transmit { generation, to: server, payload });
        if let Some(outstanding) = self.outstanding.get_mut(&id) {
            outstanding.presented = token;
        }
        self.watch(server, generation, now);
        self.set_channel(id, Channel::Udp { sent, proofs, deadline });
    }

    /// Asks for the pieces that did not come.
    fn repair(&mut self, id: RequestId, sent: u32, proofs: u32, now: Instant) {
        let once = self.once_field(id);
        let Some(http) = self.seal(id, once) else { return };
        let (Some(assembly), Some(outstanding)) = (self.assemblies.get_mut(&id), self.outstanding.get(&id))
        else {
            return;
        };
        assembly.repairs += 1;
        let (repairs, tag) = (assembly.repairs, assembly.tag());
        let mut ranges = Vec::new();
        assembly.missing().into_iter().for_each(|range| range.write(&mut ranges));
        let (request, generation) = (&outstanding.request, outstanding.generation);
        let token = self.tokens.get(&(generation, request.server)).cloned().unwrap_or_default();
        let other_port = self.tcp_ports.get(&generation).copied().unwrap_or_default();
        let pieces = Pieces::Repair { tag, ranges: &ranges };
        let mut payload = Vec::new();
        Request { id, other_port, resend: false, token: Some(&token), pieces, once, http: &http }
            .write(&mut payload);
        mark_sealed(&mut payload, outstanding.seal.is_some());
        let fits = payload.len() <= self.datagram_bytes(request.server);
        if repairs > MOST_REPAIRS || !fits {
            return self.use_tcp(id, TcpReason::NoAnswer);
        }
        self.metrics.dhttp_client_repairs_total.add(1);
        self.transmits.push_back(Transmit { generation, to: request.server, payload });
        // Clients that have lost at the same time shall not all ask at the same time.
        let wait = self.jittered(self.config.repair_timeout.saturating_mul(1 << repairs.min(8)));
        self.set_channel(id, Channel::Udp { sent, proofs, deadline: now + wait });
    }

    fn use_tcp(&mut self, id: RequestId, reason: TcpReason) {
        self.set_channel(id, Channel::Caller);
        self.metrics.dhttp_client_use_tcp_total.add(1);
        self.events.push_back(Event::UseTcp { id, reason });
    }

    fn use_http(&mut self, id: RequestId) {
        if self.is_sealed(id) {
            // It may be UDP alone that does not reach the server, and HTTP would be in the clear.
            return self.use_tcp(id, TcpReason::NoAnswer);
        }
        self.set_channel(id, Channel::Caller);
        self.metrics.dhttp_client_use_http_total.add(1);
        self.events.push_back(Event::UseHttp { id });
    }

    fn set_channel(&mut self, id: RequestId, channel: Channel) {
        let Some(request) = self.outstanding.get_mut(&id) else { return };
        if let Channel::Udp { deadline, .. } = request.channel {
            self.deadlines.remove(&(deadline, id));
        }
        if let Channel::Udp { deadline, .. } = channel {
            self.deadlines.insert((deadline, id));
        } else {
            self.assemblies.remove(&id);
        }
        request.channel = channel;
    }

    /// How long the answer to the `sent`th sending is waited for.
    fn wait(&mut self, sent: u32) -> Duration {
        let exponent = sent.saturating_sub(1).min(32) as i32;
        let factor = self.config.backoff.max(1.0).powi(exponent);
        let seconds = self.config.first_timeout.as_secs_f64() * factor;
        let seconds = seconds.min(self.config.max_timeout.as_secs_f64());
        self.jittered(Duration::from_secs_f64(seconds))
    }

    fn jittered(&mut self, duration: Duration) -> Duration {
        let jitter = self.config.jitter.clamp(0.0, 1.0);
        duration.mul_f64(1.0 + jitter * self.rng.random_range(-1.0..=1.0))
    }

    /// Forgets pairs of ports that no request needs, and their tokens.
    fn forget_ports(&mut self) {
        if self.tcp_ports.len() > 1 {
            let current = self.ports.as_ref().map(|ports| ports.generation);
            let used: std::collections::HashSet<Generation> =
                self.outstanding.values().map(|request| request.generation).chain(current).collect();
            self.tcp_ports.retain(|generation, _| used.contains(generation));
            self.tokens.retain(|(generation, _)| used.contains(generation));
        }
    }
}

fn mark_sealed(payload: &mut [u8], sealed: bool) {
    if let Some(flags) = payload.get_mut(10).filter(|_| sealed) {
        *flags |= SEALED_FLAG;
    }
}
