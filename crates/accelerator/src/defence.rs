//! Where the defence's hooks meet connections and requests. Without hooks nothing here costs more than a look at an
//! empty `Option`.

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use tidegate_core::hooks::{
    Chain, Decision, Field, Fields, Load, PASS_COOKIE, Part, Peer, Reply, RequestLine, RequestView,
    ResponseView, Slow, Source, Via,
};
use tidegate_core::{NodeId, Reason, Verdict};
use tidegate_http::cache::range::{self, ByteRange};
use tidegate_http::normalize::Normalized;
use tidegate_http::{BodyFraming, FieldId, Method, RequestHead};

use crate::data_core::DataCore;
use crate::data_core::client::Client;
use crate::service::answer::Answer;
use crate::service::client_info::ClientInfo;
use crate::session::transmit;

/// How long a request is held back.
const DELAY: Duration = Duration::from_secs(1);
/// Shares of the connections that there may be: beyond the first some are ended, down to the second.
const CROWDED: f32 = 0.95;
const ROOMY: f32 = 0.85;
/// The same of the memory that the kernel has for TCP: what clients leave unread holds it.
const MEMORY_SHORT: f32 = 0.7;
const MEMORY_ENOUGH: f32 = 0.4;
/// While requests wait for a connection to an upstream, at most one in so many of them is for clients that keep it
/// waiting.
const SLOW_SHARE: usize = 4;
/// Bytes left unread from which on a connection is worth ending for its memory.
const HOLDS_MUCH: u64 = 16 * 1024;
/// What a lone connection weighs: see [`tidegate_core::PrefixTree::crowding`].
const LONE: u64 = 64;
/// So many bytes that a client leaves unread weigh as much as a connection.
const BYTES_LIKE_A_CONNECTION: u64 = 64 * 1024;
/// How long a connection is held in the tarpit.
const TARPIT: Duration = Duration::from_secs(30);
/// Requests of one core that are held at once, in either way; of those beyond, the ones to be held back are refused,
/// and the others' connections end.
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
            Field::Host => FieldId::Host,
        })
    }

    fn part(&self) -> Option<Part> {
        // RFC 9110 §14.2: with other methods the field means nothing.
        let value = self.0.fields.get(FieldId::Range).filter(|_| self.0.method == Method::Get)?;
        let ByteRange { start, end } = range::asked(value);
        Some(if range::is_excessive(value) { Part::Excessive } else { Part::Bytes { start, end } })
    }
}

/// Of a head whose fields are not here.
struct NoFields;

impl Fields for NoFields {
    fn get(&self, _: Field) -> Option<&[u8]> {
        None
    }
}

/// Whose request it is, and in which place of the tree.
#[derive(Clone, Copy)]
pub(crate) struct Subject {
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

    /// The client of a request: who is there, or whom a trusted proxy names. Its place in the tree is that of the
    /// `connection`, or is looked for where the request came by a datagram, from an address that is proved.
    #[inline]
    pub(crate) fn client(
        &self,
        connection: Option<NodeId>,
        peer: IpAddr,
        info: &ClientInfo<'_>,
        now_ms: u64,
    ) -> Subject {
        let (address, via) =
            if info.via_proxy { (info.client, Via::Proxy) } else { (peer.to_canonical(), Via::Direct) };
        let id = match connection {
            Some(place) if via == Via::Direct => place,
            _ => self.chain.locate(address, now_ms),
        };
        Subject { id, peer: Peer { address, via } }
    }

    /// Decides on a request that has no connection of its own: about whom, and what.
    fn decide_on_message(
        &self,
        peer: IpAddr,
        info: &ClientInfo<'_>,
        head: &RequestHead<'_>,
        normalized: &Normalized<'_>,
        now_ms: u64,
    ) -> (Subject, Decision) {
        let client = self.client(None, peer, info, now_ms);
        (client, self.judge(client, head, normalized, false, now_ms))
    }

    /// Decides on a request that its transport answers.
    pub(crate) fn judge_told(
        &self,
        peer: IpAddr,
        info: &ClientInfo<'_>,
        head: &RequestHead<'_>,
        normalized: &Normalized<'_>,
        now_ms: u64,
    ) -> (Peer, Verdict) {
        let (client, decision) = self.decide_on_message(peer, info, head, normalized, now_ms);
        (client.peer, decision.verdict)
    }

    /// Decides on a request by DHTTP: what is answered to it, if it may not go on. There is no connection that could be
    /// held or reset, and a client that hears nothing asks again.
    pub(crate) fn judge_message(
        &self,
        peer: IpAddr,
        info: &ClientInfo<'_>,
        head: &RequestHead<'_>,
        normalized: &Normalized<'_>,
        now_ms: u64,
    ) -> Option<Reply> {
        let (client, decision) = self.decide_on_message(peer, info, head, normalized, now_ms);
        let refused = || Reply { status: 503, ..Reply::default() };
        match decision.verdict {
            Verdict::Continue => None,
            Verdict::Delay | Verdict::Tarpit => Some(later()),
            _ => Some(self.reply(client, head, normalized, decision, now_ms).unwrap_or_else(refused)),
        }
    }

    /// Tells of the response to such a request. What is decided acts on the next.
    pub(crate) fn responded_to_message(
        &self,
        peer: IpAddr,
        info: &ClientInfo<'_>,
        normalized: &Normalized<'_>,
        status: u16,
        from: CameFrom,
        now_ms: u64,
    ) {
        let client = self.client(None, peer, info, now_ms);
        let _ = self.responded(client, normalized, status, from, now_ms);
    }

    /// Decides on the first line of a request, if anybody looks at such.
    #[inline]
    fn judge_line(&self, client: Subject, line: &RequestLine<'_>, now_ms: u64) -> Decision {
        match self.chain.looks_at_lines() {
            true => self.chain.request_line(client.id, client.peer, line, now_ms),
            false => Decision::CONTINUE,
        }
    }

    /// The same while the rest of the head is awaited; with the decision the status that tells the client. Nothing is
    /// decided yet of what a trusted proxy passes on, nor of what is to be held.
    pub(crate) fn judge_early(
        &self,
        connection: NodeId,
        peer: Peer,
        head: &[u8],
        now_ms: u64,
    ) -> Option<(Decision, u16)> {
        if !self.chain.looks_at_lines() || peer.via == Via::Proxy {
            return None;
        }
        let line = first_line(head)?;
        let decision = self.chain.request_line(connection, peer, &line, now_ms);
        if matches!(decision.verdict, Verdict::Delay | Verdict::Tarpit) {
            return None;
        }
        let RequestLine { method, target } = line;
        let fields = &NoFields;
        let request =
            RequestView { method, path: target, reading: None, query: None, has_body: false, fields };
        let status = match decision.is_continue() {
            true => 0,
            false => self.chain.reply(peer, &request, decision, now_ms).status,
        };
        Some((decision, status))
    }

    /// Whether anybody looks at responses of which nothing was sent.
    #[inline]
    pub(crate) fn looks_at_starts(&self) -> bool {
        self.chain.looks_at_starts()
    }

    /// Decides on such a response; with the decision the answer that takes its place.
    pub(crate) fn judge_start(
        &self,
        client: Subject,
        head: &RequestHead<'_>,
        normalized: &Normalized<'_>,
        status: u16,
        from: CameFrom,
        now_ms: u64,
    ) -> Option<(Decision, Option<Reply>)> {
        let response = response_view(normalized, status, from);
        let decision = self.chain.response_start(client.id, client.peer, &response, now_ms);
        if decision.is_continue() {
            return None;
        }
        Some((decision, self.reply(client, head, normalized, decision, now_ms)))
    }

    /// Decides on a request, by its first line, unless that was judged, and by its head. Whom the line has delayed, the
    /// head may still keep out.
    #[inline]
    pub(crate) fn judge(
        &self,
        client: Subject,
        head: &RequestHead<'_>,
        normalized: &Normalized<'_>,
        is_line_judged: bool,
        now_ms: u64,
    ) -> Decision {
        let line = RequestLine { method: head.method_bytes, target: head.target };
        let of_line = match is_line_judged {
            true => Decision::CONTINUE,
            false => self.judge_line(client, &line, now_ms),
        };
        if !matches!(of_line.verdict, Verdict::Continue | Verdict::Delay) {
            return of_line;
        }
        let fields = HeadFields(head);
        self.chain.request(client.id, client.peer, &view(head, normalized, &fields), now_ms).or(of_line)
    }

    /// The answer that a decision asks for; `None`: the connection ends without one. What is done to a trusted proxy's
    /// connection would be done to all its clients: whatever is no answer becomes one.
    pub(crate) fn reply(
        &self,
        client: Subject,
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

    /// Decides on a client whose request cannot be read: it counts as one that fails. A head costs the server more than
    /// the sender, whether or not it is well formed.
    fn judge_malformed(&self, connection: NodeId, peer: Peer, now_ms: u64) -> Decision {
        let (path, query) = (&b""[..], None);
        let source = Source::Here;
        let request =
            RequestView { method: b"", path, reading: None, query, has_body: false, fields: &NoFields };
        let decision = self.chain.request(connection, peer, &request, now_ms);
        if !decision.is_continue() {
            return decision;
        }
        let response =
            ResponseView { path, query, authority: b"", variant: 0, status: 400, source, upstream_ms: 0 };
        self.chain.response(connection, peer, &response, now_ms)
    }

    /// Tells of a response.
    pub(crate) fn responded(
        &self,
        client: Subject,
        normalized: &Normalized<'_>,
        status: u16,
        from: CameFrom,
        now_ms: u64,
    ) -> Decision {
        let response = response_view(normalized, status, from);
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

/// What is told to a request that was to be held while as many are as may be.
pub(crate) fn later() -> Reply {
    Reply { status: 429, fields: b"Retry-After: 10\r\n".to_vec(), ..Reply::default() }
}

impl DataCore {
    /// The name of the cookie that is the defence's and not the site's; empty: there is none.
    #[inline]
    pub(crate) fn own_cookie(&self) -> &'static [u8] {
        self.defence.as_ref().map_or(b"", |_| PASS_COOKIE.as_bytes())
    }

    /// Makes known that a request was refused for another reason than what classifiers have counted.
    pub(crate) fn note_refused(&self, peer: IpAddr, info: &ClientInfo<'_>, reason: Reason) {
        let Some(defence) = &self.defence else { return };
        let now_ms = self.clock.elapsed_ms();
        let client = defence.client(None, peer, info, now_ms);
        defence.chain.note(client.id, client.peer, Decision::new(Verdict::Refuse, reason), now_ms);
    }

    /// Whether the server is under stress.
    pub(crate) fn is_stressed(&self) -> bool {
        self.defence.as_ref().is_some_and(|defence| defence.chain.stressed_ms().is_some())
    }

    /// Where nearly all connections that there may be are open, or TCP's memory is nearly used up, the heaviest of
    /// those that keep the server waiting are ended: those of addresses with many, and those that leave much unread
    /// (Tempesta §4.7). The same where requests wait for a connection to an upstream, of which tunnels, or clients that
    /// send or read slowly, have too many.
    pub(crate) fn make_room(&self, defence: &Defence, load: &Load) {
        if load.tcp_memory > MEMORY_SHORT {
            let surplus = 1.0 - MEMORY_ENOUGH / load.tcp_memory;
            // Others on the host may hold it too; whoever leaves nothing unread here is not to blame. The kernel is
            // asked once for each.
            let share = |unread: &mut dyn Iterator<Item = u64>| {
                (unread.filter(|bytes| *bytes >= HOLDS_MUCH).count() as f32 * surplus) as usize
            };
            let shed = self.clients.end_heaviest(share, |client| Some(transmit::unacknowledged(client)));
            self.metrics.connections_shed_total.add(shed as u64);
        }
        let crowding = |place: NodeId| defence.chain.with_tree(|tree| tree.crowding(place));
        let of_address = |peer: SocketAddr, place: Option<NodeId>| {
            // Those of a trusted proxy are many because its clients are.
            let is_proxy = self.direct(peer).via == Via::Proxy;
            place.filter(|_| !is_proxy).map_or(0, crowding)
        };
        let weight = |client: &Client| {
            let unread = transmit::unacknowledged(client) * LONE / BYTES_LIKE_A_CONNECTION;
            of_address(client.peer(), client.place) + unread
        };
        if let Some((waiting, most, permits)) = self.pools().crowd() {
            let mut stalled = self.http3.stalled();
            self.clients.for_each(|client| stalled += client.stalled_at_upstream());
            let slow = |client: &Client| match client.stalled_at_upstream() {
                0 => None,
                stalled => Some(weight(client) + stalled as u64 * LONE),
            };
            let wanted = stalled.saturating_sub(most / SLOW_SHARE).min(waiting.max(most / SLOW_SHARE));
            // A connection may have several, by its streams.
            let surplus =
                |held: &mut dyn Iterator<Item = u64>| (held.count() * wanted).div_ceil(stalled.max(1));
            let shed = self.clients.end_heaviest(surplus, slow)
                + self.http3.end_heaviest(|held| (held * wanted).div_ceil(stalled.max(1)), true, of_address);
            self.metrics.connections_shed_total.add(shed as u64);
            // A tunnel takes a connection for as long as its client likes, and costs that nearly nothing.
            let tunnel =
                |client: &Client| permits.has_tunnel_of(client.as_fd().as_raw_fd()).then(|| weight(client));
            let surplus = |held: &mut dyn Iterator<Item = u64>| {
                held.count().saturating_sub(permits.three_quarters()).min(waiting)
            };
            let shed = self.clients.end_heaviest(surplus, tunnel);
            self.metrics.connections_shed_total.add(shed as u64);
        }
        if load.connections <= CROWDED {
            return;
        }
        let surplus = 1.0 - ROOMY / load.connections;
        let wanted = (self.clients.len() as f32 * surplus) as usize;
        let shed = self.clients.end_heaviest(|_| wanted, |client| Some(weight(client)));
        let of_http3 = |_| (self.http3.len() as f32 * surplus) as usize;
        let shed = shed + self.http3.end_heaviest(of_http3, false, of_address);
        self.metrics.connections_shed_total.add(shed as u64);
    }

    /// A connection was accepted: its place in the tree, unless it is refused.
    pub(crate) fn meet(&self, stream: &TcpStream, peer: SocketAddr) -> Result<Option<NodeId>, ()> {
        self.meet_peer(peer).map_err(|verdict| match verdict {
            // Nothing was asked yet that could be left without an answer.
            Verdict::Drop | Verdict::Tarpit => {}
            // With nothing to linger for, closing resets both ends.
            _ => drop(socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO))),
        })
    }

    /// The same, where the connection's end is another's business.
    pub(crate) fn meet_peer(&self, peer: SocketAddr) -> Result<Option<NodeId>, Verdict> {
        let Some(defence) = &self.defence else { return Ok(None) };
        let now_ms = self.clock.elapsed_ms();
        let peer = self.direct(peer);
        let (id, decision) = defence.chain.connect(peer, now_ms);
        if matches!(decision.verdict, Verdict::Continue | Verdict::Delay) {
            return Ok(Some(id));
        }
        self.metrics.connections_policed_total.add(1);
        defence.chain.close(id, peer, now_ms);
        Err(decision.verdict)
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

    /// Whether a client whose request cannot be read is answered: it counts as one that fails. Of a trusted proxy's
    /// nobody knows whose it is. The `client`'s place is looked for where it is not known.
    pub(crate) fn answers_malformed(&self, client: Option<NodeId>, peer: SocketAddr) -> bool {
        let Some(defence) = &self.defence else { return true };
        let (peer, now_ms) = (self.direct(peer), self.clock.elapsed_ms());
        let place = || client.unwrap_or_else(|| defence.chain.locate(peer.address, now_ms));
        peer.via == Via::Proxy || defence.judge_malformed(place(), peer, now_ms).is_continue()
    }

    /// Whether the defence does not let a piece of a request's body pass. What a trusted proxy passes on is judged by
    /// its head and its response only.
    pub(crate) fn refuses_body(
        &self,
        (place, peer): (Option<NodeId>, SocketAddr),
        piece: &[u8],
        received: u64,
    ) -> bool {
        let (Some(defence), Some(id)) = (&self.defence, place) else { return false };
        let peer = self.direct(peer);
        let judge = || defence.chain.body(id, peer, piece, received, self.clock.elapsed_ms());
        peer.via == Via::Direct && !judge().is_continue()
    }

    pub(crate) fn direct(&self, peer: SocketAddr) -> Peer {
        let address = peer.ip().to_canonical();
        let is_proxy = self.with_plan(|plan| plan.is_trusted(address));
        Peer { address, via: if is_proxy { Via::Proxy } else { Via::Direct } }
    }
}

fn response_view<'v>(normalized: &'v Normalized<'_>, status: u16, from: CameFrom) -> ResponseView<'v> {
    ResponseView {
        path: normalized.path,
        query: normalized.query,
        authority: normalized.authority,
        variant: from.variant,
        status,
        source: from.source,
        upstream_ms: u32::try_from(from.upstream_ms).unwrap_or(u32::MAX),
    }
}

/// The first line of a head, once all of it is here.
fn first_line(head: &[u8]) -> Option<RequestLine<'_>> {
    let mut lines = head.split_inclusive(|&byte| byte == b'\n');
    // RFC 9112 §2.2: empty lines before it are skipped.
    let line = lines.find(|line| !matches!(line, [b'\n'] | [b'\r', b'\n']))?;
    let mut words = line.strip_suffix(b"\n")?.split(|&byte| byte == b' ');
    Some(RequestLine { method: words.next()?, target: words.next()? })
}

/// Where an answer comes from, as far as the client is to blame for it.
#[derive(Clone, Copy)]
pub(crate) struct CameFrom {
    source: Source,
    upstream_ms: u64,
    variant: u64,
}

impl CameFrom {
    /// From the cache, a file or ourselves.
    pub(crate) const HERE: Self = Self { source: Source::Here, upstream_ms: 0, variant: 0 };

    /// An answer that took `ms`.
    pub(crate) fn of(head: &RequestHead<'_>, answer: &Answer, ms: u64) -> Self {
        let (source, forward) = match answer {
            // The upstream works for whoever asked first.
            answer if answer.is_collapsed() => return Self::HERE,
            Answer::Streamed(streamed) => (asked(head), Some(streamed.forward)),
            Answer::Stored(hit) if hit.forwarded.is_some() => (Source::Missed, hit.forwarded),
            // An upstream that fails is not free either.
            Answer::Local { status: 500..=599, .. } => (Source::Passed, None),
            _ => (Source::Here, None),
        };
        Self { source, upstream_ms: ms, variant: forward.map_or(0, |forward| forward.variant) }
    }

    /// An answer that the client did not wait for longer than `ms`.
    pub(crate) fn given_up(head: &RequestHead<'_>, ms: u64) -> Self {
        Self { source: asked(head), upstream_ms: ms, variant: 0 }
    }
}

/// What a request for an upstream is, by its head.
fn asked(head: &RequestHead<'_>) -> Source {
    let could_be_cached = head.framing == BodyFraming::None && matches!(head.method_bytes, b"GET" | b"HEAD");
    if could_be_cached { Source::Missed } else { Source::Passed }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_line_is_there_with_its_last_byte() {
        let head = b"\r\nGET /a?b HTTP/1.1\r\nHost: h\r\n";
        let end = head.windows(2).skip(2).position(|pair| pair == b"\r\n").unwrap() + 4;
        for length in 0..head.len() {
            let line = first_line(&head[..length]);
            let expected = RequestLine { method: b"GET", target: b"/a?b" };
            assert_eq!(line, (length >= end).then_some(expected), "{length}");
        }
        assert_eq!(first_line(b"GET\r\n"), None);
    }
}
