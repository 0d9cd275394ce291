//! One request on one connection: its body goes out while the response's head comes in.

use std::cell::RefCell;
use std::io;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use tidegate_http::forward::upgrade_protocols;
use tidegate_http::{
    BodyFraming, FieldId, Fields, HeadLimits, Method, ParsedResponse, Progress, ResponseHead, ResponseParser,
    Version,
};
use tokio::time::Instant;

use crate::upstream::upload::{RequestBody, Upload, send_all};
use crate::upstream::{Stream, UpstreamError};

/// Bytes read from a server at once.
pub(crate) const READ_BYTES: usize = 32 * 1024;
/// Silence of a server while the request's body is on its way.
const UPLOAD_SILENCE: Duration = Duration::from_secs(24 * 3600);
/// Fields that a response may have: more than a request, since it is our own server's.
const RESPONSE_FIELDS: u16 = 1000;
/// Interim responses that are kept for later.
pub(super) const INTERIM_RESPONSES: usize = 16;
/// Interim responses that a server may send before the final one: some say by them now and then that they are at work.
const MOST_INTERIM_RESPONSES: usize = 1000;

/// A request as it goes to a server.
pub(crate) struct OutgoingRequest<'a> {
    /// The whole head, framing fields included.
    pub head: &'a [u8],
    pub method: Method,
    /// Whose it is, if it is a client's: one client gets at most three quarters of a server's connections.
    pub client: Option<IpAddr>,
    /// Its priority class: where requests wait for a connection, 0 goes first.
    pub class: u8,
    /// How the body is framed.
    pub framing: BodyFraming,
    /// What decides which server gets it, where [`crate::settings::Balance`] is by hash.
    pub hash: u64,
    /// The fields of a request that asks for another protocol; only then may the server answer 101.
    pub upgrade: Option<Fields<'a>>,
    /// Whether the trailer fields of the body go with it.
    pub passes_trailers: bool,
}

/// A response head with the bytes it lies in.
pub(crate) struct Head {
    pub bytes: Vec<u8>,
    pub parsed: ParsedResponse,
}

impl Head {
    pub(crate) fn get(&self) -> ResponseHead<'_> {
        self.parsed.head(&self.bytes)
    }

    /// Reads a head that was written here, but for the empty line, of an answer to `method`: that of an origin, and what
    /// is added to it.
    pub(crate) fn read(mut bytes: Vec<u8>, method: Method) -> Option<Self> {
        bytes.extend_from_slice(b"\r\n");
        let head_bytes = u32::try_from(bytes.len()).ok()?;
        let mut parser =
            ResponseParser::new(HeadLimits { fields: u16::MAX, head_bytes, ..HeadLimits::default() });
        parser.reset(method);
        match parser.parse(&bytes) {
            Ok(Progress::Complete { length }) if length == bytes.len() => {
                Some(Self { parsed: parser.parsed(), bytes })
            }
            _ => None,
        }
    }
}

/// What came back: the final head, interim ones before it, and what has arrived of the body.
pub(crate) struct Received {
    pub head: Head,
    pub interim: Vec<Head>,
    pub rest: Vec<u8>,
    /// The rest of the request, if the server answered before it had all of it.
    pub upload: Option<Upload>,
}

/// What an exchange needs to know beside the request.
#[derive(Clone, Copy)]
pub(crate) struct ExchangeLimits<'p> {
    pub silence: Duration,
    pub arrivals: &'p Arrivals,
}

/// Where heads are read into before it is known how long they are, and what parses those that arrive whole. Filled by a
/// read and used up before the next wait, so that all connections of a core share one.
pub(crate) struct Arrivals {
    bytes: RefCell<Box<[u8]>>,
    parser: RefCell<ResponseParser>,
}

impl Default for Arrivals {
    fn default() -> Self {
        let bytes = vec![0; READ_BYTES].into_boxed_slice();
        Self { bytes: RefCell::new(bytes), parser: RefCell::new(new_parser(Method::Get)) }
    }
}

/// Sends the request and reads up to the end of the response's head.
pub(crate) async fn exchange<B: RequestBody>(
    stream: &Rc<Stream>,
    request: &OutgoingRequest<'_>,
    body: &mut B,
    limits: ExchangeLimits<'_>,
) -> Result<Box<Received>, UpstreamError> {
    let received = send_and_receive(stream, request, body, limits).await?;
    without_surprise(received, request)
}

/// RFC 9110 §15.2.2: a switch that nobody asked for would make a tunnel past every check of ours, and one in the middle
/// of a request's body would take the rest of it for the new protocol (§7.8).
fn without_surprise(
    received: Box<Received>,
    request: &OutgoingRequest<'_>,
) -> Result<Box<Received>, UpstreamError> {
    let head = received.head.get();
    let is_asked_for = || {
        let chosen = head.fields.get(FieldId::Upgrade).unwrap_or(b"");
        request
            .upgrade
            .is_some_and(|fields| upgrade_protocols(&fields).any(|asked| asked.eq_ignore_ascii_case(chosen)))
    };
    if head.status == 101 && (received.upload.is_some() || !is_asked_for()) {
        return Err(UpstreamError::UnexpectedUpgrade);
    }
    Ok(received)
}

async fn send_and_receive<B: RequestBody>(
    stream: &Rc<Stream>,
    request: &OutgoingRequest<'_>,
    body: &mut B,
    limits: ExchangeLimits<'_>,
) -> Result<Box<Received>, UpstreamError> {
    match stream.http2() {
        Some(stream) => stream.send_head(request.head, request.framing != BodyFraming::None)?,
        None => send_all(stream, request.head, limits.silence).await?,
    }
    if request.framing == BodyFraming::None {
        return HeadReader::new(request.method).read(stream, limits, Some(body)).await;
    }
    // Boxed: most requests have no body.
    Box::pin(upload_and_receive(stream, request, body, limits)).await
}

/// Sends the request's body while the response's head comes in.
async fn upload_and_receive<B: RequestBody>(
    stream: &Rc<Stream>,
    request: &OutgoingRequest<'_>,
    body: &mut B,
    limits: ExchangeLimits<'_>,
) -> Result<Box<Received>, UpstreamError> {
    let mut reader = HeadReader::new(request.method);
    let mut upload = Upload::new(stream, request.framing, limits.silence, request.passes_trailers);
    // A server may answer before it has read all of the body (RFC 9112 §9.5), and go on reading while it answers. What
    // has arrived of its answer stays in `reader` when the upload ends first.
    let sent = tokio::select! {
        biased;
        sent = upload.run(body) => sent,
        // The server waits for the client as we do, so that its silence means nothing until the upload has ended.
        early = reader.read(stream, ExchangeLimits { silence: UPLOAD_SILENCE, ..limits }, None::<&mut B>) => {
            return early.map(|received| with_upload(received, upload));
        }
    };
    reader.deadline = None;
    match sent {
        Ok(()) => reader.read(stream, limits, Some(body)).await,
        // The server may have answered before it closed its receiving side.
        Err(error @ UpstreamError::Broken(_)) => {
            let limits = ExchangeLimits { silence: Duration::from_millis(100), ..limits };
            let received = reader.read(stream, limits, Some(body)).await.map_err(|later| match later {
                // Where requests share a connection, it may also have said that it has not begun this one.
                UpstreamError::Untouched(_) => later,
                _ => error,
            })?;
            Ok(with_upload(received, upload))
        }
        Err(error) => Err(error),
    }
}

/// Goes on where [`crate::upstream::pipeline`] has found interim responses, and `rest` behind them.
pub(super) async fn go_on<B: RequestBody>(
    stream: &Stream,
    request: &OutgoingRequest<'_>,
    (interim, rest): (Vec<Head>, Vec<u8>),
    body: &mut B,
    limits: ExchangeLimits<'_>,
) -> Result<Box<Received>, UpstreamError> {
    interim.iter().for_each(|head| body.informational(&head.get()));
    let mut reader =
        HeadReader { bytes: rest, interim_count: interim.len(), ..HeadReader::new(request.method) };
    without_surprise(reader.read(stream, limits, Some(body)).await?, request)
}

fn with_upload(mut received: Box<Received>, upload: Upload) -> Box<Received> {
    received.upload = Some(upload);
    received
}

/// Reads a response's head, interim ones before it. May be dropped while it reads and asked again: nothing is lost.
struct HeadReader {
    method: Method,
    /// What follows the last whole head, and its parser.
    bytes: Vec<u8>,
    parser: Option<ResponseParser>,
    /// Those that came while the request's body was on its way.
    interim: Vec<Head>,
    interim_count: usize,
    /// Until when all of the head has to be here, since a head is small; set with the first wait after the request was
    /// sent, or after an interim response.
    deadline: Option<Instant>,
}

impl HeadReader {
    fn new(method: Method) -> Self {
        Self {
            method,
            bytes: Vec::new(),
            parser: None,
            interim: Vec::new(),
            interim_count: 0,
            deadline: None,
        }
    }

    /// Interim responses go to `body`, or are kept while that is being sent.
    async fn read<B: RequestBody>(
        &mut self,
        stream: &Stream,
        limits: ExchangeLimits<'_>,
        mut body: Option<&mut B>,
    ) -> Result<Box<Received>, UpstreamError> {
        loop {
            let head = match self.next_head()? {
                Some(head) => head,
                None => match self.receive(stream, limits).await? {
                    Some(head) => head,
                    None => continue,
                },
            };
            let head = match stream.http2() {
                Some(_) => Head { parsed: head.parsed.received_by(Version::Http2), ..head },
                None => head,
            };
            let status = head.get().status;
            if !(100..200).contains(&status) || status == 101 {
                let (interim, rest) = (std::mem::take(&mut self.interim), std::mem::take(&mut self.bytes));
                return Ok(Box::new(Received { head, interim, rest, upload: None }));
            }
            self.interim_count += 1;
            self.deadline = None;
            if self.interim_count > MOST_INTERIM_RESPONSES || self.interim.len() == INTERIM_RESPONSES {
                return Err(UpstreamError::TooManyInterim);
            }
            match &mut body {
                Some(body) => body.informational(&head.get()),
                None => self.interim.push(head),
            }
        }
    }

    /// The next head, if all of it is here.
    fn next_head(&mut self) -> Result<Option<Head>, UpstreamError> {
        if self.bytes.is_empty() {
            return Ok(None);
        }
        let parser = self.parser.get_or_insert_with(|| new_parser(self.method));
        let Progress::Complete { length } = parser.parse(&self.bytes).map_err(UpstreamError::Head)? else {
            return Ok(None);
        };
        let parsed = parser.parsed();
        parser.reset(self.method);
        let rest = self.bytes.split_off(length);
        Ok(Some(Head { bytes: std::mem::replace(&mut self.bytes, rest), parsed }))
    }

    /// Reads once, by way of `arrivals`: heads and small bodies take no more memory than they are long. Returns the
    /// head, if all of it has come at once.
    async fn receive(
        &mut self,
        stream: &Stream,
        limits: ExchangeLimits<'_>,
    ) -> Result<Option<Head>, UpstreamError> {
        let arrivals = limits.arrivals;
        let read = || {
            let mut bytes = arrivals.bytes.borrow_mut();
            let length = stream.try_read(&mut bytes)?;
            Ok((length, length < bytes.len()))
        };
        let length = read_when_ready(stream, limits.silence, &mut self.deadline, read).await?;
        let arrived = arrivals.bytes.borrow();
        let arrived =
            arrived.get(..length).filter(|bytes| !bytes.is_empty()).ok_or(UpstreamError::Incomplete)?;
        if self.bytes.is_empty() {
            let mut parser = arrivals.parser.borrow_mut();
            parser.reset(self.method);
            if let Progress::Complete { length } = parser.parse(arrived).map_err(UpstreamError::Head)? {
                let (head, rest) = arrived.split_at_checked(length).unwrap_or((arrived, b""));
                self.bytes.extend_from_slice(rest);
                return Ok(Some(Head { bytes: head.to_vec(), parsed: parser.parsed() }));
            }
        }
        self.bytes.extend_from_slice(arrived);
        Ok(None)
    }
}

pub(super) fn new_parser(method: Method) -> ResponseParser {
    let mut parser =
        ResponseParser::for_proxy(HeadLimits { fields: RESPONSE_FIELDS, ..HeadLimits::default() });
    parser.reset(method);
    parser
}

/// Appends what arrives; 0 at the end of the stream.
pub(crate) async fn read_more(
    stream: &Stream,
    buffer: &mut Vec<u8>,
    silence: Duration,
) -> Result<usize, UpstreamError> {
    buffer.reserve(READ_BYTES);
    let read = || {
        let length = stream.try_read_buf(buffer)?;
        Ok((length, buffer.len() < buffer.capacity()))
    };
    read_when_ready(stream, silence, &mut None, read).await
}

/// `read` says how much it has read, and whether there was room for more. The deadline is `silence` from the first wait
/// on, unless there is one already.
async fn read_when_ready(
    stream: &Stream,
    silence: Duration,
    deadline: &mut Option<Instant>,
    mut read: impl FnMut() -> io::Result<(usize, bool)>,
) -> Result<usize, UpstreamError> {
    loop {
        match read() {
            Ok((length, is_drained)) => {
                if length > 0 && is_drained {
                    stream.note_drained();
                }
                return Ok(length);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + silence);
                let readable = tokio::time::timeout_at(deadline, stream.readable()).await;
                readable
                    .map_err(|_| UpstreamError::ResponseTimeout)?
                    .map_err(UpstreamError::of_connection)?;
            }
            Err(error) => return Err(UpstreamError::of_connection(error)),
        }
    }
}
