//! The client's driver: a task that owns socket and core, and streams that read and write requests.

use super::batch::{BatchSocket, Outgoing, Received};
use super::random_block;
use crate::client::{Client, ClientError, Config, Read};
use crate::sealed::{
    ANSWER_OVERHEAD_BYTES, ClientSeal, Encryption, Incoming, REQUEST_OVERHEAD_BYTES, SealError,
};
use crate::tcp::TcpSocket;
use crate::wire::MIN_DATAGRAM_BYTES;
use rustix::net::sockopt;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

/// Longest packet that is sent, its headers included: what Ethernet carries.
const MOST_MTU: u32 = 1500;
/// Receive buffers of a client.
const RECEIVE_BUFFERS: usize = 4;

/// Where and how to connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// Servers that share keys, all of one address family. The first is asked; the next takes its place when it is
    /// unreachable or does not answer in time.
    pub servers: Vec<SocketAddr>,
    /// Limits and timers.
    pub config: Config,
    /// What packets look like on the way.
    pub format: Format,
    /// The address of this host that is used; the system's choice where there is none.
    pub local: Option<IpAddr>,
    /// Whether packets are encrypted, and for whom; off by default.
    pub encryption: Encryption,
}

impl Options {
    /// UDP to replicas, with the usual limits, from any address.
    #[must_use]
    pub fn to(servers: Vec<SocketAddr>) -> Self {
        Self {
            servers,
            config: Config::default(),
            format: Format::default(),
            local: None,
            encryption: Encryption::Off,
        }
    }
}

/// Bytes of the headers before a datagram: IP, and UDP or TCP with the option that marks a segment.
fn header_bytes(format: Format, is_ipv6: bool) -> u32 {
    let ip = if is_ipv6 { 40 } else { 20 };
    match format {
        Format::Udp => ip + 8,
        Format::Tcp => ip + 24,
    }
}

/// The longest packet in bytes, headers included, that a path or an interface has to carry at least.
#[must_use]
pub fn least_mtu(format: Format, is_ipv6: bool) -> u32 {
    u32::from(MIN_DATAGRAM_BYTES) + header_bytes(format, is_ipv6)
}

/// The way to the server carries no packets as long as the transport needs; the source of an [`io::Error`].
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "packets to {server} have at most {mtu} bytes, and Trickles needs {least}; raise the MTU of the interface"
)]
pub struct TooNarrow {
    /// The server.
    pub server: SocketAddr,
    /// Bytes of the longest packet, headers included.
    pub mtu: u32,
    /// What it has to be.
    pub least: u32,
}

/// What packets look like on the way.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Format {
    /// UDP datagrams; needs no privilege.
    #[default]
    Udp,
    /// The paper's: TCP segments with an experimental option, see [`crate::tcp`].
    Tcp,
}

/// Why a stream failed; the source of its [`io::Error`].
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum StreamError {
    /// The connection cannot go on.
    #[error(transparent)]
    Connection(#[from] ClientError),
    /// The server has another key than the one that was pinned.
    #[error("the server's key is not the pinned one")]
    WrongKey,
    /// Nothing listens at any of the servers' ports, and none has answered before.
    #[error("connection refused")]
    Refused,
    /// The server refused the request with this code.
    #[error("the server refused the request with code {0}")]
    Reset(u16),
}

impl From<StreamError> for io::Error {
    fn from(error: StreamError) -> Self {
        let kind = match error {
            StreamError::Connection(ClientError::Unreachable { .. }) => io::ErrorKind::TimedOut,
            StreamError::Connection(_) => io::ErrorKind::Other,
            StreamError::WrongKey => io::ErrorKind::PermissionDenied,
            StreamError::Refused => io::ErrorKind::ConnectionRefused,
            StreamError::Reset(_) => io::ErrorKind::ConnectionReset,
        };
        io::Error::new(kind, error)
    }
}

/// A connection to a service. Its requests run side by side; dropping it and its streams ends it.
#[derive(Clone, Debug)]
pub struct Connection {
    handle: Arc<Handle>,
}

/// Ends the driver's task with the last of the streams.
#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.client.close();
        state.closed = true;
        self.shared.work.notify_one();
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// There is something to send, or a timer has changed.
    work: Notify,
}

#[derive(Debug)]
struct State {
    client: Client,
    readers: HashMap<u32, Waker>,
    writers: HashMap<u32, Waker>,
    closed: bool,
    refused: bool,
    wrong_key: bool,
    server: SocketAddr,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Wakes the readers for whom something has come, and writers, who look for room.
    fn wake_ready(&mut self) {
        let client = &self.client;
        self.readers.retain(|&request, reader| {
            let ready = client.is_readable(request);
            if ready {
                reader.wake_by_ref();
            }
            !ready
        });
        for (_, writer) in self.writers.drain() {
            writer.wake();
        }
    }

    fn wake_all(&mut self) {
        for (_, waker) in self.readers.drain().chain(self.writers.drain()) {
            waker.wake();
        }
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// A socket for datagrams to `server`, and the longest packet that the way there is known to carry, its headers included.
fn socket_to(server: SocketAddr, format: Format, local: Option<IpAddr>) -> io::Result<(BatchSocket, u32)> {
    let any = match server {
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
    };
    let socket = std::net::UdpSocket::bind((local.unwrap_or(any), 0))?;
    // A connected socket learns from ICMP that its server is gone, and which of our addresses leads there.
    socket.connect(server)?;
    let mtu = match server {
        SocketAddr::V6(_) => sockopt::ipv6_mtu(&socket),
        SocketAddr::V4(_) => sockopt::ip_mtu(&socket),
    };
    // Where the system does not say, losses will.
    let mtu = mtu.unwrap_or(u32::MAX);
    let socket = match format {
        Format::Udp => BatchSocket::new(socket)?,
        Format::Tcp => {
            let local = SocketAddr::new(socket.local_addr()?.ip(), 0);
            BatchSocket::Tcp(TcpSocket::bind(local, true)?)
        }
    };
    Ok((socket, mtu))
}

/// Whether a datagram was longer than what the way to the server carries: told by our own interface, or by ICMP.
fn is_too_long(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error())
}

impl Connection {
    /// Starts a connection; nothing is sent before the first request. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// There is no server in `options`, or no socket to be had.
    pub fn new(options: &Options) -> io::Result<Self> {
        let Some(&server) = options.servers.first() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no server to connect to"));
        };
        let (socket, mtu) = socket_to(server, options.format, options.local)?;
        let headers = header_bytes(options.format, server.is_ipv6());
        let envelope = if options.encryption == Encryption::Off { 0 } else { ANSWER_OVERHEAD_BYTES as u32 };
        let least = least_mtu(options.format, server.is_ipv6()) + envelope;
        if mtu < least {
            return Err(io::Error::new(io::ErrorKind::NetworkUnreachable, TooNarrow { server, mtu, least }));
        }
        let room = u16::try_from(mtu.min(MOST_MTU) - headers).unwrap_or(u16::MAX);
        let datagram_bytes = options.config.datagram_bytes.min(room);
        let mut config = Config { datagram_bytes, ..options.config.clone() };
        let seal = ClientSeal::new(options.encryption, &random_block()?);
        if seal.is_some() {
            config.datagram_bytes = datagram_bytes.saturating_sub(ANSWER_OVERHEAD_BYTES as u16);
            config.padded_bytes = config.padded_bytes.saturating_sub(REQUEST_OVERHEAD_BYTES);
            config.short_datagram_bytes =
                config.short_datagram_bytes.saturating_sub(ANSWER_OVERHEAD_BYTES as u16);
        }
        config.padded_bytes = config.padded_bytes.min(config.datagram_bytes.into());
        let client = Client::new(config, &random_block()?, now());
        let state = State {
            client,
            readers: HashMap::new(),
            writers: HashMap::new(),
            closed: false,
            refused: false,
            wrong_key: false,
            server,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), work: Notify::new() });
        let servers = options.servers.iter().copied().filter(|to| to.is_ipv6() == server.is_ipv6()).collect();
        let driver = Driver {
            socket,
            shared: Arc::clone(&shared),
            servers,
            turn: 0,
            moves: 0,
            timeouts: 0,
            seal,
            waiting: None,
        };
        tokio::spawn(driver.run());
        Ok(Self { handle: Arc::new(Handle { shared }) })
    }

    /// Starts a request whose input is written to the stream, and ended by its shutdown.
    ///
    /// # Errors
    /// The connection has failed, or has too many requests.
    pub fn open(&self) -> Result<RequestStream, StreamError> {
        let request = self.handle.shared.lock().client.start(now())?;
        Ok(RequestStream { handle: Arc::clone(&self.handle), request, ended: false })
    }

    /// Starts a request whose whole input is `input`.
    ///
    /// # Errors
    /// The connection has failed, or has too many requests, or the input is too long.
    pub fn request(&self, input: &[u8]) -> Result<RequestStream, StreamError> {
        let request = self.handle.shared.lock().client.request(input, now())?;
        self.handle.shared.work.notify_one();
        Ok(RequestStream { handle: Arc::clone(&self.handle), request, ended: true })
    }

    /// The server that is asked now.
    #[must_use]
    pub fn server(&self) -> SocketAddr {
        self.handle.shared.lock().server
    }
}

/// One request: input is written to it, output read from it. Dropping it gives the request up.
#[derive(Debug)]
pub struct RequestStream {
    handle: Arc<Handle>,
    request: u32,
    ended: bool,
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        let mut state = self.handle.shared.lock();
        state.client.discard(self.request);
        state.readers.remove(&self.request);
        state.writers.remove(&self.request);
    }
}

impl AsyncRead for RequestStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let shared = &self.handle.shared;
        let mut state = shared.lock();
        match state.client.read(self.request, buf.initialize_unfilled()) {
            Ok(Read::Data(count)) => {
                buf.advance(count);
                // The reader has moved: more may be asked for.
                shared.work.notify_one();
                Poll::Ready(Ok(()))
            }
            Ok(Read::End) => Poll::Ready(Ok(())),
            Ok(Read::Pending) if state.wrong_key => Poll::Ready(Err(StreamError::WrongKey.into())),
            Ok(Read::Pending) if state.refused => Poll::Ready(Err(StreamError::Refused.into())),
            Ok(Read::Pending) => {
                state.readers.insert(self.request, cx.waker().clone());
                Poll::Pending
            }
            Ok(Read::Reset(code)) => Poll::Ready(Err(StreamError::Reset(code).into())),
            Err(error) => Poll::Ready(Err(StreamError::from(error).into())),
        }
    }
}

impl AsyncWrite for RequestStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let shared = &self.handle.shared;
        let mut state = shared.lock();
        if self.ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if let Some(failure) = state.client.failure() {
            return Poll::Ready(Err(StreamError::from(failure).into()));
        }
        let room = state.client.input_room(self.request).min(data.len());
        if room == 0 && !data.is_empty() {
            state.writers.insert(self.request, cx.waker().clone());
            return Poll::Pending;
        }
        let written = state.client.write(self.request, &data[..room], false, now());
        shared.work.notify_one();
        Poll::Ready(written.map(|()| room).map_err(|error| StreamError::from(error).into()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.ended {
            let shared = Arc::clone(&self.handle.shared);
            let result = shared.lock().client.write(self.request, &[], true, now());
            self.ended = true;
            shared.work.notify_one();
            return Poll::Ready(result.map_err(|error| StreamError::from(error).into()));
        }
        Poll::Ready(Ok(()))
    }
}

/// Moves datagrams between socket and core.
struct Driver {
    socket: BatchSocket,
    shared: Arc<Shared>,
    servers: Vec<SocketAddr>,
    turn: usize,
    /// Changes of server since the last answer.
    moves: usize,
    timeouts: u64,
    /// Where packets are encrypted.
    seal: Option<ClientSeal>,
    /// What the server's key was waited for with.
    waiting: Option<Vec<u8>>,
}

impl Driver {
    async fn run(mut self) {
        let mut received = Received::new(RECEIVE_BUFFERS);
        let mut outgoing = Outgoing::default();
        loop {
            let (timer, closed) = self.collect(&mut outgoing);
            if !outgoing.is_empty() {
                let (_, error) = self.socket.send(&mut outgoing).await;
                if error.is_some_and(|error| self.failed(&error)) {
                    continue;
                }
            }
            if closed {
                return;
            }
            let alarm = async {
                match timer {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                ready = self.socket.readable() => match ready.and_then(|()| self.socket.receive(&mut received)) {
                    Ok(true) => self.take(&received),
                    Ok(false) => {}
                    // Other errors are the network's for now; the retransmission timer bears with them.
                    Err(error) if !self.failed(&error) => {
                        tracing::debug!(%error, "receiving from a Trickles server failed");
                    }
                    Err(_) => {}
                },
                error = self.socket.error() => {
                    error.map(|error| self.failed(&error));
                }
                () = self.shared.work.notified() => {}
                () = alarm => self.shared.lock().client.handle_timeout(now()),
            }
        }
    }

    /// What the core wants to send, and when to wake it.
    fn collect(&mut self, outgoing: &mut Outgoing) -> (Option<Instant>, bool) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        let timeouts = state.client.timeouts();
        if timeouts > self.timeouts {
            self.timeouts = timeouts;
            self.move_on(&mut state);
        }
        let to = self.servers[self.turn];
        if let Some(datagram) = self.waiting.take() {
            outgoing.push(&datagram, to, None);
        }
        while let Some(datagram) = state.client.poll_transmit(now()) {
            match &mut self.seal {
                Some(seal) => outgoing.push(&seal.seal(&datagram), to, None),
                None => outgoing.push(&datagram, to, None),
            }
        }
        if state.client.failure().is_some() {
            state.wake_all();
        }
        (state.client.poll_timeout(), state.closed)
    }

    fn take(&mut self, received: &Received) {
        let mut state = self.shared.lock();
        self.moves = 0;
        state.refused = false;
        for (datagram, _, _) in received.datagrams() {
            let opened;
            let datagram = match self.seal.as_mut().map(|seal| seal.open(datagram)) {
                None => datagram,
                Some(Ok(Incoming::Packet(packet))) => {
                    opened = packet;
                    &opened
                }
                Some(Ok(Incoming::Send(datagram))) => {
                    self.waiting = Some(datagram);
                    continue;
                }
                Some(Ok(Incoming::Nothing)) => continue,
                Some(Err(error)) => {
                    // Before an answer only: later, somebody else says so.
                    state.wrong_key |= error == SealError::WrongKey && !state.client.is_established();
                    tracing::trace!(%error, "ignored an envelope");
                    continue;
                }
            };
            // An error is a datagram of an old connection or of a stranger; the core has ignored it.
            if let Err(error) = state.client.handle_datagram(datagram, now()) {
                tracing::trace!(%error, "ignored a datagram");
            }
        }
        if state.wrong_key {
            state.wake_all();
        } else {
            state.wake_ready();
        }
    }

    /// Does what an error asks for; whether it asks for anything.
    fn failed(&mut self, error: &io::Error) -> bool {
        if is_too_long(error) {
            self.shared.lock().client.handle_datagram_too_long();
            return true;
        }
        let refused = error.kind() == io::ErrorKind::ConnectionRefused;
        if refused {
            self.refused();
        }
        refused
    }

    /// Nothing listens at the server's port. Where there is another server it is asked at once: a request sent again
    /// costs less than a timeout.
    fn refused(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        if self.moves + 1 < self.servers.len() {
            self.move_on(&mut state);
            state.client.handle_server_lost(now());
        } else if !state.client.is_established() {
            // As TCP does; once a server has answered, it is waited for.
            state.refused = true;
            state.wake_all();
        }
    }

    fn move_on(&mut self, state: &mut State) {
        if self.servers.len() > 1 {
            self.moves += 1;
            self.turn = (self.turn + 1) % self.servers.len();
            state.server = self.servers[self.turn];
            // Until it succeeds, the system sends there but filters the answers: the next timeout tries another server.
            if let Err(error) = self.socket.turn_to(state.server) {
                tracing::debug!(%error, server = %state.server, "cannot turn to another server");
            }
        }
    }
}
