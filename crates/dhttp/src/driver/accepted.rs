//! Connections that clients open: requests that must not be repeated, that are too long for a datagram, or that were
//! told to use TCP.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::spawn_local;
use tokio::time::timeout;

use super::handle::Ending;
use super::security::{Security, is_for_keys};
use super::server::Driver;
use super::service::{Arrival, Body, Request, Response, Service};
use super::stream::{Reader, StreamError, write_message};
use crate::client::TLS_RECORD;
use crate::server::GlobalId;
use crate::wire::{Numbered, RequestId, WireError};

/// The longest datagram.
const DATAGRAM_BYTES: usize = 65_535;

/// Whether a request was answered.
#[derive(Eq, PartialEq)]
enum Ended {
    Answered,
    /// It may have been executed, and its response is not known any more.
    Unanswered,
}

impl<S: Service> Driver<S> {
    pub(super) fn accept(self: &Rc<Self>, stream: TcpStream, peer: SocketAddr) {
        let metrics = &self.handle.driver;
        let (of_peer, in_all) = (self.options.accepted_per_client, self.options.accepted);
        let Some(permit) = self.accepted.take(peer.ip(), of_peer, in_all) else {
            metrics.dhttp_accepted_refused_total.add(1);
            return;
        };
        // It has gone already.
        let Ok(local) = stream.local_addr() else { return };
        let Some(note) = self.service.meet(peer, local) else {
            metrics.dhttp_accepted_policed_total.add(1);
            return;
        };
        metrics.dhttp_accepted_total.add(1);
        metrics.dhttp_accepted_open.add(1);
        let driver = Rc::clone(self);
        spawn_local(async move {
            let _permit = permit;
            if let Err(error) = driver.serve_stream(stream, peer).await {
                driver.handle.driver.dhttp_stream_errors_total.add(1);
                tracing::debug!(%error, %peer, "connection of a client ended");
            }
            driver.service.part(peer, note);
            driver.handle.driver.dhttp_accepted_open.sub(1);
            driver.changed.notify_one();
        });
    }

    /// A connection that the client opened, to its end: one request after another.
    async fn serve_stream(&self, mut stream: TcpStream, peer: SocketAddr) -> Result<(), StreamError> {
        stream.set_nodelay(true)?;
        let local = stream.local_addr()?.ip().to_canonical();
        let Some(security) = &self.options.security else {
            let (read, write) = stream.split();
            return self.serve_requests(read, write, local, peer, None).await;
        };
        let mut first = [0; TLS_RECORD.len()];
        let mut known = 0;
        // A byte that waits to be read makes the socket readable again at once; the second follows in the same segment.
        while known < first.len() {
            let before = known;
            known = timeout(self.options.head_timeout, stream.peek(&mut first))
                .await
                .map_err(|_| StreamError::Slow)??;
            if known == 0 || first[..known] != TLS_RECORD[..known] || known == before {
                break;
            }
        }
        if first != TLS_RECORD {
            let (read, write) = stream.split();
            return self.serve_requests(read, write, local, peer, None).await;
        }
        self.handle.driver.dhttp_tls_total.add(1);
        let stream = timeout(self.options.head_timeout, security.accept(stream))
            .await
            .map_err(|_| StreamError::Slow)??;
        let (read, write) = tokio::io::split(stream);
        self.serve_requests(read, write, local, peer, Some(security)).await
    }

    /// Answers a request that may be repeated; one of which a sealed copy is being answered has the answer of that.
    async fn respond_or_join(&self, id: GlobalId, call: Request, secured: Option<&Security>) -> Response {
        let Some(handover) = secured.map(Security::handover).filter(|handover| handover.has(&id)) else {
            return self.respond(call).await;
        };
        // What came in a datagram is short, and so is what its copy still has to bring.
        let Some((call, http)) = whole(call).await else { return Response::full(400, &[], b"") };
        let Some(response) = handover.join(&id, &http) else { return self.respond(call).await };
        self.handle.driver.dhttp_joined_total.add(1);
        match timeout(self.options.response_timeout, response).await {
            Ok(Ok(response)) => response,
            // It went by datagram after all, or never came.
            _ => self.respond(call).await,
        }
    }

    async fn serve_requests<R, W>(
        &self,
        read: R,
        mut write: W,
        local: IpAddr,
        peer: SocketAddr,
        secured: Option<&Security>,
    ) -> Result<(), StreamError>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let mut reader = Reader::new(read, self.limits.clone());
        // Who opens a connection has something to ask.
        let mut patience = self.limits.head_timeout;
        let mut ending = self.handle.ending.subscribe();
        loop {
            let request = tokio::select! {
                biased;
                // What has not been asked in full by now is not answered.
                _ = ending.wait_for(|ending| *ending != Ending::NotYet) => return Ok(()),
                request = reader.request_head(self.service.reading(), patience) => request,
            };
            patience = self.limits.idle_timeout;
            let request = match request {
                Ok(request) => request,
                Err(StreamError::Closed) => return Ok(()),
                Err(error) => {
                    self.refuse(&error, &mut write).await?;
                    return Err(error);
                }
            };
            self.handle.driver.dhttp_stream_requests_total.add(1);
            let (body_sender, body) = Body::channel();
            let client = SocketAddr::new(peer.ip().to_canonical(), request.udp_port);
            let arrival = Arrival { client, local: Some(local), server: None };
            let call = Request { arrival, head: request.head, body };
            let respond = self.respond_on(&mut write, request.id, request.once, call, secured);
            // Together, because a service may answer while the body still comes.
            let (body, written) = tokio::join!(reader.body(request.framing, body_sender), respond);
            let ended = written?;
            if ended == Ended::Unanswered || body.is_err() {
                // Part of the body was not wanted or did not come: where the next request starts is not known. What the
                // client still sends is read, because a reset could destroy the response (RFC 9112 §9.6).
                let _ = write.shutdown().await;
                reader.linger().await;
                return Ok(());
            }
        }
    }

    /// Answers a request head that cannot be taken, if it is known which request's it is.
    async fn refuse<W>(&self, error: &StreamError, write: &mut W) -> io::Result<()>
    where
        W: AsyncWrite + Unpin,
    {
        let answer = match error {
            StreamError::RequestHead(id, head) => Some((*id, head.status())),
            StreamError::Wire(wire) => WireError::id(*wire).map(|id| (id, 400)),
            _ => None,
        };
        let Some((id, status)) = answer else { return Ok(()) };
        let http = Response::full(status, &[], b"").http;
        write_message(write, &id.0, http, &self.limits).await
    }

    /// Answers a request on the connection that it came on.
    async fn respond_on<W>(
        &self,
        write: &mut W,
        id: RequestId,
        once: Option<Numbered>,
        call: Request,
        secured: Option<&Security>,
    ) -> io::Result<Ended>
    where
        W: AsyncWrite + Unpin,
    {
        if let Some(keys) = secured.filter(|_| is_for_keys(&call.head)) {
            write_message(write, &id.0, keys.publish().http, &self.limits).await?;
            return Ok(Ended::Answered);
        }
        let response = match once {
            Some(numbered) => self.respond_once(&numbered, call, secured.is_some()).await,
            None => Some(self.respond_or_join((call.arrival.client.ip(), id), call, secured).await),
        };
        let Some(response) = response else { return Ok(Ended::Unanswered) };
        write_message(write, &id.0, response.http, &self.limits).await?;
        Ok(Ended::Answered)
    }
}

/// A request with its body, and the bytes of both; `None` if no datagram could have held it, or it has broken off.
pub(super) async fn whole(call: Request) -> Option<(Request, Bytes)> {
    let Request { arrival, head, body } = call;
    let body = body.collect(DATAGRAM_BYTES.saturating_sub(head.len())).await.ok()?;
    let http = if body.is_empty() { head.clone() } else { [&head[..], &body].concat().into() };
    Some((Request { arrival, head, body: Body::full(body) }, http))
}
