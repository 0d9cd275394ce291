//! Requests that come as messages, whole but for their content: by DHTTP, by HTTP/2, by HTTP/3, and from the process's own
//! transports.
//!
//! A message's head is that of HTTP/1.1, as is the head of what is answered, whatever its transport makes of them.

mod body;
mod respond;

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use tidegate_core::hooks::{Reply, ResponseView, Via};
use tidegate_core::{NodeId, Reason, Verdict};
use tidegate_dhttp::driver::{Request, Response};
use tidegate_http::forward::has_claims;
use tidegate_http::normalize::{Kept, normalize};
use tidegate_http::{BodyFraming, Method, ParsedRequest, Progress, RequestHead, RequestParser, Version};
use tokio::sync::mpsc;

use crate::cache::lookup::{self, Lookup};
use crate::data_core::client::Introduced;
use crate::data_core::inside::{Inner, InnerRequest, Refused, Told};
use crate::data_core::{Bytes, DataCore, Scratch};
use crate::defence::{self, CameFrom, Hold};
use crate::service::answer::{self, Answer, Incoming};
use crate::service::client_info::ClientInfo;
use crate::service::plan::Plan;
use crate::telemetry::access_log::{CLIENT_LEFT, CUT_OFF};

use body::UploadedBody;
use respond::{Exchange, error_response};

pub(crate) use respond::Extents;

/// What is known of who asks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Whose {
    /// Nothing: the address may be forged, so that nobody is charged with the request.
    Unproved,
    /// The address is proved, and its transport has told of the request: the defence hears of the response alone.
    Told,
    /// The address is proved: the defence decides about the client, and hears of the response.
    Proved,
    /// The same. It came on a connection that may be held or ended.
    Connected {
        /// What is spoken on it.
        spoken: Version,
        /// The connection's place in the prefix tree, if anybody watches.
        place: Option<NodeId>,
        /// Whether a PROXY header names the connection's client.
        introduced: Introduced,
    },
}

impl Whose {
    fn is_connected(self) -> bool {
        matches!(self, Self::Connected { .. })
    }

    fn place(self) -> Option<NodeId> {
        match self {
            Self::Connected { place, .. } => place,
            _ => None,
        }
    }

    /// What is spoken by a client whose message has this version.
    fn version(self, written: Version) -> Version {
        if let Self::Connected { spoken, .. } = self { spoken } else { written }
    }

    /// A message's head as its client has sent it. There is no connection that could change its protocol.
    fn head(self, written: RequestHead<'_>) -> RequestHead<'_> {
        RequestHead { upgrade: false, version: self.version(written.version), ..written }
    }
}

/// Where a request comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct From {
    /// This end.
    pub local: SocketAddr,
    pub whose: Whose,
    /// Whether it came encrypted.
    pub is_encrypted: bool,
}

/// What a request by a connection is answered.
pub(crate) struct Answered {
    pub response: Response,
    /// An upstream's connection waits for the client to take it.
    pub holds_upstream: bool,
    /// Its client may ask for nothing more on this connection.
    pub is_last: bool,
}

impl Answered {
    fn with(response: Response) -> Self {
        Self { response, holds_upstream: false, is_last: false }
    }
}

/// How a connection ends instead of an answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum End {
    Close,
    Reset,
}

impl End {
    fn of(verdict: Verdict) -> Self {
        if verdict == Verdict::Drop { Self::Close } else { Self::Reset }
    }
}

/// What is done to a request that may not go on.
enum Refusal {
    Reply(Reply),
    End(End),
}

/// Answers what the process's own transports ask, and judges what they tell of.
pub(crate) async fn answer_inside(
    core: Rc<DataCore>,
    mut inside: mpsc::Receiver<Inner>,
    refused: Arc<Refused>,
) {
    while let Some(message) = inside.recv().await {
        match message {
            Inner::Request(inner) => {
                let InnerRequest { request, local, proved, answer: answered } = *inner;
                let core = Rc::clone(&core);
                let whose = if proved { Whose::Told } else { Whose::Unproved };
                let from = From { local, whose, is_encrypted: false };
                tokio::task::spawn_local(async move {
                    // Who asked may have gone.
                    let _ = answered.send(answer(core, from, request).await.into_wire());
                });
            }
            Inner::Told(told) => judge_told(&core, &told, &refused),
        }
    }
}

/// Has the defence decide on a request that its transport answers.
fn judge_told(core: &DataCore, Told { head: bytes, client }: &Told, refused: &Refused) {
    let Some(defence) = &core.defence else { return };
    let plan = core.plan_ref();
    let mut parser = RequestParser::new(plan.limits.head);
    let Ok(Progress::Complete { .. }) = parser.parse(bytes) else { return };
    let head = RequestHead { upgrade: false, ..parser.head(bytes) };
    let mut scratch = core.scratch.borrow_mut();
    let Ok(normalized) = normalize(&head, plan.personality, &mut scratch.target) else { return };
    let peer = client.to_canonical();
    let info = ClientInfo::of(&plan, &head, peer, false);
    let (judged, verdict) = defence.judge_told(peer, &info, &head, &normalized, core.clock.elapsed_ms());
    // What a trusted proxy's client does is not the proxy's doing; and an operator's block needs no classifier.
    let blocked = plan.connections.as_ref().is_some_and(|admission| admission.ignores(peer));
    let verdict = match verdict {
        _ if blocked => Verdict::Drop,
        _ if judged.via == Via::Proxy => Verdict::Continue,
        verdict => verdict,
    };
    if refused.note(peer, verdict) {
        core.metrics.requests_policed_total.add(1);
    }
}

/// What becomes of a request without waiting.
pub(crate) enum AtOnce {
    Answered(Result<Answered, End>),
    /// It is held, or asked for elsewhere.
    Waits(Box<Waiting>),
}

/// A request that may go on, once it has waited.
pub(crate) struct Waiting {
    parsed: ParsedRequest,
    normalized: Kept,
    held: Option<Hold>,
    /// The cache has been looked into, and has nothing.
    is_absent: bool,
    began: Instant,
}

/// Answers a request that came on no connection of its own.
pub(crate) async fn answer(core: Rc<DataCore>, from: From, request: Request) -> Response {
    let answered = match answer_at_once(&core, from, &request) {
        AtOnce::Answered(answered) => answered,
        AtOnce::Waits(waiting) => Box::pin(waiting.answer(&core, from, request, None)).await,
    };
    match answered {
        Ok(answered) => answered.response,
        // There is no connection that could be ended.
        Err(_) => error_response(&core, 503).0,
    }
}

/// Answers a request from the cache, or by what takes no other.
pub(crate) fn answer_at_once(core: &Rc<DataCore>, from: From, request: &Request) -> AtOnce {
    let whose = from.whose;
    let client = request.arrival.client;
    let refused = |status| AtOnce::Answered(refuse(core, client, whose, status));
    let began = core.clock.next_began();
    let plan = core.plan_ref();
    let mut parser = core.parser.borrow_mut();
    let mut scratch = core.scratch.borrow_mut();
    let Scratch { target, key, .. } = &mut *scratch;
    parser.reset();
    match parser.parse(&request.head) {
        Ok(Progress::Complete { .. }) => {}
        Ok(Progress::Incomplete) => return refused(400),
        Err(error) => return refused(error.status()),
    }
    let head = whose.head(parser.head(&request.head));
    let normalized = match normalize(&head, plan.personality, target) {
        Ok(normalized) => normalized,
        Err(error) => return refused(error.status()),
    };
    core.metrics.requests_total.add(1);
    let exchange = Exchange::new(core, whose, request, began);
    let incoming = exchange.incoming(&plan, &head, &normalized, &request.head, from.is_encrypted);
    let held = match judge(core, &plan, whose, incoming) {
        ControlFlow::Continue(Some(Hold::Tarpit)) => Some(Hold::Tarpit),
        ControlFlow::Continue(held) => match police(&plan, from, incoming, request) {
            Some(refusal) => return AtOnce::Answered(exchange.turn_away(&head, refusal)),
            None => held,
        },
        ControlFlow::Break(refusal) => return AtOnce::Answered(exchange.turn_away(&head, refusal)),
    };
    let found = match held {
        Some(_) => Found::Nothing { is_absent: false },
        None => find(core, &plan, whose, &incoming, key),
    };
    match found {
        Found::Nothing { is_absent } => AtOnce::Waits(Box::new(Waiting {
            parsed: parser.parsed(),
            normalized: normalized.keep(),
            held,
            is_absent,
            began,
        })),
        Found::Answer(answer) => {
            let judged = judge_answer(core, whose, &incoming, &answer, 0);
            AtOnce::Answered(match judged {
                Ok(is_last) => {
                    let response = exchange.respond(&head, answer, UploadedBody::none());
                    Ok(Answered { is_last, ..Answered::with(response) })
                }
                Err(refusal) => exchange.turn_away(&head, refusal),
            })
        }
    }
}

/// What there is for a request without waiting.
enum Found {
    Answer(Answer),
    Nothing { is_absent: bool },
}

fn find(core: &DataCore, plan: &Plan, whose: Whose, incoming: &Incoming<'_>, key: &mut Vec<u8>) -> Found {
    let Incoming { head, normalized, info, .. } = *incoming;
    if let Some((status, fields)) = answer::refusal(head, plan.limits.body_bytes) {
        return Found::Answer(Answer::Local { status, fields: fields.to_vec() });
    }
    if whose.is_connected()
        && let Some(answer) = plan.own_answer(head.method, &info, normalized)
    {
        return Found::Answer(answer);
    }
    let may_be_stored = head.framing == BodyFraming::None
        && matches!(head.method, Method::Get | Method::Head)
        && !plan.reviews_request(head.method_bytes, normalized);
    match may_be_stored.then(|| lookup::lookup(core, plan, head, normalized, &info, key)) {
        Some(Lookup::Hit(hit)) => {
            lookup::count_hit(core, &hit);
            Found::Answer(Answer::Stored(hit))
        }
        Some(Lookup::Absent) => Found::Nothing { is_absent: true },
        Some(Lookup::Miss) | None => Found::Nothing { is_absent: false },
    }
}

impl Waiting {
    /// Waits for what the request has to wait for. Interim responses go into `interim`, each as a head of HTTP/1.1.
    pub(crate) async fn answer(
        self: Box<Self>,
        core: &Rc<DataCore>,
        from: From,
        request: Request,
        interim: Option<mpsc::Sender<Vec<u8>>>,
    ) -> Result<Answered, End> {
        let Self { parsed, normalized, held, is_absent, began } = *self;
        let From { whose, is_encrypted, .. } = from;
        let head = whose.head(parsed.head(&request.head));
        let normalized = normalized.get();
        let exchange = Exchange::new(core, whose, &request, began);
        if let Some(hold) = held
            && let Some(refusal) = hold_back(core, hold).await
        {
            return exchange.turn_away(&head, refusal);
        }
        let plan = core.plan();
        let incoming = exchange.incoming(&plan, &head, &normalized, &request.head, is_encrypted);
        let mut body = UploadedBody::new(request.body, plan.limits.body_bytes, interim);
        let asked_ms = core.clock.elapsed_ms();
        let awaited = Awaited { exchange: &exchange, incoming, whose, asked_ms };
        let answer = answer::answer(core, Incoming { is_absent, ..incoming }, &mut body).await;
        awaited.answered();
        let upstream_ms = core.clock.elapsed_ms().saturating_sub(asked_ms);
        match judge_answer(core, whose, &incoming, &answer, upstream_ms) {
            Ok(is_last) => {
                let holds_upstream = matches!(answer, Answer::Streamed(_));
                let response = exchange.respond(&head, answer, body);
                Ok(Answered { response, holds_upstream, is_last })
            }
            Err(refusal) => exchange.turn_away(&head, refusal),
        }
    }
}

/// Does to a request what the defence says before it is looked at; what is done to it if it may not go on then.
async fn hold_back(core: &DataCore, hold: Hold) -> Option<Refusal> {
    let defence = core.defence.as_ref()?;
    match (hold, defence.hold(hold)) {
        (Hold::Delay, Some(held)) => {
            held.wait().await;
            None
        }
        (Hold::Delay, None) => Some(Refusal::Reply(defence::later())),
        (Hold::Tarpit, held) => {
            if let Some(held) = held {
                tokio::select! {
                    () = held.wait() => {}
                    () = core.drained() => {}
                }
            }
            Some(Refusal::End(End::Close))
        }
    }
}

/// What the block list and the defence say of a request: whether it is held before it goes on, or what is done to it.
fn judge(
    core: &DataCore,
    plan: &Plan,
    whose: Whose,
    incoming: Incoming<'_>,
) -> ControlFlow<Refusal, Option<Hold>> {
    let Incoming { head, normalized, peer, info, .. } = incoming;
    let now_ms = core.clock.elapsed_ms();
    let introduced =
        if let Whose::Connected { introduced, .. } = whose { introduced } else { Introduced::No };
    if introduced == Introduced::Unnamed && has_claims(&head.fields) {
        return ControlFlow::Break(Refusal::Reply(Reply { status: 400, ..Reply::default() }));
    }
    let is_named = introduced == Introduced::Named;
    if plan.keeps_out(&info, is_named, &core.block_list, || now_ms) {
        core.note_refused(peer, &info, Reason::Listed);
        return ControlFlow::Break(match info.via_proxy {
            true => Refusal::Reply(Reply { status: 403, ..Reply::default() }),
            // A connection that is the client's alone ends.
            false => Refusal::End(End::Reset),
        });
    }
    let Some(defence) = &core.defence else { return ControlFlow::Continue(None) };
    let place = match whose {
        Whose::Unproved | Whose::Told => return ControlFlow::Continue(None),
        Whose::Proved => {
            return match defence.judge_message(peer, &info, head, normalized, now_ms) {
                Some(reply) => ControlFlow::Break(Refusal::Reply(reply)),
                None => ControlFlow::Continue(None),
            };
        }
        // A connection can be held and ended, as with HTTP/1.
        Whose::Connected { place, .. } => place,
    };
    let client = defence.client(place, peer, &info, now_ms);
    let decision = defence.judge(client, head, normalized, false, now_ms);
    match decision.verdict {
        Verdict::Continue => ControlFlow::Continue(None),
        Verdict::Delay => ControlFlow::Continue(Some(Hold::Delay)),
        // A trusted proxy's connection has other clients' requests on it.
        Verdict::Tarpit if !info.via_proxy => ControlFlow::Continue(Some(Hold::Tarpit)),
        verdict => ControlFlow::Break(match defence.reply(client, head, normalized, decision, now_ms) {
            Some(reply) => Refusal::Reply(reply),
            None => Refusal::End(End::of(verdict)),
        }),
    }
}

/// What the rules say of a request.
fn police(plan: &Plan, from: From, incoming: Incoming<'_>, request: &Request) -> Option<Refusal> {
    let Incoming { head, normalized, info, .. } = incoming;
    let From { local, whose, .. } = from;
    let asked = || request.arrival.local.map_or(local, |ip| SocketAddr::new(ip, local.port()));
    match plan.police(request.arrival.client, || Ok(asked()), head, normalized) {
        Verdict::Continue => None,
        // Where there is no connection to end, a client that hears nothing asks again; and a trusted proxy's has other
        // clients' requests on it.
        verdict if !whose.is_connected() || info.via_proxy || is_answer(verdict) => {
            Some(Refusal::Reply(Reply { status: 503, ..Reply::default() }))
        }
        Verdict::Reset => Some(Refusal::End(End::Reset)),
        _ => Some(Refusal::End(End::Close)),
    }
}

fn is_answer(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Refuse | Verdict::Delay)
}

/// Tells the defence of an answer of which nothing was sent: whether it is the last on its connection, or what is done if
/// it may not go out.
fn judge_answer(
    core: &DataCore,
    whose: Whose,
    incoming: &Incoming<'_>,
    answer: &Answer,
    upstream_ms: u64,
) -> Result<bool, Refusal> {
    let Some(defence) = core.defence.as_ref().filter(|_| whose != Whose::Unproved) else { return Ok(false) };
    let Incoming { head, normalized, peer, info, .. } = incoming;
    let (status, from) = (answer.code(), CameFrom::of(head, answer, upstream_ms));
    let now_ms = core.clock.elapsed_ms();
    let client = defence.client(whose.place(), *peer, info, now_ms);
    let start = || defence.judge_start(client, head, normalized, status, from, now_ms);
    match defence.looks_at_starts().then(start).flatten() {
        None => {}
        Some((_, Some(reply))) => return Err(Refusal::Reply(reply)),
        Some((decision, None)) if whose.is_connected() => {
            return Err(Refusal::End(End::of(decision.verdict)));
        }
        Some((_, None)) => return Err(Refusal::Reply(Reply { status: 503, ..Reply::default() })),
    }
    let decision = defence.responded(client, normalized, status, from, now_ms);
    Ok(whose.is_connected() && !info.via_proxy && decision.ends_connection())
}

/// A request whose client waits for the answer. Dropped before there is one, the client has given it up, or a drain is
/// over.
struct Awaited<'a> {
    exchange: &'a Exchange,
    incoming: Incoming<'a>,
    whose: Whose,
    asked_ms: u64,
}

impl Awaited<'_> {
    fn answered(self) {
        // It owns nothing.
        std::mem::forget(self);
    }
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        let Incoming { head, normalized, peer, info, .. } = &self.incoming;
        let Exchange { core, began, .. } = self.exchange;
        let is_cut_off = core.is_cut_off();
        let tells_defence = !is_cut_off && self.whose != Whose::Unproved;
        if let Some(defence) = core.defence.as_ref().filter(|_| tells_defence) {
            let now_ms = core.clock.elapsed_ms();
            // The upstream works all the same, on what may well be new to the cache.
            let from = CameFrom::given_up(head, now_ms.saturating_sub(self.asked_ms));
            let client = defence.client(self.whose.place(), *peer, info, now_ms);
            let _ = defence.responded(client, normalized, ResponseView::GIVEN_UP, from, now_ms);
        }
        let status = if is_cut_off { CUT_OFF } else { CLIENT_LEFT };
        core.log(*peer, head, status, Bytes::default(), "none", *began);
    }
}

/// Answers a head that is malformed or ambiguous. Without a connection, what is decided about its client acts on the next.
pub(crate) fn refuse(
    core: &DataCore,
    client: SocketAddr,
    whose: Whose,
    status: u16,
) -> Result<Answered, End> {
    core.metrics.requests_refused_total.add(1);
    let is_answered = whose == Whose::Unproved || core.answers_malformed(whose.place(), client);
    if whose.is_connected() && !is_answered {
        core.metrics.requests_policed_total.add(1);
        return Err(End::Close);
    }
    let (response, bytes) = error_response(core, status);
    core.log_unreadable(client, whose.version(Version::Http11), status, bytes);
    Ok(Answered::with(response))
}
