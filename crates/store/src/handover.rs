//! An arena changes hands while both processes serve from it.
//!
//! The one that has it freezes it: from then on it publishes, evicts and frees nothing, and it hands on a bit for each
//! granule that it uses, or still may. The other maps the same file, believes of it what a checksum confirms, as after
//! a crash, and writes nothing until it is told that there is no way back. From then on it uses what was free; what was
//! taken is in quarantine when it is given back, until the first process has ended. So nobody ever writes where the
//! other may read. A removal clears the record's magic on either side, and the other side, which looks at it with each
//! hit, finds the object gone.
//!
//! Should the other process fail, the first one thaws. The other has ended by then, whatever it has written in between:
//! the words that describe free space are made anew from bits that are this process's own.

use crate::StoreError;
use crate::arena::GRANULE_BYTES;
use crate::inner::{Core, Inner};
use crate::open::arena_path;
use crate::record::{self, RECORD_MAGIC};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// Of the arena, one part in so many is made free before it changes hands.
const ROOM_SHARE: u64 = 32;
/// Victims for that room while the lock is held once.
const VICTIMS_AT_ONCE: u32 = 32;

/// What one process gives another that takes its store over. All of it are descriptors, which travel by SCM_RIGHTS.
#[derive(Debug)]
pub struct Handed {
    /// The arena's file.
    pub arena: File,
    /// Which granules are used.
    pub taken: Taken,
    /// The directory's lock, held by whoever has it open; none for anonymous memory.
    pub lock: Option<File>,
}

/// A bit for each granule of an arena, in a file without a name.
#[derive(Debug)]
pub struct Taken(pub File);

impl Taken {
    fn write(bits: &[u64]) -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("tidegate-taken", MemfdFlags::CLOEXEC)?);
        let bytes: Vec<u8> = bits.iter().flat_map(|word| word.to_le_bytes()).collect();
        file.write_all_at(&bytes, 0)?;
        Ok(Self(file))
    }

    /// Those of `granules`; anything else is an error.
    pub(crate) fn read(&self, granules: u64) -> io::Result<Box<[u64]>> {
        let words = granules.div_ceil(64);
        if self.0.metadata()?.len() != words * 8 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut bytes = vec![0; words as usize * 8];
        self.0.read_exact_at(&mut bytes, 0)?;
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        Ok(bytes.chunks_exact(8).map(word).collect())
    }
}

impl Inner {
    /// Stops every change of the arena but that of what is being written already, and removals.
    pub(crate) fn freeze(&self) -> Result<Handed, StoreError> {
        let failed = |action| {
            let path = arena_path(&self.config);
            move |source| StoreError::Io { action, path, source }
        };
        let file = |file: &File| file.try_clone().map_err(failed("hand over"));
        let (arena, lock) = (file(self.arena.file())?, self.lock.as_ref().map(file).transpose()?);
        let room = self.arena.length() / GRANULE_BYTES / ROOM_SHARE;
        self.make_room(room);
        let mut core = self.core();
        if core.frozen || core.space.has_quarantine() {
            return Err(StoreError::StillRead);
        }
        // Half of what is free for the new process, and half for what is being written here.
        let half = core.space.free_granules() / 2;
        let bits = core.space.share(&self.arena, half);
        self.shared.store(true, Relaxed);
        core.frozen = true;
        drop(core);
        match Taken::write(&bits) {
            Ok(taken) => Ok(Handed { arena, taken, lock }),
            Err(error) => {
                self.thaw();
                Err(failed("hand over")(error))
            }
        }
    }

    /// Evicts until about `granules` are free.
    fn make_room(&self, granules: u64) {
        loop {
            let mut core = self.core();
            for _ in 0..VICTIMS_AT_ONCE {
                let is_enough = core.frozen || core.space.free_granules() >= granules;
                if is_enough || self.evict_one(&mut core).is_none() {
                    return;
                }
            }
        }
    }

    /// Takes the arena into use, again or for the first time after it was taken over: this process alone writes now.
    pub(crate) fn thaw(&self) {
        let mut core = self.core();
        if !core.frozen {
            return;
        }
        core.frozen = false;
        self.take_up(&mut core);
        std::mem::take(&mut core.unfreed).into_iter().for_each(|extent| core.space.give(&self.arena, extent));
        let mut id = std::mem::take(&mut core.unfreed_id);
        while id != 0 {
            let next = self.control(id).next.load(Relaxed);
            self.free(&mut core, id);
            id = next;
        }
        if !core.space.has_quarantine() {
            self.end_sharing(core);
        }
    }

    /// The process that had the arena before has ended.
    pub(crate) fn lift_quarantine(&self) {
        let mut core = self.core();
        if core.frozen || !core.space.has_quarantine() {
            return;
        }
        for extent in core.space.waiting() {
            (extent.granule..extent.end()).for_each(|granule| self.forget_record(granule));
        }
        core.space.lift_quarantine(&self.arena);
        self.end_sharing(core);
    }

    /// Drops what the other process has removed: it removes nothing more.
    fn end_sharing(&self, core: std::sync::MutexGuard<'_, Core>) {
        drop(core);
        for id in 1..self.unused_id.load(Acquire) {
            let control = self.control(id);
            if control.indexed.load(Acquire) && !self.is_there(id) {
                self.remove(control.hash.load(Relaxed), |other| other == id && !self.is_there(id));
            }
        }
        self.shared.store(false, Relaxed);
    }

    /// Makes the words of the arena agree with what this process knows of it: who owns which extent, which granules are
    /// free, and that no later start finds a record in those.
    pub(crate) fn take_up(&self, core: &mut Core) {
        for id in 1..self.unused_id.load(Relaxed) {
            let has_given_up_its_rest = self.control(id).successor.load(Relaxed) != 0;
            let mut is_first = true;
            self.for_each_extent(id, |extent| {
                // Of an object that was superseded the continuation extents are its successor's.
                if is_first || !has_given_up_its_rest {
                    self.arena.word(extent.offset() + record::OWNER).store(id, Relaxed);
                }
                is_first = false;
            });
        }
        for granule in core.space.first()..core.space.end() {
            if !core.space.is_used(granule) {
                self.forget_record(granule);
            }
        }
        core.space.relink(&self.arena);
    }

    /// Makes sure that no record is found at this granule, which holds none.
    fn forget_record(&self, granule: u32) {
        let offset = u64::from(granule) * GRANULE_BYTES;
        if record::magic(&self.arena, offset) == RECORD_MAGIC {
            record::set_magic(&self.arena, offset, 0);
        }
    }
}
