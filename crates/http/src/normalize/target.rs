use super::{Part, Personality};
use crate::error::HeadError;

/// Path and query in normal form.
pub(super) struct TargetRest<'a> {
    pub path: Part<'a>,
    pub query: Option<Part<'a>>,
    /// See [`super::Normalized::reading`].
    pub reading: Option<Part<'a>>,
}

impl<'a> TargetRest<'a> {
    /// A path that needs nothing done.
    pub(super) fn of_path(path: &'a [u8]) -> Self {
        Self { path: Part::Borrowed(path), query: None, reading: None }
    }
}

/// RFC 3986 §2.3: encoded or not, these mean the same.
const UNRESERVED: u8 = 1;
/// May stand in a path as it is, and means the same to everybody.
const PATH: u8 = 2;
/// May stand in a query as it is. Brackets are not in RFC 3986's list, but every framework writes them so.
const QUERY: u8 = 4;

static CLASSES: [u8; 256] = {
    let mut classes = [0; 256];
    let mut i = 0;
    while i < 256 {
        let byte = i as u8;
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            classes[i] = UNRESERVED | PATH | QUERY;
        } else if matches!(byte, b'!' | b'$' | b'&'..=b',' | b'/' | b':' | b'=' | b'@') {
            classes[i] = PATH | QUERY;
        } else if matches!(byte, b';' | b'?' | b'[' | b']') {
            classes[i] = QUERY;
        }
        i += 1;
    }
    classes
};

fn is(class: u8, byte: u8) -> bool {
    CLASSES[usize::from(byte)] & class != 0
}

/// Normalizes what follows the authority: `/path?query`; the path may be empty.
pub(super) fn normalize<'a>(
    rest: &'a [u8],
    personality: Personality,
    scratch: &mut Vec<u8>,
) -> Result<TargetRest<'a>, HeadError> {
    if let Some(normal) = as_it_stands(rest) {
        return Ok(normal);
    }
    let end = rest.iter().position(|&byte| byte == b'?').unwrap_or(rest.len());
    let (path, query) = (&rest[..end], rest.get(end + 1..));
    let start = scratch.len();
    let is_ambiguous = PathWriter::new(personality, scratch).write(path)?;
    let path_end = scratch.len();
    if let Some(query) = query {
        write_query(query, personality, scratch)?;
    }
    let query_end = scratch.len();
    if is_ambiguous {
        PathWriter::new(Personality::Strict, scratch).write_reading(start, path_end)?;
    }
    let differs = is_ambiguous && scratch[start..path_end] != scratch[query_end..];
    Ok(TargetRest {
        path: Part::Written(path_end - start),
        query: query.map(|_| Part::Written(query_end - path_end)),
        reading: differs.then(|| Part::Written(scratch.len() - query_end)),
    })
}

/// What applications may read in a path that is in its normal form; see [`super::Normalized::reading`].
pub(super) fn reading_of(path: &[u8]) -> Vec<u8> {
    let mut out = path.to_vec();
    match PathWriter::new(Personality::Strict, &mut out).write_reading(0, path.len()) {
        Ok(()) => out.split_off(path.len()),
        Err(_) => Vec::new(),
    }
}

/// The common case: nothing to decode, remove or collapse. The one pass that every target takes.
fn as_it_stands(rest: &[u8]) -> Option<TargetRest<'_>> {
    let mut after_slash = false;
    let mut length = rest.len();
    for (i, &byte) in rest.iter().enumerate() {
        if byte == b'?' {
            length = i;
            break;
        }
        // A segment that starts with a dot need not be a dot segment; the other path finds out.
        if !is(PATH, byte) || (after_slash && (byte == b'/' || byte == b'.')) {
            return None;
        }
        after_slash = byte == b'/';
    }
    let (path, query) = (&rest[..length], rest.get(length + 1..));
    if path.is_empty() || query.is_some_and(|query| !query.iter().all(|&byte| is(QUERY, byte))) {
        return None;
    }
    Some(TargetRest { query: query.map(Part::Borrowed), ..TargetRest::of_path(path) })
}

/// Writes a path segment by segment; every byte is written once and removed at most once, so that the time is linear
/// whatever the number of slashes and dots (the "beck" attack on Apache was quadratic).
struct PathWriter<'s> {
    personality: Personality,
    out: &'s mut Vec<u8>,
    /// Where the path starts in `out`.
    base: usize,
    /// Where the current segment starts in `out`.
    segment: usize,
    /// The current segment holds an encoded slash or backslash.
    hides_slash: bool,
    /// The current segment holds a semicolon, encoded or not.
    has_parameter: bool,
    /// An earlier segment held one of these.
    is_ambiguous: bool,
}

impl<'s> PathWriter<'s> {
    fn new(personality: Personality, out: &'s mut Vec<u8>) -> Self {
        let base = out.len();
        out.push(b'/');
        Self {
            personality,
            segment: out.len(),
            out,
            base,
            hides_slash: false,
            has_parameter: false,
            is_ambiguous: false,
        }
    }

    /// Writes `path`; whether applications may read another path in it.
    fn write(mut self, path: &[u8]) -> Result<bool, HeadError> {
        let mut at = 0;
        while let Some(&byte) = path.get(at) {
            at += 1;
            match byte {
                b'/' => self.slash()?,
                b'%' => {
                    self.escape(path, at)?;
                    at += 2;
                }
                b'\\' => self.backslash()?,
                b'#' => return Err(HeadError::Fragment),
                b';' => {
                    self.has_parameter = true;
                    self.out.push(byte);
                }
                _ if is(PATH, byte) => self.out.push(byte),
                _ => push_encoded(byte, self.out),
            }
        }
        self.end_segment(false)?;
        // Looked for in the result: the digits may have been encoded themselves (`%25%34%31`).
        if self.personality == Personality::Iis && is_escaped_twice(&self.out[self.base..]) {
            return Err(HeadError::BadEscape);
        }
        Ok(self.is_ambiguous)
    }

    /// Writes what [`super::Normalized::reading`] makes of the path that lies at `start..end` in the output.
    fn write_reading(mut self, start: usize, end: usize) -> Result<(), HeadError> {
        let mut at = start;
        let mut in_parameter = false;
        while at < end {
            let byte = self.out[at];
            let escaped = &self.out[(at + 1).min(end)..(at + 3).min(end)];
            at += 1;
            match byte {
                b'/' => in_parameter = false,
                b'%' if escaped == b"2F" || escaped == b"5C" => {
                    at += 2;
                    in_parameter = false;
                }
                b'%' if escaped == b"3B" => {
                    at += 2;
                    in_parameter = true;
                    continue;
                }
                b';' => {
                    in_parameter = true;
                    continue;
                }
                _ => {
                    if !in_parameter {
                        self.out.push(byte);
                    }
                    continue;
                }
            }
            self.slash()?;
        }
        self.end_segment(false)
    }

    /// An escape whose digits are at `at`.
    fn escape(&mut self, path: &[u8], at: usize) -> Result<(), HeadError> {
        let byte = decode(path, at).ok_or(HeadError::BadEscape)?;
        match byte {
            0 => return Err(HeadError::EncodedNul),
            b'/' => return self.encoded_slash(),
            b'\\' => return self.backslash(),
            _ if byte.is_ascii_control()
                && matches!(self.personality, Personality::Strict | Personality::Iis) =>
            {
                return Err(HeadError::BadEscape);
            }
            _ if is(UNRESERVED, byte) => self.out.push(byte),
            _ => {
                self.has_parameter |= byte == b';';
                push_encoded(byte, self.out);
            }
        }
        Ok(())
    }

    fn encoded_slash(&mut self) -> Result<(), HeadError> {
        match self.personality {
            Personality::Strict => {
                self.hides_slash = true;
                push_encoded(b'/', self.out);
                Ok(())
            }
            Personality::Apache => Err(HeadError::EncodedSlash),
            Personality::Nginx | Personality::Iis => self.slash(),
        }
    }

    fn backslash(&mut self) -> Result<(), HeadError> {
        if self.personality == Personality::Iis {
            return self.slash();
        }
        self.hides_slash = true;
        push_encoded(b'\\', self.out);
        Ok(())
    }

    fn slash(&mut self) -> Result<(), HeadError> {
        self.end_segment(true)
    }

    /// RFC 3986 §5.2.4 on the segment that ends here.
    fn end_segment(&mut self, with_slash: bool) -> Result<(), HeadError> {
        match &self.out[self.segment..] {
            // The first slash of the path, or one more of a run.
            b"" => {}
            b"." => self.out.truncate(self.segment),
            b".." => {
                self.out.truncate(self.segment);
                self.parent()?;
            }
            segment => {
                let is_ambiguous = self.hides_slash || self.has_parameter;
                if is_ambiguous && self.personality == Personality::Strict && hides_dot_segment(segment) {
                    let refusal =
                        if self.hides_slash { HeadError::EncodedSlash } else { HeadError::DotParameter };
                    return Err(refusal);
                }
                self.is_ambiguous |= is_ambiguous;
                if with_slash {
                    self.out.push(b'/');
                }
            }
        }
        self.segment = self.out.len();
        self.hides_slash = false;
        self.has_parameter = false;
        Ok(())
    }

    fn parent(&mut self) -> Result<(), HeadError> {
        if self.segment == self.base + 1 {
            return match self.personality {
                Personality::Strict | Personality::Iis => Ok(()),
                Personality::Apache | Personality::Nginx => Err(HeadError::AboveRoot),
            };
        }
        let parents = &self.out[self.base..self.segment - 1];
        let slash = parents.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
        self.out.truncate(self.base + slash + 1);
        Ok(())
    }
}

/// Whether decoding `path` would give another escape.
fn is_escaped_twice(path: &[u8]) -> bool {
    path.windows(5).enumerate().any(|(at, bytes)| bytes.starts_with(b"%25") && decode(path, at + 3).is_some())
}

/// Whether a server that decodes slashes or removes parameters would find a dot segment in this one.
fn hides_dot_segment(segment: &[u8]) -> bool {
    // Where a part begins that is only dots so far.
    let mut part = Some(0);
    let mut at = 0;
    while at < segment.len() {
        let rest = &segment[at..];
        let is_slash = rest.starts_with(b"%2F") || rest.starts_with(b"%5C");
        let is_parameter = rest.starts_with(b";") || rest.starts_with(b"%3B");
        if (is_slash || is_parameter) && part.is_some_and(|part| matches!(at - part, 1 | 2)) {
            return true;
        }
        at += if is_slash || rest.starts_with(b"%3B") { 3 } else { 1 };
        part = match rest[0] {
            _ if is_slash => Some(at),
            b'.' => part,
            _ => None,
        };
    }
    part.is_some_and(|part| matches!(at - part, 1 | 2))
}

fn write_query(query: &[u8], personality: Personality, out: &mut Vec<u8>) -> Result<(), HeadError> {
    let mut at = 0;
    while let Some(&byte) = query.get(at) {
        at += 1;
        match byte {
            b'%' => match decode(query, at) {
                Some(0) if personality == Personality::Strict => return Err(HeadError::EncodedNul),
                Some(byte) => {
                    at += 2;
                    if is(UNRESERVED, byte) { out.push(byte) } else { push_encoded(byte, out) }
                }
                None if personality == Personality::Strict => return Err(HeadError::BadEscape),
                // Left as it is, it could form an escape with a byte that is decoded after it (`%%42f`).
                None => push_encoded(b'%', out),
            },
            b'#' => return Err(HeadError::Fragment),
            _ if is(QUERY, byte) => out.push(byte),
            _ => push_encoded(byte, out),
        }
    }
    Ok(())
}

/// The byte whose two hexadecimal digits are at `at`.
fn decode(text: &[u8], at: usize) -> Option<u8> {
    let digit = |i: usize| text.get(i).and_then(|&byte| (byte as char).to_digit(16));
    Some((digit(at)? << 4 | digit(at + 1)?) as u8)
}

fn push_encoded(byte: u8, out: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    out.extend_from_slice(&[b'%', DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
}
