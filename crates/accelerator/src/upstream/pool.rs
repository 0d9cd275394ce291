//! One core's connections to servers.

use std::cell::{Cell, RefCell};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tidegate_http::BodyFraming;
use tokio::time::Instant;

use crate::data_core::millis;
use crate::settings::Upstream;
use crate::upstream::exchange::{Arrivals, ExchangeLimits, OutgoingRequest, Received, exchange, go_on};
use crate::upstream::groups::{Group, Groups, Server};
use crate::upstream::http2::Sessions;
use crate::upstream::permits::{NoPermit, Permit, Permits};
use crate::upstream::pipeline::{Outcome, Pipeline};
use crate::upstream::upload::Kept;
use crate::upstream::{Heard, RequestBody, Response, Stream, UpstreamError};

/// How long connections to a server are used once after it has sent more than it announced.
const DISTRUST: Duration = Duration::from_secs(60);
/// Servers tried for one request.
const ATTEMPTS: usize = 3;
/// How often one is offered again to a server that has turned it away with a connection.
const TURNED_AWAY: usize = 8;
/// What is kept of a request's content, where a server may turn away what it has begun to get (RFC 9113 §8.7).
const KEPT_BYTES: usize = 64 * 1024;
/// By HTTP/2, a longer head has a connection of its own. Servers end the whole connection for a field or a head that is too long
/// for them, from 8 KB on, and with it what others have asked for.
const SHARED_HEAD_BYTES: usize = 7 * 1024;

/// One core's idle connections.
pub(crate) struct Pools {
    groups: Arc<Groups>,
    pools: Vec<Vec<Rc<Pool>>>,
    arrivals: Arrivals,
}

/// Connections to one server.
#[derive(Default)]
pub(super) struct Pool {
    /// Each with when it was used last ([`Groups::now_ms`]); the most recently used last, so that the others time out.
    idle: RefCell<Vec<(Rc<Stream>, u64)>>,
    /// Those by HTTP/2, idle or not.
    sessions: Sessions,
    permits: Rc<Permits>,
    pipeline: Pipeline,
    /// Until then connections are used once: the server has sent more than its responses announce.
    distrusted_until: Cell<Option<Instant>>,
}

/// The right to one connection of a pool; counts as a request in progress until it is dropped.
pub(crate) struct Lease {
    groups: Arc<Groups>,
    group: usize,
    server: usize,
    pool: Rc<Pool>,
    permit: Permit,
}

impl Pools {
    /// With the connections that there were before to the same servers.
    pub(crate) fn new(groups: Arc<Groups>, before: Option<&Self>) -> Self {
        let before = before.map(|before| (&*before.groups, &before.pools[..]));
        let pools = groups.carry_over(before, Rc::<Pool>::default);
        Self { groups, pools, arrivals: Arrivals::default() }
    }

    /// Closes the connections that were idle for too long.
    pub(crate) fn sweep(&self) {
        let now_ms = self.groups.now_ms();
        for (group, pools) in self.groups.iter().zip(&self.pools) {
            let oldest_ms = now_ms.saturating_sub(millis(group.settings.idle_timeout));
            for pool in pools {
                let mut idle = pool.idle.borrow_mut();
                let expired = idle.partition_point(|(_, since_ms)| *since_ms < oldest_ms);
                idle.drain(..expired);
                pool.sessions.sweep(millis(group.settings.idle_timeout));
            }
        }
    }

    /// How many requests wait for a connection to the server that most of them wait for, how many connections that may
    /// have, and who has them; `None`: nobody waits.
    pub(crate) fn crowd(&self) -> Option<(usize, usize, Rc<Permits>)> {
        let crowds = self.pools.iter().flatten().filter_map(|pool| {
            let (waiting, most) = pool.permits.crowd()?;
            Some((waiting, most, Rc::clone(&pool.permits)))
        });
        crowds.max_by_key(|(waiting, most, _)| (*waiting, *most))
    }

    #[cfg(test)]
    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Sends a request to a server of the group and waits for the response's head.
    ///
    /// A server that cannot be reached is replaced by another one. A connection that turns out to be dead is replaced
    /// only if the request may be repeated (RFC 9110 §9.2.2) and its body has not been touched.
    pub(crate) async fn send<B: RequestBody>(
        &self,
        group_index: usize,
        request: OutgoingRequest<'_>,
        body: B,
    ) -> Result<Box<Response>, UpstreamError> {
        let group = self.groups.get(group_index).ok_or(UpstreamError::NoServer)?;
        let mut body = Kept::new(body, if group.settings.http2 { KEPT_BYTES } else { 0 });
        let (mut tried, mut turned_away) = (Vec::new(), 0);
        let mut last = UpstreamError::NoServer;
        while tried.len() < ATTEMPTS {
            let now_ms = self.groups.now_ms();
            let Some(server) = group.pick(&request, &tried, now_ms) else { break };
            let lease = match self.lease(group, group_index, server, &request).await {
                Ok(lease) => Rc::new(lease),
                Err(error) => {
                    last = last.or_then(error);
                    tried.push(server);
                    continue;
                }
            };
            match self.attempt(group, &lease, &request, &mut body).await {
                Ok(response) => return Ok(response),
                Err(Failed { error, retry }) => {
                    if !retry {
                        return Err(error);
                    }
                    body.rewind();
                    // Another connection to the same server may well take it: one that ends says so while requests come.
                    if matches!(error, UpstreamError::Untouched(_)) && turned_away < TURNED_AWAY {
                        turned_away += 1;
                    } else {
                        tried.push(server);
                    }
                    last = last.or_then(error);
                }
            }
        }
        Err(last)
    }

    /// One server: idle connections first, since they cost no round trip, then a new one.
    async fn attempt<B: RequestBody>(
        &self,
        group: &Group,
        lease: &Rc<Lease>,
        request: &OutgoingRequest<'_>,
        body: &mut Kept<B>,
    ) -> Result<Box<Response>, Failed> {
        let settings = &group.settings;
        let limits = ExchangeLimits { silence: settings.response_timeout, arrivals: &self.arrivals };
        if let Some(answer) = lease.pool.pipeline.join(lease, request)
            && let Ok(outcome) = answer.await
        {
            let answer = match outcome {
                Outcome::Whole(received) => Ok((received, None, false)),
                Outcome::Begun { received, stream, is_shared } => Ok((received, Some(stream), is_shared)),
                Outcome::Interim { interim, rest, stream, is_shared } => {
                    let received = Box::pin(go_on(&stream, request, (interim, rest), body, limits)).await;
                    received.map(|received| (received, Some(stream), is_shared))
                }
                Outcome::Failed(error) => Err(error),
            };
            match answer {
                Ok((received, stream, is_shared)) => {
                    return Ok(lease.answered_with_others(received, stream, is_shared, body));
                }
                // Behind interim responses, which says as little as at the start of a connection that was idle.
                Err(UpstreamError::Incomplete | UpstreamError::Broken(_)) => {}
                Err(error) => return Err(lease.blame(error, false)),
            }
        }
        let has_content = request.framing != BodyFraming::None;
        if lease.shares(request)
            && let Some(stream) = lease.take_idle(has_content)
        {
            match exchange(&stream, request, body, limits).await {
                Ok(received) => return Ok(lease.answered(Some(stream), received)),
                // The server closed the connection while it was idle: that says nothing about its health.
                Err(error) if may_be_repeated(&error, request, body) => body.rewind(),
                Err(error) => return Err(lease.blame(error, false)),
            }
        }
        // Boxed: most requests find a connection.
        Box::pin(attempt_anew(lease, request, body, settings.connect_timeout, limits)).await
    }

    /// Where the server has as many connections as it may, requests wait in the order of their classes.
    async fn lease(
        &self,
        group: &Group,
        group_index: usize,
        server: usize,
        request: &OutgoingRequest<'_>,
    ) -> Result<Lease, UpstreamError> {
        let pool =
            self.pools.get(group_index).and_then(|pools| pools.get(server)).ok_or(UpstreamError::NoServer)?;
        let settings = &group.settings;
        let permit = match pool.permits.take(settings.max_connections, request.client) {
            Some(permit) => permit,
            None => {
                let waiting = pool.permits.wait(request.client, request.class, settings.connect_timeout);
                Box::pin(waiting).await.map_err(|no_turn| match no_turn {
                    NoPermit::Crowded => UpstreamError::Busy,
                    NoPermit::ClientsShare => UpstreamError::ClientsShare,
                })?
            }
        };
        if let Some(server) = group.servers.get(server) {
            server.request_began();
        }
        let groups = Arc::clone(&self.groups);
        Ok(Lease { groups, group: group_index, server, pool: Rc::clone(pool), permit })
    }
}

/// A request on a new connection to one server.
async fn attempt_anew<B: RequestBody>(
    lease: &Rc<Lease>,
    request: &OutgoingRequest<'_>,
    body: &mut Kept<B>,
    connect_timeout: Duration,
    limits: ExchangeLimits<'_>,
) -> Result<Box<Response>, Failed> {
    let connection = connect(lease.group(), lease.server(), connect_timeout);
    let is_alone = !lease.shares(request);
    let connected = match lease.settings().http2 {
        true if !is_alone => {
            let has_content = request.framing != BodyFraming::None;
            lease.pool.sessions.connect(connect_timeout, has_content, connection).await
        }
        _ => connection.await,
    };
    let stream = match connected {
        Ok(stream) => Rc::new(stream),
        Err(error) => return Err(lease.blame(error, body.is_replayable())),
    };
    match exchange(&stream, request, body, limits).await {
        Ok(received) => Ok(lease.answered(Some(stream), received)),
        Err(UpstreamError::Broken(_) | UpstreamError::Incomplete | UpstreamError::Untouched(_))
            if is_alone && stream.http2().is_some() =>
        {
            Err(lease.blame(UpstreamError::LargeHead, false))
        }
        Err(error) => {
            let retry = may_be_repeated(&error, request, body);
            Err(lease.blame(error, retry))
        }
    }
}

/// Whether a request that had no answer may be sent again (RFC 9110 §9.2.2): the server has nothing of it, or nothing comes of
/// doing it twice.
fn may_be_repeated<B: RequestBody>(
    error: &UpstreamError,
    request: &OutgoingRequest<'_>,
    body: &Kept<B>,
) -> bool {
    let is_safe = match error {
        UpstreamError::Untouched(_) => true,
        UpstreamError::Incomplete | UpstreamError::Broken(_) => request.method.is_idempotent(),
        _ => false,
    };
    is_safe && body.is_replayable()
}

/// Why an attempt failed, and whether another one is safe.
struct Failed {
    error: UpstreamError,
    retry: bool,
}

impl Pool {
    pub(super) fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }

    /// An idle connection on which nothing has arrived, not even its end.
    fn take_idle(&self, server: &Server, oldest_ms: u64) -> Option<Rc<Stream>> {
        let mut idle = self.idle.borrow_mut();
        while let Some((stream, since_ms)) = idle.pop() {
            if since_ms < oldest_ms {
                // Those below were used even longer ago.
                idle.clear();
                return None;
            }
            match stream.listen() {
                Heard::Silence => return Some(stream),
                Heard::End => {}
                Heard::Surplus => {
                    idle.clear();
                    self.distrust(server);
                }
            }
        }
        None
    }

    /// What follows a response is taken for the answer to the next request where it comes after that was sent: nobody
    /// can tell. So a server that has done it once gets one request on each connection for a while.
    fn distrust(&self, server: &Server) {
        if !self.is_distrusted() {
            tracing::warn!(
                server = %server.address,
                "an upstream server sends more than its responses announce: its connections are not reused"
            );
        }
        self.distrusted_until.set(Some(Instant::now() + DISTRUST));
    }

    fn is_distrusted(&self) -> bool {
        self.distrusted_until.get().is_some_and(|until| Instant::now() < until)
    }
}

impl Lease {
    fn group(&self) -> &Group {
        // Leases are made from indices that the groups have confirmed, and groups never change.
        self.groups.get(self.group).expect("a lease's group exists")
    }

    pub(super) fn settings(&self) -> &Upstream {
        &self.group().settings
    }

    /// Whether a request may be on a connection with others.
    fn shares(&self, request: &OutgoingRequest<'_>) -> bool {
        !self.settings().http2 || request.head.len() <= SHARED_HEAD_BYTES
    }

    pub(super) fn pool(&self) -> &Rc<Pool> {
        &self.pool
    }

    pub(super) fn pipeline(&self) -> &Pipeline {
        &self.pool.pipeline
    }

    /// An idle connection to the server, or room on one by HTTP/2, if there is.
    pub(super) fn take_idle(&self, has_content: bool) -> Option<Rc<Stream>> {
        if self.settings().http2
            && let Some(stream) = self.pool.sessions.stream(has_content)
        {
            return Some(Rc::new(stream));
        }
        let idle_ms = millis(self.settings().idle_timeout);
        self.pool.take_idle(self.server(), self.groups.now_ms().saturating_sub(idle_ms))
    }

    pub(super) fn server(&self) -> &Server {
        &self.group().servers[self.server]
    }

    /// The server has answered; on this connection, if more may come.
    fn answered(self: &Rc<Self>, stream: Option<Rc<Stream>>, received: Box<Received>) -> Box<Response> {
        self.answered_before(stream, received, false)
    }

    /// The same, with answers to others behind this one or not.
    fn answered_before(
        self: &Rc<Self>,
        stream: Option<Rc<Stream>>,
        received: Box<Received>,
        has_others_behind: bool,
    ) -> Box<Response> {
        self.server().succeeded();
        let connection = stream.map(|stream| (stream, Rc::clone(self)));
        Response::new(received, self.settings().response_timeout, connection, has_others_behind)
    }

    /// The server has answered a request that went with others.
    fn answered_with_others<B: RequestBody>(
        self: &Rc<Self>,
        mut received: Box<Received>,
        stream: Option<Rc<Stream>>,
        is_shared: bool,
        body: &mut B,
    ) -> Box<Response> {
        for interim in received.interim.drain(..) {
            body.informational(&interim.get());
        }
        self.answered_before(stream, received, is_shared)
    }

    /// The connection has become the tunnel of the client with this socket.
    pub(crate) fn becomes_tunnel(&self, client: RawFd) {
        self.permit.becomes_tunnel(client);
    }

    /// Keeps a connection for the next request.
    pub(crate) fn give_back(&self, stream: Rc<Stream>) {
        if stream.http2().is_some() {
            if let Some(Stream::Http2(stream)) = Rc::into_inner(stream) {
                stream.finish();
            }
            self.pool.sessions.trim(self.settings().idle_connections);
            return;
        }
        if self.pool.is_distrusted() {
            return;
        }
        let mut idle = self.pool.idle.borrow_mut();
        if idle.len() >= self.settings().idle_connections {
            if idle.is_empty() {
                return;
            }
            idle.remove(0);
        }
        idle.push((stream, self.groups.now_ms()));
    }

    /// More has come than the response announced.
    pub(crate) fn distrust(&self) {
        self.pool.idle.borrow_mut().clear();
        self.pool.distrust(self.server());
    }

    /// Counts a failure of the server.
    pub(crate) fn failed(&self, error: &UpstreamError) {
        if error.is_servers_fault() {
            self.server().failed(error, self.settings(), self.groups.now_ms());
        }
    }

    fn blame(&self, error: UpstreamError, retry: bool) -> Failed {
        self.failed(&error);
        Failed { error, retry }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.server().request_ended();
    }
}

/// Connects to a server of the group.
pub(crate) async fn connect(
    group: &Group,
    server: &Server,
    timeout: Duration,
) -> Result<Stream, UpstreamError> {
    let connection = async {
        let stream = Stream::connect(&server.address, group.trust.as_ref()).await?;
        if group.settings.http2 { stream.into_http2().await } else { Ok(stream) }
    };
    let attempt = tokio::time::timeout(timeout, connection).await;
    attempt.map_err(|_| UpstreamError::ConnectTimeout)?.map_err(UpstreamError::of_connecting)
}
