//! One stream: a request and its response (RFC 9113 §8.1).

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{Request, Response, StatusCode, header};
use tidegate_core::hooks::Slow;
use tidegate_dhttp::driver::{self, Arrival, Body, BodySender};
use tidegate_http::{BodyFraming, ChunkLimits, ChunkedDecoder, Fields, Method};
use tokio::sync::mpsc;

use crate::http2::{End, Shared, Streams, heads};
use crate::message::{self, Answered, AtOnce, From, Waiting, Whose};
use crate::session::allowance::Allowance;

/// Interim responses of a stream that wait to be sent.
const INTERIM_RESPONSES: usize = 16;
/// How much of a request's content is taken, and for how long, when nobody wants it.
const UNWANTED_BYTES: usize = 64 * 1024;
const UNWANTED: Duration = Duration::from_secs(3);
/// How long an answer that no upstream gives waits for the end of the request. Most clients need not be interrupted then.
const MOMENT: Duration = Duration::from_millis(100);

/// Bytes of heads of requests that wait for an answer, on one connection. What a client has said once it can say again in a
/// few bytes (RFC 7541 §2.3), so that heads take much more than what comes over the line.
const HEADS_BYTES: usize = 1024 * 1024;

/// A request's head, for as long as it waits.
struct KeptHead<'s>(&'s Streams, usize);

impl<'s> KeptHead<'s> {
    /// `None` if there are too many.
    fn keep(streams: &'s Streams, bytes: usize) -> Option<Self> {
        let all = streams.head_bytes.get() + bytes;
        (all <= HEADS_BYTES).then(|| {
            streams.head_bytes.set(all);
            Self(streams, bytes)
        })
    }
}

impl Drop for KeptHead<'_> {
    fn drop(&mut self) {
        self.0.head_bytes.set(self.0.head_bytes.get() - self.1);
    }
}

/// Counts a stream among those of its connection.
struct Open(Rc<Shared>);

impl Open {
    fn new(shared: &Rc<Shared>) -> Self {
        let streams = &shared.streams;
        streams.open.set(streams.open.get() + 1);
        streams.begun.set(streams.begun.get() + 1);
        Self(Rc::clone(shared))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let streams = &self.0.streams;
        streams.open.set(streams.open.get() - 1);
        streams.ended.notify_one();
    }
}

/// Why a stream ended before its response was whole.
enum Ended {
    /// The client has cancelled it, or is gone.
    Cancelled,
    /// The client took the response too slowly.
    TooSlow,
    /// The connection ends with it.
    Connection(End),
    /// There is no more of the response.
    Aborted,
}

impl std::convert::From<h2::Error> for Ended {
    fn from(_: h2::Error) -> Self {
        Self::Cancelled
    }
}

/// Answers a request: at once, or in a task of its own if that takes waiting.
pub(super) fn begin(shared: &Rc<Shared>, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
    let open = Open::new(shared);
    let mut task = Box::pin(async move {
        let shared = &open.0;
        match answer(shared, request, &mut respond).await {
            Ok(()) => {}
            Err(Ended::Cancelled) => {
                let cancelled = &shared.streams.cancelled;
                cancelled.set(cancelled.get() + 1);
            }
            Err(Ended::TooSlow) => {
                shared.core.metrics.slow_readers_total.add(1);
                shared.streams.end(End::TooSlow);
            }
            Err(Ended::Connection(end)) => shared.streams.end(end),
            Err(Ended::Aborted) => respond.send_reset(Reason::INTERNAL_ERROR),
        }
    });
    // Whoever waits afterwards leaves a waker of its own.
    if task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        tokio::task::spawn_local(task);
    }
}

async fn answer(
    shared: &Rc<Shared>,
    request: Request<RecvStream>,
    respond: &mut SendResponse<Bytes>,
) -> Result<(), Ended> {
    let (parts, content) = request.into_parts();
    let has_content = !content.is_end_stream();
    let Ok(head) = heads::write_request(&parts, has_content) else {
        shared.refused();
        // RFC 9113 §8.1.1.
        respond.send_reset(Reason::PROTOCOL_ERROR);
        return Ok(());
    };
    let method = Method::from_bytes(parts.method.as_str().as_bytes());
    let Some(_kept) = KeptHead::keep(&shared.streams, head.len()) else {
        shared.refused();
        respond.send_reset(Reason::ENHANCE_YOUR_CALM);
        return Ok(());
    };
    let expects_continue = parts
        .headers
        .get(header::EXPECT)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    drop(parts);
    let (body, receiving) = match has_content {
        false => (Body::full(Bytes::new()), None),
        true => {
            if expects_continue {
                let mut interim = Response::new(());
                *interim.status_mut() = StatusCode::CONTINUE;
                respond.send_informational(interim)?;
                shared.core.metrics.responses_1xx_total.add(1);
            }
            let (sender, body) = Body::channel();
            let receiving = tokio::task::spawn_local(receive(Rc::clone(shared), content, sender));
            (body, Some(receiving))
        }
    };
    let arrival = Arrival { client: shared.client.peer(), local: None, server: None };
    let request = driver::Request { arrival, head: head.into(), body };
    let from = From {
        local: shared.local,
        whose: Whose::Connected { place: shared.client.place, introduced: shared.client.introduced() },
        is_encrypted: shared.client.is_encrypted(),
    };
    // For what is cancelled by now nothing is begun.
    if respond.poll_reset(&mut Context::from_waker(Waker::noop())).is_ready() {
        return Err(cancelled(shared));
    }
    let answered = match message::answer_at_once(&shared.core, from, &request) {
        AtOnce::Answered(answered) => {
            // Nobody wants its content.
            drop(request);
            answered
        }
        // Boxed: what is answered at once is not moved about with the room that this takes.
        AtOnce::Waits(waiting) => Box::pin(wait(shared, respond, waiting, from, request)).await?,
    };
    let Answered { response, holds_upstream, is_last } = answered.map_err(|end| {
        Ended::Connection(match end {
            message::End::Close => End::Closed,
            message::End::Reset => End::Reset,
        })
    })?;
    if let Some(receiving) = receiving.filter(|_| !holds_upstream) {
        let _ = tokio::time::timeout(MOMENT, receiving).await;
    }
    let delivered = deliver(shared, respond, response.into_wire(), method, holds_upstream).await;
    if is_last {
        shared.streams.end(End::LastStreams);
    }
    delivered
}

fn cancelled(shared: &Shared) -> Ended {
    shared.core.metrics.clients_gone_total.add(1);
    Ended::Cancelled
}

/// Waits for a response, and sends those that come before it.
async fn wait(
    shared: &Shared,
    respond: &mut SendResponse<Bytes>,
    waiting: Box<Waiting>,
    from: From,
    request: driver::Request,
) -> Result<Result<Answered, message::End>, Ended> {
    let (sender, mut interim) = mpsc::channel(INTERIM_RESPONSES);
    let mut answer = pin!(waiting.answer(&shared.core, from, request, Some(sender)));
    let answered = loop {
        tokio::select! {
            biased;
            _ = poll_fn(|context| respond.poll_reset(context)) => return Err(cancelled(shared)),
            Some(head) = interim.recv() => send_interim(shared, respond, head.into())?,
            answered = &mut answer => break answered,
        }
    };
    while let Ok(head) = interim.try_recv() {
        send_interim(shared, respond, head.into())?;
    }
    Ok(answered)
}

/// Sends what comes before a response (RFC 9113 §8.1), unless HTTP/2 has no form for it.
fn send_interim(shared: &Shared, respond: &mut SendResponse<Bytes>, head: Bytes) -> Result<(), h2::Error> {
    if let Some(interim) = heads::read_response(&head, Method::Get) {
        respond.send_informational(interim.head)?;
        shared.core.metrics.responses_1xx_total.add(1);
    }
    Ok(())
}

/// Hands a request's content on as somebody takes it, from a client that keeps up the minimum rate.
async fn receive(shared: Rc<Shared>, mut content: RecvStream, mut sender: BodySender) {
    let core = &shared.core;
    let mut allowance = Allowance::new(core.with_plan(|plan| plan.limits.body_min_rate_bytes_per_s));
    let mut received = 0;
    loop {
        let start_ms = core.clock.elapsed_ms();
        let (stalled, awaited) = (shared.client.stalls(), shared.client.owes());
        let piece = tokio::select! {
            biased;
            () = sender.unwanted() => {
                drop((stalled, awaited));
                return discard(content).await;
            }
            piece = within(&allowance, poll_fn(|context| content.poll_data(context))) => piece,
        };
        drop((stalled, awaited));
        allowance.spend(core.clock.elapsed_ms().saturating_sub(start_ms));
        match piece {
            None => {
                core.metrics.slow_bodies_total.add(1);
                core.too_slow(shared.client.place, shared.client.peer(), Slow::Body);
                return sender.give_up();
            }
            Some(None) => {
                // They are here: they have ended the content.
                let Ok(trailers) = content.trailers().await else { return };
                return sender.end_with(heads::trailer_section(&trailers.unwrap_or_default()));
            }
            Some(Some(Err(_))) => return,
            Some(Some(Ok(piece))) => {
                let length = piece.len();
                received += length as u64;
                if core.refuses_body(&shared.client, &piece, received) {
                    return;
                }
                allowance.earn(shared.share(length));
                // Room for more is given when somebody has taken this.
                let is_wanted = sender.send(piece).await.is_ok();
                if content.flow_control().release_capacity(length).is_err() {
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
async fn discard(mut content: RecvStream) {
    let mut left = UNWANTED_BYTES;
    let rest = async {
        while let Some(Ok(piece)) = content.data().await
            && left >= piece.len()
            && content.flow_control().release_capacity(piece.len()).is_ok()
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
async fn deliver(
    shared: &Shared,
    respond: &mut SendResponse<Bytes>,
    mut http: Body,
    method: Method,
    holds_upstream: bool,
) -> Result<(), Ended> {
    let Some(Ok(first)) = http.next().await else { return Err(Ended::Aborted) };
    let read = heads::read_response(&first, method).ok_or(Ended::Aborted)?;
    let is_bare = matches!(read.framing, BodyFraming::None | BodyFraming::Length(0));
    let stream = respond.send_response(read.head, is_bare)?;
    if is_bare {
        return Ok(());
    }
    let rate_bytes_per_s = shared.core.with_plan(|plan| plan.limits.response_min_rate_bytes_per_s);
    let allowance = Allowance::new(rate_bytes_per_s);
    let mut content = Content { shared, stream, allowance, holds_upstream };
    let mut piece = first.slice(read.length..);
    let mut remaining = Remaining::new(read.framing);
    loop {
        let data = remaining.take(piece)?;
        let is_last = remaining.is_done();
        let trailers = remaining.trailers();
        if !data.is_empty() || (is_last && trailers.is_none()) {
            content.send(data, is_last && trailers.is_none()).await?;
        }
        if is_last {
            return match trailers {
                Some(trailers) => Ok(content.stream.send_trailers(trailers)?),
                None => Ok(()),
            };
        }
        // With room for it: a client that takes nothing has nothing lie about. Of unknown length there may be no more to
        // come but the end, for which there is always room.
        if matches!(remaining, Remaining::Length(_)) {
            content.stream.reserve_capacity(1);
            content.room().await?;
        }
        piece = content.next(&mut http).await?;
    }
}

/// What is to come of a response's content.
enum Remaining {
    Length(u64),
    Chunked(Box<ChunkedDecoder>),
}

impl Remaining {
    fn new(framing: BodyFraming) -> Self {
        match framing {
            BodyFraming::Length(length) => Self::Length(length),
            _ => Self::Chunked(Box::new(ChunkedDecoder::new(ChunkLimits::of_responses()))),
        }
    }

    /// The content in a piece of what was sent.
    fn take(&mut self, mut piece: Bytes) -> Result<Bytes, Ended> {
        match self {
            Self::Length(left) => {
                *left = left.checked_sub(piece.len() as u64).ok_or(Ended::Aborted)?;
                Ok(piece)
            }
            Self::Chunked(decoder) => {
                let mut data = Bytes::new();
                while !piece.is_empty() && !decoder.is_done() {
                    let decoded = decoder.decode(&piece).map_err(|_| Ended::Aborted)?;
                    let found = piece.slice(decoded.data);
                    data = match (data.is_empty(), found.is_empty()) {
                        (true, _) => found,
                        (false, true) => data,
                        (false, false) => {
                            let mut both = BytesMut::from(data);
                            both.extend_from_slice(&found);
                            both.freeze()
                        }
                    };
                    piece = piece.slice(decoded.consumed..);
                }
                Ok(data)
            }
        }
    }

    fn is_done(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(decoder) => decoder.is_done(),
        }
    }

    fn trailers(&self) -> Option<http::HeaderMap> {
        match self {
            Self::Chunked(decoder) if decoder.is_done() => {
                // What `Connection` names is not among them any more.
                let fields = decoder.trailers(Fields::new(b"", &[], 0));
                Some(heads::trailers(fields)).filter(|trailers| !trailers.is_empty())
            }
            _ => None,
        }
    }
}

/// A response's content on its way to a client that keeps up the minimum rate.
struct Content<'s> {
    shared: &'s Shared,
    stream: SendStream<Bytes>,
    allowance: Allowance,
    holds_upstream: bool,
}

impl Content<'_> {
    /// The next piece of the response, unless the client loses interest in it.
    async fn next(&mut self, http: &mut Body) -> Result<Bytes, Ended> {
        tokio::select! {
            piece = http.next() => piece.and_then(Result::ok).ok_or(Ended::Aborted),
            _ = poll_fn(|context| self.stream.poll_reset(context)) => Err(Ended::Cancelled),
        }
    }

    async fn send(&mut self, mut data: Bytes, is_last: bool) -> Result<(), Ended> {
        while !data.is_empty() {
            self.stream.reserve_capacity(data.len());
            let room = self.room().await?.min(data.len());
            let piece = data.split_to(room);
            self.allowance.earn(self.shared.share(room));
            if data.is_empty() && is_last {
                return Ok(self.stream.send_data(piece, true)?);
            }
            self.stream.send_data(piece, false)?;
        }
        if is_last { Ok(self.stream.send_data(data, true)?) } else { Ok(()) }
    }

    /// Waits for the client to take more: how many bytes.
    async fn room(&mut self) -> Result<usize, Ended> {
        let clock = &self.shared.core.clock;
        while self.stream.capacity() == 0 {
            let start_ms = clock.elapsed_ms();
            let stream = &mut self.stream;
            let _awaited = self.shared.client.owes();
            let _stalled = self.holds_upstream.then(|| self.shared.client.stalls());
            let room = within(&self.allowance, poll_fn(|context| stream.poll_capacity(context))).await;
            self.allowance.spend(clock.elapsed_ms().saturating_sub(start_ms));
            room.ok_or(Ended::TooSlow)?.ok_or(Ended::Cancelled)??;
        }
        Ok(self.stream.capacity())
    }
}
