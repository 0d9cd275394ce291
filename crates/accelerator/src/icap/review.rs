//! What a service's decision means for a request or a response, and what its failure does.

use std::rc::Rc;

use tidegate_core::Reason;
use tidegate_http::{BodyFraming, ParsedRequest, ParsedResponse};
use tidegate_icap::{Body, Method};

use crate::data_core::DataCore;
use crate::icap::Failure;
use crate::icap::adapted::AdaptedBody;
use crate::icap::exchange::{Decided, Modification, Question, Undecided, ask};
use crate::icap::heads::{self, Adapted};
use crate::icap::service::Service;
use crate::service::answer::Incoming;
use crate::settings::IcapSubject;
use crate::upstream::{BodyReadError, Head, RequestBody, Response, UpstreamError};

/// What becomes of a request.
pub(crate) enum Review<B> {
    /// It goes on as it is.
    Unchanged(B),
    /// This request goes on in its place.
    Adapted(Box<AdaptedRequest<B>>),
    /// It goes no further: this is the answer (RFC 3507 §3.1, "request satisfaction").
    Answered(Box<Response>),
    /// It goes no further.
    Refused(u16),
}

/// The request that a service has put in the place of another.
pub(crate) struct AdaptedRequest<B> {
    pub bytes: Vec<u8>,
    pub parsed: ParsedRequest,
    /// `None`: it has none.
    pub body: Option<AdaptedBody<B>>,
}

/// A response's body, as a service is shown it.
pub(crate) struct OriginBody(pub Box<Response>);

impl RequestBody for OriginBody {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        self.0.chunk().await.map_err(|_| BodyReadError::Adaptation)
    }

    fn put_back(&mut self, bytes: Vec<u8>) {
        self.0.put_back(bytes);
    }

    fn is_replayable(&self) -> bool {
        false
    }
}

/// Counts a message as parked for as long as it is.
struct Parked<'c>(&'c DataCore);

impl<'c> Parked<'c> {
    fn new(core: &'c DataCore) -> Self {
        core.metrics.icap_exchanges_total.add(1);
        core.metrics.icap_waiting.add(1);
        Self(core)
    }
}

impl Drop for Parked<'_> {
    fn drop(&mut self) {
        self.0.metrics.icap_waiting.sub(1);
    }
}

/// Lets the service that is responsible look at a request.
pub(crate) async fn review_request<B: RequestBody>(
    core: &Rc<DataCore>,
    incoming: &Incoming<'_>,
    body: B,
) -> Review<B> {
    let (head, normalized) = (incoming.head, incoming.normalized);
    let services = core.icap_services();
    let found = services.find(IcapSubject::Requests, head.method_bytes, normalized);
    let Some(service) = found else { return Review::Unchanged(body) };
    let mut shown = Vec::with_capacity(1024);
    heads::write_request(head, normalized, &mut shown);
    let question = Question {
        method: Method::Reqmod,
        client: incoming.info.client,
        path: normalized.path,
        http_method: head.method,
        http_request: &shown,
        http_response: None,
        has_body: !matches!(head.framing, BodyFraming::None | BodyFraming::Length(0)),
    };
    let parked = Parked::new(core);
    let decided = ask(&service, &question, body).await;
    drop(parked);
    match decided {
        Ok(Decided::Unmodified(body, _)) => {
            service.succeeded();
            Review::Unchanged(body)
        }
        Ok(Decided::Modified(modification)) => match adapt_request(core, &question, *modification) {
            Ok(review) => {
                service.succeeded();
                core.metrics.icap_modified_total.add(1);
                review
            }
            Err(body) => undecided(core, &service, Failure::Message, body),
        },
        Err(Undecided::Failed(failure, body)) => undecided(core, &service, failure, body),
        Err(Undecided::Unread(error)) => Review::Refused(error.status()),
    }
}

/// The service is asked in vain: whether a message goes on without it is the operator's choice, if it still can.
fn undecided<B>(core: &DataCore, service: &Service, failure: Failure, body: Option<B>) -> Review<B> {
    match may_pass(core, service, &failure).then_some(body).flatten() {
        Some(body) => Review::Unchanged(body),
        None => Review::Refused(503),
    }
}

fn may_pass(core: &DataCore, service: &Service, failure: &Failure) -> bool {
    service.failed(failure);
    core.metrics.icap_failures_total.add(1);
    let may_pass = if failure.is_busy() { service.settings.busy_open } else { service.settings.fail_open };
    if may_pass {
        core.metrics.icap_bypassed_total.add(1);
    }
    may_pass
}

/// The error is the request's own body, if it is whole.
fn adapt_request<B: RequestBody>(
    core: &Rc<DataCore>,
    question: &Question<'_>,
    modification: Modification<B>,
) -> Result<Review<B>, Option<B>> {
    let Modification { sections, bytes, link, body, upload, is_restorable } = modification;
    let part = |range: Option<std::ops::Range<usize>>| range.and_then(|range| bytes.get(range));
    if let Some(head) = part(sections.response) {
        let adapted = match sections.body {
            Body::None => heads::read_response(head, false, question.http_method).map(|head| (head, None)),
            Body::Response => heads::read_response(head, true, question.http_method).map(|head| {
                let content = AdaptedBody::<OriginBody>::new(link, None, head.length);
                (head, question.wants_content().then_some(content))
            }),
            _ => None,
        };
        return match adapted {
            Some((head, content)) => Ok(Review::Answered(Response::adapted(of(head), content))),
            None => Err(is_restorable.then_some(body)),
        };
    }
    let has_body = sections.body == Body::Request;
    let limits = core.with_plan(|plan| plan.limits.head);
    let adapted = part(sections.request)
        .filter(|_| has_body || sections.body == Body::None)
        .and_then(|head| heads::read_request(head, has_body, limits));
    let Some(Adapted { bytes, parsed, length }) = adapted else {
        return Err(is_restorable.then_some(body));
    };
    let body = match has_body {
        true => Some(AdaptedBody::new(link, upload.map(|upload| (upload, body)), length)),
        false => {
            link.finish();
            None
        }
    };
    Ok(Review::Adapted(Box::new(AdaptedRequest { bytes, parsed, body })))
}

fn of(adapted: Adapted<ParsedResponse>) -> Head {
    Head { bytes: adapted.bytes, parsed: adapted.parsed }
}

/// Lets the service that is responsible look at a response.
pub(crate) async fn review_response(
    core: &Rc<DataCore>,
    incoming: &Incoming<'_>,
    mut response: Box<Response>,
) -> Result<Box<Response>, UpstreamError> {
    let request = incoming.head;
    let services = core.icap_services();
    let found = services.find(IcapSubject::Responses, request.method_bytes, incoming.normalized);
    // Of a 304 the stored response was looked at; a new protocol is none of HTTP's.
    let is_subject = !matches!(response.head().status, 101 | 304);
    let Some(service) = found.filter(|_| is_subject) else { return Ok(response) };
    let (mut asked, mut shown) = (Vec::with_capacity(1024), Vec::with_capacity(1024));
    heads::write_request(request, incoming.normalized, &mut asked);
    heads::write_response(&response.head(), &mut shown);
    let question = Question {
        method: Method::Respmod,
        client: incoming.info.client,
        path: incoming.normalized.path,
        http_method: request.method,
        http_request: &asked,
        http_response: Some(&shown),
        has_body: !matches!(response.head().framing, BodyFraming::None | BodyFraming::Length(0)),
    };
    let was_forbidden = response.head().status == 403;
    let (interim, upload) = (response.take_interim(), response.take_upload());
    let parked = Parked::new(core);
    let decided = ask(&service, &question, OriginBody(response)).await;
    drop(parked);
    let mut reviewed = match decided {
        Ok(Decided::Unmodified(OriginBody(mut response), reviewed)) => {
            service.succeeded();
            response.reviewed = reviewed;
            response
        }
        Ok(Decided::Modified(modification)) => {
            let reviewed = modification.link.reviewed;
            match adapt_response(&question, *modification) {
                Ok(mut response) => {
                    service.succeeded();
                    core.metrics.icap_modified_total.add(1);
                    if response.head().status == 403 && !was_forbidden {
                        core.note_refused(incoming.peer, &incoming.info, Reason::Content);
                    }
                    response.reviewed = reviewed;
                    response
                }
                Err(body) => pass(core, &service, Failure::Message, body)?,
            }
        }
        Err(Undecided::Failed(failure, body)) => pass(core, &service, failure, body)?,
        Err(Undecided::Unread(_)) => return Err(UpstreamError::Incomplete),
    };
    reviewed.restore(interim, upload);
    Ok(reviewed)
}

fn pass(
    core: &DataCore,
    service: &Service,
    failure: Failure,
    body: Option<OriginBody>,
) -> Result<Box<Response>, UpstreamError> {
    let body = may_pass(core, service, &failure).then_some(body).flatten();
    body.map(|OriginBody(response)| response).ok_or(UpstreamError::Unreviewed)
}

fn adapt_response(
    question: &Question<'_>,
    modification: Modification<OriginBody>,
) -> Result<Box<Response>, Option<OriginBody>> {
    let Modification { sections, bytes, link, body, upload, is_restorable } = modification;
    let has_body = sections.body == Body::Response;
    let adapted = sections
        .response
        .and_then(|range| bytes.get(range))
        .filter(|_| has_body || sections.body == Body::None)
        .and_then(|head| heads::read_response(head, has_body, question.http_method));
    let Some(head) = adapted else { return Err(is_restorable.then_some(body)) };
    let length = head.length;
    let content = match has_body {
        true => {
            let content = AdaptedBody::new(link, upload.map(|upload| (upload, body)), length);
            question.wants_content().then_some(content)
        }
        false => {
            link.finish();
            None
        }
    };
    Ok(Response::adapted(of(head), content))
}
