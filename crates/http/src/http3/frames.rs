//! Frames and the streams they are on (RFC 9114 §6.2, §7).

use super::varint;

/// Types of frames (RFC 9114 §7.2).
pub mod frame_type {
    /// Content.
    pub const DATA: u64 = 0x0;
    /// A field section.
    pub const HEADERS: u64 = 0x1;
    /// A push that is not wanted.
    pub const CANCEL_PUSH: u64 = 0x3;
    /// What the peer can do.
    pub const SETTINGS: u64 = 0x4;
    /// A request that a server answers without being asked.
    pub const PUSH_PROMISE: u64 = 0x5;
    /// The connection will end.
    pub const GOAWAY: u64 = 0x7;
    /// How many pushes are allowed.
    pub const MAX_PUSH_ID: u64 = 0xd;
}

/// What a stream in one direction begins with (RFC 9114 §6.2, RFC 9204 §4.2).
pub mod stream_type {
    /// Frames about the connection.
    pub const CONTROL: u64 = 0x0;
    /// A response that nobody asked for; only servers have one.
    pub const PUSH: u64 = 0x1;
    /// Instructions of the peer's encoder.
    pub const QPACK_ENCODER: u64 = 0x2;
    /// Instructions of the peer's decoder.
    pub const QPACK_DECODER: u64 = 0x3;
}

/// The setting for the greatest field section that its sender takes (RFC 9114 §7.2.4.1).
const MAX_FIELD_SECTION_SIZE: u64 = 0x6;

/// Whether the type is one of HTTP/2 that HTTP/3 has no use for: whoever sends it takes this for HTTP/2 (RFC 9114
/// §7.2.8).
pub const fn is_reserved_frame_type(kind: u64) -> bool {
    matches!(kind, 0x2 | 0x6 | 0x8 | 0x9)
}

/// What comes before a frame's payload (RFC 9114 §7.1).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FrameHeader {
    /// See [`frame_type`].
    pub kind: u64,
    /// Length of the payload in bytes.
    pub length: u64,
}

impl FrameHeader {
    /// The greatest number of bytes of one.
    pub const MOST_BYTES: usize = 2 * varint::MOST_BYTES;

    /// The header that `bytes` begin with and how many of them it takes; `None` if some of those are still to come.
    #[inline]
    pub fn read(bytes: &[u8]) -> Option<(Self, usize)> {
        let (kind, taken) = varint::read(bytes)?;
        let (length, more) = varint::read(bytes.get(taken..)?)?;
        Some((Self { kind, length }, taken + more))
    }

    /// Appends it.
    #[inline]
    pub fn write(self, out: &mut Vec<u8>) {
        varint::write(self.kind, out);
        varint::write(self.length, out);
    }
}

/// Appends what our control stream begins with: its type, and that we take field sections up to this size and have no
/// dynamic table (RFC 9204 §5: which is what it means to say nothing of it).
pub fn write_settings(max_field_section_size: u64, out: &mut Vec<u8>) {
    varint::write(stream_type::CONTROL, out);
    let length = varint::written_len(MAX_FIELD_SECTION_SIZE) + varint::written_len(max_field_section_size);
    FrameHeader { kind: frame_type::SETTINGS, length: length as u64 }.write(out);
    varint::write(MAX_FIELD_SECTION_SIZE, out);
    varint::write(max_field_section_size, out);
}

/// Appends a frame that says that requests on this stream and later ones are not looked at (RFC 9114 §5.2).
pub fn write_goaway(stream_id: u64, out: &mut Vec<u8>) {
    FrameHeader { kind: frame_type::GOAWAY, length: varint::written_len(stream_id) as u64 }.write(out);
    varint::write(stream_id, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_when_all_of_it_is_there() {
        let header = FrameHeader { kind: 0x21, length: 70_000 };
        let mut bytes = Vec::new();
        header.write(&mut bytes);
        for cut in 0..bytes.len() {
            assert_eq!(FrameHeader::read(&bytes[..cut]), None);
        }
        assert_eq!(FrameHeader::read(&bytes), Some((header, bytes.len())));
        bytes.push(0);
        assert_eq!(FrameHeader::read(&bytes), Some((header, bytes.len() - 1)));
    }

    #[test]
    fn settings_say_the_greatest_section_and_nothing_of_a_table() {
        let mut out = Vec::new();
        write_settings(65_536, &mut out);
        assert_eq!(out, [0x00, 0x04, 0x05, 0x06, 0x80, 0x01, 0x00, 0x00]);
    }

    #[test]
    fn goaway_names_a_stream() {
        let mut out = Vec::new();
        write_goaway(4, &mut out);
        write_goaway(256, &mut out);
        assert_eq!(out, [0x07, 0x01, 0x04, 0x07, 0x02, 0x41, 0x00]);
    }

    #[test]
    fn types_of_http_2_are_reserved() {
        let reserved: Vec<_> = (0..0x40).filter(|kind| is_reserved_frame_type(*kind)).collect();
        assert_eq!(reserved, [0x2, 0x6, 0x8, 0x9]);
    }
}
