//! DHTTP on a data core: the same cache, routes, upstreams, limits, counters and log as HTTP, another way to clients.

mod body;
mod respond;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use tidegate_core::Verdict;
use tidegate_dhttp::driver::{
    Arrival, Body, Immediate, Listener, Reading, Request, Response, Room, Security, ServerHandle,
    ServerOptions, Service, Window, serve as serve_listener,
};
use tidegate_http::normalize::normalize;
use tidegate_http::{BodyFraming, Method, Progress, RequestHead, RequestParser};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::data_core::{Bytes, DataCore, Scratch};
use crate::dhttp::body::UploadedBody;
use crate::dhttp::respond::{Exchange, Extents, error_response};
use crate::inner::InnerRequest;
use crate::service::fetch::{self, Answer, Incoming};
use crate::service::lookup::{self, Lookup};
use crate::service::seen::Seen;
use crate::session::respond::write_hit;

/// What every DHTTP server of a core is started with.
pub(crate) struct DhttpStart {
    pub handles: Arc<Mutex<Vec<ServerHandle>>>,
    pub token_secret: [u8; 16],
    pub window: Window,
    pub workers: usize,
}

/// Certificate and keys of this process: HTTP responses announce the certificate, also after the settings have changed.
pub(crate) fn security() -> Option<&'static Security> {
    static SECURITY: OnceLock<Option<Security>> = OnceLock::new();
    SECURITY
        .get_or_init(|| {
            Security::new()
                .inspect_err(|error| tracing::warn!(%error, "DHTTP is served without encryption"))
                .ok()
        })
        .as_ref()
}

/// A DHTTP server of a core.
pub(crate) struct Server {
    pub handle: ServerHandle,
    pub task: JoinHandle<()>,
}

/// Serves a listening address until its handle ends it.
pub(crate) fn serve(core: &Rc<DataCore>, listener: Listener, start: &DhttpStart) -> io::Result<Server> {
    let limits = core.plan().limits;
    let mut options = ServerOptions::new()?;
    options.token_secret = start.token_secret;
    options.window = Some(start.window.clone());
    options.security = security().cloned();
    options.head_timeout = limits.header_timeout;
    options.idle_timeout = limits.keep_alive_timeout;
    options.progress_timeout = options.progress_timeout.max(limits.header_timeout);
    options.min_rate_bytes_per_s = limits.response_min_rate_bytes_per_s.min(limits.body_min_rate_bytes_per_s);
    options.accepted = (limits.connections / start.workers).max(1);
    options.protocol.connections.total = options.protocol.connections.total.min(options.accepted);
    let site = Site { core: Rc::clone(core), local: listener.local_addr() };
    let (handle, run) = serve_listener(listener, site, options)?;
    start.handles.lock().unwrap_or_else(PoisonError::into_inner).push(handle.clone());
    Ok(Server { handle, task: tokio::task::spawn_local(run) })
}

/// What the data core's service looks like to DHTTP.
struct Site {
    core: Rc<DataCore>,
    local: SocketAddr,
}

impl Service for Site {
    fn reading(&self) -> Reading {
        self.core.with_plan(|plan| Reading { personality: plan.personality, limits: plan.limits.head })
    }

    fn respond_now(
        &self,
        arrival: &Arrival,
        head: &RequestHead<'_>,
        room: Room,
        http: &mut Vec<u8>,
    ) -> Immediate {
        let core = &self.core;
        if head.framing != BodyFraming::None || !matches!(head.method, Method::Get | Method::Head) {
            return Immediate::Unknown;
        }
        let plan = core.plan_ref();
        let mut scratch = core.scratch.borrow_mut();
        let Scratch { target, key, out, .. } = &mut *scratch;
        let Ok(normalized) = normalize(head, plan.personality, target) else {
            return Immediate::Unknown;
        };
        // Rules act where the request is read again, which is once for each.
        if plan.requests.is_some() {
            return Immediate::Unknown;
        }
        let began = Instant::now();
        let seen = Seen::of(&plan, head, arrival.client.ip().to_canonical());
        let Lookup::Hit(hit) = lookup::lookup(core, &plan, head, &normalized, &seen, key) else {
            return Immediate::Unknown;
        };
        out.clear();
        let form = write_hit(core, &plan.pseudonym, head, &hit, None, out);
        let stored_head = if form.with_stored_head { hit.object.head() } else { b"" };
        let (start, end) = form.body;
        let bytes = Bytes { head: (stored_head.len() + out.len()) as u64, body: end - start };
        let total_bytes = bytes.head + bytes.body;
        let written = if total_bytes <= room.most_bytes as u64 {
            http.extend_from_slice(stored_head);
            http.extend_from_slice(out);
            let mut at = start;
            while at < end {
                let extent = hit.object.body_at(at);
                let take = extent.len().min((end - at) as usize);
                http.extend_from_slice(&extent[..take]);
                at += take as u64;
            }
            Immediate::Written
        } else if room.connection {
            let first = [stored_head, out].concat();
            let pieces = Extents { object: hit.object.clone(), at: start, end };
            Immediate::Long(Response::from_wire(Body::pieces(first.into(), pieces), Some(total_bytes)))
        } else {
            return Immediate::TooLong;
        };
        core.metrics.requests_total.add(1);
        lookup::count_hit(core, &hit);
        core.account(arrival.client.ip(), head, form.status, bytes, hit.label(), began);
        written
    }

    fn call(&self, request: Request) -> impl Future<Output = Response> + 'static {
        answer(Rc::clone(&self.core), self.local, request)
    }
}

/// Answers what the process's own transports ask.
pub(crate) async fn answer_inside(core: Rc<DataCore>, mut requests: mpsc::Receiver<InnerRequest>) {
    while let Some(InnerRequest { request, local, answer: answered }) = requests.recv().await {
        let core = Rc::clone(&core);
        tokio::task::spawn_local(async move {
            // Who asked may have gone.
            let _ = answered.send(answer(core, local, request).await.into_wire());
        });
    }
}

/// Answers a request that the cache alone could not, or whose answer is long.
async fn answer(core: Rc<DataCore>, local: SocketAddr, request: Request) -> Response {
    let began = Instant::now();
    let plan = core.plan();
    let mut parser = RequestParser::new(plan.limits.head);
    let mut scratch = Vec::new();
    // The head has passed both of these once; only new settings can make a difference.
    let Ok(Progress::Complete { .. }) = parser.parse(&request.head) else {
        core.metrics.requests_refused_total.add(1);
        return error_response(&core, 400);
    };
    // There is no connection that could change its protocol.
    let head = RequestHead { upgrade: false, ..parser.head(&request.head) };
    let Ok(normalized) = normalize(&head, plan.personality, &mut scratch) else {
        core.metrics.requests_refused_total.add(1);
        return error_response(&core, 400);
    };
    core.metrics.requests_total.add(1);
    let peer = request.arrival.client.ip().to_canonical();
    let mut body = UploadedBody::new(request.body, plan.limits.body_bytes);
    let asked = request.arrival.local.map_or(local, |ip| SocketAddr::new(ip, local.port()));
    let verdict = plan.police(request.arrival.client, || Ok(asked), &head, normalized.path);
    let answer = if verdict != Verdict::Continue {
        // There is no connection to reset, and a client that hears nothing asks again.
        core.metrics.requests_policed_total.add(1);
        Answer::status(503)
    } else if head.method == Method::Connect {
        Answer::status(405)
    } else if matches!(head.framing, BodyFraming::Length(length) if length > plan.limits.body_bytes) {
        Answer::status(413)
    } else {
        let seen = Seen::of(&plan, &head, peer);
        let is_plain = head.framing == BodyFraming::None && matches!(head.method, Method::Get | Method::Head);
        let found = match is_plain {
            true => lookup::lookup(&core, &plan, &head, &normalized, &seen, &mut Vec::new()),
            false => Lookup::Miss,
        };
        if let Lookup::Hit(hit) = found {
            // What comes over a connection, or was put there by another request meanwhile.
            lookup::count_hit(&core, &hit);
            Answer::Stored(hit)
        } else {
            let is_absent = matches!(found, Lookup::Absent);
            let incoming = Incoming {
                head: &head,
                normalized: &normalized,
                buffer: &request.head,
                peer,
                seen,
                is_absent,
            };
            fetch::answer(&core, incoming, &mut body).await
        }
    };
    let exchange = Exchange { core: Rc::clone(&core), peer, head: request.head.clone(), began };
    exchange.respond(&head, answer, body)
}
