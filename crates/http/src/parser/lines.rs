//! The field section of a head (RFC 9112 §5), shared by requests, responses and trailers.

use crate::error::HeadError;
use crate::field::{Field, FieldId, Span};
use crate::machine::{MACHINE, four_bytes, word_of};
use crate::names::Ids;
use crate::simd::{Scalar, Scan};

/// Where within a field line the parser stopped.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum At {
    #[default]
    LineStart,
    Name,
    /// In whitespace between a name and its colon.
    NameEnd,
    ValueStart,
    Value,
}

/// Parses field lines up to and including the empty line that ends them.
#[derive(Debug, Default)]
pub(crate) struct FieldLines {
    at: At,
    /// First byte not yet examined.
    pub position: usize,
    /// First byte of the name or value that is being read.
    token: usize,
    name: Span,
    /// Whether a name may have whitespace before its colon, which is left out then.
    blanks_before_colon: bool,
    /// Of which the first `count` are this head's.
    slots: Vec<Field>,
    count: usize,
    seen: Seen,
}

/// Which known fields were seen, once and again.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    present: Ids,
    repeated: Ids,
}

impl Seen {
    #[inline(always)]
    fn add(&mut self, ids: Ids) {
        self.repeated.low |= self.present.low & ids.low;
        self.repeated.high |= self.present.high & ids.high;
        self.present.low |= ids.low;
        self.present.high |= ids.high;
    }
}

/// Slots at first: as many as most heads have fields.
const FIELDS_EXPECTED: usize = 16;

const EMPTY: Field =
    Field { id: FieldId::Other, name: Span { start: 0, length: 0 }, value: Span { start: 0, length: 0 } };

impl FieldLines {
    /// With room for the fields of a head.
    pub(crate) fn for_head() -> Self {
        Self { slots: vec![EMPTY; FIELDS_EXPECTED], ..Self::default() }
    }

    /// The same, leaving out whitespace between a name and its colon.
    pub(crate) fn without_blanks() -> Self {
        Self { blanks_before_colon: true, ..Self::for_head() }
    }

    pub(crate) fn reset(&mut self) {
        self.at = At::LineStart;
        self.position = 0;
        self.count = 0;
        self.seen = Seen::default();
    }

    /// The fields of this head.
    pub(crate) fn fields(&self) -> &[Field] {
        self.slots.get(..self.count).unwrap_or_default()
    }

    /// Bit `id as u8` for every known field seen.
    pub(crate) fn present(&self) -> u128 {
        self.seen.present.bits()
    }

    /// Bit `id as u8` for every known field seen at least twice.
    pub(crate) fn repeated(&self) -> u128 {
        self.seen.repeated.bits()
    }

    /// Goes on from `self.position`; true when the empty line was read. Nothing beyond `window` is looked at.
    #[inline(always)]
    pub(crate) fn parse<S: Scan>(&mut self, scan: S, window: &[u8], limit: u16) -> Result<bool, HeadError> {
        loop {
            if self.at == At::LineStart && self.whole_lines(scan, window, usize::from(limit)) {
                return Ok(true);
            }
            match self.step(window, limit)? {
                Step::Taken => {}
                Step::Incomplete => return Ok(false),
                Step::End => return Ok(true),
            }
        }
    }

    /// The fast path: takes lines as long as they are complete and nothing about them is unusual. What stops it is left
    /// as if untouched. True when the empty line was read.
    #[inline(always)]
    fn whole_lines<S: Scan>(&mut self, scan: S, window: &[u8], limit: usize) -> bool {
        // In registers, and not read back after each field.
        let (mut start, mut count, mut seen) = (self.position, self.count, self.seen);
        let room = self.slots.len().min(limit);
        let slots = &mut self.slots[..room];
        let is_end = loop {
            // Whatever may stand in a name may stand in a value. Seeking the end of the line first, not the colon, lets
            // the processor begin the next line while this one's name is still being recognized.
            let end = scan.value_end(window, start);
            if window.get(end..).and_then(<[u8]>::first_chunk) != Some(b"\r\n") {
                break false;
            }
            if end == start {
                start = end + 2;
                break true;
            }
            let rest = &window[start..];
            let known = match rest.first_chunk() {
                Some(block) => {
                    MACHINE.known_name(|at| word_of(block, at)).filter(|name| scan.name_matches(block, name))
                }
                None => MACHINE.known_name(|at| four_bytes(rest, 4 * at)).filter(|name| name.starts(rest)),
            };
            let (id, ids, colon) = match known {
                Some(name) => (name.id, name.ids, start + usize::from(name.length)),
                None => {
                    let colon = scan.token_end(window, start);
                    if window.get(colon) != Some(&b':') || colon == start {
                        break false;
                    }
                    (FieldId::Other, Ids::NONE, colon)
                }
            };
            let Some(slot) = slots.get_mut(count) else { break false };
            *slot = Field { id, name: span(start, colon), value: value_within(window, colon + 1, end) };
            count += 1;
            seen.add(ids);
            start = end + 2;
        };
        (self.position, self.count, self.seen) = (start, count, seen);
        is_end
    }

    /// The slow path: one state, byte by byte but for runs. Decides every rare case and every error, and resumes within
    /// a line.
    #[cold]
    #[inline(never)]
    fn step(&mut self, window: &[u8], limit: u16) -> Result<Step, HeadError> {
        let scan = Scalar;
        let rest = window.get(self.position..).unwrap_or(b"");
        match self.at {
            At::LineStart => match rest {
                [] | [b'\r'] => return Ok(Step::Incomplete),
                [b'\r', b'\n', ..] => {
                    self.position += 2;
                    return Ok(Step::End);
                }
                [b'\r', ..] => return Err(HeadError::BareCarriageReturn),
                [b'\n', ..] => return Err(HeadError::BareLineFeed),
                [b' ' | b'\t', ..] => return Err(HeadError::ObsoleteFold),
                [b':', ..] => return Err(HeadError::EmptyFieldName),
                _ if self.count >= usize::from(limit) => {
                    return Err(HeadError::TooManyFields { limit });
                }
                _ => {
                    self.token = self.position;
                    self.at = At::Name;
                }
            },
            At::Name => {
                self.position = scan.token_end(window, self.position);
                match window.get(self.position) {
                    None => return Ok(Step::Incomplete),
                    Some(b':') => {}
                    Some(b' ' | b'\t') if self.blanks_before_colon => {}
                    Some(b' ' | b'\t') => return Err(HeadError::WhitespaceBeforeColon),
                    Some(b'\n') => return Err(HeadError::BareLineFeed),
                    Some(_) => return Err(HeadError::BadFieldName),
                }
                self.name = span(self.token, self.position);
                self.at = At::NameEnd;
            }
            At::NameEnd => {
                self.position += rest.iter().take_while(|&&byte| is_blank(byte)).count();
                match window.get(self.position) {
                    None => return Ok(Step::Incomplete),
                    Some(b':') => {}
                    Some(b'\n') => return Err(HeadError::BareLineFeed),
                    Some(_) => return Err(HeadError::BadFieldName),
                }
                self.position += 1;
                self.at = At::ValueStart;
            }
            At::ValueStart => {
                self.position += rest.iter().take_while(|&&byte| is_blank(byte)).count();
                if self.position == window.len() {
                    return Ok(Step::Incomplete);
                }
                self.token = self.position;
                self.at = At::Value;
            }
            At::Value => {
                self.position = scan.value_end(window, self.position);
                match window[self.position..] {
                    [] | [b'\r'] => return Ok(Step::Incomplete),
                    [b'\r', b'\n', ..] => {}
                    [b'\r', ..] => return Err(HeadError::BareCarriageReturn),
                    [b'\n', ..] => return Err(HeadError::BareLineFeed),
                    _ => return Err(HeadError::ControlByte),
                }
                let id = FieldId::from_name(self.name.of(window));
                self.push(Field {
                    id,
                    name: self.name,
                    value: value_within(window, self.token, self.position),
                });
                self.position += 2;
                self.at = At::LineStart;
            }
        }
        Ok(Step::Taken)
    }

    fn push(&mut self, field: Field) {
        if self.count == self.slots.len() {
            self.slots.resize(2 * self.count.max(FIELDS_EXPECTED), EMPTY);
        }
        if let Some(slot) = self.slots.get_mut(self.count) {
            *slot = field;
            self.count += 1;
        }
        self.seen.add(Ids::of(field.id));
    }
}

/// How a step of the slow path ended.
enum Step {
    Taken,
    Incomplete,
    End,
}

/// What lies between whitespace in `start..end`, where all bytes may stand in a value.
#[inline(always)]
fn value_within(window: &[u8], start: usize, end: usize) -> Span {
    let mut value = &window[start..end];
    // Of those bytes only a tab is less than a space.
    while let [..=b' ', rest @ ..] = value {
        value = rest;
    }
    let start = end - value.len();
    while let [rest @ .., ..=b' '] = value {
        value = rest;
    }
    span(start, start + value.len())
}

#[inline(always)]
fn is_blank(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

/// Heads are limited to 4 GiB by the type of their limit.
#[inline(always)]
fn span(start: usize, end: usize) -> Span {
    Span { start: start as u32, length: (end - start) as u32 }
}
