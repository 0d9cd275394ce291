//! Connection rules compiled into what three look-ups decide: class of the destination, class of the port, and the
//! longest source prefix within that pair. The kernel programs and [`crate::Policer`] use the same table.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use tidegate_core::IpPrefix;

use crate::{ConnectionRule, PortRange};

/// The winner for one source prefix within a pair of classes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SourceEntry {
    /// Class of the destination; 0 is what no rule names.
    pub destination_class: u16,
    /// Class of the port; 0 is what no rule names.
    pub port_class: u16,
    /// The source; of zero length for any.
    pub source: IpPrefix,
    /// Index of the rule that governs.
    pub rule: usize,
}

/// The part of the table for one address family.
#[derive(Clone, Debug, Default)]
pub struct FamilyTable {
    destinations: HashMap<IpPrefix, u16>,
    destination_lengths: BTreeSet<u8>,
    sources: HashMap<(u16, u16, IpPrefix), usize>,
    source_lengths: BTreeSet<u8>,
}

/// Why rules do not fit a table; the previous ones stay in force.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// A rule's two addresses can never meet in one connection.
    #[error("rule {rule}: source and destination are of different address families")]
    Families {
        /// Which rule, as text.
        rule: String,
    },
    /// Too many rules.
    #[error("{count} connection rules; at most {max} fit: join sources into prefixes, or use the block list")]
    TooMany {
        /// How many there are.
        count: usize,
        /// How many fit.
        max: usize,
    },
    /// The rules overlap in too many ways.
    #[error(
        "rule {rule}: with the rules before it there are more than {max} combinations of destination, ports \
             and source; use fewer distinct destinations or port ranges"
    )]
    TooComplex {
        /// The first rule that does not fit, as text.
        rule: String,
        /// How many combinations fit, per address family.
        max: usize,
    },
    /// A class that does not exist.
    #[error("rule {rule}: priority must be from 1 to {}", crate::MAX_CLASSES)]
    Class {
        /// Which rule, as text.
        rule: String,
    },
}

/// Connection rules, compiled.
#[derive(Clone, Debug)]
pub struct ConnectionTable {
    rules: Vec<ConnectionRule>,
    port_classes: Vec<u16>,
    v4: FamilyTable,
    v6: FamilyTable,
}

impl ConnectionTable {
    /// The most rules of one set.
    pub const MAX_RULES: usize = 4096;
    /// The most source entries per address family.
    pub const MAX_ENTRIES: usize = 65_536;

    /// Compiles rules; on error nothing has changed.
    pub fn compile(rules: &[ConnectionRule]) -> Result<Self, TableError> {
        if rules.len() > Self::MAX_RULES {
            return Err(TableError::TooMany { count: rules.len(), max: Self::MAX_RULES });
        }
        for rule in rules {
            if rule.class.is_some_and(|class| usize::from(class) >= crate::MAX_CLASSES) {
                return Err(TableError::Class { rule: rule.to_string() });
            }
            if let (Some(source), Some(destination)) = (rule.source, rule.destination.address)
                && source.address().is_ipv4() != destination.address().is_ipv4()
            {
                return Err(TableError::Families { rule: rule.to_string() });
            }
        }
        let (port_classes, classes_of) = port_classes(rules);
        let family = |any: &str| family_table(rules, &classes_of, any.parse().ok());
        Ok(Self { v4: family("0.0.0.0/0")?, v6: family("::/0")?, rules: rules.to_vec(), port_classes })
    }

    /// The rules, as they were given.
    pub fn rules(&self) -> &[ConnectionRule] {
        &self.rules
    }

    /// The class of each of the 65,536 ports.
    pub fn port_classes(&self) -> &[u16] {
        &self.port_classes
    }

    /// The entries for IPv4.
    pub fn v4(&self) -> &FamilyTable {
        &self.v4
    }

    /// The entries for IPv6.
    pub fn v6(&self) -> &FamilyTable {
        &self.v6
    }

    /// Index of the rule that governs a connection; IPv4-mapped addresses count as IPv4.
    pub fn lookup(&self, source: IpAddr, destination: IpAddr, port: u16) -> Option<usize> {
        let (source, destination) = (source.to_canonical(), destination.to_canonical());
        let family = if source.is_ipv4() { &self.v4 } else { &self.v6 };
        family.lookup(source, destination, self.port_classes[usize::from(port)])
    }
}

impl FamilyTable {
    /// Each destination prefix with its class.
    pub fn destinations(&self) -> impl Iterator<Item = (IpPrefix, u16)> + '_ {
        self.destinations.iter().map(|(prefix, class)| (*prefix, *class))
    }

    /// Each source entry, in no order.
    pub fn sources(&self) -> impl Iterator<Item = SourceEntry> + '_ {
        self.sources.iter().map(|(&(destination_class, port_class, source), &rule)| SourceEntry {
            destination_class,
            port_class,
            source,
            rule,
        })
    }

    fn lookup(&self, source: IpAddr, destination: IpAddr, port_class: u16) -> Option<usize> {
        let class = self
            .destination_lengths
            .iter()
            .rev()
            .find_map(|&length| self.destinations.get(&IpPrefix::new(destination, length).ok()?))
            .copied()
            .unwrap_or(0);
        self.source_lengths.iter().rev().find_map(|&length| {
            self.sources.get(&(class, port_class, IpPrefix::new(source, length).ok()?)).copied()
        })
    }
}

/// Ports that the same ranges contain form a class. Gives the class of each port and the classes of each range.
fn port_classes(rules: &[ConnectionRule]) -> (Vec<u16>, HashMap<PortRange, BTreeSet<u16>>) {
    let ranges: BTreeSet<PortRange> = rules.iter().map(|rule| rule.destination.ports).collect();
    let mut edges: BTreeMap<u32, Vec<PortRange>> = BTreeMap::from([(0, Vec::new())]);
    for range in &ranges {
        edges.entry(u32::from(range.first())).or_default().push(*range);
        edges.entry(u32::from(range.last()) + 1).or_default().push(*range);
    }
    let mut open: BTreeSet<PortRange> = BTreeSet::new();
    let mut known: HashMap<Vec<PortRange>, u16> = HashMap::from([(Vec::new(), 0)]);
    let mut class_of = vec![0u16; 65_536];
    let mut classes_of: HashMap<PortRange, BTreeSet<u16>> = HashMap::new();
    let starts: Vec<u32> = edges.keys().copied().chain([65_536]).collect();
    for ((&start, at_edge), &end) in edges.iter().zip(&starts[1..]) {
        for range in at_edge {
            if u32::from(range.first()) == start {
                open.insert(*range);
            } else {
                open.remove(range);
            }
        }
        // At most two edges per rule, so that classes fit 14 bits.
        let next = known.len() as u16;
        let class = *known.entry(open.iter().copied().collect()).or_insert(next);
        for range in &open {
            classes_of.entry(*range).or_default().insert(class);
        }
        for port in start..end.min(65_536) {
            class_of[port as usize] = class;
        }
    }
    (class_of, classes_of)
}

/// Combines each rule with every destination class and port class it can meet.
fn family_table(
    rules: &[ConnectionRule],
    classes_of: &HashMap<PortRange, BTreeSet<u16>>,
    any: Option<IpPrefix>,
) -> Result<FamilyTable, TableError> {
    let Some(any) = any else { return Ok(FamilyTable::default()) };
    let of_family = |prefix: Option<IpPrefix>| {
        prefix.is_none_or(|prefix| prefix.address().is_ipv4() == any.address().is_ipv4())
    };
    let relevant: Vec<(usize, &ConnectionRule)> = rules
        .iter()
        .enumerate()
        .filter(|(_, rule)| of_family(rule.source) && of_family(rule.destination.address))
        .collect();
    let prefixes: BTreeSet<IpPrefix> = relevant.iter().filter_map(|(_, r)| r.destination.address).collect();
    let mut table = FamilyTable::default();
    for (prefix, class) in prefixes.iter().zip(1u16..) {
        table.destinations.insert(*prefix, class);
        table.destination_lengths.insert(prefix.length_bits());
    }
    // Work is bounded besides entries: overlapping rules may fight over the same entry again and again.
    let mut steps = 0usize;
    for (index, rule) in relevant {
        let within = |prefix: IpPrefix| match rule.destination.address {
            None => true,
            Some(outer) => outer.length_bits() <= prefix.length_bits() && outer.contains(prefix.address()),
        };
        let mut destination_classes: Vec<u16> =
            if rule.destination.address.is_none() { vec![0] } else { vec![] };
        destination_classes.extend(table.destinations.iter().filter(|(p, _)| within(**p)).map(|(_, c)| *c));
        let source = rule.source.unwrap_or(any);
        for &destination_class in &destination_classes {
            for &port_class in &classes_of[&rule.destination.ports] {
                let winner = table.sources.entry((destination_class, port_class, source)).or_insert(index);
                if (rule.order(), index) < (rules[*winner].order(), *winner) {
                    *winner = index;
                }
                steps += 1;
                if table.sources.len() > ConnectionTable::MAX_ENTRIES
                    || steps > 64 * ConnectionTable::MAX_ENTRIES
                {
                    let max = ConnectionTable::MAX_ENTRIES;
                    return Err(TableError::TooComplex { rule: rule.to_string(), max });
                }
            }
        }
        table.source_lengths.insert(source.length_bits());
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::When;
    use proptest::prelude::*;

    fn rule(destination: &str, source: &str) -> ConnectionRule {
        let source = (source != "*").then(|| source.parse().unwrap());
        let destination = destination.parse().unwrap();
        ConnectionRule { destination, source, limit: None, when: When::Always, class: None }
    }

    fn lookup(table: &ConnectionTable, source: &str, destination: &str, port: u16) -> Option<usize> {
        table.lookup(source.parse().unwrap(), destination.parse().unwrap(), port)
    }

    #[test]
    fn table_2_of_the_paper_is_matched_most_specific_source_first() {
        let rules = [rule("*:80", "*"), rule("*:80", "10.1.1.1"), rule("12.1.1.1:80", "*")];
        let table = ConnectionTable::compile(&rules).unwrap();
        assert_eq!(lookup(&table, "9.9.9.9", "12.1.1.2", 80), Some(0));
        assert_eq!(lookup(&table, "10.1.1.1", "12.1.1.2", 80), Some(1));
        assert_eq!(lookup(&table, "9.9.9.9", "12.1.1.1", 80), Some(2));
        assert_eq!(lookup(&table, "10.1.1.1", "12.1.1.1", 80), Some(1));
        assert_eq!(lookup(&table, "10.1.1.1", "12.1.1.1", 81), None);
        assert_eq!(lookup(&table, "2001:db8::1", "2001:db8::2", 80), Some(0));
        assert_eq!(lookup(&table, "::ffff:10.1.1.1", "::ffff:12.1.1.1", 80), Some(1));
    }

    #[test]
    fn rule_of_two_families_is_refused_and_named() {
        let error = ConnectionTable::compile(&[rule("10.0.0.1:80", "::/0")]).unwrap_err();
        assert!(error.to_string().contains("10.0.0.1/32:80 from ::/0"), "{error}");
    }

    #[test]
    fn four_thousand_overlapping_destinations_and_ranges_end_in_an_error_not_in_memory() {
        let rules: Vec<_> = (0..4000u32)
            .map(|i| rule(&format!("10.0.{}.{}:{}-65535", i >> 8, i & 255, i), "*"))
            .chain([rule("*:*", "10.0.0.0/8")])
            .collect();
        assert!(matches!(ConnectionTable::compile(&rules), Err(TableError::TooComplex { .. })));
    }

    fn any_rule() -> impl Strategy<Value = ConnectionRule> {
        let prefix = (0u32..16, prop::sample::select(vec![0u8, 8, 30, 31, 32]), any::<bool>()).prop_map(
            |(host, length, v6)| match v6 {
                false => IpPrefix::new(IpAddr::V4((0x0a00_0000 | host).into()), length).unwrap(),
                true => IpPrefix::new(
                    IpAddr::V6((0x2001_0db8u128 << 96 | u128::from(host)).into()),
                    length.saturating_mul(4),
                )
                .unwrap(),
            },
        );
        let range =
            (70u16..90, 0u16..20).prop_map(|(first, more)| PortRange::new(first, first + more).unwrap());
        (prop::option::of(prefix.clone()), prop::option::of(prefix), range).prop_filter_map(
            "one family",
            |(source, address, ports)| {
                let same =
                    source.zip(address).is_none_or(|(a, b)| a.address().is_ipv4() == b.address().is_ipv4());
                let destination = crate::Destination { address, ports };
                same.then_some(ConnectionRule {
                    destination,
                    source,
                    limit: None,
                    when: When::Always,
                    class: None,
                })
            },
        )
    }

    proptest! {
        /// The table gives what trying every rule gives.
        #[test]
        fn table_agrees_with_trying_every_rule(
            rules in prop::collection::vec(any_rule(), 0..24),
            asked in prop::collection::vec((0u32..16, 0u32..16, 65u16..115, any::<bool>()), 1..60),
        ) {
            let table = ConnectionTable::compile(&rules).unwrap();
            for (source, destination, port, v6) in asked {
                let address = |host: u32| match v6 {
                    false => IpAddr::V4((0x0a00_0000 | host).into()),
                    true => IpAddr::V6((0x2001_0db8u128 << 96 | u128::from(host)).into()),
                };
                let (source, destination) = (address(source), address(destination));
                let expected = (0..rules.len())
                    .filter(|&i| rules[i].matches(source, destination, port))
                    .min_by_key(|&i| (rules[i].order(), i));
                let got = table.lookup(source, destination, port);
                // A rule for any source of one family is the same length as one for any source.
                prop_assert_eq!(got.map(|i| &rules[i]), expected.map(|i| &rules[i]));
            }
        }
    }
}
