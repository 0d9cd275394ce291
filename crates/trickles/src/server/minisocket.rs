//! The minisocket: a client for as long as one of its packets is being answered (Trickles §3.2).

use super::{Head, Template};
use crate::continuation::{delta_of, successor_of};
use crate::keys::KeyRing;
use crate::user::{Kind, UserContinuation, region_start};
use crate::wire::{Answer, DATA_FRAME_BYTES, Frame, RESPONSE_HEAD_BYTES};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Code of a reset that the transport itself sends: the user continuation's key epoch is gone; ask anew.
pub const RESET_EXPIRED: u16 = 1;

/// The packets have no room left for a frame; the client will ask again.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("no room left in the packets of this answer")]
pub struct NoRoom;

/// The packets that congestion control allows in answer to one request, to be filled by the application.
#[derive(Clone, Debug)]
pub struct Minisocket {
    keys: Arc<KeyRing>,
    peer: SocketAddr,
    template: Template,
    /// Bytes of frames that each packet may have.
    room_bytes: usize,
    packets: Vec<Packet>,
    /// Packets before these that the request asks for and an earlier one was answered with.
    pub(super) answered_before: usize,
    /// Packets from the first on whose content the client has chosen.
    pub(super) wants: usize,
    /// Whether the packets have been sent already, without what answers inputs.
    pub(super) repeats: bool,
    /// Whether the answer begins an era after a loss.
    after_loss: bool,
}

#[derive(Clone, Debug)]
struct Packet {
    number: u64,
    /// Room for the head, then frames; nothing as long as there are none.
    datagram: Vec<u8>,
}

impl Packet {
    /// Bytes of frames, behind a head of `head_bytes`.
    fn used(&self, head_bytes: usize) -> usize {
        self.datagram.len().saturating_sub(head_bytes)
    }

    /// Where frames are put, `room_bytes` of them at most.
    fn frames(&mut self, head_bytes: usize, room_bytes: usize) -> &mut Vec<u8> {
        if self.datagram.is_empty() {
            self.datagram.reserve_exact(head_bytes + room_bytes);
            self.datagram.resize(head_bytes, 0);
        }
        &mut self.datagram
    }
}

impl Minisocket {
    pub(super) fn new(
        keys: Arc<KeyRing>,
        peer: SocketAddr,
        template: Template,
        numbers: impl Iterator<Item = u64>,
        packet_bytes: usize,
    ) -> Self {
        let packets = numbers.map(|number| Packet { number, datagram: Vec::new() }).collect();
        let room_bytes = packet_bytes.saturating_sub(template.head.bytes());
        let after_loss = template.head == Head::Successor;
        Self {
            keys,
            peer,
            template,
            room_bytes,
            packets,
            answered_before: 0,
            wants: 0,
            repeats: false,
            after_loss,
        }
    }

    /// Says that what answers input of `request` has to be waited for, in each packet that could have it: the client gets
    /// to know whichever of them is lost.
    pub(super) fn say_waits(&mut self, request: u32) {
        let (head, room) = (self.template.head.bytes(), self.room_bytes);
        let frame = Frame::Waits { request };
        let first = self.wants.min(self.packets.len().saturating_sub(1));
        for packet in &mut self.packets[first..] {
            if packet.used(head) + frame.wire_bytes() <= room {
                frame.encode(packet.frames(head, room));
            }
        }
    }

    /// The packets have been sent. When they are again, the client may have given their era up, and then understands
    /// only whole heads.
    pub(super) fn repeat(&mut self) {
        self.repeats = true;
        self.room_bytes = (self.room_bytes + self.template.head.bytes()).saturating_sub(RESPONSE_HEAD_BYTES);
        self.template.head = Head::Full;
    }

    /// Where the packets go.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Takes note that the request has waited for the application so long. None of that is a round trip: the client's
    /// timestamp is echoed as if it had been sent so much later, and the continuations are dated now.
    pub fn waited(&mut self, held: Duration) {
        let template = &mut self.template;
        template.timestamp_us = template.timestamp_us.wrapping_add(held.as_micros() as u32);
        template.now_ms += held.as_millis() as u64;
        template.continuation.timestamp_ms = template.now_ms as u32;
    }

    /// How many packets may be sent.
    #[must_use]
    pub fn packets(&self) -> usize {
        self.packets.len()
    }

    /// Bytes of frames that an empty packet has room for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.room_bytes
    }

    /// Bytes of output that an empty packet has room for.
    #[must_use]
    pub fn output_capacity(&self) -> usize {
        self.room_bytes.saturating_sub(DATA_FRAME_BYTES)
    }

    /// Bytes of output that still fit into packet `index`.
    #[must_use]
    pub fn room(&self, index: usize) -> usize {
        let head = self.template.head.bytes();
        let used = self.packets.get(index).map_or(self.room_bytes, |packet| packet.used(head));
        self.room_bytes.saturating_sub(used).saturating_sub(DATA_FRAME_BYTES)
    }

    /// Whether packet `index` has room for frames of so many bytes, heads included.
    #[must_use]
    pub fn holds(&self, index: usize, frames_bytes: usize) -> bool {
        let head = self.template.head.bytes();
        self.packets.get(index).is_some_and(|packet| packet.used(head) + frames_bytes <= self.room_bytes)
    }

    /// Puts output of `request` from `offset` on into packet `index`; returns how many bytes went in.
    pub fn send(&mut self, index: usize, request: u32, offset: u64, data: &[u8]) -> usize {
        let length = data.len().min(self.room(index));
        if length > 0 {
            let sequence = region_start(request).saturating_add(offset);
            let frames = self.packets[index].frames(self.template.head.bytes(), self.room_bytes);
            Frame::Data { sequence, data: &data[..length] }.encode(frames);
        }
        length
    }

    /// Gives the client the means to ask for the bytes `start..end` of the output of `request`, in the first packet
    /// from `index` on that has room.
    pub fn set_output_continuation(
        &mut self,
        index: usize,
        request: u32,
        (start, end): (u64, u64),
        opaque: &[u8],
    ) -> Result<(), NoRoom> {
        let mut continuation = Vec::with_capacity(128);
        UserContinuation { kind: Kind::Output, request, start, end, opaque }
            .sign(&self.keys, &mut continuation);
        self.put(index, &Frame::OutputContinuation { continuation: &continuation })
    }

    /// Says that input of `request` was consumed up to `consumed`, and what to send the rest with.
    pub fn set_input_continuation(
        &mut self,
        index: usize,
        request: u32,
        consumed: u64,
        opaque: &[u8],
    ) -> Result<(), NoRoom> {
        let mut continuation = Vec::with_capacity(128);
        UserContinuation { kind: Kind::Input, request, start: consumed, end: consumed, opaque }
            .sign(&self.keys, &mut continuation);
        self.put(index, &Frame::InputContinuation { request, consumed, continuation: &continuation })
    }

    /// Says that the output of `request` ends at `length` (Trickles §5.2: a SKIP to the end of its region).
    pub fn end(&mut self, index: usize, request: u32, length: u64) -> Result<(), NoRoom> {
        let from = region_start(request).saturating_add(length);
        self.put(index, &Frame::Skip { from })
    }

    /// Says that `request` failed; codes under 100 are the transport's.
    pub fn reset(&mut self, index: usize, request: u32, code: u16) -> Result<(), NoRoom> {
        self.put(index, &Frame::Reset { request, code })
    }

    /// Sends nothing at all: the trickle ends, as if the packet had been lost.
    pub fn discard(&mut self) {
        self.packets.clear();
    }

    /// Says that the key epoch of a continuation for output is gone, in one of the packets by chance: the client asks for
    /// that output again and again, and one packet of an answer could be lost each time.
    pub(super) fn expire_output(&mut self, request: u32) {
        let index = self.template.continuation.era.tag as usize % self.packets.len().max(1);
        if self.reset(index, request, RESET_EXPIRED).is_err() {
            // Without room the client asks again, and is told then.
            let _ = self.reset(0, request, RESET_EXPIRED);
        }
    }

    /// The same of one for input. What answers inputs goes into other packets each time.
    pub(super) fn expire_input(&mut self, request: u32) {
        let _ = self.reset(0, request, RESET_EXPIRED);
    }

    fn put(&mut self, index: usize, frame: &Frame<'_>) -> Result<(), NoRoom> {
        let (bytes, head, room) = (frame.wire_bytes(), self.template.head.bytes(), self.room_bytes);
        let packet = self.packets.iter_mut().skip(index).find(|packet| packet.used(head) + bytes <= room);
        frame.encode(packet.ok_or(NoRoom)?.frames(head, room));
        Ok(())
    }

    /// What answers inputs begins with another of its packets each time, by chance, where something was lost: a path that
    /// loses every second packet could else lose the first of them for ever.
    fn shuffle(&mut self) {
        if !self.after_loss {
            return;
        }
        let free = self.packets.get_mut(self.wants..).unwrap_or_default();
        if free.len() > 1 {
            let mut contents: Vec<_> =
                free.iter_mut().map(|packet| std::mem::take(&mut packet.datagram)).collect();
            // Nobody can foresee an era's tag.
            contents.rotate_right(self.template.continuation.era.tag as usize % free.len());
            for (packet, content) in free.iter_mut().zip(contents) {
                packet.datagram = content;
            }
        }
    }

    /// Signs and hands out the packets.
    pub fn finish(mut self, transmit: &mut impl FnMut(&[u8])) {
        self.shuffle();
        let Template { mut continuation, now_ms, secret, connection, timestamp_us, head } = self.template;
        let mut told = Vec::with_capacity(RESPONSE_HEAD_BYTES);
        let mut nonces = secret.nonces(continuation.era.tag);
        for Packet { number, mut datagram } in self.packets {
            continuation.number = number;
            let raw = continuation.sign(self.keys.current(), self.peer, now_ms);
            let nonce = nonces.packet(number);
            let delta = match head {
                Head::Full => None,
                Head::Delta => Some((delta_of(&raw), false)),
                Head::Successor => successor_of(&raw).map(|delta| (delta, true)),
            };
            told.clear();
            match delta {
                Some((delta, successor)) => {
                    let delta = (&delta, successor);
                    Answer::encode_delta_head(connection, timestamp_us, delta, nonce, &mut told);
                }
                None => Answer::encode_response_head(connection, timestamp_us, &raw, nonce, &mut told),
            }
            let room = head.bytes().min(datagram.len());
            if room == told.len() {
                datagram[..room].copy_from_slice(&told);
            } else {
                // Without frames there was no room; nor is it long enough for a successor that no delta tells.
                drop(datagram.splice(..room, told.iter().copied()));
            }
            transmit(&datagram);
        }
    }
}
