//! Requests that come as messages, whole but for their content: by DHTTP, by HTTP/2, and from the process's own
//! transports.
//!
//! A message's head is that of HTTP/1.1, as is the head of what is answered, whatever its transport makes of them.

mod body;
mod respond;

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use tidegate_core::hooks::{Reply, ResponseView, Via};
use tidegate_core::{NodeId, Reason, Verdict};
use tidegate_dhttp::driver::{Request, Response};
use tidegate_http::normalize::normalize;
use tidegate_http::{BodyFraming, Method, Progress, RequestHead, RequestParser, Version};
use tokio::sync::mpsc;

use crate::cache::lookup::{self, Lookup};
use crate::data_core::inside::{Inner, InnerRequest, Refused, Told};
use crate::data_core::{Bytes, DataCore};
use crate::defence::{self, CameFrom, Defence, Hold};
use crate::service::answer::{self, Answer, Incoming};
use crate::service::client_info::ClientInfo;
use crate::service::plan::Plan;
use crate::telemetry::access_log::CLIENT_LEFT;

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
    /// The same. It came by HTTP/2, on a connection that may be held or ended; its place in the prefix tree, if anybody
    /// watches.
    Connected(Option<NodeId>),
}

impl Whose {
    fn is_connected(self) -> bool {
        matches!(self, Self::Connected(_))
    }

    fn place(self) -> Option<NodeId> {
        match self {
            Self::Connected(place) => place,
            _ => None,
        }
    }

    /// What is spoken by a client whose message has this version.
    fn version(self, written: Version) -> Version {
        if self.is_connected() { Version::Http2 } else { written }
    }
}

/// Where a request comes from.
#[derive(Debug)]
pub(crate) struct From {
    /// This end.
    pub local: SocketAddr,
    pub whose: Whose,
    /// Whether it came encrypted.
    pub is_encrypted: bool,
    /// Where interim responses go, each as a head of HTTP/1.1, if the transport has a form for them.
    pub interim: Option<mpsc::Sender<Vec<u8>>>,
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
                let from = From { local, whose, is_encrypted: false, interim: None };
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

/// Answers a request that the cache alone could not, or whose answer is long.
pub(crate) async fn answer(core: Rc<DataCore>, from: From, request: Request) -> Response {
    match answer_connected(Rc::clone(&core), from, request).await {
        Ok(answered) => answered.response,
        // There is no connection that could be ended.
        Err(_) => error_response(&core, 503).0,
    }
}

/// Answers a request that came on a connection of its client's, unless that ends.
pub(crate) async fn answer_connected(
    core: Rc<DataCore>,
    from: From,
    request: Request,
) -> Result<Answered, End> {
    let From { local, whose, is_encrypted, interim } = from;
    let began = Instant::now();
    let plan = core.plan();
    let mut parser = RequestParser::new(plan.limits.head);
    let mut scratch = Vec::new();
    let client = request.arrival.client;
    match parser.parse(&request.head) {
        Ok(Progress::Complete { .. }) => {}
        Ok(Progress::Incomplete) => return refuse(&core, client, whose, 400),
        Err(error) => return refuse(&core, client, whose, error.status()),
    }
    // There is no connection that could change its protocol.
    let parsed = parser.head(&request.head);
    let version = whose.version(parsed.version);
    let head = RequestHead { upgrade: false, version, ..parsed };
    let normalized = match normalize(&head, plan.personality, &mut scratch) {
        Ok(normalized) => normalized,
        Err(error) => return refuse(&core, client, whose, error.status()),
    };
    core.metrics.requests_total.add(1);
    let peer = client.ip().to_canonical();
    let mut body = UploadedBody::new(request.body, plan.limits.body_bytes, interim);
    let asked = request.arrival.local.map_or(local, |ip| SocketAddr::new(ip, local.port()));
    let info = ClientInfo::of(&plan, &head, peer, is_encrypted);
    let exchange = Exchange { core: Rc::clone(&core), peer, head: request.head.clone(), version, began };
    let buffer = &request.head;
    let incoming = Incoming { head: &head, normalized: &normalized, buffer, peer, info, is_absent: false };
    let refusal = match judge(&core, &plan, whose, incoming).await {
        None => police(&plan, whose, incoming, client, asked),
        refusal => refusal,
    };
    if let Some(refusal) = refusal {
        return exchange.turn_away(&head, refusal);
    }
    let asked_ms = core.clock.elapsed_ms();
    let defence = core.defence.as_ref().filter(|_| whose != Whose::Unproved);
    let answer = if let Some((status, fields)) = answer::refusal(&head, plan.limits.body_bytes) {
        Answer::Local { status, fields: fields.to_vec() }
    } else if whose.is_connected() && plan.is_in_clear(&info, &normalized) {
        answer::redirect(head.method, plan.secure_url(&info, &normalized))
    } else {
        let awaited = Awaited { exchange: &exchange, defence, incoming, whose, asked_ms };
        let answer = found_or_asked(&core, &plan, incoming, &mut body).await;
        awaited.answered();
        answer
    };
    let now_ms = core.clock.elapsed_ms();
    let from = CameFrom::of(&head, &answer, now_ms.saturating_sub(asked_ms));
    let judge = |defence| judge_answer(defence, whose, &incoming, answer.code(), from, now_ms);
    match defence.map_or(Ok(false), judge) {
        Err(refusal) => exchange.turn_away(&head, refusal),
        Ok(is_last) => {
            let holds_upstream = matches!(answer, Answer::Streamed(_));
            let response = exchange.respond(&head, answer, body);
            Ok(Answered { response, holds_upstream, is_last })
        }
    }
}

/// What the block list and the defence say of a request. One that is to be held waits here.
async fn judge(core: &DataCore, plan: &Plan, whose: Whose, incoming: Incoming<'_>) -> Option<Refusal> {
    let Incoming { head, normalized, peer, info, .. } = incoming;
    let now_ms = core.clock.elapsed_ms();
    if plan.keeps_out(&info, &core.block_list, || now_ms) {
        core.note_refused(peer, &info, Reason::Listed);
        return Some(Refusal::Reply(Reply { status: 403, ..Reply::default() }));
    }
    let defence = core.defence.as_ref()?;
    match whose {
        Whose::Unproved | Whose::Told => None,
        Whose::Proved => defence.judge_message(peer, &info, head, normalized, now_ms).map(Refusal::Reply),
        Whose::Connected(place) => judge_connected(core, defence, place, incoming, now_ms).await,
    }
}

/// The same of a request whose connection can be held and ended, as with HTTP/1.
async fn judge_connected(
    core: &DataCore,
    defence: &Defence,
    place: Option<NodeId>,
    incoming: Incoming<'_>,
    now_ms: u64,
) -> Option<Refusal> {
    let Incoming { head, normalized, peer, info, .. } = incoming;
    let client = defence.client(place, peer, &info, now_ms);
    let decision = defence.judge(client, head, normalized, false, now_ms);
    match decision.verdict {
        Verdict::Continue => None,
        Verdict::Delay => match defence.hold(Hold::Delay) {
            Some(held) => {
                held.wait().await;
                None
            }
            None => Some(Refusal::Reply(defence::later())),
        },
        // A trusted proxy's connection has other clients' requests on it.
        Verdict::Tarpit if !info.via_proxy => {
            if let Some(held) = defence.hold(Hold::Tarpit) {
                tokio::select! {
                    () = held.wait() => {}
                    () = core.drained() => {}
                }
            }
            Some(Refusal::End(End::Close))
        }
        verdict => Some(match defence.reply(client, head, normalized, decision, now_ms) {
            Some(reply) => Refusal::Reply(reply),
            None => Refusal::End(End::of(verdict)),
        }),
    }
}

/// What the rules say of a request.
fn police(
    plan: &Plan,
    whose: Whose,
    incoming: Incoming<'_>,
    client: SocketAddr,
    asked: SocketAddr,
) -> Option<Refusal> {
    let Incoming { head, normalized, info, .. } = incoming;
    match plan.police(client, || Ok(asked), head, normalized) {
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
    defence: &Defence,
    whose: Whose,
    incoming: &Incoming<'_>,
    status: u16,
    from: CameFrom,
    now_ms: u64,
) -> Result<bool, Refusal> {
    let Incoming { head, normalized, peer, info, .. } = incoming;
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

/// A request whose client waits for the answer. Dropped before there is one, the client has given it up.
struct Awaited<'a> {
    exchange: &'a Exchange,
    defence: Option<&'a Defence>,
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
        if let Some(defence) = self.defence {
            let now_ms = core.clock.elapsed_ms();
            // The upstream works all the same, on what may well be new to the cache.
            let from = CameFrom::given_up(head, now_ms.saturating_sub(self.asked_ms));
            let client = defence.client(self.whose.place(), *peer, info, now_ms);
            let _ = defence.responded(client, normalized, ResponseView::GIVEN_UP, from, now_ms);
        }
        core.log(*peer, head, CLIENT_LEFT, Bytes::default(), "none", *began);
    }
}

/// What the cache has for a request, or what is asked for.
async fn found_or_asked(
    core: &Rc<DataCore>,
    plan: &Plan,
    incoming: Incoming<'_>,
    body: &mut UploadedBody,
) -> Answer {
    let Incoming { head, normalized, info, .. } = incoming;
    let is_plain = head.framing == BodyFraming::None
        && matches!(head.method, Method::Get | Method::Head)
        && !plan.reviews_request(head.method_bytes, normalized);
    let found = match is_plain {
        true => lookup::lookup(core, plan, head, normalized, &info, &mut Vec::new()),
        false => Lookup::Miss,
    };
    match found {
        // What comes over a connection, or was put there by another request meanwhile.
        Lookup::Hit(hit) => {
            lookup::count_hit(core, &hit);
            Answer::Stored(hit)
        }
        Lookup::Absent => answer::answer(core, Incoming { is_absent: true, ..incoming }, body).await,
        Lookup::Miss => answer::answer(core, incoming, body).await,
    }
}

/// Answers a head that is malformed or ambiguous. Without a connection, what is decided about its client acts on the next.
fn refuse(core: &DataCore, client: SocketAddr, whose: Whose, status: u16) -> Result<Answered, End> {
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
