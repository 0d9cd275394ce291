//! HTTP/1 messages as the tests see them: read byte by byte, nothing assumed, nothing repaired.

use std::fmt;
use std::io::{self, BufRead, Error, ErrorKind, Read};

/// Field lines in the order they came.
#[derive(Clone, Default, Eq, PartialEq)]
pub struct Fields(pub Vec<(String, String)>);

impl Fields {
    /// The values of a field, joined by commas (RFC 9110 §5.3); `None` when it is absent.
    pub fn get(&self, name: &str) -> Option<String> {
        let values = self.all(name);
        (!values.is_empty()).then(|| values.join(", "))
    }

    /// Every value of a field.
    pub fn all(&self, name: &str) -> Vec<String> {
        self.0.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.clone()).collect()
    }

    /// Reads lines up to the empty one.
    pub(crate) fn read(input: &mut impl BufRead) -> io::Result<Self> {
        let mut fields = Vec::new();
        loop {
            let line = read_line(input)?;
            if line.is_empty() {
                return Ok(Self(fields));
            }
            let (name, value) =
                line.split_once(':').ok_or_else(|| invalid(format!("not a field line: {line:?}")))?;
            fields.push((name.to_owned(), value.trim_matches([' ', '\t']).to_owned()));
        }
    }
}

impl fmt::Debug for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.iter().map(|(name, value)| (name, value))).finish()
    }
}

/// A response as a client got it.
#[derive(Clone)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// The head's fields.
    pub fields: Fields,
    /// The content, without any transfer coding.
    pub body: Vec<u8>,
    /// What followed the last chunk.
    pub trailers: Fields,
}

impl Response {
    /// A field's value, or an empty string.
    pub fn field(&self, name: &str) -> String {
        self.fields.get(name).unwrap_or_default()
    }

    /// The content as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Whether it came from the cache without asking the origin, by `Cache-Status` (RFC 9211 §2.1).
    pub fn is_hit(&self) -> bool {
        self.field("Cache-Status").split(';').skip(1).any(|part| part.trim() == "hit")
    }
}

impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start: String = String::from_utf8_lossy(&self.body).chars().take(120).collect();
        write!(f, "{} {:?} {} bytes: {start:?}", self.status, self.fields, self.body.len())
    }
}

pub(crate) fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

/// A line ended by CRLF, without it.
pub(crate) fn read_line(input: &mut impl BufRead) -> io::Result<String> {
    let mut line = Vec::new();
    input.take(1 << 20).read_until(b'\n', &mut line)?;
    match line.strip_suffix(b"\r\n") {
        Some(line) => Ok(line.iter().map(|&byte| char::from(byte)).collect()),
        None if line.is_empty() => Err(ErrorKind::UnexpectedEof.into()),
        None => Err(invalid(format!("line not ended by CRLF: {:?}", String::from_utf8_lossy(&line)))),
    }
}

/// A chunked body and its trailers.
pub(crate) fn read_chunked(input: &mut impl BufRead, body: &mut Vec<u8>) -> io::Result<Fields> {
    loop {
        let line = read_line(input)?;
        let size = u64::from_str_radix(line.split(';').next().unwrap_or_default(), 16)
            .map_err(|_| invalid(format!("chunk size {line:?}")))?;
        if size == 0 {
            return Fields::read(input);
        }
        read_exactly(input, size, body)?;
        if !read_line(input)?.is_empty() {
            return Err(invalid("bytes after a chunk".to_owned()));
        }
    }
}

/// `count` more bytes.
pub(crate) fn read_exactly(input: &mut impl BufRead, count: u64, body: &mut Vec<u8>) -> io::Result<()> {
    if input.take(count).read_to_end(body)? as u64 == count {
        Ok(())
    } else {
        Err(ErrorKind::UnexpectedEof.into())
    }
}
