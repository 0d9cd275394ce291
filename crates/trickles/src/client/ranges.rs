//! A set of byte offsets as disjoint ranges.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint ranges that do not touch; start → end.
#[derive(Clone, Debug, Default)]
pub(super) struct RangeSet(BTreeMap<u64, u64>);

impl RangeSet {
    pub(super) fn insert(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if start >= end {
            return;
        }
        while let Some((&s, &e)) = self.0.range(..=end).next_back() {
            if e < start {
                break;
            }
            self.0.remove(&s);
            start = start.min(s);
            end = end.max(e);
        }
        self.0.insert(start, end);
    }

    pub(super) fn remove(&mut self, range: Range<u64>) {
        if range.start >= range.end {
            return;
        }
        while let Some((&s, &e)) = self.0.range(..range.end).next_back() {
            if e <= range.start {
                break;
            }
            self.0.remove(&s);
            if e > range.end {
                self.0.insert(range.end, e);
            }
            if s < range.start {
                self.0.insert(s, range.start);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// End of the range that holds `offset`.
    pub(super) fn end_of(&self, offset: u64) -> Option<u64> {
        self.0.range(..=offset).next_back().map(|(_, &end)| end).filter(|&end| end > offset)
    }

    /// Start of the first range after `offset`.
    pub(super) fn next_start(&self, offset: u64) -> Option<u64> {
        self.0.range(offset..).next().map(|(&start, _)| start)
    }

    /// The parts of `range` that are not in the set.
    pub(super) fn missing(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut parts = Vec::new();
        let mut at = range.start;
        while at < range.end {
            if let Some(end) = self.end_of(at) {
                at = end;
                continue;
            }
            let end = self.next_start(at).unwrap_or(u64::MAX).min(range.end);
            parts.push(at..end);
            at = end;
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_range_set_is_a_set(operations in prop::collection::vec((any::<bool>(), 0..64_u64, 0..20_u64), 0..60)) {
            let (mut set, mut model) = (RangeSet::default(), [false; 100]);
            for (insert, start, length) in operations {
                let range = start..start + length;
                model[start as usize..(start + length) as usize].fill(insert);
                if insert { set.insert(range) } else { set.remove(range) }
                let members: Vec<u64> = (0..100).filter(|&n| set.end_of(n).is_some()).collect();
                let expected: Vec<u64> = (0..100).filter(|&n| model[n as usize]).collect();
                prop_assert_eq!(&members, &expected);
                prop_assert_eq!(set.is_empty(), expected.is_empty());
                let missing: Vec<u64> = set.missing(10..70).into_iter().flatten().collect();
                let expected: Vec<u64> = (10..70).filter(|&n| !model[n as usize]).collect();
                prop_assert_eq!(missing, expected);
                let ends: Vec<(u64, u64)> = set.0.iter().map(|(&s, &e)| (s, e)).collect();
                prop_assert!(ends.windows(2).all(|pair| pair[0].1 < pair[1].0), "ranges touch: {ends:?}");
            }
        }
    }
}
