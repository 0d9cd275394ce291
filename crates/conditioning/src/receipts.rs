//! Which of the requests that were handed to the server somebody has received, and whether they have been claimed
//! since.
//!
//! A process of the server receives a request by one system call and claims it by the next instructions. One that is
//! killed in between would take the request with it, and one that is stopped there keeps it until it goes on. Nobody
//! else knows of it: the link does not have it any more, and the ledger says that no process has it. So the last filter
//! looks now and then: what had been received at one look and is unclaimed at the next is handed again. Should its
//! first receiver claim it after all, the ledger lets one of them win.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::neighbours::TICK;

/// Looks that follow each other sooner say nothing: a filter that was held up finds its ticks late, and close together.
/// What is received is claimed within microseconds; this is for processes that wait for a processor.
const APART: Duration = Duration::from_millis(TICK.as_millis() as u64 / 2);

/// What the last filter of a chain knows of what it handed on. The requests are numbered in the order in which they
/// were.
#[derive(Debug, Default)]
pub struct Receipts {
    handed: Cell<u64>,
    /// Up to this number, all had been received at the last look.
    received: Cell<u64>,
    /// Whether the link has been seen empty: before, what an earlier process of this filter handed on may be unread,
    /// and a claim does not tell which copy was received.
    has_been_empty: Cell<bool>,
    looked: Cell<Option<Instant>>,
}

impl Receipts {
    /// One more was handed on: its number, from 1 on.
    pub fn handed(&self) -> u64 {
        self.handed.set(self.handed.get() + 1);
        self.handed.get()
    }

    /// A look at the link, of which nothing `is_unread` or something is, when the last of those that have been claimed
    /// has the number `claimed`: of those that were handed on only once, because of the others it may be an earlier
    /// copy. Returns up to which number requests had been received at the look before: those of them that are unclaimed
    /// are to be handed again.
    pub fn look(&self, is_unread: bool, claimed: u64, now: Instant) -> u64 {
        if self.looked.get().is_some_and(|looked| now.saturating_duration_since(looked) < APART) {
            return 0;
        }
        self.looked.set(Some(now));
        // A link keeps the order: who received one received those before it, or others did.
        let received = match (is_unread, self.has_been_empty.get()) {
            (false, _) => self.handed.get(),
            (true, true) => claimed.max(self.received.get()),
            (true, false) => self.received.get(),
        };
        self.has_been_empty.set(self.has_been_empty.get() || !is_unread);
        self.received.replace(received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_received_at_one_look_and_is_unclaimed_at_the_next_is_to_be_handed_again() {
        let (receipts, start) = (Receipts::default(), Instant::now());
        assert_eq!((receipts.handed(), receipts.handed()), (1, 2));
        assert_eq!(receipts.look(false, 0, start), 0, "they may have been received just now");
        assert_eq!(receipts.handed(), 3);
        assert_eq!(receipts.look(false, 0, start + APART), 2);
        assert_eq!(receipts.look(false, 0, start + 2 * APART), 3);
    }

    #[test]
    fn what_nobody_reads_is_never_handed_again() {
        let (receipts, start) = (Receipts::default(), Instant::now());
        receipts.handed();
        assert!((0..100).all(|look| receipts.look(true, 0, start + look * APART) == 0));
        // Read at last.
        assert_eq!(receipts.look(false, 0, start + 100 * APART), 0);
        assert_eq!(receipts.look(true, 0, start + 101 * APART), 1);
        // Handed again it has another number, and nobody reads that one.
        assert_eq!(receipts.handed(), 2);
        assert!((102..200).all(|look| receipts.look(true, 0, start + look * APART) == 1));
    }

    #[test]
    fn a_link_that_is_never_empty_tells_by_what_was_claimed_later() {
        let (receipts, start) = (Receipts::default(), Instant::now());
        assert_eq!(receipts.look(false, 0, start - APART), 0);
        (0..9).for_each(|_| _ = receipts.handed());
        assert_eq!(receipts.look(true, 5, start), 0);
        // The one that was claimed is over, and nothing tells of it any more.
        assert_eq!(receipts.look(true, 0, start + APART), 5);
        assert_eq!(receipts.look(true, 7, start + 2 * APART), 5);
        assert_eq!(receipts.look(true, 7, start + 3 * APART), 7);
    }

    #[test]
    fn what_an_earlier_process_of_the_filter_handed_on_tells_nothing_of_what_this_one_did() {
        let (receipts, start) = (Receipts::default(), Instant::now());
        (0..9).for_each(|_| _ = receipts.handed());
        // A copy from before was claimed, of the request that has the number 9 by now.
        assert!((0..100).all(|look| receipts.look(true, 9, start + look * APART) == 0));
        assert_eq!(receipts.look(false, 9, start + 100 * APART), 0);
        assert_eq!(receipts.look(true, 9, start + 101 * APART), 9);
    }

    #[test]
    fn looks_that_follow_each_other_at_once_say_nothing() {
        let (receipts, start) = (Receipts::default(), Instant::now());
        receipts.handed();
        assert_eq!(receipts.look(false, 0, start), 0);
        assert_eq!(receipts.look(false, 0, start + APART / 2), 0);
        assert_eq!(receipts.look(false, 0, start + APART), 1);
    }
}
