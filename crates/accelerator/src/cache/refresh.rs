//! Validation in the background (RFC 5861 §3): the client has its answer already.

use std::cell::Cell;
use std::future::Future;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use tidegate_http::cache::{self, Forwarded};
use tidegate_http::normalize::normalize;
use tidegate_http::{Method, Progress, RequestHead, RequestParser};
use tidegate_store::Object;

use crate::cache::fetch::Miss;
use crate::cache::flights::{Join, Leader};
use crate::data_core::DataCore;
use crate::service::answer::Incoming;
use crate::service::client_info::ClientInfo;
use crate::service::fetch::Fetch;
use crate::service::plan::Plan;
use crate::service::routes::Changed;
use crate::upstream::{EmptyBody, Pools};

impl Fetch<'_> {
    /// RFC 5861 §3: the client has its answer; the validation goes on without it.
    pub(super) fn refresh_in_background(&self, url_key: &[u8], stale: Object) {
        let identifies = cache::identifies_client(self.incoming.head);
        let epoch = self.core.flights.epoch(url_key);
        let Join::Lead(leader) = self.core.flights.join(stale.key(), epoch, identifies) else { return };
        let core = Rc::clone(self.core);
        let (plan, pools, to) = (Arc::clone(self.plan), Rc::clone(self.pools), self.to);
        let (buffer, peer) = (self.incoming.buffer.to_vec(), self.incoming.peer);
        let is_encrypted = self.incoming.info.is_encrypted;
        let url_key = url_key.to_vec();
        tokio::task::spawn_local(async move {
            let place = Place { core: &core, plan: &plan, pools: &pools, to };
            refresh(place, &buffer, (peer, is_encrypted), &url_key, stale, leader).await;
        });
    }
}

/// What a validation in the background works with.
struct Place<'a> {
    core: &'a Rc<DataCore>,
    plan: &'a Arc<Plan>,
    pools: &'a Rc<Pools>,
    to: Changed,
}

/// Validates a stored response; the request is read again from its bytes. Boxed because the answer to a request may
/// start a refresh, which is an answer to a request.
fn refresh<'r>(
    place: Place<'r>,
    buffer: &'r [u8],
    (peer, is_encrypted): (IpAddr, bool),
    url_key: &'r [u8],
    stale: Object,
    leader: Leader,
) -> std::pin::Pin<Box<dyn Future<Output = ()> + 'r>> {
    Box::pin(async move {
        let Place { core, plan, pools, to } = place;
        let mut parser = RequestParser::new(plan.limits.head);
        let Ok(Progress::Complete { .. }) = parser.parse(buffer) else { return };
        // Whatever the client wants of the response, what is stored is the whole.
        let head = RequestHead { method: Method::Get, method_bytes: b"GET", ..parser.head(buffer) };
        let mut scratch = Vec::new();
        let Ok(normalized) = normalize(&head, plan.personality, &mut scratch) else { return };
        let info = ClientInfo::of(plan, &head, peer, is_encrypted);
        let incoming =
            Incoming { head: &head, normalized: &normalized, buffer, peer, info, is_absent: false };
        let Some(store) = &core.store else { return };
        let fetch = Fetch { core, plan, pools, to, incoming, variant: Cell::new(0) };
        // What is to be stored is stored whether or not anybody reads the answer.
        let epoch = core.flights.epoch(url_key);
        let miss = Miss { epoch, stale: Some(stale), leader: Some(leader), reason: Forwarded::Stale };
        fetch.fetch(store, url_key, miss, EmptyBody).await;
    })
}
