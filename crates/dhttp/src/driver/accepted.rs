//! Connections that clients open: requests that must not be repeated, that are too long for a datagram, or that were
//! told to use TCP.

use std::net::SocketAddr;
use std::rc::Rc;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::spawn_local;

use super::server::{Driver, Ending};
use super::service::{Arrival, Body, Request, Response, Service};
use super::stream::{Reader, StreamError, write_message};
use crate::wire::WireError;

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
        if metrics.dhttp_accepted_open.get() >= self.options.accepted as u64 {
            metrics.dhttp_accepted_refused_total.add(1);
            return;
        }
        metrics.dhttp_accepted_total.add(1);
        metrics.dhttp_accepted_open.add(1);
        let driver = Rc::clone(self);
        spawn_local(async move {
            if let Err(error) = driver.serve_stream(stream, peer).await {
                driver.handle.driver.dhttp_stream_errors_total.add(1);
                tracing::debug!(%error, %peer, "connection of a client ended");
            }
            driver.handle.driver.dhttp_accepted_open.sub(1);
            driver.changed.notify_one();
        });
    }

    /// A connection that the client opened, to its end: one request after another.
    async fn serve_stream(&self, mut stream: TcpStream, peer: SocketAddr) -> Result<(), StreamError> {
        stream.set_nodelay(true)?;
        let local = stream.local_addr()?.ip().to_canonical();
        let (read, mut write) = stream.split();
        let mut reader = Reader::new(read, self.limits.clone());
        let mut ending = self.handle.ending.subscribe();
        loop {
            let request = tokio::select! {
                biased;
                // What has not been asked in full by now is not answered.
                _ = ending.wait_for(|ending| *ending != Ending::NotYet) => return Ok(()),
                request = reader.request_head(self.service.reading()) => request,
            };
            let request = match request {
                Ok(request) => request,
                Err(StreamError::Closed) => return Ok(()),
                Err(error) => {
                    let answer = match &error {
                        StreamError::RequestHead(id, head) => Some((*id, head.status())),
                        StreamError::Wire(wire) => WireError::id(*wire).map(|id| (id, 400)),
                        _ => None,
                    };
                    if let Some((id, status)) = answer {
                        let http = Response::full(status, &[], b"").http;
                        write_message(&mut write, &id.0, http, &self.limits).await?;
                    }
                    return Err(error);
                }
            };
            self.handle.driver.dhttp_stream_requests_total.add(1);
            let (body_sender, body) = Body::channel();
            let client = SocketAddr::new(peer.ip().to_canonical(), request.udp_port);
            let arrival = Arrival { client, local: Some(local), server: None };
            let call = Request { arrival, head: request.head, body };
            let respond = async {
                let Some(response) = self.respond_once(request.once, call).await else {
                    return Ok(Ended::Unanswered);
                };
                write_message(&mut write, &request.id.0, response.http, &self.limits).await?;
                Ok::<_, std::io::Error>(Ended::Answered)
            };
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
}
