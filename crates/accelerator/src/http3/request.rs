//! The client's half of a stream: a head, content, trailer fields.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use quinn::RecvStream;
use tidegate_http::http3::{
    self, ErrorCode, FrameHeader, HeadError, Request, RequestFacts, frame_type, is_reserved_frame_type,
    max_field_section_size,
};
use tidegate_http::{HeadLimits, Method};

use crate::http3::connection::Connection;
use crate::http3::frames::{self, Frames};
use crate::http3::stream::Both;
use crate::streams::{self, Ended, Fault, Gone, Incoming, Shared};

/// How long content that was stated to be none is looked for.
const MOMENT: Duration = Duration::from_millis(100);
/// Bytes of content that are handed on at once.
const PIECE_BYTES: u64 = 64 * 1024;

/// The client's half of a stream: a head, content, trailer fields.
pub(super) struct Content {
    shared: Rc<Shared>,
    connection: Rc<Connection>,
    both: Rc<Both>,
    frames: Frames,
    limits: HeadLimits,
    /// The frame that has begun.
    part: Part,
    /// Bytes to come of it.
    left: u64,
    /// Its fields, as far as they are there.
    section: Vec<u8>,
    /// The request's head is there.
    has_head: bool,
    /// Bytes to come of what `Content-Length` announces.
    promised: Option<u64>,
    /// The trailer fields as lines, once they have come.
    trailers: Option<Bytes>,
}

/// What a frame brings.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Part {
    /// None has begun.
    Nothing,
    Content,
    Fields,
    /// What means nothing (§9).
    Unknown,
}

/// What comes next on a stream.
enum Next {
    /// There is some of it, to be taken from the frames.
    Content,
    /// All of a field section.
    Fields(Vec<u8>),
    /// A field section longer than may be.
    LongFields,
    /// More of such sections than may wait on one connection.
    TooMuch,
    End,
}

impl Content {
    pub(super) fn new(
        shared: &Rc<Shared>,
        connection: &Rc<Connection>,
        both: &Rc<Both>,
        receive: RecvStream,
        limits: HeadLimits,
    ) -> Self {
        Self {
            shared: Rc::clone(shared),
            connection: Rc::clone(connection),
            both: Rc::clone(both),
            frames: Frames::new(receive),
            limits,
            part: Part::Nothing,
            left: 0,
            section: Vec::new(),
            has_head: false,
            promised: None,
            trailers: None,
        }
    }

    /// Waits for the request's head, and for what tells whether there is content.
    pub(super) async fn request(mut self) -> Result<streams::Request<Self>, Ended> {
        let section = match self.next().await? {
            Next::Fields(section) => section,
            Next::LongFields => return Err(Ended::Failed(Fault::Unread(431))),
            Next::TooMuch => return Err(Ended::Failed(Fault::Excessive)),
            // Content before a head is none.
            Next::Content | Next::End => {
                self.both.fail(ErrorCode::RequestIncomplete);
                return Err(Ended::Failed(Fault::Malformed));
            }
        };
        let head = match Request::read(&section, &self.limits) {
            Ok(head) => head,
            Err(HeadError::Compression) => return Err(self.fail(ErrorCode::QpackDecompressionFailed).into()),
            Err(HeadError::TooLarge) => return Err(Ended::Failed(Fault::Unread(431))),
            Err(HeadError::LongTarget) => return Err(Ended::Failed(Fault::Unread(414))),
            Err(HeadError::Malformed) => return Err(Ended::Failed(Fault::Malformed)),
        };
        drop(section);
        self.has_head = true;
        let RequestFacts { method, content_length, expects_continue, .. } = head.facts();
        self.promised = content_length;
        let has_content = match content_length {
            // There are clients that do not say at once that there is none.
            Some(0) => match tokio::time::timeout(MOMENT, self.goes_on()).await {
                Ok(goes_on) if goes_on? && self.trailers.is_none() => {
                    self.malformed();
                    return Err(Ended::Failed(Fault::Malformed));
                }
                _ => false,
            },
            Some(length) => length > 0,
            // What these have is seen when they go on; others may want an answer before they do.
            None if matches!(method, Method::Get | Method::Head) => self.goes_on().await?,
            None => tokio::select! {
                biased;
                goes_on = self.goes_on() => goes_on?,
                () = std::future::ready(()) => true,
            },
        };
        let follows = if has_content { http3::Content::MayFollow } else { http3::Content::None };
        let head = head.finish(follows).into();
        Ok(streams::Request { head, method, expects_continue, content: has_content.then_some(self) })
    }

    /// Waits for content, trailer fields or the end: whether it is not the end.
    async fn goes_on(&mut self) -> Result<bool, Gone> {
        match self.next().await? {
            Next::Content => Ok(true),
            Next::End => Ok(false),
            Next::LongFields | Next::TooMuch => Err(self.malformed()),
            Next::Fields(section) => {
                let mut lines = Vec::new();
                match http3::read_trailers(&section, &self.limits, &mut lines) {
                    Ok(()) => self.trailers = Some(lines.into()),
                    Err(HeadError::Compression) => return Err(self.fail(ErrorCode::QpackDecompressionFailed)),
                    Err(_) => return Err(self.malformed()),
                }
                Ok(true)
            }
        }
    }

    /// What comes next. It may be given up and waited for again.
    async fn next(&mut self) -> Result<Next, Gone> {
        loop {
            match self.part {
                Part::Nothing => {
                    let header = self.frames.header().await.map_err(|ended| self.ended(ended))?;
                    let Some(header) = header else { return Ok(Next::End) };
                    self.begin(header)?;
                    if self.part == Part::Fields && header.length > max_field_section_size(&self.limits) {
                        return Ok(Next::LongFields);
                    }
                }
                Part::Content if self.left > 0 => return Ok(Next::Content),
                Part::Fields if self.left == 0 => {
                    self.part = Part::Nothing;
                    return Ok(Next::Fields(self.take_section()));
                }
                Part::Content | Part::Unknown if self.left == 0 => self.part = Part::Nothing,
                part => {
                    let piece = self.payload().await?;
                    if part == Part::Fields {
                        if !self.shared.streams.take(piece.len()) {
                            return Ok(Next::TooMuch);
                        }
                        self.section.extend_from_slice(&piece);
                    }
                }
            }
        }
    }

    /// The fields that have come, which are others' to keep account of now.
    fn take_section(&mut self) -> Vec<u8> {
        self.shared.streams.give_back(self.section.len());
        std::mem::take(&mut self.section)
    }

    /// A frame begins, if it may come here (§4.1, §7.2).
    fn begin(&mut self, FrameHeader { kind, length }: FrameHeader) -> Result<(), Gone> {
        self.left = length;
        self.part = match kind {
            frame_type::DATA | frame_type::HEADERS if self.trailers.is_some() => {
                return Err(self.fail(ErrorCode::FrameUnexpected));
            }
            frame_type::HEADERS => Part::Fields,
            frame_type::DATA if self.has_head => Part::Content,
            frame_type::DATA => return Err(self.fail(ErrorCode::FrameUnexpected)),
            frame_type::CANCEL_PUSH
            | frame_type::SETTINGS
            | frame_type::PUSH_PROMISE
            | frame_type::GOAWAY
            | frame_type::MAX_PUSH_ID => return Err(self.fail(ErrorCode::FrameUnexpected)),
            _ if is_reserved_frame_type(kind) => return Err(self.fail(ErrorCode::FrameUnexpected)),
            _ => Part::Unknown,
        };
        if length == 0 || self.part == Part::Unknown {
            self.connection.idle(1);
        }
        Ok(())
    }

    /// Some of the frame that has begun.
    async fn payload(&mut self) -> Result<Bytes, Gone> {
        let piece =
            self.frames.payload(self.left.min(PIECE_BYTES)).await.map_err(|ended| self.ended(ended))?;
        self.left -= piece.len() as u64;
        Ok(piece)
    }

    fn ended(&self, ended: frames::Ended) -> Gone {
        match ended {
            frames::Ended::Gone => {
                self.both.fail(ErrorCode::RequestCancelled);
                Gone
            }
            frames::Ended::Fault(error) => self.fail(error),
        }
    }

    /// Ends the connection.
    fn fail(&self, error: ErrorCode) -> Gone {
        self.connection.fail(error);
        Gone
    }

    /// Ends the stream, whose head was good (§4.1.2).
    fn malformed(&self) -> Gone {
        self.both.fail(ErrorCode::MessageError);
        Gone
    }
}

impl Incoming for Content {
    async fn piece(&mut self) -> Option<Result<Bytes, Gone>> {
        while self.part != Part::Content || self.left == 0 {
            match self.goes_on().await {
                Ok(true) => {}
                Ok(false) if self.promised.is_some_and(|left| left > 0) => {
                    return Some(Err(self.malformed()));
                }
                Ok(false) => return None,
                Err(gone) => return Some(Err(gone)),
            }
        }
        let piece = match self.payload().await {
            Ok(piece) => piece,
            Err(gone) => return Some(Err(gone)),
        };
        self.connection.brought(piece.len());
        if let Some(promised) = &mut self.promised {
            match promised.checked_sub(piece.len() as u64) {
                Some(left) => *promised = left,
                None => return Some(Err(self.malformed())),
            }
        }
        Some(Ok(piece))
    }

    /// The library lets the client send more as soon as something is read, which is when somebody has taken what was
    /// before it.
    fn taken(&mut self, _: usize) -> Result<(), Gone> {
        Ok(())
    }

    async fn trailers(&mut self) -> Result<Bytes, Gone> {
        Ok(self.trailers.take().unwrap_or_default())
    }
}

impl Drop for Content {
    /// Nobody wants the rest (§4.1).
    fn drop(&mut self) {
        self.take_section();
        self.frames.stop(self.both.fault().unwrap_or(ErrorCode::NoError));
    }
}
