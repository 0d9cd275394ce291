//! What is told to classifiers outside of this process, and what they decide. Nothing here waits: what does not fit
//! into the queue is counted and lost.

use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use tidegate_core::Visit;
use tidegate_core::hooks::{Classifier, Decision, RequestView, ResponseView, Scene};

use crate::memory::channel_bytes;

/// Events that may wait to be told.
const MAX_WAITING: usize = 8_192;
/// Bytes of a target that are told.
const TARGET_BYTES: usize = 120;

/// Something that a client did.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// The client.
    pub address: IpAddr,
    /// On the data core's clock.
    pub now_ms: u64,
    /// What it was.
    pub what: What,
    target: [u8; TARGET_BYTES],
    length: u8,
}

/// What a client did.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum What {
    /// It made a request.
    Request,
    /// Its request was answered by an upstream, or with an error.
    Response {
        /// The status.
        status: u16,
        /// How long the upstream worked on it.
        upstream_ms: u32,
    },
}

impl Told {
    fn new(address: IpAddr, what: What, (path, query): (&[u8], Option<&[u8]>), now_ms: u64) -> Self {
        let mut told = Self { address, now_ms, what, target: [0; TARGET_BYTES], length: 0 };
        let bytes = path.iter().chain(query.map(|_| &b'?')).chain(query.unwrap_or_default());
        for (place, byte) in told.target.iter_mut().zip(bytes) {
            *place = *byte;
            told.length += 1;
        }
        told
    }

    /// The start of what was asked for, path and query.
    pub fn target(&self) -> &[u8] {
        &self.target[..usize::from(self.length)]
    }
}

/// The queue to those who listen.
#[derive(Debug)]
pub struct Feed {
    listens: AtomicBool,
    /// One of how many events is told.
    one_of: AtomicU32,
    turn: AtomicU32,
    lost: AtomicU64,
    sender: SyncSender<Told>,
    receiver: Mutex<Option<Receiver<Told>>>,
}

impl Default for Feed {
    fn default() -> Self {
        let (sender, receiver) = sync_channel(MAX_WAITING);
        Self {
            listens: AtomicBool::new(false),
            one_of: AtomicU32::new(1),
            turn: AtomicU32::new(0),
            lost: AtomicU64::new(0),
            sender,
            receiver: Mutex::new(Some(receiver)),
        }
    }
}

impl Feed {
    /// The memory of its queue.
    pub(crate) const BYTES: usize = channel_bytes::<Told>(MAX_WAITING);

    /// The end at which events come out; there is one.
    pub fn take_receiver(&self) -> Option<Receiver<Told>> {
        self.receiver.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
    }

    /// Whether anybody listens, and to one of how many events.
    pub fn set_listening(&self, listens: bool, one_of: u32) {
        self.one_of.store(one_of.max(1), Ordering::Relaxed);
        self.listens.store(listens, Ordering::Relaxed);
    }

    /// Events that nobody had room for.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn tell(&self, told: impl FnOnce() -> Told) {
        if !self.listens.load(Ordering::Relaxed) {
            return;
        }
        let one_of = self.one_of.load(Ordering::Relaxed);
        if one_of > 1 && !self.turn.fetch_add(1, Ordering::Relaxed).is_multiple_of(one_of) {
            return;
        }
        if self.sender.try_send(told()).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Tells; objects to nothing by itself.
#[derive(Debug)]
pub(crate) struct External(pub(crate) std::sync::Arc<Feed>);

impl Classifier for External {
    fn name(&self) -> &'static str {
        "external"
    }

    fn on_request(&self, scene: &mut Scene<'_>, request: &RequestView<'_>, _: &Visit) -> Decision {
        let target = (request.path, request.query);
        self.0.tell(|| Told::new(scene.peer.address, What::Request, target, scene.now_ms));
        Decision::CONTINUE
    }

    fn looks_at_responses(&self) -> bool {
        true
    }

    fn on_response(&self, scene: &mut Scene<'_>, response: &ResponseView<'_>) -> Decision {
        let what = What::Response { status: response.status, upstream_ms: response.upstream_ms };
        let target = (response.path, response.query);
        self.0.tell(|| Told::new(scene.peer.address, what, target, scene.now_ms));
        Decision::CONTINUE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_targets_are_cut_and_what_does_not_fit_the_queue_is_counted() {
        let feed = Feed::default();
        let receiver = feed.take_receiver().unwrap();
        let told = || Told::new(IpAddr::from([1, 2, 3, 4]), What::Request, (&[b'a'; 500], Some(b"b")), 7);
        feed.tell(told);
        assert!(receiver.try_recv().is_err(), "nobody listens");
        feed.set_listening(true, 2);
        (0..4).for_each(|_| feed.tell(told));
        assert_eq!(receiver.try_iter().count(), 2);
        feed.set_listening(true, 1);
        (0..MAX_WAITING + 3).for_each(|_| feed.tell(told));
        assert_eq!(feed.lost(), 3);
        assert_eq!(receiver.try_recv().unwrap().target(), [b'a'; TARGET_BYTES]);
        let short = Told::new(IpAddr::from([1, 2, 3, 4]), What::Request, (b"/x", Some(b"y=1")), 7);
        assert_eq!(short.target(), b"/x?y=1");
    }
}
