//! What may be in the HTTP part of a datagram.

use tidegate_http::normalize::{Personality, normalize};
use tidegate_http::{BodyFraming, HeadLimits, Progress, RequestHead, RequestParser};

/// What becomes of an HTTP request that came by UDP.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Check {
    /// It is complete, sound and may be repeated; its head has this many bytes.
    Sound { head_bytes: usize },
    /// It is complete and sound, but must not be repeated (DHTTP §III-A).
    NotIdempotent { head_bytes: usize },
    /// It is answered with this status.
    Refused { status: u16 },
}

/// Reads the HTTP requests of datagrams.
#[derive(Debug)]
pub(super) struct Checker {
    parser: RequestParser,
    personality: Personality,
    scratch: Vec<u8>,
}

impl Checker {
    pub fn new(personality: Personality, limits: HeadLimits) -> Self {
        Self { parser: RequestParser::new(limits), personality, scratch: Vec::new() }
    }

    /// The head of the request that was checked last, which is `http`.
    pub fn head<'a>(&'a self, http: &'a [u8]) -> RequestHead<'a> {
        self.parser.head(http)
    }

    pub fn check(&mut self, http: &[u8]) -> Check {
        self.parser.reset();
        let length = match self.parser.parse(http) {
            Ok(Progress::Complete { length }) => length,
            Ok(Progress::Incomplete) => return Check::Refused { status: 400 },
            Err(error) => return Check::Refused { status: error.status() },
        };
        let head = self.parser.head(http);
        if let Err(error) = normalize(&head, self.personality, &mut self.scratch) {
            return Check::Refused { status: error.status() };
        }
        let body_bytes = (http.len() - length) as u64;
        match head.framing {
            BodyFraming::None if body_bytes == 0 => {}
            BodyFraming::Length(stated) if body_bytes == stated => {}
            // A datagram has its length: there is nothing that chunks are good for.
            BodyFraming::Chunked => return Check::Refused { status: 411 },
            _ => return Check::Refused { status: 400 },
        }
        if !head.method.is_idempotent() {
            return Check::NotIdempotent { head_bytes: length };
        }
        Check::Sound { head_bytes: length }
    }
}
