//! One request on one connection: its body goes out while the response's head comes in.

use std::io;
use std::time::Duration;

use tidegate_http::{
    BodyFraming, HeadLimits, Method, Progress, ResponseParser, write_chunk_header, write_last_chunk,
};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::upstream::{BodyReadError, UpstreamError};

/// Bytes read from a server at once.
pub(crate) const READ_BYTES: usize = 32 * 1024;
/// Silence of a server while the request's body is on its way.
const UPLOAD_SILENCE: Duration = Duration::from_secs(24 * 3600);
/// Interim responses that a server may send before the final one.
const INTERIM_RESPONSES: usize = 16;

/// A request as it goes to a server.
pub(crate) struct OutgoingRequest<'a> {
    /// The whole head, framing fields included.
    pub head: &'a [u8],
    pub method: Method,
    /// How the body is framed.
    pub framing: BodyFraming,
    /// For [`crate::settings::Balance::HashUrl`].
    pub hash_url: u64,
    /// For [`crate::settings::Balance::HashHost`].
    pub hash_host: u64,
    /// The head asks for another protocol; only then may the server answer 101.
    pub upgrade: bool,
}

/// A request body, read as it is sent.
pub(crate) trait RequestBody {
    /// The next piece; `None` at the end.
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError>;
    /// Whether the request can be sent again: nothing was read from the body yet, or there is nothing in it.
    fn is_replayable(&self) -> bool;
}

/// A request without a body.
pub(crate) struct EmptyBody;

impl RequestBody for EmptyBody {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        Ok(None)
    }

    fn is_replayable(&self) -> bool {
        true
    }
}

impl<B: RequestBody> RequestBody for &mut B {
    async fn chunk(&mut self) -> Result<Option<&[u8]>, BodyReadError> {
        (**self).chunk().await
    }

    fn is_replayable(&self) -> bool {
        (**self).is_replayable()
    }
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
    /// All of the request was sent.
    pub request_complete: bool,
}

/// What an exchange needs to know beside the request.
#[derive(Clone, Copy)]
pub(crate) struct ExchangeLimits {
    pub silence: Duration,
}

/// Sends the request and reads up to the end of the response's head.
pub(crate) async fn exchange<B: RequestBody>(
    stream: &TcpStream,
    request: &OutgoingRequest<'_>,
    body: &mut B,
    limits: ExchangeLimits,
) -> Result<Received, UpstreamError> {
    let received = send_and_receive(stream, request, body, limits).await?;
    // RFC 9110 §15.2.2: a switch that nobody asked for would make a tunnel past every check of ours.
    if !request.upgrade && received.head.parser.head(&received.head.bytes).status == 101 {
        return Err(UpstreamError::UnexpectedUpgrade);
    }
    Ok(received)
}

async fn send_and_receive<B: RequestBody>(
    stream: &TcpStream,
    request: &OutgoingRequest<'_>,
    body: &mut B,
    limits: ExchangeLimits,
) -> Result<Received, UpstreamError> {
    send_all(stream, request.head, limits.silence).await?;
    let mut reader = HeadReader::new(request.method);
    if request.framing == BodyFraming::None {
        let mut received = reader.read(stream, limits.silence).await?;
        received.request_complete = true;
        return Ok(received);
    }
    // A server may answer, and refuse, before it has read all of the body (RFC 9112 §9.5). What has arrived of its
    // answer stays in `reader` when the upload ends first.
    let sent = tokio::select! {
        biased;
        sent = send_body(stream, request.framing, body, limits.silence) => sent,
        // The server waits for the client as we do, so that its silence means nothing until the upload has ended.
        early = reader.read(stream, UPLOAD_SILENCE) => return early,
    };
    match sent {
        Ok(()) => {
            let mut received = reader.read(stream, limits.silence).await?;
            received.request_complete = true;
            Ok(received)
        }
        // The server may have answered before it closed its receiving side.
        Err(error @ UpstreamError::Broken(_)) => {
            reader.read(stream, Duration::from_millis(100)).await.map_err(|_| error)
        }
        Err(error) => Err(error),
    }
}

async fn send_body<B: RequestBody>(
    stream: &TcpStream,
    framing: BodyFraming,
    body: &mut B,
    silence: Duration,
) -> Result<(), UpstreamError> {
    let chunked = framing == BodyFraming::Chunked;
    let mut frame = Vec::new();
    while let Some(piece) = body.chunk().await.map_err(UpstreamError::Client)? {
        if chunked {
            frame.clear();
            write_chunk_header(piece.len(), &mut frame);
            frame.extend_from_slice(piece);
            frame.extend_from_slice(b"\r\n");
            send_all(stream, &frame, silence).await?;
        } else {
            send_all(stream, piece, silence).await?;
        }
    }
    if chunked {
        frame.clear();
        write_last_chunk([], &mut frame);
        send_all(stream, &frame, silence).await?;
    }
    Ok(())
}

async fn send_all(stream: &TcpStream, mut bytes: &[u8], silence: Duration) -> Result<(), UpstreamError> {
    while !bytes.is_empty() {
        match stream.try_write(bytes) {
            Ok(written) => bytes = bytes.get(written..).unwrap_or(&[]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let writable = tokio::time::timeout(silence, stream.writable()).await;
                writable.map_err(|_| UpstreamError::ResponseTimeout)?.map_err(UpstreamError::Broken)?;
            }
            Err(error) => return Err(UpstreamError::Broken(error)),
        }
    }
    Ok(())
}

/// Reads a response's head, interim ones before it. May be dropped while it reads and asked again: nothing is lost.
struct HeadReader {
    method: Method,
    parser: ResponseParser,
    bytes: Vec<u8>,
    interim: Vec<Head>,
}

impl HeadReader {
    fn new(method: Method) -> Self {
        Self { method, parser: new_parser(method), bytes: Vec::new(), interim: Vec::new() }
    }

    async fn read(&mut self, stream: &TcpStream, silence: Duration) -> Result<Received, UpstreamError> {
        loop {
            match self.parser.parse(&self.bytes).map_err(UpstreamError::Head)? {
                Progress::Complete { length } => {
                    let rest = self.bytes.split_off(length);
                    let status = self.parser.head(&self.bytes).status;
                    let parser = std::mem::replace(&mut self.parser, new_parser(self.method));
                    let head = Head { bytes: std::mem::take(&mut self.bytes), parser };
                    if !(100..200).contains(&status) || status == 101 {
                        let interim = std::mem::take(&mut self.interim);
                        return Ok(Received { head, interim, rest, request_complete: false });
                    }
                    if self.interim.len() == INTERIM_RESPONSES {
                        return Err(UpstreamError::Incomplete);
                    }
                    self.interim.push(head);
                    self.bytes = rest;
                }
                Progress::Incomplete => {
                    if read_more(stream, &mut self.bytes, silence).await? == 0 {
                        return Err(UpstreamError::Incomplete);
                    }
                }
            }
        }
    }
}

fn new_parser(method: Method) -> ResponseParser {
    let mut parser = ResponseParser::new(HeadLimits::default());
    parser.reset(method);
    parser
}

/// Appends what arrives; 0 at the end of the stream.
pub(crate) async fn read_more(
    stream: &TcpStream,
    buffer: &mut Vec<u8>,
    silence: Duration,
) -> Result<usize, UpstreamError> {
    let mut deadline = None;
    buffer.reserve(READ_BYTES);
    loop {
        match stream.try_read_buf(buffer) {
            Ok(length) => return Ok(length),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + silence);
                let readable = tokio::time::timeout_at(deadline, stream.readable()).await;
                readable.map_err(|_| UpstreamError::ResponseTimeout)?.map_err(UpstreamError::Broken)?;
            }
            Err(error) => return Err(UpstreamError::Broken(error)),
        }
    }
}
