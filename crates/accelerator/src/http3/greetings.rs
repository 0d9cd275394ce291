//! Clients in the midst of their handshake: how many there may be, and who they are.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use ahash::RandomState;

use crate::data_core::DataCore;
use crate::http3::connection::Ends;

/// Clients of a core that may be in the midst of their handshake, and those of one proved address or IPv6 network of 64 bits.
const GREETING_IN_ALL: usize = 1024;
const GREETING_OF_ONE: usize = 32;
/// When there are so many of them, a handshake has to be over within a shorter time.
const MANY: usize = GREETING_IN_ALL / 4;
const SHORT: Duration = Duration::from_secs(2);

/// Clients in the midst of their handshake.
#[derive(Default)]
pub(super) struct Greetings {
    all: Cell<usize>,
    /// How many have an address of a network; none is there without one.
    of: RefCell<HashMap<u128, usize, RandomState>>,
    ends: RefCell<HashMap<u64, Ends, RandomState>>,
    next: Cell<u64>,
}

impl Greetings {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.all.get()
    }

    /// How long one that begins now may take.
    pub(super) fn patience(&self, usual: Duration) -> Duration {
        if self.len() < MANY { usual } else { usual.min(SHORT) }
    }

    pub(super) fn for_each(&self, f: impl FnMut(&Ends)) {
        self.ends.borrow().values().for_each(f);
    }
}

/// One of them.
pub(super) struct Greeting {
    core: Rc<DataCore>,
    /// That of its address, if that is proved: whoever forges one takes nobody's share.
    network: Option<u128>,
    number: u64,
}

impl Greeting {
    /// `None` if there are too many.
    pub(super) fn new(core: &Rc<DataCore>, client: &Ends, is_proved: bool) -> Option<Self> {
        let Greetings { all, of, ends, next } = &core.http3.greetings;
        let network = is_proved.then(|| match client.peer.ip() {
            IpAddr::V4(address) => address.to_bits().into(),
            IpAddr::V6(address) => address.to_bits() >> 64 << 64,
        });
        if all.get() >= GREETING_IN_ALL {
            return None;
        }
        if let Some(network) = network {
            let mut of = of.borrow_mut();
            let count = of.entry(network).or_insert(0);
            if *count >= GREETING_OF_ONE {
                return None;
            }
            *count += 1;
        }
        all.set(all.get() + 1);
        let number = next.replace(next.get() + 1);
        ends.borrow_mut().insert(number, client.clone());
        Some(Self { core: Rc::clone(core), network, number })
    }
}

impl Drop for Greeting {
    fn drop(&mut self) {
        let Greetings { all, of, ends, .. } = &self.core.http3.greetings;
        all.set(all.get() - 1);
        ends.borrow_mut().remove(&self.number);
        if let Some(network) = self.network
            && let Entry::Occupied(mut count) = of.borrow_mut().entry(network)
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}
