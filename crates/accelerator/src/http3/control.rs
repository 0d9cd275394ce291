//! Streams in one direction: what the client says of the connection (RFC 9114 §6.2).

use std::cell::Cell;
use std::rc::Rc;

use quinn::{ReadError, RecvStream};
use tidegate_http::http3::{ControlReader, DecoderStream, EncoderStream, ErrorCode, stream_type, varint};

use crate::http3::connection::{Connection, code};

/// Bytes that are taken from such a stream at once.
const PIECE_BYTES: usize = 4 * 1024;

/// Which of them the client has opened.
#[derive(Default)]
pub(super) struct Opened {
    control: Cell<bool>,
    encoder: Cell<bool>,
    decoder: Cell<bool>,
}

/// What a stream is for.
enum Reader {
    Control(ControlReader),
    Encoder(EncoderStream),
    Decoder(DecoderStream),
}

impl Reader {
    /// `None`: it means nothing here.
    fn of(kind: u64, opened: &Opened) -> Result<Option<Self>, ErrorCode> {
        let (reader, is_open) = match kind {
            stream_type::CONTROL => (Self::Control(ControlReader::default()), &opened.control),
            stream_type::QPACK_ENCODER => (Self::Encoder(EncoderStream::default()), &opened.encoder),
            stream_type::QPACK_DECODER => (Self::Decoder(DecoderStream::default()), &opened.decoder),
            // Only servers push.
            stream_type::PUSH => return Err(ErrorCode::StreamCreationError),
            _ => return Ok(None),
        };
        match is_open.replace(true) {
            false => Ok(Some(reader)),
            true => Err(ErrorCode::StreamCreationError),
        }
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), ErrorCode> {
        match self {
            Self::Control(reader) => reader.push(bytes),
            Self::Encoder(reader) => reader.push(bytes),
            Self::Decoder(reader) => reader.push(bytes),
        }
    }

    /// How much has come that asks for nothing.
    fn idle(&self) -> u64 {
        match self {
            Self::Control(reader) => reader.idle_frames(),
            Self::Encoder(reader) => reader.instructions(),
            Self::Decoder(reader) => reader.instructions(),
        }
    }
}

/// Reads a stream to its end, which is the connection's end if it is one that has to stay (§6.2.1).
pub(super) async fn read(connection: Rc<Connection>, mut stream: RecvStream) {
    connection.idle(1);
    let mut start = Vec::new();
    let mut reader = None;
    let mut idle = 0;
    loop {
        let chunk = match stream.read_chunk(PIECE_BYTES, true).await {
            Ok(Some(chunk)) => chunk,
            Ok(None) | Err(ReadError::Reset(_)) => break,
            // With a connection its streams are over, which is nobody's fault.
            Err(_) => return,
        };
        let mut bytes = &*chunk.bytes;
        while let (None, [first, rest @ ..]) = (&reader, bytes) {
            start.push(*first);
            bytes = rest;
            let Some((kind, _)) = varint::read(&start) else { continue };
            match Reader::of(kind, &connection.opened) {
                Ok(Some(known)) => reader = Some(known),
                Ok(None) => {
                    let _ = stream.stop(code(ErrorCode::StreamCreationError));
                    return;
                }
                Err(fault) => return connection.fail(fault),
            }
        }
        let Some(reader) = &mut reader else { continue };
        if let Err(fault) = reader.push(bytes) {
            return connection.fail(fault);
        }
        connection.idle(reader.idle() - idle);
        idle = reader.idle();
    }
    if reader.is_some() {
        connection.fail(ErrorCode::ClosedCriticalStream);
    }
}
