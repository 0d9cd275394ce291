//! Stands for the arena until it lands: the same face over plain memory and an append-only file.
use crate::{Config, InsertError, OpenReport, StoreError};
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Debug)]
struct Entry {
    key: Vec<u8>,
    meta: Vec<u8>,
    head: Vec<u8>,
    body: Vec<u8>,
    file_offset: u64,
}

#[derive(Debug)]
struct Inner {
    map: Mutex<HashMap<Vec<u8>, Arc<Entry>>>,
    file: File,
    end: AtomicU64,
    config: Config,
}

impl Inner {
    fn map(&self) -> std::sync::MutexGuard<'_, HashMap<Vec<u8>, Arc<Entry>>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The store: shared by all data cores through an `Arc`.
#[derive(Debug)]
pub struct Store(Arc<Inner>);

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

/// Counters and levels of a store.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Objects in the index.
    pub objects: u64,
    /// Arena bytes available to objects.
    pub capacity_bytes: u64,
    /// Arena bytes allocated to objects, including removed ones that are still pinned and unfinished ones.
    pub used_bytes: u64,
    /// Arena bytes that are free.
    pub free_bytes: u64,
    /// Bytes of bookkeeping outside the arena, at most.
    pub index_bytes: u64,
    /// Lookups that found their key.
    pub hits: u64,
    /// Lookups that did not.
    pub misses: u64,
    /// Objects committed.
    pub inserts: u64,
    /// Objects removed to make room.
    pub evictions: u64,
    /// Objects removed by request or replaced.
    pub removals: u64,
    /// Objects that could not be stored.
    pub insert_failures: u64,
    /// Records dropped at open because they were torn.
    pub torn_dropped: u64,
}

impl Store {
    /// Opens or creates the store.
    pub fn open(config: Config) -> Result<(Self, OpenReport), StoreError> {
        let fd =
            rustix::fs::memfd_create("tidegate-store", rustix::fs::MemfdFlags::CLOEXEC).map_err(|e| {
                StoreError::Io { action: "create", path: PathBuf::from("memfd"), source: e.into() }
            })?;
        let inner = Inner { map: Mutex::default(), file: fd.into(), end: AtomicU64::new(0), config };
        Ok((Self(Arc::new(inner)), OpenReport::default()))
    }

    /// Looks `key` up, pins the object and counts the access.
    pub fn get(&self, key: &[u8]) -> Option<Object> {
        self.0.map().get(key).cloned().map(Object)
    }

    /// Starts an object whose body length is not known yet.
    pub fn insert(&self, key: &[u8], meta: &[u8], head: &[u8]) -> Result<Writer, InsertError> {
        Ok(Writer {
            inner: self.0.clone(),
            entry: Entry {
                key: key.into(),
                meta: meta.into(),
                head: head.into(),
                body: Vec::new(),
                file_offset: 0,
            },
        })
    }

    /// Starts an object whose body will have `body_length` bytes.
    pub fn insert_sized(
        &self,
        key: &[u8],
        meta: &[u8],
        head: &[u8],
        body_length: u64,
    ) -> Result<Writer, InsertError> {
        let _ = body_length;
        self.insert(key, meta, head)
    }

    /// Removes the object; those who pinned it may go on reading.
    pub fn remove(&self, key: &[u8]) -> bool {
        self.0.map().remove(key).is_some()
    }

    /// Gives `object` new meta and head, for example after a 304; fails when it is no longer current.
    pub fn replace_meta(
        &self,
        key: &[u8],
        object: &Object,
        meta: &[u8],
        head: &[u8],
    ) -> Result<Object, InsertError> {
        if self.get(key).is_none_or(|o| !Arc::ptr_eq(&o.0, &object.0)) {
            return Err(InsertError::Superseded);
        }
        let mut writer = self.insert(key, meta, head)?;
        writer.write(&object.0.body)?;
        Ok(writer.commit())
    }

    /// Shows every object to `f`, which says what becomes of it.
    pub fn for_each(&self, mut f: impl FnMut(&[u8], &ObjectInfo<'_>) -> Visit) {
        let all: Vec<_> = self.0.map().values().cloned().collect();
        for e in all {
            let info = ObjectInfo {
                meta: &e.meta,
                head: &e.head,
                body_length: e.body.len() as u64,
                stored_bytes: e.body.len() as u64,
            };
            match f(&e.key, &info) {
                Visit::Keep => {}
                Visit::Remove => {
                    self.remove(&e.key);
                }
                Visit::Stop => return,
            }
        }
    }

    /// Counters and levels.
    pub fn stats(&self) -> Stats {
        Stats {
            objects: self.0.map().len() as u64,
            capacity_bytes: self.0.config.budget_bytes,
            ..Stats::default()
        }
    }

    /// Writes dirty pages to the disk and waits for it. Blocks: never call it on a data core.
    pub fn sync(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// The arena's file, for sendfile.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }
}

/// A pinned object.
#[derive(Clone, Debug)]
pub struct Object(Arc<Entry>);

impl Object {
    /// The key.
    pub fn key(&self) -> &[u8] {
        &self.0.key
    }
    /// The cache's own description.
    pub fn meta(&self) -> &[u8] {
        &self.0.meta
    }
    /// The ready-to-send head.
    pub fn head(&self) -> &[u8] {
        &self.0.head
    }
    /// Length of the body in bytes.
    pub fn body_length(&self) -> u64 {
        self.0.body.len() as u64
    }
    /// The body's pieces in order; usually exactly one.
    pub fn body(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&self.0.body[..]).filter(|b| !b.is_empty())
    }
    /// The body from `offset` to the end of the extent it lies in; empty at or beyond the end.
    pub fn body_at(&self, offset: u64) -> &[u8] {
        usize::try_from(offset).ok().and_then(|o| self.0.body.get(o..)).unwrap_or_default()
    }
    /// Where [`Self::body_at`]`(offset)` lies in [`Store::file`]: file offset and length in bytes.
    pub fn body_file_extent(&self, offset: u64) -> (u64, u64) {
        (self.0.file_offset.saturating_add(offset), self.body_at(offset).len() as u64)
    }
}

/// An object being written; dropping it without [`Writer::commit`] discards it.
#[derive(Debug)]
pub struct Writer {
    inner: Arc<Inner>,
    entry: Entry,
}

/// How far a [`Writer`] has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Progress {
    /// More bytes may come.
    Writing,
    /// Complete.
    Committed,
    /// Dropped without commit: what was read so far is all there is.
    Aborted,
}

/// Reads what a [`Writer`] has written so far; woken by whoever drives the writer.
#[derive(Clone, Debug)]
pub struct Follower(());

impl Follower {
    /// How far the writer has come.
    pub fn progress(&self) -> Progress {
        Progress::Aborted
    }
    /// Bytes of the body that may be read.
    pub fn available(&self) -> u64 {
        0
    }
    /// The written part of the body from `offset` to the end of its extent; empty when nothing is there yet.
    pub fn body_at(&self, _offset: u64) -> &[u8] {
        &[]
    }
}

impl Writer {
    /// Appends to the body.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), InsertError> {
        let limit_bytes = self.inner.config.max_object_bytes;
        if (self.entry.body.len() + bytes.len()) as u64 > limit_bytes {
            return Err(InsertError::TooLarge { limit_bytes });
        }
        self.entry.body.extend_from_slice(bytes);
        Ok(())
    }
    /// Bytes of the body written so far.
    pub fn written(&self) -> u64 {
        self.entry.body.len() as u64
    }
    /// A reader of the part already written, for requests that collapsed onto this one.
    pub fn follow(&self) -> Follower {
        Follower(())
    }
    /// Makes the object visible, replacing any other of its key.
    pub fn commit(mut self) -> Object {
        let length = self.entry.body.len() as u64;
        self.entry.file_offset = self.inner.end.fetch_add(length, Ordering::Relaxed);
        let _ = self.inner.file.write_all_at(&self.entry.body, self.entry.file_offset);
        let entry = Arc::new(self.entry);
        self.inner.map().insert(entry.key.clone(), entry.clone());
        Object(entry)
    }
}
