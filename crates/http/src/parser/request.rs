use super::framing::{self, ConnectionSays};
use super::{FieldLines, HeadLimits, Progress};
use crate::error::HeadError;
use crate::field::{Field, FieldId, Fields, Span};
use crate::forward::upgrade_protocols;
use crate::head::{BodyFraming, Method, RequestHead, Version};
use crate::machine::MACHINE;
use crate::simd::{self, Scan, Task};

/// RFC 9112 §2.2 asks for robustness against "at least one" empty line before the request line.
const EMPTY_LINES_SKIPPED: u8 = 4;

/// Where in the head the parser stopped.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum At {
    #[default]
    Start,
    Method,
    Target,
    Version,
    Fields,
    Complete,
}

/// Parses one request head after another; see the [module documentation](crate) for how bytes are given to it.
///
/// After an error, or before the next head, call [`RequestParser::reset`]. No call allocates once the list of fields
/// has reached its greatest length.
#[derive(Debug)]
pub struct RequestParser {
    limits: HeadLimits,
    at: At,
    empty_lines: u8,
    lines: FieldLines,
    /// First byte of the request line, then of the token that is being read.
    line: usize,
    token: usize,
    facts: Facts,
}

/// What a head says beside its fields.
#[derive(Clone, Copy, Debug)]
struct Facts {
    method: Method,
    method_span: Span,
    target: Span,
    version: Version,
    framing: BodyFraming,
    keep_alive: bool,
    expect_continue: bool,
    upgrade: bool,
}

/// What [`RequestParser::parsed`] keeps of a head: as much as the head needs, and apart from the parser, which may go
/// on with other heads.
#[derive(Clone, Debug)]
pub struct ParsedRequest {
    facts: Facts,
    fields: Box<[Field]>,
    present: u128,
}

impl RequestParser {
    /// A parser that refuses heads beyond `limits`.
    pub fn new(limits: HeadLimits) -> Self {
        Self {
            limits,
            at: At::Start,
            empty_lines: 0,
            lines: FieldLines::for_head(),
            line: 0,
            token: 0,
            facts: Facts {
                method: Method::Other,
                method_span: Span::default(),
                target: Span::default(),
                version: Version::Http11,
                framing: BodyFraming::None,
                keep_alive: false,
                expect_continue: false,
                upgrade: false,
            },
        }
    }

    /// Makes ready for the first byte of another head.
    pub fn reset(&mut self) {
        self.at = At::Start;
        self.empty_lines = 0;
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
        let head = &buffer[..buffer.len().min(self.limits.head_bytes as usize)];
        if self.at != At::Fields && !self.whole_line(scan, head) && !self.parse_line(scan, head)? {
            return self.incomplete(head);
        }
        if !self.lines.parse(scan, head, self.limits.fields)? {
            return self.incomplete(head);
        }
        self.conclude(head)?;
        self.at = At::Complete;
        Ok(Progress::Complete { length: self.lines.position })
    }

    /// The fast path: a request line that is complete and within the limit, and nothing about it is unusual. What stops
    /// it is left as if untouched.
    #[inline(always)]
    fn whole_line<S: Scan>(&mut self, scan: S, head: &[u8]) -> bool {
        let start = self.lines.position;
        if self.at != At::Start {
            return false;
        }
        let Some((method, target)) = MACHINE.method(head, start) else { return false };
        let target_end = scan.target_end(head, target);
        if head.get(target_end) != Some(&b' ') || target_end == target {
            return false;
        }
        let Some((version, end)) = MACHINE.version(head, target_end + 1) else { return false };
        if end - start > self.limits.request_line_bytes as usize {
            return false;
        }
        self.facts.method = method;
        self.facts.method_span = Span { start: start as u32, length: (target - 1 - start) as u32 };
        self.facts.target = Span { start: target as u32, length: (target_end - target) as u32 };
        self.facts.version = version;
        self.lines.position = end;
        self.at = At::Fields;
        true
    }

    fn incomplete(&self, head: &[u8]) -> Result<Progress, HeadError> {
        if head.len() >= self.limits.head_bytes as usize {
            return Err(HeadError::HeadTooLarge { limit: self.limits.head_bytes });
        }
        Ok(Progress::Incomplete)
    }

    /// The slow path: the request line from wherever the last call stopped; true when it is complete.
    #[inline(always)]
    fn parse_line<S: Scan>(&mut self, scan: S, head: &[u8]) -> Result<bool, HeadError> {
        if self.at == At::Start && !self.skip_empty_lines(head)? {
            return Ok(false);
        }
        let limit = self.limits.request_line_bytes;
        let line = &head[..head.len().min(self.line + limit as usize)];
        let complete = self.parse_line_within(scan, line)?;
        if !complete && line.len() == self.line + limit as usize {
            return Err(HeadError::RequestLineTooLong { limit });
        }
        Ok(complete)
    }

    fn skip_empty_lines(&mut self, head: &[u8]) -> Result<bool, HeadError> {
        loop {
            match head[self.lines.position.min(head.len())..] {
                [] | [b'\r'] => return Ok(false),
                [b'\r', b'\n', ..] => {
                    if self.empty_lines == EMPTY_LINES_SKIPPED {
                        return Err(HeadError::TooManyEmptyLines);
                    }
                    self.empty_lines += 1;
                    self.lines.position += 2;
                }
                [b'\r', ..] => return Err(HeadError::BareCarriageReturn),
                [b'\n', ..] => return Err(HeadError::BareLineFeed),
                _ => {
                    self.line = self.lines.position;
                    self.token = self.line;
                    self.at = At::Method;
                    return Ok(true);
                }
            }
        }
    }

    #[inline(always)]
    fn parse_line_within<S: Scan>(&mut self, scan: S, line: &[u8]) -> Result<bool, HeadError> {
        loop {
            match self.at {
                At::Method => {
                    self.lines.position = scan.token_end(line, self.lines.position);
                    match line.get(self.lines.position) {
                        None => return Ok(false),
                        Some(b' ') if self.lines.position > self.token => {}
                        Some(_) => return Err(HeadError::BadMethod),
                    }
                    self.facts.method_span = self.take();
                    self.facts.method = Method::from_bytes(self.facts.method_span.of(line));
                    self.at = At::Target;
                }
                At::Target => {
                    self.lines.position = scan.target_end(line, self.lines.position);
                    match line.get(self.lines.position) {
                        None => return Ok(false),
                        Some(b' ') if self.lines.position > self.token => {}
                        Some(b'\r') if self.lines.position > self.token => return Err(HeadError::BadVersion),
                        Some(b'\n') => return Err(HeadError::BareLineFeed),
                        Some(_) => return Err(HeadError::BadTarget),
                    }
                    self.facts.target = self.take();
                    self.at = At::Version;
                }
                At::Version => {
                    let rest = line.get(self.lines.position..).unwrap_or(b"");
                    let Some(version) = version(rest)? else { return Ok(false) };
                    match rest[8..] {
                        [] | [b'\r'] => return Ok(false),
                        [b'\r', b'\n', ..] => {}
                        [b'\r', ..] => return Err(HeadError::BareCarriageReturn),
                        [b'\n', ..] => return Err(HeadError::BareLineFeed),
                        _ => return Err(HeadError::BadVersion),
                    }
                    self.facts.version = version;
                    self.lines.position += 10;
                    self.at = At::Fields;
                    return Ok(true);
                }
                At::Start | At::Fields | At::Complete => return Ok(true),
            }
        }
    }

    /// Ends the token that is being read at the current position, which holds a space.
    fn take(&mut self) -> Span {
        let end = self.lines.position;
        let span = Span { start: self.token as u32, length: (end - self.token) as u32 };
        self.lines.position = end + 1;
        self.token = end + 1;
        span
    }

    /// What can be said only when all fields are known.
    fn conclude(&mut self, head: &[u8]) -> Result<(), HeadError> {
        let lines = &self.lines;
        let fields = Fields::new(head, lines.fields(), lines.present());
        if lines.repeated() & (1 << FieldId::Host as u8) != 0 {
            return Err(HeadError::RepeatedHost);
        }
        let facts = &mut self.facts;
        let http11 = facts.version == Version::Http11;
        if http11 && !fields.has(FieldId::Host) {
            return Err(HeadError::MissingHost);
        }
        // RFC 9112 §6.3: a request without a stated framing has no body.
        facts.framing =
            framing::stated(facts.version, &fields, lines.repeated())?.unwrap_or(BodyFraming::None);
        let says = ConnectionSays::of(&fields)?;
        facts.keep_alive = says.persists(facts.version);
        facts.upgrade = http11 && says.upgrade && upgrade_protocols(&fields).next().is_some();
        facts.expect_continue = http11
            && !matches!(facts.framing, BodyFraming::None | BodyFraming::Length(0))
            && fields.lists(FieldId::Expect, b"100-continue");
        Ok(())
    }

    /// The head after [`Progress::Complete`], given the same bytes. Before that its contents mean nothing.
    #[inline]
    pub fn head<'a>(&'a self, buffer: &'a [u8]) -> RequestHead<'a> {
        self.facts.head(buffer, Fields::new(buffer, self.lines.fields(), self.lines.present()))
    }

    /// What [`Self::head`] needs, to be kept while the parser goes on with other heads.
    pub fn parsed(&self) -> ParsedRequest {
        ParsedRequest { facts: self.facts, fields: self.lines.fields().into(), present: self.lines.present() }
    }
}

impl ParsedRequest {
    /// The head, given the bytes it was parsed from.
    pub fn head<'a>(&'a self, buffer: &'a [u8]) -> RequestHead<'a> {
        self.facts.head(buffer, Fields::new(buffer, &self.fields, self.present))
    }
}

impl Facts {
    #[inline]
    fn head<'a>(&self, buffer: &'a [u8], fields: Fields<'a>) -> RequestHead<'a> {
        RequestHead {
            method: self.method,
            method_bytes: self.method_span.of(buffer),
            target: self.target.of(buffer),
            version: self.version,
            fields,
            framing: self.framing,
            keep_alive: self.keep_alive,
            expect_continue: self.expect_continue,
            upgrade: self.upgrade,
        }
    }
}

/// One call of [`RequestParser::parse`].
struct Parse<'p> {
    parser: &'p mut RequestParser,
    buffer: &'p [u8],
}

impl Task for Parse<'_> {
    type Output = Result<Progress, HeadError>;

    #[inline(always)]
    fn run<S: Scan>(self, scan: S) -> Self::Output {
        self.parser.parse_with(scan, self.buffer)
    }
}

impl Method {
    /// The method that these bytes name; methods are case-sensitive (RFC 9110 §9.1).
    pub fn from_bytes(bytes: &[u8]) -> Self {
        match bytes {
            b"GET" => Self::Get,
            b"HEAD" => Self::Head,
            b"POST" => Self::Post,
            b"PUT" => Self::Put,
            b"DELETE" => Self::Delete,
            b"CONNECT" => Self::Connect,
            b"OPTIONS" => Self::Options,
            b"TRACE" => Self::Trace,
            b"PATCH" => Self::Patch,
            b"PURGE" => Self::Purge,
            b"QUERY" => Self::Query,
            _ => Self::Other,
        }
    }
}

/// The version that `rest` starts with, byte by byte so that every split gives the same answer. A higher minor version
/// is read as HTTP/1.1 (RFC 9110 §2.5): what it adds may be ignored.
pub(super) fn version(rest: &[u8]) -> Result<Option<Version>, HeadError> {
    for (i, &byte) in rest.iter().take(8).enumerate() {
        let expected = b"HTTP/1.1"[i];
        match i {
            5 if byte.is_ascii_digit() && byte != b'1' => return Err(HeadError::UnsupportedVersion),
            7 if byte.is_ascii_digit() => {}
            _ if byte != expected => return Err(HeadError::BadVersion),
            _ => {}
        }
    }
    Ok(rest.get(7).map(|&minor| if minor == b'0' { Version::Http10 } else { Version::Http11 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One head by one instruction set, as text.
    struct Describe<'b>(&'b [u8]);

    impl Task for Describe<'_> {
        type Output = String;

        #[inline(always)]
        fn run<S: Scan>(self, scan: S) -> String {
            let mut parser = RequestParser::new(HeadLimits::default());
            let result = parser.parse_with(scan, self.0);
            format!("{result:?} {:?}", parser.head(self.0).fields.iter().collect::<Vec<_>>())
        }
    }

    #[test]
    fn every_instruction_set_reads_a_head_the_same() {
        let head = "GET /some/path?with=query HTTP/1.1\r\nHost: www.example.com\r\nUser-Agent: Mozilla/5.0 (X11; Linux)\r\n\
            X-Something-That-Nobody-Knows-And-That-Is-Long: a\tb\r\nAccept-Encoding: gzip, deflate\r\n\r\n";
        for at in 0..head.len() {
            for byte in [b'a', b':', b' ', b'\r', b'\n', 0, 0x80] {
                let mut changed = head.as_bytes().to_vec().into_boxed_slice();
                changed[at] = byte;
                let heads = simd::run_with_each(|| Describe(&changed));
                assert!(heads.iter().all(|other| *other == heads[0]), "byte {byte} at {at}: {heads:#?}");
            }
        }
    }
}
