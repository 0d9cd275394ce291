//! Requests of the process's own transports: they pass cache, routes, upstreams, rules, limits, counters and log as if they
//! had come from a client.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tidegate_dhttp::driver::{Arrival, Body, Request};
use tokio::sync::{mpsc, oneshot};

/// Requests that wait for a core; more are refused.
const WAITING: usize = 1024;

/// A request on its way to a core.
pub(crate) struct InnerRequest {
    pub request: Request,
    pub local: SocketAddr,
    pub answer: oneshot::Sender<Body>,
}

/// Asks the data cores, each in its turn; the default has none.
#[derive(Clone, Debug, Default)]
pub struct Inside {
    cores: Arc<[mpsc::Sender<InnerRequest>]>,
    turn: Arc<AtomicUsize>,
}

/// The cores have too much to do, or have ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("no core takes the request")]
pub struct Unavailable;

impl Inside {
    /// For so many cores, and what each of them receives from.
    pub(crate) fn new(cores: usize) -> (Self, Vec<mpsc::Receiver<InnerRequest>>) {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..cores).map(|_| mpsc::channel(WAITING)).unzip();
        (Self { cores: senders.into(), turn: Arc::default() }, receivers)
    }

    /// The response to a request of `client`, which came to `local`: head and body as an HTTP/1.1 client would read them.
    /// `head` is a well-formed request head with its final empty line.
    ///
    /// # Errors
    /// There is no core to answer.
    pub async fn ask(
        &self,
        head: Bytes,
        body: Bytes,
        client: SocketAddr,
        local: SocketAddr,
    ) -> Result<Body, Unavailable> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let core = self.cores.get(turn % self.cores.len().max(1)).ok_or(Unavailable)?;
        let (answer, answered) = oneshot::channel();
        let arrival = Arrival { client, local: None, server: None };
        let request = Request { arrival, head, body: Body::full(body) };
        core.try_send(InnerRequest { request, local, answer }).map_err(|_| Unavailable)?;
        answered.await.map_err(|_| Unavailable)
    }
}
