//! Opening a store: the directory, its lock, the superblock, and what to do with a file that cannot be used.

use crate::arena::{Arena, GRANULE_BYTES};
use crate::config::{MAX_BUDGET_BYTES, MIN_BUDGET_BYTES};
use crate::handover::Handed;
use crate::inner::{Inner, SUPERBLOCK_BYTES};
use crate::record::{self, FORMAT_VERSION};
use crate::{Config, OpenReport, SetAside, StoreError, Unusable, recovery};
use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, OFlags};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: [u8; 8] = *b"TGARENA\n";
/// Files set aside that are kept; older ones are deleted, and all when the disk is full.
const SET_ASIDE_KEPT: usize = 2;

/// What the first bytes of an arena file say. All integers are little-endian: magic, version, granule size,
/// length of the file, salt, XXH3-64 of all these.
struct Superblock {
    length: u64,
    salt: u64,
}

const SUPERBLOCK_USED: usize = 40;

impl Superblock {
    fn encode(&self) -> [u8; SUPERBLOCK_USED] {
        let mut bytes = [0; SUPERBLOCK_USED];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(GRANULE_BYTES as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.salt.to_le_bytes());
        let sum = xxh3_64(&bytes[..32]);
        bytes[32..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads and checks the superblock of a file that should have `expected` bytes.
    fn read(file: &File, expected: u64) -> Result<Self, Unusable> {
        let metadata = file.metadata().map_err(|_| Unusable::Magic)?;
        if !metadata.is_file() {
            return Err(Unusable::Magic);
        }
        let mut bytes = [0; SUPERBLOCK_USED];
        // At its place: another process may have the same open file.
        file.read_exact_at(&mut bytes, 0).map_err(|_| Unusable::Magic)?;
        if bytes[..8] != MAGIC {
            return Err(Unusable::Magic);
        }
        let mut words =
            bytes[8..].chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap_or_default()));
        let mut word = || words.next().unwrap_or_default();
        let (versions, length, salt, sum) = (word(), word(), word(), word());
        let version = versions as u32;
        if version != FORMAT_VERSION {
            return Err(Unusable::Version { found: version, expected: FORMAT_VERSION });
        }
        if sum != xxh3_64(&bytes[..32]) || versions >> 32 != GRANULE_BYTES {
            return Err(Unusable::Superblock);
        }
        if metadata.len() != expected || length != expected {
            return Err(Unusable::Size { found: metadata.len(), expected });
        }
        Ok(Self { length, salt })
    }
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { action, path, source }
}

pub(crate) fn arena_path(config: &Config) -> PathBuf {
    config
        .path
        .as_ref()
        .map_or_else(|| PathBuf::from("anonymous memory"), |directory| directory.join("arena"))
}

/// The seed of all checksums and of the key hash, so that neither can be predicted from outside.
fn random_salt() -> u64 {
    RandomState::new().build_hasher().finish()
}

pub(crate) fn open(config: Config) -> Result<(Inner, OpenReport), StoreError> {
    let (inner, mut report) = open_arena(config)?;
    report.locked_in_memory = inner.arena.lock_in_memory().is_ok();
    Ok((inner, report))
}

/// The arena's length in bytes.
fn length_of(config: &Config) -> Result<u64, StoreError> {
    let length = config.budget_bytes / SUPERBLOCK_BYTES * SUPERBLOCK_BYTES;
    if !(MIN_BUDGET_BYTES..=MAX_BUDGET_BYTES).contains(&length) {
        return Err(StoreError::Budget { budget_bytes: config.budget_bytes });
    }
    Ok(length)
}

/// Opens what another process hands over, if the configuration is still for that, and anything else as [`open`] does.
/// An arena that is taken over is frozen until [`Inner::thaw`].
pub(crate) fn take_over(config: Config, handed: Handed) -> Result<(Inner, OpenReport), StoreError> {
    let length = length_of(&config)?;
    let path = arena_path(&config);
    let is_same_file = |path: &Path| {
        let (Ok(here), Ok(there)) = (handed.arena.metadata(), fs::metadata(path)) else { return false };
        (here.dev(), here.ino()) == (there.dev(), there.ino())
    };
    let is_same = match &config.path {
        Some(_) => is_same_file(&path),
        None => handed.lock.is_none(),
    };
    if !is_same {
        return open(config);
    }
    let found = handed.arena.metadata().map_or(0, |metadata| metadata.len());
    if found != length {
        return match config.path {
            // In the place of that file, which the process before needs again if this one fails, there cannot be another.
            Some(_) => Err(StoreError::NotTaken { path, reason: Unusable::Size { found, expected: length } }),
            None => open(config),
        };
    }
    let superblock = Superblock::read(&handed.arena, length)
        .map_err(|reason| StoreError::NotTaken { path: path.clone(), reason })?;
    let arena = Arena::map(handed.arena, length).map_err(io_error("map", &path))?;
    let taken = handed.taken.read(length / GRANULE_BYTES).map_err(io_error("take over", &path))?;
    let inner = Inner::new(arena, config, superblock.salt, handed.lock);
    let mut report = OpenReport::default();
    recovery::take_over(&inner, taken, &mut report)
        .map_err(|reason| StoreError::NotTaken { path, reason })?;
    report.locked_in_memory = inner.arena.lock_in_memory().is_ok();
    Ok((inner, report))
}

fn open_arena(config: Config) -> Result<(Inner, OpenReport), StoreError> {
    let length = length_of(&config)?;
    let Some(directory) = config.path.clone() else { return open_anonymous(config, length) };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&directory)
        .map_err(io_error("create directory", &directory))?;
    let lock = lock(&directory)?;
    let mut report = OpenReport::default();
    let path = arena_path(&config);
    match open_existing(&path, length)? {
        Existing::None => {}
        Existing::Unusable(reason) => report.set_aside = Some(set_aside(&directory, &path, reason)?),
        Existing::Usable(file, salt) => {
            let arena = Arena::map(file, length).map_err(io_error("map", &path))?;
            let inner = Inner::new(arena, config.clone(), salt, Some(lock));
            match recovery::recover(&inner, &mut report) {
                Ok(()) => return Ok((inner, report)),
                Err(reason) => {
                    let set_aside = set_aside(&directory, &path, reason)?;
                    report = OpenReport { set_aside: Some(set_aside), ..OpenReport::default() };
                    let lock = inner.into_lock();
                    return create(config, &directory, length, lock).map(|inner| (inner, report));
                }
            }
        }
    }
    create(config, &directory, length, Some(lock)).map(|inner| (inner, report))
}

fn open_anonymous(config: Config, length: u64) -> Result<(Inner, OpenReport), StoreError> {
    let path = arena_path(&config);
    let file = rustix::fs::memfd_create("tidegate-store", MemfdFlags::CLOEXEC)
        .map_err(|e| io_error("create", &path)(e.into()))?;
    rustix::fs::ftruncate(&file, length).map_err(|e| io_error("size", &path)(e.into()))?;
    let (file, salt) = (File::from(file), random_salt());
    // For a process that takes it over.
    file.write_all_at(&Superblock { length, salt }.encode(), 0).map_err(io_error("write", &path))?;
    let arena = Arena::map(file, length).map_err(io_error("map", &path))?;
    let inner = Inner::new(arena, config, salt, None);
    inner.core().space.release_unclaimed(&inner.arena);
    Ok((inner, OpenReport::default()))
}

/// Takes the directory's lock, which ends with the process even when that is killed.
fn lock(directory: &Path) -> Result<File, StoreError> {
    let path = directory.join("lock");
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(io_error("open", &path))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(StoreError::InUse { path }),
        Err(error) => Err(io_error("lock", &path)(error.into())),
    }
}

enum Existing {
    None,
    Unusable(Unusable),
    Usable(File, u64),
}

fn open_existing(path: &Path, length: u64) -> Result<Existing, StoreError> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match OpenOptions::new().read(true).write(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Existing::None),
        // A symbolic link, a directory, a socket: not what we put there.
        Err(_) if fs::symlink_metadata(path).is_ok_and(|m| !m.is_file()) => {
            return Ok(Existing::Unusable(Unusable::Magic));
        }
        Err(error) => return Err(io_error("open", path)(error)),
    };
    let superblock = match Superblock::read(&file, length) {
        Ok(superblock) => superblock,
        Err(reason) => return Ok(Existing::Unusable(reason)),
    };
    // A copy of the file may have holes, and a hole on a full disk would be a fatal signal later.
    match reserve(&file, superblock.length) {
        Ok(()) => Ok(Existing::Usable(file, superblock.salt)),
        Err(Errno::NOSPC | Errno::DQUOT) => {
            Err(StoreError::DiskFull { path: path.to_owned(), needed_bytes: length })
        }
        Err(error) => Err(io_error("reserve", path)(error.into())),
    }
}

fn reserve(file: &File, length: u64) -> Result<(), Errno> {
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, length) {
            Err(Errno::INTR) => {}
            // Not every file system can reserve; on those the bytes are written.
            Err(Errno::OPNOTSUPP) => return fill_holes(file, length),
            result => return result,
        }
    }
}

/// Writes back every byte of the file, so that each has its place on the disk.
fn fill_holes(file: &File, length: u64) -> Result<(), Errno> {
    let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let mut buffer = vec![0; 1 << 16];
    let mut at = 0;
    while at < length {
        let wanted = (length - at).min(buffer.len() as u64) as usize;
        let chunk = &mut buffer[..wanted];
        chunk.fill(0);
        let mut read = 0;
        while read < chunk.len() {
            match file.read_at(&mut chunk[read..], at + read as u64).map_err(errno)? {
                0 => break,
                n => read += n,
            }
        }
        file.write_all_at(chunk, at).map_err(errno)?;
        at += wanted as u64;
    }
    Ok(())
}

/// Creates the file under another name first: one that bears the final name is complete.
fn create(config: Config, directory: &Path, length: u64, lock: Option<File>) -> Result<Inner, StoreError> {
    let (path, unfinished) = (arena_path(&config), directory.join("arena.new"));
    let salt = random_salt();
    let build = || -> Result<File, Errno> {
        let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        match fs::remove_file(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(errno(error)),
            _ => {}
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let mut file = options.open(&unfinished).map_err(errno)?;
        reserve(&file, length)?;
        file.write_all(&Superblock { length, salt }.encode()).map_err(errno)?;
        Ok(file)
    };
    let built = build().or_else(|error| {
        let full = matches!(error, Errno::NOSPC | Errno::DQUOT);
        if full && forget_set_aside(directory, 0) > 0 { build() } else { Err(error) }
    });
    let file = built.map_err(|error| {
        let _ = fs::remove_file(&unfinished);
        match error {
            Errno::NOSPC | Errno::DQUOT => StoreError::DiskFull { path: path.clone(), needed_bytes: length },
            error => io_error("create", &path)(error.into()),
        }
    })?;
    fs::rename(&unfinished, &path).map_err(io_error("create", &path))?;
    let arena = Arena::map(file, length).map_err(io_error("map", &path))?;
    let inner = Inner::new(arena, config, salt, lock);
    inner.core().space.release_unclaimed(&inner.arena);
    Ok(inner)
}

/// The files set aside so far with their numbers, oldest first.
fn list_set_aside(directory: &Path) -> Vec<(u64, PathBuf)> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let number = |path: &Path| path.file_name()?.to_str()?.strip_prefix("arena.set-aside-")?.parse().ok();
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut found: Vec<_> = paths.filter_map(|path| Some((number(&path)?, path))).collect();
    found.sort();
    found
}

/// Deletes the oldest files set aside until `keep` are left; returns how many it deleted.
fn forget_set_aside(directory: &Path, keep: usize) -> usize {
    let mut found = list_set_aside(directory);
    found.truncate(found.len().saturating_sub(keep));
    found.iter().filter(|(_, path)| fs::remove_file(path).is_ok()).count()
}

fn set_aside(directory: &Path, path: &Path, reason: Unusable) -> Result<SetAside, StoreError> {
    let number = list_set_aside(directory).last().map_or(0, |(number, _)| number.saturating_add(1));
    let to = directory.join(format!("arena.set-aside-{number}"));
    fs::rename(path, &to).map_err(io_error("set aside", path))?;
    forget_set_aside(directory, SET_ASIDE_KEPT);
    Ok(SetAside { path: to, reason })
}

/// Makes the fixed part of every record in the file `path` agree with its checksum, whatever it says: so that tests
/// and fuzzers reach what is checked after it.
#[doc(hidden)]
pub fn reseal(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let length = file.metadata()?.len();
    let Ok(superblock) = Superblock::read(&file, length) else { return Ok(()) };
    let arena = Arena::map(file, length)?;
    for granule in (SUPERBLOCK_BYTES / GRANULE_BYTES) as u32..(length / GRANULE_BYTES) as u32 {
        if record::magic(&arena, u64::from(granule) * GRANULE_BYTES) == record::RECORD_MAGIC {
            record::seal(&arena, granule, superblock.salt);
        }
    }
    Ok(())
}
