//! The server's half: a function from a request, the time and the keys to an event for the application, and from the
//! application's answer to packets. Nothing about the connection stays behind but fingerprints of what was answered.

mod event;
mod extract;
mod minisocket;
mod soft_state;
mod verify;

pub use event::{Application, Event, EventInput, EventKind, EventWant, Wait};
pub use extract::{EXTRACT_BYTES, ExtractError, extract, install};
pub use minisocket::{Minisocket, NoRoom, RESET_EXPIRED};

use crate::client::LARGEST_DATAGRAM_BYTES;
use crate::congestion::AccountError;
use crate::continuation::{Continuation, UnknownFormat};
use crate::keys::KeyRing;
use crate::nonce::Secret;
use crate::replay::ReplayTable;
use crate::user::{Kind, UserContinuation, UserError, split_sequence};
use crate::wire::{
    self, Answer, Ask, DELTA_HEAD_BYTES, RESPONSE_HEAD_BYTES, RefusalCode, Request, WireError,
};
use soft_state::SoftState;
use std::net::SocketAddr;
use std::sync::Arc;

/// Limits of a server. Replicas that share keys must agree on all but `replay_entries`.
#[derive(Clone, Debug)]
pub struct Config {
    /// Largest datagram in bytes that is sent, headers of UDP and IP not counted.
    pub datagram_bytes: u16,
    /// Packets of the first flight to a client whose address is proved, at most 64 (RFC 6928 proposes 10).
    pub initial_window: u16,
    /// Age in milliseconds from which a continuation is refused.
    pub horizon_ms: u32,
    /// How far, in milliseconds, the clocks of replicas may be apart.
    pub clock_skew_ms: u32,
    /// Answers that are remembered in each half of the horizon, at 40 bytes for both.
    pub replay_entries: usize,
    /// Connections, and as many user continuations, that are remembered to save work (Trickles §5.1); 0 for none.
    /// Nothing but time is lost with them.
    pub cache_entries: usize,
    /// Whether clients that ask for CUBIC have it.
    pub cubic: bool,
    /// Whether datagrams in the clear are refused, see [`crate::sealed`].
    pub require_encryption: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            datagram_bytes: LARGEST_DATAGRAM_BYTES,
            initial_window: 10,
            horizon_ms: 60_000,
            clock_skew_ms: 5_000,
            replay_entries: 1 << 17,
            cache_entries: 0,
            cubic: true,
            require_encryption: false,
        }
    }
}

tidegate_core::metric_set! {
    /// What a server did.
    pub struct Counters {
        Counter trickles_opens_total: "Connections opened.",
        Counter trickles_requests_total: "Requests that were answered, timeouts included.",
        Counter trickles_timeouts_total: "Timeout requests that were answered.",
        Counter trickles_recoveries_total: "Requests answered within a fast recovery.",
        Counter trickles_terminated_total: "Requests whose trickle ended to shrink the window.",
        Counter trickles_packets_sent_total: "Response packets.",
        Counter trickles_malformed_total: "Datagrams refused because they were malformed.",
        Counter trickles_too_small_total: "Opens refused because an answer would be larger than they were.",
        Counter trickles_unknown_epoch_total: "Requests refused because their key epoch is not accepted.",
        Counter trickles_forged_total: "Requests refused because a continuation's MAC was wrong.",
        Counter trickles_stale_total: "Requests refused because their continuation was too old.",
        Counter trickles_bad_account_total: "Requests refused because their account of packets was impossible.",
        Counter trickles_unproved_total: "Requests refused because the nonces did not prove the account.",
        Counter trickles_replayed_total: "Requests refused because they were answered already.",
        Counter trickles_waited_total: "Requests whose answer waited for the application.",
        Counter trickles_overloaded_total: "Requests dropped because too many waited for the application.",
        Counter trickles_cache_hits_total: "Secrets and user continuations found in the soft-state cache.",
        Counter trickles_cache_misses_total:
            "Secrets and user continuations that had to be computed although the cache is on.",
        Counter trickles_sealed_total: "Encrypted requests that were opened.",
        Counter trickles_seal_forged_total:
            "Encrypted requests refused because they were forged, or for another server.",
        Counter trickles_plaintext_refused_total: "Requests refused because they were not encrypted.",
        Counter trickles_keys_told_total: "Clients told the server's key for encryption.",
        Counter trickles_sessions_expired_total: "Clients told that the key epoch of their encryption is gone.",
        Counter trickles_socket_errors_total: "Sends and receives that the system refused.",
    }
}

/// Why a datagram is not answered as asked; always the sender's fault, or the network's that repeated it.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// Not a request.
    #[error("malformed request: {0}")]
    Wire(#[from] WireError),
    /// Not a continuation of this version.
    #[error("malformed continuation: {0}")]
    Format(#[from] UnknownFormat),
    /// The smallest answer would amplify an unproved address's datagram.
    #[error("open request smaller than its answer")]
    TooSmall,
    /// The key epoch of the transport continuation is not accepted.
    #[error("transport continuation of key epoch {epoch}, which is not accepted")]
    UnknownEpoch {
        /// The epoch.
        epoch: u8,
        /// The connection, to tell its client.
        connection: u64,
    },
    /// Wrong MAC: forged, or the client's address changed.
    #[error("transport continuation with a wrong MAC")]
    Forged {
        /// The connection, to tell its client; `None` where another was told just now.
        connection: Option<u64>,
    },
    /// Older than the horizon, or than what the replay table remembers.
    #[error("transport continuation too old")]
    Stale {
        /// The connection, to tell its client.
        connection: u64,
    },
    /// The account is impossible.
    #[error("impossible account: {0}")]
    Account(#[from] AccountError),
    /// The nonces do not add up: a loss is hidden.
    #[error("account not proved by its nonces")]
    Unproved,
    /// Answered already.
    #[error("replayed request")]
    Replayed,
    /// A user continuation is malformed or forged.
    #[error("{0}")]
    User(#[from] UserError),
}

impl Refusal {
    /// What the client is told, with the connection id. Most refusals are silent: there is no telling whose they are.
    #[must_use]
    pub fn answer(&self) -> Option<(u64, RefusalCode)> {
        match *self {
            Self::UnknownEpoch { connection, .. } => Some((connection, RefusalCode::UnknownEpoch)),
            Self::Stale { connection } => Some((connection, RefusalCode::Stale)),
            Self::Forged { connection } => {
                connection.map(|connection| (connection, RefusalCode::OtherAddress))
            }
            _ => None,
        }
    }

    /// Passes the notice for the client to `transmit`, where there is one.
    pub(crate) fn notify(&self, transmit: &mut impl FnMut(&[u8])) {
        if let Some((connection, code)) = self.answer() {
            let mut notice = Vec::new();
            Answer::encode_refused(connection, code, &mut notice);
            transmit(&notice);
        }
    }

    fn count(&self, counters: &Counters) {
        let counter = match self {
            Self::Wire(_) | Self::Format(_) | Self::User(UserError::Malformed) => {
                &counters.trickles_malformed_total
            }
            Self::TooSmall => &counters.trickles_too_small_total,
            Self::UnknownEpoch { .. } | Self::User(UserError::UnknownEpoch { .. }) => {
                &counters.trickles_unknown_epoch_total
            }
            Self::Forged { .. } | Self::User(UserError::Forged) => &counters.trickles_forged_total,
            Self::Stale { .. } => &counters.trickles_stale_total,
            Self::Account(_) => &counters.trickles_bad_account_total,
            Self::Unproved => &counters.trickles_unproved_total,
            Self::Replayed => &counters.trickles_replayed_total,
        };
        counter.add(1);
    }
}

/// What a datagram travelled in; an unproved address is answered by the measure of what it really sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Outer {
    /// Bytes received.
    pub received_bytes: usize,
    /// Bytes that an envelope adds to each packet of the answer.
    pub answer_bytes: usize,
}

/// A Trickles server without sockets and clock. Its only state is keys, counters, the replay table and when
/// a change of address was last told.
#[derive(Debug)]
pub struct Server {
    config: Config,
    keys: Arc<KeyRing>,
    replay: ReplayTable,
    soft: SoftState,
    /// When a client was last told that its address has changed.
    address_told_ms: u64,
    counters: Arc<Counters>,
}

impl Server {
    /// A server that signs with `keys`; `now_ms` is the wall clock, roughly the same on all replicas.
    #[must_use]
    pub fn new(config: Config, keys: KeyRing, now_ms: u64) -> Self {
        let replay = ReplayTable::new(config.replay_entries, config.horizon_ms.into(), now_ms);
        let soft = SoftState::new(config.cache_entries);
        let keys = Arc::new(keys);
        Self { config, keys, replay, soft, address_told_ms: 0, counters: Arc::default() }
    }

    /// What was done and refused.
    #[must_use]
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// The limits in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The key ring in force.
    #[must_use]
    pub fn keys(&self) -> &KeyRing {
        &self.keys
    }

    /// Takes another key ring: after a rotation.
    pub fn set_keys(&mut self, keys: KeyRing) {
        self.keys = Arc::new(keys);
        self.drop_soft_state();
    }

    /// Forgets all that is remembered only to save work; may be done at any time.
    pub fn drop_soft_state(&mut self) {
        self.soft.clear();
    }

    /// Handles one datagram with `application` and passes each packet of the answer to `transmit`; all of them go to
    /// `peer`.
    pub fn handle(
        &mut self,
        datagram: &[u8],
        peer: SocketAddr,
        now_ms: u64,
        application: &mut impl Application,
        transmit: &mut impl FnMut(&[u8]),
    ) -> Result<(), Refusal> {
        match self.receive(datagram, peer, now_ms) {
            Ok(Some((event, socket))) => {
                self.answer(&event, socket, application, transmit);
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(refusal) => {
                refusal.notify(transmit);
                Err(refusal)
            }
        }
    }

    /// Has `application` fill the packets that a verified event sets free, and passes them to `transmit`.
    pub fn answer(
        &self,
        event: &Event<'_>,
        mut socket: Minisocket,
        application: &mut impl Application,
        transmit: &mut impl FnMut(&[u8]),
    ) {
        application.handle(event, &mut socket);
        self.counters.trickles_packets_sent_total.add(socket.packets() as u64);
        socket.finish(transmit);
    }

    /// Answers, where what its inputs need has to be waited for, the rest of an event at once. Packets that wait would
    /// look lost, and what the client has asked for beside would wait with them. [`Server::resume`] sends the same
    /// packets again, with what answers the inputs. An open is not answered twice: its address has proved nothing.
    pub fn answer_meanwhile(
        &self,
        event: &Event<'_>,
        socket: &mut Minisocket,
        application: &mut impl Application,
        transmit: &mut impl FnMut(&[u8]),
    ) {
        if event.kind == EventKind::Request && !event.inputs.is_empty() {
            let rest = Event { inputs: Vec::new(), ..event.clone() };
            let mut now = socket.clone();
            application.handle(&rest, &mut now);
            event.inputs.iter().for_each(|input| now.say_waits(input.request));
            self.counters.trickles_packets_sent_total.add(now.packets() as u64);
            now.finish(transmit);
            socket.repeat();
        }
    }

    /// Answers a datagram that [`Server::receive`] has verified, whose event waited meanwhile; [`Minisocket::waited`]
    /// says before for how long.
    ///
    /// # Errors
    /// A user continuation's key has been retired in the meantime.
    pub fn resume(
        &mut self,
        datagram: &[u8],
        socket: Minisocket,
        application: &mut impl Application,
        transmit: &mut impl FnMut(&[u8]),
    ) -> Result<(), Refusal> {
        let request = Request::decode(datagram)?;
        let peer = socket.peer();
        let repeats = socket.repeats;
        let (mut event, mut socket) = self.event(kind_of(&request.ask), &request, peer, socket)?;
        if repeats {
            event.wants.clear();
            socket.wants = 0;
        }
        self.answer(&event, socket, application, transmit);
        Ok(())
    }

    /// Verifies one datagram. `None` where the trickle ends with it.
    pub fn receive<'d>(
        &mut self,
        datagram: &'d [u8],
        peer: SocketAddr,
        now_ms: u64,
    ) -> Result<Option<(Event<'d>, Minisocket)>, Refusal> {
        let outer = Outer { received_bytes: datagram.len(), answer_bytes: 0 };
        self.receive_within(datagram, outer, peer, now_ms)
    }

    /// Verifies one datagram that travelled within another.
    pub fn receive_within<'d>(
        &mut self,
        datagram: &'d [u8],
        outer: Outer,
        peer: SocketAddr,
        now_ms: u64,
    ) -> Result<Option<(Event<'d>, Minisocket)>, Refusal> {
        let result = self.verify(datagram, outer, peer, now_ms);
        self.counters.trickles_cache_hits_total.add(std::mem::take(&mut self.soft.hits));
        self.counters.trickles_cache_misses_total.add(std::mem::take(&mut self.soft.misses));
        if let Err(refusal) = &result {
            refusal.count(&self.counters);
        }
        result
    }

    fn event<'d>(
        &mut self,
        kind: EventKind,
        request: &Request<'d>,
        peer: SocketAddr,
        mut socket: Minisocket,
    ) -> Result<(Event<'d>, Minisocket), Refusal> {
        let mut event = Event { kind, peer, inputs: Vec::new(), wants: Vec::new() };
        for input in &request.inputs {
            let (mut consumed, mut opaque) = (0, &[][..]);
            if !input.continuation.is_empty() {
                let (continuation, _) = match self.soft.open(input.continuation, &self.keys) {
                    Err(UserError::UnknownEpoch { .. }) => {
                        socket.expire_input(input.request);
                        continue;
                    }
                    result => result?,
                };
                if continuation.kind != Kind::Input || continuation.request != input.request {
                    return Err(Refusal::User(UserError::Malformed));
                }
                (consumed, opaque) = (continuation.start, continuation.opaque);
            }
            // A gap cannot be bridged without state; what was consumed already is cut off.
            let Some(known) = consumed.checked_sub(input.offset) else { continue };
            let data = usize::try_from(known).ok().and_then(|known| input.data.get(known..)).unwrap_or(&[]);
            event.inputs.push(EventInput {
                request: input.request,
                consumed,
                data,
                last: input.last,
                opaque,
            });
        }
        let wants = request.wants.iter().skip(socket.answered_before);
        let mut opened: Option<(&[u8], (UserContinuation<'_>, bool))> = None;
        for want in wants.take(socket.packets()) {
            // Most ranges have the continuation of the one before. What the client sent twice tells nothing by its
            // time.
            let known = opened.filter(|(bytes, _)| *bytes == want.continuation);
            let continuation = match known {
                Some((_, known)) => Ok(known),
                None => self.soft.open(want.continuation, &self.keys),
            };
            opened = continuation.as_ref().ok().map(|&fresh| (want.continuation, fresh));
            event.wants.push(Self::want(want, continuation, &mut socket)?);
        }
        socket.wants = event.wants.len();
        Ok((event, socket))
    }

    fn want<'d>(
        want: &wire::Want<'d>,
        opened: Result<(UserContinuation<'d>, bool), UserError>,
        socket: &mut Minisocket,
    ) -> Result<EventWant<'d>, Refusal> {
        let (request, offset) = split_sequence(want.sequence);
        let empty =
            EventWant { request, offset, length: 0, valid_start: 0, valid_end: 0, opaque: &[], aged: false };
        let (continuation, current) = match opened {
            Err(UserError::UnknownEpoch { .. }) => {
                socket.expire_output(request);
                return Ok(empty);
            }
            result => result?,
        };
        let inside = (continuation.start..=continuation.end).contains(&offset);
        if continuation.kind != Kind::Output || continuation.request != request || !inside {
            return Err(Refusal::User(UserError::Malformed));
        }
        // No more than a packet holds: what is longer need not be found and read.
        let most = (continuation.end - offset).min(socket.output_capacity() as u64);
        let length = u64::from(want.length).min(most) as u32;
        let (valid_start, valid_end, opaque) = (continuation.start, continuation.end, continuation.opaque);
        Ok(EventWant { request, offset, length, valid_start, valid_end, opaque, aged: !current })
    }
}

fn kind_of(ask: &Ask) -> EventKind {
    match ask {
        Ask::Open { .. } => EventKind::Open,
        Ask::Close { .. } => EventKind::Close,
        _ => EventKind::Request,
    }
}

/// What all packets of one answer have in common.
#[derive(Clone, Debug)]
pub(crate) struct Template {
    pub(crate) continuation: Continuation,
    pub(crate) now_ms: u64,
    pub(crate) secret: Secret,
    pub(crate) connection: u64,
    pub(crate) timestamp_us: u32,
    pub(crate) head: Head,
}

/// How much of their continuations the packets of an answer tell.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Head {
    /// All of it.
    Full,
    /// What differs within the era of the request.
    Delta,
    /// What the client cannot foresee of an era that begins with the answer.
    Successor,
}

impl Head {
    pub(crate) fn bytes(self) -> usize {
        if self == Self::Full { RESPONSE_HEAD_BYTES } else { DELTA_HEAD_BYTES }
    }
}
