//! Several listening sockets of one server: each accepts the connections that the kernel would have given it.
//!
//! All of them are one file, the chain's link, which is readable when a request is there for any of them. Who accepts
//! looks first whose the next one is, and leaves what is another's in the link. Sets that tell an event once, or to one
//! of several waiters (EPOLLET, EPOLLEXCLUSIVE; epoll_ctl(2)), are told of it again for the socket that it is for.

use std::cmp::Reverse;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{io, ptr};

use rustix::event::{PollFd, PollFlags, epoll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, socket_timeout};
use rustix::time::Timespec;

use super::connection::Interest;
use super::options::ForConnections;
use super::table::{self, Chain, Entry, lock};
use super::{AcceptOptions, LOOK, add, borrow, may_be_shut_down, note_interest, process, turns};
use crate::link::{self, Next, Received};
use crate::wire::Notice;

/// Where a listening socket listens.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Listening {
    /// The address that the server asked for.
    pub address: SocketAddr,
    /// An IPv6 socket takes no IPv4 connections (IPV6_V6ONLY, ipv6(7)).
    pub only_v6: bool,
}

impl From<SocketAddr> for Listening {
    fn from(address: SocketAddr) -> Self {
        Self { address, only_v6: false }
    }
}

/// How well a listening socket suits a connection: the better, the higher.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Match {
    /// Only if there is no other: the chain listens where the server does not.
    Any,
    /// As above, but the client's address can be shown there.
    Family,
    /// The IPv6 wildcard, for an IPv4 client.
    DualStack,
    Wildcard,
    Exact,
}

impl Listening {
    fn suits(self, local: IpAddr) -> Match {
        let own = self.address.ip().to_canonical();
        match (own.is_unspecified(), own.is_ipv4() == local.is_ipv4()) {
            _ if own == local => Match::Exact,
            (true, true) => Match::Wildcard,
            (true, false) if local.is_ipv4() && !self.only_v6 => Match::DualStack,
            (_, true) => Match::Family,
            _ => Match::Any,
        }
    }
}

/// Which of the listening sockets gets a connection to `local`, as the kernel chooses: by the exact address, else by
/// the wildcard. If it would have chosen none, the first that can show the client's address, else the first.
pub fn chosen(all: impl IntoIterator<Item = Listening>, local: IpAddr) -> Option<usize> {
    let local = local.to_canonical();
    let matches = all.into_iter().map(|one| one.suits(local)).enumerate();
    // Of equals the last is the greatest.
    matches.max_by_key(|&(at, how)| (how, Reverse(at))).map(|(at, _)| at)
}

/// The listening descriptors of this process.
static ALL: Mutex<Vec<Descriptor>> = Mutex::new(Vec::new());
/// Whether two of them are of one chain and listen at different addresses, so that who has one of them pays a load.
static DIFFER: AtomicBool = AtomicBool::new(false);

struct Descriptor {
    fd: RawFd,
    chain: Arc<Chain>,
    at: Listening,
    /// It shares its address with nobody.
    is_alone: bool,
    /// Registrations that tell an event once, or to one of several.
    interests: Vec<Interest>,
}

/// Descriptors are looked at one by one: of a server that has more, the others take what comes.
const MOST: usize = 1024;

fn change(how: impl FnOnce(&mut Vec<Descriptor>)) {
    let _in_use = process::in_use();
    let mut all = lock(&ALL);
    how(&mut all);
    // If any two do, one differs from the first of its chain.
    let first_of = |chain| all.iter().find(|other| Arc::ptr_eq(&other.chain, chain));
    let differ = all.iter().any(|one| first_of(&one.chain).is_some_and(|first| first.at != one.at));
    DIFFER.store(differ, Ordering::Release);
}

/// `fd` stands for a listening socket from now on.
pub(super) fn added(fd: RawFd, chain: &Arc<Chain>, at: Listening) {
    change(|all| {
        all.retain(|one| one.fd != fd);
        // Of a program that this process was before, which had another listening socket by that number.
        chain.ledger.clear_address(fd);
        if all.len() < MOST {
            all.push(Descriptor { fd, chain: chain.clone(), at, is_alone: false, interests: Vec::new() });
        }
    });
}

/// `fd` does so no more.
pub(super) fn removed(fd: RawFd) {
    change(|all| {
        if let Some(at) = all.iter().position(|one| one.fd == fd) {
            all.remove(at).chain.ledger.clear_address(fd);
        }
    });
}

/// This process is a child: what is registered with epoll is its parent's, and what listens is open in both.
pub(super) fn inherited() {
    for one in &mut *lock(&ALL) {
        one.interests.clear();
        if one.is_alone {
            set_address(one);
        }
    }
}

/// `fd`, which has begun to listen, shares its address with nobody (SO_REUSEPORT, socket(7)).
pub fn set_alone(fd: RawFd) {
    change(|all| {
        if let Some(one) = all.iter_mut().find(|one| one.fd == fd) {
            one.is_alone = true;
            set_address(one);
        }
    });
}

fn set_address(one: &Descriptor) {
    one.chain.ledger.set_address(one.fd, one.at.address, is_open(&one.chain));
}

/// Whether a process listens at `address` that shares it with nobody: bind(2) fails for others then.
pub fn is_taken(chain: &Chain, address: SocketAddr) -> bool {
    chain.ledger.has_address(address, is_open(chain))
}

/// Whether a descriptor of a process is a handle to the link, as those are that stand for listening sockets.
fn is_open(chain: &Chain) -> impl Fn(u32, RawFd) -> bool {
    let link = rustix::fs::fstat(&chain.link).map(|link| (link.st_dev, link.st_ino));
    move |process, fd| {
        // A child asks as well, which may not be able to allocate yet.
        let mut room = [0u8; 64];
        let mut path = io::Cursor::new(&mut room[..]);
        let written = write!(path, "/proc/{process}/fd/{fd}").map(|()| path.position() as usize);
        let file =
            written.map_err(|_| Errno::NAMETOOLONG).and_then(|length| rustix::fs::stat(&room[..length]));
        link.is_ok() && file.map(|file| (file.st_dev, file.st_ino)) == link
    }
}

/// The server changed a registration of a listening descriptor.
pub(super) fn registered(interest: Interest, operation: i32) {
    let once = (libc::EPOLLET | libc::EPOLLEXCLUSIVE) as u32;
    let operation = if interest.events & once == 0 { libc::EPOLL_CTL_DEL } else { operation };
    let _in_use = process::in_use();
    if let Some(one) = lock(&ALL).iter_mut().find(|one| one.fd == interest.fd) {
        note_interest(&mut one.interests, interest, operation);
    }
}

/// Descriptors of epoll sets are about to be closed.
pub(super) fn forget(is_closed: impl Fn(RawFd) -> bool) {
    if DIFFER.load(Ordering::Acquire) && process::is_owner() {
        let _in_use = process::in_use();
        let mut all = lock(&ALL);
        all.iter_mut().for_each(|one| one.interests.retain(|interest| !is_closed(interest.epoll)));
    }
}

/// Which descriptors listen where, for a program that inherits them: `3=0.0.0.0:80 4=[::]:80/only`. `None`: all at one
/// address.
pub fn described() -> Option<String> {
    if !DIFFER.load(Ordering::Acquire) {
        return None;
    }
    let _in_use = process::in_use();
    let all = lock(&ALL);
    let one =
        |one: &Descriptor| format!("{}={}{}", one.fd, one.at.address, if one.at.only_v6 { ONLY } else { "" });
    Some(all.iter().map(one).collect::<Vec<_>>().join(" "))
}

const ONLY: &str = "/only";

/// Where `fd` listens by such a description.
pub fn described_of(description: &str, fd: RawFd) -> Option<Listening> {
    let mut all = description.split(' ').filter_map(|one| one.split_once('='));
    let (_, at) = all.find(|(number, _)| number.parse() == Ok(fd))?;
    let (address, only_v6) = at.strip_suffix(ONLY).map_or((at, false), |address| (address, true));
    Some(Listening { address: address.parse().ok()?, only_v6 })
}

/// Whether a connection to `local` is another's than `fd`'s, which listens at `at`. If so, the other is told of it.
fn is_anothers(fd: RawFd, at: Listening, chain: &Chain, local: IpAddr) -> bool {
    let _in_use = process::in_use();
    let all = lock(&ALL);
    let of_chain = || all.iter().filter(|one| ptr::eq(Arc::as_ptr(&one.chain), chain));
    let chosen = chosen(of_chain().map(|one| one.at), local).and_then(|index| of_chain().nth(index));
    let Some(chosen) = chosen.map(|one| one.at).filter(|&chosen| chosen != at) else { return false };
    let interests = of_chain().filter(|one| one.at == chosen && one.fd != fd).flat_map(|one| &one.interests);
    interests.for_each(|&interest| tell_again(interest));
    true
}

/// Whether what the kernel has on the listening descriptor `fd` is a connection for another: all listening sockets of a
/// chain are one link, and a server that accepts on a blocking one that it was told of would wait for good.
pub(super) fn is_told_of_anothers(fd: RawFd) -> bool {
    DIFFER.load(Ordering::Acquire)
        && of(fd).is_some_and(|(chain, at)| match link::next(borrow(fd)) {
            Ok(Next::To(local)) => is_anothers(fd, at, &chain, local),
            _ => false,
        })
}

/// Has the kernel look anew whether there is something to tell.
fn tell_again(interest: Interest) {
    let events = epoll::EventFlags::from_bits_retain(interest.events);
    if !events.contains(epoll::EventFlags::EXCLUSIVE) {
        let data = epoll::EventData::new_u64(interest.data);
        let _ = epoll::modify(borrow(interest.epoll), borrow(interest.fd), data, events);
    } else if epoll::delete(borrow(interest.epoll), borrow(interest.fd)).is_ok() {
        // An exclusive registration cannot be modified.
        add(interest);
    }
}

/// A thread that waits for a request of its own, behind another's, looks again at first so soon, and then less and less
/// often.
const SOONEST: Duration = Duration::from_micros(200);
const LATEST: Duration = Duration::from_millis(10);

/// The next request for the listening descriptor `fd`.
///
/// # Errors
/// As [`link::receive`].
pub(super) fn receive(
    fd: RawFd,
    at: Listening,
    chain: &Chain,
    options: AcceptOptions,
) -> io::Result<Received> {
    if !DIFFER.load(Ordering::Acquire) {
        return turns::receive(fd, chain, options);
    }
    let listener = chain.link.as_fd();
    let waits = !options.dont_wait && !rustix::fs::fcntl_getfl(listener)?.contains(OFlags::NONBLOCK);
    let limit = if waits { socket_timeout(listener, Timeout::Recv)? } else { Some(Duration::ZERO) };
    let until = limit.map(|limit| Instant::now() + limit);
    let mut look_again = SOONEST;
    while table::is_listener(fd) {
        let pause = match link::next(listener)? {
            Next::Nothing => None,
            Next::To(local) if is_anothers(fd, at, chain, local) => {
                look_again = (2 * look_again).min(LATEST);
                Some(look_again)
            }
            Next::To(_) | Next::Other => match link::receive(listener, true, options.cloexec)? {
                // Another was faster.
                Received::Nothing => continue,
                Received::Request(request)
                    if link::local_address(&request.socket)
                        .is_some_and(|local| is_anothers(fd, at, chain, local.ip())) =>
                {
                    let _ = link::send_notice(chain.link.as_fd(), Notice::HandAgain(request.bundle.id));
                    continue;
                }
                received => {
                    chain.ledger.turns().took();
                    return Ok(received);
                }
            },
        };
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Ok(Received::Nothing);
        }
        if let Some(may_end) = options.may_end {
            may_end();
        }
        // What is another's is there already: only for what comes next can be waited.
        let mut watched = [PollFd::new(&listener, PollFlags::IN)];
        let watched = if pause.is_some() { &mut [][..] } else { &mut watched[..] };
        let look = may_be_shut_down(fd).then_some(LOOK);
        let wait = pause.into_iter().chain(left).chain(look).min();
        let wait = wait
            .map(|wait| Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) });
        rustix::event::poll(watched, wait.as_ref())?;
    }
    Ok(Received::Nothing)
}

/// Whether `fd` stands for a listening socket, and where that listens.
pub(super) fn of(fd: RawFd) -> Option<(Arc<Chain>, Listening)> {
    match table::get(fd)? {
        Entry::Listener { chain, at, .. } => Some((chain, at)),
        _ => None,
    }
}

/// What connections have from the listening descriptor `fd`.
pub(super) fn options_of(fd: RawFd) -> Option<Arc<ForConnections>> {
    match table::get(fd)? {
        Entry::Listener { options, .. } => Some(options),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> Listening {
        let (address, only_v6) = address.strip_suffix(" only").map_or((address, false), |own| (own, true));
        Listening { address: SocketAddr::new(address.parse().unwrap(), 80), only_v6 }
    }

    #[test]
    fn a_description_says_where_each_descriptor_listens() {
        let text = "3=0.0.0.0:80 14=[::]:80/only 5=127.0.0.1:80";
        assert_eq!(described_of(text, 3), Some(at("0.0.0.0")));
        assert_eq!(described_of(text, 14), Some(at(":: only")));
        assert_eq!(described_of(text, 4), None);
        assert_eq!(described_of("3=nowhere", 3), None);
    }

    #[test]
    fn a_connection_is_for_the_socket_that_the_kernel_would_choose() {
        let cases: &[(&[&str], &str, usize)] = &[
            // The exact address before the wildcard, wherever it stands.
            (&["0.0.0.0", "127.0.0.1", "127.0.0.2"], "127.0.0.2", 2),
            (&["127.0.0.1", "0.0.0.0"], "127.0.0.2", 1),
            (&["::", "::1"], "::1", 1),
            (&["::1", "::"], "fd00::1", 1),
            // The wildcard of the family before the one of both.
            (&["::", "0.0.0.0"], "127.0.0.1", 1),
            (&["::", "0.0.0.0"], "::1", 0),
            (&["0.0.0.0", ":: only"], "::1", 1),
            (&[":: only", "0.0.0.0"], "127.0.0.1", 1),
            (&["127.0.0.1", "::"], "127.0.0.2", 1),
            // A chain's own socket for both shows IPv4 as mapped.
            (&[":: only", "0.0.0.0"], "::ffff:127.0.0.1", 1),
            (&["::", "::ffff:127.0.0.1"], "127.0.0.1", 1),
            (&["::", "::ffff:0.0.0.0"], "127.0.0.1", 1),
            // One alone gets all.
            (&["127.0.0.1"], "10.0.0.1", 0),
            (&["127.0.0.1"], "::1", 0),
            (&[":: only"], "127.0.0.1", 0),
            // Where none is: whoever can show the client's address, else the first.
            (&["::1", "127.0.0.1", "127.0.0.2"], "10.0.0.1", 1),
            (&["127.0.0.1", "::1"], "fd00::1", 1),
            (&["127.0.0.1", ":: only"], "127.0.0.2", 0),
            (&[":: only", "127.0.0.1"], "127.0.0.2", 1),
            (&["127.0.0.1", "127.0.0.2"], "::1", 0),
        ];
        for &(all, local, expected) in cases {
            let found = chosen(all.iter().map(|text| at(text)), local.parse().unwrap());
            assert_eq!(found, Some(expected), "{local} among {all:?}");
        }
        assert_eq!(chosen([], [127, 0, 0, 1].into()), None);
    }
}
