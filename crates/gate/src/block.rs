//! The block list: in the kernel's maps where programs are loaded, in user space otherwise.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use libbpf_rs::MapCore;
use tidegate_core::IpPrefix;
use tidegate_policy::BlockList;
use zerocopy::FromZeros;

use crate::abi;
use crate::block_maps::{
    NETS, OTHERS, Sorted, add_nets, add_reasons, add_singles4, add_singles6, any_prefix, describe, each,
    entry_of, nets_full, remove_expired, remove_expired4, room_for_nets, target, unset_if,
};
use crate::maps::Maps;
use crate::rules::{prefix4, prefix6};
use crate::{GateError, system};

/// A blocked address or prefix.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Blocked {
    /// What is blocked.
    pub prefix: IpPrefix,
    /// How long still; `None`: for ever.
    pub remaining: Option<Duration>,
    /// How long ago it last hit; if never, how long ago it was added.
    pub since_hit: Duration,
    /// Packets (kernel) or connections (user space) refused.
    pub hits: u64,
    /// Why, where somebody said it.
    pub reason: Option<String>,
    /// Whether it is blocked because it stands in a list that is followed, and not by a command.
    pub listed: bool,
}

/// When an entry ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum End {
    Never,
    /// When no list has it any more.
    WithLists,
    /// In nanoseconds of the clock of [`system::now_ns`].
    At(u64),
}

/// The end of an entry that stands in a list: later than any other. Whoever blocks the same thing by a command replaces
/// it, and so tells the two apart.
pub(crate) const WITH_LISTS_NS: u64 = u64::MAX;

impl End {
    /// 0 stands for never.
    pub(crate) fn of(expires_ns: u64) -> Self {
        match expires_ns {
            0 => Self::Never,
            WITH_LISTS_NS => Self::WithLists,
            at_ns => Self::At(at_ns),
        }
    }

    fn expires_ns(self) -> u64 {
        match self {
            Self::Never => 0,
            Self::WithLists => WITH_LISTS_NS,
            Self::At(at_ns) => at_ns,
        }
    }

    /// What a clock of 64 bits cannot tell, over 500 years, is for ever.
    fn after(lifetime: Option<Duration>, now_ns: u64) -> Self {
        let end_ns = lifetime.and_then(|time| now_ns.checked_add(system::saturated_ns(time)));
        end_ns.filter(|end_ns| *end_ns < WITH_LISTS_NS).map_or(Self::Never, Self::At)
    }

    pub(crate) fn remaining(self, now_ns: u64) -> Option<Duration> {
        match self {
            Self::At(at_ns) => Some(Duration::from_nanos(at_ns.saturating_sub(now_ns))),
            Self::Never | Self::WithLists => None,
        }
    }
}

/// How full the block list is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct BlockStats {
    /// Single addresses.
    pub addresses: usize,
    /// Prefixes.
    pub prefixes: usize,
    /// Addresses that had to make room for others before their time, since the list was made.
    pub evicted: u64,
}

/// The block list of a gate.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    backend: Backend<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Backend<'a> {
    Kernel(&'a Maps),
    User(&'a Mutex<BlockList>),
}

impl<'a> Blocks<'a> {
    /// The most single addresses of each family; beyond, the least recently hit are evicted.
    pub const MAX_ADDRESSES: u32 = abi::TG_MAX_BLOCKED;
    /// The most prefixes of each family; beyond, adding fails, but for the place of /64s of IPv6 that end by
    /// themselves: the least recently hit of them are evicted.
    pub const MAX_PREFIXES: u32 = abi::TG_MAX_BLOCKED_PREFIXES;

    pub(crate) fn kernel(maps: &'a Maps) -> Self {
        Self { backend: Backend::Kernel(maps) }
    }

    pub(crate) fn user(list: &'a Mutex<BlockList>) -> Self {
        Self { backend: Backend::User(list) }
    }

    /// Blocks an address or prefix for a time, or for ever; replaces an entry that is there.
    pub fn add(&self, prefix: IpPrefix, lifetime: Option<Duration>) -> Result<(), GateError> {
        self.add_many(&[prefix], lifetime)
    }

    /// Blocks many at once.
    pub fn add_many(&self, prefixes: &[IpPrefix], lifetime: Option<Duration>) -> Result<(), GateError> {
        self.add_until(prefixes, End::after(lifetime, system::now_ns()))
    }

    /// Blocks many at once: the addresses among them, and the prefixes if there is room for all of these.
    pub fn add_what_fits(&self, prefixes: &[IpPrefix], lifetime: Option<Duration>) -> Result<(), GateError> {
        let is_single =
            |prefix: &IpPrefix| prefix.length_bits() == if prefix.address().is_ipv4() { 32 } else { 128 };
        let (singles, nets): (Vec<IpPrefix>, Vec<IpPrefix>) = prefixes.iter().copied().partition(is_single);
        let added = self.add_many(&singles, lifetime);
        self.add_many(&nets, lifetime).and(added)
    }

    pub(crate) fn add_until(&self, prefixes: &[IpPrefix], end: End) -> Result<(), GateError> {
        let now_ns = system::now_ns();
        let maps = match self.backend {
            Backend::Kernel(maps) => maps,
            Backend::User(list) => {
                let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
                let expires_ns = (end != End::Never).then(|| end.expires_ns());
                let full = |_| nets_full();
                if !list.has_room_for(prefixes, now_ns) {
                    return Err(nets_full());
                }
                return prefixes
                    .iter()
                    .try_for_each(|prefix| list.add(*prefix, expires_ns, now_ns).map_err(full));
            }
        };
        let mut sorted = Sorted::default();
        for prefix in prefixes {
            let entry = abi::tg_block {
                expires_ns: end.expires_ns(),
                last_hit_ns: now_ns,
                hits: 0,
                length_bits: prefix.length_bits().into(),
                reserved: 0,
            };
            match (prefix.address(), prefix.length_bits()) {
                // No packet that a host answers comes from 0.0.0.0, which marks what is free in the table.
                (IpAddr::V4(v4), 32) if !v4.is_unspecified() => sorted.single4.push((v4, entry)),
                (IpAddr::V6(v6), 128) => sorted.single6.push((v6.octets(), entry)),
                (IpAddr::V4(_), _) => sorted.nets4.push((prefix4(prefix), entry)),
                (IpAddr::V6(_), _) => sorted.nets6.push((prefix6(prefix), entry)),
            }
        }
        // All of them, or nothing of all that is to be added.
        if sorted.nets4.len() > 1 {
            room_for_nets(maps, NETS[0], &sorted.nets4, now_ns)?;
        }
        if sorted.nets6.len() > 1 {
            room_for_nets(maps, NETS[1], &sorted.nets6, now_ns)?;
        }
        add_nets(maps, NETS[0], &sorted.nets4, now_ns)?;
        add_nets(maps, NETS[1], &sorted.nets6, now_ns)?;
        if !(sorted.single4.is_empty() && sorted.single6.is_empty()) {
            maps.set_control(abi::TG_CONTROL_BLOCK_SINGLES, 1)?;
        }
        add_singles4(maps, &sorted.single4, now_ns)?;
        add_singles6(maps, &sorted.single6, now_ns)?;
        maps.set_control(abi::TG_CONTROL_BLOCK_CHANGED_NS, now_ns)
    }

    /// Says why something is blocked. Of very many reasons, and of long ones, a part is lost; the blocks are not.
    pub fn set_reason(&self, prefix: IpPrefix, reason: &str) -> Result<(), GateError> {
        match self.backend {
            Backend::Kernel(maps) => {
                let mut value = abi::tg_reason::new_zeroed();
                let room = value.text.len().min(reason.len());
                let length = (0..=room).rev().find(|end| reason.is_char_boundary(*end)).unwrap_or(0);
                value.text[..length].copy_from_slice(&reason.as_bytes()[..length]);
                maps.write("reasons", &target(&prefix), &value)
            }
            Backend::User(list) => {
                list.lock().unwrap_or_else(PoisonError::into_inner).set_reason(prefix, reason);
                Ok(())
            }
        }
    }

    /// Sets the life of blocks that do not say their own, for commands of other processes; zero: for ever.
    pub fn set_lifetime(&self, lifetime: Duration) -> Result<(), GateError> {
        match self.backend {
            Backend::Kernel(maps) => {
                maps.set_control(abi::TG_CONTROL_BLOCK_FOR_NS, system::saturated_ns(lifetime))
            }
            Backend::User(_) => Ok(()),
        }
    }

    /// The life of blocks that do not say their own.
    pub fn lifetime(&self) -> Result<Option<Duration>, GateError> {
        match self.backend {
            Backend::Kernel(maps) => {
                let lifetime = Duration::from_nanos(maps.control(abi::TG_CONTROL_BLOCK_FOR_NS)?);
                Ok((!lifetime.is_zero()).then_some(lifetime))
            }
            Backend::User(_) => Ok(None),
        }
    }

    /// When something was last added or removed, by whichever process; on no clock but the same between calls.
    pub(crate) fn changed_ns(&self) -> Result<u64, GateError> {
        match self.backend {
            Backend::Kernel(maps) => maps.control(abi::TG_CONTROL_BLOCK_CHANGED_NS),
            Backend::User(list) => Ok(list.lock().unwrap_or_else(PoisonError::into_inner).changed_ns()),
        }
    }

    /// Whether there may be something on the list: what the kernel programs ask before they look, without counting.
    pub(crate) fn may_hold_any(&self) -> bool {
        match self.backend {
            // A list that cannot be read may hold something.
            Backend::Kernel(maps) => [abi::TG_CONTROL_BLOCK_SINGLES, abi::TG_CONTROL_BLOCK_PREFIXES]
                .into_iter()
                .any(|flag| maps.control(flag).map_or(true, |value| value != 0)),
            Backend::User(list) => !list.lock().unwrap_or_else(PoisonError::into_inner).is_empty(),
        }
    }

    /// How many addresses had to make room for others before their time, since the list was made.
    pub fn evicted(&self) -> Result<u64, GateError> {
        match self.backend {
            Backend::Kernel(maps) => maps.control(abi::TG_CONTROL_BLOCK_EVICTED),
            Backend::User(list) => Ok(list.lock().unwrap_or_else(PoisonError::into_inner).evicted()),
        }
    }

    /// How many more single addresses fit that need not be evicted for: of IPv4 and of IPv6.
    pub(crate) fn room(&self) -> Result<[usize; 2], GateError> {
        let max = Self::MAX_ADDRESSES as usize;
        match self.backend {
            Backend::Kernel(maps) => {
                let v4 = maps.singles()?.map_or(0, |table| table.count());
                let mut v6 = 0;
                system::each_entry(maps.get("blocked6")?, |_, _| v6 += 1)?;
                Ok([max.saturating_sub(v4), max.saturating_sub(v6)])
            }
            // Both families share it.
            Backend::User(list) => {
                let list = list.lock().unwrap_or_else(PoisonError::into_inner);
                Ok([max.saturating_sub(list.len() - list.prefixes()) / 2; 2])
            }
        }
    }

    /// Adds every address and prefix of a text, one a line; with an error in it, none.
    pub fn add_list(&self, text: &str, lifetime: Option<Duration>) -> Result<usize, GateError> {
        let prefixes = tidegate_policy::parse_list(text)?;
        self.add_many(&prefixes, lifetime)?;
        Ok(prefixes.len())
    }

    /// Unblocks; whether it was blocked.
    pub fn remove(&self, prefix: &IpPrefix) -> Result<bool, GateError> {
        let maps = match self.backend {
            Backend::Kernel(maps) => maps,
            Backend::User(list) => {
                let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
                return Ok(list.remove(prefix, system::now_ns()));
            }
        };
        maps.set_control(abi::TG_CONTROL_BLOCK_CHANGED_NS, system::now_ns())?;
        maps.remove("reasons", &target(prefix))?;
        match (prefix.address(), prefix.length_bits()) {
            (IpAddr::V4(v4), 32) if !v4.is_unspecified() => {
                Ok(maps.singles()?.is_some_and(|table| table.remove(v4)))
            }
            (IpAddr::V6(v6), 128) => maps.remove("blocked6", &v6.octets()),
            (IpAddr::V4(_), _) => maps.remove(NETS[0], &prefix4(prefix)),
            (IpAddr::V6(_), _) => maps.remove(NETS[1], &prefix6(prefix)),
        }
    }

    /// Whether an address is blocked now, without counting it as a hit.
    pub fn blocks(&self, address: IpAddr) -> Result<bool, GateError> {
        let now_ns = system::now_ns();
        let maps = match self.backend {
            Backend::Kernel(maps) => maps,
            Backend::User(list) => {
                return Ok(list.lock().unwrap_or_else(PoisonError::into_inner).contains(address, now_ns));
            }
        };
        let in_force = |entry: &abi::tg_block| entry.expires_ns == 0 || entry.expires_ns > now_ns;
        Ok(match address.to_canonical() {
            IpAddr::V4(v4) => {
                maps.singles()?.and_then(|table| table.get(v4, now_ns)).is_some_and(|entry| in_force(&entry))
                    || any_prefix(maps, v4.into(), in_force)?
            }
            IpAddr::V6(v6) => {
                maps.read("blocked6", &v6.octets())?.is_some_and(|entry| in_force(&entry))
                    || any_prefix(maps, v6.into(), in_force)?
            }
        })
    }

    /// When the entry of exactly this address or prefix ends; `None`: there is none in force.
    pub(crate) fn end(&self, prefix: &IpPrefix) -> Result<Option<End>, GateError> {
        let now_ns = system::now_ns();
        let expires_ns = match self.backend {
            Backend::User(list) => {
                let list = list.lock().unwrap_or_else(PoisonError::into_inner);
                list.get(prefix).map(|entry| entry.expires_ns.unwrap_or(0))
            }
            Backend::Kernel(maps) => entry_of(maps, prefix, now_ns)?.map(|entry| entry.expires_ns),
        };
        Ok(expires_ns.map(End::of).filter(|end| !matches!(end, End::At(at_ns) if *at_ns <= now_ns)))
    }

    /// Changes when an entry ends that is in force; why it is there is kept.
    pub(crate) fn set_end(&self, prefix: &IpPrefix, end: End) -> Result<(), GateError> {
        if let Backend::User(list) = self.backend {
            let expires_ns = (end != End::Never).then(|| end.expires_ns());
            let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
            if list.set_end(prefix, expires_ns, system::now_ns()) {
                return Ok(());
            }
        }
        self.add_until(&[*prefix], end)
    }

    /// Takes over everything that another list blocks, as it does.
    pub fn take_over(&self, other: &Blocks<'_>) -> Result<(), GateError> {
        let now_ns = system::now_ns();
        for blocked in other.list()? {
            let end = if blocked.listed { End::WithLists } else { End::after(blocked.remaining, now_ns) };
            self.add_until(&[blocked.prefix], end)?;
            if let Some(reason) = &blocked.reason {
                self.set_reason(blocked.prefix, reason)?;
            }
        }
        Ok(())
    }

    /// Everything that is blocked now, in no order.
    pub fn list(&self) -> Result<Vec<Blocked>, GateError> {
        let now_ns = system::now_ns();
        match self.backend {
            Backend::User(list) => {
                let list = list.lock().unwrap_or_else(PoisonError::into_inner);
                let blocked = |(prefix, entry): (IpPrefix, tidegate_policy::BlockEntry)| Blocked {
                    prefix,
                    remaining: End::of(entry.expires_ns.unwrap_or(0)).remaining(now_ns),
                    since_hit: Duration::from_nanos(now_ns.saturating_sub(entry.last_hit_ns)),
                    hits: entry.hits,
                    reason: list.reason(&prefix).map(str::to_owned),
                    listed: entry.expires_ns == Some(WITH_LISTS_NS),
                };
                Ok(list.entries(now_ns).map(blocked).collect())
            }
            Backend::Kernel(maps) => {
                let mut found = Vec::new();
                let in_force = |entry: &abi::tg_block| entry.expires_ns == 0 || entry.expires_ns > now_ns;
                if let Some(table) = maps.singles()? {
                    let singles = table.iter(now_ns).filter(|single| in_force(&single.entry));
                    found.extend(singles.filter_map(|s| describe(&s.address.octets(), &s.entry, now_ns)));
                }
                for name in OTHERS {
                    each(maps, name, |key, entry| {
                        if in_force(entry) {
                            found.extend(describe(key, entry, now_ns));
                        }
                    })?;
                }
                add_reasons(maps, &mut found)?;
                Ok(found)
            }
        }
    }

    /// Removes what has expired, and says how many. Expired entries block nobody before that; they take room.
    pub fn sweep(&self) -> Result<usize, GateError> {
        let now_ns = system::now_ns();
        let maps = match self.backend {
            Backend::Kernel(maps) => maps,
            Backend::User(list) => {
                return Ok(list.lock().unwrap_or_else(PoisonError::into_inner).sweep(now_ns));
            }
        };
        let mut removed = maps.singles()?.map_or(0, |table| remove_expired4(&table, now_ns));
        for name in OTHERS {
            removed += remove_expired(maps, name, now_ns)?;
        }
        if removed > 0 {
            maps.set_control(abi::TG_CONTROL_BLOCK_CHANGED_NS, now_ns)?;
        }
        let empty = |name| Ok::<bool, GateError>(maps.get(name)?.keys().next().is_none());
        let no_singles = || Ok(maps.singles()?.is_none_or(|table| table.count() == 0) && empty("blocked6")?);
        let no_prefixes = || Ok(empty(NETS[0])? && empty(NETS[1])?);
        unset_if(maps, abi::TG_CONTROL_BLOCK_SINGLES, no_singles)?;
        unset_if(maps, abi::TG_CONTROL_BLOCK_PREFIXES, no_prefixes)?;
        Ok(removed)
    }

    /// When the first prefix expires. The kernel looks past a few expired prefixes towards a shorter one, not past any
    /// number of them: they are to be swept soon.
    pub(crate) fn next_prefix_end_ns(&self) -> Result<Option<u64>, GateError> {
        let Backend::Kernel(maps) = self.backend else { return Ok(None) };
        let mut first = None;
        if maps.control(abi::TG_CONTROL_BLOCK_PREFIXES)? != 0 {
            for name in NETS {
                each(maps, name, |_, entry| {
                    if let End::At(at_ns) = End::of(entry.expires_ns) {
                        first = Some(first.map_or(at_ns, |first: u64| first.min(at_ns)));
                    }
                })?;
            }
        }
        Ok(first)
    }

    /// Removes the prefixes that have expired.
    pub(crate) fn sweep_prefixes(&self) -> Result<(), GateError> {
        let Backend::Kernel(maps) = self.backend else { return Ok(()) };
        let now_ns = system::now_ns();
        for name in NETS {
            remove_expired(maps, name, now_ns)?;
        }
        maps.set_control(abi::TG_CONTROL_BLOCK_CHANGED_NS, now_ns)
    }

    /// How full the list is, expired entries included.
    pub fn stats(&self) -> Result<BlockStats, GateError> {
        match self.backend {
            Backend::User(list) => {
                let list = list.lock().unwrap_or_else(PoisonError::into_inner);
                let prefixes = list.prefixes();
                Ok(BlockStats { addresses: list.len() - prefixes, prefixes, evicted: list.evicted() })
            }
            Backend::Kernel(maps) => {
                let count = |name| {
                    let mut count = 0;
                    system::each_entry(maps.get(name)?, |_, _| count += 1)?;
                    Ok::<usize, GateError>(count)
                };
                Ok(BlockStats {
                    addresses: maps.singles()?.map_or(0, |table| table.count()) + count("blocked6")?,
                    prefixes: count(NETS[0])? + count(NETS[1])?,
                    evicted: self.evicted()?,
                })
            }
        }
    }
}
