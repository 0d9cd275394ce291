use super::framing::{self, ConnectionSays};
use super::request::version;
use super::{FieldLines, HeadLimits, Progress};
use crate::error::HeadError;
use crate::field::{Field, Fields, Span};
use crate::head::{BodyFraming, Method, ResponseHead, Version};
use crate::machine::MACHINE;
use crate::simd::{self, Scan, Task};

/// Where in the head the parser stopped.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum At {
    #[default]
    Status,
    Reason,
    Fields,
    Complete,
}

/// Parses one response head after another, as strictly as requests; every error is answered 502.
///
/// [`ResponseParser::reset`] must be told the method of the request that the head answers: RFC 9112 §6.3 makes the
/// framing of the body depend on it. A final head after a 1xx one needs another `reset` with the same method.
#[derive(Debug)]
pub struct ResponseParser {
    limits: HeadLimits,
    at: At,
    lines: FieldLines,
    request_method: Method,
    facts: Facts,
}

/// What a head says beside its fields.
#[derive(Clone, Copy, Debug)]
struct Facts {
    status: u16,
    reason: Span,
    version: Version,
    framing: BodyFraming,
    keep_alive: bool,
}

/// What [`ResponseParser::parsed`] keeps of a head: as much as the head needs, and apart from the parser, which may go
/// on with other heads.
#[derive(Clone, Debug)]
pub struct ParsedResponse {
    facts: Facts,
    fields: Box<[Field]>,
    present: u128,
}

impl ResponseParser {
    /// A parser that refuses heads beyond `limits`, ready for an answer to `GET`.
    pub fn new(limits: HeadLimits) -> Self {
        Self {
            limits,
            at: At::Status,
            lines: FieldLines::for_head(),
            request_method: Method::Get,
            facts: Facts {
                status: 0,
                reason: Span::default(),
                version: Version::Http11,
                framing: BodyFraming::None,
                keep_alive: false,
            },
        }
    }

    /// A parser for a proxy that writes heads anew, which has to leave out whitespace before a colon (RFC 9112 §5.1). Who
    /// hands heads on as they came must not accept it: the next hop may see other fields.
    pub fn for_proxy(limits: HeadLimits) -> Self {
        Self { lines: FieldLines::without_blanks(), ..Self::new(limits) }
    }

    /// Makes ready for the first byte of an answer to a request with this method.
    pub fn reset(&mut self, request_method: Method) {
        self.request_method = request_method;
        self.at = At::Status;
        self.lines.reset();
    }

    /// Goes on with `buffer`, which starts at the first byte of the head and has grown since the last call.
    ///
    /// # Errors
    /// The head is malformed or exceeds a limit: the same error however the bytes were split.
    pub fn parse(&mut self, buffer: &[u8]) -> Result<Progress, HeadError> {
        simd::run(Parse { parser: self, buffer })
    }

    #[inline(always)]
    fn parse_with<S: Scan>(&mut self, scan: S, buffer: &[u8]) -> Result<Progress, HeadError> {
        if self.at == At::Complete {
            return Ok(Progress::Complete { length: self.lines.position });
        }
        let limit = self.limits.head_bytes;
        let head = &buffer[..buffer.len().min(limit as usize)];
        if !self.parse_line(scan, head)? || !self.lines.parse(scan, head, self.limits.fields)? {
            if head.len() >= limit as usize {
                return Err(HeadError::HeadTooLarge { limit });
            }
            return Ok(Progress::Incomplete);
        }
        self.conclude(head)?;
        self.at = At::Complete;
        Ok(Progress::Complete { length: self.lines.position })
    }

    /// The status line; true when it is complete.
    #[inline(always)]
    fn parse_line<S: Scan>(&mut self, scan: S, head: &[u8]) -> Result<bool, HeadError> {
        let limit = self.limits.request_line_bytes;
        let line = &head[..head.len().min(limit as usize)];
        if self.at == At::Status && !self.parse_status(line)?
            || self.at == At::Reason && !self.parse_reason(scan, line)?
        {
            if line.len() >= limit as usize {
                return Err(HeadError::RequestLineTooLong { limit });
            }
            return Ok(false);
        }
        Ok(true)
    }

    /// `HTTP/1.1 200`, then a space or, where the reason is missing altogether, the end of the line.
    fn parse_status(&mut self, line: &[u8]) -> Result<bool, HeadError> {
        if let Some((version, status, end)) = MACHINE.status_line(line) {
            self.begin_reason(version, status, end);
            return Ok(true);
        }
        let Some(version) = version(line)? else { return Ok(false) };
        let mut status = 0;
        for (i, &byte) in line[8..].iter().take(4).enumerate() {
            match i {
                0 if byte == b' ' => {}
                0 => return Err(HeadError::BadVersion),
                1 if byte == b'0' => return Err(HeadError::BadStatus),
                _ if byte.is_ascii_digit() => status = status * 10 + u16::from(byte - b'0'),
                _ => return Err(HeadError::BadStatus),
            }
        }
        match line.get(12) {
            None => return Ok(false),
            Some(b' ') => self.begin_reason(version, status, 13),
            Some(b'\r') => self.begin_reason(version, status, 12),
            Some(b'\n') => return Err(HeadError::BareLineFeed),
            Some(_) => return Err(HeadError::BadStatus),
        }
        Ok(true)
    }

    fn begin_reason(&mut self, version: Version, status: u16, reason: usize) {
        self.facts.version = version;
        self.facts.status = status;
        self.lines.position = reason;
        self.facts.reason.start = reason as u32;
        self.at = At::Reason;
    }

    #[inline(always)]
    fn parse_reason<S: Scan>(&mut self, scan: S, line: &[u8]) -> Result<bool, HeadError> {
        self.lines.position = scan.value_end(line, self.lines.position);
        match line[self.lines.position..] {
            [] | [b'\r'] => return Ok(false),
            [b'\r', b'\n', ..] => {}
            [b'\r', ..] => return Err(HeadError::BareCarriageReturn),
            [b'\n', ..] => return Err(HeadError::BareLineFeed),
            _ => return Err(HeadError::ControlByte),
        }
        self.facts.reason.length = self.lines.position as u32 - self.facts.reason.start;
        self.lines.position += 2;
        self.at = At::Fields;
        Ok(true)
    }

    /// What can be said only when all fields are known.
    fn conclude(&mut self, head: &[u8]) -> Result<(), HeadError> {
        let fields = Fields::new(head, self.lines.fields(), self.lines.present());
        let facts = &mut self.facts;
        let stated = framing::stated(facts.version, &fields, self.lines.repeated())?;
        let (framing, reusable) = framing::of_response(facts.status, self.request_method, stated)?;
        facts.framing = framing;
        facts.keep_alive = reusable && ConnectionSays::of(&fields)?.persists(facts.version);
        Ok(())
    }

    /// The head after [`Progress::Complete`], given the same bytes. Before that its contents mean nothing.
    pub fn head<'a>(&'a self, buffer: &'a [u8]) -> ResponseHead<'a> {
        self.facts.head(buffer, Fields::new(buffer, self.lines.fields(), self.lines.present()))
    }

    /// What [`Self::head`] needs, to be kept while the parser goes on with other heads.
    pub fn parsed(&self) -> ParsedResponse {
        ParsedResponse {
            facts: self.facts,
            fields: self.lines.fields().into(),
            present: self.lines.present(),
        }
    }
}

impl ParsedResponse {
    /// The head, given the bytes it was parsed from.
    pub fn head<'a>(&'a self, buffer: &'a [u8]) -> ResponseHead<'a> {
        self.facts.head(buffer, Fields::new(buffer, &self.fields, self.present))
    }

    /// The same, of a response that was received by another version than its head is written in.
    #[must_use]
    pub fn received_by(mut self, version: Version) -> Self {
        self.facts.version = version;
        self
    }
}

impl Facts {
    fn head<'a>(&self, buffer: &'a [u8], fields: Fields<'a>) -> ResponseHead<'a> {
        ResponseHead {
            status: self.status,
            reason: self.reason.of(buffer),
            version: self.version,
            fields,
            framing: self.framing,
            keep_alive: self.keep_alive,
        }
    }
}

/// One call of [`ResponseParser::parse`].
struct Parse<'p> {
    parser: &'p mut ResponseParser,
    buffer: &'p [u8],
}

impl Task for Parse<'_> {
    type Output = Result<Progress, HeadError>;

    #[inline(always)]
    fn run<S: Scan>(self, scan: S) -> Self::Output {
        self.parser.parse_with(scan, self.buffer)
    }
}
