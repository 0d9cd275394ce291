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
use tidegate_core::{Reason, Verdict};
use tidegate_dhttp::driver::{Arrival, Request, Response};
use tidegate_http::normalize::normalize;
use tidegate_http::{BodyFraming, Method, Progress, RequestHead, RequestParser, Version};
use tokio::sync::mpsc;

use crate::cache::lookup::{self, Lookup};
use crate::data_core::inside::{Inner, InnerRequest, Refused, Told};
use crate::data_core::{Bytes, DataCore};
use crate::defence::{CameFrom, Defence};
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
}

/// Where a request comes from.
#[derive(Debug)]
pub(crate) struct From {
    /// This end.
    pub local: SocketAddr,
    pub whose: Whose,
    /// Whether it came encrypted.
    pub is_encrypted: bool,
    /// Whether it came by HTTP/2.
    pub is_http2: bool,
    /// Where interim responses go, each as a head of HTTP/1.1, if the transport has a form for them.
    pub interim: Option<mpsc::Sender<Vec<u8>>>,
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
                let from = From { local, whose, is_encrypted: false, is_http2: false, interim: None };
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
    let From { local, whose, is_encrypted, is_http2, interim } = from;
    let began = Instant::now();
    let plan = core.plan();
    let mut parser = RequestParser::new(plan.limits.head);
    let mut scratch = Vec::new();
    let refused = |status| refuse(&core, &request.arrival, whose, is_http2, status);
    match parser.parse(&request.head) {
        Ok(Progress::Complete { .. }) => {}
        Ok(Progress::Incomplete) => return refused(400),
        Err(error) => return refused(error.status()),
    }
    // There is no connection that could change its protocol.
    let parsed = parser.head(&request.head);
    let version = if is_http2 { Version::Http2 } else { parsed.version };
    let head = RequestHead { upgrade: false, version, ..parsed };
    let normalized = match normalize(&head, plan.personality, &mut scratch) {
        Ok(normalized) => normalized,
        Err(error) => return refused(error.status()),
    };
    core.metrics.requests_total.add(1);
    let peer = request.arrival.client.ip().to_canonical();
    let mut body = UploadedBody::new(request.body, plan.limits.body_bytes, interim);
    let asked = request.arrival.local.map_or(local, |ip| SocketAddr::new(ip, local.port()));
    let info = ClientInfo::of(&plan, &head, peer, is_encrypted);
    let asked_ms = core.clock.elapsed_ms();
    let defence = core.defence.as_ref().filter(|_| whose != Whose::Unproved);
    let refused = defence
        .filter(|_| whose == Whose::Proved)
        .and_then(|defence| defence.judge_message(peer, &info, &head, &normalized, asked_ms));
    let exchange = Exchange { core: Rc::clone(&core), peer, head: request.head.clone(), version, began };
    if plan.keeps_out(&info, &core.block_list, || asked_ms) {
        core.note_refused(peer, &info, Reason::Listed);
        return exchange.refused(&head, &Reply { status: 403, ..Reply::default() });
    }
    if let Some(reply) = refused {
        return exchange.refused(&head, &reply);
    }
    let buffer = &request.head;
    let incoming = Incoming { head: &head, normalized: &normalized, buffer, peer, info, is_absent: false };
    let verdict = plan.police(request.arrival.client, || Ok(asked), &head, &normalized);
    let answer = if verdict != Verdict::Continue {
        // There is no connection to reset, and a client that hears nothing asks again.
        core.metrics.requests_policed_total.add(1);
        Answer::status(503)
    } else if let Some((status, fields)) = answer::refusal(&head, plan.limits.body_bytes) {
        Answer::Local { status, fields: fields.to_vec() }
    } else {
        let awaited = Awaited { exchange: &exchange, defence, incoming, asked_ms };
        let answer = found_or_asked(&core, &plan, incoming, &mut body).await;
        awaited.answered();
        answer
    };
    let now_ms = core.clock.elapsed_ms();
    let from = CameFrom::of(&head, &answer, now_ms.saturating_sub(asked_ms));
    match defence.and_then(|defence| judge_answer(defence, &incoming, answer.code(), from, now_ms)) {
        Some(reply) => exchange.refused(&head, &reply),
        None => exchange.respond(&head, answer, body),
    }
}

/// Tells the defence of an answer of which nothing was sent; what is sent in its place, if it may not go out.
fn judge_answer(
    defence: &Defence,
    incoming: &Incoming<'_>,
    status: u16,
    from: CameFrom,
    now_ms: u64,
) -> Option<Reply> {
    let Incoming { head, normalized, peer, info, .. } = incoming;
    let start = || {
        let client = defence.client(None, *peer, info, now_ms);
        defence.judge_start(client, head, normalized, status, from, now_ms)
    };
    if let Some((_, reply)) = defence.looks_at_starts().then(start).flatten() {
        return Some(reply.unwrap_or(Reply { status: 503, ..Reply::default() }));
    }
    defence.responded_to_message(*peer, info, normalized, status, from, now_ms);
    None
}

/// A request whose client waits for the answer. Dropped before there is one, the client has given it up.
struct Awaited<'a> {
    exchange: &'a Exchange,
    defence: Option<&'a Defence>,
    incoming: Incoming<'a>,
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
            defence.responded_to_message(*peer, info, normalized, ResponseView::GIVEN_UP, from, now_ms);
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

/// Answers a head that is malformed or ambiguous. What is decided about its client acts on the next.
fn refuse(core: &DataCore, arrival: &Arrival, whose: Whose, is_http2: bool, status: u16) -> Response {
    core.metrics.requests_refused_total.add(1);
    if whose != Whose::Unproved {
        let _ = core.answers_malformed(None, arrival.client);
    }
    let (response, bytes) = error_response(core, status);
    let version = if is_http2 { Version::Http2 } else { Version::Http11 };
    core.log_unreadable(arrival.client, version, status, bytes);
    response
}
