//! What the accelerator answers, as a site of Trickles: a response is a function of the request, and so can be made
//! again, by this replica or by another one.
//!
//! A resource is pinned by its validator: its version is a hash of name, ETag (or Last-Modified) and length, and of the
//! client where the response may be for nobody else, and every part that is asked for again is compared with it. What
//! has been read is kept for a while, which is soft state: it may be dropped at any time, and is asked for again with
//! Range. Only a response without a validator lives in it alone.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidegate_accelerator::Inside;
use tidegate_trickles::http::{Asked, Lost, Missing, Part, Resource, Site};
use tidegate_trickles::server::Wait;
use tokio::sync::{Semaphore, watch};

use super::exchange::{self, StreamingResponse};
use super::outgoing::Outgoing;
use super::streams::Streams;

/// Bytes that are asked for and kept together.
pub(super) const BLOCK_BYTES: u64 = 256 * 1024;
/// Bytes of blocks that are kept.
const KEPT_BLOCK_BYTES: usize = 64 << 20;
/// Responses that are remembered.
const KEPT_RESPONSES: usize = 4096;
/// Requests that must not be carried out again of which the answers are remembered.
const KEPT_DEEDS: usize = 16_384;
/// Questions to the accelerator at once; more have to wait for a repetition.
const MAX_ASKED: usize = 1024;
/// Of them for clients that may not be where they say.
const MAX_UNPROVED: usize = MAX_ASKED / 2;
/// Responses that are taken to their end at once, so that they come into the cache.
const MAX_DRAINS: usize = 32;
/// How long what was found answers the same request again. A repetition must not be carried out twice.
const FOUND_LIFE: Duration = Duration::from_secs(1);
/// How much longer, for who has waited for it, or where too much is asked.
const STALE_LIFE: Duration = Duration::from_secs(10);
/// How long a head stays as it is, for who has had its beginning: fields may differ from one answer to the next.
const HEAD_LIFE: Duration = CONTENT_LIFE;
const CONTENT_LIFE: Duration = Duration::from_secs(60);

/// A map that forgets the oldest entries beyond a budget.
struct Kept<K, V> {
    entries: HashMap<K, V>,
    order: std::collections::VecDeque<(K, usize)>,
    used: usize,
    budget: usize,
}

impl<K: Hash + Eq + Clone, V> Kept<K, V> {
    fn new(budget: usize) -> Self {
        Self { entries: HashMap::new(), order: std::collections::VecDeque::new(), used: 0, budget }
    }

    fn insert(&mut self, key: K, value: V, cost: usize) {
        // The same thing found again keeps its place in the order.
        if self.entries.insert(key.clone(), value).is_some() {
            return;
        }
        self.used += cost;
        self.order.push_back((key, cost));
        while self.used > self.budget
            && let Some((oldest, cost)) = self.order.pop_front()
        {
            self.entries.remove(&oldest);
            self.used -= cost;
        }
    }
}

/// What was asked.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
enum Question {
    /// The whole request, less what the answer does not depend on.
    Request(Vec<u8>),
    /// A block of a version.
    Block(u64, u64),
}

struct Found {
    result: Result<Resource, Missing>,
    until: Instant,
}

/// What has been begun.
#[derive(Clone)]
struct Known {
    resource: Resource,
    since: Instant,
    /// What its parts are asked for with.
    asked: Outgoing,
}

/// What all threads of a listener keep.
struct Soft {
    found: Kept<Vec<u8>, Found>,
    /// What requests that may not be repeated came to; apart, so that no number of others makes them forgotten.
    deeds: Kept<Vec<u8>, Found>,
    known: Kept<u64, Known>,
    gone: Kept<u64, ()>,
    blocks: Kept<(u64, u64), Bytes>,
    /// What is being asked: who waits for it holds a receiver, and nothing is kept for who waits no longer.
    waiting: HashMap<Question, Asking>,
}

/// A question that has no answer yet.
struct Asking {
    /// Ends with the question.
    done: watch::Sender<()>,
    /// Whoever asked it is where it says.
    proved: bool,
}

impl Soft {
    fn found_of(&self, key: &[u8]) -> Option<&Found> {
        self.found.entries.get(key).or_else(|| self.deeds.entries.get(key))
    }
}

/// The accelerator, asked by Trickles.
#[derive(Clone)]
pub(super) struct InnerSite {
    inside: Inside,
    local: SocketAddr,
    soft: Arc<Mutex<Soft>>,
    /// Responses that are read on.
    streams: Streams,
    /// Places for responses that are taken to their end for the cache's sake.
    drains: Arc<Semaphore>,
}

impl InnerSite {
    /// For requests that come to `local`.
    pub(super) fn new(inside: Inside, local: SocketAddr) -> Self {
        let soft = Soft {
            found: Kept::new(KEPT_RESPONSES),
            deeds: Kept::new(KEPT_DEEDS),
            known: Kept::new(KEPT_RESPONSES),
            gone: Kept::new(KEPT_RESPONSES),
            blocks: Kept::new(KEPT_BLOCK_BYTES),
            waiting: HashMap::new(),
        };
        let drains = Arc::new(Semaphore::new(MAX_DRAINS));
        Self { inside, local, soft: Arc::new(Mutex::new(soft)), streams: Streams::default(), drains }
    }

    /// What is asked.
    pub(super) fn inside(&self) -> &Inside {
        &self.inside
    }

    fn lock(&self) -> MutexGuard<'_, Soft> {
        self.soft.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the answer to a question; `true` if the caller is the one to ask it. `None` where too many are asked.
    fn join(&self, question: &Question, proved: bool) -> Option<(Wait, bool)> {
        let mut soft = self.lock();
        let (mut answered, first) = match soft.waiting.get(question) {
            Some(asking) => (asking.done.subscribe(), false),
            None => {
                let unproved = || soft.waiting.values().filter(|asking| !asking.proved).count();
                if soft.waiting.len() >= MAX_ASKED || (!proved && unproved() >= MAX_UNPROVED) {
                    return None;
                }
                let (done, answered) = watch::channel(());
                soft.waiting.insert(question.clone(), Asking { done, proved });
                (answered, true)
            }
        };
        let wait: Wait = Box::pin(async move {
            // A sender that is gone has given up: what is there is the answer.
            let _ = answered.changed().await;
        });
        Some((wait, first))
    }

    fn settle(&self, question: &Question) {
        drop(self.lock().waiting.remove(question));
    }

    /// What responses of this version begin with: what the first did, for a while.
    fn keep(&self, resource: Resource, asked: Outgoing) -> Resource {
        let mut soft = self.lock();
        soft.gone.entries.remove(&resource.version);
        if let Some(known) = soft.known.entries.get(&resource.version)
            && known.since.elapsed() < HEAD_LIFE
        {
            return known.resource.clone();
        }
        let known = Known { resource: resource.clone(), since: Instant::now(), asked };
        soft.known.insert(resource.version, known, 1);
        resource
    }

    /// Asks a whole request, and keeps the beginning of its response.
    async fn find_now(self, key: Vec<u8>, request: Outgoing) {
        let question = Question::Request(key.clone());
        let repeatable = request.repeatable;
        let (again, client, proved) = (request.clone(), request.peer.ip(), request.proved);
        let life = if repeatable { FOUND_LIFE } else { CONTENT_LIFE };
        let keep_found = |key, result| {
            let found = Found { result, until: Instant::now() + life };
            let mut soft = self.lock();
            let kept = if repeatable { &mut soft.found } else { &mut soft.deeds };
            kept.insert(key, found, 1);
        };
        match exchange::begin(&self.inside, self.local, request).await {
            Ok(mut begun) => {
                let version = begun.resource.version;
                while let Some((index, block)) = begun.next_block().await {
                    self.keep_block(version, index, block);
                    if begun.is_pinned() && index == 0 {
                        break;
                    }
                }
                let result = begun.complete().ok_or(Missing::Unavailable);
                let again = if begun.is_for_all() { again.of_anybody() } else { again };
                let result = result.map(|resource| self.keep(resource, again));
                keep_found(key, result);
                self.settle(&question);
                self.go_on(begun, client, proved).await;
            }
            Err(missing) => {
                keep_found(key, Err(missing));
                self.settle(&question);
            }
        }
    }

    /// Gets a block of a version: out of a response that is held, or with a request of its own. Of the head alone there
    /// is no part to ask for: there may be no byte.
    async fn read_now(self, request: Outgoing, version: u64, index: u64, part: Part) {
        let question = Question::Block(version, index);
        let again = request.clone();
        let client = request.peer.ip();
        let keep = |index, block| self.keep_block(version, index, block);
        if self.streams.read_to(version, index, keep).await {
            return self.settle(&question);
        }
        let first = index * BLOCK_BYTES;
        let request = if part.length == 0 { request } else { request.range(first, BLOCK_BYTES) };
        if let Ok(mut begun) = exchange::begin(&self.inside, self.local, request).await {
            if begun.goes_on_with(version) {
                self.keep(begun.resource.clone(), again);
                begun.skip_to(first).await;
                if let Some((index, block)) = begun.next_block().await {
                    self.keep_block(version, index, block);
                }
                self.settle(&question);
                self.go_on(begun, client, true).await;
                return;
            }
            // An error of the way there, or a refusal of this client, says nothing about the resource.
            if begun.tells_of_another() {
                self.lock().gone.insert(version, (), 1);
            }
        }
        self.settle(&question);
    }

    fn keep_block(&self, version: u64, index: u64, block: Bytes) {
        let bytes = block.len();
        self.lock().blocks.insert((version, index), block, bytes);
    }

    /// Takes the rest of a response that is on its way into the cache, which it reaches only so. Of another, or where
    /// too many are on their way, what follows is read when it is wanted.
    async fn go_on(&self, mut begun: StreamingResponse, client: IpAddr, proved: bool) {
        let version = begun.resource.version;
        if begun.fills()
            && let Ok(_place) = self.drains.try_acquire()
        {
            begun.drain(|index, block| self.keep_block(version, index, block)).await;
        } else if begun.is_whole() && begun.is_pinned() {
            self.streams.hold(begun, client, proved);
        }
    }

    fn lost(&self, version: u64) -> Lost {
        if self.lock().gone.entries.contains_key(&version) { Lost::Gone } else { Lost::NotNow }
    }
}

impl Site for InnerSite {
    fn find(&mut self, asked: &Asked<'_>) -> Result<Resource, Missing> {
        let key = Outgoing::of(asked).key;
        let soft = self.lock();
        let found = soft.found_of(&key).filter(|found| Instant::now() < found.until + STALE_LIFE);
        found.map_or(Err(Missing::Unavailable), |found| found.result.clone())
    }

    fn known(&mut self, _: &[u8], _: &[u8], version: u64) -> Result<Resource, Lost> {
        let known = self.lock().known.entries.get(&version).map(|known| known.resource.clone());
        known.ok_or_else(|| self.lost(version))
    }

    fn takes_content(&mut self, _: &[u8], _: &[u8]) -> bool {
        true
    }

    fn prepare_find(&mut self, asked: &Asked<'_>) -> Option<Wait> {
        let request = Outgoing::of(asked);
        let fresh = |found: &Found| found.until > Instant::now();
        if self.lock().found_of(&request.key).is_some_and(fresh) {
            return None;
        }
        let (wait, first) = self.join(&Question::Request(request.key.clone()), asked.proved)?;
        if first {
            tokio::spawn(self.clone().find_now(request.key.clone(), request));
        }
        Some(wait)
    }

    fn prepare_read(&mut self, peer: SocketAddr, host: &[u8], target: &[u8], part: Part) -> Option<Wait> {
        let (first, last) = match part.length as u64 {
            0 => (0, 0),
            length => (part.offset / BLOCK_BYTES, (part.offset + length - 1) / BLOCK_BYTES),
        };
        let (request, missing): (_, Vec<u64>) = {
            let soft = self.lock();
            let asked = Asked { peer, proved: false, request: 0, host, target, head: b"", body: b"" };
            let known = soft.known.entries.get(&part.version);
            let request = known.map_or_else(|| Outgoing::of(&asked), |known| known.asked.by(peer));
            let lacks_head = part.head && !soft.known.entries.contains_key(&part.version);
            let lacks = |index: &u64| {
                (part.length > 0 && !soft.blocks.entries.contains_key(&(part.version, *index)))
                    || (lacks_head && *index == first)
            };
            (request, (first..=last).filter(lacks).collect())
        };
        let mut waits = Vec::new();
        for index in missing {
            // What is waited for already is waited for; the client asks for the rest again.
            let Some((wait, asks)) = self.join(&Question::Block(part.version, index), true) else { break };
            if asks {
                tokio::spawn(self.clone().read_now(request.clone(), part.version, index, part));
            }
            waits.push(wait);
        }
        if waits.is_empty() {
            return None;
        }
        Some(Box::pin(async move {
            for wait in waits {
                wait.await;
            }
        }))
    }

    fn read(
        &mut self,
        _: &[u8],
        _: &[u8],
        version: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<usize, Lost> {
        let mut filled = 0;
        while filled < buffer.len() {
            let at = offset + filled as u64;
            let block = self.lock().blocks.entries.get(&(version, at / BLOCK_BYTES)).cloned();
            let block = block.ok_or_else(|| self.lost(version))?;
            let rest = block.get((at % BLOCK_BYTES) as usize..).unwrap_or_default();
            let count = rest.len().min(buffer.len() - filled);
            if count == 0 {
                break;
            }
            buffer[filled..filled + count].copy_from_slice(&rest[..count]);
            filled += count;
        }
        Ok(filled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_that_was_begun_stays_as_it_is() {
        let mut site = InnerSite::new(Inside::default(), ([127, 0, 0, 1], 1).into());
        let peer = ([192, 0, 2, 1], 1).into();
        let asked = Asked { peer, proved: true, request: 1, host: b"h", target: b"/", head: b"", body: b"" };
        let resource = |version, nth: &str| Resource {
            status: 200,
            length: 1,
            version,
            modified_s: None,
            etag: b"\"v1\"".to_vec(),
            fields: format!("X-Nth: {nth}\r\n").into(),
        };
        for (version, nth) in [(1, "9"), (1, "10"), (2, "11")] {
            site.keep(resource(version, nth), Outgoing::of(&asked));
        }
        assert_eq!(site.known(b"h", b"/", 1), Ok(resource(1, "9")));
        assert_eq!(site.keep(resource(1, "12"), Outgoing::of(&asked)), resource(1, "9"));
        assert_eq!(site.known(b"h", b"/", 2), Ok(resource(2, "11")));
    }

    fn asked(target: &[u8], proved: bool) -> Asked<'_> {
        let peer = ([192, 0, 2, 1], 1).into();
        Asked { peer, proved, request: 1, host: b"h", target, head: b"", body: b"" }
    }

    fn question(target: &[u8]) -> Question {
        Question::Request(Outgoing::of(&asked(target, true)).key)
    }

    #[test]
    fn who_waits_no_longer_leaves_nothing_behind() {
        let mut site = InnerSite::new(Inside::default(), ([127, 0, 0, 1], 1).into());
        let question = question(b"/slow");
        let (first, is_first) = site.join(&question, false).unwrap();
        assert!(is_first);
        let second = site.prepare_find(&asked(b"/slow", true)).unwrap();
        for _ in 0..1000 {
            drop(site.prepare_find(&asked(b"/slow", false)));
        }
        let receivers = |site: &InnerSite| site.lock().waiting[&question].done.receiver_count();
        assert_eq!(receivers(&site), 2);
        drop((first, second));
        assert_eq!(receivers(&site), 0);
        site.settle(&question);
        assert!(site.lock().waiting.is_empty());
    }

    #[test]
    fn clients_that_have_proved_nothing_leave_half_of_the_questions_to_others() {
        let site = InnerSite::new(Inside::default(), ([127, 0, 0, 1], 1).into());
        let nth = |n: usize| question(format!("/{n}").as_bytes());
        let asked = (0..2 * MAX_ASKED).filter(|n| site.join(&nth(*n), false).is_some()).count();
        assert_eq!(asked, MAX_UNPROVED);
        assert!(site.join(&nth(0), false).is_some(), "what is asked already");
        let proved = (MAX_ASKED..3 * MAX_ASKED).filter(|n| site.join(&nth(*n), true).is_some()).count();
        assert_eq!(proved, MAX_ASKED - MAX_UNPROVED);
    }

    #[test]
    fn the_oldest_entries_go_first_and_an_entry_is_paid_for_once() {
        let mut kept = Kept::new(10);
        for key in 0..5 {
            kept.insert(key, key, 4);
            kept.insert(key, key, 4);
            assert!(kept.used <= 10);
        }
        let mut keys: Vec<i32> = kept.entries.keys().copied().collect();
        keys.sort_unstable();
        assert_eq!(keys, [3, 4]);
    }
}
