//! What a gate needs done from time to time: expired blocks removed, the block list kept over a restart, lists in files
//! read again when they change.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate_core::IpPrefix;
use tidegate_policy::{ListFileError, SavedBlock, parse_list};

use crate::block::{Blocked, End};
use crate::{Blocks, Gate, GateError, system};

/// How often [`Keeper::tick`] wants to be called.
const TICK: Duration = Duration::from_secs(1);
/// Expired entries block nobody; this only bounds the room they take.
const SWEEP_TICKS: u64 = 10;
/// Until a list that did not fit is tried again.
const RETRY_TICKS: u64 = 10;
/// Beyond this a file is no block list.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Where blocks come from besides commands.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct BlockSources {
    /// A directory in which the list survives a restart.
    pub directory: Option<PathBuf>,
    /// Lists of addresses and prefixes, one a line; they are blocked as long as they stand there.
    pub files: Vec<PathBuf>,
}

/// What one [`Keeper::start`] or [`Keeper::tick`] did that is worth a line in the log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeeperNote {
    /// A list was read.
    #[error("{}: {added} blocked, {removed} no longer{}", path.display(), if *evicted == 0 { String::new() } else { format!("; there was not enough room, and {evicted} addresses are not blocked for it") })]
    Read {
        /// The list.
        path: PathBuf,
        /// Entries that were not blocked by it before.
        added: usize,
        /// Entries that are not in it any more.
        removed: usize,
        /// Addresses that had to make room for them, of this list or others.
        evicted: u64,
    },
    /// Blocks of the process before are in force again.
    #[error("{}: {count} blocks are in force again{}", path.display(), if *damaged == 0 { String::new() } else { format!(", {damaged} lines were not readable: the file is kept with the ending .damaged") })]
    Restored {
        /// The file they were kept in.
        path: PathBuf,
        /// How many.
        count: usize,
        /// Lines that are no blocks.
        damaged: usize,
    },
    /// A list has an error; what it blocked before stays blocked.
    #[error("{}: {source}; what it blocked before stays blocked", path.display())]
    List {
        /// The list.
        path: PathBuf,
        /// What is wrong with it.
        source: ListFileError,
    },
    /// What a list, or the file of the process before, has cannot be put in force.
    #[error("{}: {source}; what it blocked before stays blocked", path.display())]
    NotInForce {
        /// The file.
        path: PathBuf,
        /// What the block list said.
        source: GateError,
    },
    /// The file in which blocks survive a restart cannot be read or written.
    #[error(
        "{}: {source}; blocks do not survive a restart: block.path has to be a directory whose files this user may read and write",
        path.display()
    )]
    NotKept {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A list could not be read.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The kernel refused.
    #[error(transparent)]
    Gate(#[from] GateError),
}

/// Whether a list can be read; how many entries it has.
pub fn check_list(path: &Path) -> Result<usize, GateError> {
    let text = read_list(path).map_err(GateError::io("reading the list"))?;
    Ok(parse_list(&text)?.len())
}

/// The text of a list. Of what is no file, such as a pipe, nobody knows when it ends.
fn read_list(path: &Path) -> io::Result<String> {
    let data = fs::metadata(path)?;
    if !data.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    if data.len() > MAX_FILE_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    fs::read_to_string(path)
}

/// Looks after the block list of a gate.
#[derive(Debug)]
pub struct Keeper {
    saved: Option<Saved>,
    lists: Vec<List>,
    /// When the block by a command ends that a list has gone on with; at most one for each entry of the lists.
    commanded: HashMap<IpPrefix, u64>,
    prefixes: PrefixEnds,
    /// How many had been evicted, and when the list had last been changed, when it was last seen that the lists'
    /// entries are there.
    whole: (u64, u64),
    ticks: u64,
}

/// When the next prefix is to be swept.
#[derive(Debug, Default)]
struct PrefixEnds {
    /// The list, by its time of change, that this was found in.
    of_ns: Option<u64>,
    next_ns: Option<u64>,
}

impl PrefixEnds {
    fn sweep(&mut self, blocks: &Blocks<'_>) -> Result<(), GateError> {
        let changed_ns = blocks.changed_ns()?;
        if self.of_ns != Some(changed_ns) {
            self.next_ns = blocks.next_prefix_end_ns()?;
            self.of_ns = Some(changed_ns);
        }
        if self.next_ns.is_some_and(|next_ns| next_ns <= system::now_ns()) {
            blocks.sweep_prefixes()?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Saved {
    path: PathBuf,
    changed_ns: u64,
}

#[derive(Debug)]
struct List {
    path: PathBuf,
    /// Time of change and length when it was last read.
    version: Option<(SystemTime, u64)>,
    /// Ticks until what could not be put in force is tried again; 0: it is in force.
    again_in: u64,
    blocked: HashSet<IpPrefix>,
}

impl Keeper {
    /// How often [`Keeper::tick`] wants to be called.
    pub const INTERVAL: Duration = TICK;

    /// Puts the blocks of the process before, and those of the lists, in force.
    pub fn start(gate: &Gate, sources: &BlockSources) -> (Self, Vec<KeeperNote>) {
        let mut notes = Vec::new();
        let saved = sources.directory.as_ref().map(|directory| {
            let path = directory.join("blocked");
            // Known at the start, not when something is blocked at last.
            let restored = restore(&gate.blocks(), directory, &path);
            notes.push(either(restored.and_then(|restored| may_write(&path).map(|()| restored))));
            Saved { path, changed_ns: gate.blocks().changed_ns().unwrap_or(0) }
        });
        let mut keeper = Self {
            saved,
            lists: sources.files.iter().map(|path| List::new(path)).collect(),
            commanded: HashMap::new(),
            prefixes: PrefixEnds::default(),
            whole: (0, 0),
            ticks: 0,
        };
        notes.extend(keeper.read_lists(&gate.blocks()));
        (keeper, notes)
    }

    /// Writes every block that is not there by a list in a file, for the process that takes this one's place.
    ///
    /// # Errors
    /// The file takes no more, or the kernel does not tell.
    pub fn hand_over(&self, gate: &Gate, to: &fs::File) -> Result<(), KeeperNote> {
        let blocked = gate.blocks().list()?;
        let mut out = BufWriter::new(to);
        write_lines(&mut out, blocked, &self.commanded)
            .and_then(|()| out.flush())
            .map_err(|source| KeeperNote::NotKept { path: "the blocks that are handed over".into(), source })
    }

    /// Puts in force what the process before has written by [`Self::hand_over`], from the beginning of the file.
    /// `None`: nothing was blocked.
    pub fn take_over(&mut self, gate: &Gate, from: &fs::File) -> Option<KeeperNote> {
        let path = Path::new("the process before");
        let mut from = from;
        let taken = io::Seek::rewind(&mut from)
            .and_then(|()| read_blocks(from))
            .map_err(|source| KeeperNote::File { path: path.to_owned(), source });
        let note = either(taken.and_then(|read| {
            let (count, damaged) = (read.count, read.damaged);
            read.put_in_force(&gate.blocks())
                .map_err(|source| KeeperNote::NotInForce { path: path.to_owned(), source })?;
            Ok(KeeperNote::Restored { path: path.to_owned(), count, damaged })
        }));
        (!matches!(note, KeeperNote::Restored { count: 0, damaged: 0, .. })).then_some(note)
    }

    /// Does what is due.
    pub fn tick(&mut self, gate: &Gate) -> Vec<KeeperNote> {
        let blocks = gate.blocks();
        let mut notes = self.read_lists(&blocks);
        self.ticks += 1;
        if self.ticks.is_multiple_of(SWEEP_TICKS) {
            notes.extend(blocks.sweep().err().map(KeeperNote::Gate));
            notes.extend(self.complete(&blocks).err().map(KeeperNote::Gate));
        } else {
            notes.extend(self.prefixes.sweep(&blocks).err().map(KeeperNote::Gate));
        }
        notes.extend(self.save(&blocks));
        notes
    }

    /// Takes over other sources, as a reload brings them.
    pub fn replace_sources(&mut self, gate: &Gate, sources: &BlockSources) -> Vec<KeeperNote> {
        let blocks = gate.blocks();
        let mut notes = Vec::new();
        let (kept, gone): (Vec<List>, Vec<List>) =
            std::mem::take(&mut self.lists).into_iter().partition(|list| sources.files.contains(&list.path));
        self.lists = kept;
        for prefix in gone.iter().flat_map(|list| &list.blocked) {
            let others = self.lists.iter().any(|list| list.blocked.contains(prefix));
            notes.extend(release(&blocks, prefix, others, &mut self.commanded).err().map(KeeperNote::Gate));
        }
        for path in &sources.files {
            if !self.lists.iter().any(|list| list.path == *path) {
                self.lists.push(List::new(path));
            }
        }
        notes.extend(self.read_lists(&blocks));
        notes
    }

    fn read_lists(&mut self, blocks: &Blocks<'_>) -> Vec<KeeperNote> {
        let mut notes = Vec::new();
        for index in 0..self.lists.len() {
            // What it reads is compared with what the others hold.
            let mut list = self.lists.swap_remove(index);
            let read = list.read_if_changed(blocks, &self.lists, &mut self.commanded);
            self.lists.push(list);
            let last = self.lists.len() - 1;
            self.lists.swap(index, last);
            notes.extend(read.transpose().map(either));
        }
        notes
    }

    /// What stands in a list and is blocked no more, because it was evicted or its entry was replaced by one that has
    /// ended, is blocked again, as far as nothing has to be evicted for it.
    fn complete(&mut self, blocks: &Blocks<'_>) -> Result<(), GateError> {
        if self.lists.iter().all(|list| list.blocked.is_empty()) {
            return Ok(());
        }
        let now = (blocks.evicted()?, blocks.changed_ns()?);
        if now == self.whole {
            return Ok(());
        }
        // Should it fail, it is tried at the next change.
        self.whole = now;
        let [mut v4, mut v6] = blocks.room()?;
        let mut missing = HashSet::new();
        for prefix in self.lists.iter().flat_map(|list| &list.blocked) {
            let room = if prefix.address().is_ipv4() { &mut v4 } else { &mut v6 };
            match blocks.end(prefix)? {
                Some(End::Never | End::WithLists) => {}
                Some(End::At(_)) => _ = missing.insert(*prefix),
                None if *room > 0 => *room -= usize::from(missing.insert(*prefix)),
                None => {}
            }
        }
        hold(blocks, missing.iter(), &mut self.commanded)?;
        self.whole = (blocks.evicted()?, blocks.changed_ns()?);
        Ok(())
    }

    /// Writes the list if it has changed. What a list in a file blocks is not written: the file is there.
    fn save(&mut self, blocks: &Blocks<'_>) -> Option<KeeperNote> {
        let saved = self.saved.as_mut()?;
        let changed_ns = match blocks.changed_ns() {
            Ok(changed_ns) => changed_ns,
            Err(error) => return Some(error.into()),
        };
        if changed_ns == saved.changed_ns {
            return None;
        }
        // A failed write is said once, and tried again at the next change.
        saved.changed_ns = changed_ns;
        write(&saved.path, blocks, &self.commanded).err()
    }
}

fn either(result: Result<KeeperNote, KeeperNote>) -> KeeperNote {
    result.unwrap_or_else(|error| error)
}

impl List {
    /// One that was not read yet.
    fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), version: None, again_in: 0, blocked: HashSet::new() }
    }

    fn read_if_changed(
        &mut self,
        blocks: &Blocks<'_>,
        others: &[Self],
        commanded: &mut HashMap<IpPrefix, u64>,
    ) -> Result<Option<KeeperNote>, KeeperNote> {
        let failed = |source| KeeperNote::File { path: self.path.clone(), source };
        let version = fs::metadata(&self.path).and_then(|data| Ok((data.modified()?, data.len())));
        let version = match version {
            Ok(version) => version,
            // Said once: a list that comes later is read then.
            Err(_) if self.version.is_some_and(|(_, length)| length == u64::MAX) => return Ok(None),
            Err(source) => {
                self.version = Some((UNIX_EPOCH, u64::MAX));
                return Err(failed(source));
            }
        };
        let is_known = self.version == Some(version);
        if is_known {
            self.again_in = self.again_in.saturating_sub(1);
            // Read again when the last try has failed, but not each time.
            if self.again_in != 1 {
                return Ok(None);
            }
        }
        self.version = Some(version);
        self.again_in = 0;
        let text = read_list(&self.path).map_err(failed)?;
        let prefixes =
            parse_list(&text).map_err(|source| KeeperNote::List { path: self.path.clone(), source })?;
        let next: HashSet<IpPrefix> = prefixes.into_iter().collect();
        let fresh: Vec<IpPrefix> = next.difference(&self.blocked).copied().collect();
        let gone: Vec<IpPrefix> = self.blocked.difference(&next).copied().collect();
        let mut put_in_force = || {
            let before = blocks.evicted()?;
            hold(blocks, fresh.iter(), commanded)?;
            gone.iter().try_for_each(|prefix| {
                let others = others.iter().any(|list| list.blocked.contains(prefix));
                release(blocks, prefix, others, commanded)
            })?;
            Ok(blocks.evicted()?.saturating_sub(before))
        };
        let evicted = match put_in_force() {
            Ok(evicted) => evicted,
            Err(source) => {
                self.again_in = RETRY_TICKS;
                // Said once.
                return if is_known {
                    Ok(None)
                } else {
                    Err(KeeperNote::NotInForce { path: self.path.clone(), source })
                };
            }
        };
        self.blocked = next;
        let (path, added, removed) = (self.path.clone(), fresh.len(), gone.len());
        Ok(Some(KeeperNote::Read { path, added, removed, evicted }))
    }
}

/// Blocks what stands in a list. What a command has blocked for ever stays as it is; of what it has blocked for a time,
/// that time is kept.
fn hold<'a>(
    blocks: &Blocks<'_>,
    prefixes: impl Iterator<Item = &'a IpPrefix>,
    commanded: &mut HashMap<IpPrefix, u64>,
) -> Result<usize, GateError> {
    let mut missing = Vec::new();
    for prefix in prefixes {
        match blocks.end(prefix)? {
            Some(End::Never | End::WithLists) => {}
            Some(End::At(end_ns)) => {
                blocks.set_end(prefix, End::WithLists)?;
                commanded.insert(*prefix, end_ns);
            }
            None => missing.push(*prefix),
        }
    }
    if !missing.is_empty() {
        blocks.add_until(&missing, End::WithLists)?;
    }
    Ok(missing.len())
}

/// Unblocks what a list has no more, unless another has it or a command has blocked it.
fn release(
    blocks: &Blocks<'_>,
    prefix: &IpPrefix,
    others: bool,
    commanded: &mut HashMap<IpPrefix, u64>,
) -> Result<(), GateError> {
    if others {
        return Ok(());
    }
    let commanded_ns = commanded.remove(prefix);
    if blocks.end(prefix)? != Some(End::WithLists) {
        return Ok(());
    }
    match commanded_ns {
        Some(end_ns) if end_ns > system::now_ns() => blocks.set_end(prefix, End::At(end_ns)),
        _ => blocks.remove(prefix).map(|_| ()),
    }
}

fn unix_now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Written beside and renamed, so that a crash leaves the old list or the new one.
fn write(path: &Path, blocks: &Blocks<'_>, commanded: &HashMap<IpPrefix, u64>) -> Result<(), KeeperNote> {
    let blocked = blocks.list()?;
    let beside = beside(path);
    let store = || {
        let mut file = BufWriter::new(fs::File::create(&beside)?);
        write_lines(&mut file, blocked, commanded)?;
        file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        fs::rename(&beside, path)
    };
    store().map_err(|source| KeeperNote::NotKept { path: path.to_owned(), source })
}

/// A line for each block that was not only put there by a list in a file.
fn write_lines(
    out: &mut impl Write,
    blocked: Vec<Blocked>,
    commanded: &HashMap<IpPrefix, u64>,
) -> io::Result<()> {
    let (now_s, now_ns) = (unix_now_s(), system::now_ns());
    for entry in blocked {
        let left_ns = commanded.get(&entry.prefix).map(|end_ns| end_ns.saturating_sub(now_ns));
        let remaining = match entry.listed {
            false => entry.remaining,
            true => match left_ns.filter(|left_ns| *left_ns > 0) {
                None => continue,
                left_ns => left_ns.map(Duration::from_nanos),
            },
        };
        let until_unix_s = remaining.map(|remaining| now_s.saturating_add(remaining.as_secs().max(1)));
        writeln!(out, "{}", SavedBlock { prefix: entry.prefix, until_unix_s, reason: entry.reason })?;
    }
    Ok(())
}

/// Where the next list is written before it takes the place of this one.
fn beside(path: &Path) -> PathBuf {
    path.with_extension("new")
}

/// Whether the list can be written anew.
fn may_write(path: &Path) -> Result<(), KeeperNote> {
    let beside = beside(path);
    fs::File::create(&beside)
        .and_then(|_| fs::remove_file(&beside))
        .map_err(|source| KeeperNote::NotKept { path: path.to_owned(), source })
}

fn restore(blocks: &Blocks<'_>, directory: &Path, path: &Path) -> Result<KeeperNote, KeeperNote> {
    let failed = |source| KeeperNote::NotKept { path: path.to_owned(), source };
    fs::create_dir_all(directory).map_err(failed)?;
    let file = match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(KeeperNote::Restored { path: path.to_owned(), count: 0, damaged: 0 });
        }
        other => other.map_err(failed)?,
    };
    let read = read_blocks(file).map_err(failed)?;
    let (count, damaged) = (read.count, read.damaged);
    // The next save leaves out what could not be read.
    let kept = if damaged > 0 { fs::copy(path, path.with_extension("damaged")).map(|_| ()) } else { Ok(()) };
    read.put_in_force(blocks).map_err(|source| KeeperNote::NotInForce { path: path.to_owned(), source })?;
    kept.map_err(failed)?;
    Ok(KeeperNote::Restored { path: path.to_owned(), count, damaged })
}

/// Blocks as they were saved.
#[derive(Default)]
struct ReadBlocks {
    now_s: u64,
    /// Blocks that end together are added together.
    by_end: BTreeMap<Option<u64>, Vec<IpPrefix>>,
    reasons: Vec<(IpPrefix, String)>,
    count: usize,
    /// Lines that are no blocks.
    damaged: usize,
}

fn read_blocks(file: impl io::Read) -> io::Result<ReadBlocks> {
    let mut read = ReadBlocks { now_s: unix_now_s(), ..ReadBlocks::default() };
    let mut file = BufReader::new(file.take(MAX_FILE_BYTES));
    let mut line = Vec::new();
    while file.read_until(b'\n', &mut line)? > 0 {
        let block = saved_block(&line);
        line.clear();
        let Some(block) = block else {
            read.damaged += 1;
            continue;
        };
        if block.until_unix_s.is_some_and(|until| until <= read.now_s) {
            continue;
        }
        read.count += 1;
        read.by_end.entry(block.until_unix_s).or_default().push(block.prefix);
        read.reasons.extend(block.reason.map(|reason| (block.prefix, reason)));
    }
    Ok(read)
}

impl ReadBlocks {
    fn put_in_force(self, blocks: &Blocks<'_>) -> Result<(), GateError> {
        // What does not fit costs no other block.
        let mut added = Ok(());
        for (end, prefixes) in self.by_end {
            let lifetime = end.map(|until| Duration::from_secs(until - self.now_s));
            added = added.and(blocks.add_what_fits(&prefixes, lifetime));
        }
        added?;
        self.reasons.into_iter().try_for_each(|(prefix, reason)| blocks.set_reason(prefix, &reason))
    }
}

/// What a line holds with its end; a line without one was cut off, and may mean more than was written.
fn saved_block(line: &[u8]) -> Option<SavedBlock> {
    // Whatever the reason says, the block holds.
    String::from_utf8_lossy(line.strip_suffix(b"\n")?).parse().ok()
}

impl KeeperNote {
    /// Whether something went wrong.
    pub fn is_fault(&self) -> bool {
        !matches!(self, Self::Read { evicted: 0, .. } | Self::Restored { damaged: 0, .. })
    }
}
