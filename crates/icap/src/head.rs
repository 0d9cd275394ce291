//! The head of an ICAP response as values (RFC 3507 §4.3.3, §4.4.1).

use std::ops::Range;

use crate::{IcapError, Options, SECTIONS_BYTES};

/// Field lines of a head; more are refused.
const FIELDS: usize = 100;

/// The head of a response.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ResponseHead {
    /// The ICAP status, such as 204 (no modifications needed).
    pub status: u16,
    /// Whether the connection may carry another request (RFC 3507 §4.1).
    pub keep_alive: bool,
    /// What is encapsulated; `None`: the head says nothing of it, so that nothing follows.
    pub sections: Option<Sections>,
    /// The state of the service, if the server names it (`ISTag`, RFC 3507 §4.7).
    pub service_tag: Option<Vec<u8>>,
    /// What the server says of the service; of use in a response to OPTIONS.
    pub options: Options,
}

/// Where in an encapsulated message the HTTP heads lie, in bytes from its start.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Sections {
    /// An HTTP request's head.
    pub request: Option<Range<usize>>,
    /// An HTTP response's head.
    pub response: Option<Range<usize>>,
    /// What follows the heads.
    pub body: Body,
    /// Where it begins: the length of all heads.
    pub body_at: usize,
}

/// What follows the encapsulated heads, in the chunked coding.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Body {
    /// `null-body`.
    None,
    /// `req-body`.
    Request,
    /// `res-body`.
    Response,
    /// `opt-body`.
    Options,
}

impl ResponseHead {
    /// Reads a head that is complete, with its empty line.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, IcapError> {
        let mut lines = bytes.split_inclusive(|&byte| byte == b'\n').map(line);
        let (status, version_1_0) = status_line(lines.next().unwrap_or(Err(IcapError::StatusLine))?)?;
        let mut head = Self {
            status,
            keep_alive: version_1_0,
            sections: None,
            service_tag: None,
            options: Options::default(),
        };
        for (index, line) in lines.enumerate() {
            let line = line?;
            if line.is_empty() {
                break;
            }
            let (name, value) = field(line).filter(|_| index < FIELDS).ok_or(IcapError::FieldLine)?;
            if name.eq_ignore_ascii_case(b"encapsulated") {
                // Two of them could be read in two ways.
                if head.sections.replace(Sections::parse(value)?).is_some() {
                    return Err(IcapError::Encapsulated);
                }
            } else if name.eq_ignore_ascii_case(b"connection") {
                head.keep_alive &= !list(value).any(|option| option.eq_ignore_ascii_case(b"close"));
            } else if name.eq_ignore_ascii_case(b"istag") {
                head.service_tag = Some(value.to_vec());
            } else {
                head.options.field(name, value);
            }
        }
        Ok(head)
    }
}

impl Sections {
    /// `req-hdr=0, res-hdr=137, res-body=296` (RFC 3507 §4.4.1).
    fn parse(value: &[u8]) -> Result<Self, IcapError> {
        let mut starts: Vec<(&[u8], usize)> = Vec::with_capacity(3);
        for part in list(value) {
            let equals = part.iter().position(|&byte| byte == b'=').ok_or(IcapError::Encapsulated)?;
            let (name, offset) = (&part[..equals], &part[equals + 1..]);
            let at = decimal(offset).ok_or(IcapError::Encapsulated)?;
            if at > SECTIONS_BYTES as u64 {
                return Err(IcapError::SectionsTooLarge);
            }
            if starts.len() == 3 {
                return Err(IcapError::Encapsulated);
            }
            starts.push((name, at as usize));
        }
        let in_order = starts.windows(2).all(|pair| pair[0].1 < pair[1].1);
        let from_zero = starts.first().is_some_and(|(_, at)| *at == 0);
        let Some(((last, body_at), heads)) = starts.split_last().filter(|_| in_order && from_zero) else {
            return Err(IcapError::Encapsulated);
        };
        let body = body_of(last).ok_or(IcapError::Encapsulated)?;
        let mut sections = Self { request: None, response: None, body, body_at: *body_at };
        for (index, (name, start)) in heads.iter().enumerate() {
            let end = starts.get(index + 1).map_or(*body_at, |(_, next)| *next);
            if name.eq_ignore_ascii_case(b"req-hdr") && index == 0 {
                sections.request = Some(*start..end);
            } else if name.eq_ignore_ascii_case(b"res-hdr") {
                if sections.response.replace(*start..end).is_some() {
                    return Err(IcapError::Encapsulated);
                }
            } else {
                return Err(IcapError::Encapsulated);
            }
        }
        Ok(sections)
    }
}

fn body_of(name: &[u8]) -> Option<Body> {
    [
        (&b"null-body"[..], Body::None),
        (b"req-body", Body::Request),
        (b"res-body", Body::Response),
        (b"opt-body", Body::Options),
    ]
    .into_iter()
    .find_map(|(known, body)| name.eq_ignore_ascii_case(known).then_some(body))
}

/// A line without its end, which must be CR LF; no other control bytes but tabs.
fn line(line: &[u8]) -> Result<&[u8], IcapError> {
    let line = line.strip_suffix(b"\r\n").ok_or(IcapError::FieldLine)?;
    let is_control = |&byte: &u8| (byte < b' ' && byte != b'\t') || byte == 0x7f;
    if line.iter().any(is_control) { Err(IcapError::FieldLine) } else { Ok(line) }
}

/// The status, and whether it is the version whose connections are kept.
fn status_line(line: &[u8]) -> Result<(u16, bool), IcapError> {
    let rest = line.strip_prefix(b"ICAP/1.").ok_or(IcapError::StatusLine)?;
    let [minor @ b'0'..=b'9', b' ', a @ b'1'..=b'5', b @ b'0'..=b'9', c @ b'0'..=b'9', rest @ ..] = rest
    else {
        return Err(IcapError::StatusLine);
    };
    if !matches!(rest, [] | [b' ', ..]) {
        return Err(IcapError::StatusLine);
    }
    let digit = |byte: &u8| u16::from(byte - b'0');
    Ok((digit(a) * 100 + digit(b) * 10 + digit(c), *minor == b'0'))
}

/// Name and value; RFC 9112 §5.1: nothing between name and colon, and no line that goes on in the next.
fn field(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = line.iter().position(|&byte| byte == b':')?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    let is_token = |&byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (!name.is_empty() && name.iter().all(is_token)).then_some((name, value.trim_ascii()))
}

/// The parts of a comma-separated list that are not empty.
pub(crate) fn list(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|part| !part.is_empty())
}

/// A number of at most nine digits.
pub(crate) fn decimal(digits: &[u8]) -> Option<u64> {
    let fits = (1..=9).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
    fits.then(|| digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0')))
}
