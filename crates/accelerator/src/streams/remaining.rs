//! What is to come of a response's content, whose framing is that of HTTP/1.1.

use bytes::{Bytes, BytesMut};
use tidegate_http::{BodyFraming, ChunkLimits, ChunkedDecoder};

/// What is to come of a response's content.
pub(super) enum Remaining {
    Length(u64),
    Chunked(Box<ChunkedDecoder>),
}

/// It is not what was announced.
pub(super) struct Misframed;

impl Remaining {
    pub(super) fn new(framing: BodyFraming) -> Self {
        match framing {
            BodyFraming::Length(length) => Self::Length(length),
            _ => Self::Chunked(Box::new(ChunkedDecoder::new(ChunkLimits::of_responses()))),
        }
    }

    /// The content in a piece of what was sent.
    pub(super) fn take(&mut self, mut piece: Bytes) -> Result<Bytes, Misframed> {
        match self {
            Self::Length(left) => {
                *left = left.checked_sub(piece.len() as u64).ok_or(Misframed)?;
                Ok(piece)
            }
            Self::Chunked(decoder) => {
                let mut data = Bytes::new();
                while !piece.is_empty() && !decoder.is_done() {
                    let decoded = decoder.decode(&piece).map_err(|_| Misframed)?;
                    let found = piece.slice(decoded.data);
                    data = match (data.is_empty(), found.is_empty()) {
                        (true, _) => found,
                        (false, true) => data,
                        (false, false) => {
                            let mut both = BytesMut::from(data);
                            both.extend_from_slice(&found);
                            both.freeze()
                        }
                    };
                    piece = piece.slice(decoded.consumed..);
                }
                Ok(data)
            }
        }
    }

    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(decoder) => decoder.is_done(),
        }
    }

    /// What has read the trailers, if it has come to its end and there may be any.
    pub(super) fn decoder(&self) -> Option<&ChunkedDecoder> {
        match self {
            Self::Chunked(decoder) if decoder.is_done() => Some(decoder),
            _ => None,
        }
    }
}
