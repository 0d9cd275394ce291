//! Connections that a proxy passes on: each begins with a PROXY header that names its client.
//!
//! The header is taken off before the connection is one of the core's clients, so that neither TLS nor HTTP knows of
//! it, and nobody else pays for it. It is looked at until it is whole, and then exactly its bytes are read. Mostly it is
//! here as soon as the connection is; only where it is not, a task waits.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{self, RecvFlags};
use tidegate_core::Verdict;
use tidegate_http::{MOST_PROXY_HEADER_BYTES, ProxyHeaderError, ProxyProgress, parse_proxy_header};
use tokio::io::unix::AsyncFd;

use crate::data_core::admission::{Accepted, Waiting};
use crate::data_core::client::Introduced;
use crate::data_core::{DataCore, Transport, watch};

/// Whom a header names; nobody where the connection is the proxy's own.
struct Named(Option<SocketAddr>);

/// Why a connection has no header.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    Header(#[from] ProxyHeaderError),
    #[error("the connection ended before its PROXY header")]
    Ended,
    #[error("no whole PROXY header in time")]
    TooSlow,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// One of the connections that there may be, until it is dropped.
struct Room(Rc<DataCore>);

impl Drop for Room {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl DataCore {
    /// Takes a connection that has to begin with a header, if it is one of a trusted proxy: anybody else could take any
    /// address by one.
    pub(super) fn introduce(
        self: &Rc<Self>,
        (stream, proxy): (TcpStream, SocketAddr),
        transport: Transport,
        waiting: &mut Waiting,
    ) {
        if !self.with_plan(|plan| plan.is_trusted(proxy.ip().to_canonical())) {
            self.metrics.connections_accepted_total.add(1);
            self.metrics.proxy_senders_refused_total.add(1);
            if self.log_limits.proxies.may_log(self.clock.elapsed_ms()) {
                tracing::warn!(
                    client = %proxy,
                    "a connection is refused: PROXY headers are taken from trusted_proxies alone"
                );
            }
            return;
        }
        // What is on the block list is kept out here too, where packets are not.
        if self.admission().is_some_and(|admission| admission.ignores(proxy.ip())) {
            return self.connection_policed();
        }
        match self.take_header(&stream) {
            Ok(Some(named)) => self.sort(accepted(stream, proxy, &named), transport, waiting),
            Err(fault) => self.no_header(proxy, &fault),
            Ok(None) => {
                if !self.has_room(proxy) {
                    self.metrics.connections_accepted_total.add(1);
                    return;
                }
                let room = Room(Rc::clone(self));
                tokio::task::spawn_local(wait_for_header(room, stream, proxy, transport));
            }
        }
    }

    /// Takes the header off, and nothing else; `None` where it is not whole.
    fn take_header(&self, stream: &TcpStream) -> Result<Option<Named>, Fault> {
        let mut buffer = self.read_buffer.borrow_mut();
        let room = buffer.len().min(MOST_PROXY_HEADER_BYTES);
        let (buffer, _) = buffer.split_at_mut(room);
        let seen = match net::recv(stream, &mut *buffer, RecvFlags::PEEK) {
            Ok((0, _)) => return Err(Fault::Ended),
            Ok((seen, _)) => seen,
            Err(Errno::AGAIN) => return Ok(None),
            Err(error) => return Err(Fault::Io(error.into())),
        };
        let progress = parse_proxy_header(buffer.get(..seen).unwrap_or(&[]))?;
        let ProxyProgress::Complete { length, client } = progress else { return Ok(None) };
        let (header, _) = buffer.split_at_mut(length.min(seen));
        let (taken, _) = net::recv(stream, header, RecvFlags::empty()).map_err(io::Error::from)?;
        // The kernel gives less than it has at urgent data, of which there is none in a header.
        if taken == length { Ok(Some(Named(client))) } else { Err(Fault::Ended) }
    }

    /// Waits for the rest of a header.
    async fn header(&self, stream: &AsyncFd<TcpStream>) -> Result<Named, Fault> {
        loop {
            let mut ready = stream.readable().await?;
            // Told before it is looked at, so that nothing comes after what is seen then.
            let is_all = ready.ready().is_read_closed();
            match self.take_header(stream.get_ref())? {
                Some(named) => return Ok(named),
                None if is_all => return Err(Fault::Ended),
                // Whatever comes is told as a new event, though what was seen is still there (epoll(7), edge-triggered).
                None => ready.clear_ready(),
            }
        }
    }

    /// The connection ends without a header.
    fn no_header(&self, proxy: SocketAddr, fault: &Fault) {
        self.metrics.connections_accepted_total.add(1);
        self.metrics.proxy_headers_refused_total.add(1);
        if self.log_limits.proxies.may_log(self.clock.elapsed_ms()) {
            tracing::warn!(proxy = %proxy, %fault, "a connection is refused");
        }
    }
}

/// Goes on with a connection once its header is whole. Until then it is one of those that there may be, and has as long
/// as a head.
async fn wait_for_header(room: Room, stream: TcpStream, proxy: SocketAddr, transport: Transport) {
    let core = Rc::clone(&room.0);
    let limit = Duration::from_millis(core.times().header_ms);
    let stream = match watch(stream) {
        Ok(stream) => stream,
        Err(error) => return core.no_header(proxy, &error.into()),
    };
    let named = match tokio::time::timeout(limit, core.header(&stream)).await.unwrap_or(Err(Fault::TooSlow)) {
        Ok(named) => named,
        Err(fault) => return core.no_header(proxy, &fault),
    };
    // It is counted as a client's from here on.
    drop(room);
    if !core.with_plan(|plan| plan.is_trusted(proxy.ip().to_canonical())) {
        // A reload has taken it off the list meanwhile.
        core.metrics.connections_accepted_total.add(1);
        return core.metrics.proxy_senders_refused_total.add(1);
    }
    let accepted = accepted(stream.into_inner(), proxy, &named);
    match core.judge(&accepted) {
        Some((verdict, _)) if verdict != Verdict::Continue => core.connection_policed(),
        _ => core.admit(accepted, transport),
    }
}

fn accepted(stream: TcpStream, proxy: SocketAddr, Named(client): &Named) -> Accepted {
    let introduced = if client.is_some() { Introduced::Named } else { Introduced::Unnamed };
    Accepted { stream, peer: client.unwrap_or(proxy), introduced }
}
