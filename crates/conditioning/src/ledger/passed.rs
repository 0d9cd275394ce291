//! Connections on their way from one process of the server to another, which gets the socket by SCM_RIGHTS (unix(7))
//! and must know what there is to know of it. It finds that here, by the socket's cookie (SO_COOKIE).

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::wire::Id;

/// Connections that can be on their way at a time.
const PLACES: usize = 256;
/// Places that a cookie can have.
const PROBES: usize = 16;
/// Rewritten bytes that go along with a connection.
pub const PASSED_BYTES: usize = 64 * 1024;

/// Nobody's.
const FREE: u64 = 0;
/// Somebody reads or writes it. One whose process dies meanwhile is lost.
const TAKEN: u64 = u64::MAX;

/// What goes along of content whose end was not seen.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Passed {
    /// There is none.
    None,
    /// Nothing of it was looked at.
    Untouched,
    /// A part was: where it goes on is not known to who gets it.
    Lost,
}

/// What goes along with a socket.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Passage {
    /// Which presentation it is.
    pub id: Id,
    /// Bits of [`crate::wire::flags`].
    pub flags: u16,
    /// The response is followed.
    pub follows: bool,
    /// The client speaks HTTP/1.1 and wants to keep the connection.
    pub keeps_alive: bool,
    /// The server's listening socket is an IPv6 one.
    pub presents_v6: bool,
    /// No filter presented the request: the server read it from a connection that lingered.
    pub is_resumed: bool,
    /// The connection is of another protocol: all that comes may be read.
    pub is_the_servers: bool,
    /// The method of the request is CONNECT.
    pub is_connect: bool,
    /// Content behind `socket_left`.
    pub chunks: Passed,
    /// Bytes on the socket that `copy` stands for.
    pub replaces: u32,
    /// Bytes of the request on the socket after those.
    pub socket_left: u64,
    /// Rewritten bytes that were not read yet.
    pub copy: Vec<u8>,
}

const FOLLOWS: u32 = 1 << 16;
const KEEPS_ALIVE: u32 = 1 << 17;
const PRESENTS_V6: u32 = 1 << 18;
const IS_RESUMED: u32 = 1 << 19;
const IS_THE_SERVERS: u32 = 1 << 20;
const IS_CONNECT: u32 = 1 << 21;
const HAS_CHUNKS: u32 = 1 << 22;
const HAS_LOST_CHUNKS: u32 = 1 << 23;

/// One place; all zero is a free one.
#[repr(C)]
pub(super) struct Place {
    cookie: AtomicU64,
    slot: AtomicU32,
    generation: AtomicU32,
    /// How many processes the socket is on its way to.
    receivers: AtomicU32,
    flags: AtomicU32,
    socket_left: AtomicU64,
    replaces: AtomicU32,
    length: AtomicU32,
    copy: UnsafeCell<[u8; PASSED_BYTES]>,
}

// SAFETY: `copy` is read and written only by who has made `cookie` TAKEN.
unsafe impl Sync for Place {}

impl Place {
    fn take(&self, cookie: u64) -> bool {
        self.cookie.compare_exchange(cookie, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn give(&self, cookie: u64) {
        self.cookie.store(cookie, Ordering::Release);
    }

    fn id(&self) -> Id {
        Id { slot: self.slot.load(Ordering::Relaxed), generation: self.generation.load(Ordering::Relaxed) }
    }

    /// By who has taken it.
    fn write(&self, passage: &Passage) {
        let bit = |is_so, bit| if is_so { bit } else { 0 };
        let flags = u32::from(passage.flags)
            | bit(passage.follows, FOLLOWS)
            | bit(passage.keeps_alive, KEEPS_ALIVE)
            | bit(passage.presents_v6, PRESENTS_V6)
            | bit(passage.is_resumed, IS_RESUMED)
            | bit(passage.is_the_servers, IS_THE_SERVERS)
            | bit(passage.is_connect, IS_CONNECT)
            | bit(passage.chunks == Passed::Untouched, HAS_CHUNKS)
            | bit(passage.chunks == Passed::Lost, HAS_LOST_CHUNKS);
        self.slot.store(passage.id.slot, Ordering::Relaxed);
        self.generation.store(passage.id.generation, Ordering::Relaxed);
        self.flags.store(flags, Ordering::Relaxed);
        self.socket_left.store(passage.socket_left, Ordering::Relaxed);
        self.replaces.store(passage.replaces, Ordering::Relaxed);
        let length = passage.copy.len().min(PASSED_BYTES);
        self.length.store(length as u32, Ordering::Relaxed);
        // SAFETY: no more than its room, and nobody else's while the place is taken.
        unsafe { std::ptr::copy_nonoverlapping(passage.copy.as_ptr(), self.copy.get().cast(), length) };
    }

    /// By who has taken it.
    fn read(&self) -> Passage {
        let length = (self.length.load(Ordering::Relaxed) as usize).min(PASSED_BYTES);
        let mut copy = vec![0; length];
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(self.copy.get().cast(), copy.as_mut_ptr(), length) };
        let flags = self.flags.load(Ordering::Relaxed);
        Passage {
            id: self.id(),
            flags: flags as u16,
            follows: flags & FOLLOWS != 0,
            keeps_alive: flags & KEEPS_ALIVE != 0,
            presents_v6: flags & PRESENTS_V6 != 0,
            is_resumed: flags & IS_RESUMED != 0,
            is_the_servers: flags & IS_THE_SERVERS != 0,
            is_connect: flags & IS_CONNECT != 0,
            chunks: match flags & (HAS_CHUNKS | HAS_LOST_CHUNKS) {
                0 => Passed::None,
                HAS_CHUNKS => Passed::Untouched,
                _ => Passed::Lost,
            },
            replaces: self.replaces.load(Ordering::Relaxed),
            socket_left: self.socket_left.load(Ordering::Relaxed),
            copy,
        }
    }
}

/// All places.
#[repr(C)]
pub(super) struct Places([Place; PLACES]);

impl Places {
    fn of(&self, cookie: u64) -> impl Iterator<Item = &Place> {
        let first = cookie as usize % PLACES;
        self.0.iter().cycle().skip(first).take(PROBES)
    }

    /// The socket of this cookie is about to go to another process. False if there is no room: those whose presentation
    /// `is_over` make some.
    pub(super) fn put(&self, cookie: u64, passage: &Passage, is_over: impl Fn(Id) -> bool) -> bool {
        if passage.copy.len() > PASSED_BYTES {
            return false;
        }
        for place in self.of(cookie) {
            if place.take(cookie) {
                let others =
                    if place.id() == passage.id { place.receivers.load(Ordering::Relaxed) } else { 0 };
                place.write(passage);
                place.receivers.store(others + 1, Ordering::Relaxed);
                place.give(cookie);
                return true;
            }
        }
        for place in self.of(cookie) {
            let now = place.cookie.load(Ordering::Acquire);
            if now != TAKEN && (now == FREE || is_over(place.id())) && place.take(now) {
                place.write(passage);
                place.receivers.store(1, Ordering::Relaxed);
                place.give(cookie);
                return true;
            }
        }
        false
    }

    /// The socket of this cookie has arrived, or has not gone: what went along with it.
    pub(super) fn take(&self, cookie: u64) -> Option<Passage> {
        if matches!(cookie, FREE | TAKEN) {
            return None;
        }
        // Another receiver may be reading.
        for _ in 0..64 {
            let mut is_taken = false;
            for place in self.of(cookie) {
                if place.take(cookie) {
                    let passage = place.read();
                    let others = place.receivers.load(Ordering::Relaxed).saturating_sub(1);
                    place.receivers.store(others, Ordering::Relaxed);
                    place.give(if others == 0 { FREE } else { cookie });
                    return Some(passage);
                }
                is_taken |= place.cookie.load(Ordering::Relaxed) == TAKEN;
            }
            if !is_taken {
                break;
            }
            std::thread::yield_now();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::ledger::Ledger;

    fn passage(slot: u32, copy: &[u8]) -> Passage {
        Passage {
            id: Id { slot, generation: 7 },
            flags: 5,
            follows: true,
            keeps_alive: false,
            presents_v6: true,
            is_resumed: false,
            is_the_servers: false,
            is_connect: true,
            chunks: Passed::Untouched,
            replaces: 3,
            socket_left: 1 << 40,
            copy: copy.to_vec(),
        }
    }

    #[test]
    fn what_was_put_is_taken_once_for_each_receiver_and_by_its_cookie_only() {
        let (ledger, file) = Ledger::create().unwrap();
        let other = Ledger::open(file.as_fd()).unwrap();
        let sent = passage(1, &[b'x'; PASSED_BYTES]);
        assert!(ledger.pass(40, &sent) && ledger.pass(40, &sent));
        assert_eq!(other.passed(41), None);
        assert_eq!(other.passed(40), Some(sent.clone()));
        assert_eq!(other.passed(40), Some(sent.clone()));
        assert_eq!(other.passed(40), None);
        // What a receiver never took of an earlier presentation is none of the next one's.
        let next = Passage { id: Id { slot: 1, generation: 8 }, copy: Vec::new(), ..sent.clone() };
        assert!(ledger.pass(40, &sent) && ledger.pass(40, &next));
        assert_eq!((other.passed(40), other.passed(40)), (Some(next), None));
        assert!(!ledger.pass(40, &passage(1, &[b'x'; PASSED_BYTES + 1])));
    }

    #[test]
    fn a_full_table_refuses_and_makes_room_where_connections_are_over() {
        let (ledger, _file) = Ledger::create().unwrap();
        let open: Vec<Passage> = (0..PROBES as u32)
            .map(|slot| {
                assert!(ledger.take(slot));
                let id = ledger.present(slot).unwrap();
                assert!(ledger.claim(id));
                Passage { id, ..passage(slot, b"") }
            })
            .collect();
        let cookie = |n: usize| 3 + (n * PLACES) as u64;
        for (n, passage) in open.iter().enumerate() {
            assert!(ledger.pass(cookie(n), passage));
        }
        let another = passage(99, b"");
        assert!(!ledger.pass(cookie(PROBES), &another));
        ledger.end(open[4].id);
        assert!(ledger.pass(cookie(PROBES), &another));
        assert_eq!(ledger.passed(cookie(4)), None);
        assert_eq!(ledger.passed(cookie(5)).as_ref(), Some(&open[5]));
        assert_eq!(ledger.passed(cookie(PROBES)), Some(another));
    }
}
