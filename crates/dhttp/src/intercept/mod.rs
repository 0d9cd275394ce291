//! An interception cache (DHTTP §IV-A): on a router, it takes requests by UDP on their way to servers and answers them
//! from its own address. Because it pretends to be nobody else and lets TCP pass, packets of one client may take other
//! routes at any time without breaking anything.
//!
//! A response is stored under the address that the client asked, beside the URL: who asks his own server for somebody
//! else's URL poisons the cache for himself only.

mod store;

use std::cell::RefCell;
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tidegate_core::metric_set;
use tidegate_http::cache::{Policy, vary};
use tidegate_http::forward::{ForwardContext, write_field, write_response_fields, write_upstream_request};
use tidegate_http::normalize::{Normalized, Personality, normalize};
use tidegate_http::{
    BodyFraming, FieldId, FieldRules, HeadLimits, Method, Progress, RequestHead, RequestParser, ResponseHead,
    ResponseParser, status_reason, write_chunk, write_last_chunk,
};

use crate::driver::{
    Aborted, Arrival, Body, BodySender, DhttpClient, FetchBody, FetchError, FetchRequest, FetchResponse,
    Immediate, Request, Response, Room, Service,
};

use store::{Store, Stored, secondary_key};

/// The name of the cache in `Via`.
const PSEUDONYM: &str = "tidegate-cache";

/// Fields with which a client wants something other than the whole; such requests go to the server.
const SELECTING: [FieldId; 6] = [
    FieldId::IfMatch,
    FieldId::IfNoneMatch,
    FieldId::IfModifiedSince,
    FieldId::IfUnmodifiedSince,
    FieldId::IfRange,
    FieldId::Range,
];

/// Settings of an interception cache.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Memory for responses, in bytes.
    pub memory_bytes: usize,
    /// Longest body that is stored, in bytes.
    pub object_bytes: usize,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self { memory_bytes: 64 << 20, object_bytes: 1 << 20 }
    }
}

metric_set! {
    /// What an interception cache counts. Its thread is the only writer.
    pub struct CacheMetrics {
        Counter intercept_hits_total: "Requests answered from the cache.",
        Counter intercept_misses_total: "Requests for which the server was asked.",
        Counter intercept_stored_total: "Responses stored.",
        Counter intercept_failures_total: "Requests for which the server gave no answer.",
        Counter intercept_unrouted_total: "Requests that had not been on their way to anybody else.",
        Gauge intercept_used_bytes: "Memory that stored responses take.",
    }
}

/// The service of an interception cache, for [`crate::driver::serve`] over [`crate::driver::Listener::intercept`].
#[derive(Debug)]
pub struct InterceptionCache(Rc<Shared>);

#[derive(Debug)]
struct Shared {
    client: DhttpClient,
    options: CacheOptions,
    store: RefCell<Store>,
    metrics: Arc<CacheMetrics>,
}

impl InterceptionCache {
    /// An empty cache that asks servers by `client`.
    pub fn new(client: DhttpClient, options: CacheOptions) -> Self {
        let store = RefCell::new(Store::new(options.memory_bytes));
        Self(Rc::new(Shared { client, options, store, metrics: Arc::default() }))
    }

    /// The counters.
    pub fn metrics(&self) -> Arc<CacheMetrics> {
        Arc::clone(&self.0.metrics)
    }
}

impl Service for InterceptionCache {
    fn respond_now(
        &self,
        arrival: &Arrival,
        head: &RequestHead<'_>,
        room: Room,
        http: &mut Vec<u8>,
    ) -> Immediate {
        let mut scratch = Vec::new();
        let (Some(server), Ok(normalized)) =
            (arrival.server, normalize(head, Personality::Strict, &mut scratch))
        else {
            return Immediate::Unknown;
        };
        let Some((first, body)) = self.0.find(server, head, &normalized) else { return Immediate::Unknown };
        if first.len() + body.len() > room.most_bytes {
            return Immediate::TooLong;
        }
        self.0.metrics.intercept_hits_total.add(1);
        http.extend_from_slice(&first);
        http.extend_from_slice(&body);
        Immediate::Written
    }

    fn call(&self, request: Request) -> impl Future<Output = Response> + 'static {
        answer(Rc::clone(&self.0), request)
    }
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

impl Shared {
    /// A stored response to this request, as it is sent.
    fn find(
        &self,
        server: SocketAddr,
        head: &RequestHead<'_>,
        normalized: &Normalized<'_>,
    ) -> Option<(Vec<u8>, Bytes)> {
        if head.method != Method::Get || SELECTING.iter().any(|id| head.fields.has(*id)) {
            return None;
        }
        let found = self.store.borrow_mut().find(&key(server, normalized), head, unix_s())?;
        let mut first = found.head.to_vec();
        write_field(b"Age", found.age_s.to_string().as_bytes(), &mut first);
        write_field(b"Content-Length", found.body.len().to_string().as_bytes(), &mut first);
        first.extend_from_slice(b"\r\n");
        Some((first, found.body))
    }

    fn changed(&self) {
        let used = self.store.borrow().used_bytes() as u64;
        let shown = self.metrics.intercept_used_bytes.get();
        self.metrics.intercept_used_bytes.add(used.wrapping_sub(shown));
    }
}

/// What a response is stored under.
fn key(server: SocketAddr, normalized: &Normalized<'_>) -> Vec<u8> {
    let mut key = server.to_string().into_bytes();
    for part in [normalized.authority, normalized.path, normalized.query.unwrap_or_default()] {
        key.push(0);
        key.extend_from_slice(part);
    }
    if normalized.query.is_some() {
        key.push(0);
    }
    key
}

async fn answer(cache: Rc<Shared>, request: Request) -> Response {
    let Some(server) = request.arrival.server else {
        cache.metrics.intercept_unrouted_total.add(1);
        return Response::full(404, &[], b"");
    };
    let mut parser = RequestParser::new(HeadLimits::default());
    let mut scratch = Vec::new();
    // The driver has read the head before.
    let Ok(Progress::Complete { .. }) = parser.parse(&request.head) else {
        return Response::full(400, &[], b"");
    };
    let head = parser.head(&request.head);
    let Ok(normalized) = normalize(&head, Personality::Strict, &mut scratch) else {
        return Response::full(400, &[], b"");
    };
    if let Some((first, body)) = cache.find(server, &head, &normalized) {
        cache.metrics.intercept_hits_total.add(1);
        let total = (first.len() + body.len()) as u64;
        return Response::from_wire(Body::pieces(first.into(), std::iter::once(body)), Some(total));
    }
    cache.metrics.intercept_misses_total.add(1);
    let asked_s = unix_s();
    let client = request.arrival.client;
    let fetched = match request.body.collect(crate::wire::MAX_HEADER_BYTES + 65_536).await {
        Ok(body) => cache.fetch(server, client, &head, &normalized, body).await,
        Err(Aborted) => return Response::full(400, &[], b""),
    };
    match fetched {
        Ok(response) => cache.pass(response, key(server, &normalized), &head, asked_s),
        Err(error) => {
            cache.metrics.intercept_failures_total.add(1);
            tracing::debug!(%error, %server, "no answer from the server");
            Response::full(if matches!(error, FetchError::NoAnswer { .. }) { 504 } else { 502 }, &[], b"")
        }
    }
}

impl Shared {
    async fn fetch(
        &self,
        server: SocketAddr,
        client: SocketAddr,
        head: &RequestHead<'_>,
        normalized: &Normalized<'_>,
        body: Bytes,
    ) -> Result<FetchResponse, FetchError> {
        let context = ForwardContext {
            client: client.ip().to_canonical(),
            scheme: "http",
            default_host: b"",
            via_pseudonym: PSEUDONYM,
            trusted_client: false,
            keep_upgrade: false,
            framing: head.framing,
            removed: &[FieldId::Expect],
            added: &[],
            own_cookie: b"",
            rules: FieldRules::NONE,
        };
        let mut out = Vec::with_capacity(1024);
        write_upstream_request(head, normalized, &context, &mut out);
        let request = FetchRequest {
            server,
            site: String::from_utf8_lossy(normalized.authority).into_owned(),
            method: head.method,
            head: out.into(),
            body: FetchBody::Full(body),
            by_tcp: false,
            http: None,
        };
        self.client.fetch(request).await
    }

    /// Hands a response on as it comes, and stores it if the rules allow it.
    fn pass(
        self: Rc<Self>,
        response: FetchResponse,
        key: Vec<u8>,
        request: &RequestHead<'_>,
        asked_s: u64,
    ) -> Response {
        let mut parser = ResponseParser::new(HeadLimits::default());
        parser.reset(request.method);
        let Ok(Progress::Complete { .. }) = parser.parse(&response.head) else {
            return Response::full(502, &[], b"");
        };
        let head = parser.head(&response.head);
        if !request.method.is_safe() && head.status < 400 {
            // RFC 9111 §4.4.
            self.store.borrow_mut().remove(&key);
        }
        let storing = self.storing(&head, request, key, asked_s);
        let kept = format!("HTTP/1.1 {} {}\r\n", head.status, status_reason(head.status)).into_bytes();
        let mut first = kept;
        write_response_fields(&head, |id, _| matches!(id, FieldId::ContentLength | FieldId::Age), &mut first);
        write_field(b"Via", format!("DHTTP {PSEUDONYM}").as_bytes(), &mut first);
        let kept = Bytes::copy_from_slice(&first);
        if let Some(age) = head.fields.get(FieldId::Age) {
            write_field(b"Age", age, &mut first);
        }
        let length = head.fields.get(FieldId::ContentLength);
        if let Some(length) = length {
            write_field(b"Content-Length", length, &mut first);
        }
        let chunked = matches!(head.framing, BodyFraming::Chunked | BodyFraming::UntilClose);
        if chunked {
            write_field(b"Transfer-Encoding", b"chunked", &mut first);
        }
        first.extend_from_slice(b"\r\n");
        let total_bytes = match head.framing {
            BodyFraming::None => Some(first.len() as u64),
            BodyFraming::Length(length) => Some(first.len() as u64 + length),
            BodyFraming::Chunked | BodyFraming::UntilClose => None,
        };
        let (sender, http) = Body::channel();
        let passage = Passage { storing, kept, chunked };
        tokio::task::spawn_local(async move {
            // Whoever asked has gone, or the server has: both ends of the body know.
            let _ = passage.run(&self, first.into(), response.body, sender).await;
        });
        Response::from_wire(http, total_bytes)
    }

    fn storing(
        &self,
        head: &ResponseHead<'_>,
        request: &RequestHead<'_>,
        key: Vec<u8>,
        asked_s: u64,
    ) -> Option<Storing> {
        let whole = request.method == Method::Get && !SELECTING.iter().any(|id| request.fields.has(*id));
        let fits =
            !matches!(head.framing, BodyFraming::Length(length) if length > self.options.object_bytes as u64);
        if !whole || !fits {
            return None;
        }
        let policy = Policy::new(request, head, asked_s, unix_s()).ok()?;
        let mut varies_by = Vec::new();
        vary::write_names(&head.fields, &mut varies_by);
        let selected_by = secondary_key(&varies_by, &request.fields);
        Some(Storing { key, policy, varies_by, selected_by, body: Vec::new() })
    }
}

/// A response that is being stored.
struct Storing {
    key: Vec<u8>,
    policy: Policy,
    varies_by: Vec<u8>,
    selected_by: Vec<u8>,
    body: Vec<u8>,
}

/// A body on its way from the server to the client, and into the store.
struct Passage {
    storing: Option<Storing>,
    /// The head as it is stored.
    kept: Bytes,
    chunked: bool,
}

impl Passage {
    async fn run(
        mut self,
        cache: &Shared,
        first: Bytes,
        mut body: Body,
        mut sender: BodySender,
    ) -> Result<(), Aborted> {
        sender.send(first).await?;
        while let Some(piece) = body.next().await {
            let piece = piece?;
            if let Some(storing) = &mut self.storing {
                if storing.body.len() + piece.len() > cache.options.object_bytes {
                    self.storing = None;
                } else {
                    storing.body.extend_from_slice(&piece);
                }
            }
            if !self.chunked {
                sender.send(piece).await?;
            } else if !piece.is_empty() {
                let mut chunk = Vec::with_capacity(piece.len() + 24);
                write_chunk(&piece, &mut chunk);
                sender.send(chunk.into()).await?;
            }
        }
        // Before the client has all of it: it finds the response in the cache with its next request.
        if let Some(Storing { key, policy, varies_by, selected_by, body }) = self.storing {
            let stored = Stored { policy, varies_by, selected_by, head: self.kept, body: body.into() };
            cache.store.borrow_mut().insert(key, stored);
            cache.metrics.intercept_stored_total.add(1);
            cache.changed();
        }
        if self.chunked {
            let mut last = Vec::new();
            write_last_chunk([], &mut last);
            sender.send(last.into()).await?;
        }
        sender.end();
        Ok(())
    }
}
