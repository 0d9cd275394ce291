//! Putting a rule set into the maps: compiled beside the one in force, then switched to with one write.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::os::fd::{AsFd, AsRawFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use tidegate_core::IpPrefix;
use tidegate_policy::{
    Action, Class, ConnectionTable, FamilyTable, PathPattern, Profile, RequestRule, RequestTable, RuleSet,
    When,
};
use zerocopy::{FromZeros, Immutable, IntoBytes};

use crate::abi;
use crate::maps::{Maps, create_inner, write_many};
use crate::report::{Mechanism, Why};
use crate::{GateError, system};

/// What of request rules the kernel can enforce here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Abilities {
    pub(crate) segments: bool,
    pub(crate) string_search: bool,
    /// Whether a server in this process asks about every request, and so counts what the kernel leaves to it.
    pub(crate) server_asks: bool,
}

/// The set in force: which slot of `states` each rule has, by what it matches.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    in_force: HashMap<String, u32>,
    entries: Entries,
}

/// Rules as the kernel programs have them, in the order of the configuration.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entries {
    pub(crate) requests: Vec<abi::tg_rule>,
    pub(crate) connections: Vec<abi::tg_rule>,
}

/// A set that lies beside the one in force.
pub(crate) struct Prepared {
    target: u32,
    slots: HashMap<String, u32>,
    pub(crate) entries: Entries,
}

struct Placed {
    slot: u32,
    fresh: bool,
}

/// One rule's place in `states` and its entry in `labels`.
struct Described {
    placed: Placed,
    label: abi::tg_label,
}

impl Slots {
    /// Compiles `rules` beside those in force. None of their slots is given to another rule: whoever still goes by
    /// those in force meets no other ones. Those of the set before are free.
    pub(crate) fn prepare(
        &self,
        maps: &Maps,
        rules: &RuleSet,
        abilities: Abilities,
    ) -> Result<Prepared, GateError> {
        let table = ConnectionTable::compile(&rules.connections)?;
        if rules.requests.len() > RequestTable::MAX_RULES {
            let count = rules.requests.len();
            return Err(GateError::TooManyRequests { count, max: RequestTable::MAX_RULES });
        }
        let requests = RequestTable::new(&rules.requests);
        let mut next = Next {
            before: &self.in_force,
            taken: self.in_force.values().copied().collect(),
            lowest_free: 0,
            slots: HashMap::new(),
        };
        let target = 1 - (maps.control(abi::TG_CONTROL_GENERATION)? & 1) as u32;
        let mut described = Vec::new();

        let connection_rules = next.connection_rules(&table, rules, &mut described);
        put_ports(maps, target, &table, rules)?;
        put_family(maps, target, &V4, table.v4(), &connection_rules)?;
        put_family(maps, target, &V6, table.v6(), &connection_rules)?;
        let (compiled, entries) = next.request_rules(&requests, rules, abilities, &mut described)?;
        if abilities.segments {
            put_requests(maps, target, &compiled)?;
        }
        let now_ns = system::now_ns();
        let before: HashMap<u32, &abi::tg_rule> = self
            .entries
            .connections
            .iter()
            .chain(&self.entries.requests)
            .map(|rule| (rule.slot, rule))
            .collect();
        let after: HashMap<u32, &abi::tg_rule> =
            connection_rules.iter().chain(&entries).map(|rule| (rule.slot, rule)).collect();
        for Described { placed: Placed { slot, fresh }, label } in &described {
            let rule = after.get(slot);
            if *fresh {
                maps.write("states", slot, &abi::tg_state::new_zeroed())?;
                maps.write("buckets", slot, &full_bucket(rule.map_or(0, |rule| rule.fill_ns), now_ns))?;
            } else if let (Some(before), Some(after)) = (before.get(slot), rule) {
                keep_tokens(maps, before, after, now_ns)?;
            }
            maps.write("labels", slot, label)?;
        }
        let entries = Entries { requests: entries, connections: connection_rules };
        Ok(Prepared { target, slots: next.slots, entries })
    }

    /// Takes note that what was prepared is in force.
    pub(crate) fn settle(&mut self, maps: &Maps, prepared: Prepared) -> Result<(), GateError> {
        let Prepared { slots, entries, .. } = prepared;
        let kept: HashSet<u32> = slots.values().copied().collect();
        let before = std::mem::replace(&mut self.in_force, slots);
        self.entries = entries;
        before
            .values()
            .filter(|slot| !kept.contains(slot))
            .try_for_each(|slot| maps.write("labels", slot, &abi::tg_label::new_zeroed()))
    }
}

impl Prepared {
    /// Puts it in force for the kernel programs, with one write.
    pub(crate) fn switch(&self, maps: &Maps) -> Result<(), GateError> {
        maps.set_control(abi::TG_CONTROL_GENERATION, u64::from(self.target))
    }
}

/// The rule set in the making.
struct Next<'a> {
    before: &'a HashMap<String, u32>,
    /// Slots of the set in force, and of this one.
    taken: HashSet<u32>,
    /// No slot below is free.
    lowest_free: u32,
    slots: HashMap<String, u32>,
}

/// Request rules, compiled.
struct Requests {
    paths: Vec<(abi::tg_path, abi::tg_rule)>,
    cookies: Vec<(abi::tg_cookie, abi::tg_rule)>,
    patterns: Box<abi::tg_patterns>,
}

impl Next<'_> {
    /// A rule that matches what one before matched keeps its tokens and counters.
    fn place(&mut self, matches: String) -> Placed {
        // The same rule twice: only the first ever governs.
        let key = (0..).map(|n| format!("{n} {matches}")).find(|key| !self.slots.contains_key(key));
        let key = key.unwrap_or(matches);
        let kept = self.before.get(&key).copied();
        let slot = kept.unwrap_or_else(|| {
            // There is room for two sets of the greatest size.
            while self.taken.contains(&self.lowest_free) {
                self.lowest_free += 1;
            }
            self.lowest_free
        });
        self.taken.insert(slot);
        self.slots.insert(key, slot);
        Placed { slot, fresh: kept.is_none() }
    }

    fn connection_rules(
        &mut self,
        table: &ConnectionTable,
        rules: &RuleSet,
        described: &mut Vec<Described>,
    ) -> Vec<abi::tg_rule> {
        let lowest = rules.classes() as u32 - 1;
        let compile = |(order, rule): (usize, &tidegate_policy::ConnectionRule)| {
            let placed = self.place(format!("connection {:?} {:?}", rule.destination, rule.source));
            let mut compiled = kernel_rule(placed.slot, rule.limit, rule.when, rule.class);
            compiled.class = rule.class.map_or(lowest, u32::from);
            let label = label(abi::TG_LABEL_CONNECTION, order, rule, Mechanism::Xdp, Why::Earliest);
            described.push(Described { placed, label });
            compiled
        };
        table.rules().iter().enumerate().map(compile).collect()
    }

    fn request_rules(
        &mut self,
        table: &RequestTable,
        rules: &RuleSet,
        abilities: Abilities,
        described: &mut Vec<Described>,
    ) -> Result<(Requests, Vec<abi::tg_rule>), GateError> {
        let mut entries = vec![abi::tg_rule::new_zeroed(); table.rules().len()];
        let mut compiled = Requests { paths: Vec::new(), cookies: Vec::new(), patterns: zeroed()? };
        let mut seen = HashSet::new();
        let mut blind = false;
        for (rank, &index) in table.by_rank().iter().enumerate() {
            let rule = &table.rules()[index];
            let placed = self.place(format!("request {:?} {:?}", rule.path, rule.cookie));
            let mut why = reason(rule, rules, abilities, &compiled);
            if why == Why::Earliest && blind {
                why = Why::AfterServerRule;
            }
            let mut entry = kernel_rule(placed.slot, rule.limit, rule.when, rule.class);
            entry.rank = rank as u32;
            entry.class = rule.class.map_or(rules.classes() as u32 - 1, u32::from);
            if rule.action.is_some() && rule.limit.is_none() {
                entry.flags |= abi::TG_RULE_REFUSE;
            }
            if rule.violation() == Some(Action::Reset) {
                entry.flags |= abi::TG_RULE_RESET;
            }
            // To refuse nothing takes no server; where none asks, the kernel counts.
            let counted = why == Why::PriorityOnly && !abilities.server_asks && !blind;
            if why != Why::Earliest && !counted {
                entry.flags |= abi::TG_RULE_ELSEWHERE;
            }
            entries[index] = entry;
            if !compiled.add(rule, entry, why, &mut seen) {
                blind = true;
            }
            let at_tc = why == Why::Earliest || (counted && rule.class.is_none());
            let mechanism = if at_tc { Mechanism::Tc } else { Mechanism::Server };
            let label = label(abi::TG_LABEL_REQUEST, index, rule, mechanism, why);
            described.push(Described { placed, label });
        }
        Ok((compiled, entries))
    }
}

impl Requests {
    /// Adds a rule in the order of rank; `false` if the kernel cannot even recognize what it is about, so that every
    /// rule after it has to be left to the server too.
    fn add(
        &mut self,
        rule: &RequestRule,
        entry: abi::tg_rule,
        why: Why,
        seen: &mut HashSet<(u32, Vec<u8>)>,
    ) -> bool {
        let literal = rule.path.literal().as_bytes();
        if rule.cookie.is_none()
            && let PathPattern::Any | PathPattern::Exact(_) | PathPattern::Prefix(_) = rule.path
        {
            // Too long: whatever begins like it is left to the server.
            let ends: &[&[u8]] = match rule.path {
                PathPattern::Exact(_) if literal.len() < abi::TG_PATH_BYTES as usize => &[b" ", b"?"],
                _ => &[b""],
            };
            for end in ends {
                let mut text = [literal, *end].concat();
                text.truncate(abi::TG_PATH_BYTES as usize);
                let key = path_key(&text);
                if seen.insert((key.length_bits, text)) {
                    self.paths.push((key, entry));
                }
            }
            return true;
        }
        if let Why::TooLong | Why::TooManyPatterns | Why::NoStringSearch = why {
            return false;
        }
        self.patterns.cookies |= u32::from(rule.cookie.is_some());
        if let (Some(cookie), PathPattern::Any) = (&rule.cookie, &rule.path) {
            // Of several about the same cookie the first governs.
            let text = cookie.to_string().into_bytes();
            if seen.insert((0, text.clone())) {
                self.cookies.push((cookie_key(&text), entry));
            }
            return true;
        }
        let place = self.patterns.count as usize;
        let Some(pattern) = self.patterns.pattern.get_mut(place) else { return false };
        pattern.rule = entry;
        (pattern.path_kind, pattern.path_length) = (path_kind(&rule.path), literal.len() as u32);
        pattern.path[..literal.len()].copy_from_slice(literal);
        if let Some(cookie) = &rule.cookie {
            let (text, inner, last) = (format!(" {cookie}"), format!(" {cookie};"), format!(" {cookie}\r"));
            pattern.cookie_length = text.len() as u32;
            pattern.cookie[..text.len()].copy_from_slice(text.as_bytes());
            pattern.cookie_inner[..inner.len()].copy_from_slice(inner.as_bytes());
            pattern.cookie_last[..last.len()].copy_from_slice(last.as_bytes());
        }
        self.patterns.count += 1;
        true
    }
}

/// Why a request rule is enforced at TC or not.
fn reason(rule: &RequestRule, rules: &RuleSet, abilities: Abilities, compiled: &Requests) -> Why {
    let search = match rule.path {
        PathPattern::Any => false,
        PathPattern::Exact(_) | PathPattern::Prefix(_) => rule.cookie.is_some(),
        PathPattern::Suffix(_) | PathPattern::Infix(_) => true,
    };
    let path_bytes = abi::TG_PATH_BYTES as usize - usize::from(matches!(rule.path, PathPattern::Exact(_)));
    let cookie_bytes = rule.cookie.as_ref().map_or(0, |cookie| cookie.to_string().len());
    if !abilities.segments {
        Why::NoTc
    } else if rules.ports_with_requests_in_segments().next().is_none() {
        Why::NoHttpPort
    } else if rule.path.literal().len() > path_bytes || cookie_bytes > abi::TG_COOKIE_BYTES as usize {
        Why::TooLong
    } else if search && !abilities.string_search {
        Why::NoStringSearch
    } else if search && compiled.patterns.count >= abi::TG_MAX_PATTERNS {
        Why::TooManyPatterns
    } else {
        match rule.violation() {
            None => Why::PriorityOnly,
            Some(Action::Refuse) => Why::OnlyServerAnswers,
            Some(_) => Why::Earliest,
        }
    }
}

fn path_kind(path: &PathPattern) -> u32 {
    match path {
        PathPattern::Any => abi::TG_PATH_ANY,
        PathPattern::Exact(_) => abi::TG_PATH_EXACT,
        PathPattern::Prefix(_) => abi::TG_PATH_PREFIX,
        PathPattern::Suffix(_) => abi::TG_PATH_SUFFIX,
        PathPattern::Infix(_) => abi::TG_PATH_INFIX,
    }
}

fn cookie_key(text: &[u8]) -> abi::tg_cookie {
    let mut key = abi::tg_cookie::new_zeroed();
    key.text[..text.len()].copy_from_slice(text);
    key
}

fn path_key(text: &[u8]) -> abi::tg_path {
    let mut key = abi::tg_path::new_zeroed();
    key.length_bits = text.len() as u32 * 8;
    key.text[..text.len()].copy_from_slice(text);
    key
}

pub(crate) fn kernel_rule(
    slot: u32,
    limit: Option<Profile>,
    when: When,
    class: Option<Class>,
) -> abi::tg_rule {
    let mut rule = abi::tg_rule::new_zeroed();
    rule.slot = slot;
    if let Some(limit) = limit {
        rule.flags |= abi::TG_RULE_LIMITED;
        rule.token_ns = limit.token_ns();
        // Whole tokens, as the kernel programs round each.
        rule.fill_ns = rule.token_ns * u64::from(limit.burst());
    }
    if class.is_some() {
        rule.flags |= abi::TG_RULE_CLASSED;
    }
    if when == When::Overload {
        rule.flags |= abi::TG_RULE_ON_OVERLOAD;
    }
    rule
}

/// The time at which a bucket that is full now would have been empty.
fn full_bucket(fill_ns: u64, now_ns: u64) -> i64 {
    now_ns as i64 - fill_ns as i64
}

/// A bucket is a time: where a token is to take more or less of it than before, it is set so that it holds as many
/// tokens as before. What is taken at just this moment may be taken for nothing.
pub(crate) fn keep_tokens(
    maps: &Maps,
    before: &abi::tg_rule,
    after: &abi::tg_rule,
    now_ns: u64,
) -> Result<(), GateError> {
    // Of what was not limited nobody took a token.
    if before.token_ns == after.token_ns || before.token_ns == 0 || after.token_ns == 0 {
        return Ok(());
    }
    let empty_ns: i64 = maps.read("buckets", &after.slot)?.unwrap_or_default();
    let held_ns = (now_ns as i64 - empty_ns).clamp(0, before.fill_ns as i64);
    let kept_ns = i128::from(held_ns) * i128::from(after.token_ns) / i128::from(before.token_ns);
    let kept_ns = u64::try_from(kept_ns).unwrap_or(u64::MAX).min(after.fill_ns);
    maps.write("buckets", &after.slot, &full_bucket(kept_ns, now_ns))
}

fn label(kind: u32, order: usize, rule: &impl Display, mechanism: Mechanism, why: Why) -> abi::tg_label {
    let mut label = abi::tg_label::new_zeroed();
    (label.kind, label.order) = (kind, order as u32);
    (label.mechanism, label.why) = (mechanism as u32, why as u32);
    let text = rule.to_string();
    let length =
        (0..=label.text.len().min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    label.text[..length].copy_from_slice(&text.as_bytes()[..length]);
    label
}

/// Names and key types of one address family.
struct Family<D, S> {
    destinations: &'static str,
    sources: &'static str,
    hosts: &'static str,
    destination: fn(&IpPrefix) -> D,
    source: fn(u16, u16, &IpPrefix) -> S,
}

pub(crate) fn prefix4(prefix: &IpPrefix) -> abi::tg_prefix4 {
    abi::tg_prefix4 { length_bits: prefix.length_bits().into(), address: octets(prefix) }
}

pub(crate) fn prefix6(prefix: &IpPrefix) -> abi::tg_prefix6 {
    abi::tg_prefix6 { length_bits: prefix.length_bits().into(), address: octets(prefix) }
}

/// The two families differ in the length of an address alone.
macro_rules! family {
    ($prefix:ident, $source:ident, $destinations:literal, $sources:literal, $hosts:literal) => {
        Family {
            destinations: $destinations,
            sources: $sources,
            hosts: $hosts,
            destination: $prefix,
            source: |destination_class, port_class, prefix| abi::$source {
                length_bits: abi::TG_SOURCE_CLASS_BITS + u32::from(prefix.length_bits()),
                destination_class,
                port_class,
                address: octets(prefix),
            },
        }
    };
}

const V4: Family<abi::tg_prefix4, abi::tg_source4> =
    family!(prefix4, tg_source4, "destinations4", "sources4", "hosts4");
const V6: Family<abi::tg_prefix6, abi::tg_source6> =
    family!(prefix6, tg_source6, "destinations6", "sources6", "hosts6");

/// The address in network byte order; of the other family, zeroes.
fn octets<const N: usize>(prefix: &IpPrefix) -> [u8; N] {
    let mut bytes = [0; N];
    match prefix.address() {
        std::net::IpAddr::V4(v4) if N == 4 => bytes.copy_from_slice(&v4.octets()),
        std::net::IpAddr::V6(v6) if N == 16 => bytes.copy_from_slice(&v6.octets()),
        _ => {}
    }
    bytes
}

/// Too large for the stack.
fn zeroed<T: FromZeros>() -> Result<Box<T>, GateError> {
    let no_memory = |_| std::io::Error::from(std::io::ErrorKind::OutOfMemory);
    T::new_box_zeroed().map_err(no_memory).map_err(GateError::io("compiling rules"))
}

fn put_ports(maps: &Maps, target: u32, table: &ConnectionTable, rules: &RuleSet) -> Result<(), GateError> {
    let mut ports: Box<abi::tg_ports> = zeroed()?;
    ports.class_of.copy_from_slice(table.port_classes());
    for port in rules.ports_with_requests_in_segments() {
        ports.class_of[usize::from(port)] |= abi::TG_PORT_HTTP as u16;
    }
    for port in (0..=u16::MAX).filter(|port| !rules.covers(*port) || rules.is_proxied(*port)) {
        let class = &mut ports.class_of[usize::from(port)];
        *class = (*class & abi::TG_PORT_HTTP as u16) | abi::TG_PORT_OUTSIDE as u16;
    }
    ports.classes = rules.classes() as u32;
    ports.lengths4 = lengths(table.v4());
    ports.lengths6 = lengths(table.v6());
    put_array(maps, "ports", target, &*ports)
}

/// Fills one entry of a map of maps with an array of one value.
fn put_array<V: IntoBytes + Immutable>(
    maps: &Maps,
    name: &'static str,
    target: u32,
    value: &V,
) -> Result<(), GateError> {
    let inner = create_inner(MapType::Array, name, size_of::<u32>(), size_of::<V>(), 1)?;
    inner
        .update(0u32.as_bytes(), value.as_bytes(), MapFlags::ANY)
        .map_err(GateError::kernel("writing a map"))?;
    point(maps, name, target, &inner)
}

/// Fills one entry of a map of maps; without entries it stays empty and costs no look-up.
fn put_map<K, V>(
    maps: &Maps,
    kind: MapType,
    name: &'static str,
    target: u32,
    entries: &[(K, V)],
    bound: u32,
) -> Result<(), GateError>
where
    K: IntoBytes + Immutable,
    V: IntoBytes + Immutable,
{
    if entries.is_empty() {
        maps.remove(name, &target)?;
        return Ok(());
    }
    let inner = create_inner(kind, name, size_of::<K>(), size_of::<V>(), bound)?;
    write_many(&inner, entries)?;
    point(maps, name, target, &inner)
}

/// The kernel waits for packets that still use the map that was there.
fn point(maps: &Maps, name: &'static str, target: u32, inner: &MapHandle) -> Result<(), GateError> {
    maps.write(name, &target, &inner.as_fd().as_raw_fd())
}

/// Sources from which on a look-up per prefix length is cheaper than the way down a trie.
const MANY_SOURCES: usize = 64;

/// The prefix lengths of the sources, if there are many sources of few lengths.
fn lengths(table: &FamilyTable) -> abi::tg_lengths {
    let mut found: Vec<u8> = table.sources().map(|entry| entry.source.length_bits()).collect();
    let mut lengths = abi::tg_lengths::new_zeroed();
    let sources = found.len();
    found.sort_unstable_by(|a, b| b.cmp(a));
    found.dedup();
    if sources < MANY_SOURCES || found.len() > lengths.length_bits.len() {
        return lengths;
    }
    lengths.count = found.len() as u32;
    for (index, bits) in found.iter().enumerate() {
        lengths.length_bits[index] = abi::TG_SOURCE_CLASS_BITS + u32::from(*bits);
        let mask = u128::MAX.checked_shl(128 - u32::from(*bits)).unwrap_or(0);
        lengths.mask[index] = mask.to_be_bytes();
    }
    lengths
}

fn put_family<D, S>(
    maps: &Maps,
    target: u32,
    family: &Family<D, S>,
    table: &FamilyTable,
    rules: &[abi::tg_rule],
) -> Result<(), GateError>
where
    D: IntoBytes + Immutable,
    S: IntoBytes + Immutable,
{
    let destinations: Vec<(D, u32)> = table
        .destinations()
        .map(|(prefix, class)| ((family.destination)(&prefix), u32::from(class)))
        .collect();
    put_map(maps, MapType::LpmTrie, family.destinations, target, &destinations, abi::TG_MAX_DESTINATIONS)?;
    let sources: Vec<(S, abi::tg_rule)> = table
        .sources()
        .map(|entry| {
            let key = (family.source)(entry.destination_class, entry.port_class, &entry.source);
            (key, rules[entry.rule])
        })
        .collect();
    // One of the two stays empty.
    let (in_trie, in_hash) = match lengths(table).count {
        0 => (&sources[..], &[][..]),
        _ => (&[][..], &sources[..]),
    };
    put_map(maps, MapType::LpmTrie, family.sources, target, in_trie, abi::TG_MAX_SOURCES)?;
    put_map(maps, MapType::Hash, family.hosts, target, in_hash, abi::TG_MAX_SOURCES)
}

fn put_requests(maps: &Maps, target: u32, requests: &Requests) -> Result<(), GateError> {
    put_map(maps, MapType::LpmTrie, "paths", target, &requests.paths, abi::TG_MAX_PATHS)?;
    put_map(maps, MapType::Hash, "cookies", target, &requests.cookies, abi::TG_MAX_COOKIES)?;
    put_array(maps, "patterns", target, &*requests.patterns)
}
