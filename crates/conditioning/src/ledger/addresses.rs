//! At which addresses processes of the server listen on sockets that share theirs with nobody (SO_REUSEPORT, socket(7)).
//!
//! A place is given back when its socket is closed; what a killed process leaves is told by its descriptor, which is gone.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A server has a few listening sockets. What finds no place is not refused to others.
const PLACES: usize = 64;

/// Nobody's.
const FREE: u64 = 0;
/// Somebody writes it. One whose process dies meanwhile is lost.
const TAKEN: u64 = u64::MAX;

/// The port is the chain's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Address {
    ip: u128,
    scope: u32,
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        let (ip, scope) = match address {
            SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
            SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
        };
        Self { ip: ip.to_bits(), scope }
    }
}

/// All zero is a free one.
#[repr(C)]
struct Place {
    /// The process (32 bits) and its descriptor's number (32).
    owner: AtomicU64,
    ip: [AtomicU64; 2],
    scope: AtomicU32,
}

fn owner(process: u32, fd: RawFd) -> u64 {
    u64::from(process) << 32 | u64::from(fd.cast_unsigned())
}

impl Place {
    fn address(&self) -> Address {
        let [high, low] = self.ip.each_ref().map(|half| u128::from(half.load(Ordering::Relaxed)));
        Address { ip: high << 64 | low, scope: self.scope.load(Ordering::Relaxed) }
    }

    /// By who has taken it.
    fn write(&self, address: Address) {
        self.ip[0].store((address.ip >> 64) as u64, Ordering::Relaxed);
        self.ip[1].store(address.ip as u64, Ordering::Relaxed);
        self.scope.store(address.scope, Ordering::Relaxed);
    }

    fn take(&self, from: u64) -> bool {
        self.owner.compare_exchange(from, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}

#[repr(C)]
pub(super) struct Addresses([Place; PLACES]);

impl Addresses {
    /// `fd` of `process` listens; `is_open` says of others whether they still do.
    pub(super) fn add(
        &self,
        (process, fd): (u32, RawFd),
        address: SocketAddr,
        is_open: impl Fn(u32, RawFd) -> bool,
    ) {
        let is_free = |place: &&Place| {
            let owner = place.owner.load(Ordering::Acquire);
            let is_left = owner != TAKEN && !is_open((owner >> 32) as u32, owner as RawFd);
            (owner == FREE || is_left) && place.take(owner)
        };
        if let Some(place) = self.0.iter().find(is_free) {
            place.write(address.into());
            place.owner.store(owner(process, fd), Ordering::Release);
        }
    }

    /// It does so no more.
    pub(super) fn remove(&self, process: u32, fd: RawFd) {
        let owner = owner(process, fd);
        let give_back = |place: &Place| {
            let _ = place.owner.compare_exchange(owner, FREE, Ordering::AcqRel, Ordering::Relaxed);
        };
        self.0.iter().for_each(give_back);
    }

    /// Whether somebody listens there.
    pub(super) fn has(&self, address: SocketAddr, is_open: impl Fn(u32, RawFd) -> bool) -> bool {
        self.0.iter().any(|place| {
            let owner = place.owner.load(Ordering::Acquire);
            owner != FREE
                && owner != TAKEN
                && place.address() == address.into()
                && is_open((owner >> 32) as u32, owner as RawFd)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;

    fn at(address: &str) -> SocketAddr {
        address.parse().unwrap()
    }

    #[test]
    fn an_address_is_somebodys_until_all_who_listen_there_have_closed_or_are_gone() {
        let (ledger, _file) = Ledger::create().unwrap();
        let all = &ledger.map().addresses;
        let (one, other) = (at("127.0.0.1:80"), at("[fe80::1%2]:80"));
        assert!(!all.has(one, |_, _| true));
        all.add((7, 3), one, |_, _| true);
        all.add((8, 3), one, |_, _| true);
        all.add((7, 4), other, |_, _| true);
        assert!(all.has(one, |_, _| true) && all.has(at("[::ffff:127.0.0.1]:80"), |_, _| true));
        assert!(!all.has(at("127.0.0.2:80"), |_, _| true) && !all.has(at("[fe80::1%3]:80"), |_, _| true));
        all.remove(7, 3);
        assert!(all.has(one, |process, fd| (process, fd) == (8, 3)));
        assert!(!all.has(one, |process, _| process == 7));
        assert!(all.has(other, |process, fd| (process, fd) == (7, 4)));
    }

    #[test]
    fn places_of_those_that_are_gone_are_given_to_others_and_too_many_are_not_refused() {
        let (ledger, _file) = Ledger::create().unwrap();
        let all = &ledger.map().addresses;
        for fd in 0..PLACES as RawFd {
            all.add((7, fd), at("127.0.0.1:80"), |_, _| true);
        }
        all.add((8, 0), at("127.0.0.2:80"), |_, _| true);
        assert!(!all.has(at("127.0.0.2:80"), |_, _| true));
        all.add((8, 0), at("127.0.0.2:80"), |process, fd| (process, fd) != (7, 5));
        assert!(all.has(at("127.0.0.2:80"), |_, _| true));
    }
}
