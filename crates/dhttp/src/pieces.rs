//! Responses in several datagrams, with repair driven by the client (DHTTP §III-C and §VII, "large responses over
//! multiple UDP packets"): the server sends pieces and forgets them, the client asks for the ranges that it misses.

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64;

use crate::wire::{MAX_RANGES, PieceRange};

/// What tells one response from another: a server that makes it anew may make it differently.
pub fn tag_of(response: &[u8]) -> u32 {
    // Not against attackers, who would have to know the id: against a mixture of two responses.
    xxh3_64(response) as u32
}

/// A response of which some pieces are here.
#[derive(Debug)]
pub(crate) struct Assembly {
    tag: u32,
    bytes: Vec<u8>,
    /// What is not here yet: in order, not empty, not adjacent.
    missing: Vec<Range<u32>>,
    /// How often what is missing was asked for.
    pub repairs: u32,
}

impl Assembly {
    /// A response of `total` bytes of which nothing is here.
    pub fn new(tag: u32, total: u32) -> Self {
        let missing = if total == 0 { Vec::new() } else { std::iter::once(0..total).collect() };
        Self { tag, bytes: vec![0; total as usize], missing, repairs: 0 }
    }

    /// Whether a piece with these belongs to this response.
    pub fn is_of(&self, tag: u32, total: u32) -> bool {
        self.tag == tag && self.bytes.len() == total as usize
    }

    pub fn tag(&self) -> u32 {
        self.tag
    }

    /// Takes a piece over; `false` if it does not lie within the response.
    pub fn insert(&mut self, offset: u32, piece: &[u8]) -> bool {
        let Some(end) = u32::try_from(piece.len()).ok().and_then(|length| offset.checked_add(length)) else {
            return false;
        };
        let Some(place) = self.bytes.get_mut(offset as usize..end as usize) else { return false };
        place.copy_from_slice(piece);
        self.missing = std::mem::take(&mut self.missing)
            .into_iter()
            .flat_map(|range| [range.start..range.end.min(offset), range.start.max(end)..range.end])
            .filter(|range| range.start < range.end)
            .collect();
        true
    }

    /// All of the response, once it is here.
    pub fn complete(&self) -> Option<&[u8]> {
        self.missing.is_empty().then_some(&self.bytes)
    }

    /// The first ranges that are missing.
    pub fn missing(&self) -> Vec<PieceRange> {
        let ranges = self.missing.iter().take(MAX_RANGES);
        ranges.map(|range| PieceRange { offset: range.start, length: range.end - range.start }).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_missing_is_asked_for_and_nothing_else() {
        let mut assembly = Assembly::new(7, 10);
        assert!(assembly.insert(2, b"cd") && assembly.insert(6, b"gh"));
        let ranges = |assembly: &Assembly| {
            assembly.missing().iter().map(|range| (range.offset, range.length)).collect::<Vec<_>>()
        };
        assert_eq!(ranges(&assembly), [(0, 2), (4, 2), (8, 2)]);
        assert!(!assembly.insert(9, b"jk") && !assembly.insert(u32::MAX, b"x"));
        assert!(assembly.insert(0, b"abcdef") && assembly.complete().is_none());
        assert!(assembly.insert(8, b"ij"));
        assert_eq!(assembly.complete(), Some(&b"abcdefghij"[..]));
    }

    proptest! {
        #[test]
        fn any_pieces_in_any_order_give_the_response(
            response in prop::collection::vec(any::<u8>(), 1..200),
            cuts in prop::collection::vec((any::<prop::sample::Index>(), 1..40usize), 0..60),
        ) {
            let mut assembly = Assembly::new(tag_of(&response), response.len() as u32);
            for (offset, length) in cuts {
                let offset = offset.index(response.len());
                let end = (offset + length).min(response.len());
                prop_assert!(assembly.insert(offset as u32, &response[offset..end]));
            }
            while assembly.complete().is_none() {
                let ranges = assembly.missing();
                prop_assert!(!ranges.is_empty());
                for PieceRange { offset, length } in ranges {
                    let range = offset as usize..(offset + length) as usize;
                    prop_assert!(assembly.insert(offset, &response[range]));
                }
            }
            prop_assert_eq!(assembly.complete(), Some(response.as_slice()));
        }
    }
}
