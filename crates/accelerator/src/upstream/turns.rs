//! Who gets the next connection to a server, when more requests want one than it may have: the highest priority class
//! first, and within a class who came first. One client gets at most three quarters of the connections, and half of the
//! places in the queue: one that sends its bodies slowly, or reads slowly what it asked for, does not keep the others out.

use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::time::Duration;

use tidegate_core::network_of;
use tokio::sync::oneshot::{self, Receiver, Sender};

use crate::admission::CLASSES;

/// Requests that may wait for a connection to one server, on one core.
const QUEUE: usize = 1024;

/// Connections in use, and who waits for one.
#[derive(Default)]
pub(crate) struct Turns {
    /// As many as could be taken at the last attempt.
    most: Cell<usize>,
    in_use: Cell<usize>,
    /// How many of them each client has; nothing for those who have none.
    held: RefCell<HashMap<IpAddr, usize, ahash::RandomState>>,
    /// The clients' sockets of those that have become tunnels.
    tunnels: RefCell<HashSet<RawFd, ahash::RandomState>>,
    waiting: RefCell<Waiting>,
}

/// Why a request gets no turn.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum NoTurn {
    /// Too many want one.
    Crowded,
    /// Its client has its share.
    ClientsShare,
}

/// The right to one connection; dropped, it goes to whoever is next.
pub(crate) struct Turn {
    turns: Rc<Turns>,
    client: Option<IpAddr>,
    tunnel: Cell<Option<RawFd>>,
}

#[derive(Default)]
struct Waiting {
    classes: [VecDeque<Waiter>; CLASSES],
}

struct Waiter {
    client: Option<IpAddr>,
    sender: Sender<Turn>,
}

impl Turns {
    /// A turn, if fewer than `most` are taken and this client, if it is known, has less than its share of them. A turn
    /// that ends goes to who waits.
    pub(crate) fn take(self: &Rc<Self>, most: usize, client: Option<IpAddr>) -> Option<Turn> {
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

    fn hand(self: &Rc<Self>, client: Option<IpAddr>) -> Turn {
        if let Some(client) = client {
            *self.held.borrow_mut().entry(client).or_insert(0) += 1;
        }
        Turn { turns: Rc::clone(self), client, tunnel: Cell::new(None) }
    }

    /// A place in the queue of a class (0 goes first), unless too many wait that are not of a lower class, or of this
    /// client; of those of a lower class the youngest makes room, and learns of it by the end of its channel.
    fn queue(&self, client: Option<IpAddr>, class: u8) -> Result<Receiver<Turn>, NoTurn> {
        let client = client.map(network_of);
        let class = usize::from(class).min(CLASSES - 1);
        let mut waiting = self.waiting.borrow_mut();
        if waiting.count() >= QUEUE / 2 {
            waiting.forget_the_gone();
            if client.is_some() && waiting.count_of(client) >= QUEUE / 2 {
                return Err(NoTurn::ClientsShare);
            }
        }
        if waiting.count() >= QUEUE {
            let mut lower = waiting.classes[class + 1..].iter_mut().rev();
            lower.find_map(VecDeque::pop_back).ok_or(NoTurn::Crowded)?;
        }
        let (sender, receiver) = oneshot::channel();
        waiting.classes[class].push_back(Waiter { client, sender });
        Ok(receiver)
    }

    /// Waits for a turn, for at most `patience`.
    pub(crate) async fn wait(
        &self,
        client: Option<IpAddr>,
        class: u8,
        patience: Duration,
    ) -> Result<Turn, NoTurn> {
        let waited = tokio::time::timeout(patience, self.queue(client, class)?).await;
        waited.ok().and_then(Result::ok).ok_or_else(|| match self.has_its_share(client.map(network_of)) {
            true => NoTurn::ClientsShare,
            false => NoTurn::Crowded,
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

impl Turn {
    /// The connection has become the tunnel of the client with this socket, which stays open for longer than the turn lasts.
    pub(crate) fn becomes_tunnel(&self, client: RawFd) {
        self.turns.tunnels.borrow_mut().insert(client);
        self.tunnel.set(Some(client));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let turns = &self.turns;
        if let Some(client) = self.tunnel.get() {
            turns.tunnels.borrow_mut().remove(&client);
        }
        if let Some(client) = self.client
            && let Entry::Occupied(mut held) = turns.held.borrow_mut().entry(client)
        {
            *held.get_mut() -= 1;
            if *held.get() == 0 {
                held.remove();
            }
        }
        match turns.next() {
            // Its receiver is there, and this thread is the only one that could drop it.
            Some(waiter) => drop(waiter.sender.send(turns.hand(waiter.client))),
            None => turns.in_use.set(turns.in_use.get() - 1),
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
        let turns = Rc::<Turns>::default();
        let taken = turns.take(1, A).unwrap();
        let mut low = turns.queue(A, 2).unwrap();
        let (mut first, mut second) = (turns.queue(A, 0).unwrap(), turns.queue(A, 0).unwrap());
        drop(taken);
        assert!(second.try_recv().is_err() && low.try_recv().is_err());
        drop(first.try_recv().unwrap());
        drop(second.try_recv().unwrap());
        assert!(turns.take(1, A).is_none(), "the turn is the low class's");
        drop(low.try_recv().unwrap());
        assert!(turns.take(1, A).is_some());
    }

    #[test]
    fn a_turn_of_one_that_has_gone_is_passed_on() {
        let turns = Rc::<Turns>::default();
        let taken = turns.take(1, A).unwrap();
        let (gone, mut granted, mut last) =
            (turns.queue(A, 0).unwrap(), turns.queue(A, 0).unwrap(), turns.queue(A, 1).unwrap());
        drop(gone);
        drop(taken);
        let turn = granted.try_recv().unwrap();
        drop(granted);
        assert!(last.try_recv().is_err());
        drop(turn);
        // Granted, and gone before it looked.
        drop(last.try_recv().unwrap());
        let taken = turns.take(1, A).unwrap();
        let unseen = turns.queue(A, 0).unwrap();
        drop(taken);
        drop(unseen);
        assert!(turns.take(1, A).is_some());
    }

    #[test]
    fn a_full_queue_refuses_unless_a_lower_class_waits() {
        let turns = Rc::<Turns>::default();
        let _taken = turns.take(1, A).unwrap();
        let mut low: Vec<_> =
            (0..QUEUE).map(|n| turns.queue(if n % 2 == 0 { A } else { B }, 3).unwrap()).collect();
        assert_eq!(turns.queue(C, 3).err(), Some(NoTurn::Crowded));
        assert_eq!(turns.queue(C, 7).err(), Some(NoTurn::Crowded));
        let _high = turns.queue(C, 0).unwrap();
        let crowded_out = low.pop().unwrap();
        assert!(crowded_out.blocking_recv().is_err());
        drop(low);
        assert!(turns.queue(C, 7).is_ok(), "those that have gone make room");
    }

    #[test]
    fn one_client_takes_its_share_of_the_turns_and_of_the_queue_another_one_gets_in() {
        let turns = Rc::<Turns>::default();
        let taken = [turns.take(4, A).unwrap(), turns.take(4, A).unwrap(), turns.take(4, A).unwrap()];
        assert!(turns.take(4, A).is_none(), "it has its share");
        let mut waits: Vec<_> = (0..QUEUE / 2).map(|_| turns.queue(A, 0).unwrap()).collect();
        assert_eq!(turns.queue(A, 0).err(), Some(NoTurn::ClientsShare));
        let last = turns.take(4, B).unwrap();
        let mut behind = turns.queue(B, 7).unwrap();
        drop(last);
        let last = behind.try_recv().expect("those before it have their share");
        drop(taken);
        assert!(waits.iter_mut().filter_map(|wait| wait.try_recv().ok()).count() > 0);
        drop((waits, last));
        assert!(turns.take(4, A).is_some() && turns.held.borrow().is_empty() && turns.in_use.get() == 0);
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_client() {
        let turns = Rc::<Turns>::default();
        let client = |text: &str| turns.take(4, Some(text.parse().unwrap()));
        let _taken = ["2001:db8::1", "2001:db8::2", "2001:db8::3"].map(|address| client(address).unwrap());
        assert!(client("2001:db8::2:3").is_none());
        assert!(client("2001:db8:0:1::1").is_some());
        assert!(client("::ffff:192.0.2.1").is_some());
    }
}
