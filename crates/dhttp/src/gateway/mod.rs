//! A local HTTP proxy for browsers and other HTTP clients: DHTTP to servers that offer it, HTTP to others.
//!
//! A server offers DHTTP by the field `Alt-Svc: dhttp=":PORT"` in a response by HTTP (RFC 7838), or by URLs whose path
//! starts with `/_dhttp_/` (DHTTP §IV-E). Where it turns out not to speak it, requests go by HTTP at once.

mod head;
mod offers;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidegate_core::{IpPrefix, metric_set};
use tidegate_http::{BodyFraming, Method, status_reason};
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::driver::stream::{Reader, StreamError, StreamLimits, write_message};
use crate::driver::{
    Body, DhttpClient, FetchBody, FetchError, FetchRequest, FetchResponse, Fingerprint, Reading, Via,
};

use head::{Framing, Target, request_head, response_head};
use offers::{Offered, Offers};

/// The name of this proxy in `Via`.
const PSEUDONYM: &str = "tidegate-gateway";
/// Request bodies up to this length are held, so that they can go by UDP and be sent again.
const HELD_BODY_BYTES: u64 = 1460;

/// Settings of a gateway.
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    /// Whose connections are accepted: anyone else's are closed, because a proxy for everybody is a weapon.
    pub allow: Vec<IpPrefix>,
    /// Most connections at one time.
    pub connections: usize,
    /// How long a connection is kept without a request.
    pub idle_timeout: Duration,
    /// How long a request head may take, and how long either side may be silent within a body.
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
            idle_timeout: Duration::from_secs(75),
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
        Counter gateway_connections_refused_total: "Connections closed at once: a stranger's, or one too many.",
        Counter gateway_requests_total: "Requests taken.",
        Counter gateway_refused_total: "Requests answered with an error because they were malformed or would loop.",
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
    metrics: Arc<Mutex<GatewayMetrics>>,
}

/// Serves HTTP clients on `listener` for ever.
pub async fn serve(
    listener: TcpListener,
    client: DhttpClient,
    options: GatewayOptions,
    metrics: Arc<Mutex<GatewayMetrics>>,
) {
    let room = Arc::new(Semaphore::new(options.connections));
    let offers = Mutex::new(Offers::new(options.offers));
    let gateway = Arc::new(Gateway { client, options, offers, metrics });
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "cannot accept");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let allowed = gateway.options.allow.iter().any(|prefix| prefix.contains(peer.ip().to_canonical()));
        let Some(permit) = Arc::clone(&room).try_acquire_owned().ok().filter(|_| allowed) else {
            gateway.count(|metrics| metrics.gateway_connections_refused_total.add(1));
            continue;
        };
        gateway.count(|metrics| metrics.gateway_connections_total.add(1));
        let gateway = Arc::clone(&gateway);
        tokio::spawn(async move {
            if let Err(error) = gateway.connection(stream).await {
                tracing::debug!(%error, %peer, "connection ended");
            }
            drop(permit);
        });
    }
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
            head_timeout: self.options.progress_timeout,
            progress_timeout: self.options.progress_timeout,
            idle_timeout: self.options.idle_timeout,
            min_rate_bytes_per_s: 0,
        }
    }

    async fn connection(&self, stream: TcpStream) -> Result<(), StreamError> {
        stream.set_nodelay(true)?;
        let (read, mut write) = stream.into_split();
        let mut reader = Reader::new(read, self.limits());
        loop {
            let (head, framing) = match reader.http_request_head(Reading::default()).await {
                Ok(request) => request,
                Err(StreamError::Closed | StreamError::Slow) => return Ok(()),
                Err(StreamError::Head(error)) => {
                    self.count(|metrics| metrics.gateway_refused_total.add(1));
                    return self.error(&mut write, error.status(), Method::Other).await;
                }
                Err(error) => return Err(error),
            };
            self.count(|metrics| metrics.gateway_requests_total.add(1));
            let target = match Target::of(&head) {
                Ok(target) => target,
                Err(status) => {
                    self.count(|metrics| metrics.gateway_refused_total.add(1));
                    return self.error(&mut write, status, Method::Other).await;
                }
            };
            if target.method == Method::Connect {
                return self.tunnel(&target, reader, write).await;
            }
            match self.exchange(&mut reader, &mut write, &head, framing, &target).await? {
                Next::Request => {}
                Next::Close => return Ok(()),
            }
        }
    }

    /// One request and its response.
    async fn exchange(
        &self,
        reader: &mut Reader<OwnedReadHalf>,
        write: &mut OwnedWriteHalf,
        head: &Bytes,
        framing: BodyFraming,
        target: &Target,
    ) -> Result<Next, StreamError> {
        let held = matches!(framing, BodyFraming::Length(length) if length <= HELD_BODY_BYTES);
        let (sender, body) = Body::channel();
        let (body, upload) = if framing == BodyFraming::None {
            (FetchBody::Full(Bytes::new()), None)
        } else if held {
            let limit = HELD_BODY_BYTES as usize;
            let (read, body) = tokio::join!(reader.body(framing, sender), body.collect(limit));
            match (read, body) {
                (Ok(()), Ok(body)) => (FetchBody::Full(body), None),
                _ => return Ok(Next::Close),
            }
        } else {
            (FetchBody::Streamed(body), Some(sender))
        };
        let head = request_head(head, target, framing);
        let respond = async {
            let fetched = self.fetch(target, head, body).await;
            self.respond(write, target, fetched).await
        };
        match upload {
            None => respond.await,
            Some(sender) => {
                // Together, because a server may answer while the body still comes.
                let (uploaded, next) = tokio::join!(reader.body(framing, sender), respond);
                Ok(if uploaded.is_err() { Next::Close } else { next? })
            }
        }
    }

    /// Asks the addresses of the target's host, in turn while nobody is there.
    async fn fetch(
        &self,
        target: &Target,
        head: Bytes,
        body: FetchBody,
    ) -> Result<FetchResponse, FetchError> {
        let unresolved = || FetchError::Resolve(target.host.clone());
        let found = tokio::net::lookup_host((target.host.as_str(), target.port)).await;
        let mut addresses = found.map_err(|_| unresolved())?.peekable();
        let offer = self.offer(target);
        let mut body = Some(body);
        while let Some(address) = addresses.next() {
            // A body that is still being made can be given away once only.
            let body = match (&body, addresses.peek()) {
                (Some(FetchBody::Full(bytes)), Some(_)) => FetchBody::Full(bytes.clone()),
                _ => match body.take() {
                    Some(body) => body,
                    None => break,
                },
            };
            let request = FetchRequest {
                server: SocketAddr::new(address.ip(), offer.map_or(target.port, |offer| offer.port)),
                site: target.host.clone(),
                method: target.method,
                head: head.clone(),
                body,
                by_tcp: false,
                http: Some(address),
            };
            let fetched = match offer {
                Some(Offered { tls: Some(tls), .. }) => self.fetch_secured(target, request, tls).await,
                Some(_) => self.client.fetch(request).await,
                None => self.client.fetch_http(request).await,
            };
            match fetched {
                Err(FetchError::NoAnswer { sent: false, .. }) if addresses.peek().is_some() => {}
                fetched => return fetched,
            }
        }
        Err(unresolved())
    }

    /// Encrypted, as long as the server has the certificate that it announced. What it announced by HTTP protects from who
    /// listens, not from who can answer in its place: where it does not hold any more, HTTP is no worse.
    async fn fetch_secured(
        &self,
        target: &Target,
        request: FetchRequest,
        tls: Fingerprint,
    ) -> Result<FetchResponse, FetchError> {
        let FetchBody::Full(body) = &request.body else { return self.client.fetch(request).await };
        let again = FetchRequest {
            server: request.server,
            site: request.site.clone(),
            method: request.method,
            head: request.head.clone(),
            body: FetchBody::Full(body.clone()),
            by_tcp: request.by_tcp,
            http: request.http,
        };
        match self.client.fetch_secured(request, tls).await {
            Err(FetchError::NoAnswer { sent: false, .. }) => {
                self.offers.lock().unwrap_or_else(PoisonError::into_inner).forget(&target.host, target.port);
                self.client.fetch_http(again).await
            }
            fetched => fetched,
        }
    }

    /// Where the target's server is thought to speak DHTTP.
    fn offer(&self, target: &Target) -> Option<Offered> {
        let mut offers = self.offers.lock().unwrap_or_else(PoisonError::into_inner);
        let known = offers.of(&target.host, target.port, Instant::now());
        let by_path = Offered { port: target.port, tls: None };
        known.or_else(|| target.path.starts_with(b"/_dhttp_/").then_some(by_path))
    }

    async fn respond(
        &self,
        write: &mut OwnedWriteHalf,
        target: &Target,
        fetched: Result<FetchResponse, FetchError>,
    ) -> Result<Next, StreamError> {
        let response = match fetched {
            Ok(response) => response,
            Err(error) => {
                self.count(|metrics| metrics.gateway_failed_total.add(1));
                tracing::debug!(%error, host = %target.host, "no answer");
                let status = match error {
                    FetchError::Start(_) | FetchError::Ports(_) => 503,
                    _ => 502,
                };
                return self.error(write, status, target.method).await.map(|()| Next::Close);
            }
        };
        self.count(|metrics| match response.via {
            Via::Datagram => metrics.gateway_datagram_total.add(1),
            Via::ServerConnection | Via::ClientConnection => metrics.gateway_stream_total.add(1),
            Via::Http => metrics.gateway_http_total.add(1),
        });
        let Some((head, framing, alternatives)) = response_head(&response, target) else {
            return self.error(write, 502, target.method).await.map(|()| Next::Close);
        };
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

    /// An answer of this proxy; the connection ends with it.
    async fn error(
        &self,
        write: &mut OwnedWriteHalf,
        status: u16,
        method: Method,
    ) -> Result<(), StreamError> {
        let text = format!("{status} {}\n", status_reason(status));
        let head = format!(
            "HTTP/1.1 {status} {}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nProxy-Status: {PSEUDONYM}\r\nConnection: close\r\n\r\n",
            status_reason(status),
            text.len()
        );
        let body = if method == Method::Head { Bytes::new() } else { Bytes::from(text) };
        write_message(write, head.as_bytes(), Body::full(body), &self.limits()).await?;
        Ok(write.shutdown().await?)
    }

    /// RFC 9110 §9.3.6: for https, which this proxy does not look into.
    async fn tunnel(
        &self,
        target: &Target,
        reader: Reader<OwnedReadHalf>,
        mut write: OwnedWriteHalf,
    ) -> Result<(), StreamError> {
        let connect = TcpStream::connect((target.host.as_str(), target.port));
        let Ok(Ok(server)) = timeout(self.options.progress_timeout, connect).await else {
            self.count(|metrics| metrics.gateway_failed_total.add(1));
            return self.error(&mut write, 502, Method::Connect).await;
        };
        self.count(|metrics| metrics.gateway_tunnels_total.add(1));
        write.write_all(b"HTTP/1.1 200 Connected\r\n\r\n").await?;
        let (early, read) = reader.into_parts();
        let Ok(client) = read.reunite(write) else { return Err(StreamError::Closed) };
        head::tunnel(client, server, &early, self.options.tunnel_timeout).await
    }
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
