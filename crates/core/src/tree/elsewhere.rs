//! What is known of nodes beyond their own counters: who was active lately, what other owners' trees have told of the same
//! addresses and prefixes, and who was asked to prove something.

use super::{Event, NodeId, PrefixTree};

/// Active nodes that are remembered until somebody asks for them.
const MAX_ACTIVE: usize = 4_096;

/// Counts in the order of [`Event::ALL`].
type Counts = [u32; Event::ALL.len()];

/// Which nodes were active, and what others have told.
#[derive(Debug, Default)]
pub(super) struct Elsewhere {
    /// Who was active since [`PrefixTree::take_active`]; at most [`MAX_ACTIVE`].
    active: Vec<NodeId>,
    /// A node's [`Told`] is its place here.
    told: Vec<(NodeId, Counts)>,
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
    /// Remembers that a node has counted another [`PrefixTree::LOOK_EVERY`] requests.
    pub(super) fn was_active(&mut self, id: NodeId) {
        if self.active.len() < MAX_ACTIVE {
            self.active.push(id);
        }
    }

    /// How often others have counted an event for a node that was told of.
    #[inline]
    pub(super) fn count(&self, told: Told, event: Event) -> u32 {
        let Some(place) = told.0 else { return 0 };
        self.told.get(place.get() as usize - 1).map_or(0, |(_, counts)| counts[event as usize])
    }
}

impl PrefixTree {
    /// Others have counted so much of the same address or prefix within their sliding windows, in the order of
    /// [`Event::ALL`]. Until [`Self::forget_elsewhere`] it is added to what [`Self::request`] tells of an address, and to
    /// [`Self::count_everywhere`].
    pub fn set_elsewhere(&mut self, id: NodeId, counts: Counts) {
        if self.is_live(id) {
            self.elsewhere.told.push((id, counts));
            let place = u32::try_from(self.elsewhere.told.len()).ok().and_then(std::num::NonZeroU32::new);
            self.nodes[id.index as usize].told = Told(place);
        }
    }

    /// Forgets what [`Self::set_elsewhere`] was told.
    pub fn forget_elsewhere(&mut self) {
        for (id, _) in std::mem::take(&mut self.elsewhere.told) {
            if self.is_live(id) {
                self.nodes[id.index as usize].told = Told::default();
            }
        }
    }

    /// As [`Self::count`], with what others have counted of the same.
    pub fn count_everywhere(&self, id: NodeId, event: Event, now_ms: u64) -> u32 {
        let told = self.node(id).map_or_else(Told::default, |node| node.told);
        self.count(id, event, now_ms).saturating_add(self.elsewhere.count(told, event))
    }

    /// Those that have counted another [`Self::LOOK_EVERY`] requests since this was last asked, some of them twice.
    pub fn take_active(&mut self) -> Vec<NodeId> {
        std::mem::take(&mut self.elsewhere.active)
    }

    /// The address was asked to prove something, and has not yet: in how many windows that was so. However many requests it
    /// makes at once, that is one. It is forgotten after [`Self::STRIKE_WINDOWS`] windows without another.
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
