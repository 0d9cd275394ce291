//! Waiting for the next request: whoever has just served one takes the next without a wait, a few processes wait by the
//! link, and the others until they are called (see [`crate::ledger::Turns`]).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, socket_timeout};

use crate::ledger::Turns;
use crate::link::{self, Received};
use crate::server::table::{self, Chain, Entry};
use crate::server::{AcceptOptions, LOOK, process, shut_down};

/// Receives for the listening descriptor `fd`, which says whether to wait. It may be shut down meanwhile, or closed, and
/// its number be another file's: what is waited for is the chain's own handle to the link.
///
/// # Errors
/// As [`link::receive`].
pub(super) fn receive(fd: RawFd, chain: &Chain, options: AcceptOptions) -> io::Result<Received> {
    let turns = chain.ledger.turns();
    let listener = chain.link.as_fd();
    let received = loop {
        let received = link::receive(listener, true, options.cloexec)?;
        let is_there = !matches!(received, Received::Nothing);
        if is_there
            || !table::is_listener(fd)
            || options.dont_wait
            || rustix::fs::fcntl_getfl(listener)?.contains(OFlags::NONBLOCK)
        {
            break received;
        }
        if let Some(may_end) = options.may_end {
            may_end();
        }
        // Whether one that has a seat is alive is found out by its number.
        if !chain.ledger.knows_this_process() {
            match by_link(fd, listener, options)? {
                Some(received) => break received,
                None => continue,
            }
        }
        if let Some(seat) = turns.sit(process::owner(), most_seats()) {
            let received = by_link(fd, listener, options);
            turns.rise(&seat);
            if !matches!(received, Ok(None | Some(Received::Request(_)))) {
                turns.see_to_the_next();
            }
            match received? {
                Some(received) => break received,
                None => continue,
            }
        }
        // A server that limits its waits (SO_RCVTIMEO) is woken by the kernel alone.
        if socket_timeout(listener, Timeout::Recv)?.is_some() {
            break by_link(fd, listener, options)?.unwrap_or(Received::Nothing);
        }
        wait_behind(turns)?;
    };
    if !matches!(received, Received::Nothing) {
        turns.took();
    }
    Ok(received)
}

/// Waits by the link. In a process of several threads, one of them may shut the listening socket down meanwhile, or cancel
/// this one: `None` tells to look.
fn by_link(fd: RawFd, listener: BorrowedFd<'_>, options: AcceptOptions) -> io::Result<Option<Received>> {
    let is_looked_at = !process::has_one_thread();
    // A server that limits its waits (SO_RCVTIMEO) looks itself.
    if !is_looked_at || socket_timeout(listener, Timeout::Recv)?.is_some() {
        return link::receive(listener, false, options.cloexec).map(Some);
    }
    match poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&LOOK_AGAIN)) {
        Err(Errno::INTR) if shut_down::restarts() => {}
        Err(error) => return Err(error.into()),
        Ok(_) => {}
    }
    let received = link::receive(listener, true, options.cloexec)?;
    let is_over = !matches!(received, Received::Nothing) || !table::is_listener(fd);
    Ok(is_over.then_some(received))
}

/// Waits until called, as [`by_link`] does.
fn wait_behind(turns: &Turns) -> Result<(), Errno> {
    let limit = (!process::has_one_thread()).then_some(&LOOK_AGAIN);
    match turns.wait_behind(limit) {
        Err(Errno::INTR) if limit.is_some() && shut_down::restarts() => Ok(()),
        waited => waited,
    }
}

const LOOK_AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as i64 };

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
