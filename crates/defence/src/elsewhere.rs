//! What data cores tell each other of their trees, four times a second and off the way of requests: who does most, who
//! is there at all if they are few, and which prefixes are suspect. A client or a botnet whose connections the kernel
//! has spread over all cores is judged by the sum.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use tidegate_core::{Event, IpPrefix, Mark, NodeId, PrefixTree};

use crate::memory::{list_bytes, table_bytes};

/// Nodes that each core tells of.
const MAX_ROWS: usize = 1_024;
/// Addresses that each core tells of because they are there at all.
const MAX_PRESENT: usize = 8;
/// Less than the time between two ticks.
const INTERVAL_MS: u64 = 200;

/// Counts in the order of [`Event::ALL`].
type Counts = [u32; Event::ALL.len()];

#[derive(Clone, Copy, Debug)]
struct Row {
    prefix: IpPrefix,
    told: Told,
}

/// What a core tells of an address or prefix.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    counts: Counts,
    open: u32,
    suspect: Option<Suspicion>,
}

/// A mark of a prefix, with times that mean the same on every core's clock.
#[derive(Clone, Copy, Debug)]
struct Suspicion {
    age_ms: u64,
    left_ms: u64,
    kind: u8,
}

#[derive(Debug, Default)]
struct OfCore {
    known: HashSet<NodeId>,
    rows: Vec<Row>,
    /// Some of the addresses that are there; all of them, if they are few.
    present: BTreeSet<IpPrefix>,
    exchanged_ms: Option<u64>,
}

/// What each core has told last.
#[derive(Debug, Default)]
pub(crate) struct Elsewhere {
    cores: Vec<OfCore>,
}

impl Elsewhere {
    /// The most that one core is told of.
    pub(crate) const fn most_told(cores: usize) -> usize {
        cores.saturating_sub(1) * MAX_ROWS
    }

    /// The most memory that this takes, with what one exchange needs: there is one at a time.
    pub(crate) const fn most_bytes(cores: usize) -> usize {
        let weighed = MAX_ROWS + PrefixTree::MAX_ACTIVE;
        let of_core = size_of::<OfCore>()
            + table_bytes::<NodeId>(weighed)
            + list_bytes::<Row>(MAX_ROWS)
            // A tree's pages are half full at least.
            + 2 * MAX_PRESENT * size_of::<IpPrefix>();
        let sums = 2 * Self::most_told(cores) * size_of::<(IpPrefix, Told)>();
        cores * of_core + list_bytes::<(u32, NodeId)>(weighed) + sums
    }

    /// Takes what this core's tree has to tell, and gives the tree what the others have told.
    pub(crate) fn exchange(&mut self, core: usize, tree: &mut PrefixTree, now_ms: u64) {
        if self.cores.len() <= core {
            self.cores.resize_with(core + 1, OfCore::default);
        }
        let own = &mut self.cores[core];
        if own.exchanged_ms.is_some_and(|last| now_ms.saturating_sub(last) < INTERVAL_MS) {
            return;
        }
        own.exchanged_ms = Some(now_ms);
        own.take(tree, now_ms);
        self.give(core, tree, now_ms);
    }

    fn give(&self, core: usize, tree: &mut PrefixTree, now_ms: u64) {
        let present: BTreeSet<&IpPrefix> = self.cores.iter().flat_map(|other| &other.present).collect();
        tree.set_present_everywhere(present.len() as u32);
        let mut sums: BTreeMap<IpPrefix, Told> = BTreeMap::new();
        let others = self.cores.iter().enumerate().filter(|(index, _)| *index != core);
        for Row { prefix, told } in others.flat_map(|(_, other)| &other.rows) {
            let sum = sums.entry(*prefix).or_default();
            sum.counts.iter_mut().zip(told.counts).for_each(|(sum, count)| *sum = sum.saturating_add(count));
            sum.open = sum.open.saturating_add(told.open);
            sum.suspect = sum.suspect.or(told.suspect);
        }
        tree.forget_elsewhere();
        for (prefix, Told { counts, open, suspect }) in sums {
            let Some(id) = tree.find_prefix(prefix) else { continue };
            tree.set_elsewhere(id, counts, open);
            if let Some(Suspicion { age_ms, left_ms, kind }) = suspect
                && tree.mark(id, now_ms).is_none()
            {
                let since_ms = now_ms.saturating_sub(age_ms);
                tree.set_mark(id, Mark { since_ms, until_ms: now_ms + left_ms, kind });
            }
        }
    }
}

impl OfCore {
    fn take(&mut self, tree: &mut PrefixTree, now_ms: u64) {
        let mut ids: HashSet<NodeId> = std::mem::take(&mut self.known);
        ids.extend(tree.take_active());
        let weigh = |id| (weight(tree, id, now_ms), id);
        let mut found: Vec<(u32, NodeId)> =
            ids.into_iter().map(weigh).filter(|(weight, _)| *weight > 0).collect();
        found.sort_unstable_by_key(|(weight, _)| std::cmp::Reverse(*weight));
        found.truncate(MAX_ROWS);
        self.rows = found.iter().filter_map(|(_, id)| row(tree, *id, now_ms)).collect();
        self.known = found.into_iter().map(|(_, id)| id).collect();
        self.present = tree.present(now_ms).take(MAX_PRESENT).collect();
    }
}

/// By how many times what it does is worth telling.
fn weight(tree: &PrefixTree, id: NodeId, now_ms: u64) -> u32 {
    let times = |event: &Event| tree.count(id, *event, now_ms) / event.worth_telling();
    let open = tree.open_connections(id) / PrefixTree::OPEN_WORTH_TELLING;
    Event::ALL.iter().map(times).fold(open, u32::saturating_add)
}

fn row(tree: &PrefixTree, id: NodeId, now_ms: u64) -> Option<Row> {
    let prefix = tree.prefix(id)?;
    let mut counts = Counts::default();
    Event::ALL.iter().for_each(|event| counts[*event as usize] = tree.count(id, *event, now_ms));
    // A block of an address goes the way of all blocks.
    let mark = tree.mark(id, now_ms).filter(|_| !tree.is_address(id));
    let suspect = mark.map(|mark| Suspicion {
        age_ms: now_ms.saturating_sub(mark.since_ms),
        left_ms: mark.until_ms.saturating_sub(now_ms),
        kind: mark.kind,
    });
    Some(Row { prefix, told: Told { counts, open: tree.open_connections(id), suspect } })
}
