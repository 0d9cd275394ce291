//! A client core over tokio's sockets.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidegate_http::Method;
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Notify, mpsc};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::opened::{Pool, StreamProtocol};
use super::ports::{Pair, bind_pair};
use super::request::{DhttpUrl, FetchBody, FetchError, FetchRequest, FetchResponse, Via};
use super::security::{Fingerprint, Secured};
use super::service::Body;
use super::stream::{Reader, ResponseHead, StreamError, StreamLimits, whole_response};
use super::udp::SegmentReceiver;
use super::{icmp, security};
use crate::client::{Client, ClientConfig, ClientMetrics, Event, Generation, NewRequest, TcpReason};
use crate::quota::Quota;
use crate::sealed::KeyConfig;
use crate::wire::RequestId;

/// Settings of a client's driver.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Settings of the protocol.
    pub protocol: ClientConfig,
    /// The client's IPv4 address; unspecified: the system chooses.
    pub bind_v4: Ipv4Addr,
    /// The client's IPv6 address, on hosts that have one; unspecified: the system chooses.
    pub bind_v6: Ipv6Addr,
    /// How long a server may take to accept a connection of the client's.
    pub connect_timeout: Duration,
    /// How long a server may take to begin a response on a connection, and be silent within it.
    pub progress_timeout: Duration,
    /// How long a connection that a server opened is kept between responses.
    pub idle_timeout: Duration,
    /// Most connections that servers opened which have been asked something.
    pub accepted: usize,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            protocol: ClientConfig::default(),
            bind_v4: Ipv4Addr::UNSPECIFIED,
            bind_v6: Ipv6Addr::UNSPECIFIED,
            connect_timeout: Duration::from_secs(10),
            progress_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(60),
            accepted: 256,
        }
    }
}

/// A client. Clones share its ports; when the last one goes, they are closed.
#[derive(Clone, Debug)]
pub struct DhttpClient(Arc<Shared>);

#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// The core has changed: there may be another time to wait for.
    changed: Arc<Notify>,
    timer: Mutex<Option<AbortHandle>>,
    /// Connections that servers opened which have been asked something, and those of others.
    accepted: Quota,
    strangers: Quota,
    /// Servers that are spoken to in secret.
    secured: Mutex<Secured>,
    /// Connections of the client's own that wait for another request.
    pub(super) opened: Mutex<Pool>,
    pub(super) options: ClientOptions,
    metrics: Arc<ClientMetrics>,
}

#[derive(Debug)]
pub(super) struct State {
    pub core: Client,
    /// Whom to tell of each outstanding request.
    waiting: HashMap<RequestId, mpsc::Sender<Notice>>,
    /// The current pair of ports, and those that outstanding requests need.
    pairs: Vec<Pair>,
}

/// Most connections of a server that has been asked something.
const OF_SERVER: usize = 64;
/// Most connections of a peer that has not, and of all of them: interception caches, and whoever found the port.
const OF_STRANGER: (usize, usize) = (4, 64);
/// How long a stranger may take to begin its first response.
const STRANGER_TIME: Duration = Duration::from_secs(10);

/// What a waiting request is told. More than a few cannot come: each ends one of the core's channels.
const NOTICES: usize = 4;

#[derive(Debug)]
enum Notice {
    Datagram { from: SocketAddr, http: Bytes },
    Stream { from: SocketAddr, head: ResponseHead, body: Body },
    UseTcp(TcpReason),
    UseHttp,
    OutcomeUnknown,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(timer) = self.timer.get_mut().unwrap_or_else(PoisonError::into_inner) {
            timer.abort();
        }
        // Dropping a pair of ports ends its tasks.
    }
}

/// How a server is spoken to in secret.
struct Secret {
    server: Fingerprint,
    key: KeyConfig,
    tls: TlsConnector,
}

/// Ends the request when its caller has the response, or gives up.
struct Outstanding<'c> {
    client: &'c DhttpClient,
    id: RequestId,
}

impl Drop for Outstanding<'_> {
    fn drop(&mut self) {
        let mut state = self.client.0.state();
        state.waiting.remove(&self.id);
        state.core.finish(self.id);
        self.client.0.drain(&mut state);
    }
}

impl DhttpClient {
    /// A client on the current tokio runtime.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn new(options: ClientOptions) -> io::Result<Self> {
        let core = Client::new(options.protocol.clone(), super::server::random()?);
        let client = Self(Arc::new(Shared {
            metrics: core.metrics(),
            state: Mutex::new(State { core, waiting: HashMap::new(), pairs: Vec::new() }),
            changed: Arc::default(),
            timer: Mutex::default(),
            accepted: Quota::default(),
            strangers: Quota::default(),
            secured: Mutex::default(),
            opened: Mutex::default(),
            options,
        }));
        let timer = run_timers(Arc::downgrade(&client.0), Arc::clone(&client.0.changed));
        *client.0.timer.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(tokio::spawn(timer).abort_handle());
        Ok(client)
    }

    /// The counters.
    pub fn metrics(&self) -> &ClientMetrics {
        &self.0.metrics
    }

    /// Fetches a `dhttp://` or `dhttpt://` URL.
    ///
    /// # Errors
    /// See [`FetchError`].
    pub async fn get(&self, url: &str) -> Result<FetchResponse, FetchError> {
        self.get_by(url, None).await
    }

    /// The same, encrypted; see [`DhttpClient::fetch_secured`].
    ///
    /// # Errors
    /// See [`FetchError`].
    pub async fn get_secured(&self, url: &str, server: Fingerprint) -> Result<FetchResponse, FetchError> {
        self.get_by(url, Some(server)).await
    }

    async fn get_by(&self, url: &str, fingerprint: Option<Fingerprint>) -> Result<FetchResponse, FetchError> {
        let url = DhttpUrl::parse(url)?;
        // Which address it is comes out when the name is resolved.
        let nowhere = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), url.port);
        self.fetch_named(&url, FetchRequest::get(&url, nowhere), fingerprint).await
    }

    /// Makes a request of the host that `url` names, encrypted if it is known by a fingerprint: `request.server`
    /// becomes the first of its addresses at which somebody is.
    ///
    /// # Errors
    /// See [`FetchError`].
    pub async fn fetch_named(
        &self,
        url: &DhttpUrl,
        request: FetchRequest,
        fingerprint: Option<Fingerprint>,
    ) -> Result<FetchResponse, FetchError> {
        let unresolved = || FetchError::Resolve(url.host.clone());
        let found = tokio::net::lookup_host((url.host.as_str(), url.port)).await.map_err(|_| unresolved())?;
        let mut outcome = Err(unresolved());
        for server in found {
            let request = FetchRequest { server, ..request.clone() };
            outcome = match fingerprint {
                Some(fingerprint) => self.fetch_secured(request, fingerprint).await,
                None => self.fetch(request).await,
            };
            // Nobody is there: perhaps at another address of the name.
            if !matches!(outcome, Err(FetchError::NoAnswer { sent: false, .. })) {
                break;
            }
        }
        outcome
    }

    /// Makes one request. Dropping the future gives it up. Every wait within is bounded, so that it ends whatever the
    /// network does.
    ///
    /// # Errors
    /// See [`FetchError`].
    pub async fn fetch(&self, request: FetchRequest) -> Result<FetchResponse, FetchError> {
        self.fetch_by(request, None).await
    }

    /// The same, encrypted, from the server whose certificate has this fingerprint: datagrams sealed, connections with
    /// TLS, nothing in the clear. The first request to a server opens a connection to ask for its key.
    ///
    /// # Errors
    /// See [`FetchError`].
    pub async fn fetch_secured(
        &self,
        request: FetchRequest,
        server: Fingerprint,
    ) -> Result<FetchResponse, FetchError> {
        request.check()?;
        let tls = self.0.secured().tls(server);
        // In a statement of its own: the lock must not outlast it.
        let known = self.0.secured().key(request.server, server, Instant::now());
        let key = match known {
            Some(key) => key,
            None => self.ask_for_key(security::ask_for_key(&request), server, &tls).await?,
        };
        self.fetch_by(request, Some(Secret { server, key, tls })).await
    }

    async fn ask_for_key(
        &self,
        ask: FetchRequest,
        server: Fingerprint,
        tls: &TlsConnector,
    ) -> Result<KeyConfig, FetchError> {
        let mut id: [u8; 8] = super::server::random().map_err(FetchError::Ports)?;
        // Not the beginning of TLS.
        id[0] |= 0x80;
        let address = ask.server;
        let udp_port = *self.0.options.protocol.ports.range().start();
        let protocol = StreamProtocol { dhttp: Some((RequestId(id), udp_port)), tls: Some((server, tls)) };
        let asked = self.0.by_stream(ask, protocol).await?;
        let (key, good_for) = security::published(asked).await.ok_or(FetchError::BadAnswer)?;
        self.0.secured().learn(address, server, key, Instant::now() + good_for);
        Ok(key)
    }

    async fn fetch_by(
        &self,
        request: FetchRequest,
        secured: Option<Secret>,
    ) -> Result<FetchResponse, FetchError> {
        request.check()?;
        let (outstanding, udp_port, mut notices) =
            self.start(&request, secured.as_ref().map(|secret| secret.key))?;
        let id = outstanding.id;
        let tls = secured.as_ref().map(|secret| (secret.server, &secret.tls));
        let by_http = StreamProtocol { dhttp: None, tls: None };
        let by_dhttp = StreamProtocol { dhttp: Some((id, udp_port)), tls };
        match notices.recv().await.ok_or(FetchError::Ended)? {
            Notice::Datagram { from, http } => {
                let (status, head, body) =
                    whole_response(&http, request.method).ok_or(FetchError::BadAnswer)?;
                Ok(FetchResponse {
                    status,
                    head,
                    body: Body::full(body),
                    via: Via::Datagram,
                    from,
                    asked: request.server,
                })
            }
            Notice::Stream { from, head: ResponseHead { status, head, .. }, body } => Ok(FetchResponse {
                status,
                head,
                body,
                via: Via::ServerConnection,
                from,
                asked: request.server,
            }),
            Notice::OutcomeUnknown => Err(FetchError::outcome_unknown()),
            Notice::UseTcp(reason) => {
                let is_numbered = self.0.state().core.is_numbered(id);
                // A server that does not speak DHTTP must not get it by TCP either: nothing there says so as fast as
                // ICMP (DHTTP §IV-E).
                let by_http_instead = matches!(reason, TcpReason::Request | TcpReason::NoAnswer)
                    && request.http.is_some()
                    && tls.is_none()
                    && !is_numbered;
                let protocol = if by_http_instead { by_http } else { by_dhttp };
                tracing::debug!(?id, ?reason, server = %request.server, "by a connection of our own");
                let answered = self.0.by_stream(request, protocol).await;
                if answered.is_ok() && reason == TcpReason::NoAnswer {
                    self.0.state().core.on_tcp_answered(id, Instant::now());
                }
                // Where it was sent by UDP it may have been executed: only that server can know it again.
                answered.map_err(|error| if is_numbered { error.after_sending() } else { error })
            }
            Notice::UseHttp => match request.http {
                Some(_) if tls.is_none() => self.0.by_stream(request, by_http).await,
                // It may be UDP alone that does not reach it.
                _ => self.0.by_stream(request, by_dhttp).await,
            },
        }
    }

    /// Makes one request by HTTP, at the request's address for HTTP.
    ///
    /// # Errors
    /// See [`FetchError`].
    pub async fn fetch_http(&self, request: FetchRequest) -> Result<FetchResponse, FetchError> {
        request.check()?;
        self.0.by_stream(request, StreamProtocol { dhttp: None, tls: None }).await
    }

    fn start(
        &self,
        request: &FetchRequest,
        key: Option<KeyConfig>,
    ) -> Result<(Outstanding<'_>, u16, mpsc::Receiver<Notice>), FetchError> {
        let (http, streamed) = match &request.body {
            FetchBody::Full(body) if body.is_empty() => (request.head.clone(), false),
            FetchBody::Full(body) if body.len() > self.0.options.protocol.request_bytes => {
                (Bytes::new(), true)
            }
            FetchBody::Full(body) => ([&request.head[..], body].concat().into(), false),
            FetchBody::Streamed(_) => (Bytes::new(), true),
        };
        let new = NewRequest {
            server: SocketAddr::new(request.server.ip().to_canonical(), request.server.port()),
            site: request.site.clone(),
            method: request.method,
            http,
            by_tcp: request.by_tcp || streamed || !request.is_delimited_by_length(),
        };
        let now = Instant::now();
        let mut state = self.0.state();
        if state.core.wants_ports(now) {
            let pair = self.open_ports(&mut state.core, now).map_err(FetchError::Ports)?;
            state.pairs.push(pair);
        }
        let udp_port = state.pairs.last().map_or(0, |pair| pair.udp_port);
        let (sender, notices) = mpsc::channel(NOTICES);
        let id = state.core.start_sealed(new, key, now)?;
        state.waiting.insert(id, sender);
        self.0.drain(&mut state);
        Ok((Outstanding { client: self, id }, udp_port, notices))
    }

    fn open_ports(&self, core: &mut Client, now: Instant) -> io::Result<Pair> {
        let options = &self.0.options;
        let (mut pair, listeners) = bind_pair(core, options.bind_v4, options.bind_v6, now)?;
        for socket in pair.sockets() {
            let run = receive(Arc::downgrade(&self.0), socket, pair.generation);
            pair.tasks.push(tokio::spawn(run).abort_handle());
        }
        for listener in listeners {
            let run = accept(Arc::downgrade(&self.0), listener, pair.generation);
            pair.tasks.push(tokio::spawn(run).abort_handle());
        }
        Ok(pair)
    }
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Under the lock, because a counter has one writer at a time.
    pub(super) fn count(&self, add: impl FnOnce(&ClientMetrics)) {
        let _state = self.state();
        add(&self.metrics);
    }

    fn secured(&self) -> MutexGuard<'_, Secured> {
        self.secured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn limits(&self) -> StreamLimits {
        StreamLimits {
            head_timeout: self.options.progress_timeout,
            progress_timeout: self.options.progress_timeout,
            idle_timeout: self.options.idle_timeout,
            min_rate_bytes_per_s: 0,
        }
    }

    /// Does what the core wants done.
    fn drain(&self, state: &mut State) {
        while let Some(transmit) = state.core.poll_transmit() {
            if let Some(pair) = state.pairs.iter().find(|pair| pair.generation == transmit.generation) {
                pair.send(transmit.to, &transmit.payload);
            }
        }
        while let Some(event) = state.core.poll_event() {
            let (id, notice) = match event {
                Event::Response { id, from, http, .. } => (id, Notice::Datagram { from, http }),
                Event::UseTcp { id, reason } => (id, Notice::UseTcp(reason)),
                Event::UseHttp { id } => (id, Notice::UseHttp),
                Event::OutcomeUnknown { id } => (id, Notice::OutcomeUnknown),
            };
            if let Some(waiting) = state.waiting.get(&id) {
                // The first notice ends the wait: what cannot be queued behind it is not needed.
                let _ = waiting.try_send(notice);
            }
        }
        let core = &state.core;
        state.pairs.retain(|pair| core.is_in_use(pair.generation));
        self.changed.notify_one();
    }
}

async fn run_timers(shared: Weak<Shared>, changed: Arc<Notify>) {
    loop {
        let deadline = match shared.upgrade() {
            Some(shared) => shared.state().core.poll_timeout(),
            None => return,
        };
        let wait = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = changed.notified() => {}
            () = wait => {
                let Some(shared) = shared.upgrade() else { return };
                let mut state = shared.state();
                state.core.handle_timeout(Instant::now());
                shared.drain(&mut state);
            }
        }
    }
}

async fn receive(shared: Weak<Shared>, socket: Arc<UdpSocket>, generation: Generation) {
    let mut receiver = SegmentReceiver::new();
    loop {
        let Ok(ready) = socket.ready(Interest::READABLE | Interest::ERROR).await else { return };
        let Some(shared) = shared.upgrade() else { return };
        if ready.is_error() {
            while let Some(server) = icmp::next_unreachable(&socket) {
                let mut state = shared.state();
                state.core.handle_unreachable(server, Instant::now());
                shared.drain(&mut state);
            }
        }
        // Bounded, so that other tasks get their turn.
        for _ in 0..64 {
            match receiver.receive(&socket) {
                Ok((from, datagrams)) => {
                    let mut state = shared.state();
                    for datagram in datagrams {
                        state.core.handle_datagram(generation, from, datagram, Instant::now());
                    }
                    shared.drain(&mut state);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // An ICMP report, which the error queue has in full.
                Err(_) => {}
            }
        }
    }
}

async fn accept(shared: Weak<Shared>, listener: TcpListener, generation: Generation) {
    loop {
        let accepted = listener.accept().await;
        let Some(alive) = shared.upgrade() else { return };
        match accepted {
            Ok((stream, peer)) => {
                let is_asked = alive.state().core.is_asked(peer.ip());
                let permit = match is_asked {
                    true => alive.accepted.take(peer.ip(), OF_SERVER, alive.options.accepted),
                    false => alive.strangers.take(peer.ip(), OF_STRANGER.0, OF_STRANGER.1),
                };
                let Some(permit) = permit else {
                    // Closed at once: the server tells us to open one ourselves.
                    alive.count(|metrics| metrics.dhttp_client_connections_refused_total.add(1));
                    continue;
                };
                let shared = Weak::clone(&shared);
                let limits = alive.limits();
                let patience = if is_asked { limits.idle_timeout } else { STRANGER_TIME };
                tokio::spawn(async move {
                    let served = serve_connection(&shared, stream, peer, generation, limits, patience).await;
                    if let Err(error) = served {
                        tracing::debug!(%error, %peer, "connection of a server ended");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "cannot accept");
                drop(alive);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

/// A connection that a server, or a cache, has opened: one response after another.
async fn serve_connection(
    shared: &Weak<Shared>,
    mut stream: TcpStream,
    peer: SocketAddr,
    generation: Generation,
    limits: StreamLimits,
    mut first_patience: Duration,
) -> Result<(), StreamError> {
    let (patience, idle_timeout) = (limits.progress_timeout, limits.idle_timeout);
    // Both halves live as long as the connection: closing the writing one would tell the server to stop.
    let (read, _write) = stream.split();
    let mut reader = Reader::new(read, limits);
    loop {
        let id = match timeout(first_patience, reader.response_id()).await {
            Ok(Ok(id)) => id,
            Err(_) | Ok(Err(StreamError::Closed | StreamError::Slow)) => return Ok(()),
            Ok(Err(error)) => return Err(error),
        };
        // From now on it is one that answers.
        first_patience = idle_timeout + patience;
        let (method, waiting) = {
            let Some(shared) = shared.upgrade() else { return Ok(()) };
            let mut state = shared.state();
            let claim = state.core.claim(generation, peer.ip(), id);
            shared.drain(&mut state);
            let method: Method = claim.map_err(|_| StreamError::Response)?;
            (method, state.waiting.get(&id).cloned())
        };
        let head = match reader.response_head(method, patience).await {
            Ok(head) => head,
            Err(error) => {
                if let Some(shared) = shared.upgrade() {
                    let mut state = shared.state();
                    state.core.on_claim_broken(id);
                    shared.drain(&mut state);
                }
                return Err(error);
            }
        };
        let framing = head.framing;
        let (sender, body) = Body::channel();
        let notice = Notice::Stream { from: peer, head, body };
        if waiting.is_none_or(|waiting| waiting.try_send(notice).is_err()) {
            // Nobody waits any more, and what follows cannot be told from this response without reading all of it.
            return Ok(());
        }
        if reader.body(framing, sender).await.is_err() {
            return Err(StreamError::Response);
        }
    }
}

/// The future of [`DhttpClient::fetch`] may move between threads.
const _: fn() = || {
    fn moves<F: Future + Send>(_: fn(DhttpClient, FetchRequest) -> F) {}
    moves(|client, request| async move { client.fetch(request).await.is_ok() });
    moves(
        |client, request| async move { client.fetch_secured(request, Fingerprint::default()).await.is_ok() },
    );
};
