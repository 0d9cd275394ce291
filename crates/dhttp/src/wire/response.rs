//! Responses, of which there are several forms.

use super::{RequestId, TICKET_BYTES, TICKET_TAIL_BYTES, WireError, split_id, split_token, write_token};

// What tells the forms apart from HTTP, which starts with `H`, and from each other.
const PIECE: u8 = 0;
const USE_TCP: u8 = 1;
const PROVE_ADDRESS: u8 = 2;
const HTTP_WITH_TOKEN: u8 = 3;
/// Behind [`USE_TCP`].
const OUTCOME_UNKNOWN: u8 = 1;

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

/// Whether what follows an id is a response: HTTP, or a control answer. Read as a request, the latter would name a port
/// below 1024, which no client has.
pub(super) fn looks_like_response(behind_id: &[u8]) -> bool {
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
