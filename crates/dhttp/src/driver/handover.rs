//! Sealed requests whose answer is slow, or too long for datagrams. No connection may carry it to the client in the
//! clear: the client asks again over TLS, perhaps another core, and joins the request in progress instead of having it
//! executed a second time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::service::Response;
use crate::server::GlobalId;

/// How long a client may take to ask for its response: a connection, TLS and the request.
const PATIENCE: Duration = Duration::from_secs(10);

/// The requests in progress of all cores.
#[derive(Clone, Default)]
pub(super) struct Handover(Arc<Mutex<HashMap<GlobalId, Offer>>>);

struct Offer {
    /// Head and body. Ids can be read on the way: only who knows the request is given its response.
    http: Bytes,
    asked: oneshot::Sender<oneshot::Sender<Response>>,
}

/// A request that can be joined, until this is dropped.
pub(super) struct Offered {
    handover: Handover,
    id: GlobalId,
    asked: oneshot::Receiver<oneshot::Sender<Response>>,
}

impl Handover {
    /// Lets a request be joined; `None` if there is one of this id.
    pub fn offer(&self, id: GlobalId, http: Bytes) -> Option<Offered> {
        let mut offers = self.lock();
        if offers.contains_key(&id) {
            return None;
        }
        let (sender, asked) = oneshot::channel();
        offers.insert(id, Offer { http, asked: sender });
        Some(Offered { handover: self.clone(), id, asked })
    }

    /// Whether [`Handover::join`] may find something.
    pub fn has(&self, id: &GlobalId) -> bool {
        self.lock().contains_key(id)
    }

    /// Where the response to a request in progress will come, if this is the same; nothing comes if it goes by datagram
    /// after all.
    pub fn join(&self, id: &GlobalId, http: &[u8]) -> Option<oneshot::Receiver<Response>> {
        let mut offers = self.lock();
        if offers.get(id)?.http != http {
            return None;
        }
        let (sender, response) = oneshot::channel();
        offers.remove(id)?.asked.send(sender).ok()?;
        Some(response)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<GlobalId, Offer>> {
        // Every change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Offered {
    /// Who has joined the request, if somebody has.
    pub fn joined(&mut self) -> Option<oneshot::Sender<Response>> {
        self.asked.try_recv().ok()
    }

    /// Keeps a response for who will ask for it now.
    pub async fn hand_over(mut self, response: Response) {
        if let Ok(Ok(joined)) = timeout(PATIENCE, &mut self.asked).await {
            // It may have gone.
            let _ = joined.send(response);
        }
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        self.asked.close();
        let mut offers = self.handover.lock();
        // Another request may have the same id by now.
        if offers.get(&self.id).is_some_and(|offer| offer.asked.is_closed()) {
            offers.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::RequestId;

    fn id() -> GlobalId {
        ("192.0.2.1".parse().unwrap(), RequestId(*b"idididid"))
    }

    #[test]
    fn a_request_is_joined_by_the_same_request_only_and_once() {
        let handover = Handover::default();
        let mut offered = handover.offer(id(), Bytes::from_static(b"GET /a")).unwrap();
        assert!(handover.offer(id(), Bytes::from_static(b"GET /b")).is_none());
        assert!(handover.join(&id(), b"GET /b").is_none());
        assert!(offered.joined().is_none());
        let mut response = handover.join(&id(), b"GET /a").unwrap();
        assert!(handover.join(&id(), b"GET /a").is_none());
        offered.joined().unwrap().send(Response::full(200, &[], b"x")).unwrap();
        assert!(response.try_recv().is_ok());
    }

    #[test]
    fn a_request_that_is_over_leaves_nothing_behind_and_takes_no_others_place() {
        let handover = Handover::default();
        let first = handover.offer(id(), Bytes::from_static(b"GET /a")).unwrap();
        let mut response = handover.join(&id(), b"GET /a").unwrap();
        let second = handover.offer(id(), Bytes::from_static(b"GET /a")).unwrap();
        drop(first);
        assert!(response.try_recv().is_err());
        assert!(handover.has(&id()));
        drop(second);
        assert!(!handover.has(&id()));
    }
}
