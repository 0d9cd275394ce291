//! Requests that must not be repeated, by UDP and on connections that clients open: executed once.

use std::io;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use tokio::sync::Notify;

use super::accepted::whole;
use super::server::{Driver, random};
use super::service::{Body, Request, Response, Service};
use crate::once::{Admission, Channel, Content, ReplayWindow, WindowConfig};
use crate::server::once::lock;
use crate::server::{SharedWindow, Ticket};
use crate::wire::Numbered;

/// The window of a server, to be given to each of its cores.
#[derive(Clone, Debug)]
pub struct Window {
    replay: SharedWindow,
    /// A request has been executed: who waits for its response may look again.
    executed: Arc<Notify>,
}

impl Window {
    /// A window that has seen nothing.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn new() -> io::Result<Self> {
        Self::with(WindowConfig::default())
    }

    /// A window with these bounds.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn with(config: WindowConfig) -> io::Result<Self> {
        let replay = ReplayWindow::new(config, random()?, Instant::now());
        Ok(Self { replay: Arc::new(Mutex::new(replay)), executed: Arc::default() })
    }

    pub(super) fn shared(&self) -> SharedWindow {
        Arc::clone(&self.replay)
    }

    fn record(&self, numbered: &Numbered, response: Option<&[u8]>) {
        lock(&self.replay).executed(numbered, response, Instant::now());
        self.executed.notify_waiters();
    }

    /// Decides about a request on a connection, once it is not being executed elsewhere.
    async fn admit(&self, numbered: &Numbered, content: Content<'_>, client: IpAddr) -> Admission {
        let digest = lock(&self.replay).digest(content);
        loop {
            let executed = self.executed.notified();
            let now = Instant::now();
            let admission = lock(&self.replay).admit_digest(numbered, digest, client, Channel::Stream, now);
            if admission != Admission::Running {
                return admission;
            }
            executed.await;
        }
    }
}

/// Records that nothing is known of a request whose execution was given up.
struct Executing<'w> {
    window: &'w Window,
    numbered: Numbered,
}

impl Drop for Executing<'_> {
    fn drop(&mut self) {
        // Without effect if the response was recorded.
        self.window.record(&self.numbered, None);
    }
}

impl<S: Service> Driver<S> {
    /// Sends the response to a request once more.
    pub(super) fn repeat(
        self: &Rc<Self>,
        ticket: Ticket,
        response: Bytes,
        local: Option<IpAddr>,
        now: Instant,
    ) {
        let id = ticket.global_id();
        let route = self.core.borrow_mut().respond(ticket, &response, now);
        if let Some(job) = self.follow(route, id, local) {
            let _ = job.send(Body::full(response));
        }
    }

    /// How many bytes of a response are waited for before its channel is chosen.
    pub(super) fn gathered_bytes(&self, ticket: &Ticket) -> usize {
        let core = self.core.borrow();
        let room = core.room_bytes(ticket);
        if core.numbered(ticket).is_some() { room.max(core.kept_response_bytes()) } else { room }
    }

    /// Something has been executed, perhaps a request that a connection waits for.
    pub(super) fn executed(&self) {
        if let Some(window) = &self.options.window {
            window.executed.notify_waiters();
        }
    }

    /// Answers a request on a connection that a client opened, if it was not executed before; `None`: it may have been,
    /// or is taking too long, and the connection ends without an answer, as if it had broken.
    pub(super) async fn respond_once(
        &self,
        numbered: &Numbered,
        request: Request,
        secret: bool,
    ) -> Option<Response> {
        let Some(window) = &self.options.window else { return Some(self.respond(request).await) };
        let client = request.arrival.client.ip();
        // What has a number was sent in a datagram before, or could have been.
        let (request, http) = whole(request).await?;
        let content = Content { http: &http, secret };
        let admission =
            tokio::time::timeout(self.options.response_timeout, window.admit(numbered, content, client))
                .await;
        match admission {
            Ok(Admission::Execute) => {}
            Ok(Admission::Executed(response)) => {
                let total_bytes = Some(response.len() as u64);
                return Some(Response::from_wire(Body::full(response), total_bytes));
            }
            Ok(_) | Err(_) => return None,
        }
        let executing = Executing { window, numbered: *numbered };
        let Response { total_bytes, mut http } = self.respond(request).await;
        let most_bytes = lock(&window.replay).response_bytes();
        if let Ok(gathered) = super::server::gather(&mut http, most_bytes).await {
            match gathered {
                super::server::Gathered::Whole(whole) => {
                    window.record(numbered, Some(&whole));
                    http = Body::full(whole);
                }
                super::server::Gathered::TooLong(start) => http.unread(start),
            }
        }
        drop(executing);
        Some(Response { total_bytes, http })
    }
}
