//! Datagrams: what client and server write and read. Pure functions over bytes; nothing here trusts its input.
//!
//! A datagram is a header of 10 bytes (version, kind, connection id), the fields of its kind, and frames. A frame is a
//! type (1), a length (2) and a body. All numbers are big-endian.

use crate::continuation::{
    ACCOUNT_HEAD_BYTES, CONTINUATION_BYTES, DELTA_BYTES, MAX_RUNS, ProvedRun, RUN_BYTES, RawContinuation,
    RawDelta,
};
use crate::nonce::{self, NONCE_BYTES};
use crate::user::{LEAST_OPAQUE_BYTES, MAX_OPAQUE_BYTES, MAX_REQUEST, OVERHEAD_BYTES};

/// Version byte; also tells our datagrams from others on the same port.
pub const VERSION: u8 = 0xd1;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 10;
/// Bytes of a response before its frames.
pub const RESPONSE_HEAD_BYTES: usize = HEADER_BYTES + 4 + CONTINUATION_BYTES + NONCE_BYTES;
/// Bytes of a response before its frames whose continuation is told by what differs.
pub const DELTA_HEAD_BYTES: usize = HEADER_BYTES + 4 + DELTA_BYTES + NONCE_BYTES;
/// Bytes of a frame's type and length.
pub const FRAME_HEAD_BYTES: usize = 3;
/// Bytes of a data frame besides its data.
pub const DATA_FRAME_BYTES: usize = FRAME_HEAD_BYTES + 8;
/// Smallest datagram that counts as padded: to a client that proves nothing a server sends three times its size
/// (RFC 9000 §8.1 uses the same figures).
pub const PADDED_BYTES: usize = 1200;
/// Longest packet that answers a timeout after the first [`LONG_ATTEMPTS`] in a row, in bytes: with an envelope and
/// headers it still fits the smallest path of IPv6 (RFC 8200 §5). Longer ones may be what was lost.
pub const SHORT_BYTES: u16 = 1120;
/// Attempts of a timeout that are answered as any request is: a packet or two are more often lost in a full queue.
pub const LONG_ATTEMPTS: u32 = 2;

/// Longest packet, in bytes, that asks for or answers this attempt (from 1) of a timeout.
#[must_use]
pub fn most_bytes_of_attempt(attempt: u32) -> u16 {
    if attempt > LONG_ATTEMPTS { SHORT_BYTES } else { u16::MAX }
}
/// Runs of an account beside which a request has room for a range.
const RUNS_BESIDE_A_RANGE: usize = 4;
/// Smallest limit on datagrams that a client may announce: a request with some runs, one range and a user continuation
/// with [`LEAST_OPAQUE_BYTES`] fits into one, and so does a response with such a continuation.
pub const MIN_DATAGRAM_BYTES: u16 = (HEADER_BYTES
    + 4
    + Account::wire_bytes(RUNS_BESIDE_A_RANGE)
    + FRAME_HEAD_BYTES
    + 1
    + WANT_BYTES
    + OVERHEAD_BYTES
    + LEAST_OPAQUE_BYTES) as u16;
/// Request and input consumed, before an input continuation.
const INPUT_CONTINUATION_HEAD_BYTES: usize = 12;
/// Added to that limit where the client takes CUBIC, see [`crate::cubic`].
pub const CUBIC_WANTED: u16 = 0x8000;
/// Most ranges that one request may ask for.
pub const MAX_WANTS: usize = 64;
/// Most bytes of a user continuation on the wire.
pub const MAX_USER_BYTES: usize = OVERHEAD_BYTES + MAX_OPAQUE_BYTES;

/// Why a datagram is refused before anything in it is believed; always the sender's fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum WireError {
    /// The datagram ends before what its fields announce.
    #[error("truncated {what}")]
    Truncated {
        /// What is incomplete.
        what: &'static str,
    },
    /// Not this protocol, or another version of it.
    #[error("version byte {version:#04x} instead of {VERSION:#04x}")]
    Version {
        /// The byte found.
        version: u8,
    },
    /// A kind that the receiver does not take.
    #[error("datagram kind {kind:#04x} is unknown here")]
    Kind {
        /// The byte found.
        kind: u8,
    },
    /// A frame type that the receiver does not take.
    #[error("frame type {frame:#04x} is unknown here")]
    Frame {
        /// The byte found.
        frame: u8,
    },
    /// A count or number out of its bounds.
    #[error("{what} {value} is out of bounds")]
    Bounds {
        /// Which field.
        what: &'static str,
        /// The value found.
        value: u64,
    },
}

/// What a request asks of the transport.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Ask {
    /// The paper's SYN: a connection, and data with it.
    Open {
        /// Largest datagram, in bytes, that the client takes, with [`CUBIC_WANTED`] or not.
        datagram_bytes: u16,
    },
    /// Acknowledges the last `group` packets of the account and asks for what they release.
    Continue {
        /// Continuation and account.
        account: Account,
        /// Packets acknowledged.
        group: u8,
    },
    /// The client's retransmission timer went off.
    Timeout {
        /// Continuation and account.
        account: Account,
        /// Attempt, from 1.
        attempt: u8,
    },
    /// The client is done; nothing answers.
    Close {
        /// Continuation and account.
        account: Account,
    },
}

/// A continuation and the proof of what was received in its era: 75 + 12·m bytes on the wire with the argument byte.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Account {
    /// The continuation of the newest packet acknowledged.
    pub continuation: RawContinuation,
    /// Milliseconds that the client held the continuation; the server takes them off the round-trip time.
    pub held_ms: u16,
    /// Runs of the era's packets up to that one.
    pub runs: Vec<ProvedRun>,
}

/// A range of output that the client wants in one packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Want<'a> {
    /// First sequence number.
    pub sequence: u64,
    /// Bytes wanted; fewer may come.
    pub length: u32,
    /// The output continuation that makes them.
    pub continuation: &'a [u8],
}

/// Input of one request: bytes from the client to the application.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Input<'a> {
    /// Number of the request.
    pub request: u32,
    /// Offset of the first byte of `data` in the request's input.
    pub offset: u64,
    /// Whether the input ends with `data`.
    pub last: bool,
    /// The newest input continuation of the request, or nothing before the first.
    pub continuation: &'a [u8],
    /// The bytes.
    pub data: &'a [u8],
}

/// A datagram from a client.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Request<'a> {
    /// Chosen by the client, echoed in every answer.
    pub connection: u64,
    /// The client's clock in microseconds modulo 2³², echoed in every answer.
    pub timestamp_us: u32,
    /// What is asked of the transport.
    pub ask: Ask,
    /// Input frames in order.
    pub inputs: Vec<Input<'a>>,
    /// Wanted ranges in order: the n-th is answered in the n-th released packet.
    pub wants: Vec<Want<'a>>,
}

const KIND_OPEN: u8 = 0x01;
const KIND_CONTINUE: u8 = 0x02;
const KIND_TIMEOUT: u8 = 0x03;
const KIND_CLOSE: u8 = 0x04;
const KIND_RESPONSE: u8 = 0x81;
const KIND_REFUSED: u8 = 0x82;
const KIND_DELTA: u8 = 0x83;
const KIND_SUCCESSOR: u8 = 0x84;

const FRAME_PADDING: u8 = 0x00;
const FRAME_INPUT: u8 = 0x01;
const FRAME_WANTS: u8 = 0x02;
const FRAME_DATA: u8 = 0x11;
const FRAME_OUTPUT_CONTINUATION: u8 = 0x12;
const FRAME_INPUT_CONTINUATION: u8 = 0x13;
const FRAME_SKIP: u8 = 0x14;
const FRAME_RESET: u8 = 0x15;
const FRAME_WAITS: u8 = 0x16;

const WANT_BYTES: usize = 12;
const INPUT_HEAD_BYTES: usize = 15;

/// Reads big-endian fields off the front of a slice.
struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], WireError> {
        let (head, rest) =
            self.rest.split_at_checked(length).ok_or(WireError::Truncated { what: self.what })?;
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    fn u8(&mut self) -> Result<u8, WireError> {
        Ok(u8::from_be_bytes(self.array()?))
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// The next frame's type and body; `None` at the end.
    fn frame(&mut self) -> Result<Option<(u8, Reader<'a>)>, WireError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        self.what = "frame";
        let kind = self.u8()?;
        let length = self.u16()?.into();
        Ok(Some((kind, Reader { rest: self.take(length)?, what: "frame body" })))
    }
}

fn header<'a>(datagram: &'a [u8]) -> Result<(u8, u64, Reader<'a>), WireError> {
    let mut reader = Reader { rest: datagram, what: "header" };
    let version = reader.u8()?;
    if version != VERSION {
        return Err(WireError::Version { version });
    }
    Ok((reader.u8()?, reader.u64()?, reader))
}

fn request_number(value: u32) -> Result<u32, WireError> {
    if value > MAX_REQUEST {
        return Err(WireError::Bounds { what: "request number", value: value.into() });
    }
    Ok(value)
}

impl Account {
    /// Bytes on the wire, the argument byte and the time held included.
    #[must_use]
    pub const fn wire_bytes(runs: usize) -> usize {
        2 + CONTINUATION_BYTES + ACCOUNT_HEAD_BYTES + runs * RUN_BYTES
    }

    fn read(reader: &mut Reader<'_>) -> Result<(Self, u8), WireError> {
        reader.what = "account";
        let held_ms = reader.u16()?;
        let continuation = reader.array()?;
        let count = usize::from(reader.u8()?);
        let argument = reader.u8()?;
        if count == 0 || count > MAX_RUNS {
            return Err(WireError::Bounds { what: "number of runs", value: count as u64 });
        }
        let runs = (0..count)
            .map(|_| Ok(ProvedRun::from_bytes(&reader.array()?)))
            .collect::<Result<_, WireError>>()?;
        Ok((Self { continuation, held_ms, runs }, argument))
    }

    fn write(&self, argument: u8, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.held_ms.to_be_bytes());
        out.extend_from_slice(&self.continuation);
        out.extend_from_slice(&[self.runs.len() as u8, argument]);
        for run in &self.runs {
            out.extend_from_slice(&run.to_bytes());
        }
    }
}

impl<'a> Request<'a> {
    /// Reads a client's datagram.
    pub fn decode(datagram: &'a [u8]) -> Result<Self, WireError> {
        let (kind, connection, mut reader) = header(datagram)?;
        if !(KIND_OPEN..=KIND_CLOSE).contains(&kind) {
            return Err(WireError::Kind { kind });
        }
        let timestamp_us = reader.u32()?;
        let ask = if kind == KIND_OPEN {
            let datagram_bytes = reader.u16()?;
            if datagram_bytes & !CUBIC_WANTED < MIN_DATAGRAM_BYTES {
                return Err(WireError::Bounds { what: "datagram size", value: datagram_bytes.into() });
            }
            Ask::Open { datagram_bytes }
        } else {
            let (account, argument) = Account::read(&mut reader)?;
            match kind {
                KIND_CONTINUE => Ask::Continue { account, group: argument },
                KIND_TIMEOUT => Ask::Timeout { account, attempt: argument },
                _ => Ask::Close { account },
            }
        };
        let mut request = Self { connection, timestamp_us, ask, inputs: Vec::new(), wants: Vec::new() };
        while let Some((frame, body)) = reader.frame()? {
            request.read_frame(frame, body)?;
        }
        Ok(request)
    }

    fn read_frame(&mut self, frame: u8, mut body: Reader<'a>) -> Result<(), WireError> {
        match frame {
            FRAME_PADDING => {}
            FRAME_INPUT => {
                let request = request_number(body.u32()?)?;
                let offset = body.u64()?;
                let last = body.u8()? & 1 == 1;
                let length = usize::from(body.u16()?);
                if length > MAX_USER_BYTES || self.inputs.len() == MAX_WANTS {
                    return Err(WireError::Bounds {
                        what: "input continuation length",
                        value: length as u64,
                    });
                }
                let continuation = body.take(length)?;
                self.inputs.push(Input { request, offset, last, continuation, data: body.rest });
            }
            FRAME_WANTS => {
                let count = usize::from(body.u8()?);
                if self.wants.len() + count > MAX_WANTS {
                    return Err(WireError::Bounds { what: "number of ranges", value: count as u64 });
                }
                let mut ranges = Reader { rest: body.take(count * WANT_BYTES)?, what: "ranges" };
                if body.rest.len() > MAX_USER_BYTES {
                    let value = body.rest.len() as u64;
                    return Err(WireError::Bounds { what: "output continuation length", value });
                }
                for _ in 0..count {
                    let (sequence, length) = (ranges.u64()?, ranges.u32()?);
                    self.wants.push(Want { sequence, length, continuation: body.rest });
                }
            }
            _ => return Err(WireError::Frame { frame }),
        }
        Ok(())
    }

    /// Appends the datagram's header and account; frames follow with [`write_input`], [`write_wants`], [`pad`].
    pub fn encode_head(connection: u64, timestamp_us: u32, ask: &Ask, out: &mut Vec<u8>) {
        let kind = match ask {
            Ask::Open { .. } => KIND_OPEN,
            Ask::Continue { .. } => KIND_CONTINUE,
            Ask::Timeout { .. } => KIND_TIMEOUT,
            Ask::Close { .. } => KIND_CLOSE,
        };
        out.extend_from_slice(&[VERSION, kind]);
        out.extend_from_slice(&connection.to_be_bytes());
        out.extend_from_slice(&timestamp_us.to_be_bytes());
        match ask {
            Ask::Open { datagram_bytes } => out.extend_from_slice(&datagram_bytes.to_be_bytes()),
            Ask::Continue { account, group } => account.write(*group, out),
            Ask::Timeout { account, attempt } => account.write(*attempt, out),
            Ask::Close { account } => account.write(0, out),
        }
    }
}

fn frame(kind: u8, out: &mut Vec<u8>, body: impl FnOnce(&mut Vec<u8>)) {
    let at = out.len();
    out.extend_from_slice(&[kind, 0, 0]);
    body(out);
    let length = (out.len() - at - FRAME_HEAD_BYTES) as u16;
    out[at + 1..at + 3].copy_from_slice(&length.to_be_bytes());
}

/// Bytes of an input frame besides its data.
#[must_use]
pub fn input_overhead(continuation: &[u8]) -> usize {
    FRAME_HEAD_BYTES + INPUT_HEAD_BYTES + continuation.len()
}

/// Appends an input frame.
pub fn write_input(input: &Input<'_>, out: &mut Vec<u8>) {
    frame(FRAME_INPUT, out, |out| {
        out.extend_from_slice(&input.request.to_be_bytes());
        out.extend_from_slice(&input.offset.to_be_bytes());
        out.push(input.last.into());
        out.extend_from_slice(&(input.continuation.len() as u16).to_be_bytes());
        out.extend_from_slice(input.continuation);
        out.extend_from_slice(input.data);
    });
}

/// Bytes that `count` ranges of one continuation take.
#[must_use]
pub fn wants_bytes(count: usize, continuation: &[u8]) -> usize {
    FRAME_HEAD_BYTES + 1 + count * WANT_BYTES + continuation.len()
}

/// Appends ranges (sequence number, length) of one output continuation; at most [`MAX_WANTS`].
pub fn write_wants(ranges: &[(u64, u32)], continuation: &[u8], out: &mut Vec<u8>) {
    frame(FRAME_WANTS, out, |out| {
        out.push(ranges.len() as u8);
        for (sequence, length) in ranges {
            out.extend_from_slice(&sequence.to_be_bytes());
            out.extend_from_slice(&length.to_be_bytes());
        }
        out.extend_from_slice(continuation);
    });
}

/// Pads a datagram with a frame to `length` bytes, if at least a frame's head is missing.
pub fn pad(length: usize, out: &mut Vec<u8>) {
    if out.len() + FRAME_HEAD_BYTES <= length {
        frame(FRAME_PADDING, out, |out| out.resize(length, 0));
    }
}

/// A frame of a response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Frame<'a> {
    /// Output.
    Data {
        /// Sequence number of the first byte.
        sequence: u64,
        /// The bytes.
        data: &'a [u8],
    },
    /// A user continuation to ask for more output with.
    OutputContinuation {
        /// The continuation, see [`UserContinuation`](crate::user::UserContinuation).
        continuation: &'a [u8],
    },
    /// How much input was consumed, and what to send the rest with.
    InputContinuation {
        /// Number of the request.
        request: u32,
        /// Input bytes consumed from the start.
        consumed: u64,
        /// The continuation.
        continuation: &'a [u8],
    },
    /// No output comes from `from` to the end of its region (Trickles §5.2): the request's output ends there.
    Skip {
        /// First sequence number that has no byte.
        from: u64,
    },
    /// The server has input of the request, and waits for what answers it: the packet comes again then.
    Waits {
        /// The request.
        request: u32,
    },
    /// The request failed.
    Reset {
        /// Number of the request.
        request: u32,
        /// Why; the application's own code.
        code: u16,
    },
}

impl Frame<'_> {
    /// Bytes that the frame takes on the wire.
    #[must_use]
    pub fn wire_bytes(&self) -> usize {
        FRAME_HEAD_BYTES
            + match self {
                Frame::Data { data, .. } => 8 + data.len(),
                Frame::OutputContinuation { continuation } => continuation.len(),
                Frame::InputContinuation { continuation, .. } => {
                    INPUT_CONTINUATION_HEAD_BYTES + continuation.len()
                }
                Frame::Skip { .. } => 8,
                Frame::Reset { .. } => 6,
                Frame::Waits { .. } => 4,
            }
    }

    /// Appends the frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Frame::Data { sequence, data } => frame(FRAME_DATA, out, |out| {
                out.extend_from_slice(&sequence.to_be_bytes());
                out.extend_from_slice(data);
            }),
            Frame::OutputContinuation { continuation } => {
                frame(FRAME_OUTPUT_CONTINUATION, out, |out| out.extend_from_slice(continuation));
            }
            Frame::InputContinuation { request, consumed, continuation } => {
                frame(FRAME_INPUT_CONTINUATION, out, |out| {
                    out.extend_from_slice(&request.to_be_bytes());
                    out.extend_from_slice(&consumed.to_be_bytes());
                    out.extend_from_slice(continuation);
                });
            }
            Frame::Skip { from } => frame(FRAME_SKIP, out, |out| out.extend_from_slice(&from.to_be_bytes())),
            Frame::Waits { request } => {
                frame(FRAME_WAITS, out, |out| out.extend_from_slice(&request.to_be_bytes()));
            }
            Frame::Reset { request, code } => frame(FRAME_RESET, out, |out| {
                out.extend_from_slice(&request.to_be_bytes());
                out.extend_from_slice(&code.to_be_bytes());
            }),
        }
    }
}

/// Why a server refuses an authentic request; the client opens a new connection and goes on with its user
/// continuations.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RefusalCode {
    /// The continuation is older than the freshness horizon.
    Stale = 1,
    /// Its key epoch is not accepted (any more, or by this replica).
    UnknownEpoch = 2,
    /// Its MAC is wrong: the client's address is another one by now, or it is forged.
    OtherAddress = 3,
}

/// A datagram from a server.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Answer<'a> {
    /// One packet of a trickle.
    Response {
        /// Echo of the request's connection id.
        connection: u64,
        /// Echo of the request's timestamp.
        timestamp_us: u32,
        /// Continuation of the packet.
        continuation: RawContinuation,
        /// Nonce of the packet.
        nonce: u64,
        /// Its frames in order.
        frames: Vec<Frame<'a>>,
    },
    /// One packet of a trickle in the era of the request that it answers, or in one that begins with it.
    Delta {
        /// Echo of the request's connection id.
        connection: u64,
        /// Echo of the request's timestamp.
        timestamp_us: u32,
        /// What differs in the packet's continuation.
        delta: RawDelta,
        /// Whether it differs from one of the era before.
        successor: bool,
        /// Nonce of the packet.
        nonce: u64,
        /// Its frames in order.
        frames: Vec<Frame<'a>>,
    },
    /// The transport continuation is not usable any more.
    Refused {
        /// Echo of the request's connection id.
        connection: u64,
        /// Why.
        code: RefusalCode,
    },
}

impl<'a> Answer<'a> {
    /// Reads a server's datagram.
    pub fn decode(datagram: &'a [u8]) -> Result<Self, WireError> {
        let (kind, connection, mut reader) = header(datagram)?;
        match kind {
            KIND_RESPONSE => {
                reader.what = "response";
                let timestamp_us = reader.u32()?;
                let continuation = reader.array()?;
                let nonce = nonce::from_bytes(reader.array()?);
                let frames = Self::read_frames(reader)?;
                Ok(Self::Response { connection, timestamp_us, continuation, nonce, frames })
            }
            KIND_DELTA | KIND_SUCCESSOR => {
                reader.what = "response";
                let timestamp_us = reader.u32()?;
                let delta = reader.array()?;
                let nonce = nonce::from_bytes(reader.array()?);
                let frames = Self::read_frames(reader)?;
                let successor = kind == KIND_SUCCESSOR;
                Ok(Self::Delta { connection, timestamp_us, delta, successor, nonce, frames })
            }
            KIND_REFUSED => {
                let code = match reader.u8()? {
                    1 => RefusalCode::Stale,
                    2 => RefusalCode::UnknownEpoch,
                    3 => RefusalCode::OtherAddress,
                    other => return Err(WireError::Bounds { what: "refusal code", value: other.into() }),
                };
                Ok(Self::Refused { connection, code })
            }
            _ => Err(WireError::Kind { kind }),
        }
    }

    fn read_frames(mut reader: Reader<'a>) -> Result<Vec<Frame<'a>>, WireError> {
        let mut frames = Vec::new();
        while let Some((frame, body)) = reader.frame()? {
            frames.extend(Self::read_frame(frame, body)?);
        }
        Ok(frames)
    }

    fn read_frame(frame: u8, mut body: Reader<'a>) -> Result<Option<Frame<'a>>, WireError> {
        let bounded = |bytes: &'a [u8]| {
            if bytes.len() > MAX_USER_BYTES {
                let value = bytes.len() as u64;
                return Err(WireError::Bounds { what: "user continuation length", value });
            }
            Ok(bytes)
        };
        Ok(Some(match frame {
            FRAME_PADDING => return Ok(None),
            FRAME_DATA => Frame::Data { sequence: body.u64()?, data: body.rest },
            FRAME_OUTPUT_CONTINUATION => Frame::OutputContinuation { continuation: bounded(body.rest)? },
            FRAME_INPUT_CONTINUATION => Frame::InputContinuation {
                request: request_number(body.u32()?)?,
                consumed: body.u64()?,
                continuation: bounded(body.rest)?,
            },
            FRAME_SKIP => Frame::Skip { from: body.u64()? },
            FRAME_WAITS => Frame::Waits { request: request_number(body.u32()?)? },
            FRAME_RESET => Frame::Reset { request: request_number(body.u32()?)?, code: body.u16()? },
            _ => return Err(WireError::Frame { frame }),
        }))
    }

    /// Appends the head of a response; frames follow.
    pub fn encode_response_head(
        connection: u64,
        timestamp_us: u32,
        continuation: &RawContinuation,
        nonce: u64,
        out: &mut Vec<u8>,
    ) {
        out.extend_from_slice(&[VERSION, KIND_RESPONSE]);
        out.extend_from_slice(&connection.to_be_bytes());
        out.extend_from_slice(&timestamp_us.to_be_bytes());
        out.extend_from_slice(continuation);
        out.extend_from_slice(&nonce::to_bytes(nonce));
    }

    /// Appends the head of a response whose continuation is told by what differs, in the era or, of a `successor`, from
    /// the era before; frames follow.
    pub fn encode_delta_head(
        connection: u64,
        timestamp_us: u32,
        (delta, successor): (&RawDelta, bool),
        nonce: u64,
        out: &mut Vec<u8>,
    ) {
        out.extend_from_slice(&[VERSION, if successor { KIND_SUCCESSOR } else { KIND_DELTA }]);
        out.extend_from_slice(&connection.to_be_bytes());
        out.extend_from_slice(&timestamp_us.to_be_bytes());
        out.extend_from_slice(delta);
        out.extend_from_slice(&nonce::to_bytes(nonce));
    }

    /// Appends a refusal: shorter than any request, so that it amplifies nothing.
    pub fn encode_refused(connection: u64, code: RefusalCode, out: &mut Vec<u8>) {
        out.extend_from_slice(&[VERSION, KIND_REFUSED]);
        out.extend_from_slice(&connection.to_be_bytes());
        out.push(code as u8);
    }
}
