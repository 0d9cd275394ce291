//! Range requests (RFC 9110 §14).

use std::io::Write;
use std::ops::Deref;

/// More ranges than this in one request are not worth their overhead (RFC 9110 §14.2): the whole is sent.
pub const MAX_RANGES: usize = 16;

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

/// What `value`, the content of a `Range` field, asks of a representation of `length` bytes.
pub fn parse(value: &[u8], length: u64) -> RangeResult {
    // RFC 9110 §14.1: range units are case-insensitive.
    let Some((unit, set)) = value.split_at_checked(6) else { return RangeResult::Whole };
    if !unit.eq_ignore_ascii_case(b"bytes=") {
        return RangeResult::Whole;
    }
    let mut ranges = Ranges { list: [ByteRange::default(); MAX_RANGES], count: 0 };
    let mut asked = 0;
    for member in set.split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
        if member.is_empty() {
            continue;
        }
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
        assert_eq!(parse("bytes=0-,".repeat(100).as_bytes(), 10), RangeResult::Whole);
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
            let given: Vec<ByteRange> = match parse(format!("bytes={}", specs.join(",")).as_bytes(), 1000) {
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
