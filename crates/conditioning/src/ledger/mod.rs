//! Shared memory in which each connection of a chain has a slot that says who answers for its request.
//!
//! The links only carry news; the ledger decides. A request is claimed by one compare-and-swap, so that a bundle that
//! was handed twice, because a filter died and nobody knows what it had done, is served once. What a dead filter did
//! not forward is found here.

mod addresses;
pub(crate) mod namespace;
mod passed;
mod turns;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::wire::Id;
pub use passed::{PASSED_BYTES, Passage, Passed};
pub use turns::{Tended, Turns};

/// Connections that a chain can have at a time.
pub const SLOTS: u32 = 131_072;

/// Among the bits that count processes: one that is done said that the connection ends locally.
const SAID_LOCAL: u32 = 1 << 23;
/// Among the same: somebody asked to be told when the server is done, although the connection goes on.
const TELL: u32 = 1 << 22;
const HOLDERS: u32 = TELL - 1;
/// The state that stands for [`State::Accepted`] while one process alone has the request, and its number in the place
/// of how many. Linux gives no number that has more bits (PID_MAX_LIMIT). So a claim says at once whose it is.
const ACCEPTED_BY: u64 = 6;

#[repr(C)]
struct Slot {
    /// Generation (32 bits), state (8), processes that hold the socket (24, see [`SAID_LOCAL`], [`TELL`] and
    /// [`ACCEPTED_BY`]).
    word: AtomicU64,
    /// The process that took the socket last, if several have it.
    holder: AtomicU32,
    reserved: u32,
}

#[repr(C)]
struct Map {
    /// 1 once the server has begun to listen.
    listening: AtomicU32,
    /// A port that the server listens on beside the chain; 0: none.
    other_port: AtomicU32,
    /// 1 once the server has tried to accept.
    accepts: AtomicU32,
    /// The PID namespace in which the numbers of processes mean something; 0: it is not known, and they do in any.
    pid_namespace: AtomicU32,
    slots: [Slot; SLOTS as usize],
    passed: passed::Places,
    turns: Turns,
    addresses: addresses::Addresses,
}

/// Where a slot's request is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum State {
    /// No connection has the slot.
    Free,
    /// A filter holds the request, or the connection is between requests.
    Held,
    /// The server has it.
    Accepted,
    /// The server is done; the connection may go on.
    EndedLocally,
    /// The connection is to end.
    EndedForAll,
    /// The server is done, and reads the connection's next request itself if it comes soon.
    Lingering,
}

impl State {
    fn from_bits(word: u64) -> Self {
        match (word >> 24) as u8 {
            1 => Self::Held,
            2 | 6 => Self::Accepted,
            3 => Self::EndedLocally,
            4 => Self::EndedForAll,
            5 => Self::Lingering,
            _ => Self::Free,
        }
    }

    fn word(self, generation: u32, holders: u32) -> u64 {
        let state: u64 = match self {
            Self::Free => 0,
            Self::Held => 1,
            Self::Accepted => 2,
            Self::EndedLocally => 3,
            Self::EndedForAll => 4,
            Self::Lingering => 5,
        };
        u64::from(generation) << 32 | state << 24 | u64::from(holders & 0x00ff_ffff)
    }
}

/// The word of a request that `process` alone has taken.
fn accepted_by(process: u32, generation: u32, flags: u32) -> u64 {
    let low = process & HOLDERS | flags;
    u64::from(generation) << 32 | ACCEPTED_BY << 24 | u64::from(low)
}

/// The process that alone has the request.
fn only_holder(word: u64) -> Option<u32> {
    ((word >> 24) as u8 == ACCEPTED_BY as u8).then_some(word as u32 & HOLDERS)
}

/// A mapping of the ledger.
#[derive(Debug)]
pub struct Ledger {
    map: NonNull<Map>,
}

// SAFETY: the mapping lives as long as the value, and everything in it is atomic.
unsafe impl Send for Ledger {}
// SAFETY: as above.
unsafe impl Sync for Ledger {}

impl Ledger {
    /// An empty ledger in a new memory file.
    ///
    /// # Errors
    /// The process is out of descriptors or memory.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let file = rustix::fs::memfd_create("tidegate-ledger", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, size_of::<Map>() as u64)?;
        let ledger = Self::open(file.as_fd())?;
        ledger.map().pid_namespace.store(namespace::own(), Ordering::Release);
        Ok((ledger, file))
    }

    /// Maps the ledger in `file`.
    ///
    /// # Errors
    /// The file is too short, or cannot be mapped.
    pub fn open(file: std::os::fd::BorrowedFd<'_>) -> io::Result<Self> {
        if rustix::fs::fstat(file)?.st_size < size_of::<Map>() as i64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // Looked for now, since a filter gives up its file system.
        namespace::own();
        // SAFETY: a new mapping at an address of the kernel's choice, of the length just checked.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                size_of::<Map>(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        NonNull::new(address.cast()).map(|map| Self { map }).ok_or(io::ErrorKind::OutOfMemory.into())
    }

    fn map(&self) -> &Map {
        // SAFETY: mapped in `open` for the life of `self`; page-aligned; all-zero bytes are valid atomics.
        unsafe { self.map.as_ref() }
    }

    /// Who waits for the next request.
    pub fn turns(&self) -> &Turns {
        &self.map().turns
    }

    fn slot(&self, slot: u32) -> Option<&Slot> {
        self.map().slots.get(slot as usize)
    }

    /// Says that the server listens.
    pub fn set_listening(&self) {
        self.map().listening.store(1, Ordering::Release);
    }

    /// Takes [`Self::set_listening`] back.
    pub fn clear_listening(&self) {
        self.map().listening.store(0, Ordering::Release);
    }

    /// Whether the server has begun to listen.
    pub fn is_listening(&self) -> bool {
        self.map().listening.load(Ordering::Acquire) != 0
    }

    /// The descriptor `fd` of this process listens at `address`, which it shares with nobody. `is_open` says whether a
    /// descriptor of a process is still a listening one.
    pub fn set_address(&self, fd: RawFd, address: SocketAddr, is_open: impl Fn(u32, RawFd) -> bool) {
        if self.knows_this_process() {
            self.map().addresses.add((std::process::id(), fd), address, is_open);
        }
    }

    /// Takes [`Self::set_address`] back.
    pub fn clear_address(&self, fd: RawFd) {
        if self.knows_this_process() {
            self.map().addresses.remove(std::process::id(), fd);
        }
    }

    /// Whether a process listens at `address` on a socket that shares it with nobody.
    pub fn has_address(&self, address: SocketAddr, is_open: impl Fn(u32, RawFd) -> bool) -> bool {
        self.knows_this_process() && self.map().addresses.has(address, is_open)
    }

    /// Says that the server has accepted.
    pub fn set_accepts(&self) {
        // Read first: every process of the server says so for each request.
        if !self.accepts() {
            self.map().accepts.store(1, Ordering::Release);
        }
    }

    /// Whether an accept of the server's has ever met with a request.
    pub fn accepts(&self) -> bool {
        self.map().accepts.load(Ordering::Acquire) != 0
    }

    /// Says that the server listens on a port that is not the chain's.
    pub fn set_other_port(&self, port: u16) {
        self.map().other_port.store(port.into(), Ordering::Release);
    }

    /// A port that the server listens on beside the chain.
    pub fn other_port(&self) -> Option<u16> {
        u16::try_from(self.map().other_port.load(Ordering::Acquire)).ok().filter(|&port| port != 0)
    }

    /// Which generation of a slot is where.
    pub fn state(&self, slot: u32) -> (u32, State) {
        let word = self.slot(slot).map_or(0, |slot| slot.word.load(Ordering::Acquire));
        ((word >> 32) as u32, State::from_bits(word))
    }

    /// The process that took the slot's request last and is not done with it; 0: nobody, or it is not known.
    pub fn holder(&self, slot: u32) -> u32 {
        let Some(slot) = self.slot(slot) else { return 0 };
        let word = slot.word.load(Ordering::Acquire);
        match State::from_bits(word) {
            State::Accepted => only_holder(word).unwrap_or_else(|| slot.holder.load(Ordering::Acquire)),
            _ => 0,
        }
    }

    /// Whether exactly this presentation waits to be served.
    pub fn is_held(&self, id: Id) -> bool {
        self.state(id.slot) == (id.generation, State::Held)
    }

    /// `change` is given the generation, the state, and the processes that hold the socket with what is said beside.
    fn update(&self, slot: u32, mut change: impl FnMut(u32, State, u32) -> Option<u64>) -> Option<u64> {
        self.update_word(slot, |word| {
            let holders = word as u32 & 0x00ff_ffff;
            let holders = if only_holder(word).is_some() { holders & !HOLDERS | 1 } else { holders };
            change((word >> 32) as u32, State::from_bits(word), holders)
        })
    }

    fn update_word(&self, slot: u32, mut change: impl FnMut(u64) -> Option<u64>) -> Option<u64> {
        let slot = self.slot(slot)?;
        let mut word = slot.word.load(Ordering::Acquire);
        loop {
            let next = change(word)?;
            match slot.word.compare_exchange(word, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(next),
                Err(now) => word = now,
            }
        }
    }

    /// Starts a new presentation from a slot; what older copies of its bundle are under way can no longer be claimed.
    /// `None` while the server has the request.
    pub fn present(&self, slot: u32) -> Option<Id> {
        let word = self.update(slot, |generation, state, _| {
            (state != State::Accepted).then(|| State::Held.word(generation.wrapping_add(1), 0))
        })?;
        Some(Id { slot, generation: (word >> 32) as u32 })
    }

    /// Takes a slot for a new connection if nobody has it.
    pub fn take(&self, slot: u32) -> bool {
        self.update(slot, |generation, state, _| {
            (state == State::Free).then(|| State::Held.word(generation.wrapping_add(1), 0))
        })
        .is_some()
    }

    /// Gives a slot back after its connection ended.
    pub fn free(&self, slot: u32) {
        self.update(slot, |generation, _, _| Some(State::Free.word(generation, 0)));
    }

    /// Whether others know this process by the number by which it knows itself.
    pub fn knows_this_process(&self) -> bool {
        let namespace = self.map().pid_namespace.load(Ordering::Acquire);
        namespace == 0 || namespace == namespace::own()
    }

    /// What is written for this process: its number, or 0 where that would be looked up as another's.
    fn known_as(&self, process: u32) -> u32 {
        if self.knows_this_process() { process } else { 0 }
    }

    /// Takes a request to serve it, in the process `holder`: true for one process only. Who sees that it was taken sees
    /// by whom, so that nobody waits for a process that was killed at that moment.
    pub fn claim_for(&self, id: Id, holder: u32) -> bool {
        let holder = self.known_as(holder);
        self.update(id.slot, |generation, state, holders| {
            (generation == id.generation && state == State::Held)
                .then(|| accepted_by(holder, generation, holders & TELL))
        })
        .is_some()
    }

    /// As [`Self::claim_for`], in this process: a server that serves the request, or a filter that answers it itself.
    pub fn claim(&self, id: Id) -> bool {
        self.claim_for(id, std::process::id())
    }

    /// Writes down that this process holds the socket.
    pub fn note_holder(&self, slot: u32) {
        let me = self.known_as(std::process::id());
        let is_only = self.update_word(slot, |word| {
            only_holder(word)?;
            Some(accepted_by(me, (word >> 32) as u32, word as u32 & (TELL | SAID_LOCAL)))
        });
        if let Some(slot) = self.slot(slot).filter(|_| is_only.is_none()) {
            slot.holder.store(me, Ordering::Release);
        }
    }

    /// The requests that this process, `holder`, took last and is not done with; none if it is not known by its number.
    pub fn accepted_by(&self, holder: u32) -> Vec<Id> {
        if !self.knows_this_process() {
            return Vec::new();
        }
        let by_holder = |slot: &u32| self.holder(*slot) == holder;
        let accepted = |slot| match self.state(slot) {
            (generation, State::Accepted) => Some(Id { slot, generation }),
            _ => None,
        };
        (0..SLOTS).filter(by_holder).filter_map(accepted).collect()
    }

    /// Of those who hold the socket, nobody is known.
    pub fn forget_holder(&self, slot: u32) {
        if let Some(slot) = self.slot(slot) {
            slot.holder.store(0, Ordering::Release);
        }
    }

    /// One more process is about to hold the socket (§3.2, cc_fork).
    pub fn share(&self, id: Id) {
        if let Some(slot) = self.slot(id.slot)
            && let Some(only) = only_holder(slot.word.load(Ordering::Acquire))
        {
            // Only those who hold it share it: nobody else changes this meanwhile.
            slot.holder.store(only, Ordering::Release);
        }
        self.update(id.slot, |generation, state, holders| {
            (generation == id.generation && state == State::Accepted && (holders & HOLDERS) < HOLDERS)
                .then(|| State::Accepted.word(generation, holders + 1))
        });
    }

    /// The accepted socket of this cookie is about to go to another process, which asks by [`Self::passed`]. False if
    /// there is no room.
    pub fn pass(&self, cookie: u64, passage: &Passage) -> bool {
        let is_over = |id: Id| self.state(id.slot) != (id.generation, State::Accepted);
        self.map().passed.put(cookie, passage, is_over)
    }

    /// What is known of the socket of this cookie, which another process has passed to this one.
    pub fn passed(&self, cookie: u64) -> Option<Passage> {
        self.map().passed.take(cookie)
    }

    /// Asks that a notice be sent when the server is done with this presentation. False if it is over already: then
    /// none may come.
    pub fn ask(&self, id: Id) -> bool {
        self.update_word(id.slot, |word| {
            let is_open = matches!(State::from_bits(word), State::Held | State::Accepted);
            ((word >> 32) as u32 == id.generation && is_open).then_some(word | u64::from(TELL))
        })
        .is_some()
    }

    /// A process is done with the socket. It may know how the connection is to end: if not, those who held it before
    /// decide, and if none of them said anything, it ends for everybody. Returns the end if this was the last process,
    /// and whether a notice is due: somebody asked for one, or has to close the socket.
    pub fn release(&self, id: Id, end: Option<State>) -> Option<(State, bool)> {
        let word = self.update(id.slot, |generation, state, holders| {
            let ours = generation == id.generation && state == State::Accepted;
            let local = match end {
                Some(end) => end == State::EndedLocally,
                None => holders & SAID_LOCAL != 0,
            };
            let last = if local { State::EndedLocally } else { State::EndedForAll };
            let said = if local { SAID_LOCAL } else { 0 };
            ours.then(|| match holders & HOLDERS {
                0 | 1 => last.word(generation, holders & TELL),
                more => State::Accepted.word(generation, (more - 1) | said | holders & TELL),
            })
        })?;
        let state = State::from_bits(word);
        let is_due = state == State::EndedForAll || word as u32 & TELL != 0;
        (state != State::Accepted).then_some((state, is_due))
    }

    /// The only process that holds the socket is done with the request, and keeps it for the next one. False if
    /// somebody has asked to be told of the end.
    pub fn linger(&self, id: Id) -> bool {
        self.update(id.slot, |generation, state, holders| {
            let only = holders & !HOLDERS == 0 && holders <= 1;
            (generation == id.generation && state == State::Accepted && only)
                .then(|| State::Lingering.word(generation, holders))
        })
        .is_some()
    }

    /// The server that lingers takes the next request, in the process `holder`: its presentation. `None` if a filter
    /// was first.
    pub fn resume_for(&self, id: Id, holder: u32) -> Option<Id> {
        let holder = self.known_as(holder);
        let word = self.update(id.slot, |generation, state, _| {
            (generation == id.generation && state == State::Lingering)
                .then(|| accepted_by(holder, generation.wrapping_add(1), 0))
        })?;
        Some(Id { slot: id.slot, generation: (word >> 32) as u32 })
    }

    /// The server lingers no more, because it, or a filter, ended that: `end` is what becomes of the connection. True
    /// for one of them only.
    pub fn let_go(&self, id: Id, end: State) -> bool {
        self.update(id.slot, |generation, state, _| {
            (generation == id.generation && state == State::Lingering).then(|| end.word(generation, 0))
        })
        .is_some()
    }

    /// Ends a presentation for everybody, whoever holds it.
    pub fn end(&self, id: Id) {
        self.update(id.slot, |generation, state, _| {
            (generation == id.generation && state != State::Free)
                .then(|| State::EndedForAll.word(generation, 0))
        });
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // SAFETY: mapped in `open` with this length; no reference outlives `self`. An error would only leave it mapped.
        let _ = unsafe { rustix::mm::munmap(self.map.as_ptr().cast(), size_of::<Map>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_handed_twice_is_claimed_once() {
        let (ledger, file) = Ledger::create().unwrap();
        let other = Ledger::open(file.as_fd()).unwrap();
        assert!(ledger.take(5));
        let id = ledger.present(5).unwrap();
        assert!(other.claim(id));
        assert!(!ledger.claim(id));
        assert_eq!(ledger.present(5), None, "the server has it");
        assert_eq!(ledger.release(id, Some(State::EndedLocally)), Some((State::EndedLocally, false)));
        assert_eq!(ledger.state(5), (id.generation, State::EndedLocally));
    }

    #[test]
    fn who_asks_while_a_request_is_open_is_told_and_who_asks_later_is_not() {
        let (ledger, _file) = Ledger::create().unwrap();
        assert!(ledger.take(3));
        for (before_claim, after_claim) in [(true, false), (false, true)] {
            let id = ledger.present(3).unwrap();
            assert!(!before_claim || ledger.ask(id));
            assert!(ledger.claim(id));
            assert!(!after_claim || ledger.ask(id));
            ledger.share(id);
            assert_eq!(ledger.release(id, None), None);
            let end = Some(State::EndedLocally);
            assert_eq!(ledger.release(id, end), Some((State::EndedLocally, true)));
            assert!(!ledger.ask(id));
        }
        let id = ledger.present(3).unwrap();
        assert!(ledger.claim(id));
        assert_eq!(ledger.release(id, Some(State::EndedLocally)), Some((State::EndedLocally, false)));
        let id = ledger.present(3).unwrap();
        assert!(ledger.claim(id));
        assert_eq!(ledger.release(id, Some(State::EndedForAll)), Some((State::EndedForAll, true)));
    }

    #[test]
    fn an_older_copy_cannot_be_claimed_after_a_newer_presentation() {
        let (ledger, _file) = Ledger::create().unwrap();
        assert!(ledger.take(0));
        let old = ledger.present(0).unwrap();
        let new = ledger.present(0).unwrap();
        assert!(!ledger.claim(old));
        assert!(ledger.claim(new));
    }

    #[test]
    fn a_shared_socket_ends_with_its_last_holder() {
        let (ledger, _file) = Ledger::create().unwrap();
        assert!(ledger.take(1) && !ledger.take(1));
        let id = ledger.present(1).unwrap();
        assert!(ledger.claim(id));
        ledger.share(id);
        assert_eq!(ledger.release(id, Some(State::EndedForAll)), None);
        assert_eq!(ledger.release(id, Some(State::EndedLocally)), Some((State::EndedLocally, false)));
        assert_eq!(ledger.release(id, Some(State::EndedLocally)), None, "nobody holds it any more");
        ledger.free(1);
        assert!(ledger.take(1));
    }

    #[test]
    fn a_holder_without_an_opinion_leaves_the_end_to_the_others() {
        let (ledger, _file) = Ledger::create().unwrap();
        for (first, last, end) in [
            (Some(State::EndedLocally), None, State::EndedLocally),
            (None, Some(State::EndedLocally), State::EndedLocally),
            (None, None, State::EndedForAll),
            (Some(State::EndedLocally), Some(State::EndedForAll), State::EndedForAll),
        ] {
            assert!(ledger.take(1));
            let id = ledger.present(1).unwrap();
            assert!(ledger.claim(id));
            ledger.share(id);
            assert_eq!(ledger.release(id, first), None);
            assert_eq!(ledger.release(id, last).map(|ended| ended.0), Some(end));
            ledger.free(1);
        }
    }

    #[test]
    fn a_connection_that_lingers_is_either_the_servers_or_the_filters() {
        let (ledger, _file) = Ledger::create().unwrap();
        assert!(ledger.take(7));
        let first = ledger.present(7).unwrap();
        assert!(!ledger.linger(first), "nobody has it");
        assert!(ledger.claim(first) && ledger.linger(first));
        let second = ledger.resume_for(first, 9).unwrap();
        assert_eq!((second.generation, ledger.state(7).1), (first.generation + 1, State::Accepted));
        assert_eq!(ledger.resume_for(first, 9), None);
        assert!(ledger.ask(second) && !ledger.linger(second), "somebody waits for the end");
        assert_eq!(ledger.release(second, Some(State::EndedLocally)), Some((State::EndedLocally, true)));
        let third = ledger.present(7).unwrap();
        assert!(ledger.claim(third));
        ledger.share(third);
        assert!(!ledger.linger(third), "another process holds it too");
        assert_eq!(ledger.release(third, None), None);
        assert!(ledger.linger(third) && !ledger.ask(third));
        assert!(ledger.let_go(third, State::EndedLocally) && !ledger.let_go(third, State::EndedLocally));
        assert_eq!((ledger.resume_for(third, 9), ledger.state(7).1), (None, State::EndedLocally));
    }

    /// A process that was killed between the two left a request that nobody answered for, ever.
    #[test]
    fn whoever_sees_a_claim_sees_who_claimed() {
        const ROUNDS: u32 = 300_000;
        let (ledger, _file) = Ledger::create().unwrap();
        assert!(ledger.take(2));
        let holder = |generation: u32| generation % 4_194_303 + 1;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let id = ledger.present(2).unwrap();
                    assert!(ledger.claim_for(id, holder(id.generation)));
                    assert!(ledger.release(id, Some(State::EndedLocally)).is_some());
                }
            });
            loop {
                let seen @ (generation, state) = ledger.state(2);
                let by = ledger.holder(2);
                if state == State::Accepted && ledger.state(2) == seen {
                    assert_eq!(by, holder(generation));
                }
                if generation > ROUNDS {
                    break;
                }
            }
        });
    }

    #[test]
    fn a_holder_is_known_whatever_else_is_said_of_the_request() {
        let (ledger, _file) = Ledger::create().unwrap();
        assert!(ledger.take(4));
        let id = ledger.present(4).unwrap();
        assert!(ledger.ask(id));
        assert_eq!(ledger.holder(4), 0);
        assert!(ledger.claim_for(id, HOLDERS) && ledger.ask(id));
        assert_eq!((ledger.holder(4), ledger.accepted_by(HOLDERS).as_slice()), (HOLDERS, &[id][..]));
        ledger.note_holder(4);
        let me = std::process::id();
        assert_eq!(ledger.holder(4), me);
        ledger.share(id);
        assert_eq!(ledger.holder(4), me);
        assert_eq!(ledger.release(id, None), None);
        assert_eq!(ledger.holder(4), me);
        let end = Some(State::EndedLocally);
        assert_eq!(ledger.release(id, end), Some((State::EndedLocally, true)), "somebody asked");
        assert_eq!(ledger.holder(4), 0);
        let id = ledger.present(4).unwrap();
        assert!(ledger.claim_for(id, 7) && ledger.linger(id));
        assert_eq!(ledger.holder(4), 0);
        ledger.resume_for(id, 8).unwrap();
        assert_eq!(ledger.holder(4), 8);
    }

    /// The filters took it for dead: its number was nobody's where they are.
    #[test]
    fn a_process_of_another_namespace_is_not_known_by_its_number() {
        let (ledger, _file) = Ledger::create().unwrap();
        assert!(ledger.knows_this_process());
        ledger.map().pid_namespace.fetch_add(1, Ordering::Relaxed);
        assert!(!ledger.knows_this_process() && ledger.take(6));
        let id = ledger.present(6).unwrap();
        assert!(ledger.claim(id));
        let holder = || (ledger.state(6).1, ledger.holder(6));
        assert_eq!(holder(), (State::Accepted, 0));
        ledger.note_holder(6);
        assert_eq!(holder(), (State::Accepted, 0));
        assert!(ledger.linger(id));
        let id = ledger.resume_for(id, 8).unwrap();
        assert_eq!(holder(), (State::Accepted, 0));
        ledger.share(id);
        ledger.note_holder(6);
        assert_eq!(holder(), (State::Accepted, 0));
        assert!(ledger.accepted_by(0).is_empty());
        assert_eq!(ledger.release(id, None), None);
        let end = Some(State::EndedLocally);
        assert_eq!(ledger.release(id, end), Some((State::EndedLocally, false)));
    }

    #[test]
    fn a_slot_beyond_the_ledger_is_nobodys() {
        let (ledger, _file) = Ledger::create().unwrap();
        assert!(!ledger.take(SLOTS));
        assert_eq!(ledger.present(SLOTS), None);
        assert_eq!(ledger.state(SLOTS), (0, State::Free));
    }
}
