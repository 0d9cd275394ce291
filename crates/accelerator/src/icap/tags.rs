//! In which state each service was when it let a response pass (`ISTag`, RFC 3507 §4.7): what it let pass in another
//! state than the one it is in now is not served any more.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use xxhash_rust::xxh3::xxh3_64;

/// A service in one of its states, as it is stored with what it let pass.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Reviewed(u64);

impl Reviewed {
    /// No service has looked.
    pub(crate) const BY_NOBODY: Self = Self(0);

    /// The upper half is the service, the lower half its state.
    fn new(service: u32, tag: Option<&[u8]>) -> Self {
        Self(u64::from(service) << 32 | xxh3_64(tag.unwrap_or(b"")) & u64::from(u32::MAX))
    }

    pub(crate) const fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    pub(crate) const fn from_bytes(bytes: [u8; 8]) -> Self {
        Self(u64::from_le_bytes(bytes))
    }

    const fn service(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The state of one service as it was heard of last, by whichever core; [`Reviewed::BY_NOBODY`]: not yet.
#[derive(Debug)]
pub(crate) struct ServiceTag {
    service: u32,
    now: AtomicU64,
}

impl ServiceTag {
    /// The service has answered, in the state that `tag` names; what it lets pass by that answer.
    pub(crate) fn heard(&self, tag: Option<&[u8]>) -> Reviewed {
        let reviewed = Reviewed::new(self.service, tag);
        // Written only when it changes, so that the line stays shared between the cores.
        if self.now.load(Ordering::Relaxed) != reviewed.0 {
            self.now.store(reviewed.0, Ordering::Relaxed);
        }
        reviewed
    }

    /// Whether the service was in another state when it let a response pass.
    pub(crate) fn outdates(&self, reviewed: Reviewed) -> bool {
        let now = Reviewed(self.now.load(Ordering::Relaxed));
        now != Reviewed::BY_NOBODY && now != reviewed && self.service == reviewed.service()
    }
}

/// All services that were ever configured since the start: a reload does not forget what they have said.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServiceTags(Arc<Mutex<HashMap<String, Arc<ServiceTag>>>>);

impl ServiceTags {
    /// That of the service with this URL.
    pub(crate) fn of(&self, url: &str) -> Arc<ServiceTag> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let tag = known.entry(url.to_owned()).or_insert_with(|| {
            // Never 0, which is nobody's.
            let service = (xxh3_64(url.as_bytes()) >> 32) as u32 | 1;
            Arc::new(ServiceTag { service, now: AtomicU64::new(0) })
        });
        Arc::clone(tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_let_pass_in_another_state_is_outdated_and_only_that() {
        let tags = ServiceTags::default();
        let (scanner, filter) = (tags.of("icap://a/scan"), tags.of("icap://a/filter"));
        let old = Reviewed::from_bytes(Reviewed::new(scanner.service, Some(b"\"1\"")).to_bytes());
        assert!(!scanner.outdates(old), "nothing is known yet");
        assert_eq!(scanner.heard(Some(b"\"1\"")), old);
        assert!(!scanner.outdates(old));
        let new = tags.of("icap://a/scan").heard(Some(b"\"2\""));
        assert!(scanner.outdates(old) && !scanner.outdates(new));
        assert!(!filter.outdates(old) && !scanner.outdates(Reviewed::BY_NOBODY));
        filter.heard(None);
        assert!(!filter.outdates(new) && !filter.outdates(filter.heard(None)));
    }
}
