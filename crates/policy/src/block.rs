//! The block list in user space: bounded, with expiry and hit counts; and the format of files that feed either list.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;

use tidegate_core::IpPrefix;

/// What is known of a blocked address or prefix. Times are nanoseconds of one monotonic clock.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BlockEntry {
    /// When it ends; `None`: never.
    pub expires_ns: Option<u64>,
    /// When it last refused somebody; at first, when it was inserted.
    pub last_hit_ns: u64,
    /// How many packets (kernel) or connections (user space) it refused.
    pub hits: u64,
}

/// How many reasons are kept, and how long each may be.
const MAX_REASONS: usize = 16_384;
const MAX_REASON_CHARS: usize = 64;

/// Why nothing could be added.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockListError {
    /// An operator's prefixes are not evicted.
    #[error("the block list holds {max} prefixes and is full: remove some, or join them into shorter ones")]
    PrefixesFull {
        /// How many it holds.
        max: usize,
    },
}

/// Blocked addresses and prefixes.
#[derive(Debug)]
pub struct BlockList {
    addresses: HashMap<IpAddr, BlockEntry>,
    prefixes: HashMap<IpPrefix, BlockEntry>,
    /// How many prefixes there are of each length.
    lengths: BTreeMap<u8, usize>,
    max_addresses: usize,
    max_prefixes: usize,
    /// Why, where somebody said it.
    reasons: HashMap<IpPrefix, Box<str>>,
    evicted: u64,
    changed_ns: u64,
}

impl BlockList {
    /// An empty list with room for that many; a full list of addresses evicts the least recently hit. So does one of
    /// prefixes, among what is to IPv6 what an address is to IPv4: /64s that end by themselves.
    pub fn new(max_addresses: usize, max_prefixes: usize) -> Self {
        Self {
            addresses: HashMap::new(),
            prefixes: HashMap::new(),
            lengths: BTreeMap::new(),
            max_addresses: max_addresses.max(1),
            max_prefixes,
            reasons: HashMap::new(),
            evicted: 0,
            changed_ns: 0,
        }
    }

    /// Whether all of these can be added. Removes what has expired where that makes room.
    pub fn has_room_for(&mut self, prefixes: &[IpPrefix], now_ns: u64) -> bool {
        let fits = |list: &Self| {
            let fresh = |prefix: &&IpPrefix| !is_single(prefix) && !list.prefixes.contains_key(*prefix);
            let fresh: HashSet<&IpPrefix> = prefixes.iter().filter(fresh).collect();
            let wanted = list.prefixes.len() + fresh.len();
            wanted <= list.max_prefixes || wanted - list.passing().count() <= list.max_prefixes
        };
        fits(self) || {
            self.sweep(now_ns);
            fits(self)
        }
    }

    /// Blocks an address or prefix until `expires_ns`; replaces an entry that is there.
    pub fn add(
        &mut self,
        prefix: IpPrefix,
        expires_ns: Option<u64>,
        now_ns: u64,
    ) -> Result<(), BlockListError> {
        let entry = BlockEntry { expires_ns, last_hit_ns: now_ns, hits: 0 };
        self.changed_ns = now_ns;
        self.reasons.remove(&prefix);
        if is_single(&prefix) {
            let address = prefix.address().to_canonical();
            if self.addresses.len() >= self.max_addresses && !self.addresses.contains_key(&address) {
                self.make_room(now_ns);
            }
            self.addresses.insert(address, entry);
            return Ok(());
        }
        if self.prefixes.len() >= self.max_prefixes && !self.prefixes.contains_key(&prefix) {
            self.sweep(now_ns);
            self.evict_prefixes();
            if self.prefixes.len() >= self.max_prefixes {
                return Err(BlockListError::PrefixesFull { max: self.max_prefixes });
            }
        }
        if self.prefixes.insert(prefix, entry).is_none() {
            *self.lengths.entry(prefix.length_bits()).or_default() += 1;
        }
        Ok(())
    }

    /// Changes when an entry ends and nothing else of it; whether it is there.
    pub fn set_end(&mut self, prefix: &IpPrefix, expires_ns: Option<u64>, now_ns: u64) -> bool {
        let entry = match is_single(prefix) {
            true => self.addresses.get_mut(&prefix.address()),
            false => self.prefixes.get_mut(prefix),
        };
        let Some(entry) = entry else { return false };
        entry.expires_ns = expires_ns;
        self.changed_ns = now_ns;
        true
    }

    /// Keeps why something is blocked. Of very many reasons some are lost; the blocks are not.
    pub fn set_reason(&mut self, prefix: IpPrefix, reason: &str) {
        if self.reasons.len() >= MAX_REASONS
            && let Some(other) = self.reasons.keys().next().copied()
        {
            self.reasons.remove(&other);
        }
        self.reasons.insert(prefix, reason.chars().take(MAX_REASON_CHARS).collect());
    }

    /// Why something is blocked, where somebody said it.
    pub fn reason(&self, prefix: &IpPrefix) -> Option<&str> {
        self.reasons.get(prefix).map(AsRef::as_ref)
    }

    /// When something was last added or removed.
    pub fn changed_ns(&self) -> u64 {
        self.changed_ns
    }

    /// Unblocks; whether it was there.
    pub fn remove(&mut self, prefix: &IpPrefix, now_ns: u64) -> bool {
        self.changed_ns = now_ns;
        self.reasons.remove(prefix);
        self.forget(prefix)
    }

    fn forget(&mut self, prefix: &IpPrefix) -> bool {
        if is_single(prefix) {
            return self.addresses.remove(&prefix.address().to_canonical()).is_some();
        }
        let was_there = self.prefixes.remove(prefix).is_some();
        if was_there && let Some(count) = self.lengths.get_mut(&prefix.length_bits()) {
            *count -= 1;
            if *count == 0 {
                self.lengths.remove(&prefix.length_bits());
            }
        }
        was_there
    }

    /// The entry of exactly this address or prefix, expired or not.
    pub fn get(&self, prefix: &IpPrefix) -> Option<&BlockEntry> {
        if is_single(prefix) { self.addresses.get(&prefix.address()) } else { self.prefixes.get(prefix) }
    }

    /// Whether `address` is blocked now; counts the hit.
    pub fn hit(&mut self, address: IpAddr, now_ns: u64) -> bool {
        let address = address.to_canonical();
        if self.addresses.get_mut(&address).is_some_and(|entry| in_force(entry, now_ns)) {
            return true;
        }
        let prefixes = &mut self.prefixes;
        self.lengths.keys().rev().any(|&length| {
            IpPrefix::new(address, length)
                .ok()
                .and_then(|prefix| prefixes.get_mut(&prefix))
                .is_some_and(|entry| in_force(entry, now_ns))
        })
    }

    /// Whether `address` is blocked now, without counting it as a hit.
    pub fn contains(&self, address: IpAddr, now_ns: u64) -> bool {
        let address = address.to_canonical();
        let live = |entry: &BlockEntry| entry.expires_ns.is_none_or(|expires| expires > now_ns);
        self.addresses.get(&address).is_some_and(live)
            || self.lengths.keys().any(|&length| {
                let prefix = IpPrefix::new(address, length).ok();
                prefix.and_then(|prefix| self.prefixes.get(&prefix)).is_some_and(live)
            })
    }

    /// Every entry that has not expired.
    pub fn entries(&self, now_ns: u64) -> impl Iterator<Item = (IpPrefix, BlockEntry)> + '_ {
        let single = |(address, entry): (&IpAddr, &BlockEntry)| {
            let bits = if address.is_ipv4() { 32 } else { 128 };
            Some((IpPrefix::new(*address, bits).ok()?, *entry))
        };
        self.addresses
            .iter()
            .filter_map(single)
            .chain(self.prefixes.iter().map(|(prefix, entry)| (*prefix, *entry)))
            .filter(move |(_, entry)| entry.expires_ns.is_none_or(|expires| expires > now_ns))
    }

    /// Removes what has expired and says how many.
    pub fn sweep(&mut self, now_ns: u64) -> usize {
        let before = self.len();
        let live = |entry: &BlockEntry| entry.expires_ns.is_none_or(|expires| expires > now_ns);
        self.addresses.retain(|_, entry| live(entry));
        let gone: Vec<IpPrefix> =
            self.prefixes.iter().filter(|(_, entry)| !live(entry)).map(|(prefix, _)| *prefix).collect();
        for prefix in gone {
            self.forget(&prefix);
        }
        before - self.len()
    }

    /// How many entries there are, expired ones included.
    pub fn len(&self) -> usize {
        self.addresses.len() + self.prefixes.len()
    }

    /// How many of them are prefixes.
    pub fn prefixes(&self) -> usize {
        self.prefixes.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many addresses were evicted before their time.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Expired entries go first; then the least recently hit, until a hundredth of the list is free: one search pays
    /// for many insertions, even where entries expire one by one.
    fn make_room(&mut self, now_ns: u64) {
        self.sweep(now_ns);
        let by_age = self.addresses.iter().map(|(address, entry)| (entry.last_hit_ns, *address)).collect();
        for (_, address) in oldest(by_age, missing(self.addresses.len(), self.max_addresses)) {
            self.addresses.remove(&address);
            self.evicted += 1;
        }
    }

    /// The prefixes that make room for others.
    fn passing(&self) -> impl Iterator<Item = (&IpPrefix, &BlockEntry)> {
        self.prefixes.iter().filter(|(prefix, entry)| gives_way(prefix, entry.expires_ns))
    }

    /// Of these the least recently hit go, until a hundredth of what there may be is free.
    fn evict_prefixes(&mut self) {
        let by_age = self.passing().map(|(prefix, entry)| (entry.last_hit_ns, *prefix)).collect();
        for (_, prefix) in oldest(by_age, missing(self.prefixes.len(), self.max_prefixes)) {
            self.forget(&prefix);
            self.reasons.remove(&prefix);
            self.evicted += 1;
        }
    }
}

/// Whether a prefix makes room for others where there are too many: of IPv6 the network of one host, blocked for a time
/// as an address is. What is blocked for ever, or as long as a list has it (`u64::MAX`), is an operator's, and so is
/// any other prefix.
pub fn gives_way(prefix: &IpPrefix, expires_ns: Option<u64>) -> bool {
    let is_host = prefix.address().is_ipv6() && prefix.length_bits() == 64;
    is_host && expires_ns.is_some_and(|expires_ns| expires_ns < u64::MAX)
}

/// How many of `count` have to go for a hundredth of `max` to be free, or for one place at least.
fn missing(count: usize, max: usize) -> usize {
    (count + (max / 100).max(1)).saturating_sub(max)
}

/// So many of the first of `by_age`.
fn oldest<K: Ord>(mut by_age: Vec<(u64, K)>, victims: usize) -> Vec<(u64, K)> {
    if victims > 0 && by_age.len() > victims {
        by_age.select_nth_unstable(victims - 1);
    }
    by_age.truncate(victims);
    by_age
}

fn is_single(prefix: &IpPrefix) -> bool {
    prefix.length_bits() == if prefix.address().is_ipv4() { 32 } else { 128 }
}

fn in_force(entry: &mut BlockEntry, now_ns: u64) -> bool {
    if entry.expires_ns.is_some_and(|expires| expires <= now_ns) {
        return false;
    }
    entry.hits += 1;
    entry.last_hit_ns = now_ns;
    true
}

/// What is wrong with a line of a block list file.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("line {line}: `{text}`: {error}; expected ADDRESS or ADDRESS/LENGTH, and # before comments")]
pub struct ListFileError {
    /// Counted from 1.
    pub line: usize,
    /// What stands there, shortened.
    pub text: String,
    /// What is wrong.
    pub error: tidegate_core::PrefixError,
}

/// Reads a list of addresses and prefixes, one a line; `#` begins a comment. Nothing is taken from a list with an
/// error.
pub fn parse_list(text: &str) -> Result<Vec<IpPrefix>, ListFileError> {
    let mut prefixes = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let item = line.split('#').next().unwrap_or_default().trim();
        if item.is_empty() {
            continue;
        }
        prefixes.push(item.parse().map_err(|error| ListFileError {
            line: index + 1,
            text: item.chars().take(60).collect(),
            error,
        })?);
    }
    Ok(prefixes)
}

/// A block as a file keeps it over a restart: `ADDRESS/LENGTH UNTIL REASON`, where UNTIL is seconds since 1970 or `-`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SavedBlock {
    /// What is blocked.
    pub prefix: IpPrefix,
    /// When that ends, in seconds since 1970; `None`: never.
    pub until_unix_s: Option<u64>,
    /// Why, where somebody said it.
    pub reason: Option<String>,
}

impl std::fmt::Display for SavedBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ", self.prefix)?;
        match self.until_unix_s {
            None => f.write_str("-")?,
            Some(until) => write!(f, "{until}")?,
        }
        match &self.reason {
            None => Ok(()),
            // One line each, whatever the reason holds.
            Some(reason) => write!(f, " {}", reason.replace(char::is_control, " ")),
        }
    }
}

/// Why a line is no block that was saved.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SavedBlockError {
    /// What is blocked cannot be told.
    #[error(transparent)]
    Prefix(#[from] tidegate_core::PrefixError),
    /// When it ends cannot be told: that is never taken for "never".
    #[error("expected seconds since 1970 or - behind the prefix")]
    End,
}

impl std::str::FromStr for SavedBlock {
    type Err = SavedBlockError;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let mut words = line.splitn(3, ' ');
        let prefix = words.next().unwrap_or_default().parse()?;
        let until_unix_s = match words.next() {
            Some("-") => None,
            Some(word) => Some(word.parse().map_err(|_| SavedBlockError::End)?),
            None => return Err(SavedBlockError::End),
        };
        let reason = words.next().map(str::to_owned).filter(|reason| !reason.is_empty());
        Ok(Self { prefix, until_unix_s, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(text: &str) -> IpPrefix {
        text.parse().unwrap()
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn blocked_address_is_hit_until_it_expires() {
        let mut list = BlockList::new(10, 10);
        list.add(prefix("10.0.0.1"), Some(100), 0).unwrap();
        assert!(list.hit(address("::ffff:10.0.0.1"), 50));
        assert!(!list.hit(address("10.0.0.2"), 50));
        assert_eq!(list.entries(50).next().unwrap().1.hits, 1);
        assert!(!list.hit(address("10.0.0.1"), 100));
        assert_eq!(list.sweep(100), 1);
        assert!(list.is_empty());
    }

    #[test]
    fn expired_longer_prefix_does_not_hide_a_shorter_one() {
        let mut list = BlockList::new(10, 10);
        list.add(prefix("10.0.0.0/8"), None, 0).unwrap();
        list.add(prefix("10.1.0.0/16"), Some(10), 0).unwrap();
        assert!(list.hit(address("10.1.2.3"), 20));
        assert!(list.remove(&prefix("10.0.0.0/8"), 20));
        assert!(!list.hit(address("10.1.2.3"), 20));
    }

    #[test]
    fn full_list_evicts_the_least_recently_hit() {
        let mut list = BlockList::new(100, 1);
        for i in 0..100u8 {
            list.add(IpPrefix::new([10, 0, 0, i].into(), 32).unwrap(), None, u64::from(i)).unwrap();
        }
        assert!(list.hit(address("10.0.0.0"), 1000));
        list.add(prefix("10.0.1.0"), None, 1001).unwrap();
        assert_eq!((list.len(), list.evicted()), (100, 1));
        assert!(list.hit(address("10.0.0.0"), 1002));
        assert!(!list.hit(address("10.0.0.1"), 1002), "the least recently hit is gone");
        assert!(list.hit(address("10.0.0.2"), 1002));
        list.add(prefix("10.0.0.0/8"), None, 0).unwrap();
        assert_eq!(list.add(prefix("11.0.0.0/8"), None, 0), Err(BlockListError::PrefixesFull { max: 1 }));
    }

    #[test]
    fn full_list_whose_entries_expire_one_by_one_is_searched_once_for_many_insertions() {
        let single = |n: u32| IpPrefix::new(std::net::Ipv4Addr::from(n).into(), 32).unwrap();
        let network = |n: u32| prefix(&format!("2001:db8:0:{n:x}::/64"));
        for of in [&single as &dyn Fn(u32) -> IpPrefix, &network] {
            let mut list = BlockList::new(1_000, 1_000);
            for n in 0..1_000_u32 {
                list.add(of(n), Some(u64::from(n) + 10), 0).unwrap();
            }
            list.add(of(5_000), None, 10).unwrap();
            assert_eq!(list.len(), 991, "nine more need no search");
            assert_eq!(list.evicted(), 9, "one had expired");
        }
    }

    #[test]
    fn full_list_of_prefixes_evicts_hosts_of_ipv6_that_end_by_themselves_and_nothing_else() {
        let host = |n: u32| prefix(&format!("2001:db8:0:{n:x}::/64"));
        let mut list = BlockList::new(10, 300);
        list.add(prefix("10.0.0.0/8"), Some(9_000), 0).unwrap();
        list.add(prefix("2001:db8:1::/48"), Some(9_000), 0).unwrap();
        list.add(host(0xffff), None, 0).unwrap();
        list.add(host(0xfffe), Some(u64::MAX), 0).unwrap();
        for n in 0..1_000 {
            let one = host(n);
            assert!(list.has_room_for(&[one], u64::from(n) + 1));
            list.add(one, Some(9_000), u64::from(n) + 1).unwrap();
            assert!(list.prefixes() <= 300);
        }
        for kept in [prefix("10.0.0.0/8"), prefix("2001:db8:1::/48"), host(0xffff), host(0xfffe), host(999)] {
            assert!(list.get(&kept).is_some(), "{kept}");
        }
        assert!(list.get(&host(0)).is_none() && list.evicted() >= 700);
        // An operator always finds room, as far as it is not taken by operators.
        let nets: Vec<IpPrefix> =
            (0..296_u32).map(|n| prefix(&format!("10.{}.{}.0/24", n / 256, n % 256))).collect();
        assert!(list.has_room_for(&nets, 2_000));
        nets.iter().for_each(|net| list.add(*net, None, 2_000).unwrap());
        assert!(!list.has_room_for(&[host(1)], 2_000));
        assert_eq!(list.add(host(1), Some(9_000), 2_000), Err(BlockListError::PrefixesFull { max: 300 }));
    }

    #[test]
    fn saved_blocks_read_and_print_the_same() {
        for line in ["10.0.0.1/32 -", "10.0.0.0/8 1700000000 too many logins", "2001:db8::/32 - why"] {
            assert_eq!(line.parse::<SavedBlock>().unwrap().to_string(), line);
        }
        let odd = SavedBlock { prefix: prefix("10.0.0.1"), until_unix_s: None, reason: Some("a\nb".into()) };
        assert_eq!(odd.to_string(), "10.0.0.1/32 - a b");
        assert!(matches!("x 1 y".parse::<SavedBlock>(), Err(SavedBlockError::Prefix(_))));
        for damaged in
            ["10.0.0.1/32", "10.0.0.1/32 ", "10.0.0.1/32 17x0 errors", "10.0.0.1/32 -1", "1.2.3.0/24 -- a"]
        {
            assert_eq!(damaged.parse::<SavedBlock>(), Err(SavedBlockError::End), "{damaged}");
        }
    }

    #[test]
    fn reasons_are_kept_with_their_blocks_and_bounded() {
        let mut list = BlockList::new(100_000, 10);
        for i in 0..=MAX_REASONS as u32 {
            let one = IpPrefix::new(IpAddr::V4(i.into()), 32).unwrap();
            list.add(one, None, 1).unwrap();
            list.set_reason(one, &"x".repeat(100));
        }
        assert_eq!(list.reasons.len(), MAX_REASONS);
        let last = IpPrefix::new(IpAddr::V4((MAX_REASONS as u32).into()), 32).unwrap();
        assert_eq!(list.reason(&last).map(str::len), Some(MAX_REASON_CHARS));
        assert!(list.remove(&last, 2));
        assert_eq!((list.reason(&last), list.changed_ns()), (None, 2));
    }

    #[test]
    fn list_files_are_read_whole_or_refused_with_the_line() {
        let read = parse_list("# bad\n10.0.0.1\n\n 2001:db8::/32 # them\n").unwrap();
        assert_eq!(read, [prefix("10.0.0.1"), prefix("2001:db8::/32")]);
        let error = parse_list("10.0.0.1\nten\n").unwrap_err();
        assert_eq!((error.line, error.text.as_str()), (2, "ten"));
    }
}
