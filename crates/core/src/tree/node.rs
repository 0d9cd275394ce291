//! What the tree knows of one address or prefix, and how addresses and prefixes are told apart.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::elsewhere::{Strikes, Told};
use super::index::NONE;
use super::window::{Event, Moment, Window};
use crate::IpPrefix;

/// Prefix lengths of IPv4 below the root, the address first.
pub(super) const LENGTHS4: [u8; 6] = [32, 24, 20, 16, 12, 8];
/// Prefix lengths of IPv6 below the root, the network that counts as one address first.
pub(super) const LENGTHS6: [u8; 6] = [64, 56, 48, 44, 40, 32];
/// The root's level.
pub(super) const ROOT_LEVEL: u8 = u8::MAX;
/// Marks the levels of IPv6.
pub(super) const IPV6: u8 = 0x10;

/// What every request touches comes first, so that it lies on one cache line, or at most on two.
#[derive(Debug)]
#[repr(C, align(32))]
pub(super) struct Node {
    pub generation: u32,
    pub parent: u32,
    pub top: TopTarget,
    /// What other owners' trees have counted lately for the same address or prefix.
    pub told: Told,
    pub mark: Mark,
    pub window: Window,
    /// The window of its first event.
    pub born: u32,
    pub key: Key,
    /// Nodes right below; for an address 0.
    pub children: u32,
    /// Connections open now, of a prefix those of all in it; what has any is not evicted.
    pub open: u32,
    pub strikes: Strikes,
}

/// What was found out about a prefix or an address, and for how long that holds.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Mark {
    /// When it was found out, in milliseconds.
    pub since_ms: u64,
    /// When that ends; 0: nothing was found out.
    pub until_ms: u64,
    /// What it was, in the words of whoever set it.
    pub kind: u8,
}

/// What a prefix's requests asked for most, by majority vote (Boyer and Moore 1981): one candidate and its lead.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TopTarget {
    /// A hash of the target.
    pub target: u32,
    /// Requests for the target less those for others; more than half of `of` only if it truly dominates.
    pub lead: u32,
    /// Requests that were looked at.
    pub of: u32,
}

/// Which prefix a node stands for: at most 64 leading bits, and the place in the table of lengths.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Key {
    pub bits: u64,
    pub level: u8,
}

impl Node {
    pub fn new(key: Key, parent: u32, generation: u32, moment: Moment) -> Self {
        Self {
            generation,
            parent,
            top: TopTarget::default(),
            told: Told::default(),
            mark: Mark::default(),
            window: Window::new(moment),
            born: moment.index,
            key,
            children: 0,
            open: 0,
            strikes: Strikes::default(),
        }
    }

    /// Only the root and free nodes have no parent.
    pub fn is_free(&self) -> bool {
        self.parent == NONE && self.key.level != ROOT_LEVEL
    }

    /// What would be lost with an address: what it is known for, and then how much it does.
    pub fn value(&self, moment: Moment) -> (bool, u64) {
        let violations = self.window.count(Event::Violation, moment);
        let age = u64::from(moment.index.saturating_sub(self.born)).min(1000);
        let activity = u64::from(self.window.count(Event::Request, moment))
            + u64::from(self.window.count(Event::Connection, moment));
        (violations > 0, activity * 4 + age)
    }
}

impl Mark {
    #[inline]
    pub(super) fn at(self, now_ms: u64) -> Option<Self> {
        (self.until_ms > now_ms).then_some(self)
    }
}

impl TopTarget {
    #[inline]
    pub(super) fn vote(&mut self, target: u32) {
        self.of = self.of.saturating_add(1);
        if self.target == target {
            self.lead = self.lead.saturating_add(1);
        } else if self.lead == 0 {
            self.target = target;
            self.lead = 1;
        } else {
            self.lead -= 1;
        }
    }

    /// What was asked for in windows before counts half.
    #[inline]
    pub(super) fn fade(&mut self) {
        self.lead /= 2;
        self.of /= 2;
    }

    /// The lower bound of the share of the leading target: 0 without a majority, 1 where nothing else is asked for.
    pub fn share(&self) -> f32 {
        if self.of == 0 { 0.0 } else { self.lead as f32 / self.of as f32 }
    }
}

impl Key {
    pub fn prefix(self) -> Option<IpPrefix> {
        if self.level == ROOT_LEVEL {
            return None;
        }
        let length = length_of(self.level);
        let address = if self.level & IPV6 == 0 {
            IpAddr::V4(Ipv4Addr::from((self.bits >> 32) as u32))
        } else {
            IpAddr::V6(Ipv6Addr::from(u128::from(self.bits) << 64))
        };
        IpPrefix::new(address, length).ok()
    }
}

#[inline]
fn length_of(level: u8) -> u8 {
    let lengths = if level & IPV6 == 0 { &LENGTHS4 } else { &LENGTHS6 };
    lengths[usize::from(level & !IPV6)]
}

/// The leading 64 bits of an address, IPv4 at the top, and the mark of its family.
#[inline]
pub(super) fn bits_of(address: IpAddr) -> (u64, u8) {
    match address.to_canonical() {
        IpAddr::V4(v4) => (u64::from(u32::from(v4)) << 32, 0),
        IpAddr::V6(v6) => ((u128::from(v6) >> 64) as u64, IPV6),
    }
}

#[inline]
pub(super) fn masked(bits: u64, level: u8) -> u64 {
    bits & u64::MAX << (64 - u32::from(length_of(level)))
}
