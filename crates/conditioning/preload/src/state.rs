//! The chain that this process was started behind, and the sockets that are to stand for it.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tidegate_conditioning::neighbours::{environment, out_of_the_way};
use tidegate_conditioning::server::{
    self, options,
    table::{Chain, DESCRIPTORS},
};

struct Preloaded {
    chain: Arc<Chain>,
    ledger: OwnedFd,
    /// Link and ledger as they were inherited, for a program that this one becomes or starts: they are never closed,
    /// since programs close what they do not know before they start others.
    inherited: [RawFd; 2],
    address: SocketAddr,
    /// Sockets that were bound to the conditioned port: nothing is bound, because the first filter has the port.
    bound: Mutex<Vec<(RawFd, SocketAddr)>>,
}

/// A server has a few listening sockets; one that exceeds this binds as if there were no chain, and fails.
const MOST_BOUND: usize = 1024;

/// Which numbers are among [`Preloaded::bound`]. Others are not looked for there: a signal handler may close what it has
/// opened while the code that it has interrupted has the lock.
static IS_BOUND: [AtomicBool; DESCRIPTORS] = [const { AtomicBool::new(false) }; DESCRIPTORS];

fn is_bound(fd: RawFd) -> Option<&'static AtomicBool> {
    IS_BOUND.get(usize::try_from(fd).ok()?)
}

static STATE: OnceLock<Option<Preloaded>> = OnceLock::new();

/// What is known already: safe to ask while [`preloaded`] is finding out, which closes descriptors itself.
fn known() -> Option<&'static Preloaded> {
    STATE.get()?.as_ref()
}

fn preloaded() -> Option<&'static Preloaded> {
    STATE.get_or_init(preload).as_ref()
}

fn preload() -> Option<Preloaded> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<RawFd>().ok());
    let address = std::env::var(environment::SERVER_ADDRESS).ok()?.parse().ok()?;
    let (link, ledger) = (number(environment::UPSTREAM)?, number(environment::LEDGER)?);
    // SAFETY: borrowed for fcntl, which fails if the number is no open descriptor.
    let duplicate = |fd: RawFd| out_of_the_way(unsafe { BorrowedFd::borrow_raw(fd) }).ok();
    let inherited = [link, ledger];
    let ledger = duplicate(ledger)?;
    let chain = server::chain(duplicate(link)?, &ledger).ok()?;
    if let Some(terms) = std::env::var(environment::LINGER).ok().and_then(|text| text.parse().ok()) {
        server::set_linger(terms);
    }
    crate::programs::remember();
    // SAFETY: a plain function; it runs when the program ends by `exit`.
    unsafe { libc::atexit(at_exit) };
    Some(Preloaded { chain, ledger, inherited, address, bound: Mutex::new(Vec::new()) })
}

/// Runs when the library is loaded: finds listening sockets that the program before this one had, as servers that
/// replace themselves and those that are started with their sockets open (sd_listen_fds(3)) hand them on.
extern "C" fn at_load() {
    let Some(preloaded) = preloaded() else { return };
    server::inherit_standard_streams(&preloaded.chain);
    let Ok(link) = rustix::fs::fstat(&preloaded.chain.link) else { return };
    let numbers = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers: Vec<RawFd> = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let described = std::env::var(environment::LISTENERS).unwrap_or_default();
    for fd in numbers {
        if is_own(fd) {
            continue;
        }
        // SAFETY: borrowed for one fstat, which fails if the number is no open descriptor.
        let stat = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(fd) });
        if stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (link.st_dev, link.st_ino)) {
            let at = server::described_of(&described, fd).unwrap_or(preloaded.address.into());
            let _ = server::listen(fd, preloaded.chain.clone(), at);
        }
    }
    crate::programs::remember_listeners();
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

/// This library's own descriptors in ascending order, which a program that closes everything at its start must not
/// close.
pub(crate) fn own() -> [RawFd; 4] {
    known().map_or([-1; 4], |known| {
        let [link, ledger] = known.inherited;
        let mut own = [known.chain.link.as_raw_fd(), known.ledger.as_raw_fd(), link, ledger];
        own.sort_unstable();
        own
    })
}

/// Whether `fd` is one of them.
pub(crate) fn is_own(fd: RawFd) -> bool {
    own().contains(&fd)
}

extern "C" fn at_exit() {
    crate::streams::flush_all();
    server::before_exit(false);
}

impl Preloaded {
    /// What `how` does with the sockets that are bound in name only; meanwhile no child inherits them locked.
    fn bound<R>(&self, how: impl FnOnce(&mut Vec<(RawFd, SocketAddr)>) -> R) -> R {
        let _in_use = server::in_use();
        how(&mut self.bound.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// False if there are too many, or its number is too high.
    fn note(&self, fd: RawFd, address: SocketAddr) -> bool {
        let Some(is_bound) = is_bound(fd) else { return false };
        self.bound(|bound| {
            bound.retain(|(other, _)| *other != fd);
            let has_room = bound.len() < MOST_BOUND;
            if has_room {
                bound.push((fd, address));
            }
            is_bound.store(has_room, Ordering::Release);
            has_room
        })
    }
}

/// Whether a stream socket cannot be bound to `address`, since another listens there, and the two do not share it.
pub(crate) fn is_taken(fd: RawFd, address: SocketAddr) -> bool {
    preloaded().is_some_and(|preloaded| {
        preloaded.address.port() == address.port()
            && server::is_taken(&preloaded.chain, address)
            // SAFETY: the server's own socket, borrowed for one getsockopt.
            && !options::shares_address(unsafe { BorrowedFd::borrow_raw(fd) })
    })
}

/// A stream socket is to be bound to `address`: true if the chain has that port, and the socket is remembered.
pub(crate) fn bind(fd: RawFd, address: SocketAddr) -> bool {
    let Some(preloaded) = preloaded().filter(|preloaded| preloaded.address.port() == address.port()) else {
        return false;
    };
    if !preloaded.note(fd, address) {
        return false;
    }
    // SAFETY: the server's own socket, borrowed for one setsockopt.
    options::mark(unsafe { BorrowedFd::borrow_raw(fd) });
    true
}

/// As [`bound_address`], of a socket that another process may have bound.
pub(crate) fn adopt_bound(fd: RawFd) -> Option<SocketAddr> {
    if let Some(address) = bound_address(fd) {
        return Some(address);
    }
    let preloaded = preloaded()?;
    // SAFETY: borrowed for one getsockopt, which fails if the number is no socket.
    options::is_marked(unsafe { BorrowedFd::borrow_raw(fd) }).then_some(preloaded.address)
}

/// What came with a message, by SCM_RIGHTS.
pub(crate) fn received(fd: RawFd, cloexec: bool) {
    if let Some(preloaded) = known() {
        server::receive(&preloaded.chain, fd, cloexec, preloaded.address);
    }
}

/// The address that a socket was bound to in name only.
pub(crate) fn bound_address(fd: RawFd) -> Option<SocketAddr> {
    let preloaded = known().filter(|_| is_bound(fd).is_some_and(|it| it.load(Ordering::Acquire)))?;
    preloaded.bound(|bound| bound.iter().find(|(other, _)| *other == fd).map(|(_, address)| *address))
}

/// `fd` listens, and is none of ours: for the message to an operator who named another port.
pub(crate) fn listens_elsewhere(fd: RawFd) {
    // SAFETY: borrowed for one getsockname, which fails if the number is no socket.
    let name = rustix::net::getsockname(unsafe { BorrowedFd::borrow_raw(fd) });
    if let (Some(known), Ok(Ok(address))) = (known(), name.map(SocketAddr::try_from)) {
        known.chain.ledger.set_other_port(address.port());
    }
}

/// `new` has become a duplicate of `old`.
pub(crate) fn duplicated(old: RawFd, new: RawFd) {
    let Some(address) = bound_address(old) else { return };
    if let Some(preloaded) = known() {
        preloaded.note(new, address);
    }
}

/// `fd` was closed.
pub(crate) fn forget(fd: RawFd) {
    let Some(preloaded) = known().filter(|_| bound_address(fd).is_some()) else { return };
    preloaded.bound(|bound| bound.retain(|(other, _)| *other != fd));
    if let Some(is_bound) = is_bound(fd) {
        is_bound.store(false, Ordering::Release);
    }
}

/// Whether this process has a chain. Takes no lock.
pub(crate) fn is_behind_chain() -> bool {
    known().is_some()
}

/// The chain, if this process has one.
pub(crate) fn chain() -> Option<Arc<Chain>> {
    known().map(|known| known.chain.clone())
}
