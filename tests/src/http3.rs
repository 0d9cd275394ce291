//! A client of HTTP/3, and what makes frames itself for tests of wrong ones.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use bytes::{Buf, Bytes};
use h3::client::{RequestStream, SendRequest};
use h3::error::StreamError;
use http::{HeaderMap, Request, Response};
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{
    ClientConfig, Connection, ConnectionError, Endpoint, ReadToEndError, RecvStream, SendStream,
    TransportConfig, VarInt,
};
use tokio::task::JoinHandle;

pub use crate::http2::{field, get, run, until, url};
use crate::{Certificate, PATIENCE, Site};

/// A window of more than any test sends.
pub const WIDE: u32 = 1 << 30;

/// Codes of RFC 9114 §8.1 and RFC 9204 §6.
#[allow(missing_docs, reason = "their names are the RFCs'")]
pub mod code {
    pub const NO_ERROR: u64 = 0x100;
    pub const INTERNAL_ERROR: u64 = 0x102;
    pub const STREAM_CREATION_ERROR: u64 = 0x103;
    pub const CLOSED_CRITICAL_STREAM: u64 = 0x104;
    pub const FRAME_UNEXPECTED: u64 = 0x105;
    pub const FRAME_ERROR: u64 = 0x106;
    pub const EXCESSIVE_LOAD: u64 = 0x107;
    pub const ID_ERROR: u64 = 0x108;
    pub const SETTINGS_ERROR: u64 = 0x109;
    pub const MISSING_SETTINGS: u64 = 0x10a;
    pub const REQUEST_REJECTED: u64 = 0x10b;
    pub const REQUEST_CANCELLED: u64 = 0x10c;
    pub const REQUEST_INCOMPLETE: u64 = 0x10d;
    pub const MESSAGE_ERROR: u64 = 0x10e;
    pub const QPACK_DECOMPRESSION_FAILED: u64 = 0x200;
    pub const QPACK_ENCODER_STREAM_ERROR: u64 = 0x201;
    pub const QPACK_DECODER_STREAM_ERROR: u64 = 0x202;
}

/// One request with its response.
pub type Stream = RequestStream<h3_quinn::BidiStream<Bytes>, Bytes>;

/// A connection of QUIC on which HTTP/3 is to be spoken, from this address of the host's, with streams of which the server
/// may send so much before the client has taken any.
///
/// # Errors
/// As QUIC has it.
pub async fn quic(
    address: [u8; 4],
    site: &Site,
    certificate: &Certificate,
    window_bytes: u32,
) -> Result<(Endpoint, Connection), ConnectionError> {
    let mut transport = TransportConfig::default();
    transport.stream_receive_window(window_bytes.into());
    quic_with(transport, address, site, certificate).await
}

/// The same with other manners.
///
/// # Errors
/// As QUIC has it.
pub async fn quic_with(
    mut transport: TransportConfig,
    address: [u8; 4],
    site: &Site,
    certificate: &Certificate,
) -> Result<(Endpoint, Connection), ConnectionError> {
    let tls = QuicClientConfig::try_from(Certificate::client_config(&[certificate], b"h3")).unwrap();
    let mut config = ClientConfig::new(Arc::new(tls));
    transport.receive_window(WIDE.into()).max_idle_timeout(Some(PATIENCE.try_into().unwrap()));
    config.transport_config(Arc::new(transport));
    let endpoint = Endpoint::client((address, 0).into()).unwrap();
    let connection = endpoint.connect_with(config, site.address, "a.example").unwrap().await?;
    Ok((endpoint, connection))
}

/// Has all that an endpoint sends come from another port of this address from now on.
pub fn move_away(endpoint: &Endpoint, address: [u8; 4]) {
    endpoint.rebind(UdpSocket::bind(SocketAddr::from((address, 0))).unwrap()).unwrap();
}

/// What the server ends the connection with.
///
/// # Panics
/// When it ends in another way.
pub async fn end(connection: &Connection) -> u64 {
    match connection.closed().await {
        ConnectionError::ApplicationClosed(close) => close.error_code.into_inner(),
        other => panic!("the server says nothing of HTTP/3: {other:?}"),
    }
}

/// What the server ends a stream with; `None` if that is not how it has ended.
pub fn stream_code(error: &StreamError) -> Option<u64> {
    match error {
        StreamError::RemoteTerminate { code, .. } => Some(code.value()),
        _ => None,
    }
}

/// One connection.
pub struct Client {
    /// Where requests are sent.
    pub requests: SendRequest<h3_quinn::OpenStreams, Bytes>,
    /// What carries it.
    pub quic: Connection,
    /// Where it is.
    pub endpoint: Endpoint,
    /// Ends with it.
    pub connection: JoinHandle<h3::error::ConnectionError>,
}

/// All of a response.
#[derive(Debug)]
pub struct Answer {
    /// Its head.
    pub head: Response<()>,
    /// Its content.
    pub body: Vec<u8>,
    /// What came after the content.
    pub trailers: Option<HeaderMap>,
}

impl Answer {
    /// The status.
    pub fn status(&self) -> u16 {
        self.head.status().as_u16()
    }
}

impl Client {
    /// From the host's own address, which is exempt from being judged.
    pub async fn connect(site: &Site, certificate: &Certificate) -> Self {
        Self::connect_from([127, 0, 0, 1], site, certificate, WIDE).await
    }

    /// From this address of the host's, with streams of which the server may send so much before any is taken.
    pub async fn connect_from(
        address: [u8; 4],
        site: &Site,
        certificate: &Certificate,
        window_bytes: u32,
    ) -> Self {
        let (endpoint, quic) = quic(address, site, certificate, window_bytes).await.unwrap();
        Self::over(endpoint, quic).await
    }

    /// On a connection of QUIC's.
    pub async fn over(endpoint: Endpoint, quic: Connection) -> Self {
        let (mut connection, requests) =
            h3::client::new(h3_quinn::Connection::new(quic.clone())).await.unwrap();
        let connection = tokio::spawn(async move { connection.wait_idle().await });
        Self { requests, quic, endpoint, connection }
    }

    /// Sends a request's head; its content is to come.
    ///
    /// # Errors
    /// As HTTP/3 has it.
    pub async fn begin(&self, request: http::request::Builder) -> Result<Stream, StreamError> {
        self.requests.clone().send_request(request.body(()).unwrap()).await
    }

    /// Sends a request without content.
    pub async fn send(&self, request: http::request::Builder) -> Stream {
        let mut stream = self.begin(request).await.unwrap();
        stream.finish().await.unwrap();
        stream
    }

    /// Sends a request without content; its response.
    ///
    /// # Errors
    /// As HTTP/3 has it.
    pub async fn ask(&self, request: http::request::Builder) -> Result<Answer, StreamError> {
        let mut stream = self.begin(request).await?;
        stream.finish().await?;
        whole(&mut stream).await
    }

    /// Sends a GET; its response.
    pub async fn get(&self, target: &str) -> Answer {
        self.ask(get(target)).await.unwrap()
    }

    /// Sends a request with content; the response may come before all of it is taken.
    ///
    /// # Errors
    /// As HTTP/3 has it.
    pub async fn upload(&self, target: &str, content: Vec<u8>) -> Result<Answer, StreamError> {
        self.upload_with(Request::put(url(target)), content).await
    }

    /// The same with another head.
    ///
    /// # Errors
    /// As HTTP/3 has it.
    pub async fn upload_with(
        &self,
        request: http::request::Builder,
        content: Vec<u8>,
    ) -> Result<Answer, StreamError> {
        let (mut sending, mut receiving) = self.begin(request).await?.split();
        let mut content = Bytes::from(content);
        let send = async {
            while !content.is_empty() {
                let piece = content.split_to(content.len().min(64 * 1024));
                if sending.send_data(piece).await.is_err() {
                    return;
                }
            }
            let _ = sending.finish().await;
        };
        let (_, answer) = tokio::join!(send, whole(&mut receiving));
        answer
    }
}

/// All of a response, with its trailers.
///
/// # Errors
/// As HTTP/3 has it.
pub async fn whole<S>(stream: &mut RequestStream<S, Bytes>) -> Result<Answer, StreamError>
where
    S: h3::quic::RecvStream,
{
    let head = stream.recv_response().await?;
    let body = rest(stream).await?;
    Ok(Answer { head, body, trailers: stream.recv_trailers().await? })
}

/// The content that is to come of a response.
///
/// # Errors
/// As HTTP/3 has it.
pub async fn rest<S>(stream: &mut RequestStream<S, Bytes>) -> Result<Vec<u8>, StreamError>
where
    S: h3::quic::RecvStream,
{
    let mut body = Vec::new();
    while let Some(piece) = piece(stream).await? {
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

/// The next piece of a response's content.
///
/// # Errors
/// As HTTP/3 has it.
pub async fn piece<S>(stream: &mut RequestStream<S, Bytes>) -> Result<Option<Bytes>, StreamError>
where
    S: h3::quic::RecvStream,
{
    let piece = stream.recv_data().await?;
    Ok(piece.map(|mut piece| piece.copy_to_bytes(piece.remaining())))
}

/// Gives a request up.
pub fn cancel(stream: &mut Stream) {
    stream.stop_stream(h3::error::Code::H3_REQUEST_CANCELLED);
    stream.stop_sending(h3::error::Code::H3_REQUEST_CANCELLED);
}

/// Types of frames (RFC 9114 §7.2).
#[allow(missing_docs, reason = "their names are the RFC's")]
pub mod frame_type {
    pub const DATA: u64 = 0;
    pub const HEADERS: u64 = 1;
    pub const SETTINGS: u64 = 4;
    pub const GOAWAY: u64 = 7;
}

/// What a control stream begins with: its type, and settings that say nothing (RFC 9114 §6.2.1).
pub const CONTROL: &[u8] = &[0, 4, 0];

/// An integer of QUIC's (RFC 9000 §16).
pub fn integer(value: u64) -> Vec<u8> {
    match value {
        0..0x40 => vec![value as u8],
        0x40..0x4000 => (value as u16 | 0x4000).to_be_bytes().to_vec(),
        0x4000..0x4000_0000 => (value as u32 | 0x8000_0000).to_be_bytes().to_vec(),
        _ => (value | 0xc000_0000_0000_0000).to_be_bytes().to_vec(),
    }
}

/// The integer that these bytes begin with, which are taken.
pub fn take_integer(bytes: &mut &[u8]) -> Option<u64> {
    let first = *bytes.first()?;
    let length = 1 << (first >> 6);
    let (taken, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    let value = taken[1..].iter().fold(u64::from(first & 0x3f), |value, byte| value << 8 | u64::from(*byte));
    Some(value)
}

/// A frame (RFC 9114 §7.1).
pub fn frame(kind: u64, payload: &[u8]) -> Vec<u8> {
    [&integer(kind)[..], &integer(payload.len() as u64), payload].concat()
}

/// The frames that are whole in these bytes.
pub fn frames(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut frames = Vec::new();
    while let Some(kind) = take_integer(&mut bytes)
        && let Some(length) = take_integer(&mut bytes)
        && let Some((payload, rest)) = bytes.split_at_checked(length as usize)
    {
        frames.push((kind, payload.to_vec()));
        bytes = rest;
    }
    frames
}

/// A field section without references to any table (RFC 9204 §4.5.6), in a frame.
pub fn fields(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut section = vec![0, 0];
    let mut text = |first: u8, bits: u32, text: &str| {
        // RFC 7541 §5.1.
        let mask = (1 << bits) - 1;
        match text.len() {
            length if length < mask => section.push(first | length as u8),
            length => {
                section.push(first | mask as u8);
                let mut left = length - mask;
                while left >= 128 {
                    section.push(left as u8 | 128);
                    left >>= 7;
                }
                section.push(left as u8);
            }
        }
        section.extend(text.as_bytes());
    };
    for (name, value) in fields {
        text(0x20, 3, name);
        text(0, 7, value);
    }
    frame(frame_type::HEADERS, &section)
}

/// The head of a request with this method and target, and these further fields.
pub fn head(method: &str, target: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let pseudo = [(":method", method), (":scheme", "https"), (":authority", "a.example"), (":path", target)];
    fields(&[&pseudo[..], more].concat())
}

/// A connection on which the test makes all that is said itself.
pub struct Raw {
    /// What carries it.
    pub quic: Connection,
    /// Where it is.
    pub endpoint: Endpoint,
    /// Its control stream, which has to stay.
    pub control: SendStream,
}

impl Raw {
    /// From this address of the host's, with a control stream.
    pub async fn connect_from(address: [u8; 4], site: &Site, certificate: &Certificate) -> Self {
        let (endpoint, quic) = quic(address, site, certificate, WIDE).await.unwrap();
        Self::over(endpoint, quic).await
    }

    /// On a connection of QUIC's.
    pub async fn over(endpoint: Endpoint, quic: Connection) -> Self {
        let control = one_way(&quic, CONTROL).await;
        Self { quic, endpoint, control }
    }

    /// Opens a stream that begins with these bytes.
    pub async fn begin(&self, bytes: &[u8]) -> (SendStream, RecvStream) {
        let (mut send, receive) = self.quic.open_bi().await.unwrap();
        // The server may have ended it by now.
        let _ = send.write_all(bytes).await;
        (send, receive)
    }

    /// Says these bytes on a stream of their own, and all that is answered.
    ///
    /// # Errors
    /// What the server ends the stream with.
    pub async fn ask(&self, bytes: &[u8]) -> Result<Vec<u8>, u64> {
        let (mut send, receive) = self.begin(bytes).await;
        let _ = send.finish();
        answer(receive).await
    }

    /// Whether a sound request on this connection is answered.
    pub async fn is_served(&self) -> bool {
        self.ask(&head("GET", "/", &[])).await.is_ok_and(|answer| is_ok(&answer))
    }
}

/// The frames of a stream, one after the other.
pub struct Frames {
    stream: RecvStream,
    bytes: Vec<u8>,
}

impl Frames {
    /// Those of a stream of a request.
    pub fn of(stream: RecvStream) -> Self {
        Self { stream, bytes: Vec::new() }
    }

    /// Those of the server's control stream, which is the only one that it opens.
    pub async fn of_control(connection: &Connection) -> Self {
        let mut stream = connection.accept_uni().await.unwrap();
        let mut kind = [u8::MAX];
        stream.read_exact(&mut kind).await.unwrap();
        assert_eq!(kind, [0]);
        Self::of(stream)
    }

    /// Waits for the next one; `None` at the end of the stream.
    ///
    /// # Errors
    /// What the server ends the stream with, or `None` if the connection has ended.
    pub async fn next(&mut self) -> Result<Option<(u64, Vec<u8>)>, Option<u64>> {
        loop {
            if let Some((kind, payload)) = frames(&self.bytes).into_iter().next() {
                self.bytes.drain(..frame(kind, &payload).len());
                return Ok(Some((kind, payload)));
            }
            match self.stream.read_chunk(1 << 16, true).await {
                Ok(Some(chunk)) => self.bytes.extend_from_slice(&chunk.bytes),
                Ok(None) if self.bytes.is_empty() => return Ok(None),
                Ok(None) => panic!("the last frame is not whole"),
                Err(quinn::ReadError::Reset(code)) => return Err(Some(code.into_inner())),
                Err(_) => return Err(None),
            }
        }
    }
}

/// Opens a stream in one direction that begins with these bytes.
pub async fn one_way(connection: &Connection, bytes: &[u8]) -> SendStream {
    let mut stream = connection.open_uni().await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream
}

/// All that is answered on a stream.
///
/// # Errors
/// What the server ends the stream with.
///
/// # Panics
/// When it ends in another way.
pub async fn answer(mut stream: RecvStream) -> Result<Vec<u8>, u64> {
    match stream.read_to_end(1 << 28).await {
        Ok(answer) => Ok(answer),
        Err(ReadToEndError::Read(quinn::ReadError::Reset(code))) => Err(code.into_inner()),
        Err(other) => panic!("the stream ends otherwise: {other:?}"),
    }
}

/// Whether an answer is one with status 200, which has a number of its own (RFC 9204, appendix A).
pub fn is_ok(answer: &[u8]) -> bool {
    frames(answer).first().is_some_and(|(kind, section)| {
        *kind == frame_type::HEADERS && section.starts_with(&[0, 0, 0b1100_0000 | 25])
    })
}

/// A code as QUIC has it.
pub fn varint(code: u64) -> VarInt {
    VarInt::from_u64(code).unwrap()
}
