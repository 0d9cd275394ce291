//! Who gets the next connection to a server, when more requests want one than it may have: the highest priority class
//! first, and within a class who came first. One client gets at most three quarters of the connections, and half of the
//! places in the queue: one that sends its bodies slowly, or reads slowly what it asked for, does not keep the others
//! out.

use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::time::Duration;

use tidegate_core::network_of;
use tokio::sync::oneshot::{self, Receiver, Sender};

use crate::data_core::admission::CLASSES;

/// Requests that may wait for a connection to one server, on one core.
const QUEUE: usize = 1024;

/// Connections in use, and who waits for one.
#[derive(Default)]
pub(crate) struct Permits {
    /// As many as could be taken at the last attempt.
    most: Cell<usize>,
    in_use: Cell<usize>,
    /// How many of them each client has; nothing for those who have none.
    held: RefCell<HashMap<IpAddr, usize, ahash::RandomState>>,
    /// The clients' sockets of those that have become tunnels.
    tunnels: RefCell<HashSet<RawFd, ahash::RandomState>>,
    waiting: RefCell<Waiting>,
}

/// Why a request gets no permit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum NoPermit {
    /// Too many want one.
    Crowded,
    /// Its client has its share.
    ClientsShare,
}

/// The right to one connection; dropped, it goes to whoever is next.
pub(crate) struct Permit {
    permits: Rc<Permits>,
    client: Option<IpAddr>,
    tunnel: Cell<Option<RawFd>>,
}

#[derive(Default)]
struct Waiting {
    classes: [VecDeque<Waiter>; CLASSES],
}

struct Waiter {
    client: Option<IpAddr>,
    sender: Sender<Permit>,
}

impl Permits {
    /// A permit, if fewer than `most` are taken and this client, if it is known, has less than its share of them. A
    /// permit that ends goes to who waits.
    pub(crate) fn take(self: &Rc<Self>, most: usize, client: Option<IpAddr>) -> Option<Permit> {
        self.most.set(most);
        let client = client.map(network_of);
        if self.in_use.get() >= most || self.has_its_share(client) {
            return None;
        }
        self.in_use.set(self.in_use.get() + 1);
        Some(self.hand(client))
    }

    fn has_its_share(&self, client: Option<IpAddr>) -> bool {
        let share = self.three_quarters();
        client.is_some_and(|client| self.held.borrow().get(&client).is_some_and(|held| *held >= share))
    }

    /// As many as one client, or tunnels, may have of the connections while others wait.
    pub(crate) fn three_quarters(&self) -> usize {
        self.most.get() - self.most.get() / 4
    }

    /// Whether a connection is the tunnel of the client with this socket.
    pub(crate) fn has_tunnel_of(&self, client: RawFd) -> bool {
        self.tunnels.borrow().contains(&client)
    }

    fn hand(self: &Rc<Self>, client: Option<IpAddr>) -> Permit {
        if let Some(client) = client {
            *self.held.borrow_mut().entry(client).or_insert(0) += 1;
        }
        Permit { permits: Rc::clone(self), client, tunnel: Cell::new(None) }
    }

    /// A place in the queue of a class (0 goes first), unless too many wait that are not of a lower class, or of this
    /// client; of those of a lower class the youngest makes room, and learns of it by the end of its channel.
    fn queue(&self, client: Option<IpAddr>, class: u8) -> Result<Receiver<Permit>, NoPermit> {
        let client = client.map(network_of);
        let class = usize::from(class).min(CLASSES - 1);
        let mut waiting = self.waiting.borrow_mut();
        if waiting.count() >= QUEUE / 2 {
            waiting.forget_the_gone();
            if client.is_some() && waiting.count_of(client) >= QUEUE / 2 {
                return Err(NoPermit::ClientsShare);
            }
        }
        if waiting.count() >= QUEUE {
            let mut lower = waiting.classes[class + 1..].iter_mut().rev();
            lower.find_map(VecDeque::pop_back).ok_or(NoPermit::Crowded)?;
        }
        let (sender, receiver) = oneshot::channel();
        waiting.classes[class].push_back(Waiter { client, sender });
        Ok(receiver)
    }

    /// Waits for a permit, for at most `patience`.
    pub(crate) async fn wait(
        &self,
        client: Option<IpAddr>,
        class: u8,
        patience: Duration,
    ) -> Result<Permit, NoPermit> {
        let waited = tokio::time::timeout(patience, self.queue(client, class)?).await;
        waited.ok().and_then(Result::ok).ok_or_else(|| match self.has_its_share(client.map(network_of)) {
            true => NoPermit::ClientsShare,
            false => NoPermit::Crowded,
        })
    }

    /// How many wait, and how many connections there are, if anybody waits.
    pub(crate) fn crowd(&self) -> Option<(usize, usize)> {
        let mut waiting = self.waiting.borrow_mut();
        waiting.forget_the_gone();
        Some((waiting.count(), self.most.get())).filter(|(count, _)| *count > 0)
    }

    /// Who is next of those who have not gone and have less than their share.
    fn next(&self) -> Option<Waiter> {
        let mut waiting = self.waiting.borrow_mut();
        waiting.classes.iter_mut().find_map(|class| {
            while class.front().is_some_and(|waiter| waiter.sender.is_closed()) {
                class.pop_front();
            }
            let is_next = |waiter: &Waiter| !waiter.sender.is_closed() && !self.has_its_share(waiter.client);
            class.iter().position(is_next).and_then(|place| class.remove(place))
        })
    }
}

impl Waiting {
    fn count(&self) -> usize {
        self.classes.iter().map(VecDeque::len).sum()
    }

    fn count_of(&self, client: Option<IpAddr>) -> usize {
        self.classes.iter().flatten().filter(|waiter| waiter.client == client).count()
    }

    /// Requests whose client left, or whose patience ended.
    fn forget_the_gone(&mut self) {
        self.classes.iter_mut().for_each(|class| class.retain(|waiter| !waiter.sender.is_closed()));
    }
}

impl Permit {
    /// The connection has become the tunnel of the client with this socket, which stays open for longer than the permit
    /// lasts.
    pub(crate) fn becomes_tunnel(&self, client: RawFd) {
        self.permits.tunnels.borrow_mut().insert(client);
        self.tunnel.set(Some(client));
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let permits = &self.permits;
        if let Some(client) = self.tunnel.get() {
            permits.tunnels.borrow_mut().remove(&client);
        }
        if let Some(client) = self.client
            && let Entry::Occupied(mut held) = permits.held.borrow_mut().entry(client)
        {
            *held.get_mut() -= 1;
            if *held.get() == 0 {
                held.remove();
            }
        }
        match permits.next() {
            // Its receiver is there, and this thread is the only one that could drop it.
            Some(waiter) => drop(waiter.sender.send(permits.hand(waiter.client))),
            None => permits.in_use.set(permits.in_use.get() - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const A: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)));
    const B: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)));
    const C: Option<IpAddr> = Some(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 3)));

    #[test]
    fn the_highest_class_goes_first_and_within_it_who_came_first() {
        let permits = Rc::<Permits>::default();
        let taken = permits.take(1, A).unwrap();
        let mut low = permits.queue(A, 2).unwrap();
        let (mut first, mut second) = (permits.queue(A, 0).unwrap(), permits.queue(A, 0).unwrap());
        drop(taken);
        assert!(second.try_recv().is_err() && low.try_recv().is_err());
        drop(first.try_recv().unwrap());
        drop(second.try_recv().unwrap());
        assert!(permits.take(1, A).is_none(), "the permit is the low class's");
        drop(low.try_recv().unwrap());
        assert!(permits.take(1, A).is_some());
    }

    #[test]
    fn a_permit_of_one_that_has_gone_is_passed_on() {
        let permits = Rc::<Permits>::default();
        let taken = permits.take(1, A).unwrap();
        let (gone, mut granted, mut last) =
            (permits.queue(A, 0).unwrap(), permits.queue(A, 0).unwrap(), permits.queue(A, 1).unwrap());
        drop(gone);
        drop(taken);
        let permit = granted.try_recv().unwrap();
        drop(granted);
        assert!(last.try_recv().is_err());
        drop(permit);
        // Granted, and gone before it looked.
        drop(last.try_recv().unwrap());
        let taken = permits.take(1, A).unwrap();
        let unseen = permits.queue(A, 0).unwrap();
        drop(taken);
        drop(unseen);
        assert!(permits.take(1, A).is_some());
    }

    #[test]
    fn a_full_queue_refuses_unless_a_lower_class_waits() {
        let permits = Rc::<Permits>::default();
        let _taken = permits.take(1, A).unwrap();
        let mut low: Vec<_> =
            (0..QUEUE).map(|n| permits.queue(if n % 2 == 0 { A } else { B }, 3).unwrap()).collect();
        assert_eq!(permits.queue(C, 3).err(), Some(NoPermit::Crowded));
        assert_eq!(permits.queue(C, 7).err(), Some(NoPermit::Crowded));
        let _high = permits.queue(C, 0).unwrap();
        let crowded_out = low.pop().unwrap();
        assert!(crowded_out.blocking_recv().is_err());
        drop(low);
        assert!(permits.queue(C, 7).is_ok(), "those that have gone make room");
    }

    #[test]
    fn one_client_takes_its_share_of_the_permits_and_of_the_queue_another_one_gets_in() {
        let permits = Rc::<Permits>::default();
        let taken = [permits.take(4, A).unwrap(), permits.take(4, A).unwrap(), permits.take(4, A).unwrap()];
        assert!(permits.take(4, A).is_none(), "it has its share");
        let mut waits: Vec<_> = (0..QUEUE / 2).map(|_| permits.queue(A, 0).unwrap()).collect();
        assert_eq!(permits.queue(A, 0).err(), Some(NoPermit::ClientsShare));
        let last = permits.take(4, B).unwrap();
        let mut behind = permits.queue(B, 7).unwrap();
        drop(last);
        let last = behind.try_recv().expect("those before it have their share");
        drop(taken);
        assert!(waits.iter_mut().filter_map(|wait| wait.try_recv().ok()).count() > 0);
        drop((waits, last));
        assert!(
            permits.take(4, A).is_some() && permits.held.borrow().is_empty() && permits.in_use.get() == 0
        );
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_client() {
        let permits = Rc::<Permits>::default();
        let client = |text: &str| permits.take(4, Some(text.parse().unwrap()));
        let _taken = ["2001:db8::1", "2001:db8::2", "2001:db8::3"].map(|address| client(address).unwrap());
        assert!(client("2001:db8::2:3").is_none());
        assert!(client("2001:db8:0:1::1").is_some());
        assert!(client("::ffff:192.0.2.1").is_some());
    }
}
