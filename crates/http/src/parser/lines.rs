//! The field section of a head (RFC 9112 §5), shared by requests, responses and trailers.

use crate::error::HeadError;
use crate::field::{Field, FieldId, Span};
use crate::machine::MACHINE;
use crate::names::{NAME_BLOCK, PATTERNS};
use crate::simd::Scan;

/// Where within a field line the parser stopped.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum At {
    #[default]
    LineStart,
    Name,
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
    pub fields: Vec<Field>,
    /// Bit `id as u8` for every known field seen.
    pub present: u128,
    /// Bit `id as u8` for every known field seen at least twice.
    pub repeated: u128,
}

/// As many as most heads have: room for them takes one allocation and not four.
const FIELDS_EXPECTED: usize = 16;

impl FieldLines {
    /// With room for the fields of a head.
    pub(crate) fn for_head() -> Self {
        Self { fields: Vec::with_capacity(FIELDS_EXPECTED), ..Self::default() }
    }

    pub(crate) fn reset(&mut self) {
        self.at = At::LineStart;
        self.position = 0;
        self.fields.clear();
        self.present = 0;
        self.repeated = 0;
    }

    /// Goes on from `self.position`; true when the empty line was read. Nothing beyond `window` is looked at.
    #[inline(always)]
    pub(crate) fn parse<S: Scan>(&mut self, scan: S, window: &[u8], limit: u16) -> Result<bool, HeadError> {
        loop {
            if self.at == At::LineStart && self.whole_lines(scan, window, usize::from(limit)) {
                return Ok(true);
            }
            match self.step(scan, window, limit)? {
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
        loop {
            let start = self.position;
            // Whatever may stand in a name may stand in a value. Seeking the end of the line first, not the colon, lets
            // the processor begin the next line while this one's name is still being recognized.
            let end = scan.value_end(window, start);
            if window.get(end..).and_then(<[u8]>::first_chunk) != Some(b"\r\n") {
                return false;
            }
            if end == start {
                self.position = end + 2;
                return true;
            }
            let candidate = MACHINE
                .known_name(window, start)
                .map(|number| &PATTERNS[usize::from(number) % PATTERNS.len()]);
            let (id, colon) = match candidate {
                Some(name) if scan.name_matches(block(window, start, &mut [0; NAME_BLOCK]), name) => {
                    (name.id, start + usize::from(name.length))
                }
                _ => (FieldId::Other, scan.token_end(window, start)),
            };
            if window.get(colon) != Some(&b':') || colon == start || self.fields.len() >= limit {
                return false;
            }
            let mut value = colon + 1;
            while value < end && is_blank(window[value]) {
                value += 1;
            }
            self.push(window, Field { id, name: span(start, colon), value: span(value, end) });
            self.position = end + 2;
        }
    }

    /// The slow path: one state, byte by byte but for runs. Decides every rare case and every error, and resumes within
    /// a line.
    #[inline(always)]
    fn step<S: Scan>(&mut self, scan: S, window: &[u8], limit: u16) -> Result<Step, HeadError> {
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
                _ if self.fields.len() >= usize::from(limit) => {
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
                    Some(b' ' | b'\t') => return Err(HeadError::WhitespaceBeforeColon),
                    Some(b'\n') => return Err(HeadError::BareLineFeed),
                    Some(_) => return Err(HeadError::BadFieldName),
                }
                self.name = span(self.token, self.position);
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
                self.push(window, Field { id, name: self.name, value: span(self.token, self.position) });
                self.position += 2;
                self.at = At::LineStart;
            }
        }
        Ok(Step::Taken)
    }

    /// Records a field, without the whitespace that ends its value.
    #[inline(always)]
    fn push(&mut self, window: &[u8], mut field: Field) {
        while field.value.length > 0
            && is_blank(window[(field.value.start + field.value.length - 1) as usize])
        {
            field.value.length -= 1;
        }
        let bit = if field.id == FieldId::Other { 0 } else { 1 << field.id as u8 };
        self.repeated |= self.present & bit;
        self.present |= bit;
        self.fields.push(field);
    }
}

/// How a step of the slow path ended.
enum Step {
    Taken,
    Incomplete,
    End,
}

/// The bytes from `at`, for a comparison of fixed size; near the end of `window` a copy in `spare`.
#[inline(always)]
fn block<'w>(window: &'w [u8], at: usize, spare: &'w mut [u8; NAME_BLOCK]) -> &'w [u8; NAME_BLOCK] {
    match window[at..].first_chunk() {
        Some(block) => block,
        None => {
            let rest = &window[at..];
            spare[..rest.len()].copy_from_slice(rest);
            spare
        }
    }
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
