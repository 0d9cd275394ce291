//! Requests in progress for the same object: one asks the upstream, the others wait for its answer (RFC 9111 §4).

use std::collections::hash_map::{Entry, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tidegate_http::cache::Policy;
use tidegate_store::prefetch;
use tokio::sync::Notify;
use xxhash_rust::xxh3::xxh3_64;

use crate::cache::entries::url_of;
use crate::cache::heir::Heir;
use crate::cache::transfer::Tail;

const SHARDS: usize = 16;
/// URLs that are remembered as not shared; of two in one place the later one stays.
const NOT_SHARED: usize = 4096;
/// Places in which invalidations are noted; two in one place during one request stand for any URL of that place.
const EPOCHS: usize = 4096;
/// How long a leader may go without an answer before another request may ask beside it: what makes one request slow
/// need not make the others slow.
pub(crate) const LEAD_AGE: Duration = Duration::from_secs(5);
/// How long a follower waits for the end of a response that has begun and that it cannot read along.
const END_WAIT: Duration = Duration::from_secs(1);
/// How long a URL's requests go to the upstream side by side after an answer was for one of them alone.
const NOT_SHARED_S: u64 = 60;

/// How a leader's request ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Outcome {
    /// The object is in the cache: look again.
    Stored,
    /// The answer is for the leader alone, and the next one would most likely be for its request alone too: ask the
    /// upstream yourself.
    NotShared,
    /// The answer is for the leader alone because of what it asked for: somebody else may lead.
    ForLeaderAlone,
    /// The answer is for the leader alone because it identifies its client, as others may.
    ForItsClient,
    /// The upstream did not answer, or, if it was `reached`, with an error, and what is stored was good enough instead.
    StoodIn { reached: bool },
    /// The upstream cannot be reached, whatever is asked of it; the leader was told so with this status.
    Unreachable(u16),
    /// The upstream did not answer this client's request as it should, and the leader was told so with this status: it
    /// may answer somebody else's.
    Failed { status: u16, client: IpAddr },
    /// The leader went away before the answer was whole: somebody else may lead.
    Abandoned,
}

/// A response that has begun and may answer the followers too.
pub(crate) struct Started {
    pub status: u16,
    /// Status line and field lines for the client, without framing and the empty line.
    pub head: Vec<u8>,
    /// How long it may answer anybody, which a long body may outlast.
    pub policy: Policy,
    /// Bytes of the body.
    pub length: u64,
    pub tail: Tail,
}

/// A time between two removals of a URL on purpose.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(crate) struct Epoch {
    invalidations: u64,
    purges: u32,
}

/// All requests in progress that may end in the cache, over all data cores.
pub(crate) struct Flights {
    shards: [Mutex<ByHash>; SHARDS],
    /// Hashes names so that no peer can tell which are alike.
    names: ahash::RandomState,
    /// The upper half of a key's hash and the second, counted from 1970, until which its answers are not shared.
    not_shared: Box<[AtomicU64]>,
    /// The upper half of the hash of the URL that was invalidated last, and the number of invalidations.
    epochs: Box<[AtomicU64]>,
    /// Grows by one with each purge.
    purges: AtomicU32,
    /// Who is told of new epochs.
    pub(crate) heir: Heir,
}

impl Default for Flights {
    fn default() -> Self {
        let not_shared = std::iter::repeat_with(AtomicU64::default).take(NOT_SHARED).collect();
        let epochs = std::iter::repeat_with(AtomicU64::default).take(EPOCHS).collect();
        Self {
            shards: Default::default(),
            names: ahash::RandomState::new(),
            not_shared,
            epochs,
            purges: AtomicU32::default(),
            heir: Heir::default(),
        }
    }
}

type ByHash = HashMap<u64, Arc<Flight>, ahash::RandomState>;

/// One request in progress.
pub(crate) struct Flight {
    key: Box<[u8]>,
    epoch: Epoch,
    /// The upstream has answered, with what the followers may read along or not.
    answered: OnceLock<Option<Started>>,
    outcome: OnceLock<Outcome>,
    changed: Notify,
}

/// What a follower learns of its leader.
pub(crate) enum News<'f> {
    Started(&'f Started),
    Ended(Outcome),
    /// Nothing for as long as [`LEAD_AGE`]: see [`Flights::overtake`].
    Late,
}

/// What a request is to do.
pub(crate) enum Join {
    /// Ask the upstream, and tell the others.
    Lead(Leader),
    /// Wait for the leader.
    Follow(Arc<Flight>),
}

/// The right to fetch an object. Dropping it without [`Leader::finish`] tells the followers that it was abandoned.
pub(crate) struct Leader {
    flights: Arc<Flights>,
    /// Of the key and the epoch.
    hash: u64,
    flight: Arc<Flight>,
    /// The request that leads identifies its client.
    identifies: bool,
}

impl Flights {
    /// Joins the request in progress for `key`, or starts it. One that began in an earlier epoch is not joined.
    /// `identifies` says whether this request does its client.
    pub(crate) fn join(self: &Arc<Self>, key: &[u8], epoch: Epoch, identifies: bool) -> Join {
        let hash = self.names.hash_one((key, epoch));
        let flight = match self.shard(hash).entry(hash) {
            Entry::Occupied(entry) if entry.get().is_of(key, epoch) => {
                return Join::Follow(Arc::clone(entry.get()));
            }
            // Of two with one hash, of which there will hardly ever be any, the later one has no followers.
            Entry::Occupied(_) => Flight::new(key, epoch),
            Entry::Vacant(entry) => Arc::clone(entry.insert(Flight::new(key, epoch))),
        };
        Join::Lead(Leader { flights: Arc::clone(self), hash, flight, identifies })
    }

    /// Begins another request beside one that is late. Of those who follow it one leads from now on; `None` tells the
    /// others to join again.
    pub(crate) fn overtake(self: &Arc<Self>, late: &Arc<Flight>, identifies: bool) -> Option<Leader> {
        let hash = self.names.hash_one((&*late.key, late.epoch));
        let mut shard = self.shard(hash);
        let current = shard.get_mut(&hash).filter(|current| Arc::ptr_eq(current, late))?;
        *current = Flight::new(&late.key, late.epoch);
        let flight = Arc::clone(current);
        Some(Leader { flights: Arc::clone(self), hash, flight, identifies })
    }

    /// Has the processor fetch what a miss looks at next: each URL has other places in tables too large for its first
    /// caches.
    #[inline]
    pub(crate) fn prefetch(&self, url_key: &[u8]) {
        let hash = xxh3_64(url_key);
        prefetch(&raw const self.epochs[hash as usize % EPOCHS]);
        prefetch(self.place(hash));
    }

    /// The epoch of a URL, to be asked for before the request is sent.
    pub(crate) fn epoch(&self, url_key: &[u8]) -> Epoch {
        Epoch {
            invalidations: self.epochs[url_hash(url_key) as usize % EPOCHS].load(Ordering::SeqCst),
            purges: self.purges.load(Ordering::SeqCst),
        }
    }

    /// Whether nothing has removed the URL on purpose since `epoch`.
    pub(crate) fn is_current(&self, url_key: &[u8], epoch: Epoch) -> bool {
        let now = self.epoch(url_key);
        let since = (now.invalidations as u32).wrapping_sub(epoch.invalidations as u32);
        let last_was_another = now.invalidations >> 32 != url_hash(url_key) >> 32;
        now.purges == epoch.purges && (since == 0 || since == 1 && last_was_another)
    }

    /// Begins a new epoch for one URL or for all. To be called before what is stored is removed.
    pub(crate) fn new_epoch(&self, url_key: Option<&[u8]>) {
        match url_key {
            Some(url_key) => {
                let hash = url_hash(url_key);
                let place = &self.epochs[hash as usize % EPOCHS];
                let note = |old: u64| Some(hash >> 32 << 32 | u64::from((old as u32).wrapping_add(1)));
                // The closure always has a value.
                let _ = place.fetch_update(Ordering::SeqCst, Ordering::SeqCst, note);
            }
            None => {
                self.purges.fetch_add(1, Ordering::SeqCst);
            }
        }
        self.heir.tell(url_key);
    }

    /// Whether to wait for another request for `key` would be in vain: its answers are for one request each. What holds
    /// for requests that identify their client says nothing of others.
    pub(crate) fn is_not_shared(&self, key: &[u8], identifies: bool, now_s: u64) -> bool {
        let hash = not_shared_hash(key, identifies);
        let known = self.place(hash).load(Ordering::Relaxed);
        known >> 32 == hash >> 32 && known & 0xffff_ffff > now_s & 0xffff_ffff
    }

    /// Remembers that the answers for `key` are for one request each.
    fn remember_not_shared(&self, key: &[u8], identifies: bool, now_s: u64) {
        let hash = not_shared_hash(key, identifies);
        let until_s = (now_s + NOT_SHARED_S) & 0xffff_ffff;
        self.place(hash).store(hash & !0xffff_ffff | until_s, Ordering::Relaxed);
    }

    fn place(&self, hash: u64) -> &AtomicU64 {
        &self.not_shared[hash as usize % NOT_SHARED]
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, ByHash> {
        let shard = &self.shards[hash as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flight {
    /// An outcome is final: the first one counts.
    fn end(&self, outcome: Outcome) {
        let _ = self.outcome.set(outcome);
        self.changed.notify_waiters();
    }

    fn new(key: &[u8], epoch: Epoch) -> Arc<Self> {
        let (answered, outcome, changed) = Default::default();
        Arc::new(Self { key: key.into(), epoch, answered, outcome, changed })
    }

    fn is_of(&self, key: &[u8], epoch: Epoch) -> bool {
        *self.key == *key && self.epoch == epoch
    }
}

/// Requests of the one kind have other places than those of the other.
fn not_shared_hash(key: &[u8], identifies: bool) -> u64 {
    xxh3_64(key).rotate_left(u32::from(identifies))
}

/// The hash of a key's URL, whatever follows it.
fn url_hash(key: &[u8]) -> u64 {
    xxh3_64(url_of(key))
}

impl Leader {
    /// Remembers that answers to requests of its kind are for one request each.
    pub(crate) fn remember_not_shared(&self, now_s: u64) {
        self.flights.remember_not_shared(&self.flight.key, self.identifies, now_s);
    }

    /// What is being fetched.
    #[cfg(test)]
    fn key(&self) -> &[u8] {
        &self.flight.key
    }

    /// The upstream has answered: the followers may read along, or wait a moment for the end.
    pub(crate) fn answered(&self, started: Option<Started>) {
        // A leader is answered once.
        let _ = self.flight.answered.set(started);
        self.flight.changed.notify_waiters();
    }

    /// Tells the followers how it ended.
    pub(crate) fn finish(self, outcome: Outcome) {
        self.end(outcome);
    }

    fn end(&self, outcome: Outcome) {
        let Self { flights, hash, flight, .. } = self;
        if let Entry::Occupied(current) = flights.shard(*hash).entry(*hash) {
            if Arc::ptr_eq(current.get(), flight) {
                current.remove();
            } else if outcome == Outcome::NotShared && current.get().is_of(&flight.key, flight.epoch) {
                // It has been overtaken, by one that will have as little for those who wait for it.
                current.remove().end(outcome);
            }
        }
        flight.end(outcome);
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        if self.flight.outcome.get().is_none() {
            self.end(Outcome::Abandoned);
        }
    }
}

impl Flight {
    /// Waits for the leader's outcome, or for its start if the caller can do with that; for [`LEAD_AGE`] if neither
    /// comes.
    pub(crate) async fn news(&self, reads_along: bool) -> News<'_> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on a notification counts, so that a change between the look and the wait is not missed.
            changed.as_mut().enable();
            if let Some(outcome) = self.outcome.get() {
                return News::Ended(*outcome);
            }
            match self.answered.get() {
                Some(Some(started)) if reads_along => return News::Started(started),
                // Nobody knows how long it will go on.
                Some(_) => {
                    if tokio::time::timeout(END_WAIT, changed).await.is_err() {
                        return News::Ended(Outcome::NotShared);
                    }
                }
                None => {
                    if tokio::time::timeout(LEAD_AGE, changed).await.is_err() {
                        return News::Late;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn followers_learn_how_the_leader_ended() {
        let flights = Arc::new(Flights::default());
        let Join::Lead(leader) = flights.join(b"k", Epoch::default(), false) else {
            panic!("the first one leads")
        };
        let Join::Follow(follower) = flights.join(b"k", Epoch::default(), false) else {
            panic!("the second one follows")
        };
        assert!(matches!(flights.join(b"other", Epoch::default(), false), Join::Lead(_)));
        leader.finish(Outcome::Stored);
        assert!(matches!(follower.news(true).await, News::Ended(Outcome::Stored)));
        assert!(
            matches!(flights.join(b"k", Epoch::default(), false), Join::Lead(_)),
            "a new flight starts once one has ended"
        );
    }

    #[tokio::test(flavor = "current_thread")]
    async fn of_two_keys_with_one_hash_neither_follows_the_other() {
        let flights = Arc::new(Flights::default());
        let epoch = Epoch::default();
        let hash = flights.names.hash_one((&b"k"[..], epoch));
        let other = Flight::new(b"other", epoch);
        flights.shard(hash).insert(hash, Arc::clone(&other));
        let Join::Lead(leader) = flights.join(b"k", epoch, false) else { panic!("it follows another key") };
        assert_eq!(leader.key(), b"k");
        leader.finish(Outcome::Stored);
        assert!(flights.shard(hash).get(&hash).is_some_and(|flight| Arc::ptr_eq(flight, &other)));
        assert!(other.outcome.get().is_none());
    }

    #[test]
    fn who_overtakes_a_late_leader_leads_and_the_late_one_ends_nobody_else() {
        let flights = Arc::new(Flights::default());
        let epoch = flights.epoch(b"k");
        let Join::Lead(late) = flights.join(b"k", epoch, false) else { panic!("the first one leads") };
        let Join::Follow(flight) = flights.join(b"k", epoch, false) else { panic!("the second one follows") };
        let next = flights.overtake(&flight, false).expect("it leads now");
        assert!(flights.overtake(&flight, false).is_none(), "two overtake one");
        late.finish(Outcome::Stored);
        let Join::Follow(current) = flights.join(b"k", epoch, false) else { panic!("the flight was ended") };
        assert!(Arc::ptr_eq(&current, &next.flight));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_late_answer_for_one_request_alone_has_nobody_wait_for_the_next() {
        let flights = Arc::new(Flights::default());
        let epoch = flights.epoch(b"k");
        let Join::Lead(late) = flights.join(b"k", epoch, false) else { panic!("the first one leads") };
        let Join::Follow(flight) = flights.join(b"k", epoch, false) else { panic!("the second one follows") };
        let next = flights.overtake(&flight, false).expect("it leads now");
        let Join::Follow(current) = flights.join(b"k", epoch, false) else { panic!("it follows nobody") };
        late.finish(Outcome::NotShared);
        assert!(matches!(current.news(true).await, News::Ended(Outcome::NotShared)));
        // Nothing is left of it, whatever becomes of the other.
        drop(next);
        assert!(flights.shards.iter().all(|shard| shard.lock().unwrap().is_empty()));
    }

    #[test]
    fn what_began_before_an_invalidation_is_not_joined() {
        let flights = Arc::new(Flights::default());
        let Join::Lead(_old) = flights.join(b"k", flights.epoch(b"k"), false) else {
            panic!("the first one leads")
        };
        flights.new_epoch(Some(b"k"));
        assert!(matches!(flights.join(b"k", flights.epoch(b"k"), false), Join::Lead(_)));
        let before = flights.epoch(b"other");
        flights.new_epoch(None);
        assert!(!flights.is_current(b"other", before));
    }

    #[test]
    fn an_invalidation_concerns_its_url_and_none_that_shares_its_place() {
        let flights = Flights::default();
        let place = |key: &[u8]| xxh3_64(key) as usize % EPOCHS;
        let neighbour =
            (0..).map(|n: u32| n.to_string().into_bytes()).find(|key| place(key) == place(b"k")).unwrap();
        let (of_k, of_neighbour) = (flights.epoch(b"k"), flights.epoch(&neighbour));
        flights.new_epoch(Some(&neighbour));
        assert!(flights.is_current(b"k", of_k));
        assert!(!flights.is_current(&neighbour, of_neighbour));
        // Which of the two was the first is no longer known.
        flights.new_epoch(Some(&neighbour));
        assert!(!flights.is_current(b"k", of_k));
    }

    #[test]
    fn an_answer_for_one_request_alone_is_remembered_for_a_while() {
        let flights = Arc::new(Flights::default());
        for identifies in [false, true] {
            assert!(!flights.is_not_shared(b"k", identifies, 1_000));
            let Join::Lead(leader) = flights.join(b"k", Epoch::default(), identifies) else {
                panic!("it leads")
            };
            leader.remember_not_shared(1_000);
            assert!(flights.is_not_shared(b"k", identifies, 1_000 + NOT_SHARED_S - 1));
            assert!(!flights.is_not_shared(b"k", identifies, 1_000 + NOT_SHARED_S));
            assert!(!flights.is_not_shared(b"other", identifies, 1_000));
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_leader_that_goes_away_abandons_its_flight() {
        let flights = Arc::new(Flights::default());
        let Join::Lead(leader) = flights.join(b"k", Epoch::default(), false) else {
            panic!("the first one leads")
        };
        let Join::Follow(follower) = flights.join(b"k", Epoch::default(), false) else {
            panic!("the second one follows")
        };
        drop(leader);
        assert!(matches!(follower.news(false).await, News::Ended(Outcome::Abandoned)));
    }
}
