//! Requests by UDP that are sealed (RFC 9458).

use bytes::Bytes;

use super::Client;
use crate::sealed::{KeyConfig, ResponseOpener, seal_request};
use crate::wire::{Once, RequestId};

/// A request that is sent sealed.
#[derive(Debug)]
pub(super) struct Sealing {
    key: KeyConfig,
    /// For this ticket and number; copies are the same bytes.
    sealed: Option<(Once, Bytes, ResponseOpener)>,
}

impl Sealing {
    pub fn new(key: KeyConfig) -> Self {
        Self { key, sealed: None }
    }
}

impl Client {
    /// Whether a request is sealed: then it must not be made in the clear.
    pub fn is_sealed(&self, id: RequestId) -> bool {
        self.outstanding.get(&id).is_some_and(|outstanding| outstanding.seal.is_some())
    }

    /// What to send of a request, with this ticket and number; `None`: it cannot be sealed.
    pub(super) fn seal(&mut self, id: RequestId, once: Once) -> Option<Bytes> {
        let outstanding = self.outstanding.get_mut(&id)?;
        let Some(sealing) = &mut outstanding.seal else { return Some(outstanding.request.http.clone()) };
        if let Some((_, sealed, _)) = sealing.sealed.as_ref().filter(|(with, ..)| *with == once) {
            return Some(sealed.clone());
        }
        let (sealed, opener) =
            seal_request(sealing.key, id, once, &outstanding.request.http, &mut self.rng).ok()?;
        let sealed = Bytes::from(sealed);
        sealing.sealed = Some((once, sealed.clone(), opener));
        Some(sealed)
    }

    /// The response to a request; `None`: it was to be sealed, and is not.
    pub(super) fn unseal(&self, id: RequestId, response: Bytes) -> Option<Bytes> {
        let Some(sealing) = self.outstanding.get(&id)?.seal.as_ref() else { return Some(response) };
        let (_, _, opener) = sealing.sealed.as_ref()?;
        opener.open(&response).ok().map(Bytes::from)
    }
}
