//! Who holds how many connections, or makes the site work for how many requests.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidegate_core::network_of;

/// Counts permits, in all and of each peer, which is a network (see [`network_of`]). Clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quota(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
struct Held {
    all: usize,
    /// Never holds a zero, so that there are at most as many as permits.
    by_peer: HashMap<IpAddr, usize>,
}

/// One of a peer's quota, which has it back when this is dropped.
#[derive(Debug)]
pub struct Permit {
    quota: Quota,
    peer: IpAddr,
}

impl Quota {
    /// A permit for `address`, if there are fewer than `in_all`, and fewer than `of_peer` of this peer's.
    pub fn take(&self, address: IpAddr, of_peer: usize, in_all: usize) -> Option<Permit> {
        let peer = network_of(address);
        let mut held = self.held();
        let own = held.by_peer.get(&peer).copied().unwrap_or(0);
        if held.all >= in_all || own >= of_peer {
            return None;
        }
        held.all += 1;
        held.by_peer.insert(peer, own + 1);
        Some(Permit { quota: self.clone(), peer })
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut held = self.quota.held();
        held.all -= 1;
        match held.by_peer.get_mut(&self.peer) {
            Some(own) if *own > 1 => *own -= 1,
            _ => {
                held.by_peer.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_are_bounded_for_each_peer_and_in_all_and_come_back() {
        let quota = Quota::default();
        let take = |peer: &str| quota.take(peer.parse().unwrap(), 2, 3);
        let first = take("192.0.2.1").unwrap();
        let _second = take("::ffff:192.0.2.1").unwrap();
        assert!(take("192.0.2.1").is_none(), "a peer has its share");
        let _third = take("2001:db8::1").unwrap();
        assert!(take("192.0.2.2").is_none(), "all are taken");
        drop(first);
        let _fourth = take("2001:db8::2").unwrap();
        assert!(take("192.0.2.2").is_none());
        drop((_second, _third, _fourth));
        assert_eq!(quota.held().all, 0);
        assert!(quota.held().by_peer.is_empty());
        let _network = [take("2001:db8::1").unwrap(), take("2001:db8::2").unwrap()];
        assert!(take("2001:db8::3").is_none(), "one network is one peer");
    }
}
