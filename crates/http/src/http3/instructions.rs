//! A client's QPACK instructions, where there is no dynamic table that they could be about (RFC 9204 §4.3, §4.4).

use super::error::ErrorCode;
use super::varint;

/// Reads the stream of a client's encoder after its type: it may say, and say again, that the dynamic table has no
/// bytes (§4.3.1). There is nothing to insert into a table of no capacity (§3.2.3).
#[derive(Debug, Default)]
pub struct EncoderStream {
    instructions: u64,
}

/// Set Dynamic Table Capacity, to 0.
const NO_CAPACITY: u8 = 0b0010_0000;

impl EncoderStream {
    /// Takes what came next.
    ///
    /// # Errors
    /// The connection must be closed with this.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), ErrorCode> {
        if bytes.iter().any(|byte| *byte != NO_CAPACITY) {
            return Err(ErrorCode::QpackEncoderStreamError);
        }
        self.instructions = self.instructions.saturating_add(bytes.len() as u64);
        Ok(())
    }

    /// Instructions so far; none of them asks for anything.
    pub fn instructions(&self) -> u64 {
        self.instructions
    }
}

/// Reads the stream of a client's decoder after its type: streams may be cancelled (§4.4.2); there is no section to be
/// acknowledged (§4.4.1), as none refers to a table, and no insertion (§4.4.3).
#[derive(Debug, Default)]
pub struct DecoderStream {
    /// The number of the stream so far, and by how many bits its next byte is shifted.
    partial: Option<(u64, u32)>,
    instructions: u64,
}

impl DecoderStream {
    /// Takes what came next.
    ///
    /// # Errors
    /// The connection must be closed with this.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), ErrorCode> {
        const PREFIX: u8 = 0b0011_1111;
        for &byte in bytes {
            self.partial = match self.partial {
                None if byte >> 6 != 1 => return Err(ErrorCode::QpackDecoderStreamError),
                None if byte & PREFIX < PREFIX => None,
                None => Some((PREFIX.into(), 0)),
                Some((value, shift)) => {
                    let value = value + (u64::from(byte & 0x7f) << shift);
                    // RFC 9000 §2.1: no stream has such a number. A shift of 56 leaves all bits of the byte in place.
                    if value > varint::MAX || (shift == 56 && byte & 0x80 != 0) {
                        return Err(ErrorCode::QpackDecoderStreamError);
                    }
                    (byte & 0x80 != 0).then_some((value, shift + 7))
                }
            };
            if self.partial.is_none() {
                self.instructions = self.instructions.saturating_add(1);
            }
        }
        Ok(())
    }

    /// Instructions so far; none of them asks for anything.
    pub fn instructions(&self) -> u64 {
        self.instructions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoder_can_only_say_that_there_is_no_table() {
        let mut stream = EncoderStream::default();
        stream.push(&[0x20, 0x20]).unwrap();
        stream.push(&[]).unwrap();
        stream.push(&[0x20]).unwrap();
        assert_eq!(stream.instructions(), 3);
        // Another capacity, an insertion by either form of name, a duplicate.
        for bytes in [&[0x21][..], &[0x3f, 0], &[0xc0, 0], &[0x41, b'a', 0], &[0x00], &[0x20, 0x80]] {
            assert_eq!(EncoderStream::default().push(bytes), Err(ErrorCode::QpackEncoderStreamError));
        }
    }

    #[test]
    fn a_decoder_can_only_cancel_streams() {
        let mut stream = DecoderStream::default();
        stream.push(&[0x40, 0x7e, 0x7f]).unwrap();
        assert_eq!(stream.instructions(), 2);
        stream.push(&[0x80]).unwrap();
        stream.push(&[0x01, 0x44]).unwrap();
        assert_eq!(stream.instructions(), 4);
        for bytes in [&[0x80][..], &[0xff], &[0x00], &[0x01], &[0x7f, 0x80, 0x00, 0x80]] {
            assert_eq!(DecoderStream::default().push(bytes), Err(ErrorCode::QpackDecoderStreamError));
        }
    }

    #[test]
    fn numbers_that_no_stream_has_are_refused() {
        // 63 more makes 2^62 - 1, the last stream.
        let mut last = vec![0x7f];
        let mut rest = varint::MAX - 63;
        while rest >= 0x80 {
            last.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        last.push(rest as u8);
        assert_eq!(DecoderStream::default().push(&last), Ok(()));
        last[1] += 1;
        assert_eq!(DecoderStream::default().push(&last), Err(ErrorCode::QpackDecoderStreamError));
        let endless = [&[0x7f][..], &[0x80; 9]].concat();
        assert_eq!(DecoderStream::default().push(&endless), Err(ErrorCode::QpackDecoderStreamError));
        assert_eq!(DecoderStream::default().push(&endless[..9]), Ok(()));
    }
}
