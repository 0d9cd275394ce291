//! The kernel's maps of the block list: what is found in them, what makes room, what is told of an entry.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use libbpf_rs::{ErrorKind, MapCore, MapFlags};
use tidegate_core::IpPrefix;
use tidegate_policy::gives_way;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::abi;
use crate::block::{Blocked, End, WITH_LISTS_NS};
use crate::gate::mapped;
use crate::maps::{Maps, write_many};
use crate::rules::{prefix4, prefix6};
use crate::singles::{Insertion, Single, Singles};
use crate::{GateError, system};

pub(super) const NETS: [&str; 2] = ["blocked_nets4", "blocked_nets6"];
/// Everything but the single IPv4 addresses, which have a table of their own.
pub(super) const OTHERS: [&str; 3] = ["blocked6", NETS[0], NETS[1]];

/// The longest prefix around an address for which `is_wanted`; the kernel finds the longest one, whatever it holds.
pub(super) fn any_prefix(
    maps: &Maps,
    address: IpAddr,
    is_wanted: impl Fn(&abi::tg_block) -> bool,
) -> Result<bool, GateError> {
    let mut length_bits = if address.is_ipv4() { 32 } else { 128 };
    loop {
        let Ok(prefix) = IpPrefix::new(address, length_bits) else { return Ok(false) };
        let entry: Option<abi::tg_block> = match address {
            IpAddr::V4(_) => maps.read(NETS[0], &prefix4(&prefix))?,
            IpAddr::V6(_) => maps.read(NETS[1], &prefix6(&prefix))?,
        };
        let Some(entry) = entry else { return Ok(false) };
        if is_wanted(&entry) {
            return Ok(true);
        }
        let shorter = u8::try_from(entry.length_bits).ok().and_then(|bits| bits.checked_sub(1));
        let Some(shorter) = shorter.filter(|shorter| *shorter < length_bits) else { return Ok(false) };
        length_bits = shorter;
    }
}

/// The entry of exactly this address or prefix.
pub(super) fn entry_of(
    maps: &Maps,
    prefix: &IpPrefix,
    now_ns: u64,
) -> Result<Option<abi::tg_block>, GateError> {
    let entry = match (prefix.address(), prefix.length_bits()) {
        (IpAddr::V4(v4), 32) if !v4.is_unspecified() => {
            maps.singles()?.and_then(|table| table.get(v4, now_ns))
        }
        (IpAddr::V6(v6), 128) => maps.read("blocked6", &v6.octets())?,
        (IpAddr::V4(_), _) => maps.read(NETS[0], &prefix4(prefix))?,
        (IpAddr::V6(_), _) => maps.read(NETS[1], &prefix6(prefix))?,
    };
    // A trie gives the longest prefix that holds this one.
    Ok(entry.filter(|entry| entry.length_bits == u32::from(prefix.length_bits())))
}

/// Entries by map.
#[derive(Default)]
pub(super) struct Sorted {
    pub(super) single4: Vec<(Ipv4Addr, abi::tg_block)>,
    pub(super) single6: Vec<([u8; 16], abi::tg_block)>,
    pub(super) nets4: Vec<(abi::tg_prefix4, abi::tg_block)>,
    pub(super) nets6: Vec<(abi::tg_prefix6, abi::tg_block)>,
}

pub(super) fn nets_full() -> GateError {
    GateError::Full {
        what: "list of blocked prefixes",
        max: abi::TG_MAX_BLOCKED_PREFIXES,
        remedy: "nothing was added; remove some, or join them into shorter ones",
    }
}

/// Makes room for all of these, or fails: what has expired goes, and then those of the rest that give way, the least
/// recently hit first.
pub(super) fn room_for_nets<K: IntoBytes + Immutable>(
    maps: &Maps,
    name: &'static str,
    entries: &[(K, abi::tg_block)],
    now_ns: u64,
) -> Result<(), GateError> {
    const MAX: usize = abi::TG_MAX_BLOCKED_PREFIXES as usize;
    let wanted: HashSet<&[u8]> = entries.iter().map(|(key, _)| key.as_bytes()).collect();
    // How many there would be, and who may go.
    let look = || {
        let (mut count, mut passing) = (wanted.len(), Vec::new());
        each(maps, name, |key, entry| {
            if wanted.contains(key) {
                return;
            }
            count += 1;
            if describe(key, entry, now_ns).is_some_and(|it| gives_way(&it.prefix, expires_ns(entry))) {
                passing.push((entry.last_hit_ns, key.to_vec()));
            }
        })?;
        Ok::<_, GateError>((count, passing))
    };
    let (mut count, mut passing) = look()?;
    if count > MAX && remove_expired(maps, name, now_ns)? > 0 {
        (count, passing) = look()?;
    }
    let surplus = count.saturating_sub(MAX);
    if surplus == 0 {
        return Ok(());
    }
    if surplus > passing.len() {
        return Err(nets_full());
    }
    keep_oldest(&mut passing, surplus.max(MAX / 100));
    let evicted = delete(maps, name, passing.into_iter().map(|(_, key)| key).collect())?;
    count_evicted(maps, evicted)
}

fn expires_ns(entry: &abi::tg_block) -> Option<u64> {
    (entry.expires_ns != 0).then_some(entry.expires_ns)
}

/// For prefixes there is room where nobody has to go but who gives way.
pub(super) fn add_nets<K: IntoBytes + Immutable>(
    maps: &Maps,
    name: &'static str,
    entries: &[(K, abi::tg_block)],
    now_ns: u64,
) -> Result<(), GateError> {
    if entries.is_empty() {
        return Ok(());
    }
    match write_many(maps.get(name)?, entries) {
        Err(GateError::Kernel { .. }) => {
            room_for_nets(maps, name, entries, now_ns)?;
            write_many(maps.get(name)?, entries).map_err(|_| nets_full())?;
        }
        other => other?,
    }
    maps.set_control(abi::TG_CONTROL_BLOCK_PREFIXES, 1)
}

pub(super) fn add_singles4(
    maps: &Maps,
    entries: &[(Ipv4Addr, abi::tg_block)],
    now_ns: u64,
) -> Result<(), GateError> {
    if entries.is_empty() {
        return Ok(());
    }
    let mut table = maps.singles_to_fill()?;
    loop {
        let mut evicted = 0;
        for (address, entry) in entries {
            let mut inserted = table.insert(*address, entry, now_ns);
            if inserted == Insertion::Full {
                evicted += make_room4(&table, now_ns);
                inserted = table.insert(*address, entry, now_ns);
            }
            evicted += usize::from(inserted == Insertion::Evicted);
        }
        count_evicted(maps, evicted)?;
        // Another process may have made a first table at the same time.
        let current = maps.singles_to_fill()?;
        if Arc::ptr_eq(&table, &current) {
            return Ok(());
        }
        table = current;
    }
}

pub(super) fn remove_expired4(table: &Singles, now_ns: u64) -> usize {
    let expired = |single: &Single| single.entry.expires_ns != 0 && single.entry.expires_ns <= now_ns;
    table.iter(now_ns).filter(expired).filter(|single| table.remove(single.address)).count()
}

/// As [`make_room`]; how many were evicted.
fn make_room4(table: &Singles, now_ns: u64) -> usize {
    if remove_expired4(table, now_ns) > 0 {
        return 0;
    }
    let mut by_age: Vec<(u64, Ipv4Addr)> =
        table.iter(now_ns).map(|single| (single.entry.last_hit_ns, single.address)).collect();
    let victims = by_age.len() / 100;
    keep_oldest(&mut by_age, victims);
    by_age.into_iter().filter(|(_, address)| table.remove(*address)).count()
}

/// Of two processes that evict at once one may go uncounted.
fn count_evicted(maps: &Maps, evicted: usize) -> Result<(), GateError> {
    if evicted == 0 {
        return Ok(());
    }
    let before = maps.control(abi::TG_CONTROL_BLOCK_EVICTED)?;
    maps.set_control(abi::TG_CONTROL_BLOCK_EVICTED, before.saturating_add(evicted as u64))
}

/// Those that have not hit for longest; of a hundredth, one search pays for many insertions.
fn keep_oldest<K: Ord>(by_age: &mut Vec<(u64, K)>, victims: usize) {
    let victims = victims.max(1);
    if by_age.len() > victims {
        by_age.select_nth_unstable(victims - 1);
        by_age.truncate(victims);
    }
}

pub(super) fn add_singles6(
    maps: &Maps,
    entries: &[([u8; 16], abi::tg_block)],
    now_ns: u64,
) -> Result<(), GateError> {
    const BATCH: usize = 4096;
    let map = maps.get("blocked6")?;
    for batch in entries.chunks(BATCH) {
        // A batch that did not fit was taken in part; the rest goes one by one.
        match write_many(map, batch) {
            Err(GateError::Kernel { source, .. }) if source.kind() == ErrorKind::TooBig => {}
            other => {
                other?;
                continue;
            }
        }
        for (key, entry) in batch {
            let write = || map.update(key.as_bytes(), entry.as_bytes(), MapFlags::ANY);
            match write() {
                Err(error) if error.kind() == ErrorKind::TooBig => {
                    make_room(maps, "blocked6", now_ns)?;
                    write().map_err(GateError::kernel("blocking an address"))?;
                }
                other => other.map_err(GateError::kernel("blocking an address"))?,
            }
        }
    }
    Ok(())
}

/// Sets a flag to 0 if what it tells of is empty.
pub(super) fn unset_if(
    maps: &Maps,
    flag: abi::tg_control,
    is_empty: impl Fn() -> Result<bool, GateError>,
) -> Result<(), GateError> {
    if is_empty()? {
        maps.set_control(flag, 0)?;
        // Another process may have added one meanwhile.
        if !is_empty()? {
            maps.set_control(flag, 1)?;
        }
    }
    Ok(())
}

/// Calls `visit` with each entry.
pub(super) fn each(
    maps: &Maps,
    name: &'static str,
    mut visit: impl FnMut(&[u8], &abi::tg_block),
) -> Result<(), GateError> {
    system::each_entry(maps.get(name)?, |key, value| {
        if let Ok(entry) = abi::tg_block::read_from_bytes(value) {
            visit(key, &entry);
        }
    })
}

pub(super) fn remove_expired(maps: &Maps, name: &'static str, now_ns: u64) -> Result<usize, GateError> {
    let mut gone = Vec::new();
    each(maps, name, |key, entry| {
        if entry.expires_ns != 0 && entry.expires_ns <= now_ns {
            gone.push(key.to_vec());
        }
    })?;
    delete(maps, name, gone)
}

/// Expired entries go first; then the least recently hit hundredth.
fn make_room(maps: &Maps, name: &'static str, now_ns: u64) -> Result<(), GateError> {
    if remove_expired(maps, name, now_ns)? > 0 {
        return Ok(());
    }
    let mut by_age: Vec<(u64, Vec<u8>)> = Vec::new();
    each(maps, name, |key, entry| by_age.push((entry.last_hit_ns, key.to_vec())))?;
    let victims = by_age.len() / 100;
    keep_oldest(&mut by_age, victims);
    let evicted = delete(maps, name, by_age.into_iter().map(|(_, key)| key).collect())?;
    count_evicted(maps, evicted)
}

/// Deletes entries, some of which another process may have deleted before.
fn delete(maps: &Maps, name: &'static str, keys: Vec<Vec<u8>>) -> Result<usize, GateError> {
    let map = maps.get(name)?;
    let mut deleted = 0;
    for key in keys {
        match map.delete(&key) {
            Ok(()) => deleted += 1,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(GateError::kernel("removing from the block list")(error)),
        }
    }
    Ok(deleted)
}

pub(super) fn describe(key: &[u8], entry: &abi::tg_block, now_ns: u64) -> Option<Blocked> {
    // A trie's key begins with its length.
    let address = match key.len() {
        4 | 16 => key,
        _ => key.get(4..)?,
    };
    let address = match address.len() {
        4 => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(address).ok()?)),
        _ => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(address).ok()?)),
    };
    Some(Blocked {
        prefix: IpPrefix::new(address, u8::try_from(entry.length_bits).ok()?).ok()?,
        remaining: End::of(entry.expires_ns).remaining(now_ns),
        since_hit: Duration::from_nanos(now_ns.saturating_sub(entry.last_hit_ns)),
        hits: entry.hits,
        reason: None,
        listed: entry.expires_ns == WITH_LISTS_NS,
    })
}

pub(super) fn target(prefix: &IpPrefix) -> abi::tg_target {
    abi::tg_target { address: mapped(prefix.address()), length_bits: prefix.length_bits().into() }
}

/// There are few reasons and perhaps a million blocks.
pub(super) fn add_reasons(maps: &Maps, blocked: &mut [Blocked]) -> Result<(), GateError> {
    let mut reasons = HashMap::new();
    let map = maps.get("reasons")?;
    for key in map.keys() {
        if let Some(value) = map.lookup(&key, MapFlags::ANY).map_err(GateError::kernel("reading a map"))? {
            let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
            reasons.insert(key, String::from_utf8_lossy(&value[..end]).into_owned());
        }
    }
    if !reasons.is_empty() {
        for entry in blocked {
            entry.reason = reasons.get(target(&entry.prefix).as_bytes()).cloned();
        }
    }
    Ok(())
}
