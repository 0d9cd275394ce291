//! The table-driven half of the parsers: the hybrid state machine of Tempesta §4.4.1.
//!
//! A state is a chain of 16-byte transitions, four to a cache line. A transition compares the input with up to two
//! patterns of four bytes, or one byte's rank in a re-mapped alphabet with up to four ranges. What no edge matches takes
//! the slow path: the byte-wise, switch-driven parsers in `parser`, which decide every rare case and every error. The
//! table therefore only ever speeds up what the slow path would accept, and needs no edge for what is wrong.
//!
//! The table is built at compile time from the words and ranges listed in [`describe`].

use crate::field::FieldId;
use crate::head::Method;
use crate::head::Version;
use crate::names::NAME_BLOCK;

/// Rank of every byte: letters first, in either case, then the rest of the token characters, so that "a byte of a field
/// name" is one range; then what the grammar names; then everything else.
static ALPHABET: [u8; 256] = {
    let mut ranks = [rank::OTHER; 256];
    let mut next = 26;
    let mut i = 0;
    while i < 256 {
        let byte = i as u8;
        if byte.is_ascii_alphabetic() {
            ranks[i] = byte.to_ascii_lowercase() - b'a';
        } else if byte.is_ascii_digit() {
            ranks[i] = rank::DIGITS.0 + (byte - b'0');
        } else if crate::chars::is_token(byte) {
            ranks[i] = rank::MARKS.0 + (next - 26);
            next += 1;
        }
        i += 1;
    }
    assert!(next - 26 == rank::MARKS.1, "as many marks as the grammar has");
    ranks[b' ' as usize] = rank::SP.0;
    ranks
};

/// Ranges of the alphabet: first rank and number of ranks.
mod rank {
    pub(super) type Range = (u8, u8);
    pub(super) const LETTERS: Range = (0, 26);
    pub(super) const DIGITS: Range = (26, 10);
    pub(super) const DIGITS_BUT_ZERO: Range = (27, 9);
    pub(super) const MARKS: Range = (36, 15);
    pub(super) const SP: Range = (51, 1);
    pub(super) const OTHER: u8 = 52;
}

/// Edges are ranges of the alphabet, not patterns.
const RANGES: u8 = 1;
/// Patterns match letters in either case: [`Machine::known_name`] folds what it compares them with, and need not look.
const FOLD: u8 = 2;
/// Targets of edges: 0 is the slow path, from here on it is the end of the walk with a result, else a state.
const ACCEPT: u8 = 128;
const SLOW: u8 = 0;

/// One transition. For patterns, `edges` holds two of four bytes, where 0xff matches anything and `lengths` says how
/// many bytes each consumes; for ranges, four pairs of first rank and number of ranks.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Transition {
    control: u8,
    /// The next transition of the same state, tried when no edge matches; 0: the slow path.
    otherwise: u8,
    lengths: [u8; 2],
    edges: [u8; 8],
    next: [u8; 4],
}

const _: () = assert!(size_of::<Transition>() == 16 && 64 / size_of::<Transition>() == 4);

impl Transition {
    const EMPTY: Self = Self { control: 0, otherwise: SLOW, lengths: [0; 2], edges: [0; 8], next: [SLOW; 4] };
}

/// Transitions in the table; targets from [`ACCEPT`] on are no transitions.
const TRANSITIONS: usize = 128;

/// The table and the states where walks start.
#[repr(C, align(64))]
pub(crate) struct Machine {
    table: [Transition; TRANSITIONS],
    method: u8,
    version: u8,
    status_line: u8,
    status_code: u8,
    /// The first of 26 states, one for each letter that a field name starts with.
    letters: u8,
}

/// How a walk ended.
pub(crate) enum Walk {
    /// No edge matched, or too few bytes were there: the slow path decides.
    Slow,
    /// A word was recognized: its number and the position behind what was matched.
    Accept(u8, usize),
}

/// The machine.
pub(crate) static MACHINE: Machine = describe();

impl Machine {
    /// `GET ` and its like at `at`: the method and the position of the target.
    #[inline(always)]
    pub(crate) fn method(&self, text: &[u8], at: usize) -> Option<(Method, usize)> {
        match self.walk(self.method, text, at) {
            Walk::Accept(accept, end) => METHODS.get(usize::from(accept)).map(|&(_, method)| (method, end)),
            Walk::Slow => None,
        }
    }

    /// `HTTP/1.1` and CRLF at `at`: the version and the position of the first field line.
    #[inline(always)]
    pub(crate) fn version(&self, text: &[u8], at: usize) -> Option<(Version, usize)> {
        match self.walk(self.version, text, at) {
            Walk::Accept(accept, end) => {
                VERSIONS.get(usize::from(accept)).map(|&(_, version)| (version, end))
            }
            Walk::Slow => None,
        }
    }

    /// `HTTP/1.1 200 ` at the start: version, status and the position of the reason.
    #[inline(always)]
    pub(crate) fn status_line(&self, text: &[u8]) -> Option<(Version, u16, usize)> {
        let Walk::Accept(accept, code) = self.walk(self.status_line, text, 0) else { return None };
        let Walk::Accept(_, end) = self.walk(self.status_code, text, code) else { return None };
        let status =
            text[code..end - 1].iter().fold(0, |status, digit| status * 10 + u16::from(digit - b'0'));
        STATUS_LINES.get(usize::from(accept)).map(|&(_, version)| (version, status, end))
    }

    /// The number of the one known field that the name at the start of a field line can be.
    #[inline(always)]
    pub(crate) fn known_name(&self, block: &[u8; NAME_BLOCK]) -> Option<u8> {
        // The one state with more edges than a transition holds: a range of the alphabet, each rank with its own target.
        let rank = ALPHABET[usize::from(block[0])];
        if rank >= rank::LETTERS.1 {
            return None;
        }
        let (words, _) = block.as_chunks();
        let (mut state, mut depth) = (self.letters + rank, 0);
        // As `walk`, through states that are all patterns.
        loop {
            let transition = &self.table[usize::from(state) % TRANSITIONS];
            // Letters in either case; every edge but a name's last takes four bytes.
            let word = u32::from_le_bytes(words[depth % words.len()]) | 0x2020_2020;
            match transition.edge(word) {
                Some(edge) => {
                    state = transition.next[edge];
                    depth += 1;
                }
                None => state = transition.otherwise,
            }
            if state >= ACCEPT {
                return Some(state - ACCEPT);
            }
            if state == SLOW {
                return None;
            }
        }
    }

    /// Follows edges from `state`.
    #[inline(always)]
    fn walk(&self, mut state: u8, text: &[u8], mut at: usize) -> Walk {
        loop {
            let transition = &self.table[usize::from(state) % TRANSITIONS];
            let (next, length) = if transition.control & RANGES != 0 {
                let Some(&byte) = text.get(at) else { return Walk::Slow };
                transition.by_range(byte)
            } else {
                match transition.edge(four_bytes(text, at)) {
                    Some(edge) => (transition.next[edge], usize::from(transition.lengths[edge])),
                    None => (transition.otherwise, 0),
                }
            };
            state = next;
            at += length;
            if next >= ACCEPT {
                return Walk::Accept(next - ACCEPT, at);
            }
            if next == SLOW {
                return Walk::Slow;
            }
        }
    }
}

impl Transition {
    #[inline(always)]
    fn by_range(&self, byte: u8) -> (u8, usize) {
        let rank = ALPHABET[usize::from(byte)];
        let mut i = 0;
        while i < 4 {
            if rank.wrapping_sub(self.edges[2 * i]) < self.edges[2 * i + 1] {
                return (self.next[i], usize::from(self.lengths[0]));
            }
            i += 1;
        }
        (self.otherwise, 0)
    }

    /// Which of the two patterns four bytes match; both are compared at once.
    #[inline(always)]
    fn edge(&self, word: u32) -> Option<usize> {
        let (word, patterns) = (u64::from(word), u64::from_le_bytes(self.edges));
        let anything = ((patterns >> 7) & 0x0101_0101_0101_0101) * 0xff;
        let difference = (word << 32 | word | anything) ^ patterns;
        if difference as u32 == 0 {
            Some(0)
        } else if difference >> 32 == 0 {
            Some(1)
        } else {
            None
        }
    }
}

/// Four bytes of `text` from `at`; beyond its end zeros, which match no pattern.
#[inline(always)]
fn four_bytes(text: &[u8], at: usize) -> u32 {
    let rest = text.get(at..).unwrap_or(b"");
    match rest.first_chunk() {
        Some(&bytes) => u32::from_le_bytes(bytes),
        None => rest.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte)),
    }
}

/// Methods in the order in which they are tried; each is followed by a space.
const METHODS: [(&str, Method); 10] = [
    ("GET ", Method::Get),
    ("POST ", Method::Post),
    ("HEAD ", Method::Head),
    ("PUT ", Method::Put),
    ("OPTIONS ", Method::Options),
    ("DELETE ", Method::Delete),
    ("PATCH ", Method::Patch),
    ("PURGE ", Method::Purge),
    ("CONNECT ", Method::Connect),
    ("TRACE ", Method::Trace),
];

const VERSIONS: [(&str, Version); 2] = [("HTTP/1.1\r\n", Version::Http11), ("HTTP/1.0\r\n", Version::Http10)];

const STATUS_LINES: [(&str, Version); 2] = [("HTTP/1.1 ", Version::Http11), ("HTTP/1.0 ", Version::Http10)];

/// Field names that requests and responses usually have, tried before others that start alike.
const COMMON: &[FieldId] = &[
    FieldId::Host,
    FieldId::UserAgent,
    FieldId::Accept,
    FieldId::AcceptEncoding,
    FieldId::AcceptLanguage,
    FieldId::Connection,
    FieldId::Cookie,
    FieldId::Referer,
    FieldId::CacheControl,
    FieldId::ContentType,
    FieldId::ContentLength,
    FieldId::SecFetchDest,
    FieldId::SecFetchMode,
    FieldId::SecFetchSite,
    FieldId::SecFetchUser,
    FieldId::IfNoneMatch,
    FieldId::IfModifiedSince,
    FieldId::Server,
    FieldId::Vary,
];

/// The description that the table is built from: which words and ranges may come next in which state.
const fn describe() -> Machine {
    let mut builder = Builder { table: [Transition::EMPTY; TRANSITIONS], used: 1 };

    let mut methods = Words::NONE;
    let mut i = 0;
    while i < METHODS.len() {
        methods.add(METHODS[i].0, i as u8);
        i += 1;
    }
    let mut versions = Words::NONE;
    let mut status_lines = Words::NONE;
    i = 0;
    while i < VERSIONS.len() {
        versions.add(VERSIONS[i].0, i as u8);
        status_lines.add(STATUS_LINES[i].0, i as u8);
        i += 1;
    }
    let mut names = Words::NONE;
    i = 0;
    while i < COMMON.len() {
        names.add_name(COMMON[i]);
        i += 1;
    }
    i = 0;
    while i < FieldId::KNOWN.len() {
        names.add_name(FieldId::KNOWN[i].0);
        i += 1;
    }
    let method = builder.words(&methods);
    let version = builder.words(&versions);
    let status_line = builder.words(&status_lines);
    let code_end = builder.range(1, rank::SP, ACCEPT);
    let digit = builder.range(1, rank::DIGITS, code_end);
    let digit = builder.range(1, rank::DIGITS, digit);
    let status_code = builder.range(1, rank::DIGITS_BUT_ZERO, digit);
    let letters = builder.names_by_letter(&names);
    Machine { table: builder.table, method, version, status_line, status_code, letters }
}

/// Words that a state may continue with, in the order in which they are tried.
struct Words {
    /// Padded with 0xff, which matches anything.
    text: [[u8; WORD_BYTES]; MOST_WORDS],
    length: [usize; MOST_WORDS],
    accept: [u8; MOST_WORDS],
    count: usize,
}

const WORD_BYTES: usize = 32;
const MOST_WORDS: usize = 128;

impl Words {
    const NONE: Self = Self {
        text: [[0xff; WORD_BYTES]; MOST_WORDS],
        length: [0; MOST_WORDS],
        accept: [0; MOST_WORDS],
        count: 0,
    };

    /// Adds a word that ends the walk with `accept`; one that is there already is left in its place.
    const fn add(&mut self, word: &str, accept: u8) {
        let mut i = 0;
        while i < self.count {
            if self.accept[i] == accept {
                return;
            }
            i += 1;
        }
        let word = word.as_bytes();
        self.accept[i] = accept;
        self.length[i] = word.len();
        self.count += 1;
        let mut at = 0;
        while at < word.len() {
            self.text[i][at] = word[at];
            at += 1;
        }
    }

    /// Adds a field name and its colon.
    const fn add_name(&mut self, id: FieldId) {
        let before = self.count;
        self.add(id.name(), id as u8);
        if self.count > before {
            self.text[before][self.length[before]] = b':';
            self.length[before] += 1;
        }
    }

    /// Whether words `a` and `b` have the same four bytes at `depth`.
    const fn agree(&self, a: usize, b: usize, depth: usize) -> bool {
        let mut at = depth;
        while at < depth + 4 {
            if self.text[a][at] != self.text[b][at] {
                return false;
            }
            at += 1;
        }
        true
    }
}

/// Lays states out in the table.
struct Builder {
    table: [Transition; TRANSITIONS],
    used: usize,
}

impl Builder {
    const fn add(&mut self, transition: Transition) -> u8 {
        assert!(self.used < TRANSITIONS, "the table is full");
        self.table[self.used] = transition;
        self.used += 1;
        (self.used - 1) as u8
    }

    /// A state with one range, which consumes `length` bytes.
    const fn range(&mut self, length: u8, range: rank::Range, next: u8) -> u8 {
        self.add(Transition {
            control: RANGES,
            lengths: [length, length],
            edges: [range.0, range.1, 0, 0, 0, 0, 0, 0],
            next: [next, SLOW, SLOW, SLOW],
            ..Transition::EMPTY
        })
    }

    /// A state from which each of `words` is read to its end.
    const fn words(&mut self, words: &Words) -> u8 {
        let state = self.add(Transition::EMPTY);
        self.branch(state, words, (1 << words.count) - 1, 0, 0);
        state
    }

    /// States for the 26 letters, one after another, from which each of `names` is read until only one is possible;
    /// [`NamePattern`](crate::names::NamePattern) compares the rest.
    const fn names_by_letter(&mut self, names: &Words) -> u8 {
        let first = self.used;
        let mut letter = 0;
        while letter < 26 {
            self.add(Transition::EMPTY);
            letter += 1;
        }
        letter = 0;
        while letter < 26 {
            let mut members = 0;
            let mut i = 0;
            while i < names.count {
                if names.text[i][0] == b'a' + letter as u8 {
                    members |= 1 << i;
                }
                i += 1;
            }
            if members != 0 {
                self.branch((first + letter) as u8, names, members, 0, FOLD);
            }
            letter += 1;
        }
        first as u8
    }

    /// Fills the state at `state` with edges for the words in `members` (bit `i` is word `i`), which agree in their first
    /// `depth` bytes; more than two edges make a chain of transitions.
    const fn branch(&mut self, state: u8, words: &Words, members: u128, depth: usize, control: u8) {
        let mut current = state as usize;
        self.table[current].control = control;
        let mut remaining = members;
        let mut slot = 0;
        while remaining != 0 {
            let first = remaining.trailing_zeros() as usize;
            let mut group = 0u128;
            let mut i = first;
            while i < words.count {
                if remaining & (1 << i) != 0 && words.agree(first, i, depth) {
                    group |= 1 << i;
                }
                i += 1;
            }
            remaining &= !group;
            let left = words.length[first].saturating_sub(depth);
            let certain = group.count_ones() == 1 && (control & FOLD != 0 || left <= 4);
            let next = if certain {
                ACCEPT + words.accept[first]
            } else {
                let child = self.add(Transition::EMPTY);
                self.branch(child, words, group, depth + 4, control);
                child
            };
            if slot == 2 {
                let chained = self.add(Transition { control, ..Transition::EMPTY });
                self.table[current].otherwise = chained;
                current = chained as usize;
                slot = 0;
            }
            let transition = &mut self.table[current];
            let mut at = 0;
            while at < 4 {
                transition.edges[4 * slot + at] = words.text[first][depth + at];
                at += 1;
            }
            transition.lengths[slot] = if left < 4 { left as u8 } else { 4 };
            transition.next[slot] = next;
            slot += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(state: u8, text: &[u8]) -> Option<(u8, usize)> {
        match MACHINE.walk(state, text, 0) {
            Walk::Accept(accept, at) => Some((accept, at)),
            Walk::Slow => None,
        }
    }

    #[test]
    fn every_word_is_read_to_its_end_and_no_other() {
        for (i, (word, _)) in METHODS.iter().enumerate() {
            let text = [word.as_bytes(), b"/ HTTP"].concat();
            assert_eq!(accepted(MACHINE.method, &text), Some((i as u8, word.len())));
            assert_eq!(accepted(MACHINE.method, word.to_lowercase().as_bytes()), None);
            for end in 0..word.len() {
                assert_eq!(accepted(MACHINE.method, &word.as_bytes()[..end]), None);
            }
        }
        for (i, (word, _)) in VERSIONS.iter().enumerate() {
            assert_eq!(accepted(MACHINE.version, word.as_bytes()), Some((i as u8, 10)));
        }
        assert_eq!(accepted(MACHINE.version, b"HTTP/1.2\r\n"), None);
        assert_eq!(accepted(MACHINE.status_code, b"404 "), Some((0, 4)));
        assert_eq!(accepted(MACHINE.status_code, b"044 "), None);
    }

    #[test]
    fn every_known_name_is_the_only_candidate_for_itself() {
        for &(id, name) in FieldId::KNOWN {
            for name in [name.to_owned(), name.to_ascii_uppercase()] {
                let mut block = [0; NAME_BLOCK];
                block[..name.len()].copy_from_slice(name.as_bytes());
                block[name.len()] = b':';
                let candidate = MACHINE.known_name(&block).unwrap();
                assert_eq!(candidate, id as u8);
            }
        }
    }

    #[test]
    fn the_characters_of_a_field_name_are_one_range_of_the_alphabet() {
        for byte in 0..=255u8 {
            let in_range = ALPHABET[usize::from(byte)] < rank::DIGITS.1 + rank::LETTERS.1 + rank::MARKS.1;
            assert_eq!(in_range, crate::chars::is_token(byte), "byte {byte}");
        }
    }
}
