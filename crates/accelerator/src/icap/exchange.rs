//! One message shown to a service, up to its decision (RFC 3507 §4.5–§4.9).

use std::net::IpAddr;
use std::rc::Rc;

use tidegate_http::{BodyFraming, Method as HttpMethod, write_chunk, write_last_chunk};
use tidegate_icap::{Body, Method, Options, Request, Sections, Transfer, write_preview_end};
use tokio::time::{Instant, timeout_at};

use crate::icap::link::{Heard, Link};
use crate::icap::service::Service;
use crate::icap::{Failure, Reviewed};
use crate::upstream::{BodyReadError, RequestBody, Upload, UpstreamError, send_all};

/// Of a request's body so much is read before the service is asked: a client that sends it slowly then holds none of
/// the service's connections.
const REQUEST_AHEAD: usize = 64 * 1024;

/// A message, and what the service is told of it.
pub(crate) struct Question<'q> {
    pub method: Method,
    pub client: IpAddr,
    /// The path of the request that it is, or that it answers.
    pub path: &'q [u8],
    pub http_method: HttpMethod,
    pub http_request: &'q [u8],
    pub http_response: Option<&'q [u8]>,
    pub has_body: bool,
}

impl Question<'_> {
    /// Whether a response that a service makes may have content.
    pub(crate) fn wants_content(&self) -> bool {
        self.http_method != HttpMethod::Head
    }
}

/// What the service has decided.
pub(crate) enum Decided<B> {
    /// The message goes on as it is, as far as the service in this state is concerned.
    Unmodified(B, Reviewed),
    /// Something else takes its place.
    Modified(Box<Modification<B>>),
}

/// What takes a message's place.
pub(crate) struct Modification<B> {
    pub sections: Sections,
    /// The HTTP heads.
    pub bytes: Vec<u8>,
    /// From where its body comes.
    pub link: Link,
    /// The message's own body.
    pub body: B,
    /// What still has to be sent of that.
    pub upload: Option<Upload>,
    /// The own body is whole.
    pub is_restorable: bool,
}

/// Why there is no decision.
pub(crate) enum Undecided<B> {
    /// The service failed; the body is whole, if it is here.
    Failed(Failure, Option<B>),
    /// The message's own body could not be read.
    Unread(UpstreamError),
}

impl<B> Undecided<B> {
    fn gone(failure: impl Into<Failure>) -> Self {
        Self::Failed(failure.into(), None)
    }
}

/// What of a body was read before the service is asked.
struct Ahead {
    bytes: Vec<u8>,
    /// There is no more.
    is_all: bool,
}

impl Ahead {
    async fn read<B: RequestBody>(body: &mut B, wanted: usize) -> Result<Self, BodyReadError> {
        let mut ahead = Self { bytes: Vec::new(), is_all: false };
        while ahead.bytes.len() < wanted && !ahead.is_all {
            match body.chunk().await? {
                Some(piece) => ahead.bytes.extend_from_slice(piece),
                None => ahead.is_all = true,
            }
        }
        Ok(ahead)
    }
}

/// Shows a message to the service and waits for what it decides.
pub(crate) async fn ask<B: RequestBody>(
    service: &Rc<Service>,
    question: &Question<'_>,
    mut body: B,
) -> Result<Decided<B>, Undecided<B>> {
    let (options, reviewed) = match service.options().await {
        Ok(valid) => valid,
        Err(failure) => return Err(Undecided::Failed(failure, Some(body))),
    };
    let offered = match question.method {
        Method::Reqmod => options.reqmod,
        _ => options.respmod,
    };
    if !offered {
        return Err(Undecided::Failed(Failure::Unsupported, Some(body)));
    }
    let transfer = options.transfer(question.path);
    if transfer == Transfer::Ignore {
        return Ok(Decided::Unmodified(body, reviewed));
    }
    let preview = options.preview_bytes.filter(|_| question.has_body && transfer == Transfer::Preview);
    let ahead = match question.has_body {
        true => {
            let at_least = if question.method == Method::Reqmod { REQUEST_AHEAD } else { 0 };
            match Ahead::read(&mut body, preview.unwrap_or(0).max(at_least)).await {
                Ok(ahead) => ahead,
                Err(error) => return Err(Undecided::Unread(UpstreamError::Client(error))),
            }
        }
        false => Ahead { bytes: Vec::new(), is_all: true },
    };
    Asking { service, question, options, preview, ahead }.run(body).await
}

struct Asking<'a> {
    service: &'a Rc<Service>,
    question: &'a Question<'a>,
    options: Rc<Options>,
    preview: Option<usize>,
    ahead: Ahead,
}

impl Asking<'_> {
    async fn run<B: RequestBody>(self, body: B) -> Result<Decided<B>, Undecided<B>> {
        let mut lease = match self.service.lease(self.question.client).await {
            Ok(lease) => lease,
            Err(failure) => return Err(self.failed(failure, body)),
        };
        let first = self.first_bytes();
        // A connection that was idle may be dead by now, and then says nothing at all.
        // A body that is streamed could not be sent again.
        if let Some(stream) = self.is_sent_at_once().then(|| self.service.take_idle()).flatten() {
            let mut link = Link::new(stream, Some(lease), self.service.settings.timeout);
            match self.begin(&mut link, &first).await {
                Err(Failure::Connection(UpstreamError::Broken(_) | UpstreamError::Incomplete))
                    if link.is_untouched() =>
                {
                    let Some(again) = link.into_lease() else { return Err(Undecided::gone(Failure::Busy)) };
                    lease = again;
                }
                begun => return self.go_on(begun, link, body).await,
            }
        }
        let stream = match self.service.connect().await {
            Ok(stream) => stream,
            Err(failure) => return Err(self.failed(failure, body)),
        };
        let mut link = Link::new(stream, Some(lease), self.service.settings.timeout);
        let begun = self.begin(&mut link, &first).await;
        self.go_on(begun, link, body).await
    }

    /// Whether the server has all that it gets before it decides.
    fn is_sent_at_once(&self) -> bool {
        self.ahead.is_all || self.preview.is_some()
    }

    /// The ICAP head, the HTTP heads, and what goes with them of the body.
    fn first_bytes(&self) -> Vec<u8> {
        let (question, ahead) = (self.question, &self.ahead);
        let mut out = Vec::with_capacity(1024 + ahead.bytes.len());
        let request = Request {
            method: question.method,
            service: &self.service.settings.url,
            host: &self.service.host,
            client: Some(question.client),
            // Whatever comes back has to be kept until then.
            allow_204: self.options.allow_204 && ahead.is_all,
            preview_bytes: self.preview,
            http_request: question.http_request,
            http_response: question.http_response,
            has_body: question.has_body,
        };
        request.write(&mut out);
        if question.has_body {
            let shown = self.preview.map_or(ahead.bytes.len(), |preview| preview.min(ahead.bytes.len()));
            let is_end = ahead.is_all && shown == ahead.bytes.len();
            if shown > 0 {
                write_chunk(&ahead.bytes[..shown], &mut out);
            }
            match self.preview {
                Some(_) => write_preview_end(is_end, &mut out),
                None if is_end => write_last_chunk([], &mut out),
                None => {}
            }
        }
        out
    }

    /// Sends what is sent at once, and waits for the answer's head.
    async fn begin(&self, link: &mut Link, first: &[u8]) -> Result<Heard, Failure> {
        let timeout = self.service.settings.timeout;
        send_all(link.stream(), first, timeout).await.map_err(Failure::Connection)?;
        if !self.is_sent_at_once() {
            // A body that is streamed: nothing is awaited yet.
            return Ok(Heard::End);
        }
        in_time(Instant::now() + timeout, link.hear()).await
    }

    /// Acts on the answer to what was sent at once.
    async fn go_on<B: RequestBody>(
        self,
        begun: Result<Heard, Failure>,
        mut link: Link,
        mut body: B,
    ) -> Result<Decided<B>, Undecided<B>> {
        let head = match begun {
            Ok(Heard::End) => return self.stream_rest(link, body).await,
            Ok(Heard::Head(head)) => head,
            Ok(_) => return Err(self.failed(Failure::Message, body)),
            Err(failure) => return Err(self.failed(failure, body)),
        };
        let all_shown = self.ahead.is_all && self.preview.is_none_or(|most| self.ahead.bytes.len() <= most);
        match head.status {
            204 => {
                let reviewed = link.reviewed;
                link.finish();
                body.put_back(self.ahead.bytes);
                Ok(Decided::Unmodified(body, reviewed))
            }
            100 if self.preview.is_some() && !all_shown => self.stream_rest(link, body).await,
            200 => {
                let deadline = Instant::now() + self.service.settings.timeout;
                let mut answer = Answer { sections: Some(head.sections) };
                match in_time(deadline, answer.read(&mut link)).await {
                    Ok((sections, bytes)) => {
                        body.put_back(self.ahead.bytes);
                        let (upload, is_restorable) = (None, true);
                        let modification =
                            Modification { sections, bytes, link, body, upload, is_restorable };
                        Ok(Decided::Modified(Box::new(modification)))
                    }
                    Err(failure) => Err(self.failed(failure, body)),
                }
            }
            status => Err(self.failed(Failure::Status(status), body)),
        }
    }

    /// Sends what is left of the body while the answer comes. From here on the message can go on as it was only if all
    /// of its body was read ahead: more is not kept.
    async fn stream_rest<B: RequestBody>(
        self,
        mut link: Link,
        mut body: B,
    ) -> Result<Decided<B>, Undecided<B>> {
        let silence = self.service.settings.timeout;
        let shown = self.preview.unwrap_or(self.ahead.bytes.len());
        let rest = self.ahead.bytes.get(shown..).unwrap_or(&[]).to_vec();
        let kept = self.ahead.is_all.then_some(self.ahead.bytes);
        if !rest.is_empty() {
            body.put_back(rest);
        }
        link.is_sent = false;
        let mut upload = Upload::new(link.stream(), BodyFraming::Chunked, silence, true);
        let (mut answer, mut answered) = (Answer::default(), None);
        while answered.is_none() && !link.is_sent {
            tokio::select! {
                biased;
                heard = answer.read(&mut link) => answered = Some(heard),
                sent = upload.run(&mut body) => match sent {
                    Ok(()) => link.is_sent = true,
                    Err(error @ UpstreamError::Client(_)) => return Err(Undecided::Unread(error)),
                    Err(error) => return Err(Undecided::gone(Failure::Connection(error))),
                },
            }
        }
        let answered = match answered {
            Some(answered) => answered,
            None => in_time(Instant::now() + silence, answer.read(&mut link)).await,
        };
        let (sections, bytes) = match (answered, kept) {
            (Ok(answer), _) => answer,
            (Err(failure), None) => return Err(Undecided::gone(failure)),
            (Err(failure), Some(kept)) => {
                drop(upload);
                body.put_back(kept);
                // What allows 204 allows it after 100 (Continue) too (RFC 3507 §4.6).
                if !matches!(failure, Failure::Status(204)) {
                    return Err(Undecided::Failed(failure, Some(body)));
                }
                let reviewed = link.reviewed;
                link.finish();
                return Ok(Decided::Unmodified(body, reviewed));
            }
        };
        let upload = (!link.is_sent).then_some(upload);
        let modification = Modification { sections, bytes, link, body, upload, is_restorable: false };
        Ok(Decided::Modified(Box::new(modification)))
    }

    fn failed<B: RequestBody>(self, failure: Failure, mut body: B) -> Undecided<B> {
        body.put_back(self.ahead.bytes);
        Undecided::Failed(failure, Some(body))
    }
}

/// The heads of what takes the message's place, as far as they have come.
#[derive(Default)]
struct Answer {
    /// The ICAP head is here, and said this.
    sections: Option<Option<Sections>>,
}

impl Answer {
    /// May be dropped while it waits and called again: nothing is lost.
    async fn read(&mut self, link: &mut Link) -> Result<(Sections, Vec<u8>), Failure> {
        if self.sections.is_none() {
            self.sections = match link.hear().await? {
                Heard::Head(head) if head.status == 200 => Some(head.sections),
                Heard::Head(head) => return Err(Failure::Status(head.status)),
                _ => return Err(Failure::Message),
            };
        }
        let sections = self.sections.clone().flatten();
        let sections = sections.filter(|sections| sections.body_at > 0 && sections.body != Body::Options);
        let sections = sections.ok_or(Failure::Message)?;
        match link.hear().await? {
            Heard::Sections(bytes) => Ok((sections, bytes)),
            _ => Err(Failure::Message),
        }
    }
}

async fn in_time<T>(
    deadline: Instant,
    heard: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let heard = timeout_at(deadline, heard).await;
    heard.unwrap_or(Err(Failure::Connection(UpstreamError::ResponseTimeout)))
}
