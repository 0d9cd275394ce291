//! A local HTTP proxy for browsers and other HTTP clients: DHTTP to servers that offer it, HTTP to others.
//!
//! A server offers DHTTP by the field `Alt-Svc: dhttp=":PORT"` in a response by HTTP (RFC 7838), or by URLs whose path
//! starts with `/_dhttp_/` (DHTTP §IV-E). Where it turns out not to speak it, requests go by HTTP at once.

mod access;
mod head;
mod offers;
mod refusal;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidegate_core::{IpPrefix, metric_set};
use tidegate_http::{BodyFraming, Method};
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::driver::stream::{Reader, StreamError, StreamLimits, write_message};
use crate::driver::{
    Body, BodySender, DhttpClient, FetchBody, FetchError, FetchRequest, FetchResponse, Fingerprint, Reading,
    Via,
};
use crate::quota::Quota;

use head::{Framing, Target, request_head, response_head};
use offers::{Offered, Offers};
use refusal::Refusal;

/// The name of this proxy in `Via`.
const PSEUDONYM: &str = "tidegate-gateway";
/// Request bodies up to this length are held, so that they can go by UDP and be sent again.
const HELD_BODY_BYTES: u64 = 1460;
/// Who is turned away is told why: so many connections at one time, of one peer and in all; more are closed at once.
const TURNED_AWAY: (usize, usize) = (4, 64);
/// How long who is refused may take to read why, and to stop sending.
const REFUSAL_TIME: Duration = Duration::from_secs(2);

/// Settings of a gateway.
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    /// Whose requests are taken: anyone else's are refused, because a proxy for everybody is a weapon.
    pub allow: Vec<IpPrefix>,
    /// Most connections at one time.
    pub connections: usize,
    /// Most connections of one peer (an IPv6 network of 64 bits is one) other than this host.
    pub connections_per_peer: usize,
    /// How long a connection is kept without a request.
    pub idle_timeout: Duration,
    /// How long a request head may take.
    pub head_timeout: Duration,
    /// How long either side may be silent within a body.
    pub progress_timeout: Duration,
    /// How long a tunnel (CONNECT) may be silent in both directions.
    pub tunnel_timeout: Duration,
    /// Most servers whose offers are remembered.
    pub offers: usize,
}

impl Default for GatewayOptions {
    fn default() -> Self {
        let loopback = ["127.0.0.0/8", "::1/128"].iter().filter_map(|prefix| prefix.parse().ok()).collect();
        Self {
            allow: loopback,
            connections: 1024,
            connections_per_peer: 256,
            idle_timeout: Duration::from_secs(75),
            head_timeout: Duration::from_secs(15),
            progress_timeout: Duration::from_secs(60),
            tunnel_timeout: Duration::from_secs(300),
            offers: 4096,
        }
    }
}

metric_set! {
    /// What a gateway counts.
    pub struct GatewayMetrics {
        Counter gateway_connections_total: "Connections of clients accepted.",
        Counter gateway_connections_refused_total: "Connections turned away: a stranger's, or one too many.",
        Counter gateway_requests_total: "Requests taken.",
        Counter gateway_refused_total:
            "Requests answered with an error because they were malformed, would loop, or lead where the client may \
             not.",
        Counter gateway_failed_total: "Requests for which no server gave an answer.",
        Counter gateway_datagram_total: "Responses that came in one datagram.",
        Counter gateway_stream_total: "Responses that came by DHTTP on a connection.",
        Counter gateway_http_total: "Responses that came by HTTP.",
        Counter gateway_tunnels_total: "Tunnels opened for CONNECT.",
    }
}

struct Gateway {
    client: DhttpClient,
    options: GatewayOptions,
    offers: Mutex<Offers>,
    quota: Quota,
    turned_away: Quota,
    metrics: Arc<Mutex<GatewayMetrics>>,
}

/// Serves HTTP clients on `listener` for ever.
pub async fn serve(
    listener: TcpListener,
    client: DhttpClient,
    options: GatewayOptions,
    metrics: Arc<Mutex<GatewayMetrics>>,
) {
    let offers = Mutex::new(Offers::new(options.offers));
    let (quota, turned_away) = Default::default();
    let gateway = Arc::new(Gateway { client, options, offers, quota, turned_away, metrics });
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => gateway.accept(stream, peer),
            Err(error) => {
                tracing::debug!(%error, "cannot accept");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// A client's connection.
struct Asker {
    peer: SocketAddr,
    /// The gateway's address that it connected to.
    gateway: SocketAddr,
    reader: Reader<OwnedReadHalf>,
    write: OwnedWriteHalf,
}

/// What happens to a client's connection after a response.
enum Next {
    Request,
    Close,
}

impl Gateway {
    fn count(&self, count: impl FnOnce(&GatewayMetrics)) {
        // Under the lock, because a counter has one writer at a time.
        count(&self.metrics.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn limits(&self) -> StreamLimits {
        StreamLimits {
            head_timeout: self.options.head_timeout,
            progress_timeout: self.options.progress_timeout,
            idle_timeout: self.options.idle_timeout,
            min_rate_bytes_per_s: 0,
        }
    }

    fn accept(self: &Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        let address = peer.ip().to_canonical();
        let options = &self.options;
        if !options.allow.iter().any(|prefix| prefix.contains(address)) {
            return self.turn_away(stream, peer, Refusal::stranger(address));
        }
        // Behind this host's own address are many programs.
        let of_peer = if address.is_loopback() { options.connections } else { options.connections_per_peer };
        let Some(permit) = self.quota.take(address, of_peer, options.connections) else {
            return self.turn_away(stream, peer, Refusal::too_many());
        };
        self.count(|metrics| metrics.gateway_connections_total.add(1));
        let gateway = Arc::clone(self);
        tokio::spawn(async move {
            if let Err(error) = gateway.connection(stream, peer).await {
                tracing::debug!(%error, %peer, "connection ended");
            }
            drop(permit);
        });
    }

    /// Says why, as long as that costs little.
    fn turn_away(self: &Arc<Self>, mut stream: TcpStream, peer: SocketAddr, refusal: Refusal) {
        self.count(|metrics| metrics.gateway_connections_refused_total.add(1));
        let (of_peer, in_all) = TURNED_AWAY;
        let Some(permit) = self.turned_away.take(peer.ip(), of_peer, in_all) else { return };
        tracing::warn!(%peer, reason = refusal.details, "turned away");
        let limits = self.limits();
        tokio::spawn(async move {
            let say = async {
                stream.write_all(&refusal.response(Method::Other)).await?;
                stream.shutdown().await?;
                Reader::new(stream, limits).linger().await;
                io::Result::Ok(())
            };
            if let Ok(Err(error)) = timeout(REFUSAL_TIME, say).await {
                tracing::debug!(%error, %peer, "was not told why");
            }
            drop(permit);
        });
    }

    async fn connection(&self, stream: TcpStream, peer: SocketAddr) -> Result<(), StreamError> {
        stream.set_nodelay(true)?;
        let gateway = stream.local_addr()?;
        let (read, write) = stream.into_split();
        let mut asker = Asker { peer, gateway, reader: Reader::new(read, self.limits()), write };
        loop {
            let (head, framing) = match asker.reader.http_request_head(Reading::default()).await {
                Ok(request) => request,
                Err(StreamError::Closed | StreamError::Slow) => return Ok(()),
                Err(StreamError::Head(error)) => {
                    return self.refuse(&mut asker, &Refusal::of_head(error), Method::Other).await;
                }
                Err(error) => return Err(error),
            };
            self.count(|metrics| metrics.gateway_requests_total.add(1));
            let target = match Target::of(&head, asker.gateway) {
                Ok(target) => target,
                Err(refusal) => return self.refuse(&mut asker, &refusal, Method::Other).await,
            };
            let found = access::addresses(&target.host, target.port, asker.peer.ip()).await;
            let addresses = match found {
                Ok(addresses) => addresses,
                Err(refusal) => return self.refuse(&mut asker, &refusal, target.method).await,
            };
            if target.method == Method::Connect {
                return self.tunnel(&target, &addresses, asker).await;
            }
            match self.exchange(&mut asker, &head, framing, &target, &addresses).await? {
                Next::Request => {}
                Next::Close => return Ok(()),
            }
        }
    }

    /// One request and its response.
    async fn exchange(
        &self,
        asker: &mut Asker,
        head: &Bytes,
        framing: BodyFraming,
        target: &Target,
        addresses: &[SocketAddr],
    ) -> Result<Next, StreamError> {
        if target.expects_continue && asker.reader.is_empty() {
            // RFC 9110 §10.1.1: of a datagram the body is a part, so that the next hop cannot be asked before.
            asker.write.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        let (sender, body) = Body::channel();
        let head = request_head(head, target, framing);
        match framing {
            BodyFraming::None => {
                let fetched = self.fetch(target, addresses, head, FetchBody::Full(Bytes::new())).await;
                self.answer(&mut asker.write, asker.peer, target, fetched).await
            }
            BodyFraming::Length(length) if length <= HELD_BODY_BYTES => {
                let limit = HELD_BODY_BYTES as usize;
                let read = tokio::join!(asker.reader.body(framing, sender), body.collect(limit));
                let (Ok(()), Ok(body)) = read else {
                    let refusal = Refusal::request("the request's body broke off, or came too slowly");
                    return self.refuse(asker, &refusal, target.method).await.map(|()| Next::Close);
                };
                let fetched = self.fetch(target, addresses, head, FetchBody::Full(body)).await;
                self.answer(&mut asker.write, asker.peer, target, fetched).await
            }
            _ => {
                let body = if framing == BodyFraming::Chunked { chunked(body) } else { body };
                self.pass_on(asker, target, addresses, head, (framing, sender, body)).await
            }
        }
    }

    /// A request whose body goes on as it comes; a server may answer while it still does.
    async fn pass_on(
        &self,
        asker: &mut Asker,
        target: &Target,
        addresses: &[SocketAddr],
        head: Bytes,
        (framing, sender, body): (BodyFraming, BodySender, Body),
    ) -> Result<Next, StreamError> {
        let body = FetchBody::Streamed(body.into());
        let (uploaded, responded) = tokio::join!(asker.reader.body(framing, sender), async {
            let fetched = self.fetch(target, addresses, head, body).await;
            self.answer(&mut asker.write, asker.peer, target, fetched).await
        });
        let next = responded?;
        if uploaded.is_err() || matches!(next, Next::Close) {
            // What the server did not want: unread, it would make the system discard the answer.
            let _ = timeout(REFUSAL_TIME, asker.reader.linger()).await;
            return Ok(Next::Close);
        }
        Ok(next)
    }

    /// Asks the addresses of the target's host, in turn while nobody is there.
    async fn fetch(
        &self,
        target: &Target,
        addresses: &[SocketAddr],
        head: Bytes,
        body: FetchBody,
    ) -> Result<FetchResponse, FetchError> {
        let offer = self.offer(target);
        let mut outcome = Err(FetchError::Resolve(target.host.clone()));
        for address in addresses {
            let request = FetchRequest {
                server: SocketAddr::new(address.ip(), offer.map_or(target.port, |offer| offer.port)),
                site: target.host.clone(),
                method: target.method,
                head: head.clone(),
                body: body.clone(),
                by_tcp: false,
                http: Some(*address),
            };
            outcome = match offer {
                Some(Offered { tls: Some(tls), .. }) => self.fetch_secured(target, request, tls).await,
                Some(_) => self.client.fetch(request).await,
                None => self.client.fetch_http(request).await,
            };
            if !matches!(outcome, Err(FetchError::NoAnswer { sent: false, .. })) {
                break;
            }
        }
        outcome
    }

    /// Encrypted, as long as the server has the certificate that it announced. What it announced by HTTP protects from
    /// who listens, not from who can answer in its place: where it does not hold any more, HTTP is no worse. A body
    /// that goes on as it comes is not turned over to HTTP: the client hears of it, and the next request finds out
    /// anew.
    async fn fetch_secured(
        &self,
        target: &Target,
        request: FetchRequest,
        tls: Fingerprint,
    ) -> Result<FetchResponse, FetchError> {
        let may_go_by_http = matches!(request.body, FetchBody::Full(_));
        match self.client.fetch_secured(request.clone(), tls).await {
            Err(error @ FetchError::NoAnswer { sent: false, .. }) => {
                self.offers.lock().unwrap_or_else(PoisonError::into_inner).forget(&target.host, target.port);
                if may_go_by_http { self.client.fetch_http(request).await } else { Err(error) }
            }
            fetched => fetched,
        }
    }

    /// Where the target's server is thought to speak DHTTP.
    fn offer(&self, target: &Target) -> Option<Offered> {
        let mut offers = self.offers.lock().unwrap_or_else(PoisonError::into_inner);
        let known = offers.of(&target.host, target.port, Instant::now());
        let by_path = || {
            let is_convention = target.path.starts_with(b"/_dhttp_/");
            // Nothing has answered at this port yet: a page may have made up the URL.
            (is_convention && offers::may_be_a_servers(target.port, None))
                .then_some(Offered { port: target.port, tls: None })
        };
        known.or_else(by_path)
    }

    async fn answer(
        &self,
        write: &mut OwnedWriteHalf,
        peer: SocketAddr,
        target: &Target,
        fetched: Result<FetchResponse, FetchError>,
    ) -> Result<Next, StreamError> {
        let whom = target.whom();
        let failed = |refusal: Refusal| {
            self.count(|metrics| metrics.gateway_failed_total.add(1));
            tracing::warn!(%peer, status = refusal.status, reason = refusal.details, "no answer to give");
            refusal
        };
        let response = match fetched {
            Ok(response) => response,
            Err(error) => {
                let refusal = failed(Refusal::of_fetch(&error, &whom));
                return send(write, &refusal, target.method).await.map(|()| Next::Close);
            }
        };
        let Some((head, framing, alternatives)) = response_head(&response, target) else {
            let refusal = failed(Refusal::of_fetch(&FetchError::BadAnswer, &whom));
            return send(write, &refusal, target.method).await.map(|()| Next::Close);
        };
        self.count(|metrics| match response.via {
            Via::Datagram => metrics.gateway_datagram_total.add(1),
            Via::ServerConnection | Via::ClientConnection => metrics.gateway_stream_total.add(1),
            Via::Http => metrics.gateway_http_total.add(1),
        });
        if response.via == Via::Http
            && let Some(alternatives) = alternatives
        {
            let mut offers = self.offers.lock().unwrap_or_else(PoisonError::into_inner);
            offers.learn(&target.host, target.port, &alternatives, Instant::now());
        }
        let body = match framing {
            Framing::None => Body::full(Bytes::new()),
            Framing::AsIs => response.body,
            Framing::Chunked => chunked(response.body),
            Framing::UntilClose => response.body,
        };
        write_message(write, &head, body, &self.limits()).await?;
        let keep = target.keep_alive && framing != Framing::UntilClose;
        if !keep {
            write.shutdown().await?;
        }
        Ok(if keep { Next::Request } else { Next::Close })
    }

    /// A request that goes nowhere; the connection ends with the answer.
    async fn refuse(&self, asker: &mut Asker, refusal: &Refusal, method: Method) -> Result<(), StreamError> {
        self.count(|metrics| metrics.gateway_refused_total.add(1));
        tracing::warn!(peer = %asker.peer, status = refusal.status, reason = refusal.details, "refused");
        send(&mut asker.write, refusal, method).await?;
        let _ = timeout(REFUSAL_TIME, asker.reader.linger()).await;
        Ok(())
    }

    /// RFC 9110 §9.3.6: for https, which this proxy does not look into.
    async fn tunnel(
        &self,
        target: &Target,
        addresses: &[SocketAddr],
        mut asker: Asker,
    ) -> Result<(), StreamError> {
        let connect = timeout(self.options.progress_timeout, TcpStream::connect(addresses)).await;
        let server = match connect.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(server) => server,
            Err(reason) => {
                let error = FetchError::NoAnswer { reason, sent: false };
                return self.answer(&mut asker.write, asker.peer, target, Err(error)).await.map(|_| ());
            }
        };
        self.count(|metrics| metrics.gateway_tunnels_total.add(1));
        asker.write.write_all(b"HTTP/1.1 200 Connected\r\n\r\n").await?;
        let (early, read) = asker.reader.into_parts();
        let Ok(client) = read.reunite(asker.write) else { return Err(StreamError::Closed) };
        head::tunnel(client, server, &early, self.options.tunnel_timeout).await
    }
}

/// Sends an answer of this proxy, and nothing after it.
async fn send(write: &mut OwnedWriteHalf, refusal: &Refusal, method: Method) -> Result<(), StreamError> {
    let sent = timeout(REFUSAL_TIME, write.write_all(&refusal.response(method))).await;
    sent.map_err(|_| StreamError::Slow)??;
    Ok(write.shutdown().await?)
}

/// Applies the chunked coding to a body as it comes.
fn chunked(mut body: Body) -> Body {
    let (mut sender, out) = Body::channel();
    tokio::spawn(async move {
        while let Some(piece) = body.next().await {
            // A body that breaks off is to break off at the client's too.
            let Ok(piece) = piece else { return };
            if piece.is_empty() {
                continue;
            }
            let mut chunk = Vec::with_capacity(piece.len() + 24);
            tidegate_http::write_chunk(&piece, &mut chunk);
            if sender.send(chunk.into()).await.is_err() {
                return;
            }
        }
        let mut last = Vec::new();
        tidegate_http::write_last_chunk([], &mut last);
        if sender.send(last.into()).await.is_ok() {
            sender.end();
        }
    });
    out
}

/// The future of [`serve`] may move between threads.
const _: fn() = || {
    fn moves<F: Future + Send>(_: fn(TcpListener, DhttpClient) -> F) {}
    moves(|listener, client| serve(listener, client, GatewayOptions::default(), Arc::default()));
};
