//! Connections that a client opens: kept for further requests, so that a long answer behind a NAT, or an encrypted one,
//! takes no more round trips than one over a connection of the server's.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use tidegate_http::{BodyFraming, FieldId, HeadLimits, Method, ResponseParser};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::carry::bind_address;
use super::client::Shared;
use super::request::{FetchBody, FetchError, FetchRequest, FetchResponse, Via};
use super::security::{self, Fingerprint};
use super::service::Body;
use super::stream::{Reader, ResponseHead, StreamError, StreamLimits, write_body};
use crate::wire::RequestId;

/// Most connections without a request; the oldest makes room for the newest.
const IDLE: usize = 64;
/// Most of them to one server.
const IDLE_PER_SERVER: usize = 6;
/// How long they are kept: less than servers do.
const IDLE_TIME: Duration = Duration::from_secs(10);

type ReadSide = Box<dyn AsyncRead + Send + Unpin>;
type WriteSide = Box<dyn AsyncWrite + Send + Unpin>;

/// What is spoken on a connection, and with whom.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Channel {
    to: SocketAddr,
    dhttp: bool,
    /// With TLS, and the server's certificate.
    server: Option<Fingerprint>,
}

struct Opened {
    reader: Reader<ReadSide>,
    write: WriteSide,
}

/// Connections without a request.
#[derive(Default)]
pub(super) struct Pool {
    /// Oldest first.
    idle: VecDeque<(Channel, Instant, Opened)>,
    /// A task sees to it that they end in time.
    is_watched: bool,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("idle", &self.idle.len()).finish_non_exhaustive()
    }
}

impl Pool {
    /// The connection that was used last.
    fn take(&mut self, channel: Channel, now: Instant) -> Option<Opened> {
        self.expire(now);
        let place = self.idle.iter().rposition(|(other, ..)| *other == channel)?;
        self.idle.remove(place).map(|(.., opened)| opened)
    }

    fn put(&mut self, channel: Channel, opened: Opened, now: Instant) {
        let same = |(other, ..): &(Channel, Instant, Opened)| *other == channel;
        if self.idle.iter().filter(|entry| same(entry)).count() >= IDLE_PER_SERVER
            && let Some(oldest) = self.idle.iter().position(same)
        {
            self.idle.remove(oldest);
        } else if self.idle.len() >= IDLE {
            self.idle.pop_front();
        }
        self.idle.push_back((channel, now, opened));
    }

    fn expire(&mut self, now: Instant) {
        self.idle.retain(|(_, since, _)| now.saturating_duration_since(*since) < IDLE_TIME);
    }
}

/// Ends connections that nobody has used for some time, until there are none.
async fn watch(shared: Weak<Shared>) {
    loop {
        tokio::time::sleep(IDLE_TIME).await;
        let Some(alive) = shared.upgrade() else { return };
        let mut pool = alive.pool();
        pool.expire(Instant::now());
        if pool.idle.is_empty() {
            pool.is_watched = false;
            return;
        }
    }
}

impl Opened {
    /// Whether the server has neither closed it nor said anything.
    async fn is_quiet(&mut self) -> bool {
        if !self.reader.is_empty() {
            return false;
        }
        let inner = self.reader.inner();
        poll_fn(|context| {
            let mut byte = [0];
            let read = Pin::new(&mut *inner).poll_read(context, &mut ReadBuf::new(&mut byte));
            Poll::Ready(read.is_pending())
        })
        .await
    }
}

/// What a request by a connection of the client's needs beside itself.
#[derive(Clone, Copy)]
pub(super) struct StreamProtocol<'a> {
    /// The id and the client's UDP port; without them it goes by HTTP.
    pub dhttp: Option<(RequestId, u16)>,
    pub tls: Option<(Fingerprint, &'a TlsConnector)>,
}

/// What went wrong, and whether a kept connection may have been closed before it had the request.
struct Failed {
    error: FetchError,
    unanswered: bool,
}

impl Shared {
    /// Over a connection that the client opens, or opened for a request before.
    pub(super) async fn by_stream(
        self: &Arc<Self>,
        request: FetchRequest,
        protocol: StreamProtocol<'_>,
    ) -> Result<FetchResponse, FetchError> {
        let to =
            if protocol.dhttp.is_some() { request.server } else { request.http.unwrap_or(request.server) };
        let server = protocol.tls.map(|(server, _)| server);
        let channel = Channel { to, dhttp: protocol.dhttp.is_some(), server };
        // A kept connection may end just when the request is sent: only what may be repeated goes there.
        if matches!(request.body, FetchBody::Full(_))
            && request.method.is_idempotent()
            && let Some(opened) = self.kept(channel).await
        {
            match self.exchange(opened, request.clone(), channel, protocol).await {
                Err(Failed { unanswered: true, .. }) => {}
                Err(Failed { error, .. }) => return Err(error),
                Ok(response) => return Ok(response),
            }
        }
        let opened = self
            .open(to, protocol.tls)
            .await
            .map_err(|reason| FetchError::NoAnswer { reason, sent: false })?;
        self.exchange(opened, request, channel, protocol).await.map_err(|failed| failed.error)
    }

    async fn kept(&self, channel: Channel) -> Option<Opened> {
        loop {
            let mut opened = self.pool().take(channel, Instant::now())?;
            if opened.is_quiet().await {
                self.count(|metrics| metrics.dhttp_client_connections_reused_total.add(1));
                return Some(opened);
            }
        }
    }

    async fn open(&self, to: SocketAddr, tls: Option<(Fingerprint, &TlsConnector)>) -> io::Result<Opened> {
        let connect_timeout = self.options.connect_timeout;
        let stream = timeout(connect_timeout, self.connect(to)).await.unwrap_or_else(late)?;
        stream.set_nodelay(true)?;
        let (read, write): (ReadSide, WriteSide) = match tls {
            None => {
                let (read, write) = stream.into_split();
                (Box::new(read), Box::new(write))
            }
            Some((_, tls)) => {
                let connect = tls.connect(security::server_name(), stream);
                let (read, write) = tokio::io::split(
                    timeout(connect_timeout, connect)
                        .await
                        .unwrap_or_else(late)
                        .map_err(security::tls_failure)?,
                );
                (Box::new(read), Box::new(write))
            }
        };
        Ok(Opened { reader: Reader::new(read, self.limits()), write })
    }

    /// A connection from the client's own address, where it has a definite one.
    async fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let options = &self.options;
        let (socket, own): (TcpSocket, IpAddr) = match to {
            SocketAddr::V4(_) => (TcpSocket::new_v4()?, options.bind_v4.into()),
            SocketAddr::V6(_) => (TcpSocket::new_v6()?, options.bind_v6.into()),
        };
        bind_address(&socket, own)?;
        socket.connect(to).await
    }

    /// Sends a request and reads the head of its response; the body is read meanwhile, by a task.
    async fn exchange(
        self: &Arc<Self>,
        opened: Opened,
        request: FetchRequest,
        channel: Channel,
        protocol: StreamProtocol<'_>,
    ) -> Result<FetchResponse, Failed> {
        let Opened { mut reader, write } = opened;
        let header =
            protocol.dhttp.map_or_else(Vec::new, |(id, port)| self.state().core.tcp_header(id, port));
        let first = [&header[..], &request.head].concat();
        // A task of its own: a server may answer while the body is still sent.
        let upload = tokio::spawn(upload(write, first, request.body, self.limits()));
        let (mut begun, mut speaks_http) = (false, false);
        let response = async {
            if let Some((id, _)) = protocol.dhttp {
                let answered = reader.response_id().await?;
                begun = true;
                speaks_http = answered.0.starts_with(b"HTTP/1.");
                if answered != id {
                    return Err(StreamError::Response);
                }
            }
            reader.response_head(request.method, self.options.progress_timeout).await
        };
        let head = match response.await {
            Ok(head) => head,
            Err(error) => {
                let unanswered =
                    matches!(error, StreamError::Io(_) | StreamError::Closed) && !begun && reader.is_empty();
                let error = if speaks_http { FetchError::SpeaksHttp } else { failure(error) };
                return Err(Failed { error, unanswered });
            }
        };
        let via = if channel.dhttp { Via::ClientConnection } else { Via::Http };
        let (sender, body) = Body::channel();
        let keeps = may_be_kept(&head, request.method, channel);
        let (framing, shared) = (head.framing, Arc::downgrade(self));
        tokio::spawn(async move {
            if reader.body(framing, sender).await.is_ok() && keeps {
                keep(shared, channel, reader, upload).await;
            }
        });
        Ok(FetchResponse {
            status: head.status,
            head: head.head,
            body,
            via,
            from: channel.to,
            asked: channel.to,
        })
    }

    fn pool(&self) -> std::sync::MutexGuard<'_, Pool> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn late<T>(_: tokio::time::error::Elapsed) -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::TimedOut, "the server did not accept a connection in time"))
}

/// Why there is no response on a connection.
fn failure(error: StreamError) -> FetchError {
    let reason = match error {
        StreamError::Io(reason) => reason,
        StreamError::Closed => io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the server closed the connection before it answered",
        ),
        StreamError::Slow => io::Error::new(io::ErrorKind::TimedOut, "the server did not answer in time"),
        _ => return FetchError::BadAnswer,
    };
    FetchError::NoAnswer { reason, sent: true }
}

/// Whether another request may follow (RFC 9112 §9.3). Fields that concern a connection mean nothing in DHTTP.
fn may_be_kept(head: &ResponseHead, method: Method, channel: Channel) -> bool {
    if head.framing == BodyFraming::UntilClose {
        return false;
    }
    if channel.dhttp {
        return true;
    }
    let mut parser = ResponseParser::new(HeadLimits::default());
    parser.reset(method);
    if parser.parse(&head.head).is_err() || !head.head.starts_with(b"HTTP/1.1") {
        return false;
    }
    let fields = parser.head(&head.head).fields;
    let mut options = fields.get_all(FieldId::Connection).flat_map(|value| value.split(|byte| *byte == b','));
    !options.any(|option| option.trim_ascii().eq_ignore_ascii_case(b"close"))
}

/// Keeps a connection for some time once all of the request has been sent.
async fn keep(
    shared: Weak<Shared>,
    channel: Channel,
    reader: Reader<ReadSide>,
    upload: JoinHandle<Option<WriteSide>>,
) {
    let Ok(Some(write)) = upload.await else { return };
    let Some(alive) = shared.upgrade() else { return };
    let mut pool = alive.pool();
    pool.put(channel, Opened { reader, write }, Instant::now());
    if !std::mem::replace(&mut pool.is_watched, true) {
        tokio::spawn(watch(shared));
    }
}

/// Sends a request; what goes wrong shows in the response that does not come.
async fn upload(
    mut to: WriteSide,
    first: Vec<u8>,
    body: FetchBody,
    limits: StreamLimits,
) -> Option<WriteSide> {
    let body = match body {
        FetchBody::Full(bytes) => Body::full(bytes),
        // Taken before: this copy of the request breaks off.
        FetchBody::Streamed(upload) => upload.take()?,
    };
    match write_body(&mut to, &first, body, &limits).await {
        Ok(()) => Some(to),
        Err(error) => {
            tracing::debug!(%error, "request was not sent whole");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened() -> Opened {
        let limits = StreamLimits {
            head_timeout: IDLE_TIME,
            progress_timeout: IDLE_TIME,
            idle_timeout: IDLE_TIME,
            min_rate_bytes_per_s: 0,
        };
        let (read, write) = tokio::io::split(tokio::io::empty());
        Opened { reader: Reader::new(Box::new(read), limits), write: Box::new(write) }
    }

    fn channel(host: u8) -> Channel {
        Channel { to: SocketAddr::from(([192, 0, 2, host], 80)), dhttp: true, server: None }
    }

    #[test]
    fn a_pool_holds_so_many_connections_to_one_server_and_in_all() {
        let now = Instant::now();
        let mut pool = Pool::default();
        (0..20).for_each(|_| pool.put(channel(1), opened(), now));
        assert_eq!(pool.idle.len(), IDLE_PER_SERVER);
        (0..200).for_each(|host| pool.put(channel(host), opened(), now));
        assert_eq!(pool.idle.len(), IDLE);
        assert!(pool.take(channel(199), now).is_some());
        assert!(pool.take(channel(199), now).is_none());
        assert!(pool.take(channel(2), now).is_none(), "the oldest have made room");
    }

    #[test]
    fn a_connection_of_another_kind_or_too_old_is_not_taken() {
        let now = Instant::now();
        let mut pool = Pool::default();
        pool.put(channel(1), opened(), now);
        let others = [
            Channel { dhttp: false, ..channel(1) },
            Channel { server: Some(Fingerprint::default()), ..channel(1) },
            channel(2),
        ];
        assert!(others.into_iter().all(|other| pool.take(other, now).is_none()));
        assert!(pool.take(channel(1), now + IDLE_TIME).is_none());
        assert!(pool.idle.is_empty());
    }
}
