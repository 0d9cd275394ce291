//! Deadlines of client connections, kept by a sweep now and then instead of a timer for every read.
//!
//! A session writes its deadline into a slot, which costs a store. When a deadline has passed, the sweep shuts the
//! socket's receiving side: the session wakes as if the client had left, finds its slot marked and ends with the right
//! answer and count.

use std::cell::Cell;
use std::cmp::Reverse;
use std::net::Shutdown;
use std::rc::Rc;

use crate::data_core::client::{Client, Introduced};
use crate::data_core::clients::Clients;

/// What a connection is waiting for; decides what an expired deadline means.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Waiting {
    /// Nothing that the client owes: the upstream is working.
    Nothing,
    /// A request head to become complete.
    Head,
    /// The next request on a persistent connection.
    NextRequest,
    /// More of a request body.
    Body,
    /// Either side of an upgraded connection.
    Tunnel,
}

/// One connection's deadline.
pub(crate) struct Slot {
    deadline_ms: Cell<u64>,
    waiting: Cell<Waiting>,
    expired: Cell<bool>,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            deadline_ms: Cell::new(u64::MAX),
            waiting: Cell::new(Waiting::Nothing),
            expired: Cell::new(false),
        }
    }
}

impl Slot {
    /// From now on the connection waits for `waiting`, until `deadline_ms` on the core's clock.
    #[inline]
    pub(crate) fn set(&self, waiting: Waiting, deadline_ms: u64) {
        self.waiting.set(waiting);
        self.deadline_ms.set(deadline_ms);
    }

    /// Nothing is owed by the client.
    pub(crate) fn clear(&self) {
        self.set(Waiting::Nothing, u64::MAX);
    }

    /// What the connection waited for when its deadline passed.
    pub(crate) fn expired(&self) -> Option<Waiting> {
        self.expired.get().then(|| self.waiting.get())
    }

    fn awaits_head(&self) -> bool {
        self.waiting.get() == Waiting::Head && !self.expired.get()
    }

    /// Whether a part of a request's body is awaited.
    pub(crate) fn awaits_body(&self) -> bool {
        self.waiting.get() == Waiting::Body && !self.expired.get()
    }

    /// Whether the connection is between requests.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.get() == Waiting::NextRequest && !self.expired.get()
    }
}

impl Clients {
    /// Ends every connection whose deadline has passed.
    pub(crate) fn sweep(&self, now_ms: u64) {
        self.end_those(|slot| slot.deadline_ms.get() <= now_ms);
    }

    /// Ends every connection that is between requests: the first step of a drain. Says how many there were.
    pub(crate) fn end_idle(&self) -> usize {
        self.end_those(Slot::is_idle)
    }

    /// Takes connections on which no request has begun yet for ones between requests; `but_fresh`: those alone that the
    /// kernel has kept back for as long as nothing came on them, so that nothing is on its way. On others something has:
    /// TLS, a PROXY header, the beginning of what may be HTTP/2.
    pub(crate) fn count_silent_as_idle(&self, but_fresh: bool) {
        self.for_each(|client| {
            let is_fresh = !client.speaks_plain_http1() || client.introduced() != Introduced::No;
            let is_silent = client.slot.awaits_head() && client.pending.borrow().is_none();
            if is_silent && !(but_fresh && is_fresh) {
                client.slot.set(Waiting::NextRequest, client.slot.deadline_ms.get());
            }
        });
    }

    /// Ends every upgraded connection: none of them would end by itself.
    pub(crate) fn end_tunnels(&self) {
        self.end_those(|slot| slot.waiting.get() == Waiting::Tunnel);
    }

    /// Ends connections that are of least use, to make room for others: those between requests, or else that half of
    /// those without a whole request head that has waited longest. Says how many there were.
    pub(crate) fn shed(&self) -> usize {
        let idle = self.end_idle();
        if idle > 0 {
            return idle;
        }
        let mut deadlines = Vec::new();
        self.for_each(|client| {
            if client.slot.awaits_head() {
                deadlines.push(client.slot.deadline_ms.get());
            }
        });
        if deadlines.is_empty() {
            return 0;
        }
        let middle = deadlines.len() / 2;
        let limit_ms = *deadlines.select_nth_unstable(middle).1;
        self.end_those(|slot| slot.awaits_head() && slot.deadline_ms.get() <= limit_ms)
    }

    /// Ends as many of the connections that keep the server waiting as `count` makes of their weights, those with the
    /// greatest first. Those without a weight are left alone. Says how many there were.
    pub(crate) fn end_heaviest(
        &self,
        count: impl FnOnce(&mut dyn Iterator<Item = u64>) -> usize,
        weight: impl Fn(&Client) -> Option<u64>,
    ) -> usize {
        let mut waiting = Vec::new();
        self.for_each(|client| {
            let waits =
                client.slot.waiting.get() != Waiting::Nothing || client.is_stuck() || client.is_owing();
            if waits
                && client.slot.expired().is_none()
                && let Some(weight) = weight(client)
            {
                // Of equal weight the one that has waited longest goes first, and of those the first here.
                let order = (Reverse(weight), client.slot.deadline_ms.get(), waiting.len());
                waiting.push((order, Rc::clone(client)));
            }
        });
        let count = count(&mut waiting.iter().map(|((Reverse(weight), ..), _)| *weight));
        if waiting.len() > count {
            waiting.select_nth_unstable_by_key(count, |(order, _)| *order);
            waiting.truncate(count);
        }
        for (_, client) in &waiting {
            if client.is_stuck() {
                // What the kernel holds for it is what there has to be room for.
                client.set_zero_linger();
            }
            expire(client);
        }
        waiting.len()
    }

    fn end_those(&self, chosen: impl Fn(&Slot) -> bool) -> usize {
        let mut count = 0;
        self.for_each(|client| {
            if chosen(&client.slot) {
                expire(client);
                count += 1;
            }
        });
        count
    }
}

fn expire(client: &Client) {
    let slot = &client.slot;
    slot.deadline_ms.set(u64::MAX);
    slot.expired.set(true);
    let how = match slot.waiting.get() {
        Waiting::Head | Waiting::NextRequest | Waiting::Body => Shutdown::Read,
        Waiting::Nothing | Waiting::Tunnel => Shutdown::Both,
    };
    // The peer may already have gone, which ends the session all the same.
    let _ = client.shutdown(how);
    client.wake();
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::streams::Carrier;

    /// So many clients that all owe a head, the first since longest, and their other ends.
    fn waiting_clients(count: u64) -> (Clients, Vec<Rc<Client>>, Vec<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let clients = Clients::new(Clients::epoll().unwrap());
        let (mut all, mut peers) = (Vec::new(), Vec::new());
        for deadline_ms in 0..count {
            peers.push(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            let (socket, peer) = listener.accept().unwrap();
            let client = Rc::new(Client::new(socket, peer, Introduced::No, None, (None, false)));
            client.slot.set(Waiting::Head, 1_000 + deadline_ms);
            clients.add(&client).unwrap();
            all.push(client);
        }
        (clients, all, peers)
    }

    fn ended(all: &[Rc<Client>]) -> Vec<usize> {
        (0..all.len()).filter(|index| all[*index].slot.expired().is_some()).collect()
    }

    #[test]
    fn heaviest_of_the_waiting_are_ended_and_of_equal_weight_the_oldest() {
        let (clients, all, _peers) = waiting_clients(6);
        all[4].slot.clear();
        // By one of its streams.
        let _owes = all[4].debts().owes();
        all[5].slot.clear();
        let is = |client: &Client, index: usize| std::ptr::eq(client, &*all[index]);
        let weight = |client: &Client| Some(u64::from(is(client, 3) || is(client, 5)));
        assert_eq!(clients.end_heaviest(|_| 3, weight), 3);
        assert_eq!(ended(&all), [0, 1, 3]);
        assert_eq!(
            clients.end_heaviest(|_| 3, |client| is(client, 4).then_some(1)),
            1,
            "others have no weight"
        );
        assert_eq!(ended(&all), [0, 1, 3, 4]);
    }

    #[test]
    fn more_than_wait_are_asked_for_all_are_ended_once() {
        let (clients, all, _peers) = waiting_clients(3);
        assert_eq!(clients.end_heaviest(|_| 0, |_| Some(0)), 0);
        assert_eq!(clients.end_heaviest(|_| 10, |_| Some(0)), 3);
        assert_eq!(ended(&all), [0, 1, 2]);
        assert_eq!(clients.end_heaviest(|_| 10, |_| Some(0)), 0);
    }
}
