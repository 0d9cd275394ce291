//! The blocked IPv4 addresses of the kernel: a hash table in shared memory, which the program for packets reads with
//! one cache miss (bpf/include/abi.h tells its layout). Several processes may change it at once.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle, MapType, libbpf_sys};
use zerocopy::IntoBytes;

use crate::GateError;
use crate::abi;
use crate::block::WITH_LISTS_NS;

const NAME: &str = "blocked4";
const BUCKETS: usize = abi::TG_BLOCKED4_BUCKETS as usize;
/// C's constant is unsigned.
const MIX: u64 = abi::TG_BLOCKED4_MIX.cast_unsigned();

/// As `tg_blocked4_slot`. Each word is changed by itself: none of them says anything about the others.
#[repr(C)]
#[derive(Debug)]
struct Slot {
    address: AtomicU32,
    expires: AtomicU32,
    last_hit: AtomicU32,
    hits: AtomicU32,
}

type Bucket = [Slot; abi::TG_BLOCKED4_SLOTS as usize];

const _: () = assert!(size_of::<Bucket>() == size_of::<abi::tg_blocked4>());

/// The table, mapped into this process.
#[derive(Debug)]
pub(crate) struct Singles {
    id: u32,
    memory: NonNull<Bucket>,
}

// SAFETY: what the pointer leads to is shared with other processes anyway, and is only accessed by atomic operations.
unsafe impl Send for Singles {}
// SAFETY: as above.
unsafe impl Sync for Singles {}

/// What is known of a blocked address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Single {
    pub(crate) address: Ipv4Addr,
    pub(crate) entry: abi::tg_block,
}

/// How an address was added.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Insertion {
    Fits,
    /// In place of another that had not expired.
    Evicted,
    /// Not at all: there is no room for one more.
    Full,
}

impl Singles {
    /// The table of this map of maps, if it has been made.
    pub(crate) fn open(outer: &MapHandle) -> Result<Option<Self>, GateError> {
        while let Some(id) = Self::current(outer)? {
            match MapHandle::from_map_id(id) {
                Ok(map) => return Self::of(&map, id).map(Some),
                // Another process has put its own in its place since the number was read.
                Err(error) if error.kind() == ErrorKind::NotFound && Self::current(outer)? != Some(id) => {}
                Err(error) => return Err(GateError::kernel("opening the block list")(error)),
            }
        }
        Ok(None)
    }

    /// The table, made if there is none yet.
    pub(crate) fn open_or_create(outer: &MapHandle) -> Result<Self, GateError> {
        if let Some(table) = Self::open(outer)? {
            return Ok(table);
        }
        let (inner, table) = Self::create()?;
        outer
            .update(0u32.as_bytes(), inner.as_fd().as_raw_fd().as_bytes(), MapFlags::ANY)
            .map_err(GateError::kernel("creating the block list"))?;
        // Of two processes that have done so at once the later one has made the table.
        if table.is_current(outer)? {
            return Ok(table);
        }
        Ok(Self::open(outer)?.unwrap_or(table))
    }

    fn create() -> Result<(MapHandle, Self), GateError> {
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            map_flags: libbpf_sys::BPF_F_MMAPABLE | libbpf_sys::BPF_F_INNER_MAP,
            ..Default::default()
        };
        let (key, value) = (size_of::<u32>() as u32, size_of::<Bucket>() as u32);
        let inner = MapHandle::create(MapType::Array, Some(NAME), key, value, BUCKETS as u32 + 1, &options)
            .map_err(GateError::kernel("creating the block list"))?;
        let id = inner.info().map_err(GateError::kernel("reading about a map"))?.info.id;
        let table = Self::of(&inner, id)?;
        // Whoever is blocked cannot choose addresses that fall into one bucket.
        table.head().address.store(RandomState::new().hash_one(id) as u32, Ordering::Relaxed);
        Ok((inner, table))
    }

    /// Whether this is the table that the kernel programs read.
    pub(crate) fn is_current(&self, outer: &MapHandle) -> Result<bool, GateError> {
        Ok(Self::current(outer)? == Some(self.id))
    }

    fn current(outer: &MapHandle) -> Result<Option<u32>, GateError> {
        let id = outer
            .lookup(0u32.as_bytes(), MapFlags::ANY)
            .map_err(GateError::kernel("reading the block list"))?;
        Ok(id.and_then(|bytes| Some(u32::from_ne_bytes(bytes.try_into().ok()?))))
    }

    fn of(map: &MapHandle, id: u32) -> Result<Self, GateError> {
        if map.max_entries() as usize != BUCKETS + 1 || map.value_size() as usize != size_of::<Bucket>() {
            return Err(GateError::OtherVersion { missing: NAME });
        }
        // SAFETY: a new mapping at an address of the kernel's choice; the descriptor is open.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_fd().as_raw_fd(),
                0,
            )
        };
        match NonNull::new(memory.cast::<Bucket>()) {
            Some(memory) if memory.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { id, memory }),
            _ => Err(GateError::io("mapping the block list")(io::Error::last_os_error())),
        }
    }

    const BYTES: usize = (BUCKETS + 1) * size_of::<Bucket>();

    fn all(&self) -> &[Bucket] {
        // SAFETY: the mapping has so many buckets, lives as long as `self`, and atomics may be shared with anybody.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), BUCKETS + 1) }
    }

    /// What is known of the table itself.
    fn head(&self) -> &Slot {
        &self.all()[BUCKETS][0]
    }

    fn slots(&self, address: u32) -> impl Iterator<Item = &Slot> {
        let mixed = u64::from(address ^ self.head().address.load(Ordering::Relaxed)).wrapping_mul(MIX);
        let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(MIX);
        [abi::TG_BLOCKED4_FIRST_BIT, abi::TG_BLOCKED4_SECOND_BIT]
            .into_iter()
            .flat_map(move |bit| &self.all()[(mixed >> bit) as usize & (BUCKETS - 1)])
    }

    /// How many addresses there are, expired ones included.
    pub(crate) fn count(&self) -> usize {
        self.head().hits.load(Ordering::Relaxed) as usize
    }

    /// Adds an address, or replaces its entry. Where both of its buckets are full,
    /// which is rare, an entry goes to its other bucket; or else what has expired or was hit least recently makes room.
    pub(crate) fn insert(&self, address: Ipv4Addr, entry: &abi::tg_block, now_ns: u64) -> Insertion {
        let address = raw(address);
        if let Some(known) = self.find(address) {
            known.fill(entry);
            return Insertion::Fits;
        }
        if self.count() >= abi::TG_MAX_BLOCKED as usize {
            return Insertion::Full;
        }
        let free = self.claim(address).or_else(|| self.move_one_away(address));
        if let Some(free) = free {
            free.fill(entry);
            self.head().hits.fetch_add(1, Ordering::Relaxed);
        } else if let Some(victim) = self.slots(address).max_by_key(|slot| slot.age(now_ns)) {
            let (is_expired, _) = victim.age(now_ns);
            victim.address.store(address, Ordering::Relaxed);
            victim.fill(entry);
            return if is_expired { Insertion::Fits } else { Insertion::Evicted };
        }
        Insertion::Fits
    }

    /// A free slot of an address, taken.
    fn claim(&self, address: u32) -> Option<&Slot> {
        self.slots(address).find(|slot| slot.exchange(0, address))
    }

    /// A slot of an address whose entry had a free one in its other bucket, taken.
    fn move_one_away(&self, address: u32) -> Option<&Slot> {
        self.slots(address).find(|slot| {
            let moved = slot.address.load(Ordering::Relaxed);
            let Some(other) = self.claim(moved) else { return false };
            other.copy(slot);
            // It may have been removed meanwhile.
            slot.exchange(moved, address) || {
                other.exchange(moved, 0);
                false
            }
        })
    }

    fn find(&self, address: u32) -> Option<&Slot> {
        self.slots(address).find(|slot| slot.address.load(Ordering::Relaxed) == address)
    }

    /// The entry of an address.
    pub(crate) fn get(&self, address: Ipv4Addr, now_ns: u64) -> Option<abi::tg_block> {
        self.find(raw(address)).map(|slot| slot.entry(now_ns))
    }

    /// Removes an address; whether it was there.
    pub(crate) fn remove(&self, address: Ipv4Addr) -> bool {
        let address = raw(address);
        let mut removed = false;
        if address != 0 {
            for slot in self.slots(address) {
                removed |= self.free(slot, address);
            }
        }
        removed
    }

    fn free(&self, slot: &Slot, address: u32) -> bool {
        let freed = slot.exchange(address, 0);
        if freed {
            self.head().hits.fetch_sub(1, Ordering::Relaxed);
        }
        freed
    }

    /// Every address, in no order.
    pub(crate) fn iter(&self, now_ns: u64) -> impl Iterator<Item = Single> {
        self.all()[..BUCKETS].iter().flatten().filter_map(move |slot| {
            let address = slot.address.load(Ordering::Relaxed);
            let single = || Single { address: address.to_ne_bytes().into(), entry: slot.entry(now_ns) };
            (address != 0).then(single)
        })
    }
}

impl Slot {
    /// Puts another address in place of this one; whether it was this one.
    fn exchange(&self, address: u32, other: u32) -> bool {
        self.address.compare_exchange(address, other, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn copy(&self, from: &Self) {
        let words =
            [(&self.expires, &from.expires), (&self.last_hit, &from.last_hit), (&self.hits, &from.hits)];
        for (to, from) in words {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    fn fill(&self, entry: &abi::tg_block) {
        // A moment too early rather than too late. In nine years a block is as good as for ever.
        let expires = match entry.expires_ns {
            0 => 0,
            WITH_LISTS_NS => u32::MAX,
            at_ns => {
                u32::try_from(at_ns >> abi::TG_EXPIRY_SHIFT).ok().filter(|at| *at < u32::MAX).unwrap_or(0)
            }
        };
        self.expires.store(expires, Ordering::Relaxed);
        self.last_hit.store((entry.last_hit_ns >> abi::TG_HIT_SHIFT) as u32, Ordering::Relaxed);
        self.hits.store(entry.hits as u32, Ordering::Relaxed);
    }

    fn entry(&self, now_ns: u64) -> abi::tg_block {
        let since =
            ((now_ns >> abi::TG_HIT_SHIFT) as u32).wrapping_sub(self.last_hit.load(Ordering::Relaxed));
        abi::tg_block {
            expires_ns: match self.expires.load(Ordering::Relaxed) {
                u32::MAX => WITH_LISTS_NS,
                at => u64::from(at) << abi::TG_EXPIRY_SHIFT,
            },
            last_hit_ns: now_ns.saturating_sub(u64::from(since) << abi::TG_HIT_SHIFT),
            hits: self.hits.load(Ordering::Relaxed).into(),
            length_bits: 32,
            reserved: 0,
        }
    }

    /// What makes room first is greatest: the expired, then by the time since the last hit.
    fn age(&self, now_ns: u64) -> (bool, u64) {
        let entry = self.entry(now_ns);
        (entry.expires_ns != 0 && entry.expires_ns <= now_ns, now_ns - entry.last_hit_ns)
    }
}

impl Drop for Singles {
    fn drop(&mut self) {
        // SAFETY: the mapping that `of` has made, once.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), Self::BYTES) };
    }
}

/// As in a packet.
fn raw(address: Ipv4Addr) -> u32 {
    u32::from_ne_bytes(address.octets())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_NS: u64 = 1 << 40;

    fn entry(last_hit_ns: u64) -> abi::tg_block {
        abi::tg_block { expires_ns: 0, last_hit_ns, hits: 0, length_bits: 32, reserved: 0 }
    }

    /// Addresses whose first bucket is one of the two of `address`, as many as these have slots.
    fn crowd(table: &Singles, address: Ipv4Addr) -> Vec<Ipv4Addr> {
        let buckets: Vec<*const Slot> =
            table.slots(raw(address)).step_by(8).map(std::ptr::from_ref).collect();
        let first = |other: &Ipv4Addr| table.slots(raw(*other)).next().map(std::ptr::from_ref);
        let of = |bucket: *const Slot| {
            let all = (1..u32::MAX).map(Ipv4Addr::from).filter(move |other| *other != address);
            all.filter(move |other| first(other) == Some(bucket)).take(8)
        };
        buckets.into_iter().flat_map(of).collect()
    }

    #[test]
    fn with_both_buckets_full_another_entry_moves_and_with_all_full_the_oldest_goes() {
        let root = rustix::process::geteuid().is_root();
        assert!(root, "kernel maps need root: run the tests with sudo");
        let (_map, table) = Singles::create().unwrap_or_else(|error| panic!("{error}"));
        let address = Ipv4Addr::new(192, 0, 2, 1);
        let crowd = crowd(&table, address);
        assert_eq!(crowd.len(), 16);
        for (age, other) in (0..).zip(&crowd) {
            assert_eq!(table.insert(*other, &entry(NOW_NS - (age << 30)), NOW_NS), Insertion::Fits);
        }
        assert_eq!(table.insert(address, &entry(NOW_NS), NOW_NS), Insertion::Fits);
        let is_there = |other: &Ipv4Addr| table.get(*other, NOW_NS).is_some();
        assert!(crowd.iter().chain([&address]).all(is_there));
        assert_eq!((table.count(), table.iter(NOW_NS).count()), (17, 17));
        // Everywhere that an entry of the two buckets could go, somebody else is.
        for slot in table.all()[..BUCKETS].iter().flatten() {
            let _ = slot.exchange(0, u32::MAX);
        }
        assert!(table.remove(address));
        let taken = table.slots(raw(address)).find(|slot| slot.exchange(0, 1));
        assert!(taken.is_some());
        let before: Vec<bool> = crowd.iter().map(is_there).collect();
        assert_eq!(table.insert(address, &entry(NOW_NS), NOW_NS), Insertion::Evicted);
        assert!(is_there(&address));
        assert!(before.iter().all(|there| *there));
        assert_eq!(crowd.iter().filter(|other| !is_there(other)).count(), 1);
        assert!(!is_there(&crowd[15]), "the least recently hit");
    }
}
