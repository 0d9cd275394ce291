//! The messages (DHTTP §III, Fig. 2): views over received bytes, and their writers.
//!
//! ```text
//! request   id (8)  port of the other channel (2)  flags (1)  [token length (1)  token]
//!           [count (1)  [tag (4)  count × (offset (4)  length (4))]]
//!           [ticket length (1)  [ticket (16)  number (4)]]  HTTP request
//! response  id (8)  HTTP response
//!           id (8)  0  tag (4)  total (4)  offset (4)  piece      a piece of an HTTP response
//!           id (8)  1                                             resend this over TCP
//!           id (8)  1  1                                          this may have been executed
//!           id (8)  2  token length (1)  token                    resend this with the token
//!           id (8)  2  token length (1)  token  ticket (16)  refused (8)  age (4)   with another ticket
//!           id (8)  3  token length (1)  token  HTTP response, or a sealed one
//! ```
//!
//! Integers are big-endian. An HTTP response starts with `H`, so that the byte behind the id tells the forms apart. No
//! response reads as a request with a port that clients may use and known flags, so that two servers never answer each
//! other in a loop.

use std::fmt;

/// Length of a request's fixed header in bytes.
pub const REQUEST_HEADER_BYTES: usize = 11;
/// Length of a request identifier in bytes.
pub const ID_BYTES: usize = 8;
/// Greatest length of a token in bytes.
pub const MAX_TOKEN_BYTES: usize = 32;
/// Length in bytes of a ticket for requests that must not be repeated; see [`crate::once`].
pub const TICKET_BYTES: usize = 16;
/// As many bytes of a ticket's end tell it from others.
pub const TICKET_TAIL_BYTES: usize = 8;
/// Most ranges that one request asks for.
pub const MAX_RANGES: usize = 16;

/// Bytes in front of a piece of a response.
pub const PIECE_HEADER_BYTES: usize = ID_BYTES + 13;

/// Most bytes a message adds in front of the HTTP message.
pub const MAX_HEADER_BYTES: usize =
    REQUEST_HEADER_BYTES + 1 + MAX_TOKEN_BYTES + 1 + 4 + 8 * MAX_RANGES + 1 + TICKET_BYTES + 4;

const PIECE: u8 = 0;

const USE_TCP: u8 = 1;
const PROVE_ADDRESS: u8 = 2;
const HTTP_WITH_TOKEN: u8 = 3;
/// Behind [`USE_TCP`].
const OUTCOME_UNKNOWN: u8 = 1;

/// What a response is matched to its request by: eight random bytes, unique among a client's outstanding requests.
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct RequestId(pub [u8; ID_BYTES]);

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

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

/// Why a message was refused; always the fault of the peer that sent it.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Shorter than its header: there is not even an id to answer to.
    #[error("message is shorter than its header")]
    Short,
    /// A request that has the form of a response: answering it could go on for ever.
    #[error("a response where a request is expected")]
    ResponseAsRequest,
    /// A flag that this version of the protocol does not know.
    #[error("unknown flags {bits:#04x}")]
    UnknownFlags {
        /// The id, so that an error can be sent.
        id: RequestId,
        /// The byte as received.
        bits: u8,
    },
    /// The token is longer than any token, or than the message.
    #[error("malformed token")]
    BadToken {
        /// The id, so that an error can be sent.
        id: RequestId,
    },
    /// More ranges than there may be.
    #[error("malformed field on pieces")]
    BadPieces {
        /// The id, so that an error can be sent.
        id: RequestId,
    },
    /// The ticket is neither empty nor a ticket.
    #[error("malformed ticket")]
    BadTicket {
        /// The id, so that an error can be sent.
        id: RequestId,
    },
    /// Neither HTTP nor one of the control answers, or one with something behind it.
    #[error("malformed response")]
    BadResponse,
}

impl WireError {
    /// The id of the request that an error response can be sent to.
    pub const fn id(self) -> Option<RequestId> {
        match self {
            Self::UnknownFlags { id, .. }
            | Self::BadToken { id }
            | Self::BadPieces { id }
            | Self::BadTicket { id } => Some(id),
            Self::Short | Self::ResponseAsRequest | Self::BadResponse => None,
        }
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

/// A response as received.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Response<'a> {
    /// The identifier of the request that it answers.
    pub id: RequestId,
    /// What it says.
    pub answer: Answer<'a>,
}

/// What a response says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Answer<'a> {
    /// An HTTP response, and perhaps a token for requests to come.
    Http {
        /// A token that proves the client's address to this server; it may be empty if the response is sealed.
        token: Option<&'a [u8]>,
        /// The HTTP response, or a sealed one; see [`crate::sealed`].
        http: &'a [u8],
    },
    /// A piece of an HTTP response; others come in other datagrams.
    Piece {
        /// Of the response; see [`crate::pieces::tag_of`].
        tag: u32,
        /// Length of the response in bytes.
        total: u32,
        /// Where the piece starts.
        offset: u32,
        /// The piece, which is not empty and lies within the response.
        piece: &'a [u8],
    },
    /// Send this request again over a connection that the client opens (DHTTP §III-A and §VI-B3).
    UseTcp,
    /// The request, which must not be repeated, may have been executed; nothing more is known.
    OutcomeUnknown,
    /// Send this request again with this token: the answer is too much for an address that is not proved.
    ProveAddress {
        /// A token that proves the client's address to this server.
        token: &'a [u8],
    },
    /// The same, and number the request within this ticket: by the one that it had, it was not executed since the
    /// server's window began, and will not be.
    NewTicket {
        /// A token that proves the client's address to this server.
        token: &'a [u8],
        /// The ticket.
        ticket: [u8; TICKET_BYTES],
        /// The end of the ticket that the request had; zeros if it had none.
        refused: [u8; TICKET_TAIL_BYTES],
        /// For how many seconds the server's window has seen everything.
        age_s: u32,
    },
}

impl<'a> Response<'a> {
    /// Reads one datagram.
    ///
    /// # Errors
    /// The message is malformed.
    pub fn parse(datagram: &'a [u8]) -> Result<Self, WireError> {
        let (id, rest) = split_id(datagram).ok_or(WireError::Short)?;
        let (&form, behind) = rest.split_first().ok_or(WireError::Short)?;
        let answer = match form {
            b'H' => Answer::Http { token: None, http: rest },
            PIECE => read_piece(behind).ok_or(WireError::BadResponse)?,
            USE_TCP if behind.is_empty() => Answer::UseTcp,
            USE_TCP if behind == [OUTCOME_UNKNOWN] => Answer::OutcomeUnknown,
            PROVE_ADDRESS => match split_token(behind) {
                Ok(Some((token, []))) if !token.is_empty() => Answer::ProveAddress { token },
                Ok(Some((token, behind))) if !token.is_empty() => {
                    read_ticket(token, behind).ok_or(WireError::BadResponse)?
                }
                _ => return Err(WireError::BadResponse),
            },
            HTTP_WITH_TOKEN => match split_token(behind) {
                Ok(Some((token, http))) if !token.is_empty() && http.first() == Some(&b'H') => {
                    Answer::Http { token: Some(token), http }
                }
                // Sealed, with or without a token.
                Ok(Some((token, http))) if http.first() == Some(&b'S') => {
                    Answer::Http { token: Some(token), http }
                }
                _ => return Err(WireError::BadResponse),
            },
            _ => return Err(WireError::BadResponse),
        };
        Ok(Self { id, answer })
    }

    /// Appends the message.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.id.0);
        match self.answer {
            Answer::Http { token: None, http } => out.extend_from_slice(http),
            Answer::Http { token: Some(token), http } => {
                out.push(HTTP_WITH_TOKEN);
                write_token(token, out);
                out.extend_from_slice(http);
            }
            Answer::Piece { tag, total, offset, piece } => {
                out.push(PIECE);
                for number in [tag, total, offset] {
                    out.extend_from_slice(&number.to_be_bytes());
                }
                out.extend_from_slice(piece);
            }
            Answer::UseTcp => out.push(USE_TCP),
            Answer::OutcomeUnknown => out.extend_from_slice(&[USE_TCP, OUTCOME_UNKNOWN]),
            Answer::NewTicket { token, ticket, refused, age_s } => {
                out.push(PROVE_ADDRESS);
                write_token(token, out);
                out.extend_from_slice(&ticket);
                out.extend_from_slice(&refused);
                out.extend_from_slice(&age_s.to_be_bytes());
            }
            Answer::ProveAddress { token } => {
                out.push(PROVE_ADDRESS);
                write_token(token, out);
            }
        }
    }
}

fn split_id(bytes: &[u8]) -> Option<(RequestId, &[u8])> {
    bytes.split_first_chunk().map(|(&id, rest)| (RequestId(id), rest))
}

/// Whether what follows an id is a response: HTTP, or a control answer. Read as a request, the latter would name a port
/// below 1024, which no client has.
fn looks_like_response(behind_id: &[u8]) -> bool {
    behind_id.starts_with(b"HTTP/") || behind_id.first().is_some_and(|&byte| byte <= HTTP_WITH_TOKEN)
}

fn read_piece(bytes: &[u8]) -> Option<Answer<'_>> {
    let (tag, rest) = bytes.split_first_chunk()?;
    let (total, rest) = rest.split_first_chunk()?;
    let (offset, piece) = rest.split_first_chunk()?;
    let (total, offset) = (u32::from_be_bytes(*total), u32::from_be_bytes(*offset));
    let end = u32::try_from(piece.len()).ok().and_then(|length| offset.checked_add(length))?;
    (!piece.is_empty() && end <= total).then_some(Answer::Piece {
        tag: u32::from_be_bytes(*tag),
        total,
        offset,
        piece,
    })
}

fn read_ticket<'a>(token: &'a [u8], bytes: &'a [u8]) -> Option<Answer<'a>> {
    let (ticket, rest) = bytes.split_first_chunk()?;
    let (refused, age) = rest.split_first_chunk()?;
    let age_s = u32::from_be_bytes(age.try_into().ok()?);
    Some(Answer::NewTicket { token, ticket: *ticket, refused: *refused, age_s })
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

/// A token, and what follows it.
type TokenAndRest<'a> = (&'a [u8], &'a [u8]);

/// `Ok(None)`: more bytes are needed.
fn split_token(bytes: &[u8]) -> Result<Option<TokenAndRest<'_>>, ()> {
    let Some((&length, rest)) = bytes.split_first() else { return Ok(None) };
    if usize::from(length) > MAX_TOKEN_BYTES {
        return Err(());
    }
    Ok(rest.split_at_checked(usize::from(length)))
}

fn write_token(token: &[u8], out: &mut Vec<u8>) {
    debug_assert!(token.len() <= MAX_TOKEN_BYTES);
    out.push(token.len() as u8);
    out.extend_from_slice(token);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: RequestId = RequestId(*b"\x01\x02\x03\x04\x05\x06\x07\x08");

    #[test]
    fn a_request_has_the_eleven_bytes_of_the_paper_in_front() {
        let request = Request {
            id: ID,
            other_port: 0x9c40,
            resend: true,
            token: None,
            pieces: Pieces::Unknown,
            once: Once::No,
            http: b"GET",
        };
        let mut bytes = Vec::new();
        request.write(&mut bytes);
        assert_eq!(bytes, b"\x01\x02\x03\x04\x05\x06\x07\x08\x9c\x40\x01GET");
        assert_eq!(Request::parse(&bytes), Ok(request));
    }

    #[test]
    fn a_response_has_the_eight_bytes_of_the_paper_in_front() {
        let response = Response { id: ID, answer: Answer::Http { token: None, http: b"HTTP/1.1 200 OK" } };
        let mut bytes = Vec::new();
        response.write(&mut bytes);
        assert_eq!(bytes, b"\x01\x02\x03\x04\x05\x06\x07\x08HTTP/1.1 200 OK");
        assert_eq!(Response::parse(&bytes), Ok(response));
    }

    #[test]
    fn short_messages_have_no_id_to_answer_to() {
        for length in 0..REQUEST_HEADER_BYTES {
            let bytes = [0x80; REQUEST_HEADER_BYTES];
            assert_eq!(Request::parse(&bytes[..length]), Err(WireError::Short));
        }
        assert_eq!(Response::parse(&ID.0), Err(WireError::Short));
    }

    #[test]
    fn unknown_flags_and_bad_tokens_name_the_request() {
        let error = Request::parse(b"\x01\x02\x03\x04\x05\x06\x07\x08\x9c\x40\x10GET").unwrap_err();
        assert_eq!(error, WireError::UnknownFlags { id: ID, bits: 16 });
        assert_eq!(error.id(), Some(ID));
        for tail in [&b"\x02"[..], b"\x02\x03ab", b"\x02\x21"] {
            let bytes = [&b"\x01\x02\x03\x04\x05\x06\x07\x08\x9c\x40"[..], tail].concat();
            assert_eq!(Request::parse(&bytes), Err(WireError::BadToken { id: ID }));
        }
    }

    #[test]
    fn a_control_answer_with_something_behind_it_is_refused() {
        for tail in
            [&b"\x01x"[..], b"\x02", b"\x02\0", b"\x02\x01ab", b"\x03\x01aX", b"\x03\0HTTP", b"\x04", b"x"]
        {
            let bytes = [&ID.0[..], tail].concat();
            assert_eq!(Response::parse(&bytes), Err(WireError::BadResponse), "{tail:?}");
        }
    }

    /// The examples of docs/protocol/dhttp.md, in their order.
    fn documented() -> Vec<Vec<u8>> {
        let text = include_str!("../../../docs/protocol/dhttp.md");
        let examples = text.split("```hex\n").skip(1).map(|rest| rest.split("```").next().unwrap());
        let byte = |digits: &str| u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2);
        // What follows the bytes of a line, behind two spaces, is for people.
        let line = |line: &str| -> Vec<u8> {
            line.split("  ").next().unwrap().split(' ').map(|digits| byte(digits).unwrap()).collect()
        };
        examples.map(|example| example.lines().flat_map(line).collect()).collect()
    }

    #[test]
    fn the_documented_examples_are_what_is_sent() {
        let http = b"GET /a HTTP/1.1\r\nHost: e\r\n\r\n";
        let token: Vec<u8> = documented()[6][10..].to_vec();
        let request = Request {
            id: ID,
            other_port: 50845,
            resend: false,
            token: Some(&[]),
            pieces: Pieces::Unknown,
            once: Once::No,
            http,
        };
        let resent = Request { resend: true, token: None, ..request };
        let mut ranges = Vec::new();
        PieceRange { offset: 2000, length: 1000 }.write(&mut ranges);
        PieceRange { offset: 4000, length: 100 }.write(&mut ranges);
        let tag = 0xdead_beef;
        let repair = Request { pieces: Pieces::Repair { tag, ranges: &ranges }, ..request };
        let ok = Answer::Http { token: None, http: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi" };
        let piece = Answer::Piece { tag, total: 4100, offset: 4000, piece: b"abc" };
        let responses = [ok, piece, Answer::UseTcp, Answer::ProveAddress { token: &token }]
            .map(|answer| Response { id: ID, answer });
        let mut written = vec![Vec::new(); 7];
        request.write(&mut written[0]);
        resent.write(&mut written[1]);
        responses[0].write(&mut written[2]);
        repair.write(&mut written[3]);
        for (response, out) in responses[1..].iter().zip(&mut written[4..]) {
            response.write(out);
        }
        assert_eq!(documented(), written);
        assert_eq!(token.len(), crate::token::TOKEN_BYTES);
    }

    fn token() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 1..=MAX_TOKEN_BYTES)
    }

    proptest! {
        #[test]
        fn requests_survive_writing_and_reading(
            id: [u8; 8], other_port in 1024u16.., resend: bool, http: Vec<u8>,
            token in prop::option::of(prop::collection::vec(any::<u8>(), 0..=MAX_TOKEN_BYTES)),
            form in 0..3u8, once in 0..3u8, ticket: [u8; TICKET_BYTES], number: u32,
            tag: u32, ranges in prop::collection::vec(any::<[u8; 8]>(), 1..=MAX_RANGES),
        ) {
            let ranges = ranges.concat();
            let pieces = match form {
                0 => Pieces::Unknown,
                1 => Pieces::Accepted,
                _ => Pieces::Repair { tag, ranges: &ranges },
            };
            let once = match once {
                0 => Once::No,
                1 => Once::Unnumbered,
                _ => Once::Numbered(Numbered { ticket, number }),
            };
            let token = token.as_deref();
            let request =
                Request { id: RequestId(id), other_port, resend, token, pieces, once, http: &http };
            let mut bytes = Vec::new();
            request.write(&mut bytes);
            prop_assert_eq!(Request::parse(&bytes), Ok(request));
            prop_assert_eq!(bytes.len(), request.header_bytes() + http.len());
            for split in 0..bytes.len() {
                let part = Request::parse_prefix(&bytes[..split]).unwrap();
                prop_assert_eq!(part.is_some(), split >= request.header_bytes());
            }
        }

        #[test]
        fn responses_survive_writing_and_reading_and_are_never_requests(
            id: [u8; 8], body: Vec<u8>, token in token(), form in 0..7u8,
            ticket: [u8; TICKET_BYTES], tag: u32, offset in 0..u32::MAX / 2,
        ) {
            let http = [&b"HTTP/1.1 "[..], &body].concat();
            let answer = match form {
                0 => Answer::Http { token: None, http: &http },
                4 => Answer::Piece { tag, total: offset + http.len() as u32, offset, piece: &http },
                1 => Answer::Http { token: Some(&token), http: &http },
                2 => Answer::UseTcp,
                5 => Answer::OutcomeUnknown,
                6 => Answer::NewTicket { token: &token, ticket, refused: id, age_s: tag },
                _ => Answer::ProveAddress { token: &token },
            };
            let response = Response { id: RequestId(id), answer };
            let mut bytes = Vec::new();
            response.write(&mut bytes);
            prop_assert_eq!(Response::parse(&bytes), Ok(response));
            prop_assert_eq!(Request::parse(&bytes), Err(WireError::ResponseAsRequest));
        }

        #[test]
        fn any_bytes_are_read_or_refused_and_what_is_read_is_written_back(bytes: Vec<u8>) {
            let mut out = Vec::new();
            if let Ok(request) = Request::parse(&bytes) {
                request.write(&mut out);
                prop_assert_eq!(&out, &bytes);
            }
            out.clear();
            if let Ok(response) = Response::parse(&bytes) {
                response.write(&mut out);
                prop_assert_eq!(&out, &bytes);
            }
        }
    }
}
