//! Which parts of which responses each client has asked for lately: a table of fixed size.

use std::hash::{DefaultHasher, Hash, Hasher};

use tidegate_core::NodeId;

/// Pairs of a client and a URL that are remembered at once; of two that meet in one place the later one stays.
const PLACES: usize = 4_096;
/// Parts of one URL that are remembered apart; of more the oldest is forgotten.
const PARTS: usize = 16;
/// Who asks for fewer bytes at a time gains next to nothing.
const FEW_BYTES: u64 = 1_024;
/// A URL that a client has not asked for in this time is forgotten.
const FORGOTTEN_MS: u64 = 10_000;

/// Bytes from the first to before the second.
type Part = (u64, u64);

/// What clients have asked for, for as long as they go on. What is forgotten counts as never asked for: to fill the
/// table makes nobody look worse.
#[derive(Debug)]
pub(crate) struct Parts {
    /// Made at the first use, since most sites are asked for no parts.
    places: Vec<Place>,
}

/// What one client has asked for of one URL.
#[derive(Clone, Debug)]
struct Place {
    of: Option<(NodeId, u64)>,
    last_ms: u64,
    /// Parts that neither overlap nor touch; what is not in use is empty.
    parts: [Part; PARTS],
    /// Where the next part goes.
    next: usize,
}

impl Place {
    const NEW: Self = Self { of: None, last_ms: 0, parts: [(0, 0); PARTS], next: 0 };

    /// Remembers a part; how many bytes of it were asked for before.
    fn add(&mut self, (start, end): Part) -> u64 {
        let (mut joined, mut known) = ((start, end), 0);
        for other in self.parts.iter_mut().filter(|(first, last)| first < last) {
            if other.0 <= end && start <= other.1 {
                known += other.1.min(end).saturating_sub(other.0.max(start));
                joined = (joined.0.min(other.0), joined.1.max(other.1));
                *other = (0, 0);
            }
        }
        self.parts[self.next] = joined;
        self.next = (self.next + 1) % PARTS;
        known
    }
}

impl Parts {
    /// The memory of one, once it is in use.
    pub(crate) const BYTES: usize = PLACES * size_of::<Place>();

    pub(crate) const fn new() -> Self {
        Self { places: Vec::new() }
    }

    /// Whether a client gains next to nothing by asking for this part: it is tiny, or most of it was asked for before.
    pub(crate) fn is_idle(&mut self, client: NodeId, target: u64, part: Part, now_ms: u64) -> bool {
        if self.places.is_empty() {
            self.places = vec![Place::NEW; PLACES];
        }
        let place = &mut self.places[place_of(client, target)];
        if place.of != Some((client, target)) || now_ms.saturating_sub(place.last_ms) > FORGOTTEN_MS {
            *place = Place { of: Some((client, target)), ..Place::NEW };
        }
        place.last_ms = now_ms;
        let length = part.1.saturating_sub(part.0);
        let known = place.add(part);
        length < FEW_BYTES || known > length - known
    }
}

/// Targets are hashed with a secret already, so that nobody can choose what meets.
fn place_of(client: NodeId, target: u64) -> usize {
    let mut hasher = DefaultHasher::new();
    (client, target).hash(&mut hasher);
    hasher.finish() as usize % PLACES
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;
    use tidegate_core::{PrefixTree, TreeConfig};

    use super::*;

    fn client(last: u8) -> NodeId {
        let mut tree = PrefixTree::new(TreeConfig { memory_bytes: 1 << 20, window_ms: 10_000, seed: 1 });
        let mut locate = |last| tree.locate(IpAddr::from([10, 0, 0, last]), 0);
        (0..=last).map(&mut locate).last().unwrap()
    }

    /// Whether each of these, asked for one after the other, gains next to nothing.
    fn idle(parts: &[Part]) -> Vec<bool> {
        let mut known = Parts::new();
        parts.iter().map(|part| known.is_idle(client(1), 7, *part, 0)).collect()
    }

    const END: u64 = u64::MAX;
    const KIB: u64 = 1_024;

    #[test]
    fn what_is_new_counts_and_what_is_tiny_or_known_does_not() {
        assert_eq!(idle(&[(0, KIB), (KIB, 2 * KIB), (4 * KIB, 5 * KIB)]), [false; 3]);
        assert_eq!(idle(&[(0, 1), (9 * KIB, 9 * KIB + 1_023)]), [true; 2], "tiny");
        assert_eq!(idle(&[(0, KIB), (0, KIB)]), [false, true], "the same");
        assert_eq!(idle(&[(0, 9 * KIB), (8 * KIB, 12 * KIB)]), [false, false], "a quarter of it is known");
        assert_eq!(idle(&[(0, END), (5, END), (KIB, 2 * KIB)]), [false, true, true], "within an open end");
        // Downwards, and to both sides: of each a part is new, and most is not.
        assert_eq!(idle(&[(90 * KIB, END), (80 * KIB, END), (70 * KIB, END)]), [false, true, true]);
        assert_eq!(idle(&[(50 * KIB, 60 * KIB), (49 * KIB, 61 * KIB)]), [false, true]);
        assert_eq!(idle(&[(0, 2 * KIB), (4 * KIB, 6 * KIB), (0, 6 * KIB)]), [false, false, true], "in two");
    }

    #[test]
    fn others_other_urls_and_later_times_are_other_parts() {
        let mut known = Parts::new();
        assert!(!known.is_idle(client(1), 7, (0, END), 0));
        assert!(!known.is_idle(client(2), 7, (0, END), 0));
        assert!(!known.is_idle(client(1), 8, (0, END), 0));
        assert!(known.is_idle(client(1), 7, (0, END), FORGOTTEN_MS));
        assert!(!known.is_idle(client(1), 7, (0, END), 2 * FORGOTTEN_MS + 1));
    }

    proptest! {
        #[test]
        fn parts_that_are_read_in_any_order_once_each_are_never_idle(
            order in Just((0..64_u64).collect::<Vec<_>>()).prop_shuffle(),
            size in FEW_BYTES..100_000,
        ) {
            let parts: Vec<Part> = order.iter().map(|index| (index * size, (index + 1) * size)).collect();
            prop_assert!(!idle(&parts).contains(&true));
        }

        #[test]
        fn remembered_parts_stay_apart(parts in prop::collection::vec((0..500_u64, 1..50_u64), 1..100)) {
            let mut place = Place::NEW;
            for (start, length) in parts {
                prop_assert!(place.add((start, start + length)) <= length);
                let mut known: Vec<Part> = place.parts.iter().copied().filter(|(from, to)| from < to).collect();
                known.sort_unstable();
                prop_assert!(known.windows(2).all(|pair| pair[0].1 < pair[1].0), "{:?}", known);
                prop_assert!(known.iter().any(|(from, to)| *from <= start && start + length <= *to));
            }
        }
    }
}
