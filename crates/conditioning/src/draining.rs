//! Connections that are over while their client still sends the content of its request. To close them would turn what
//! comes next into a reset, which may destroy the response before the client has read it (RFC 9112 §9.6): it is thrown
//! away for a while.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::neighbours::{Sent, discard_unread};

/// At most so many at a time; the one that has been here longest gives way.
const MOST: usize = 256;
/// They are looked at this often.
const LOOK: Duration = Duration::from_millis(50);
/// A client that has sent nothing for so long has read the response, or does not look.
const SILENCE: Duration = Duration::from_secs(2);
/// No client takes longer than this.
const LONGEST: Duration = Duration::from_secs(30);

/// The sockets of such connections.
#[derive(Debug, Default)]
pub struct Draining {
    clients: VecDeque<Client>,
    next_look: Option<Instant>,
}

#[derive(Debug)]
struct Client {
    socket: OwnedFd,
    since: Instant,
    heard: Instant,
}

impl Draining {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.clients.len()
    }

    /// When to look at them next.
    pub fn due(&self) -> Option<Instant> {
        self.next_look
    }

    /// A connection is over, and its client was told.
    pub fn add(&mut self, socket: OwnedFd, now: Instant) {
        if self.clients.len() >= MOST {
            self.give_up_one();
        }
        self.clients.push_back(Client { socket, since: now, heard: now });
        self.next_look.get_or_insert(now + LOOK);
    }

    /// Closes the one that has been here longest, if there is one.
    pub fn give_up_one(&mut self) -> bool {
        self.clients.pop_front().is_some()
    }

    /// Throws away what has come, and closes what has ended or had its time.
    pub fn look(&mut self, now: Instant) {
        if self.next_look.is_none_or(|due| due > now) {
            return;
        }
        self.clients.retain_mut(|client| match discard_unread(client.socket.as_fd()) {
            Sent::All => false,
            Sent::Some => {
                client.heard = now;
                now < client.since + LONGEST
            }
            Sent::Nothing => now < (client.heard + SILENCE).min(client.since + LONGEST),
        });
        self.next_look = (!self.clients.is_empty()).then(|| now + LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{Shutdown, TcpListener, TcpStream};

    fn pair() -> (TcpStream, OwnedFd) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0.into())
    }

    #[test]
    fn a_client_is_kept_while_it_sends_and_a_moment_longer_but_not_for_ever() {
        let (mut draining, begun) = (Draining::default(), Instant::now());
        let (mut sends, sending) = pair();
        let (_silent, silent) = pair();
        let (ends, ended) = pair();
        [sending, silent, ended].into_iter().for_each(|socket| draining.add(socket, begun));
        assert_eq!((draining.len(), draining.due()), (3, Some(begun + LOOK)));
        // Before it is due, nothing is looked at.
        ends.shutdown(Shutdown::Write).unwrap();
        draining.look(begun);
        assert_eq!(draining.len(), 3);
        draining.look(begun + LOOK);
        assert_eq!(draining.len(), 2);
        let mut now = begun + LOOK;
        let mut left = vec![];
        while draining.len() > 0 {
            sends.write_all(b"more").unwrap();
            now += Duration::from_secs(1);
            draining.look(now);
            left.push(draining.len());
        }
        assert_eq!((left[0], left[1], left.len()), (2, 1, 30));
        assert_eq!(draining.due(), None);
    }

    #[test]
    fn there_are_at_most_so_many_and_the_oldest_gives_way() {
        let (mut draining, now) = (Draining::default(), Instant::now());
        let clients: Vec<TcpStream> = std::iter::repeat_with(|| {
            let (client, socket) = pair();
            draining.add(socket, now);
            client
        })
        .take(MOST + 1)
        .collect();
        assert_eq!(draining.len(), MOST);
        let is_closed = |client: &TcpStream| {
            client.set_nonblocking(true).unwrap();
            client.peek(&mut [0]).is_ok()
        };
        assert_eq!([0, 1, MOST].map(|nth| is_closed(&clients[nth])), [true, false, false]);
    }
}
