//! What is known of nodes beyond their own counters: who was active lately, what other owners' trees have told of the
//! same addresses and prefixes, and who was asked to prove something.

use super::{Event, NodeId, PrefixTree};
use crate::IpPrefix;

/// Addresses that are remembered of each window: enough to tell whether a client is nearly alone.
const PRESENT: usize = 3;

/// Counts in the order of [`Event::ALL`].
type Counts = [u32; Event::ALL.len()];

/// Which nodes were active, and what others have told.
#[derive(Debug, Default)]
pub(super) struct Elsewhere {
    /// Who was active since [`PrefixTree::take_active`]; at most [`PrefixTree::MAX_ACTIVE`].
    active: Vec<NodeId>,
    /// A node's [`Told`] is its place here.
    told: Vec<(NodeId, Counts, u32)>,
    /// Some of the addresses that did something in this window and in the one before.
    present: [Present; 2],
    /// How many addresses there are here and elsewhere, as far as they are told.
    addresses: u32,
}

/// Some of the addresses that did something in a window.
#[derive(Debug, Default)]
struct Present {
    window: u32,
    ids: Vec<NodeId>,
}

/// Where it stands what others have told of a node.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Told(Option<std::num::NonZeroU32>);

/// In how many windows an address was asked to prove something, and did not.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Strikes {
    count: u16,
    /// The window of the last one.
    window: u32,
}

impl Elsewhere {
    /// The most memory that this takes where it is told of so many nodes. A list that grows takes up to half as much
    /// again while it is moved.
    pub(super) const fn most_bytes(told: usize) -> usize {
        let active = PrefixTree::MAX_ACTIVE * size_of::<NodeId>();
        let told = told.next_power_of_two() * size_of::<(NodeId, Counts, u32)>();
        let present = 2 * PRESENT.next_power_of_two() * size_of::<NodeId>();
        (active + told + present) * 3 / 2
    }

    /// Remembers that a node has counted another [`PrefixTree::LOOK_EVERY`] requests.
    pub(super) fn was_active(&mut self, id: NodeId) {
        if self.active.len() < PrefixTree::MAX_ACTIVE {
            self.active.push(id);
        }
    }

    /// Remembers that an address did something for the first time in a window.
    pub(super) fn was_present(&mut self, id: NodeId, window: u32) {
        if self.present[0].window != window {
            self.present.swap(0, 1);
            self.present[0].window = window;
            self.present[0].ids.clear();
        }
        if self.present[0].ids.len() < PRESENT {
            self.present[0].ids.push(id);
        }
    }

    /// How often others have counted an event for a node that was told of.
    #[inline]
    pub(super) fn count(&self, told: Told, event: Event) -> u32 {
        self.of(told).map_or(0, |(_, counts, _)| counts[event as usize])
    }

    #[inline]
    fn of(&self, told: Told) -> Option<&(NodeId, Counts, u32)> {
        self.told.get(told.0?.get() as usize - 1)
    }
}

impl PrefixTree {
    /// Others have counted so much of the same address or prefix within their sliding windows, in the order of
    /// [`Event::ALL`], and have so many connections of it. Until [`Self::forget_elsewhere`] it is added to what
    /// [`Self::request`] tells of an address, to [`Self::count_everywhere`] and to [`Self::open_everywhere`].
    pub fn set_elsewhere(&mut self, id: NodeId, counts: Counts, open: u32) {
        if self.is_live(id) {
            self.elsewhere.told.push((id, counts, open));
            let place = u32::try_from(self.elsewhere.told.len()).ok().and_then(std::num::NonZeroU32::new);
            self.nodes[id.index as usize].told = Told(place);
        }
    }

    /// Forgets what [`Self::set_elsewhere`] was told.
    pub fn forget_elsewhere(&mut self) {
        for (id, ..) in std::mem::take(&mut self.elsewhere.told) {
            if self.is_live(id) {
                self.nodes[id.index as usize].told = Told::default();
            }
        }
    }

    /// As [`Self::count`], with what others have counted of the same.
    #[inline]
    pub fn count_everywhere(&self, id: NodeId, event: Event, now_ms: u64) -> u32 {
        let Some(node) = self.node(id) else { return 0 };
        let here = node.window.count(event, self.moment(now_ms));
        here.saturating_add(self.elsewhere.count(node.told, event))
    }

    /// As [`Self::open_connections`], with those that others have of the same.
    pub fn open_everywhere(&self, id: NodeId) -> u32 {
        let told = self.node(id).map_or_else(Told::default, |node| node.told);
        let elsewhere = self.elsewhere.of(told).map_or(0, |(_, _, open)| *open);
        self.open_connections(id).saturating_add(elsewhere)
    }

    /// Some of the addresses that did something in this window or in the last one: all of them, if they are few.
    pub fn present(&self, now_ms: u64) -> impl Iterator<Item = IpPrefix> + '_ {
        let now = self.moment(now_ms).index;
        let recent =
            self.elsewhere.present.iter().filter(move |present| now.wrapping_sub(present.window) <= 1);
        recent.flat_map(|present| &present.ids).filter_map(|id| self.prefix(*id))
    }

    /// So many different addresses are present here and elsewhere, as far as they were told.
    pub fn set_present_everywhere(&mut self, addresses: u32) {
        self.elsewhere.addresses = addresses;
    }

    /// How many addresses are there now, with those elsewhere as far as it takes to tell whether a client is nearly
    /// alone.
    pub fn addresses_everywhere(&self, now_ms: u64) -> u32 {
        self.addresses(self.root(), now_ms).max(self.elsewhere.addresses)
    }

    /// Those that were found to do much since this was last asked, some of them twice, [`Self::MAX_ACTIVE`] at most:
    /// another [`Self::LOOK_EVERY`] requests, of addresses also so many of another event as is
    /// [`Event::worth_telling`], or of connections.
    pub fn take_active(&mut self) -> Vec<NodeId> {
        std::mem::take(&mut self.elsewhere.active)
    }

    /// The address was asked to prove something, and has not yet: in how many windows that was so. However many
    /// requests it makes at once, that is one. It is forgotten after [`Self::STRIKE_WINDOWS`] windows without another.
    pub fn strike(&mut self, id: NodeId, now_ms: u64) -> u32 {
        let moment = self.moment(now_ms);
        if !self.is_live(id) {
            return 0;
        }
        let strikes = &mut self.nodes[id.index as usize].strikes;
        if moment.index.saturating_sub(strikes.window) > Self::STRIKE_WINDOWS {
            strikes.count = 0;
        }
        if strikes.count == 0 || strikes.window != moment.index {
            strikes.window = moment.index;
            strikes.count = strikes.count.saturating_add(1);
        }
        strikes.count.into()
    }
}
