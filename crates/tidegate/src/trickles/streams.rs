//! Responses that have been read to somewhere in their middle: the next blocks are read on from there, so that one
//! download is one request to the upstream, whether that knows Range or not. Soft state: without it blocks are asked
//! for with Range.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Mutex as Turn;

use super::exchange::StreamingResponse;

/// Responses that are held at once.
const MAX_STREAMS: usize = 64;
/// Of them for one client's address.
const MAX_OF_ONE: usize = 8;
/// Of them for clients that may not be where they say: whoever opens a connection may name any address.
const MAX_UNPROVED: usize = 32;
/// How long one is held that nobody reads: it holds a connection of the upstream.
const LIFE: Duration = Duration::from_secs(5);
/// Blocks of one that may be passed over, and kept, on the way to the one that is wanted.
const REACH: u64 = 8;

struct Stream {
    version: u64,
    client: IpAddr,
    /// The client is where it says: it has asked for more.
    proved: AtomicBool,
    /// The block that comes next.
    next: AtomicU64,
    used: Mutex<Instant>,
    /// Readers take turns; `None` once it has ended.
    begun: Turn<Option<StreamingResponse>>,
}

impl Stream {
    fn used(&self) -> Instant {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which has to end before another one is held for `client`.
fn to_end(held: &[Arc<Stream>], client: IpAddr, proved: bool) -> Option<usize> {
    let oldest = |least: usize, of: &dyn Fn(&Stream) -> bool| {
        let those = (0..held.len()).filter(|&place| of(&held[place]));
        let oldest = those.clone().min_by_key(|&place| held[place].used());
        oldest.filter(|_| those.count() >= least)
    };
    let unproved = |stream: &Stream| !stream.proved.load(Ordering::Relaxed);
    let of_one = oldest(MAX_OF_ONE, &|stream| stream.client == client);
    let of_unproved = || oldest(MAX_UNPROVED, &unproved).filter(|_| !proved);
    let of_all = || {
        oldest(MAX_STREAMS, &|_| true).and_then(|oldest_of_all| oldest(1, &unproved).or(Some(oldest_of_all)))
    };
    of_one.or_else(of_unproved).or_else(of_all)
}

/// The responses that a listener holds.
#[derive(Clone, Default)]
pub(super) struct Streams {
    held: Arc<Mutex<Vec<Arc<Stream>>>>,
}

impl Streams {
    /// Holds a response for what its client wants of it next. Where there is no place, the one that was not read for
    /// the longest time ends: of the same client, if that has its share, then of those who have proved nothing.
    pub(super) fn hold(&self, begun: StreamingResponse, client: IpAddr, proved: bool) {
        if begun.is_at_end() {
            return;
        }
        let stream = Arc::new(Stream {
            version: begun.resource.version,
            client,
            proved: AtomicBool::new(proved),
            next: AtomicU64::new(begun.next_index()),
            used: Mutex::new(Instant::now()),
            begun: Turn::new(Some(begun)),
        });
        tokio::spawn(self.clone().end_in_time(Arc::downgrade(&stream)));
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = to_end(&held, client, proved) {
            held.swap_remove(place);
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

    /// Reads on until block `index` of a version, where a response is held that comes to it soon: `keep` gets each
    /// block. Whether that one was among them, or another reader has had it meanwhile.
    pub(super) async fn read_to(&self, version: u64, index: u64, keep: impl Fn(u64, Bytes)) -> bool {
        let Some(stream) = self.before(version, index) else { return false };
        let mut begun = stream.begun.lock().await;
        loop {
            let Some(response) = begun.as_mut() else { return false };
            if stream.next.load(Ordering::Relaxed) > index {
                return true;
            }
            *stream.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            stream.proved.store(true, Ordering::Relaxed);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn held(of: &[(u8, bool)]) -> Vec<Arc<Stream>> {
        let first = Instant::now();
        let used = (0..).map(|seconds| first + Duration::from_secs(seconds));
        let stream = |(&(client, proved), used)| {
            Arc::new(Stream {
                version: 1,
                client: [192, 0, 2, client].into(),
                proved: AtomicBool::new(proved),
                next: AtomicU64::new(1),
                used: Mutex::new(used),
                begun: Turn::new(None),
            })
        };
        of.iter().zip(used).map(stream).collect()
    }

    fn ends(of: &[(u8, bool)], client: u8, proved: bool) -> Option<usize> {
        to_end(&held(of), [192, 0, 2, client].into(), proved)
    }

    #[test]
    fn a_client_with_its_share_ends_its_own_oldest() {
        let all = [&[(1, true)][..], &[(2, true); MAX_OF_ONE]].concat();
        assert_eq!(ends(&all, 2, true), Some(1));
        assert_eq!(ends(&all, 3, true), None);
    }

    #[test]
    fn clients_that_have_proved_nothing_end_each_other() {
        let many: Vec<_> =
            (0..MAX_STREAMS as u8).map(|client| (client, client >= MAX_UNPROVED as u8)).collect();
        assert_eq!(ends(&many[..MAX_STREAMS - 1], 200, false), Some(0));
        assert_eq!(ends(&many[..MAX_STREAMS - 1], 200, true), None);
        assert_eq!(ends(&many, 200, true), Some(0));
        let all_proved: Vec<_> = many.iter().map(|&(client, _)| (client, true)).collect();
        assert_eq!(ends(&all_proved, 200, false), Some(0));
    }
}
