//! What became of requests that were handed on: by notices, by the ledger, and after a death.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::time::Duration;

use crate::alive::is_alive;
use crate::host::HANDED_AGAIN;
use crate::keeper::connection::Phase;
use crate::keeper::{Flow, Keeper, SWEEP};
use crate::ledger::State;
use crate::link;
use crate::wire::{Id, Notice};

impl Keeper {
    pub(super) fn notices(&mut self) {
        while let Some(notice) = link::receive_notice(self.place.downstream.as_fd()) {
            match notice {
                Ok(notice) => self.notice(notice),
                Err(_) => self.counters.refused_total.add(1),
            }
        }
    }

    fn notice(&mut self, notice: Notice) {
        let id = notice.id();
        let Some(&index) = self.by_slot.get(&id.slot) else {
            if self.place.upstream.is_none() {
                // A connection that an earlier process of this filter handed on.
                if matches!(notice, Notice::ClosedForAll(_) | Notice::ClosedLocally(_)) {
                    self.place.ledger.free(id.slot);
                }
            } else {
                self.place.tell_upstream(notice);
            }
            return;
        };
        let Some(connection) = self.connections.by_index(index) else { return };
        let key = connection.key(index);
        // News of a presentation that is over: since then, a neighbour's death may have brought the connection here,
        // and its next request to the server.
        let (generation, state) = self.place.ledger.state(id.slot);
        let is_current = generation == id.generation;
        match notice {
            Notice::ClosedForAll(_) if !is_current => {}
            // It may be of a request that the server has read itself, and the neighbours act on news of the last one
            // only.
            Notice::ClosedForAll(_) => {
                connection.id = Some(id);
                self.end(index);
            }
            Notice::ClosedLocally(_) if !is_current || state != State::EndedLocally => {}
            Notice::ClosedLocally(_) => {
                connection.id = Some(id);
                self.goes_on(key);
            }
            Notice::HandAgain(_) => {
                if connection.phase == Phase::Handed && connection.id == Some(id) {
                    let _ = self.queue_again(key);
                }
            }
        }
    }

    /// Hands a request again, or ends it if that was done too often; continues where a server was quicker.
    fn queue_again(&mut self, key: u64) -> Flow {
        let index = key as u32;
        let Some(connection) = self.connections.get(key) else { return Flow::Break(()) };
        if connection.again == HANDED_AGAIN {
            // A process of the server that has it by now answers it itself.
            if !connection.id.is_some_and(|id| self.place.ledger.claim(id)) {
                return Flow::Continue(());
            }
            self.counters.given_up_total.add(1);
            self.refuse(index, 503);
            return Flow::Break(());
        }
        connection.again += 1;
        connection.phase = Phase::Queued;
        self.counters.handed_again_total.add(1);
        self.queue.push_back(key);
        Flow::Break(())
    }

    /// The downstream neighbour was started anew: the ledger says what became of each request that was handed to it.
    pub(super) fn hand_again(&mut self) {
        self.notices();
        for index in self.connections.indexes(Phase::Handed) {
            let Some(connection) = self.connections.by_index(index) else { continue };
            let key = connection.key(index);
            while self.take_back(key).is_continue() {}
        }
    }

    /// Goes on with a connection in the place of a neighbour that died; continues where a server was quicker.
    fn take_back(&mut self, key: u64) -> Flow {
        let index = key as u32;
        let Some(connection) = self.connections.get(key) else { return Flow::Break(()) };
        let Some(id) = connection.id else { return Flow::Break(()) };
        let (generation, state) = self.place.ledger.state(id.slot);
        let last = Id { slot: id.slot, generation };
        match state {
            State::Held if last == id && connection.bundle.is_some() => return self.queue_again(key),
            // Kept further on by a process that is no more: it lives on here. A copy of its last request may be under
            // way, which from now on no server can claim.
            State::Held | State::EndedLocally if self.settings.keep => {
                if self.place.ledger.present(id.slot).is_none() {
                    return Flow::Continue(());
                }
                connection.served(self.now);
                self.look(key);
            }
            // The server reads its requests itself: from now on they come by the filters again.
            State::Lingering => {
                self.place.ledger.let_go(last, State::EndedLocally);
                return Flow::Continue(());
            }
            // A keeper further on would have found its end; now somebody has to say it.
            State::Accepted => {
                if !self.place.ledger.ask(last) {
                    return Flow::Continue(());
                }
                connection.id = Some(last);
                connection.comes_back = true;
            }
            _ => self.end(index),
        }
        Flow::Break(())
    }

    pub(super) fn sweep(&mut self) {
        self.hand_again_lost();
        self.sweep_older(SWEEP);
    }

    /// Hands again what a process of the server received and does not claim.
    fn hand_again_lost(&mut self) {
        let handed = self.connections.all().filter_map(|(_, connection)| {
            let id = connection.id.filter(|_| connection.phase == Phase::Handed)?;
            Some((id, connection.number, connection.again > 0))
        });
        for id in self.place.lost(handed, self.now) {
            let Some(&index) = self.by_slot.get(&id.slot) else { continue };
            let connection =
                self.connections.by_index(index).filter(|connection| connection.bundle.is_some());
            if let Some(key) = connection.map(|connection| connection.key(index)) {
                let _ = self.queue_again(key);
            }
        }
    }

    /// Looks after connections that were handed on so long ago.
    pub(super) fn sweep_older(&mut self, age: Duration) {
        let mut alive = HashMap::new();
        for index in self.connections.indexes(Phase::Handed) {
            let Some(connection) = self.connections.by_index(index) else { continue };
            let Some(id) = connection.id else { continue };
            // A notice that is under way needs no help.
            if self.now.saturating_duration_since(connection.since) < age {
                continue;
            }
            let (generation, state) = self.place.ledger.state(id.slot);
            let before = id;
            let comes_back = self.place.keeps || connection.comes_back;
            let id = self.last_of_the_servers(index, Id { slot: id.slot, generation }, state).unwrap_or(id);
            if self.place.keeps && state == State::Lingering {
                // The server has read requests since the last look, which nobody was told of.
                if id != before && age > Duration::ZERO {
                    if let Some(connection) = self.connections.by_index(index) {
                        connection.since = self.now;
                    }
                    continue;
                }
                // It waited too long, or its process is no more; or its place is needed.
                if self.place.ledger.let_go(id, State::EndedLocally) {
                    self.notice(Notice::ClosedLocally(id));
                }
                continue;
            }
            match (generation, state) {
                // Otherwise `persist` has it: two that wait for the next request would both present it.
                (generation, State::EndedLocally) if generation == id.generation && comes_back => {
                    self.notice(Notice::ClosedLocally(id));
                }
                (_, State::EndedForAll) => self.end(index),
                // The first filter has ended the connection, and perhaps given its slot to another.
                (generation, state)
                    if self.place.upstream.is_some()
                        && (state == State::Free || generation != id.generation) =>
                {
                    self.forget(index);
                }
                // The first filter knows of it, unless it was started anew since; then the one that keeps it does.
                (generation, State::Accepted) if self.place.upstream.is_none() || self.place.keeps => {
                    let holder = self.place.ledger.holder(id.slot);
                    if holder != 0 && !*alive.entry(holder).or_insert_with(|| is_alive(holder)) {
                        self.counters.server_died_total.add(1);
                        self.place.ledger.end(Id { slot: id.slot, generation });
                        self.end(index);
                    }
                }
                // `persist` holds it between requests, or a filter waits to hand it on.
                _ => {}
            }
        }
    }
}

impl Keeper {
    /// The keeper nearest to the server takes over the identity of requests that the server has read itself.
    fn last_of_the_servers(&mut self, index: u32, now: Id, state: State) -> Option<Id> {
        let is_the_servers = matches!(state, State::Accepted | State::Lingering | State::EndedLocally);
        let connection = self.connections.by_index(index)?;
        if !self.place.keeps || !is_the_servers {
            return None;
        }
        connection.id = Some(now);
        Some(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::Arguments;
    use crate::keeper::{PERSIST_ARGUMENTS, Settings};
    use crate::neighbours::tests::Neighbours;

    /// A keeper that has handed on a request as often as it may, and its neighbours.
    fn handed_for_the_last_time() -> (Keeper, Neighbours, Id) {
        let (place, neighbours) = Neighbours::around();
        let arguments = Arguments::parse("", PERSIST_ARGUMENTS).unwrap();
        let mut keeper = Keeper::new(place, Settings::read(&arguments, false).unwrap()).unwrap();
        let id = neighbours.present();
        assert!(keeper.take_bundles().unwrap().is_continue());
        for _ in 0..HANDED_AGAIN {
            keeper.pump().unwrap();
            neighbours.notify(Notice::HandAgain(id));
            keeper.notices();
        }
        keeper.pump().unwrap();
        assert_eq!(keeper.counters.handed_total.get(), u64::from(HANDED_AGAIN) + 1);
        (keeper, neighbours, id)
    }

    #[test]
    fn request_handed_too_often_is_answered_503_and_can_no_longer_be_claimed() {
        let (mut keeper, mut neighbours, id) = handed_for_the_last_time();
        keeper.hand_again();
        assert!(!neighbours.ledger.claim(id));
        assert!(neighbours.answer().starts_with("HTTP/1.1 503 "));
        assert_eq!(neighbours.told(), Some(Notice::ClosedForAll(id)));
    }

    /// The filters before it were told of the request that had been presented, did not believe it, and kept their
    /// handles for ever.
    #[test]
    fn neighbours_are_told_of_a_connections_end_by_the_last_request_that_the_server_has_read_itself() {
        for end in [State::EndedLocally, State::EndedForAll] {
            let (mut place, neighbours) = Neighbours::around();
            place.keeps = true;
            let arguments = Arguments::parse("", PERSIST_ARGUMENTS).unwrap();
            let mut keeper = Keeper::new(place, Settings::read(&arguments, false).unwrap()).unwrap();
            let first = neighbours.present();
            assert!(keeper.take_bundles().unwrap().is_continue());
            keeper.pump().unwrap();
            let ledger = &neighbours.ledger;
            assert!(ledger.claim(first) && ledger.linger(first));
            let last = ledger.resume_for(first, std::process::id()).unwrap();
            assert!(ledger.release(last, Some(end)).is_some());
            neighbours.end_clients_side();
            let is_local = end == State::EndedLocally;
            neighbours.notify(if is_local {
                Notice::ClosedLocally(last)
            } else {
                Notice::ClosedForAll(last)
            });
            keeper.notices();
            assert_eq!(neighbours.told(), Some(Notice::ClosedForAll(last)));
            assert_eq!(neighbours.ledger.state(last.slot), (last.generation, State::EndedForAll));
        }
    }

    /// It was answered 503, and by the server.
    #[test]
    fn request_handed_too_often_that_a_server_has_claimed_is_answered_by_the_server_only() {
        let (mut keeper, mut neighbours, id) = handed_for_the_last_time();
        assert!(neighbours.ledger.claim(id));
        neighbours.notify(Notice::HandAgain(id));
        keeper.notices();
        assert_eq!(neighbours.ledger.state(id.slot), (id.generation, State::Accepted));
        assert_eq!(neighbours.answer(), "the server's");
        assert_eq!(neighbours.told(), None);
    }
}
