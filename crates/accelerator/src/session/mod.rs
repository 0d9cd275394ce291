//! HTTP/1 over one client connection.
//!
//! The common case, a hit for a request that arrived whole, runs without allocation, without waiting and without a
//! buffer of the connection's own: read into the core's buffer, parse, look up, one vectored write. Everything else
//! (a miss, a body, a client that does not take its response) gets a task until it is done.

pub(crate) mod allowance;
pub(crate) mod batch;
mod body;
mod context;
pub(crate) mod deadlines;
mod exchange;
mod refusal;
pub(crate) mod respond;
pub(crate) mod task_pool;
pub(crate) mod transmit;

use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use tidegate_core::Verdict;
use tidegate_core::hooks::Slow;
use tidegate_http::normalize::Kept;
use tidegate_http::{ParsedRequest, Progress, RequestParser};

use crate::cache::lookup::{self, Hit};
use crate::data_core::client::{Client, Spoken};
use crate::data_core::clients::Busy;
use crate::data_core::{DataCore, millis};
use crate::defence::Hold;
use crate::http2;
use crate::session::batch::{Deferred, Sending};
use crate::session::context::{Handled, RequestContext};
use crate::session::deadlines::Waiting;
use crate::session::transmit::Unsent;
use crate::tls::HandshakeError;

/// Reads from one client before others have their turn.
const READS_AT_ONCE: usize = 4;
/// Requests of one client that are answered before others have their turn.
const REQUESTS_AT_ONCE: usize = 64;

/// Serves a client that has just been accepted. If its request is here already and takes no waiting, it is answered
/// before anything watches the socket: a client that closes after one request then costs no more than that.
pub(crate) fn begin(core: &Rc<DataCore>, client: &Rc<Client>) {
    let connection = Connection { core, client };
    connection.await_head();
    let step = connection.advance_caught();
    if matches!(step, Step::Close) {
        return core.connection_ended(client);
    }
    match core.clients.add(client) {
        Ok(()) => connection.go_on(step),
        Err(error) => {
            tracing::error!(%error, "a client's socket could not be watched");
            core.connection_ended(client);
        }
    }
}

/// Goes on with a client that has something to say.
pub(crate) fn resume(core: &Rc<DataCore>, client: &Rc<Client>) {
    let connection = Connection { core, client };
    if client.is_watched() && !client.is_busy() {
        connection.go_on(connection.advance_caught());
    }
}

/// Does what takes waiting, until the client is idle again or gone.
async fn wait(busy: Busy, mut step: Step) {
    let connection = Connection { core: &busy.core, client: &busy.client };
    loop {
        let rest = match step {
            Step::Read => return busy.hand_back(),
            Step::Close => return,
            Step::Http2 => {
                if Box::pin(http2::serve(&busy)).await.is_ok() {
                    Box::pin(connection.finish()).await;
                }
                return;
            }
            Step::Yield => {
                tokio::task::yield_now().await;
                Vec::new()
            }
            Step::Flush(flush) => {
                let Flush { mut unsent, rest, keep_alive, sending } = *flush;
                // Nothing is owed by the client but to take what it asked for.
                connection.client.slot.clear();
                let sent = {
                    let mut flushing = Box::pin(connection.flush(&mut unsent));
                    connection.unless_cut_off(flushing.as_mut()).await.unwrap_or_else(|| Err(cut_off()))
                };
                connection.watch_reading(&sent);
                if let Some(sending) = sending {
                    sending.ended(connection.core, &sent, unsent.left());
                }
                if sent.is_err() || !keep_alive {
                    return Box::pin(connection.finish()).await;
                }
                connection.await_next();
                rest
            }
            Step::Exchange(request) => match connection.exchange(request).await {
                Some(rest) => {
                    connection.await_next();
                    rest
                }
                None => return Box::pin(connection.finish()).await,
            },
        };
        step = match connection.process(&rest) {
            Step::Read => connection.advance(),
            step => step,
        };
    }
}

/// One client connection over TCP.
#[derive(Clone, Copy)]
pub(crate) struct Connection<'c> {
    core: &'c Rc<DataCore>,
    client: &'c Rc<Client>,
}

/// A head that arrives in pieces keeps its bytes and the parser's place in them.
pub(crate) struct Partial {
    buffer: Vec<u8>,
    parser: RequestParser,
    /// There may be whole requests in it, which had to wait for their turn.
    is_waiting: bool,
    /// Its first line was judged.
    is_line_judged: bool,
}

/// A request that needs more than the cache and the bytes at hand.
pub(crate) struct Request {
    /// The head's bytes.
    pub buffer: Vec<u8>,
    pub parsed: ParsedRequest,
    /// What the head asks for.
    pub normalized: Kept,
    /// What arrived after the head: the body's start, or further requests.
    pub rest: Vec<u8>,
    pub context: RequestContext,
    /// The cache had nothing for it a moment ago.
    pub is_absent: bool,
    /// Whether it is held first.
    pub held: Option<Hold>,
}

/// What the bytes at hand lead to.
enum Step {
    /// The client has to say more.
    Read,
    /// The client has said more, but others have their turn first.
    Yield,
    /// The client has not taken all of the response yet. Boxed, as a request is: steps are handed on by value.
    Flush(Box<Flush>),
    /// A request that has to wait for something.
    Exchange(Box<Request>),
    /// The client chose HTTP/2.
    Http2,
    /// The connection ends.
    Close,
}

/// A response of which something is left to be sent.
struct Flush {
    unsent: Unsent,
    /// What the client sent after the request.
    rest: Vec<u8>,
    keep_alive: bool,
    /// What is counted when it has ended, if it was not counted before.
    sending: Option<Sending>,
}

impl Step {
    /// The connection ends when the client has what was sent.
    fn finish() -> Self {
        let (unsent, rest) = (Unsent::nothing(), Vec::new());
        Self::Flush(Box::new(Flush { unsent, rest, keep_alive: false, sending: None }))
    }
}

/// What the defence says of a head's first line.
enum Early {
    /// Nothing: it is not here yet, or nobody looks at it before the head is whole.
    Undecided,
    Passed,
    Ended(Step),
}

impl Connection<'_> {
    /// Goes on with what the client's bytes have led to.
    fn go_on(self, step: Step) {
        match step {
            Step::Read => {}
            Step::Yield => self.core.clients.again(self.client),
            Step::Close => self.core.end(self.client),
            step => {
                // The next request of the turn did not begin before this.
                self.core.clock.now();
                self.core.tasks.take_on(Busy::new(self.core, self.client), step);
            }
        }
    }

    /// As [`Self::go_on`], and reads on where that is what is next.
    fn go_on_reading(self, step: Step) {
        match step {
            Step::Read if !self.client.is_readable() => {}
            Step::Read => self.go_on(self.advance_caught()),
            step => self.go_on(step),
        }
    }

    /// As [`Self::advance`]. A defect that shows with one client must not take the others' event loop with it.
    fn advance_caught(self) -> Step {
        self.caught(|| self.advance())
    }

    fn caught(self, go_on: impl FnOnce() -> Step) -> Step {
        std::panic::catch_unwind(AssertUnwindSafe(go_on)).unwrap_or_else(|_| {
            tracing::error!(client = %self.client.peer(), "a connection is ended after a panic");
            Step::Close
        })
    }

    /// Reads and answers as far as that takes no waiting.
    fn advance(self) -> Step {
        let waiting = self.client.pending.borrow_mut().take_if(|partial| partial.is_waiting);
        if let Some(partial) = waiting {
            let step = self.process(&partial.buffer);
            if !matches!(step, Step::Read) {
                return step;
            }
        }
        match self.client.agree() {
            Ok(Spoken::Http1) => {}
            Ok(Spoken::Http2) => return Step::Http2,
            Err(error) => return self.not_agreed(error),
        }
        for _ in 0..READS_AT_ONCE {
            if !self.client.is_readable() {
                return Step::Read;
            }
            let read = self.client.try_read(&mut self.core.read_buffer.borrow_mut());
            let step = match read {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Step::Read,
                Ok(0) | Err(_) => {
                    self.input_ended();
                    return Step::Close;
                }
                Ok(length) => self.take(length),
            };
            if !matches!(step, Step::Read) {
                return step;
            }
        }
        Step::Yield
    }

    /// The handshake of TLS goes on later, or never.
    fn not_agreed(self, error: HandshakeError) -> Step {
        match error {
            HandshakeError::Io(error) if error.kind() == ErrorKind::WouldBlock => return Step::Read,
            HandshakeError::Io(error) => {
                tracing::debug!(client = %self.client.peer(), %error, "no TLS");
                if self.client.slot.expired().is_some() {
                    self.core.metrics.header_timeouts_total.add(1);
                    self.core.too_slow(self.client.place, self.client.peer(), Slow::Head);
                }
            }
            HandshakeError::NotTls => self.refuse_in_clear(),
            HandshakeError::Challenge => {
                self.core.metrics.acme_challenges_total.add(1);
                return Step::finish();
            }
        }
        self.core.metrics.tls_handshakes_failed_total.add(1);
        Step::finish()
    }

    /// Takes `length` bytes that were just read into the core's buffer.
    fn take(self, length: usize) -> Step {
        let core = self.core;
        let buffer = core.read_buffer.borrow();
        let bytes = buffer.get(..length).unwrap_or(&[]);
        match self.client.pending.take() {
            None => self.process(bytes),
            Some(partial) => self.resume(*partial, bytes),
        }
    }

    /// Goes on with a head of which a part was here.
    fn resume(self, mut partial: Partial, bytes: &[u8]) -> Step {
        partial.buffer.extend_from_slice(bytes);
        match partial.parser.parse(&partial.buffer) {
            Ok(Progress::Incomplete) => {
                if !partial.is_line_judged {
                    match self.judge_early(&partial.buffer) {
                        Early::Ended(step) => return step,
                        Early::Passed => partial.is_line_judged = true,
                        Early::Undecided => {}
                    }
                }
                *self.client.pending.borrow_mut() = Some(Box::new(partial));
                Step::Read
            }
            Ok(Progress::Complete { length }) => {
                let Partial { buffer, parser, is_line_judged, .. } = partial;
                match self.step(&parser, &buffer, length, is_line_judged, None) {
                    Some(step) => step,
                    None => {
                        let rest = buffer.get(length..).unwrap_or(&[]).to_vec();
                        self.process(&rest)
                    }
                }
            }
            Err(error) => self.refuse(error),
        }
    }

    /// Answers the requests in `bytes`, one after the other (RFC 9112 §9.3.2).
    fn process(self, bytes: &[u8]) -> Step {
        self.process_with(&mut self.core.parser.borrow_mut(), bytes, None)
    }

    /// The same with this parser. The answer to the last request may be left in `deferred`, and the connection then
    /// reads on when it is sent.
    fn process_with(
        self,
        parser: &mut RequestParser,
        bytes: &[u8],
        mut deferred: Option<&mut Deferred>,
    ) -> Step {
        let core = self.core;
        let mut offset = 0;
        let mut answered = 0;
        while let Some(input) = bytes.get(offset..).filter(|input| !input.is_empty()) {
            let set_aside = |parser: &mut RequestParser, is_waiting, is_line_judged| {
                let fresh = RequestParser::new(core.with_plan(|plan| plan.limits.head));
                let parser = std::mem::replace(parser, fresh);
                let partial = Partial { buffer: input.to_vec(), parser, is_waiting, is_line_judged };
                *self.client.pending.borrow_mut() = Some(Box::new(partial));
            };
            if answered == REQUESTS_AT_ONCE {
                set_aside(parser, true, false);
                return Step::Yield;
            }
            answered += 1;
            parser.reset();
            match parser.parse(input) {
                Ok(Progress::Complete { length }) => {
                    let mut deferred = deferred.as_deref_mut().filter(|_| length == input.len());
                    if let Some(deferred) = &mut deferred {
                        deferred.head_at = offset;
                    }
                    if let Some(step) = self.step(parser, input, length, false, deferred) {
                        return step;
                    }
                    offset += length;
                }
                Ok(Progress::Incomplete) => {
                    let early = self.judge_early(input);
                    if let Early::Ended(step) = early {
                        return step;
                    }
                    self.await_head();
                    set_aside(parser, false, matches!(early, Early::Passed));
                    return Step::Read;
                }
                Err(error) => return self.refuse(error),
            }
        }
        Step::Read
    }

    /// Handles the head at the start of `input`; `None` when it is answered and the connection goes on.
    fn step(
        self,
        parser: &RequestParser,
        input: &[u8],
        length: usize,
        is_line_judged: bool,
        deferred: Option<&mut Deferred>,
    ) -> Option<Step> {
        self.core.metrics.requests_total.add(1);
        let context = RequestContext::new(self.client, is_line_judged, self.core.clock.next_began());
        let rest = || input.get(length..).unwrap_or(&[]).to_vec();
        match context.answer(self.core, self.client, &parser.head(input), deferred) {
            Ok(Handled::Answered { keep_alive: true }) => {
                self.await_next();
                None
            }
            Ok(Handled::Deferred) => None,
            Ok(Handled::Answered { keep_alive: false }) => {
                Some(self.close(parser.head(input).keep_alive, &rest()))
            }
            Ok(Handled::Unsent { unsent, keep_alive, ready }) => {
                let buffer = input.get(..length).unwrap_or(&[]).to_vec();
                let sending = Some(Sending { ready, buffer, parsed: parser.parsed() });
                Some(Step::Flush(Box::new(Flush { unsent, rest: rest(), keep_alive, sending })))
            }
            Ok(Handled::Refused(verdict)) => self.turn_away(context, verdict, &parser.head(input)),
            Ok(Handled::TurnedAway(decision, reply)) => {
                self.refuse_client(context, decision, reply.as_deref(), &parser.head(input))
            }
            Ok(Handled::NeedsExchange { normalized, held, is_absent }) => {
                let buffer = input.get(..length).unwrap_or(&[]).to_vec();
                Some(Step::Exchange(Box::new(Request {
                    buffer,
                    parsed: parser.parsed(),
                    normalized,
                    rest: rest(),
                    context,
                    is_absent,
                    held,
                })))
            }
            Err(error) => Some(self.refuse(error)),
        }
    }

    /// Asks the defence about a request of which the first line is here, but not the whole head.
    fn judge_early(self, head: &[u8]) -> Early {
        let core = self.core;
        let (Some(defence), Some(place)) = (&core.defence, self.client.place) else {
            return Early::Undecided;
        };
        let peer = core.direct(self.client.peer());
        let Some((decision, status)) = defence.judge_early(place, peer, head, core.clock.elapsed_ms()) else {
            return Early::Undecided;
        };
        let ended = match decision.verdict {
            Verdict::Continue => return Early::Passed,
            Verdict::Drop => Step::Close,
            Verdict::Refuse | Verdict::Challenge => {
                self.last_words(status);
                Step::finish()
            }
            _ => self.reset(),
        };
        core.metrics.requests_policed_total.add(1);
        Early::Ended(ended)
    }

    /// Ends the connection after its last response: at once if the client has announced that it sends no more, and
    /// otherwise so that what it sends meanwhile does not destroy the response (RFC 9112 §9.6).
    fn close(self, is_surprise: bool, rest: &[u8]) -> Step {
        if is_surprise || !rest.is_empty() || self.client.is_readable() {
            return Step::finish();
        }
        Step::Close
    }

    /// The client has sent its last byte, or a deadline has passed.
    fn input_ended(self) {
        match self.client.slot.expired() {
            Some(Waiting::Head) => {
                self.core.metrics.header_timeouts_total.add(1);
                self.core.too_slow(self.client.place, self.client.peer(), Slow::Head);
                self.last_words(408);
            }
            Some(Waiting::NextRequest) => self.core.metrics.idle_timeouts_total.add(1),
            _ => {}
        }
    }

    /// Ends the connection so that the client still gets what was sent: a reset would destroy it when bytes that
    /// nobody read are left in the receive buffer (RFC 9112 §9.6).
    async fn finish(self) {
        const LINGER_MS: u64 = 1_000;
        const LINGER_READS: usize = 64;
        if self.client.finish_output().is_err() {
            return;
        }
        self.client.slot.set(Waiting::Body, self.core.clock.elapsed_ms() + LINGER_MS);
        for _ in 0..LINGER_READS {
            self.client.readable().await;
            match self.client.try_discard(&mut self.core.read_buffer.borrow_mut()) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    /// The next request may take as long as an idle connection is kept.
    #[inline]
    fn await_next(self) {
        self.client.slot.set(Waiting::NextRequest, self.core.deadline(self.core.times().keep_alive_ms));
    }

    /// A head has begun, or is owed by a new connection.
    fn await_head(self) {
        self.client.slot.set(Waiting::Head, self.core.deadline(self.core.times().header_ms));
    }

    /// Tells the defence of a client that did not take its response.
    fn watch_reading<T>(self, sent: &io::Result<T>) {
        // One that was ended to make room kept the server waiting as well.
        let was_shed = || self.client.slot.expired() == Some(Waiting::Nothing);
        if matches!(sent, Err(error) if error.kind() == ErrorKind::TimedOut || was_shed()) {
            self.core.too_slow(self.client.place, self.client.peer(), Slow::Reading);
        }
    }

    /// What comes of `work`; `None` if a drain is over before.
    async fn unless_cut_off<F: Future>(self, mut work: Pin<&mut F>) -> Option<F::Output> {
        poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending if self.core.is_cut_off() => Poll::Ready(None),
            Poll::Pending => {
                self.client.let_wake(context);
                Poll::Pending
            }
        })
        .await
    }

    async fn flush(self, unsent: &mut Unsent) -> io::Result<()> {
        transmit::flush(self.client, self.core, &mut transmit::RateWatch::new(self.core), unsent).await
    }
}

/// Why a response ends that a drain has not waited for: nothing that its client has done.
fn cut_off() -> io::Error {
    ErrorKind::ConnectionAborted.into()
}

/// Times in the unit of deadlines, kept beside the settings because every request needs them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub header_ms: u64,
    pub keep_alive_ms: u64,
}

impl Times {
    pub(crate) fn new(limits: &crate::settings::Limits) -> Self {
        Self { header_ms: millis(limits.header_timeout), keep_alive_ms: millis(limits.keep_alive_timeout) }
    }
}

impl Hit {
    /// How the access log names this answer.
    pub(crate) fn label(&self) -> &'static str {
        match self.forwarded {
            _ if self.stale => "stale",
            Some(forwarded) if forwarded.upstream_status == 304 => "revalidated",
            Some(forwarded) => lookup::label(forwarded.reason),
            None => "hit",
        }
    }
}
