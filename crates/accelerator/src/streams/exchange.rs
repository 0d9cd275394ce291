//! One stream: a request and its response (RFC 9113 §8.1, RFC 9114 §4.1).

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tidegate_core::hooks::Slow;
use tidegate_dhttp::driver::{self, Arrival, Body, BodySender};
use tidegate_http::forward::is_hop_by_hop;
use tidegate_http::{
    BodyFraming, FieldId, Fields, HeadLimits, Method, Progress, ResponseHead, ResponseParser,
};
use tokio::sync::mpsc;

use crate::message::{self, Answered, AtOnce, From, Waiting, Whose};
use crate::session::allowance::Allowance;
use crate::streams::remaining::{Misframed, Remaining};
use crate::streams::{End, Open, Shared};

/// Interim responses of a stream that wait to be sent.
const INTERIM_RESPONSES: usize = 16;
/// How much of a request's content is taken, and for how long, when nobody wants it.
const UNWANTED_BYTES: usize = 64 * 1024;
const UNWANTED: Duration = Duration::from_secs(3);
/// How long an answer that no upstream gives waits for the end of the request. Most clients need not be interrupted then.
const MOMENT: Duration = Duration::from_millis(100);
/// The head of a response that the protocol has itself, without content.
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// The client has given a stream up, or is gone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gone;

/// A request whose head is there.
pub(crate) struct Request<I> {
    /// Its head as HTTP/1.1 has it, with the final empty line.
    pub head: Bytes,
    pub method: Method,
    pub expects_continue: bool,
    /// What its content comes by, if there may be any.
    pub content: Option<I>,
}

/// The half of a stream that a request's content comes by. What waits here may be given up and waited for again.
pub(crate) trait Incoming: 'static {
    /// The next piece of the content; `None` at its end.
    async fn piece(&mut self) -> Option<Result<Bytes, Gone>>;

    /// Somebody has taken so many bytes: the client may send as many more.
    fn taken(&mut self, bytes: usize) -> Result<(), Gone>;

    /// The trailer fields as lines, after the end of the content.
    async fn trailers(&mut self) -> Result<Bytes, Gone>;
}

/// The half of a stream that a response goes by.
pub(crate) trait Outgoing: 'static {
    /// Whether the client wants no response any more, or may have none: why.
    fn poll_given_up(&mut self, context: &mut Context<'_>) -> Poll<Ended>;

    /// Sends what comes before a response, unless the protocol has no form for it.
    async fn interim(&mut self, head: &ResponseHead<'_>) -> Result<(), Gone>;

    /// Sends a response's head, which may be all of it.
    async fn head(&mut self, head: &ResponseHead<'_>, is_all: bool) -> Result<(), Ended>;

    /// Waits until the client takes some of the content, so that nothing has to be kept for it meanwhile.
    async fn room(&mut self) -> Result<(), Gone>;

    /// Sends as much of the content as there is room for, and waits for some: how many bytes. `is_last`: with them ends
    /// the response.
    async fn send(&mut self, data: &mut Bytes, is_last: bool) -> Result<usize, Gone>;

    /// Ends the response with these trailer fields.
    async fn trailers(&mut self, fields: &[(&[u8], &[u8])]) -> Result<(), Gone>;

    /// Waits until the client has all of it, where the protocol tells.
    async fn delivered(&mut self, shared: &Shared) -> Result<(), Ended>;

    /// Ends the stream without a response, or without the rest of one.
    fn reset(&mut self, fault: Fault);
}

/// Why a stream ended before its response was whole.
pub(crate) enum Ended {
    /// The client has cancelled it, or is gone.
    Cancelled,
    /// The client took the response too slowly.
    TooSlow,
    /// The connection ends with it.
    Connection(End),
    /// There is no response, or no more of it.
    Failed(Fault),
}

/// What is wrong with a stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Fault {
    /// There is no more of the response.
    Aborted,
    /// The request is malformed.
    Malformed,
    /// The client asks for too much.
    Excessive,
    /// The request's head cannot be read, which is answered with this status.
    Unread(u16),
    /// The request did not come whole in time.
    Incomplete,
}

impl std::convert::From<Gone> for Ended {
    fn from(_: Gone) -> Self {
        Self::Cancelled
    }
}

impl std::convert::From<Misframed> for Ended {
    fn from(_: Misframed) -> Self {
        Self::Failed(Fault::Aborted)
    }
}

/// Answers the request that is awaited: at once, or in a task of its own if that takes waiting.
pub(crate) fn begin<I: Incoming, O: Outgoing>(
    shared: &Rc<Shared>,
    request: impl Future<Output = Result<Request<I>, Ended>> + 'static,
    mut out: O,
) {
    let open = Open::new(shared);
    let mut task = Box::pin(async move {
        let shared = &open.0;
        let answered = match request.await {
            Ok(request) => answer(shared, request, &mut out).await,
            Err(Ended::Failed(Fault::Unread(status))) => refuse(shared, &mut out, status).await,
            Err(ended) => Err(ended),
        };
        match answered {
            Ok(()) => {}
            Err(Ended::Cancelled) => shared.streams.cancelled(),
            Err(Ended::TooSlow) => {
                shared.core.metrics.slow_readers_total.add(1);
                shared.streams.end(End::TooSlow);
            }
            Err(Ended::Connection(end)) => shared.streams.end(end),
            Err(Ended::Failed(fault)) => {
                match fault {
                    Fault::Aborted | Fault::Unread(_) => {}
                    Fault::Malformed | Fault::Excessive => shared.refused(),
                    Fault::Incomplete => {
                        shared.core.metrics.header_timeouts_total.add(1);
                        shared.core.too_slow(shared.carrier.place(), shared.carrier.peer(), Slow::Head);
                    }
                }
                out.reset(fault);
            }
        }
    });
    // Whoever waits afterwards leaves a waker of its own.
    if task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        tokio::task::spawn_local(task);
    }
}

async fn answer<I: Incoming, O: Outgoing>(
    shared: &Rc<Shared>,
    request: Request<I>,
    out: &mut O,
) -> Result<(), Ended> {
    let Request { head, method, expects_continue, content } = request;
    let carrier = &shared.carrier;
    let kept = shared.streams.keep(head.len());
    let Some(_kept) = kept else { return Err(Ended::Failed(Fault::Excessive)) };
    let (body, receiving) = match content {
        None => (Body::full(Bytes::new()), None),
        Some(content) => {
            if expects_continue {
                send_interim(shared, out, CONTINUE).await?;
            }
            let (sender, body) = Body::channel();
            let receiving = tokio::task::spawn_local(receive(Rc::clone(shared), content, sender));
            (body, Some(receiving))
        }
    };
    let arrival = Arrival { client: carrier.peer(), local: None, server: None };
    let request = driver::Request { arrival, head, body };
    let from = From { local: shared.local, whose: whose(shared), is_encrypted: carrier.is_encrypted() };
    // For what is cancelled by now nothing is begun.
    if let Poll::Ready(ended) = out.poll_given_up(&mut Context::from_waker(Waker::noop())) {
        return Err(given_up(shared, ended));
    }
    let answered = match message::answer_at_once(&shared.core, from, &request) {
        AtOnce::Answered(answered) => {
            // Nobody wants its content.
            drop(request);
            answered
        }
        // Boxed: what is answered at once is not moved about with the room that this takes.
        AtOnce::Waits(waiting) => Box::pin(wait(shared, out, waiting, from, request)).await?,
    };
    let Answered { response, holds_upstream, is_last } = answered.map_err(ended_with)?;
    if let Some(receiving) = receiving.filter(|_| !holds_upstream) {
        let _ = tokio::time::timeout(MOMENT, receiving).await;
    }
    let mut delivered = deliver(shared, out, response.into_wire(), method, holds_upstream).await;
    if is_last {
        shared.streams.end(End::LastStreams);
    }
    if delivered.is_ok() {
        delivered = out.delivered(shared).await;
    }
    delivered
}

/// Answers a request whose head is not known.
async fn refuse<O: Outgoing>(shared: &Shared, out: &mut O, status: u16) -> Result<(), Ended> {
    let carrier = &shared.carrier;
    let answered =
        message::refuse(&shared.core, carrier.peer(), whose(shared), status).map_err(ended_with)?;
    deliver(shared, out, answered.response.into_wire(), Method::Get, false).await?;
    out.delivered(shared).await
}

fn whose(shared: &Shared) -> Whose {
    let Shared { carrier, version, .. } = shared;
    Whose::Connected { place: carrier.place(), introduced: carrier.introduced(), spoken: *version }
}

fn ended_with(end: message::End) -> Ended {
    Ended::Connection(match end {
        message::End::Close => End::Closed,
        message::End::Reset => End::Reset,
    })
}

/// Counts a request that has no response because of its client.
fn given_up(shared: &Shared, ended: Ended) -> Ended {
    if matches!(ended, Ended::Cancelled) && !shared.core.is_cut_off() {
        shared.core.metrics.clients_gone_total.add(1);
    }
    ended
}

/// Waits for a response, and sends those that come before it.
async fn wait<O: Outgoing>(
    shared: &Shared,
    out: &mut O,
    waiting: Box<Waiting>,
    from: From,
    request: driver::Request,
) -> Result<Result<Answered, message::End>, Ended> {
    let (sender, mut interim) = mpsc::channel(INTERIM_RESPONSES);
    let mut answer = pin!(waiting.answer(&shared.core, from, request, Some(sender)));
    let answered = loop {
        tokio::select! {
            biased;
            ended = poll_fn(|context| out.poll_given_up(context)) => return Err(given_up(shared, ended)),
            Some(head) = interim.recv() => send_interim(shared, out, &head).await?,
            answered = &mut answer => break answered,
        }
    };
    while let Ok(head) = interim.try_recv() {
        send_interim(shared, out, &head).await?;
    }
    Ok(answered)
}

async fn send_interim<O: Outgoing>(shared: &Shared, out: &mut O, head: &[u8]) -> Result<(), Ended> {
    let mut parser = ResponseParser::new(HeadLimits::NONE);
    if let Ok(Progress::Complete { .. }) = parser.parse(head) {
        let mut content = Content { shared, out, allowance: of_responses(shared), holds_upstream: true };
        content.waiting(async |out: &mut O| out.interim(&parser.head(head)).await).await?;
        shared.core.metrics.responses_1xx_total.add(1);
    }
    Ok(())
}

/// What clients may be behind with taking a response.
pub(crate) fn of_responses(shared: &Shared) -> Allowance {
    Allowance::new(shared.core.with_plan(|plan| plan.limits.response_min_rate_bytes_per_s))
}

/// Hands a request's content on as somebody takes it, from a client that keeps up the minimum rate.
async fn receive<I: Incoming>(shared: Rc<Shared>, mut content: I, mut sender: BodySender) {
    let (core, carrier) = (&shared.core, &shared.carrier);
    let mut allowance = Allowance::new(core.with_plan(|plan| plan.limits.body_min_rate_bytes_per_s));
    let mut received = 0;
    loop {
        let start_ms = core.clock.elapsed_ms();
        let debts = carrier.debts();
        let (stalled, awaited) = (debts.stalls(), debts.owes());
        let piece = tokio::select! {
            biased;
            () = sender.unwanted() => {
                drop((stalled, awaited));
                return discard(content).await;
            }
            piece = within(&allowance, content.piece()) => piece,
        };
        drop((stalled, awaited));
        allowance.spend(core.clock.elapsed_ms().saturating_sub(start_ms));
        match piece {
            None => {
                core.metrics.slow_bodies_total.add(1);
                core.too_slow(carrier.place(), carrier.peer(), Slow::Body);
                return sender.give_up();
            }
            Some(None) => {
                // They are here: they have ended the content.
                let Ok(trailers) = content.trailers().await else { return };
                return sender.end_with(trailers);
            }
            Some(Some(Err(Gone))) => return,
            Some(Some(Ok(piece))) => {
                let length = piece.len();
                received += length as u64;
                if core.refuses_body((carrier.place(), carrier.peer()), &piece, received) {
                    return;
                }
                allowance.earn(shared.share(length));
                // Room for more is given when somebody has taken this.
                let is_wanted = sender.send(piece).await.is_ok();
                if content.taken(length).is_err() {
                    return;
                }
                if !is_wanted {
                    return discard(content).await;
                }
            }
        }
    }
}

/// A client that has its answer owes no more, and is told so by the end of the stream (RFC 9113 §8.1). One that has sent
/// nearly all is not interrupted.
async fn discard<I: Incoming>(mut content: I) {
    let mut left = UNWANTED_BYTES;
    let rest = async {
        while let Some(Ok(piece)) = content.piece().await
            && left >= piece.len()
            && content.taken(piece.len()).is_ok()
        {
            left -= piece.len();
        }
    };
    let _ = tokio::time::timeout(UNWANTED, rest).await;
}

/// What `future` comes to, if the peer does not fall behind meanwhile.
async fn within<F: Future>(allowance: &Allowance, future: F) -> Option<F::Output> {
    match allowance.left_ms() {
        None => Some(future.await),
        Some(left_ms) => tokio::time::timeout(Duration::from_millis(left_ms), future).await.ok(),
    }
}

/// Sends a response that comes as HTTP/1.1 has it.
async fn deliver<O: Outgoing>(
    shared: &Shared,
    out: &mut O,
    mut http: Body,
    method: Method,
    holds_upstream: bool,
) -> Result<(), Ended> {
    let aborted = Ended::Failed(Fault::Aborted);
    let Some(Ok(first)) = http.next().await else { return Err(aborted) };
    let mut parser = ResponseParser::new(HeadLimits::NONE);
    parser.reset(method);
    let Ok(Progress::Complete { length }) = parser.parse(&first) else { return Err(aborted) };
    let head = parser.head(&first);
    let framing = head.framing;
    let is_bare = matches!(framing, BodyFraming::None | BodyFraming::Length(0));
    let mut content = Content { shared, out, allowance: of_responses(shared), holds_upstream };
    content.waiting(async |out: &mut O| out.head(&head, is_bare).await).await?;
    if is_bare {
        return Ok(());
    }
    let mut piece = first.slice(length..);
    let mut remaining = Remaining::new(framing);
    loop {
        let data = remaining.take(piece)?;
        let is_last = remaining.is_done();
        // What `Connection` names is not among them any more.
        let trailers: Vec<_> = remaining
            .decoder()
            .into_iter()
            .flat_map(|decoder| decoder.trailers(Fields::new(b"", &[], 0)))
            .filter(|(name, _)| !is_hop_by_hop(FieldId::from_name(name)))
            .collect();
        if !data.is_empty() || (is_last && trailers.is_empty()) {
            content.send(data, is_last && trailers.is_empty()).await?;
        }
        if is_last {
            return match trailers.as_slice() {
                [] => Ok(()),
                trailers => content.waiting(async |out: &mut O| out.trailers(trailers).await).await,
            };
        }
        // With room for it: a client that takes nothing has nothing lie about. Of unknown length there may be no more to
        // come but the end, for which there is always room.
        if matches!(remaining, Remaining::Length(_)) {
            content.room().await?;
        }
        piece = content.next(&mut http).await?;
    }
}

/// A response's content on its way to a client that keeps up the minimum rate.
struct Content<'s, O> {
    shared: &'s Shared,
    out: &'s mut O,
    allowance: Allowance,
    holds_upstream: bool,
}

impl<O: Outgoing> Content<'_, O> {
    /// The next piece of the response, unless the client loses interest in it.
    async fn next(&mut self, http: &mut Body) -> Result<Bytes, Ended> {
        tokio::select! {
            piece = http.next() => piece.and_then(Result::ok).ok_or(Ended::Failed(Fault::Aborted)),
            ended = poll_fn(|context| self.out.poll_given_up(context)) => Err(ended),
        }
    }

    async fn send(&mut self, mut data: Bytes, is_last: bool) -> Result<(), Ended> {
        loop {
            let sent = self.waiting(async |out: &mut O| out.send(&mut data, is_last).await).await?;
            self.allowance.earn(self.shared.share(sent));
            if data.is_empty() {
                return Ok(());
            }
        }
    }

    async fn room(&mut self) -> Result<(), Ended> {
        self.waiting(async |out: &mut O| out.room().await).await
    }

    /// Does what may have to wait for the client to take something.
    async fn waiting<T, E: Into<Ended>>(
        &mut self,
        work: impl AsyncFnOnce(&mut O) -> Result<T, E>,
    ) -> Result<T, Ended> {
        let clock = &self.shared.core.clock;
        let start_ms = clock.elapsed_ms();
        let debts = self.shared.carrier.debts();
        let _awaited = debts.owes();
        let _stalled = self.holds_upstream.then(|| debts.stalls());
        let done = within(&self.allowance, work(self.out)).await;
        self.allowance.spend(clock.elapsed_ms().saturating_sub(start_ms));
        done.ok_or(Ended::TooSlow)?.map_err(Into::into)
    }
}
