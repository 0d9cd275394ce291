//! Recognition of known field names.

use crate::field::FieldId;

/// Longest known name plus its colon fits here, so that one fixed-size comparison decides.
pub(crate) const NAME_BLOCK: usize = 32;

/// A set of known fields: bit `id % 64` of one of two words, because a shift of 128 bits takes longer than all else
/// that is done for a field.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ids {
    pub low: u64,
    pub high: u64,
}

impl Ids {
    pub(crate) const NONE: Self = Self { low: 0, high: 0 };

    /// The set of one known field; nothing for [`FieldId::Other`].
    pub(crate) const fn of(id: FieldId) -> Self {
        match id {
            FieldId::Other => Self::NONE,
            id if (id as u8) < 64 => Self { low: 1 << id as u8, high: 0 },
            id => Self { low: 0, high: 1 << (id as u8 - 64) },
        }
    }

    /// Bit `id as u8` for each.
    pub(crate) fn bits(self) -> u128 {
        u128::from(self.low) | u128::from(self.high) << 64
    }
}

/// A known name with its colon, ready for a comparison of [`NAME_BLOCK`] bytes without branches:
/// `(input | fold) == pattern` for every byte. `fold` is 0x20 under letters (either case matches), 0 under `-` and `:`,
/// and 0xff after the colon, where anything matches.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct NamePattern {
    pub pattern: [u8; NAME_BLOCK],
    pub fold: [u8; NAME_BLOCK],
    /// Length of the name without its colon, in bytes.
    pub length: u8,
    pub id: FieldId,
    pub ids: Ids,
}

impl NamePattern {
    const fn of(id: FieldId, name: &str) -> Self {
        let name = name.as_bytes();
        assert!(name.len() < NAME_BLOCK, "a known field name does not fit its block");
        let mut this = Self {
            pattern: [0xff; NAME_BLOCK],
            fold: [0xff; NAME_BLOCK],
            length: name.len() as u8,
            id,
            ids: Ids::of(id),
        };
        let mut i = 0;
        while i < name.len() {
            assert!(
                name[i].is_ascii_lowercase() || name[i] == b'-',
                "known names are lower-case letters and hyphens"
            );
            this.pattern[i] = name[i];
            this.fold[i] = if name[i].is_ascii_lowercase() { 0x20 } else { 0 };
            i += 1;
        }
        this.pattern[i] = b':';
        this.fold[i] = 0;
        this
    }

    /// Whether `input` starts with this name, in any case, and a colon.
    #[inline(always)]
    pub(crate) fn matches(&self, input: &[u8; NAME_BLOCK]) -> bool {
        let mut difference = 0;
        for ((byte, fold), pattern) in input.iter().zip(&self.fold).zip(&self.pattern) {
            difference |= (byte | fold) ^ pattern;
        }
        difference == 0
    }

    /// The same for fewer bytes than fill a block.
    #[inline(always)]
    pub(crate) fn starts(&self, input: &[u8]) -> bool {
        let length = usize::from(self.length) + 1;
        let Some(input) = input.get(..length) else { return false };
        // Two words, which may overlap, are all of most names.
        match length {
            4..8 => self.has_word::<4>(input, 0) && self.has_word::<4>(input, length - 4),
            8..=16 => self.has_word::<8>(input, 0) && self.has_word::<8>(input, length - 8),
            _ => input.eq_ignore_ascii_case(&self.pattern[..length]),
        }
    }

    /// Whether `input` has the same `N` bytes at `at`.
    #[inline(always)]
    fn has_word<const N: usize>(&self, input: &[u8], at: usize) -> bool {
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..N].copy_from_slice(&bytes[at..at + N]);
            u64::from_le_bytes(word)
        };
        word(input) | word(&self.fold) == word(&self.pattern)
    }
}

/// By `FieldId as u8`.
pub(crate) static PATTERNS: [NamePattern; FieldId::KNOWN.len()] = {
    let mut patterns = [NamePattern::of(FieldId::Other, ""); FieldId::KNOWN.len()];
    let mut i = 0;
    while i < patterns.len() {
        assert!(FieldId::KNOWN[i].0 as usize == i);
        patterns[i] = NamePattern::of(FieldId::KNOWN[i].0, FieldId::KNOWN[i].1);
        i += 1;
    }
    patterns
};

/// For each letter the first known name that starts with it or a later one; the names are in alphabetical order.
static FIRST_OF_LETTER: [u8; 27] = {
    let mut first = [0; 27];
    let mut letter = 0;
    while letter < 27 {
        let mut i = 0;
        while i < FieldId::KNOWN.len() && FieldId::KNOWN[i].1.as_bytes()[0] < b'a' + letter {
            i += 1;
        }
        first[letter as usize] = i as u8;
        letter += 1;
    }
    first
};

impl FieldId {
    /// Which known field `name` (in any case) is, or [`FieldId::Other`].
    pub fn from_name(name: &[u8]) -> Self {
        let Some(first) = name.first().map(u8::to_ascii_lowercase).filter(u8::is_ascii_lowercase) else {
            return Self::Other;
        };
        let letter = usize::from(first - b'a');
        Self::KNOWN[usize::from(FIRST_OF_LETTER[letter])..usize::from(FIRST_OF_LETTER[letter + 1])]
            .iter()
            .find(|(_, known)| known.as_bytes().eq_ignore_ascii_case(name))
            .map_or(Self::Other, |&(id, _)| id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_name_is_found_in_any_case_and_no_other() {
        for &(id, name) in FieldId::KNOWN {
            assert_eq!(FieldId::from_name(name.as_bytes()), id);
            assert_eq!(FieldId::from_name(name.to_ascii_uppercase().as_bytes()), id);
            assert_eq!(FieldId::from_name(format!("{name}x").as_bytes()), FieldId::Other);
            assert_ne!(FieldId::from_name(&name.as_bytes()[..name.len() - 1]), id);
            let mut block = [b'~'; NAME_BLOCK];
            block[..name.len()].copy_from_slice(name.to_ascii_uppercase().as_bytes());
            assert!(!PATTERNS[id as usize].matches(&block));
            block[name.len()] = b':';
            assert!(PATTERNS[id as usize].matches(&block));
            assert!(PATTERNS[id as usize].starts(&block[..=name.len()]));
            assert!(!PATTERNS[id as usize].starts(&block[..name.len()]));
            for i in 0..=name.len() {
                let mut other = block;
                other[i] ^= 0x40;
                assert!(!PATTERNS[id as usize].matches(&other), "{name} with byte {i} changed");
                assert!(!PATTERNS[id as usize].starts(&other), "{name} with byte {i} changed");
            }
        }
        assert_eq!(FieldId::from_name(b""), FieldId::Other);
        assert_eq!(FieldId::from_name(b"-"), FieldId::Other);
    }

    #[test]
    fn known_names_are_in_alphabetical_order() {
        assert!(FieldId::KNOWN.is_sorted_by_key(|&(_, name)| name.as_bytes()[0]));
    }
}
