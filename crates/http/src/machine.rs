//! The table-driven half of the parsers: the hybrid state machine of Tempesta §4.4.1.
//!
//! A state is a chain of 16-byte transitions, four to a cache line. A transition compares the input with up to two
//! patterns of four bytes, or one byte's rank in a re-mapped alphabet with up to four ranges. What no edge matches
//! takes the slow path: the byte-wise, switch-driven parsers in `parser`, which decide every rare case and every error.
//! The table therefore only ever speeds up what the slow path would accept, and needs no edge for what is wrong.
//!
//! The table is built at compile time from the words and ranges listed in [`describe`].

use crate::field::FieldId;
use crate::head::Method;
use crate::head::Version;
use crate::names::{NamePattern, PATTERNS};

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

/// Targets of edges: 0 is the slow path, from here on it is the end of the walk with a result, else a state.
const ACCEPT: u8 = 128;
const SLOW: u8 = 0;

/// One transition. For patterns, `edges` holds two of four bytes, of which `beyond` says how many bits come after the
/// pattern's end; for ranges, four pairs of first rank and number of ranks, each of one byte.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Transition {
    /// Which four bytes of the word the patterns are compared with.
    looks_at: u8,
    /// The next transition of the same state, tried when no edge matches; 0: the slow path.
    otherwise: u8,
    beyond: [u8; 2],
    edges: [u8; 8],
    next: [u8; 4],
}

const _: () = assert!(size_of::<Transition>() == 16 && 64 / size_of::<Transition>() == 4);

impl Transition {
    const EMPTY: Self = Self { looks_at: 0, otherwise: SLOW, beyond: [0; 2], edges: [0; 8], next: [SLOW; 4] };
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
    /// Where to go from the letter that a field name starts with: the one state with more edges than a transition
    /// holds.
    letters: [u8; rank::LETTERS.1 as usize],
}

/// The machine.
pub(crate) static MACHINE: Machine = describe();

impl Machine {
    /// `GET ` and its like at `at`: the method and the position of the target.
    #[inline(always)]
    pub(crate) fn method(&self, text: &[u8], at: usize) -> Option<(Method, usize)> {
        let block = text.get(at..)?.first_chunk::<LINE_BLOCK>()?;
        // Where the target of nearly all requests begins need not wait for the table.
        if block.starts_with(b"GET ") {
            return Some((Method::Get, at + 4));
        }
        let number = self.word(self.method, |i| word_of(block, i))?;
        METHODS.get(number).map(|&(word, method)| (method, at + word.len()))
    }

    /// `HTTP/1.1` and CRLF at `at`: the version and the position of the first field line.
    #[inline(always)]
    pub(crate) fn version(&self, text: &[u8], at: usize) -> Option<(Version, usize)> {
        let block = text.get(at..)?.first_chunk::<LINE_BLOCK>()?;
        let number = self.word(self.version, |i| word_of(block, i))?;
        // Not the length of the word that was found: where fields begin must not wait for which it is.
        VERSIONS.get(number).map(|&(_, version)| (version, at + VERSION_BYTES))
    }

    /// `HTTP/1.1 200 ` at the start: version, status and the position of the reason.
    #[inline(always)]
    pub(crate) fn status_line(&self, text: &[u8]) -> Option<(Version, u16, usize)> {
        let number = self.word(self.status_line, |i| four_bytes(text, 4 * i))?;
        let &(word, version) = STATUS_LINES.get(number)?;
        let end = self.ranges(self.status_code, text, word.len())?;
        let digits = &text[word.len()..end - 1];
        let status = digits.iter().fold(0, |status, digit| status * 10 + u16::from(digit - b'0'));
        Some((version, status, end))
    }

    /// The one known name that can be at the start of a field line. `word` gives four bytes of the line, counted by
    /// fours.
    #[inline(always)]
    pub(crate) fn known_name(&self, word: impl Fn(usize) -> u32) -> Option<&'static NamePattern> {
        let rank = ALPHABET[word(0) as usize % 256];
        let state = *self.letters.get(usize::from(rank))?;
        // Letters in either case.
        self.word(state, |i| word(i) | 0x2020_2020).and_then(|number| PATTERNS.get(number))
    }

    /// Follows patterns from `state` to the end of a word. `word` gives four bytes of the input, counted by fours.
    #[inline(always)]
    fn word(&self, mut state: u8, word: impl Fn(usize) -> u32) -> Option<usize> {
        while state < ACCEPT {
            if state == SLOW {
                return None;
            }
            let transition = &self.table[usize::from(state)];
            state = transition.by_pattern(word(usize::from(transition.looks_at)));
        }
        Some(usize::from(state - ACCEPT))
    }

    /// Follows ranges from `state`, a byte each, to their end and returns where that is.
    #[inline(always)]
    fn ranges(&self, mut state: u8, text: &[u8], mut at: usize) -> Option<usize> {
        while state < ACCEPT {
            let byte = *text.get(at).filter(|_| state != SLOW)?;
            state = self.table[usize::from(state)].by_range(byte);
            at += 1;
        }
        Some(at)
    }
}

impl Transition {
    /// Where to go with a byte whose rank is in one of four ranges.
    #[inline(always)]
    fn by_range(&self, byte: u8) -> u8 {
        let rank = ALPHABET[usize::from(byte)];
        let (ranges, _) = self.edges.as_chunks();
        let found = ranges.iter().position(|&[first, count]| rank.wrapping_sub(first) < count);
        found.map_or(self.otherwise, |edge| self.next[edge])
    }

    /// Where to go with four bytes that match one of two patterns.
    #[inline(always)]
    fn by_pattern(&self, word: u32) -> u8 {
        let (patterns, _) = self.edges.as_chunks();
        let matches = |edge: usize| {
            let difference = word ^ u32::from_le_bytes(patterns[edge]);
            difference.wrapping_shl(u32::from(self.beyond[edge])) == 0
        };
        if matches(0) {
            self.next[0]
        } else if matches(1) {
            self.next[1]
        } else {
            self.otherwise
        }
    }
}

/// As many bytes as the shortest head has from its version on.
const LINE_BLOCK: usize = "HTTP/1.1\r\n\r\n".len();

/// Four bytes of a block, counted by fours; no word of the table looks beyond its block.
#[inline(always)]
pub(crate) fn word_of<const N: usize>(block: &[u8; N], at: usize) -> u32 {
    let (words, _) = block.as_chunks();
    words.get(at).map_or(0, |&bytes| u32::from_le_bytes(bytes))
}

/// Four bytes of `text` from `at`; beyond its end zeros, which match no pattern.
#[inline(always)]
pub(crate) fn four_bytes(text: &[u8], at: usize) -> u32 {
    let rest = text.get(at..).unwrap_or(b"");
    match rest.first_chunk() {
        Some(&bytes) => u32::from_le_bytes(bytes),
        None => rest.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte)),
    }
}

/// Methods in the order in which they are tried; each is followed by a space.
const METHODS: [(&str, Method); 11] = [
    ("GET ", Method::Get),
    ("POST ", Method::Post),
    ("HEAD ", Method::Head),
    ("PUT ", Method::Put),
    ("OPTIONS ", Method::Options),
    ("DELETE ", Method::Delete),
    ("PATCH ", Method::Patch),
    ("PURGE ", Method::Purge),
    ("QUERY ", Method::Query),
    ("CONNECT ", Method::Connect),
    ("TRACE ", Method::Trace),
];

const VERSIONS: [(&str, Version); 2] = [("HTTP/1.1\r\n", Version::Http11), ("HTTP/1.0\r\n", Version::Http10)];
const VERSION_BYTES: usize = 10;
const _: () = assert!(VERSIONS[0].0.len() == VERSION_BYTES && VERSIONS[1].0.len() == VERSION_BYTES);

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
    let code_end = builder.range(rank::SP, ACCEPT);
    let digit = builder.range(rank::DIGITS, code_end);
    let digit = builder.range(rank::DIGITS, digit);
    let status_code = builder.range(rank::DIGITS_BUT_ZERO, digit);
    let letters = builder.names_by_letter(&names);
    Machine { table: builder.table, method, version, status_line, status_code, letters }
}

/// Words that a state may continue with, in the order in which they are tried.
struct Words {
    text: [[u8; WORD_BYTES]; MOST_WORDS],
    length: [usize; MOST_WORDS],
    accept: [u8; MOST_WORDS],
    count: usize,
}

const WORD_BYTES: usize = 32;
const MOST_WORDS: usize = 128;

impl Words {
    const NONE: Self = Self {
        text: [[0; WORD_BYTES]; MOST_WORDS],
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

    /// Those of `members` that have the same four bytes at `depth` as the first of them.
    const fn agreeing_with_first(&self, members: u128, depth: usize) -> u128 {
        let first = members.trailing_zeros() as usize;
        let mut group = 0;
        let mut i = first;
        while i < self.count {
            let mut at = depth;
            while at < depth + 4 && self.text[first][at] == self.text[i][at] {
                at += 1;
            }
            if members & (1 << i) != 0 && at == depth + 4 {
                group |= 1 << i;
            }
            i += 1;
        }
        group
    }

    /// Where the four bytes of `members` are of most kinds, before the end of any: what follows a name may be like
    /// another.
    const fn most_telling_depth(&self, members: u128) -> usize {
        let mut shortest = WORD_BYTES;
        let mut i = 0;
        while i < self.count {
            if members & (1 << i) != 0 && self.length[i] < shortest {
                shortest = self.length[i];
            }
            i += 1;
        }
        let (mut best, mut most_kinds) = (0, 0);
        let mut depth = 0;
        while depth < shortest {
            let mut kinds = 0;
            let mut remaining = members;
            while remaining != 0 {
                remaining &= !self.agreeing_with_first(remaining, depth);
                kinds += 1;
            }
            if kinds > most_kinds {
                (best, most_kinds) = (depth, kinds);
            }
            depth += 4;
        }
        assert!(most_kinds > 1, "names cannot be told apart");
        best
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

    /// A state with one range.
    const fn range(&mut self, range: rank::Range, next: u8) -> u8 {
        self.add(Transition {
            edges: [range.0, range.1, 0, 0, 0, 0, 0, 0],
            next: [next, SLOW, SLOW, SLOW],
            ..Transition::EMPTY
        })
    }

    /// A state from which each of `words` is read to its end.
    const fn words(&mut self, words: &Words) -> u8 {
        self.read(words, (1 << words.count) - 1, 0)
    }

    /// A state from which each word in `members` (bit `i` is word `i`) is read to its end; they agree before `depth`.
    const fn read(&mut self, words: &Words, members: u128, depth: usize) -> u8 {
        let mut chain = Chain::begin(self, depth / 4);
        let mut remaining = members;
        while remaining != 0 {
            let group = words.agreeing_with_first(remaining, depth);
            remaining &= !group;
            let first = group.trailing_zeros() as usize;
            let next = if words.length[first] <= depth + 4 {
                assert!(group.count_ones() == 1, "a word starts with another");
                ACCEPT + words.accept[first]
            } else {
                self.read(words, group, depth + 4)
            };
            chain.edge(self, words, first, depth, next);
        }
        chain.first as u8
    }

    /// For each letter where the names that start with it are told apart; [`NamePattern`]
    /// compares the one that is left.
    const fn names_by_letter(&mut self, names: &Words) -> [u8; rank::LETTERS.1 as usize] {
        let mut letters = [SLOW; rank::LETTERS.1 as usize];
        let mut letter = 0;
        while letter < letters.len() {
            let mut members = 0;
            let mut i = 0;
            while i < names.count {
                if names.text[i][0] == b'a' + letter as u8 {
                    members |= 1 << i;
                }
                i += 1;
            }
            letters[letter] = self.tell_apart(names, members);
            letter += 1;
        }
        letters
    }

    /// Where to go when a name can be any of `members`: compares the four bytes by which most of them differ.
    const fn tell_apart(&mut self, names: &Words, members: u128) -> u8 {
        if members == 0 {
            return SLOW;
        }
        if members.count_ones() == 1 {
            return ACCEPT + names.accept[members.trailing_zeros() as usize];
        }
        let depth = names.most_telling_depth(members);
        let mut chain = Chain::begin(self, depth / 4);
        let mut remaining = members;
        while remaining != 0 {
            let group = names.agreeing_with_first(remaining, depth);
            remaining &= !group;
            let next = self.tell_apart(names, group);
            chain.edge(self, names, group.trailing_zeros() as usize, depth, next);
        }
        chain.first as u8
    }
}

/// The transitions of one state with patterns: two edges each, tried one after the other.
struct Chain {
    first: usize,
    last: usize,
    /// Edges of the last one.
    edges: usize,
    looks_at: u8,
}

impl Chain {
    const fn begin(builder: &mut Builder, looks_at: usize) -> Self {
        let looks_at = looks_at as u8;
        let first = builder.add(Transition { looks_at, ..Transition::EMPTY }) as usize;
        Self { first, last: first, edges: 0, looks_at }
    }

    /// An edge with the four bytes of a word from `depth` on, or as many as it has.
    const fn edge(&mut self, builder: &mut Builder, words: &Words, word: usize, depth: usize, next: u8) {
        if self.edges == 2 {
            let chained = builder.add(Transition { looks_at: self.looks_at, ..Transition::EMPTY });
            builder.table[self.last].otherwise = chained;
            self.last = chained as usize;
            self.edges = 0;
        }
        let transition = &mut builder.table[self.last];
        let mut at = 0;
        while at < 4 {
            transition.edges[4 * self.edges + at] = words.text[word][depth + at];
            at += 1;
        }
        let left = words.length[word] - depth;
        transition.beyond[self.edges] = if left < 4 { 8 * (4 - left as u8) } else { 0 };
        transition.next[self.edges] = next;
        self.edges += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(state: u8, text: &[u8]) -> Option<usize> {
        MACHINE.word(state, |i| four_bytes(text, 4 * i))
    }

    #[test]
    fn every_word_is_read_to_its_end_and_no_other() {
        for (i, (word, method)) in METHODS.into_iter().enumerate() {
            let text = [word.as_bytes(), b"/ HTTP/1.1"].concat();
            assert_eq!(accepted(MACHINE.method, &text), Some(i));
            assert_eq!(MACHINE.method(&text, 0), Some((method, word.len())));
            assert_eq!(accepted(MACHINE.method, word.to_lowercase().as_bytes()), None);
            for end in 0..word.len() {
                assert_eq!(accepted(MACHINE.method, &word.as_bytes()[..end]), None);
            }
        }
        for (i, (word, version)) in VERSIONS.into_iter().enumerate() {
            assert_eq!(accepted(MACHINE.version, word.as_bytes()), Some(i));
            let text = [b" ", word.as_bytes(), b"\r\n"].concat();
            assert_eq!(MACHINE.version(&text, 1), Some((version, 1 + word.len())));
        }
        assert_eq!(accepted(MACHINE.version, b"HTTP/1.2\r\n"), None);
        assert_eq!(MACHINE.status_line(b"HTTP/1.0 404 "), Some((Version::Http10, 404, 13)));
        for odd in ["HTTP/1.1 044 ", "HTTP/1.1 40a ", "HTTP/1.1 4040", "HTTP/1.1 404", "HTTP/1.2 404 "] {
            assert_eq!(MACHINE.status_line(odd.as_bytes()), None, "{odd}");
        }
    }

    #[test]
    fn every_known_name_is_the_only_candidate_for_itself() {
        for &(id, name) in FieldId::KNOWN {
            for name in [name.to_owned(), name.to_ascii_uppercase()] {
                let line = format!("{name}:");
                let candidate = MACHINE.known_name(|at| four_bytes(line.as_bytes(), 4 * at));
                assert_eq!(candidate.map(|name| name.id), Some(id));
            }
        }
    }

    /// `x-real-ip` was not known before a line that had `host` where `x-forwarded-host` has it.
    #[test]
    fn what_follows_a_name_does_not_make_it_another() {
        for &(id, name) in FieldId::KNOWN {
            for &(_, other) in FieldId::KNOWN {
                let mut line = format!("{name}:").into_bytes();
                line.extend(other.bytes().skip(line.len()));
                let candidate = MACHINE.known_name(|at| four_bytes(&line, 4 * at));
                assert_eq!(candidate.map(|name| name.id), Some(id), "{name} before what is like {other}");
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
