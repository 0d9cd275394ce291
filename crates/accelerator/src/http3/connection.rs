//! One connection: its streams, and when it ends.

use std::cell::Cell;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use quinn::{ConnectionError, SendStream, VarInt};
use tidegate_core::NodeId;
use tidegate_core::hooks::Slow;
use tidegate_http::Version;
use tidegate_http::http3::{ErrorCode, max_field_section_size, varint, write_goaway, write_settings};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::data_core::DataCore;
use crate::data_core::client::Introduced;
use crate::http3::control::{self, Opened};
use crate::http3::sockets::Sockets;
use crate::http3::stream;
use crate::streams::{Carrier, Debts, End, Shared, Streams, borne};

/// How long a client may take to let us say what concerns the connection.
const MOMENT: Duration = Duration::from_millis(100);
/// How long a connection stays after the announcement of its end, for what the client had sent by then.
const AFTERTHOUGHTS: Duration = Duration::from_millis(100);
/// Frames of streams that a datagram may bring before there is more work in it than content.
const STREAM_FRAMES: u64 = 4;

/// An address of IPv4 as such, also where a socket of IPv6 has it.
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// An error's code as QUIC has it.
pub(super) fn code(error: ErrorCode) -> VarInt {
    VarInt::from_u64(error.code()).unwrap_or(VarInt::MAX)
}

/// Between whom a connection was made.
#[derive(Clone)]
pub(super) struct Ends {
    pub local: SocketAddr,
    pub peer: SocketAddr,
    /// What its datagrams come by.
    pub sockets: Arc<Sockets>,
}

/// A client's connection.
pub(super) struct Connection {
    pub(super) quic: quinn::Connection,
    pub(super) core: Rc<DataCore>,
    /// A client that moves stays the one that it was.
    pub(super) ends: Ends,
    /// That address's place in the prefix tree, if anybody watches.
    pub(super) place: Option<NodeId>,
    pub(super) debts: Debts,
    pub(super) opened: Opened,
    /// Frames of its streams that ask for nothing.
    idle: Cell<u64>,
    /// Requests that it has begun.
    requests: Cell<u64>,
    /// Bytes of content that it has brought.
    content_bytes: Cell<u64>,
    pub(super) is_flood: Cell<bool>,
    /// Where it is among those of its core.
    pub(super) number: Cell<usize>,
    /// The client has broken the protocol.
    has_failed: Cell<bool>,
    /// When it will have been idle for too long, on the core's clock.
    pub(super) deadline_ms: Cell<u64>,
    /// It ends before its deadline, to make room.
    pub(super) is_shed: Cell<bool>,
    began_ms: u64,
    /// Told when one of those has come to pass.
    pub(super) due: Notify,
    /// Told now and then, so that it is looked at how much the client has taken.
    pub(super) look: Notify,
}

impl Connection {
    pub(super) fn new(
        core: &Rc<DataCore>,
        quic: quinn::Connection,
        ends: Ends,
        place: Option<NodeId>,
    ) -> Self {
        Self {
            quic,
            core: Rc::clone(core),
            ends,
            place,
            debts: Debts::default(),
            opened: Opened::default(),
            idle: Cell::new(0),
            requests: Cell::new(0),
            content_bytes: Cell::new(0),
            is_flood: Cell::new(false),
            number: Cell::new(0),
            has_failed: Cell::new(false),
            deadline_ms: Cell::new(u64::MAX),
            is_shed: Cell::new(false),
            began_ms: core.clock.elapsed_ms(),
            due: Notify::new(),
            look: Notify::new(),
        }
    }

    /// The client has broken the protocol, and is told how.
    pub(super) fn fail(&self, error: ErrorCode) {
        tracing::debug!(client = %self.ends.peer, error = error.name(), "HTTP/3 ends");
        self.has_failed.set(true);
        self.quic.close(code(error), b"");
    }

    /// So many frames have come that ask for nothing.
    pub(super) fn idle(&self, frames: u64) {
        self.idle.set(self.idle.get() + frames);
    }

    /// So much of a request's content has come.
    pub(super) fn brought(&self, bytes: usize) {
        self.content_bytes.set(self.content_bytes.get() + bytes as u64);
    }

    /// How far it has come.
    pub(super) fn progress(&self) -> Progress {
        let stats = self.quic.stats();
        Progress {
            heard: stats.udp_rx.datagrams,
            acknowledged: stats.frame_rx.acks,
            frames: stats.frame_tx.stream,
            bytes: stats.udp_tx.bytes.saturating_sub(stats.path.lost_bytes),
        }
    }

    /// Waits until it is to be looked at how much the client has taken.
    pub(super) async fn looked_at(&self) {
        self.look.notified().await;
    }

    /// Whether the client sends little but what asks for nothing, each of which is work.
    pub(super) fn floods(&self) -> bool {
        let stats = self.quic.stats();
        let frames = stats.frame_rx;
        let idle = [
            self.idle.get(),
            // More of them than there was to acknowledge, and content in bytes.
            frames.acks.saturating_sub(stats.udp_tx.datagrams),
            frames.stream.saturating_sub(stats.udp_rx.datagrams * STREAM_FRAMES),
            frames.ping,
            frames.crypto,
            frames.path_challenge,
            frames.path_response,
            frames.new_connection_id,
            frames.retire_connection_id,
            frames.max_data,
            frames.max_stream_data,
            frames.max_streams_bidi,
            frames.max_streams_uni,
            frames.data_blocked,
            frames.stream_data_blocked,
            frames.streams_blocked_bidi,
            frames.streams_blocked_uni,
        ];
        let stayed_ms = self.core.clock.elapsed_ms() - self.began_ms;
        let moved_bytes = stats.udp_tx.bytes + self.content_bytes.get();
        idle.iter().sum::<u64>() > borne(self.requests.get(), moved_bytes, stayed_ms)
    }
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// Datagrams that have come.
    pub heard: u64,
    /// Acknowledgements among what they brought.
    pub acknowledged: u64,
    /// Frames of content that have gone out.
    pub frames: u64,
    /// Bytes that have gone out, but for those that were lost.
    pub bytes: u64,
}

impl Carrier for Connection {
    fn peer(&self) -> SocketAddr {
        self.ends.peer
    }

    fn place(&self) -> Option<NodeId> {
        self.place
    }

    fn introduced(&self) -> Introduced {
        Introduced::No
    }

    fn is_encrypted(&self) -> bool {
        true
    }

    fn debts(&self) -> &Debts {
        &self.debts
    }
}

/// Serves a connection until there is nothing more to say on it.
pub(super) async fn serve(connection: Rc<Connection>) {
    let core = &connection.core;
    core.http3.add(&connection);
    let shared = Rc::new(Shared {
        core: Rc::clone(core),
        carrier: Rc::clone(&connection) as Rc<dyn Carrier>,
        version: Version::Http3,
        local: connection.ends.local,
        streams: Streams::default(),
    });
    let last = run(&connection, &shared).await;
    if connection.has_failed.get() {
        shared.refused();
    }
    connection.quic.close(code(last), b"");
    core.http3.remove(&connection);
}

/// The reason for the end.
async fn run(connection: &Rc<Connection>, shared: &Rc<Shared>) -> ErrorCode {
    let Connection { quic, core, ends: Ends { peer, .. }, place, .. } = &**connection;
    let streams = &shared.streams;
    // A client that leaves no room for this stream, or on it, breaks the protocol (§6.2).
    let Ok(Ok(mut control)) = tokio::time::timeout(MOMENT, quic.open_uni()).await else {
        return ErrorCode::StreamCreationError;
    };
    let mut settings = Vec::new();
    write_settings(core.with_plan(|plan| max_field_section_size(&plan.limits.head)), &mut settings);
    if !say(&mut control, &settings).await {
        return ErrorCode::ClosedCriticalStream;
    }
    let mut stopped = pin!(control.stopped());
    let mut leaving = Leaving::No;
    let mut said = Instant::now();
    // The id of the request after the last one.
    let mut next_request = 0;
    let mut before = None;
    loop {
        match streams.why_end() {
            Some(End::TooSlow) => {
                core.too_slow(*place, *peer, Slow::Reading);
                return ErrorCode::ExcessiveLoad;
            }
            Some(End::Reset) => return ErrorCode::GeneralProtocolError,
            Some(End::Closed) => return ErrorCode::NoError,
            Some(End::LastStreams) if leaving < Leaving::Announced => {
                (leaving, said) = (Leaving::Announced, Instant::now());
                go_away(&mut control, next_request).await;
            }
            _ => {}
        }
        if streams.is_rapid_reset(core.clock.elapsed_ms() - connection.began_ms) || connection.is_flood.get()
        {
            core.metrics.http3_floods_total.add(1);
            let _ = core.answers_malformed(*place, *peer);
            return ErrorCode::ExcessiveLoad;
        }
        // Other streams than requests change nothing of how long it has been idle.
        let now = (streams.open(), streams.begun());
        if before.replace(now) != Some(now) {
            let times = core.times();
            connection.deadline_ms.set(match now {
                (0, 0) => core.deadline(times.header_ms),
                (0, _) => core.deadline(times.keep_alive_ms),
                _ => u64::MAX,
            });
        }
        tokio::select! {
            biased;
            () = connection.due.notified() => {
                if connection.is_shed.get() {
                    return ErrorCode::ExcessiveLoad;
                }
                if core.clock.elapsed_ms() < connection.deadline_ms.get() {
                    continue;
                }
                if streams.begun() == 0 {
                    core.metrics.header_timeouts_total.add(1);
                    core.too_slow(*place, *peer, Slow::Head);
                } else {
                    core.metrics.idle_timeouts_total.add(1);
                }
                return ErrorCode::NoError;
            }
            () = streams.changed() => {}
            // The client learns at once that it is to go elsewhere (§5.2).
            () = core.drained(), if leaving == Leaving::No => {
                (leaving, said) = (Leaving::Soon, Instant::now());
                go_away(&mut control, last_id()).await;
            }
            () = core.drain_is_over() => return ErrorCode::NoError,
            stream = quic.accept_bi() => match stream {
                // Once it is said which requests are the last, others may be made elsewhere (§5.2).
                Ok((mut send, mut receive)) if leaving == Leaving::Announced => {
                    let why = code(ErrorCode::RequestRejected);
                    let _ = (send.reset(why), receive.stop(why));
                }
                Ok((send, receive)) => {
                    next_request = u64::from(send.id()) + 4;
                    connection.requests.set(connection.requests.get() + 1);
                    stream::begin(shared, connection, send, receive);
                }
                Err(error) => return broken(connection, &error),
            },
            // This stream has to stay (§6.2.1); whatever else ends it ends the connection anyway.
            _ = &mut stopped => return ErrorCode::ClosedCriticalStream,
            stream = quic.accept_uni() => match stream {
                Ok(stream) => drop(tokio::task::spawn_local(control::read(Rc::clone(connection), stream))),
                Err(error) => return broken(connection, &error),
            },
            // What was on its way when the client learned of the end is here by now.
            () = sleep_until(said + AFTERTHOUGHTS), if leaving == Leaving::Soon => {
                (leaving, said) = (Leaving::Announced, Instant::now());
                go_away(&mut control, next_request).await;
            }
            () = sleep_until(said + AFTERTHOUGHTS), if leaving == Leaving::Announced && streams.open() == 0 => {
                return ErrorCode::NoError;
            }
        }
    }
}

/// How far a connection's end has been announced.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Leaving {
    No,
    /// Requests that are on their way are still answered.
    Soon,
    /// The client knows which requests are the last.
    Announced,
}

/// No request has this id or a later one (RFC 9000 §2.1).
fn last_id() -> u64 {
    varint::MAX - 3
}

/// Announces that requests from this id on are not answered.
async fn go_away(control: &mut SendStream, id: u64) {
    let mut frame = Vec::new();
    write_goaway(id, &mut frame);
    // Who does not want to hear it finds out by the end.
    say(control, &frame).await;
}

/// Whether there was room for it, which there is at once if at all.
async fn say(control: &mut SendStream, bytes: &[u8]) -> bool {
    matches!(tokio::time::timeout(MOMENT, control.write_all(bytes)).await, Ok(Ok(())))
}

/// The connection has ended by itself.
fn broken(connection: &Connection, error: &ConnectionError) -> ErrorCode {
    if let ConnectionError::TransportError(error) = error {
        tracing::debug!(client = %connection.ends.peer, %error, "QUIC ends");
        connection.has_failed.set(true);
    }
    ErrorCode::NoError
}
