//! Who is let in, and who is served first: the one place where rules about connections and requests act.
//!
//! The rules themselves are another crate's. Where none exists, nothing here runs: a connection is admitted as it is
//! accepted, and a request costs one look at an empty `Option`.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::net::{SocketFlags, acceptfrom_with};
use tidegate_core::Verdict;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use crate::data_core::client::Introduced;
use crate::data_core::{DataCore, Phase, Transport, is_out_of_descriptors};

/// How often a lack of descriptors is logged; it is counted every time.
const WARN_INTERVAL: Duration = Duration::from_secs(10);
/// Pause after a failed accept, so that a lack of descriptors does not become a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Priority classes that are told apart; lower ones wait in the last.
pub(crate) const CLASSES: usize = 8;
/// Accepted connections that wait for their turn, per data core and address: as many as wait in the kernel.
const MAX_WAITING: usize = 4096;
/// Connections that are started before others are looked for.
const STARTED_AT_ONCE: usize = 16;

/// Decides on connections and requests. Never blocks, and answers at once.
pub trait Admission: fmt::Debug + Send + Sync {
    /// Whether there is anything to decide on connections just now.
    fn acts_on_connections(&self) -> bool;

    /// Decides on an accepted connection; with the verdict its priority class, of which 0 is served first.
    fn on_connect(&self, peer: SocketAddr, local: SocketAddr) -> (Verdict, u8);

    /// Whether there are sources of which [`Admission::ignores`] datagrams just now.
    fn ignores_any(&self) -> bool;

    /// Whether this source is on the block list. Its datagrams, which may be forged, are neither answered nor counted
    /// as anybody's; its requests by way of a trusted proxy are refused.
    fn ignores(&self, source: IpAddr) -> bool;

    /// Decides on a request whose head is complete and in its normal form.
    fn on_request(&self, request: &Asked<'_>) -> Verdict;

    /// The priority class of such a request, which counts nothing: of those that wait for an upstream, 0 goes first.
    fn class_of_request(&self, path: &[u8], cookie: Option<&[u8]>) -> u8;
}

/// What a request asks for, as far as rules look at it.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'r> {
    /// The other end of the connection.
    pub peer: SocketAddr,
    /// This end.
    pub local: SocketAddr,
    /// The normalized path, without the query; in lower case where the servers behind do not tell cases apart.
    pub path: &'r [u8],
    /// The path as an application may read it, where that is another one: what is allowed as one may be forbidden as
    /// the other.
    pub reading: Option<&'r [u8]>,
    /// The value of `Cookie`; of several such fields, joined as one would be.
    pub cookie: Option<&'r [u8]>,
}

/// An accepted connection.
pub(super) struct Accepted {
    pub stream: TcpStream,
    /// The client: the other end, or whom a PROXY header names.
    pub peer: SocketAddr,
    /// Whether a header has.
    pub introduced: Introduced,
}

/// Accepted connections by class.
#[derive(Default)]
pub(super) struct Waiting {
    classes: [VecDeque<Accepted>; CLASSES],
    count: usize,
}

impl Waiting {
    /// Adds one; gives back the one that has to go where too many wait: the youngest of the lowest class.
    fn push(&mut self, class: u8, connection: Accepted) -> Option<Accepted> {
        self.classes[usize::from(class).min(CLASSES - 1)].push_back(connection);
        self.count += 1;
        if self.count <= MAX_WAITING {
            return None;
        }
        self.count -= 1;
        self.classes.iter_mut().rev().find_map(VecDeque::pop_back)
    }

    /// Takes the one that is served next: the oldest of the highest class.
    fn pop(&mut self) -> Option<Accepted> {
        let next = self.classes.iter_mut().find_map(VecDeque::pop_front)?;
        self.count -= 1;
        Some(next)
    }
}

impl DataCore {
    /// Accepts on the sockets of one address, strictly from the first that has a connection: one socket per priority
    /// class where the kernel sorts connections, and otherwise one for all, sorted here.
    /// Ends with a drain, by which time those that the kernel had completed are accepted.
    pub(crate) async fn accept(
        self: Rc<Self>,
        listeners: Vec<AsyncFd<TcpListener>>,
        transport: Transport,
        mut phase: watch::Receiver<Phase>,
    ) {
        let mut waiting = Waiting::default();
        let mut warned = None;
        loop {
            let accepted = std::future::poll_fn(|context| match poll_accept(&listeners, context) {
                Poll::Pending if waiting.count > 0 => Poll::Ready(None),
                other => other.map(Some),
            });
            let accepted = tokio::select! {
                accepted = accepted => accepted,
                _ = phase.wait_for(|phase| phase.is_over()) => {
                    return self.accept_last(&listeners, transport, &mut waiting);
                }
            };
            match accepted {
                Some(Ok(accepted)) => self.receive(accepted, transport, &mut waiting),
                // Nobody else waits in the kernel, so that nobody of a higher class can be among them.
                None => {
                    for accepted in std::iter::from_fn(|| waiting.pop()).take(STARTED_AT_ONCE) {
                        self.admit(accepted, transport);
                    }
                    tokio::task::yield_now().await;
                }
                Some(Err(error)) => {
                    self.metrics.accept_errors_total.add(1);
                    if is_out_of_descriptors(&error) {
                        self.with_plan(|plan| plan.roots.iter().for_each(|root| root.close_files()));
                        let shed = self.clients.shed();
                        self.metrics.connections_shed_total.add(shed as u64);
                        if warned.is_none_or(|warned: Instant| warned.elapsed() >= WARN_INTERVAL) {
                            warned = Some(Instant::now());
                            tracing::warn!(%error, shed, "cannot accept: connections without a request are ended to make room");
                        }
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Accepts what the kernel has completed by now: closing the listeners would reset those clients, whose requests
    /// may be here.
    fn accept_last(
        self: &Rc<Self>,
        listeners: &[AsyncFd<TcpListener>],
        transport: Transport,
        waiting: &mut Waiting,
    ) {
        for listener in listeners {
            for _ in 0..MAX_WAITING {
                let Ok(accepted) = accept(listener.get_ref()) else { break };
                self.receive(accepted, transport, waiting);
            }
        }
        std::iter::from_fn(|| waiting.pop()).for_each(|accepted| self.admit(accepted, transport));
    }

    fn receive(
        self: &Rc<Self>,
        (stream, peer): (TcpStream, SocketAddr),
        transport: Transport,
        waiting: &mut Waiting,
    ) {
        if transport.is_proxied {
            return self.introduce((stream, peer), transport, waiting);
        }
        self.sort(Accepted { stream, peer, introduced: Introduced::No }, transport, waiting);
    }

    /// Asks what becomes of a connection, if anybody has something to say about it.
    pub(super) fn sort(self: &Rc<Self>, accepted: Accepted, transport: Transport, waiting: &mut Waiting) {
        match self.judge(&accepted) {
            None => self.admit(accepted, transport),
            Some((Verdict::Continue, class)) => {
                if let Some(shed) = waiting.push(class, accepted) {
                    self.metrics.connections_accepted_total.add(1);
                    self.metrics.connections_crowded_out_total.add(1);
                    drop(shed);
                }
            }
            Some(_) => self.connection_policed(),
        }
    }

    /// What is said about a connection; `None`: nobody has anything to say.
    pub(super) fn judge(&self, accepted: &Accepted) -> Option<(Verdict, u8)> {
        let admission = self.admission()?;
        Some(admission.on_connect(accepted.peer, accepted.stream.local_addr().ok()?))
    }

    /// Whoever decides on connections just now.
    pub(crate) fn admission(&self) -> Option<Arc<dyn Admission>> {
        self.with_plan(|plan| plan.connections.clone()).filter(|admission| admission.acts_on_connections())
    }

    /// Whether what comes from this address is neither answered nor counted.
    pub(crate) fn ignores(&self, address: IpAddr) -> bool {
        self.with_plan(|plan| plan.connections.as_ref().is_some_and(|admission| admission.ignores(address)))
    }

    /// A connection ends that was not admitted.
    pub(crate) fn connection_policed(&self) {
        self.metrics.connections_accepted_total.add(1);
        self.metrics.connections_policed_total.add(1);
    }
}

fn poll_accept(
    listeners: &[AsyncFd<TcpListener>],
    context: &mut Context<'_>,
) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
    for listener in listeners {
        while let Poll::Ready(ready) = listener.poll_read_ready(context) {
            // An error here means that the reactor is gone.
            let Ok(accepted) = ready?.try_io(|listener| accept(listener.get_ref())) else { continue };
            return Poll::Ready(accepted);
        }
    }
    Poll::Pending
}

/// The socket is not watched yet: the first request may be here already, and the only one.
fn accept(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    let (socket, peer) = acceptfrom_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?;
    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
    let peer = peer.ok_or_else(|| io::Error::other("a client without an address"))?;
    Ok((TcpStream::from(socket), peer))
}
