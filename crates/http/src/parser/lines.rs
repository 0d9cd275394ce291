//! The field section of a head (RFC 9112 §5), shared by requests, responses and trailers.

use crate::chars::{is_token, is_value};
use crate::error::HeadError;
use crate::field::{Field, FieldId, Span};

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
    id: Option<FieldId>,
    pub fields: Vec<Field>,
    /// Bit `id as u8` for every known field seen.
    pub present: u128,
    /// Bit `id as u8` for every known field seen at least twice.
    pub repeated: u128,
}

impl FieldLines {
    pub(crate) fn reset(&mut self) {
        self.at = At::LineStart;
        self.position = 0;
        self.fields.clear();
        self.present = 0;
        self.repeated = 0;
    }

    /// Goes on from `self.position`; true when the empty line was read. Nothing beyond `window` is looked at.
    pub(crate) fn parse(&mut self, window: &[u8], limit: u16) -> Result<bool, HeadError> {
        loop {
            match self.at {
                At::LineStart => match window[self.position.min(window.len())..] {
                    [] | [b'\r'] => return Ok(false),
                    [b'\r', b'\n', ..] => {
                        self.position += 2;
                        return Ok(true);
                    }
                    [b'\r', ..] => return Err(HeadError::BareCarriageReturn),
                    [b'\n', ..] => return Err(HeadError::BareLineFeed),
                    [b' ' | b'\t', ..] => return Err(HeadError::ObsoleteFold),
                    [b':', ..] => return Err(HeadError::EmptyFieldName),
                    [_, ..] if self.fields.len() >= usize::from(limit) => {
                        return Err(HeadError::TooManyFields { limit });
                    }
                    [_, ..] => {
                        self.token = self.position;
                        self.at = At::Name;
                    }
                },
                At::Name => {
                    let Some(length) = window[self.position..].iter().position(|&byte| !is_token(byte))
                    else {
                        self.position = window.len();
                        return Ok(false);
                    };
                    self.position += length;
                    match window[self.position] {
                        b':' => {}
                        b' ' | b'\t' => return Err(HeadError::WhitespaceBeforeColon),
                        b'\n' => return Err(HeadError::BareLineFeed),
                        _ => return Err(HeadError::BadFieldName),
                    }
                    self.name = span(self.token, self.position);
                    self.id = Some(FieldId::from_name(&window[self.token..self.position]));
                    self.position += 1;
                    self.at = At::ValueStart;
                }
                At::ValueStart => {
                    let Some(blanks) = window[self.position..].iter().position(|&byte| !is_blank(byte))
                    else {
                        self.position = window.len();
                        return Ok(false);
                    };
                    self.position += blanks;
                    self.token = self.position;
                    self.at = At::Value;
                }
                At::Value => {
                    let Some(length) = window[self.position..].iter().position(|&byte| !is_value(byte))
                    else {
                        self.position = window.len();
                        return Ok(false);
                    };
                    self.position += length;
                    match window[self.position..] {
                        [b'\r', b'\n', ..] => {}
                        [b'\r'] => return Ok(false),
                        [b'\r', ..] => return Err(HeadError::BareCarriageReturn),
                        [b'\n', ..] => return Err(HeadError::BareLineFeed),
                        _ => return Err(HeadError::ControlByte),
                    }
                    self.push(window);
                    self.position += 2;
                    self.at = At::LineStart;
                }
            }
        }
    }

    /// Records the field whose value ends at `self.position`.
    fn push(&mut self, window: &[u8]) {
        let mut end = self.position;
        while end > self.token && is_blank(window[end - 1]) {
            end -= 1;
        }
        let id = self.id.take().unwrap_or(FieldId::Other);
        let bit = if id == FieldId::Other { 0 } else { 1 << id as u8 };
        self.repeated |= self.present & bit;
        self.present |= bit;
        self.fields.push(Field { id, name: self.name, value: span(self.token, end) });
    }
}

fn is_blank(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

/// Heads are limited to 4 GiB by the type of their limit.
fn span(start: usize, end: usize) -> Span {
    Span { start: start as u32, length: (end - start) as u32 }
}
