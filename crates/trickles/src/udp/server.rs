//! The server's driver: one socket, one core, no memory of clients.

use super::batch::{BatchSocket, Outgoing, Received};
use super::{random_block, wall_clock_ms};
use crate::keys::KeyRing;
use crate::sealed::{Reply, ServerSeal, Unsealed};
use crate::server::{Application, Counters, EventKind, Minisocket, Outer, Server};
use crate::tcp::{PacketSource, TcpSocket};
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Receive buffers of a server.
const RECEIVE_BUFFERS: usize = 16;
/// Requests that wait for the application at once; more are dropped, and their clients ask again.
const MAX_WAITING: usize = 4096;
/// Of them such as open a connection: their clients may not be where they say.
const MAX_WAITING_OPENS: usize = MAX_WAITING / 2;

/// A server on one UDP socket. Several may share an address (SO_REUSEPORT): the kernel leads each client to one of
/// them.
#[derive(Debug)]
pub struct UdpServer<A> {
    socket: BatchSocket,
    server: Server,
    application: A,
    waiting: JoinSet<Waiting>,
    /// Held by those of them that open a connection, and so counts them.
    opens: Arc<()>,
    seal: ServerSeal,
}

/// A request that waits for the application.
#[derive(Debug)]
struct Waiting {
    datagram: Vec<u8>,
    reply: Option<Reply>,
    socket: Minisocket,
    local: Option<IpAddr>,
    since: Instant,
    /// Of one that opens a connection.
    _open: Option<Arc<()>>,
}

/// A UDP socket bound to `address`; with `shared`, others of the same user may bind it too.
///
/// # Errors
/// The address is in use or not this host's.
pub fn bind(address: SocketAddr, shared: bool) -> io::Result<std::net::UdpSocket> {
    use socket2::{Domain, Protocol, Socket, Type};
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if shared {
        socket.set_reuse_port(true)?;
    }
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    socket.bind(&address.into())?;
    Ok(socket.into())
}

impl<A: Application> UdpServer<A> {
    /// Takes over a bound socket; must be called within a tokio runtime.
    ///
    /// # Errors
    /// The socket cannot be set up.
    pub fn new(socket: std::net::UdpSocket, server: Server, application: A) -> io::Result<Self> {
        Self::over(BatchSocket::new(socket)?, server, application)
    }

    /// Takes the segments of the paper's format to `address`, see [`crate::tcp`]; all other TCP stays with the kernel.
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// Privileges or `nft` are missing.
    pub fn with_tcp_format(address: SocketAddr, server: Server, application: A) -> io::Result<Self> {
        Self::over(BatchSocket::Tcp(TcpSocket::bind(address, false)?), server, application)
    }

    /// The same, with segments that `source` takes off an interface before AF_PACKET does.
    ///
    /// # Errors
    /// Privileges or `nft` are missing.
    pub fn with_source(
        address: SocketAddr,
        source: Box<dyn PacketSource>,
        server: Server,
        application: A,
    ) -> io::Result<Self> {
        let mut socket = TcpSocket::bind(address, false)?;
        socket.add_source(source)?;
        Self::over(BatchSocket::Tcp(socket), server, application)
    }

    fn over(socket: BatchSocket, server: Server, application: A) -> io::Result<Self> {
        let seal = ServerSeal::new(&random_block()?, server.config().require_encryption);
        Ok(Self { socket, server, application, waiting: JoinSet::new(), opens: Arc::new(()), seal })
    }

    /// What was done and refused.
    #[must_use]
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(self.server.counters())
    }

    /// Where the server listens.
    ///
    /// # Errors
    /// The system does not say.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Serves until `stop` is ready; takes each key ring that `keys` announces.
    ///
    /// # Errors
    /// The socket failed.
    pub async fn run(
        &mut self,
        mut keys: watch::Receiver<KeyRing>,
        stop: impl Future<Output = ()>,
    ) -> io::Result<()> {
        tokio::pin!(stop);
        let mut received = Received::new(RECEIVE_BUFFERS);
        let mut outgoing = Outgoing::default();
        loop {
            tokio::select! {
                biased;
                () = &mut stop => return Ok(()),
                Ok(()) = keys.changed() => self.server.set_keys(keys.borrow_and_update().clone()),
                ready = self.socket.readable() => {
                    ready?;
                    self.serve(&mut received, &mut outgoing).await;
                }
                Some(ready) = self.waiting.join_next() => {
                    if let Ok(ready) = ready {
                        self.resume(ready, &mut outgoing).await;
                    }
                }
            }
        }
    }

    /// Answers one batch.
    async fn serve(&mut self, received: &mut Received, outgoing: &mut Outgoing) {
        match self.socket.receive(received) {
            Ok(true) => {}
            Ok(false) => return,
            // An ICMP message about an answer: the client is gone, which is no business of a server without state.
            Err(_) => {
                self.server.counters().trickles_socket_errors_total.add(1);
                return;
            }
        }
        let now_ms = wall_clock_ms();
        for (datagram, peer, local) in received.datagrams() {
            self.handle_datagram(datagram, peer, local, now_ms, outgoing);
        }
        let (failures, _) = self.socket.send(outgoing).await;
        self.server.counters().trickles_socket_errors_total.add(failures);
    }

    /// Answers one datagram, or has it wait for the application.
    fn handle_datagram(
        &mut self,
        datagram: &[u8],
        peer: SocketAddr,
        local: Option<IpAddr>,
        now_ms: u64,
        outgoing: &mut Outgoing,
    ) {
        let Self { server, application, seal, .. } = self;
        let unsealed = match seal.open(datagram, server.keys(), server.counters()) {
            Ok(Unsealed::Answer(answer)) => return outgoing.push(&answer, peer, local),
            Ok(unsealed) => unsealed,
            // It is counted where it is found.
            Err(_) => return,
        };
        let mut outer = Outer { received_bytes: datagram.len(), answer_bytes: 0 };
        let (datagram, reply) = match &unsealed {
            Unsealed::Request(inner, reply) => {
                outer.answer_bytes = Reply::overhead_bytes();
                (&inner[..], Some(reply))
            }
            _ => (datagram, None),
        };
        let mut transmit = |packet: &[u8]| match reply {
            Some(reply) => outgoing.push(&seal.seal(reply, packet), peer, local),
            None => outgoing.push(packet, peer, local),
        };
        let (event, mut socket) = match server.receive_within(datagram, outer, peer, now_ms) {
            Ok(Some(accepted)) => accepted,
            Ok(None) => return,
            // It is counted where it is found.
            Err(refusal) => return refusal.notify(&mut transmit),
        };
        let Some(wait) = application.prepare(&event) else {
            return server.answer(&event, socket, application, &mut transmit);
        };
        server.answer_meanwhile(&event, &mut socket, application, &mut transmit);
        let is_open = event.kind == EventKind::Open;
        if !self.may_wait(is_open) {
            return;
        }
        let datagram = datagram.to_vec();
        let reply = match unsealed {
            Unsealed::Request(_, reply) => Some(reply),
            _ => None,
        };
        let open = is_open.then(|| Arc::clone(&self.opens));
        let held = Waiting { datagram, reply, socket, local, since: Instant::now(), _open: open };
        self.waiting.spawn(async move {
            wait.await;
            held
        });
    }

    /// Whether there is room for one more request to wait for the application.
    fn may_wait(&self, is_open: bool) -> bool {
        let has_room = self.waiting.len() < MAX_WAITING
            && !(is_open && Arc::strong_count(&self.opens) > MAX_WAITING_OPENS);
        let counters = self.server.counters();
        match has_room {
            true => counters.trickles_waited_total.add(1),
            false => counters.trickles_overloaded_total.add(1),
        }
        has_room
    }

    /// Answers a request whose wait is over.
    async fn resume(&mut self, ready: Waiting, outgoing: &mut Outgoing) {
        let Waiting { datagram, reply, mut socket, local, since, _open: _ } = ready;
        let peer = socket.peer();
        socket.waited(since.elapsed());
        // A key that was retired meanwhile: the client asks again.
        let Self { server, application, seal, .. } = self;
        let _ = server.resume(&datagram, socket, application, &mut |packet: &[u8]| match &reply {
            Some(reply) => outgoing.push(&seal.seal(reply, packet), peer, local),
            None => outgoing.push(packet, peer, local),
        });
        let (failures, _) = self.socket.send(outgoing).await;
        self.server.counters().trickles_socket_errors_total.add(failures);
    }
}
