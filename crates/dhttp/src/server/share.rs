//! How much one client makes the site work at one time.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use crate::once::network_of;

/// Tables with fewer networks are not worth sweeping.
const FEW: usize = 64;

/// A place of a client's, given back when it is dropped.
#[derive(Debug)]
pub struct Share(#[allow(dead_code, reason = "it is there to be counted")] Arc<()>);

/// Places, as many for each network (an IPv4 address, 64 bits of an IPv6 address). Remembers those that have some.
#[derive(Debug)]
pub(crate) struct Shares {
    each: usize,
    networks: HashMap<IpAddr, Arc<()>>,
    /// With so many networks those that have no place are forgotten.
    sweep_at: usize,
}

impl Shares {
    pub fn new(each: usize) -> Self {
        Self { each: each.max(1), networks: HashMap::new(), sweep_at: FEW }
    }

    /// A place for a client; `None`: its network has as many as it may have.
    pub fn take(&mut self, client: IpAddr) -> Option<Share> {
        if self.networks.len() >= self.sweep_at {
            self.networks.retain(|_, places| Arc::strong_count(places) > 1);
            self.sweep_at = (2 * self.networks.len()).max(FEW);
        }
        let places = self.networks.entry(network_of(client)).or_default();
        (Arc::strong_count(places) <= self.each).then(|| Share(Arc::clone(places)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_network_with_all_its_places_gets_another_when_one_is_given_back() {
        let mut shares = Shares::new(2);
        let first = shares.take(ip("2001:db8::1")).unwrap();
        let _second = shares.take(ip("2001:db8::2")).unwrap();
        assert!(shares.take(ip("2001:db8::3")).is_none());
        assert!(shares.take(ip("2001:db8:0:1::3")).is_some(), "another network");
        drop(first);
        assert!(shares.take(ip("2001:db8::3")).is_some());
    }

    #[test]
    fn networks_without_places_are_forgotten() {
        let mut shares = Shares::new(2);
        let kept: Vec<_> = (0..50).map(|n| shares.take(IpAddr::from([192, 0, 2, n])).unwrap()).collect();
        for n in 0..10_000_u32 {
            drop(shares.take(IpAddr::V4((0x0a00_0000 + n).into())));
        }
        assert!(shares.networks.len() <= 2 * (kept.len() + FEW), "{}", shares.networks.len());
    }
}
