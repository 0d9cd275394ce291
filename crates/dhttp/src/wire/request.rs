//! Requests, and the fields that may follow their flags.

use super::response::looks_like_response;
use super::{
    MAX_RANGES, MAX_TOKEN_BYTES, REQUEST_HEADER_BYTES, RequestId, TICKET_BYTES, TICKET_TAIL_BYTES, WireError,
    split_id, split_token, write_token,
};

/// The flags of a request.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Flags {
    /// The client sends this request again because no response came in time (DHTTP §III-A).
    pub resend: bool,
    /// A token field follows, perhaps an empty one: the client knows what a token is.
    pub token: bool,
    /// A field on pieces follows: the client takes responses in several datagrams.
    pub pieces: bool,
    /// A ticket field follows, perhaps an empty one: the request is to be executed once.
    pub once: bool,
}

impl Flags {
    const RESEND: u8 = 1;
    const TOKEN: u8 = 2;
    const PIECES: u8 = 4;
    const ONCE: u8 = 8;

    /// The flags as sent.
    pub const fn bits(self) -> u8 {
        (if self.resend { Self::RESEND } else { 0 })
            | (if self.token { Self::TOKEN } else { 0 })
            | (if self.pieces { Self::PIECES } else { 0 })
            | (if self.once { Self::ONCE } else { 0 })
    }

    /// The flags of a received byte; `None` if one is unknown.
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if bits & !(Self::RESEND | Self::TOKEN | Self::PIECES | Self::ONCE) != 0 {
            return None;
        }
        Some(Self {
            resend: bits & Self::RESEND != 0,
            token: bits & Self::TOKEN != 0,
            pieces: bits & Self::PIECES != 0,
            once: bits & Self::ONCE != 0,
        })
    }
}

/// Whether a client takes a response in pieces.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Pieces<'a> {
    /// It does not.
    #[default]
    Unknown,
    /// It does.
    Accepted,
    /// It has some of them, and wants these ranges of the response with this tag.
    Repair {
        /// See [`crate::pieces::tag_of`].
        tag: u32,
        /// The ranges as on the wire: offset and length, 4 bytes each; at most [`MAX_RANGES`].
        ranges: &'a [u8],
    },
}

/// A range of a response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PieceRange {
    /// Where it starts.
    pub offset: u32,
    /// Its length in bytes.
    pub length: u32,
}

impl PieceRange {
    const WIRE_BYTES: usize = 8;

    /// Appends the range.
    pub fn write(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.offset.to_be_bytes());
        out.extend_from_slice(&self.length.to_be_bytes());
    }

    /// The ranges of [`Pieces::Repair`].
    pub fn read_all(ranges: &[u8]) -> impl Iterator<Item = Self> + '_ {
        ranges.chunks_exact(Self::WIRE_BYTES).map(|range| {
            let number = |at: usize| range[at..].first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
            Self { offset: number(0), length: number(4) }
        })
    }
}

impl Pieces<'_> {
    fn wire_bytes(self) -> usize {
        match self {
            Self::Unknown => 0,
            Self::Accepted => 1,
            Self::Repair { ranges, .. } => 5 + ranges.len(),
        }
    }

    fn write(self, out: &mut Vec<u8>) {
        match self {
            Self::Unknown => {}
            Self::Accepted => out.push(0),
            Self::Repair { tag, ranges } => {
                debug_assert!(ranges.len() <= MAX_RANGES * PieceRange::WIRE_BYTES);
                out.push((ranges.len() / PieceRange::WIRE_BYTES) as u8);
                out.extend_from_slice(&tag.to_be_bytes());
                out.extend_from_slice(ranges);
            }
        }
    }
}

/// Which request of a client's this is, among those that must not be repeated.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Numbered {
    /// What a server issued.
    pub ticket: [u8; TICKET_BYTES],
    /// The request's number, which the client uses once within the ticket.
    pub number: u32,
}

/// Whether a request is to be executed once.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Once {
    /// It may be repeated, or is not to go by UDP.
    #[default]
    No,
    /// It is, but the client has no ticket yet.
    Unnumbered,
    /// It is.
    Numbered(Numbered),
}

impl Once {
    /// The end of its ticket; zeros if it has none.
    pub fn ticket_tail(self) -> [u8; TICKET_TAIL_BYTES] {
        let mut tail = [0; TICKET_TAIL_BYTES];
        if let Self::Numbered(Numbered { ticket, .. }) = self {
            tail.copy_from_slice(&ticket[TICKET_BYTES - TICKET_TAIL_BYTES..]);
        }
        tail
    }

    fn wire_bytes(self) -> usize {
        match self {
            Self::No => 0,
            Self::Unnumbered => 1,
            Self::Numbered(_) => 1 + TICKET_BYTES + 4,
        }
    }

    pub(crate) fn write(self, out: &mut Vec<u8>) {
        match self {
            Self::No => {}
            Self::Unnumbered => out.push(0),
            Self::Numbered(Numbered { ticket, number }) => {
                out.push(TICKET_BYTES as u8);
                out.extend_from_slice(&ticket);
                out.extend_from_slice(&number.to_be_bytes());
            }
        }
    }
}

/// A request as received.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Request<'a> {
    /// The request's identifier.
    pub id: RequestId,
    /// The client's port on the channel that this request did not take.
    pub other_port: u16,
    /// The client sent it before.
    pub resend: bool,
    /// The token; empty if the client has none, absent if it does not know tokens.
    pub token: Option<&'a [u8]>,
    /// Whether the client takes the response in pieces.
    pub pieces: Pieces<'a>,
    /// Whether it is to be executed once.
    pub once: Once,
    /// The HTTP request.
    pub http: &'a [u8],
}

impl<'a> Request<'a> {
    /// Reads one datagram.
    ///
    /// # Errors
    /// The message is malformed.
    pub fn parse(datagram: &'a [u8]) -> Result<Self, WireError> {
        match Self::parse_prefix(datagram)? {
            Some(request) => Ok(request),
            None => Err(match split_id(datagram) {
                // Cut off within one of the fields behind the flags.
                Some((id, rest)) if rest.len() >= 3 => WireError::BadToken { id },
                _ => WireError::Short,
            }),
        }
    }

    /// Reads the header at the start of a stream; `http` is what follows it so far. `None`: more bytes are needed.
    ///
    /// # Errors
    /// The message is malformed.
    pub fn parse_prefix(bytes: &'a [u8]) -> Result<Option<Self>, WireError> {
        let Some((id, rest)) = split_id(bytes) else { return Ok(None) };
        if looks_like_response(rest) {
            return Err(WireError::ResponseAsRequest);
        }
        let Some((&[high, low, bits], rest)) = rest.split_first_chunk() else { return Ok(None) };
        let flags = Flags::from_bits(bits).ok_or(WireError::UnknownFlags { id, bits })?;
        let (token, http) = if flags.token {
            match split_token(rest) {
                Ok(Some((token, http))) => (Some(token), http),
                Ok(None) => return Ok(None),
                Err(()) => return Err(WireError::BadToken { id }),
            }
        } else {
            (None, rest)
        };
        let (pieces, http) = if flags.pieces {
            match split_pieces(http) {
                Ok(Some((pieces, http))) => (pieces, http),
                Ok(None) => return Ok(None),
                Err(()) => return Err(WireError::BadPieces { id }),
            }
        } else {
            (Pieces::Unknown, http)
        };
        let (once, http) = if flags.once {
            match split_once(http) {
                Ok(Some((once, http))) => (once, http),
                Ok(None) => return Ok(None),
                Err(()) => return Err(WireError::BadTicket { id }),
            }
        } else {
            (Once::No, http)
        };
        let other_port = u16::from_be_bytes([high, low]);
        Ok(Some(Self { id, other_port, resend: flags.resend, token, pieces, once, http }))
    }

    /// Length of the header in bytes; the HTTP request starts there.
    pub fn header_bytes(&self) -> usize {
        REQUEST_HEADER_BYTES
            + self.token.map_or(0, |token| 1 + token.len())
            + self.pieces.wire_bytes()
            + self.once.wire_bytes()
    }

    /// Appends the message. A token beyond [`MAX_TOKEN_BYTES`] is left out: no server issues one.
    pub fn write(&self, out: &mut Vec<u8>) {
        let token = self.token.map(|token| if token.len() > MAX_TOKEN_BYTES { &[][..] } else { token });
        let pieces = self.pieces != Pieces::Unknown;
        let once = self.once != Once::No;
        let flags = Flags { resend: self.resend, token: token.is_some(), pieces, once };
        out.extend_from_slice(&self.id.0);
        out.extend_from_slice(&self.other_port.to_be_bytes());
        out.push(flags.bits());
        if let Some(token) = token {
            write_token(token, out);
        }
        self.pieces.write(out);
        self.once.write(out);
        out.extend_from_slice(self.http);
    }
}

/// `Ok(None)`: more bytes are needed.
fn split_once(bytes: &[u8]) -> Result<Option<(Once, &[u8])>, ()> {
    let Some((&length, rest)) = bytes.split_first() else { return Ok(None) };
    match usize::from(length) {
        0 => Ok(Some((Once::Unnumbered, rest))),
        TICKET_BYTES => {
            let Some((ticket, rest)) = rest.split_first_chunk() else { return Ok(None) };
            let Some((number, rest)) = rest.split_first_chunk() else { return Ok(None) };
            let number = u32::from_be_bytes(*number);
            Ok(Some((Once::Numbered(Numbered { ticket: *ticket, number }), rest)))
        }
        _ => Err(()),
    }
}

/// A field on pieces, and what follows it.
type PiecesAndRest<'a> = (Pieces<'a>, &'a [u8]);

/// `Ok(None)`: more bytes are needed.
fn split_pieces(bytes: &[u8]) -> Result<Option<PiecesAndRest<'_>>, ()> {
    let Some((&count, rest)) = bytes.split_first() else { return Ok(None) };
    let count = usize::from(count);
    if count == 0 {
        return Ok(Some((Pieces::Accepted, rest)));
    }
    if count > MAX_RANGES {
        return Err(());
    }
    let Some((tag, rest)) = rest.split_first_chunk() else { return Ok(None) };
    let split = rest.split_at_checked(count * PieceRange::WIRE_BYTES);
    Ok(split.map(|(ranges, rest)| (Pieces::Repair { tag: u32::from_be_bytes(*tag), ranges }, rest)))
}
