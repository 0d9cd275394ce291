//! A server over Trickles that marks a JPEG picture for each client (Trickles §6.2): the picture is coded anew while it is
//! sent, with a bit of the client's name in the brightness of each block.
//!
//! Where a block begins depends, to the bit, on all blocks before it. So that nothing has to be kept, each output
//! continuation says where in both bit streams its part begins; to find out where the next one does, the server codes the
//! part and discards what comes out.

#![forbid(unsafe_code)]

mod bits;
mod jpeg;

pub use jpeg::{Jpeg, JpegError, Mark};

use jpeg::Position;
use std::sync::Arc;
use tidegate_trickles::server::{Application, Event, EventInput, EventKind, EventWant, Minisocket};

/// Longest name of a client in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Bytes of output after which a part ends with the block.
const PART_BYTES: u64 = 12_000;
/// Code of a reset: the name is empty or too long.
const BAD_NAME: u16 = 400;

/// The application: input is a client's name, output the picture marked for it.
#[derive(Clone, Debug)]
pub struct Watermark {
    picture: Arc<Jpeg>,
}

impl Watermark {
    /// Serves `picture`.
    #[must_use]
    pub fn new(picture: Arc<Jpeg>) -> Self {
        Self { picture }
    }

    fn answer_input(&self, input: &EventInput<'_>, packet: usize, socket: &mut Minisocket) {
        let mut name = input.opaque.to_vec();
        name.extend_from_slice(input.data);
        // Where there is no room for an answer, the client asks again.
        if name.len() > MAX_NAME_BYTES || (input.last && name.is_empty()) {
            let _ = socket.reset(packet, input.request, BAD_NAME);
        } else if !input.last {
            let consumed = input.consumed + input.data.len() as u64;
            let _ = socket.set_input_continuation(packet, input.request, consumed, &name);
        } else {
            self.begin_part(packet, input.request, 0, &self.picture.start(), &name, socket);
        }
    }

    /// Says where the part at `position` ends, and what to ask for it with.
    fn begin_part(
        &self,
        packet: usize,
        request: u32,
        start: u64,
        position: &Position,
        name: &[u8],
        socket: &mut Minisocket,
    ) {
        let (length, _) = self.picture.part(position, &Mark::of(name), PART_BYTES, &mut |_| {});
        let mut opaque = position.to_bytes().to_vec();
        opaque.extend_from_slice(name);
        // Without room the client asks again.
        let _ = socket.set_output_continuation(packet, request, (start, start + length), &opaque);
    }

    fn answer_want(&self, packet: usize, want: &EventWant<'_>, socket: &mut Minisocket) {
        let Some((position, name)) = Position::from_bytes(want.opaque) else { return };
        let mark = Mark::of(name);
        let (from, room) = ((want.offset - want.valid_start) as usize, socket.room(packet));
        let length = room.min(want.length as usize);
        let (mut at, mut bytes) = (0, Vec::with_capacity(length));
        let (_, next) = self.picture.part(&position, &mark, PART_BYTES, &mut |byte| {
            if at >= from && bytes.len() < length {
                bytes.push(byte);
            }
            at += 1;
        });
        socket.send(packet, want.request, want.offset, &bytes);
        if want.offset + (bytes.len() as u64) < want.valid_end {
            return;
        }
        // The part's last packet says how it goes on; one that has no room for that is asked for again.
        match next {
            Some(next) => self.begin_part(packet, want.request, want.valid_end, &next, name, socket),
            None => {
                let _ = socket.end(packet, want.request, want.valid_end);
            }
        }
    }
}

impl Application for Watermark {
    fn handle(&mut self, event: &Event<'_>, socket: &mut Minisocket) {
        if event.kind == EventKind::Close {
            return;
        }
        for (packet, want) in event.wants.iter().enumerate() {
            self.answer_want(packet, want, socket);
        }
        for (input, packets) in event.inputs_with_packets(socket.packets()) {
            self.answer_input(input, packets.start, socket);
        }
    }
}
