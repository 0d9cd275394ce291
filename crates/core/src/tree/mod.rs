//! The prefix tree: what each client address does, and what each network prefix around it does, at every level at once.
//!
//! A node stands for an address (an IPv6 network of 64 bits counts as one address, since whoever has it can invent as
//! many as it likes) or for a prefix at one of a few fixed lengths, up to the root, which stands for everybody. An
//! event is counted at the address and at all prefixes around it. The arena is bounded: where it is full, the least
//! valuable addresses go, and prefixes go with their last address, so that an attacker who invents addresses displaces
//! its own.
//!
//! One owner, one thread; time comes in as milliseconds of one monotonic clock.

mod elsewhere;
mod index;
mod node;
mod room;
mod window;

use std::cell::Cell;
use std::net::IpAddr;

pub use node::{Mark, TopTarget};
pub use window::Event;

use crate::IpPrefix;
use elsewhere::{Elsewhere, Strikes, Told};
use index::{Index, NONE};
use node::{IPV6, Key, LENGTHS4, LENGTHS6, Node, ROOT_LEVEL, bits_of, masked};
use room::capacity_within;
use window::{Moment, Window};

/// Size and time of a tree.
#[derive(Clone, Copy, Debug)]
pub struct TreeConfig {
    /// The most memory that nodes and their index take; see [`PrefixTree::beside_bytes`] for the rest.
    pub memory_bytes: usize,
    /// The length of the sliding window in which events are counted, in milliseconds.
    pub window_ms: u64,
    /// Secret of the index, so that nobody can choose addresses that slow it down.
    pub seed: u64,
}

/// A node that was found once. It goes stale when the node is evicted, which every use finds out.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct NodeId {
    index: u32,
    generation: u32,
}

/// What counting a request brought up.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Visit {
    /// Requests of the address within the sliding window.
    pub requests: u32,
    /// The mark of the address, if it has one that holds.
    pub mark: Option<Mark>,
    /// The narrowest prefix around the address with a mark that holds.
    pub suspect: Option<(NodeId, Mark)>,
    /// The narrowest prefix around the address that has counted another [`PrefixTree::LOOK_EVERY`] requests; of those
    /// around it [`PrefixTree::is_due`] tells.
    pub due: Option<NodeId>,
}

/// Counts events of addresses and of the prefixes around them.
#[derive(Debug)]
pub struct PrefixTree {
    nodes: Vec<Node>,
    free: Vec<u32>,
    index: Index,
    capacity: usize,
    window_ms: u64,
    /// The time that was asked about last, and its moment: what asks about one request asks several times.
    now: Cell<(u64, Moment)>,
    /// Where the last eviction looked.
    hand: usize,
    /// State of the generator that says where the next one looks.
    dice: u64,
    evicted: u64,
    elsewhere: Elsewhere,
}

impl PrefixTree {
    /// The greatest number of nodes above an address, the root included.
    pub const LEVELS: usize = LENGTHS4.len();
    /// Requests of a prefix after which its shape is worth another look.
    pub const LOOK_EVERY: u32 = 64;
    /// See [`Self::take_active`].
    pub const MAX_ACTIVE: usize = 4_096;
    /// Connections open at once that make an address worth telling other owners of.
    pub const OPEN_WORTH_TELLING: u32 = 8;
    /// See [`Self::strike`].
    pub const STRIKE_WINDOWS: u32 = 60;

    /// An empty tree, with room for at least a few addresses whatever its bound.
    pub fn new(config: TreeConfig) -> Self {
        let capacity = capacity_within(config.memory_bytes);
        let root =
            Node::new(Key { bits: 0, level: ROOT_LEVEL }, NONE, 0, Moment::new(0, config.window_ms.max(1)));
        // All of it at once: the system gives memory as it is first used, and nodes that never move are never there
        // twice.
        let mut nodes = Vec::with_capacity(capacity);
        nodes.push(root);
        Self {
            nodes,
            free: Vec::new(),
            index: Index::new(config.seed),
            capacity,
            window_ms: config.window_ms.max(1),
            now: Cell::new((0, Moment::new(0, config.window_ms.max(1)))),
            hand: 0,
            dice: config.seed,
            evicted: 0,
            elsewhere: Elsewhere::default(),
        }
    }

    /// The node of everybody.
    pub fn root(&self) -> NodeId {
        NodeId { index: 0, generation: self.nodes[0].generation }
    }

    /// The node of an address; makes it if there is none. Where there is no room, because every address has open
    /// connections, it is the node of a prefix around it: [`Self::is_address`] tells.
    pub fn locate(&mut self, address: IpAddr, now_ms: u64) -> NodeId {
        let moment = self.moment(now_ms);
        let (bits, family) = bits_of(address);
        let mut missing = [Key { bits: 0, level: 0 }; Self::LEVELS];
        let mut count = 0;
        let mut parent = 0;
        for level in 0..Self::LEVELS as u8 {
            let key = Key { bits: masked(bits, level | family), level: level | family };
            if let Some(found) = self.lookup(key) {
                parent = found;
                break;
            }
            missing[count] = key;
            count += 1;
        }
        if count > 0 && self.len() + count > self.capacity {
            // The path that is to grow must not lose its footing to the eviction that makes room for it.
            self.nodes[parent as usize].children += 1;
            let fits = self.make_room(count, moment);
            self.nodes[parent as usize].children -= 1;
            if !fits {
                return self.id(parent);
            }
        }
        for key in missing[..count].iter().rev() {
            parent = self.insert(*key, parent, moment);
        }
        self.id(parent)
    }

    /// The node of an address, if it has one.
    pub fn find(&self, address: IpAddr) -> Option<NodeId> {
        let (bits, family) = bits_of(address);
        self.lookup(Key { bits: masked(bits, family), level: family }).map(|index| self.id(index))
    }

    /// The node of a prefix of one of the lengths that are counted, if it has one.
    pub fn find_prefix(&self, prefix: IpPrefix) -> Option<NodeId> {
        let (bits, family) = bits_of(prefix.address());
        let lengths = if family == 0 { &LENGTHS4 } else { &LENGTHS6 };
        let level = lengths.iter().position(|length| *length == prefix.length_bits())? as u8 | family;
        self.lookup(Key { bits: masked(bits, level), level }).map(|index| self.id(index))
    }

    /// Counts an event at the address and at every prefix around it. Nothing happens where the node has been evicted.
    #[inline]
    pub fn add(&mut self, id: NodeId, event: Event, amount: u32, now_ms: u64) {
        if !self.is_live(id) {
            return;
        }
        let moment = self.moment(now_ms);
        let leaf = &mut self.nodes[id.index as usize];
        let is_first = leaf.window.roll(moment) || leaf.window.current(Event::Address) == 0;
        if is_first {
            leaf.window.add(Event::Address, 1);
            leaf.top.fade();
            self.elsewhere.was_present(id, moment.index);
        }
        leaf.window.add(event, amount);
        let (count, worth) = (leaf.window.current(event), event.worth_telling());
        if count / worth != count.saturating_sub(amount) / worth {
            self.elsewhere.was_active(id);
        }
        let mut at = leaf.parent;
        while let Some(node) = self.nodes.get_mut(at as usize) {
            if node.window.roll(moment) {
                node.top.fade();
            }
            node.window.add(event, amount);
            if is_first {
                node.window.add(Event::Address, 1);
            }
            at = node.parent;
        }
    }

    /// Counts a request and what it asked for, at the address and at every prefix around it, and looks at their marks:
    /// all that a request needs in one walk.
    #[inline]
    pub fn request(&mut self, id: NodeId, target: u32, now_ms: u64) -> Visit {
        let moment = self.moment(now_ms);
        let leaf = self.nodes.get_mut(id.index as usize).filter(|leaf| leaf.generation == id.generation);
        let Some(leaf) = leaf else { return Visit::default() };
        let is_first = leaf.window.roll(moment) || leaf.window.current(Event::Address) == 0;
        if is_first {
            leaf.window.add(Event::Address, 1);
            leaf.top.fade();
        }
        let counted = leaf.window.add(Event::Request, 1);
        leaf.top.vote(target);
        let told = self.elsewhere.count(leaf.told, Event::Request);
        let requests = leaf.window.count(Event::Request, moment).saturating_add(told);
        let (mark, parent) = (leaf.mark.at(now_ms), leaf.parent);
        if counted.is_multiple_of(Self::LOOK_EVERY) {
            self.elsewhere.was_active(id);
        }
        // What is rare is looked at when the walk has ended.
        let (mut suspect, mut due) = (NONE, NONE);
        let mut at = parent;
        let nodes = self.nodes.as_mut_slice();
        while let Some(node) = nodes.get_mut(at as usize) {
            if node.window.roll(moment) {
                node.top.fade();
            }
            let counted = node.window.add(Event::Request, 1);
            node.top.vote(target);
            if node.mark.at(now_ms).is_some() && suspect == NONE {
                suspect = at;
            }
            if counted.is_multiple_of(Self::LOOK_EVERY) && due == NONE {
                due = at;
            }
            at = node.parent;
        }
        if is_first {
            self.is_present(id, parent, moment);
        }
        let mut visit = Visit { requests, mark, suspect: None, due: None };
        if due != NONE {
            visit.due = Some(self.id(due));
            self.elsewhere.was_active(self.id(due));
        }
        if suspect != NONE {
            visit.suspect = self.nodes[suspect as usize].mark.at(now_ms).map(|mark| (self.id(suspect), mark));
        }
        visit
    }

    /// An address did something for the first time in a window: every prefix around it has one more.
    #[cold]
    fn is_present(&mut self, id: NodeId, parent: u32, moment: Moment) {
        self.elsewhere.was_present(id, moment.index);
        let mut at = parent;
        while let Some(node) = self.nodes.get_mut(at as usize) {
            node.window.add(Event::Address, 1);
            at = node.parent;
        }
    }

    /// Whether an address may have done something more often than `limit` within the sliding window, here and elsewhere
    /// together: where this says no, [`Self::count_everywhere`] is at most `limit`. Costs less than that.
    #[inline]
    pub fn may_exceed(&self, id: NodeId, event: Event, limit: u32) -> bool {
        self.node(id).is_some_and(|node| {
            let most = node.window.current(event).saturating_add(node.window.previous(event));
            most.saturating_add(self.elsewhere.count(node.told, event)) > limit
        })
    }

    /// Whether the request that was just counted at this node was another [`Self::LOOK_EVERY`]th.
    pub fn is_due(&self, id: NodeId) -> bool {
        self.node(id).is_some_and(|node| node.window.current(Event::Request).is_multiple_of(Self::LOOK_EVERY))
    }

    /// How often an event happened within the sliding window.
    #[inline]
    pub fn count(&self, id: NodeId, event: Event, now_ms: u64) -> u32 {
        self.node(id).map_or(0, |node| node.window.count(event, self.moment(now_ms)))
    }

    /// How often an event happened in the last whole window before this one.
    pub fn last_window(&self, id: NodeId, event: Event, now_ms: u64) -> u32 {
        let moment = self.moment(now_ms);
        self.node(id).map_or(0, |node| match moment.index.wrapping_sub(node.window.index()) {
            0 => node.window.previous(event),
            1 => node.window.current(event),
            _ => 0,
        })
    }

    /// Addresses that did something in this window, or in the last whole one if those were more: unlike in the sliding
    /// count, nobody counts twice.
    pub fn addresses(&self, id: NodeId, now_ms: u64) -> u32 {
        let moment = self.moment(now_ms);
        let current = self
            .node(id)
            .filter(|node| node.window.index() == moment.index)
            .map_or(0, |node| node.window.current(Event::Address));
        current.max(self.last_window(id, Event::Address, now_ms))
    }

    /// What is asked for most.
    pub fn top_target(&self, id: NodeId) -> TopTarget {
        self.node(id).map_or_else(TopTarget::default, |node| node.top)
    }

    /// The prefix right around this one; `None` above the root.
    #[inline]
    pub fn parent(&self, id: NodeId) -> Option<NodeId> {
        let parent = self.node(id)?.parent;
        (parent != NONE).then(|| self.id(parent))
    }

    /// Milliseconds since the window began in which the node had its first event; 0 for the window in progress.
    pub fn age_ms(&self, id: NodeId, now_ms: u64) -> u64 {
        let moment = self.moment(now_ms);
        self.node(id).map_or(0, |node| u64::from(moment.index.saturating_sub(node.born)) * self.window_ms)
    }

    /// Marks a prefix or an address.
    pub fn set_mark(&mut self, id: NodeId, mark: Mark) {
        if self.is_live(id) {
            self.nodes[id.index as usize].mark = mark;
        }
    }

    /// Forgets what an address has done and was found out about it; its prefixes remember.
    pub fn forgive(&mut self, id: NodeId, now_ms: u64) {
        let moment = self.moment(now_ms);
        if self.is_live(id) {
            let node = &mut self.nodes[id.index as usize];
            node.mark = Mark::default();
            node.strikes = Strikes::default();
            node.told = Told::default();
            node.top = TopTarget::default();
            node.window = Window::new(moment);
        }
    }

    /// What was found out about a prefix or an address, as far as it holds now.
    pub fn mark(&self, id: NodeId, now_ms: u64) -> Option<Mark> {
        self.node(id)?.mark.at(now_ms)
    }

    /// A connection of this address was opened; how many it has now.
    pub fn open(&mut self, id: NodeId) -> u32 {
        if !self.is_live(id) {
            return 0;
        }
        let mut at = id.index;
        while let Some(node) = self.nodes.get_mut(at as usize) {
            node.open += 1;
            at = node.parent;
        }
        let open = self.nodes[id.index as usize].open;
        if open.is_multiple_of(Self::OPEN_WORTH_TELLING) {
            self.elsewhere.was_active(id);
        }
        open
    }

    /// A connection of this address was closed.
    pub fn close(&mut self, id: NodeId) {
        if !self.is_live(id) {
            return;
        }
        let mut at = id.index;
        while let Some(node) = self.nodes.get_mut(at as usize) {
            node.open = node.open.saturating_sub(1);
            at = node.parent;
        }
    }

    /// What a connection of this address weighs where there are too many, in 64ths of what a lone one does: those of
    /// the address in full, and those of each prefix around it a quarter of what the one within counts, so that who has
    /// a whole network of addresses weighs more than somebody with one.
    pub fn crowding(&self, id: NodeId) -> u64 {
        let mut crowding = 0;
        let mut place = self.node(id);
        for level in 0..Self::LEVELS as u32 {
            let Some(node) = place else { break };
            crowding += (u64::from(node.open) * 64) >> (2 * level);
            place = self.nodes.get(node.parent as usize);
        }
        crowding
    }

    /// Connections open now, of a prefix those of all in it.
    pub fn open_connections(&self, id: NodeId) -> u32 {
        self.node(id).map_or(0, |node| node.open)
    }

    /// The prefix that a node stands for; `None` for the root and for what has been evicted.
    pub fn prefix(&self, id: NodeId) -> Option<IpPrefix> {
        self.node(id).and_then(|node| node.key.prefix())
    }

    /// Whether the node is still there.
    #[inline]
    pub fn is_live(&self, id: NodeId) -> bool {
        self.nodes.get(id.index as usize).is_some_and(|node| node.generation == id.generation)
    }

    /// Every node but the root, in no order.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        let live = |(_, node): &(usize, &Node)| node.key.level != ROOT_LEVEL && !node.is_free();
        self.nodes.iter().enumerate().filter(live).map(|(index, _)| self.id(index as u32))
    }

    /// Whether a node stands for an address, not for a prefix around several.
    pub fn is_address(&self, id: NodeId) -> bool {
        self.node(id).is_some_and(|node| node.key.level & !IPV6 == 0)
    }

    /// The length of the sliding window, in milliseconds.
    pub fn window_ms(&self) -> u64 {
        self.window_ms
    }

    /// Nodes in use, the root included.
    pub fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// Whether nobody has come yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 1
    }

    /// The most nodes there can be.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Addresses that had to go for others.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Memory in use now for nodes and their index.
    pub fn memory_bytes(&self) -> usize {
        self.nodes.len() * size_of::<Node>()
            + self.free.capacity() * size_of::<u32>()
            + self.index.memory_bytes()
    }

    /// The most memory that a tree takes besides its nodes and their index, where it is told of so many nodes by
    /// others.
    pub const fn beside_bytes(told: usize) -> usize {
        Elsewhere::most_bytes(told)
    }

    #[inline]
    fn moment(&self, now_ms: u64) -> Moment {
        let (known_ms, moment) = self.now.get();
        if known_ms == now_ms {
            return moment;
        }
        let moment = Moment::new(now_ms, self.window_ms);
        self.now.set((now_ms, moment));
        moment
    }

    fn id(&self, index: u32) -> NodeId {
        NodeId { index, generation: self.nodes[index as usize].generation }
    }

    #[inline]
    fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.index as usize).filter(|node| node.generation == id.generation)
    }

    fn lookup(&self, key: Key) -> Option<u32> {
        self.index.find(key, |node| self.nodes[node as usize].key)
    }

    /// Panics where the tree contradicts itself.
    pub fn check_invariants(&self) {
        assert!(self.len() <= self.capacity, "{} nodes, capacity {}", self.len(), self.capacity);
        assert_eq!(self.index.len(), self.len() - 1, "every node but the root is indexed");
        let mut children = vec![0u32; self.nodes.len()];
        let mut open = vec![0u32; self.nodes.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            if index == 0 || node.is_free() {
                assert!(index != 0 || node.parent == NONE, "the root is nobody's child");
                continue;
            }
            assert_eq!(self.lookup(node.key), Some(index as u32), "a node is found by its key");
            let parent = &self.nodes[node.parent as usize];
            assert!(node.parent == 0 || !parent.is_free(), "a parent is in use");
            children[node.parent as usize] += 1;
            open[node.parent as usize] += node.open;
            if let (Some(own), Some(above)) = (node.key.prefix(), parent.key.prefix()) {
                assert!(above.contains(own.address()) && above.length_bits() < own.length_bits());
            }
            for event in Event::ALL {
                // An evicted address leaves its events with its prefixes: never less, sometimes more.
                if parent.window.index() == node.window.index() {
                    assert!(parent.window.current(*event) >= node.window.current(*event), "{event:?}");
                }
            }
        }
        for (index, node) in self.nodes.iter().enumerate().filter(|(_, node)| !node.is_free()) {
            assert_eq!(node.children, children[index], "children are counted");
            // Where there is no room for an address, its connections are its prefix's own.
            assert!(node.open >= open[index], "connections are counted");
        }
        let free = self.nodes.iter().skip(1).filter(|node| node.is_free()).count();
        assert_eq!(free, self.free.len(), "what is not in use is free");
    }
}

#[cfg(test)]
mod tests;
