//! Where the defence's hooks meet connections and requests. Without hooks nothing here costs more than a look at an
//! empty `Option`.

use std::cell::Cell;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use tidegate_core::hooks::{
    Chain, Decision, Field, Fields, Load, Peer, Reply, RequestView, ResponseView, Slow, Source, Via,
};
use tidegate_core::{NodeId, Verdict};
use tidegate_http::normalize::Normalized;
use tidegate_http::{BodyFraming, FieldId, RequestHead};

use crate::clients;
use crate::data_core::DataCore;
use crate::service::fetch::Answer;
use crate::service::seen::Seen;
use crate::session::transmit;

/// How long a request is held back.
const DELAY: Duration = Duration::from_secs(1);
/// Shares of the connections that there may be: beyond the first some are ended, down to the second.
const CROWDED: f32 = 0.95;
const ROOMY: f32 = 0.85;
/// The same of the memory that the kernel has for TCP: what clients leave unread holds it.
const MEMORY_SHORT: f32 = 0.7;
const MEMORY_ENOUGH: f32 = 0.4;
/// Bytes left unread from which on a connection is worth ending for its memory.
const HOLDS_MUCH: u64 = 16 * 1024;
/// So many bytes that a client leaves unread weigh as much as a connection.
const BYTES_LIKE_A_CONNECTION: u64 = 64 * 1024;
/// How long a connection is held in the tarpit.
const TARPIT: Duration = Duration::from_secs(30);
/// Requests of one core that are held at once, in either way; of those beyond, the ones to be held back are refused, and
/// the others' connections end.
const MAX_HELD: usize = 1_024;

/// One core's hooks.
pub(crate) struct Defence {
    chain: Chain,
    delayed: Cell<usize>,
    tarpitted: Cell<usize>,
}

/// How a request is held.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Hold {
    /// For a moment, and then served.
    Delay,
    /// For long, and never answered.
    Tarpit,
}

/// A head's fields, for classifiers that ask.
struct HeadFields<'h>(&'h RequestHead<'h>);

impl Fields for HeadFields<'_> {
    fn get(&self, field: Field) -> Option<&[u8]> {
        self.0.fields.get(match field {
            Field::UserAgent => FieldId::UserAgent,
            Field::Cookie => FieldId::Cookie,
            Field::ContentType => FieldId::ContentType,
            Field::Range => FieldId::Range,
            Field::Host => FieldId::Host,
        })
    }
}

/// Whose request it is, and in which place of the tree.
#[derive(Clone, Copy)]
pub(crate) struct Client {
    id: NodeId,
    peer: Peer,
}

impl Defence {
    pub(crate) fn new(chain: Chain) -> Self {
        Self { chain, delayed: Cell::default(), tarpitted: Cell::default() }
    }

    pub(crate) fn tick(&self, load: &Load, now_ms: u64) {
        self.chain.tick(load, now_ms);
    }

    /// The client of a request on a connection: who is connected, or whom a trusted proxy names.
    #[inline]
    pub(crate) fn client(
        &self,
        connection: NodeId,
        peer: SocketAddr,
        seen: &Seen<'_>,
        now_ms: u64,
    ) -> Client {
        let address = peer.ip().to_canonical();
        match seen.via_proxy {
            false => Client { id: connection, peer: Peer { address, via: Via::Direct } },
            true => Client {
                id: self.chain.locate(seen.client, now_ms),
                peer: Peer { address: seen.client, via: Via::Proxy },
            },
        }
    }

    /// Decides on a request. What is done to a trusted proxy's connection would be done to all its clients: whatever
    /// is no answer becomes one.
    #[inline]
    pub(crate) fn judge(
        &self,
        client: Client,
        head: &RequestHead<'_>,
        normalized: &Normalized<'_>,
        now_ms: u64,
    ) -> Decision {
        let fields = HeadFields(head);
        self.chain.request(client.id, client.peer, &view(head, normalized, &fields), now_ms)
    }

    /// The answer that a decision asks for; `None`: the connection ends without one.
    pub(crate) fn reply(
        &self,
        client: Client,
        head: &RequestHead<'_>,
        normalized: &Normalized<'_>,
        decision: Decision,
        now_ms: u64,
    ) -> Option<Reply> {
        let answered = matches!(decision.verdict, Verdict::Refuse | Verdict::Challenge | Verdict::Delay);
        let fields = HeadFields(head);
        (answered || client.peer.via == Via::Proxy)
            .then(|| self.chain.reply(client.peer, &view(head, normalized, &fields), decision, now_ms))
    }

    /// Whether another request may be held; until the result is dropped it is.
    pub(crate) fn hold(&self, hold: Hold) -> Option<Held<'_>> {
        let (count, time) = match hold {
            Hold::Delay => (&self.delayed, DELAY),
            Hold::Tarpit => (&self.tarpitted, TARPIT),
        };
        (count.get() < MAX_HELD).then(|| {
            count.set(count.get() + 1);
            Held { count, time }
        })
    }

    /// Tells of a response.
    pub(crate) fn responded(
        &self,
        client: Client,
        normalized: &Normalized<'_>,
        status: u16,
        (source, upstream_ms): (Source, u64),
        now_ms: u64,
    ) -> Decision {
        let response = ResponseView {
            path: normalized.path,
            query: normalized.query,
            status,
            source,
            upstream_ms: u32::try_from(upstream_ms).unwrap_or(u32::MAX),
        };
        self.chain.response(client.id, client.peer, &response, now_ms)
    }
}

/// A request that is held.
pub(crate) struct Held<'d> {
    count: &'d Cell<usize>,
    time: Duration,
}

impl Held<'_> {
    /// Ends when it has been held long enough.
    pub(crate) async fn wait(self) {
        tokio::time::sleep(self.time).await;
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.count.set(self.count.get() - 1);
    }
}

impl DataCore {
    /// Whether the server is under stress.
    pub(crate) fn is_stressed(&self) -> bool {
        self.defence.as_ref().is_some_and(|defence| defence.chain.stressed_ms().is_some())
    }

    /// Where nearly all connections that there may be are open, or TCP's memory is nearly used up, the heaviest of those that
    /// keep the server waiting are ended: those of addresses with many, and those that leave much unread (Tempesta §4.7).
    pub(crate) fn make_room(&self, defence: &Defence, load: &Load) {
        if load.tcp_memory > MEMORY_SHORT {
            // Others on the host may hold it too; whoever leaves nothing unread here is not to blame.
            let mut holders = 0;
            self.clients.for_each(|client| {
                holders += usize::from(transmit::unacknowledged(client) >= HOLDS_MUCH);
            });
            let surplus = 1.0 - MEMORY_ENOUGH / load.tcp_memory;
            let shed =
                self.clients.end_heaviest((holders as f32 * surplus) as usize, transmit::unacknowledged);
            self.metrics.connections_shed_total.add(shed as u64);
        }
        if load.connections <= CROWDED {
            return;
        }
        let surplus = 1.0 - ROOMY / load.connections;
        let wanted = (self.clients.len() as f32 * surplus) as usize;
        let open = |place: NodeId| defence.chain.with_tree(|tree| tree.open_connections(place));
        let shed = self.clients.end_heaviest(wanted, |client| {
            let of_address = u64::from(client.place.map_or(0, open));
            of_address + transmit::unacknowledged(client) / BYTES_LIKE_A_CONNECTION
        });
        self.metrics.connections_shed_total.add(shed as u64);
    }

    /// A connection was accepted: its place in the tree, unless it is refused.
    pub(crate) fn meet(&self, stream: &TcpStream, peer: SocketAddr) -> Result<Option<NodeId>, ()> {
        let Some(defence) = &self.defence else { return Ok(None) };
        let now_ms = self.clock.elapsed_ms();
        let peer = self.direct(peer);
        let (id, decision) = defence.chain.connect(peer, now_ms);
        match decision.verdict {
            Verdict::Continue | Verdict::Delay => return Ok(Some(id)),
            // Nothing was asked yet that could be left without an answer.
            Verdict::Drop | Verdict::Tarpit => {}
            // With nothing to linger for, closing resets both ends.
            _ => drop(socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO))),
        }
        self.metrics.connections_policed_total.add(1);
        defence.chain.close(id, peer, now_ms);
        Err(())
    }

    /// A connection that was met is closed.
    pub(crate) fn part(&self, client: Option<NodeId>, peer: SocketAddr) {
        if let (Some(defence), Some(id)) = (&self.defence, client) {
            defence.chain.close(id, self.direct(peer), self.clock.elapsed_ms());
        }
    }

    /// A connection ends because its peer was too slow.
    pub(crate) fn too_slow(&self, client: Option<NodeId>, peer: SocketAddr, slow: Slow) {
        let peer = self.direct(peer);
        if let (Some(defence), Some(id), Via::Direct) = (&self.defence, client, peer.via) {
            // The connection ends whatever is decided; a block acts on those to come.
            let _ = defence.chain.slow(id, peer, slow, self.clock.elapsed_ms());
        }
    }

    /// Whether the defence does not let a piece of a request's body pass. What a trusted proxy passes on is judged by its
    /// head and its response only.
    pub(crate) fn refuses_body(&self, client: &clients::Client, piece: &[u8], received: u64) -> bool {
        let (Some(defence), Some(id)) = (&self.defence, client.place) else { return false };
        let peer = self.direct(client.peer());
        let judge = || defence.chain.body(id, peer, piece, received, self.clock.elapsed_ms());
        peer.via == Via::Direct && !judge().is_continue()
    }

    fn direct(&self, peer: SocketAddr) -> Peer {
        let address = peer.ip().to_canonical();
        let is_proxy = self.with_plan(|plan| plan.is_trusted(address));
        Peer { address, via: if is_proxy { Via::Proxy } else { Via::Direct } }
    }
}

/// Where an answer comes from, as far as the client is to blame for it.
pub(crate) fn source(head: &RequestHead<'_>, answer: &Answer) -> Source {
    let could_be_cached = head.framing == BodyFraming::None && matches!(head.method_bytes, b"GET" | b"HEAD");
    match answer {
        Answer::Streamed(_) if could_be_cached => Source::Missed,
        Answer::Streamed(_) => Source::Passed,
        Answer::Stored(hit) if hit.forwarded.is_some() => Source::Missed,
        // An upstream that fails is not free either.
        Answer::Local { status: 500..=599, .. } => Source::Passed,
        _ => Source::Here,
    }
}

fn view<'v>(
    head: &'v RequestHead<'_>,
    normalized: &'v Normalized<'_>,
    fields: &'v HeadFields<'_>,
) -> RequestView<'v> {
    RequestView {
        method: head.method_bytes,
        path: normalized.path,
        reading: normalized.reading,
        query: normalized.query,
        has_body: head.framing != BodyFraming::None,
        fields,
    }
}
