//! A response on its way into the cache, read by those who wait for it as it comes.
//!
//! What does not arrive at once is read by a task of its own, as fast as the upstream sends: a client that takes its
//! response slowly holds up nobody else, and one that goes away costs the cache nothing.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tidegate_store::{Follower, Object, Progress, Writer};
use tokio::sync::Notify;

use crate::cache::flights::{Epoch, Leader, Outcome, Started};
use crate::data_core::DataCore;
use crate::upstream::{Response, UpstreamError};

/// What is taken from the upstream before the client gets its first byte. A response that is whole by then is sent as
/// a hit is, in one piece.
const AT_ONCE_BYTES: u64 = 64 * 1024;

/// How long a response is still read for the cache after the last client that wanted it has gone. A server has few
/// connections, and one that never finishes must not keep them.
const ORPHANED: Duration = Duration::from_secs(10);
/// How often it is looked whether anybody is left.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// An object that is being written.
pub(crate) struct Fill {
    pub writer: Writer,
    /// Bytes of the body, if the response says so.
    pub length: Option<u64>,
    pub leader: Option<Leader>,
    pub core: Rc<DataCore>,
    /// [`Flights::epoch`](crate::cache::flights::Flights::epoch) when the request was sent.
    pub epoch: Epoch,
    /// Whether the object may answer those who wait for it.
    pub is_fresh: bool,
}

/// How far a response got without waiting.
pub(crate) enum Pumped {
    /// All of it is in the cache.
    Whole(Object),
    /// The rest comes by and by.
    Coming(Reader),
}

impl Fill {
    /// Stores what has arrived of `response`, and lets a task store the rest. `started` says what other requests for
    /// the same object need to be answered meanwhile, if they may be.
    pub(crate) async fn pump(
        mut self,
        mut response: Box<Response>,
        started: impl FnOnce(Tail) -> Option<Started>,
    ) -> Result<Pumped, UpstreamError> {
        let (mut unstored, mut is_whole) = (None, false);
        while self.writer.written() < AT_ONCE_BYTES {
            match ready(response.chunk()).await {
                Some(Ok(Some(piece))) => {
                    if let Err(left) = self.write(piece) {
                        unstored = Some(left.to_vec());
                        break;
                    }
                }
                Some(Ok(None)) => {
                    is_whole = true;
                    break;
                }
                Some(Err(error)) => return Err(error),
                None => break,
            }
        }
        // Trailers go to this client only; a stored response has none.
        if is_whole && response.trailers().next().is_none() {
            return Ok(Pumped::Whole(self.commit()));
        }
        let tail = Tail {
            follower: self.writer.follow(),
            changed: Arc::default(),
            readers: Arc::default(),
            length: self.length,
        };
        let rest = Rc::new(RefCell::new(None));
        match unstored {
            Some(piece) => {
                *rest.borrow_mut() = Some(Rest { piece, is_piece_taken: false, response });
                self.give_up();
            }
            None => {
                if let Some(leader) = &self.leader {
                    leader.answered(started(tail.clone()));
                }
                tokio::task::spawn_local(self.run(response, tail.clone(), Rc::clone(&rest)));
            }
        }
        Ok(Pumped::Coming(Reader::new(tail, Some(rest))))
    }

    /// Reads `response` to its end.
    async fn run(mut self, mut response: Box<Response>, tail: Tail, rest: Rc<RefCell<Option<Rest>>>) {
        let mut orphaned = std::pin::pin!(tail.orphaned());
        loop {
            // After the last byte of a known length the end follows without waiting: a client that has read the whole
            // response finds it in the cache with its next request. A read is never begun anew: its time would be, too.
            let chunk = tokio::select! {
                biased;
                () = &mut orphaned => {
                    tracing::debug!("nobody waits for the response any more, which is not stored");
                    drop(self);
                    break;
                }
                chunk = response.chunk() => chunk,
            };
            match chunk {
                Ok(Some(piece)) => {
                    if let Err(left) = self.write(piece) {
                        let piece = left.to_vec();
                        *rest.borrow_mut() = Some(Rest { piece, is_piece_taken: false, response });
                        self.give_up();
                        break;
                    }
                    tail.changed.notify_waiters();
                }
                Ok(None) => {
                    *rest.borrow_mut() = Some(Rest::all_of(response));
                    self.commit();
                    break;
                }
                Err(error) => {
                    tracing::debug!(%error, "response ended early and is not stored");
                    drop(self);
                    break;
                }
            }
        }
        // What has become of the writer is visible by now, also to readers on other cores.
        tail.changed.notify_waiters();
    }

    /// On an error, what there was no room for: whoever reads along gets what comes before that.
    fn write<'p>(&mut self, piece: &'p [u8]) -> Result<(), &'p [u8]> {
        let before = self.writer.written();
        self.writer.write(piece).map_err(|error| {
            self.core.not_stored(&error);
            let written = usize::try_from(self.writer.written() - before).unwrap_or(usize::MAX);
            piece.get(written..).unwrap_or(&[])
        })
    }

    fn commit(self) -> Object {
        let object = self.writer.commit();
        // What was invalidated or purged since the request was sent may be older than that. Looking after the commit
        // leaves no gap: an invalidation that comes later finds the object.
        if !self.core.flights.is_current(object.key(), self.epoch)
            && let Some(store) = &self.core.store
        {
            store.remove(object.key());
        }
        self.core.metrics.cache_stored_total.add(1);
        self.core.landed(self.leader, self.is_fresh);
        object
    }

    /// There is no room for it: the others must ask for themselves.
    fn give_up(self) {
        if let Some(leader) = self.leader {
            leader.remember_not_shared(self.core.clock.unix_s());
            leader.finish(Outcome::NotShared);
        }
    }
}

/// What every reader of a transfer needs, on whatever core.
#[derive(Clone)]
pub(crate) struct Tail {
    follower: Follower,
    changed: Arc<Notify>,
    readers: Arc<AtomicUsize>,
    /// Bytes of the body, if known beforehand.
    length: Option<u64>,
}

impl Tail {
    /// Waits until nobody has read along for [`ORPHANED`].
    async fn orphaned(&self) {
        let mut since: Option<Instant> = None;
        loop {
            if self.readers.load(Ordering::Relaxed) > 0 {
                since = None;
            } else if since.get_or_insert_with(Instant::now).elapsed() > ORPHANED {
                return;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }
}

/// Reads a body while it is being stored.
pub(crate) struct Reader {
    tail: Tail,
    /// Bytes of the body handed on.
    at: u64,
    /// Only the request that began the transfer can go on by itself when the object finds no room.
    rest: Option<Rc<RefCell<Option<Rest>>>>,
}

/// What the task leaves to the request that began the transfer: a response of which nothing but trailers is left, or
/// one that could not be stored, with the piece that found no room.
pub(crate) struct Rest {
    piece: Vec<u8>,
    is_piece_taken: bool,
    pub response: Box<Response>,
}

impl Reader {
    /// A reader of somebody else's transfer.
    pub(crate) fn following(tail: Tail) -> Self {
        Self::new(tail, None)
    }

    fn new(tail: Tail, rest: Option<Rc<RefCell<Option<Rest>>>>) -> Self {
        tail.readers.fetch_add(1, Ordering::Relaxed);
        Self { tail, at: 0, rest }
    }

    /// Waits until [`Self::take`] has something, or nothing more comes; what the task left over is to be read next.
    pub(crate) async fn arrive(&mut self) -> Result<Option<Rest>, UpstreamError> {
        loop {
            let mut changed = std::pin::pin!(self.tail.changed.notified());
            // From here on a notification counts, so that a change between the look and the wait is not missed.
            changed.as_mut().enable();
            let progress = self.tail.follower.progress();
            if self.at < self.tail.follower.available() {
                return Ok(None);
            }
            if progress == Progress::Writing {
                changed.await;
                continue;
            }
            let rest = self.rest.as_ref().and_then(|rest| rest.take());
            let is_whole = progress == Progress::Committed || self.tail.length == Some(self.at);
            return match rest {
                None if !is_whole => Err(UpstreamError::Incomplete),
                rest => Ok(rest),
            };
        }
    }

    /// What has been stored since the last call.
    pub(crate) fn take(&mut self) -> Option<&[u8]> {
        let piece = self.tail.follower.body_at(self.at);
        self.at += piece.len() as u64;
        (!piece.is_empty()).then_some(piece)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.tail.readers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Rest {
    /// A response that goes past the cache.
    pub(crate) fn all_of(response: Box<Response>) -> Self {
        Self { piece: Vec::new(), is_piece_taken: true, response }
    }

    /// The next piece, as [`Response::chunk`] gives it.
    pub(crate) async fn chunk(&mut self) -> Result<Option<&[u8]>, UpstreamError> {
        if !std::mem::replace(&mut self.is_piece_taken, true) {
            return Ok(Some(&self.piece));
        }
        self.response.chunk().await
    }
}

/// The result of `future` if it is there without waiting.
pub(crate) async fn ready<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}
