//! The clients of one socket: who is let in.

use std::net::{SocketAddr, UdpSocket};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::{io, mem};

use quinn::{AsyncUdpSocket, Endpoint, EndpointConfig, Incoming, TokioRuntime};
use tidegate_core::hooks::Slow;
use tidegate_core::{NodeId, Verdict};
use tidegate_http::http3::ErrorCode;
use tokio::task::JoinHandle;

use crate::data_core::DataCore;
use crate::http3::connection::{Connection, Ends, canonical, code, serve as serve_connection};
use crate::http3::greetings::Greeting;
use crate::http3::setup::{Quic, TokenSecret};
use crate::http3::sockets::Sockets;
use crate::http3::steering::Ids;

/// Clients of a core that may be in the midst of their handshake before others have to prove their address first.
const GREETING: usize = 64;

/// The clients of one socket.
pub(crate) struct Server {
    endpoint: Endpoint,
    pub(super) sockets: Arc<Sockets>,
    task: JoinHandle<()>,
}

impl Server {
    /// Takes no new clients, and waits a moment for what ends the connections of the others to be sent.
    pub(crate) async fn end(self) {
        self.task.abort();
        self.endpoint.set_server_config(None);
        self.endpoint.wait_idle().await;
    }
}

/// Serves the clients of a socket: that with the number `number` of so many of its address.
pub(crate) fn serve(
    core: &Rc<DataCore>,
    socket: UdpSocket,
    (number, count): (usize, usize),
    token_secret: &TokenSecret,
) -> io::Result<Server> {
    let Some(quic) = core.with_plan(|plan| plan.quic.clone()) else {
        return Err(io::Error::other("there is no certificate"));
    };
    let mut own = EndpointConfig::default();
    own.cid_generator(move || Box::new(Ids::new(number, count)));
    let config = quic.with_tokens(token_secret);
    let sockets = Sockets::new(socket)?;
    let socket = Arc::clone(&sockets) as Arc<dyn AsyncUdpSocket>;
    let endpoint = Endpoint::new_with_abstract_socket(own, Some(config), socket, Arc::new(TokioRuntime))?;
    let task = tokio::task::spawn_local(accept(Rc::clone(core), endpoint.clone(), Arc::clone(&sockets)));
    Ok(Server { endpoint, sockets, task })
}

async fn accept(core: Rc<DataCore>, endpoint: Endpoint, sockets: Arc<Sockets>) {
    let Ok(bound) = endpoint.local_addr() else { return };
    while let Some(incoming) = endpoint.accept().await {
        let ip = incoming.local_ip().unwrap_or(bound.ip());
        core.let_in(incoming, canonical(SocketAddr::new(ip, bound.port())), &sockets);
    }
}

/// One of the connections that there may be.
struct Place(Rc<DataCore>);

impl Place {
    /// `None` if there is none.
    fn of(core: &Rc<DataCore>, peer: SocketAddr) -> Option<Self> {
        core.has_room(peer).then(|| Self(Rc::clone(core)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A client that was met, until it is parted with.
struct Met {
    core: Rc<DataCore>,
    peer: SocketAddr,
    place: Option<NodeId>,
}

impl Met {
    /// `None` if the defence does not let it in.
    fn new(core: &Rc<DataCore>, peer: SocketAddr) -> Option<Self> {
        let place = core.meet_peer(peer).ok()?;
        core.metrics.connections_open.add(1);
        Some(Self { core: Rc::clone(core), peer, place })
    }
}

impl Drop for Met {
    fn drop(&mut self) {
        self.core.part(self.place, self.peer);
        self.core.metrics.connections_open.sub(1);
    }
}

impl DataCore {
    /// Decides on a client's first datagram, whose source may be forged.
    fn let_in(self: &Rc<Self>, incoming: Incoming, local: SocketAddr, sockets: &Arc<Sockets>) {
        let peer = canonical(incoming.remote_address());
        let Some(Quic(config)) = self.with_plan(|plan| plan.quic.clone()) else { return incoming.refuse() };
        if self.ignores(peer.ip()) {
            self.metrics.connections_policed_total.add(1);
            return incoming.ignore();
        }
        if self.is_draining() {
            // What one that goes to another process sends again comes there.
            return if self.http3.has_parted() { incoming.ignore() } else { incoming.refuse() };
        }
        let is_proved = incoming.remote_address_validated();
        let greeting = self.http3.greetings.len();
        // Rules count what clients do, and a handshake is work: both are for those who are where they say they are.
        if !is_proved && (greeting >= GREETING || self.admission().is_some() || self.is_stressed()) {
            self.metrics.quic_retries_total.add(1);
            // A client that has been asked before is not asked again.
            return incoming.retry().unwrap_or_else(|error| error.into_incoming().refuse());
        }
        let ends = Ends { local, peer, sockets: Arc::clone(sockets) };
        let Some(greeting) = Greeting::new(self, &ends, is_proved) else { return incoming.refuse() };
        // Those in the midst of their handshake, who may be nobody, take no place from others; where there is none they need
        // not begin.
        let Some(_) = Place::of(self, peer) else { return incoming.refuse() };
        if let Some(admission) = self.admission().filter(|_| is_proved) {
            match admission.on_connect(peer, local).0 {
                Verdict::Continue => {}
                verdict => {
                    self.connection_policed();
                    return if verdict == Verdict::Drop { incoming.ignore() } else { incoming.refuse() };
                }
            }
        }
        // Who is where it says it is answers for its handshake, too.
        let met = match is_proved.then(|| Met::new(self, peer)) {
            Some(None) => return incoming.refuse(),
            met => met.flatten(),
        };
        let Ok(connecting) = incoming.accept_with(config) else {
            self.metrics.tls_handshakes_failed_total.add(1);
            return;
        };
        let core = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let limit = core.http3.greetings.patience(core.plan().limits.header_timeout);
            let quic = match tokio::time::timeout(limit, connecting).await {
                Ok(Ok(quic)) => quic,
                failed => {
                    core.metrics.tls_handshakes_failed_total.add(1);
                    if let (Err(_), Some(met)) = (failed, met) {
                        core.too_slow(met.place, peer, Slow::Head);
                    }
                    return;
                }
            };
            mem::drop(greeting);
            let Some(_place) = Place::of(&core, peer) else {
                return quic.close(code(ErrorCode::ExcessiveLoad), b"");
            };
            core.metrics.connections_accepted_total.add(1);
            core.metrics.http3_connections_total.add(1);
            let Some(met) = met.or_else(|| Met::new(&core, peer)) else {
                return quic.close(code(ErrorCode::NoError), b"");
            };
            serve_connection(Rc::new(Connection::new(&core, quic, ends, met.place))).await;
        });
    }
}
