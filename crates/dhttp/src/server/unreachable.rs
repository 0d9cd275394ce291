//! Clients that do not accept connections: refused ones are remembered by port, silent ones by address.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::recent::Recent;

/// Most that are remembered; the oldest goes first.
const REMEMBERED: usize = 4096;
/// So many SYNs in a row without an answer are a firewall; fewer may have been lost.
const SILENCES: u32 = 2;
/// So many ports of one address refused one after another are a NAT, or somebody who has others make SYNs.
pub(super) const REFUSALS: u32 = 8;

/// Who has not accepted a connection.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Failing {
    /// A TCP channel refused one.
    Channel(SocketAddr),
    /// A client refused one, whatever the port.
    Refusing(IpAddr),
    /// A client kept silent, as behind a firewall.
    Silent(IpAddr),
}

/// Connections that were not accepted, one after another.
#[derive(Clone, Copy, Debug)]
struct Failures {
    count: u32,
    /// They are remembered until then.
    until: Instant,
}

/// Who has not accepted connections. Clones are one memory: give it to all cores, because a client's next request, from
/// another port, may reach another one.
#[derive(Clone, Debug)]
pub struct Unreachable(Arc<Mutex<Recent<Failing, Failures>>>);

impl Default for Unreachable {
    fn default() -> Self {
        Self::new(REMEMBERED)
    }
}

impl Unreachable {
    /// A memory of so many clients and channels.
    pub fn new(capacity: usize) -> Self {
        Self(Arc::new(Mutex::new(Recent::new(capacity))))
    }

    fn known(&self) -> MutexGuard<'_, Recent<Failing, Failures>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a connection to this TCP channel would not be accepted.
    pub(super) fn has(&self, peer: SocketAddr, now: Instant) -> bool {
        let known = self.known();
        let failed = |who: Failing, least: u32| {
            known.get(&who).is_some_and(|known| known.until > now && known.count >= least)
        };
        failed(Failing::Channel(peer), 1)
            || failed(Failing::Silent(peer.ip()), SILENCES)
            || failed(Failing::Refusing(peer.ip()), REFUSALS)
    }

    /// A connection was refused, or not answered.
    pub(super) fn on_failed(&self, peer: SocketAddr, silent: bool, until: Instant, now: Instant) {
        let mut known = self.known();
        let mut count = |who: Failing| {
            let before = known.get(&who).filter(|known| known.until > now).map_or(0, |known| known.count);
            known.insert(who, Failures { count: before.saturating_add(1), until });
        };
        if silent {
            return count(Failing::Silent(peer.ip()));
        }
        count(Failing::Refusing(peer.ip()));
        count(Failing::Channel(peer));
    }

    /// A client has accepted one.
    pub(super) fn on_accepted(&self, client: IpAddr, now: Instant) {
        let mut known = self.known();
        for who in [Failing::Silent(client), Failing::Refusing(client)] {
            if known.get(&who).is_some() {
                known.insert(who, Failures { count: 0, until: now });
            }
        }
    }
}
