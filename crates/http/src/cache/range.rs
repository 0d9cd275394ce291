//! Range requests (RFC 9110 §14).

use std::io::Write;
use std::ops::Deref;

/// More ranges than this in one request are not worth their overhead (RFC 9110 §14.2): the whole is sent.
pub const MAX_RANGES: usize = 16;
/// Ranges of one request that may overlap others of it (RFC 9110 §14.2).
const MAX_OVERLAPPING: u32 = 2;

/// Bytes `start..end` of a representation.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ByteRange {
    /// Offset of the first byte.
    pub start: u64,
    /// Offset after the last byte; greater than `start`.
    pub end: u64,
}

/// At least two ranges that neither overlap nor touch, in the order asked for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ranges {
    list: [ByteRange; MAX_RANGES],
    count: usize,
}

impl Deref for Ranges {
    type Target = [ByteRange];

    fn deref(&self) -> &[ByteRange] {
        &self.list[..self.count]
    }
}

/// What a `Range` field asks for.
// The result lives on the stack for a moment; boxing the list would cost an allocation that a peer can ask for.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RangeResult {
    /// Everything: the field is malformed, of another unit, or asks for more than it is worth.
    Whole,
    /// Bytes `start..end`.
    Single {
        /// Offset of the first byte.
        start: u64,
        /// Offset after the last byte.
        end: u64,
    },
    /// Several ranges, which take a `multipart/byteranges` response. A server may send the whole instead.
    Multiple(Ranges),
    /// None of the ranges lies within the representation: 416.
    Unsatisfiable,
}

/// What `value`, the content of a `Range` field, asks of a representation of `length` bytes. Of a set that
/// [`is_excessive`] nothing is sent.
pub fn parse(value: &[u8], length: u64) -> RangeResult {
    let Some(set) = members(value) else { return RangeResult::Whole };
    if is_excessive(value) {
        return RangeResult::Unsatisfiable;
    }
    let mut ranges = Ranges { list: [ByteRange::default(); MAX_RANGES], count: 0 };
    let mut asked = 0;
    for member in set {
        asked += 1;
        match (parse_one(member, length), asked <= MAX_RANGES) {
            (Some(Spec::Within(range)), true) => ranges.add(range),
            (Some(Spec::Beyond), true) => {}
            (Some(Spec::Everything), _) | (None, _) | (_, false) => return RangeResult::Whole,
        }
    }
    match *ranges {
        _ if asked == 0 => RangeResult::Whole,
        [] => RangeResult::Unsatisfiable,
        [ByteRange { start, end }] => RangeResult::Single { start, end },
        _ => RangeResult::Multiple(ranges),
    }
}

/// Whether a set of ranges is one of those that RFC 9110 §14.2 lets a server reject, as a broken client or an attack
/// sends them: more than two of its ranges overlap others, or it has more than [`MAX_RANGES`], of which one does not
/// begin where the one before has ended or later. The answer is 416 (§15.5.17), whatever the length.
pub fn is_excessive(value: &[u8]) -> bool {
    let Some(set) = members(value) else { return false };
    let mut seen = [ByteRange::default(); MAX_RANGES];
    let (mut count, mut overlapping, mut in_order, mut last_end) = (0, 0, true, 0);
    for range in set.map_while(extent) {
        in_order &= range.start >= last_end;
        last_end = range.end;
        let known = seen.get(..count).unwrap_or(&seen);
        overlapping +=
            u32::from(known.iter().any(|other| other.start < range.end && range.start < other.end));
        if let Some(place) = seen.get_mut(count) {
            *place = range;
        }
        count += 1;
        if overlapping > MAX_OVERLAPPING || (count > MAX_RANGES && !in_order) {
            return true;
        }
    }
    false
}

/// The bytes that `value` asks for, as far as that can be told without the length: an open end is as far away as can
/// be. Of several ranges, and of what is not understood, it is everything, since that is sent.
pub fn asked(value: &[u8]) -> ByteRange {
    let only = members(value).and_then(|mut set| set.next().filter(|_| set.next().is_none()));
    only.and_then(extent).unwrap_or(ByteRange { start: 0, end: u64::MAX })
}

/// The ranges of a set, unless its unit is unknown or missing.
fn members(value: &[u8]) -> Option<impl Iterator<Item = &[u8]>> {
    let (unit, set) = value.split_at_checked(6)?;
    // RFC 9110 §14.1: range units are case-insensitive.
    let is_known = unit.eq_ignore_ascii_case(b"bytes=");
    let members = set.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|member| !member.is_empty());
    is_known.then_some(members)
}

/// Where a range lies in a representation that is as long as can be.
fn extent(member: &[u8]) -> Option<ByteRange> {
    match parse_one(member, u64::MAX)? {
        Spec::Within(range) => Some(range),
        Spec::Beyond | Spec::Everything => Some(ByteRange { start: u64::MAX, end: u64::MAX }),
    }
}

impl Ranges {
    /// Adds a range and joins it with those that it overlaps or touches (RFC 9110 §14.2, §15.3.7.2); the result takes
    /// the place of the first of them.
    fn add(&mut self, mut range: ByteRange) {
        let mut place = None;
        let mut kept = 0;
        for i in 0..self.count {
            let other = self.list[i];
            if other.start <= range.end && range.start <= other.end {
                range = ByteRange { start: range.start.min(other.start), end: range.end.max(other.end) };
                if place.is_none() {
                    place = Some(kept);
                    kept += 1;
                }
            } else {
                self.list[kept] = other;
                kept += 1;
            }
        }
        let place = place.unwrap_or_else(|| {
            kept += 1;
            kept - 1
        });
        self.list[place] = range;
        self.count = kept;
        // The joined range may now touch one that was kept before it was known to reach so far.
        let touches = |other: &ByteRange| other.start <= range.end && range.start <= other.end;
        if self.iter().filter(|other| touches(other)).count() > 1 {
            self.list.copy_within(place + 1..kept, place);
            self.count -= 1;
            self.add(range);
        }
    }
}

enum Spec {
    Within(ByteRange),
    Beyond,
    /// A suffix of an empty representation: satisfiable, but it has no byte that Content-Range could name.
    Everything,
}

fn parse_one(member: &[u8], length: u64) -> Option<Spec> {
    let dash = member.iter().position(|&byte| byte == b'-')?;
    let (first, last) = (&member[..dash], &member[dash + 1..]);
    if first.is_empty() {
        let suffix = number(last)?;
        return Some(match suffix {
            0 => Spec::Beyond,
            _ if length == 0 => Spec::Everything,
            _ => Spec::Within(ByteRange { start: length.saturating_sub(suffix), end: length }),
        });
    }
    let start = number(first)?;
    let end = match last {
        b"" => length,
        digits => {
            let last = number(digits)?;
            if last < start {
                return None;
            }
            last.saturating_add(1).min(length)
        }
    };
    Some(if start < length { Spec::Within(ByteRange { start, end }) } else { Spec::Beyond })
}

/// Digits as a number; what exceeds 64 bits counts as the largest.
fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(
        digits
            .iter()
            .fold(0_u64, |number, digit| number.saturating_mul(10).saturating_add(u64::from(digit - b'0'))),
    )
}

/// Appends the value of `Content-Range` for bytes `start..end` of `length` (RFC 9110 §14.4).
pub fn write_content_range(start: u64, end: u64, length: u64, out: &mut Vec<u8>) {
    let last = end.saturating_sub(1);
    // Writing to a Vec cannot fail.
    let _ = write!(out, "bytes {start}-{last}/{length}");
}

/// Appends the value of `Content-Range` for a 416 (RFC 9110 §15.5.17).
pub fn write_unsatisfied(length: u64, out: &mut Vec<u8>) {
    let _ = write!(out, "bytes */{length}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn single(start: u64, end: u64) -> RangeResult {
        RangeResult::Single { start, end }
    }

    fn multiple(value: &str, length: u64) -> Vec<(u64, u64)> {
        match parse(value.as_bytes(), length) {
            RangeResult::Multiple(ranges) => ranges.iter().map(|range| (range.start, range.end)).collect(),
            other => panic!("{value}: {other:?}"),
        }
    }

    #[test]
    fn one_range_is_cut_to_the_length() {
        for (value, expected) in [
            ("bytes=0-1", single(0, 2)),
            ("BYTES=1-", single(1, 10)),
            ("bytes=-3", single(7, 10)),
            ("bytes=-30", single(0, 10)),
            ("bytes=9-99", single(9, 10)),
            ("bytes=0-99999999999999999999999", single(0, 10)),
            ("bytes=, 2-3 ,", single(2, 4)),
            ("bytes=10-", RangeResult::Unsatisfiable),
            ("bytes=-0", RangeResult::Unsatisfiable),
            ("bytes=99999999999999999999999-", RangeResult::Unsatisfiable),
        ] {
            assert_eq!(parse(value.as_bytes(), 10), expected, "{value}");
        }
    }

    #[test]
    fn what_is_malformed_is_ignored() {
        for value in [
            "",
            "bytes",
            "bytes=",
            "bytes=,",
            "bytes=a-b",
            "bytes=3-2",
            "bytes=1",
            "bytes=-",
            "bytes=+1-2",
            "lines=0-1",
            "bytes=0-1,x",
            "bytes=1 - 2",
            "bytes =0-1",
            "bytes=-1-2",
        ] {
            assert_eq!(parse(value.as_bytes(), 10), RangeResult::Whole, "{value}");
        }
    }

    #[test]
    fn an_empty_representation_has_no_ranges() {
        assert_eq!(parse(b"bytes=0-", 0), RangeResult::Unsatisfiable);
        assert_eq!(parse(b"bytes=-5", 0), RangeResult::Whole);
    }

    #[test]
    fn several_ranges_are_joined_where_they_touch() {
        assert_eq!(multiple("bytes=0-1, 5-6", 10), [(0, 2), (5, 7)]);
        assert_eq!(multiple("bytes=-1, 0-1, 20-30", 10), [(9, 10), (0, 2)]);
        assert_eq!(multiple("bytes=0-0, 4-4, 2-2", 10), [(0, 1), (4, 5), (2, 3)]);
        assert_eq!(parse(b"bytes=0-3, 2-6", 10), single(0, 7));
        assert_eq!(parse(b"bytes=0-3, 4-6", 10), single(0, 7));
        assert_eq!(parse(b"bytes=0-0, 4-4, 0-9", 10), single(0, 10));
        assert_eq!(multiple("bytes=8-8, 0-0, 4-4, 1-3", 10), [(8, 9), (0, 5)]);
        assert_eq!(parse(b"bytes=20-, 3-4", 10), single(3, 5));
    }

    #[test]
    fn too_many_ranges_are_answered_whole() {
        let many = |count: u64| {
            let ranges: Vec<String> = (0..count).map(|i| format!("{0}-{0}", i * 2)).collect();
            parse(format!("bytes={}", ranges.join(",")).as_bytes(), 1000)
        };
        assert!(matches!(many(16), RangeResult::Multiple(ranges) if ranges.len() == 16));
        assert_eq!(many(17), RangeResult::Whole);
    }

    #[test]
    fn sets_that_only_a_broken_client_or_an_attack_sends_are_rejected() {
        let many_small = (0..17).rev().map(|i| format!("{i}-{i},")).collect::<String>();
        for (set, excessive) in [
            ("0-1,5-6,3-4", false),
            ("0-9,5-14,10-19", false),
            ("0-9,5-14,10-19,15-24", true),
            ("0-,0-,0-", false),
            (&"0-,".repeat(100), true),
            ("-1,-2,-3,-4", true),
            (&many_small, true),
            // The third that overlaps lies behind what makes the set malformed.
            ("0-,0-,0-,x,0-", false),
            (&(0..1_000).map(|i| format!("{}-{},", 5 * i, 5 * i + 1)).collect::<String>(), false),
        ] {
            let value = format!("bytes={set}");
            assert_eq!(is_excessive(value.as_bytes()), excessive, "{value}");
            assert_eq!(parse(value.as_bytes(), 1_000) == RangeResult::Unsatisfiable, excessive, "{value}");
        }
        assert!(!is_excessive("lines=0-,0-,0-,0-".as_bytes()) && !is_excessive(b"bytes="));
    }

    #[test]
    fn what_is_asked_for_without_a_length() {
        let asked = |value: &str| {
            let ByteRange { start, end } = asked(value.as_bytes());
            (start, end)
        };
        assert_eq!(asked("bytes=5-9"), (5, 10));
        assert_eq!(asked("bytes=5-"), (5, u64::MAX));
        assert_eq!(asked("bytes=-5"), (u64::MAX - 5, u64::MAX));
        for whole in ["bytes=0-1,5-6", "bytes=", "bytes=x", "lines=0-1"] {
            assert_eq!(asked(whole), (0, u64::MAX), "{whole}");
        }
    }

    #[test]
    fn content_range_names_the_last_byte() {
        let mut out = Vec::new();
        write_content_range(0, 2, 11, &mut out);
        out.push(b' ');
        write_unsatisfied(11, &mut out);
        assert_eq!(out, b"bytes 0-1/11 bytes */11");
    }

    proptest! {
        #[test]
        fn results_lie_within_and_apart(
            value in "bytes=([0-9]{0,2}-[0-9]{0,2}, ?){0,5}[0-9]{0,2}-[0-9]{0,2}",
            length in 0..60_u64,
        ) {
            match parse(value.as_bytes(), length) {
                RangeResult::Single { start, end } => prop_assert!(start < end && end <= length),
                RangeResult::Multiple(ranges) => {
                    prop_assert!(ranges.len() > 1);
                    for (i, range) in ranges.iter().enumerate() {
                        prop_assert!(range.start < range.end && range.end <= length);
                        for other in &ranges[..i] {
                            prop_assert!(other.end < range.start || range.end < other.start);
                        }
                    }
                }
                RangeResult::Whole | RangeResult::Unsatisfiable => {}
            }
        }

        #[test]
        fn joined_ranges_cover_what_was_asked_for(asked in prop::collection::vec((0..40_u64, 0..8_u64), 1..10)) {
            let specs: Vec<String> = asked.iter().map(|(start, more)| format!("{start}-{}", start + more)).collect();
            let covered = |byte: u64| asked.iter().any(|(start, more)| (*start..=start + more).contains(&byte));
            let value = format!("bytes={}", specs.join(","));
            let given: Vec<ByteRange> = match parse(value.as_bytes(), 1000) {
                RangeResult::Unsatisfiable if is_excessive(value.as_bytes()) => return Ok(()),
                RangeResult::Single { start, end } => vec![ByteRange { start, end }],
                RangeResult::Multiple(ranges) => ranges.to_vec(),
                other => panic!("{other:?}"),
            };
            for byte in 0..60 {
                prop_assert_eq!(covered(byte), given.iter().any(|range| (range.start..range.end).contains(&byte)));
            }
        }

        #[test]
        fn no_bytes_make_it_panic(value in prop::collection::vec(any::<u8>(), 0..60), length in any::<u64>()) {
            let _ = parse(&value, length);
            let mut prefixed = b"bytes=".to_vec();
            prefixed.extend_from_slice(&value);
            let _ = parse(&prefixed, length);
        }
    }
}
