//! A server core over tokio's sockets: one UDP socket and one listener on the same port number, one thread.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rand::TryRng;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Notify, oneshot};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::timeout;

use super::carry::Connection;
use super::handle::{Ending, ServerHandle};
use super::handover::Offered;
use super::listener::Listener;
use super::once::Window;
use super::security::Security;
use super::service::{Arrival, Body, Immediate, Request, Response, Room, Service};
use super::stream::StreamLimits;
use super::udp::{BATCH, Outgoing, Receiver, Sender};
use crate::quota::Quota;
use crate::server::{
    ConnectionId, GlobalId, Path, Permit, Received, Route, Server, ServerConfig, Ticket, Transmit, Unsealed,
};

/// How long a full socket may hold up the core before what is to be sent counts as lost.
const SEND_PATIENCE: Duration = Duration::from_millis(5);

/// Most datagrams that are taken from the core before they are sent: the pieces of some responses.
const QUEUED: usize = 8 * BATCH;

/// How long the end of a response of unknown length is waited for, once it has begun.
const GATHER_PATIENCE: Duration = Duration::from_millis(50);

/// Settings of a server's driver.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Settings of the protocol.
    pub protocol: ServerConfig,
    /// The secret of address tokens: the same for all cores, and for all servers of one address.
    pub token_secret: [u8; 16],
    /// Where requests that must not be repeated are known again: the same for all cores. `None`: they are not taken by
    /// UDP, as where several processes, or hosts, are reached at one address.
    pub window: Option<Window>,
    /// What sealed datagrams and connections with TLS need, which are taken beside those in the clear: the same for all
    /// cores. `None`: they are not taken.
    pub security: Option<Security>,
    /// How long the service may take to begin a response; then it is 504.
    pub response_timeout: Duration,
    /// How long a request head may take on a connection that the client opened.
    pub head_timeout: Duration,
    /// How long a client may take nothing of a response, or send nothing of a body.
    pub progress_timeout: Duration,
    /// How long a connection that the client opened is kept between requests.
    pub idle_timeout: Duration,
    /// Slowest average at which a client may send a body or take a response, in bytes per second; 0 turns it off.
    pub min_rate_bytes_per_s: u64,
    /// Most connections that clients opened.
    pub accepted: usize,
    /// Most of them of one client network: an IPv4 address, 64 bits of an IPv6 address.
    pub accepted_per_client: usize,
}

impl ServerOptions {
    /// The defaults, with a random secret.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            protocol: ServerConfig::default(),
            token_secret: random()?,
            window: Some(Window::new()?),
            security: None,
            response_timeout: Duration::from_secs(30),
            head_timeout: Duration::from_secs(10),
            progress_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(15),
            min_rate_bytes_per_s: 500,
            accepted: 10_000,
            accepted_per_client: 1_250,
        })
    }
}

/// A secret for address tokens, to be given to every core.
///
/// # Errors
/// The system has no random numbers.
pub fn random_secret() -> io::Result<[u8; 16]> {
    random()
}

/// Bytes that nobody can guess.
pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    rand::rngs::SysRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// Serves one core's sockets. The future is to run on that core's thread, inside a runtime with I/O and time.
///
/// # Errors
/// The sockets cannot be used with the runtime, or there are no random numbers.
pub fn serve<S: Service>(
    listener: Listener,
    service: S,
    options: ServerOptions,
) -> io::Result<(ServerHandle, impl Future<Output = ()>)> {
    let unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    let mut core =
        Server::new(options.protocol.clone(), options.token_secret, random()?, Instant::now(), unix_s);
    if let Some(window) = &options.window {
        core.share_window(window.shared());
    }
    if let Some(security) = &options.security {
        core.share_keys(security.keys());
    }
    let handle = ServerHandle::new(core.metrics());
    let driver = Rc::new(Driver {
        udp: UdpSocket::from_std(listener.udp)?,
        answers: listener.answers.map(UdpSocket::from_std).transpose()?,
        local: listener.local,
        core: RefCell::new(core),
        service,
        connections: RefCell::default(),
        to_carry: RefCell::default(),
        changed: Notify::new(),
        handle: handle.clone(),
        limits: StreamLimits {
            head_timeout: options.head_timeout,
            progress_timeout: options.progress_timeout,
            idle_timeout: options.idle_timeout,
            min_rate_bytes_per_s: options.min_rate_bytes_per_s,
        },
        scratch: RefCell::default(),
        accepted: Quota::default(),
        options,
    });
    let tcp = listener.tcp.map(TcpListener::from_std).transpose()?;
    Ok((handle, async move { LocalSet::new().run_until(driver.run(tcp)).await }))
}

pub(super) struct Driver<S> {
    udp: UdpSocket,
    /// Whence answers leave, if not from `udp`.
    answers: Option<UdpSocket>,
    pub(super) local: SocketAddr,
    pub(super) core: RefCell<Server>,
    pub(super) service: S,
    /// As many as the protocol core knows.
    pub(super) connections: RefCell<HashMap<ConnectionId, Connection>>,
    /// Responses that connections are to carry, as many as the core knows: each comes when it is made.
    pub(super) to_carry: RefCell<HashMap<GlobalId, oneshot::Receiver<Body>>>,
    /// A task has changed the core: there may be something to send, to close or to wait for.
    pub(super) changed: Notify,
    pub(super) handle: ServerHandle,
    pub(super) options: ServerOptions,
    pub(super) limits: StreamLimits,
    /// Responses that are there already are put together here.
    scratch: RefCell<Vec<u8>>,
    /// The connections that clients opened.
    pub(super) accepted: Quota,
}

/// What is kept of a request while the site works for it.
struct Work {
    permit: Permit,
    /// See [`Server::respond_long`].
    long: bool,
    /// It was sealed.
    offered: Option<Offered>,
}

/// Gives a request up unless it is answered.
struct TicketGuard<S: Service> {
    driver: Rc<Driver<S>>,
    ticket: Option<Ticket>,
    /// See [`Arrival::local`].
    local: Option<IpAddr>,
}

impl<S: Service> Drop for TicketGuard<S> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.driver.core.borrow_mut().abandon(ticket);
        }
    }
}

impl<S: Service> Driver<S> {
    async fn run(self: Rc<Self>, mut tcp: Option<TcpListener>) {
        let mut draining = false;
        let mut receiver = Receiver::new();
        let mut sender = Sender::new();
        let mut ending = self.handle.ending.subscribe();
        loop {
            match *ending.borrow_and_update() {
                Ending::NotYet => {}
                Ending::Drained if !self.is_idle() => {
                    draining = true;
                    tcp = None;
                }
                Ending::Drained | Ending::AtOnce => return,
            }
            let deadline = self.core.borrow().poll_timeout();
            let far = Instant::now() + Duration::from_secs(3600);
            tokio::select! {
                // The sender is in the handle, which lives as long as this.
                _ = ending.changed() => {}
                ready = self.udp.readable(), if !draining => match ready {
                    Ok(()) => self.receive(&mut receiver),
                    Err(error) => tracing::warn!(%error, "cannot wait for datagrams"),
                },
                accepted = accept(tcp.as_ref()) => match accepted {
                    Ok((stream, peer)) => self.accept(stream, peer),
                    Err(error) => {
                        self.handle.driver.dhttp_accept_errors_total.add(1);
                        tracing::debug!(%error, "cannot accept");
                        // Out of descriptors: the backlog stays readable, and asking again at once would spin.
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                },
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(deadline.unwrap_or(far).into()) => {
                    self.core.borrow_mut().handle_timeout(Instant::now());
                }
            }
            self.core.borrow_mut().set_stressed(self.handle.is_stressed());
            self.flush(&mut sender).await;
        }
    }

    /// Whether everything that has been asked is answered.
    fn is_idle(&self) -> bool {
        self.core.borrow().is_idle() && self.handle.driver.dhttp_accepted_open.get() == 0
    }

    /// Takes what has come, a few batches at most, so that other tasks get their turn.
    fn receive(self: &Rc<Self>, receiver: &mut Receiver) {
        let reading = self.service.reading();
        self.core.borrow_mut().set_reading(reading.personality, reading.limits);
        let blocks = self.service.blocks();
        let now = Instant::now();
        for _ in 0..4 {
            match receiver.receive(&self.udp) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Such as an ICMP message about something that was sent.
                Err(error) => return tracing::debug!(%error, "cannot receive"),
            }
            self.handle.driver.dhttp_datagrams_received_total.add(receiver.len() as u64);
            self.count_overflow(receiver.overflowed());
            for index in 0..receiver.len() {
                let (arrival, datagram) = receiver.datagram(index);
                if blocks && self.service.is_blocked(arrival.client.ip().to_canonical()) {
                    self.handle.driver.dhttp_datagrams_blocked_total.add(1);
                    continue;
                }
                self.handle_datagram(arrival, datagram, now);
            }
            if receiver.len() < BATCH {
                return;
            }
        }
    }

    /// The kernel counts in 32 bits from the socket's start.
    fn count_overflow(&self, overflowed: u32) {
        let counted = &self.handle.driver.dhttp_datagrams_overflowed_total;
        counted.add(overflowed.wrapping_sub(counted.get() as u32).into());
    }

    fn handle_datagram(self: &Rc<Self>, arrival: Arrival, datagram: &[u8], now: Instant) {
        let mut core = self.core.borrow_mut();
        let path = Path { client: arrival.client, local: arrival.local };
        let opened;
        let datagram = match core.unseal(path, datagram, now) {
            Unsealed::Plain => datagram,
            Unsealed::Opened(datagram) => {
                opened = datagram;
                opened.as_slice()
            }
            Unsealed::Done => return,
        };
        let received = core.handle_datagram(path, datagram, now);
        drop(core);
        match received {
            Received::Request { ticket, http, head_bytes } => {
                self.handle_request(arrival, ticket, http, head_bytes, now);
            }
            Received::Executed { ticket, response } => self.repeat(ticket, response, arrival.local, now),
            Received::Done => {}
        }
    }

    /// Answers a request at once if the service can, and otherwise has it work for an answer.
    fn handle_request(
        self: &Rc<Self>,
        arrival: Arrival,
        mut ticket: Ticket,
        http: &[u8],
        head_bytes: usize,
        now: Instant,
    ) {
        let core = self.core.borrow();
        // What came of a request that must not be repeated is kept before it is sent.
        let once = core.numbered(&ticket).is_some();
        let mut long = core.must_use_connection(&ticket) && !once;
        drop(core);
        if !once && !long && http.len() == head_bytes {
            match self.answer_at_once(&arrival, ticket, http, now) {
                Some(unanswered) => (ticket, long) = unanswered,
                None => return,
            }
        }
        let mut core = self.core.borrow_mut();
        // One that must not be repeated has a proved address.
        if !once && !core.is_proved(&ticket) {
            // A forged address must not cost the site work. Who is real has a token one round trip later, and keeps it;
            // who does not know tokens comes by TCP.
            core.respond_long(ticket, now);
            return;
        }
        let sealed = core.is_sealed(&ticket);
        let Some((ticket, permit)) = core.begin(ticket) else { return };
        drop(core);
        let http = Bytes::copy_from_slice(http);
        // One that must not be repeated is known by its number.
        let offered = self.options.security.as_ref().filter(|_| sealed && !once && !long);
        let offered =
            offered.and_then(|security| security.handover().offer(ticket.global_id(), http.clone()));
        let request =
            Request { arrival, head: http.slice(..head_bytes), body: Body::full(http.slice(head_bytes..)) };
        let guard = TicketGuard { driver: Rc::clone(self), ticket: Some(ticket), local: arrival.local };
        let answer = Rc::clone(self).answer(guard, request, Work { permit, long, offered });
        let mut answer: Pin<Box<dyn Future<Output = ()>>> = Box::pin(answer);
        // A response that is there already needs no task.
        if answer.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            spawn_local(answer);
        }
    }

    /// Answers a request with a response that is there already. Where there is none, gives the ticket back, and says
    /// whether the response will be too long for datagrams.
    fn answer_at_once(
        self: &Rc<Self>,
        arrival: &Arrival,
        ticket: Ticket,
        http: &[u8],
        now: Instant,
    ) -> Option<(Ticket, bool)> {
        let mut core = self.core.borrow_mut();
        let mut response = self.scratch.borrow_mut();
        response.clear();
        let room = Room {
            most_bytes: core.room_bytes(&ticket),
            connection: core.may_connect(&ticket),
            proved: core.is_proved(&ticket),
        };
        let id = ticket.global_id();
        let head = core.request_head(http);
        match self.service.respond_now(arrival, &head, room, &mut response) {
            Immediate::Written => {
                let route = core.respond(ticket, &response, now);
                drop(core);
                if matches!(route, Route::Connection(_))
                    && let Some(job) = self.follow(route, id, arrival.local)
                {
                    let _ = job.send(Body::full(Bytes::copy_from_slice(&response)));
                }
                None
            }
            Immediate::Long(response) => {
                let route = core.respond_long(ticket, now);
                drop(core);
                if let Some(job) = self.follow(route, id, arrival.local) {
                    let _ = job.send(response.http);
                }
                None
            }
            Immediate::TooLong => Some((ticket, true)),
            Immediate::Unknown => Some((ticket, false)),
        }
    }

    async fn answer(self: Rc<Self>, mut guard: TicketGuard<S>, request: Request, work: Work) {
        let Work { permit, long, mut offered } = work;
        let Some(id) = guard.ticket.as_ref().map(Ticket::global_id) else { return };
        if long {
            // Set up while the response is made (DHTTP §III).
            if let Some(job) = self.route_long(&mut guard, id) {
                let Response { mut http, .. } = self.respond(request).await;
                http.keep(permit);
                // The connection has broken: the core has told the client.
                let _ = job.send(http);
            }
            return;
        }
        let Response { total_bytes, mut http } = self.respond(request).await;
        http.keep(permit);
        if let Some(joined) = offered.as_mut().and_then(Offered::joined) {
            // Its client waits on a connection, and no longer for a datagram.
            let _ = joined.send(Response { total_bytes, http });
            return;
        }
        let threshold = guard.ticket.as_ref().map_or(0, |ticket| self.gathered_bytes(ticket));
        if total_bytes.is_some_and(|bytes| bytes > threshold as u64) {
            match self.route_long(&mut guard, id) {
                Some(job) => drop(job.send(http)),
                None => hand_over(offered, Response { total_bytes, http }).await,
            }
            return;
        }
        let gathered = gather(&mut http, threshold).await.unwrap_or_else(|_| {
            self.handle.driver.dhttp_responses_aborted_total.add(1);
            // Nothing of it has been sent yet.
            Gathered::Whole(Response::full(502, &[], b"").into_bytes())
        });
        match gathered {
            Gathered::Whole(whole) => {
                if let Some(joined) = offered.as_mut().and_then(Offered::joined) {
                    let _ = joined.send(Response { total_bytes, http: Body::full(whole) });
                    return;
                }
                let Some(ticket) = guard.ticket.take() else { return };
                let route = self.core.borrow_mut().respond(ticket, &whole, Instant::now());
                self.executed();
                if let Some(job) = self.follow(route, id, guard.local) {
                    let _ = job.send(Body::full(whole));
                } else if route == Route::UseTcp {
                    hand_over(offered, Response { total_bytes, http: Body::full(whole) }).await;
                }
            }
            Gathered::TooLong(start) => {
                http.unread(start);
                match self.route_long(&mut guard, id) {
                    Some(job) => drop(job.send(http)),
                    None => hand_over(offered, Response { total_bytes, http }).await,
                }
            }
        }
    }

    pub(super) async fn respond(&self, request: Request) -> Response {
        match timeout(self.options.response_timeout, self.service.call(request)).await {
            Ok(response) => response,
            Err(_) => {
                self.handle.driver.dhttp_response_timeouts_total.add(1);
                Response::full(504, &[], b"")
            }
        }
    }

    /// Has a connection for a long response, and begins to open it if there is none.
    fn route_long(
        self: &Rc<Self>,
        guard: &mut TicketGuard<S>,
        id: GlobalId,
    ) -> Option<oneshot::Sender<Body>> {
        let ticket = guard.ticket.take()?;
        let route = self.core.borrow_mut().respond_long(ticket, Instant::now());
        self.executed();
        self.follow(route, id, guard.local)
    }

    /// Sends and closes what the core wants sent and closed.
    async fn flush(&self, sender: &mut Sender) {
        self.give_up();
        loop {
            let mut batch: Vec<Transmit> = Vec::new();
            {
                let mut core = self.core.borrow_mut();
                while batch.len() < QUEUED
                    && let Some(transmit) = core.poll_transmit()
                {
                    batch.push(transmit);
                }
            }
            if batch.is_empty() {
                break;
            }
            self.send(sender, &batch).await;
        }
        loop {
            let Some(connection) = self.core.borrow_mut().poll_close() else { break };
            if let Some(connection) = self.connections.borrow_mut().remove(&connection) {
                connection.task.abort();
            }
        }
    }

    /// An IPv4 client's address as a socket for both families takes it.
    fn on_socket(&self, to: SocketAddr) -> SocketAddr {
        match to {
            SocketAddr::V4(v4) if self.local.is_ipv6() => {
                SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
            }
            to => to,
        }
    }

    async fn send(&self, sender: &mut Sender, mut batch: &[Transmit]) {
        let metrics = &self.handle.driver;
        let socket = self.answers.as_ref().unwrap_or(&self.udp);
        while let Some(first) = batch.first() {
            let together = batch.iter().take_while(|transmit| transmit.from == first.from);
            let datagrams: Vec<Outgoing<'_>> =
                together.map(|to| (self.on_socket(to.to), to.payload.as_slice())).collect();
            let from = first.from.map(|from| self.on_socket(SocketAddr::new(from, 0)).ip());
            match sender.send(socket, from, &datagrams) {
                Ok(sent) => {
                    metrics.dhttp_datagrams_sent_total.add(sent as u64);
                    batch = &batch[sent..];
                }
                Err(_) => {
                    if timeout(SEND_PATIENCE, socket.writable()).await.is_err() {
                        metrics.dhttp_datagrams_unsent_total.add(batch.len() as u64);
                        return;
                    }
                }
            }
        }
    }
}

/// The client has been told to use TCP, or to prove its address: keeps the response to what was sealed until it does.
async fn hand_over(offered: Option<Offered>, response: Response) {
    if let Some(offered) = offered {
        offered.hand_over(response).await;
    }
}

/// The next connection; never one if there is no listener.
async fn accept(listener: Option<&TcpListener>) -> io::Result<(TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

/// What was gathered of a response that may be short.
pub(super) enum Gathered {
    Whole(Bytes),
    TooLong(Bytes),
}

/// Waits a little for the end of a response that may be short. One that is made bit by bit counts as long.
pub(super) async fn gather(http: &mut Body, most_bytes: usize) -> Result<Gathered, super::service::Aborted> {
    let end = tokio::time::Instant::now() + GATHER_PATIENCE;
    let mut whole = Bytes::new();
    loop {
        let Ok(next) = tokio::time::timeout_at(end, http.next()).await else {
            return Ok(Gathered::TooLong(whole));
        };
        let Some(piece) = next else { return Ok(Gathered::Whole(whole)) };
        let piece = piece?;
        whole = if whole.is_empty() { piece } else { [whole, piece].concat().into() };
        if whole.len() > most_bytes {
            return Ok(Gathered::TooLong(whole));
        }
    }
}
