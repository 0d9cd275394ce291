//! DHTTP on a data core: the same cache, routes, upstreams, limits, counters and log as HTTP, another way to clients.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use tidegate_core::hooks::Reply;
use tidegate_core::{NodeId, Verdict};
use tidegate_dhttp::driver::{
    Arrival, Body, Immediate, Listener, Note, Reading, Request, Response, Room, Security, ServerHandle,
    ServerOptions, Service, Window, serve as serve_listener,
};
use tidegate_dhttp::server::Unreachable;
use tidegate_http::normalize::normalize;
use tidegate_http::{BodyFraming, Method, RequestHead};
use tokio::task::JoinHandle;

use crate::cache::lookup::{self, Lookup};
use crate::data_core::{Bytes, DataCore, Scratch};
use crate::defence::CameFrom;
use crate::message::{self, Extents, From, Whose};
use crate::service::client_info::ClientInfo;
use crate::session::respond::{self as heads, write_hit};
use crate::session::transmit::extents;

/// One client network may have this part of the connections that clients may open.
const CLIENT_SHARE: usize = 8;
/// In the log, who asked from an address that is not proved.
const NOBODY: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// What every DHTTP server of a core is started with.
pub(crate) struct DhttpStart {
    pub handles: Arc<Mutex<Vec<ServerHandle>>>,
    pub token_secret: [u8; 16],
    pub window: Window,
    pub unreachable: Unreachable,
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
    options.protocol.connections.unreachable = start.unreachable.clone();
    options.security = security().cloned();
    options.head_timeout = limits.header_timeout;
    options.idle_timeout = limits.keep_alive_timeout;
    options.progress_timeout = options.progress_timeout.max(limits.header_timeout);
    options.min_rate_bytes_per_s = limits.response_min_rate_bytes_per_s.min(limits.body_min_rate_bytes_per_s);
    options.accepted = (limits.connections / start.workers).max(1);
    options.accepted_per_client = (options.accepted / CLIENT_SHARE).max(1);
    options.protocol.connections.total = options.protocol.connections.total.min(options.accepted);
    let site = Site {
        core: Rc::clone(core),
        local: listener.local_addr(),
        places: RefCell::default(),
        next_note: Cell::new(0),
    };
    let (handle, run) = serve_listener(listener, site, options)?;
    start.handles.lock().unwrap_or_else(PoisonError::into_inner).push(handle.clone());
    Ok(Server { handle, task: tokio::task::spawn_local(run) })
}

/// What the data core's service looks like to DHTTP.
struct Site {
    core: Rc<DataCore>,
    local: SocketAddr,
    /// Whose connections are open, where there is a defence.
    places: RefCell<HashMap<Note, NodeId>>,
    next_note: Cell<Note>,
}

impl Site {
    /// Writes what refuses a request, if there is room for it.
    fn refuse(
        &self,
        peer: IpAddr,
        head: &RequestHead<'_>,
        reply: &Reply,
        room: Room,
        http: &mut Vec<u8>,
    ) -> Immediate {
        let core = &self.core;
        core.metrics.requests_total.add(1);
        core.metrics.requests_policed_total.add(1);
        let (out, bytes) = heads::reply(core, head, reply, true);
        core.account(peer, head, reply.status, bytes, "none", Instant::now());
        if out.len() <= room.most_bytes {
            http.extend_from_slice(&out);
            return Immediate::Written;
        }
        if !room.connection {
            return Immediate::TooLong;
        }
        let total_bytes = Some(out.len() as u64);
        Immediate::Long(Response::from_wire(Body::full(out.into()), total_bytes))
    }
}

impl Service for Site {
    fn blocks(&self) -> bool {
        self.core.with_plan(|plan| plan.connections.as_ref().is_some_and(|admission| admission.ignores_any()))
    }

    fn is_blocked(&self, source: IpAddr) -> bool {
        self.core
            .with_plan(|plan| plan.connections.as_ref().is_some_and(|admission| admission.ignores(source)))
    }

    fn meet(&self, peer: SocketAddr, local: SocketAddr) -> Option<Note> {
        let refused = self.core.with_plan(|plan| {
            let admission = plan.connections.as_ref().filter(|admission| admission.acts_on_connections());
            admission.is_some_and(|admission| admission.on_connect(peer, local).0 != Verdict::Continue)
        });
        if refused {
            self.core.metrics.connections_policed_total.add(1);
            return None;
        }
        let place = self.core.meet_peer(peer).ok()?;
        let note = self.next_note.get();
        self.next_note.set(note + 1);
        if let Some(place) = place {
            self.places.borrow_mut().insert(note, place);
        }
        Some(note)
    }

    fn part(&self, peer: SocketAddr, note: Note) {
        let place = self.places.borrow_mut().remove(&note);
        self.core.part(place, peer);
    }

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
        if plan.requests.is_some() || plan.reviews_request(head.method_bytes, &normalized) {
            return Immediate::Unknown;
        }
        let began = Instant::now();
        let info = ClientInfo::of(&plan, head, arrival.client.ip().to_canonical(), false);
        let Lookup::Hit(hit) = lookup::lookup(core, &plan, head, &normalized, &info, key) else {
            return Immediate::Unknown;
        };
        out.clear();
        let form = write_hit(core, &plan.pseudonym, head, &hit, None, out);
        let stored_head = if form.with_stored_head { hit.object.head() } else { b"" };
        let (start, end) = form.body;
        let bytes = Bytes { head: (stored_head.len() + out.len()) as u64, body: end - start };
        let total_bytes = bytes.head + bytes.body;
        if total_bytes > room.most_bytes as u64 && !room.connection {
            return Immediate::TooLong;
        }
        let peer = arrival.client.ip().to_canonical();
        if let (Some(defence), true) = (&core.defence, room.proved) {
            let now_ms = core.clock.elapsed_ms();
            if let Some(reply) = defence.judge_message(peer, &info, head, &normalized, now_ms) {
                return self.refuse(peer, head, &reply, room, http);
            }
        }
        let written = match total_bytes <= room.most_bytes as u64 {
            true => {
                http.extend_from_slice(stored_head);
                http.extend_from_slice(out);
                extents(&hit.object, start, end).for_each(|extent| http.extend_from_slice(extent));
                Immediate::Written
            }
            false => {
                let pieces = Extents { object: hit.object.clone(), at: start, end };
                let wire = Body::pieces([stored_head, out].concat().into(), pieces);
                Immediate::Long(Response::from_wire(wire, Some(total_bytes)))
            }
        };
        core.metrics.requests_total.add(1);
        lookup::count_hit(core, &hit);
        if let (Some(defence), true) = (&core.defence, room.proved && form.status >= 400) {
            let now_ms = core.clock.elapsed_ms();
            defence.responded_to_message(peer, &info, &normalized, form.status, CameFrom::HERE, now_ms);
        }
        // Whoever is named as the source of a datagram need not have sent it.
        let peer = if room.proved { peer } else { NOBODY };
        core.account(peer, head, form.status, bytes, hit.label(), began);
        written
    }

    fn call(&self, request: Request) -> impl Future<Output = Response> + 'static {
        let from = From { local: self.local, whose: Whose::Proved, is_encrypted: false };
        message::answer(Rc::clone(&self.core), from, request)
    }
}
