//! How a keeper hears of a connection's next request.
//!
//! The keeper nearest to the server leaves the socket registered, edge-triggered, while the server has it: what the
//! client sends next is reported, and the ledger says whether the server is done. So an ordinary request needs no
//! notice, and nobody is woken by its end. Only when the client sends more before that, a notice is asked for.

use std::os::fd::AsFd;

use crate::keeper::connection::Phase;
use crate::keeper::{Keeper, PROMPT_LOOKS, READ_ALWAYS, READ_ONCE};
use crate::ledger::State;
use crate::wire::Id;
use rustix::event::epoll::EventFlags;

impl Keeper {
    /// Has epoll report what arrives; false if that cannot be.
    pub(super) fn watch(&mut self, key: u64) -> bool {
        let Some(connection) = self.connections.get(key) else { return true };
        // Most requests arrive whole: one report is enough where `persist` follows the connection from then on.
        let follows = self.place.keeps || connection.looks > 0;
        if follows && connection.is_followed && !connection.is_muted {
            return true;
        }
        let events = if follows { READ_ALWAYS } else { READ_ONCE };
        let socket = connection.socket.as_fd();
        let armed = if connection.is_watched {
            self.poller.rearm(socket, key, events)
        } else {
            self.poller.add(socket, key, events)
        };
        connection.is_watched = true;
        connection.is_followed = follows;
        connection.is_muted = false;
        armed.is_ok()
    }

    /// Has epoll report nothing for now, but once that the connection is broken.
    pub(super) fn mute(&mut self, key: u64) {
        let Some(connection) = self.connections.get(key) else { return };
        if connection.is_followed && !connection.is_muted {
            connection.is_muted = self.poller.rearm(connection.socket.as_fd(), key, EventFlags::ET).is_ok();
        }
    }

    /// Something arrived, or the client is gone.
    pub(super) fn look_at_event(&mut self, key: u64, flags: EventFlags) {
        let Some(connection) = self.connections.get(key) else { return };
        connection.is_half_closed |= flags.contains(EventFlags::RDHUP);
        match (connection.phase, connection.id) {
            (Phase::Queued | Phase::Handed, Some(id)) if self.place.keeps => self.stirred(key, id),
            (Phase::Incomplete, _) if connection.looks > PROMPT_LOOKS => {
                if !std::mem::replace(&mut connection.has_dripped, true) {
                    self.dripping.push(key);
                }
            }
            _ => self.look(key),
        }
    }

    /// Something arrived on a connection whose request was handed on.
    fn stirred(&mut self, key: u64, id: Id) {
        let Some(connection) = self.connections.get(key) else { return };
        let (generation, state) = self.place.ledger.state(id.slot);
        let id = Id { generation, ..id };
        if connection.id != Some(id) {
            if !matches!(state, State::Accepted | State::Lingering | State::EndedLocally) {
                return;
            }
            connection.id = Some(id);
            connection.since = self.now;
            if state == State::Accepted {
                // The server has taken a request itself.
                return self.mute(key);
            }
        }
        match state {
            // The server reads what comes, and says when it stops doing so: until then nobody need be woken here.
            State::Lingering => {
                connection.since = self.now;
                self.mute(key);
            }
            State::Held => {
                // Nobody has read yet: is it more than the request? The client's end is not reported again.
                let expected = connection.bundle.as_ref().map_or(0, |bundle| bundle.socket_bytes);
                let there = rustix::io::ioctl_fionread(&connection.socket).unwrap_or(u64::MAX);
                if there > expected || connection.is_half_closed {
                    self.ask_for_notice(key, id);
                }
            }
            // A socket that was muted reports the request itself once more; what comes after that is reported anew.
            State::Accepted => {
                let is_read = !connection.is_half_closed
                    && rustix::io::ioctl_fionread(&connection.socket).is_ok_and(|there| there == 0);
                if !is_read {
                    self.ask_for_notice(key, id);
                }
            }
            State::EndedLocally => self.goes_on(key),
            State::EndedForAll => self.end(key as u32),
            State::Free => {}
        }
    }

    fn ask_for_notice(&mut self, key: u64, id: Id) {
        if self.place.ledger.ask(id) {
            // Until then, content that arrives is the server's business.
            self.mute(key);
        } else if self.place.ledger.state(id.slot) == (id.generation, State::EndedLocally) {
            self.goes_on(key);
        }
    }

    /// The server is done with a connection's request: is the next one there?
    pub(super) fn goes_on(&mut self, key: u64) {
        let index = key as u32;
        let Some(connection) = self.connections.get(key) else { return };
        if !self.settings.keep {
            return self.end(index);
        }
        if connection.phase == Phase::Handed {
            connection.served(self.now);
            self.look(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::arguments::Arguments;
    use crate::keeper::{PERSIST_ARGUMENTS, Settings};
    use crate::neighbours::tests::Neighbours;
    use crate::wire::Notice;

    /// It was there when the upload was looked at, but beyond what was looked at: it was found a second or two after
    /// the response.
    #[test]
    fn request_behind_an_upload_longer_than_a_look_is_told_of() {
        let (mut place, mut neighbours) = Neighbours::around();
        place.keeps = true;
        let arguments = Arguments::parse("", PERSIST_ARGUMENTS).unwrap();
        let mut keeper = Keeper::new(place, Settings::read(&arguments, false).unwrap()).unwrap();
        let first = neighbours.present();
        assert!(keeper.take_bundles().unwrap().is_continue());
        keeper.pump().unwrap();
        let end = Some(State::EndedLocally);
        assert!(neighbours.ledger.claim(first) && neighbours.ledger.release(first, end).is_some());
        let mut upload = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n".to_vec();
        upload.resize(upload.len() + 60_000, b'x');
        neighbours.send(&upload);
        neighbours.notify(Notice::ClosedLocally(first));
        keeper.notices();
        let (generation, state) = neighbours.ledger.state(first.slot);
        assert_eq!((generation, state), (first.generation + 1, State::Held));
        let second = Id { generation, ..first };
        assert!(neighbours.ledger.claim(second));
        assert_eq!(neighbours.ledger.release(second, end), Some((State::EndedLocally, true)), "it asked");
    }

    /// Its end came with its request and is not reported again: it was found a second or two after the response.
    #[test]
    fn client_that_ended_its_side_with_its_request_is_ended_when_the_server_is_done() {
        for is_claimed_first in [false, true] {
            let (mut place, neighbours) = Neighbours::around();
            place.keeps = true;
            let arguments = Arguments::parse("", PERSIST_ARGUMENTS).unwrap();
            let mut keeper = Keeper::new(place, Settings::read(&arguments, false).unwrap()).unwrap();
            neighbours.end_clients_side();
            let id = neighbours.present();
            assert!(keeper.take_bundles().unwrap().is_continue());
            keeper.pump().unwrap();
            assert!(!is_claimed_first || neighbours.ledger.claim(id));
            for (key, flags) in keeper.poller.wait(Some(Duration::ZERO)).unwrap() {
                assert!(keeper.event(key, flags).unwrap().is_continue());
            }
            assert!(is_claimed_first || neighbours.ledger.claim(id));
            let end = Some(State::EndedLocally);
            assert_eq!(neighbours.ledger.release(id, end), Some((State::EndedLocally, true)), "it asked");
            neighbours.notify(Notice::ClosedLocally(id));
            keeper.notices();
            assert_eq!(neighbours.told(), Some(Notice::ClosedForAll(id)));
        }
    }
}
