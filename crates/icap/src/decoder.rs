//! A server's response, piece by piece.

use std::ops::Range;

use tidegate_http::{ChunkLimits, ChunkedDecoder};

use crate::head::Body;
use crate::{HEAD_BYTES, IcapError, ResponseHead};

/// What one call of [`Decoder::decode`] found.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Decoded {
    /// Bytes of the input that are dealt with.
    pub consumed: usize,
    /// What they led to; `None`: more has to come.
    pub event: Option<Event>,
}

/// What a response consists of, in this order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Event {
    /// The ICAP head. After 100 (Continue) another one follows, once the rest of the body was sent.
    Head(Box<ResponseHead>),
    /// All encapsulated HTTP heads, as they lie behind each other; [`crate::Sections`] tells them apart.
    Sections(Vec<u8>),
    /// A piece of the encapsulated body: where in the input it lies.
    Body(Range<usize>),
    /// The message is complete; what follows `consumed` is not part of it.
    End,
}

/// Reads one response: heads, sections and body. What was kept so far is bounded by [`HEAD_BYTES`] and
/// [`crate::SECTIONS_BYTES`]; bodies are not kept.
///
/// ```
/// use tidegate_icap::{Decoder, Event};
/// let input = b"ICAP/1.0 204 No Content\r\nISTag: \"a\"\r\n\r\n";
/// let mut decoder = Decoder::default();
/// let decoded = decoder.decode(input)?;
/// assert!(matches!(decoded.event, Some(Event::Head(head)) if head.status == 204 && head.keep_alive));
/// assert_eq!(decoder.decode(&input[decoded.consumed..])?.event, Some(Event::End));
/// # Ok::<(), tidegate_icap::IcapError>(())
/// ```
#[derive(Debug, Default)]
pub struct Decoder {
    at: At,
    /// Of a head or of the sections, as far as they have come.
    kept: Vec<u8>,
}

#[derive(Debug, Default)]
enum At {
    #[default]
    Head,
    Sections {
        length: usize,
        body: Body,
    },
    Body(Box<ChunkedDecoder>),
    End,
}

impl Decoder {
    /// Decodes from the start of `input` up to the next event. Call again with what follows `consumed` while there is
    /// an event; without one, all of the input was used up.
    ///
    /// # Errors
    /// The message is malformed or exceeds a limit; the decoder must not be used again.
    pub fn decode(&mut self, input: &[u8]) -> Result<Decoded, IcapError> {
        match &mut self.at {
            At::Head => self.head(input),
            At::Sections { length, body } => {
                let (length, body) = (*length, *body);
                let take = (length - self.kept.len()).min(input.len());
                self.kept.extend_from_slice(&input[..take]);
                if self.kept.len() < length {
                    return Ok(Decoded { consumed: take, event: None });
                }
                self.at = body_or_end(body);
                let event = Some(Event::Sections(std::mem::take(&mut self.kept)));
                Ok(Decoded { consumed: take, event })
            }
            At::Body(decoder) => {
                let decoded = body(decoder, input)?;
                if decoded.event == Some(Event::End) {
                    self.at = At::End;
                }
                Ok(decoded)
            }
            At::End => Ok(Decoded { consumed: 0, event: Some(Event::End) }),
        }
    }

    /// Whether the message is complete.
    pub fn is_done(&self) -> bool {
        matches!(self.at, At::End)
    }

    /// Whether nothing has come yet.
    pub fn is_untouched(&self) -> bool {
        matches!(self.at, At::Head) && self.kept.is_empty()
    }

    fn head(&mut self, input: &[u8]) -> Result<Decoded, IcapError> {
        // Line by line, so that what follows the head is left alone.
        let mut taken = 0;
        while let Some(end) = memchr::memchr(b'\n', &input[taken..]) {
            let line_start = self.line_start();
            self.keep(&input[taken..=taken + end])?;
            taken += end + 1;
            if self.kept[line_start..] == *b"\r\n" && line_start > 0 {
                let head = ResponseHead::parse(&std::mem::take(&mut self.kept))?;
                self.at = after(&head);
                return Ok(Decoded { consumed: taken, event: Some(Event::Head(Box::new(head))) });
            }
        }
        self.keep(&input[taken..])?;
        Ok(Decoded { consumed: input.len(), event: None })
    }

    /// Where the line begins of which a part is kept.
    fn line_start(&self) -> usize {
        memchr::memrchr(b'\n', &self.kept).map_or(0, |end| end + 1)
    }

    fn keep(&mut self, bytes: &[u8]) -> Result<(), IcapError> {
        // Something else than ICAP is found out early.
        let mut expected = b"ICAP/".iter().skip(self.kept.len()).zip(bytes);
        if !expected.all(|(expected, byte)| expected == byte) {
            return Err(IcapError::StatusLine);
        }
        if self.kept.len() + bytes.len() > HEAD_BYTES {
            return Err(IcapError::HeadTooLarge);
        }
        self.kept.extend_from_slice(bytes);
        Ok(())
    }
}

/// The next piece of a body, or its end.
fn body(decoder: &mut ChunkedDecoder, input: &[u8]) -> Result<Decoded, IcapError> {
    let mut consumed = 0;
    while consumed < input.len() {
        let decoded = decoder.decode(&input[consumed..]).map_err(IcapError::Body)?;
        let data = consumed + decoded.data.start..consumed + decoded.data.end;
        consumed += decoded.consumed;
        let event = match (data.is_empty(), decoded.done) {
            (false, _) => Event::Body(data),
            (true, true) => Event::End,
            (true, false) => continue,
        };
        return Ok(Decoded { consumed, event: Some(event) });
    }
    Ok(Decoded { consumed, event: None })
}

fn after(head: &ResponseHead) -> At {
    match (&head.sections, head.status) {
        // What follows is the answer proper.
        (_, 100) => At::Head,
        // RFC 3507 §4.6: 204 has no body, whatever its head says.
        (_, 204) | (None, _) => At::End,
        (Some(sections), _) if sections.body_at > 0 => {
            At::Sections { length: sections.body_at, body: sections.body }
        }
        (Some(sections), _) => body_or_end(sections.body),
    }
}

fn body_or_end(body: Body) -> At {
    match body {
        Body::None => At::End,
        _ => At::Body(Box::new(ChunkedDecoder::new(ChunkLimits::of_responses()))),
    }
}
