use crate::control::Control;
use crate::inner::{Inner, SUPERBLOCK_BYTES};
use crate::object::{Lease, Object};
use crate::writer::{self, Writer, counted};
use crate::{Config, Handed, InsertError, OpenReport, StoreError, open};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// What [`Store::for_each`] does with the object just shown.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Visit {
    /// Leave it and go on.
    Keep,
    /// Remove it and go on.
    Remove,
    /// Leave it and end the walk.
    Stop,
}

/// What a walk shows of an object beside its key.
#[derive(Clone, Copy, Debug)]
pub struct ObjectInfo<'a> {
    /// The cache's own description, as inserted.
    pub meta: &'a [u8],
    /// The ready-to-send head, as inserted.
    pub head: &'a [u8],
    /// Length of the body in bytes.
    pub body_length: u64,
    /// Arena bytes that the object occupies.
    pub stored_bytes: u64,
}

/// Counters since the store was opened, and levels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Objects in the index.
    pub objects: u64,
    /// Arena bytes available to objects.
    pub capacity_bytes: u64,
    /// Arena bytes allocated: stored objects, removed ones that are still pinned, unfinished ones.
    pub used_bytes: u64,
    /// Arena bytes that are free.
    pub free_bytes: u64,
    /// Bytes of bookkeeping outside the arena; fixed when the store is opened.
    pub index_bytes: u64,
    /// Lookups that found their key.
    pub hits: u64,
    /// Lookups that did not.
    pub misses: u64,
    /// Objects committed.
    pub inserts: u64,
    /// Objects removed to make room.
    pub evictions: u64,
    /// Objects removed on request or replaced.
    pub removals: u64,
    /// Objects that were refused: too large, or no room could be made.
    pub insert_failures: u64,
    /// Records dropped at open because they were torn.
    pub torn_dropped: u64,
}

/// The store. All data cores share one through an `Arc`; no call waits for the disk but [`Store::open`] and
/// [`Store::sync`].
pub struct Store {
    inner: Arc<Inner>,
    leases: Box<[Arc<Lease>]>,
}

impl Store {
    /// Opens the store, or creates it. Reads the whole arena to recover what an earlier process left there, so it
    /// takes as long as reading that much from the disk. A file that cannot be used is set aside, which is not an
    /// error.
    ///
    /// # Errors
    /// A budget out of range, a directory that another process uses, a full disk, and failed system calls.
    pub fn open(config: Config) -> Result<(Self, OpenReport), StoreError> {
        open::open(config).map(Self::of)
    }

    /// Opens the store that another process has frozen and goes on reading from, with what it hands over. Where the
    /// configuration is for another one, that is opened as [`Self::open`] does. Until [`Self::thaw`] nothing is stored,
    /// and until [`Self::lift_quarantine`] nothing takes the place of what was there.
    ///
    /// # Errors
    /// As [`Self::open`], and when what is handed over is damaged.
    pub fn take_over(config: Config, handed: Handed) -> Result<(Self, OpenReport), StoreError> {
        open::take_over(config, handed).map(Self::of)
    }

    fn of((inner, report): (Inner, OpenReport)) -> (Self, OpenReport) {
        let inner = Arc::new(inner);
        let leases = inner.shards.iter().map(|_| Arc::new(Lease(inner.clone()))).collect();
        (Self { inner, leases }, report)
    }

    /// Stores, evicts and frees nothing from now on, so that another process can take the arena over. Objects are found
    /// and read as before, and what is being written may be written to its end, but is not stored.
    ///
    /// # Errors
    /// [`StoreError::StillRead`] when the store is frozen already, or a process before this one still reads from it;
    /// [`StoreError::Io`] without descriptors or memory. The store is as it was then.
    pub fn freeze(&self) -> Result<Handed, StoreError> {
        self.inner.freeze()
    }

    /// Stores again after [`Self::freeze`], if the other process has ended or never wrote; and for the first time after
    /// [`Self::take_over`], when the other process never will again.
    pub fn thaw(&self) {
        self.inner.thaw();
    }

    /// Whether nothing is stored, see [`Self::freeze`].
    pub fn is_frozen(&self) -> bool {
        self.inner.core().frozen
    }

    /// The process from which this one has taken the store over has ended: all of the arena can be used.
    pub fn lift_quarantine(&self) {
        self.inner.lift_quarantine();
    }

    fn lease(&self, hash: u64) -> &Arc<Lease> {
        &self.leases[self.inner.shard_number(hash)]
    }

    /// Has the processor fetch what [`Self::get`] needs first, so that it need not wait for the memory a little later.
    #[inline]
    pub fn prefetch(&self, key: &[u8]) {
        let hash = self.inner.hash(key);
        self.inner.shard(hash).prefetch(hash);
    }

    /// Looks `key` up, pins the object and counts the access.
    #[inline]
    pub fn get(&self, key: &[u8]) -> Option<Object> {
        let inner = &*self.inner;
        let hash = inner.hash(key);
        let id = {
            let mut shard = inner.shard(hash).lock();
            let Some(id) = shard.find(&inner.controls, hash, |id| inner.has_key(id, key)) else {
                shard.misses += 1;
                return None;
            };
            shard.hits += 1;
            inner.control(id).refs.fetch_add(1, Relaxed);
            id
        };
        let object = Object::adopt(self.lease(hash).clone(), id);
        if !inner.is_there(id) {
            inner.remove(hash, |other| other == id);
            return None;
        }
        inner.control(id).touch();
        Some(object)
    }

    /// Starts an object whose body's length is not known yet.
    ///
    /// # Errors
    /// [`InsertError::TooLarge`], or [`InsertError::NoSpace`] when readers and writers hold too much of the arena.
    pub fn insert(&self, key: &[u8], meta: &[u8], head: &[u8]) -> Result<Writer, InsertError> {
        let hash = self.inner.hash(key);
        counted(&self.inner, Writer::start(self.lease(hash).clone(), hash, [key, meta, head], None))
    }

    /// Starts an object whose body will have `body_length` bytes, which saves work and fragmentation. It may be
    /// committed with another length.
    ///
    /// # Errors
    /// As [`Self::insert`].
    pub fn insert_sized(
        &self,
        key: &[u8],
        meta: &[u8],
        head: &[u8],
        body_length: u64,
    ) -> Result<Writer, InsertError> {
        let hash = self.inner.hash(key);
        counted(
            &self.inner,
            Writer::start(self.lease(hash).clone(), hash, [key, meta, head], Some(body_length)),
        )
    }

    /// Removes the object; those who have it pinned may go on reading it. `false`: there was none.
    pub fn remove(&self, key: &[u8]) -> bool {
        self.inner.remove(self.inner.hash(key), |id| self.inner.has_key(id, key))
    }

    /// Stores `object` anew with other meta and head, for example after a 304. Copies at most 256 KiB of body.
    ///
    /// # Errors
    /// [`InsertError::Superseded`] when `object` is no longer what is stored under `key`; otherwise as
    /// [`Self::insert`].
    pub fn replace_meta(
        &self,
        key: &[u8],
        object: &Object,
        meta: &[u8],
        head: &[u8],
    ) -> Result<Object, InsertError> {
        if object.key() != key || !object.belongs_to(&self.inner) {
            return Err(InsertError::Superseded);
        }
        let lease = self.lease(self.inner.hash(key));
        counted(&self.inner, writer::replace_meta(lease, object, meta, head))
    }

    /// Shows every object to `f`, which says what becomes of it; in no particular order. Objects that are added
    /// or removed meanwhile may or may not be shown. No lock is held while `f` runs, and no access is counted.
    pub fn for_each(&self, mut f: impl FnMut(&[u8], &ObjectInfo<'_>) -> Visit) {
        for id in 1..self.inner.unused_id.load(Acquire) {
            let Some(object) = self.pin(id) else { continue };
            let info = ObjectInfo {
                meta: object.meta(),
                head: object.head(),
                body_length: object.body_length(),
                stored_bytes: object.stored_bytes(),
            };
            match f(object.key(), &info) {
                Visit::Keep => {}
                Visit::Remove => {
                    self.inner.remove(self.inner.control(id).hash.load(Relaxed), |other| other == id);
                }
                Visit::Stop => return,
            }
        }
    }

    /// Pins the object that has control block `id`, if it is in the index.
    fn pin(&self, id: u32) -> Option<Object> {
        let control: &Control = self.inner.control(id);
        let hash = control.hash.load(Relaxed);
        let shard = self.inner.shard(hash).lock();
        // In this order: an object of this shard stays indexed while we hold the lock, and one of another shard
        // that was indexed here meanwhile shows its own hash.
        if !control.indexed.load(Acquire) || control.hash.load(Relaxed) != hash {
            return None;
        }
        if !self.inner.is_there(id) {
            return None;
        }
        control.refs.fetch_add(1, Relaxed);
        drop(shard);
        Some(Object::adopt(self.lease(hash).clone(), id))
    }

    /// Bytes of the largest object, key, meta and head included: [`Config::max_object_bytes`].
    pub fn max_object_bytes(&self) -> u64 {
        self.inner.config.max_object_bytes
    }

    /// Counters and levels. Takes each lock once, so it is for scrapes, not for requests.
    pub fn stats(&self) -> Stats {
        let inner = &*self.inner;
        let (free_granules, ghost_bytes) = {
            let core = inner.core();
            (core.space.free_granules(), core.queues.ghost.bytes())
        };
        let capacity_bytes = inner.arena.length() - SUPERBLOCK_BYTES;
        let free_bytes = free_granules * crate::arena::GRANULE_BYTES;
        let mut stats = Stats {
            capacity_bytes,
            free_bytes,
            used_bytes: capacity_bytes - free_bytes,
            index_bytes: size_of_val(&*inner.controls) as u64 + ghost_bytes,
            inserts: inner.inserts.load(Relaxed),
            evictions: inner.evictions.load(Relaxed),
            removals: inner.removals.load(Relaxed),
            insert_failures: inner.failures.load(Relaxed),
            torn_dropped: inner.torn_dropped.load(Relaxed),
            ..Stats::default()
        };
        for shard in &inner.shards {
            let shard = shard.lock();
            stats.objects += shard.len() as u64;
            stats.hits += shard.hits;
            stats.misses += shard.misses;
            stats.index_bytes += shard.bytes();
        }
        stats
    }

    /// Writes dirty pages to the disk and waits for it: for a clean shutdown. Blocks: never call it on a data core.
    ///
    /// # Errors
    /// [`StoreError::Io`] when the disk does not take them, [`StoreError::Removed`] when nobody will find them there.
    pub fn sync(&self) -> Result<(), StoreError> {
        let Inner { arena, config, .. } = &*self.inner;
        let path = open::arena_path(config);
        let synced = arena.sync().and_then(|()| Ok(config.path.is_none() || arena.lies_at(&path)?));
        match synced {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoreError::Removed { path }),
            Err(source) => Err(StoreError::Io { action: "synchronize", path, source }),
        }
    }

    /// Panics when the parts of the store's state disagree: for tests, while nobody else uses the store.
    #[doc(hidden)]
    pub fn check_invariants(&self) {
        self.inner.check_invariants();
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("config", &self.inner.config).field("stats", &self.stats()).finish()
    }
}
