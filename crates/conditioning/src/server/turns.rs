//! Waiting for the next request: whoever has just served one takes the next without a wait, a few processes wait by the
//! link, and the others until they are called (see [`crate::ledger::Turns`]).

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use rustix::fs::OFlags;
use rustix::net::sockopt::{Timeout, socket_timeout};

use crate::link::{self, Received};
use crate::server::table::{self, Chain, Entry};
use crate::server::{AcceptOptions, process};

/// Receives from `listener`, a handle to the chain's link, which says whether to wait.
///
/// # Errors
/// As [`link::receive`].
pub(super) fn receive(
    listener: BorrowedFd<'_>,
    chain: &Chain,
    options: AcceptOptions,
) -> io::Result<Received> {
    let turns = chain.ledger.turns();
    let received = loop {
        let received = link::receive(listener, true, options.cloexec)?;
        let is_there = !matches!(received, Received::Nothing);
        if is_there || options.dont_wait || rustix::fs::fcntl_getfl(listener)?.contains(OFlags::NONBLOCK) {
            break received;
        }
        // Whether one that has a seat is alive is found out by its number.
        if !chain.ledger.knows_this_process() {
            break link::receive(listener, false, options.cloexec)?;
        }
        if let Some(seat) = turns.sit(process::owner(), most_seats()) {
            let received = link::receive(listener, false, options.cloexec);
            turns.rise(&seat);
            if !matches!(received, Ok(Received::Request(_))) {
                turns.see_to_the_next();
            }
            break received?;
        }
        // A server that limits its waits (SO_RCVTIMEO) is woken by the kernel alone.
        if socket_timeout(listener, Timeout::Recv)?.is_some() {
            break link::receive(listener, false, options.cloexec)?;
        }
        turns.wait_behind()?;
    };
    if !matches!(received, Received::Nothing) {
        turns.took();
    }
    Ok(received)
}

/// Processes that wait by the link while as many as there are processors work: with one or two, each time slice that
/// ends in the middle of a request calls another process; with many, a burst wakes more than are needed.
const SPARE: usize = 4;

/// Processes that wait by the link, at most.
fn most_seats() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| {
        let processors = rustix::thread::sched_getaffinity(None).map_or(1, |processors| processors.count());
        processors as usize + SPARE
    })
}

/// The process ends.
pub(super) fn leave() {
    for entry in table::entries() {
        if let Entry::Listener { chain, .. } = entry {
            chain.ledger.turns().leave(process::owner());
        }
    }
}
