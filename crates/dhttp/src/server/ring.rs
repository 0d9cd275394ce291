//! The requests that a connection has answered (DHTTP §III-C): a resent request whose answer is on its way by TCP must
//! not be answered again.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use crate::wire::RequestId;

/// A request identifier together with the client's address: what the paper calls a global request ID.
pub type GlobalId = (IpAddr, RequestId);

/// The last so many global ids; the oldest makes room for the newest.
#[derive(Debug)]
pub(super) struct AnsweredRing {
    capacity: usize,
    order: VecDeque<(GlobalId, u64)>,
    /// Which entry of `order` an id stands for; entries of `order` that no longer agree are void.
    known: HashMap<GlobalId, u64>,
    next: u64,
}

impl AnsweredRing {
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), order: VecDeque::new(), known: HashMap::new(), next: 0 }
    }

    pub fn insert(&mut self, id: GlobalId) {
        if self.order.len() == self.capacity
            && let Some((oldest, number)) = self.order.pop_front()
            && self.known.get(&oldest) == Some(&number)
        {
            self.known.remove(&oldest);
        }
        self.known.insert(id, self.next);
        self.order.push_back((id, self.next));
        self.next += 1;
    }

    pub fn contains(&self, id: &GlobalId) -> bool {
        self.known.contains_key(id)
    }

    /// The connection broke before the client had the answer.
    pub fn forget(&mut self, id: &GlobalId) {
        self.known.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn id(n: u64) -> GlobalId {
        (IpAddr::V4(Ipv4Addr::LOCALHOST), RequestId(n.to_be_bytes()))
    }

    #[test]
    fn a_full_ring_forgets_the_oldest() {
        let mut ring = AnsweredRing::new(3);
        (0..4).for_each(|n| ring.insert(id(n)));
        assert!(!ring.contains(&id(0)));
        assert!((1..4).all(|n| ring.contains(&id(n))));
        assert_eq!((ring.order.len(), ring.known.len()), (3, 3));
    }

    #[test]
    fn an_id_inserted_again_outlives_its_first_entry() {
        let mut ring = AnsweredRing::new(2);
        ring.insert(id(0));
        ring.forget(&id(0));
        assert!(!ring.contains(&id(0)));
        ring.insert(id(0));
        ring.insert(id(1));
        assert!(ring.contains(&id(0)), "the void first entry was the one that fell out");
        assert!(ring.known.len() <= ring.capacity && ring.order.len() <= ring.capacity);
    }
}
