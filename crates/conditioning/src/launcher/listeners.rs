//! The listening sockets of a statically linked server, each with what the kernel would have given it.
//!
//! In the place of each the server has one end of a pair of its own, and the launcher the other. A byte makes the
//! server's end readable, so that poll and epoll report it, edge-triggered sets too: each connection brings a byte. An
//! accept takes all bytes off again. When the server has closed its end everywhere, the launcher's end hangs up.
//!
//! Sockets with the same address (SO_REUSEPORT) are one listener: any of them may take a connection, and all are told
//! of it.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::launcher::asker::{handle_to, name_of};
use crate::server::{self, Listening};

/// A connection that the relay has, and a server has yet to get.
pub struct Accepted {
    /// The server's end.
    pub server: OwnedFd,
    pub peer: SocketAddr,
}

/// Connections that are set aside for a listener, at most: each takes three descriptors of the launcher's. Further ones
/// wait on the link, and others behind them.
const MOST_SET_ASIDE: usize = 64;
/// A listener from which nobody has accepted for so long is given up: what comes beyond that is ended.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(60);

/// One socket of a listener's.
struct ListeningSocket {
    /// Tells it from every other, before and after.
    number: u64,
    /// The name in /proc of the end that the server has.
    name: String,
    ours: OwnedFd,
    /// Who listened, and on which descriptor.
    opened_by: (u32, RawFd),
    /// There are bytes in it.
    is_told: bool,
    is_alone: bool,
}

impl ListeningSocket {
    /// Whether a process has the server's end: that nobody does may not have been looked at yet.
    fn is_open(&self) -> bool {
        let mut watched = [PollFd::new(&self.ours, PollFlags::empty())];
        rustix::event::poll(&mut watched, Some(&Timespec::default())) == Ok(0)
    }

    fn tell(&mut self) {
        // Full of bytes it is readable as well.
        let _ = rustix::net::send(&self.ours, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        self.is_told = true;
    }

    /// Takes the bytes off the server's end, which is the descriptor `fd` of that process.
    fn hush(&mut self, (process, fd): (u32, RawFd)) {
        if !self.is_told {
            return;
        }
        if let Some(theirs) = handle_to(process, fd) {
            let _ = rustix::net::recv(&theirs, &mut [0u8; 4096][..], RecvFlags::DONTWAIT);
            self.is_told = false;
        }
    }
}

/// The sockets of one address.
pub struct Listener {
    /// Tells it from every other, before and after.
    id: u64,
    bound: Listening,
    sockets: Vec<ListeningSocket>,
    /// Taken off the link, and not accepted yet: what others were waited for behind, and what an interrupted accept
    /// left.
    waiting: VecDeque<Accepted>,
    /// Nobody accepts from it.
    pub is_stalled: bool,
    /// When somebody last did, or it began to listen.
    accepted: Instant,
    /// Something came that its sockets have not been told of.
    pub has_news: bool,
}

impl Listener {
    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn bound(&self) -> Listening {
        self.bound
    }

    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Somebody accepts.
    pub fn accepts(&mut self, now: Instant) {
        self.is_stalled = false;
        self.accepted = now;
    }

    /// Whether the next connection is to be taken off the link, be it to end it: others are behind it, and nobody takes
    /// it.
    pub fn lets_others_pass(&self, now: Instant) -> bool {
        let has_room = self.waiting.len() < MOST_SET_ASIDE;
        self.is_stalled && (has_room || now.duration_since(self.accepted) >= GIVEN_UP_AFTER)
    }

    pub fn push(&mut self, accepted: Accepted) {
        // What is dropped is over: the relay ends the client's connection, too.
        if self.waiting.len() < MOST_SET_ASIDE {
            self.waiting.push_back(accepted);
            self.has_news = true;
        }
    }

    /// An accept did not get it.
    pub fn push_again(&mut self, accepted: Accepted) {
        self.waiting.push_front(accepted);
        self.has_news = true;
    }

    pub fn pop(&mut self) -> Option<Accepted> {
        self.waiting.pop_front()
    }

    /// Takes what tells the socket of that name off, of which somebody accepts by `place`.
    pub fn hush(&mut self, name: &str, place: (u32, RawFd)) {
        self.sockets.iter_mut().filter(|socket| socket.name == name).for_each(|socket| socket.hush(place));
    }
}

/// A socket that was put in the place of the server's.
pub struct Placed {
    pub number: u64,
    pub name: String,
    pub ours: OwnedFd,
    pub opened_by: (u32, RawFd),
    /// It shares its address with nobody (SO_REUSEPORT, socket(7)).
    pub is_alone: bool,
}

/// The launcher's end of a pair, and the one that the server gets in the place of a socket.
pub fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

/// All listeners of one server, in the order in which they began to listen.
#[derive(Default)]
pub struct Listeners {
    all: Vec<Listener>,
    next_number: u64,
}

impl Listeners {
    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn next_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// A socket listens: it shares the connections of those with the same address.
    pub fn add(&mut self, bound: Listening, placed: Placed) {
        let Placed { number, name, ours, opened_by, is_alone } = placed;
        let socket = ListeningSocket { number, name, ours, opened_by, is_told: false, is_alone };
        if let Some(same) = self.all.iter_mut().find(|listener| listener.bound == bound) {
            same.sockets.push(socket);
            return;
        }
        self.all.push(Listener {
            id: number,
            bound,
            sockets: vec![socket],
            waiting: VecDeque::new(),
            is_stalled: false,
            accepted: Instant::now(),
            has_news: false,
        });
    }

    /// Whether one listens at `address` that shares it with nobody: bind(2) fails for others then.
    pub fn is_taken(&self, address: SocketAddr) -> bool {
        let there = self.all.iter().filter(|listener| listener.bound.address == address);
        there.flat_map(|listener| &listener.sockets).any(|socket| socket.is_alone && socket.is_open())
    }

    /// Nobody has the socket any more. Returns its name. What waits for a listener without sockets is over.
    pub fn remove(&mut self, number: u64) -> Option<String> {
        let is_this = |socket: &ListeningSocket| socket.number == number;
        let listener = self.all.iter_mut().find(|listener| listener.sockets.iter().any(is_this))?;
        let at = listener.sockets.iter().position(is_this)?;
        let name = listener.sockets.remove(at).name;
        self.all.retain(|listener| !listener.sockets.is_empty());
        Some(name)
    }

    pub fn get(&mut self, id: u64) -> Option<&mut Listener> {
        self.all.iter_mut().find(|listener| listener.id == id)
    }

    /// The listener that has a socket of that name.
    pub fn named(&self, name: &str) -> Option<&Listener> {
        self.all.iter().find(|listener| listener.sockets.iter().any(|socket| socket.name == name))
    }

    /// The listener that a connection to `local` is for.
    pub fn for_local(&mut self, local: IpAddr) -> Option<&mut Listener> {
        let at = server::chosen(self.all.iter().map(|listener| listener.bound), local)?;
        self.all.get_mut(at)
    }

    pub fn first(&self) -> Option<&Listener> {
        self.all.first()
    }

    /// Tells the sockets of what came, and those that an accept has hushed of what is left; `offered` is the listener
    /// for which a connection is on the link.
    pub fn tell(&mut self, offered: Option<u64>) {
        for listener in &mut self.all {
            let has_connection = listener.has_waiting() || offered == Some(listener.id);
            let has_news = std::mem::take(&mut listener.has_news);
            let is_due = |socket: &&mut ListeningSocket| has_connection && (has_news || !socket.is_told);
            listener.sockets.iter_mut().filter(is_due).for_each(ListeningSocket::tell);
        }
    }

    /// The connection that sockets were told of is for another now, which listens since: a server whose accept waits
    /// would wait in vain. Only those are found that are where they were when they began to listen.
    pub fn hush_in_vain(&mut self, offered: Option<u64>) {
        let in_vain = |listener: &&mut Listener| !listener.has_waiting() && offered != Some(listener.id);
        for listener in self.all.iter_mut().filter(in_vain) {
            for socket in listener.sockets.iter_mut().filter(|socket| socket.is_told) {
                let (process, fd) = socket.opened_by;
                if name_of(process, fd).is_some_and(|name| name == socket.name) {
                    socket.hush((process, fd));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(address: &str) -> Listening {
        SocketAddr::new(address.parse().unwrap(), 80).into()
    }

    #[test]
    fn sockets_of_one_address_are_one_listener_until_the_last_is_closed() {
        let mut listeners = Listeners::default();
        let mut theirs = Vec::new();
        for (number, address) in [(1, "127.0.0.1"), (2, "127.0.0.2"), (3, "127.0.0.1")] {
            let (ours, server) = pair().unwrap();
            theirs.push(server);
            let name = format!("socket:[{number}]");
            listeners.add(bound(address), Placed { number, name, ours, opened_by: (0, -1), is_alone: false });
        }
        assert_eq!(listeners.len(), 2);
        let first = listeners.for_local([127, 0, 0, 1].into()).unwrap().id();
        assert_eq!(listeners.named("socket:[3]").unwrap().id(), first);
        listeners.get(first).unwrap().has_news = true;
        listeners.tell(Some(first));
        let is_told = |end: &OwnedFd| rustix::io::ioctl_fionread(end).unwrap() > 0;
        assert_eq!(theirs.iter().map(is_told).collect::<Vec<_>>(), [true, false, true]);
        assert_eq!(listeners.remove(1).as_deref(), Some("socket:[1]"));
        assert_eq!(listeners.for_local([127, 0, 0, 1].into()).unwrap().id(), first);
        assert_eq!(listeners.remove(3).as_deref(), Some("socket:[3]"));
        assert_ne!(listeners.for_local([127, 0, 0, 1].into()).unwrap().id(), first);
        assert_eq!(listeners.remove(3), None);
    }

    /// A server that is busy for longer than the others can wait had its clients beyond the bound ended.
    #[test]
    fn a_listener_of_which_nobody_accepts_sets_aside_some_and_ends_more_only_when_it_is_given_up() {
        let mut listeners = Listeners::default();
        let (ours, _theirs) = pair().unwrap();
        let name = String::from("socket:[1]");
        let at = SocketAddr::from(([0, 0, 0, 0], 80));
        listeners.add(at.into(), Placed { number: 1, name, ours, opened_by: (0, -1), is_alone: false });
        let listener = listeners.get(1).unwrap();
        let (now, much_later) = (listener.accepted, listener.accepted + GIVEN_UP_AFTER);
        assert!(!listener.lets_others_pass(much_later), "it was offered nothing");
        listener.is_stalled = true;
        let mut ends = Vec::new();
        let mut push = |listener: &mut Listener| {
            let (relay, server) = pair().unwrap();
            let peer = SocketAddr::from(([127, 0, 0, 1], ends.len() as u16));
            listener.push(Accepted { server, peer });
            ends.push(relay);
            ends.iter()
                .filter(|end| rustix::net::recv(end, &mut [0u8][..], RecvFlags::DONTWAIT).is_ok())
                .count()
        };
        for _ in 0..MOST_SET_ASIDE {
            assert!(listener.lets_others_pass(now));
            assert_eq!(push(listener), 0);
        }
        assert!(!listener.lets_others_pass(now));
        assert!(listener.lets_others_pass(much_later));
        assert_eq!(push(listener), 1);
        let taken = listener.pop().unwrap();
        assert_eq!(taken.peer.port(), 0);
        listener.accepts(much_later);
        assert!(!listener.lets_others_pass(much_later));
        listener.is_stalled = true;
        assert!(listener.lets_others_pass(much_later));
        assert_eq!(push(listener), 1);
        assert!(!listener.lets_others_pass(much_later), "somebody accepted");
    }
}
