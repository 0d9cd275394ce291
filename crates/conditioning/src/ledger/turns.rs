//! Which of the server's processes wait for the next request by the link, and which behind those.
//!
//! A process that waits by the link is woken by each request that comes while it waits, and the kernel wakes the one
//! that has waited longest. Of 150 that wait there, each request wakes another, of which nothing is in the processor's
//! caches; and a burst wakes many, although the first to run takes it all. So a few processes wait by the link, and
//! serve everything as long as they keep up. The others are called when one of those few takes a request and leaves
//! nobody who waits.
//!
//! What a killed process leaves here costs others a second at most: the launcher looks once a second (see
//! [`Turns::tend`]).

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex::{self, Timespec};

/// Processes that wait by the link, at most.
const SEATS: usize = 29;

/// All zero is the beginning.
#[repr(C, align(64))]
pub struct Turns {
    /// Processes that wait by the link; 0: free.
    seats: [AtomicU32; SEATS],
    /// 1 if one of those behind them was called and has not come yet. They wait for it (futex(2)).
    called: AtomicU32,
    /// Requests taken, for the launcher to see whether any were.
    taken: AtomicU32,
    /// 1 if a process has ended in the middle of a wait by the link.
    has_ended: AtomicU32,
}

/// A place by the link, to be given back by [`Turns::rise`].
#[derive(Debug)]
pub struct Seat {
    index: usize,
    process: u32,
}

impl Turns {
    /// A seat for a process that is about to wait by the link, if fewer than `most` do.
    pub fn sit(&self, process: u32, most: usize) -> Option<Seat> {
        let free =
            |seat: &AtomicU32| seat.compare_exchange(0, process, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        let index = self.seats.iter().take(most).position(free)?;
        Some(Seat { index, process })
    }

    /// It waits by the link no more. The seat may have been given to another meanwhile.
    pub fn rise(&self, seat: &Seat) {
        let _ = self.seats[seat.index].compare_exchange(seat.process, 0, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// The process ends, perhaps in the middle of a wait, such as in a signal handler.
    pub fn leave(&self, process: u32) {
        let own =
            |seat: &AtomicU32| seat.compare_exchange(process, 0, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        if self.seats.iter().filter(|seat| own(seat)).count() > 0 {
            self.has_ended.store(1, Ordering::Relaxed);
            self.see_to_the_next();
        }
    }

    /// A process has taken a request.
    pub fn took(&self) {
        self.taken.fetch_add(1, Ordering::Relaxed);
        self.see_to_the_next();
    }

    /// A process does not wait by the link any more. If nobody is left there to take the next request, another is
    /// called.
    pub fn see_to_the_next(&self) {
        // Whoever finds no seat and waits behind does so after this, and finds itself called; or had a seat taken
        // before this by somebody who is still there.
        if self.seats.iter().all(|seat| seat.load(Ordering::SeqCst) == 0) {
            self.call();
        }
    }

    fn call(&self) {
        // Read first: where everybody waits for events, nobody comes, and each request would write it.
        if self.called.load(Ordering::SeqCst) == 0 && self.called.swap(1, Ordering::SeqCst) == 0 {
            let _ = futex::wake(&self.called, futex::Flags::empty(), 1);
        }
    }

    /// Has one of those that wait behind take a request that woke somebody else. False if there is none.
    pub fn call_another(&self) -> bool {
        futex::wake(&self.called, futex::Flags::empty(), 1).is_ok_and(|woken| woken > 0)
    }

    /// Waits until called, or for as long as `limit`.
    ///
    /// # Errors
    /// EINTR for a signal: without a limit, only where its handler does not restart calls, as accept(2).
    pub fn wait_behind(&self, limit: Option<&Timespec>) -> Result<(), Errno> {
        match futex::wait(&self.called, futex::Flags::empty(), 0, limit) {
            Err(Errno::TIMEDOUT) => Ok(()),
            Ok(()) | Err(Errno::AGAIN) => {
                self.called.store(0, Ordering::SeqCst);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Sets right what processes left that were killed, or that do not come although they were woken, such as stopped
    /// ones. To be called again and again with what the last call returned, but not sooner than [`Tended::is_due`]
    /// says.
    pub fn tend(
        &self,
        has_unread: bool,
        is_alive: impl Fn(u32) -> bool,
        before: Option<Tended>,
        now: Instant,
    ) -> Tended {
        let taken = self.taken.load(Ordering::Relaxed);
        // One is taken by whoever was called below, a call earlier.
        let is_stuck = has_unread && before.is_some_and(|before| taken.wrapping_sub(before.taken) <= 1);
        let mut has_died = self.has_ended.swap(0, Ordering::Relaxed) != 0;
        for seat in &self.seats {
            let process = seat.load(Ordering::SeqCst);
            let is_dead = process != 0 && !is_alive(process);
            has_died |= is_dead;
            if is_dead || is_stuck {
                let _ = seat.compare_exchange(process, 0, Ordering::SeqCst, Ordering::Relaxed);
            }
        }
        if has_unread || has_died || self.called.load(Ordering::SeqCst) != 0 {
            self.call_another();
        }
        Tended { taken, has_died, at: now }
    }
}

/// What [`Turns::tend`] found.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Tended {
    taken: u32,
    at: Instant,
    /// A process ended while it waited by the link. It may have received a request and claimed none: whoever handed it
    /// on is to hand it again.
    pub has_died: bool,
}

impl Tended {
    /// In what time those that wait by the link take more than one request, if any of them comes at all. Looks that
    /// follow each other sooner would take their seats away from processes that have only just been woken.
    pub const INTERVAL: Duration = Duration::from_secs(1);

    /// Whether it is time for the next call.
    pub fn is_due(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) >= Self::INTERVAL
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;
    use std::sync::mpsc;
    use std::time::Duration;

    /// A turn of its own, in a ledger that is mapped as by a process.
    fn ledger() -> Ledger {
        Ledger::create().unwrap().0
    }

    /// Somebody who waits behind, and says each time that it was called.
    fn behind(ledger: &std::sync::Arc<Ledger>) -> mpsc::Receiver<()> {
        let (says, hears) = mpsc::channel();
        let ledger = ledger.clone();
        std::thread::spawn(
            move || while ledger.turns().wait_behind(None).is_ok() && says.send(()).is_ok() {},
        );
        hears
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn there_are_as_many_seats_as_asked_for_and_each_is_given_back() {
        let ledger = ledger();
        let turns = ledger.turns();
        let first = turns.sit(1, 2).unwrap();
        let _second = turns.sit(2, 2).unwrap();
        assert!(turns.sit(3, 2).is_none());
        turns.rise(&first);
        assert!(turns.sit(3, 2).is_some());
        turns.rise(&first);
        assert!(turns.sit(4, 2).is_none(), "a seat that somebody else has by now was given back");
        turns.leave(3);
        assert!(turns.sit(4, 2).is_some());
        let has_died = || turns.tend(false, |_| true, None, Instant::now()).has_died;
        assert!(has_died() && !has_died());
        let many = (0..1000).filter(|_| turns.sit(5, 1000).is_some()).count();
        assert_eq!(many, SEATS - 2);
    }

    #[test]
    fn nobody_is_called_while_somebody_sits_and_one_is_when_nobody_does() {
        let ledger = std::sync::Arc::new(ledger());
        let seat = ledger.turns().sit(1, 1).unwrap();
        ledger.turns().took();
        assert_eq!(ledger.turns().called.load(Ordering::SeqCst), 0);
        ledger.turns().rise(&seat);
        ledger.turns().took();
        // Called before it waits, it does not wait.
        let behind = behind(&ledger);
        behind.recv_timeout(PATIENCE).unwrap();
        ledger.turns().took();
        behind.recv_timeout(PATIENCE).unwrap();
    }

    #[test]
    fn seats_of_the_dead_and_of_those_who_do_not_come_are_free_again() {
        let ledger = ledger();
        let turns = ledger.turns();
        let is_alive = |process| process == 1;
        let (_alive, _dead) = (turns.sit(1, 2).unwrap(), turns.sit(2, 2).unwrap());
        let first = turns.tend(false, is_alive, None, Instant::now());
        assert!(first.has_died);
        let _next = turns.sit(1, 2).unwrap();
        assert!(turns.sit(1, 2).is_none());
        // Requests wait, and are taken.
        turns.took();
        turns.took();
        let second = turns.tend(true, is_alive, Some(first), Instant::now());
        assert!(!second.has_died);
        assert!(turns.sit(1, 2).is_none());
        // Requests wait, and none has been taken since but by the one that was called.
        turns.took();
        turns.tend(true, is_alive, Some(second), Instant::now());
        assert!(turns.sit(1, 2).is_some() && turns.sit(1, 2).is_some());
    }

    #[test]
    fn whoever_waits_by_the_link_has_a_second_to_come() {
        let ledger = ledger();
        let (turns, start) = (ledger.turns(), Instant::now());
        let _seat = turns.sit(1, 1).unwrap();
        // A request that is there at the first look may have come just now.
        let tended = turns.tend(true, |_| true, None, start);
        assert!(turns.sit(1, 1).is_none());
        assert!(!tended.is_due(start) && !tended.is_due(start + Tended::INTERVAL - Duration::from_nanos(1)));
        assert!(tended.is_due(start + Tended::INTERVAL));
        turns.tend(true, |_| true, Some(tended), start + Tended::INTERVAL);
        assert!(turns.sit(1, 1).is_some());
    }

    #[test]
    fn a_call_that_a_killed_process_has_heard_is_heard_by_another() {
        let ledger = std::sync::Arc::new(ledger());
        let behind = behind(&ledger);
        // As after a process that was woken and killed: called, and nobody comes.
        let deadline = std::time::Instant::now() + PATIENCE;
        loop {
            ledger.turns().called.store(1, Ordering::SeqCst);
            ledger.turns().tend(false, |_| true, None, Instant::now());
            if behind.recv_timeout(Duration::from_millis(10)).is_ok() {
                break;
            }
            assert!(std::time::Instant::now() < deadline);
        }
    }
}
