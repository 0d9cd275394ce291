//! Several requests on one connection at once (pipelining, RFC 9112 §9.3.2).
//!
//! Requests that come while others are answered go to a server in one write, and one connection answers them in their
//! order: what a write and a read cost is shared by all of them. Only requests that are safe to repeat go so, on a
//! connection that has been used before, and none waits long for another one's response: those that are not answered as
//! hoped are sent again, on connections of their own.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use tidegate_http::{BodyFraming, ChunkLimits, ChunkedDecoder, Method, Progress, ResponseParser};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::upstream::exchange::{Head, INTERIM_RESPONSES, OutgoingRequest, Received, new_parser, read_more};
use crate::upstream::pool::{Lease, Pool};
use crate::upstream::upload::send_all;
use crate::upstream::{Stream, UpstreamError};

/// Bytes that go out together: so few that the kernel takes them all, whether the server reads or not.
const MOST_BYTES: usize = 16 * 1024;
/// The longest body that is taken in whole, so that the response after it can be read.
const MOST_BODY: usize = 64 * 1024;
/// What a batch counts against its server if requests of it have to be sent again; one that is answered takes 1 off.
const FAULT: u32 = 4;
/// From here on requests go one by one: after three such batches in a row, or where too few are answered between them.
const MOST_FAULTS: u32 = 3 * FAULT;
/// For how long they do.
const PAUSE: Duration = Duration::from_secs(60);

/// What became of a request that went with others. If nothing is said of it, it has to be sent again.
pub(super) enum Outcome {
    /// The response, all of it.
    Whole(Box<Received>),
    /// The response's head, and the connection that the rest comes on.
    Begun { received: Box<Received>, stream: Rc<Stream>, is_shared: bool },
    /// Interim responses; the final one is to come on the connection, behind what has come of it in `rest`.
    Interim { interim: Vec<Head>, rest: Vec<u8>, stream: Rc<Stream>, is_shared: bool },
    /// The server did not answer this request.
    Failed(UpstreamError),
}

/// What goes to one server from one core.
#[derive(Default)]
pub(super) struct Pipeline {
    /// Those that wait until the ones before them have been answered.
    next: RefCell<Batch>,
    is_driven: Cell<bool>,
    /// Below [`MOST_FAULTS`].
    faults: Cell<u32>,
    /// When the last fault was noticed.
    last_fault: Cell<Option<Instant>>,
    paused_until: Cell<Option<Instant>>,
}

/// Requests that go together.
#[derive(Default)]
struct Batch {
    /// That of the first request.
    lease: Option<Rc<Lease>>,
    heads: Vec<u8>,
    requests: VecDeque<Request>,
}

struct Request {
    method: Method,
    outcome: oneshot::Sender<Outcome>,
}

impl Pipeline {
    /// Adds a request to those that are to be sent. `None`: it has to go alone.
    pub(super) fn join(
        &self,
        lease: &Rc<Lease>,
        request: &OutgoingRequest<'_>,
    ) -> Option<oneshot::Receiver<Outcome>> {
        let most = lease.settings().pipeline;
        let is_safe = matches!(request.method, Method::Get | Method::Head)
            && request.framing == BodyFraming::None
            && request.upgrade.is_none();
        if most < 2 || !is_safe || request.head.len() > MOST_BYTES || self.is_paused() {
            return None;
        }
        let mut next = self.next.borrow_mut();
        if next.requests.len() >= most || next.heads.len() + request.head.len() > MOST_BYTES {
            // They are enough not to wait for others.
            tokio::task::spawn_local(Line::run(std::mem::take(&mut *next), None));
        }
        let (outcome, answer) = oneshot::channel();
        next.lease.get_or_insert_with(|| Rc::clone(lease));
        next.heads.extend_from_slice(request.head);
        next.requests.push_back(Request { method: request.method, outcome });
        if !self.is_driven.replace(true) {
            // It begins when all that are ready now have had their turn.
            tokio::task::spawn_local(Driver(Rc::clone(lease.pool())).run());
        }
        Some(answer)
    }

    fn is_paused(&self) -> bool {
        self.paused_until.get().is_some_and(|until| Instant::now() < until)
    }

    /// All that were sent together have been answered.
    fn succeeded(&self) {
        self.faults.set(self.faults.get().saturating_sub(1));
    }

    /// Some of those that were sent together at this time have to be sent again.
    fn failed(&self, lease: &Lease, sent_at: Instant) {
        // One pause of a server that keeps several batches waiting is one fault.
        if self.last_fault.get().is_some_and(|last| sent_at <= last) {
            return;
        }
        self.last_fault.set(Some(Instant::now()));
        self.faults.set(self.faults.get() + FAULT);
        if self.faults.get() >= MOST_FAULTS {
            tracing::info!(
                server = %lease.server().address,
                "requests were not answered together: for {} s they go one by one", PAUSE.as_secs()
            );
            self.paused_until.set(Some(Instant::now() + PAUSE));
            self.faults.set(0);
        }
    }
}

/// Sends one batch after the other, each with what has come while the one before it was answered.
struct Driver(Rc<Pool>);

impl Driver {
    async fn run(self) {
        let pipeline = self.0.pipeline();
        loop {
            let batch = pipeline.next.take();
            if batch.requests.is_empty() {
                return;
            }
            let (busy, free) = oneshot::channel();
            tokio::task::spawn_local(Line::run(batch, Some(busy)));
            // Said by the end of the channel.
            let _ = free.await;
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Whatever ends it: who still waits is sent again.
        self.0.pipeline().next.take();
        self.0.pipeline().is_driven.set(false);
    }
}

/// A connection on which a batch was sent.
struct Line {
    /// That of the first request.
    lease: Rc<Lease>,
    stream: Rc<Stream>,
    sent_at: Instant,
    are_several: bool,
    /// Those that have no response yet, in the order in which they were sent.
    waiting: VecDeque<Request>,
    /// What belongs to their responses, from `taken` on.
    arrived: Vec<u8>,
    taken: usize,
    parser: ResponseParser,
    /// Since when the response at hand is waited for; `None`: it has not been yet.
    since: Option<Instant>,
    /// Some response has come.
    has_answered: bool,
    /// Responses will come for which nobody waits any more.
    is_shared: bool,
    /// Keeps the next batch waiting.
    busy: Option<oneshot::Sender<Infallible>>,
}

/// What the server said to one request.
enum Next {
    Response {
        received: Box<Received>,
        is_whole: bool,
        keep_alive: bool,
    },
    /// No more than this, and nobody waits behind: the client gets it now.
    Interim(Vec<Head>),
}

impl Line {
    async fn run(batch: Batch, busy: Option<oneshot::Sender<Infallible>>) {
        let Batch { lease: Some(lease), heads, requests } = batch else { return };
        // A new connection waits for nobody: those that cannot have a kept one make their own, and keep it.
        let Some(stream) = lease.take_idle(false) else { return };
        let sent = requests.len();
        let mut line = Self {
            lease,
            stream,
            sent_at: Instant::now(),
            are_several: sent > 1,
            waiting: requests,
            arrived: Vec::new(),
            taken: 0,
            parser: new_parser(Method::Get),
            since: None,
            has_answered: false,
            is_shared: false,
            busy,
        };
        let silence = line.lease.settings().response_timeout;
        let unanswered = match send_all(&line.stream, &heads, silence).await {
            Ok(()) => line.answer_all().await,
            Err(_) => sent,
        };
        line.lease.server().were_sent(sent, unanswered);
        match unanswered {
            0 if sent > 1 => line.lease.pipeline().succeeded(),
            0 => {}
            _ => line.failed(),
        }
    }

    /// Returns how many have to be sent again.
    async fn answer_all(&mut self) -> usize {
        let sent = self.waiting.len();
        let mut answered = 0;
        while let Some(method) = self.waiting.front().map(|request| request.method) {
            let next = self.next(method).await;
            let outcome = match next {
                Ok(Next::Response { received, is_whole: true, keep_alive }) => {
                    self.is_shared |= !keep_alive;
                    Outcome::Whole(received)
                }
                Ok(Next::Response { received, .. }) => {
                    let is_shared = self.is_shared || self.waiting.len() > 1;
                    Outcome::Begun { received, stream: Rc::clone(&self.stream), is_shared }
                }
                Ok(Next::Interim(interim)) => {
                    let (stream, rest) = (Rc::clone(&self.stream), self.take(self.left().len()));
                    Outcome::Interim { interim, rest, stream, is_shared: self.is_shared }
                }
                // As where a server closes a connection that was idle: that says nothing about its health.
                Err(UpstreamError::Incomplete | UpstreamError::Broken(_)) => return sent - answered,
                Err(error) => Outcome::Failed(error),
            };
            answered += 1;
            let ends = !matches!(outcome, Outcome::Whole(_)) || self.is_shared;
            if let Some(request) = self.waiting.pop_front() {
                // A client that has left needs no answer.
                let _ = request.outcome.send(outcome);
            }
            if ends {
                return sent - answered;
            }
            self.has_answered = true;
            self.since = None;
        }
        match self.left().is_empty() {
            true => self.lease.give_back(Rc::clone(&self.stream)),
            false => self.lease.distrust(),
        }
        sent - answered
    }

    /// The next response, if that can be had at once; else its head.
    async fn next(&mut self, method: Method) -> Result<Next, UpstreamError> {
        let mut interim = Vec::new();
        let head = loop {
            if interim.len() == INTERIM_RESPONSES && self.waiting.len() < 2 {
                return Ok(Next::Interim(interim));
            }
            let Some(head) = self.head(method, !interim.is_empty()).await? else {
                return Ok(Next::Interim(interim));
            };
            let status = head.get().status;
            if status == 101 {
                return Err(UpstreamError::UnexpectedUpgrade);
            }
            if !(100..200).contains(&status) {
                break head;
            }
            if interim.len() == INTERIM_RESPONSES {
                return Err(UpstreamError::TooManyInterim);
            }
            interim.push(head);
        };
        let (framing, keep_alive) = (head.get().framing, head.get().keep_alive);
        let body = self.body(framing).await?;
        let rest = self.take(body.unwrap_or(self.left().len()));
        let received = Box::new(Received { head, interim, rest, upload: None });
        Ok(Next::Response { received, is_whole: body.is_some(), keep_alive })
    }

    /// `None`: there are interim responses, and nobody who would have to wait for their end.
    async fn head(&mut self, method: Method, has_interim: bool) -> Result<Option<Head>, UpstreamError> {
        self.parser.reset(method);
        loop {
            let left = self.arrived.get(self.taken..).unwrap_or(&[]);
            if !left.is_empty()
                && let Progress::Complete { length } = self.parser.parse(left).map_err(UpstreamError::Head)?
            {
                return Ok(Some(Head { bytes: self.take(length), parsed: self.parser.parsed() }));
            }
            if has_interim && self.waiting.len() < 2 {
                return Ok(None);
            }
            self.read().await?;
        }
    }

    /// Waits for a body, and returns its length with its coding. `None`: it is too long to wait for, or nobody knows
    /// how long.
    async fn body(&mut self, framing: BodyFraming) -> Result<Option<usize>, UpstreamError> {
        match framing {
            BodyFraming::None => Ok(Some(0)),
            BodyFraming::Length(length) => {
                let Some(length) = usize::try_from(length).ok().filter(|length| *length <= MOST_BODY) else {
                    return Ok(None);
                };
                while self.left().len() < length {
                    if !self.read_soon().await? {
                        return Ok(None);
                    }
                }
                Ok(Some(length))
            }
            BodyFraming::Chunked => {
                let mut decoder = ChunkedDecoder::new(ChunkLimits::of_responses());
                let mut length = 0;
                while length <= MOST_BODY {
                    let input = self.left().get(length..).unwrap_or(&[]);
                    let decoded = decoder.decode(input).map_err(UpstreamError::Body)?;
                    length += decoded.consumed;
                    if decoded.done {
                        return Ok(Some(length));
                    }
                    if decoded.consumed == 0 && !self.read_soon().await? {
                        return Ok(None);
                    }
                }
                Ok(None)
            }
            BodyFraming::UntilClose => Ok(None),
        }
    }

    fn left(&self) -> &[u8] {
        self.arrived.get(self.taken..).unwrap_or(&[])
    }

    fn take(&mut self, length: usize) -> Vec<u8> {
        let taken = self.left().get(..length).unwrap_or(&[]).to_vec();
        self.taken += taken.len();
        taken
    }

    /// Some have to be sent again; where there is one only, it says nothing of sending them together.
    fn failed(&self) {
        if self.are_several {
            self.lease.pipeline().failed(&self.lease, self.sent_at);
        }
    }

    /// For how long the response at hand has been waited for. Most of a batch are here with the first of them.
    fn waited(&mut self) -> Duration {
        match self.since {
            Some(since) => since.elapsed(),
            None => {
                self.since = Some(Instant::now());
                Duration::ZERO
            }
        }
    }

    /// Reads more of a body. False where it is not waited for, because nobody waits behind it or it takes too long: its
    /// client gets what there is, and the others go elsewhere.
    async fn read_soon(&mut self) -> Result<bool, UpstreamError> {
        self.arrived.drain(..self.taken);
        self.taken = 0;
        let waited = self.waited();
        let left = self.lease.settings().pipeline_timeout.saturating_sub(waited);
        if self.waiting.len() < 2 || left.is_zero() {
            return Ok(false);
        }
        match read_more(&self.stream, &mut self.arrived, left).await {
            Ok(0) => Err(UpstreamError::Incomplete),
            Ok(_) => Ok(true),
            Err(UpstreamError::ResponseTimeout) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn read(&mut self) -> Result<(), UpstreamError> {
        self.arrived.drain(..self.taken);
        self.taken = 0;
        let waited = self.waited();
        let settings = self.lease.settings();
        // Others wait, or a server may have thrown away what came with the first request.
        let is_doubtful = self.has_answered || self.waiting.len() > 1 || self.busy.is_some();
        let most = if is_doubtful { settings.pipeline_timeout } else { settings.response_timeout };
        // All of the head has to come within that time: a byte now and then does not hold up the others.
        let left = most.min(settings.response_timeout).saturating_sub(waited);
        match read_more(&self.stream, &mut self.arrived, left).await {
            Ok(0) => Err(UpstreamError::Incomplete),
            Ok(_) => Ok(()),
            Err(UpstreamError::ResponseTimeout) if self.has_answered => Err(UpstreamError::Incomplete),
            Err(UpstreamError::ResponseTimeout) if is_doubtful => {
                // Known now, and the first one's response may take as long as it is let.
                self.failed();
                // Answers to those that go elsewhere will come after this one.
                self.is_shared = self.waiting.len() > 1;
                self.waiting.truncate(1);
                self.busy = None;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}
