//! The 16-ary tree over the address that two filters of §4.2 share: `package` finds the range with the most incomplete
//! connections in it, `prior` the range that was served least recently. No I/O, no clock.

use std::collections::BTreeMap;
use std::net::IpAddr;

/// Four bits a level: 8 levels for IPv4. IPv6 addresses are followed beyond the /64, to their last bit.
const FANOUT: usize = 16;
const ROOT_V4: u32 = 0;
const ROOT_V6: u32 = 1;
const NONE: u32 = u32::MAX;

/// Names an item that was put into the tree, in the order in which items were put in.
pub type Ticket = u64;

/// Items ordered by the address that they belong to.
///
/// Levels exist only where distinct addresses share a subtree: a node with one address is a leaf at any depth. Empty
/// leaves remain, because they remember how recently their address was served, until the tree has more than its
/// greatest number of nodes; then the empty subtrees are pruned.
#[derive(Debug)]
pub struct AddressTree<T> {
    nodes: Vec<Node<T>>,
    free: Vec<u32>,
    most_nodes: usize,
    next_ticket: Ticket,
    next_stamp: u64,
}

#[derive(Debug)]
struct Node<T> {
    /// Items in this subtree.
    count: u32,
    /// When something in this subtree was served last; 0: never.
    stamp: u64,
    kind: Kind<T>,
}

#[derive(Debug)]
enum Kind<T> {
    Leaf { address: Option<IpAddr>, items: BTreeMap<Ticket, T> },
    Inner(Box<[u32; FANOUT]>),
}

fn depth_of(address: IpAddr) -> usize {
    if address.is_ipv4() { 8 } else { 32 }
}

fn nibble(address: IpAddr, level: usize) -> usize {
    let byte = match address {
        IpAddr::V4(v4) => v4.octets()[level / 2],
        IpAddr::V6(v6) => v6.octets()[level / 2],
    };
    usize::from(if level.is_multiple_of(2) { byte >> 4 } else { byte & 15 })
}

fn root_of(address: IpAddr) -> u32 {
    if address.is_ipv4() { ROOT_V4 } else { ROOT_V6 }
}

impl<T> AddressTree<T> {
    /// An empty tree that prunes itself beyond `most_nodes`.
    pub fn new(most_nodes: usize) -> Self {
        let nodes = vec![Node::leaf(None, 0), Node::leaf(None, 0)];
        Self { nodes, free: Vec::new(), most_nodes, next_ticket: 0, next_stamp: 1 }
    }

    /// Items in the tree.
    pub fn len(&self) -> usize {
        self.node(ROOT_V4).count as usize + self.node(ROOT_V6).count as usize
    }

    /// Whether there is no item.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Nodes allocated.
    pub fn nodes(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    fn node(&self, index: u32) -> &Node<T> {
        &self.nodes[index as usize]
    }

    fn node_mut(&mut self, index: u32) -> &mut Node<T> {
        &mut self.nodes[index as usize]
    }

    /// Adds an item under its address. IPv4-mapped IPv6 addresses count as IPv4.
    pub fn insert(&mut self, address: IpAddr, item: T) -> Ticket {
        let address = address.to_canonical();
        if self.nodes() > self.most_nodes {
            self.prune(ROOT_V4);
            self.prune(ROOT_V6);
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let mut at = root_of(address);
        let mut level = 0;
        loop {
            self.node_mut(at).count += 1;
            at = match &mut self.nodes[at as usize].kind {
                Kind::Leaf { address: owner, items } => {
                    if owner.is_none_or(|owner| owner == address) {
                        *owner = Some(address);
                        items.insert(ticket, item);
                        return ticket;
                    }
                    self.split(at, level);
                    // The count of the node itself was taken already; the child takes it in the next round.
                    self.child(at, nibble(address, level), address)
                }
                Kind::Inner(_) => self.child(at, nibble(address, level), address),
            };
            level += 1;
        }
    }

    fn child(&mut self, parent: u32, slot: usize, address: IpAddr) -> u32 {
        if let Kind::Inner(children) = &self.node(parent).kind
            && children[slot] != NONE
        {
            return children[slot];
        }
        let child = self.allocate(Node::leaf(Some(address), 0));
        if let Kind::Inner(children) = &mut self.node_mut(parent).kind {
            children[slot] = child;
        }
        child
    }

    fn allocate(&mut self, node: Node<T>) -> u32 {
        match self.free.pop() {
            Some(index) => {
                *self.node_mut(index) = node;
                index
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        }
    }

    /// Turns the leaf at `at` into an inner node with the leaf one level further down.
    fn split(&mut self, at: u32, level: usize) {
        let inner = Kind::Inner(Box::new([NONE; FANOUT]));
        let kind = std::mem::replace(&mut self.node_mut(at).kind, inner);
        let Kind::Leaf { address: Some(address), items } = kind else { return };
        debug_assert!(level < depth_of(address), "two addresses differ before their last bit");
        let node = Node {
            count: items.len() as u32,
            stamp: self.node(at).stamp,
            kind: Kind::Leaf { address: Some(address), items },
        };
        let moved = self.allocate(node);
        if let Kind::Inner(children) = &mut self.node_mut(at).kind {
            children[nibble(address, level)] = moved;
        }
    }

    /// Removes an item; `None` if it is gone.
    pub fn remove(&mut self, address: IpAddr, ticket: Ticket) -> Option<T> {
        let address = address.to_canonical();
        let path = self.path_to(address)?;
        let leaf = *path.last()?;
        let Kind::Leaf { items, .. } = &mut self.node_mut(leaf).kind else { return None };
        let item = items.remove(&ticket)?;
        self.uncount(&path);
        Some(item)
    }

    fn path_to(&self, address: IpAddr) -> Option<Vec<u32>> {
        let mut at = root_of(address);
        let mut path = Vec::with_capacity(8);
        loop {
            path.push(at);
            match &self.node(at).kind {
                Kind::Leaf { address: owner, .. } => return (*owner == Some(address)).then_some(path),
                Kind::Inner(children) => {
                    let child = children[nibble(address, path.len() - 1)];
                    if child == NONE {
                        return None;
                    }
                    at = child;
                }
            }
        }
    }

    fn uncount(&mut self, path: &[u32]) {
        for &index in path {
            self.node_mut(index).count -= 1;
        }
    }

    /// Removes the oldest item of the least recently served address: at each level the child with items that was served
    /// least recently (§4.2.1). All nodes on the path become the most recently served ones.
    pub fn pop_least_recent(&mut self) -> Option<(IpAddr, T)> {
        let root = [ROOT_V4, ROOT_V6]
            .into_iter()
            .filter(|&root| self.node(root).count > 0)
            .min_by_key(|&root| self.node(root).stamp)?;
        let path = self.descend(root, |node| std::cmp::Reverse(node.stamp));
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        for &index in &path {
            self.node_mut(index).stamp = stamp;
        }
        self.take_oldest(&path)
    }

    /// Removes the oldest item at the end of the path of the most items (§4.2, request packaging).
    pub fn pop_heaviest(&mut self) -> Option<(IpAddr, T)> {
        let root = if self.node(ROOT_V6).count > self.node(ROOT_V4).count { ROOT_V6 } else { ROOT_V4 };
        if self.node(root).count == 0 {
            return None;
        }
        let path = self.descend(root, |node| node.count);
        self.take_oldest(&path)
    }

    /// The path from `root` to a leaf, at each level to the child with items for which `rank` is greatest, the first of
    /// equals.
    fn descend<R: Ord>(&self, root: u32, rank: impl Fn(&Node<T>) -> R) -> Vec<u32> {
        let mut path = vec![root];
        let mut at = root;
        while let Kind::Inner(children) = &self.node(at).kind {
            let with_items =
                children.iter().copied().filter(|&child| child != NONE && self.node(child).count > 0);
            let Some(next) = with_items.rev().max_by_key(|&child| rank(self.node(child))) else { break };
            path.push(next);
            at = next;
        }
        path
    }

    fn take_oldest(&mut self, path: &[u32]) -> Option<(IpAddr, T)> {
        let Kind::Leaf { address: Some(address), items } = &mut self.node_mut(*path.last()?).kind else {
            return None;
        };
        let (address, (_, item)) = (*address, items.pop_first()?);
        self.uncount(path);
        Some((address, item))
    }

    /// Frees the empty subtrees below `at`.
    fn prune(&mut self, at: u32) {
        let Kind::Inner(children) = &self.node(at).kind else { return };
        let children = **children;
        for (slot, child) in children.into_iter().enumerate().filter(|&(_, child)| child != NONE) {
            self.prune(child);
            if self.node(child).count == 0 {
                *self.node_mut(child) = Node::leaf(None, 0);
                self.free.push(child);
                if let Kind::Inner(children) = &mut self.node_mut(at).kind {
                    children[slot] = NONE;
                }
            }
        }
        if self.node(at).count == 0 {
            let stamp = self.node(at).stamp;
            *self.node_mut(at) = Node::leaf(None, stamp);
        }
    }

    /// Panics if counts, addresses and places contradict each other. For tests.
    pub fn check_invariants(&self) {
        let mut seen = 0;
        for root in [ROOT_V4, ROOT_V6] {
            self.check(root, 0, &mut seen);
        }
        assert_eq!(seen, self.nodes(), "every allocated node is in the tree once");
    }

    fn check(&self, at: u32, level: usize, seen: &mut usize) -> u32 {
        *seen += 1;
        let count = match &self.node(at).kind {
            Kind::Leaf { address, items } => {
                assert!(address.is_some() || items.is_empty());
                items.len() as u32
            }
            Kind::Inner(children) => {
                let mut sum = 0;
                for (slot, &child) in children.iter().enumerate().filter(|&(_, &child)| child != NONE) {
                    if let Kind::Leaf { address: Some(address), .. } = self.node(child).kind {
                        assert_eq!(nibble(address, level), slot);
                    }
                    assert!(self.node(child).stamp <= self.node(at).stamp);
                    sum += self.check(child, level + 1, seen);
                }
                sum
            }
        };
        assert_eq!(count, self.node(at).count);
        count
    }
}

impl<T> Node<T> {
    fn leaf(address: Option<IpAddr>, stamp: u64) -> Self {
        Self { count: 0, stamp, kind: Kind::Leaf { address, items: BTreeMap::new() } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn order(tree: &mut AddressTree<&'static str>) -> Vec<&'static str> {
        std::iter::from_fn(|| tree.pop_least_recent()).map(|(_, item)| item).collect()
    }

    #[test]
    fn an_infrequent_client_is_served_before_the_rest_of_a_busy_range() {
        let mut tree = AddressTree::new(1000);
        for host in ["10.0.0.1", "10.0.0.2", "10.0.0.3"] {
            tree.insert(ip(host), "busy");
        }
        assert_eq!(tree.pop_least_recent().unwrap().1, "busy");
        tree.insert(ip("192.0.2.1"), "rare");
        assert_eq!(tree.pop_least_recent().unwrap().1, "rare");
        assert_eq!(order(&mut tree), ["busy", "busy"]);
        tree.check_invariants();
    }

    #[test]
    fn one_sound_machine_in_an_attackers_range_goes_before_the_rest_of_it() {
        let mut tree = AddressTree::new(1000);
        tree.insert(ip("10.0.0.1"), "attack");
        tree.insert(ip("10.0.0.1"), "attack");
        assert_eq!(tree.pop_least_recent().unwrap().1, "attack");
        tree.insert(ip("10.0.0.2"), "sound");
        assert_eq!(order(&mut tree), ["sound", "attack"]);
    }

    #[test]
    fn requests_of_one_address_keep_their_order_and_addresses_take_turns() {
        let mut tree = AddressTree::new(1000);
        for (host, item) in
            [("10.0.0.1", "a1"), ("10.0.0.1", "a2"), ("172.16.0.1", "b1"), ("172.16.0.1", "b2")]
        {
            tree.insert(ip(host), item);
        }
        assert_eq!(order(&mut tree), ["a1", "b1", "a2", "b2"]);
    }

    #[test]
    fn addresses_of_one_slash_64_are_told_apart_and_ipv4_mapped_is_ipv4() {
        let mut tree = AddressTree::new(1000);
        tree.insert(ip("2001:db8::1"), "x1");
        tree.insert(ip("2001:db8::1"), "x2");
        tree.insert(ip("2001:db8::2"), "y");
        assert_eq!(tree.pop_least_recent().unwrap().1, "x1");
        tree.insert(ip("::ffff:10.0.0.1"), "four");
        assert_eq!(order(&mut tree), ["four", "y", "x2"]);
        tree.check_invariants();
    }

    #[test]
    fn the_heaviest_path_ends_at_the_range_with_most_items() {
        let mut tree = AddressTree::new(1000);
        for host in 1..=9 {
            tree.insert(ip(&format!("10.0.0.{host}")), "attack");
        }
        for _ in 0..5 {
            tree.insert(ip("192.0.2.1"), "busy address");
        }
        let (address, _) = tree.pop_heaviest().unwrap();
        assert!(address.to_string().starts_with("10.0.0."), "the range outweighs the address: {address}");
        assert_eq!(tree.len(), 13);
        tree.check_invariants();
    }

    #[test]
    fn history_is_pruned_before_the_tree_exceeds_its_bound() {
        let mut tree = AddressTree::new(64);
        for i in 0..10_000u32 {
            tree.insert(IpAddr::from((i.wrapping_mul(2_654_435_761)).to_be_bytes()), ());
            tree.pop_least_recent();
            assert!(tree.nodes() <= 64 + 10, "{}", tree.nodes());
        }
        tree.check_invariants();
        assert_eq!(tree.len(), 0);
    }

    proptest! {
        #[test]
        fn counts_and_places_hold_under_any_operations(
            operations in proptest::collection::vec((0u8..5, any::<u32>(), any::<bool>()), 1..400)
        ) {
            let mut tree = AddressTree::new(100);
            let mut items = Vec::new();
            for (what, bits, v6) in operations {
                // Few distinct bits, so that addresses share prefixes.
                let bits = bits & 0xf003_000f;
                let address =
                    if v6 { IpAddr::from(u128::from(bits).to_be_bytes()) } else { IpAddr::from(bits.to_be_bytes()) };
                match what {
                    0..=2 => {
                        let ticket = tree.insert(address, address);
                        items.push((address, ticket));
                    }
                    3 => {
                        let popped = if v6 { tree.pop_least_recent() } else { tree.pop_heaviest() };
                        prop_assert_eq!(popped.is_some(), !items.is_empty());
                        if let Some((place, item)) = popped {
                            prop_assert_eq!(place, item.to_canonical());
                            let oldest = items.iter().position(|&(a, _)| a == item).unwrap();
                            items.remove(oldest);
                        }
                    }
                    _ => if let Some((address, ticket)) = items.pop() {
                        prop_assert_eq!(tree.remove(address, ticket), Some(address));
                        prop_assert_eq!(tree.remove(address, ticket), None);
                    },
                }
                tree.check_invariants();
                prop_assert_eq!(tree.len(), items.len());
            }
        }
    }
}
