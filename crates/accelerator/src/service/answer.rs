//! What answers a request that the cache alone could not: an ICAP service, a root directory, or an upstream.

use std::cell::Cell;
use std::net::IpAddr;
use std::rc::Rc;

use tidegate_core::Reason;
use tidegate_http::cache::Forwarded;
use tidegate_http::normalize::{Normalized, normalize};
use tidegate_http::{BodyFraming, Method, RequestHead};

use crate::cache::fill::{self, Forward, Streamed};
use crate::cache::lookup::Hit;
use crate::data_core::DataCore;
use crate::icap::{self, AdaptedRequest, Review};
use crate::service::client_info::ClientInfo;
use crate::service::fetch::Fetch;
use crate::service::plan::Plan;
use crate::service::routes::Destination;
use crate::static_files::serve::{self, OpenFile};
use crate::upstream::{EmptyBody, RequestBody, Response};

/// What answers a request.
pub(crate) enum Answer {
    /// A stored response.
    Stored(Hit),
    /// A response on its way from an upstream.
    Streamed(Box<Streamed>),
    /// A file that is too large for the cache.
    File(OpenFile),
    /// What shows a certificate authority that the host is ours (RFC 8555 §8.3).
    KeyAuthorization(String),
    /// An error or a redirect made here; `fields` are further field lines.
    Local { status: u16, fields: Vec<u8> },
}

impl Answer {
    pub(crate) fn status(status: u16) -> Self {
        Self::Local { status, fields: Vec::new() }
    }

    /// The status that the client is told; of a file it is not known yet whether all of it is asked for.
    pub(crate) fn code(&self) -> u16 {
        match self {
            Self::Stored(hit) => hit.status,
            Self::Streamed(streamed) => streamed.status,
            Self::File(_) | Self::KeyAuthorization(_) => 200,
            Self::Local { status, .. } => *status,
        }
    }

    /// Whether it is the answer to another request, for which this one has waited.
    pub(crate) fn is_collapsed(&self) -> bool {
        let forward = match self {
            Self::Stored(hit) => hit.forwarded,
            Self::Streamed(streamed) => Some(streamed.forward),
            Self::File(_) | Self::KeyAuthorization(_) | Self::Local { .. } => None,
        };
        forward.is_some_and(|forward| forward.collapsed)
    }
}

/// A request and where it came from.
#[derive(Clone, Copy)]
pub(crate) struct Incoming<'a> {
    pub head: &'a RequestHead<'a>,
    pub normalized: &'a Normalized<'a>,
    /// The head's bytes, from which a background validation reads the request again.
    pub buffer: &'a [u8],
    /// Who is connected to us: the client or a proxy.
    pub peer: IpAddr,
    pub info: ClientInfo<'a>,
    /// The cache had nothing for the URL a moment ago.
    pub is_absent: bool,
}

/// Why no request of this kind is answered: the status, and further field lines.
pub(crate) fn refusal(head: &RequestHead<'_>, most_body_bytes: u64) -> Option<(u16, &'static [u8])> {
    match head.framing {
        _ if head.method == Method::Connect => {
            Some((405, b"Allow: GET, HEAD, OPTIONS, POST, PUT, PATCH, DELETE\r\n"))
        }
        BodyFraming::Length(length) if length > most_body_bytes => Some((413, b"")),
        _ => None,
    }
}

/// Sends a client to another URL for good, with the method that it has used (RFC 9110 §15.4.2, §15.4.9).
pub(crate) fn redirect(method: Method, url: Option<Vec<u8>>) -> Answer {
    let status = if matches!(method, Method::Get | Method::Head) { 301 } else { 308 };
    match url {
        Some(url) => Answer::Local { status, fields: [b"Location: ", &url[..], b"\r\n"].concat() },
        None => Answer::status(400),
    }
}

/// Answers a request that the cache alone could not.
pub(crate) async fn answer<B: RequestBody>(core: &Rc<DataCore>, incoming: Incoming<'_>, body: B) -> Answer {
    if core.with_plan(|plan| plan.reviews_request(incoming.head.method_bytes, incoming.normalized)) {
        // Boxed, as below: what few requests need is not made room for in each.
        return Box::pin(review(core, incoming, body)).await;
    }
    answer_reviewed(core, incoming, body).await
}

/// Has an ICAP service look at a request, and answers what it makes of it.
async fn review<B: RequestBody>(core: &Rc<DataCore>, incoming: Incoming<'_>, body: B) -> Answer {
    let plan = core.plan();
    match icap::review_request(core, &incoming, body).await {
        Review::Unchanged(body) => answer_reviewed(core, incoming, body).await,
        Review::Refused(status) => Answer::status(status),
        Review::Answered(response) => {
            if response.head().status == 403 {
                core.note_refused(incoming.peer, &incoming.info, Reason::Content);
            }
            answer_of_service(core, &plan, response)
        }
        Review::Adapted(adapted) => {
            let AdaptedRequest { bytes, parsed, body } = *adapted;
            let head = RequestHead { version: incoming.head.version, ..parsed.head(&bytes) };
            let mut scratch = Vec::new();
            let Ok(normalized) = normalize(&head, plan.personality, &mut scratch) else {
                return Answer::status(502);
            };
            let adapted = Incoming {
                head: &head,
                normalized: &normalized,
                buffer: &bytes,
                is_absent: false,
                ..incoming
            };
            let mut answer = match body {
                Some(body) => Box::pin(answer_reviewed(core, adapted, body)).await,
                None => Box::pin(answer_reviewed(core, adapted, EmptyBody)).await,
            };
            // A server that answers early gets no more of the body: what the client still sends is not what the service
            // has put in its place.
            if let Answer::Streamed(streamed) = &mut answer {
                drop(streamed.take_upload());
            }
            answer
        }
    }
}

/// A service has answered in the upstream's place.
fn answer_of_service(core: &DataCore, plan: &Plan, response: Box<Response>) -> Answer {
    let mut head = Vec::with_capacity(512);
    fill::write_client_head(&response.head(), &plan.pseudonym, &core.clock.date(), &mut head);
    let forward = Forward {
        reason: Forwarded::Bypass,
        upstream_status: 0,
        stored: false,
        collapsed: false,
        variant: 0,
    };
    Answer::Streamed(Box::new(Streamed::passing(response, head, forward)))
}

/// Answers a request that may go on.
async fn answer_reviewed<B: RequestBody>(core: &Rc<DataCore>, incoming: Incoming<'_>, body: B) -> Answer {
    let (plan, pools) = core.plan_and_pools();
    match plan.route(incoming.normalized) {
        None => Answer::status(404),
        Some(Destination::Root(root)) => {
            Box::pin(serve::answer(core, &plan, root, incoming.head, incoming.normalized)).await
        }
        Some(Destination::Redirect(index)) => {
            plan.routes.redirect(index, incoming.head.method, incoming.normalized)
        }
        Some(Destination::Upstream(to)) => {
            let fetch = Fetch { core, plan: &plan, pools: &pools, to, incoming, variant: Cell::new(0) };
            fetch.answer(body).await
        }
    }
}
