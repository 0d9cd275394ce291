//! One request on one connection: its body goes out while the response's head comes in.

use std::cell::RefCell;
use std::io;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use tidegate_http::forward::upgrade_protocols;
use tidegate_http::{BodyFraming, FieldId, Fields, HeadLimits, Method, Progress, ResponseParser};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::upstream::UpstreamError;
use crate::upstream::upload::{RequestBody, Upload, send_all};

/// Bytes read from a server at once.
pub(crate) const READ_BYTES: usize = 32 * 1024;
/// Silence of a server while the request's body is on its way.
const UPLOAD_SILENCE: Duration = Duration::from_secs(24 * 3600);
/// Fields that a response may have: more than a request, since it is our own server's.
const RESPONSE_FIELDS: u16 = 1000;
/// Interim responses that a server may send before the final one.
pub(super) const INTERIM_RESPONSES: usize = 16;

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
    /// For [`crate::settings::Balance::HashUrl`].
    pub hash_url: u64,
    /// For [`crate::settings::Balance::HashHost`].
    pub hash_host: u64,
    /// The fields of a request that asks for another protocol; only then may the server answer 101.
    pub upgrade: Option<Fields<'a>>,
}

/// A response head with the bytes it lies in.
pub(crate) struct Head {
    pub bytes: Vec<u8>,
    pub parser: ResponseParser,
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

/// Where heads are read into before it is known how long they are. Filled by a read and used up before the next wait, so
/// that all connections of a core share one.
pub(crate) struct Arrivals(RefCell<Box<[u8]>>);

impl Default for Arrivals {
    fn default() -> Self {
        Self(RefCell::new(vec![0; READ_BYTES].into_boxed_slice()))
    }
}

/// Sends the request and reads up to the end of the response's head.
pub(crate) async fn exchange<B: RequestBody>(
    stream: &Rc<TcpStream>,
    request: &OutgoingRequest<'_>,
    body: &mut B,
    limits: ExchangeLimits<'_>,
) -> Result<Box<Received>, UpstreamError> {
    let received = send_and_receive(stream, request, body, limits).await?;
    // RFC 9110 §15.2.2: a switch that nobody asked for would make a tunnel past every check of ours, and one in the
    // middle of a request's body would take the rest of it for the new protocol (§7.8).
    let head = received.head.parser.head(&received.head.bytes);
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
    stream: &Rc<TcpStream>,
    request: &OutgoingRequest<'_>,
    body: &mut B,
    limits: ExchangeLimits<'_>,
) -> Result<Box<Received>, UpstreamError> {
    send_all(stream, request.head, limits.silence).await?;
    if request.framing == BodyFraming::None {
        return HeadReader::new(request.method).read(stream, limits, Some(body)).await;
    }
    // Boxed: most requests have no body.
    Box::pin(upload_and_receive(stream, request, body, limits)).await
}

/// Sends the request's body while the response's head comes in.
async fn upload_and_receive<B: RequestBody>(
    stream: &Rc<TcpStream>,
    request: &OutgoingRequest<'_>,
    body: &mut B,
    limits: ExchangeLimits<'_>,
) -> Result<Box<Received>, UpstreamError> {
    let mut reader = HeadReader::new(request.method);
    let mut upload = Upload::new(stream, request.framing, limits.silence);
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
    match sent {
        Ok(()) => {
            reader.since = Instant::now();
            reader.read(stream, limits, Some(body)).await
        }
        // The server may have answered before it closed its receiving side.
        Err(error @ UpstreamError::Broken(_)) => {
            reader.since = Instant::now();
            let limits = ExchangeLimits { silence: Duration::from_millis(100), ..limits };
            let received = reader.read(stream, limits, Some(body)).await.map_err(|_| error)?;
            Ok(with_upload(received, upload))
        }
        Err(error) => Err(error),
    }
}

fn with_upload(mut received: Box<Received>, upload: Upload) -> Box<Received> {
    received.upload = Some(upload);
    received
}

/// Reads a response's head, interim ones before it. May be dropped while it reads and asked again: nothing is lost.
struct HeadReader {
    method: Method,
    parser: ResponseParser,
    bytes: Vec<u8>,
    /// Those that came while the request's body was on its way.
    interim: Vec<Head>,
    interim_count: usize,
    /// When the request had been sent, or the last interim response had come.
    since: Instant,
}

impl HeadReader {
    fn new(method: Method) -> Self {
        Self {
            method,
            parser: new_parser(method),
            bytes: Vec::new(),
            interim: Vec::new(),
            interim_count: 0,
            since: Instant::now(),
        }
    }

    /// Interim responses go to `body`, or are kept while that is being sent.
    async fn read<B: RequestBody>(
        &mut self,
        stream: &TcpStream,
        limits: ExchangeLimits<'_>,
        mut body: Option<&mut B>,
    ) -> Result<Box<Received>, UpstreamError> {
        loop {
            let progress = match self.bytes.is_empty() {
                true => Progress::Incomplete,
                false => self.parser.parse(&self.bytes).map_err(UpstreamError::Head)?,
            };
            match progress {
                Progress::Complete { length } => {
                    let rest = self.bytes.split_off(length);
                    let status = self.parser.head(&self.bytes).status;
                    let parser = std::mem::replace(&mut self.parser, new_parser(self.method));
                    let head = Head { bytes: std::mem::take(&mut self.bytes), parser };
                    if !(100..200).contains(&status) || status == 101 {
                        let interim = std::mem::take(&mut self.interim);
                        return Ok(Box::new(Received { head, interim, rest, upload: None }));
                    }
                    self.interim_count += 1;
                    self.since = Instant::now();
                    if self.interim_count > INTERIM_RESPONSES {
                        return Err(UpstreamError::Incomplete);
                    }
                    match &mut body {
                        Some(body) => body.informational(&head.parser.head(&head.bytes)),
                        None => self.interim.push(head),
                    }
                    self.bytes = rest;
                }
                Progress::Incomplete => {
                    // All of the head has to come within that time, since a head is small.
                    let left = limits.silence.saturating_sub(self.since.elapsed());
                    if read_head(stream, limits.arrivals, &mut self.bytes, left).await? == 0 {
                        return Err(UpstreamError::Incomplete);
                    }
                }
            }
        }
    }
}

pub(super) fn new_parser(method: Method) -> ResponseParser {
    let mut parser = ResponseParser::new(HeadLimits { fields: RESPONSE_FIELDS, ..HeadLimits::default() });
    parser.reset(method);
    parser
}

/// Tells the reactor that a read has taken all there was, so that the next one waits without asking the kernel first:
/// edge-triggered readiness means that a byte more is an event of its own (epoll(7)).
fn note_drained(stream: &TcpStream) {
    let _ = stream.try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
}

/// Appends what arrives, by way of `arrivals`: heads and small bodies take no more memory than they are long.
async fn read_head(
    stream: &TcpStream,
    arrivals: &Arrivals,
    buffer: &mut Vec<u8>,
    silence: Duration,
) -> Result<usize, UpstreamError> {
    let read = || {
        let mut arrived = arrivals.0.borrow_mut();
        let length = stream.try_read(&mut arrived)?;
        buffer.extend_from_slice(arrived.get(..length).unwrap_or(&[]));
        Ok((length, length < arrived.len()))
    };
    read_when_ready(stream, silence, read).await
}

/// Appends what arrives; 0 at the end of the stream.
pub(crate) async fn read_more(
    stream: &TcpStream,
    buffer: &mut Vec<u8>,
    silence: Duration,
) -> Result<usize, UpstreamError> {
    buffer.reserve(READ_BYTES);
    let read = || {
        let length = stream.try_read_buf(buffer)?;
        Ok((length, buffer.len() < buffer.capacity()))
    };
    read_when_ready(stream, silence, read).await
}

/// `read` says how much it has read, and whether there was room for more.
async fn read_when_ready(
    stream: &TcpStream,
    silence: Duration,
    mut read: impl FnMut() -> io::Result<(usize, bool)>,
) -> Result<usize, UpstreamError> {
    let mut deadline = None;
    loop {
        match read() {
            Ok((length, is_drained)) => {
                if length > 0 && is_drained {
                    note_drained(stream);
                }
                return Ok(length);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + silence);
                let readable = tokio::time::timeout_at(deadline, stream.readable()).await;
                readable.map_err(|_| UpstreamError::ResponseTimeout)?.map_err(UpstreamError::Broken)?;
            }
            Err(error) => return Err(UpstreamError::Broken(error)),
        }
    }
}
