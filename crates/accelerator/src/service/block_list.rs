//! Which clients of trusted proxies are on the block list, as of a moment ago. The list is behind a lock, or in the
//! kernel: a client's requests wait for neither more than a few times a second.

use std::cell::RefCell;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;

/// Clients that are known at once; of two that meet in one place the later one stays.
const PLACES: usize = 4_096;
/// For how long an answer holds.
const HOLDS_MS: u64 = 250;

/// What the list has said, for as long as that holds. Of fixed size: what is not known is asked for.
#[derive(Default)]
pub(crate) struct BlockListCache {
    /// Made at the first use, since most sites trust no proxy.
    places: RefCell<Vec<Option<Answer>>>,
    /// Keyed, so that nobody can choose addresses that meet.
    hasher: RandomState,
}

#[derive(Clone, Copy)]
struct Answer {
    client: IpAddr,
    asked_ms: u64,
    is_listed: bool,
}

impl BlockListCache {
    /// Whether a client is on the list: `ask` is called where nobody has asked lately.
    pub(crate) fn is_listed(&self, client: IpAddr, now_ms: u64, ask: impl FnOnce() -> bool) -> bool {
        let place = self.hasher.hash_one(client) as usize % PLACES;
        let mut places = self.places.borrow_mut();
        if places.is_empty() {
            places.resize(PLACES, None);
        }
        let holds =
            |known: &Answer| known.client == client && now_ms.saturating_sub(known.asked_ms) < HOLDS_MS;
        if let Some(known) = places[place].filter(holds) {
            return known.is_listed;
        }
        let is_listed = ask();
        places[place] = Some(Answer { client, asked_ms: now_ms, is_listed });
        is_listed
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn list_is_asked_four_times_a_second_and_blocks_and_their_end_act_within_a_quarter_of_one() {
        let (listed, asked) = (BlockListCache::default(), Cell::new(0));
        let client = IpAddr::from([192, 0, 2, 1]);
        let look = |now_ms| {
            listed.is_listed(client, now_ms, || {
                asked.set(asked.get() + 1);
                // Blocked from 1 s to 2 s.
                (1_000..2_000).contains(&now_ms)
            })
        };
        for now_ms in 0..3_000 {
            let is_listed = look(now_ms);
            match now_ms {
                0..1_000 | 2_250.. => assert!(!is_listed, "{now_ms}"),
                1_250..2_000 => assert!(is_listed, "{now_ms}"),
                _ => {}
            }
        }
        assert_eq!(asked.get(), 12);
    }

    #[test]
    fn clients_are_told_apart_however_many_there_are() {
        let listed = BlockListCache::default();
        for round in 0..3u64 {
            for client in 0..10_000u32 {
                let is_listed = client % 3 == 0;
                let address = IpAddr::from(client.to_be_bytes());
                assert_eq!(listed.is_listed(address, round, || is_listed), is_listed);
            }
        }
        assert_eq!(listed.places.borrow().len(), PLACES);
    }
}
