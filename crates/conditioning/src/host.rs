//! The framework: runs a filter that is no more than a few functions as a process of its own, or several in a row.
//!
//! A per-request filter answers [`Filter::arrive`] with [`Disposition::Pass`] or a refusal. A policy filter answers
//! [`Disposition::Hold`], and says in [`Filter::pick`] which of the requests it holds is next when the neighbour asks.

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use tidegate_core::metric_set;
use tidegate_core::metrics::Sample;

use crate::arguments::Argument;
use crate::ledger::State;
use crate::link::{self, Received, Request};
use crate::neighbours::{Downstream, FilterError, Place, Poller, TICK, answer, word};
use crate::wire::{Bundle, Id, Notice};

/// What a filter decided about a request that arrived.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Disposition {
    /// Hand it on, in the order of arrival.
    Pass,
    /// Keep it until [`Filter::pick`] names it.
    Hold,
    /// Answer with this status and these field lines (each ending in CRLF), and end the connection.
    Refuse(u16, &'static str),
    /// End the connection without an answer.
    Reset,
}

/// A filter. Nothing here waits; `now` is the time of the event.
pub trait Filter {
    /// Its name in counters.
    fn name(&self) -> &'static str;

    /// A request has come; it may be rewritten.
    fn arrive(&mut self, request: &mut Bundle, now: Instant) -> Disposition;

    /// The neighbour asks: which of the requests held is next?
    fn pick(&mut self, _now: Instant) -> Option<Id> {
        None
    }

    /// A request was handed on.
    fn handed(&mut self, _request: &Bundle, _now: Instant) {}

    /// The server is done with a request, or its connection has ended, handed on or not.
    fn closed(&mut self, _request: &Bundle, _now: Instant) {}

    /// Whether the filter holds requests in an order of its own; if not, it takes no more than it can hand on.
    fn holds(&self) -> bool {
        false
    }

    /// Whether [`Filter::closed`] is to be called at once; if not, it is called when the next request of the same
    /// connection comes, or a second later, which costs no notice for each request.
    fn wants_notices(&self) -> bool {
        false
    }

    /// The filter's own counters.
    fn samples(&self) -> Vec<Sample> {
        Vec::new()
    }

    /// A second has passed.
    fn tick(&mut self, _now: Instant) {}
}

metric_set! {
    /// What the framework counts for every filter.
    pub struct Counters {
        Counter requests_total: "Requests that came from upstream.",
        Counter handed_total: "Requests handed on.",
        Counter handed_again_total: "Requests handed on once more after a neighbour died, or received and did not claim them.",
        Counter given_up_total: "Requests ended because they were handed again too often.",
        Counter refused_total: "Requests refused with an answer.",
        Counter reset_total: "Connections ended without an answer.",
        Counter stale_total: "Bundles dropped because another copy was served or the connection was over.",
        Counter malformed_total: "Datagrams dropped because they were not of the protocol.",
        Gauge held: "Requests held, handed on or not, that the server is not done with.",
    }
}

/// The arguments that every filter takes beside its own.
pub const WINDOW: Argument = Argument {
    key: "window",
    default: "16384",
    help: "bytes that the next program may have unread when it is handed more; 0: one request at a time",
};

const KEY_UPSTREAM: u64 = 0;
const KEY_DOWNSTREAM: u64 = 1;
const KEY_CONTROL: u64 = 2;

/// A request that was handed so many times more than once is not handed again: it may be what its filter dies of.
pub(crate) const HANDED_AGAIN: u8 = 16;

struct Held {
    request: Request,
    is_handed: bool,
    again: u8,
    since: Instant,
    /// Among those handed on; 0 before.
    number: u64,
}

/// The filters of one process. A request passes them in order, and only the last holds any back.
struct Row {
    filters: Vec<Box<dyn Filter>>,
    name: String,
}

impl Row {
    fn new(filters: Vec<Box<dyn Filter>>) -> Self {
        let name = filters.iter().map(|filter| filter.name()).collect::<Vec<_>>().join("+");
        Self { filters, name }
    }

    /// What the first says that does not let it pass. Those before it are told that it is over if it is refused.
    fn arrive(&mut self, request: &mut Bundle, now: Instant) -> Disposition {
        for at in 0..self.filters.len() {
            match self.filters[at].arrive(request, now) {
                Disposition::Pass => {}
                Disposition::Hold => return Disposition::Hold,
                refused => {
                    self.filters[..at].iter_mut().for_each(|filter| filter.closed(request, now));
                    return refused;
                }
            }
        }
        Disposition::Pass
    }

    fn pick(&mut self, now: Instant) -> Option<Id> {
        self.filters.last_mut()?.pick(now)
    }

    fn handed(&mut self, request: &Bundle, now: Instant) {
        self.filters.iter_mut().for_each(|filter| filter.handed(request, now));
    }

    fn closed(&mut self, request: &Bundle, now: Instant) {
        self.filters.iter_mut().for_each(|filter| filter.closed(request, now));
    }

    fn tick(&mut self, now: Instant) {
        self.filters.iter_mut().for_each(|filter| filter.tick(now));
    }

    fn holds(&self) -> bool {
        self.filters.last().is_some_and(|last| last.holds())
    }

    fn wants_notices(&self) -> bool {
        self.filters.iter().any(|filter| filter.wants_notices())
    }

    /// The framework's counters and the filters' own: a line for each of several.
    fn print_counters(&self, mut samples: Vec<Sample>) {
        if let [only] = &self.filters[..] {
            samples.extend(only.samples());
        }
        crate::filters::print_counters(&self.name, &samples);
        for filter in self.filters.iter().filter(|_| self.filters.len() > 1) {
            crate::filters::print_counters(filter.name(), &filter.samples());
        }
    }
}

/// Filters at work.
struct Host {
    row: Row,
    place: Place,
    poller: Poller,
    counters: Counters,
    window_bytes: usize,
    most: usize,
    /// By slot: a connection has one request at a time.
    held: HashMap<u32, Held>,
    /// What is to be handed on in the order of arrival.
    passing: VecDeque<Id>,
    /// How many are held and not handed on.
    waiting: usize,
    downstream: Downstream,
    takes_more: bool,
    scratch: Vec<u8>,
    now: Instant,
}

type Flow = std::ops::ControlFlow<()>;

/// Runs filters, in order, in this process's place until the chain is gone; the next program may have `window_bytes`
/// unread when it is handed more.
///
/// # Errors
/// There is no place in a chain, or a system call failed.
pub fn run(filters: Vec<Box<dyn Filter>>, window_bytes: usize) -> Result<(), FilterError> {
    Host::new(Row::new(filters), Place::inherit()?, window_bytes)?.run()
}

impl Host {
    fn new(row: Row, place: Place, window_bytes: usize) -> Result<Self, FilterError> {
        let poller = Poller::new()?;
        let system = |error| FilterError::System("epoll_ctl", error);
        let upstream = place
            .upstream
            .as_ref()
            .ok_or(FilterError::NotInAChain(crate::neighbours::environment::UPSTREAM))?;
        poller.add(upstream.as_fd(), KEY_UPSTREAM, EventFlags::IN).map_err(system)?;
        let downstream = Downstream::watch(&poller, &place, KEY_DOWNSTREAM).map_err(system)?;
        poller.add(place.control.as_fd(), KEY_CONTROL, EventFlags::IN).map_err(system)?;
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1024);
        let now = Instant::now();
        Ok(Self {
            row,
            place,
            poller,
            counters: Counters::default(),
            window_bytes,
            most: usize::try_from(files).unwrap_or(1024).saturating_sub(64).max(1),
            held: HashMap::new(),
            passing: VecDeque::new(),
            waiting: 0,
            downstream,
            takes_more: true,
            scratch: Vec::new(),
            now,
        })
    }

    fn run(mut self) -> Result<(), FilterError> {
        crate::confine::confine(&self.row.name);
        self.place.say_ready();
        loop {
            let events = self.poller.wait(None)?;
            self.now = Instant::now();
            for (key, flags) in events {
                if self.event(key, flags).is_break() {
                    return Ok(());
                }
            }
            if self.poller.has_ticked() {
                self.sweep();
            }
            self.pump()?;
            self.adjust_intake();
        }
    }

    fn event(&mut self, key: u64, flags: EventFlags) -> Flow {
        match key {
            KEY_UPSTREAM => return self.take_in(),
            KEY_DOWNSTREAM => {
                if flags.contains(EventFlags::HUP) {
                    return Flow::Break(());
                }
                self.notices();
            }
            _ => loop {
                match self.place.launchers_word() {
                    Err(_) => return Flow::Break(()),
                    Ok(None) => break,
                    Ok(Some(word::HAND_AGAIN)) => self.hand_again(),
                    Ok(Some(word::COUNTERS)) => self.print_counters(),
                    Ok(Some(_)) => {}
                }
            },
        }
        Flow::Continue(())
    }

    /// Whether another request may be taken: a filter without an order of its own leaves waiting to those that have
    /// one.
    fn has_room(&self) -> bool {
        self.held.len() < self.most && (self.row.holds() || self.passing.is_empty())
    }

    /// Back-pressure: while there is no room, what comes waits in the link and before it.
    fn adjust_intake(&mut self) {
        let wanted = self.has_room();
        if wanted != self.takes_more
            && let Some(upstream) = &self.place.upstream
        {
            let events = if wanted { EventFlags::IN } else { EventFlags::empty() };
            self.takes_more = wanted ^ self.poller.rearm(upstream.as_fd(), KEY_UPSTREAM, events).is_err();
        }
    }

    fn take_in(&mut self) -> Flow {
        if self.held.len() >= self.most {
            // What is over and was not reported makes room.
            self.drop_ended(Duration::ZERO);
        }
        for _ in 0..64 {
            if !self.has_room() {
                break;
            }
            let Some(upstream) = &self.place.upstream else { break };
            match link::receive(upstream.as_fd(), true, true) {
                Ok(Received::Request(request)) => self.arrived(request),
                Ok(Received::Nothing) | Err(_) => break,
                Ok(Received::Gone) => return Flow::Break(()),
                Ok(Received::Refused(_)) => self.counters.malformed_total.add(1),
                Ok(Received::OutOfDescriptors(bundle)) => {
                    self.place.tell_upstream(Notice::HandAgain(bundle.id));
                }
            }
        }
        Flow::Continue(())
    }

    fn arrived(&mut self, mut request: Request) {
        let id = request.bundle.id;
        let is_known = self.held.get(&id.slot).is_some_and(|held| held.request.bundle.id == id);
        if is_known || !self.place.ledger.is_held(id) {
            self.counters.stale_total.add(1);
            return;
        }
        self.drop_held(id.slot);
        self.counters.requests_total.add(1);
        match self.row.arrive(&mut request.bundle, self.now) {
            Disposition::Pass => self.passing.push_back(id),
            Disposition::Hold => {}
            // An earlier process of this filter handed it on, and the server has it by now.
            Disposition::Refuse(..) | Disposition::Reset if !self.place.ledger.claim(id) => {
                self.counters.stale_total.add(1);
                return;
            }
            Disposition::Refuse(status, fields) => {
                self.counters.refused_total.add(1);
                answer(request.socket.as_fd(), status, fields);
                return self.end(id);
            }
            Disposition::Reset => {
                self.counters.reset_total.add(1);
                return self.end(id);
            }
        }
        if self.row.wants_notices() {
            self.place.ledger.ask(id);
        }
        self.held.insert(id.slot, Held { request, is_handed: false, again: 0, since: self.now, number: 0 });
        self.waiting += 1;
        self.counters.held.add(1);
    }

    /// After the answer: who sees in the ledger that a connection is to end ends it.
    fn end(&self, id: Id) {
        self.place.ledger.end(id);
        self.place.tell_upstream(Notice::ClosedForAll(id));
    }

    fn drop_held(&mut self, slot: u32) {
        if let Some(held) = self.held.remove(&slot) {
            self.waiting -= usize::from(!held.is_handed);
            self.counters.held.sub(1);
            self.row.closed(&held.request.bundle, self.now);
        }
    }

    fn pump(&mut self) -> Result<(), FilterError> {
        while self.waiting > 0 && self.place.wants_more(self.window_bytes) {
            let passing = self.passing.pop_front();
            let Some(id) = passing.or_else(|| self.row.pick(self.now)) else { break };
            let waiting =
                self.held.get(&id.slot).filter(|held| held.request.bundle.id == id && !held.is_handed);
            let Some(held) = waiting else { continue };
            if !self.place.ledger.is_held(id) {
                // The client's connection ended, or another copy of this request is being served.
                self.counters.stale_total.add(1);
                self.drop_held(id.slot);
                continue;
            }
            let handed = self
                .place
                .hand(&held.request.bundle, held.request.socket.as_fd(), &mut self.scratch)
                .map_err(|error| FilterError::System("link downstream", error))?;
            let Some(number) = handed else {
                self.passing.push_front(id);
                break;
            };
            self.counters.handed_total.add(1);
            if let Some(held) = self.held.get_mut(&id.slot) {
                held.is_handed = true;
                held.since = self.now;
                held.number = number;
                self.waiting -= 1;
                self.row.handed(&held.request.bundle, self.now);
            }
        }
        let waits = self.waiting > 0;
        let failed = |error| FilterError::System("epoll_ctl", error);
        // Should the neighbour have taken everything meanwhile, the kernel says so at once: the link is writable.
        self.downstream.waits(&self.poller, &self.place, waits).map_err(failed)
    }

    fn notices(&mut self) {
        while let Some(notice) = link::receive_notice(self.place.downstream.as_fd()) {
            let Ok(notice) = notice else {
                self.counters.malformed_total.add(1);
                continue;
            };
            let id = notice.id();
            let is_ours = self.held.get(&id.slot).is_some_and(|held| held.request.bundle.id == id);
            match notice {
                Notice::HandAgain(_) if is_ours => self.again(id),
                Notice::HandAgain(_) => self.place.tell_upstream(notice),
                Notice::ClosedLocally(_) | Notice::ClosedForAll(_) => {
                    if is_ours {
                        self.drop_held(id.slot);
                    }
                    self.place.tell_upstream(notice);
                }
            }
        }
    }

    fn again(&mut self, id: Id) {
        let Some(held) = self.held.get_mut(&id.slot).filter(|held| held.is_handed) else { return };
        if held.again == HANDED_AGAIN {
            // A process of the server that has it by now answers it itself.
            if self.place.ledger.claim(id) {
                self.counters.given_up_total.add(1);
                answer(held.request.socket.as_fd(), 503, "");
                self.drop_held(id.slot);
                self.end(id);
            }
            return;
        }
        held.again += 1;
        held.is_handed = false;
        self.waiting += 1;
        self.counters.handed_again_total.add(1);
        self.passing.push_back(id);
    }

    fn handed_ids(&self) -> Vec<(Id, Instant)> {
        let handed = self.held.values().filter(|held| held.is_handed);
        handed.map(|held| (held.request.bundle.id, held.since)).collect()
    }

    fn hand_again(&mut self) {
        self.notices();
        for (id, _) in self.handed_ids() {
            if self.place.ledger.is_held(id) {
                self.again(id);
            }
        }
    }

    /// Finds in the ledger what no notice said.
    fn sweep(&mut self) {
        self.row.tick(self.now);
        self.hand_again_lost();
        self.drop_ended(TICK);
    }

    /// Hands again what a process of the server received and does not claim.
    fn hand_again_lost(&mut self) {
        let handed = self.held.values().filter(|held| held.is_handed);
        let handed = handed.map(|held| (held.request.bundle.id, held.number, held.again > 0));
        self.place.lost(handed, self.now).into_iter().for_each(|id| self.again(id));
    }

    /// Drops what was handed on so long ago and is over.
    fn drop_ended(&mut self, age: Duration) {
        for (id, since) in self.handed_ids() {
            let (generation, state) = self.place.ledger.state(id.slot);
            let lives = generation == id.generation && matches!(state, State::Held | State::Accepted);
            if !lives && self.now.saturating_duration_since(since) >= age {
                self.drop_held(id.slot);
            }
        }
    }

    fn print_counters(&self) {
        self.row.print_counters(self.counters.samples());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;
    use crate::neighbours::tests::Neighbours;

    /// Passes on everything.
    struct Passes;

    impl Filter for Passes {
        fn name(&self) -> &'static str {
            "passes"
        }

        fn arrive(&mut self, _request: &mut Bundle, _now: Instant) -> Disposition {
            Disposition::Pass
        }
    }

    /// Refuses everything, but not before a server has it.
    struct RefusesTooLate(Ledger);

    impl Filter for RefusesTooLate {
        fn name(&self) -> &'static str {
            "refuses too late"
        }

        fn arrive(&mut self, request: &mut Bundle, _now: Instant) -> Disposition {
            assert!(self.0.claim(request.id));
            Disposition::Refuse(503, "")
        }
    }

    /// Refuses everything.
    struct Refuses;

    impl Filter for Refuses {
        fn name(&self) -> &'static str {
            "refuses"
        }

        fn arrive(&mut self, _request: &mut Bundle, _now: Instant) -> Disposition {
            Disposition::Refuse(503, "")
        }
    }

    /// A filter that has handed on a request as often as it may, and its neighbours.
    fn handed_for_the_last_time() -> (Host, Neighbours, Id) {
        let (place, neighbours) = Neighbours::around();
        let mut host = Host::new(Row::new(vec![Box::new(Passes)]), place, 1 << 20).unwrap();
        let id = neighbours.present();
        assert!(host.take_in().is_continue());
        for _ in 0..HANDED_AGAIN {
            host.pump().unwrap();
            neighbours.notify(Notice::HandAgain(id));
            host.notices();
        }
        host.pump().unwrap();
        assert_eq!(host.counters.handed_total.get(), u64::from(HANDED_AGAIN) + 1);
        (host, neighbours, id)
    }

    #[test]
    fn request_handed_too_often_is_answered_503_and_can_no_longer_be_claimed() {
        let (mut host, mut neighbours, id) = handed_for_the_last_time();
        neighbours.notify(Notice::HandAgain(id));
        host.notices();
        assert!(!neighbours.ledger.claim(id));
        assert!(neighbours.answer().starts_with("HTTP/1.1 503 "));
        assert_eq!(neighbours.told(), Some(Notice::ClosedForAll(id)));
    }

    /// It was answered 503, and by the server.
    #[test]
    fn request_handed_too_often_that_a_server_has_claimed_is_answered_by_the_server_only() {
        let (mut host, mut neighbours, id) = handed_for_the_last_time();
        assert!(neighbours.ledger.claim(id));
        neighbours.notify(Notice::HandAgain(id));
        host.notices();
        assert_eq!(neighbours.ledger.state(id.slot), (id.generation, State::Accepted));
        assert_eq!(neighbours.answer(), "the server's");
        assert_eq!(neighbours.told(), None);
    }

    /// As above: a process of the filter that is no more had handed it on.
    #[test]
    fn request_refused_that_a_server_has_claimed_is_answered_by_the_server_only() {
        let (place, mut neighbours) = Neighbours::around();
        let refuses = RefusesTooLate(neighbours.ledger());
        let mut host = Host::new(Row::new(vec![Box::new(refuses)]), place, 1 << 20).unwrap();
        let id = neighbours.present();
        assert!(host.take_in().is_continue());
        assert_eq!(neighbours.ledger.state(id.slot), (id.generation, State::Accepted));
        assert_eq!(neighbours.answer(), "the server's");
        assert_eq!((neighbours.told(), host.counters.stale_total.get()), (None, 1));
    }

    /// Whoever saw in the ledger that the connection was to end ended it, and the answer was lost.
    #[test]
    fn request_refused_is_over_for_its_neighbours_only_once_it_is_answered() {
        for round in 0..1000 {
            let (place, mut neighbours) = Neighbours::around();
            let mut host = Host::new(Row::new(vec![Box::new(Refuses)]), place, 1 << 20).unwrap();
            let (id, ledger) = (neighbours.present(), neighbours.ledger());
            std::thread::scope(|scope| {
                let neighbour = scope.spawn(|| {
                    while ledger.state(id.slot).1 != State::EndedForAll {
                        std::hint::spin_loop();
                    }
                    neighbours.answer()
                });
                assert!(host.take_in().is_continue());
                let received = neighbour.join().unwrap();
                assert!(received.starts_with("HTTP/1.1 503 "), "round {round}: {received:?}");
            });
        }
    }
}
