//! The client's driver: a task that owns socket and core, and streams that read and write requests.

use super::alarm;
use super::batch::{BatchSocket, Outgoing, Received};
use super::path::{self, Path};
use super::random_block;
use crate::client::{Client, ClientError, Config, Read};
use crate::files::{GONE, NOT_FOUND, PATH_TOO_LONG};
use crate::http::MAX_URL_BYTES;
use crate::sealed::{
    ANSWER_OVERHEAD_BYTES, ClientSeal, Encryption, Incoming, REQUEST_OVERHEAD_BYTES, SealError,
};
use crate::server::RESET_EXPIRED;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

/// Receive buffers of a client.
const RECEIVE_BUFFERS: usize = 4;
/// Times that they are filled before anything is sent.
const RECEIVES: usize = 16;

/// Where and how to connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// Servers that share keys. The first that there is a path to is asked; the next takes its place when it is
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
    #[error("{}", reset_reason(*.0))]
    Reset(u16),
}

fn reset_reason(code: u16) -> String {
    let reason = match code {
        RESET_EXPIRED => {
            "the server lacks the key that the request was answered with before: its keys have changed, or a replica \
             has others".into()
        }
        NOT_FOUND => "there is no such object".into(),
        GONE => "the file changed while it was fetched".into(),
        PATH_TOO_LONG => {
            format!("the URL is too long for a Trickles request: at most {MAX_URL_BYTES} bytes")
        }
        _ => return format!("the server refused the request with code {code}"),
    };
    format!("{reason} (code {code})")
}

impl StreamError {
    /// What a stream's error has as its source.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
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
    /// A server has sent anything.
    answered: bool,
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

pub(super) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl Connection {
    /// Starts a connection; nothing is sent before the first request. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// There is no server in `options`, or a socket for none of them.
    pub fn new(options: &Options) -> io::Result<Self> {
        let Path { socket, turn, datagram_bytes } = path::open(options)?;
        let server = options.servers[turn];
        let datagram_bytes = options.config.datagram_bytes.min(datagram_bytes);
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
            answered: false,
            server,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), work: Notify::new() });
        let driver = Driver {
            socket,
            shared: Arc::clone(&shared),
            servers: options.servers.clone(),
            format: options.format,
            local: options.local,
            turn,
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

    /// Whether any of the servers has answered, were it only with its key.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.handle.shared.lock().answered
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
            return match state.client.refuses_input(self.request) {
                Some(Read::Reset(code)) => Poll::Ready(Err(StreamError::Reset(code).into())),
                Some(_) => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
                None if state.wrong_key => Poll::Ready(Err(StreamError::WrongKey.into())),
                None if state.refused => Poll::Ready(Err(StreamError::Refused.into())),
                None => {
                    state.writers.insert(self.request, cx.waker().clone());
                    Poll::Pending
                }
            };
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

/// What the core waits for.
enum Timer {
    /// Somebody waits for what is lost: on time.
    Retransmission(Instant),
    /// Late by a millisecond or two does no harm.
    Other(Instant),
}

/// Moves datagrams between socket and core.
struct Driver {
    socket: BatchSocket,
    shared: Arc<Shared>,
    servers: Vec<SocketAddr>,
    format: Format,
    local: Option<IpAddr>,
    turn: usize,
    /// Servers passed since the last answer or timeout.
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
                    Some(Timer::Retransmission(at)) => alarm::on_time(at).await,
                    Some(Timer::Other(at)) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                ready = self.socket.readable() => {
                    if let Err(error) = ready.and_then(|()| self.receive(&mut received))
                        && !self.failed(&error)
                    {
                        // The network's for now; the retransmission timer bears with it.
                        tracing::debug!(%error, "receiving from a Trickles server failed");
                    }
                }
                error = self.socket.error() => {
                    error.map(|error| self.failed(&error));
                }
                () = self.shared.work.notified() => {}
                () = alarm => self.shared.lock().client.handle_timeout(now()),
            }
        }
    }

    /// What the core wants to send, and when to wake it.
    fn collect(&mut self, outgoing: &mut Outgoing) -> (Option<Timer>, bool) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        let timeouts = state.client.timeouts();
        if timeouts > self.timeouts {
            self.timeouts = timeouts;
            self.move_on(&mut state);
            // That one only was silent: it is asked again once those after it refuse.
            self.moves = 0;
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
        let retransmission = state.client.rto_at();
        let timer = state.client.poll_timeout().map(|at| match retransmission {
            Some(rto_at) if rto_at == at => Timer::Retransmission(at),
            _ => Timer::Other(at),
        });
        (timer, state.closed)
    }

    /// Takes what has come, before any of it is answered: one request acknowledges a whole batch.
    fn receive(&mut self, received: &mut Received) -> io::Result<()> {
        for _ in 0..RECEIVES {
            if !self.socket.receive(received)? {
                break;
            }
            self.take(received);
            if !received.is_full() {
                break;
            }
        }
        Ok(())
    }

    fn take(&mut self, received: &Received) {
        let mut state = self.shared.lock();
        // Anybody can send something; a server is who is understood.
        let mut is_heard = false;
        for (datagram, _, _) in received.datagrams() {
            let opened;
            let datagram = match self.seal.as_mut().map(|seal| seal.open(datagram)) {
                None => datagram,
                Some(Ok(Incoming::Packet(packet))) => {
                    opened = packet;
                    &opened
                }
                Some(Ok(Incoming::Send(datagram))) => {
                    is_heard = true;
                    state.client.handle_sign_of_life(now());
                    self.waiting = Some(datagram);
                    continue;
                }
                Some(Ok(Incoming::Nothing)) => continue,
                Some(Err(error)) => {
                    // Before an answer only: later, somebody else says so.
                    state.wrong_key |= error == SealError::WrongKey && !state.client.is_established();
                    is_heard |= error == SealError::WrongKey;
                    tracing::trace!(%error, "ignored an envelope");
                    continue;
                }
            };
            // An error is a datagram of an old connection or of a stranger; the core has ignored it.
            match state.client.handle_datagram(datagram, now()) {
                Ok(_) => is_heard = true,
                Err(error) => tracing::trace!(%error, "ignored a datagram"),
            }
        }
        if is_heard {
            self.moves = 0;
            (state.refused, state.answered) = (false, true);
        }
        if state.wrong_key {
            state.wake_all();
        } else {
            state.wake_ready();
        }
    }

    /// Does what an error asks for; whether it asks for anything.
    fn failed(&mut self, error: &io::Error) -> bool {
        if path::is_too_long(error) {
            self.shared.lock().client.handle_datagram_too_long();
            return true;
        }
        if error.kind() == io::ErrorKind::ConnectionRefused {
            self.refused();
            return true;
        }
        path::is_unreachable(error) && self.leave_lost(&mut Arc::clone(&self.shared).lock())
    }

    /// Nothing listens at the server's port.
    fn refused(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        if !self.leave_lost(&mut state) && !state.answered {
            // As TCP does; once any server has answered, one of them is waited for.
            state.refused = true;
            state.wake_all();
        }
    }

    /// The server is gone. Where there is another that has not refused since the last answer or timeout, it is asked at
    /// once: a request sent again costs less than a timeout. Whether there is one.
    fn leave_lost(&mut self, state: &mut State) -> bool {
        let moved = self.moves + 1 < self.servers.len() && self.move_on(state);
        if moved {
            state.client.handle_server_lost(now());
        }
        moved
    }

    /// Turns to the next server that there is a path to; whether there is another.
    fn move_on(&mut self, state: &mut State) -> bool {
        for step in 1..self.servers.len() {
            let turn = (self.turn + step) % self.servers.len();
            let server = self.servers[turn];
            match path::turn(&mut self.socket, server, self.format, self.local) {
                Ok(address_changed) => {
                    (self.turn, self.moves, state.server) = (turn, self.moves + step, server);
                    if address_changed {
                        state.client.handle_address_changed(now());
                    }
                    return true;
                }
                Err(error) => tracing::debug!(%error, %server, "no path to a server"),
            }
        }
        false
    }
}
