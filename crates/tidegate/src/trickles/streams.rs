//! Responses that have been read to somewhere in their middle: the next blocks are read on from there, so that one download
//! is one request to the upstream, whether that knows Range or not. Soft state: without it blocks are asked for with Range.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Mutex as Turn;

use super::exchange::Begun;

/// Responses that are held at once; beyond that the one that was not read for the longest time ends.
const MAX_STREAMS: usize = 64;
/// How long one is held that nobody reads: it holds a connection of the upstream.
const LIFE: Duration = Duration::from_secs(5);
/// Blocks of one that may be passed over, and kept, on the way to the one that is wanted.
const REACH: u64 = 8;

struct Stream {
    version: u64,
    /// The block that comes next.
    next: AtomicU64,
    used: Mutex<Instant>,
    /// Readers take turns; `None` once it has ended.
    begun: Turn<Option<Begun>>,
}

impl Stream {
    fn used(&self) -> Instant {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The responses that a listener holds.
#[derive(Clone, Default)]
pub(super) struct Streams {
    held: Arc<Mutex<Vec<Arc<Stream>>>>,
}

impl Streams {
    /// Holds a response for what is wanted of it next.
    pub(super) fn hold(&self, begun: Begun) {
        if begun.is_at_end() {
            return;
        }
        let stream = Arc::new(Stream {
            version: begun.resource.version,
            next: AtomicU64::new(begun.next_index()),
            used: Mutex::new(Instant::now()),
            begun: Turn::new(Some(begun)),
        });
        tokio::spawn(self.clone().end_in_time(Arc::downgrade(&stream)));
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.len() >= MAX_STREAMS
            && let Some(oldest) = (0..held.len()).min_by_key(|&index| held[index].used())
        {
            held.swap_remove(oldest);
        }
        held.push(stream);
    }

    async fn end_in_time(self, stream: Weak<Stream>) {
        loop {
            let Some(used) = stream.upgrade().map(|stream| stream.used()) else { return };
            let left = LIFE.saturating_sub(used.elapsed());
            let is_read = stream.upgrade().is_some_and(|stream| stream.begun.try_lock().is_err());
            if left.is_zero() && !is_read {
                return self.end(&stream);
            }
            tokio::time::sleep(if is_read { LIFE } else { left }).await;
        }
    }

    fn end(&self, stream: &Weak<Stream>) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|held| !std::ptr::eq(Arc::as_ptr(held), stream.as_ptr()));
    }

    /// One that comes to a block soon.
    fn before(&self, version: u64, index: u64) -> Option<Arc<Stream>> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let next = |stream: &Stream| stream.next.load(Ordering::Relaxed);
        let comes_to = |stream: &&Arc<Stream>| {
            stream.version == version && next(stream) <= index && index - next(stream) <= REACH
        };
        held.iter().filter(comes_to).max_by_key(|stream| next(stream)).cloned()
    }

    /// Reads on until block `index` of a version, where a response is held that comes to it soon: `keep` gets each block. Whether
    /// that one was among them, or another reader has had it meanwhile.
    pub(super) async fn read_to(&self, version: u64, index: u64, keep: impl Fn(u64, Bytes)) -> bool {
        let Some(stream) = self.before(version, index) else { return false };
        let mut begun = stream.begun.lock().await;
        loop {
            let Some(response) = begun.as_mut() else { return false };
            if stream.next.load(Ordering::Relaxed) > index {
                return true;
            }
            *stream.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            let block = response.next_block().await;
            if let Some((index, block)) = block {
                keep(index, block);
                stream.next.store(index + 1, Ordering::Relaxed);
                if !response.is_at_end() {
                    continue;
                }
            }
            // It is over, or was broken off.
            *begun = None;
            self.end(&Arc::downgrade(&stream));
            return stream.next.load(Ordering::Relaxed) > index;
        }
    }
}
