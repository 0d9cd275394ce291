//! Files below a root directory, kept in the cache like any response and dropped from it when they change.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, TryLockError, Weak};

use tidegate_http::normalize::{Normalized, percent_decode};
use tidegate_http::{FieldRules, Method, RequestHead};
use tidegate_store::{Object, Store, Visit};

use crate::cache::entries::{Entry, FileKey, PurgePattern, ResponseEntry, write_file_key};
use crate::cache::flights::{Join, Leader, News, Outcome};
use crate::cache::lookup::{Form, Found, Hit, find, form_of_file, hit};
use crate::compression;
use crate::data_core::DataCore;
use crate::service::answer::Answer;
use crate::service::plan::{Plan, PlanError};
use crate::service::routes::{Changed, Destination, ResponseChanges};
use crate::settings::{Coding, Compression};
use crate::static_files::large_files::{Known, LARGE_BYTES, LargeFile, LargeFiles};
use crate::static_files::stored::{confirm, file_head, modified_s, store_file};
use crate::static_files::{self, Stamp, StaticError, StaticFile, StaticRoot, Watcher};

/// Bytes of a file that are read at once on the way to a client.
const PIECE_BYTES: u64 = 64 * 1024;
/// Every combination of content codings that a client may accept.
const MASKS: u8 = 1 << Coding::ALL.len();
/// A larger file is not compressed: all of it would be held in memory meanwhile.
const MOST_COMPRESSED_BYTES: u64 = 8 << 20;

/// Files of which it is remembered that they are being sent.
const MOST_SHARED: usize = 256;

/// How often a request waits for another one that reads the same file, before it reads for itself.
const FOLLOW_ATTEMPTS: usize = 3;

/// Preloaded files take at most this part of the cache, so that what was learned from clients stays.
const PRELOAD_SHARE: u64 = 2;

/// A directory as routes name it.
pub(crate) struct RootPlace {
    pub path: PathBuf,
    /// The paths of the routes that lead to it, without the slash at the start, and what those change of heads.
    pub routes: Vec<(Vec<u8>, ResponseChanges)>,
}

/// A root directory.
pub(crate) struct Root {
    /// Replaced when `path` means another directory, as after `ln -sfn releases/2 current`.
    root: Arc<RwLock<StaticRoot>>,
    /// As it was given.
    path: PathBuf,
    large: Arc<LargeFiles>,
    changes: Changes,
    /// What is being sent from its descriptor.
    open: OpenFiles,
    compression: Option<Arc<Compression>>,
    /// Held while a file is compressed: one at a time, since all of a core's helper threads at it would leave the core
    /// and every other file waiting.
    compressing: Mutex<()>,
}

/// What the watcher and the readers of one root share.
struct Changes {
    /// Grows with every change; an object read meanwhile may be old and is dropped again.
    count: Arc<AtomicU64>,
    stop_preload: Arc<AtomicBool>,
    _watcher: Option<Watcher>,
}

impl Drop for Changes {
    fn drop(&mut self) {
        self.stop_preload.store(true, Ordering::Relaxed);
    }
}

/// A file that is sent from its descriptor because it is too large for the cache.
pub(crate) struct OpenFile {
    pub file: Arc<File>,
    pub length: u64,
    pub form: Form,
    /// Status line of a 200 and field lines.
    pub head: Vec<u8>,
}

/// Files that are being sent, by their keys: requests for one at the same time share its descriptor, of which there are few.
#[derive(Default)]
struct OpenFiles(Mutex<HashMap<Vec<u8>, Sending>>);

/// A file in the state in which it was opened, for as long as it is being sent.
type Sending = (Stamp, Weak<File>);

impl OpenFiles {
    /// The file that others send already, if it is the same.
    fn share(&self, key: Vec<u8>, opened: StaticFile) -> Arc<File> {
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((stamp, file)) = files.get(&key)
            && *stamp == opened.stamp
            && let Some(file) = file.upgrade()
        {
            return file;
        }
        if files.len() >= MOST_SHARED {
            files.retain(|_, (_, file)| file.strong_count() > 0);
        }
        let file = Arc::new(opened.file);
        if files.len() < MOST_SHARED {
            files.insert(key, (opened.stamp, Arc::downgrade(&file)));
        }
        file
    }
}

impl Root {
    /// Opens the directories, drops what the cache still holds of them, watches them and fills the cache from them.
    pub(crate) fn open_all(
        places: &[RootPlace],
        store: Option<Arc<Store>>,
        compression: Option<&Arc<Compression>>,
    ) -> Result<Vec<Arc<Self>>, PlanError> {
        if let Some(store) = &store {
            // Files may have changed while nobody watched.
            store.for_each(|_, info| match Entry::decode(info.meta) {
                Some(Entry::Response(entry)) if entry.is_file => Visit::Remove,
                _ => Visit::Keep,
            });
        }
        places
            .iter()
            .map(|place| {
                Self::open(place, store.clone(), compression.cloned())
                    .map(Arc::new)
                    .map_err(|source| PlanError::Root { path: place.path.clone(), source })
            })
            .collect()
    }

    fn open(
        place: &RootPlace,
        store: Option<Arc<Store>>,
        compression: Option<Arc<Compression>>,
    ) -> io::Result<Self> {
        let path = std::path::absolute(&place.path)?;
        let root = Arc::new(RwLock::new(StaticRoot::open(&path)?));
        let count = Arc::new(AtomicU64::new(0));
        let stop_preload = Arc::new(AtomicBool::new(false));
        let large = Arc::new(LargeFiles::default());
        let mut watcher = None;
        if let Some(store) = store {
            let (watched, changes, base) = (Arc::clone(&store), Arc::clone(&count), path.clone());
            let (root, open) = (Arc::clone(&root), Arc::clone(&large));
            let mut tags: Vec<u64> = place.routes.iter().map(|(_, changes)| changes.tag).collect();
            tags.sort_unstable();
            tags.dedup();
            watcher = Watcher::spawn(&path, move |relative| {
                if relative.as_os_str().is_empty()
                    && let Ok(opened) = StaticRoot::open(&base)
                {
                    *root.write().unwrap_or_else(PoisonError::into_inner) = opened;
                }
                changes.fetch_add(1, Ordering::SeqCst);
                forget((&watched, &open), &base, &tags, relative);
            })
            .inspect_err(|error| tracing::warn!(%error, root = %path.display(), "files are not watched, so they are not cached"))
            .ok();
            if watcher.is_some() {
                let routes = place.routes.clone();
                preload(
                    &path,
                    routes,
                    store,
                    (Arc::clone(&count), Arc::clone(&stop_preload)),
                    compression.clone(),
                );
            }
        }
        Ok(Self {
            root,
            path,
            large,
            changes: Changes { count, stop_preload, _watcher: watcher },
            open: OpenFiles::default(),
            compression,
            compressing: Mutex::default(),
        })
    }

    /// The pattern of what is stored of the file that a URL's normalized path names, or of all below that begin like
    /// it.
    pub(crate) fn purge_pattern(&self, path: &[u8], is_prefix: bool) -> PurgePattern {
        let mut file = self.path.as_os_str().as_bytes().to_vec();
        percent_decode(path, &mut file);
        if is_prefix { PurgePattern::Files(file) } else { PurgePattern::File(file) }
    }

    fn lookup(&self, path: &[u8], mask: u8) -> Result<StaticFile, StaticError> {
        let file = self.root.read().unwrap_or_else(PoisonError::into_inner).lookup(path, mask)?;
        Ok(offered(file, self.compression.as_deref(), mask))
    }

    /// Closes the files that are kept open for speed alone.
    pub(crate) fn close_files(&self) {
        self.large.close_all();
    }

    fn is_watched(&self) -> bool {
        self.changes._watcher.is_some()
    }
}

/// A file as clients get it that accept the codings of `mask`.
fn offered(file: StaticFile, compression: Option<&Compression>, mask: u8) -> StaticFile {
    let length = file.stamp.length;
    let is_offered = |compression: &&Compression| {
        file.content_encoding.is_none()
            && length <= MOST_COMPRESSED_BYTES
            && compression.takes(file.content_type.as_bytes(), Some(length))
    };
    match compression.filter(is_offered) {
        None => file,
        Some(compression) => StaticFile { vary: true, wanted: compression.choose(mask), ..file },
    }
}

/// Fills the cache from a root on a thread of its own; requests are answered meanwhile.
fn preload(
    path: &Path,
    routes: Vec<(Vec<u8>, ResponseChanges)>,
    store: Arc<Store>,
    (count, stop): (Arc<AtomicU64>, Arc<AtomicBool>),
    compression: Option<Arc<Compression>>,
) {
    let path = path.to_path_buf();
    let mut left = store.stats().capacity_bytes / PRELOAD_SHARE;
    let thread = std::thread::Builder::new().name("preload".into()).spawn(move || {
        let Ok(root) = StaticRoot::open(&path) else { return };
        let result = static_files::preload(&root, |relative, file| {
            let relative = relative.as_os_str().as_bytes();
            let leading = routes.iter().filter(|(route, _)| relative.starts_with(route));
            let Some((_, changes)) = leading.max_by_key(|(route, _)| route.len()) else { return };
            if stop.load(Ordering::Relaxed) || file.is_linked || file.stamp.length > left {
                return;
            }
            left -= file.stamp.length;
            let key = file_key(&path, relative, changes.tag, 0);
            let before = count.load(Ordering::SeqCst);
            let file = offered(file, compression.as_deref(), 0);
            store_file(&store, &key, file, &changes.fields, || count.load(Ordering::SeqCst) == before);
        });
        if let Err(error) = result {
            tracing::warn!(%error, root = %path.display(), "not all files could be loaded in advance");
        }
    });
    if let Err(error) = thread {
        tracing::warn!(%error, "files are not loaded in advance");
    }
}

/// The key of the file that has this path below a root, without a slash at the start, for readers that accept these
/// codings, by routes with this tag.
fn file_key(root: &Path, relative: &[u8], tag: u64, codings: u8) -> Vec<u8> {
    let mut key = Vec::new();
    let path = |key: &mut Vec<u8>| {
        key.push(b'/');
        key.extend_from_slice(relative);
    };
    write_file_key(root.as_os_str().as_bytes(), path, tag, codings, &mut key);
    key
}

/// Drops every answer that a changed file may have been part of; `tags` are those of all routes to the root.
fn forget((store, large): (&Store, &LargeFiles), root: &Path, tags: &[u64], relative: &Path) {
    let relative = relative.as_os_str().as_bytes();
    if relative.is_empty() {
        let root = root.as_os_str().as_bytes();
        store.for_each(|key, _| match FileKey::read(key) {
            Some(file) if file.root == root => Visit::Remove,
            _ => Visit::Keep,
        });
        large.close_all();
        return;
    }
    let original = Coding::ALL.iter().find_map(|coding| relative.strip_suffix(coding.suffix().as_bytes()));
    for name in [Some(relative), original].into_iter().flatten() {
        let directory =
            name.strip_suffix(b"index.html").filter(|rest| rest.is_empty() || rest.ends_with(b"/"));
        for path in [Some(name), directory].into_iter().flatten() {
            for (tag, mask) in tags.iter().flat_map(|tag| (0..MASKS).map(move |mask| (*tag, mask))) {
                let key = file_key(root, path, tag, mask);
                store.remove(&key);
                large.close(&key);
            }
        }
    }
}

/// Writes the key of the file that a request asks for.
#[inline]
pub(crate) fn write_key(
    plan: &Plan,
    root: Changed,
    head: &RequestHead<'_>,
    normalized: &Normalized<'_>,
    key: &mut Vec<u8>,
) -> Option<()> {
    let directory = plan.roots.get(root.index)?.path.as_os_str().as_bytes();
    let tag = plan.routes.changes(root.changes).responses.tag;
    let path = |key: &mut Vec<u8>| percent_decode(normalized.path, key);
    write_file_key(directory, path, tag, compression::accepted(&head.fields), key);
    Some(())
}

/// Answers a request for a file that is not in the cache.
pub(crate) async fn answer(
    core: &DataCore,
    plan: &Plan,
    to: Changed,
    head: &RequestHead<'_>,
    normalized: &Normalized<'_>,
) -> Answer {
    let Some(root) = plan.roots.get(to.index) else { return Answer::status(404) };
    if !matches!(head.method, Method::Get | Method::Head) {
        let status = if head.method == Method::Options { 200 } else { 405 };
        return Answer::Local { status, fields: b"Allow: GET, HEAD, OPTIONS\r\n".to_vec() };
    }
    let mut key = Vec::new();
    write_key(plan, to, head, normalized, &mut key);
    core.metrics.cache_misses_total.add(1);
    let leader = match lead_or_follow(core, head, &key).await {
        Turn::Read(leader) => leader,
        Turn::Found(hit) => return Answer::Stored(*hit),
    };
    let (root, store) = (Arc::clone(root), core.store.clone());
    let (served, own_key) = (Arc::clone(&root), key.clone());
    let mask = compression::accepted(&head.fields);
    let mut path = Vec::with_capacity(normalized.path.len());
    percent_decode(normalized.path, &mut path);
    let fields = &plan.routes.changes(to.changes).responses.fields;
    let wanted = Wanted { key, path, mask, fields: Arc::clone(fields) };
    let loaded = tokio::task::spawn_blocking(move || load(&root, store.as_deref(), &wanted)).await;
    // Under another key is what those get who accept no coding.
    let is_stored = matches!(&loaded, Ok(Loaded::Stored(object)) if object.key() == own_key);
    if matches!(loaded, Ok(Loaded::Stored(_))) && !is_stored {
        core.metrics.compressions_skipped_total.add(1);
    }
    if let Some(leader) = leader {
        leader.finish(if is_stored { Outcome::Stored } else { Outcome::NotShared });
    }
    match loaded {
        Ok(Loaded::Stored(object)) => match Entry::decode(object.meta()) {
            Some(Entry::Response(entry)) => {
                Answer::Stored(hit(head, &object, &entry, core.clock.unix_s(), false))
            }
            _ => Answer::status(500),
        },
        Ok(Loaded::Open(file)) => {
            let Stamp { length, .. } = file.stamp;
            let now_s = core.clock.unix_s();
            let modified_s = modified_s(&file, now_s);
            let form = form_of_file(head, length, Some(file.etag.as_bytes()), modified_s, now_s);
            let head = file_head(&file, None, modified_s, fields);
            let file = served.open.share(own_key, file);
            Answer::File(OpenFile { file, length, form, head })
        }
        Ok(Loaded::Failed(error)) => failed(core, error, normalized),
        Err(_) => Answer::status(500),
    }
}

/// The next piece of a file's part, read off the data core's thread: the disk may be slow. A file that has become
/// shorter cannot keep the length that was announced.
pub(crate) async fn read_piece(file: &Arc<std::fs::File>, start: u64, end: u64) -> io::Result<Vec<u8>> {
    let length = PIECE_BYTES.min(end - start) as usize;
    let file = Arc::clone(file);
    let read = tokio::task::spawn_blocking(move || {
        let mut piece = vec![0; length];
        file.read_exact_at(&mut piece, start).map(|()| piece)
    });
    read.await.map_err(io::Error::other)?
}

/// The file of a hit of which `bytes` go out, if it is large, open, and what is stored. One that is not open yet is
/// opened for the requests to come.
#[inline]
pub(crate) fn large_file(
    core: &DataCore,
    plan: &Plan,
    normalized: &Normalized<'_>,
    hit: &Hit,
    bytes: u64,
) -> Option<Arc<LargeFile>> {
    // Small parts of it too: what has one entity tag comes from one place.
    if bytes == 0 || !hit.is_file || hit.object.body_length() < LARGE_BYTES {
        return None;
    }
    let Some(Destination::Root(root)) = plan.route(normalized) else { return None };
    let (root, store) = (plan.roots.get(root.index)?, core.store.as_ref()?);
    // What was compressed here is in no file.
    let Some(Entry::Response(ResponseEntry { etag: Some(etag), is_by_coding: false, .. })) =
        Entry::decode(hit.object.meta())
    else {
        return None;
    };
    match root.large.find(hit.object.key(), etag) {
        Known::Open(file) => return Some(file),
        Known::Unopened(closed) => {
            let (root, store, object) = (Arc::clone(root), Arc::clone(store), hit.object.clone());
            tokio::task::spawn_blocking(move || {
                drop(closed);
                open_large(&root, &store, &object);
            });
        }
        Known::Closed => {}
    }
    None
}

/// Opens the file that is stored as `object`. Runs on a helper thread.
fn open_large(root: &Root, store: &Store, object: &Object) {
    let before = root.changes.count.load(Ordering::SeqCst);
    let key = object.key();
    let Some(FileKey { path, codings, .. }) = FileKey::read(key) else { return };
    let Ok(file) = root.lookup(path, codings) else { return };
    // One that can change unnoticed is not kept open.
    if file.is_linked {
        return;
    }
    match Entry::decode(object.meta()) {
        Some(Entry::Response(entry)) if entry.etag == Some(file.etag.as_bytes()) => {
            root.large.keep(key, file, || root.changes.count.load(Ordering::SeqCst) == before);
        }
        // It has changed without a word, as a file does that is mapped into memory and written there.
        _ => {
            store.remove(key);
            root.large.close(key);
        }
    }
}

/// What a request for a file does that is not in the cache.
enum Turn {
    /// Reads it, and tells those that wait for it.
    Read(Option<Leader>),
    /// Another request has read it meanwhile.
    Found(Box<Hit>),
}

/// Of requests for the same file one reads it, and the others wait for it to be in the cache.
async fn lead_or_follow(core: &DataCore, head: &RequestHead<'_>, key: &[u8]) -> Turn {
    let Some(store) = &core.store else { return Turn::Read(None) };
    let found = || match find(core, store, head, &mut key.to_vec()) {
        Found::Usable { hit, .. } => Some(Turn::Found(Box::new(hit))),
        _ => None,
    };
    for attempt in 0..FOLLOW_ATTEMPTS {
        let flight = match core.flights.join(key, core.flights.epoch(key), false) {
            Join::Lead(leader) => {
                // Another request may have ended between the look and the join.
                let Some(turn) = found() else { return Turn::Read(Some(leader)) };
                leader.finish(Outcome::Stored);
                return turn;
            }
            Join::Follow(flight) => flight,
        };
        if attempt == 0 {
            core.metrics.cache_collapsed_total.add(1);
        }
        match flight.news(false).await {
            News::Ended(Outcome::Stored) => {
                if let Some(turn) = found() {
                    return turn;
                }
            }
            // Whoever was to read it went away.
            News::Ended(Outcome::Abandoned) => {}
            // It is no file for the cache, or its disk is slow.
            _ => break,
        }
    }
    Turn::Read(None)
}

enum Loaded {
    Stored(Object),
    Open(StaticFile),
    Failed(StaticError),
}

/// A file as a request asks for it.
#[derive(Clone)]
struct Wanted {
    key: Vec<u8>,
    path: Vec<u8>,
    /// The codings that the client accepts.
    mask: u8,
    /// What is changed of its head.
    fields: Arc<FieldRules>,
}

/// Finds the file and reads it into the cache if it fits, compressed unless another one is being compressed. Runs on a
/// helper thread.
fn load(root: &Root, store: Option<&Store>, wanted: &Wanted) -> Loaded {
    let Wanted { key, path, mask, fields } = wanted;
    let mask = *mask;
    let before = root.changes.count.load(Ordering::SeqCst);
    let mut file = match root.lookup(path, mask) {
        Ok(file) => file,
        Err(error) => return Loaded::Failed(error),
    };
    let Some(store) = store.filter(|_| root.is_watched()) else { return Loaded::Open(file) };
    if let Some(object) = confirm(store, key, &file, fields) {
        return Loaded::Stored(object);
    }
    // What may find no room would be compressed in vain for each request.
    file.wanted = file.wanted.filter(|_| file.stamp.length <= store.max_object_bytes());
    let _compressing = match file.wanted.map(|_| root.compressing.try_lock()) {
        Some(Err(TryLockError::WouldBlock)) => return load_plain(root, store, wanted, file.is_linked),
        Some(Err(TryLockError::Poisoned(held))) => Some(held.into_inner()),
        Some(Ok(held)) => Some(held),
        None => None,
    };
    match file.file.try_clone() {
        Ok(handle) => {
            let copy = StaticFile { file: handle, ..file };
            let is_current = || root.changes.count.load(Ordering::SeqCst) == before;
            match store_file(store, key, copy, fields, is_current) {
                Some(object) => Loaded::Stored(object),
                None => match root.lookup(path, mask) {
                    Ok(file) => Loaded::Open(file),
                    Err(error) => Loaded::Failed(error),
                },
            }
        }
        Err(_) => Loaded::Open(file),
    }
}

/// The file as those get it who accept no coding.
fn load_plain(root: &Root, store: &Store, wanted: &Wanted, is_linked: bool) -> Loaded {
    let mut plain = Wanted { mask: 0, ..wanted.clone() };
    if let Some(codings) = plain.key.last_mut() {
        *codings = 0;
    }
    match store.get(&plain.key).filter(|_| !is_linked) {
        Some(object) => Loaded::Stored(object),
        None => load(root, Some(store), &plain),
    }
}

fn failed(core: &DataCore, error: StaticError, normalized: &Normalized<'_>) -> Answer {
    match error {
        StaticError::NeedsTrailingSlash => {
            let mut fields = b"Location: ".to_vec();
            fields.extend_from_slice(normalized.path);
            fields.push(b'/');
            if let Some(query) = normalized.query {
                fields.push(b'?');
                fields.extend_from_slice(query);
            }
            fields.extend_from_slice(b"\r\n");
            Answer::Local { status: 301, fields }
        }
        StaticError::Io(error) => {
            if core.log_limits.files.may_log(core.clock.elapsed_ms()) {
                let path = String::from_utf8_lossy(normalized.path);
                tracing::warn!(%error, %path, "a file could not be read");
            }
            Answer::status(status_of(&error))
        }
        _ => Answer::status(404),
    }
}

/// What a client is told of a file that is there and cannot be read.
fn status_of(error: &io::Error) -> u16 {
    if error.kind() == io::ErrorKind::PermissionDenied { 403 } else { 500 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn while_a_file_is_compressed_others_are_served_as_they_are_and_so_is_what_has_no_room() {
        let directory = tempfile::tempdir().unwrap();
        let place = RootPlace {
            path: directory.path().into(),
            routes: vec![(b"nowhere".to_vec(), ResponseChanges::default())],
        };
        let (small, large) = ("same again ".repeat(1000), "same again ".repeat(20_000));
        std::fs::write(directory.path().join("a.txt"), &small).unwrap();
        std::fs::write(directory.path().join("large.txt"), large).unwrap();
        let store = Arc::new(Store::open(tidegate_store::Config::new(1 << 20)).unwrap().0);
        let compression = Arc::new(Compression { codings: vec![Coding::Gzip], ..Compression::default() });
        let root = Root::open(&place, Some(Arc::clone(&store)), Some(compression)).unwrap();
        let load = |name: &str| {
            let (path, mask) = (format!("/{name}").into_bytes(), Coding::Gzip.bit());
            let key = file_key(directory.path(), name.as_bytes(), 0, mask);
            load(&root, Some(&store), &Wanted { key, path, mask, fields: Arc::default() })
        };
        let is_coded = |loaded: Loaded| match loaded {
            Loaded::Stored(object) => object.body_length() < small.len() as u64,
            Loaded::Open(_) | Loaded::Failed(_) => panic!("it has room"),
        };
        let held = root.compressing.lock().unwrap();
        // Read, and found.
        assert!(!is_coded(load("a.txt")) && !is_coded(load("a.txt")));
        assert!(matches!(load("large.txt"), Loaded::Open(_)));
        drop(held);
        assert!(is_coded(load("a.txt")));
        assert!(matches!(load("large.txt"), Loaded::Open(_)));
    }

    #[test]
    fn a_file_that_may_not_be_read_is_403_and_one_that_cannot_be_500() {
        let status = |errno| status_of(&io::Error::from_raw_os_error(errno));
        assert_eq!([libc::EACCES, libc::EPERM, libc::EIO].map(status), [403, 403, 500]);
    }
}
