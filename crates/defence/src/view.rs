//! What operators see of the trees: who is there, what it costs, and why it was decided on.

use std::net::IpAddr;

use tidegate_core::{Event, IpPrefix, NodeId, PrefixTree, Reason};

/// Addresses that one view shows.
const MAX_ROWS: usize = 256;

/// What somebody wants to see of every core's tree.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Wanted {
    /// Those who do most.
    Top(usize),
    /// One address, and each prefix around it.
    Address(IpAddr),
}

/// What one address or prefix has done within the sliding window.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Level {
    /// Which; `None` stands for everybody.
    pub prefix: Option<IpPrefix>,
    /// Counts in the order of [`Event::ALL`].
    pub counts: [u32; Event::ALL.len()],
    /// Connections open now, of a prefix those of all in it.
    pub open: u32,
    /// For addresses: why it is blocked, and for how many milliseconds still.
    pub blocked: Option<(Reason, u64)>,
    /// For prefixes: how long it is still suspect, in milliseconds.
    pub suspect_ms: Option<u64>,
}

/// One client in a list.
pub type ClientRow = Level;

impl Level {
    /// How often an event happened.
    pub fn count(&self, event: Event) -> u32 {
        self.counts[event as usize]
    }

    /// Adds what another core has seen of the same.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(other.counts).for_each(|(sum, count)| *sum = sum.saturating_add(count));
        self.open = self.open.saturating_add(other.open);
        self.blocked = self.blocked.max(other.blocked);
        self.suspect_ms = self.suspect_ms.max(other.suspect_ms);
    }
}

pub(crate) fn look(tree: &PrefixTree, wanted: &Wanted, now_ms: u64) -> Vec<Level> {
    match wanted {
        Wanted::Top(count) => {
            let requests =
                |id: &NodeId| tree.count(*id, Event::Request, now_ms).max(tree.open_connections(*id));
            let mut rows: Vec<(u32, NodeId)> = tree
                .ids()
                .filter(|id| tree.is_address(*id))
                .map(|id| (requests(&id), id))
                .filter(|(requests, id)| *requests > 0 || tree.mark(*id, now_ms).is_some())
                .collect();
            rows.sort_unstable_by_key(|(requests, _)| std::cmp::Reverse(*requests));
            rows.truncate((*count).min(MAX_ROWS));
            rows.into_iter().map(|(_, id)| level(tree, id, now_ms)).collect()
        }
        Wanted::Address(address) => {
            let up = std::iter::successors(tree.find(*address), |id| tree.parent(*id));
            up.map(|id| level(tree, id, now_ms)).collect()
        }
    }
}

fn level(tree: &PrefixTree, id: NodeId, now_ms: u64) -> Level {
    let mut counts = [0; Event::ALL.len()];
    for event in Event::ALL {
        counts[*event as usize] = tree.count(id, *event, now_ms);
    }
    let mark = tree.mark(id, now_ms);
    let left = |mark: tidegate_core::Mark| mark.until_ms - now_ms;
    let is_address = tree.is_address(id);
    Level {
        prefix: tree.prefix(id),
        counts,
        open: tree.open_connections(id),
        blocked: mark.filter(|_| is_address).and_then(|mark| {
            let reason = Reason::ALL.get(usize::from(mark.kind))?;
            Some((*reason, left(mark)))
        }),
        suspect_ms: mark.filter(|_| !is_address).map(left),
    }
}
