//! While another process takes the place of this one, both answer requests for a while: what is outdated for one is so for
//! the other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

/// URLs that wait to be told; beyond them everything counts as outdated.
const WAITING: usize = 4096;

/// What is outdated in the cache of the process that takes the place of this one.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Outdated {
    /// What is stored for a URL, by its key, and what is on its way for it.
    Url(Vec<u8>),
    /// What is on its way.
    OnItsWay,
    /// Everything.
    Everything,
}

/// Tells another process, if there is one to be told.
#[derive(Debug, Default)]
pub(crate) struct Heir {
    is_there: AtomicBool,
    to: Mutex<Option<(SyncSender<Outdated>, Arc<AtomicBool>)>>,
}

/// What the other process is to be told, in turn. Ends with [`Engine::tell_nobody`](crate::Engine::tell_nobody).
#[derive(Debug)]
pub struct Tidings {
    from: Receiver<Outdated>,
    overflowed: Arc<AtomicBool>,
}

impl Heir {
    /// Tells what is outdated from now on.
    pub(crate) fn begin(&self) -> Tidings {
        let (to, from) = sync_channel(WAITING);
        let overflowed = Arc::new(AtomicBool::new(false));
        *self.to.lock().unwrap_or_else(PoisonError::into_inner) = Some((to, Arc::clone(&overflowed)));
        self.is_there.store(true, Ordering::SeqCst);
        Tidings { from, overflowed }
    }

    /// There is nobody any more who has to know.
    pub(crate) fn forget(&self) {
        self.is_there.store(false, Ordering::SeqCst);
        *self.to.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// `None`: what is on its way for any URL.
    pub(crate) fn tell(&self, url_key: Option<&[u8]>) {
        if !self.is_there.load(Ordering::SeqCst) {
            return;
        }
        let to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((to, overflowed)) = &*to else { return };
        let outdated = url_key.map_or(Outdated::OnItsWay, |key| Outdated::Url(key.to_vec()));
        if let Err(TrySendError::Full(_)) = to.try_send(outdated) {
            overflowed.store(true, Ordering::SeqCst);
        }
    }
}

impl Iterator for Tidings {
    type Item = Outdated;

    /// Waits for the next.
    fn next(&mut self) -> Option<Outdated> {
        if self.overflowed.swap(false, Ordering::SeqCst) {
            return Some(Outdated::Everything);
        }
        let next = self.from.recv().ok();
        if next.is_none() && self.overflowed.swap(false, Ordering::SeqCst) {
            return Some(Outdated::Everything);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_told_in_turn_and_too_much_as_everything() {
        let heir = Heir::default();
        heir.tell(Some(b"nobody is there"));
        let mut tidings = heir.begin();
        heir.tell(Some(b"a"));
        heir.tell(None);
        assert_eq!(tidings.next(), Some(Outdated::Url(b"a".to_vec())));
        assert_eq!(tidings.next(), Some(Outdated::OnItsWay));
        (0..=WAITING).for_each(|_| heir.tell(Some(b"b")));
        assert_eq!(tidings.next(), Some(Outdated::Everything));
        heir.forget();
        heir.tell(Some(b"nobody is there"));
        assert_eq!(tidings.count(), WAITING);
    }
}
