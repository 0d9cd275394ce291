//! The chunked transfer coding (RFC 9112 §7.1).

use std::ops::Range;

use crate::chars::is_value;
use crate::error::{BodyError, HeadError};
use crate::field::{FieldId, Fields};
use crate::forward::{ConnectionOptions, is_deceptive};
use crate::parser::FieldLines;
use crate::simd::{self, Scan, Task};

/// Of what the length of chunk extensions is bounded.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ExtensionScope {
    /// All chunks of a body together: for bodies of strangers, who could send little else (RFC 9112 §7.1.1).
    Body,
    /// Each chunk: for bodies without end of servers that sign or number every chunk. What is passed over is never
    /// kept.
    Chunk,
}

/// Bounds of what a chunked body may hold beside its data.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ChunkLimits {
    /// Greatest length of chunk extensions, in bytes.
    pub extension_bytes: u32,
    /// What has so many of them at most.
    pub extension_scope: ExtensionScope,
    /// Greatest length of the trailer section with its final CRLF, in bytes.
    pub trailer_bytes: u32,
    /// Greatest number of trailer fields.
    pub trailer_fields: u16,
}

impl Default for ChunkLimits {
    /// For requests.
    fn default() -> Self {
        Self {
            extension_bytes: 4 * 1024,
            extension_scope: ExtensionScope::Body,
            trailer_bytes: 16 * 1024,
            trailer_fields: 100,
        }
    }
}

impl ChunkLimits {
    /// For responses of servers that were chosen: a long one has many chunks, and is not cut off for what it has beside
    /// each.
    pub fn of_responses() -> Self {
        Self { extension_scope: ExtensionScope::Chunk, ..Self::default() }
    }
}

/// What one call of [`ChunkedDecoder::decode`] found.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Decoded {
    /// Bytes of the input that are dealt with, data included.
    pub consumed: usize,
    /// Where in the input the data lies; empty if there was none.
    pub data: Range<usize>,
    /// The body is complete, trailers included; what follows `consumed` belongs to the next message.
    pub done: bool,
}

/// Where in the coding the decoder stopped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum At {
    Size,
    Extension,
    SizeLineFeed,
    Data,
    DataReturn,
    DataLineFeed,
    Trailer,
    Done,
}

/// Decodes one chunked body without copying its data.
///
/// ```
/// use tidegate_http::{ChunkLimits, ChunkedDecoder};
/// let mut decoder = ChunkedDecoder::new(ChunkLimits::default());
/// let mut input: &[u8] = b"5\r\nhello\r\n0\r\n\r\n";
/// let mut body = Vec::new();
/// loop {
///     let decoded = decoder.decode(input)?;
///     body.extend_from_slice(&input[decoded.data]);
///     input = &input[decoded.consumed..];
///     if decoded.done || input.is_empty() {
///         break;
///     }
/// }
/// assert_eq!(body, b"hello");
/// # Ok::<(), tidegate_http::BodyError>(())
/// ```
#[derive(Debug)]
pub struct ChunkedDecoder {
    limits: ChunkLimits,
    at: At,
    /// Bytes of data that the current chunk still has.
    remaining: u64,
    digits: u8,
    /// Of the chunks that count together.
    extension_bytes: u32,
    /// The trailer section as received: the one part that is kept, because its bytes may come in many pieces.
    trailer: Vec<u8>,
    lines: FieldLines,
}

impl ChunkedDecoder {
    /// A decoder for one body.
    pub fn new(limits: ChunkLimits) -> Self {
        Self {
            limits,
            at: At::Size,
            remaining: 0,
            digits: 0,
            extension_bytes: 0,
            trailer: Vec::new(),
            lines: FieldLines::default(),
        }
    }

    /// Makes ready for the first byte of another body.
    pub fn reset(&mut self) {
        self.at = At::Size;
        self.remaining = 0;
        self.digits = 0;
        self.extension_bytes = 0;
        self.trailer.clear();
        self.lines.reset();
    }

    /// Decodes from the start of `input`, up to the end of the first run of data in it. Call again with the rest of
    /// the input after `consumed` while there is one; an empty input is fine and yields nothing.
    ///
    /// # Errors
    /// The coding is malformed or exceeds a limit; the decoder must not be used again before [`Self::reset`].
    pub fn decode(&mut self, input: &[u8]) -> Result<Decoded, BodyError> {
        let mut at = 0;
        while let Some(&byte) = input.get(at) {
            match self.at {
                At::Data => {
                    let available = (input.len() - at) as u64;
                    let length = available.min(self.remaining);
                    self.remaining -= length;
                    if self.remaining == 0 {
                        self.at = At::DataReturn;
                    }
                    let end = at + length as usize;
                    return Ok(Decoded { consumed: end, data: at..end, done: false });
                }
                At::Trailer => {
                    let (consumed, done) = self.trailer(&input[at..])?;
                    at += consumed;
                    return Ok(Decoded { consumed: at, data: at..at, done });
                }
                At::Done => break,
                _ => self.framing_byte(byte)?,
            }
            at += 1;
        }
        Ok(Decoded { consumed: at, data: at..at, done: self.at == At::Done })
    }

    /// One byte outside data and trailers. Whitespace that RFC 9112 §7.1.1 calls "bad" is refused.
    fn framing_byte(&mut self, byte: u8) -> Result<(), BodyError> {
        self.at = match (self.at, byte) {
            (At::Size, _) => match (byte as char).to_digit(16) {
                // Sixteen digits fill 64 bits: more can only be an attempt to overflow.
                Some(digit) if self.digits < 16 => {
                    self.digits += 1;
                    self.remaining = self.remaining << 4 | u64::from(digit);
                    At::Size
                }
                None if self.digits > 0 => return self.after_size(byte),
                _ => return Err(BodyError::BadChunkSize),
            },
            (At::Extension, b'\r') => At::SizeLineFeed,
            (At::Extension, b'\n') => return Err(BodyError::MissingLineEnd),
            (At::Extension, _) if is_value(byte) => {
                self.extension_bytes += 1;
                if self.extension_bytes > self.limits.extension_bytes {
                    return Err(BodyError::ExtensionsTooLarge { limit: self.limits.extension_bytes });
                }
                At::Extension
            }
            (At::Extension, _) => return Err(BodyError::BadChunkExtension),
            (At::SizeLineFeed, b'\n') if self.remaining == 0 => At::Trailer,
            (At::SizeLineFeed, b'\n') => At::Data,
            (At::DataReturn, b'\r') => At::DataLineFeed,
            (At::DataLineFeed, b'\n') => {
                self.digits = 0;
                if self.limits.extension_scope == ExtensionScope::Chunk {
                    self.extension_bytes = 0;
                }
                At::Size
            }
            _ => return Err(BodyError::MissingLineEnd),
        };
        Ok(())
    }

    fn after_size(&mut self, byte: u8) -> Result<(), BodyError> {
        self.at = match byte {
            b'\r' => At::SizeLineFeed,
            b';' => At::Extension,
            b'\n' => return Err(BodyError::MissingLineEnd),
            _ => return Err(BodyError::BadChunkSize),
        };
        Ok(())
    }

    /// Takes trailer bytes; returns how many, and whether the section is complete.
    fn trailer(&mut self, input: &[u8]) -> Result<(usize, bool), BodyError> {
        let limit = self.limits.trailer_bytes;
        // Almost every body ends without trailers.
        if self.trailer.is_empty() && input.starts_with(b"\r\n") {
            self.at = At::Done;
            return Ok((2, true));
        }
        let before = self.trailer.len();
        let taken = input.len().min((limit as usize).saturating_sub(before));
        self.trailer.extend_from_slice(&input[..taken]);
        let fields = self.limits.trailer_fields;
        let section = TrailerSection { lines: &mut self.lines, bytes: &self.trailer, fields };
        if simd::run(section).map_err(BodyError::BadTrailer)? {
            let consumed = self.lines.position - before;
            self.trailer.truncate(self.lines.position);
            self.at = At::Done;
            return Ok((consumed, true));
        }
        if self.trailer.len() >= limit as usize {
            return Err(BodyError::BadTrailer(HeadError::HeadTooLarge { limit }));
        }
        Ok((taken, false))
    }

    /// Passes over what the current chunk still has of data, which need not be seen. Returns how many bytes that is.
    pub fn pass_data(&mut self) -> u64 {
        if self.at != At::Data {
            return 0;
        }
        self.at = At::DataReturn;
        std::mem::take(&mut self.remaining)
    }

    /// Whether the body is complete.
    pub fn is_done(&self) -> bool {
        self.at == At::Done
    }

    /// The trailer fields once the body is complete, without those that RFC 9110 §6.5.1 forbids there: fields for
    /// framing, routing, authentication and the like must not be merged into the head. Nor are names passed on that
    /// some server may take for one of those, or that `Connection` names among the fields of the `head` (§7.6.1).
    pub fn trailers<'a>(&'a self, head: Fields<'a>) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let fields = if self.is_done() { self.lines.fields() } else { &[] };
        let options = ConnectionOptions::of(head);
        fields
            .iter()
            .map(|field| (field.id, field.name.of(&self.trailer), field.value.of(&self.trailer)))
            .filter(move |(id, name, _)| {
                !(forbidden_in_trailers(*id)
                    || *id == FieldId::Other && is_deceptive(name)
                    || options.removes(*id, name))
            })
            .map(|(_, name, value)| (name, value))
    }
}

/// One look at a trailer section.
struct TrailerSection<'d> {
    lines: &'d mut FieldLines,
    bytes: &'d [u8],
    fields: u16,
}

impl Task for TrailerSection<'_> {
    type Output = Result<bool, HeadError>;

    #[inline(always)]
    fn run<S: Scan>(self, scan: S) -> Self::Output {
        self.lines.parse(scan, self.bytes, self.fields)
    }
}

fn forbidden_in_trailers(id: FieldId) -> bool {
    #[allow(clippy::enum_glob_use)]
    use FieldId::*;
    matches!(
        id,
        Age | Authorization
            | CacheControl
            | Connection
            | ContentEncoding
            | ContentLength
            | ContentRange
            | ContentType
            | Cookie
            | Date
            | Expect
            | Expires
            | Forwarded
            | Host
            | IfMatch
            | IfModifiedSince
            | IfNoneMatch
            | IfRange
            | IfUnmodifiedSince
            | KeepAlive
            | Location
            | MaxForwards
            | Pragma
            | ProxyAuthenticate
            | ProxyAuthorization
            | ProxyConnection
            | Range
            | RetryAfter
            | SetCookie
            | Te
            | Trailer
            | TransferEncoding
            | Upgrade
            | Vary
            | Via
            | Warning
            | WwwAuthenticate
            | XForwardedFor
            | XForwardedHost
            | XForwardedProto
            | XRealIp
    )
}

/// Appends the line that precedes a chunk of `length` bytes; a CRLF must follow the data. `length` must not be 0, which
/// would end the body: then nothing is written.
pub fn write_chunk_header(length: usize, out: &mut Vec<u8>) {
    if length == 0 {
        return;
    }
    let digits = (usize::BITS - length.leading_zeros()).div_ceil(4);
    for i in (0..digits).rev() {
        out.push(b"0123456789abcdef"[length >> (4 * i) & 15]);
    }
    out.extend_from_slice(b"\r\n");
}

/// Appends `data` as one chunk; nothing if it is empty.
pub fn write_chunk(data: &[u8], out: &mut Vec<u8>) {
    if !data.is_empty() {
        write_chunk_header(data.len(), out);
        out.extend_from_slice(data);
        out.extend_from_slice(b"\r\n");
    }
}

/// Appends the last chunk, the trailer fields and the final CRLF.
pub fn write_last_chunk<'a>(trailers: impl IntoIterator<Item = (&'a [u8], &'a [u8])>, out: &mut Vec<u8>) {
    out.extend_from_slice(b"0\r\n");
    for (name, value) in trailers {
        crate::forward::write_field(name, value, out);
    }
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::OwnedFields;

    fn no_fields() -> Fields<'static> {
        Fields::new(b"", &[], 0)
    }

    fn decode_in_pieces(input: &[u8], piece: usize) -> Result<(Vec<u8>, usize, ChunkedDecoder), BodyError> {
        let mut decoder = ChunkedDecoder::new(ChunkLimits::default());
        let mut body = Vec::new();
        let (mut taken, mut available) = (0, 0);
        while !decoder.is_done() && (available < input.len() || taken < available) {
            available = (available + piece).min(input.len());
            loop {
                let window = &input[taken..available];
                let decoded = decoder.decode(window)?;
                body.extend_from_slice(&window[decoded.data]);
                taken += decoded.consumed;
                if decoded.done || taken == available {
                    break;
                }
            }
        }
        Ok((body, taken, decoder))
    }

    #[test]
    fn a_body_decodes_the_same_however_it_is_split() {
        let input =
            b"5;a=\"b\"\r\nhello\r\n00010\r\n0123456789abcdef\r\n0\r\nX-Sum: 1\r\nhost: evil\r\n\r\nGET /";
        for piece in 1..=input.len() {
            let (body, taken, decoder) = decode_in_pieces(input, piece).unwrap();
            assert_eq!(body, b"hello0123456789abcdef");
            assert_eq!(&input[taken..], b"GET /");
            assert_eq!(decoder.trailers(no_fields()).collect::<Vec<_>>(), [(&b"X-Sum"[..], &b"1"[..])]);
        }
    }

    /// RFC 9110 §6.5.1, and what a server may take for such a field.
    #[test]
    fn trailers_that_would_count_in_a_head_are_left_out() {
        let forbidden = [
            "Age",
            "Authorization",
            "Cache-Control",
            "Connection",
            "Content-Encoding",
            "Content-Length",
            "Content-Range",
            "Content-Type",
            "Cookie",
            "Date",
            "Expect",
            "Expires",
            "Forwarded",
            "Host",
            "If-Match",
            "If-Modified-Since",
            "If-None-Match",
            "If-Range",
            "If-Unmodified-Since",
            "Keep-Alive",
            "Location",
            "Max-Forwards",
            "Pragma",
            "Proxy-Authenticate",
            "Proxy-Authorization",
            "Proxy-Connection",
            "Range",
            "Retry-After",
            "Set-Cookie",
            "TE",
            "Trailer",
            "Transfer-Encoding",
            "Upgrade",
            "Vary",
            "Via",
            "Warning",
            "WWW-Authenticate",
            "X-Forwarded-For",
            "X-Forwarded-Host",
            "X-Forwarded-Proto",
            "X-Real-IP",
            "Transfer_Encoding",
            "X_Forwarded_For",
            "X-Forwarded-Port",
            "X-Original-URL",
            "True-Client-IP",
            "Proxy",
        ];
        for name in forbidden {
            let input = format!("0\r\nX-A: 1\r\n{name}: 2\r\n\r\n");
            let (_, _, decoder) = decode_in_pieces(input.as_bytes(), 7).unwrap();
            assert_eq!(
                decoder.trailers(no_fields()).collect::<Vec<_>>(),
                [(&b"X-A"[..], &b"1"[..])],
                "{name}"
            );
        }
    }

    #[test]
    fn trailers_of_one_connection_stay_on_it() {
        let (_, _, decoder) =
            decode_in_pieces(b"0\r\nX-Hop: 1\r\nETag: \"a\"\r\nX-End: 2\r\n\r\n", 7).unwrap();
        // An option that names an end-to-end field removes nothing.
        let head = OwnedFields::new(&[("Connection", "close, x-hop"), ("Connection", "ETag")]);
        let names: Vec<_> = decoder.trailers(head.view()).map(|(name, _)| name).collect();
        assert_eq!(names, [&b"ETag"[..], b"X-End"]);
    }

    #[test]
    fn malformed_codings_are_refused_with_their_reason_however_split() {
        let long_extension = format!("1;{}\r\n", "x".repeat(5000));
        let long_trailer = format!("0\r\nx: {}\r\n\r\n", "y".repeat(17000));
        let many_trailers = format!("0\r\n{}\r\n", "x: y\r\n".repeat(101));
        let table: &[(&[u8], BodyError)] = &[
            (b"\r\n", BodyError::BadChunkSize),
            (b"g\r\n", BodyError::BadChunkSize),
            (b"-1\r\n", BodyError::BadChunkSize),
            (b"+1\r\n", BodyError::BadChunkSize),
            (b"0x5\r\nhello\r\n", BodyError::BadChunkSize),
            (b" 5\r\nhello\r\n", BodyError::BadChunkSize),
            (b"5 \r\nhello\r\n", BodyError::BadChunkSize),
            (b"5_0\r\n", BodyError::BadChunkSize),
            (b"00000000000000005\r\nhello\r\n", BodyError::BadChunkSize),
            (b"fffffffffffffffff\r\n", BodyError::BadChunkSize),
            (b"5\nhello\r\n", BodyError::MissingLineEnd),
            (b"5\rhello\r\n", BodyError::MissingLineEnd),
            (b"5\r\nhelloX\r\n", BodyError::MissingLineEnd),
            (b"5\r\nhello\n", BodyError::MissingLineEnd),
            (b"5\r\nhello\r0\r\n", BodyError::MissingLineEnd),
            (b"5;a\nhello\r\n", BodyError::MissingLineEnd),
            (b"5;a\rX\r\nhello\r\n", BodyError::MissingLineEnd),
            (b"5;\0\r\n", BodyError::BadChunkExtension),
            (long_extension.as_bytes(), BodyError::ExtensionsTooLarge { limit: 4096 }),
            (b"0\r\nx y: z\r\n\r\n", BodyError::BadTrailer(HeadError::WhitespaceBeforeColon)),
            (b"0\r\nx: a\n\r\n", BodyError::BadTrailer(HeadError::BareLineFeed)),
            (b"0\r\n\n", BodyError::BadTrailer(HeadError::BareLineFeed)),
            (long_trailer.as_bytes(), BodyError::BadTrailer(HeadError::HeadTooLarge { limit: 16384 })),
            (many_trailers.as_bytes(), BodyError::BadTrailer(HeadError::TooManyFields { limit: 100 })),
        ];
        for (input, expected) in table {
            for piece in [1, 2, 3, 7, input.len()] {
                let refused = decode_in_pieces(input, piece).map(|(body, ..)| body).unwrap_err();
                assert_eq!(
                    refused,
                    *expected,
                    "{:?}",
                    String::from_utf8_lossy(&input[..input.len().min(40)])
                );
            }
        }
    }

    #[test]
    fn extensions_are_bounded_over_all_chunks_of_a_body_and_each_body_has_its_own_bound() {
        let mut decoder = ChunkedDecoder::new(ChunkLimits { extension_bytes: 10, ..ChunkLimits::default() });
        let decode = |mut input: &[u8], decoder: &mut ChunkedDecoder| {
            while !input.is_empty() {
                input = &input[decoder.decode(input)?.consumed..];
            }
            Ok(decoder.is_done())
        };
        let (at_most, beyond) = (b"1;12345\r\nx\r\n0;67890\r\n\r\n", b"1;12345\r\nx\r\n0;67890+\r\n\r\n");
        for _ in 0..2 {
            assert_eq!(decode(at_most, &mut decoder), Ok(true));
            decoder.reset();
        }
        assert_eq!(decode(beyond, &mut decoder), Err(BodyError::ExtensionsTooLarge { limit: 10 }));
    }

    #[test]
    fn extensions_of_a_response_are_bounded_in_each_chunk() {
        let limits = ChunkLimits { extension_bytes: 10, ..ChunkLimits::of_responses() };
        let decode = |mut input: &[u8]| {
            let mut decoder = ChunkedDecoder::new(limits);
            while !input.is_empty() {
                input = &input[decoder.decode(input)?.consumed..];
            }
            Ok(decoder.is_done())
        };
        let many = b"1;0123456789\r\nx\r\n".repeat(1000);
        assert_eq!(decode(&[&many[..], b"0;0123456789\r\n\r\n"].concat()), Ok(true));
        for beyond in [&b"1;0123456789+\r\nx\r\n"[..], b"0;0123456789+\r\n\r\n"] {
            let refused = Err(BodyError::ExtensionsTooLarge { limit: 10 });
            assert_eq!(decode(&[&many[..], beyond].concat()), refused);
        }
    }

    #[test]
    fn the_greatest_chunk_size_does_not_overflow() {
        let mut decoder = ChunkedDecoder::new(ChunkLimits::default());
        let input = b"ffffffffffffffff\r\nabc";
        let decoded = decoder.decode(input).unwrap();
        assert_eq!(&input[decoded.data], b"abc");
    }

    #[test]
    fn what_is_encoded_decodes_to_itself() {
        let mut coded = Vec::new();
        write_chunk(b"", &mut coded);
        write_chunk(b"hello, ", &mut coded);
        write_chunk(&[b'x'; 4096], &mut coded);
        write_last_chunk([(&b"etag"[..], &b"\"1\""[..])], &mut coded);
        let (body, taken, decoder) = decode_in_pieces(&coded, 1000).unwrap();
        assert_eq!(body, [&b"hello, "[..], &[b'x'; 4096]].concat());
        assert_eq!(taken, coded.len());
        assert_eq!(decoder.trailers(no_fields()).collect::<Vec<_>>(), [(&b"etag"[..], &b"\"1\""[..])]);
        let mut header = Vec::new();
        write_chunk_header(0x10f, &mut header);
        assert_eq!(header, b"10f\r\n");
    }
}
